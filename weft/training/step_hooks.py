"""The hooks of a run's techniques, in the order of the calls of `StepHook`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from weft.models import Family
from weft.parallel.mesh import Mesh
from weft.parallel.step_hook import StepHook
from weft.planning.plan import Plan


def build_hooks(
    plan: Plan,
    model_parts: Sequence[nn.Module],
    mesh: Mesh,
    family: Family,
    device: torch.device,
    optimizer: Optimizer | None = None,
) -> Iterator[StepHook]:
    """Yield the hooks of a plan; the model's parameters must be allocated.

    Each hook has its technique's file, which is imported only if the plan has the technique.

    Args:
        plan: of the run.
        model_parts: this rank's parts of the model.
        mesh: coordinates of this rank.
        family: of the model.
        device: of the parameters.
        optimizer: None: the model is only evaluated.
    """
    job = plan.job
    if plan.float8_all_gather:
        from weft.parallel.float8 import Float8AllGather

        yield Float8AllGather(model_parts)
    # Copied before all passes; their gradients are summed after them.
    if plan.tied_ranks:
        from weft.parallel.tied_parameters import TiedParameters

        yield TiedParameters(model_parts, plan, mesh)
    # One rank without FSDP computes on copies in the compute dtype.
    for part in model_parts:
        if copies := vars(part).get("compute_copies"):
            yield copies
    if family.moe_layers is not None:
        from weft.optim.balance import ExpertBalancer

        # With adapters the router is frozen: see `weft.parallel.lora`.
        rate = 0.0 if plan.lora_rank else getattr(plan.model, "balance_rate", 0.0)
        by_layer = job.monitor.router_metrics
        layers = family.moe_layers
        yield ExpertBalancer(model_parts, layers, rate, mesh, device, by_layer, plan.etp)
    threshold, by_layer = job.optim.qk_clip_threshold, job.monitor.attention_logits
    if threshold or by_layer:
        from weft.optim.qk_clip import QKClip

        yield QKClip(threshold, by_layer, plan, model_parts, mesh, device)
    # After QK-clip, which changes weights.
    if job.optim.ema_decay and optimizer is not None:
        from weft.optim.weight_average import WeightAverage

        yield WeightAverage(optimizer, job.optim.ema_decay)
    # May ask for the passes to be repeated; the other hooks then begin them again.
    if plan.ep > 1:
        from weft.parallel.dispatchers import find_overflow

        if overflow := find_overflow(model_parts, plan.ep, job.parallel, device):
            yield overflow
