"""Tracker records are read back by the trackers' code; no data leaves this machine."""

from __future__ import annotations

import json
import shutil
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.monitor.test_step_record import record
from tests.small import small_job
from weft.config.schema import flatten
from weft.monitor import tracker_services
from weft.monitor.step_record import to_scalars
from weft.monitor.tracker_services import MLflow, WeightsAndBiases


def wandb_entries(file: Path) -> Iterator[bytes]:
    """Return the records of an offline file: a header of 7 bytes, then LevelDB's log."""
    data, position, full = file.read_bytes(), 7, b""
    block = 32768
    while position + 7 <= len(data):
        if block - position % block < 7:
            position += block - position % block
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        full += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a full record, or its last part
            yield full
            full = b""


def wandb_rows(file: Path) -> list[dict[str, Any]]:
    """Return the history in the file of an offline run."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for data in wandb_entries(file):
        entry = wandb_internal_pb2.Record()
        entry.ParseFromString(data)
        if entry.WhichOneof("record_type") == "history":
            items = entry.history.item
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows


@pytest.mark.system
def test_weights_and_biases_offline_has_every_record_in_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="the tracker's client is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "elsewhere"))
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for steps in ((1, 2, 3), (3, 4)):  # the second start resumes from step 2
        sink = WeightsAndBiases(run_dir, flatten(small_job()), 0)
        for step in steps:
            sink.write(record(step, layer_grad_norms={"layers.0": 0.25}))
        sink.close()
    patience = time.monotonic() + 20  # the process of wandb continues to write after the run's end
    rows: list[dict[str, Any]] = []
    while len(rows) < 5 and time.monotonic() < patience:
        files = sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"))
        rows = [row for file in files for row in wandb_rows(file)]
    assert [row["step"] for row in rows] == [1, 2, 3, 3, 4]
    for row in rows:
        sent = to_scalars(record(row["step"], layer_grad_norms={"layers.0": 0.25}))
        assert {name: row[name] for name in sent} == pytest.approx(sent)
    # Both starts have one run id.
    assert len({file.stem for file in files}) == 1
    assert not list(run_dir.glob("*.log"))


def test_mlflow_without_a_server_writes_into_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="the tracker's client is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for steps in ((1, 2, 3), (3, 4)):
        sink = MLflow(run_dir, flatten(small_job()), 0)
        for step in steps:
            sink.write(record(step, layer_grad_norms={"layers.0": 0.25}))
        sink.close()

    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run_dir}/mlflow.db")
    run = client.get_run((run_dir / "mlflow-run-id").read_text())
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["train.steps"] == "20"
    assert (
        run.data.metrics.keys() == to_scalars(record(4, layer_grad_norms={"layers.0": 0.25})).keys()
    )
    history = client.get_metric_history(run.info.run_id, "train/loss")
    losses = {metric.step: metric.value for metric in history}
    assert losses == {step: pytest.approx(10 / step) for step in (1, 2, 3, 4)}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a database of MLflow with one run.  To create its tables takes seconds."""
    pytest.importorskip("mlflow", reason="the tracker's client is not installed")
    directory = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        MLflow(directory, flatten(small_job()), 0).close()
    return directory / "mlflow.db"


def test_mlflow_sends_several_records_at_once(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first record is sent at once, the next after seconds, the last at the end."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(database, tmp_path)
    now = 100.0
    monkeypatch.setattr(tracker_services, "time", SimpleNamespace(monotonic=lambda: now))
    sink = MLflow(tmp_path, flatten(small_job()), 0)
    batches: list[list[int]] = []

    def sent(run: str, metrics: list[Any]) -> None:
        batches.append(sorted({metric.step for metric in metrics}))

    monkeypatch.setattr(sink._client, "log_batch", sent)
    for step in range(1, 9):
        now = 100.0 + step
        sink.write(record(step))
    sink.close()
    assert batches == [[1], [2, 3, 4, 5, 6], [7, 8]]


def test_mlflow_unreachable_server_is_an_error(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is raised at the next send, or at close."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(database, tmp_path)
    sink = MLflow(tmp_path, flatten(small_job()), 0)
    (tmp_path / "mlflow.db").write_bytes(b"no database")
    for last in (lambda: sink.write(record(1)), sink.close):
        with pytest.raises(Exception, match=r"not a database|malformed|disk image"):
            last()


def test_sources_of_any_name_are_metrics_of_mlflow() -> None:
    validation = pytest.importorskip("mlflow.utils.validation", reason="mlflow is not installed")
    names = ["/home/a/train.jsonl", "code/*", "hf://org/name:sample@train", "web", "a//b/../c"]
    created = [tracker_services.sanitize_name(f"train/loss_of/{name}") for name in names]
    for name in created:
        validation._validate_metric_name(name)
    assert len(set(created)) == len(names)
    assert created[3] == "train/loss_of/web"
