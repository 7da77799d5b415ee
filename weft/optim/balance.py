"""Expert load balancing by biases, and metrics of routers; see `weft.models.moe`.

After each optimizer step every expert's bias moves by a fixed rate: up if fewer tokens than its
layer's mean selected it, down if more did (Wang et al., arXiv:2408.15664, algorithm 1).  The tokens
are those of the global batch, for any split into ranks and microbatches.  Counts are integers, so
their sums do not depend on the order, and every layout computes the same biases.

Shapes: L layers with experts on this rank, E experts, M sums of `weft.models.moe.RouterStep`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.models.moe import RouterStep
from weft.monitor.step_record import ROUTER_METRICS
from weft.parallel.mesh import Mesh
from weft.parallel.private import add_in_forward
from weft.parallel.step_hook import StepHook


class ExpertBalancer(StepHook):
    """Loads of the experts on this rank's model parts, and their biases.

    Attributes:
        layers: names of all layers with experts, also on other pipeline stages.
        loads_LE: int64, tokens of each expert: of this rank, then summed over ranks.
    """

    def __init__(
        self,
        model_parts: Sequence[nn.Module],
        moe_layers: Callable[[nn.Module], list[Any]] | None,
        rate: float,
        mesh: Mesh,
        device: torch.device,
        measures: bool = False,
        num_copies: int = 1,
    ) -> None:
        """Give every router its counters; a collective over pipeline stages.

        Args:
            model_parts: this rank's parts of the model.
            moe_layers: returns a part's layers with experts; None: the family has none.
            rate: update of a bias per step.
            mesh: mesh over which counts are summed.
            device: device of the counts.
            measures: compute the metrics of routers and record each layer's, also if routers have
                no losses.
            num_copies: ranks that route the same tokens, whose gradients are summed.
        """
        self._rate, self._mesh, self._num_copies = rate, mesh, num_copies
        layers = [layer for part in model_parts for layer in moe_layers(part)] if moe_layers else []
        names = {m: name for part in model_parts for name, m in part.named_modules()}
        local_names = [names[layer].rpartition(".")[0] for layer in layers]
        self._routers = [layer.router for layer in layers]
        pp_group = mesh.get_group("pp")
        self._pp_group = pp_group if moe_layers and pp_group.size() > 1 else None
        stages: list[Any] = [local_names]
        if self._pp_group is not None:
            stages *= self._pp_group.size()
            dist.all_gather_object(stages, local_names, self._pp_group)
        self.layers = sorted(chain(*stages), key=lambda name: (len(name), name))
        rows = [self.layers.index(name) for name in local_names]
        self._rows = torch.tensor(rows, dtype=torch.int64, device=device)
        experts = self._routers[0].expert_bias.numel() if layers else 0
        self.loads_LE = torch.zeros(len(layers), experts, dtype=torch.int64, device=device)
        self._sums_LM = torch.zeros(len(layers), len(ROUTER_METRICS) - 1, device=device)
        self._by_layer = measures
        self._has_sums = measures or any(router.has_losses for router in self._routers)
        self._num_sequences, self._loss_scale = torch.ones(2, device=device)
        for i, router in enumerate(self._routers):
            sums_M = self._sums_LM[i] if self._has_sums else None
            router.step = RouterStep(self.loads_LE[i], sums_M, self._loss_scale, add_in_forward)

    def begin_passes(self, num_sequences: Tensor) -> None:
        """Begin a global batch, or begin it again."""
        if not self._routers:
            return
        self.loads_LE.zero_()
        self._sums_LM.zero_()
        self._num_sequences.copy_(num_sequences.clamp(min=1))
        self._loss_scale.copy_(1 / (self._num_sequences * self._num_copies))

    def reduce(self, replica: int = 0, num_replicas: int = 1) -> list[Tensor]:
        """Sum the loads over all ranks in place; return them, and further sums, if any."""
        if not self._routers:
            return []
        sums = [self.loads_LE, self._sums_LM] if self._has_sums else [self.loads_LE]
        axes = self._mesh.router_axes
        return [self._mesh.all_reduce_dp_cp(each, *axes) for each in sums]

    @torch.no_grad()
    def update(self, skip: Tensor) -> None:
        """Move every bias, and note the loads."""
        if not self._routers:
            return
        loads_LE = self.loads_LE.double()
        excess_LE = loads_LE / loads_LE.mean(1, keepdim=True).clamp(min=1e-9) - 1
        moves_LE = (-self._rate * excess_LE.sign()).float().masked_fill(skip, 0.0)
        torch._foreach_add_([router.expert_bias for router in self._routers], list(moves_LE))
        for router, new_E in zip(self._routers, excess_LE.float(), strict=True):
            if router.config.router_aux_loss_scope == "global":
                router.excess_load.copy_(new_E.where(~skip, router.excess_load))

    def measure(self) -> Tensor:
        """Return `ROUTER_METRICS` of each layer; a collective over pipeline stages.

        Returns:
            Float32 (layers, 5) on the device; zeros if only loads are known.
        """
        shape = len(self.layers), len(ROUTER_METRICS)
        table = torch.zeros(shape, device=self.loads_LE.device)
        if self._routers:
            loads_LE = self.loads_LE.float()
            max_L = loads_LE.amax(1) / loads_LE.mean(1).clamp(min=1e-9)
            means_LM = self._sums_LM / self._num_sequences
            table.index_copy_(0, self._rows, torch.cat((max_L.unsqueeze(1), means_LM), dim=1))
        if self._pp_group is not None:
            dist.all_reduce(table, group=self._pp_group)
        return table

    def fields(self, values: Sequence[float]) -> dict[str, Any]:
        """Return the worst load and the mean losses; if asked for, metrics of each layer."""
        if not values:
            return {}
        columns = {name: values[i :: len(ROUTER_METRICS)] for i, name in enumerate(ROUTER_METRICS)}
        losses = {
            name: statistics.mean(column)
            for name, column in columns.items()
            if name.endswith("_loss") and any(column)
        }
        layer_metrics = {
            f"{name}/{layer}": value
            for name, column in columns.items()
            for layer, value in zip(self.layers, column, strict=True)
            if self._by_layer
        }
        max_load = max(columns["moe_max_load"])
        return {"moe_max_load": max_load, "router_metrics": (losses | layer_metrics) or None}
