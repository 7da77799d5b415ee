"""Destinations of records on rank 0: files, terminal, experiment trackers.

The trackers are TensorBoard, Weights & Biases, MLflow, and OpenTelemetry.  The standard environment
variables configure them: WANDB_MODE, WANDB_PROJECT and WANDB_API_KEY; MLFLOW_TRACKING_URI and
MLFLOW_EXPERIMENT_NAME; OTEL_EXPORTER_OTLP_ENDPOINT and the others of OTLP.  Offline or without a
tracking server, the first three write into the run directory.  A resumed run continues the
tracker's run, whose id is in a file there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from weft.config.errors import WeftError, lookup
from weft.config.schema import MonitorSection
from weft.monitor.jsonl import JsonlFile
from weft.monitor.log_buffer import LogBuffer
from weft.monitor.step_record import StepRecord
from weft.monitor.terminal import Terminal
from weft.planning.plan import Plan

BURST_SECONDS = 1.0  # time between two bursts of records
CLOSE_SECONDS = 60.0  # maximum time for the remaining records at the end


class Sink(Protocol):
    """Destination of records, which arrive in the order of the steps."""

    def write(self, record: StepRecord) -> None:
        """Write a record."""

    def close(self) -> None:
        """Write all waiting records."""


Config = Mapping[str, Any]  # the value of each key, as ``optim.lr``
SinkFactory = Callable[[Path, Config, int], Sink]  # arguments: run directory, keys, resumed step


def open_sinks(
    section: MonitorSection, config: Config, plan: Plan, resumed_step: int, console: Console
) -> list[Sink]:
    """Open ``metrics.jsonl``, the trackers of ``monitor.trackers``, and the terminal.

    Args:
        section: the section ``[monitor]``.
        config: the keys of the run, which some trackers record.
        plan: run directory and number of steps.
        resumed_step: of the checkpoint that the run begins with; 0: none.
        console: for the terminal and for warnings.

    Raises:
        WeftError: if a tracker cannot be created at the first start of a run.
    """
    run_dir = plan.run_path
    log = partial(console.print, soft_wrap=True)
    sinks: list[Sink] = [Jsonl(run_dir / "metrics.jsonl", resumed_step, log)]
    for name in section.trackers:
        sinks.append(
            BackgroundTracker(name, lookup(name, SINKS), run_dir, config, resumed_step, console)
        )
    # Last, because its progress line hides the cursor.
    sinks.append(Terminal(console, plan.num_steps, resumed_step))
    return sinks


class BackgroundTracker:
    """Tracker with its own writer thread, whose failure does not end the run.

    The thread sends records in bursts, because it takes Python's interpreter lock from the step
    whenever it wakes.  Each tracker has its own thread, so a slow server delays no other tracker.
    A rejected record is sent again later (`weft.monitor.log_buffer`); metrics.jsonl has it anyway.

    If the tracker cannot be created, the first start of a run raises WeftError; a later start tries
    again with each record.
    """

    def __init__(
        self,
        name: str,
        make_sink: SinkFactory,
        run_dir: Path,
        config: Config,
        resumed_step: int,
        console: Console,
    ) -> None:
        self._name, self._make_sink = name, partial(make_sink, run_dir, config, resumed_step)
        self._sink: Sink | None = None
        self._buffer = LogBuffer[StepRecord](
            name,
            self._send,
            partial(console.print, soft_wrap=True),
            errors=BaseException,  # SystemExit would end the thread silently
        )
        self._end, self._is_late = threading.Event(), False
        self._thread: threading.Thread | None = None
        if resumed_step == 0:
            try:
                self._sink = self._make_sink()
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                raise WeftError(f"monitor.trackers: {name} cannot start: {reason}") from error

    def write(self, record: StepRecord) -> None:
        """Queue a record for the thread."""
        self._buffer.put(record)
        self._thread = self._thread or self._start()

    def close(self) -> None:
        """Write the remaining records, for at most `CLOSE_SECONDS`."""
        if self._sink is None and self._thread is None:
            return
        self._end.set()
        thread = self._thread or self._start()
        thread.join(CLOSE_SECONDS)
        if thread.is_alive():
            self._is_late = True
            self._buffer.discard(TimeoutError(f"closing takes longer than {CLOSE_SECONDS:g} s"))

    def _start(self) -> threading.Thread:
        # A daemon thread, so that the process can end even if it hangs.
        name = f"weft-{self._name}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        while not self._end.wait(BURST_SECONDS):
            self._buffer.flush()
        self._buffer.flush(now=True)
        failure = None
        try:
            if self._sink is not None:
                self._sink.close()
        except BaseException as error:
            failure = error
        if not self._is_late:  # otherwise already reported
            self._buffer.discard(failure)

    def _send(self, record: StepRecord) -> None:
        if self._sink is None:
            self._sink = self._make_sink()
        self._sink.write(record)


class Jsonl(JsonlFile):
    """JSON Lines file, valid after every write.

    A resumed run removes the records after its checkpoint, so the file has each step once.
    """

    def write(self, record: StepRecord) -> None:
        """Append a record to the file."""
        self.append([record.to_dict()])


def _open_service(name: str, run_dir: Path, config: Config, resumed_step: int) -> Sink:
    """Import a tracker's package, which may take seconds, when a run uses it."""
    from weft.monitor import tracker_services

    sink: Sink = getattr(tracker_services, name)(run_dir, config, resumed_step)
    return sink


SINKS: dict[str, SinkFactory] = {
    "tensorboard": partial(_open_service, "TensorBoard"),
    "wandb": partial(_open_service, "WeightsAndBiases"),
    "mlflow": partial(_open_service, "MLflow"),
    "otlp": partial(_open_service, "OpenTelemetry"),
}
