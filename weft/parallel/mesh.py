"""The device mesh: named axes over all ranks.

Parameters and tokens are split over the same ranks in two ways.  Parameters are sharded over the
axes ``pp, dp_replicate, dp_shard, tp``.  The ranks of a context-parallel group hold the same
parameters and different tokens, as data-parallel ranks do, so FSDP counts them in ``dp_shard``.
Tokens are also split over ``cp``, which has its own process group.  With expert parallelism, expert
weights use ``dp_shard`` split in two axes: see `weft.parallel.expert_parallel`.

`weft.plan.placement` chooses the order of the axes over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft.plan.placement import AXES, rank_to_coordinates
from weft.plan.plan import Plan

# In weft, an axis belongs to a mesh and a dim to a tensor.
PARAMETER_AXES = ("pp", "dp_replicate", "dp_shard", "tp")
EXPERT_AXES = ("pp", "dp_replicate", "edp", "ep", "tp")


@dataclass(frozen=True)
class Mesh:
    """The process groups of this rank, and its coordinates."""

    param_mesh: DeviceMesh  # axes `PARAMETER_AXES`; dp_shard includes cp
    cp_group: dist.ProcessGroup | None  # None if cp is 1
    coordinates: dict[str, int]  # this rank's index on each of `AXES`
    expert_mesh: DeviceMesh | None = None  # axes `EXPERT_AXES`; None if ep is 1

    @property
    def dp_rank(self) -> int:
        """This rank's index among the ranks that read different sequences."""
        shards = self.get_group("dp_shard").size() // (self.cp_group.size() if self.cp_group else 1)
        return self.coordinates["dp_replicate"] * shards + self.coordinates["dp_shard"]

    def get_group(self, axis: str) -> dist.ProcessGroup:
        """Return this rank's process group along one of `PARAMETER_AXES`."""
        return self.param_mesh.get_group(axis)

    def all_reduce_dp_cp(self, value: torch.Tensor) -> torch.Tensor:
        """Sum ``value`` in place over all data- and context-parallel ranks."""
        for axis in ("dp_shard", "dp_replicate"):
            if (group := self.get_group(axis)).size() > 1:
                dist.all_reduce(value, group=group)
        return value


def axis_by_group_name(mesh: Mesh) -> dict[str, str]:
    """Return the mesh axis of each of this rank's process groups, by group name."""
    groups = {str(dist.group.WORLD.group_name): "all ranks"} if dist.group.WORLD else {}
    for axis in PARAMETER_AXES:
        if (group := mesh.get_group(axis)).size() > 1:
            groups[str(group.group_name)] = axis
    if mesh.cp_group is not None:
        groups[str(mesh.cp_group.group_name)] = "cp"
    if mesh.expert_mesh is not None:
        for axis in ("edp", "ep"):
            groups[str(mesh.expert_mesh.get_group(axis).group_name)] = axis
    return groups


def build_mesh(plan: Plan) -> Mesh:
    """Build the mesh of ``plan``; collective over the default process group."""
    ranks = _rank_grid(plan)
    shape = (plan.pp, plan.dp_replicate, plan.dp_shard * plan.cp, plan.tp)
    param_mesh = DeviceMesh(plan.device, ranks.reshape(shape), mesh_dim_names=PARAMETER_AXES)
    cp_group = None
    if plan.cp > 1:
        cp_ranks = ranks.movedim(AXES.index("cp"), -1).reshape(-1, plan.cp)
        cp_group = DeviceMesh(plan.device, cp_ranks, mesh_dim_names=("other", "cp")).get_group("cp")
    expert_mesh = None
    if plan.ep > 1:
        expert_ranks = ranks.reshape(*shape[:2], -1, plan.ep, plan.tp)
        expert_mesh = DeviceMesh(plan.device, expert_ranks, mesh_dim_names=EXPERT_AXES)
    own = rank_to_coordinates(dist.get_rank(), plan.axis_sizes, plan.axis_order)
    return Mesh(param_mesh, cp_group, own, expert_mesh)


def _rank_grid(plan: Plan) -> torch.Tensor:
    """Return all ranks in a grid: int64, one dim for each of `AXES`."""
    order: Sequence[str] = plan.axis_order
    ranks = torch.arange(plan.world_size).reshape([plan.axis_sizes[axis] for axis in order])
    return ranks.permute([order.index(axis) for axis in AXES])
