"""Where records go: a sink is anything with ``write(record)`` and ``close()``.

A run's sinks live on rank 0 only; every other rank has none.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from weft.job import Job, WeftError, lookup
from weft.observe.record import StepRecord, scalars
from weft.observe.trackers import MLflow, WeightsAndBiases

EVERY = 1.0  # seconds between two bursts of records to a tracker
PATIENCE = 60.0  # seconds that a tracker has at the end for what is left


class Sink(Protocol):
    """A destination of records, in the order of the steps."""

    def write(self, record: StepRecord) -> None: ...

    def close(self) -> None: ...


MakeSink = Callable[[Path, Job, int], Sink]  # of the run's folder, its job, the step it resumes at


def open_sinks(
    folder: Path, job: Job, steps: int, resumed_step: int, console: Console
) -> list[Sink]:
    """The sinks of the run in ``folder``: always its records and the terminal, and what the job
    asks for."""
    sinks: list[Sink] = [
        Jsonl(folder / "metrics.jsonl", resumed_step),
        Terminal(console, steps, resumed_step),
    ]
    for name in job.observe.sinks:
        sinks.append(Guarded(name, lookup(name, SINKS), folder, job, resumed_step, console))
    if job.observe.report:
        from weft.observe.report import Report  # which needs this module

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
        thread.join(PATIENCE)
        if thread.is_alive():
            self._give_up(TimeoutError(f"its last ones took longer than {PATIENCE:g} s"))

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
                ended = self._end.wait(EVERY)
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


def drop_later(path: Path, step: int) -> None:
    """Drop the lines of later steps than ``step``, and one that a crash cut short."""
    if path.exists():
        replace_text(path, "".join(line for line in _lines(path) if _step(line) <= step))


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old or the new one, never a part."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, data: bytes) -> None:
    """See `replace_text`."""
    # Other nodes may be writing the same.
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records in a ``metrics.jsonl``; none if there is no file."""
    return [json.loads(line) for line in _lines(path) if _step(line) != float("inf")]


def _lines(path: Path) -> list[str]:
    """Complete lines; none if there is no file."""
    if not path.exists():
        return []
    text = path.read_text("utf-8", errors="replace")
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _step(line: str) -> float:
    """The step of a record; infinite (so that it is dropped) for a line that is none."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


class TensorBoard:
    """Event files in ``tensorboard/``, under names that its users expect."""

    def __init__(self, folder: Path, job: Job, resumed_step: int) -> None:
        # Writes event files without TensorBoard itself (a web server) being installed.
        from tensorboardX import SummaryWriter
        from tensorboardX.proto.summary_pb2 import Summary

        # A name of its own for each start: the default repeats within a second, and overwrites.
        self._writer = SummaryWriter(
            str(folder / "tensorboard"),
            purge_step=resumed_step + 1,
            flush_secs=10,
            filename_suffix=f".from-step-{resumed_step + 1}",
        )
        self._summary = Summary

    def write(self, record: StepRecord) -> None:
        # All in one event: one for each costs ten times as much.
        values = [{"tag": name, "simple_value": value} for name, value in scalars(record).items()]
        self._writer.file_writer.add_summary(self._summary(value=values), record.step, record.time)

    def close(self) -> None:
        self._writer.close()


SINKS: dict[str, MakeSink] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


class _QuietConsole(Console):
    def on_broken_pipe(self) -> None:
        self.quiet = True  # the base class ends the process

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError:
            # A full disk behind a redirection is no reason to lose a run: its files have it all.
            self.quiet = True


def quiet_console(file: TextIO, quiet: bool = False) -> Console:
    """A console that prints text as it is, and falls silent when its reader goes away."""
    return _QuietConsole(file=file, highlight=False, markup=False, quiet=quiet)


class Terminal:
    """A live progress line on a terminal; elsewhere a plain line for each record."""

    def __init__(self, console: Console, steps: int, resumed_step: int) -> None:
        self._console = console
        self._steps = steps
        self._began = time.monotonic()
        self._resumed = resumed_step
        self._progress: Progress | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._progress = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(elapsed_when_finished=True),
                console=console,
            )
            self._task: TaskID = self._progress.add_task(
                "train", total=steps, completed=resumed_step, text="first step ..."
            )
            self._progress.start()

    def write(self, record: StepRecord) -> None:
        text = f"loss {record.loss:.4f}  {record.tokens_per_second:,.0f} tokens/s"
        if record.mfu is not None:
            text += f"  MFU {record.mfu:.1%}"
        text += "".join(f"  {name} {mean:.3f}" for name, mean in (record.metrics or {}).items())
        if self._progress is not None:
            self._progress.update(self._task, completed=record.step, text=text)
        else:
            rate = (record.step - self._resumed) / max(1e-9, time.monotonic() - self._began)
            left = (self._steps - record.step) / rate
            line = f"step {record.step}/{self._steps}  {text}  grad norm {record.grad_norm:.3f}"
            line += f"  lr {record.lr:.2e}  {duration(left)} left"
            self._console.print(line, highlight=False, soft_wrap=True)
        if record.eval_loss is not None:
            more = record.eval_metrics or {}
            line = f"step {record.step}: held-out loss {record.eval_loss:.4f}"
            line += "".join(f"  {name} {mean:.3f}" for name, mean in more.items())
            line += "" if more else " nats/token"
            self._console.print(line, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def duration(seconds: float) -> str:
    """``3725`` -> ``'1:02:05'``."""
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def shown(path: Path) -> str:
    """As short as it can be told."""
    from_here = os.path.relpath(path)
    return str(path) if from_here.startswith("..") else from_here
