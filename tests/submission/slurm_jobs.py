"""Submit small jobs to a real Slurm like a user, and compare them with an undisturbed run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.commands import SLEEPY, WEFT
from tests.harness import ROOT
from tests.slurm import Slurm
from tests.small import SMALL, records


class Launcher:
    """Runs commands like a user, in a separate directory."""

    command: Sequence[str] = WEFT

    def __init__(self, cluster: Slurm, directory: Path, store: Path) -> None:
        self.cluster, self.directory, self.run = cluster, directory, directory / "run"
        bin = directory / "bin"
        bin.mkdir()
        (bin / "weft").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m weft "$@"\n')
        (bin / "weft").chmod(0o755)
        (directory / "sleepy.py").write_text(SLEEPY)
        path = f"{directory}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        self.environment = os.environ | cluster.environment | {"PYTHONPATH": path}
        self.environment["PATH"] = f"{bin}:{os.environ['PATH']}"
        # Two nodes share this machine's cores.
        self.environment["OMP_NUM_THREADS"] = "1"
        pairs = [
            *SMALL,
            ("run.dir", "run"),
            ("run.device", "cpu"),
            ("run.nproc_per_node", "1"),
            ("data.path", str(store)),
            ("checkpoint.interval", "10"),
            ("optim.name", "sleepy:build"),
            ("launch.time_limit", "00:10:00"),
        ]
        self.words = [word for key, value in pairs for word in (f"--{key}", value)]

    def weft(self, *words: str, status: int = 0) -> str:
        completed = subprocess.run(
            [*self.command, *words],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert completed.returncode == status, completed.stdout + completed.stderr
        return completed.stdout + completed.stderr

    def launch(self, *words: str, status: int = 0) -> str:
        return self.weft("launch", "demo", "--on", "slurm", *self.words, *words, status=status)

    def status(self) -> str:
        return self.weft("job", "status", "run").strip()

    def wait_for_status(self, text: str, seconds: float = 240) -> str:
        deadline = time.monotonic() + seconds
        while text not in (output := self.status()):
            assert time.monotonic() < deadline, (
                f"in vain waited for {text!r}: {output}\n{self.out()}"
            )
            time.sleep(1)
        return output

    def out(self) -> str:
        return "".join(path.read_text() for path in self.run.glob("slurm-*.out"))

    def step(self) -> int:
        rows = records(self.run) if (self.run / "metrics.jsonl").exists() else []
        return int(rows[-1]["step"]) if rows else 0

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 600
        while self.step() < step:
            assert time.monotonic() < deadline, f"step {self.step()}: {self.status()}\n{self.out()}"
            time.sleep(0.5)

    def finish_soon(self) -> None:
        (self.directory / "hurry").touch()
