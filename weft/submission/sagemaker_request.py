"""Check a CreateTrainingJob request against the published model of the API.

botocore ships the model.  Its own check ignores patterns, enumerations and maxima, which are most
of the rules, so this module applies all rules of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from weft.config.errors import MISSING, ConfigError, suggest

SHOWN_CHARACTERS = 60
TYPES: dict[str, tuple[Any, str]] = {
    "string": (str, "text"),
    "integer": (int, "an integer"),
    "long": (int, "an integer"),
    "boolean": (bool, "true or false"),
    "structure": (dict, "an object"),
    "map": (dict, "an object"),
    "list": (list, "a list"),
}


# The key that sets a field, and the remedy of a wrong value, by the beginning of the field's path;
# the longest one applies.
ORIGINS = {
    "TrainingJobName": ("run.dir", "end it in a short name of a to z, digits and '-'"),
    "RoleArn": ("launch.role", "use arn:aws:iam::ACCOUNT:role/NAME"),
    "AlgorithmSpecification.TrainingImage": ("launch.image", "use at most 255 characters"),
    "AlgorithmSpecification.ContainerEntrypoint": (
        "launch.setup",
        "put its lines into the image, for SageMaker limits the script",
    ),
    "HyperParameters": (
        "the command line",
        "put keys into a recipe of your own, which weft uploads",
    ),
    "Environment": ("launch.env", "use at most 100 variables of 512 characters"),
    "InputDataConfig": ("data.path", "use an s3:// prefix of at most 1,024 characters"),
    "InputDataConfig[].ChannelName": ("launch.mounts", "use a shorter directory"),
    "InputDataConfig[].DataSource.FileSystemDataSource": (
        "launch.mounts",
        "use fsx:fs-ID:/MOUNT_NAME or efs:fs-ID:/DIRECTORY",
    ),
    "OutputDataConfig": ("launch.bucket", "use s3://BUCKET"),
    "ResourceConfig.InstanceCount": ("run.nodes", "use the number of instances"),
    "ResourceConfig.InstanceType": ("launch.instance_type", "use ml.p5.48xlarge"),
    "ResourceConfig.InstancePreferences": (
        "launch.instance_type",
        "use up to 5 types, joined by '+'",
    ),
    "ResourceConfig.VolumeSizeInGB": ("launch.disk", "use a number of GB"),
    "ResourceConfig.TrainingPlanArn": (
        "launch.reservation",
        "use the TrainingPlanArn of 'aws sagemaker list-training-plans'",
    ),
    "StoppingCondition.MaxRuntimeInSeconds": ("launch.time_limit", "use at most 28 days"),
    "Tags": ("launch.labels", "use up to 50 labels"),
    "VpcConfig.SecurityGroupIds": ("launch.security_groups", "use up to 5 IDs, such as sg-1"),
    "VpcConfig.Subnets": ("launch.subnets", "use up to 16 IDs, such as subnet-1"),
}


@cache
def request_shape() -> Any:
    """Return botocore's shape of the request.

    Raises:
        ImportError: if botocore is not installed.
    """
    from botocore.session import get_session

    model = get_session().get_service_model("sagemaker")
    return model.operation_model("CreateTrainingJob").input_shape


def instance_types() -> list[str]:
    """Return the instance types of training jobs; see `request_shape`."""
    return list(request_shape().members["ResourceConfig"].members["InstanceType"].enum)


def check_request(body: object) -> list[str]:
    """Return a sentence for each rule that a request breaks; see `request_shape`."""
    return [str(error) for error in _check(body, request_shape(), "")]


def _check(value: Any, shape: Any, path: str) -> Iterator[ConfigError]:
    """Yield the errors of a value and of all that it contains."""
    kind, article = TYPES[shape.type_name]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        yield _error(path, value, f"must be {article}")
        return
    yield from _check_size(value, shape, path)
    if shape.type_name == "string":
        yield from _check_text(value, shape, path)
    elif shape.type_name == "structure":
        for name in shape.required_members:
            if name not in value:
                yield _error(f"{path}.{name}", MISSING, "is missing")
        for name, item in value.items():
            if name in shape.members:
                yield from _check(item, shape.members[name], f"{path}.{name}")
            else:
                rule = "is unknown to the installed botocore"
                remedy = "update it with pip install -U botocore, or correct the name"
                yield ConfigError(f"{path}.{name}"[1:], MISSING, rule, remedy)
    elif shape.type_name == "list":
        for number, item in enumerate(value):
            yield from _check(item, shape.member, f"{path}[{number}]")
    elif shape.type_name == "map":
        for name, item in value.items():
            yield from _check(name, shape.key, f"{path}.{name}")
            yield from _check(item, shape.value, f"{path}.{name}")


def _check_size(value: Any, shape: Any, path: str) -> Iterator[ConfigError]:
    """Yield errors of a number, or of a length."""
    if shape.type_name in ("structure", "boolean"):
        return
    is_number = isinstance(value, int)
    size = value if is_number else len(value)
    unit = "" if is_number else " characters" if isinstance(value, str) else " items"
    subject = "" if is_number else f"has {size:,}{unit}, but "
    low, high = shape.metadata.get("min"), shape.metadata.get("max")
    if low is not None and size < low:
        yield _error(path, value, f"{subject}must {'be' if is_number else 'have'} at least {low:,}")
    if high is not None and size > high:
        yield _error(path, value, f"{subject}must {'be' if is_number else 'have'} at most {high:,}")


def _check_text(value: str, shape: Any, path: str) -> Iterator[ConfigError]:
    """Yield errors of a string's pattern or enumeration."""
    pattern = shape.metadata.get("pattern")
    if pattern and not re.fullmatch(to_python(pattern), value, re.DOTALL):
        yield _error(path, value, f"does not have the form {pattern}")
    if shape.enum and value not in shape.enum:
        yield _error(path, value, "is not a value that SageMaker accepts", shape.enum)


def _error(path: str, value: Any, rule: str, known: list[str] | None = None) -> ConfigError:
    """Return the error of a field, with the key that sets it and a remedy."""
    path = path[1:] or "request"
    text = value if value is MISSING or isinstance(value, int) else str(value)
    if isinstance(text, str) and len(text) > SHOWN_CHARACTERS:
        text = text[:SHOWN_CHARACTERS] + "..."
    plain = re.sub(r"\[\d+\]", "[]", path)
    starts = [start for start in ORIGINS if plain.startswith(start)]
    remedy = suggest(str(value), known) if known else ""
    if starts:
        key, usual = ORIGINS[max(starts, key=len)]
        remedy = f"it comes from {key}: {remedy or usual}"
    else:
        remedy = "it comes from launch.patch" + (f": {remedy}" if remedy else "")
    return ConfigError(path, text, rule, remedy)


def to_python(pattern: str) -> str:
    r"""Convert a regular expression of the model, which is Java's.

    Python has no ``\p{L}``.  Letters and digits become word characters, which adds only the
    underscore.
    """
    classes = {r"\p{L}": r"\w", r"\p{N}": r"\w", r"\p{Z}": " ", r"\p{Alnum}": "A-Za-z0-9"}
    for theirs, ours in classes.items():
        pattern = pattern.replace(theirs, ours)
    return pattern
