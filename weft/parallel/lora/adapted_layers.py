"""Layers with a LoRA adapter: see `weft.parallel.lora`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from weft.config.schema import LoraSection
from weft.models.moe import ExpertLinear
from weft.planning.lora_plan import lora_scaling
from weft.planning.matrices import Linear

# Like `weft.models.layers.linear`.
FrozenLinear = Callable[..., Tensor]


class LoraLayer(nn.Module):
    """A frozen layer with an adapter.

    Args:
        layer: linear layer, or one per expert; this one takes its weight and its bias.
        section: the section ``[lora]``; None: no adapter, the weight is only quantized.
        linear: product with the frozen weight.
    """

    weight: Any
    bias: Any
    lora_A: nn.Module | None
    scaling: float
    dropout: nn.Module | None  # of `weft.parallel.lora.dropout`

    def __init__(self, layer: Linear, section: LoraSection | None, linear: FrozenLinear) -> None:
        nn.Module.__init__(self)
        self.linear = linear
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_A = self.dropout = None
        if section is not None:
            build: Callable[..., nn.Module] = partial(nn.Linear, bias=False)
            if isinstance(layer, ExpertLinear):
                build = partial(ExpertLinear, layer.num_experts)
            with layer.weight.device:
                self.lora_A = build(self.in_features, section.rank)
                self.lora_B = build(section.rank, self.out_features)
            self.scaling = lora_scaling(section)

    def forward(self, x: Tensor, *counts: Tensor) -> Tensor:
        """Map ``[..., inputs]`` to ``[..., outputs]``; ``counts``: see `Experts.forward`."""
        out = self.linear(x, self.weight, self.bias, *counts[:1])
        if self.lora_A is None:
            return out
        return out + self.adapter_output(x, *counts)

    def adapter_output(self, x: Tensor, *counts: Tensor) -> Tensor:
        """Return the adapter's part of the output."""
        assert self.lora_A is not None
        if self.dropout is not None and self.training:
            x = self.dropout(x, *counts[1:])
        counts = counts[:1]
        hidden: Tensor = self.lora_A(x, *counts)
        update: Tensor = self.lora_B(hidden * self.scaling, *counts)
        return update

    def merged_weight(self) -> Tensor:
        """Return the weight with the adapter, ``[outputs, inputs]``."""
        a: Any = self.lora_A
        b: Any = self.lora_B
        merged: Tensor = self.weight + self.scaling * b.weight @ a.weight
        return merged


class LoraLinear(LoraLayer, nn.Linear):
    """A frozen linear layer with an adapter."""


class LoraExpertLinear(LoraLayer, ExpertLinear):
    """Frozen linear layers of experts, each with an adapter."""
