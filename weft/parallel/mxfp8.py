"""MXFP8 linear layer: factors are cast in blocks of 32 numbers with one scale.

It uses torchao's prototype (`torchao.prototype.moe_training.mxfp8_linear`), whose interface is not
stable.  No other module uses the prototype, and this one is imported only when a layer is
converted.  torchao's own module cannot be emulated, because it always casts for the weight gradient
with a CUDA kernel.  So this module calls the matmul with an explicit choice of kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchao.prototype.moe_training.mxfp8_linear import mx_mm
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

BLOCK_SIZE = 32
E4M3 = torch.float8_e4m3fn  # also for gradients: one scale per 32 numbers leaves enough range


class MXLinear(nn.Linear):
    """A linear layer in MXFP8, with the weight and bias of ``module``."""

    def __init__(self, module: nn.Linear, emulate: bool) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = module.in_features, module.out_features
        self.weight, self.bias = module.weight, module.bias
        dim0, dim1 = MXFP8Dim0CastKernelChoice, MXFP8Dim1CastKernelChoice
        self.kernels = (
            (KernelPreference.EMULATED, dim0.TORCH, dim1.TORCH)
            if emulate
            else (KernelPreference.AUTO, dim0.TRITON, dim1.CUDA)
        )

    def forward(self, input: Tensor) -> Tensor:
        """Multiply in MXFP8, and add the bias."""
        rounding = ScaleCalculationMode.RCEIL  # rounds scales up, so nothing saturates
        out: Tensor = mx_mm.apply(
            input, self.weight, E4M3, E4M3, E4M3, BLOCK_SIZE, *self.kernels, rounding, False
        )
        return out if self.bias is None else out + self.bias
