"""Processes of weft's own: how they are started, and that none is left behind.

Nothing heavy is imported: a rank does this before anything else.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

# -P: a file of the user's that is called like a module must not come before that module.
PYTHON = [sys.executable, "-P", "-m"]


def on_one_host(device: str) -> dict[str, str]:
    """Variables for ranks that are all on this host: gloo on CPUs must not depend on what the
    host's name resolves to."""
    on_loopback = device == "cpu" and sys.platform == "linux"
    return {"GLOO_SOCKET_IFNAME": "lo"} if on_loopback else {}


def die_with_parent(parent: int | None = None) -> None:
    """Ask Linux to end this process when the one that started it ends, however that happens.

    Otherwise the ranks of a killed launcher train on, and write into a run that a new one owns.

    Args:
        parent: its id, where it may have ended before this could be asked; then this one ends, too.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # of <sys/prctl.h>
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
