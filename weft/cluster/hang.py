"""``weft debug hang RUN``: which rank stands still where, and who waits for it, over all hosts.

Three sources, from the best to the least:

* The ranks of this host themselves, if they live and do not move: they are asked as the watchdog
  asks (`weft.cluster.watchdog`), and go on living.
* ``logs/hang-HOST.json``, what the watchdog of each host has seen before it ended the run.
* ``logs/flight-rank-N``, which NCCL leaves when a collective takes longer than it may.  It is a
  pickle; only plain data is taken out of it, never anything that could run.

If there is none, what there is is told: whether the run has ended and how, and where its logs are.
"""

from __future__ import annotations

import io
import json
import pickle
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.checkpoint.manifest import checkpoints
from weft.cluster.rank_exit import log_path, read_reports
from weft.cluster.start import resume_hint
from weft.cluster.watchdog import (
    FRAME,
    Call,
    Seen,
    Watched,
    call,
    gather_evidence,
    verdict,
    where,
    why_absent,
    write_evidence,
)
from weft.config.errors import ConfigError, InvalidConfig, WeftError
from weft.config.files import read_json, reading
from weft.config.schema import Job
from weft.monitor.heartbeat import Contact, process_began, ranks_text
from weft.monitor.jsonl import is_number, read_tail
from weft.monitor.run_reader import job_of
from weft.parallel.private_hooks import parse_flight_recorder
from weft.train.state import checkpoint_dir

LOOK = 2.0  # seconds between two looks at ranks that live
TOGETHER = 600.0  # seconds within which what hosts have seen is of the same hang ...
START = 60.0  # ... and within which the ranks of one start say how they are asked
FRAMES = 5  # of a stack


@dataclass
class Told:
    """What is known of a run that may hang."""

    verdict: str  # in a sentence
    source: str  # how it is known
    missing: list[int]  # ranks
    ranks: list[Seen]
    advice: list[str]

    def to_json(self) -> str:
        """For programs, with what is worked out for people beside each rank."""
        ranks = [one.to_dict() | {"waits_in": call(one), "where": where(one)} for one in self.ranks]
        return json.dumps(asdict(self) | {"ranks": ranks}, indent=2)

    def __str__(self) -> str:
        lines = [self.verdict, self.source]
        for one in self.ranks:
            lines += ["", _headline(one), *(f"    {frame}" for frame in _frames(one.stack))]
        return "\n".join([*lines, *([""] if self.advice else []), *self.advice])


def _headline(one: Seen) -> str:
    why = why_absent(one)
    what = f"waits in {call(one)}" if why is None else why.rstrip(",")
    at = f"{where(one)}, for {one.seconds:.0f} s" if one.site else "of its Flight Recorder"
    last = one.done.get(one.calls[0].group) if one.calls else None
    before = "" if last is None else f"; the last done there was no. {last}"
    return f"rank {one.rank}, {at}: {what}{before}"


def _frames(stack: Sequence[str]) -> list[str]:
    """The innermost frame, and the next ones that are not torch's own."""
    own = [frame for n, frame in enumerate(stack) if n == 0 or "/torch/" not in frame]
    found = (FRAME.findall(frame)[0] for frame in own[:FRAMES])
    return [f"{path}:{line} in {name}" for path, line, name in found]


def explain(folder: Path) -> Told:
    """Say what is known of the run in ``folder``.

    Raises:
        InvalidConfig: if it is no run.
    """
    job = job_of(folder)
    logs = folder / "logs"
    hosts = [found for path in sorted(logs.glob("ranks-*.json")) if (found := _read(path))]
    living = [host for host in hosts if host["host"] == socket.gethostname() and _lives(host)]
    if living:
        return _live(folder, job, living)
    newest = max((host["time"] for host in hosts), default=0.0)
    hosts = [host for host in hosts if host["time"] > newest - START]  # not of an earlier start
    left = _evidence(folder)
    last = max((evidence["time"] for evidence in left), default=0.0)
    left = [evidence for evidence in left if evidence["time"] > last - TOGETHER]
    dumps = [path for path in logs.glob("flight-rank-*") if path.stat().st_mtime > newest]
    if not left and not dumps:
        return _nothing(folder, job, hosts)
    seen = {one["rank"]: _seen(one) for evidence in left for one in evidence["ranks"]}
    known = [host["world_size"] for host in (left or hosts)]
    for path in dumps:
        number = int(path.name.rpartition("-")[2])
        seen.setdefault(number, seen_in_dump(number, path.read_bytes()))
    every = [seen[rank] for rank in sorted(seen)]
    size = max(known, default=every[-1].rank + 1)
    missing, sentence = verdict(every, size)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last or dumps[0].stat().st_mtime))
    names = [evidence["host"] for evidence in left]
    by = f"the watchdog{'s' * (len(names) > 1)} of {', '.join(names)}" if left else "NCCL"
    ended = "; the run was ended" if any(evidence["ended"] for evidence in left) else ""
    source = f"seen at {when} by {by}: {len(every)} of {size} ranks{ended}"
    silent = sorted(set(range(size)) - set(seen))
    advice = [f"nothing was left by {ranks_text(silent)}: its host died, or had no time"] * (
        len(silent) > 0
    )
    if last and newest > last:
        advice.append("the run has been started again since")
    advice += [f"log: {log_path(folder, rank)}" for rank in missing[:4]]
    return Told(sentence, source, missing, every, [*advice, _next(folder, job)])


def _evidence(folder: Path) -> list[dict[str, Any]]:
    """What hosts have left of a hang."""
    paths = sorted((folder / "logs").glob("hang-*.json"))
    return [evidence for path in paths if (evidence := _read(path))]


def _read(path: Path) -> dict[str, Any] | None:
    """A file of ours; None if it is gone or no such thing."""
    with suppress(WeftError), reading(path):
        value = read_json(path)
        for one in value["ranks"]:  # each as it is read later
            _seen(one) if isinstance(one, dict) else Contact(*one)
        if is_number(value["time"]) and isinstance(value["host"], str):
            return value
    return None


def _lives(host: dict[str, Any]) -> bool:
    contacts = [Contact(*contact) for contact in host["ranks"]]
    return any(process_began(contact.pid) == contact.began for contact in contacts)


def _seen(told: dict[str, Any]) -> Seen:
    one = Seen(**told)
    return one._replace(calls=None if one.calls is None else [Call(**c) for c in told["calls"]])


# --------------------------------------------------------------------------- while it lives


def _live(folder: Path, job: Job, hosts: list[dict[str, Any]]) -> Told:
    """Look twice, and ask if nothing has moved."""
    ranks: list[Watched] = []
    gone: list[Seen] = []
    for host in hosts:
        for contact in (Contact(*values) for values in host["ranks"]):
            try:
                ranks.append(Watched(contact))
            except PermissionError:
                rule = "belongs to another user, and cannot be asked"
                problem = ConfigError(
                    "run", str(folder), f"process {contact.pid} {rule}", "be that one"
                )
                raise InvalidConfig([problem]) from None
            except OSError:
                gone.append(Seen(contact.rank, 0, "", 0.0, "", "", None, []))
    lines = [rank.look_at() for rank in ranks]
    time.sleep(LOOK)
    moved = [rank for rank, line in zip(ranks, lines, strict=True) if rank.look_at() != line]
    now, world = time.monotonic(), hosts[0]["world_size"]
    for rank in ranks:
        rank.age = now - float(rank.line.split()[0])
    if moved:
        steps = sorted({int(rank.line.split()[1]) for rank in ranks})
        which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        said, source = (
            f"the run moves: it is in {which}",
            f"seen now, in {len(ranks)} of {world} ranks",
        )
        return Told(said, source, [], [], _slow(folder))
    seen = sorted([*gather_evidence(ranks), *gone])
    still = min(one.seconds for one in seen)
    advice, source = [], "seen now"
    if len(seen) < world:
        write_evidence(folder, seen, world, ended=False)
        ours, since = {one.rank for one in seen}, time.time() - still
        told = [one for each in _evidence(folder) if each["time"] > since for one in each["ranks"]]
        seen = sorted([*seen, *(one for one in map(_seen, told) if one.rank not in ours)])
        if len(seen) > len(ours):
            source += " and, by this command, on other hosts"
    if len(seen) < world:
        advice.append("for the other hosts' ranks run this there, too: it puts them together")
    missing, sentence = verdict(seen, world)
    if (limit := job.resilience.step_timeout) == 0:
        advice.append("resilience.step_timeout is 0: the run stands until somebody ends it")
    else:
        usual = 10 + job.monitor.log_interval
        known = f"{limit:g} s" if limit != "auto" else f"60 s, or {usual} times the median step,"
        advice.append(f"after {known} without progress in a step the watchdog ends the run")
    source += f", in {len(seen)} of {world} ranks; none has moved for {still:.0f} s"
    return Told(sentence, source, missing, seen, advice)


def _slow(folder: Path) -> list[str]:
    """Whether the newest record names a rank that slows the others down."""
    last = read_tail(folder / "metrics.jsonl").last or {}
    straggler_slowdown = last.get("straggler_slowdown")
    if not isinstance(straggler_slowdown, int | float) or "straggler_rank" not in last:
        return []
    ratio = f"{straggler_slowdown:.1f} times as long"
    return [f"rank {last['straggler_rank']} is slow, and makes steps {ratio} (step {last['step']})"]


# --------------------------------------------------------------------------- NCCL's own dumps


class _Plain(pickle.Unpickler):
    """Reads numbers, texts, lists and dicts; what would call something is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")


def seen_in_dump(rank: int, data: bytes) -> Seen:
    """What a rank's Flight Recorder held, by torch's own file.

    Raises:
        InvalidConfig: if it is no such file.
    """
    try:
        dump = _Plain(io.BytesIO(data)).load()
        found = parse_flight_recorder(dump)
        groups = {
            name: sorted(json.loads(about["ranks"])) for name, about in dump["pg_config"].items()
        }
    except Exception as error:  # a damaged pickle raises almost anything
        rule = f"is no dump of torch's Flight Recorder: {error}"
        raise InvalidConfig(
            [ConfigError("logs", f"flight-rank-{rank}", rule, "remove it")]
        ) from error

    def text(name: str) -> str:
        ranks = groups.get(name, [])
        return f"group {name} ({ranks_text(ranks)})" if ranks else f"group {name}"

    calls = [
        Call(text(c.group), c.number, c.name, c.sizes, [] if c.p2p else groups.get(c.group, []))
        for c in found
        if c.open
    ]
    done = {text(c.group): c.number for c in found if not (c.open or c.p2p)}
    return Seen(rank, 0, "", 0.0, "S", "", calls, [], done)


# --------------------------------------------------------------------------- without evidence


def _nothing(folder: Path, job: Job, hosts: list[dict[str, Any]]) -> Told:
    """How the run stands, if there is no sign of a hang."""
    last = read_tail(folder / "metrics.jsonl").last
    step = last["step"] if last else 0
    logs, elsewhere = folder / "logs", {host["host"] for host in hosts} - {socket.gethostname()}
    advice = [f"logs: {logs}"] if logs.is_dir() else []
    if step >= job.train.steps:
        said = f"no hang: the run is complete, at step {step}"
    elif reports := read_reports(folder):
        failure = reports[0]
        said = f"no hang: rank {failure['rank']} failed: {failure['kind']}: {failure['message']}"
        advice = [f"log: {log_path(folder, failure['rank'])}", _next(folder, job)]
    elif not hosts and last is None:
        said = "no hang: no rank of this run has ever come to its first step"
        advice.append(_next(folder, job))
    elif elsewhere:
        said = "no sign of a hang, and no rank lives on this host"
        advice.insert(0, f"it was started on {', '.join(sorted(elsewhere))}: run this there")
    else:
        said = f"no hang: the run was stopped at step {step} of {job.train.steps}, or killed"
        advice.append(_next(folder, job))
    return Told(said, "there are no ranks that live, and no evidence in logs/", [], [], advice)


def _next(folder: Path, job: Job) -> str:
    return resume_hint(checkpoints(checkpoint_dir(job.checkpoint.dir, folder)))
