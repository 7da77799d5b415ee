"""LoRA (arXiv:2106.09685) from outside: a low-rank product beside each chosen frozen matrix.

    out = x W^T + alpha / rank * (x A^T) B^T        A [rank, inputs], B [outputs, rank]

Only A and B are trained.  A starts as PEFT has it (Kaiming, uniform) and B with zeros, so that the
model starts as what it was.  All other weights are frozen, in the dtype that they are computed in,
since no optimizer adds up small changes in them, or those of the blocks in fewer bits
(`weft.parallel.quantize`).

A linear layer's class is exchanged and keeps its ``weight``; A and B are linear layers of their own
inside, `lora_A` and `lora_B`, which gives the names that PEFT has.  So they are parameters like any
other to FSDP, to checkpoints and to the optimizer.

*Tensor parallel.*  Where W is cut by outputs, A is whole on every rank and B is cut as W is; where
by inputs, A is cut as W is and B is whole.  No exchange is added: a sum that a *row* product leaves
in parts is linear in them, and what comes before a *column* product is whole already.  But of the
one that is whole each rank computes a part of the gradient, from its own part of the other: it is
*summed* (`weft.models.family.TensorParallelSpec`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from weft.config.schema import LoraSection
from weft.models.family import Init, TensorParallelSpec
from weft.parallel.quantize import quantized_linear
from weft.plan.lora_plan import QUANT_BLOCK_SIZE, QUANT_BLOCK_BYTES, is_target, lora_scaling
from weft.plan.matrices import find_linear_layers

ADAPTER_INIT = {"lora_A": Init("fan_in"), "lora_B": Init("zeros")}

# How A and B are cut, by how W is; others as W.
ADAPTER_SHARDING = {
    "column": (TensorParallelSpec("summed"), TensorParallelSpec("column")),
    "heads": (TensorParallelSpec("summed"), TensorParallelSpec("heads")),
    "row": (TensorParallelSpec("row"), TensorParallelSpec("summed")),
}


class LoraLinear(nn.Linear):
    """A frozen linear layer, with an adapter or (`lora_A` is None) without."""

    lora_A: nn.Linear | None
    lora_B: nn.Linear
    scaling: float

    def forward(self, x: Tensor) -> Tensor:
        """``[..., inputs]`` to ``[..., outputs]``."""
        out = quantized_linear(x, self.weight, self.bias)
        if self.lora_A is None:
            return out
        low: Tensor = self.lora_A(x)
        added: Tensor = self.lora_B(low * self.scaling)
        return out + added


def apply_lora(
    model: nn.Module, blocks: list[nn.Module], section: LoraSection, dtype: torch.dtype
) -> None:
    """Freeze ``model`` in place, and add adapters; before tensor parallelism cuts anything.

    Args:
        blocks: modules of ``model``.
        dtype: of what is computed, in which frozen weights are kept.
    """
    layers = find_linear_layers(model, blocks)
    quantized = set(layers.values()) if section.quantize != "none" else set()
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            frozen = param.data.to(dtype)
            if module in quantized and name == "weight":
                shape = (param.shape[0], param.shape[1] // QUANT_BLOCK_SIZE, QUANT_BLOCK_BYTES[section.quantize])
                frozen = torch.empty(shape, dtype=torch.uint8, device=param.device)
            module.register_parameter(name, nn.Parameter(frozen, requires_grad=False))
    for name, layer in layers.items():
        layer.__class__ = LoraLinear
        assert isinstance(layer, LoraLinear)
        layer.lora_A = None
        if is_target(name, section):
            rank, inputs, outputs = section.rank, layer.in_features, layer.out_features
            device = layer.weight.device
            layer.lora_A = nn.Linear(inputs, rank, bias=False, device=device)
            layer.lora_B = nn.Linear(rank, outputs, bias=False, device=device)
            layer.scaling = lora_scaling(section)


def add_adapter_sharding(sharding: Mapping[str, TensorParallelSpec]) -> dict[str, TensorParallelSpec]:
    """The family's SHARDING, and that of its adapters."""
    found = dict(sharding)
    for pattern, split in sharding.items():
        if split.weight is not None:
            as_w = TensorParallelSpec(split.weight)
            a, b = ADAPTER_SHARDING.get(split.weight, (as_w, as_w))
            found |= {f"{pattern}.lora_A": a, f"{pattern}.lora_B": b}
    return found


def adapter_init(name: str, others: Callable[[str], Init]) -> Init:
    """How the parameter of that name starts; ``others`` knows those of the family."""
    module = name.split(".")[-2] if "." in name else name
    return ADAPTER_INIT[module] if module in ADAPTER_INIT else others(name)
