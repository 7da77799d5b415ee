"""Muon: momentum whose matrices are orthogonalized before they are applied.

A step of SGD with momentum moves a matrix mostly along a few directions.  Muon (Jordan et al.,
2024, kellerjordan.github.io/posts/muon) gives all directions the same length: it replaces U S V' by
U V', with a few Newton-Schulz iterations, which are matrix products.  Muon needs unsharded matrices
and applies to the blocks' matrices only; AdamW updates all other parameters.

*Sharding.*  Every rank holds a shard of each matrix.  If every rank gathered every matrix, n ranks
would repeat the same work.  Instead each matrix has an owner: one all-to-all sends the shards to
the owner, which orthogonalizes the matrix, and a second all-to-all returns the results.  Matrices
are assigned to owners by cost, for equal work.  The layout is read from the tensors, so FSDP,
tensor parallelism and both together work alike.

*Replicas* (HSDP, and weights that tensor parallelism replicates) share the work, too.  Each part of
a matrix is sent once, by a rank of the owner's replica if one has it, and every rank that holds the
part receives the result.  So a rank receives as many bytes as it holds of the model in bfloat16,
and sends as many; to its owners it sends only its replica's share.

*Experts.*  Their weights are stacks of matrices, each with its update.  FSDP and expert parallelism
shard a stack between matrices: one of the ranks that have all of a matrix is the owner.

The update is scaled to AdamW's usual size, 0.2 sqrt(max(rows, columns)), so that learning rate and
weight decay mean the same for both (Moonlight, arXiv:2502.16982, section 2.2).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from weft.optim.low_precision_adamw import MUON_MOMENTS, LowPrecisionAdamW
from weft.parallel.dtensor import is_dtensor, shard_bounds, to_local
from weft.parallel.mesh import Groups, create_mesh
from weft.parallel.private import without_fake_tensors

NEWTON_SCHULZ_STEPS = 5
# Quintic iteration with maximal slope at zero; singular values end between 0.68 and 1.21.
A, B, C = 3.4445, -4.7750, 2.0315


class Muon(LowPrecisionAdamW):
    """Muon for groups with ``matrices`` true, AdamW for the others.

    Args:
        groups: parameter groups; those with ``matrices`` have matrices and stacks of them, and may
            have another ``momentum``.
        momentum: Nesterov momentum of the matrices.
        **adamw: options of `LowPrecisionAdamW`; ``state_dtype`` is also that of the momentum.
    """

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float, **adamw: Any) -> None:
        super().__init__(groups, **adamw)
        self._exchanges: list[_MatrixExchange] | None = None
        # Process groups are created collectively, also by ranks that hold no shard.
        self._groups: Groups = {}
        for group in self.param_groups:
            if group["matrices"]:  # its momentum takes the place of beta1
                group["betas"] = (group.get("momentum", momentum), 0.0)
                group["moments"] = MUON_MOMENTS
            for param in group["params"]:
                _shard_group(param, self._groups)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters; closures are not supported."""
        super().step(closure)  # for matrices it only writes the direction
        groups = [group for group in self.param_groups if group["matrices"]]
        group_by_param = {param: group for group in groups for param in group["params"]}
        if self._exchanges is None:
            self._exchanges = _build_exchanges(list(self.directions), self._groups)
        for exchange in self._exchanges:
            directions = [self.directions[param] for param in exchange.params]
            for param, update in zip(
                exchange.params, exchange.orthogonalize(directions), strict=True
            ):
                lr: Any = group_by_param[param]["lr"]
                local = to_local(param).detach()
                if self.found_inf is not None:
                    lr = lr * (1 - self.found_inf)
                local.mul_(1 - lr * group_by_param[param]["weight_decay"])
                local.sub_(update * (lr * 0.2 * math.sqrt(max(param.shape[-2:]))))
        self.directions.clear()


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
    """Return the ranks that hold a parameter, or parts of it; None: only this one.

    Collective over all ranks if their mesh has several axes.  Those groups are in ``groups``.
    """
    if not is_dtensor(param):
        return None
    mesh: DeviceMesh = param.device_mesh
    names = mesh.mesh_dim_names
    assert names is not None
    axes = [name for name in names if mesh[name].size() > 1]
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


Part = tuple[list[int], list[int]]  # offsets and sizes of a rank's part of a matrix


class _Matrix(NamedTuple):
    """A matrix of a parameter: the parameter itself, or one of a stack.

    Attributes:
        param: index of the parameter.
        item: index in the stack.
        parts: of the ranks that hold a part.
        owner: rank that orthogonalizes it.
        senders: ranks that send their parts to the owner: each part once.
    """

    param: int
    item: int
    parts: dict[int, Part]
    owner: int = 0
    senders: Collection[int] = ()

    def part_numel(self, rank: int) -> int:
        """Return the number of elements that a rank holds."""
        return math.prod(self.parts[rank][1])


class _MatrixExchange:
    """Matrices that are held by one group of ranks, and the rank that owns each."""

    def __init__(self, params: list[Any], group: dist.ProcessGroup | None) -> None:
        self.group, self.rank = group, 0 if group is None else group.rank()
        size = 1 if group is None else group.size()
        self.params, self.shapes = params, [_stack_shape(param.shape) for param in params]
        matrices = [
            matrix
            for p, param in enumerate(params)
            for matrix in _list_matrices(p, self.shapes[p][0], _layouts(param, group))
        ]
        # An all-to-all sends them by owner.
        matrices = sorted(self._assign_owners(matrices, size), key=lambda m: m.owner)
        self.owned = [matrix for matrix in matrices if matrix.owner == self.rank]
        self.held = [matrix for matrix in matrices if self.rank in matrix.parts]
        self.sent = [matrix for matrix in self.held if self.rank in matrix.senders]
        # (rank, index of an owned matrix)
        self.to_receive = sorted((r, i) for i, m in enumerate(self.owned) for r in m.senders)
        self.to_return = sorted((r, i) for i, m in enumerate(self.owned) for r in m.parts)
        self.first_items = [_stack_shape(shard_bounds(param)[0], 0)[0] for param in params]

    def _assign_owners(self, matrices: list[_Matrix], size: int) -> list[_Matrix]:
        """Return the matrices with their owners: a rank that has all of it, else any."""
        work, choices, assigned = [0] * size, list[tuple[int, int, list[int], _Matrix]](), []
        for matrix in matrices:
            rows, columns = self.shapes[matrix.param][1:]
            holders = [r for r in matrix.parts if matrix.part_numel(r) == rows * columns]
            cost = rows * columns * min(rows, columns)
            choices.append((len(holders) or size, cost, holders, matrix))
        # First those with the least choice, of those the largest.
        for _, cost, holders, matrix in sorted(choices, key=lambda each: (each[0], -each[1])):
            owner = min(holders or range(size), key=work.__getitem__)
            work[owner] += cost
            copies: dict[str, list[int]] = {}
            for rank, part in matrix.parts.items():
                copies.setdefault(str(part), []).append(rank)
            # The ranks of a replica are neighbors in the group.
            width = size // max(map(len, copies.values()))
            nearest = partial(_distance, owner, width)
            senders = {min(ranks, key=nearest) for ranks in copies.values()}
            assigned.append(matrix._replace(owner=owner, senders=senders))
        return assigned

    def orthogonalize(self, shards: list[Tensor]) -> list[Tensor]:
        """Replace this rank's shards by shards of the orthogonalized matrices, same dtype."""
        if self.group is None:
            return [orthogonalize(_to_compute_dtype(shard)).to(shard.dtype) for shard in shards]
        device = torch.device(self.params[0].device_mesh.device_type)
        if device.type != "cpu":
            device = torch.device(device.type, torch.accelerator.current_device_index())
        local = [_to_compute_dtype(shard.to(device)) for shard in shards]
        counts = Counter(matrix.param for matrix in self.owned)
        stacks = {p: local[0].new_empty(n, *self.shapes[p][1:]) for p, n in counts.items()}
        items = {p: iter(stack.unbind()) for p, stack in stacks.items()}
        owned = [next(items[matrix.param]) for matrix in self.owned]

        def part_of(matrix: _Matrix) -> tuple[int, Tensor]:
            stack = local[matrix.param].view(_stack_shape(local[matrix.param].shape))
            return matrix.owner, stack[matrix.item - self.first_items[matrix.param]]

        def part_for(rank: int, i: int) -> tuple[int, Tensor]:
            return rank, _narrow(owned[i], *self.owned[i].parts[rank])

        # Unshard the owned matrices; return the results to all ranks with a part.
        received = [part_for(*each) for each in self.to_receive]
        self._exchange(local[0], [part_of(matrix) for matrix in self.sent], received)
        for stack in stacks.values():
            stack.copy_(orthogonalize(stack))
        returned = [part_for(*each) for each in self.to_return]
        self._exchange(local[0], returned, [part_of(matrix) for matrix in self.held])
        return [new.to(old) for new, old in zip(local, shards, strict=True)]

    def _exchange(
        self, like: Tensor, sent: list[tuple[int, Tensor]], received: list[tuple[int, Tensor]]
    ) -> None:
        """Send tensors to ranks, in their order; overwrite those to receive from ranks."""
        assert self.group is not None
        to_ranks, from_ranks = [0] * self.group.size(), [0] * self.group.size()
        for numels, parts in ((to_ranks, sent), (from_ranks, received)):
            for rank, part in parts:
                numels[rank] += part.numel()
        send = torch.cat([like.new_empty(0), *(part.flatten() for _, part in sent)])
        receive = like.new_empty(sum(from_ranks))
        dist.all_to_all_single(receive, send, from_ranks, to_ranks, group=self.group)
        chunks = torch.split(receive, [part.numel() for _, part in received])
        for (_, part), values in zip(received, chunks, strict=True):
            part.copy_(values.view(part.shape))


def _layouts(param: Any, group: dist.ProcessGroup | None) -> list[Part]:
    """Return each rank's offsets and sizes in a stack of matrices."""
    bounds = [shard_bounds(param)]
    if group is not None:
        with without_fake_tensors():
            mesh, ranks = param.device_mesh.mesh, dist.get_process_group_ranks(group)
            coordinates = [(mesh == rank).nonzero()[0].tolist() for rank in ranks]
        bounds = [shard_bounds(param, coordinate) for coordinate in coordinates]
    return [(_stack_shape(offsets, 0), _stack_shape(sizes)) for offsets, sizes in bounds]


def _list_matrices(param: int, num_items: int, layouts: list[Part]) -> list[_Matrix]:
    """Return the matrices of a parameter with the parts of all ranks."""
    matrices = [_Matrix(param, item, {}) for item in range(num_items)]
    for rank, (offsets, sizes) in enumerate(layouts):
        for item in range(offsets[0], offsets[0] + sizes[0]):
            if math.prod(sizes[1:]):
                matrices[item].parts[rank] = offsets[1:], sizes[1:]
    return matrices


def _distance(owner: int, width: int, rank: int) -> tuple[bool, int]:
    """Return a sort key: the owner, its replica of ``width`` ranks, then others."""
    return rank // width != owner // width, abs(rank - owner)


def _stack_shape(shape: Sequence[int], stack: int = 1) -> list[int]:
    """Return the sizes or offsets of a stack of matrices; a matrix is a stack of one."""
    return [*[stack] * (3 - len(shape)), *shape]


def _to_compute_dtype(shard: Tensor) -> Tensor:
    """Cast to bfloat16 on accelerators, where it suffices and is fast."""
    return shard if shard.device.type == "cpu" else shard.bfloat16()


def _narrow(matrix: Tensor, offsets: list[int], sizes: list[int]) -> Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        matrix = matrix.narrow(dim, offset, size)
    return matrix
