"""Muon: momentum whose matrices are orthogonalized before they are applied.

A step of SGD with momentum moves a matrix mostly along a few directions.  Muon (Jordan et al.,
2024, kellerjordan.github.io/posts/muon) gives all directions the same length: it replaces U S V' by
U V', with a few Newton-Schulz iterations, which are matrix products.  Muon needs unsharded matrices
and applies to the blocks' matrices only; AdamW updates all other parameters.

*Sharding.*  Every rank holds a shard of each matrix.  If every rank gathered every matrix, n ranks
would repeat the same work.  Instead each matrix has an owner: one all-to-all sends the shards to
the owner, which orthogonalizes the matrix, and a second all-to-all returns the results.  Matrices
are assigned to owners by cost, for equal work.  An all-to-all moves as many bytes as a rank holds
of the model in bfloat16.  The layout is read from the tensors, so FSDP, tensor parallelism and both
together work alike.

The update is scaled to AdamW's usual size, 0.2 sqrt(max(rows, columns)), so that learning rate and
weight decay mean the same for both (Moonlight, arXiv:2502.16982, section 2.2).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from weft.config.schema import OptimSection
from weft.optim.optimizer import adamw_options
from weft.parallel.dtensor import is_dtensor, shard_offsets, to_local
from weft.parallel.mesh import Groups, create_mesh
from weft.parallel.private import without_fake_tensors

NEWTON_SCHULZ_STEPS = 5
# Quintic iteration with maximal slope at zero; singular values end between 0.68 and 1.21.
A, B, C = 3.4445, -4.7750, 2.0315


class Muon(torch.optim.AdamW):
    """Muon for groups with ``matrices`` true, fused AdamW for the others.

    Args:
        groups: parameter groups; those with ``matrices`` have 2-D parameters only.
        momentum: Nesterov momentum of the matrices.
        **adamw: options of torch's AdamW.
    """

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float, **adamw: Any) -> None:
        super().__init__(groups, fused=True, **adamw)
        self.momentum = momentum
        self._exchanges: list[_MatrixExchange] | None = None
        # Process groups are created collectively, also by ranks that hold no shard.
        self._groups: Groups = {}
        for group in groups:
            for param in group["params"]:
                _shard_group(param, self._groups)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters; closures are not supported."""
        assert closure is None
        all_groups = self.param_groups
        self.param_groups = [group for group in all_groups if not group["matrices"]]
        try:
            super().step()
        finally:
            self.param_groups = all_groups
        groups = [group for group in all_groups if group["matrices"]]
        group_by_param = {
            param: group for group in groups for param in group["params"] if param.grad is not None
        }
        if self._exchanges is None:
            self._exchanges = _build_exchanges(list(group_by_param), self._groups)
        for exchange in self._exchanges:
            directions = [self._direction(param) for param in exchange.params]
            for param, update in zip(
                exchange.params, exchange.orthogonalize(directions), strict=True
            ):
                lr: Any = group_by_param[param]["lr"]
                local = to_local(param).detach()
                if (found_inf := getattr(self, "found_inf", None)) is not None:
                    lr = lr * (1 - found_inf)
                local.mul_(1 - lr * group_by_param[param]["weight_decay"])
                local.sub_(update * (lr * 0.2 * math.sqrt(max(param.shape))))

    def _direction(self, param: Tensor) -> Tensor:
        """Return the Nesterov momentum; zeros if the step is skipped."""
        assert param.grad is not None
        grad, state = to_local(param.grad), self.state[param]
        if (grad_scale := getattr(self, "grad_scale", None)) is not None:
            grad = grad / grad_scale
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param)
        buffer = to_local(state["momentum_buffer"])
        if (found_inf := getattr(self, "found_inf", None)) is None:
            buffer.lerp_(grad, 1 - self.momentum)
            return grad.lerp(buffer, self.momentum)
        skip = found_inf > 0
        buffer.copy_(torch.where(skip, buffer, buffer.lerp(grad, 1 - self.momentum)))
        return grad.lerp(buffer, self.momentum).masked_fill(skip, 0.0)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return about U V' of a matrix U S V', in its dtype.

    Singular values end between 0.68 and 1.21; those below 0.002 of the norm may stay smaller, and
    so do all of a matrix whose norm is below 1e-7, the eps of torch.optim.Muon.
    """
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def _shard_group(param: Tensor, groups: Groups) -> dist.ProcessGroup | None:
    """Return the ranks over which a parameter is sharded; None if it is unsharded.

    Collective over all ranks if it is sharded over several axes.  Their groups are in ``groups``.
    """
    if not is_dtensor(param):
        return None
    mesh: DeviceMesh = param.device_mesh
    names = mesh.mesh_dim_names
    assert names is not None
    axes = [name for name in names if name != "dp_replicate" and mesh[name].size() > 1]
    if len(axes) < 2:
        return mesh.get_group(axes[0]) if axes else None
    with without_fake_tensors():
        ranks = mesh[tuple(axes)].mesh.flatten()
        return create_mesh(mesh.device_type, ranks, (" x ".join(axes),), groups).get_group()


def _build_exchanges(params: list[Any], groups: Groups) -> list[_MatrixExchange]:
    by_group: dict[dist.ProcessGroup | None, list[Any]] = {}
    for param in params:
        by_group.setdefault(_shard_group(param, groups), []).append(param)
    return [_MatrixExchange(group_params, group) for group, group_params in by_group.items()]


class _MatrixExchange:
    """Matrices that are sharded over one group, and the rank that owns each."""

    def __init__(self, params: list[Any], group: dist.ProcessGroup | None) -> None:
        self.params, self.group = params, group
        size = 1 if group is None else group.size()
        layout = [(shard_offsets(param), list(to_local(param).shape)) for param in params]
        self.layouts = [layout]
        if group is not None:
            self.layouts = [layout] * size
            dist.all_gather_object(self.layouts, layout, group=group)
        work = [0.0] * size
        self.owners = [0] * len(params)
        cost = [param.numel() * min(param.shape) for param in params]
        for index in sorted(range(len(params)), key=lambda index: -cost[index]):
            self.owners[index] = work.index(min(work))
            work[self.owners[index]] += cost[index]
        rank = 0 if group is None else group.rank()
        self.owned = [index for index, owner in enumerate(self.owners) if owner == rank]
        self.order = sorted(range(len(params)), key=lambda index: self.owners[index])

    def orthogonalize(self, shards: list[Tensor]) -> list[Tensor]:
        """Replace this rank's shards by shards of the orthogonalized matrices, same dtype."""
        if self.group is None:
            return [orthogonalize(_to_compute_dtype(shard)).to(shard.dtype) for shard in shards]
        device = torch.device(self.params[0].device_mesh.device_type)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        send = torch.cat(
            [_to_compute_dtype(shards[index].to(device)).flatten() for index in self.order]
        )
        to_owners = [0] * self.group.size()
        for index in self.order:
            to_owners[self.owners[index]] += shards[index].numel()
        from_ranks = [
            sum(math.prod(layout[index][1]) for index in self.owned) for layout in self.layouts
        ]
        receive = send.new_empty(sum(from_ranks))
        dist.all_to_all_single(receive, send, from_ranks, to_owners, group=self.group)

        # Unshard the owned matrices, then copy the results back into the receive buffer.
        matrices = {index: receive.new_empty(self.params[index].shape) for index in self.owned}
        views = [
            _narrow(matrices[index], *layout[index])
            for layout in self.layouts
            for index in self.owned
        ]
        chunks = torch.split(receive, [view.numel() for view in views])
        for view, values in zip(views, chunks, strict=True):
            view.copy_(values.view(view.shape))
        for matrix in matrices.values():
            matrix.copy_(orthogonalize(matrix))
        for view, values in zip(views, chunks, strict=True):
            values.copy_(view.reshape(-1))
        dist.all_to_all_single(send, receive, to_owners, from_ranks, group=self.group)
        result = list(shards)
        returned = torch.split(send, [shards[index].numel() for index in self.order])
        for index, values in zip(self.order, returned, strict=True):
            result[index] = values.view(shards[index].shape).to(shards[index])
        return result


def _to_compute_dtype(shard: Tensor) -> Tensor:
    """Cast to bfloat16 on GPUs, where it suffices and is fast."""
    return shard.bfloat16() if shard.device.type == "cuda" else shard


def _narrow(matrix: Tensor, offsets: list[int], sizes: list[int]) -> Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        matrix = matrix.narrow(dim, offset, size)
    return matrix


def build_muon(groups: list[dict[str, object]], optim: OptimSection) -> Optimizer:
    """Build Muon for the blocks' matrices, AdamW for the rest."""
    return Muon(groups, momentum=optim.momentum, **adamw_options(optim))
