"""Checkpoints in an object store: a real S3 server, and its failures."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import s3
from tests.checkpoint.test_manager import full_state, save, stepped
from tests.harness import RankError, run_ranks
from tests.small import Overrides, newest_state, read_state, small_job, train_rank
from tests.training.test_early_stopping import EVERY_2, train_with_losses
from weft.checkpoint.best import find_best, get_best_metric
from weft.checkpoint.load import load_checkpoint
from weft.checkpoint.manifest import (
    DamagedCheckpoint,
    acquire_lease,
    checkpoint_step,
    list_checkpoints,
    read_manifest,
)
from weft.cli.main import main
from weft.config.storage import open_directory, put_if_absent
from weft.config.writer import to_toml
from weft.training.state import resume

pytest.importorskip("s3fs", reason="pip install 'weft[s3]'")
pytest.importorskip("upath", reason="pip install 'weft[s3]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(s3.missing()), reason=f"no S3 server: {s3.missing()} not installed"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def gateway() -> Iterator[int]:
    with s3.server() as port:
        yield port


@pytest.fixture
def proxy(gateway: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3.Proxy]:
    proxy = s3.Proxy(gateway)
    for name, value in s3.variables(proxy.port).items():
        monkeypatch.setenv(name, value)
    yield proxy
    proxy.close()


@pytest.fixture
def home(proxy: s3.Proxy, request: pytest.FixtureRequest) -> str:
    bucket = f"test-{abs(hash(request.node.name)) % 10**8}"
    run_ranks(make_bucket, 1, bucket)
    return f"s3://{bucket}/runs/a"


def make_bucket(bucket: str) -> None:
    open_directory(f"s3://{bucket}").fs.mkdir(bucket)  # type: ignore[attr-defined]


# Only ranks connect to the store: its client starts threads, after which the server would refuse
# to fork.


def save_once(home: str, step: int, value: float, keep: int = 2) -> dict[str, torch.Tensor]:
    parts, optimizer = stepped(value)
    save(open_directory(home), parts, optimizer, {"step": step, "samples": 8 * step}, keep)
    return full_state(parts, optimizer)


def load_newest(home: str, client: str = "") -> tuple[dict[str, torch.Tensor], int]:
    """Return the state, and the number of bytes that only this rank needed.

    Args:
        client: a library that may read; others are treated as not installed.
    """
    if client == "s3fs":
        sys.modules["s3torchconnector"] = None  # type: ignore[assignment]
    parts, optimizer = stepped(1.0)
    load_checkpoint(list_checkpoints(open_directory(home))[-1], parts, optimizer)
    assert ("s3torchconnector._s3client" in sys.modules) == (client == "s3torchconnector")
    state = full_state(parts, optimizer)
    local = [p.data for part in parts for p in part.parameters()]
    needed = sum(3 * getattr(t, "to_local", lambda t=t: t)().nbytes for t in local)
    return state, needed


def list_files(home: str) -> list[list[dict[str, Any]]]:
    """Return the files in the manifest of each checkpoint."""
    return [read_manifest(path)["files"] for path in list_checkpoints(open_directory(home))]


def list_objects(home: str) -> list[str]:
    directory = open_directory(home)
    return sorted(path.rpartition(directory.path)[2] for path in directory.fs.find(directory.path))  # type: ignore[attr-defined]


CLIENTS = [
    "s3fs",
    pytest.param(
        "s3torchconnector",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("s3torchconnector") is None,
            reason="pip install 'weft[s3-fast]'",
        ),
    ),
]


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 4), (4, 1)])
def test_remote_checkpoint_of_any_layout_loads_in_another(
    before: int, after: int, client: str, home: str, proxy: s3.Proxy
) -> None:
    saved = run_ranks(save_once, before, home, 3, 1e-3)[0]
    proxy.fetched_bytes = 0
    loaded = run_ranks(load_newest, after, home, client)
    for state, _ in loaded:
        assert all(state[name].equal(tensor) for name, tensor in saved.items())
    needed = sum(bytes_ for _, bytes_ in loaded)
    ((files,),) = run_ranks(list_files, 1, home)
    headers = sum(file["header_bytes"] for file in files)  # read once, by any rank
    assert needed <= proxy.fetched_bytes - headers <= 1.1 * needed


def inspect_checkpoints(home: str) -> tuple[list[int], list[str]]:
    return [checkpoint_step(path) for path in list_checkpoints(open_directory(home))], list_objects(
        home
    )


def test_remote_save_writes_the_manifest_last_and_deletes_old_ones(
    home: str, proxy: s3.Proxy
) -> None:
    order: list[str] = []

    def watch(method: str, path: str, number: int) -> None:
        if method == "PUT":
            order.append(path.rpartition("/")[2].partition("?")[0])

    proxy.spoil = watch
    for step in (1, 2, 3):
        run_ranks(save_once, 2, home, step, 1e-3 * step)
    assert [name for name in order if name.startswith("manifest")] == ["manifest.json"] * 3
    assert order[2] == order[5] == order[8] == "manifest.json"
    ((steps, names),) = run_ranks(inspect_checkpoints, 1, home)
    assert steps == [2, 3]
    assert len(names) == 6


def corrupt_newest(home: str, parts: Any, optimizer: Any) -> list[str]:
    """Damage the stored checkpoint in many ways; return the undetected ones."""
    directory, unnoticed = open_directory(home), []
    (path,) = list_checkpoints(directory)
    inside = path / read_manifest(path)["inside"]
    for file in [*inside.iterdir(), path / "manifest.json"]:
        valid = file.read_bytes()
        for at in (0, len(valid) // 2, len(valid) - 1):
            bad = bytearray(valid)
            bad[at] ^= 4
            for content in (bytes(bad), valid[:at]):
                file.write_bytes(content)
                try:
                    load_checkpoint(path, parts, optimizer)
                    unnoticed.append(f"{file} {at}")
                except DamagedCheckpoint:
                    pass
        file.write_bytes(valid)
    load_checkpoint(path, parts, optimizer)
    return unnoticed


def corrupt_all(home: str) -> list[str]:
    return corrupt_newest(home, *stepped(1e-3))


def test_remote_damage_is_noticed(home: str) -> None:
    run_ranks(save_once, 2, home, 1, 1e-3)
    assert run_ranks(corrupt_all, 1, home) == [[]]


def fall_back(home: str) -> tuple[int, list[str], list[str]]:
    directory, messages = open_directory(home), list[str]()
    parts, optimizer = stepped(1.0)
    newest = list_checkpoints(directory)[-1]
    file = next(iter((newest / read_manifest(newest)["inside"]).iterdir()))
    file.write_bytes(file.read_bytes()[::-1])
    at = resume(directory, "off", parts, optimizer, messages.append)
    # The damaged checkpoint is quarantined, not deleted, and the step can be saved again.
    save(directory, parts, optimizer, {"step": 2, "samples": 16}, 2)
    return at.step, messages, list_objects(home)


def test_remote_damage_falls_back_to_the_previous_checkpoint(home: str) -> None:
    for step in (1, 2):
        run_ranks(save_with_samples, 2, home, step)
    ((step, messages, names),) = run_ranks(fall_back, 1, home)
    assert step == 1
    assert "step-00000002" in messages[0]
    assert any("/manifest.damaged-" in name for name in names)
    assert "/step-00000002/manifest.json" in names


def save_with_samples(home: str, step: int) -> None:
    parts, optimizer = stepped(1e-3 * step)
    save(open_directory(home), parts, optimizer, {"step": step, "samples": 8 * step}, 2)


# --------------------------------------------------------------------------- failures


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("kind", [500, 503, 0], ids=["500", "slow down", "cut"])
def test_remote_transient_error_is_tried_again(
    kind: int, client: str, home: str, proxy: s3.Proxy
) -> None:
    """Every third request fails."""
    proxy.spoil = lambda method, path, number: kind if number % 3 == 0 else None
    saved = run_ranks(save_once, 2, home, 3, 1e-3, timeout=120)[0]
    for state, _ in run_ranks(load_newest, 2, home, client, timeout=120):
        assert all(state[name].equal(tensor) for name, tensor in saved.items())


def test_remote_permanent_error_is_reported_and_cleaned_up(home: str, proxy: s3.Proxy) -> None:
    run_ranks(save_once, 2, home, 1, 1e-3)
    proxy.spoil = lambda method, path, number: (
        403 if method in ("PUT", "POST") and "shard-00001" in path else None
    )
    with pytest.raises(RankError, match=r"step-00000002: could not be written: rank 1: ") as caught:
        run_ranks(save_once, 2, home, 2, 2e-3, timeout=120)
    assert s3.SECRET not in str(caught.value)
    proxy.spoil = lambda method, path, number: None
    ((steps, names),) = run_ranks(inspect_checkpoints, 1, home)
    assert steps == [1]
    assert all("step-00000001" in name for name in names)


def race(home: str) -> tuple[list[int], str]:
    directory = open_directory(home)
    epochs = [acquire_lease(directory, 0), acquire_lease(directory, 0)]
    put_if_absent(directory / "x", b"one")
    put_if_absent(directory / "x", b"one")  # a retry of the same put
    with pytest.raises(FileExistsError):
        put_if_absent(directory / "x", b"two")
    return epochs, (directory / "x").read_text()


def test_remote_put_if_absent_succeeds_for_one_writer(home: str) -> None:
    assert run_ranks(race, 1, home) == [([1, 2], "one")]


# --------------------------------------------------------------------------- complete runs


def newest_of(home: str) -> dict[str, torch.Tensor]:
    return read_state(list_checkpoints(open_directory(home))[-1])


def test_remote_killed_run_resumes(home: str, store_path: Path, tmp_path: Path) -> None:
    steps: Overrides = [("train.steps", "8"), ("checkpoint.interval", "2")]
    run_ranks(train_rank, 2, [*steps, ("run.dir", str(tmp_path / "a"))], str(store_path))
    change = '[{site = "checkpoint.rename", passing = 3}]'
    overrides = [*steps, ("run.dir", str(tmp_path / "b")), ("checkpoint.dir", home)]
    overrides += [("resilience.faults", change)]
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(train_rank, 2, overrides, str(store_path))
    ((steps_left, _),) = run_ranks(inspect_checkpoints, 1, home)
    assert steps_left == [2, 4]
    run_ranks(train_rank, 2, overrides, str(store_path), timeout=120)
    (state,) = run_ranks(newest_of, 1, home)
    reference_run = newest_state(tmp_path / "a")
    assert all(state[name].equal(tensor) for name, tensor in reference_run.items())
    ((steps_left, names),) = run_ranks(inspect_checkpoints, 1, home)
    assert steps_left == [6, 8]
    assert {name.split("/")[1][:5] for name in names} == {"lease", "step-"}


def find_best_step(home: str) -> int:
    metric = get_best_metric(small_job(("checkpoint.best", "eval_loss")).checkpoint)
    found = find_best(list_checkpoints(open_directory(home)), metric)
    assert found is not None
    return checkpoint_step(found[0])


def test_remote_best_checkpoint_is_kept(home: str, store_path: Path, tmp_path: Path) -> None:
    """Also one whose evaluation a stop skipped, and the next start made up for."""
    keys = [("run.dir", str(tmp_path / "a")), ("checkpoint.dir", home)]
    keys += [("checkpoint.best", "eval_loss"), ("checkpoint.keep_latest", "1")]
    values = {2: 3.0, 4: 1.0, 6: 2.0, 8: 2.0}
    first, second = ([*keys, EVERY_2, ("train.steps", steps)] for steps in ("4", "8"))
    run_ranks(train_with_losses, 1, values, first, str(store_path), 4)
    assert run_ranks(find_best_step, 1, home) == [2]
    run_ranks(train_with_losses, 1, values, second, str(store_path))
    assert run_ranks(find_best_step, 1, home) == [4]
    ((steps_left, names),) = run_ranks(inspect_checkpoints, 1, home)
    assert steps_left == [4, 8]
    assert [name for name in names if "evaluation" in name] == ["step-00000004/evaluation.json"]


def export_and_import(run: str, home: str, second_run: str) -> list[str]:
    out = f"{home}/exported"
    assert main(["export", run, out, "--max-shard", "100KB"]) == 0
    assert main(["export", run, out]) == 2  # it exists
    assert main(["import", out, second_run]) == 0
    return list_objects(out)


def test_remote_exported_model_round_trip_is_exact(
    home: str, store_path: Path, tmp_path: Path
) -> None:
    run, second_run = tmp_path / "run", tmp_path / "again"
    job = small_job(("run.dir", str(run)), ("train.steps", "2"))
    run_ranks(train_rank, 2, [("run.dir", str(run)), ("train.steps", "2")], str(store_path))
    (run / "job.toml").write_text(to_toml(job, "small", job))
    shutil.copy(store_path / "tokenizer.json", run)
    (names,) = run_ranks(export_and_import, 1, str(run), home, str(second_run), timeout=120)
    assert "/config.json" in names
    assert "/model.safetensors.index.json" in names
    ours, theirs = newest_state(run), newest_state(second_run)
    weights = [name for name in ours if name.startswith("model.")]
    assert all(ours[name].equal(theirs[name]) for name in weights)
