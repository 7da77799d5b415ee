"""The gradient norm of each layer, to see where training goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.parallel.dtensor import l2_norms, to_local


class LayerNorms:
    """L2 norms of the gradients of each layer of the whole model.

    A layer is a block, or a module beside them that has parameters: the embedding, the last norm,
    the head.  ``names`` has all of them in the order of the model.
    """

    def __init__(
        self, parts: list[nn.Module], blocks: Callable[[Any], list[nn.Module]], pp: int
    ) -> None:
        """Every rank calls it.  ``pp``: ranks of the pipeline, each with layers of its own."""
        layers: list[str] = []
        self._params: list[nn.Parameter] = []
        for part in parts:
            inside = set(blocks(part))
            names = [f"{name}." for name, module in part.named_modules() if module in inside]
            for name, param in part.named_parameters():
                block = next((block for block in names if name.startswith(block)), "")
                layers.append(block.removesuffix(".") or name.rpartition(".")[0])
                self._params.append(param)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, list(dict.fromkeys(layers)))
        self.names = list(dict.fromkeys(name for names in every for name in names))
        # What several ranks hold counts on each of them in part.
        holders = dist.get_world_size() // pp
        parts_of = [_shards(param) / holders for param in self._params]
        device = self._params[0].device if self._params else torch.device("cpu")
        self._share = torch.tensor(parts_of, device=device)
        self._layer = torch.tensor([self.names.index(name) for name in layers], device=device)
        self._none = torch.zeros(1, device=device)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Of the gradients that there are now: float32 ``[layers]`` on their device, the same on
        all ranks, and not waited for."""
        grads = [self._none if param.grad is None else param.grad for param in self._params]
        here = [to_local(grad) for grad in grads]
        squares = torch.zeros(len(self.names), device=self._none.device)
        if here:
            norms = l2_norms(here)
            squares.index_add_(0, self._layer, norms.square() * self._share)
        if dist.get_world_size() > 1:
            dist.all_reduce(squares)
        return squares.sqrt()


def _shards(param: nn.Parameter) -> int:
    """Over how many ranks one copy of the parameter is spread."""
    if not isinstance(param, DTensor):
        return 1
    mesh = param.device_mesh
    cut = (axis for axis, placed in enumerate(param.placements) if not placed.is_replicate())
    return prod(mesh.size(axis) for axis in cut)
