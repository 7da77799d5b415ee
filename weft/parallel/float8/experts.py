"""Experts in float8: grouped GEMMs of 8-bit numbers.

Each expert's layer has the three products of a linear layer, and each is one kernel for all
experts.  The recipes are those of `weft.parallel.float8`, per expert:

    tensorwise          one scale for the rows of all experts, and one per expert's matrix
    rowwise             one scale per row, or for weight gradients per column and expert
    rowwise_with_gw_hp  like rowwise; weight gradients in high precision, and for input gradients
                        one scale per expert's matrix
    mxfp8               one per 32 numbers of a row, or of a column of one expert

*A scale per expert, not per stack of experts.*  With expert parallelism a rank has some experts
only, so the scale of a stack would depend on the layout, or need a collective.

*Gradients are e4m3* too, because grouped kernels multiply no other type.

*Padding.*  Kernels need groups of 16 rows (MXFP8: 128, because scales are stored in tiles of 128 by
4).  Only the device knows the group sizes, so a buffer has room for the largest padding, and the
host does not wait.  Padding rows are zeros, which change no largest magnitude.  An empty group has
one block of zeros, so its weight gradient is zero.  The kernels skip the rows after the last group.

*Emulation.*  Factors are rounded, then multiplied in their original dtype, which holds 4-bit
mantissas with power-of-two scales exactly.

Shapes in names: R rows sorted by expert, P rows with padding, B blocks of padded rows, E experts, D
inputs, F outputs, K contracted dim, N the other one, C columns, S scales of a row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchao.float8.float8_training_tensor import Float8TrainingTensor
from torchao.float8.float8_utils import amax_to_scale
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from weft.models.layers import grouped_linear, run_function, weight_gradient
from weft.parallel.private import scaled_grouped_mm
from weft.parallel.quantized import dequantize_matrix
from weft.planning.matrices import MX_BLOCK_SIZE

E4M3 = torch.float8_e4m3fn
TILE_ROWS, TILE_COLUMNS = 128, 4


def float8_grouped_linear(
    x_RD: Tensor, weight_EFD: Tensor, counts_E: Tensor, recipe: str, emulate: bool
) -> Tensor:
    """Replace `weft.models.layers.grouped_linear`; see the module docstring.

    Args:
        x_RD: bfloat16; with ``emulate`` also float32.  Rows after the last group are as in
            `weft.models.layers.grouped_linear`.
        weight_EFD: sizes F and D are multiples of 16 (MXFP8: 32).
        counts_E: int64, rows per expert.
        recipe: see the module docstring.
        emulate: multiply in the dtype of ``x_RD``.
    """
    return run_function(_GroupedLinear, x_RD, weight_EFD, counts_E, recipe, emulate)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RD: Tensor, weight_EFD: Tensor, counts_E: Tensor, recipe: str, emulate: bool
    ) -> Any:
        # A frozen weight has no gradient, which alone needs the input.
        saved = x_RD if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(saved, weight_EFD, counts_E)
        ctx.options = recipe, emulate
        groups = _PaddedRows(counts_E, len(x_RD), recipe, emulate)
        return groups.multiply(x_RD, _unpack(weight_EFD, x_RD.dtype), is_forward=True)

    @staticmethod
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, weight_EFD, counts_E = ctx.saved_tensors
        groups = _PaddedRows(counts_E, len(grad_RF), *ctx.options)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            matrices = _unpack(weight_EFD, grad_RF.dtype)
            grad_x = groups.multiply(grad_RF, matrices, is_forward=False)
        if ctx.needs_input_grad[1]:
            grad_weight = groups.multiply_columns(grad_RF, x_RD).to(weight_EFD.dtype)
        return grad_x, grad_weight, None, None, None


def _unpack(weight_EFD: Any, dtype: torch.dtype) -> Any:
    if weight_EFD.dtype != torch.uint8:
        return weight_EFD
    return dequantize_matrix(weight_EFD, dtype)


class _PaddedRows:
    """Groups of rows, and where padding moves them."""

    def __init__(self, counts_E: Tensor, num_rows: int, recipe: str, emulate: bool) -> None:
        self.counts_E, self.recipe, self.emulate = counts_E, recipe, emulate
        self.is_mx = recipe == "mxfp8"
        self.unit = unit = (MX_BLOCK_SIZE if emulate else TILE_ROWS) if self.is_mx else 16
        sizes_E = (counts_E.clamp(min=1) + unit - 1) // unit  # in blocks
        self.ends_E = sizes_E.cumsum(0)
        self.starts_E = self.ends_E - sizes_E
        shifts_E = self.starts_E * unit - counts_E.cumsum(0) + counts_E
        self.num_blocks = num_rows // unit + len(counts_E)
        rows_R = torch.arange(num_rows, device=counts_E.device)
        # Rows after the last group go behind the last block, and are not read from there.
        num_grouped = counts_E.sum(0, keepdim=True)
        counts = torch.cat((counts_E, num_rows - num_grouped))
        shifts_R = F.pad(shifts_E, (0, 1)).repeat_interleave(counts, output_size=num_rows)
        self.target_R = (rows_R + shifts_R).where(rows_R < num_grouped, self.num_blocks * unit)
        self.rows_R = self.target_R.clamp(max=self.num_blocks * unit - 1)
        blocks_B = torch.arange(self.num_blocks, device=counts_E.device)
        # Blocks after the last group belong to group E.
        self.group_B = torch.searchsorted(self.ends_E, blocks_B, right=True)

    def multiply(self, x_RK: Tensor, weight_EFD: Any, is_forward: bool) -> Tensor:
        """Multiply the rows of each group with the matrix of the group, or its transpose."""
        is_tensorwise = self.recipe == "tensorwise"
        by_expert = is_tensorwise or (self.recipe == "rowwise_with_gw_hp" and not is_forward)
        x8, x_scale = self._round(self._pad(x_RK), (0, 1) if is_tensorwise else (1,))
        if isinstance(weight_EFD, Float8TrainingTensor):  # gathered in float8
            weight8, weight_scale = weight_EFD._data, weight_EFD._scale.reciprocal().view(-1, 1, 1)
            weight8 = weight8 if is_forward else weight8.transpose(1, 2).contiguous()
        else:
            weight_ENK = weight_EFD if is_forward else weight_EFD.transpose(1, 2)
            weight8, weight_scale = self._round(weight_ENK, (1, 2) if by_expert else (2,))
        if self.emulate:
            x_RK = _dequantize(x8, x_scale, x_RK.dtype)[self.rows_R]
            return grouped_linear(
                x_RK, _dequantize(weight8, weight_scale, x_RK.dtype), self.counts_E
            )
        scales = self._scales_of_rows(x8, x_scale), self._scales_of_rows(weight8, weight_scale)
        out_PN: Tensor = self._multiply(x8, weight8.transpose(1, 2), *scales, is_forward)
        return out_PN[self.rows_R]

    def multiply_columns(self, grad_RF: Tensor, x_RD: Tensor) -> Tensor:
        """Return the gradient of the weight, ``[E, F, D]``."""
        if self.recipe == "rowwise_with_gw_hp":
            return weight_gradient(x_RD, grad_RF, self.counts_E)
        grad8, grad_scale = self._round_columns(self._pad(grad_RF))
        x8, x_scale = self._round_columns(self._pad(x_RD))
        if self.emulate:
            grad_RF = _dequantize(grad8, grad_scale, x_RD.dtype).t()[self.rows_R]
            x_RD = _dequantize(x8, x_scale, x_RD.dtype).t()[self.rows_R]
            multiply: Any = weight_gradient
            if torch.compiler.is_compiling():  # `weft plan` is to see the product
                multiply = torch.ops.weft.weight_gradient
            return multiply(x_RD, grad_RF, self.counts_E)  # type: ignore[no-any-return]
        scales = self._scales_of_columns(grad_scale), self._scales_of_columns(x_scale)
        out_EFD: Tensor = self._multiply(grad8, x8.t(), *scales, False)
        return out_EFD

    def _multiply(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, fast: bool) -> Any:
        ends_E = (self.ends_E * self.unit).to(torch.int32)
        return torch.ops.weft.scaled_grouped_mm(a, b, a_scale, b_scale, ends_E, fast)

    def _pad(self, x_RC: Tensor) -> Tensor:
        padded_PC = x_RC.new_zeros(self.num_blocks * self.unit + 1, x_RC.shape[1])
        return padded_PC.index_copy_(0, self.target_R, x_RC)[:-1]

    def _round(self, x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Round to float8, with a scale for all numbers along ``dims``.

        MXFP8 has a scale for 32 numbers of a row.

        Returns:
            The numbers, contiguous, and the factors ``[..., S]`` that undo the scales.
        """
        if self.is_mx:
            return _round_blocks(x)
        amax = torch.linalg.vector_norm(x, math.inf, dims, keepdim=True)
        scale = amax_to_scale(amax, E4M3, True)
        return _cast(x, scale).contiguous(), scale.reciprocal()

    def _round_columns(self, x_PC: Tensor) -> tuple[Tensor, Tensor]:
        """Round to float8, with a scale for each group and column, or one for all of them.

        Returns:
            The numbers ``[C, P]``, and the factors ``[C, B]`` that undo the scales (MXFP8: S).
        """
        if self.is_mx:
            return _round_blocks(x_PC.t())
        blocks_BUC = x_PC.view(self.num_blocks, self.unit, -1)
        amax_BC = torch.linalg.vector_norm(blocks_BUC, math.inf, 1)
        if self.recipe == "tensorwise":
            amax_BC = amax_BC.amax().expand_as(amax_BC)
        else:
            index_BC = self.group_B.unsqueeze(1).expand_as(amax_BC)
            amax_EC = amax_BC.new_zeros(len(self.counts_E) + 1, amax_BC.shape[1])
            amax_BC = amax_EC.scatter_reduce_(0, index_BC, amax_BC, "amax")[self.group_B]
        scale_BC = amax_to_scale(amax_BC, E4M3, True)
        x8 = _cast(blocks_BUC, scale_BC.unsqueeze(1)).flatten(0, 1)
        return x8.t().contiguous(), scale_BC.reciprocal().t()

    def _scales_of_rows(self, x8: Tensor, scale: Tensor) -> Tensor:
        """Return the scales of `_round` as the kernels read them."""
        if self.is_mx:
            return _to_tiles(scale).reshape(len(x8), -1).view(scale.dtype)
        return scale.squeeze(-1).expand(x8.shape[:-1]).contiguous()

    def _scales_of_columns(self, scale_CS: Tensor) -> Tensor:
        """Return the scales of `_round_columns` as the kernels read them: group by group."""
        if not self.is_mx:
            return scale_CS[:, self.starts_E].t().flatten()
        tiles_MBT = _to_tiles(scale_CS)
        starts = F.pad(self.starts_E, (0, 1))
        starts[-1] = self.ends_E[-1]
        start_B = starts[self.group_B]
        size_B = F.pad(starts, (0, 1), value=self.num_blocks).diff()[self.group_B]
        column_B = torch.arange(self.num_blocks, device=start_B.device) - start_B
        row_M1 = torch.arange(len(tiles_MBT), device=start_B.device).unsqueeze(1)
        order_MB = start_B * len(tiles_MBT) + row_M1 * size_B + column_B
        tiles = tiles_MBT.flatten(0, 1)
        tiles = torch.empty_like(tiles).index_copy_(0, order_MB.flatten(), tiles)
        return tiles.reshape(len(tiles_MBT) * TILE_ROWS, -1).view(scale_CS.dtype)


def _cast(x: Tensor, scale: Tensor) -> Tensor:
    """Multiply by powers of two, which no dtype rounds, and round to float8."""
    return (x * scale.to(x.dtype)).to(E4M3)


def _round_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round blocks of a row to MXFP8; scales are rounded up, so nothing saturates."""
    scale, x8 = to_mx(x.contiguous(), E4M3, MX_BLOCK_SIZE, ScaleCalculationMode.RCEIL)
    return x8, scale


def _dequantize(x8: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply each of the S equal parts of a row with its scale."""
    parts = x8.float().view(*x8.shape[:-1], scale.shape[-1], -1)
    return (parts * scale.float().unsqueeze(-1)).flatten(-2).to(dtype)


def _to_tiles(scale: Tensor) -> Tensor:
    """Rearrange scales ``[..., N, S]`` to tiles, uint8 ``[..., N / 128, S / 4, 512]``.

    Source: docs.nvidia.com/cuda/cublas, "1D block scaling factors layout".
    """
    rows, columns = scale.shape[-2:]
    padding = (0, -columns % TILE_COLUMNS, 0, -rows % TILE_ROWS)
    padded = F.pad(scale.view(torch.uint8), padding)
    tiles = padded.view(
        *scale.shape[:-2], -1, 4, TILE_ROWS // 4, padded.shape[-1] // TILE_COLUMNS, TILE_COLUMNS
    )
    return tiles.transpose(-4, -2).flatten(-3)


# Inductor chooses strides of the inputs of grouped GEMMs that their kernels refuse.  It keeps
# those of operators with this tag.
EXACT = torch.Tag.needs_exact_strides
torch.library.define(
    "weft::scaled_grouped_mm",
    "(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor ends, bool fast) -> Tensor",
    tags=EXACT,
)
torch.library.impl("weft::scaled_grouped_mm", "default", scaled_grouped_mm)
torch.library.register_fake("weft::scaled_grouped_mm", scaled_grouped_mm)
torch.library.define(
    "weft::weight_gradient", "(Tensor x, Tensor grad, Tensor counts) -> Tensor", tags=EXACT
)
torch.library.impl("weft::weight_gradient", "default", weight_gradient)


def _fake_weight_gradient(x_RD: Tensor, grad_RF: Tensor, counts_E: Tensor) -> Tensor:
    return x_RD.new_empty(len(counts_E), grad_RF.shape[1], x_RD.shape[1])


torch.library.register_fake("weft::weight_gradient", _fake_weight_gradient)
