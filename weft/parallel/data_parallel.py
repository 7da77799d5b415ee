"""Data parallelism with FSDP2: ZeRO 1 to 3, hybrid sharding, and MiCS.

Parameters, gradients and AdamW's two moments take 16 bytes per parameter in float32.  A full copy
per rank does not fit into memory; fully sharded, each layer travels over the network at every use.
Three options choose between these extremes.  FSDP2's `fully_shard` does the work: it gathers a
*unit* of parameters before its use and reduce-scatters its gradients after.  Each block is a unit,
and so are the embedding, and the head with the norm before it.  The root is the unit of all other
parameters: a tied embedding, for example, which both ends of the forward pass read.

So the head is gathered behind the last block, and its gradient is reduced behind backward of the
blocks.  Exposed are only the gather of the embedding and of the first block, and at the end of
backward the reduction of the embedding's gradient.

1. ``reshard_after_forward``: when FSDP frees gathered parameters.
2. ``gradient_sync``: reduce gradients after every microbatch, or accumulate them unsharded on
   every rank and reduce them after the last microbatch of a step.

       reshard   sync         name     unsharded on every rank   collectives per unit and step
       never     step         ZeRO-1   parameters, gradients     1 gather, 1 reduction
       never     microbatch   ZeRO-2   parameters                1 gather, M reductions
       always    microbatch   ZeRO-3   nothing                   2 M gathers, M reductions
       always    step                  gradients                 2 M gathers, 1 reduction

   with M microbatches per step (ZeRO: arXiv:1910.02054).  All four shard the optimizer states.
   *never* keeps parameters gathered from their first use in a step until its end, because the
   optimizer updates their shards.  A number instead of *always* reshards over that many neighboring
   ranks, so the gather for backward stays among them (as in ZeRO++, arXiv:2306.10209).
3. ``dp_shard``: the number of ranks that share one copy.  ``dp_replicate`` counts the copies.

The third option is that of MiCS (arXiv:2205.00119): the smallest shard group that holds the model
keeps gathers on fast links, for any cluster size.  MiCS adds two ideas.  *Two-hop gradient
synchronization*: every microbatch reduce-scatters gradients inside the shard group, and only the
last one of a step all-reduces them over the replicas.  *Hierarchical gathering*, for a shard group
that spans nodes: see `weft.parallel.hierarchical_gather`.

Gradients are *summed* over the data-parallel ranks, not averaged: the loss is already divided by
the number of valid tokens of the step.

This module does not choose the group sizes: `weft.planning.resolve` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from weft.config.schema import ParallelSection
from weft.parallel.dtensor import num_shards
from weft.parallel.mesh import create_mesh
from weft.parallel.mixed_precision import restore_parameters
from weft.parallel.private import (
    all_gather,
    allow_integer_params,
    allow_reshard_of_dtensors,
    is_fsdp_unit,
    iter_fsdp_units,
    move_fsdp_hooks,
    replace_all_reduce,
    use_reshard_mesh,
    use_symmetric_memory,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import Shard

# --------------------------------------------------------------------------- sharding


def apply_fsdp(
    model: nn.Module,
    blocks: list[nn.Module],
    mesh: DeviceMesh,
    parallel: ParallelSection,
    *,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool | int,
    node_size: int | None,
    sums_in_order: bool = False,
    experts: Sequence[nn.Module] = (),
    expert_mesh: DeviceMesh | None = None,
    units: Sequence[Sequence[nn.Module]] | None = None,
) -> None:
    """Shard ``model`` in place: FSDP units of ``units``, and the root.

    Collective: every rank of the world makes the same calls, because they create process groups.

    Args:
        model: full model or pipeline stage, on the meta device or materialized.  With
            ``cpu_offload``, parameters (not buffers) must be on the CPU at the first forward pass.
        blocks: modules of ``model`` in the order of their use.
        mesh: two axes, replicas and then shards; a mesh or a slice of a larger one.
        parallel: the function reads ``fsdp_prefetch``, ``param_persistence_threshold``,
            ``cpu_offload``, ``symmetric_memory`` and ``hierarchical_gather``.
        compute_dtype: dtype of gathered parameters, and so of forward and backward.
        reduce_dtype: dtype in which gradients are accumulated and reduced.
        reshard_after_forward: applies to the blocks; other units stay gathered.  A number: ranks
            that share one copy; of ``experts`` on an ``expert_mesh``, the ranks of those that have
            the same experts.
        node_size: consecutive ranks of a shard group on one node; None: all, or a varying number.
            Used by ``hierarchical_gather`` only.
        sums_in_order: reduce the gradients of each backward pass as `OrderedSum` does.
        experts: modules of ``blocks`` whose parameters are stacks of matrices.
        expert_mesh: like ``mesh``, makes each of ``experts`` a unit; None: part of its block.
        units: modules that are gathered together, in the order of their use, with the blocks among
            them: see `weft.models.family.Family`.  None: the blocks.

    Raises:
        ValueError: if ``reshard_after_forward`` or ``node_size`` does not divide the shard group,
            or the ranks of a shard group do not ascend along the mesh.
    """
    from torch.distributed.fsdp import fully_shard

    shard_mesh = _shard_mesh(mesh)
    options = _fsdp_policies(parallel, mesh.device_type, compute_dtype, reduce_dtype)
    threshold = parallel.param_persistence_threshold
    expert_units = experts if expert_mesh is not None else ()
    expert_params = {param for module in expert_units for param in module.parameters()}
    block_params = {p for block in blocks for p in block.parameters() if p.numel() >= threshold}
    block_params |= expert_params
    units = [[block] for block in blocks] if units is None else units
    other_units = [list(unit) for unit in units if unit[0] not in blocks]
    other_params = {p for module in chain(*other_units) for p in module.parameters()}
    reshard_blocks, reshard_mesh = _build_reshard(shard_mesh, reshard_after_forward)
    reshard_experts, expert_reshard_mesh = reshard_blocks, reshard_mesh
    if expert_mesh is not None:
        reshard_experts, expert_reshard_mesh = _build_reshard(
            _shard_mesh(expert_mesh), reshard_blocks, shard_mesh.size()
        )
    with allow_integer_params(), use_reshard_mesh(reshard_mesh):
        # The root unit has all parameters that no other unit has, and stays gathered.  Parameters
        # that are too small to be worth a gather join it: the blocks that use them need no hooks
        # for them, and activation checkpointing needs no special case.
        options["mesh"] = _drop_trivial_replicas(mesh)
        ignored = block_params | other_params
        fully_shard(model, reshard_after_forward=False, ignored_params=ignored, **options)
        for unit in other_units:
            # These stay gathered, too.  The head is needed again at once, by its backward; and a
            # second gather of the embedding, in each microbatch, would be exposed.
            fully_shard(unit, reshard_after_forward=False, **options)
            # FSDP waits for the forward of all modules of a unit, but the fused loss calls no
            # head.  The first module's forward begins the use, and its backward ends it.
            move_fsdp_hooks(unit[0], unit[0])
        # When FSDP reshards over some of the ranks, it shards dim 0 only.
        any_dim = isinstance(reshard_blocks, bool)
        choose_dim = _choose_shard_dim(shard_mesh.size()) if any_dim and experts else None
        options["shard_placement_fn"] = choose_dim
        for block in blocks:
            inner_units = _submodules_in(block, expert_units)
            for module in inner_units:
                assert expert_mesh is not None
                expert_options = options | {"mesh": _drop_trivial_replicas(expert_mesh)}
                if isinstance(reshard_experts, bool):
                    expert_options["shard_placement_fn"] = _choose_shard_dim(expert_mesh.size(1))
                with use_reshard_mesh(expert_reshard_mesh):
                    fully_shard(module, reshard_after_forward=reshard_experts, **expert_options)
            root_params = {param for param in block.parameters() if param.numel() < threshold}
            fully_shard(
                block,
                reshard_after_forward=reshard_blocks,
                ignored_params=root_params - expert_params,
                **options,
            )
            for module in inner_units:
                move_fsdp_hooks(module, block)

    _set_communication(model, shard_mesh, parallel, node_size, sums_in_order)
    always_gathered = {model, *chain(*other_units)}
    for unit in iter_fsdp_units(model):
        reshard_unit = reshard_experts if unit in expert_units else reshard_blocks
        unit.keeps_unsharded = unit in always_gathered or reshard_unit is False
    prefetched = [[unit[0], *_submodules_in(unit[0], expert_units)] for unit in units]
    _set_prefetch(model, prefetched, parallel.fsdp_prefetch, always_gathered)


def _set_communication(
    model: nn.Module,
    shard_mesh: DeviceMesh,
    parallel: ParallelSection,
    node_size: int | None,
    sums_in_order: bool,
) -> None:
    """Choose how units gather parameters and reduce gradients; a collective."""
    gather: Any = None
    ranks = shard_mesh.size()
    if parallel.hierarchical_gather and node_size is not None and 1 < node_size < ranks:
        check_divides("node_size", node_size, ranks)
        from weft.parallel.hierarchical_gather import HierarchicalAllGather

        gather = HierarchicalAllGather(shard_mesh, node_size)
    for unit in iter_fsdp_units(model):
        # A divide factor of one needs plain sums: gloo has no pre-multiplied sum.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        allow_reshard_of_dtensors(unit)
        if sums_in_order:
            replace_all_reduce(unit, OrderedSum)
        if gather is not None:
            unit.set_custom_all_gather(gather)
        if parallel.symmetric_memory:
            use_symmetric_memory(unit)


def _fsdp_policies(
    parallel: ParallelSection, device: str, compute_dtype: torch.dtype, reduce_dtype: torch.dtype
) -> dict[str, Any]:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype if compute_dtype != torch.float32 else None,
        reduce_dtype=reduce_dtype,
        # Integer tokens and positions must not be cast.  The blocks' inputs already have the
        # compute dtype, and the table of rotary embeddings must stay in float32.
        cast_forward_inputs=False,
    )
    # Pinned memory needs an accelerator, and only helps with one.
    offload = CPUOffloadPolicy(pin_memory=device != "cpu")
    return {
        "mp_policy": precision,
        "offload_policy": offload if parallel.cpu_offload else OffloadPolicy(),
    }


def _submodules_in(block: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Module]:
    submodules = set(block.modules())
    return [module for module in modules if module in submodules]


def _choose_shard_dim(ranks: int) -> Callable[[nn.Parameter], Shard | None]:
    """Return FSDP's ``shard_placement_fn`` for stacks of matrices, one per expert.

    It shards by experts, or by matrix rows if only those divide evenly.  128 experts on 256 ranks
    are sharded by rows, because half of the shards would be padding otherwise.  It never splits a
    row, because 8-bit moments are quantized in blocks of a row.
    """
    from torch.distributed.tensor import Shard

    def shard_placement_fn(param: nn.Parameter) -> Shard | None:
        even = [
            dim
            for dim, size in enumerate(param.shape[:2])
            if size % (ranks * num_shards(param, dim)) == 0
        ]
        return Shard(even[0]) if param.dim() >= 3 and even else None

    return shard_placement_fn


def _shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    assert mesh.mesh_dim_names is not None
    shard_mesh = mesh[mesh.mesh_dim_names[-1]]
    ranks = shard_mesh.mesh.tolist()
    if ranks != sorted(ranks):
        # FSDP numbers shards as the process group does, in ascending order of ranks.  DTensor
        # numbers them along the mesh.
        raise ValueError(f"the ranks of a shard group must ascend along the mesh, not {ranks}")
    return shard_mesh


def _drop_trivial_replicas(mesh: DeviceMesh) -> DeviceMesh:
    return mesh if mesh.size(0) > 1 else _shard_mesh(mesh)


def check_divides(name: str, number: int, degree: int) -> None:
    """Raise ValueError if ``number`` does not divide a shard group of ``degree``."""
    if degree % number:
        raise ValueError(f"{name}={number} does not divide the {degree} ranks of a shard group")


def _build_reshard(
    mesh: DeviceMesh, reshard_after_forward: bool | int, num_ranks: int = 0
) -> tuple[bool | int, DeviceMesh | None]:
    """Return ``reshard_after_forward`` as `fully_shard` takes it, and its mesh.

    Collective if it is a number of ranks: all ranks of the world create one mesh.  It is a part of
    ``num_ranks`` (0: those of ``mesh``), and becomes the same part of those of ``mesh``.
    """
    ranks = reshard_after_forward
    if not isinstance(ranks, bool):
        ranks = max(1, ranks * mesh.size() // (num_ranks or mesh.size()))
        check_divides("reshard_after_forward", ranks, mesh.size())
        ranks = {1: False, mesh.size(): True}.get(ranks, ranks)
    if isinstance(ranks, bool):
        return ranks, None
    grid = mesh.mesh.view(-1, ranks)
    return ranks, create_mesh(mesh.device_type, grid, ("copies", "shards"), {})


def _set_prefetch(root: Any, units: list[list[Any]], depth: int, always_gathered: set[Any]) -> None:
    """Prefetch ``depth`` units ahead.

    By default, FSDP prefetches one unit in backward, and in forward gathers a unit when it is
    called.  On an accelerator this overlaps too, as long as the host runs ahead of the device.  An
    explicit list issues the gather before the kernels of the unit in front, so that a slow host
    does not delay the gather.

    ``units`` are in the order of their use, each followed by the units inside it.  Backward gathers
    only those that are not in ``always_gathered``.
    """
    for i, (unit, *inner_units) in enumerate([[root], *units]):
        unit.set_modules_to_forward_prefetch([*inner_units, *chain(*units[i : i + depth])])
    before: list[list[Any]] = []  # the nearest first
    for unit, *inner_units in [*units, [root]]:
        # An empty list would mean the default.  The unit itself is gathered already: a no-op.
        unit.set_modules_to_backward_prefetch(list(chain(*before[:depth])) or [unit])
        for inner in inner_units:
            inner.set_modules_to_backward_prefetch([inner])
        if unit not in always_gathered:
            before.insert(0, [unit, *inner_units])


# --------------------------------------------------------------------------- in a step


def set_gradient_sync(model: nn.Module, last: bool, mode: Literal["microbatch", "step"]) -> None:
    """Choose the gradient reduction of the next backward pass; call it before each.

    In a pipeline the schedule sets these flags of FSDP: see `weft.parallel.private.wrap_backward`.

    Args:
        model: a module that `apply_fsdp` has sharded; any other is ignored.
        last: True for the last microbatch of the step.
        mode: *step*: gradients accumulate on every rank, and the last backward pass reduces them.
            *microbatch*: every backward pass reduce-scatters inside the shard group, and the last
            one also all-reduces over the replicas (MiCS's two hops).
    """
    if not is_fsdp_unit(model):
        return
    model.set_requires_gradient_sync(last or mode == "microbatch")
    model.set_requires_all_reduce(last)
    for unit in iter_fsdp_units(model):
        if unit.keeps_unsharded:
            # Keep parameters from one microbatch for the next: one gather per step.
            unit.set_reshard_after_backward(last, recurse=False)


class OrderedSum:
    """Sum of a unit's gradients over replicas and microbatches, in a fixed order.

    A floating-point sum depends on its order.  An all-reduce of the sums of each rank orders them
    by rank, then by microbatch, so its bits depend on the number of ranks.  Here microbatch m of
    rank 0 comes first, then microbatch m of rank 1, and so on, then microbatch m + 1 of rank 0: the
    order of a global batch that is dealt to the ranks in turn (`weft.data.loader.Loader`).  Each
    rank adds its share of the elements, after an all-to-all.  Float addition has no other freedom.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.total_C: Tensor | None = None  # this rank's share of the running sums of a step

    def __call__(self, gradients: Tensor, is_last: bool) -> None:
        """Add the gradients of a microbatch, a flat tensor; a collective.

        Args:
            gradients: become the sums of the step if ``is_last``, else zeros.
            is_last: True for the last microbatch.
        """
        ranks = self.group.size()
        sent_RC = pad(gradients, (0, -len(gradients) % ranks)).view(ranks, -1)
        received_RC = torch.empty_like(sent_RC)
        dist.all_to_all_single(received_RC, sent_RC, group=self.group)
        total_C, *others = received_RC if self.total_C is None else (self.total_C, *received_RC)
        for received_C in others:
            total_C = total_C + received_C
        self.total_C = None if is_last else total_C
        if is_last:
            sums = sent_RC.flatten()
            all_gather(sums, total_C, self.group)
            gradients.copy_(sums[: len(gradients)])
        else:
            gradients.zero_()


def reshard(model: nn.Module) -> None:
    """Free the parameters that a forward pass without a backward pass has gathered.

    Until then the model's parameters are the gathered ones, in the compute dtype.  The optimizer
    does not update them, and a checkpoint must not save them.  One rank has copies instead.
    """
    for unit in iter_fsdp_units(model):
        unit.reshard()
    restore_parameters(model)
