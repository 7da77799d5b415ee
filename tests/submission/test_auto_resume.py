"""HyperPod's auto-resume and weft's own requeue, on a real Slurm of three virtual nodes, on CPU."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import slurm
from tests.commands import check_against_reference
from tests.slurm import Slurm, wait_until
from tests.submission import auto_resume
from tests.submission.auto_resume import NODES, HyperPod

MISSING = slurm.missing() or auto_resume.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=MISSING or "-"),
    pytest.mark.timeout(1800, method="signal"),  # so that fixtures tidy up
]
CRASHES = ("--optim.name", "crashing:build", "--resilience.max_restarts_per_hour", "1")
# An optimizer that crashes the process of rank 1 in a step, while the file "crash" exists.
CRASH = """
import os, signal
from sleepy import build as build_sleepy

def build(groups, optim):
    optimizer = build_sleepy(groups, optim)
    steps = 0
    def step(*args, **kwargs):
        nonlocal steps
        steps += 1
        if steps == 5 and os.path.exists("crash") and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSEGV)
    optimizer.register_step_pre_hook(step)
    return optimizer
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    plugin = auto_resume.build_plugin(tmp_path_factory.mktemp("plugin"))
    with slurm.cluster(NODES, plugin) as created:
        yield created


@pytest.fixture
def pod(cluster: Slurm, tmp_path: Path, store_path: Path) -> Iterator[HyperPod]:
    created = HyperPod(cluster, tmp_path, store_path)
    yield created
    cluster.run("scancel", "--user=root")
    wait_until(cluster.free, "that the nodes are free")
    created.resume_nodes()


def test_plugin_is_an_option_of_srun_alone(cluster: Slurm) -> None:
    assert cluster.run("srun", "--auto-resume=1", "echo", "hello") == "hello\n"
    command = ["sbatch", "--auto-resume=1", "--wrap", "true"]
    environment = {"PATH": "/usr/bin:/bin"} | cluster.environment
    refused = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "unrecognized option '--auto-resume=1'" in refused.stderr


def test_hardware_fault_requeues_on_another_node_and_resumes(
    pod: HyperPod, tmp_path: Path, store_path: Path
) -> None:
    """HyperPod requeues the job, as with GPUs; the script does not requeue it too."""
    id = pod.start("--train.steps", "40")
    pod.wait_for_step(13)
    assert pod.field(id, "NodeList") == "n[0-1]"
    pod.plant_fault("requeue", "n1")
    pod.cluster.kill_tasks("n1")
    pod.wait_for_field(id, "NodeList", "n[0,2]")
    pod.finish_soon()
    pod.wait_for_field(id, "JobState", "COMPLETED")
    assert pod.field(id, "Restarts") == "1"
    out = pod.out()
    assert "auto-resume: replaced n1, requeue" in out
    assert out.count("training on 2 nodes") == 2  # the output of the first start is still there
    assert out.count("resuming from") == 1
    assert "weft: exit status" not in out
    check_against_reference(tmp_path, store_path, 40)


def test_hardware_fault_of_the_first_node_resumes(
    pod: HyperPod, tmp_path: Path, store_path: Path
) -> None:
    """The rendezvous moves to another first node."""
    id = pod.start("--train.steps", "40")
    pod.wait_for_step(13)
    pod.plant_fault("requeue", "n0")
    pod.cluster.kill_tasks("n0")
    pod.wait_for_field(id, "NodeList", "n[1-2]")
    pod.finish_soon()
    pod.wait_for_field(id, "JobState", "COMPLETED")
    assert "resuming from" in pod.out()
    check_against_reference(tmp_path, store_path, 40)


def test_hardware_fault_retries_the_step_without_the_local_disk(
    pod: HyperPod, tmp_path: Path, store_path: Path
) -> None:
    """The node keeps its name and loses its part of the local checkpoint."""
    local = ("--checkpoint.local_dir", str(tmp_path / "disk"), "--checkpoint.local_interval", "1")
    id = pod.start("--train.steps", "40", *local)
    pod.wait_for_step(14)
    assert list((tmp_path / "disks" / "n1").glob("*/*/rank-*.json"))
    pod.plant_fault("retry", "n1")
    pod.cluster.kill_tasks("n1")
    wait_until(lambda: "auto-resume: replaced n1, retry" in pod.out(), "the retry", 300)
    pod.finish_soon()
    pod.wait_for_field(id, "JobState", "COMPLETED")
    assert pod.field(id, "Restarts") == "0"
    out = pod.out()
    assert "resuming from" in out
    assert re.search(r"disk/\w+/000001-000000\d\d: .* is missing or incomplete; trying the ch", out)
    check_against_reference(tmp_path, store_path, 40)


def test_lost_launcher_is_requeued_by_weft(pod: HyperPod, tmp_path: Path, store_path: Path) -> None:
    """The hardware is healthy, so auto-resume does nothing after a segmentation fault."""
    id = pod.start("--train.steps", "40")
    pod.wait_for_step(13)
    pod.cluster.kill_tasks("n1", signal.SIGSEGV)
    pod.wait_for_field(id, "Restarts", "1")
    pod.finish_soon()
    pod.wait_for_field(id, "JobState", "COMPLETED")
    out = pod.out()
    assert "auto-resume: NONE" in out
    assert re.search(r"weft: exit status 1(39|37): requeuing job", out)
    assert "resuming from" in out
    check_against_reference(tmp_path, store_path, 40)


def test_crash_that_outlasts_the_restarts_is_requeued_by_weft(
    pod: HyperPod, tmp_path: Path, store_path: Path
) -> None:
    (tmp_path / "crashing.py").write_text(CRASH)
    (tmp_path / "crash").touch()
    pod.finish_soon()
    id = pod.start("--train.steps", "20", *CRASHES)
    pod.wait_for_field(id, "Restarts", "1")
    (tmp_path / "crash").unlink()
    pod.wait_for_field(id, "JobState", "COMPLETED")
    out = pod.out()
    # The node of the killed rank; the other one sees broken connections.
    assert "not restarted: resilience.max_restarts_per_hour=1 restarts are used up" in out
    assert out.count("weft: exit status 1: requeuing job") == 1
    check_against_reference(tmp_path, store_path, 20)


# --------------------------------------------------------------------------- without training


def test_crash_loop_without_progress_ends(pod: HyperPod) -> None:
    id = pod.start_program("echo 20 >run/requeue/step; kill -SEGV $$")
    pod.wait_for_field(id, "JobState", "FAILED")
    assert (pod.field(id, "ExitCode"), pod.field(id, "Restarts")) == ("139:0", "2")
    out = pod.out()
    assert out.count("auto-resume: NONE") == 3
    assert "weft: exit status 139 after 3 failed starts from step 20: the job ends" in out


def test_failures_with_progress_are_requeued(pod: HyperPod) -> None:
    count = "n=$((10 * ${SLURM_RESTART_COUNT:-0})); echo $n >run/requeue/step"
    id = pod.start_program(f"{count}; [ $n -eq 40 ]")
    pod.wait_for_field(id, "JobState", "COMPLETED")
    assert pod.field(id, "Restarts") == "4"


@pytest.mark.parametrize(
    ("program", "status"),
    [("exit 2", 2), ("touch run/requeue/final-failure; exit 1", 1), ("exec no-such-command", 127)],
)
def test_failure_that_recurs_ends_the_job(program: str, status: int, pod: HyperPod) -> None:
    id = pod.start_program(program)
    pod.wait_for_field(id, "JobState", "FAILED")
    assert (pod.field(id, "ExitCode"), pod.field(id, "Restarts")) == (f"{status}:0", "0")
    assert "auto-resume: NONE" in pod.out()


def test_hardware_fault_does_not_count_as_a_failed_start(pod: HyperPod) -> None:
    first = "[ ${SLURM_RESTART_COUNT:-0} -eq 0 ] || exit 0"
    fault = "[ $SLURM_PROCID -eq 1 ] || { echo requeue n0 >fault; kill -KILL $$; }"
    id = pod.start_program(f"{first}; {fault}; sleep 300")
    pod.wait_for_field(id, "JobState", "COMPLETED")
    assert (pod.field(id, "NodeList"), pod.field(id, "Restarts")) == ("n[1-2]", "1")
    assert (pod.run / "requeue" / "starts").read_text() == "1 0 \n"
    assert "requeuing" not in pod.out()


def test_step_sees_the_first_node_and_the_restarts(pod: HyperPod) -> None:
    """The rendezvous of each start has its own endpoint."""
    endpoint = (
        "python -c 'import os; from weft.preparation.environment import detect_environment as d; "
    )
    endpoint += 'print("endpoint", d(os.environ).rendezvous)\''
    fault = "[ $SLURM_PROCID -eq 1 ] || { echo requeue n0 >fault; kill -KILL $$; }"
    endpoint = endpoint.replace("python", sys.executable)
    first = "[ ${SLURM_RESTART_COUNT:-0} -eq 0 ] || exit 0"
    id = pod.start_program(f"{endpoint}; {first}; {fault}; sleep 300")
    pod.wait_for_field(id, "JobState", "COMPLETED")
    ports = {10_000 + int(id), 10_000 + int(id) + 331}
    found = set(re.findall(r"endpoint (\S+)", pod.out()))
    assert found == {f"n0:{min(ports)}", f"n1:{max(ports)}"}


def test_other_cluster_gets_no_option(pod: HyperPod) -> None:
    """The node has no directory of HyperPod, although srun would accept the option."""
    (pod.directory / "sagemaker_cluster").rmdir()
    id = pod.start_program("exit 3")
    pod.wait_for_field(id, "JobState", "FAILED")
    assert pod.field(id, "Restarts") == "2"
    assert "auto-resume" not in pod.out()
