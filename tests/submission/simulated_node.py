"""A node of a job as a changed root: it has what the rendered artefact mounts, and nothing else.

`run_node` takes what ``weft launch --dry-run`` printed, mounts its volumes and channels over a copy
of this machine's root (overlayfs), hides the directory of the machine that submits, and runs the
command or script of the artefact there.  ``weft train`` is replaced by `check_command`: it reads
the recipe and overrides, prepares the data with the real ``weft data prepare``, and checks that
what the run writes is below a mount.  So a path that is only right on the laptop fails as it would
on a cluster, before any GPU is needed.

The volumes hold what the user's recipe names below them (`fill_mounts`): the simulation says
whether the artefact mounts a directory, not whether the user has filled it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from weft.config.run_paths import PATH_KEYS
from weft.config.schema import Job
from weft.data.stories import stories
from weft.data.tokenizer_training import train_tokenizer

ROOT = Path(__file__).parents[2]
# The script of a job with a container unsets PYTHONPATH.
MAIN = f"env PYTHONPATH={ROOT} {sys.executable} -m tests.submission.simulated_node"
# Drops the options, except the mounts of Pyxis: all tasks do the same.
SRUN = """\
mounts=
while [[ $1 == -* ]]; do
    [[ $1 != --container-mounts=* ]] || mounts=${1#*=}
    shift
done
[ -n "$mounts" ] || exec "$@"
exec unshare -m "$0-container" "$mounts" "$@"
"""
# Runs a command with the mounts SOURCE:TARGET,... in place of the directories of the host.
CONTAINER = """\
set -e
IFS=, read -ra mounts <<<"$1"
shift
for n in "${!mounts[@]}"; do
    mkdir -p /container/$n
    mount --bind "${mounts[n]%:*}" /container/$n
done
for path in ${NODE_MOUNTS//:/ }; do
    mount -t tmpfs tmpfs "$path"
done
export NODE_MOUNTS=
for n in "${!mounts[@]}"; do
    target=${mounts[n]#*:}
    mkdir -p "$target"
    mount --bind /container/$n "$target"
    NODE_MOUNTS+=${NODE_MOUNTS:+:}$target
done
cd /
exec "$@"
"""
# Programs of the node that the artefact calls.
PROGRAMS = {
    "weft": f'exec {MAIN} weft "$@"',
    "python": f'exec {MAIN} python "$@"',
    "srun": SRUN,
    "srun-container": CONTAINER,
    "scontrol": "exit 0",
    # Drops its options, and starts one rank.
    "hyperpodrun": 'while [[ $1 != -m ]]; do shift; done; shift; exec "$@"',
}
SCRIPT = """\
set -e
mount -t tmpfs tmpfs {base}
mkdir {base}/upper {base}/work {base}/root
mount -t overlay overlay -o lowerdir=/,upperdir={base}/upper,workdir={base}/work {base}/root
mount --rbind /proc {base}/root/proc
mount --rbind /dev {base}/root/dev
{hide}
{mounts}
cd /
exec chroot {base}/root {command}
"""


@dataclass
class Node:
    """What an artefact gives to a node.

    ``mounts``: the directories of the node that come from a volume, channel or bucket.  ``files``:
    files that the artefact itself brings.  ``lustre``: mounts of type Lustre.
    """

    command: Sequence[str]
    mounts: list[str]
    files: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    lustre: tuple[str, ...] = ()
    shares_host: bool = False


def missing_requirement() -> str:
    """Return why a root cannot be changed here; empty if it can."""
    if os.geteuid() != 0:
        return "needs root"
    probe = "mount -t tmpfs tmpfs /mnt && mkdir /mnt/u /mnt/w /mnt/r && "
    probe += "mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w /mnt/r"
    done = subprocess.run(["unshare", "-m", "sh", "-c", probe], capture_output=True, check=False)
    return "needs mount namespaces and overlayfs" if done.returncode else ""


# --------------------------------------------------------------------------- artefacts


def read_artefact(on: str, text: str) -> Node:
    """Return what the artefact of a cluster gives to a node."""
    readers = {
        "kubernetes": read_manifest,
        "sagemaker": read_request,
        "skypilot": read_task,
        "slurm": read_batch_script,
    }
    return readers[on](text)


def read_manifest(text: str) -> Node:
    """Return the node of a TrainJob, a JobSet or a HyperPodPyTorchJob."""
    documents = list(yaml.safe_load_all(text))
    (pod,) = (spec for document in documents for spec in find_pods(document))
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    maps = {d["metadata"]["name"]: d["data"] for d in documents if d["kind"] == "ConfigMap"}
    mounts, files = [], {}
    for mount in container["volumeMounts"]:
        volume = volumes[mount["name"]]
        if "configMap" in volume:
            for name, content in maps[volume["configMap"]["name"]].items():
                files[f"{mount['mountPath']}/{name}"] = content
        elif mount["mountPath"] != "/dev/shm":
            mounts.append(mount["mountPath"])
    variables = {e["name"]: e["value"] for e in container.get("env", []) if "value" in e}
    return Node(container["command"] + container.get("args", []), mounts, files, variables)


def find_pods(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the pod specifications of a document."""
    if isinstance(value, dict):
        if "containers" in value and "volumes" in value:
            yield value
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from find_pods(item)


def read_request(text: str) -> Node:
    """Return the node of a training job, with SageMaker's directory tree."""
    body = json.loads(text)
    channels = {channel["ChannelName"]: channel for channel in body.get("InputDataConfig", [])}
    hosts = [f"algo-{n + 1}" for n in range(body["ResourceConfig"]["InstanceCount"])]
    config = {
        "resourceconfig": {"hosts": hosts, "current_host": hosts[0]},
        "hyperparameters": body["HyperParameters"],
        "inputdataconfig": channels,
    }
    places = {name: f"/opt/ml/input/data/{name}" for name in channels}
    systems = {n: c["DataSource"].get("FileSystemDataSource") for n, c in channels.items()}
    # /fsx is a link to the channel: what the recipe names below /fsx is in the channel.
    paths = json.loads(body.get("Environment", {}).get("WEFT_MOUNTS", "{}"))
    return Node(
        command=body["AlgorithmSpecification"]["ContainerEntrypoint"],
        mounts=[*places.values(), body["CheckpointConfig"]["LocalPath"]],
        files={f"/opt/ml/input/config/{name}.json": json.dumps(v) for name, v in config.items()},
        variables=body.get("Environment", {}),
        links={path: places[channel] for channel, (_, path) in paths.items()},
        lustre=tuple(places[name] for name, system in systems.items() if system),
    )


def read_task(text: str) -> Node:
    """Return the node of SkyPilot's task."""
    task = yaml.safe_load(text)
    script = f"({task.get('setup', 'true')}\n) && {{\n{task['run']}\n}}"
    return Node(["bash", "-c", script], list(task.get("file_mounts", {})), {}, task.get("envs", {}))


def read_batch_script(text: str) -> Node:
    """Return the node of a batch script; Slurm's nodes share the file systems of this host.

    With a container of Pyxis, ``links`` has the directories of the node by their mounts.
    """
    directory = re.search(r"^#SBATCH --chdir=(.*)$", text, re.MULTILINE)
    assert directory
    script = f"cd {shlex.quote(directory[1])}\n{text}"
    variables = {"SLURM_JOB_ID": "7"}
    mounts = [directory[1], "/fsx", "/shared"]
    container = re.search(r"--container-mounts=([^' ]*)", text)
    pairs = [pair.split(":") for pair in container[1].split(",")] if container else []
    links = {target: source for source, target in pairs}
    return Node(["bash", "-c", script], mounts, {}, variables, links, shares_host=True)


# --------------------------------------------------------------------------- contents


def job_paths(job: Job) -> Iterator[tuple[str, str]]:
    """Yield the keys of a job with paths, and their values."""
    for section, keys in PATH_KEYS.items():
        for key in keys:
            value = getattr(getattr(job, section), key)
            if isinstance(value, str) and value.startswith(("/", "s3://")):
                yield f"{section}.{key}", value


def fill_mounts(job: Job, node: Node, directories: Mapping[str, Path], put: Any) -> None:
    """Write what the recipe reads into the mounts that have it.

    Args:
        job: the user's recipe.
        node: the node.
        directories: the source of each mount, on this machine.
        put: function that writes an object; for ``s3://`` paths.
    """
    lines = "".join(
        json.dumps({"text": text}) + "\n" for text, _ in zip(stories(), range(50), strict=False)
    )
    contents = {
        "data.path": ("a.jsonl", lines),
        "data.tokenizer": ("", train_tokenizer(iter([lines]), 300).to_str()),
    }
    for key, value in job_paths(job):
        if key not in contents:
            continue  # directories that the run makes
        name, content = contents[key]
        if value.startswith("s3://"):
            put(f"{value.rstrip('/')}/{name}", content)
            continue
        link = next((path for path in node.links if is_below(value, path)), "")
        place = node.links[link] + value.removeprefix(link) if link else value
        mount = next((path for path in directories if is_below(place, path)), None)
        if mount is not None:
            target = directories[mount] / place.removeprefix(mount).strip("/") / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content)


def is_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


# --------------------------------------------------------------------------- the node


def run_node(
    node: Node, job: Job, work: Path, laptop: Path, put: Any, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run the command of a node in a changed root; see the module.

    Args:
        node: the node.
        job: the user's recipe, which says what the mounts hold.
        work: empty directory for the sources of the mounts.
        laptop: directory of the machine that submits; hidden unless the nodes share it.
        put: see `fill_mounts`.
        environment: further variables, such as those of an object store.
    """
    base = work / "base"
    base.mkdir()
    directories = {}
    for number, path in enumerate(node.mounts):
        source = laptop if node.shares_host and path == str(laptop) else work / f"mount-{number}"
        source.mkdir(exist_ok=True)
        directories[path] = source
    fill_mounts(job, node, directories, put)
    programs = work / "bin"
    programs.mkdir()
    for name, body in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    root = f"{base}/root"
    # The node sees the sources at the mounts only, and its own programs.
    kept = work / "node"
    kept.mkdir()
    shutil.move(programs, kept / "bin")
    commands = [f"mkdir -p {root}/node && mount --bind {kept} {root}/node"]
    for path, source in directories.items():
        commands.append(f"mkdir -p {root}{path} && mount --bind {source} {root}{path}")
    for path, content in node.files.items():
        stored = kept / path.replace("/", "_")
        stored.write_text(content)
        commands.append(f"mkdir -p {root}{os.path.dirname(path)} && cp {stored} {root}{path}")
    variables = {
        "PATH": "/node/bin:/usr/bin:/bin",
        "HOME": "/root",
        "XDG_CACHE_HOME": "/tmp/cache",
        "PYTHONPATH": str(ROOT),
        "NODE_MOUNTS": os.pathsep.join(node.mounts),
        "NODE_LUSTRE": os.pathsep.join(node.lustre),
        "OMP_NUM_THREADS": "1",
        **environment,
        **node.variables,
    }
    words = ["env", "-i", *(f"{k}={v}" for k, v in variables.items()), *node.command]
    script = SCRIPT.format(
        base=base,
        hide="" if node.shares_host else f"rm -rf {root}{laptop}",
        mounts="\n".join(commands),
        command=shlex.join(words),
    )
    return subprocess.run(
        ["unshare", "-m", "bash", "-c", script], capture_output=True, text=True, check=False
    )


def check_command(words: Sequence[str]) -> int:
    """Check ``weft train`` on a node: read the recipe, prepare the data, check what is written."""
    from weft.cli.main import build_parser, main
    from weft.config.reader import read_job

    options = build_parser().parse_args(["train", *words])
    job, _, errors = read_job(options.recipe, options.overrides, options.errors)
    errors.raise_any()
    mounts = os.environ["NODE_MOUNTS"].split(os.pathsep)
    written = {"run.dir": job.run.dir, "checkpoint.dir": job.checkpoint.dir}
    for key, path in written.items():
        if path != "auto" and "://" not in path:
            real = os.path.realpath(path)
            if not any(is_below(real, mount) for mount in mounts):
                print(f"{key}={path} is in no mount of the node", file=sys.stderr)
                return 1
    data = [
        w
        for key, value in options.overrides
        if key.startswith("data.")
        for w in (f"--{key}", value)
    ]
    return main(["data", "prepare", options.recipe, *data])


def run_entry() -> None:
    """Run weft's entry point on SageMaker with a table of mounts that has Lustre."""
    from weft.submission import sagemaker_entry as entry

    read = entry.read_text
    lustre = os.environ["NODE_LUSTRE"].split(os.pathsep)
    lines = "".join(f"99 1 0:9 / {path} rw - lustre x@tcp:/y rw,flock\n" for path in lustre if path)

    def read_table(path: Path) -> str:
        return read(path) + lines if str(path) == "/proc/self/mountinfo" else read(path)

    def run_weft(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[int, list[str]]:
        if arguments[0] == "train":
            return check_command(arguments[1:]), []
        Path(arguments[2]).mkdir()  # weft export RUN DIRECTORY
        return 0, []

    entry.read_text, entry.run_weft = read_table, run_weft
    sys.argv = ["entry"]
    entry.main()


if __name__ == "__main__":
    program, *rest = sys.argv[1:]
    if program == "weft" and rest[0] == "train":
        sys.exit(check_command(rest[1:]))
    if program == "python" and rest == ["-m", "weft.submission.sagemaker_entry"]:
        run_entry()
    sys.exit(f"the node does not expect: {program} {shlex.join(rest)}")
