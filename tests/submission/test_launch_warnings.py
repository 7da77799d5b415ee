"""Warnings of `weft launch`: a run longer than its job, missing variables, other devices."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from tests.submission.requests import request
from weft.estimate.run_time import ASSUMED_MFU, estimate_run_seconds
from weft.planning.plan import Machine
from weft.submission.launch_warnings import (
    LOST_SECONDS,
    count_submissions,
    find_missing_variables,
    find_missing_webhook,
    find_moving_image,
    find_other_devices,
    find_short_limit,
)
from weft.submission.submit import build_request

DATA = [("data.path", "/fsx/text"), ("data.tokenizer", "/fsx/tokenizer")]


def find(on: str, recipe: str, cluster: str, **keys: str) -> Iterator[str]:
    overrides = [*DATA, ("run.cluster", cluster)]
    overrides += [(name.replace("__", "."), value) for name, value in keys.items()]
    job = build_request(on, recipe, overrides, [], lambda run: Machine("cpu", 4))
    return find_short_limit(on, job)


def test_run_longer_than_its_jobs_is_warned_of_with_their_number() -> None:
    (text,) = find("slurm", "llama3-8b", "4x8xH100", train__steps="20000")
    assert text.startswith("the run takes about 2.6 days (by the planner's formulas,")
    assert "launch.time_limit=1-00:00:00: the run needs about 3 jobs" in text
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


SHELL = {
    "HF_TOKEN": "a",
    "WANDB_API_KEY": "b",
    "AWS_ENDPOINT_URL": "http://ceph:7480",
    "AWS_ACCESS_KEY_ID": "c",
    "AWS_SECRET_ACCESS_KEY": "d",
}


@pytest.mark.parametrize(
    ("key", "value", "names"),
    [
        ("model.path", "org/name", "HF_TOKEN"),
        ("data.path", "hf://org/name", "HF_TOKEN"),
        ("monitor.trackers", "wandb", "WANDB_API_KEY"),
        ("data.path", "s3://web/a", "AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY"),
        ("checkpoint.dir", "s3://runs/a", "AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID"),
    ],
)
def test_variable_of_the_shell_that_the_job_needs_is_warned_of(
    key: str, value: str, names: str
) -> None:
    job = request((key, value))
    (text,) = find_missing_variables("kubernetes", job, SHELL)
    assert text.startswith(f"the job does not get {names}")
    assert not [*find_missing_variables("slurm", job, SHELL)]  # which gives it the environment
    assert not [*find_missing_variables("kubernetes", job, {})]
    assert not [*find_missing_variables("kubernetes", request(), SHELL)]
    given = {name: f"k8s-secret:a/{name}" for name in SHELL if name != "AWS_ENDPOINT_URL"}
    secrets = ",".join(f"{name}={text}" for name, text in given.items())
    launch = {"env": "AWS_ENDPOINT_URL=http://ceph:7480", "secrets": secrets}
    assert not [*find_missing_variables("kubernetes", request((key, value), launch=launch), SHELL)]


def test_keys_without_an_endpoint_are_not_warned_of() -> None:
    """The nodes have a role of their own at Amazon."""
    shell = {name: text for name, text in SHELL.items() if "ENDPOINT" not in name}
    assert not [*find_missing_variables("kubernetes", request(("data.path", "s3://web/a")), shell)]


@pytest.mark.parametrize("on", ["slurm", "skypilot"])
def test_secret_of_a_variable_that_the_shell_lacks_is_warned_of(on: str) -> None:
    job = request(launch={"secrets": "HF_TOKEN=env:HF_TOKEN"})
    (text,) = find_missing_variables(on, job, {})
    assert "this shell has no variable HF_TOKEN" in text
    assert not [*find_missing_variables(on, job, SHELL)]


def test_instance_type_with_other_gpus_is_warned_of() -> None:
    job = request(launch={"instance_type": "g5.48xlarge"}, devices=8)
    (text,) = find_other_devices("kubernetes", job)
    assert text.startswith("launch.instance_type=g5.48xlarge has 8 A10G, but run.cluster=1x8xH100")
    assert "Use --run.cluster 1x8xA10G" in text
    assert not [*find_other_devices("slurm", job)]  # which does not use the key
    same = request(launch={"instance_type": "p5.48xlarge"}, devices=8)
    assert not [*find_other_devices("kubernetes", same)]


def test_image_without_a_tag_is_warned_of() -> None:
    for image in ("weft", "registry:5000/weft", "registry/weft:latest", "nvcr.io#a/weft"):
        (text,) = find_moving_image(request(launch={"image": image}).job.launch)
        assert text.startswith(f"launch.image={image} has no tag of its own")
    for image in ("auto", "registry/weft:1", "weft@sha256:0a", "/fsx/weft.sqsh", "weft.sif"):
        assert not [*find_moving_image(request(launch={"image": image}).job.launch)]
