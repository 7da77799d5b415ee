"""ADVICE: what to change in a plan, and what that would do.

Single changes of the recipe are reckoned by the analytic twin; what it says of the change is
applied to what was traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from weft.job import InvalidJob, Job
from weft.job import replace as replace_sections
from weft.plan.analytic import memory_of, step_of
from weft.plan.cost import step_seconds
from weft.plan.devices import Device
from weft.plan.resolve import Machine, Plan, resolve
from weft.predict.forecast import Forecast, hardware_of
from weft.predict.twin import layout_of, sizes_of

# A change that gains less is not worth a line.
WORTH = 0.02
MOST = 3


@dataclass(frozen=True)
class Advice:
    """``faster``: of the speed, 0.2 is a fifth more.  ``bytes``: that a device then needs."""

    key: str
    value: Any
    faster: float
    bytes: float

    def __str__(self) -> str:
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"--{self.key} {value}"


def advise(job: Job, plan: Plan, machine: Machine, device: Device, seen: Forecast) -> list[Advice]:
    """The best changes that fit: the fastest, or where the plan does not fit what costs least.

    Empty where the twin does not know the model.
    """
    before = _reckoned(job, plan, device)
    if before is None:
        return []
    found = []
    for key, value in changes(job, plan):
        section, name = key.split(".")
        try:
            changed = replace_sections(job, **{section: {name: value}})
            after = _reckoned(changed, resolve(changed, machine), device)
        except (InvalidJob, ValueError):
            continue  # not possible here
        if after is None:
            continue
        needed = (seen.needed - seen.outside) * after[1] / before[1] + seen.outside
        if seen.capacity is not None and needed > seen.capacity:
            continue
        faster = before[0] / after[0] - 1
        if not seen.fits or faster >= WORTH:
            found.append(Advice(key, value, faster, needed))
    found.sort(key=lambda advice: -advice.faster)
    return found[:MOST]


def changes(job: Job, plan: Plan) -> Iterator[tuple[str, Any]]:
    """Single keys that are worth a try."""
    for kind in ("none", "selective", "full"):
        if kind != job.remat.kind:
            yield "remat.kind", kind
    rows = plan.microbatch
    for more in (2 * rows, 4 * rows, rows // 2, 1):
        if more and more != rows and plan.local_batch % more == 0:
            yield "train.microbatch", more
    if not job.compile.enable:
        yield "compile.enable", True
    if plan.float8 == "none":
        yield "precision.float8", "tensorwise"
    if plan.tp > 1 and not job.parallel.async_tp:
        yield "parallel.async_tp", True
    if plan.pipeline is not None:
        yield "parallel.schedule", "Interleaved1F1B"
        yield "parallel.schedule", "1F1B"
        yield "parallel.gradient_sync", "microbatch"
    elif plan.dp_shard > 1 and plan.reshard_after_forward is not False:
        yield "parallel.reshard_after_forward", "never"
    for tp in (1, 2, 4, 8):
        if tp != plan.tp and tp <= plan.local_world_size:
            yield "parallel.tp", tp
    if job.optim.states == "float32":
        yield "optim.states", "bfloat16"


def _reckoned(job: Job, plan: Plan, device: Device) -> tuple[float, float] | None:
    """Seconds and bytes of the twin."""
    sizes, layout = sizes_of(plan), layout_of(job, plan, device)
    if sizes is None or layout is None:
        return None
    seconds = step_seconds(step_of(sizes, layout), hardware_of(plan, device)).total()
    return seconds, sum(memory_of(sizes, layout).values())
