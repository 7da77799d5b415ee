"""Version and directory of the package, and the tested versions of others.

For modules of every directory: `weft` itself is the Python interface, which is above them all.
"""

import re
from collections.abc import Iterator
from pathlib import Path

__version__ = "0.1.0"
PACKAGE_DIR = Path(__file__).parent

# First and last minor releases that weft is tested with, see docs/supported-versions.md.  The
# requirement of pyproject.toml has the same bounds for torch.
TESTED_TORCH = ((2, 11), (2, 15))
TESTED_PYTHON = ((3, 11), (3, 13))
TORCH_REQUIREMENT = f"torch>=2.11,<2.{TESTED_TORCH[1][1] + 1}"


def parse_version(text: str) -> tuple[int, ...]:
    """Return the first three numbers of a version: (535, 161, 8) for '535.161.08'."""
    return tuple(int(n) for n in re.findall(r"\d+", text)[:3])


def untested_versions(torch: str, python: str) -> Iterator[tuple[str, str]]:
    """Yield a fact and a remedy for each version outside of the tested range.

    Args:
        torch: version of torch, such as 2.15.0+cu132; "": not installed.
        python: version of Python.
    """
    remedies = f"if it fails: pip install '{TORCH_REQUIREMENT}'", "if it fails: use such a Python"
    tested = ("torch", torch, TESTED_TORCH), ("Python", python, TESTED_PYTHON)
    for (name, text, (first, last)), remedy in zip(tested, remedies, strict=True):
        if not (found := re.match(r"(\d+)\.(\d+)", text)):
            continue
        release = int(found[1]), int(found[2])
        if not first <= release <= last:
            order = "older" if release < first else "newer"
            bounds = f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"
            yield f"{name} {text} is {order} than weft is tested with ({bounds})", remedy
