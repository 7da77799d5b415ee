"""Incremental decoding: a cache of keys and values, and attention to it.

Shapes in names: B batch, T new tokens of a sequence, H query heads, G key/value heads, K head
dimension, S slots of the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from weft.models.attention import DEFAULT_OPTIONS, AttentionOptions, attend


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
        self.cached_len = 0  # 0: the pass starts at position 0

    def set_positions(self, positions_BT: Tensor, reset: bool) -> None:
        """Set the position of each token of the next pass; ``reset``: restart at 0."""
        self.positions_BT = positions_BT
        self.cached_len = 0 if reset else int(positions_BT.max()) + 1

    def mask(self, options: AttentionOptions) -> Tensor:
        """Return which slots the new tokens see, bool ``[B, 1, T, S]``."""
        positions_BT1 = self.positions_BT.unsqueeze(2)
        slots_S = torch.arange(self.cached_len, device=positions_BT1.device)
        mask_BTS = slots_S <= positions_BT1
        if options.window:
            mask_BTS &= slots_S > positions_BT1 - options.window
        if options.chunk:
            mask_BTS &= slots_S >= positions_BT1 // options.chunk * options.chunk
        return mask_BTS.unsqueeze(1)


class _CachedAttention:
    """Cache of one layer, called in place of `attend`."""

    def __init__(self, cache: KeyValueCache) -> None:
        self.cache = cache
        self.k_BSGK: Tensor | None = None
        self.v_BSGK: Tensor | None = None

    def __call__(
        self,
        q_BTHK: Tensor,
        k_BTGK: Tensor,
        v_BTGK: Tensor,
        mask: Tensor | BlockMask | None,
        options: AttentionOptions = DEFAULT_OPTIONS,
    ) -> Tensor:
        cache = self.cache
        if self.k_BSGK is None or self.v_BSGK is None:
            self.k_BSGK, self.v_BSGK = (
                x.new_zeros((x.shape[0], cache.max_tokens, *x.shape[2:])) for x in (k_BTGK, v_BTGK)
            )
        batch_B1 = torch.arange(k_BTGK.shape[0], device=k_BTGK.device).unsqueeze(1)
        self.k_BSGK[batch_B1, cache.positions_BT] = k_BTGK
        self.v_BSGK[batch_B1, cache.positions_BT] = v_BTGK
        if not cache.cached_len:
            return attend(q_BTHK, k_BTGK, v_BTGK, None, options)
        k_BSGK, v_BSGK = self.k_BSGK[:, : cache.cached_len], self.v_BSGK[:, : cache.cached_len]
        return attend(q_BTHK, k_BSGK, v_BSGK, cache.mask(options), options)


@contextmanager
def use_kv_cache(blocks: Iterable[nn.Module], max_tokens: int) -> Iterator[KeyValueCache | None]:
    """Make the attention of ``blocks`` use a cache; yield None without attention.

    It replaces the ``attend`` function of every layer, as context parallelism does in training.
    """
    layers: list[Any] = [m for block in blocks for m in block.modules() if hasattr(m, "attend")]
    original_attends = [layer.attend for layer in layers]
    cache = KeyValueCache(max_tokens)
    for layer in layers:
        layer.attend = _CachedAttention(cache)
    try:
        yield cache if layers else None
    finally:
        for layer, original_attend in zip(layers, original_attends, strict=True):
            layer.attend = original_attend
