"""Dropout of the adapters' inputs, with one mask for all layouts.

Whether element d of the input of an adapter is dropped for token t follows from the random bits of
`weft.parallel.token_keys`, so that the mask is the same in another layout, after a resume, or when
a block is recomputed.  An element is kept if its bits, as an integer, are not among the lowest
fraction p.  Backward computes the mask again, so nothing but the numbers of the tokens is saved.
Adapters of the embedding and the head have no dropout: a lookup has no input to drop, and a fused
loss reads merged weights.

*Experts.*  A row that is routed to an expert has the mask of its token, in all experts of a layer,
as if its token were dropped from before routing.  So the mask depends neither on the order of the
rows nor on the choice of the router.  The mixed numbers of the tokens are permuted like the rows,
and travel with them in expert parallelism.

*Recomputation.*  A hook hands the numbers of the tokens to each block as one more argument, so
activation checkpointing saves them with the block's input, and the recomputation of a microbatch
sees its own.

Shapes in names: B sequences, T tokens of a sequence on this rank, D inputs on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from weft.models.layers import run_function
from weft.models.moe import MoE
from weft.parallel.lora.adapted_layers import LoraLayer
from weft.parallel.token_keys import (
    TokenKeys,
    column_keys,
    element_bits,
    layer_stream,
    read_token_keys,
    rows_at_once,
    slice_tokens,
)
from weft.planning.plan import Plan
from weft.planning.shard_sizes import chunk_range


class DropoutBlock:
    """Mixed into a block's class: numbers of tokens are forward's last argument."""

    token_keys: TokenKeys
    # False if a block with its recomputation is one compiled graph.  Its input is what the model
    # has set; inside of it Dynamo allows no assignment.
    sets_token_keys: bool

    def forward(self, *args: Any) -> Any:
        """Hand the numbers to the layers, and run the block."""
        if self.sets_token_keys:
            self.token_keys.value = args[-1]
        return super().forward(*args[:-1])  # type: ignore[misc]


def add_lora_dropout(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    probability: float,
    plan: Plan,
    tp_rank: int,
    token_keys: TokenKeys,
) -> None:
    """Apply dropout as planned: see `apply_lora_dropout`."""
    one_graph = plan.is_compiled and not plan.has_graph_breaks
    apply_lora_dropout(model, blocks, probability, plan.seed, one_graph, tp_rank, token_keys)


def apply_lora_dropout(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    probability: float,
    seed: int,
    compiled_blocks: bool = False,
    tp_rank: int = 0,
    token_keys: TokenKeys | None = None,
) -> None:
    """Drop inputs of adapters in training, in place; after tensor parallelism.

    Args:
        model: the full model or a pipeline stage, with adapters.
        blocks: modules of ``model``.
        probability: fraction of the elements that are dropped.
        seed: the run's seed.
        compiled_blocks: each block is compiled to one graph.
        tp_rank: index among the tensor-parallel ranks.
        token_keys: of ``model``; None: it takes none yet.
    """
    token_keys = read_token_keys(model, seed) if token_keys is None else token_keys
    in_blocks = {module for block in blocks for module in block.modules()}
    for name, module in list(model.named_modules()):
        if isinstance(module, MoE):
            module.token_keys = token_keys.for_experts
        has_adapter = isinstance(module, LoraLayer) and module.lora_A is not None
        if has_adapter and module in in_blocks:
            stream = layer_stream(name, seed)
            inputs, device = _local_inputs(module), module.weight.device
            module.dropout = AdapterDropout(
                token_keys, probability, stream, inputs, device, tp_rank
            )
    for block in blocks:
        vars(block).update(token_keys=token_keys, sets_token_keys=not compiled_blocks)
        block_class: Any = type(block)
        block.__class__ = _with_token_ids(block_class)
        block.register_forward_pre_hook(lambda block, args: (*args, token_keys.value))


@cache  # one subclass per class, so that the compiler sees that blocks are alike
def _with_token_ids(block_class: Any) -> Any:
    return type(block_class.__name__, (DropoutBlock, block_class), {})


def _local_inputs(layer: Any) -> list[range]:
    """Return the inputs of a layer that this rank has, as indices in the full model."""
    group = vars(layer).get("input_group")
    if group is None:
        return [range(layer.in_features)]
    slices = layer.lora_A.local_parts["weight"].slices
    if slices is not None:
        return [range(part.start, part.stop) for part in slices]
    return [chunk_range(layer.in_features, group.size(), group.rank())]


class AdapterDropout(nn.Module):
    """Drops inputs of one adapter.

    What differs between layers is a tensor, so the compiler sees that blocks are alike.

    Args:
        token_keys: of the pass that is running.
        probability: fraction of the elements that are dropped.
        stream: of the layer.
        inputs: see `_local_inputs`.
        device: of the model.
        tp_rank: index of this rank's slice, if the layer's input is a slice of the sequence
            (``eh_proj`` of multi-token prediction).
    """

    columns_D: Tensor

    def __init__(
        self,
        token_keys: TokenKeys,
        probability: float,
        stream: int,
        inputs: Sequence[range],
        device: torch.device,
        tp_rank: int = 0,
    ) -> None:
        super().__init__()
        self.token_keys, self.probability, self.tp_rank = token_keys, probability, tp_rank
        self.stream, self.inputs = stream, inputs
        self._set_columns(device)

    def _set_columns(self, device: torch.device) -> None:
        columns_D = column_keys(self.inputs, self.stream, device)
        self.register_buffer("columns_D", columns_D, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AdapterDropout:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._set_columns(self.columns_D.device)  # to_empty leaves them uninitialized
        return self

    def forward(self, x: Tensor, keys_R: Tensor | None = None) -> Tensor:
        """Drop elements of ``[B, T, D]``; of none without numbers of tokens.

        ``keys_R``: for rows of experts, ``[R, D]``, the mixed number of each row's token.
        """
        tokens = self.token_keys.value if keys_R is None else keys_R
        if tokens is None:
            return x
        if keys_R is None:
            tokens = slice_tokens(tokens, x.shape[1], self.tp_rank)
        return run_function(_Dropout, x, tokens, self.columns_D, self.probability)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tokens: Tensor, columns_D: Tensor, probability: float
    ) -> Tensor:
        ctx.save_for_backward(tokens, columns_D)
        ctx.probability = probability
        return apply_mask(x, tokens, columns_D, probability)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        tokens, columns_D = ctx.saved_tensors
        return apply_mask(grad, tokens, columns_D, ctx.probability), None, None, None


def apply_mask(x: Tensor, tokens: Tensor, columns_D: Tensor, probability: float) -> Tensor:
    """Return ``x / (1 - probability)``, with zeros where the mask drops.

    Args:
        x: ``[..., D]``.
        tokens: int32 ``[...]``, mixed.
        columns_D: int32 ``[D]``, mixed.
        probability: fraction of the elements that are dropped.
    """
    flat = x.reshape(-1, x.shape[-1])
    size = rows_at_once(*flat.shape)
    chunks = zip(torch.split(flat, size), torch.split(tokens.flatten(), size), strict=True)
    kept = [
        torch.where(is_kept(some, columns_D, probability), chunk * (1 / (1 - probability)), 0)
        for chunk, some in chunks
    ]
    return (kept[0] if len(kept) == 1 else torch.cat(kept)).view(x.shape)


def is_kept(tokens_N: Tensor, columns_D: Tensor, probability: float) -> Tensor:
    """Return the mask: bool ``[N, D]``; see `apply_mask`."""
    return element_bits(tokens_N, columns_D) >= round(probability * 2**32) - 2**31
