"""Count what one step of every shipped recipe does on a GPU, without a GPU.

    python benchmarks/fake_cuda.py [--json] [--write] [RECIPE ...]
    python benchmarks/fake_cuda.py --page

Rank 0 of each recipe's own world runs one step on fake CUDA tensors (`tests.fake_cuda`).  The table
has a row for each recipe; ``--json`` prints all counts.  ``--write`` writes them to
benchmarks/fake_cuda.json and the table to docs/gpu-steps.md; both are in the repository, so that a
change of the code shows which recipes it changes.  With RECIPE, only these are recorded anew.
``--page`` writes the page from the counts in the repository.
Recipes without a cluster of GPUs are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.fake_cuda import count
from weft.config.reader import read_job, recipe_names
from weft.planning.devices import CPU_DEVICE, parse_cluster

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "gpu-steps.md"
AT_ONCE = 2

Counts = Mapping[str, Any]


def gpu_recipes() -> list[str]:
    """Return the shipped recipes with a cluster of GPUs."""
    found = []
    for name in recipe_names():
        cluster = read_job(name)[0].run.cluster
        if cluster != "local" and parse_cluster(cluster).device_name != CPU_DEVICE:
            found.append(name)
    return found


def page(results: Mapping[str, Any]) -> str:
    """Return docs/gpu-steps.md for the content of benchmarks/fake_cuda.json."""
    head = HEAD.format(date=results["date"], torch=results["torch"])
    return head + "".join(table(results["steps"]))


def table(steps: Mapping[str, Counts]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| recipe | microbatches | collectives | matmuls | attention | graphs "
    yield "| captured operators | eager kernels | fused exchanges | prefetched gathers "
    yield "| exposed MB | host waits |\n"
    yield f"|{'---|' * 12}\n"
    for recipe, step in steps.items():
        graphs = step["graphs"]
        exchanges = sum(graph["gathers"] + graph["scatters"] for graph in graphs)
        fused = sum(graph["fused_gathers"] + graph["fused_scatters"] for graph in graphs)
        cells = [
            recipe,
            str(step["microbatches"]),
            join(step["collectives"]),
            join(step["matmuls"]),
            join({short(name): count for name, count in step["attention"].items()}),
            ", ".join(f"{graph['kind']} {graph['operators']}" for graph in graphs),
            f"{step['compiled_operators']:,}",
            f"{step['eager_kernels']:,}" if "eager_kernels" in step else "",
            f"{fused} of {exchanges}" if step["async_tp"] else "",
            f"{step['prefetched']} of {step['fsdp_gathers']}" if step["fsdp_gathers"] else "",
            join({key: size for key, size in step.get("exposed_megabytes", {}).items() if size}),
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
    parser.add_argument("--page", action="store_true", help="write the page, and count nothing")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(page(json.loads(RESULTS.read_text("utf-8"))), "utf-8")
        return
    recipes = options.recipes or gpu_recipes()
    began = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        steps = dict(zip(recipes, pool.map(count, recipes), strict=True))
    print(f"{len(recipes)} recipes in {time.monotonic() - began:.0f} s", file=sys.stderr)
    if options.write:
        recorded = json.loads(RESULTS.read_text("utf-8"))["steps"] if options.recipes else {}
        all_steps = recorded | steps
        results = {
            "date": str(date.today()),
            "torch": version("torch"),
            "steps": {name: all_steps[name] for name in gpu_recipes() if name in all_steps},
        }
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
        PAGE.write_text(page(results), "utf-8")
    print(json.dumps(steps) if options.json else "".join(table(steps)))


HEAD = """# Steps on a GPU

This table shows what one training step of each shipped recipe would do on a GPU. It is counted
without a GPU: rank 0 of the recipe's world runs the step on fake CUDA tensors, which have shapes
but no memory (`tests/fake_cuda`). Nothing is timed. `python benchmarks/fake_cuda.py --write` makes
the table ({date}, PyTorch {torch}); `benchmarks/fake_cuda.json` has all counts.

- *Microbatches*: at most two, or one for each pipeline rank; a step of more repeats them.
- *Collectives* by mesh axis, *matmuls* by dtype, and *attention* by kernel, as PyTorch's
  conditions choose it for the device (`tests/fake_cuda/attention.py`): of all microbatches. Rank 0
  has the first layers; those of DeepSeek-V3 are dense, so its row has no exchange of tokens. Axes
  that have all ranks share one group, which has the name of the last one: with `ep` over all
  ranks, FSDP's collectives are there, too.
- *Graphs*: the operators of each graph that torch.compile captures. All blocks share the graphs.
  *Captured operators* run in them, before fusion. *Eager kernels* are operators that run one by
  one and launch a kernel; views, queries of tensors and new memory are not counted. Both are of
  the whole step.
- *Fused exchanges*: the gathers and scatters of tensor parallelism that asynchronous TP overlaps,
  of all in the graphs.
- *Prefetched gathers*: FSDP's gathers of parameters with a matmul between their start and their
  use, of all.
- *Exposed MB*: bytes of FSDP's collectives, unsharded, without a matmul between their start and
  what waits for them.
- *Host waits*: how often the host waits for the device, also for a copy. The sizes of expert
  parallelism's all-to-all are not counted.

"""


if __name__ == "__main__":
    main()
