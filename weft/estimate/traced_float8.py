"""Casts to MXFP8 in a trace.

On a GPU, torchao casts with Triton and CUDA kernels, which an installation without a GPU lacks.  A
trace has an operator in their place: like them, it reads a matrix once, and writes the float8
numbers and a scale for 32 of them.

Shapes in names: M rows and K columns of a matrix.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from weft.estimate.private_trace import replace_mxfp8_kernels
from weft.planning.matrices import MX_BLOCK_SIZE


def trace_mxfp8_casts(enabled: bool) -> AbstractContextManager[None]:
    """Trace the casts of a run on a GPU that casts to MXFP8."""
    return replace_mxfp8_kernels(_cast_rows, _cast_columns) if enabled else nullcontext()


def _cast_rows(x_MK: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """Return numbers ``[M, K]`` and scales ``[M, K / 32]``."""
    numbers_MK, scales = torch.ops.weft.mxfp8_cast(x_MK, False)
    return numbers_MK, scales


def _cast_columns(x_MK: Tensor, **_: Any) -> tuple[None, Tensor, None, Tensor]:
    """Return numbers ``[M, K]`` with contiguous columns, and scales ``[K, M / 32]``."""
    numbers_KM, scales = torch.ops.weft.mxfp8_cast(x_MK, True)
    return None, numbers_KM.t(), None, scales


@torch.library.custom_op("weft::mxfp8_cast", mutates_args=())
def _mxfp8_cast(x_MK: Tensor, transpose: bool) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("has no values")


@_mxfp8_cast.register_fake
def _(x_MK: Tensor, transpose: bool) -> tuple[Tensor, Tensor]:
    rows, columns = reversed(x_MK.shape) if transpose else x_MK.shape
    numbers = x_MK.new_empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = x_MK.new_empty(rows, columns // MX_BLOCK_SIZE, dtype=torch.float8_e8m0fnu)
    return numbers, scales
