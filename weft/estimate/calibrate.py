"""Calibrate a device's speed from one finished run.

Calibration fits one number, the one that dominates the step time:

    software    fraction of the predicted compute speed that the software reaches
    launch      seconds per kernel, if the device mostly waits for the host
    bandwidth   bytes/s, if the step mostly moves memory

It writes the number and its source to the user's ``calibrated.toml``.  Later plans for the device
use it.
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
from weft.config.formatting import format_columns
from weft.config.reader import read_job
from weft.config.schema import Job
from weft.estimate.cost import Hardware, Step, build_hardware, step_seconds
from weft.estimate.forecast import price_traces
from weft.estimate.trace import trace_ranks
from weft.estimate.trace_to_cost import build_step
from weft.planning.devices import (
    BUILTIN_CLUSTERS,
    CPU_DEVICE,
    GIB,
    Device,
    find_device,
    load_clusters,
    read_clusters,
    user_cluster_files,
)
from weft.planning.plan import Machine, Plan
from weft.planning.resolve import resolve
from weft.records.jsonl_reader import is_number, read_records
from weft.records.run_reader import WARMUP_RECORDS, run_dir_error

DeviceParameter = Literal["software", "launch", "bandwidth"]
MIN_RECORDS = 3  # steady-state records since the last start
MAX_MEMORY_GIB = 1 << 20  # of a device or host, in an environment.json
FILE_HEADER = (
    "# Written by `weft plan --calibrate`; see docs/planner.md.  Remove an entry to undo it."
)
# Largest factor between the calibrated and the known number; more indicates another error.
MAX_FACTOR = 1000.0


@dataclass(frozen=True)
class FinishedRun:
    """Measurements of a finished run.

    ``seconds``: of a step without waiting for data, the median of ``records``; ``memory_bytes``: of
    the fullest rank.
    """

    run_dir: Path
    plan: Plan
    machine: Machine
    seconds: float
    records: int
    memory_bytes: float
    torch: str


@dataclass(frozen=True)
class Calibration:
    """A fitted ``parameter`` of a device; predicted seconds before and after."""

    device: str
    parameter: DeviceParameter
    value: float
    run: FinishedRun
    seconds_before: float
    seconds_after: float
    predicted_memory_bytes: int

    @property
    def provenance(self) -> str:
        """Source of the number, in one line."""
        run = self.run
        today = datetime.datetime.now(datetime.UTC).date()
        ranks = f"{run.plan.world_size} rank{'s' * (run.plan.world_size > 1)}"
        run_dir = run.run_dir.absolute()
        return f"{run_dir} on {ranks}, {run.records} records, torch {run.torch}, {today}"

    def to_dict(self) -> dict[str, object]:
        """Return the calibration as JSON types."""
        return {
            "device": self.device,
            self.parameter: self.value,
            "calibrated": self.provenance,
            "measured_step_seconds": self.run.seconds,
            "step_seconds_before": self.seconds_before,
            "step_seconds_after": self.seconds_after,
            "measured_memory_gib": self.run.memory_bytes / GIB,
            "memory_gib": self.predicted_memory_bytes / GIB,
        }


def replan_run(run_dir: Path, key: str) -> tuple[Job, Plan, Machine]:
    """Return the job of a run, a new plan of it, and its machine.

    Args:
        run_dir: directory of a finished run.
        key: of the command line that named the directory, for errors.

    Raises:
        InvalidConfig: if it is not a run, or its job is no longer valid.
    """
    if not all(
        (run_dir / name).is_file() for name in ("job.toml", "environment.json", "plan.json")
    ):
        raise InvalidConfig([run_dir_error(run_dir, key)])
    job, _, errors = read_job(str(run_dir / "job.toml"))
    errors.raise_any()
    environment, saved_plan = (read_json(run_dir / f"{n}.json") for n in ("environment", "plan"))
    with reading(run_dir / "plan.json"):
        device = str(saved_plan["device"])
        local_world_size, world = saved_plan["local_world_size"], saved_plan["world_size"]
        if not all(type(size) is int and 0 < size < 1 << 20 for size in (local_world_size, world)):
            raise ValueError("local_world_size and world_size must be positive integers")
    with reading(run_dir / "environment.json"):
        name = CPU_DEVICE if device == "cpu" else str(environment["devices"][0])
        memory_gib = environment.get("memory_gib") or 0.0  # None if it was unknown
        if not (is_number(memory_gib) and 0 <= memory_gib <= MAX_MEMORY_GIB):
            raise ValueError(f"memory_gib must be a number from 0 to {MAX_MEMORY_GIB}")
        memory = int(memory_gib * GIB) or None
    machine = Machine(
        device,
        devices=local_world_size,
        device_name=name,
        world_size=world,
        local_world_size=local_world_size,
        memory_bytes=memory,
    )
    if spec := find_device(machine):
        machine = replace(
            machine,
            memory_bytes=memory or int(spec.memory_gib * GIB) or None,
            peer_access=spec.link.peer_access,
            capability=spec.capability,
        )
    return job, resolve(job, machine), machine


def read_run(run_dir: Path) -> FinishedRun:
    """Read the measurements of a run.

    Raises:
        InvalidConfig: if it is not a run, or has too few records.
    """

    def missing(rule: str, remedy: str) -> InvalidConfig:
        return InvalidConfig([ConfigError("--calibrate", str(run_dir), rule, remedy)])

    _, plan, machine = replan_run(run_dir, "--calibrate")
    needed = ("step_seconds", "data_seconds", "memory_peak_gib")
    records = [
        record
        for record in read_records(run_dir / "metrics.jsonl")
        if isinstance(record.get("time_breakdown"), dict)
        and all(is_number(record.get(n)) for n in needed)
    ]
    # Only the last start: an earlier one may have had another layout.
    starts = [r["time_breakdown"].get("restarting", 0.0) for r in records]
    last = [r for r, start in zip(records, starts, strict=True) if start == starts[-1]][
        WARMUP_RECORDS:
    ]
    if len(last) < MIN_RECORDS:
        rule = f"has {len(last)} records after the first {WARMUP_RECORDS} of its last start"
        raise missing(rule, f"train until it has {MIN_RECORDS}, or lower monitor.log_interval")
    if find_device(machine) is None:
        rule = f"ran on {machine.device_name!r}, a device of unknown speed"
        raise missing(rule, "add it to clusters.toml; benchmarks/device.py measures it")
    environment = read_json(run_dir / "environment.json")
    return FinishedRun(
        run_dir,
        plan,
        machine,
        statistics.median(r["step_seconds"] - r["data_seconds"] for r in last),
        len(last),
        max(r["memory_peak_gib"] for r in records) * GIB,
        str(environment.get("torch")),
    )


def calibrate(run: FinishedRun) -> Calibration:
    """Fit the parameter that dominates the step time of a run.

    Raises:
        InvalidConfig: if no value predicts the measured time.
    """
    plan, rank_traces = run.plan, trace_ranks(run.plan)
    device = find_device(run.machine)
    assert device is not None, "read_run refuses unknown devices"
    prediction = price_traces(plan, run.machine, device, rank_traces)
    seconds_before = prediction.step_seconds
    assert seconds_before is not None
    step = build_step(plan, rank_traces, device)
    shipped = shipped_device(device.name)  # fitted anew, not on top of an older calibration
    parameter = dominant_parameter(step, build_hardware(plan, shipped))
    sign = 1 if parameter == "launch" else -1  # a longer launch makes the step longer

    def seconds(factor: float) -> float:
        changed = replace(shipped, **{parameter: getattr(shipped, parameter) * factor})
        return step_seconds(step, build_hardware(plan, changed)).total()

    factor = bisect(lambda scale: seconds(scale**sign), run.seconds, MAX_FACTOR) ** sign
    fitted_seconds = seconds(factor)
    if abs(fitted_seconds / run.seconds - 1) > 0.01:
        bound = "at least" if fitted_seconds > run.seconds else "at most"
        rule = f"took {run.seconds:.4g} s per step, but any value of {parameter} predicts {bound} "
        rule += f"{fitted_seconds:.4g} s"
        remedy = "another property of the device is wrong: measure it with benchmarks/device.py"
        raise InvalidConfig([ConfigError("--calibrate", str(run.run_dir), rule, remedy)])
    value = getattr(shipped, parameter) * factor
    return Calibration(
        device.name,
        parameter,
        value,
        run,
        seconds_before,
        fitted_seconds,
        prediction.recorded_bytes,
    )


def shipped_device(name: str) -> Device:
    """Return a device without its calibration."""
    return read_clusters(
        BUILTIN_CLUSTERS, *(file for file in user_cluster_files()[:-1] if file.is_file())
    )[0][name]


def dominant_parameter(step: Step, hardware: Hardware) -> DeviceParameter:
    """Return the parameter that dominates a step's time."""
    seconds = step_seconds(step, hardware)
    if seconds["host"] > seconds.total() / 2:
        return "launch"
    device = hardware.device
    infinite_bandwidth = replace(hardware, device=replace(device, bandwidth=1e6 * device.bandwidth))
    memory_fraction = 1 - step_seconds(step, infinite_bandwidth)["compute"] / max(
        seconds["compute"], 1e-12
    )
    return "bandwidth" if memory_fraction > 0.5 else "software"


def bisect(function: Callable[[float], float], target: float, max_factor: float) -> float:
    """Return the nearest argument at which an increasing function reaches ``target``."""
    low, high = 1 / max_factor, max_factor
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if function(middle) < target else (low, middle)
    return high


def save_calibration(calibration: Calibration) -> Path:
    """Write a calibration to the user's file; return its path."""
    path = user_cluster_files()[-1]
    entries = tomllib.loads(path.read_text("utf-8")) if path.is_file() else {}
    entry = {
        calibration.parameter: float(f"{calibration.value:.4g}"),
        "calibrated": calibration.provenance,
    }
    entries.setdefault("devices", {})[calibration.device] = entry
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, f"{FILE_HEADER}\n{tomli_w.dumps(entries)}")
    load_clusters.cache_clear()
    return path


def render_calibration(calibration: Calibration, path: Path) -> str:
    """Render a calibration as text."""
    run = calibration.run
    tokens = run.plan.tokens_per_step / run.plan.world_size

    def row(name: str, seconds: float) -> list[str]:
        error = f"{seconds / run.seconds - 1:+.1%}"
        return [name, f"{seconds:.4g}", f"{tokens / seconds:,.0f}", error]

    rows = [
        ["measured", f"{run.seconds:.4g}", f"{tokens / run.seconds:,.0f}", ""],
        row("predicted before", calibration.seconds_before),
        row("predicted after", calibration.seconds_after),
    ]
    units = {"software": "", "launch": " s per kernel", "bandwidth": " bytes/s"}
    value = f"{calibration.value:.4g}{units[calibration.parameter]}"
    header = ["", "s/step", "tokens/s/device", "error"]
    measured, predicted = run.memory_bytes / GIB, calibration.predicted_memory_bytes / GIB
    memory = f"{measured:.2f} GiB measured, {predicted:.2f} predicted"
    return "\n".join(
        [
            f"{calibration.device}: {calibration.parameter} = {value}, "
            f"from {calibration.provenance}",
            "",
            *format_columns(header, rows, left={0}),
            "",
            f"memory of the fullest rank: {memory} ({predicted / measured - 1:+.1%})",
            f"written to {path}; plans for this device use the value until you remove it there",
        ]
    )
