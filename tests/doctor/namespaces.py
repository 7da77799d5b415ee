"""Hosts as network namespaces on one bridge, made and removed by a test.

Needs root, ``ip`` and ``tc``.  Each host has its own interfaces, address and host name.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

INTERFACE = "veth0"  # of each host


def missing_requirement() -> str:
    """Return why namespaces cannot be made here; empty if they can."""
    tools = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if tools:
        return f"needs {', '.join(tools)}"
    if os.geteuid() != 0:
        return "needs root"
    name = f"weft-{os.getpid()}-try"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if done.returncode:
        return "needs permission to make network namespaces"
    run("ip", "netns", "del", name)
    return ""


def run(*command: str) -> None:
    """Run a command; raise its error output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"


class Host:
    """One host: a network namespace with one interface."""

    def __init__(self, number: int, prefix: str) -> None:
        self.name = f"node-{number}"
        self.namespace = f"{prefix}{number}"
        self.address = f"10.77.0.{number + 1}"
        self.processes: list[subprocess.Popen[str]] = []

    def limit_rate(self, rate: str) -> None:
        """Limit what the host sends, to a rate such as 80mbit."""
        limit = ("root", "tbf", "rate", rate, "burst", "64k", "latency", "100ms")
        run("ip", "netns", "exec", self.namespace, "tc", "qdisc", "add", "dev", INTERFACE, *limit)

    def block(self, other: Host) -> None:
        """Drop all packets to another host, as a firewall does."""
        target = f"{other.address}/32"
        run("ip", "-n", self.namespace, "route", "add", "blackhole", target)

    def start(
        self, command: Sequence[str], directory: Path, environment: dict[str, str]
    ) -> subprocess.Popen[str]:
        """Start a command on this host, in its own session."""
        names = directory / "hosts"  # each host must resolve its own name
        names.write_text("127.0.0.1 localhost\n" + f"{self.address} {self.name}\n")
        names = names.rename(directory / f"hosts-{self.name}")
        shell = f'hostname {self.name}; mount --bind {names} /etc/hosts; exec "$@"'
        words = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", shell, "-"]
        process = subprocess.Popen(
            [*words, *command],
            cwd=directory,
            env=os.environ | {"GLOO_SOCKET_IFNAME": INTERFACE} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process


@contextmanager
def connected_hosts(count: int) -> Iterator[list[Host]]:
    """Make hosts with addresses 10.77.0.1, 2, ... on one bridge; remove them at the end."""
    prefix = f"weft{os.getpid() % 100_000}-"
    switch = f"{prefix}sw"
    hosts = [Host(number, prefix) for number in range(count)]
    made: list[str] = []
    try:
        for namespace in (switch, *(host.namespace for host in hosts)):
            run("ip", "netns", "add", namespace)
            made.append(namespace)
            run("ip", "-n", namespace, "link", "set", "lo", "up")
        run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "bridge", "up")
        for number, host in enumerate(hosts):
            port = f"port{number}"
            peer = ("peer", "name", INTERFACE, "netns", host.namespace)
            run("ip", "-n", switch, "link", "add", port, "type", "veth", *peer)
            run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            run("ip", "-n", host.namespace, "link", "set", INTERFACE, "up")
        yield hosts
    finally:
        for process in (process for host in hosts for process in host.processes):
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for namespace in made:
            run("ip", "netns", "del", namespace)
