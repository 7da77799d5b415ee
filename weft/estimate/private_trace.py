"""PyTorch internals that a trace uses: a fake world, and observers of a step.

The rules of `weft.parallel.private` apply here too.  torch has no public interface for any of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from weft.parallel.float8 import import_quietly
from weft.parallel.private import patch_attribute


def new_fake_mode() -> TorchDispatchMode:
    """Return a mode in which new tensors have shapes but no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_of_other_mode(tensor: Tensor, mode: TorchDispatchMode | None) -> bool:
    """Return True for a fake tensor of another mode than ``mode``."""
    return isinstance(tensor, FakeTensor) and tensor.fake_mode is not mode


def has_wrapper(types: Iterable[type]) -> bool:
    """Return True if a type wraps other tensors, and calls operators on them."""
    return any(is_traceable_wrapper_subclass_type(kind) for kind in types if kind != FakeTensor)


OnChange = Callable[[bool], None]


def observe_storage_resizes(
    on_resize: Callable[[torch.UntypedStorage, int], None],
) -> AbstractContextManager[None]:
    """Call ``on_resize(storage, bytes before)`` at each resize, by which FSDP frees."""
    storage: Any = torch.UntypedStorage
    original = storage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        before = self.nbytes()
        result = original(self, size)
        on_resize(self, before)
        return result

    return patch_attribute(storage, "resize_", resize_)


def observe_sharding_propagation(on_change: OnChange) -> AbstractContextManager[None]:
    """Call ``on_change`` when metadata propagation starts (True) and ends (False).

    DTensor then runs an operator on meta tensors of global shape, which are not part of the step.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    return _observe_calls(ShardingPropagator, "_propagate_tensor_meta_non_cached", on_change)


def observe_collective_waits(on_change: OnChange) -> AbstractContextManager[None]:
    """Call ``on_change`` when a collective's wait starts (True) and ends (False)."""
    return _observe_calls(dist.Work, "wait", on_change)


def _observe_calls(owner: Any, name: str, on_change: OnChange) -> AbstractContextManager[None]:
    original = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        on_change(True)
        try:
            return original(*args, **options)
        finally:
            on_change(False)

    return patch_attribute(owner, name, call)


def find_group_name(args: Iterable[Any]) -> str:
    """Return the group name in a collective's arguments: a group, or last string."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return str(dist.ProcessGroup.unbox(arg).group_name)
    return str([arg for arg in args if isinstance(arg, str)][-1])


@contextmanager
def fake_process_group(rank: int, world_size: int, keep_sent: bool) -> Iterator[None]:
    """Act as one rank of a fake process group, whose collectives return at once.

    Args:
        rank: the rank to be.
        world_size: number of ranks.
        keep_sent: keep a sent tensor alive as long as the handle of `isend`, as gloo does.  NCCL
            was not tested.
    """
    from torch.distributed import distributed_c10d
    from torch.distributed.pipelining import PipelineStage, schedules
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _register_coalesced_gather()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    pipelines: Any = schedules
    # Stages first agree on their shapes, and read the answer from a received tensor, which has no
    # data here.  So set each stage's shapes.  In torch 2.11 they send to their neighbors instead,
    # and in torch 2.15 they do neither in a fake group.
    agreements: list[tuple[Any, str, Any]] = [
        (pipelines._PipelineSchedule, "_warmup_p2p", _set_static_shapes),
        (PipelineStage, "_get_init_p2p_neighbors_ops", _no_p2p_ops),
    ]
    isend = dist.isend

    def isend_and_keep(tensor: Tensor, *args: Any, **options: Any) -> _PendingSend:
        return _PendingSend(tensor, isend(tensor, *args, **options))

    with ExitStack() as stack:
        stack.callback(clear_mesh_cache)
        stack.callback(dist.destroy_process_group)
        for owner, name, replacement in agreements:
            if hasattr(owner, name):
                stack.enter_context(patch_attribute(owner, name, replacement))
        stack.enter_context(patch_attribute(dist, "all_gather_object", _all_gather_own_object))
        if keep_sent:
            for module in (dist, distributed_c10d):
                stack.enter_context(patch_attribute(module, "isend", isend_and_keep))
        yield


@cache
def _register_coalesced_gather() -> Any:
    """Let fake tensors run the gather of several tensors; torch has no such kernel."""
    from torch._C._distributed_c10d import FakeWork

    name = "allgather_into_tensor_coalesced_"
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "Meta"):
        return None
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    library.impl(name, lambda *args: FakeWork().boxed(), "Meta")
    return library


class _PendingSend(NamedTuple):
    """A pending send, and its tensor."""

    tensor: Tensor
    work: Any

    def wait(self, *args: Any) -> Any:
        return self.work.wait(*args)


def _all_gather_own_object(objects: list[Any], own: Any, group: Any = None) -> None:
    objects[:] = [own] * len(objects)


def _no_p2p_ops(stage: Any) -> list[Any]:
    return []


def _set_static_shapes(
    schedule: Any, stages: list[Any], has_backward: bool, p2p_done: bool
) -> None:
    from torch.distributed.pipelining import schedules

    modes: Any = schedules
    for stage in stages:
        assert not modes.InferenceMode.needs_dynamic(stage._user_meta, has_backward)
        stage._inference_mode = modes.InferenceMode.STATIC


def clear_mesh_cache() -> None:
    """Clear DTensor's caches of meshes.

    DTensor treats equal meshes as one, and would communicate in the groups of the first.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@contextmanager
def replace_mxfp8_kernels(
    cast_rows: Callable[..., Any], cast_columns: Callable[..., Any]
) -> Iterator[None]:
    """Replace the kernels by which torchao casts to MXFP8 on a GPU."""
    tensors = import_quietly("torchao.prototype.mx_formats.mx_tensor")
    kernels = import_quietly("torchao.prototype.mx_formats.kernels")
    with (
        patch_attribute(tensors, "triton_to_mxfp8_dim0", cast_rows),
        patch_attribute(kernels, "mxfp8_quantize_cuda", cast_columns),
    ):
        yield
