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
from weft.plan import rules


class FlashReference:
    """`aten._flash_attention_forward` and its backward, document by document."""

    def __init__(self) -> None:
        self.calls = {"forward": 0, "backward": 0}
        self.num_documents: list[int] = []

    def _flash_attention_forward(
        self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *args: Any, **limits: Any
    ) -> tuple[Tensor, ...]:
        self.calls["forward"] += 1
        self.num_documents.append(len(offsets) - 1)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
        for part, scores in self._scores(q, k, offsets, *args, **limits):
            lse[:, part] = scores.logsumexp(-1)
            out[part] = (scores.softmax(-1) @ self._heads(v[part], q)).transpose(0, 1)
        return out, lse, *(q.new_empty(0),) * 3

    def _flash_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *args: Any,
        **limits: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        self.calls["backward"] += 1
        offsets, *lengths = args[:-2]
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        groups = k.shape[1]
        for part, scores in self._scores(q, k, offsets, *lengths, False, **limits):
            weights = (scores - lse[:, part].unsqueeze(-1)).exp()
            grad_HTK, out_HTK, q_HTK = (x[part].transpose(0, 1) for x in (grad, out, q))
            share = grad_HTK @ self._heads(v[part], q).transpose(1, 2)
            dscores = weights * (share - (grad_HTK * out_HTK).sum(-1, keepdim=True))
            dscores *= limits["scale"]
            dq[part] = (dscores @ self._heads(k[part], q)).transpose(0, 1)
            for target, product in (
                (dk, dscores.transpose(1, 2) @ q_HTK),
                (dv, weights.transpose(1, 2) @ grad_HTK),
            ):
                target[part] = product.unflatten(0, (groups, -1)).sum(1).transpose(0, 1)
        return dq, dk, dv

    def _heads(self, x: Tensor, q: Tensor) -> Tensor:
        return x.transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], dim=0)

    def _scores(
        self,
        q: Tensor,
        k: Tensor,
        offsets: Tensor,
        key_offsets: Tensor,
        max_q: int,
        max_k: int,
        dropout: float,
        is_causal: bool,
        debug: bool,
        *,
        scale: float,
        window_size_left: int,
        window_size_right: int,
    ) -> Iterator[tuple[slice, Tensor]]:
        assert (dropout, debug, window_size_right) == (0.0, False, 0)
        assert is_causal == (window_size_left == -1)
        assert offsets.dtype == torch.int32
        assert key_offsets is offsets
        lengths = offsets.diff()
        assert offsets[0] == 0
        assert offsets[-1] == len(q) == len(k)
        assert 0 < lengths.min() <= lengths.max() <= max_q == max_k
        for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            part = slice(start, end)
            scores = q[part].transpose(0, 1) @ self._heads(k[part], q).transpose(1, 2) * scale
            positions = torch.arange(end - start)
            distance = positions.unsqueeze(1) - positions
            is_hidden = distance < 0
            if window_size_left >= 0:
                is_hidden |= distance > window_size_left
            yield part, scores.masked_fill(is_hidden, -torch.inf)


def use_flash_reference() -> FlashReference:
    """Let all runs of this process compute documents by the operators, on the reference."""
    reference: Any = FlashReference()
    replaced: Any = (varlen_attention, rules)
    replaced[0].aten, replaced[1].find_obstacles = reference, lambda needs: []
    return reference  # type: ignore[no-any-return]


for operator in (varlen_attention.varlen_attention, varlen_attention.varlen_attention_backward):
    operator.register_kernel("cpu")(operator._init_fn)
