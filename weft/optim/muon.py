"""Muon: momentum whose matrices are made orthogonal before they are applied.

A step of SGD with momentum moves a matrix mostly along a few directions.  Muon (Jordan et al.,
2024, kellerjordan.github.io/posts/muon) gives all of them the same length: of U S V' it takes
U V', by a few steps of a Newton-Schulz iteration, which are matrix products.  That needs a matrix
whole, and it is for the matrices of the blocks alone; everything else is AdamW's.

*Under sharding* every rank has a piece of each matrix.  To gather all of them on every rank would
compute the same n times.  So each matrix has an owner: one exchange brings the pieces to it, it
computes, and one exchange takes the pieces of the result back.  The matrices are dealt out so that
the owners have about equally much to do; an exchange moves as many bytes as a rank has of the model
in bfloat16.  Which matrices are one whole and which pieces they have is asked of the tensors, so it
works alike for FSDP, tensor parallelism, and both.

The size of the update is brought to what AdamW's usually is, 0.2 sqrt(max(rows, columns)), so that
learning rate and weight decay mean the same for both (Moonlight, arXiv:2502.16982, section 2.2).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from weft.parallel.dtensor import to_local, shard_offsets
from weft.parallel.private import get_flat_group

STEPS = 5
# Of the quintic iteration: steepest at zero, while singular values end between 0.68 and 1.21.
A, B, C = 3.4445, -4.7750, 2.0315


class Muon(torch.optim.AdamW):
    """Muon for groups with ``matrices`` true, fused AdamW for the others.

    Args:
        groups: parameter groups; their ``matrices`` are two-dimensional.
        momentum: of the matrices, in Nesterov's form.
    """

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float, **adamw: Any) -> None:
        super().__init__(groups, fused=True, **adamw)
        self.momentum = momentum
        self._exchanges: list[_Exchange] | None = None
        # Every rank makes the groups, whatever it holds.
        for group in groups:
            for param in group["params"]:
                _group_of(param)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of all parameters.  No closure."""
        assert closure is None
        everything = self.param_groups
        self.param_groups = [group for group in everything if not group["matrices"]]
        try:
            super().step()
        finally:
            self.param_groups = everything
        groups = [group for group in everything if group["matrices"]]
        of = {
            param: group for group in groups for param in group["params"] if param.grad is not None
        }
        if self._exchanges is None:
            self._exchanges = _exchanges(list(of))
        for exchange in self._exchanges:
            directions = [self._direction(param) for param in exchange.params]
            for param, update in zip(exchange.params, exchange.run(directions), strict=True):
                lr: Any = of[param]["lr"]
                live = to_local(param).detach()
                if (bad := getattr(self, "found_inf", None)) is not None:
                    lr = lr * (1 - bad.to(live.device))
                live.mul_(1 - lr * of[param]["weight_decay"])
                live.sub_(update * (lr * 0.2 * math.sqrt(max(param.shape))))

    def _direction(self, param: Tensor) -> Tensor:
        """Momentum, looking ahead; zeros where nothing may change."""
        assert param.grad is not None
        grad, state = to_local(param.grad), self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param)
        buffer = to_local(state["momentum_buffer"])
        if (bad := getattr(self, "found_inf", None)) is None:
            buffer.lerp_(grad, 1 - self.momentum)
            return grad.lerp(buffer, self.momentum)
        skip = bad.to(grad.device) > 0  # elsewhere under parallel.cpu_offload
        buffer.copy_(torch.where(skip, buffer, buffer.lerp(grad, 1 - self.momentum)))
        return grad.lerp(buffer, self.momentum).masked_fill(skip, 0.0)


def orthogonal(matrix: Tensor) -> Tensor:
    """About U V' of a matrix U S V', in its dtype: singular values from 0.68 to 1.21; what is
    below 0.002 of the norm may stay smaller."""
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def _group_of(param: Tensor) -> dist.ProcessGroup | None:
    """The ranks that together hold a parameter's mesh whole; None where it is on this one."""
    if not isinstance(param, DTensor):
        return None
    mesh: DeviceMesh = param.device_mesh
    names = mesh.mesh_dim_names
    assert names is not None
    axes = [name for name in names if name != "dp_replicate" and mesh[name].size() > 1]
    if len(axes) < 2:
        return mesh.get_group(axes[0]) if axes else None
    return get_flat_group(mesh, tuple(axes))


def _exchanges(params: list[Any]) -> list[_Exchange]:
    by_group: dict[dist.ProcessGroup | None, list[Any]] = {}
    for param in params:
        by_group.setdefault(_group_of(param), []).append(param)
    return [_Exchange(some, group) for group, some in by_group.items()]


class _Exchange:
    """Matrices of which the ranks of one group hold pieces, and who computes which."""

    def __init__(self, params: list[Any], group: dist.ProcessGroup | None) -> None:
        self.params, self.group = params, group
        size = 1 if group is None else group.size()
        own = [(shard_offsets(param), list(to_local(param).shape)) for param in params]
        self.pieces = [own]
        if group is not None:
            self.pieces = [own] * size
            dist.all_gather_object(self.pieces, own, group=group)
        work = [0.0] * size
        self.owners = [0] * len(params)
        cost = [param.numel() * min(param.shape) for param in params]
        for index in sorted(range(len(params)), key=lambda index: -cost[index]):
            self.owners[index] = work.index(min(work))
            work[self.owners[index]] += cost[index]
        me = 0 if group is None else group.rank()
        self.mine = [index for index, owner in enumerate(self.owners) if owner == me]
        self.dealt = sorted(range(len(params)), key=lambda index: self.owners[index])

    def run(self, pieces: list[Tensor]) -> list[Tensor]:
        """Pieces of matrices to pieces of the orthogonal ones, in the dtype of the pieces."""
        if self.group is None:
            return [orthogonal(_coarse(piece)).to(piece.dtype) for piece in pieces]
        device = torch.device(self.params[0].device_mesh.device_type)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        sent = torch.cat([_coarse(pieces[index].to(device)).flatten() for index in self.dealt])
        to_owners = [0] * self.group.size()
        for index in self.dealt:
            to_owners[self.owners[index]] += pieces[index].numel()
        from_holders = [
            sum(math.prod(held[index][1]) for index in self.mine) for held in self.pieces
        ]
        got = sent.new_empty(sum(from_holders))
        dist.all_to_all_single(got, sent, from_holders, to_owners, group=self.group)

        # Whole; then back into the places that the pieces came from.
        whole = {index: got.new_empty(self.params[index].shape) for index in self.mine}
        views = [_part(whole[index], *held[index]) for held in self.pieces for index in self.mine]
        flat = torch.split(got, [view.numel() for view in views])
        for view, values in zip(views, flat, strict=True):
            view.copy_(values.view(view.shape))
        for matrix in whole.values():
            matrix.copy_(orthogonal(matrix))
        for view, values in zip(views, flat, strict=True):
            values.copy_(view.reshape(-1))
        dist.all_to_all_single(sent, got, to_owners, from_holders, group=self.group)
        result = list(pieces)
        back = torch.split(sent, [pieces[index].numel() for index in self.dealt])
        for index, values in zip(self.dealt, back, strict=True):
            result[index] = values.view(pieces[index].shape).to(pieces[index])
        return result


def _coarse(piece: Tensor) -> Tensor:
    """In the dtype to compute in: bfloat16 suffices, and is fast on GPUs only."""
    return piece.bfloat16() if piece.device.type == "cuda" else piece


def _part(matrix: Tensor, offsets: list[int], sizes: list[int]) -> Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        matrix = matrix.narrow(dim, offset, size)
    return matrix
