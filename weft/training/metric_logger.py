"""Record metrics of steps, on the terminal, in ``metrics.jsonl`` and in trackers.

Every rank has a `MetricLogger` and makes the same calls, because most metrics are reduced over all
ranks.  Only rank 0 writes files, and only ranks whose console is not quiet print.  The host waits
for the device in `MetricLogger.log` only; docs/observing.md lists the exceptions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from weft.config.errors import WeftError
from weft.config.schema import flatten
from weft.data.dataset import Dataset
from weft.monitor.anomaly import Anomaly, AnomalyDetector, DivergenceDetector
from weft.monitor.device_memory import memory_peak_gib, read_prediction
from weft.monitor.event_log import EventLog
from weft.monitor.faults import fault_point
from weft.monitor.heartbeat import record_step_seconds
from weft.monitor.jsonl import Tail, add_anomalies, read_tail, replace_last
from weft.monitor.layer_stats import LayerGradNorms, LayerStats
from weft.monitor.log_buffer import tolerate
from weft.monitor.signals import StopRequested
from weft.monitor.spans import flush_spans
from weft.monitor.step_record import StepRecord, rank_stats
from weft.monitor.step_timer import StepTimer, enter_phase
from weft.monitor.stragglers import Probe, StragglerDetector, gather_rows
from weft.monitor.terminal import Terminal
from weft.monitor.trackers import Sink, open_sinks
from weft.parallel.step_hook import StepHook
from weft.training.setup import Built, Rank
from weft.training.state import TrainState


class RunningMean:
    """Means since the last record; a single step may have few samples of a source.

    Args:
        names: names of the means; may be empty.
        device: device of the sums.
        terms: number of means whose sum has a name.
    """

    def __init__(self, names: Iterable[str], device: torch.device, terms: int = 1) -> None:
        self._names = list(names)
        self._sums = torch.zeros(len(self._names), terms, 2, device=device)

    def reset(self) -> None:
        """Drop what was added since the last record."""
        self._sums.zero_()

    def add(self, sums: Tensor | None) -> None:
        """Add the sums and counts of a step on this rank: (names, terms, 2), or None."""
        if sums is not None:
            self._sums += sums.view_as(self._sums)

    def take_means(self) -> Tensor:
        """Return the means of everything added since the last call; a collective."""
        means = self.reduce_means(self._sums)
        self.reset()
        return means

    def reduce_means(self, sums: Tensor | None) -> Tensor:
        """Reduce sums and counts over all ranks, and divide them; a collective.

        Args:
            sums: (names, terms, 2); None without names.

        Returns:
            Float64 (names,), NaN where the count is 0; the host has not waited for it.
        """
        total = (self._sums if sums is None else sums.view_as(self._sums)).double()
        if self._names and dist.get_world_size() > 1:
            dist.all_reduce(total)
        return (total[..., 0] / total[..., 1]).sum(1)

    def by_name(self, means: Sequence[float]) -> dict[str, float] | None:
        """Return the means by name without NaN; None if none is left."""
        pairs = zip(self._names, means, strict=True)
        return {name: mean for name, mean in pairs if not math.isnan(mean)} or None


class TrainingError(WeftError):
    """The run cannot continue; the message says why."""


class MetricLogger:
    """Metrics of the steps that are recorded.

    Args:
        built: the model and its training step.
        dataset: its sources have a loss each.
        layer_stats: statistics of chosen steps.
        timer: the clock of this rank.
        events: the event log.
        console: where this rank shows progress, unless it is quiet.
    """

    def __init__(
        self,
        built: Built,
        dataset: Dataset,
        rank: Rank,
        layer_stats: LayerStats,
        timer: StepTimer,
        events: EventLog,
        console: Console,
    ) -> None:
        self._plan = plan = built.plan
        self._rank, self._timer, self._events, self._console = rank, timer, events, console
        self._layer_stats, self._train_step = layer_stats, built.train_step
        self._path = plan.run_path / "metrics.jsonl"
        self._coordinates = built.mesh.coordinates["pp"], built.mesh.coordinates["cp"]
        self._layer_grad_norms: LayerGradNorms | None = None
        if plan.job.monitor.layer_grad_norms:
            blocks = plan.family.blocks
            self._layer_grad_norms = LayerGradNorms(built.model_parts, blocks)
        self._shares = dataset.shares  # of the sources of a mixture
        self._sources = RunningMean(self._shares, rank.device, built.train_step.objective.terms)
        self._metrics = RunningMean(built.train_step.metric_names, rank.device)
        self._stragglers = StragglerDetector()
        is_next_token = plan.objective == "next_token"
        self._divergence = DivergenceDetector(
            math.log(plan.model.vocab_size) if is_next_token else None
        )
        self._predicted = read_prediction(plan.run_path)
        self._new_anomalies: list[dict[str, Any]] = []  # not recorded yet
        self._recorded_anomalies: list[dict[str, Any]] = []  # of steps that may be repeated
        # Of the last step, on the device: loss and gradient norm, learning rate; if it was to be
        # logged also values of techniques and norms of layers, else empty.
        self._none = torch.empty(0, device=rank.device)
        self._loss_and_norm, self._lr = self._none, 0.0
        self._layer_norms, self._measured = self._none, list[tuple[StepHook, Tensor]]()
        self.logged_step = 0  # the last one that is recorded
        self.step_seconds = 0.0  # mean of a step between the last two records
        self._skipped: dict[str, Any] | None = None  # the last record, if it lacks an evaluation
        self._stack = ExitStack()
        self._sinks: list[Sink] = []

    def open(self, state: TrainState) -> None:
        """Continue the records after a state; records of later steps are dropped."""
        step = self.logged_step = state.step
        self._stack.close()
        tail = read_tail(self._path, step) if self._rank.rank == 0 else Tail(None, None, [])
        self._timer.rewind(step, tail.last, tail.current)
        self._divergence.restore(state.divergence_state)
        current = tail.current or {}
        is_skipped = current.get("step") == step and current.get("eval_skipped") is True
        self._skipped = current if is_skipped and StepRecord.is_complete(current) else None
        # An anomaly stays in the records even if its step is dropped: see `drop_later`.
        self._recorded_anomalies += tail.anomalies
        if tail.current is None:
            self._new_anomalies[:0] = tail.anomalies
            self._recorded_anomalies = []
        self._layer_stats.open(step, self._events.log)
        self._sources.reset()
        self._metrics.reset()
        if self._rank.rank == 0:
            plan, job = self._plan, self._plan.job
            self._sinks = open_sinks(job.monitor, flatten(job), plan, step, self._console)
        elif not self._console.quiet:
            self._sinks = [Terminal(self._console, self._plan.num_steps, step, is_first=False)]
        for sink in self._sinks:
            self._stack.enter_context(closing(sink))

    def close(self) -> None:
        """Close the trackers and files."""
        self._stack.close()
        if self._new_anomalies and self._rank.rank == 0:
            with tolerate(self._path, self._events.log):
                add_anomalies(self._path, self._new_anomalies)
        self._layer_stats.close()
        self._events.close()

    def log_anomaly(self, anomaly: Anomaly, step: int, samples: range) -> None:
        """Report an anomaly in the step that trains on ``samples``."""
        self._events.add("anomaly", step - 1, f"step {step}: {anomaly}", warning=True)
        self._new_anomalies.append(anomaly.to_dict(step, samples[0], samples[-1]))

    def rewind(self, state: TrainState) -> None:
        """Continue from an earlier state, because of the last anomaly."""
        self._new_anomalies[-1] |= {"first_sample": state.samples, "back_to": state.step}
        self.open(state)

    def divergence_state(self) -> dict[str, Any]:
        """Return the state of the divergence detector after the last record."""
        return self._divergence.state()

    def is_due(self, step: int) -> bool:
        """Return True if ``step`` is recorded: see ``monitor.log_interval``."""
        job = self._plan.job
        return (
            step == 1
            or is_due(step, job.monitor.log_interval, self._plan.num_steps)
            or bool(self._new_anomalies)
        )

    def record_grad_norms(self, step: int, will_log: bool) -> None:
        """Measure gradients before they are clipped; a collective if the step is recorded."""
        self._layer_norms, self._measured = self._none, list[tuple[StepHook, Tensor]]()
        if will_log:
            for hook in self._train_step.hooks:
                values = hook.measure()
                self._measured.append((hook, self._none if values is None else values.flatten()))
        if will_log and self._layer_grad_norms is not None:
            self._layer_norms = self._layer_grad_norms.compute_norms()
        self._layer_stats.record_gradients(step)

    def add_step(self) -> None:
        """Count a step that was applied, in the means over its batches."""
        self._sources.add(self._train_step.loss_by_source)
        self._metrics.add(self._train_step.metrics)

    def complete_step(self, lr: float, loss_and_norm: Tensor) -> None:
        """Keep the results of a step until it is recorded, or the next one is complete.

        Args:
            lr: learning rate of the step.
            loss_and_norm: of the step, see `StepResult`.
        """
        self._lr, self._loss_and_norm = lr, loss_and_norm

    def log(
        self,
        state: TrainState,
        detector: AnomalyDetector,
        num_replicas: int,
        evaluate: Callable[[], float] | None,
        skips_evaluation: bool = False,
    ) -> dict[str, float]:
        """Record the step that has just been completed; a collective.

        Args:
            state: the state after the step.
            detector: ends the run if a step since the last record had a NaN or Inf.
            num_replicas: replica groups that took part in the step.
            evaluate: returns the validation loss; None: it is not recorded.  After
                `StopRequested` the record says that the evaluation is missing.
            skips_evaluation: an evaluation is due, but the run stops.

        Returns:
            The metrics of the validation set; empty without an evaluation.
        """
        plan, device = self._plan, self._rank.device
        enter_phase("device")
        fault_point("record")
        flush_spans()
        probe = None if device.type == "cpu" else Probe(device)
        (loss, grad_norm), layer_norms, source_means, metric_means, *measured = detector.wait(
            self._loss_and_norm,
            self._layer_norms,
            self._sources.take_means(),
            self._metrics.take_means(),
            *(values for _, values in self._measured),
        )
        # A stop may record a step that was not due, and not measured.
        values_of = {hook: x for (hook, _), x in zip(self._measured, measured, strict=True)}
        technique_fields: dict[str, Any] = {}
        for hook in self._train_step.hooks:
            technique_fields |= hook.fields(values_of.get(hook, []))
        enter_phase("log")
        fault_point("tell")
        layer_names = self._layer_grad_norms.names if self._layer_grad_norms else []
        layer_names = layer_names if layer_norms else []
        times = self._timer.measure()
        record_step_seconds(times.step)
        compute_seconds = probe.seconds() if probe else times.cpu
        memory = memory_peak_gib(device)
        table = gather_rows((times.stall, compute_seconds, *self._coordinates, memory))
        diverged = self._divergence.check(state.step, loss, grad_norm, state.step >= plan.num_steps)
        if diverged is not None and diverged.begins:
            self._events.add("divergence", state.step, str(diverged), warning=True)
        straggler_rank, straggler_slowdown = self._stragglers.check(
            state.step,
            times.step,
            [row[:-1] for row in table],
            partial(self._events.add, "slow rank", state.step, warning=True),
        )
        try:
            validation = self._evaluate(state.step, evaluate) if evaluate else {}
        except StopRequested:
            validation, skips_evaluation = {}, True
        record = StepRecord.create(
            step=state.step,
            loss=loss,
            grad_norm=grad_norm,
            lr=self._lr,
            tokens=state.samples * plan.seq_len,
            tokens_per_step=plan.tokens_per_step,
            times=times,
            devices=plan.world_size * num_replicas,
            flops_per_token=plan.flops_per_token,
            causal_flops_per_token=plan.causal_flops_per_token,
            peak_flops=plan.peak_flops,
            memory_peak_gib=max(row[-1] for row in table),
            anomalies=self._take_anomalies(state.step) or None,
            straggler_rank=straggler_rank,
            straggler_slowdown=straggler_slowdown,
            predicted_memory_gib=self._predicted.get("memory_gib"),
            predicted_step_seconds=self._predicted.get("step_seconds"),
            ranks=rank_stats(table),
            **technique_fields,
            layer_grad_norms=dict(zip(layer_names, layer_norms, strict=True)) or None,
            loss_by_source=self._sources.by_name(source_means),
            metrics=self._metrics.by_name(metric_means),
            best_loss=self._divergence.best,
            diverged_since=None if diverged is None else diverged.since,
            time_breakdown=self._timer.time_breakdown(),
            eval_skipped=skips_evaluation or None,
            **validation,
        )
        self.logged_step = state.step
        for sink in self._sinks:
            sink.write(record)
        self._events.flush()
        self.step_seconds = times.step
        return flatten_evaluation(validation)

    def log_skipped_evaluation(self, step: int, evaluate: Callable[[], float]) -> dict[str, float]:
        """Make up for an evaluation that a stop skipped after ``step``; a collective.

        Returns:
            The metrics of the validation set; empty if no evaluation is missing.

        Raises:
            StopRequested: by ``evaluate``; then it is still missing.
        """
        (is_skipped, *_), *_ = gather_rows([self._skipped is not None])
        if not is_skipped:
            return {}
        validation = self._evaluate(step, evaluate)
        if self._skipped is None:  # only rank 0 has the record
            return flatten_evaluation(validation)
        record = {k: v for k, v in self._skipped.items() if k != "eval_skipped"}
        completed = StepRecord.from_dict(record | validation)
        by_key = completed.to_dict()
        for sink in self._sinks[1:]:  # the trackers
            sink.write(completed)
        with tolerate(self._path, self._events.log):
            replace_last(self._path, record | by_key)
        self._skipped = None
        return flatten_evaluation(validation)

    def _take_anomalies(self, step: int) -> list[dict[str, Any]]:
        """Return the new anomalies without those that an earlier start has recorded."""
        new = []
        for anomaly in self._new_anomalies:
            if anomaly not in self._recorded_anomalies:
                new.append(anomaly)
                self._recorded_anomalies.append(anomaly)
        self._recorded_anomalies = [a for a in self._recorded_anomalies if a["step"] > step]
        self._new_anomalies = []
        return new

    def _evaluate(self, step: int, evaluate: Callable[[], float]) -> dict[str, Any]:
        """Evaluate; return the fields of the record."""
        enter_phase("evaluate")
        fault_point("evaluate")
        loss = evaluate()
        if not math.isfinite(loss):
            raise TrainingError(
                f"the validation loss is {loss}; nothing of this step was recorded or saved. Try a "
                "lower --optim.lr, or --precision.compute_dtype float32"
            )
        source_means = self._sources.reduce_means(self._train_step.loss_by_source)
        losses = self._sources.by_name(source_means.tolist())
        if losses:  # a source may have fewer validation sequences than its share
            shares = {name: self._shares[name] for name in losses}
            loss = sum(share * losses[name] for name, share in shares.items())
            loss /= sum(shares.values())
        metric_means = self._metrics.reduce_means(self._train_step.metrics)
        metrics = self._metrics.by_name(metric_means.tolist())
        enter_phase("log")
        self._events.add("evaluation", step, f"validation loss {loss:.4f}")
        return {"eval_loss": loss, "eval_loss_by_source": losses, "eval_metrics": metrics}


def flatten_evaluation(validation: dict[str, Any]) -> dict[str, float]:
    """Return ``eval_loss`` and the objective's metrics of an evaluation."""
    if not validation:
        return {}
    values = {"eval_loss": validation["eval_loss"], **(validation["eval_metrics"] or {})}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def is_due(step: int, interval: int, last: int) -> bool:
    """Return True every ``interval`` steps (0: never), and at the last step."""
    return step == last or (interval > 0 and step % interval == 0)
