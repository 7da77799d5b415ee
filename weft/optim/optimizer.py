"""The optimizer, and the one gradient norm of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from weft.config.schema import OptimSection
from weft.optim.lean import LowPrecisionAdamW
from weft.optim.muon import Muon
from weft.parallel.dtensor import l2_norms, to_local
from weft.parallel.private import set_found_inf

# (parameter groups, the section) -> optimizer.  The groups carry their own weight_decay, the names
# of their parameters, whether they are the matrices of the blocks, and whether these or stacks of
# them, whose moments may be kept in low precision.
BuildOptimizer = Callable[[list[dict[str, object]], OptimSection], Optimizer]


def adamw(groups: list[dict[str, object]], optim: OptimSection) -> Optimizer:
    """AdamW (Loshchilov and Hutter, 2019): the fused kernel, on CPU and CUDA."""
    if optim.state_dtype != "float32":
        return LowPrecisionAdamW(groups, states=optim.state_dtype, **_adamw(optim))
    return torch.optim.AdamW(groups, fused=True, **_adamw(optim))


def muon(groups: list[dict[str, object]], optim: OptimSection) -> Optimizer:
    """Muon for the matrices of the blocks, AdamW for the rest: see `weft.optim.muon`."""
    return Muon(groups, momentum=optim.momentum, **_adamw(optim))


def _adamw(optim: OptimSection) -> dict[str, Any]:
    return {"lr": optim.lr, "betas": (optim.beta1, optim.beta2), "eps": optim.eps}


OPTIMIZERS: dict[str, BuildOptimizer] = {"adamw": adamw, "muon": muon}


def build_optimizer(
    params: Iterable[tuple[str, nn.Parameter]],
    optim: OptimSection,
    build: BuildOptimizer,
    decays: Callable[[str], bool],
    in_blocks: Collection[nn.Parameter],
) -> Optimizer:
    """The optimizer over the parameters in groups: with weight decay or without, and matrices.

    Embeddings, head and gains are in groups with ``low_precision`` false.

    Args:
        params: (name in the whole model, parameter).
        decays: whether weight decay applies to the parameter of that name.
        in_blocks: those of the repeated blocks; of two dims they are matrices, not tables.
    """
    groups: dict[tuple[float, bool, bool], dict[str, nn.Parameter]] = {}
    for name, param in params:
        decay = optim.weight_decay if decays(name) else 0.0
        stacked = param.dim() >= 2 and param in in_blocks
        key = (decay, stacked and param.dim() == 2, stacked)
        groups.setdefault(key, {})[name] = param
    return build(
        [
            {
                "params": list(some.values()),
                "names": list(some),
                "weight_decay": decay,
                "matrices": matrices,
                "low_precision": low_precision,
            }
            for (decay, matrices, low_precision), some in groups.items()
        ],
        optim,
    )


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """The rate of every group, for the steps to come."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def masked_step(optimizer: Optimizer, bad: torch.Tensor) -> None:
    """``optimizer.step()``, which changes nothing if ``bad``, a bool on the device, is true.

    Parameters, moments and step counts keep their bits.  A fused optimizer looks at the flag on the
    device; for any other the host waits.
    """
    if set_found_inf(optimizer, bad) or not bad:
        optimizer.step()


def clip_grad_norm(
    params: Iterable[nn.Parameter], max_norm: float, pipeline: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Scale all gradients in place so that their global L2 norm is at most ``max_norm``.

    Args:
        pipeline: the ranks that hold the other stages; None where there are none.

    Returns:
        The norm before clipping: a float32 scalar on the gradients' device, equal on all ranks.
    """
    params = list(params)
    norm, _ = grad_norm(params, pipeline)
    clip(params, norm, max_norm)
    return norm


@torch.no_grad()
def grad_norm(
    params: Sequence[nn.Parameter], pipeline: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The global L2 norm of all gradients, and that of what this rank holds of them.

    Each rank adds up the squares of what it holds; the sums are added over the axes that a
    gradient is sharded on, and over no other, so that nothing is counted twice.  torch's own
    function does the same through DTensor dispatch, one operator and parameter at a time,
    and refuses gradients that live on different meshes.

    Args:
        pipeline: the ranks that hold the other stages; None where there are none.

    Returns:
        Float32 scalars on the parameters' device; the first is equal on all ranks.
    """
    # Gradients by the process groups that together hold them whole.
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        groups: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(grad, DTensor):
            mesh = grad.device_mesh
            groups = tuple(
                mesh.get_group(axis)
                for axis, placement in enumerate(grad.placements)
                if not placement.is_replicate() and mesh.size(axis) > 1
            )
            assert not any(placement.is_partial() for placement in grad.placements)
            grad = grad.to_local()
        by_groups.setdefault(groups, []).append(grad)
    held, squares = [], []
    for groups, grads in by_groups.items():
        norms = l2_norms(grads)
        held.append(norms.square().sum())
        square = held[-1].clone()
        for group in groups:
            dist.all_reduce(square, group=group)
        squares.append(square)
    # A stage that trains nothing has zero, where the others of the pipeline have their sums.
    zero = torch.zeros((), device=params[0].device if params else None)
    total = torch.stack(squares).sum() if squares else zero.clone()
    if pipeline is not None:
        dist.all_reduce(total, group=pipeline)
    own = torch.stack(held).sum() if held else zero
    return total.sqrt(), own.sqrt()


@torch.no_grad()
def clip(params: Iterable[nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scale all gradients in place by what takes ``norm`` down to ``max_norm``, if it is above."""
    # As torch's: a norm below the limit multiplies by exactly one; no look at its value here,
    # which would stall the device.
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    grads = [param.grad for param in params if param.grad is not None]
    here = [to_local(grad) for grad in grads]
    if here:
        torch._foreach_mul_(here, scale)
