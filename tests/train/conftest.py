"""In the test process PyTorch computes with one thread."""

from __future__ import annotations

from tests.small import one_thread  # noqa: F401 - a fixture
