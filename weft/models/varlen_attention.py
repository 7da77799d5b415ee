"""Attention within packed documents by FlashAttention's kernel for many lengths.

The kernel takes the tokens of all documents in a row, and where each document begins.  It computes
no block of scores that a mask would hide, and needs no mask.  `find_obstacles` is the rule for
which models and GPUs use it; FlexAttention computes the others (`weft.models.attention`).

The kernel is that of ``torch.nn.attention.varlen``: FlashAttention 2, or the version that
``activate_flash_attention_impl`` has put in its place.  weft does not call ``varlen_attn``, for two
reasons.  Its longest length is an argument on the host, so torch.compile would compile a block
again for each new length; here the lengths are tensors, and graphs have the same shapes in every
step.  And its backward pass could not include sinks.  Backward takes the output and log-sum-exp
with the sinks, as in `weft.parallel.block_attention`, which calls the kernel under context
parallelism.

The operators follow the schemas and C++ sources of PyTorch.  They were never run on a GPU.

Shapes in names as in `weft.models.attention`, N = B T tokens, M = N + 1, and S keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.config.accelerators import GPU
from weft.models.decoder_config import DecoderConfig

aten = torch.ops.aten


# --------------------------------------------------------------------------- the rule


class AttentionNeeds(NamedTuple):
    """Properties of a run that decide whether the kernel computes its attention.

    Attributes:
        config: of the model.
        dtype: name of the dtype of queries, keys and values.
        capability: compute capability of the GPU; (0, 0): no GPU, or unknown.
        records_logits: True if a run measures the attention logits.
    """

    config: DecoderConfig
    dtype: str
    capability: tuple[int, int]
    records_logits: bool = False


MAX_HEAD_DIM = 256
# Windows, chunks, sinks, grouped queries and values narrower than keys are no obstacles.
OBSTACLES: tuple[tuple[str, Callable[[AttentionNeeds], bool]], ...] = (
    ("the device is no NVIDIA GPU of compute capability 8.0 or later", lambda x: not _has_gpu(x)),
    ("the dtype has not 16 bits", lambda x: x.dtype not in ("bfloat16", "float16")),
    ("the model limits the scores", lambda x: x.config.attention_softcap > 0),
    ("heads are wider than 256", lambda x: x.config.key_dim > MAX_HEAD_DIM),
    ("8 does not divide the width of a head", lambda x: x.config.key_dim % 8 > 0),
    ("values are wider than keys", lambda x: x.config.value_dim > x.config.key_dim),
    ("the attention logits are recorded", lambda x: x.records_logits),
)


def find_obstacles(needs: AttentionNeeds) -> list[str]:
    """Return why the kernel cannot compute a run's attention; empty if it can."""
    return [reason for reason, applies in OBSTACLES if applies(needs)]


def _has_gpu(needs: AttentionNeeds) -> bool:
    # 9.4 and 9.5 are GPUs of AMD, whose kernel was never tried.
    return needs.capability >= (8, 0) and needs.capability not in ((9, 4), (9, 5))


# --------------------------------------------------------------------------- documents


class DocumentOffsets(NamedTuple):
    """The first tokens of documents: what layers get in place of a mask.

    Attributes:
        offsets_M: int32 on the device.  The first token of each document, then N up to the end, so
            that the shape does not depend on the number of documents.
        sizes_2: int64 on the host: the number of documents, and the tokens of the longest, at least
            2: for one query per document the kernel has another path.
    """

    offsets_M: Tensor
    sizes_2: Tensor


class PackedDocuments:
    """The documents of a batch: what a model gets in place of document ids.

    Compiled code and FSDP pass an object through.  FSDP would move a tensor to the device.

    Args:
        ids_BT: document ids on the device.
        boundaries: where each document of each sequence begins, then T.
        chunk: of the model's layers with attention in chunks; 0: none.
    """

    def __init__(self, ids_BT: Tensor, boundaries: Sequence[Sequence[int]], chunk: int) -> None:
        self.ids_BT = ids_BT
        self._offsets = {
            size: find_offsets(boundaries, size, ids_BT.device) for size in sorted({0, chunk})
        }

    def select(self, chunk: int) -> DocumentOffsets:
        """Return the documents of layers with attention in chunks; 0: of the others."""
        return self._offsets[chunk]


def find_offsets(
    boundaries: Sequence[Sequence[int]], chunk: int, device: torch.device
) -> DocumentOffsets:
    """Return the offsets of documents; ``chunk``: each such part of one is a document."""
    num_tokens = boundaries[0][-1]
    starts = [
        sequence * num_tokens + position
        for sequence, edges in enumerate(boundaries)
        for position in chain.from_iterable(
            range(start, end, chunk or end - start) for start, end in pairwise(edges)
        )
    ]
    total = len(boundaries) * num_tokens
    offsets = np.full(total + 1, total, np.int32)
    offsets[: len(starts)] = starts
    longest = max(2, int(np.diff(offsets).max()))
    return DocumentOffsets(_to_device(offsets, device), torch.tensor([len(starts), longest]))


def _to_device(numbers: Any, device: torch.device) -> Tensor:
    x = torch.tensor(numbers)  # not with from_numpy, whose tensors are never fake
    # The copy overlaps with the work of the device.
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)


# --------------------------------------------------------------------------- the kernel


class Lengths(NamedTuple):
    """Parts of queries and keys; queries of part i attend to keys of part i.

    Attributes:
        query_offsets: int32 on the device.  The first query of each part, then their number.
        key_offsets: the same of keys.
        most_queries: of a part; at least 2, because for one query the kernel has another path.
        most_keys: of a part.
    """

    query_offsets: Tensor
    key_offsets: Tensor
    most_queries: int
    most_keys: int


def find_lengths(sizes: Sequence[Sequence[tuple[int, int]]], device: torch.device) -> list[Lengths]:
    """Return the lengths of several calls of the kernel, with one copy to the device.

    Args:
        sizes: the numbers of queries and of keys of each part of each call.
        device: of the queries.
    """
    tables = [np.array(parts, np.int32).T for parts in sizes]  # [2, parts]
    offsets = [np.pad(np.cumsum(table, 1, np.int32), ((0, 0), (1, 0))) for table in tables]
    joined = _to_device(np.concatenate([table.ravel() for table in offsets]), device)
    rows = torch.split(joined, [table.shape[1] for table in offsets for _ in range(2)])
    return [
        Lengths(queries, keys, max(2, int(table[0].max())), int(table[1].max()))
        for queries, keys, table in zip(rows[::2], rows[1::2], tables, strict=True)
    ]


class Limits(NamedTuple):
    """The keys that a query attends to.

    In a part with Q queries and S keys, the *last key* of query i is key ``i + S - Q``.

    Attributes:
        scale: factor of the scores.
        causal: True: a query attends to no key after its last key.
        before: it attends to so many keys before its last key; -1: to all.
    """

    scale: float
    causal: bool
    before: int

    def arguments(self) -> tuple[bool, dict[str, Any]]:
        """Return the arguments of PyTorch's operators."""
        is_causal, right = self.causal and self.before < 0, 0 if self.causal else -1
        keywords = {"window_size_left": self.before, "window_size_right": right}
        return is_causal, {"scale": self.scale} | keywords


def attend_parts(
    q_NHK: Tensor, k_SGK: Tensor, v_SGK: Tensor, lengths: Lengths, limits: Limits
) -> tuple[Tensor, Tensor]:
    """Return the output ``[N, H, K]`` and the log-sum-exp ``[H, N]``, float32.

    The output of a query without keys is 0, and its log-sum-exp infinite.
    """
    is_causal, keywords = limits.arguments()
    out_NHK, lse_HN, *_ = aten._flash_attention_forward(
        # The output has the strides of the queries.
        *(q_NHK.contiguous(), k_SGK, v_SGK, *lengths, 0.0, is_causal, False),
        **keywords,
    )
    return out_NHK, lse_HN


def attend_parts_backward(
    grad_NHK: Tensor,
    q_NHK: Tensor,
    k_SGK: Tensor,
    v_SGK: Tensor,
    out_NHK: Tensor,
    lse_HN: Tensor,
    lengths: Lengths,
    limits: Limits,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values.

    They are 0 for the queries of a part without keys, and for its keys without queries.
    """
    is_causal, keywords = limits.arguments()
    # The operator reads the state of the random generator only with dropout.
    state, unused = q_NHK.new_empty(2, dtype=torch.uint64), q_NHK.new_empty(0)
    dq_NHK, dk_SGK, dv_SGK = aten._flash_attention_backward(
        grad_NHK.contiguous(),
        *(q_NHK, k_SGK, v_SGK, out_NHK, lse_HN, *lengths, 0.0, is_causal, state, unused),
        **keywords,
    )
    return dq_NHK.contiguous(), dk_SGK.contiguous(), dv_SGK.contiguous()


# --------------------------------------------------------------------------- operators


@torch.library.custom_op("weft::varlen_attention", mutates_args=(), device_types=GPU)
def varlen_attention(
    q_NHK: Tensor,
    k_NGK: Tensor,
    v_NGK: Tensor,
    sinks_H: Tensor | None,
    offsets_M: Tensor,
    sizes_2: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Return the output ``[N, H, K]`` and the log-sum-exp ``[H, N]``, float32."""
    lengths, limits = _lengths(offsets_M, sizes_2), _limits(scale, window)
    out_NHK, lse_HN = attend_parts(q_NHK, k_NGK, v_NGK, lengths, limits)
    if sinks_H is None:
        return out_NHK, lse_HN
    return add_sinks(out_NHK, lse_HN, sinks_H)


@torch.library.custom_op("weft::varlen_attention_backward", mutates_args=(), device_types=GPU)
def varlen_attention_backward(
    grad_NHK: Tensor,
    q_NHK: Tensor,
    k_NGK: Tensor,
    v_NGK: Tensor,
    out_NHK: Tensor,
    lse_HN: Tensor,
    offsets_M: Tensor,
    sizes_2: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    lengths, limits = _lengths(offsets_M, sizes_2), _limits(scale, window)
    tensors = grad_NHK, q_NHK, k_NGK, v_NGK, out_NHK, lse_HN
    return attend_parts_backward(*tensors, lengths, limits)


def _lengths(offsets_M: Tensor, sizes_2: Tensor) -> Lengths:
    """Return the documents, whose queries and keys are the same tokens."""
    num_documents, longest = sizes_2.tolist()
    offsets = offsets_M[: num_documents + 1]
    return Lengths(offsets, offsets, longest, longest)


def _limits(scale: float, window: int) -> Limits:
    return Limits(scale, causal=True, before=window - 1)


def add_sinks(out_NHK: Tensor, lse_HN: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Add a logit per head to the denominators of the softmax."""
    sinks_H1 = sinks_H.to(lse_HN.dtype).unsqueeze(1)
    share_NH1 = torch.sigmoid(lse_HN - sinks_H1).t().unsqueeze(2)
    return (out_NHK * share_NH1).to(out_NHK.dtype), torch.logaddexp(lse_HN, sinks_H1)


@varlen_attention.register_fake
def _(q_NHK: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, _width = q_NHK.shape
    dtype = torch.promote_types(q_NHK.dtype, torch.float32)
    return q_NHK.new_empty(q_NHK.shape), q_NHK.new_empty((num_heads, num_tokens), dtype=dtype)


@varlen_attention_backward.register_fake
def _(_grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in args[:3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad_NHK: Tensor, _: Tensor) -> tuple[Any, ...]:
    *qkv, sinks_H, offsets_M, sizes_2, out_NHK, lse_HN = ctx.saved_tensors
    grads = torch.ops.weft.varlen_attention_backward(
        grad_NHK, *qkv, out_NHK, lse_HN, offsets_M, sizes_2, ctx.scale, ctx.window
    )
    dsinks_H = None
    if sinks_H is not None:
        share_HN = (sinks_H.to(lse_HN.dtype).unsqueeze(1) - lse_HN).exp()
        products_NH = (grad_NHK * out_NHK).sum(-1, dtype=lse_HN.dtype)
        dsinks_H = -(share_HN * products_NH.t()).sum(1).to(sinks_H.dtype)
    return *grads, dsinks_H, *(None,) * 4


varlen_attention.register_autograd(_backward, setup_context=_save)
