"""Learning-rate schedules: pure functions of the step, without state to restore."""

from __future__ import annotations

import math
from collections.abc import Callable

from weft.config.schema import OptimSection

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

    Linear warm-up over ``warmup_steps`` from ``lr / warmup_steps``, then ``decay``, scaled to end
    at ``min_lr_ratio`` of the peak.
    """
    warmup_steps = optim.warmup_steps
    if step <= warmup_steps:
        return optim.lr * step / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    fraction = decay(min(1.0, progress), optim)
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * fraction)
