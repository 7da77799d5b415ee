"""Process groups of a mesh: their backends, timeouts, network interface and requests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.counting_store import CountingStore
from tests.fake_cuda import ROOT
from tests.harness import run_ranks
from tests.small import plan_here, small_job
from weft.parallel.mesh import Mesh, build_mesh, create_mesh
from weft.planning.plan import Machine
from weft.planning.resolve import resolve
from weft.training.setup import collective_timeout, connect

CPU = torch.device("cpu")

Degrees = dict[str, int]


def build(degrees: Degrees) -> Mesh:
    return build_mesh(plan_here(small_job(*layout(degrees))))


def layout(degrees: Degrees) -> list[tuple[str, str]]:
    degrees = {"dp_replicate": 1, "dp_shard": 1, **degrees}
    pairs = [(f"parallel.{axis}", str(degree)) for axis, degree in degrees.items()]
    return [*pairs, ("model.tied_embeddings", "false")]


def reconnect(directory: str, timeout: timedelta) -> CountingStore:
    """Replace the world by one with a counting store."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = CountingStore(dist.FileStore(f"{directory}/store", size))  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    return store


def timeout_of(group: Any) -> timedelta:
    timeout: timedelta = group._get_backend(CPU).options._timeout
    return timeout


# --------------------------------------------------------------------------- requests


def count_requests(degrees: Degrees, directory: str) -> tuple[int, int]:
    """Return the requests of this rank for the groups of a mesh, and the number of groups."""
    store = reconnect(directory, timedelta(seconds=60))
    store.requests.clear()
    build(degrees)
    private: Any = dist.distributed_c10d
    return store.requests.total(), len(private._world.pg_map) - 1  # without the world


@pytest.mark.parametrize(
    ("degrees", "sizes"),
    [
        # With axes of one rank, which share a group.
        ({"dp_shard": 2, "tp": 2}, [2, 2, 1]),
        ({"pp": 2, "dp_replicate": 2, "dp_shard": 2}, [2, 2, 2, 1]),
        ({"dp_shard": 4, "tp": 2}, [4, 2, 1]),
        ({"dp_replicate": 2, "dp_shard": 2, "cp": 2}, [2, 4, 2, 1]),
    ],
    ids=str,
)
def test_requests_depend_on_the_size_of_own_groups_only(
    degrees: Degrees, sizes: list[int], tmp_path: Path
) -> None:
    world_size = torch.tensor(list(degrees.values())).prod().item()
    for requests, groups in run_ranks(count_requests, int(world_size), degrees, str(tmp_path)):
        assert groups == len(sizes)
        assert requests == sum(2 * size + 1 for size in sizes)


def expert_groups() -> dict[str, int]:
    moe = [("model.kind", "moe"), ("model.preset", "toy-moe")]
    mesh = build_mesh(plan_here(small_job(*layout({"dp_shard": 4, "ep": 2}), *moe)))
    assert mesh.expert_mesh is not None
    for axis in ("pp", "dp_replicate", "tp"):
        assert mesh.expert_mesh.get_group(axis) is mesh.get_group(axis)
    return {name: group.size() for name, group in mesh.groups.items()}


def test_experts_share_the_groups_of_the_other_axes() -> None:
    for sizes in run_ranks(expert_groups, 4):
        assert sizes == {"this rank": 1, "dp_shard": 4, "efsdp": 2, "ep": 2}


# --------------------------------------------------------------------------- timeouts


def stall_on_each_axis(directory: str) -> dict[str, float]:
    """Stall one rank of each group; return the seconds after which the other gives up."""
    limit = timedelta(seconds=1)
    store = reconnect(directory, limit)  # torch does not keep Python's part of it
    mesh = build({"dp_shard": 2, "tp": 2})
    half = create_mesh("cpu", torch.arange(4).view(2, 2), ("node", "local_rank"), {})
    groups = mesh.groups | {axis: half.get_group(axis) for axis in ("node", "local_rank")}
    assert {timeout_of(group) for group in groups.values()} == {limit}
    waited = {}
    for axis in ("dp_shard", "tp"):
        begin = time.monotonic()
        if groups[axis].rank() == 0:
            with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
                dist.all_reduce(torch.zeros(1), group=groups[axis])
            waited[axis] = time.monotonic() - begin
        time.sleep(max(0, begin + 1.8 - time.monotonic()))
    assert store.requests
    return waited


def test_groups_of_every_axis_have_the_timeout_of_the_world(tmp_path: Path) -> None:
    for waited in run_ranks(stall_on_each_axis, 4, str(tmp_path)):
        assert all(0.9 < seconds < 1.8 for seconds in waited.values()), waited


def test_collective_timeout_is_above_the_limits_of_the_watchdog() -> None:
    seconds = {
        limit: collective_timeout(limit).total_seconds() for limit in ("auto", 0.0, 30.0, 300.0)
    }
    assert seconds == {"auto": 1800, 0.0: 600_000, 30.0: 1800, 300.0: 6000}


def test_connect_sets_the_timeout_of_the_job(tmp_path: Path) -> None:
    job = small_job(("run.dir", str(tmp_path)), ("resilience.step_timeout", "300"))
    with connect(resolve(job, Machine("cpu", devices=1))):
        assert timeout_of(dist.group.WORLD) == timedelta(seconds=6000)


# --------------------------------------------------------------------------- interface


def use_missing_interface() -> str:
    os.environ["GLOO_SOCKET_IFNAME"] = "missing0"
    with pytest.raises(RuntimeError) as error:
        build({"dp_shard": 2, "tp": 2})
    return str(error.value)


def test_groups_use_the_interface_of_the_environment() -> None:
    for message in run_ranks(use_missing_interface, 4):
        assert "missing0" in message


# --------------------------------------------------------------------------- CUDA


@pytest.mark.slow
def test_axes_on_cuda_have_no_gloo(tmp_path: Path) -> None:
    """NCCL's stand-in is the only backend of an axis, also with a bound device."""
    command = [sys.executable, "-m", "tests.fake_cuda.groups", str(tmp_path / "store")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
