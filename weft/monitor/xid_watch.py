"""Report errors of NVIDIA's driver (Xid) during a run.

NVML reports an error only to processes that wait for it, and a call of a broken driver may never
return.  So `watch_xids` starts this module as a process, which prints each error.
"""

from __future__ import annotations

import ctypes
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pynvml

from weft.monitor.event_log import note_event
from weft.monitor.jsonl import last_logged_step
from weft.monitor.nvml import has_nvml
from weft.monitor.process import KILL_SECONDS, PYTHON, die_with_parent

WAIT_MILLISECONDS = 1000
# Errors after which a GPU must not be used: NVIDIA's Xid catalog.
XIDS = {
    48: "double-bit memory error",
    64: "row remapping failed",
    74: "NVLink error",
    79: "fell off the bus",
    95: "uncontained memory error",
    119: "its system processor does not answer",
}
UNKNOWN_XID = "see NVIDIA's catalog"


def describe_xid(code: int) -> str:
    """Describe an error of the driver."""
    return f"the driver reported Xid {code}, {XIDS.get(code, UNKNOWN_XID)}"


@contextmanager
def watch_xids(run_dir: Path, warn: Callable[[str], object]) -> Iterator[None]:
    """Report the errors of this node's GPUs in a thread, until the context ends.

    Args:
        run_dir: its event log gets a warning for each error.
        warn: receives the warning, too.
    """
    if not has_nvml():
        yield
        return
    process = subprocess.Popen(
        [*PYTHON, "weft.monitor.xid_watch"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def report() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            index, code = line.split()
            text = f"node {socket.gethostname()}: GPU {index}: {describe_xid(int(code))}"
            note_event(run_dir, "warning", last_logged_step(run_dir), text)
            warn(f"warning: {text}")

    thread = threading.Thread(target=report, daemon=True, name="xid watch")
    thread.start()
    try:
        yield
    finally:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILL_SECONDS)
        thread.join(KILL_SECONDS)


def wait_for_xids() -> Iterator[tuple[int, int]]:
    """Yield GPU and code of each error from now on.

    Raises:
        NVMLError: if the driver does not work, or no device reports errors.
    """
    pynvml.nvmlInit()
    events, indices = pynvml.nvmlEventSetCreate(), {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        with suppress(pynvml.NVMLError):  # a device that is lost already
            gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
            pynvml.nvmlDeviceRegisterEvents(gpu, pynvml.nvmlEventTypeXidCriticalError, events)
            indices[address(gpu)] = index
    while True:
        with suppress(pynvml.NVMLError_Timeout):
            event = pynvml.nvmlEventSetWait_v2(events, WAIT_MILLISECONDS)
            yield indices[address(event.device)], event.eventData


def address(gpu: Any) -> int | None:
    """Return the number of a handle; a GPU that is lost has no other identity."""
    return ctypes.cast(gpu, ctypes.c_void_p).value


def main() -> None:
    """Print GPU and code of each error."""
    die_with_parent()
    with suppress(pynvml.NVMLError):
        for index, code in wait_for_xids():
            print(index, code, flush=True)


if __name__ == "__main__":
    main()
