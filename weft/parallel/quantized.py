"""Quantized matrices: 4 or 8 bits per number, for any layout of shards.

As in QLoRA (arXiv:2305.14314), a block of 64 neighboring numbers of a row shares a scale, its
largest magnitude.  *nf4* stores the nearest of 16 levels, which are equally likely under a normal
distribution; *int8* the nearest of 255 equidistant levels.  A matrix ``[outputs, inputs]`` becomes
one uint8 tensor,

    [outputs, inputs / 64, 32 + 4]     nf4: two codes per byte, the first in the upper half
    [outputs, inputs / 64, 64 + 4]     int8

whose last 4 bytes are the float32 scale: 4.5 and 8.5 bits per number.  Its last size distinguishes
nf4 and int8.  Sharding by outputs (FSDP, tensor-parallel *column*) shards dim 0, and sharding by
inputs (*row*) shards dim 1.  No shard splits a block, and each rank quantizes its shard to the same
bytes as one process does.  FSDP gathers the bytes like any other tensor.  A stack of experts has
one more dim before these.

Forward and backward dequantize the matrix in the dtype of the activations, and do not keep it.

torchao's `NF4Tensor` quantizes a flattened tensor, and its scales again over blocks of blocks.  So
it shards by chunks only, never by inputs, and its shards have other bytes than the full tensor.
The second quantization would reduce the 0.5 bits of scales to 0.13.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.models.layers import add_bias, grouped_linear, linear, run_function
from weft.parallel.private import without_dispatch_modes
from weft.planning.lora_plan import QUANT_BLOCK_BYTES, QUANT_BLOCK_SIZE

SCALE_BYTES = 4  # bytes

# Quantiles of the normal distribution, with an exact zero: arXiv:2305.14314, appendix E.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def quantize_matrix(values_OI: Tensor, kind: str) -> Tensor:
    """Quantize a matrix to uint8 ``[O, I / 64, block bytes]``.

    Args:
        values_OI: float32, finite; ``I`` is a multiple of 64.  Or a stack of such matrices.
        kind: nf4 or int8.
    """
    blocks_ONB = values_OI.float().view(*values_OI.shape[:-1], -1, QUANT_BLOCK_SIZE)
    scales_ON1 = blocks_ONB.abs().amax(dim=-1, keepdim=True)
    scaled_ONB = blocks_ONB / torch.where(scales_ON1 == 0, 1.0, scales_ON1)
    if kind == "int8":
        codes = (scaled_ONB * 127).round().to(torch.int8).view(torch.uint8)
    else:
        levels = torch.tensor(NF4, device=values_OI.device)
        edges = (levels[1:] + levels[:-1]) / 2
        halves = torch.bucketize(scaled_ONB, edges, out_int32=True).to(torch.uint8)
        codes = (halves[..., 0::2] << 4) | halves[..., 1::2]
    return torch.cat((codes, scales_ON1.contiguous().view(torch.uint8)), dim=-1)


def dequantize_matrix(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix ``[..., O, I]`` of quantized bytes, rounded to ``dtype``."""
    codes = packed[..., :-SCALE_BYTES]
    scales_ON1 = packed[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    if packed.shape[-1] == QUANT_BLOCK_BYTES["int8"]:
        values_ONB = codes.view(torch.int8) * (scales_ON1 / 127)
    else:
        values_ONB = F.embedding(codes.int(), _nf4_table(packed.device)).flatten(-2) * scales_ON1
    matrix_OI: Tensor = values_ONB.flatten(-2).to(dtype)
    return matrix_OI


_nf4_tables: dict[torch.device, Tensor] = {}


def _nf4_table(device: torch.device) -> Tensor:
    """Return the two numbers of each nf4 byte: float32 ``[256, 2]``."""
    if torch.compiler.is_compiling():
        return _build_nf4_table(device)
    if device not in _nf4_tables:
        with without_dispatch_modes():  # later steps have the table, too
            _nf4_tables[device] = _build_nf4_table(device)
    return _nf4_tables[device]


def _build_nf4_table(device: torch.device) -> Tensor:
    # Not `torch.tensor`: the host would wait for the copy, in a compiled graph at each use.
    levels = torch.stack([torch.full((), level, device=device) for level in NF4])
    return torch.stack((levels.repeat_interleave(len(NF4)), levels.repeat(len(NF4))), dim=1)


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, counts_E: Tensor | None) -> Tensor:
        ctx.save_for_backward(packed, counts_E)
        matrix = dequantize_matrix(packed, x.dtype)
        return linear(x, matrix, None, counts_E)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        packed, counts_E = ctx.saved_tensors
        matrix = dequantize_matrix(packed, grad.dtype)
        if counts_E is None:
            return grad @ matrix, None, None
        return grouped_linear(grad, matrix.transpose(1, 2), counts_E), None, None


def quantized_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, counts_E: Tensor | None = None
) -> Tensor:
    """Apply a frozen linear layer with a quantized weight; see `linear`."""
    out = run_function(_QuantizedLinear, x, weight, counts_E)
    return add_bias(out, bias, counts_E)
