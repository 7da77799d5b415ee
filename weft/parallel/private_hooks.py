"""What weft uses of PyTorch's private parts to look on at a step: profiles, hangs, the planner.

As in `weft.parallel.private`: each name says what is needed, and
``tests/parallel/test_private.py`` fails when something of it changes.
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
    """One that was begun; its number counts those of its group, or what this rank sent in it."""

    group: str
    number: int
    name: str  # 'all_reduce'
    sizes: list[list[int]]
    open: bool  # not done
    p2p: bool


def read_flight_recorder() -> list[CollectiveRecord]:
    """What this process's Flight Recorder holds, in order: the last 2,000 or so.

    Sending and receiving are not among them with gloo.  There is no public way to ask it.
    """
    from torch._C import _distributed_c10d as c10d

    found = []
    # A build for CUDA has one recorder for NCCL and one for the others.
    for dump in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if ask := getattr(c10d, dump, None):
            found += parse_flight_recorder(json.loads(ask()))
    return found


def parse_flight_recorder(dump: Mapping[str, Any]) -> list[CollectiveRecord]:
    """Those of a Flight Recorder's dump, which torch writes as JSON and, of itself, as a pickle."""
    found = []
    for entry in dump.get("entries", []):
        number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
        name = entry["profiling_name"].partition(":")[2]
        is_open = not entry["retired"] and entry["state"] != "completed"
        group = str(entry["process_group"][0])
        sizes, p2p = entry["input_sizes"], entry["is_p2p"]
        found.append(CollectiveRecord(group, number, name, sizes, is_open, p2p))
    return found


def configure_flight_recorder(prefix: str) -> None:
    """Let the Flight Recorder record, and NCCL leave what it holds in ``prefix`` + RANK when a
    collective takes too long; before there is a process group.

    That is torch's default in 2.11 to 2.13 but for the place, and what the user has set stays: of
    the names for one thing, the first counts.
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
    """Whether autograd is running a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def observe_storage_resizes(
    told: Callable[[torch.UntypedStorage, int], None],
) -> AbstractContextManager[None]:
    """Inside, ``told`` hears of every storage that was resized, and how many bytes it had: FSDP
    gives memory back so."""
    storage: Any = torch.UntypedStorage
    original = storage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        before = self.nbytes()
        result = original(self, size)
        told(self, before)
        return result

    return patch_attribute(storage, "resize_", resize_)


ContextFactory = Callable[..., AbstractContextManager[Any]]


def wrap_pipeline_actions(schedule: Any, around: ContextFactory) -> Callable[[], None]:
    """From now on actions of a pipeline's schedule run in ``around(place, kind, microbatch)``.

    Args:
        around: is given the place of the stage among those of this rank, and the action's kind: F,
            B, I or W.

    Returns:
        What undoes it.
    """
    stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
    names = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
    before = [(stage, name, getattr(stage, name)) for stage in stages for name in names]

    def watched(place: int, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(microbatch: int, *args: Any, **options: Any) -> Any:
            full = options.get("full_backward", True)
            kind = {names[0]: "F", names[1]: "B" if full else "I", names[2]: "W"}[name]
            with around(place, kind, microbatch):
                return call(microbatch, *args, **options)

        return run

    for place, stage in enumerate(stages):
        for name in names:
            setattr(stage, name, watched(place, name, getattr(stage, name)))

    def undo() -> None:
        for stage, name, call in before:
            setattr(stage, name, call)

    return undo


def observe_sharding_propagation(told: Callable[[bool], None]) -> AbstractContextManager[None]:
    """Inside, ``told`` hears when DTensor begins (True) and ends to run an operator on tensors of
    global shape, which are not there, to see what comes of it."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    return _observe_calls(ShardingPropagator, "_propagate_tensor_meta_non_cached", told)


def observe_collective_waits(told: Callable[[bool], None]) -> AbstractContextManager[None]:
    """Inside, ``told`` hears when a collective begins (True) and ends to be waited for."""
    return _observe_calls(dist.Work, "wait", told)


def _observe_calls(owner: Any, name: str, told: Callable[[bool], None]) -> AbstractContextManager[None]:
    original = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        told(True)
        try:
            return original(*args, **options)
        finally:
            told(False)

    return patch_attribute(owner, name, call)


@contextmanager
def wrap_collectives(around: ContextFactory) -> Iterator[None]:
    """Inside, collectives that Python starts, and the waits for them, happen in ``around(ranks)``.

    Args:
        around: is given the ranks of the process group.
    """
    owner: Any = dist.ProcessGroup
    work: Any = dist.Work
    groups: dict[int, list[int]] = {}  # by the id of a work, which its next owner overwrites

    def started(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(group: Any, *args: Any, **options: Any) -> Any:
            ranks = dist.get_process_group_ranks(group)
            with around(ranks):
                found = call(group, *args, **options)
            groups[id(found)] = ranks
            return found

        return run

    def wait(self: Any, *args: Any, _call: Any = work.wait) -> Any:
        with around(groups.get(id(self), [])):
            return _call(self, *args)

    with ExitStack() as stack:
        for name in COLLECTIVES:
            if hasattr(owner, name):
                stack.enter_context(patch_attribute(owner, name, started(getattr(owner, name))))
        stack.enter_context(patch_attribute(work, "wait", wait))
        yield


# Methods of a process group that start a collective, under the names of torch 2.11 and of 2.13.
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


def set_memory_history(on: bool) -> None:
    """Note from now on, or not any more, where in the code a GPU's memory is taken."""
    torch.cuda.memory._record_memory_history("all" if on else None)


def dump_memory_snapshot(path: Path) -> None:
    """What a GPU's memory is taken by, for https://pytorch.org/memory_viz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]


def find_group_name(args: Iterable[Any]) -> str:
    """The name of the process group in a collective's arguments: an object, or the last text."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return str(dist.ProcessGroup.unbox(arg).group_name)
    return str([arg for arg in args if isinstance(arg, str)][-1])


def get_group_ranks(name: str) -> list[int]:
    """The ranks of a process group, by its name."""
    from torch.distributed import distributed_c10d

    private: Any = distributed_c10d
    return dist.get_process_group_ranks(private._resolve_process_group(name))


# --------------------------------------------------------------------------- a fake world


@contextmanager
def fake_process_group(rank: int, world_size: int, keep_sent: bool) -> Iterator[None]:
    """Inside, this process is ``rank`` of a world whose others answer at once, with nothing.

    Args:
        keep_sent: whether what is sent lives as long as what `isend` returns, as it does in gloo;
            what NCCL keeps was not tried.
    """
    from torch.distributed import distributed_c10d
    from torch.distributed.pipelining import PipelineStage, schedules
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    pipelines: Any = schedules
    # Stages first ask round whether all know their shapes, and read the answer from a tensor.  Here
    # each is asked by itself.  In torch 2.11 they greet their neighbours instead.
    owner: Any = pipelines._PipelineSchedule
    name = "_warmup_p2p"
    silent: Any = _set_static_shapes
    if not hasattr(owner, name):
        owner, name, silent = PipelineStage, "_get_init_p2p_neighbors_ops", _no_p2p_ops
    isend = dist.isend

    def kept(tensor: Tensor, *args: Any, **options: Any) -> _PendingSend:
        return _PendingSend(tensor, isend(tensor, *args, **options))

    with ExitStack() as stack:
        stack.callback(clear_mesh_cache)
        stack.callback(dist.destroy_process_group)
        stack.enter_context(patch_attribute(owner, name, silent))
        stack.enter_context(patch_attribute(dist, "all_gather_object", _all_gather_own_object))
        if keep_sent:
            for module in (dist, distributed_c10d):
                stack.enter_context(patch_attribute(module, "isend", kept))
        yield


class _PendingSend(NamedTuple):
    """A message under way, and what is sent."""

    tensor: Tensor
    work: Any

    def wait(self, *args: Any) -> Any:
        return self.work.wait(*args)


def _all_gather_own_object(objects: list[Any], own: Any, group: Any = None) -> None:
    objects[:] = [own] * len(objects)


def _no_p2p_ops(stage: Any) -> list[Any]:
    return []


def _set_static_shapes(schedule: Any, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
    from torch.distributed.pipelining import schedules

    modes: Any = schedules
    for stage in stages:
        assert not modes.InferenceMode.needs_dynamic(stage._user_meta, has_backward)
        stage._inference_mode = modes.InferenceMode.STATIC


def clear_mesh_cache() -> None:
    """Make DTensor forget the meshes that it has seen.

    It takes equal meshes for the same, and would communicate in the process groups of the first.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
