"""Checkpoints: atomic, loadable into any layout, with errors naming the cause."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import RankError, run_ranks
from tests.small import full_tensor, plan_here, read_state, small_job, this_rank
from weft.checkpoint.load import load_checkpoint
from weft.checkpoint.manager import CheckpointManager
from weft.checkpoint.manifest import (
    CheckpointError,
    DamagedCheckpoint,
    list_checkpoints,
    manifest_text,
    read_manifest,
)
from weft.checkpoint.state_dict import model_state, optimizer_state, trainable_parameters
from weft.training.setup import build

JOB = [("run.dir", "/nonexistent")]


def stepped(value: float, *overrides: tuple[str, str]) -> tuple[Any, Any]:
    """Return model parts and optimizer after a step with gradients ``value``."""
    job = small_job(*JOB, *overrides)
    _, parts, _, _, optimizer, *_ = build(plan_here(job), this_rank())
    for _, param in trainable_parameters(parts):
        param.grad = torch.full_like(param.data, value)
    optimizer.step()
    optimizer.zero_grad()
    return parts, optimizer


def full_state(parts: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    state = model_state(parts) | optimizer_state(parts, optimizer)
    return {name: full_tensor(tensor).clone() for name, tensor in state.items()}


def save(directory: Path, parts: Any, optimizer: Any, manifest: dict[str, Any], keep: int) -> None:
    """Save one checkpoint and wait for it."""
    saver = CheckpointManager(directory, keep)
    saver.save(parts, optimizer, manifest)
    saver.wait()


def save_once(directory: str, step: int, value: float, keep: int = 2) -> dict[str, torch.Tensor]:
    parts, optimizer = stepped(value)
    save(Path(directory), parts, optimizer, {"step": step, "samples": 8 * step}, keep)
    return full_state(parts, optimizer)


def load_newest(directory: str) -> dict[str, torch.Tensor]:
    job = small_job(*JOB)
    _, parts, _, _, optimizer, *_ = build(plan_here(job), this_rank())
    load_checkpoint(list_checkpoints(Path(directory))[-1], parts, optimizer)
    return full_state(parts, optimizer)


def with_buffers(value: float) -> nn.Module:
    """Return a model with buffers in modules without parameters."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    model.register_buffer("scale", torch.full((3,), value))
    model[1].register_buffer("count", torch.full((), value))
    return model


def test_save_buffers_of_any_module_round_trip(tmp_path: Path) -> None:
    saved, loaded = with_buffers(1.0), with_buffers(2.0)
    save(tmp_path, [saved], torch.optim.AdamW(saved.parameters()), {"step": 1, "samples": 8}, 1)
    load_checkpoint(list_checkpoints(tmp_path)[0], [loaded], None)
    for name, tensor in saved.state_dict().items():
        assert loaded.state_dict()[name].equal(tensor), name


def save_many(directory: str) -> None:
    parts, optimizer = stepped(1e-3)
    for step in (5, 10, 15, 100_000_000):
        save(Path(directory), parts, optimizer, {"step": step, "samples": 8 * step}, keep=2)


def test_save_keeps_the_newest(tmp_path: Path) -> None:
    run_ranks(save_many, 2, str(tmp_path))
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000015", "step-100000000"]
    assert sorted(os.listdir(tmp_path)) == ["step-00000015", "step-100000000"]
    assert read_manifest(list_checkpoints(tmp_path)[-1])["step"] == 100_000_000


def test_save_committed_step_is_not_written_again(tmp_path: Path) -> None:
    first = run_ranks(save_once, 1, str(tmp_path), 5, 1e-3)[0]
    run_ranks(save_once, 1, str(tmp_path), 5, -1e-3)
    on_disk = read_state(list_checkpoints(tmp_path)[-1])
    assert all(on_disk[name].equal(first[name]) for name in first)


def test_save_step_without_a_manifest_is_written_again(tmp_path: Path) -> None:
    run_ranks(save_once, 1, str(tmp_path), 5, 1e-3)
    (tmp_path / "step-00000005/manifest.json").unlink()
    with pytest.raises(DamagedCheckpoint, match="No such file"):
        read_manifest(tmp_path / "step-00000005")
    second_run = run_ranks(save_once, 2, str(tmp_path), 5, -1e-3)[0]
    on_disk = read_state(list_checkpoints(tmp_path)[-1])
    assert all(on_disk[name].equal(second_run[name]) for name in second_run)


def save_with_little_room(directory: str, limit: int) -> str:
    parts, optimizer = stepped(1e-3)
    save(Path(directory), parts, optimizer, {"step": 1, "samples": 8}, keep=2)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if dist.get_rank() == dist.get_world_size() - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError) as caught:
        save(Path(directory), parts, optimizer, {"step": 2, "samples": 16}, keep=2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return str(caught.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_save_failed_write_is_reported_and_cleaned_up(ranks: int, tmp_path: Path) -> None:
    for message in run_ranks(save_with_little_room, ranks, str(tmp_path), 5000):
        assert "step-00000002: could not be written" in message
    assert sorted(os.listdir(tmp_path)) == ["step-00000001"]
    run_ranks(load_newest, 1, str(tmp_path))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk to fill")
def test_save_on_a_full_disk_is_reported(tmp_path: Path) -> None:
    """The disk has space for one checkpoint but not for two."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this container may not mount")
    try:
        run_ranks(save_once, 2, str(tmp_path), 1, 1e-3, keep=5)
        with pytest.raises(RankError, match="could not be written"):
            run_ranks(save_several, 2, str(tmp_path))
        assert "step-00000001" in os.listdir(tmp_path)
        assert not [name for name in os.listdir(tmp_path) if name.startswith(".tmp")]
        run_ranks(load_newest, 2, str(tmp_path))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_save_clears_files_of_a_killed_writer(tmp_path: Path) -> None:
    (tmp_path / ".tmp-lease-000001.json-1600").write_text("{")
    (tmp_path / ".tmp-step-00000004-ab").mkdir()
    (tmp_path / ".tmp-step-00000004-ab/shard-00000.safetensors").write_bytes(b"half")
    run_ranks(save_once, 1, str(tmp_path), 5, 1e-3)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000005"]
    assert not list(tmp_path.glob(".tmp-*"))


def save_several(directory: str) -> None:
    parts, optimizer = stepped(1e-3)
    for step in range(2, 9):
        save(Path(directory), parts, optimizer, {"step": step, "samples": 8 * step}, keep=20)


def test_checkpoints_other_files_are_ignored(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "none") == []
    for name in ("step-5", "step-00000005", ".tmp-step-00000006-ab", "best"):
        (tmp_path / name).mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000005"]
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json is missing"):
        read_manifest(tmp_path / "step-00000005")
    for text in ("{", "[]", '{"format": 4}', "[" * 100_000):
        (tmp_path / "step-00000005/manifest.json").write_text(text)
        with pytest.raises(DamagedCheckpoint, match=r"manifest\.json is damaged"):
            read_manifest(tmp_path / "step-00000005")
    (tmp_path / "step-00000005/manifest.json").write_text(manifest_text({"format": 3}))
    with pytest.raises(CheckpointError, match="the format is 3, not 4: another version"):
        read_manifest(tmp_path / "step-00000005")


def load_damaged(directory: str) -> str:
    (path,) = list_checkpoints(Path(directory))
    job = small_job(*JOB, ("model.dim", "64"))
    _, parts, _, _, optimizer, *_ = build(plan_here(job), this_rank())
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, parts, optimizer)
    return str(caught.value)


def test_load_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run_ranks(save_once, 1, str(tmp_path), 1, 1e-3)
    (message,) = run_ranks(load_damaged, 1, str(tmp_path))
    assert "step-00000001: could not be loaded" in message
    assert "size mismatch" in message.lower() or "shape" in message.lower()


def save_and_note(directory: str) -> list[str]:
    """Record the fsync and rename calls of a save, in order."""
    recorded: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def note_fsync(handle: int) -> None:
        recorded.append(f"fsync {os.readlink(f'/proc/self/fd/{handle}')}")
        fsync(handle)

    def note_rename(self: Path, target: Path) -> Path:
        recorded.append(f"rename {self}")
        return rename(self, target)

    os.fsync, Path.rename = note_fsync, note_rename
    save_once(directory, 1, 1e-3)
    return recorded


def test_save_syncs_everything_before_it_is_visible(tmp_path: Path) -> None:
    """Sync files, then their directory, then rename, then sync the parent directory.

    A rename can reach the disk before the renamed data.
    """
    zero, one = run_ranks(save_and_note, 2, str(tmp_path))
    temporary = zero[-2].removeprefix("rename ")
    assert zero == [
        f"fsync {temporary}/shard-00000.safetensors",
        f"fsync {temporary}/manifest.json",
        f"fsync {temporary}",
        f"rename {temporary}",
        f"fsync {tmp_path}",
    ]
    assert one == [f"fsync {temporary}/shard-00001.safetensors"]
