"""A run whose checkpoints are all damaged is refused and left unchanged."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.test_damage import save_two
from tests.checkpoint.test_manager import save, stepped
from tests.harness import RankError, run_ranks
from tests.small import Overrides, records, train_rank
from weft.checkpoint.commit import list_quarantined
from weft.checkpoint.manifest import (
    CheckpointError,
    DamagedCheckpoint,
    acquire_lease,
    manifest_text,
    read_manifest,
    resumed_step,
)
from weft.checkpoint.rollback import abandon_damaged
from weft.config.storage import open_directory
from weft.training.state import resume

STEPS: Overrides = [
    ("train.steps", "6"),
    ("checkpoint.interval", "2"),
    ("checkpoint.keep_latest", "9"),
    ("monitor.log_interval", "1"),
]


def resume_times(directory: str, times: int) -> list[tuple[int, str]]:
    """Resume several times; return the step, or -1, and the messages of each time."""
    results = []
    for _ in range(times):
        parts, optimizer = stepped(1.0)
        messages: list[str] = []
        try:
            step = resume(open_directory(directory), "off", parts, optimizer, messages.append).step
        except CheckpointError as error:
            step, messages = -1, [*messages, str(error)]
        results.append((step, "\n".join(messages)))
    return results


def everything_in(directory: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()
    }


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    run_ranks(save_two, 1, str(directory))
    return directory


@pytest.fixture
def saved(saved_once: Path, tmp_path: Path) -> Path:
    """Copy a run with steps 1 and 2, for a test that damages it."""
    return Path(shutil.copytree(saved_once, tmp_path / "checkpoints"))


@pytest.mark.parametrize("file", ["shard-00000.safetensors", "manifest.json"])
def test_resume_all_damaged_refuses_until_rolled_back(file: str, saved: Path) -> None:
    for path in saved.glob("step-*"):
        damage(path / file)
    before = everything_in(saved)
    for step, messages in run_ranks(resume_times, 1, str(saved), 3)[0]:
        assert step == -1
        for name in ("step-00000001", "step-00000002", file, f"`weft rollback {saved.parent} 0`"):
            assert name in messages
    assert everything_in(saved) == before
    abandon_damaged(saved, 0)  # as weft rollback does
    acquire_lease(saved, 0)
    assert run_ranks(resume_times, 1, str(saved), 1)[0] == [(0, "")]
    assert sorted(path.read_bytes() for path in saved.rglob("*.safetensors")) == sorted(
        content for name, content in before.items() if name.endswith(".safetensors")
    )


def test_resume_quarantined_by_an_earlier_start_refuses(saved: Path) -> None:
    for path in saved.glob("step-*"):
        path.rename(path.with_name(f"damaged-{path.name}-17"))
    before = everything_in(saved)
    for step, messages in run_ranks(resume_times, 1, str(saved), 2)[0]:
        assert step == -1
        assert "damaged-step-00000002-17: renamed by an earlier start" in messages
    assert everything_in(saved) == before
    abandon_damaged(saved, 0)
    assert list_quarantined(saved) == []
    assert run_ranks(resume_times, 1, str(saved), 1)[0] == [(0, "")]


def test_resume_base_of_the_newest_lease_gone_refuses(saved: Path) -> None:
    acquire_lease(saved, 2)
    shutil.rmtree(saved / "step-00000002")
    ((step, messages),) = run_ranks(resume_times, 1, str(saved), 1)[0]
    assert step == 1
    assert "warning: the run was resumed at step 2 before" in messages
    shutil.rmtree(saved / "step-00000001")
    for step, messages in run_ranks(resume_times, 1, str(saved), 2)[0]:
        assert step == -1
        assert "resumed at step 2, and no checkpoint of it is left" in messages
    acquire_lease(saved, 0)
    assert run_ranks(resume_times, 1, str(saved), 1)[0] == [(0, "")]


def test_resume_lease_taken_before_any_checkpoint_starts(tmp_path: Path) -> None:
    """A replica group may become leader of a run that has not saved yet."""
    acquire_lease(tmp_path, 3)
    assert resumed_step(tmp_path) == 0
    assert run_ranks(resume_times, 1, str(tmp_path), 1)[0] == [(0, "")]


def test_train_all_damaged_twice_keeps_records(store_path: Path, tmp_path: Path) -> None:
    overrides = [*STEPS, ("run.dir", str(tmp_path))]
    run_ranks(train_rank, 1, overrides, str(store_path))
    for path in (tmp_path / "checkpoints").glob("step-*"):
        damage(path / "shard-00000.safetensors")
    for _ in range(2):
        with pytest.raises(RankError, match="none of the run's checkpoints is intact"):
            run_ranks(train_rank, 1, overrides, str(store_path))
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 3


def test_resume_in_memory_store_all_damaged_refuses() -> None:
    """An object store cannot rename files."""
    run_ranks(refuse_in_store, 1)


def refuse_in_store() -> None:
    directory = open_directory("memory://run/checkpoints")
    parts, optimizer = stepped(1e-3)
    for step in (1, 2):
        save(directory, parts, optimizer, {"step": step, "samples": 8 * step}, keep=9)
    assert [step for step, _ in resume_times(str(directory), 1)] == [2]
    for path in directory.glob("step-*/*/shard-*.safetensors"):
        damage(path)
    for step, output in resume_times(str(directory), 2):
        assert step == -1, output
        assert "step-00000001" in output
    for path in directory.glob("step-*/manifest.json"):  # as earlier versions did
        (path.parent / "manifest.damaged-17.json").write_bytes(path.read_bytes())
        path.unlink()
    for step, output in resume_times(str(directory), 2):
        assert step == -1, output
        assert "manifest.damaged-17.json: renamed by an earlier start" in output
    abandon_damaged(directory, 0)
    assert resume_times(str(directory), 1) == [(0, "")]


# --------------------------------------------------------------------------- schema

HEADER = [
    ("step", -5, "greater than or equal to 0"),
    ("step", 290.5, "valid integer"),
    ("step", "2", "valid integer"),
    ("step", True, "valid integer"),
    ("step", None, "valid integer"),
    ("step", 2**70, "less than"),
    ("step", 1, "the directory is named step-00000002"),
    ("samples", -2400, "greater than or equal to 0"),
    ("samples", 1, "is impossible at step 2"),
    ("samples", "16", "valid integer"),
    ("samples", 2**70, "less than"),
    ("epoch", -1, "greater than or equal to 0"),
    ("epoch", [], "valid integer"),
    ("anomaly_state", [], "valid dictionary"),
    ("anomaly_state", {"loss": ["x"]}, "valid number"),
    ("anomaly_state", {"loss": 1.0}, "valid list"),
    ("anomaly_state", {"in_a_row": -1}, "greater than or equal to 0"),
    ("base", "../../outside", "match pattern"),
    ("inside", "../..", "match pattern"),
    ("data", 5, "valid string"),
    ("mesh", {"pp": "1"}, "valid integer"),
    ("files", {}, "valid list"),
    ("tensors", [], "valid dictionary"),
    ("format", "4", "Input should be 4"),
]


@pytest.mark.parametrize(("field", "value", "rule"), HEADER)
def test_manifest_wrong_field_is_named(field: str, value: Any, rule: str, saved: Path) -> None:
    """The manifest has a valid hash, which anybody can compute."""
    path = saved / "step-00000002"
    manifest = read_manifest(path)
    del manifest["hash"]
    (path / "manifest.json").write_text(manifest_text(manifest | {field: value}))
    with pytest.raises(DamagedCheckpoint) as caught:
        read_manifest(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: manifest.json is damaged: ")
    assert rule in message
    assert field in message


def test_manifest_exchanged_directory_names_are_damage(saved: Path) -> None:
    one, two = saved / "step-00000001", saved / "step-00000002"
    one.rename(saved / "x")
    two.rename(one)
    (saved / "x").rename(two)
    for path in (one, two):
        with pytest.raises(DamagedCheckpoint, match="the directory is named"):
            read_manifest(path)


def test_manifest_link_device_or_fifo_is_not_read(saved: Path) -> None:
    path = saved / "step-00000002/manifest.json"
    spare = path.read_bytes()
    outside = saved / "outside.json"
    outside.write_bytes(spare)
    for make in (
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to(outside),
        lambda: os.mkfifo(path),
        lambda: path.mkdir(),
    ):
        path.unlink()
        make()
        with pytest.raises(DamagedCheckpoint, match=r"manifest\.json is .* not a regular file"):
            read_manifest(path.parent)
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
            path.touch()
    path.write_bytes(spare)
    assert read_manifest(path.parent)["step"] == 2


def test_manifest_too_large_is_not_read(saved: Path) -> None:
    path = saved / "step-00000002/manifest.json"
    os.truncate(path, 1 << 40)  # a sparse file
    with pytest.raises(
        DamagedCheckpoint, match=r"has 1,099,511,627,776 bytes, more than the limit"
    ):
        read_manifest(path.parent)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"step": ' * 50_000, "NaN", "[]", "", "1" * 5000])
def test_manifest_and_lease_deep_or_strange_json_is_an_error(text: str, saved: Path) -> None:
    (saved / "step-00000002/manifest.json").write_text(text)
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json is damaged"):
        read_manifest(saved / "step-00000002")
    (saved / "lease-000001.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"lease-000001\.json: the lease is damaged"):
        resumed_step(saved)


def test_lease_wrong_step_is_an_error(tmp_path: Path) -> None:
    for step in (-1, 2.5, "3", 2**70, None):
        (tmp_path / "lease-000001.json").write_text(json.dumps({"step": step}))
        with pytest.raises(
            CheckpointError, match=r"lease-000001\.json: the lease is damaged \(step = "
        ):
            resumed_step(tmp_path)
