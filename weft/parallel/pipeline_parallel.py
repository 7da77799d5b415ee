"""Pipeline parallelism: this rank's stages under a schedule of torch.distributed.pipelining.

The engine of torch passes activations and gradients between stages and orders the work; what is
given to it here are stages of known shapes (it would otherwise run a stage to find out, which does
not work under tensor parallelism), microbatches of equal size, and a loss that is divided by the
tokens of the whole step beforehand (it would otherwise divide by the number of microbatches).

Shapes: B rows of a microbatch, T tokens of a row on this rank, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.parallel.private import (
    unshard_for_split_backward,
    set_max_active_stages,
    enable_recv_grad,
    reduce_scatter_each_microbatch,
    load_schedule,
    skip_self_p2p_init,
)
from weft.plan.pipeline_schedule import is_schedule_file
from weft.plan.resolve import Plan


def build_pipeline_schedule(
    parts: list[nn.Module],
    plan: Plan,
    group: dist.ProcessGroup,
    device: torch.device,
    seq_len: int,
    sequence_parallel: bool,
    loss: Callable[[Tensor, Tensor], Tensor],
    headless: bool,
) -> Any:
    """The schedule object of torch.distributed.pipelining for this rank.

    Args:
        parts: this rank's stages, in order.
        group: of the pipeline.
        seq_len: tokens of a whole row.
        loss: of the last stage's output and the targets; not scaled any further.
        headless: whether that output is what the last product takes, and not logits.

    Returns:
        An object with ``step`` and ``eval``.
    """
    # Here, for it brings torch's compiler, and with it a fifth of what a launcher, which builds no
    # stages, would take to start.
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    pipeline = plan.pipeline
    assert pipeline is not None
    last = len(pipeline.stages) - 1
    tokens = seq_len // plan.cp
    hidden_BTD = (plan.microbatch, tokens // (plan.tp if sequence_parallel else 1), plan.model.dim)
    width = plan.model.dim if headless else plan.model.vocab_size // plan.tp
    out_BTX = (plan.microbatch, tokens, width)
    dtype = getattr(torch, plan.compute_dtype)

    def meta(shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    stages = [
        PipelineStage(
            part,
            stage,
            last + 1,
            device,
            input_args=torch.empty((plan.microbatch, tokens), dtype=torch.int64, device="meta")
            if stage == 0
            else meta(hidden_BTD),
            output_args=meta(out_BTX if stage == last else hidden_BTD),
            group=group,
        )
        for stage, part in zip(pipeline.stages_of(group.rank()), parts, strict=True)
    ]
    for each in stages:
        skip_self_p2p_init(each)
        enable_recv_grad(each)
        unshard_for_split_backward(each)
        if plan.gradient_sync == "microbatch":
            reduce_scatter_each_microbatch(each)
    options: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
    keeps = plan.reshard_after_forward is False
    with set_max_active_stages(len(stages)) if keeps else nullcontext():
        if is_schedule_file(pipeline.schedule):
            return load_schedule(pipeline.schedule, stages, plan.accumulation, **options)
        kind = get_schedule_class(pipeline.schedule)
        single = len(stages) == 1 and pipeline.schedule in ("GPipe", "1F1B")
        return kind(stages[0] if single else stages, plan.accumulation, **options)
