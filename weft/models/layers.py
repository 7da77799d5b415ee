"""The parts of a decoder block: RMSNorm, rotary positions, attention, SwiGLU.

Shapes in names: B batch, T tokens of a row, D model width, H query heads, G key/value
heads (groups of query heads share one), K width of one head, J = K / 2 rotated pairs,
F feed-forward width.

All of it is written for one device and knows of no process group.  Head counts are taken
from the projections' outputs, so the same forward serves a slice of the heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a gain, no bias (Zhang and Sennrich, arXiv:1910.07467).

    Computed in float32 whatever the input; the normalised value is rounded to the input's
    dtype before the gain is applied, as in Llama and transformers.

    Args:
        dim: width of the last dim, D.
        eps: added to the mean square.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Any ``[..., D]`` of a floating dtype; the same shape and dtype back."""
        # F.rms_norm with the gain outside is bitwise the formula spelled out, in float32 and in
        # bfloat16, and up to 1.6 times as fast on CPU.  With the gain inside, a quarter of the
        # bfloat16 outputs differ from transformers in the last bit, because the gain is then
        # applied before the rounding.
        normed_BTD = F.rms_norm(x_BTD.float(), x_BTD.shape[-1:], eps=self.eps).to(x_BTD.dtype)
        return (self.weight * normed_BTD).to(x_BTD.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class RopeScaling(NamedTuple):
    """Llama 3.1's stretching of the rotary frequencies to a longer context.

    ``factor`` divides the slow frequencies.  Slow means a wavelength above
    ``original_context / low_freq_factor`` tokens; fast, below
    ``original_context / high_freq_factor``, is left alone; between them it is blended.
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
    """Angle per token of each rotated pair, in radians.

    ``theta ** (-2j / head_dim)`` for pair j (Su et al., arXiv:2104.09864), scaled as in
    Meta's Llama 3.1 (``apply_scaling`` of llama-models; ``rope_type = "llama3"`` in
    transformers) where ``scaling`` is given.

    Returns:
        float32 ``[head_dim / 2]``, fastest first.

    Raises:
        ValueError: if ``head_dim`` is odd.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim = {head_dim} is odd, and rotary positions rotate pairs")
    exponents_J = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies_J = 1.0 / theta**exponents_J
    if scaling is None:
        return frequencies_J
    turns_J = scaling.original_context * frequencies_J / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept_J = ((turns_J - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies_J * (kept_J + (1 - kept_J) / scaling.factor)


def apply_rope(x_BTHK: Tensor, cos_BTK: Tensor, sin_BTK: Tensor) -> Tensor:
    """Rotate queries or keys by their positions.

    Element j is paired with element ``j + K / 2`` (the convention of Hugging Face
    checkpoints, whose query and key weights are permuted for it; Meta's own pair 2j with
    2j + 1).

    Args:
        x_BTHK: queries or keys, ``[B, T, heads, K]``.
        cos_BTK, sin_BTK: of the angles, ``[1 or B, T, K]``, both halves alike, in the dtype
            of ``x_BTHK``.

    Returns:
        The shape and dtype of ``x_BTHK``.
    """
    first_BTHJ, second_BTHJ = x_BTHK.chunk(2, dim=-1)
    turned_BTHK = torch.cat((-second_BTHJ, first_BTHJ), dim=-1)
    return x_BTHK * cos_BTK.unsqueeze(-2) + turned_BTHK * sin_BTK.unsqueeze(-2)


def document_mask(documents_BT: Tensor) -> Tensor | BlockMask:
    """Which query (second to last dim) may look at which key (last dim).

    Args:
        documents_BT: integers, equal within a document; one number is not reused in a row.

    Returns:
        bool ``[B, 1, T, T]``, true where the key is not later and of the same document; on CUDA
        the same as a BlockMask, by which FlexAttention leaves out whole blocks.
    """
    return document_blocks(documents_BT) if documents_BT.is_cuda else _dense_mask(documents_BT)


def document_blocks(documents_BT: Tensor) -> BlockMask:
    """`document_mask` in blocks of 128 queries and keys: those that see nothing are not there."""
    num_rows, num_tokens = documents_BT.shape

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents_BT[row, query] == documents_BT[row, key])

    return create_block_mask(
        sees, num_rows, None, num_tokens, num_tokens, device=documents_BT.device
    )


def _dense_mask(documents_BT: Tensor) -> Tensor:
    num_tokens = documents_BT.shape[1]
    causal_TT = torch.ones(
        num_tokens, num_tokens, dtype=torch.bool, device=documents_BT.device
    ).tril()
    same_BTT = documents_BT.unsqueeze(2) == documents_BT.unsqueeze(1)
    return (same_BTT & causal_TT).unsqueeze(1)


@cache
def _compiled_flex_attention() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def attend(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask_B1TT: Tensor | BlockMask | None
) -> Tensor:
    """Scaled dot-product attention, causal unless a mask says otherwise.

    Args:
        q_BTHK: queries.
        k_BTGK, v_BTGK: keys and values; query head h reads head ``h // (H / G)``.
        mask_B1TT: as of `document_mask`; None: causal.

    Returns:
        ``[B, T, H, K]`` in the dtype of ``q_BTHK``.
    """
    if isinstance(mask_B1TT, BlockMask):
        # By itself, uncompiled, it would compute all scores and keep them.
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
        # Rather than repeated keys and values: no copies of them, and on CPU in float32 mostly
        # faster, forward and backward, with equal results to rounding.
        enable_gqa=True,
    )
    return out_BHTK.transpose(1, 2)


class Attention(nn.Module):
    """Causal self-attention with grouped queries (Ainslie et al., arXiv:2305.13245) and RoPE.

    ``attend`` is an attribute so that context parallelism can put its own in the place of it,
    which sees the other ranks' keys and values, too.
    """

    attend: Callable[[Tensor, Tensor, Tensor, Tensor | BlockMask | None], Tensor]

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.attend = attend
        self.q_proj = nn.Linear(dim, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, dim, bias=False)

    def forward(
        self, x_BTD: Tensor, cos_BTK: Tensor, sin_BTK: Tensor, mask_B1TT: Tensor | BlockMask | None
    ) -> Tensor:
        """``[B, T, D]`` to ``[B, T, D]``; see `apply_rope` and `attend` for the others."""
        q_BTHK, k_BTGK, v_BTGK = self.project(x_BTD)
        q_BTHK = apply_rope(q_BTHK, cos_BTK, sin_BTK)
        k_BTGK = apply_rope(k_BTGK, cos_BTK, sin_BTK)
        out_BTHK = self.attend(q_BTHK, k_BTGK, v_BTGK, mask_B1TT)
        out_BTD: Tensor = self.o_proj(out_BTHK.flatten(-2))
        return out_BTD

    def project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[B, T, H, K]``, keys and values ``[B, T, G, K]``, before they are rotated."""
        q_BTHK = self.q_proj(x_BTD).unflatten(-1, (-1, self.head_dim))
        k_BTGK = self.k_proj(x_BTD).unflatten(-1, (-1, self.head_dim))
        v_BTGK = self.v_proj(x_BTD).unflatten(-1, (-1, self.head_dim))
        return q_BTHK, k_BTGK, v_BTGK


class SwiGLU(nn.Module):
    """Feed-forward layer gated by SiLU (Shazeer, arXiv:2002.05202)."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, ffn_dim, bias=False)
        self.up_proj = nn.Linear(dim, ffn_dim, bias=False)
        self.down_proj = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``[B, T, D]`` to ``[B, T, D]``."""
        hidden_BTF = F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD)
        out_BTD: Tensor = self.down_proj(hidden_BTF)
        return out_BTD


def grouped_linear(x_RD: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Tensor:
    """A linear layer for each group of consecutive rows.

    One kernel in bfloat16, where widths allow its loads of 16 bytes; else a product for each group,
    for which the host waits for the sizes.

    Args:
        counts_E: int64, the rows of each group, R together.

    Returns:
        ``[R, F]`` in the dtype of ``x_RD``.
    """
    widths = weight_EFD.shape[1:]
    if x_RD.dtype == torch.bfloat16 and len(x_RD) and all(width % 8 == 0 for width in widths):
        ends_E = counts_E.cumsum(0).to(torch.int32)
        out_RF: Tensor = F.grouped_mm(x_RD, weight_EFD.transpose(1, 2), offs=ends_E)
        return out_RF
    groups = torch.split(x_RD, sizes_of(counts_E, len(x_RD)))
    return torch.cat(
        [F.linear(rows_RD, matrix) for rows_RD, matrix in zip(groups, weight_EFD, strict=True)]
    )


def sizes_of(counts_E: Tensor, total: int) -> list[int]:
    """The values of ``counts_E``; in a traced program, which has none, equal shares of ``total``.

    So what is planned for a mixture of experts is planned for perfect balance.
    """
    if not isinstance(counts_E, FakeTensor):
        sizes: list[int] = counts_E.tolist()
        return sizes
    share, more = divmod(total, len(counts_E))
    return [share + (i < more) for i in range(len(counts_E))]
