"""Verify random jobs against one process.

    python -m tests.fuzz 200 [--seed S] [--minutes M] [--ranks R] [--steps N] [--log FILE] [--json]
    python -m tests.fuzz 100 --pipeline.schedule ZBVZeroBubble

Keys apply to every job.  The exit status is 1 if a job failed, crashed or timed out.

`weft.verification.verify.verify` runs every job of `tests.job_space` as overrides of a recipe, so
one command reproduces each failure.  Two jobs run at once, each in a process that was forked after
all modules were imported.

A failure is shrunk by bisection: half of the overrides return to their defaults, then a quarter,
down to single ones, as long as the job fails in the same way (`failure_kind`).  Ranks and steps
shrink, too.

Each result is a line of a log.  A job that is in the log with the same overrides does not run
again, so the same command resumes, and a larger count adds jobs.  The log is
``runs/verify-fuzz-SEED.jsonl`` by default.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import combinations
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from tests.job_sizes import AXES
from tests.job_space import RECIPE, RandomJob, draw_job, list_goals, technique_name
from weft.cli.command_parser import CommandParser
from weft.cli.option_values import parse_integer
from weft.config.errors import ConfigErrors, InvalidConfig, WeftError
from weft.config.exit_statuses import FAILED, INTERRUPTED, USAGE_ERROR
from weft.monitor.process import die_with_parent
from weft.monitor.terminal import quiet_console
from weft.parallel.float8 import import_quietly
from weft.planning.resolve import MAX_CPU_RANKS
from weft.supervision.local_ranks import RanksFailed, RanksTimedOut, preload_modules
from weft.verification.verify import read_recipe, verify
from weft.verification.verify_measure import Corruption

TIMEOUT, COMPILE_TIMEOUT = 120.0, 600.0  # seconds for the ranks of a job, without and with compile
NUM_PROCESSES = 2
SHRINK_RUNS = 60  # maximum number of jobs to shrink one failure

FAILURE_STATUSES = ("failed", "crashed", "timed out")
# Phrases of the reasons of `weft.verification.verify`.
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
    corrupt: Corruption | None = None  # for tests; see `weft.verification.verify.verify`

    def draw(self, index: int) -> RandomJob:
        """Draw the job of an index."""
        return draw_job(self.seed, index, self.pinned, self.ranks, self.steps)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job."""

    status: str  # agreed, failed (the layout differs), crashed, timed out or refused
    reason: str = ""
    seconds: float = 0.0
    command: str = ""  # reproduces the shrunk failure
    runs: int = 0  # jobs run to shrink it
    overflows: int = 0  # steps computed again, because rows of experts did not fit


@dataclass(frozen=True)
class FuzzResult:
    """A job and its outcome: a line of the log."""

    job: RandomJob
    outcome: Outcome


def verify_job(job: RandomJob, corrupt: Corruption | None) -> Outcome:
    """Verify a job as ``weft verify`` does."""
    started = time.monotonic()
    status, reason, overflows = "agreed", "", 0
    try:
        report = verify(
            read_recipe(RECIPE, list(job.overrides.items())),
            ranks=job.ranks,
            steps=job.steps,
            keep=list(job.overrides),
            resume=list(job.resume.items()),
            corrupt=corrupt,
            timeout=COMPILE_TIMEOUT if job.overrides.get("compile.enable") == "true" else TIMEOUT,
        )
        if not report.holds:
            status = "failed"
        reason = report.reason
        overflows = report.overflows + (report.resumed.overflows if report.resumed else 0)
    except InvalidConfig as error:
        status, reason = "refused", str(error)
    except RanksTimedOut as error:
        status, reason = "timed out", str(error)
    except (RanksFailed, WeftError) as error:
        status, reason = "crashed", str(error)
    seconds = round(time.monotonic() - started, 2)
    return Outcome(status, reason, seconds, overflows=overflows)


# --------------------------------------------------------------------------- shrinking


def failure_kind(outcome: Outcome) -> tuple[str, str]:
    """Return a failure's status and first difference, without names and numbers."""
    if outcome.status != "failed":
        first_line = outcome.reason.partition("\n")[0]
        return outcome.status, re.sub(r"\W*\d+\S*", "", first_line)[:60]
    return outcome.status, next((p for p in FIRST_DIFFERENCES if p in outcome.reason), "")


def shrink_failure(job: RandomJob, failure: Outcome, corrupt: Corruption | None) -> Outcome:
    """Find few overrides, ranks and steps with which a job fails in the same way."""
    best, runs = failure, 0
    for simplify in simplifications(job):
        simpler = simplify(job)
        if simpler == job or runs >= SHRINK_RUNS:
            continue
        outcome = verify_job(simpler, corrupt)
        runs += outcome.status != "refused"
        if failure_kind(outcome) == failure_kind(failure):
            job, best = simpler, outcome
    return replace(best, command=job.command, runs=runs)


def simplifications(job: RandomJob) -> Iterator[Callable[[RandomJob], RandomJob]]:
    """Yield functions that simplify a job, if possible; the largest change first."""
    yield lambda job: replace(job, resume={})
    for steps in range(1, job.steps):
        yield partial(_limit_steps, steps)
    for keys in _chunks(list(job.overrides)):
        yield partial(_drop_overrides, keys)
    for keys in _chunks(list(job.resume)):
        yield partial(_drop_resume_keys, keys)
    for axis in AXES:
        yield partial(_limit_degree, f"parallel.{axis}")


def _chunks(keys: list[str]) -> Iterator[list[str]]:
    """Yield the halves of a list, then its quarters, and so on."""
    size = len(keys)
    while size > 1:
        size = -(-size // 2)
        yield from (keys[start : start + size] for start in range(0, len(keys), size))


def _limit_steps(steps: int, job: RandomJob) -> RandomJob:
    return replace(job, steps=min(steps, job.steps))


def _drop_overrides(keys: Sequence[str], job: RandomJob) -> RandomJob:
    return replace(job, overrides={k: v for k, v in job.overrides.items() if k not in keys})


def _drop_resume_keys(keys: Sequence[str], job: RandomJob) -> RandomJob:
    return replace(job, resume={k: v for k, v in job.resume.items() if k not in keys})


def _limit_degree(key: str, job: RandomJob) -> RandomJob:
    is_large = int(job.overrides.get(key, 1)) > 2
    return replace(job, overrides=job.overrides | {key: "2"}) if is_large else job


# --------------------------------------------------------------------------- many jobs


def run_job(index: int, settings: FuzzSettings) -> FuzzResult:
    """Draw and verify the job of an index; shrink it if it fails."""
    job = settings.draw(index)
    outcome = verify_job(job, settings.corrupt)
    if outcome.status in FAILURE_STATUSES:
        outcome = shrink_failure(job, outcome, settings.corrupt)
    return FuzzResult(job, outcome)


def run_jobs(indices: Iterator[int], settings: FuzzSettings) -> Iterator[FuzzResult]:
    """Run the jobs in parallel processes and yield each result as it arrives."""
    preload_modules()
    import_quietly("torch._inductor.compile_fx")
    with suppress(ImportError):  # torchao is an extra
        import_quietly("torchao.float8")
    gc.freeze()  # else a collection in a rank copies every page of these modules
    running: dict[Connection, tuple[int, ForkProcess]] = {}
    try:
        while True:
            while len(running) < NUM_PROCESSES and (index := next(indices, None)) is not None:
                _start(index, settings, running)
            if not running:
                return
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                try:
                    answer = pipe.recv()
                except EOFError:
                    answer = RuntimeError(f"the process of job {running[pipe][0]} died")
                _stop(pipe, running.pop(pipe)[1])
                if isinstance(answer, Exception):
                    raise answer
                yield answer
    finally:
        gc.unfreeze()
        for pipe, (_, process) in running.items():
            _stop(pipe, process)


def _start(
    index: int, settings: FuzzSettings, running: dict[Connection, tuple[int, ForkProcess]]
) -> None:
    """Fork a process that runs a job, and add it to ``running``."""
    context = get_context("fork")
    # Python's handlers after a fork swallow a KeyboardInterrupt, so Ctrl-C waits.  Blocking the
    # signal in this thread would not suffice: another thread would receive it.
    received: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        pipe, child_pipe = context.Pipe(duplex=False)
        arguments = (child_pipe, os.getpid(), index, settings)
        process = context.Process(target=_send_result, args=arguments)
        process.start()
        child_pipe.close()
        running[pipe] = index, process
    finally:
        signal.signal(signal.SIGINT, previous)
    if received:
        raise KeyboardInterrupt


def _stop(pipe: Connection, process: ForkProcess) -> None:
    """Kill the process of a job and, with it, the ranks that it has forked."""
    process.kill()
    process.join()
    pipe.close()


def _send_result(pipe: Connection, parent: int, index: int, settings: FuzzSettings) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    try:
        answer: Any = run_job(index, settings)
    except Exception as error:  # an error of the fuzz itself ends it
        error.add_note(f"in job {index}")
        answer = error
    pipe.send(answer)


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
    settings.draw(0)  # raise the errors of pinned keys before any process starts
    logged = [result for result in read_log(log_path, settings) if result.job.index < count]
    done = {result.job.index: result for result in logged}
    if done:
        log(f"{len(done)} of {count} jobs are in {log_path}")
    started, interrupted = time.monotonic(), False
    deadline = started + minutes * 60 if minutes else float("inf")
    missing = [index for index in range(count) if index not in done]
    num_logged = len(done)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log_path.open("a", encoding="utf-8") as file:
            due = (index for index in missing if time.monotonic() < deadline)
            for result in run_jobs(due, settings):
                done[result.job.index] = result
                file.write(json.dumps(asdict(result)) + "\n")
                file.flush()
                log(format_result(result))
    except KeyboardInterrupt:
        interrupted = True
    minutes_run = (time.monotonic() - started) / 60
    summary = summarize(count, [done[index] for index in sorted(done)])
    summary |= {
        "seed": settings.seed,
        "log": str(log_path),
        "interrupted": interrupted,
        "jobs_per_minute": round((len(done) - num_logged) / minutes_run, 1),
    }
    log(format_summary(summary))
    return summary


def read_log(path: Path, settings: FuzzSettings) -> list[FuzzResult]:
    """Read the results of a log whose jobs these settings still draw.

    Settings, keys and rules may have changed since the log was written.
    """
    results = []
    for text in path.read_text("utf-8", "replace").splitlines() if path.exists() else []:
        try:
            record = json.loads(text)
            job = settings.draw(record["job"]["index"])
            outcome = Outcome(**record["outcome"])
        except (ValueError, LookupError, TypeError, RecursionError):
            continue  # a killed process left an incomplete line
        if json.loads(json.dumps(asdict(job))) == record["job"]:
            results.append(FuzzResult(job, outcome))
    return results


def summarize(count: int, done: Sequence[FuzzResult]) -> dict[str, Any]:
    """Count outcomes, pairs of techniques, and the rejections while drawing jobs."""
    statuses = Counter(result.outcome.status for result in done)
    refused = {
        (refusal["key"], *sorted(refusal["with"]), refusal["rule"])
        for result in done
        for refusal in result.job.refusals
    }
    pairs: set[tuple[str, str]] = set()
    for result in done:
        names = {technique_name(key, text) for key, text in result.job.overrides.items()}
        pairs |= set(combinations(sorted(names), 2))
    goals = list_goals(0)
    return {
        "jobs": count,
        "missing": count - len(done),
        **{
            status.replace(" ", "_"): statuses[status]
            for status in ("agreed", *FAILURE_STATUSES, "refused")
        },
        "resumed": sum(bool(result.job.resume) for result in done),
        "overflowed": sum(result.outcome.overflows > 0 for result in done),
        "pairs": sum(tuple(sorted(pair)) in pairs for pair in goals),
        "possible_pairs": len(goals),
        "refusals": len(refused),
        "failures": [
            {
                "index": result.job.index,
                "status": result.outcome.status,
                "reason": result.outcome.reason,
                "command": result.outcome.command,
            }
            for result in done
            if result.outcome.status in FAILURE_STATUSES
        ],
    }


def format_result(result: FuzzResult) -> str:
    """Format a job as one line; a failure also has its reason and command."""
    job, outcome = result.job, result.outcome
    text = f"{job.index:>5}  {outcome.status:<9} {outcome.seconds:>6.1f} s  {job.name}"
    if outcome.status in FAILURE_STATUSES:
        text += f"\n       {outcome.reason}\n       reproduce: {outcome.command}"
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
        f"{summary['seed']}: {counts}; {summary['resumed']} resumed in another layout, "
        f"{summary['overflowed']} overflowed the room for rows of experts",
        f"{summary['pairs']} of {summary['possible_pairs']} pairs of techniques; "
        f"{summary['refusals']} refusals; {summary['jobs_per_minute']} jobs per minute",
    ]
    lines += [f"{failure['status']}: {failure['command']}" for failure in summary["failures"]]
    if summary["missing"]:
        lines.append(f"{summary['missing']} jobs are missing: run the same command to resume")
    return "\n".join(lines)


# --------------------------------------------------------------------------- command


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify random jobs; return the exit status."""
    parser = CommandParser(takes_keys=True, prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("count", metavar="N", help="number of jobs")
    parser.add_argument("--seed", default="0", help="seed of the jobs (default: 0)")
    parser.add_argument("--minutes", metavar="M", help="start no job after M minutes")
    parser.add_argument("--ranks", default="8", help="maximum number of ranks (default: 8)")
    parser.add_argument("--steps", default="2", help="optimizer steps (default: 2)")
    parser.add_argument("--log", type=Path, metavar="FILE", help="results, one line per job")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    errors = ConfigErrors()
    errors += options.errors
    seed = parse_integer("--seed", options.seed, 0, 10**9 - 1, errors)
    settings = FuzzSettings(
        seed,
        parse_integer("--ranks", options.ranks, 2, MAX_CPU_RANKS, errors),
        parse_integer("--steps", options.steps, 1, 1000, errors),
        dict(options.overrides),
    )
    count = parse_integer("N", options.count, 1, 10**6, errors)
    minutes = parse_integer("--minutes", options.minutes or "1", 1, 10**5, errors)
    errors.raise_any()
    log = partial(quiet_console(sys.stdout, quiet=options.json).print, soft_wrap=True)
    path = options.log or Path("runs") / f"verify-fuzz-{seed}.jsonl"
    result = fuzz(count, settings, path, minutes if options.minutes else 0, log)
    if options.json:
        print(json.dumps(result, indent=2))
    if result["interrupted"]:
        return INTERRUPTED
    return FAILED if any(result[status.replace(" ", "_")] for status in FAILURE_STATUSES) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WeftError as error:
        print(error, file=sys.stderr)
        sys.exit(USAGE_ERROR)
