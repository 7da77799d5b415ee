"""Print the counts of a step, or its built kernels, as JSON; see `tests.fake_cuda`."""

from __future__ import annotations

import argparse
import json

from tests.fake_cuda.device import load_guard

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--fault", default="", help="Python code to run before the step")
    parser.add_argument("--kernels", type=int, metavar="ARCHITECTURE", help="build, do not count")
    options = parser.parse_args()
    load_guard()
    from tests.fake_cuda.step import count_step, plan_recipe

    exec(options.fault)
    pairs = [(key, value) for key, _, value in (o.partition("=") for o in options.overrides)]
    plan = plan_recipe(options.recipe, pairs)
    if options.kernels:
        from tests.fake_cuda.kernels import build_kernels, to_list

        print(json.dumps(to_list(build_kernels(plan, options.kernels))))
    else:
        print(json.dumps(count_step(plan).to_dict()))
