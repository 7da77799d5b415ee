"""The matrices of a model's blocks, which float8 multiplies by and adapters stand beside."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn

from weft.models import Family


class Matrix(NamedTuple):
    """The weight of a linear layer of a block."""

    name: str  # of the module, in the whole model
    outputs: int
    inputs: int


def find_linear_layers(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, nn.Linear]:
    """The linear layers of the blocks of a model or a part of it, by name.

    Not those of a class of their own, whose forward would be lost to the one that replaces it.
    """
    inside = {module for block in blocks for module in block.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module in inside
    }


def list_matrices(model: Any, family: Family, tp: int = 1) -> list[Matrix]:
    """Every linear layer of the blocks of the whole model, with the sides that a rank has of it.

    Args:
        model: the family's configuration.
        tp: ranks that tensor parallelism cuts matrices over; a side that they do not divide is
            rounded down.
    """
    with torch.device("meta"):
        whole = family.build(model)
    found = []
    for name, layer in find_linear_layers(whole, family.blocks(whole)).items():
        outputs, inputs = layer.weight.shape
        cut = weight_split(name, family)
        if cut == "heads":  # ranks may share one
            outputs //= min(tp, model.num_kv_heads)
        elif cut == "row":
            inputs //= tp
        elif cut == "column":
            outputs //= tp
        found.append(Matrix(name, outputs, inputs))
    return found


def weight_split(name: str, family: Family) -> str | None:
    """How tensor parallelism cuts the weight of a module: see `weft.models.family.TensorParallelSpec`."""
    split = next((s for p, s in family.sharding.items() if fnmatchcase(name, p)), None)
    return split.weight if split is not None else None
