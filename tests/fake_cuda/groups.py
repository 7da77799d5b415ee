"""Check the groups of a CUDA run on four ranks: ``python -m tests.fake_cuda.groups STORE``.

The world is as in `weft.training.setup.connect`: real gloo, and a bound device.  A backend that
only claims to communicate takes the place of NCCL; like NCCL it has no CPU tensors.
"""

from __future__ import annotations

import os
import sys
import traceback
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tests.fake_cuda.device import fake_cuda, load_guard

WORLD_SIZE = 4


def check_groups(rank: int, path: str) -> None:
    """Check one rank; torch sees a CUDA device."""
    import pytest
    import torch
    import torch.distributed as dist
    from torch._subclasses import FakeTensorMode
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed import fake_pg

    from tests.counting_store import CountingStore
    from weft.optim.optimizer import compute_grad_norm
    from weft.parallel.mesh import create_mesh
    from weft.parallel.private import to_group_device

    c10d: Any = dist
    c10d.Backend.register_backend("standin", fake_pg._create_fake_pg, True, ["cuda"])
    store = CountingStore(c10d.FileStore(path, WORLD_SIZE))
    c10d.init_process_group(
        "cpu:gloo,cuda:standin",
        store=store,
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=60),
        device_id=torch.device("cuda", 0),
    )
    ranks = torch.arange(WORLD_SIZE).view(1, 2, 2)
    axes = ("pp", "dp_shard", "tp")
    with pytest.raises(RuntimeError, match="splitting"):  # so it would also have split gloo
        DeviceMesh("cuda", ranks, mesh_dim_names=axes)
    store.requests.clear()
    mesh = create_mesh("cuda", ranks, axes, {})
    assert not store.requests, store.requests
    for group in mesh.get_all_groups():
        untyped: Any = group
        assert {device.type for device in untyped._device_types} == {"cuda"}
    assert to_group_device(torch.ones(1), None).device.type == "cpu"
    reduced_on: list[str] = []

    def all_reduce(tensor: torch.Tensor, group: Any) -> None:
        reduced_on.append(tensor.device.type)  # fake tensors would be reduced on any device

    with FakeTensorMode(), patch.object(dist, "all_reduce", all_reduce):
        # A gradient on the CPU, as with CPU offload.
        grad: Any = DTensor.from_local(torch.ones(4), mesh["dp_shard"], [Shard(0)])
        grad._local_tensor = torch.ones(4)  # as FSDP does
        param: Any = SimpleNamespace(grad=grad, device=torch.device("cpu"))
        norms = compute_grad_norm([param], mesh.get_group("tp"))
        assert {norm.device.type for norm in norms} == {"cpu"}
    assert reduced_on == ["cuda", "cuda"], reduced_on


def main(path: str) -> None:
    load_guard()
    import torch
    from torch._subclasses import FakeTensorMode

    from weft.monitor.process import die_with_parent

    children = []
    for rank in range(WORLD_SIZE):
        if child := os.fork():
            children.append(child)
            continue
        try:
            die_with_parent()
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            torch.cuda.is_available = lambda: True
            with fake_cuda(FakeTensorMode(), lambda: None):
                check_groups(rank, path)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(any(statuses))


if __name__ == "__main__":
    main(sys.argv[1])
