"""The loss of each source of a mixture."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor


class SourceLosses:
    """Mean losses since the last record, for a single step may have few rows of a source.

    Args:
        shares: of the sources, by name; none if the text is no mixture.
    """

    def __init__(self, shares: dict[str, float], device: torch.device) -> None:
        self._shares = shares
        self._since = torch.zeros(len(shares), 2, device=device)

    def forget(self) -> None:
        """What was added since the last record does not count any more."""
        self._since.zero_()

    def add(self, by_source: Tensor | None) -> None:
        """A step that counts.  ``by_source``: of this rank's tokens, see `Engine.by_source`."""
        if by_source is not None:
            self._since += by_source

    def since(self) -> list[Tensor]:
        """See `means`; of what was added since the last record."""
        if not self._shares:
            return []
        by_source = self._since.clone()
        self._since.zero_()
        return self.means(by_source)

    def means(self, by_source: Tensor | None) -> list[Tensor]:
        """The mean loss of each source in nats per token: none or one tensor, float64 (S,), not
        waited for, and NaN for a source without a token.  Every rank calls it, and gets the same.
        """
        if by_source is None:
            return []
        total = by_source.double()
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        return [total[:, 0] / total[:, 1]]

    def mean(self, losses: dict[str, float]) -> float:
        """Of the mixture, from the losses of its sources."""
        shares = {name: self._shares[name] for name in losses}
        return sum(share * losses[name] for name, share in shares.items()) / sum(shares.values())

    def named(self, means: list[float]) -> dict[str, float] | None:
        """By the names of the sources that had a token."""
        pairs = zip(self._shares, means, strict=True)
        return {name: mean for name, mean in pairs if not math.isnan(mean)} or None
