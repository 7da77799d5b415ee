"""SageMaker: a training job, as the JSON request of CreateTrainingJob.

The job runs an image with weft.  The first process on each instance is
`weft.cluster.sagemaker_entry`, with the command as hyperparameters.  The run directory is
/opt/ml/checkpoints, which SageMaker copies to S3.  With several instances this directory is not
shared, so the ranks write their checkpoints to S3 directly.

botocore (the core of boto3) ships the published model of the API, which validates the request.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weft.cluster.scheduler import (
    BOOLEAN_RULE,
    INTEGER_PATTERN,
    RUN_DIR,
    Option,
    check_duration,
    check_fixed_nodes,
    check_name,
    check_options,
    parse_duration,
    parse_overrides,
    standalone_recipe,
    warn_unchecked,
)
from weft.cluster.submit import JobRequest
from weft.config.errors import ConfigError, WeftError

FILE_SUFFIX = ".json"
OPTIONS = {
    "role": Option("ARN of the role of the job: arn:aws:iam::...:role/..."),
    "instance_type": Option("instance type, such as ml.p5.48xlarge"),
    "bucket": Option("S3 bucket for run directory, checkpoints, recipe and model, at weft/NAME"),
    "region": Option("region; default: that of the AWS configuration"),
    "volume": Option(
        "GB of disk of each instance (100)", INTEGER_PATTERN, "must be an integer number of GB"
    ),
    "spot": Option(
        "true: managed spot training; the job resumes after an interruption", *BOOLEAN_RULE
    ),
    "wait": Option("spot: maximum time with waiting, D-HH:MM:SS (twice launch.time_limit)"),
    "subnets": Option("subnets of a VPC, joined by '+'; for FSx, and EFA across instances"),
    "security_groups": Option("security groups of the VPC, joined by '+'"),
}
CHANNEL = "/opt/ml/input/data"
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
FINAL_STATES = ("Completed", "Failed", "Stopped")
INSTALL = "pip install 'weft[sagemaker]'"
# Between requests while following a log.
POLL_SECONDS = 5.0


def find_problems(request: JobRequest) -> list[ConfigError]:
    """Return the configuration errors of a request."""
    launch = request.job.launch
    required = ["role", "instance_type", "bucket"]
    errors = check_options(request, OPTIONS, required, r"[A-Za-z0-9][A-Za-z0-9_+=,.@:/\-]*")
    key = "launch.options"
    if ("subnets" in launch.options) != ("security_groups" in launch.options):
        errors.append(
            ConfigError(f"{key}.subnets", "", "must be given together with security_groups")
        )
    if wait := launch.options.get("wait"):
        invalid = check_duration(wait, f"{key}.wait")
        errors += invalid
        if not (invalid or check_duration(launch.time_limit)) and parse_duration(
            wait
        ) < parse_duration(launch.time_limit):
            errors.append(
                ConfigError(f"{key}.wait", wait, "must not be shorter than launch.time_limit")
            )
        if launch.options.get("spot") != "true":
            errors.append(ConfigError(f"{key}.wait", wait, "requires spot=true"))
    bucket = launch.options.get("bucket", "BUCKET")
    errors += check_name(request, f"s3://{bucket}/weft/{request.name}")
    errors += check_fixed_nodes(request, "SageMaker starts a fixed number of instances")
    if launch.image == "auto":
        rule = "is not possible: SageMaker has no default image with weft"
        remedy = "name an image; see docs/sagemaker.md"
        errors.append(ConfigError("launch.image", "auto", rule, remedy))
    return errors


def render(request: JobRequest) -> str:
    """Return the request; the job's name has the time, because it must be unique."""
    job, options = request.job, request.job.launch.options
    home = _s3_prefix(request)
    stamp = time.strftime("%y%m%d-%H%M%S", time.gmtime())
    entry = ["python", "-m", "weft.cluster.sagemaker_entry"]
    if job.launch.setup:
        entry = ["bash", "-c", "\n".join(["set -e", *job.launch.setup, f"exec {' '.join(entry)}"])]
    parameters = {"recipe": request.words[2]} | parse_overrides(request)
    parameters.pop(RUN_DIR, None)  # a path of this machine
    channels = []
    if standalone_recipe(request) is not None:
        parameters["recipe"] = f"{CHANNEL}/recipe/recipe.toml"
        channels.append(_channel("recipe", f"{home}/recipe/", "File"))
    if job.data.path.startswith("s3://") and not re.search(r"[*?\[]", job.data.path):
        parameters["data.path"] = f"{CHANNEL}/training"
        channels.append(_channel("training", job.data.path, "FastFile"))
    if request.nodes[1] > 1 and job.checkpoint.is_in_run_dir:
        parameters["checkpoint.dir"] = f"{home}/checkpoints"
    limit = parse_duration(job.launch.time_limit)
    stopping = {"MaxRuntimeInSeconds": limit}
    body: dict[str, Any] = {
        "TrainingJobName": f"{request.name}-{stamp}",
        "RoleArn": options["role"],
        "AlgorithmSpecification": {
            "TrainingImage": job.launch.image,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": entry,
        },
        "HyperParameters": parameters,
        "ResourceConfig": {
            "InstanceType": options["instance_type"],
            "InstanceCount": request.nodes[1],
            "VolumeSizeInGB": int(options.get("volume", "100")),
        },
        "OutputDataConfig": {"S3OutputPath": f"{home}/output"},
        "CheckpointConfig": {"S3Uri": f"{home}/run", "LocalPath": "/opt/ml/checkpoints"},
        "StoppingCondition": stopping,
    }
    if channels:
        body["InputDataConfig"] = channels
    if "subnets" in options:
        body["VpcConfig"] = {
            "Subnets": options["subnets"].split("+"),
            "SecurityGroupIds": options["security_groups"].split("+"),
        }
    if options.get("spot") == "true":
        body["EnableManagedSpotTraining"] = True
        wait = options.get("wait")
        stopping["MaxWaitTimeInSeconds"] = parse_duration(wait) if wait else 2 * limit
    return json.dumps(body, indent=2) + "\n"


def _s3_prefix(request: JobRequest) -> str:
    return f"s3://{request.job.launch.options['bucket']}/weft/{request.name}"


def _channel(name: str, uri: str, mode: str) -> dict[str, Any]:
    source = {
        "S3DataType": "S3Prefix",
        "S3Uri": uri,
        "S3DataDistributionType": "FullyReplicated",
    }
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}, "InputMode": mode}


# --------------------------------------------------------------------------- checking


def check(text: str) -> list[str]:
    """Return the errors of a request against the published model of the API."""
    try:
        body = json.loads(text)
    except ValueError as error:
        return [f"the request is not valid JSON: {error}"]
    try:
        from botocore.session import get_session
        from botocore.validate import ParamValidator
    except ImportError:
        return warn_unchecked("the model of the API", INSTALL)
    model = get_session().get_service_model("sagemaker")
    shape = model.operation_model("CreateTrainingJob").input_shape
    report = ParamValidator().validate(body, shape).generate_report()
    return [*filter(None, report.splitlines()), *_check_constraints(body, shape, "")]


def _check_constraints(value: Any, shape: Any, path: str) -> Iterator[str]:
    """Yield violations of constraints that botocore does not check."""
    maximum = shape.metadata.get("max")
    if shape.type_name in ("list", "map", "string") and isinstance(value, list | dict | str):
        if maximum is not None and len(value) > maximum:
            yield f"{path}: length {len(value)} exceeds {maximum}"
    elif isinstance(value, int) and maximum is not None and value > maximum:
        yield f"{path}: {value} exceeds {maximum}"
    if shape.type_name == "string" and isinstance(value, str):
        pattern = shape.metadata.get("pattern")
        if pattern and not re.fullmatch(pattern, value, re.DOTALL):
            yield f"{path}: {value!r} does not match {pattern}"
        if shape.enum and value not in shape.enum:
            yield f"{path}: {value!r} is not one of {', '.join(shape.enum)}"
    elif shape.type_name == "structure" and isinstance(value, dict):
        for name, member in shape.members.items():
            if name in value:
                yield from _check_constraints(value[name], member, f"{path}.{name}")
    elif shape.type_name == "list" and isinstance(value, list):
        for number, item in enumerate(value):
            yield from _check_constraints(item, shape.member, f"{path}[{number}]")
    elif shape.type_name == "map" and isinstance(value, dict):
        for name, item in value.items():
            yield from _check_constraints(name, shape.key, f"{path}.{name}")
            yield from _check_constraints(item, shape.value, f"{path}.{name}")


# --------------------------------------------------------------------------- the service


def submit(path: Path, request: JobRequest) -> str:
    """Upload the recipe unless it is a shipped one, create the job, return its ARN."""
    body = json.loads(path.read_text("utf-8"))
    region = request.job.launch.options.get("region")
    recipe = standalone_recipe(request)
    with aws_errors():
        if recipe is not None:
            bucket, _, prefix = _s3_prefix(request).removeprefix("s3://").partition("/")
            key = f"{prefix}/recipe/recipe.toml"
            _client("s3", region).put_object(Bucket=bucket, Key=key, Body=recipe.encode())
        return str(_client("sagemaker", region).create_training_job(**body)["TrainingJobArn"])


def status(id: str) -> str:
    """Return one line: 'waiting...', 'running...' with instances, or how it ended."""
    with aws_errors():
        name, region = _parse_id(id)
        job = _client("sagemaker", region).describe_training_job(TrainingJobName=name)
    state, detail = job["TrainingJobStatus"], job.get("SecondaryStatus", "")
    if state == "Failed":
        return f"failed: {job.get('FailureReason', detail)}"
    if state in FINAL_STATES:
        return str(state).lower()
    resources = job["ResourceConfig"]
    instances = f"{resources['InstanceCount']} {resources['InstanceType']}"
    message = (job.get("SecondaryStatusTransitions") or [{}])[-1].get("StatusMessage", detail)
    is_running = detail in ("Downloading", "Training", "Uploading", "Stopping")
    return f"{'running on' if is_running else 'waiting for'} {instances}: {message}"


def logs(id: str, follow: bool) -> Iterator[str]:
    """Yield the lines that the job has printed, each after the name of its instance."""
    from botocore.exceptions import ClientError

    name, region = _parse_id(id)
    with aws_errors():
        job, log = _client("sagemaker", region), _client("logs", region)
    tokens: dict[str, str] = {}
    while True:
        with aws_errors():
            state = job.describe_training_job(TrainingJobName=name)["TrainingJobStatus"]
            try:
                pages = log.get_paginator("describe_log_streams").paginate(
                    logGroupName=LOG_GROUP, logStreamNamePrefix=f"{name}/"
                )
                streams = [log["logStreamName"] for page in pages for log in page["logStreams"]]
            except ClientError as error:
                if error.response["Error"]["Code"] != "ResourceNotFoundException":
                    raise
                streams = []  # the log group does not exist before the account's first job
        for stream in streams:
            yield from _read_stream(log, stream, tokens)
        if not follow or state in FINAL_STATES:
            return
        time.sleep(POLL_SECONDS)


def _read_stream(log: Any, stream: str, tokens: dict[str, str]) -> Iterator[str]:
    """Yield the lines of a stream after its token, and advance the token."""
    host = stream.partition("/")[2].rpartition("-")[0] or stream
    while True:
        after = {"nextToken": tokens[stream]} if stream in tokens else {}
        with aws_errors():
            page = log.get_log_events(
                logGroupName=LOG_GROUP, logStreamName=stream, startFromHead=True, **after
            )
        for event in page["events"]:
            yield f"{host}: {event['message']}"
        moved = page["nextForwardToken"] != tokens.get(stream)
        tokens[stream] = page["nextForwardToken"]
        if not moved:
            return


def cancel(id: str) -> str:
    """Stop the job, which saves a checkpoint; return a message."""
    name, region = _parse_id(id)
    with aws_errors():
        _client("sagemaker", region).stop_training_job(TrainingJobName=name)
    return f"stopping {name}: it has two minutes to save a checkpoint"


def _parse_id(id: str) -> tuple[str, str | None]:
    """Return name and region of a job, given its ARN or its name."""
    if id.startswith("arn:"):
        parts = id.split(":", 5)
        return parts[5].removeprefix("training-job/"), parts[3]
    return id, None


def _client(service: str, region: str | None) -> Any:
    """Return a client with the credentials of the AWS command line."""
    try:
        from botocore.session import get_session
    except ImportError as error:
        raise WeftError(f"SageMaker requires botocore: {INSTALL}") from error
    return get_session().create_client(service, region_name=region)


@contextmanager
def aws_errors() -> Iterator[None]:
    """Turn the exceptions of botocore into a WeftError."""
    try:
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        raise WeftError(f"SageMaker requires botocore: {INSTALL}") from error
    try:
        yield
    except (BotoCoreError, ClientError) as error:
        raise WeftError(f"AWS: {error}") from error
