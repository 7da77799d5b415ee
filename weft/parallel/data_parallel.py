"""Data parallelism: every rank has its own tokens; who keeps what of the model, and for how long.

The problem.  Parameters, gradients and AdamW's two moments take 16 bytes a parameter in float32.
A copy of them on every rank does not fit; spread over all ranks, each layer has to come over the
network whenever it is used.  Between the two lie three knobs, and the schemes with names are
settings of them.  All of it is done by FSDP2's `fully_shard`, which gathers a *unit* of parameters
before its use and reduce-scatters its gradients after.  A unit is a block; the root has the rest.

1. ``reshard_after_forward``: when gathered parameters are freed.
2. ``gradient_sync``: gradients are reduced with every microbatch, or add up whole on every rank
   and are reduced with the last one of a step.

       reshard   sync         as in    whole on every rank     a unit's collectives in a step
       never     step         ZeRO-1   parameters, gradients   1 gather, 1 reduction
       never     microbatch   ZeRO-2   parameters              1 gather, M reductions
       always    microbatch   ZeRO-3   nothing                 2 M gathers, M reductions
       always    step                  gradients               2 M gathers, 1 reduction

   with M microbatches a step (ZeRO: arXiv:1910.02054).  Optimizer states are sharded in all four.
   Parameters are whole from their first use in a step to its end, since it is their shards that
   the optimizer moves.  A number instead of *always* leaves a shard over that many neighbours, so
   that the gather for backward stays among them (as in ZeRO++, arXiv:2306.10209).
3. ``dp_shard``: over how many ranks a copy is spread.  The others, ``dp_replicate``, are replicas.

The third knob is MiCS's (arXiv:2205.00119): take the smallest group that holds the model, and
gathers stay on the fast links whatever the size of the cluster.  Two ideas go with it.  *Two-hop
synchronisation*: with every microbatch gradients are reduce-scattered inside the group, where
the shards add up, and only at the end of the step all-reduced over the replicas.  *Hierarchical
gathering*, for a group that spans nodes: see `weft.parallel.hierarchical_gather`.

Gradients are *summed* over the data-parallel ranks, not averaged: the loss is already divided by
the number of valid tokens of the whole step.

The group's size is the planner's choice and is not made here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from weft.config.schema import ParallelSection
from weft.parallel.dtensor import to_local
from weft.parallel.hierarchical_gather import check_divides, build_hierarchical_gather
from weft.parallel.private import (
    move_fsdp_hooks,
    use_reshard_mesh,
    allow_integer_params,
    unflatten_axis,
    use_symmetric_memory,
)

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
    experts: Sequence[nn.Module] = (),
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Shard ``model`` in place: a unit per block, and the root.

    Every rank of the world calls this, and as often as every other: it makes process groups.

    Args:
        model: whole or a pipeline stage's part, on the meta device or filled.  With
            ``cpu_offload`` parameters (not buffers) must be on the CPU at the first forward pass.
        blocks: modules of ``model`` in the order of their use.
        mesh: two axes, replicas and then shards; by itself or part of a larger mesh.
        parallel: read here are ``prefetch``, ``persist_below``, ``cpu_offload``,
            ``symmetric_memory`` and ``hierarchical_gather``.
        compute_dtype: of gathered parameters, and so of forward and backward.
        reduce_dtype: of the reduction of gradients, and of their sums until then.
        reshard_after_forward: for the blocks.  A number: ranks that keep a copy among them.
        node_size: how many consecutive ranks of a shard group share a node; None: all, or now
            more, now less.  Read with ``hierarchical_gather`` only.
        experts: modules of ``blocks`` whose parameters are stacks of matrices.
        expert_mesh: like ``mesh``, for experts that are units of their own; None: their blocks'.

    Raises:
        ValueError: if ``reshard_after_forward`` or ``node_size`` does not divide the shard group,
            ``reshard_after_forward`` is a number and the blocks are tensor parallel, or the ranks
            of a shard group do not ascend along the mesh.
    """
    assert mesh.mesh_dim_names is not None
    shard_mesh = mesh[mesh.mesh_dim_names[-1]]
    ranks = shard_mesh.mesh.tolist()
    if ranks != sorted(ranks):
        # A process group numbers its ranks in ascending order, and FSDP its shards as the group,
        # where DTensor goes by the mesh.
        raise ValueError(f"the ranks of a shard group must ascend along the mesh, not {ranks}")
    options = _fsdp_policies(parallel, mesh.device_type, compute_dtype, reduce_dtype)

    def over(mesh: DeviceMesh) -> DeviceMesh:
        assert mesh.mesh_dim_names is not None
        return mesh if mesh.size(0) > 1 else mesh[mesh.mesh_dim_names[-1]]

    least = parallel.param_persistence_threshold
    apart = experts if expert_mesh is not None else ()
    spread = {param for module in apart for param in module.parameters()}
    left = {param for block in blocks for param in block.parameters() if param.numel() >= least}
    left |= spread
    with allow_integer_params(), _reshard_context(shard_mesh, reshard_after_forward, blocks) as reshard_blocks:
        # The root first, with all that is not left to the blocks.  It is needed at both ends of
        # the forward pass (embedding and head), so it stays gathered: the place for parameters
        # too small to be worth a gather.  The blocks that use them have no hooks for them, and so
        # recomputing a block in backward is nothing special.
        options["mesh"] = over(mesh)
        fully_shard(model, reshard_after_forward=False, ignored_params=left, **options)
        # Over some of the ranks FSDP reshards by rows alone.
        anyhow = isinstance(reshard_blocks, bool)
        options["shard_placement_fn"] = _choose_shard_dim(shard_mesh.size()) if anyhow and experts else None
        for block in blocks:
            inside = _submodules_in(block, apart)
            for module in inside:
                assert expert_mesh is not None
                mine = options | {"mesh": over(expert_mesh)}
                if anyhow:
                    mine["shard_placement_fn"] = _choose_shard_dim(expert_mesh.size(1))
                fully_shard(module, reshard_after_forward=reshard_blocks, **mine)
            taken = {param for param in block.parameters() if param.numel() < least}
            fully_shard(
                block,
                reshard_after_forward=reshard_blocks,
                ignored_params=taken - spread,
                **options,
            )
            for module in inside:
                move_fsdp_hooks(module, block)

    gather = build_hierarchical_gather(shard_mesh, node_size) if parallel.hierarchical_gather else None
    for unit in _fsdp_modules(model):
        # A factor of one needs plain sums: gloo has no pre-multiplied sum.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        if gather is not None:
            unit.set_custom_all_gather(gather)
        if parallel.symmetric_memory:
            use_symmetric_memory(unit)
        unit.keeps_unsharded = unit is model or reshard_blocks is False
    _set_prefetch(
        model, [[block, *_submodules_in(block, apart)] for block in blocks], parallel.fsdp_prefetch
    )


def _fsdp_policies(
    parallel: ParallelSection, device: str, compute_dtype: torch.dtype, reduce_dtype: torch.dtype
) -> dict[str, Any]:
    """What every unit computes and reduces in, and where its shards lie."""
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype if compute_dtype != torch.float32 else None,
        reduce_dtype=reduce_dtype,
        # Integer tokens and positions are not touched; the blocks' inputs already have the
        # compute dtype, and a float32 table of rotations must stay what it is.
        cast_forward_inputs=False,
    )
    # Pinned memory needs an accelerator, and is of use only with one.
    offload = CPUOffloadPolicy(pin_memory=device != "cpu")
    return {
        "mp_policy": precision,
        "offload_policy": offload if parallel.cpu_offload else OffloadPolicy(),
    }


def _submodules_in(block: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Module]:
    held = set(block.modules())
    return [module for module in modules if module in held]


def _choose_shard_dim(ranks: int) -> Callable[[nn.Parameter], Shard | None]:
    """Cut a stack of matrices by experts, or by rows where only those divide.

    128 experts on 256 ranks are cut by rows: half of the shards would be padding otherwise.  No row
    is cut: eight-bit moments are of whole blocks of a row.
    """

    def placement(param: nn.Parameter) -> Shard | None:
        even = [dim for dim, size in enumerate(to_local(param).shape[:-1]) if size % ranks == 0]
        return Shard(even[0]) if param.dim() == 3 and even else None

    return placement


def _fsdp_modules(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


@contextmanager
def _reshard_context(
    mesh: DeviceMesh, reshard_after_forward: bool | int, blocks: list[nn.Module]
) -> Iterator[bool | int]:
    """The context to call `fully_shard` in, and what to say to it.

    For a number of ranks, with a mesh that all ranks of the world make here, once.
    """
    ranks = reshard_after_forward
    if not isinstance(ranks, bool):
        check_divides("reshard_after_forward", ranks, mesh.size())
        ranks = {1: False, mesh.size(): True}.get(ranks, ranks)
    if isinstance(ranks, bool):
        yield ranks
        return
    if any(isinstance(param, DTensor) for block in blocks for param in block.parameters()):
        rule = "FSDP cannot reshard tensor-parallel weights over fewer ranks"
        raise ValueError(f"reshard_after_forward = {ranks}: {rule}; use True or False")
    smaller = unflatten_axis(mesh, (mesh.size() // ranks, ranks), ("copies", "kept"))
    with use_reshard_mesh(smaller):
        yield ranks


def _set_prefetch(root: Any, blocks: list[list[Any]], depth: int) -> None:
    """Gather ``depth`` blocks ahead; ``blocks`` in order of use, each with the units inside of it.

    Left alone, FSDP gathers one unit ahead in backward, and in forward a unit when it is called:
    that overlaps too, on a device, as far as the host is ahead of it.  With a list the gather is
    issued before the kernels of the unit in front, so a slow host does not delay it.
    """
    for i, (unit, *inside) in enumerate([[root], *blocks]):
        unit.set_modules_to_forward_prefetch([*inside, *chain(*blocks[i : i + depth])])
    blocks = blocks[::-1]
    for i, (unit, *inside) in enumerate([[root], *blocks]):
        # An empty list would mean the default.  The unit itself is there already: no gather.
        ahead = list(chain(*blocks[i : i + depth])) or [unit]
        unit.set_modules_to_backward_prefetch(ahead)
        for each in inside:
            each.set_modules_to_backward_prefetch([each])


# --------------------------------------------------------------------------- in a step


def set_gradient_sync(model: nn.Module, last: bool, mode: Literal["microbatch", "step"]) -> None:
    """Say what the next backward pass does with gradients; call it before every one.

    Args:
        model: what `apply_fsdp` was given; any other is left alone.
        last: whether it is the last microbatch of the step.
        mode: *step*: gradients add up on every rank, and the last backward pass reduces them.
            *microbatch*: every one reduce-scatters inside the shard group, the last one also
            all-reduces over the replicas (MiCS's two hops).

    In a pipeline the schedule sets FSDP's flags: see `reduce_each_microbatch`.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_requires_gradient_sync(last or mode == "microbatch")
    model.set_requires_all_reduce(last)
    for unit in _fsdp_modules(model):
        if unit.keeps_unsharded:
            # Gathered at the end of one microbatch and needed by the next: one gather a step.
            unit.set_reshard_after_backward(last, recurse=False)


def reshard(model: nn.Module) -> None:
    """Free what a forward pass without a backward pass left gathered.

    Until then the model's parameters are the gathered ones, in the compute dtype, which the
    optimizer does not know and a checkpoint must not hold.
    """
    for unit in _fsdp_modules(model):
        unit.reshard()
