"""``weft debug diff A B``: the first step, and the first layer by name, where two runs part.

Where both have statistics of a step (``debug.layer_stats_steps``), they are compared in the order in which
things are computed: outputs of layers forward, gradients from the last layer back, parameters after
the update.  The first that differs is where to look: what comes after it differs because of it.
Without statistics the records of metrics.jsonl say in which step it was, and the answer, how to
have statistics of it.

Equal bits are told apart from rounding, and that from a difference: two layouts of one job agree to
some 1e-6, and a wrong one is off by far more (`weft.tools.verify`).
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.checkpoint.manifest import checkpoint_step, checkpoints
from weft.config.errors import MISSING, ConfigError, InvalidConfig
from weft.config.files import only_finite, read_json
from weft.config.schema import Job, difference
from weft.monitor.jsonl import is_number, read_records
from weft.monitor.layer_stats import KINDS, read_statistics
from weft.monitor.run_reader import job_of
from weft.train.state import checkpoint_dir

WHAT = {"loss": "the loss", "grad_norm": "the gradient norm; the loss agrees"}  # of a record
VALUES = ("count", "mean", "rms", "most", "nonfinite")  # of a row of statistics


@dataclass(frozen=True)
class Place:
    """A step, or a tensor in it, and how far two runs are apart there."""

    step: int
    what: str  # for people
    distance: float  # relative; 0 if they are equal to the bit
    ours: dict[str, Any]
    theirs: dict[str, Any]


@dataclass
class Difference:
    """Of two runs.  The distances are relative."""

    runs: tuple[str, str]
    tolerance: float
    part: Place | None  # the first that is beyond the tolerance
    rounding: Place | None  # the first that is not equal to the bit
    largest: float  # of those within the tolerance
    compared: str
    equal_until: int  # the last step before `rounding` of which all is equal; 0: none
    changes: list[str]  # of configuration and environment
    advice: list[str]

    def to_json(self) -> str:
        """One object; a distance that is not comparable is the text ``inf``."""
        return json.dumps(only_finite(asdict(self), str), indent=2)

    def __str__(self) -> str:
        lines = []
        if self.part is None and self.rounding is None:
            lines.append(f"equal bit for bit: {self.compared}")
        elif self.part is None:
            within = f"no difference beyond {self.tolerance:g}"
            lines.append(f"{within}: the largest is {self.largest:.1e}; {self.compared}")
        else:
            part = self.part
            lines.append(f"they part at step {part.step}: {part.what} ({_percent(part.distance)})")
            lines += [
                f"  {name:<10}{_number(part.ours[name]):>16}{_number(part.theirs[name]):>16}"
                for name in part.ours
            ]
            if self.rounding != part:
                lines.append(f"before that they agree within {self.largest:.1e}")
            lines.append(f"compared: {self.compared}")
        if self.rounding is not None and self.equal_until:
            then = "" if self.rounding == self.part else f", then not: {self.rounding.what}"
            lines.append(f"equal bit for bit until step {self.equal_until}{then}")
        if self.changes:
            lines += ["what differs between the runs:", *(f"  {text}" for text in self.changes)]
        else:
            lines.append("their configurations do not differ")
        return "\n".join([*lines, *self.advice])


def compare_runs(ours: Path, theirs: Path, tolerance: float) -> Difference:
    """Compare two runs' folders.

    Args:
        tolerance: relative difference that is rounding.

    Raises:
        InvalidConfig: if one of them is no run, or they have no step in common.
        WeftError: if what lies there cannot be read.
    """
    jobs = [job_of(run, name) for name, run in (("run_a", ours), ("run_b", theirs))]
    records = [
        {r["step"]: r for r in read_records(run / "metrics.jsonl") if _is_whole(r)}
        for run in (ours, theirs)
    ]
    rows = [{_key(row): row for row in read_statistics(run)} for run in (ours, theirs)]
    steps = sorted(records[0].keys() & records[1].keys())
    common = sorted(rows[0].keys() & rows[1].keys())
    detailed = sorted({key[0] for key in common})
    if not steps and not common:
        rule = f"has no step in common with {ours}: neither a record nor statistics"
        remedy = "see logs/ of both; --monitor.log_interval 1 records every step"
        raise InvalidConfig([ConfigError("run_b", str(theirs), rule, remedy)])
    places = sorted(
        [
            # What a step's tensors are says more than its record, and comes first.
            *((key[0], 0, place) for key, place in _tensors(rows[0], rows[1], common)),
            *((place.step, 1, place) for place in _records(records[0], records[1], steps)),
        ],
        key=lambda entry: entry[:2],
    )
    ordered = [place for _, _, place in places]
    part = next((place for place in ordered if place.distance > tolerance), None)
    before = ordered[: ordered.index(part)] if part else ordered
    rounding = next((place for place in ordered if place.distance > 0), None)
    clean = [place.step for place in ordered if rounding is None or place.step < rounding.step]
    compared = []
    if steps:
        compared.append(f"loss and gradient norm of {len(steps)} records, to step {steps[-1]}")
    if common:
        text = ", ".join(map(str, detailed[:6])) + (", ..." if len(detailed) > 6 else "")
        compared.append(f"{len(common)} statistics of step{'s' * (len(detailed) > 1)} {text}")
    lacking = len(rows[0].keys() ^ rows[1].keys())
    if common and lacking:
        compared.append(f"{lacking} statistics are in one of them only")
    return Difference(
        (str(ours), str(theirs)),
        tolerance,
        part,
        rounding,
        max((place.distance for place in before), default=0.0),
        "; ".join(compared),
        max(clean, default=0),
        [*_changes(*jobs), *_environments(ours, theirs)],
        _advice((ours, theirs), jobs, part, steps, detailed),
    )


# --------------------------------------------------------------------------- comparing


def _is_whole(record: Mapping[str, Any]) -> bool:
    """Return True if what is compared of a record is undamaged; a skipped step has no number."""
    return all(record.get(name) is None or is_number(record[name]) for name in WHAT)


def _key(row: Mapping[str, Any]) -> tuple[int, int, int, str]:
    """By which rows of statistics are sorted: as things are computed in a step."""
    kind = KINDS.index(row["kind"])
    backward = row["kind"] == "gradient"
    return row["step"], kind, -row["order"] if backward else row["order"], row["name"]


def _tensors(ours: Any, theirs: Any, keys: list[Any]) -> Iterator[tuple[Any, Place]]:
    for key in keys:
        a, b = ours[key], theirs[key]
        words = {
            "activation": f"the output of {a['name']} in forward",
            "gradient": f"the gradient of {a['name']}; forward agrees",
            "parameter": f"the update of {a['name']}; forward and gradients agree",
        }
        values = [{name: row[name] for name in VALUES} for row in (a, b)]
        yield key, Place(a["step"], words[a["kind"]], _apart(a, b), *values)


def _apart(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """Of two rows of statistics: the largest relative difference; the mean's to the size."""
    if (a["count"], a["nonfinite"]) != (b["count"], b["nonfinite"]):
        return math.inf
    size = max(a["rms"], b["rms"])
    mean = abs(a["mean"] - b["mean"]) / size if a["mean"] != b["mean"] else 0.0
    return max(mean, _relative(a["rms"], b["rms"]), _relative(a["most"], b["most"]))


def _records(ours: Any, theirs: Any, steps: list[int]) -> Iterator[Place]:
    for step in steps:
        values = [{name: of[step].get(name) for name in WHAT} for of in (ours, theirs)]
        for name, text in WHAT.items():
            yield Place(step, text, _relative(values[0][name], values[1][name]), *values)


def _relative(a: float | None, b: float | None) -> float:
    """Of two numbers, to the larger; of a skipped step there may be none."""
    if a == b:
        return 0.0
    return math.inf if a is None or b is None else abs(a - b) / max(abs(a), abs(b))


# --------------------------------------------------------------------------- telling


def _changes(ours: Job, theirs: Job) -> Iterator[str]:
    for name, (a, b) in difference(ours, theirs).items():
        if name != "run.dir":
            yield f"{name}: {_value(a)} / {_value(b)}"


def _value(value: Any) -> str:
    return "(none)" if value is MISSING else json.dumps(value)


def _environments(ours: Path, theirs: Path) -> Iterator[str]:
    """What they ran on."""
    found = [read_json(run / "environment.json") for run in (ours, theirs)]
    for name in ("weft", "git", "torch", "cuda", "python", "devices"):
        a, b = (about.get(name) for about in found)
        if a != b:
            yield f"{name}: {_value(a)} / {_value(b)}"


def _advice(
    runs: tuple[Path, Path],
    jobs: list[Job],
    part: Place | None,
    steps: list[int],
    detailed: list[int],
) -> list[str]:
    """How to have statistics of where they part, if there are none."""
    if part is None or part.step in detailed:
        return []
    last = max((step for step in steps if step < part.step), default=0)
    chosen = f"{last + 1}-{part.step}" if last + 1 < part.step else f"{part.step}"
    lines = ["for the layer, run both again with statistics of that step:"]
    for run, job in zip(runs, jobs, strict=True):
        recipe, again = shlex.quote(str(run / "job.toml")), shlex.quote(f"{run}-again")
        lines.append(f"  weft train {recipe} --run.dir {again} --debug.layer_stats_steps {chosen}")
        kept = [
            checkpoint_step(path) for path in checkpoints(checkpoint_dir(job.checkpoint.dir, run))
        ]
        if at := max((step for step in kept if 0 < step <= last), default=0):
            back = f"weft rollback {shlex.quote(str(run))} {at}"
            lines.append(f"  or, in place: {back}, then the first without --run.dir")
    return lines


def _number(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _percent(distance: float) -> str:
    if not math.isfinite(distance):
        return "not comparable"
    return f"{distance:.2%} apart" if distance >= 1e-3 else f"{distance:.1e} apart"
