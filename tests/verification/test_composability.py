"""The table of docs/composability.md is complete, current and reproducible."""

from __future__ import annotations

import os
import random

import pytest

from benchmarks import composability as table
from benchmarks.composability import Technique, combine, pair_key, pairs, read_results, refusals

Pair = tuple[Technique, Technique]
RUNNABLE = [pair for pair in pairs() if combine(*pair) is not None]


def refused_by_record(pair: Pair) -> bool:
    return bool(read_results()[pair_key(*pair)]["outcome"] == "refused")


def test_composability_results_cover_every_pair_and_show_no_defect() -> None:
    results = read_results()
    assert list(results) == [pair_key(*pair) for pair in pairs()]
    assert {name: r for name, r in results.items() if r["outcome"] in ("wrong", "failed")} == {}


def test_composability_page_is_written_from_the_results() -> None:
    assert table.PAGE.read_text("utf-8") == table.page(read_results())


def test_composability_listed_combinations_are_refused() -> None:
    assert all(table.list_combinations().values())


def check_rules(chosen: list[Pair]) -> None:
    different = {
        pair_key(*pair): reasons
        for pair in chosen
        if bool(reasons := refusals(combine(*pair) or {})) != refused_by_record(pair)
    }
    assert different == {}, "run benchmarks/composability.py --changed: the rules have changed"


def test_composability_refusals_equal_the_rules_of_today_in_a_sample() -> None:
    generator = random.Random(0)
    chosen = [pair for pair in RUNNABLE if refused_by_record(pair)]
    check_rules(generator.sample(chosen, min(25, len(chosen))) + generator.sample(RUNNABLE, 25))


@pytest.mark.slow
def test_composability_refusals_equal_the_rules_of_today() -> None:
    check_rules(RUNNABLE)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_composability_pairs_drawn_anew_have_the_recorded_outcome() -> None:
    seed = int.from_bytes(os.urandom(2))
    compiled = [pair for pair in RUNNABLE if "torch.compile" in pair_key(*pair)]
    chosen = [pair for pair in RUNNABLE if pair not in compiled and not refused_by_record(pair)]
    for pair in random.Random(seed).sample(chosen, 40):
        result = table.run_in_process(table.run_pair, combine(*pair) or {})
        assert result["outcome"] == "works", (seed, pair_key(*pair), result)
