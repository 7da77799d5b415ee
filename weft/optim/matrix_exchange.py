"""Exchange of matrices between the ranks that hold their shards and their owners.

Some optimizers need unsharded matrices: `weft.optim.muon` and `weft.optim.soap`.  Every rank holds
a shard of each matrix.  If every rank gathered every matrix, n ranks would repeat the same work.
Instead each matrix has an owner: one all-to-all sends the shards to the owner, which computes, and
a second all-to-all returns the results.  Matrices are assigned to owners by cost, for equal work.
The layout is read from the tensors, so FSDP, tensor parallelism and both together work alike.

*Replicas* (HSDP, and weights that tensor parallelism replicates) share the work, too.  Each part of
a matrix is sent once, by a rank of the owner's replica if one has it, and every rank that holds the
part receives the result.

*Experts.*  Their weights are stacks of matrices.  FSDP and expert parallelism shard a stack between
matrices: one of the ranks that have all of a matrix is the owner.

*Flat state.*  A matrix may have state of another shape, as the n x n statistics of its n rows.
`flat_zeros` shards it evenly over the ranks that hold the matrix, as a 1-D tensor, and
`MatrixExchange.flat_parts` exchanges it with the same owners.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from weft.parallel.dtensor import from_local, is_dtensor, shard_bounds, to_local
from weft.parallel.mesh import Groups, create_mesh
from weft.parallel.private import without_fake_tensors


def shard_group(param: Tensor, groups: Groups) -> dist.ProcessGroup | None:
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


def build_exchanges(params: list[Any], groups: Groups) -> list[MatrixExchange]:
    """Return an exchange for each group of ranks that holds some of the parameters.

    ``groups``: of `shard_group`, which was called for each parameter.
    """
    by_group: dict[dist.ProcessGroup | None, list[Any]] = {}
    for param in params:
        by_group.setdefault(shard_group(param, groups), []).append(param)
    return [MatrixExchange(group_params, group) for group, group_params in by_group.items()]


Part = tuple[list[int], list[int]]  # offsets and sizes of a rank's part of a matrix


class Matrix(NamedTuple):
    """A matrix of a parameter: the parameter itself, or one of a stack.

    Attributes:
        param: index of the parameter.
        item: index in the stack.
        parts: of the ranks that hold a part.
        owner: rank that computes with it.
        senders: ranks that send their parts to the owner: each part once.
        numel: of flat state: its elements.
    """

    param: int
    item: int
    parts: dict[int, Part]
    owner: int = 0
    senders: Collection[int] = ()
    numel: int = 0

    def part_numel(self, rank: int) -> int:
        """Return the number of elements that a rank holds."""
        return math.prod(self.parts[rank][1])

    def owned_by(self, owner: int, size: int) -> Matrix:
        """Return it with an owner among ``size`` ranks, and the nearest senders."""
        copies: dict[str, list[int]] = {}
        for rank, part in self.parts.items():
            copies.setdefault(str(part), []).append(rank)
        # The ranks of a replica are neighbors in the group.
        width = size // max(map(len, copies.values()))
        nearest = partial(_distance, owner, width)
        senders = {min(ranks, key=nearest) for ranks in copies.values()}
        return self._replace(owner=owner, senders=senders)


class MatrixExchange:
    """Matrices that are held by one group of ranks, and the rank that owns each.

    Attributes:
        params: their parameters; stacks have several matrices.
        shapes: of each parameter: matrices, rows, columns.
        parts: the exchange of their shards.
        device: of the process group; shards of parameters may be on the host.
    """

    def __init__(self, params: list[Any], group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.device: torch.device | None = None  # of the collectives; None: that of the shards
        if group is not None:
            self.device = torch.device(params[0].device_mesh.device_type)
            if self.device.type != "cpu":
                index = torch.accelerator.current_device_index()
                self.device = torch.device(self.device.type, index)
        size = 1 if group is None else group.size()
        self.params, self.shapes = params, [_stack_shape(param.shape) for param in params]
        matrices = [
            matrix
            for p, param in enumerate(params)
            for matrix in _list_matrices(p, self.shapes[p][0], _layouts(param, group))
        ]
        # An all-to-all sends them by owner.
        matrices = sorted(self._assign_owners(matrices, size), key=lambda m: m.owner)
        first_items = [_stack_shape(shard_bounds(param)[0], 0)[0] for param in params]

        def part_of(shard: Tensor, matrix: Matrix) -> Tensor:
            stack = shard.view(_stack_shape(shard.shape))
            return stack[matrix.item - first_items[matrix.param]]

        self.parts = PartExchange(matrices, group, part_of)

    def _assign_owners(self, matrices: list[Matrix], size: int) -> list[Matrix]:
        """Return the matrices with their owners: a rank that has all of it, else any."""
        work, choices, assigned = [0] * size, list[tuple[int, int, list[int], Matrix]](), []
        for matrix in matrices:
            rows, columns = self.shapes[matrix.param][1:]
            holders = [r for r in matrix.parts if matrix.part_numel(r) == rows * columns]
            cost = rows * columns * min(rows, columns)
            choices.append((len(holders) or size, cost, holders, matrix))
        # First those with the least choice, of those the largest.
        for _, cost, holders, matrix in sorted(choices, key=lambda each: (each[0], -each[1])):
            owner = min(holders or range(size), key=work.__getitem__)
            work[owner] += cost
            assigned.append(matrix.owned_by(owner, size))
        return assigned

    def unshard(self, shards: list[Tensor]) -> dict[int, Tensor]:
        """Return the owned matrices as stacks by parameter; a collective.

        Args:
            shards: this rank's shards of the parameters, or of what is sharded like them.
        """
        counts = Counter(matrix.param for matrix in self.parts.owned)
        stacks = {p: shards[p].new_empty(n, *self.shapes[p][1:]) for p, n in counts.items()}
        self.parts.unshard(shards, self.parts.views_of(stacks))
        return stacks

    def shard(self, stacks: dict[int, Tensor], shards: list[Tensor]) -> None:
        """Overwrite all ranks' shards with those of the owned matrices; collective."""
        self.parts.shard(self.parts.views_of(stacks), shards)

    def flat_parts(self, states: list[Tensor]) -> PartExchange:
        """Return the exchange of flat state: same owners, and order of matrices.

        Args:
            states: of `flat_zeros`, for each parameter.
        """
        size = 1 if self.group is None else self.group.size()
        bounds = [_bounds(state, self.group) for state in states]
        matrices = list[Matrix]()
        for param, item, _, owner, *_ in self.parts.matrices:
            numel = states[param].numel() // self.shapes[param][0]
            parts = dict[int, Part]()
            for rank, ((offset,), (length,)) in enumerate(bounds[param]):
                start = max(offset, item * numel)
                stop = min(offset + length, (item + 1) * numel)
                if start < stop:
                    parts[rank] = [start - item * numel], [stop - start]
            if parts:
                matrix = Matrix(param, item, parts, numel=numel)
                matrices.append(matrix.owned_by(owner, size))
        first = [shard_bounds(state)[0][0] for state in states]

        def part_of(shard: Tensor, matrix: Matrix) -> Tensor:
            (offset,), (length,) = matrix.parts[rank]
            return shard.narrow(
                0, matrix.item * matrix.numel + offset - first[matrix.param], length
            )

        rank = self.parts.rank
        return PartExchange(matrices, self.group, part_of)


class PartExchange:
    """All-to-all between the ranks' parts of matrices and the matrices' owners.

    Attributes:
        owned: matrices that this rank owns.
        held: those of which it holds a part.
        sent: those of which it sends its part.

    Args:
        matrices: sorted by owner.
        group: the ranks; None: only this one.
        part_of: (this rank's shard of a parameter, a matrix) -> its part of the matrix.
    """

    def __init__(
        self,
        matrices: list[Matrix],
        group: dist.ProcessGroup | None,
        part_of: Callable[[Tensor, Matrix], Tensor],
    ) -> None:
        self.matrices, self.group, self._part_of = matrices, group, part_of
        self.rank = 0 if group is None else group.rank()
        self.owned = [matrix for matrix in matrices if matrix.owner == self.rank]
        self.held = [matrix for matrix in matrices if self.rank in matrix.parts]
        self.sent = [matrix for matrix in self.held if self.rank in matrix.senders]
        # (rank, index of an owned matrix)
        self.to_receive = sorted((r, i) for i, m in enumerate(self.owned) for r in m.senders)
        self.to_return = sorted((r, i) for i, m in enumerate(self.owned) for r in m.parts)

    def views_of(self, stacks: Mapping[int, Tensor]) -> list[Tensor]:
        """Return the owned matrices, in their order, of stacks by parameter."""
        items = {p: iter(stack.unbind()) for p, stack in stacks.items()}
        return [next(items[matrix.param]) for matrix in self.owned]

    def unshard(self, shards: list[Tensor], owned: list[Tensor]) -> None:
        """Overwrite the owned matrices with the parts of all ranks; a collective."""
        sent = [self._own_part(shards, matrix) for matrix in self.sent]
        self._exchange(shards[0], sent, [self._part(owned, *each) for each in self.to_receive])

    def shard(self, owned: list[Tensor], shards: list[Tensor]) -> None:
        """Overwrite the parts of all ranks with those of the owned matrices; a collective."""
        held = [self._own_part(shards, matrix) for matrix in self.held]
        self._exchange(shards[0], [self._part(owned, *each) for each in self.to_return], held)

    def _own_part(self, shards: list[Tensor], matrix: Matrix) -> tuple[int, Tensor]:
        return matrix.owner, self._part_of(shards[matrix.param], matrix)

    def _part(self, owned: list[Tensor], rank: int, i: int) -> tuple[int, Tensor]:
        return rank, _narrow(owned[i], *self.owned[i].parts[rank])

    def _exchange(
        self, like: Tensor, sent: list[tuple[int, Tensor]], received: list[tuple[int, Tensor]]
    ) -> None:
        """Send tensors to ranks, in their order; overwrite those to receive from ranks."""
        if self.group is None:
            for (_, part), (_, values) in zip(received, sent, strict=True):
                part.copy_(values)
            return
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


def flat_zeros(param: Any, numel: int) -> Tensor:
    """Return a float32 state of ``numel`` zeros for a parameter.

    The ranks that shard the parameter share it evenly, in order.
    """
    local = to_local(param)
    if not is_dtensor(param):
        return torch.zeros(numel, device=local.device)
    from torch.distributed.tensor import Replicate, Shard

    mesh = param.device_mesh
    placements = [Replicate() if p.is_replicate() else Shard(0) for p in param.placements]
    state = from_local(torch.zeros(0, device=local.device), mesh, placements, (numel,))
    (length,) = shard_bounds(state)[1]
    return from_local(torch.zeros(length, device=local.device), mesh, placements, (numel,))


def _layouts(param: Any, group: dist.ProcessGroup | None) -> list[Part]:
    """Return each rank's offsets and sizes in a stack of matrices."""
    bounds = _bounds(param, group)
    return [(_stack_shape(offsets, 0), _stack_shape(sizes)) for offsets, sizes in bounds]


def _bounds(tensor: Any, group: dist.ProcessGroup | None) -> list[Part]:
    """Return each rank's offsets and sizes in a tensor."""
    if group is None:
        return [shard_bounds(tensor)]
    with without_fake_tensors():
        mesh, ranks = tensor.device_mesh.mesh, dist.get_process_group_ranks(group)
        coordinates = [(mesh == rank).nonzero()[0].tolist() for rank in ranks]
    return [shard_bounds(tensor, coordinate) for coordinate in coordinates]


def _list_matrices(param: int, num_items: int, layouts: list[Part]) -> list[Matrix]:
    """Return the matrices of a parameter with the parts of all ranks."""
    matrices = [Matrix(param, item, {}) for item in range(num_items)]
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


def _narrow(matrix: Tensor, offsets: list[int], sizes: list[int]) -> Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        matrix = matrix.narrow(dim, offset, size)
    return matrix
