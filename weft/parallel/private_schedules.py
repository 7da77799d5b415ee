"""PyTorch internals that only pipelines need; see `weft.parallel.private`."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from typing import Any

import torch

from weft.models.moe import Experts
from weft.parallel.expert_dispatch import during_exchange
from weft.parallel.pass_overlap import run_in_turns
from weft.parallel.private import patch_attribute


def load_schedule(path: str, stages: list[Any], num_microbatches: int, **options: Any) -> Any:
    """Load a schedule from a CSV file, as only the private runtime can."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    runtime: Any = _PipelineScheduleRuntime
    schedule = runtime(stages, num_microbatches, **options)
    schedule._load_csv(path)
    return schedule


def set_max_active_stages(num_stages: int) -> AbstractContextManager[None]:
    """Let schedules created in this context keep ``num_stages`` stages gathered.

    By default, a schedule keeps three, and frees and gathers again the stages of later actions.
    """
    from torch.distributed.pipelining import schedules

    name = "_add_unshard_reshard"
    original = getattr(schedules, name)

    def add(actions: Any, **_: Any) -> Any:  # torch 2.15 gives its schedules' default of 3
        return original(actions, max_active_stages=num_stages)

    return patch_attribute(schedules, name, add)


def skip_self_p2p_init(stage: Any) -> None:
    """Skip a stage's initial message to its own rank, which gloo cannot send.

    In its first step, a stage of torch 2.11 sends a number to both neighbors.  In a V schedule, the
    two stages at the bottom are on one rank.
    """
    get_init_ops = getattr(stage, "_get_init_p2p_neighbors_ops", None)
    if get_init_ops is not None:
        own_rank = stage.group_rank
        stage._get_init_p2p_neighbors_ops = lambda: [
            op for op in get_init_ops() if op.group_peer != own_rank
        ]


def enable_recv_grad(stage: Any) -> None:
    """Let the buffers that a stage receives into require gradients.

    A stage of torch 2.11 allocates them in its first pass, and never changes ``requires_grad``,
    even if that pass was an evaluation.
    """
    if not hasattr(stage, "_get_init_p2p_neighbors_ops"):
        return
    prepare = stage._prepare_forward_infra

    def prepare_for_backward(*args: Any, **kwargs: Any) -> Any:
        original, stage.has_backward = stage.has_backward, True
        try:
            return prepare(*args, **kwargs)
        finally:
            stage.has_backward = original

    stage._prepare_forward_infra = prepare_for_backward


def join_backward(stage: Any, num_microbatches: int) -> None:
    """Compute all gradients in the first half of a backward pass."""
    backward, counter = stage.backward_one_chunk, itertools.count(1)

    def run(*args: Any, **options: Any) -> None:
        is_last = next(counter) % num_microbatches == 0
        backward(*args, **options | {"full_backward": True, "last_backward": is_last})

    stage.backward_one_chunk = run
    stage.backward_weight_one_chunk = lambda *args, **options: None


def overlap_passes(schedule: Any, device: torch.device) -> None:
    """Let each paired forward and backward pass of a schedule take turns.

    Args:
        schedule: a schedule of torch.distributed.pipelining that has the action ``OVERLAP_F_B``.
        device: device of this rank.
    """
    from torch.distributed.pipelining import schedules as torch_schedules

    private: Any = torch_schedules
    stages = {stage.stage_index: stage for stage in schedule._stages}
    with_experts = {
        index
        for index, stage in stages.items()
        if any(isinstance(module, Experts) for module in stage.submod.modules())
    }

    def receive(stage: Any, works: dict[Any, Any], microbatch: int, sender: int) -> None:
        schedule._assert_unsharded(stage)
        if 0 <= sender < stage.num_stages and sender not in stages:
            private._wait_batch_p2p(works.pop((stage.stage_index, microbatch)))

    def run(action: Any, context: Any) -> None:
        forward, backward = action.sub_actions
        if forward.computation_type is not private.FORWARD:
            forward, backward = backward, forward
        stage, other = stages[forward.stage_index], stages[backward.stage_index]
        m, n = forward.microbatch_index, backward.microbatch_index
        receive(stage, schedule.fwd_recv_ops, m, stage.stage_index - 1)
        receive(other, schedule.bwd_recv_ops, n, other.stage_index + 1)
        schedule.backward_counter[other.stage_index] += 1
        is_last = schedule.backward_counter[other.stage_index] == schedule._n_microbatches
        loss = schedule._maybe_get_loss(other, n)
        stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        outputs = []

        def run_forward() -> None:
            if stage.stage_index not in with_experts:  # hides the first exchange of its partner
                for hand_over in during_exchange:
                    hand_over()
            args, kwargs = context.arg_mbs[m], context.kwarg_mbs[m]
            outputs.append(stage.forward_one_chunk(m, args, kwargs, save_forward_output=False))

        def run_backward() -> None:
            if stream is not None:
                torch.accelerator.set_stream(stream)  # also sets the thread's device
            other.backward_one_chunk(n, loss=loss, full_backward=True, last_backward=is_last)

        run_in_turns(run_forward, run_backward)
        schedule._maybe_compute_loss(stage, outputs[0], context.target_mbs, m)
        # The neighboring stage in a V is on the same rank, which sends itself no message.
        if following := stages.get(stage.stage_index + 1):
            following.set_local_fwd_input(outputs[0], m)
        if preceding := stages.get(other.stage_index - 1):
            preceding.set_local_bwd_input(other.get_local_bwd_output(n), n)

    schedule.register_custom_function(private.OVERLAP_F_B, run)
