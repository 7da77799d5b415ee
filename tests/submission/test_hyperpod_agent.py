"""weft under the elastic agent of HyperPod, with a stand-in for the operator that drives it."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.commands import (
    SLEEPY,
    WEFT,
    check_against_reference,
    run_joined,
)
from tests.small import SMALL, records
from tests.submission.hyperpod_operator import AGENT_PYTHON, RULES, Operator, needs_agent
from tests.submission.requests import request
from tests.supervision.test_launcher import wait_for
from weft.checkpoint.manifest import checkpoint_step, list_checkpoints
from weft.cli.main import main
from weft.config.exit_statuses import FAILED, REQUEUE, USAGE_ERROR
from weft.submission import kubernetes

pytestmark = pytest.mark.timeout(500, method="signal")  # so that fixtures tidy up

# The variable by which a rank knows the agent.
AGENT = {"HYPERPOD_ELASTICAGENT_SOCKET_SERVER_PATH": "/tmp/agent.sock"}
TWO_NODES = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # of one rank each
# An optimizer whose third step sends a signal to its own rank.
SIGNALING = """
import os, signal
from weft.optim.optimizer import build_adamw

def build(groups, optim):
    optimizer = build_adamw(groups, optim)
    steps = []
    def step(*args, **kwargs):
        steps.append(1)
        if len(steps) == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))
    optimizer.register_step_pre_hook(step)
    return optimizer
"""


@pytest.mark.parametrize(
    ("number", "agent", "status"),
    [
        (signal.SIGUSR1, AGENT, 0),  # the agent would report any other status as a fault
        (signal.SIGTERM, AGENT, REQUEUE),  # with 0 the operator would take the job for complete
        (signal.SIGUSR1, {}, REQUEUE),
    ],
)
def test_stop_of_a_rank_under_the_agent_has_status_0_only_for_its_own_signal(
    number: signal.Signals,
    agent: dict[str, str],
    status: int,
    arguments: list[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "signaling.py").write_text(SIGNALING)
    command = [*arguments, "--optim.name", "signaling:build", "--train.steps", "100000"]
    statuses, out = run_joined(command, tmp_path, 2, SIGNAL=str(int(number)), **agent)
    assert statuses == [status, status], out
    assert f"{number.name}: all ranks stop; saving step" in out


def test_time_limit_under_the_agent_is_refused(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in (rank | TWO_NODES | AGENT | {"TORCHELASTIC_MAX_RESTARTS": "3"}).items():
        monkeypatch.setenv(name, value)
    limited = [*arguments[len(WEFT) :], "--resilience.time_limit", "60", "--dry-run"]
    assert main(limited) == USAGE_ERROR
    message = capsys.readouterr().err
    assert "resilience.time_limit=60.0 makes the operator of HyperPod restart the ranks" in message
    assert "runPolicy.activeDeadlineSeconds" in message
    assert main([*limited, "--resilience.time_limit", "0"]) == 0


@pytest.mark.parametrize("agent", [AGENT, {}])
def test_first_rank_of_each_node_prints_steps_under_the_agent(
    agent: dict[str, str], arguments: list[str], tmp_path: Path
) -> None:
    """The agent of each node expects these lines."""
    statuses, out = run_joined(arguments, tmp_path, 2, **TWO_NODES, **agent)
    assert statuses == [0, 0], out
    first, second = (find_steps(tmp_path, rank) for rank in range(2))
    assert len(first) == 20
    assert [line.split("  ")[:2] for line in second] == (
        [line.split("  ")[:2] for line in first] if agent else []
    )


def find_steps(directory: Path, rank: int) -> list[str]:
    """Return the lines of a rank's output that match the rule against hangs."""
    pattern = RULES["hang"]["logPattern"]
    lines = (directory.with_name(f"{directory.name}.said") / str(rank)).read_text().splitlines()
    return [line for line in lines if re.match(pattern, line)]


def test_rules_match_the_lines_of_a_run(arguments: list[str], tmp_path: Path) -> None:
    nan = '[{site = "gradients", kind = "nan", passing = 4, times = 2}]'
    statuses, out = run_joined([*arguments, "--resilience.faults", nan], tmp_path, 1)
    assert statuses == [FAILED]
    lines = out.splitlines()
    (failure,) = (line for line in lines if re.match(RULES["fault"]["logPattern"], line))
    assert re.match(RULES["nan"]["logPattern"], failure), failure
    pattern = RULES["throughput"]["logPattern"]
    speeds = [found[1] for line in lines if (found := re.match(pattern, line))]
    logged = [str(round(record["tokens_per_second"])) for record in records(tmp_path / "run")]
    assert speeds == logged
    assert len(speeds) == 3


def test_rules_are_regular_expressions_of_go() -> None:
    for rule in RULES.values():
        assert not re.search(r"\(\?[^:]|\\[1-9]", rule["logPattern"])


# --------------------------------------------------------------------------- the real agent


def launch(arguments: list[str], nodes: int, ranks: int) -> list[str]:
    """Return the words of ``hyperpodrun`` that start weft's command."""
    return ["--nnodes", str(nodes), "--nproc-per-node", str(ranks), *arguments[1:]]


@pytest.mark.slow
@needs_agent
def test_fault_restarts_the_ranks_which_resume(
    arguments: list[str], store_path: Path, tmp_path: Path
) -> None:
    """An exception, then a killed rank: the operator restarts the ranks of both nodes."""
    faults = '[{kind = "raise", passing = 7}, {kind = "kill", rank = 1, passing = 12}]'
    command = [*arguments, "--train.steps", "30", "--resilience.faults", faults]
    command += ["--checkpoint.async_save", "false"]
    with Operator(tmp_path, 2, launch(command, 2, 1)) as operator:
        operator.start(2)
        operator.run_to_end(restarts=2)
        operator.shut_down()
    raised, killed = operator.faults
    assert {fault["reason"] for fault in raised + killed} == {"WorkerCrash"}
    assert any("RuntimeError: injected fault at step" in fault["message"] for fault in raised)
    assert any("SIGKILL" in fault["message"] for fault in killed)
    assert [record["step"] for record in records(tmp_path / "run")] == [*range(1, 31)]
    check_against_reference(tmp_path, store_path, 30)


@pytest.mark.slow
@needs_agent
@pytest.mark.parametrize("seconds_between", [0.0, 3.0])
def test_elastic_job_shrinks_and_grows_without_a_fault(
    seconds_between: float, arguments: list[str], store_path: Path, tmp_path: Path
) -> None:
    """2, 1, 2 nodes; the ranks of a node whose agent is stopped later have already ended."""
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    command = [*arguments, "--optim.name", "sleepy:build", "--checkpoint.interval", "0"]
    steps = []
    with Operator(tmp_path, 2, launch(command, 2, 1)) as operator:
        for nodes in (2, 1, 2):
            operator.start(nodes)
            if len(steps) < 2:
                wait_for(tmp_path / "run", (steps or [0])[-1] + 3)
                operator.stop(graceful_seconds=30, seconds_between=seconds_between)
                steps.append(records(tmp_path / "run")[-1]["step"])
        (tmp_path / "hurry").touch()
        operator.run_to_end()
        operator.shut_down()
        for agent in operator.agents:
            assert "AgentState.FAULTED" not in agent.output
    assert 3 <= steps[0] < steps[1] < 20
    starts = [event["text"] for event in events(tmp_path / "run") if event["kind"] == "start"]
    assert starts == [
        "started on 2 ranks",
        f"resumed from step {steps[0]} on 1 rank",
        f"resumed from step {steps[1]} on 2 ranks",
    ]
    check_against_reference(tmp_path, store_path, 20)


def events(run_dir: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


@pytest.mark.slow
@needs_agent
def test_deleted_pod_saves_and_the_others_report_a_fault(
    arguments: list[str], tmp_path: Path
) -> None:
    """So the operator restarts the job; with status 0 it would take the other pod for complete."""
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    command = [*arguments, "--optim.name", "sleepy:build", "--checkpoint.interval", "0"]
    with Operator(tmp_path, 2, ["--shutdown-timeout", "60", *launch(command, 2, 1)]) as operator:
        operator.start(2)
        wait_for(tmp_path / "run", 3)
        first, second = operator.agents
        first.process.send_signal(signal.SIGTERM)
        first.process.wait(60)
        deadline = time.monotonic() + 30
        while not is_faulted(state := second.status()):
            assert time.monotonic() < deadline, state
    assert "saved a checkpoint and stopped" in state["message"]
    (saved,) = list_checkpoints(tmp_path / "run/checkpoints")
    assert checkpoint_step(saved) == records(tmp_path / "run")[-1]["step"]


STOPPED = '[{kind = "stop", rank = 1, passing = 12}]'


@pytest.mark.slow
@needs_agent
def test_hung_rank_is_named_by_the_watchdog_and_restarted(
    arguments: list[str], store_path: Path, tmp_path: Path
) -> None:
    command = [*arguments, "--resilience.faults", STOPPED, "--resilience.step_timeout", "4"]
    command += ["--checkpoint.async_save", "false"]
    with Operator(tmp_path, 2, launch(command, 2, 1)) as operator:
        operator.start(2)
        operator.run_to_end(restarts=1)
    (states,) = operator.faults
    assert states[0]["reason"] == "WorkerCrash"
    cause = "Hang: rank 1 is missing: it is stopped (SIGSTOP) in step 12"
    assert any(cause in state["message"] for state in states), states
    check_against_reference(tmp_path, store_path, 20)


@pytest.mark.slow
@needs_agent
def test_hang_rule_restarts_ranks_without_a_watchdog(
    arguments: list[str], store_path: Path, tmp_path: Path
) -> None:
    """Both nodes print steps, so both have a rule that is broken when the steps end."""
    command = [*arguments, "--resilience.faults", STOPPED, "--resilience.step_timeout", "0"]
    command += ["--checkpoint.async_save", "false"]
    rule = RULES["hang"] | {"expectedRecurringFrequencyInSeconds": 8}
    with Operator(tmp_path, 2, launch(command, 2, 1), [rule]) as operator:
        operator.start(2)
        operator.run_to_end(restarts=1)
    (states,) = operator.faults
    assert {state["reason"] for state in states} == {"LogHang_hang"}
    assert any("step 11/20  loss" in state["message"] for state in states)
    check_against_reference(tmp_path, store_path, 20)


def throughput(tokens_per_second: int) -> dict[str, Any]:
    rule = RULES["throughput"]
    return rule | {"metricThreshold": tokens_per_second, "metricEvaluationDataPoints": 3}


@pytest.mark.slow
@needs_agent
@pytest.mark.parametrize(
    ("rule", "words", "reason"),
    [
        (throughput(10**9), [], "LogSlow_throughput"),
        (throughput(1), [], ""),
        (RULES["hang"] | {"expectedStartCutOffInSeconds": 60}, [], ""),
        (
            RULES["nan"],
            [
                *("--resilience.on_anomaly", "skip", "--resilience.faults"),
                '[{site = "gradients", kind = "nan", passing = 4, times = 2}]',
            ],
            "LogFault_nan",
        ),
    ],
)
def test_rule_is_broken_only_by_its_event(
    rule: dict[str, Any], words: list[str], reason: str, arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    command = [*arguments, "--optim.name", "sleepy:build", *words]
    with Operator(tmp_path, 2, launch(command, 2, 1), [rule]) as operator:
        operator.start(2)
        if not reason:
            operator.run_to_end()
            return
        deadline = time.monotonic() + 60
        while not (states := [s for a in operator.agents if is_faulted(s := a.status())]):
            assert time.monotonic() < deadline
            time.sleep(0.2)
    assert {state["reason"] for state in states} == {reason}


def is_faulted(status: dict[str, Any]) -> bool:
    return status.get("status") == "faulted"


@pytest.mark.slow
@needs_agent
def test_command_of_the_manifest_trains_under_the_agent(tmp_path: Path) -> None:
    """The pod of a HyperPodPyTorchJob, but for the addresses and paths of this machine."""
    launch_request = request(
        *SMALL,
        ("data.path", str(Path(ast.__file__))),
        ("data.cache_dir", str(tmp_path / "cache")),
        launch={"kind": "hyperpod", "mounts": "/runs=pvc:runs", "image": "weft"},
        nodes=(1, 2),
    )
    job = yaml.safe_load(kubernetes.render(launch_request))
    (container,) = job["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"]
    script = container["command"][-1].replace("/runs/", f"{tmp_path}/")
    script = script.replace("/tmp/hyperpod", str(tmp_path / "log"))
    shim = tmp_path / "bin/hyperpodrun"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {AGENT_PYTHON} $AGENT_WORDS "$@"\n')
    shim.chmod(0o755)
    path = f"{shim.parent}:{os.environ['PATH']}"
    rules = job["spec"]["runPolicy"]["logMonitoringConfiguration"]
    with Operator(tmp_path, 1, [], rules, script, PATH=path) as operator:
        operator.start(1)
        operator.run_to_end()
        operator.shut_down()
    assert records(tmp_path / "small-run")[-1]["step"] == 20
