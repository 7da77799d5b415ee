"""Watchdog: a process on each host that detects and diagnoses a hang.

Every rank writes a heartbeat with its position and a time limit (`weft.monitor.heartbeat`).  The
watchdog is a child of the host's first rank and reads the heartbeats several times a second.  It
shares no lock with the ranks, so it also detects a rank that is stopped or holds the interpreter
lock.  It ends with its parent.  While the machine or the watchdog is suspended, no time counts.

When a rank exceeds its limit, the watchdog collects evidence on all ranks: the process state, the
open collectives of the Flight Recorder, and the Python stacks.  It derives one sentence:

    rank 1 is missing: it is stopped (SIGSTOP) in step 7, waiting for data; the others wait in
    all_reduce no. 42 of dp_shard (ranks 0-3)

The watchdog writes this sentence to the ranks' error reports, the state of each rank to its log,
and all evidence to ``logs/hang-HOST.json``, from which ``weft hang`` combines the hosts
(`weft.supervision.hang`).  Then it kills all ranks of its host, which ends the run everywhere.  If
all ranks of its host wait, the missing rank is on another host, and it lets that watchdog report
first.

``logs/ranks-HOST.json`` describes how to query the ranks of a host, even without a watchdog, so
that ``weft hang`` can query a hung run without ending it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.config.files import write_json
from weft.config.schema import Job
from weft.monitor.heartbeat import (
    LINE_BYTES,
    Contact,
    format_ranks,
    process_start_ticks,
    start_heartbeat,
)
from weft.monitor.log_buffer import tolerate
from weft.monitor.process import (
    PYTHON,
    die_with_parent,
    process_cpu_seconds,
    process_status,
)
from weft.monitor.step_timer import PHASES
from weft.supervision.rank_exit import error_path, log_path, write_error_report

if TYPE_CHECKING:
    from weft.training.setup import Rank

# Seconds between two polls, for an answer, and for the watchdogs of other hosts to report first.
POLL_SECONDS, ANSWER_SECONDS, PEER_REPORT_SECONDS = 0.25, 0.75, 3.0
STARVED_SHARE = 0.25  # of a CPU, for a rank that does not answer
BYTES_SECONDS = 15.0  # since the last report of a rank that waits for bytes

FRAME = re.compile(r'File "(.*)", line (\S+) in (.*)')  # as faulthandler writes it


def start_watchdog(job: Job, run_dir: Path, rank: Rank) -> None:
    """Start the heartbeat, and this host's watchdog; every rank calls it.

    With ``resilience.step_timeout = 0`` there is no watchdog, but `weft hang` can query the ranks.
    """
    if sys.platform != "linux":
        return
    import torch.distributed as dist

    timeout = job.resilience.step_timeout
    seconds = None if timeout == "auto" else timeout
    contacts: list[Any] = [None] * rank.world_size
    dist.all_gather_object(
        contacts, start_heartbeat(rank.rank, seconds or None, job.monitor.log_interval)
    )
    if rank.local_rank == 0:
        # A launcher numbers the ranks of one host consecutively.
        local_contacts = contacts[rank.rank :][: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))]
        host = {
            "host": socket.gethostname(),
            "world_size": rank.world_size,
            "ranks": local_contacts,
        }
        path = host_path(run_dir, "ranks", rank.rank)
        with tolerate(path, partial(print, flush=True)):
            write_json(path, {"time": time.time(), **host})
        if timeout == 0:
            return
        argument = json.dumps([str(run_dir), rank.world_size, local_contacts])
        # The watchdog inherits the mask, so that it ignores signals sent to all processes of a job.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        subprocess.Popen([*PYTHON, "weft.supervision.watchdog", argument])
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def host_path(run_dir: Path, kind: str, first_rank: int) -> Path:
    """Return the path of this host's 'ranks' or 'hang' file."""
    # Several launchers on one machine each count as a host, so the first rank is in the name.
    rank = f"-{first_rank}" if first_rank else ""
    return run_dir / "logs" / f"{kind}-{socket.gethostname()}{rank}.json"


class OpenCollective(NamedTuple):
    """A collective in which a rank waits."""

    group: str  # 'dp_shard (ranks 0, 1)'
    number: int
    name: str
    sizes: list[list[int]]
    ranks: Sequence[int] = ()  # of the group, if known


class RankState(NamedTuple):
    """State of a rank that may hang, with the fields of ``logs/hang-HOST.json``."""

    rank: int
    step: int
    phase: str
    seconds: float  # since the last heartbeat
    state: str  # of the process, from /proc/PID/status; empty if the process has ended
    channel: str  # kernel function in which the process sleeps, if readable
    calls: list[OpenCollective] | None  # open collectives; None: no answer
    stack: list[str]  # of the main thread, innermost first
    done: Mapping[str, int] = MappingProxyType({})  # last completed collective of each group
    recent: Sequence[Any] = ()  # collectives: group, number, name, sizes, is open
    cpu_share: float | None = None  # processor time by elapsed time while the rank was queried

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        calls = None if self.calls is None else [one._asdict() for one in self.calls]
        return self._asdict() | {"calls": calls, "done": dict(self.done)}


# --------------------------------------------------------------------------- diagnosis


def diagnose_hang(states: Sequence[RankState], world_size: int) -> tuple[list[int], str]:
    """Return the missing ranks of this host, and a sentence that describes the hang."""
    reasons = {state.rank: reason for state in states if (reason := absence_reason(state))}
    waiting = [state for state in states if state.rank not in reasons]
    if reasons:
        missing = "; ".join(
            f"rank {state.rank} is missing: it {reasons[state.rank]} in {describe_position(state)}"
            for state in states
            if state.rank in reasons
        )
        waits = {describe_wait(state) for state in waiting}
        if not waiting:
            return list(reasons), missing
        if len(waits) == 1:
            others = "the other waits" if len(waiting) == 1 else "the others wait"
            return list(reasons), f"{missing}; {others} in {waits.pop()}"
        return list(reasons), f"{missing}; {describe_waits(waiting)}"
    skipping, clause = find_skipped_collective(states)
    mismatched = skipping or find_mismatched_collectives(states)
    if mismatched:
        return mismatched, f"the ranks call different collectives: {describe_waits(states)}{clause}"
    sentence = f"every rank of this host waits: {describe_waits(states)}"
    if len(states) < world_size:
        return [], f"{sentence}; the missing rank is on another host"
    return [], f"{sentence}; no rank is missing: the network or a device hangs"


def absence_reason(state: RankState) -> str | None:
    """Return why other ranks wait for this rank; None if it waits for others itself."""
    if not state.state or state.state[0] in "ZX":
        return "has ended,"
    if state.state[0] == "T":
        return "is stopped (SIGSTOP)"
    if state.state[0] == "t":
        return "is stopped by a debugger"
    frame = f", at {describe_frame(state.stack)}," if state.stack else ""
    if state.state[0] == "D":
        return f"waits in the kernel for a disk or device ({state.channel or 'unknown'}){frame}"
    if state.calls is None and is_starved(state):
        reason = f"runnable, but with {state.cpu_share:.0%} of a CPU: the machine is overloaded"
        return f"does not answer: it is {reason}{frame}"
    if state.calls is None:
        return f"does not answer: a thread holds the interpreter lock{frame}"
    # gloo does not record send and receive, but then the rank waits in torch's own code.
    if state.calls or any("/torch/distributed/" in line for line in state.stack[:1]):
        return None
    return f"is in no collective{frame or ','}"


def is_starved(state: RankState) -> bool:
    """Return True if the main thread is runnable, but other programs have the CPUs.

    A thread that computes in C with the interpreter lock gets a CPU, and one that waits with the
    lock is not runnable.
    """
    is_runnable = state.state[:1] == "R"
    return is_runnable and state.cpu_share is not None and state.cpu_share < STARVED_SHARE


def find_mismatched_collectives(states: Sequence[RankState]) -> list[int]:
    """Return the ranks whose first open collective differs from that of their group."""
    first_calls = {state.rank: state.calls[0] for state in states if state.calls}
    for group in {call.group for call in first_calls.values()}:
        ranks_by_call: dict[str, list[int]] = {}
        for rank, call in first_calls.items():
            if call.group == group:
                ranks_by_call.setdefault(json.dumps([call.number, call.name]), []).append(rank)
        if len(ranks_by_call) > 1:
            return min(ranks_by_call.values(), key=len)
    return []


def find_skipped_collective(states: Sequence[RankState]) -> tuple[list[int], str]:
    """Return the ranks that skipped a collective in which others wait, and a clause.

    Such a rank is further in the program and has not completed the collective.  The ranks then
    wait for each other in a cycle, and they diverged at the least advanced collective of all.
    """
    waiters: dict[tuple[str, int, str], list[RankState]] = {}
    for state in states:
        if state.calls:
            waiters.setdefault(state.calls[0][:3], []).append(state)
    for waiting in sorted(waiters.values(), key=lambda ranks: min(map(program_position, ranks))):
        call = (waiting[0].calls or [])[0]
        skipping = [
            state
            for state in states
            if state.rank in call.ranks
            and state.done.get(call.group, -1) < call.number
            and not any(other[:3] == call[:3] for other in state.calls or [])
            and program_position(state) > max(map(program_position, waiting))
        ]
        if skipping:
            skipping_ranks = format_ranks([state.rank for state in skipping])
            waiting_ranks = format_ranks([state.rank for state in waiting])
            last = skipping[0].done.get(call.group)
            completed = f" (its last one there was no. {last})" if last is not None else ""
            clause = f"{skipping_ranks} skipped {describe_wait(waiting[0])}{completed}, in which "
            clause += f"{waiting_ranks} wait{'s' * (len(waiting) == 1)}"
            return [state.rank for state in skipping], f"; {clause}"
    return [], ""


def program_position(state: RankState) -> tuple[int, int]:
    """Return the step of a rank, and the index of its phase within the step."""
    return state.step, list(PHASES).index(state.phase) if state.phase in PHASES else 0


def describe_position(state: RankState) -> str:
    """Return the step and the activity: 'step 7, waiting for data'."""
    activity = PHASES[state.phase].activity if state.phase in PHASES else state.phase
    return f"step {state.step}, {activity}"


def describe_frame(stack: Sequence[str]) -> str:
    """Return the innermost frame: 'weft/training/loop.py:95 in train'."""
    path, line, name = FRAME.findall(stack[0])[0]
    return f"{'/'.join(Path(path).parts[-3:])}:{line} in {name}"


def describe_wait(state: RankState) -> str:
    """Return the collective, or else the frame, in which a rank waits."""
    if not state.calls:
        return describe_frame(state.stack) if state.stack else "an unknown frame"
    call = state.calls[0]
    return f"{call.name} no. {call.number} of {call.group}"


def describe_waits(states: Sequence[RankState], limit: int = 4) -> str:
    """Describe in what the ranks wait, for at most ``limit`` of them."""
    waits = ", ".join(
        f"rank {state.rank} waits in {describe_wait(state)} ({describe_position(state)})"
        for state in states[:limit]
    )
    return waits + (f" and {len(states) - limit} more" if len(states) > limit else "")


# --------------------------------------------------------------------------- probing the ranks


class RankProbe:
    """Access to a rank of this host from another process."""

    def __init__(self, contact: Contact) -> None:
        self.contact = contact
        self.pidfd = os.pidfd_open(contact.pid)
        if process_start_ticks(contact.pid) != contact.start_ticks:
            raise ProcessLookupError  # a new process has reused the id
        self.fd_dir = Path(f"/proc/{contact.pid}/fd")
        self.heartbeat_fd = os.open(self.fd_dir / str(contact.heartbeat), os.O_RDONLY)
        self.heartbeat = b""
        self.age = 0.0  # seconds for which the heartbeat has not changed
        self._answers_before, self._stack_chars_before = 0, 0  # at the last request
        self._usage_before = 0.0, 0.0  # clock and processor time at the last request

    def is_late(self, elapsed: float) -> bool:
        """Read the heartbeat ``elapsed`` seconds after the last read; True if too old."""
        before = self.heartbeat
        self.age = self.age + elapsed if self.read_heartbeat() == before else 0.0
        # A heartbeat that has just changed may be half-written, so do not parse it.
        return self.age > 0 and self.age > float(self.heartbeat.split()[2])

    @property
    def waits_for_bytes(self) -> bool:
        """Return True if the rank reports that it waits for bytes of its token store."""
        seconds = time.monotonic() - float(self.heartbeat.split()[0])
        return seconds < BYTES_SECONDS and self.heartbeat.split()[3:4] == [b"bytes"]

    def read_heartbeat(self) -> bytes:
        """Read the line with the rank's position and time limit."""
        self.heartbeat = os.pread(self.heartbeat_fd, LINE_BYTES, 0)
        return self.heartbeat

    def request_collectives(self) -> None:
        """Ask the rank for its open collectives; `read_answer` returns the answer."""
        self._answers_before = (self._read_last_answer() or {"request": 0})["request"]
        self._usage_before = time.monotonic(), process_cpu_seconds(self.contact.pid)
        with suppress(OSError):
            pipe = os.open(self.fd_dir / str(self.contact.request), os.O_WRONLY | os.O_NONBLOCK)
            os.write(pipe, b"?")
            os.close(pipe)

    def read_answer(self) -> dict[str, Any] | None:
        """Return the answer to the last request (`weft.monitor.heartbeat`), or None."""
        answer = self._read_last_answer()
        return answer if answer and answer["request"] > self._answers_before else None

    def _read_last_answer(self) -> dict[str, Any] | None:
        text = self._read(self.contact.answer)
        with suppress(ValueError):  # still being written
            return dict(json.loads(text)) if text.endswith("\n") else None
        return None

    def request_stacks(self) -> None:
        """Ask the rank for the stacks of all its threads; `read_stacks` returns them."""
        self._stack_chars_before = len(self._read(self.contact.stacks))
        self.send_signal(signal.SIGUSR2)

    def read_stacks(self) -> str:
        """Return the stacks that the rank has written since the last request."""
        return self._read(self.contact.stacks)[self._stack_chars_before :]

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the rank, unless it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def process_state(self) -> str:
        """Return the process state from /proc/PID/status; empty if the process has ended."""
        return process_status(self.contact.pid).get("State", "")

    def snapshot(self, answer: dict[str, Any] | None) -> RankState:
        """Return the state of the rank, given its answer to `request_collectives`."""
        _, step, _, phase = self.heartbeat.decode().split()
        process_state, channel = self.process_state(), ""
        with suppress(OSError):
            channel = Path(f"/proc/{self.contact.pid}/wchan").read_text().strip("0\n")
        stack = parse_main_stack(self.read_stacks())
        calls = None if answer is None else [OpenCollective(*call) for call in answer["open"]]
        state = RankState(
            self.contact.rank, int(step), phase, self.age, process_state, channel, calls, stack
        )
        if answer is None:
            return state._replace(cpu_share=self._cpu_share())
        return state._replace(done=answer["done"], recent=answer["recent"])

    def _cpu_share(self) -> float:
        """Return the processor time by the elapsed time since `request_collectives`."""
        clock, used = self._usage_before
        elapsed = time.monotonic() - clock
        return (process_cpu_seconds(self.contact.pid) - used) / elapsed

    def _read(self, number: int) -> str:
        try:
            return (self.fd_dir / str(number)).read_text("utf-8", "replace")
        except OSError:
            return ""


def parse_main_stack(text: str) -> list[str]:
    """Return the main thread's frames in faulthandler's output, innermost first.

    If the main thread waits for a backward pass in another thread (`weft.parallel.pass_overlap`),
    return that thread's frames.
    """
    # The main thread is the last one.  A frame is 'File "x.py", line 3 in f'.
    stacks = [
        [line.strip() for line in part.splitlines()[1:] if FRAME.fullmatch(line.strip())]
        for part in text.split("hread 0x")
    ]
    paired = [stack for stack in stacks if any("pass_overlap.py" in frame for frame in stack)]
    is_waiting = any("pass_overlap.py" in frame for frame in stacks[-1][:3])
    return paired[0] if is_waiting else stacks[-1]


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until the condition holds, for at most ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def collect_evidence(ranks: Sequence[RankProbe]) -> list[RankState]:
    """Return the state of every rank; do not wait for ranks that cannot answer."""
    running = [rank for rank in ranks if rank.process_state()[:1] not in ("T", "t", "Z", "")]
    for rank in running:
        rank.request_collectives()
    wait_until(lambda: all(rank.read_answer() is not None for rank in running), ANSWER_SECONDS)
    # Request stacks afterwards: the signal interrupts some calls that hold the interpreter lock.
    answers = {rank: rank.read_answer() for rank in ranks}
    for rank in running:
        rank.request_stacks()
    wait_until(lambda: all("hread 0x" in rank.read_stacks() for rank in running), ANSWER_SECONDS)
    time.sleep(0.05)  # for stacks that are still being written
    return [rank.snapshot(answers[rank]) for rank in ranks]


def write_evidence(
    run_dir: Path, states: Sequence[RankState], world_size: int, ended: bool
) -> None:
    """Write the states of this host's ranks atomically to ``logs/hang-HOST.json``.

    ``ended`` says that the watchdog is about to kill the ranks.
    """
    missing, sentence = diagnose_hang(states, world_size)
    evidence = {
        "time": time.time(),
        "host": socket.gethostname(),
        "world_size": world_size,
        "ended": ended,
        "verdict": sentence,
        "missing": missing,
        "ranks": [state.to_dict() for state in states],
    }
    write_json(host_path(run_dir, "hang", states[0].rank), evidence)


def report_hang(
    run_dir: Path, ranks: Sequence[RankProbe], states: Sequence[RankState], world_size: int
) -> bool:
    """Write error reports and logs; return True if a missing rank is on this host."""
    warn = partial(print, file=sys.stderr)
    with tolerate(host_path(run_dir, "hang", states[0].rank), warn):
        write_evidence(run_dir, states, world_size, ended=True)
    missing, sentence = diagnose_hang(states, world_size)
    # The launcher takes the earliest report, so write those of the missing ranks first.
    pairs = zip(ranks, states, strict=True)
    for rank, state in sorted(pairs, key=lambda pair: pair[1].rank not in missing):
        number = rank.contact.rank
        path = log_path(run_dir, number)
        process_state, position = state.state or "ended", describe_position(state)
        with tolerate(path, warn), path.open("a", encoding="utf-8") as log:
            print(f"--- watchdog: {sentence}", file=log)
            print(f"process {rank.contact.pid}, {process_state}, in {position}", file=log)
            print(f"open collectives: {state.calls}; completed: {state.done}", file=log)
            print(rank.read_stacks() or "no Python stacks: the rank wrote none\n", file=log)
        report = {
            "kind": "Hang",
            "is_expected": False,
            "transient": True,
            "where": "",
            "message": sentence,
            "traceback": "\n".join(reversed(state.stack)),
        }
        with tolerate(error_path(run_dir, number), warn):
            write_error_report(run_dir, number, report, rank.contact.torchrun)
    return bool(missing)


def main() -> None:
    """Watch the ranks until one is late, or until the parent ends."""
    run_dir, world_size, local_contacts = json.loads(sys.argv[1])
    contacts = [Contact(*values) for values in local_contacts]
    die_with_parent(contacts[0].pid)
    ranks = [RankProbe(contact) for contact in contacts]
    before = time.monotonic()
    while True:
        time.sleep(POLL_SECONDS)
        now = time.monotonic()
        # If this process was suspended, the ranks may have been suspended, too.
        late = [rank.is_late(min(now - before, 4 * POLL_SECONDS)) for rank in ranks]
        before = now
        if any(rank.waits_for_bytes for rank in ranks):  # and the others wait for it
            for rank in ranks:
                rank.age = 0.0
        elif any(late):
            break
    states = collect_evidence(ranks)
    if not report_hang(Path(run_dir), ranks, states, world_size) and len(ranks) < world_size:
        time.sleep(PEER_REPORT_SECONDS)
    for rank in reversed(ranks):  # the first rank is the parent
        rank.send_signal(signal.SIGKILL)


if __name__ == "__main__":
    main()
