"""Random plans end with a forecast or a message, never with a traceback."""

from __future__ import annotations

import random

import pytest

from tests.plan_fuzz import fuzz

FEW = 6
MANY = 500


def test_plan_of_a_random_job_ends_with_a_forecast_or_a_message() -> None:
    assert fuzz(0, FEW) == []


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_plan_of_many_random_jobs_ends_with_a_forecast_or_a_message() -> None:
    assert fuzz(random.randrange(10**9), MANY) == []
