"""docs/memory.md: its figures are the recorded estimates, which pieces still give."""

from __future__ import annotations

import json

import pytest

from benchmarks.memory_page import (
    BY_TITLE,
    GPUS,
    MARGIN,
    PAGE,
    RESULTS,
    TITLES,
    TRACED,
    WAYS,
    errors,
    estimate,
    fewest,
    render,
)
from weft.planning.devices import get_device

RECORD = json.loads(RESULTS.read_text("utf-8"))


def test_memory_page_is_of_the_recorded_estimates() -> None:
    """``python benchmarks/memory_page.py --write`` updates the page."""
    assert PAGE.read_text("utf-8") == render(RECORD)
    assert [*RECORD["models"]] == [*TITLES]
    assert len(RECORD["traced"]) == len(TRACED)


def test_memory_page_counts_gpus_with_a_margin_for_its_errors() -> None:
    assert min(errors(RECORD)) > 1 / MARGIN - 1
    for rows in RECORD["models"].values():
        for row in rows.values():
            counts = [float(fewest(row, gpu).replace("-", "inf")) for gpu in GPUS]
            assert counts == sorted(counts, reverse=True)
            for gpu, count in zip(GPUS, counts, strict=True):
                size = row["gib"].get(f"{count:.0f}")
                assert size is None or MARGIN * size <= get_device(gpu).memory_gib


@pytest.mark.parametrize(
    ("title", "way"),
    [
        ("Llama 3.2 1B", "LoRA"),
        *(
            pytest.param(title, way, marks=pytest.mark.slow)
            for title in ("Qwen3 4B", "Gemma 3 4B", "gpt-oss 20B", "Qwen3 30B-A3B")
            for way in WAYS
        ),
    ],
)
def test_memory_page_has_what_pieces_estimate(title: str, way: str) -> None:
    row = estimate(BY_TITLE[title], way)
    assert row["params"] == RECORD["models"][title][way]["params"]
    assert row["gib"] == pytest.approx(RECORD["models"][title][way]["gib"], rel=0.01)
