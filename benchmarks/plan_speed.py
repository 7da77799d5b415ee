"""Measure planning time: every shipped recipe, and the search for 405B.

    python benchmarks/plan_speed.py [--json] [--only llama3-8b,...] [--no-search]

Each plan is the command `weft plan RECIPE` in a new process, measured from its start to its last
line; half of the fastest plan is the import of torch.  The targets on two idle cores are 20 s for a
recipe and 180 s for the search.  The result includes the load of the machine before the start.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from weft.config.reader import read_job, recipe_names

PLAN_SECONDS, SEARCH_SECONDS = 20, 180
SEARCHED = ("llama3-405b", "64x8xH100")


def timed(*arguments: str) -> dict[str, Any]:
    """Run ``weft plan --json``; return its result and seconds."""
    load = os.getloadavg()[0]
    start = time.perf_counter()
    command = [sys.executable, "-m", "weft", "plan", *arguments, "--json"]
    run = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if run.returncode:
        sys.exit(f"{' '.join(command)}\n{run.stderr}")
    return {"seconds": seconds, "load": load} | {"plan": json.loads(run.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--only", help="recipes, separated by commas (all that are shipped)")
    parser.add_argument("--no-search", action="store_true", help="plan only")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else recipe_names()
    rows = []

    def print_report(
        name: str, cluster: str, target: int, actual: dict[str, Any], text: str
    ) -> None:
        row = {"recipe": name, "cluster": cluster, "seconds": actual["seconds"]}
        rows.append(row | {"target": target, "load": actual["load"]})
        if not options.json:
            late = "" if actual["seconds"] <= target else "  too long"
            print(
                f"{name:<22} {cluster:<14} {actual['seconds']:6.1f} s of {target:3}"
                f"  (load {actual['load']:4.1f})  {text}{late}",
                flush=True,
            )

    for name in names:
        result = timed(name)
        report, cluster = result["plan"], read_job(name)[0].run.cluster
        fits = {True: "fits", False: "does not fit", None: "capacity unknown"}[report["fits"]]
        print_report(
            name, cluster, PLAN_SECONDS, result, f"{report['peak_memory_gib']:.1f} GiB, {fits}"
        )
    if not options.no_search:
        name, cluster = SEARCHED
        with tempfile.TemporaryDirectory() as directory:
            best = str(Path(directory) / "best.toml")
            result = timed(name, "--cluster", cluster, "--search", "--write", best)
        report = result["plan"]
        winner = next(item["layout"] for item in report["best"] if item["winner"])
        text = f"{report['considered']:,} layouts; {winner}"
        print_report(f"search {name}", cluster, SEARCH_SECONDS, result, text)
    if options.json:
        print(json.dumps({"rows": rows}, indent=2))


if __name__ == "__main__":
    main()
