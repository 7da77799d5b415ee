"""Training, from the first batch to the last checkpoint.  Read this file first.

``train`` is what every rank runs, and it reads like a list of what happens in a step.
There is nothing else to know: no trainer object, no callbacks, no hidden state.  What
can be computed again is not stored: the learning rate follows from the step, the batch
from the number of samples consumed, and so a run that was killed goes on from its last
checkpoint as if nothing had happened.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from weft.checkpoint.interval import Saves
from weft.checkpoint.replicas import compare_replicas
from weft.checkpoint.state import named_parameters
from weft.checkpoint.store import Saver
from weft.data.loader import Ahead, Batch, Loader, samples_of
from weft.data.store import SplitName
from weft.data.text import Text
from weft.job import Job, WeftError
from weft.models import load_family
from weft.observe.backward import naming_backward
from weft.observe.events import Kind, note_event
from weft.observe.files import read_records
from weft.observe.gradients import LayerNorms
from weft.observe.ledger import Ledger
from weft.observe.memory import (
    OutOfMemory,
    expected_of,
    is_out_of_memory,
    memory_peak_gib,
    out_of_memory,
)
from weft.observe.profile import Profile
from weft.observe.record import Clock, StepRecord, spreads
from weft.observe.sinks import Sink, open_sinks
from weft.observe.sources import Means, SourceLosses, listed
from weft.observe.spans import Spans, span, spans_path
from weft.optim.optimizer import clip, grad_norm, set_learning_rate, step_unless
from weft.optim.schedule import learning_rate
from weft.parallel.compile import graph_break, tell_compiling
from weft.plan.resolve import Plan
from weft.resilience.anomaly import Trial, Watch, gather
from weft.resilience.faults import arm
from weft.resilience.faults import at as reach
from weft.resilience.heartbeat import measured
from weft.resilience.signals import Wishes
from weft.resilience.stragglers import Probe, Stragglers, every_rank
from weft.train.references import with_references
from weft.train.replica_groups import join
from weft.train.setup import (
    Rank,
    build,
    home_of,
    open_statistics,
    resume,
    rewind,
    write_plan,
)
from weft.train.step import batch_to, held_out

GARBAGE_STEPS = 50  # between looks for Python's garbage, on all ranks at once


class TrainingError(WeftError):
    """The run cannot go on; the message says why, for people."""


def train(job: Job, plan: Plan, text: Text, rank: Rank, console: Console) -> bool:
    """Train until ``train.steps``, from the newest checkpoint of the run if there is one.

    On a signal or at ``resilience.time_limit`` the step is finished and a checkpoint saved.

    Args:
        text: what to train on, tokenised.
        rank: this process, in a process group that is already up.
        console: where rank 0 shows progress; the other ranks show nothing.

    Returns:
        Whether all steps are done; the same on every rank.
    """
    folder, steps = Path(plan.run_dir), job.train.steps
    arm(job.resilience.faults, rank.rank, folder / "logs")
    spans = Spans(spans_path(folder, rank.rank) if job.observe.spans else None, rank.rank)

    def say(text: str) -> None:
        if rank.rank == 0:
            console.print(text, soft_wrap=True)

    def note(kind: Kind, text: str, warning: bool = True) -> None:
        """Something happened: into the journal, and on the terminal if it is a warning."""
        if rank.rank == 0:
            note_event(folder, kind, at.step, text)
        if warning:
            say(f"warning: {text}")

    def recorded() -> list[dict[str, Any]]:
        return read_records(folder / "metrics.jsonl") if rank.rank == 0 else []

    ledger = Ledger(recorded())
    if job.compile.enable:
        tell_compiling(say)
    no_model = partial(out_of_memory, job, plan, rank.device, {})
    with naming("building the model", no_model):
        parts, mesh, engine, optimizer, decay = build(job, plan, rank)
    home = home_of(job.checkpoint.dir, folder)
    at = resume(home, job.checkpoint.local, parts, optimizer, say)
    splits: tuple[SplitName, ...] = ("train", "validation")
    mixtures = {
        split: samples_of(text, split, job.train.seq_len, job.data, job.train.seed)
        for split in splits
    }
    if engine.objective.references:
        mixtures = with_references(job, plan, text, mixtures, engine, mesh, at.step, say)
    loader = Loader(
        mixtures["train"],
        seed=job.train.seed,
        global_batch=job.train.global_batch,
        dp_rank=mesh.dp_rank,
        dp_size=plan.dp_size,
        microbatch=plan.microbatch,
    )
    params = [param for _, param in named_parameters(parts)]
    stages = mesh.group("pp") if plan.pp > 1 else None
    family = load_family(job.model.kind)
    layers = LayerNorms(parts, family.blocks, plan.pp) if job.observe.grad_norms else None
    sources = SourceLosses(text.shares, rank.device)
    metrics = Means(engine.objective.metrics, rank.device)
    statistics = open_statistics(job, plan, mesh, parts)

    def backward(rows: list[int]) -> AbstractContextManager[None]:
        if not job.debug.autograd_anomaly:
            return nullcontext()
        return naming_backward(statistics.layers, rows)

    copies = job.resilience.replica_check
    groups = join(job, plan, text, rank, say)

    def no_memory(error: Exception) -> OutOfMemory:
        """What took it."""
        states = (value for of in optimizer.state.values() for value in of.values())
        held: dict[str, list[Tensor]] = {
            "parameters": [param for part in parts for param in part.parameters()],
            "gradients": [param.grad for param in params if param.grad is not None],
            "optimizer": [state for state in states if isinstance(state, Tensor)],
        }
        told = out_of_memory(job, plan, rank.device, held, error)
        told.transient = at.step > first
        return told

    def drop_gradients() -> None:
        for param in params:
            param.grad = None

    def compute(step: int, batches: list[Batch]) -> Trial:
        """One step without its update."""
        drop_gradients()  # there are some if it is computed again
        rows = [len(batch.tokens_BT) for batch in batches]
        with statistics.forward(step, rows), backward(rows):
            share = engine.forward_backward(batches, groups.sum)
        reach("gradients", (param.grad for param in params))
        losses = [share] if engine.by_source is None else [share, engine.by_source]
        losses += engine.balance.total()
        groups.sum(chain(losses, (param.grad for param in params if param.grad is not None)))
        with span("gradient norm"):
            norms = grad_norm(params, stages)
        return gather(share, *norms)

    section = job.checkpoint
    saver = Saver(home, section.keep, background=section.background, local=section.local, say=say)
    ahead = Ahead(loader, rank.device, threaded=rank.device.type == "cuda")
    profile = Profile(job, plan, rank.device, say)
    with (
        rare_garbage(),
        closing(spans),
        closing(groups),
        closing(saver),
        closing(ahead),
        ExitStack() as stack,
        profile,
    ):

        def open_at(step: int) -> list[Sink]:
            stack.close()
            ledger.back_to(step, recorded())
            statistics.back_to(step)
            sources.forget()
            metrics.forget()
            sinks = open_sinks(folder, job, steps, step, console) if rank.rank == 0 else []
            for sink in sinks:
                stack.enter_context(closing(sink))
            return sinks

        if rank.rank == 0:
            write_plan(folder, plan)
        sinks = open_at(at.step)
        resumed = f"goes on from step {at.step}" if at.step else "starts"
        note("start", f"{resumed} on {plan.world_size} ranks", warning=False)
        ledger.spent("restoring")
        first = at.step
        clock, saves, expected = Clock(), Saves(section, at.step, say), expected_of(folder)
        wishes = Wishes(job.resilience.time_limit)
        stragglers, place = Stragglers(), (mesh.at["pp"], mesh.at["cp"])
        watch = Watch(job.resilience, at.watch, statistics.where)
        anomalies: list[dict[str, Any]] = []  # that are not recorded yet
        while at.step < steps:
            at = groups.meet(at, parts, optimizer)
            if groups.takes_over:
                saver.take(at.step)
            step = at.step + 1
            if profile.turns(step):
                ledger.spent("productive")
                profile.turn()
                ledger.spent("saving")
                clock.restart()
            wishes.ask(save=saver.wants_again(), busy=saver.busy())
            with naming(f"step {step}", no_memory):
                with clock.waiting_for_data():
                    reach("step", step=step)
                    rows = ahead.batch(at.samples, groups.place, groups.count)
                    batches = [batch_to(batch, rank.device) for batch in rows]

                reach("forward_backward")
                trial, anomaly = watch.examine(step, partial(compute, step, batches))
                stop, again, busy = wishes.answer()
                if not groups.committed():
                    continue
                samples = at.samples + job.train.global_batch
                if anomaly is not None:
                    note("anomaly", f"step {step}: {anomaly}")
                    anomalies.append(anomaly.to_dict(step, at.samples, samples - 1))
                if anomaly is not None and anomaly.action == "rewind":
                    drop_gradients()
                    back = rewind(home, section.local, saver, parts, optimizer, say)
                    anomalies[-1] |= {"first_sample": back.samples, "back_to": back.step}
                    at = replace(back, samples=samples)
                    watch.restore(at.watch)
                    sinks = open_at(at.step)
                    ledger.spent("lost")
                    clock.restart()
                    continue
                stopping = stop or step == steps
                evaluating = due(step, job.train.eval_interval, steps)
                saving = stopping or again or (groups.leads and saves.due(step))
                keeping = groups.leads and not busy and saves.due_on_nodes(step)
                logging = step == 1 or due(step, job.observe.log_interval, steps) or bool(anomalies)
                recording = logging or evaluating or saving or keeping
                norms = [layers()] if layers and recording else []
                worst = engine.balance.worst(stages) if recording else []
                statistics.gradients(step)
                lr = learning_rate(step, steps, job.optim, decay)
                if anomaly is None or anomaly.action != "skip":
                    with span("clip"):
                        clip(params, trial.norm, job.optim.max_grad_norm)
                    set_learning_rate(optimizer, lr)
                    with span("optimizer"):
                        bad = ~trial.told.isfinite().all()
                        step_unless(optimizer, bad)
                        engine.balance.step(bad)
                    sources.add(engine.by_source)
                    metrics.add(engine.metrics)
                drop_gradients()
                statistics.parameters(step)
                at = replace(at, step=step, samples=samples, watch=watch.state())
                clock.count_step()
                if step % GARBAGE_STEPS == 0:
                    gc.collect(1)

                if copies and (saving or due(step, copies, steps)):
                    compare_replicas(parts, optimizer)
                if copies and due(step, copies, steps):
                    groups.compare(parts, optimizer)
                if not recording:
                    continue

                # The only place where the host waits for the device, but for what may skip.
                reach("record")
                probe = Probe(rank.device) if rank.device.type == "cuda" else None
                with clock.waiting_for_device():
                    means = (*sources.since(), *metrics.since())
                    told = watch.check(trial.told, *worst, *norms, *means)
                    loss, norm, *more = told
                    expert_load = more.pop(0) if worst else None
                reach("tell")
                times, eval_loss = clock.read(), None
                eval_losses, eval_metrics = None, None
                named = layers.names if layers else []
                of_sources = len(named) + len(text.shares)
                ledger.spent("productive")
                measured(times[0])
                data_seconds, compute_seconds = clock.own()
                if probe:
                    compute_seconds = probe.seconds()
                memory = memory_peak_gib(rank.device)
                table = every_rank((data_seconds, compute_seconds, *place, memory))
                slow_rank, slow_ratio = stragglers.judge(
                    step, times[0], [row[:-1] for row in table], partial(note, "slow rank")
                )
                if evaluating:
                    reach("evaluate")
                    held_out_text = held_out(job, plan, mixtures["validation"], mesh)
                    eval_loss = finite(engine.evaluate(held_out_text), "held-out loss")
                    eval_losses = sources.named(listed(sources.means(engine.by_source)))
                    eval_metrics = metrics.named(listed(metrics.means(engine.metrics)))
                    if eval_losses:  # a source may have had fewer sequences than its share
                        eval_loss = sources.mean(eval_losses)
                    ledger.spent("evaluating")
                    note("evaluation", f"held-out loss {eval_loss:.4f}", warning=False)
                record = StepRecord.of(
                    step=step,
                    loss=loss,
                    grad_norm=norm,
                    lr=lr,
                    tokens=at.samples * job.train.seq_len,
                    tokens_per_step=plan.tokens_per_step,
                    times=times,
                    devices=plan.world_size * groups.count,
                    flops_per_token=plan.flops_per_token,
                    causal_flops_per_token=plan.causal_flops_per_token,
                    peak_flops=plan.peak_flops,
                    memory_peak_gib=max(row[-1] for row in table),
                    seconds=dict(ledger.seconds),
                    eval_loss=eval_loss,
                    anomalies=anomalies or None,
                    slow_rank=slow_rank,
                    slow_ratio=slow_ratio,
                    expected_memory_gib=expected.get("memory_gib"),
                    expected_step_seconds=expected.get("step_seconds"),
                    ranks=spreads(table),
                    expert_load=expert_load,
                    grad_norms=dict(zip(named, more, strict=False)) or None,
                    source_losses=sources.named(more[len(named) : of_sources]),
                    source_eval_losses=eval_losses,
                    metrics=metrics.named(more[of_sources:]),
                    eval_metrics=eval_metrics,
                )
                anomalies = []
                for sink in sinks:
                    sink.write(record)
                if groups.leads and (saving or keeping):
                    saver.save(parts, optimizer, at.manifest(plan, text), home=saving)
                    watch.saved()
                if groups.leads and saving:
                    held = f"saving it held training up for {saver.stall_seconds:.2g} s"
                    note("checkpoint", held, warning=False)
                    saves.saved(step, saver.stall_seconds, saver.write_seconds, times[0])
                if stopping:
                    saver.wait()
                ledger.spent("saving")
                clock.restart()  # neither evaluating nor saving is part of a step
                if stop:
                    break
        if at.step >= steps:
            note("end", f"all {steps} steps are done", warning=False)
        else:
            note("stop", "stopped and saved", warning=False)
    return at.step >= steps


def due(step: int, interval: int, last: int) -> bool:
    """Whether something that happens every ``interval`` steps (0: never) and at the end is due."""
    return step == last or (interval > 0 and step % interval == 0)


def finite(value: float, what: str) -> float:
    """``value``; nothing is recorded or saved once it is not a number any more."""
    if not math.isfinite(value):
        raise TrainingError(
            f"the {what} is {value}; nothing of this step was recorded or saved: "
            "try a lower --optim.lr, or --precision.compute float32"
        )
    return value


@contextmanager
def rare_garbage() -> Iterator[None]:
    """Inside, Python looks for garbage only when it is told to.

    By itself it does so whenever enough was allocated, on each rank at another time, and all wait
    for the one.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def naming(where: str, no_memory: Callable[[Exception], Exception] | None = None) -> Iterator[None]:
    """Errors inside tell where they happened; ``no_memory`` says what to raise without memory."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {where}")
        if why := graph_break(error):
            rule = "a block cannot be compiled as one graph"
            raise TrainingError(f"compile.enable = true: {rule}: {why}; use false") from error
        if no_memory is not None and is_out_of_memory(error):
            told = no_memory(error)
            told.add_note(f"in {where}")
            raise told from error
        raise
