"""Warnings about a job that `weft launch` submits."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping

from weft.cluster.job_placement import find_unused_keys
from weft.cluster.job_request import JobRequest
from weft.cluster.submit import get_cluster

# A lost node's local checkpoints are lost, too; more than so many local intervals give a warning.
MAX_LOST_INTERVALS = 100
LOST_SECONDS = 600  # of a job: a few minutes each to start and to save before the limit
# How a run continues after the time limit.  SkyPilot has none.
WITH_TIME_LIMIT = {
    "slurm": "Slurm requeues it.",
    "kubernetes": "Each time, run 'weft job cancel' and the same 'weft launch' command.",
    "sagemaker": "Each time, run the same 'weft launch' command, which resumes the run.",
}


def print_warnings(on: str, request: JobRequest) -> None:
    """Print the warnings about a request on stderr."""
    warnings = [*find_unused_keys(on, request.job.launch), *find_warnings(request)]
    warnings += find_short_limit(on, request)
    warnings += find_missing_webhook(on, request, os.environ)
    warnings += get_cluster(on).find_warnings(request)
    for warning in warnings:
        print(f"weft: warning: {warning}", file=sys.stderr)


def find_missing_webhook(
    on: str, request: JobRequest, environment: Mapping[str, str]
) -> Iterator[str]:
    """Yield a warning if the job gets no variable with the URL of ``monitor.webhook``.

    Args:
        on: the name of the cluster.
        request: the request.
        environment: variables of this process, which Slurm gives to the job.
    """
    job, webhook = request.job, request.job.monitor.webhook
    name = webhook.removeprefix("env:")
    known = {*job.launch.secrets, *job.launch.env, *(environment if on == "slurm" else ())}
    if webhook != "off" and name not in known:
        yield (
            f"monitor.webhook={webhook}: the job gets no variable {name}, so it ends at its start "
            "unless launch.setup or the image sets it. Give it by launch.secrets, such as "
            f"{name}=secretsmanager:ID."
        )


def find_short_limit(on: str, request: JobRequest) -> Iterator[str]:
    """Yield a warning if the run takes several jobs of ``launch.time_limit``."""
    if request.plan is None or request.machine is None or on not in WITH_TIME_LIMIT:
        return
    from weft.estimate.forecast_text import describe_time  # both import torch
    from weft.estimate.run_time import estimate_run_seconds

    estimate = estimate_run_seconds(request.plan, request.machine)
    if estimate is not None and (count := count_submissions(estimate[0], request)) > 1:
        seconds, method = estimate
        yield (
            f"the run takes about {describe_time(seconds)} ({method}, without evaluations and "
            f"checkpoints), and a job ends after launch.time_limit={request.job.launch.time_limit}:"
            f" the run needs about {count:,} jobs, of which each loses about "
            f"{LOST_SECONDS // 60} minutes to start and to save. {WITH_TIME_LIMIT[on]} Or raise "
            "launch.time_limit."
        )


def count_submissions(seconds: float, request: JobRequest) -> int:
    """Return how many jobs of ``launch.time_limit`` a run of so many seconds takes."""
    limit = request.time_limit_seconds
    return math.ceil(seconds / max(limit - LOST_SECONDS, limit / 2))


def find_warnings(request: JobRequest) -> Iterator[str]:
    """Yield a warning if a lost node costs much work despite local checkpoints."""
    section = request.job.checkpoint
    interval, local = section.interval, section.local_interval
    if not section.saves_locally or interval == "auto" or request.job.parallel.dp_replicate > 1:
        return
    if interval == 0 or interval >= MAX_LOST_INTERVALS * local:
        lost = f"up to {interval:,} steps" if interval else "all steps"
        yield (
            f"checkpoint.interval={interval} makes a run that loses a node repeat {lost}: the "
            f"checkpoints in checkpoint.local_dir (every {local} steps) are lost with the node. "
            f"Use checkpoint.interval=auto or less than {MAX_LOST_INTERVALS * local:,}."
        )
