"""What a rank says of itself while it lives, so that others can tell when it hangs and where.

A rank that hangs cannot help: it is stopped, or holds the interpreter lock in C, or waits for what
never comes.  So it says beforehand where it is.  Whenever it passes a site (`faults.SITES`) it
stores a line into memory of its own, and a process outside reads it there:

    18232.501 7 60.0 forward_backward

at that time of the monotonic clock, in step 7; 'you hear from me again within 60 s'.  The rank
itself knows best how long that may be, and the judge (`weft.cluster.watchdog`) needs no policy.
The price is a store into memory, some microseconds a site.

Two more things are prepared for the day of need: faulthandler writes the stacks of all threads on
SIGUSR2, without asking the interpreter; and a thread that sleeps in a pipe tells which collectives
are open and which were done, if it can have the interpreter lock.  All of it lies in anonymous
memory, which ends with the process and which no file system can hold up.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

# Sites between which a rank is in an ordinary step.
IN_A_STEP = ("step", "forward_backward", "gradients", "record", "tell")
LINE_BYTES = 128
RECENT = 20  # collectives that are told of

_line: mmap.mmap | None = None
_step = 0
_timeout: float | None = None
_log_interval = 1
_measured: deque[float] = deque(maxlen=100)
_limit = 0.0  # of a step
_axes: dict[str, str] = {}  # of the mesh, by the name of their process group


class Contact(NamedTuple):
    """Where another process of this host finds a rank: files of ``/proc/PID/fd``."""

    rank: int
    pid: int
    began: str  # `process_began`: another process may have the same id later
    line: int  # where it is
    stacks: int  # written on SIGUSR2
    question: int  # a byte into this pipe ...
    answer: int  # ... and `_answer` is written here, as a line of JSON
    torchrun: str | None  # torchrun's file for this rank's error


def start(rank: int, timeout: float | None, log_interval: int) -> Contact:
    """From now on this process tells where it is.  Linux only.

    Args:
        timeout: seconds that a step may take; None: from what is measured.
        log_interval: as many steps a GPU may be behind its host.
    """
    global _line, _timeout, _log_interval, _limit
    _timeout, _log_interval = timeout, log_interval
    _measured.clear()
    _limit = step_limit(timeout, 0.0, log_interval)
    memory, stacks, answer = (os.memfd_create(f"weft-{n}") for n in ("line", "stacks", "answer"))
    os.truncate(memory, LINE_BYTES)
    _line = mmap.mmap(memory, LINE_BYTES)
    beat("start", 0)
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    asked, question = os.pipe()
    threading.Thread(target=_tell, args=(asked, answer), name="weft-witness", daemon=True).start()
    torchrun = os.environ.get("TORCHELASTIC_ERROR_FILE")
    began = process_began(os.getpid())
    return Contact(rank, os.getpid(), began, memory, stacks, question, answer, torchrun)


def process_began(pid: int) -> str:
    """When a process began, in ticks since the machine did; empty if there is none."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[19]
        )
    except OSError:
        return ""


def name_groups(axes: Mapping[str, str]) -> None:
    """From now on collectives of the process groups of these names are told by the mesh's axis."""
    _axes.clear()
    _axes.update(axes)


def _tell(asked: int, answer: int) -> None:
    count = 0
    while os.read(asked, 1):
        count += 1
        text = json.dumps({"asked": count, **_answer()}).encode() + b"\n"
        os.ftruncate(answer, 0)
        os.pwrite(answer, text, 0)


def _answer() -> dict[str, Any]:
    """What this process knows of its collectives.

    Returns:
        open: group, number, name, sizes and the group's ranks of those that are not done;
        done: the last number of each group that is; recent: the last ones, and whether they are
        open.
    """
    from weft.parallel.private_hooks import read_flight_recorder

    found = read_flight_recorder()
    groups = {call.group: _group(call.group) for call in found}
    return {
        "open": [
            # To send and receive is no matter of the whole group.
            (
                groups[c.group][0],
                c.seq_id,
                c.name,
                c.input_sizes,
                [] if c.is_p2p else groups[c.group][1],
            )
            for c in found
            if c.is_pending
        ],
        "done": {groups[c.group][0]: c.seq_id for c in found if not (c.is_pending or c.is_p2p)},
        "recent": [
            (groups[c.group][0], c.seq_id, c.name, c.input_sizes, c.is_pending)
            for c in found[-RECENT:]
        ],
    }


def _group(name: str) -> tuple[str, list[int]]:
    """What a process group is called for people, and its ranks where they are known."""
    from weft.parallel.private_hooks import get_group_ranks

    called = _axes.get(name, f"group {name}")
    try:
        ranks = sorted(get_group_ranks(name))
    except (KeyError, RuntimeError, ValueError):
        return called, []  # none of torch's own
    return f"{called} ({ranks_text(ranks)})", ranks


def ranks_text(ranks: list[int]) -> str:
    """'rank 3', 'ranks 0, 1', 'ranks 0-7', 'ranks 0, 2, 4, ... 14'."""
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    shown = [*map(str, ranks[:3]), f"... {ranks[-1]}"] if len(ranks) > 5 else map(str, ranks)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(shown)}"


def beat(site: str, step: int | None = None) -> None:
    """This rank is at ``site``, in step ``step`` (None: in the same one as before).

    Before the first measurement, when things are compiled, and in loading, evaluating and saving
    the limit is ten times that of a step, from ten minutes.
    """
    global _step
    if _line is None or threading.current_thread() is not threading.main_thread():
        return  # what is written in the background is no progress
    if step is not None:
        _step = step
    limit = _limit if _measured and site in IN_A_STEP else max(600.0, 10 * _limit)
    text = f"{time.monotonic():.6f} {_step} {limit:.1f} {site}"
    _line[:] = text.encode().ljust(LINE_BYTES)


def measured(step_seconds: float) -> None:
    """Steps have taken so long, on the mean since the last call."""
    global _limit
    _measured.append(step_seconds)
    _limit = step_limit(_timeout, statistics.median(_measured), _log_interval)


def step_limit(timeout: float | None, median_seconds: float, log_interval: int) -> float:
    """Seconds that a part of a step may take: what the job says, or what steps take, times ten.

    And more: a GPU may be as many steps behind its host as lie between two records.
    """
    return max(60.0, (10 + log_interval) * median_seconds) if timeout is None else timeout
