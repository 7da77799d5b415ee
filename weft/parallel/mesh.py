"""The device mesh: named axes over all ranks.

Parameters and tokens are split over the same ranks in two ways.  Parameters are sharded over the
axes ``pp, dp_replicate, dp_shard, tp``.  The ranks of a context-parallel group hold the same
parameters and different tokens, as data-parallel ranks do, so FSDP counts them in ``dp_shard``.
Tokens are also split over ``cp``, which has its own process group.  With expert parallelism, expert
weights use ``dp_shard`` split in two axes: see `weft.parallel.expert_parallel`.  Experts without
tensor parallelism use ``dp_shard x tp`` so: see `weft.parallel.experts_without_tp`.  With
``train.world_size_invariant`` no weight is sharded over data-parallel ranks: all of them, and the
ranks of ``cp``, are ``dp_replicate``.

`weft.planning.placement` chooses the order of the axes over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from weft.config.axes import AXES, BATCH_AXES, EXPERT_AXES, PARAMETER_AXES
from weft.parallel.private import create_group
from weft.planning.placement import rank_to_coordinates
from weft.planning.plan import Plan

CreateGroup = Callable[[str, Tensor, str], Any]  # see `create_group`
Groups = dict[str, dist.ProcessGroup]  # by axis; "this rank" for all axes of one rank


@dataclass(frozen=True)
class Mesh:
    """The process groups of this rank, and its coordinates."""

    param_mesh: DeviceMesh  # axes `PARAMETER_AXES`; one includes cp, see above
    coordinates: dict[str, int]  # this rank's index on each of `AXES`
    dp_rank: int  # this rank's index among the ranks that read different sequences
    groups: Groups  # of both meshes, of cp and of tied parameters
    cp_group: dist.ProcessGroup | None  # None if cp is 1
    expert_mesh: DeviceMesh | None = None  # axes `EXPERT_AXES`; None: experts are as other weights
    router_axes: tuple[str, ...] = ()  # also split the tokens of routers: tp, if experts are whole

    def get_group(self, axis: str) -> dist.ProcessGroup:
        """Return this rank's process group along one of `PARAMETER_AXES`."""
        return self.param_mesh.get_group(axis)

    @cached_property
    def dp_cp_groups(self) -> list[dist.ProcessGroup]:
        """This rank's groups of several data- and context-parallel ranks."""
        groups = map(self.get_group, reversed(BATCH_AXES))
        return [group for group in groups if group.size() > 1]

    def all_reduce_dp_cp(self, value: Tensor, *axes: str) -> Tensor:
        """Sum ``value`` in place over data- and context-parallel ranks, and other axes."""
        for group in (*self.dp_cp_groups, *map(self.get_group, axes)):
            if group.size() > 1:
                dist.all_reduce(value, group=group)
        return value


def axis_by_group_name(mesh: Mesh) -> dict[str, str]:
    """Return the mesh axis of each of this rank's process groups, by group name."""
    groups = {"all ranks": dist.group.WORLD, **mesh.groups}
    return {str(group.group_name): axis for axis, group in groups.items() if group is not None}


def build_mesh(plan: Plan, create_group: CreateGroup = create_group) -> Mesh:
    """Build the mesh of ``plan``; collective over the default process group."""
    ranks = torch.arange(plan.world_size).reshape([plan.axis_sizes[a] for a in plan.axis_order])
    ranks = ranks.permute([plan.axis_order.index(axis) for axis in AXES])
    groups: Groups = {}
    replicas = plan.dp_cp_size // plan.fsdp_size
    shape = (plan.pp, replicas, plan.fsdp_size, plan.tp)
    param_mesh = create_mesh(
        plan.device, ranks.reshape(shape), PARAMETER_AXES, groups, create_group
    )
    if plan.cp > 1:
        cp_ranks = ranks.movedim(AXES.index("cp"), -1).reshape(-1, plan.cp)
        groups["cp"] = create_group(plan.device, cp_ranks, "cp")
    expert_mesh, has_experts_without_tp = None, plan.etp < plan.tp
    if plan.ep > 1 or has_experts_without_tp:
        if plan.world_size_invariant:  # other ranks have replicas of an expert
            replicas = replicas * plan.tp // plan.etp // plan.ep
            groups = {"dp x cp" if a == "dp_replicate" else a: g for a, g in groups.items()}
        expert_ranks = ranks.reshape(plan.pp, replicas, -1, plan.ep, plan.etp)
        expert_mesh = create_mesh(plan.device, expert_ranks, EXPERT_AXES, groups, create_group)
    own = rank_to_coordinates(dist.get_rank(), plan.axis_sizes, plan.axis_order)
    tied_ranks = set(plan.tied_ranks or ())
    if len(tied_ranks) == 2 < plan.pp:
        is_peer = [(pp in tied_ranks) == (own["pp"] in tied_ranks) for pp in range(plan.pp)]
        groups["tied"] = create_group(plan.device, ranks.reshape(plan.pp, -1).T[:, is_peer], "tied")
    dp_rank = own["dp_replicate"] * plan.dp_shard + own["dp_shard"]
    meshes = param_mesh, own, dp_rank, groups, groups.get("cp"), expert_mesh
    return Mesh(*meshes, ("tp",) * has_experts_without_tp)


def create_mesh(
    device: str,
    ranks: Tensor,
    axes: tuple[str, ...],
    groups: Groups,
    create_group: CreateGroup = create_group,
) -> DeviceMesh:
    """Create a mesh and its process groups; collective over all ranks of the world.

    Args:
        device: type of the devices.
        ranks: global ranks with this one among them, one dim for each axis.
        axes: names.
        groups: existing groups, by axis; new ones are added.  All axes of one rank share a group.
        create_group: creates a group; a collective.
    """
    own_groups = []
    for dim, (axis, size) in enumerate(zip(axes, ranks.shape, strict=True)):
        name = axis if size > 1 else "this rank"
        if name not in groups:
            groups[name] = create_group(device, ranks.movedim(dim, -1).reshape(-1, size), name)
        own_groups.append(groups[name])
    return DeviceMesh.from_group(own_groups, device, ranks.contiguous(), mesh_dim_names=axes)
