"""Count what one step of every shipped recipe does on a GPU, without a GPU.

    python benchmarks/fake_cuda.py [--json] [--write] [RECIPE ...]

Rank 0 of each recipe's own world runs one step on fake CUDA tensors (`tests.fake_cuda`).  The table
has a row for each recipe; ``--json`` prints all counts.  ``--write`` writes them to
benchmarks/fake_cuda.json and the table to docs/gpu-steps.md; both are in the repository, so that a
change of the code shows which recipes it changes.  Recipes without GPUs or without a model are left
out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from weft.config.reader import read_job, recipe_names
from weft.plan.devices import CPU_DEVICE, parse_cluster

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "gpu-steps.md"
AT_ONCE = 2
TIMEOUT = 600  # seconds of a recipe

Counts = Mapping[str, Any]


def gpu_recipes() -> list[str]:
    """Return the shipped recipes with a model and a cluster of GPUs."""
    found = []
    for name in recipe_names():
        job, _, errors = read_job(name)
        cluster = job.run.cluster
        if errors or cluster in ("auto", "local") or job.model.path == "REQUIRED":
            continue
        if parse_cluster(cluster).device_name != CPU_DEVICE:
            found.append(name)
    return found


def count_recipe(recipe: str) -> dict[str, Any]:
    """Count a step of a recipe in a separate process.

    Raises:
        RuntimeError: with the end of its output, if the step fails.
    """
    command = [sys.executable, "-m", "tests.fake_cuda", recipe]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{recipe}: {done.stderr[-2000:]}")
    counts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return counts


def page(results: Mapping[str, Counts]) -> str:
    """Return docs/gpu-steps.md."""
    return HEAD + "".join(table(results))


def table(results: Mapping[str, Counts]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| recipe | microbatches | collectives | products | attention | graphs "
    yield "| captured operators | uncompiled operators | fused exchanges | host waits |\n"
    yield "|---|---|---|---|---|---|---|---|---|---|\n"
    for recipe, step in results.items():
        graphs = step["graphs"]
        exchanges = sum(graph["gathers"] + graph["scatters"] for graph in graphs)
        fused = sum(graph["fused_gathers"] + graph["fused_scatters"] for graph in graphs)
        cells = [
            recipe,
            str(step["microbatches"]),
            join(step["collectives"]),
            join(step["products"]),
            join({short(name): count for name, count in step["attention"].items()}),
            ", ".join(f"{graph['kind']} {graph['operators']}" for graph in graphs),
            f"{step['compiled_operators']:,}",
            f"{step['operators']:,}",
            f"{fused} of {exchanges}" if step["async_tp"] else "",
            str(sum(step["host_waits"].values())),
        ]
        yield f"| {' | '.join(cells)} |\n"


def join(counts: Mapping[str, int]) -> str:
    """Format counts as ``2 a, 3 b``."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def short(operator: str) -> str:
    """Return the kernel and pass of an attention operator."""
    return operator.removeprefix("_scaled_dot_product_").replace("_attention", "").replace("_", " ")


def main() -> None:
    """Count the recipes and print or write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="default: all")
    parser.add_argument("--json", action="store_true", help="print all counts as JSON")
    parser.add_argument("--write", action="store_true", help="write the page and all counts")
    options = parser.parse_args()
    recipes = options.recipes or gpu_recipes()
    began = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = dict(zip(recipes, pool.map(count_recipe, recipes), strict=True))
    print(f"{len(recipes)} recipes in {time.monotonic() - began:.0f} s", file=sys.stderr)
    if options.write:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
        PAGE.write_text(page(results), "utf-8")
    print(json.dumps(results) if options.json else "".join(table(results)))


HEAD = """# Steps on a GPU

This table shows what one training step of each shipped recipe does on a GPU. It is counted without
a GPU: rank 0 of the recipe's world runs the step on fake CUDA tensors, which have shapes but no
memory (`tests/fake_cuda`). Nothing is timed. `python benchmarks/fake_cuda.py --write` makes the
table; `benchmarks/fake_cuda.json` has all counts.

- *Microbatches*: at most two, or one for each pipeline rank; a step of more repeats them.
- *Collectives* by mesh axis, *products* (matrix products) by dtype, and *attention* by kernel: of
  all microbatches.
- *Graphs*: the operators of each graph that torch.compile captures. All blocks share the graphs.
  *Captured operators* run in them, *uncompiled operators* one by one; both counts are of the whole
  step, before fusion.
- *Fused exchanges*: the gathers and scatters of tensor parallelism that asynchronous TP overlaps,
  of all in the graphs.
- *Host waits*: places where the host waits for the device. The sizes of expert parallelism's
  all-to-all are not counted.

"""


if __name__ == "__main__":
    main()
