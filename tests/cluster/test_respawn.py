"""A command that asks a model on several ranks."""

from __future__ import annotations

import subprocess
import sys
import time

from weft.monitor.heartbeat import process_began

ASKS = """
import sys
from types import SimpleNamespace
from weft.cluster import respawn as again
# In torchrun's place a process that tells its number and sleeps.
SLEEPS = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
again.PYTHON = [sys.executable, "-c", SLEEPS]
again.on_every_rank(SimpleNamespace(world_size=2, threads=1, device="cpu"), [], None)
"""


def test_on_every_rank_killed_command_leaves_no_ranks() -> None:
    asking = subprocess.Popen([sys.executable, "-c", ASKS], stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    child = int(asking.stdout.readline())
    assert process_began(child)
    asking.kill()
    asking.wait()
    deadline = time.monotonic() + 20
    while process_began(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)
