"""The watchdog: a process on each host that sees when a rank hangs, says where, and ends the run.

Every rank tells where it is, and how long that may last (`weft.monitor.heartbeat`).  One small
process, a child of the host's first rank, looks several times a second; it shares no lock with
them, so it sees the truth about a rank that is stopped, holds the interpreter lock or stands still.
It ends with its parent, however that happens.  Only the time in which it looked counts: when the
whole machine, or it itself, is suspended, nobody is late.

When a rank is late, all are asked for evidence: the kernel's word on the process, the collectives
that are open in the Flight Recorder, the Python stacks.  Out of this comes one sentence,

    rank 1 is missing: it is stopped (SIGSTOP) in step 7, waiting for data; the others wait in
    all_reduce no. 42 of dp_shard (ranks 0-3)

which goes where the launcher looks for the error of a rank; what each rank was at goes into its
log, and all of it into ``logs/hang-HOST.json``, from which ``weft debug hang`` puts the hosts
together (`weft.cluster.hang`).  Then all ranks of the host are killed, which ends the run
everywhere.  Who is missing on another host is for the watchdog there to say; one whose own ranks
all wait gives it the time.

How to ask the ranks of a host is in ``logs/ranks-HOST.json``, watchdog or not: so ``weft debug
hang`` can do the same while they stand still, and end nobody.
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

from weft.cluster.rank_exit import error_path, log_path, status, write_report
from weft.config.files import write_json
from weft.config.schema import Job
from weft.monitor.faults import DOING, doing
from weft.monitor.heartbeat import LINE_BYTES, Contact, process_began, ranks_text, start
from weft.monitor.log_buffer import tolerate
from weft.monitor.process import PYTHON, die_with_parent

if TYPE_CHECKING:
    from weft.train.setup import Rank

# Seconds between two looks, for an answer, and for the watchdogs of other hosts to speak first.
LOOK, ANSWER, OTHERS_FIRST = 0.25, 0.75, 3.0

FRAME = re.compile(r'File "(.*)", line (\S+) in (.*)')  # as faulthandler writes it


def watch(job: Job, folder: Path, rank: Rank) -> None:
    """Let this host's ranks be watched from now on, or at least asked; every rank calls it.

    Args:
        folder: of the run.
        rank: this process.
    """
    if sys.platform != "linux":
        return
    import torch.distributed as dist

    timeout = job.resilience.step_timeout
    seconds = None if timeout == "auto" else timeout
    contacts: list[Any] = [None] * rank.world_size
    dist.all_gather_object(contacts, start(rank.rank, seconds or None, job.monitor.log_interval))
    if rank.local_rank == 0:
        # A launcher numbers the ranks of one host consecutively.
        here = contacts[rank.rank :][: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))]
        told = {"host": socket.gethostname(), "world_size": rank.world_size, "ranks": here}
        path = host_path(folder, "ranks", rank.rank)
        with tolerate(path, partial(print, flush=True)):
            write_json(path, {"time": time.time(), **told})
        if timeout == 0:
            return
        what = json.dumps([str(folder), rank.world_size, here])
        # What is sent to all processes of a job is not for this one; blocked is inherited.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        subprocess.Popen([*PYTHON, "weft.cluster.watchdog", what])
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def host_path(folder: Path, what: str, first: int) -> Path:
    """The file of this host, whose first rank is ``first``, for 'ranks' or 'hang'."""
    # There may be several launchers on one machine, each of which is a host to the run.
    rank = f"-{first}" if first else ""
    return folder / "logs" / f"{what}-{socket.gethostname()}{rank}.json"


class Call(NamedTuple):
    """A collective that a rank waits in."""

    group: str  # 'dp_shard (ranks 0, 1)'
    number: int
    name: str
    sizes: list[list[int]]
    ranks: Sequence[int] = ()  # of the group, where they are known


class Seen(NamedTuple):
    """What is known of a rank that may hang."""

    rank: int
    step: int
    site: str
    seconds: float  # since it came there
    state: str  # of the process, as /proc/ID/status has it; empty if there is none
    channel: str  # of the kernel, in which it sleeps, where one may know
    calls: list[Call] | None  # open collectives; None: no answer
    stack: list[str]  # of the main thread, innermost first
    # Of each group the number of the last collective that is done.
    done: Mapping[str, int] = MappingProxyType({})
    recent: Sequence[Any] = ()  # collectives: group, number, name, sizes, whether it is open

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        calls = None if self.calls is None else [one._asdict() for one in self.calls]
        return self._asdict() | {"calls": calls, "done": dict(self.done)}


# --------------------------------------------------------------------------- the verdict


def verdict(seen: Sequence[Seen], world_size: int) -> tuple[list[int], str]:
    """The ranks that are missing, if they are on this host, and the sentence."""
    absent = {one.rank: why for one in seen if (why := why_absent(one))}
    waiting = [one for one in seen if one.rank not in absent]
    if absent:
        named = "; ".join(
            f"rank {one.rank} is missing: it {absent[one.rank]} in {where(one)}"
            for one in seen
            if one.rank in absent
        )
        calls = {call(one) for one in waiting}
        if not waiting:
            return list(absent), named
        if len(calls) == 1:
            others = "the other waits" if len(waiting) == 1 else "the others wait"
            return list(absent), f"{named}; {others} in {calls.pop()}"
        return list(absent), f"{named}; {all_calls(waiting)}"
    gone, past = gone_past(seen)
    odd = gone or find_mismatched_collectives(seen)
    if odd:
        return odd, f"the ranks are at odds: {all_calls(seen)}{past}"
    said = f"every rank of this host waits: {all_calls(seen)}"
    if len(seen) < world_size:
        return [], f"{said}; who is missing is on another host"
    return [], f"{said}; no rank is missing: the network, or a device, stands still"


def why_absent(one: Seen) -> str | None:
    """Why others wait for this rank; None if it waits for others itself."""
    if not one.state or one.state[0] in "ZX":
        return "has ended,"
    if one.state[0] == "T":
        return "is stopped (SIGSTOP)"
    if one.state[0] == "t":
        return "is held by a debugger"
    at = f", at {place(one.stack)}," if one.stack else ""
    if one.state[0] == "D":
        return f"waits in the kernel for a disk or device ({one.channel or 'unknown'}){at}"
    if one.calls is None:
        return f"does not answer: something keeps the interpreter lock{at}"
    # Sending and receiving are not recorded with gloo, but then it waits in torch's own code.
    if one.calls or any("/torch/distributed/" in frame for frame in one.stack[:1]):
        return None
    return f"is in no collective{at or ','}"


def find_mismatched_collectives(seen: Sequence[Seen]) -> list[int]:
    """The ranks whose first open collective is another one than that of most in its group."""
    firsts = {one.rank: one.calls[0] for one in seen if one.calls}
    for group in {first[0] for first in firsts.values()}:
        kinds: dict[str, list[int]] = {}
        for rank, first in firsts.items():
            if first[0] == group:
                kinds.setdefault(json.dumps(first[1:3]), []).append(rank)
        if len(kinds) > 1:
            return min(kinds.values(), key=len)
    return []


def gone_past(seen: Sequence[Seen]) -> tuple[list[int], str]:
    """The ranks that never came to a collective in which others wait, though they are further in
    the program; and the words for it.

    Ranks wait for each other in a ring then, and of all that are waited for the least advanced is
    where they parted.
    """
    waits: dict[tuple[str, int, str], list[Seen]] = {}
    for one in seen:
        if one.calls:
            waits.setdefault(one.calls[0][:3], []).append(one)
    for there in sorted(waits.values(), key=lambda there: min(map(progress, there))):
        first = (there[0].calls or [])[0]
        gone = [
            one
            for one in seen
            if one.rank in first.ranks
            and one.done.get(first.group, -1) < first.number
            and not any(call[:3] == first[:3] for call in one.calls or [])
            and progress(one) > max(map(progress, there))
        ]
        if gone:
            who = ranks_text([one.rank for one in gone])
            others = ranks_text([one.rank for one in there])
            last = gone[0].done.get(first.group)
            before = f" (the last one there was no. {last})" if last is not None else ""
            past = f"{who} went past {call(there[0])}{before}, in which {others} wait"
            return [one.rank for one in gone], f"; {past}{'s' * (len(there) == 1)}"
    return [], ""


def progress(one: Seen) -> tuple[int, int]:
    """How far a rank is in the program: its step, and the place in it."""
    site = one.site.partition(".")[0]
    return one.step, list(DOING).index(site) if site in DOING else 0


def where(one: Seen) -> str:
    """'step 7, waiting for data'."""
    return f"step {one.step}, {doing(one.site)}"


def place(stack: Sequence[str]) -> str:
    """'weft/train/loop.py:95 in train', of the innermost frame."""
    path, line, name = FRAME.findall(stack[0])[0]
    return f"{'/'.join(Path(path).parts[-3:])}:{line} in {name}"


def call(one: Seen) -> str:
    """What a waiting rank waits in."""
    if not one.calls:
        return place(one.stack) if one.stack else "a place unknown"
    first = one.calls[0]
    return f"{first.name} no. {first.number} of {first.group}"


def all_calls(seen: Sequence[Seen], most: int = 4) -> str:
    """What some ranks wait in, ``most`` of them by name."""
    some = ", ".join(f"rank {one.rank} waits in {call(one)} ({where(one)})" for one in seen[:most])
    return some + (f" and {len(seen) - most} more" if len(seen) > most else "")


# --------------------------------------------------------------------------- outside the ranks


class Watched:
    """A rank of this host, from outside."""

    def __init__(self, contact: Contact) -> None:
        self.contact = contact
        self.process = os.pidfd_open(contact.pid)
        if process_began(contact.pid) != contact.began:
            raise ProcessLookupError  # another one, which has got its id
        self.files = Path(f"/proc/{contact.pid}/fd")
        self.file = os.open(self.files / str(contact.line), os.O_RDONLY)
        self.line = b""
        self.age = 0.0  # seconds that the line has been seen unchanged
        self.asked, self.told = 0, 0  # answers, and bytes of stacks, that were there before

    def look(self, seconds: float) -> bool:
        """Whether the rank is late, ``seconds`` after the last look."""
        before = self.line
        self.age = self.age + seconds if self.look_at() == before else 0.0
        # A line that has just changed may be half-written; it is not judged.
        return self.age > 0 and self.age > float(self.line.split()[2])

    def look_at(self) -> bytes:
        """What the rank says of where it is."""
        self.line = os.pread(self.file, LINE_BYTES, 0)
        return self.line

    def ask(self) -> None:
        """Have it say which collectives are open; `answer` has what it says."""
        self.asked = (self._answer() or {"asked": 0})["asked"]
        with suppress(OSError):
            pipe = os.open(self.files / str(self.contact.question), os.O_WRONLY | os.O_NONBLOCK)
            os.write(pipe, b"?")
            os.close(pipe)

    def answer(self) -> dict[str, Any] | None:
        """What the rank says (`weft.monitor.heartbeat`) since it was asked; None: nothing."""
        told = self._answer()
        return told if told and told["asked"] > self.asked else None

    def _answer(self) -> dict[str, Any] | None:
        text = self._read(self.contact.answer)
        with suppress(ValueError):  # it is being written
            return dict(json.loads(text)) if text.endswith("\n") else None
        return None

    def ask_for_stacks(self) -> None:
        """Have it write where all its threads are; `stacks` has that."""
        self.told = len(self._read(self.contact.stacks))
        self.send(signal.SIGUSR2)

    def stacks(self) -> str:
        """What it has written since it was asked for it."""
        return self._read(self.contact.stacks)[self.told :]

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process, number)

    def state(self) -> str:
        """The state of its process, as /proc/ID/status has it; empty if there is none."""
        return status(self.contact.pid).get("State", "")

    def seen(self, told: dict[str, Any] | None) -> Seen:
        """All that is known of it, with its answer, from before it was asked for its stacks."""
        _, step, _, site = self.line.decode().split()
        state, channel = self.state(), ""
        with suppress(OSError):
            channel = Path(f"/proc/{self.contact.pid}/wchan").read_text().strip("0\n")
        stack = main_stack(self.stacks())
        calls = None if told is None else [Call(*call) for call in told["open"]]
        one = Seen(self.contact.rank, int(step), site, self.age, state, channel, calls, stack)
        return one if told is None else one._replace(done=told["done"], recent=told["recent"])

    def _read(self, number: int) -> str:
        try:
            return (self.files / str(number)).read_text("utf-8", "replace")
        except OSError:
            return ""


def main_stack(text: str) -> list[str]:
    """The main thread's frames out of faulthandler's text, innermost first."""
    # It comes last.  'File "x.py", line 3 in f'
    last = text.rpartition("hread 0x")[2].splitlines()[1:]
    return [line.strip() for line in last if FRAME.fullmatch(line.strip())]


def until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until it holds, at most for so long."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def gather_evidence(ranks: Sequence[Watched]) -> list[Seen]:
    """Ask every rank what it is at; who cannot answer is not waited for."""
    able = [rank for rank in ranks if rank.state()[:1] not in ("T", "t", "Z", "")]
    for rank in able:
        rank.ask()
    until(lambda: all(rank.answer() is not None for rank in able), ANSWER)
    # Only now: a signal ends some of the calls that keep the lock.
    told = {rank: rank.answer() for rank in ranks}
    for rank in able:
        rank.ask_for_stacks()
    until(lambda: all("hread 0x" in rank.stacks() for rank in able), ANSWER)
    time.sleep(0.05)  # for those that are being written
    return [rank.seen(told[rank]) for rank in ranks]


def write_evidence(folder: Path, seen: Sequence[Seen], world_size: int, ended: bool) -> None:
    """Leave what is known of this host's ranks as ``logs/hang-HOST.json``, whole or not at all.

    Args:
        ended: whether the watchdog ends them now.
    """
    missing, sentence = verdict(seen, world_size)
    told = {
        "time": time.time(),
        "host": socket.gethostname(),
        "world_size": world_size,
        "ended": ended,
        "verdict": sentence,
        "missing": missing,
        "ranks": [one.to_dict() for one in seen],
    }
    write_json(host_path(folder, "hang", seen[0].rank), told)


def tell(folder: Path, ranks: Sequence[Watched], seen: Sequence[Seen], world_size: int) -> bool:
    """Write the verdict into reports and logs; whether the missing rank is on this host."""
    warn = partial(print, file=sys.stderr)
    with tolerate(host_path(folder, "hang", seen[0].rank), warn):
        write_evidence(folder, seen, world_size, ended=True)
    missing, sentence = verdict(seen, world_size)
    # The launcher takes the earliest report.
    for rank, one in sorted(zip(ranks, seen, strict=True), key=lambda p: p[1].rank not in missing):
        number = rank.contact.rank
        path = log_path(folder, number)
        with tolerate(path, warn), path.open("a", encoding="utf-8") as log:
            print(f"--- the watchdog: {sentence}", file=log)
            print(f"process {rank.contact.pid}, {one.state or 'ended'}, in {where(one)}", file=log)
            print(f"open collectives: {one.calls}; done: {one.done}", file=log)
            print(rank.stacks() or "no Python stacks: it could not write them\n", file=log)
        report = {
            "kind": "Hang",
            "foreseen": False,
            "transient": True,
            "where": "",
            "message": sentence,
            "traceback": "\n".join(reversed(one.stack)),
        }
        with tolerate(error_path(folder, number), warn):
            write_report(folder, number, report, rank.contact.torchrun)
    return bool(missing)


def main() -> None:
    """Watch until a rank is late, or the parent ends."""
    folder, world_size, here = json.loads(sys.argv[1])
    contacts = [Contact(*values) for values in here]
    die_with_parent(contacts[0].pid)
    ranks = [Watched(contact) for contact in contacts]
    before = time.monotonic()
    while True:
        time.sleep(LOOK)
        now = time.monotonic()
        # When this process itself was held up, so may the others have been.
        late = [rank.look(min(now - before, 4 * LOOK)) for rank in ranks]
        before = now
        if any(late):
            break
    seen = gather_evidence(ranks)
    if not tell(Path(folder), ranks, seen, world_size) and len(ranks) < world_size:
        time.sleep(OTHERS_FIRST)
    for rank in reversed(ranks):  # the first one is the parent
        rank.send(signal.SIGKILL)


if __name__ == "__main__":
    main()
