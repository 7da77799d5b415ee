"""Print the counts of a step as JSON: ``python -m tests.fake_cuda RECIPE [KEY=VALUE ...]``."""

from __future__ import annotations

import json
import sys

from tests.fake_cuda.device import load_guard

if __name__ == "__main__":
    load_guard()
    from tests.fake_cuda.step import count_step, plan_recipe

    recipe, *pairs = sys.argv[1:]
    plan = plan_recipe(
        recipe, [(key, value) for key, _, value in (p.partition("=") for p in pairs)]
    )
    print(json.dumps(count_step(plan).to_dict()))
