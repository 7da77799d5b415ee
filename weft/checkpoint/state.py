"""A training state as one flat dictionary of named tensors.

Names are the model's parameter names, which are the same under every layout:
``model.<name>`` and ``optim.<name>.<key>``.  DTensors carry their own sharding, so
that torch's distributed checkpoint can load them into any other mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

State = dict[str, torch.Tensor]


def named_parameters(parts: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """(name in the whole model, parameter) of all parts of the model on this rank."""
    for part in parts:
        yield from part.named_parameters()


def model_state(parts: Iterable[nn.Module]) -> State:
    """``model.<name>`` -> parameter, sharing memory with it."""
    return {f"model.{name}": param.data for name, param in named_parameters(parts)}


def optimizer_state(parts: Iterable[nn.Module], optimizer: Optimizer) -> State:
    """``optim.<name>.<key>`` -> tensor, sharing memory; empty before the first step.

    Learning rates and other hyperparameters are not in it: they follow from the Job.
    """
    known = {param for group in optimizer.param_groups for param in group["params"]}
    state: State = {}
    for name, param in named_parameters(parts):
        # A gathered parameter in the place of its shard would lose its state in silence.
        assert param in known or not param.requires_grad, f"{name} is not the optimizer's"
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
    for name, param in named_parameters(parts):
        prefix = f"optim.{name}."
        state: dict[str, torch.Tensor] = {}
        for key in [key for key in saved if key.startswith(prefix)]:
            shape, dtype = saved[key]
            if shape == param.shape:
                state[key.removeprefix(prefix)] = torch.empty_like(param.data, dtype=dtype)
            else:
                # Fused optimizers keep the count beside the parameter.
                device = param.to_local().device if isinstance(param, DTensor) else param.device
                state[key.removeprefix(prefix)] = torch.empty(shape, dtype=dtype, device=device)
        optimizer.state[param] = state
