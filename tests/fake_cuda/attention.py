"""Choose the kernel of attention without a mask as PyTorch does on a GPU.

The choice is C++ code that a CPU build lacks.  Its conditions, without dropout and for dense
tensors, are those of PyTorch 2.13 in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, with
cuDNN 9.11 or newer.  The order is that of `weft.training.setup.fastest_attention`; before Hopper it
is PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend

Capability = tuple[int, int]

# Largest head for which cuDNN has a kernel, by capability.
CUDNN_HEADS: Mapping[Capability, int] = {(9, 0): 256}
CUDNN_HEADS_OF_OTHERS = 128
# Width of keys and of values that cuDNN has beyond that on Blackwell, as in DeepSeek's models.
CUDNN_BLACKWELL_HEAD = (192, 128)
FLASH_HEAD = 256  # largest, of equal keys and values
# Devices for which FlashAttention 2 cannot train heads of these widths.
FLASH_CANNOT_TRAIN = {(8, 6), (8, 7), (8, 8), (8, 9), (12, 0), (12, 1)}
FLASH_UNTRAINED_HEADS = range(193, 225)


class Shapes(NamedTuple):
    """What the choice depends on.

    Attributes:
        heads: of queries, and of keys and values.
        head_dims: of keys, and of values.
        tokens: queries, and keys.
    """

    heads: tuple[int, int]
    head_dims: tuple[int, int]
    tokens: tuple[int, int]
    dtype: torch.dtype = torch.bfloat16
    is_causal: bool = True


def choose_backend(shapes: Shapes, capability: Capability) -> SDPBackend:
    """Return the first kernel in the order of preference that supports the shapes."""
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    if capability >= (9, 0):
        order.insert(0, SDPBackend.CUDNN_ATTENTION)
    supports = {
        SDPBackend.CUDNN_ATTENTION: supports_cudnn,
        SDPBackend.FLASH_ATTENTION: supports_flash,
        SDPBackend.EFFICIENT_ATTENTION: supports_efficient,
    }
    return next((kind for kind in order if supports[kind](shapes, capability)), SDPBackend.MATH)


def supports_cudnn(shapes: Shapes, capability: Capability) -> bool:
    """Return True if cuDNN has a kernel."""
    keys, values = shapes.head_dims
    fits = max(keys, values) <= CUDNN_HEADS.get(capability, CUDNN_HEADS_OF_OTHERS)
    fits |= capability[0] == 10 and shapes.head_dims == CUDNN_BLACKWELL_HEAD
    is_half = shapes.dtype in (torch.bfloat16, torch.float16)
    return is_half and fits and keys % 8 == values % 8 == 0 and shapes.tokens[1] > 1


def supports_flash(shapes: Shapes, capability: Capability) -> bool:
    """Return True if FlashAttention 2 has a kernel, forward and backward."""
    keys, values = shapes.head_dims
    is_half = shapes.dtype in (torch.bfloat16, torch.float16)
    is_trained = capability not in FLASH_CANNOT_TRAIN or keys not in FLASH_UNTRAINED_HEADS
    is_square = shapes.tokens[0] == shapes.tokens[1] or not shapes.is_causal
    fits = keys == values <= FLASH_HEAD
    return is_half and fits and is_trained and is_square and capability >= (8, 0)


def supports_efficient(shapes: Shapes, capability: Capability) -> bool:
    """Return True if the memory-efficient kernel supports the shapes."""
    alignment = 8 if shapes.dtype in (torch.bfloat16, torch.float16) else 4
    has_all_heads = shapes.heads[0] == shapes.heads[1]
    return has_all_heads and not any(width % alignment for width in shapes.head_dims)
