"""DoRA (arXiv:2402.09353): adapters that also train the magnitude of each row.

    out = m / |W + s B A| * (x W^T + s (x A^T) B^T)        s = alpha / rank

``|...|`` is the norm of each row, one number per output, and m [outputs] is trained.  It begins as
``|W|``, so the model starts unchanged.  As in the paper (section 4.3) and PEFT, the denominator is
a constant of the gradient.  Each expert has its own norms: m is [experts, outputs].  PEFT has no
DoRA for experts, so such adapters are exported only merged.

*Parameter.*  The module stores ``m - |W|``, which begins as zeros.  Its gradient is that of m.  So
the initial value does not depend on weights that are loaded later, and in bfloat16 small changes of
a large m are not rounded away.  `weft.conversion.peft_export` adds ``|W|``.

*Norm.*  Neither B A nor its sum with W is built.  With the rows w, b of W and B

    |w + s b A|^2 = w w^T + 2 s (w A^T) b^T + s^2 b (A A^T) b^T

which takes products of rank columns.  Each term is a sum over inputs.  So if tensor parallelism
shards W by inputs, the ranks add their sums: one all-reduce of two numbers per output.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.config.schema import LoraSection
from weft.models.layers import add_bias, repeat_for_rows
from weft.models.moe import ExpertLinear
from weft.parallel.collectives import sum_over_ranks
from weft.parallel.lora.adapted_layers import FrozenLinear, LoraExpertLinear, LoraLayer, LoraLinear
from weft.parallel.quantized import dequantize_matrix
from weft.planning.matrices import Linear

SMALLEST_NORM = 1e-12  # of a row of zeros


class Magnitude(nn.Module):
    """Changes of magnitudes: a weight ``[outputs]``, or ``[experts, outputs]``."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))
        self.output_dim = len(shape) - 1  # which tensor parallelism shards


class DoraLayer(LoraLayer):
    """A frozen layer with an adapter and a trained magnitude of each row.

    Attributes:
        input_group: ranks that share the inputs of the layer; None: this rank has all.
    """

    input_group: dist.ProcessGroup | None = None

    def __init__(self, layer: Linear, section: LoraSection | None, linear: FrozenLinear) -> None:
        super().__init__(layer, section, linear)
        experts = [layer.num_experts] if isinstance(layer, ExpertLinear) else []
        with layer.weight.device:
            self.lora_magnitude = Magnitude(*experts, self.out_features)

    def forward(self, x: Tensor, *counts: Tensor) -> Tensor:
        """Map ``[..., inputs]`` to ``[..., outputs]``; ``counts``: see `Experts.forward`."""
        rows = counts[:1]
        out = self.linear(x, self.weight, None, *rows) + self.adapter_output(x, *counts)
        scale = self._scale()
        for counts_E in rows:
            scale = repeat_for_rows(scale, counts_E, len(out))
        # The scale is near 1, where bfloat16 is coarse: round the product only.
        return add_bias((out * scale).to(out.dtype), self.bias, *rows)

    def merged_weight(self) -> Tensor:
        """Return the weight with the adapter, ``[..., outputs, inputs]``."""
        merged = super().merged_weight()
        return (merged * self._scale().unsqueeze(-1)).to(merged.dtype)

    def _scale(self) -> Tensor:
        a: Any = self.lora_A
        b: Any = self.lora_B
        factors = (self.weight, a.weight, b.weight)
        return magnitude_scale(factors, self.scaling, self.lora_magnitude.weight, self.input_group)


class DoraLinear(DoraLayer, LoraLinear):
    """A frozen linear layer with an adapter and a trained magnitude of each row."""


class DoraExpertLinear(DoraLayer, LoraExpertLinear):
    """Frozen linear layers of experts, each with an adapter and magnitudes."""


def magnitude_scale(
    factors: tuple[Tensor, Tensor, Tensor],
    scaling: float,
    magnitude: Tensor,
    input_group: dist.ProcessGroup | None,
) -> Tensor:
    """Return ``m / |W + s B A|``, float32 ``[..., outputs]``.

    Args:
        factors: W, A and B; see `row_squares`.
        scaling: s.
        magnitude: ``m - |W|``.
        input_group: ranks that share the inputs.
    """
    squares = row_squares(*factors, scaling)
    if input_group is not None:
        squares = sum_over_ranks(squares, input_group)
    before, after = squares.sqrt().clamp(min=SMALLEST_NORM)
    scale: Tensor = (before + magnitude) / after
    return scale


@torch.no_grad()
def row_squares(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return squared row norms of W and W + s B A: ``[2, ..., outputs]``.

    They are float32, or float64 if B is.

    Args:
        weight: W ``[..., outputs, inputs]``, maybe quantized.
        a: A ``[..., rank, inputs]``.
        b: B ``[..., outputs, rank]``.
        scaling: s.
    """
    if weight.dtype == torch.uint8:
        weight = dequantize_matrix(weight, a.dtype)
    dtype = torch.promote_types(b.dtype, torch.float32)
    before = torch.linalg.vector_norm(weight, dim=-1, dtype=dtype).square()
    b = b.to(dtype)
    mixed = ((weight @ a.mT).to(dtype) * b).sum(-1)
    after = before + 2 * scaling * mixed + scaling**2 * ((b @ (a @ a.mT).to(dtype)) * b).sum(-1)
    return torch.stack((before, after.clamp(min=0)))
