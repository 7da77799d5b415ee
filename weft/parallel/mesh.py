"""The device mesh: named axes over the ranks, outermost first."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from weft.plan.resolve import Plan

# An axis is always a mesh's; a dim is always a tensor's.
AXES = ("dp_replicate", "dp_shard")


def build_mesh(plan: Plan) -> DeviceMesh:
    """The mesh of ``plan`` over the default process group, with every axis of ``AXES``."""
    return init_device_mesh(plan.device, (plan.dp_replicate, plan.dp_shard), mesh_dim_names=AXES)
