"""Start weft's own processes, find them, and leave none behind.

This module imports nothing heavy, because a rank imports it first.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

# -P: a user's file with the name of a module must not shadow that module.
PYTHON = [sys.executable, "-P", "-m"]
KILL_SECONDS = 1.0  # for a killed process to end; one that a driver blocks never does


def run_with_limit(
    command: Sequence[str], seconds: float, errors: str = "replace"
) -> tuple[int | None, str]:
    """Run a program; return its exit status and output.

    The status is None if the program did not end in ``seconds``, and 127 if there is none.
    ``errors``: what replaces bytes of the output that are not UTF-8.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors=errors,
        )
    except OSError:
        return 127, ""
    try:
        output, _ = process.communicate(timeout=seconds)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILL_SECONDS)
        return None, ""


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


def process_status(process: int) -> dict[str, str]:
    """Return the fields of ``/proc/PID/status``; empty if the process has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text("utf-8", "replace").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, value in (line.split(":", 1) for line in lines)}


def process_cpu_seconds(process: int) -> float:
    """Return the processor time of a process and its threads; 0 if it has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text("utf-8", "replace")
    except OSError:
        return 0.0
    user, system = text.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def child_pids() -> set[int]:
    """Return the process ids of this process's running children."""
    own_pid = str(os.getpid())
    if sys.platform.startswith("linux"):
        pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
        children = {pid for pid in pids if process_status(pid).get("PPid") == own_pid}
    else:
        pgrep = ["pgrep", "-P", own_pid]
        result = subprocess.run(pgrep, capture_output=True, text=True, check=False)
        children = {int(line) for line in result.stdout.split()}
    alive = set()
    for child in children:
        with suppress(ChildProcessError):  # another thread has already waited for it
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                alive.add(child)
    return alive


def handles_signal(child: int, number: int) -> bool:
    """Return True if a process has a handler for a signal, or if that is unknown."""
    if not sys.platform.startswith("linux"):
        return True
    return bool(int(process_status(child).get("SigCgt", "0"), 16) >> (number - 1) & 1)


def exit_process(status: int) -> NoReturn:
    """Flush the output and end the process without interpreter shutdown.

    After a failure a normal exit would wait for peers that wait for this rank.  After a success it
    would tear down gloo's threads, which sometimes aborts the process (seen in torch 2.11).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
