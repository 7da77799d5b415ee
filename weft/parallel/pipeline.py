"""Pipeline parallelism: this rank's stages under a schedule of torch.distributed.pipelining.

The engine of torch passes activations and gradients between stages and orders the work; what is
given to it here are stages of known shapes (it would otherwise run a stage to find out, which does
not work under tensor parallelism), microbatches of equal size, and a loss that is divided by the
tokens of the whole step beforehand (it would otherwise divide by the number of microbatches).

Shapes: B rows of a microbatch, T tokens of a row on this rank, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    _add_send_recv,
    _add_unshard_reshard,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from weft.plan.resolve import Plan
from weft.plan.timetable import is_file


def build_schedule(
    parts: list[nn.Module],
    plan: Plan,
    group: dist.ProcessGroup,
    device: torch.device,
    seq_len: int,
    sequence_parallel: bool,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Any:
    """The schedule object of torch.distributed.pipelining for this rank.

    Args:
        parts: this rank's stages, in order.
        group: of the pipeline.
        seq_len: tokens of a whole row.
        loss: of the last stage's output and the targets; not scaled any further.

    Returns:
        An object with ``step`` and ``eval``.
    """
    pipeline = plan.pipeline
    assert pipeline is not None
    last = len(pipeline.stages) - 1
    tokens = seq_len // plan.cp
    hidden_BTD = (plan.microbatch, tokens // (plan.tp if sequence_parallel else 1), plan.model.dim)
    logits_BTV = (plan.microbatch, tokens, plan.model.vocab_size // plan.tp)
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
            output_args=meta(logits_BTV if stage == last else hidden_BTD),
            group=group,
        )
        for stage, part in zip(pipeline.stages_of(group.rank()), parts, strict=True)
    ]
    options: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
    if is_file(pipeline.schedule):
        # Private, and the only way to run an order of one's own.
        runtime: Any = _PipelineScheduleRuntime
        schedule = runtime(stages, plan.accumulation, **options)
        schedule._load_csv(pipeline.schedule)
        return schedule
    kind = get_schedule_class(pipeline.schedule)
    single = len(stages) == 1 and pipeline.schedule in ("GPipe", "1F1B")
    return kind(stages[0] if single else stages, plan.accumulation, **options)


@contextmanager
def forward_only(schedule: Any) -> Iterator[None]:
    """Inside, the schedule's order is its forward passes alone.

    Its own ``eval`` runs the training order and leaves out what is backward, which fails where a
    forward and a backward are one action (DualPipeV).
    """
    if not isinstance(schedule, _PipelineScheduleRuntime):
        yield  # one stage per rank: its eval is right
        return
    whole = schedule.pipeline_order_with_comms
    forwards = {
        rank: _add_unshard_reshard(
            [action for action in _parts(order) if action.computation_type.value == "F"]
        )
        for rank, order in schedule.pipeline_order.items()
    }
    homes = schedule.stage_index_to_group_rank
    schedule.pipeline_order_with_comms = _add_send_recv(
        forwards, stage_to_rank=lambda stage: homes[stage], num_stages=schedule._num_stages
    )
    try:
        yield
    finally:
        schedule.pipeline_order_with_comms = whole


def _parts(order: Iterable[Any]) -> Iterator[Any]:
    """The actions of one rank, one that overlaps two as both."""
    for action in order:
        if action is not None:
            yield from action.sub_actions or (action,)
