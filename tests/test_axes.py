"""Each place that lists mesh axes names all of them, and CONTRIBUTING.md names each place."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests import job_sizes, layouts, test_remedies
from tests.small import small_job
from weft.config import axes
from weft.config.axes import AXES, BATCH_AXES, DEGREES, TABLE
from weft.config.schema import ParallelSection
from weft.estimate.advice import mesh_changes
from weft.estimate.search import enumerate_candidates
from weft.monitor.profiler import find_axis
from weft.planning.degrees import ParallelDims
from weft.planning.plan import Machine, Plan
from weft.planning.relayout import nearest_layouts
from weft.planning.resolve import resolve

ROOT = Path(__file__).parent.parent
NAMES = [axis.name for axis in TABLE]
OTHERS = [axis for axis in AXES if axis != "dp_shard"]  # dp_shard takes the remaining ranks
MACHINE = Machine("cuda", devices=8, memory_bytes=80 << 30, world_size=16, local_world_size=8)


def planned(axis: str, degree: int) -> Plan:
    sizes = [("model.max_seq_len", "32768"), ("train.seq_len", "32768")]
    sizes += [("train.global_batch_size", "64")]
    return resolve(small_job((f"parallel.{axis}", str(degree)), *sizes), MACHINE)


def advised() -> Iterable[str]:
    """Return the axes whose degree of 2 an advice changes."""
    return [
        axis
        for axis in OTHERS
        if any(f"parallel.{axis}" in change for change in mesh_changes(planned(axis, 2), 8))
    ]


def searched() -> Iterable[str]:
    """Return the axes of which a search tries several degrees."""
    degrees: dict[str, set[int]] = {axis: set() for axis in AXES}
    for candidate in itertools.islice(enumerate_candidates(planned("tp", 2), MACHINE), 5000):
        for axis in AXES:
            degrees[axis].add(candidate.changes["parallel"][axis])
    return [axis for axis, tried in degrees.items() if len(tried) > 1]


def fitted() -> Iterable[str]:
    """Return the axes whose degree, larger than the cluster, becomes smaller."""
    large = {axis: small_job((f"parallel.{axis}", "3")) for axis in OTHERS}
    return [
        axis
        for axis, job in large.items()
        if any(16 % getattr(near.parallel, axis) == 0 for near in nearest_layouts(job, MACHINE, 1))
    ]


def in_text(path: str, pattern: str) -> Iterable[str]:
    return [name for name in NAMES if re.search(pattern.format(name), (ROOT / path).read_text())]


def fields(table: type) -> Iterable[str]:
    return [field.name for field in dataclasses.fields(table)]


# The axes that each place names, and those that it must name.
PLACES: dict[str, tuple[Callable[[], Iterable[str]], Iterable[str]]] = {
    "config/axes.py: MESSAGE_ORDER": (lambda: axes.MESSAGE_ORDER, OTHERS),
    "config/axes.py: REMOVAL_ORDER": (lambda: axes.REMOVAL_ORDER, AXES),
    "config/axes.py: CHART_ORDER": (lambda: axes.CHART_ORDER, NAMES),
    "config/schema.py: ParallelSection": (lambda: ParallelSection.model_fields, DEGREES),
    "config/peer_names.toml": (
        lambda: [
            key.removeprefix("parallel.")
            for key in tomllib.loads((ROOT / "weft/config/peer_names.toml").read_text())
        ],
        DEGREES,
    ),
    "planning/degrees.py: ParallelDims": (lambda: fields(ParallelDims), DEGREES),
    "planning/plan.py: Plan": (lambda: fields(Plan), DEGREES),
    "planning/relayout.py: nearest_layouts": (fitted, OTHERS),
    "estimate/advice.py: mesh_changes": (advised, OTHERS),
    "estimate/search.py: enumerate_candidates": (searched, AXES),
    "reporting/templates/page.css": (
        lambda: in_text("weft/reporting/templates/page.css", r"--{}: var\("),
        NAMES,
    ),
    "tests/layouts.py: TWO_RANKS": (
        lambda: [name.removesuffix("2") for name in layouts.TWO_RANKS],
        AXES,
    ),
    "tests/job_sizes.py: AXES": (lambda: job_sizes.AXES, AXES),
    "tests/test_remedies.py: LAYOUT_KEYS": (lambda: test_remedies.LAYOUT_KEYS, DEGREES),
    "docs/layouts.md": (lambda: in_text("docs/layouts.md", r"`parallel\.{}`"), DEGREES),
    "docs/glossary.md": (lambda: in_text("docs/glossary.md", r"\| axis \|.*`{}`"), DEGREES),
}


@pytest.mark.parametrize("place", PLACES)
def test_place_that_lists_axes_names_each_of_them(place: str) -> None:
    named, needed = PLACES[place]
    found = [name for name in named() if name in NAMES]
    lacks = sorted(set(needed) - set(found))
    assert not lacks, f"{place} lacks {lacks}: see 'Add a mesh axis' in CONTRIBUTING.md"
    assert sorted(found) == sorted(needed), place


def test_lists_that_follow_from_the_table() -> None:
    """The facts that layouts, collectives and numbers depend on, written out once."""
    assert AXES == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    assert axes.PARAMETER_AXES == ("pp", "dp_replicate", "dp_shard", "tp")
    assert axes.EXPERT_AXES == ("pp", "dp_replicate", "efsdp", "ep", "tp")
    assert DEGREES == ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
    assert BATCH_AXES == ("dp_replicate", "dp_shard")
    assert axes.SEQUENCE_AXES == ("cp",)
    assert axes.SHARD_AXES == ("dp_shard", "cp")
    assert axes.FSDP_AXES == ("dp_replicate", "dp_shard", "efsdp")
    assert {"ep", "tp"} == axes.LOCAL_AXES


def test_profile_shard_group_over_both_axes_is_dp_shard() -> None:
    job = small_job(("parallel.dp_shard", "2"), ("parallel.cp", "2"), ("parallel.tp", "4"))
    plan = resolve(job, MACHINE)
    assert find_axis([0, 4, 8, 12], plan) == "dp_shard"
    assert find_axis([0, 4], plan) == "cp"
    assert find_axis([0, 1, 4, 5], plan) == "world"


# --------------------------------------------------------------------------- CONTRIBUTING.md


def listed_places() -> list[str]:
    """Return the files and symbols of the section of CONTRIBUTING.md."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Add a mesh axis\n")[1]
    pattern = r"`([\w/]+\.(?:py|md|css|toml)(?:: \w+)?)`"
    return re.findall(pattern, section.split("\n## ")[0])


def defines(path: Path, symbol: str) -> bool:
    return any(
        getattr(node, "name", getattr(node, "id", "")) == symbol
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    )


def test_each_place_of_the_page_exists() -> None:
    places = listed_places()
    assert len(places) == len(set(places)) > 25
    missing = []
    for place in places:
        name, _, symbol = place.partition(": ")
        path = next((path for path in (ROOT / "weft" / name, ROOT / name) if path.exists()), None)
        if path is None or (symbol and not defines(path, symbol)):
            missing.append(place)
    assert missing == []


def test_page_lists_each_tested_place() -> None:
    assert set(PLACES) - set(listed_places()) == set()
