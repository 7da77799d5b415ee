"""Hierarchical gathering, in a group of N nodes with K ranks each: across the nodes, then inside.

Rank ``n * K + k`` is number k of node n and has C elements.  Of the gathered ``[N, K, C]``
it first gets column k from its peers in the other nodes, all columns at the same time.  Then
each node gathers its rows from its own ranks, row by row: each lands where it belongs, so
that the result is that of a plain gather without being put in order.

Of what is gathered (N - 1) / N enters a node, once, over all the links that it has, in N - 1
steps.  In the ring of a plain gather (NK - 1) / NK passes the slowest link, in NK - 1 steps
(MiCS, arXiv:2205.00119).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from weft.parallel.private import all_gather, unflatten_axis


def check_divides(name: str, number: int, degree: int) -> None:
    """Raise ValueError if a number of ranks does not divide a shard group of ``degree``."""
    if degree % number:
        raise ValueError(f"{name} = {number}: does not divide the {degree} ranks of a shard group")


def build_hierarchical_gather(mesh: DeviceMesh, node_size: int | None) -> HierarchicalAllGather | None:
    """The gather for a shard group that spans nodes, else None.

    Every rank of the world calls this, with its own shard group.

    Args:
        mesh: the shard axis.
        node_size: how many consecutive ranks share a node; None: all, or now more, now less.

    Raises:
        ValueError: if that does not divide the group.
    """
    if node_size is None or node_size >= mesh.size():
        return None
    check_divides("node_size", node_size, mesh.size())
    return HierarchicalAllGather(mesh, node_size) if node_size > 1 else None


class HierarchicalAllGather:
    """The gather of one shard group, as FSDP calls it.

    It has the methods of FSDP's private ``AllGather``, whose instance it need not be.
    """

    def __init__(self, mesh: DeviceMesh, node_size: int) -> None:
        """Make the groups.  Every rank of the world calls this, with its own shard group.

        Args:
            mesh: the shard axis.
            node_size: K; divides its size.
        """
        self.shape = (mesh.size() // node_size, node_size)
        nodes = unflatten_axis(mesh, self.shape, ("node", "place"))
        self.whole, self.across, self.inside = mesh.get_group(), *nodes.get_all_groups()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather ``[C]`` into ``[N * K * C]``, which may contain the input in its place.

        Returns:
            With ``async_op`` a handle to wait for.  Without, None: both stages are done, or
            ordered on the current stream, as with a plain gather.
        """
        if group.group_name != self.whole.group_name:  # resharded over fewer ranks
            work: dist.Work | None = all_gather(output_tensor, input_tensor, group, async_op)
            return work
        rows_NKC = output_tensor.view(*self.shape, -1)
        place = self.inside.rank()

        def inside() -> None:
            for row_KC in rows_NKC:
                all_gather(row_KC.view(-1), row_KC[place], self.inside)

        first = dist.all_gather(list(rows_NKC[:, place]), input_tensor, self.across, async_op)
        if async_op:
            return _ChainedWork(first, inside)
        inside()
        return None


class _ChainedWork(dist.Work):
    """An operation under way, and what is to follow it when it is waited for.

    So the stage between nodes, the slow one, overlaps with what is done until then.
    """

    def __init__(self, first: dist.Work, then: Callable[[], None]) -> None:
        super().__init__()
        self.first = first
        self.then: Callable[[], None] | None = then

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self.then is not None:
            self.first.wait()
            self.then()
            self.then = None
        return True
