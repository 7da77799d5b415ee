"""Pipeline parallelism with schedules of torch.distributed.pipelining.

torch's runtime orders the work and passes activations and gradients between stages.  This module
gives it stages of known shapes, because torch would otherwise run a stage to infer them, which
fails under tensor parallelism.  Microbatches have equal size.  The loss is already divided by the
tokens of the step, so torch must not divide gradients by the number of microbatches.

`weft.planning.stages` assigns layers to stages; `weft.planning.pipeline_schedule` reads a
schedule's order.

Shapes in names: B sequences of a microbatch, T tokens on this rank, D model width, X output width.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.parallel.private import wrap_backward
from weft.planning.pipeline_schedule import planned_schedule
from weft.planning.plan import Plan


def build_pipeline_schedule(
    model_parts: list[Any],
    plan: Plan,
    group: dist.ProcessGroup,
    device: torch.device,
    seq_len: int,
    sequence_parallel: bool,
    loss_fn: Callable[[Tensor, Any], Tensor],
    output_width: int,
) -> Any:
    """Build this rank's schedule of torch.distributed.pipelining.

    Args:
        model_parts: this rank's stages, in order.
        plan: has a pipeline.
        group: the pipeline's process group.
        device: device of this rank.
        seq_len: tokens of a full sequence.
        sequence_parallel: stages exchange only this tensor-parallel rank's slice of the sequence.
        loss_fn: takes the last stage's output and the microbatch's target, see
            `weft.parallel.private.run_schedule`; torch does not scale its result.
        output_width: of what the last stage returns: this rank's logits, or hidden states from
            which ``loss_fn`` computes the logits.

    Returns:
        An object with ``step`` and ``eval``.
    """
    # A local import, because it imports torch's compiler: a fifth of the start time of the
    # launcher, which builds no stages.
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    from weft.parallel import private_schedules

    pipeline = plan.pipeline
    assert pipeline is not None
    num_stages = len(pipeline.stages)
    tokens = seq_len // plan.sequence_shards
    hidden_tokens = tokens // (plan.tp if sequence_parallel else 1)
    hidden_BTD = (plan.microbatch_size, hidden_tokens, plan.model.dim)
    num_outputs = 1 + getattr(plan.model, "mtp_layers", 0)
    out_BTX = (num_outputs * plan.microbatch_size, tokens, output_width)
    dtype = getattr(torch, plan.compute_dtype)

    def meta(shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    stages = [
        PipelineStage(
            part,
            stage_id,
            num_stages,
            device,
            input_args=torch.empty((plan.microbatch_size, tokens), dtype=torch.int64, device="meta")
            if stage_id == 0
            else meta(hidden_BTD),
            output_args=meta(out_BTX if stage_id == num_stages - 1 else hidden_BTD),
            group=group,
            dw_builder=part.weight_gradients.collect if plan.splits_backward else None,
        )
        for stage_id, part in zip(pipeline.stages_on_rank(group.rank()), model_parts, strict=True)
    ]
    for stage in stages:
        private_schedules.skip_self_p2p_init(stage)
        private_schedules.enable_recv_grad(stage)
        private_schedules.free_received(stage)
        private_schedules.free_evaluated(stage)
        private_schedules.free_loss_graph(stage)
        wrap_backward(stage, plan.splits_backward, plan.gradient_sync == "microbatch")
        # With world_size_invariant, the halves of several microbatches would be added first.
        if pipeline.splits_backward and not plan.splits_backward:
            private_schedules.join_backward(stage, plan.num_microbatches)
    options: dict[str, Any] = {"loss_fn": loss_fn, "scale_grads": False}
    keeps_unsharded = plan.reshard_after_forward is False
    keep = private_schedules.set_max_active_stages
    with keep(len(stages)) if keeps_unsharded else nullcontext():
        if pipeline.has_schedule_file:
            load = private_schedules.load_schedule
            schedule = load(pipeline.schedule, stages, plan.num_microbatches, **options)
            private_schedules.free_sent(schedule, planned_schedule(plan))
            return schedule
        schedule_class: Any = get_schedule_class(pipeline.schedule)
        single = len(stages) == 1 and pipeline.schedule in ("GPipe", "1F1B")
        schedule = schedule_class(stages[0] if single else stages, plan.num_microbatches, **options)
    private_schedules.free_sent(schedule, planned_schedule(plan))
    if plan.overlaps_dispatch:
        private_schedules.overlap_passes(schedule, device)
    return schedule
