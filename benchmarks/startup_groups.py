"""Measure what the process groups of a mesh cost at the start.

    TORCH_CPP_LOG_LEVEL=ERROR python -m benchmarks.startup_groups [--ranks 256]
    python -m benchmarks.startup_groups --recipes

The first command forks ranks from one process that has imported torch.  They only create groups,
with real gloo and one store.  ``world`` is `init_process_group`, ``save`` the group of the writing
thread of checkpoints, and the others are the axes of a mesh, in one of four ways:

    split      as `DeviceMesh` does with a bound device: `split_group`, here only its gloo part
    rows       as `DeviceMesh` does without a bound device: `new_group` for every row of an axis
    weft       `weft.parallel.mesh.create_mesh` for the CPU
    weft cuda  the same for CUDA, with torch's fake backend in the place of NCCL

Requests are those of all ranks to the store, counted in a separate run because the counter is slow.
Wall time ends when the last rank has its group.  Processor time is that of all ranks, without the
store.  Other programs of the machine disturb the wall time more than the processor time.

The second command builds the mesh of one rank of large recipes with a fake world, by weft and with
`DeviceMesh`, and derives the requests from the sizes of the groups: 2 n + 1 for each of the n ranks
of a gloo group, as the first command shows.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.counting_store import CountingStore
from weft.config.axes import AXES, EXPERT_AXES, PARAMETER_AXES
from weft.config.reader import read_job
from weft.monitor.process import die_with_parent
from weft.parallel.mesh import Groups, build_mesh, create_mesh
from weft.parallel.private import create_tcp_store
from weft.planning.devices import parse_cluster
from weft.planning.plan import Plan
from weft.planning.plan_text import cluster_machine
from weft.planning.resolve import resolve

HOST = "127.0.0.1"
TIMEOUT = timedelta(minutes=10)
WAYS = ("split", "rows", "weft", "weft cuda")
RECIPES = (
    "paper/llama3-8b",
    "mics-50b",
    "qwen3-30b-a3b",
    "paper/llama3-70b-async-tp",
    "paper/llama3-405b-4d-32k",
    "paper/llama3-405b-4d-262k",
)

# --------------------------------------------------------------------------- real ranks


def create_axis(way: str, rows: torch.Tensor, axis: str, groups: Groups) -> None:
    """Create the groups of one axis; collective over all ranks."""
    own = rows[(rows == dist.get_rank()).any(1)][0]
    if way == "split":
        options = c10d.Backend.Options("nccl", TIMEOUT)
        world: Any = dist.group.WORLD
        groups[axis] = world.split_group(own.tolist(), TIMEOUT, options, f"{axis}-{own[0]}", axis)
    elif way == "rows":
        for row in rows.tolist():
            dist.new_group(row)
    else:
        create_mesh("cuda" if way == "weft cuda" else "cpu", own, (axis,), groups)


def run_rank(rank: int, sizes: dict[str, int], port: int, way: str, counted: bool) -> list[Any]:
    """Create all groups as one rank.

    Returns:
        For each group its name, begin, end, processor seconds and requests.
    """
    untyped: Any = dist
    ranks = torch.arange(torch.tensor(list(sizes.values())).prod().item())
    client = untyped.TCPStore(HOST, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
    store = CountingStore(client) if counted else client
    grid = ranks.view(*sizes.values())
    groups: Groups = {}
    results: list[Any] = []

    def measure(name: str, create: Callable[[], Any]) -> None:
        if dist.is_initialized():
            dist.barrier()
        before = store.requests.total() if counted else 0
        begin, cpu = time.monotonic(), time.process_time()
        create()
        times = (begin, time.monotonic(), time.process_time() - cpu)
        results.append((name, *times, store.requests.total() - before if counted else 0))

    backend = "cpu:gloo,cuda:fake" if way == "weft cuda" else "cpu:gloo"
    here: Any = {"store": store, "rank": rank, "world_size": len(ranks), "timeout": TIMEOUT}
    measure("world", lambda: dist.init_process_group(backend, **here))
    measure("save", lambda: dist.new_group(backend="cpu:gloo"))
    for dim, (axis, size) in enumerate(sizes.items()):
        rows = grid.movedim(dim, -1).reshape(-1, size)
        measure(axis, partial(create_axis, way, rows, axis, groups))
    dist.barrier()
    return results


def fork(run: Callable[[], None]) -> int:
    """Run a function in a forked process; return its id."""
    if child := os.fork():
        return child
    status = 1
    try:
        die_with_parent()
        run()
        status = 0
    finally:
        os._exit(status)


def run_ranks(sizes: dict[str, int], way: str, counted: bool) -> list[list[Any]]:
    """Return the results of all ranks; see `run_rank`."""
    reader, writer = os.pipe()

    def serve() -> None:
        store = create_tcp_store(HOST, 0, serve=True)
        os.write(writer, str(store.port).encode())
        signal.pause()

    with tempfile.TemporaryDirectory() as directory:
        server = fork(serve)
        port = int(os.read(reader, 10))

        def run(rank: int) -> None:
            result = run_rank(rank, sizes, port, way, counted)
            Path(directory, str(rank)).write_text(json.dumps(result))

        number = torch.tensor(list(sizes.values())).prod().item()
        children = [fork(partial(run, rank)) for rank in range(int(number))]
        # All ranks end when this process does, and each has a timeout.
        statuses = [os.waitpid(child, 0)[1] for child in children]
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
        os.close(reader)
        os.close(writer)
        assert not any(statuses), statuses
        return [json.loads(path.read_text()) for path in Path(directory).iterdir()]


def measure_ways(num_ranks: int, ways: list[str]) -> None:
    """Print a row for each way and group."""
    sizes = {"pp": 4, "dp_replicate": 1, "dp_shard": num_ranks // 32, "tp": 8}
    print(f"{'way':<10} {'group':<13} {'size':>4} {'requests':>9} {'wall s':>7} {'cpu s':>7}")
    for way in ways:
        timed, counted = run_ranks(sizes, way, False), run_ranks(sizes, way, True)
        for index, (name, *_) in enumerate(timed[0]):
            times = [rank[index][1:4] for rank in timed]
            wall = max(end for _, end, _ in times) - min(begin for begin, _, _ in times)
            requests = sum(rank[index][4] for rank in counted)
            size, cpu = sizes.get(name, num_ranks), sum(each[2] for each in times)
            print(f"{way:<10} {name:<13} {size:>4} {requests:>9,} {wall:>7.2f} {cpu:>7.2f}")


# --------------------------------------------------------------------------- recipes


def build_device_meshes(plan: Plan) -> None:
    """Create the groups of a plan with `DeviceMesh`, one mesh after the other."""
    order = plan.axis_order
    ranks = torch.arange(plan.world_size).reshape([plan.axis_sizes[axis] for axis in order])
    ranks = ranks.permute([order.index(axis) for axis in AXES])
    shape = (plan.pp, plan.dp_replicate, plan.dp_shard * plan.cp, plan.tp)
    DeviceMesh("cpu", ranks.reshape(shape), mesh_dim_names=PARAMETER_AXES)
    if plan.cp > 1:
        rows = ranks.movedim(AXES.index("cp"), -1).reshape(-1, plan.cp)
        DeviceMesh("cpu", rows, mesh_dim_names=("other", "cp"))
    if plan.ep > 1:
        expert_ranks = ranks.reshape(*shape[:2], -1, plan.ep, plan.tp)
        DeviceMesh("cpu", expert_ranks, mesh_dim_names=EXPERT_AXES)


def group_sizes(plan: Plan, build: Callable[[Plan], Any]) -> list[int]:
    """Return the sizes of the groups of rank 0, without the world."""
    store: Any = FakeStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=plan.world_size)
    private: Any = dist.distributed_c10d
    try:
        build(plan)
        groups = [g for g in private._world.pg_map if g is not dist.group.WORLD]
        return [dist.get_world_size(group) for group in groups]
    finally:
        dist.destroy_process_group()


def count_recipes() -> None:
    """Print a row for each recipe."""
    columns = ("groups", "requests of a rank", "of all ranks")
    print(f"{'recipe':<22} {'ranks':>5} " + " ".join(f"{name:>19}" for name in columns))
    for recipe in RECIPES:
        job, _, errors = read_job(recipe, [])
        errors.raise_any()
        plan = resolve(job, cluster_machine(parse_cluster(job.run.cluster)), recipe)
        old, new = (group_sizes(plan, build) for build in (build_device_meshes, build_mesh))
        requests = sum(2 * size + 1 for size in old)
        total = requests * plan.world_size
        cells = (f"{len(old)} -> {len(new)}", f"{requests} -> 0", f"{total:,} -> 0")
        print(f"{recipe:<22} {plan.world_size:>5} " + " ".join(f"{cell:>19}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=256, help="a multiple of 32")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--recipes", action="store_true", help="count the groups of recipes")
    options = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    gc.freeze()
    print(f"{date.today()}  torch {torch.__version__}, Python {platform.python_version()}")
    if options.recipes:
        count_recipes()
    else:
        measure_ways(options.ranks, options.ways)


if __name__ == "__main__":
    main()
