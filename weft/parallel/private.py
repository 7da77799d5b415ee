"""What weft uses of PyTorch that is private, or differs between the versions it works with.

Each name says what is needed, and why the public interface does not give it.  The rest of weft
imports from here, but for the operators of attention (`weft.parallel.attention_ops`) and what it
takes to look on at a step (`weft.parallel.private_hooks`).  ``tests/parallel/test_private.py``
fails when one of them changes.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Placement


@contextmanager
def patch_attribute(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """In this context an attribute that a class, a module or an object has itself is another."""
    # As it is: what `getattr` gives of a class may not be bound to an instance any more.
    original = inspect.getattr_static(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


# --------------------------------------------------------------------------- collectives

# torch 2.13 renamed them and warns of the old names, which are the only ones before.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Collectives that stay in the graph under torch.compile, where the pass for asynchronous tensor
# parallelism looks for them.  The public ones break the graph.
c10d_functional = torch.ops._c10d_functional


def register_compile_callbacks(start: Callable[[], None], end: Callable[[bool], None]) -> None:
    """Call back when torch.compile begins to compile something, and when it has done so.

    Args:
        end: is told whether it was a backward pass.
    """
    from torch._dynamo.callback import CallbackTrigger, callback_handler

    callback_handler.register_start_callback(lambda about: start())
    callback_handler.register_end_callback(
        lambda about: end(about.callback_trigger == CallbackTrigger.LAZY_BACKWARD)
    )


def num_captured_graphs() -> int:
    """Return how many graphs torch.compile has captured in this process; 0 if it never ran."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def collect_recompile_reasons() -> list[str]:
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


def disable_recompile_limit() -> AbstractContextManager[None]:
    """In this context torch.compile does not give up on a function with many shapes."""
    from torch._dynamo.utils import disable_cache_limit

    return disable_cache_limit()


def set_activation_memory_budget(share: float) -> None:
    """Let torch.compile keep no more than a share of the activations for the backward pass."""
    from torch._functorch import config

    config.activation_memory_budget = share


def enable_async_tp(group: dist.ProcessGroup) -> None:
    """Let torch.compile hide gathers and scatters of ``group`` behind the products beside them.

    Asynchronous tensor parallelism (arXiv:2105.05720; arXiv:2410.06511, section 2.2): a gather and
    the product that it feeds become one operator that multiplies pieces while others arrive, over
    SymmetricMemory.  To be called before anything is compiled, on GPUs that reach each other's
    memory.
    """
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


def create_tcp_store(host: str, port: int, serve: bool, size: int | None = None) -> Any:
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
        families = {found[0] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
        listening = socket.create_server((host, port), family=family, backlog=2048)
        port = listening.getsockname()[1]
        more["master_listen_fd"] = listening.detach()
    return TCPStore(host, port, size, is_master=serve, wait_for_workers=False, **more)


def create_gloo_group(place: str, rank: int, size: int, address: str, timeout: timedelta) -> Any:
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


# --------------------------------------------------------------------------- optimizers


def set_found_inf(optimizer: Any, bad: Tensor) -> bool:
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


def run_function(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """``function.apply(*args)``, which has no types."""
    return function.apply(*args)  # type: ignore[no-untyped-call,no-any-return]


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no values to ask for, because a program is traced."""
    return isinstance(tensor, FakeTensor)


def import_quietly(module: str) -> Any:
    """A module of torchao, or one that imports it, without what it warns of while it is imported.

    That is every kernel that it has for other hardware, and torch's next version.
    """
    logging.disable(logging.WARNING)
    try:
        return importlib.import_module(module)
    finally:
        logging.disable(logging.NOTSET)


def is_quantized(tensor: Tensor) -> bool:
    """Whether it stands for values that it holds in 8 bits, as moments and torchao's tensors do."""
    return type(tensor) is not Tensor and hasattr(tensor, "codes")


def get_flat_group(mesh: DeviceMesh, axes: tuple[str, ...]) -> dist.ProcessGroup:
    """The ranks along several axes of a mesh.  All ranks of the world call it: it makes groups."""
    return mesh[axes]._flatten().get_group()


def is_strided_shard(placement: Placement) -> bool:
    """Whether it is what FSDP gives to a parameter cut twice on one dim."""
    return type(placement).__name__ == "_StridedShard"


def unflatten_axis(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh of one axis as one of several.  All ranks of the world call it: it makes groups."""
    return mesh._unflatten(0, sizes, names)


def use_reshard_mesh(smaller: DeviceMesh) -> AbstractContextManager[None]:
    """In this context `fully_shard` takes ``smaller`` (copies, kept) to reshard over some ranks.

    By itself it makes a mesh for every block, which costs process groups (pytorch#153302) and
    hangs where there are other shard groups, whose process groups get the same names.
    """
    module = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_init")
    return patch_attribute(module, "DeviceMesh", lambda *args: smaller)


def allow_integer_params() -> AbstractContextManager[None]:
    """Inside, `fully_shard` takes frozen parameters of whole numbers, too.

    FSDP of torch 2.11 makes every parameter one that learns before it looks whether it does.
    """
    module = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param")

    def parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad and data.is_floating_point())

    return patch_attribute(module, "nn", SimpleNamespace(Module=nn.Module, Parameter=parameter))


def move_fsdp_hooks(inner: nn.Module, outer: nn.Module) -> None:
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


class ShardedParameter(NamedTuple):
    """A parameter as FSDP keeps it on this rank."""

    module: nn.Module  # that has it
    local: Tensor  # the shard, sharing memory
    even: bool  # all ranks' shards are equally large, and cut by rows
    group: dist.ProcessGroup  # of the ranks that hold shards


def iter_sharded_parameters(parts: Iterable[nn.Module]) -> Iterator[ShardedParameter]:
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
                yield ShardedParameter(holder, local, even, param.shard_mesh.get_group())


def set_all_gather_hooks(sharded: ShardedParameter, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Let FSDP gather a parameter by two functions; before the first forward pass.

    They are its ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, which it looks for at a
    parameter's tensor subclass.  An attribute of a plain tensor does as well, and the parameter
    stays plain to everybody else.
    """
    local: Any = sharded.local
    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = before, after


# --------------------------------------------------------------------------- pipelines


def load_schedule(path: str, stages: list[Any], microbatches: int, **options: Any) -> Any:
    """A schedule whose order is a CSV file: only the private runtime takes one."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    runtime: Any = _PipelineScheduleRuntime
    schedule = runtime(stages, microbatches, **options)
    schedule._load_csv(path)
    return schedule


def set_max_active_stages(stages: int) -> AbstractContextManager[None]:
    """Schedules made inside keep the weights of so many stages gathered at once.

    Else it is three, and of more those whose turn is far are freed, and gathered again for it.
    """
    from torch.distributed.pipelining import schedules

    name = "_add_unshard_reshard"
    add = partial(getattr(schedules, name), max_active_stages=stages)
    return patch_attribute(schedules, name, add)


@contextmanager
def use_forward_only_order(schedule: Any) -> Iterator[None]:
    """Inside, the schedule's order is its forward passes alone.

    Its own ``eval`` runs the training order and leaves out what is backward, which fails where a
    forward and a backward are one action (DualPipeV).
    """
    from torch.distributed.pipelining import schedules as torch_schedules

    private: Any = torch_schedules
    if not isinstance(schedule, private._PipelineScheduleRuntime):
        yield  # one stage per rank: its eval is right
        return
    forwards = {
        rank: private._add_unshard_reshard(
            [action for action in _split_overlapped_actions(order) if action.computation_type.value == "F"]
        )
        for rank, order in schedule.pipeline_order.items()
    }
    homes = schedule.stage_index_to_group_rank
    order = private._add_send_recv(
        forwards, stage_to_rank=lambda stage: homes[stage], num_stages=schedule._num_stages
    )
    with patch_attribute(schedule, "pipeline_order_with_comms", order):
        yield


def _split_overlapped_actions(order: Iterable[Any]) -> Iterator[Any]:
    """The actions of one rank, one that overlaps two as both."""
    for action in order:
        if action is not None:
            yield from action.sub_actions or (action,)


def skip_self_p2p_init(stage: Any) -> None:
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


def enable_recv_grad(stage: Any) -> None:
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


def unshard_for_split_backward(stage: Any) -> None:
    """Gather a pipeline stage's parameters before each half of a split backward pass.

    Both halves (input gradients, then weight gradients) find the leaves of the autograd graph
    through the stage's parameters.  Of a unit that FSDP has resharded, since its own forward pass
    or by that of another microbatch, those are the shards, which are no part of the graph: torch
    drops the weight gradients without an error.
    """
    backward = stage.backward_maybe_with_nosync
    modules: list[Any] = list(stage.submod.modules())
    units: list[Any] = [module for module in modules if isinstance(module, FSDPModule)]

    def gather_and_run_backward(kind: str, arguments: Any, last_backward: bool = False) -> Any:
        if kind != "full":
            for handle in [unit.unshard(async_op=True) for unit in units]:
                handle.wait()
        return backward(kind, arguments, last_backward)

    stage.backward_maybe_with_nosync = gather_and_run_backward


def reduce_scatter_each_microbatch(stage: Any) -> None:
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
