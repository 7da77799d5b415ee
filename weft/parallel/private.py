"""PyTorch internals that weft uses, and names that differ between versions.

Each function says what it does and why the public interface is not enough.  Other modules that use
private parts of PyTorch: `weft.parallel.private_schedules` (pipelines),
`weft.parallel.block_attention` and `weft.parallel.collectives` (operators),
`weft.parallel.activation_checkpoint` (partitioners), `weft.supervision.rendezvous`,
`weft.supervision.launcher`, and `weft.estimate` (a fake world, for plans).  Some modules take
one name where they use it: fake tensors, dynamo's and inductor's settings and caches.
``tests/parallel/test_private.py`` fails when a function of this module changes.

*When can they go?*  Numbers are issues and pull requests of pytorch/pytorch.  Functions that are
not listed have no public counterpart that we know.

    with torch 2.11     `allow_integer_params` (#177844), `skip_self_p2p_init` (#160210 added the
                        messages), `enable_recv_grad` (#162822 is of the same kind), the second
                        halves of `use_symmetric_memory` and `_param_groups`
    from torch 2.13 on  `all_gather` and `reduce_scatter` (renamed: #186123), `move_fsdp_hooks`
                        (a mesh per parameter: #173509), `disable_recompile_limit` (an argument of
                        torch.compile), the gradients of `weft.parallel.collectives` (#168140)
    from torch 2.14 on  `run_schedule` (lists of microbatches: #188500)
    from torch 2.15 on  `set_max_active_stages` (an argument of schedules: #193972),
                        `free_received` (#196463)
    not in torch 2.13   `use_reshard_mesh` (#153302), `create_tcp_store` (#173909)
"""

from __future__ import annotations

import importlib
import inspect
import io
import json
import logging
import operator
import os
import pickle
import re
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy

from weft.config.accelerators import GPU
from weft.parallel.dtensor import shard_like, to_local

ContextFactory = Callable[..., AbstractContextManager[Any]]


@contextmanager
def patch_attribute(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Replace an attribute that ``owner`` itself defines, in this context."""
    # Not `getattr`: for a class, it would turn a method or static method into a plain function.
    original = inspect.getattr_static(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


# --------------------------------------------------------------------------- collectives

# torch 2.13 renamed these functions and warns about the old names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def register_compile_callbacks(start: Callable[[], None], end: Callable[[bool], None]) -> None:
    """Register callbacks for the start and the end of every compilation.

    Args:
        start: called when a compilation starts.
        end: called when it ends; the argument is True for a backward pass.
    """
    from torch._dynamo.callback import CallbackTrigger, callback_handler

    callback_handler.register_start_callback(lambda args: start())
    callback_handler.register_end_callback(
        lambda args: end(args.callback_trigger == CallbackTrigger.LAZY_BACKWARD)
    )


def num_captured_graphs() -> int:
    """Return the number of graphs that torch.compile captured in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def collect_recompile_reasons() -> list[str]:
    """Return a list to which each later recompilation appends its reason."""
    reasons: list[str] = []

    class ReasonHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines = [line.strip(" -") for line in record.getMessage().splitlines()]
            reasons.extend(line for line in lines[-1:] if line)

    torch._logging.set_logs(recompiles=True)  # type: ignore[attr-defined]
    logger = logging.getLogger("torch._dynamo.guards.__recompiles")
    logger.addHandler(ReasonHandler())
    logger.propagate = False
    return reasons


def disable_recompile_limit() -> AbstractContextManager[None]:
    """Let torch.compile compile a function for any number of shapes."""
    from torch._dynamo.utils import disable_cache_limit

    return disable_cache_limit()


def without_fake_tensors() -> AbstractContextManager[Any]:
    """Create real tensors in this context, as a mesh needs, also in a trace."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Run operators outside of all dispatch modes, such as those of a trace."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def set_activation_memory_budget(share: float) -> None:
    """Limit the share of activations that torch.compile saves for backward."""
    from torch._functorch import config

    config.activation_memory_budget = share


def detach_with_version(tensor: Tensor) -> Tensor:
    """Return a detached view that shares the tensor's version counter.

    Inside a dispatch mode, ``Tensor.detach`` gives the view another one.
    """
    # As `_detach_helper` of torch.utils.checkpoint, which torch 2.11 lacks.
    core: Any = torch._C
    with core._SetExcludeDispatchKeyGuard(core.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def select_saved_results(
    policy: Callable[[], Callable[[str], bool]], cache_key: str
) -> dict[str, Any]:
    """Return options of torch.compile that save only selected results.

    All others are recomputed.  ``torch.utils.checkpoint`` cannot select in a function whose graph
    breaks.

    Args:
        policy: called for each graph.  It returns a function that is called with the names of the
            forward pass's operators, in order, and returns True to save the result.
        cache_key: differs for policies that select differently; part of the key of cached code.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class SelectSavedResults(CustomGraphPass):
        def __call__(self, graph: Any) -> None:
            should_save, modes = policy(), CheckpointPolicy
            for node in graph.nodes:
                if node.meta.get("partitioner_tag") == "is_backward":
                    continue
                if node.target is operator.getitem:  # a result of an operator with several
                    node.meta["recompute"] = node.args[0].meta.get("recompute")
                elif hasattr(node.target, "name"):  # neither an input nor arithmetic of sizes
                    is_saved = should_save(node.target.name())
                    mode = modes.MUST_SAVE if is_saved else modes.PREFER_RECOMPUTE
                    node.meta["recompute"] = mode

        def uuid(self) -> bytes:
            return get_hash_for_files((__file__,), cache_key)

    return {"joint_custom_pre_pass": SelectSavedResults()}


def enable_async_tp(group: dist.ProcessGroup) -> None:
    """Let torch.compile overlap the collectives of ``group`` with matmuls.

    Asynchronous tensor parallelism (arXiv:2105.05720; arXiv:2410.06511, section 2.2) fuses a gather
    and the matmul that uses it into one operator, which multiplies chunks while others arrive over
    SymmetricMemory.  Call it before the first compilation, on GPUs with access to each other's
    memory.
    """
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    config._micro_pipeline_tp = True
    enable_symm_mem_for_group(group.group_name)


def use_symmetric_memory(unit: Any) -> None:
    """Let an FSDP unit communicate over symmetric memory.

    NCCL then uses copy engines or the switch.  torch 2.11 lacks the method and can only allocate
    from NCCL's memory pool.
    """
    if hasattr(unit, "set_symm_mem_for_comm"):
        unit.set_symm_mem_for_comm()
    else:
        unit.set_allocate_memory_from_process_group_for_comm(True)


def create_tcp_store(host: str, port: int, serve: bool, size: int | None = None) -> Any:
    """Create a TCPStore that listens only on the interface of ``host``.

    By default, a TCPStore listens on every interface, where anybody could write to it.

    Args:
        host: address or name of the interface.
        port: 0 chooses a free port.
        serve: True on the process that listens.
        size: number of processes, if known.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    options: dict[str, Any] = {}
    if serve:
        families = {info[0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
        server = socket.create_server((host, port), family=family, backlog=2048)
        port = server.getsockname()[1]
        options["master_listen_fd"] = server.detach()
    return TCPStore(host, port, size, is_master=serve, wait_for_workers=False, **options)


def create_gloo_group(prefix: str, rank: int, size: int, address: str, timeout: timedelta) -> Any:
    """Create a standalone gloo process group that listens on one interface.

    torch does not register the group.  So deleting it closes it, which its peers detect, and a new
    group can have other processes.  The public constructor takes the interface from the
    environment.

    Args:
        prefix: HOST:PORT/NAME of a store; each name can be used once.
        rank: rank of this process in the group.
        size: number of processes in the group.
        address: this process's address on the interface.
        timeout: of every operation.
    """
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    endpoint, _, name = prefix.partition("/")
    host, _, port = endpoint.rpartition(":")
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = timeout
    return gloo(PrefixStore(name, store), rank, size, options)


def create_group(device: str, rows: Tensor, name: str) -> Any:
    """Create this rank's group of a partition of all ranks; a collective.

    The group has one backend, with the timeout that this backend has in the world.  NCCL splits the
    communicator of the world, once for all rows and without the store.  The ranks of a gloo group
    meet in the store: 2 n + 1 requests for each of n ranks.

    `DeviceMesh` calls `split_group` instead if `init_process_group` got a device.  That splits the
    world's gloo as well, with the options of NCCL, so gloo gets torch's default timeout, and meets
    once more per axis (pytorch#182057).  Without a device `DeviceMesh` calls `new_group` for every
    row, with torch's default timeout.

    Args:
        device: type of the devices.
        rows: int64, the global ranks of one group in each row; this rank needs only its own.
        name: mesh axis.
    """
    world: Any = dist.group.WORLD
    if rows.shape[1] == world.size():
        return world
    ranks: list[int] = rows[(rows == dist.get_rank()).any(1)][0].tolist()
    backend = dict(pair.split(":") for pair in dist.get_backend_config().split(","))[device]
    # Backends of other packages may have no options; gloo has the same timeout.
    backends = (world._get_backend(torch.device(kind)) for kind in (device, "cpu"))
    options = next(filter(None, (getattr(each, "options", None) for each in backends)), None)
    timeout = getattr(options, "_timeout", None)
    return dist.new_group(ranks, timeout, backend, use_local_synchronization=True, group_desc=name)


def to_group_device(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Move a tensor to a device on which ``group`` communicates, unless it is on one."""
    devices = [d.type for d in (group or dist.group.WORLD)._device_types]  # type: ignore[union-attr]
    return tensor if tensor.device.type in devices else tensor.to(devices[0])


# --------------------------------------------------------------------------- optimizers


def set_grad_scaling(optimizer: Any, found_inf: Tensor, grad_scale: Tensor | None) -> bool:
    """Make the next step of a fused optimizer divide gradients, or be a no-op.

    torch's GradScaler uses the same attributes.  torch's kernels also write the divided gradients,
    but not in a step that is a no-op.

    Args:
        optimizer: any optimizer; its parameters are on one device.
        found_inf: true makes the step a no-op.
        grad_scale: float32 scalar by which gradients are divided; None: they are not.

    Returns:
        False if the optimizer does not support it.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    # Under `parallel.cpu_offload` the host waits for the values here: torch's optimizers copy them
    # without a wait, and would read memory that is not written yet.
    device = optimizer.param_groups[0]["params"][0].device
    optimizer.found_inf = found_inf.to(device, torch.float32)
    optimizer.grad_scale = None if grad_scale is None else grad_scale.to(device)
    return True


# --------------------------------------------------------------------------- meshes and FSDP


def use_reshard_mesh(mesh: DeviceMesh | None) -> AbstractContextManager[None]:
    """Make `fully_shard` reshard over ``mesh`` (copies, shards) in this context.

    By default, it creates a mesh per block.  This costs process groups (pytorch#153302), and hangs
    if there are other shard groups, whose process groups get the same names.
    """
    module = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_init")
    return patch_attribute(module, "DeviceMesh", lambda *args: mesh)


def allow_reshard_of_dtensors(unit: Any) -> None:
    """Let an FSDP unit reshard tensor-parallel weights over some of the ranks.

    FSDP refuses, because it has no placements for the DTensor that it puts in the module until the
    next gather.  Nothing reads that DTensor in weft.  The gather reads the flat shard beside it.
    """
    for group in _param_groups(_fsdp_state(unit)):
        for param in group.fsdp_params:

            def reshard(param: Any = param, original: Any = param.to_sharded_post_forward) -> None:
                with patch_attribute(param, "is_dtensor", False):
                    original()

            param.to_sharded_post_forward = reshard


def allow_integer_params() -> AbstractContextManager[None]:
    """Make `fully_shard` accept frozen integer parameters in this context.

    FSDP of torch 2.11 creates each sharded parameter with ``requires_grad=True`` first.
    """
    module = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param")

    def parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad and data.is_floating_point())

    return patch_attribute(module, "nn", SimpleNamespace(Module=nn.Module, Parameter=parameter))


def move_fsdp_hooks(inner: nn.Module, outer: nn.Module) -> None:
    """Make FSDP gather and free the unit ``inner`` with ``outer``, which calls it.

    By default, FSDP gathers ``inner`` when it is called.  Selective recomputation of ``outer``
    counts operators, and would confuse FSDP's operators, which differ in recomputation, with those
    of the model.
    """
    state: Any = _fsdp_state(inner)
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    state._pre_forward_hook_handle = outer.register_forward_pre_hook(
        state._pre_forward, prepend=True, with_kwargs=True
    )
    state._post_forward_hook_handle = outer.register_forward_hook(state._post_forward)


def replace_all_reduce(unit: Any, create: Callable[[Any], Callable[[Tensor, bool], None]]) -> None:
    """Replace an FSDP unit's all-reduce by a function of every backward pass.

    FSDP's own hook (``set_all_reduce_hook``) follows the all-reduce over replicas, and FSDP calls
    neither before the last microbatch of a step.  Without replicas it always calls the hook.  So
    the unit reduces as if it had none; its parameters still know their replicas.

    Args:
        unit: unchanged if it has no replicas.
        create: takes the group of the replicas; returns the function, which takes the flat
            gradients of the unit, and True in the last microbatch.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    for params in _param_groups(_fsdp_state(unit)):  # one; a stage's root may have none
        mesh = params.mesh_info.mesh
        if mesh.ndim == 1:
            continue
        reduce, shard_mesh = create(mesh.get_group(0)), mesh[mesh.mesh_dim_names[1]]
        shards = FSDPMeshInfo(shard_mesh, shard_mesh_dim=0)
        if params.post_forward_mesh_info is params.mesh_info:  # reshards over all shards
            params.post_forward_mesh_info = shards
        params.mesh_info = shards
        unit.set_all_reduce_hook(
            lambda gradients, params=params, reduce=reduce: reduce(
                gradients, params.all_reduce_grads
            )
        )


class ShardedParameter(NamedTuple):
    """A parameter that FSDP has sharded."""

    module: nn.Module  # which has the parameter
    name: str  # in the module
    local: Tensor  # this rank's shard, sharing memory
    is_even: bool  # dim 0 is sharded, and all shards have the same size
    group: dist.ProcessGroup  # of the ranks that hold the shards


def iter_sharded_parameters(model_parts: Iterable[nn.Module]) -> Iterator[ShardedParameter]:
    """Yield every parameter that FSDP shards, after parameters are allocated."""
    for unit in chain.from_iterable(map(iter_fsdp_units, model_parts)):
        for group in _param_groups(_fsdp_state(unit)):
            for param in group.fsdp_params:
                # As FSDP does in the first forward pass: use the allocated memory.
                param.reset_sharded_param()
                rows, size = param._orig_size[0], param.shard_mesh.size()
                is_even = rows % size == 0 and param.fsdp_placement.dim == 0
                local = param.sharded_param._local_tensor
                owner = param._module_info.module, param._module_info.param_name
                yield ShardedParameter(*owner, local, is_even, param.shard_mesh.get_group())


def set_all_gather_hooks(
    sharded: ShardedParameter,
    pre_all_gather: Callable[..., Any],
    post_all_gather: Callable[..., Any],
) -> None:
    """Set FSDP's all-gather hooks of a parameter, before the first forward pass.

    FSDP expects ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` as methods of a tensor
    subclass.  Attributes of a plain tensor work too, and the parameter stays a plain tensor for all
    other code.
    """
    local: Any = sharded.local
    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = pre_all_gather, post_all_gather


# --------------------------------------------------------------------------- float8


def scaled_grouped_mm(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, ends: Tensor, fast: bool
) -> Tensor:
    """Multiply groups of float8 matrices; return bfloat16.

    ``F.scaled_grouped_mm`` is public, but cannot run on fake tensors or be compiled by inductor.

    Args:
        a: e4m3 ``[P, K]``, rows (or columns, if ``b`` is 2-dimensional) in groups; row-major.
        b: e4m3 ``[E, K, N]`` or ``[P, N]``; column-major.
        a_scale: factors that undo the scales; float32, one per row (and group), or tiles of e8m0.
        b_scale: likewise, of the columns of ``b``.
        ends: int32 ``[E]``, where groups end.
        fast: accumulate with fewer bits, on Hopper.
    """
    return torch._scaled_grouped_mm(
        a, b, a_scale, b_scale, ends, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


# --------------------------------------------------------------------------- pipelines


def run_schedule(
    schedule: Any,
    args: list[tuple[Tensor, ...]],
    kwargs: list[dict[str, Any]],
    targets: list[Any],
    losses: list[Tensor],
) -> None:
    """Run a pipeline schedule over microbatches; forward only under ``torch.no_grad``.

    The schedule's own ``step`` takes one tensor as target, for all microbatches together.  Here the
    loss function gets ``targets[i]``, any object, with the output of microbatch i.

    Args:
        schedule: the schedule.
        args: positional inputs of each microbatch; empty tuples without the first stage.
        kwargs: keyword inputs of each microbatch.
        targets: the second argument of the loss function for each microbatch.
        losses: receives the losses of all microbatches, if this rank has the last stage.

    Raises:
        Exception: the error of a stage, which torch wraps in one that hides its message and type.
    """
    stages = _stages(schedule)
    has_backward = schedule._has_backward and torch.is_grad_enabled()
    with patch_attribute(schedule, "_has_backward", has_backward):
        for stage in stages:
            stage.has_backward = has_backward
            stage.clear_runtime_states()
        try:
            schedule._step_microbatches(args, kwargs, targets, losses, return_outputs=False)
        except RuntimeError as error:
            if error.__cause__ is not None:
                raise error.__cause__ from None
            raise


def _stages(schedule: Any) -> list[Any]:
    return schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]


@contextmanager
def use_forward_only_order(schedule: Any) -> Iterator[None]:
    """Reduce a schedule's order to its forward passes, in this context.

    The schedule's own ``eval`` (pytorch#157795) runs the training order and skips backward actions.
    This fails if one action is a forward and a backward pass (DualPipeV): in torch 2.13, "can't
    steal_bwd_input if this stage doesn't have backward".
    """
    from torch.distributed.pipelining import schedules as torch_schedules

    private: Any = torch_schedules
    if not isinstance(schedule, private._PipelineScheduleRuntime):
        yield  # one stage per rank, so its eval is correct
        return
    forwards = {
        rank: private._add_unshard_reshard(
            [
                action
                for action in _split_overlapped_actions(order)
                if action.computation_type.value == "F"
            ]
        )
        for rank, order in schedule.pipeline_order.items()
    }
    stage_to_rank = schedule.stage_index_to_group_rank
    order = private._add_send_recv(
        forwards, stage_to_rank=lambda stage: stage_to_rank[stage], num_stages=schedule._num_stages
    )
    if hasattr(private, "_add_wait_send"):  # from torch 2.15 on
        order = private._add_wait_send(order)
    with patch_attribute(schedule, "pipeline_order_with_comms", order):
        yield


def _split_overlapped_actions(order: Iterable[Any]) -> Iterator[Any]:
    """Yield a rank's actions; an action that overlaps two becomes both."""
    for action in order:
        if action is not None:
            yield from action.sub_actions or (action,)


def wrap_backward(stage: Any, splits_backward: bool, reduce_scatter: bool) -> None:
    """Add up a stage's gradients after each microbatch, and maybe reduce-scatter them.

    By default, FSDP adds them to the sum of the step, in the dtype of the reduction, in the next
    backward pass.  Deferred weight gradients of several microbatches would be added up in the
    compute dtype before.

    Args:
        stage: the stage.
        splits_backward: its module has `weft.parallel.weight_gradients.WeightGradients`.
        reduce_scatter: By default, a schedule reduces once, after the last microbatch, and
            accumulates unsharded gradients until then.  If True, it accumulates shards, and only
            the reduction after the last microbatch includes the replicas.
    """
    module = stage.submod
    if reduce_scatter and is_fsdp_unit(module):
        # torch 2.15 refuses to finish a backward pass while sums over a shard group have not been
        # added over its replicas.  Here the last reduction of every unit does that.
        _fsdp_state(module)._validate_finalize_backward = lambda: None

    def run(backward: Callable[..., Any], *args: Any, **options: Any) -> Any:
        is_input_half = not options.get("full_backward", True)
        if splits_backward:
            module.weight_gradients.is_deferred = is_input_half
        result = backward(*args, **options)
        if not (is_fsdp_unit(module) and stage.has_backward) or is_input_half:
            return result  # in an evaluation, `backward` did nothing
        groups = [g for s in _fsdp_state(module)._state_ctx.all_states for g in _param_groups(s)]
        for params in groups if reduce_scatter else []:
            _complete_gradients(params)
        if not options["last_backward"]:
            if reduce_scatter:
                module.set_requires_gradient_sync(True)  # also sets all_reduce
                module.set_requires_all_reduce(False)
            for params in groups:
                params.post_backward()
            if reduce_scatter:
                _fsdp_state(module)._root_post_backward_final_callback()
                module.set_requires_gradient_sync(False)
        return result

    if splits_backward or reduce_scatter:
        for name in ("backward_one_chunk", "backward_weight_one_chunk"):
            setattr(stage, name, partial(run, getattr(stage, name)))


def _complete_gradients(group: Any) -> None:
    """Give all parameters a gradient, of zeros if they have none, in one dtype.

    FSDP adds the sums of a shard group's microbatches by position, before it sums over replicas.
    The first half of a backward pass adds gradients of norms to those of the microbatch before, in
    the dtype of the reduction; the second leaves gradients of matrices in the compute dtype.
    """
    params = [param for param in group.fsdp_params if hasattr(param, "_unsharded_param")]
    # torch 2.15 sums in `weight.grad`, in one dtype.
    has_sums = any(hasattr(param, "to_accumulated_grad_if_needed") for param in params)
    is_mixed = has_sums and any(param.unsharded_accumulated_grad is not None for param in params)
    for param in params:
        weight, total = param._unsharded_param, param.unsharded_accumulated_grad
        if weight.requires_grad and weight.grad is None and total is None:
            local = to_local(weight)  # perhaps in float8, which has no `zeros_like`
            dtype = local.dtype if has_sums else weight.grad_dtype or local.dtype
            zeros = torch.zeros(local.shape, dtype=dtype, device=local.device)
            weight.grad = shard_like(weight, zeros)
        if is_mixed:
            param.accumulate_unsharded_grad_if_needed()
            param.to_accumulated_grad_if_needed()


def is_fsdp_unit(module: nn.Module) -> TypeGuard[Any]:
    """Return True if `fully_shard` has sharded the module, without an import of FSDP."""
    package = sys.modules.get("torch.distributed.fsdp")
    return package is not None and isinstance(module, package.FSDPModule)


def iter_fsdp_units(model: nn.Module) -> Iterator[Any]:
    """Yield each FSDP unit of a model once, as its first module."""
    states = set()
    for module in model.modules():
        if is_fsdp_unit(module) and (state := _fsdp_state(module)) not in states:
            states.add(state)
            yield module


def _fsdp_state(unit: nn.Module) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard.state(unit)  # type: ignore[attr-defined]


def _param_groups(unit: Any) -> list[Any]:
    if hasattr(unit, "_fsdp_param_groups"):
        return list(unit._fsdp_param_groups)
    return [unit._fsdp_param_group] if unit._fsdp_param_group else []  # torch 2.11


def wrap_pipeline_actions(schedule: Any, make_context: ContextFactory) -> Callable[[], None]:
    """Run each action of a pipeline schedule in a context.

    Args:
        schedule: a schedule of torch.distributed.pipelining.
        make_context: takes the index of the stage among this rank's stages, the kind of the action
            (F, B, I or W), and the microbatch.

    Returns:
        A function that removes the wrappers.
    """
    stages = _stages(schedule)
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


# --------------------------------------------------------------------------- observing a step


def is_in_backward() -> bool:
    """Return True if autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


@torch.library.custom_op("weft::add_in_forward", mutates_args=("total",))
def add_in_forward(total: Tensor, value: Tensor) -> None:
    """Add a value to a total in place, but not when activations are computed again.

    An operator, because torch.compile traces a call of it without its condition.
    """
    if not is_in_backward():
        total.add_(value)


@contextmanager
def wrap_collectives(make_context: ContextFactory) -> Iterator[None]:
    """Run each collective that Python starts, and each wait, in a context.

    Args:
        make_context: takes the ranks of the process group.
    """
    owner: Any = dist.ProcessGroup
    work: Any = dist.Work
    # The methods that start a collective return its work; torch 2.13 renamed some.
    collectives = [
        name
        for name, method in vars(owner).items()
        if re.search(r"-> [\w.:]*Work\b", method.__doc__ or "")
    ]
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
        for name in collectives:
            stack.enter_context(patch_attribute(owner, name, wrap(getattr(owner, name))))
        stack.enter_context(patch_attribute(work, "wait", wait))
        yield


def enable_expandable_segments() -> None:
    """Let the CUDA allocator grow segments, which then fragment less.

    Call it before the first allocation on a GPU.  It changes nothing if the user configures the
    allocator, or registers its memory with NCCL, which is incompatible.  The variable alone would
    come too late: torch reads it when CUDA is initialized.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    if not {*names, "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"} & os.environ.keys():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def set_memory_history(enabled: bool) -> None:
    """Start or stop to record the stack of each CUDA allocation."""
    torch.get_device_module(GPU).memory._record_memory_history("all" if enabled else None)


def dump_memory_snapshot(path: Path) -> None:
    """Write a CUDA memory snapshot for https://pytorch.org/memory_viz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.get_device_module(GPU).memory._dump_snapshot(str(path))


def get_group_ranks(name: str) -> list[int]:
    """Return the ranks of the process group of that name."""
    private: Any = dist.distributed_c10d
    return dist.get_process_group_ranks(private._resolve_process_group(name))


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


class _PlainDataUnpickler(pickle.Unpickler):
    """Unpickler for plain data; refuses classes and functions, which could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not plain data")


def parse_recorder_dump(data: bytes) -> tuple[list[CollectiveRecord], dict[str, list[int]]]:
    """Return the collectives of a dump of NCCL, and the ranks of each group.

    Raises:
        Exception: of almost any type, if ``data`` is not such a dump.
    """
    dump = _PlainDataUnpickler(io.BytesIO(data)).load()
    groups = {name: json.loads(each["ranks"]) for name, each in dump["pg_config"].items()}
    return parse_collectives(dump), {name: sorted(ranks) for name, ranks in groups.items()}


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
