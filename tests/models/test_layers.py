"""Layers compared with explicit formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from weft.models import layers
from weft.models.layers import (
    RMSNorm,
    RopeScaling,
    SwiGLU,
    apply_rope,
    attend,
    document_block_mask,
    document_mask,
    document_starts,
    rope_frequencies,
)

LLAMA31 = RopeScaling()


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
    assert rope_frequencies(8, 10000.0).tolist() == pytest.approx(expected, rel=1e-6)


def test_llama31_scaling_keeps_fast_stretches_slow_and_blends_between() -> None:
    plain = rope_frequencies(128, 500000.0)
    scaled = rope_frequencies(128, 500000.0, LLAMA31)
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
    with pytest.raises(ValueError, match="head_dim = 7 is odd"):
        rope_frequencies(7, 10000.0)


def tables(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    angles = torch.outer(positions.float(), rope_frequencies(head_dim, 10000.0))
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


def spelled_out_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
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


def test_document_mask_is_causal_and_inside_the_document() -> None:
    documents = [[7, 7, 7, 3, 3], [0, 1, 1, 1, 2]]
    mask = document_mask(torch.tensor(documents))
    assert isinstance(mask, torch.Tensor)
    assert mask.shape == (2, 1, 5, 5)
    assert mask.dtype == torch.bool
    for row, ids in enumerate(documents):
        for query in range(5):
            for key_position in range(5):
                allowed = key_position <= query and ids[key_position] == ids[query]
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


@pytest.mark.parametrize("num_tokens", [1, 127, 128, 384, 1000, 1280])
def test_document_blocks_are_those_of_create_block_mask(num_tokens: int) -> None:
    """The same blocks are partial and full, for queries and for keys."""
    torch.manual_seed(num_tokens)
    for num_documents in (1, 2, 5, 40):
        blocks = document_block_mask(random_documents(3, num_tokens, num_documents))
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
        document_block_mask(documents)
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
    monkeypatch.setattr(layers, "_compiled_flex_attention", lambda: compiled)
    torch.manual_seed(0)
    q = torch.randn(2, 512, 4, 16, requires_grad=True)
    k = torch.randn(2, 512, 2, 16, requires_grad=True)
    v = torch.randn(2, 512, 2, 16, requires_grad=True)
    upstream = torch.randn(2, 512, 4, 16)
    fixed = torch.tensor([[0] * 130 + [1] * 382, [0] * 3 + [1] * 490 + [2] * 19])
    for documents in (fixed, random_documents(2, 512, 3), random_documents(2, 512, 20)):
        blocks = document_block_mask(documents)
        assert blocks.sparsity() > 37  # at least the blocks above the diagonal, of 4 x 4
        result = [attend(q, k, v, mask) for mask in (blocks, document_mask(documents))]
        torch.testing.assert_close(*result, atol=1e-5, rtol=1e-5)
        grads = [torch.autograd.grad(out, (q, k, v), upstream) for out in result]
        torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-5)


def test_swiglu_equals_the_formula() -> None:
    layer = SwiGLU(4, 6)
    x = torch.randn(2, 3, 4)
    gate, up, down = layer.gate_proj.weight, layer.up_proj.weight, layer.down_proj.weight
    gated = x @ gate.T
    expected = (gated * gated.sigmoid() * (x @ up.T)) @ down.T
    torch.testing.assert_close(layer(x), expected)
