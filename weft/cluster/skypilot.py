"""Nodes of any cloud by SkyPilot: a managed job, as its task in YAML.

On every node ``weft train`` runs, and knows the others by SkyPilot's SKYPILOT_NODE_* variables
(`weft.train.environment`).  A managed job is moved to other nodes when its own are taken away; then the
run goes on, because what it needs is in a bucket: its folder through SkyPilot's cached mount, which
has files that grow and are renamed, and its checkpoints directly.

Validated by SkyPilot's own schemas, in the environment that its command ``sky`` is installed in.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.cluster import REQUEUE
from weft.cluster.scheduler import (
    RUN_DIR,
    SWITCH,
    WHOLE,
    Option,
    check_name,
    command,
    common_problems,
    fixed_nodes,
    lines_of,
    own_recipe,
    script,
    to_yaml,
    tool,
    unchecked,
)
from weft.cluster.submit import Request
from weft.config.errors import ConfigError

ENDING = ".yaml"
OPTIONS = {
    "bucket": Option(
        "s3://NAME, where the run's folder and checkpoints are, below NAME of the run",
        r"s3://[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9]",
        "is no bucket that weft can use",
        "use s3://NAME, without a folder",
    ),
    "accelerator": Option("name of the GPU: H100, A100-80GB; 'sky gpus list' has all"),
    "infra": Option("cloud, region and zone: aws/us-east-1"),
    "spot": Option("true: nodes that can be taken away", *SWITCH),
    "cpus": Option("of a node: 16, or 16+"),
    "memory": Option("of a node in GB: 64, or 64+"),
    "disk": Option("of a node in GB", WHOLE, "must be a whole number of GB"),
}
REMEDY = "pip install 'skypilot[aws]', in an environment of its own"
# SkyPilot's words for what has not ended, beside 'running'.
UNDER_WAY = ("pending", "submitted", "starting", "recovering", "winding_down", "cancelling")
RECIPE = "~/weft-recipe.toml"
# Runs where SkyPilot is; prints what is wrong as a JSON list.
CHECKER = """\
import json, sys, yaml
from sky.utils import schemas, validator
task = yaml.safe_load(sys.stdin)
parts = [("", task, schemas.get_task_schema())]
parts += [("resources: ", task.get("resources", {}), schemas.get_resources_schema())]
for path, mount in task.get("file_mounts", {}).items():
    if isinstance(mount, dict):
        parts.append((f"file_mounts {path}: ", mount, schemas.get_storage_schema()))
check = validator.get_schema_validator()
print(json.dumps([where + e.message for where, v, s in parts for e in check(s).iter_errors(v)]))
"""


def problems(request: Request) -> list[ConfigError]:
    """What cannot be asked for here."""
    launch = request.job.launch
    needed = ["bucket", *(["accelerator"] if request.devices else [])]
    found = common_problems(request, OPTIONS, needed, r"[A-Za-z0-9*][A-Za-z0-9_+*.:/\-]*")
    bucket = launch.options.get("bucket", "s3://BUCKET")
    found += check_name(request, f"{bucket}/{request.name}")
    found += fixed_nodes(request, "SkyPilot starts a fixed number of nodes")
    if launch.image == "auto" and not launch.setup:
        rule = "nothing puts weft onto the nodes"
        remedy = "name an image that has it, or lines in launch.setup that install it"
        found.append(ConfigError("launch.setup", "", rule, remedy))
    return found


def render(request: Request) -> str:
    """The task."""
    job, options = request.job, request.job.launch.options
    recipe, bucket = own_recipe(request), options["bucket"]
    changes = {RUN_DIR: f"/runs/{request.name}"}
    if job.checkpoint.dir == "auto":
        changes["checkpoint.dir"] = f"{bucket}/{request.name}/checkpoints"
    words = command(request, request.words[2] if recipe is None else RECIPE, changes)
    resources: dict[str, Any] = {}
    if request.devices:
        resources["accelerators"] = f"{options['accelerator']}:{request.devices}"
    resources |= {name: options[name] for name in ("infra", "cpus", "memory") if name in options}
    if "disk" in options:
        resources["disk_size"] = int(options["disk"])
    if options.get("spot") == "true":
        resources["use_spot"] = True
    if job.launch.image != "auto":
        resources["image_id"] = f"docker:{job.launch.image}"
    # Saved, and to be gone on with: it comes back, however often.
    resources["job_recovery"] = {"recover_on_exit_codes": [REQUEUE]}
    task: dict[str, Any] = {
        "name": request.name,
        "num_nodes": request.nodes[1],
        "resources": resources,
        "file_mounts": {"/runs": {"source": bucket, "mode": "MOUNT_CACHED"}},
    }
    if recipe is not None:
        task["setup"] = f"cat > {RECIPE} <<'END_OF_RECIPE'\n{recipe}END_OF_RECIPE\n"
    # Of the node's shell, which has the recipe's ~ replaced, unlike a quoted word.
    start = "exec weft train "
    run = script(job.launch.setup, words)
    task["run"] = run.replace(start + shlex.quote(RECIPE), start + RECIPE)
    head = f"The nodes of the run {request.name}; its folder is {bucket}/{request.name}.\n"
    head += f"It is not in {request.run_dir} of this machine, which has the record of this launch."
    return to_yaml([task], f"{head}\nsky jobs launch -y -d FILE")


def check(text: str) -> list[str]:
    """What is wrong by SkyPilot's schemas."""
    sky = shutil.which("sky")
    if sky is None:
        return unchecked("SkyPilot's schemas", REMEDY)
    with open(sky, encoding="utf-8", errors="replace") as file:
        python = file.readline().removeprefix("#!").strip()
    done = subprocess.run(
        [*shlex.split(python), "-c", CHECKER],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        # As of a wrapper, whose first line names a shell.
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return unchecked(f"SkyPilot's schemas, by {python}: {last}", REMEDY)
    found: list[str] = json.loads(done.stdout)
    return found


# --------------------------------------------------------------------------- a cluster


def submit(path: Path, request: Request) -> str:
    """Hand the file in; the job's name, of which the newest is meant."""
    tool("sky", "jobs", "launch", "-y", "-d", "-n", request.name, str(path), remedy=REMEDY)
    return request.name


def status(id: str) -> str:
    """One line that begins with 'waiting' or 'running' (on what), or how it ended."""
    queue = json.loads(tool("sky", "jobs", "queue", "--all", "-o", "json", remedy=REMEDY))
    found = [job for job in queue if job.get("job_name") == id]
    if not found:
        return "no such job"
    job = max(found, key=lambda job: int(job["job_id"]))
    state = str(job["status"]).lower()
    said = job.get("failure_reason") or job.get("resources") or ""
    if state in UNDER_WAY:
        state = f"waiting: {state}"
    return f"{state}: {said}" if said else state


def logs(id: str, follow: bool) -> Iterator[str]:
    """Lines that the job has printed."""
    how = "--follow" if follow else "--no-follow"
    return lines_of("sky", "jobs", "logs", how, "--name", id, remedy=REMEDY)


def stop(id: str) -> str:
    """End it; SkyPilot gives no time to save."""
    tool("sky", "jobs", "cancel", "-y", "--name", id, remedy=REMEDY)
    return f"cancelled {id}: the run is where its last checkpoint is"
