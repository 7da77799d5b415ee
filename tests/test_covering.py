"""A covering array lacks no possible pair, holds nothing impossible, and is small."""

from __future__ import annotations

import itertools

from tests.covering import Case, cover_pairs
from tests.layouts import COVERED, parse

AXES = {"a": ["0", "1", "2"], "b": ["0", "1"], "c": ["0", "1", "2", "3"], "d": ["0", "1"]}


def pairs_of(case: Case) -> set[tuple[tuple[str, str], ...]]:
    return set(itertools.combinations(sorted(case.items()), 2))


def test_cover_pairs_of_free_axes_holds_every_pair_in_few_cases() -> None:
    all_names = {
        ((one, x), (two, y))
        for one, two in itertools.combinations(AXES, 2)
        for x in AXES[one]
        for y in AXES[two]
    }
    cases = cover_pairs(AXES)
    assert set().union(*map(pairs_of, cases)) == all_names
    assert all(list(case) == list(AXES) for case in cases)
    assert 12 <= len(cases) <= 14  # not the 48 of the product; 3 * 4 is the least
    assert cover_pairs(AXES) == cases


def test_cover_pairs_with_a_rule_leaves_out_only_impossible_pairs() -> None:
    def is_valid(case: Case) -> bool:
        return not (case.get("a") == "2" and case.get("c") == "3")

    cases = cover_pairs(AXES, is_valid)
    assert all(map(is_valid, cases))
    free = set().union(*map(pairs_of, cover_pairs(AXES)))
    assert free - set().union(*map(pairs_of, cases)) == {(("a", "2"), ("c", "3"))}


def test_covered_layouts_hold_each_pair_of_axes() -> None:
    held = set()
    for layout in COVERED:
        keys = {key for key, _ in parse(layout)[1]}
        held |= set(itertools.combinations(sorted(keys), 2))
    axes = [f"parallel.{axis}" for axis in ("cp", "dp_replicate", "dp_shard", "pp", "tp")]
    difference = {("parallel.dp_replicate", "parallel.dp_shard")}  # one axis of the array
    assert set(itertools.combinations(axes, 2)) - held == difference
