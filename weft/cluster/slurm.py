"""Slurm: a batch script whose ``srun`` starts ``weft train`` once on each node.

The job survives its time limit and the loss of nodes:

*Time limit*: before the limit Slurm sends SIGTERM to the job steps, but not to the script.  weft
saves a checkpoint and exits with status 75; the script requeues its own job, which resumes.

*Failure*: weft restarts the ranks within the job.  If that does not help, the script requeues the
job, unless weft expects the same failure again (`weft.cluster.requeue`) or the job has started
`MAX_FAILED_STARTS` times in a row from the same checkpoint.  A configuration error ends the job.

*Unhealthy node*: with status 69 (``resilience.preflight``) the script requeues the job on other
nodes.

*Lost node*: Slurm restarts a job with a fixed number of nodes (``--requeue``).  A job with MIN:MAX
nodes continues on the remaining nodes (``--no-kill``).  On HyperPod (`weft.cluster.hyperpod`) srun
replaces a node that has a hardware fault.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from markupsafe import Markup

from weft.cluster import REQUEUE, hyperpod
from weft.cluster.doctor import UNHEALTHY_NODES_DIR
from weft.cluster.job_placement import check_placement
from weft.cluster.job_request import (
    JobRequest,
    ToolError,
    build_script,
    check_duration,
    format_command,
    is_active,
    render_template,
    run_cli,
)
from weft.cluster.requeue import REQUEUE_DIR
from weft.config.errors import ConfigErrors, WeftError
from weft.config.escaping import is_one_line
from weft.train.secrets import REFERENCES_VARIABLE, encode_references

FILE_SUFFIX = ".sh"
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
}
# With one of these options, weft does not request exclusive nodes.
SHARING_OPTIONS = ("exclusive", "oversubscribe", "cpus-per-task", "cpus-per-gpu", "mincpus")
_slurm = partial(run_cli, remedy="use a host of the cluster that has Slurm's commands")


def find_errors(request: JobRequest) -> ConfigErrors:
    """Return the configuration errors of a request."""
    launch, errors = request.job.launch, ConfigErrors(request.job)
    errors += check_duration(launch.time_limit) + check_placement("slurm", request.job, [])
    if launch.image != "auto":
        rule = "is not supported by Slurm itself"
        remedy = "start the container in launch.setup, with your cluster's plug-in"
        errors.add("launch.image", rule, remedy)
    for name in launch.options:
        key = f"launch.options.{name}"
        if not re.fullmatch("[a-z][a-z-]*[a-z]", name):
            remedy = "use a form such as partition=gpu"
            errors.add(key, "is not a long option of sbatch", remedy)
        elif name in RESERVED_OPTIONS:
            other = RESERVED_OPTIONS[name]
            remedy = f"remove it: {other} sets it" if other else "remove it"
            errors.add(key, "is an option that weft sets", remedy)
        elif name in PLACEMENT_OPTIONS and getattr(launch, PLACEMENT_OPTIONS[name]):
            rule = f"is also given by launch.{PLACEMENT_OPTIONS[name]}"
            errors.add(key, rule, "remove one of the two")
    if launch.patch:
        rule = "is for manifests; a batch script has no fields"
        remedy = "use launch.options for sbatch, and launch.srun_options for srun"
        errors.add("launch.patch", rule, remedy)
    errors += hyperpod.find_errors(request)
    return errors


def find_warnings(request: JobRequest) -> Iterator[str]:
    """Yield warnings about a request."""
    return hyperpod.find_warnings(request)


def render(request: JobRequest) -> str:
    """Return the batch script."""
    launch, (min_nodes, max_nodes) = request.job.launch, request.nodes
    # Slurm expands %j and similar patterns in file names.
    output = f"{str(request.run_dir).replace('%', '%%')}/slurm-%j.out"
    save_seconds = min(SAVE_SECONDS, request.time_limit_seconds // 4)
    is_elastic, resilience = min_nodes != max_nodes, request.job.resilience
    options: dict[str, str] = {
        "job-name": request.name,
        "chdir": str(Path.cwd()),
        "output": output,
        "open-mode": "append",
        "nodes": f"{min_nodes}-{max_nodes}" if is_elastic else str(max_nodes),
        **({"gpus-per-node": str(request.devices)} if request.devices else {}),
        "time": launch.time_limit,
        "signal": f"TERM@{save_seconds}",
        "requeue": "",
        **({"no-kill": ""} if is_elastic else {}),
        **{
            option: f"{value}G" if option == "mem" else str(value)
            for option, name in PLACEMENT_OPTIONS.items()
            if (value := getattr(launch, name))
        },
        **({"exclude": ",".join(exclude)} if (exclude := request.placement.exclude) else {}),
        # By default a task gets only one core.
        **({} if set(SHARING_OPTIONS) & set(launch.options) or launch.cpus else {"exclusive": ""}),
        **{
            name: "" if value in ("true", name) else value for name, value in launch.options.items()
        },
    }
    for value in options.values():
        if not is_one_line(value):  # bash would run the second line
            raise WeftError(f"{value!a} does not fit into one line of a batch script")
    # Not an option of sbatch: of MIN-MAX nodes it would request the minimum that the tasks need.
    wait_seconds = 0 if is_elastic else END_SECONDS
    srun = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=0", f"--wait={wait_seconds}"]
    srun += ["--no-kill"] if is_elastic else []
    srun += [f"--{name}={value}" for name, value in launch.srun_options.items()]
    if "cpus-per-task" in options:  # srun does not inherit it from sbatch
        srun.append(f"--cpus-per-task={options['cpus-per-task']}")
    command = format_command(request.command(request.recipe), "    ")
    return render_template(
        "slurm.sh.j2",
        lambda value: shlex.quote(str(value)),
        options=options,
        exports=[Markup(line) for line in _exports(request)],
        srun=Markup(shlex.join(srun)),
        command=Markup(command),
        setup=build_script(launch.setup, command) if launch.setup else "",
        hyperpod=hyperpod.HYPERPOD_DIR,
        requeue=request.run_dir / REQUEUE_DIR,
        max_failures=MAX_FAILED_STARTS if resilience.max_restarts_per_hour else 0,
        max_stops=MAX_STARTS,
        unhealthy_nodes=request.run_dir / UNHEALTHY_NODES_DIR if resilience.preflight else "",
    )


def _exports(request: JobRequest) -> Iterator[str]:
    """Yield the lines that set the variables of the job; srun passes them on."""
    env = {**request.job.launch.env}
    if references := request.placement.references("secretsmanager"):
        env[REFERENCES_VARIABLE] = encode_references(references)
    for name, value in env.items():
        yield f"export {name}={shlex.quote(value)}"
    for name, variable in request.placement.references("env").items():
        message = f"launch.secrets.{name} is env:{variable}, which is not set"
        yield f'export {name}="${{{variable}:?{message}}}"'


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
            return [f"{shlex.join(command)}: {'; '.join(lines)}"]
    return []


# --------------------------------------------------------------------------- cluster


def submit(path: Path, request: JobRequest) -> str:
    """Submit the script; return the job id."""
    return _slurm("sbatch", "--parsable", str(path)).strip().partition(";")[0]


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
    path = run_dir / f"slurm-{id}.out"
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
        if "Invalid job id" not in str(error):
            raise
    else:
        return dict(re.findall(r"(?:^|\s)(\w+)=(.*?)(?=\s[\w:/]+=|$)", text.splitlines()[0]))
    try:
        text = _slurm("sacct", "-j", id, "-X", "-n", "-P", "-o", "State,ExitCode,NodeList")
    except ToolError:  # there is no accounting
        return {}
    names = ("JobState", "ExitCode", "NodeList")
    return dict(zip(names, text.splitlines()[-1].split("|"), strict=True)) if text.strip() else {}
