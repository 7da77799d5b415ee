"""Gradient norm of each layer, to find the layer in which training goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.parallel.dtensor import is_dtensor, l2_norms, to_local


class LayerGradNorms:
    """L2 norms of the gradients of each layer of the unsharded model.

    A layer is a block, or another module with parameters: the embedding, the last norm, the head.
    ``names`` lists the layers of all ranks, in the order of the model.  Every rank creates this
    object; ``pp``: number of pipeline ranks, which have different layers.
    """

    def __init__(
        self, model_parts: list[nn.Module], blocks: Callable[[Any], list[nn.Module]], pp: int
    ) -> None:
        layers: list[str] = []
        self._params: list[nn.Parameter] = []
        for part in model_parts:
            part_blocks = set(blocks(part))
            prefixes = [f"{name}." for name, m in part.named_modules() if m in part_blocks]
            for name, param in part.named_parameters():
                block = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
                layers.append(block.removesuffix(".") or name.rpartition(".")[0])
                self._params.append(param)
        all_layers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_layers, list(dict.fromkeys(layers)))
        self.names = list(dict.fromkeys(name for names in all_layers for name in names))
        # Several ranks have the same shard, so each counts a fraction of it.
        num_ranks = dist.get_world_size() // pp
        weights = [_num_shards(param) / num_ranks for param in self._params]
        device = self._params[0].device if self._params else torch.device("cpu")
        self._weights = torch.tensor(weights, device=device)
        self._layer = torch.tensor([self.names.index(name) for name in layers], device=device)
        self._zero = torch.zeros(1, device=device)

    @torch.no_grad()
    def compute_norms(self) -> Tensor:
        """Return the norms of the current gradients: float32 (layers,); a collective.

        The tensor is on the device, the same on all ranks; the host does not wait for it.
        """
        grads = [self._zero if param.grad is None else param.grad for param in self._params]
        local = [to_local(grad) for grad in grads]
        squares = torch.zeros(len(self.names), device=self._zero.device)
        if local:
            norms = l2_norms(local)
            squares.index_add_(0, self._layer, norms.square() * self._weights)
        if dist.get_world_size() > 1:
            dist.all_reduce(squares)
        return squares.sqrt()


def _num_shards(param: nn.Parameter) -> int:
    """Return the number of ranks that share one copy of a parameter."""
    if not is_dtensor(param):
        return 1
    mesh = param.device_mesh
    dims = (dim for dim, placement in enumerate(param.placements) if not placement.is_replicate())
    return prod(mesh.size(dim) for dim in dims)
