"""One process of weft computes the same as transformers, torch.optim and a manual loop.

`tests/oracle.py` describes the comparison.  The injected faults of ``tests/mutation`` prove that
the comparison can fail.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence

import pytest

from tests.harness import run_ranks
from tests.oracle import check_case, draw_case, make_case

OFTEN = range(10)
EXTRA = range(10, 140)
LOW = [
    {"precision__compute_dtype": "bfloat16"},
    {"precision__float8": "tensorwise", "precision__float8_small": True},
]


def wrong_cases(seeds: Sequence[int]) -> list[str]:
    """Return the departures of the random jobs of these seeds; runs in a rank."""
    results = []
    for seed in seeds:
        try:
            check_case(draw_case(seed))
        except Exception as error:
            text = f"{error}" if isinstance(error, AssertionError) else traceback.format_exc()
            results.append(f"seed {seed}: {text}")
    return results


@pytest.mark.timeout(300)
def test_random_jobs_in_one_process_equal_transformers() -> None:
    [result] = run_ranks(wrong_cases, 1, OFTEN, timeout=280)
    assert not result, "\n".join(result)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(EXTRA.start, EXTRA.stop, 30))
def test_more_random_jobs_in_one_process_equal_transformers(first: int) -> None:
    seeds = range(first, min(first + 30, EXTRA.stop))
    [result] = run_ranks(wrong_cases, 1, seeds, timeout=800)
    assert not result, "\n".join(result)


def wrong_in_low_precision() -> list[str]:
    """Return the departures in bfloat16 and in float8; runs in a rank."""
    results = []
    for keys in LOW:
        case = make_case(
            str(keys),
            5,
            model__dim=64,
            model__ffn_dim=96,
            train__seq_len=32,
            data__packing="documents",
            model__tied_embeddings=False,
            **keys,
        )
        try:
            check_case(case)
        except AssertionError as error:
            results.append(str(error))
    return results


@pytest.mark.timeout(200)
def test_low_precision_error_is_like_that_of_transformers() -> None:
    [result] = run_ranks(wrong_in_low_precision, 1, timeout=180)
    assert not result, "\n".join(result)
