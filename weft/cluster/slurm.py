"""Nodes of Slurm: a batch script whose ``srun`` starts ``weft train`` once on each node.

What makes a job that outlives its time limit, and the loss of its nodes:

*Before the limit* Slurm sends SIGTERM to the steps, not to the script: weft saves and ends with
status 75.  The script then puts its own job back into the queue, and the next start goes on; so it
does at 69 (``resilience.preflight``), on other nodes.  With any other status it ends: a mistake is
no better the second time.

*A lost node*: a job with a fixed number of nodes is started again by Slurm itself (``--requeue``).
One with MIN:MAX goes on (``--no-kill``) with the nodes that are left, as weft's launchers do.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from weft.cluster import REQUEUE, SICK
from weft.cluster.doctor import SICK_NODES
from weft.cluster.scheduler import Refused, on_lines, seconds, time_problems, tool
from weft.cluster.submit import Request, alive
from weft.config.errors import ConfigError, WeftError
from weft.config.escaping import is_one_line

ENDING = ".sh"
# What ranks get to finish a step and save; at most a quarter of the whole.
SAVE_SECONDS = 300
# sbatch's options that weft writes, and what decides them instead.
OWN = {
    "nodes": "--nodes",
    "time": "launch.time_limit",
    "output": "run.dir",
    "error": "run.dir",
    "gpus-per-node": "run.cluster",
} | dict.fromkeys(
    ("ntasks", "ntasks-per-node", "requeue", "no-requeue", "no-kill", "open-mode", "array", "wrap"),
    "",
)
# With one of these a node is shared with others.
SHARING = ("exclusive", "oversubscribe", "cpus-per-task", "cpus-per-gpu", "mincpus")
REMEDY = "use a host of the cluster where Slurm's commands are"


_AGAIN = """\
# Stopped and saved: the same command goes on.
if [ $status -eq {REQUEUE} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
"""
# A requeued job is killed, but its script gets KillWait: it may say what could not be said before.
_ELSEWHERE = """\
# Stopped and saved, or a node is not fit to train: the same command goes on, on fit nodes.
if [ $status -eq {REQUEUE} ] || [ $status -eq {SICK} ]; then
    sick=$(ls {folder} 2>/dev/null | paste -sd, -)
    trap '' TERM
    scontrol requeue "$SLURM_JOB_ID"
    [ -z "$sick" ] || scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$sick"{excluded}
fi
"""


def problems(request: Request) -> list[ConfigError]:
    """What cannot be asked for here."""
    launch, found = request.job.launch, []
    found += time_problems(launch.time_limit)
    if launch.image != "auto":
        rule = "is nothing that Slurm itself knows"
        remedy = "let launch.setup and a plug-in of your cluster's enter it"
        found.append(ConfigError("launch.image", launch.image, rule, remedy))
    for name, value in launch.options.items():
        key = f"launch.options.{name}"
        if not re.fullmatch("[a-z][a-z-]*[a-z]", name):
            remedy = "as in partition=gpu"
            found.append(ConfigError(key, value, "is no long option of sbatch's", remedy))
        elif name in OWN:
            remedy = f"use {OWN[name]}" if OWN[name] else ""
            found.append(ConfigError(key, value, "is for weft to say", remedy))
    return found


def render(request: Request) -> str:
    """The batch script."""
    launch, (least, most) = request.job.launch, request.nodes
    # Slurm replaces %j and its like in names of files.
    output = f"{str(request.run_dir).replace('%', '%%')}/slurm-%j.out"
    elastic, before = least != most, min(SAVE_SECONDS, seconds(launch.time_limit) // 4)
    options: dict[str, str] = {
        "job-name": request.name,
        "chdir": str(Path.cwd()),
        "output": output,
        "open-mode": "append",
        "nodes": f"{least}-{most}" if elastic else str(most),
        **({"gpus-per-node": str(request.devices)} if request.devices else {}),
        "time": launch.time_limit,
        "signal": f"TERM@{before}",
        "requeue": "",
        **({"no-kill": ""} if elastic else {}),
        # One task has one core unless somebody says otherwise.
        **({} if set(SHARING) & set(launch.options) else {"exclusive": ""}),
        **{
            name: "" if value in ("true", name) else value for name, value in launch.options.items()
        },
    }
    lines = [f"#SBATCH --{name}{_value(value)}" for name, value in options.items()]
    # Not said to sbatch: of MIN-MAX nodes it would ask for as many as the fewest tasks need.
    srun = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0"]
    srun += ["--no-kill"] if elastic else []
    if "cpus-per-task" in options:  # which srun does not take over from sbatch
        srun.append(f"--cpus-per-task={options['cpus-per-task']}")
    command = on_lines(request.words, "    ")
    if launch.setup:
        inner = "\n".join(["set -e", *launch.setup, f"exec {command}"])
        start = f"{shlex.join(srun)} bash -c {shlex.quote(inner)}"
    else:
        start = f"{shlex.join(srun)} \\\n    {command}"
    again = _AGAIN.format(REQUEUE=REQUEUE)
    if request.job.resilience.preflight:
        folder = shlex.quote(str(request.run_dir / SICK_NODES))
        excluded = f",{shlex.quote(options['exclude'])}" if options.get("exclude") else ""
        again = _ELSEWHERE.format(REQUEUE=REQUEUE, SICK=SICK, folder=folder, excluded=excluded)
    return f"""\
#!/bin/bash
{chr(10).join(lines)}

{start}
status=$?

{again}exit $status
"""


def _value(value: str) -> str:
    if not is_one_line(value):  # the rest would be a command
        raise WeftError(f"{value!a} cannot be written into a line of a batch script")
    return f"={shlex.quote(value)}" if value else ""


def check(text: str) -> list[str]:
    """What bash and, where it is, sbatch say is wrong; the latter asks the cluster."""
    tools = [["bash", "-n"]]
    if shutil.which("sbatch"):
        tools.append(["sbatch", "--test-only"])
    for command in tools:
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr.splitlines() or [f"ended with status {done.returncode}"]
            return [f"{shlex.join(command)}: {line}" for line in said]
    return []


# --------------------------------------------------------------------------- a cluster


def submit(path: Path, request: Request) -> str:
    """Hand the script in; the job's number."""
    return _slurm("sbatch", "--parsable", str(path)).strip().partition(";")[0]


def status(id: str) -> str:
    """One line: waiting, running on which nodes, or how it ended."""
    found = _job(id)
    state, nodes, reason = found.get("JobState", ""), found.get("NodeList"), found.get("Reason")
    again = f", started again {n} times" if (n := found.get("Restarts", "0")) != "0" else ""
    if state in ("PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED", "STOPPED"):
        return f"waiting: {state.lower()}, {reason}{again}"
    if state in ("RUNNING", "COMPLETING"):
        ending = " (ending)" if state == "COMPLETING" else ""
        return f"running on {nodes}{ending}{again}"
    if not state:
        return "ended: Slurm knows no more of it"
    code = found.get("ExitCode", "").partition(":")[0]
    if code == str(REQUEUE):
        return "ended: stopped and saved"
    return f"ended: {state.lower()}" + (f", exit status {code}" if code not in ("0", "") else "")


def logs(id: str, follow: bool) -> Iterator[str]:
    """Lines that the job has printed."""
    path = Path(_job(id).get("StdOut", ""))
    while not path.is_file():
        said = status(id)
        if not follow or not alive(said):
            raise WeftError(f"job {id} has printed nothing: {said}")
        time.sleep(1)
    with path.open(encoding="utf-8", errors="replace") as lines:
        rest, last = "", False
        while True:
            for line in lines:
                rest += line
                if rest.endswith("\n"):
                    yield rest[:-1]
                    rest = ""
            if last or not follow:
                if rest:
                    yield rest
                return
            time.sleep(1)
            last = not alive(status(id))


def stop(id: str) -> str:
    """Have it save and end; it does not come back."""
    said = status(id)
    if said.startswith("waiting"):
        _slurm("scancel", id)
        return f"job {id} is taken out of the queue"
    if not said.startswith("running"):
        return f"job {id} has {said.replace(':', ' already:', 1)}"
    _slurm("scontrol", "update", f"JobId={id}", "Requeue=0")
    _slurm("scancel", "--signal=TERM", id)
    return f"job {id} is told to save and end"


def _job(id: str) -> dict[str, str]:
    """What Slurm knows of a job: all, as long as it is in memory; then what accounting has kept."""
    try:
        text = _slurm("scontrol", "show", "job", id, "--oneliner")
    except Refused as error:
        if "Invalid job id" not in str(error):
            raise
    else:
        return dict(re.findall(r"(?:^|\s)(\w+)=(.*?)(?=\s[\w:/]+=|$)", text.splitlines()[0]))
    try:
        text = _slurm("sacct", "-j", id, "-X", "-n", "-P", "-o", "State,ExitCode,NodeList")
    except Refused:  # there is no accounting
        return {}
    names = ("JobState", "ExitCode", "NodeList")
    return dict(zip(names, text.splitlines()[-1].split("|"), strict=True)) if text.strip() else {}


def _slurm(*words: str) -> str:
    return tool(*words, remedy=REMEDY)
