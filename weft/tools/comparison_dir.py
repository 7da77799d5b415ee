"""Where a comparison lies: its variants' recipes, its trials' runs, ``comparison.json``."""

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

COMPARISON = "comparison.json"  # in a comparison's folder
SEEDS = 2**32  # that there are


@dataclass(frozen=True)
class TrialResult:
    """How a trial ended."""

    variant: int
    repeat: int  # from 1
    status: int  # of the process; negative: the signal that killed it
    reason: str  # of a failure
    seconds: float


def default_folder(variants: Sequence[Variant]) -> Path:
    """``runs/compare-<recipes>-<hash of what is compared>``."""
    names = "-".join(dict.fromkeys(Path(variant.recipe).stem for variant in variants))[:40]
    text = json.dumps([variant.identity() for variant in variants], sort_keys=True)
    return Path("runs") / f"compare-{names}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def recipe_path(folder: Path, place: int, label: str) -> Path:
    """Where a variant's whole job lies: a file that trains it by itself, too."""
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-.")[:60]
    return folder / f"{place + 1}-{slug}.toml"


def trial_folder(folder: Path, place: int, label: str, repeat: int) -> Path:
    """Where a trial's run lies.  Its name tells what it is, for reports."""
    recipe = recipe_path(folder, place, label)
    return recipe.with_name(f"{recipe.stem}-repeat-{repeat}")


def log_of(run: Path) -> Path:
    """What a trial printed."""
    return run.with_name(f"{run.name}.log")


def seed_of(variants: Sequence[Variant], variant: int, repeat: int) -> int:
    """Of a trial.  Where seeds are what is compared, no two trials share one (as far as 32 bits
    go)."""
    seeds = [v.job.train.seed for v in variants]
    return (seeds[variant] + (repeat - 1) * (max(seeds) - min(seeds) + 1)) % SEEDS


def read_comparison(folder: Path) -> dict[str, Any] | None:
    """What ``comparison.json`` in a folder holds; None if the folder is empty or not there.

    Raises:
        InvalidConfig: if the folder holds anything else.
    """
    path = folder / COMPARISON
    if not folder.exists() or (folder.is_dir() and not path.exists() and _is_empty(folder)):
        return None
    try:
        found = read_json(path)
    except WeftError:
        found = {}
    if not found:
        raise not_ours(folder, "is neither empty nor a comparison's folder")
    return found


def not_ours(folder: Path, rule: str) -> InvalidConfig:
    """What to say of a folder that something else lies in."""
    return InvalidConfig([ConfigError("--out", str(folder), rule, "use another folder")])


def _is_empty(folder: Path) -> bool:
    return all(entry.name == ".lock" for entry in folder.iterdir())


def open_comparison(
    folder: Path, variants: Sequence[Variant]
) -> tuple[list[TrialResult], list[int]]:
    """The trials of the comparison in ``folder`` that have ended, and after how many of them
    people looked at the verdict; none if it is new.

    Raises:
        InvalidConfig: if the folder holds anything else.
    """
    found = read_comparison(folder)
    if found is None:
        return [], []
    if "compared" not in found:
        raise not_ours(folder, "holds a comparison that was only planned")
    ours, theirs = [v.identity() for v in variants], found["compared"]
    with reading(folder / COMPARISON):
        if ours != theirs:
            raise not_ours(folder, f"holds another comparison: {_difference(ours, theirs)}")
        return [TrialResult(**ended) for ended in found["ended"]], [*map(int, found["looks"])]


def stored(
    variants: Sequence[Variant], ended: Sequence[TrialResult], looks: Sequence[int]
) -> dict[str, Any]:
    """What `open_comparison` reads again."""
    return {
        "compared": [variant.identity() for variant in variants],
        "ended": [asdict(each) for each in ended],
        "looks": list(looks),
    }


def _difference(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    labels, before = ([each["label"] for each in some] for some in (ours, theirs))
    if labels != before:
        return f"of {'; '.join(before)}"
    for mine, other in zip(ours, theirs, strict=True):
        for key in {**mine["job"], **other["job"]}:
            now, then = (each["job"].get(key, MISSING) for each in (mine, other))
            if now != then:
                return f"{key} of {mine['label']} was {then}, and is {now}"
    raise AssertionError("equal after all")
