"""A real Slurm for tests: virtual nodes on this host, on loopback, in a few seconds.

Every daemon is a child of the test process and dies with it.  All their files are in one
temporary directory.

On Debian: apt install slurm-wlm munge
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.s3 import die_with_parent, free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "sinfo")
NODES = ("n0", "n1")

# A requeued job waits until its credentials have expired: 120 s by default.
SETTINGS = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
JobRequeue=1
KillWait=5
SlurmdTimeout=10
ReturnToService=2
MpiDefault=none
"""


def missing() -> str:
    """Return the reason why Slurm cannot run here; empty if it can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)}: apt install slurm-wlm munge"
    return "" if os.getuid() == 0 else "Slurm's daemons are started as root"


class Slurm:
    """A running cluster."""

    def __init__(self, directory: Path, daemons: dict[str, subprocess.Popen[bytes]]) -> None:
        self.directory, self.daemons = directory, daemons
        self.environment = {"SLURM_CONF": str(directory / "slurm.conf")}

    def run(self, *command: str) -> str:
        completed = subprocess.run(
            command,
            env=os.environ | self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert completed.returncode == 0, f"{command}: {completed.stderr}"
        return completed.stdout

    def idle(self) -> bool:
        return self.run("sinfo", "-h", "-o", "%T").split() == ["idle"]

    def free(self) -> bool:
        """Return True if no node runs a job; nodes may be down or drained."""
        states = self.run("sinfo", "-h", "-N", "-o", "%T").split()
        return all(state.startswith(("idle", "down", "drained")) for state in states)

    def kill(self, node: str) -> None:
        """Kill a node's daemon and all its processes, as a power loss would."""
        daemon = self.daemons.pop(node)
        daemon.kill()
        daemon.wait()
        tasks = self.processes(node)
        for process in {*map(_parent, tasks), *tasks} - {0, 1, os.getpid()}:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def kill_tasks(self, node: str, number: int = signal.SIGKILL) -> None:
        """Kill all processes of the job steps on a node, as a crash would; Slurm stays alive."""
        for process in self.processes(node):
            with suppress(OSError):
                variables = Path(f"/proc/{process}/environ").read_text(errors="replace")
                if "SLURM_PROCID=" in variables and "\0SLURM_STEP_ID=" in variables:
                    os.kill(process, number)

    def processes(self, node: str = "") -> list[int]:
        """Return the process ids of all jobs, or of the jobs on one node."""
        expected = {f"SLURM_CONF={self.directory / 'slurm.conf'}"}
        expected |= {f"SLURMD_NODENAME={node}"} if node else set()
        results = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                variables = set((entry / "environ").read_text(errors="replace").split("\0"))
                in_job = any(v.startswith("SLURMD_NODENAME=") for v in variables)
                if in_job and expected <= variables:
                    results.append(int(entry.name))
        return results


def _parent(process: int) -> int:
    with suppress(OSError, IndexError, ValueError):
        stat = Path(f"/proc/{process}/stat").read_text()
        parent = int(stat.rpartition(")")[2].split()[1])
        if Path(f"/proc/{parent}/cmdline").read_text().startswith("slurmstepd"):
            return parent
    return 0


@contextmanager
def cluster(nodes: tuple[str, ...] = NODES, plugin: Path | str | None = None) -> Iterator[Slurm]:
    """Start a cluster; ``plugin``: a SPANK plugin, with its arguments, for srun and slurmstepd."""
    directory = Path(tempfile.mkdtemp(prefix="weft-slurm-", dir="/tmp"))  # short: sockets lie in it
    (directory / "munge").mkdir()
    (directory / "state").mkdir()
    directory.chmod(0o755)
    key = directory / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    port, *ports = free_ports(1 + len(nodes))
    host = socket.gethostname().partition(".")[0]
    node = f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=2048 State=UNKNOWN"
    lines = [
        f"NodeName={name} Port={number} {node}" for name, number in zip(nodes, ports, strict=True)
    ]
    lines += [f"PartitionName=main Nodes={','.join(nodes)} Default=YES State=UP"]
    if plugin is not None:
        (directory / "plugstack.conf").write_text(f"required {plugin}\n")
        lines += [f"PlugStackConfig={directory}/plugstack.conf"]
    settings = directory / "slurm.conf"
    head = SETTINGS.format(host=host, folder=directory, port=port)
    settings.write_text(head + "\n".join(lines) + "\n")
    slurm = Slurm(directory, {})

    def start_daemon(name: str, *command: str) -> None:
        with (directory / f"{name}.out").open("wb") as out:
            slurm.daemons[name] = subprocess.Popen(
                command,
                env=os.environ | slurm.environment,
                stdout=out,
                stderr=out,
                preexec_fn=die_with_parent,
            )

    munge = directory / "munge"
    try:
        start_daemon(
            "munged",
            *("munged", "--foreground", "--force", f"--key-file={key}"),
            *(f"--socket={munge}/socket", f"--pid-file={munge}/pid"),
            *(f"--log-file={munge}/log", f"--seed-file={munge}/seed"),
        )
        wait_until(lambda: (munge / "socket").exists(), "munged")
        start_daemon("slurmctld", "slurmctld", "-D", "-c", "-f", str(settings))
        for name in nodes:
            (directory / f"spool-{name}").mkdir()
            start_daemon(name, "slurmd", "-D", "-N", name, "-f", str(settings))

        def up() -> bool:
            with suppress(AssertionError):
                return slurm.idle()
            return False

        wait_until(up, "Slurm")
        yield slurm
    finally:
        for process in slurm.processes():
            for item in {_parent(process), process} - {0}:
                with suppress(ProcessLookupError):
                    os.kill(item, signal.SIGKILL)
        for daemon in reversed(slurm.daemons.values()):
            daemon.kill()
            daemon.wait()
        shutil.rmtree(directory, ignore_errors=True)


def wait_until(holds: Callable[[], object], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"in vain waited for: {what}"
        time.sleep(0.2)
