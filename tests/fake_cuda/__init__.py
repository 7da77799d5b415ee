"""One rank's training step on fake CUDA tensors, with a PyTorch that is built for CPUs.

A fake tensor has a shape, a dtype and a device, but no memory and no values.  A CPU build of
PyTorch cannot run autograd on fake ``cuda`` tensors, because it asks the CUDA library for the
current device and stream.  `guard.cpp` answers these questions, and `tests.fake_cuda.device`
replaces the few functions of ``torch.cuda`` that a step calls.  Then weft's own code runs the step
that a GPU would run: CUDA's branches, its attention kernels, float8 products with their checks of
layouts, and torch.compile up to the code that inductor receives.

`tests.fake_cuda.step` counts what a step of a recipe does.  Nothing is timed, and values are
missing: this shows that code is captured, fused or waited for, not that it is fast or right.

Nothing here may run together with real CUDA, so `count` runs every step in a separate process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
TIMEOUT = 600  # seconds of a step


def count(recipe: str, *overrides: str, fault: str = "") -> dict[str, Any]:
    """Count a step of rank 0 of a recipe on its own cluster.

    Args:
        recipe: name of the recipe.
        overrides: such as "model.num_layers=2".
        fault: code that plants a fault before the step.

    Returns:
        The counts of `tests.fake_cuda.step.Step`.

    Raises:
        RuntimeError: with the end of its output, if the step fails.
    """
    command = [sys.executable, "-m", "tests.fake_cuda", recipe, *overrides, "--fault", fault]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{recipe}: {done.stderr[-3000:]}")
    counts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return counts
