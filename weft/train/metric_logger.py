"""What a run tells while it trains: notes, seconds, and a record of some of its steps.

Every rank has a `MetricLogger` and makes the same calls, because much of a record is of all ranks;
only the first one writes.  Of what comes with every step the host waits for the device in
`Recorder.write` alone; docs/observing.md has the exceptions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from weft.config.errors import WeftError
from weft.config.schema import Job
from weft.data.dataset import Dataset
from weft.models import load_family
from weft.monitor.anomaly import Anomaly, AnomalyDetector, DivergenceDetector, StepResult
from weft.monitor.device_memory import expected_of, memory_peak_gib
from weft.monitor.event_log import EventLog, Kind
from weft.monitor.faults import fault_point as reach
from weft.monitor.goodput import Ledger
from weft.monitor.heartbeat import measured
from weft.monitor.jsonl import MAX_STEP, Tail, add_anomalies, read_tail
from weft.monitor.layer_grad_norms import LayerNorms
from weft.monitor.layer_stats import LayerStats
from weft.monitor.log_buffer import tolerate
from weft.monitor.source_losses import RunningMean, SourceLosses, listed
from weft.monitor.step_record import Clock, StepRecord, rank_stats
from weft.monitor.stragglers import Probe, Stragglers, every_rank
from weft.monitor.trackers import Sink, open_sinks
from weft.plan.resolve import Plan
from weft.train.setup import Built, Rank
from weft.train.state import TrainState


class TrainingError(WeftError):
    """The run cannot go on; the message says why, for people."""


class Journal:
    """Notes and seconds of a run, from its first moment on."""

    def __init__(self, folder: Path, rank: Rank, console: Console) -> None:
        self.folder, self.console, self._first = folder, console, rank.rank == 0
        self._events = EventLog(folder, self.say)
        self.ledger = Ledger(self.tail().last)

    def say(self, text: str) -> None:
        """On the terminal."""
        if self._first:
            self.console.print(text, soft_wrap=True)

    def note(self, kind: Kind, step: int, text: str, warning: bool = False) -> None:
        """Something happened after ``step``; on the terminal only if it is a warning."""
        if self._first:
            self._events.note(kind, step, text)
        if warning:
            self.say(f"warning: {text}")

    def tail(self, step: int = MAX_STEP) -> Tail:
        """Return what the run has recorded around ``step``, on the rank that writes."""
        path = self.folder / "metrics.jsonl"
        return read_tail(path, step) if self._first else Tail(None, None, [])

    def flush(self) -> None:
        """Write events that could not be written before."""
        self._events.flush()

    def close(self) -> None:
        """Report events that are lost; later ones still can be noted."""
        self._events.close()


class MetricLogger:
    """Records of steps.

    Args:
        built: what is trained.
        statistics: of layers, for the steps that somebody has asked for.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        text: Dataset,
        rank: Rank,
        built: Built,
        statistics: LayerStats,
        journal: Journal,
    ) -> None:
        self._job, self._plan, self._rank, self._journal = job, plan, rank, journal
        self._statistics, self._engine = statistics, built.engine
        engine = built.engine
        self._place = built.mesh.coordinates["pp"], built.mesh.coordinates["cp"]
        self._stages = built.mesh.get_group("pp") if plan.pp > 1 else None
        self._layers: LayerNorms | None = None
        if job.monitor.layer_grad_norms:
            blocks = load_family(job.model.kind).blocks
            self._layers = LayerNorms(built.parts, blocks, plan.pp)
        self._sources = SourceLosses(text.shares, rank.device)
        self._metrics = RunningMean(engine.objective.metrics, rank.device)
        self._stragglers = Stragglers()
        of_tokens = job.train.objective == "next_token"
        self._learning = DivergenceDetector(math.log(plan.model.vocab_size) if of_tokens else None)
        self._expected = expected_of(journal.folder)
        self._anomalies: list[dict[str, Any]] = []  # that are not recorded yet
        self._recorded: list[dict[str, Any]] = []  # that are, of steps that may be done again
        self._norms: list[Tensor] = []
        self._worst: list[Tensor] = []
        self._stack = ExitStack()
        self._sinks: list[Sink] = []
        self.clock = Clock()

    def open_at(self, step: int) -> None:
        """Begin, or go back to ``step``: what was written of later ones is taken back."""
        self._stack.close()
        tail = self._journal.tail(step)
        self._journal.ledger.back_to(tail.last, tail.kept)
        self._learning.back_to(tail.kept)
        # An anomaly stays in the records though its step is taken back: see `drop_later`.
        self._recorded += tail.anomalies
        if tail.kept is None:
            self._anomalies[:0] = tail.anomalies
            self._recorded = []
        self._statistics.back_to(step, self._journal.say)
        self._sources.forget()
        self._metrics.forget()
        if self._rank.rank == 0:
            console = self._journal.console
            self._sinks = open_sinks(
                self._journal.folder, self._job, self._job.train.steps, step, console
            )
        for sink in self._sinks:
            self._stack.enter_context(closing(sink))

    def close(self) -> None:
        """End the sinks."""
        self._stack.close()
        if self._anomalies and self._rank.rank == 0:
            path = self._journal.folder / "metrics.jsonl"
            with tolerate(path, self._journal.say):
                add_anomalies(path, self._anomalies)
        self._statistics.close()
        self._journal.close()

    def spent(self, kind: str) -> None:
        """The time until now was of this kind, and not of a step."""
        self._journal.ledger.spent(kind)
        self.clock.restart()

    def anomaly(self, found: Anomaly, step: int, samples: range) -> None:
        """A step that does not count, or only the second time; ``samples``: that it was of."""
        self._journal.note("anomaly", step - 1, f"step {step}: {found}", warning=True)
        self._anomalies.append(found.to_dict(step, samples[0], samples[-1]))

    def went_back(self, to: TrainState) -> None:
        """Over the last anomaly."""
        self._anomalies[-1] |= {"first_sample": to.samples, "back_to": to.step}
        self.open_at(to.step)
        self.spent("lost")

    def due(self, step: int) -> bool:
        """Whether ``step`` is to be recorded, whatever else happens after it."""
        job = self._job
        return (
            step == 1
            or due(step, job.monitor.log_interval, job.train.steps)
            or bool(self._anomalies)
        )

    def look_at_gradients(self, step: int, recording: bool) -> None:
        """Before they are clipped."""
        self._norms = [self._layers()] if self._layers and recording else []
        self._worst = self._engine.balance.max_load_ratio(self._stages) if recording else []
        self._statistics.gradients(step)

    def count(self) -> None:
        """The step counts, and so do the means of its batch."""
        self._sources.add(self._engine.loss_by_source)
        self._metrics.add(self._engine.metrics)

    def write(
        self,
        at: TrainState,
        lr: float,
        trial: StepResult,
        watch: AnomalyDetector,
        groups: int,
        evaluate: Callable[[], float] | None,
    ) -> float:
        """Record the step that has just been done; every rank calls it.

        Args:
            lr, trial: of the step.
            watch: ends the run here if a step since the last record was not finite.
            groups: replica groups that took part.
            evaluate: gives the loss of the validation set, if that is to be told, too.

        Returns:
            Mean seconds of a step since the last record.
        """
        plan, device = self._plan, self._rank.device
        # Here the host waits for the device.
        reach("record")
        probe = Probe(device) if device.type == "cuda" else None
        with self.clock.waiting_for_device():
            means = (*self._sources.since(), *self._metrics.since())
            values = watch.check(trial.told, *self._worst, *self._norms, *means)
        reach("tell")
        loss, grad_norm, *more = values
        moe_max_load = more.pop(0) if self._worst else None
        layers = self._layers.names if self._layers else []
        norms, more = more[: len(layers)], more[len(layers) :]
        of_sources, of_metrics = more[: len(self._sources)], more[len(self._sources) :]
        times = self.clock.read()
        self._journal.ledger.spent("productive")
        measured(times[0])
        data_seconds, compute_seconds = self.clock.own()
        if probe:
            compute_seconds = probe.seconds()
        table = every_rank((data_seconds, compute_seconds, *self._place, memory_peak_gib(device)))
        diverged = self._learning.check(at.step, loss, grad_norm, at.step >= self._job.train.steps)
        if diverged is not None and diverged.begins:
            self._journal.note("divergence", at.step, str(diverged), warning=True)
        slow = partial(self._journal.note, "slow rank", at.step, warning=True)
        straggler_rank, straggler_slowdown = self._stragglers.judge(
            at.step, times[0], [row[:-1] for row in table], slow
        )
        record = StepRecord.of(
            step=at.step,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=at.samples * self._job.train.seq_len,
            tokens_per_step=plan.tokens_per_step,
            times=times,
            devices=plan.world_size * groups,
            flops_per_token=plan.flops_per_token,
            causal_flops_per_token=plan.causal_flops_per_token,
            peak_flops=plan.peak_flops,
            memory_peak_gib=max(row[-1] for row in table),
            anomalies=self._new_anomalies(at.step) or None,
            straggler_rank=straggler_rank,
            straggler_slowdown=straggler_slowdown,
            predicted_memory_gib=self._expected.get("memory_gib"),
            predicted_step_seconds=self._expected.get("step_seconds"),
            ranks=rank_stats(table),
            moe_max_load=moe_max_load,
            layer_grad_norms=dict(zip(layers, norms, strict=True)) or None,
            source_losses=self._sources.named(of_sources),
            metrics=self._metrics.named(of_metrics),
            best_loss=self._learning.best,
            diverged_since=None if diverged is None else diverged.since,
            **(self._validation_metrics(at.step, evaluate) if evaluate else {}),
            time_breakdown=dict(self._journal.ledger.seconds),
        )
        self._anomalies = []
        for sink in self._sinks:
            sink.write(record)
        self._journal.flush()
        return times[0]

    def _new_anomalies(self, step: int) -> list[dict[str, Any]]:
        """Return those that are not recorded yet: a resumed run may meet the same ones again."""
        new = []
        for one in self._anomalies:
            if one not in self._recorded:
                new.append(one)
                self._recorded.append(one)
        self._recorded = [one for one in self._recorded if one["step"] > step]
        return new

    def _validation_metrics(self, step: int, evaluate: Callable[[], float]) -> dict[str, Any]:
        """Of a record what tells of the validation set."""
        reach("evaluate")
        loss = finite(evaluate(), "validation loss")
        losses = self._sources.named(listed(self._sources.means(self._engine.loss_by_source)))
        if losses:  # a source may have had fewer sequences than its share
            loss = self._sources.mean(losses)
        metrics = self._metrics.named(listed(self._metrics.means(self._engine.metrics)))
        self._journal.ledger.spent("evaluating")
        self._journal.note("evaluation", step, f"validation loss {loss:.4f}")
        return {"eval_loss": loss, "source_eval_losses": losses, "eval_metrics": metrics}


def due(step: int, interval: int, last: int) -> bool:
    """Whether something that happens every ``interval`` steps (0: never) and at the end is due."""
    return step == last or (interval > 0 and step % interval == 0)


def finite(value: float, what: str) -> float:
    """``value``; nothing is recorded or saved once it is not a number any more."""
    if not math.isfinite(value):
        raise TrainingError(
            f"the {what} is {value}; nothing of this step was recorded or saved: "
            "try a lower --optim.lr, or --precision.compute_dtype float32"
        )
    return value
