"""`weft doctor` and the preflight check: one machine, several and unhealthy nodes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import fake_nvml, s3
from tests.commands import ONE_RANK, WEFT, run_joined, run_weft
from tests.doctor.test_node_checks import STATE
from tests.supervision.test_rendezvous import free_port
from weft.cli.main import main
from weft.config.exit_statuses import UNHEALTHY, USAGE_ERROR
from weft.config.reader import read_job
from weft.doctor.device_benchmark import measure_devices
from weft.doctor.doctor import (
    UNHEALTHY_NODES_DIR,
    collect_job_facts,
    count_visible_gpus,
    job_directories,
)
from weft.doctor.node_facts import Facts
from weft.doctor.probes import probe_directory, probe_endpoint, run_tool, supports_locks
from weft.estimate.device_speed import time_cpu_burst
from weft.records.run_reader import read_event_log

pytestmark = pytest.mark.timeout(300, method="signal")

FAILS_ONCE = '[{kind = "kill", rank = 1, passing = 5}]'


def run(arguments: list[str], directory: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        arguments,
        cwd=directory,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


@pytest.fixture
def one_core() -> Iterator[None]:
    """Use one core for child processes: on a CPU one process is measured."""
    usual = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usual)})
    yield
    os.sched_setaffinity(0, usual)


@pytest.mark.system
def test_doctor_healthy_machine_shows_a_screen_and_leaves_no_files(
    one_core: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--run.dir", "run"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for name in ("versions", "devices", "speed", "variables", "memory", "cores", "run.dir"):
        assert re.search(rf"^(ok|note|warning) +{re.escape(name)}", out, re.MULTILINE), name
    assert "bad" not in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.system
def test_doctor_json_has_findings_and_facts(
    one_core: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nowhere")
    monkeypatch.setenv("SECRET_KEY", "x")
    assert main(["doctor", "--json", "--checkpoint.local_dir", "local"]) == 1
    out = capsys.readouterr().out
    report = json.loads(out)
    assert report["bad"] == 1
    (bad,) = (finding for finding in report["findings"] if finding["severity"] == "bad")
    assert (bad["check"], "nowhere" in bad["observation"], bad["remedy"] != "") == (
        "variables",
        True,
        True,
    )
    assert [directory["key"] for directory in report["facts"]["directories"]] == [
        "run.dir",
        "checkpoint.local_dir",
    ]
    assert "SECRET_KEY" not in out
    result = report["facts"]["measured"]  # measured by one process
    assert (result["error"], result["busbw"], result["same"]) == ("", 0.0, [True])
    assert result["right"] is True
    assert result["flops"][0] > 1e8
    assert 0 < result["cpu_share"][0] <= 1


def test_doctor_several_mistakes_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--run.nodse", "2", "--resilience.preflight", "maybe"]) == USAGE_ERROR
    output = capsys.readouterr().err
    assert "2 problems" in output
    assert "'run.nodes'" in output
    assert main(["doctor", "--nodes", "many"]) == USAGE_ERROR
    assert "neither a number of nodes nor MIN:MAX" in capsys.readouterr().err


@pytest.mark.slow
def test_doctor_of_two_nodes_compares_clocks_and_versions(tmp_path: Path) -> None:
    rendezvous = ["--nodes", "2", "--rendezvous", f"localhost:{free_port()}", "--json"]
    both = [
        finish(node) for node in [run([*WEFT, "doctor", *rendezvous], tmp_path) for _ in range(2)]
    ]
    for status, out, err in both:
        assert status == 0, out + err
        report = json.loads(out)
        assert len(report["facts"]["joined_nodes"]) == 2
        (nodes,) = (finding for finding in report["findings"] if finding["check"] == "nodes")
        match = re.search(r"differ by ([\d.]+) ms", nodes["observation"])
        assert match
        assert float(match[1]) < 500


# --------------------------------------------------------------------------- measuring


@pytest.mark.system
def test_measure_failed_or_hanging_process_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    result = measure_devices("cuda", 1, 1, False, 60)  # this machine has no GPU
    assert result.device == "cuda"
    assert result.error.startswith("process 0: ")
    start_time = time.monotonic()
    assert measure_devices("cpu", 2, 1, False, 0.05).error == "no result within 0 s: process 0, 1"
    assert time.monotonic() - start_time < 20


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="binds processes to a core")
def test_best_burst_on_a_shared_core_detects_its_competitors() -> None:
    """Real competitors share one core, and the fastest call is measured."""
    usual = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usual)})
    competitors = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    durations = []

    def spin() -> None:
        start_time, until = time.perf_counter(), time.thread_time() + 0.01
        while time.thread_time() < until:
            pass
        durations.append(time.perf_counter() - start_time)

    try:
        seconds, share = time_cpu_burst(spin, 1, 0.5)
    finally:
        for other in competitors:
            other.kill()
            other.wait()
        os.sched_setaffinity(0, usual)
    assert share < 0.5
    assert seconds == pytest.approx(min(durations[2:]), rel=0.1)


# --------------------------------------------------------------------------- storage


def test_probe_directory_missing_path_is_measured_and_not_created(tmp_path: Path) -> None:
    result = probe_directory("run.dir", tmp_path / "a" / "b", 1 << 20)
    assert (result.error, result.locks, result.links) == ("", True, True)
    assert result.write > 0
    assert result.read > 0
    assert list(tmp_path.iterdir()) == []
    assert "cannot be written" in probe_directory("run.dir", Path("/proc/nothing"), 1 << 20).error
    assert probe_directory("run.dir", tmp_path / ("x" * 300), 1 << 20).error == ""  # no exception


def test_locks_without_effect_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system grants every lock, or supports no locks."""
    file = tmp_path / "file"
    file.touch()
    assert supports_locks(file)
    monkeypatch.setattr("fcntl.flock", lambda file, mode: None)
    assert not supports_locks(file)

    def refuse(file: Any, mode: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert not supports_locks(file)


def test_job_directories_are_the_local_paths_of_keys() -> None:
    inputs = [
        ("run.dir", "/x"),
        ("checkpoint.dir", "s3://b/p"),
        ("checkpoint.local_dir", "/dev/shm/y"),
    ]
    job, _, _ = read_job("demo", inputs)
    assert job_directories(job) == [
        ("run.dir", Path("/x")),
        ("checkpoint.local_dir", Path("/dev/shm/y")),
    ]


def test_probe_endpoint_free_unknown_and_malformed_are_distinguished() -> None:
    assert probe_endpoint(f"localhost:{free_port()}") == "free"
    assert "known" in probe_endpoint("no-such-host.invalid:29400")
    assert "invalid literal" in probe_endpoint("localhost:port")


@pytest.mark.system
def test_gather_endpoint_of_another_server_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server accepts every connection and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        assert probe_endpoint(endpoint) == "answers"
        monkeypatch.setattr(
            "weft.doctor.doctor.WAIT_SECONDS", 0.0
        )  # do not wait to measure devices
        job, _, _ = read_job("demo", [("run.nodes", "2"), ("run.rendezvous", endpoint)])
        facts = collect_job_facts(job)
        assert (facts.rendezvous_status, facts.joined_nodes) == (
            "no weft launcher answers there",
            (),
        )
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 8), ("0,3", 2), ("GPU-6968dfc2,MIG-1", 2), ("", 0), ("NoDevFiles", 0), ("1,-1,2", 1)],
)
def test_visible_gpus_follow_cuda_visible_devices(
    visible: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_visible_gpus(Facts(gpu_state=STATE)) == count
    assert count_visible_gpus(Facts()) == 0


@pytest.mark.system
def test_run_tool_invalid_utf8_is_replaced() -> None:
    assert run_tool("printf", r"\377 NVRM: Xid") == "\ufffd NVRM: Xid"
    assert run_tool("no-such-tool") == run_tool("false") == ""


@pytest.mark.slow
@pytest.mark.skipif(bool(s3.missing()), reason=f"needs {s3.missing()}: see tests/s3.py")
def test_probe_store_measures_and_leaves_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3.server() as port:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.SECRET)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        # In a separate process: the client starts threads, after which no test may fork.
        script = (
            "import sys; from weft.config.storage import open_directory\n"
            "from weft.doctor.probes import probe_store\n"
            "place = open_directory('s3://bucket'); place.fs.mkdir('bucket')\n"
            "found = probe_store('checkpoint.dir', 's3://bucket/run', 8 << 20)\n"
            "assert not found.error and found.once and found.write > 0 and found.read > 0, found\n"
            "assert place.fs.find('bucket') == [], place.fs.find('bucket')\n"
            "found = probe_store('checkpoint.dir', 's3://nowhere/run', 8 << 20)\n"
            "assert 'NoSuchBucket' in found.error, found\n"
        )
        completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert completed.returncode == 0, completed.stderr


# --------------------------------------------------------------------------- before a run


@pytest.mark.slow
@pytest.mark.system
def test_preflight_fit_node_trains(arguments: list[str], tmp_path: Path) -> None:
    command = [*arguments, *ONE_RANK, "--train.steps", "2", "--resilience.preflight", "true"]
    earlier = tmp_path / "run" / UNHEALTHY_NODES_DIR / "n7"
    earlier.parent.mkdir(parents=True)
    earlier.touch()  # the node was unhealthy in an earlier start
    statuses, out = run_joined(command, tmp_path, 1, SLURMD_NODENAME="n7")
    assert statuses == [0], out
    assert "checked node" in out
    (log,) = (tmp_path / "run" / "logs").glob("doctor-*.json")
    checks = {finding["check"] for finding in json.loads(log.read_text())["findings"]}
    assert checks >= {"versions", "devices", "speed", "variables", "memory", "limits"}
    assert list((tmp_path / "run" / UNHEALTHY_NODES_DIR).iterdir()) == []


@pytest.mark.system
@pytest.mark.parametrize("launcher", ["weft", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_preflight_unhealthy_node_starts_no_ranks(
    launcher: str, arguments: list[str], tmp_path: Path
) -> None:
    command = [*arguments, "--resilience.preflight", "true"]
    if launcher == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, "--nproc-per-node", "2", "-m", *arguments[2:], *command[-2:]]
    unhealthy = {"NCCL_SOCKET_IFNAME": "nowhere", "SLURMD_NODENAME": "n7"}
    if launcher == "weft":
        completed = run_weft(command, tmp_path, cores=1, **unhealthy)
        status, out, err = completed.returncode, completed.stdout, completed.stderr
    else:
        status, out, err = finish(run(command, tmp_path, **unhealthy))
    assert status == (UNHEALTHY if launcher == "weft" else 1), out + err
    assert f"is unhealthy and does not train (exit status {UNHEALTHY})" in out
    assert "NCCL_SOCKET_IFNAME=nowhere" in out
    assert "this node is unhealthy and does not train" in err or launcher == "weft"
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert "nowhere" in (tmp_path / "run" / UNHEALTHY_NODES_DIR / "n7").read_text()
    (event,), _ = read_event_log(tmp_path / "run")
    assert event["kind"] == "unhealthy node"
    assert "NCCL_SOCKET_IFNAME=nowhere" in event["text"]


@pytest.mark.slow
def test_preflight_other_nodes_train_without_an_unhealthy_one(
    arguments: list[str], tmp_path: Path
) -> None:
    rendezvous = ["--nodes", "1:2", "--rendezvous", f"localhost:{free_port()}"]
    command = [*arguments, "--train.steps", "4", "--run.nproc_per_node", "1", *rendezvous]
    command += ["--resilience.preflight", "true"]
    unhealthy = run(command, tmp_path, NCCL_SOCKET_IFNAME="nowhere", SLURMD_NODENAME="n1")
    fit = run(command, tmp_path, SLURMD_NODENAME="n0")
    status, out, err = finish(unhealthy)
    assert status == UNHEALTHY, out + err
    status, out, err = finish(fit)
    assert status == 0, out + err
    assert "training on 1 node" in out
    assert [path.name for path in (tmp_path / "run" / UNHEALTHY_NODES_DIR).iterdir()] == ["n1"]


@pytest.mark.slow
def test_preflight_node_that_became_unhealthy_does_not_restart(
    arguments: list[str], tmp_path: Path, nvml_dir: Path
) -> None:
    """A GPU that no rank uses has memory errors from some time after the first check."""
    extra = ["--run.device", "cpu", "--resilience.preflight", "true"]
    command = [*arguments, *extra, "--resilience.faults", FAILS_ONCE]
    process = run(command, tmp_path, **fake_nvml.environment(nvml_dir, "count 1\n"))
    assert process.stdout is not None
    checked = next(line for line in process.stdout if "checked node" in line)
    assert "bad" not in checked
    fake_nvml.environment(nvml_dir, "count 1\necc.0 1\n")
    status, out, err = finish(process)
    assert status == UNHEALTHY, out + err
    assert "rank 1 failed: SIGKILL" in err
    assert "GPU 0: 1 uncorrected memory errors" in out
