"""Estimate the time of a run in milliseconds, for `weft launch`."""

from __future__ import annotations

from weft.estimate.memory_check import estimate_run
from weft.planning.plan import Machine, Plan

ASSUMED_MFU = 0.4  # of models that the formulas do not describe


def estimate_run_seconds(plan: Plan, machine: Machine) -> tuple[float, str] | None:
    """Estimate the seconds of all steps without a trace, and say how.

    Starts, evaluations and checkpoints do not count.

    Returns:
        None if the number of steps or the speed of the device is unknown.
    """
    if not plan.num_steps or plan.device == "cpu":
        return None
    prediction = estimate_run(plan, machine)
    if prediction is not None and prediction.step_seconds is not None:
        return plan.num_steps * prediction.step_seconds, "by the planner's formulas"
    if not plan.peak_flops:
        return None
    flops = plan.num_steps * plan.tokens_per_step * plan.flops_per_token
    seconds = flops / (ASSUMED_MFU * plan.peak_flops * plan.world_size)
    return seconds, f"at an assumed MFU of {ASSUMED_MFU:.0%}"
