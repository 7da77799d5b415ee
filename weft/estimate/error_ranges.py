"""Range of a predicted time, from the errors of published runs.

``error_ranges.toml`` has, for each group of plans, factors between which nine of ten measured times
of published runs lie: the measured time is ``low`` to ``high`` times the predicted one.
``python -m benchmarks.plan_trace --ranges FILE`` writes the file.  The factors are quantiles of
that group's runs (split conformal prediction: Vovk et al., "Algorithmic Learning in a Random
World", 2005), one for each side, because the errors are not symmetric.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from weft.config.accelerators import GPU
from weft.planning.devices import Device
from weft.planning.plan import Plan

FILE = Path(__file__).with_name("error_ranges.toml")


class ErrorRange(NamedTuple):
    """Factors of a predicted time, between which the measured time lies."""

    low: float
    high: float

    @property
    def error(self) -> float:
        """Relative error that has both: from t / (1 + error) to t * (1 + error)."""
        return max(self.high, 1 / self.low) - 1

    def include(self, other: ErrorRange) -> ErrorRange:
        """Return the smallest range that has both."""
        return ErrorRange(min(self.low, other.low), max(self.high, other.high))


def symmetric(error: float) -> ErrorRange:
    """Return the range of a relative error."""
    return ErrorRange(1 / (1 + error), 1 + error)


# A plan whose parts, or whose machine, no published run has.
LOW_CONFIDENCE = symmetric(0.5)
# A device whose speed was measured by `weft plan --calibrate`; `benchmarks/plan_runs.py`.
CALIBRATED = symmetric(0.17)


@cache
def load_error_ranges() -> dict[str, ErrorRange]:
    """Return the range of each group of plans."""
    data = tomllib.loads(FILE.read_text())
    return {name: ErrorRange(group["low"], group["high"]) for name, group in data.items()}


def group_of_plan(plan: Plan) -> str:
    """Return the group whose published runs resemble a plan."""
    if plan.lora_rank:
        return "adapters"
    if plan.cp > 1:
        return "context parallel"
    if plan.num_active_params < plan.num_params:
        return "experts"
    return "dense"


def group_label(group: str) -> str:
    """Return what the runs of a group have."""
    return "context parallelism" if group == "context parallel" else group


def find_error_range(plan: Plan, device: Device | None, unknown_network: bool) -> ErrorRange:
    """Return the range of a predicted time.

    Args:
        plan: the plan.
        device: its device.
        unknown_network: no network of that many nodes was measured.
    """
    group = group_of_plan(plan)
    is_calibrated = device is not None and device.calibrated
    found = CALIBRATED if is_calibrated and group == "dense" else load_error_ranges()[group]
    is_unknown = plan.device == "cpu" or (
        device is not None and device.type not in ("cpu", GPU) and not is_calibrated
    )
    return found.include(LOW_CONFIDENCE) if is_unknown or unknown_network else found
