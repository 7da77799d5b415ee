"""Learning-rate schedules: pure functions of the step, so that there is nothing to restore."""

from __future__ import annotations

import math
from collections.abc import Callable

from weft.config.schema import OptimSection

# (share of the steps after warm-up that is done; the section) -> share of the peak rate; in [0, 1]
Decay = Callable[[float, OptimSection], float]


def wsd(done: float, optim: OptimSection) -> float:
    """Stable, then a linear decay over the last ``decay_fraction`` of the steps after warm-up."""
    if optim.decay_fraction == 0:
        return 1.0
    return min(1.0, max(0.0, 1.0 - done) / optim.decay_fraction)


def cosine(done: float, optim: OptimSection) -> float:
    """Half a cosine over the steps after warm-up (Loshchilov and Hutter, SGDR, 2017)."""
    return 0.5 * (1.0 + math.cos(math.pi * done))


def linear(done: float, optim: OptimSection) -> float:
    """A straight line over the steps after warm-up."""
    return 1.0 - done


SCHEDULES: dict[str, Decay] = {"wsd": wsd, "cosine": cosine, "linear": linear}


def learning_rate(step: int, steps: int, optim: OptimSection, decay: Decay) -> float:
    """Learning rate of optimizer step ``step`` (the first is 1) of ``steps``.

    Linear warm-up over ``warmup_steps`` from lr / warmup_steps; then ``decay`` of the share of
    the remaining steps that is done, scaled to end at ``min_lr_ratio`` of the peak.
    """
    warm = optim.warmup_steps
    if step <= warm:
        return optim.lr * step / warm
    done = (step - warm) / max(1, steps - warm)
    share = decay(min(1.0, done), optim)
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * share)
