"""A SageMaker training job: the request of CreateTrainingJob, as JSON.

What it asks for is a container of an image with weft in it, whose first process on each instance is
`weft.cluster.sagemaker_entry`, with the words of the command as hyperparameters.  The run's folder
is /opt/ml/checkpoints, which SageMaker keeps in S3.  Of several instances each has one of its own,
so their checkpoints, which all write together, go to S3 directly.

Validated by the model of the interface that botocore ships, which is the published one; botocore is
what boto3 consists of.
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
    RUN_DIR,
    SWITCH,
    WHOLE,
    Option,
    check_name,
    common_problems,
    fixed_nodes,
    own_recipe,
    pairs_of,
    seconds,
    time_problems,
    unchecked,
)
from weft.cluster.submit import Request
from weft.config.errors import ConfigError, WeftError

ENDING = ".json"
OPTIONS = {
    "role": Option("ARN of the role that the job takes: arn:aws:iam::...:role/..."),
    "instance_type": Option("such as ml.p5.48xlarge"),
    "bucket": Option("where the run's folder, checkpoints, recipe and model go, below weft/NAME"),
    "region": Option("where to; the AWS configuration's own, if not given"),
    "volume": Option("GB of disk of each instance (100)", WHOLE, "must be a whole number of GB"),
    "spot": Option(
        "true: managed spot training; the job goes on where it was interrupted", *SWITCH
    ),
    "wait": Option("spot: longest time until it ends, D-HH:MM:SS (twice launch.time_limit)"),
    "subnets": Option("of a VPC, with '+' between them; for FSx, and EFA across instances"),
    "security_groups": Option("of the VPC, with '+' between them"),
}
CHANNEL = "/opt/ml/input/data"
GROUP = "/aws/sagemaker/TrainingJobs"
ENDED = ("Completed", "Failed", "Stopped")
INSTALL = "pip install 'weft[sagemaker]'"
# Between looks at a job whose log is followed.
POLL_SECONDS = 5.0


def problems(request: Request) -> list[ConfigError]:
    """What cannot be asked for here."""
    launch = request.job.launch
    needed = ["role", "instance_type", "bucket"]
    found = common_problems(request, OPTIONS, needed, r"[A-Za-z0-9][A-Za-z0-9_+=,.@:/\-]*")
    key = "launch.options"
    if ("subnets" in launch.options) != ("security_groups" in launch.options):
        found.append(
            ConfigError(f"{key}.subnets", "", "goes with security_groups, and they with it")
        )
    if wait := launch.options.get("wait"):
        unread = time_problems(wait, f"{key}.wait")
        found += unread
        if not (unread or time_problems(launch.time_limit)) and seconds(wait) < seconds(
            launch.time_limit
        ):
            found.append(
                ConfigError(f"{key}.wait", wait, "must not be shorter than launch.time_limit")
            )
        if launch.options.get("spot") != "true":
            found.append(ConfigError(f"{key}.wait", wait, "is for spot=true"))
    bucket = launch.options.get("bucket", "BUCKET")
    found += check_name(request, f"s3://{bucket}/weft/{request.name}")
    found += fixed_nodes(request, "SageMaker starts a fixed number of instances")
    if launch.image == "auto":
        rule = "SageMaker has no default image with weft in it"
        found.append(ConfigError("launch.image", "auto", rule, "name one; docs/sagemaker.md"))
    return found


def render(request: Request) -> str:
    """The request; the job's name, which no other may ever have had, ends in the time."""
    job, options = request.job, request.job.launch.options
    home = _home(request)
    stamp = time.strftime("%y%m%d-%H%M%S", time.gmtime())
    entry = ["python", "-m", "weft.cluster.sagemaker_entry"]
    if job.launch.setup:
        entry = ["bash", "-c", "\n".join(["set -e", *job.launch.setup, f"exec {' '.join(entry)}"])]
    parameters = {"recipe": request.words[2]} | pairs_of(request)
    parameters.pop(RUN_DIR, None)  # it is of this machine
    channels = []
    if own_recipe(request) is not None:
        parameters["recipe"] = f"{CHANNEL}/recipe/recipe.toml"
        channels.append(_channel("recipe", f"{home}/recipe/", "File"))
    if job.data.path.startswith("s3://") and not re.search(r"[*?\[]", job.data.path):
        parameters["data.path"] = f"{CHANNEL}/training"
        channels.append(_channel("training", job.data.path, "FastFile"))
    if request.nodes[1] > 1 and job.checkpoint.dir == "auto":
        parameters["checkpoint.dir"] = f"{home}/checkpoints"
    limit = seconds(job.launch.time_limit)
    stopping = {"MaxRuntimeInSeconds": limit}
    asked: dict[str, Any] = {
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
        asked["InputDataConfig"] = channels
    if "subnets" in options:
        asked["VpcConfig"] = {
            "Subnets": options["subnets"].split("+"),
            "SecurityGroupIds": options["security_groups"].split("+"),
        }
    if options.get("spot") == "true":
        asked["EnableManagedSpotTraining"] = True
        wait = options.get("wait")
        stopping["MaxWaitTimeInSeconds"] = seconds(wait) if wait else 2 * limit
    return json.dumps(asked, indent=2) + "\n"


def _home(request: Request) -> str:
    return f"s3://{request.job.launch.options['bucket']}/weft/{request.name}"


def _channel(name: str, place: str, mode: str) -> dict[str, Any]:
    source = {
        "S3DataType": "S3Prefix",
        "S3Uri": place,
        "S3DataDistributionType": "FullyReplicated",
    }
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}, "InputMode": mode}


# --------------------------------------------------------------------------- checking


def check(text: str) -> list[str]:
    """What is wrong by the interface's published model."""
    try:
        asked = json.loads(text)
    except ValueError as error:
        return [f"no JSON: {error}"]
    try:
        from botocore.session import get_session
        from botocore.validate import ParamValidator
    except ImportError:
        return unchecked("the interface's model", INSTALL)
    model = get_session().get_service_model("sagemaker")
    shape = model.operation_model("CreateTrainingJob").input_shape
    report = ParamValidator().validate(asked, shape).generate_report()
    return [*filter(None, report.splitlines()), *_beyond(asked, shape, "")]


def _beyond(value: Any, shape: Any, path: str) -> Iterator[str]:
    """What the service would refuse of what botocore lets pass: too much, patterns, other words."""
    most = shape.metadata.get("max")
    if shape.type_name in ("list", "map", "string") and isinstance(value, list | dict | str):
        if most is not None and len(value) > most:
            yield f"{path}: {len(value)} long, at most {most}"
    elif isinstance(value, int) and most is not None and value > most:
        yield f"{path}: {value}, at most {most}"
    if shape.type_name == "string" and isinstance(value, str):
        pattern = shape.metadata.get("pattern")
        if pattern and not re.fullmatch(pattern, value, re.DOTALL):
            yield f"{path}: {value!r} does not match {pattern}"
        if shape.enum and value not in shape.enum:
            yield f"{path}: {value!r} is none of {', '.join(shape.enum)}"
    elif shape.type_name == "structure" and isinstance(value, dict):
        for name, member in shape.members.items():
            if name in value:
                yield from _beyond(value[name], member, f"{path}.{name}")
    elif shape.type_name == "list" and isinstance(value, list):
        for number, each in enumerate(value):
            yield from _beyond(each, shape.member, f"{path}[{number}]")
    elif shape.type_name == "map" and isinstance(value, dict):
        for name, each in value.items():
            yield from _beyond(name, shape.key, f"{path}.{name}")
            yield from _beyond(each, shape.value, f"{path}.{name}")


# --------------------------------------------------------------------------- the service


def submit(path: Path, request: Request) -> str:
    """Put the recipe into S3, unless it is a shipped one, and create the job; its ARN."""
    asked = json.loads(path.read_text("utf-8"))
    region = request.job.launch.options.get("region")
    recipe = own_recipe(request)
    with talking():
        if recipe is not None:
            bucket, _, prefix = _home(request).removeprefix("s3://").partition("/")
            place = {"Bucket": bucket, "Key": f"{prefix}/recipe/recipe.toml"}
            _client("s3", region).put_object(**place, Body=recipe.encode())
        return str(_client("sagemaker", region).create_training_job(**asked)["TrainingJobArn"])


def status(id: str) -> str:
    """One line that begins with 'waiting' or 'running' (on what), or how it ended."""
    with talking():
        name, region = _parts(id)
        found = _client("sagemaker", region).describe_training_job(TrainingJobName=name)
    state, detail = found["TrainingJobStatus"], found.get("SecondaryStatus", "")
    if state == "Failed":
        return f"failed: {found.get('FailureReason', detail)}"
    if state in ENDED:
        return str(state).lower()
    resources = found["ResourceConfig"]
    where = f"{resources['InstanceCount']} {resources['InstanceType']}"
    said = (found.get("SecondaryStatusTransitions") or [{}])[-1].get("StatusMessage", detail)
    begun = detail in ("Downloading", "Training", "Uploading", "Stopping")
    return f"{'running on' if begun else 'waiting for'} {where}: {said}"


def logs(id: str, follow: bool) -> Iterator[str]:
    """Lines that the job has printed, each after its instance's name."""
    from botocore.exceptions import ClientError

    name, region = _parts(id)
    with talking():
        job, log = _client("sagemaker", region), _client("logs", region)
    tokens: dict[str, str] = {}
    while True:
        with talking():
            state = job.describe_training_job(TrainingJobName=name)["TrainingJobStatus"]
            try:
                pages = log.get_paginator("describe_log_streams").paginate(
                    logGroupName=GROUP, logStreamNamePrefix=f"{name}/"
                )
                streams = [each["logStreamName"] for page in pages for each in page["logStreams"]]
            except ClientError as error:
                if error.response["Error"]["Code"] != "ResourceNotFoundException":
                    raise
                streams = []  # no job of this account has printed anything yet
        for stream in streams:
            yield from _lines(log, stream, tokens)
        if not follow or state in ENDED:
            return
        time.sleep(POLL_SECONDS)


def _lines(log: Any, stream: str, tokens: dict[str, str]) -> Iterator[str]:
    """What a stream has after its token, which moves on."""
    host = stream.partition("/")[2].rpartition("-")[0] or stream
    while True:
        after = {"nextToken": tokens[stream]} if stream in tokens else {}
        with talking():
            page = log.get_log_events(
                logGroupName=GROUP, logStreamName=stream, startFromHead=True, **after
            )
        for event in page["events"]:
            yield f"{host}: {event['message']}"
        moved = page["nextForwardToken"] != tokens.get(stream)
        tokens[stream] = page["nextForwardToken"]
        if not moved:
            return


def stop(id: str) -> str:
    """Have it save and end."""
    name, region = _parts(id)
    with talking():
        _client("sagemaker", region).stop_training_job(TrainingJobName=name)
    return f"stopping {name}: it has two minutes to save"


def _parts(id: str) -> tuple[str, str | None]:
    """Name and region of a job, by its ARN or its name."""
    if id.startswith("arn:"):
        parts = id.split(":", 5)
        return parts[5].removeprefix("training-job/"), parts[3]
    return id, None


def _client(service: str, region: str | None) -> Any:
    """A client with the credentials that the AWS command line would have."""
    try:
        from botocore.session import get_session
    except ImportError as error:
        raise WeftError(f"needs botocore: {INSTALL}") from error
    return get_session().create_client(service, region_name=region)


@contextmanager
def talking() -> Iterator[None]:
    """What botocore raises inside is said in a line."""
    try:
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        raise WeftError(f"needs botocore: {INSTALL}") from error
    try:
        yield
    except (BotoCoreError, ClientError) as error:
        raise WeftError(f"AWS: {error}") from error
