"""PyTorch internals that only pipelines need; see `weft.parallel.private`."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from weft.models.moe import Experts
from weft.parallel.expert_dispatch import during_exchange
from weft.parallel.pass_overlap import run_in_turns
from weft.parallel.private import patch_attribute
from weft.planning.pipeline_schedule import Action, PipelineSchedule


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


def free_received(stage: Any) -> None:
    """Allocate a message when a stage receives it, and free it after its last use.

    A stage of torch before 2.15 (#196463) allocates a buffer for each microbatch of a step, and
    keeps all of them.  Here the buffers are meta tensors, except from the receipt of a message to
    its use.
    """
    from torch.distributed.pipelining import stage as torch_stage

    if hasattr(torch_stage._RecvInfo, "take_buffer"):
        return
    names = (
        "_prepare_forward_infra",
        "_prepare_backward_infra",
        "_get_recv_ops",
        "_retrieve_recv_activations",
        "_retrieve_recv_grads",
    )
    prepare_forward, prepare_backward, get_ops, activations, grads = (
        getattr(stage, name) for name in names
    )

    def prepare(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        device, stage.device = stage.device, torch.device("meta")
        try:
            return original(*args, **options)
        finally:
            stage.device = device

    def allocate(infos: tuple[Any, ...], *group: Any) -> Any:  # torch 2.14 gives the group
        _move_buffers(infos, stage.device)
        return get_ops(infos, *group)

    def take(original: Callable[..., Any], infos: dict[int, Any], microbatch: int) -> Any:
        tensors = original(microbatch)
        _move_buffers(infos[microbatch], torch.device("meta"))
        return tensors

    replacements = (
        partial(prepare, prepare_forward),
        partial(prepare, prepare_backward),
        allocate,
        partial(take, activations, stage.args_recv_info),
        partial(take, grads, stage.grad_recv_info),
    )
    vars(stage).update(zip(names, replacements, strict=True))


def free_evaluated(stage: Any) -> None:
    """Free what a stage keeps of a pass that has no backward pass.

    It keeps inputs and outputs until the next step, as if it had to compute gradients.  Outputs
    that another rank receives are freed when they were sent.
    """
    forward, is_old = stage.forward_one_chunk, hasattr(stage, "fwd_cache")  # torch before 2.15

    def run(microbatch: int, *args: Any, **options: Any) -> Any:
        output = forward(microbatch, *args, **options)
        if not stage.has_backward:
            ranks = stage.stage_index_to_group_rank
            is_sent = ranks.get(stage.stage_index + 1, stage.group_rank) != stage.group_rank
            if is_old:
                outputs, _ = stage.fwd_cache[microbatch]
                stage.fwd_cache[microbatch] = (outputs if is_sent else (), [])
            else:
                state = stage._forward_chunk_states[microbatch]
                state.input_values.clear()
                if not is_sent:
                    state.live_outputs.clear()
        return output

    def release(original: Callable[[int], None], microbatch: int) -> None:
        original(microbatch)
        if not stage.has_backward:
            del stage._forward_chunk_states[microbatch]

    stage.forward_one_chunk = run
    if not is_old:
        stage.release_fwd_send_outputs = partial(release, stage.release_fwd_send_outputs)


def _move_buffers(infos: tuple[Any, ...], device: torch.device) -> None:
    """Replace buffers by uninitialized ones of another device, in place."""
    for info in infos:
        buffer: Tensor | None = getattr(info, "buffer", None)  # None: an input of the model
        if buffer is not None and buffer.device.type != device.type:
            shape, strides = buffer.shape, buffer.stride()
            empty = torch.empty_strided(shape, strides, dtype=buffer.dtype, device=device)
            info.buffer = empty.requires_grad_(buffer.requires_grad)


def free_loss_graph(stage: Any) -> None:
    """Detach the loss of each microbatch after its backward pass.

    A schedule keeps the losses of a step, and with them the graph and the input of its last stage.
    """
    backward = stage.backward_one_chunk

    def run(microbatch: int, loss: Tensor | None = None, **options: Any) -> None:
        backward(microbatch, loss=loss, **options)
        if loss is not None:
            loss.detach_()

    stage.backward_one_chunk = run


def free_sent(schedule: Any, orders: PipelineSchedule) -> None:
    """Let a schedule free what it sends as soon as the receiver must have it.

    A schedule of torch before 2.15 keeps all messages of a step until its end; later ones do so
    with gradients (#194121).  Here it waits for a message before or in a pass which needs an
    answer, so the wait takes no time: see `find_answered`.

    Args:
        schedule: a schedule of torch.distributed.pipelining.
        orders: its actions on each rank.
    """
    from torch.distributed.pipelining import schedules as torch_schedules

    private: Any = torch_schedules
    if not isinstance(schedule, private._PipelineScheduleRuntime):
        return  # waits itself
    answered = find_answered(orders, schedule.rank)
    if hasattr(private, "_add_wait_send"):  # torch 2.15
        actions = schedule.pipeline_order_with_comms
        actions[schedule.rank] = _move_waits(private, actions[schedule.rank], answered)
        return
    stages = {stage.stage_index: stage for stage in schedule._stages}
    pending: dict[Action, list[Any]] = {}

    def send(action: Any, context: Any) -> None:
        stage, microbatch = stages[action.stage_index], action.microbatch_index
        is_forward = action.computation_type is private.SEND_F
        get_ops = stage.get_fwd_send_ops if is_forward else stage.get_bwd_send_ops
        message = Action(action.stage_index, "F" if is_forward else "B", microbatch)
        pending[message] = private._batch_p2p(get_ops(microbatch))
        if is_forward and not stage.has_backward:
            del stage.fwd_cache[microbatch]

    def wait(messages: Iterable[Action]) -> None:
        for message in messages:
            private._wait_batch_p2p(pending.pop(message, []))

    def run_pass(
        index: int,
        kind: Literal["F", "B"],
        call: Callable[..., Any],
        microbatch: int,
        *args: Any,
        **options: Any,
    ) -> Any:
        wait(answered.get(Action(index, kind, microbatch), ()))
        return call(microbatch, *args, **options)

    def run_step(*args: Any, **options: Any) -> Any:
        pending.clear()  # of a step that failed
        result = original(*args, **options)
        wait(list(pending))
        return result

    original, schedule._step_microbatches = schedule._step_microbatches, run_step
    for computation in (private.SEND_F, private.SEND_B):
        schedule._comp_type_to_function_map[computation] = send
    for index, stage in stages.items():
        stage.forward_one_chunk = partial(run_pass, index, "F", stage.forward_one_chunk)
        stage.backward_one_chunk = partial(run_pass, index, "B", stage.backward_one_chunk)


def _move_waits(private: Any, order: list[Any], answered: dict[Action, list[Action]]) -> list[Any]:
    """Return actions with each wait for a message before its answer is used.

    Args:
        private: the module of torch's schedules.
        order: torch's actions, with those that wait.
        answered: see `find_answered`.
    """
    directions: dict[Any, Literal["F", "B"]] = {
        private.FORWARD: "F",
        private.FULL_BACKWARD: "B",
        private.BACKWARD_INPUT: "B",
        private.WAIT_SEND_F: "F",
        private.WAIT_SEND_B: "B",
    }
    waits: dict[Action, Any] = {}
    others: list[Any] = []
    for action in order:
        if action.computation_type in (private.WAIT_SEND_F, private.WAIT_SEND_B):
            direction = directions[action.computation_type]
            waits[Action(action.stage_index, direction, action.microbatch_index)] = action
        else:
            others.append(action)
    moved: list[Any] = []
    for action in others:
        for part in action.sub_actions or (action,):
            if kind := directions.get(part.computation_type):
                own = Action(part.stage_index, kind, part.microbatch_index)
                moved += [waits.pop(sent) for sent in answered.get(own, ()) if sent in waits]
        moved.append(action)
    return moved + list(waits.values())


def find_answered(orders: PipelineSchedule, rank: int) -> dict[Action, list[Action]]:
    """Return for the passes of a rank the sent messages that their inputs answer.

    A message has arrived if its receiver has used it.  That is so when the receiver sends another
    message which it computed later, for example the gradient of what it received.

    Args:
        orders: the actions of each rank of a pipeline.
        rank: a rank of it.

    Returns:
        Messages, called like the passes that computed them, by the pass after which they need
        not be kept.  Kinds are F and B: halves of a backward pass count as one.  Messages that
        nothing answers are missing.
    """
    ranks = {action.stage: peer for peer, order in orders.items() for action in order}
    answered: dict[Action, list[Action]] = defaultdict(list)
    for peer, order in orders.items():
        unanswered: list[Action] = []
        for stage, kind, microbatch in order if peer != rank else ():
            if kind == "W":
                continue
            direction: Literal["F", "B"] = "F" if kind == "F" else "B"
            step = 1 if kind == "F" else -1
            if ranks.get(stage - step) == rank:
                unanswered.append(Action(stage - step, direction, microbatch))
            if ranks.get(stage + step) == rank:
                answered[Action(stage + step, direction, microbatch)] += unanswered
                unanswered = []
    return dict(answered)


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
