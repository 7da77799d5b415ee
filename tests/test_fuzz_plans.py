"""Random plans end with a forecast or a message, never with a traceback."""

from __future__ import annotations

import random

import pytest

from tests.plan_fuzz import fuzz
from weft.cli.main import main

FEW = 3
MANY = 500


def test_plan_of_a_random_job_ends_with_a_forecast_or_a_message() -> None:
    assert fuzz(0, FEW) == []


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_plan_of_many_random_jobs_ends_with_a_forecast_or_a_message() -> None:
    failures = fuzz(random.randrange(10**9), MANY)
    assert not failures, "\n\n".join(failures)


@pytest.mark.parametrize(
    ("key", "value", "limit"),
    [
        ("model.num_layers", 10**6, 4096),
        ("model.mtp_layers", 10**5, 32),
        ("model.vocab_size", 10**9, 4194304),
        ("train.seq_len", 10**9, 16777216),
    ],
)
def test_plan_of_an_absurd_size_is_refused_at_once(
    key: str, value: int, limit: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "demo", f"--{key}", str(value)]) == 2
    assert f"{key}={value} must be at most {limit}" in capsys.readouterr().err
