"""Layers of a decoder block: norms, feed-forward, grouped GEMMs.

Shapes in names: B batch, T tokens of a sequence, D model width, F feed-forward width.

This is single-device code without process groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.models.decoder_config import DecoderConfig
from weft.models.host_reads import read_counts


class RMSNorm(nn.Module):
    """Root-mean-square normalization with a gain and no bias.

    Source: Zhang and Sennrich, arXiv:1910.07467.  Computed in float32 for any input.  The
    normalized value is rounded to the input's dtype before the gain is applied, as in Llama and
    transformers.

    Args:
        dim: size of the last dimension, D.
        eps: added to the mean square.
        offset: added to the weight; 1: as in Gemma, with the gain applied in float32.
    """

    def __init__(self, dim: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.full((dim,), 1.0 - offset))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Normalize ``[..., D]`` of a floating dtype; return the same shape and dtype."""
        # F.rms_norm with the gain outside is bitwise the written-out formula, in float32 and in
        # bfloat16, and up to 1.6 times as fast on CPU.  With the gain inside, which is applied
        # before rounding, a quarter of the bfloat16 outputs differ from transformers' last bit.
        normed_BTD = F.rms_norm(x_BTD.float(), x_BTD.shape[-1:], eps=self.eps)
        return self.scale(normed_BTD, x_BTD.dtype)

    def scale(self, normed_BTD: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiply a normalized float32 value by the gain; return it in ``dtype``."""
        if self.offset:
            return (normed_BTD * (self.offset + self.weight.float())).to(dtype)
        return (self.weight * normed_BTD.to(dtype)).to(dtype)

    def extra_repr(self) -> str:
        """Return size and epsilon, for the module's representation."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


class LayerNorm(nn.Module):
    """Layer normalization (arXiv:1607.06450), computed in float32.

    Args:
        dim: size of the last dimension, D.
        eps: added to the variance.
        offset: added to the weight (Nemotron: 1).
        bias: add a bias.
    """

    def __init__(self, dim: int, eps: float, offset: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.full((dim,), 1.0 - offset))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Normalize ``[..., D]`` of a floating dtype; return the same shape and dtype."""
        weight_D = self.weight.float() + self.offset
        bias_D = None if self.bias is None else self.bias.float()
        normed_BTD = F.layer_norm(x_BTD.float(), x_BTD.shape[-1:], weight_D, bias_D, self.eps)
        return normed_BTD.to(x_BTD.dtype)


def build_norm(config: DecoderConfig, dim: int) -> RMSNorm | LayerNorm:
    """Return a norm of the model's kind."""
    offset = float(config.norm_offset)
    if config.norm == "layer":
        return LayerNorm(dim, config.norm_eps, offset, config.norm_bias)
    return RMSNorm(dim, config.norm_eps, offset)


def multiply(x_BTD: Tensor, *layers: nn.Module) -> Sequence[Tensor]:
    """Apply several linear layers to the same input."""
    return [layer(x_BTD) for layer in layers]


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


class FeedForward(nn.Module):
    """Feed-forward layer, mostly gated (Shazeer, arXiv:2002.05202).

    Args:
        config: of the model.
        ffn_dim: inner width, F; None: that of the model.
    """

    multiply: Callable[..., Sequence[Any]]

    def __init__(self, config: DecoderConfig, ffn_dim: int | None = None) -> None:
        super().__init__()
        self.multiply = multiply
        self.activation = ACTIVATIONS[config.activation]
        self.gated = config.gated
        dim, ffn_dim, bias = config.dim, ffn_dim or config.ffn_dim, config.ffn_bias
        if self.gated:
            self.gate_proj = nn.Linear(dim, ffn_dim, bias=bias)
        self.up_proj = nn.Linear(dim, ffn_dim, bias=bias)
        self.down_proj = nn.Linear(ffn_dim, dim, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map ``[B, T, D]`` to ``[B, T, D]``."""
        if self.gated:
            gate_BTF, up_BTF = self.multiply(x_BTD, self.gate_proj, self.up_proj)
            hidden_BTF = self.activation(gate_BTF) * up_BTF
        else:
            (up_BTF,) = self.multiply(x_BTD, self.up_proj)
            hidden_BTF = self.activation(up_BTF)
        out_BTD: Tensor = self.down_proj(hidden_BTF)
        return out_BTD


def grouped_linear(x_RD: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Tensor:
    """Apply a separate linear layer to each group of consecutive rows.

    In bfloat16 this is one kernel.  It reads 16 bytes at a time, so other widths are padded, which
    copies the weights.  In other dtypes, which PyTorch cannot trace, it is one product per group,
    and the host waits for the group sizes.

    Args:
        x_RD: ``[R, D]``.
        weight_EFD: one ``[F, D]`` matrix per group.
        counts_E: int64, rows per group; they sum to R.  In bfloat16 there may be more rows.

    Returns:
        ``[R, F]`` in the dtype of ``x_RD``; undefined in rows after the last group.
    """
    if x_RD.dtype == torch.bfloat16 and len(x_RD):
        width = weight_EFD.shape[1]
        pad_F, pad_D = (-size % 8 for size in weight_EFD.shape[1:])
        if pad_F or pad_D:
            weight_EFD, x_RD = F.pad(weight_EFD, (0, pad_D, 0, pad_F)), F.pad(x_RD, (0, pad_D))
        out_RF: Tensor = F.grouped_mm(x_RD, weight_EFD.transpose(1, 2), offs=_ends(counts_E))
        return out_RF[:, :width] if pad_F else out_RF
    groups = torch.split(x_RD, group_sizes(counts_E, len(x_RD)))
    return torch.cat(
        [F.linear(rows_RD, matrix) for rows_RD, matrix in zip(groups, weight_EFD, strict=True)]
    )


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, counts_E: Tensor | None = None
) -> Tensor:
    """Apply `F.linear`, or with ``counts_E`` `grouped_linear` and a bias."""
    if counts_E is None:
        return F.linear(x, weight, bias)
    return add_bias(grouped_linear(x, weight, counts_E), bias, counts_E)


def add_bias(out: Tensor, bias: Tensor | None, counts_E: Tensor | None = None) -> Tensor:
    """Add a bias ``[F]``; with ``counts_E`` ``[E, F]``, to the rows of each group."""
    if bias is not None and counts_E is not None:
        bias = repeat_for_rows(bias, counts_E, len(out))
    return out if bias is None else out + bias.to(out.dtype)


def repeat_for_rows(values_EF: Tensor, counts_E: Tensor, num_rows: int) -> Tensor:
    """Return the values of each row's group; zeros for rows after the last group."""
    counts = torch.cat((counts_E, num_rows - counts_E.sum(0, keepdim=True)))
    return F.pad(values_EF, (0, 0, 0, 1)).repeat_interleave(counts, dim=0, output_size=num_rows)


def weight_gradient(x: Tensor, grad: Tensor, counts_E: Tensor | None = None) -> Tensor:
    """Return the gradient of the weight of a linear layer, or of `grouped_linear`.

    Args:
        x: input of the layer, ``[..., D]``.
        grad: gradient of its output, ``[..., F]``.
        counts_E: rows per group.

    Returns:
        ``[F, D]``, or ``[E, F, D]`` for groups.
    """
    if counts_E is None:
        return grad.flatten(0, -2).t() @ x.flatten(0, -2)
    if x.dtype == torch.bfloat16 and len(x):
        widths = grad.shape[1], x.shape[1]
        pads = [-width % 8 for width in widths]
        if any(pads):
            grad, x = F.pad(grad, (0, pads[0])), F.pad(x, (0, pads[1]))
        grad_EFD: Tensor = F.grouped_mm(grad.t(), x, offs=_ends(counts_E))
        return grad_EFD[:, : widths[0], : widths[1]] if any(pads) else grad_EFD
    sizes = group_sizes(counts_E, len(x))
    groups = zip(torch.split(grad, sizes), torch.split(x, sizes), strict=True)
    return torch.stack([rows_RF.t() @ rows_RD for rows_RF, rows_RD in groups])


def _ends(counts_E: Tensor) -> Tensor:
    return counts_E.cumsum(0).to(torch.int32)


def run_function(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """Call ``function.apply(*args)``, which is untyped in torch."""
    return function.apply(*args)  # type: ignore[no-untyped-call,no-any-return]


# The shapes of training, evaluation and prompts; torch's limit is 8.
NUM_COMPILED_VARIANTS = 64


def allow_recompilation() -> None:
    """Let torch.compile compile `NUM_COMPILED_VARIANTS` variants of a function."""
    import torch.compiler.config as config

    config.recompile_limit = max(config.recompile_limit, NUM_COMPILED_VARIANTS)


def group_sizes(counts_E: Tensor, total: int) -> list[int]:
    """Return the values of ``counts_E``, of sum ``total``; the host waits for them."""
    sizes: list[int] = read_counts([counts_E], total)
    return sizes
