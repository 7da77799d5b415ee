"""Warnings about a job that `weft launch` submits."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from weft.config.errors import InvalidConfig
from weft.config.mounts import find_mount
from weft.config.schema import LaunchSection, flatten
from weft.config.storage import is_bucket_url
from weft.data.prepare import cache_dir
from weft.data.source import HUB_SCHEME, detect_source
from weft.data.token_store import is_store
from weft.planning.devices import parse_cluster
from weft.planning.instance_types import find_instance_type, has_device
from weft.planning.model_config import HUB_NAME
from weft.submission import kubernetes, slurm
from weft.submission.job_placement import SUPPORTED, find_local_modules, find_unused_keys
from weft.submission.job_request import JobRequest

# Of text, by weft's own tokenizer of 16,000 tokens, with the first reading: processor time.
PREPARE_BYTES_PER_SECOND = 2.9e6
MIN_PREPARED_BYTES = 64 << 20  # of text; less is tokenized within seconds
ASSUMED_CORES = 32  # of a node, if launch.cpus does not say
LOCAL_FILE_SYSTEMS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs")
# A lost node's local checkpoints are lost, too; more than so many local intervals give a warning.
MAX_LOST_INTERVALS = 100
ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")  # of MinIO, Ceph and others
LOST_SECONDS = 600  # of a job: a few minutes each to start and to save before the limit
# Warnings about what only one kind of cluster has.
CLUSTER_WARNINGS = {"slurm": slurm.find_warnings, "kubernetes": kubernetes.find_warnings}
# How a run continues after the time limit.  SkyPilot has none.
WITH_TIME_LIMIT = {
    "slurm": "Slurm requeues it.",
    "kubernetes": "Each time, run 'weft job resume', which resumes the run.",
    "sagemaker": "Each time, run 'weft job resume', which resumes the run.",
}


def print_warnings(on: str, *requests: JobRequest) -> None:
    """Print the warnings about requests on stderr, each of them once."""
    for warning in dict.fromkeys(text for each in requests for text in _find_all(on, each)):
        print(f"weft: warning: {warning}", file=sys.stderr)


def _find_all(on: str, request: JobRequest) -> list[str]:
    warnings = [*find_unused_keys(on, request.job.launch), *find_warnings(request)]
    warnings += find_local_modules(on, request.job)
    warnings += find_separate_preparation(on, request)
    warnings += find_moving_image(request.job.launch)
    warnings += find_other_devices(on, request)
    warnings += find_short_limit(on, request)
    warnings += find_missing_webhook(on, request, os.environ)
    warnings += find_missing_variables(on, request, os.environ)
    find_own = CLUSTER_WARNINGS.get(on)
    return [*warnings, *(find_own(request) if find_own else ())]


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


def find_missing_variables(
    on: str, request: JobRequest, environment: Mapping[str, str]
) -> Iterator[str]:
    """Yield warnings about variables that the job needs and does not get.

    Args:
        on: the name of the cluster.
        request: the request.
        environment: variables of this process, which Slurm gives to the job.
    """
    launch = request.job.launch
    for name, variable in request.placement.references("env").items():
        if not environment.get(variable):
            yield (
                f"launch.secrets.{name}=env:{variable}: this shell has no variable {variable}, so "
                "the job could not start. Set it in the shell that submits."
            )
    if on == "slurm":
        return
    given = {*launch.env, *launch.secrets}
    paths = [
        path
        for key, value in flatten(request.job).items()
        if not key.startswith("launch.")
        for path in (value if isinstance(value, list | dict) else (value,))
        if isinstance(path, str)
    ]
    uses_hub = any(path.startswith(HUB_SCHEME) for path in paths)
    model = request.job.model.path
    uses_hub |= HUB_NAME.fullmatch(model) is not None and not Path(model).exists()
    # Without an endpoint of its own the shell uses Amazon's, where the nodes may have a role.
    has_endpoint = any(map(environment.get, ENDPOINTS))
    needs = (
        (uses_hub, ("HF_TOKEN",), "a gated or private model or dataset could not be read"),
        (
            "wandb" in request.job.monitor.trackers,
            ("WANDB_API_KEY",),
            "Weights & Biases would refuse the run",
        ),
        (
            has_endpoint and any(is_bucket_url(path) for path in paths),
            (*ENDPOINTS, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
            "the nodes would look for the buckets at Amazon",
        ),
    )
    for is_needed, names, consequence in needs:
        missing = [name for name in names if environment.get(name) and name not in given]
        if is_needed and missing:
            yield (
                f"the job does not get {', '.join(missing)} of this shell, so {consequence}, "
                "unless launch.setup or the image sets them. Give secrets by launch.secrets, and "
                "others by launch.env, such as --launch.env NAME=VALUE."
            )


def find_moving_image(launch: LaunchSection) -> Iterator[str]:
    """Yield a warning if the name of the image may mean another image later."""
    image = launch.image
    is_file = image.startswith(("/", ".", "~")) or image.endswith((".sif", ".sqsh"))
    tag = image.rpartition("/")[2].partition(":")[2]
    if image != "auto" and not is_file and "@" not in image and tag in ("", "latest"):
        yield (
            f"launch.image={image} has no tag of its own, so a node that starts later may get "
            "another image than the others. Use a tag that you never move, or a digest."
        )


def find_other_devices(on: str, request: JobRequest) -> Iterator[str]:
    """Yield a warning for each instance type with other GPUs than ``run.cluster``."""
    run, names = request.job.run, request.job.launch.instance_type.split("+")
    if "instance_type" not in SUPPORTED[on].split() or not request.devices:
        return
    device = parse_cluster(run.cluster).device_name
    for name in names:
        instance = find_instance_type(name)
        if instance is not None and not has_device(instance, device):
            gpu = instance.gpu.replace(" ", "-")
            yield (
                f"launch.instance_type={name} has {instance.gpus} {instance.gpu}, but "
                f"run.cluster={run.cluster} is what weft has planned, so memory, time and layout "
                f"may be wrong. Use --run.cluster {request.nodes[1]}x{request.devices}x{gpu}, or "
                "another instance type."
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


def find_separate_preparation(on: str, request: JobRequest) -> Iterator[str]:
    """Yield a warning if each node would tokenize all the data while its GPUs wait."""
    data, nodes = request.job.data, request.nodes[1]
    if nodes < 2 or not request.trains or "://" in data.cache_dir:
        return
    if not _is_node_disk(on, request):
        return
    size, is_known = 0, True
    for path in data.sources:
        if is_store(path):
            continue
        is_known &= not path.startswith(HUB_SCHEME) and not is_bucket_url(path)
        if is_known:
            try:
                size += sum(file.size_bytes for file in detect_source(path).files)
            except InvalidConfig:  # the nodes may have it
                is_known = False
    if is_known and size < MIN_PREPARED_BYTES:
        return
    cost = ""
    if is_known:
        cores = request.job.launch.cpus or ASSUMED_CORES
        seconds = size / (PREPARE_BYTES_PER_SECOND * int(cores))
        cost = f" The {nodes} nodes read {2 * nodes * size / 1e9:,.1f} GB instead of "
        cost += f"{2 * size / 1e9:,.1f} GB (each reads the text twice)"
        if request.devices:
            hours = seconds * nodes * request.devices / 3600
            cost += f", and the GPUs wait about {hours:,.1f} GPU-hours, at "
            cost += f"{PREPARE_BYTES_PER_SECOND / 1e6:.1f} MB/s per core, measured on one core, "
            cost += f"and {cores} cores per node"
        cost += "."
    yield (
        f"data.cache_dir={data.cache_dir} is on the disk of each node, so each of the {nodes} "
        f"nodes tokenizes all the data.{cost} Use --data.cache_dir s3://BUCKET/PATH: the nodes "
        "then prepare the data together, or 'weft data prepare' with the same key before, without "
        "GPUs. A directory that all nodes mount is prepared once, too."
    )


def _is_node_disk(on: str, request: JobRequest) -> bool:
    """Return True if ``data.cache_dir`` is not on a file system that the nodes share."""
    value = request.job.data.cache_dir
    path = cache_dir(request.job.data).absolute()
    if on == "slurm" and request.job.launch.image == "auto":
        return find_mount(path).kind in LOCAL_FILE_SYSTEMS  # this host is one of the cluster
    mount = None if value == "auto" else request.placement.find_mount(str(path))
    return mount is None or mount.kind == "image"
