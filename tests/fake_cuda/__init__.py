"""One rank's training step on fake CUDA tensors, with a PyTorch that is built for CPUs.

A fake tensor has a shape, a dtype and a device, but no memory and no values.  A CPU build of
PyTorch cannot run autograd on fake ``cuda`` tensors, because it asks the CUDA library for the
current device and stream.  `guard.cpp` answers these questions, and `tests.fake_cuda.device`
replaces the few functions of ``torch.cuda`` that a step calls.  Then weft's own code runs the step
that a GPU would run: CUDA's branches, its attention kernels, float8 products with their checks of
layouts, and torch.compile up to the code that inductor receives.

`tests.fake_cuda.step` counts what a step of a recipe does, and `tests.fake_cuda.kernels` builds the
kernels that torch.compile generates for it.  Nothing is timed, and values are missing: this shows
that code is captured, fused, waited for or built, not that it is fast or right.

Nothing here may run together with real CUDA, so every step runs in a separate process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
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
    counts: dict[str, Any] = _run(recipe, *overrides, "--fault", fault)
    return counts


def build_kernels(
    recipe: str, *overrides: str, architecture: int, fault: str = ""
) -> list[dict[str, Any]]:
    """Build the kernels of what such a step compiles, for one architecture, without any cache.

    Args:
        recipe: name of the recipe; its first block is enough, because all share their code.
        overrides: as for `count`.
        architecture: 90 or 100.
        fault: as for `count`.

    Returns:
        The values of `tests.fake_cuda.kernels.CompiledFunction`.

    Raises:
        RuntimeError: with the end of its output, if the step or inductor fails.
    """
    with tempfile.TemporaryDirectory() as cache:
        options = (f"compile.cache_dir={cache}", "--kernels", str(architecture), "--fault", fault)
        variables = {
            "TRITON_CACHE_DIR": cache,
            "TRITON_ALWAYS_COMPILE": "1",
            "TRITON_DUMP_PTXAS_LOG": "1",
            # A patched option would not hold in the threads of backward.
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        }
        functions: list[dict[str, Any]] = _run(recipe, *overrides, *options, variables=variables)
    return functions


def _run(*arguments: str, variables: Mapping[str, str] | None = None) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fake_cuda", *arguments],
        cwd=ROOT,
        env=os.environ | (variables or {}),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{arguments[0]}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])
