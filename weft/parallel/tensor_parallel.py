"""Tensor parallelism of the model and of the cross-entropy loss.

Two matmuls in a row need one collective, not two (Megatron-LM, arXiv:1909.08053).  The first weight
is sharded by its outputs (*column*), the second by its inputs (*row*), and the heads or
feed-forward units between them stay on their rank.  The first matmul needs the full input; after
the second, the partial outputs of all ranks are summed.  With sequence parallelism
(arXiv:2205.05198) each rank holds a slice of the sequence outside of the matmuls.  Then the input
is *gathered*, the partial outputs are *scattered* (summed and sliced), and norms and residuals cost
1/tp of the memory.  Without sequence parallelism, the two collectives are an identity and an
all-reduce.

The model's table says where (`weft.models.llama.SHARDING`); this module applies it from outside:

* Every parameter becomes a DTensor on the axis ``tp``.  So checkpoints, gradient norm and FSDP know
  each rank's shard, and names and shapes remain those of the full model.
* Forward computes with plain local tensors.  A module gets a subclass of its class, whose
  ``weight`` is the local shard after FSDP has gathered it.  So forward never enters DTensor's
  dispatch, which is costly per operator.  ``weight`` also sets the gradient's placement: a norm
  whose rank saw only a slice of the sequence has a *partial* gradient, which FSDP sums over the
  ranks of ``tp`` before it reduces it over the other ranks.
* Collectives are forward hooks on the modules that the table names.

If there are more ranks than key/value heads, tp / num_kv_heads ranks share a head.  Then its weight
is replicated, each rank computes with its own head's rows, and gradients are partial sums.

Shapes in names: B sequences, T tokens of a sequence on this context-parallel rank, D model width, V
vocabulary, N = B T tokens.
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
from weft.parallel.private import c10d_functional, run_function


def apply_tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    sharding: Mapping[str, TensorParallelSpec],
    num_kv_heads: int,
    sequence_parallel: bool,
) -> None:
    """Shard ``model`` (on the meta device) over the one axis of ``mesh``.

    Args:
        model: changed in place.
        mesh: one-dimensional; its ranks hold the shards.
        sharding: specs by module name pattern.
        num_kv_heads: of the full model; a divisor or a multiple of the number of ranks.
        sequence_parallel: keep only a slice of the sequence between matmuls.

    Raises:
        ValueError: if a module with parameters has no entry in ``sharding``.
    """
    functions = (
        (_GatherSequence, _ReduceScatterSequence)
        if sequence_parallel
        else (_CopyToTP, _ReduceFromTP)
    )
    enter_region, leave_region = (
        _CollectiveHook(function, mesh.get_group()) for function in functions
    )
    for name, module in list(model.named_modules()):
        spec = next((s for pattern, s in sharding.items() if fnmatchcase(name, pattern)), None)
        if spec is None:
            if any(True for _ in module.parameters(recurse=False)):
                raise ValueError(f"no pattern of SHARDING matches {name!r}, which has parameters")
            continue
        if spec.weight is not None:
            _shard_weight(module, spec, mesh, num_kv_heads, sequence_parallel)
        if spec.input_comm == "gather":
            module.register_forward_pre_hook(enter_region)
        if spec.output_comm == "gather":
            module.register_forward_hook(enter_region)
        if spec.output_comm == "scatter":
            module.register_forward_hook(leave_region)


def _shard_weight(
    module: nn.Module,
    spec: TensorParallelSpec,
    mesh: DeviceMesh,
    num_kv_heads: int,
    sequence_parallel: bool,
) -> None:
    tp, rank = mesh.size(), mesh.get_local_rank()
    head_rows: slice | None = None
    grad_placement: Placement | None = None
    full = module.weight
    assert isinstance(full, nn.Parameter), f"{type(module).__name__} has no parameter `weight`"
    kind = spec.weight
    if kind == "heads" and tp > num_kv_heads:
        head_dim = full.shape[0] // num_kv_heads
        head = rank * num_kv_heads // tp
        head_rows = slice(head * head_dim, (head + 1) * head_dim)
        grad_placement, kind = Partial(), "replicated"
    elif kind == "partial_grad" or (kind == "replicated" and sequence_parallel):
        grad_placement, kind = Partial(), "replicated"
    # The first dims are outputs and inputs (or blocks of inputs: `weft.parallel.quantize`).  The
    # stacked weight of experts has one more dim before them.
    output_dim = int(full.dim() == 3 and full.is_floating_point())
    outputs, inputs = Shard(output_dim), Shard(output_dim + 1)
    placement: Placement = {"replicated": Replicate(), "row": inputs}.get(str(kind), outputs)
    local = full.data
    if isinstance(placement, Shard):
        local = local.chunk(tp, dim=placement.dim)[rank].contiguous()
    sharded = from_local(local, mesh, [placement], full.shape)
    module.register_parameter("weight", nn.Parameter(sharded, requires_grad=full.requires_grad))

    def weight(self: Any) -> Tensor:
        if self.local_weight is not None:
            return cast(Tensor, self.local_weight)
        param: Tensor | None = self._parameters["weight"]
        if not isinstance(param, DTensor) or param.device_mesh.ndim > 1:
            assert isinstance(param, nn.Parameter)
            return param  # FSDP has not gathered it
        placements = None if grad_placement is None else [grad_placement]
        local: Tensor = param.to_local(grad_placements=placements)
        return local if head_rows is None else local[head_rows]

    module_class = type(module)
    members: dict[str, Any] = {"weight": property(weight), "local_weight": None}
    if spec.weight == "vocabulary":
        members["forward"] = _vocab_parallel_forward(rank * local.shape[0])
    module.__class__ = type(module_class.__name__, (module_class,), members)


def materialize_local_weights(block: nn.Module) -> None:
    """Convert a block's weights to local tensors before its forward, not in it.

    So the compiled forward sees plain tensors.  With a DTensor it would also save the mesh, which
    fails with full recomputation in torch 2.13 ("to be Tensors, got types: DeviceMesh").
    """
    sharded: list[Any] = [m for m in block.modules() if hasattr(type(m), "local_weight")]

    def set_local_weights(_: nn.Module, args: Any) -> None:
        for module in sharded:
            vars(module)["local_weight"] = module.weight  # setattr would register a parameter

    def clear_local_weights(*_: Any) -> None:
        for module in sharded:
            vars(module).pop("local_weight", None)

    block.register_forward_pre_hook(set_local_weights)
    block.register_forward_hook(clear_local_weights, always_call=True)


def _vocab_parallel_forward(first: int) -> Any:
    """Return the forward of a shard from id ``first``: zeros for other ids."""

    def forward(self: nn.Module, tokens_BT: Tensor) -> Tensor:
        table = self.weight
        assert isinstance(table, Tensor)
        rows_BT = tokens_BT - first
        outside_BT = (rows_BT < 0) | (rows_BT >= table.shape[0])
        x_BTD = F.embedding(rows_BT.masked_fill(outside_BT, 0), table)
        return x_BTD.masked_fill(outside_BT.unsqueeze(-1), 0)

    return forward


# --------------------------------------------------------------------------- collectives


class _CollectiveHook:
    """A hook that applies a collective to a module's output, or first argument."""

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
    total = c10d_functional.all_reduce(x.contiguous(), "sum", group.group_name)
    return c10d_functional.wait_tensor(total)  # type: ignore[no-any-return]


class _Collective(torch.autograd.Function):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.group = inputs[1]


class _GatherSequence(_Collective):
    """All-gather the sequence; reduce-scatter its gradient."""

    @staticmethod
    def forward(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_gather(x_BTD, group)

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grad_BTD, ctx.group), None


class _ReduceScatterSequence(_Collective):
    """Reduce-scatter partial sums over the sequence; all-gather the gradient."""

    @staticmethod
    def forward(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _reduce_scatter(x_BTD, group)

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad_BTD, ctx.group), None


class _CopyToTP(_Collective):
    """Identity; all-reduce the gradient."""

    @staticmethod
    def forward(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
        return x_BTD.view_as(x_BTD)

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad_BTD, ctx.group), None


class _ReduceFromTP(_Collective):
    """All-reduce partial sums; identity for the gradient."""

    @staticmethod
    def forward(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(x_BTD, group)

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor, None]:
        return grad_BTD, None
