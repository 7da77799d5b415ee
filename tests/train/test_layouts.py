"""Whole runs under every kind of layout: losses, evaluation, checkpoints from one into another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness import run_ranks
from tests.parallel.test_layouts import parse
from tests.small import Overrides, newest_state, records, train_rank

MODEL: Overrides = [
    ("model.num_layers", "4"),
    ("model.tied_embeddings", "false"),
    ("data.packing", "documents"),
    ("train.microbatch", "2"),
    ("train.eval_interval", "3"),
    ("train.steps", "6"),
    ("checkpoint.interval", "3"),
    ("observe.log_interval", "1"),
]


def run(layout: str, folder: Path, store: Path, steps: int = 6) -> list[tuple[float, ...]]:
    """Train under a layout; loss, gradient norm and held-out loss of each step."""
    ranks, overrides = parse(layout)
    steps_too = [("run.dir", str(folder)), ("train.steps", str(steps))]
    run_ranks(train_rank, ranks, MODEL + overrides + steps_too, str(store), timeout=180)
    return [(r["loss"], r["grad_norm"], r.get("eval_loss", 0.0)) for r in records(folder)]


@pytest.fixture(scope="module")
def one_process(store_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    run("", folder, store_path)
    return folder


def expect(found: list[tuple[float, ...]], folder: Path) -> None:
    """Records of six steps equal one process's, first loss to last held-out loss."""
    expected = [(r["loss"], r["grad_norm"], r.get("eval_loss", 0.0)) for r in records(folder)]
    assert len(found) == len(expected) == 6
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5)
    assert [step for step, each in enumerate(found, 1) if each[2]] == [3, 6]


# The last stage is on the last rank, or with a V on rank 0; 6 evaluation rows do not fill
# the microbatches; 8 rows in microbatches of 3 leave a last one of 2.
LAYOUTS = [
    "tp2",
    "pp2",
    "pp2 schedule=DualPipeV",
    "pp2 train.microbatch=3",
    "cp2 context=allgather",
    "dp_shard2 tp2",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_is_one_processes_run(
    layout: str, one_process: Path, store_path: Path, tmp_path: Path
) -> None:
    """Rank 0 records loss, gradient norm and held-out loss, wherever the last stage is."""
    expect(run(layout, tmp_path, store_path), one_process)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "pp2 schedule=Interleaved1F1B",
        "pp2 schedule=LoopedBFS",
        "pp2 schedule=InterleavedZeroBubble",
        "dp_shard2 tp2 pp2 schedule=ZBVZeroBubble",
        "tp2 pp2 cp2",
        "dp_replicate2 dp_shard2 tp2 gradient_sync=microbatch",
        "dp_shard2 pp2 cpu_offload=true",
    ],
)
def test_a_larger_run_is_one_processes_run(
    layout: str, one_process: Path, store_path: Path, tmp_path: Path
) -> None:
    expect(run(layout, tmp_path, store_path), one_process)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("pp2 tp2", "dp_shard2"),
        ("", "pp2 tp2"),
        ("dp_shard2 tp2", "pp2 schedule=Interleaved1F1B"),
        ("tp4", "cp2"),
    ],
)
def test_a_checkpoint_goes_on_under_another_layout(
    before: str, after: str, one_process: Path, store_path: Path, tmp_path: Path
) -> None:
    run(before, tmp_path, store_path, steps=3)
    state = newest_state(tmp_path)
    expect(run(after, tmp_path, store_path, steps=6), one_process)
    final, expected = newest_state(tmp_path), newest_state(one_process)
    assert final.keys() == expected.keys() == state.keys()
    for name, value in final.items():
        # Where the second moment is near zero, rounding decides the step's direction.
        assert torch.isfinite(value).all()
        assert value.shape == expected[name].shape
        if name.startswith("model."):
            assert (value - expected[name]).abs().max() < 2e-3, name
            assert not value.equal(state[name])
