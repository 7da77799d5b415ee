"""Open everything that a training run uses, in order, and close it in reverse.

`Run` has no behavior: it is the list of the parts that `weft.training.loop` calls by name.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from rich.console import Console
from torch import nn
from torch.nn import Parameter

from weft.checkpoint.best import get_best_metric
from weft.checkpoint.manager import CheckpointManager, CheckpointSchedule
from weft.checkpoint.manifest import run_on_rank_0
from weft.checkpoint.run_fingerprints import fingerprint_run, recorded_fingerprints
from weft.checkpoint.state_dict import trainable_parameters
from weft.data.dataset import Dataset
from weft.data.loader import Loader, Mixture, Prefetcher, build_mixture
from weft.data.remote_tokens import set_wait_hook
from weft.data.token_store import SPLITS
from weft.monitor.anomaly import AnomalyDetector
from weft.monitor.device_memory import is_out_of_memory, out_of_memory
from weft.monitor.event_log import EventLog
from weft.monitor.faults import install_faults
from weft.monitor.heartbeat import beat
from weft.monitor.jsonl import read_tail
from weft.monitor.layer_stats import LayerStats
from weft.monitor.log_buffer import tolerate
from weft.monitor.profiler import Profiler
from weft.monitor.signals import RankConsensus, StopRequested
from weft.monitor.spans import SpanWriter, spans_path
from weft.monitor.step_timer import StepTimer
from weft.optim.optimizer import learning_rate
from weft.parallel.compile import CompileLog
from weft.planning.plan import Plan
from weft.training.metric_logger import MetricLogger
from weft.training.reference_logprobs import with_references
from weft.training.replica_groups import SingleReplica, join_replica_groups
from weft.training.run_dir import epoch_warnings, write_plan
from weft.training.setup import Built, Rank, build, open_layer_stats
from weft.training.state import TrainState, checkpoint_dir, resume
from weft.training.step import TrainStep

# Continue the prompts with the model in training, unless the second argument raises; a collective.
# See `weft.inference.eval_text`.
Generate = Callable[[TrainStep, Callable[[], None]], list[str]]


@dataclass(frozen=True)
class Run:
    """The parts of a training run on one rank."""

    plan: Plan
    rank: Rank
    dataset: Dataset
    built: Built  # model parts, mesh, training step, optimizer
    params: list[Parameter]  # the trainable ones of this rank
    blocks: list[nn.Module]  # the repeated blocks of this rank
    initial_state: TrainState  # from the newest checkpoint
    validation_set: Mixture | None  # None: there are no evaluations
    data: Prefetcher
    replicas: SingleReplica  # replica groups; a single one without ``resilience.lighthouse``
    checkpoints: CheckpointManager
    schedule: CheckpointSchedule
    consensus: RankConsensus
    anomalies: AnomalyDetector
    layer_stats: LayerStats
    metrics: MetricLogger
    timer: StepTimer
    profiler: Profiler
    compile_log: CompileLog
    events: EventLog
    log: Callable[[str], None]  # prints on rank 0
    generate: Generate | None  # continues ``monitor.eval_prompts``


@contextmanager
def open_run(
    plan: Plan, dataset: Dataset, rank: Rank, console: Console, generate: Generate | None
) -> Iterator[Run]:
    """Build the model, load the newest checkpoint and open the run; a collective.

    Raises:
        StopRequested: on all ranks, if they stop while they compute the references of pairs.
    """
    job, run_dir, is_first = plan.job, plan.run_path, rank.rank == 0

    def log(text: str) -> None:
        if is_first:
            console.print(text, soft_wrap=True)

    with ExitStack() as stack:
        stack.enter_context(manual_gc())
        install_faults(job.resilience.faults, rank.rank, run_dir / "logs")
        span_path = spans_path(run_dir, rank.rank) if job.monitor.spans else None
        last_record = read_tail(run_dir / "metrics.jsonl").last if is_first else None
        timer = StepTimer(last_record, SpanWriter(span_path, rank.rank))
        stack.enter_context(closing(timer))
        events = EventLog(run_dir, log, enabled=is_first)
        compile_log = CompileLog(log, enabled=plan.is_compiled)
        consensus = RankConsensus(job.resilience.time_limit)

        built = _build(plan, rank)
        stack.callback(built.train_step.close)
        if built.train_step.graphs is not None:
            built.train_step.graphs.log = log
        params = [param for _, param in trainable_parameters(built.model_parts)]
        home = checkpoint_dir(job.checkpoint, run_dir)
        state = resume(home, job.checkpoint.local_dir, built.model_parts, built.optimizer, log)
        mixtures = {
            split: build_mixture(
                dataset, split, plan.seq_len, job.data, plan.seed, plan.has_score_head
            )
            for split in SPLITS
            if split == "train" or (job.data.has_validation and dataset.has_validation)
        }
        unreadable = f"{run_dir}: the files of the run could not be read"
        if built.train_step.objective.needs_references:
            recorded = run_on_rank_0(lambda: recorded_fingerprints(home), unreadable)
            try:
                mixtures = with_references(
                    built, dataset, mixtures, state.step, recorded, consensus.until_stop, log
                )
            except StopRequested:
                reason = consensus.stop_reason()
                text = f"{reason.text}: stopped before the first step "
                text += f"{time.time() - reason.time:.2f} s after the request"
                log(text)
                events.add("stop", state.step, text)
                raise
        run_files = run_on_rank_0(lambda: fingerprint_run(run_dir, job, True), unreadable)

        replicas = join_replica_groups(built, dataset, rank, log)
        stack.enter_context(closing(replicas))
        checkpoints = CheckpointManager(
            home,
            job.checkpoint.keep_latest,
            async_save=job.checkpoint.async_save,
            local_dir=job.checkpoint.local_dir,
            run_files=run_files,
            best=None if job.checkpoint.best == "off" else get_best_metric(job.checkpoint),
            log=lambda text: events.add("warning", timer.completed_step, text, warning=True),
        )
        stack.enter_context(closing(checkpoints))
        loader = Loader(
            mixtures["train"],
            seed=plan.seed,
            global_batch_size=plan.global_batch_size,
            dp_rank=built.mesh.dp_rank,
            dp_size=plan.dp_size,
            microbatch_size=plan.microbatch_size,
            is_strided=plan.world_size_invariant,
            numbers_tokens=plan.numbers_tokens,
            measures_documents=job.train.neftune_alpha > 0,
            num_samples=plan.num_steps * plan.global_batch_size,
        )
        set_wait_hook(partial(beat, "bytes"))
        data = Prefetcher(loader, rank.device, use_thread=rank.device.type != "cpu")
        stack.enter_context(closing(data))
        layer_stats = open_layer_stats(built)
        metrics = MetricLogger(built, dataset, rank, layer_stats, timer, events, console)
        stack.enter_context(closing(metrics))
        profiler = stack.enter_context(Profiler(job.profile, plan, rank.device, log))
        blocks = plan.family.blocks

        if is_first and state.step < plan.num_steps:
            warnings = (*plan.warnings, *epoch_warnings(plan, dataset, mixtures["train"]))
            with tolerate(run_dir / "plan.json", log):
                write_plan(run_dir, replace(plan, warnings=warnings))
        metrics.open(state)
        if is_first and (change := describe_lr_change(plan, built, state.step)):
            events.add("warning", state.step, change, warning=True)
        start = f"resumed from step {state.step}" if state.step else "started"
        ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
        events.add("start", state.step, f"{start} on {ranks}")
        yield Run(
            plan=plan,
            rank=rank,
            dataset=dataset,
            built=built,
            params=params,
            blocks=[block for part in built.model_parts for block in blocks(part)],
            initial_state=state,
            validation_set=mixtures.get("validation"),
            data=data,
            replicas=replicas,
            checkpoints=checkpoints,
            schedule=CheckpointSchedule(job.checkpoint, state.step, log),
            consensus=consensus,
            anomalies=AnomalyDetector(
                job.resilience, state.anomaly_state, layer_stats.locate_nonfinite
            ),
            layer_stats=layer_stats,
            metrics=metrics,
            timer=timer,
            profiler=profiler,
            compile_log=compile_log,
            events=events,
            log=log,
            generate=generate,
        )


def describe_lr_change(plan: Plan, built: Built, step: int) -> str:
    """Describe how changed keys change the learning rate after a resume at ``step``.

    Returns:
        Empty if the schedule gives step ``step`` the learning rate of its record, within 5%, or if
        there is no such record.
    """
    record = read_tail(plan.run_path / "metrics.jsonl", step).current or {}
    before, steps, optim = record.get("lr"), plan.num_steps, plan.job.optim
    if record.get("step") != step or not isinstance(before, float) or step >= steps:
        return ""
    now, following = (
        learning_rate(each, steps, optim, built.lr_decay) for each in (step, step + 1)
    )
    if abs(now - before) <= 0.05 * max(now, before):
        return ""
    return (
        f"the changed keys change the learning rate: {before:.2e} at step {step} -> "
        f"{following:.2e} at step {step + 1}"
    )


def _build(plan: Plan, rank: Rank) -> Built:
    try:
        return build(plan, rank)
    except Exception as error:
        error.add_note("in building the model")
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(plan, rank.device, {}, error) from error


@contextmanager
def manual_gc(collects: bool = True) -> Iterator[None]:
    """Turn automatic garbage collection off in this context.

    It would run on each rank at another time, and all ranks would wait for the one that collects.
    ``collects``: first collect what there is, which takes some tenths of a second.
    """
    if collects:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
