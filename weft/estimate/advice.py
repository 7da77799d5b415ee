"""What to change in a plan, and what that would do.

Changes of the recipe, of one key or of some that belong together, are reckoned by the analytic
twin; what it says of the change is applied to what was traced.  So their effects are estimates,
mostly within a tenth.  Where a plan does not fit, that is too little to start a run on: there the
first one is traced, and those that turn out not to fit either are left out.  Of models that the
twin does not know (adapters, experts) some usual changes are traced.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from weft.config.errors import InvalidConfig
from weft.config.schema import Job
from weft.config.schema import replace as replace_sections
from weft.estimate.analytic import memory_of, step_of
from weft.estimate.cost import step_seconds
from weft.estimate.forecast import Forecast, forecast, hardware_of
from weft.estimate.plan_to_analytic import layout_of, sizes_of
from weft.plan.devices import Device
from weft.plan.float8_rules import supports_float8
from weft.plan.resolve import Machine, Plan, resolve

# A change that gains less is not worth a line.
WORTH = 0.02
MOST = 3

# Keys with their values, in the order in which people should read them.
Change = dict[str, Any]


@dataclass(frozen=True)
class Advice:
    """``faster``: of the speed, 0.2 is a fifth more.  ``bytes``: that a device then needs.
    ``traced``: whether these are a trace's, or estimated."""

    change: Change
    faster: float
    bytes: float
    traced: bool = False

    def __str__(self) -> str:
        return " ".join(
            f"--{key} {str(value).lower() if isinstance(value, bool) else value}"
            for key, value in self.change.items()
        )


def advise(job: Job, plan: Plan, machine: Machine, device: Device, seen: Forecast) -> list[Advice]:
    """The best changes that fit: the fastest, or where the plan does not fit what costs least.

    The first one of a plan that does not fit was traced, and fits.  Empty where nothing helps, or
    the plan fits and the twin does not know the model.
    """
    # A change must not change how many ranks weft starts: it would be credited with them.
    local = plan.local_world_size
    machine = replace(machine, world_size=plan.world_size, local_world_size=local)
    before = _reckoned(job, plan, device)
    if before is None:
        return [] if seen.fits is not False else _usual(job, plan, machine, device, seen)

    def tried(changes: Iterator[Change]) -> list[Advice]:
        found = []
        for change in changes:
            try:
                changed = changed_by(job, change)
                after = _reckoned(changed, resolve(changed, machine), device)
            except (InvalidConfig, ValueError):
                continue  # not possible here
            if after is None:
                continue
            needed = (seen.needed - seen.outside) * after[1] / before[1] + seen.outside
            found.append(Advice(change, before[0] / after[0] - 1, needed))
        # Of changes that are as fast the one of fewest keys, then the one that is tried first.
        return sorted(found, key=lambda a: (-round(a.faster, 3), len(a.change)))

    singles = tried(changes(job, plan, machine))
    if seen.fits is not False:
        fitting = [a for a in singles if seen.capacity is None or a.bytes <= seen.capacity]
        return _distinct([a for a in fitting if a.faster >= WORTH])[:MOST]
    found = _that_fit(job, machine, device, seen, singles)
    if found:
        return found
    saving = [a.change for a in singles if a.bytes < seen.needed]
    pairs = (a | b for a, b in itertools.combinations(saving, 2) if not a.keys() & b.keys())
    return _that_fit(job, machine, device, seen, tried(pairs))


def changes(job: Job, plan: Plan, machine: Machine) -> Iterator[Change]:
    """What is worth a try, alone."""
    for kind in ("none", "selective", "full"):
        # What selective recomputation keeps under tensor parallelism, the twin does not know.
        if (kind, 1) != (
            job.activation_checkpoint.mode,
            job.activation_checkpoint.every_n_layers,
        ) and (kind != "selective" or plan.tp == 1):
            yield {"activation_checkpoint.mode": kind} | (
                {"activation_checkpoint.every_n_layers": 1}
                if job.activation_checkpoint.every_n_layers > 1
                else {}
            )
    rows = plan.microbatch
    for more in sorted({4 * rows, 2 * rows, rows // 2, rows // 4, 1} - {0, rows}):
        if plan.local_batch % more == 0:
            yield {"train.microbatch_size": more}
    # Float8 pays where casting is fused, and asynchronous products are the compiler's.
    compiled: Change = {} if job.compile.enable else {"compile.enable": True}
    if compiled:
        yield compiled
    able = plan.compute_dtype == "bfloat16" and supports_float8("tensorwise", machine.capability)
    if plan.float8 == "none" and able:
        yield compiled | {"precision.float8": "tensorwise"}
    if plan.tp > 1 and not job.parallel.async_tp:
        yield compiled | {"parallel.async_tp": True}
    if plan.pipeline is not None:
        for schedule in ("Interleaved1F1B", "1F1B"):
            if schedule != plan.pipeline.schedule:
                each = job.pipeline.stages_per_rank
                stages = {} if each == "auto" else {"pipeline.stages_per_rank": "auto"}
                yield {"pipeline.schedule": schedule} | stages
    elif plan.dp_shard > 1 and job.parallel.cp == 1:
        kept = plan.reshard_after_forward is False
        yield {"parallel.reshard_after_forward": "always" if kept else "never"}
    if job.optim.name == "adamw":
        lean = {"float32": ("bfloat16", "8bit"), "bfloat16": ("8bit",)}
        for states in lean.get(job.optim.state_dtype, ()):
            yield {"optim.state_dtype": states}
    yield from meshes(job, plan)


def meshes(job: Job, plan: Plan) -> Iterator[Change]:
    """Other degrees of one axis; the ranks that are left share the parameters."""
    rest: Change = {} if job.parallel.dp_shard == "auto" else {"parallel.dp_shard": "auto"}
    if plan.dp_replicate > 1:
        yield {"parallel.dp_replicate": 1} | rest
    sides = {"tp": plan.tp, "pp": plan.pp, "cp": plan.cp}
    for axis, degree in sides.items():
        most = {"tp": plan.local_world_size, "pp": 64, "cp": job.train.seq_len // 8192}[axis]
        for other in sorted({1, degree // 2, 2 * degree, 4 * degree} - {0, degree}):
            if other <= max(1, most):
                one = {"parallel.reshard_after_forward": "auto"} if axis == "pp" else {}
                yield (
                    {f"parallel.{axis}": other}
                    | rest
                    | (one if job.parallel.reshard_after_forward != "auto" else {})
                )


def changed_by(job: Job, change: Change) -> Job:
    """The job with a change.

    Raises:
        ValueError: if a value is out of bounds.
    """
    sections: dict[str, dict[str, Any]] = {}
    for key, value in change.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return replace_sections(job, **sections)


def _usual(job: Job, plan: Plan, machine: Machine, device: Device, seen: Forecast) -> list[Advice]:
    """Smaller microbatches and recomputation, the fastest first; both together if none fits."""

    def tried(changes: list[Change]) -> list[Advice]:
        found = []
        for change in changes:
            try:
                changed = changed_by(job, change)
                after = forecast(changed, resolve(changed, machine), machine, device)
            except InvalidConfig:
                continue  # not possible here
            if after.fits:
                found.append(_as_traced(Advice(change, 0.0, 0.0), seen, after))
        return sorted(found, key=lambda advice: -advice.faster)

    fewer = sorted({plan.microbatch // 2, 1} - {0, plan.microbatch}, reverse=True)
    smaller: list[Change] = [
        {"train.microbatch_size": rows} for rows in fewer if plan.local_batch % rows == 0
    ]
    again: list[Change] = []
    if (job.activation_checkpoint.mode, job.activation_checkpoint.every_n_layers) != ("full", 1):
        again = [
            {"activation_checkpoint.mode": "full"}
            | (
                {"activation_checkpoint.every_n_layers": 1}
                if job.activation_checkpoint.every_n_layers > 1
                else {}
            )
        ]
    both = [less | more for less in smaller[-1:] for more in again]
    return tried(smaller + again) or tried(both)


def _as_traced(advice: Advice, seen: Forecast, after: Forecast) -> Advice:
    traced = replace(advice, bytes=after.needed, traced=True)
    if seen.step_seconds is None or after.step_seconds is None:
        return traced
    return replace(traced, faster=seen.step_seconds / after.step_seconds - 1)


def _that_fit(
    job: Job, machine: Machine, device: Device, seen: Forecast, found: list[Advice]
) -> list[Advice]:
    """Those that fit, the fastest first; what the first one does is traced."""
    assert seen.capacity is not None
    fitting = _distinct([advice for advice in found if advice.bytes <= seen.capacity])
    for place, advice in enumerate(fitting[: 2 * MOST]):
        changed = changed_by(job, advice.change)
        after = forecast(changed, resolve(changed, machine), machine, device)
        if after.fits:
            return [_as_traced(advice, seen, after), *fitting[place + 1 :]][:MOST]
    return []


def _distinct(found: list[Advice]) -> list[Advice]:
    """Without those that do more than another one and gain nothing by it."""
    kept: list[Advice] = []
    for advice in found:
        if not any(better.change.items() <= advice.change.items() for better in kept):
            kept.append(advice)
    return kept


def _reckoned(job: Job, plan: Plan, device: Device) -> tuple[float, float] | None:
    """Seconds and bytes of the twin; the latter eager, as a trace tells them."""
    sizes, layout = sizes_of(plan), layout_of(job, plan, device)
    if sizes is None or layout is None:
        return None
    seconds = step_seconds(step_of(sizes, layout), hardware_of(plan, device)).total()
    return seconds, sum(memory_of(sizes, replace(layout, fusion="eager")).values())
