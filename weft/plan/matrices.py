"""List the linear layers that LoRA adapts and float8 converts; check float8.

`weft.parallel.float8` and `weft.parallel.lora` convert layers with this module.  Only linear layers
of the blocks are candidates for float8.  The embedding and the output head stay in high precision,
because their errors reach the loss directly.  Candidates are excluded if

* a pattern of ``precision.float8_exclude`` matches their name,
* a size, on one tensor-parallel rank, is not a multiple of 16 (``_scaled_mm`` requires it, because
  tensor cores load 16 bytes at a time) or, with MXFP8, of its block of 32,
* they are too small to gain: casting and scaling, which are memory-bound, would cost more than the
  product saves.  The limits are those of torchao's ``_auto_filter_for_recipe``, measured on H100
  (github.com/pytorch/ao, torchao/float8/README.md).  torchao has no limits for
  *rowwise_with_gw_hp* and *mxfp8*, which cast by rows and blocks; weft uses those of *rowwise*.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn

from weft.config.schema import PrecisionSection
from weft.models import Family

# Neighbors in a row of a matrix that share two scale bytes, with optim.state_dtype 8bit.
MOMENT_BLOCK_SIZE = 32


class Matrix(NamedTuple):
    """The weight of a linear layer of a block."""

    name: str  # of the module in the unsharded model
    out_features: int
    in_features: int


def find_linear_layers(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, nn.Linear]:
    """Return the linear layers of the blocks by module name.

    Excludes subclasses of `nn.Linear`: a replacement would lose their forward.
    """
    block_modules = {module for block in blocks for module in block.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module in block_modules
    }


def list_matrices(model: Any, family: Family, tp: int = 1) -> list[Matrix]:
    """List the linear layers of the blocks, with shapes on one tensor-parallel rank.

    Args:
        model: the family's configuration.
        family: the model family.
        tp: tensor-parallel degree; a size that it does not divide is rounded down.
    """
    with torch.device("meta"):
        module = family.build(model)
    matrices = []
    for name, layer in find_linear_layers(module, family.blocks(module)).items():
        out_features, in_features = layer.weight.shape
        split = weight_split(name, family)
        if split == "heads":  # several ranks may share a head
            out_features //= min(tp, model.num_kv_heads)
        elif split == "row":
            in_features //= tp
        elif split == "column":
            out_features //= tp
        matrices.append(Matrix(name, out_features, in_features))
    return matrices


def weight_split(name: str, family: Family) -> str | None:
    """Return how tensor parallelism shards the weight of a module.

    The values are those of `weft.models.family.TensorParallelSpec`.
    """
    specs = (s for pattern, s in family.sharding.items() if fnmatchcase(name, pattern))
    spec = next(specs, None)
    return spec.weight if spec is not None else None


# --------------------------------------------------------------------------- float8


def required_multiple(recipe: str) -> int:
    """Return the required divisor of the sizes of a matrix and of the tokens."""
    return 32 if recipe == "mxfp8" else 16


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
    """Return the matrices whose sizes support float8."""
    unit = required_multiple(recipe)
    matrices = list_matrices(model, family, tp)
    return [
        matrix
        for matrix in matrices
        if matrix.out_features % unit == matrix.in_features % unit == 0
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
    _, out_features, in_features = matrix
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
