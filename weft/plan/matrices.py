"""List the linear layers of blocks, which float8 converts and LoRA adapts."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn

from weft.models import Family


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
