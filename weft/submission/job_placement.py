"""Placement of a job: what the keys of ``[launch]`` mean on each kind of cluster.

A path, an image, a secret or a queue is right only on the machines where the job runs, and no
schema of a manifest knows these.  So there is one table of what each cluster can express
(`SUPPORTED`, `MOUNT_SOURCES`, `SECRET_SOURCES`), one set of rules of the values (`RULES`), and one
check of the paths in the recipe against what the job mounts (`check_job_paths`).  `Placement` has
the values that need parsing; the templates of all clusters read it and the section itself.

Secrets are references.  Their values appear in no file that weft writes: Kubernetes and SkyPilot
insert them, a batch script passes on a variable of the shell that submits it, and
`weft.preparation.secrets` asks AWS on the node.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from weft.config.errors import MISSING, ConfigError, ConfigErrors, InvalidConfig, suggest
from weft.config.files import expand_path
from weft.config.run_paths import find_paths
from weft.config.schema import Job, LaunchSection, flatten
from weft.planning.instance_types import find_instance_type
from weft.planning.tokenizer_conversion import SMALL_FILES

RUNS = "/runs"  # directory of the runs in a container, unless run.dir is below another mount
# Keys with directories that each node may have for itself.
NODE_KEYS = ("data.cache_dir", "compile.cache_dir", "checkpoint.local_dir")
# Keys that are not reported as unused: weft itself reads them.
COMMON = "image setup mounts env secrets bucket price_per_gpu_hour patch options"
# Keys that each kind of cluster uses, besides `COMMON`.
SUPPORTED = {
    "slurm": "time_limit queue priority reservation topology exclude cpus memory container "
    "srun_options",
    "kubernetes": "time_limit instance_type network queue priority topology node_labels "
    "tolerations exclude cpus memory role namespace kind pull_secrets labels",
    "sagemaker": "time_limit instance_type region reservation disk spot role subnets "
    "security_groups labels",
    "skypilot": "instance_type region network cpus memory disk spot labels",
}
MOUNT_SOURCES = {
    "slurm": {"host": "host:/DIRECTORY", "image": "image"},
    "kubernetes": {"pvc": "pvc:CLAIM", "host": "host:/DIRECTORY", "image": "image"},
    "sagemaker": {
        "fsx": "fsx:fs-ID:/MOUNT_NAME",
        "efs": "efs:fs-ID:/",
        "s3": "s3://BUCKET/PREFIX",
        "image": "image",
    },
    "skypilot": {"s3": "s3://BUCKET/PREFIX", "image": "image"},
}
SECRET_SOURCES = {
    "slurm": {"env": "env:VARIABLE", "secretsmanager": "secretsmanager:ID"},
    "kubernetes": {"k8s-secret": "k8s-secret:SECRET/KEY", "secretsmanager": "secretsmanager:ID"},
    "sagemaker": {"secretsmanager": "secretsmanager:ID"},
    "skypilot": {"env": "env:VARIABLE", "secretsmanager": "secretsmanager:ID"},
}


class Rule(NamedTuple):
    """Rule of a value: the form that it must have, in words, and the remedy."""

    pattern: str
    rule: str
    remedy: str


VARIABLE = Rule(
    "[A-Za-z_][A-Za-z0-9_]*",
    "does not have the name of a variable: letters, digits and '_'",
    "remove it, and give it under another name",
)
FILE_SYSTEM = "fs-[0-9a-f]{8,18}"
# By the kind of a mount, without the kind's name and ':'.
SOURCE_RULES = {
    "pvc": Rule(
        "[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[^/]+)*",
        "does not name a PersistentVolumeClaim, or a directory of it",
        "use pvc:CLAIM, or pvc:CLAIM/DIRECTORY",
    ),
    "host": Rule("/.*", "is not an absolute directory of the node", "use host:/DIRECTORY"),
    "fsx": Rule(
        f"{FILE_SYSTEM}:/[A-Za-z0-9_-]+(/.*)?",
        "must be fsx:fs-ID:/MOUNT_NAME, or fsx:fs-ID:/MOUNT_NAME/DIRECTORY",
        "'aws fsx describe-file-systems' shows the ID as FileSystemId, and the mount name as "
        "LustreConfiguration.MountName",
    ),
    "efs": Rule(
        f"{FILE_SYSTEM}:/.*",
        "must be efs:fs-ID:/, or efs:fs-ID:/DIRECTORY",
        "'aws efs describe-file-systems' shows the ID as FileSystemId",
    ),
    "s3": Rule(
        "[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?",
        "does not name a bucket",
        "use s3://BUCKET/PREFIX, whose bucket has 3 to 63 lower-case letters, digits, '.' and '-'",
    ),
    "image": Rule("", "has more than the word image", "use image"),
}
REFERENCE_RULES = {
    "env": VARIABLE,
    "k8s-secret": Rule(
        "[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[-._A-Za-z0-9]+",
        "does not name a key of a Secret",
        "use k8s-secret:SECRET/KEY",
    ),
    "secretsmanager": Rule(
        r"[A-Za-z0-9/_+=.@:!-]+(#[^#]+)?",
        "does not name a secret of AWS Secrets Manager",
        "use secretsmanager:NAME, or secretsmanager:NAME#FIELD for one field of a JSON secret",
    ),
}
# Secrets by the name of a variable, and by the form of a value.
SECRET_NAME = re.compile("(.+_)?(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|PRIVATE_KEY)")
SECRET_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{10,}|\b(gh[pousr]_|glpat-|sk-|xox[abp]-)[A-Za-z0-9_-]{16,}"
    r"|://[^/\s:@]*:[^/\s:@$]+@"
)
MIN_SECRET = 7  # characters
EXPORT = re.compile(r"\b([A-Za-z_]\w*)=['\"]?([^\s'\"$`]\S*)")
# Directories that a mount would hide from the job, exactly or with all in them.
SYSTEM = "bin boot etc lib lib64 opt root run sbin usr usr/bin usr/lib usr/local usr/local/bin var"
HIDDEN = "|".join(
    [f"/({'|'.join(SYSTEM.split())})", "/(dev|proc|sys|etc/weft|opt/weft|opt/amazon)(/.*)?"]
)
# And those of a kind of cluster.
HIDDEN_ON = {"sagemaker": "/opt/ml(/.*)?", "kubernetes": "/opt/ml/input/config(/.*)?"}
# Volumes and channels that weft itself adds.
OWN_NAMES = ("shm", "recipe", "agent", "training", "train")
MAX_MOUNT_NAME = 63
QUANTITY = "(?!0+(?:[.]0+)?[+]?$)[0-9]+([.][0-9]+)?"
LABEL_VALUE = "([A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?)?"
LABEL = "([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?"
OBJECT = "[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
OBJECT_WORDS = "must be a name of Kubernetes: a to z, digits, '-' and '.'"
# By key, and the cluster; "": every cluster.
IMAGE = Rule(
    r"(?!https?://|docker:)\S+", "must be REGISTRY/NAME:TAG", "use registry.example.com/weft:1"
)
RULES: dict[str, dict[str, Rule]] = {
    "image": {"kubernetes": IMAGE, "sagemaker": IMAGE, "skypilot": IMAGE},
    "network": {"": Rule("auto|tcp|efa:[0-9]+", "must be auto, tcp or efa:COUNT", "use efa:32")},
    "bucket": {
        "": Rule(
            f"s3://{SOURCE_RULES['s3'].pattern}",
            "must be s3://BUCKET or s3://BUCKET/PREFIX; a bucket has 3 to 63 lower-case letters, "
            "digits, '.' and '-'",
            "use s3://my-bucket",
        )
    },
    "cpus": {
        "": Rule(QUANTITY, "must be a number of cores", "use a number such as 16"),
        "skypilot": Rule(f"{QUANTITY}[+]?", "must be a number of cores", "use 16, or 16+"),
    },
    "memory": {
        "": Rule(QUANTITY, "must be a number of GiB", "use a number such as 64"),
        "skypilot": Rule(f"{QUANTITY}[+]?", "must be a number of GB", "use 64, or 64+"),
    },
    "role": {
        "sagemaker": Rule(
            "arn:aws[a-z-]*:iam::[0-9]{12}:role/.+",
            "must be the ARN of a role",
            "use arn:aws:iam::ACCOUNT:role/NAME",
        ),
        "kubernetes": Rule(OBJECT, OBJECT_WORDS, "use the name of a service account"),
    },
    "instance_type": {
        "sagemaker": Rule(
            r"ml\.[a-z0-9-]+\.[a-z0-9]+(\+ml\.[a-z0-9-]+\.[a-z0-9]+){0,4}",
            "must be one to five instance types",
            "use ml.p5.48xlarge, or ml.p5.48xlarge+ml.p5e.48xlarge",
        )
    },
    "region": {
        "skypilot": Rule(
            "[a-z]+/[a-z0-9-]+|[a-z]{2,}(-[a-z]+)+-[0-9]+",
            "must be a region of AWS, or CLOUD/REGION",
            "use us-east-1, or gcp/us-central1",
        ),
        "sagemaker": Rule("[a-z]{2,}(-[a-z]+)+-[0-9]+", "must be a region", "use us-east-1"),
    },
    "reservation": {
        "sagemaker": Rule(
            "arn:aws[a-z-]*:sagemaker:[a-z0-9-]*:[0-9]{12}:training-plan/.+",
            "must be the ARN of a training plan",
            "use the TrainingPlanArn of 'aws sagemaker list-training-plans'",
        )
    },
    "topology": {
        "slurm": Rule(
            "[1-9][0-9]*(@[0-9:-]+)?",
            "must be a number of switches, with a time to wait for them",
            "use 1, or 1@1:00:00",
        ),
        "kubernetes": Rule(
            f"(required|preferred):{LABEL}",
            "must be required:LABEL or preferred:LABEL",
            "use preferred:topology.k8s.aws/network-node-layer-3",
        ),
    },
    "queue": {"kubernetes": Rule(OBJECT, OBJECT_WORDS, "use the name of a LocalQueue")},
    "priority": {
        "kubernetes": Rule(OBJECT, OBJECT_WORDS, "use the name of a WorkloadPriorityClass")
    },
    "namespace": {"kubernetes": Rule(OBJECT, OBJECT_WORDS, "use the name of a namespace")},
    "pull_secrets": {"kubernetes": Rule(OBJECT, OBJECT_WORDS, "use the name of a Secret")},
    "tolerations": {
        "kubernetes": Rule(
            f"{LABEL}(={LABEL_VALUE})?(:(NoSchedule|PreferNoSchedule|NoExecute))?",
            "must be KEY[=VALUE][:EFFECT] of a taint",
            "use nvidia.com/gpu",
        )
    },
    "exclude": {
        "kubernetes": Rule(f"@.+|{OBJECT}", "must be a host name, or @FILE", "use ip-10-1-2-3"),
        "slurm": Rule(r"@.+|[^\s@]+", "must be the name of a node, or @FILE", "use node-1"),
    },
    "subnets": {
        "": Rule("subnet-[0-9a-z]+", "must be IDs of subnets", "use subnet-0a1b2c3d"),
    },
    "security_groups": {
        "": Rule("sg-[0-9a-z]+", "must be IDs of security groups", "use sg-0a1b2c3d"),
    },
}


class Mount(NamedTuple):
    """A directory of the job's containers, and its source: see ``launch.mounts``."""

    path: str
    kind: str
    source: str

    @property
    def name(self) -> str:
        """Return the directory as a name: at most 63 letters, digits and '-'.

        Two directories have two names, and none has that of a volume or channel of weft.
        """
        name = re.sub("[^a-z0-9]+", "-", self.path.lower()).strip("-")
        is_distinct = self.path == "/" + name.replace("-", "/") and name not in OWN_NAMES
        if is_distinct and len(name) <= MAX_MOUNT_NAME:
            return name
        digest = hashlib.sha256(self.path.encode()).hexdigest()[:8]
        return f"{name[: MAX_MOUNT_NAME - 9]}-{digest}".lstrip("-")


class Secret(NamedTuple):
    """A secret environment variable, and its reference: see ``launch.secrets``."""

    name: str
    kind: str
    reference: str


@dataclass(frozen=True)
class Placement:
    """The keys of ``[launch]`` whose values have parts.

    Entries that `check_placement` refuses are left out.

    Args:
        mounts: directories of the containers.
        secrets: secret environment variables.
        efa: EFA devices per node; 0: none.
        exclude: names of nodes, without the files.
        exclude_files: files that name nodes.
    """

    mounts: tuple[Mount, ...]
    secrets: tuple[Secret, ...]
    efa: int
    exclude: tuple[str, ...]
    exclude_files: tuple[str, ...]

    def find_mount(self, path: str) -> Mount | None:
        """Return the innermost mount of a path; None: no mount has it."""
        parents = {path, *map(str, PurePosixPath(path).parents)}
        found = [mount for mount in self.mounts if mount.path in parents]
        return max(found, key=lambda mount: len(mount.path), default=None)

    def references(self, kind: str) -> dict[str, str]:
        """Return the references of the secrets of a kind by variable."""
        return {each.name: each.reference for each in self.secrets if each.kind == kind}


def make_placement(launch: LaunchSection) -> Placement:
    """Return the parsed keys of a section."""
    mounts = (parse_source(path, source) for path, source in launch.mounts.items())
    secrets = ((name, *ref.partition(":")[::2]) for name, ref in launch.secrets.items())
    efa, _, count = launch.network.partition(":")
    instance = find_instance_type(launch.instance_type) if efa == "auto" else None
    devices = int(count) if efa == "efa" and count.isdigit() else instance.efa if instance else 0
    files = tuple(name[1:] for name in launch.exclude if name.startswith("@"))
    return Placement(
        tuple(filter(None, mounts)),
        tuple(Secret(*each) for each in secrets),
        devices,
        tuple(name for name in launch.exclude if not name.startswith("@")),
        files,
    )


def parse_source(path: str, text: str) -> Mount | None:
    """Return a mount; None: the source has no known kind."""
    kind, _, rest = text.partition(":")
    if kind == "s3":
        rest = rest.removeprefix("//")
    return Mount(str(PurePosixPath(path)), kind, rest) if kind in SOURCE_RULES else None


# --------------------------------------------------------------------------- checks


def check_placement(on: str, job: Job, required: Sequence[str]) -> ConfigErrors:
    """Return the errors of the section ``launch`` for a kind of cluster.

    Args:
        on: name of the cluster.
        job: the job.
        required: keys that this cluster needs.
    """
    launch, errors = job.launch, ConfigErrors(job)
    fields = LaunchSection.model_fields
    for name in required:
        if not getattr(launch, name):
            remedy = f"give --launch.{name} VALUE: {fields[name].description}"
            errors.add(f"launch.{name}", "is missing", remedy, value=MISSING)
    for name, rules in RULES.items():
        value, rule = getattr(launch, name), rules.get(on, rules.get(""))
        if rule is None or not value:
            continue
        for text in value if isinstance(value, tuple) else (value,):
            if not re.fullmatch(rule.pattern, str(text)):
                errors.add(f"launch.{name}", rule.rule, rule.remedy, value=text)
    if on == "kubernetes":
        errors += _check_labels(job)
    if on != "slurm":
        for name, value in launch.options.items():
            typed = suggest(name, fields) if name not in fields else f"use launch.{name}={value}"
            remedy = f"{typed}; other fields of {on} are in the file of launch.patch"
            errors.add(f"launch.options.{name}", "is an option of Slurm's sbatch only", remedy)
    errors += _check_mounts(on, job)
    errors += _check_secrets(on, job)
    return errors


def _check_labels(job: Job) -> ConfigErrors:
    """Check the labels of Kubernetes, which its server would refuse."""
    errors, launch = ConfigErrors(job), job.launch
    for name, labels in (("labels", launch.labels), ("node_labels", launch.node_labels)):
        for label, text in labels.items():
            key, values = f"launch.{name}.{label}", text.split("|") if "_" in name else [text]
            if not re.fullmatch(LABEL, label):
                rule = "does not have the name of a label: letters, digits, '-', '_' and '.'"
                errors.add(key, rule, "remove it, and use another name")
            elif not all(re.fullmatch(LABEL_VALUE, value) for value in values):
                rule = "must have at most 63 letters, digits, '-', '_' and '.'"
                errors.add(key, rule, "remove it, or use another value")
    return errors


def _check_mounts(on: str, job: Job) -> ConfigErrors:
    errors, seen = ConfigErrors(job), set[str]()
    examples = MOUNT_SOURCES[on]
    for path, text in job.launch.mounts.items():
        key, mount = f"launch.mounts.{path}", parse_source(path, text)
        if not path.startswith("/") or ".." in path.split("/") or path.strip("/") == "":
            rule, remedy = "is not for an absolute directory", "remove it, and name one like /data"
            errors.add(key, rule, remedy)
        elif mount is None or mount.kind not in examples:
            rule = f"is not a source that {on} mounts"
            errors.add(key, rule, f"use {' or '.join(examples.values())}")
        elif not re.fullmatch(
            (form := SOURCE_RULES[mount.kind]).pattern, mount.source
        ) or ".." in mount.source.split("/"):
            errors.add(key, form.rule, form.remedy)
        elif mount.kind == "image":
            continue  # nothing is mounted
        elif re.fullmatch(f"{HIDDEN}|{HIDDEN_ON.get(on, '')}", mount.path):
            rule = "would hide a directory that the job needs: the image's own, or the cluster's"
            errors.add(key, rule, "remove it, and mount the source at another directory")
        elif mount.path == "/tmp" and mount.kind != "host":
            rule = "would make the nodes share their temporary files"
            errors.add(key, rule, "remove it, and mount the source at another directory")
        elif on != "slurm" and ":" in mount.path:
            rule = "has ':', which separates directories in the cluster's tables"
            errors.add(key, rule, "remove it, and mount the source at another directory")
        elif mount.path in seen:
            errors.add(key, "names a directory that another entry mounts", "remove one of them")
        else:
            seen.add(mount.path)
    return errors


def _check_secrets(on: str, job: Job) -> ConfigErrors:
    errors, examples = ConfigErrors(job), SECRET_SOURCES[on]
    for section, names in (("env", job.launch.env), ("secrets", job.launch.secrets)):
        for name in names:
            if not re.fullmatch(VARIABLE.pattern, name):
                errors.add(f"launch.{section}.{name}", VARIABLE.rule, VARIABLE.remedy)
    for name, text in job.launch.secrets.items():
        key, (kind, _, reference) = f"launch.secrets.{name}", text.partition(":")
        if kind not in examples:
            rule = f"is a reference that {on} cannot read"
            errors.add(key, rule, f"use {' or '.join(examples.values())}")
        elif not re.fullmatch((form := REFERENCE_RULES[kind]).pattern, reference):
            errors.add(key, form.rule, form.remedy)
        if name in job.launch.env:
            rule = "is also in launch.secrets"
            errors.append(ConfigError(f"launch.env.{name}", "(not shown)", rule, "remove it"))
    visible = "a secret that everybody who may read the job would see"
    reference = f"launch.secrets, with a reference: {' or '.join(examples.values())}"
    for name, text in job.launch.env.items():
        if is_secret(name, text) and name not in job.launch.secrets:
            remedy = f"remove it, and give it by {reference}"
            errors.append(
                ConfigError(f"launch.env.{name}", "(not shown)", f"has {visible}", remedy)
            )
    for line in job.launch.setup:
        exports = EXPORT.findall(line)
        if SECRET_VALUE.search(line) or any(is_secret(*export) for export in exports):
            remedy = f"remove the value, and give it by {reference}"
            errors.append(ConfigError("launch.setup", "(not shown)", f"has {visible}", remedy))
            break
    return errors


def is_secret(name: str, text: str) -> bool:
    """Return True if a variable seems to hold a secret."""
    has_name = SECRET_NAME.fullmatch(name.upper()) is not None
    return SECRET_VALUE.search(text) is not None or (has_name and len(text) > MIN_SECRET)


def find_unused_keys(on: str, launch: LaunchSection) -> Iterator[str]:
    """Yield a warning for each key of the section that a kind of cluster does not use."""
    used = {*COMMON.split(), *SUPPORTED[on].split()}
    if on == "slurm" and launch.image == "auto":
        used -= {"mounts", "container"}
    default = LaunchSection()
    for name in LaunchSection.model_fields:
        if name not in used and getattr(launch, name) != getattr(default, name):
            users = [each for each, names in SUPPORTED.items() if name in names.split()]
            rule, remedy = f"launch.{name} has no effect on {on}", "Remove it"
            if on in users or not users:  # keys of containers on Slurm
                rule += " without launch.image: the nodes use their own file systems"
            else:
                remedy += f"; it is for {' or '.join(users)}"
            yield f"{rule}. {remedy}."


def read_excluded(placement: Placement) -> list[str]:
    """Return the nodes that ``launch.exclude`` names, also in its files that are here."""
    names = [*placement.exclude]
    for file in placement.exclude_files:
        with suppress(OSError, UnicodeDecodeError):
            lines = expand_path(file).read_text("utf-8").splitlines()
            names += [words[0] for line in lines if (words := line.partition("#")[0].split())]
    return [*dict.fromkeys(names)]


# --------------------------------------------------------------------------- paths


# Keys of small files, which weft uploads.
UPLOADED_KEYS = ("data.tokenizer", "data.chat_template")
FILE_SUFFIXES = (".json", ".jinja", ".jinja2", ".j2", ".model", ".txt")  # of such files


def find_uploads(on: str, job: Job, name: str) -> tuple[dict[str, str], dict[str, Path]]:
    """Return the files that only this machine has, and where the nodes read them.

    Args:
        on: name of the cluster.
        job: the job, with ``launch.bucket``.
        name: name of the run.

    Returns:
        The URL of each key, and the files to upload by URL: also those beside a tokenizer.
    """
    changes, files = dict[str, str](), dict[str, Path]()
    is_shared = on == "slurm" and job.launch.image == "auto"
    for key, path in find_paths(job):
        file = expand_path(path)
        is_mounted = make_placement(job.launch).find_mount(str(PurePosixPath(file))) is not None
        if key not in UPLOADED_KEYS or is_shared or is_mounted or not file.is_file():
            continue
        home = f"{job.launch.bucket.rstrip('/')}/weft/{name}/files/{key.partition('.')[2]}"
        changes[key] = f"{home}/{file.name}"
        beside = [each for pattern in SMALL_FILES for each in file.parent.glob(pattern)]
        for each in {file, *(beside if key == "data.tokenizer" else ())}:
            files[f"{home}/{each.name}"] = each
    return (changes, files) if job.launch.bucket else ({}, {})


def check_job_paths(on: str, job: Job) -> ConfigErrors:
    """Check that the nodes have every path of a job: below a mount, or in the image.

    A relative path that exists here is a file of this machine.  Other relative names are those of
    the Hub, of presets, or of the working directory in the image.
    """
    placement, errors = make_placement(job.launch), ConfigErrors(job)
    for key, path in find_paths(job):
        file = expand_path(path)
        is_file = key in UPLOADED_KEYS and path.endswith(FILE_SUFFIXES)
        if is_file and not file.is_absolute() and not file.exists():
            rule, remedy = "does not exist on this machine", "give the path of the file"
            errors.add(key, rule, remedy, value=path)
    if on == "slurm" and job.launch.image == "auto":
        return errors  # the nodes share the file system of this host
    for key, path in find_paths(job):
        if key in NODE_KEYS:
            continue
        full = PurePosixPath(expand_path(path))
        if (
            key in UPLOADED_KEYS
            and Path(full).is_file()
            and placement.find_mount(str(full)) is None
        ):
            rule = "is a file of this machine, and the nodes of the job do not have it"
            remedy = "give --launch.bucket VALUE: s3://BUCKET, to which weft uploads it"
            errors.add(key, rule, remedy, value=path)
        elif not full.is_absolute():
            if Path(path).exists():
                rule = "is on this machine, and the nodes of the job do not have it"
                remedy = "copy it to a file system or a bucket of the nodes, and use its path there"
                errors.add(key, rule, remedy, value=path)
        elif placement.find_mount(str(full)) is None:
            top = f"/{full.parts[1]}" if len(full.parts) > 1 else "/"
            examples = [each for each in MOUNT_SOURCES[on].values() if each != "image"]
            rule = "is below no directory that the job mounts"
            remedy = f"give --launch.mounts.{top} VALUE: {' or '.join(examples)}, or image if the "
            errors.add(key, rule, remedy + f"image has {top}", value=path)
    return errors


USER_OBJECT = re.compile(r"([A-Za-z_]\w*)(\.\w+)*:[A-Za-z_]\w*", re.ASCII)


def find_local_modules(on: str, job: Job) -> Iterator[str]:
    """Yield a warning for each ``module:object`` whose module is in this directory."""
    if on == "slurm" and job.launch.image == "auto":
        return  # the job starts in this directory
    for key, value in flatten(job).items():
        for text in value if isinstance(value, list | dict) else (value,):
            match = USER_OBJECT.fullmatch(text) if isinstance(text, str) else None
            if match and any(Path(each).exists() for each in (match[1], f"{match[1]}.py")):
                yield (
                    f"{key}={text} is in a module of this directory, which the nodes do not have. "
                    "Install the module in the image, or add its directory there to PYTHONPATH "
                    "with launch.env."
                )


# --------------------------------------------------------------------------- patch

# Names by which the items of a list are matched.
ITEM_KEYS = ("name", "mountPath", "ChannelName", "Key", "key")


def read_patch(file: str) -> list[dict[str, Any]]:
    """Return the documents of ``launch.patch``; none without a file.

    Raises:
        InvalidConfig: if the file cannot be read, or is no YAML of objects.
    """
    if not file:
        return []
    import yaml

    remedy = "give a YAML or JSON file with the fields to merge"
    try:
        documents = list(yaml.safe_load_all(expand_path(file).read_text("utf-8")))
    except OSError as error:
        rule = f"cannot be read: {error.strerror}"
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        rule = f"is not valid YAML: {' '.join(str(error).split())}"
    else:
        if documents and all(isinstance(document, dict) for document in documents):
            return documents
        rule = "has a document that is not an object" if documents else "has no field"
    raise InvalidConfig([ConfigError("launch.patch", file, rule, remedy)])


def merge_fields(given: Any, patch: Any) -> Any:
    """Return ``given`` with the fields of ``patch``.

    As in a JSON merge patch (RFC 7396), objects are merged, null removes a field, and other values
    replace.  Lists whose items have a name are merged by that name; other lists are replaced.
    """
    if isinstance(given, dict) and isinstance(patch, dict):
        merged = dict(given)
        for name, value in patch.items():
            if value is None:
                merged.pop(name, None)
            else:
                merged[name] = merge_fields(merged.get(name), value)
        return merged
    if isinstance(given, list) and isinstance(patch, list):
        for key in ITEM_KEYS:
            if all(isinstance(item, dict) and key in item for item in (*given, *patch)):
                items = {item[key]: item for item in given}
                for item in patch:
                    items[item[key]] = merge_fields(items.get(item[key]), item)
                return list(items.values())
    if isinstance(patch, dict):  # without the nulls
        return merge_fields({}, patch)
    return patch


def merge_documents(documents: Sequence[dict[str, Any]], file: str) -> list[dict[str, Any]]:
    """Merge the documents of ``launch.patch`` into those of the same kind.

    Raises:
        InvalidConfig: if a document of the file has no kind, or one that no document has, or adds
            a container without an image.
    """
    merged, errors = list(documents), ConfigErrors()
    kinds = [document.get("kind") for document in documents]
    for patch in read_patch(file):
        kind = patch.get("kind")
        if len(documents) == 1 and kind is None:
            kind = kinds[0]
        if kind not in kinds:
            rule = f"has a document of kind {kind}, which the manifest does not have"
            if kind is None:
                rule = "has a document without the kind of the object that it changes"
            remedy = f"write 'kind: {' or '.join(map(str, kinds))}' in it"
            errors.add("launch.patch", rule, remedy, value=file)
            continue
        number = kinds.index(kind)
        merged[number] = merge_fields(merged[number], patch)
    names = " or ".join(dict.fromkeys(str(c.get("name")) for c in find_containers(documents)))
    for container in find_containers(merged):
        if "image" not in container:
            rule = f"adds the container {container.get('name')}, which has no image"
            remedy = f"give it an image, or use the name of a container of the job: {names}"
            errors.add("launch.patch", rule, remedy, value=file)
    errors.raise_any()
    return merged


def find_containers(document: Any) -> Iterator[dict[str, Any]]:
    """Yield the containers of pod templates in documents of Kubernetes."""
    if isinstance(document, dict):
        match document.get("template"):
            case {"spec": dict(pod)}:
                lists = (pod.get(name) for name in ("initContainers", "containers"))
                items = (item for each in lists if isinstance(each, list) for item in each)
                yield from (item for item in items if isinstance(item, dict))
    if isinstance(document, (dict, list)):
        for value in document.values() if isinstance(document, dict) else document:
            yield from find_containers(value)
