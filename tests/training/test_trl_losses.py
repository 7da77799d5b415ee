"""Objectives of preferences against the trainers of TRL: loss, rewards and gradients."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.chat import CHATML, write_tokenizer
from weft.config.schema import TrainSection
from weft.data.loader import IGNORE_INDEX, Batch, LabeledAnswers, PackedDocuments
from weft.data.packing import PackedSequences, SwappedAnswers
from weft.data.token_store import TokenStream
from weft.training.loss import answer_logprobs, build_objective, cross_entropy

VOCAB_SIZE = 320  # above the token with which TRL pads


class Pair(NamedTuple):
    """Token ids of a prompt and its two answers."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


# Answers of different lengths.  TRL's ORPO also trains the prompt of the chosen answer, except its
# first token, so these prompts have one token where that matters.
PAIRS = [
    Pair([5, 9, 2], [11, 12, 13, 14, 15], [21]),
    Pair([7, 8], [17, 3], [23, 24, 25, 26]),
    Pair([6, 6, 1, 4], [33], [34, 35]),
]
SHORT_PROMPTS = [pair._replace(prompt=pair.prompt[:1]) for pair in PAIRS]


def build_model(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import PreTrainedTokenizerFast

    file = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), CHATML)
    special = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    return PreTrainedTokenizerFast(tokenizer_file=str(file), **special)


def open_trainer(kind: Any, config: Any, rows: list[Any], *, tokenizer: Any, **values: Any) -> Any:
    """Return a trainer of TRL for a model, which is not trained."""
    from datasets import Dataset

    models = {name: values.pop(name) for name in ("model", "ref_model") if name in values}
    args = config(
        output_dir="unused",
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
        **values,
    )
    dataset = Dataset.from_list(rows)
    return kind(args=args, train_dataset=dataset, processing_class=tokenizer, **models)


REWARDS = (
    ("reward_margin", "rewards/margins"),
    ("reward_accuracy", "rewards/accuracies"),
    ("reward_chosen", "rewards/chosen"),
    ("reward_rejected", "rewards/rejected"),
)
TEXTS = [{"prompt": "it is", "chosen": " so", "rejected": " not"}] * 2


# --------------------------------------------------------------------------- weft


def pack(pairs: list[Pair], references_N2: Tensor, per_sequence: int = 2) -> Batch:
    """Return sequences of pairs as weft packs them; the last may have fewer."""
    seq_len, count = 40, -(-len(pairs) // per_sequence)
    tokens, documents = torch.zeros(2, count, seq_len, dtype=torch.int64)
    targets = torch.full((count, seq_len), IGNORE_INDEX)
    references = torch.zeros(count, per_sequence, 2)
    for index, pair in enumerate(pairs):
        row, place = divmod(index, per_sequence)
        end = 0 if place == 0 else int((documents[row] < 2 * place).nonzero().max()) + 1
        for answer, text in enumerate((pair.chosen, pair.rejected)):
            ids = torch.tensor([*pair.prompt, *text])
            span = slice(end, end + len(ids) - 1)
            tokens[row, span] = ids[:-1]
            targets[row, span] = ids[1:]
            targets[row, end : end + len(pair.prompt) - 1] = IGNORE_INDEX
            documents[row, span] = 2 * place + answer
            end = span.stop
        documents[row, end:] = 2 * place + 2
        references[row, place] = references_N2[index]
    return Batch(tokens, targets, documents, documents, None, references)


def compute_token_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy of each token, with each document alone in the model: (B, T)."""
    assert batch.documents_BT is not None
    losses = torch.zeros(batch.tokens_BT.shape)
    for row, documents in enumerate(batch.documents_BT):
        for document in documents.unique().tolist():
            is_document = documents == document
            tokens, targets = batch.tokens_BT[row, is_document], batch.targets_BT[row, is_document]
            logits = model(tokens[None]).logits
            losses[row, is_document] = cross_entropy(logits, targets[None])[0]
    return losses


class Result(NamedTuple):
    loss: Tensor
    metrics: dict[str, float]


def compute_loss(section: TrainSection, model: nn.Module, batch: Batch) -> Result:
    """Return the loss of a global batch, and the mean of each metric."""
    objective = build_objective(section.objective, section)
    losses = objective.losses(compute_token_losses(model, batch), batch)
    counts = objective.counts(batch).view(len(batch.tokens_BT), -1)
    loss = (losses.loss_B.view(counts.shape).sum(0) / counts.sum(0)).sum()
    weights = losses.metric_counts_BM
    total = counts[:, 0].sum() if weights is None else weights.sum(0)
    means = (losses.metrics_BM.sum(0) / total).tolist()
    return Result(loss, dict(zip(objective.metrics, means, strict=True)))


def compute_references(model: nn.Module, pairs: list[Pair]) -> Tensor:
    with torch.no_grad():
        batch = pack(pairs, torch.zeros(len(pairs), 2), per_sequence=1)
        return answer_logprobs(compute_token_losses(model, batch), batch)[:, 0]


def expect_equal(ours: Tensor, theirs: Tensor, model: nn.Module) -> None:
    """Compare two losses and the gradients of the model."""
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6, abs=1e-6)
    params = [param for param in model.parameters() if param.requires_grad]
    found, expected = (torch.autograd.grad(loss, params) for loss in (ours, theirs))
    for mine, other in zip(found, expected, strict=True):
        largest = float(other.abs().max())
        assert largest > 0
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6 * max(1.0, largest))


# --------------------------------------------------------------------------- objectives


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({"objective": "dpo", "preference_beta": 0.3}, {"beta": 0.3}),
        ({"objective": "ipo"}, {"loss_type": ["ipo"]}),
        (
            {"objective": "dpo", "sft_weight": 0.4},
            {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.4]},
        ),
        (
            {"objective": "ipo", "preference_beta": 0.5, "sft_weight": 2.0},
            {"beta": 0.5, "loss_type": ["ipo", "sft"], "loss_weights": [1.0, 2.0]},
        ),
    ],
)
def test_objective_with_references_equals_trl(
    keys: dict[str, Any], options: dict[str, Any], tokenizer: Any
) -> None:
    from trl import DPOConfig, DPOTrainer

    model, reference = build_model(0), build_model(1)
    models = {"model": model, "ref_model": reference}
    trainer = open_trainer(DPOTrainer, DPOConfig, TEXTS, tokenizer=tokenizer, **models, **options)
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    inputs = trainer.data_collator([dict(zip(names, pair, strict=True)) for pair in PAIRS])
    theirs = trainer.compute_loss(model, inputs)
    batch = pack(PAIRS, compute_references(reference, PAIRS))
    ours = compute_loss(TrainSection(**keys), model, batch)
    expect_equal(ours.loss, theirs, model)
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    for name, other in REWARDS:
        assert ours.metrics[name] == pytest.approx(logged[other], rel=1e-5, abs=1e-6)


def test_dpo_label_smoothing_equals_trl_of_each_pair(tokenizer: Any) -> None:
    """TRL smooths labels in AOT, which sorts the pairs of a batch: one pair is conservative DPO."""
    from trl import DPOConfig, DPOTrainer

    model, reference = build_model(0), build_model(1)
    trainer = open_trainer(
        DPOTrainer,
        DPOConfig,
        TEXTS,
        tokenizer=tokenizer,
        model=model,
        ref_model=reference,
        loss_type=["aot"],
        label_smoothing=0.2,
    )
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    each = [
        trainer.compute_loss(model, trainer.data_collator([dict(zip(names, pair, strict=True))]))
        for pair in PAIRS
    ]
    batch = pack(PAIRS, compute_references(reference, PAIRS))
    section = TrainSection(objective="dpo", preference_label_smoothing=0.2)
    expect_equal(compute_loss(section, model, batch).loss, torch.stack(each).mean(), model)


def collate_pairs(pairs: list[Pair]) -> dict[str, Tensor]:
    """Return a batch as ORPOTrainer and CPOTrainer take it."""
    result = {}
    for name in ("chosen", "rejected"):
        texts = [(pair.prompt, getattr(pair, name)) for pair in pairs]
        length = max(len(prompt) + len(answer) for prompt, answer in texts)
        columns = torch.zeros(3, len(pairs), length, dtype=torch.int64)
        columns[2] = -100
        for row, (prompt, answer) in enumerate(texts):
            end = len(prompt) + len(answer)
            columns[0, row, :end] = torch.tensor([*prompt, *answer])
            columns[1, row, :end] = 1
            columns[2, row, len(prompt) : end] = torch.tensor(answer)
        for kind, column in zip(("input_ids", "attention_mask", "labels"), columns, strict=True):
            result[f"{name}_{kind}"] = column
    return result


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({"objective": "simpo"}, {"beta": 2.0, "cpo_alpha": 0.0}),
        (
            {
                "objective": "simpo",
                "preference_beta": 1.5,
                "simpo_gamma": 0.8,
                "sft_weight": 0.3,
                "preference_label_smoothing": 0.1,
            },
            {"beta": 1.5, "simpo_gamma": 0.8, "cpo_alpha": 0.3, "label_smoothing": 0.1},
        ),
        ({"objective": "orpo"}, {}),
        ({"objective": "orpo", "preference_beta": 0.7}, {"beta": 0.7}),
    ],
)
def test_objective_without_references_equals_trl(
    keys: dict[str, Any], options: dict[str, Any], tokenizer: Any
) -> None:
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    is_simpo = keys["objective"] == "simpo"
    kinds = (CPOTrainer, CPOConfig) if is_simpo else (ORPOTrainer, ORPOConfig)
    options = {"loss_type": "simpo", **options} if is_simpo else options
    pairs, model = PAIRS if is_simpo else SHORT_PROMPTS, build_model(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the trainers are experimental
        trainer = open_trainer(*kinds, TEXTS, tokenizer=tokenizer, model=model, **options)
    theirs, logged = trainer.get_batch_loss_metrics(model, collate_pairs(pairs))
    ours = compute_loss(TrainSection(**keys), model, pack(pairs, torch.zeros(len(pairs), 2)))
    expect_equal(ours.loss, theirs, model)
    for name, other in (
        *REWARDS,
        *((("chosen_nll", "nll_loss"),) if "chosen_nll" in ours.metrics else ()),
    ):
        assert ours.metrics[name] == pytest.approx(logged[other], rel=1e-5, abs=1e-6)


def test_orpo_of_a_certain_answer_is_finite() -> None:
    """A log-probability of 0 has infinite odds, and padding has no tokens."""
    objective = build_objective("orpo", TrainSection(objective="orpo"))
    batch = pack(PAIRS, torch.zeros(len(PAIRS), 2))
    losses_BT = torch.zeros(batch.tokens_BT.shape, requires_grad=True)
    losses = objective.losses(losses_BT, batch)
    losses.loss_B.sum().backward()
    assert losses.loss_B.isfinite().all()
    assert losses_BT.grad is not None
    assert losses_BT.grad.isfinite().all()


@pytest.mark.parametrize(
    "keys",
    [
        {"objective": "kto"},
        {
            "objective": "kto",
            "preference_beta": 0.5,
            "desirable_weight": 0.7,
            "undesirable_weight": 1.6,
        },
    ],
)
@pytest.mark.parametrize("is_near", [False, True])
def test_kto_equals_trl(keys: dict[str, Any], is_near: bool, tokenizer: Any) -> None:
    from trl import KTOConfig, KTOTrainer

    # With these models the mean is 3.6, or -3.6, which is clamped.
    model, reference = build_model(int(is_near)), build_model(int(not is_near))
    section = TrainSection(**keys)
    rows = [{"prompt": "it is", "completion": " so", "label": label} for label in (True, False)]
    trainer = open_trainer(
        KTOTrainer,
        KTOConfig,
        rows,
        tokenizer=tokenizer,
        model=model,
        ref_model=reference,
        beta=section.beta,
        desirable_weight=section.desirable_weight,
        undesirable_weight=section.undesirable_weight,
    )
    answers = [(pair.prompt, pair.chosen) for pair in PAIRS]
    labels = [True, False, True]
    inputs = trainer.data_collator(
        [
            {
                "prompt_ids": prompt,
                "completion_ids": answer,
                "KL_completion_ids": answers[index - 1][1],
                "label": label,
            }
            for index, ((prompt, answer), label) in enumerate(zip(answers, labels, strict=True))
        ]
    )
    theirs = trainer.compute_loss(model, inputs)
    batch = pack_answers(answers, labels)
    objective = build_objective("kto", section)
    with torch.no_grad():
        for column, each in enumerate((batch, batch.with_swapped_answers())):
            known = answer_logprobs(compute_token_losses(reference, each), each)[..., 0]
            assert batch.references_BP2 is not None
            batch.references_BP2[..., column] = known
        swapped = batch.with_swapped_answers()
        assert objective.baseline is not None
        sums = objective.baseline(compute_token_losses(model, swapped), swapped).sum(0)
    batch = batch._replace(baseline_B=(sums[0] / sums[1]).expand(len(batch.tokens_BT)))
    ours = compute_loss(section, model, batch)
    expect_equal(ours.loss, theirs, model)
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    assert (ours.metrics["kl"] == 0) == is_near
    for name, other in (
        ("reward_chosen", "rewards/chosen"),
        ("reward_rejected", "rewards/rejected"),
        ("kl", "kl"),
    ):
        assert ours.metrics[name] == pytest.approx(logged[other], rel=1e-5, abs=1e-6)


def pack_answers(answers: list[tuple[list[int], list[int]]], labels: list[bool]) -> Batch:
    """Return weft's batch of labeled answers, two per sequence, from a stream of tokens."""
    tokens = [[*prompt, *answer] for prompt, answer in answers]
    sizes = np.array([len(each) for each in tokens])
    prompts = np.array([len(prompt) for prompt, _ in answers])
    mask = [[0] * len(prompt) + [1] * len(answer) for prompt, answer in answers]
    starts, count = np.cumsum(sizes) - sizes, len(answers)
    offsets = np.minimum(2 * np.arange(-(-count // 2) + 1), count)
    packed = PackedDocuments(
        TokenStream([np.concatenate(tokens)]),
        TokenStream([np.concatenate(mask)]),
        PackedSequences(starts, sizes - 1, np.arange(count), offsets),
        seq_len=40,
        separator=0,
    )
    swapped = SwappedAnswers((np.arange(count) - 1) % count, prompts)
    samples = LabeledAnswers(packed, np.array(labels, np.uint8), swapped, width=2)
    return samples.get_batch(np.arange(len(offsets) - 1))
