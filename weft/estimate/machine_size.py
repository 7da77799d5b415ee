"""Find how many devices a run needs: to end in time, or to fit.

Traced pieces (`weft.estimate.pieces`) estimate every number of nodes.  A full trace then predicts
the answer, and the ratio of the two scales the other estimates, until the answer stays.  Models
that pieces do not describe scale with the number of devices between traces.  The global batch and
the other degrees of the recipe stay as they are; only data parallelism follows the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from weft.config.errors import MISSING, ConfigError, InvalidConfig
from weft.config.schema import Job
from weft.estimate.advice import Advice, Change
from weft.estimate.cost import build_hardware, device_spec
from weft.estimate.forecast import OUTSIDE_ALLOCATOR, Forecast, forecast
from weft.estimate.forecast_text import describe_time
from weft.estimate.pieces import Pieces, supports_pieces
from weft.estimate.whole_run import count_steps, predict_whole_run
from weft.planning.degrees import divisors
from weft.planning.devices import Cluster
from weft.planning.plan import Machine, Plan

# Traces of one answer.
MAX_TRACED = 6
# Relative errors of estimated memory before the first trace, and of time and memory after it.
FIRST_ERROR, SCALED_ERROR = 0.25, 0.05
# Least bytes of the states of a trained weight: weight and gradient in float32; of a frozen one:
# four bits.
MIN_TRAINED_BYTES, MIN_FROZEN_BYTES = 8, 0.5
# Nodes of the largest machine that `smallest_machine` tries.
MAX_NODES = 4096

# Plans a recipe on a cluster, with additional overrides; raises InvalidConfig.
Planner = Callable[[Cluster, Mapping[str, object]], tuple[Plan, Machine]]


@dataclass(frozen=True)
class SizedPlan:
    """The plan of a number of devices, its forecast, and the reason for this number.

    ``mtbf``: mean seconds between failures of a job of this size; None: no failures.
    """

    cluster: Cluster
    plan: Plan
    machine: Machine
    prediction: Forecast
    reason: str
    change: Change
    mtbf: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return what a forecast does not have as JSON types."""
        return {"cluster": str(self.cluster), "change": self.change, "reason": self.reason}


class Estimates:
    """Seconds of a step and bytes of plans, from pieces that a trace has scaled."""

    def __init__(self) -> None:
        """Begin without a piece and without a trace."""
        self._pieces: dict[str, Pieces] = {}
        self.time_ratio, self.memory_ratio = 1.0, 1.0  # traced over estimated
        self.memory_error = FIRST_ERROR

    def estimate(self, plan: Plan, machine: Machine) -> tuple[float, float] | None:
        """Return seconds of a step and bytes on a rank; None if pieces do not apply."""
        raw = self._estimate(plan, machine)
        return None if raw is None else (raw[0] * self.time_ratio, raw[1] * self.memory_ratio)

    def trace(self, plan: Plan, machine: Machine) -> Forecast:
        """Return the forecast of a plan; scale later estimates by it."""
        prediction = forecast(plan, machine, device_spec(plan, machine), cached=True)
        raw = self._estimate(plan, machine)
        if raw is not None and prediction.step_seconds is not None:
            self.time_ratio = prediction.step_seconds / raw[0]
            self.memory_ratio = prediction.needed_bytes / raw[1]
            self.memory_error = SCALED_ERROR
        return prediction

    def _estimate(self, plan: Plan, machine: Machine) -> tuple[float, float] | None:
        device = device_spec(plan, machine)
        if device is None or not supports_pieces(plan):
            return None
        pieces = self._pieces.setdefault(device.name, Pieces(device, cached=True))
        try:
            estimate = pieces.estimate(plan)
            seconds = estimate.step_seconds(build_hardware(plan, device)).total()
        except ValueError:  # the schedule does not allow the numbers
            return None
        return seconds, estimate.memory_bytes() + OUTSIDE_ALLOCATOR


# --------------------------------------------------------------------------- in time


def fewest_nodes(
    cluster: Cluster,
    planner: Planner,
    deadline: float,
    tokens: int | None = None,
    mtbf: float | None = None,
) -> SizedPlan:
    """Return the plan of the fewest nodes that end a run in time.

    Args:
        cluster: has the device, and the devices per node.
        planner: plans the recipe on a cluster.
        deadline: seconds of the run, with failures.
        tokens: of the run; None: those of the recipe's steps.
        mtbf: mean seconds between failures of a job on ``cluster``; fewer nodes fail less often.

    Raises:
        InvalidConfig: if no number of nodes is fast enough.
    """
    return _DeadlineSearch(cluster, planner, deadline, tokens, mtbf).run()


class _DeadlineSearch:
    """The search of `fewest_nodes`; ``counts``: of nodes, that divide the batch."""

    def __init__(
        self,
        cluster: Cluster,
        planner: Planner,
        deadline: float,
        tokens: int | None,
        mtbf: float | None,
    ) -> None:
        self.cluster, self.planner, self.deadline = cluster, planner, deadline
        self.tokens, self.mtbf = tokens, mtbf
        self.estimates = Estimates()
        self.plans: dict[int, tuple[Plan, Machine] | None] = {}
        self.traced: dict[int, Forecast] = {}
        plan, _ = planner(cluster, {})
        self.batch = plan.global_batch_size
        ranks, local = plan.world_size // plan.dp_size, cluster.devices_per_node
        sizes = (dp * ranks for dp in divisors(self.batch))
        self.counts = [size // local for size in sizes if size % local == 0]

    def run(self) -> SizedPlan:
        for _ in range(MAX_TRACED):
            index = self._find_first()
            if not self.counts:
                raise InvalidConfig([self._no_size()])
            count = self.counts[min(index, len(self.counts) - 1)]
            if count in self.traced and index:
                count = self.counts[index - 1]  # too slow, but perhaps by less than the error
                if self._elapsed(count) > (1 + SCALED_ERROR) * self.deadline:
                    break
            if count in self.traced:
                break
            self._trace(count)
        in_time = [n for n in self.counts if n in self.traced and self._is_in_time(n)]
        if not in_time:
            raise InvalidConfig([self._too_slow(max(self.traced))])
        larger = [n for n in self.counts if n > in_time[0]]
        for count in [in_time[0], *larger[:2]]:  # more ranks shard the state
            if self._trace(count).fits is not False and self._is_in_time(count):
                return self._answer(count, in_time[0])
        return self._answer(in_time[0], in_time[0])

    def _answer(self, count: int, fastest: int) -> SizedPlan:
        plan, machine = self._planned(count)
        days = describe_time(self.deadline)
        reason = f"{_describe_nodes(count, self.cluster)}: the fewest that end in {days}"
        if count > fastest:
            reason += f" and fit; {fastest:,} do not fit"
        elif self.traced[count].fits is False:
            reason += ", but they do not fit"
        index = self.counts.index(fastest)
        if index:
            smaller = self.counts[index - 1]
            reason += f"; {smaller:,} take {describe_time(self._elapsed(smaller))}"
        else:
            reason += f"; a batch of {self.batch:,} sequences allows no fewer in this layout"
        cluster = replace(self.cluster, num_nodes=count)
        prediction = self.traced[count]
        return SizedPlan(cluster, plan, machine, prediction, reason, {}, self._mtbf(count))

    def _too_slow(self, count: int) -> ConfigError:
        seconds, mtbf = self._elapsed(count), self._mtbf(count)
        rule = f"is too short: {_describe_nodes(count, self.cluster)} "
        is_endless = not math.isfinite(seconds)
        rule += "never end" if is_endless else f"take {describe_time(seconds)}"
        remedy = "use "
        if mtbf is not None:
            rule += f" with a failure every {describe_time(mtbf)}"
            remedy = f"give --mtbf of a job on {self.cluster}, or use "
        rule += f", and the batch of {self.batch:,} sequences occupies no more"
        remedy += "" if is_endless else f"--days {-(-seconds // 86400):.0f}, "
        remedy += "a larger train.global_batch_size, or a faster device"
        return ConfigError("--days", f"{self.deadline / 86400:g}", rule, remedy)

    def _no_size(self) -> ConfigError:
        rule = f"finds no number of nodes: the batch of {self.batch:,} sequences occupies no whole "
        rule += f"node of {self.cluster.devices_per_node} devices"
        remedy = "use a larger train.global_batch_size, or --cluster with fewer devices per node"
        return ConfigError("--days", f"{self.deadline / 86400:g}", rule, remedy)

    def _find_first(self) -> int:
        """Return the index of the fewest nodes that are fast enough; without: the length.

        Removes numbers of nodes that the rules refuse.
        """
        low, high = 0, len(self.counts)
        while low < high:
            middle = (low + high) // 2
            if self._plan(self.counts[middle]) is None:
                del self.counts[middle]
                high -= 1
            elif self._is_in_time(self.counts[middle]):
                high = middle
            else:
                low = middle + 1
        while low and self._plan(self.counts[low - 1]) is None:
            del self.counts[low - 1]
            low -= 1
        return low

    def _plan(self, count: int) -> tuple[Plan, Machine] | None:
        """Return the plan of a number of nodes; None if the rules refuse it."""
        if count not in self.plans:
            try:
                self.plans[count] = self.planner(replace(self.cluster, num_nodes=count), {})
            except InvalidConfig:
                self.plans[count] = None
        return self.plans[count]

    def _planned(self, count: int) -> tuple[Plan, Machine]:
        planned = self._plan(count)
        assert planned is not None  # `counts` has only such numbers
        return planned

    def _mtbf(self, count: int) -> float | None:
        return None if self.mtbf is None else self.mtbf * self.cluster.num_nodes / count

    def _is_in_time(self, count: int) -> bool:
        return self._elapsed(count) <= self.deadline

    def _elapsed(self, count: int) -> float:
        """Return the seconds of the run: traced, or else estimated."""
        plan, machine = self._planned(count)
        if count in self.traced:
            seconds = self.traced[count].step_seconds
        elif (estimate := self.estimates.estimate(plan, machine)) is not None:
            seconds = estimate[0]
        else:  # as many device seconds per step as in the nearest trace
            known = min(self.traced or [count], key=lambda n: abs(n - count))
            seconds = self._trace(known).step_seconds
            seconds = None if seconds is None else seconds * known / count
        if seconds is None:
            rule, remedy = "needs a device of known speed", "use --cluster, such as 64x8xH100"
            raise InvalidConfig([ConfigError("--days", f"{self.deadline / 86400:g}", rule, remedy)])
        if self.tokens is not None:
            plan = replace(plan, num_steps=count_steps(plan, self.tokens))
        run = predict_whole_run(plan, seconds, (1.0, 1.0), self._mtbf(count))
        if run is None:
            rule, remedy = "needs the length of the run", "add --tokens, such as --tokens 15T"
            raise InvalidConfig([ConfigError("--days", f"{self.deadline / 86400:g}", rule, remedy)])
        return run.elapsed.expected

    def _trace(self, count: int) -> Forecast:
        if count not in self.traced:
            self.traced[count] = self.estimates.trace(*self._planned(count))
        return self.traced[count]


def _describe_nodes(count: int, cluster: Cluster) -> str:
    local = cluster.devices_per_node
    return f"{count:,} node{'s' * (count != 1)} of {local} {cluster.device_name}"


# --------------------------------------------------------------------------- to fit


# Changes that save memory, the mildest first.
_LEAST: Change = {"train.microbatch_size": 1, "activation_checkpoint.mode": "full"}
SAVING: tuple[Change, ...] = (
    {},
    {"train.microbatch_size": 1},
    _LEAST,
    _LEAST | {"optim.state_dtype": "8bit"},
    _LEAST | {"lora.quantize": "nf4"},
)


def smallest_machine(cluster: Cluster, planner: Planner) -> SizedPlan:
    """Return the plan of the fewest devices on which a recipe fits.

    If the recipe does not fit as it is, with one of the changes of `SAVING`.

    Args:
        cluster: has the device, and the devices of a node; a smaller machine is a part of a node.
        planner: plans the recipe on a cluster.

    Raises:
        InvalidConfig: if it fits on no machine.
    """
    estimates = Estimates()
    tried: list[str] = []
    refused: InvalidConfig | None = None
    has_plan = False
    for smaller in _list_machines(cluster):
        if len(tried) == MAX_TRACED:
            break
        try:
            planned = planner(smaller, {})
        except InvalidConfig as error:
            refused = refused or error
            continue
        has_plan = True
        if not _may_hold_states(*planned):
            continue
        jobs: list[Job] = []
        for change in SAVING:
            if len(tried) == MAX_TRACED:
                break
            try:
                plan, machine = planner(smaller, change) if change else planned
            except InvalidConfig:
                continue
            if plan.job in jobs or ("lora.quantize" in change and not plan.lora_rank):
                continue
            jobs.append(plan.job)
            capacity = _capacity(plan, machine)
            estimate = estimates.estimate(plan, machine)
            if estimate is not None and estimate[1] > (1 + estimates.memory_error) * capacity:
                continue
            prediction = estimates.trace(plan, machine)
            tried.append(str(smaller))
            if prediction.fits:
                reason = _describe_smallest(smaller, change)
                return SizedPlan(smaller, plan, machine, prediction, reason, change)
    if refused is not None and not has_plan:
        raise refused
    rule = f"finds no machine of {cluster.device_name} on which the recipe fits"
    rule += f" (traced on {', '.join(dict.fromkeys(tried))})" if tried else ""
    remedy = "use a device with more memory, or a smaller train.global_batch_size or train.seq_len"
    raise InvalidConfig([ConfigError("--smallest", MISSING, rule, remedy)])


def _list_machines(cluster: Cluster) -> Iterator[Cluster]:
    """Yield machines of a device, smallest first: parts of a node, then nodes."""
    for count in divisors(cluster.devices_per_node):
        yield replace(cluster, num_nodes=1, devices_per_node=count)
    count = 1
    while (count := count + max(1, count // 4)) <= MAX_NODES:
        yield replace(cluster, num_nodes=count)


def _capacity(plan: Plan, machine: Machine) -> float:
    """Return the bytes of a device.

    Raises:
        InvalidConfig: if they are unknown.
    """
    capacity = machine.memory_per_rank(plan.local_world_size)
    if capacity is None:
        rule, remedy = "needs a device whose memory is known", "use --cluster, such as 8xH100"
        raise InvalidConfig([ConfigError("--smallest", MISSING, rule, remedy)])
    return capacity


def _may_hold_states(plan: Plan, machine: Machine) -> bool:
    """Return False if even the least states of the weights do not fit."""
    if plan.job.parallel.cpu_offload:
        return True
    trained = plan.num_trainable_params
    states = MIN_TRAINED_BYTES * trained + MIN_FROZEN_BYTES * (plan.num_params - trained)
    return states / plan.world_size <= _capacity(plan, machine)


def _describe_smallest(cluster: Cluster, change: Change) -> str:
    if cluster.num_nodes == 1:
        text = f"{cluster.devices_per_node} {cluster.device_name}"
    else:
        text = _describe_nodes(cluster.num_nodes, cluster)
    text += ": the fewest on which the recipe fits"
    return f"{text}, with {Advice(change, 0.0, 0.0)}" if change else text
