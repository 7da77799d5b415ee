"""The loop: layouts agree over many steps, resumed runs are equal, records are complete."""

from __future__ import annotations

import gc
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.harness import RankError, run_ranks
from tests.small import (
    Overrides,
    losses,
    newest_state,
    plan_here,
    records,
    small_job,
    this_rank,
    train_rank,
    untimed_records,
)
from weft.checkpoint.manifest import list_checkpoints, read_manifest
from weft.cli.main import main
from weft.config.errors import InvalidConfig
from weft.data.dataset import open_dataset
from weft.preparation.job_checks import prepare_job
from weft.training.loop import train

KEYS = {
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "step_seconds",
    "data_seconds",
    "tokens_per_second",
    "tokens_per_second_per_device",
    "tflops_per_device",
    "mfu",
    "mfu_causal",
    "memory_peak_gib",
    "time",
    "time_breakdown",
    "goodput",
    "best_loss",
}


def run(directory: Path, store: Path, ranks: int, *overrides: tuple[str, str]) -> Path:
    job: Overrides = [("run.dir", str(directory)), *overrides]
    run_ranks(train_rank, ranks, job, str(store))
    return directory


@pytest.fixture(scope="module")
def one_rank(store_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train 20 steps on one rank, with an evaluation every 10 steps."""
    directory = tmp_path_factory.mktemp("one")
    return run(directory, store_path, 1, ("train.eval_interval", "10"))


@pytest.mark.parametrize(
    ("ranks", "microbatch", "replicas"),
    [
        (2, "auto", 1),
        pytest.param(1, "2", 1, marks=pytest.mark.slow),
        pytest.param(4, "2", 2, marks=pytest.mark.slow),
        pytest.param(4, "1", 1, marks=pytest.mark.slow),
    ],
)
def test_run_layouts_have_the_same_loss_curve(
    ranks: int, microbatch: str, replicas: int, one_rank: Path, store_path: Path, tmp_path: Path
) -> None:
    run(
        tmp_path,
        store_path,
        ranks,
        ("train.microbatch_size", microbatch),
        ("parallel.dp_replicate", str(replicas)),
        ("train.eval_interval", "10"),
    )
    ours, theirs = records(tmp_path), records(one_rank)
    assert len(ours) == 20
    for a, b in zip(ours, theirs, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert a.get("eval_loss", 0) == pytest.approx(b.get("eval_loss", 0), abs=1e-5)
        assert (a["step"], a["lr"], a["tokens"]) == (b["step"], b["lr"], b["tokens"])


def test_run_loss_falls(one_rank: Path) -> None:
    curve = losses(one_rank)
    assert curve[-1] < curve[0] - 0.3


def test_run_records_are_complete(one_rank: Path) -> None:
    for step, record in enumerate(records(one_rank), start=1):
        expected = KEYS | ({"eval_loss"} if step % 10 == 0 else set())
        assert record.keys() == expected
        assert record["step"] == step
        assert record["tokens"] == step * 8 * 32
        assert record["tokens_per_second"] == pytest.approx(8 * 32 / record["step_seconds"])
        assert 0 <= record["data_seconds"] <= record["step_seconds"]
        assert record["mfu"] is None  # the peak of this CPU is unknown
        assert 0.01 < record["memory_peak_gib"] < 24


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_run_resumed_is_equal_bit_for_bit(ranks: int, store_path: Path, tmp_path: Path) -> None:
    """N steps and N resumed steps equal 2N steps: losses, weights and optimizer state."""
    same = [("data.packing", "documents"), ("train.eval_interval", "3"), ("train.steps", "10")]
    straight = run(tmp_path / "straight", store_path, ranks, *same)
    # A fault ends the first half, so the schedule is that of 10 steps from the beginning.
    halves = tmp_path / "halves"
    interval = ("checkpoint.interval", "5")
    with pytest.raises(RankError, match="planned"):
        run_ranks(
            train_and_fail,
            ranks,
            [("run.dir", str(halves)), *same, interval],
            str(store_path),
            7,
        )
    assert [path.name for path in list_checkpoints(halves / "checkpoints")] == ["step-00000005"]
    run(halves, store_path, ranks, *same, interval)
    assert [r["step"] for r in records(halves)] == list(range(1, 11))
    assert losses(halves) == losses(straight)
    ours, theirs = newest_state(halves), newest_state(straight)
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("optim.") for name in ours)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def train_and_fail(overrides: Overrides, store: str, after: int) -> None:
    """Train, but raise in the middle of step ``after`` + 1."""
    from weft.training.step import TrainStep

    steps = 0

    def failing(*args: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps > after:
            raise RuntimeError("planned")
        return forward_backward(*args)

    forward_backward, TrainStep.forward_backward = TrainStep.forward_backward, failing
    train_rank(overrides, store)


@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 1), *(pytest.param(*tensor, marks=pytest.mark.slow) for tensor in ((1, 4), (4, 2)))],
)
def test_run_resumed_in_another_layout_has_the_same_losses(
    before: int, after: int, one_rank: Path, store_path: Path, tmp_path: Path
) -> None:
    """Samples and losses of the second half do not depend on the ranks, up to rounding."""
    evaluating = ("train.eval_interval", "10")
    with pytest.raises(RankError, match="planned"):
        run_ranks(
            train_and_fail,
            before,
            [("run.dir", str(tmp_path)), ("checkpoint.interval", "10"), evaluating],
            str(store_path),
            10,
        )
    run(tmp_path, store_path, after, evaluating)
    assert losses(tmp_path) == pytest.approx(losses(one_rank), abs=1e-5)


def test_run_finished_has_nothing_to_do(one_rank: Path, store_path: Path) -> None:
    before = (one_rank / "metrics.jsonl").read_bytes()
    run(one_rank, store_path, 1, ("train.eval_interval", "10"))
    assert (one_rank / "metrics.jsonl").read_bytes() == before


def test_run_finished_with_more_steps_continues(
    one_rank: Path, store_path: Path, tmp_path: Path
) -> None:
    run(tmp_path, store_path, 1, ("train.steps", "4"))
    run(tmp_path, store_path, 1, ("train.steps", "6"))
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3, 4, 5, 6]
    manifest = read_manifest(list_checkpoints(tmp_path / "checkpoints")[-1])
    assert (manifest["step"], manifest["samples"]) == (6, 48)


def test_run_nan_loss_stops_before_it_is_recorded(store_path: Path, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"the (loss|gradient norm) is nan") as caught:
        run(tmp_path, store_path, 2, ("optim.lr", "1e30"), ("checkpoint.interval", "1"))
    assert "in step" in str(caught.value)
    # Nothing of the bad step was recorded or saved.
    steps = [record["step"] for record in records(tmp_path)]
    saved = [read_manifest(path)["step"] for path in list_checkpoints(tmp_path / "checkpoints")]
    assert steps == list(range(1, len(steps) + 1))
    assert max(saved) == steps[-1] < 20


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("s3://key:hunter2@bucket/x", "has credentials in it"),
        ("nosuch://bucket/x", "is not the URL of a store"),
    ],
)
def test_checkpoint_dir_unreachable_or_with_credentials_is_refused(
    path: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig) as caught:
        prepare_job("demo", [("checkpoint.dir", path), ("run.dir", str(tmp_path / "run"))])
    assert message in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["train", "demo", "--data.path", "s3://key:hunter2@bucket/x/*.jsonl"],
        ["train", "demo", "--data.mixture", "https://me:hunter2@example.com/x.jsonl=1"],
        ["data", "prepare", "s3://key:hunter2@bucket/x.jsonl"],
        ["export", "run", "s3://key:hunter2@bucket/out"],
    ],
)
def test_credentials_in_urls_are_refused_and_not_shown(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    output = "".join(capsys.readouterr())
    assert "has credentials in it" in output
    assert "hunter2" not in output
    assert list(tmp_path.iterdir()) == []


def test_run_dir_in_a_store_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"checkpoint\.dir and data\.cache_dir may be s3://"):
        prepare_job("demo", [("run.dir", "s3://bucket/run")])


def collections(overrides: Overrides, store: str) -> tuple[list[int], bool]:
    """Return the generations collected manually, and whether gc is enabled afterwards."""
    observed: list[int] = []

    def record(phase: str, description: dict[str, int]) -> None:
        if phase == "start" and not gc.isenabled():
            observed.append(description["generation"])

    gc.callbacks.append(record)
    train_rank(overrides, store)
    return observed, gc.isenabled()


def test_run_garbage_is_collected_after_the_same_step_on_all_ranks(
    store_path: Path, tmp_path: Path
) -> None:
    job = [("run.dir", str(tmp_path)), ("train.steps", "120")]
    assert run_ranks(collections, 1, job, str(store_path)) == [([1, 1], True)]


def train_and_print(overrides: Overrides, store: str) -> str:
    out = io.StringIO()
    console = Console(file=out, width=1000)
    train(plan_here(small_job(*overrides)), open_dataset(Path(store)), this_rank(), console)
    return out.getvalue()


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (("train.steps", "12"), "1.00e-04 at step 6 -> 1.00e-03 at step 7"),
        (("optim.weight_decay", "0.2"), ""),
    ],
)
def test_resume_with_another_learning_rate_reports_it_once(
    changed: tuple[str, str], expected: str, store_path: Path, tmp_path: Path
) -> None:
    job = [("train.steps", "6"), ("optim.lr", "1e-3"), ("optim.warmup_steps", "0")]
    job += [("optim.schedule", "wsd"), ("optim.min_lr_ratio", "0.1"), ("run.dir", str(tmp_path))]
    (first,) = run_ranks(train_and_print, 1, job, str(store_path))
    (second,) = run_ranks(train_and_print, 1, [*job, changed], str(store_path))
    assert "the changed keys" not in first
    assert second.count("the changed keys") == bool(expected)
    assert expected in second


def test_killed_run_has_the_records_of_an_undisturbed_one(store_path: Path, tmp_path: Path) -> None:
    """All but timings: each record depends on steps before the checkpoint."""
    job = [("monitor.log_interval", "1"), ("checkpoint.interval", "5"), ("train.steps", "12")]
    killed = [("run.dir", str(tmp_path / "killed")), *job]
    with pytest.raises(RankError, match="planned"):
        run_ranks(train_and_fail, 1, killed, str(store_path), 9)
    run(tmp_path / "killed", store_path, 1, *job)
    run(tmp_path / "straight", store_path, 1, *job)
    ours, theirs = (untimed_records(tmp_path / name) for name in ("killed", "straight"))
    assert ours == theirs
    assert len(theirs) == 12
