"""``weft verify``: does a recipe's layout train the model that one process would?

A layout is right if, from equal weights and equal tokens, it computes one process's loss,
gradient norm and *gradients*, to rounding.  Losses alone prove little: a gradient that is twice
too large, or summed over half of the ranks, shows in no loss for hundreds of steps.  Parameters
prove little the other way: AdamW divides by the root of the second moment, and where that is
nearly zero it makes of rounding a step of full size, so that between correct layouts some entries
drift by up to 3e-4 in ten steps.  So every gradient is judged entry by entry, but updates of
parameters loosely, by their length and direction; the largest difference of an entry is shown.

The recipe is shrunk to test size (`weft.compare.shrink`), trained for a few steps by one process
and by its layout on this machine's CPU, with the very code that trains (`weft.compare.measure`),
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

from weft.compare.measure import (
    Difference,
    Measured,
    Sums,
    Tamper,
    added,
    apart,
    finite,
    measure,
    ratio,
)
from weft.compare.ranks import run_ranks
from weft.compare.shrink import Case, plan_of_recipe, resume_layout, shrink
from weft.files import only_finite
from weft.job import InvalidJob, Job, Problem, read_job
from weft.plan.resolve import Plan
from weft.plan.stages import align
from weft.train.check import check_names


@dataclass(frozen=True)
class Limits:
    """Relative differences above which something is wrong."""

    tolerance: float  # of losses, gradient norms and gradients
    forward: float  # of fingerprints: sharper, since a wrong slice of one matrix moves them little
    updates: float  # of parameters: looser, as said above


# What correct layouts reach: gradients 1e-6, fingerprints 1e-7, updates 4e-4.
FLOAT32 = Limits(1e-4, 1e-5, 0.05)
# Each product of matrices is rounded to 3 digits: 1e-2, 4e-3 and 0.3.
BFLOAT16 = Limits(5e-2, 2e-2, 0.6)
# Rounding in float32 moves a number across the edge between two of float8, 6 % apart: the same.
FLOAT8 = Limits(1e-1, 2e-2, 0.6)


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
    tolerance: float
    update_tolerance: float
    reached: float  # the largest difference of what is judged by the tolerance
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
    recipe: str, overrides: list[tuple[str, str]], problems: Iterable[Problem] = ()
) -> Job:
    """Read and check a job on its own cluster.  The user's text and folders are not looked at.

    Raises:
        InvalidJob: with every mistake in the recipe, the overrides and the layout.
    """
    job, _, found = read_job(recipe, overrides)
    problems = [*problems, *found]
    if any(problem.key in ("recipe", "extends") for problem in problems):
        raise InvalidJob(problems)  # the rest would judge defaults that nobody chose
    later: list[Problem] = []
    try:
        plan_of_recipe(job)
    except InvalidJob as error:
        later += error.problems
    later += check_names(job)
    bad = {problem.key for problem in problems}
    # What only echoes a mistake that is already listed is left out.
    problems += [p for p in later if p.key not in bad and not bad.intersection(p.depends)]
    if problems:
        raise InvalidJob(problems)
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
        resume: a second layout (`weft.compare.shrink.resume_layout`), which resumes from a
            checkpoint that the job's layout saves after half of the steps; none: not tried.
        tamper: a test's, to break something: called on every rank of the layout with what
            `weft.train.setup.build` made, and the plan.
        timeout: seconds for each of the process groups.
        say: told what is going on, in lines.

    Raises:
        InvalidJob: if the job has no plan, or its layout does not go into so few ranks.
        WeftError: if a rank fails.
    """
    case = shrink(job, plan_of_recipe(job), ranks, steps, keep)
    later, saved = case, 0
    if resume:
        if steps < 2:
            rule = "leaves no step after the checkpoint of --resume-layout"
            raise InvalidJob([Problem("--steps", steps, rule, "use 2 or more")])
        job, plan = resume_layout(case, resume, ranks)
        later, saved = replace(case, job=job, plan=plan), steps // 2
    say(describe(case))

    def run(job: Job, plan: Plan, **options: Any) -> list[Measured]:
        train = partial(measure, job, plan, folder, **options)
        return run_ranks(train, plan.world_size, timeout=timeout)

    with tempfile.TemporaryDirectory(prefix="weft-verify-") as folder:
        (one,) = run(case.one_job, case.one_plan)
        report = compare(case, one, run(case.job, case.plan, tamper=tamper, save=saved))
        if resume and report.holds:
            many = run(later.job, later.plan, resume=saved)
            resumed = compare(later, one._replace(steps=one.steps[saved:]), many)
            report = replace(report, resumed=resumed)
            if not resumed.holds:
                where = f"resumed from a checkpoint as {layout(later.plan.sizes)}"
                report = replace(report, holds=False, reason=f"{where}: {resumed.reason}")
    say(table(report))
    return report


# --------------------------------------------------------------------------- judging


def compare(case: Case, one: Measured, many: list[Measured]) -> Report:
    """Judge what the ranks measured."""
    sharp = case.plan.compute_dtype == case.plan.reduce_dtype == "float32"
    limits = FLOAT8 if case.plan.float8 != "none" else FLOAT32 if sharp else BFLOAT16
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
    agreed = (
        "losses, gradient norms and every gradient agree with one process's within "
        f"{limits.tolerance:g}; the largest relative difference is {reached:.1e}"
    )
    return Report(
        holds=wrong is None,
        reason=wrong or agreed,
        tolerance=limits.tolerance,
        update_tolerance=limits.updates,
        reached=reached,
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
            if update > limits.updates:
                yield (
                    f"step {step}: gradients agree; the optimizer's updates depart first in "
                    f"{name} ({update:.1e} of their length)"
                )
    if eval_difference > limits.tolerance:
        yield f"training agrees; the evaluation loss departs ({eval_difference:.1e})"


def _departure(
    i: int, one: Measured, many: list[Measured], report: StepReport, limits: Limits
) -> str:
    """Where step ``i`` departs first; empty if it does not."""
    differ = [name for name in reversed(one.names) if report.gradients[name] > limits.tolerance]
    others = max(report.loss_difference, report.grad_norm_difference)
    if not differ and others <= limits.tolerance:
        return ""
    for name, distance in report.forward.items():
        if distance > limits.forward:
            return f"forward departs first {_place(name, list(report.forward))} ({distance:.1e})"
    agrees = "forward agrees" + (", block by block" if report.forward else "")
    loss = f"the loss departs ({report.loss_difference:.1e})"
    if not differ:
        if report.loss_difference > limits.tolerance:
            return f"{agrees}; {loss}, and no gradient: only what is told of it"
        norm = f"the gradient norm departs ({report.grad_norm_difference:.1e})"
        return f"{agrees}, and so do gradients; {norm}"
    also = f"{loss}, and " if report.loss_difference > limits.tolerance else ""
    name = differ[0]
    if len(differ) == len(one.names):
        # What they have in common lies above the blocks.
        factor = _common_factor([rank.steps[i].gradients for rank in many])
        if factor is not None:
            why = "the loss's normalisation" if also else "sums over ranks or microbatches"
            return f"{agrees}; {also}every gradient is {factor:.4g} times one process's: {why}"
        why = "the head, the loss or its normalisation"
        depart = f"every gradient departs, first {name} ({report.gradients[name]:.1e})"
        return f"{agrees}; {also}{depart}: {why}"
    on = [n for n, rank in enumerate(many) if _departs(rank, i, name, limits.tolerance)]
    holders = [n for n, rank in enumerate(many) if name in rank.steps[i].gradients]
    where = "" if on == holders else f", on rank {' and '.join(map(str, on))} only"
    depart = f"gradients depart first in {name} ({report.gradients[name]:.1e}{where})"
    return f"{agrees}; {also}{depart}"


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


def _departs(rank: Measured, i: int, name: str, tolerance: float) -> bool:
    found = rank.steps[i].gradients.get(name)
    return found is not None and found.largest > tolerance


def _common_factor(ranks: list[dict[str, Difference]]) -> float | None:
    """The one factor by which all gradients are off, if there is one."""
    factors = [found.factor for rank in ranks for found in rank.values()]
    if not all(math.isfinite(factor) for factor in factors):
        return None
    low, high = min(factors), max(factors)
    return low if high - low <= 1e-3 * abs(high) else None


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
    lines = ["", *align([*head, "off by", "worst gradient"], rows, left=[8])]
    lines += [
        "",
        f"evaluation loss: one {report.eval_loss_one:.6f}, layout {report.eval_loss:.6f}, "
        f"off by {report.eval_loss_difference:.1e}",
        f"updates of parameters: off by {report.update_difference:.1e} of their length "
        f"(limit {report.update_tolerance:g}); the largest difference of an entry, not "
        f"judged, is {report.parameter_difference:.1e}",
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
