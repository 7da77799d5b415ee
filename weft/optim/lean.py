"""AdamW whose two moments take two bytes each, or about one, instead of four.

Of the 16 bytes that a parameter takes in training, 8 are AdamW's moments.  They can be rounded:

    bfloat16    Two bytes.  It has float32's exponents, so nothing underflows.
    8bit        A byte each for the matrices of the blocks, see below; all other parameters
                (embedding, head, gains) keep float32 moments: their rows may be rare.

Nearest rounding would not do.  The second moment moves by (1 - beta2) of its distance each step;
with beta2 = 0.999 that is less than half of the last place, so it would never come down again.
Both forms round up or down by chance, in proportion to what lies between, and are right on
average (docs/results.md).

*Eight bits.*  An update is first / root(second).  It goes wrong where the second moment is rounded
to much less than it is, so both are stored with a relative error:

    second      2 ** (bottom + (code - 1) / 2 ** fine), code 0 for zero; ``bottom``, an octave, and
                ``fine`` are of a block of 32 neighbors in a row: the finest steps by which 255
                codes reach from the block's smallest to its largest.  What lies more than 40
                octaves below the largest (20 of the root) is rounded up, and moves less.
    first       its ratio to the root of the *stored* second moment, which cannot exceed a number
                that follows from the betas: 127 steps to each side, finer near zero.

So a stored pair never gives a larger update than AdamW can make.  Blocks lie in rows of the whole
parameter, and chance is a hash of the parameter's name, the step and the place in the whole
parameter: on any layout a moment is rounded alike, and a resumed run takes the same bits.

torchao's 8-bit states, which bitsandbytes' resemble, share one linear scale over 256 elements of a
shard: an element with 2e-4 of the block's largest gradient has second moment 0 beside a first that
is not, and moves by first / eps.

Parameters stay float32, and so does the arithmetic.  On CUDA the update of a parameter is one
kernel that torch.compile makes; on CPU, where that takes longer than it saves, it runs as written.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from weft.parallel.compile import compile_label
from weft.parallel.dtensor import to_local, shard_offsets
from weft.parallel.private import disable_recompile_limit
from weft.plan.memory_formula import MOMENT_BLOCK_SIZE

SMALLEST = 2.0**-126  # second moments below are zero, as are first moments beside them
OCTAVES = 40  # of the second moment, that a block can span
FINEST = 7  # steps of an octave, as a power of two


class LowPrecisionAdamW(Optimizer):
    """AdamW with moments in ``states``; groups as torch's AdamW takes them.

    Groups with ``low_precision`` false keep float32 moments under 8bit.  ``names`` of a group are
    those of its parameters in the whole model; without, chance goes by their order.

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
        self._offsets: dict[Tensor, tuple[int, ...]] = {}  # of a rank's part in the parameter

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient.  No closure."""
        assert closure is None
        place, bad = 0, torch.zeros(()) if self.found_inf is None else self.found_inf
        for group in self.param_groups:
            lr, (beta1, beta2) = torch.tensor(group["lr"]), group["betas"]
            names = group.get("names") or [None] * len(group["params"])
            for name, param in zip(names, group["params"], strict=True):
                place += 1
                if param.grad is None:
                    continue
                state, live = self.state[param], to_local(param).detach()
                if not state:
                    state["step"] = torch.zeros((), device=live.device)
                    self._allocate(param, group, state)
                if param not in self._offsets:
                    self._offsets[param] = tuple(shard_offsets(param))
                if live.numel() == 0:  # it counts its steps as the ranks do that hold a part
                    state["step"] += ~(bad.to(live.device) > 0)
                    continue
                first, second = to_local(state["exp_avg"]), to_local(state["exp_avg_sq"])
                moments: tuple[Tensor, ...] = (first, second)
                update: Callable[..., None] = _update
                if isinstance(first, Packed) and isinstance(second, Packed):
                    moments = (first.codes, second.codes, second.ranges)
                    update = _update_packed
                seed = place if name is None else zlib.crc32(name.encode()) & 0x7FFFFFFF
                _run(
                    update,
                    live,
                    to_local(param.grad),
                    *moments,
                    state["step"],
                    bad.to(live.device),
                    lr,
                    beta1,
                    beta2,
                    group["eps"],
                    group["weight_decay"],
                    torch.tensor(seed, dtype=torch.int32),
                    self._offsets[param],
                    tuple(param.shape),
                )

    def adopt(self) -> None:
        """Bring loaded moments, as they were saved, into their form and to their parameter."""
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state.get(param)
                if not state:
                    continue
                device = to_local(param).device
                state["step"] = state["step"].to(device)
                loaded = [to_local(state[key]).to(device) for key in ("exp_avg", "exp_avg_sq")]
                self._allocate(param, group, state)
                first, second = (to_local(state[key]) for key in ("exp_avg", "exp_avg_sq"))
                if not (isinstance(first, Packed) and isinstance(second, Packed)):
                    first.copy_(loaded[0])
                    second.copy_(loaded[1])
                elif second.numel():
                    # As near as can be: what was stored like this comes back as it was.
                    half = torch.full_like(second.codes, 1 << 15, dtype=torch.int32)
                    pack_second(loaded[1].float(), half, second.codes, second.ranges)
                    root = unpack_second(second.codes, second.ranges).sqrt()
                    pack_first(loaded[0].float(), root, _limit(*group["betas"]), half, first.codes)

    def _allocate(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Give a parameter zero moments.

        Raises:
            ValueError: if the layout cuts rows into parts that are no whole blocks.
        """
        live = to_local(param)
        first: Tensor
        second: Tensor
        packs = group.get("low_precision", True) and is_packed(param.shape)
        if self.states == "8bit" and packs:
            *rows, columns = live.shape
            if columns % MOMENT_BLOCK_SIZE:
                raise ValueError(
                    f"optim.state_dtype 8bit: a rank's {columns} columns of a parameter of "
                    f"{tuple(param.shape)} are no whole blocks of {MOMENT_BLOCK_SIZE}"
                )
            # Both with `zeros`, by which a trace knows states from what is computed.
            codes = torch.zeros(live.shape, dtype=torch.uint8, device=live.device)
            shape = (*rows, columns // MOMENT_BLOCK_SIZE)
            ranges = torch.zeros(shape, dtype=torch.int16, device=live.device)
            second = Packed(codes, ranges)
            codes = torch.zeros(live.shape, dtype=torch.int8, device=live.device)
            first = Packed(codes, ranges, Ratio(second, _limit(*group["betas"])))
        else:
            kind = torch.bfloat16 if self.states == "bfloat16" else live.dtype
            first, second = (torch.zeros_like(live, dtype=kind) for _ in range(2))
        state["exp_avg"], state["exp_avg_sq"] = (_as(param, each) for each in (first, second))


def _as(param: Tensor, local: Tensor) -> Tensor:
    """This rank's part of a tensor that is spread as the parameter is."""
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def is_packed(shape: Sequence[int]) -> bool:
    """Return True if a parameter of that whole shape has rows of whole blocks."""
    return len(shape) >= 2 and shape[-1] % MOMENT_BLOCK_SIZE == 0


# --------------------------------------------------------------------------- eight bits


class Ratio(NamedTuple):
    """What a packed first moment is a multiple of."""

    second: Packed
    limit: float  # of the first moment over the second's root


class Packed(Tensor):
    """A moment in 8 bits, which stands for float32 numbers: see `dequantize`.

    ``codes`` has the moment's shape: uint8 of a second moment, int8 of a first, which has a
    ``ratio``.  ``ranges``, int16 ``[..., columns / MOMENT_BLOCK]``, are 8 * bottom + fine.
    """

    codes: Tensor
    ranges: Tensor
    ratio: Ratio | None

    @staticmethod
    def __new__(cls, codes: Tensor, ranges: Tensor, ratio: Ratio | None = None) -> Packed:
        """Make a tensor without memory of its own beside those."""
        make: Any = Tensor._make_wrapper_subclass
        packed: Packed = make(
            cls,
            codes.shape,
            strides=codes.stride(),
            dtype=torch.float32,
            device=codes.device,
            storage_size=0,  # or it would count as memory of that size
        )
        packed.codes, packed.ranges, packed.ratio = codes, ranges, ratio
        return packed

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Packed({tuple(self.shape)}, device={self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # What DTensor asks of the part of a rank.
        if func in (torch.ops.aten.view.default, torch.ops.aten.detach.default):
            packed = args[0]
            return cls(packed.codes, packed.ranges, packed.ratio)
        raise NotImplementedError(f"{func} of a packed moment")

    def dequantize(self) -> Tensor:
        """Return what it stands for, float32 in memory of its own."""
        if self.ratio is None:
            return unpack_second(self.codes, self.ranges)
        second, limit = self.ratio
        return unpack_first(self.codes, unpack_second(second.codes, second.ranges).sqrt(), limit)


def unpack_second(codes: Tensor, ranges: Tensor) -> Tensor:
    """Return the second moments that codes stand for: float32."""
    blocks = codes.view(*ranges.shape, MOMENT_BLOCK_SIZE).float()
    bottom, fine = (ranges >> 3).float().unsqueeze(-1), (ranges & 7).float().unsqueeze(-1)
    values = (bottom + (blocks - 1) * (-fine).exp2()).exp2()
    return values.where(blocks > 0, 0.0).view(codes.shape)


def pack_second(values: Tensor, chance: Tensor, codes: Tensor, ranges: Tensor) -> None:
    """Write second moments into codes and their blocks' ranges.

    Args:
        values: float32, none negative.
        chance: int32, uniform from 0 to 2^16 - 1: which of two neighboring codes it becomes.
    """
    blocks = values.view(*ranges.shape, MOMENT_BLOCK_SIZE)
    there = blocks >= SMALLEST
    logs = blocks.where(there, 1.0).log2()
    some = there.any(-1, keepdim=True)
    _, top = _octaves(blocks.amax(-1, keepdim=True).where(some, 1.0))
    bottom, _ = _octaves(blocks.where(there, math.inf).amin(-1, keepdim=True).where(some, 1.0))
    bottom = bottom.maximum(top - OCTAVES)
    top = top.maximum(bottom + 1)
    fine = (254 / (top - bottom)).log2().floor().clamp(max=FINEST)
    steps = fine.exp2()
    place = ((logs - bottom) * steps).clamp(min=0.0)
    low = place.floor()
    # Of the way between the two numbers, not between their logarithms.
    share = (((place - low) / steps).exp2() - 1) / ((1 / steps).exp2() - 1)
    up = chance.view(blocks.shape).float() < share * (1 << 16)
    code = (low + up).clamp(max=254.0) + 1
    codes.copy_(code.where(there, 0.0).view(codes.shape))
    ranges.copy_((bottom * 8 + fine).squeeze(-1))


def _octaves(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithms to base 2, rounded down and up.

    Exactly, of positive float32 numbers that are not denormal: what was packed packs alike.
    """
    bits = values.view(torch.int32)
    below = (bits >> 23) - 127
    return below.float(), (below + ((bits & 0x7FFFFF) > 0).int()).float()


def unpack_first(codes: Tensor, root: Tensor, limit: float) -> Tensor:
    """Return the first moments that codes stand for beside the root of the second: float32."""
    steps = codes.float()
    return steps * steps.abs() * (limit / 127**2) * root


def pack_first(values: Tensor, root: Tensor, limit: float, chance: Tensor, codes: Tensor) -> None:
    """Write first moments into codes.

    Args:
        root: of the second moments as they are stored.
        limit: of the ratio of the two.
        chance: as of `pack_second`.
    """
    ratio = (values / root).where(root > 0, 0.0)
    place = (ratio.abs() * (1 / limit)).clamp(max=1.0).sqrt() * 127
    low = place.floor()
    up = chance.float() < (place.square() - low.square()) / (2 * low + 1) * (1 << 16)
    codes.copy_((low + up).clamp(max=127.0).copysign(ratio))


def _limit(beta1: float, beta2: float) -> float:
    """Return the most that a first moment can be of the root of the second.

    By Cauchy's inequality, over all gradients.  Where beta1^2 comes near to beta2 there is none,
    or a useless one: it is cut there to ten times what one gradient makes.
    """
    rest = max(1 - beta1**2 / max(beta2, 1e-9), 0.01)
    return (1 - beta1) / math.sqrt((1 - beta2) * rest)


# --------------------------------------------------------------------------- a step


def _run(update: Callable[..., None], param: Tensor, *args: Any) -> None:
    if param.device.type == "cpu":
        update(param, *args)
        return
    with disable_recompile_limit(), compile_label("the optimizer's update"):
        _compiled(update)(param, *args)


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
    seed: Tensor,
    offsets: tuple[int, ...],
    shape: tuple[int, ...],
) -> None:
    """AdamW in float32, in place; with ``bad`` everything keeps its bits."""
    skip = bad > 0
    grad = grad.float().masked_fill(skip, 0.0)
    first, second = exp_avg.float(), exp_avg_sq.float()
    new_first, new_second = _adamw(
        param, grad, first, second, step, skip, lr, beta1, beta2, eps, weight_decay
    )
    if exp_avg.dtype == torch.bfloat16:
        chance = _chance(param, step, seed, offsets, shape)
        new_first = round_by(new_first, chance & 0xFFFF)
        new_second = round_by(new_second, chance >> 16 & 0xFFFF)
    exp_avg.copy_(new_first)
    exp_avg_sq.copy_(new_second)


def _update_packed(
    param: Tensor,
    grad: Tensor,
    first_codes: Tensor,
    second_codes: Tensor,
    ranges: Tensor,
    step: Tensor,
    bad: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    seed: Tensor,
    offsets: tuple[int, ...],
    shape: tuple[int, ...],
) -> None:
    """`_update` of moments in 8 bits."""
    skip, limit = bad > 0, _limit(beta1, beta2)
    grad = grad.float().masked_fill(skip, 0.0)
    second = unpack_second(second_codes, ranges)
    first = unpack_first(first_codes, second.sqrt(), limit)
    new_first, new_second = _adamw(
        param, grad, first, second, step, skip, lr, beta1, beta2, eps, weight_decay
    )
    chance = _chance(param, step, seed, offsets, shape)
    packed = [torch.empty_like(each) for each in (first_codes, second_codes, ranges)]
    pack_second(new_second, chance >> 16 & 0xFFFF, packed[1], packed[2])
    root = unpack_second(packed[1], packed[2]).sqrt()
    pack_first(new_first, root, limit, chance & 0xFFFF, packed[0])
    for old, new in zip((first_codes, second_codes, ranges), packed, strict=True):
        old.copy_(torch.where(skip, old, new))


def _adamw(
    param: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    step: Tensor,
    skip: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor]:
    """Move a parameter and count the step, in place; return the new moments in float32."""
    step += ~skip
    old = param.float()
    new_first = torch.where(skip, first, first.lerp(grad, 1 - beta1))
    new_second = torch.where(skip, second, second.lerp(grad.square(), 1 - beta2))
    denominator = (new_second / (1 - beta2**step)).sqrt() + eps
    new = old * (1 - lr * weight_decay) - lr * new_first / (1 - beta1**step) / denominator
    param.copy_(torch.where(skip, old, new))
    return new_first, new_second


@cache
def _compiled(update: Callable[..., None]) -> Any:
    return torch.compile(update, fullgraph=True, dynamic=False)


def round_by(value: Tensor, chance: Tensor) -> Tensor:
    """Float32 to what bfloat16 can hold, up or down; zero, infinity and NaN stay what they are.

    Args:
        chance: int32, uniform from 0 to 2^16 - 1; the share of them that round away from zero is
            the share of the last place that is cut off.
    """
    rounded = ((value.view(torch.int32) + chance) & -0x10000).view(torch.float32)
    # Of a NaN with all bits set, such as CUDA's, the sum would overflow to a zero.
    return torch.where(value.isnan(), value, rounded).to(torch.bfloat16)


def _chance(
    like: Tensor, step: Tensor, seed: Tensor, offsets: Sequence[int], shape: Sequence[int]
) -> Tensor:
    """32 bits for each element, of its place in the whole parameter, the step and a seed: int32.

    Args:
        like: this rank's part of the parameter.
        offsets: where that begins in the whole.
        shape: of the whole.
    """
    index, stride = torch.zeros((), dtype=torch.int64, device=like.device), 1
    for dim in reversed(range(like.dim())):
        along = torch.arange(like.shape[dim], device=like.device) + offsets[dim]
        index = index + (along * stride).view([-1 if d == dim else 1 for d in range(like.dim())])
        stride *= shape[dim]
    mixed = _hash(step.to(torch.int32) * 0x10001 + seed.to(step.device))
    return _hash(index.to(torch.int32) ^ mixed)


def _hash(x: Tensor) -> Tensor:
    """A good 32-bit mixer: C. Wellons, "Prospecting for hash functions" (lowbias32), 2018."""
    x = x ^ (x >> 16 & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15 & 0x1FFFF)
    x = x * (0x846CA68B - (1 << 32))  # as a signed 32-bit integer
    return x ^ (x >> 16 & 0xFFFF)
