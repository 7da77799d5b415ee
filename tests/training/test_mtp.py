"""Multi-token prediction: gradients against a plain implementation, and in layouts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.harness import run_ranks
from tests.parallel.sharded import assert_equal
from tests.small import gradients, merged, plan_here, small_job, this_rank
from weft.config.errors import InvalidConfig
from weft.data.loader import IGNORE_INDEX, Batch
from weft.planning.plan import Machine
from weft.planning.resolve import resolve
from weft.training import loss as loss_module
from weft.training.setup import build

# --------------------------------------------------------------------------- a plain implementation


def plain_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return x_TD / (x_TD.square().mean(-1, keepdim=True) + eps).sqrt() * weight_D


def plain_rotate(x_THK: Tensor, positions_T: Tensor, theta: float) -> Tensor:
    half = x_THK.shape[-1] // 2
    angles_TJ = positions_T[:, None] / theta ** (torch.arange(half) / half)
    cos_T1J, sin_T1J = angles_TJ.cos()[:, None], angles_TJ.sin()[:, None]
    a, b = x_THK[..., :half], x_THK[..., half:]
    return torch.cat((a * cos_T1J - b * sin_T1J, b * cos_T1J + a * sin_T1J), -1)


def plain_block(
    weights: dict[str, Tensor], layer: int, x_TD: Tensor, documents_T: Tensor, config: Any
) -> Tensor:
    """Compute one block of Llama for one sequence, attention head by attention head."""
    w = {n.removeprefix(f"layers.{layer}."): t for n, t in weights.items() if f"s.{layer}." in n}
    num_tokens, eps = len(x_TD), config.norm_eps
    positions_T = torch.arange(num_tokens)
    h_TD = plain_norm(x_TD, w["input_layernorm.weight"], eps)
    q, k, v = (h_TD @ w[f"self_attn.{name}_proj.weight"].T for name in "qkv")
    q, k, v = (x.unflatten(-1, (-1, config.key_dim)) for x in (q, k, v))
    q, k = (plain_rotate(x, positions_T, config.rope_theta) for x in (q, k))
    sees_TT = (positions_T <= positions_T[:, None]) & (documents_T == documents_T[:, None])
    heads = []
    for head in range(config.num_heads):
        other = head // (config.num_heads // config.num_kv_heads)
        scores_TT = q[:, head] @ k[:, other].T / config.key_dim**0.5
        heads.append(scores_TT.masked_fill(~sees_TT, -torch.inf).softmax(-1) @ v[:, other])
    x_TD = x_TD + torch.cat(heads, -1) @ w["self_attn.o_proj.weight"].T
    h_TD = plain_norm(x_TD, w["post_attention_layernorm.weight"], eps)
    gate, up = (h_TD @ w[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x_TD + (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T


def plain_losses(
    weights: dict[str, Tensor], batch: Batch, config: Any, smoothing: float
) -> list[list[Tensor]]:
    """Return weighted losses and weights of the tokens with a target, by depth.

    Depth 0 is the model's.
    """
    head = weights.get("lm_head.weight", weights["embed_tokens.weight"])
    losses: list[list[Tensor]] = [[] for _ in range(1 + config.mtp_layers)]
    of_tokens = torch.ones(batch.tokens_BT.shape) if batch.weights_BT is None else batch.weights_BT
    for row, (tokens_T, targets_T) in enumerate(
        zip(batch.tokens_BT, batch.targets_BT, strict=True)
    ):
        length = len(tokens_T)
        documents_T = torch.zeros(length) if batch.documents_BT is None else batch.documents_BT[row]
        x_TD = weights["embed_tokens.weight"][tokens_T]
        for layer in range(config.num_layers):
            x_TD = plain_block(weights, layer, x_TD, documents_T, config)
        hidden_TD = plain_norm(x_TD, weights["norm.weight"], config.norm_eps)
        for depth in range(1 + config.mtp_layers):
            if depth:
                layer = config.num_layers + depth - 1
                w = {name: weights[f"layers.{layer}.{name}.weight"] for name in ("enorm", "hnorm")}
                # A token of another document or beyond the end is never in a counted prediction.
                ids_T = torch.tensor(
                    [int(tokens_T[min(t + depth, length - 1)]) for t in range(length)]
                )
                embedded_TD = weights["embed_tokens.weight"][ids_T]
                parts = (
                    plain_norm(embedded_TD, w["enorm"], config.norm_eps),
                    plain_norm(hidden_TD, w["hnorm"], config.norm_eps),
                )
                x_TD = torch.cat(parts, -1) @ weights[f"layers.{layer}.eh_proj.weight"].T
                x_TD = plain_block(weights, layer, x_TD, documents_T, config)
                norm = weights[f"layers.{layer}.shared_head.norm.weight"]
                hidden_TD = plain_norm(x_TD, norm, config.norm_eps)
            logprobs_TV = (hidden_TD @ head.T).log_softmax(-1)
            for t in range(length - depth):
                target = int(targets_T[t + depth])
                if target != IGNORE_INDEX and documents_T[t] == documents_T[t + depth]:
                    label_V = torch.full((len(head),), smoothing / len(head))
                    label_V[target] += 1 - smoothing
                    weight = of_tokens[row, t + depth]
                    losses[depth].append(torch.stack((-weight * logprobs_TV[t] @ label_V, weight)))
    return losses


def random_batch(
    rng: random.Random, length: int, vocab_size: int, packed: bool, weighted: bool
) -> Batch:
    generator = torch.Generator().manual_seed(rng.randrange(1000))
    num_sequences = rng.choice((1, 2, 3))
    tokens = torch.randint(vocab_size, (num_sequences, length + 1), generator=generator)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].clone(), None, None)
    # As in conversations, some tokens are no targets.
    batch.targets_BT[torch.rand(batch.targets_BT.shape, generator=generator) < 0.3] = IGNORE_INDEX
    if weighted:
        weights = torch.rand(batch.targets_BT.shape, generator=generator).round(decimals=1)
        batch = batch._replace(weights_BT=weights)
    if not packed:
        return batch
    ends = torch.rand(batch.tokens_BT.shape, generator=generator) < 0.3
    documents = ends.long().cumsum(1).roll(1, dims=1)
    documents[:, 0] = 0
    batch.targets_BT[documents.roll(-1, dims=1) != documents] = IGNORE_INDEX
    positions = torch.arange(length).expand_as(documents)
    return batch._replace(documents_BT=documents, positions_BT=positions.contiguous())


def compare_to_plain(seed: int) -> list[float]:
    """Return the errors of loss, metrics and gradients, relative to their largest entry."""
    rng = random.Random(seed)
    depth, weight = rng.choice((1, 2, 3)), rng.choice((0.1, 0.3, 1.7))
    packed, chunked, weighted = bool(seed % 2), bool(seed // 2 % 2), seed % 3 == 0
    smoothing = rng.choice((0.1, 0.4)) if seed % 4 < 2 or weighted else 0.0
    length, vocab_size = rng.choice((5, 7, 11)), 263
    fields = {"num_layers": rng.choice((1, 2)), "mtp_layers": depth, "rope_scaling": "none"}
    fields |= {"tied_embeddings": str(rng.random() < 0.5).lower(), "num_heads": 3}
    fields |= {
        "num_kv_heads": rng.choice((1, 3)),
        "dim": 18,
        "ffn_dim": 13,
        "vocab_size": vocab_size,
    }
    overrides = [(f"model.{name}", str(value)) for name, value in fields.items()]
    overrides += [("train.mtp_weight", str(weight)), ("train.seq_len", str(length))]
    overrides += [("train.global_batch_size", "4"), ("data.vocab_size", str(vocab_size))]
    overrides += [("precision.compute_dtype", "float32"), ("train.label_smoothing", str(smoothing))]
    loss_module.CHUNK_BYTES = 4 * 3 * vocab_size if chunked else 512 << 20
    plan = plan_here(small_job(*overrides))
    built = build(plan, this_rank())
    (model,) = built.model_parts
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.3)
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    while True:
        batches = [random_batch(rng, length, vocab_size, packed, weighted) for _ in range(2)]
        plain = [plain_losses(weights, b, plan.model, smoothing) for b in batches]
        columns = [
            [each for losses in column for each in losses] for column in zip(*plain, strict=True)
        ]
        if all(columns):  # short documents may have no target at a depth
            break
    by_depth = [torch.stack(column) for column in columns]
    assert (built.train_step._head_weight is not None) == chunked
    loss = built.train_step.forward_backward(batches)
    means = [losses_N2[:, 0].sum() / losses_N2[:, 1].sum() for losses_N2 in by_depth]
    expected = means[0] + weight / depth * torch.stack(means[1:]).sum()
    expected_grads = torch.autograd.grad(expected, list(weights.values()))
    metrics = built.train_step.metrics
    assert metrics is not None
    assert built.train_step.metric_names == tuple(f"mtp_loss/{k}" for k in range(1, depth + 1))
    counts = [losses_N2[:, 1].sum().item() for losses_N2 in by_depth[1:]]
    assert metrics[:, 1].tolist() == pytest.approx(counts, rel=1e-6)
    values = [mean.item() for mean in means]
    errors = [abs(loss.item() / values[0] - 1)]  # the loss is the model's own
    errors += [
        abs(m / e - 1)
        for m, e in zip((metrics[:, 0] / metrics[:, 1]).tolist(), values[1:], strict=True)
    ]
    least = 1e-2 * max(float(grad.abs().max()) for grad in expected_grads)
    for (name, param), grad in zip(model.named_parameters(), expected_grads, strict=True):
        assert param.grad is not None, name
        scale = max(least, float(grad.abs().max()))  # short documents have no gradient of queries
        errors.append(float((param.grad - grad).abs().max()) / scale)
    return errors


@pytest.mark.parametrize(
    "seed", [0, 3, *(pytest.param(s, marks=pytest.mark.slow) for s in range(4, 24))]
)
def test_gradients_equal_a_plain_implementation(seed: int) -> None:
    """Random depths, odd sizes, documents and masked targets; logits at once or in chunks.

    Some have weights of tokens, and label smoothing.
    """
    (errors,) = run_ranks(compare_to_plain, 1, seed)
    assert max(errors) <= 1e-5, errors


def test_later_targets_are_masked_in_other_documents_and_the_end() -> None:
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    batch = Batch(tokens, torch.tensor([[2, 3, -100, 5, 6]]), torch.tensor([[0, 0, 0, 1, 1]]), None)
    later = batch.with_later(2)
    assert later.later_BTK is not None
    assert later.later_BTK[0].T.tolist() == [[2, 3, 4, 5, 0], [3, 4, 5, 0, 0]]
    expected = [[2, 3, -100, 5, 6], [3, -100, -100, 6, -100], [-100] * 5]
    assert later.targets_BT.tolist() == expected
    whole = batch._replace(documents_BT=None).with_later(7).targets_BT
    assert whole.tolist()[1:3] == [[3, -100, 5, 6, -100], [-100, 5, 6, -100, -100]]
    assert (whole[5:] == -100).all()


# --------------------------------------------------------------------------- layouts

MTP = [("model.mtp_layers", "2"), ("data.packing", "documents"), ("model.tied_embeddings", "false")]
LAYOUTS = [
    (2, "pp=2 cp=1"),
    *(
        pytest.param(*layout, marks=pytest.mark.slow)
        for layout in (
            (2, "tp=2"),
            (2, "cp=2 cp_method=ring"),
            (2, "cp=2 cp_method=ulysses cp_load_balance=false"),
            (2, "dp_shard=2"),
            (4, "dp_replicate=2 tp=2 sequence_parallel=false"),
            (4, "pp=2 tp=2"),
            (4, "pp=2 cp=2 cp_method=allgather"),
            (2, "pp=2 pipeline.schedule=ZBVZeroBubble model.tied_embeddings=true"),
        )
    ),
]


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
def test_layout_gradients_equal_one_process(ranks: int, layout: str, store_path: Path) -> None:
    pairs = [pair.split("=") for pair in layout.split()]
    keys = [(key if "." in key else f"parallel.{key}", value) for key, value in pairs]
    model = MTP + [pair for pair in keys if pair[0].startswith("model.")]
    (one,) = run_ranks(gradients, 1, model, str(store_path))
    for many in merged(run_ranks(gradients, ranks, MTP + keys, str(store_path))):
        assert many["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert many["norm"] == pytest.approx(one["norm"], rel=1e-5)
        assert_equal(many, one, 1e-5)


# --------------------------------------------------------------------------- runs and rules


def problems(*overrides: tuple[str, str]) -> str:
    with pytest.raises(InvalidConfig) as caught:
        resolve(small_job(*overrides), Machine("cpu", devices=2, world_size=2))
    return "\n".join(str(error) for error in caught.value.errors)


def test_rules_refuse_what_has_no_meaning() -> None:
    mtp = ("model.mtp_layers", "2")
    dpo = [("train.objective", "dpo"), ("data.format", "preferences")]
    assert "train.objective=dpo does not. Use 0" in problems(mtp, *dpo)
    assert "beyond sequences of train.seq_len=32 tokens" in problems(("model.mtp_layers", "32"))
    machine = Machine("cpu", devices=2, world_size=2)
    plan = resolve(small_job(("train.mtp_weight", "0.1")), machine)
    assert any("train.mtp_weight=0.1 has no effect" in text for text in plan.warnings)


def test_last_stage_counts_the_layers_and_the_embedding() -> None:
    keys = [("parallel.pp", "2"), ("model.num_layers", "4"), ("model.tied_embeddings", "false")]
    machine = Machine("cpu", devices=2, world_size=2)
    plain, mtp = (resolve(small_job(*keys, ("model.mtp_layers", str(k))), machine) for k in (0, 2))
    assert plain.pipeline is not None
    assert mtp.pipeline is not None
    assert plain.tied_ranks is None
    assert mtp.tied_ranks == (0, 1)
    assert plain.pipeline.stages[1].num_blocks > mtp.pipeline.stages[1].num_blocks
