"""Messages between pipeline stages are freed while a step runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.small import Overrides, plan_here, small_job, this_rank
from weft.estimate.trace import empty_batches, record_step
from weft.parallel.private_schedules import find_answered
from weft.planning.pipeline_schedule import Action, PipelineSchedule, build_schedule
from weft.training.setup import build

DIM, SEQ_LEN = 64, 64
MESSAGE_BYTES = 4 * DIM * SEQ_LEN  # of a microbatch of one sequence
SLOW = ("Interleaved1F1B", "ZBVZeroBubble")


def job_of(schedule: str, num_microbatches: int) -> Overrides:
    return [
        ("model.num_layers", "4"),
        ("model.dim", str(DIM)),
        ("model.tied_embeddings", "false"),
        ("train.seq_len", str(SEQ_LEN)),
        ("train.microbatch_size", "1"),
        ("train.global_batch_size", str(num_microbatches)),
        ("parallel.pp", "2"),
        ("pipeline.schedule", schedule),
        ("pipeline.stages_per_rank", "1" if schedule == "1F1B" else "2"),
        ("activation_checkpoint.mode", "full"),
    ]


def count_messages(schedule: str) -> list[tuple[float, float]]:
    """Return peaks in messages, of the second step and of an evaluation, for 6 and 10 microbatches.

    Inputs are not counted.
    """
    peaks = []
    for num_microbatches in (6, 10):
        plan = plan_here(small_job(*job_of(schedule, num_microbatches)))
        built = build(plan, this_rank())
        built.train_step.forward_backward(empty_batches(plan))
        trace = record_step(built, plan)
        inputs = trace.input_microbatches
        live = peak = 0
        for event in trace.events:
            live += event.bytes * (event.storage not in inputs)
            peak = max(peak, live)
        peaks.append((peak / MESSAGE_BYTES, count_evaluated(built, plan)))
    return peaks


def count_evaluated(built: Any, plan: Any) -> float:
    """Return what the stages keep of an evaluation, in messages."""
    batches = empty_batches(plan)
    schedule = built.train_step.schedule
    built.train_step.evaluate(batches)
    stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
    kept = [
        buffer
        for stage in stages
        for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
        for info in infos
        if (buffer := getattr(info, "buffer", None)) is not None  # None: an input of the model
    ]
    for stage in stages:
        if hasattr(stage, "fwd_cache"):  # torch before 2.15
            kept += [t for _, inputs in stage.fwd_cache.values() for t in inputs]
        else:
            states = stage._forward_chunk_states.values()
            kept += [t for state in states for t in (*state.input_values, *state.live_outputs)]
    kept = [tensor for tensor in kept if tensor is not None]
    return sum(t.nbytes for t in kept if not t.is_meta) / MESSAGE_BYTES


@pytest.mark.parametrize(
    "schedule", ["1F1B", "DualPipeV", *(pytest.param(s, marks=pytest.mark.slow) for s in SLOW)]
)
def test_pipeline_memory_does_not_grow_with_the_number_of_microbatches(schedule: str) -> None:
    for few, many in run_ranks(count_messages, 2, schedule, timeout=120):
        # A rank receives and sends four messages more in each direction, for each stage.
        assert many[0] - few[0] < 1, (few, many)
        assert few[1] == many[1] == 0


# --------------------------------------------------------------------------- the order of waits


def passes_of(order: list[Action]) -> list[Action]:
    """Return the passes that use and make messages; a half of a backward pass is called B."""
    return [a._replace(kind="F" if a.kind == "F" else "B") for a in order if a.kind != "W"]


def happens_before(passes: PipelineSchedule) -> Callable[[Action, Action], bool]:
    """Return a function that says if one pass must end before another can begin."""
    before: dict[Action, list[Action]] = defaultdict(list)
    for order in passes.values():
        for previous, action in pairwise(order):
            before[action].append(previous)
        for action in order:
            step = -1 if action.kind == "F" else 1
            before[action].append(action._replace(stage=action.stage + step))

    @cache
    def ancestors(action: Action) -> frozenset[Action]:
        direct = before.get(action, [])
        return frozenset(direct).union(*map(ancestors, direct))

    return lambda first, then: first in ancestors(then)


@pytest.mark.parametrize("schedule", ["DualPipeV", *SLOW])
def test_find_answered_messages_have_arrived_and_few_are_unanswered(schedule: str) -> None:
    num_unanswered = []
    for num_microbatches in (12, 20):
        orders = build_schedule(schedule, 4, 2, num_microbatches)
        passes = {rank: passes_of(order) for rank, order in orders.items()}
        is_before = happens_before(passes)
        ranks = {action.stage: rank for rank, order in passes.items() for action in order}

        def user_of(message: Action) -> Action:
            return message._replace(stage=message.stage + (1 if message.kind == "F" else -1))

        sent = {
            action
            for rank, order in passes.items()
            for action in order
            if ranks.get(user_of(action).stage, rank) != rank
        }
        for rank in orders:
            for then, messages in find_answered(orders, rank).items():
                assert ranks[then.stage] == rank
                for message in messages:
                    sent.remove(message)
                    assert ranks[message.stage] == rank
                    assert is_before(user_of(message), then)  # the receiver has used it
        num_unanswered.append(len(sent))
    assert num_unanswered[0] == num_unanswered[1]
