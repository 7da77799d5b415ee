"""Destinations of records on rank 0: files, terminal, experiment trackers.

The trackers are TensorBoard, Weights & Biases, and MLflow.  The standard environment variables
configure them: WANDB_MODE, WANDB_PROJECT and WANDB_API_KEY; MLFLOW_TRACKING_URI and
MLFLOW_EXPERIMENT_NAME.  Offline or without a tracking server, they write into the run directory.  A
resumed run continues the tracker's run, whose id is in a file there.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from weft.config.errors import WeftError, lookup
from weft.config.files import append_bytes
from weft.config.schema import Job, flatten
from weft.monitor.jsonl import JsonlFile
from weft.monitor.log_buffer import LogBuffer
from weft.monitor.step_record import StepRecord, to_scalars
from weft.monitor.terminal import Terminal
from weft.plan.plan import Plan

PROJECT = "weft"
SEND_SECONDS = 5.0  # minimum time between requests to MLflow
MAX_PARAMS, MAX_METRICS = 100, 1000  # limits of MLflow for one request


class TensorBoard:
    """Event files in ``tensorboard/``, with the names of `to_scalars`."""

    def __init__(self, run_dir: Path, job: Job, resumed_step: int) -> None:
        # Only the file format of tensorboardX: its writer blocks the caller after a full disk.
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.record_writer import masked_crc32c

        self._event, self._crc = Event, masked_crc32c
        suffix = f"{time.time():.6f}.{socket.gethostname()}.from-step-{resumed_step + 1}"
        self._path = run_dir / "tensorboard" / f"events.out.tfevents.{suffix}"
        version = Event(wall_time=time.time(), file_version="brain.Event:2")
        session = SessionLog(status=SessionLog.START)  # readers discard earlier data of later steps
        start = Event(wall_time=time.time(), step=resumed_step + 1, session_log=session)
        self._head = self._encode(version) + self._encode(start)

    def write(self, record: StepRecord) -> None:
        """Append a record to the event file."""
        # One event for all values, because one event per value costs ten times as much.
        values = [
            {"tag": name, "simple_value": value} for name, value in to_scalars(record).items()
        ]
        event = self._event(wall_time=record.time, step=record.step, summary={"value": values})
        self._path.parent.mkdir(parents=True, exist_ok=True)
        append_bytes(self._path, self._head + self._encode(event), lines=False)
        self._head = b""

    def close(self) -> None:
        """Do nothing, because every record is already written."""

    def _encode(self, event: Any) -> bytes:
        """Encode an event as in a file: length, checksum, data, checksum."""
        data: bytes = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        checksums = [struct.pack("<I", self._crc(part)) for part in (length, data)]
        return length + checksums[0] + data + checksums[1]


class WeightsAndBiases:
    """Run of Weights & Biases, which sends records from its own process.

    The step is an ordinary metric, and the x axis of the others.  wandb's own step only increases,
    so it would reject records after a resume or rewind to an earlier step.
    """

    def __init__(self, run_dir: Path, job: Job, resumed_step: int) -> None:
        import wandb

        id_file = run_dir / "wandb" / "run-id"
        id_file.parent.mkdir(parents=True, exist_ok=True)
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4), "utf-8")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run_dir.name,
            id=id_file.read_text("utf-8"),
            resume="allow",
            dir=run_dir,
            config=flatten(job),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, record: StepRecord) -> None:
        """Queue a record for wandb's process."""
        self._run.log({**to_scalars(record), "step": record.step})

    def close(self) -> None:
        """Wait until wandb has written everything."""
        import wandb

        self._run.finish()
        wandb.teardown()  # offline, finish() does not wait for wandb's process


def sanitize_name(name: str) -> str:
    """Replace characters that MLflow rejects, such as those of a data source's URL."""
    return posixpath.normpath(re.sub(r"[^\w.\- :/]", "_", name))


class MLflow:
    """Run of MLflow; records are sent together, because a request costs milliseconds."""

    def __init__(self, run_dir: Path, job: Job, resumed_step: int) -> None:
        for name in ("mlflow", "alembic"):  # they log every table that they create
            logging.getLogger(name).setLevel(logging.WARNING)
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run_dir.absolute()}/mlflow.db"
        self._client = MlflowClient(tracking_uri=uri)
        id_file = run_dir / "mlflow-run-id"
        if not id_file.exists():
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            experiment = self._client.get_experiment_by_name(name)
            experiment_id = (
                experiment.experiment_id if experiment else self._client.create_experiment(name)
            )
            run = self._client.create_run(experiment_id, run_name=run_dir.name)
            params = [Param(key, str(value)) for key, value in flatten(job).items()]
            for start in range(0, len(params), MAX_PARAMS):
                self._client.log_batch(run.info.run_id, params=params[start : start + MAX_PARAMS])
            id_file.write_text(run.info.run_id, "utf-8")
        self._id = id_file.read_text("utf-8")
        self._client.update_run(self._id, status="RUNNING")
        self._waiting: list[Any] = []
        self._next_request = 0.0  # monotonic seconds

    def write(self, record: StepRecord) -> None:
        """Send a record together with those since the last request."""
        from mlflow.entities import Metric

        milliseconds = int(1000 * record.time)
        values = to_scalars(record).items()
        self._waiting += [
            Metric(sanitize_name(name), value, milliseconds, record.step) for name, value in values
        ]
        if time.monotonic() >= self._next_request:
            try:
                self._send()
            except BaseException:  # the caller retries with this record
                del self._waiting[-min(len(values), len(self._waiting)) :]
                raise

    def close(self) -> None:
        """Send the waiting records, and mark the run as finished."""
        self._send()
        self._client.set_terminated(self._id)

    def _send(self) -> None:
        while batch := self._waiting[:MAX_METRICS]:
            self._client.log_batch(self._id, metrics=batch)
            del self._waiting[: len(batch)]
        self._next_request = time.monotonic() + SEND_SECONDS


BURST_SECONDS = 1.0  # time between two bursts of records
CLOSE_SECONDS = 60.0  # maximum time for the remaining records at the end


class Sink(Protocol):
    """Destination of records, which arrive in the order of the steps."""

    def write(self, record: StepRecord) -> None:
        """Write a record."""

    def close(self) -> None:
        """Write all waiting records."""


SinkFactory = Callable[[Path, Job, int], Sink]  # arguments: run directory, job, resumed step


def open_sinks(plan: Plan, resumed_step: int, console: Console) -> list[Sink]:
    """Open ``metrics.jsonl``, the trackers of ``monitor.trackers``, and the terminal.

    Raises:
        WeftError: if a tracker cannot be created at the first start of a run.
    """
    job, run_dir = plan.job, plan.run_path
    log = partial(console.print, soft_wrap=True)
    sinks: list[Sink] = [Jsonl(run_dir / "metrics.jsonl", resumed_step, log)]
    for name in job.monitor.trackers:
        sinks.append(
            BackgroundTracker(name, lookup(name, SINKS), run_dir, job, resumed_step, console)
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
        job: Job,
        resumed_step: int,
        console: Console,
    ) -> None:
        self._name, self._make_sink = name, partial(make_sink, run_dir, job, resumed_step)
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


SINKS: dict[str, SinkFactory] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
