"""Compare predicted gains with published ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_published_gains_are_predicted() -> None:
    """Predictions are within ten points of the published gains, or between them."""
    script = ROOT / "benchmarks" / "plan_gains.py"
    out = subprocess.run(
        [sys.executable, script, "--json"], check=True, capture_output=True, text=True, timeout=900
    )
    gains = json.loads(out.stdout)
    assert len(gains) == 3
    for name, prediction in gains.items():
        published = prediction["published"].values()
        for variant in ("traced", "arithmetic"):
            low, high = min(published) - 0.1, max(published) + 0.1
            assert low < prediction[variant]["gain"] < high, (name, variant)
