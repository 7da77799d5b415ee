"""Find the first step and layer in which two runs differ (``weft diff A B``).

Where both runs have statistics of a step (``debug.layer_stats_steps``), they are compared in the
order of computation: layer outputs forward, gradients from the last layer back, parameters after
the update.  The first difference is the cause of the later ones.  Without statistics, the records
of ``metrics.jsonl`` give the step, and the output says how to record its statistics.

Bitwise equality, rounding and differences are reported separately: two layouts of one job match to
about 1e-6, and a wrong layout differs by far more (`weft.verification.verify`).
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.checkpoint.manifest import checkpoint_step, list_checkpoints
from weft.config.accelerators import GPU
from weft.config.errors import MISSING, ConfigError, InvalidConfig
from weft.config.files import only_finite, read_json
from weft.config.run_paths import portable
from weft.config.schema import Job, difference
from weft.monitor.layer_stats import computation_order
from weft.records.jsonl_reader import is_number, read_records
from weft.records.layer_comparison import read_statistics, safe_ratio
from weft.records.run_reader import RunEvent, RunReader, read_run_job
from weft.training.state import checkpoint_dir

RECORD_FIELDS = {"loss": "the loss", "grad_norm": "the gradient norm; the loss matches"}
STATISTICS = ("count", "mean", "rms", "max_abs", "nonfinite")  # fields of a row of statistics


@dataclass(frozen=True)
class RunLocation:
    """A step, or a tensor in it, and the distance of two runs there."""

    step: int
    what: str
    distance: float  # relative; 0 if bitwise equal
    ours: dict[str, Any]  # values of run A
    theirs: dict[str, Any]  # values of run B


@dataclass
class RunDifference:
    """Difference of two runs; distances are relative."""

    runs: tuple[str, str]
    tolerance: float
    part: RunLocation | None  # the first location beyond the tolerance
    rounding: RunLocation | None  # the first location that is not bitwise equal
    largest: float  # largest distance before ``part``
    compared: str
    equal_until: int  # the last step before ``rounding``, up to which all is equal; 0: none
    changes: list[str]  # of configuration and environment
    advice: list[str]

    def to_json(self) -> str:
        """Return one JSON object; an infinite distance becomes the text ``inf``."""
        return json.dumps(only_finite(asdict(self), str), indent=2)

    def __str__(self) -> str:
        lines = []
        if self.part is None and self.rounding is None:
            lines.append(f"bitwise equal: {self.compared}")
        elif self.part is None:
            within = f"no difference above the tolerance of {self.tolerance:g}"
            lines.append(f"{within}: the largest is {self.largest:.1e}; {self.compared}")
        else:
            part = self.part
            distance = _format_distance(part.distance)
            lines.append(f"the runs first differ at step {part.step}: {part.what} ({distance})")
            lines += [
                f"  {name:<10}{_format_number(value):>16}{_format_number(part.theirs[name]):>16}"
                for name, value in part.ours.items()
            ]
            if self.rounding != part:
                lines.append(f"before that they match within {self.largest:.1e}")
            lines.append(f"compared: {self.compared}")
        if self.rounding is not None and self.equal_until:
            text = "" if self.rounding == self.part else f"; first rounding: {self.rounding.what}"
            lines.append(f"bitwise equal until step {self.equal_until}{text}")
        if self.changes:
            lines += ["changes between the runs (A / B):", *(f"  {text}" for text in self.changes)]
        else:
            lines.append("configurations and environments are equal")
        return "\n".join([*lines, *self.advice])


def compare_runs(run_a: Path, run_b: Path, tolerance: float) -> RunDifference:
    """Compare the directories of two runs.

    Args:
        run_a: directory of the first run.
        run_b: directory of the second run.
        tolerance: largest relative difference that counts as rounding.

    Raises:
        InvalidConfig: if a directory is not a run, or the runs have no step in common.
        WeftError: if a file cannot be read.
    """
    jobs = [read_run_job(run, name) for name, run in (("run_a", run_a), ("run_b", run_b))]
    records = [
        {r["step"]: r for r in read_records(run / "metrics.jsonl") if _is_valid(r)}
        for run in (run_a, run_b)
    ]
    rows = [
        {(row["step"], *computation_order(row)): row for row in read_statistics(run)}
        for run in (run_a, run_b)
    ]
    steps = sorted(records[0].keys() & records[1].keys())
    common = sorted(rows[0].keys() & rows[1].keys())
    detailed_steps = sorted({key[0] for key in common})
    if not steps and not common:
        rule = f"has no step in common with {run_a}: neither a record nor statistics"
        remedy = "see logs/ of both; --monitor.log_interval 1 records every step"
        raise InvalidConfig([ConfigError("run_b", str(run_b), rule, remedy)])
    # A stable sort: the statistics of a step are more specific than its record, and come first.
    locations = sorted(
        [
            *_compare_statistics(rows[0], rows[1], common),
            *_compare_records(records[0], records[1], steps),
        ],
        key=lambda location: location.step,
    )
    part = next((location for location in locations if location.distance > tolerance), None)
    before = locations[: locations.index(part)] if part else locations
    rounding = next((location for location in locations if location.distance > 0), None)
    equal_steps = [
        location.step for location in locations if rounding is None or location.step < rounding.step
    ]
    compared = []
    if steps:
        compared.append(f"loss and gradient norm of {len(steps)} records, to step {steps[-1]}")
    if common:
        text = ", ".join(map(str, detailed_steps[:6])) + ", ..." * (len(detailed_steps) > 6)
        compared.append(f"{len(common)} statistics of step{'s' * (len(detailed_steps) > 1)} {text}")
    missing = len(rows[0].keys() ^ rows[1].keys())
    if common and missing:
        compared.append(f"{missing} statistics are in only one of the runs")
    return RunDifference(
        runs=(str(run_a), str(run_b)),
        tolerance=tolerance,
        part=part,
        rounding=rounding,
        largest=max((location.distance for location in before), default=0.0),
        compared="; ".join(compared),
        equal_until=max(equal_steps, default=0),
        changes=_format_changes(jobs, (run_a, run_b)),
        advice=_advice((run_a, run_b), jobs, part, steps, detailed_steps),
    )


# --------------------------------------------------------------------------- comparison


def _is_valid(record: Mapping[str, Any]) -> bool:
    """Return True if the compared fields are numbers, or None as in a skipped step."""
    return all(record.get(name) is None or is_number(record[name]) for name in RECORD_FIELDS)


def _compare_statistics(rows_a: Any, rows_b: Any, keys: list[Any]) -> Iterator[RunLocation]:
    texts = {
        "activation": "the output of {} in the forward pass",
        "gradient": "the gradient of {}; the forward pass matches",
        "parameter": "the update of {}; the forward pass and gradients match",
    }
    for key in keys:
        a, b = rows_a[key], rows_b[key]
        values = [{name: row[name] for name in STATISTICS} for row in (a, b)]
        what = texts[a["kind"]].format(a["name"])
        yield RunLocation(a["step"], what, _statistics_distance(a, b), *values)


def _statistics_distance(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """Return the largest relative difference of two rows; the mean's is per RMS."""
    if (a["count"], a["nonfinite"]) != (b["count"], b["nonfinite"]):
        return math.inf
    return max(
        safe_ratio(abs(a["mean"] - b["mean"]), max(a["rms"], b["rms"])),
        _relative_difference(a["rms"], b["rms"]),
        _relative_difference(a["max_abs"], b["max_abs"]),
    )


def _compare_records(records_a: Any, records_b: Any, steps: list[int]) -> Iterator[RunLocation]:
    for step in steps:
        a, b = (
            {name: records[step].get(name) for name in RECORD_FIELDS}
            for records in (records_a, records_b)
        )
        for name, text in RECORD_FIELDS.items():
            yield RunLocation(step, text, _relative_difference(a[name], b[name]), a, b)


def _relative_difference(a: float | None, b: float | None) -> float:
    """Return the difference relative to the larger number; a skipped step has None."""
    if a is None or b is None:
        return 0.0 if a == b else math.inf
    return safe_ratio(abs(a - b), max(abs(a), abs(b)))


# --------------------------------------------------------------------------- text


def _format_changes(jobs: Sequence[Job], runs: Sequence[Path]) -> list[str]:
    """Format the differences of configuration and environment."""
    changed = difference(*map(portable, jobs, runs))
    environments = [read_json(run / "environment.json") for run in runs]
    for name in ("weft", "git", "torch", GPU, "python", "devices"):
        values = [environment.get(name) for environment in environments]
        if values[0] != values[1]:
            changed[name] = (values[0], values[1])
    lines = [f"{n}: {_format_value(a)} / {_format_value(b)}" for n, (a, b) in changed.items()]
    for name, run in zip("AB", runs, strict=True):
        lines += [
            f"{name} changed after step {event.step}: {event.text}" for event in _changes(run)
        ]
    return lines


def _changes(run: Path) -> list[RunEvent]:
    """Return the events of changed keys; ``job.toml`` has those of the last start."""
    return [event for event in RunReader(run).read_events() if event.kind == "change"]


def _format_value(value: Any) -> str:
    return "(none)" if value is MISSING else json.dumps(value)


def _advice(
    runs: tuple[Path, Path],
    jobs: list[Job],
    part: RunLocation | None,
    steps: list[int],
    detailed_steps: list[int],
) -> list[str]:
    """Return commands that record missing statistics of the first difference."""
    if part is None or part.step in detailed_steps:
        return []
    last = max((step for step in steps if step < part.step), default=0)
    step_range = f"{last + 1}-{part.step}" if last + 1 < part.step else f"{part.step}"
    lines = ["to find the layer, run both again with statistics of that step:"]
    for run, job in zip(runs, jobs, strict=True):
        recipe, again = shlex.quote(str(run / "job.toml")), shlex.quote(f"{run}-again")
        later = [event for event in _changes(run) if event.step >= part.step]
        if later:
            lines.append(f"  with the values before the change after step {later[0].step}:")
        lines.append(
            f"  weft train {recipe} --run.dir {again} --debug.layer_stats_steps {step_range}"
        )
        saved_steps = [
            checkpoint_step(path) for path in list_checkpoints(checkpoint_dir(job.checkpoint, run))
        ]
        if step := max((step for step in saved_steps if 0 < step <= last), default=0):
            rollback = f"weft rollback {shlex.quote(str(run))} {step}"
            lines.append(f"  or, in place: {rollback}, then the command above without --run.dir")
    return lines


def _format_number(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _format_distance(distance: float) -> str:
    if not math.isfinite(distance):
        return "not comparable"
    return f"difference {distance:.2%}" if distance >= 1e-3 else f"difference {distance:.1e}"
