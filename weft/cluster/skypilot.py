"""SkyPilot: a managed job on any cloud, as a task in YAML.

Every node runs ``weft train``, which detects its rank from SkyPilot's SKYPILOT_NODE_* variables
(`weft.train.environment`).  SkyPilot moves a managed job to other nodes when the cloud reclaims its
own.  The run then resumes, because a bucket holds its state: the run directory through SkyPilot's
cached mount, which supports appends and renames, and the checkpoints directly.

SkyPilot's own schemas validate the task, in the environment of its command ``sky``.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from weft.cluster.job_request import (
    BOOLEAN_RULE,
    INTEGER_PATTERN,
    RUN_DIR,
    JobRequest,
    Option,
    build_script,
    check_fixed_nodes,
    check_name,
    check_options,
    format_command,
    render_manifest,
    run_cli,
    standalone_recipe,
    stream_cli,
    warn_unchecked,
)
from weft.config.errors import ConfigErrors

FILE_SUFFIX = ".yaml"
OPTIONS = {
    "bucket": Option(
        "s3://NAME, which stores the run directory and the checkpoints under the name of the run",
        r"s3://[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9]",
        "is not a valid bucket",
        "use s3://NAME, without a path",
    ),
    "accelerator": Option("name of the GPU: H100, A100-80GB; 'sky gpus list' lists all"),
    "infra": Option("cloud, region and zone: aws/us-east-1"),
    "spot": Option("true: use spot nodes, which the cloud can reclaim", *BOOLEAN_RULE),
    "cpus": Option("cores per node: 16, or 16+"),
    "memory": Option("GB of memory per node: 64, or 64+"),
    "disk": Option(
        "GB of disk per node",
        INTEGER_PATTERN,
        "must be an integer number of GB",
        "use a number such as 256",
    ),
}
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
    required = ["bucket", *(["accelerator"] if request.devices else [])]
    errors = check_options(request, OPTIONS, required, r"[A-Za-z0-9*][A-Za-z0-9_+*.:/\-]*")
    bucket = launch.options.get("bucket", "s3://BUCKET")
    errors += check_name(request, f"{bucket}/{request.name}")
    errors += check_fixed_nodes(request, "is a range, but SkyPilot starts a fixed number of nodes")
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
    job, recipe = request.job, standalone_recipe(request)
    home = f"{job.launch.options['bucket']}/{request.name}"
    changes = {RUN_DIR: f"/runs/{request.name}"}
    if job.checkpoint.is_in_run_dir:
        changes["checkpoint.dir"] = f"{home}/checkpoints"
    words = request.command(request.recipe if recipe is None else RECIPE, **changes)
    # Unquoted, so that the shell of the node expands the ~ of the recipe's path.
    start = "exec weft train "
    script = build_script(job.launch.setup, format_command(words, "  ")) + "\n"
    return render_manifest(
        "skypilot.yaml.j2",
        request,
        home,
        "sky jobs launch -y -d FILE",
        nodes=request.nodes[1],
        devices=request.devices,
        image=job.launch.image,
        setup=recipe and f"cat > {RECIPE} <<'END_OF_RECIPE'\n{recipe}END_OF_RECIPE\n",
        run=script.replace(start + shlex.quote(RECIPE), start + RECIPE),
    )


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
    run_cli("sky", "jobs", "launch", "-y", "-d", "-n", request.name, str(path), remedy=REMEDY)
    return request.name


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
