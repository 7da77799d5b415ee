"""The device mesh: named axes over the ranks.

Two views of the same ranks.  Parameters live on the axes ``pp, dp_replicate, dp_shard, tp``: the
ranks of a context-parallel group need the same parameters for different tokens, which is what
data parallel means to FSDP, so they count among ``dp_shard`` there.  Tokens are cut over ``cp``, a
group of its own.  Where experts are spread, their parameters live on ``dp_shard`` cut in two: see
`weft.parallel.expert_parallel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft.plan.placement import AXES, rank_to_coordinates
from weft.plan.resolve import Plan

# An axis is always a mesh's; a dim is always a tensor's.
PARAMETER_AXES = ("pp", "dp_replicate", "dp_shard", "tp")
EXPERT_AXES = ("pp", "dp_replicate", "edp", "ep", "tp")


@dataclass(frozen=True)
class Mesh:
    """This rank's place among the others.

    ``params`` has the axes `PARAMETER_AXES`, its ``dp_shard`` including ``cp``.  ``at`` is this
    rank's index on each of `AXES`.
    """

    params: DeviceMesh
    context: dist.ProcessGroup | None  # None where cp is 1
    at: dict[str, int]
    experts: DeviceMesh | None = None  # the axes `EXPERT_AXES`; None where ep is 1

    @property
    def dp_rank(self) -> int:
        """This rank among those that read different rows."""
        shards = self.group("dp_shard").size() // (self.context.size() if self.context else 1)
        return self.at["dp_replicate"] * shards + self.at["dp_shard"]

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of this rank along one of `PARAMETER_AXES`."""
        return self.params.get_group(axis)

    def all_reduce_dp_cp(self, value: torch.Tensor) -> torch.Tensor:
        """``value`` added up in place over all ranks that see other tokens than this one."""
        for axis in ("dp_shard", "dp_replicate"):
            if (group := self.group(axis)).size() > 1:
                dist.all_reduce(value, group=group)
        return value


def axis_by_group_name(mesh: Mesh) -> dict[str, str]:
    """The mesh's axis of each process group of this rank, by the group's name."""
    groups = {str(dist.group.WORLD.group_name): "all ranks"} if dist.group.WORLD else {}
    for axis in PARAMETER_AXES:
        if (group := mesh.group(axis)).size() > 1:
            groups[str(group.group_name)] = axis
    if mesh.context is not None:
        groups[str(mesh.context.group_name)] = "cp"
    if mesh.experts is not None:
        for axis in ("edp", "ep"):
            groups[str(mesh.experts.get_group(axis).group_name)] = axis
    return groups


def build_mesh(plan: Plan) -> Mesh:
    """The mesh of ``plan`` over the default process group, in which all ranks take part."""
    ranks = _rank_grid(plan)
    shape = (plan.pp, plan.dp_replicate, plan.dp_shard * plan.cp, plan.tp)
    params = DeviceMesh(plan.device, ranks.reshape(shape), mesh_dim_names=PARAMETER_AXES)
    context = None
    if plan.cp > 1:
        rows = ranks.movedim(AXES.index("cp"), -1).reshape(-1, plan.cp)
        context = DeviceMesh(plan.device, rows, mesh_dim_names=("rest", "cp")).get_group("cp")
    experts = None
    if plan.ep > 1:
        cut = ranks.reshape(*shape[:2], -1, plan.ep, plan.tp)
        experts = DeviceMesh(plan.device, cut, mesh_dim_names=EXPERT_AXES)
    return Mesh(params, context, rank_to_coordinates(dist.get_rank(), plan.sizes, plan.order), experts)


def _rank_grid(plan: Plan) -> torch.Tensor:
    """Every rank at its place: int64, a dim for each of `AXES`."""
    order: Sequence[str] = plan.order
    ranks = torch.arange(plan.world_size).reshape([plan.sizes[axis] for axis in order])
    return ranks.permute([order.index(axis) for axis in AXES])
