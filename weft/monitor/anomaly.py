"""Detect steps with a NaN, an Inf or a spike in the loss or the gradient norm.

*One verdict.*  Two scalars are judged, the loss and the mean of the ranks' gradient norms (equal
unless hardware is broken).  An all-reduce makes both the same on all ranks, so each rank decides
alone and all decide the same.

*Never applied.*  A step with a NaN or Inf is not applied under any policy: the optimizer reads a
flag on the device (`weft.optim.optimizer.masked_step`).  With ``on_anomaly = stop`` nothing else
happens in that step: the scalars of each step stay on the device, and the first NaN or Inf ends the
run where the host waits for the device anyway, before the next record or checkpoint (or after
`MAX_UNCHECKED` steps, so that they do not pile up).  With ``skip`` and ``rewind`` the host reads
the two scalars in every step, before the update.

*Spikes.*  A value is a spike if it exceeds the median of the last accepted values by
``spike_threshold`` standard deviations, estimated from the median absolute deviation: half of a
window may be outliers before either moves much.  Only finite, accepted values enter the window, so
no bad step makes the next one look good, or a good one bad.  A deviation of zero would make every
change a spike; it is at least `MIN_DEVIATION` of the median.

*Compute again.*  Before anything follows, the step is computed again from the same batch and
weights.  If the second result is ordinary, the cause was hardware and not data, and the second
result counts.  The ranks whose own contributions changed are reported.  Equal bits are not required
of the second result, because atomic additions on GPUs come in any order.

A window of accepted values would reject a lasting change of level for ever: after
``max_anomalies`` steps in a row the run stops with an error.

*Divergence.*  A finite loss can still be lost: `DivergenceDetector` compares each record with the
lowest loss of the run and with guessing.  It only warns: whether the run is worth its price is for
people to decide.

Left out: a verdict on the device with the host one step behind.  It would hide the wait of ``skip``
and ``rewind``, but the loop would know the result of a step only after the next one.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.config.errors import WeftError
from weft.config.schema import ResilienceSection

JUDGED = ("loss", "gradient norm")
TO_SIGMA = 1.4826  # standard deviation of a normal distribution / its median absolute deviation
MIN_DEVIATION = 0.005  # of the median
MAX_UNCHECKED = 1000  # steps without a record after which the host waits for the device
# Limits of a divergence, see `DivergenceDetector`: nats; fractions; a gradient norm.
MIN_RISE, LOST_FRACTION, DEAD_LOSS, DEAD_NORM = 1.0, 0.5, 0.95, 1e-3
BAD_RECORDS, BAD_STEPS = 3, 20
ROUNDING = 1e-3  # relative difference of a rank's own result between two computations of a step


class AnomalyError(WeftError):
    """The run must end because of its anomalies; every rank has the same error."""


class StepResult(NamedTuple):
    """Loss and gradient norm of a step: tensors on the device, not waited for."""

    loss_and_norm: Tensor  # float64 (2,), the same on all ranks
    local: Tensor  # float64 (2,): this rank's share of the loss, norm of its gradient shards
    grad_norm: Tensor  # the global norm as this rank has computed it, for clipping


def reduce_result(loss: Tensor, grad_norm: Tensor, local_grad_norm: Tensor) -> StepResult:
    """Make the loss and the gradient norm the same on all ranks; a collective.

    Args:
        loss: this rank's share of the mean loss.
        grad_norm: norm of all gradients, equal on all ranks unless hardware is broken.
        local_grad_norm: norm of the gradient shards of this rank.
    """
    values = loss, grad_norm.to(loss), loss, local_grad_norm.to(loss)
    reduced, local = torch.stack(values).double().view(2, 2)
    if dist.get_world_size() > 1:
        dist.all_reduce(reduced)
        reduced[1] /= dist.get_world_size()  # exact for equal float32 norms
    return StepResult(reduced, local, grad_norm)


class Suspicion(NamedTuple):
    """A value that is not as usual."""

    position: int  # in `JUDGED`
    median: float | None  # of the accepted values; None if there are too few
    limit: float | None  # above it a value is a spike


@dataclass(frozen=True)
class Anomaly:
    """A step that was suspect; equal on every rank."""

    what: str  # loss or gradient norm
    value: float
    median: float | None  # of the accepted values; None if there were too few
    limit: float | None  # above it a value is a spike
    again: float  # the value when the step was computed again
    cause: str  # transient: ordinary when computed again; else persistent
    action: str  # skip or rewind; none if transient
    ranks: tuple[int, ...] = ()  # ranks whose own result changed

    def __str__(self) -> str:
        median = "" if self.median is None else f", median {self.median:.4g}"
        if self.cause == "persistent":
            action = "its update is skipped"
            if self.action == "rewind":
                action = "rewinding to the last checkpoint, and skipping the samples since"
            return (
                f"the {self.what} is {self.value:.4g}{median}, also when computed again: {action}"
            )
        ranks = ", ".join(map(str, self.ranks)) or "unknown"
        return (
            f"the {self.what} was {self.value:.4g}{median}, and {self.again:.4g} when computed "
            f"again: a transient hardware fault on rank {ranks}"
        )

    def to_dict(self, step: int, first_sample: int, last_sample: int) -> dict[str, Any]:
        """Return JSON values; NaN and Inf as strings."""
        values = {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }
        position = {"step": step, "first_sample": first_sample, "last_sample": last_sample}
        return position | values | {"ranks": list(self.ranks)}


class AnomalyDetector:
    """Judge each step by the accepted ones before it.

    Args:
        section: the section ``resilience``.
        state: `state` of an earlier detector, or empty.
        locate: returns where in a step a NaN began, as the end of a sentence, for the error.
    """

    def __init__(
        self,
        section: ResilienceSection,
        state: Mapping[str, Any],
        locate: Callable[[int], str] = lambda step: "",
    ) -> None:
        self._section, self._locate = section, locate
        self._rewinds = 0  # to the newest checkpoint
        self._unchecked: list[tuple[int, Tensor]] = []  # steps, and their loss_and_norm
        self.restore(state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over the state of an earlier detector."""
        size = self._section.spike_window
        self._accepted = {what: deque[float](state.get(what, ()), maxlen=size) for what in JUDGED}
        self._in_a_row = int(state.get("in_a_row", 0))

    def reset_rewinds(self) -> None:
        """Forget earlier rewinds, because there is a new checkpoint to rewind to."""
        self._rewinds = 0

    def state(self) -> dict[str, Any]:
        """Return everything on which later verdicts depend, as JSON values with every bit."""
        if self._section.on_anomaly == "stop":
            return {}
        windows = {what: list(values) for what, values in self._accepted.items()}
        return windows | {"in_a_row": self._in_a_row}

    def check(self, step: int, result: StepResult) -> Suspicion | None:
        """Judge a step.

        Returns:
            The suspicion; None if the step is ordinary, and always with ``on_anomaly = stop``.

        Raises:
            AnomalyError: see `wait`.
        """
        if self._section.on_anomaly == "stop":
            self._unchecked.append((step, result.loss_and_norm))
            if len(self._unchecked) == MAX_UNCHECKED:
                self.wait()
            return None
        values = result.loss_and_norm.tolist()  # the host waits for the device
        suspicion = self.judge(values)
        if suspicion is None:
            self._accept(values)
        return suspicion

    def classify(self, suspicion: Suspicion, first: StepResult, second: StepResult) -> Anomaly:
        """Decide about a step that `check` suspects; a collective.

        Args:
            suspicion: the return value of `check`.
            first: the suspect result.
            second: the result of the same step, computed again.

        Raises:
            AnomalyError: if there were more than ``resilience.max_anomalies`` in a row.
        """
        index, median, limit = suspicion
        values, values_again = first.loss_and_norm.tolist(), second.loss_and_norm.tolist()
        cause, action = "persistent", str(self._section.on_anomaly)
        if self.judge(values_again) is None:
            cause, action = "transient", "none"
            self._accept(values_again)
        elif action == "skip":
            self._in_a_row += 1
        else:
            self._rewinds += 1
        anomaly = Anomaly(
            what=JUDGED[index],
            value=values[index],
            median=median,
            limit=limit,
            again=values_again[index],
            cause=cause,
            action=action,
            ranks=_find_changed_ranks(first, second),
        )
        max_anomalies = self._section.max_anomalies
        if max(self._in_a_row, self._rewinds) > max_anomalies:
            before = f"the {max_anomalies} steps before it were skipped"
            if action == "rewind":
                before = f"the run was rewound {max_anomalies} times to the same checkpoint"
            raise AnomalyError(
                f"the {anomaly.what} is {anomaly.value:.4g}, and {before}. If this is the new "
                "level, raise --resilience.spike_threshold; else try a lower --optim.lr"
            )
        return anomaly

    def judge(self, values: list[float]) -> Suspicion | None:
        """Return the first NaN or Inf of the two values of `JUDGED`, else the first spike."""
        usual = [self._median_and_limit(what) for what in JUDGED]
        for index, value in enumerate(values):
            if not math.isfinite(value):
                return Suspicion(index, *usual[index])
        for index, value in enumerate(values):
            median, limit = usual[index]
            if limit is not None and value > limit:
                return Suspicion(index, median, limit)
        return None

    def _median_and_limit(self, what: str) -> tuple[float | None, float | None]:
        """Return the median and the limit; None while the window is less than half full."""
        values = self._accepted[what]
        if len(values) < self._section.spike_window // 2:
            return None, None
        median = statistics.median(values)
        deviation = TO_SIGMA * statistics.median(abs(value - median) for value in values)
        deviation = max(deviation, MIN_DEVIATION * abs(median))
        return median, median + self._section.spike_threshold * deviation

    def _accept(self, values: list[float]) -> None:
        for what, value in zip(JUDGED, values, strict=True):
            self._accepted[what].append(value)
        self._in_a_row = 0

    def wait(self, *extra: Tensor) -> list[list[float]]:
        """Wait for the device, and raise if a step since the last call had a NaN or Inf.

        Only ``on_anomaly = stop`` leaves such steps for this function.

        Args:
            extra: 1-D tensors on the device that the host needs, too.

        Returns:
            The values of each tensor of ``extra``.

        Raises:
            AnomalyError: with the step and its value.
        """
        unchecked, self._unchecked = self._unchecked, []
        tensors = [reduced for _, reduced in unchecked] + [each.double() for each in extra]
        on_host = torch.cat(tensors).cpu() if tensors else torch.empty(0)
        parts = torch.split(on_host, [len(each) for each in tensors])
        values = [part.tolist() for part in parts]
        for (step, _), of_step in zip(unchecked, values, strict=False):
            for what, value in zip(JUDGED, of_step, strict=True):
                if not math.isfinite(value):
                    raise AnomalyError(
                        f"the {what} is {value} in step {step}: its update was not applied, and "
                        f"nothing has been recorded or saved since{self._locate(step)}; try a "
                        "lower --optim.lr, --precision.compute_dtype float32, or "
                        "--resilience.on_anomaly skip"
                    )
        return values[len(unchecked) :]


@dataclass(frozen=True)
class Divergence:
    """A run that has unlearned, or learns nothing; losses in nats per token."""

    since: int  # step of the first record that shows it
    loss: float
    grad_norm: float
    best: float  # the lowest loss of the run
    guess: float  # the loss of guessing: the logarithm of the vocabulary size
    begins: bool = False  # True in the first record that reports it

    def __str__(self) -> str:
        since = f"since step {self.since}"
        if _is_dead(self.loss, self.grad_norm, self.guess):
            why = (
                f"the loss stays at {self.loss:.2f} {since}, no better than guessing "
                f"({self.guess:.2f}), and the gradient norm is {self.grad_norm:.2g}: the model no "
                "longer learns"
            )
        else:
            why = (
                f"the loss is {self.loss:.2f} and has been high {since}; the lowest was "
                f"{self.best:.2f}, and guessing gives {self.guess:.2f}"
            )
        return (
            f"diverged: {why}. Try a lower --optim.lr or more --optim.warmup_steps, and check the "
            "data; a checkpoint from before that step can be used with weft rollback"
        )


def _is_dead(loss: float, grad_norm: float, guess: float) -> bool:
    return loss >= DEAD_LOSS * guess and grad_norm < DEAD_NORM


def divergence_of(
    record: Mapping[str, Any] | None, objective: str, vocab_size: int
) -> Divergence | None:
    """Return the divergence in a record; None without one or if it is damaged."""
    names = ("diverged_since", "loss", "grad_norm", "best_loss")
    values = [(record or {}).get(name) for name in names]
    if objective != "next_token" or not all(isinstance(value, int | float) for value in values):
        return None
    since, loss, grad_norm, best = map(float, values)  # type: ignore[arg-type]
    return Divergence(int(since), loss, grad_norm, best, math.log(vocab_size))


class DivergenceDetector:
    """Detect from records whether a run has diverged although every value is finite.

    A record is *bad* in two cases.  Either the loss is more than `MIN_RISE` nats above the lowest
    loss of the run, and the run has lost more than `LOST_FRACTION` of its gain over guessing.  Or
    the loss is that of guessing and the gradient norm is below `DEAD_NORM`: in text, whose tokens
    are not equally frequent, a model that guesses does not have a small gradient.  `BAD_RECORDS`
    bad records in a row over `BAD_STEPS` steps are a divergence; at the end of the run two suffice.

    The lowest loss is a median of three records, so that one easy batch does not count.

    Args:
        guess: the loss of guessing; None: the objective has none, and nothing is judged.
    """

    def __init__(self, guess: float | None) -> None:
        self._guess = guess
        self.restore({})

    def state(self) -> dict[str, Any]:
        """Return everything on which later verdicts depend, as JSON values with every bit."""
        return {
            "best": self.best,
            "newest": list(self._newest),
            "since": self._since,
            "count": self._count,
            "records": self._records,
            "reported": self._reported,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over the state of an earlier detector; empty: before the first record."""
        self.best: float | None = state.get("best")
        self._newest = deque[float](state.get("newest", ()), maxlen=3)
        self._since: int | None = state.get("since")
        self._count = int(state.get("count", 0))
        self._records = int(state.get("records", 0))
        self._reported = bool(state.get("reported", False))

    def check(self, step: int, loss: float, grad_norm: float, is_last: bool) -> Divergence | None:
        """Judge a record; ``is_last``: the last record of the run."""
        if self._guess is None or not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return None
        self._records += 1
        self._newest.append(loss)
        if self.best is None:
            self.best = loss
        elif len(self._newest) == 3:
            self.best = min(self.best, statistics.median(self._newest))
        rise = max(MIN_RISE, LOST_FRACTION * (self._guess - self.best))
        if not (loss > self.best + rise or _is_dead(loss, grad_norm, self._guess)):
            self._since, self._count, self._reported = None, 0, False
            return None
        self._since = step if self._since is None else self._since
        self._count += 1
        lasts = self._count >= BAD_RECORDS and step - self._since >= BAD_STEPS
        ends = is_last and self._count >= min(2, self._records - 1) > 0
        if not (self._reported or lasts or ends):
            return None
        begins, self._reported = not self._reported, True
        return Divergence(self._since, loss, grad_norm, self.best, self._guess, begins)


def _find_changed_ranks(first: StepResult, second: StepResult) -> tuple[int, ...]:
    """Return the ranks whose own loss changed, else those whose own gradients changed.

    A wrong loss names its rank.  Wrong gradients show only after the reduction, on the rank that
    holds the shard: another rank of the same group may have computed them.
    """
    local = torch.cat((first.local, second.local))
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local)
    rows = [row.tolist() for row in gathered]
    for index in range(len(JUDGED)):
        pairs = [(row[index], row[index + len(JUDGED)]) for row in rows]
        ranks = tuple(
            rank
            for rank, (a, b) in enumerate(pairs)
            if not (math.isclose(a, b, rel_tol=ROUNDING) or (math.isnan(a) and math.isnan(b)))
        )
        if ranks:
            return ranks
    return ()
