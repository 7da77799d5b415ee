"""Dropout of the adapters' inputs, with one mask for all layouts.

A random generator per rank would drop other numbers in another layout, after a resume, or when a
block is recomputed.  So, as for initial weights (`weft.parallel.initialization`), no generator is
used.  Whether element d of the input of an adapter is dropped for token t is a pure function of
(seed, name of the layer, number of the token in the run, d).  The loader numbers the tokens in
the order of the data (`weft.data.loader.Loader`), so every step, also of a later epoch, has
another mask, and a repeated step has the same.  Adapters of the embedding and the head have no
dropout: a lookup has no input to drop, and a fused loss reads merged weights.

*Experts.*  A row that is routed to an expert has the mask of its token, in all experts of a layer,
as if its token were dropped from before routing.  So the mask depends neither on the order of the
rows nor on the choice of the router.  The mixed numbers of the tokens are permuted like the rows,
and travel with them in expert parallelism.

*Hash.*  SplitMix64 mixes the number of the token, and d, to 32 bits each.  A hash of 32 bits mixes
the xor of the two.  An element is kept if the result, as an integer, is not among the lowest
fraction p.  Backward computes the mask again, so nothing but the numbers of the tokens is saved.
On a GPU the compiler fuses all of it into one kernel; without `compile.enable` it is several.

*Numbers of the tokens.*  The model takes them as an argument, ``token_ids_BT``.  A hook hands them
to each block as one more argument, so activation checkpointing saves them with the block's input,
and the recomputation of a microbatch sees its own.  Without them, as in evaluation, nothing is
dropped.

Shapes in names: B sequences, T tokens of a sequence on this rank, D inputs on this rank.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from weft.models.layers import run_function
from weft.models.moe import MoE
from weft.parallel.initialization import GOLDEN, mix_bits, mix_int
from weft.parallel.lora_layers import LoraLayer
from weft.plan.plan import Plan
from weft.plan.shard_sizes import chunk_range

# Of lowbias32 (C. Wellons, "Prospecting for hash functions", 2018), as signed 32-bit integers.
_MULTIPLY_1 = 0x7FEB352D
_MULTIPLY_2 = -0x7B935975  # 0x846CA68B
# Elements at a time: limits temporaries to a few tens of MiB.
CHUNK_ELEMENTS = 1 << 22


class _TokenKeys:
    """The mixed numbers of the tokens of the pass that is running: int32 ``[B, T]``.

    ``set_by_blocks`` is False if a block with its recomputation is one compiled graph.  Its input
    is what the model has set; inside of it Dynamo allows no assignment.
    """

    value: Tensor | None = None
    set_by_blocks = True

    def for_experts(self) -> list[Tensor]:
        """Return the numbers of the tokens, if there are any: `MoE.token_keys`."""
        return [] if self.value is None else [self.value]


class DropoutBlock:
    """Mixed into a block's class: numbers of tokens are forward's last argument."""

    token_keys: _TokenKeys

    def forward(self, *args: Any) -> Any:
        """Hand the numbers to the layers, and run the block."""
        if self.token_keys.set_by_blocks:
            self.token_keys.value = args[-1]
        return super().forward(*args[:-1])  # type: ignore[misc]


def add_lora_dropout(
    model: nn.Module, blocks: Sequence[nn.Module], probability: float, plan: Plan, tp_rank: int
) -> None:
    """Apply dropout as planned: see `apply_lora_dropout`."""
    one_graph = plan.is_compiled and not plan.has_graph_breaks
    apply_lora_dropout(model, blocks, probability, plan.seed, one_graph, tp_rank)


def apply_lora_dropout(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    probability: float,
    seed: int,
    compiled_blocks: bool = False,
    tp_rank: int = 0,
) -> None:
    """Drop inputs of adapters in training, in place; after tensor parallelism.

    Args:
        model: the full model or a pipeline stage, with adapters.
        blocks: modules of ``model``.
        probability: fraction of the elements that are dropped.
        seed: the run's seed.
        compiled_blocks: each block is compiled to one graph.
        tp_rank: index among the tensor-parallel ranks.
    """
    token_keys = _TokenKeys()
    token_keys.set_by_blocks = not compiled_blocks
    in_blocks = {module for block in blocks for module in block.modules()}
    for name, module in list(model.named_modules()):
        if isinstance(module, MoE):
            module.token_keys = token_keys.for_experts
        has_adapter = isinstance(module, LoraLayer) and module.lora_A is not None
        if has_adapter and module in in_blocks:
            stream = mix_int((seed << 32) ^ zlib.crc32(name.encode()) ^ 1)
            inputs, device = _local_inputs(module), module.weight.device
            module.dropout = AdapterDropout(
                token_keys, probability, stream, inputs, device, tp_rank
            )

    def read_ids(module: nn.Module, args: Any, kwargs: Any) -> Any:
        ids = kwargs.pop("token_ids_BT", None)
        token_keys.value = None if ids is None else mix_bits(ids * GOLDEN + seed).to(torch.int32)
        return args, kwargs

    model.register_forward_pre_hook(read_ids, with_kwargs=True)
    for block in blocks:
        vars(block)["token_keys"] = token_keys
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
        token_keys: _TokenKeys,
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
        parts = [torch.arange(part.start, part.stop, device=device) for part in self.inputs]
        columns_D = mix_bits(torch.cat(parts) * GOLDEN + self.stream).to(torch.int32)
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
        if keys_R is None and tokens.shape[1] > x.shape[1]:
            start = self.tp_rank * x.shape[1]
            tokens = tokens[:, start : start + x.shape[1]].contiguous()
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
    rows = math.inf if torch.compiler.is_compiling() else max(1, CHUNK_ELEMENTS // x.shape[-1])
    flat = x.reshape(-1, x.shape[-1])
    rows = min(rows, max(1, len(flat)))
    size = int(rows)
    chunks = zip(torch.split(flat, size), torch.split(tokens.flatten(), size), strict=True)
    kept = [
        torch.where(is_kept(some, columns_D, probability), chunk * (1 / (1 - probability)), 0)
        for chunk, some in chunks
    ]
    return (kept[0] if len(kept) == 1 else torch.cat(kept)).view(x.shape)


def is_kept(tokens_N: Tensor, columns_D: Tensor, probability: float) -> Tensor:
    """Return the mask: bool ``[N, D]``; see `apply_mask`."""
    bits_ND = tokens_N.unsqueeze(1) ^ columns_D
    bits_ND = (bits_ND ^ ((bits_ND >> 16) & 0xFFFF)) * _MULTIPLY_1
    bits_ND = (bits_ND ^ ((bits_ND >> 15) & 0x1FFFF)) * _MULTIPLY_2
    return bits_ND >= round(probability * 2**32) - 2**31
