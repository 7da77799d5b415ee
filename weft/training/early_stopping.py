"""End a run whose validation metric no longer improves.

The state is a part of `weft.training.state.TrainState`, so that it survives a restart and goes back
with a rollback.  All ranks compute it from the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.checkpoint.best import BestMetric, get_best_metric, read_evaluation
from weft.checkpoint.manifest import CheckpointError, list_checkpoints, read_manifest
from weft.config.schema import Job
from weft.training.state import TrainState


def add_evaluation_to_state(
    state: TrainState, evaluation: Mapping[str, float], job: Job
) -> TrainState:
    """Return the state after an evaluation.

    As in transformers' ``EarlyStoppingCallback``, an evaluation counts as an improvement if it is
    better than the best one before it by more than ``train.early_stopping_delta``.

    Args:
        state: after the step of the evaluation.
        evaluation: metrics of the validation set; empty: the run did not evaluate.
        job: the job.
    """
    metric = get_best_metric(job.checkpoint)
    value = evaluation.get(metric.name)
    state = replace(state, evaluation=dict(evaluation))
    if value is None:
        return state
    before = state.early_stopping if is_state_of(state.early_stopping, metric) else {}
    best, best_step = before.get("best"), before.get("step", 0)
    delta = job.train.early_stopping_delta
    is_better = best is None or metric.is_better(value, best)
    is_improved = best is None or (is_better and abs(value - best) > delta)
    return replace(
        state,
        early_stopping={
            "metric": metric.name,
            "is_higher_better": metric.is_higher_better,
            "best": value if is_better else best,
            "step": state.step if is_better else best_step,
            "count": 0 if is_improved else before["count"] + 1,
        },
    )


def is_state_of(early_stopping: Mapping[str, Any], metric: BestMetric) -> bool:
    """Return True if a state counts evaluations of ``metric``."""
    own = early_stopping.get("metric"), early_stopping.get("is_higher_better")
    return own == (metric.name, metric.is_higher_better)


def describe_early_stop(early_stopping: Mapping[str, Any], job: Job) -> str:
    """Return why a run has stopped early; empty if it has not."""
    patience = job.train.early_stopping
    if not patience:
        return ""
    metric = get_best_metric(job.checkpoint)
    if not is_state_of(early_stopping, metric):
        return ""
    if early_stopping["count"] < patience:
        return ""
    count = early_stopping["count"]
    times = f"{count} evaluations" if count > 1 else "an evaluation"
    delta = job.train.early_stopping_delta
    by_more = f" by more than {delta:g}" if delta else ""
    return (
        f"{metric.name} has not improved{by_more} in {times} (train.early_stopping={patience}); "
        f"the best, {early_stopping['best']:.4g}, is of step {early_stopping['step']}"
    )


def read_early_stop(directory: Path, job: Job) -> str:
    """Return why a run has stopped early; empty if it has not."""
    for path in list_checkpoints(directory)[-1:]:
        with suppress(CheckpointError):  # loading reports it
            fields = read_evaluation(path, read_manifest(path))
            return describe_early_stop(fields["early_stopping"], job)
    return ""
