"""Means of the losses of a mixture's sources, and of the objective's metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class RunningMean:
    """Means since the last record; a single step may have few samples of a source.

    Args:
        names: names of the means; may be empty.
        device: device of the sums.
    """

    def __init__(self, names: Iterable[str], device: torch.device) -> None:
        self._names = list(names)
        self._sums = torch.zeros(len(self._names), 2, device=device)

    def __len__(self) -> int:
        return len(self._names)

    def reset(self) -> None:
        """Drop what was added since the last record."""
        self._sums.zero_()

    def add(self, sums: Tensor | None) -> None:
        """Add the sums and counts of a step on this rank: (names, 2), or None."""
        if sums is not None:
            self._sums += sums

    def take_means(self) -> list[Tensor]:
        """Return the means of everything added since the last call; a collective."""
        if not self._names:
            return []
        sums = self._sums.clone()
        self._sums.zero_()
        return self.reduce_means(sums)

    def reduce_means(self, sums: Tensor | None) -> list[Tensor]:
        """Reduce sums and counts over all ranks, and divide them; a collective.

        Returns:
            A list with one float64 tensor, (names,), NaN where the count is 0; the host has not
            waited for it.  An empty list if ``sums`` is None.
        """
        if sums is None:
            return []
        total = sums.double()
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        return [total[:, 0] / total[:, 1]]

    def by_name(self, means: Sequence[float]) -> dict[str, float] | None:
        """Return the means by name without NaN; None if none is left."""
        pairs = zip(self._names, means, strict=True) if means else ()
        return {name: mean for name, mean in pairs if not math.isnan(mean)} or None


class SourceLosses(RunningMean):
    """Mean losses of the sources, in nats per token.

    Args:
        shares: share of each source in the mixture, by name; empty without a mixture.
        device: device of the sums.
    """

    def __init__(self, shares: dict[str, float], device: torch.device) -> None:
        super().__init__(shares, device)
        self._shares = shares

    def mean(self, losses: dict[str, float]) -> float:
        """Return the loss of the mixture, given the losses of its sources."""
        shares = {name: self._shares[name] for name in losses}
        return sum(share * losses[name] for name, share in shares.items()) / sum(shares.values())


def to_list(tensors: Iterable[Tensor]) -> list[float]:
    """Return the values of all tensors, concatenated."""
    return [value for tensor in tensors for value in tensor.tolist()]
