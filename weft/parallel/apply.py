"""apply: turn a single-device model into this rank's part of it, in THE order.

The model knows nothing of ranks.  Everything that a layout does to it happens here,
in place, one line per technique, and the order of the lines is part of the design.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from weft.plan.resolve import Plan


def apply(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    blocks: Callable[[nn.Module], list[nn.Module]],
    reshard_after_forward: bool,
) -> None:
    """Shard ``model`` (on the meta device) in place.

    Gradients are *summed* over the data-parallel ranks, not averaged: the loss is already
    divided by the number of valid tokens of the whole step.
    """
    # One rank in float32 is the plain model: nothing to gather, nothing to cast.
    if plan.world_size == 1 and plan.compute_dtype == "float32":
        return
    shard(model, plan, mesh, blocks, reshard_after_forward)


def shard(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    blocks: Callable[[nn.Module], list[nn.Module]],
    reshard_after_forward: bool,
) -> None:
    """FSDP2 over ``dp_shard``, replicated over ``dp_replicate``: a unit per block, and the root."""
    compute = getattr(torch, plan.compute_dtype)
    policy = MixedPrecisionPolicy(
        param_dtype=compute if compute != torch.float32 else None,
        reduce_dtype=getattr(torch, plan.reduce_dtype),
        # Integer tokens and positions are not touched; the blocks' inputs already have the
        # compute dtype, and a float32 table of rotations must stay what it is.
        cast_forward_inputs=False,
    )
    data_mesh = mesh if plan.dp_replicate > 1 else mesh["dp_shard"]
    # Blocks first: what is left over then belongs to the root (embedding, norm, head).
    for block in blocks(model):
        fully_shard(
            block, mesh=data_mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward
        )
    # The root's parameters are needed at both ends of the forward pass: keep them gathered.
    fully_shard(model, mesh=data_mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A factor of one needs plain sums: gloo has no pre-multiplied sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def reshard(model: nn.Module) -> None:
    """Free what a forward pass without a backward pass left gathered.

    Until then the model's parameters are the gathered ones, in the compute dtype, which the
    optimizer does not know and a checkpoint must not hold.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Whether the next backward passes reduce gradients over ranks, or only add them up here."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
