"""Options of SageMaker jobs, and their rules.

Each option has its rule here, so that ``weft launch`` reports every mistake at once, by the name of
the option.  `weft.cluster.sagemaker_request` then checks the request by the model of the API.
"""

from __future__ import annotations

import difflib
import math
import re
from contextlib import suppress

from weft.cluster.job_request import (
    BOOLEAN_RULE,
    INTEGER_PATTERN,
    JobRequest,
    Option,
    check_duration,
    check_options,
    parse_duration,
)
from weft.cluster.sagemaker_request import instance_types
from weft.cluster.sagemaker_storage import FILE_SYSTEM_OPTIONS, check_file_systems
from weft.config.errors import ConfigErrors, suggest
from weft.config.schema import Job

HOUR, DAY, MAX_DAYS = 3600, 86400, 28
ARN = "arn:aws[a-z-]*"
ACCOUNT = "[a-z0-9-]*:[0-9]{12}"  # with the region
OPTIONS = {
    "role": Option(
        "ARN of the role of the job: arn:aws:iam::...:role/...",
        f"{ARN}:iam::[0-9]{{12}}:role/.+",
        "must be the ARN of a role",
        "use arn:aws:iam::ACCOUNT:role/NAME",
    ),
    "instance_type": Option(
        "instance type, such as ml.p5.48xlarge; several, joined by '+': the first with capacity",
        r"ml\.[a-z0-9-]+\.[a-z0-9]+(\+ml\.[a-z0-9-]+\.[a-z0-9]+){0,4}",
        "must be one to five instance types",
        "use ml.p5.48xlarge, or ml.p5.48xlarge+ml.p5e.48xlarge",
    ),
    "bucket": Option(
        "S3 bucket for run directory, checkpoints, recipe and model, at weft/NAME",
        "[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]",
        "must be the name of a bucket",
        "use 3 to 63 lower-case letters, digits, '.' and '-', without s3://",
    ),
    "region": Option(
        "region; default: that of the AWS configuration",
        "[a-z]{2,}(-[a-z]+)+-[0-9]+",
        "must be a region",
        "use us-east-1",
    ),
    "volume": Option(
        "GB of disk of each instance (100)",
        INTEGER_PATTERN,
        "must be an integer number of GB",
        "use a number such as 500",
    ),
    "input_mode": Option(
        "how the instances read data.path at s3://: FastFile (default), or File: copied first",
        "File|FastFile",
        "must be File or FastFile",
        "use File or FastFile",
    ),
    "spot": Option(
        "true: managed spot training; the job resumes after an interruption", *BOOLEAN_RULE
    ),
    "wait": Option("spot: maximum time with waiting, D-HH:MM:SS (twice launch.time_limit)"),
    "keep_alive": Option("time, up to 6:00:00, that the instances wait for the next job"),
    "max_pending": Option("maximum time to wait for instances, 0:30:00 to 28-00:00:00"),
    "retries": Option(
        "restarts of the job after an internal error of SageMaker, 1 to 30",
        "[1-9]|[12][0-9]|30",
        "must be 1 to 30",
        "use a number such as 3",
    ),
    "training_plan": Option(
        "ARN of a training plan, whose reserved instances the job uses",
        f"{ARN}:sagemaker:{ACCOUNT}:training-plan/.+",
        "must be the ARN of a training plan",
        "use the TrainingPlanArn of 'aws sagemaker list-training-plans'",
    ),
    "subnets": Option(
        "subnets of a VPC, joined by '+'; for FSx, EFS, and EFA across instances",
        r"subnet-[0-9a-z]+(\+subnet-[0-9a-z]+){0,15}",
        "must be 1 to 16 IDs of subnets",
        "use subnet-0a1b2c3d, joined by '+'",
    ),
    "security_groups": Option(
        "security groups of the VPC, joined by '+'",
        r"sg-[0-9a-z]+(\+sg-[0-9a-z]+){0,4}",
        "must be 1 to 5 IDs of security groups",
        "use sg-0a1b2c3d, joined by '+'",
    ),
    **FILE_SYSTEM_OPTIONS,
    "kms_key": Option(
        "ID or ARN of the KMS key that encrypts the model in S3, and the volumes",
        f"({ARN}:kms:{ACCOUNT}:key/)?[0-9a-z-]{{10,}}",
        "must be the ID or the ARN of a KMS key, not an alias",
        "use arn:aws:kms:REGION:ACCOUNT:key/ID",
    ),
    # With ':', because '=' ends the name of an option on the command line.
    "tags": Option(
        "tags of the job: KEY:VALUE, joined by '+'",
        r"(?!aws:)[^:+]{1,128}:[^+]{0,256}(\+(?!aws:)[^:+]{1,128}:[^+]{0,256}){0,49}",
        "must be up to 50 tags, KEY:VALUE joined by '+', none of which begins with aws:",
        "use team:nlp+project:llm",
    ),
}
# Options that are durations: minimum and maximum in seconds, rule and remedy.
DURATIONS = {
    "keep_alive": (1, 6 * HOUR, "must be at most 6:00:00", "use 6:00:00"),
    "max_pending": (
        HOUR // 2,
        MAX_DAYS * DAY,
        "must be between 0:30:00 and 28-00:00:00",
        "use 0:30:00 or 28-00:00:00",
    ),
    "wait": (1, math.inf, "", ""),
}


def check_sagemaker_options(request: JobRequest) -> ConfigErrors:
    """Return the errors of the launch section of a request."""
    launch = request.job.launch
    required = ["role", "instance_type", "bucket"]
    errors = check_options(request, OPTIONS, required, r"[A-Za-z0-9][A-Za-z0-9_+=,.@:/\-]*")
    key = "launch.options"
    if ("subnets" in launch.options) != ("security_groups" in launch.options):
        given, other = ("subnets", "security_groups")[:: 1 if "subnets" in launch.options else -1]
        remedy = f"give --{key}.{other} VALUE: {OPTIONS[other].meaning}"
        errors.add(f"{key}.{given}", f"must be given together with {other}", remedy)
    errors += _check_durations(request)
    errors += _check_instances(request)
    errors += check_file_systems(request)
    if "input_mode" in launch.options and s3_data(request.job) is None:
        rule = "has no effect: it is for data.path at s3://, without a pattern"
        errors.add(f"{key}.input_mode", rule, "remove it")
    return errors


def _check_durations(request: JobRequest) -> ConfigErrors:
    """Check the time limit and the options that are durations."""
    options, limit = request.job.launch.options, request.job.launch.time_limit
    errors, seconds = ConfigErrors(request.job), 0
    if not check_duration(limit):
        seconds = parse_duration(limit)
        if seconds > MAX_DAYS * DAY:
            rule = f"is longer than {MAX_DAYS} days, SageMaker's maximum"
            errors.add("launch.time_limit", rule, f"use at most {MAX_DAYS}-00:00:00")
    for name, (low, high, rule, remedy) in DURATIONS.items():
        key = f"launch.options.{name}"
        if name not in options:
            continue
        if invalid := check_duration(options[name], key):
            errors += invalid
        elif not low <= parse_duration(options[name]) <= high:
            errors.add(key, rule, remedy)
        elif name == "wait" and parse_duration(options[name]) < seconds:
            rule = "must not be shorter than launch.time_limit"
            errors.add(key, rule, f"use {limit}, or launch.time_limit={options[name]}")
    return errors


def _check_instances(request: JobRequest) -> ConfigErrors:
    """Check the instance types, and the options that depend on the kind of capacity."""
    options, errors = request.job.launch.options, ConfigErrors(request.job)
    types, is_spot = options.get("instance_type", "").split("+"), options.get("spot") == "true"
    key = "launch.options.instance_type"
    with suppress(ImportError):  # `check` warns
        for name in types:
            if name.startswith("ml.") and name not in (known := instance_types()):
                family = f"{name.rpartition('.')[0]}."
                near = [each for each in known if each.startswith(family)]
                near = near or difflib.get_close_matches(name, known, 5) or known
                remedy = f"{suggest(name, near)}; a newer botocore may know more types"
                errors.add(key, "is not an instance type of training jobs", remedy, value=name)
    if len(set(types)) < len(types):
        errors.add(key, "names a type twice", f"use {'+'.join(dict.fromkeys(types))}")
    if len(types) > 1 and is_spot:
        rule = "must be a single type with spot=true: SageMaker chooses only on-demand instances"
        errors.add(key, rule, f"use {types[0]}, or remove launch.options.spot")
    if is_spot and "keep_alive" in options:
        rule = "excludes spot=true: SageMaker keeps no spot instances"
        errors.add("launch.options.keep_alive", rule, "remove it, or remove launch.options.spot")
    if "wait" in options and not is_spot:
        remedy = "use launch.options.spot=true, or remove it"
        errors.add("launch.options.wait", "requires spot=true", remedy)
    return errors


def s3_data(job: Job) -> str | None:
    """Return ``data.path`` if it is a prefix in S3, which becomes a channel."""
    path = job.data.path
    is_prefix = path.startswith("s3://") and not re.search(r"[*?\[]", path)
    return path if is_prefix and not job.data.is_mixture else None


def time_limits(request: JobRequest) -> dict[str, int]:
    """Return the ``StoppingCondition`` of a request."""
    options, seconds = request.job.launch.options, request.time_limit_seconds
    limits = {"MaxRuntimeInSeconds": seconds}
    if options.get("spot") == "true":
        wait = options.get("wait")
        limits["MaxWaitTimeInSeconds"] = parse_duration(wait) if wait else 2 * seconds
    if "max_pending" in options:
        limits["MaxPendingTimeInSeconds"] = parse_duration(options["max_pending"])
    return limits
