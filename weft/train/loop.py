"""Training, from the first batch to the last checkpoint.  Read this file first.

``train`` is what every rank runs, and it reads like a list of what happens in a step.
There is nothing else to know: no trainer object, no callbacks, no hidden state.  What
can be computed again is not stored: the learning rate follows from the step, the batch
from the number of samples consumed, and so a run that was killed goes on from its last
checkpoint as if nothing had happened.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from weft.checkpoint.state import named_parameters
from weft.checkpoint.store import CheckpointError, save
from weft.data.loader import Loader
from weft.data.store import Store
from weft.job import Job, WeftError
from weft.observe.record import Clock, StepRecord, memory_peak_gib
from weft.observe.sinks import Sink, open_sinks
from weft.optim.optimizer import clip_grad_norm, set_learning_rate
from weft.optim.schedule import learning_rate
from weft.plan.resolve import Plan
from weft.resilience.faults import arm
from weft.resilience.faults import at as reach
from weft.resilience.heartbeat import measured
from weft.resilience.signals import Stopping
from weft.resilience.stragglers import Stragglers
from weft.train.setup import Position, Rank, build, resume, write_plan
from weft.train.step import batch_to, held_out


class TrainingError(WeftError):
    """The run cannot go on; the message says why, for people."""


def train(job: Job, plan: Plan, store: Store, rank: Rank, console: Console) -> bool:
    """Train until ``train.steps``, from the newest checkpoint of the run if there is one.

    On a signal or at ``resilience.time_limit`` the step is finished and a checkpoint saved.

    Args:
        store: the tokenised text.
        rank: this process, in a process group that is already up.
        console: where rank 0 shows progress; the other ranks show nothing.

    Returns:
        Whether all steps are done; the same on every rank.
    """
    folder, steps = Path(plan.run_dir), job.train.steps
    arm(job.resilience.faults, rank.rank, folder / "logs")
    parts, mesh, engine, optimizer, decay = build(job, plan, rank)

    def say(text: str) -> None:
        if rank.rank == 0:
            console.print(text, soft_wrap=True)

    home = folder / "checkpoints"
    at = resume(home, parts, optimizer, say)
    loader = Loader(
        store.tokens("train"),
        seq_len=job.train.seq_len,
        seed=job.train.seed,
        packing=job.data.packing,
        separator=store.manifest.separator,
        global_batch=job.train.global_batch,
        dp_rank=mesh.dp_rank,
        dp_size=plan.dp_size,
        microbatch=plan.microbatch,
    )
    params = [param for _, param in named_parameters(parts)]
    stages = mesh.group("pp") if plan.pp > 1 else None
    with ExitStack() as stack:
        sinks: list[Sink] = []
        if rank.rank == 0:
            write_plan(folder, plan)
            sinks = open_sinks(folder, job, steps, at.step, console)
        for sink in sinks:
            stack.enter_context(closing(sink))

        clock = Clock()
        stragglers = Stragglers(rank.rank, rank.device, (mesh.at["pp"], mesh.at["cp"]))
        stopping = Stopping(job.resilience.time_limit)
        for step in range(at.step + 1, steps + 1):
            stopping.ask()
            with naming(step):
                with clock.waiting_for_data():
                    reach("step", step=step)
                    batches = [batch_to(batch, rank.device) for batch in loader.batch(at.samples)]

                reach("forward_backward")
                share_of_loss = engine.forward_backward(batches)
                reach("gradients", (param.grad for param in params))
                grad_norm = clip_grad_norm(params, job.optim.max_grad_norm, stages)
                lr = learning_rate(step, steps, job.optim, decay)
                set_learning_rate(optimizer, lr)
                optimizer.step()
                optimizer.zero_grad()
                at = Position(step, at.samples + job.train.global_batch)
                clock.count_step()

                stop = stopping.answer()
                evaluating = due(step, job.train.eval_interval, steps)
                saving = stop or due(step, job.checkpoint.interval, steps)
                logging = step == 1 or due(step, job.observe.log_interval, steps)
                if not (logging or evaluating or saving):
                    continue

                # The only place where the host waits for the device.
                reach("record")
                with clock.waiting_for_device():
                    loss = finite(global_sum(share_of_loss).item(), "loss")
                times, eval_loss = clock.read(), None
                measured(times[0])
                slow_rank, slow_ratio = stragglers.judge(step, times[0], *clock.own(), say)
                if evaluating:
                    reach("evaluate")
                    held_out_text = held_out(job, plan, store, mesh)
                    eval_loss = finite(engine.evaluate(held_out_text), "held-out loss")
                record = StepRecord.of(
                    step=step,
                    loss=loss,
                    grad_norm=finite(grad_norm.item(), "gradient norm"),
                    lr=lr,
                    tokens=at.samples * job.train.seq_len,
                    tokens_per_step=plan.tokens_per_step,
                    times=times,
                    devices=plan.world_size,
                    flops_per_token=plan.flops_per_token,
                    peak_flops=plan.peak_flops,
                    memory_peak_gib=memory_peak_gib(rank.device),
                    eval_loss=eval_loss,
                    slow_rank=slow_rank,
                    slow_ratio=slow_ratio,
                )
                for sink in sinks:
                    sink.write(record)
                if saving:
                    manifest = at.manifest(plan, store)
                    try:
                        save(home, parts, optimizer, manifest, job.checkpoint.keep)
                    except CheckpointError as error:
                        if stop or step == steps:
                            raise
                        say(f"warning: {error}; going on without it")
                clock.restart()  # neither evaluating nor saving is part of a step
                if stop:
                    break
    return at.step >= steps


def due(step: int, interval: int, last: int) -> bool:
    """Whether something that happens every ``interval`` steps (0: never) and at the end is due."""
    return step == last or (interval > 0 and step % interval == 0)


def global_sum(value: torch.Tensor) -> torch.Tensor:
    """The sum of a scalar over all ranks."""
    if dist.get_world_size() > 1:
        dist.all_reduce(value)
    return value


def finite(value: float, what: str) -> float:
    """``value``; nothing is recorded or saved once it is not a number any more."""
    if not math.isfinite(value):
        raise TrainingError(
            f"the {what} is {value}; nothing of this step was recorded or saved: "
            "try a lower --optim.lr, or --precision.compute float32"
        )
    return value


@contextmanager
def naming(step: int) -> Iterator[None]:
    """Errors inside tell the step."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in step {step}")
        raise
