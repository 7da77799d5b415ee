"""Balance of experts without a loss: see the top of `weft.models.moe`.

After each optimizer step every expert's bias moves by a fixed rate: up if fewer tokens than the
mean of its layer chose it, down if more did (Wang et al., arXiv:2408.15664, algorithm 1).  Tokens
are those of the whole global batch, however it is spread over ranks and microbatches.  Counts are
whole numbers, whose sums depend on no order: all ranks and all layouts move alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.parallel.mesh import Mesh
from weft.parallel.private_hooks import is_in_backward


class Balance:
    """The loads of the experts on this rank's parts of a model, and their biases."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        routed: Callable[[nn.Module], list[Any]] | None,
        rate: float,
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        """
        Args:
            routed: the layers with experts of a part; None: the family has none.
            rate: by how much a bias moves in a step.
        """
        layers = [layer for part in parts for layer in routed(part)] if routed else []
        self._routers = [layer.router for layer in layers]
        self._rate, self._mesh = rate, mesh
        self.routes = routed is not None
        experts = self._routers[0].expert_bias.numel() if layers else 0
        # Tokens of each expert of each layer: of this rank, then of all.
        self.loads_LE = torch.zeros(len(layers), experts, dtype=torch.int64, device=device)
        for row_E, router in zip(self.loads_LE, self._routers, strict=True):
            router.register_forward_hook(_Count(row_E))

    def begin(self) -> None:
        """A global batch begins."""
        self.loads_LE.zero_()

    def total(self) -> list[Tensor]:
        """The loads (none, or one tensor), which are now those of all ranks' tokens."""
        if not self._routers:
            return []
        return [self._mesh.all_reduce_dp_cp(self.loads_LE)]

    @torch.no_grad()
    def step(self, bad: Tensor | None = None) -> None:
        """Move every bias; none if ``bad``, a bool on the device, is true."""
        if not self._routers:
            return
        loads_LE = self.loads_LE.double()
        moves_LE = (self._rate * (loads_LE.mean(1, keepdim=True) - loads_LE).sign()).float()
        if bad is not None:
            moves_LE = moves_LE.masked_fill(bad, 0.0)
        torch._foreach_add_([router.expert_bias for router in self._routers], list(moves_LE))

    def worst(self, stages: dist.ProcessGroup | None) -> list[Tensor]:
        """The load of the most loaded expert over the mean of its layer, of the worst layer.

        Args:
            stages: the ranks that hold the other stages; None where there are none.

        Returns:
            A float32 tensor of one element on the device, the same on all ranks of a pipeline;
            nothing without experts.
        """
        if not self.routes:
            return []
        worst = torch.zeros((), device=self.loads_LE.device)
        if self._routers:  # a stage may have none
            loads_LE = self.loads_LE.float()
            worst = (loads_LE.amax(1) / loads_LE.mean(1).clamp(min=1e-9)).amax()
        if stages is not None:
            dist.all_reduce(worst, dist.ReduceOp.MAX, stages)
        return [worst.view(1)]


class _Count:
    """A hook of a router: adds what it chose to the loads of a layer."""

    def __init__(self, loads_E: Tensor) -> None:
        self.loads_E = loads_E

    def __call__(self, module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> None:
        # Neither an evaluation counts, nor what is computed again for a backward pass.
        if torch.is_grad_enabled() and not is_in_backward():
            chosen = output[0].flatten()
            self.loads_E.scatter_add_(0, chosen, torch.ones_like(chosen))
