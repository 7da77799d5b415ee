"""A stand-in for HyperPod's auto-resume on a real Slurm.

On HyperPod, srun has the option ``--auto-resume=1`` (a SPANK plugin).  If the step fails, HyperPod
checks the hardware of the nodes.  Without a fault it does nothing.  Otherwise it replaces the node
under its name and retries the step; if the nodes have generic resources (GPUs), it requeues the
job instead.  Here a real plugin adds the option, and a script around srun makes the decision: the
test plants a hardware fault as a file.  The source of these facts is in docs/hyperpod.md.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm import Slurm, wait_until
from tests.submission.slurm_jobs import Launcher
from weft.config.schema import Job
from weft.submission import hyperpod, slurm
from weft.submission.job_request import JobRequest

SOURCE = Path(__file__).with_name("auto_resume.c")
NODES, SPARE = ("n0", "n1", "n2"), "n2"

# The fault is "retry NODE" or "requeue NODE".
AUTO_RESUME = """\
#!/bin/bash
while true; do
    {srun} "$@"
    status=$?
    [ $status -ne 0 ] && [[ " $* " == *" --auto-resume=1 "* ]] || exit $status
    if [ ! -e {directory}/fault ]; then
        echo "auto-resume: NONE"
        exit $status
    fi
    read -r action node <{directory}/fault
    rm -rf {directory}/fault {directory}/disks/$node
    echo "auto-resume: replaced $node, $action"
    [ $action = requeue ] || continue
    scontrol update NodeName=$node State=drain Reason=Action:Replace
    scontrol update NodeName={spare} State=resume
    scontrol requeue $SLURM_JOB_ID
    sleep 60
done
"""
# weft on a node: each virtual node has its own disk at the same path.
WEFT = """\
#!/bin/bash
mkdir -p {directory}/disks/$SLURMD_NODENAME {directory}/disk
exec unshare --mount bash -c '
    mount --bind {directory}/disks/$SLURMD_NODENAME {directory}/disk && exec {python} -m weft "$@"
' weft "$@"
"""
# `weft launch` on the login node, which knows these paths from the test.
LAUNCH = """\
import sys
from pathlib import Path
from weft.submission import hyperpod, slurm
from weft.cli.main import main
hyperpod.HYPERPOD_DIR, hyperpod.VOLATILE_DIRS = Path("sagemaker_cluster").absolute(), {}
slurm.END_SECONDS = 5
sys.exit(main())
"""


def missing() -> str:
    """Return the reason why the plugin cannot be built here; empty if it can."""
    if shutil.which("gcc") is None:
        return "no gcc"
    if not Path("/usr/include/slurm/spank.h").exists():
        return "no slurm/spank.h: apt install libslurm-dev"
    command = ["unshare", "--mount", "true"]
    is_allowed = subprocess.run(command, capture_output=True, check=False).returncode == 0
    return "" if is_allowed else "no mount namespaces"


def build_plugin(directory: Path) -> Path:
    """Compile the SPANK plugin; return its path."""
    plugin = directory / "auto_resume.so"
    command = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(plugin), str(SOURCE)]
    subprocess.run(command, check=True)
    return plugin


class HyperPod(Launcher):
    """Runs commands on the login node of a HyperPod cluster with a spare node."""

    command = (sys.executable, "-c", LAUNCH)

    def __init__(self, cluster: Slurm, directory: Path, store: Path) -> None:
        super().__init__(cluster, directory, store)
        (directory / "sagemaker_cluster").mkdir()
        names = {"directory": directory, "python": sys.executable, "spare": SPARE}
        names["srun"] = shutil.which("srun") or ""
        for name, text in (("srun", AUTO_RESUME), ("weft", WEFT)):
            for field, value in names.items():
                text = text.replace(f"{{{field}}}", str(value))
            (directory / "bin" / name).write_text(text)
            (directory / "bin" / name).chmod(0o755)
        cluster.run("scontrol", "update", f"NodeName={SPARE}", "State=drain", "Reason=spare")

    def plant_fault(self, action: str, node: str) -> None:
        """Make the next failure of the step a hardware fault; ``action``: retry or requeue."""
        (self.directory / "fault").write_text(f"{action} {node}\n")

    def start(self, *words: str) -> str:
        """Submit a job on two nodes; return its id."""
        out = self.launch("--nodes", "2", "--launch.time_limit", "02:00:00", *words)
        match = re.search(r"slurm job (\d+)", out)
        assert match is not None
        return match[1]

    def start_program(self, program: str) -> str:
        """Submit a job whose nodes run lines of bash instead of weft; return its id."""
        (self.directory / "bin" / "weft").write_text(f"#!/bin/bash\n{program}\n")
        self.run.mkdir()
        request = JobRequest("small", "demo", {}, Job(), (2, 2), 0, self.run)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hyperpod, "HYPERPOD_DIR", self.directory / "sagemaker_cluster")
            patch.setattr(slurm, "END_SECONDS", 5)
            (self.directory / "launch.sh").write_text(slurm.render(request))
        command = ["sbatch", "--parsable", f"--chdir={self.directory}", "launch.sh"]
        submitted = subprocess.run(
            command,
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return submitted.stdout.strip()

    def field(self, id: str, name: str) -> str:
        """Return Slurm's value of a field of a job."""
        shown = self.cluster.run("scontrol", "show", "job", id, "--oneliner")
        match = re.search(rf"\s{name}=(\S+)", shown)
        return match[1] if match else ""

    def wait_for_field(self, id: str, name: str, value: str, seconds: float = 600) -> None:
        wait_until(lambda: self.field(id, name) == value, f"{name}={value}\n{self.out()}", seconds)

    def resume_nodes(self) -> None:
        """Put all nodes back into service."""
        for line in self.cluster.run("sinfo", "-h", "-N", "-o", "%N %T").splitlines():
            node, state = line.split()
            if state.startswith("drain"):
                self.cluster.run("scontrol", "update", f"NodeName={node}", "State=resume")
