"""The batch script on HyperPod and elsewhere, run by bash with fake Slurm commands."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.submission.requests import format_errors, request
from weft.submission import hyperpod, slurm
from weft.submission.launch_warnings import find_warnings
from weft.supervision.launcher import Failure
from weft.supervision.requeue import REQUEUE_DIR, record_final_failure, record_start
from weft.supervision.start import explain_failure

# A job step that exits with $STATUS.  weft records the step of the checkpoint, and a final failure.
FAKES = """\
scontrol() { echo "scontrol $*"; }
srun() {
    while [[ $1 == --* ]]; do echo "$1"; shift; done
    [ -z "$STEP" ] || echo "$STEP" >"$requeue/step"
    [ -z "$FINAL" ] || touch "$requeue/final-failure"
    return $STATUS
}
"""


class Script:
    """Runs a batch script again and again, as a requeued job does."""

    def __init__(self, run_dir: Path, *overrides: tuple[str, str]) -> None:
        requested = request(("run.device", "cpu"), *overrides, nodes=(2, 2))
        self.text = slurm.render(requested).replace("/fsx/small-run", str(run_dir))
        self.restarts = 0

    def run(self, status: int, step: str = "", final: str = "") -> list[str]:
        variables = {"STATUS": str(status), "STEP": step, "FINAL": final, "SLURM_JOB_ID": "7"}
        if self.restarts:
            variables["SLURM_RESTART_COUNT"] = str(self.restarts)
        self.restarts += 1
        completed = subprocess.run(
            ["/bin/bash"],
            input=FAKES + self.text,
            env={"PATH": "/usr/bin:/bin"} | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (completed.returncode, completed.stderr) == (status, "")
        return completed.stdout.splitlines()

    def is_requeued(self, status: int, step: str = "", final: str = "") -> bool:
        return "scontrol requeue 7" in self.run(status, step, final)


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path / "run")


@pytest.mark.parametrize(
    ("status", "requeued"),
    [
        *((status, False) for status in (0, 2, 126, 127, 130)),
        *((status, True) for status in (1, 3, 69, 75, 137, 139, 143)),
    ],
)
def test_script_first_start_requeues_by_status(status: int, requeued: bool, script: Script) -> None:
    assert script.is_requeued(status, "0") == requeued


def test_script_failures_without_progress_end_the_job(script: Script) -> None:
    requeued = [script.is_requeued(139, step) for step in ("0", "20", "20", "40", "40")]
    assert requeued == [True] * 5
    last = script.run(139, "40")
    assert not any("requeue" in line for line in last)
    assert "weft: exit status 139 after 3 failed starts from step 40: the job ends" in last


def test_script_that_never_starts_weft_ends_the_job(script: Script) -> None:
    assert [script.is_requeued(1) for _ in range(3)] == [True, True, False]


def test_script_of_an_earlier_job_does_not_count(script: Script) -> None:
    assert [script.is_requeued(1, "20") for _ in range(3)] == [True, True, False]
    script.restarts = 0
    assert script.is_requeued(1, "20")


def test_script_stops_without_progress_end_the_job_later(script: Script) -> None:
    assert [script.is_requeued(75, "0") for _ in range(10)] == [True] * 9 + [False]


def test_script_stops_do_not_count_as_failures(script: Script) -> None:
    """Two unhealthy nodes, then failures; all without progress."""
    assert [script.is_requeued(status, "20") for status in (69, 69, 1, 75, 1)] == [True] * 5
    assert "weft: exit status 1 after 3 failed starts from step 20: the job ends" in script.run(1)


def test_script_final_failure_ends_the_job(script: Script, tmp_path: Path) -> None:
    assert not script.is_requeued(1, "20", final="x")
    # The next job starts without the record of the first.
    script.restarts = 0
    assert script.is_requeued(1)


def test_script_without_restarts_requeues_only_stops(tmp_path: Path) -> None:
    script = Script(tmp_path / "run", ("resilience.max_restarts_per_hour", "0"))
    assert not script.is_requeued(1, "0")
    assert not script.is_requeued(139, "0")
    assert script.is_requeued(75, "0")


def test_script_in_a_full_directory_counts_the_restarts(script: Script, tmp_path: Path) -> None:
    """The directory cannot be written: a file is in its place."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "requeue").touch()
    script.text = script.text.replace('mkdir -p "$requeue"', "false").replace(
        '>"$requeue/starts"', '2>/dev/null >"$requeue/starts"'
    )
    assert [script.is_requeued(1) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize(
    "text",
    ["$(touch${IFS}pwned) 1 20", "1 a[$(touch${IFS}pwned)] 20", "x 20", "08 08 20", "", "x\ny"],
)
def test_script_with_a_damaged_count_runs_nothing(
    text: str, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "run" / REQUEUE_DIR
    directory.mkdir(parents=True)
    (directory / "starts").write_text(text)
    script.restarts = 1
    assert script.is_requeued(1, "20") == (text != "08 08 20")
    assert not (tmp_path / "pwned").exists()


def test_script_passes_auto_resume_on_hyperpod_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node that runs the script decides, not the host that submits it."""
    monkeypatch.setattr(hyperpod, "HYPERPOD_DIR", tmp_path / "it's sagemaker_cluster")
    script = Script(tmp_path / "run")
    assert "--auto-resume=1" not in script.run(0)
    hyperpod.HYPERPOD_DIR.mkdir()
    assert script.run(0).count("--auto-resume=1") == 1
    assert "#SBATCH --open-mode=append\n" in script.text
    assert "#SBATCH --requeue\n" in script.text
    assert not re.search("#SBATCH.*auto-resume", script.text)


def test_script_on_hyperpod_prints_the_command_that_replaces_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hyperpod, "HYPERPOD_DIR", tmp_path / "sagemaker_cluster")
    command = 'weft: to replace: scontrol update node=ip-1 state=fail reason="Action:Replace"'
    (tmp_path / "run" / "unhealthy-nodes").mkdir(parents=True)
    (tmp_path / "run" / "unhealthy-nodes" / "ip-1").touch()
    script = Script(tmp_path / "run", ("resilience.preflight", "true"))
    assert command not in script.run(69)
    hyperpod.HYPERPOD_DIR.mkdir()
    output = script.run(69)
    assert command in output
    assert output[-2:] == ["scontrol requeue 7", "scontrol update JobId=7 ExcNodeList=ip-1"]


# --------------------------------------------------------------------------- records of weft


def test_record_without_a_batch_script_writes_nothing(tmp_path: Path) -> None:
    record_start(tmp_path, 20)
    record_final_failure(tmp_path, "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("transient", [True, False])
def test_failure_that_recurs_is_recorded(transient: bool, tmp_path: Path) -> None:
    directory = tmp_path / REQUEUE_DIR
    directory.mkdir()
    record_final_failure(tmp_path, "of an earlier start")
    record_start(tmp_path, 20)
    assert (directory / "step").read_text() == "20\n"
    failure = Failure(1, "ValueError", "bad", "", tmp_path / "log", transient=transient)
    explain_failure(failure, tmp_path / "checkpoints", tmp_path)
    final = directory / "final-failure"
    assert (final.read_text() if final.exists() else "") == (
        "" if transient else "rank 1 failed: ValueError: bad\n"
    )


# --------------------------------------------------------------------------- paths, intervals


@pytest.mark.parametrize("is_hyperpod", [True, False])
def test_volatile_directories_are_refused_on_hyperpod(
    is_hyperpod: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hyperpod, "HYPERPOD_DIR", tmp_path / "sagemaker_cluster")
    if is_hyperpod:
        hyperpod.HYPERPOD_DIR.mkdir()

    def errors(*overrides: tuple[str, str]) -> str:
        return format_errors(slurm.find_errors(request(("run.device", "cpu"), *overrides)))

    message = errors(("checkpoint.dir", "/opt/dlami/nvme/a/run-7"))
    assert message == is_hyperpod * (
        'checkpoint.dir="/opt/dlami/nvme/a/run-7" is on the node\'s own NVMe disks '
        "(/opt/dlami/nvme), which HyperPod deletes with a replaced node. Use a directory on a "
        "shared file system, such as /fsx/run-7."
    )
    (tmp_path / "shared").symlink_to("/dev/shm")
    message = errors(("checkpoint.dir", f"{tmp_path}/shared/a"))
    assert ("is on the node's memory (/dev/shm)" in message) == is_hyperpod
    for path in ("/fsx/a", "s3://bucket/tmp", "/opt/sagemaker_cluster/a", "/tmpfs/a", "auto"):
        assert errors(("checkpoint.dir", path)) == ""


def test_volatile_run_directory_is_refused_on_hyperpod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hyperpod, "HYPERPOD_DIR", tmp_path)
    (error,) = slurm.find_errors(replace(request(), run_dir=Path("/tmp/run")))
    assert str(error).startswith('run.dir="/tmp/run" is on the node\'s root volume')
    nameless = replace(request(), name="", run_dir=Path())
    monkeypatch.chdir(tmp_path)
    assert list(slurm.find_errors(nameless)) == []


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        ({}, ""),
        ({"checkpoint.interval": "100000"}, ""),
        ({"checkpoint.local_dir": "/dev/shm/a"}, ""),
        ({"checkpoint.local_dir": "/dev/shm/a", "checkpoint.interval": "999"}, ""),
        ({"checkpoint.local_dir": "/dev/shm/a", "checkpoint.interval": "auto"}, ""),
        ({"checkpoint.local_dir": "/dev/shm/a", "checkpoint.interval": "1000"}, "up to 1,000 step"),
        ({"checkpoint.local_dir": "/dev/shm/a", "checkpoint.interval": "0"}, "all steps"),
    ],
)
def test_rare_shared_checkpoints_are_reported(overrides: dict[str, str], warning: str) -> None:
    messages = list(find_warnings(request(*overrides.items())))
    assert bool(messages) == bool(warning)
    assert warning in "".join(messages)
    replicas = request(*overrides.items(), ("parallel.dp_replicate", "2"))
    assert list(find_warnings(replicas)) == []


def test_short_time_limit_is_reported_on_hyperpod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = request(("launch.time_limit", "01:59:59")), request()
    assert list(hyperpod.find_warnings(short)) == []
    monkeypatch.setattr(hyperpod, "HYPERPOD_DIR", tmp_path)
    assert list(hyperpod.find_warnings(long)) == []
    (warning,) = hyperpod.find_warnings(short)
    assert "launch.time_limit=01:59:59 is short for HyperPod" in warning
