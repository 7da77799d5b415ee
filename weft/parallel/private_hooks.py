"""PyTorch internals that observe a step, for profiles, hangs and estimates.

The rules of `weft.parallel.private` apply here too: ``tests/parallel/test_private.py`` fails when
one of these internals changes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.parallel.private import patch_attribute

# --------------------------------------------------------------------------- the Flight Recorder


class CollectiveRecord(NamedTuple):
    """A started collective in the Flight Recorder."""

    group: str
    group_desc: str  # as passed to `torch.distributed.new_group`
    seq_id: int  # counts collectives of the group; for p2p, this rank's messages in it
    name: str  # 'all_reduce'
    input_sizes: list[list[int]]
    is_pending: bool
    is_p2p: bool


def read_flight_recorder() -> list[CollectiveRecord]:
    """Return the last collectives (about 2,000) of this process, in order.

    With gloo they include no point-to-point messages.  torch has no public function for this.
    """
    from torch._C import _distributed_c10d as c10d

    records = []
    # A CUDA build has one recorder for NCCL and one for other backends.
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if dump := getattr(c10d, name, None):
            records += parse_collectives(json.loads(dump()))
    return records


def parse_collectives(dump: Mapping[str, Any]) -> list[CollectiveRecord]:
    """Return the collectives of a Flight Recorder dump, in order."""
    records = []
    for entry in dump.get("entries", []):
        seq_id = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
        name = entry["profiling_name"].partition(":")[2]
        is_pending = not entry["retired"] and entry["state"] != "completed"
        group, description = map(str, entry["process_group"])
        sizes, is_p2p = entry["input_sizes"], entry["is_p2p"]
        records.append(
            CollectiveRecord(group, description, seq_id, name, sizes, is_pending, is_p2p)
        )
    return records


def configure_flight_recorder(prefix: str) -> None:
    """Enable the Flight Recorder, before any process group is created.

    NCCL writes its dump to ``prefix`` + RANK when a collective times out.  Except for the path,
    these are torch's defaults in 2.11 to 2.13.  Variables that the user has set are not changed; if
    a variable has two names, torch prefers the first.
    """
    for names, value in (
        (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000"),
        (("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), prefix),
        (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
    ):
        if not any(name in os.environ for name in names):
            os.environ[names[0]] = value


# --------------------------------------------------------------------------- a step


def is_in_backward() -> bool:
    """Return True if autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


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


ContextFactory = Callable[..., AbstractContextManager[Any]]
OnChange = Callable[[bool], None]


def wrap_pipeline_actions(schedule: Any, make_context: ContextFactory) -> Callable[[], None]:
    """Run each action of a pipeline schedule in a context.

    Args:
        schedule: a schedule of torch.distributed.pipelining.
        make_context: takes the index of the stage among this rank's stages, the kind of the action
            (F, B, I or W), and the microbatch.

    Returns:
        A function that removes the wrappers.
    """
    stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
    names = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
    originals = [(stage, name, getattr(stage, name)) for stage in stages for name in names]

    def wrap(index: int, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(microbatch: int, *args: Any, **options: Any) -> Any:
            full = options.get("full_backward", True)
            kind = {names[0]: "F", names[1]: "B" if full else "I", names[2]: "W"}[name]
            with make_context(index, kind, microbatch):
                return call(microbatch, *args, **options)

        return run

    for index, stage in enumerate(stages):
        for name in names:
            setattr(stage, name, wrap(index, name, getattr(stage, name)))

    def restore() -> None:
        for stage, name, call in originals:
            setattr(stage, name, call)

    return restore


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


@contextmanager
def wrap_collectives(make_context: ContextFactory) -> Iterator[None]:
    """Run each collective that Python starts, and each wait, in a context.

    Args:
        make_context: takes the ranks of the process group.
    """
    owner: Any = dist.ProcessGroup
    work: Any = dist.Work
    groups: dict[int, list[int]] = {}  # by id of the work; a reused id is overwritten

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(group: Any, *args: Any, **options: Any) -> Any:
            ranks = dist.get_process_group_ranks(group)
            with make_context(ranks):
                result = call(group, *args, **options)
            groups[id(result)] = ranks
            return result

        return run

    def wait(self: Any, *args: Any, _call: Any = work.wait) -> Any:
        with make_context(groups.get(id(self), [])):
            return _call(self, *args)

    with ExitStack() as stack:
        for name in COLLECTIVES:
            if hasattr(owner, name):
                stack.enter_context(patch_attribute(owner, name, wrap(getattr(owner, name))))
        stack.enter_context(patch_attribute(work, "wait", wait))
        yield


# Methods of a process group that start a collective, by their names in torch 2.11 and 2.13.
COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)


def set_memory_history(enabled: bool) -> None:
    """Start or stop to record the stack of each CUDA allocation."""
    torch.cuda.memory._record_memory_history("all" if enabled else None)


def dump_memory_snapshot(path: Path) -> None:
    """Write a CUDA memory snapshot for https://pytorch.org/memory_viz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]


def find_group_name(args: Iterable[Any]) -> str:
    """Return the group name in a collective's arguments: a group, or last string."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return str(dist.ProcessGroup.unbox(arg).group_name)
    return str([arg for arg in args if isinstance(arg, str)][-1])


def get_group_ranks(name: str) -> list[int]:
    """Return the ranks of the process group of that name."""
    from torch.distributed import distributed_c10d

    private: Any = distributed_c10d
    return dist.get_process_group_ranks(private._resolve_process_group(name))


# --------------------------------------------------------------------------- fake processes


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

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    pipelines: Any = schedules
    # Stages first agree on their shapes, and read the answer from a received tensor, which has no
    # data here.  So set each stage's shapes.  In torch 2.11 they send to their neighbors instead.
    owner: Any = pipelines._PipelineSchedule
    name = "_warmup_p2p"
    replacement: Any = _set_static_shapes
    if not hasattr(owner, name):
        owner, name, replacement = PipelineStage, "_get_init_p2p_neighbors_ops", _no_p2p_ops
    isend = dist.isend

    def isend_and_keep(tensor: Tensor, *args: Any, **options: Any) -> _PendingSend:
        return _PendingSend(tensor, isend(tensor, *args, **options))

    with ExitStack() as stack:
        stack.callback(clear_mesh_cache)
        stack.callback(dist.destroy_process_group)
        stack.enter_context(patch_attribute(owner, name, replacement))
        stack.enter_context(patch_attribute(dist, "all_gather_object", _all_gather_own_object))
        if keep_sent:
            for module in (dist, distributed_c10d):
                stack.enter_context(patch_attribute(module, "isend", isend_and_keep))
        yield


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
