"""A last save that fails: retries, another place, and the command that resumes from there."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import tempfile
from pathlib import Path

import pytest

from tests.checkpoint.test_saver import STEPS, steps_saved, toml, train_and_record_output
from tests.harness import RankError, run_ranks
from tests.small import Overrides, before_each_step, losses, newest_state, this_rank, train_rank
from weft.checkpoint import final_save
from weft.checkpoint.manifest import checkpoint_step, list_checkpoints, list_leases
from weft.checkpoint.owner import write_owner
from weft.monitor.signals import listen

AT_ONCE = ("checkpoint.final_save_timeout", "0")


def save_fails(times: int, passing: int = 3) -> tuple[str, str]:
    """Return a fault at the last of the three saves of `STEPS`, and at the attempts after it."""
    fault = {"site": "checkpoint.written", "rank": 1, "kind": "error", "passing": passing}
    return "resilience.faults", toml(fault | {"times": times, "error": "ENOSPC"})


def places_left() -> list[Path]:
    roots = (Path(tempfile.gettempdir()), final_save.MEMORY_DIR)
    return [path for root in roots for path in root.glob("weft-run-step-*")]


def command_in(text: str) -> list[str]:
    """Return the words of the command that a message names."""
    found = re.search(r"To continue from it: (weft train .*? --checkpoint.dir \S+)", text)
    assert found, text
    return shlex.split(found[1])


def train_impatiently(overrides: Overrides, store: str, output_path: str) -> None:
    final_save.RETRY_DELAYS = (0,)
    train_and_record_output(overrides, store, output_path)


def test_final_save_transient_error_is_tried_again(store_path: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = [*STEPS, ("run.dir", str(run)), save_fails(3)]
    run_ranks(train_impatiently, 2, overrides, str(store_path), str(tmp_path / "said"))
    assert steps_saved(run) == [3, 6, 8]
    text = (tmp_path / "said-0").read_text()
    assert text.count("weft retries the final save of the run in") == 3
    assert "No space left on device" in text
    assert re.search(
        r"The save needs [\d,]{6,} bytes in \S+/checkpoints, and [\d,]+ bytes are", text
    )
    assert not list(run.glob("checkpoints-*"))


def test_final_save_impossible_reports_the_lost_steps(store_path: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = [*STEPS, ("run.dir", str(run)), save_fails(99), AT_ONCE]
    with pytest.raises(RankError) as caught:
        run_ranks(train_rank, 2, overrides, str(store_path))
    message = str(caught.value)
    assert "the final save at step 8 failed in 1 attempt in" in message
    assert "No space left on device" in message
    assert f"No other place can take the state: {run}/checkpoints-step-00000008-" in message
    assert f"Steps 7 to 8 are lost; the last checkpoint is {run}/checkpoints/step-0" in message
    assert steps_saved(run) == [3, 6]
    assert not list((run / "checkpoints").glob(".tmp-*"))
    assert not list(run.glob("checkpoints-*"))
    assert not places_left()


def test_final_save_timeout_saves_elsewhere_and_resumes_bit_for_bit(
    store_path: Path, tmp_path: Path
) -> None:
    """The run stops after step 5; training continues from the other place."""
    run = tmp_path / "run"
    steps = [*STEPS, ("run.dir", str(run))]
    with pytest.raises(RankError) as caught:
        run_ranks(stop_after_step_5, 2, [*steps, save_fails(1, 2), AT_ONCE], str(store_path))
    (place,) = run.glob("checkpoints-step-00000005-*")
    words = command_in(str(caught.value))
    assert words == ["weft", "train", str(run), "--checkpoint.dir", str(place)]
    assert [checkpoint_step(path) for path in list_checkpoints(place)] == [5]
    assert list_leases(place) == list_leases(run / "checkpoints") == [(1, 0)]
    assert steps_saved(run) == [3]
    run_ranks(train_rank, 2, [*steps, ("checkpoint.dir", str(place))], str(store_path))
    straight = tmp_path / "straight"
    run_ranks(train_rank, 2, [*STEPS, ("run.dir", str(straight))], str(store_path))
    assert losses(run) == losses(straight)
    (run / "checkpoints").rename(run / "full")
    place.rename(run / "checkpoints")
    state, expected = newest_state(run), newest_state(straight)
    assert all(state[name].equal(tensor) for name, tensor in expected.items())


def stop_after_step_5(overrides: Overrides, store: str, output_path: str = os.devnull) -> None:
    listen()

    def stop(step: int) -> None:
        if step == 5 and this_rank().rank == 1:
            signal.raise_signal(signal.SIGTERM)

    before_each_step(stop)
    train_and_record_output(overrides, store, output_path)


def test_final_save_stop_saves_elsewhere_at_once_then_in_the_directory(
    store_path: Path, tmp_path: Path
) -> None:
    run, said = tmp_path / "run", tmp_path / "said"
    overrides = [*STEPS, ("run.dir", str(run)), save_fails(1, 2)]
    run_ranks(stop_after_step_5, 2, overrides, str(store_path), str(said))
    text = (tmp_path / "said-0").read_text()
    attempt, saved, end = (
        text.index(part)
        for part in ("weft retries the final save", "Step 5 is saved in", "SIGTERM: saved step 5")
    )
    assert attempt < saved < end
    assert "a second signal ends the run at once" in text
    assert steps_saved(run) == [3, 5]
    assert not list(run.glob("checkpoints-*"))
    assert not (run / final_save.RECORD_FILE).exists()


def test_write_owner_directory_missing_is_created(tmp_path: Path) -> None:
    write_owner(tmp_path / "disk/new", tmp_path / "run")
    owner = json.loads((tmp_path / "disk/new/run.json").read_text())
    assert owner["run_dir"] == f"{tmp_path}/run"
    assert owner["id"] == (tmp_path / "run/.run-id").read_text()


@pytest.mark.parametrize("free", [0, 10**9])
def test_final_save_without_room_in_the_run_directory_uses_the_next_place(
    free: int, store_path: Path, tmp_path: Path
) -> None:
    """Ranks that do not see a place, as on other nodes, make all of them take the next."""
    run, local = tmp_path / "run", tmp_path / "local"
    overrides = [*STEPS, ("run.dir", str(run)), ("checkpoint.local_dir", str(local))]
    overrides += [("checkpoint.local_interval", "100"), save_fails(1), AT_ONCE]
    with pytest.raises(RankError) as caught:
        run_ranks(train_with_little_room, 2, overrides, str(store_path), str(run), free)
    (place,) = local.glob("weft-run-step-00000008-*")
    assert place.stat().st_mode & 0o777 == 0o700
    assert command_in(str(caught.value))[-1] == str(place)
    assert "copy it before" in str(caught.value)
    assert [checkpoint_step(path) for path in list_checkpoints(place)] == [8]
    assert not list(run.glob("checkpoints-*"))


def train_with_little_room(overrides: Overrides, store: str, run: str, free: int) -> None:
    """Train; the run directory has ``free`` bytes, and only rank 0 sees new directories in it."""
    count_free, is_dir = final_save.free_bytes, Path.is_dir

    def free_bytes(directory: Path) -> int | None:
        return free if directory.parent == Path(run) else count_free(directory)

    def sees(path: Path) -> bool:
        is_elsewhere = path.name.startswith("checkpoints-step") and this_rank().rank == 1
        return not is_elsewhere and is_dir(path)

    final_save.free_bytes = free_bytes
    Path.is_dir = sees  # type: ignore[method-assign]
    train_rank(overrides, store)
