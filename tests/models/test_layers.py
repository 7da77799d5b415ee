"""Layers compared with explicit formulas."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask

from weft.models import attention
from weft.models.attention import (
    DEFAULT_OPTIONS,
    AttentionOptions,
    attend,
    document_mask,
    document_starts,
    first_visible,
    interval_block_mask,
)
from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_rules import check
from weft.models.layers import FeedForward, RMSNorm
from weft.models.rotary import apply_rope, rope_frequencies, rope_tables


def head_config(head_dim: int, theta: float = 10000.0, **keys: Any) -> DecoderConfig:
    """Return the configuration of a model with one head, without scaling of positions."""
    shape = {"dim": head_dim, "num_heads": 1, "num_kv_heads": 1, "head_dim": head_dim}
    return DecoderConfig.model_validate(
        {"rope_theta": theta, "rope_scaling": "none"} | shape | keys
    )


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# --------------------------------------------------------------------------- RMSNorm


def spelled_out_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_bitwise_the_formula(dtype: torch.dtype) -> None:
    norm = RMSNorm(64, eps=1e-2).to(dtype)  # large enough to affect the result
    torch.nn.init.normal_(norm.weight, mean=1.0, std=0.3)
    x = torch.randn(3, 5, 64, dtype=dtype, requires_grad=True)
    upstream = torch.randn(3, 5, 64, dtype=dtype)
    inputs = (x, norm.weight)
    ours, theirs = norm(x), spelled_out_norm(x, norm.weight, 1e-2)
    assert ours.dtype == dtype
    assert torch.equal(ours, theirs)
    ours_grad = torch.autograd.grad(ours, inputs, upstream)
    theirs_grad = torch.autograd.grad(theirs, inputs, upstream)
    assert all(torch.equal(a, b) for a, b in zip(ours_grad, theirs_grad, strict=True))


def test_rms_norm_with_float32_gain_returns_the_inputs_dtype() -> None:
    assert RMSNorm(8, eps=1e-5)(torch.randn(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


# --------------------------------------------------------------------------- RoPE


def test_rope_frequencies_without_scaling() -> None:
    expected = [10000.0 ** (-2 * j / 8) for j in range(4)]
    assert rope_frequencies(head_config(8)).tolist() == pytest.approx(expected, rel=1e-6)


def test_llama31_scaling_keeps_fast_stretches_slow_and_blends_between() -> None:
    plain = rope_frequencies(head_config(128, 500000.0))
    scaled = rope_frequencies(head_config(128, 500000.0, rope_scaling="llama3"))
    wavelengths = 2 * math.pi / plain
    fast, slow = wavelengths < 8192 / 4, wavelengths > 8192 / 1
    assert fast.any()
    assert slow.any()
    assert (~fast & ~slow).any()
    assert torch.equal(scaled[fast], plain[fast])
    torch.testing.assert_close(scaled[slow], plain[slow] / 8)
    blended = (scaled / plain)[~fast & ~slow]
    assert ((blended > 1 / 8) & (blended < 1)).all()
    assert (blended.diff() < 0).all()  # ordered from fast to slow


def test_rope_of_odd_width_is_refused() -> None:
    (error,) = check(head_config(7))
    assert str(error).startswith("model.head_dim=7 is odd, and rotary positions rotate pairs.")


def test_rope_of_a_part_of_a_head_does_not_change_the_rest() -> None:
    config = head_config(16, rope_fraction=0.5)
    cos_SJ, sin_SJ = rope_tables(config)
    assert cos_SJ.shape == (config.max_seq_len, 4)
    x = torch.randn(1, 3, 2, 16)
    cos, sin = (torch.cat((t[:3], t[:3]), -1).unsqueeze(0) for t in (cos_SJ, sin_SJ))
    turned = apply_rope(x, cos, sin)
    assert torch.equal(turned[..., 8:], x[..., 8:])
    assert torch.equal(turned[..., :8], apply_rope(x[..., :8], cos, sin))


def test_interleaved_rope_rotates_neighbors() -> None:
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # of the elements of pairs in halves
    x = torch.randn(2, 5, 3, 8)
    cos, sin = tables(torch.arange(5), 8)
    pairs = [torch.repeat_interleave(t[..., :4], 2, dim=-1) for t in (cos, sin)]
    expected = apply_rope(x[..., order], cos, sin)
    torch.testing.assert_close(apply_rope(x, *pairs, interleaved=True)[..., order], expected)


def tables(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    angles = torch.outer(positions.float(), rope_frequencies(head_config(head_dim)))
    angles = torch.cat((angles, angles), -1).unsqueeze(0)
    return angles.cos(), angles.sin()


def test_rope_turns_pair_j_by_its_angle_counterclockwise() -> None:
    head_dim, position = 8, 3
    x = torch.randn(1, 1, 1, head_dim)
    turned = apply_rope(x, *tables(torch.tensor([position]), head_dim)).flatten()
    for j in range(head_dim // 2):
        pair = complex(x.flatten()[j], x.flatten()[j + head_dim // 2])
        angle = position * 10000.0 ** (-2 * j / head_dim)
        expected = pair * complex(math.cos(angle), math.sin(angle))
        assert turned[j].item() == pytest.approx(expected.real, abs=1e-6)
        assert turned[j + head_dim // 2].item() == pytest.approx(expected.imag, abs=1e-6)


def test_rope_scores_depend_on_the_distance_only() -> None:
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)

    def score(q_at: int, k_at: int) -> float:
        turned_q = apply_rope(q, *tables(torch.tensor([q_at]), 16))
        turned_k = apply_rope(k, *tables(torch.tensor([k_at]), 16))
        return (turned_q * turned_k).sum().item()

    assert score(9, 2) == pytest.approx(score(107, 100), abs=1e-4)
    assert score(9, 2) != pytest.approx(score(2, 9), abs=1e-2)


# --------------------------------------------------------------------------- attention


def spelled_out_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: AttentionOptions = DEFAULT_OPTIONS
) -> Tensor:
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bthk,bshk->bhts", q, k) * (options.scale or q.shape[-1] ** -0.5)
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~mask, -math.inf)
    if options.sinks_H is not None:  # a key whose value is 0
        sinks = options.sinks_H.view(-1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("bhts,bshk->bthk", weights, v)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_forward_and_backward_equal_the_formula(num_kv_heads: int, masked: bool) -> None:
    q = torch.randn(2, 10, 4, 8, requires_grad=True)
    k = torch.randn(2, 10, num_kv_heads, 8, requires_grad=True)
    v = torch.randn(2, 10, num_kv_heads, 8, requires_grad=True)
    upstream = torch.randn(2, 10, 4, 8)
    documents = torch.tensor([[0] * 4 + [1] * 6, [5] * 7 + [2] * 3])
    causal = torch.ones(10, 10, dtype=torch.bool).tril()
    mask = document_mask(documents) if masked else None

    ours = attend(q, k, v, mask)
    theirs = spelled_out_attention(q, k, v, causal if mask is None else mask)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    ours_grad = torch.autograd.grad(ours, (q, k, v), upstream)
    theirs_grad = torch.autograd.grad(theirs, (q, k, v), upstream)
    torch.testing.assert_close(ours_grad, theirs_grad, atol=1e-5, rtol=1e-5)


OPTIONS = [
    AttentionOptions(scale=0.7),
    AttentionOptions(window=3),
    AttentionOptions(chunk=4, softcap=0.8),
    AttentionOptions(window=5, sinks_H=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    AttentionOptions(scale=0.4, softcap=1.5, sinks_H=torch.tensor([0.5, -1.0, 2.0, 0.0])),
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_attention_options_equal_the_formula(options: AttentionOptions, masked: bool) -> None:
    """Values are narrower than keys; without a mask, `attend` makes that of the options."""
    q, k, v = (
        torch.randn(2, 10, heads, width, requires_grad=True)
        for heads, width in ((4, 8), (2, 8), (2, 6))
    )
    leaves = [q, k, v]
    if options.sinks_H is not None:
        options = options._replace(sinks_H=options.sinks_H.clone().requires_grad_())
        assert options.sinks_H is not None
        leaves.append(options.sinks_H)
    documents = torch.tensor([[0] * 4 + [1] * 6, [5] * 7 + [2] * 3]) * masked
    mask = document_mask(documents, options.window, options.chunk)
    assert isinstance(mask, Tensor)
    ours = attend(q, k, v, mask if masked else None, options)
    theirs = spelled_out_attention(q, k, v, mask, options)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(2, 10, 4, 6)
    grads = [torch.autograd.grad(out, leaves, upstream) for out in (ours, theirs)]
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("window", "chunk"), [(0, 0), (1, 0), (2, 0), (0, 1), (0, 2), (9, 0)])
def test_document_mask_is_causal_and_inside_the_document(window: int, chunk: int) -> None:
    documents = [[7, 7, 7, 3, 3], [0, 1, 1, 1, 2]]
    mask = document_mask(torch.tensor(documents), window, chunk)
    assert isinstance(mask, torch.Tensor)
    assert mask.shape == (2, 1, 5, 5)
    assert mask.dtype == torch.bool
    for row, ids in enumerate(documents):
        for query, key_position in product(range(5), range(5)):
            start = ids.index(ids[query])
            is_near = key_position > query - (window or 5)
            same_chunk = (key_position - start) // (chunk or 5) == (query - start) // (chunk or 5)
            allowed = key_position <= query and ids[key_position] == ids[query]
            allowed = allowed and is_near and same_chunk
            assert mask[row, 0, query, key_position].item() is allowed


def test_document_mask_separates_documents_of_equal_ids() -> None:
    """A document is a run of equal ids, on every device."""
    documents = torch.tensor([[0, 0, 1, 1, 0]])
    assert document_starts(documents).tolist() == [[0, 0, 2, 2, 4]]
    mask = document_mask(documents)
    assert isinstance(mask, torch.Tensor)
    assert mask[0, 0, 4].tolist() == [False, False, False, False, True]


def random_documents(batch_size: int, num_tokens: int, num_documents: int) -> Tensor:
    starts = torch.zeros(batch_size, num_tokens, dtype=torch.int64)
    cuts = torch.randint(num_tokens, (batch_size, num_documents))
    return starts.scatter(1, cuts, 1).cumsum(1) % 3  # ids come again


@pytest.mark.parametrize(
    "num_tokens", [1, 127, 128, 384, 1000, pytest.param(1280, marks=pytest.mark.slow)]
)
def test_document_blocks_are_those_of_create_block_mask(num_tokens: int) -> None:
    """The same blocks are partial and full, for queries and for keys."""
    torch.manual_seed(num_tokens)
    limits = [(0, 0), (200, 0), (0, 300), (40, 0)]
    for num_documents, (window, chunk) in product((1, 2, 5, 40), limits):
        documents = random_documents(3, num_tokens, num_documents)
        blocks = interval_block_mask(first_visible(documents, window, chunk))
        expected = create_block_mask(blocks.mask_mod, 3, None, num_tokens, num_tokens, "cpu")
        assert blocks.seq_lengths == expected.seq_lengths
        for kind in ("kv", "full_kv", "q", "full_q"):
            counts, indices = (getattr(blocks, f"{kind}_{n}") for n in ("num_blocks", "indices"))
            assert torch.equal(counts, getattr(expected, f"{kind}_num_blocks")), kind
            is_listed = torch.arange(indices.shape[-1]) < counts.unsqueeze(-1)
            expected_indices = getattr(expected, f"{kind}_indices")
            assert torch.equal(indices[is_listed], expected_indices[is_listed]), kind
            assert indices.dtype == expected_indices.dtype == torch.int32
            assert indices.max() < indices.shape[-1]  # kernels load them ahead


def test_document_blocks_of_a_long_sequence_need_little_memory() -> None:
    """All pairs of 131,072 tokens would be 16 GiB."""
    documents = torch.arange(131_072).unsqueeze(0) // 1000
    with torch.profiler.profile(profile_memory=True) as profile:
        interval_block_mask(first_visible(documents))
    live = peak = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert 16e6 < peak < 100e6


def test_document_blocks_give_the_attention_of_the_document_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FlexAttention's reference supports gradients on CPU and has the mask rule of CUDA."""
    from torch.nn.attention import flex_attention as private

    assert private._validate_device
    monkeypatch.setattr(private, "_validate_device", lambda *tensors: None)
    compiled = torch.compile(private.flex_attention, backend="aot_eager")
    monkeypatch.setattr(attention, "_compiled_flex_attention", lambda: compiled)
    torch.manual_seed(0)
    q = torch.randn(2, 512, 4, 16, requires_grad=True)
    k = torch.randn(2, 512, 2, 16, requires_grad=True)
    v = torch.randn(2, 512, 2, 16, requires_grad=True)
    upstream = torch.randn(2, 512, 4, 16)
    fixed = torch.tensor([[0] * 130 + [1] * 382, [0] * 3 + [1] * 490 + [2] * 19])
    sinks = torch.randn(4, requires_grad=True)
    cases = [
        (fixed, DEFAULT_OPTIONS),
        (random_documents(2, 512, 20), DEFAULT_OPTIONS),
        (random_documents(2, 512, 3), AttentionOptions(0.5, 0.9, window=100, sinks_H=sinks)),
    ]
    for documents, options in cases:
        limits = options.window, options.chunk
        blocks = interval_block_mask(first_visible(documents, *limits))
        assert blocks.sparsity() > 37  # at least the blocks above the diagonal, of 4 x 4
        masks = blocks, document_mask(documents, *limits)
        result = [attend(q, k, v, mask, options) for mask in masks]
        leaves = (q, k, v) if options.sinks_H is None else (q, k, v, sinks)
        torch.testing.assert_close(*result, atol=1e-5, rtol=1e-5)
        grads = [torch.autograd.grad(out, leaves, upstream) for out in result]
        torch.testing.assert_close(*grads, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "is_tuned"),
    [
        ((10, 0), torch.bfloat16, 64, True),
        ((10, 3), torch.float16, 128, True),
        ((10, 0), torch.bfloat16, 192, False),
        ((10, 0), torch.float32, 128, False),
        ((9, 0), torch.bfloat16, 128, False),
        ((12, 0), torch.bfloat16, 128, False),
    ],
)
def test_flex_options_are_those_of_the_gpus_where_they_were_built(
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_dim: int,
    is_tuned: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: capability)
    with FakeTensorMode():
        q = torch.empty(1, 2, 8, head_dim, device="cuda", dtype=dtype)
    assert bool(attention.flex_options(q)) == is_tuned
    assert attention.flex_options(torch.empty(1, 2, 8, 64, dtype=torch.bfloat16)) == {}


ACTIVATIONS = {
    "silu": lambda x: x * x.sigmoid(),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh((x + 0.044715 * x**3) * math.sqrt(2 / math.pi))) / 2,
    "relu2": lambda x: x.clamp(min=0) ** 2,
}


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_feed_forward_equals_the_formula(activation: str, bias: bool, gated: bool) -> None:
    layer = FeedForward(head_config(4, ffn_bias=bias, gated=gated, activation=activation), 6)
    weights = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    assert len(weights) == (2 + gated) * (1 + bias)

    def project(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros(()))

    x = torch.randn(2, 3, 4)
    hidden = ACTIVATIONS[activation](project(x, "gate_proj" if gated else "up_proj"))
    hidden = hidden * project(x, "up_proj") if gated else hidden
    torch.testing.assert_close(layer(x), project(hidden, "down_proj"))
