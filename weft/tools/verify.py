"""``weft verify``: does a recipe's layout train the model that one process would?

A layout is right if, from equal weights and equal tokens, it computes one process's loss,
gradient norm and *gradients*, to rounding.  Losses alone prove little: a gradient that is twice
too large, or summed over half of the ranks, shows in no loss for hundreds of steps.  So every
gradient is judged entry by entry, and by the factor that it is off as a whole, which roundings of
many entries hardly move.  Updates are made of equal gradients, and judged by their length and
direction; the largest difference of an entry is shown.

How much is rounding depends on dtypes, sizes and the model.  So it is measured: one process is
trained again, each output of a module and each gradient of one multiplied by 1 + u eps, u between
-1 and 1 (`weft.tools.verify_measure.Noise`; Jiang et al., TTrace, arXiv:2506.09280, do so with the
inputs of modules).  What that moves, times `FACTOR`, is the limit.

The recipe is shrunk to test size (`weft.tools.shrink`), trained for a few steps by one process
and by its layout on this machine's CPU, with the very code that trains (`weft.tools.verify_measure`),
and compared here.  When something is wrong, the answer is where it goes wrong *first*: blocks in
the order of the forward pass, then gradients in the order of the backward pass, from the head
down to the embedding, then the gradient norm, then updates.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from weft.config.errors import ConfigError, InvalidConfig
from weft.config.files import only_finite
from weft.config.reader import read_job
from weft.config.schema import Job
from weft.plan.resolve import Plan
from weft.plan.stages import format_columns
from weft.tools.local_ranks import run_ranks
from weft.tools.shrink import Case, plan_of_recipe, resume_layout, shrink
from weft.tools.verify_measure import (
    Difference,
    Measured,
    Sums,
    Tamper,
    added,
    apart,
    finite,
    measure,
    measure_one,
    ratio,
)
from weft.train.job_checks import check_names

# A limit is a floor, and so many times what noise of the size of rounding makes of one process.
# Layouts that are right reach 1.5 times that, and 2.4 times where both are below the floor.
FACTOR = 3.0
REPETITIONS = 2  # of one process, with different noise
# What another order of sums makes of small tensors, and of the mean of many losses.
FLOOR = {"float32": 2e-6, "bfloat16": 2e-4}
# Gradient norms and updates are float32, of equal gradients; Muon's iteration makes 1e-5 of 1e-7.
NORM_FLOOR, UPDATE_FLOOR = 1e-5, 1e-4


@dataclass(frozen=True)
class Limits:
    """Relative differences above which something is wrong."""

    loss: float
    grad_norm: float
    eval_loss: float
    forward: dict[str, float] = field(repr=False)  # of fingerprints
    gradients: dict[str, float] = field(repr=False)  # of the largest entry
    factors: dict[str, float] = field(repr=False)  # of the factor by which a gradient is off 1
    updates: dict[str, float] = field(repr=False)


def find_limits(one: Measured, noisy: Sequence[Measured], compute_dtype: str) -> Limits:
    """Derive the limits from one process without and with noise."""
    floor = FLOOR[compute_dtype]
    pairs = [pair for other in noisy for pair in zip(one.steps, other.steps, strict=True)]

    def limit(moved: Iterable[float], floor: float = floor) -> float:
        return floor + FACTOR * max(moved, default=0.0)

    factors = {
        name: max(abs(other.gradients[name].factor - 1) for _, other in pairs) for name in one.names
    }
    usual = sum(factors.values()) / max(1, len(factors))  # one that is small is so by chance
    return Limits(
        loss=limit(_relative(other.loss, step.loss) for step, other in pairs),
        grad_norm=limit((), NORM_FLOOR),
        eval_loss=limit(_relative(other.eval_loss, one.eval_loss) for other in noisy),
        forward={
            name: limit(apart(other.forward[name], step.forward[name]) for step, other in pairs)
            for name in one.steps[0].forward
        },
        gradients={
            name: limit(other.gradients[name].largest for _, other in pairs) for name in one.names
        },
        factors={name: limit((factor, usual)) for name, factor in factors.items()},
        updates={
            name: limit((other.updates[name] for _, other in pairs), UPDATE_FLOOR)
            for name in one.steps[0].updates
        },
    )


@dataclass(frozen=True)
class StepReport:
    """One process against the layout in one optimizer step; differences are relative."""

    step: int
    loss_one: float
    loss: float
    loss_difference: float
    grad_norm_one: float
    grad_norm: float
    grad_norm_difference: float
    gradient: str  # the worst one's name
    gradient_difference: float
    forward: dict[str, float] = field(repr=False)  # of what goes into and out of each block
    gradients: dict[str, float] = field(repr=False)  # of every parameter


@dataclass(frozen=True)
class Report:
    """What `verify` found."""

    holds: bool
    reason: str
    limits: Limits
    reached: float  # the largest difference of losses, gradient norms and gradients
    share: float  # of its limit, that of what comes nearest to it
    recipe: dict[str, int]  # sizes of the mesh's axes in the recipe
    here: dict[str, int]
    shrunk: dict[str, tuple[Any, Any]]
    notes: tuple[str, ...]
    compute_dtype: str
    steps: tuple[StepReport, ...]
    eval_loss_one: float
    eval_loss: float
    eval_loss_difference: float
    update_difference: float  # the worst parameter's distance, relative to its way; judged loosely
    parameter_difference: float  # the largest of an entry, absolute; not judged
    resumed: Report | None = None  # of the layout that resumed from a checkpoint of this one

    def to_json(self) -> str:
        """One object; null stands for what is not a number."""
        return json.dumps(only_finite(asdict(self)), indent=2)


def read_recipe(
    recipe: str, overrides: list[tuple[str, str]], problems: Iterable[ConfigError] = ()
) -> Job:
    """Read and check a job on its own cluster.  The user's text and folders are not looked at.

    Raises:
        InvalidConfig: with every mistake in the recipe, the overrides and the layout.
    """
    job, _, found = read_job(recipe, overrides)
    problems = [*problems, *found]
    if any(problem.key in ("recipe", "extends") for problem in problems):
        raise InvalidConfig(problems)  # the rest would judge defaults that nobody chose
    later: list[ConfigError] = []
    try:
        plan_of_recipe(job)
    except InvalidConfig as error:
        later += error.problems
    later += check_names(job)
    bad = {problem.key for problem in problems}
    # What only echoes a mistake that is already listed is left out.
    problems += [p for p in later if p.key not in bad and not bad.intersection(p.depends)]
    if problems:
        raise InvalidConfig(problems)
    return job


def verify(
    job: Job,
    *,
    ranks: int = 8,
    steps: int = 3,
    keep: Collection[str] = (),
    resume: Sequence[tuple[str, str]] = (),
    tamper: Tamper | None = None,
    timeout: float = 600,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Train a job's layout and one process, both shrunk, and compare them.

    Args:
        ranks: at most so many processes.
        steps: optimizer steps.
        keep: keys that are not replaced, among ``compile.enable`` and those of ``precision``.
        resume: a second layout (`weft.tools.shrink.resume_layout`), which resumes from a
            checkpoint that the job's layout saves after half of the steps; none: not tried.
        tamper: a test's, to break something: called on every rank of the layout with what
            `weft.train.setup.build` made, and the plan.
        timeout: seconds for each of the process groups.
        say: told what is going on, in lines.

    Raises:
        InvalidConfig: if the job has no plan, or its layout does not go into so few ranks.
        WeftError: if a rank fails.
    """
    case = shrink(job, plan_of_recipe(job), ranks, steps, keep)
    later, saved = case, 0
    if resume:
        if steps < 2:
            rule = "leaves no step after the checkpoint of --resume-layout"
            raise InvalidConfig([ConfigError("--steps", steps, rule, "use 2 or more")])
        job, plan = resume_layout(case, resume, ranks)
        later, saved = replace(case, job=job, plan=plan), steps // 2
    say(describe(case))

    def run(job: Job, plan: Plan, **options: Any) -> list[Measured]:
        train = partial(measure, job, plan, folder, **options)
        return run_ranks(train, plan.world_size, timeout=timeout)

    with tempfile.TemporaryDirectory(prefix="weft-verify-") as folder:
        repeat = partial(measure_one, case.one_job, case.one_plan, folder, REPETITIONS)
        ((one, *noisy),) = run_ranks(repeat, 1, timeout=timeout)
        limits = find_limits(one, noisy, case.plan.compute_dtype)
        many = run(case.job, case.plan, tamper=tamper, save=saved)
        report = compare(case, one, many, limits)
        if resume and report.holds:
            many = run(later.job, later.plan, resume=saved)
            resumed = compare(later, one._replace(steps=one.steps[saved:]), many, limits)
            report = replace(report, resumed=resumed)
            if not resumed.holds:
                where = f"resumed from a checkpoint as {layout(later.plan.sizes)}"
                report = replace(report, holds=False, reason=f"{where}: {resumed.reason}")
    say(table(report))
    return report


# --------------------------------------------------------------------------- judging


def compare(case: Case, one: Measured, many: list[Measured], limits: Limits) -> Report:
    """Judge what the ranks measured."""
    steps = []
    for i, theirs in enumerate(one.steps):
        # Ranks agree on loss and norm, or the worst of them is what counts.
        loss = _farthest(theirs.loss, (rank.steps[i].loss for rank in many))
        norm = _farthest(theirs.grad_norm, (rank.steps[i].grad_norm for rank in many))
        gradients = {
            name: _worst(name, [rank.steps[i].gradients for rank in many]) for name in one.names
        }
        worst = max(gradients, key=lambda name: gradients[name])
        steps.append(
            StepReport(
                step=case.job.train.steps - len(one.steps) + i + 1,
                loss_one=theirs.loss,
                loss=loss,
                loss_difference=_relative(loss, theirs.loss),
                grad_norm_one=theirs.grad_norm,
                grad_norm=norm,
                grad_norm_difference=_relative(norm, theirs.grad_norm),
                gradient=worst,
                gradient_difference=gradients[worst],
                forward=_forward(theirs.forward, [rank.steps[i].forward for rank in many]),
                gradients=gradients,
            )
        )
    eval_loss = _farthest(one.eval_loss, (rank.eval_loss for rank in many))
    eval_difference = _relative(eval_loss, one.eval_loss)
    updates = [u for rank in many for step in rank.steps for u in step.updates.values()]
    wrong = next(_departures(one, many, steps, eval_difference, limits), None)
    reached = max(
        eval_difference,
        *(max(s.loss_difference, s.grad_norm_difference, s.gradient_difference) for s in steps),
    )
    share = max(
        eval_difference / limits.eval_loss,
        *(s.loss_difference / limits.loss for s in steps),
        *(s.gradients[name] / limits.gradients[name] for s in steps for name in one.names),
    )
    agreed = (
        "losses, gradient norms, every gradient and update agree with one process's to rounding; "
        f"the largest relative difference is {reached:.1e}, at most {share:.0%} of a limit"
    )
    return Report(
        holds=wrong is None,
        reason=wrong or agreed,
        limits=limits,
        reached=reached,
        share=share,
        recipe=case.recipe_sizes,
        here=case.plan.sizes,
        shrunk=case.shrunk,
        notes=case.notes,
        compute_dtype=case.plan.compute_dtype,
        steps=tuple(steps),
        eval_loss_one=one.eval_loss,
        eval_loss=eval_loss,
        eval_loss_difference=eval_difference,
        update_difference=max(updates),
        parameter_difference=max(rank.drift for rank in many),
    )


def _departures(
    one: Measured,
    many: list[Measured],
    steps: list[StepReport],
    eval_difference: float,
    limits: Limits,
) -> Iterator[str]:
    """What is wrong, first to last in the order in which it is computed."""
    for name in one.initial:
        if _worst(name, [rank.initial for rank in many]) > 0:
            yield f"before step {steps[0].step}: the weights differ, first {name}"
    for i, report in enumerate(steps):
        step = report.step
        if wrong := _departure(i, one, many, report, limits):
            yield f"step {step}: {wrong}" + (f"; step {step - 1} agrees" if i else "")
        for name in one.steps[i].updates:
            update = max(rank.steps[i].updates.get(name, 0.0) for rank in many)
            if update > limits.updates[name]:
                yield (
                    f"step {step}: gradients agree; the optimizer's updates depart first in "
                    f"{name} ({update:.1e} of their length, limit {limits.updates[name]:.1e})"
                )
    if eval_difference > limits.eval_loss:
        size = _size(eval_difference, limits.eval_loss)
        yield f"training agrees; the evaluation loss departs ({size})"


def _departure(
    i: int, one: Measured, many: list[Measured], report: StepReport, limits: Limits
) -> str:
    """Where step ``i`` departs first; empty if it does not."""
    differ = [
        name
        for name in reversed(one.names)
        if any(_departs(rank, i, name, limits) for rank in many)
        or not any(name in rank.steps[i].gradients for rank in many)
    ]
    loss_departs = report.loss_difference > limits.loss
    if not (differ or loss_departs or report.grad_norm_difference > limits.grad_norm):
        return ""
    for name, distance in report.forward.items():
        if distance > limits.forward[name]:
            place = _place(name, list(report.forward))
            return f"forward departs first {place} ({_size(distance, limits.forward[name])})"
    agrees = "forward agrees" + (", block by block" if report.forward else "")
    loss = f"the loss departs ({_size(report.loss_difference, limits.loss)})"
    if not differ:
        if loss_departs:
            return f"{agrees}; {loss}, and no gradient: only what is told of it"
        size = _size(report.grad_norm_difference, limits.grad_norm)
        return f"{agrees}, and so do gradients; the gradient norm departs ({size})"
    also = f"{loss}, and " if loss_departs else ""
    name = differ[0]
    size = _size(report.gradients[name], limits.gradients[name])
    if len(differ) == len(one.names):
        # What they have in common lies above the blocks.
        factor = _common_factor([rank.steps[i].gradients for rank in many], limits)
        if factor is not None:
            why = "the loss's normalisation" if also else "sums over ranks or microbatches"
            return f"{agrees}; {also}every gradient is {factor:.4g} times one process's: {why}"
        why = "the head, the loss or its normalisation"
        return f"{agrees}; {also}every gradient departs, first {name} ({size}): {why}"
    on = [n for n, rank in enumerate(many) if _departs(rank, i, name, limits)]
    holders = [n for n, rank in enumerate(many) if name in rank.steps[i].gradients]
    where = "" if on == holders else f" on rank {' and '.join(map(str, on))} only"
    if report.gradients[name] <= limits.gradients[name]:
        off = max(abs(many[n].steps[i].gradients[name].factor - 1) for n in on)
        size = f"by a factor, {_size(off, limits.factors[name])}"
    return f"{agrees}; {also}gradients depart first in {name}{where} ({size})"


def _size(distance: float, limit: float) -> str:
    """How large a departure is, and the limit that applies."""
    return f"{distance:.1e}, limit {limit:.1e}"


def _forward(theirs: dict[str, Sums], ranks: list[dict[str, Sums]]) -> dict[str, float]:
    """How far each fingerprint is from one process's; infinitely where no rank has it."""
    distances = {}
    for name, sums in theirs.items():
        found = [rank[name] for rank in ranks if name in rank]
        distances[name] = apart(added(found), sums) if found else math.inf
    return distances


def _place(name: str, order: list[str]) -> str:
    """Where a fingerprint lies: ``in layers.3``, or before it."""
    kind, _, block = name.partition(" ")
    if kind == "in":
        return name
    if name == order[0]:
        return f"before {block}: in the embedding"
    above = order[order.index(name) - 1].partition(" ")[2]
    return f"between {above} and {block}"


def _worst(name: str, ranks: Iterable[dict[str, Difference]]) -> float:
    """Of the ranks that hold a tensor, the largest difference; infinite if none does."""
    return max((rank[name].largest for rank in ranks if name in rank), default=math.inf)


def _departs(rank: Measured, i: int, name: str, limits: Limits) -> bool:
    found = rank.steps[i].gradients.get(name)
    return found is not None and (
        found.largest > limits.gradients[name]
        or finite(abs(found.factor - 1)) > limits.factors[name]
    )


def _common_factor(ranks: list[dict[str, Difference]], limits: Limits) -> float | None:
    """The one factor by which all gradients are off, if there is one."""
    factors = [found.factor for rank in ranks for found in rank.values()]
    if not all(math.isfinite(factor) for factor in factors):
        return None
    low, high = min(factors), max(factors)
    near = max(1e-3, *limits.factors.values())
    return low if high - low <= near * abs(high) else None


def _relative(ours: float, theirs: float) -> float:
    return ratio(abs(ours - theirs), abs(theirs))


def _farthest(theirs: float, ours: Iterable[float]) -> float:
    """Of the ranks' values the one that is farthest from one process's."""
    return max(ours, key=lambda value: finite(abs(value - theirs)))


# --------------------------------------------------------------------------- what is said


def describe(case: Case) -> str:
    """The layout and what was shrunk."""
    theirs, ours = layout(case.recipe_sizes), layout(case.plan.sizes)
    here = "the same" if ours == theirs else ours
    ranks = case.plan.world_size
    lines = [
        f"recipe: {theirs} -> here: {here}",
        f"compared with one process: {ranks} gloo rank{'s' * (ranks != 1)} on CPU, "
        f"{case.plan.compute_dtype}, {case.job.train.steps} steps of {case.plan.accumulation} "
        f"microbatch{'es' * (case.plan.accumulation != 1)} a rank",
    ]
    sections: dict[str, list[str]] = {}
    for name, (before, after) in case.shrunk.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, []).append(f"{key} {_shown(before)} -> {_shown(after)}")
    lines += [f"  {section:<10} {', '.join(texts)}" for section, texts in sections.items()]
    lines += [f"  note: {note}" for note in case.notes]
    return "\n".join(lines)


def layout(sizes: dict[str, int]) -> str:
    """``pp 8 x tp 8``."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one rank"


def table(report: Report) -> str:
    """A line per step, what else was compared, and the verdict."""
    head = ["step", "loss: one", "layout", "off by", "norm: one", "layout", "off by"]
    rows = [
        [
            str(step.step),
            f"{step.loss_one:.6f}",
            f"{step.loss:.6f}",
            f"{step.loss_difference:.1e}",
            f"{step.grad_norm_one:.6f}",
            f"{step.grad_norm:.6f}",
            f"{step.grad_norm_difference:.1e}",
            f"{step.gradient_difference:.1e}",
            step.gradient,
        ]
        for step in report.steps
    ]
    lines = ["", *format_columns([*head, "off by", "worst gradient"], rows, left=[8])]
    lines += [
        "",
        f"evaluation loss: one {report.eval_loss_one:.6f}, layout {report.eval_loss:.6f}, "
        f"off by {report.eval_loss_difference:.1e}",
        f"updates of parameters: off by {report.update_difference:.1e} of their length; the "
        f"largest difference of an entry, not judged, is {report.parameter_difference:.1e}",
        *([resumed_line(report.resumed)] if report.resumed else []),
        "",
        f"{'holds' if report.holds else 'DOES NOT HOLD'}: {report.reason}",
    ]
    return "\n".join(lines)


def resumed_line(report: Report) -> str:
    """Describe how far the layout that resumed is from one process."""
    return (
        f"resumed from a checkpoint as {layout(report.here)}: gradients off by "
        f"{report.reached:.1e}, updates by {report.update_difference:.1e} of their length"
    )


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
