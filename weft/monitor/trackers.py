"""Where records go: a sink is anything with ``write(record)`` and ``close()``.

A run's sinks live on rank 0 only; every other rank has none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from rich.console import Console

from weft.config.errors import WeftError
from weft.config.reader import lookup
from weft.config.schema import Job
from weft.monitor.jsonl import JsonlFile
from weft.monitor.log_buffer import LogBuffer
from weft.monitor.run_report import Report
from weft.monitor.step_record import StepRecord
from weft.monitor.terminal import Terminal
from weft.monitor.tracker_backends import MLflow, TensorBoard, WeightsAndBiases

BURST_SECONDS = 1.0  # between two bursts of records to a tracker
CLOSE_SECONDS = 60.0  # that a tracker has at the end for what is left


class Sink(Protocol):
    """A destination of records, in the order of the steps."""

    def write(self, record: StepRecord) -> None: ...

    def close(self) -> None: ...


MakeSink = Callable[[Path, Job, int], Sink]  # of the run's folder, its job, the step it resumes at


def open_sinks(
    folder: Path, job: Job, steps: int, resumed_step: int, console: Console
) -> list[Sink]:
    """The sinks of the run in ``folder``: always its records and the terminal, and what the job
    asks for.

    Raises:
        WeftError: if a tracker cannot be made at a first start.
    """
    warn = partial(console.print, soft_wrap=True)
    sinks: list[Sink] = [Jsonl(folder / "metrics.jsonl", resumed_step, warn)]
    for name in job.monitor.trackers:
        sinks.append(
            BackgroundTracker(name, lookup(name, SINKS), folder, job, resumed_step, console)
        )
    sinks.append(Terminal(console, steps, resumed_step))  # its live line hides the cursor
    if job.monitor.report:
        sinks.append(Report(folder, warn))
    return sinks


class BackgroundTracker:
    """A tracker: what writes to it costs the step little, and may fail without ending the run.

    A thread sends records in bursts: each time that it wakes it takes Python's lock from the step.
    Every tracker has its own, so that a server which does not answer keeps no other tracker from
    its records.  Records that it refuses wait (`weft.monitor.log_buffer`); metrics.jsonl has them
    anyway.

    A tracker that cannot be made ends a first start, with the reason: then somebody is there to
    read it.  Later it is tried again, as a record is.
    """

    def __init__(
        self,
        name: str,
        make: MakeSink,
        folder: Path,
        job: Job,
        resumed_step: int,
        console: Console,
    ) -> None:
        self._name, self._make = name, partial(make, folder, job, resumed_step)
        self._sink: Sink | None = None
        self._buffer = LogBuffer[StepRecord](
            name,
            self._send,
            partial(console.print, soft_wrap=True),
            errors=BaseException,  # SystemExit would end the thread without a word
        )
        self._end, self._is_late = threading.Event(), False
        self._thread: threading.Thread | None = None
        if resumed_step == 0:
            try:
                self._sink = self._make()
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                raise WeftError(f"monitor.trackers: {name} cannot start: {why}") from error

    def write(self, record: StepRecord) -> None:
        self._buffer.put(record)
        self._thread = self._thread or self._start()

    def close(self) -> None:
        """Write what is left; but a server that is gone must not keep the job for ever."""
        if self._sink is None and self._thread is None:
            return
        self._end.set()
        thread = self._thread or self._start()
        thread.join(CLOSE_SECONDS)
        if thread.is_alive():
            self._is_late = True
            self._buffer.drop(TimeoutError(f"it takes longer than {CLOSE_SECONDS:g} s to end"))

    def _start(self) -> threading.Thread:
        # A daemon: if it hangs it does not keep the process.
        name = f"weft-{self._name}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        while not self._end.wait(BURST_SECONDS):
            self._buffer.flush()
        self._buffer.flush(now=True)
        failed = None
        try:
            if self._sink is not None:
                self._sink.close()
        except BaseException as error:
            failed = error
        if not self._is_late:  # else that was reported
            self._buffer.drop(failed)

    def _send(self, record: StepRecord) -> None:
        if self._sink is None:
            self._sink = self._make()
        self._sink.write(record)


class Jsonl:
    """One JSON object per line in ``path``, whole after every write.

    A run that resumes goes back to its last checkpoint: records of later steps are dropped, so that
    the file holds each logged step once; see `weft.monitor.jsonl`.
    """

    def __init__(
        self, path: Path, resumed_step: int, warn: Callable[[str], object] = print
    ) -> None:
        self._file = JsonlFile(path, resumed_step, warn)

    def write(self, record: StepRecord) -> None:
        self._file.append([record.to_dict()])

    def close(self) -> None:
        self._file.close()


SINKS: dict[str, MakeSink] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
