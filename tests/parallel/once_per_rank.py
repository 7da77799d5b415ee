"""A user's dispatcher: a token travels once to each rank that has some of its experts.

It does with PyTorch's collectives what DeepEP, HybridEP and NCCL-EP do with kernels: experts and
weights travel beside the token, and a rank returns one sum of its experts' results.

Shapes in names as in `weft.parallel.expert_dispatch`, and S tokens to send, T received tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from weft.config.schema import ParallelSection
from weft.models.moe import Routing


class OncePerRank:
    """See `weft.parallel.expert_dispatch.Dispatcher`; for ``parallel.ep_chunks = 1``.

    Attributes:
        num_sent: tokens that this rank has sent to others or itself.
    """

    def __init__(self, group: dist.ProcessGroup, section: ParallelSection) -> None:
        self.group, self.num_sent = group, 0

    def __call__(self, x_ND: Tensor, routing: Routing) -> TokenDispatch:
        """See `weft.parallel.expert_dispatch.Dispatcher`."""
        dispatch = TokenDispatch(x_ND, routing, self.group)
        self.num_sent += sum(dispatch.sent)
        return dispatch


class TokenDispatch:
    """See `weft.parallel.expert_dispatch.Dispatch`."""

    def __init__(self, x_ND: Tensor, routing: Routing, group: dist.ProcessGroup) -> None:
        self.x_ND, self.routing, self.group = x_ND, routing, group
        self.num_local = len(routing.counts_E) // group.size()
        is_sent_NP = torch.zeros(len(x_ND), group.size(), dtype=torch.bool, device=x_ND.device)
        is_sent_NP.scatter_(1, routing.chosen_NA // self.num_local, value=True)
        self.rank_S, self.token_S = is_sent_NP.t().nonzero(as_tuple=True)
        counts_P = is_sent_NP.sum(0)
        received_P = torch.empty_like(counts_P)
        dist.all_to_all_single(received_P, counts_P, group=group)
        self.sent, self.received = counts_P.tolist(), received_P.tolist()

    def _send(self, x: Tensor) -> Tensor:
        return all_to_all_single_autograd(x.contiguous(), self.received, self.sent, self.group)

    def start(self, chunk: int) -> None:
        """Send each token, the experts that it has on the other rank, and their weights."""
        local_SA = self.routing.chosen_NA[self.token_S] - self.num_local * self.rank_S.unsqueeze(1)
        is_local_SA = (local_SA >= 0) & (local_SA < self.num_local)
        self.x_TD = self._send(self.x_ND[self.token_S])
        self.weights_TA = self._send(self.routing.weights_NA[self.token_S])
        self.local_TA = self._send(local_SA.where(is_local_SA, -1))

    def receive(self, chunk: int) -> tuple[Tensor, Tensor]:
        """See `weft.parallel.expert_dispatch.Dispatch`."""
        self.token_Q, self.slot_Q = (self.local_TA >= 0).nonzero(as_tuple=True)
        local_Q, order_Q = self.local_TA[self.token_Q, self.slot_Q].sort(stable=True)
        self.token_Q, self.slot_Q = self.token_Q[order_Q], self.slot_Q[order_Q]
        return self.x_TD[self.token_Q], torch.bincount(local_Q, minlength=self.num_local)

    def send_back(self, chunk: int, rows_QD: Tensor) -> None:
        """Add up the results of each token on this rank, and return one row."""
        weights_Q = self.weights_TA[self.token_Q, self.slot_Q].to(rows_QD.dtype)
        sums_TD = rows_QD.new_zeros(len(self.x_TD), rows_QD.shape[1])
        sums_TD = sums_TD.index_add(0, self.token_Q, rows_QD * weights_Q.unsqueeze(1))
        self.sent, self.received = self.received, self.sent
        self.sums_SD = self._send(sums_TD)

    def result(self) -> Tensor:
        """See `weft.parallel.expert_dispatch.Dispatch`."""
        sums_ND = self.sums_SD.new_zeros(len(self.x_ND), self.sums_SD.shape[1])
        return sums_ND.index_add(0, self.token_S, self.sums_SD)

    def close(self) -> None:
        """See `weft.parallel.expert_dispatch.Dispatch`; every call has waited."""
