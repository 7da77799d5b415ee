"""NEFTune: the distribution of the noise, and one noise for all layouts and resumed runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.chat import CHATML, message, write_lines, write_tokenizer
from tests.harness import run_ranks
from tests.layouts import (
    check_many,
    group_by_ranks,
    many_gradients,
    parse,
    size,
    slow_layouts,
)
from tests.parallel.lora.test_adapters import many_adapter_gradients
from tests.parallel.lora.test_dropout import keys
from tests.parallel.test_layouts import MODEL, TOLERANCE, distance
from tests.small import Overrides, loader_of, plan_here, small_job, this_rank
from tests.training.test_objectives import CHAT
from weft.config.schema import DataSection
from weft.data.loader import document_lengths
from weft.data.prepare import prepare_data
from weft.parallel.neftune import add_noise
from weft.training.setup import build

ALPHA: Overrides = [("train.neftune_alpha", "5")]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare conversations of lengths that differ in a sequence."""
    directory = tmp_path_factory.mktemp("neftune")
    tokenizer = write_tokenizer(directory / "model", CHATML)
    rows = [
        {
            "messages": [
                message("system", "so"),
                message("user", "it"),
                message("assistant", "it " * (1 + i % 5 * 6)),
            ]
        }
        for i in range(80)
    ]
    lines = write_lines(directory / "chat.jsonl", rows)
    values = {"path": str(lines), "tokenizer": str(tokenizer), "format": "chat"}
    return prepare_data(DataSection.model_validate(values), directory / "cache").path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_is_uniform_and_independent(dtype: torch.dtype) -> None:
    """Moments and correlations are within 5 standard deviations of those of uniform noise."""
    num_tokens, dim = 600, 384
    x_BTD = torch.zeros(1, num_tokens, dim, dtype=dtype)
    magnitude_BT = torch.linspace(0.1, 2, num_tokens)[None]
    noise = add_noise(x_BTD, keys(num_tokens, 3)[None], magnitude_BT, keys(dim, 5))
    assert noise.dtype == dtype
    unit_TD = noise[0].double() / magnitude_BT[0, :, None]
    assert unit_TD.abs().max() <= 1 + torch.finfo(dtype).eps
    count = unit_TD.numel()
    for power, mean, std in ((1, 0, (1 / 3) ** 0.5), (2, 1 / 3, (4 / 45) ** 0.5)):
        assert abs(unit_TD.pow(power).mean() - mean) < 5 * std / count**0.5
        for dim_of_mean in (0, 1):
            means = unit_TD.pow(power).mean(dim_of_mean)
            assert (means - mean).abs().max() < 5 * std / unit_TD.shape[dim_of_mean] ** 0.5
    histogram = torch.histc(unit_TD, 32, -1, 1)
    assert (histogram - count / 32).abs().max() < 5 * (count / 32) ** 0.5
    for dim_of_roll in (0, 1):
        for shift in (1, 2, 64):
            product = unit_TD * unit_TD.roll(shift, dim_of_roll)
            assert abs(product.mean()) < 5 / 3 / count**0.5


def test_noise_in_chunks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x_BTD = torch.randn(2, 30, 40)
    tokens_BT, magnitude_BT = keys(60, 0).view(2, 30), torch.rand(2, 30)
    noisy = add_noise(x_BTD, tokens_BT, magnitude_BT, keys(40, 1))
    monkeypatch.setattr("weft.parallel.token_keys.CHUNK_ELEMENTS", 300)
    assert add_noise(x_BTD, tokens_BT, magnitude_BT, keys(40, 1)).equal(noisy)


def test_document_lengths_count_the_tokens_of_each_document() -> None:
    documents_BT = torch.tensor([[0, 0, 0, 1, 2, 2], [0, 1, 1, 1, 1, 1]])
    assert document_lengths(documents_BT).tolist() == [[3, 3, 3, 1, 2, 2], [1, 5, 5, 5, 5, 5]]


# --------------------------------------------------------------------------- layouts

OFTEN = ["cp2", "tp2 model.mtp_layers=1", "pp2 train.microbatch_size=3"]
MORE = [
    "tp2 cp2",
    "pp2 dp_shard2 model.mtp_layers=1 train.microbatch_size=3",
    "dp_shard2 train.microbatch_size=3",
    "tp2 sequence_parallel=false",
    "cp2 cp_load_balance=documents",
    "cp2 cp_method=ulysses",
    "pp2 pipeline.schedule=DualPipeV train.microbatch_size=1",
    "pp2 pipeline.schedule=ZBVZeroBubble model.tied_embeddings=true",
    "dp_shard2 train.world_size_invariant=true train.microbatch_size=1",
    "tp2 lora.rank=4 lora.targets=q_proj,down_proj lora.dropout=0.2",
    "dp_shard2 lora.rank=4 lora.dropout=0.2 activation_checkpoint.mode=full",
    "dp_shard2 compile.enable=true",
    "tp2 model.embedding_scale=3",
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("layouts", [*group_by_ranks(OFTEN), *slow_layouts(MORE)])
def test_noise_layouts_gradients_equal_one_process(layouts: list[str], chats: Path) -> None:
    prefixes = ("parallel.", "compile.", "activation_checkpoint.", "train.", "pipeline.")

    def model_of(layout: str) -> Overrides:
        kept = [(k, v) for k, v in parse(layout)[1] if not k.startswith(prefixes)]
        return [*CHAT, *ALPHA, *size(layout), *kept]

    compute = many_adapter_gradients if "lora.rank" in layouts[0] else many_gradients
    check_many(layouts, chats, model_of, 2 * TOLERANCE, compute=compute)


@pytest.mark.slow
def test_noise_of_sequences_without_documents_equals_one_process(store_path: Path) -> None:
    """A sequence is one document: its length is that of all context-parallel ranks."""
    model = [*MODEL, *ALPHA, ("data.packing", "windows")]
    check_many(["cp2", "tp2"], store_path, lambda layout: [*model, *size(layout)], 2 * TOLERANCE)


# --------------------------------------------------------------------------- steps


def _steps(overrides: Overrides, store: str) -> dict[str, Any]:
    """Return the input of the first block and the gradients in steps, and two evaluations."""
    job = small_job(*overrides)
    plan = plan_here(job)
    built = build(plan, this_rank())
    (model,) = built.model_parts
    inputs: list[Tensor] = []
    plan.family.blocks(model)[0].register_forward_pre_hook(
        lambda block, args: inputs.append(args[0].detach().clone())
    )
    loader, grads = loader_of(job, plan, store, built.mesh), []
    first = loader.get_microbatches(0)
    later = loader.get_microbatches(job.train.global_batch_size)
    # The same data, as in a second epoch.
    again = [x._replace(token_ids_BT=y.token_ids_BT) for x, y in zip(first, later, strict=True)]
    noise = []
    for batches in (first, again, first):
        built.optimizer.zero_grad()
        inputs.clear()
        built.train_step.forward_backward(batches)
        noise.append([x - model.embed(b.tokens_BT) for x, b in zip(inputs, batches, strict=True)])
        grads.append({n: p.grad.clone() for n, p in model.named_parameters()})
    inputs.clear()
    evaluations = [built.train_step.evaluate(first)]
    clean = [
        (x - model.embed(b.tokens_BT)).abs().max().item()
        for x, b in zip(inputs, first, strict=True)
    ]
    model.add_noise = None
    evaluations.append(built.train_step.evaluate(first))
    lengths = [document_lengths(b.documents_BT) for b in first]
    return {
        "grads": grads,
        "noise": noise,
        "clean": clean,
        "evaluations": evaluations,
        "lengths": lengths,
    }


def test_noise_of_steps_documents_and_evaluation(chats: Path) -> None:
    """Steps differ, a repeated step is equal, evaluation has none; a document has its length."""
    (result,) = run_ranks(_steps, 1, [*CHAT, *ALPHA], str(chats))
    first, second, repeated = result["grads"]
    assert distance(first, second) > 1e-3
    assert all(grad.equal(repeated[name]) for name, grad in first.items())
    assert result["clean"] == [0.0] * len(result["clean"])
    assert result["evaluations"][0] == result["evaluations"][1]
    seen = set()
    for noise_BTD, lengths_BT in zip(result["noise"][0], result["lengths"], strict=True):
        dim = noise_BTD.shape[-1]
        largest_BT = noise_BTD.abs().amax(-1)
        limit_BT = 5 / (lengths_BT * dim) ** 0.5
        assert (largest_BT <= limit_BT * (1 + 1e-5)).all()
        assert (largest_BT > limit_BT * 0.5).all()  # of 32 elements, with probability 1 - 2**-32
        seen |= set(lengths_BT.flatten().tolist())
    assert len(seen) > 2
