"""Records for trackers of experiments: TensorBoard, Weights & Biases, and MLflow.

Where servers are, and who one is there, is taken from the environment as everywhere else:
WANDB_MODE, WANDB_PROJECT and WANDB_API_KEY; MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME.
Offline, and without a tracking server, they write into the run's folder.  A run that resumes goes
on in the tracker's run of the id that is kept in the folder.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
import secrets
import socket
import struct
import time
from pathlib import Path
from typing import Any

from weft.config.files import append_bytes
from weft.config.schema import Job, flatten
from weft.monitor.step_record import StepRecord, scalars

PROJECT = "weft"
SEND_SECONDS = 5.0  # at least, between what is sent to MLflow


class TensorBoard:
    """Event files in ``tensorboard/``, under names that its users expect."""

    def __init__(self, folder: Path, job: Job, resumed_step: int) -> None:
        # Its formats only: a full disk ends the thread of its own writer, and then blocks ours.
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.record_writer import masked_crc32c

        self._event, self._crc = Event, masked_crc32c
        suffix = f"{time.time():.6f}.{socket.gethostname()}.from-step-{resumed_step + 1}"
        self._path = folder / "tensorboard" / f"events.out.tfevents.{suffix}"
        start = SessionLog(status=SessionLog.START)  # readers forget later steps
        first = Event(wall_time=time.time(), file_version="brain.Event:2")
        again = Event(wall_time=time.time(), step=resumed_step + 1, session_log=start)
        self._head = self._framed(first) + self._framed(again)

    def write(self, record: StepRecord) -> None:
        # All in one event: one for each costs ten times as much.
        values = [{"tag": name, "simple_value": value} for name, value in scalars(record).items()]
        event = self._event(wall_time=record.time, step=record.step, summary={"value": values})
        self._path.parent.mkdir(parents=True, exist_ok=True)
        append_bytes(self._path, self._head + self._framed(event), lines=False)
        self._head = b""

    def close(self) -> None: ...

    def _framed(self, event: Any) -> bytes:
        """An event as it stands in a file: its length, data, and the checksums of both."""
        data: bytes = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        sums = [struct.pack("<I", self._crc(part)) for part in (length, data)]
        return length + sums[0] + data + sums[1]


class WeightsAndBiases:
    """A run of Weights & Biases, which has a process of its own to send from.

    The step is a metric among others, on which the rest is drawn: of its own count a run that has
    gone back to a checkpoint could not go back, and would lose records.
    """

    def __init__(self, folder: Path, job: Job, resumed_step: int) -> None:
        import wandb

        known = folder / "wandb" / "run-id"
        known.parent.mkdir(parents=True, exist_ok=True)
        if not known.exists():
            known.write_text(secrets.token_hex(4), "utf-8")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=known.read_text("utf-8"),
            resume="allow",
            dir=folder,
            config=flatten(job),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, record: StepRecord) -> None:
        self._run.log({**scalars(record), "step": record.step})

    def close(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()  # offline, its process writes on after that; ours may end any moment


def allowed(name: str) -> str:
    """A metric's name as MLflow takes it: a source of data may be called like any path or URL."""
    return posixpath.normpath(re.sub(r"[^\w.\- :/]", "_", name))


class MLflow:
    """A run of MLflow, which is sent several records at once: a row of its costs milliseconds."""

    def __init__(self, folder: Path, job: Job, resumed_step: int) -> None:
        for name in ("mlflow", "alembic"):  # which tell of every table that they make
            logging.getLogger(name).setLevel(logging.WARNING)
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        where = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.absolute()}/mlflow.db"
        self._client = MlflowClient(tracking_uri=where)
        known = folder / "mlflow-run-id"
        if not known.exists():
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            experiment = self._client.get_experiment_by_name(name)
            number = (
                experiment.experiment_id if experiment else self._client.create_experiment(name)
            )
            run = self._client.create_run(number, run_name=folder.name)
            params = [Param(key, str(value)) for key, value in flatten(job).items()]
            for first in range(0, len(params), 100):  # the most that a server takes
                self._client.log_batch(run.info.run_id, params=params[first : first + 100])
            known.write_text(run.info.run_id, "utf-8")
        self._id = known.read_text("utf-8")
        self._client.update_run(self._id, status="RUNNING")
        self._waiting: list[Any] = []
        self._next = 0.0

    def write(self, record: StepRecord) -> None:
        from mlflow.entities import Metric

        at = int(1000 * record.time)
        values = scalars(record).items()
        self._waiting += [Metric(allowed(name), value, at, record.step) for name, value in values]
        if time.monotonic() >= self._next:
            try:
                self._send()
            except BaseException:  # the caller brings this record again
                del self._waiting[-min(len(values), len(self._waiting)) :]
                raise

    def close(self) -> None:
        self._send()
        self._client.set_terminated(self._id)

    def _send(self) -> None:
        while batch := self._waiting[:1000]:  # again the most
            self._client.log_batch(self._id, metrics=batch)
            del self._waiting[: len(batch)]
        self._next = time.monotonic() + SEND_SECONDS
