"""A store of process groups that counts its requests."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist

Store: Any = dist.Store


class CountingStore(Store):  # type: ignore[misc]
    """A client of another store.

    Attributes:
        requests: number of requests of this rank, by kind.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.requests: Counter[str] = Counter()

    def set(self, key: str, value: Any) -> None:
        self.requests["set"] += 1
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.requests["get"] += 1
        value: bytes = self.inner.get(key)
        return value

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.requests["wait"] += 1
        self.inner.wait(keys, *timeout)

    def add(self, key: str, value: int) -> int:
        self.requests["add"] += 1
        total: int = self.inner.add(key, value)
        return total

    def check(self, keys: list[str]) -> bool:
        self.requests["check"] += 1
        found: bool = self.inner.check(keys)
        return found

    def has_extended_api(self) -> bool:
        """Return False: no multi_get."""
        return False

    def clone(self) -> CountingStore:
        """Return this store, so that the requests of split groups count."""
        return self
