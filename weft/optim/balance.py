"""Expert load balancing without an auxiliary loss; see `weft.models.moe`.

After each optimizer step every expert's bias moves by a fixed rate: up if fewer tokens than its
layer's mean selected it, down if more did (Wang et al., arXiv:2408.15664, algorithm 1).  The tokens
are those of the global batch, for any split into ranks and microbatches.  Counts are integers, so
their sums do not depend on the order, and every layout computes the same biases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.parallel.mesh import Mesh
from weft.parallel.private import is_in_backward


class ExpertBalancer:
    """Loads of the experts on this rank's model parts, and their biases."""

    def __init__(
        self,
        model_parts: Sequence[nn.Module],
        moe_layers: Callable[[nn.Module], list[Any]] | None,
        rate: float,
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        """Register a counter on every router.

        Args:
            model_parts: this rank's parts of the model.
            moe_layers: returns a part's layers with experts; None: the family has none.
            rate: update of a bias per step.
            mesh: mesh over which token counts are summed.
            device: device of the counts.
        """
        layers = [layer for part in model_parts for layer in moe_layers(part)] if moe_layers else []
        self._routers = [layer.router for layer in layers]
        self._rate, self._mesh = rate, mesh
        self.has_experts = moe_layers is not None
        experts = self._routers[0].expert_bias.numel() if layers else 0
        # Tokens per layer and expert: of this rank, then summed over ranks.
        self.loads_LE = torch.zeros(len(layers), experts, dtype=torch.int64, device=device)
        for loads_E, router in zip(self.loads_LE, self._routers, strict=True):
            router.register_forward_hook(partial(_count_load, loads_E))

    def reset(self) -> None:
        """Reset the loads at the start of a global batch."""
        self.loads_LE.zero_()

    def reduce_loads(self) -> list[Tensor]:
        """Sum the loads over all ranks in place; return them (no tensor, or one)."""
        if not self._routers:
            return []
        return [self._mesh.all_reduce_dp_cp(self.loads_LE)]

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:
        """Move every bias; change nothing if ``skip``, a bool on the device, is true."""
        if not self._routers:
            return
        loads_LE = self.loads_LE.double()
        moves_LE = (self._rate * (loads_LE.mean(1, keepdim=True) - loads_LE).sign()).float()
        if skip is not None:
            moves_LE = moves_LE.masked_fill(skip, 0.0)
        torch._foreach_add_([router.expert_bias for router in self._routers], list(moves_LE))

    def max_load_ratio(self, pp_group: dist.ProcessGroup | None) -> Tensor:
        """Return the maximum load over the mean load, of the most unbalanced layer.

        Args:
            pp_group: pipeline-parallel group; None without pipeline parallelism.

        Returns:
            A float32 tensor of one element on the device, equal on all ranks of a pipeline; of no
            element without experts.
        """
        if not self.has_experts:
            return torch.empty(0, device=self.loads_LE.device)
        max_ratio = torch.zeros((), device=self.loads_LE.device)
        if self._routers:  # a stage can be without experts
            loads_LE = self.loads_LE.float()
            max_ratio = (loads_LE.amax(1) / loads_LE.mean(1).clamp(min=1e-9)).amax()
        if pp_group is not None:
            dist.all_reduce(max_ratio, dist.ReduceOp.MAX, pp_group)
        return max_ratio.view(1)


def _count_load(
    loads_E: Tensor, router: nn.Module, args: Any, output: tuple[Tensor, Tensor]
) -> None:
    """Add the selections of a router to the loads of its layer, as a forward hook."""
    # Evaluation and recomputation in backward do not count.
    if torch.is_grad_enabled() and not is_in_backward():
        chosen = output[0].flatten()
        loads_E.scatter_add_(0, chosen, torch.ones_like(chosen))
