"""`weft launch` on a real Slurm of two virtual nodes, on CPU."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import slurm
from tests.commands import check_against_reference
from tests.slurm import Slurm, wait_until
from tests.submission.slurm_jobs import Launcher
from weft.checkpoint.manifest import checkpoint_step, list_checkpoints

pytestmark = [
    pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing() or "-"),
    pytest.mark.timeout(1200, method="signal"),  # so that fixtures tidy up
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    with slurm.cluster() as created:
        yield created


@pytest.fixture
def launcher(cluster: Slurm, tmp_path: Path, store_path: Path) -> Iterator[Launcher]:
    created = Launcher(cluster, tmp_path, store_path)
    yield created
    cluster.run("scancel", "--user=root")
    wait_until(cluster.free, "that the nodes are free")


@pytest.mark.slow
def test_slurm_two_nodes_train(launcher: Launcher, tmp_path: Path, store_path: Path) -> None:
    launcher.finish_soon()
    out = launcher.launch("--nodes", "2", "--launch.options", "comment=it's here,nice=1")
    number = re.search(r"slurm job (\d+)", out)
    assert number is not None
    assert "#SBATCH --nodes=2\n" in out
    assert "Comment=it's here" in launcher.cluster.run("scontrol", "show", "job", number[1])
    # A second job in the same directory is refused.
    second_run = launcher.launch("--nodes", "2", status=2)
    assert f"already has an active job {number[1]} (slurm)" in second_run
    followed = launcher.weft("job", "logs", "run", "--follow")
    assert followed.count("training on 2 nodes") == 1  # only the first node logs
    assert "2 CPU ranks (dp_shard 2)" in followed
    assert f"job {number[1]}: ended: completed" in launcher.wait_for_status("ended")
    assert launcher.weft("job", "logs", "run") == followed
    assert "has ended already" in launcher.weft("job", "cancel", "run")
    check_against_reference(tmp_path, store_path, 20)


@pytest.mark.slow
def test_slurm_ranks_started_by_srun_train(
    launcher: Launcher, tmp_path: Path, store_path: Path
) -> None:
    """srun starts a task for each device; weft joins them and starts no processes."""
    launcher.finish_soon()
    words = ["weft", "train", "demo", *launcher.words]
    for key in ("--run.nproc_per_node", "--launch.time_limit"):
        at = words.index(key)
        del words[at : at + 2]
    srun = ["srun", "-N2", "--ntasks-per-node=2", "--overcommit"]
    completed = subprocess.run(
        [*srun, *words],
        cwd=tmp_path,
        env=launcher.environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "4 CPU ranks (dp_replicate 4)" in completed.stdout
    check_against_reference(tmp_path, store_path, 20)


@pytest.mark.slow
def test_slurm_stop_saves_and_is_not_requeued(launcher: Launcher) -> None:
    launcher.launch("--nodes", "2", "--train.steps", "400")
    launcher.wait_for_step(12)
    assert "running on n[0-1]" in launcher.status()
    assert "to save a checkpoint and end" in launcher.weft("job", "cancel", "run")
    assert "ended: saved a checkpoint and stopped" in launcher.wait_for_status("ended")
    saved = checkpoint_step(list_checkpoints(launcher.run / "checkpoints")[-1])
    assert 12 <= saved == launcher.step() < 400
    time.sleep(10)
    assert "ended" in launcher.status()


@pytest.mark.slow
def test_slurm_stop_before_the_ranks_ends_the_job(launcher: Launcher) -> None:
    """The script runs, but no job step exists yet to get the signal."""
    slow = ["--launch.setup", '["sleep 15"]']
    launcher.launch("--nodes", "1", *slow)
    launcher.wait_for_status("running on")
    assert "to save a checkpoint and end" in launcher.weft("job", "cancel", "run")
    launcher.wait_for_status("ended")
    time.sleep(5)
    assert "ended" in launcher.status()
    assert not list(launcher.run.glob("checkpoints/*"))


@pytest.mark.slow
def test_slurm_unhealthy_node_is_excluded(
    launcher: Launcher, tmp_path: Path, store_path: Path
) -> None:
    """The job starts on n0, which is unhealthy, is requeued and trains on n1."""
    unhealthy = '[ "$SLURMD_NODENAME" != n0 ] || export NCCL_SOCKET_IFNAME=nowhere'
    launcher.finish_soon()
    preflight = ["--resilience.preflight", "true", "--launch.setup", json.dumps([unhealthy])]
    launcher.launch("--nodes", "1", *preflight)
    assert "ended: completed" in launcher.wait_for_status("ended")
    assert "does not train (exit status 69)" in launcher.out()
    assert launcher.out().count("checked node") == 1
    assert [path.name for path in (launcher.run / "unhealthy-nodes").iterdir()] == ["n0"]
    number = re.search(r"job (\d+)", launcher.status())
    assert number is not None
    report = launcher.cluster.run("scontrol", "show", "job", number[1], "--oneliner")
    assert "ExcNodeList=n0 " in report
    assert " NodeList=n1 " in report
    check_against_reference(tmp_path, store_path, 20)


@pytest.mark.slow
def test_slurm_file_excludes_an_unhealthy_node_for_later_jobs(
    launcher: Launcher, tmp_path: Path
) -> None:
    """The first run finds n0 unhealthy; the second one, which has no check, does not use it."""
    unhealthy = '[ "$SLURMD_NODENAME" != n0 ] || export NCCL_SOCKET_IFNAME=nowhere'
    launcher.finish_soon()
    words = ["--nodes", "1", "--launch.exclude", '["@bad-nodes"]']
    check = ["--resilience.preflight", "true", "--launch.setup", json.dumps([unhealthy])]
    assert "the file bad-nodes does not exist on this host" in launcher.launch(*words, *check)
    assert "ended: completed" in launcher.wait_for_status("ended")
    assert re.fullmatch(
        r"n0 # \d{4}-\d\d-\d\d, run: variables: .*\n", (tmp_path / "bad-nodes").read_text()
    )
    (tmp_path / "run").rename(tmp_path / "first")
    assert "#SBATCH --exclude=n0\n" in launcher.launch(*words)
    assert "ended: completed" in launcher.wait_for_status("ended")
    number = re.search(r"job (\d+)", launcher.status())
    assert number is not None
    shown = launcher.cluster.run("scontrol", "show", "job", number[1], "--oneliner")
    assert (" NodeList=n1 " in shown, " Restarts=0 " in shown) == (True, True)
    # The file has gained a node after the submission.
    (tmp_path / "run").rename(tmp_path / "second")
    (tmp_path / "bad-nodes").write_text("")
    launcher.launch(*words, "--launch.options.begin", "now+5")
    (tmp_path / "bad-nodes").write_text("n0\n")
    assert "ended: completed" in launcher.wait_for_status("ended")
    assert "weft: not used: n0" in launcher.out()
    assert "restarted 1 time" not in launcher.status()  # ended
    number = re.search(r"job (\d+)", launcher.status())
    assert number is not None
    shown = launcher.cluster.run("scontrol", "show", "job", number[1], "--oneliner")
    assert (" NodeList=n1 " in shown, " Restarts=1 " in shown) == (True, True)


@pytest.mark.slow
def test_slurm_requests_of_the_keys(launcher: Launcher) -> None:
    """The real sbatch; each refusal has a remedy."""
    gpus = ["launch", "demo", "--on", "slurm", "--run.cluster", "1x1xH100", "--dry-run"]
    out = launcher.weft(*gpus, status=2)
    assert "Invalid generic resource (gres) specification" in out
    assert "give --launch.options.gres none." in out
    assert "--gpus-per-node" not in launcher.weft(*gpus, "--launch.options.gres", "none")
    cpu = ["launch", "demo", "--on", "slurm", "--run.device", "cpu", "--dry-run"]
    accepted = {
        "topology": "1@00:10:00",
        "queue": "main",
        "priority": "normal",
        "cpus": "2",
        "memory": "1",
        "exclude": "n0",
    }
    launcher.weft(*cpu, *(w for key, each in accepted.items() for w in (f"--launch.{key}", each)))
    refused = {
        "queue": ("x", "Use another launch.queue"),
        "reservation": ("x", "Use another launch.reservation"),
        "exclude": ("x", "Remove the name from launch.exclude"),
        "cpus": ("99", "Compare run.nodes, launch.cpus, launch.memory and launch.exclude"),
        "memory": ("99999", "Compare run.nodes, launch.cpus, launch.memory and launch.exclude"),
        "options": ("constraint=x", "Use another launch.options.constraint"),
    }
    for key, (value, remedy) in refused.items():
        assert remedy in launcher.weft(*cpu, f"--launch.{key}", value, status=2)
    unknown = launcher.weft(*cpu, "--launch.options.foo", "1", status=2)
    assert "unrecognized option" in unknown
    assert "Remove it from launch.options." in unknown


@pytest.mark.slow
def test_slurm_pending_job_is_cancelled(launcher: Launcher) -> None:
    launcher.launch("--nodes", "2", "--launch.options", "begin=now+1hour")
    assert "waiting: pending, BeginTime" in launcher.status()
    assert "has printed nothing" in launcher.weft("job", "logs", "run", status=1)
    assert "from the queue" in launcher.weft("job", "cancel", "run")
    assert "ended: cancelled" in launcher.status()


@pytest.mark.slow
def test_slurm_preempted_job_is_requeued_and_resumes(
    launcher: Launcher, tmp_path: Path, store_path: Path
) -> None:
    """On the signal before the time limit the job saves, is requeued and resumes."""
    launcher.launch("--nodes", "2", "--train.steps", "60")
    launcher.wait_for_step(12)
    number = re.search(r"job (\d+)", launcher.status())
    assert number is not None
    # Slurm sends this signal minutes before the time limit.
    launcher.cluster.run("scancel", "--signal=TERM", number[1])
    output = launcher.wait_for_status("restarted 1 time")
    assert number[0] in output
    launcher.finish_soon()
    assert "ended: completed" in launcher.wait_for_status("ended")
    assert launcher.out().count("resuming from") == 1  # only the first node logs
    assert "stopped; run the same command to" in launcher.out()
    check_against_reference(tmp_path, store_path, 60)


@pytest.mark.slow
def test_slurm_time_limit_requeues_and_resumes(
    launcher: Launcher, tmp_path: Path, store_path: Path
) -> None:
    """Slurm sends the signal in the last 90 s of two minutes.

    On a busy machine the job may reach the limit more than once.
    """
    launcher.launch("--nodes", "1", "--train.steps", "160", "--launch.time_limit", "00:02:00")
    launcher.wait_for_status("restarted 1 time")
    launcher.finish_soon()
    assert "ended: completed" in launcher.wait_for_status("ended", 400)
    assert "resuming from" in launcher.out()
    check_against_reference(tmp_path, store_path, 160)


@pytest.mark.slow
def test_slurm_mistake_is_not_requeued(launcher: Launcher) -> None:
    launcher.launch("--nodes", "1", "--data.path", "/no/such/file")
    assert "ended: failed, exit status 2" in launcher.wait_for_status("ended")
    assert "/no/such/file" in launcher.weft("job", "logs", "run")


@pytest.mark.slow
def test_slurm_killed_node_of_an_elastic_job_leaves_the_others_training(
    launcher: Launcher, tmp_path: Path, store_path: Path
) -> None:
    """The other node continues; the killed node stays lost, so this test is last."""
    # The rendezvous is on the first node.  Both nodes are this host, so it has to start first.
    setup = ["--launch.setup", '["sleep $((SLURM_NODEID * 15))"]']
    launcher.launch("--nodes", "1:2", "--train.steps", "80", *setup)
    wait_until(lambda: "training on 2 nodes" in launcher.out(), "both nodes", 120)
    launcher.wait_for_step(launcher.step() + 5)
    assert "running on n[0-1]" in launcher.status()
    launcher.cluster.kill("n1")
    step = launcher.step()
    launcher.wait_for_step(step + 15)
    assert "training on 1 node" in launcher.out()
    assert "restarted" not in launcher.status()
    launcher.finish_soon()
    assert "ended: completed" in launcher.wait_for_status("ended")
    check_against_reference(tmp_path, store_path, 80)
