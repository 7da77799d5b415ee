"""Learn from one finished run how much of the predicted speed a machine's software has.

One number is fitted, so that the run's own time comes out: the one that its step hangs on.

    software    of computing, the part of the predicted speed that is reached
    launch      of a step in which the device mostly waits for the host: seconds that a kernel costs
    bandwidth   of a step that mostly moves memory: bytes/s

It is written into the user's ``calibrated.toml`` as an entry that says where it comes from; every
later plan for the device goes by it.
"""

from __future__ import annotations

import datetime
import statistics
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import tomli_w

from weft.config.errors import ConfigError, InvalidConfig
from weft.config.files import read_json, reading, replace_text
from weft.config.reader import read_job
from weft.config.schema import Job
from weft.estimate.cost import Hardware, Step, step_seconds
from weft.estimate.forecast import hardware_of, priced, step_of
from weft.estimate.trace import traces
from weft.monitor.jsonl import is_number, read_records
from weft.monitor.run_reader import WARMING, no_run
from weft.plan.devices import (
    CPU_DEVICE,
    GIB,
    BUILTIN_CLUSTERS,
    Device,
    load_clusters,
    read_clusters,
    user_cluster_files,
)
from weft.plan.resolve import Machine, Plan, resolve
from weft.plan.stages import format_columns

What = Literal["software", "launch", "bandwidth"]
LEAST = 3  # records of a start that are its steady state
HEAD = (
    "# What `weft plan --calibrate` has learnt; see docs/planner.md.  Remove an entry to forget it."
)
# A calibrated number is at most so many times away from the known one: more is another mistake.
FARTHEST = 1000.0


@dataclass(frozen=True)
class Run:
    """A finished run: ``seconds`` of a step without waiting for data, the median of ``records``;
    ``memory``: bytes of the fullest rank."""

    folder: Path
    job: Job
    plan: Plan
    machine: Machine
    seconds: float
    records: int
    memory: float
    torch: str


@dataclass(frozen=True)
class Calibration:
    """``what`` of the device named ``device`` is ``value``; seconds of a step before and after."""

    device: str
    what: What
    value: float
    run: Run
    before: float
    after: float
    memory: int

    @property
    def provenance(self) -> str:
        """Where the number comes from, in a line."""
        run = self.run
        today = datetime.datetime.now(datetime.UTC).date()
        ranks = f"{run.plan.world_size} rank{'s' * (run.plan.world_size > 1)}"
        return (
            f"{run.folder.absolute()} on {ranks}, {run.records} records, torch {run.torch}, {today}"
        )

    def to_dict(self) -> dict[str, object]:
        return {
            "device": self.device,
            self.what: self.value,
            "calibrated": self.provenance,
            "measured_step_seconds": self.run.seconds,
            "step_seconds_before": self.before,
            "step_seconds_after": self.after,
            "measured_memory_gib": self.run.memory / GIB,
            "memory_gib": self.memory / GIB,
        }


def planned_again(folder: Path, key: str) -> tuple[Job, Plan, Machine]:
    """The job of a run, its plan, made again, and the machine that it ran on.

    Args:
        key: of the command line, that named the folder.

    Raises:
        InvalidConfig: if it is no run, or there can be no plan of it any more.
    """
    if not all((folder / name).is_file() for name in ("job.toml", "environment.json", "plan.json")):
        raise InvalidConfig([no_run(folder, key)])
    job, _, problems = read_job(str(folder / "job.toml"))
    if problems:
        raise InvalidConfig(problems)
    environment, planned = (read_json(folder / f"{n}.json") for n in ("environment", "plan"))
    with reading(folder / "plan.json"):
        device: Literal["cpu", "cuda"] = "cuda" if planned["device"] == "cuda" else "cpu"
        here, world = planned["local_world_size"], planned["world_size"]
        if not all(type(size) is int and 0 < size < 1 << 20 for size in (here, world)):
            raise ValueError("local_world_size and world_size must be whole numbers")
    with reading(folder / "environment.json"):
        name = str(environment["devices"][0]) if device == "cuda" else CPU_DEVICE
        memory = int((environment.get("memory_gib") or 0.0) * GIB) or None  # older runs do not tell
    machine = Machine(
        device,
        devices=here,
        device_name=name,
        world_size=world,
        local_world_size=here,
        memory_bytes=memory,
    )
    if known := machine.spec:
        machine = replace(
            machine,
            memory_bytes=memory or int(known.memory_gib * GIB) or None,
            peer_access=known.link.peer_access,
            capability=known.capability,
        )
    return job, resolve(job, machine), machine


def read_run(folder: Path) -> Run:
    """A run by what lies in its folder.

    Raises:
        InvalidConfig: if it is none, or too short to tell.
    """

    def missing(rule: str, remedy: str) -> InvalidConfig:
        return InvalidConfig([ConfigError("--calibrate", str(folder), rule, remedy)])

    job, plan, machine = planned_again(folder, "--calibrate")
    needed = ("step_seconds", "data_seconds", "memory_peak_gib")
    records = [
        record
        for record in read_records(folder / "metrics.jsonl")
        if isinstance(record.get("time_breakdown"), dict) and all(is_number(record.get(n)) for n in needed)
    ]
    # Of the last start only: an earlier one may have had another layout.
    starts = [r["time_breakdown"].get("restarting", 0.0) for r in records]
    last = [r for r, start in zip(records, starts, strict=True) if start == starts[-1]][WARMING:]
    if len(last) < LEAST:
        rule = f"has {len(last)} records after the first {WARMING} of its last start"
        raise missing(rule, f"let it train until it has {LEAST}, or lower --monitor.log_interval")
    if machine.spec is None:
        rule = f"ran on {machine.device_name!r}, of which nothing is known"
        raise missing(rule, "add it to clusters.toml: benchmarks/device.py measures it")
    environment = read_json(folder / "environment.json")
    return Run(
        folder,
        job,
        plan,
        machine,
        statistics.median(r["step_seconds"] - r["data_seconds"] for r in last),
        len(last),
        max(r["memory_peak_gib"] for r in records) * GIB,
        str(environment.get("torch")),
    )


def calibrate(run: Run) -> Calibration:
    """Fit the number of the run's device that its step's time hangs on.

    Raises:
        InvalidConfig: if no value of it gives the measured time.
    """
    plan, job = run.plan, run.job
    of_ranks = traces(job, plan)
    device = run.machine.spec
    assert device is not None, "read_run has seen to it"
    seen = priced(job, plan, run.machine, device, of_ranks)
    before = seen.step_seconds
    assert before is not None
    step = step_of(job, plan, of_ranks, device)
    new = shipped(device.name)  # fitted anew, not on top of an older calibration
    what = hangs_on(step, hardware_of(plan, new))
    sign = 1 if what == "launch" else -1  # more of it takes longer

    def seconds(times: float) -> float:
        changed = replace(new, **{what: getattr(new, what) * times})
        return step_seconds(step, hardware_of(plan, changed)).total()

    times = solve(lambda more: seconds(more**sign), run.seconds, FARTHEST) ** sign
    found = seconds(times)
    if abs(found / run.seconds - 1) > 0.01:
        end = "at least" if found > run.seconds else "at most"
        rule = f"took {run.seconds:.4g} s a step, but with any {what} it is {end} {found:.4g} s"
        remedy = "another part of the machine is not as known: measure it with benchmarks/device.py"
        raise InvalidConfig([ConfigError("--calibrate", str(run.folder), rule, remedy)])
    value = getattr(new, what) * times
    return Calibration(device.name, what, value, run, before, found, seen.measured)


def shipped(name: str) -> Device:
    """What is known of a device without what was calibrated."""
    return read_clusters(BUILTIN_CLUSTERS, *(file for file in user_cluster_files()[:-1] if file.is_file()))[0][name]


def hangs_on(step: Step, hardware: Hardware) -> What:
    """What a step's time hangs on most, of what one run can tell."""
    seconds = step_seconds(step, hardware)
    if seconds["host"] > seconds.total() / 2:
        return "launch"
    device = hardware.device
    without = replace(hardware, device=replace(device, bandwidth=1e6 * device.bandwidth))
    moving = 1 - step_seconds(step, without)["compute"] / max(seconds["compute"], 1e-12)
    return "bandwidth" if moving > 0.5 else "software"


def solve(function: Callable[[float], float], wanted: float, farthest: float) -> float:
    """Where a rising function of a positive number has a value, or the nearest place to it."""
    low, high = 1 / farthest, farthest
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if function(middle) < wanted else (low, middle)
    return high


def save(found: Calibration) -> Path:
    """Write a calibration where every later plan finds it; returns the file."""
    path = user_cluster_files()[-1]
    entries = tomllib.loads(path.read_text("utf-8")) if path.is_file() else {}
    entry = {found.what: float(f"{found.value:.4g}"), "calibrated": found.provenance}
    entries.setdefault("devices", {})[found.device] = entry
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, f"{HEAD}\n{tomli_w.dumps(entries)}")
    load_clusters.cache_clear()
    return path


def told(found: Calibration, path: Path) -> str:
    """What was found, for people."""
    run = found.run
    tokens = run.plan.tokens_per_step / run.plan.world_size

    def row(name: str, seconds: float) -> list[str]:
        error = f"{seconds / run.seconds - 1:+.1%}"
        return [name, f"{seconds:.4g}", f"{tokens / seconds:,.0f}", error]

    rows = [
        ["measured", f"{run.seconds:.4g}", f"{tokens / run.seconds:,.0f}", ""],
        row("predicted before", found.before),
        row("predicted now", found.after),
    ]
    unit = {"software": "", "launch": " s a kernel", "bandwidth": " bytes/s"}[found.what]
    head = ["", "s a step", "tokens/s a device", "error"]
    memory = f"{run.memory / GIB:.2f} GiB measured, {found.memory / GIB:.2f} predicted"
    return "\n".join(
        [
            f"{found.device}: {found.what} = {found.value:.4g}{unit}, from {found.provenance}",
            "",
            *format_columns(head, rows, left={0}),
            "",
            f"memory of the fullest rank: {memory} ({found.memory / run.memory - 1:+.1%})",
            f"written to {path}; plans for this device go by it until it is removed there",
        ]
    )
