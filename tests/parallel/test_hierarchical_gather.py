"""A hierarchical all-gather equals a plain one; each byte enters a node once."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import run_ranks
from tests.parallel.sharded import (
    UNITS,
    Collectives,
    Layout,
    Seen,
    assert_equal,
    build,
    data,
    one_process,
    step,
    whole_gradients,
)
from weft.parallel.hierarchical_gather import HierarchicalAllGather


def gather_both_ways(cases: list[tuple[tuple[int, int, int], int]]) -> None:
    """Compare bitwise with a plain all-gather; each case has axis sizes and ranks per node."""
    for shape, node_size in cases:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp_shard", "tp"))
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            compare_gathers(mesh["dp_shard"], node_size, dtype)


def compare_gathers(mesh: DeviceMesh, node_size: int, dtype: torch.dtype) -> None:
    gather, group = HierarchicalAllGather(mesh, node_size), mesh.get_group()
    local = (torch.arange(5) + 5 * dist.get_rank()).to(dtype)
    plain = gather.allocate((mesh.size() * 5,), dtype=dtype, device=torch.device("cpu"))
    dist.all_gather(list(plain.view(mesh.size(), 5)), local, group=group)
    for async_op in (False, True):
        for in_place in (False, True):  # in place: the input is a part of the output, as in FSDP
            staged = torch.zeros_like(plain)
            inputs = local
            if in_place:
                inputs = staged.view(mesh.size(), 5)[group.rank()]
                inputs.copy_(local)
            work = gather(staged, inputs, group, async_op)
            assert (work is not None) == async_op
            if work is not None:
                with Collectives() as inside_nodes:
                    work.wait()
                    work.wait()  # a second wait has no effect
                assert len(inside_nodes.recorded) == 1
            assert torch.equal(staged, plain)


def test_hierarchical_all_gather_equals_all_gather() -> None:
    run_ranks(gather_both_ways, 4, [((1, 4, 1), 2)])
    beside = [((2, 4, 1), 2), ((1, 4, 2), 2)]
    run_ranks(gather_both_ways, 8, [*beside, ((1, 8, 1), 2), ((1, 8, 1), 4)])


def stages() -> list[Seen]:
    """Return the collectives of one gather of 80 elements on 8 ranks in 4 nodes."""
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp_shard",))
    gather = HierarchicalAllGather(mesh, 2)
    with Collectives() as collectives:
        gather(torch.empty(80), torch.zeros(10), mesh.get_group())
    return collectives.recorded


def test_hierarchical_all_gather_each_byte_enters_a_node_once() -> None:
    nodes, node_size = 4, 2
    received: Counter[int] = Counter()  # elements that each node receives from others
    for rank, results in enumerate(run_ranks(stages, 8)):
        node = rank // node_size
        for _, ranks, numel, _ in results:
            received[node] += numel * sum(other // node_size != node for other in ranks)
        # One gather across nodes, then one inside the node, of the rows of every node.
        across, *inside = [ranks for _, ranks, *_ in results]
        assert across == tuple(range(rank % node_size, 8, node_size))
        assert inside == [(2 * node, 2 * node + 1)]
    assert received == dict.fromkeys(range(nodes), 80 * (nodes - 1) // nodes)


def operators() -> list[str]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    gather, names = HierarchicalAllGather(mesh, 2), list[str]()

    class Names(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Names():
        gather(torch.empty(40), torch.zeros(10), mesh.get_group())
    return [name for name in names if "allgather" in name or "copy" in name]


def test_hierarchical_all_gather_gathers_no_list_of_strided_tensors() -> None:
    """NCCL gathers such a list into a buffer of its own, and copies each tensor."""
    expected = ["_allgather_base_", "allgather_into_tensor_coalesced_"]
    assert run_ranks(operators, 4) == [expected] * 4


def gather_groups(settings: list[tuple[bool, int | None]]) -> list[set[tuple[int, ...]]]:
    results = []
    for hierarchical, node_size in settings:
        keys = {"hierarchical_gather": hierarchical}
        model = build(Layout(shards=4, node_size=node_size, keys=keys))
        with Collectives() as collectives:
            model(data()[0][:1])
        results.append({ranks for _, ranks, *_ in collectives.recorded})
    return results


def test_hierarchical_gather_is_used_only_across_nodes() -> None:
    settings = [(True, 2), (False, 2), (True, None), (True, 4), (True, 8), (True, 1)]
    across, *plain = run_ranks(gather_groups, 4, settings)[0]
    assert across == {(0, 1), (0, 2)}
    # A plain gather: not enabled, one node, or one rank per node.
    assert plain == [{(0, 1, 2, 3)}] * 5


def unshard_all_units() -> dict[str, Any]:
    """Gather all units at the same time, as a schedule with several stages does."""
    keys = {"hierarchical_gather": True}
    layout = Layout(shards=4, node_size=2, microbatches=1, keys=keys)
    model = build(layout)
    with Collectives() as collectives:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard(async_op=True)
    # The gather between nodes has started; the gather inside nodes starts at the wait.
    assert [ranks for _, ranks, *_ in collectives.recorded] == [
        (dist.get_rank() % 2, dist.get_rank() % 2 + 2)
    ] * UNITS
    step(model, layout)
    return {"grads": whole_gradients(model)}


def test_hierarchical_all_gather_asynchronous_gradients_equal_one_process() -> None:
    one = one_process()
    for many in run_ranks(unshard_all_units, 4):
        assert_equal(many, one)


def test_all_gather_interface_is_that_of_pytorch() -> None:
    """FSDP's abstract class is private."""
    assert AllGather.__abstractmethods__ == {"allocate", "__call__"}
    for method in ("allocate", "__call__"):
        theirs, ours = (
            inspect.signature(getattr(cls, method)).parameters
            for cls in (AllGather, HierarchicalAllGather)
        )
        assert [(p.name, p.kind, p.default) for p in ours.values()] == [
            (p.name, p.kind, p.default) for p in theirs.values()
        ]
