"""``train.early_stopping`` and ``checkpoint.best`` in real runs, and against transformers."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.harness import RankError, run_ranks
from tests.small import Overrides, records, small_job, train_rank
from weft.checkpoint.best import BestMetric, find_best, get_best_metric, read_evaluation
from weft.checkpoint.manifest import checkpoint_step, list_checkpoints, read_manifest
from weft.checkpoint.rollback import drop_later_checkpoints
from weft.cli.main import main
from weft.config.schema import TrainSection
from weft.config.storage import open_directory
from weft.config.writer import to_toml
from weft.inference.inference_model import find_checkpoint
from weft.monitor.signals import StopRequested
from weft.preparation.job_checks import check_names
from weft.records.run_reader import RunReader
from weft.reporting.report_summary import headline
from weft.training.early_stopping import (
    add_evaluation_to_state,
    describe_early_stop,
    read_early_stop,
)
from weft.training.loss import OBJECTIVES, build_objective
from weft.training.metric_logger import MetricLogger
from weft.training.state import TrainState

Values = dict[int, float]  # validation losses by step


def train_with_losses(values: Values, overrides: Overrides, store: str, stop_at: int = 0) -> None:
    """Train with the given validation losses, so that a test decides which is the best.

    A stop arrives during the evaluation of the step ``stop_at``.
    """
    evaluate = MetricLogger._evaluate

    def replaced(self: MetricLogger, step: int, compute: Any) -> dict[str, Any]:
        if step == stop_at:
            raise StopRequested
        return evaluate(self, step, compute) | {"eval_loss": values[step]}

    MetricLogger._evaluate = replaced  # type: ignore[method-assign]
    try:
        train_rank(overrides, store)
    finally:
        MetricLogger._evaluate = evaluate  # type: ignore[method-assign]


def run(
    directory: Path, store: Path, values: Values, *keys: tuple[str, str], ranks: int = 1
) -> Path:
    every = min(values)
    overrides = [("run.dir", str(directory)), ("train.eval_interval", str(every)), *keys]
    run_ranks(train_with_losses, ranks, values, overrides, str(store))
    return directory


def kept_steps(directory: Path) -> list[int]:
    return [checkpoint_step(path) for path in list_checkpoints(directory / "checkpoints")]


def best_step(directory: Path) -> int | None:
    metric = get_best_metric(small_job(("checkpoint.best", "eval_loss")).checkpoint)
    found = find_best(list_checkpoints(directory / "checkpoints"), metric)
    return None if found is None else checkpoint_step(found[0])


BEST = ("checkpoint.best", "eval_loss")
EVERY_2 = ("train.eval_interval", "2")
KEEP_ONE = ("checkpoint.keep_latest", "1")
FALLING_THEN_RISING = {2: 5.0, 4: 3.0, 6: 2.0, 8: 2.5, 10: 2.5, 12: 2.5, 14: 2.5, 16: 3.0, 18: 3.0}
FALLING_THEN_RISING |= {20: 4.0}


@pytest.mark.parametrize("async_save", ["true", "false"])
def test_best_checkpoint_is_saved_when_it_improves_and_never_pruned(
    async_save: str, store_path: Path, tmp_path: Path
) -> None:
    keys = [BEST, KEEP_ONE, ("checkpoint.interval", "5"), ("checkpoint.async_save", async_save)]
    run(tmp_path, store_path, FALLING_THEN_RISING, *keys)
    # Step 6 is not a multiple of checkpoint.interval.
    assert kept_steps(tmp_path) == [6, 20]
    assert best_step(tmp_path) == 6


def test_best_checkpoint_of_another_metric_has_its_direction(
    store_path: Path, tmp_path: Path
) -> None:
    run(tmp_path, store_path, FALLING_THEN_RISING, BEST, KEEP_ONE, ("checkpoint.best_mode", "max"))
    metric = get_best_metric(small_job(BEST, ("checkpoint.best_mode", "max")).checkpoint)
    found = find_best(list_checkpoints(tmp_path / "checkpoints"), metric)
    assert found is not None
    assert checkpoint_step(found[0]) == 2


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_best_metric_of_every_objective_has_its_direction(objective: str) -> None:
    section = TrainSection(objective=objective, sft_weight=1.0)
    metrics = build_objective(objective, section).metrics or ("mtp_loss/1", "mtp_loss/12")
    for name in ("eval_loss", *metrics):
        metric = get_best_metric(small_job(("checkpoint.best", name)).checkpoint)
        higher = {"reward_margin", "reward_accuracy", "reward_chosen"}
        assert metric.is_higher_better == (name in higher), name


def test_best_checkpoint_after_a_rollback_is_one_before_it(
    store_path: Path, tmp_path: Path
) -> None:
    keys = [BEST, ("checkpoint.keep_latest", "4"), ("checkpoint.interval", "2")]
    first = {2: 5.0, 4: 3.0, 6: 4.0, 8: 1.0, 10: 2.0}
    run(tmp_path, store_path, first, *keys, ("train.steps", "10"))
    assert best_step(tmp_path) == 8
    assert drop_later_checkpoints(tmp_path / "checkpoints", 6) == [8, 10]
    assert best_step(tmp_path) == 4
    # The best of the abandoned branch is no measure for the new one.
    second = {2: 0.0, 8: 2.9, 10: 3.5, 12: 3.5}
    run(tmp_path, store_path, second, *keys, ("train.steps", "12"))
    assert best_step(tmp_path) == 8
    assert 8 in kept_steps(tmp_path)


def test_early_stopping_ends_all_ranks_at_the_same_step(store_path: Path, tmp_path: Path) -> None:
    run(tmp_path, store_path, FALLING_THEN_RISING, BEST, ("train.early_stopping", "3"), ranks=2)
    assert [record["step"] for record in records(tmp_path)][-1] == 12
    assert kept_steps(tmp_path) == [6, 12]
    job = small_job(BEST, ("train.early_stopping", "3"))
    reason = read_early_stop(tmp_path / "checkpoints", job)
    assert reason == (
        "eval_loss has not improved in 3 evaluations (train.early_stopping=3); the best, 2, is of "
        "step 6"
    )
    (tmp_path / "job.toml").write_text(to_toml(job, "demo", job))
    state = RunReader(tmp_path).state(time.time())
    assert state == ("finished", f"stopped early: {reason}")
    # The same start again trains no step, and another limit does.
    run(tmp_path, store_path, FALLING_THEN_RISING, BEST, ("train.early_stopping", "3"))
    assert kept_steps(tmp_path)[-1] == 12
    run(tmp_path, store_path, FALLING_THEN_RISING, BEST, ("train.early_stopping", "4"))
    assert kept_steps(tmp_path) == [6, 12, 14]


def test_early_stopping_counts_over_a_restart_and_not_over_a_rollback(
    store_path: Path, tmp_path: Path
) -> None:
    stop = ("train.early_stopping", "3")
    values = FALLING_THEN_RISING
    run(tmp_path, store_path, values, stop, ("checkpoint.interval", "2"), ("train.steps", "10"))
    state = read_manifest(list_checkpoints(tmp_path / "checkpoints")[-1])["early_stopping"]
    assert (state["best"], state["step"], state["count"]) == (2.0, 6, 2)
    drop_later_checkpoints(tmp_path / "checkpoints", 8)
    run(tmp_path, store_path, values | {10: 1.0}, stop, ("checkpoint.interval", "2"))
    assert [record["step"] for record in records(tmp_path)][-1] == 16


@pytest.mark.parametrize("threshold", [0.0, 0.3])
@pytest.mark.parametrize("is_higher_better", [False, True])
def test_early_stopping_counts_as_transformers_does(
    threshold: float, is_higher_better: bool
) -> None:
    from transformers import EarlyStoppingCallback, TrainerControl, TrainerState

    mode = "max" if is_higher_better else "min"
    job = small_job(
        BEST,
        ("checkpoint.best_mode", mode),
        ("train.early_stopping", "3"),
        ("train.early_stopping_delta", str(threshold)),
    )
    for seed in range(50):
        source = random.Random(seed)
        callback = EarlyStoppingCallback(3, threshold)
        theirs, control = TrainerState(), TrainerControl()
        arguments: Any = SimpleNamespace(
            metric_for_best_model="eval_loss", greater_is_better=is_higher_better
        )
        state = TrainState(0, 0)
        for step in range(1, 40):
            value = round(source.gauss(0, 1) + (step / 5 if is_higher_better else -step / 5), 1)
            callback.on_evaluate(arguments, theirs, control, {"eval_loss": value})
            # transformers.Trainer does this after the callback.
            if theirs.best_metric is None or (
                value > theirs.best_metric if is_higher_better else value < theirs.best_metric
            ):
                theirs.best_metric = value
            state = TrainState(step, step, early_stopping=state.early_stopping)
            state = add_evaluation_to_state(state, {"eval_loss": value}, job)
            assert state.early_stopping["best"] == theirs.best_metric
            assert state.early_stopping["count"] == callback.early_stopping_patience_counter
            stops = bool(describe_early_stop(state.early_stopping, job))
            assert stops == control.should_training_stop
            if stops:
                break


def test_made_up_evaluation_counts_for_the_checkpoint_of_its_step(
    store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop skips the evaluation of the last step; the next start makes up for it."""
    stop = ("train.early_stopping", "2")
    values = {2: 3.0, 4: 4.0, 6: 2.0}
    keys = [("run.dir", str(tmp_path)), BEST, stop, EVERY_2, ("train.steps", "6")]
    run_ranks(train_with_losses, 1, values, keys, str(store_path), 6)
    path = list_checkpoints(tmp_path / "checkpoints")[-1]
    assert checkpoint_step(path) == 6
    assert best_step(tmp_path) == 2
    run(tmp_path, store_path, values, BEST, stop, ("train.steps", "6"))
    assert best_step(tmp_path) == 6
    fields = read_evaluation(path, read_manifest(path))
    assert fields["early_stopping"]["count"] == 0
    # A start after it continues from these numbers.
    run(tmp_path, store_path, {2: 0.0, 8: 5.0, 10: 5.0}, BEST, stop)
    assert kept_steps(tmp_path)[-1] == 10


def keep_best_in_store(keys: Overrides, store: str) -> tuple[list[int], int, list[str]]:
    """Train into an object store in memory; stop while step 4 is evaluated, and start again."""
    values = {2: 3.0, 4: 1.0, 6: 2.0, 8: 2.0}
    home = open_directory(dict(keys)["checkpoint.dir"])
    train_with_losses(values, [*keys, EVERY_2, ("train.steps", "4")], store, stop_at=4)
    train_with_losses(values, [*keys, EVERY_2, ("train.steps", "8")], store)
    paths = list_checkpoints(home)
    found = find_best(paths, BestMetric("eval_loss", False))
    assert found is not None
    added = [str(path.parent.name) for path in home.rglob("evaluation.json")]
    return [checkpoint_step(path) for path in paths], checkpoint_step(found[0]), added


def test_best_checkpoint_in_an_object_store_is_kept(store_path: Path, tmp_path: Path) -> None:
    keys = [("run.dir", str(tmp_path / "run")), ("checkpoint.dir", "memory://bucket/run")]
    (result,) = run_ranks(keep_best_in_store, 1, [*keys, BEST, KEEP_ONE], str(store_path))
    assert result == ([4, 8], 4, ["step-00000004"])


def test_best_checkpoint_is_chosen_by_commands(
    store_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "out"
    values = {2: 5.0, 4: 3.0, 6: 4.0, 8: 4.0}
    keys = [BEST, KEEP_ONE, ("train.steps", "8")]
    run(run_dir, store_path, values, *keys)
    job = small_job(("run.dir", str(run_dir)), ("train.eval_interval", "2"), *keys)
    (run_dir / "job.toml").write_text(to_toml(job, "demo", job))
    shutil.copy(store_path / "tokenizer.json", run_dir)
    assert main(["export", str(run_dir), str(out), "--step", "best"]) == 0
    assert "step-00000004" in capsys.readouterr().out
    assert main(["generate", str(run_dir), "a", "--step", "best", "--max-tokens", "1"]) == 0
    assert find_checkpoint(run_dir, 8).path.name == "step-00000008"
    assert find_checkpoint(run_dir, "best").path.name == "step-00000004"
    capsys.readouterr()
    assert main(["generate", str(run_dir), "a", "--step", "6"]) == 2
    assert "step=6 has no checkpoint. Use one of [4, 8]." in capsys.readouterr().err
    checkpoint = str(run_dir / "checkpoints" / "step-00000008")
    assert main(["generate", checkpoint, "a", "--step", "best"]) == 2
    assert 'step="best" is for a run directory' in capsys.readouterr().err
    reader = RunReader(run_dir)
    best = reader.best_event()
    assert best is not None
    assert (best.step, best.text) == (4, "the best eval_loss so far: 3")
    expected = "The checkpoint of step 4 has the best eval_loss so far: 3."
    assert headline(reader, "finished", "").endswith(expected)
    loaded = weft.load_text_model(run_dir, "cpu", step="best")
    assert loaded.checkpoint.path.name == "step-00000004"
    older, newest = (weft.load_model(run_dir, device="cpu", step=step) for step in (4, None))
    assert not torch.equal(older.norm.weight, newest.norm.weight)
    with pytest.raises(weft.InvalidConfig, match="is neither a step nor 'best'"):
        weft.load_model(run_dir, step="bset")
    # A copy knows it, too.
    shutil.copytree(run_dir, tmp_path / "copy")
    assert find_checkpoint(tmp_path / "copy", "best").path.name == "step-00000004"
    assert main(["rollback", str(run_dir), "best"]) == 0
    assert kept_steps(run_dir) == [4]
    (run_dir / "job.toml").write_text(to_toml(small_job(), "demo", small_job()))
    capsys.readouterr()
    assert main(["export", str(run_dir), str(tmp_path / "other"), "--step", "best"]) == 2
    assert "checkpoint.best=off" in capsys.readouterr().err


def test_best_metric_that_the_objective_lacks_is_refused() -> None:
    (error,) = check_names(small_job(("checkpoint.best", "reward_acuracy")))
    assert str(error) == (
        'checkpoint.best="reward_acuracy" is not a metric of the validation set with '
        "train.objective=next_token. Use one of eval_loss, off."
    )
    preferences = [("data.format", "preferences"), ("train.objective", "dpo")]
    (error,) = check_names(small_job(("checkpoint.best", "reward_acuracy"), *preferences))
    assert "did you mean 'reward_accuracy'?" in str(error).lower()
    assert not check_names(small_job(("checkpoint.best", "reward_accuracy"), *preferences))


def test_checkpoint_has_an_evaluation_only_if_its_step_was_evaluated(
    store_path: Path, tmp_path: Path
) -> None:
    keys = [BEST, ("checkpoint.interval", "3"), ("checkpoint.keep_latest", "3")]
    run(tmp_path, store_path, {2: 1.0, 4: 2.0}, *keys, ("train.steps", "4"))
    values = {
        checkpoint_step(path): read_manifest(path).get("evaluation")
        for path in list_checkpoints(tmp_path / "checkpoints")
    }
    assert values == {2: {"eval_loss": 1.0}, 3: None, 4: {"eval_loss": 2.0}}


@pytest.mark.parametrize("site", ["checkpoint.rename", "checkpoint.renamed", "checkpoint.delete"])
def test_best_checkpoint_after_a_kill_in_its_save_is_that_of_an_undisturbed_run(
    site: str, store_path: Path, tmp_path: Path
) -> None:
    values = {2: 5.0, 4: 3.0, 6: 4.0, 8: 4.5, 10: 4.5, 12: 4.5}
    keys = [BEST, KEEP_ONE, ("train.early_stopping", "3"), ("train.steps", "12")]
    run(tmp_path / "a", store_path, values, *keys)
    faults = (
        "resilience.faults",
        f'[{{site = "{site}", passing = {1 + (site != "checkpoint.delete")}}}]',
    )
    with pytest.raises(RankError, match="SIGKILL"):
        run(tmp_path / "b", store_path, values, *keys, faults)
    run(tmp_path / "b", store_path, values, *keys)
    assert kept_steps(tmp_path / "b") == kept_steps(tmp_path / "a") == [4, 10]
    states = [
        read_manifest(list_checkpoints(tmp_path / name / "checkpoints")[-1])["early_stopping"]
        for name in "ab"
    ]
    assert states[0] == states[1]


def test_best_checkpoint_that_is_still_being_written_counts(
    store_path: Path, tmp_path: Path
) -> None:
    """The save of step 2 takes longer than the steps to the next evaluation."""
    slow = '[{site = "checkpoint.rename", kind = "slow", seconds = 1.5}]'
    keys = [
        BEST,
        ("resilience.faults", slow),
        ("train.steps", "6"),
        ("checkpoint.keep_latest", "3"),
    ]
    run(tmp_path, store_path, {2: 1.0, 4: 2.0, 6: 2.0}, *keys)
    assert kept_steps(tmp_path) == [2, 6]


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(300)
def test_run_that_stopped_early_is_complete_for_the_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No later evaluation improves the loss by 100, so the third one ends the run."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["train", "demo", "--run.dir", str(tmp_path / "run"), "--run.nproc_per_node", "1"]
    words += ["--train.steps", "30", "--train.eval_interval", "2", "--train.early_stopping", "2"]
    words += ["--train.early_stopping_delta", "100", "--checkpoint.best", "eval_loss"]
    words += ["--train.eval_sequences", "2", "--monitor.report", "false"]
    words += ["--monitor.eval_prompts", ""]
    assert main(words) == 0
    first = capfd.readouterr().out
    assert "step 6: stopped early: eval_loss has not improved by more than 100 in 2" in first
    assert "trained 6 steps" in first
    assert "best eval_loss, of step" in first
    assert main(words) == 0
    second = capfd.readouterr().out
    assert "is complete at step 6: stopped early" in second
    assert "raise train.early_stopping, or set it to 0" in second
    assert kept_steps(tmp_path / "run")[-1] == 6
    assert main(["hang", str(tmp_path / "run")]) == 0
    assert "no hang: the run is complete, at step 6" in capfd.readouterr().out
