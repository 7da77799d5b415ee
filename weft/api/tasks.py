"""Commands that `weft.api` runs in another process, by `weft.api.child`.

Each function calls what the command of its name calls.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.config.errors import ConfigError, InvalidConfig
from weft.config.exit_statuses import FAILED, INTERRUPTED, REQUEUE
from weft.supervision.rank_exit import TrainingFailed, log_path

if TYPE_CHECKING:
    from weft.api.results import Comparison, VerifyResult

Pairs = list[tuple[str, str]]


class TrainRequest(NamedTuple):
    """Arguments of ``weft train``."""

    recipe: str
    overrides: Pairs
    errors: list[ConfigError]  # that the caller already has
    force: bool


def train_recipe(request: TrainRequest) -> tuple[str, int]:
    """Train on the ranks of this machine, or as one rank of a launcher.

    Returns:
        The run directory and the exit status of ``weft train``.

    Raises:
        InvalidConfig: with every mistake.
        TrainingFailed: if a rank failed.
    """
    recipe, overrides, errors, force = request
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the launcher reports the same
    # Messages on how to resume quote the command.
    sys.argv = ["weft", "train", recipe, *(f"--{key}={text}" for key, text in overrides)]
    from weft.conversion.adapter_path import adopt_paths
    from weft.monitor.terminal import quiet_console
    from weft.preparation.environment import is_log_node
    from weft.preparation.job_checks import prepare_job
    from weft.supervision.start import start_training, train_rank
    from weft.training.machine import is_launched_rank

    base, plan = prepare_job(recipe, overrides, errors, adopt_paths)
    if not is_launched_rank():
        console = quiet_console(sys.stdout, quiet=not is_log_node(os.environ))
        return plan.run_dir, start_training(base, plan, recipe, console, force)
    try:
        return plan.run_dir, train_rank(base, plan, recipe, force)
    except InvalidConfig:
        raise
    except Exception as error:
        rank = int(os.environ["RANK"])
        log = log_path(plan.run_path, rank)
        message = f"rank {rank} failed: {type(error).__name__}: {error}\n  log: {log}"
        raise TrainingFailed(message, FAILED, log) from error


class VerifyRequest(NamedTuple):
    """Arguments of ``weft verify``."""

    recipe: str
    overrides: Pairs
    errors: list[ConfigError]
    resume_layout: Pairs
    ranks: int
    steps: int


def verify_recipe(request: VerifyRequest) -> VerifyResult:
    """Compare a layout with one process."""
    from weft.api.results import VerifyResult
    from weft.verification.verify import format_report, read_recipe, verify

    report = verify(
        read_recipe(request.recipe, request.overrides, request.errors),
        ranks=request.ranks,
        steps=request.steps,
        keep=[key for key, _ in request.overrides],
        resume=request.resume_layout,
    )
    record = json.loads(report.to_json())
    return VerifyResult(report.holds, report.reason, format_report(report).strip(), record)


class CompareRequest(NamedTuple):
    """Arguments of ``weft compare``."""

    recipes: list[str]
    vary: list[tuple[str, list[str]]]
    overrides: Pairs
    errors: list[ConfigError]
    repeats: int
    margin: str
    price: float | None
    out: str | None
    plan_only: bool
    cluster: str | None


def compare_recipes(request: CompareRequest) -> Comparison:
    """Compare variants by runs, or by their plans; print the progress."""
    from weft.api.results import Comparison
    from weft.comparison.comparison_result import ComparisonSettings
    from weft.comparison.experiment import compare, default_dir
    from weft.comparison.planned_comparison import compare_plans
    from weft.comparison.variants import parse_margin, prepare_variant, read_variants
    from weft.config.errors import ConfigErrors
    from weft.monitor.terminal import quiet_console

    errors, out = ConfigErrors(), request.out
    errors += request.errors
    margin, is_relative = parse_margin(request.margin, errors)
    lines: list[str] = []
    variants_request = (request.recipes, request.vary, request.overrides, errors)
    if request.plan_only:
        record, _ = compare_plans(
            *variants_request, request.cluster, request.price, out, lines.append
        )
        return Comparison(lines[-1].strip(), record, Path(out) if out else None)
    variants = read_variants(*variants_request, partial(prepare_variant, out or "runs"))
    directory = Path(out) if out else default_dir(variants)
    settings = ComparisonSettings(request.repeats, margin, is_relative, request.price)
    log: Any = partial(quiet_console(sys.stdout).print, soft_wrap=True)
    result, num_signals = compare(directory, variants, settings, log)
    if num_signals:
        sys.exit(REQUEUE if num_signals == 1 else INTERRUPTED)
    return Comparison(result.text(), result.to_dict(), directory)
