"""MXFP8: a linear layer whose factors are cast in blocks of 32 numbers with a scale each.

On top of torchao's prototype (`torchao.prototype.moe_training.mxfp8_linear`), which is bound to
change: this file is all that knows of it, and is imported only where a layer is converted.  Its
own module cannot be emulated: it casts for the gradient of the weight by a CUDA kernel whatever it
is told, so here the product is called with the choice of the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchao.prototype.moe_training.mxfp8_linear import mx_mm
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice as Along,
)
from torchao.prototype.mx_formats.config import (
    MXFP8Dim1CastKernelChoice as Across,
)
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

BLOCK_SIZE = 32
E4M3 = torch.float8_e4m3fn  # for gradients, too: a scale for 32 of them leaves enough range


class MXLinear(nn.Linear):
    """``module`` with the same weight and bias, multiplied in MXFP8."""

    def __init__(self, module: nn.Linear, emulate: bool) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = module.in_features, module.out_features
        self.weight, self.bias = module.weight, module.bias
        self.kernels = (
            (KernelPreference.EMULATED, Along.TORCH, Across.TORCH)
            if emulate
            else (KernelPreference.AUTO, Along.TRITON, Across.CUDA)
        )

    def forward(self, input: Tensor) -> Tensor:
        rounding = ScaleCalculationMode.RCEIL  # scales are rounded up: nothing saturates
        out: Tensor = mx_mm.apply(
            input, self.weight, E4M3, E4M3, E4M3, BLOCK_SIZE, *self.kernels, rounding, False
        )
        return out if self.bias is None else out + self.bias
