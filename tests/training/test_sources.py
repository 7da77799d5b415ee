"""The loss of each source of a mixture, in any layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks
from tests.layouts import parse
from tests.small import (
    Overrides,
    loader_of,
    plan_here,
    records,
    small_job,
    this_rank,
    train_rank,
    values_under,
)
from weft.config.schema import DataSection
from weft.data.dataset import open_dataset
from weft.data.loader import IGNORE_INDEX, build_mixture
from weft.data.prepare import prepare_data
from weft.training.metric_logger import RunningMean
from weft.training.setup import build
from weft.training.step import validation_batches

MODEL: Overrides = [
    ("data.mixture", "letters=0.5,prose=0.2,stdlib=0.3"),
    ("data.packing", "documents"),
    ("model.num_layers", "4"),
    ("model.tied_embeddings", "false"),
    ("train.microbatch_size", "2"),
    ("train.eval_sequences", "7"),
]


@pytest.fixture(scope="module")
def mixture(text_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prepare a mixture of three texts, of which one is far easier than the others."""
    directory = tmp_path_factory.mktemp("mixture")
    (directory / "letters.txt").write_text("abc " * 6000, "utf-8")
    (directory / "prose.txt").write_text("".join(f"once {n * n} times\n" for n in range(4000)))
    weights = {str(directory / "letters.txt"): 5, str(directory / "prose.txt"): 2, str(text_dir): 3}
    section = DataSection.model_validate({"mixture": weights, "vocab_size": 512})
    return str(prepare_data(section, directory / "cache").path)


def losses_of_sources(overrides: Overrides, text: str) -> dict[str, Any]:
    """Return source losses of a global batch and of the validation set.

    For comparison, the result also has the loss of each source alone, without other targets.
    """
    job = small_job(*overrides)
    plan = plan_here(job)
    built = build(plan, this_rank())
    opened = open_dataset(text)
    sources = RunningMean(opened.shares, torch.device("cpu"))
    batches = loader_of(job, plan, text, built.mesh).get_microbatches(0)
    full = built.train_step.forward_backward(batches)
    dist.all_reduce(full)
    result = sources.reduce_means(built.train_step.loss_by_source)
    samples = build_mixture(opened, "validation", job.train.seq_len, job.data, job.train.seed)
    count = job.train.eval_sequences
    mean = built.train_step.evaluate(validation_batches(plan, samples, built.mesh, count))
    held = sources.reduce_means(built.train_step.loss_by_source)
    single = []
    for source in range(3):
        only = [
            b._replace(targets_BT=b.targets_BT.where(b.sources_B[:, None] == source, IGNORE_INDEX))
            for b in batches
        ]
        loss = built.train_step.forward_backward(only)
        dist.all_reduce(loss)
        single.append(loss.item())
    return {
        "whole": full.item(),
        "found": result.tolist(),
        "alone": single,
        "mean": mean,
        "held": held.tolist(),
    }


@pytest.fixture(scope="module")
def one_process(mixture: str) -> dict[str, Any]:
    [result] = run_ranks(losses_of_sources, 1, MODEL, mixture)
    return dict(result)


def test_source_losses_equal_loss_of_each_source_alone(one_process: dict[str, Any]) -> None:
    assert one_process["found"] == pytest.approx(one_process["alone"], rel=1e-6)
    assert min(one_process["found"]) < one_process["whole"] < max(one_process["found"])
    assert min(one_process["held"]) < one_process["mean"] < max(one_process["held"])


# Partial microbatches, a last stage on the first rank, and slices of sequences.
LAYOUTS = [
    "cp2",
    pytest.param("dp_shard2", marks=pytest.mark.slow),
    pytest.param("tp2", marks=pytest.mark.slow),
    pytest.param("pp2 train.microbatch_size=3", marks=pytest.mark.slow),
    "pp2 pipeline.schedule=DualPipeV",
    "train.world_size_invariant=true train.microbatch_size=1 dp_replicate2",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_source_losses_layouts_equal_one_process(
    layout: str, mixture: str, one_process: dict[str, Any]
) -> None:
    ranks, overrides = parse(layout)
    results = run_ranks(losses_of_sources, ranks, MODEL + overrides, mixture, timeout=180)
    for rank in results:
        for key, expected in one_process.items():
            assert rank[key] == pytest.approx(expected, rel=2e-5), key


def chunked(overrides: Overrides, text: str) -> dict[str, Any]:
    import weft.training.loss

    weft.training.loss.CHUNK_BYTES = 16 * 4 * 512  # logits of 16 tokens per chunk
    return losses_of_sources(overrides, text)


def test_source_losses_with_logits_in_chunks_are_equal(
    mixture: str, one_process: dict[str, Any]
) -> None:
    [result] = run_ranks(chunked, 1, MODEL, mixture)
    for key, expected in one_process.items():
        assert result[key] == pytest.approx(expected, rel=2e-5), key


def test_source_losses_are_in_the_records_of_a_run(mixture: str, tmp_path: Path) -> None:
    extra: Overrides = [
        ("run.dir", str(tmp_path / "run")),
        ("train.steps", "12"),
        ("train.eval_interval", "6"),
        ("monitor.log_interval", "3"),
        ("checkpoint.interval", "6"),
    ]
    run_ranks(train_rank, 2, [*MODEL, *extra, ("train.steps", "6")], mixture)
    run_ranks(train_rank, 2, [*MODEL, *extra], mixture)
    rows = records(tmp_path / "run")
    assert [r["step"] for r in rows] == [1, 3, 6, 9, 12]
    names = ["letters", "prose", Path(open_dataset(mixture).sources[2].store.manifest.source).name]
    for record in rows:
        assert set(values_under(record, "loss")) <= set(names)
        assert all(map(math.isfinite, values_under(record, "loss").values()))
        assert bool(values_under(record, "eval_loss")) == ("eval_loss" in record)
    # The first record covers one step: its loss is the mean over the targets of its rows.
    first = rows[0]
    low, high = min(values_under(first, "loss").values()), max(values_under(first, "loss").values())
    assert low <= first["loss"] <= high
    for record in rows[2::2]:
        weighted = [
            w * values_under(record, "eval_loss")[name]
            for name, w in zip(names, (0.5, 0.2, 0.3), strict=True)
        ]
        assert record["eval_loss"] == pytest.approx(sum(weighted))
    last = values_under(rows[-1], "eval_loss")
    assert list(last) == names
    assert last["letters"] < last["prose"]
    assert values_under(rows[-1], "loss")["letters"] < values_under(first, "loss")["letters"]
