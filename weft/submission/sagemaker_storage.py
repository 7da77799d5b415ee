"""Mounts of a SageMaker job: FSx for Lustre, EFS and prefixes of S3.

SageMaker mounts each as an input channel, at /opt/ml/input/data/CHANNEL.  The entry point of the
container links the directories of ``launch.mounts`` to their channels, so that a recipe has the
same paths on SageMaker, HyperPod and EC2.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from weft.config.errors import ConfigErrors
from weft.config.mounts import find_mount
from weft.config.run_paths import find_paths
from weft.config.schema import Job
from weft.submission.job_placement import Mount
from weft.submission.job_request import JobRequest

CHANNELS = "/opt/ml/input/data"
# Error codes of AWS, and services whose permissions have another name.
ABSENT, DENIED = (
    ("FileSystemNotFound", "InvalidSubnetID.NotFound"),
    ("AccessDenied", "Unauthorized"),
)
IAM_NAMES = {"efs": "elasticfilesystem"}


class FileSystem(NamedTuple):
    """A kind of file system: its FileSystemType, its name, and its types in mountinfo."""

    type: str
    title: str
    mount_types: tuple[str, ...]


# By the kind of a mount, see ``launch.mounts``.
FILE_SYSTEMS = {
    "fsx": FileSystem("FSxLustre", "FSx for Lustre", ("lustre",)),
    "efs": FileSystem("EFS", "EFS", ("nfs4", "nfs")),
}
# Variable of the container: channel -> (kind, directory), as JSON.
MOUNTS_VARIABLE = "WEFT_MOUNTS"
# Channels that a user's own estimator may have.
DEFAULT_MOUNTS = {name: (name, f"/{name}") for name in FILE_SYSTEMS}


def encode_mounts(mounts: Sequence[Mount]) -> str:
    """Return the value of `MOUNTS_VARIABLE`; empty without channels."""
    table = {m.name: (m.kind, m.path) for m in mounts if m.kind != "image"}
    return json.dumps(table, separators=(",", ":")) if table else ""


def decode_mounts(environment: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return kind and directory of each channel that is a mount."""
    table = json.loads(environment.get(MOUNTS_VARIABLE, "{}"))
    return DEFAULT_MOUNTS | {name: (kind, path) for name, (kind, path) in table.items()}


# --------------------------------------------------------------------------- the service


def verify_file_systems(client: Callable[[str], Any], request: JobRequest) -> ConfigErrors:
    """Verify with AWS that the file systems exist, in the VPC of the subnets.

    A wrong one would fail the job only after its instances have started.  Without permission to
    ask, weft prints a warning.

    Args:
        client: returns the client of a service.
        request: see `check_file_systems`.
    """
    errors = ConfigErrors(request.job)
    chosen = [mount for mount in request.placement.mounts if mount.kind in FILE_SYSTEMS]
    if not chosen:
        return errors
    ask = partial(ask_aws, client, errors)
    subnets = list(request.job.launch.subnets)
    answer = ask("launch.subnets", "ec2", "DescribeSubnets", SubnetIds=subnets)
    vpcs = {subnet["VpcId"] for subnet in answer.get("Subnets", [])}
    for mount in chosen:
        key, (id, _, directory) = f"launch.mounts.{mount.path}", mount.source.partition(":")
        if mount.kind == "fsx":
            found = ask(key, "fsx", "DescribeFileSystems", FileSystemIds=[id]).get("FileSystems")
            rule, remedy = "does not exist in this region and account", "use another ID, or region"
        else:
            found = ask(key, "efs", "DescribeMountTargets", FileSystemId=id).get("MountTargets")
            rule, remedy = "has no mount target", "create one in each subnet of the job"
        if found == []:
            errors.add(key, rule, remedy)
        for item in found or []:
            if (kind := item.get("FileSystemType", "LUSTRE")) != "LUSTRE":
                errors.add(key, f"is a file system of type {kind}, not Lustre", remedy)
            mount_name = item.get("LustreConfiguration", {}).get("MountName")
            if mount_name and directory.split("/")[1] != mount_name:
                rule = f"does not begin with the mount name of {id}, which is {mount_name}"
                errors.add(key, rule, f"use fsx:{id}:/{mount_name}")
        theirs = {item["VpcId"] for item in found or [] if "VpcId" in item}
        if vpcs and theirs and vpcs.isdisjoint(theirs):
            rule = f"is in {', '.join(sorted(theirs))}, but launch.subnets are in "
            errors.add(key, rule + ", ".join(sorted(vpcs)), "use subnets of the file system's VPC")
    return errors


def ask_aws(
    client: Callable[[str], Any],
    errors: ConfigErrors,
    key: str,
    service: str,
    action: str,
    **arguments: Any,
) -> dict[str, Any]:
    """Return AWS's answer to a question about an option; empty if there is none.

    An absent object becomes a configuration error; a denied question, or a service that the
    network does not reach, becomes a warning.
    """
    from botocore.exceptions import ClientError, ConnectionError, HTTPClientError

    method = re.sub("(?<!^)([A-Z])", r"_\1", action).lower()
    try:
        return dict(getattr(client(service), method)(**arguments))
    except ClientError as error:
        code = error.response["Error"]["Code"]
        if code.startswith(DENIED):
            permission = f"{IAM_NAMES.get(service, service)}:{action}"
            print(f"weft: {key} was not verified: AWS denies {permission}", file=sys.stderr)
        elif code in ABSENT:
            errors.add(key, f"does not exist: {error.response['Error']['Message']}")
        else:
            raise
    except (ConnectionError, HTTPClientError) as error:
        print(f"weft: {key} was not verified: {error}", file=sys.stderr)
    return {}


# --------------------------------------------------------------------------- the container


def link_mounts(
    mounts: Mapping[str, tuple[str, str]], channels: Mapping[str, Path], table: str, root: Path
) -> ConfigErrors:
    """Link the directories of ``launch.mounts`` to their channels.

    Args:
        mounts: kind and directory by channel, see `decode_mounts`.
        channels: directories of the channels that exist, by name.
        table: content of /proc/self/mountinfo.
        root: the directory ``/``.
    """
    errors = ConfigErrors()
    for name, (kind, directory) in mounts.items():
        if name not in channels:
            continue
        link, channel = root / directory.lstrip("/"), channels[name]
        if rule := check_type(channel, kind, table):
            errors.add(f"channel {name}", rule, mount_remedy(kind, directory))
            continue
        try:
            link.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):  # another rank has made it, or the image
                link.symlink_to(channel)
            rule = check_type(link, kind, table)  # an image may mount a file system itself
            if kind not in FILE_SYSTEMS and link.resolve() != channel.resolve():
                rule = f"is not the channel {name}"
            if rule:
                remedy = f"remove {directory} from the image: it hides the channel {name}"
                errors.add(directory, rule, remedy)
        except OSError as error:
            rule = f"cannot become a link to {channel}: {error.strerror}"
            remedy = f"add to the image's Dockerfile: RUN ln -s {CHANNELS}/{name} {directory}"
            errors.add(directory, rule, remedy)
    return errors


def check_mounts(
    mounts: Mapping[str, tuple[str, str]], job: Job, table: str, root: Path
) -> ConfigErrors:
    """Check that the file systems of a job are mounted, if it has paths below them.

    Training would otherwise write to the container's disk, which is lost with the job.
    """
    errors = ConfigErrors(job)
    for kind, directory in mounts.values():
        if kind not in FILE_SYSTEMS:
            continue
        rule = check_type(root / directory.lstrip("/"), kind, table)
        for key, path in find_paths(job) if rule else ():
            if PurePosixPath(path).is_relative_to(directory):
                remedy = mount_remedy(kind, directory)
                errors.add(key, f"is below {directory}, which {rule}", remedy, value=path)
    return errors


def check_type(path: Path, kind: str, table: str) -> str:
    """Return a rule that the file system of a path breaks, or nothing."""
    if kind not in FILE_SYSTEMS:
        return ""
    system, mount_type = FILE_SYSTEMS[kind], find_mount(path.resolve(), table).kind
    is_right = mount_type in system.mount_types
    return "" if is_right else f"is not {system.title}, but of type {mount_type or 'unknown'}"


def mount_remedy(kind: str, directory: str) -> str:
    """Return how a job mounts a file system."""
    return (
        f"mount it with --launch.mounts.{directory} {kind}:fs-..., or in an estimator with a "
        f"FileSystemInput of type {FILE_SYSTEMS[kind].type} as the channel {kind}; see "
        "docs/sagemaker.md"
    )
