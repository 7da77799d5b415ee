"""Report the position of a rank, so that other processes can locate a hang.

A rank that hangs cannot answer: it is stopped, holds the interpreter lock in C, or waits for
something that never comes.  So it reports its position in advance.  At every phase it stores a line
in its own memory, which another process reads:

    18232.501 7 60.0 forward_backward

The fields are the monotonic time, the step, the seconds until the next line at the latest, and the
phase.  The rank knows this limit best, so the watchdog (`weft.supervision.watchdog`) needs no
policy.  A line costs some microseconds.

Two more things are prepared: faulthandler writes the stacks of all threads on SIGUSR2, without the
interpreter; and a thread that sleeps in a pipe reports open and completed collectives, if it gets
the interpreter lock.  All of it is in anonymous memory, which ends with the process and which no
file system can block.
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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from weft.parallel.private import CollectiveRecord

# Phases of an ordinary step (`weft.monitor.step_timer.PHASES`).
STEP_PHASES = ("data", "forward_backward", "update", "device", "log")
LINE_BYTES = 128
SAVE_GROUP = "background save"  # description of the process group of the writing thread
NUM_RECENT = 20  # collectives in an answer

_line: mmap.mmap | None = None
_step = 0
_timeout: float | None = None
_log_interval = 1
_step_seconds: deque[float] = deque(maxlen=100)
_limit = 0.0  # seconds of a step
_axes: dict[str, str] = {}  # mesh axis by name of the process group


class Contact(NamedTuple):
    """A rank of this host, and the numbers of its files in ``/proc/PID/fd``."""

    rank: int
    pid: int
    start_ticks: str  # `process_start_ticks`, because another process may reuse the id
    heartbeat: int  # the line with its position
    stacks: int  # written on SIGUSR2
    request: int  # a pipe: for each byte, the rank writes ...
    answer: int  # ... `_collective_status` here, as a line of JSON
    torchrun: str | None  # torchrun's file for this rank's error


def start_heartbeat(rank: int, timeout: float | None, log_interval: int) -> Contact:
    """Start to report the position of this process; Linux only.

    The arguments ``timeout`` and ``log_interval`` set the limit of a step, see `step_limit`.
    """
    global _line, _timeout, _log_interval, _limit
    _timeout, _log_interval = timeout, log_interval
    _step_seconds.clear()
    _limit = step_limit(timeout, 0.0, log_interval)
    memory, stacks, answer = (os.memfd_create(f"weft-{n}") for n in ("line", "stacks", "answer"))
    os.truncate(memory, LINE_BYTES)
    _line = mmap.mmap(memory, LINE_BYTES)
    beat("start", 0)
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    pipe, request = os.pipe()
    name, fds = "weft-heartbeat", (pipe, answer)
    threading.Thread(target=_answer_requests, args=fds, name=name, daemon=True).start()
    torchrun = os.environ.get("TORCHELASTIC_ERROR_FILE")
    ticks = process_start_ticks(os.getpid())
    return Contact(rank, os.getpid(), ticks, memory, stacks, request, answer, torchrun)


def process_start_ticks(pid: int) -> str:
    """Return a process's start time in ticks since boot; empty without a process."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[19]
        )
    except OSError:
        return ""


def name_groups(axes: Mapping[str, str]) -> None:
    """Set the mesh axis of each process group, for messages about collectives."""
    _axes.clear()
    _axes.update(axes)


def _answer_requests(pipe: int, answer: int) -> None:
    count = 0
    while os.read(pipe, 1):
        count += 1
        text = json.dumps({"request": count, **_collective_status()}).encode() + b"\n"
        os.ftruncate(answer, 0)
        os.pwrite(answer, text, 0)


def _collective_status() -> dict[str, Any]:
    """Return the collectives of this process (`summarize_collectives`)."""
    from weft.parallel.private import read_flight_recorder

    calls = read_flight_recorder()
    groups = {call.group: _describe_group(call.group, call.group_desc) for call in calls}
    return summarize_collectives(calls, groups)


def summarize_collectives(
    calls: Sequence[CollectiveRecord], groups: Mapping[str, tuple[str, list[int]]]
) -> dict[str, Any]:
    """Return the incomplete, the completed and the last collectives of a rank.

    Args:
        calls: the collectives, in order.
        groups: by name of each group, its name for people, and its ranks if known.

    Returns:
        ``open``: group, number, name, sizes and the group's ranks of each incomplete collective.
        ``done``: the last completed number of each group.  ``recent``: the last collectives, and
        True for incomplete ones.
    """

    def fields(call: CollectiveRecord) -> tuple[Any, ...]:
        return groups[call.group][0], call.seq_id, call.name, call.input_sizes

    return {
        # A send or receive concerns two ranks, not the whole group.
        "open": [
            (*fields(c), [] if c.is_p2p else groups[c.group][1]) for c in pending_collectives(calls)
        ],
        "done": {groups[c.group][0]: c.seq_id for c in calls if not (c.is_pending or c.is_p2p)},
        "recent": [(*fields(c), c.is_pending) for c in calls[-NUM_RECENT:]],
    }


def pending_collectives(calls: Iterable[CollectiveRecord]) -> list[CollectiveRecord]:
    """Return the incomplete collectives, with those of the main thread first.

    A background save waits for a missing rank, too, but training explains the hang.
    """
    pending = [call for call in calls if call.is_pending]
    return sorted(pending, key=lambda call: call.group_desc == SAVE_GROUP)


def _describe_group(name: str, description: str) -> tuple[str, list[int]]:
    """Return a name of a process group for people, and its ranks, if torch knows them."""
    from weft.parallel.private import get_group_ranks

    label = SAVE_GROUP if description == SAVE_GROUP else _axes.get(name, f"group {name}")
    try:
        ranks = sorted(get_group_ranks(name))
    except (KeyError, RuntimeError, ValueError):
        return label, []
    return f"{label} ({format_ranks(ranks)})", ranks


def format_ranks(ranks: list[int]) -> str:
    """Format ranks: 'rank 3', 'ranks 0, 1', 'ranks 0-7', 'ranks 0, 2, 4, ... 14'."""
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    texts = [*map(str, ranks[:3]), f"... {ranks[-1]}"] if len(ranks) > 5 else map(str, ranks)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(texts)}"


def beat(phase: str, step: int | None = None) -> None:
    """Report the phase of this rank, and the step that begins, if any.

    Before the first measurement, when code is compiled, and while loading, evaluating and saving,
    the limit is ten times that of a step, at least ten minutes.
    """
    global _step
    if _line is None or threading.current_thread() is not threading.main_thread():
        return  # a background writer makes no progress in the step
    if step is not None:
        _step = step
    limit = _limit if _step_seconds and phase in STEP_PHASES else max(600.0, 10 * _limit)
    text = f"{time.monotonic():.6f} {_step} {limit:.1f} {phase}"
    _line[:] = text.encode().ljust(LINE_BYTES)


def record_step_seconds(step_seconds: float) -> None:
    """Update the limit of a step by the mean step time since the last call."""
    global _limit
    _step_seconds.append(step_seconds)
    _limit = step_limit(_timeout, statistics.median(_step_seconds), _log_interval)


def step_limit(timeout: float | None, median_seconds: float, log_interval: int) -> float:
    """Return the seconds that a phase of a step may take.

    Without a ``timeout`` this is ten median steps, plus the steps between two records, by which a
    GPU may be behind its host.
    """
    return max(60.0, (10 + log_interval) * median_seconds) if timeout is None else timeout
