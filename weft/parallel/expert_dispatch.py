"""Exchange of tokens between the ranks that share experts.

`weft.parallel.expert_parallel` shards the experts.  A *dispatcher* sends tokens to the ranks of
their experts, and returns the weighted sum of each token's results (``parallel.ep_dispatch``).  It
gets whole tokens, with their experts and weights, so it may send a token once to each rank that
has some of its experts.  The dispatchers here send a *row* for each token and expert:

    alltoall      as many rows as there are; the host waits to read their numbers, once per layer
    padded        room for ``parallel.ep_capacity_factor`` times the rows of perfect balance, from
                  each rank to each other; the host waits for nothing
    module:Name   a user's: see `Dispatcher`

*Padded.*  A rank sends C rows to each rank of its group, of which the counts, a tensor, say how
many are real.  The others sort behind all groups: grouped GEMMs leave them undefined, and their
results are never read.  If a rank has more than C rows for another, `Overflow` counts it on the
device.  `weft.training.step` reads that number once per step, and computes the step again with
exact sizes.  No token is dropped.

*Chunks.*  With ``parallel.ep_chunks = n`` the experts of each rank form n chunks.  While the
experts of a chunk compute, the rows of the next chunk and the results of the previous one travel.
An exchange is two nodes of the graph, its start and its arrival.  Autograd runs the nodes of a
graph in reverse order, so backward overlaps like forward.  Each expert has the rows that it has
without chunks, and other chunks add zeros to the gradients of its weights, so no bit changes.

Shapes in names: N tokens of this rank, A experts of a token, R = N * A rows sorted by all E
experts, P ranks of the group, H chunks, L = E / P experts of a rank, M = L / H experts of a rank
and chunk, C rows of a rank for another rank and chunk, Q rows of a chunk that a rank receives, D
model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from weft.config.schema import ParallelSection
from weft.models.host_reads import define_host_read, read_counts
from weft.models.layers import run_function
from weft.models.moe import Routing
from weft.parallel.collectives import c10d_functional
from weft.parallel.step_hook import StepHook

# Called before a pass waits for rows: see `weft.parallel.pass_overlap`.
during_exchange: list[Callable[[], None]] = []


class Dispatch(Protocol):
    """The dispatch of the tokens of a layer, and the return of the results.

    `apply_in_chunks` calls the first three methods for each chunk, in the order of the chunks.
    """

    def start(self, chunk: int) -> None:
        """Start to send the rows of a chunk to the ranks of their experts."""

    def receive(self, chunk: int) -> tuple[Tensor, Tensor]:
        """Return received rows, sorted by expert, and a count for each of L experts.

        There is a row for each received token and each of its experts on this rank.

        Rows after the last group have no expert; their results may have any value.
        """

    def send_back(self, chunk: int, rows_QD: Tensor) -> None:
        """Start to return the results of a chunk; the rows are as `receive` returned them."""

    def result(self) -> Tensor:
        """Wait for all results; return the weighted sum of each token's, ``[N, D]``.

        The weights, `weft.models.moe.Routing.weights_NA`, need their gradient.
        """

    def close(self) -> None:
        """Wait for all that was started, if an exception or a recomputation ended early."""


class Dispatcher(Protocol):
    """Begins the dispatch of tokens, for the layers of a model part.

    ``parallel.ep_dispatch = "module:Name"`` calls ``Name(group, section)`` once for each part, with
    the ranks that share experts and the section ``[parallel]``.
    """

    def __call__(self, x_ND: Tensor, routing: Routing) -> Dispatch:
        """Begin to dispatch tokens.

        Args:
            x_ND: the tokens.  With dropout they are wider than the results, and some of their
                columns are bits of integers, to be moved only.
            routing: the experts of each token and their weights.
        """


DispatcherFactory = Callable[[dist.ProcessGroup, ParallelSection], Dispatcher]


def apply_in_chunks(
    forward: Callable[..., Tensor],
    dispatcher: Dispatcher,
    num_chunks: int,
    x_ND: Tensor,
    routing: Routing,
    *keys_N: Tensor,
    beside: tuple[Callable[[Tensor], Tensor], Tensor] | None = None,
) -> Any:
    """Return the weighted sum of the outputs of each token's experts, ``[N, D]``.

    Keys are values of the tokens for `Experts.forward`, int32.  Their bits are more columns of the
    tokens, so that every dispatcher sends them.

    ``beside`` is a function and its input, to compute while the first rows travel.  Autograd runs
    its backward pass while the gradients of these rows travel: after the arrival of the rows in
    the graph, before their start.  Then the result is that of the rows and that of the function.
    """
    dim, besides = x_ND.shape[1], list[Tensor]()
    columns = [key_N.unsqueeze(1).view(x_ND.dtype) for key_N in keys_N]
    dispatch = dispatcher(torch.cat((x_ND, *columns), dim=1) if columns else x_ND, routing)
    try:
        dispatch.start(0)
        for chunk in range(num_chunks):
            if chunk + 1 < num_chunks:
                dispatch.start(chunk + 1)
            if beside is not None and chunk == 0:
                function, x = beside
                besides.append(function(x))
            rows_QD, counts_L = dispatch.receive(chunk)
            rows_QD, *keys_Q = _split_columns(rows_QD, dim, len(keys_N))
            dispatch.send_back(chunk, forward(rows_QD, counts_L, *keys_Q))
        results = [dispatch.result(), *besides]
        return results[0] if beside is None else tuple(results)
    finally:
        dispatch.close()


def _split_columns(rows_QD: Tensor, dim: int, num_keys: int) -> list[Tensor]:
    """Return rows and keys; see `apply_in_chunks`."""
    if not num_keys:
        return [rows_QD]
    keys_QK = rows_QD[:, dim:].detach().contiguous().view(torch.int32)
    return [rows_QD[:, :dim].contiguous(), *keys_QK.unbind(1)]


class AllToAll:
    """Dispatcher that exchanges exact numbers of rows, which the host reads."""

    def __init__(self, group: dist.ProcessGroup, section: ParallelSection) -> None:
        self.group, self.num_chunks = group, section.ep_chunks

    def __call__(self, x_ND: Tensor, routing: Routing) -> _RowDispatch:
        """See `Dispatcher`."""
        return _RowDispatch(x_ND, routing, self.group, self.num_chunks, None)


class PaddedAllToAll(AllToAll):
    """Dispatcher that exchanges fixed numbers of rows.

    Attributes:
        overflow: None: rows beyond the capacity are lost.
    """

    overflow: Overflow | None = None

    def __init__(self, group: dist.ProcessGroup, section: ParallelSection) -> None:
        super().__init__(group, section)
        self.factor = section.ep_capacity_factor

    def __call__(self, x_ND: Tensor, routing: Routing) -> _RowDispatch:
        """See `Dispatcher`.  Evaluation, which computes nothing again, has exact sizes."""
        if not torch.is_grad_enabled() or (self.overflow is not None and self.overflow.is_exact):
            return super().__call__(x_ND, routing)
        num_rows = len(routing.order_R)
        capacity = row_capacity(num_rows, self.group.size() * self.num_chunks, self.factor)
        dispatch = _RowDispatch(x_ND, routing, self.group, self.num_chunks, capacity)
        if self.overflow is not None:
            self.overflow.count.add_((dispatch.sent_PH > capacity).sum())
        return dispatch


def row_capacity(num_rows: int, num_parts: int, factor: float) -> int:
    """Return C for rows that perfect balance would split into ``num_parts``."""
    return min(num_rows, -int(-num_rows * factor // num_parts))


def _is_positive_on_any_rank(count: Tensor) -> bool:
    if dist.get_world_size() > 1:
        dist.all_reduce(count)
    return bool(count.item())


# A collective over all ranks, which changes ``count``; the host waits.
is_positive_on_any_rank = define_host_read(
    "is_positive_on_any_rank(Tensor(a!) count) -> bool", _is_positive_on_any_rank
)


class Overflow(StepHook):
    """Compute a step again with exact sizes if the rows for a rank did not fit.

    Attributes:
        count: int64 scalar on the device: pairs of ranks whose rows did not fit.
        is_exact: dispatchers exchange exact sizes.
    """

    def __init__(self, device: torch.device) -> None:
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.is_exact = False
        self._num_steps = 0

    def abandon(self) -> None:
        """Exchange fixed sizes."""
        self.is_exact = False

    def end_passes(self) -> bool:
        """Return True on all ranks if one overflowed; the host waits."""
        if self.is_exact:
            self.is_exact = False
            self._num_steps += 1
            return False
        count = self.count.clone()
        self.count.zero_()
        self.is_exact = is_positive_on_any_rank(count)
        return self.is_exact

    def fields(self, values: Sequence[float]) -> dict[str, Any]:
        """Return the number of steps that overflowed since the last call."""
        return {"moe_overflows": self.take_count()}

    def take_count(self) -> int:
        """Return the number of steps that overflowed since the last call."""
        count, self._num_steps = self._num_steps, 0
        return count


class _RowDispatch:
    """All-to-all of rows; see the module docstring.

    Args:
        x_ND: the tokens.
        routing: their experts.
        group: ranks that share experts.
        num_chunks: H.
        capacity: C; None: exact sizes.
    """

    def __init__(
        self,
        x_ND: Tensor,
        routing: Routing,
        group: dist.ProcessGroup,
        num_chunks: int,
        capacity: int | None,
    ) -> None:
        self.routing = routing
        rows_RD, counts_E, size = routing.expand(x_ND), routing.counts_E, group.size()
        self.group, self.capacity, self.num_chunks = group, capacity, num_chunks
        per_rank = [len(counts_E) // size] * size
        self.sent_PH = counts_E.view(size, num_chunks, -1).sum(2)
        received_E = _wait(_start(counts_E, per_rank, per_rank, group))
        self.received_PHM = received_E.view(size, num_chunks, -1)
        if capacity is None:
            self.sent, self.received = self._read_sizes(len(rows_RD))
        else:
            self.sent = self.received = [[capacity] * size] * num_chunks
            # An overflow loses rows; the others remain in their groups.
            ends_PHM = self.received_PHM.cumsum(2).clamp(max=capacity)
            self.received_PHM = ends_PHM.diff(
                dim=2, prepend=ends_PHM.new_zeros(size, num_chunks, 1)
            )
        self.position_R: Tensor | None = None  # of rows among those to send, chunk by chunk
        if num_chunks > 1 or capacity is not None:
            self.position_R = self._find_positions(len(rows_RD))
            num_slots = sum(map(sum, self.sent))
            rows_RD = run_function(MoveRows, rows_RD, self.position_R, num_slots)
        self.chunks = list(torch.split(rows_RD, [sum(sizes) for sizes in self.sent]))
        self.orders: list[Tensor] = []  # of the rows of a chunk, by expert
        self.rows: list[_Travel] = []
        self.results: list[_Travel] = []

    def _read_sizes(self, num_rows: int) -> tuple[list[list[int]], list[list[int]]]:
        """Return the rows to send to and receive from each rank, for each chunk."""
        numbers = read_counts([self.sent_PH, self.received_PHM.sum(2)], num_rows)
        middle = len(numbers) // 2
        sent, received = (
            [part[chunk :: self.num_chunks] for chunk in range(self.num_chunks)]
            for part in (numbers[:middle], numbers[middle:])
        )
        return sent, received

    def _find_positions(self, num_rows: int) -> Tensor:
        """Return the position of each row: those of a chunk for a rank are neighbors."""
        sizes_PH = self.sent_PH.flatten()
        if self.capacity is None:
            sizes_HP = self.sent_PH.t().flatten()
            starts_HP = sizes_HP.cumsum(0) - sizes_HP
        else:
            starts_HP = torch.arange(len(sizes_PH), device=sizes_PH.device) * self.capacity
        starts_PH = starts_HP.view(self.num_chunks, -1).t().flatten()
        ends_PH = sizes_PH.cumsum(0)
        rows_R = torch.arange(num_rows, device=ends_PH.device)
        group_R = torch.searchsorted(ends_PH, rows_R, right=True)
        index_R = rows_R - (ends_PH - sizes_PH)[group_R]
        if self.capacity is not None:
            index_R = index_R.clamp(max=self.capacity - 1)
        return starts_PH[group_R] + index_R

    def start(self, chunk: int) -> None:
        """See `Dispatch`."""
        sizes = self.received[chunk], self.sent[chunk]
        self.rows.append(_Travel(self.chunks.pop(0), *sizes, self.group))

    def receive(self, chunk: int) -> tuple[Tensor, Tensor]:
        """See `Dispatch`."""
        rows_QD = self.rows[chunk].arrive()
        groups_PM = received_PM = self.received_PHM[:, chunk]
        counts_M = received_PM.sum(0)
        if self.capacity is not None:  # after the groups of a rank, its rows without an expert
            num_empty_P1 = self.capacity - received_PM.sum(1, keepdim=True)
            groups_PM = torch.cat((received_PM, num_empty_P1), dim=1)
        # Rows are sorted by rank, then by expert.  The ends of the groups give each row's group,
        # and so its expert.
        ends = groups_PM.flatten().cumsum(0)
        rows_Q = torch.arange(len(rows_QD), device=ends.device)
        expert_Q = torch.searchsorted(ends, rows_Q, right=True) % groups_PM.shape[1]
        order_Q = expert_Q.sort(stable=True).indices
        if self.capacity is not None and rows_QD.dtype != torch.bfloat16:
            # Products of other dtypes take no more rows than the groups have, and read the counts.
            total = counts_M.sum()
            order_Q = order_Q[: read_counts([total], len(rows_QD))[0]]
        self.orders.append(order_Q)
        num_before = chunk * len(counts_M)
        num_after = (self.num_chunks - 1 - chunk) * len(counts_M)
        counts_L = F.pad(counts_M, (num_before, num_after))
        return run_function(MoveRows, rows_QD, order_Q, None), counts_L

    def send_back(self, chunk: int, rows_QD: Tensor) -> None:
        """See `Dispatch`."""
        rows_QD = run_function(MoveRows, rows_QD, self.orders[chunk], sum(self.received[chunk]))
        sizes = self.sent[chunk], self.received[chunk]
        self.results.append(_Travel(rows_QD, *sizes, self.group))

    def result(self) -> Tensor:
        """See `Dispatch`."""
        parts = [result.arrive() for result in self.results]
        rows_RD = torch.cat(parts) if len(parts) > 1 else parts[0]
        if self.position_R is not None:
            rows_RD = run_function(MoveRows, rows_RD, self.position_R, None)
        return self.routing.combine(rows_RD)

    def close(self) -> None:
        """See `Dispatch`."""
        for travel in (*self.rows, *self.results):
            if travel.started is not None:
                _wait(travel.started.detach())


class _Travel:
    """Rows on their way, and in backward their gradients on the way back.

    Args:
        rows: of this rank, sorted by the rank that they go to.
        received: number of rows from each rank.
        sent: number of rows to each rank.
        group: the ranks.
    """

    def __init__(
        self, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> None:
        self.there, self.back = (received, sent, group), (sent, received, group)
        self.started_gradient: Tensor | None = None
        self.started: Tensor | None = run_function(_Start, rows, self)

    def arrive(self) -> Tensor:
        """Wait for the received rows."""
        started, self.started = self.started, None
        return run_function(_Arrive, started, self)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, travel: _Travel) -> Tensor:
        ctx.travel = travel
        return _start(rows, *travel.there)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        started, ctx.travel.started_gradient = ctx.travel.started_gradient, None
        return _wait_for_rows(started), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, started: Tensor, travel: _Travel) -> Tensor:
        ctx.travel = travel
        return _wait_for_rows(started).view_as(started)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Autograd wants a gradient of the size of the input, so the other one travels beside it.
        ctx.travel.started_gradient = _start(grad, *ctx.travel.back)
        return grad, None


class MoveRows(torch.autograd.Function):
    """Move rows to other positions.

    Rows go to ``position_R`` of ``num_slots`` zero rows; if that is None, they come from there.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, position_R: Tensor, num_slots: int | None) -> Tensor:
        """Move the rows of ``x``."""
        ctx.save_for_backward(position_R)
        ctx.num_slots, ctx.num_rows = num_slots, len(x)
        return (
            _gather_rows(x, position_R)
            if num_slots is None
            else _scatter_rows(x, position_R, num_slots)
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Move the gradients back."""
        (position_R,) = ctx.saved_tensors
        if ctx.num_slots is None:
            return _scatter_rows(grad, position_R, ctx.num_rows), None, None
        return _gather_rows(grad, position_R), None, None


def _gather_rows(x_SD: Tensor, position_R: Tensor) -> Tensor:
    return x_SD[position_R]


def _scatter_rows(x_RD: Tensor, position_R: Tensor, num_slots: int) -> Tensor:
    create = x_RD.new_empty if len(x_RD) == num_slots else x_RD.new_zeros
    return create(num_slots, x_RD.shape[1]).index_copy_(0, position_R, x_RD)


def _start(rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """Start to send ``sent[i]`` rows to rank i, for `_wait`."""
    started: Tensor = c10d_functional.all_to_all_single(
        rows.contiguous(), received, sent, group.group_name
    )
    return started


def _wait(started: Tensor) -> Tensor:
    arrived: Tensor = c10d_functional.wait_tensor(started)
    return arrived


def _wait_for_rows(started: Tensor) -> Tensor:
    """Let another pass compute first, then wait."""
    for call in during_exchange:
        call()
    return _wait(started)
