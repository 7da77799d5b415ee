"""Time, money and failures of a whole run, by arithmetic.

*Failures* come at random, one every M seconds of the whole job on average.  A run saves after every
t seconds of steps.  A save blocks training for C seconds; its files are complete W seconds later.
After a failure the run is back after R seconds, at the newest complete checkpoint; failures do not
wait for that.  From one complete checkpoint to the next it takes L = max(t, W) + C seconds without
a failure, since a save waits for the one before, and F = R + t + C + W in a row after one.  So an
interval takes

    M exp(F / M) (1 - exp(-L / M))

seconds on average.  With W = 0 this is the complete cost function of J. T. Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", FGCS 22 (2006).  If t is at least W,
the best t solves 1 - t / M = exp(-(t + C) / M), close to Young's sqrt(2 C M); below W, a longer t
is better.

*Constants* stand for what weft has not measured on a cluster.  They may be off by `UNCERTAINTY`
either way, which gives the range of the goodput.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.planning.lora_plan import plan_cost
from weft.planning.sharding import moment_bytes_per_param

if TYPE_CHECKING:
    from weft.planning.plan import Plan

# Bytes/s that a node reads or writes: Llama 3's storage sustains 2e12 for 2,048 nodes
# (arXiv 2407.21783, section 3.3.1).
STORAGE_BANDWIDTH = 1e9
# Bytes/s that a device copies into host memory: half of the 24e9 that arrive through PCIe 4, whose
# switch two devices share.
COPY_BANDWIDTH = 12e9
# Seconds that a save blocks training beyond its copy: ranks agree, and compare replicas.  Assumed.
SAVE_SECONDS = 1.0
# Seconds from a failure to the next step, without reading the checkpoint: detection, a new node,
# processes, collectives, compilation.  Assumed.  Published recoveries take 2 to 30 minutes; a rank
# of weft that is killed is back after 5 to 17 seconds on one host (docs/results.md).
RESTART_SECONDS = 300.0
# The constants above may be this many times larger or smaller.
UNCERTAINTY = 2.0
# Fraction of failures that take a node away: 78 % of Llama 3's interruptions were confirmed or
# suspected faults of hardware.
NODE_FAULTS = 0.78
# Seconds until a broken node is back.  Assumed.
REPAIR_SECONDS = 86400.0
# Fraction of the time in which the spare nodes suffice.
SPARE_CONFIDENCE = 0.99

WEIGHT_BYTES, FROZEN_BYTES = 4, 2  # of a weight in a checkpoint, and of one that is only read


class Bounds(NamedTuple):
    """An expected value, and the range that it lies in."""

    expected: float
    low: float
    high: float

    def map(self, function: Callable[[float], float]) -> Bounds:
        """Return the bounds of an increasing function."""
        return Bounds(*map(function, self))


class SaveCosts(NamedTuple):
    """Seconds of a save that block training, of its write, and of a restart."""

    blocking: float
    write: float
    restart: float

    def scale(self, factor: float) -> SaveCosts:
        """Return costs that are all ``factor`` times as high."""
        return SaveCosts(*(factor * seconds for seconds in self))


@dataclass(frozen=True)
class Failures:
    """The cost of failures, and of saves after every ``interval`` steps.

    Attributes:
        mtbf: mean seconds between failures of the whole job.
        costs: of a save and a restart.
        interval: the best number of steps between saves; that of the whole run: save at the end.
        own_interval: steps between saves by the recipe; None: weft computes it.
        goodput: fraction of the time spent on steps that count.
        own_goodput: goodput with ``own_interval``.
        lost: fraction of the time by cause: saving, repeated steps, restarting.
        seconds: of the run, with failures.
        num_nodes: nodes of the job.
        spare_nodes: additional nodes that replace broken ones.
    """

    mtbf: float
    costs: SaveCosts
    interval: int
    own_interval: int | None
    goodput: Bounds
    own_goodput: float | None
    lost: dict[str, float]
    seconds: Bounds
    num_nodes: int
    spare_nodes: int

    @property
    def count(self) -> float:
        """Expected number of failures."""
        return self.seconds.expected / self.mtbf


@dataclass(frozen=True)
class WholeRun:
    """A run from its first step to its last; without failures, ``failures`` is None.

    ``seconds``: of all steps, without start, evaluation, checkpoints and failures.
    """

    num_steps: int
    num_tokens: int
    num_devices: int
    seconds: Bounds
    failures: Failures | None = None

    @property
    def elapsed(self) -> Bounds:
        """Seconds of the run, with failures if they are known."""
        return self.seconds if self.failures is None else self.failures.seconds

    def device_hours(self, seconds: Bounds) -> Bounds:
        """Return the hours of all devices, without spare nodes."""
        return seconds.map(lambda value: value / 3600 * self.num_devices)

    def to_dict(self, price: float | None = None) -> dict[str, Any]:
        """Return the run as JSON types; null stands for infinity."""
        hours = self.device_hours(self.elapsed)
        values: dict[str, Any] = {
            "steps": self.num_steps,
            "tokens": self.num_tokens,
            "seconds": _bounds_to_dict(self.elapsed),
            "device_hours": _bounds_to_dict(hours),
        }
        if price is not None:
            values["cost"] = _bounds_to_dict(hours.map(lambda value: value * price))
        if self.failures is not None:
            failures = self.failures
            values |= {
                "mtbf_seconds": failures.mtbf,
                "failures": _finite(failures.count),
                "goodput": _bounds_to_dict(failures.goodput),
                "lost": failures.lost,
                "checkpoint_interval": failures.interval,
                "own_checkpoint_interval": failures.own_interval,
                "own_goodput": failures.own_goodput,
                "save_seconds": failures.costs._asdict(),
                "nodes": failures.num_nodes,
                "spare_nodes": failures.spare_nodes,
            }
        return values


def _bounds_to_dict(bounds: Bounds) -> dict[str, float | None]:
    return {name: _finite(value) for name, value in bounds._asdict().items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# --------------------------------------------------------------------------- the run


def count_steps(plan: Plan, num_tokens: int) -> int:
    """Return the steps that train on at least ``num_tokens`` tokens."""
    return max(1, -(-num_tokens // plan.tokens_per_step))


def predict_whole_run(
    plan: Plan,
    step_seconds: float | None,
    error_range: tuple[float, float],
    mtbf: float | None = None,
) -> WholeRun | None:
    """Return the whole run of a plan.

    Args:
        plan: its ``num_steps`` are those of the run.
        step_seconds: of a step; None: unknown.
        error_range: factors of that time, between which it lies.
        mtbf: mean seconds between failures of the whole job; None: no failures.

    Returns:
        None if the time of a step, or the number of steps, is unknown.
    """
    if step_seconds is None or not plan.num_steps:
        return None
    seconds = step_seconds * plan.num_steps
    bounds = Bounds(seconds, *(seconds * factor for factor in error_range))
    failures = None if mtbf is None else predict_failures(plan, bounds, mtbf)
    num_tokens = plan.num_steps * plan.tokens_per_step
    return WholeRun(plan.num_steps, num_tokens, plan.world_size, bounds, failures)


def predict_failures(plan: Plan, seconds: Bounds, mtbf: float) -> Failures:
    """Return the cost of failures, and how often to save.

    Args:
        plan: plan of the run.
        seconds: of all its steps.
        mtbf: mean seconds between failures of the whole job.
    """
    costs = save_costs(plan)
    step_seconds = seconds.expected / plan.num_steps

    def goodput_of(steps: int, factor: float = 1.0) -> float:
        return expected_goodput(steps * step_seconds, mtbf, costs.scale(factor))

    near = best_interval(mtbf, costs) / step_seconds
    candidates = {
        min(plan.num_steps, max(1, steps)) for steps in (math.floor(near), math.ceil(near))
    }
    steps = max(sorted(candidates), key=goodput_of)
    own = plan.job.checkpoint.interval
    own_steps = None if own == "auto" else min(own or plan.num_steps, plan.num_steps)
    bounds = Bounds(
        goodput_of(steps), goodput_of(steps, UNCERTAINTY), goodput_of(steps, 1 / UNCERTAINTY)
    )
    elapsed = Bounds(
        _divide(seconds.expected, bounds.expected),
        _divide(seconds.low, bounds.high),
        _divide(seconds.high, bounds.low),
    )
    num_nodes = math.ceil(plan.world_size / plan.local_world_size)
    return Failures(
        mtbf,
        costs,
        steps,
        own_steps,
        bounds,
        None if own_steps is None else goodput_of(own_steps),
        split_loss(steps * step_seconds, mtbf, costs),
        elapsed,
        num_nodes,
        min(num_nodes, count_spares(mtbf)),
    )


def _divide(seconds: float, fraction: float) -> float:
    return seconds / fraction if fraction else math.inf


# --------------------------------------------------------------------------- saves and failures


def save_costs(plan: Plan) -> SaveCosts:
    """Return what a save and a restart of a run cost.

    Of replicas only one writes a weight, and all read it.
    """
    moments = moment_bytes_per_param(plan.job.optim, plan_cost(plan))
    size = plan.num_trainable_params * (WEIGHT_BYTES + moments)
    frozen = (plan.num_params - plan.num_trainable_params) * FROZEN_BYTES
    bandwidth = STORAGE_BANDWIDTH * math.ceil(plan.world_size / plan.local_world_size)
    blocking = SAVE_SECONDS + size / plan.world_size / COPY_BANDWIDTH
    write = size / bandwidth
    restart = RESTART_SECONDS + (size + frozen) * plan.dp_replicate / bandwidth
    if not plan.job.checkpoint.async_save:
        return SaveCosts(blocking + write, 0.0, restart)
    return SaveCosts(blocking, write, restart)


def expected_goodput(interval: float, mtbf: float, costs: SaveCosts) -> float:
    """Return the fraction of a run's time that is spent on steps that count.

    Args:
        interval: seconds of steps between saves.
        mtbf: mean seconds between failures.
        costs: of a save and a restart.
    """
    cycle = max(interval, costs.write) + costs.blocking
    after_failure = costs.restart + interval + costs.blocking + costs.write
    elapsed = -mtbf * math.expm1(-cycle / mtbf)
    return interval / elapsed * math.exp(-after_failure / mtbf)


def split_loss(interval: float, mtbf: float, costs: SaveCosts) -> dict[str, float]:
    """Return the fractions of lost time by cause; see `expected_goodput`."""
    productive = expected_goodput(interval, mtbf, costs)
    saving = productive * (costs.blocking + max(0.0, costs.write - interval)) / interval
    # Each failure begins a restart, which the next failure may end.
    restarting = -math.expm1(-costs.restart / mtbf)
    repeated = max(0.0, 1 - productive - saving - restarting)
    return {"saving": saving, "repeated": repeated, "restarting": restarting}


def best_interval(mtbf: float, costs: SaveCosts) -> float:
    """Return the seconds of steps between saves that take the least time."""

    def is_too_long(interval: float) -> bool:
        return 1 - interval / mtbf < math.exp(-(interval + costs.blocking) / mtbf)

    low, high = 0.0, mtbf
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if is_too_long(middle) else (middle, high)
    return max(high, min(costs.write, mtbf))


def count_spares(mtbf: float) -> int:
    """Return the spare nodes that suffice most of the time.

    Broken nodes return after `REPAIR_SECONDS`.
    """
    mean = NODE_FAULTS * REPAIR_SECONDS / mtbf  # broken nodes; their number is Poisson's
    if mean > 500:
        return math.ceil(mean + 2.33 * math.sqrt(mean))
    count, term = 0, math.exp(-mean)
    total = term
    while total < SPARE_CONFIDENCE:
        count += 1
        term *= mean / count
        total += term
    return count
