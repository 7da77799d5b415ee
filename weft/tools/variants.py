"""What is compared: recipes, each with every combination of the values that vary."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf, prod
from pathlib import Path
from typing import Any

from weft.config.errors import MISSING, ConfigError, InvalidConfig
from weft.config.reader import read_job
from weft.config.schema import Job, flatten
from weft.plan.resolve import Plan
from weft.train.job_checks import prepare_job
from weft.train.setup import joined

Overrides = list[tuple[str, str]]

# Of a trial: where it lies and what it adds up to is the comparison's to say.
OWN = ("run.dir", "checkpoint.dir")
# Work beside training, left out unless asked for.
SPARED = [("checkpoint.interval", "0"), ("monitor.report", "false")]
MOST_LABEL = 32  # characters of a value in a label


@dataclass(frozen=True)
class Variant:
    """One of what is compared.  ``plan``: None if it cannot be, for the reasons in ``problems``."""

    label: str
    recipe: str
    job: Job  # as far as it could be read
    plan: Plan | None
    problems: tuple[ConfigError, ...] = ()

    def identity(self) -> dict[str, Any]:
        """What must be the same for results to count for it."""
        job = {key: value for key, value in flatten(self.job).items() if key not in OWN}
        return dict(json.loads(json.dumps({"label": self.label, "job": job}, default=str)))


def parse_vary(text: str, problems: list[ConfigError]) -> list[tuple[str, list[str]]]:
    """``parallel.tp=1,2`` as the key and its values; a mistake is added to ``problems`` instead."""
    key, equals, values = text.partition("=")
    key = key.removeprefix("--").replace("-", "_")
    found = split_values(values)
    if not equals or not all(found):
        rule, remedy = "is no key with values", "write --vary section.key=VALUE,VALUE"
        problems.append(ConfigError("--vary", text, rule, remedy))
        return []
    if len(set(found)) < len(found):
        problems.append(ConfigError("--vary", text, "names a value twice", "leave one out"))
        return []
    return [(key, found)]


def split_values(text: str) -> list[str]:
    """Parts between commas that are outside of brackets and quotes.

    Quotes round a whole part only protect its commas, and go.
    """
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'" and (depth > 0 or not parts[-1].strip()):
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
            if letter == "," and depth <= 0:
                parts.append("")
                continue
        parts[-1] += letter
    stripped = [part.strip() for part in parts]
    return [re.sub(r"""^(["'])([^"']*)\1$""", r"\2", part) for part in stripped]


def parse_margin(text: str, problems: list[ConfigError]) -> tuple[float, bool]:
    """``0.5%`` of the loss, or nats; whether it is a part.  A mistake is added to ``problems``."""
    number, relative = text.removesuffix("%"), text.endswith("%")
    value = _number("--margin", number, problems, "0.5% of the loss, or 0.01 nats")
    return (value / 100 if relative else value), relative


def parse_price(text: str | None, problems: list[ConfigError]) -> float | None:
    """Of a device's hour, if given."""
    return None if text is None else _number("--price", text, problems, "a device's hour: 2.5")


def _number(name: str, text: str, problems: list[ConfigError], example: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < inf:
        problems.append(ConfigError(name, text, "is no number above 0", f"write {example}"))
    return value


def read_variants(
    recipes: Sequence[str],
    vary: Sequence[tuple[str, Sequence[str]]],
    overrides: Overrides,
    problems: Iterable[ConfigError],
    read: Callable[[str, Overrides], tuple[Job, Plan]],
) -> list[Variant]:
    """Every recipe with every combination of values.

    Args:
        vary: keys, each with its values.
        overrides: of all variants.
        problems: what was wrong with the command line already.
        read: makes the job and its plan of a recipe and overrides, or raises InvalidConfig.

    Raises:
        InvalidConfig: if there is only one, or none of them can be; a variant that cannot be beside
            one that can is told of in its row.
    """
    problems = list(problems)
    varied = [key for key, _ in vary]
    for key in dict.fromkeys(varied):
        if varied.count(key) > 1 or any(key == name for name, _ in overrides):
            rule, remedy = "is varied and set, or varied twice", "write it once, with all values"
            problems.append(ConfigError(key, MISSING, rule, remedy))
    for name in OWN:
        if any(key == name for key, _ in [*vary, *overrides]):
            rule = "each trial has a folder of its own below the comparison's"
            problems.append(ConfigError(name, MISSING, rule, "use --out FOLDER"))
    if len(recipes) * prod(len(values) for _, values in vary) < 2 and not problems:
        remedy = "name another recipe, or --vary section.key=VALUE,VALUE"
        problems.append(
            ConfigError("RECIPE", MISSING, "is alone: there is nothing to compare", remedy)
        )
    variants: list[Variant] = []
    names = _names(recipes)
    keys = _names_of_keys(varied)
    for recipe, name in zip(recipes, names, strict=True):
        for values in product(*(values for _, values in vary)):
            parts = [f"{k}={_cut(value)}" for k, value in zip(keys, values, strict=True)]
            label = ", ".join([*([name] if len(recipes) > 1 else []), *parts])
            same = sum(re.sub(r" \(\d+\)$", "", v.label) == label for v in variants)
            label += f" ({same + 1})" if same else ""
            own = [(key, value) for (key, _), value in zip(vary, values, strict=True)]
            job, _, unknown = read_job(recipe, [*overrides, *own])
            if missing := [each for each in unknown if each.key in ("recipe", "extends")]:
                problems += missing
                continue
            try:
                job, plan = read(recipe, [*overrides, *own])
                variants.append(Variant(label, recipe, job, plan))
            except InvalidConfig as error:
                variants.append(Variant(label, recipe, job, None, tuple(error.problems)))
    if variants and all(variant.plan is None for variant in variants):
        problems += [problem for variant in variants for problem in variant.problems]
    if problems:
        raise InvalidConfig({str(problem): problem for problem in problems}.values())
    return variants


def prepare(out: str, recipe: str, overrides: Overrides) -> tuple[Job, Plan]:
    """A variant to be trained on this machine, all of it checked but what only starting it tells.

    Checkpoints and reports of each run cost time that is not compared: there are none, but for the
    last checkpoint, unless asked for.

    Args:
        out: where the comparison's folder will be.

    Raises:
        InvalidConfig: with every reason why it cannot be.
    """
    if joined():
        rule = "says that this is a rank, but weft compare starts runs of its own"
        raise InvalidConfig(
            [ConfigError("WORLD_SIZE", MISSING, rule, "start it outside of torchrun")]
        )
    own = [("checkpoint.dir", "auto"), ("run.dir", f"{out}/trial")]
    try:
        job, _, plan = prepare_job(recipe, [*SPARED, *overrides, *own])
    except InvalidConfig as error:
        told = (
            replace(p, key="--out", value=out) if p.key == "run.dir" else p for p in error.problems
        )
        raise InvalidConfig(told) from error
    if plan.node_counts[-1] > 1:
        rule = "a comparison trains on one machine"
        raise InvalidConfig([ConfigError("run.nodes", job.run.nodes, rule, "use 1")])
    return job, plan


def _names(recipes: Sequence[str]) -> list[str]:
    """Short ones, if they are different."""
    short = [Path(recipe).stem for recipe in recipes]
    return short if len(set(short)) == len(set(recipes)) else list(recipes)


def _names_of_keys(keys: Sequence[str]) -> list[str]:
    """``parallel.tp`` is tp, ``activation_checkpoint.mode`` is activation_checkpoint; whole where that says too little."""
    parts = [key.partition(".") for key in keys]
    short = [s if last in ("kind", "enable") else last or s for s, _, last in parts]
    return [a if short.count(a) == 1 else key for a, key in zip(short, keys, strict=True)]


def _cut(value: str) -> str:
    return value if len(value) <= MOST_LABEL else f"{value[: MOST_LABEL - 3]}..."
