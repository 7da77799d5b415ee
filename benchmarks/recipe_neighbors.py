"""Find faster settings near each shipped recipe, on its own cluster.

    python benchmarks/recipe_neighbors.py [RECIPE ...] [--rounds 2] [--write]
    python benchmarks/recipe_neighbors.py RECIPE --try "KEY=VALUE KEY=VALUE" --write

Advice and search know dense models with all parameters trained.  This script knows all models: it
traces the recipe with one setting changed (compiled blocks, float8, activation checkpointing with
the size of a microbatch, degrees of each axis, schedules, exchange of tokens), takes the fastest
neighbor that leaves a tenth of the device free, and looks again from there.  An estimate from
traced pieces (`weft.estimate.pieces`) drops what is far slower or far too large before a trace.

Float8 and smaller optimizer states change the numbers of a step, and the global batch changes the
training; a neighbor keeps those of the recipe.  The recipe with the other precision alone is
traced, too.

``--try`` traces one neighbor only.  ``--write`` keeps all traced neighbors in a JSON file beside
this one, which a test compares with the recipes.  All recipes take hours on two cores; one takes
minutes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from weft.config.errors import InvalidConfig
from weft.config.reader import read_job, recipe_names
from weft.estimate.advice import (
    Change,
    apply_change,
    can_use_float8,
    checkpoint_change,
    expert_changes,
    mesh_changes,
)
from weft.estimate.cost import build_hardware, device_spec
from weft.estimate.forecast import Forecast, forecast
from weft.estimate.pieces import Pieces
from weft.planning.devices import GIB, Device
from weft.planning.model_config import REQUIRED
from weft.planning.plan import Machine, Plan
from weft.planning.plan_text import plan_recipe
from weft.planning.resolve import resolve
from weft.training.machine import detect_machine

RESULTS = Path(__file__).with_suffix(".json")
# Fraction of the device's memory that a neighbor leaves free: fragmentation, NCCL, other batches.
FREE = 0.1
# A round that gains less is the last.
MIN_GAIN = 0.02
# By the estimate: slower or larger neighbors are not traced.
MAX_SLOWDOWN, MAX_MEMORY = 0.95, 1.15
MAX_MICROBATCH = 16


def describe(change: Change) -> str:
    """Return a change as options of a command."""
    return " ".join(f"--{key} {format_value(value)}" for key, value in change.items())


def format_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def checkpoint_changes(plan: Plan) -> Iterator[Change]:
    """Yield modes of activation checkpointing, each with sizes of a microbatch."""
    size = plan.microbatch_size
    sizes = {size, 2 * size, 4 * size, size // 2, size // 4, 1} - {0}
    for mode in ("none", "selective", "full"):
        for size in sorted(sizes):
            if size <= MAX_MICROBATCH and plan.local_batch_size % size == 0:
                change = checkpoint_change(plan.job, mode)
                if size != plan.microbatch_size:
                    change |= {"train.microbatch_size": size}
                if mode != plan.activation_checkpoint.mode or len(change) > 1:
                    yield change


def schedule_changes(plan: Plan) -> Iterator[Change]:
    """Yield other schedules of a pipeline."""
    if plan.pipeline is None:
        return
    for schedule, per_rank in (
        ("1F1B", "auto"),
        ("Interleaved1F1B", 2),
        ("Interleaved1F1B", 4),
        ("ZBVZeroBubble", "auto"),
        ("DualPipeV", "auto"),
    ):
        if (schedule, per_rank) != (plan.schedule_name, plan.job.pipeline.stages_per_rank):
            yield {"pipeline.schedule": schedule, "pipeline.stages_per_rank": per_rank}


def changes(plan: Plan) -> Iterator[Change]:
    """Yield neighbors of a plan that compute the same numbers, to rounding."""
    job = plan.job
    compiled: Change = {} if plan.is_compiled else {"compile.enable": True}
    if compiled:
        yield compiled
    for change in checkpoint_changes(plan):
        yield compiled | change
    if plan.tp > 1 and not plan.async_tp:
        yield compiled | {"parallel.async_tp": True}
    yield from schedule_changes(plan)
    if plan.pipeline is None and plan.dp_shard > 1:
        keeps = plan.reshard_after_forward is False
        yield {"parallel.reshard_after_forward": "always" if keeps else "never"}
    yield from mesh_changes(plan, plan.local_world_size)
    node = plan.local_world_size
    if plan.dp_replicate == 1 and plan.dp_shard > node:
        yield {"parallel.dp_replicate": plan.dp_shard // node, "parallel.dp_shard": node}
    if plan.cp > 1:
        for method in ("ring", "allgather", "ulysses"):
            if method != job.parallel.cp_method:
                yield {"parallel.cp_method": method}
    if plan.model.num_experts:
        yield from expert_changes(plan, node)
        if plan.ep > 1:
            padded = job.parallel.ep_dispatch == "padded"
            yield {"parallel.ep_dispatch": "alltoall" if padded else "padded"}


def other_precision(plan: Plan, machine: Machine) -> Change:
    """Return the change to the other precision of matmuls; empty if the device has one."""
    if plan.float8 != "none":
        return {"precision.float8": "none"}
    if not can_use_float8(plan, machine):
        return {}
    compiled: Change = {} if plan.is_compiled else {"compile.enable": True}
    return compiled | {"precision.float8": "tensorwise"}


class Neighborhood:
    """Forecasts of a recipe's neighbors."""

    def __init__(self, recipe: str) -> None:
        self.plan, self.machine = plan_recipe(recipe, [], [], None, detect_machine)
        local = self.plan.local_world_size
        self.machine = replace(
            self.machine, world_size=self.plan.world_size, local_world_size=local
        )
        device = device_spec(self.plan, self.machine)
        if device is None:
            raise SystemExit(f"the speed of the device of {recipe} is unknown")
        self.device: Device = device
        self.pieces = Pieces(device, cached=True)
        self.plans: dict[str, dict[str, float]] = {}

    def predict(self, change: Change) -> Forecast | None:
        """Trace the recipe with a change; None if it is invalid or far too slow or large."""
        try:
            plan = resolve(apply_change(self.plan.job, change), self.machine)
            if not self.is_near(plan):
                return None
            prediction = forecast(plan, self.machine, self.device, cached=True)
        except (InvalidConfig, ValueError):
            return None
        self.plans[describe(change)] = figures(prediction)
        return prediction

    def is_near(self, plan: Plan) -> bool:
        """Return False if an estimate is certain that a plan is too slow or too large."""
        seconds, memory = self.estimate(plan)
        capacity = self.machine.memory_bytes or math.inf
        own = self.estimate(self.plan)[0]
        return own / seconds > MAX_SLOWDOWN and memory < MAX_MEMORY * capacity

    def estimate(self, plan: Plan) -> tuple[float, float]:
        """Return seconds and bytes by traced pieces."""
        estimate = self.pieces.estimate(plan)
        hardware = build_hardware(plan, self.device)
        return estimate.step_seconds(hardware).total(), estimate.memory_bytes()

    def climb(self, rounds: int) -> tuple[Change, Forecast]:
        """Return the best change that was found, and its forecast."""
        best: Change = {}
        prediction = self.predict({})
        assert prediction is not None, "a recipe can be planned"
        seen = {describe({})}
        for _ in range(rounds):
            before = speed(prediction)
            start = resolve(apply_change(self.plan.job, best), self.machine)
            for step in changes(start):
                change = best | step
                if describe(change) in seen:
                    continue
                seen.add(describe(change))
                neighbor = self.predict(change)
                if neighbor is None:
                    continue
                print(f"    {summary(neighbor)}  {describe(change)}", flush=True)
                if leaves_room(neighbor) and speed(neighbor) > speed(prediction):
                    best, prediction = change, neighbor
            if speed(prediction) < (1 + MIN_GAIN) * before:
                break
        return best, prediction


def leaves_room(prediction: Forecast) -> bool:
    """Return True if a tenth of the device is free."""
    capacity = prediction.capacity_bytes or math.inf
    return prediction.needed_bytes <= (1 - FREE) * capacity


def speed(prediction: Forecast) -> float:
    """Return tokens per second and device."""
    return prediction.tokens_per_second_per_device or 0.0


def summary(prediction: Forecast) -> str:
    gib = prediction.needed_bytes / GIB
    return f"{speed(prediction):9,.0f} tokens/s {prediction.mfu or 0:6.1%} {gib:6.1f} GiB"


def figures(prediction: Forecast) -> dict[str, float]:
    return {
        "tokens_per_second_per_device": round(speed(prediction), 1),
        "mfu": round(prediction.mfu or 0.0, 4),
        "gib": round(prediction.needed_bytes / GIB, 1),
    }


def search_recipe(recipe: str, rounds: int, chosen: list[Change]) -> dict[str, dict[str, float]]:
    """Print and return the plans of a recipe and of its neighbors, by change."""
    near = Neighborhood(recipe)
    own = near.predict({})
    assert own is not None
    print(f"{recipe}\n    {summary(own)}  as shipped", flush=True)
    if chosen:
        for change in chosen:
            neighbor = near.predict(change)
            text = "is invalid, or far too slow" if neighbor is None else summary(neighbor)
            print(f"    {text}  {describe(change)}", flush=True)
        return near.plans
    best, prediction = near.climb(rounds)
    gain = speed(prediction) / speed(own) - 1
    print(f"  best {summary(prediction)}  {gain:+.1%}  {describe(best)}", flush=True)
    change = other_precision(near.plan, near.machine)
    if change and (other := near.predict(change)):
        print(f"  else {summary(other)}  {describe(change)}", flush=True)
    return near.plans


def write_results(recipe: str, plans: dict[str, dict[str, float]]) -> None:
    """Add plans of a recipe to the file; drop recipes that are gone."""
    known = read_results()
    rows = {"date": date.today().isoformat(), "torch": torch.__version__, "plans": plans}
    if recipe in known and known[recipe]["plans"][""] == plans[""]:
        rows["plans"] = known[recipe]["plans"] | plans
    names = recipe_names()
    merged = {name: row for name, row in sorted({**known, recipe: rows}.items()) if name in names}
    RESULTS.write_text(json.dumps(merged, indent=1) + "\n", "utf-8")


def read_results() -> dict[str, Any]:
    """Return the recorded plans by recipe."""
    results: dict[str, Any] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    return results


def parse_change(text: str) -> Change:
    """Return a change of KEY=VALUE words."""
    words = (word.partition("=") for word in text.split())
    return {key: parse_value(value) for key, _, value in words}


def parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("recipes", metavar="RECIPE", nargs="*", help="default: all with a model")
    text = "trace only this neighbor: KEY=VALUE words (repeatable)"
    parser.add_argument("--try", dest="tries", action="append", default=[], help=text)
    parser.add_argument("--rounds", type=int, default=2, help="looks around (default: 2)")
    parser.add_argument("--write", action="store_true", help=f"keep the results in {RESULTS.name}")
    options = parser.parse_args()
    for recipe in options.recipes or neighbors_recipes():
        plans = search_recipe(recipe, options.rounds, [parse_change(t) for t in options.tries])
        if options.write:
            write_results(recipe, plans)


def neighbors_recipes() -> list[str]:
    """Return the recipes with a model for a cluster, without those of a paper."""
    names = [name for name in recipe_names() if not name.startswith("paper/")]
    jobs = {name: read_job(name)[0] for name in names}
    return [
        name
        for name, job in jobs.items()
        if job.model.path != REQUIRED and job.run.cluster != "local"
    ]


if __name__ == "__main__":
    main()
