"""Weights of messages and label smoothing: plain PyTorch, and every layout."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.chat import CHATML, message, write_lines, write_tokenizer
from tests.harness import run_ranks
from tests.layouts import parse
from tests.small import Overrides, full_tensor, gradients, merged, plan_here, small_job, this_rank
from tests.training.test_objectives import CHAT, expect_same
from weft.checkpoint.state_dict import trainable_parameters
from weft.config.schema import DataSection
from weft.data.dataset import Dataset, open_dataset
from weft.data.loader import PackedDocuments, build_mixture
from weft.data.prepare import prepare_data
from weft.training import loss as loss_module
from weft.training.loss import count_targets
from weft.training.setup import build

SMOOTHING = 0.2
WEIGHTED: Overrides = [*CHAT, ("train.label_smoothing", str(SMOOTHING))]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prepare conversations of two turns with random weights."""
    directory = tmp_path_factory.mktemp("weights")
    tokenizer = write_tokenizer(directory / "model", CHATML)
    rng, words = random.Random(3), ["it", "is", "what", "there", "and", "too"]

    def turn(role: str, weight: float | None) -> dict[str, Any]:
        text = " ".join(rng.choices(words, k=rng.randint(1, 6)))
        return message(role, text) | ({} if weight is None else {"weight": weight})

    rows: list[dict[str, Any]] = []
    for _ in range(80):
        weights = [rng.choice([None, 0, 1, rng.random()]) for _ in range(2)]
        turns = [(turn("user", None), turn("assistant", weight)) for weight in weights]
        row = {"messages": [message for pair in turns for message in pair]}
        rows.append(row | ({"weight": rng.random()} if rng.random() < 0.3 else {}))
    return prepare(write_lines(directory / "chat.jsonl", rows), tokenizer, directory / "cache")


def prepare(lines: Path, tokenizer: Path, cache: Path) -> str:
    values = {"path": str(lines), "tokenizer": str(tokenizer), "format": "chat"}
    section = DataSection.model_validate(values | {"validation_fraction": 0.2})
    return str(prepare_data(section, cache).path)


def plain_loss(model: nn.Module, rows: PackedDocuments, smoothing: float) -> Tensor:
    """Return the weighted mean loss of the first 8 sequences, conversation by conversation."""
    packed, losses, weights = rows.packed, [], []
    assert rows.loss_mask is not None
    assert rows.weights is not None
    for document in packed.document_order[: packed.offsets[8]].tolist():
        at, size = packed.starts[[document]], int(packed.lengths[document]) + 1
        tokens = torch.from_numpy(rows.stream.read_windows(at, size)[0])
        learned = torch.from_numpy(rows.loss_mask.read_windows(at, size)[0])[1:] == 1
        logits = model(tokens[None, :-1])[0]
        losses.append(
            F.cross_entropy(
                logits[learned],
                tokens[1:][learned],
                reduction="none",
                label_smoothing=smoothing,
            )
        )
        weights.append(torch.from_numpy(rows.weights[at[0] + 1 : at[0] + size].copy())[learned])
    assert len(torch.cat(weights).unique()) > 8
    return (torch.cat(losses) * torch.cat(weights)).sum() / torch.cat(weights).sum()


def weft_and_plain(overrides: Overrides, path: str) -> dict[str, Any]:
    """Return losses and gradients of weft and of a plain computation."""
    job = small_job(*overrides, ("train.microbatch_size", "3"))
    built = build(plan_here(job), this_rank())
    mixture = build_mixture(open_dataset(path), "train", job.train.seq_len, job.data, 0)
    [rows] = mixture.sources
    assert isinstance(rows, PackedDocuments)
    batches = [rows.get_batch(np.arange(n, min(n + 3, 8))) for n in (0, 3, 6)]
    params = dict(trainable_parameters(built.model_parts))
    loss = built.train_step.forward_backward(batches).item()
    grads = {name: full_tensor(param.grad).clone() for name, param in params.items()}
    plain = plain_loss(built.model_parts[0], rows, SMOOTHING)
    expected = torch.autograd.grad(plain, list(params.values()))
    with torch.no_grad():
        plain_eval = plain_loss(built.model_parts[0], rows, 0.0).item()
    return {
        "ours": {"loss": loss, "grads": grads},
        "plain": {"loss": plain.item(), "grads": dict(zip(params, expected, strict=True))},
        "evaluations": (built.train_step.evaluate(batches), plain_eval),
    }


def test_weighted_loss_and_gradients_equal_plain_pytorch(store: str) -> None:
    """Training has label smoothing; evaluation has none, but the weights."""
    [result] = run_ranks(weft_and_plain, 1, WEIGHTED, store)
    expect_same(result["ours"], result["plain"], rel=1e-6)
    ours, plain = result["evaluations"]
    assert ours == pytest.approx(plain, rel=1e-6)


@pytest.fixture(scope="module")
def one(store: str) -> dict[str, Any]:
    [result] = run_ranks(gradients, 1, WEIGHTED, store)
    return dict(result)


def in_chunks(overrides: Overrides, path: str) -> dict[str, Any]:
    """Return `gradients` with logits of at most 8 tokens at a time."""
    loss_module.CHUNK_BYTES = 4 * 512 * 8
    return gradients(overrides, path)


@pytest.mark.parametrize(
    ("layout", "compute"),
    [
        ("cp2", gradients),
        ("pp2 train.microbatch_size=3", in_chunks),
        *(
            pytest.param(layout, compute, marks=pytest.mark.slow)
            for compute in (gradients, in_chunks)
            for layout in (
                "cp2 tp2",
                "dp_shard2 train.microbatch_size=3",
                "dp_replicate2 tp2 sequence_parallel=false",
                "cp2 cp_method=ulysses",
                "cp2 cp_load_balance=documents",
                "tp2 pp2 pipeline.schedule=ZBVZeroBubble",
            )
        ),
    ],
)
def test_weighted_layouts_gradients_equal_one_process(
    layout: str, compute: Any, store: str, one: dict[str, Any]
) -> None:
    ranks, overrides = parse(layout)
    for rank in merged(run_ranks(compute, ranks, WEIGHTED + overrides, store, timeout=180)):
        expect_same(rank, one)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_weighted_world_size_invariant_gradients_are_bitwise_equal(ranks: int, store: str) -> None:
    overrides = [*WEIGHTED, ("train.world_size_invariant", "true"), ("train.microbatch_size", "1")]
    [single] = run_ranks(gradients, 1, overrides, store)
    layout = ("parallel.dp_shard", str(ranks))
    for rank in run_ranks(gradients, ranks, [*overrides, layout], store):
        assert rank["loss"] == single["loss"]
        assert all(grad.equal(single["grads"][name]) for name, grad in rank["grads"].items())


def test_mixture_with_a_source_without_weights_has_weights_of_one(
    store: str, tmp_path: Path
) -> None:
    """Every batch has weights, so that all ranks sum counts of one dtype."""
    tokenizer = write_tokenizer(tmp_path / "model", CHATML)
    rows = [
        {"messages": [message("user", f"it {i}"), message("assistant", "is")]} for i in range(40)
    ]
    plain = prepare(write_lines(tmp_path / "plain.jsonl", rows), tokenizer, tmp_path / "cache")
    sources = [
        replace(open_dataset(path).sources[0], name=path, share=0.5) for path in (store, plain)
    ]
    dataset = Dataset(tmp_path, tuple(sources))
    mixture = build_mixture(dataset, "train", 96, DataSection(format="chat"), 0)
    both, weighted, ones = (
        mixture.get_batch(np.array(chosen), np.arange(len(chosen))) for chosen in ([1, 0], [0], [1])
    )
    for batch in (both, weighted, ones):
        assert batch.weights_BT is not None
        assert batch.weights_BT.dtype == torch.float32
        assert batch.weights_BT.shape == batch.tokens_BT.shape
    assert both.weights_BT is not None
    assert ones.weights_BT is not None
    assert (ones.weights_BT == 1).all()
    assert (both.weights_BT[0] == 1).all()
    assert not (both.weights_BT[1] == 1).all()
    assert count_targets(ones).tolist() == (ones.targets_BT >= 0).sum(1).tolist()
    alone = build_mixture(open_dataset(plain), "train", 96, DataSection(format="chat"), 0)
    assert alone.get_batch(np.array([0]), np.array([0])).weights_BT is None
