"""Before a run starts, does it fit in the memory that there is?

Arithmetic comes first, and takes no time; where it says that half of the memory or more is needed,
the plan is traced.  What is expected goes into the run's folder, for the records to be compared
with, and for the message should memory run out all the same.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from weft.config.errors import MISSING, ConfigError, InvalidConfig
from weft.config.files import replace_text
from weft.config.schema import Job
from weft.estimate.advice import advise
from weft.estimate.analytic import memory_of, step_of
from weft.estimate.cost import step_seconds
from weft.estimate.forecast import Forecast, device_of, forecast, hardware_of
from weft.estimate.plan_to_analytic import layout_of, sizes_of
from weft.monitor.device_memory import EXPECTED
from weft.plan.devices import CPU_DEVICE, GIB, get_device
from weft.plan.plan_text import estimate_memory_bytes
from weft.plan.resolve import Machine, Plan, resolve

# Of a device's memory: what arithmetic finds to need less is not traced.
SURE = 0.5
# A traced plan may need so much more than there is and still be tried: the prediction's own error.
OVER = 0.05


@dataclass(frozen=True)
class Expected:
    """Of the fullest rank: GiB as a run measures them (`Forecast.measured`), and by category;
    seconds of a step, and by what they are spent on (`weft.estimate.cost.Seconds`), None if not
    predicted."""

    by: str  # a trace, or arithmetic
    memory_gib: float
    categories_gib: dict[str, float]
    step_seconds: float | None
    seconds: dict[str, float] | None

    def __str__(self) -> str:
        speed = "" if self.step_seconds is None else f", {self.step_seconds:.3g} s a step"
        return f"{self.memory_gib:.1f} GiB on the fullest rank{speed}, by {self.by}"


def expect(job: Job, plan: Plan, machine: Machine, force: bool) -> tuple[Expected | None, str]:
    """What a run will need, as far as that can be told, and a warning or ''.

    Args:
        plan: on the most nodes that the run may have; it must fit on the fewest, too.
        force: start although it does not fit.

    Raises:
        InvalidConfig: if it does not fit; with the cheapest remedy.
    """
    several = len(plan.node_counts) > 1
    if several:
        ranks = plan.node_counts[0] * plan.local_world_size
        machine = replace(machine, world_size=ranks, local_world_size=plan.local_world_size)
        plan = resolve(job, machine)
    capacity, rough = machine.memory_of_rank(plan.local_world_size), estimate_memory_bytes(job, plan)
    if capacity is None:
        return None, ""
    if rough is not None and rough < SURE * capacity:
        return by_arithmetic(job, plan, machine), ""
    try:
        seen = forecast(job, plan, machine, device_of(plan, machine))
    except InvalidConfig:
        raise
    except Exception as error:
        # A model of the user's trains, though nothing may be able to trace it.
        return None, f"whether this fits is not known: {type(error).__name__}: {error}"
    assert seen.capacity is not None
    if seen.needed > (1 + OVER) * seen.capacity and not force:
        raise InvalidConfig([problem_of(job, plan, machine, seen)])
    seconds = None if seen.seconds is None else dict(seen.seconds)
    expected = Expected(
        "a trace", seen.measured / GIB, seen.by_category(), seen.step_seconds, seconds
    )
    if seen.needed <= seen.capacity:
        return expected, ""
    return expected, f"this may run out of memory: rank {seen.rank} needs {_need(seen)}"


def by_arithmetic(job: Job, plan: Plan, machine: Machine) -> Expected | None:
    """None where arithmetic does not know enough: another family, float32, a CPU."""
    device = device_of(plan, machine)
    sizes = sizes_of(plan)
    if plan.device == "cpu" or plan.compute_dtype == "float32" or not (device and sizes):
        return None
    layout = layout_of(job, plan, device)
    if layout is None:
        return None
    parts = {name: size / GIB for name, size in memory_of(sizes, layout).items()}
    seconds = step_seconds(step_of(sizes, layout), hardware_of(plan, device))
    return Expected("arithmetic", sum(parts.values()), parts, seconds.total(), dict(seconds))


def problem_of(job: Job, plan: Plan, machine: Machine, seen: Forecast) -> ConfigError:
    """Why a run is not started, and the cheapest change with which it would fit."""
    remedy = "use --force to try it all the same"
    device = device_of(plan, machine)
    # Memory can be saved on a device whose speed nobody knows, too; then no speed is told.
    for best in advise(job, plan, machine, device or get_device(CPU_DEVICE), seen)[:1]:
        slower = f", {-best.faster:.0%} slower" if device and best.faster < -0.005 else ""
        remedy = f"use {best} ({best.bytes / GIB:.1f} GiB{slower}), or --force to try it"
    return ConfigError(
        "memory", MISSING, f"does not fit: rank {seen.rank} needs {_need(seen)}", remedy
    )


def _need(seen: Forecast) -> str:
    return seen.limits[0].removeprefix("memory: ")


def note(expected: Expected | None, folder: Path) -> None:
    """Leave it in the run's folder; an older one goes."""
    path = folder / EXPECTED
    if expected is None:
        path.unlink(missing_ok=True)
    else:
        replace_text(path, json.dumps(asdict(expected), indent=2) + "\n")
