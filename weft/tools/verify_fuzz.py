"""``weft verify --fuzz``: random jobs, each against one process, until one departs.

Every job (`weft.tools.job_space`) goes through `weft.tools.verify.verify` as a recipe's overrides
do, so that what fails here fails by one command.  Two processes work at once, each of which forks
the ranks of its jobs from an interpreter that has imported everything already.

A failure is shrunk: overrides go back to their defaults, half of them, then a quarter, and so on
down to one at a time, as long as the job still ends in the same way (`kind_of`); then ranks
and steps.

Results are appended to a log, a line each.  A job that is in the log with the same overrides is
not run again: so the same command resumes, and a longer one adds jobs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from weft.config.errors import InvalidConfig, WeftError
from weft.monitor.process import die_with_parent
from weft.tools.job_space import AXES, RECIPE, Draw, draw_job, goals, technique
from weft.tools.local_ranks import RanksFailed, RanksTimedOut, import_heavy
from weft.tools.verify import read_recipe, verify
from weft.tools.verify_measure import Tamper

TIMEOUT, COMPILE_TIMEOUT = 120.0, 600.0  # seconds for the ranks of a job, and of one that compiles
WORKERS = 2
SHRINK_RUNS = 60  # at most, of one failure

BAD = ("failed", "crashed", "timed out")
# How `weft.tools.verify` says what departs first.
DEPARTURES = (
    "the weights differ",
    "forward departs",
    "gradients depart",
    "the gradient norm departs",
    "the loss departs",
    "updates depart",
    "evaluation loss departs",
)


@dataclass(frozen=True)
class Settings:
    """What all jobs of a fuzz have in common."""

    seed: int = 0
    ranks: int = 8
    steps: int = 2
    pinned: Mapping[str, str] = field(default_factory=dict)  # overrides of every job
    tamper: Tamper | None = None  # a test's


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    status: str  # agreed, failed (numbers differ), crashed, timed out or refused
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Tried:
    """A job of a fuzz: a line of the log."""

    seed: int
    index: int
    overrides: Draw
    resume: Draw
    steps: int
    outcome: Outcome
    goal: tuple[str, ...] = ()
    refusals: list[dict[str, Any]] = field(default_factory=list)
    command: str = ""  # that reproduces a failure, when it has been shrunk
    runs: int = 0  # of that shrinking

    @property
    def name(self) -> str:
        """What the job is about, in short."""
        degrees = [f"{axis} {n}" for axis in AXES if (n := self.overrides.get(f"parallel.{axis}"))]
        layout = " x ".join(text for text in degrees if not text.endswith(" 1")) or "one rank"
        return f"{layout}; {', '.join(self.goal)}"


def try_job(overrides: Mapping[str, str], resume: Mapping[str, str], settings: Settings) -> Outcome:
    """Verify a job as ``weft verify`` does."""
    began = time.monotonic()
    status, reason = "agreed", ""
    try:
        report = verify(
            read_recipe(RECIPE, list(overrides.items())),
            ranks=settings.ranks,
            steps=settings.steps,
            keep=list(overrides),
            resume=list(resume.items()),
            tamper=settings.tamper,
            timeout=COMPILE_TIMEOUT if overrides.get("compile.enable") == "true" else TIMEOUT,
        )
        if not report.holds:
            status = "failed"
        reason = report.reason
    except InvalidConfig as error:
        status, reason = "refused", str(error)
    except RanksTimedOut as error:
        status, reason = "timed out", str(error)
    except (RanksFailed, WeftError) as error:
        status, reason = "crashed", str(error)
    return Outcome(status, reason, round(time.monotonic() - began, 2))


def command_of(overrides: Mapping[str, str], resume: Mapping[str, str], settings: Settings) -> str:
    """Return the command that verifies a job."""
    words = ["weft", "verify", RECIPE]
    if settings.steps != 3:
        words += ["--steps", str(settings.steps)]
    if settings.ranks != 8:
        words += ["--ranks", str(settings.ranks)]
    if resume:
        words += ["--resume-layout", ",".join(f"{key}={text}" for key, text in resume.items())]
    words += [word for key, text in overrides.items() for word in (f"--{key}", text)]
    return shlex.join(words)


# --------------------------------------------------------------------------- shrinking


def kind_of(outcome: Outcome) -> tuple[str, str]:
    """Return what a shrunk failure has to keep: how it ends, and what departs first or is raised.

    Names and numbers in the reason are those of one job.
    """
    if outcome.status != "failed":
        first = outcome.reason.partition("\n")[0]
        return outcome.status, re.sub(r"\W*\d+\S*", "", first)[:60]
    return outcome.status, next((p for p in DEPARTURES if p in outcome.reason), "")


def shrink_failure(tried: Tried, settings: Settings) -> Tried:
    """Find the fewest overrides, ranks and steps with which a job ends as badly."""
    runs = 0
    best = tried.outcome
    overrides, resume = dict(tried.overrides), dict(tried.resume)

    def still_bad(overrides: Draw, resume: Draw, settings: Settings) -> bool:
        nonlocal runs, best
        if runs >= SHRINK_RUNS:
            return False
        outcome = try_job(overrides, resume, settings)
        runs += outcome.status != "refused"
        if kind_of(outcome) == kind_of(tried.outcome):
            best = outcome
            return True
        return False

    if resume and still_bad(overrides, {}, settings):
        resume = {}
    for steps in range(2 if resume else 1, settings.steps):
        if still_bad(overrides, resume, fewer := dataclasses.replace(settings, steps=steps)):
            settings = fewer
            break
    overrides = _fewest(overrides, lambda some: still_bad(some, resume, settings))
    resume = _fewest(resume, lambda some: bool(some) and still_bad(overrides, some, settings))
    for axis in AXES:
        key = f"parallel.{axis}"
        if int(overrides.get(key, 1)) > 2:
            fewer_ranks = overrides | {key: "2"}
            if still_bad(fewer_ranks, resume, settings):
                overrides = fewer_ranks
    return dataclasses.replace(
        tried, outcome=best, command=command_of(overrides, resume, settings), runs=runs
    )


def _fewest(draw: Draw, holds: Callable[[Draw], bool]) -> Draw:
    """Leave out as many entries as possible: ever smaller pieces, at last single ones."""
    size = len(draw)
    while size > 1:
        size = -(-size // 2)
        for piece in _pieces(list(draw), size):
            fewer = {key: text for key, text in draw.items() if key not in piece}
            if holds(fewer):
                draw = fewer
    return draw


def _pieces(keys: list[str], size: int) -> Iterator[list[str]]:
    return (keys[first : first + size] for first in range(0, len(keys), size))


# --------------------------------------------------------------------------- many jobs


def work(index: int, settings: Settings) -> Tried:
    """Draw and try the job of an index; shrink it if it fails."""
    drawn = draw_job(settings.seed, index, settings.pinned, settings.ranks)
    outcome = try_job(drawn.overrides, drawn.resume, settings)
    tried = Tried(
        settings.seed,
        index,
        drawn.overrides,
        drawn.resume,
        settings.steps,
        outcome,
        drawn.goal,
        drawn.refusals,
    )
    return shrink_failure(tried, settings) if outcome.status in BAD else tried


def fuzz(
    count: int,
    settings: Settings,
    log: Path,
    minutes: float = 0,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Try the jobs 0 to ``count - 1`` of a seed.

    Args:
        log: a file of JSON lines; what is in it already is not tried again.
        minutes: after which no job is started; 0: no limit.
        say: told of each job, and of all of them.

    Returns:
        The counts, what failed, and whether it was interrupted or ran out of time.
    """
    # What the rules say of what is pinned is said before anything starts.
    draw_job(settings.seed, 0, settings.pinned, settings.ranks)
    logged = (tried for tried in read_log(log, settings) if tried.index < count)
    done = {tried.index: tried for tried in logged if _is_drawn_today(tried, settings)}
    say(f"{len(done)} of {count} jobs are in {log}") if done else None
    deadline = time.monotonic() + minutes * 60 if minutes else float("inf")
    log.parent.mkdir(parents=True, exist_ok=True)
    missing = iter([index for index in range(count) if index not in done])
    began, ran, interrupted = time.monotonic(), 0, False
    indices = (index for index in missing if time.monotonic() < deadline)
    try:
        with log.open("a", encoding="utf-8") as file:
            for tried in each(indices, settings):
                ran += 1
                done[tried.index] = tried
                file.write(json.dumps(asdict(tried)) + "\n")
                file.flush()
                say(line(tried))
    except KeyboardInterrupt:
        interrupted = True
    seconds = time.monotonic() - began
    result = summary(count, [done[index] for index in sorted(done)])
    result |= {
        "seed": settings.seed,
        "log": str(log),
        "interrupted": interrupted,
        "jobs_per_minute": round(60 * ran / seconds, 1) if ran else 0.0,
    }
    say(told(result))
    return result


def _is_drawn_today(tried: Tried, settings: Settings) -> bool:
    """Return False if another job has this number now, since keys or rules have changed."""
    drawn = draw_job(tried.seed, tried.index, settings.pinned, settings.ranks)
    return (drawn.overrides, drawn.resume) == (tried.overrides, tried.resume)


def read_log(log: Path, settings: Settings) -> list[Tried]:
    """Read the jobs of a log that were tried with the same settings."""
    found = []
    for text in log.read_text("utf-8", "replace").splitlines() if log.exists() else []:
        try:
            record = json.loads(text)
            tried = Tried(**record | {"outcome": Outcome(**record["outcome"])})
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # cut off when the process was killed
        same = (tried.seed, tried.steps) == (settings.seed, settings.steps)
        if same and settings.pinned.items() <= tried.overrides.items():
            found.append(tried)
    return found


def summary(count: int, done: Sequence[Tried]) -> dict[str, Any]:
    """Count the jobs by how they ended, and the refusals on the way to them."""
    statuses = Counter(tried.outcome.status for tried in done)
    refused = Counter(
        (refusal["key"], *sorted(refusal["with"]), refusal["rule"])
        for tried in done
        for refusal in tried.refusals
    )
    pairs = set()
    for tried in done:
        names = sorted({technique(key, text) for key, text in tried.overrides.items()})
        pairs |= {(a, b) for n, a in enumerate(names) for b in names[n + 1 :]}
    every = goals(0)
    return {
        "jobs": count,
        "missing": count - len(done),
        **{status.replace(" ", "_"): statuses[status] for status in ("agreed", *BAD, "refused")},
        "resumed": sum(bool(tried.resume) for tried in done),
        "pairs": sum(tuple(sorted(pair)) in pairs for pair in every),
        "possible_pairs": len(every),
        "refusals": len(refused),
        "failures": [
            {
                "index": tried.index,
                "status": tried.outcome.status,
                "reason": tried.outcome.reason,
                "command": tried.command,
            }
            for tried in done
            if tried.outcome.status in BAD
        ],
    }


def line(tried: Tried) -> str:
    """Describe a job in one line; a failure with its command."""
    outcome = tried.outcome
    text = f"{tried.index:>5}  {outcome.status:<9} {outcome.seconds:>6.1f} s  {tried.name}"
    if outcome.status in BAD:
        text += f"\n       {outcome.reason}\n       reproduce: {tried.command}"
    return text


def told(result: Mapping[str, Any]) -> str:
    """Describe how all jobs ended."""
    counts = ", ".join(
        f"{result[status.replace(' ', '_')]} {status}" for status in ("agreed", *BAD, "refused")
    )
    lines = [
        "",
        f"{result['jobs'] - result['missing']} of {result['jobs']} jobs of seed {result['seed']}: "
        f"{counts}; {result['resumed']} resumed in another layout",
        f"{result['pairs']} of {result['possible_pairs']} pairs of techniques; "
        f"{result['refusals']} refusals; {result['jobs_per_minute']} jobs a minute",
    ]
    lines += [f"{each['status']}: {each['command']}" for each in result["failures"]]
    if result["missing"]:
        lines.append(f"{result['missing']} jobs are missing: run the same command to resume")
    return "\n".join(lines)


# --------------------------------------------------------------------------- processes


@dataclass
class _Worker:
    process: ForkProcess
    pipe: Connection
    index: int = -1

    def end(self) -> None:
        """End it, and with it the ranks that it has forked."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def each(indices: Iterable[int], settings: Settings) -> Iterator[Tried]:
    """Do the jobs in several processes at once, and yield each as it ends."""
    import_heavy()
    waiting, workers = iter(indices), []
    try:
        for _ in range(WORKERS):
            if (index := next(waiting, None)) is None:
                break
            workers.append(_start(settings))
            _ask(workers[-1], index)
        while workers:
            for pipe in wait([worker.pipe for worker in workers]):
                worker = next(worker for worker in workers if worker.pipe is pipe)
                try:
                    answer = worker.pipe.recv()
                except (EOFError, OSError):
                    answer = RuntimeError(f"the process of job {worker.index} died")
                if isinstance(answer, BaseException):
                    raise answer
                yield answer
                if (index := next(waiting, None)) is None:
                    workers.remove(worker)
                    worker.end()
                else:
                    _ask(worker, index)
    finally:
        for worker in workers:
            worker.end()


def _start(settings: Settings) -> _Worker:
    ours, theirs = Pipe()
    parent = os.getpid()
    process = get_context("fork").Process(target=_be_worker, args=(theirs, parent, settings))
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _ask(worker: _Worker, index: int) -> None:
    worker.index = index
    worker.pipe.send(index)


def _be_worker(pipe: Connection, parent: int, settings: Settings) -> None:
    """Do jobs until the pipe closes."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started us
    with suppress(EOFError):
        while True:
            index = pipe.recv()
            try:
                answer: Any = work(index, settings)
            except Exception as error:  # a mistake of the fuzz itself ends it
                error.add_note(f"in job {index}")
                answer = error
            pipe.send(answer)
