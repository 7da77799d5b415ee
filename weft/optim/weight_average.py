"""Exponential moving average of the weights.

After each update the average moves by ``1 - optim.ema_decay`` of its distance to the weights.  It
is in float32, sharded like its parameter, and part of the optimizer's state under `AVERAGE`: so a
checkpoint has it, and any layout loads it.  It begins as the weights after the first update.
Training and its evaluations use the weights themselves; what only reads the model of a checkpoint
(generate, evaluate, export) reads the average.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from torch.optim import Optimizer

from weft.parallel.dtensor import to_local
from weft.parallel.step_hook import StepHook

AVERAGE = "average"


class WeightAverage(StepHook):
    """Average the parameters that an optimizer updates.

    Args:
        optimizer: its state receives the averages.
        decay: weight of the average in each update, below 1.
    """

    def __init__(self, optimizer: Optimizer, decay: float) -> None:
        self._optimizer, self._decay = optimizer, decay

    @torch.no_grad()
    def update(self, skip: Tensor) -> None:
        """Move the averages, unless the step is skipped."""
        share = (1 - self._decay) * (~skip).float()
        states, has_state = self._optimizer.state, any(self._optimizer.state.values())
        for param in [param for group in self._optimizer.param_groups for param in group["params"]]:
            # AdamW has no state of a parameter that no update has changed, and begins with it only
            # if there is none.  Other optimizers, as SGD, have none at all.
            if has_state and not states.get(param):
                continue
            state = states[param]
            weight, average = to_local(param).detach(), state.get(AVERAGE)
            if average is None or to_local(average).device != weight.device:
                # `zeros`, by which the planner's trace recognizes optimizer state.
                state[AVERAGE] = torch.zeros_like(param.detach())
                local = to_local(state[AVERAGE])
                local.copy_(weight if average is None else to_local(average))
            if average is not None:
                to_local(state[AVERAGE]).lerp_(weight, share.to(weight.device))


def averaged_name(saved: Collection[str], name: str) -> str:
    """Return the name of the average of ``model.<name>``, if it is saved."""
    average = f"optim.{name.removeprefix('model.')}.{AVERAGE}"
    return average if average in saved else name
