"""Where records go: a sink is anything with ``write(record)`` and ``close()``.

A run's sinks live on rank 0 only; every other rank has none.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rich.console import Console

from weft.job import Job, WeftError, lookup
from weft.observe.jsonl import drop_later
from weft.observe.record import StepRecord
from weft.observe.report import Report
from weft.observe.terminal import Terminal
from weft.observe.trackers import MLflow, TensorBoard, WeightsAndBiases

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
    sinks: list[Sink] = [Jsonl(folder / "metrics.jsonl", resumed_step)]
    for name in job.observe.sinks:
        sinks.append(Guarded(name, lookup(name, SINKS), folder, job, resumed_step, console))
    sinks.append(Terminal(console, steps, resumed_step))  # its live line hides the cursor
    if job.observe.report:
        sinks.append(Report(folder, lambda text: console.print(text, soft_wrap=True)))
    return sinks


class Guarded:
    """A tracker: what writes to it costs the step little, and may fail without ending the run.

    Records are handed to a thread, which writes them in bursts: each time that it wakes it takes
    Python's lock from the step.  Every tracker has its own, so that a server which does not answer
    keeps no other tracker from its records.  They are in metrics.jsonl anyway.

    A tracker that cannot be made ends a first start, with the reason: then somebody is there to
    read it.
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
        self._name, self._console = name, console
        self._sink: Sink | None = None  # not made, or given up
        self._waiting: deque[StepRecord] = deque()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            self._sink = make(folder, job, resumed_step)
        except Exception as error:
            if resumed_step == 0:
                why = f"{type(error).__name__}: {error}"
                raise WeftError(f"observe.sinks: {name} cannot start: {why}") from error
            self._tell(error)

    def write(self, record: StepRecord) -> None:
        if self._sink is not None:
            self._waiting.append(record)
            self._thread = self._thread or self._start(self._sink)

    def close(self) -> None:
        """Write what is left; but a server that is gone must not keep the job for ever."""
        if self._sink is None:
            return
        self._end.set()
        thread = self._thread or self._start(self._sink)
        thread.join(CLOSE_SECONDS)
        if thread.is_alive():
            self._give_up(TimeoutError(f"its last ones took longer than {CLOSE_SECONDS:g} s"))

    def _start(self, sink: Sink) -> threading.Thread:
        # A daemon: if it hangs it does not keep the process.
        name = f"weft-{self._name}"
        thread = threading.Thread(target=self._run, args=(sink,), name=name, daemon=True)
        thread.start()
        return thread

    def _run(self, sink: Sink) -> None:
        try:
            ended = False
            while not ended:
                ended = self._end.wait(BURST_SECONDS)
                while self._waiting:
                    sink.write(self._waiting.popleft())
            sink.close()
        except BaseException as error:  # SystemExit would end the thread without a word
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        if self._sink is not None:  # the thread of one that was too late may fail later
            self._sink = None
            self._waiting.clear()
            self._tell(error)

    def _tell(self, error: BaseException) -> None:
        why = f"{type(error).__name__}: {error}"
        self._console.print(
            f"warning: {self._name} gets no more records, which metrics.jsonl has: {why}",
            soft_wrap=True,
        )


class Jsonl:
    """One JSON object per line in ``path``, whole after every write.

    A run that resumes goes back to its last checkpoint: records of later steps, and a last line
    that a crash cut short, are dropped, so that the file holds each logged step once.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        drop_later(path, resumed_step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: StepRecord) -> None:
        self._file.write(json.dumps(record.to_dict()) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


SINKS: dict[str, MakeSink] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
