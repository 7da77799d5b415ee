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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from weft.cluster.submit import (
    BOOLEAN_RULE,
    INTEGER_PATTERN,
    RUN_DIR,
    JobRequest,
    Option,
    build_script,
    check_duration,
    check_fixed_nodes,
    check_name,
    check_options,
    parse_duration,
    render_template,
    standalone_recipe,
    warn_unchecked,
)
from weft.config.errors import ConfigErrors, WeftError

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
# Between requests while following a log; an event may arrive this much later than a newer one.
POLL_SECONDS, LATE_MILLISECONDS = 5.0, 60_000


def find_errors(request: JobRequest) -> ConfigErrors:
    """Return the configuration errors of a request."""
    launch = request.job.launch
    required = ["role", "instance_type", "bucket"]
    errors = check_options(request, OPTIONS, required, r"[A-Za-z0-9][A-Za-z0-9_+=,.@:/\-]*")
    key = "launch.options"
    if ("subnets" in launch.options) != ("security_groups" in launch.options):
        errors.add(f"{key}.subnets", "must be given together with security_groups", value="")
    if wait := launch.options.get("wait"):
        invalid = check_duration(wait, f"{key}.wait")
        errors += invalid
        if not (invalid or check_duration(launch.time_limit)) and parse_duration(
            wait
        ) < parse_duration(launch.time_limit):
            errors.add(f"{key}.wait", "must not be shorter than launch.time_limit")
        if launch.options.get("spot") != "true":
            errors.add(f"{key}.wait", "requires spot=true")
    bucket = launch.options.get("bucket", "BUCKET")
    errors += check_name(request, f"s3://{bucket}/weft/{request.name}")
    errors += check_fixed_nodes(request, "SageMaker starts a fixed number of instances")
    if launch.image == "auto":
        rule = "is not possible: SageMaker has no default image with weft"
        remedy = "name an image; see docs/sagemaker.md"
        errors.add("launch.image", rule, remedy)
    return errors


def render(request: JobRequest) -> str:
    """Return the request; the job's name has the time, because it must be unique."""
    job, options = request.job, request.job.launch.options
    home, seconds = _s3_prefix(request), parse_duration(job.launch.time_limit)
    entry = ["python", "-m", "weft.cluster.sagemaker_entry"]
    if job.launch.setup:
        entry = ["bash", "-c", build_script(job.launch.setup, " ".join(entry))]
    parameters = {"recipe": request.recipe, **request.overrides}
    del parameters[RUN_DIR]  # a path of this machine
    channels = []  # name, source and input mode
    if standalone_recipe(request) is not None:
        parameters["recipe"] = f"{CHANNEL}/recipe/recipe.toml"
        channels.append(("recipe", f"{home}/recipe/", "File"))
    if job.data.path.startswith("s3://") and not re.search(r"[*?\[]", job.data.path):
        parameters["data.path"] = f"{CHANNEL}/training"
        channels.append(("training", job.data.path, "FastFile"))
    if request.nodes[1] > 1 and job.checkpoint.is_in_run_dir:
        parameters["checkpoint.dir"] = f"{home}/checkpoints"
    text = render_template(
        "sagemaker.json.j2",
        json.dumps,
        job_name=f"{request.name}-{time.strftime('%y%m%d-%H%M%S', time.gmtime())}",
        image=job.launch.image,
        entry=entry,
        parameters=parameters,
        channels=channels,
        home=home,
        instances=request.nodes[1],
        is_spot=options.get("spot") == "true",
        seconds=seconds,
        wait_seconds=parse_duration(options["wait"]) if "wait" in options else 2 * seconds,
        options=options,
    )
    return json.dumps(json.loads(text), indent=2) + "\n"


def _s3_prefix(request: JobRequest) -> str:
    return f"s3://{request.job.launch.options['bucket']}/weft/{request.name}"


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
    body, recipe = json.loads(path.read_text("utf-8")), standalone_recipe(request)
    with connect_aws(request.job.launch.options.get("region")) as client:
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
    resources = job["ResourceConfig"]
    instances = f"{resources['InstanceCount']} {resources['InstanceType']}"
    message = (job.get("SecondaryStatusTransitions") or [{}])[-1].get("StatusMessage", detail)
    is_running = detail in ("Downloading", "Training", "Uploading", "Stopping")
    return f"{'running on' if is_running else 'waiting for'} {instances}: {message}"


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
