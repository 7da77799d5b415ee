"""Attention of a decoder: masks, products, grouped queries, latent vectors.

Shapes in names: B batch, T tokens of a sequence, D model width, H query heads, G key/value heads
(groups of query heads share one), K head dimension, R rotated part of it, V value dimension.

This is single-device code without process groups.  The number of heads follows from the
projections' outputs, so the same forward serves a slice of the heads.  Context parallelism replaces
the attribute ``attend`` by a function that also sees the keys and values of other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from weft.config.accelerators import GPU, supports
from weft.models.decoder_config import DecoderConfig
from weft.models.layers import allow_recompilation, build_norm, multiply
from weft.models.rotary import apply_rope
from weft.models.varlen_attention import DocumentOffsets, varlen_attention

Mask = Tensor | BlockMask | DocumentOffsets | None


class AttentionOptions(NamedTuple):
    """Options of one layer's attention.

    Attributes:
        scale: factor of the scores; None: ``1 / sqrt(K)``.
        softcap: limit c of the scores, as ``c * tanh(score / c)``; 0: none.
        window: tokens that a query sees, itself included; 0: no limit.
        chunk: a query sees no key before its chunk of so many tokens; 0: no chunks.
        sinks_H: a logit per query head in the denominator of the softmax.
        record_logits: `weft.optim.qk_clip.LogitRecorder`, called with what `attend` computes.
    """

    scale: float | None = None
    softcap: float = 0.0
    window: int = 0
    chunk: int = 0
    sinks_H: Tensor | None = None
    record_logits: Any = None


DEFAULT_OPTIONS = AttentionOptions()
Attend = Callable[[Tensor, Tensor, Tensor, Any, AttentionOptions], Tensor]


# --------------------------------------------------------------------------- kernels


def has_flex_attention(x: Tensor) -> bool:
    """Return True if FlexAttention computes masks and options on the device of ``x``."""
    return supports(x.device.type, "FlexAttention")


@cache
def _compiled_flex_attention() -> Any:
    allow_recompilation()
    return torch.compile(flex_attention, dynamic=False)


# Options of FlexAttention's kernels by major compute capability, for 16-bit heads of at most
# `FLEX_MAX_HEAD_DIM`, where PyTorch's own spill registers (docs/gpu-kernels.md).  On Blackwell
# PyTorch has Hopper's tiles of 64 by 128 in backward, for half the threads.
FLEX_OPTIONS: Mapping[int, dict[str, int]] = {10: {"bwd_num_warps": 8}}
FLEX_MAX_HEAD_DIM = 128
GPU_MODULE: Any = torch.get_device_module(GPU)  # here, for the compiler knows its functions


def flex_options(q_BHTK: Tensor) -> dict[str, int]:
    """Return options of FlexAttention's kernels for queries; none: PyTorch's own."""
    is_small = q_BHTK.dtype.itemsize == 2 and q_BHTK.shape[3] <= FLEX_MAX_HEAD_DIM
    if q_BHTK.device.type != GPU or not is_small:
        return {}
    return FLEX_OPTIONS.get(GPU_MODULE.get_device_capability()[0], {})


def flex_on_device(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTV: Tensor,
    mask: BlockMask,
    options: AttentionOptions,
    **arguments: Any,
) -> Any:
    """Call FlexAttention with arguments that depend on the layer."""
    # Uncompiled, flex_attention materializes and saves all scores.
    flex: Any = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
    if kernel_options := flex_options(q_BHTK):
        arguments["kernel_options"] = kernel_options
    return flex(
        q_BHTK, k_BGTK, v_BGTV, block_mask=mask, enable_gqa=True, scale=options.scale, **arguments
    )


def attend_documents(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    documents: DocumentOffsets,
    options: AttentionOptions,
) -> Tensor:
    """Compute attention within documents by a kernel that takes all in a row."""
    width, missing = v_BTGV.shape[3], k_BTGK.shape[3] - v_BTGV.shape[3]
    if missing:  # the kernel has one width for keys and values
        v_BTGV = F.pad(v_BTGV, (0, missing))
    out_NHK, _ = varlen_attention(
        *(x.flatten(0, 1) for x in (q_BTHK, k_BTGK, v_BTGV)),
        options.sinks_H,
        *documents,
        options.scale or k_BTGK.shape[3] ** -0.5,
        options.window if options.window < k_BTGK.shape[1] else 0,
    )
    return torch.unflatten(out_NHK[..., :width], 0, q_BTHK.shape[:2])


class AttentionKernels(NamedTuple):
    """Kernels of a device, which `weft.parallel.backend.Backend` may replace.

    Attributes:
        has_flex: returns True if FlexAttention computes masks and options on a tensor's device.
        plain: called as `F.scaled_dot_product_attention`.
        flex: see `flex_on_device`; with ``return_lse`` it also returns the log-sum-exp.
        documents: see `attend_documents`.
    """

    has_flex: Callable[[Tensor], bool] = has_flex_attention
    plain: Callable[..., Tensor] = F.scaled_dot_product_attention
    flex: Callable[..., Any] = flex_on_device
    documents: Callable[..., Tensor] = attend_documents


DEVICE_KERNELS = AttentionKernels()


# --------------------------------------------------------------------------- masks


def document_starts(documents_BT: Tensor) -> Tensor:
    """Return where each token's document begins: positions, int64 ``[B, T]``.

    Args:
        documents_BT: integers; a document is a run of equal ones.
    """
    positions_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    is_start_BT = F.pad(documents_BT[:, 1:] != documents_BT[:, :-1], (1, 0), value=True)
    return torch.where(is_start_BT, positions_T, 0).cummax(1).values


def first_visible(documents_BT: Tensor, window: int = 0, chunk: int = 0) -> Tensor:
    """Return the first position that each token sees, int64 ``[B, T]``.

    Args:
        documents_BT: integers; a document is a run of equal ones.
        window: see `AttentionOptions`.
        chunk: see `AttentionOptions`; chunks are counted from the start of a document.
    """
    starts_BT = document_starts(documents_BT)
    positions_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    if chunk:
        starts_BT = starts_BT + (positions_T - starts_BT) // chunk * chunk
    return starts_BT.maximum(positions_T - (window - 1)) if window else starts_BT


def document_mask(
    documents_BT: Tensor,
    window: int = 0,
    chunk: int = 0,
    kernels: AttentionKernels = DEVICE_KERNELS,
) -> Tensor | BlockMask:
    """Return the causal mask within documents, and within a window or chunk.

    Args:
        documents_BT: integers; a document is a run of equal ones.
        window: see `AttentionOptions`.
        chunk: see `AttentionOptions`.
        kernels: of the device.

    Returns:
        bool ``[B, 1, T, T]``, true where the query (second to last dimension) sees the key, which
        is not later and of the same document.  With FlexAttention, a BlockMask, with which it
        skips whole blocks.
    """
    starts_BT = first_visible(documents_BT, window, chunk)
    if kernels.has_flex(documents_BT):
        return interval_block_mask(starts_BT)
    keys_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    return ((keys_T >= starts_BT.unsqueeze(2)) & (keys_T <= keys_T.unsqueeze(1))).unsqueeze(1)


def causal_mask(
    x_BT: Tensor, window: int = 0, chunk: int = 0, kernels: AttentionKernels = DEVICE_KERNELS
) -> Tensor | BlockMask:
    """Return `document_mask` of one sequence of one document, as long as ``x_BT``."""
    return document_mask(torch.zeros_like(x_BT[:1, :], dtype=torch.int64), window, chunk, kernels)


MASK_BLOCK = 128  # queries and keys of a block of `interval_block_mask`


def interval_block_mask(starts_BT: Tensor) -> BlockMask:
    """Return the mask of queries that see the keys from ``starts_BT`` to their own.

    ``create_block_mask`` would first make the mask of all pairs of tokens: 16 GiB at 131,072.
    The starts do not decrease, so the keys of a block of queries are an interval that ends at these
    queries.  The blocks in it from the last query's start on are full: all pairs are visible.
    The others, and the block on the diagonal, are partial.  Memory: a few int32 per pair of blocks.
    """
    starts_BT = starts_BT.int()
    num_tokens = starts_BT.shape[1]
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
        # One row of starts may hold for all sequences. An index of 0 would be copied from the host.
        return (query >= key) & (key >= starts_BT[batch % len(starts_BT), query])

    return BlockMask.from_kv_blocks(
        num_partial_B1N + 1,
        partial_B1NN,
        *count_and_list(full_BN, blocks_N),
        BLOCK_SIZE=MASK_BLOCK,
        mask_mod=is_visible,
        seq_lengths=(num_tokens, num_tokens),
    )


# --------------------------------------------------------------------------- products


def attend(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    mask_B1TT: Mask,
    options: AttentionOptions = DEFAULT_OPTIONS,
    kernels: AttentionKernels = DEVICE_KERNELS,
) -> Tensor:
    """Compute scaled dot-product attention, causal unless a mask is given.

    Args:
        q_BTHK: queries.
        k_BTGK: keys; query head h reads head ``h // (H / G)``.
        v_BTGV: values.
        mask_B1TT: as from `document_mask`, window or chunk included; None: causal; or the offsets
            of documents, chunks included.
        options: of the layer.
        kernels: of the device.

    Returns:
        ``[B, T, H, V]`` in the dtype of ``q_BTHK``.
    """
    if isinstance(mask_B1TT, DocumentOffsets):
        return kernels.documents(q_BTHK, k_BTGK, v_BTGV, mask_B1TT, options)
    is_local = 0 < (options.window or options.chunk) < k_BTGK.shape[1]
    is_plain = options.softcap == 0 and options.sinks_H is None
    if mask_B1TT is None and (is_local or (kernels.has_flex(q_BTHK) and not is_plain)):
        mask_B1TT = causal_mask(q_BTHK[:, :, 0, 0], options.window, options.chunk, kernels)
    if options.record_logits is not None:
        options.record_logits(q_BTHK, k_BTGK, mask_B1TT, options)
    q_BHTK, k_BGTK, v_BGTV = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGV))
    if isinstance(mask_B1TT, BlockMask):
        out_BHTV = attend_flex(q_BHTK, k_BGTK, v_BGTV, mask_B1TT, options, kernels)
    elif is_plain:
        out_BHTV = kernels.plain(
            q_BHTK,
            k_BGTK,
            v_BGTV,
            attn_mask=mask_B1TT,
            is_causal=mask_B1TT is None,
            scale=options.scale,
            # Avoids repeated copies of keys and values; mostly faster on CPU in float32, forward
            # and backward, with results equal up to rounding.
            enable_gqa=True,
        )
    else:
        mask: Any = mask_B1TT
        if mask is None:
            mask = causal_mask(q_BTHK[:, :, 0, 0], kernels=kernels)
        out_BHTV = _attend_to_scores(q_BHTK, k_BGTK, v_BGTV, mask, options)
    return out_BHTV.transpose(1, 2)


def attend_flex(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTV: Tensor,
    mask: Any,
    options: AttentionOptions,
    kernels: AttentionKernels,
) -> Tensor:
    """Compute attention by FlexAttention, whose backward keeps no scores."""
    softcap, sinks_H = options.softcap, options.sinks_H

    def limit(score: Tensor, *indices: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    extra: dict[str, Any] = {"score_mod": limit} if softcap else {}
    extra |= {"return_lse": True} if sinks_H is not None else {}
    out = kernels.flex(q_BHTK, k_BGTK, v_BGTV, mask, options, **extra)
    if sinks_H is None:
        return out  # type: ignore[no-any-return]
    out_BHTV, lse_BHT = out
    share_BHT = torch.sigmoid(lse_BHT - sinks_H.float().unsqueeze(-1))
    return (out_BHTV * share_BHT.unsqueeze(-1)).to(q_BHTK.dtype)  # type: ignore[no-any-return]


def _attend_to_scores(
    q_BHTK: Tensor, k_BGTK: Tensor, v_BGTV: Tensor, mask_B1TT: Tensor, options: AttentionOptions
) -> Tensor:
    """Compute attention with its scores in memory, for options without a kernel."""
    group = q_BHTK.shape[1] // k_BGTK.shape[1]
    k_BHTK, v_BHTV = (x.repeat_interleave(group, dim=1) for x in (k_BGTK, v_BGTV))
    scale = options.scale or q_BHTK.shape[-1] ** -0.5
    scores_BHTT = (q_BHTK @ k_BHTK.transpose(2, 3)) * scale
    if options.softcap:
        scores_BHTT = options.softcap * torch.tanh(scores_BHTT / options.softcap)
    scores_BHTT = scores_BHTT.float().masked_fill(~mask_B1TT, float("-inf"))
    lse_BHT1 = scores_BHTT.logsumexp(-1, keepdim=True)
    if options.sinks_H is not None:
        lse_BHT1 = torch.logaddexp(lse_BHT1, options.sinks_H.float().view(-1, 1, 1))
    return (scores_BHTT - lse_BHT1).exp().to(v_BHTV.dtype) @ v_BHTV


# --------------------------------------------------------------------------- modules


class Sinks(nn.Module):
    """One logit per query head, in the denominator of the softmax."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_heads))


class Attention(nn.Module):
    """Causal self-attention with grouped queries and rotary positions.

    Source: Ainslie et al., arXiv:2305.13245.  Tensor parallelism may replace ``multiply``, here and
    in `FeedForward`, by a function that computes one product for all layers.

    Args:
        config: of the model.
        layer: index of the layer.
    """

    attend: Attend
    multiply: Callable[..., Sequence[Any]]

    def __init__(self, config: DecoderConfig, layer: int = 0) -> None:
        super().__init__()
        self.head_dim = config.key_dim
        self.interleaved = config.rope_interleaved
        self.attend = attend
        self.multiply = multiply
        self.norm_eps, self.qk_norm = config.norm_eps, config.qk_norm
        self.has_unit_norm = config.qk_norm == "unit" and config.has_rope(layer)
        self.options = layer_options(config, layer)
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        self.sinks = Sinks(num_heads) if config.attention_sinks else None
        width, kv_width = num_heads * self.head_dim, num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.dim, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.dim, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.dim, kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.dim, bias=config.out_bias)
        if config.has_qk_norm:
            is_of_head = config.qk_norm == "head"
            self.q_norm = build_norm(config, self.head_dim if is_of_head else width)
            self.k_norm = build_norm(config, self.head_dim if is_of_head else kv_width)

    def forward(
        self,
        x_BTD: Tensor,
        cos_BTR: Tensor | None,
        sin_BTR: Tensor | None,
        mask_B1TT: Mask,
        query_scale_BT1: Tensor | None = None,
    ) -> Tensor:
        """Map ``[B, T, D]`` to ``[B, T, D]``.

        Args:
            x_BTD: the input.
            cos_BTR: see `apply_rope`; None: the layer has no positions.
            sin_BTR: see `apply_rope`.
            mask_B1TT: see `attend`.
            query_scale_BT1: factor of the queries; None: 1.
        """
        q_BTHK, k_BTGK, v_BTGK = self.project(x_BTD)
        if cos_BTR is not None and sin_BTR is not None:
            q_BTHK = apply_rope(q_BTHK, cos_BTR, sin_BTR, self.interleaved)
            k_BTGK = apply_rope(k_BTGK, cos_BTR, sin_BTR, self.interleaved)
        if self.has_unit_norm:
            q_BTHK, k_BTGK = (
                F.rms_norm(x.float(), x.shape[-1:], eps=self.norm_eps).to(x.dtype)
                for x in (q_BTHK, k_BTGK)
            )
        if query_scale_BT1 is not None:
            q_BTHK = q_BTHK * query_scale_BT1.unsqueeze(-1).to(q_BTHK.dtype)
        options = self.options
        if self.sinks is not None:
            options = options._replace(sinks_H=self.sinks.weight)
        out_BTHK = self.attend(q_BTHK, k_BTGK, v_BTGK, mask_B1TT, options)
        out_BTD: Tensor = self.o_proj(out_BTHK.flatten(-2))
        return out_BTD

    def project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries ``[B, T, H, K]``, keys and values ``[B, T, G, K]``, not rotated."""
        q_BTQ, k_BTP, v_BTP = self.multiply(x_BTD, self.q_proj, self.k_proj, self.v_proj)
        if self.qk_norm == "all_heads":
            q_BTQ, k_BTP = self.q_norm(q_BTQ), self.k_norm(k_BTP)
        q_BTHK, k_BTGK, v_BTGK = (
            x.unflatten(-1, (-1, self.head_dim)) for x in (q_BTQ, k_BTP, v_BTP)
        )
        if self.qk_norm == "head":
            return self.q_norm(q_BTHK), self.k_norm(k_BTGK), v_BTGK
        return q_BTHK, k_BTGK, v_BTGK


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Keys and values of all heads are projections of one normalized latent vector per token.  The
    rotated part of the key is one for all heads.

    Args:
        config: of the model.
        layer: index of the layer.
    """

    attend: Attend

    def __init__(self, config: DecoderConfig, layer: int = 0) -> None:
        super().__init__()
        self.attend = attend
        self.options = layer_options(config, layer)
        self.interleaved = config.rope_interleaved
        self.kv_rank, self.rope_dim = config.kv_rank, config.rope_head_dim
        self.head_dim, self.value_dim = config.key_dim, config.value_dim
        dim, num_heads, bias = config.dim, config.num_heads, config.qkv_bias
        self.has_q_rank = config.q_rank > 0
        if self.has_q_rank:
            self.q_a_proj = nn.Linear(dim, config.q_rank, bias=bias)
            self.q_a_layernorm = build_norm(config, config.q_rank)
            self.q_b_proj = nn.Linear(config.q_rank, num_heads * self.head_dim, bias=False)
        else:
            self.q_proj = nn.Linear(dim, num_heads * self.head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(dim, self.kv_rank + self.rope_dim, bias=bias)
        self.kv_a_layernorm = build_norm(config, self.kv_rank)
        nope_dim = self.head_dim - self.rope_dim
        kv_width = num_heads * (nope_dim + self.value_dim)
        self.kv_b_proj = nn.Linear(self.kv_rank, kv_width, bias=False)
        self.o_proj = nn.Linear(num_heads * self.value_dim, dim, bias=config.out_bias)

    def forward(
        self,
        x_BTD: Tensor,
        cos_BTR: Tensor | None,
        sin_BTR: Tensor | None,
        mask_B1TT: Mask,
        query_scale_BT1: Tensor | None = None,
    ) -> Tensor:
        """Map ``[B, T, D]`` to ``[B, T, D]``; see `Attention.forward`."""
        assert cos_BTR is not None, "a latent vector needs positions"
        assert sin_BTR is not None
        rope_dim, nope_dim = self.rope_dim, self.head_dim - self.rope_dim
        if self.has_q_rank:
            q_BTQ = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTD)))
        else:
            q_BTQ = self.q_proj(x_BTD)
        q_BTHN, q_BTHR = q_BTQ.unflatten(-1, (-1, self.head_dim)).split((nope_dim, rope_dim), -1)
        latent_BTL, k_BTR = self.kv_a_proj_with_mqa(x_BTD).split((self.kv_rank, rope_dim), -1)
        kv_BTP = self.kv_b_proj(self.kv_a_layernorm(latent_BTL))
        kv_BTHP = kv_BTP.unflatten(-1, (-1, nope_dim + self.value_dim))
        k_BTHN, v_BTHV = kv_BTHP.split((nope_dim, self.value_dim), -1)
        q_BTHR = apply_rope(q_BTHR, cos_BTR, sin_BTR, self.interleaved)
        k_BT1R = apply_rope(k_BTR.unsqueeze(2), cos_BTR, sin_BTR, self.interleaved)
        k_BTHR = k_BT1R.expand(-1, -1, k_BTHN.shape[2], -1)
        q_BTHK, k_BTHK = torch.cat((q_BTHN, q_BTHR), -1), torch.cat((k_BTHN, k_BTHR), -1)
        out_BTHV = self.attend(q_BTHK, k_BTHK, v_BTHV, mask_B1TT, self.options)
        out_BTD: Tensor = self.o_proj(out_BTHV.flatten(-2))
        return out_BTD


def layer_options(config: DecoderConfig, layer: int) -> AttentionOptions:
    """Return the options of a layer's attention, without its sinks."""
    is_local = config.is_local(layer)
    return AttentionOptions(
        config.attention_scale or None,
        config.attention_softcap,
        config.sliding_window if is_local else 0,
        config.attention_chunk if is_local else 0,
    )
