"""Measure this machine by short runs, and write one page: the GPU check.

    python -m benchmarks.gpu_check [--run.dir DIRECTORY] [--run.device cpu]     in a clone

Each stage is a command that a user could type, in its own processes: ``weft plan`` predicts the
run, and ``weft train`` runs it.  A stage that fails, hangs or is refused does not affect the
others.  The page is written after every stage, so that an interrupted check leaves its results.
docs/gpu-check.md explains stages and page.  The exit status is 0 if nothing failed, 1 if a stage
did, 2 after a mistake in the arguments, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_check_page import build_document, format_number, format_page
from benchmarks.gpu_check_results import (
    Row,
    StageResult,
    compare_losses,
    device_rows,
    number,
    read_losses,
)
from benchmarks.gpu_check_stages import (
    GPU_CHECK,
    MEMORY_MARGIN,
    Program,
    Schedule,
    Stage,
    count_ranks,
    parse_keys,
    resolve_keys,
)
from weft.comparison.experiment import failure_reason
from weft.config.errors import InvalidConfig, WeftError
from weft.config.exit_statuses import FAILED, INTERRUPTED, USAGE_ERROR
from weft.config.files import expand_path, replace_text, write_json
from weft.config.locks import unwritable_error
from weft.config.reader import read_job
from weft.config.schema import Job
from weft.config.schema import replace as changed
from weft.doctor.device_benchmark import last_line
from weft.doctor.doctor import collect_job_facts, count_visible_gpus
from weft.doctor.node_checks import run_checks
from weft.doctor.node_facts import Directory
from weft.monitor.process import PYTHON, die_with_parent
from weft.planning.devices import GIB
from weft.training.machine import detect_machine, explain_unused_gpus

MIN_STAGE_SECONDS = 30.0  # a stage does not start with less time left
PLAN_SECONDS = 90.0
# A stage that is killed has no result.  So one that takes longer than expected may end, and the
# last ones, which matter least, are skipped.
KILL_FACTOR = 2
CPU_SLACK = 10  # a CPU rehearses the stages, in this multiple of their time
RELEASE_SECONDS = 3.0  # for killed processes to release the memory of their GPUs
CPU_RANKS = 2
RUN_BYTES = 1 << 30  # free disk for a run without checkpoints
SAVED_BYTES = 4 * 12  # per parameter: two runs, and each has two checkpoints while it saves
LOG_LINES = 15  # of the output of a failed stage, for the page
CLONE = Path(__file__).parent.parent


class StageSkipped(Exception):
    """The stage cannot show anything on this machine; the message is the reason."""


@dataclass(frozen=True)
class GPUCheck:
    """A GPU check in progress.

    Attributes:
        directory: temporary directory of all runs.
        device: cpu or cuda.
        num_devices: GPUs, or ranks on a CPU.
        disk: measured speed of the disk of the directory.
        deadline: time of `time.monotonic` at which the check ends.
        sizes: the model by number of ranks and candidates, so that runs can be compared.
        losses: of each step, by stage.
    """

    directory: Path
    device: str
    num_devices: int
    disk: Directory
    deadline: float
    sizes: dict[tuple[int, tuple[str, ...]], str] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)

    def remaining(self) -> float:
        """Return the seconds until the check ends."""
        return self.deadline - time.monotonic()


def run_gpu_check(job: Job, command: str, schedule: Schedule) -> int:
    """Run the check, print its progress, and write the page; return the exit status.

    Args:
        job: has the device, and in ``run.dir`` the directory for the page and for temporary runs;
            auto: the working directory.
        command: the user's command, for the page.
        schedule: stages and time limit.

    Raises:
        WeftError: if the directory is not writable, or PyTorch cannot use the GPUs.
    """
    start = time.monotonic()
    if job.run.device == "auto" and (reason := explain_unused_gpus()):
        raise WeftError(f"{reason}. --run.device cpu runs the stages on the CPU, to test them")
    root = expand_path("" if job.run.dir == "auto" else job.run.dir).absolute()
    page = root / f"{schedule.name}-{time.strftime('%Y%m%d-%H%M%S')}.md"
    results: list[StageResult] = []
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"weft-{schedule.name}-", dir=root) as directory:
            print("checking the machine", flush=True)
            local = changed(job, run={"dir": directory, "nodes": 1})
            facts = collect_job_facts(local, full=True, with_nodes=False)
            findings = run_checks(facts)
            bad = "; ".join(f.observation for f in findings if f.severity == "bad")
            machine = StageResult("machine", "failed" if bad else "passed", bad)
            rows, spent = tuple(device_rows(facts)), time.monotonic() - start
            results.append(replace(machine, rows=rows, seconds=spent))
            gpus = count_visible_gpus(facts)
            devices = gpus if facts.device == "cuda" else min(facts.usable, CPU_RANKS)
            slack = 1 if facts.device == "cuda" else CPU_SLACK
            disk, deadline = facts.directories[0], start + slack * schedule.seconds
            check = GPUCheck(Path(directory), facts.device, devices, disk, deadline)
            for result in run_stages(check, schedule.stages):
                results.append(result)
                spent = time.monotonic() - start
                document = build_document(
                    command, facts, findings, results, spent, schedule.effects
                )
                write_json(page.with_suffix(".json"), document, indent=2)
                replace_text(page, format_page(document))
    except OSError as error:
        raise unwritable_error(root, error) from error
    print(f"\npage: {page}\ndata: {page.with_suffix('.json')}")
    statuses = {result.status for result in results}
    if "interrupted" in statuses:
        return INTERRUPTED
    return FAILED if statuses & {"failed", "timed out"} else 0


def run_stages(check: GPUCheck, stages: Sequence[Stage | Program]) -> Iterator[StageResult]:
    """Yield the result of each stage; Ctrl-C ends the running one and all later ones."""
    is_interrupted = False
    for stage in stages:
        start, name = time.monotonic(), stage.name
        slack = 1 if check.device == "cuda" else CPU_SLACK
        if is_interrupted:
            yield StageResult(name, "not run", "interrupted")
            continue
        print(f"running: {name}", flush=True)
        try:
            if check.remaining() < MIN_STAGE_SECONDS:
                raise StageSkipped("no time left")
            limit = min(check.remaining(), KILL_FACTOR * slack * stage.seconds)
            if isinstance(stage, Program):
                result = run_program(check, stage, limit)
            else:
                result = run_stage(check, stage, limit)
        except StageSkipped as reason:
            result = StageResult(name, "skipped", str(reason))
        except (WeftError, OSError) as error:
            result = StageResult(name, "failed", str(error))
        except KeyboardInterrupt:
            is_interrupted = True
            result = StageResult(name, "interrupted")
        result = replace(
            result,
            seconds=time.monotonic() - start,
            reason=hide_paths(result.reason, check),
            output=hide_paths(result.output, check),
        )
        text = result.reason
        if not text and result.rows:
            text = f"{result.rows[0].quantity} {format_number(result.rows[0].measured)}"
        print(f"  {result.status}{f': {text}' * bool(text)}", flush=True)
        yield result


def hide_paths(text: str, check: GPUCheck) -> str:
    """Return a text without the path of the temporary directory."""
    return text.replace(str(check.directory), "$DIRECTORY")


# --------------------------------------------------------------------------- stages


def run_program(check: GPUCheck, stage: Program, limit: float) -> StageResult:
    """Run another program than weft.

    Raises:
        StageSkipped: if this machine cannot run it.
    """
    words = stage.words if check.device == "cuda" else stage.cpu_words
    if not words:
        raise StageSkipped("needs a GPU")
    require_devices(check, stage)
    for package in stage.packages:
        if importlib.util.find_spec(package) is None:
            raise StageSkipped(f"needs {package}: {stage.install}")
    command = words.format(ranks=count_ranks(stage, check.num_devices)).split()
    log = check.directory / f"{file_name(stage.name)}.log"
    status = run_command([sys.executable, *command], log, limit, cwd=CLONE)
    output = log.read_text("utf-8", "replace")
    failures = dict.fromkeys(re.findall(r"\b(?:FAILED|ERROR) tests/gpu/(\S+)", output))
    rows = stage.read(output)
    result = judge(stage.name, status, rows, output, limit, "; ".join(failures))
    size = stage.size if check.device == "cuda" else ""
    return replace(result, size=size, command=shlex.join(["python", *command]))


def file_name(stage: str) -> str:
    """Return the name of a stage's files."""
    return re.sub(r"\W+", "-", stage)


def require_devices(check: GPUCheck, stage: Stage | Program) -> None:
    """Raise `StageSkipped` if the machine has fewer devices than the stage needs."""
    if check.num_devices < stage.min_devices:
        unit = "GPUs" if check.device == "cuda" else "cores"
        raise StageSkipped(
            f"needs {stage.min_devices} {unit}; this machine has {check.num_devices}"
        )


def run_stage(check: GPUCheck, stage: Stage, limit: float) -> StageResult:
    """Plan and run a stage.

    Raises:
        StageSkipped: if this machine cannot run it.
        WeftError: if ``weft plan`` does not end, or prints no plan.
    """
    if stage.needs_gpu and check.device == "cpu":
        raise StageSkipped("needs a GPU")
    require_devices(check, stage)
    start = time.monotonic()
    size, keys, plan = plan_stage(check, stage)
    saved = 0.0 if stage.num_records else SAVED_BYTES * (number(plan, "num_params") or 0.0)
    needed, free = RUN_BYTES + saved, shutil.disk_usage(check.directory).free
    if free < needed:
        raise StageSkipped(f"needs {needed / GIB:.1f} GiB of disk; {free / GIB:.1f} GiB are free")
    run_dir, limit = Path(keys["run.dir"]), max(limit - (time.monotonic() - start), 0.0)
    metrics, log = run_dir / "metrics.jsonl", run_dir.with_suffix(".log")
    words = weft_command("train", stage.recipe, keys)
    status = run_command(
        [*PYTHON, *words], log, limit, lambda: 0 < stage.num_records <= count_lines(metrics)
    )
    rows: list[Row] = []
    with suppress(WeftError):  # without a readable run; `judge` reports it
        rows = stage.read(run_dir, plan, check.disk)
        check.losses[stage.name] = read_losses(run_dir)
    if not stage.run_name:
        shutil.rmtree(run_dir, ignore_errors=True)
    if status is not None and status == stage.exit_status:
        status = 0
    result = judge(stage.name, status, rows, log.read_text("utf-8", "replace"), limit)
    if stage.reference and result.status == "passed":
        result = compare_with_reference(check, stage, result)
    own_keys = " ".join(f"{key}={keys[key]}" for key in parse_keys(stage.keys))
    return replace(result, size=size, keys=own_keys, command=hide_paths(shlex.join(words), check))


def compare_with_reference(check: GPUCheck, stage: Stage, result: StageResult) -> StageResult:
    """Add the difference of the loss from the reference; a larger one than allowed has failed."""
    expected, losses = (check.losses.get(name, []) for name in (stage.reference, stage.name))
    if not expected:
        reason = f"there is no loss of {stage.reference} to compare with"
        return replace(result, status="failed", reason=reason)
    difference = compare_losses(losses, expected, stage.window)
    quantity = f"largest relative difference of the loss from {stage.reference}"
    rows = (*result.rows, Row(quantity, difference, stage.tolerance))
    if difference is None or difference > stage.tolerance:
        text = "is unknown" if difference is None else f"is {difference:.3g}"
        reason = f"{quantity} {text}; the limit is {stage.tolerance:g}"
        return replace(result, status="failed", reason=reason, rows=rows)
    return replace(result, rows=rows)


def plan_stage(check: GPUCheck, stage: Stage) -> tuple[str, dict[str, str], dict[str, Any]]:
    """Return the first size that fits, all keys of the run, and its plan.

    Raises:
        StageSkipped: if no size fits, or the plan is refused.
        WeftError: if ``weft plan`` does not end, or prints no plan.
    """
    ranks, directory = count_ranks(stage, check.num_devices), check.directory
    candidates = stage.sizes if check.device == "cuda" else stage.cpu_sizes
    group, log, reason = (ranks, candidates), directory / "plan.log", ""
    paths = {
        "run.dir": str(directory / (stage.run_name or file_name(stage.name))),
        "run.device": check.device,
        "data.cache_dir": str(directory / "data"),
        "compile.cache_dir": str(directory / "compiled"),
    }
    for size in [check.sizes[group]] if group in check.sizes else candidates:
        keys = paths | resolve_keys(stage, size, ranks)
        command = [*PYTHON, *weft_command("plan", stage.recipe, keys), "--json"]
        status = run_command(command, log, min(PLAN_SECONDS, check.remaining()))
        text = log.read_text("utf-8", "replace")
        if status is None:
            raise WeftError(f"weft plan did not end in time: {last_line(text)}")
        if status != 0:
            reason = failure_reason(status, text)
            continue
        plan = parse_plan(text)
        if plan.get("float8_emulated") and check.device == "cuda":
            is_mx = keys.get("precision.float8") == "mxfp8"
            what = "MXFP8: compute capability 10" if is_mx else "float8: 8.9, or MI300"
            raise StageSkipped(f"needs a GPU with {what}")
        needed, capacity = number(plan, "peak_memory_gib"), number(plan, "capacity_gib")
        if needed is None or capacity is None or needed <= (1 - MEMORY_MARGIN) * capacity:
            check.sizes[group] = size
            return size, keys, plan
        reason = f"needs {needed:.1f} GiB per device and a margin of {MEMORY_MARGIN:.0%}; "
        reason += f"the device has {capacity:.1f} GiB"
    raise StageSkipped(reason)


def parse_plan(text: str) -> dict[str, Any]:
    """Return the object that ``weft plan --json`` printed, among any warnings.

    Raises:
        WeftError: if there is none.
    """
    if start := re.search(r"^\{$", text, re.MULTILINE):
        with suppress(ValueError, RecursionError):
            plan: dict[str, Any] = json.JSONDecoder().raw_decode(text, start.start())[0]
            return plan
    raise WeftError(f"weft plan printed no plan: {last_line(text)}")


def judge(
    name: str, status: int | None, rows: Sequence[Row], output: str, limit: float, reason: str = ""
) -> StageResult:
    """Return the result of a stage whose command has ended.

    Args:
        name: name of the stage.
        status: exit status; None: the command was killed at the limit.
        rows: the results; a stage without a value in the first row has failed.
        output: output of the command.
        limit: seconds that the command had.
        reason: of a failure; "": from the output.
    """
    outcome = "failed"
    if status is None:
        outcome, reason = "timed out", f"not done after {limit:.0f} s: {last_line(output)}"
    elif status != 0:
        reason = reason or failure_reason(status, output)
    elif not rows or rows[0].measured is None:
        reason = f"no {rows[0].quantity} was measured" if rows else "nothing was measured"
    else:
        return StageResult(name, "passed", rows=tuple(rows))
    tail = "\n".join(output.splitlines()[-LOG_LINES:])
    return StageResult(name, outcome, reason, rows=tuple(rows), output=tail)


# --------------------------------------------------------------------------- processes


def weft_command(name: str, recipe: str, keys: Mapping[str, str]) -> list[str]:
    """Return the words of a ``weft`` command with overrides of a recipe."""
    return ["weft", name, recipe, *(f"--{key}={value}" for key, value in keys.items())]


def run_command(
    command: Sequence[str],
    log: Path,
    limit: float,
    is_done: Callable[[], bool] = lambda: False,
    cwd: Path | None = None,
) -> int | None:
    """Run a command, and kill all of its processes at the end.

    Args:
        command: its words.
        log: file for its output.
        limit: seconds until it is killed.
        is_done: returns True once the command may be killed, because it has done enough.
        cwd: working directory; None: that of this process.

    Returns:
        The exit status; 0 if it had done enough; None if it was killed at the limit.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=os.environ | clone_environment(),
            start_new_session=True,  # Ctrl-C reaches only this process, which kills the others
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    deadline = time.monotonic() + limit
    try:
        while process.poll() is None:
            if is_done():
                return 0
            if time.monotonic() > deadline:
                return None
            time.sleep(0.1)
        return process.returncode
    finally:
        end_group(process)


def clone_environment() -> dict[str, str]:
    """Return the variable with which other processes find weft and the texts in this clone."""
    others = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys((str(CLONE), *others)))}


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the processes of a session, and wait until they have ended."""
    deadline = time.monotonic() + RELEASE_SECONDS
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        while time.monotonic() < deadline:  # a process in a driver may take long
            os.killpg(process.pid, 0)
            time.sleep(0.05)
    process.wait()


def count_lines(path: Path) -> int:
    """Return the number of complete lines of a file; 0 if there is none."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def main(schedule: Schedule = GPU_CHECK, description: str = __doc__ or "") -> int:
    """Run a check as the command line says; return the exit status."""
    module = f"benchmarks.{schedule.name.replace('-', '_')}"
    parser = argparse.ArgumentParser(module, description=description.partition("\n")[0])
    text = "directory for the page and for the temporary runs; default: the working directory"
    parser.add_argument("--run.dir", metavar="DIRECTORY", help=text)
    text = (
        "cpu: run the stages that can run on a CPU, to test them; default: cuda if there is a GPU"
    )
    parser.add_argument("--run.device", metavar="DEVICE", help=text)
    options = vars(parser.parse_args())
    command = shlex.join(["python", "-m", module, *sys.argv[1:]])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ |= clone_environment()  # for the checks of weft doctor
    try:
        keys = [(key, value) for key, value in options.items() if value is not None]
        job, _, errors = read_job("demo", keys)
        errors.raise_any()
        detect_machine(job.run)  # raises if the machine has no such device
        return run_gpu_check(job, command, schedule)
    except InvalidConfig as error:
        print(error, file=sys.stderr)
        return USAGE_ERROR
    except WeftError as error:
        print(error, file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
