"""A small ``aws``: check a command against botocore's models, then send it to the endpoint.

Started as a program it is the command line of AWS, as far as weft's script and pages use it, on
Python's botocore.  The real one cannot be installed here: each of its releases requires another
botocore.  Its options are derived from the models by the same rules: an option is the member's
name in kebab case, flags are booleans, lists take several words, and structures are JSON.

botocore itself checks neither patterns nor enumerations nor maxima, so `check_value` does.
"""

from __future__ import annotations

import json
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jmespath
from botocore import xform_name
from botocore.exceptions import ClientError
from botocore.session import Session

from weft.submission.sagemaker_request import to_python

GLOBAL = ("region", "query", "output", "cli-input-json")
# Commands that the command line has beyond the models, and the options of each that may be used.
CUSTOM = {
    ("s3", "sync"): ("delete",),
    ("s3", "cp"): ("recursive",),
    ("s3", "ls"): ("recursive", "summarize"),
    ("s3", "rb"): ("force",),
    ("ecr", "get-login-password"): (),
    ("eks", "update-kubeconfig"): ("name",),
    ("logs", "tail"): ("follow", "since"),
}


class UsageError(Exception):
    """A command that AWS's command line would refuse."""


@cache
def operations(service: str) -> dict[str, Any]:
    """Return the model of each operation of a service, by its name on the command line.

    Raises:
        UsageError: if the service does not exist.
    """
    session = Session()
    if service not in (*session.get_available_services(), "s3api"):
        raise UsageError(f"no service {service}")
    model = session.get_service_model("s3" if service == "s3api" else service)
    return {xform_name(op, "-"): model.operation_model(op) for op in model.operation_names}


def check_names(words: list[str]) -> tuple[str, str, dict[str, str]]:
    """Return the service, the operation, and its members by option.

    Raises:
        UsageError: if the service, the operation or an option does not exist.
    """
    if len(words) < 2:
        raise UsageError("no service and operation")
    service, name = words[:2]
    if (service, name) in CUSTOM:
        members = dict.fromkeys(CUSTOM[service, name], "")
    elif name not in operations(service):
        raise UsageError(f"{service} has no operation {name}")
    else:
        shape = operations(service)[name].input_shape
        members = {xform_name(member, "-"): member for member in (shape.members if shape else {})}
    for option in (word[2:] for word in words if word.startswith("--")):
        if option not in GLOBAL and option.removeprefix("no-") not in members:
            raise UsageError(f"{service} {name}: unknown option --{option}")
    return service, name, members


def parse(words: list[str]) -> tuple[str, str, dict[str, Any], dict[str, str]]:
    """Return the service, the operation, its parameters, and the global options.

    Raises:
        UsageError: if a name does not exist, or a value is wrong or missing.
    """
    service, name, members = check_names(words)
    if (service, name) in CUSTOM:
        return service, name, {"words": words[2:]}, {}
    operation = operations(service)[name]
    shape = operation.input_shape
    parameters: dict[str, Any] = {}
    general: dict[str, str] = {}
    groups: list[tuple[str, list[str]]] = []
    for word in words[2:]:
        if word.startswith("--"):
            groups.append((word[2:], []))
        elif groups:
            groups[-1][1].append(word)
        else:
            raise UsageError(f"{service} {name}: unexpected word {word}")
    for option, values in groups:
        if option in GLOBAL:
            (general[option],) = values
        elif option in members:
            parameters[members[option]] = read(values, shape.members[members[option]])
        else:
            parameters[members[option.removeprefix("no-")]] = False
    errors = [*check_value(parameters, shape, name)] if shape else []
    if errors:
        raise UsageError("; ".join(errors))
    return service, operation.name, parameters, general


def read(values: list[str], shape: Any) -> Any:
    """Return the value of an option."""
    kind = shape.type_name
    if kind == "boolean" and not values:
        return True
    if kind in ("structure", "map") or (kind == "list" and values[0][:1] in ("[", "{")):
        return json.loads(" ".join(values))
    if kind == "list":
        return [read([value], shape.member) for value in values]
    if len(values) != 1:
        raise UsageError(f"{shape.name}: one value expected, not {values}")
    if kind in ("integer", "long"):
        return int(values[0])
    if kind in ("double", "float"):
        return float(values[0])
    return values[0] == "true" if kind == "boolean" else values[0]


def check_value(value: Any, shape: Any, path: str) -> list[str]:
    """Return the errors of a value: members, types, enumerations, patterns, ranges."""
    kind, meta = shape.type_name, shape.metadata
    if kind == "structure":
        if not isinstance(value, dict):
            return [f"{path}: {value!r} is not a structure"]
        errors = [f"{path}: {name} is unknown" for name in value if name not in shape.members]
        errors += [
            f"{path}: {name} is missing" for name in shape.required_members if name not in value
        ]
        known = [name for name in value if name in shape.members]
        return errors + [
            error for n in known for error in check_value(value[n], shape.members[n], f"{path}.{n}")
        ]
    if kind in ("list", "map") and not isinstance(value, list if kind == "list" else dict):
        return [f"{path}: {value!r} is not a {kind}"]
    limits = range(meta.get("min", 0), meta.get("max", sys.maxsize) + 1)
    if kind == "list" and len(value) not in limits:
        return [f"{path}: {len(value)} items, not {limits.start} to {limits.stop - 1}"]
    if kind == "list":
        return [
            e
            for n, item in enumerate(value)
            for e in check_value(item, shape.member, f"{path}[{n}]")
        ]
    errors = []
    if kind == "string":
        if not isinstance(value, str):
            return [f"{path}: {value!r} is not a text"]
        if shape.enum and value not in shape.enum:
            errors.append(f"{path}: {value!r} is not one of {', '.join(shape.enum)}")
        if "pattern" in meta and not re.fullmatch(to_python(meta["pattern"]), value, re.DOTALL):
            errors.append(f"{path}: {value!r} does not match {meta['pattern']}")
    size = value if isinstance(value, int | float) else len(value)
    if not meta.get("min", size) <= size <= meta.get("max", size):
        errors.append(f"{path}: {value!r} is not within {meta.get('min')} and {meta.get('max')}")
    return errors


# --------------------------------------------------------------------------- program


def call(service: str, operation: str, parameters: dict[str, Any]) -> Any:
    """Send a request to AWS_ENDPOINT_URL; return the answer."""
    session = Session()
    if (service, operation) == ("ecr", "get-login-password"):
        tokens = session.create_client("ecr").get_authorization_token()["authorizationData"]
        return tokens[0]["authorizationToken"]
    if service == "s3":
        return call_s3(session.create_client("s3"), operation, parameters["words"])
    client = session.create_client("s3" if service == "s3api" else service)
    answer = getattr(client, xform_name(operation))(**parameters)
    for system in answer.get("FileSystems", []) if service == "fsx" else []:
        # What moto lacks.
        system["Lifecycle"] = "AVAILABLE"
        system["LustreConfiguration"]["MountName"] = "abcdefgh"
    return answer


def call_s3(client: Any, operation: str, words: list[str]) -> Any:
    """Copy a directory to a bucket, or list or remove a bucket."""
    places = [word for word in words if not word.startswith("--")]
    bucket, _, prefix = places[-1].removeprefix("s3://").partition("/")
    if operation == "sync":
        source = Path(places[0])
        for path in sorted(p for p in source.rglob("*") if p.is_file()):
            key = f"{prefix}/{path.relative_to(source)}"
            client.put_object(Bucket=bucket, Key=key, Body=path.read_bytes())
        return None
    objects = client.list_objects_v2(Bucket=bucket).get("Contents", [])
    if operation == "rb":
        for item in objects:
            client.delete_object(Bucket=bucket, Key=item["Key"])
        client.delete_bucket(Bucket=bucket)
    return [item["Key"] for item in objects]


def main() -> None:
    """Check the command, send it, print the answer; log it in $AWS_CLI_LOG."""
    words = sys.argv[1:]
    try:
        service, operation, parameters, general = parse(words)
    except UsageError as error:
        sys.exit(f"aws: {error}")
    with open(os.environ["AWS_CLI_LOG"], "a", encoding="utf-8") as log:
        log.write(json.dumps([service, operation, parameters], default=str) + "\n")
    # Answers in place of operations that the server lacks.
    answers = json.loads(os.environ.get("AWS_CLI_ANSWERS", "{}"))
    try:
        answer = answers.get(f"{service}.{operation}") or call(service, operation, parameters)
    except ClientError as error:
        sys.exit(f"aws: {error}")
    if "query" in general:
        answer = jmespath.search(general["query"], answer)
    if general.get("output") == "text":
        print(answer if not isinstance(answer, list) else "\t".join(map(str, answer)))
    elif answer is not None:
        print(json.dumps(answer, default=str, indent=2))


if __name__ == "__main__":
    main()
