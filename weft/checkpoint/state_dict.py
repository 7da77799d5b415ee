"""The training state as one flat dictionary of named tensors.

Names are ``model.<name>`` and ``optim.<name>.<key>``, with the model's parameter names, which are
the same under every layout.  DTensors carry their own sharding.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from weft.optim.matrix_exchange import flat_zeros
from weft.parallel.dtensor import is_dtensor, is_quantized, to_local
from weft.parallel.tied_parameters import tied_group

StateDict = dict[str, torch.Tensor]


def trainable_parameters(model_parts: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name in the full model, parameter) of this rank's trainable parameters."""
    return (pair for pair in _all_parameters(model_parts).items() if pair[1].requires_grad)


def saved_parameters(model_parts: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that every checkpoint contains.

    Of a model with adapters these are the adapters and what else is trained, of any other model
    all, also those that ``optim.groups`` freezes.
    """
    params = _all_parameters(model_parts)
    has_adapters = any(map(_is_adapter, params))
    return (
        (name, param)
        for name, param in params.items()
        if param.requires_grad or _is_adapter(name) or not has_adapters
    )


def frozen_parameters(model_parts: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters below adapters, which only the base checkpoint contains."""
    saved = dict(saved_parameters(model_parts))
    return (pair for pair in _all_parameters(model_parts).items() if pair[0] not in saved)


def _is_adapter(name: str) -> bool:
    """Return True for the name of an adapter's parameter: see `weft.parallel.lora`."""
    return ".lora_" in name


def _all_parameters(model_parts: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """Return the parameters by name; of a tied parameter the first copy on this rank."""
    params: dict[str, nn.Parameter] = {}
    for part in model_parts:
        for name, param in part.named_parameters():
            params.setdefault(name, param)
    return params


def persistent_buffers(model_parts: Iterable[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name in the full model, buffer) of persistent buffers.

    Every rank holds them unsharded.  Buffers that follow from the configuration, such as rotary
    tables, are not persistent.
    """
    for part in model_parts:
        for prefix, module in part.named_modules():
            non_persistent = module._non_persistent_buffers_set
            for name, buffer in module.named_buffers(prefix, recurse=False):
                if name.rpartition(".")[2] not in non_persistent:
                    yield name, buffer


def model_state(model_parts: Sequence[nn.Module]) -> StateDict:
    """Return the parameters and buffers of a checkpoint as ``model.<name>``.

    The tensors share memory with the model.
    """
    params = {f"model.{name}": param.data for name, param in saved_parameters(model_parts)}
    return params | {f"model.{name}": buffer for name, buffer in persistent_buffers(model_parts)}


def optimizer_state(model_parts: Iterable[nn.Module], optimizer: Optimizer) -> StateDict:
    """Return ``optim.<name>.<key>`` -> tensor, sharing memory; empty before step 1.

    Learning rates and other hyperparameters are not included, because they follow from the Job.
    """
    optimized = {param for group in optimizer.param_groups for param in group["params"]}
    state: StateDict = {}
    for name, param in trainable_parameters(model_parts):
        # A gathered parameter in place of its shard would silently lose its state.
        assert param in optimized, f"the optimizer does not have the parameter {name}"
        for key, value in optimizer.state.get(param, {}).items():
            state[f"optim.{name}.{key}"] = value
    return state


def checkpoint_tensors(model_parts: Sequence[nn.Module], optimizer: Optimizer) -> StateDict:
    """Return the tensors of a checkpoint by name, sharing memory."""
    return model_state(model_parts) | optimizer_state(model_parts, optimizer)


def allocate_optimizer_state(
    model_parts: Iterable[nn.Module],
    optimizer: Optimizer,
    saved: Mapping[str, tuple[torch.Size, torch.dtype]],
) -> None:
    """Allocate uninitialized optimizer state for the tensors of a checkpoint.

    A saved tensor with its parameter's shape is sharded like the parameter.  One whose key is in
    the optimizer's ``flat_state`` is sharded as `weft.optim.matrix_exchange.flat_zeros` does.  Any
    other (AdamW's step count) is unsharded on every rank.

    Args:
        model_parts: this rank's parts of the model.
        optimizer: receives the tensors.
        saved: shape and dtype of every tensor in the checkpoint, by name.
    """
    params = dict(trainable_parameters(model_parts))
    states: dict[torch.Tensor, StateDict] = {param: {} for param in params.values()}
    flat_state = getattr(optimizer, "flat_state", ())
    for full_name, (shape, dtype) in saved.items():
        kind, _, suffix = full_name.partition(".")
        name, _, key = suffix.rpartition(".")
        if kind != "optim" or name not in params:
            continue
        param = params[name]
        if key in flat_state and len(shape) == 1:
            states[param][key] = flat_zeros(param, shape[0])
        elif shape == param.shape:
            # Moments that will be rounded are first loaded at full size into CPU memory.
            load_device = "cpu" if hasattr(optimizer, "convert_loaded_state") else None
            states[param][key] = torch.empty_like(param.data, dtype=dtype, device=load_device)
        else:
            # Fused optimizers hold the count on the parameter's device.
            device = to_local(param).device
            states[param][key] = torch.empty(shape, dtype=dtype, device=device)
    optimizer.state.update(states)


def upcast_moments(optimizer: Optimizer) -> None:
    """Convert low-precision moments to their parameter's dtype.

    Checkpoints may hold fewer bits (``optim.state_dtype``); torch's optimizers need the full dtype.
    """
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if value.shape == param.shape and value.dtype != param.dtype:
                state[key] = value.to(param.dtype)


class ReplicaAxis(NamedTuple):
    """Mesh axis along which ranks hold replicas of a tensor."""

    group: dist.ProcessGroup | None  # None: all ranks
    size: int
    position: int  # of this rank on the axis


def find_replica_axes(
    model_parts: Iterable[nn.Module], state: StateDict
) -> dict[str, list[ReplicaAxis]]:
    """Return, for each tensor, the axes along which other ranks hold replicas."""
    params = _all_parameters(model_parts)
    axes_by_name = {}
    for name, tensor in state.items():
        kind, _, suffix = name.partition(".")
        param_name = suffix if kind == "model" else suffix.rpartition(".")[0]
        param = (
            params[param_name] if param_name in params else _nearest_parameter(param_name, params)
        )
        if is_dtensor(tensor):
            mesh = tensor.device_mesh
            axes = [axis for axis, p in enumerate(tensor.placements) if p.is_replicate()]
        elif is_dtensor(param):  # a step count or buffer on the parameter's mesh
            mesh = param.device_mesh
            axes = list(range(mesh.ndim))
        else:
            is_single = not dist.is_initialized()
            axes_by_name[name] = (
                [] if is_single else [ReplicaAxis(None, dist.get_world_size(), dist.get_rank())]
            )
            continue
        axes_by_name[name] = [
            ReplicaAxis(mesh.get_group(axis), mesh.size(axis), mesh.get_local_rank(axis))
            for axis in axes
        ]
        if group := tied_group(params.get(param_name)):
            axes_by_name[name].append(ReplicaAxis(group, group.size(), group.rank()))
    return axes_by_name


def _nearest_parameter(buffer: str, params: Mapping[str, nn.Parameter]) -> nn.Parameter:
    """Return a parameter of the buffer's module, or of its nearest ancestor with one.

    Every rank of that parameter's mesh holds the buffer, unsharded.
    """
    module = buffer
    while module:
        module = module.rpartition(".")[0]
        prefix = module and f"{module}."
        for name, param in params.items():
            if name.startswith(prefix):
                return param
    raise ValueError(f"no parameter shares a module with the buffer {buffer}")


def is_owner(name: str, axes: Iterable[ReplicaAxis]) -> bool:
    """Return True if this rank writes and reads its replica of a tensor.

    The owner depends on the tensor's name, so replicas share the work.
    """
    remainder = zlib.crc32(name.encode())
    for axis in axes:
        remainder, owner = divmod(remainder, axis.size)
        if axis.position != owner:
            return False
    return True


def local_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor; a quantized shard is dequantized."""
    local = to_local(tensor).detach()
    return local.dequantize() if is_quantized(local) else local
