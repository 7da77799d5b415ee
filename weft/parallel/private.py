"""What weft uses of PyTorch that is private, or differs between the versions it works with.

Each name says what is needed, and why the public interface does not give it.  The rest of weft
imports from here, but for the operators of attention, which fill a file of their own
(`weft.parallel.attention_ops`).  ``tests/parallel/test_private.py`` fails when one of them changes.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Placement

# --------------------------------------------------------------------------- collectives

# torch 2.13 renamed them and warns of the old names, which are the only ones before.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Collectives that stay in the graph under torch.compile, where the pass for asynchronous tensor
# parallelism looks for them.  The public ones break the graph.
traceable = torch.ops._c10d_functional


def on_compiling(start: Callable[[], None], end: Callable[[bool], None]) -> None:
    """Call back when torch.compile begins to compile something, and when it has done so.

    Args:
        end: is told whether it was a backward pass.
    """
    from torch._dynamo.callback import CallbackTrigger, callback_handler

    callback_handler.register_start_callback(lambda about: start())
    callback_handler.register_end_callback(
        lambda about: end(about.callback_trigger == CallbackTrigger.LAZY_BACKWARD)
    )


def recompile_reasons() -> list[str]:
    """A list that gets, from now on, why each function is compiled again, in a line."""
    found: list[str] = []

    class Listen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines = [line.strip(" -") for line in record.getMessage().splitlines()]
            found.extend(line for line in lines[-1:] if line)

    torch._logging.set_logs(recompiles=True)  # type: ignore[attr-defined]
    logger = logging.getLogger("torch._dynamo.guards.__recompiles")
    logger.addHandler(Listen())
    logger.propagate = False
    return found


def compile_each_shape() -> AbstractContextManager[None]:
    """In this context torch.compile does not give up on a function with many shapes."""
    from torch._dynamo.utils import disable_cache_limit

    return disable_cache_limit()


def limit_activations(share: float) -> None:
    """Let torch.compile keep no more than a share of the activations for the backward pass."""
    from torch._functorch import config

    config.activation_memory_budget = share


def hide_exchanges(group: dist.ProcessGroup) -> None:
    """Switch on compile's pass for asynchronous tensor parallelism, for ``group``."""
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    config._micro_pipeline_tp = True
    enable_symm_mem_for_group(group.group_name)


def use_symmetric_memory(unit: Any) -> None:
    """Let NCCL move what an FSDP unit gathers and reduces by copy engines, or in the switch.

    The method came with torch 2.12; before, NCCL could at least be given memory of its own.
    """
    if hasattr(unit, "set_symm_mem_for_comm"):
        unit.set_symm_mem_for_comm()
    else:
        unit.set_allocate_memory_from_process_group_for_comm(True)


def listening_store(host: str, port: int, serve: bool, size: int | None = None) -> Any:
    """torch's TCPStore, which listens on the interface of ``host`` alone.

    By itself it listens on every interface, where anybody could write into it.  The argument for a
    socket of one's own is public, but says nothing of what that is good for.

    Args:
        port: 0 is a free one.
        serve: whether this process is the one that listens.
        size: processes that will come, if known.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    more: dict[str, Any] = {}
    if serve:
        try:
            listening = socket.create_server((host, port), backlog=2048)
        except socket.gaierror:
            pass  # not an IPv4 address: on every interface, then
        else:
            port = listening.getsockname()[1]
            more["master_listen_fd"] = listening.detach()
    return TCPStore(host, port, size, is_master=serve, wait_for_workers=False, **more)


def gloo_group(place: str, rank: int, size: int, address: str, timeout: timedelta) -> Any:
    """A gloo process group that stands by itself, and listens on one interface.

    It is not among torch's groups, so it ends when it is let go of, which its peers see, and can
    be made anew with other processes, as often as need be.  The public constructor takes the
    interface from the environment.

    Args:
        place: HOST:PORT/NAME of a store, the name used once.
        address: of this process, on the interface.
        timeout: of every operation.
    """
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    endpoint, _, name = place.partition("/")
    host, _, port = endpoint.rpartition(":")
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = timeout
    return gloo(PrefixStore(name, store), rank, size, options)


class Collective(NamedTuple):
    """One that was begun; its number counts those of its group, or what this rank sent in it."""

    group: str
    number: int
    name: str  # 'all_reduce'
    sizes: list[list[int]]
    open: bool  # not done
    p2p: bool


def collectives() -> list[Collective]:
    """What this process's Flight Recorder holds, in order: the last 2,000 or so.

    Sending and receiving are not among them with gloo.  There is no public way to ask it.
    """
    from torch._C import _distributed_c10d as c10d

    found = []
    # A build for CUDA has one recorder for NCCL and one for the others.
    for dump in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if ask := getattr(c10d, dump, None):
            found += collectives_in(json.loads(ask()))
    return found


def collectives_in(dump: Mapping[str, Any]) -> list[Collective]:
    """Those of a Flight Recorder's dump, which torch writes as JSON and, of itself, as a pickle."""
    found = []
    for entry in dump.get("entries", []):
        number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
        name = entry["profiling_name"].partition(":")[2]
        is_open = not entry["retired"] and entry["state"] != "completed"
        group = str(entry["process_group"][0])
        sizes, p2p = entry["input_sizes"], entry["is_p2p"]
        found.append(Collective(group, number, name, sizes, is_open, p2p))
    return found


def record_flights(prefix: str) -> None:
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


# --------------------------------------------------------------------------- optimizers


def skip_where(optimizer: Any, bad: Tensor) -> bool:
    """Let the next step of a fused optimizer change nothing if ``bad``, on the device, is true.

    What torch's GradScaler uses, and tells by the same attribute whether there is such a thing.

    Returns:
        Whether the optimizer can do that.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    optimizer.found_inf = bad.float()
    return True


# --------------------------------------------------------------------------- tensors and meshes


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no values to ask for, because a program is traced."""
    return isinstance(tensor, FakeTensor)


def quiet_import(module: str) -> Any:
    """A module of torchao, or one that imports it, without what it warns of while it is imported.

    That is every kernel that it has for other hardware, and torch's next version.
    """
    logging.disable(logging.WARNING)
    try:
        return importlib.import_module(module)
    finally:
        logging.disable(logging.NOTSET)


def is_quantized(tensor: Tensor) -> bool:
    """Whether it stands for values that it holds in 8 bits, as torchao's tensors do."""
    return type(tensor) is not Tensor and hasattr(tensor, "codes")


def flat_group(mesh: DeviceMesh, axes: tuple[str, ...]) -> dist.ProcessGroup:
    """The ranks along several axes of a mesh.  All ranks of the world call it: it makes groups."""
    return mesh[axes]._flatten().get_group()


def is_strided(placement: Placement) -> bool:
    """Whether it is what FSDP gives to a parameter cut twice on one dim."""
    return type(placement).__name__ == "_StridedShard"


def split_axis(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh of one axis as one of several.  All ranks of the world call it: it makes groups."""
    return mesh._unflatten(0, sizes, names)


@contextmanager
def resharding_over(smaller: DeviceMesh) -> Iterator[None]:
    """In this context `fully_shard` takes ``smaller`` (copies, kept) to reshard over some ranks.

    By itself it makes a mesh for every block, which costs process groups (pytorch#153302) and
    hangs where there are other shard groups, whose process groups get the same names.
    """
    module: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_init")
    original, module.DeviceMesh = module.DeviceMesh, lambda *args: smaller
    try:
        yield
    finally:
        module.DeviceMesh = original


@contextmanager
def sharding_bytes() -> Iterator[None]:
    """Inside, `fully_shard` takes frozen parameters of whole numbers, too.

    FSDP of torch 2.11 makes every parameter one that learns before it looks whether it does.
    """
    module: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param")
    original = module.nn

    def parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad and data.is_floating_point())

    module.nn = SimpleNamespace(Module=nn.Module, Parameter=parameter)
    try:
        yield
    finally:
        module.nn = original


def gather_with(inner: nn.Module, outer: nn.Module) -> None:
    """Let FSDP gather the unit ``inner`` when the unit ``outer``, which runs it, is called, and
    free it when that is done.

    By itself it does so when ``inner`` is called.  Where ``outer`` is computed again selectively,
    torch would take FSDP's operators, which are others then, for those of the model.
    """
    state: Any = fully_shard.state(inner)  # type: ignore[attr-defined]
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    state._pre_forward_hook_handle = outer.register_forward_pre_hook(
        state._pre_forward, prepend=True, with_kwargs=True
    )
    state._post_forward_hook_handle = outer.register_forward_hook(state._post_forward)


class Sharded(NamedTuple):
    """A parameter as FSDP keeps it on this rank."""

    module: nn.Module  # that has it
    local: Tensor  # the shard, sharing memory
    even: bool  # all ranks' shards are equally large, and cut by rows
    group: dist.ProcessGroup  # of the ranks that hold shards


def sharded_parameters(parts: Iterable[nn.Module]) -> Iterator[Sharded]:
    """Every parameter that FSDP shards, once it has its memory."""
    for module in (module for part in parts for module in part.modules()):
        if not isinstance(module, FSDPModule):
            continue
        for group in _param_groups(fully_shard.state(module)):  # type: ignore[attr-defined]
            for param in group.fsdp_params:
                param.reset_sharded_param()  # FSDP does so in the first forward pass: sees memory
                rows, size = param._orig_size[0], param.shard_mesh.size()
                even = rows % size == 0 and param.fsdp_placement.dim == 0
                local = param.sharded_param._local_tensor
                holder = param._module_info.module
                yield Sharded(holder, local, even, param.shard_mesh.get_group())


def gather_as(sharded: Sharded, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Let FSDP gather a parameter by two functions; before the first forward pass.

    They are its ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, which it looks for at a
    parameter's tensor subclass.  An attribute of a plain tensor does as well, and the parameter
    stays plain to everybody else.
    """
    local: Any = sharded.local
    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = before, after


# --------------------------------------------------------------------------- pipelines


def schedule_from_file(path: str, stages: list[Any], microbatches: int, **options: Any) -> Any:
    """A schedule whose order is a CSV file: only the private runtime takes one."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    runtime: Any = _PipelineScheduleRuntime
    schedule = runtime(stages, microbatches, **options)
    schedule._load_csv(path)
    return schedule


@contextmanager
def keeping_gathered(stages: int) -> Iterator[None]:
    """Schedules made inside keep the weights of so many stages gathered at once.

    Else it is three, and of more those whose turn is far are freed, and gathered again for it.
    """
    from torch.distributed.pipelining import schedules

    private: Any = schedules
    original = private._add_unshard_reshard
    private._add_unshard_reshard = partial(original, max_active_stages=stages)
    try:
        yield
    finally:
        private._add_unshard_reshard = original


@contextmanager
def forward_only(schedule: Any) -> Iterator[None]:
    """Inside, the schedule's order is its forward passes alone.

    Its own ``eval`` runs the training order and leaves out what is backward, which fails where a
    forward and a backward are one action (DualPipeV).
    """
    from torch.distributed.pipelining import schedules as torch_schedules

    private: Any = torch_schedules
    if not isinstance(schedule, private._PipelineScheduleRuntime):
        yield  # one stage per rank: its eval is right
        return
    whole = schedule.pipeline_order_with_comms
    forwards = {
        rank: private._add_unshard_reshard(
            [action for action in _parts(order) if action.computation_type.value == "F"]
        )
        for rank, order in schedule.pipeline_order.items()
    }
    homes = schedule.stage_index_to_group_rank
    schedule.pipeline_order_with_comms = private._add_send_recv(
        forwards, stage_to_rank=lambda stage: homes[stage], num_stages=schedule._num_stages
    )
    try:
        yield
    finally:
        schedule.pipeline_order_with_comms = whole


def _parts(order: Iterable[Any]) -> Iterator[Any]:
    """The actions of one rank, one that overlaps two as both."""
    for action in order:
        if action is not None:
            yield from action.sub_actions or (action,)


def greet_others_only(stage: Any) -> None:
    """Keep a pipeline stage from a message to its own rank, which gloo cannot send.

    In its first step a stage of torch 2.11 sends a number to both neighbours, and in a V the two
    stages at the bottom are on one rank.
    """
    greetings = getattr(stage, "_get_init_p2p_neighbors_ops", None)
    if greetings is not None:
        own = stage.group_rank
        stage._get_init_p2p_neighbors_ops = lambda: [
            greeting for greeting in greetings() if greeting.group_peer != own
        ]


def receive_for_backward(stage: Any) -> None:
    """Let what a pipeline stage receives have gradients, even if an evaluation comes first.

    A stage of torch 2.11 makes the tensors that it receives into at its first pass, and decides
    then, for good, whether they have.
    """
    if not hasattr(stage, "_get_init_p2p_neighbors_ops"):
        return
    prepare = stage._prepare_forward_infra

    def prepare_for_backward(*args: Any, **kwargs: Any) -> Any:
        before, stage.has_backward = stage.has_backward, True
        try:
            return prepare(*args, **kwargs)
        finally:
            stage.has_backward = before

    stage._prepare_forward_infra = prepare_for_backward


def reduce_each_microbatch(stage: Any) -> None:
    """Let a pipeline stage reduce-scatter its gradients after every microbatch but the last.

    A schedule reduces once, after the last: until then whole gradients add up on every rank, in
    the dtype of the reduction.  With this they are shards from the first on, and only the last
    one's reduction goes on over the replicas.
    """
    if not isinstance(stage.submod, FSDPModule):
        return
    backward = stage.backward_maybe_with_nosync
    state: Any = fully_shard.state(stage.submod)  # type: ignore[attr-defined]

    def backward_and_reduce(kind: str, arguments: Any, last_backward: bool = False) -> Any:
        result = backward(kind, arguments, last_backward)
        if kind != "input" and not last_backward:  # of inputs only: no gradients of weights yet
            stage.submod.set_requires_gradient_sync(True)  # sets both
            stage.submod.set_requires_all_reduce(False)
            for unit in state._state_ctx.all_states:
                for params in _param_groups(unit):
                    params.post_backward()
            state._root_post_backward_final_callback()
            stage.submod.set_requires_gradient_sync(False)
        return result

    stage.backward_maybe_with_nosync = backward_and_reduce


def _param_groups(unit: Any) -> list[Any]:
    if hasattr(unit, "_fsdp_param_groups"):
        return list(unit._fsdp_param_groups)
    return [unit._fsdp_param_group] if unit._fsdp_param_group else []  # torch 2.11


# --------------------------------------------------------------------------- watching a step


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def watching_resizes(told: Callable[[torch.UntypedStorage, int], None]) -> Iterator[None]:
    """Inside, ``told`` hears of every storage that was resized, and how many bytes it had: FSDP
    gives memory back so."""
    storage: Any = torch.UntypedStorage
    original = storage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        before = self.nbytes()
        result = original(self, size)
        told(self, before)
        return result

    storage.resize_ = resize_
    try:
        yield
    finally:
        storage.resize_ = original


Around = Callable[..., AbstractContextManager[Any]]


def around_actions(schedule: Any, around: Around) -> Callable[[], None]:
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


@contextmanager
def working_out_shardings(told: Callable[[bool], None]) -> Iterator[None]:
    """Inside, ``told`` hears when DTensor begins (True) and ends to run an operator on tensors of
    global shape, which are not there, to see what comes of it."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagator: Any = ShardingPropagator
    original = propagator._propagate_tensor_meta_non_cached

    def propagate(*args: Any) -> Any:
        told(True)
        try:
            return original(*args)
        finally:
            told(False)

    propagator._propagate_tensor_meta_non_cached = propagate
    try:
        yield
    finally:
        propagator._propagate_tensor_meta_non_cached = original


@contextmanager
def waiting_for_others(told: Callable[[bool], None]) -> Iterator[None]:
    """Inside, ``told`` hears when a collective begins (True) and ends to be waited for."""
    work: Any = dist.Work
    original = work.wait

    def wait(self: Any, *args: Any) -> Any:
        told(True)
        try:
            return original(self, *args)
        finally:
            told(False)

    work.wait = wait
    try:
        yield
    finally:
        work.wait = original


@contextmanager
def around_collectives(around: Around) -> Iterator[None]:
    """Inside, collectives that Python starts, and the waits for them, happen in ``around(ranks)``.

    Args:
        around: is given the ranks of the process group.
    """
    owner: Any = dist.ProcessGroup
    work: Any = dist.Work
    names = [name for name in COLLECTIVES if hasattr(owner, name)]
    # As they are: what `getattr` gives is not bound to an instance any more when it is put back.
    before = [(owner, name, inspect.getattr_static(owner, name)) for name in names]
    before.append((work, "wait", inspect.getattr_static(work, "wait")))
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

    for name in names:
        setattr(owner, name, started(getattr(owner, name)))
    work.wait = wait
    try:
        yield
    finally:
        for where, name, call in before:
            setattr(where, name, call)


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


def record_memory(on: bool) -> None:
    """Note from now on, or not any more, where in the code a GPU's memory is taken."""
    torch.cuda.memory._record_memory_history("all" if on else None)


def dump_memory(path: Path) -> None:
    """What a GPU's memory is taken by, for https://pytorch.org/memory_viz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]


def group_of(args: Iterable[Any]) -> str:
    """The name of the process group in a collective's arguments: an object, or the last text."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return str(dist.ProcessGroup.unbox(arg).group_name)
    return str([arg for arg in args if isinstance(arg, str)][-1])


def ranks_of_group(name: str) -> list[int]:
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
    silent: Any = _shapes_are_known
    if not hasattr(owner, name):
        owner, name, silent = PipelineStage, "_get_init_p2p_neighbors_ops", _nobody_to_greet
    original, gather, isend = getattr(owner, name), dist.all_gather_object, dist.isend
    setattr(owner, name, silent)
    distributed: Any = dist
    inner: Any = distributed_c10d
    distributed.all_gather_object = _others_have_the_same
    if keep_sent:
        distributed.isend = inner.isend = lambda tensor, *args, **kwargs: _Sending(
            tensor, isend(tensor, *args, **kwargs)
        )
    try:
        yield
    finally:
        setattr(owner, name, original)
        distributed.all_gather_object = gather
        distributed.isend = inner.isend = isend
        dist.destroy_process_group()
        forget_meshes()


class _Sending(NamedTuple):
    """A message under way, and what is sent."""

    tensor: Tensor
    work: Any

    def wait(self, *args: Any) -> Any:
        return self.work.wait(*args)


def _others_have_the_same(objects: list[Any], own: Any, group: Any = None) -> None:
    objects[:] = [own] * len(objects)


def _nobody_to_greet(stage: Any) -> list[Any]:
    return []


def _shapes_are_known(schedule: Any, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
    from torch.distributed.pipelining import schedules

    modes: Any = schedules
    for stage in stages:
        assert not modes.InferenceMode.needs_dynamic(stage._user_meta, has_backward)
        stage._inference_mode = modes.InferenceMode.STATIC


def forget_meshes() -> None:
    """Make DTensor forget the meshes that it has seen.

    It takes equal meshes for the same, and would communicate in the process groups of the first.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
