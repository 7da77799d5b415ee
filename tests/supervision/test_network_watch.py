"""The network that NCCL uses is reported in the first steps of a run."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from tests.doctor.test_nccl_log import LOGS, P5, read_log
from weft.supervision.network_watch import (
    THREAD_NAME,
    NetworkWatch,
    enable_nccl_log,
    name_known_failures,
    nccl_log_pattern,
    watch_launched_ranks,
)

HOST = socket.gethostname().partition(".")[0]


def test_nccl_log_goes_to_files_of_the_run(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    enable_nccl_log(tmp_path / "100%", environment)
    assert environment["NCCL_DEBUG"] == "INFO"
    assert environment["NCCL_DEBUG_SUBSYS"] == "INIT,NET"
    assert environment["NCCL_DEBUG_FILE"] == f"{tmp_path}/100%%/logs/nccl-%h-%p.log"
    assert nccl_log_pattern(environment) == f"{tmp_path}/100%/logs/nccl-{HOST}-*.log"


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "NCCL_DEBUG_FILE"])
def test_nccl_log_of_the_user_is_not_changed(name: str, tmp_path: Path) -> None:
    environment = {name: "WARN"}
    enable_nccl_log(tmp_path, environment)
    assert environment == {name: "WARN"}
    assert nccl_log_pattern(environment) == ""


def new_watch(directory: Path, ranks: int = 2) -> tuple[NetworkWatch, list[str]]:
    lines: list[str] = []
    pattern = f"{directory}/nccl-{HOST}-*.log"
    return NetworkWatch(directory, pattern, ranks, lines.append, lines.append), lines


def test_watch_waits_for_all_ranks_and_their_connections(tmp_path: Path) -> None:
    old = tmp_path / f"nccl-{HOST}-1.log"
    old.write_text(read_log("tcp-fallback"))  # of an earlier start
    watch, _ = new_watch(tmp_path)
    assert (watch.read(), watch.judge(P5, True)) == (False, None)
    text = read_log("efa-gpudirect-new")
    start = text[: text.index(" - Init START")]
    (tmp_path / f"nccl-{HOST}-7.log").write_text(start)
    assert (watch.read(), watch.judge(P5, True)) == (True, None)
    (tmp_path / f"nccl-{HOST}-8.log").write_text(start)
    assert (watch.read(), watch.judge(P5, True)) == (True, None)  # not connected
    (tmp_path / f"nccl-{HOST}-8.log").write_text(text)
    assert watch.read()
    assert watch.judge(P5, False) is None  # still connecting
    assert not watch.read()
    finding = watch.judge(P5, True)
    assert finding is not None
    assert (finding.severity, "GPUDirect RDMA (32 devices" in finding.observation) == ("ok", True)


def test_watch_reports_sockets_without_waiting(tmp_path: Path) -> None:
    watch, lines = new_watch(tmp_path)
    (tmp_path / f"nccl-{HOST}-7.log").write_text(read_log("tcp-fallback"))
    watch.read()
    finding = watch.judge(P5, False)
    assert finding is not None
    watch.report(finding, P5)
    (event,) = read_events(tmp_path)
    assert (event["kind"], event["step"]) == ("warning", 0)
    assert lines == [f"warning: {event['text']}"]
    assert f"node {socket.gethostname()}: NCCL uses TCP sockets" in event["text"]
    assert ". The container has no EFA device" in str(event["text"])
    assert "Remedy: request vpc.amazonaws.com/efa" in event["text"]


@pytest.mark.parametrize("name", ["few-devices", "efa-without-gpudirect", "missing-plugin"])
def test_watch_reports_every_incomplete_network(name: str, tmp_path: Path) -> None:
    watch, lines = new_watch(tmp_path, ranks=1)
    (tmp_path / f"nccl-{HOST}-7.log").write_text(read_log(name))
    watch.read()
    finding = watch.judge(P5, True)
    assert finding is not None
    watch.report(finding, P5)
    assert [f"warning: {event['text']}" for event in read_events(tmp_path)] == lines
    assert len(lines) == 1


def test_watch_in_a_thread_reports_once(tmp_path: Path) -> None:
    watch, lines = new_watch(tmp_path, ranks=1)
    with watch.run():
        (tmp_path / f"nccl-{HOST}-7.log").write_text(read_log("efa-gpudirect-old"))
        deadline = time.monotonic() + 30
        while not lines and time.monotonic() < deadline:
            time.sleep(0.05)
    assert lines == [lines[0]]
    assert lines[0].startswith("NCCL uses EFA with GPUDirect RDMA (4 devices, aws-ofi-nccl 1.11.0")
    wait_until_unwatched()
    assert read_events(tmp_path) == []


def test_watch_of_launched_ranks_is_for_the_first_of_several_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"):
        monkeypatch.setenv(name, "")  # restores it after the test
        monkeypatch.delenv(name)
    for name, value in (("WORLD_SIZE", "16"), ("LOCAL_WORLD_SIZE", "8"), ("LOCAL_RANK", "3")):
        monkeypatch.setenv(name, value)
    with watch_launched_ranks(tmp_path, "cuda", print, print):
        assert watching() == 0
        assert os.environ["NCCL_DEBUG_FILE"].startswith(str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    with watch_launched_ranks(tmp_path, "cuda", print, print):
        assert watching() == 1
    wait_until_unwatched()
    monkeypatch.setenv("WORLD_SIZE", "8")  # one node
    with watch_launched_ranks(tmp_path, "cuda", print, print):
        assert watching() == 0


def watching() -> int:
    """Return the number of threads that watch."""
    return sum(thread.name == THREAD_NAME for thread in threading.enumerate())


def wait_until_unwatched() -> None:
    deadline = time.monotonic() + 60
    while watching():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def read_events(run_dir: Path) -> list[dict[str, object]]:
    path = run_dir / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# --------------------------------------------------------------------------- after a failure


def test_failure_message_names_the_known_failure_and_its_remedy(tmp_path: Path) -> None:
    from weft.supervision.launcher import Failure
    from weft.supervision.start import explain_failure

    log = tmp_path / "logs" / "rank-3.log"
    log.parent.mkdir()
    log.write_text(
        "--- 2026-11-27 10:00:00 rank 3 on node, process 7\nLibfabric error: (-12) Cannot allocate "
        "memory\nEFA internal error: (4112) Failure to post internal receive buffers\n"
    )
    failure = Failure(3, "SIGABRT", "the process was killed by a signal", "", log)
    message = str(explain_failure(failure, tmp_path / "checkpoints", tmp_path))
    assert "known failure (memlock): the limit of locked memory is too low for EFA" in message
    assert "-> ulimit -l unlimited" in message
    log.write_text("--- 2026-11-27 10:00:00 rank 3 on node, process 7\nKilled\n")
    assert name_known_failures(log, "OSError: [Errno 12] Cannot allocate memory") == []


# --------------------------------------------------------------------------- a run of two nodes

# A rank that trains with gloo, and writes a recorded log of NCCL in its first step.
STAND_IN = """
import os, socket, time
from weft.optim.optimizer import build_adamw

def build(groups, optim):
    optimizer = build_adamw(groups, optim)
    host, _, _ = socket.gethostname().partition(".")
    path = os.environ["NCCL_DEBUG_FILE"].replace("%h", host).replace("%p", str(os.getpid()))
    def step(*args, **kwargs):
        if not os.path.exists(path):
            with open(os.environ["STAND_IN"]) as log, open(path, "w") as copy:
                copy.write(log.read())
        time.sleep(0.6)
    optimizer.register_step_pre_hook(step)
    return optimizer
"""


@pytest.mark.slow
@pytest.mark.timeout(300, method="signal")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tcp-fallback", "NCCL uses TCP sockets (NCCL 2.29.7), although the plug-in for EFA is"),
        ("efa-gpudirect-new", "NCCL uses EFA with GPUDirect RDMA (32 devices, aws-ofi-nccl 1.19.0"),
    ],
)
def test_run_reports_its_network_before_step_ten(
    name: str,
    words: str,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tests.supervision.test_rendezvous import Cluster

    (tmp_path / "stand_in.py").write_text(STAND_IN)
    (tmp_path / "run" / "logs").mkdir(parents=True)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_DEBUG_FILE", f"{tmp_path}/run/logs/nccl-%h-%p.log")
    monkeypatch.setenv("STAND_IN", str(LOGS / f"{name}.log"))
    cluster = Cluster(arguments, tmp_path)
    cluster.command += ["--optim.name", "stand_in:build", "--train.steps", "16", "--nodes", "2"]
    try:
        cluster.start("a")
        cluster.wait_until_hosting()
        cluster.start("b")
        cluster.wait_for_output("a", words)
        assert not (tmp_path / "run" / "metrics.jsonl").exists() or cluster.step() < 10
        assert (cluster.wait("a"), cluster.wait("b")) == (0, 0), cluster.output("a")
    finally:
        for process in cluster.processes.values():
            process.kill()
            process.wait()
    warnings = [event for event in read_events(tmp_path / "run") if event["kind"] == "warning"]
    if name == "tcp-fallback":
        assert len(warnings) == 2  # of each node
        assert all(int(str(event["step"])) < 10 for event in warnings)
        assert all(words in str(event["text"]) for event in warnings)
        assert cluster.output("a").count("weft: warning: node") == 1
    else:
        assert warnings == []
