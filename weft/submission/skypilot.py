"""SkyPilot: a managed job on any cloud, as a task in YAML.

Every node runs ``weft train``, which detects its rank from SkyPilot's SKYPILOT_NODE_* variables
(`weft.preparation.environment`).  SkyPilot moves a managed job to other nodes when the cloud
reclaims its own.  The run then resumes, because a bucket holds its state: the run directory through
SkyPilot's cached mount, which supports appends and renames, and the checkpoints directly.

SkyPilot's own schemas validate the task, in the environment of its command ``sky``.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.config.errors import ConfigErrors
from weft.planning.devices import parse_cluster
from weft.submission.job_placement import check_placement
from weft.submission.job_request import (
    RUN_DIR,
    JobRequest,
    build_script,
    check_duration,
    check_fixed_nodes,
    check_instance_types,
    check_name,
    format_command,
    render_manifest,
    run_cli,
    standalone_recipe,
    stream_cli,
    warn_unchecked,
)

FILE_SUFFIX = ".yaml"
# SkyPilot's names of devices, where weft has another one.
ACCELERATORS = {"A100 40GB": "A100", "p4d": "A100", "p4de": "A100-80GB"}
REMEDY = "pip install 'skypilot[aws]', in a separate environment"
# SkyPilot's states of jobs that have not ended, other than 'running'.
ACTIVE_STATES = ("pending", "submitted", "starting", "recovering", "winding_down", "cancelling")
RECIPE = "~/weft-recipe.toml"
# Runs in SkyPilot's environment; prints the errors as a JSON list.
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


def find_errors(request: JobRequest) -> ConfigErrors:
    """Return the configuration errors of a request."""
    launch = request.job.launch
    errors = check_placement("skypilot", request.job, ["bucket"])
    errors += check_duration(launch.time_limit) + check_instance_types(request)
    errors += check_name(request, f"{launch.bucket or 's3://BUCKET'}/{request.name}")
    errors += check_fixed_nodes(request, "is a range, but SkyPilot starts a fixed number of nodes")
    for name, reference in request.placement.references("env").items():
        if name != reference:
            rule = "has another name on the nodes, but SkyPilot passes on variables by their names"
            errors.add(f"launch.secrets.{name}", rule, f"use env:{name}")
    if launch.image == "auto" and not launch.setup:
        rule = "is empty, so nothing installs weft on the nodes"
        remedy = (
            "give --launch.image VALUE, an image with weft, or --launch.setup VALUE that installs "
        )
        remedy += "weft"
        errors.add("launch.setup", rule, remedy)
    return errors


def render(request: JobRequest) -> str:
    """Return the task."""
    job, recipe, placement = request.job, standalone_recipe(request), request.placement
    bucket = job.launch.bucket.rstrip("/")
    mounts = {
        mount.path: f"s3://{mount.source}" for mount in placement.mounts if mount.kind == "s3"
    }
    mounts.setdefault("/runs", bucket)
    changes = {RUN_DIR: request.node_run_dir}
    home = f"{bucket}/{request.name}"
    if job.checkpoint.is_in_run_dir:
        changes["checkpoint.dir"] = f"{home}/checkpoints"
    words = request.command(request.recipe if recipe is None else RECIPE, **changes)
    # Unquoted, so that the shell of the node expands the ~ of the recipe's path.
    start = "exec weft train "
    script = build_script(job.launch.setup, format_command(words, "  ")) + "\n"
    secrets = placement.references("env")
    options = "".join(f" --secret {name}" for name in secrets)
    return render_manifest(
        "skypilot.yaml.j2",
        request,
        home,
        f"sky jobs launch -y -d{options} FILE",
        nodes=request.nodes[1],
        resources=_resources(request),
        mounts=mounts,
        env=request.environment,
        secrets=list(secrets),
        setup=recipe and f"cat > {RECIPE} <<'END_OF_RECIPE'\n{recipe}END_OF_RECIPE\n",
        run=script.replace(start + shlex.quote(RECIPE), start + RECIPE),
    )


def _resources(request: JobRequest) -> dict[str, Any]:
    """Return the resources of each node, by SkyPilot's names."""
    launch, devices = request.job.launch, request.devices
    name = parse_cluster(request.job.run.cluster).device_name if devices else ""
    uses_network = request.nodes[1] > 1 and devices and launch.network != "tcp"
    region = launch.region if "/" in launch.region or not launch.region else f"aws/{launch.region}"
    fields: dict[str, Any] = {
        "accelerators": name and f"{ACCELERATORS.get(name, name.replace(' ', '-'))}:{devices}",
        # Without it SkyPilot starts AWS's nodes without EFA.
        "network_tier": "best" if uses_network else "",
        "instance_type": launch.instance_type,
        "infra": region,
        "cpus": str(launch.cpus),
        "memory": str(launch.memory),
        "disk_size": launch.disk,
        "use_spot": launch.spot,
        "image_id": f"docker:{launch.image}" if launch.image != "auto" else "",
        "labels": launch.labels,
    }
    return {name: value for name, value in fields.items() if value}


def check(text: str) -> list[str]:
    """Return the errors of a task against SkyPilot's schemas."""
    sky = shutil.which("sky")
    if sky is None:
        return warn_unchecked("SkyPilot's schemas", REMEDY)
    with open(sky, encoding="utf-8", errors="replace") as file:
        python = file.readline().removeprefix("#!").strip()
    result = subprocess.run(
        [*shlex.split(python), "-c", CHECKER],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        # For example, sky is a wrapper whose first line names a shell.
        last = (result.stderr.strip().splitlines() or ["no output"])[-1]
        return warn_unchecked(f"SkyPilot's schemas ({python}: {last})", REMEDY)
    errors: list[str] = json.loads(result.stdout)
    return errors


# --------------------------------------------------------------------------- cluster


def submit(path: Path, request: JobRequest) -> str:
    """Submit the task; return its name, which means the newest job of that name."""
    return resubmit(path, request.name)


def resubmit(path: Path, id: str) -> str:
    """Submit the task under a name, with the secrets that it names; return the name."""
    import yaml

    names = yaml.safe_load(path.read_text("utf-8")).get("secrets", {})
    secrets = [word for name in names for word in ("--secret", name)]
    run_cli("sky", "jobs", "launch", "-y", "-d", *secrets, "-n", id, str(path), remedy=REMEDY)
    return id


def status(id: str) -> str:
    """Return one line: 'waiting...', 'running...' with resources, or how it ended."""
    queue = json.loads(run_cli("sky", "jobs", "queue", "--all", "-o", "json", remedy=REMEDY))
    jobs = [job for job in queue if job.get("job_name") == id]
    if not jobs:
        return f"ended: SkyPilot has no job {id}"
    newest = max(jobs, key=lambda job: int(job["job_id"]))
    state = str(newest["status"]).lower()
    detail = newest.get("failure_reason") or newest.get("resources") or ""
    if state in ACTIVE_STATES:
        state = f"waiting: {state}"
    return f"{state}: {detail}" if detail else state


def logs(id: str, run_dir: Path, follow: bool) -> Iterator[str]:
    """Yield the lines that the job has printed."""
    option = "--follow" if follow else "--no-follow"
    return stream_cli("sky", "jobs", "logs", option, "--name", id, remedy=REMEDY)


def cancel(id: str) -> str:
    """End the job, without time to save; return a message."""
    run_cli("sky", "jobs", "cancel", "-y", "--name", id, remedy=REMEDY)
    return f"cancelled {id}: the run keeps its last checkpoint"
