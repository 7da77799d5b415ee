"""SageMaker: a training job, as the JSON request of CreateTrainingJob.

The job runs an image with weft.  The first process on each instance is
`weft.cluster.sagemaker_entry`, with the command as hyperparameters.  The run directory is
/opt/ml/checkpoints, which SageMaker copies to S3.  With several instances this directory is not
shared, so the ranks write their checkpoints to S3 directly.

botocore (the core of boto3) ships the published model of the API, which validates the request.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from weft.cluster.cloudwatch import metric_definitions
from weft.cluster.job_request import (
    RUN_DIR,
    JobRequest,
    build_script,
    check_fixed_nodes,
    check_name,
    parse_duration,
    standalone_recipe,
    warn_unchecked,
)
from weft.cluster.sagemaker_options import check_sagemaker_options, s3_data, time_limits
from weft.cluster.sagemaker_request import check_request
from weft.cluster.sagemaker_storage import CHANNELS, make_channels, verify_file_systems
from weft.config.errors import ConfigErrors, WeftError

FILE_SUFFIX = ".json"
RUN = "/opt/ml/checkpoints"  # the run directory in the container
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
FINAL_STATES = ("Completed", "Failed", "Stopped")
INSTALL = "pip install 'weft[sagemaker]'"
# Between requests while following a log; an event may arrive this much later than a newer one.
POLL_SECONDS, LATE_MILLISECONDS = 5.0, 60_000


def find_errors(request: JobRequest) -> ConfigErrors:
    """Return the configuration errors of a request."""
    launch = request.job.launch
    errors = check_sagemaker_options(request)
    bucket = launch.options.get("bucket", "BUCKET")
    errors += check_name(request, f"s3://{bucket}/weft/{request.name}")
    errors += check_fixed_nodes(
        request, "is a range, but SageMaker starts a fixed number of instances"
    )
    if launch.image == "auto":
        rule = "is not possible: SageMaker has no default image with weft"
        remedy = "give --launch.image VALUE, an image with weft: see docs/sagemaker.md"
        errors.add("launch.image", rule, remedy)
    return errors


# --------------------------------------------------------------------------- the request


def render(request: JobRequest) -> str:
    """Return the request; the job's name has the time, because it must be unique."""
    job, options, home = request.job, request.job.launch.options, _s3_prefix(request)
    entry = ["python", "-m", "weft.cluster.sagemaker_entry"]
    if job.launch.setup:
        entry = ["bash", "-c", build_script(job.launch.setup, " ".join(entry))]
    body: dict[str, Any] = {
        "TrainingJobName": f"{request.name}-{time.strftime('%y%m%d-%H%M%S', time.gmtime())}",
        "RoleArn": options["role"],
        "AlgorithmSpecification": {
            "TrainingImage": job.launch.image,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": entry,
            "MetricDefinitions": metric_definitions(job),
        },
        "HyperParameters": _hyperparameters(request),
        "ResourceConfig": _resources(request),
        "OutputDataConfig": {"S3OutputPath": f"{home}/output"},
        "CheckpointConfig": {"S3Uri": f"{home}/run", "LocalPath": RUN},
        "StoppingCondition": time_limits(request),
    }
    if channels := _channels(request):
        body["InputDataConfig"] = channels
    if "subnets" in options:
        body["VpcConfig"] = {
            "Subnets": options["subnets"].split("+"),
            "SecurityGroupIds": options["security_groups"].split("+"),
        }
    if options.get("spot") == "true":
        body["EnableManagedSpotTraining"] = True
    if "retries" in options:
        body["RetryStrategy"] = {"MaximumRetryAttempts": int(options["retries"])}
    if "tensorboard" in job.monitor.trackers:
        tensorboard = {"S3OutputPath": f"{home}/tensorboard", "LocalPath": f"{RUN}/tensorboard"}
        body["TensorBoardOutputConfig"] = tensorboard
    if "kms_key" in options:
        body["OutputDataConfig"]["KmsKeyId"] = options["kms_key"]
    if "tags" in options:
        pairs = [tag.partition(":") for tag in options["tags"].split("+")]
        body["Tags"] = [{"Key": key, "Value": value} for key, _, value in pairs]
    return json.dumps(body, indent=2) + "\n"


def _hyperparameters(request: JobRequest) -> dict[str, str]:
    """Return the recipe, and the overrides with the paths of the container."""
    parameters = {"recipe": request.recipe, **request.overrides}
    del parameters[RUN_DIR]  # a path of this machine
    if standalone_recipe(request) is not None:
        parameters["recipe"] = f"{CHANNELS}/recipe/recipe.toml"
    if s3_data(request.job):
        parameters["data.path"] = f"{CHANNELS}/training"
    if request.nodes[1] > 1 and request.job.checkpoint.is_in_run_dir:
        parameters["checkpoint.dir"] = f"{_s3_prefix(request)}/checkpoints"
    return parameters


def _channels(request: JobRequest) -> list[dict[str, Any]]:
    """Return the input channels: recipe, data in S3, and file systems."""
    sources = []  # name, location and input mode
    if standalone_recipe(request) is not None:
        sources.append(("recipe", f"{_s3_prefix(request)}/recipe/", "File"))
    if data := s3_data(request.job):
        mode = request.job.launch.options.get("input_mode", "FastFile")
        sources.append(("training", data, mode))
    channels = []
    for name, uri, mode in sources:
        source = {"S3DataType": "S3Prefix", "S3Uri": uri}
        source["S3DataDistributionType"] = "FullyReplicated"
        channel = {"ChannelName": name, "DataSource": {"S3DataSource": source}, "InputMode": mode}
        channels.append(channel)
    return [*channels, *make_channels(request.job)]


def _resources(request: JobRequest) -> dict[str, Any]:
    """Return the instances and their disks."""
    options = request.job.launch.options
    types, plan = options["instance_type"].split("+"), options.get("training_plan")
    resources: dict[str, Any] = {"InstanceCount": request.nodes[1]}
    if len(types) == 1:
        resources["InstanceType"] = types[0]
        if plan:
            resources["TrainingPlanArn"] = plan
    else:
        resources["InstancePreferences"] = [{"InstanceType": name} for name in types]
        if plan:
            resources["InstancePreferences"][0]["TrainingPlanArns"] = [plan]
    resources["VolumeSizeInGB"] = int(options.get("volume", "100"))
    if "keep_alive" in options:
        resources["KeepAlivePeriodInSeconds"] = parse_duration(options["keep_alive"])
    if "kms_key" in options and not any(map(has_local_disks, types)):
        resources["VolumeKmsKeyId"] = options["kms_key"]
    return resources


def has_local_disks(instance_type: str) -> bool:
    """Return True for a type with local disks, whose volumes cannot have a key.

    Hardware encrypts these disks.  The rule is that of Amazon's Python SDK (a "d" in the family,
    as in p4d, or g5), with the families that came later.
    """
    family = instance_type.split(".")[1]
    return "d" in family or family.startswith(("g5", "g6", "g7", "p5", "p6", "trn"))


def _s3_prefix(request: JobRequest) -> str:
    return f"s3://{request.job.launch.options['bucket']}/weft/{request.name}"


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
    with connect_aws(request.job.launch.options.get("region")) as client:
        verify_file_systems(client, request).raise_any()
        if recipe is not None:
            bucket, _, prefix = _s3_prefix(request).removeprefix("s3://").partition("/")
            key = f"{prefix}/recipe/recipe.toml"
            client("s3").put_object(Bucket=bucket, Key=key, Body=recipe.encode())
        return str(client("sagemaker").create_training_job(**body)["TrainingJobArn"])


def status(id: str) -> str:
    """Return one line: 'waiting...', 'running...' with instances, or how it ended."""
    name, region = _parse_id(id)
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
    name, region = _parse_id(id)
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
    name, region = _parse_id(id)
    with connect_aws(region) as client:
        client("sagemaker").stop_training_job(TrainingJobName=name)
    return f"stopping {name}: it has two minutes to save a checkpoint"


def _parse_id(id: str) -> tuple[str, str | None]:
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
