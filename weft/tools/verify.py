"""Verify a layout against one process (``weft verify``).

A layout is right if, from equal weights and equal tokens, it computes one process's loss,
gradient norm and *gradients*, to rounding.  Losses alone prove little: a gradient that is twice
too large, or summed over half of the ranks, shows in no loss for hundreds of steps.  So every
gradient is checked entry by entry, and by its overall scale, which rounding errors of many entries
hardly change.  Updates start from equal gradients and are checked by length and direction; the
largest error of an entry is printed and not checked.

Rounding depends on dtypes, sizes and the model, so it is measured: the reference process trains
again while `weft.tools.verify_measure.Noise` multiplies each module output and each gradient by
1 + u eps, u in [-1, 1] (TTrace, Jiang et al., arXiv:2506.09280, perturbs the inputs of modules).
`FACTOR` times the resulting change is the limit.

`weft.tools.shrink` shrinks the recipe to test size.  `weft.tools.verify_measure` trains a few
steps in one process and in the layout, on this machine's CPU, with the training code itself.  This
module compares them and names where they *first* differ: blocks in the order of the forward pass,
gradients in the order of the backward pass, then the gradient norm, then updates.
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
from weft.config.escaping import format_columns
from weft.config.files import only_finite
from weft.config.reader import read_job
from weft.config.schema import Job
from weft.plan.plan import Plan
from weft.tools.local_ranks import run_ranks
from weft.tools.shrink import Case, match_float8, plan_for_recipe, plan_resume_layout, shrink
from weft.tools.verify_measure import (
    ActivationSums,
    Corruption,
    RankMeasurement,
    TensorError,
    finite_or_inf,
    measure_rank,
    measure_reference,
    merge_sums,
    safe_ratio,
    sums_distance,
)
from weft.train.job_checks import check_names

# A limit is a floor plus so many times the effect of rounding noise on one process.  Right layouts
# reach 1.5 times that effect, and 2.4 times where both are below the floor.
FACTOR = 3.0
NOISE_RUNS = 2  # of one process, with different noise
# Effect of another summation order on small tensors and on the mean of many losses.
FLOOR = {"float32": 2e-6, "bfloat16": 2e-4}
# Gradient norms and updates are float32, of equal gradients; Muon's iteration makes 1e-5 of 1e-7.
NORM_FLOOR, UPDATE_FLOOR = 1e-5, 1e-4


@dataclass(frozen=True)
class Limits:
    """Largest relative errors that count as rounding."""

    loss: float
    grad_norm: float
    eval_loss: float
    forward: dict[str, float] = field(repr=False)  # of fingerprints
    gradients: dict[str, float] = field(repr=False)  # of the largest entry
    factors: dict[str, float] = field(repr=False)  # of |scale - 1| of a gradient
    updates: dict[str, float] = field(repr=False)


def compute_limits(
    reference: RankMeasurement, noisy: Sequence[RankMeasurement], compute_dtype: str
) -> Limits:
    """Compute the limits from one process without and with noise."""
    floor = FLOOR[compute_dtype]
    pairs = [pair for run in noisy for pair in zip(reference.steps, run.steps, strict=True)]

    def limit(errors: Iterable[float], floor: float = floor) -> float:
        return floor + FACTOR * max(errors, default=0.0)

    scale_errors = {
        name: max(abs(perturbed.gradients[name].scale - 1) for _, perturbed in pairs)
        for name in reference.names
    }
    # A small scale error is small by chance, so the mean is its lower bound.
    mean_scale_error = sum(scale_errors.values()) / max(1, len(scale_errors))
    return Limits(
        loss=limit(_relative_error(perturbed.loss, step.loss) for step, perturbed in pairs),
        grad_norm=limit((), NORM_FLOOR),
        eval_loss=limit(_relative_error(run.eval_loss, reference.eval_loss) for run in noisy),
        forward={
            name: limit(
                sums_distance(perturbed.forward[name], step.forward[name])
                for step, perturbed in pairs
            )
            for name in reference.steps[0].forward
        },
        gradients={
            name: limit(perturbed.gradients[name].max_error for _, perturbed in pairs)
            for name in reference.names
        },
        factors={name: limit((error, mean_scale_error)) for name, error in scale_errors.items()},
        updates={
            name: limit((perturbed.updates[name] for _, perturbed in pairs), UPDATE_FLOOR)
            for name in reference.steps[0].updates
        },
    )


@dataclass(frozen=True)
class StepReport:
    """Comparison of one optimizer step; differences are relative to one process."""

    step: int
    loss_one: float
    loss: float
    loss_difference: float
    grad_norm_one: float
    grad_norm: float
    grad_norm_difference: float
    gradient: str  # name of the parameter with the largest error
    gradient_difference: float
    forward: dict[str, float] = field(repr=False)  # input and output of each block
    gradients: dict[str, float] = field(repr=False)  # of every parameter


@dataclass(frozen=True)
class VerifyReport:
    """Result of `verify`."""

    holds: bool
    reason: str
    limits: Limits
    reached: float  # largest relative error of losses, gradient norms and gradients
    share: float  # largest ratio of an error to its limit
    recipe: dict[str, int]  # mesh sizes of the recipe
    here: dict[str, int]  # mesh sizes of the shrunk layout
    shrunk: dict[str, tuple[Any, Any]]
    notes: tuple[str, ...]
    compute_dtype: str
    steps: tuple[StepReport, ...]
    eval_loss_one: float
    eval_loss: float
    eval_loss_difference: float
    update_difference: float  # largest error of an update, relative to its length
    parameter_difference: float  # largest absolute error of a parameter's entry; not checked
    resumed: VerifyReport | None = None  # of the layout that resumed from this one's checkpoint

    def to_json(self) -> str:
        """Return one JSON object; NaN and Inf become null."""
        return json.dumps(only_finite(asdict(self)), indent=2)


def read_recipe(
    recipe: str, overrides: list[tuple[str, str]], problems: Iterable[ConfigError] = ()
) -> Job:
    """Read and check a job for its own cluster, without data and directories.

    Raises:
        InvalidConfig: with every error in the recipe, the overrides and the layout.
    """
    job, _, read_problems = read_job(recipe, overrides)
    problems = [*problems, *read_problems]
    if any(problem.key in ("recipe", "extends") for problem in problems):
        raise InvalidConfig(problems)  # without a recipe, only defaults would be checked
    plan_problems: list[ConfigError] = []
    try:
        plan_for_recipe(job)
    except InvalidConfig as error:
        plan_problems += error.problems
    plan_problems += check_names(job)
    bad_keys = {problem.key for problem in problems}
    # Drop the problems that only follow from a listed one.
    problems += [
        p for p in plan_problems if p.key not in bad_keys and not bad_keys.intersection(p.depends)
    ]
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
    corrupt: Corruption | None = None,
    timeout: float = 600,
    log: Callable[[str], None] = lambda text: None,
) -> VerifyReport:
    """Train a job's layout and one process, both shrunk, and compare them.

    Args:
        job: the job whose layout is verified.
        ranks: maximum number of processes.
        steps: optimizer steps.
        keep: keys that are not replaced, among ``compile.enable`` and those of ``precision``.
        resume: keys of a second layout (`weft.tools.shrink.plan_resume_layout`).  It resumes from
            a checkpoint that the job's layout saves after half of the steps.  Default: none.
        corrupt: for tests, called on every rank of the layout with the result of
            `weft.train.setup.build` and the plan, to break the layout.
        timeout: seconds for each of the process groups.
        log: called with lines of progress and the report.

    Raises:
        InvalidConfig: if the job has no plan, or its layout does not fit in ``ranks``.
        WeftError: if a rank fails.
    """
    case = shrink(plan_for_recipe(job), ranks, steps, keep)
    resume_case, save_step = case, 0
    if resume:
        if steps < 2:
            rule = "leaves no step after the checkpoint of --resume-layout"
            raise InvalidConfig([ConfigError("--steps", steps, rule, "use 2 or more")])
        resume_case = replace(case, plan=plan_resume_layout(case, resume, ranks))
        save_step = steps // 2
    matched, excluded = match_float8([case.reference_plan, case.plan, resume_case.plan])
    if excluded:
        reference_plan, plan, resume_plan = matched
        note = f"not in float8, because a shard has a size that float8 does not allow: {excluded}"
        case = replace(case, plan=plan, reference_plan=reference_plan, notes=(*case.notes, note))
        resume_case = replace(case, plan=resume_plan)
    log(format_case(case))

    def run(plan: Plan, **options: Any) -> list[RankMeasurement]:
        train = partial(measure_rank, plan, directory, **options)
        return run_ranks(train, plan.world_size, timeout=timeout)

    with tempfile.TemporaryDirectory(prefix="weft-verify-") as directory:
        train = partial(measure_reference, case.reference_plan, directory, NOISE_RUNS)
        ((reference, *noisy),) = run_ranks(train, 1, timeout=timeout)
        limits = compute_limits(reference, noisy, case.plan.compute_dtype)
        measured = run(case.plan, corrupt=corrupt, save_step=save_step)
        report = compare_to_reference(case, reference, measured, limits)
        if resume and report.holds:
            measured = run(resume_case.plan, resume_step=save_step)
            tail = reference._replace(steps=reference.steps[save_step:])
            resumed = compare_to_reference(resume_case, tail, measured, limits)
            report = replace(report, resumed=resumed)
            if not resumed.holds:
                name = format_layout(resume_case.plan.axis_sizes)
                reason = f"resumed from a checkpoint as {name}: {resumed.reason}"
                report = replace(report, holds=False, reason=reason)
    log(format_report(report))
    return report


# --------------------------------------------------------------------------- comparison


def compare_to_reference(
    case: Case, reference: RankMeasurement, ranks: list[RankMeasurement], limits: Limits
) -> VerifyReport:
    """Compare the ranks of a layout with one process."""
    steps = []
    for i, expected in enumerate(reference.steps):
        # Ranks agree on loss and norm; if they do not, the worst rank counts.
        loss = _farthest(expected.loss, (rank.steps[i].loss for rank in ranks))
        norm = _farthest(expected.grad_norm, (rank.steps[i].grad_norm for rank in ranks))
        gradients = {
            name: _max_error(name, [rank.steps[i].gradients for rank in ranks])
            for name in reference.names
        }
        worst = max(gradients, key=lambda name: gradients[name])
        steps.append(
            StepReport(
                step=case.plan.num_steps - len(reference.steps) + i + 1,
                loss_one=expected.loss,
                loss=loss,
                loss_difference=_relative_error(loss, expected.loss),
                grad_norm_one=expected.grad_norm,
                grad_norm=norm,
                grad_norm_difference=_relative_error(norm, expected.grad_norm),
                gradient=worst,
                gradient_difference=gradients[worst],
                forward=_forward_distances(
                    expected.forward, [rank.steps[i].forward for rank in ranks]
                ),
                gradients=gradients,
            )
        )
    eval_loss = _farthest(reference.eval_loss, (rank.eval_loss for rank in ranks))
    eval_error = _relative_error(eval_loss, reference.eval_loss)
    updates = [u for rank in ranks for step in rank.steps for u in step.updates.values()]
    failure = next(_find_differences(reference, ranks, steps, eval_error, limits), None)
    max_error = max(
        eval_error,
        *(max(s.loss_difference, s.grad_norm_difference, s.gradient_difference) for s in steps),
    )
    share = max(
        eval_error / limits.eval_loss,
        *(s.loss_difference / limits.loss for s in steps),
        *(s.gradients[name] / limits.gradients[name] for s in steps for name in reference.names),
    )
    success = (
        "losses, gradient norms, every gradient and update match one process to rounding; "
        f"the largest relative error is {max_error:.1e}, at most {share:.0%} of a limit"
    )
    return VerifyReport(
        holds=failure is None,
        reason=failure or success,
        limits=limits,
        reached=max_error,
        share=share,
        recipe=case.recipe_sizes,
        here=case.plan.axis_sizes,
        shrunk=case.shrunk,
        notes=case.notes,
        compute_dtype=case.plan.compute_dtype,
        steps=tuple(steps),
        eval_loss_one=reference.eval_loss,
        eval_loss=eval_loss,
        eval_loss_difference=eval_error,
        update_difference=max(updates),
        parameter_difference=max(rank.max_param_error for rank in ranks),
    )


def _find_differences(
    reference: RankMeasurement,
    ranks: list[RankMeasurement],
    steps: list[StepReport],
    eval_error: float,
    limits: Limits,
) -> Iterator[str]:
    """Yield every difference beyond its limit, in the order of computation."""
    for name in reference.initial:
        if _max_error(name, [rank.initial for rank in ranks]) > 0:
            yield f"before step {steps[0].step}: initial weights differ, first {name}"
    for i, report in enumerate(steps):
        step = report.step
        if difference := _first_difference(i, reference, ranks, report, limits):
            yield f"step {step}: {difference}" + (f"; step {step - 1} matches" if i else "")
        for name in reference.steps[i].updates:
            update = max(rank.steps[i].updates.get(name, 0.0) for rank in ranks)
            if update > limits.updates[name]:
                yield (
                    f"step {step}: gradients match; optimizer updates first differ in "
                    f"{name} ({update:.1e} of their length, limit {limits.updates[name]:.1e})"
                )
    if eval_error > limits.eval_loss:
        size = _format_excess(eval_error, limits.eval_loss)
        yield f"training matches; the validation loss differs ({size})"


def _first_difference(
    i: int,
    reference: RankMeasurement,
    ranks: list[RankMeasurement],
    report: StepReport,
    limits: Limits,
) -> str:
    """Describe where step ``i`` first differs from one process; empty if nowhere."""
    wrong = [
        name
        for name in reversed(reference.names)
        if any(_exceeds_limit(rank, i, name, limits) for rank in ranks)
        or not any(name in rank.steps[i].gradients for rank in ranks)
    ]
    loss_differs = report.loss_difference > limits.loss
    if not (wrong or loss_differs or report.grad_norm_difference > limits.grad_norm):
        return ""
    for name, distance in report.forward.items():
        if distance > limits.forward[name]:
            location = _locate(name, list(report.forward))
            size = _format_excess(distance, limits.forward[name])
            return f"the forward pass first differs {location} ({size})"
    matches = "the forward pass matches" + (", block by block" if report.forward else "")
    loss = f"the loss differs ({_format_excess(report.loss_difference, limits.loss)})"
    if not wrong:
        if loss_differs:
            return f"{matches}; {loss}, and no gradient does: only the reported loss is wrong"
        size = _format_excess(report.grad_norm_difference, limits.grad_norm)
        return f"{matches}, and so do gradients; the gradient norm differs ({size})"
    prefix = f"{loss}, and " if loss_differs else ""
    name = wrong[0]
    size = _format_excess(report.gradients[name], limits.gradients[name])
    if len(wrong) == len(reference.names):
        # A cause that all gradients share lies above the blocks.
        factor = _common_factor([rank.steps[i].gradients for rank in ranks], limits)
        if factor is not None:
            suspect = "the loss's normalization" if prefix else "sums over ranks or microbatches"
            text = f"every gradient is {factor:.4g} times one process's: check {suspect}"
            return f"{matches}; {prefix}{text}"
        suspect = "the head, the loss or its normalization"
        return f"{matches}; {prefix}every gradient differs, first {name} ({size}): check {suspect}"
    wrong_ranks = [n for n, rank in enumerate(ranks) if _exceeds_limit(rank, i, name, limits)]
    holders = [n for n, rank in enumerate(ranks) if name in rank.steps[i].gradients]
    only = "" if wrong_ranks == holders else f" on rank {' and '.join(map(str, wrong_ranks))} only"
    if report.gradients[name] <= limits.gradients[name]:
        error = max(abs(ranks[n].steps[i].gradients[name].scale - 1) for n in wrong_ranks)
        size = f"in scale, {_format_excess(error, limits.factors[name])}"
    return f"{matches}; {prefix}gradients first differ in {name}{only} ({size})"


def _format_excess(error: float, limit: float) -> str:
    return f"{error:.1e}, limit {limit:.1e}"


def _forward_distances(
    expected: dict[str, ActivationSums], ranks: list[dict[str, ActivationSums]]
) -> dict[str, float]:
    """Return the distance of each fingerprint from the expected; Inf if missing."""
    distances = {}
    for name, sums in expected.items():
        parts = [rank[name] for rank in ranks if name in rank]
        distances[name] = sums_distance(merge_sums(parts), sums) if parts else math.inf
    return distances


def _locate(name: str, order: list[str]) -> str:
    """Describe the location of a fingerprint: ``in layers.3``, or before it."""
    kind, _, block = name.partition(" ")
    if kind == "in":
        return name
    if name == order[0]:
        return f"before {block}: in the embedding"
    previous = order[order.index(name) - 1].partition(" ")[2]
    return f"between {previous} and {block}"


def _max_error(name: str, ranks: Iterable[dict[str, TensorError]]) -> float:
    """Return a tensor's largest error among its ranks; Inf if no rank holds it."""
    return max((rank[name].max_error for rank in ranks if name in rank), default=math.inf)


def _exceeds_limit(rank: RankMeasurement, i: int, name: str, limits: Limits) -> bool:
    error = rank.steps[i].gradients.get(name)
    return error is not None and (
        error.max_error > limits.gradients[name]
        or finite_or_inf(abs(error.scale - 1)) > limits.factors[name]
    )


def _common_factor(ranks: list[dict[str, TensorError]], limits: Limits) -> float | None:
    """Return the scale that all gradients share; None if they have different ones."""
    scales = [error.scale for rank in ranks for error in rank.values()]
    if not all(math.isfinite(scale) for scale in scales):
        return None
    low, high = min(scales), max(scales)
    tolerance = max(1e-3, *limits.factors.values())
    return low if high - low <= tolerance * abs(high) else None


def _relative_error(actual: float, expected: float) -> float:
    return safe_ratio(abs(actual - expected), abs(expected))


def _farthest(expected: float, values: Iterable[float]) -> float:
    """Return the value that is farthest from the expected one."""
    return max(values, key=lambda value: finite_or_inf(abs(value - expected)))


# --------------------------------------------------------------------------- text


def format_case(case: Case) -> str:
    """Describe the layout and every shrunk key."""
    recipe, shrunk = format_layout(case.recipe_sizes), format_layout(case.plan.axis_sizes)
    here = "the same" if shrunk == recipe else shrunk
    ranks, count = case.plan.world_size, case.plan.num_microbatches
    lines = [
        f"recipe: {recipe} -> here: {here}",
        f"compared with one process: {ranks} gloo rank{'s' * (ranks != 1)} on CPU, "
        f"{case.plan.compute_dtype}, {case.plan.num_steps} steps of "
        f"{count} microbatch{'es' * (count != 1)} per rank",
    ]
    sections: dict[str, list[str]] = {}
    for name, (before, after) in case.shrunk.items():
        section, _, key = name.partition(".")
        text = f"{key} {_format_value(before)} -> {_format_value(after)}"
        sections.setdefault(section, []).append(text)
    lines += [f"  {section:<10} {', '.join(texts)}" for section, texts in sections.items()]
    lines += [f"  note: {note}" for note in case.notes]
    return "\n".join(lines)


def format_layout(sizes: dict[str, int]) -> str:
    """Format mesh sizes as ``pp 8 x tp 8``."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one rank"


def format_report(report: VerifyReport) -> str:
    """Format a line per step, the other comparisons, and the verdict."""
    head = ["step", "loss: one process", "layout", "error", "grad norm: one process", "layout"]
    head += ["error", "error", "worst gradient"]
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
    lines = ["", *format_columns(head, rows, left=[8])]
    lines += [
        "",
        f"validation loss: one process {report.eval_loss_one:.6f}, layout {report.eval_loss:.6f}, "
        f"error {report.eval_loss_difference:.1e}",
        f"parameter updates: error {report.update_difference:.1e} of their length; largest error "
        f"of an entry (not checked): {report.parameter_difference:.1e}",
        *([format_resumed(report.resumed)] if report.resumed else []),
        "",
        f"{'passed' if report.holds else 'FAILED'}: {report.reason}",
    ]
    return "\n".join(lines)


def format_resumed(report: VerifyReport) -> str:
    """Format the errors of the layout that resumed from a checkpoint."""
    return (
        f"resumed from a checkpoint as {format_layout(report.here)}: gradient error "
        f"{report.reached:.1e}, update error {report.update_difference:.1e} of their length"
    )


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
