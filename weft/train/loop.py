"""Training, from the first batch to the last checkpoint.  Read this file first.

``train`` is what every rank runs, and it reads like a list of what happens in a step.
There is nothing else to know: no trainer object, no callbacks, no hidden state.  What
can be computed again is not stored: the learning rate follows from the step, the batch
from the number of samples consumed, and so a run that was killed goes on from its last
checkpoint as if nothing had happened.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from rich.console import Console
from torch import Tensor
from torch.nn import Parameter

from weft.checkpoint.manager import CheckpointManager
from weft.checkpoint.replica_check import compare_replicas
from weft.checkpoint.save_schedule import CheckpointSchedule
from weft.checkpoint.state_dict import trainable_parameters
from weft.config.errors import WeftError
from weft.config.schema import Job
from weft.data.dataset import Dataset
from weft.data.loader import Batch, Loader, Prefetcher, build_mixture
from weft.data.token_store import SplitName
from weft.models import load_family
from weft.monitor.anomaly import AnomalyDetector, StepResult, gather
from weft.monitor.autograd_anomaly import naming_backward
from weft.monitor.device_memory import OutOfMemory, is_out_of_memory, out_of_memory
from weft.monitor.faults import fault_point as reach
from weft.monitor.faults import install_faults
from weft.monitor.log_buffer import tolerate
from weft.monitor.profiler import Profile
from weft.monitor.signals import RankConsensus
from weft.monitor.spans import Spans, span, spans_path
from weft.optim.optimizer import (
    clip_grads_with_norm,
    compute_grad_norm,
    masked_step,
    set_learning_rate,
)
from weft.optim.schedule import learning_rate
from weft.parallel.compile import NO_GRAPH_CAPTURED, describe_graph_break, log_compilation
from weft.plan.resolve import Plan
from weft.train.epochs import epoch_warnings
from weft.train.metric_logger import Journal, MetricLogger, TrainingError, due
from weft.train.reference_logprobs import with_references
from weft.train.replica_groups import join
from weft.train.run_dir import write_plan
from weft.train.setup import Rank, build, open_statistics
from weft.train.state import checkpoint_dir, resume, rewind
from weft.train.step import batch_to, validation_batches

# Of reading a batch, on this rank alone; not RuntimeError, which torch and CUDA raise.
DATA_ERRORS = (OSError, WeftError, LookupError, ValueError)

GARBAGE_STEPS = 50  # between looks for Python's garbage, on all ranks at once


def train(job: Job, plan: Plan, text: Dataset, rank: Rank, console: Console) -> bool:
    """Train until ``train.steps``, from the newest checkpoint of the run if there is one.

    On a signal or at ``resilience.time_limit`` the step is finished and a checkpoint saved.

    Args:
        text: what to train on, tokenised.
        rank: this process, in a process group that is already up.
        console: where rank 0 shows progress; the other ranks show nothing.

    Returns:
        Whether all steps are done; the same on every rank.
    """
    folder, steps, seed = Path(plan.run_dir), job.train.steps, job.train.seed
    install_faults(job.resilience.faults, rank.rank, folder / "logs")
    spans = Spans(spans_path(folder, rank.rank) if job.monitor.spans else None, rank.rank)
    journal = Journal(folder, rank, console)
    say = journal.say

    # ---- what is trained, and from where on
    graphs = log_compilation(say) if job.compile.enable else None
    with naming("building the model", partial(out_of_memory, job, plan, rank.device, {})):
        built = build(job, plan, rank)
    parts, mesh, engine, optimizer, decay = built
    params = [param for _, param in trainable_parameters(parts)]
    home = checkpoint_dir(job.checkpoint.dir, folder)
    at = resume(home, job.checkpoint.local_dir, parts, optimizer, say)

    # ---- on what
    splits: tuple[SplitName, ...] = ("train", "validation")
    samples_in = {
        split: build_mixture(text, split, job.train.seq_len, job.data, seed) for split in splits
    }
    if engine.objective.references:
        samples_in = with_references(job, plan, text, samples_in, engine, mesh, at.step, say)
    loader = Loader(
        samples_in["train"],
        seed=seed,
        global_batch_size=job.train.global_batch_size,
        dp_rank=mesh.dp_rank,
        dp_size=plan.dp_size,
        microbatch_size=plan.microbatch_size,
    )
    ahead = Prefetcher(loader, rank.device, use_thread=rank.device.type == "cuda")

    def warn(text: str) -> None:
        journal.note("warning", at.step, text, warning=True)

    # ---- and what goes on around it
    groups = join(job, plan, text, rank, say)
    statistics = open_statistics(job, plan, mesh, parts)
    recorder = MetricLogger(job, plan, text, rank, built, statistics, journal)
    section = job.checkpoint
    saver = CheckpointManager(
        home,
        section.keep_latest,
        async_save=section.async_save,
        local_dir=section.local_dir,
        log=warn,
    )
    saves = CheckpointSchedule(section, at.step, say)
    profile = Profile(job, plan, rank.device, say)
    wishes = RankConsensus(job.resilience.time_limit)
    watch = AnomalyDetector(job.resilience, at.watch, statistics.where)
    stages = mesh.get_group("pp") if plan.pp > 1 else None
    check, first = job.resilience.replica_check, at.step
    blocks = [block for part in parts for block in load_family(job.model.kind).blocks(part)]
    batches: list[Batch] = []
    failure: Exception | None = None

    def compute(step: int, batches: list[Batch]) -> StepResult:
        """Loss and gradients of a step, and what all ranks have to know of them."""
        drop(params)  # there are some if it is computed again
        rows = [len(batch.tokens_BT) for batch in batches]
        named: AbstractContextManager[None] = nullcontext()
        if job.debug.autograd_anomaly:
            named = naming_backward(statistics.layers, rows)
        with statistics.forward(step, rows), named:
            share = engine.forward_backward(batches, groups.sum)
        reach("gradients", (param.grad for param in params))
        losses = [
            share,
            *(sums for sums in (engine.loss_by_source, engine.metrics) if sums is not None),
        ]
        losses += engine.balance.reduce_loads()
        groups.sum(chain(losses, (param.grad for param in params if param.grad is not None)))
        with span("gradient norm"):
            norms = compute_grad_norm(params, stages)
        return gather(share, *norms)

    def update(trial: StepResult) -> None:
        """Weights, unless loss or gradients are not finite: then not, and nobody waits to see."""
        with span("clip"):
            clip_grads_with_norm(params, trial.norm, job.optim.max_grad_norm)
        with span("optimizer"):
            bad = ~trial.told.isfinite().all()
            masked_step(optimizer, bad)
            engine.balance.step(bad)

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

    def evaluate() -> float:
        return engine.evaluate(validation_batches(job, plan, samples_in["validation"], mesh))

    with (
        rare_garbage(),
        closing(spans),
        closing(groups),
        closing(saver),
        closing(ahead),
        closing(recorder),
        profile,
    ):
        if rank.rank == 0:
            repeated = epoch_warnings(job, text, samples_in["train"])
            with tolerate(folder / "plan.json", say):
                write_plan(folder, replace(plan, warnings=(*plan.warnings, *repeated)))
        recorder.open_at(at.step)
        resumed = f"goes on from step {at.step}" if at.step else "starts"
        journal.note("start", at.step, f"{resumed} on {plan.world_size} ranks")
        recorder.spent("restoring")
        while at.step < steps:
            at = groups.meet(at, parts, optimizer)
            if groups.takes_over:
                saver.acquire_lease(at.step)
            step = at.step + 1
            if profile.turns(step):
                recorder.spent("productive")
                profile.turn()
                recorder.spent("saving")
            with naming(f"step {step}", no_memory):
                try:
                    with recorder.clock.waiting_for_data():
                        reach("step", step=step)
                        rows = ahead.get_microbatches(at.samples, groups.place, groups.count)
                        batches = [batch_to(batch, rank.device) for batch in rows]
                except DATA_ERRORS as error:
                    # The other ranks compute: so does this one, on the batch before, and nobody
                    # applies it.  Other replica groups would: they go on without this one instead.
                    if not batches or job.resilience.lighthouse != "none":
                        raise
                    failure = error
                wishes.ask(saver.should_retry(), saver.is_saving(), failed=failure is not None)

                reach("forward_backward")
                trial, anomaly = watch.examine(step, partial(compute, step, batches))
                stop, again, busy, failed = wishes.answer()
                if not groups.committed():
                    continue  # a group was lost: with those that are left, the same step again
                if failed:
                    drop(params)
                    watch.check()  # nothing is saved after a step that was not finite
                    if check:
                        compare_replicas(parts, optimizer)
                    warn(f"a rank has no data for step {step}: saving step {at.step}, then ending")
                    saver.save_final(parts, optimizer, at.manifest(plan, text))
                    if failure is not None:
                        failure.add_note(f"step {at.step} is saved")
                        raise failure
                    break
                samples = at.samples + job.train.global_batch_size
                if anomaly is not None:
                    recorder.anomaly(anomaly, step, range(at.samples, samples))
                if anomaly is not None and anomaly.action == "rewind":
                    drop(params)
                    back = rewind(home, section.local_dir, saver, parts, optimizer, say)
                    watch.restore(back.watch)
                    recorder.went_back(back)
                    at = replace(back, samples=samples)  # past those that were bad
                    continue

                stopping = stop or step == steps
                saving = stopping or again or (groups.leads and saves.is_due(step))
                keeping = groups.leads and not busy and saves.is_local_due(step)
                evaluating = due(step, job.train.eval_interval, steps)
                recording = recorder.due(step) or evaluating or saving or keeping

                recorder.look_at_gradients(step, recording)
                lr = learning_rate(step, steps, job.optim, decay)
                set_learning_rate(optimizer, lr)
                if anomaly is None or anomaly.action != "skip":
                    update(trial)
                    recorder.count()
                drop(params)
                statistics.parameters(step)
                at = replace(at, step=step, samples=samples, watch=watch.state())
                recorder.clock.count_step()
                if graphs is not None:
                    if blocks and not graphs():
                        say(f"warning: {NO_GRAPH_CAPTURED}")
                    graphs = None
                if step % GARBAGE_STEPS == 0:
                    gc.collect(1)

                if check and (saving or due(step, check, steps)):
                    compare_replicas(parts, optimizer)
                if check and due(step, check, steps):
                    groups.compare(parts, optimizer)
                if not recording:
                    continue

                held = evaluate if evaluating else None
                seconds = recorder.write(at, lr, trial, watch, groups.count, held)
                if groups.leads and (saving or keeping):
                    if stopping:
                        saver.save_final(parts, optimizer, at.manifest(plan, text))
                    else:
                        saver.save(parts, optimizer, at.manifest(plan, text), persistent=saving)
                    watch.saved()
                if groups.leads and saving:
                    saves.record_save(step, saver.blocking_seconds, saver.write_seconds, seconds)
                    cost = f"saving it held training up for {saver.blocking_seconds:.2g} s"
                    journal.note("checkpoint", step, cost)
                recorder.spent("saving")
                if stop:
                    break
        if at.step >= steps:
            journal.note("end", at.step, f"all {steps} steps are done")
        else:
            journal.note("stop", at.step, "stopped and saved")
    return at.step >= steps


def drop(params: list[Parameter]) -> None:
    """Let go of gradients."""
    for param in params:
        param.grad = None


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
        if why := describe_graph_break(error):
            rule = "a block cannot be compiled as one graph"
            raise TrainingError(f"compile.enable = true: {rule}: {why}; use false") from error
        if no_memory is not None and is_out_of_memory(error):
            told = no_memory(error)
            told.add_note(f"in {where}")
            raise told from error
        raise
