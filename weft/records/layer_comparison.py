"""Read the statistics of layers that a run has written, and compare values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.monitor.layer_stats import KINDS
from weft.records.jsonl_reader import is_number, read_records


def read_statistics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the intact rows of a run's statistics.jsonl; none without the file."""
    return [row for row in read_records(run_dir / "statistics.jsonl") if _is_row(row)]


def _is_row(row: Mapping[str, Any]) -> bool:
    numbers = ("order", "count", "mean", "rms", "max_abs", "nonfinite")
    return (
        row.get("kind") in KINDS
        and isinstance(row.get("name"), str)
        and all(is_number(row.get(name)) for name in numbers)
    )


def safe_ratio(a: float, b: float) -> float:
    """Return ``a / b``; 0 / 0 is 0, and NaN becomes Inf."""
    if a == 0 and math.isfinite(b):
        return 0.0
    return finite_or_inf(a / b) if b else math.inf


def finite_or_inf(value: float) -> float:
    """Return the value if it is finite, else Inf."""
    return value if math.isfinite(value) else math.inf
