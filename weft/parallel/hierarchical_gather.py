"""All-gather of a shard group that spans nodes: inter-node first, then intra-node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from weft.parallel.mesh import create_mesh
from weft.parallel.private import all_gather


class HierarchicalAllGather:
    """All-gather of one shard group: inter-node, then intra-node.

    A group has N nodes with K ranks each.  Rank ``n * K + k`` is rank k of node n and has C
    elements.  The result is ``[N, K, C]``.  First each rank gathers column k from its peers in the
    other nodes, into a buffer of 1 / K of the result; all K columns travel at the same time.  Then
    the ranks of a node gather the N rows among themselves, all N in one call.  Each row lands in
    its final place, so the result equals a plain all-gather without a reorder.

    (N - 1) / N of the result enters a node, once, over all links of the node, in N - 1 steps.  In
    the ring of a plain all-gather (NK - 1) / NK of the result passes the slowest link, in NK - 1
    steps (MiCS, arXiv:2205.00119).

    It has the methods of FSDP's private protocol ``AllGather``.
    """

    def __init__(self, mesh: DeviceMesh, node_size: int) -> None:
        """Create the process groups; collective over all ranks of the world.

        Args:
            mesh: the shard axis.
            node_size: K; divides the size of ``mesh``.
        """
        self.shape = (mesh.size() // node_size, node_size)
        self.group, grid = mesh.get_group(), mesh.mesh.view(self.shape)
        nodes = create_mesh(mesh.device_type, grid, ("node", "local_rank"), {})
        self.inter_node, self.intra_node = nodes.get_all_groups()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the output of the gather."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather ``[C]`` into ``[N * K * C]``, which may alias the input.

        Returns:
            With ``async_op`` a handle to wait for.  Without, None: both stages are done, or
            ordered on the current stream, as with a plain all-gather.
        """
        if group.group_name != self.group.group_name:  # resharded over fewer ranks
            work: dist.Work | None = all_gather(output_tensor, input_tensor, group, async_op)
            return work
        rows_NKC = output_tensor.view(*self.shape, -1)
        # Not into the places of the column, which are strided: NCCL would gather them into such a
        # buffer of its own, and then copy each.  The second stage writes all places.
        column_NC = self.allocate(
            (self.shape[0], len(input_tensor)), dtype=input_tensor.dtype, device=input_tensor.device
        )

        def gather_intra_node() -> None:
            outputs, inputs = [row_KC.view(-1) for row_KC in rows_NKC], list(column_NC)
            self.intra_node.allgather_into_tensor_coalesced(outputs, inputs).wait()

        inter_node_work = all_gather(column_NC.view(-1), input_tensor, self.inter_node, async_op)
        if async_op:
            return _ChainedWork(inter_node_work, gather_intra_node)
        gather_intra_node()
        return None


class _ChainedWork(dist.Work):
    """A pending operation, and a function that `wait` calls after it.

    So the inter-node stage, the slow one, overlaps with the work until `wait`.
    """

    def __init__(self, work: dist.Work, continuation: Callable[[], None]) -> None:
        super().__init__()
        self.work = work
        self.continuation: Callable[[], None] | None = continuation

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self.continuation is not None:
            self.work.wait()
            self.continuation()
            self.continuation = None
        return True
