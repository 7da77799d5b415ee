"""Start weft's own processes, and leave none behind.

This module imports nothing heavy, because a rank imports it first.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

# -P: a user's file with the name of a module must not shadow that module.
PYTHON = [sys.executable, "-P", "-m"]


def single_host_env(device: str) -> dict[str, str]:
    """Return environment variables for ranks that are all on this host.

    On CPUs gloo uses the loopback interface, so it does not depend on the host's name.
    """
    on_loopback = device == "cpu" and sys.platform == "linux"
    return {"GLOO_SOCKET_IFNAME": "lo"} if on_loopback else {}


def die_with_parent(parent: int | None = None) -> None:
    """Ask Linux to end this process when its parent ends.

    Otherwise the ranks of a killed launcher would keep training, in the run of a new launcher.
    ``parent`` is the parent's id if it may have ended before this call; then end this process.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # of <sys/prctl.h>
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
