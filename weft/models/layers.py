"""Layers of a decoder block: RMSNorm, rotary positions, attention, SwiGLU.

Shapes in names: B batch, T tokens of a sequence, D model width, H query heads, G key/value heads
(groups of query heads share one), K head dimension, J = K / 2 rotated pairs, F feed-forward width.

This is single-device code without process groups.  The number of heads follows from the
projections' outputs, so the same forward serves a slice of the heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention


class RMSNorm(nn.Module):
    """Root-mean-square normalization with a gain and no bias.

    Source: Zhang and Sennrich, arXiv:1910.07467.  Computed in float32 for any input.  The
    normalized value is rounded to the input's dtype before the gain is applied, as in Llama and
    transformers.

    Args:
        dim: size of the last dimension, D.
        eps: added to the mean square.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Normalize ``[..., D]`` of a floating dtype; return the same shape and dtype."""
        # F.rms_norm with the gain outside is bitwise the written-out formula, in float32 and in
        # bfloat16, and up to 1.6 times as fast on CPU.  With the gain inside, which is applied
        # before rounding, a quarter of the bfloat16 outputs differ from transformers' last bit.
        normed_BTD = F.rms_norm(x_BTD.float(), x_BTD.shape[-1:], eps=self.eps).to(x_BTD.dtype)
        return (self.weight * normed_BTD).to(x_BTD.dtype)

    def extra_repr(self) -> str:
        """Return size and epsilon, for the module's representation."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


class RopeScaling(NamedTuple):
    """Scaling of the rotary frequencies to a longer context, as in Llama 3.1.

    ``factor`` divides the low frequencies: wavelengths above ``original_context / low_freq_factor``
    tokens.  High frequencies, wavelengths below ``original_context / high_freq_factor``, are
    unchanged.  Between the two, both are blended.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


def rope_frequencies(
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the angle per token of each rotated pair, in radians.

    The angle is ``theta ** (-2j / head_dim)`` for pair j (Su et al., arXiv:2104.09864).
    ``scaling`` is applied as in Meta's Llama 3.1 (``apply_scaling`` of llama-models; ``rope_type =
    "llama3"`` in transformers).

    Returns:
        float32 ``[head_dim / 2]``, highest frequency first.

    Raises:
        ValueError: if ``head_dim`` is odd.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim = {head_dim} is odd, and rotary positions rotate pairs")
    exponents_J = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies_J = 1.0 / theta**exponents_J
    if scaling is None:
        return frequencies_J
    rotations_J = scaling.original_context * frequencies_J / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    smooth_J = ((rotations_J - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies_J * (smooth_J + (1 - smooth_J) / scaling.factor)


def apply_rope(x_BTHK: Tensor, cos_BTK: Tensor, sin_BTK: Tensor) -> Tensor:
    """Rotate queries or keys by their positions.

    Element j is paired with element ``j + K / 2``, the convention of Hugging Face checkpoints.
    Meta's own checkpoints pair 2j with 2j + 1.

    Args:
        x_BTHK: queries or keys, ``[B, T, heads, K]``.
        cos_BTK: cosines of the angles, ``[1 or B, T, K]`` in the dtype of ``x_BTHK``; the two
            halves of the last dimension are equal.
        sin_BTK: sines of the same angles.

    Returns:
        The shape and dtype of ``x_BTHK``.
    """
    first_BTHJ, second_BTHJ = x_BTHK.chunk(2, dim=-1)
    rotated_BTHK = torch.cat((-second_BTHJ, first_BTHJ), dim=-1)
    return x_BTHK * cos_BTK.unsqueeze(-2) + rotated_BTHK * sin_BTK.unsqueeze(-2)


def document_starts(documents_BT: Tensor) -> Tensor:
    """Return where each token's document begins: positions, int64 ``[B, T]``.

    Args:
        documents_BT: integers; a document is a run of equal ones.
    """
    positions_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    is_start_BT = F.pad(documents_BT[:, 1:] != documents_BT[:, :-1], (1, 0), value=True)
    return torch.where(is_start_BT, positions_T, 0).cummax(1).values


def document_mask(documents_BT: Tensor) -> Tensor | BlockMask:
    """Return the causal mask within documents.

    Args:
        documents_BT: integers; a document is a run of equal ones.

    Returns:
        bool ``[B, 1, T, T]``, true where the query (second to last dimension) sees the key, which
        is not later and of the same document.  On CUDA, a BlockMask, with which FlexAttention skips
        whole blocks.
    """
    if documents_BT.is_cuda:
        return document_block_mask(documents_BT)
    starts_BT = document_starts(documents_BT)
    keys_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    return ((keys_T >= starts_BT.unsqueeze(2)) & (keys_T <= keys_T.unsqueeze(1))).unsqueeze(1)


MASK_BLOCK = 128  # queries and keys of a block of `document_block_mask`


def document_block_mask(documents_BT: Tensor) -> BlockMask:
    """Return `document_mask` as a BlockMask.

    ``create_block_mask`` would first make the mask of all pairs of tokens: 16 GiB at 131,072.
    Documents are contiguous, so the keys of a block of queries are an interval that ends at these
    queries.  The blocks in it from the last query's document on are full: all pairs are visible.
    The others, and the block on the diagonal, are partial.  Memory: a few int32 per pair of blocks.
    """
    starts_BT = document_starts(documents_BT).int()
    num_tokens = documents_BT.shape[1]
    padding = -num_tokens % MASK_BLOCK  # an incomplete block of queries sees no full block
    last_start_BN = F.pad(starts_BT, (0, padding), value=num_tokens)[
        :, MASK_BLOCK - 1 :: MASK_BLOCK
    ]
    blocks_N = torch.arange(last_start_BN.shape[1], dtype=torch.int32, device=starts_BT.device)
    first_BN = starts_BT[:, ::MASK_BLOCK] // MASK_BLOCK
    full_BN = torch.minimum((last_start_BN + MASK_BLOCK - 1) // MASK_BLOCK, blocks_N)

    def count_and_list(first_BN: Tensor, end_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Return the number of blocks from first to end; list them, then the diagonal."""
        count_B1N, first_B1N1 = (end_BN - first_BN).unsqueeze(1), first_BN[:, None, :, None]
        is_listed_B1NN = blocks_N < count_B1N.unsqueeze(3)
        return count_B1N, torch.where(is_listed_B1NN, first_B1N1 + blocks_N, blocks_N[:, None])

    num_partial_B1N, partial_B1NN = count_and_list(first_BN, full_BN)

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (key >= starts_BT[batch, query])

    return BlockMask.from_kv_blocks(
        num_partial_B1N + 1,
        partial_B1NN,
        *count_and_list(full_BN, blocks_N),
        BLOCK_SIZE=MASK_BLOCK,
        mask_mod=is_visible,
        seq_lengths=(num_tokens, num_tokens),
    )


@cache
def _compiled_flex_attention() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def attend(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask_B1TT: Tensor | BlockMask | None
) -> Tensor:
    """Compute scaled dot-product attention, causal unless a mask is given.

    Args:
        q_BTHK: queries.
        k_BTGK: keys; query head h reads head ``h // (H / G)``.
        v_BTGK: values.
        mask_B1TT: as from `document_mask`; None: causal.

    Returns:
        ``[B, T, H, K]`` in the dtype of ``q_BTHK``.
    """
    if isinstance(mask_B1TT, BlockMask):
        # Uncompiled, flex_attention materializes and saves all scores.
        flex: Any = flex_attention
        if not torch.compiler.is_compiling():
            flex = _compiled_flex_attention()
        out_BHTK: Tensor = flex(
            q_BTHK.transpose(1, 2),
            k_BTGK.transpose(1, 2),
            v_BTGK.transpose(1, 2),
            block_mask=mask_B1TT,
            enable_gqa=True,
        )
        return out_BHTK.transpose(1, 2)
    out_BHTK = F.scaled_dot_product_attention(
        q_BTHK.transpose(1, 2),
        k_BTGK.transpose(1, 2),
        v_BTGK.transpose(1, 2),
        attn_mask=mask_B1TT,
        is_causal=mask_B1TT is None,
        # Avoids repeated copies of keys and values; mostly faster on CPU in float32, forward and
        # backward, with results equal up to rounding.
        enable_gqa=True,
    )
    return out_BHTK.transpose(1, 2)


def multiply(x_BTD: Tensor, *layers: nn.Module) -> Sequence[Tensor]:
    """Apply several linear layers to the same input."""
    return [layer(x_BTD) for layer in layers]


class Attention(nn.Module):
    """Causal self-attention with grouped queries and RoPE.

    Source: Ainslie et al., arXiv:2305.13245.  Context parallelism replaces the attribute ``attend``
    by a function that also sees the keys and values of other ranks.  Tensor parallelism may replace
    ``multiply``, here and in `SwiGLU`, by a function that computes one product for all layers.

    Args:
        dim: model width.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: width of a head.
        qk_norm_eps: epsilon of an RMSNorm of each head's queries and keys, as in Qwen3; None: no
            norm.
    """

    attend: Callable[[Tensor, Tensor, Tensor, Tensor | BlockMask | None], Tensor]
    multiply: Callable[..., Sequence[Any]]

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qk_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.attend = attend
        self.multiply = multiply
        self.q_proj = nn.Linear(dim, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, dim, bias=False)
        self.has_qk_norm = qk_norm_eps is not None
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(head_dim, qk_norm_eps)
            self.k_norm = RMSNorm(head_dim, qk_norm_eps)

    def forward(
        self, x_BTD: Tensor, cos_BTK: Tensor, sin_BTK: Tensor, mask_B1TT: Tensor | BlockMask | None
    ) -> Tensor:
        """Map ``[B, T, D]`` to ``[B, T, D]``.

        See `apply_rope` and `attend` for the other arguments.
        """
        q_BTHK, k_BTGK, v_BTGK = self.project(x_BTD)
        q_BTHK = apply_rope(q_BTHK, cos_BTK, sin_BTK)
        k_BTGK = apply_rope(k_BTGK, cos_BTK, sin_BTK)
        out_BTHK = self.attend(q_BTHK, k_BTGK, v_BTGK, mask_B1TT)
        out_BTD: Tensor = self.o_proj(out_BTHK.flatten(-2))
        return out_BTD

    def project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries ``[B, T, H, K]``, keys and values ``[B, T, G, K]``, not rotated."""
        products = self.multiply(x_BTD, self.q_proj, self.k_proj, self.v_proj)
        q_BTHK, k_BTGK, v_BTGK = (x.unflatten(-1, (-1, self.head_dim)) for x in products)
        if self.has_qk_norm:
            return self.q_norm(q_BTHK), self.k_norm(k_BTGK), v_BTGK
        return q_BTHK, k_BTGK, v_BTGK


class SwiGLU(nn.Module):
    """Feed-forward layer gated by SiLU (Shazeer, arXiv:2002.05202)."""

    multiply: Callable[..., Sequence[Any]]

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.multiply = multiply
        self.gate_proj = nn.Linear(dim, ffn_dim, bias=False)
        self.up_proj = nn.Linear(dim, ffn_dim, bias=False)
        self.down_proj = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map ``[B, T, D]`` to ``[B, T, D]``."""
        gate_BTF, up_BTF = self.multiply(x_BTD, self.gate_proj, self.up_proj)
        hidden_BTF = F.silu(gate_BTF) * up_BTF
        out_BTD: Tensor = self.down_proj(hidden_BTF)
        return out_BTD


def grouped_linear(x_RD: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Tensor:
    """Apply a separate linear layer to each group of consecutive rows.

    In bfloat16 with widths that allow 16-byte loads, this is one kernel.  Otherwise it is one
    product per group, and the host waits for the group sizes.

    Args:
        x_RD: ``[R, D]``.
        weight_EFD: one ``[F, D]`` matrix per group.
        counts_E: int64, rows per group; they sum to R.

    Returns:
        ``[R, F]`` in the dtype of ``x_RD``.
    """
    widths = weight_EFD.shape[1:]
    if x_RD.dtype == torch.bfloat16 and len(x_RD) and all(width % 8 == 0 for width in widths):
        ends_E = counts_E.cumsum(0).to(torch.int32)
        out_RF: Tensor = F.grouped_mm(x_RD, weight_EFD.transpose(1, 2), offs=ends_E)
        return out_RF
    groups = torch.split(x_RD, group_sizes(counts_E, len(x_RD)))
    return torch.cat(
        [F.linear(rows_RD, matrix) for rows_RD, matrix in zip(groups, weight_EFD, strict=True)]
    )


def is_fake(tensor: Tensor) -> bool:
    """Return True for a fake tensor, which has no values (a traced program)."""
    return isinstance(tensor, FakeTensor)


def run_function(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """Call ``function.apply(*args)``, which is untyped in torch."""
    return function.apply(*args)  # type: ignore[no-untyped-call,no-any-return]


def group_sizes(counts_E: Tensor, total: int) -> list[int]:
    """Return the values of ``counts_E``, or equal shares of ``total`` if it is fake.

    A mixture of experts is therefore planned for perfect balance.
    """
    if not is_fake(counts_E):
        sizes: list[int] = counts_E.tolist()
        return sizes
    share, remainder = divmod(total, len(counts_E))
    return [share + (i < remainder) for i in range(len(counts_E))]
