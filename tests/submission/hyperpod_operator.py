"""A stand-in for the training operator of HyperPod, which drives real elastic agents by HTTP.

It keeps the states of a job: all agents start together; a fault of one stops and restarts all; a
change of the number of nodes stops all gracefully, and starts as many as there are nodes then.

The agent needs another PyTorch than the tests.  `WEFT_HYPERPOD_AGENT` names the Python of an
environment that has it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.commands import free_port
from tests.pages import ROOT

AGENT_PYTHON = os.environ.get("WEFT_HYPERPOD_AGENT", "")
needs_agent = pytest.mark.skipif(
    not AGENT_PYTHON,
    reason="needs hyperpod-elastic-agent with PyTorch 2.11 in an environment of its own: "
    "scripts/drill.sh agent installs it, WEFT_HYPERPOD_AGENT names its Python",
)

# The rules of the page.
RULES: dict[str, dict[str, Any]] = {
    rule["name"]: rule
    for block in re.findall(
        r"^```yaml\n(- name.*?)^```$",
        (ROOT / "docs/hyperpod.md").read_text("utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    for rule in yaml.safe_load(block)
}


class Agent:
    """The elastic agent of one pod."""

    def __init__(
        self, directory: Path, words: Sequence[str], script: str = "", **environment: str
    ) -> None:
        """Start the agent in ``directory``; its files are in another one, as in a pod.

        Args:
            directory: working directory of the ranks.
            words: arguments of ``hyperpodrun``.
            script: shell script that starts it with ``$AGENT_WORDS``, instead of ``words``.
            **environment: environment variables.
        """
        self.port = free_port()
        self.pod = directory.with_name(f"{directory.name}.pod-{self.port}")
        self.pod.mkdir()
        command = ["-m", "hyperpod_elastic_agent.run"]
        command += ["--server-host", "127.0.0.1", "--server-port", str(self.port)]
        command += ["--rdzv-conf", f"resource_config_dir={self.pod}", "--monitor-interval", "0.1"]
        variables = {"AGENT_WORDS": " ".join(command)}
        command = [AGENT_PYTHON, *command, "--tee", "3", "--log-dir", str(self.pod / "log"), *words]
        variables |= os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | environment
        variables["PYTHONPATH"] = str(ROOT)
        with (self.pod / "output").open("w") as output:
            self.process = subprocess.Popen(
                ["bash", "-c", script] if script else command,
                cwd=directory,
                env=variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return (self.pod / "output").read_text()

    @property
    def last_lines(self) -> str:
        """The end of the output, without the requests to the agent."""
        lines = [line for line in self.output.splitlines() if " HTTP/1.1" not in line]
        return "\n".join(lines[-40:])

    def call(self, path: str, body: dict[str, Any] | None = None) -> str:
        """Send a request: POST with a body, else GET."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        url = f"http://127.0.0.1:{self.port}/{path}"
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=10) as response:
            return str(response.read().decode())

    def status(self) -> dict[str, Any]:
        """Return the answer of ``/status``; empty until the agent serves it."""
        with suppress(OSError):
            answer: dict[str, Any] = json.loads(self.call("status"))
            return answer
        assert self.process.poll() is None, self.last_lines
        return {}

    def kill(self) -> None:
        """Kill the agent and its ranks, which have sessions of their own."""
        listing = subprocess.run(
            ["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True
        ).stdout
        parents = [line.split() for line in listing.splitlines()[1:]]
        ranks = [int(pid) for pid, parent in parents if int(parent) == self.process.pid]
        for pid in (self.process.pid, *ranks):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


class Operator:
    """The training operator of a job."""

    def __init__(
        self,
        directory: Path,
        pods: int,
        words: Sequence[str],
        rules: Sequence[dict[str, Any]] = (),
        script: str = "",
        **environment: str,
    ) -> None:
        """Start the agents of all pods.

        Args:
            directory: working directory of the ranks; its agents' files lie beside it.
            pods: number of pods.
            words: arguments of ``hyperpodrun``.
            rules: ``logMonitoringConfiguration``.
            script, **environment: see `Agent`.
        """
        self.rules, self.num_faults, self.nodes = list(rules), 0, pods
        self.port = free_port()  # of rank 0; stays the same
        self.agents = [
            Agent(directory, words, script, NNODES=str(pods), **environment) for _ in range(pods)
        ]
        self.faults: list[
            list[dict[str, Any]]
        ] = []  # per restart, the states of agents with a fault

    def __enter__(self) -> Operator:
        return self

    def __exit__(self, *error: object) -> None:
        for agent in self.agents:
            agent.kill()

    @property
    def running(self) -> list[Agent]:
        """The agents of the nodes that the job has now."""
        return self.agents[: self.nodes]

    def start(self, nodes: int) -> None:
        """Start the ranks on so many nodes, when the agents of all are ready."""
        self.nodes = nodes
        self.wait("ready")
        for rank, agent in enumerate(self.running):
            body = {"rank": rank, "nnodes": nodes, "faultCount": self.num_faults}
            body |= {"master_addr": "127.0.0.1", "master_port": self.port, "progress": {}}
            agent.call("start", body | {"log_monitoring_configuration": self.rules})

    def stop(self, graceful_seconds: int = 0, seconds_between: float = 0.0) -> None:
        """Stop the ranks of all nodes.

        Args:
            graceful_seconds: time for the ranks to save; 0: kill them.
            seconds_between: time from the request to a node to the request to the next one.
        """
        request: dict[str, Any] = {"restart_mode": "process_level_restart"}
        if graceful_seconds:
            request |= {"is_graceful": True, "timeout": graceful_seconds}
        for number, agent in enumerate(self.running):
            time.sleep(seconds_between if number else 0.0)
            agent.call("stop", request)
        self.wait("ready")

    def wait(self, state: str, seconds: float = 120) -> None:
        """Wait until all agents of the job are in a state."""
        deadline = time.monotonic() + seconds
        while (states := [agent.status().get("status") for agent in self.running]) != [
            state
        ] * self.nodes:
            assert time.monotonic() < deadline, (
                states,
                [agent.last_lines for agent in self.running],
            )
            time.sleep(0.1)

    def run_to_end(self, restarts: int = 0, seconds: float = 200) -> None:
        """Restart the job after faults, until it is complete.

        Args:
            restarts: number of restarts, as ``jobMaxRetryCount``.
            seconds: limit of the whole.
        """
        deadline = time.monotonic() + seconds
        while True:
            states = [agent.status() for agent in self.running]
            names = [state.get("status") for state in states]
            if names == ["completed"] * self.nodes:
                return
            if "faulted" in names:
                self.faults.append([state for state in states if state.get("status") == "faulted"])
                outputs = [agent.last_lines for agent in self.running]
                assert self.num_faults < restarts, (states, outputs)
                self.num_faults += 1
                self.stop()
                self.start(self.nodes)
            assert time.monotonic() < deadline, (
                names,
                [agent.last_lines for agent in self.running],
            )
            time.sleep(0.1)

    def shut_down(self) -> None:
        """End all agents; check that they end well."""
        for agent in self.agents:
            agent.call("shutdown", {})
        for agent in self.agents:
            assert agent.process.wait(30) == 0, agent.last_lines
