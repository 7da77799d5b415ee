"""Warnings about a job and its text before the start."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.small import small_job, train_rank
from weft.config.errors import InvalidConfig
from weft.config.schema import Job, replace
from weft.data.dataset import Dataset, Source, open_dataset
from weft.data.loader import build_mixture
from weft.monitor.terminal import quiet_console
from weft.planning.plan import Machine, Plan
from weft.planning.resolve import resolve
from weft.preparation.job_checks import plan_with_data
from weft.reporting.run_summary import print_dataset
from weft.training.run_dir import MAX_EPOCHS, epoch_warnings


def list_warnings(job: Job, text: Dataset) -> list[str]:
    plan = resolve(job, Machine("cpu", 2, world_size=1))
    samples = build_mixture(text, "train", plan.seq_len, job.data, plan.seed)
    return list(epoch_warnings(plan, text, samples))


def test_repetition_warnings_of_few_sequences_have_the_number_of_epochs(
    store_path: Path, tmp_path: Path
) -> None:
    text = open_dataset(store_path)
    tokens = text.sources[0].store.manifest.train.tokens
    sequences = (tokens - 1) // 32
    enough = int(MAX_EPOCHS * sequences) // 8
    assert list_warnings(small_job(("train.steps", str(enough))), text) == []
    (output,) = list_warnings(small_job(("train.steps", str(50 * enough))), text)
    times = 50 * enough * 8 / sequences
    assert f" {times:,.1f} times (epochs): it has {sequences:,} sequences of 32 tokens" in output
    assert output.endswith("Use more text, a smaller train.steps or train.global_batch_size.")


def test_repetition_warnings_with_epochs_name_the_epochs(store_path: Path) -> None:
    text = open_dataset(store_path)
    job = small_job(("train.epochs", "9"), ("train.steps", "auto"))
    plan = dataclasses.replace(resolve(job, Machine("cpu", 2, world_size=1)), num_steps=10**6)
    samples = build_mixture(text, "train", plan.seq_len, job.data, plan.seed)
    (output,) = epoch_warnings(plan, text, samples)
    assert output.endswith("Use more text, a smaller train.epochs.")


def test_repetition_warnings_of_a_mixture_name_the_source_that_repeats(store_path: Path) -> None:
    (one,) = open_dataset(store_path).sources
    text = Dataset(store_path, (Source("web", 0.99, one.store), Source("code", 0.01, one.store)))
    sequences = (one.store.manifest.train.tokens - 1) // 32
    steps = int(2 * MAX_EPOCHS * sequences / 8)
    (output,) = list_warnings(small_job(("train.steps", str(steps))), text)
    assert output.startswith("the run sees web ")
    assert output.endswith("or a smaller weight in data.mixture.")


def test_describe_text_of_few_sequences_warns(store_path: Path) -> None:
    job = small_job(("train.steps", "100000"))
    written = io.StringIO()
    text = open_dataset(store_path)
    plan = resolve(job, Machine("cpu", 2, world_size=1))
    print_dataset(plan, text, quiet_console(written))
    assert " epochs in 100,000 steps\n" in written.getvalue()
    assert "warning: the run sees " in written.getvalue()


def planned(store_path: Path, *overrides: tuple[str, str]) -> tuple[Plan, int]:
    """Return the plan with the data, and the sequences of the training set."""
    text = open_dataset(store_path)
    job = replace(small_job(*overrides), run={"nproc_per_node": 2})
    plan = plan_with_data(resolve(job, Machine("cpu", 2)), text)
    samples = build_mixture(text, "train", plan.seq_len, job.data, plan.seed)
    return plan, len(samples.sources[0])


def test_plan_with_data_derives_the_steps_of_the_epochs(store_path: Path) -> None:
    epochs = ("train.steps", "auto"), ("train.epochs", "1.5")
    plan, count = planned(store_path, *epochs, ("optim.warmup_steps", "auto"))
    assert plan.num_steps == math.ceil(1.5 * count / 8) > 20
    assert (plan.global_batch_size, plan.warnings) == (8, ())
    plan, _ = planned(store_path, ("train.steps", "7"), ("optim.warmup_steps", "auto"))
    assert (plan.num_steps, plan.warnings) == (7, ())


def test_plan_with_data_of_a_resumed_run_counts_sequences(store_path: Path, tmp_path: Path) -> None:
    """Another global batch changes the steps that remain, and not the epochs."""
    run = ("run.dir", str(tmp_path / "run"))
    run_ranks(train_rank, 1, [run, ("train.steps", "3")], str(store_path), timeout=100)
    epochs = ("train.steps", "auto"), ("train.epochs", "1.5"), run
    plan, count = planned(store_path, *epochs)
    assert plan.num_steps == math.ceil(1.5 * count / 8)
    plan, _ = planned(store_path, *epochs, ("train.global_batch_size", "16"))
    assert plan.num_steps == 3 + math.ceil((1.5 * count - 3 * 8) / 16)
    plan, _ = planned(store_path, run, ("train.steps", "auto"), ("train.epochs", "0.001"))
    assert plan.num_steps == 3  # done


def test_plan_with_data_shrinks_a_batch_that_the_data_cannot_fill(store_path: Path) -> None:
    large = ("train.global_batch_size", "100000"), ("train.epochs", "3"), ("train.steps", "auto")
    plan, count = planned(store_path, *large)
    size = count // 2 * 2
    sizes = plan.global_batch_size, plan.job.train.global_batch_size, plan.local_batch_size
    assert sizes == (size, size, size // 2)
    assert plan.num_steps == math.ceil(3 * count / size)
    first, *middle, second, _ = plan.warnings
    assert first == (
        f"train.global_batch_size=100000 exceeds the {count:,} sequences of the training set: "
        f"it is now {size}, a multiple of the 2 data-parallel ranks"
    )
    epochs = plan.num_steps * size / count  # whole steps
    assert [f"train.epochs=3 becomes {epochs:.1f} epochs" in each for each in middle] == [True] * (
        epochs > 3.3
    )
    assert second.startswith(f"train.epochs=3 is only {plan.num_steps} steps of {size} sequences.")
    assert "Use more epochs, or a smaller" in second
    assert plan.warnings[-1].startswith("optim.warmup_steps=5 leaves no step")


def test_plan_rejects_epochs_beside_steps() -> None:
    job = replace(small_job(), train={"epochs": 2.0})
    with pytest.raises(InvalidConfig, match=r"train\.epochs=2\.0 and train\.steps=20 both set"):
        resolve(job, Machine("cpu", 2, world_size=1))


def test_plan_of_a_run_has_its_warnings(store_path: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    job = ("train.seq_len", "64"), ("train.steps", "2"), ("lora.alpha", "3")
    run_ranks(train_rank, 1, [("run.dir", str(run_dir)), *job], str(store_path), timeout=100)
    warnings = json.loads((run_dir / "plan.json").read_text())["warnings"]
    assert [w.partition("=")[0] for w in warnings] == ["optim.warmup_steps", "lora.alpha"]
