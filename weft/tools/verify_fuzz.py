"""Verify random jobs against one process (``weft verify --fuzz``).

`weft.tools.verify.verify` runs every job of `weft.tools.job_space` as overrides of a recipe, so one
command reproduces each failure.  Two worker processes run at once; each forks the ranks of its
jobs after it has imported all modules.

A failure is shrunk by bisection: half of the overrides return to their defaults, then a quarter,
down to single ones, as long as the job fails in the same way (`failure_kind`).  Ranks and steps
shrink, too.

Each result is a line of a log.  A job that is in the log with the same overrides does not run
again, so the same command resumes, and a larger count adds jobs.
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
from weft.tools.job_space import AXES, RECIPE, OverrideMap, draw_job, list_goals, technique_name
from weft.tools.local_ranks import RanksFailed, RanksTimedOut, preload_modules
from weft.tools.verify import read_recipe, verify
from weft.tools.verify_measure import Corruption

TIMEOUT, COMPILE_TIMEOUT = 120.0, 600.0  # seconds for the ranks of a job, without and with compile
WORKERS = 2
SHRINK_RUNS = 60  # maximum number of jobs to shrink one failure

FAILURE_STATUSES = ("failed", "crashed", "timed out")
# Phrases of the reasons of `weft.tools.verify`.
FIRST_DIFFERENCES = (
    "initial weights differ",
    "the forward pass first differs",
    "gradients first differ",
    "the gradient norm differs",
    "the loss differs",
    "updates first differ",
    "validation loss differs",
)


@dataclass(frozen=True)
class FuzzSettings:
    """Settings that all jobs of a fuzz share."""

    seed: int = 0
    ranks: int = 8
    steps: int = 2
    pinned: Mapping[str, str] = field(default_factory=dict)  # overrides of every job
    corrupt: Corruption | None = None  # for tests; see `weft.tools.verify.verify`


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job."""

    status: str  # agreed, failed (the layout differs), crashed, timed out or refused
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class FuzzResult:
    """A job and its outcome: a line of the log."""

    seed: int
    index: int
    overrides: OverrideMap
    resume: OverrideMap
    steps: int
    outcome: Outcome
    goal: tuple[str, ...] = ()
    refusals: list[dict[str, Any]] = field(default_factory=list)
    command: str = ""  # reproduces the shrunk failure
    runs: int = 0  # jobs run to shrink it

    @property
    def name(self) -> str:
        """Layout and goal of the job."""
        degrees = [f"{axis} {n}" for axis in AXES if (n := self.overrides.get(f"parallel.{axis}"))]
        layout = " x ".join(text for text in degrees if not text.endswith(" 1")) or "one rank"
        return f"{layout}; {', '.join(self.goal)}"


def verify_job(
    overrides: Mapping[str, str], resume: Mapping[str, str], settings: FuzzSettings
) -> Outcome:
    """Verify a job as ``weft verify`` does."""
    started = time.monotonic()
    status, reason = "agreed", ""
    try:
        report = verify(
            read_recipe(RECIPE, list(overrides.items())),
            ranks=settings.ranks,
            steps=settings.steps,
            keep=list(overrides),
            resume=list(resume.items()),
            corrupt=settings.corrupt,
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
    return Outcome(status, reason, round(time.monotonic() - started, 2))


def reproduce_command(
    overrides: Mapping[str, str], resume: Mapping[str, str], settings: FuzzSettings
) -> str:
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


def failure_kind(outcome: Outcome) -> tuple[str, str]:
    """Return a failure's status and first difference, without names and numbers."""
    if outcome.status != "failed":
        first_line = outcome.reason.partition("\n")[0]
        return outcome.status, re.sub(r"\W*\d+\S*", "", first_line)[:60]
    return outcome.status, next((p for p in FIRST_DIFFERENCES if p in outcome.reason), "")


def shrink_failure(result: FuzzResult, settings: FuzzSettings) -> FuzzResult:
    """Find few overrides, ranks and steps with which a job fails in the same way."""
    runs = 0
    best = result.outcome
    overrides, resume = dict(result.overrides), dict(result.resume)

    def still_fails(overrides: OverrideMap, resume: OverrideMap, settings: FuzzSettings) -> bool:
        nonlocal runs, best
        if runs >= SHRINK_RUNS:
            return False
        outcome = verify_job(overrides, resume, settings)
        runs += outcome.status != "refused"
        if failure_kind(outcome) == failure_kind(result.outcome):
            best = outcome
            return True
        return False

    if resume and still_fails(overrides, {}, settings):
        resume = {}
    for steps in range(2 if resume else 1, settings.steps):
        if still_fails(overrides, resume, fewer := dataclasses.replace(settings, steps=steps)):
            settings = fewer
            break
    overrides = _minimize(overrides, lambda subset: still_fails(subset, resume, settings))
    resume = _minimize(
        resume, lambda subset: bool(subset) and still_fails(overrides, subset, settings)
    )
    for axis in AXES:
        key = f"parallel.{axis}"
        if int(overrides.get(key, 1)) > 2:
            fewer_ranks = overrides | {key: "2"}
            if still_fails(fewer_ranks, resume, settings):
                overrides = fewer_ranks
    return dataclasses.replace(
        result, outcome=best, command=reproduce_command(overrides, resume, settings), runs=runs
    )


def _minimize(overrides: OverrideMap, fails: Callable[[OverrideMap], bool]) -> OverrideMap:
    """Remove as many entries as possible, in chunks that get smaller."""
    size = len(overrides)
    while size > 1:
        size = -(-size // 2)
        for chunk in _chunks(list(overrides), size):
            fewer = {key: text for key, text in overrides.items() if key not in chunk}
            if fails(fewer):
                overrides = fewer
    return overrides


def _chunks(keys: list[str], size: int) -> Iterator[list[str]]:
    return (keys[start : start + size] for start in range(0, len(keys), size))


# --------------------------------------------------------------------------- many jobs


def run_job(index: int, settings: FuzzSettings) -> FuzzResult:
    """Draw and verify the job of an index; shrink it if it fails."""
    job = draw_job(settings.seed, index, settings.pinned, settings.ranks)
    outcome = verify_job(job.overrides, job.resume, settings)
    result = FuzzResult(
        settings.seed,
        index,
        job.overrides,
        job.resume,
        settings.steps,
        outcome,
        job.goal,
        job.refusals,
    )
    return shrink_failure(result, settings) if outcome.status in FAILURE_STATUSES else result


def fuzz(
    count: int,
    settings: FuzzSettings,
    log_path: Path,
    minutes: float = 0,
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Verify the jobs 0 to ``count - 1`` of a seed.

    Args:
        count: number of jobs.
        settings: seed, pinned keys, and number of ranks.
        log_path: a file of JSON lines; the jobs in it do not run again.
        minutes: no job starts after them; 0: no limit.
        log: called with a line per job and the summary.

    Returns:
        The counts, the failures, and whether Ctrl-C interrupted the fuzz.
    """
    # Raise the errors of pinned keys before any process starts.
    draw_job(settings.seed, 0, settings.pinned, settings.ranks)
    logged = (result for result in read_log(log_path, settings) if result.index < count)
    done = {result.index: result for result in logged if _is_current(result, settings)}
    if done:
        log(f"{len(done)} of {count} jobs are in {log_path}")
    deadline = time.monotonic() + minutes * 60 if minutes else float("inf")
    log_path.parent.mkdir(parents=True, exist_ok=True)
    missing = iter([index for index in range(count) if index not in done])
    started, num_run, interrupted = time.monotonic(), 0, False
    indices = (index for index in missing if time.monotonic() < deadline)
    try:
        with log_path.open("a", encoding="utf-8") as file:
            for result in run_jobs(indices, settings):
                num_run += 1
                done[result.index] = result
                file.write(json.dumps(asdict(result)) + "\n")
                file.flush()
                log(format_result(result))
    except KeyboardInterrupt:
        interrupted = True
    seconds = time.monotonic() - started
    summary = summarize(count, [done[index] for index in sorted(done)])
    summary |= {
        "seed": settings.seed,
        "log": str(log_path),
        "interrupted": interrupted,
        "jobs_per_minute": round(60 * num_run / seconds, 1) if num_run else 0.0,
    }
    log(format_summary(summary))
    return summary


def _is_current(result: FuzzResult, settings: FuzzSettings) -> bool:
    """Return True if the index still draws this job; keys and rules may have changed."""
    job = draw_job(result.seed, result.index, settings.pinned, settings.ranks)
    return (job.overrides, job.resume) == (result.overrides, result.resume)


def read_log(path: Path, settings: FuzzSettings) -> list[FuzzResult]:
    """Read the jobs of a log that ran with the same settings."""
    results = []
    for text in path.read_text("utf-8", "replace").splitlines() if path.exists() else []:
        try:
            record = json.loads(text)
            result = FuzzResult(**record | {"outcome": Outcome(**record["outcome"])})
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # a killed process left an incomplete line
        same = (result.seed, result.steps) == (settings.seed, settings.steps)
        if same and settings.pinned.items() <= result.overrides.items():
            results.append(result)
    return results


def summarize(count: int, done: Sequence[FuzzResult]) -> dict[str, Any]:
    """Count outcomes, pairs of techniques, and the rejections while drawing jobs."""
    statuses = Counter(result.outcome.status for result in done)
    refused = Counter(
        (refusal["key"], *sorted(refusal["with"]), refusal["rule"])
        for result in done
        for refusal in result.refusals
    )
    pairs = set()
    for result in done:
        names = sorted({technique_name(key, text) for key, text in result.overrides.items()})
        pairs |= {(a, b) for n, a in enumerate(names) for b in names[n + 1 :]}
    goals = list_goals(0)
    return {
        "jobs": count,
        "missing": count - len(done),
        **{
            status.replace(" ", "_"): statuses[status]
            for status in ("agreed", *FAILURE_STATUSES, "refused")
        },
        "resumed": sum(bool(result.resume) for result in done),
        "pairs": sum(tuple(sorted(pair)) in pairs for pair in goals),
        "possible_pairs": len(goals),
        "refusals": len(refused),
        "failures": [
            {
                "index": result.index,
                "status": result.outcome.status,
                "reason": result.outcome.reason,
                "command": result.command,
            }
            for result in done
            if result.outcome.status in FAILURE_STATUSES
        ],
    }


def format_result(result: FuzzResult) -> str:
    """Format a job as one line; a failure also has its reason and command."""
    outcome = result.outcome
    text = f"{result.index:>5}  {outcome.status:<9} {outcome.seconds:>6.1f} s  {result.name}"
    if outcome.status in FAILURE_STATUSES:
        text += f"\n       {outcome.reason}\n       reproduce: {result.command}"
    return text


def format_summary(summary: Mapping[str, Any]) -> str:
    """Format the counts and the failures."""
    counts = ", ".join(
        f"{summary[status.replace(' ', '_')]} {status}"
        for status in ("agreed", *FAILURE_STATUSES, "refused")
    )
    lines = [
        "",
        f"{summary['jobs'] - summary['missing']} of {summary['jobs']} jobs of seed "
        f"{summary['seed']}: {counts}; {summary['resumed']} resumed in another layout",
        f"{summary['pairs']} of {summary['possible_pairs']} pairs of techniques; "
        f"{summary['refusals']} refusals; {summary['jobs_per_minute']} jobs per minute",
    ]
    lines += [f"{failure['status']}: {failure['command']}" for failure in summary["failures"]]
    if summary["missing"]:
        lines.append(f"{summary['missing']} jobs are missing: run the same command to resume")
    return "\n".join(lines)


# --------------------------------------------------------------------------- processes


@dataclass
class _Worker:
    process: ForkProcess
    pipe: Connection
    index: int = -1

    def kill(self) -> None:
        """Kill the process and, with it, the ranks that it has forked."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def run_jobs(indices: Iterable[int], settings: FuzzSettings) -> Iterator[FuzzResult]:
    """Run the jobs in parallel processes and yield each result as it arrives."""
    preload_modules()
    pending, workers = iter(indices), []
    try:
        for _ in range(WORKERS):
            if (index := next(pending, None)) is None:
                break
            workers.append(_start_worker(settings))
            _send_index(workers[-1], index)
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
                if (index := next(pending, None)) is None:
                    workers.remove(worker)
                    worker.kill()
                else:
                    _send_index(worker, index)
    finally:
        for worker in workers:
            worker.kill()


def _start_worker(settings: FuzzSettings) -> _Worker:
    parent_pipe, child_pipe = Pipe()
    parent = os.getpid()
    process = get_context("fork").Process(target=_worker_main, args=(child_pipe, parent, settings))
    process.start()
    child_pipe.close()
    return _Worker(process, parent_pipe)


def _send_index(worker: _Worker, index: int) -> None:
    worker.index = index
    worker.pipe.send(index)


def _worker_main(pipe: Connection, parent: int, settings: FuzzSettings) -> None:
    """Run jobs until the pipe closes."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    with suppress(EOFError):
        while True:
            index = pipe.recv()
            try:
                answer: Any = run_job(index, settings)
            except Exception as error:  # an error of the fuzz itself ends it
                error.add_note(f"in job {index}")
                answer = error
            pipe.send(answer)
