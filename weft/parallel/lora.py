"""LoRA (arXiv:2106.09685): trained adapters of frozen, maybe quantized matrices.

    out = x W^T + alpha / rank * (x A^T) B^T        A [rank, inputs], B [outputs, rank]

Only A and B are trained.  As in PEFT, A starts uniform (Kaiming) and B with zeros, so the model
starts unchanged.  All other weights are frozen in the compute dtype, because no optimizer
accumulates small updates in them.  Those of the blocks may be quantized.

A `LoraLinear` replaces a linear layer and keeps its ``weight``.  A and B are its submodules
`lora_A` and `lora_B`, the names of PEFT.  So FSDP, checkpoints and the optimizer see ordinary
parameters.

*Experts.*  The experts of a layer hold one stack of matrices (`weft.models.moe.ExpertLinear`), and
so do their adapters: A is ``[experts, rank, inputs]``, B is ``[experts, outputs, rank]``.  Two
grouped products apply them, so expert parallelism shards A and B like the experts.  The router is
frozen, and so is its load-balance bias: nothing would train the router to follow a moving bias, and
an exported adapter has no place for it.

*Tensor parallel.*  If W is sharded by outputs, A is replicated and B is sharded like W.  If W is
sharded by inputs, A is sharded like W and B is replicated.  This adds no collective: the all-reduce
after a *row* matmul is linear in the partial outputs, and the input of a *column* matmul is
complete.  The gradient of the replicated factor is a partial sum on each rank: *partial_grad*
(`weft.models.family.TensorParallelSpec`).

*Quantized matrices* take 4 or 8 bits per number, in a format that shards on any layout.  As in
QLoRA (arXiv:2305.14314), a block of 64 neighboring numbers of a row shares a scale, its
largest magnitude.  *nf4* stores the nearest of 16 levels, which are equally likely under a normal
distribution; *int8* the nearest of 255 equidistant levels.  A matrix ``[outputs, inputs]`` becomes
one uint8 tensor,

    [outputs, inputs / 64, 32 + 4]     nf4: two codes per byte, the first in the upper half
    [outputs, inputs / 64, 64 + 4]     int8

whose last 4 bytes are the float32 scale: 4.5 and 8.5 bits per number.  Its last size distinguishes
nf4 and int8.  Sharding by outputs (FSDP, tensor-parallel *column*) shards dim 0, and sharding by
inputs (*row*) shards dim 1.  No shard splits a block, and each rank quantizes its shard to the same
bytes as one process does.  FSDP gathers the bytes like any other tensor.  A stack of experts has
one more dim before these.

Forward and backward dequantize the matrix in the dtype of the activations, and do not keep it.

torchao's `NF4Tensor` quantizes a flattened tensor, and its scales again over blocks of blocks.  So
it shards by chunks only, never by inputs, and its shards have other bytes than the full tensor.
The second quantization would reduce the 0.5 bits of scales to 0.13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.config.schema import LoraSection
from weft.models.family import Init, TensorParallelSpec
from weft.models.layers import grouped_linear, is_fake, run_function
from weft.models.moe import ExpertLinear
from weft.plan.lora_plan import QUANT_BLOCK_BYTES, QUANT_BLOCK_SIZE, is_target, lora_scaling
from weft.plan.matrices import Linear, find_linear_layers

ADAPTER_INIT = {"lora_A": Init("fan_in"), "lora_B": Init("zeros")}


class LoraLayer(nn.Module):
    """A frozen layer with an adapter.

    Args:
        layer: linear layer, or one per expert; this one takes its weight and its bias.
        section: the section ``[lora]``; None: no adapter, the weight is only quantized.
    """

    weight: Any
    bias: Any
    lora_A: nn.Module | None
    scaling: float

    def __init__(self, layer: Linear, section: LoraSection | None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_A = None
        if section is not None:
            build: Callable[..., nn.Module] = partial(nn.Linear, bias=False)
            if isinstance(layer, ExpertLinear):
                build = partial(ExpertLinear, layer.num_experts)
            with layer.weight.device:
                self.lora_A = build(self.in_features, section.rank)
                self.lora_B = build(section.rank, self.out_features)
            self.scaling = lora_scaling(section)

    def forward(self, x: Tensor, *counts: Tensor) -> Tensor:
        """Map ``[..., inputs]`` to ``[..., outputs]``; ``counts``: of `grouped_linear`."""
        out = quantized_linear(x, self.weight, self.bias, *counts)
        if self.lora_A is None:
            return out
        hidden: Tensor = self.lora_A(x, *counts)
        update: Tensor = self.lora_B(hidden * self.scaling, *counts)
        return out + update


class LoraLinear(LoraLayer, nn.Linear):
    """A frozen linear layer with an adapter."""


class LoraExpertLinear(LoraLayer, ExpertLinear):
    """Frozen linear layers of experts, each with an adapter."""


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
                *rows, inputs = param.shape
                shape = *rows, inputs // QUANT_BLOCK_SIZE, QUANT_BLOCK_BYTES[section.quantize]
                frozen = torch.empty(shape, dtype=torch.uint8, device=param.device)
            module.register_parameter(name, nn.Parameter(frozen, requires_grad=False))
    for name, layer in layers.items():
        target = section if is_target(name, section) else None
        kind = LoraLinear if isinstance(layer, nn.Linear) else LoraExpertLinear
        model.set_submodule(name, kind(layer, target))


def add_adapter_sharding(table: Mapping[str, TensorParallelSpec]) -> dict[str, TensorParallelSpec]:
    """Return a family's SHARDING, extended by that of the adapters."""
    extended = dict(table)
    partial_grad = TensorParallelSpec("partial_grad")
    for pattern, spec in table.items():
        split = TensorParallelSpec(spec.weight, heads=spec.heads)
        a = partial_grad if spec.weight == "column" else split
        b = partial_grad if spec.weight == "row" else split
        extended |= {f"{pattern}.lora_A": a, f"{pattern}.lora_B": b}
    return extended


def adapter_init(name: str, get_init: Callable[[str], Init]) -> Init:
    """Return a parameter's initialization; ``get_init`` serves the base model."""
    module = name.split(".")[-2] if "." in name else name
    return ADAPTER_INIT[module] if module in ADAPTER_INIT else get_init(name)


# --------------------------------------------------------------------------- quantized matrices

SCALE_BYTES = 4  # bytes

# Quantiles of the normal distribution, with an exact zero: arXiv:2305.14314, appendix E.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def quantize_matrix(values_OI: Tensor, kind: str) -> Tensor:
    """Quantize a matrix to uint8 ``[O, I / 64, block bytes]``.

    Args:
        values_OI: float32, finite; ``I`` is a multiple of 64.  Or a stack of such matrices.
        kind: nf4 or int8.
    """
    blocks_ONB = values_OI.float().view(*values_OI.shape[:-1], -1, QUANT_BLOCK_SIZE)
    scales_ON1 = blocks_ONB.abs().amax(dim=-1, keepdim=True)
    scaled_ONB = blocks_ONB / torch.where(scales_ON1 == 0, 1.0, scales_ON1)
    if kind == "int8":
        codes = (scaled_ONB * 127).round().to(torch.int8).view(torch.uint8)
    else:
        levels = torch.tensor(NF4, device=values_OI.device)
        edges = (levels[1:] + levels[:-1]) / 2
        halves = torch.bucketize(scaled_ONB, edges, out_int32=True).to(torch.uint8)
        codes = (halves[..., 0::2] << 4) | halves[..., 1::2]
    return torch.cat((codes, scales_ON1.contiguous().view(torch.uint8)), dim=-1)


def dequantize_matrix(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix ``[..., O, I]`` of quantized bytes, rounded to ``dtype``."""
    codes = packed[..., :-SCALE_BYTES]
    scales_ON1 = packed[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    if packed.shape[-1] == QUANT_BLOCK_BYTES["int8"]:
        values_ONB = codes.view(torch.int8) * (scales_ON1 / 127)
    else:
        values_ONB = F.embedding(codes.int(), _nf4_table(packed.device)).flatten(-2) * scales_ON1
    matrix_OI: Tensor = values_ONB.flatten(-2).to(dtype)
    return matrix_OI


_nf4_tables: dict[torch.device, Tensor] = {}


def _nf4_table(device: torch.device) -> Tensor:
    """Return the two numbers of each nf4 byte: float32 ``[256, 2]``."""
    if device in _nf4_tables:
        return _nf4_tables[device]
    # Not `torch.tensor`: the host would wait for the copy, in a compiled graph at each use.
    levels = torch.stack([torch.full((), level, device=device) for level in NF4])
    pairs = torch.stack((levels.repeat_interleave(len(NF4)), levels.repeat(len(NF4))), dim=1)
    if not torch.compiler.is_compiling() and not is_fake(pairs):
        _nf4_tables[device] = pairs
    return pairs


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, counts_E: Tensor | None) -> Tensor:
        ctx.save_for_backward(packed, counts_E)
        matrix = dequantize_matrix(packed, x.dtype)
        return F.linear(x, matrix) if counts_E is None else grouped_linear(x, matrix, counts_E)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        packed, counts_E = ctx.saved_tensors
        matrix = dequantize_matrix(packed, grad.dtype)
        if counts_E is None:
            return grad @ matrix, None, None
        return grouped_linear(grad, matrix.transpose(1, 2), counts_E), None, None


def quantized_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, counts_E: Tensor | None = None
) -> Tensor:
    """Apply a frozen linear layer, whose weight may be quantized.

    ``counts_E``: rows of each expert; None: an ordinary layer, as in `F.linear`.
    """
    if weight.dtype == torch.uint8:
        out = run_function(_QuantizedLinear, x, weight, counts_E)
    elif counts_E is None:
        return F.linear(x, weight, bias)
    else:
        out = grouped_linear(x, weight, counts_E)
    if bias is not None and counts_E is not None:
        bias = bias.repeat_interleave(counts_E, dim=0, output_size=len(x))
    return out if bias is None else out + bias
