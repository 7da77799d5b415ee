"""Measure the processor time of an import, in new interpreters, relative to the import of torch.

    python benchmarks/startup.py [--rounds 5]

In every round each module is imported once, in random order.  The results are medians of seconds
(user and system), and of the ratio to torch in the same round.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import subprocess
import sys
from datetime import date
from importlib.metadata import version

MODULES = (
    "torch",
    "torch.distributed.fsdp",
    "weft.training.loop",
    "weft.supervision.start",
    "weft.cli.main",
)


def import_seconds(module: str) -> float:
    """Return the processor time of a new interpreter that imports ``module``."""
    before = os.times()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    after = os.times()
    return (
        after.children_user + after.children_system - before.children_user - before.children_system
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for module in MODULES:
        import_seconds(module)  # compiles bytecode, and fills the page cache
    rounds = [
        {module: import_seconds(module) for module in random.sample(MODULES, len(MODULES))}
        for _ in range(options.rounds)
    ]
    print(f"{date.today()}  torch {version('torch')}, Python {platform.python_version()}")
    print(f"{'import':<24} {'s':>5}  of torch")
    for module in MODULES:
        seconds = statistics.median(times[module] for times in rounds)
        ratio = statistics.median(times[module] / times["torch"] for times in rounds)
        print(f"{module:<24} {seconds:5.2f}  {ratio:.2f}")


if __name__ == "__main__":
    main()
