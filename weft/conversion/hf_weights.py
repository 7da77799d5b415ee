"""Conversion between weft's tensors and those of a Hugging Face directory.

Names, fused projections and experts differ between models; `weft.models.hf_fields.HFMapping` says
how.  Tensors are read a few rows at a time (an expert at a time where a model stacks them), so
memory use does not grow with the model.

Shapes in names: E experts, D model width, F expert width, O outputs, I inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.checkpoint.shard_files import Contents, find_overlaps, read_shards
from weft.checkpoint.weight_files import Weight, open_weight
from weft.models.family import Family
from weft.models.hf_fields import HFMapping, StackedExperts
from weft.models.hf_mapping import get_hf_mapping, param_shapes

EXPERT = re.compile(r"(layers\.\d+\.)mlp\.experts\.(gate|up|down)_proj\.(weight|bias)")
ROUTER_STATE = re.compile(r"layers\.\d+\.mlp\.router\.(expert_bias|excess_load)")
MXFP4_GROUP = 32  # values with a common scale
# Values of FP4 E2M1 by their four bits (OCP Microscaling Formats 1.0, section 5.3.3).
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Shapes = dict[str, torch.Size]
Read = Callable[..., Iterator[Tensor]]


class HFTensor(NamedTuple):
    """Tensor of a Hugging Face directory.

    Attributes:
        shape: its shape.
        names: weft's tensors in it.
        kind: whole: one tensor; copy: one tensor that has another name, too; rows: several, one
            after another; expert: one matrix of the first dimension; stacked: matrices of all
            experts; bias: the load-balance bias.
        expert: index of the expert.
        dtype: its dtype in files of any dtype; None: that of the others.
    """

    shape: torch.Size
    names: tuple[str, ...]
    kind: str = "whole"
    expert: int = 0
    dtype: torch.dtype | None = None


def list_hf_tensors(family: Family, config: Any) -> dict[str, HFTensor]:
    """Return the tensors of a model by Hugging Face's name, in order."""
    mapping = get_hf_mapping(family)
    shapes = param_shapes(family, config)
    fused = {part: name for name, parts in mapping.fused.items() for part in parts}
    tensors: dict[str, HFTensor] = {}
    for name, shape in shapes.items():
        layer, module, leaf = split_name(name)
        if match := ROUTER_STATE.fullmatch(name):
            if mapping.expert_bias and match[1] == "expert_bias":
                ones = (1,) * mapping.expert_bias_rows
                shown = mapping.hf_name(layer) + mapping.expert_bias
                tensors[shown] = HFTensor(
                    torch.Size((*ones, *shape)), (name,), "bias", dtype=torch.float32
                )
        elif match := EXPERT.fullmatch(name):
            if mapping.stacked is None:
                for e in range(shape[0]):
                    shown = name.replace(".experts.", f".experts.{e}.")
                    tensors[mapping.hf_name(shown)] = HFTensor(shape[1:], (name,), "expert", e)
            else:
                shown, tensor = _stack(mapping.stacked, layer, match[2], match[3], shapes)
                tensors[f"model.{shown}"] = tensor
        elif module in fused:
            parts = tuple(f"{layer}{part}.{leaf}" for part in mapping.fused[fused[module]])
            rows = sum(shapes[part][0] for part in parts)
            shown = mapping.hf_name(f"{layer}{fused[module]}.{leaf}")
            tensors[shown] = HFTensor(torch.Size((rows, *shape[1:])), parts, "rows")
        else:
            is_float32 = module == "mlp.router" and mapping.has_float32_router
            dtype = torch.float32 if is_float32 else None
            tensors[mapping.hf_name(name)] = HFTensor(shape, (name,), dtype=dtype)
    # Published files also have the shared weights under the names of each layer.
    heads = {name for name in ("embed_tokens.weight", "lm_head.weight") if name in shapes}
    for i in range(getattr(config, "mtp_layers", 0)):
        for source, copy in ((min(heads), "embed_tokens"), (max(heads), "shared_head.head")):
            shown = f"model.layers.{config.num_layers + i}.{copy}.weight"
            tensors[shown] = HFTensor(shapes[source], (source,), "copy")
    return tensors


def find_differing_copy(
    tensors: Mapping[str, HFTensor], contents: Contents
) -> tuple[str, str] | None:
    """Return a copy in the files that differs from its original, and the original."""
    originals = {t.names[0]: name for name, t in tensors.items() if t.kind == "whole"}
    for name, tensor in tensors.items():
        if tensor.kind == "copy" and name in contents.tensors:
            pair = name, originals[tensor.names[0]]
            rows = zip(*(open_weight(contents, each).read() for each in pair), strict=True)
            if not all(torch.equal(a, b) for a, b in rows):
                return pair
    return None


def split_name(name: str) -> tuple[str, str, str]:
    """Split a name into layer (with a dot), module and kind of parameter."""
    path, leaf = name.rsplit(".", 1)
    parts = path.split(".")
    if parts[0] != "layers":
        return "", path, leaf
    return f"layers.{parts[1]}.", ".".join(parts[2:]), leaf


def _stack(
    layout: StackedExperts, layer: str, which: str, leaf: str, shapes: Shapes
) -> tuple[str, HFTensor]:
    """Return a tensor of all experts, below ``model.``: gate and up, or down."""
    parts = ("down",) if which == "down" else ("gate", "up")
    names = tuple(f"{layer}mlp.experts.{part}_proj.{leaf}" for part in parts)
    experts, outputs, *inputs = shapes[names[0]]
    outputs *= len(parts)
    base = layout.down if which == "down" else layout.gate_up
    if leaf == "bias":
        return f"{layer}{base}{layout.suffixes[1]}", HFTensor(
            torch.Size((experts, outputs)), names, "stacked"
        )
    shape = (experts, *inputs, outputs) if layout.transposed else (experts, outputs, *inputs)
    return f"{layer}{base}{layout.suffixes[0]}", HFTensor(torch.Size(shape), names, "stacked")


# --------------------------------------------------------------------------- quantized files


def list_quantized(
    tensors: Mapping[str, HFTensor], mapping: HFMapping, contents: Contents
) -> dict[str, tuple[torch.Size, torch.Size]]:
    """Return the tensors in MXFP4, with the shapes of blocks and scales."""
    if mapping.quantization != "mxfp4":
        return {}
    result = {}
    for name, tensor in tensors.items():
        if tensor.kind == "stacked" and f"{name}_blocks" in contents.tensors:
            experts, inputs, outputs = tensor.shape
            scales = torch.Size((experts, outputs, inputs // MXFP4_GROUP))
            result[name] = (torch.Size((*scales, MXFP4_GROUP // 2)), scales)
    return result


def decode_mxfp4(blocks_EOGB: Tensor, scales_EOG: Tensor) -> Tensor:
    """Decode MXFP4 (OCP Microscaling Formats 1.0): float32 ``[E, O, I]``.

    Args:
        blocks_EOGB: uint8, two values per byte, the first one in the low bits.
        scales_EOG: uint8, binary exponents plus 127.
    """
    values = torch.tensor(FP4_VALUES + tuple(-value for value in FP4_VALUES))
    pairs = torch.cartesian_prod(values, values).flip(1)  # of each byte
    decoded_EOGI = F.embedding(blocks_EOGB.int(), pairs).flatten(-2)
    powers = torch.ldexp(torch.ones(256), torch.arange(256) - 127)
    decoded_EOGI *= powers[scales_EOG.int()].unsqueeze(-1)
    return decoded_EOGI.flatten(-2)


FLOAT8 = torch.float8_e4m3fn
# Names of the scales of a matrix in float8: those of DeepSeek and Qwen, and of compressed-tensors.
SCALE_SUFFIXES = ("_scale_inv", "_scale")
SCALE_BLOCKS = (128, 64, 32, 256, 512)  # values with a common scale, of which the files name none


def find_scale(contents: Contents, name: str) -> str | None:
    """Return the name of the scales of a tensor in float8, or None."""
    if contents.tensors[name].dtype != FLOAT8:
        return None
    return next((name + s for s in SCALE_SUFFIXES if name + s in contents.tensors), None)


def scale_block(size: int, num_scales: int) -> int | None:
    """Return how many values have a common scale; None: the sizes do not fit."""
    if num_scales in (1, size):
        return size // num_scales
    return next((b for b in SCALE_BLOCKS if -(-size // b) == num_scales), None)


def scale_blocks(shape: Sequence[int], scales: Sequence[int]) -> list[int] | None:
    """Return the block of each dimension; None: the scales do not fit.

    One scale is for all values, and a vector is for the rows.
    """
    sizes = [*scales, *[1] * (len(shape) - len(scales))] if len(scales) < 2 else [*scales]
    if len(sizes) != len(shape):
        return None
    blocks = [scale_block(size, count) for size, count in zip(shape, sizes, strict=True)]
    return None if None in blocks else [block for block in blocks if block is not None]


def open_tensor(contents: Contents, name: str) -> Weight:
    """Open a tensor of a Hugging Face directory; float8 is multiplied by its scales."""
    weight = open_weight(contents, name)
    scale_name = find_scale(contents, name)
    if scale_name is None:
        return weight
    shape = contents.tensors[scale_name].shape
    blocks = scale_blocks(weight.shape, shape)
    assert blocks is not None  # `weft.conversion.hf_import` checks it
    scales = open_weight(contents, scale_name) if shape else None
    return weight._replace(read=partial(_read_scaled, weight, scales, scale_name, contents, blocks))


def _read_scaled(
    weight: Weight,
    scales: Weight | None,
    scale_name: str,
    contents: Contents,
    blocks: list[int],
    first: int = 0,
    stop: int | None = None,
) -> Iterator[Tensor]:
    """Yield rows in float8 as float32: each value times the scale of its block."""
    values = _read_scalar(contents, scale_name) if scales is None else torch.cat([*scales.read()])
    values = values.float()
    values = values.reshape(*values.shape, *[1] * (len(blocks) - values.dim()))
    for dim, (size, block) in enumerate(zip(weight.shape[1:], blocks[1:], strict=True), 1):
        values = values.repeat_interleave(block, dim).narrow(dim, 0, size)
    for rows in weight.read(first, stop):
        numbers = torch.arange(first, first + len(rows)) // blocks[0]
        yield rows.float() * values[numbers]
        first += len(rows)


def _read_scalar(contents: Contents, name: str) -> Tensor:
    """Read a tensor without dimensions."""
    entry = contents.tensors[name]
    value = torch.empty((), dtype=entry.dtype)
    read_shards(contents, {name: [*find_overlaps(entry, [], value)]})
    return value.reshape(1)


# --------------------------------------------------------------------------- import


def open_hf_weights(family: Family, config: Any, contents: Contents) -> dict[str, Weight]:
    """Open the weights of a Hugging Face directory by weft's names.

    Args:
        family: of the model.
        config: of the model.
        contents: the tensors in the files, with valid names and shapes.
    """
    mapping, shapes = get_hf_mapping(family), param_shapes(family, config)
    tensors = list_hf_tensors(family, config)
    quantized = list_quantized(tensors, mapping, contents)
    sources: dict[str, list[tuple[str, HFTensor]]] = {}
    for hf_name, tensor in tensors.items():
        for name in tensor.names:
            sources.setdefault(name, []).append((hf_name, tensor))
    return {
        name: Weight(
            shape, _reader(name, shape, sources.get(name, []), mapping, shapes, contents, quantized)
        )
        for name, shape in shapes.items()
    }


def _reader(
    name: str,
    shape: torch.Size,
    sources: list[tuple[str, HFTensor]],
    mapping: HFMapping,
    shapes: Shapes,
    contents: Contents,
    quantized: Mapping[str, Any],
) -> Read:
    """Return the function that reads one of weft's tensors."""
    if not sources:  # state of a router without a counterpart
        return zeros_weight(shape).read
    hf_name, tensor = sources[0]
    if tensor.kind == "expert":
        matrices = [open_tensor(contents, source) for source, _ in sources]
        return partial(_read_experts, matrices)
    if tensor.kind == "stacked":
        layout = mapping.stacked
        assert layout is not None
        part = tensor.names.index(name) if len(tensor.names) > 1 else None
        if hf_name in quantized:
            pair = [open_weight(contents, f"{hf_name}_{kind}") for kind in ("blocks", "scales")]
            return partial(_read_quantized, pair, layout, part)
        return partial(_read_stacked, open_tensor(contents, hf_name), layout, part)
    source = open_tensor(contents, hf_name)
    if tensor.kind == "bias":
        return partial(_read_reshaped, source, shape)
    if tensor.kind == "rows":
        before = tensor.names[: tensor.names.index(name)]
        first = sum(shapes[other][0] for other in before)
        return partial(source.read, first, first + shape[0])
    return source.read


def zeros_weight(shape: torch.Size) -> Weight:
    """Return a weight of zeros, float32."""
    return Weight(shape, lambda: iter((torch.zeros(shape),)))


def _read_reshaped(source: Weight, shape: torch.Size) -> Iterator[Tensor]:
    yield torch.cat([*source.read()]).reshape(shape)


def _read_experts(matrices: list[Weight]) -> Iterator[Tensor]:
    for matrix in matrices:
        yield torch.cat([*matrix.read()]).unsqueeze(0)


def _read_stacked(source: Weight, layout: StackedExperts, part: int | None) -> Iterator[Tensor]:
    for rows in source.read():
        oriented = rows.transpose(1, 2) if layout.transposed and rows.dim() == 3 else rows
        yield _take_part(oriented, layout, part)


def _read_quantized(
    pair: list[Weight], layout: StackedExperts, part: int | None
) -> Iterator[Tensor]:
    blocks, scales = pair
    for e in range(blocks.shape[0]):
        packed = (torch.cat([*weight.read(e, e + 1)]) for weight in (blocks, scales))
        yield decode_mxfp4(*(_take_part(rows, layout, part) for rows in packed))


def _take_part(rows_EOI: Tensor, layout: StackedExperts, part: int | None) -> Tensor:
    """Return gate (0) or up (1) of outputs that have both."""
    if part is None:
        return rows_EOI.contiguous()
    if layout.interleaved:
        return rows_EOI[:, part::2].contiguous()
    return rows_EOI.chunk(2, dim=1)[part].contiguous()


# --------------------------------------------------------------------------- export


def find_dropped_bias(family: Family, config: Any, weights: Mapping[str, Weight]) -> str | None:
    """Return a load-balance bias that is not zero and would be lost, or None."""
    tensors = list_hf_tensors(family, config)
    used = {name for tensor in tensors.values() for name in tensor.names}
    for name in param_shapes(family, config):
        is_lost = name.endswith(".expert_bias") and name not in used
        if is_lost and any(bool(rows.any()) for rows in weights[name].read()):
            return name
    return None


def to_hf_weights(family: Family, config: Any, weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """Return the weights of a checkpoint as those of a Hugging Face directory."""
    mapping = get_hf_mapping(family)
    return {
        hf_name: Weight(tensor.shape, _writer(tensor, mapping, weights), tensor.dtype)
        for hf_name, tensor in list_hf_tensors(family, config).items()
    }


def _writer(tensor: HFTensor, mapping: HFMapping, weights: Mapping[str, Weight]) -> Read:
    """Return the function that reads one of Hugging Face's tensors."""
    sources = [weights[name] for name in tensor.names]
    if tensor.kind == "rows":
        return partial(_read_all, sources)
    if tensor.kind == "expert":
        return partial(_read_expert, sources[0], tensor.expert)
    if tensor.kind == "stacked":
        assert mapping.stacked is not None
        return partial(_read_combined, sources, mapping.stacked)
    if tensor.kind == "bias":
        return partial(_read_reshaped, sources[0], tensor.shape)
    return sources[0].read


def _read_all(sources: list[Weight]) -> Iterator[Tensor]:
    for source in sources:
        yield from source.read()


def _read_expert(source: Weight, expert: int) -> Iterator[Tensor]:
    for rows in source.read(expert, expert + 1):
        yield rows[0]


def _read_combined(sources: list[Weight], layout: StackedExperts) -> Iterator[Tensor]:
    for parts in zip(*(_one_by_one(source) for source in sources), strict=True):
        rows = parts[0]
        if len(parts) == 2:
            rows = (
                torch.stack(parts, dim=2).flatten(1, 2)
                if layout.interleaved
                else torch.cat(parts, dim=1)
            )
        yield rows.transpose(1, 2).contiguous() if layout.transposed and rows.dim() == 3 else rows


def _one_by_one(source: Weight) -> Iterator[Tensor]:
    for rows in source.read():
        for i in range(len(rows)):
            yield rows[i : i + 1]
