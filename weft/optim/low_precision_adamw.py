"""AdamW with moments in bfloat16 or 8 bits, and the momentum of Muon and SOAP.

AdamW's moments are 8 of the 16 bytes per parameter in training.  Two formats are smaller:

    bfloat16    Two bytes, with float32's exponents, so nothing underflows.
    8bit        One byte each for the matrices of the blocks, see below.  All other parameters
                (embedding, head, norms) keep float32 moments, because their rows may be rare.

*float32*, which only Muon and SOAP ask for here, is the same arithmetic without rounding.

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
    momentum    (of Muon) its ratio to the largest of its block, in bfloat16: the same steps.

A stored pair therefore never gives a larger update than AdamW can.  Blocks lie in the rows of a
shard; the last one may be shorter.  The random bits are a hash of the parameter's name, the step
and the position in the unsharded parameter.  So a resumed run gets the same bits, and layouts round
alike, unless tensor parallelism cuts a row between two blocks: then their ranges differ.

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
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from weft.config.accelerators import supports
from weft.parallel.compile import RunCompiled, run_compiled
from weft.parallel.dtensor import flat_indices, shard_like, shard_offsets, to_local
from weft.planning.matrices import MOMENT_BLOCK_SIZE

UPDATE = "the optimizer's update"  # label of `run_compiled`
MIN_SECOND_MOMENT = 2.0**-126  # smaller second moments, and their first moments, become zero
MAX_OCTAVES = 40  # of the second moment that a block can span
TO_NEAREST = (1 << 15) - (1 << 31)  # both halves of 32 random bits
MAX_FINE = 7  # log2 of the maximum steps per octave
PARAMS_PER_CALL = 4  # of a compiled update
ADAMW_MOMENTS, MUON_MOMENTS = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)


class LowPrecisionAdamW(Optimizer):
    """AdamW with moments in ``state_dtype``.

    Parameter groups are as for torch's AdamW.  Groups with ``low_precision`` false keep float32
    moments under 8bit.  A group's ``names`` are its parameters' names in the full model; without
    them, random bits depend on the order.  Parameters of a group with ``moments`` have these, and
    do not change: the update is written into `directions`.

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
        state_dtype: Literal["float32", "bfloat16", "8bit"],
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.state_dtype = state_dtype
        self._positions: dict[Tensor, ShardPosition] = {}  # of this rank's shards
        self.directions: dict[Tensor, Tensor] = {}  # see `weft.optim.muon`
        self.run_compiled: RunCompiled = run_compiled  # see `weft.parallel.backend`

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
                if "moments" in group:
                    local = self.directions[param] = torch.empty_like(local)
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
                moments, position = _plain_moments(state), self._positions[param]
                tensors = ParamTensors(
                    local, to_local(param.grad), moments, state["step"], position
                )
                kind = len(moments), moments[0].dtype
                calls[index, kind, local.shape, *position[1:]].append(tensors)
        if not steps:
            return
        device = steps[0].device
        found_inf = torch.zeros(()) if self.found_inf is None else self.found_inf
        scale = torch.ones(()) if self.grad_scale is None else self.grad_scale
        skip, scale = found_inf.to(device) > 0, scale.to(device)
        torch._foreach_add_(steps, [(~skip).float()] * len(steps))
        # On a CPU, compilation would cost more than it saves.
        enabled = device.type != "cpu" and supports(device.type, "compilation")
        for (index, *_), params in calls.items():
            group = self.param_groups[index]
            numbers = *group["betas"], group["eps"], group["weight_decay"]
            options = AdamWOptions(skip, scale, torch.tensor(group["lr"]), *numbers)
            for first in range(0, len(params), PARAMS_PER_CALL):
                some = params[first : first + PARAMS_PER_CALL]
                self.run_compiled(UPDATE, enabled, update_all, some, options)

    def convert_loaded_state(self) -> None:
        """Convert loaded moments from the saved dtype and device, in place."""
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state.get(param)
                if not state:
                    continue
                local, keys = to_local(param), group.get("moments", ADAMW_MOMENTS)
                state["step"] = state.get("step", torch.zeros(())).to(local.device)
                loaded = [to_local(state[key]).to(local.device).float() for key in keys]
                self._allocate(param, group, state)
                # Round to nearest: moments saved in fewer bits are restored exactly.
                bits = torch.full_like(local, TO_NEAREST, dtype=torch.int32)
                if local.numel():
                    pack(loaded, bits, _max_ratio(*group["betas"]), _plain_moments(state))

    def _allocate(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Allocate zero moments for a parameter."""
        local, keys = to_local(param), group.get("moments", ADAMW_MOMENTS)
        moments: list[Tensor]
        if self.state_dtype == "8bit" and group.get("low_precision", True) and param.dim() >= 2:
            *rows, columns = local.shape
            shape = (*rows, -(-columns // MOMENT_BLOCK_SIZE))
            # All use `zeros`, by which a trace recognizes optimizer state.
            codes = torch.zeros(local.shape, dtype=torch.int8, device=local.device)
            if keys == MUON_MOMENTS:
                scales = torch.zeros(shape, dtype=torch.bfloat16, device=local.device)
                moments = [PackedMoment(codes, scales)]
            else:
                second_codes = torch.zeros(local.shape, dtype=torch.uint8, device=local.device)
                ranges = torch.zeros(shape, dtype=torch.int16, device=local.device)
                second = PackedMoment(second_codes, ranges)
                ratio = MomentRatio(second, _max_ratio(*group["betas"]))
                moments = [PackedMoment(codes, ranges, ratio), second]
        else:
            dtype = torch.bfloat16 if self.state_dtype == "bfloat16" else local.dtype
            moments = [torch.zeros_like(local, dtype=dtype) for _ in keys]
        for key, moment in zip(keys, moments, strict=True):
            state[key] = shard_like(param, moment)


def _plain_moments(state: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return the tensors of a parameter's moments; if packed, codes and ranges."""
    moments = [to_local(state[key]) for key in (*ADAMW_MOMENTS, *MUON_MOMENTS) if key in state]
    codes = [moment.codes for moment in moments if isinstance(moment, PackedMoment)]
    return (*codes, moments[0].ranges) if isinstance(moments[0], PackedMoment) else tuple(moments)


# --------------------------------------------------------------------------- eight bits


class MomentRatio(NamedTuple):
    """Reference of a packed first moment."""

    second: PackedMoment
    limit: float  # of the first moment over the second's root


class PackedMoment(Tensor):
    """Moment in 8 bits that represents float32 values; see `dequantize`.

    ``codes`` has the moment's shape: uint8 for a second moment, int8 for a first, which has a
    ``ratio``, and for a momentum.  ``ranges`` ``[..., blocks of a row]`` are 8 * bottom + fine, in
    int16; of a momentum the largest magnitudes, in bfloat16.
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
            is_second = self.codes.dtype == torch.uint8
            return (unpack_second if is_second else unpack_momentum)(self.codes, self.ranges)
        second, limit = self.ratio
        return unpack_first(self.codes, unpack_second(second.codes, second.ranges).sqrt(), limit)


def _to_blocks(values: Tensor, ranges: Tensor) -> Tensor:
    """Return rows as ``[..., blocks, MOMENT_BLOCK_SIZE]``, padded with zeros."""
    padding = ranges.shape[-1] * MOMENT_BLOCK_SIZE - values.shape[-1]
    padded = F.pad(values, (0, padding)) if padding else values
    return padded.reshape(*ranges.shape, MOMENT_BLOCK_SIZE)


def _from_blocks(blocks: Tensor, like: Tensor) -> Tensor:
    """Invert `_to_blocks`; the rows have the length of those of ``like``."""
    return blocks.flatten(-2)[..., : like.shape[-1]]


def unpack_second(codes: Tensor, ranges: Tensor) -> Tensor:
    """Return the second moments of codes: float32."""
    blocks = _to_blocks(codes, ranges).float()
    bottom, fine = (ranges >> 3).float().unsqueeze(-1), (ranges & 7).float().unsqueeze(-1)
    values = (bottom + (blocks - 1) * (-fine).exp2()).exp2()
    return _from_blocks(values.where(blocks > 0, 0.0), codes)


def pack_second(values: Tensor, random_bits: Tensor, codes: Tensor, ranges: Tensor) -> None:
    """Write second moments into codes and their blocks' ranges.

    Args:
        values: float32, nonnegative.
        random_bits: int32, uniform from 0 to 2^16 - 1, for stochastic rounding.
        codes: uint8 output.
        ranges: int16 output.
    """
    blocks = _to_blocks(values, ranges)
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
    rounds_up = _to_blocks(random_bits, ranges).float() < up_probability * (1 << 16)
    code = (low + rounds_up).clamp(max=254.0) + 1
    codes.copy_(_from_blocks(code.where(nonzero, 0.0), codes))
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
    codes.copy_(_round_ratio(ratio, ratio.abs() * (1 / limit), random_bits))


def _round_ratio(signed: Tensor, fraction: Tensor, random_bits: Tensor) -> Tensor:
    """Return the codes from -127 to 127 of fractions of a limit, with the given signs."""
    position = fraction.clamp(max=1.0).sqrt() * 127
    low = position.floor()
    rounds_up = random_bits.float() < (position.square() - low.square()) / (2 * low + 1) * (1 << 16)
    return (low + rounds_up).clamp(max=127.0).copysign(signed)


def unpack_momentum(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the momentum of codes: float32.

    The largest of a block is exactly its scale.
    """
    ratio = _to_blocks(codes, scales).float() / 127
    return _from_blocks(ratio * ratio.abs() * scales.float().unsqueeze(-1), codes)


def pack_momentum(values: Tensor, random_bits: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write a momentum into codes and the scales of their blocks.

    Args:
        values: float32.
        random_bits: int32; the upper half of a block's first rounds its scale, the others codes.
        codes: int8 output.
        scales: bfloat16 output.
    """
    blocks, bits = _to_blocks(values, scales), _to_blocks(random_bits, scales)
    largest = blocks.abs().amax(-1, keepdim=True)
    scale = round_stochastic(largest, bits[..., :1] >> 16 & 0xFFFF)
    fraction = (blocks.abs() / scale.float()).where(scale > 0, 0.0)
    fraction = fraction.masked_fill(blocks.abs() == largest, 1.0)  # for any rounding of the scale
    codes.copy_(_from_blocks(_round_ratio(blocks, fraction, bits & 0xFFFF), codes))
    scales.copy_(scale.squeeze(-1))


def unpack(moments: Sequence[Tensor], limit: float) -> list[Tensor]:
    """Return the float32 values of moments; see `_plain_moments`."""
    if moments[0].dtype != torch.int8:
        return [moment.float() for moment in moments]
    if len(moments) == 2:
        return [unpack_momentum(*moments)]
    second = unpack_second(*moments[1:])
    return [unpack_first(moments[0], second.sqrt(), limit), second]


def pack(
    values: Sequence[Tensor], random_bits: Tensor, limit: float, moments: Sequence[Tensor]
) -> None:
    """Write float32 values into moments; see `_plain_moments`.

    Args:
        values: of AdamW's moments, or of a momentum.
        random_bits: 32 of each element.
        limit: maximum of the ratio of AdamW's first moment to the root of the second.
        moments: outputs.
    """
    halves = random_bits & 0xFFFF, random_bits >> 16 & 0xFFFF
    if moments[0].dtype != torch.int8:
        for value, half, moment in zip(values, halves, moments, strict=False):
            is_rounded = moment.dtype == torch.bfloat16
            moment.copy_(round_stochastic(value, half) if is_rounded else value)
    elif len(values) == 1:
        pack_momentum(values[0], random_bits, moments[0], moments[1])
    else:
        first_codes, *second = moments
        pack_second(values[1], halves[1], *second)
        pack_first(values[0], unpack_second(*second).sqrt(), limit, halves[0], first_codes)


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

    param: Tensor  # of Muon's matrices: the direction, an output
    grad: Tensor
    moments: tuple[Tensor, ...]  # float or bfloat16; or codes of each, and ranges
    step: Tensor  # of this update, from 1
    position: ShardPosition


class AdamWOptions(NamedTuple):
    """Options of a parameter group, and of the step."""

    skip: Tensor  # if true, the update changes nothing
    grad_scale: Tensor  # divides gradients
    lr: Tensor
    beta1: float  # of Muon's matrices: the decay of the momentum
    beta2: float
    eps: float
    weight_decay: float


class ShardPosition(NamedTuple):
    """Position of a shard in its parameter; seeds the random bits of its elements."""

    seed: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]  # unsharded


def update_all(params: list[ParamTensors], options: AdamWOptions) -> None:
    """Update parameters, in place; with ``skip`` all bits stay the same."""
    limit = _max_ratio(options.beta1, options.beta2)
    for param, grad, moments, step, position in params:
        old = unpack(moments, limit)
        update: Any = _adamw if len(old) == 2 else _nesterov
        new = update(param, grad, *old, step, options)
        is_packed, bits = moments[0].dtype == torch.int8, step.int()
        if is_packed or moments[0].dtype == torch.bfloat16:
            bits = _random_bits(param, step, position)
        outputs = [torch.empty_like(each) for each in moments] if is_packed else moments
        pack(new, bits, limit, outputs)
        for moment, output in zip(moments, outputs, strict=True) if is_packed else ():
            moment.copy_(torch.where(options.skip, moment, output))


def _nesterov(
    direction: Tensor, grad: Tensor, momentum: Tensor, step: Tensor, options: AdamWOptions
) -> tuple[Tensor]:
    """Write the Nesterov momentum into ``direction``; return the new float32 momentum."""
    grad = (grad.float() / options.grad_scale).masked_fill(options.skip, 0.0)
    new = torch.where(options.skip, momentum, momentum.lerp(grad, 1 - options.beta1))
    direction.copy_(grad.lerp(new, options.beta1))
    return (new,)


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
