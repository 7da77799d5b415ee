"""A small `weft train` command, and a look at what it leaves behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.small import SMALL

WEFT = [sys.executable, "-m", "weft.cli"]


@pytest.fixture
def arguments(store_path: Path, tmp_path: Path) -> list[str]:
    """`weft train` on the small model in two ranks, in the run folder `run`."""
    pairs = [
        *SMALL,
        ("run.dir", "run"),
        ("run.workers", "2"),
        ("data.path", str(store_path)),
        ("checkpoint.interval", "10"),
    ]
    return [*WEFT, "train", "demo", *(word for key, value in pairs for word in (f"--{key}", value))]


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    deadline = time.monotonic() + 10
    while left := processes_in(tmp_path):
        if time.monotonic() > deadline:
            for process in left:  # of a test that failed half-way, too
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            pytest.fail(f"left behind: {left}")
        time.sleep(0.1)


def processes_in(folder: Path) -> dict[int, str]:
    """Ids and command lines of the processes whose working directory is ``folder``."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cwd").resolve() == folder:
                    line = (entry / "cmdline").read_text().replace("\0", " ")
                    found[int(entry.name)] = line
            except OSError:
                continue  # it has ended meanwhile, or is another user's
    return {process: line for process, line in found.items() if line}
