"""Implement ``weft hang``: find the hung rank and the ranks blocked on it.

It uses three sources, best first:

* The live ranks of this host, if they make no progress.  It queries them as the watchdog does
  (`weft.supervision.watchdog`), without ending them.
* ``logs/hang-HOST.json``, which the watchdog of each host writes before it ends the run.
* ``logs/flight-rank-N``, which NCCL writes when a collective exceeds its timeout.

Without any of them, it reports how the run ended and where its logs are.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from weft.config.errors import ConfigError, InvalidConfig, WeftError
from weft.config.files import read_json, reading
from weft.config.schema import Job
from weft.monitor.heartbeat import (
    Contact,
    format_ranks,
    process_start_ticks,
    summarize_collectives,
)
from weft.monitor.jsonl import read_tail
from weft.parallel.private import parse_recorder_dump
from weft.records.jsonl_reader import is_number
from weft.records.run_reader import RunReader, read_run_job
from weft.supervision.rank_exit import log_path, read_error_reports
from weft.supervision.start import resume_hint
from weft.supervision.watchdog import (
    FRAME,
    OpenCollective,
    RankProbe,
    RankState,
    absence_reason,
    collect_evidence,
    describe_position,
    describe_wait,
    diagnose_hang,
    write_evidence,
)
from weft.training.state import checkpoint_dir

PROBE_SECONDS = 2.0  # between two reads of the heartbeats of live ranks
SAME_HANG_SECONDS = 600.0  # evidence of several hosts within this time is of one hang
SAME_START_SECONDS = 60.0  # ranks files of several hosts within this time are of one start
MAX_FRAMES = 5  # of each stack


@dataclass
class HangReport:
    """Diagnosis of a run; `to_json` writes these fields."""

    verdict: str  # a sentence
    source: str  # of the evidence
    missing: list[int]  # ranks
    ranks: list[RankState]
    advice: list[str]

    def to_json(self) -> str:
        """Return the report as JSON, with a readable summary of each rank."""
        ranks = [
            state.to_dict() | {"waits_in": describe_wait(state), "where": describe_position(state)}
            for state in self.ranks
        ]
        return json.dumps(asdict(self) | {"ranks": ranks}, indent=2)

    def __str__(self) -> str:
        lines = [self.verdict, self.source]
        for state in self.ranks:
            lines += ["", _headline(state), *_format_frames(state.stack)]
        return "\n".join([*lines, *([""] if self.advice else []), *self.advice])


def _headline(state: RankState) -> str:
    reason = absence_reason(state)
    activity = f"waits in {describe_wait(state)}" if reason is None else reason.rstrip(",")
    position = "in its Flight Recorder"
    if state.phase:
        position = f"{describe_position(state)}, for {state.seconds:.0f} s"
    last = state.done.get(state.calls[0].group) if state.calls else None
    completed = "" if last is None else f"; its last completed one there is no. {last}"
    return f"rank {state.rank}, {position}: {activity}{completed}"


def _format_frames(stack: Sequence[str]) -> list[str]:
    """Return the innermost frame, and the next frames outside torch."""
    frames = [frame for n, frame in enumerate(stack) if n == 0 or "/torch/" not in frame]
    fields = (FRAME.findall(frame)[0] for frame in frames[:MAX_FRAMES])
    return [f"    {path}:{line} in {name}" for path, line, name in fields]


class HostFile(NamedTuple):
    """Content of ``logs/ranks-HOST.json`` or ``logs/hang-HOST.json``."""

    host: str
    time: float
    world_size: int
    ranks: list[Any]  # `Contact` or `RankState`
    ended: bool  # the watchdog ended the run


def inspect_run(run_dir: Path) -> HangReport:
    """Diagnose the run in ``run_dir`` from the best source of evidence.

    Raises:
        InvalidConfig: if it is not a run directory.
    """
    job = read_run_job(run_dir)
    hosts = _read_host_files(run_dir, "ranks")
    if alive := [host for host in hosts if host.host == socket.gethostname() and _is_alive(host)]:
        return _inspect_live_ranks(run_dir, job, alive)
    started = max((host.time for host in hosts), default=0.0)
    hosts = [host for host in hosts if host.time > started - SAME_START_SECONDS]
    evidence = _read_host_files(run_dir, "hang")
    hung = max((host.time for host in evidence), default=0.0)
    evidence = [host for host in evidence if host.time > hung - SAME_HANG_SECONDS]
    logs = run_dir / "logs"
    dumps = [path for path in logs.glob("flight-rank-*") if path.stat().st_mtime > started]
    if not evidence and not dumps:
        return _report_without_evidence(run_dir, job, hosts)
    by_rank = {state.rank: state for host in evidence for state in host.ranks}
    for path in dumps:
        rank = int(path.name.rpartition("-")[2])
        by_rank.setdefault(rank, parse_flight_recorder(rank, path.read_bytes()))
    states = [by_rank[rank] for rank in sorted(by_rank)]
    world_sizes = (host.world_size for host in (evidence or hosts))
    world_size = max(world_sizes, default=states[-1].rank + 1)
    missing, sentence = diagnose_hang(states, world_size)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(hung or dumps[0].stat().st_mtime))
    names = [host.host for host in evidence]
    observer = f"the watchdog{'s' * (len(names) > 1)} of {', '.join(names)}" if evidence else "NCCL"
    ended = "; the watchdog ended the run" if any(host.ended for host in evidence) else ""
    source = f"recorded at {when} by {observer}: {len(states)} of {world_size} ranks{ended}"
    advice = []
    if silent := sorted(set(range(world_size)) - set(by_rank)):
        advice.append(f"no evidence of {format_ranks(silent)}: the host died, or had no time")
    if hung and started > hung:
        advice.append("the run has been restarted since")
    advice += [f"log: {log_path(run_dir, rank)}" for rank in missing[:4]]
    advice.append(resume_hint(checkpoint_dir(job.checkpoint, run_dir), run_dir))
    return HangReport(sentence, source, missing, states, advice)


def _read_host_files(run_dir: Path, kind: str) -> list[HostFile]:
    """Return the ``logs/KIND-HOST.json`` of all hosts that are not damaged."""
    files = []
    for path in sorted((run_dir / "logs").glob(f"{kind}-*.json")):
        with suppress(WeftError), reading(path):
            value = read_json(path)
            parse = _parse_rank_state if kind == "hang" else lambda rank: Contact(*rank)
            ranks = list(map(parse, value["ranks"]))
            if is_number(value["time"]) and isinstance(value["host"], str):
                ended = value.get("ended", False)
                size = value["world_size"]
                files.append(HostFile(value["host"], value["time"], size, ranks, ended))
    return files


def _is_alive(host: HostFile) -> bool:
    return any(process_start_ticks(rank.pid) == rank.start_ticks for rank in host.ranks)


def _parse_rank_state(fields: dict[str, Any]) -> RankState:
    calls = fields["calls"] and [OpenCollective(**call) for call in fields["calls"]]
    return RankState(**fields | {"calls": calls})


# --------------------------------------------------------------------------- live ranks


def _inspect_live_ranks(run_dir: Path, job: Job, hosts: list[HostFile]) -> HangReport:
    """Read the heartbeats twice, and query the ranks if none has advanced."""
    ranks: list[RankProbe] = []
    ended: list[RankState] = []
    for contact in (contact for host in hosts for contact in host.ranks):
        try:
            ranks.append(RankProbe(contact))
        except PermissionError:
            rule = f"belongs to another user (process {contact.pid})"
            remedy = "run this command as that user"
            raise InvalidConfig([ConfigError("run", str(run_dir), rule, remedy)]) from None
        except OSError:
            ended.append(RankState(contact.rank, 0, "", 0.0, "", "", None, []))
    before = [rank.read_heartbeat() for rank in ranks]
    time.sleep(PROBE_SECONDS)
    has_progress = [rank.read_heartbeat() for rank in ranks] != before
    now, world_size = time.monotonic(), hosts[0].world_size
    for rank in ranks:
        rank.age = now - float(rank.heartbeat.split()[0])
    if has_progress:
        steps = sorted({int(rank.heartbeat.split()[1]) for rank in ranks})
        span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        source = f"observed now, in {len(ranks)} of {world_size} ranks"
        sentence = f"no hang: the run makes progress, in {span}"
        return HangReport(sentence, source, [], [], _describe_straggler(run_dir))
    states = sorted([*collect_evidence(ranks), *ended])
    age = min(state.seconds for state in states)
    advice, source = [], "observed now"
    if len(states) < world_size:
        write_evidence(run_dir, states, world_size, ended=False)
        local, since = {state.rank for state in states}, time.time() - age
        evidence = [host for host in _read_host_files(run_dir, "hang") if host.time > since]
        others = (state for host in evidence for state in host.ranks if state.rank not in local)
        states = sorted([*states, *others])
        if len(states) > len(local):
            source += " and, by this command, on other hosts"
    if len(states) < world_size:
        advice.append("run this command on the other hosts, too: it combines all hosts")
    missing, sentence = diagnose_hang(states, world_size)
    if (limit := job.resilience.step_timeout) == 0:
        advice.append("resilience.step_timeout is 0: the run hangs until you end it")
    else:
        known = f"60 s, or {10 + job.monitor.log_interval} times the median step,"
        known = known if limit == "auto" else f"{limit:g} s"
        advice.append(f"after {known} without progress in a step the watchdog ends the run")
    source += f", in {len(states)} of {world_size} ranks; none has made progress for {age:.0f} s"
    return HangReport(sentence, source, missing, states, advice)


def _describe_straggler(run_dir: Path) -> list[str]:
    """Return a line about the straggler that the newest record names, if there is one."""
    last = read_tail(run_dir / "metrics.jsonl").last or {}
    slowdown = last.get("straggler_slowdown")
    if not isinstance(slowdown, int | float) or "straggler_rank" not in last:
        return []
    effect = f"it makes each step {slowdown:.1f} times as long (step {last['step']})"
    return [f"rank {last['straggler_rank']} is a straggler: {effect}"]


# --------------------------------------------------------------------------- NCCL's own dumps


def parse_flight_recorder(rank: int, data: bytes) -> RankState:
    """Return a rank's state from its Flight Recorder dump.

    Raises:
        InvalidConfig: if ``data`` is not such a dump.
    """
    try:
        collectives, group_ranks = parse_recorder_dump(data)
        groups = {call.group: (f"group {call.group}", list[int]()) for call in collectives}
        for name, ranks in group_ranks.items():
            groups[name] = (f"group {name}" + (f" ({format_ranks(ranks)})" if ranks else ""), ranks)
    except Exception as error:  # a damaged pickle raises almost any exception
        rule = f"is not a dump of torch's Flight Recorder: {error}"
        config_error = ConfigError("logs", f"flight-rank-{rank}", rule, "remove this file")
        raise InvalidConfig([config_error]) from error
    status = summarize_collectives(collectives, groups)
    calls = [OpenCollective(*call) for call in status["open"]]
    return RankState(rank, 0, "", 0.0, "S", "", calls, [], status["done"])


# --------------------------------------------------------------------------- without evidence


def _report_without_evidence(run_dir: Path, job: Job, hosts: list[HostFile]) -> HangReport:
    """Report how the run ended, if there is no evidence of a hang."""
    last = read_tail(run_dir / "metrics.jsonl").last
    step = last["step"] if last else 0
    logs, other_hosts = run_dir / "logs", {host.host for host in hosts} - {socket.gethostname()}
    advice = [f"logs: {logs}"] if logs.is_dir() else []
    hint = resume_hint(checkpoint_dir(job.checkpoint, run_dir), run_dir)
    num_steps = job.train.known_steps or RunReader(run_dir).steps
    state, reason = RunReader(run_dir).state(time.time(), running=False)
    if num_steps and step >= num_steps:
        sentence = f"no hang: the run is complete, at step {step}"
    elif state == "finished":
        sentence = f"no hang: the run is complete, at step {step}: {reason}"
    elif reports := read_error_reports(run_dir):
        first = reports[0]
        sentence = f"no hang: rank {first['rank']} failed: {first['kind']}: {first['message']}"
        advice = [f"log: {log_path(run_dir, first['rank'])}", hint]
    elif not hosts and last is None:
        sentence = "no hang: no rank of this run has reached its first step"
        advice.append(hint)
    elif other_hosts:
        sentence = "no evidence of a hang, and no live rank on this host"
        names = ", ".join(sorted(other_hosts))
        advice.insert(0, f"the run was started on {names}: run this command there")
    else:
        of_steps = f" of {num_steps}" if num_steps else ""
        sentence = f"no hang: the run was stopped or killed at step {step}{of_steps}"
        advice.append(hint)
    return HangReport(sentence, "no live ranks, and no evidence in logs/", [], [], advice)
