"""Tensor parallelism: ranks that share each matrix, and the loss without whole logits.

Two products in a row need one exchange, not two (Megatron-LM, arXiv:1909.08053): the first
weight is cut by its outputs (*column*), the second by its inputs (*row*), and what lies between
them, heads or feed-forward units, never leaves its rank.  Before the first product the input must
be whole, after the second the ranks' parts must be added.  With sequence parallelism
(arXiv:2205.05198) each rank holds only its slice of the sequence outside of the products: the
input is *gathered*, the parts are *scattered* (added and sliced), and norms and residuals cost
1/tp of the memory.  Without it the same two places are an identity and an all-reduce.

The model's table says where (`weft.models.llama.SHARDING`), this file does it from outside:

* Every parameter becomes a DTensor on the axis ``tp``.  So checkpoints, gradient norm and FSDP
  know what a rank holds, and names and shapes stay those of the whole model.
* Forward computes with plain local tensors.  A module's class is exchanged for a subclass whose
  ``weight``, once FSDP has gathered it, is the local part; DTensor's dispatch, costly per
  operator, is never entered.  It is also where a gradient's meaning is told: that of a gain, of
  which each rank saw only its slice of the sequence, is a *partial* sum, which FSDP adds up over
  the ranks before it reduces it over the others.
* Exchanges are forward hooks around the modules that the table names.

With more ranks than key/value heads, groups of tp / num_kv_heads ranks share a head: its weight is
whole on every rank, each computes with the rows of its own head, and gradients are partial sums.

Shapes: B rows, T tokens of a row on this context-parallel rank, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from weft.models.family import TensorParallelSpec
from weft.parallel.dtensor import from_local
from weft.parallel.private import run_function, c10d_functional


def apply_tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    sharding: Mapping[str, TensorParallelSpec],
    num_kv_heads: int,
    sequence_parallel: bool,
) -> None:
    """Cut ``model`` (on the meta device) over the one axis of ``mesh``, in place.

    Args:
        sharding: module patterns; see `weft.models.family.TensorParallelSpec`.
        num_kv_heads: of the whole model; a divisor or a multiple of the number of ranks.
        sequence_parallel: whether activations between products are slices of the sequence.

    Raises:
        ValueError: if a module with parameters has no entry in ``sharding``.
    """
    # Into a region of matrix products, and out of it.
    functions = (_GatherSequence, _ReduceScatterSequence) if sequence_parallel else (_CopyToTP, _ReduceFromTP)
    enter, leave = (_CollectiveHook(function, mesh.get_group()) for function in functions)
    for name, module in list(model.named_modules()):
        split = next((s for pattern, s in sharding.items() if fnmatchcase(name, pattern)), None)
        if split is None:
            if any(True for _ in module.parameters(recurse=False)):
                raise ValueError(f"no pattern of SHARDING matches {name!r}, which has parameters")
            continue
        if split.weight is not None:
            _shard_weight(module, split, mesh, num_kv_heads, sequence_parallel)
        if split.before == "gather":
            module.register_forward_pre_hook(enter)
        if split.after == "gather":
            module.register_forward_hook(enter)
        if split.after == "scatter":
            module.register_forward_hook(leave)


def _shard_weight(
    module: nn.Module,
    split: TensorParallelSpec,
    mesh: DeviceMesh,
    num_kv_heads: int,
    sequence_parallel: bool,
) -> None:
    tp, rank = mesh.size(), mesh.get_local_rank()
    rows: slice | None = None
    grad: Placement | None = None
    whole = module.weight
    assert isinstance(whole, nn.Parameter), f"{type(module).__name__} has no weight of its own"
    kind = split.weight
    if kind == "heads" and tp > num_kv_heads:
        height = whole.shape[0] // num_kv_heads
        head = rank * num_kv_heads // tp
        rows, grad, kind = slice(head * height, (head + 1) * height), Partial(), "whole"
    elif kind == "summed" or (kind == "whole" and sequence_parallel):
        grad, kind = Partial(), "whole"
    # Outputs and inputs (or blocks of them: `weft.parallel.quantize`) come first; an expert's
    # weight has a dim before them.
    first = int(whole.dim() == 3 and whole.is_floating_point())
    outputs, inputs = Shard(first), Shard(first + 1)
    placement: Placement = {"whole": Replicate(), "row": inputs}.get(str(kind), outputs)
    local = whole.data
    if isinstance(placement, Shard):
        local = local.chunk(tp, dim=placement.dim)[rank].contiguous()
    cut = from_local(local, mesh, [placement], whole.shape)
    module.register_parameter("weight", nn.Parameter(cut, requires_grad=whole.requires_grad))

    def weight(self: Any) -> Tensor:
        if self.part is not None:
            return cast(Tensor, self.part)
        param: Tensor | None = self._parameters["weight"]
        if not isinstance(param, DTensor) or param.device_mesh.ndim > 1:
            assert isinstance(param, nn.Parameter)
            return param  # sharded by FSDP: not gathered for computing
        part: Tensor = param.to_local(grad_placements=None if grad is None else [grad])
        return part if rows is None else part[rows]

    kind_of_module = type(module)
    members: dict[str, Any] = {"weight": property(weight), "part": None}
    if split.weight == "vocabulary":
        members["forward"] = _vocab_parallel_forward(rank * local.shape[0])
    module.__class__ = type(kind_of_module.__name__, (kind_of_module,), members)


def materialize_local_weights(block: nn.Module) -> None:
    """Let ``block`` make local tensors of its weights before its forward pass, not within.

    So a compiled forward pass sees plain tensors.  Of a DTensor it would keep the mesh as well,
    which in torch 2.13 fails if all is computed again ("to be Tensors, got types: DeviceMesh").
    """
    cut: list[Any] = [module for module in block.modules() if hasattr(type(module), "part")]

    def before(_: nn.Module, args: Any) -> None:
        for module in cut:
            vars(module)["part"] = module.weight  # no parameter of the module's, whatever it is

    def after(*_: Any) -> None:
        for module in cut:
            vars(module).pop("part", None)

    block.register_forward_pre_hook(before)
    block.register_forward_hook(after, always_call=True)


def _vocab_parallel_forward(first: int) -> Any:
    """The forward of an embedding whose table begins at row ``first``: zeros for other ids."""

    def forward(self: nn.Module, tokens_BT: Tensor) -> Tensor:
        table = self.weight
        assert isinstance(table, Tensor)
        rows_BT = tokens_BT - first
        elsewhere_BT = (rows_BT < 0) | (rows_BT >= table.shape[0])
        x_BTD = F.embedding(rows_BT.masked_fill(elsewhere_BT, 0), table)
        return x_BTD.masked_fill(elsewhere_BT.unsqueeze(-1), 0)

    return forward


# --------------------------------------------------------------------------- exchanges


class _CollectiveHook:
    """Exchanges the output of a module; as a pre-hook, its first argument."""

    def __init__(self, function: type[torch.autograd.Function], group: dist.ProcessGroup) -> None:
        self.function, self.group = function, group

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any = None) -> Any:
        if output is None:
            return (run_function(self.function, args[0], self.group), *args[1:])
        return run_function(self.function, output, self.group)


def _all_gather(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = group.size()
    stacked = c10d_functional.all_gather_into_tensor(x_BTD.contiguous(), size, group.group_name)
    return torch.cat(c10d_functional.wait_tensor(stacked).chunk(size), dim=1)


def _reduce_scatter(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = group.size()
    stacked = torch.cat(x_BTD.chunk(size, dim=1))
    out = c10d_functional.reduce_scatter_tensor(stacked, "sum", size, group.group_name)
    return c10d_functional.wait_tensor(out)  # type: ignore[no-any-return]


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return c10d_functional.wait_tensor(c10d_functional.all_reduce(x.contiguous(), "sum", group.group_name))  # type: ignore[no-any-return]


class _Collective(torch.autograd.Function):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.group = inputs[1]


class _GatherSequence(_Collective):
    """Slices of the sequence to the whole; gradients of the whole, added up, to slices."""

    @staticmethod
    def forward(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_gather(x_BTD, group)

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grad_BTD, ctx.group), None


class _ReduceScatterSequence(_Collective):
    """Parts of the whole, added up, to slices of the sequence; and back."""

    @staticmethod
    def forward(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _reduce_scatter(x_BTD, group)

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad_BTD, ctx.group), None


class _CopyToTP(_Collective):
    """The whole on every rank as it is; gradients added up."""

    @staticmethod
    def forward(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
        return x_BTD.view_as(x_BTD)

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad_BTD, ctx.group), None


class _ReduceFromTP(_Collective):
    """Parts added up on every rank; gradients as they are."""

    @staticmethod
    def forward(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(x_BTD, group)

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor, None]:
        return grad_BTD, None


# --------------------------------------------------------------------------- loss


def vocab_parallel_cross_entropy(
    logits_BTV: Tensor, targets_BT: Tensor, ignore: int, group: dist.ProcessGroup
) -> Tensor:
    """Cross-entropy of each token in nats, of logits whose vocabulary is cut over ``group``.

    Exchanged are three numbers per token (maximum, sum of exponentials, logit of the target),
    never logits.

    Args:
        logits_BTV: this rank's V / tp entries of the vocabulary, any floating dtype.
        targets_BT: int64 ids of the whole vocabulary; ``ignore`` where there is no loss.

    Returns:
        float32 (B, T), the same on every rank of ``group``; 0 where there is no loss.
    """
    return run_function(_VocabParallelCrossEntropy, logits_BTV, targets_BT, ignore, group)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_BTV: Tensor, targets_BT: Tensor, ignore: int, group: dist.ProcessGroup
    ) -> Tensor:
        logits_NV = logits_BTV.float().flatten(0, 1)
        first = group.rank() * logits_NV.shape[1]
        valid_N = targets_BT.flatten() != ignore
        columns_N = targets_BT.flatten() - first
        mine_N = valid_N & (columns_N >= 0) & (columns_N < logits_NV.shape[1])
        columns_N = columns_N.masked_fill(~mine_N, 0)

        highest_N = logits_NV.amax(dim=1)
        dist.all_reduce(highest_N, dist.ReduceOp.MAX, group)
        shifted_NV = logits_NV - highest_N.unsqueeze(1)
        target_N = shifted_NV.gather(1, columns_N.unsqueeze(1)).squeeze(1)
        target_N = target_N.masked_fill(~mine_N, 0.0)
        exp_NV = shifted_NV.exp_()
        sums_2N = torch.stack((exp_NV.sum(dim=1), target_N))
        dist.all_reduce(sums_2N, group=group)
        losses_N = sums_2N[0].log() - sums_2N[1]

        ctx.save_for_backward(exp_NV.div_(sums_2N[0].unsqueeze(1)), columns_N, mine_N, valid_N)
        ctx.shape, ctx.dtype = logits_BTV.shape, logits_BTV.dtype
        return losses_N.masked_fill(~valid_N, 0.0).view_as(targets_BT)

    @staticmethod
    def backward(ctx: Any, grad_BT: Tensor) -> tuple[Tensor, None, None, None]:
        softmax_NV, columns_N, mine_N, valid_N = ctx.saved_tensors
        grad_N = grad_BT.flatten()
        grad_NV = softmax_NV * (grad_N * valid_N).unsqueeze(1)
        grad_NV.scatter_add_(1, columns_N.unsqueeze(1), -(grad_N * mine_N).unsqueeze(1))
        return grad_NV.to(ctx.dtype).view(ctx.shape), None, None, None
