"""What the tests of predictions share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_collect() -> Iterator[None]:
    """Each recorded step begins with a collection, which in a process of many modules takes as
    long as the step."""
    gc.freeze()
    yield
    gc.unfreeze()
