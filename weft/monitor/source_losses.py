"""Means beside the loss: of each source of a mixture, and of what an objective tells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class RunningMean:
    """Means since the last record, for a single step may have few samples of a kind.

    Args:
        names: of what they are means of; none if there is nothing to tell.
    """

    def __init__(self, names: Iterable[str], device: torch.device) -> None:
        self._names = list(names)
        self._since = torch.zeros(len(self._names), 2, device=device)

    def __len__(self) -> int:
        return len(self._names)

    def forget(self) -> None:
        """What was added since the last record does not count any more."""
        self._since.zero_()

    def add(self, sums: Tensor | None) -> None:
        """A step that counts.  ``sums``: of this rank's samples, see `Engine.by_source`."""
        if sums is not None:
            self._since += sums

    def since(self) -> list[Tensor]:
        """See `means`; of what was added since the last record."""
        if not self._names:
            return []
        sums = self._since.clone()
        self._since.zero_()
        return self.means(sums)

    def means(self, sums: Tensor | None) -> list[Tensor]:
        """Of this rank's ``sums`` and counts those of all ranks, divided: none or one tensor,
        float64, with an entry for each name, not waited for, and NaN where nothing was counted.
        Every rank calls it, and gets the same.
        """
        if sums is None:
            return []
        total = sums.double()
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        return [total[:, 0] / total[:, 1]]

    def named(self, means: Sequence[float]) -> dict[str, float] | None:
        """By name, where something was counted."""
        pairs = zip(self._names, means, strict=True) if means else ()
        return {name: mean for name, mean in pairs if not math.isnan(mean)} or None


class SourceLosses(RunningMean):
    """Mean losses of the sources, in nats per token.

    Args:
        shares: of the sources, by name; none if the text is no mixture.
    """

    def __init__(self, shares: dict[str, float], device: torch.device) -> None:
        super().__init__(shares, device)
        self._shares = shares

    def mean(self, losses: dict[str, float]) -> float:
        """Of the mixture, from the losses of its sources."""
        shares = {name: self._shares[name] for name in losses}
        return sum(share * losses[name] for name, share in shares.items()) / sum(shares.values())


def listed(tensors: Iterable[Tensor]) -> list[float]:
    """All their values, one after the other."""
    return [value for tensor in tensors for value in tensor.tolist()]
