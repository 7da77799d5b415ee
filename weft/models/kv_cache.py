"""Keys and values of the tokens that a model has seen, so that each new one costs one token's work.

A module of `weft.models` knows nothing of it: the cache takes the place of what its attention calls
``attend``, as context parallelism does in training, and is taken out again.  A token's place in the
cache is its position in its row, and a query sees the places up to its own.  So rows of different
lengths need no mask of their own: what is padded to the right of a shorter one lies after all that
its queries see, and is overwritten before they come so far.

Shapes in names: B rows, T new tokens of each, S places, H query heads, G key/value heads, K width
of one head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from weft.models.layers import Attention, attend


class KeyValueCache:
    """Of all layers, for rows of at most ``tokens`` tokens; memory is taken at the first use.

    Call `place` before each forward pass of the model.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.positions_BT = torch.empty(0, 0, dtype=torch.int64)
        self.allowed_B1TS: Tensor | None = None  # None: the rows begin here
        self.seen = 0

    def place(self, positions_BT: Tensor, anew: bool) -> None:
        """Where in its row each token of the next pass is; ``anew``: all rows from 0 on."""
        self.positions_BT, self.allowed_B1TS = positions_BT, None
        if not anew:
            self.seen = int(positions_BT.max()) + 1
            places_S = torch.arange(self.seen, device=positions_BT.device)
            self.allowed_B1TS = (places_S <= positions_BT.unsqueeze(2)).unsqueeze(1)


class _Layer:
    """One layer's part, called in the place of `attend`."""

    def __init__(self, cache: KeyValueCache) -> None:
        self.cache = cache
        self.k_BSGK: Tensor | None = None
        self.v_BSGK: Tensor | None = None

    def __call__(
        self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: Tensor | BlockMask | None
    ) -> Tensor:
        assert mask is None, "documents in one row have no cache"
        cache = self.cache
        if self.k_BSGK is None or self.v_BSGK is None:
            shape = (k_BTGK.shape[0], cache.tokens, *k_BTGK.shape[2:])
            self.k_BSGK, self.v_BSGK = k_BTGK.new_zeros(shape), v_BTGK.new_zeros(shape)
        rows_B1 = torch.arange(k_BTGK.shape[0], device=k_BTGK.device).unsqueeze(1)
        self.k_BSGK[rows_B1, cache.positions_BT] = k_BTGK
        self.v_BSGK[rows_B1, cache.positions_BT] = v_BTGK
        if cache.allowed_B1TS is None:
            return attend(q_BTHK, k_BTGK, v_BTGK, None)
        k_BSGK, v_BSGK = self.k_BSGK[:, : cache.seen], self.v_BSGK[:, : cache.seen]
        return attend(q_BTHK, k_BSGK, v_BSGK, cache.allowed_B1TS)


@contextmanager
def caching(blocks: Iterable[nn.Module], tokens: int) -> Iterator[KeyValueCache | None]:
    """Inside, the attention of ``blocks`` remembers; None if there is none that weft knows."""
    layers = [m for block in blocks for m in block.modules() if isinstance(m, Attention)]
    before = [layer.attend for layer in layers]
    cache = KeyValueCache(tokens)
    for layer in layers:
        layer.attend = _Layer(cache)
    try:
        yield cache if layers else None
    finally:
        for layer, attended in zip(layers, before, strict=True):
            layer.attend = attended
