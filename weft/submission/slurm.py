"""Slurm: a batch script whose ``srun`` starts ``weft train`` once on each node.

The job survives its time limit and the loss of nodes:

*Time limit*: before the limit Slurm sends SIGTERM to the job steps, but not to the script.  weft
saves a checkpoint and exits with status 75; the script requeues its own job, which resumes.

*Failure*: weft restarts the ranks within the job.  If that does not help, the script requeues the
job, unless weft expects the same failure again (`weft.supervision.requeue`) or the job has started
`MAX_FAILED_STARTS` times in a row from the same checkpoint.  A configuration error ends the job.

*Unhealthy node*: with status 69 (``resilience.preflight``) the script requeues the job on other
nodes.  The files of ``launch.exclude`` keep the names of such nodes for later jobs.

*Lost node*: Slurm restarts a job with a fixed number of nodes (``--requeue``).  A job with MIN:MAX
nodes continues on the remaining nodes (``--no-kill``).  On HyperPod (`weft.submission.hyperpod`)
srun replaces a node that has a hardware fault.

*Array*: the trials of a comparison are the tasks of a job array
(`weft.submission.comparison_jobs`).  Each task has its own run directory, and is requeued like a
job.

*Container*: with ``launch.image`` the tasks of srun run in a container, and the script does not.
Pyxis adds options to srun; Apptainer is a command that srun starts.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from markupsafe import Markup

from weft.config.errors import ConfigErrors, WeftError
from weft.config.escaping import is_one_line
from weft.config.exit_statuses import REQUEUE
from weft.config.files import expand_path
from weft.config.schema import LaunchSection
from weft.doctor.doctor import UNHEALTHY_NODES_DIR
from weft.submission import hyperpod
from weft.submission.job_placement import check_placement, read_excluded
from weft.submission.job_request import (
    RUN_DIR,
    JobRequest,
    ToolError,
    build_script,
    check_duration,
    format_command,
    is_active,
    quote_shell,
    render_template,
    run_cli,
    standalone_recipe,
    warn_unchecked,
)
from weft.supervision.requeue import REQUEUE_DIR

FILE_SUFFIX = ".sh"
RECIPE_FILE = "recipe.toml"  # in the run directory, for a container, which has no other files
# Time for the ranks to finish a step and save; at most a quarter of the time limit.
SAVE_SECONDS = 300
# Time for the other tasks of a fixed number of nodes to end after the first: they cannot continue.
END_SECONDS = 120
# Starts in a row from the same checkpoint after which a job ends: failed ones, and all with stops
# (a preemption or a time limit before the first step, an unhealthy node).
MAX_FAILED_STARTS, MAX_STARTS = 3, 10
# sbatch's options that weft sets, and the key or option that controls each.
RESERVED_OPTIONS = {
    "nodes": "run.nodes",
    "time": "launch.time_limit",
    "output": "run.dir",
    "error": "run.dir",
    "gpus-per-node": "run.cluster",
} | dict.fromkeys(
    ("ntasks", "ntasks-per-node", "requeue", "no-requeue", "no-kill", "open-mode", "array", "wrap"),
    "",
)
# sbatch's options for the keys of the section; an option of this name may replace the key.
PLACEMENT_OPTIONS = {
    "partition": "queue",
    "qos": "priority",
    "reservation": "reservation",
    "switches": "topology",
    "mem": "memory",
    "cpus-per-task": "cpus",
    "exclude": "exclude",
}
# srun's options that weft sets, and the key that controls each.
RESERVED_SRUN_OPTIONS = {
    "nodes": "run.nodes",
    "time": "launch.time_limit",
    "output": "run.dir",
    "error": "run.dir",
    "cpus-per-task": "launch.cpus",
    "container-image": "launch.image",
    "container-mounts": "launch.mounts",
    "container-env": "launch.env",
} | dict.fromkeys(
    ("ntasks", "ntasks-per-node", "kill-on-bad-exit", "wait", "no-kill", "auto-resume"), ""
)
# A name that only Slurm knows cannot be resolved in a container, which has no scontrol.
HEAD_ADDRESS = """\
getent hosts "$SLURMD_NODENAME" >/dev/null || {
    address=$(scontrol show node "$SLURMD_NODENAME" | grep -o 'NodeAddr=[^ ]*')
    export MASTER_ADDR=${address#NodeAddr=}
}"""
# With one of these options, weft requests no GPUs; gres=none: the cluster does not count them.
GPU_OPTIONS = ("gres", "gpus", "gpus-per-task", "gpus-per-socket")
# With one of these options, weft does not request the memory of the nodes.
MEMORY_OPTIONS = ("mem", "mem-per-cpu", "mem-per-gpu")
# sbatch's messages, and what to do.
REMEDIES = {
    "Invalid generic resource": "Choose a partition whose nodes have these GPUs (launch.queue; "
    "'sinfo -o \"%P %G\"' lists them). If the cluster does not count GPUs as resources, give "
    "--launch.options.gres none.",
    "invalid partition|Invalid partition": "Use another launch.queue: 'sinfo -s' lists them.",
    "Invalid qos": "Use another launch.priority: 'sacctmgr show qos' lists them.",
    "reservation is invalid": "Use another launch.reservation: 'scontrol show reservation' lists "
    "them.",
    "Invalid node name": "Remove the name from launch.exclude and its files: 'sinfo -N' lists the "
    "nodes.",
    "Invalid account": "Give --launch.options.account ACCOUNT: 'sacctmgr show associations "
    "user=$USER' lists them.",
    "Invalid feature": "Use another launch.options.constraint: 'sinfo -o \"%N %f\"' lists the "
    "features.",
    "time limit is invalid|exceeds.*time limit": "Use a shorter launch.time_limit: 'sinfo -o \"%P "
    "%l\"' lists the limits.",
    "configuration is not available": "Compare run.nodes, launch.cpus, launch.memory and "
    "launch.exclude with the nodes that the partition has: 'sinfo -N -l'.",
    "unrecognized option": "Remove it from launch.options.",
}
# With one of these options, weft does not request exclusive nodes.
SHARING_OPTIONS = ("exclusive", "oversubscribe", "cpus-per-task", "cpus-per-gpu", "mincpus")
# What sbatch says where Slurm is installed, but no cluster answers: nothing about the job.
UNREACHABLE = "Could not establish a configuration source|Unable to contact slurm controller"
_slurm = partial(run_cli, remedy="use a host of the cluster that has Slurm's commands")


def find_errors(request: JobRequest) -> ConfigErrors:
    """Return the configuration errors of a request."""
    launch, errors = request.job.launch, ConfigErrors(request.job)
    errors += check_duration(launch.time_limit) + check_placement("slurm", request.job, [])
    errors += _check_options("options", launch.options, RESERVED_OPTIONS, "sbatch")
    errors += _check_options("srun_options", launch.srun_options, RESERVED_SRUN_OPTIONS, "srun")
    for name, key in PLACEMENT_OPTIONS.items():
        if name in launch.options and getattr(launch, key):
            rule = f"is also given by launch.{key}"
            errors.add(f"launch.options.{name}", rule, "remove one of the two")
    errors += _check_container(request)
    if launch.patch:
        rule = "is for manifests; a batch script has no fields"
        remedy = "use launch.options for sbatch, and launch.srun_options for srun"
        errors.add("launch.patch", rule, remedy)
    errors += hyperpod.find_errors(request)
    return errors


def _check_options(
    section: str, options: Mapping[str, str], reserved: Mapping[str, str], tool: str
) -> ConfigErrors:
    """Return the errors of options that are passed on to a tool of Slurm."""
    errors = ConfigErrors()
    for name, value in options.items():
        key = f"launch.{section}.{name}"
        if not re.fullmatch("[a-z][a-z-]*[a-z]", name):
            remedy = "use a form such as partition=gpu"
            errors.add(key, f"is not a long option of {tool}", remedy, value=value)
        elif name in reserved:
            other = reserved[name]
            remedy = f"remove it: {other} sets it" if other else "remove it"
            errors.add(key, "is an option that weft sets", remedy, value=value)
    return errors


def _check_container(request: JobRequest) -> ConfigErrors:
    """Return the errors of image and mounts."""
    launch, errors = request.job.launch, ConfigErrors(request.job)
    runtime = container_runtime(launch)
    if runtime == "pyxis" and launch.image.endswith(".sif"):
        rule = "is pyxis, which cannot start a .sif file"
        errors.add("launch.container", rule, "use apptainer, or an image of Enroot (.sqsh)")
    if not runtime:
        return errors
    separators = "which separate mounts in the options of the container"
    for mount in request.placement.mounts:
        if set(mount.path + mount.source) & set(",:"):
            rule = f"has ',' or ':', {separators}"
            errors.add(f"launch.mounts.{mount.path}", rule, "use another directory")
    if set(str(request.run_dir)) & set(",:"):
        rule = f"is mounted in the container, and has ',' or ':', {separators}"
        errors.add(RUN_DIR, rule, "use another directory", value=str(request.run_dir))
    return errors


def find_warnings(request: JobRequest) -> Iterator[str]:
    """Yield warnings about a request."""
    yield from hyperpod.find_warnings(request)
    launch = request.job.launch
    if container_runtime(launch) and (file := find_image_file(launch.image)) and not file.exists():
        yield (
            f"launch.image={launch.image} does not exist on this host, so every node must have "
            f"the file {file}."
        )
    for name in request.placement.exclude_files:
        if not expand_path(name).exists():
            yield (
                f"launch.exclude: the file {name} does not exist on this host. The first job that "
                "finds an unhealthy node creates it."
            )


# --------------------------------------------------------------------------- containers


def container_runtime(launch: LaunchSection) -> str:
    """Return what starts the container: 'pyxis', 'apptainer', or '' without one."""
    if launch.image == "auto":
        return ""
    if launch.container != "auto":
        return launch.container
    return "apptainer" if launch.image.endswith(".sif") else "pyxis"


def find_image_file(image: str) -> Path | None:
    """Return the file of an image; None: the image is in a registry."""
    is_path = image.startswith(("/", ".", "~")) or image.endswith((".sif", ".sqsh"))
    return expand_path(image).absolute() if is_path and "://" not in image else None


def format_image(image: str, runtime: str) -> str:
    """Return the image in the syntax of its runtime.

    Enroot's is REGISTRY#NAME, Apptainer's is docker://REGISTRY/NAME.
    """
    if file := find_image_file(image):
        return str(file)
    if runtime == "apptainer":
        return image if "://" in image else f"docker://{image}"
    name = image.removeprefix("docker://")
    registry, slash, rest = name.partition("/")
    # Without a registry Enroot uses Docker Hub, also for a name such as nvcr.io/nvidia/pytorch.
    is_registry = set(".:") & set(registry) or registry == "localhost"
    return f"{registry}#{rest}" if slash and is_registry and "#" not in name else name


def find_mounts(request: JobRequest) -> Iterator[tuple[str, str]]:
    """Yield source and directory of each mount, among them the run directory.

    The batch script, which runs outside, and weft must find the run directory at the same path.
    """
    mounts = {m.path: m.source for m in request.placement.mounts if m.kind == "host"}
    run_dir, mount = str(request.run_dir), request.placement.find_mount(str(request.run_dir))
    if mount is None or (mount.kind, mount.source) != ("host", mount.path):
        mounts[run_dir] = run_dir
    for path in sorted(mounts):  # a directory before those in it
        yield mounts[path], path


def _container_words(request: JobRequest) -> tuple[list[str], list[str]]:
    """Return srun's options and the words before the command that start the container."""
    launch = request.job.launch
    runtime = container_runtime(launch)
    if not runtime:
        return [], []
    image = format_image(launch.image, runtime)
    mounts = ",".join(f"{source}:{path}" for source, path in find_mounts(request))
    if runtime == "apptainer":
        words = ["apptainer", "exec", *(["--nv"] if request.devices else [])]
        return [], [*words, "--bind", mounts, image]
    options = [f"--container-image={image}", f"--container-mounts={mounts}"]
    # As on the nodes themselves, the home directory has the caches and credentials.
    if "no-container-mount-home" not in launch.srun_options:
        options.append("--container-mount-home")
    if names := [*request.environment, *request.placement.references("env")]:
        # Otherwise a value that the image has for a variable replaces the job's.
        options.append(f"--container-env={','.join(names)}")
    return options, []


def render(request: JobRequest) -> str:
    """Return the batch script."""
    launch, (min_nodes, max_nodes) = request.job.launch, request.nodes
    # Slurm expands %j and similar patterns in file names.
    job_pattern = "%A_%a" if request.trials else "%j"
    output = f"{str(request.run_dir).replace('%', '%%')}/slurm-{job_pattern}.out"
    save_seconds = min(SAVE_SECONDS, request.time_limit_seconds // 4)
    is_elastic, resilience = min_nodes != max_nodes, request.job.resilience
    # By default a task gets only one core.
    is_exclusive = not set(SHARING_OPTIONS) & set(launch.options) and not launch.cpus
    options: dict[str, str] = {
        "job-name": request.name,
        "chdir": str(Path.cwd()),
        "output": output,
        "open-mode": "append",
        "nodes": f"{min_nodes}-{max_nodes}" if is_elastic else str(max_nodes),
    }
    if request.devices and not set(GPU_OPTIONS) & set(launch.options):
        options["gpus-per-node"] = str(request.devices)
    options |= {"time": launch.time_limit, "signal": f"TERM@{save_seconds}", "requeue": ""}
    if request.trials:
        numbers = [trial.number for trial in request.trials]
        options["array"] = format_tasks(numbers, request.max_running)
    if is_elastic:
        options["no-kill"] = ""
    if is_exclusive:
        options["exclusive"] = ""
        if not set(MEMORY_OPTIONS) & set(launch.options):
            options["mem"] = "0"  # all memory; else the cluster's default, which may be small
    values = {name: str(getattr(launch, name)) for name in PLACEMENT_OPTIONS.values()}
    values["memory"] += "G" if launch.memory else ""
    values["exclude"] = ",".join(read_excluded(request.placement))
    options |= {
        option: value for option, name in PLACEMENT_OPTIONS.items() if (value := values[name])
    }
    for name, value in launch.options.items():
        options[name] = "" if value in ("true", name) else value
    for value in options.values():
        if not is_one_line(value):  # bash would run the second line
            raise WeftError(f"{value!a} does not fit into one line of a batch script")
    # Not an option of sbatch: of MIN-MAX nodes it would request the minimum that the tasks need.
    wait_seconds = 0 if is_elastic else END_SECONDS
    srun = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=0", f"--wait={wait_seconds}"]
    srun += ["--no-kill"] if is_elastic else []
    if "cpus-per-task" in options:  # srun does not inherit it from sbatch
        srun.append(f"--cpus-per-task={options['cpus-per-task']}")
    container_options, start = _container_words(request)
    srun += container_options
    for name, value in launch.srun_options.items():
        srun.append(f"--{name}" if value in ("true", name) else f"--{name}={value}")
    needs_recipe = container_runtime(launch) and not request.trials and not request.compares
    recipe = standalone_recipe(request) if needs_recipe else None
    recipe_file = request.run_dir / RECIPE_FILE
    words = request.command(request.recipe if recipe is None else str(recipe_file))
    command = format_command(words, "    ")
    script, arguments, run_dir = command, "", Markup(shlex.quote(str(request.run_dir)))
    if request.trials:
        run_dir = Markup('"$run"')
        arguments = '"$recipe" --run.dir "$run" --train.seed "$seed"'
        command, script = f"weft train {arguments}", 'weft train "$@"'
    exclude_files = [str(expand_path(name).absolute()) for name in request.placement.exclude_files]
    return render_template(
        "slurm.sh.j2",
        quote_shell,
        options=options,
        exports=[Markup(line) for line in _exports(request)],
        srun=Markup(shlex.join(srun)),
        start=Markup(shlex.join(start)),
        recipe=recipe,
        recipe_file=recipe_file,
        command=Markup(command),
        setup=build_script(launch.setup, script) if launch.setup else "",
        arguments=Markup(arguments),
        trials=request.trials,
        directory=request.run_dir,
        hyperpod=hyperpod.HYPERPOD_DIR,
        requeue=run_dir + f"/{REQUEUE_DIR}",
        max_failures=MAX_FAILED_STARTS if resilience.max_restarts_per_hour else 0,
        max_stops=MAX_STARTS,
        unhealthy_nodes=run_dir + f"/{UNHEALTHY_NODES_DIR}" if resilience.preflight else "",
        exclude=launch.options.get("exclude") or ",".join(request.placement.exclude),
        exclude_files=Markup(shlex.join(exclude_files)),
        name=request.name,
    )


def format_tasks(numbers: Sequence[int], max_running: int) -> str:
    """Return the value of sbatch's --array."""
    first, last = numbers[0], numbers[-1]
    is_range = last - first == len(numbers) - 1 > 0
    text = f"{first}-{last}" if is_range else ",".join(map(str, numbers))
    return f"{text}%{max_running}" if max_running else text


def _exports(request: JobRequest) -> Iterator[str]:
    """Yield the lines that set the variables of the job; srun passes them on."""
    runtime = container_runtime(request.job.launch)
    if runtime:  # the image has its own packages
        yield "unset PYTHONPATH PYTHONHOME"
        yield "export PYTHONNOUSERSITE=1"
        if request.nodes[1] > 1:
            yield HEAD_ADDRESS
    env, references = request.environment, request.placement.references("env")
    for name, value in env.items():
        yield f"export {name}={shlex.quote(value)}"
    for name, variable in references.items():
        message = f"launch.secrets.{name} is env:{variable}, which is not set"
        yield f'export {name}="${{{variable}:?{message}}}"'
    if runtime == "apptainer":
        # Otherwise a value that the image has for a variable replaces the job's.
        for name in (*env, *references):
            yield f'export APPTAINERENV_{name}="${name}"'


def check(text: str) -> list[str]:
    """Return the errors of bash, and of sbatch, which asks the cluster, if installed."""
    tools = [["bash", "-n"]]
    if shutil.which("sbatch"):
        tools.append(["sbatch", "--test-only"])
    for command in tools:
        result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        if result.returncode:
            # Several lines report one failure: sbatch says first what, then why.
            lines = result.stderr.splitlines() or [f"exited with status {result.returncode}"]
            message = "; ".join(lines)
            if command[0] == "sbatch" and re.search(UNREACHABLE, message):
                return warn_unchecked(f"the cluster ({lines[-1]})", "use a host of the cluster")
            remedies = [each for text, each in REMEDIES.items() if re.search(text, message)]
            return [". ".join([f"{shlex.join(command)}: {message}", *remedies[:1]])]
    if re.search("^srun .*--container-image=", text, re.MULTILINE) and shutil.which("srun"):
        result = subprocess.run(["srun", "--help"], capture_output=True, text=True, check=False)
        if result.returncode == 0 and "--container-image" not in result.stdout:
            return [
                "srun has no option --container-image, so Pyxis is not installed on this cluster. "
                "Use --launch.container apptainer, or remove launch.image and start the container "
                "or environment that the cluster offers in launch.setup."
            ]
    return []


# --------------------------------------------------------------------------- cluster


def submit(path: Path, request: JobRequest) -> str:
    """Submit the script; return the job id."""
    return run_sbatch(path)


def run_sbatch(path: Path, *options: str) -> str:
    """Submit a script with further options; return the job id."""
    return _slurm("sbatch", "--parsable", *options, str(path)).strip().partition(";")[0]


def resubmit(path: Path, id: str) -> str:
    """Submit the script again, or one task of an array; return the new id."""
    _, underscore, task = id.partition("_")
    return run_sbatch(path, *([f"--array={task}"] if task else [])) + underscore + task


def status(id: str) -> str:
    """Return one line: 'waiting...', 'running on NODES', or how the job ended."""
    job = _show_job(id)
    state, nodes, reason = job.get("JobState", ""), job.get("NodeList"), job.get("Reason")
    n = job.get("Restarts", "0")
    restarts = f", restarted {n} time{'s' * (n != '1')}" if n != "0" else ""
    if state in ("PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED", "STOPPED"):
        return f"waiting: {state.lower()}, {reason}{restarts}"
    if state in ("RUNNING", "COMPLETING"):
        ending = " (ending)" if state == "COMPLETING" else ""
        return f"running on {nodes}{ending}{restarts}"
    if not state:
        return "ended: Slurm has no record of the job any more"
    code = job.get("ExitCode", "").partition(":")[0]
    if code == str(REQUEUE):
        return "ended: saved a checkpoint and stopped"
    return f"ended: {state.lower()}" + (f", exit status {code}" if code not in ("0", "") else "")


def logs(id: str, run_dir: Path, follow: bool) -> Iterator[str]:
    """Yield the lines of the job's file, which outlives Slurm's record of the job."""
    # The output of an array's tasks is beside their run directories.
    path = (run_dir.parent if "_" in id else run_dir) / f"slurm-{id}.out"
    while not path.is_file():
        job_status = status(id)
        if not follow or not is_active(job_status):
            raise WeftError(f"job {id} has printed nothing: {job_status}")
        time.sleep(1)
    with path.open(encoding="utf-8", errors="replace") as lines:
        partial_line, is_last = "", not follow or not is_active(status(id))
        while True:
            for line in lines:
                partial_line += line
                if partial_line.endswith("\n"):
                    yield partial_line[:-1]
                    partial_line = ""
            if is_last:
                if partial_line:
                    yield partial_line
                return
            time.sleep(1)
            is_last = not is_active(status(id))


def cancel(id: str) -> str:
    """Make the job save and end, without a requeue; return a message."""
    job_status = status(id)
    if job_status.startswith("waiting"):
        _slurm("scancel", id)
        return f"removed job {id} from the queue"
    if not job_status.startswith("running"):
        return f"job {id} has {job_status.replace(':', ' already:', 1)}"
    _slurm("scontrol", "update", f"JobId={id}", "Requeue=0")
    _slurm("scancel", "--signal=TERM", id)
    return f"signaled job {id} to save a checkpoint and end"


def _show_job(id: str) -> dict[str, str]:
    """Return Slurm's fields of a job; for an old job, those that accounting still has."""
    try:
        text = _slurm("scontrol", "show", "job", id, "--oneliner")
    except ToolError as error:
        if not re.search("Invalid job id|Job [0-9_]+ not found", str(error)):
            raise
    else:
        return dict(re.findall(r"(?:^|\s)(\w+)=(.*?)(?=\s[\w:/]+=|$)", text.splitlines()[0]))
    if shutil.which("sacct") is None:  # a cluster without accounting may lack it
        return {}
    try:
        text = _slurm("sacct", "-j", id, "-X", "-n", "-P", "-o", "State,ExitCode,NodeList")
    except ToolError:  # there is no accounting
        return {}
    names = ("JobState", "ExitCode", "NodeList")
    return dict(zip(names, text.splitlines()[-1].split("|"), strict=True)) if text.strip() else {}
