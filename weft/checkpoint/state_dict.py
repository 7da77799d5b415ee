"""A training state as one flat dictionary of named tensors.

Names are the model's parameter names, which are the same under every layout:
``model.<name>`` and ``optim.<name>.<key>``.  DTensors carry their own sharding.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from weft.checkpoint.fingerprint import fingerprint
from weft.parallel.dtensor import to_local, shard_offsets
from weft.parallel.private import is_quantized

State = dict[str, torch.Tensor]


def named_parameters(parts: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """(name in the whole model, parameter) of all that is trained, of all parts on this rank."""
    return (pair for part in parts for pair in part.named_parameters() if pair[1].requires_grad)


def frozen_parameters(parts: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """The others, which are in no checkpoint but the one that they came from."""
    return (pair for part in parts for pair in part.named_parameters() if not pair[1].requires_grad)


def named_buffers(parts: Iterable[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in the whole model, buffer) of the buffers that are state, whole on every rank.

    Those that follow from the configuration, such as rotary tables, are not.
    """
    for part in parts:
        for prefix, module in part.named_modules():
            passing = module._non_persistent_buffers_set
            for name, buffer in module.named_buffers(prefix, recurse=False):
                if name.rpartition(".")[2] not in passing:
                    yield name, buffer


def model_state(parts: Sequence[nn.Module]) -> State:
    """``model.<name>`` -> parameter that is trained, or buffer, sharing memory with it."""
    params = {f"model.{name}": param.data for name, param in named_parameters(parts)}
    return params | {f"model.{name}": buffer for name, buffer in named_buffers(parts)}


def optimizer_state(parts: Iterable[nn.Module], optimizer: Optimizer) -> State:
    """``optim.<name>.<key>`` -> tensor, sharing memory; empty before the first step.

    Learning rates and other hyperparameters are not in it: they follow from the Job.
    """
    known = {param for group in optimizer.param_groups for param in group["params"]}
    state: State = {}
    for name, param in named_parameters(parts):
        # A gathered parameter in the place of its shard would lose its state in silence.
        assert param in known, f"{name} is not the optimizer's"
        for key, value in optimizer.state.get(param, {}).items():
            state[f"optim.{name}.{key}"] = value
    return state


def allocate_optimizer_state(
    parts: Iterable[nn.Module],
    optimizer: Optimizer,
    saved: Mapping[str, tuple[torch.Size, torch.dtype]],
) -> None:
    """Give ``optimizer`` the tensors that a checkpoint holds, uninitialised, ready to load into.

    A saved tensor of its parameter's shape is sharded as the parameter is; any other (AdamW's
    step count) is whole on every rank.

    Args:
        saved: shape and dtype of every tensor in the checkpoint, by name.
    """
    params = dict(named_parameters(parts))
    states: dict[torch.Tensor, State] = {param: {} for param in params.values()}
    for full, (shape, dtype) in saved.items():
        kind, _, rest = full.partition(".")
        name, _, key = rest.rpartition(".")
        if kind != "optim" or name not in params:
            continue
        param = params[name]
        if shape == param.shape:
            # Where they will be rounded, they first come whole, to where there is room.
            where = "cpu" if hasattr(optimizer, "adopt") else None
            states[param][key] = torch.empty_like(param.data, dtype=dtype, device=where)
        else:
            # Fused optimizers keep the count beside the parameter.
            device = to_local(param).device
            states[param][key] = torch.empty(shape, dtype=dtype, device=device)
    optimizer.state.update(states)


def widen(optimizer: Optimizer) -> None:
    """Give moments that were saved in fewer bits (``optim.state_dtype``) the dtype of their parameter,
    which torch's optimizers take for granted."""
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if value.shape == param.shape and value.dtype != param.dtype:
                state[key] = value.to(param.dtype)


class Copies(NamedTuple):
    """Ranks that hold copies of a tensor along one axis."""

    group: dist.ProcessGroup | None  # None: all
    size: int
    own: int  # this rank's place


def copies_of(parts: Iterable[nn.Module], state: State) -> dict[str, list[Copies]]:
    """Along which axes other ranks hold the same as this one, of each tensor of a state."""
    params = dict(pair for part in parts for pair in part.named_parameters())
    found = {}
    for name, tensor in state.items():
        kind, _, rest = name.partition(".")
        place = rest if kind == "model" else rest.rpartition(".")[0]
        param = params[place] if place in params else _beside(place, params)
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            axes = [axis for axis, p in enumerate(tensor.placements) if p.is_replicate()]
        elif isinstance(param, DTensor):  # a step count, or a buffer, beside it
            mesh = param.device_mesh
            axes = list(range(mesh.ndim))
        else:
            alone = not dist.is_initialized()
            found[name] = [] if alone else [Copies(None, dist.get_world_size(), dist.get_rank())]
            continue
        found[name] = [
            Copies(mesh.get_group(axis), mesh.size(axis), mesh.get_local_rank(axis))
            for axis in axes
        ]
    return found


def _beside(buffer: str, params: Mapping[str, nn.Parameter]) -> nn.Parameter:
    """A parameter of the module that has a buffer, or of the nearest one around it.

    The ranks of its mesh are those that have the buffer, each of them whole.
    """
    around = buffer
    while around:
        around = around.rpartition(".")[0]
        prefix = around and f"{around}."
        for name, param in params.items():
            if name.startswith(prefix):
                return param
    raise ValueError(f"there is no parameter beside the buffer {buffer}")


def owns(name: str, copies: Iterable[Copies]) -> bool:
    """Whether this rank's copy of a tensor is the one that is written and read.

    Of several it is now this one, now that: so replicas share the work.
    """
    lot = zlib.crc32(name.encode())
    for each in copies:
        lot, chosen = divmod(lot, each.size)
        if each.own != chosen:
            return False
    return True


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor; of one in 8 bits, its values in a tensor of their own."""
    local = to_local(tensor).detach()
    return local.dequantize() if is_quantized(local) else local


def mark_of(tensor: torch.Tensor) -> torch.Tensor:
    """The fingerprint of what this rank holds: see `weft.checkpoint.fingerprint`."""
    return fingerprint(local_part(tensor), shard_offsets(tensor), tensor.shape)
