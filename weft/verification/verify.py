"""Verify a layout against one process (``weft verify``).

A layout is right if, from equal weights and equal tokens, it computes one process's loss,
gradient norm and *gradients*, to rounding.  Losses alone prove little: a gradient that is twice
too large, or summed over half of the ranks, shows in no loss for hundreds of steps.  So every
gradient is checked entry by entry, and by its overall scale, which rounding errors of many entries
hardly change.  Updates start from equal gradients and are checked by length and direction; the
largest error of an entry is printed and not checked.

Rounding depends on dtypes, sizes and the model, so it is measured: the reference process trains
again while `weft.verification.verify_measure.Noise` multiplies each module output and each gradient
by 1 + u eps, u in [-1, 1] (TTrace, Jiang et al., arXiv:2506.09280, perturbs the inputs of modules).
`FACTOR` times the resulting change is the limit.

`weft.verification.shrink` shrinks the recipe to test size.  `weft.verification.verify_measure`
trains a few steps in one process and in the layout, on this machine's CPU, with the training code
itself.  This module compares them and names where they *first* differ: blocks in the order of the
forward pass, gradients in the order of the backward pass, then the gradient norm, then updates.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any

from weft.config.errors import ConfigError, ConfigErrors, InvalidConfig
from weft.config.files import only_finite
from weft.config.formatting import format_columns
from weft.config.reader import read_job
from weft.config.schema import Job
from weft.planning.plan import Plan
from weft.preparation.job_checks import check_names
from weft.records.layer_comparison import finite_or_inf, safe_ratio
from weft.supervision.local_ranks import run_ranks
from weft.verification.shrink import Case, match_float8, plan_for_recipe, plan_resume_layout, shrink
from weft.verification.verify_measure import (
    Corruption,
    RankMeasurement,
    StepMeasurement,
    TensorError,
    measure_rank,
    measure_reference,
    merge_sums,
    sums_distance,
)

# A limit is a floor plus so many times the effect of rounding noise on one process.  Right layouts
# reach 1.5 times that effect, and 2.4 times where both are below the floor.
FACTOR = 3.0
NOISE_RUNS = 2  # of one process, with different noise
MORE_NOISE_RUNS = 8  # before a difference is reported, if rounding moves tokens to other experts
# The scale of a gradient with few entries errs by chance as much as the entries do.
SIGMAS = 2.0
# Effect of another summation order on small tensors and on the mean of many losses.
FLOOR = {"float32": 2e-6, "bfloat16": 2e-4}
# Gradient norms and updates are float32, of equal gradients; Muon's iteration makes 1e-5 of 1e-7.
FLOORS = {"grad_norm": 1e-5, "updates": 1e-4}

TENSOR_KINDS = ("forward", "gradients", "factors", "updates")  # of errors


# Relative errors against one process, or limits, by kind and name in the order of computation.
# Kinds: forward (input and output of blocks), loss, gradients (of the largest entry), factors
# (|scale - 1| of a gradient), grad_norm, updates, eval_loss.  Single numbers have no name.
Errors = dict[tuple[str, str], float]


@dataclass(frozen=True)
class StepReport:
    """Comparison of one optimizer step with one process."""

    step: int
    loss_one: float
    loss: float
    grad_norm_one: float
    grad_norm: float
    errors: Errors = field(repr=False)  # of the worst rank; Inf for a tensor that no rank has

    @property
    def worst_gradient(self) -> tuple[str, float]:
        """Name and error of the gradient with the largest error."""
        return max(select_kind(self.errors, "gradients").items(), key=itemgetter(1))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON record."""
        name, error = self.worst_gradient
        return {
            "step": self.step,
            "loss_one": self.loss_one,
            "loss": self.loss,
            "loss_difference": self.errors["loss", ""],
            "grad_norm_one": self.grad_norm_one,
            "grad_norm": self.grad_norm,
            "grad_norm_difference": self.errors["grad_norm", ""],
            "gradient": name,
            "gradient_difference": error,
        } | {kind: select_kind(self.errors, kind) for kind in TENSOR_KINDS}


@dataclass(frozen=True)
class VerifyReport:
    """Result of `verify`."""

    holds: bool
    reason: str
    limits: Errors = field(repr=False)  # largest errors that count as rounding
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
    overflows: int  # steps computed again, because rows of experts did not fit
    resumed: VerifyReport | None = None  # of the layout that resumed from this one's checkpoint

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON record."""
        limits: dict[str, Any] = {kind: select_kind(self.limits, kind) for kind in TENSOR_KINDS}
        limits |= {kind: limit for (kind, name), limit in self.limits.items() if not name}
        steps = [step.to_dict() for step in self.steps]
        resumed = None if self.resumed is None else self.resumed.to_dict()
        return asdict(self) | {"limits": limits, "steps": steps, "resumed": resumed}

    def to_json(self) -> str:
        """Return one JSON object; NaN and Inf become null."""
        return json.dumps(only_finite(self.to_dict()), indent=2)


def read_recipe(
    recipe: str, overrides: list[tuple[str, str]], cli_errors: Iterable[ConfigError] = ()
) -> Job:
    """Read and check a job for its own cluster, without data and directories.

    Raises:
        InvalidConfig: with every error in the recipe, the overrides and the layout.
    """
    job, _, errors = read_job(recipe, overrides, cli_errors)
    errors.raise_any("recipe", "extends")  # without a recipe there are only defaults to check
    plan_errors = ConfigErrors()
    with plan_errors.collect():
        plan_for_recipe(job)
    plan_errors += check_names(job)
    errors.add_independent(plan_errors)
    errors.raise_any()
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
        resume: keys of a second layout (`weft.verification.shrink.plan_resume_layout`).  It resumes
            from a checkpoint that the job's layout saves after half of the steps.  Default: none.
        corrupt: for tests, called on every rank of the layout with the result of
            `weft.training.setup.build` and the plan, to break the layout.
        timeout: seconds for each of the process groups.
        log: called with lines of progress and the report.

    Raises:
        InvalidConfig: if the job has no plan, or its layout does not fit in ``ranks``.
        WeftError: if a rank fails.
    """
    case = shrink(plan_for_recipe(job), ranks, steps, keep)
    resume_plan, save_step = case.plan, 0
    if resume:
        if steps < 2:
            rule = "leaves no step after the checkpoint of --resume-layout"
            raise InvalidConfig([ConfigError("--steps", steps, rule, "use 2 or more")])
        resume_plan, save_step = plan_resume_layout(case, resume, ranks), steps // 2
    case, resume_plan = match_float8(case, resume_plan)
    log(format_case(case))

    def run(plan: Plan, **options: Any) -> list[RankMeasurement]:
        train = partial(measure_rank, plan, directory, **options)
        return run_ranks(train, plan.world_size, timeout=timeout)

    with tempfile.TemporaryDirectory(prefix="weft-verify-") as directory:
        num_terms = max(p.global_batch_size // p.microbatch_size for p in (case.plan, resume_plan))

        def train_reference(noise_seeds: Sequence[int]) -> list[RankMeasurement]:
            arguments = case.reference_plan, directory, noise_seeds, num_terms
            (result,) = run_ranks(partial(measure_reference, *arguments), 1, timeout=timeout)
            return result

        reference, *noisy = train_reference(range(1 + NOISE_RUNS))

        def compare(case: Case, first_step: int, ranks: list[RankMeasurement]) -> VerifyReport:
            dtype = case.plan.compute_dtype
            limits = compute_limits(reference, noisy, dtype)
            expected = reference._replace(steps=reference.steps[first_step:])
            report = compare_to_reference(case, expected, ranks, limits)
            if report.holds or len(noisy) > NOISE_RUNS or not _moves_tokens(limits, dtype):
                return report
            noisy.extend(train_reference(range(1 + NOISE_RUNS, 1 + NOISE_RUNS + MORE_NOISE_RUNS)))
            return compare(case, first_step, ranks)

        report = compare(case, 0, run(case.plan, corrupt=corrupt, save_step=save_step))
        if resume and report.holds:
            resume_case = replace(case, plan=resume_plan)
            resumed = compare(resume_case, save_step, run(resume_plan, resume_step=save_step))
            report = replace(report, resumed=resumed)
            if not resumed.holds:
                name = format_layout(resume_plan.axis_sizes)
                reason = f"resumed from a checkpoint as {name}: {resumed.reason}"
                report = replace(report, holds=False, reason=reason)
    log(format_report(report))
    return report


# --------------------------------------------------------------------------- comparison


def step_errors(
    expected: StepMeasurement, ranks: Sequence[StepMeasurement], sigmas: float = SIGMAS
) -> Errors:
    """Return the errors of a step of some ranks against one process.

    Args:
        expected: measurements of one process.
        ranks: measurements of the ranks.
        sigmas: a scale may err by so many standard errors without counting.
    """
    errors: Errors = {}
    for name, sums in expected.forward.items():
        parts = [rank.forward[name] for rank in ranks if name in rank.forward]
        errors["forward", name] = sums_distance(merge_sums(parts), sums) if parts else math.inf
    # Ranks agree on loss and norm; if they do not, the worst rank counts.
    errors["loss", ""] = max(_relative_error(rank.loss, expected.loss) for rank in ranks)
    for name in reversed(expected.gradients):  # as in the backward pass
        held = [rank.gradients[name] for rank in ranks if name in rank.gradients]
        errors["gradients", name] = max((error.max_error for error in held), default=math.inf)
        scales = (scale_error(error, sigmas) for error in held)
        errors["factors", name] = max(scales, default=math.inf)
    norms = (_relative_error(rank.grad_norm, expected.grad_norm) for rank in ranks)
    errors["grad_norm", ""] = max(norms)
    for name in expected.updates:
        errors["updates", name] = max(rank.updates.get(name, 0.0) for rank in ranks)
    return errors


def select_kind(errors: Errors, kind: str) -> dict[str, float]:
    """Return the errors of one kind by name."""
    return {name: error for (other, name), error in errors.items() if other == kind}


def compute_limits(
    reference: RankMeasurement, noisy: Sequence[RankMeasurement], compute_dtype: str
) -> Errors:
    """Compute the limits from one process without and with noise."""
    steps = [
        step_errors(expected, [perturbed], sigmas=0)
        for run in noisy
        for expected, perturbed in zip(reference.steps, run.steps, strict=True)
    ]
    noise = {key: max(step[key] for step in steps) for key in steps[0]}
    noise["eval_loss", ""] = max(
        _relative_error(run.eval_loss, reference.eval_loss) for run in noisy
    )
    noise["grad_norm", ""] = 0.0
    # A small scale error is small by chance, so the mean is its lower bound.
    factors = select_kind(noise, "factors")
    mean = sum(factors.values()) / max(1, len(factors))
    noise |= {("factors", name): max(error, mean) for name, error in factors.items()}
    # Weights of the same name in all layers give more samples of noise than one weight.
    for kind in ("gradients", "factors"):
        errors = select_kind(noise, kind)
        largest: dict[str, float] = {}
        for name, error in errors.items():
            largest[_without_layer(name)] = max(error, largest.get(_without_layer(name), 0.0))
        noise |= {(kind, name): largest[_without_layer(name)] for name in errors}
    if _moves_tokens(noise, compute_dtype):  # and a bias changes by the sign of their number
        noise |= {key: 2.0 for key in noise if _is_expert_bias(key)}
    floor = FLOOR[compute_dtype]
    return {key: FLOORS.get(key[0], floor) + FACTOR * error for key, error in noise.items()}


def _is_expert_bias(key: tuple[str, str]) -> bool:
    return key[1].endswith("router.expert_bias")


def _moves_tokens(keys: Iterable[tuple[str, str]], compute_dtype: str) -> bool:
    """Return True if rounding can move tokens to other experts."""
    return compute_dtype == "bfloat16" and any(map(_is_expert_bias, keys))


def _without_layer(name: str) -> str:
    return re.sub(r"\d+", "", name)


def compare_to_reference(
    case: Case, reference: RankMeasurement, ranks: list[RankMeasurement], limits: Errors
) -> VerifyReport:
    """Compare the ranks of a layout with one process."""
    first = case.plan.num_steps - len(reference.steps) + 1
    steps = [
        StepReport(
            step=first + i,
            loss_one=expected.loss,
            loss=_farthest(expected.loss, (rank.steps[i].loss for rank in ranks)),
            grad_norm_one=expected.grad_norm,
            grad_norm=_farthest(expected.grad_norm, (rank.steps[i].grad_norm for rank in ranks)),
            errors=step_errors(expected, [rank.steps[i] for rank in ranks]),
        )
        for i, expected in enumerate(reference.steps)
    ]
    eval_loss = _farthest(reference.eval_loss, (rank.eval_loss for rank in ranks))
    eval_error = _relative_error(eval_loss, reference.eval_loss)
    failure = next(_find_differences(reference, ranks, steps, eval_error, limits), None)
    errors = [(("eval_loss", ""), eval_error), *(e for s in steps for e in s.errors.items())]
    kinds = ("eval_loss", "loss", "gradients")
    share = max(error / limits[key] for key, error in errors if key[0] in kinds)
    max_error = max(error for (kind, _), error in errors if kind in (*kinds, "grad_norm"))
    success = (
        "losses, gradient norms, every gradient and update match one process to rounding; "
        f"the largest relative error is {max_error:.1e}, at most {share:.0%} of a limit"
    )
    if _moves_tokens(limits, case.plan.compute_dtype):
        success += "; the biases of experts are not compared in bfloat16"
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
        update_difference=max(error for (kind, _), error in errors if kind == "updates"),
        parameter_difference=max(rank.max_param_error for rank in ranks),
        overflows=max(rank.overflows for rank in ranks),
    )


def _find_differences(
    reference: RankMeasurement,
    ranks: list[RankMeasurement],
    steps: list[StepReport],
    eval_error: float,
    limits: Errors,
) -> Iterator[str]:
    """Yield every difference beyond its limit, in the order of computation."""
    for name in reference.initial:
        errors = [rank.initial[name].max_error for rank in ranks if name in rank.initial]
        if max(errors, default=math.inf) > 0:
            yield f"before step {steps[0].step}: initial weights differ, first {name}"
    for i, report in enumerate(steps):
        step = report.step
        gradients = [rank.steps[i].gradients for rank in ranks]
        if difference := _first_difference(report.errors, gradients, limits):
            yield f"step {step}: {difference}" + (f"; step {step - 1} matches" if i else "")
        for (kind, name), update in report.errors.items():
            if kind == "updates" and update > (limit := limits[kind, name]):
                yield (
                    f"step {step}: gradients match; optimizer updates first differ in "
                    f"{name} ({update:.1e} of their length, limit {limit:.1e})"
                )
    if eval_error > limits["eval_loss", ""]:
        size = f"{eval_error:.1e}, limit {limits['eval_loss', '']:.1e}"
        yield f"training matches; the validation loss differs ({size})"


def _first_difference(errors: Errors, ranks: list[dict[str, TensorError]], limits: Errors) -> str:
    """Describe where a step first differs from one process; empty if nowhere.

    ``ranks`` are the errors of each rank's gradients.
    """
    exceeded = [key for key, error in errors.items() if error > limits[key]]
    kinds = {kind for kind, _ in exceeded}

    def size(kind: str, name: str = "") -> str:
        return f"{errors[kind, name]:.1e}, limit {limits[kind, name]:.1e}"

    wrong = list(dict.fromkeys(n for kind, n in exceeded if kind in ("gradients", "factors")))
    if not (wrong or "loss" in kinds or "grad_norm" in kinds):
        return ""
    blocks = list(select_kind(errors, "forward"))
    if "forward" in kinds:
        name = exceeded[0][1]
        return f"the forward pass first differs {_locate(name, blocks)} ({size('forward', name)})"
    matches = "the forward pass matches" + (", block by block" if blocks else "")
    loss = f"the loss differs ({size('loss')})"
    if not wrong:
        if "loss" in kinds:
            return f"{matches}; {loss}, and no gradient does: only the reported loss is wrong"
        return f"{matches}, and so do gradients; the gradient norm differs ({size('grad_norm')})"
    prefix = f"{loss}, and " if "loss" in kinds else ""
    name = wrong[0]
    if len(wrong) == len(select_kind(errors, "gradients")):
        # A cause that all gradients share lies above the blocks.
        factor = _common_factor(ranks, limits)
        if factor is not None:
            suspect = "the loss's normalization" if prefix else "sums over ranks or microbatches"
            text = f"every gradient is {factor:.4g} times one process's: check {suspect}"
            return f"{matches}; {prefix}{text}"
        text = f"every gradient differs, first {name} ({size('gradients', name)})"
        return f"{matches}; {prefix}{text}: check the head, the loss or its normalization"
    holders = {n: held[name] for n, held in enumerate(ranks) if name in held}
    wrong_ranks = [
        str(n)
        for n, error in holders.items()
        if error.max_error > limits["gradients", name]
        or scale_error(error) > limits["factors", name]
    ]
    only = "" if len(wrong_ranks) == len(holders) else f" on rank {' and '.join(wrong_ranks)} only"
    excess = size("gradients", name)
    if ("gradients", name) not in exceeded:
        excess = f"in scale, {size('factors', name)}"
    return f"{matches}; {prefix}gradients first differ in {name}{only} ({excess})"


def _locate(name: str, order: list[str]) -> str:
    """Describe the location of a fingerprint: ``in layers.3``, or before it."""
    kind, _, block = name.partition(" ")
    if kind == "in":
        return name
    if name == order[0]:
        return f"before {block}: in the embedding"
    previous = order[order.index(name) - 1].partition(" ")[2]
    return f"between {previous} and {block}"


def scale_error(error: TensorError, sigmas: float = SIGMAS) -> float:
    """Return the error of a tensor's scale beyond ``sigmas`` standard errors."""
    return max(0.0, finite_or_inf(abs(error.scale - 1) - sigmas * error.scatter))


def _common_factor(ranks: list[dict[str, TensorError]], limits: Errors) -> float | None:
    """Return the scale that all gradients share; None if they have different ones."""
    scales = [error.scale for rank in ranks for error in rank.values()]
    if not all(math.isfinite(scale) for scale in scales):
        return None
    low, high = min(scales), max(scales)
    tolerance = max(1e-3, *select_kind(limits, "factors").values())
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
    rows = []
    for step in report.steps:
        name, error = step.worst_gradient
        loss = [f"{step.loss_one:.6f}", f"{step.loss:.6f}", f"{step.errors['loss', '']:.1e}"]
        norm = [f"{step.grad_norm_one:.6f}", f"{step.grad_norm:.6f}"]
        norm.append(f"{step.errors['grad_norm', '']:.1e}")
        rows.append([str(step.step), *loss, *norm, f"{error:.1e}", name])
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
