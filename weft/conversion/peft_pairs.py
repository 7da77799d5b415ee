"""Adapters in a file of PEFT: what each adapts, and which layers of weft that is.

The formats are those of `weft.conversion.peft_export`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from weft.checkpoint.shard_files import Contents
from weft.checkpoint.weight_files import open_weight
from weft.conversion.peft_config import PeftConfig
from weft.conversion.peft_export import Target, list_targets
from weft.models.hf_fields import HFMapping, StackedExperts


def read_tensor(contents: Contents, name: str) -> Tensor:
    """Return a tensor of a file."""
    return torch.cat([*open_weight(contents, name).read()])


class Pair(NamedTuple):
    """A and B of one target in a file.

    Attributes:
        target: the module or parameter of transformers.
        names: names of its tensors, by kind.
        sizes: shapes of weft's matrices in it, ``[..., outputs, inputs]``.
        rank: number of rows of A, per expert.
        layout: of stacked experts; None for other layers.
        contents: the file.
    """

    target: Target
    names: dict[str, str]
    sizes: list[torch.Size]
    rank: int
    layout: StackedExperts | None
    contents: Contents

    @property
    def is_swapped(self) -> bool:
        """A and B change places: see `weft.conversion.peft_export`."""
        return self.layout is not None and self.layout.transposed and not self.layout.marked

    def read(self) -> tuple[Tensor, list[Tensor]]:
        """Return A ``[..., rank, inputs]`` and each part's B ``[..., outputs, rank]``."""
        a, b = (read_tensor(self.contents, self.names[kind]) for kind in "AB")
        if experts := self.sizes[0][:-2]:
            a = _unflatten(a, 0, (*experts, -1))
            b = _unflatten(b, 1, (-1, *experts)).permute(2, 0, 1)
        if self.is_swapped:
            a, b = b.mT, a.mT
        if self.layout is not None and self.layout.interleaved and len(self.sizes) > 1:
            return a, list(_unflatten(b, -2, (-1, len(self.sizes))).unbind(-2))
        return a, list(torch.split(b, [size[-2] for size in self.sizes], dim=-2))

    def read_factor(self, part: int, first: int, rank: int, which: str) -> Tensor:
        """Return A or B of one part; ``first``: of `split`."""
        a, factors = self.read()
        block = slice(first, first + rank)
        return a[..., block, :] if which == "A" else factors[part][..., block]

    def split(self, rank: int) -> dict[int, int] | None:
        """Return the first row of A of each part that has an adapter of this rank.

        None: the columns of B do not allow it.
        """
        if len(self.sizes) == 1:
            return {0: 0} if self.rank == rank else None
        _, factors = self.read()
        used = [b.flatten(0, -2).any(0).nonzero().flatten().tolist() for b in factors]
        parts = [i for i, columns in enumerate(used) if columns]
        if self.rank == rank:
            is_partial = parts and "magnitude" not in self.names
            return dict.fromkeys(parts if is_partial else range(len(factors)), 0)
        count, rest = divmod(self.rank, rank)
        if not parts:
            parts = list(range(min(count, len(factors))))
        if rest or len(parts) != count:
            return None
        blocks = {part: i * rank for i, part in enumerate(parts)}
        fits = all(
            blocks[p] <= min(used[p]) <= max(used[p]) < blocks[p] + rank for p in parts if used[p]
        )
        return blocks if fits else None


def list_places(
    mapping: HFMapping,
    layers: Sequence[str],
    shapes: Mapping[str, torch.Size],
    peft: PeftConfig,
) -> dict[str, Target]:
    """Return what PEFT may adapt, by its path in the names of a file."""
    experts = [name for name in layers if ".mlp.experts." in name]
    down = [name for name in experts if name.endswith(".down_proj")]
    others = [name for name in experts if name not in down]
    places = {
        target.path: target
        for target in list_targets(mapping, layers, shapes)
        if target.parameter in ("", "weight")
    }
    stacks: dict[str, list[Target]] = {}
    # All three kinds at once give a place per expert.
    for target in chain(*(list_targets(mapping, names, shapes) for names in (others, down))):
        name = f".{target.path}.{target.parameter}"
        if any(name.endswith(f".{end}") for end in peft.parameters):
            stacks.setdefault(target.path, []).append(target)
    for path, targets in stacks.items():
        inner, *outer = [f"{path}.base_layer", path][-len(targets) :]
        places |= dict(zip([inner, *outer], targets, strict=True))
    return places


def _unflatten(value: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    return torch.unflatten(value, dim, sizes)
