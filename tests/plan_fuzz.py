"""Random plans: ``weft plan`` of random jobs on random clusters, in this process.

Half of the jobs are small models of `tests.job_space`; the others are shipped recipes with
fewer layers and random keys.  Every key whose type says its values is drawn, also those that
`tests.job_space` excludes because they need a GPU.  `check` returns what is wrong:

- an exception, or an exit status other than 0, 1 and 2
- an error without a message
- a number that is not finite, or negative
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import shlex
import traceback
from collections.abc import Iterator
from typing import Any

from tests.job_sizes import AXES, OverrideMap, parallel_degrees
from tests.job_space import (
    DEGREES,
    _add_override,
    _named_keys,
    candidate_values,
    draw_job,
)
from weft.cli.main import main
from weft.config.errors import InvalidConfig
from weft.config.reader import recipe_names
from weft.planning.devices import load_clusters
from weft.planning.needs import list_keys
from weft.planning.plan_text import plan_recipe
from weft.training.machine import detect_machine

# Values of keys whose type is not enough, or with values that only a GPU or a long run has.
VALUES = {
    "run.device": ("cpu", "cuda"),
    "run.ranks": ("1", "8", "64"),
    "run.local_ranks": ("1", "4", "8"),
    "train.steps": ("1", "100000"),
    "train.epochs": ("1", "0.5"),
    "train.global_batch_size": ("1", "24", "256", "4096"),
    "train.microbatch_size": ("1", "2", "3", "8"),
    "train.seq_len": ("128", "1000", "8192", "131072"),
    "parallel.ep_dispatch": ("padded",),
    "parallel.ep": ("2", "3", "4", "8"),
    "pipeline.stages_per_rank": ("1", "2", "3", "auto"),
    "pipeline.layers_per_stage": ("1,1", "2,2", "3,1,2,2"),
    "lora.targets": ("q_proj,v_proj", "o_proj,down_proj", "embed_tokens,lm_head", "all"),
    "checkpoint.interval": ("1", "7"),
    "train.eval_interval": ("1", "5"),
    "train.eval_sequences": ("1", "64"),
}
OPTIONS = (["--json"], ["--rank-map"], ["--price", "2.5"], ["--price", "0"])
NUMBER = re.compile(r"(?<![\w.-])[-+]?(nan|inf)\b(?! [a-z])|(?<![\w.,])-\d[\d,.]*(?= ?(GiB|ms))")


def draw(seed: str) -> list[str]:
    """Return the words of a random command; a pure function of the seed.

    Three of four jobs are changed until they are valid.
    """
    rng = random.Random(f"plan {seed}")
    if rng.random() < 0.5:
        recipe = "demo"
        job = draw_job(rng.randrange(1000), rng.randrange(100000), {}, 8)
        overrides = {key: text for key, text in job.overrides.items() if key != "run.device"}
    else:
        recipe = rng.choice(recipe_names())
        pp = rng.choice((1, 1, 1, 2, 4))
        layers = pp * rng.randint(1, 3) + rng.randint(0, 1)
        overrides = {"model.num_layers": str(layers), "parallel.pp": str(pp)}
        for axis in ("tp", "cp", "dp_replicate"):
            overrides[f"parallel.{axis}"] = str(rng.choice((1, 1, 2, 3, 4, 8)))
    candidates = {key: VALUES.get(key) or candidate_values(key) for key in list_keys()}
    drawable = [key for key, texts in candidates.items() if texts and key not in DEGREES]
    for key in rng.sample(drawable, rng.choice((0, 2, 4, 6, 9))):
        _add_override(overrides, key, rng.choice(candidates[key]), rng)
    if rng.random() < 0.8:
        overrides.pop("parallel.dp_shard", None)  # follows the cluster
    cluster = _draw_cluster(overrides, rng)
    if rng.random() < 0.75:
        _make_valid(recipe, overrides, cluster, rng)
    options = rng.choice(OPTIONS) if rng.random() < 0.5 else []
    if recipe == "demo" and rng.random() < 0.03:
        options = ["--search"]
    words = [word for key, text in overrides.items() for word in (f"--{key}", text)]
    return ["plan", recipe, "--cluster", cluster, *options, *words]


def _draw_cluster(overrides: OverrideMap, rng: random.Random) -> str:
    """Draw a device, mostly a number of ranks that fits the degrees, and a batch that fits it."""
    ranks = rng.choice((1, 2, 8, 24, 256))
    if rng.random() < 0.9:
        ranks = rng.choice((1, 1, 2, 4))
        for degree in parallel_degrees(overrides, AXES).values():
            ranks *= degree
    local = max(n for n in (1, 2, 3, 4, 6, 8) if ranks % n == 0)
    if rng.random() < 0.8:
        overrides["train.global_batch_size"] = str(ranks * rng.choice((1, 2, 4, 8)))
    name = rng.choice([*load_clusters()[0]]).replace(" ", "-")
    return "local" if rng.random() < 0.03 else f"{ranks // local}x{local}x{name}"


def _make_valid(recipe: str, overrides: OverrideMap, cluster: str, rng: random.Random) -> None:
    """Remove keys until there is a plan, or no key is left."""
    while overrides:
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                plan_recipe(recipe, [*overrides.items()], (), cluster, detect_machine)
        except InvalidConfig as invalid:
            named = [key for error in invalid.errors for key in _named_keys(error, overrides)]
            removable = [key for key in named if key != "model.num_layers"]
            del overrides[rng.choice(removable or [*overrides])]
        except Exception:  # `check` shows it
            return
        else:
            return


def check(words: list[str]) -> str:
    """Run the command; return what is wrong, or nothing."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(words)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    except Exception:
        return traceback.format_exc()
    text = out.getvalue()
    if status not in (0, 1, 2) or "Traceback" in text + err.getvalue():
        return f"status {status}: {err.getvalue()}"
    if status and not (text + err.getvalue()).strip():
        return f"status {status} without a message"
    if "--json" in words and not status:
        return "; ".join(_wrong_numbers(json.loads(text), "")) or ""
    wrong = NUMBER.search(text)
    return f"{wrong[0]!r} in {text}" if wrong else ""


def _wrong_numbers(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _wrong_numbers(item, f"{path}.{key}")
    elif isinstance(value, list):
        for item in value:
            yield from _wrong_numbers(item, f"{path}[]")
    elif isinstance(value, float | int) and not 0 <= value < float("inf"):
        yield f"{path} = {value}"


def fuzz(seed: int, count: int) -> list[str]:
    """Check random commands; return each failing one with what is wrong."""
    failures = []
    for index in range(count):
        words = draw(f"{seed} {index}")
        if found := check(words):
            failures.append(f"{shlex.join(['weft', *words])}\n{found}")
    return failures
