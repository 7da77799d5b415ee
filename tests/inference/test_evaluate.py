"""The loss of a checkpoint equals a manual mean over the text, in every layout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.harness import run_ranks
from tests.layouts import parse
from tests.random_runs import random_run
from tests.small import this_rank
from weft.cli.main import main
from weft.data.dataset import open_dataset
from weft.data.prepared_cache import Progress
from weft.data.token_store import open_store
from weft.inference.evaluate import ALL_SEQUENCES, SourceLoss, evaluate_sources
from weft.inference.inference_model import find_checkpoint, load_local_model, plan_inference

ALLOWED = ("parallel.", "pipeline.", "data.", "train.")


@pytest.fixture(scope="module")
def run(store_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_run(tmp_path_factory.mktemp("evaluate") / "run", store_path)


def evaluate_store(
    run: str, store: str, overrides: list[tuple[str, str]], full: bool = False
) -> dict[str, Any]:
    checkpoint = find_checkpoint(Path(run))
    job, plan = plan_inference(checkpoint, overrides, [], ALLOWED, for_generation=False)
    sequences = (
        job.train.eval_sequences if ("train.eval_sequences", "9") in overrides else ALL_SEQUENCES
    )
    progress: list[Progress] = []
    call_args = (checkpoint, plan, open_dataset(store), sequences, this_rank(), full)
    (loss,) = evaluate_sources(*call_args, progress.append)
    counts = [item.done for item in progress if item.message == progress[-1].message]
    assert counts == sorted(counts)
    assert len(set(counts)) > 1
    assert counts[-1] == progress[-1].total
    return loss.to_dict()


def test_evaluate_is_the_mean_over_all_validation_tokens(run: Path, store_path: Path) -> None:
    (ours,) = run_ranks(evaluate_store, 1, str(run), str(store_path), [])
    model = load_local_model(find_checkpoint(run), torch.device("cpu"))
    store = open_store(store_path)
    stream, length = store.tokens("validation"), 32
    rows = (len(stream) - 1) // length
    window = stream.read_windows(np.arange(rows) * length, length + 1)
    tokens = torch.from_numpy(window)
    with torch.no_grad():
        head = model.module.get_parameter("lm_head.weight")
        logits = torch.cat([model.module(part) @ head.T for part in tokens[:, :-1].split(64)])
    expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert ours["nats_per_token"] == pytest.approx(expected, rel=1e-5)
    assert ours["perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)
    size = store.manifest.validation
    share = rows * length / (size.tokens - 1)
    assert (ours["tokens"], ours["bytes"]) == (rows * length, round(share * size.bytes))
    bits = expected * (size.tokens - 1) / size.bytes / math.log(2)
    assert ours["bits_per_byte"] == pytest.approx(bits, rel=1e-4)


def test_source_loss_without_recorded_bytes_has_none() -> None:
    numbers = SourceLoss("chats.jsonl", 1.5, 10, 0).to_dict()
    assert (numbers["bytes"], numbers["bits_per_byte"], numbers["tokens"]) == (None, None, 10)


@pytest.mark.parametrize(
    "layout",
    [
        "dp_shard2 tp2",
        "pp2",
        pytest.param("cp2 tp2", marks=pytest.mark.slow),
    ],
)
def test_evaluate_in_every_layout_is_the_same(layout: str, run: Path, store_path: Path) -> None:
    subset = ("train.eval_sequences", "9")
    (expected,) = run_ranks(evaluate_store, 1, str(run), str(store_path), [subset])
    ranks, overrides = parse(layout)
    for ours in run_ranks(evaluate_store, ranks, str(run), str(store_path), [*overrides, subset]):
        assert ours == pytest.approx(expected, rel=1e-6)


def test_evaluate_tied_embeddings_on_one_rank_of_a_pipeline_are_the_same(
    store_path: Path, tmp_path: Path
) -> None:
    """The first and the last stage are on one rank, with two copies of the table."""
    tied = str(random_run(tmp_path / "run", store_path, ("model.tied_embeddings", "true")))
    ranks, overrides = parse("pp2 pipeline.schedule=ZBVZeroBubble")
    (expected,) = run_ranks(evaluate_store, 1, tied, str(store_path), [])
    for ours in run_ranks(evaluate_store, ranks, tied, str(store_path), overrides):
        assert ours == pytest.approx(expected, rel=1e-6)


def test_evaluate_command_prints_loss_and_refuses_mistakes(
    run: Path, text_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", str(run), "--json", "--data.cache_dir", str(tmp_path)]
    assert main([*words, "--data.path", str(text_dir), "--train.eval_sequences", "4"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert 5 < numbers["nats_per_token"] < 100
    assert numbers["tokens"] == 2 * 4 * 32
    assert main([*words, "--train.steps", "3", "--task", "nowhere.yaml"]) == 2
    output = capsys.readouterr().err
    assert main([*words, "--data.validation_fraction", "0.4"]) == 2
    message = 'data.validation_fraction="0.4" changes the validation set'
    assert message in capsys.readouterr().err
    assert "--task" in output
    assert "train.steps" in output
