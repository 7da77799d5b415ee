"""Files of a comparison: recipes of variants, runs of trials, ``comparison.json``."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.config.errors import MISSING, ConfigError, InvalidConfig, WeftError
from weft.config.files import read_json, reading
from weft.tools.variants import Variant

COMPARISON = "comparison.json"
NUM_SEEDS = 2**32


@dataclass(frozen=True)
class TrialResult:
    """The outcome of a trial."""

    variant: int
    repeat: int  # from 1
    status: int  # exit status; negative: the signal that killed the process
    reason: str  # of a failure
    seconds: float


def default_dir(variants: Sequence[Variant]) -> Path:
    """Return ``runs/compare-<recipes>-<hash of the variants>``."""
    names = "-".join(dict.fromkeys(Path(variant.recipe).stem for variant in variants))[:40]
    text = json.dumps([variant.identity() for variant in variants], sort_keys=True)
    return Path("runs") / f"compare-{names}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def recipe_path(directory: Path, index: int, label: str) -> Path:
    """Return the path of a variant's complete job, which ``weft train`` accepts."""
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-.")[:60]
    return directory / f"{index + 1}-{slug}.toml"


def trial_dir(directory: Path, index: int, label: str, repeat: int) -> Path:
    """Return the run directory of a trial; reports show its name."""
    recipe = recipe_path(directory, index, label)
    return recipe.with_name(f"{recipe.stem}-repeat-{repeat}")


def log_path(run: Path) -> Path:
    """Return the path of a trial's output."""
    return run.with_name(f"{run.name}.log")


def trial_seed(variants: Sequence[Variant], variant: int, repeat: int) -> int:
    """Return a trial's seed, unique (modulo 2^32) if the variants' seeds differ."""
    seeds = [v.job.train.seed for v in variants]
    return (seeds[variant] + (repeat - 1) * (max(seeds) - min(seeds) + 1)) % NUM_SEEDS


def read_comparison(directory: Path) -> dict[str, Any] | None:
    """Read ``comparison.json``; return None if the directory is empty or missing.

    Raises:
        InvalidConfig: if the directory holds other files.
    """
    path = directory / COMPARISON
    if not directory.exists() or (
        directory.is_dir() and not path.exists() and _is_empty(directory)
    ):
        return None
    try:
        record = read_json(path)
    except WeftError:
        record = {}
    if not record:
        raise invalid_out(directory, "is neither empty nor the directory of a comparison")
    return record


def invalid_out(directory: Path, rule: str) -> InvalidConfig:
    """Return the error for a directory that --out cannot use."""
    return InvalidConfig([ConfigError("--out", str(directory), rule, "use another directory")])


def _is_empty(directory: Path) -> bool:
    return all(entry.name == ".lock" for entry in directory.iterdir())


def open_comparison(
    directory: Path, variants: Sequence[Variant]
) -> tuple[list[TrialResult], list[int]]:
    """Read the results of a comparison's trials; empty if the comparison is new.

    Returns:
        The results, and the numbers of trials after which earlier calls gave a verdict.

    Raises:
        InvalidConfig: if the directory holds other files or another comparison.
    """
    record = read_comparison(directory)
    if record is None:
        return [], []
    if "compared" not in record:
        raise invalid_out(directory, "holds a comparison made with --plan-only")
    current, previous = [v.identity() for v in variants], record["compared"]
    with reading(directory / COMPARISON):
        if current != previous:
            difference = _describe_difference(current, previous)
            raise invalid_out(directory, f"holds another comparison: {difference}")
        results = [TrialResult(**result) for result in record["ended"]]
        return results, [*map(int, record["looks"])]


def comparison_record(
    variants: Sequence[Variant], results: Sequence[TrialResult], looks: Sequence[int]
) -> dict[str, Any]:
    """Return the part of ``comparison.json`` that `open_comparison` reads."""
    return {
        "compared": [variant.identity() for variant in variants],
        "ended": [asdict(result) for result in results],
        "looks": list(looks),
    }


def _describe_difference(current: list[dict[str, Any]], previous: list[dict[str, Any]]) -> str:
    labels, previous_labels = ([v["label"] for v in variants] for variants in (current, previous))
    if labels != previous_labels:
        return f"of {'; '.join(previous_labels)}"
    for new, old in zip(current, previous, strict=True):
        for key in {**new["job"], **old["job"]}:
            value, old_value = (variant["job"].get(key, MISSING) for variant in (new, old))
            if value != old_value:
                return f"{key} of {new['label']} was {old_value}, and is {value}"
    raise AssertionError("the variants are equal")
