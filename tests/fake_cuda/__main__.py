"""Print the counts of a step as JSON; for arguments see `tests.fake_cuda.count`."""

from __future__ import annotations

import argparse
import json

from tests.fake_cuda.device import load_guard

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--fault", default="", help="Python code to run before the step")
    options = parser.parse_args()
    load_guard()
    from tests.fake_cuda.step import count_step, plan_recipe

    exec(options.fault)
    pairs = [(key, value) for key, _, value in (o.partition("=") for o in options.overrides)]
    print(json.dumps(count_step(plan_recipe(options.recipe, pairs)).to_dict()))
