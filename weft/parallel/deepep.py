"""Exchange of rows by DeepEP's kernels (github.com/deepseek-ai/DeepEP), on GPUs.

DeepEP sends rows over NVLink and RDMA at once.  This dispatcher calls the normal kernels of the
class ``Buffer``, by DeepEP's documentation of it (V1); it has not run on a GPU.  A row is a
token of one expert to DeepEP, so a token travels once for each of its experts, as with
``alltoall``.  The host waits for the number of received rows.

*Gradients.*  ``combine`` sums what ``dispatch`` copied, so each is the backward pass of the other,
with the handle of the same ``dispatch``.

Shapes in names as in `weft.parallel.expert_dispatch`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.config.schema import ParallelSection
from weft.models.layers import run_function
from weft.parallel.expert_dispatch import MoveRows


class DeepEP:
    """Dispatcher with one buffer for all layers of a model part; see `Dispatcher`."""

    def __init__(self, group: dist.ProcessGroup, section: ParallelSection) -> None:
        import deep_ep  # type: ignore[import-not-found]  # `weft.train.job_checks` looks for it

        self.group, self._kind, self._row_bytes = group, deep_ep.Buffer, 0

    def __call__(self, rows_RD: Tensor, counts_E: Tensor) -> _DeepEPDispatch:
        """See `Dispatcher`."""
        row_bytes = rows_RD.shape[1] * rows_RD.element_size()
        if row_bytes > self._row_bytes:
            self._buffer, self._row_bytes = self._create_buffer(row_bytes), row_bytes
        return _DeepEPDispatch(self._buffer, rows_RD, counts_E, self.group.size())

    def _create_buffer(self, row_bytes: int) -> Any:
        size = self.group.size()
        configs = self._kind.get_dispatch_config(size), self._kind.get_combine_config(size)
        nvlink_bytes = max(c.get_nvl_buffer_size_hint(row_bytes, size) for c in configs)
        rdma_bytes = max(c.get_rdma_buffer_size_hint(row_bytes, size) for c in configs)
        return self._kind(self.group, nvlink_bytes, rdma_bytes)


class _DeepEPDispatch:
    """See `weft.parallel.expert_dispatch.Dispatch`; there is one chunk."""

    def __init__(self, buffer: Any, rows_RD: Tensor, counts_E: Tensor, num_ranks: int) -> None:
        self.buffer, self.rows_RD, self.counts_E = buffer, rows_RD, counts_E
        self.num_local = len(counts_E) // num_ranks
        self.routes: list[Any] = []  # expert of each received row, and the handle

    def start(self, chunk: int) -> None:
        """See `Dispatch`."""
        experts_E = torch.arange(len(self.counts_E), device=self.counts_E.device)
        expert_R = experts_E.repeat_interleave(self.counts_E, output_size=len(self.rows_RD))
        self.received_QD = run_function(
            _Dispatch, self.rows_RD, expert_R, len(self.counts_E), self.buffer, self.routes
        )

    def receive(self, chunk: int) -> tuple[Tensor, Tensor]:
        """See `Dispatch`."""
        expert_Q, self.handle = self.routes
        sorted_Q, self.order_Q = expert_Q.sort(stable=True)
        experts_L = torch.arange(self.num_local, device=expert_Q.device)
        ends_L = torch.searchsorted(sorted_Q, experts_L, right=True)
        rows_QD = run_function(MoveRows, self.received_QD, self.order_Q, None)
        return rows_QD, ends_L.diff(prepend=ends_L.new_zeros(1))

    def send_back(self, chunk: int, rows_QD: Tensor) -> None:
        """See `Dispatch`."""
        rows_QD = run_function(MoveRows, rows_QD, self.order_Q, len(rows_QD))
        self.result_RD = run_function(_Combine, rows_QD, self.buffer, self.handle)

    def result(self) -> Tensor:
        """See `Dispatch`."""
        return self.result_RD

    def close(self) -> None:
        """See `Dispatch`; every call has waited."""


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_RD: Tensor, expert_R: Tensor, num_experts: int, buffer: Any, routes: Any
    ) -> Tensor:
        index_R1 = expert_R.unsqueeze(1)
        per_rank, per_node, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(
            index_R1, num_experts
        )
        received_QD, index_Q1, _, _, handle, _ = buffer.dispatch(
            rows_RD.contiguous(),
            topk_idx=index_R1,
            topk_weights=torch.ones_like(index_R1, dtype=torch.float32),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
        )
        ctx.buffer, ctx.handle = buffer, handle
        routes[:] = index_Q1.squeeze(1), handle
        rows: Tensor = received_QD
        return rows

    @staticmethod
    def backward(ctx: Any, grad_QD: Tensor) -> tuple[Tensor, None, None, None, None]:
        grad_RD, _, _ = ctx.buffer.combine(grad_QD.contiguous(), ctx.handle)
        return grad_RD, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_QD: Tensor, buffer: Any, handle: Any) -> Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        result: Tensor = buffer.combine(rows_QD.contiguous(), handle)[0]
        return result

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        grad_QD, *_ = ctx.buffer.dispatch(grad_RD.contiguous(), handle=ctx.handle)
        return grad_QD, None, None
