"""SageMaker: a training job, as the JSON request of CreateTrainingJob.

The job runs an image with weft.  The first process on each instance is
`weft.submission.sagemaker_entry`, with the command as hyperparameters.  The run directory is
/opt/ml/checkpoints, which SageMaker copies to S3.  With several instances this directory is not
shared, so the ranks write their checkpoints to S3 directly.

botocore (the core of boto3) ships the published model of the API, which validates the request.
"""

from __future__ import annotations

import difflib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from weft.config.errors import ConfigErrors, WeftError, suggest
from weft.config.files import replace_text
from weft.config.run_paths import find_paths
from weft.config.schema import Job
from weft.config.storage import is_bucket_url
from weft.monitor.cloudwatch import metric_definitions
from weft.submission.job_placement import check_placement, merge_fields, read_patch
from weft.submission.job_request import (
    RUN_DIR,
    JobRequest,
    build_script,
    check_duration,
    check_fixed_nodes,
    check_instance_types,
    check_name,
    standalone_recipe,
    warn_unchecked,
)
from weft.submission.sagemaker_request import check_request, instance_types
from weft.submission.sagemaker_storage import (
    CHANNELS,
    FILE_SYSTEMS,
    MOUNTS_VARIABLE,
    encode_mounts,
    verify_file_systems,
)

FILE_SUFFIX = "-request.json"  # launch.json is the record of the submission
RUN = "/opt/ml/checkpoints"  # the run directory in the container
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
FINAL_STATES = ("Completed", "Failed", "Stopped")
INSTALL = "pip install 'weft[sagemaker]'"
# Between requests while following a log; an event may arrive this much later than a newer one.
POLL_SECONDS, LATE_MILLISECONDS = 5.0, 60_000
DAY, MAX_DAYS = 86400, 28
DISK_GB = 100  # of an instance, unless launch.disk has another number
# A job writes below these directories, so a file system with one of them is mounted read-write.
WRITTEN_KEYS = ("checkpoint.dir", "checkpoint.local_dir", "data.cache_dir", "compile.cache_dir")


def find_errors(request: JobRequest) -> ConfigErrors:
    """Return the configuration errors of a request."""
    launch, errors = request.job.launch, ConfigErrors(request.job)
    errors += check_placement("sagemaker", request.job, ["role", "instance_type", "bucket"])
    errors += (wrong_limit := check_duration(launch.time_limit))
    if not wrong_limit and request.time_limit_seconds > MAX_DAYS * DAY:
        rule = f"is longer than {MAX_DAYS} days, SageMaker's maximum"
        errors.add("launch.time_limit", rule, f"use at most {MAX_DAYS}-00:00:00")
    errors += _check_instances(request) + _check_network(request)
    errors += check_name(request, f"{launch.bucket or 's3://BUCKET'}/weft/{request.name}")
    errors += check_fixed_nodes(
        request, "is a range, but SageMaker starts a fixed number of instances"
    )
    if launch.image == "auto":
        rule = "is not possible: SageMaker has no default image with weft"
        remedy = "give --launch.image VALUE, an image with weft: see docs/sagemaker.md"
        errors.add("launch.image", rule, remedy)
    return errors


def _check_instances(request: JobRequest) -> ConfigErrors:
    """Check the instance types, also against those that the API knows."""
    launch, errors = request.job.launch, check_instance_types(request)
    types, key = launch.instance_type.split("+"), "launch.instance_type"
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
    if launch.reservation and launch.spot:
        rule = "is for instances that are reserved, so they are not spot instances"
        errors.add("launch.reservation", rule, "remove it, or use launch.spot=false")
    if len(types) > 1 and launch.spot:
        rule = "must be a single type with spot nodes: SageMaker chooses only on-demand instances"
        errors.add(key, rule, f"use {types[0]}, or launch.spot=false")
    return errors


def _check_network(request: JobRequest) -> ConfigErrors:
    """Check the VPC, which file systems need, and paths that do not exist yet."""
    launch, errors = request.job.launch, ConfigErrors(request.job)
    names = ("subnets", "security_groups")
    for given, other in (names, names[::-1]):
        if getattr(launch, given) and not getattr(launch, other):
            rule = f"must be given together with {other}"
            errors.add(f"launch.{given}", rule, f"give --launch.{other} VALUE, of the same VPC")
    for mount in request.placement.mounts:
        if mount.kind in FILE_SYSTEMS and not launch.subnets and not launch.security_groups:
            rule = "requires subnets and security_groups: SageMaker mounts it inside a VPC"
            remedy = "give --launch.subnets VALUE of the file system's VPC and "
            remedy += "--launch.security_groups VALUE that reach it"
            errors.add(f"launch.mounts.{mount.path}", rule, remedy)
        if mount.kind != "image" and any(
            f" {mount.path}/" in f" {line}" for line in request.job.launch.setup
        ):
            rule = f"has a path below {mount.path}, which does not exist before weft starts"
            errors.add("launch.setup", rule, f"use {CHANNELS}/{mount.name}")
    return errors


# --------------------------------------------------------------------------- the request


def render(request: JobRequest) -> str:
    """Return the request; the job's name has the time, because it must be unique.

    Raises:
        InvalidConfig: if the file of ``launch.patch`` cannot be merged.
    """
    job, launch, home = request.job, request.job.launch, _s3_prefix(request)
    entry = ["python", "-m", "weft.submission.sagemaker_entry"]
    if launch.setup:
        entry = ["bash", "-c", build_script(launch.setup, " ".join(entry))]
    body: dict[str, Any] = {
        "TrainingJobName": f"{request.name}-{time.strftime('%y%m%d-%H%M%S', time.gmtime())}",
        "RoleArn": launch.role,
        "AlgorithmSpecification": {
            "TrainingImage": launch.image,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": entry,
            "MetricDefinitions": metric_definitions(objective_metrics(job)),
        },
        "HyperParameters": _hyperparameters(request),
        "ResourceConfig": _resources(request),
        "OutputDataConfig": {"S3OutputPath": f"{home}/output"},
        "CheckpointConfig": {"S3Uri": f"{home}/run", "LocalPath": RUN},
        "StoppingCondition": {"MaxRuntimeInSeconds": request.time_limit_seconds},
    }
    if request.devices:  # SageMaker's own checks of the nodes and their network before the job
        body["InfraCheckConfig"] = {"EnableInfraCheck": True}
    if channels := _channels(request):
        body["InputDataConfig"] = channels
    table = encode_mounts(request.placement.mounts)
    if environment := request.environment | ({MOUNTS_VARIABLE: table} if table else {}):
        body["Environment"] = environment
    if launch.subnets:
        body["VpcConfig"] = {
            "Subnets": list(launch.subnets),
            "SecurityGroupIds": list(launch.security_groups),
        }
    if launch.spot:
        body["EnableManagedSpotTraining"] = True
        # With the time that the job waits for instances.
        body["StoppingCondition"]["MaxWaitTimeInSeconds"] = 2 * request.time_limit_seconds
    if "tensorboard" in job.monitor.trackers:
        tensorboard = {"S3OutputPath": f"{home}/tensorboard", "LocalPath": f"{RUN}/tensorboard"}
        body["TensorBoardOutputConfig"] = tensorboard
    if launch.labels:
        body["Tags"] = [{"Key": key, "Value": value} for key, value in launch.labels.items()]
    for patch in read_patch(launch.patch):
        body = merge_fields(body, patch)
    return json.dumps(body, indent=2) + "\n"


def objective_metrics(job: Job) -> Sequence[str]:
    """Return the names of the metrics that the objective of a job adds to a step."""
    from weft.training.loss import OBJECTIVES  # imports torch

    objective = OBJECTIVES.get(job.train.objective)  # a user's is not imported here
    return objective(job.train).metrics if objective is not None else ()


def _hyperparameters(request: JobRequest) -> dict[str, str]:
    """Return the recipe, and the overrides with the paths of the container."""
    parameters = {"recipe": request.recipe, **request.overrides}
    parameters.pop(RUN_DIR, None)  # a path of this machine
    if not request.trains:
        parameters["program"] = " ".join(request.program)
    if standalone_recipe(request) is not None:
        parameters["recipe"] = f"{CHANNELS}/recipe/recipe.toml"
    if s3_data(request.job):
        parameters["data.path"] = f"{CHANNELS}/training"
    if request.trains and request.nodes[1] > 1 and request.job.checkpoint.is_in_run_dir:
        parameters["checkpoint.dir"] = f"{_s3_prefix(request)}/checkpoints"
    return parameters


def s3_data(job: Job) -> str | None:
    """Return ``data.path`` if it is a prefix in S3, which becomes a channel.

    With a cache in a bucket, all hosts must see the same files at the same address and time.
    """
    path = job.data.path
    is_prefix = path.startswith("s3://") and not re.search(r"[*?\[]", path)
    is_alone = not job.data.is_mixture and not is_bucket_url(job.data.cache_dir)
    return path if is_prefix and is_alone else None


def _channels(request: JobRequest) -> list[dict[str, Any]]:
    """Return the input channels: recipe, data in S3, and the mounts."""
    sources = []  # name, location and input mode
    if standalone_recipe(request) is not None:
        sources.append(("recipe", f"{_s3_prefix(request)}/recipe/", "File"))
    if data := s3_data(request.job):
        # Without the slash, s3://bucket/web is also the prefix of s3://bucket/web-old.
        is_file = re.search(r"[.](jsonl?|gz|zst|parquet|arrow|txt)$", data)
        sources.append(("training", data if is_file else f"{data.rstrip('/')}/", "FastFile"))
    mounts = request.placement.mounts
    sources += [
        (m.name, f"s3://{m.source.rstrip('/')}/", "FastFile") for m in mounts if m.kind == "s3"
    ]
    channels = []
    for name, uri, mode in sources:
        source = {"S3DataType": "S3Prefix", "S3Uri": uri}
        source["S3DataDistributionType"] = "FullyReplicated"
        channel = {"ChannelName": name, "DataSource": {"S3DataSource": source}, "InputMode": mode}
        channels.append(channel)
    written = [path for key, path in find_paths(request.job) if key in WRITTEN_KEYS]
    written_mounts = [request.placement.find_mount(path) for path in written]
    for mount in mounts:
        if mount.kind in FILE_SYSTEMS:
            id, _, directory = mount.source.partition(":")
            system = {
                "FileSystemId": id,
                "FileSystemAccessMode": "rw" if mount in written_mounts else "ro",
                "FileSystemType": FILE_SYSTEMS[mount.kind].type,
                "DirectoryPath": directory,
            }
            channels.append(
                {"ChannelName": mount.name, "DataSource": {"FileSystemDataSource": system}}
            )
    return channels


def _resources(request: JobRequest) -> dict[str, Any]:
    """Return the instances and their disks."""
    launch = request.job.launch
    types, plan = launch.instance_type.split("+"), launch.reservation
    resources: dict[str, Any] = {"InstanceCount": request.nodes[1]}
    if len(types) == 1:
        resources["InstanceType"] = types[0]
        if plan:
            resources["TrainingPlanArn"] = plan
    else:
        resources["InstancePreferences"] = [{"InstanceType": name} for name in types]
        if plan:
            resources["InstancePreferences"][0]["TrainingPlanArns"] = [plan]
    resources["VolumeSizeInGB"] = launch.disk or DISK_GB
    return resources


def _s3_prefix(request: JobRequest) -> str:
    return f"{request.job.launch.bucket.rstrip('/')}/weft/{request.name}"


def check(text: str) -> list[str]:
    """Return the errors of a request against the published model of the API."""
    try:
        body = json.loads(text)
    except ValueError as error:
        return [f"the request is not valid JSON: {error}"]
    try:
        return check_request(body)
    except ImportError:
        return warn_unchecked("the model of the API", INSTALL)


# --------------------------------------------------------------------------- the service


def submit(path: Path, request: JobRequest) -> str:
    """Upload the recipe unless it is a shipped one, create the job, return its ARN.

    Raises:
        InvalidConfig: if a file system of the job is not as the options say.
        WeftError: if AWS refuses a request.
    """
    body, recipe = json.loads(path.read_text("utf-8")), standalone_recipe(request)
    with connect_aws(request.job.launch.region or None) as client:
        verify_file_systems(client, request).raise_any()
        if recipe is not None:
            bucket, _, prefix = _s3_prefix(request).removeprefix("s3://").partition("/")
            key = f"{prefix}/recipe/recipe.toml"
            client("s3").put_object(Bucket=bucket, Key=key, Body=recipe.encode())
        return str(client("sagemaker").create_training_job(**body)["TrainingJobArn"])


def resubmit(path: Path, id: str) -> str:
    """Create the job again under a new name; return its ARN.

    Its containers get the same run directory, so the run resumes.
    """
    body = json.loads(path.read_text("utf-8"))
    stem = re.sub(r"-\d{6}-\d{6}$", "", body["TrainingJobName"])
    body["TrainingJobName"] = f"{stem}-{time.strftime('%y%m%d-%H%M%S', time.gmtime())}"
    with connect_aws(parse_id(id)[1]) as client:
        arn = str(client("sagemaker").create_training_job(**body)["TrainingJobArn"])
    replace_text(path, json.dumps(body, indent=2) + "\n")
    return arn


def status(id: str) -> str:
    """Return one line: 'waiting...', 'running...' with instances, or how it ended."""
    name, region = parse_id(id)
    with connect_aws(region) as client:
        job = client("sagemaker").describe_training_job(TrainingJobName=name)
    state, detail = job["TrainingJobStatus"], job.get("SecondaryStatus", "")
    if state == "Failed":
        return f"failed: {job.get('FailureReason', detail)}"
    if state in FINAL_STATES:
        return str(state).lower()
    instances = _describe_instances(job["ResourceConfig"])
    message = (job.get("SecondaryStatusTransitions") or [{}])[-1].get("StatusMessage", detail)
    is_running = detail in ("Downloading", "Training", "Uploading", "Stopping")
    return f"{'running on' if is_running else 'waiting for'} {instances}: {message}"


def _describe_instances(resources: Mapping[str, Any]) -> str:
    """Return the number of instances and their type.

    Of several preferred types, SageMaker has not yet chosen one while it waits for instances.
    """
    preferred = [item["InstanceType"] for item in resources.get("InstancePreferences", [])]
    kind = resources.get("SelectedInstanceType") or resources.get("InstanceType")
    count = resources.get("SelectedInstanceCount") or resources.get("InstanceCount", "")
    return f"{count} {kind or ' or '.join(preferred)}".strip()


def logs(id: str, run_dir: Path, follow: bool) -> Iterator[str]:
    """Yield the lines that the job has printed, each after the name of its instance."""
    name, region = parse_id(id)
    with connect_aws(region) as client:
        job, log = client("sagemaker"), client("logs")
        streams = {"logGroupName": LOG_GROUP, "logStreamNamePrefix": f"{name}/"}
        known, newest = set[str](), 0
        while True:
            state = job.describe_training_job(TrainingJobName=name)["TrainingJobStatus"]
            # Events of other instances may arrive late, so read the newest minute again.
            pages = log.get_paginator("filter_log_events").paginate(
                **streams, startTime=max(0, newest - LATE_MILLISECONDS)
            )
            # The log group does not exist before the first job of the account.
            with suppress(log.exceptions.ResourceNotFoundException):
                for event in (event for page in pages for event in page["events"]):
                    newest = max(newest, event["timestamp"])
                    if event["eventId"] not in known:
                        known.add(event["eventId"])
                        host = event["logStreamName"].partition("/")[2].rpartition("-")[0]
                        yield f"{host or event['logStreamName']}: {event['message']}"
            if not follow or state in FINAL_STATES:
                return
            time.sleep(POLL_SECONDS)


def cancel(id: str) -> str:
    """Stop the job, which saves a checkpoint; return a message."""
    name, region = parse_id(id)
    with connect_aws(region) as client:
        client("sagemaker").stop_training_job(TrainingJobName=name)
    return f"stopping {name}: it has two minutes to save a checkpoint"


def parse_id(id: str) -> tuple[str, str | None]:
    """Return name and region of a job, given its ARN or its name."""
    if id.startswith("arn:"):
        parts = id.split(":", 5)
        return parts[5].removeprefix("training-job/"), parts[3]
    return id, None


@contextmanager
def connect_aws(region: str | None) -> Iterator[Callable[[str], Any]]:
    """Give a function that returns clients, and turn AWS's errors into a WeftError.

    The clients use the credentials of the AWS command line.
    """
    try:
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.session import get_session
    except ImportError as error:
        raise WeftError(f"SageMaker requires botocore: {INSTALL}") from error
    try:
        yield partial(get_session().create_client, region_name=region)
    except (BotoCoreError, ClientError) as error:
        raise WeftError(f"AWS: {error}") from error
