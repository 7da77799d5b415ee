"""Reward models: TRL's loss and gradients, every layout, and files of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.chat import CHATML, message, write_lines, write_tokenizer
from tests.harness import run_ranks
from tests.layouts import parse
from tests.small import Overrides, expect_same, full_tensor, merged, plan_here, small_job, this_rank
from weft.checkpoint.state_dict import trainable_parameters
from weft.config.errors import InvalidConfig
from weft.config.schema import DataSection, TrainSection, replace
from weft.data.conversations import check_conversations
from weft.data.dataset import open_dataset
from weft.data.loader import IGNORE_INDEX, Batch, Loader, build_mixture
from weft.data.prepare import prepare_data
from weft.models.hf_mapping import to_hf_config
from weft.planning.plan import Machine
from weft.planning.resolve import resolve
from weft.preparation.job_checks import check_names
from weft.training.loss import Objective, SequenceLosses, count_targets, reward
from weft.training.setup import build

ROWS = [
    {
        "prompt": [
            message("system", "so"),
            message("user", f"{'it is what there and too'[i:]} {i}"),
        ],
        "chosen": [message("assistant", "it is " * (i % 2 + 1))],
        "rejected": [message("assistant", "was " * (i % 3 + 1))],
    }
    for i in range(24)
]
SIZES = {"num_layers": 2, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 64}
MODEL: Overrides = [
    *((f"model.{name}", str(size)) for name, size in SIZES.items()),
    ("model.rope_scaling", "none"),
    ("model.max_seq_len", "128"),
    ("train.seq_len", "128"),
    ("train.global_batch_size", "8"),
    ("train.microbatch_size", "4"),
    ("data.format", "preferences"),
    ("train.objective", "reward"),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prepare preferences of the word 'is' over the word 'was'; return the store's path."""
    directory = tmp_path_factory.mktemp("preferences")
    tokenizer = write_tokenizer(directory / "model", CHATML, pad_token="<s>")
    write_lines(directory / "pairs.jsonl", ROWS)
    values = {"path": str(directory / "pairs.jsonl"), "tokenizer": str(tokenizer)}
    values |= {"format": "preferences", "validation_fraction": "0.2"}
    section = DataSection.model_validate_strings(values)
    return str(prepare_data(section, directory / "cache").path)


def gradients(
    overrides: Overrides, store: str, weights: dict[str, torch.Tensor] | None = None
) -> dict[str, Any]:
    """Return loss, metrics and unsharded gradients of one global batch."""
    job = small_job(*overrides)
    plan = plan_here(job)
    built = build(plan, this_rank())
    if weights is not None:
        built.model_parts[0].load_state_dict(weights)
    dataset = open_dataset(store)
    mixture = build_mixture(dataset, "train", plan.seq_len, job.data, job.train.seed, True)
    loader = Loader(
        mixture,
        seed=job.train.seed,
        global_batch_size=len(mixture.sources[0]) if weights else job.train.global_batch_size,
        dp_rank=built.mesh.dp_rank,
        dp_size=plan.dp_size,
        microbatch_size=plan.microbatch_size,
    )
    loss = built.train_step.forward_backward(loader.get_microbatches(0))
    dist.all_reduce(loss)
    metrics = built.train_step.metrics
    assert metrics is not None
    dist.all_reduce(metrics)
    params = dict(trainable_parameters(built.model_parts))
    grads = {name: full_tensor(param.grad).clone() for name, param in params.items()}
    means = (metrics[:, 0] / metrics[:, 1]).tolist()
    metrics_by_name = dict(zip(built.train_step.metric_names, means, strict=True))
    return {"loss": loss.item(), "metrics": metrics_by_name, "grads": grads}


# --------------------------------------------------------------------------- TRL


def build_theirs(overrides: Overrides) -> Any:
    """Build transformers' model of a job, with large random weights."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    plan = resolve(small_job(*overrides), Machine("cpu", devices=1))
    torch.manual_seed(0)
    fields = to_hf_config(plan.family, plan.model, "float32") | {"initializer_range": 0.2}
    assert fields["architectures"] == ["LlamaForSequenceClassification"]
    return LlamaForSequenceClassification(LlamaConfig.from_dict(fields))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("coef", [0.0, 0.01])
def test_reward_loss_and_gradients_equal_trl(coef: float, store: str, tmp_path: Path) -> None:
    """All pairs of the training set in one batch, tokenized and trained by TRL's RewardTrainer."""
    datasets = pytest.importorskip("datasets")
    trl = pytest.importorskip("trl")
    from transformers import PreTrainedTokenizerFast

    overrides = [*MODEL, ("train.reward_center_coef", str(coef)), ("train.microbatch_size", "1")]
    theirs = build_theirs(overrides)
    weights = {n.removeprefix("model."): w.clone() for n, w in theirs.state_dict().items()}
    [ours] = run_ranks(gradients, 1, overrides, store, weights)

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(Path(store) / "tokenizer.json"), eos_token="</s>", pad_token="<s>"
    )
    tokenizer.chat_template = CHATML
    lines = open_dataset(store).sources[0].store.index("train")[::2, 2]
    rows = [ROWS[line - 1] for line in sorted(lines.tolist())]
    args = trl.RewardConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
        center_rewards_coefficient=coef or None,
    )
    data = datasets.Dataset.from_list(rows)
    trainer = trl.RewardTrainer(theirs, args, train_dataset=data, processing_class=tokenizer)
    batch = trainer.data_collator([*trainer.train_dataset])
    loss = trainer.compute_loss(theirs, batch)
    loss.backward()
    grads = {n.removeprefix("model."): p.grad.clone() for n, p in theirs.named_parameters()}
    expect_same(ours, {"loss": loss.item(), "grads": grads}, rel=2e-6)
    logged = trainer._metrics["train"]
    assert ours["metrics"]["reward_margin"] == pytest.approx(logged["margin"][0], rel=1e-5)
    assert ours["metrics"]["reward_accuracy"] == pytest.approx(logged["accuracy"][0])
    scores = ours["metrics"]["reward_chosen"] + ours["metrics"]["reward_rejected"]
    assert scores / 2 == pytest.approx(logged["mean_reward"][0], rel=1e-5)


# --------------------------------------------------------------------------- layouts


@pytest.fixture(scope="module")
def one_process(store: str) -> dict[str, Any]:
    [result] = run_ranks(gradients, 1, MODEL, store)
    return dict(result)


@pytest.mark.parametrize(
    "layout",
    [
        "train.microbatch_size=1",
        "cp2 tp2",
        "pp2 train.microbatch_size=2",
        pytest.param("dp_shard2", marks=pytest.mark.slow),
        pytest.param("dp_replicate2 train.microbatch_size=3", marks=pytest.mark.slow),
        pytest.param("tp2", marks=pytest.mark.slow),
        pytest.param("tp2 sequence_parallel=false", marks=pytest.mark.slow),
        pytest.param("cp2 cp_method=allgather", marks=pytest.mark.slow),
        pytest.param("pp2 tp2 train.microbatch_size=2", marks=pytest.mark.slow),
        pytest.param(
            "pp2 pipeline.schedule=DualPipeV train.microbatch_size=1 model.num_layers=4",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_reward_layouts_gradients_equal_one_process(
    layout: str, store: str, one_process: dict[str, Any]
) -> None:
    ranks, overrides = parse(layout)
    expected = one_process
    if depth := [pair for pair in overrides if pair[0] == "model.num_layers"]:
        [expected] = run_ranks(gradients, 1, [*MODEL, *depth], store)
    for rank in merged(run_ranks(gradients, ranks, MODEL + overrides, store, timeout=180)):
        expect_same(rank, expected, rel=1e-5)
        assert rank["metrics"] == pytest.approx(expected["metrics"], rel=1e-4, abs=1e-6)


def test_reward_with_lora_trains_the_head(store: str) -> None:
    tuned: Overrides = [*MODEL, ("lora.rank", "4")]
    [one] = run_ranks(gradients, 1, tuned, store, timeout=180)
    assert one["grads"].pop("score.weight").abs().max() > 0
    assert all("lora" in name for name in one["grads"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "pp2 dp_shard2 train.microbatch_size=2"])
def test_reward_with_lora_layouts_gradients_equal_one_process(layout: str, store: str) -> None:
    tuned: Overrides = [*MODEL, ("lora.rank", "4")]
    [one] = run_ranks(gradients, 1, tuned, store, timeout=180)
    ranks, overrides = parse(layout)
    for rank in merged(run_ranks(gradients, ranks, tuned + overrides, store, timeout=180)):
        for each in (one, rank):  # at first B is zero, so A has no gradient
            for name in [name for name in each["grads"] if "lora_A" in name]:
                assert not each["grads"].pop(name).any()
        expect_same(rank, one, rel=1e-5)


# --------------------------------------------------------------------------- loss and data


def test_reward_sums_each_pair_and_padding_counts_for_nothing() -> None:
    """The first sequence has two pairs, the second one, and the third is padding."""
    objective = reward(TrainSection(objective="reward", reward_center_coef=0.5))
    none = IGNORE_INDEX
    targets = torch.tensor([[none, 1, 1, 1, 1, none], [none, 1, 1, none, none, none], [none] * 6])
    documents = torch.tensor([[0, 0, 1, 2, 3, 4], [0, 0, 1, 2, 2, 2], [0, 0, 1, 2, 3, 4]])
    batch = Batch(targets, targets, documents, documents, None, torch.zeros(3, 2, 2))
    scores = torch.tensor(
        [[9.0, 1.0, 0.5, 0.0, 2.0, 9.0], [9.0, 0.0, 0.0, 9.0, 9.0, 9.0], [9.0] * 6]
    )
    scores.requires_grad_()
    result = objective.losses(scores, batch)
    assert objective.counts(batch).tolist() == [2, 1, 0]
    softplus = torch.nn.functional.softplus(torch.tensor([-0.5, 2.0, 0.0])).tolist()
    expected = [softplus[0] + softplus[1] + 0.5 * (1.5**2 + 2.0**2), softplus[2], 0.0]
    assert result.loss_B.tolist() == pytest.approx(expected)
    assert result.metrics_BM.tolist() == [[-1.5, 1.0, 1.0, 2.5], [0.0] * 4, [0.0] * 4]
    result.loss_B.sum().backward()
    assert scores.grad is not None
    assert not scores.grad[targets == none].any()
    assert scores.grad[0, 1:5].all()


def test_scores_are_read_at_the_last_token_of_each_conversation(store: str) -> None:
    dataset = open_dataset(store)
    job = small_job(*MODEL)
    [pairs] = build_mixture(dataset, "train", 128, job.data, 0, True).sources
    stream = dataset.sources[0].store.tokens("train")
    whole = stream.read_windows(np.array([0]), len(stream))[0]
    ends = dataset.sources[0].store.index("train")[:, 0].tolist()
    documents = {tuple(part.tolist()) for part in np.split(whole, ends)[:-1]}
    batch = pairs.get_batch(np.arange(len(pairs)))
    assert batch.documents_BT is not None
    found = []
    for tokens, targets, ids in zip(
        batch.tokens_BT, batch.targets_BT, batch.documents_BT, strict=True
    ):
        for document in ids.unique().tolist():
            part = ids == document
            has_target = (targets[part] != IGNORE_INDEX).tolist()
            if any(has_target):
                assert has_target.index(True) == len(has_target) - 1
                found.append(tuple(tokens[part].tolist()))
    assert len(found) == len(ends)
    assert set(found) == documents


def test_pairs_of_scores_have_one_token_more_per_answer(store: str) -> None:
    source = open_dataset(store).sources[0].store
    lengths = np.diff(source.index("train")[:, 0], prepend=0).reshape(-1, 2).sum(1)
    longest = int(lengths.max())
    section = small_job(*MODEL).data
    assert check_conversations(source, longest, section, scores=True) == []
    [error] = check_conversations(source, longest - 1, section, scores=True)
    assert error.remedy == f"use {longest}, or set data.overlong=skip"
    assert check_conversations(source, longest - 2, section) == []


# --------------------------------------------------------------------------- rules


def plan_errors(*overrides: tuple[str, str]) -> list[tuple[str, str]]:
    with pytest.raises(InvalidConfig) as caught:
        resolve(small_job(*overrides), Machine("cpu", devices=1))
    return [(error.key, str(error)) for error in caught.value.errors]


PREFERENCES = ("data.format", "preferences")
REWARD = ("train.objective", "reward")


@pytest.mark.parametrize(
    ("overrides", "key", "text"),
    [
        ([REWARD], "train.objective", "needs preference data. Use data.format=preferences."),
        (
            [("model.score_head", "true")],
            "train.objective",
            "needs logits, but llama-toy has a score head",
        ),
        ([REWARD, PREFERENCES, ("model.mtp_layers", "1")], "model.mtp_layers", "use 0"),
    ],
)
def test_reward_unsupported_keys_are_refused(overrides: Overrides, key: str, text: str) -> None:
    [(found, message)] = plan_errors(*overrides)
    assert found == key
    assert text.lower() in message.lower()


def test_reward_sets_the_score_head_and_unties_the_embedding() -> None:
    job = small_job(REWARD, PREFERENCES, ("model.tied_embeddings", "true"))
    plan = resolve(job, Machine("cpu", devices=1))
    assert plan.has_score_head
    assert not plan.model.tied_embeddings
    names = dict(plan.family.build(plan.model).named_parameters())
    assert names["score.weight"].shape == (1, plan.model.dim)
    assert "lm_head.weight" not in names
    assert plan.num_params == sum(p.numel() for p in names.values())
    tuned = resolve(replace(job, lora={"rank": 2}), Machine("cpu", devices=1))
    assert tuned.job.lora.modules_to_save == ("score",)
    assert tuned.num_trainable_params > plan.model.dim
    units = plan.family.unit_costs(plan.model, 64)  # type: ignore[misc]
    assert units[-1].flops_per_token == 6 * plan.model.dim


def mean_score(section: TrainSection) -> Objective:
    """A user's objective: the mean score of the answers."""

    def losses(scores_BT: torch.Tensor, batch: Batch) -> SequenceLosses:
        loss_B = (scores_BT * (batch.targets_BT != IGNORE_INDEX)).sum(1)
        return SequenceLosses(loss_B, loss_B.new_empty(len(loss_B), 0))

    return Objective(count_targets, losses, takes_scores=True)


def test_objective_of_a_user_with_scores_needs_the_score_head() -> None:
    name = ("train.objective", "tests.training.test_reward:mean_score")
    [error] = check_names(small_job(name))
    assert "takes scores" in error.rule
    assert error.remedy == "use model.score_head=true"
    assert not check_names(small_job(name, ("model.score_head", "true")))
