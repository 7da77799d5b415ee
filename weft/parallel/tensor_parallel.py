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
* Forward computes with plain local tensors: `LocalWeight` is mixed into a module's class, as
  `fully_shard` does with its own, and ``weight`` is the local shard after FSDP has gathered it.  So
  forward never enters DTensor's dispatch, which is costly per operator.  ``weight`` also sets the
  gradient's placement: a norm whose rank saw only a slice of the sequence has a *partial* gradient,
  which FSDP sums over the ranks of ``tp`` before it reduces it over the other ranks.
* Collectives are forward hooks on the modules that the table names.

If there are more ranks than key/value heads, tp / num_kv_heads ranks share a head.  Then its weight
is replicated, each rank computes with its own head's rows, and gradients are partial sums.

Shapes in names: B sequences, T tokens of a sequence on this context-parallel rank, D model width, V
vocabulary, N = B T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, cast

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from weft.models.family import TensorParallelSpec
from weft.parallel.collectives import (
    Collective,
    copy_to_ranks,
    gather_sequence,
    scatter_sequence,
    sum_over_ranks,
)
from weft.parallel.dtensor import from_local

# FSDP gathers a weight over all axes but these.
LOCAL_AXES = {"ep", "tp"}


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
    group = mesh.get_group()
    enter_region = _CollectiveHook(gather_sequence if sequence_parallel else copy_to_ranks, group)
    leave_region = _CollectiveHook(scatter_sequence if sequence_parallel else sum_over_ranks, group)
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
    # The first dims are outputs and inputs (or blocks of inputs: `weft.parallel.lora`).  The
    # stacked weight of experts has one more dim before them.
    output_dim = int(full.dim() == 3 and full.is_floating_point())
    outputs, inputs = Shard(output_dim), Shard(output_dim + 1)
    placement: Placement = {"replicated": Replicate(), "row": inputs}.get(str(kind), outputs)
    local = full.data
    if isinstance(placement, Shard):
        local = local.chunk(tp, dim=placement.dim)[rank].contiguous()
    use_local_weight(module, local, mesh, [placement], full.shape)
    vars(module).update(grad_placement=grad_placement, head_rows=head_rows)
    if spec.weight == "vocabulary":
        module.forward = partial(_vocab_parallel_forward, module, rank * local.shape[0])


def use_local_weight(
    module: nn.Module,
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
) -> None:
    """Replace a module's weight by a DTensor; forward uses the local shard."""
    full = module._parameters["weight"]
    assert full is not None
    sharded = from_local(local, mesh, placements, shape)
    module.register_parameter("weight", nn.Parameter(sharded, requires_grad=full.requires_grad))
    if not isinstance(module, LocalWeight):
        module_class: Any = type(module)
        module.__class__ = _with_local_weight(module_class)


class LocalWeight:
    """Mixin of a module: ``weight`` is this rank's shard of the parameter."""

    local_weight: Tensor | None = None  # see `materialize_local_weights`
    grad_placement: Placement | None = None  # None: as the parameter
    head_rows: slice | None = None  # of the rank's own head; None: all

    @property
    def weight(self: Any) -> Tensor:
        """Return the local shard, or the parameter if FSDP has not gathered it."""
        if self.local_weight is not None:
            return cast(Tensor, self.local_weight)
        param: Tensor = self._parameters["weight"]
        if (
            not isinstance(param, DTensor)
            or not set(param.device_mesh.mesh_dim_names or ()) <= LOCAL_AXES
        ):
            return param
        placements = None if self.grad_placement is None else [self.grad_placement]
        local: Tensor = param.to_local(grad_placements=placements)
        return local if self.head_rows is None else local[self.head_rows]


@cache  # one subclass per class, so that the compiler sees that blocks are alike
def _with_local_weight(module_class: Any) -> Any:
    return type(module_class.__name__, (LocalWeight, module_class), {})


def materialize_local_weights(block: nn.Module) -> None:
    """Convert a compiled block's weights to local tensors before its forward.

    So the compiled forward sees plain tensors.  With a DTensor it would also save the mesh, which
    fails with full recomputation in torch 2.13 ("to be Tensors, got types: DeviceMesh").
    """
    sharded: list[Any] = [m for m in block.modules() if isinstance(m, LocalWeight)]
    compiled_forward = block.forward

    def forward(*args: Any) -> Any:
        for module in sharded:
            vars(module)["local_weight"] = module.weight  # setattr would register a parameter
        try:
            return compiled_forward(*args)
        finally:
            for module in sharded:
                vars(module).pop("local_weight", None)

    block.forward = forward


def _vocab_parallel_forward(embedding: nn.Module, first: int, tokens_BT: Tensor) -> Tensor:
    """Look up ids in a shard that starts at id ``first``; zeros for other ids."""
    table = embedding.weight
    assert isinstance(table, Tensor)
    rows_BT = tokens_BT - first
    outside_BT = (rows_BT < 0) | (rows_BT >= table.shape[0])
    x_BTD = F.embedding(rows_BT.masked_fill(outside_BT, 0), table)
    return x_BTD.masked_fill(outside_BT.unsqueeze(-1), 0)


class _CollectiveHook:
    """A hook that applies a collective to a module's output, or first argument."""

    def __init__(self, collective: Collective, group: dist.ProcessGroup) -> None:
        self.collective, self.group = collective, group

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any = None) -> Any:
        if output is None:
            return (self.collective(args[0], self.group), *args[1:])
        return self.collective(output, self.group)
