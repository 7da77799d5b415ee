"""Warnings about a job that `weft launch` submits."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from weft.cluster.job_placement import find_unused_keys
from weft.cluster.job_request import JobRequest
from weft.cluster.submit import get_cluster

# A lost node's local checkpoints are lost, too; more than so many local intervals give a warning.
MAX_LOST_INTERVALS = 100


def print_warnings(on: str, request: JobRequest) -> None:
    """Print the warnings about a request on stderr."""
    warnings = [*find_unused_keys(on, request.job.launch), *find_warnings(request)]
    warnings += get_cluster(on).find_warnings(request)
    for warning in warnings:
        print(f"weft: warning: {warning}", file=sys.stderr)


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
