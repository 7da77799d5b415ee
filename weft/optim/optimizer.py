"""Optimizer construction, learning-rate schedules, gradient norm and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from weft.config.schema import OptimGroup, OptimSection
from weft.parallel.dtensor import is_dtensor, l2_norms, to_local
from weft.parallel.private import set_grad_scaling, to_group_device
from weft.parallel.tied_parameters import is_second_copy
from weft.planning.matrices import is_matrix

# (parameter groups, section) -> optimizer.  Each group has ``weight_decay``, ``lr_mult``, ``names``
# of its parameters, ``matrices`` (2-D parameters of the blocks) and ``low_precision`` (matrices of
# the blocks or stacks of them, whose moments may have low precision), and the options of its entry
# in ``optim.groups``.
BuildOptimizer = Callable[[list[dict[str, object]], OptimSection], Optimizer]


def build_adamw(groups: list[dict[str, object]], optim: OptimSection) -> Optimizer:
    """Build AdamW (Loshchilov and Hutter, 2019) with the fused kernel."""
    options = adamw_options(optim)
    if options["state_dtype"] != "float32":
        from weft.optim.low_precision_adamw import LowPrecisionAdamW

        return LowPrecisionAdamW(groups, **options)
    del options["state_dtype"]
    return torch.optim.AdamW(groups, fused=True, **options)


def adamw_options(optim: OptimSection) -> dict[str, Any]:
    """Return the arguments that AdamW and its relatives share."""
    betas = optim.beta1, optim.beta2
    return {"lr": optim.lr, "betas": betas, "eps": optim.eps, "state_dtype": optim.state_dtype}


def build_muon(groups: list[dict[str, object]], optim: OptimSection) -> Optimizer:
    """Build Muon for the blocks' matrices, AdamW for the rest: see `weft.optim.muon`."""
    from weft.optim.muon import Muon

    return Muon(groups, momentum=optim.momentum, **adamw_options(optim))


def build_soap(groups: list[dict[str, object]], optim: OptimSection) -> Optimizer:
    """Build SOAP for the blocks' matrices, AdamW for the rest: see `weft.optim.soap`."""
    from weft.optim.soap import SOAP

    interval, max_dim = optim.precondition_interval, optim.max_precondition_dim
    return SOAP(groups, interval=interval, max_dim=max_dim, **adamw_options(optim))


OPTIMIZERS: dict[str, BuildOptimizer] = {
    "adamw": build_adamw,
    "muon": build_muon,
    "soap": build_soap,
}


def build_optimizer(
    params: Iterable[tuple[str, nn.Parameter]],
    optim: OptimSection,
    build: BuildOptimizer,
    has_weight_decay: Callable[[str], bool],
    block_params: Collection[nn.Parameter],
    lr_factor: Callable[[str], float] = lambda name: 1.0,
) -> Optimizer:
    """Build the optimizer over its parameter groups.

    Embeddings, head, norm weights and biases are in groups with ``low_precision`` false.

    Args:
        params: (name in the full model, parameter) pairs.
        optim: the section ``optim``.
        build: entry of `OPTIMIZERS`.
        has_weight_decay: True for names of parameters with weight decay.
        block_params: parameters of the repeated blocks; their weights are matrices, not tables.
        lr_factor: factor of the learning rate by name of the parameter.
    """
    groups: dict[Any, dict[str, Any]] = {}
    for name, param in params:
        own = (*optim.groups, OptimGroup(params=("*",)))[optim.group_of(name)]
        options = {
            "weight_decay": optim.weight_decay if has_weight_decay(name) else 0.0,
            "matrices": is_matrix(name, param, block_params) and own.optimizer == "auto",
            "low_precision": is_matrix(name, param, block_params),
            "lr_mult": 1.0,
            **own.options(optim),
        }
        options["lr_mult"] *= lr_factor(name)
        key = tuple(sorted(options.items()))
        group = groups.setdefault(key, {"params": [], "names": [], **options})
        group["params"].append(param)
        group["names"].append(name)
    return build(list(groups.values()), optim)


# --------------------------------------------------------------------------- learning rate

# (progress after warm-up, section) -> fraction of the peak learning rate; both in [0, 1].
Decay = Callable[[float, OptimSection], float]


def wsd(progress: float, optim: OptimSection) -> float:
    """Return 1, then a linear decay over the last ``decay_fraction`` of progress."""
    if optim.decay_fraction == 0:
        return 1.0
    return min(1.0, max(0.0, 1.0 - progress) / optim.decay_fraction)


def cosine(progress: float, optim: OptimSection) -> float:
    """Return half a cosine (Loshchilov and Hutter, SGDR, 2017)."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def linear(progress: float, optim: OptimSection) -> float:
    """Return a linear decay from 1 to 0."""
    return 1.0 - progress


SCHEDULES: dict[str, Decay] = {"wsd": wsd, "cosine": cosine, "linear": linear}


def learning_rate(step: int, steps: int, optim: OptimSection, decay: Decay) -> float:
    """Return the learning rate of optimizer step ``step`` (from 1) of ``steps``.

    Linear warm-up over ``warmup_steps`` from ``lr / warmup_steps``, then ``decay``.  The built-in
    schedules are scaled to end at ``min_lr_ratio`` of the peak; a user's is used as it is.
    """
    warmup_steps = optim.num_warmup_steps(steps)
    if step <= warmup_steps:
        return optim.lr * step / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    fraction = decay(min(1.0, progress), optim)
    if ":" in optim.schedule:
        return optim.lr * fraction
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * fraction)


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group: ``lr`` times its ``lr_mult``."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)


# --------------------------------------------------------------------------- a step


def masked_step(
    optimizer: Optimizer, skip: torch.Tensor, grad_scale: torch.Tensor | None = None
) -> None:
    """Run ``optimizer.step()`` on divided gradients, without effect if ``skip``.

    ``skip`` is a bool on the device.  If it is true, parameters, moments and step counts keep their
    bits.  A fused optimizer reads both values on the device, and divides gradients as it reads
    them.  For any other the host waits, and a separate pass divides.  Either may also write the
    divided gradients.

    Args:
        optimizer: any optimizer.
        skip: see above.
        grad_scale: see `clip_scale`; None: gradients are not divided.
    """
    if not set_grad_scaling(optimizer, skip, grad_scale):
        if skip:
            return
        params = [param for group in optimizer.param_groups for param in group["params"]]
        grads = [to_local(param.grad) for param in params if param.grad is not None]
        if grads and grad_scale is not None:
            torch._foreach_div_(grads, grad_scale)
    optimizer.step()


def clip_scale(norm: torch.Tensor, max_norm: float) -> torch.Tensor | None:
    """Return the divisor that clips gradients of global norm ``norm`` to ``max_norm``.

    The host does not read the norm, which would stall the device.  A norm below the limit gives
    exactly one.

    Returns:
        A scalar as ``norm``; None if ``max_norm`` is 0, no limit.
    """
    return None if max_norm == 0 else ((norm + 1e-6) / max_norm).clamp(min=1.0)


@torch.no_grad()
def compute_grad_norm(
    params: Sequence[nn.Parameter], pp_group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the global L2 norm of all gradients, and that of this rank's shards.

    Each rank sums the squares of its shards.  The sums are reduced over the mesh axes on which a
    gradient is sharded, and no other, so nothing counts twice.  torch's own function goes through
    DTensor dispatch, one operator and parameter at a time, and refuses gradients on different
    meshes.

    Args:
        params: parameters with gradients.
        pp_group: pipeline-parallel group; None without pipeline parallelism.

    Returns:
        Float32 scalars on the parameters' device; the first is equal on all ranks.
    """
    # Gradients by the process groups over which they are sharded.  Groups of different meshes may
    # be one; the order of the sum must not depend on that.
    by_groups: dict[tuple[tuple[Any, dist.ProcessGroup], ...], list[torch.Tensor]] = {}
    for param in params:
        grad = param.grad
        if grad is None or (pp_group is not None and is_second_copy(param)):
            continue
        groups: tuple[tuple[Any, dist.ProcessGroup], ...] = ()
        if is_dtensor(grad):
            mesh = grad.device_mesh
            groups = tuple(
                (mesh.mesh_dim_names, mesh.get_group(axis))
                for axis, placement in enumerate(grad.placements)
                if not placement.is_replicate() and mesh.size(axis) > 1
            )
            assert not any(placement.is_partial() for placement in grad.placements)
            grad = grad.to_local()
        by_groups.setdefault(groups, []).append(grad)
    local_squares, group_squares = [], []
    for groups, grads in by_groups.items():
        grad_norms = l2_norms(grads)
        local_squares.append(grad_norms.square().sum())
        group_square = local_squares[-1].clone() if groups else local_squares[-1]
        for _, group in groups:
            dist.all_reduce(group_square := to_group_device(group_square, group), group=group)
        group_squares.append(group_square.to(local_squares[-1].device))
    device = params[0].device if params else torch.get_default_device()
    total, local_total = (_sum(squares, device) for squares in (group_squares, local_squares))
    if pp_group is not None:
        dist.all_reduce(total := to_group_device(total.clone(), pp_group), group=pp_group)
    return total.sqrt().to(device), local_total.sqrt()


def _sum(scalars: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum; zero for a stage without trainable parameters."""
    if len(scalars) == 1:
        return scalars[0]
    return torch.stack(scalars).sum() if scalars else torch.zeros((), device=device)
