"""PyTorch's FlashAttention for sequences of many lengths, computed on a CPU.

A CPU has no such kernel.  So `FlashReference` computes what PyTorch's operators say, and weft's
operators run on it: the offsets, windows and sinks that they pass are those of a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from weft.models import varlen_attention
from weft.planning import rules


class FlashReference:
    """`aten._flash_attention_forward` and its backward, part by part, in float32 or wider."""

    def __init__(self) -> None:
        self.calls = {"forward": 0, "backward": 0}
        self.num_documents: list[int] = []

    def _flash_attention_forward(
        self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *args: Any, **limits: Any
    ) -> tuple[Tensor, ...]:
        self.calls["forward"] += 1
        self.num_documents.append(len(offsets) - 1)
        dtype = q.dtype
        q, k, v = _widen(q, k, v)
        out, lse = torch.full_like(q, torch.nan), q.new_full((q.shape[1], len(q)), torch.nan)
        for queries, keys, scores in self._scores(q, k, offsets, *args, **limits):
            lse[:, queries] = scores.logsumexp(-1) if scores.shape[-1] else torch.inf
            out[queries] = (scores.softmax(-1) @ self._heads(v[keys], q)).transpose(0, 1)
        assert not out.isnan().any()
        return out.to(dtype), lse, *(q.new_empty(0),) * 3

    def _flash_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *args: Any,
        **limits: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        self.calls["backward"] += 1
        assert lse.is_contiguous()
        lengths, dtype = args[:-2], q.dtype
        grad, q, k, v, out = _widen(grad, q, k, v, out)
        dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
        groups = k.shape[1]
        for queries, keys, scores in self._scores(q, k, *lengths, False, **limits):
            weights = (scores - lse[:, queries].unsqueeze(-1)).exp()
            grad_HQK, out_HQK, q_HQK = (x[queries].transpose(0, 1) for x in (grad, out, q))
            share = grad_HQK @ self._heads(v[keys], q).transpose(1, 2)
            dscores = weights * (share - (grad_HQK * out_HQK).sum(-1, keepdim=True))
            dscores *= limits["scale"]
            dq[queries] = (dscores @ self._heads(k[keys], q)).transpose(0, 1)
            for target, product in (
                (dk, dscores.transpose(1, 2) @ q_HQK),
                (dv, weights.transpose(1, 2) @ grad_HQK),
            ):
                target[keys] = product.unflatten(0, (groups, -1)).sum(1).transpose(0, 1)
        return dq.to(dtype), dk.to(dtype), dv.to(dtype)

    def _heads(self, x: Tensor, q: Tensor) -> Tensor:
        return x.transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], dim=0)

    def _scores(
        self,
        q: Tensor,
        k: Tensor,
        query_offsets: Tensor,
        key_offsets: Tensor,
        most_queries: int,
        most_keys: int,
        dropout: float,
        is_causal: bool,
        debug: bool,
        *,
        scale: float,
        window_size_left: int,
        window_size_right: int,
    ) -> Iterator[tuple[slice, slice, Tensor]]:
        assert (dropout, debug) == (0.0, False)
        assert is_causal == (window_size_left == -1 and window_size_right == 0)
        assert most_queries > 1  # for one the kernel has another path
        for x, offsets, most in ((q, query_offsets, most_queries), (k, key_offsets, most_keys)):
            assert offsets.dtype == torch.int32
            assert offsets.is_contiguous()
            assert offsets[0] == 0
            assert offsets[-1] == len(x)
            assert 0 <= offsets.diff().min() <= offsets.diff().max() <= most
        assert len(query_offsets) == len(key_offsets)
        # As in ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
        left, right = (
            -1 if limit >= most_keys else limit for limit in (window_size_left, window_size_right)
        )
        if left < 0 <= right:
            left = most_keys
        elif right < 0 <= left:
            right = most_keys
        for parts in zip(
            *(x.unfold(0, 2, 1).tolist() for x in (query_offsets, key_offsets)), strict=True
        ):
            queries, keys = (slice(*part) for part in parts)
            q_HQK, k_HSK = q[queries].transpose(0, 1), self._heads(k[keys], q)
            scores = q_HQK @ k_HSK.transpose(1, 2) * scale
            num_queries, num_keys = scores.shape[1:]
            last = torch.arange(num_queries).unsqueeze(1) + num_keys - num_queries
            after = torch.arange(num_keys) - last
            is_hidden = torch.zeros_like(after, dtype=torch.bool)
            if left >= 0:
                is_hidden |= after < -left
            if right >= 0:
                is_hidden |= after > right
            assert not num_keys or not is_hidden.all(1).any(), (
                "a query of a part sees none of its keys"
            )
            yield queries, keys, scores.masked_fill(is_hidden, -torch.inf)


def _widen(*tensors: Tensor) -> list[Tensor]:
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def use_flash_reference() -> FlashReference:
    """Let all runs of this process compute documents by the operators, on the reference."""
    reference: Any = FlashReference()
    replaced: Any = (varlen_attention, rules)
    replaced[0].aten, replaced[1].find_obstacles = reference, lambda needs: []
    return reference  # type: ignore[no-any-return]


for operator in (varlen_attention.varlen_attention, varlen_attention.varlen_attention_backward):
    operator.register_kernel("cpu")(operator._init_fn)
