"""Warnings of `weft launch` about a run that takes longer than a job."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from tests.cluster.requests import request
from weft.cluster.launch_warnings import (
    LOST_SECONDS,
    count_submissions,
    find_missing_webhook,
    find_short_limit,
)
from weft.cluster.submit import build_request
from weft.estimate.run_time import ASSUMED_MFU, estimate_run_seconds
from weft.plan.plan import Machine

DATA = [("data.path", "/fsx/text"), ("data.tokenizer", "/fsx/tokenizer")]


def find(on: str, recipe: str, cluster: str, **keys: str) -> Iterator[str]:
    overrides = [*DATA, ("run.cluster", cluster)]
    overrides += [(name.replace("__", "."), value) for name, value in keys.items()]
    job = build_request(on, recipe, overrides, [], lambda run: Machine("cpu", 4))
    return find_short_limit(on, job)


def test_run_longer_than_its_jobs_is_warned_of_with_their_number() -> None:
    (text,) = find("slurm", "llama3-8b", "4x8xH100", train__steps="20000")
    assert text.startswith("the run takes about 3.6 days (by the planner's formulas,")
    assert "launch.time_limit=1-00:00:00: the run needs about 4 jobs" in text
    assert "Slurm requeues it" in text
    assert not [*find("slurm", "llama3-8b", "4x8xH100", train__steps="2000")]
    long = {"launch__time_limit": "5-00:00:00", "train__steps": "20000"}
    assert not [*find("slurm", "llama3-8b", "4x8xH100", **long)]
    # The speed of CPUs is unknown.
    assert not [*find("slurm", "llama3-8b", "4xcpu", train__steps="20000")]


def test_model_without_formulas_is_estimated_from_its_flops() -> None:
    overrides = [*DATA, ("run.cluster", "4x8xH100"), ("train.steps", "100000")]
    job = build_request("slurm", "qwen3-30b-a3b", overrides, [], lambda run: Machine("cpu", 4))
    plan, machine = job.plan, job.machine
    assert plan is not None
    assert machine is not None
    estimate = estimate_run_seconds(plan, machine)
    assert estimate is not None
    assert plan.peak_flops is not None
    flops = plan.flops_per_token * plan.tokens_per_step * 100_000
    assert estimate[0] == pytest.approx(flops / 32 / plan.peak_flops / ASSUMED_MFU)
    (text,) = find_short_limit("slurm", job)
    assert "at an assumed MFU of 40%" in text
    usable = 86400 - LOST_SECONDS
    assert count_submissions(estimate[0], job) == math.ceil(estimate[0] / usable)


def test_webhook_whose_variable_the_job_does_not_get_is_warned_of() -> None:
    webhook = ("monitor.webhook", "env:HOOK")
    for on, environment in (("slurm", {}), ("kubernetes", {"HOOK": "x"})):
        (text,) = find_missing_webhook(on, request(webhook), environment)
        assert "the job gets no variable HOOK" in text
        assert "HOOK=secretsmanager:ID" in text
    assert not [*find_missing_webhook("slurm", request(webhook), {"HOOK": "x"})]
    assert not [*find_missing_webhook("kubernetes", request(), {})]
    given = request(webhook, launch={"secrets": "HOOK=k8s-secret:slack/url"})
    assert not [*find_missing_webhook("kubernetes", given, {})]
