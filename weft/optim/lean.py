"""AdamW whose two moments take two bytes each, or one, instead of four.

Of the 16 bytes that a parameter takes in training, 8 are AdamW's moments.  They can be rounded:

    bfloat16    Nearest rounding would not do.  The second moment moves by (1 - beta2) of its
                distance each step; with beta2 = 0.999 that is less than half of bfloat16's last
                place (2^-9), so it would never come down again.  Rounded up or down by chance, in
                proportion to what lies between, it is right on average (docs/results.md).
    8bit        Blocks of 256 elements, a float32 scale for each, and a code of 8 bits with more
                places near zero (Dettmers et al., arXiv:2110.02861): torchao's.

Parameters stay float32, and so does the arithmetic.  Chance is a hash of step and element: a run
that goes on from a checkpoint takes the same bits.  On CUDA the update of a parameter is one
kernel that torch.compile makes; on CPU, where that takes longer than it saves, it runs as written.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from weft.parallel.compile import compiling
from weft.parallel.dtensor import local_of
from weft.parallel.private import compile_each_shape, is_quantized, quiet_import

BLOCK = 256  # elements that share a scale
LEAST = 4096  # elements of a parameter below which its moments stay float32, as torchao has it


class LeanAdamW(Optimizer):
    """AdamW with moments in ``states``; groups as torch's AdamW takes them.

    Loaded moments are in the dtype that was saved until `adopt` has been called.
    """

    # As torch's GradScaler asks it: `found_inf` true, on the device, and nothing changes.
    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        states: Literal["bfloat16", "8bit"],
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.states = states

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient.  No closure."""
        assert closure is None
        place, bad = 0, torch.zeros(()) if self.found_inf is None else self.found_inf
        for group in self.param_groups:
            lr, (beta1, beta2) = torch.tensor(group["lr"]), group["betas"]
            for param in group["params"]:
                place += 1
                if param.grad is None:
                    continue
                state, live = self.state[param], local_of(param).detach()
                if not state:
                    state["step"] = torch.zeros((), device=live.device)
                    state["exp_avg"] = self._zeros(param, signed=True)
                    state["exp_avg_sq"] = self._zeros(param, signed=False)
                _run(
                    live,
                    local_of(param.grad),
                    local_of(state["exp_avg"]),
                    local_of(state["exp_avg_sq"]),
                    state["step"],
                    bad.to(live.device),
                    lr,
                    beta1,
                    beta2,
                    group["eps"],
                    group["weight_decay"],
                    torch.tensor(place, dtype=torch.int32),
                )

    def adopt(self) -> None:
        """Bring loaded moments, as they were saved, into their form and to their parameter."""
        for param, state in self.state.items():
            for key, value in state.items():
                if key == "step":
                    state[key] = value.to(local_of(param).device)
                    continue
                state[key] = self._zeros(param, signed=key == "exp_avg")
                local_of(state[key]).copy_(local_of(value))

    def _zeros(self, param: Tensor, signed: bool) -> Tensor:
        live = local_of(param)
        if self.states == "bfloat16":
            zeros = torch.zeros_like(live, dtype=torch.bfloat16)
        elif live.numel() < LEAST or live.numel() % BLOCK:
            zeros = torch.zeros_like(live)
        else:
            kind = quiet_import("torchao.optim.subclass_8bit").OptimState8bit
            zeros = kind.zeros(live.shape, signed, BLOCK, live.device, live.dtype)
            if signed:
                # Its lowest place is -0.993: a block whose largest element is negative would
                # shrink whenever it is written again as it was read, as from a checkpoint.
                zeros.qmap[0] = -1.0
        if not isinstance(param, DTensor):
            return zeros
        return DTensor.from_local(
            zeros,
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )


def _run(param: Tensor, *args: Any) -> None:
    if param.numel() == 0:  # this rank holds nothing of it, but counts its steps as the others do
        step, bad = args[3:5]
        step += ~(bad > 0)
        return
    if param.device.type == "cpu":
        _update(param, *args)
        return
    with compile_each_shape(), compiling("the optimizer's update"):
        _compiled()(param, *args)


def _update(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    bad: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    place: Tensor,
) -> None:
    """AdamW in float32, in place; with ``bad`` everything keeps its bits."""
    skip = bad > 0
    step += ~skip
    grad = grad.float().masked_fill(skip, 0.0)
    first, second, old = _whole(exp_avg), _whole(exp_avg_sq), param.float()
    new_first = torch.where(skip, first, first.lerp(grad, 1 - beta1))
    new_second = torch.where(skip, second, second.lerp(grad.square(), 1 - beta2))
    denominator = (new_second / (1 - beta2**step)).sqrt() + eps
    new = old * (1 - lr * weight_decay) - lr * new_first / (1 - beta1**step) / denominator
    param.copy_(torch.where(skip, old, new))
    if exp_avg.dtype == torch.bfloat16:
        chance = _chance(param, step, place)
        new_first = round_by(new_first, chance & 0xFFFF)
        new_second = round_by(new_second, chance >> 16 & 0xFFFF)
    exp_avg.copy_(new_first)
    exp_avg_sq.copy_(new_second)


def _whole(moment: Tensor) -> Tensor:
    return moment.dequantize() if is_quantized(moment) else moment.float()


@cache
def _compiled() -> Any:
    return torch.compile(_update, fullgraph=True, dynamic=False)


def round_by(value: Tensor, chance: Tensor) -> Tensor:
    """Float32 to what bfloat16 can hold, up or down; zero, infinity and NaN stay what they are.

    Args:
        chance: int32, uniform from 0 to 2^16 - 1; the share of them that round away from zero is
            the share of the last place that is cut off.
    """
    rounded = ((value.view(torch.int32) + chance) & -0x10000).view(torch.float32)
    # Of a NaN with all bits set, such as CUDA's, the sum would overflow to a zero.
    return torch.where(value.isnan(), value, rounded).to(torch.bfloat16)


def _chance(like: Tensor, step: Tensor, place: Tensor) -> Tensor:
    """32 bits for each element, of its index, the step and the parameter's place: int32."""
    index = torch.arange(like.numel(), dtype=torch.int32, device=like.device).view(like.shape)
    seed = _hash(step.to(torch.int32) * 0x10001 + place.to(step.device))
    return _hash(index ^ seed)


def _hash(x: Tensor) -> Tensor:
    """A good 32-bit mixer: C. Wellons, "Prospecting for hash functions" (lowbias32), 2018."""
    x = x ^ (x >> 16 & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15 & 0x1FFFF)
    x = x * (0x846CA68B - (1 << 32))  # as a signed 32-bit integer
    return x ^ (x >> 16 & 0xFFFF)
