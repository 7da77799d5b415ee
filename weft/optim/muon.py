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

*Experts.*  Their weights are stacks of matrices, each with its update.  FSDP and expert parallelism
shard a stack between matrices: a rank that has all of a matrix is the owner.

The update is scaled to AdamW's usual size, 0.2 sqrt(max(rows, columns)), so that learning rate and
weight decay mean the same for both (Moonlight, arXiv:2502.16982, section 2.2).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from weft.config.schema import OptimSection
from weft.models.layers import is_fake
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
        groups: parameter groups; those with ``matrices`` have matrices and stacks of them.
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
                local.sub_(update * (lr * 0.2 * math.sqrt(max(param.shape[-2:]))))

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
    """Return about U V' of each matrix U S V' ``[..., rows, columns]``, in its dtype.

    Singular values end between 0.68 and 1.21; those below 0.002 of the norm may stay smaller, and
    so do all of a matrix whose norm is below 1e-7, the eps of torch.optim.Muon.
    """
    is_wide = matrix.shape[-2] <= matrix.shape[-1]
    x = matrix.reshape(-1, *matrix.shape[-2:])
    x = x if is_wide else x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return (x if is_wide else x.mT).reshape(matrix.shape)


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


class _Matrix(NamedTuple):
    """A matrix of a parameter: the parameter itself, or one of a stack.

    Attributes:
        param: index of the parameter.
        item: index in the stack.
        parts: offsets and sizes of each rank's part.
    """

    param: int
    item: int
    parts: list[tuple[list[int], list[int]]]

    def part_numel(self, rank: int) -> int:
        """Return the number of elements that a rank holds."""
        return math.prod(self.parts[rank][1])


class _MatrixExchange:
    """Matrices that are sharded over one group, and the rank that owns each."""

    def __init__(self, params: list[Any], group: dist.ProcessGroup | None) -> None:
        self.group, self.rank = group, 0 if group is None else group.rank()
        size = 1 if group is None else group.size()
        self.params, self.shapes = params, [_stack_shape(param.shape) for param in params]
        layout = [
            (_stack_shape(shard_offsets(param), 0), _stack_shape(to_local(param).shape))
            for param in params
        ]
        layouts = [layout]
        if group is not None:
            layouts = [layout] * size
            dist.all_gather_object(layouts, layout, group=group)
        self.first_items = [offsets[0] for offsets, _ in layout]
        matrices = [
            _Matrix(p, item, [_part(*layout[p], item) for layout in layouts])
            for p, shape in enumerate(self.shapes)
            for item in range(shape[0])
        ]
        owners = self._assign_owners(matrices, size)
        self.owned = [
            matrix for matrix, owner in zip(matrices, owners, strict=True) if owner == self.rank
        ]
        # An all-to-all sends them by owner.
        order = sorted(range(len(owners)), key=owners.__getitem__)
        self.sent = [matrices[i] for i in order]
        self.to_owners = [0] * size
        for matrix, owner in zip(matrices, owners, strict=True):
            self.to_owners[owner] += matrix.part_numel(self.rank)
        self.from_ranks = [sum(m.part_numel(rank) for m in self.owned) for rank in range(size)]

    def _assign_owners(self, matrices: list[_Matrix], size: int) -> list[int]:
        """Return the owner of each matrix: the one rank with all of it, or any."""
        work, owners, split = [0] * size, [0] * len(matrices), []
        is_traced = is_fake(to_local(self.params[0]))
        for i, matrix in enumerate(matrices):
            num_items, rows, columns = self.shapes[matrix.param]
            cost = rows * columns * min(rows, columns)
            holders = [r for r in range(size) if matrix.part_numel(r) == rows * columns]
            # Ranks of a trace know no other rank's experts, and report these as their own.
            if len(holders) == 1 or (holders and is_traced and num_items > 1):
                owners[i] = self.rank if self.rank in holders else holders[0]
                work[owners[i]] += cost
            else:
                split.append((cost, i))
        for cost, i in sorted(split, key=lambda item: -item[0]):
            owners[i] = work.index(min(work))
            work[owners[i]] += cost
        return owners

    def orthogonalize(self, shards: list[Tensor]) -> list[Tensor]:
        """Replace this rank's shards by shards of the orthogonalized matrices, same dtype."""
        if self.group is None:
            return [orthogonalize(_to_compute_dtype(shard)).to(shard.dtype) for shard in shards]
        device = torch.device(self.params[0].device_mesh.device_type)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        local = [_to_compute_dtype(shard.to(device)) for shard in shards]
        parts = [self._part_of(local[matrix.param], matrix) for matrix in self.sent]
        send = torch.cat([part.flatten() for part in parts])
        receive = send.new_empty(sum(self.from_ranks))
        dist.all_to_all_single(receive, send, self.from_ranks, self.to_owners, group=self.group)

        # Unshard the owned matrices, then copy the results back into the receive buffer.
        counts = Counter(matrix.param for matrix in self.owned)
        stacks = {p: receive.new_empty(n, *self.shapes[p][1:]) for p, n in counts.items()}
        unsharded = [matrix for p in counts for matrix in stacks[p].unbind()]
        views = [
            _narrow(full, *matrix.parts[rank])
            for rank in range(len(self.from_ranks))
            for full, matrix in zip(unsharded, self.owned, strict=True)
        ]
        chunks = torch.split(receive, [view.numel() for view in views])
        for view, values in zip(views, chunks, strict=True):
            view.copy_(values.view(view.shape))
        for stack in stacks.values():
            stack.copy_(orthogonalize(stack))
        for view, values in zip(views, chunks, strict=True):
            values.copy_(view.reshape(-1))
        dist.all_to_all_single(send, receive, self.to_owners, self.from_ranks, group=self.group)
        returned = torch.split(send, [part.numel() for part in parts])
        for part, values in zip(parts, returned, strict=True):
            part.copy_(values.view(part.shape))
        return [new.to(old) for new, old in zip(local, shards, strict=True)]

    def _part_of(self, shard: Tensor, matrix: _Matrix) -> Tensor:
        """Return this rank's part of a matrix, a view of its shard."""
        stack = shard.view(_stack_shape(shard.shape))
        if not matrix.part_numel(self.rank):
            return stack.new_empty(0)
        return stack[matrix.item - self.first_items[matrix.param]]


def _stack_shape(shape: Sequence[int], stack: int = 1) -> list[int]:
    """Return the sizes or offsets of a stack of matrices; a matrix is a stack of one."""
    return [*[stack] * (3 - len(shape)), *shape]


def _part(offsets: list[int], sizes: list[int], item: int) -> tuple[list[int], list[int]]:
    """Return offsets and sizes of a shard in one matrix of a stack."""
    has_part = offsets[0] <= item < offsets[0] + sizes[0]
    return (offsets[1:], sizes[1:]) if has_part else ([0, 0], [0, 0])


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
