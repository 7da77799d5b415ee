"""Commands that run a model on several ranks."""

from __future__ import annotations

import subprocess
import sys
import time

from weft.monitor.heartbeat import process_start_ticks

SCRIPT = """
import sys
from types import SimpleNamespace
from weft.supervision import local_ranks
# Replaces torchrun by a process that prints its id and sleeps.
SLEEPS = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
local_ranks.PYTHON = [sys.executable, "-c", SLEEPS]
local_ranks.run_on_all_ranks(SimpleNamespace(world_size=2, num_threads=1, device="cpu"), [], None)
"""


def test_run_on_all_ranks_killed_command_leaves_no_ranks() -> None:
    command = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    assert command.stdout is not None
    child = int(command.stdout.readline())
    assert process_start_ticks(child)
    command.kill()
    command.wait()
    deadline = time.monotonic() + 20
    while process_start_ticks(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)
