"""AdamW with moments in bfloat16 or 8 bits, instead of float32.

AdamW's moments are 8 of the 16 bytes per parameter in training.  Two formats are smaller:

    bfloat16    Two bytes, with float32's exponents, so nothing underflows.
    8bit        One byte each for the matrices of the blocks, see below.  All other parameters
                (embedding, head, gains) keep float32 moments, because their rows may be rare.

Round-to-nearest would fail.  The second moment moves by (1 - beta2) of its distance per step.  With
beta2 = 0.999 that is less than half of the last place, so the moment could never decrease.  Both
formats therefore use stochastic rounding, which is unbiased (docs/results.md).

*Eight bits.*  An update is first / sqrt(second).  It fails where rounding makes the second moment
much too small, so both moments have a relative error:

    second      2 ** (bottom + (code - 1) / 2 ** fine), code 0 for zero.  ``bottom``, an octave, and
                ``fine`` belong to a block of 32 neighbors in a row.  ``fine`` is the finest
                resolution with which 255 codes span the block.  Values more than 40 octaves below
                the largest (20 of the root) are rounded up, and move less.
    first       its ratio to the root of the *stored* second moment, which is bounded by a function
                of the betas: 127 steps to each side, finer near zero.

A stored pair therefore never gives a larger update than AdamW can.  Blocks lie in rows of the
unsharded parameter.  The random bits are a hash of the parameter's name, the step and the position
in the unsharded parameter, so every layout rounds alike, and a resumed run gets the same bits.

torchao's 8-bit states, which resemble bitsandbytes', share one linear scale over 256 elements of a
shard.  An element with 2e-4 of the block's largest gradient has second moment 0 but a nonzero
first moment, and moves by first / eps.

Parameters and arithmetic stay float32.  On CUDA torch.compile makes one or a few kernels per
parameter, and a call updates up to `PARAMS_PER_CALL` parameters whose shards are alike.  A call
costs the host 0.16 ms, but time to compile grows with the parameters in a call (docs/results.md).
On CPU the code runs eagerly, because compilation would cost more than it saves.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from weft.parallel.compile import run_compiled
from weft.parallel.dtensor import flat_indices, shard_like, shard_offsets, to_local
from weft.plan.matrices import MOMENT_BLOCK_SIZE

MIN_SECOND_MOMENT = 2.0**-126  # smaller second moments, and their first moments, become zero
MAX_OCTAVES = 40  # of the second moment that a block can span
MAX_FINE = 7  # log2 of the maximum steps per octave
PARAMS_PER_CALL = 4  # of a compiled update


class LowPrecisionAdamW(Optimizer):
    """AdamW with moments in ``state_dtype``.

    Parameter groups are as for torch's AdamW.  Groups with ``low_precision`` false keep float32
    moments under 8bit.  A group's ``names`` are its parameters' names in the full model; without
    them, random bits depend on the order.

    Loaded moments have the saved dtype until `convert_loaded_state` is called.
    """

    # Protocol of torch's GradScaler: gradients are divided by `grad_scale`, on the device, and if
    # `found_inf` is true, nothing changes.
    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        state_dtype: Literal["bfloat16", "8bit"],
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.state_dtype = state_dtype
        self._positions: dict[Tensor, ShardPosition] = {}  # of this rank's shards

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; closures are not supported."""
        assert closure is None
        number, steps, calls = 0, list[Tensor](), defaultdict[Any, list[ParamTensors]](list)
        for index, group in enumerate(self.param_groups):
            names = group.get("names") or [None] * len(group["params"])
            for name, param in zip(names, group["params"], strict=True):
                number += 1
                if param.grad is None:
                    continue
                local, state = to_local(param).detach(), self.state[param]
                if not state:
                    state["step"] = torch.zeros((), device=local.device)
                    self._allocate(param, group, state)
                if param not in self._positions:  # `full`, because the host would wait for a copy
                    seed = number if name is None else zlib.crc32(name.encode()) & 0x7FFFFFFF
                    on_device = torch.full((), seed, dtype=torch.int32, device=local.device)
                    offsets = tuple(shard_offsets(param))
                    self._positions[param] = ShardPosition(on_device, offsets, tuple(param.shape))
                steps.append(state["step"])
                if local.numel() == 0:
                    continue
                moments, update = _plain_moments(state)
                grad, position = to_local(param.grad), self._positions[param]
                tensors = ParamTensors(local, grad, moments, state["step"], position)
                calls[index, update, local.shape, *position[1:]].append(tensors)
        if not steps:
            return
        device = steps[0].device
        found_inf = torch.zeros(()) if self.found_inf is None else self.found_inf
        scale = torch.ones(()) if self.grad_scale is None else self.grad_scale
        skip, scale = found_inf.to(device) > 0, scale.to(device)
        torch._foreach_add_(steps, [(~skip).float()] * len(steps))
        for (index, update, *_), params in calls.items():
            group = self.param_groups[index]
            numbers = *group["betas"], group["eps"], group["weight_decay"]
            options = AdamWOptions(skip, scale, torch.tensor(group["lr"]), *numbers)
            for first in range(0, len(params), PARAMS_PER_CALL):
                run_updates(update, params[first : first + PARAMS_PER_CALL], options)

    def convert_loaded_state(self) -> None:
        """Convert loaded moments from the saved dtype and device, in place."""
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
                if not (isinstance(first, PackedMoment) and isinstance(second, PackedMoment)):
                    first.copy_(loaded[0])
                    second.copy_(loaded[1])
                elif second.numel():
                    # Round to nearest: moments saved in 8 bits are restored exactly.
                    half = torch.full_like(second.codes, 1 << 15, dtype=torch.int32)
                    pack_second(loaded[1].float(), half, second.codes, second.ranges)
                    root = unpack_second(second.codes, second.ranges).sqrt()
                    pack_first(
                        loaded[0].float(), root, _max_ratio(*group["betas"]), half, first.codes
                    )

    def _allocate(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Allocate zero moments for a parameter.

        Raises:
            ValueError: if the layout splits rows into shards that are not whole blocks.
        """
        local = to_local(param)
        first: Tensor
        second: Tensor
        is_packable = group.get("low_precision", True) and is_packed(param.shape)
        if self.state_dtype == "8bit" and is_packable:
            *rows, columns = local.shape
            if columns % MOMENT_BLOCK_SIZE:
                raise ValueError(
                    f"optim.state_dtype=8bit: a rank's {columns} columns of a parameter of shape "
                    f"{tuple(param.shape)} are not a multiple of {MOMENT_BLOCK_SIZE}"
                )
            # Both use `zeros`, by which a trace recognizes optimizer state.
            codes = torch.zeros(local.shape, dtype=torch.uint8, device=local.device)
            shape = (*rows, columns // MOMENT_BLOCK_SIZE)
            ranges = torch.zeros(shape, dtype=torch.int16, device=local.device)
            second = PackedMoment(codes, ranges)
            codes = torch.zeros(local.shape, dtype=torch.int8, device=local.device)
            first = PackedMoment(codes, ranges, MomentRatio(second, _max_ratio(*group["betas"])))
        else:
            dtype = torch.bfloat16 if self.state_dtype == "bfloat16" else local.dtype
            first, second = (torch.zeros_like(local, dtype=dtype) for _ in range(2))
        state["exp_avg"], state["exp_avg_sq"] = (
            shard_like(param, moment) for moment in (first, second)
        )


def _plain_moments(state: dict[str, Any]) -> tuple[tuple[Tensor, ...], Callable[..., None]]:
    """Return the tensors of a parameter's moments, and the function that updates them."""
    first, second = to_local(state["exp_avg"]), to_local(state["exp_avg_sq"])
    if isinstance(first, PackedMoment) and isinstance(second, PackedMoment):
        return (first.codes, second.codes, second.ranges), _update_packed
    return (first, second), _update


def is_packed(shape: Sequence[int]) -> bool:
    """Return True if a parameter of that unsharded shape has rows of whole blocks."""
    return len(shape) >= 2 and shape[-1] % MOMENT_BLOCK_SIZE == 0


# --------------------------------------------------------------------------- eight bits


class MomentRatio(NamedTuple):
    """Reference of a packed first moment."""

    second: PackedMoment
    limit: float  # of the first moment over the second's root


class PackedMoment(Tensor):
    """Moment in 8 bits that represents float32 values; see `dequantize`.

    ``codes`` has the moment's shape: uint8 for a second moment, int8 for a first, which has a
    ``ratio``.  ``ranges``, int16 ``[..., columns / MOMENT_BLOCK]``, are 8 * bottom + fine.
    """

    codes: Tensor
    ranges: Tensor
    ratio: MomentRatio | None

    @staticmethod
    def __new__(
        cls, codes: Tensor, ranges: Tensor, ratio: MomentRatio | None = None
    ) -> PackedMoment:
        """Create a wrapper tensor that owns no other memory."""
        make: Any = Tensor._make_wrapper_subclass
        packed: PackedMoment = make(
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
        return f"PackedMoment({tuple(self.shape)}, device={self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # The operators that DTensor calls on a local tensor.
        if func in (torch.ops.aten.view.default, torch.ops.aten.detach.default):
            packed = args[0]
            return cls(packed.codes, packed.ranges, packed.ratio)
        raise NotImplementedError(f"{func} of a packed moment")

    def dequantize(self) -> Tensor:
        """Return the float32 values in new memory."""
        if self.ratio is None:
            return unpack_second(self.codes, self.ranges)
        second, limit = self.ratio
        return unpack_first(self.codes, unpack_second(second.codes, second.ranges).sqrt(), limit)


def unpack_second(codes: Tensor, ranges: Tensor) -> Tensor:
    """Return the second moments of codes: float32."""
    blocks = codes.view(*ranges.shape, MOMENT_BLOCK_SIZE).float()
    bottom, fine = (ranges >> 3).float().unsqueeze(-1), (ranges & 7).float().unsqueeze(-1)
    values = (bottom + (blocks - 1) * (-fine).exp2()).exp2()
    return values.where(blocks > 0, 0.0).view(codes.shape)


def pack_second(values: Tensor, random_bits: Tensor, codes: Tensor, ranges: Tensor) -> None:
    """Write second moments into codes and their blocks' ranges.

    Args:
        values: float32, nonnegative.
        random_bits: int32, uniform from 0 to 2^16 - 1, for stochastic rounding.
        codes: uint8 output.
        ranges: int16 output.
    """
    blocks = values.view(*ranges.shape, MOMENT_BLOCK_SIZE)
    nonzero = blocks >= MIN_SECOND_MOMENT
    logs = blocks.where(nonzero, 1.0).log2()
    any_nonzero = nonzero.any(-1, keepdim=True)
    _, top = _octaves(blocks.amax(-1, keepdim=True).where(any_nonzero, 1.0))
    bottom, _ = _octaves(
        blocks.where(nonzero, math.inf).amin(-1, keepdim=True).where(any_nonzero, 1.0)
    )
    bottom = bottom.maximum(top - MAX_OCTAVES)
    top = top.maximum(bottom + 1)
    fine = (254 / (top - bottom)).log2().floor().clamp(max=MAX_FINE)
    steps = fine.exp2()
    position = ((logs - bottom) * steps).clamp(min=0.0)
    low = position.floor()
    # Position between the two values, not between their logarithms.
    up_probability = (((position - low) / steps).exp2() - 1) / ((1 / steps).exp2() - 1)
    rounds_up = random_bits.view(blocks.shape).float() < up_probability * (1 << 16)
    code = (low + rounds_up).clamp(max=254.0) + 1
    codes.copy_(code.where(nonzero, 0.0).view(codes.shape))
    ranges.copy_((bottom * 8 + fine).squeeze(-1))


def _octaves(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithms to base 2, rounded down and up.

    Exact for positive normal float32 numbers, so a packed moment packs to the same codes.
    """
    bits = values.view(torch.int32)
    exponent = (bits >> 23) - 127
    return exponent.float(), (exponent + ((bits & 0x7FFFFF) > 0).int()).float()


def unpack_first(codes: Tensor, root: Tensor, limit: float) -> Tensor:
    """Return the first moments of codes, given the root of the second: float32."""
    steps = codes.float()
    return steps * steps.abs() * (limit / 127**2) * root


def pack_first(
    values: Tensor, root: Tensor, limit: float, random_bits: Tensor, codes: Tensor
) -> None:
    """Write first moments into codes.

    Args:
        values: float32.
        root: square root of the stored second moments.
        limit: maximum of the ratio of the two.
        random_bits: as in `pack_second`.
        codes: int8 output.
    """
    ratio = (values / root).where(root > 0, 0.0)
    position = (ratio.abs() * (1 / limit)).clamp(max=1.0).sqrt() * 127
    low = position.floor()
    rounds_up = random_bits.float() < (position.square() - low.square()) / (2 * low + 1) * (1 << 16)
    codes.copy_((low + rounds_up).clamp(max=127.0).copysign(ratio))


def _max_ratio(beta1: float, beta2: float) -> float:
    """Return the maximum of the first moment over the root of the second.

    The bound is Cauchy's inequality over all gradients.  As beta1^2 approaches beta2 the bound
    diverges; it is capped at ten times the ratio after one gradient.
    """
    gap = max(1 - beta1**2 / max(beta2, 1e-9), 0.01)
    return (1 - beta1) / math.sqrt((1 - beta2) * gap)


# --------------------------------------------------------------------------- a step


class ParamTensors(NamedTuple):
    """A parameter's shard and what belongs to it."""

    param: Tensor
    grad: Tensor
    moments: tuple[Tensor, ...]  # float or bfloat16; or codes of both, and ranges
    step: Tensor  # of this update, from 1
    position: ShardPosition


class AdamWOptions(NamedTuple):
    """Options of a parameter group, and of the step."""

    skip: Tensor  # if true, the update changes nothing
    grad_scale: Tensor  # divides gradients
    lr: Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class ShardPosition(NamedTuple):
    """Position of a shard in its parameter; seeds the random bits of its elements."""

    seed: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]  # unsharded


def run_updates(
    update: Callable[..., None], params: list[ParamTensors], options: AdamWOptions
) -> None:
    """Update parameters whose shards are alike, on a GPU in one compiled call."""
    enabled = params[0].param.device.type != "cpu"
    run_compiled("the optimizer's update", enabled, update_all, update, params, options)


def update_all(
    update: Callable[..., None], params: list[ParamTensors], options: AdamWOptions
) -> None:
    """Call ``update`` for each parameter."""
    for *tensors, position in params:
        update(*tensors, options, position)


def _update(
    param: Tensor,
    grad: Tensor,
    moments: tuple[Tensor, Tensor],
    step: Tensor,
    options: AdamWOptions,
    position: ShardPosition,
) -> None:
    """Update by AdamW in float32, in place; with ``skip`` all bits stay the same."""
    first, second = (moment.float() for moment in moments)
    new_first, new_second = _adamw(param, grad, first, second, step, options)
    exp_avg, exp_avg_sq = moments
    if exp_avg.dtype == torch.bfloat16:
        random_bits = _random_bits(param, step, position)
        new_first = round_stochastic(new_first, random_bits & 0xFFFF)
        new_second = round_stochastic(new_second, random_bits >> 16 & 0xFFFF)
    exp_avg.copy_(new_first)
    exp_avg_sq.copy_(new_second)


def _update_packed(
    param: Tensor,
    grad: Tensor,
    moments: tuple[Tensor, Tensor, Tensor],
    step: Tensor,
    options: AdamWOptions,
    position: ShardPosition,
) -> None:
    """Update as `_update` does; moments in 8 bits: codes of both, and ranges."""
    first_codes, second_codes, ranges = moments
    limit = _max_ratio(options.beta1, options.beta2)
    second = unpack_second(second_codes, ranges)
    first = unpack_first(first_codes, second.sqrt(), limit)
    new_first, new_second = _adamw(param, grad, first, second, step, options)
    random_bits = _random_bits(param, step, position)
    packed = [torch.empty_like(tensor) for tensor in moments]
    pack_second(new_second, random_bits >> 16 & 0xFFFF, packed[1], packed[2])
    root = unpack_second(packed[1], packed[2]).sqrt()
    pack_first(new_first, root, limit, random_bits & 0xFFFF, packed[0])
    for old, new in zip(moments, packed, strict=True):
        old.copy_(torch.where(options.skip, old, new))


def _adamw(
    param: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    step: Tensor,
    options: AdamWOptions,
) -> tuple[Tensor, Tensor]:
    """Update a parameter in place; return the new float32 moments."""
    skip, grad_scale, lr, beta1, beta2, eps, weight_decay = options
    grad = (grad.float() / grad_scale).masked_fill(skip, 0.0)
    old = param.float()
    new_first = torch.where(skip, first, first.lerp(grad, 1 - beta1))
    new_second = torch.where(skip, second, second.lerp(grad.square(), 1 - beta2))
    denominator = (new_second / (1 - beta2**step)).sqrt() + eps
    new = old * (1 - lr * weight_decay) - lr * new_first / (1 - beta1**step) / denominator
    param.copy_(torch.where(skip, old, new))
    return new_first, new_second


def round_stochastic(value: Tensor, random_bits: Tensor) -> Tensor:
    """Round float32 to bfloat16 stochastically; zero, infinity and NaN are unchanged.

    Args:
        value: float32.
        random_bits: int32, uniform from 0 to 2^16 - 1.  The fraction that rounds away from zero is
            the fraction of the last place that is cut off.
    """
    rounded = ((value.view(torch.int32) + random_bits) & -0x10000).view(torch.float32)
    # For a NaN with all bits set, such as CUDA's, the sum would overflow to zero.
    return torch.where(value.isnan(), value, rounded).to(torch.bfloat16)


def _random_bits(like: Tensor, step: Tensor, position: ShardPosition) -> Tensor:
    """Return 32 random bits per element of ``like``, the shard at ``position``."""
    index = flat_indices(like.shape, position.offsets, position.shape, like.device)
    mixed = _hash(step.to(torch.int32) * 0x10001 + position.seed)
    return _hash(index.to(torch.int32) ^ mixed)


def _hash(x: Tensor) -> Tensor:
    """Mix 32 bits (C. Wellons, "Prospecting for hash functions", lowbias32, 2018)."""
    x = x ^ (x >> 16 & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15 & 0x1FFFF)
    x = x * (0x846CA68B - (1 << 32))  # as a signed 32-bit integer
    return x ^ (x >> 16 & 0xFFFF)
