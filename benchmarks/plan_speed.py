"""How long planning takes: every shipped recipe on its cluster, and the search for 405B on 512.

    python benchmarks/plan_speed.py [--json] [--only llama3-8b,...] [--no-search]

Each plan is the command `weft plan RECIPE`, in a fresh process, from its start to its last line:
importing torch is half of the quickest.  Beside the seconds stands the target, 20 for a recipe and
180 for the search, on two idle cores; the load of the machine before the start is told, too.
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
    """``weft plan --json`` with these arguments, and how long it took."""
    load = os.getloadavg()[0]
    start = time.perf_counter()
    command = [sys.executable, "-m", "weft.cli", "plan", *arguments, "--json"]
    run = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if run.returncode:
        sys.exit(f"{' '.join(command)}\n{run.stderr}")
    return {"seconds": seconds, "load": load} | {"told": json.loads(run.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--only", help="recipes, separated by commas (all that are shipped)")
    parser.add_argument("--no-search", action="store_true", help="plan only")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else recipe_names()
    rows = []

    def tell(name: str, cluster: str, target: int, found: dict[str, Any], text: str) -> None:
        row = {"recipe": name, "cluster": cluster, "seconds": found["seconds"]}
        rows.append(row | {"target": target, "load": found["load"]})
        if not options.json:
            late = "" if found["seconds"] <= target else "  too long"
            print(
                f"{name:<22} {cluster:<14} {found['seconds']:6.1f} s of {target:3}"
                f"  (load {found['load']:4.1f})  {text}{late}",
                flush=True,
            )

    for name in names:
        found = timed(name)
        told, cluster = found["told"], read_job(name)[0].run.cluster
        fits = {True: "fits", False: "does not fit", None: "capacity unknown"}[told["fits"]]
        tell(name, cluster, PLAN_SECONDS, found, f"{told['peak_memory_gib']:.1f} GiB, {fits}")
    if not options.no_search:
        name, cluster = SEARCHED
        with tempfile.TemporaryDirectory() as folder:
            best = str(Path(folder) / "best.toml")
            found = timed(name, "--cluster", cluster, "--search", "--write", best)
        told = found["told"]
        winner = next(each["layout"] for each in told["best"] if each["winner"])
        text = f"{told['considered']:,} layouts; {winner}"
        tell(f"search {name}", cluster, SEARCH_SECONDS, found, text)
    if options.json:
        print(json.dumps({"rows": rows}, indent=2))


if __name__ == "__main__":
    main()
