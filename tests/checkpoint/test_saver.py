"""Asynchronous saves: consistent state, reported failures, and one writer per run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.checkpoint.test_manager import full_state, save, stepped
from tests.harness import ROOT, RankError, run_ranks
from tests.small import (
    Overrides,
    before_each_step,
    newest_state,
    plan_here,
    read_state,
    records,
    small_job,
    this_rank,
    train_rank,
)
from weft.checkpoint import manifest, shard_files
from weft.checkpoint.commit import delete_old
from weft.checkpoint.manager import CheckpointManager, CheckpointSchedule, young_interval
from weft.checkpoint.manifest import (
    CheckpointError,
    LeaseLost,
    acquire_lease,
    checkpoint_step,
    list_checkpoints,
    list_committed,
    list_leases,
    read_manifest,
)
from weft.checkpoint.state_dict import trainable_parameters
from weft.config.schema import CheckpointSection
from weft.config.storage import put_if_absent
from weft.data.dataset import open_dataset
from weft.monitor.faults import install_faults
from weft.training.loop import train


def write_late(directory: str, background: bool) -> tuple[dict[str, torch.Tensor], float, float]:
    """Save, and change the state before it is written; return the saved state and times."""
    parts, optimizer = stepped(1e-3)
    saver = CheckpointManager(Path(directory), 9, async_save=background)
    before = full_state(parts, optimizer)
    slow = {"site": "checkpoint.shards", "kind": "slow", "seconds": 1.0, "rank": this_rank().rank}
    install_faults(
        small_job(("resilience.faults", toml(slow))).resilience.faults,
        this_rank().rank,
        Path(directory),
    )
    saver.save(parts, optimizer, {"step": 1, "samples": 8})
    for _, param in trainable_parameters(parts):
        param.grad = torch.ones_like(param.data)
    optimizer.step()
    saver.wait()
    return before, saver.blocking_seconds, saver.write_seconds


def toml(fault: dict[str, Any]) -> str:
    pairs = ", ".join(f"{k} = {v!r}".replace("'", '"') for k, v in fault.items())
    return f"[{{{pairs}}}]"


@pytest.mark.parametrize("ranks", [1, 2])
def test_saver_async_save_has_the_state_of_its_step(ranks: int, tmp_path: Path) -> None:
    for before, stall, write in run_ranks(write_late, ranks, str(tmp_path), True):
        on_disk = read_state(list_checkpoints(tmp_path)[-1])
        assert all(on_disk[name].equal(tensor) for name, tensor in before.items())
        assert write > 1.0 > stall


def release_and_save_again(directory: str) -> tuple[bool, bool]:
    """Return if only the writer computed fingerprints, and if the copies were freed."""
    threads = set()
    compute = shard_files.fingerprint

    def note_thread(*args: Any) -> torch.Tensor:
        threads.add(threading.current_thread())
        return compute(*args)

    shard_files.fingerprint = note_thread
    parts, optimizer = stepped(1e-3)
    saver = CheckpointManager(Path(directory), 9, async_save=True)
    saver.save(parts, optimizer, {"step": 1, "samples": 8})
    copies = [weakref.ref(copy) for copy in saver._buffers.values()]
    assert copies
    saver.release_copies()
    is_freed = not saver.is_saving() and all(copy() is None for copy in copies)
    saver.save(parts, optimizer, {"step": 2, "samples": 16})
    saver.wait()
    return bool(threads) and threading.main_thread() not in threads, is_freed


def test_saver_fingerprints_copies_in_the_writer_and_frees_them(tmp_path: Path) -> None:
    """Training waits only for the copy, and loading gets its memory back."""
    assert run_ranks(release_and_save_again, 1, str(tmp_path)) == [(True, True)]
    first, second = map(read_state, list_checkpoints(tmp_path))
    assert all(second[name].equal(tensor) for name, tensor in first.items())


def save_several(directory: str) -> list[dict[str, torch.Tensor]]:
    """Save several times without waiting, so that each save must wait for the previous one."""
    parts, optimizer = stepped(1e-3)
    saver = CheckpointManager(Path(directory), 9, async_save=True)
    slow = {"site": "checkpoint.shards", "kind": "slow", "seconds": 0.5, "passing": 2}
    install_faults(
        small_job(("resilience.faults", toml(slow))).resilience.faults,
        this_rank().rank,
        Path(directory),
    )
    states = []
    for step in range(1, 6):
        for _, param in trainable_parameters(parts):
            param.grad = torch.full_like(param.data, 1e-3 * step)
        optimizer.step()
        states.append(full_state(parts, optimizer))
        saver.save(parts, optimizer, {"step": step, "samples": 8 * step})
    saver.close()
    return states


def test_saver_saves_one_at_a_time_and_close_waits(tmp_path: Path) -> None:
    states = run_ranks(save_several, 2, str(tmp_path))[0]
    saved = list_checkpoints(tmp_path)
    assert [checkpoint_step(path) for path in saved] == [1, 2, 3, 4, 5]
    for path, state in zip(saved, states, strict=True):
        on_disk = read_state(path)
        assert all(on_disk[name].equal(tensor) for name, tensor in state.items())


def test_saver_replicas_share_the_writes(tmp_path: Path) -> None:
    """One replica writes each tensor, and the replicas share the work."""
    run_ranks(save_replicas, 4, str(tmp_path))
    (path,) = list_checkpoints(tmp_path)
    sizes = [file["bytes"] for file in read_manifest(path)["files"]]
    assert len(sizes) == 4, sizes
    assert max(sizes) < 3 * min(sizes), sizes


def save_replicas(directory: str) -> None:
    parts, optimizer = stepped(1e-3, ("parallel.dp_replicate", "2"))
    save(Path(directory), parts, optimizer, {"step": 1, "samples": 8}, 1)


# --------------------------------------------------------------------------- failures

STEPS: Overrides = [
    ("model.num_layers", "1"),
    ("train.steps", "8"),
    ("checkpoint.interval", "3"),
    ("checkpoint.keep_latest", "9"),
    ("monitor.log_interval", "1"),
]


def train_and_record_output(overrides: Overrides, store: str, output_path: str) -> None:
    job = small_job(*overrides)
    with open(f"{output_path}-{this_rank().rank}", "w", encoding="utf-8") as file:
        console = Console(file=file, width=10_000)
        train(plan_here(job), open_dataset(Path(store)), this_rank(), console)


def steps_saved(run: Path) -> list[int]:
    return [checkpoint_step(path) for path in list_checkpoints(run / "checkpoints")]


@pytest.mark.parametrize("background", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_train_failed_save_is_tried_again_at_once(
    background: str, store_path: Path, tmp_path: Path
) -> None:
    change = {"site": "checkpoint.written", "rank": 1, "kind": "error", "error": "ENOSPC"}
    slow = {"site": "step", "passing": 5, "kind": "slow", "seconds": 1.0}  # the save ends meanwhile
    overrides = [
        *STEPS,
        ("run.dir", str(tmp_path / "run")),
        ("checkpoint.async_save", background),
        ("resilience.faults", toml(change)[:-1] + ", " + toml(slow)[1:]),
    ]
    run_ranks(train_and_record_output, 2, overrides, str(store_path), str(tmp_path / "said"))
    saved = steps_saved(tmp_path / "run")
    assert saved in ([4, 6, 8], [5, 6, 8])
    text = (tmp_path / "said-0").read_text()
    assert "step-00000003: could not be written: rank 1: " in text
    assert "No space left on device" in text


def test_train_failed_save_is_tried_again_only_once(store_path: Path, tmp_path: Path) -> None:
    """A full disk must not cost a save every step."""
    faults = ", ".join(
        toml({"site": "checkpoint.rename", "passing": n, "kind": "error"})[1:-1] for n in (1, 2)
    )
    run = tmp_path / "run"
    overrides = [*STEPS, ("run.dir", str(run)), ("checkpoint.async_save", "false")]
    overrides += [("resilience.faults", f"[{faults}]")]
    run_ranks(train_and_record_output, 2, overrides, str(store_path), str(tmp_path / "said"))
    assert steps_saved(run) == [6, 8]
    assert (tmp_path / "said-0").read_text().count("warning: ") == 2


def test_train_failure_waits_for_the_save_in_progress(store_path: Path, tmp_path: Path) -> None:
    slow = {"site": "checkpoint.shards", "rank": 1, "kind": "slow", "seconds": 1.0}
    bad = {"site": "gradients", "passing": 4, "kind": "corrupt", "factor": 1e45}
    run = tmp_path / "run"
    overrides = [*STEPS, ("run.dir", str(run))]
    overrides += [("resilience.faults", toml(slow)[:-1] + ", " + toml(bad)[1:])]
    with pytest.raises(RankError, match="the gradient norm is"):
        run_ranks(train_rank, 2, overrides, str(store_path))
    assert steps_saved(run) == [3]
    assert not list((run / "checkpoints").glob(".tmp-*"))


# --------------------------------------------------------------------------- interval


def test_young_interval_loses_least() -> None:
    """Compare the formula with the expected loss over a range of intervals."""

    def lost_time(between: float, cost: float, mtbf: float) -> float:
        return cost / between + between / (2 * mtbf)

    for cost, mtbf in ((0.5, 3600.0), (30.0, 4 * 3600.0), (2.0, 86400.0)):
        best = young_interval(cost, mtbf)
        assert all(
            lost_time(best, cost, mtbf) < lost_time(best * f, cost, mtbf) for f in (0.8, 0.95, 1.05)
        )
    assert young_interval(30, 4 * 3600) == pytest.approx(929.5, abs=0.1)


def measure_intervals(mtbf_hours: float, stalls: list[float]) -> list[int]:
    section = CheckpointSection(interval="auto", mtbf_hours=mtbf_hours)
    saves, steps = CheckpointSchedule(section, 100, lambda text: None), []
    for step in range(101, 500):
        if saves.is_due(step):
            # Ranks measure different costs and must agree on an interval.
            saves.record_save(step, stalls[this_rank().rank], 0.0, 1.0 + this_rank().rank)
            steps.append(step)
    return steps


def test_auto_interval_follows_the_slowest_rank() -> None:
    single, together = (
        run_ranks(measure_intervals, 2, 1.0, stalls) for stalls in ([2.0, 2.0], [0.1, 2.0])
    )
    assert single[0] == single[1] == together[0] == together[1]
    # sqrt(2 * 2 s * 3600 s) = 120 s of steps of 2 s.
    assert together[0] == list(range(110, 500, 60))


def test_auto_interval_in_a_run_saves_often_and_is_logged(store_path: Path, tmp_path: Path) -> None:
    overrides = [
        ("run.dir", str(tmp_path / "run")),
        ("train.steps", "24"),
        ("checkpoint.interval", "auto"),
        ("checkpoint.mtbf_hours", "1e-9"),
        ("checkpoint.keep_latest", "99"),
    ]
    run_ranks(train_and_record_output, 2, overrides, str(store_path), str(tmp_path / "said"))
    saved = steps_saved(tmp_path / "run")
    assert saved[0] == 10
    assert saved[-1] == 24
    assert len(saved) > 5
    assert "a save blocks training for" in (tmp_path / "said-0").read_text()


# --------------------------------------------------------------------------- lease


def acquire_and_save(directory: str, step: int, first: int, last: int) -> int:
    """Run one incarnation: load ``step`` and save steps ``first`` to ``last``."""
    home = Path(directory)
    saver = CheckpointManager(home, 9)
    saver.acquire_lease(step)
    parts, optimizer = stepped(1e-3 * saver.lease.epoch)
    for step in range(first, last + 1):
        saver.save(parts, optimizer, {"step": step, "samples": 8 * step})
        saver.wait()
    return saver.lease.epoch


def list_saves(directory: Path) -> list[tuple[int, int]]:
    return [
        (checkpoint_step(path), read_manifest(path)["epoch"])
        for path in list_checkpoints(directory)
    ]


def test_checkpoints_of_an_abandoned_branch_do_not_count(tmp_path: Path) -> None:
    run_ranks(acquire_and_save, 1, str(tmp_path), 0, 1, 4)
    assert list_saves(tmp_path) == [(1, 1), (2, 1), (3, 1), (4, 1)]
    # After a rollback to step 2, steps 3 and 4 do not count, even before the next save.
    run_ranks(acquire_and_save, 2, str(tmp_path), 2, 3, 2)
    assert list_saves(tmp_path) == [(1, 1), (2, 1)]
    run_ranks(acquire_and_save, 2, str(tmp_path), 2, 3, 3)
    assert list_saves(tmp_path) == [(1, 1), (2, 1), (3, 3)]
    assert list_leases(tmp_path) == [(1, 0), (2, 2), (3, 2)]
    # The new branch is ahead of the abandoned one, which may be deleted.
    run_ranks(acquire_and_save, 1, str(tmp_path), 3, 4, 5)
    assert list_saves(tmp_path) == [(1, 1), (2, 1), (3, 3), (4, 4), (5, 4)]


def save_as_superseded(directory: str) -> str:
    home = Path(directory)
    parts, optimizer = stepped(1e-3)
    saver = CheckpointManager(home, 9, async_save=True)
    saver.acquire_lease(0)
    saver.save(parts, optimizer, {"step": 1, "samples": 8})
    saver.wait()
    acquire_lease(home, 1)  # another process takes the run ...
    (home / ".tmp-step-00000002-theirs").mkdir(exist_ok=True)  # ... and is also saving
    saver.save(parts, optimizer, {"step": 2, "samples": 16})
    with pytest.raises(LeaseLost) as caught:
        saver.wait()
    with pytest.raises(LeaseLost):
        saver.should_retry()
    return str(caught.value)


def test_saver_superseded_process_cannot_commit(tmp_path: Path) -> None:
    for message in run_ranks(save_as_superseded, 2, str(tmp_path)):
        assert "another process has acquired the run's lease" in message
        assert '"process": ' in message
    assert sorted(os.listdir(tmp_path)) == [
        ".tmp-step-00000002-theirs",
        "lease-000001.json",
        "lease-000002.json",
        "step-00000001",
    ]


def test_checkpoints_committed_after_a_lost_lease_do_not_count(tmp_path: Path) -> None:
    """The process checked its lease just before another process acquired the run."""
    run_ranks(acquire_and_save, 1, str(tmp_path), 0, 1, 3)
    acquire_lease(tmp_path, 2)
    assert list_saves(tmp_path) == [(1, 1), (2, 1)]


def test_delete_old_after_a_takeover_from_step_0_deletes_nothing(tmp_path: Path) -> None:
    """Take over after the last lease check, before old checkpoints are removed."""
    run_ranks(acquire_and_save, 1, str(tmp_path), 0, 1, 3)
    acquire_lease(tmp_path, 0)
    delete_old(tmp_path, 2)
    assert [checkpoint_step(path) for path in list_committed(tmp_path)] == [1, 2, 3]


def test_checkpoints_damaged_lease_raises(tmp_path: Path) -> None:
    """A damaged lease may abandon a branch, so weft does not guess."""
    acquire_lease(tmp_path, 0)
    for text in ("", "{", "[]", '{"step": "x"}'):
        (tmp_path / "lease-000001.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"lease-000001\.json: the lease is damaged"):
            list_checkpoints(tmp_path)


def acquire_many(directory: str) -> list[int]:
    return [manifest._acquire_lease(Path(directory), 0) for _ in range(20)]


def test_acquire_lease_by_several_at_once_gives_distinct_epochs(tmp_path: Path) -> None:
    taken = run_ranks(acquire_many, 3, str(tmp_path))
    assert sorted(epoch for rank in taken for epoch in rank) == list(range(1, 61))
    assert not list(tmp_path.glob(".tmp*"))


def test_put_if_absent_of_two_writers_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writers may have equal process ids, as in two containers."""
    path, link = tmp_path / "lease", os.link

    def acquire_during_move(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        put_if_absent(path, b"theirs")
        link(source, target)

    monkeypatch.setattr(os, "link", acquire_during_move)
    with pytest.raises(FileExistsError):
        put_if_absent(path, b"ours")
    assert path.read_bytes() == b"theirs"
    assert os.listdir(tmp_path) == ["lease"]


def test_put_if_absent_deleted_temporary_file_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that saves removes files that begin with ``.tmp-lease`` as leftovers."""
    path, link = tmp_path / "lease", os.link

    def acquire_during_move(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        os.unlink(source)
        link(source, target)

    monkeypatch.setattr(os, "link", acquire_during_move)
    put_if_absent(path, b"ours")
    assert path.read_bytes() == b"ours"
    assert os.listdir(tmp_path) == ["lease"]


def save_after_directory_removed(directory: str) -> tuple[list[str], int]:
    """Save, remove the directory, save twice; return messages. Another takes the run."""
    home, messages = Path(directory) / "checkpoints", []
    parts, optimizer = stepped(1e-3)
    saver = CheckpointManager(home, 9, log=messages.append)
    for step in (0, 0):  # the second lease has epoch 2
        saver.acquire_lease(step)
    for step in (1, 2, 3):
        saver.save(parts, optimizer, {"step": step, "samples": 8 * step})
        saver.wait()
        if step == 1:
            shutil.rmtree(home)
    saver.should_retry()
    assert list_leases(home) == [(1, 0), (2, 0)]
    epoch = acquire_lease(home, 3)
    with pytest.raises(LeaseLost):
        saver.save(parts, optimizer, {"step": 4, "samples": 32})
    return messages, epoch


def test_saver_deleted_directory_restores_lease_and_fencing(tmp_path: Path) -> None:
    ((messages, epoch),) = run_ranks(save_after_directory_removed, 1, str(tmp_path))
    assert epoch == 3
    (warning,) = messages
    assert (
        f"{tmp_path}/checkpoints: the directory was deleted while the run was training" in warning
    )
    assert list_saves(tmp_path / "checkpoints") == [(2, 2), (3, 2)]


def save_after_directory_replaced(directory: str) -> str:
    home = Path(directory) / "checkpoints"
    parts, optimizer = stepped(1e-3)
    saver = CheckpointManager(home, 9)
    for step in (0, 0):
        saver.acquire_lease(step)
    shutil.rmtree(home)
    assert acquire_lease(home, 0) == 1 < saver.lease.epoch
    with pytest.raises(LeaseLost) as caught:
        saver.save(parts, optimizer, {"step": 1, "samples": 8})
    return str(caught.value)


def test_saver_deleted_directory_with_another_lease_is_superseded(tmp_path: Path) -> None:
    (messages,) = run_ranks(save_after_directory_replaced, 1, str(tmp_path))
    assert "another process has acquired the run's lease: lease-000001.json" in messages
    assert os.listdir(tmp_path / "checkpoints") == ["lease-000001.json"]


def test_train_deleted_directory_is_reported_once(store_path: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = [*STEPS, ("run.dir", str(run)), ("checkpoint.async_save", "false")]
    run_ranks(train_and_delete, 2, overrides, str(store_path), str(tmp_path / "said"))
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    (warning,) = (event for event in events if event["kind"] == "warning")
    assert "was deleted while the run was training" in warning["text"]
    assert (tmp_path / "said-0").read_text().count("was deleted while") == 1
    assert steps_saved(run) == [6, 8]
    assert [path.name for path in (run / "checkpoints").glob("lease-*")] == ["lease-000001.json"]


def train_and_delete(overrides: Overrides, store: str, output_path: str) -> None:
    """Train; the checkpoint directory is removed in step 5."""
    home = Path(dict(overrides)["run.dir"]) / "checkpoints"

    def delete(step: int) -> None:
        if step == 5 and this_rank().rank == 0:
            shutil.rmtree(home)

    before_each_step(delete)
    train_and_record_output(overrides, store, output_path)


# --------------------------------------------------------------------------- data errors


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_train_data_unreadable_on_one_rank_saves_then_fails(
    rank: int, store_path: Path, tmp_path: Path
) -> None:
    """A rank without data stops the step on all ranks: the saved state is exact."""
    run = tmp_path / "run"
    bad = {"site": "step", "rank": rank, "kind": "error", "passing": 6, "error": "EIO"}
    overrides = [*STEPS, ("run.dir", str(run))]
    faulty = [*overrides, ("resilience.faults", toml(bad))]
    with pytest.raises(RankError, match=f"rank {rank} of 2 failed") as caught:
        run_ranks(train_and_record_output, 2, faulty, str(store_path), str(tmp_path / "said"))
    assert "OSError: [Errno 5]" in str(caught.value)
    assert "step 5 is saved" in str(caught.value)
    assert steps_saved(run) == [3, 5]
    assert read_manifest(list_checkpoints(run / "checkpoints")[-1])["samples"] == 40
    run_ranks(train_rank, 2, overrides, str(store_path))
    straight = tmp_path / "straight"
    run_ranks(train_rank, 2, [*STEPS, ("run.dir", str(straight))], str(store_path))
    state, expected = newest_state(run), newest_state(straight)
    assert all(state[name].equal(tensor) for name, tensor in expected.items())


def test_train_error_in_backward_saves_nothing(store_path: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    bad = {"site": "gradients", "rank": 1, "kind": "error", "passing": 6, "error": "EIO"}
    overrides = [*STEPS, ("run.dir", str(run)), ("resilience.faults", toml(bad))]
    with pytest.raises(RankError, match="OSError"):
        run_ranks(train_rank, 2, overrides, str(store_path))
    assert steps_saved(run) == [3]


@pytest.mark.slow
def test_train_suspended_and_superseded_ends(store_path: Path, tmp_path: Path) -> None:
    """Suspend a run in step 5 while another process finishes it, and wake it up."""
    run = tmp_path / "run"
    stop = {"site": "checkpoint.manifest", "passing": 2, "kind": "slow", "seconds": 25.0}
    overrides = [*STEPS, ("run.dir", str(run)), ("checkpoint.async_save", "false")]
    sleeper = [*overrides, ("resilience.faults", toml(stop))]
    code = "from tests.harness import run_ranks; from tests.small import train_rank\n"
    code += f"run_ranks(train_rank, 2, {sleeper!r}, {str(store_path)!r})"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as sleeping:
        try:
            until = time.monotonic() + 60
            while not (run / "logs/fault-0.happened").exists() and time.monotonic() < until:
                time.sleep(0.05)
            run_ranks(train_rank, 2, overrides, str(store_path))
            finished = newest_state(run)
            _, errors = sleeping.communicate(timeout=60)
        finally:
            sleeping.kill()
    assert "another process has acquired the run's lease" in errors
    assert not list((run / "checkpoints").glob("abandoned-*"))
    second_run = newest_state(run)
    assert all(second_run[name].equal(tensor) for name, tensor in finished.items())
    assert [record["step"] for record in records(run)] == list(range(1, 9))
    assert json.loads((run / "checkpoints/lease-000002.json").read_text())["step"] == 3
