"""Rules for jobs on SageMaker HyperPod; see docs/hyperpod.md.

With Slurm HyperPod replaces a node that has a hardware fault, and starts a job whose ``srun`` has
``--auto-resume=1`` again.  A replaced node keeps its name and loses its disks, so a run must keep
its state on a shared file system or in S3.  The batch script detects HyperPod on the node where it
runs; the functions here detect it on the host that submits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.config.errors import ConfigErrors
from weft.config.files import expand_path
from weft.config.schema import Job
from weft.submission.job_request import RUN_DIR, JobRequest

# Every host of a HyperPod cluster with Slurm has this directory.
HYPERPOD_DIR = Path("/opt/sagemaker_cluster")
# Directories of a node that a replacement deletes, and their file systems.
VOLATILE_DIRS = {
    "/opt/dlami/nvme": "the node's own NVMe disks",
    "/opt/sagemaker": "the node's own EBS volume",
    "/dev/shm": "the node's memory",
    "/tmp": "the node's root volume",
}
# A replacement takes 20 to 30 minutes.
MIN_TIME_LIMIT_SECONDS = 2 * 3600
# The data may have to be downloaded and tokenized, and the model to be imported and compiled.
START_SECONDS = 4 * 3600
# An evaluation, a save, and the report are between two steps.
MIN_SECONDS, SECONDS_PER_STEP = 3600, 120


def find_errors(request: JobRequest) -> ConfigErrors:
    """Return an error for each directory that a replaced node would lose."""
    errors = ConfigErrors()
    if not HYPERPOD_DIR.is_dir():
        return errors
    section = request.job.checkpoint
    # Without a name, another error leaves the run without a directory.
    paths = {RUN_DIR: str(request.run_dir)} if request.name else {}
    if not section.is_in_run_dir and "://" not in section.dir:
        paths["checkpoint.dir"] = section.dir
    for key, value in paths.items():
        path = Path(os.path.realpath(expand_path(value)))
        for directory, medium in VOLATILE_DIRS.items():
            if path.is_relative_to(directory):
                rule = f"is on {medium} ({directory}), which HyperPod deletes with a replaced node"
                remedy = f"use a directory on a shared file system, such as /fsx/{path.name}"
                errors.add(key, rule, remedy, value=value)
    return errors


def find_warnings(request: JobRequest) -> Iterator[str]:
    """Yield a warning if the time limit is short for the replacement of a node."""
    if HYPERPOD_DIR.is_dir() and request.time_limit_seconds < MIN_TIME_LIMIT_SECONDS:
        yield (
            f"launch.time_limit={request.job.launch.time_limit} is short for HyperPod: the "
            "replacement of a node takes 20 to 30 minutes of it. Use 02:00:00 or more."
        )


def hang_rule(job: Job) -> dict[str, Any]:
    """Return the rule of HyperPod's elastic agent that each node prints steps.

    It is an entry of ``runPolicy.logMonitoringConfiguration`` in a HyperPodPyTorchJob; the page
    docs/hyperpod.md has others.  The agent matches each line that the first rank of its node prints
    with ``logPattern``, from the beginning of the line.  If the rule is broken, the operator
    restarts the ranks of all nodes.  It is written in Go, whose expressions have no lookahead.

    weft's watchdog is faster, and names the rank and the collective.  The rule is for what the
    watchdog cannot end: a process that the kernel does not kill, or a node without processor time.
    """
    limit = job.resilience.step_timeout
    step = limit if isinstance(limit, float) and limit > 0 else SECONDS_PER_STEP
    seconds = max(MIN_SECONDS, round(step * job.monitor.log_interval))
    return {
        "name": "hang",
        "logPattern": ".*step [0-9]+/[0-9]+  loss ",
        "expectedStartCutOffInSeconds": START_SECONDS,
        "expectedRecurringFrequencyInSeconds": seconds,
    }
