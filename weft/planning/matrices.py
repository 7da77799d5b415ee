"""List the linear layers that LoRA adapts and float8 converts; check float8.

`weft.parallel.float8` and `weft.parallel.lora` convert layers with this module.  Only linear layers
of the blocks, but not of experts, are candidates for float8.  The embedding and the output head
stay in high precision, because their errors reach the loss directly.  Candidates are excluded if

* a pattern of ``precision.float8_exclude`` matches their name,
* a size, on one tensor-parallel rank, is not a multiple of 16 (``_scaled_mm`` requires it, because
  tensor cores load 16 bytes at a time) or, with MXFP8, of its block of 32, or ranks have different
  sizes,
* each tensor-parallel rank holds all of them, for its slice of the sequence: the projection of
  multi-token prediction, which DeepSeek-V3 keeps in bfloat16, too,
* they are too small to gain: casting and scaling, which are memory-bound, would cost more than the
  product saves.  The limits are those of torchao's ``_auto_filter_for_recipe``, measured on H100
  (github.com/pytorch/ao, torchao/float8/README.md).  torchao has no limits for
  *rowwise_with_gw_hp* and *mxfp8*, which cast by rows and blocks; weft uses those of *rowwise*.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.config.schema import PrecisionSection
from weft.models import Family
from weft.models.family import TensorParallelSpec
from weft.models.moe import ExpertLinear
from weft.planning.shard_sizes import chunk_range, key_heads, query_heads

# Neighbors in a row of a matrix that share a scale in MXFP8.
MX_BLOCK_SIZE = 32
# Neighbors in a row of a matrix that share two scale bytes, with optim.state_dtype 8bit.
MOMENT_BLOCK_SIZE = 32


Linear = nn.Linear | ExpertLinear


class Matrix(NamedTuple):
    """The weight of a linear layer of a block, or the weights of its experts."""

    name: str  # of the module in the unsharded model
    out_features: int
    in_features: int
    experts: int = 0  # number of experts with such a matrix; 0: an ordinary layer
    block: int = 0  # index of the block


def is_matrix(name: str, param: Tensor, block_params: Collection[Tensor]) -> bool:
    """Return True for matrices of the blocks, and stacks of them: Muon's parameters."""
    is_vector = name.endswith((".bias", ".lora_magnitude.weight"))  # of each expert
    return param.dim() >= 2 and param in block_params and not is_vector


def find_linear_layers(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, Linear]:
    """Return the linear layers of the blocks, and of their experts, by module name.

    Excludes subclasses: a replacement would lose their forward.
    """
    block_modules = {module for block in blocks for module in block.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, ExpertLinear) and module in block_modules
    }


def list_matrices(model: Any, family: Family, tp: int = 1) -> list[Matrix]:
    """List the linear layers of the blocks, with shapes on one tensor-parallel rank.

    Args:
        model: the family's configuration.
        family: the model family.
        tp: tensor-parallel degree; uneven sizes are those of the rank with most of the layer.
    """
    return [max(shapes) for shapes in _list_shapes(model, family, tp)]


def _list_shapes(model: Any, family: Family, tp: int) -> list[list[Matrix]]:
    """List the shapes of each linear layer of the blocks on all tensor-parallel ranks."""
    list_layers: Callable[..., tuple[Matrix, ...]] = _list_layers
    try:
        hash(model)
    except TypeError:  # a user's configuration may have lists
        list_layers = _list_layers.__wrapped__
    shapes = []
    for full in list_layers(model, family.build, family.blocks):
        spec = tensor_parallel_spec(full.name, family)
        if dim := {"column": "out_features", "row": "in_features"}.get(spec.weight or ""):
            sizes = _shard_sizes(getattr(full, dim), spec, model, tp)
            shapes.append([Matrix(**(full._asdict() | {dim: size})) for size in sizes])
        else:
            shapes.append([full])
    return shapes


# A large model takes a second to build even on meta, and plans of one model follow each other.
@lru_cache(maxsize=32)
def _list_layers(
    model: Any,
    build: Callable[[Any], nn.Module],
    list_blocks: Callable[[Any], Sequence[nn.Module]],
) -> tuple[Matrix, ...]:
    """Return the unsharded shape of each linear layer of the blocks."""
    with torch.device("meta"):
        module = build(model)
    blocks = list_blocks(module)
    block_index = {inner: i for i, block in enumerate(blocks) for inner in block.modules()}
    return tuple(
        Matrix(
            name,
            layer.out_features,
            layer.in_features,
            getattr(layer, "num_experts", 0),
            block_index[layer],
        )
        for name, layer in find_linear_layers(module, blocks).items()
    )


def _shard_sizes(size: int, spec: TensorParallelSpec, model: Any, tp: int) -> list[int]:
    """Return the sizes of the shards of a dim."""
    if spec.heads is None:
        return [len(chunk_range(size, tp, rank)) for rank in range(tp)]
    if spec.heads == "query":
        width = size // model.num_heads
        return [width * len(query_heads(model.num_heads, tp, rank)) for rank in range(tp)]
    num_heads, num_kv_heads = model.num_heads, model.num_kv_heads
    counts = [len(key_heads(num_heads, num_kv_heads, tp, rank)) for rank in range(tp)]
    return [size // num_kv_heads * count for count in counts]


def tensor_parallel_spec(name: str, family: Family) -> TensorParallelSpec:
    """Return how tensor parallelism shards a module."""
    specs = (spec for pattern, spec in family.sharding.items() if fnmatchcase(name, pattern))
    return next(specs, TensorParallelSpec())


# --------------------------------------------------------------------------- float8


def required_multiple(recipe: str) -> int:
    """Return the required divisor of the sizes of a matrix and of the tokens."""
    return MX_BLOCK_SIZE if recipe == "mxfp8" else 16


def find_float8_matrices(
    section: PrecisionSection, model: Any, family: Family, tp: int
) -> list[Matrix]:
    """Return the float8 matrices of the unsharded model, in model order.

    Args:
        section: the section ``[precision]``.
        model: the family's configuration.
        family: the model family.
        tp: tensor-parallel degree; the sizes are those on one rank.
    """
    if section.float8 == "none":
        return []
    return select_matrices(section, convertible_matrices(section.float8, model, family, tp))


def convertible_matrices(recipe: str, model: Any, family: Family, tp: int) -> list[Matrix]:
    """Return the matrices whose sizes support float8, and are the same on all ranks."""
    unit = required_multiple(recipe)
    return [
        first
        for first, *others in _list_shapes(model, family, tp)
        if tensor_parallel_spec(first.name, family).weight != "replicated"
        and first.out_features % unit == first.in_features % unit == 0
        and all(other == first for other in others)
    ]


def select_matrices(section: PrecisionSection, convertible: list[Matrix]) -> list[Matrix]:
    """Drop the matrices that are too small to gain or excluded by name."""
    return [
        matrix
        for matrix in convertible
        if (section.float8_small or not _is_too_small(section.float8, matrix))
        and not any(fnmatchcase(matrix.name, pattern) for pattern in section.float8_exclude)
    ]


def _is_too_small(recipe: str, matrix: Matrix) -> bool:
    out_features, in_features = matrix.out_features, matrix.in_features
    if recipe == "tensorwise":
        return in_features <= 4096 and out_features <= 1024
    return (
        out_features <= 2048
        or in_features <= 1024
        or (out_features <= 4096 and in_features <= 2048)
    )


def supports_float8(recipe: str, capability: tuple[int, int]) -> bool:
    """Return True if a GPU of that compute capability supports the recipe."""
    return capability[0] == 10 if recipe == "mxfp8" else capability >= (8, 9)
