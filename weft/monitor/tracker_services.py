"""Trackers of TensorBoard, Weights & Biases, MLflow and OpenTelemetry.

`weft.monitor.trackers` imports this file when a run uses one of them.
"""

from __future__ import annotations

import json
import logging
import os
import posixpath
import re
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from urllib.request import Request, urlopen

from weft.config.files import append_bytes
from weft.monitor.exported_metrics import export_record
from weft.monitor.step_record import StepRecord, to_scalars
from weft.version import __version__

PROJECT = "weft"
SEND_SECONDS = 5.0  # minimum time between requests to MLflow
MAX_PARAMS, MAX_METRICS = 100, 1000  # limits of MLflow for one request


class TensorBoard:
    """Event files in ``tensorboard/``, with the names of `to_scalars`."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resumed_step: int) -> None:
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
        if self._head:
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

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resumed_step: int) -> None:
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
            config=dict(config),
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

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resumed_step: int) -> None:
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
            params = [Param(key, str(value)) for key, value in config.items()]
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


class OpenTelemetry:
    """Metrics by OTLP over HTTP in JSON, which every OpenTelemetry collector receives.

    The variables of the specification configure it: OTEL_EXPORTER_OTLP_ENDPOINT, _HEADERS, _TIMEOUT
    (milliseconds) and the same of METRICS; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES.
    """

    def __init__(self, run_dir: Path, config: Mapping[str, Any], resumed_step: int) -> None:
        protocol = _read_otlp("PROTOCOL", "http/json")
        if protocol == "grpc":
            raise ValueError("OTEL_EXPORTER_OTLP_PROTOCOL=grpc is not supported: use http/json")
        base = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318").rstrip("/")
        url = os.environ.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT") or f"{base}/v1/metrics"
        if not url.startswith(("http://", "https://")):
            raise ValueError("the endpoint of OTEL_EXPORTER_OTLP_ENDPOINT is no http or https URL")
        self._timeout = float(_read_otlp("TIMEOUT", "10000")) / 1000
        headers = _read_pairs(_read_otlp("HEADERS", ""))
        self._request = partial(
            Request, url, headers=headers | {"Content-Type": "application/json"}
        )
        attributes = _read_pairs(os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""))
        attributes.setdefault("service.name", PROJECT)
        if service := os.environ.get("OTEL_SERVICE_NAME"):
            attributes["service.name"] = service
        attributes |= {"host.name": socket.gethostname(), "service.instance.id": run_dir.name}
        self._resource = {"attributes": _to_attributes(attributes)}

    def write(self, record: StepRecord) -> None:
        """Send a record."""
        nanoseconds = str(int(1e9 * record.time))
        metrics = [
            {
                "name": metric.name,
                "description": metric.help,
                "unit": metric.unit,
                "gauge": {
                    "dataPoints": [
                        {
                            "attributes": _to_attributes(labels),
                            "timeUnixNano": nanoseconds,
                            "asDouble": value,
                        }
                        for labels, value in metric.points
                    ]
                },
            }
            for metric in export_record(record.to_dict())
        ]
        scope = {"name": PROJECT, "version": __version__}
        scopes = [{"scope": scope, "metrics": metrics}]
        body = {"resourceMetrics": [{"resource": self._resource, "scopeMetrics": scopes}]}
        with urlopen(
            self._request(data=json.dumps(body).encode()), timeout=self._timeout
        ) as answer:
            result = json.loads(answer.read() or b"{}").get("partialSuccess") or {}
        if int(result.get("rejectedDataPoints", 0)):
            reason = result.get("errorMessage", "no reason")
            logging.getLogger(__name__).warning("the OTLP server rejected metrics: %s", reason)

    def close(self) -> None:
        """Do nothing, because every record is already sent."""


def _read_otlp(name: str, default: str) -> str:
    """Return a variable of OTLP: that of metrics, or that of all signals."""
    prefix = "OTEL_EXPORTER_OTLP_"
    return os.environ.get(f"{prefix}METRICS_{name}") or os.environ.get(f"{prefix}{name}") or default


def _read_pairs(text: str) -> dict[str, str]:
    """Return the pairs of ``key=value,key=value``, whose values are percent-encoded."""
    pairs = (pair.partition("=") for pair in text.split(",") if "=" in pair)
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs}


def _to_attributes(values: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"key": name, "value": {"stringValue": value}} for name, value in values.items()]
