"""Kill whole runs on a file system that behaves like Lustre, and resume by the same command.

Data, cache, run directory and checkpoints are on the file system of `tests.lustre_mount`, whose
metadata operations are slow, so that a kill often interrupts one.  A server that has imported torch
forks each start of weft's command, which saves most of its time.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from multiprocessing import get_context, set_forkserver_preload
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.conftest import make_text
from tests.lustre_mount import lfs_calls, make_lfs, missing, mounted
from tests.s3 import free_ports
from tests.small import SMALL, newest_state
from weft.checkpoint.manifest import checkpoint_step, list_checkpoints, open_contents, read_manifest
from weft.checkpoint.shard_files import check_files, find_damaged_file
from weft.cli.main import main
from weft.data.prepared_cache import open_verified_store

STEPS, KILLS = 24, 50
DELAYS = "--delays=mkdir=0.02,rename=0.02,create=0.01,link=0.01,unlink=0.005,rmdir=0.02,fsync=0.005"
OVERRIDES = dict(SMALL) | {
    "train.steps": str(STEPS),
    "checkpoint.interval": "2",
    "checkpoint.keep_latest": "2",
    "monitor.log_interval": "1",
    "run.device": "cpu",
}

PRELOADED = ["weft.supervision.start", "weft.training.loop", "weft.data.prepare", __name__]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.system,
    pytest.mark.skipif(bool(missing()), reason=missing() or "it can run"),
]


def run_command(command: list[str], environment: dict[str, str], output: str) -> None:
    """Run weft's command, as the leader of a new session, in a new process."""
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ |= environment | {"OMP_NUM_THREADS": "1"}
    sys.argv = ["weft", *command]
    sys.exit(main())


class Run:
    """A run in a directory, started by the same command each time.

    Args:
        home: directory of run and cache.
        visible: the same directory without the slow file system.
        text: data.
        ranks: number of ranks; 0: one that this process starts, as torchrun would.
        lfs: directory of the stand-in of ``lfs``.
    """

    def __init__(self, home: Path, visible: Path, text: Path, ranks: int, lfs: Path) -> None:
        self.run_dir, self.cache = home / "run", home / "cache"
        self.checkpoints, self.visible = self.run_dir / "checkpoints", visible
        keys = OVERRIDES | {
            "run.dir": str(self.run_dir),
            "run.nproc_per_node": str(max(1, ranks)),
            "data.path": str(text),
            "data.cache_dir": str(self.cache),
        }
        words = [word for key, value in keys.items() for word in (f"--{key}", value)]
        self.command = ["train", "demo", *words]
        self.environment = {"PATH": f"{lfs}:{os.environ['PATH']}"}
        if ranks == 0:
            place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
            self.environment |= place | {"MASTER_ADDR": "127.0.0.1"}
        visible.mkdir(parents=True, exist_ok=True)
        self.output = visible / "output"

    def start(self) -> BaseProcess:
        port = {"MASTER_PORT": str(free_ports(1)[0])} if "RANK" in self.environment else {}
        arguments = (self.command, self.environment | port, str(self.output))
        process = get_context("forkserver").Process(target=run_command, args=arguments)
        process.start()
        return process

    def finish(self) -> None:
        """Run to the end."""
        process = self.start()
        process.join()
        self.check_end(process)

    def check_end(self, process: BaseProcess) -> None:
        assert process.exitcode == 0, self.output.read_text()

    def is_prepared(self) -> bool:
        return any(self.visible.glob("cache/stores/*/store.json"))

    def saves(self) -> set[str]:
        """Return the directories of checkpoints that are being written, or were."""
        paths = self.visible.glob("run/checkpoints/.tmp-step-*")
        return {path.name for path in paths if not path.name.endswith("-deleted")}

    def records(self) -> int:
        file = self.visible / "run/metrics.jsonl"
        return file.stat().st_size if file.exists() else 0

    def newest(self) -> int:
        """Return the step of the newest checkpoint, after checking all of them."""
        steps = [0]
        for path in list_checkpoints(self.checkpoints):
            contents = open_contents(path, read_manifest(path))
            check_files(contents)
            assert find_damaged_file(contents) == ""
            steps.append(checkpoint_step(path))
        return steps[-1]

    def losses(self) -> list[tuple[int, float]]:
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        return [(record["step"], record["loss"]) for record in map(json.loads, lines)]


def kill(run: Run, source: random.Random, phases: Counter[str]) -> bool:
    """Start the run and kill all its processes in a phase; return False if it has ended before."""
    phase = source.choice(["start", "preparation", "save", "save", "step", "step"])
    if phase == "preparation" and run.is_prepared():
        phase = "save"
    before, size, count = run.saves(), run.records(), source.randrange(3)
    process = run.start()
    changes = 0
    while changes <= count and phase != "start" and process.is_alive():
        if phase == "preparation" and (run.visible / "cache").exists():
            break
        if phase == "save" and (run.saves() - before):
            before |= run.saves()
            changes += 1
        if phase == "step" and run.records() != size:
            size = run.records()
            changes += 1
        time.sleep(0.005)
    process.join(source.uniform(0.0, 3.0 if phase == "start" else 0.3))
    if not process.is_alive():
        run.check_end(process)
        return False
    phases[phase] += 1
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with suppress(ProcessLookupError):  # it had no time to become the leader of a group
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return True


def check_leftovers(run: Run) -> None:
    """Check that no half-written file has the name of a complete one, or stays for ever."""
    names = [str(path.relative_to(run.run_dir)) for path in run.run_dir.rglob("*")]
    names += [str(path.relative_to(run.cache)) for path in run.cache.rglob("*")]
    temporary = [name for name in names if re.search(r"\.tmp", name)]
    # The last save deletes the leftovers of earlier ones.  A kill while a record of the run is
    # replaced leaves a hidden file with the process number in its name.
    assert not [name for name in temporary if "checkpoints" in name or "stores" in name]
    assert all(Path(name).name.startswith(".") for name in temporary)
    for store in run.cache.glob("stores/*"):
        open_verified_store(store, run.cache, lambda progress: None, force=True)


@pytest.mark.timeout(7200)
def test_fifty_kills_on_lustre_end_with_the_same_losses(tmp_path: Path) -> None:
    set_forkserver_preload(PRELOADED)
    source, phases, kills, runs = random.Random(5), Counter[str](), 0, 0
    (tmp_path / "text").mkdir()
    text, lfs = make_text(tmp_path / "text"), make_lfs(tmp_path / "lfs")
    (text / "released.s3").write_text("the contents of this file are in S3, says lfs\n" * 10)
    homes = {ranks: tmp_path / f"{ranks}" for ranks in (0, 2)}
    references = {ranks: Run(home, home, text, ranks, lfs) for ranks, home in homes.items()}
    for reference in references.values():
        reference.finish()
    backing, mount = tmp_path / "backing", tmp_path / "lustre"
    with mounted(backing, mount, DELAYS):
        assert lfs_calls(lfs) == []  # a local disk
        text = Path(shutil.copytree(text, mount / "text"))
        while kills < KILLS:
            ranks = source.choice([0, 0, 1, 2])
            run, newest = Run(mount / f"{runs}", backing / f"{runs}", text, ranks, lfs), 0
            while newest < STEPS and kills < KILLS:
                if not kill(run, source, phases):
                    break
                kills += 1
                now = run.newest()
                assert now >= newest, "a committed checkpoint was lost"
                newest = now
                print(f"{kills} kills, run {runs} on {ranks}, step {newest}, {dict(phases)}")
            run.finish()
            runs += 1
            reference = references[2 if ranks == 2 else 0]
            assert run.losses() == reference.losses()
            state, expected = (newest_state(each.run_dir) for each in (run, reference))
            assert all(state[name].equal(tensor) for name, tensor in expected.items())
            check_leftovers(run)
            stripes = [call for call in lfs_calls(lfs, "setstripe") if f"/{runs - 1}/" in call]
            assert len(stripes) <= 1  # none after a kill between mkdir and lfs
    assert any("released.s3" in call for call in lfs_calls(lfs, "hsm_restore"))
    assert lfs_calls(lfs, "setstripe -E 100M -c 1 -E -1 -c 5")
    print(f"{kills} kills in {runs} runs: {dict(phases)}")
