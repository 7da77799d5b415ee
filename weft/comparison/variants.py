"""Read the variants of a comparison: recipes with combinations of values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf, prod
from typing import Any

from weft.config.errors import MISSING, ConfigError, ConfigErrors, InvalidConfig
from weft.config.reader import read_job, recipe_title
from weft.config.schema import Job, flatten
from weft.conversion.adapter_path import adopt_paths
from weft.planning.plan import Plan
from weft.preparation.job_checks import prepare_job
from weft.training.machine import is_launched_rank

Overrides = list[tuple[str, str]]

# Keys that the comparison sets for each trial.
TRIAL_KEYS = ("run.dir", "checkpoint.dir")
# Work that would disturb the timing; off unless the user sets the key.
DEFAULT_OVERRIDES = [("checkpoint.interval", "0"), ("monitor.report", "false")]
MAX_LABEL_CHARS = 32  # of a value
# Keys of [launch] on which the speed or the numbers of a trial may depend.
LAUNCH_TRIAL_KEYS = frozenset(
    f"launch.{name}"
    for name in (
        *("image", "setup", "mounts", "env", "instance_type", "network", "queue", "reservation"),
        *("topology", "node_labels", "cpus", "memory", "spot", "container", "options"),
        "srun_options",
    )
)


@dataclass(frozen=True)
class Variant:
    """A variant of a comparison; an invalid one has ``errors``.

    The plan is None for an invalid variant, and for those that are read from ``comparison.json``.
    """

    label: str
    recipe: str
    job: Job  # with defaults for invalid keys
    plan: Plan | None
    errors: tuple[str, ...] = ()

    @property
    def is_valid(self) -> bool:
        """Return True if the variant can run."""
        return not self.errors

    def identity(self) -> dict[str, Any]:
        """Return the label and keys that earlier results must share."""
        job = {key: value for key, value in flatten(self.job).items() if _is_compared(key)}
        return dict(json.loads(json.dumps({"label": self.label, "job": job}, default=str)))


def _is_compared(key: str) -> bool:
    return key in LAUNCH_TRIAL_KEYS or not (key in TRIAL_KEYS or key.startswith("launch."))


def parse_vary(text: str, errors: ConfigErrors) -> list[tuple[str, list[str]]]:
    """Parse ``parallel.tp=1,2`` into key and values; append errors."""
    key, equals, values = text.partition("=")
    key = key.removeprefix("--").replace("-", "_")
    parts = split_values(values)
    if not equals or not all(parts):
        rule, remedy = "is not a key with values", "write --vary section.key=VALUE,VALUE"
        errors.add("--vary", rule, remedy, value=text)
        return []
    if len(set(parts)) < len(parts):
        errors.add("--vary", "names a value twice", "remove one", value=text)
        return []
    return [(key, parts)]


def split_values(text: str) -> list[str]:
    """Split at commas outside brackets and quotes; strip quotes around a part."""
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


def parse_margin(text: str, errors: ConfigErrors) -> tuple[float, bool]:
    """Parse ``0.5%`` of the loss or nats; return (value, is a fraction)."""
    number, relative = text.removesuffix("%"), text.endswith("%")
    value = _parse_positive("--margin", number, errors, "0.5% of the loss, or 0.01 nats")
    return (value / 100 if relative else value), relative


def parse_price(text: str | None, errors: ConfigErrors) -> float | None:
    """Parse the price of a device-hour, if given."""
    return (
        None
        if text is None
        else _parse_positive("--price", text, errors, "the price of a device-hour, such as 2.5")
    )


def _parse_positive(name: str, text: str, errors: ConfigErrors, example: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < inf:
        errors.add(name, "is not a number above 0", f"write {example}", value=text)
    return value


def read_variants(
    recipes: Sequence[str],
    vary: Sequence[tuple[str, Sequence[str]]],
    overrides: Overrides,
    cli_errors: Iterable[ConfigError],
    read: Callable[[str, Overrides], Plan],
    launches: bool = False,
) -> list[Variant]:
    """Read every recipe with every combination of values.

    Args:
        recipes: names or paths of recipes.
        vary: keys, each with its values.
        overrides: of all variants.
        cli_errors: errors that the command line already has.
        read: returns the plan of a recipe and overrides, or raises InvalidConfig.
        launches: the trials are jobs of a cluster.

    Raises:
        InvalidConfig: if there is only one variant, if all are invalid, or if one is invalid and
            the trials are jobs of a cluster.  Otherwise an invalid variant keeps its errors.
    """
    errors = ConfigErrors()
    errors += cli_errors
    varied = [key for key, _ in vary]
    for key in dict.fromkeys(varied):
        if varied.count(key) > 1 or any(key == name for name, _ in overrides):
            rule, remedy = "is given more than once", "give it once, with all values"
            errors.add(key, rule, remedy)
    for name in TRIAL_KEYS:
        if any(key == name for key, _ in [*vary, *overrides]):
            rule = "cannot be set, because the comparison sets it for each trial"
            errors.add(name, rule, "use --out DIRECTORY")
    for key in varied:
        if key.startswith("launch.") and not launches:
            rule = "has no effect on trials of this machine"
            errors.add(key, rule, "compare its values on a cluster, with weft launch --vary")
        elif key.startswith("launch.") and ".".join(key.split(".")[:2]) not in LAUNCH_TRIAL_KEYS:
            rule = "cannot be compared, because the steps of a trial do not depend on it"
            errors.add(key, rule, f"set it for all trials, with --{key} VALUE")
    if len(recipes) * prod(len(values) for _, values in vary) < 2 and not errors:
        remedy = "name another recipe, or --vary section.key=VALUE,VALUE"
        errors.add("RECIPE", "is the only variant", remedy)
    variants: list[Variant] = []
    invalid: list[ConfigError] = []
    names = _short_names(recipes)
    keys = _short_key_names(varied)
    for recipe, name in zip(recipes, names, strict=True):
        for values in product(*(values for _, values in vary)):
            parts = [f"{k}={_truncate(value)}" for k, value in zip(keys, values, strict=True)]
            label = ", ".join([*([name] if len(recipes) > 1 else []), *parts])
            same = sum(re.sub(r" \(\d+\)$", "", v.label) == label for v in variants)
            label += f" ({same + 1})" if same else ""
            own = [(key, value) for (key, _), value in zip(vary, values, strict=True)]
            job, _, recipe_errors = read_job(recipe, [*overrides, *own])
            if missing := [p for p in recipe_errors if p.key in ("recipe", "extends")]:
                errors += missing
                continue
            try:
                plan = read(recipe, [*overrides, *own])
                variants.append(Variant(label, recipe, plan.job, plan))
            except InvalidConfig as error:
                invalid += error.errors
                reasons = tuple(map(str, error.errors))
                variants.append(Variant(label, recipe, job, None, reasons))
    if launches or not any(variant.is_valid for variant in variants):
        errors += invalid
    if errors:
        raise InvalidConfig({str(error): error for error in errors}.values())
    return variants


def prepare_variant(out: str, recipe: str, overrides: Overrides) -> Plan:
    """Check a variant that will train on this machine, and return its plan.

    Checkpoints and reports would disturb the timing: except for the last checkpoint they are off
    unless the user sets their keys.

    Args:
        out: directory of the comparison.
        recipe: see `read_job`.
        overrides: see `read_job`.

    Raises:
        InvalidConfig: with every reason why the variant cannot run.
    """
    if is_launched_rank():
        rule = "is set, so this is a rank, but weft compare starts its own runs"
        raise InvalidConfig([ConfigError("WORLD_SIZE", MISSING, rule, "run it outside torchrun")])
    own = [("checkpoint.dir", "auto"), ("run.dir", f"{out}/trial")]
    try:
        _, plan = prepare_job(recipe, [*DEFAULT_OVERRIDES, *overrides, *own], adopt=adopt_paths)
    except InvalidConfig as error:
        errors = (
            replace(p, key="--out", value=out) if p.key == "run.dir" else p for p in error.errors
        )
        raise InvalidConfig(errors) from error
    if plan.node_counts[-1] > 1:
        rule = "does not work in a comparison, which trains on one machine"
        raise InvalidConfig([ConfigError("run.nodes", plan.job.run.nodes, rule, "use 1")])
    return plan


def _short_names(recipes: Sequence[str]) -> list[str]:
    """Return short names of the recipes, if they are unique."""
    short = [recipe_title(recipe).rpartition("/")[2] for recipe in recipes]
    return short if len(set(short)) == len(set(recipes)) else list(recipes)


def _short_key_names(keys: Sequence[str]) -> list[str]:
    """Shorten ``parallel.tp`` to tp, ``optim.name`` to optim; not duplicates."""
    parts = [key.partition(".") for key in keys]
    generic = ("kind", "name", "mode", "enable")
    short = [section if last in generic else last or section for section, _, last in parts]
    return [name if short.count(name) == 1 else key for name, key in zip(short, keys, strict=True)]


def _truncate(value: str) -> str:
    return value if len(value) <= MAX_LABEL_CHARS else f"{value[: MAX_LABEL_CHARS - 3]}..."
