"""A fake libnvidia-ml.so.1, so that the real pynvml runs without a GPU.

tests/fake_nvml.c describes the values that it can have.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def build_library(directory: Path) -> None:
    """Compile the library into a directory for LD_LIBRARY_PATH."""
    target = directory / "libnvidia-ml.so.1"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(target), str(SOURCE)]
    subprocess.run(command, check=True)


def environment(directory: Path, values: str = "") -> dict[str, str]:
    """Return variables with which child processes use the library, and write its values."""
    (directory / "values").write_text(values)
    path = os.environ.get("LD_LIBRARY_PATH", "")
    return {"LD_LIBRARY_PATH": f"{directory}:{path}", "FAKE_NVML": str(directory / "values")}
