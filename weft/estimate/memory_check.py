"""Check before a run starts that it fits in memory.

Arithmetic is instant and comes first.  A plan that needs half of the memory or more is traced.  The
prediction is written to the run directory, for comparison with the records and for the message if
memory runs out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from weft.config.errors import MISSING, ConfigError, InvalidConfig
from weft.estimate.analytic import DecoderFormulas, supports_formulas
from weft.estimate.cost import build_hardware, device_spec
from weft.monitor.device_memory import RunPrediction
from weft.planning.devices import CPU_DEVICE, GIB, get_device
from weft.planning.plan import Machine, Plan
from weft.planning.plan_text import estimate_memory_bytes
from weft.planning.resolve import resolve

if TYPE_CHECKING:
    from weft.estimate.forecast import Forecast

# Fraction of the device's memory; a plan that needs less by arithmetic is not traced.
TRACE_THRESHOLD = 0.5
# A traced plan may exceed the memory by this fraction, the error of the prediction.
TOLERANCE = 0.05


def predict_run(plan: Plan, machine: Machine, force: bool) -> tuple[RunPrediction | None, str]:
    """Return the prediction of a run, None if unknown, and a warning or ''.

    Args:
        plan: for the largest number of nodes; the run must fit on the smallest.
        machine: machine of ``plan``.
        force: start a run that does not fit.

    Raises:
        InvalidConfig: if the run does not fit; with the cheapest remedy.
    """
    job = plan.job
    is_elastic = len(plan.node_counts) > 1
    if is_elastic:
        world_size = plan.node_counts[0] * plan.local_world_size
        machine = replace(machine, world_size=world_size, local_world_size=plan.local_world_size)
        plan = resolve(job, machine)
    capacity = machine.memory_per_rank(plan.local_world_size)
    rough_bytes = estimate_memory_bytes(plan)
    if capacity is None:
        return None, ""
    if rough_bytes is not None and rough_bytes < TRACE_THRESHOLD * capacity:
        return estimate_run(plan, machine), ""
    from weft.estimate.forecast import forecast  # a trace needs all that trains

    try:
        prediction = forecast(plan, machine, device_spec(plan, machine))
    except InvalidConfig:
        raise
    except Exception as error:
        # A user's model may train although it cannot be traced.
        return None, f"cannot predict the memory of this run: {type(error).__name__}: {error}"
    assert prediction.capacity_bytes is not None
    if prediction.needed_bytes > (1 + TOLERANCE) * prediction.capacity_bytes and not force:
        raise InvalidConfig([memory_error(plan, machine, prediction)])
    time_breakdown = None if prediction.time_breakdown is None else dict(prediction.time_breakdown)
    run_prediction = RunPrediction(
        "a trace",
        prediction.recorded_bytes / GIB,
        prediction.gib_by_category(),
        prediction.step_seconds,
        time_breakdown,
    )
    if prediction.needed_bytes <= prediction.capacity_bytes:
        return run_prediction, ""
    need = _describe_need(prediction)
    return run_prediction, f"this run may run out of memory: rank {prediction.rank} needs {need}"


def estimate_run(plan: Plan, machine: Machine) -> RunPrediction | None:
    """Predict a run by arithmetic; None for another family, float32 or a CPU."""
    device = device_spec(plan, machine)
    is_supported = plan.compute_dtype != "float32" and supports_formulas(plan)
    if plan.device == "cpu" or device is None or not is_supported:
        return None
    formulas = DecoderFormulas(plan, device)
    categories = {name: size / GIB for name, size in formulas.estimate_memory().items()}
    seconds = formulas.step_seconds(build_hardware(plan, device))
    return RunPrediction(
        "arithmetic", sum(categories.values()), categories, seconds.total(), dict(seconds)
    )


def memory_error(plan: Plan, machine: Machine, prediction: Forecast) -> ConfigError:
    """Return the error of a plan that does not fit, with the cheapest remedy."""
    from weft.estimate.advice import advise

    remedy = "use --force to start anyway"
    device = device_spec(plan, machine)
    # On a device of unknown speed, advice saves memory and omits the slowdown.
    for advice in advise(plan, machine, device or get_device(CPU_DEVICE), prediction)[:1]:
        slowdown = f", {-advice.speedup:.0%} slower" if device and advice.speedup < -0.005 else ""
        size = f"{advice.memory_bytes / GIB:.1f} GiB"
        remedy = f"use {advice} ({size}{slowdown}), or --force to start anyway"
    return ConfigError(
        "memory",
        MISSING,
        f"does not fit: rank {prediction.rank} needs {_describe_need(prediction)}",
        remedy,
    )


def _describe_need(prediction: Forecast) -> str:
    return prediction.bottlenecks[0].removeprefix("memory: ")
