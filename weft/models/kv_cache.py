"""Incremental decoding: a cache of keys and values, and attention to it.

Shapes in names: B batch, T new tokens of a sequence, H query heads, G key/value heads, K head
dimension, S slots of the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from weft.models.layers import Attention, attend


class KeyValueCache:
    """Cache of all layers, for sequences of at most ``max_tokens`` tokens.

    A token's cache slot is its position in its sequence, and a query sees the slots up to its own.
    Sequences of different lengths therefore need no padding mask: padding on the right lies after
    all slots that a query sees, and new tokens overwrite it before a query reaches it.

    Memory is allocated on first use.  Call `set_positions` before each forward pass of the model.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.positions_BT = torch.empty(0, 0, dtype=torch.int64)
        self.mask_B1TS: Tensor | None = None  # None: causal, from position 0
        self.cached_len = 0

    def set_positions(self, positions_BT: Tensor, reset: bool) -> None:
        """Set the position of each token of the next pass; ``reset``: restart at 0."""
        self.positions_BT, self.mask_B1TS = positions_BT, None
        if not reset:
            self.cached_len = int(positions_BT.max()) + 1
            slots_S = torch.arange(self.cached_len, device=positions_BT.device)
            self.mask_B1TS = (slots_S <= positions_BT.unsqueeze(2)).unsqueeze(1)


class _CachedAttention:
    """Cache of one layer, called in place of `attend`."""

    def __init__(self, cache: KeyValueCache) -> None:
        self.cache = cache
        self.k_BSGK: Tensor | None = None
        self.v_BSGK: Tensor | None = None

    def __call__(
        self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: Tensor | BlockMask | None
    ) -> Tensor:
        assert mask is None, "packed documents cannot be cached"
        cache = self.cache
        if self.k_BSGK is None or self.v_BSGK is None:
            shape = (k_BTGK.shape[0], cache.max_tokens, *k_BTGK.shape[2:])
            self.k_BSGK, self.v_BSGK = k_BTGK.new_zeros(shape), v_BTGK.new_zeros(shape)
        batch_B1 = torch.arange(k_BTGK.shape[0], device=k_BTGK.device).unsqueeze(1)
        self.k_BSGK[batch_B1, cache.positions_BT] = k_BTGK
        self.v_BSGK[batch_B1, cache.positions_BT] = v_BTGK
        if cache.mask_B1TS is None:
            return attend(q_BTHK, k_BTGK, v_BTGK, None)
        k_BSGK, v_BSGK = self.k_BSGK[:, : cache.cached_len], self.v_BSGK[:, : cache.cached_len]
        return attend(q_BTHK, k_BSGK, v_BSGK, cache.mask_B1TS)


@contextmanager
def use_kv_cache(blocks: Iterable[nn.Module], max_tokens: int) -> Iterator[KeyValueCache | None]:
    """Make the attention of ``blocks`` use a cache; yield None without attention.

    It replaces the ``attend`` function of every layer, as context parallelism does in training.
    """
    layers = [m for block in blocks for m in block.modules() if isinstance(m, Attention)]
    original_attends = [layer.attend for layer in layers]
    cache = KeyValueCache(max_tokens)
    for layer in layers:
        layer.attend = _CachedAttention(cache)
    try:
        yield cache if layers else None
    finally:
        for layer, original_attend in zip(layers, original_attends, strict=True):
            layer.attend = original_attend
