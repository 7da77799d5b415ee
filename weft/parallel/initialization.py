"""Initial weights that do not depend on the layout.

A model of 405 billion parameters is too large to initialize on one rank and then shard.  A random
generator per rank would give a different model for every layout.  So this module uses no generator:
the value of an element is a pure function of (seed, name of its parameter, index in the unsharded
parameter).  Each rank computes only the elements of its shards, in any order, on any device, and
one process or a thousand get the same weights.

The function is a 64-bit integer hash (the finalizer of SplitMix64: Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", 2014) of a counter.  Inverting the cumulative
distribution turns it into a truncated normal.  The arithmetic is exact up to the last step, which
is in float64, so devices agree after rounding to float32.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from weft.models.family import Init
from weft.parallel.dtensor import iter_flat_indices, shard_like, shard_offsets, to_local
from weft.planning.lora_plan import QUANT_BLOCK_BYTES, QUANT_BLOCK_SIZE

# Elements computed at a time: limits temporaries to a few hundred MiB.
CHUNK_ELEMENTS = 1 << 22
QUANTIZE_ELEMENTS = 1 << 24
TRUNCATE_AT = 3.0  # standard deviations

GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB


def allocate(part: nn.Module, device: torch.device, cpu_offload: bool) -> None:
    """Allocate uninitialized memory for the parameters of a part on the meta device."""
    part.to_empty(device="cpu" if cpu_offload else device)
    if cpu_offload:  # FSDP copies parameters to the device on use; buffers stay on the device
        for module in part.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))


def empty_on_host(tensor: Tensor, pin: bool) -> Tensor:
    """Allocate a CPU tensor with the same shape, strides and dtype."""
    shape, stride = tensor.shape, tensor.stride()
    return torch.empty_strided(shape, stride, dtype=tensor.dtype, device="cpu", pin_memory=pin)


@torch.no_grad()
def init_params(
    params: Iterable[tuple[str, torch.Tensor]], seed: int, get_init: Callable[[str], Init]
) -> None:
    """Initialize every parameter in place; each rank fills its own shards.

    Args:
        params: (name in the full model, parameter or persistent buffer), materialized; Tensors or
            DTensors, sharded evenly or not.
        seed: the run's seed.
        get_init: returns the initialization of the parameter with a given name.
    """
    for name, param in params:
        init = get_init(name)
        values = float32_buffer(param)
        local = to_local(values)
        stream = mix_int((seed << 32) ^ zlib.crc32(name.encode()))
        if init.kind in ("ones", "zeros"):
            local.fill_(init.kind == "ones")
        else:
            for chunk, uniform in _uniform_chunks(
                local, shard_offsets(values), values.shape, stream
            ):
                chunk.copy_(_transform(uniform, init, values.shape))
        store_float32(param, values)


def _transform(uniform: torch.Tensor, init: Init, shape: torch.Size) -> torch.Tensor:
    """Map uniform numbers in (-1, 1) to the distribution of ``init``.

    *fan_in*: uniform in +-1 / sqrt(inputs); else std * N(0, 1), truncated at `TRUNCATE_AT`.
    """
    if init.kind == "fan_in":
        return uniform * (1 / math.sqrt(shape[-1]))
    edge = math.erf(TRUNCATE_AT / math.sqrt(2.0))
    return torch.erfinv(uniform * edge) * math.sqrt(2.0) * init.std


def _uniform_chunks(
    local: torch.Tensor, offsets: list[int], shape: torch.Size, stream: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield chunks of ``local``, each with uniform float64 numbers in (-1, 1)."""
    for chunk, index in iter_flat_indices(local, offsets, shape, CHUNK_ELEMENTS):
        bits = mix_bits(index * GOLDEN + stream)
        # The 53 highest bits, centered in their interval: strictly inside (0, 1).
        yield chunk, 2.0 * ((shift_right(bits, 11).double() + 0.5) * 2.0**-53) - 1.0


def shift_right(x: torch.Tensor, n: int) -> torch.Tensor:
    """Shift int64 right logically; ``>>`` would copy the sign."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def mix_bits(x: torch.Tensor) -> torch.Tensor:
    """Apply SplitMix64's finalizer; int64 multiplication wraps like unsigned."""
    x = (x ^ shift_right(x, 30)) * _MIX_1
    x = (x ^ shift_right(x, 27)) * _MIX_2
    return x ^ shift_right(x, 31)


def mix_int(x: int) -> int:
    """Apply `mix_bits` to an integer, modulo 2**64."""
    signed = (x + (1 << 63)) % (1 << 64) - (1 << 63)
    return int(mix_bits(torch.tensor(signed)).item())


# --------------------------------------------------------------------------- float32 values


def float32_buffer(param: Tensor) -> Tensor:
    """Return a float32 buffer for a parameter's values, sharded like it.

    It is the parameter itself if that is float32, else uninitialized memory for `store_float32`.
    """
    if param.dtype == torch.float32:
        return param.data
    local = to_local(param)
    shape, sizes = param.shape, local.shape
    if param.dtype == torch.uint8:
        shape, sizes = (torch.Size((*x[:-2], x[-2] * QUANT_BLOCK_SIZE)) for x in (shape, sizes))
    buffer = torch.empty(sizes, dtype=torch.float32, device=local.device)
    return shard_like(param, buffer, shape)


@torch.no_grad()
def store_float32(param: Tensor, buffer: Tensor) -> None:
    """Cast or quantize ``float32_buffer(param)`` into ``param``."""
    if param.dtype == torch.float32:
        return
    local, values = to_local(param), to_local(buffer)
    if param.dtype != torch.uint8:
        local.copy_(values)
        return
    kind = next(kind for kind, size in QUANT_BLOCK_BYTES.items() if size == param.shape[-1])
    from weft.parallel.quantized import quantize_matrix

    rows = max(1, QUANTIZE_ELEMENTS // max(1, values.shape[1:].numel()))
    for first in range(0, values.shape[0], rows):
        chunk = slice(first, first + rows)
        local[chunk] = quantize_matrix(values[chunk], kind)
