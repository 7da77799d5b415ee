"""Steps that must not count: a loss or gradient norm that is no number, or far above the usual.

*One verdict.*  What is judged are two scalars that an all-reduce over every rank has made the same
on all of them, the loss and the mean of the ranks' gradient norms (equal, unless hardware is
broken: then their mean is still the same everywhere).  Whatever follows is decided on each rank by
itself, from equal numbers, and so equally.

*Never applied.*  A step that is not finite is not applied, whatever the policy: the optimizer looks
at a flag on the device (see `weft.optim.optimizer.masked_step`).  Under ``stop`` that is all that
happens in the step.  The scalars of each step stay on the device, and the first that is not finite
ends the run where the host waits for the device anyway, before the next record or checkpoint (or
after `UNSEEN` steps, so that they do not pile up).  Under ``skip`` and
``rewind`` the host looks at the two scalars in every step, before the update.

*The usual* is the median of the last accepted values, and their median absolute deviation: half of
a window may be wild before either moves much.  Only what is finite and was accepted enters, so no
bad step makes the next one look good, or a good one bad.  A deviation of zero would make everything
a spike; it is taken as at least `LEAST` of the median.

*Once more.*  Before anything is done about it, the step is computed again from the same batch and
weights.  If it is an ordinary one then, it was not the data but the hardware, and the second result
counts.  Which rank it was is told by what each contributed, in both runs.  To demand equal bits of
the second run would be wrong on GPUs, whose atomic additions come in any order.

A window that follows only accepted values would refuse a lasting change of level for ever: after
``anomaly_limit`` steps in a row the run stops and says so.

*A finite divergence.*  A loss that is finite can still be lost: `DivergenceDetector` compares what
is recorded with the lowest loss of the run and with guessing.  It warns and changes nothing, under
every policy: whether the run is worth its price from there on is for people to decide.

Left out: a verdict on the device with the host a step behind.  It would hide the wait under
``skip`` and ``rewind``, for a loop in which what is known lags behind what is done.
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

WHAT = ("loss", "gradient norm")
TO_SIGMA = 1.4826  # a normal distribution's standard deviation, by its median absolute deviation
LEAST = 0.005  # of the median: the least deviation
UNSEEN = 1000  # steps without a record before the host waits for the device all the same
# Of a finite divergence, see `DivergenceDetector`: nats, a share, a share of guessing, a norm.
LEAST_RISE, LOST_SHARE, DEAD_LOSS, DEAD_NORM = 1.0, 0.5, 0.95, 1e-3
BAD_RECORDS, BAD_STEPS = 3, 20
ROUNDING = 1e-3  # by which a rank's own result may differ between two runs of a step


class AnomalyError(WeftError):
    """The run cannot go on over its anomalies; every rank has the same error."""


class StepResult(NamedTuple):
    """What computing a step gave: scalars on the device that nobody has waited for."""

    told: Tensor  # (2,) float64, the same on all ranks: loss, gradient norm
    own: Tensor  # (2,) float64: this rank's share of the loss, norm of the gradients that it holds
    norm: Tensor  # the gradient norm as this rank has it


def gather(share: Tensor, norm: Tensor, held: Tensor) -> StepResult:
    """Let all ranks know the loss and the gradient norm of a step; every rank calls it.

    Args:
        share: of the mean loss, on this rank.
        norm: of all gradients, equal on all ranks if all is well.
        held: norm of the gradients on this rank.
    """
    own = torch.stack((share, held.to(share))).double()
    told = torch.stack((share, norm.to(share))).double()
    if dist.get_world_size() > 1:
        dist.all_reduce(told)
        told[1] /= dist.get_world_size()  # exact for equal float32 norms
    return StepResult(told, own, norm)


@dataclass(frozen=True)
class Anomaly:
    """A step that did not count, or did only the second time; the same on every rank."""

    what: str  # loss or gradient norm
    value: float
    median: float | None  # of the accepted ones; None where there were too few
    limit: float | None  # above which a value is a spike
    again: float  # the value when the step was computed again
    cause: str  # transient: gone the second time; else persistent
    action: str  # skip or rewind; none if it was transient
    ranks: tuple[int, ...] = ()  # whose own result was another the second time

    def __str__(self) -> str:
        usual = "" if self.median is None else f", median {self.median:.4g}"
        if self.cause == "persistent":
            then = "its update is left out"
            if self.action == "rewind":
                then = "back to the last checkpoint, and past the samples since"
            return f"the {self.what} is {self.value:.4g}{usual}, also when computed again: {then}"
        ranks = ", ".join(map(str, self.ranks)) or "unknown"
        was = f"the {self.what} was {self.value:.4g}{usual}, and {self.again:.4g} when computed"
        return f"{was} again: a transient fault of hardware, seen on rank {ranks}"

    def to_dict(self, step: int, first_sample: int, last_sample: int) -> dict[str, Any]:
        """JSON values, with the place: what is no number as a string."""
        values = {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }
        place = {"step": step, "first_sample": first_sample, "last_sample": last_sample}
        return place | values | {"ranks": list(self.ranks)}


class AnomalyDetector:
    """What is usual in a run, and what to do with a step that is not."""

    def __init__(
        self,
        section: ResilienceSection,
        state: Mapping[str, Any],
        where: Callable[[int], str] = lambda step: "",
    ) -> None:
        """
        Args:
            state: of an earlier watch, or empty.
            where: what is to be said of where in a step it began that is not finite.
        """
        self._section, self._where = section, where
        self._rewinds = 0  # to the newest checkpoint: every one begins with none
        self._unseen: list[tuple[int, Tensor]] = []  # steps, and what was told of them
        self.restore(state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Know what an earlier watch knew."""
        size = self._section.spike_window
        self._accepted = {what: deque[float](state.get(what, ()), maxlen=size) for what in WHAT}
        self._in_a_row = int(state.get("in_a_row", 0))

    def saved(self) -> None:
        """There is a new checkpoint to rewind to."""
        self._rewinds = 0

    def state(self) -> dict[str, Any]:
        """All that the coming verdicts depend on, as JSON values, which keep every bit."""
        if self._section.on_anomaly == "stop":
            return {}
        windows = {what: list(values) for what, values in self._accepted.items()}
        return windows | {"in_a_row": self._in_a_row}

    def examine(
        self, step: int, compute: Callable[[], StepResult]
    ) -> tuple[StepResult, Anomaly | None]:
        """Compute a step, and once more if it is suspicious; every rank calls it.

        Args:
            compute: forward and backward from clean gradients.

        Returns:
            The trial that counts, and what was wrong; never anything under ``stop``.

        Raises:
            AnomalyError: if ``anomaly_limit`` is used up.
        """
        first = compute()
        if self._section.on_anomaly == "stop":
            self._unseen.append((step, first.told))
            if len(self._unseen) == UNSEEN:
                self.check()
            return first, None
        values = first.told.tolist()  # here the host waits
        suspicion = self.judge(values)
        if suspicion is None:
            self._accept(values)
            return first, None
        place, median, limit = suspicion
        second = compute()
        values_again = second.told.tolist()
        cause, action = "persistent", str(self._section.on_anomaly)
        if self.judge(values_again) is None:
            cause, action = "transient", "none"
            self._accept(values_again)
        elif action == "skip":
            self._in_a_row += 1
        else:
            self._rewinds += 1
        anomaly = Anomaly(
            what=WHAT[place],
            value=values[place],
            median=median,
            limit=limit,
            again=values_again[place],
            cause=cause,
            action=action,
            ranks=_changed(first, second),
        )
        most = self._section.max_anomalies
        if max(self._in_a_row, self._rewinds) > most:
            before = f"{most} steps in a row before it were skipped"
            if action == "rewind":
                before = f"the run went back {most} times to the same checkpoint"
            raise AnomalyError(
                f"the {anomaly.what} is {anomaly.value:.4g}, and {before}: if this is the new "
                "level, raise --resilience.spike_threshold; else try a lower --optim.lr"
            )
        return second, anomaly

    def judge(self, values: list[float]) -> tuple[int, float | None, float | None] | None:
        """Which of `WHAT` is not as usual, with the median and the limit; None: nothing is."""
        usual = [self._usual(what) for what in WHAT]
        for place, value in enumerate(values):
            if not math.isfinite(value):
                return place, *usual[place]
        for place, value in enumerate(values):
            median, limit = usual[place]
            if limit is not None and value > limit:
                return place, median, limit
        return None

    def _usual(self, what: str) -> tuple[float | None, float | None]:
        """Median and limit; None while less than half of the window is filled."""
        values = self._accepted[what]
        if len(values) < self._section.spike_window // 2:
            return None, None
        median = statistics.median(values)
        deviation = TO_SIGMA * statistics.median(abs(value - median) for value in values)
        deviation = max(deviation, LEAST * abs(median))
        return median, median + self._section.spike_threshold * deviation

    def _accept(self, values: list[float]) -> None:
        for what, value in zip(WHAT, values, strict=True):
            self._accepted[what].append(value)
        self._in_a_row = 0

    def check(self, *more: Tensor) -> list[float]:
        """End the run if a step since the last look was not finite, under ``stop``.

        Args:
            more: 1-D, on the device: what else the host wants to know, in the same wait for it.

        Returns:
            All their values, one after the other.

        Raises:
            AnomalyError: which step, and what it was.
        """
        unseen, self._unseen = self._unseen, []
        wanted = [told for _, told in unseen] + [each.double() for each in more]
        values = torch.cat(wanted).tolist() if wanted else []
        for place, (step, _) in enumerate(unseen):
            of_step = values[len(WHAT) * place : len(WHAT) * (place + 1)]
            for what, value in zip(WHAT, of_step, strict=True):
                if not math.isfinite(value):
                    raise AnomalyError(
                        f"the {what} is {value} in step {step}: its update was not applied, and "
                        f"nothing is recorded or saved since{self._where(step)}; try a lower "
                        "--optim.lr, --precision.compute_dtype float32, or "
                        "--resilience.on_anomaly skip"
                    )
        return values[len(WHAT) * len(unseen) :]


@dataclass(frozen=True)
class Divergence:
    """A run that has lost what it had learned, or learns nothing; losses in nats per token."""

    since: int  # step of the first record that showed it
    loss: float
    grad_norm: float
    best: float  # the lowest loss of the run
    guess: float  # the loss of guessing: the logarithm of the vocabulary
    begins: bool = False  # this record is the first to say so

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
    """Return the divergence that a record tells of; None if there is none, or it is damaged."""
    names = ("diverged_since", "loss", "grad_norm", "best_loss")
    values = [(record or {}).get(name) for name in names]
    if objective != "next_token" or not all(isinstance(value, int | float) for value in values):
        return None
    since, loss, grad_norm, best = map(float, values)  # type: ignore[arg-type]
    return Divergence(int(since), loss, grad_norm, best, math.log(vocab_size))


class DivergenceDetector:
    """Tell from the records of a run whether it has diverged, though every value is finite.

    A record is *bad* in two cases.  The loss is more than `LEAST_RISE` nats above the lowest of the
    run, and has lost more than `LOST_SHARE` of the way from guessing to there.  Or the loss is that
    of guessing and the gradient is zero to `DEAD_NORM`: of text, whose tokens are not equally
    frequent, the gradient of a model that guesses is not small.  `BAD_RECORDS` bad ones in a row
    over `BAD_STEPS` steps are a divergence; at the end of the run the last two are enough.

    The lowest loss is a median of three records, so that one easy batch does not count.
    """

    def __init__(self, guess: float | None) -> None:
        """``guess``: the loss of guessing; None: the objective has none, and nothing is judged."""
        self._guess = guess
        self.back_to(None)

    def back_to(self, record: Mapping[str, Any] | None) -> None:
        """Know what the detector knew at a record; None: before the first one."""
        best, since = (record or {}).get("best_loss"), (record or {}).get("diverged_since")
        self.best: float | None = best if isinstance(best, float) else None
        self._since: int | None = since if isinstance(since, int) else None
        self._reported = self._since is not None
        self._count = BAD_RECORDS if self._reported else 0
        self._records = 0 if self.best is None else 1
        self._newest: deque[float] = deque(maxlen=3)

    def check(self, step: int, loss: float, grad_norm: float, end: bool) -> Divergence | None:
        """Judge a record; ``end``: the last one of the run."""
        if self._guess is None or not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return None
        self._records += 1
        self._newest.append(loss)
        if self.best is None:
            self.best = loss
        elif len(self._newest) == 3:
            self.best = min(self.best, statistics.median(self._newest))
        rise = max(LEAST_RISE, LOST_SHARE * (self._guess - self.best))
        if not (loss > self.best + rise or _is_dead(loss, grad_norm, self._guess)):
            self._since, self._count, self._reported = None, 0, False
            return None
        self._since = step if self._since is None else self._since
        self._count += 1
        lasts = self._count >= BAD_RECORDS and step - self._since >= BAD_STEPS
        ends = end and self._count >= min(2, self._records - 1) > 0
        if not (self._reported or lasts or ends):
            return None
        begins, self._reported = not self._reported, True
        return Divergence(self._since, loss, grad_norm, self.best, self._guess, begins)


def _changed(first: StepResult, second: StepResult) -> tuple[int, ...]:
    """The ranks whose own result differs between two runs of a step: in loss, else in gradients.

    A wrong loss is one rank's own.  Wrong gradients are seen after they are added up over ranks,
    where they lie: the rank that computed them may be another one of the same group.
    """
    mine = torch.cat((first.own, second.own))
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    rows = [row.tolist() for row in every]
    for place in range(len(WHAT)):
        pairs = [(row[place], row[place + len(WHAT)]) for row in rows]
        ranks = tuple(
            rank
            for rank, (a, b) in enumerate(pairs)
            if not (math.isclose(a, b, rel_tol=ROUNDING) or (math.isnan(a) and math.isnan(b)))
        )
        if ranks:
            return ranks
    return ()
