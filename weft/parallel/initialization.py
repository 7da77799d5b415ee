"""Initial weights that do not depend on the layout.

A model of 405 billion parameters cannot be initialised whole and then cut up, and a
random generator that each rank runs on its own shard would give every layout another
model.  So there is no generator here: the value of an element is a pure function of
(seed, name of its parameter, index in the whole parameter).  Each rank computes just
the elements that it holds, in any order, on any device, and one process or a thousand
end with the same weights.

The function is a 64-bit integer hash (the finaliser of SplitMix64: Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", 2014) of a counter, turned
into a truncated normal by inverting the cumulative distribution.  Its arithmetic is
exact up to the last step, which is in float64, so that devices agree after rounding
to float32.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator

import torch

from weft.models.family import Init
from weft.parallel.dtensor import iter_flat_indices, to_local, shard_offsets
from weft.parallel.quantize import store_float32, float32_buffer

# Elements that are computed at a time: bounds the temporaries to a few hundred MiB.
CHUNK_ELEMENTS = 1 << 22
TRUNCATE_AT = 3.0  # standard deviations

_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB


@torch.no_grad()
def init_params(
    params: Iterable[tuple[str, torch.Tensor]], seed: int, init_of: Callable[[str], Init]
) -> None:
    """Fill every parameter in place, each rank only its own shard.

    Args:
        params: (name in the whole model, parameter or buffer that is state), materialised;
            Tensors or DTensors, sharded evenly or not.
        seed: of the run.
        init_of: how the parameter of that name starts.
    """
    for name, param in params:
        init = init_of(name)
        values = float32_buffer(param)
        local = to_local(values)
        stream = _mix_int((seed << 32) ^ zlib.crc32(name.encode()))
        if init.kind in ("ones", "zeros"):
            local.fill_(init.kind == "ones")
        else:
            for part, uniform in _uniform_chunks(local, shard_offsets(values), values.shape, stream):
                part.copy_(_transform(uniform, init, values.shape))
        store_float32(param, values)


def _transform(uniform: torch.Tensor, init: Init, shape: torch.Size) -> torch.Tensor:
    """What becomes of even numbers between -1 and 1 in a parameter of ``shape``.

    Even ones between +-1 / sqrt(inputs), or std * N(0, 1) cut at `TRUNCATE_AT`.
    """
    if init.kind == "fan_in":
        return uniform * (1 / math.sqrt(shape[1]))
    edge = math.erf(TRUNCATE_AT / math.sqrt(2.0))
    return torch.erfinv(uniform * edge) * math.sqrt(2.0) * init.std


def _uniform_chunks(
    local: torch.Tensor, offsets: list[int], shape: torch.Size, stream: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Some rows of ``local``, and as many numbers between -1 and 1, in float64."""
    for part, index in iter_flat_indices(local, offsets, shape, CHUNK_ELEMENTS):
        bits = _mix(index * _GOLDEN + stream)
        # The 53 highest bits, centred in their interval: strictly inside (0, 1).
        yield part, 2.0 * ((_shift_right(bits, 11).double() + 0.5) * 2.0**-53) - 1.0


def _shift_right(x: torch.Tensor, n: int) -> torch.Tensor:
    """Logical shift of int64, whose own shift copies the sign."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser on int64, whose multiplication wraps as unsigned would."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _mix_int(x: int) -> int:
    signed = (x + (1 << 63)) % (1 << 64) - (1 << 63)
    return int(_mix(torch.tensor(signed)).item())
