"""FSx for Lustre and EFS in a SageMaker job, at the paths /fsx and /efs.

SageMaker mounts a file system as an input channel, at /opt/ml/input/data/CHANNEL.  The entry point
of the container links /fsx and /efs to the channels of these names, so that a recipe has the same
paths on SageMaker, HyperPod and EC2.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from weft.cluster.job_request import RUN_DIR, JobRequest, Option
from weft.config.errors import ConfigErrors
from weft.config.mounts import find_mount
from weft.config.schema import Job, flatten

CHANNELS = "/opt/ml/input/data"
SETUP = "launch.setup"
# A job writes below these directories, so a file system with one of them is mounted read-write.
WRITTEN_KEYS = ("checkpoint.dir", "checkpoint.local_dir", "data.cache_dir", "compile.cache_dir")
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


# By the name of the option, of the channel, and of the path in the container.
FILE_SYSTEMS = {
    "fsx": FileSystem("FSxLustre", "FSx for Lustre", ("lustre",)),
    "efs": FileSystem("EFS", "EFS", ("nfs4", "nfs")),
}
ID = "fs-[0-9a-f]{8,18}"
FILE_SYSTEM_OPTIONS = {
    "fsx": Option(
        "FSx for Lustre file system for the paths below /fsx: fs-ID:/MOUNT_NAME[/DIRECTORY]",
        f"{ID}:/[A-Za-z0-9_-]+(/.*)?",
        "must be fs-ID:/MOUNT_NAME, or fs-ID:/MOUNT_NAME/DIRECTORY",
        "'aws fsx describe-file-systems' shows the ID as FileSystemId, and the mount name as "
        "LustreConfiguration.MountName",
    ),
    "efs": Option(
        "EFS file system for the paths below /efs: fs-ID:/[DIRECTORY]",
        f"{ID}:/.*",
        "must be fs-ID:/, or fs-ID:/DIRECTORY",
        "'aws efs describe-file-systems' shows the ID as FileSystemId",
    ),
}


# --------------------------------------------------------------------------- the request


def check_file_systems(request: JobRequest) -> ConfigErrors:
    """Return the errors of the options fsx and efs, and of paths that need them."""
    job, options = request.job, request.job.launch.options
    errors = ConfigErrors(job)
    for name, kind in FILE_SYSTEMS.items():
        key, paths = f"launch.options.{name}", find_paths(job, name)
        paths.pop(RUN_DIR, None)  # weft launch replaces it
        if name not in options:
            for used, path in paths.items():
                rule = f"is below /{name}, but the job has no {kind.title} file system there"
                remedy = f"give --launch.options.{name} VALUE: {FILE_SYSTEM_OPTIONS[name].meaning}"
                errors.add(used, rule, remedy, value=path)
            continue
        if "subnets" not in options and "security_groups" not in options:
            rule = "requires subnets and security_groups: SageMaker mounts it inside a VPC"
            remedy = "give --launch.options.subnets VALUE of the file system's VPC and "
            remedy += "--launch.options.security_groups VALUE that reach it"
            errors.add(key, rule, remedy)
        if not paths:
            rule = f"has no effect, because no path of the recipe is below /{name}"
            remedy = f"set data.path, checkpoint.dir or another path to /{name}/..., or remove it"
            errors.add(key, rule, remedy)
        if any(f" /{name}/" in f" {line}" for line in flatten(job)[SETUP]):
            rule = f"has a path below /{name}, which does not exist before weft starts"
            remedy = f"use {CHANNELS}/{name}"
            errors.add(SETUP, rule, remedy)
    return errors


def find_paths(job: Job, name: str) -> dict[str, str]:
    """Return the paths below /fsx or /efs, or below the channel of that name, by key."""
    places, found = {f"/{name}", f"{CHANNELS}/{name}"}, {}
    for key, value in flatten(job).items():
        texts = [str(item) for item in (value if isinstance(value, list | dict) else [value])]
        if key == SETUP:
            texts = [word for line in texts for word in line.split() if CHANNELS in word]
        for text in texts:
            if not places.isdisjoint((text, *map(str, PurePosixPath(text).parents))):
                found[key] = text
    return found


def make_channels(job: Job) -> Iterator[dict[str, Any]]:
    """Yield the channels of the file systems of a job."""
    for name, kind in FILE_SYSTEMS.items():
        if value := job.launch.options.get(name):
            id, _, directory = value.partition(":")
            is_written = not set(WRITTEN_KEYS).isdisjoint(find_paths(job, name))
            source = {
                "FileSystemId": id,
                "FileSystemAccessMode": "rw" if is_written else "ro",
                "FileSystemType": kind.type,
                "DirectoryPath": directory,
            }
            yield {"ChannelName": name, "DataSource": {"FileSystemDataSource": source}}


# --------------------------------------------------------------------------- the service


def verify_file_systems(client: Callable[[str], Any], request: JobRequest) -> ConfigErrors:
    """Verify with AWS that the file systems exist, in the VPC of the subnets.

    A wrong one would fail the job only after its instances have started.  Without permission to
    ask, weft prints a warning.

    Args:
        client: returns the client of a service.
        request: see `check_file_systems`.
    """
    options = request.job.launch.options
    errors = ConfigErrors(request.job)
    chosen = {name: options[name].partition(":") for name in FILE_SYSTEMS if name in options}
    if not chosen:
        return errors
    ask = partial(ask_aws, client, errors)
    subnets = options["subnets"].split("+")
    answer = ask("launch.options.subnets", "ec2", "DescribeSubnets", SubnetIds=subnets)
    vpcs = {subnet["VpcId"] for subnet in answer.get("Subnets", [])}
    for name, (id, _, directory) in chosen.items():
        key = f"launch.options.{name}"
        if name == "fsx":
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
                errors.add(key, rule, f"use {id}:/{mount_name}")
        theirs = {item["VpcId"] for item in found or [] if "VpcId" in item}
        if vpcs and theirs and vpcs.isdisjoint(theirs):
            rule = f"is in {', '.join(sorted(theirs))}, but launch.options.subnets are in "
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


def link_file_systems(channels: Mapping[str, Path], mounts: str, root: Path) -> ConfigErrors:
    """Link /fsx and /efs to the channels of these names, if these are mounted.

    Args:
        channels: directories of the channels, by name.
        mounts: content of /proc/self/mountinfo.
        root: the directory ``/``.
    """
    errors = ConfigErrors()
    for name in FILE_SYSTEMS.keys() & channels.keys():
        link, channel = root / name, channels[name]
        if rule := check_type(channel, name, mounts):
            errors.add(f"channel {name}", rule, mount_remedy(name))
            continue
        try:
            with suppress(FileExistsError):  # another rank has made it, or the image
                link.symlink_to(channel)
            if rule := check_type(link, name, mounts):
                remedy = f"remove /{name} from the image: it hides the channel {name}"
                errors.add(f"/{name}", rule, remedy)
        except OSError as error:
            rule = f"cannot become a link to {channel}: {error.strerror}"
            remedy = f"add to the image's Dockerfile: RUN ln -s {CHANNELS}/{name} /{name}"
            errors.add(f"/{name}", rule, remedy)
    return errors


def check_mounts(job: Job, mounts: str, root: Path) -> ConfigErrors:
    """Check that /fsx and /efs are mounted, if the job has paths below them.

    Training would otherwise write to the container's disk, which is lost with the job.
    """
    errors = ConfigErrors(job)
    for name in FILE_SYSTEMS:
        paths = find_paths(job, name)
        if paths and (rule := check_type(root / name, name, mounts)):
            for key, path in paths.items():
                errors.add(key, f"is below /{name}, which {rule}", mount_remedy(name), value=path)
    return errors


def check_type(path: Path, name: str, mounts: str) -> str:
    """Return a rule that the file system of a path breaks, or nothing."""
    kind, mount_type = FILE_SYSTEMS[name], find_mount(path.resolve(), mounts).kind
    is_right = mount_type in kind.mount_types
    return "" if is_right else f"is not {kind.title}, but of type {mount_type or 'unknown'}"


def mount_remedy(name: str) -> str:
    """Return how a job mounts the file system of a channel."""
    kind = FILE_SYSTEMS[name]
    return (
        f"mount it with --launch.options {name}=..., or in an estimator with a FileSystemInput of "
        f"type {kind.type} as the channel {name}; see docs/sagemaker.md"
    )
