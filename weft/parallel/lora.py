"""LoRA (arXiv:2106.09685): trained low-rank adapters of frozen matrices.

    out = x W^T + alpha / rank * (x A^T) B^T        A [rank, inputs], B [outputs, rank]

Only A and B are trained.  As in PEFT, A starts uniform (Kaiming) and B with zeros, so the model
starts unchanged.  All other weights are frozen in the compute dtype, because no optimizer
accumulates small updates in them.  Those of the blocks may be quantized (`weft.parallel.quantize`).

A linear layer gets the class `LoraLinear` and keeps its ``weight``.  A and B are its submodules
`lora_A` and `lora_B`, the names of PEFT.  So FSDP, checkpoints and the optimizer see ordinary
parameters.

*Tensor parallel.*  If W is sharded by outputs, A is replicated and B is sharded like W.  If W is
sharded by inputs, A is sharded like W and B is replicated.  This adds no collective: the all-reduce
after a *row* matmul is linear in the partial outputs, and the input of a *column* matmul is
complete.  The gradient of the replicated factor is a partial sum on each rank: *partial_grad*
(`weft.models.family.TensorParallelSpec`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from weft.config.schema import LoraSection
from weft.models.family import Init, TensorParallelSpec
from weft.parallel.quantize import quantized_linear
from weft.plan.lora_plan import QUANT_BLOCK_BYTES, QUANT_BLOCK_SIZE, is_target, lora_scaling
from weft.plan.matrices import find_linear_layers

ADAPTER_INIT = {"lora_A": Init("fan_in"), "lora_B": Init("zeros")}

# The specs of A and B by that of W; if it is not listed, they equal it.
ADAPTER_SHARDING = {
    "column": (TensorParallelSpec("partial_grad"), TensorParallelSpec("column")),
    "heads": (TensorParallelSpec("partial_grad"), TensorParallelSpec("heads")),
    "row": (TensorParallelSpec("row"), TensorParallelSpec("partial_grad")),
}


class LoraLinear(nn.Linear):
    """A frozen linear layer; without an adapter if `lora_A` is None."""

    lora_A: nn.Linear | None
    lora_B: nn.Linear
    scaling: float

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., inputs]`` to ``[..., outputs]``."""
        out = quantized_linear(x, self.weight, self.bias)
        if self.lora_A is None:
            return out
        hidden: Tensor = self.lora_A(x)
        update: Tensor = self.lora_B(hidden * self.scaling)
        return out + update


def apply_lora(
    model: nn.Module, blocks: list[nn.Module], section: LoraSection, dtype: torch.dtype
) -> None:
    """Freeze ``model`` in place and add adapters, before tensor parallelism.

    Args:
        model: the full model or a pipeline stage.
        blocks: modules of ``model``.
        section: the section ``[lora]``.
        dtype: compute dtype, which frozen weights get.
    """
    layers = find_linear_layers(model, blocks)
    quantized = set(layers.values()) if section.quantize != "none" else set()
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            frozen = param.data.to(dtype)
            if module in quantized and name == "weight":
                outputs, inputs = param.shape
                shape = outputs, inputs // QUANT_BLOCK_SIZE, QUANT_BLOCK_BYTES[section.quantize]
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


def add_adapter_sharding(table: Mapping[str, TensorParallelSpec]) -> dict[str, TensorParallelSpec]:
    """Return a family's SHARDING, extended by that of the adapters."""
    extended = dict(table)
    for pattern, spec in table.items():
        if spec.weight is not None:
            same = TensorParallelSpec(spec.weight)
            a, b = ADAPTER_SHARDING.get(spec.weight, (same, same))
            extended |= {f"{pattern}.lora_A": a, f"{pattern}.lora_B": b}
    return extended


def adapter_init(name: str, get_init: Callable[[str], Init]) -> Init:
    """Return a parameter's initialization; ``get_init`` serves the base model."""
    module = name.split(".")[-2] if "." in name else name
    return ADAPTER_INIT[module] if module in ADAPTER_INIT else get_init(name)
