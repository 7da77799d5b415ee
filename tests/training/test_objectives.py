"""Conversations and preferences in every layout, and DPO against its formula."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.chat import CHATML, message, write_lines, write_tokenizer
from tests.flash_reference import use_flash_reference
from tests.harness import RankError, run_ranks
from tests.layouts import parse
from tests.monitor.test_signals import train_with_a_signal
from tests.recorded_graphs import RecordedGraph, record_graphs
from tests.small import (
    Overrides,
    expect_same,
    full_tensor,
    merged,
    plan_here,
    records,
    small_job,
    this_rank,
    train_rank,
)
from weft.checkpoint.state_dict import trainable_parameters
from weft.config.errors import InvalidConfig
from weft.config.schema import DataSection, TrainSection
from weft.data.dataset import open_dataset
from weft.data.loader import (
    IGNORE_INDEX,
    Batch,
    LabeledAnswers,
    Loader,
    Mixture,
    PackedDocuments,
    Pairs,
    build_mixture,
)
from weft.data.prepare import prepare_data
from weft.parallel.cuda_graphs import WARMUP_STEPS
from weft.planning.plan import Machine
from weft.planning.resolve import resolve
from weft.preparation.job_checks import check_names
from weft.records.run_reader import read_event_log
from weft.training.loss import Objective, SequenceLosses, count_targets, dpo
from weft.training.reference_logprobs import log_probs
from weft.training.setup import build
from weft.training.step import TrainStep

MODEL: Overrides = [
    ("model.num_layers", "4"),
    ("model.tied_embeddings", "false"),
    ("model.max_seq_len", "128"),
    ("train.seq_len", "96"),
    ("train.global_batch_size", "8"),
    ("train.microbatch_size", "2"),
]
CHAT: Overrides = [*MODEL, ("data.format", "chat")]
DPO: Overrides = [
    *MODEL,
    ("data.format", "preferences"),
    ("train.objective", "dpo"),
    ("train.preference_beta", "0.5"),
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Prepare conversations, and preferences of the word 'is' over the word 'was'."""
    directory = tmp_path_factory.mktemp("chat")
    tokenizer = write_tokenizer(directory / "model", CHATML)
    words = ["it", "is", "what", "there", "and", "too"]
    system = message("system", "so")
    write_lines(
        directory / "chat.jsonl",
        [
            {
                "messages": [
                    system,
                    message("user", " ".join(words[: i % 5 + 1])),
                    message("assistant", " ".join(words[i % 3 : i % 3 + i % 4 + 1])),
                ]
            }
            for i in range(80)
        ],
    )
    prompts = [[system, message("user", f"{words[i % 6]} {i}")] for i in range(36)]
    pairs = [
        {
            "prompt": prompts[i],
            "chosen": [message("assistant", "it is " * (i % 2 + 1))],
            "rejected": [message("assistant", "was " * (i % 3 + 1))],
        }
        for i in range(36)
    ]
    write_lines(directory / "preferences.jsonl", pairs)
    answers = [
        {
            "prompt": pair["prompt"],
            "completion": pair["rejected" if i % 3 == 0 else "chosen"],
            "label": i % 3 > 0,
        }
        for i, pair in enumerate(pairs)
    ]
    # A preference is two answers.
    write_lines(directory / "unpaired.jsonl", answers[:30] + pairs[30:])
    results = {}
    for name in ("chat", "preferences", "unpaired"):
        values = {"path": str(directory / f"{name}.jsonl"), "tokenizer": str(tokenizer)}
        section = DataSection.model_validate(values | {"format": name, "validation_fraction": 0.2})
        results[name] = str(prepare_data(section, directory / "cache").path)
    return results


def gradients(overrides: Overrides, text: str, tamper: str = "") -> dict[str, Any]:
    """Return loss and unsharded gradients of one global batch with the initial weights."""
    job = small_job(*overrides)
    plan = plan_here(job)
    built = build(plan, this_rank())
    mixture = build_mixture(
        open_dataset(text), "train", job.train.seq_len, job.data, job.train.seed
    )
    results: dict[str, Any] = {}
    if built.train_step.objective.needs_references:
        [groups] = mixture.sources
        assert isinstance(groups, Pairs | LabeledAnswers)
        known = log_probs(built, groups)
        results["references"] = known
        # Perturb the references, as if training had changed the model.
        moved = known + torch.randn(known.shape, generator=torch.Generator().manual_seed(1))
        mixture = Mixture([replace(groups, references=moved)])
    loader = Loader(
        mixture,
        seed=job.train.seed,
        global_batch_size=job.train.global_batch_size,
        dp_rank=built.mesh.dp_rank,
        dp_size=plan.dp_size,
        microbatch_size=plan.microbatch_size,
    )
    batches = loader.get_microbatches(0)
    loss = built.train_step.forward_backward(batches)
    dist.all_reduce(loss)
    metrics = built.train_step.metrics
    if metrics is not None:
        dist.all_reduce(metrics)
        results["metrics"] = metrics.tolist()
    params = dict(trainable_parameters(built.model_parts))
    grads = {name: full_tensor(param.grad).clone() for name, param in params.items()}
    if tamper == "plain":
        plain = plain_kto if job.train.objective == "kto" else plain_loss
        results["plain"] = plain(built.model_parts[0], batches, job.train)
    return results | {"loss": loss.item(), "grads": grads}


def plain_loss(model: nn.Module, batches: list[Batch], section: TrainSection) -> dict[str, Any]:
    """Compute an objective by its paper's formula, one answer at a time, without weft's engine."""
    for param in model.parameters():
        param.grad = None
    losses, tokens_losses, num_tokens = [], [], 0
    for batch in batches:
        assert batch.documents_BT is not None
        assert batch.references_BP2 is not None
        has_targets_BT = batch.targets_BT != IGNORE_INDEX
        for row, pair in itertools.product(*map(range, batch.references_BP2.shape[:2])):
            logprobs, lengths = [], []
            is_pair = batch.documents_BT[row] // 2 == pair
            if not (is_pair & has_targets_BT[row]).any():
                continue
            for answer in (0, 1):
                mask = batch.documents_BT[row] == 2 * pair + answer
                tokens, targets = batch.tokens_BT[row, mask], batch.targets_BT[row, mask]
                log_p = torch.log_softmax(model(tokens[None])[0].double(), dim=-1)
                known = targets != IGNORE_INDEX
                logprobs.append(log_p[known].gather(1, targets[known][:, None]).sum())
                lengths.append(len(targets[known]))
            references = batch.references_BP2[row, pair].double()
            losses.append(plain_pair_loss(section, logprobs, lengths, references))
            tokens_losses.append(-logprobs[0])
            num_tokens += lengths[0]
    weight = 1.0 if section.objective == "orpo" else section.sft_weight
    loss = torch.stack(losses).mean() + weight * torch.stack(tokens_losses).sum() / num_tokens
    loss.backward()  # type: ignore[no-untyped-call]
    grads = {name: full_tensor(p.grad).clone() for name, p in trainable_parameters([model])}
    return {"loss": loss.item(), "grads": grads}


def plain_pair_loss(
    section: TrainSection, logprobs: list[Tensor], lengths: list[int], references: Tensor
) -> Tensor:
    """Return the loss of one pair of answers."""
    beta, smoothing = section.beta, section.preference_label_smoothing
    ratios = [logprob - known for logprob, known in zip(logprobs, references, strict=True)]
    if section.objective == "ipo":
        return (ratios[0] / lengths[0] - ratios[1] / lengths[1] - 1 / (2 * beta)) ** 2
    means = [logprob / length for logprob, length in zip(logprobs, lengths, strict=True)]
    if section.objective == "orpo":
        odds = [mean.exp() / (1 - mean.exp()) for mean in means]
        return -beta * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1])))
    margin = beta * (ratios[0] - ratios[1])
    if section.objective == "simpo":
        margin = beta * (means[0] - means[1]) - section.simpo_gamma
    right, wrong = torch.log(torch.sigmoid(margin)), torch.log(torch.sigmoid(-margin))
    return -(1 - smoothing) * right - smoothing * wrong


def plain_kto(model: nn.Module, batches: list[Batch], section: TrainSection) -> dict[str, Any]:
    """Compute KTO by its paper's formula, one answer at a time, without weft's engine."""
    for param in model.parameters():
        param.grad = None

    def ratios(batch: Batch, column: int) -> list[Tensor]:
        assert batch.documents_BT is not None
        assert batch.references_BP2 is not None
        results = []
        for row, place in itertools.product(*map(range, batch.references_BP2.shape[:2])):
            mask = batch.documents_BT[row] == place
            tokens, targets = batch.tokens_BT[row, mask], batch.targets_BT[row, mask]
            known = targets != IGNORE_INDEX
            if not known.any():
                continue
            log_p = torch.log_softmax(model(tokens[None])[0].double(), dim=-1)
            logprob = log_p[known].gather(1, targets[known][:, None]).sum()
            results.append(logprob - batch.references_BP2[row, place, column].double())
        return results

    with torch.no_grad():
        swapped = [r for batch in batches for r in ratios(batch.with_swapped_answers(), 1)]
        divergence = torch.stack(swapped).mean().clamp(min=0)
    losses = []
    for batch in batches:
        assert batch.labels_BP is not None
        assert batch.references_BP2 is not None
        labels = [
            bool(batch.labels_BP[row, place])
            for row, place in itertools.product(*map(range, batch.labels_BP.shape))
            if (batch.targets_BT[row][batch.documents_BT[row] == place] != IGNORE_INDEX).any()  # type: ignore[index]
        ]
        for label, ratio in zip(labels, ratios(batch, 0), strict=True):
            gain = ratio - divergence if label else divergence - ratio
            weight = section.desirable_weight if label else section.undesirable_weight
            losses.append(weight * (1 - torch.sigmoid(section.beta * gain)))
    assert divergence > 0
    loss = torch.stack(losses).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    grads = {name: full_tensor(p.grad).clone() for name, p in trainable_parameters([model])}
    return {"loss": loss.item(), "grads": grads}


# --------------------------------------------------------------------------- conversations


@pytest.fixture(scope="module")
def one_chat(texts: dict[str, str]) -> dict[str, Any]:
    [result] = run_ranks(gradients, 1, CHAT, texts["chat"])
    return dict(result)


@pytest.mark.parametrize(
    "layout",
    [
        "cp2",
        "pp2 train.microbatch_size=3",
        pytest.param("dp_shard2", marks=pytest.mark.slow),
        pytest.param("tp2", marks=pytest.mark.slow),
    ],
)
def test_chat_layouts_gradients_equal_one_process(
    layout: str, texts: dict[str, str], one_chat: dict[str, Any]
) -> None:
    ranks, overrides = parse(layout)
    for rank in merged(run_ranks(gradients, ranks, CHAT + overrides, texts["chat"], timeout=180)):
        expect_same(rank, one_chat)


def test_chat_packed_conversations_have_the_loss_of_each_alone(texts: dict[str, str]) -> None:
    """The packed loss is the mean over the targets of the separate conversations."""
    [(packed, single)] = run_ranks(packed_and_alone, 1, CHAT, texts["chat"])
    assert packed == pytest.approx(single, rel=1e-6)


def packed_and_alone(overrides: Overrides, text: str) -> tuple[float, float]:
    job = small_job(*overrides, ("train.microbatch_size", "8"))
    built = build(plan_here(job), this_rank())
    mixture = build_mixture(open_dataset(text), "train", job.train.seq_len, job.data, 0)
    [rows] = mixture.sources
    assert isinstance(rows, PackedDocuments)
    assert rows.loss_mask is not None
    batch = rows.get_batch(np.arange(8))
    loss = built.train_step.forward_backward([batch]).item()
    total, count, packed = 0.0, 0, rows.packed
    for document in packed.document_order[: packed.offsets[8]].tolist():
        at, size = packed.starts[[document]], int(packed.lengths[document]) + 1
        tokens, learned = (
            torch.from_numpy(s.read_windows(at, size)[0]) for s in (rows.stream, rows.loss_mask)
        )
        targets = tokens[1:].where(learned[1:] == 1, IGNORE_INDEX)
        logits = built.model_parts[0](tokens[None, :-1])[0]
        total += nn.functional.cross_entropy(logits, targets, reduction="sum").item()
        count += int(learned.sum())
    return loss, total / count


# --------------------------------------------------------------------------- dpo


@pytest.fixture(scope="module")
def one_dpo(texts: dict[str, str]) -> dict[str, Any]:
    [result] = run_ranks(gradients, 1, DPO, texts["preferences"], "plain")
    return dict(result)


def test_dpo_gradients_equal_the_formula(one_dpo: dict[str, Any]) -> None:
    expect_same(one_dpo, one_dpo["plain"])


@pytest.mark.parametrize(
    "layout",
    [
        "dp_replicate2 train.microbatch_size=3",
        pytest.param("tp2", marks=pytest.mark.slow),
        pytest.param("dp_shard2", marks=pytest.mark.slow),
        pytest.param("pp2 train.microbatch_size=3", marks=pytest.mark.slow),
        "pp2 pipeline.schedule=DualPipeV train.microbatch_size=1",
        # The other objectives have these axes, one at a time.
        pytest.param("cp2 tp2 train.microbatch_size=3", marks=pytest.mark.slow),
        pytest.param("cp2 cp_method=allgather cp_load_balance=false", marks=pytest.mark.slow),
        pytest.param("cp2 cp_method=ulysses dp_shard2", marks=pytest.mark.slow),
        pytest.param("cp2 pp2 train.microbatch_size=3", marks=pytest.mark.slow),
        "train.world_size_invariant=true train.microbatch_size=1 dp_replicate2",
    ],
)
def test_dpo_layouts_gradients_equal_one_process(
    layout: str, texts: dict[str, str], one_dpo: dict[str, Any]
) -> None:
    ranks, overrides = parse(layout)
    results = run_ranks(gradients, ranks, DPO + overrides, texts["preferences"], timeout=180)
    for rank in merged(results):
        expect_same(rank, one_dpo)
        torch.testing.assert_close(rank["references"], one_dpo["references"], rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(rank["metrics"], one_dpo["metrics"], strict=True):
            assert ours == pytest.approx(theirs, rel=2e-5)


def varlen_gradients(overrides: Overrides, text: str) -> dict[str, Any]:
    """Return `gradients` with the kernel that takes documents of many lengths."""
    reference = use_flash_reference()
    return gradients(overrides, text) | {"calls": reference.calls}


def test_dpo_gradients_with_varlen_attention_equal_those_with_a_mask(
    texts: dict[str, str], one_dpo: dict[str, Any]
) -> None:
    [result] = run_ranks(varlen_gradients, 1, DPO, texts["preferences"])
    assert result["calls"]["backward"] > 0
    expect_same(result, one_dpo)
    torch.testing.assert_close(result["references"], one_dpo["references"], rtol=1e-5, atol=1e-5)


OBJECTIVES: dict[str, Overrides] = {
    "dpo": [("train.preference_label_smoothing", "0.2"), ("train.sft_weight", "0.5")],
    "ipo": [("train.preference_beta", "0.3"), ("train.sft_weight", "0.2")],
    "orpo": [("train.preference_beta", "0.7")],
    "simpo": [("train.preference_label_smoothing", "0.1"), ("train.simpo_gamma", "0.8")],
    "kto": [("train.desirable_weight", "0.8"), ("train.preference_beta", "0.5")],
}


def format_of(name: str) -> str:
    return "unpaired" if name == "kto" else "preferences"


def objective_keys(name: str) -> Overrides:
    format_ = ("data.format", format_of(name))
    return [*MODEL, format_, ("train.objective", name), *OBJECTIVES[name]]


@pytest.fixture(scope="module")
def one_process(texts: dict[str, str]) -> Callable[[str], dict[str, Any]]:
    """Return the results of one process by objective."""

    @cache
    def train(name: str) -> dict[str, Any]:
        [result] = run_ranks(gradients, 1, objective_keys(name), texts[format_of(name)], "plain")
        return dict(result)

    return train


def replayed_gradients(overrides: Overrides, text: str) -> dict[str, Any]:
    """Return `gradients` of a step that is replayed from graphs."""
    record_graphs()
    forward_backward = TrainStep.forward_backward

    def repeat(step: TrainStep, *args: Any) -> torch.Tensor:
        for _ in range(WARMUP_STEPS + 2):
            for part in step.model_parts:
                part.zero_grad()
            loss = forward_backward(step, *args)
        return loss

    TrainStep.forward_backward = repeat  # type: ignore[method-assign]
    result = gradients([*overrides, ("compile.cuda_graphs", "true")], text)
    return result | {"replays": RecordedGraph.num_replays}


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_objective_gradients_replayed_from_graphs_are_the_same(
    name: str, texts: dict[str, str], one_process: Callable[[str], dict[str, Any]]
) -> None:
    args = objective_keys(name), texts[format_of(name)]
    [result] = run_ranks(replayed_gradients, 1, *args, timeout=180)
    assert result["replays"] == 4 + 3  # of four microbatches of one shape
    expected = one_process(name)
    assert (result["loss"], result["metrics"]) == (expected["loss"], expected["metrics"])
    for param, grad in expected["grads"].items():
        assert torch.equal(result["grads"][param], grad), param


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objective_gradients_equal_the_formula(
    name: str, one_process: Callable[[str], dict[str, Any]]
) -> None:
    expect_same(one_process(name), one_process(name)["plain"])


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("dpo", "tp2 train.microbatch_size=3"),
        ("ipo", "cp2 train.microbatch_size=3"),
        ("orpo", "pp2 train.microbatch_size=3"),
        ("simpo", "dp_shard2"),
        ("kto", "pp2 train.microbatch_size=3"),
        ("kto", "dp_replicate2 train.microbatch_size=3"),
        *(
            pytest.param(name, layout, marks=pytest.mark.slow)
            for name in OBJECTIVES
            for layout in (
                *("dp_shard2 train.microbatch_size=1", "tp2", "cp2", "pp2", "dp_replicate2"),
                *("train.microbatch_size=3", "cp2 pp2 train.microbatch_size=3"),
                "train.world_size_invariant=true train.microbatch_size=1 dp_replicate2",
            )
        ),
    ],
)
def test_objective_layouts_gradients_equal_one_process(
    name: str, layout: str, texts: dict[str, str], one_process: Callable[[str], dict[str, Any]]
) -> None:
    ranks, overrides = parse(layout)
    keys = objective_keys(name) + overrides
    expected = one_process(name)
    for rank in merged(run_ranks(gradients, ranks, keys, texts[format_of(name)], timeout=180)):
        expect_same(rank, expected)
        if "references" in expected:
            known = expected["references"]
            torch.testing.assert_close(rank["references"], known, rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(rank["metrics"], expected["metrics"], strict=True):
            assert ours == pytest.approx(theirs, rel=2e-5, abs=1e-5)


def test_dpo_with_lora_references_are_the_frozen_model(
    texts: dict[str, str], one_dpo: dict[str, Any]
) -> None:
    """The frozen model is the initial one, and only adapters learn."""
    tuned: Overrides = [*DPO, ("lora.rank", "4")]
    [one] = run_ranks(gradients, 1, tuned, texts["preferences"], timeout=180)
    torch.testing.assert_close(one["references"], one_dpo["references"])
    assert one["loss"] == pytest.approx(one_dpo["loss"], rel=1e-5)
    assert all("lora" in name for name in one["grads"])
    ranks, overrides = parse("tp2")
    for rank in merged(run_ranks(gradients, ranks, tuned + overrides, texts["preferences"])):
        for tensor in (one, rank):  # at first B is zero, so A has no gradient
            for name in [name for name in tensor["grads"] if "lora_A" in name]:
                assert not tensor["grads"].pop(name).any()
        expect_same(rank, one)


def test_dpo_sums_each_pair_and_padding_counts_for_nothing() -> None:
    """The first sequence has two pairs, the second one, and the third is padding."""
    objective = dpo(TrainSection(objective="dpo", preference_beta=0.5))
    none = IGNORE_INDEX
    targets = torch.tensor([[1, 2, 3, 4, 5, 6], [1, none, 3, none, none, none], [none] * 6])
    documents = torch.tensor([[0, 0, 1, 2, 3, 4], [0, 0, 1, 2, 2, 2], [0, 0, 1, 2, 3, 4]])
    references = torch.tensor(
        [[[-3.0, -1.0], [-2.0, -1.0]], [[-3.0, -1.0], [0.0, 0.0]], [[-3.0, -1.0], [-2.0, -1.0]]]
    )
    batch = Batch(targets, targets, documents, documents, None, references)
    losses_BT = torch.zeros(3, 6)
    losses_BT[0] = torch.tensor([1.0, 1.5, 0.5, 1.0, 3.0, 0.0])
    losses_BT[1, 0], losses_BT[1, 2] = 2.5, 0.5
    losses_BT.requires_grad_()
    result = objective.losses(losses_BT, batch)
    # Rewards of the first pair: (-2.5 + 3) / 2 and (-0.5 + 1) / 2, so the margin is 0.  Of the
    # second: (-1 + 2) / 2 and (-3 + 1) / 2, so it is 1.5.
    other, slope = math.log1p(math.exp(-1.5)), 0.5 / (1 + math.exp(1.5))
    assert objective.counts(batch).tolist() == [2, 1, 0]
    loss = result.loss_B.tolist()
    assert loss == [pytest.approx(math.log(2) + other), pytest.approx(math.log(2)), 0.0]
    expected = [[1.5, 1.0, 0.75, -0.75], [0.0, 0.0, 0.25, 0.25], [0.0] * 4]
    assert result.metrics_BM.tolist() == expected
    result.loss_B.sum().backward()
    assert losses_BT.grad is not None
    expected = [
        [0.25, 0.25, -0.25, slope, -slope, 0.0],
        [0.25, 0.25, -0.25, 0.0, 0.0, 0.0],
        [0.0] * 6,
    ]
    for row, theirs in zip(losses_BT.grad.tolist(), expected, strict=True):
        assert row == pytest.approx(theirs)


RUN: Overrides = [
    ("train.steps", "6"),
    ("train.eval_interval", "3"),
    ("checkpoint.interval", "3"),
    ("monitor.log_interval", "1"),
    ("optim.lr", "1e-3"),
]


def read_rows(directory: Path) -> list[dict[str, Any]]:
    keys = ("loss", "grad_norm", "eval_loss", "metrics", "eval_metrics")
    return [{key: record[key] for key in keys if key in record} for record in records(directory)]


def references_of_a_source(text: str) -> bool:
    """Compute the references of one source of a mixture; return True if all are valid."""
    job = small_job(*DPO, ("data.mixture", "a=0.5,b=0.5"))
    plan = plan_here(job)
    built = build(plan, this_rank())
    mixture = build_mixture(
        open_dataset(text), "train", job.train.seq_len, job.data, job.train.seed
    )
    [pairs] = mixture.sources
    assert isinstance(pairs, Pairs)
    known = log_probs(built, pairs)
    assert built.train_step.loss_by_source is not None
    return bool((known < 0).all())


def test_dpo_references_of_a_mixture_are_of_one_source(texts: dict[str, str]) -> None:
    assert run_ranks(references_of_a_source, 1, texts["preferences"]) == [True]


def test_dpo_run_learns_preferences_and_resumes_in_another_layout(
    texts: dict[str, str], tmp_path: Path
) -> None:
    """The run learns the preference, records it, and resumes equally in another layout."""
    text, one, two = texts["preferences"], tmp_path / "one", tmp_path / "two"
    run_ranks(train_rank, 1, [*DPO, *RUN, ("run.dir", str(one))], text)
    result = read_rows(one)
    # The first step has the initial model: margin 0, equal probabilities, up to rounding.
    assert result[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert result[0]["metrics"]["reward_margin"] == pytest.approx(0, abs=1e-4)
    assert result[-1]["metrics"]["reward_margin"] > 0.05
    assert result[-1]["metrics"]["reward_accuracy"] > 0.9
    assert result[-1]["eval_metrics"]["reward_accuracy"] > 0.9
    assert result[-1]["eval_loss"] < result[2]["eval_loss"] < math.log(2)
    margin = result[-1]["metrics"]["reward_chosen"] - result[-1]["metrics"]["reward_rejected"]
    assert margin == pytest.approx(result[-1]["metrics"]["reward_margin"], rel=1e-5)

    fault = ("resilience.faults", '[{site = "step", passing = 5, kind = "raise"}]')
    with pytest.raises(RankError, match="injected fault"):
        run_ranks(train_rank, 1, [*DPO, *RUN, fault, ("run.dir", str(two))], text)
    [file] = two.glob("references-*.npy")
    known = np.load(file)
    assert known.shape[1] == 2
    ranks, overrides = parse("pp2")
    second_run = [*DPO, *RUN, *overrides, fault, ("run.dir", str(two))]
    run_ranks(train_rank, ranks, second_run, text, timeout=180)
    for ours, theirs in zip(read_rows(two), result, strict=True):
        assert ours.keys() == theirs.keys()
        for key in ("loss", "grad_norm", "eval_loss"):
            assert ours.get(key, 0) == pytest.approx(theirs.get(key, 0), rel=2e-4)
        for key in ("metrics", "eval_metrics"):
            assert ours.get(key, {}) == pytest.approx(theirs.get(key, {}), rel=1e-3, abs=1e-4)

    # At the first step the initial model may be another than that of an interrupted start.
    three = tmp_path / "three"
    three.mkdir()
    np.save(three / file.name, known - 1)
    run_ranks(train_rank, 1, [*DPO, *RUN, ("run.dir", str(three)), ("train.steps", "1")], text)
    assert read_rows(three)[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)
    np.testing.assert_allclose(np.load(three / file.name), known, atol=1e-4)

    file.unlink()
    extra = [*DPO, *RUN, ("run.dir", str(two)), ("train.steps", "7")]
    with pytest.raises(RankError, match="the log-probabilities of the initial model are missing"):
        run_ranks(train_rank, 1, extra, text)


def expect_bitwise_resume(
    keys: Overrides, text: str, run_dir: Path, expected: list[dict[str, Any]]
) -> None:
    """Train with a fault in step 5, and resume from step 3."""
    fault = ("resilience.faults", '[{site = "step", passing = 5, kind = "raise"}]')
    keys = [*keys, fault, ("run.dir", str(run_dir))]
    with pytest.raises(RankError, match="injected fault"):
        run_ranks(train_rank, 1, keys, text)
    run_ranks(train_rank, 1, keys, text)
    assert read_rows(run_dir) == expected


def test_kto_run_learns_labels_and_resumes_bitwise(texts: dict[str, str], tmp_path: Path) -> None:
    text, one = texts["unpaired"], tmp_path / "one"
    keys = [*objective_keys("kto"), *RUN]
    run_ranks(train_rank, 1, [*keys, ("run.dir", str(one))], text)
    result = read_rows(one)
    first, last = result[0]["metrics"], result[-1]["metrics"]
    for reward in ("reward_chosen", "reward_rejected", "kl"):  # of the initial model
        assert first[reward] == pytest.approx(0, abs=1e-4)
    assert last["reward_chosen"] > first["reward_chosen"]
    assert last["reward_chosen"] > last["reward_rejected"]
    assert result[-1]["eval_loss"] < result[2]["eval_loss"]
    assert result[-1]["eval_metrics"]["kl"] >= 0
    expect_bitwise_resume(keys, text, tmp_path / "two", result)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp_shard2", "pp2", "cp2 tp2"])
def test_kto_run_resumes_in_another_layout(
    layout: str, texts: dict[str, str], tmp_path: Path
) -> None:
    """The answers that prompts swap, and the divergence, do not depend on the layout."""
    text, one, two = texts["unpaired"], tmp_path / "one", tmp_path / "two"
    keys = [*objective_keys("kto"), *RUN]
    run_ranks(train_rank, 1, [*keys, ("run.dir", str(one))], text)
    fault = ("resilience.faults", '[{site = "step", passing = 5, kind = "raise"}]')
    keys += [fault, ("run.dir", str(two))]
    with pytest.raises(RankError, match="injected fault"):
        run_ranks(train_rank, 1, keys, text)
    ranks, overrides = parse(layout)
    run_ranks(train_rank, ranks, keys + overrides, text, timeout=180)
    for ours, theirs in zip(read_rows(two), read_rows(one), strict=True):
        for key in ("loss", "grad_norm", "eval_loss"):
            assert ours.get(key, 0) == pytest.approx(theirs.get(key, 0), rel=2e-4)
        for key in ("metrics", "eval_metrics"):
            assert ours.get(key, {}) == pytest.approx(theirs.get(key, {}), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("ipo", marks=pytest.mark.slow),  # with references, like DPO above
        "orpo",
        pytest.param("simpo", marks=pytest.mark.slow),
    ],
)
def test_objective_run_learns_preferences_and_resumes_bitwise(
    name: str, texts: dict[str, str], tmp_path: Path
) -> None:
    text, one = texts["preferences"], tmp_path / "one"
    keys = [*objective_keys(name), *RUN, ("train.sft_weight", "0.1")]
    run_ranks(train_rank, 1, [*keys, ("run.dir", str(one))], text)
    result = read_rows(one)
    assert result[-1]["metrics"]["reward_margin"] > result[0]["metrics"]["reward_margin"]
    assert result[-1]["metrics"]["chosen_nll"] < result[0]["metrics"]["chosen_nll"]
    assert result[-1]["eval_loss"] < result[2]["eval_loss"]
    assert bool([*one.glob("references-*")]) == (name == "ipo")
    expect_bitwise_resume(keys, text, tmp_path / "two", result)


def test_objective_of_a_mixture_has_the_loss_of_each_source(
    texts: dict[str, str], tmp_path: Path
) -> None:
    """Both terms of ORPO have their own counts in each source."""
    text = texts["preferences"]
    files = ["mixture.json", "tokenizer.json"]
    entries = [{"name": name, "share": 0.5, "store": text} for name in ("a", "b")]
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / files[0]).write_text(json.dumps({"sources": entries}))
    shutil.copy(Path(text) / files[1], tmp_path / "mixed")
    keys = [*objective_keys("orpo"), *RUN, ("train.steps", "1"), ("optim.lr", "1e-20")]
    keys += [("train.eval_sequences", "64")]
    run_ranks(train_rank, 1, [*keys, ("run.dir", str(tmp_path / "one"))], text)
    mixed = [("data.mixture", "a=0.5,b=0.5"), ("run.dir", str(tmp_path / "two"))]
    run_ranks(train_rank, 1, [*keys, *mixed], str(tmp_path / "mixed"))
    [one], [two] = records(tmp_path / "one"), records(tmp_path / "two")
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-5)
    for name in ("a", "b"):
        assert two[f"eval_loss/{name}"] == pytest.approx(one["eval_loss"], rel=1e-5)


def test_dpo_stop_in_the_references_ends_before_the_first_step(
    texts: dict[str, str], tmp_path: Path
) -> None:
    fault = (
        "resilience.faults",
        '[{site = "microbatch", passing = 2, kind = "slow", seconds = 0.5}]',
    )
    job = [*DPO, *RUN, fault, ("run.dir", str(tmp_path)), ("train.steps", "2")]
    call = (job, texts["preferences"])
    assert run_ranks(train_with_a_signal, 1, *call, signal.SIGTERM, str(tmp_path)) == [False]
    (stop,) = [event["text"] for event in read_event_log(tmp_path)[0] if event["kind"] == "stop"]
    assert re.fullmatch(
        r"SIGTERM: stopped before the first step \d\.\d\d s after the request", stop
    )
    assert not list(tmp_path.glob("references-*"))
    assert run_ranks(train_with_a_signal, 1, *call, 0, "") == [True]


# --------------------------------------------------------------------------- objectives


def custom_objective(section: TrainSection) -> Objective:
    """A user's objective: next tokens, of which those with a high loss count double."""

    def losses(losses_BT: Tensor, batch: Batch) -> SequenceLosses:
        loss_B = (losses_BT * (1 + (losses_BT > 6.2).float())).sum(1)
        return SequenceLosses(loss_B, (losses_BT > 6.2).float().sum(1, keepdim=True))

    return Objective(count_targets, losses, ("hard",))


def test_objective_custom_function_is_trained_and_recorded(
    texts: dict[str, str], tmp_path: Path
) -> None:
    name = ("train.objective", "tests.training.test_objectives:custom_objective")
    run_dir = ("run.dir", str(tmp_path / "run"))
    run_ranks(train_rank, 2, [*CHAT, *RUN, name, run_dir, ("train.steps", "2")], texts["chat"])
    [first, *_] = read_rows(tmp_path / "run")
    assert 0 < first["metrics"]["hard"] <= 1
    assert first["loss"] > 1.2 * math.log(512)


def small_counts(section: TrainSection) -> Objective:
    """A user's objective: the mean over next tokens, each of which counts 0.001."""

    def losses(losses_BT: Tensor, batch: Batch) -> SequenceLosses:
        loss_B = 0.001 * losses_BT.sum(1)
        return SequenceLosses(loss_B, loss_B.new_empty(len(loss_B), 0))

    return Objective(lambda batch: 0.001 * count_targets(batch), losses)


def test_objective_weights_may_be_fractions(texts: dict[str, str], tmp_path: Path) -> None:
    rows = []
    for name in ("next_token", "tests.training.test_objectives:small_counts"):
        keys = [("train.objective", name), ("run.dir", str(tmp_path / name)), ("train.steps", "2")]
        keys += [("train.eval_interval", "2")]
        run_ranks(train_rank, 1, [*CHAT, *RUN, *keys], texts["chat"])
        rows.append(read_rows(tmp_path / name))
    for expected, found in zip(*rows, strict=True):
        for key in {"loss", "grad_norm", "eval_loss"} & expected.keys():
            assert found[key] == pytest.approx(expected[key], rel=1e-4), key
    assert found["eval_loss"] > 1


def with_references(section: TrainSection) -> Objective:
    return dpo(section)._replace(is_token_sum=False)


def no_objective(section: TrainSection) -> Objective:
    raise ValueError("no such thing")


@pytest.mark.parametrize(
    ("function", "overrides", "rules"),
    [
        ("with_references", [("data.format", "preferences")], []),
        ("with_references", [], ["only preference data have"]),
        (
            "with_references",
            [("data.format", "preferences"), ("resilience.lighthouse", "localhost:1")],
            ["replica groups"],
        ),
        ("no_objective", [], ["ValueError: no such thing"]),
        ("CHAT", [], ["does not return an Objective: TypeError"]),
        ("missing", [], ["cannot be imported"]),
    ],
)
def test_objective_of_a_user_is_checked(
    function: str, overrides: Overrides, rules: list[str]
) -> None:
    name = f"tests.training.test_objectives:{function}"
    errors = check_names(small_job(("train.objective", name), *overrides))
    found = [error for error in errors if error.key == "train.objective"]
    assert len(found) == len(rules)
    assert all(rule in error.rule for rule, error in zip(rules, found, strict=True))


@pytest.mark.parametrize(
    ("overrides", "key", "rule"),
    [
        ([("train.objective", "dpo")], "train.objective", "needs preference data"),
        ([("data.format", "preferences")], "train.objective", "also train on rejected answers"),
    ],
)
def test_objective_unsupported_keys_are_refused(overrides: Overrides, key: str, rule: str) -> None:
    job = small_job(*overrides)
    with pytest.raises(InvalidConfig) as caught:
        resolve(job, Machine("cpu", devices=2, world_size=2))
    assert [(p.key, rule in p.rule) for p in caught.value.errors] == [(key, True)]


def test_objective_unknown_name_is_refused_with_a_suggestion() -> None:
    [error] = check_names(small_job(("train.objective", "dpoo")))
    assert error.key == "train.objective"
    assert "did you mean 'dpo'" in error.remedy
