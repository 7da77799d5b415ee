"""Measure the network between nodes; network namespaces are the nodes."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.commands import free_port, processes_in
from tests.doctor import namespaces
from tests.doctor.namespaces import Host, connected_hosts
from tests.harness import run_ranks
from weft.doctor import network_benchmark
from weft.doctor.network_benchmark import RING, exchange, pair_rounds, summarize
from weft.doctor.network_checks import check_network
from weft.doctor.node_facts import Facts, NetworkMeasurements
from weft.preparation.rendezvous_store import connect_store

PORT = 29_411
# What `weft doctor --network` does after its other checks.
PROGRAM = """
import json, sys
from dataclasses import asdict
from weft.doctor import network_benchmark as benchmark
from weft.preparation.rendezvous_store import connect_store
endpoint, nodes = sys.argv[1], int(sys.argv[2])
store = connect_store(endpoint, "doctor", (1, nodes), 120)
print(json.dumps(asdict(benchmark.measure_network(store, endpoint, nodes, "cpu", 1))))
"""


@pytest.mark.parametrize("nodes", range(2, 10))
def test_rounds_have_every_pair_once_and_a_node_once_a_round(nodes: int) -> None:
    rounds = list(pair_rounds(nodes))
    assert len(rounds) == nodes - 1 + nodes % 2
    pairs = [pair for pairs in rounds for pair in pairs]
    assert sorted(pairs) == [(a, b) for a in range(nodes) for b in range(a + 1, nodes)]
    for one in rounds:
        members = [node for pair in one for node in pair]
        assert len(members) == len({*members})


def node_results(nodes: int, **failed: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results of all nodes, with the results of some groups replaced."""
    named = {name.replace("_", "-"): result for name, result in failed.items()}
    groups = {f"{a}-{b}": (a, b) for pairs in pair_rounds(nodes) for a, b in pairs}
    groups |= {RING: range(nodes)}
    return [
        {n: named.get(n, {"rate": 5e9}) for n, members in groups.items() if node in members}
        for node in range(nodes)
    ]


HOSTS = ["a", "b", "c", "d"]


def test_summary_has_all_pairs_and_the_ring() -> None:
    network = summarize(HOSTS, 8, node_results(4))
    assert len(network.pairs) == 6
    assert (network.busbw, network.errors) == (5e9, ())


def test_summary_slower_direction_counts() -> None:
    results = node_results(2)
    results[1]["0-1"] = {"rate": 2e9}
    assert summarize(HOSTS[:2], 8, results).pairs == (("a", "b", 2e9),)


def test_summary_names_a_node_that_vanished_once() -> None:
    error = {"error": "RuntimeError: connection closed by peer"}
    results = node_results(4, **{"0_3": error, "1_3": {}, "2_3": {}}, ring={})
    results[3] = {}
    network = summarize(HOSTS, 1, results)
    assert network.errors == ("node d stopped answering during the measurement",)
    assert len(network.pairs) == 3


def test_summary_names_a_node_whose_process_failed_with_the_reason() -> None:
    error = {"error": "no end within 30 s"}
    results = node_results(4, **{"0_3": error, "1_3": {}, "2_3": {}}, ring={})
    results[3]["0-3"] = {"broken": "OutOfMemoryError: CUDA error: out of memory"}
    network = summarize(HOSTS, 8, results)
    reason = "OutOfMemoryError: CUDA error: out of memory"
    assert network.errors == (f"node d cannot be measured: {reason}",)


def test_summary_names_a_pair_without_connection() -> None:
    error = {"error": "no end within 30 s"}
    network = summarize(HOSTS, 1, node_results(4, **{"1_2": error}, ring=error))
    assert network.errors == ("no connection between b and c: no end within 30 s",)
    assert len(network.pairs) == 5


def test_summary_names_a_node_without_any_connection() -> None:
    error = {"error": "no end within 30 s"}
    failed = {f"{min(n, 2)}_{max(n, 2)}": error for n in (0, 1, 3)}
    network = summarize(HOSTS, 1, node_results(4, **failed, ring=error))
    assert network.errors == ("node c has no connection to any other node",)


def test_summary_of_a_ring_that_alone_fails() -> None:
    network = summarize(HOSTS, 1, node_results(4, ring={"error": "RuntimeError: out of ports"}))
    assert "an all-reduce over all nodes fails: RuntimeError: out of ports" in network.errors[0]


def test_exchange_waits_for_a_slow_node_but_not_longer_than_the_limit() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    timer = threading.Timer(0.3, lambda: store.set("0/1", "[2]"))
    timer.start()
    assert exchange(store, "0", 0, [1], range(2), 60) == {0: [1], 1: [2]}
    start = time.monotonic()
    assert exchange(store, "1", 0, None, range(3), 0.3) == {0: None}
    assert time.monotonic() - start < 5


def measure_on_this_host(port: int, kind: str) -> NetworkMeasurements:
    dist.destroy_process_group()  # of the harness
    endpoint = f"127.0.0.1:{port}"
    store = connect_store(endpoint, "doctor", (1, 2), 60)
    result = network_benchmark.measure_network(store, endpoint, 2, kind, 2)
    time.sleep(0.5)  # this process may have the store
    return result


def test_network_of_two_nodes_is_measured_by_all_ranks_of_each() -> None:
    first, second = run_ranks(measure_on_this_host, 2, free_port(), "cpu")
    assert first == second
    assert first.errors == ()
    ((a, b, rate),) = first.pairs
    assert {a.partition(" (")[2], b.partition(" (")[2]} == {"node 0)", "node 1)"}
    assert rate > 0
    assert first.busbw > 0


def test_network_node_that_cannot_use_its_devices_is_named_with_the_reason() -> None:
    """This machine has no GPU."""
    for network in run_ranks(measure_on_this_host, 2, free_port(), "cuda"):
        assert len(network.errors) == 2
        for error in network.errors:
            assert re.search(r"^node \S+ \(node [01]\) cannot be measured: \w+: \S+", error), error


# --------------------------------------------------------------------------- several hosts


@pytest.fixture
def four_hosts() -> Iterator[list[Host]]:
    if missing := namespaces.missing_requirement():
        pytest.skip(missing)
    with connected_hosts(4) as hosts:
        yield hosts


def measure(hosts: list[Host], directory: Path) -> list[Any]:
    command = [sys.executable, "-c", PROGRAM, f"{hosts[0].address}:{PORT}", str(len(hosts))]
    environment = {"PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}
    return [host.start(command, directory, environment) for host in hosts]


def results_of(processes: list[Any]) -> list[NetworkMeasurements]:
    results = []
    for process in processes:
        out, err = process.communicate(timeout=280)
        assert process.returncode == 0, err
        fields = json.loads(out.splitlines()[-1])
        fields["pairs"] = [tuple(pair) for pair in fields["pairs"]]
        tuples = {k: tuple(v) for k, v in fields.items() if isinstance(v, list)}
        results.append(NetworkMeasurements(**fields | tuples))
    return results


@pytest.mark.slow
def test_network_slow_node_among_four_is_named(four_hosts: list[Host], tmp_path: Path) -> None:
    for number, host in enumerate(four_hosts):
        host.limit_rate("40mbit" if number == 2 else "400mbit")
    results = results_of(measure(four_hosts, tmp_path))
    for network in results:
        assert network.errors == ()
        assert len(network.pairs) == 6
        assert network.busbw > 0
        findings = list(check_network(Facts(network=network)))
        slow = [finding for finding in findings if finding.severity != "ok"]
        assert [finding.severity for finding in slow] == ["bad"], findings
        assert slow[0].observation.startswith("node node-2 is slow: at most 0.00"), slow
    assert len({json.dumps(network.pairs) for network in results}) == 1  # all report the same


@pytest.mark.slow
def test_network_blocked_pair_is_named_and_nobody_hangs(
    four_hosts: list[Host], tmp_path: Path
) -> None:
    four_hosts[1].block(four_hosts[3])
    four_hosts[3].block(four_hosts[1])
    for network in results_of(measure(four_hosts, tmp_path)):
        assert len(network.errors) == 1, network.errors
        error = network.errors[0]
        assert error.startswith("no connection between node-")
        assert {"node-1", "node-3"} == {
            word.rstrip(":") for word in error.split() if "node-" in word
        }
        assert len(network.pairs) == 5


@pytest.mark.slow
def test_network_node_that_dies_is_named_and_nobody_hangs(
    four_hosts: list[Host], tmp_path: Path
) -> None:
    for host in four_hosts:
        host.limit_rate("100mbit")
    processes = measure(four_hosts, tmp_path)
    dead = four_hosts[3].name
    deadline = time.monotonic() + 120
    while len(processes_in(tmp_path)) < 8:  # each node has forked a rank
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(processes[3].pid, signal.SIGKILL)
    for network in results_of(processes[:3]):
        assert network.errors == (f"node {dead} stopped answering during the measurement",)
