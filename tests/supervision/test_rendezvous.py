"""Nodes join, leave and fail; each node is a real launcher of one rank on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousInfo,
    c10d_rendezvous_backend,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from tests.commands import SLEEPY, check_against_reference, processes_in
from tests.small import records
from tests.supervision.test_launcher import wait_for
from weft.config.errors import InvalidConfig
from weft.config.exit_statuses import REQUEUE
from weft.config.reader import read_job
from weft.parallel.private import create_tcp_store
from weft.planning.plan import Machine
from weft.planning.resolve import resolve_nodes
from weft.preparation.rendezvous_store import is_local_endpoint
from weft.supervision.rendezvous import RendezvousHandler, open_rendezvous

pytestmark = pytest.mark.timeout(600, method="signal")  # so that fixtures tidy up


T = TypeVar("T")


def free_port() -> int:
    with socket.socket() as result:
        result.bind(("localhost", 0))
        return int(result.getsockname()[1])


def wait_until(holds: Callable[[], Any], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"in vain waited for: {what}"
        time.sleep(0.1)


# --------------------------------------------------------------------------- without ranks


def run_async(function: Callable[[], T]) -> Future[T]:
    """Call a function in a daemon thread, which may never return."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


class Node:
    """The rendezvous of a launcher, with the requests to its ranks."""

    def __init__(self, port: int, counts: tuple[int, ...], same: dict[str, Any]) -> None:
        self.requests: list[str] = []
        self.rendezvous = open_rendezvous(
            f"localhost:{port}",
            "test",
            counts,
            same,
            kill_ranks=lambda: self.requests.append("kill"),
            stop_ranks=lambda: self.requests.append("save"),
            log=self.requests.append,
        )

    def join_async(self) -> Future[RendezvousInfo]:
        return run_async(self.rendezvous.next_rendezvous)

    def join(self) -> int:
        """Join, and return the number of nodes that train."""
        return self.join_async().result(60).world_size

    def watch(self) -> bool:
        """Poll like the elastic agent; return True if ranks have to stop."""
        self.rendezvous.num_nodes_waiting()
        return bool({"kill", "save"}.intersection(self.requests))


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Node]]:
    monkeypatch.setattr("weft.supervision.rendezvous.MISSED_HEARTBEATS", 4)
    monkeypatch.setattr("weft.supervision.rendezvous.LINGER_SECONDS", 0.5)
    port, node_list = free_port(), []

    def node(*counts: int, **same: Any) -> Node:
        node_list.append(Node(port, counts, same))
        return node_list[-1]

    yield node
    wait(
        [run_async(partial(node.rendezvous.end_run, None)) for node in node_list], 20
    )  # end nodes that still wait


@pytest.mark.slow
def test_rendezvous_spare_node_replaces_one_that_left(nodes: Callable[..., Node]) -> None:
    """A job of one or two nodes starts although three are available."""
    trio = [nodes(1, 2, 4) for _ in range(3)]
    joining = [node.join_async() for node in trio]
    wait_until(lambda: sum(future.done() for future in joining) == 2, "two of three nodes")
    first, second = (node for node, future in zip(trio, joining, strict=True) if future.done())
    (third,) = (node for node in trio if node not in (first, second))
    wait_until(lambda: third.requests, "the third stands by")
    assert third.requests == ["this node stands by: the run can use 2 of 3 nodes"]
    assert {future.result(0).world_size for future in joining if future.done()} == {2}
    time.sleep(2)
    assert not first.watch()
    assert not second.watch()
    # The first node leaves: the second kills its ranks, and the third node replaces the first.
    first.rendezvous.leave()
    wait_until(second.watch, "that one has left", 10)
    assert "kill" in second.requests
    start_time = time.monotonic()
    assert second.join() == 2
    assert time.monotonic() - start_time < 30
    wait_until(lambda: all(future.done() for future in joining), "the third trains")
    assert third.rendezvous.num_nodes == 2
    # The third node fails permanently: the second gets the failure.
    second.requests.clear()
    third.rendezvous.end_run({"rank": 1})
    wait_until(second.watch, "the end", 10)
    assert "kill" in second.requests
    with pytest.raises(RendezvousClosedError):
        second.join()
    assert second.rendezvous.get_failure() == {"rank": 1}


def test_rendezvous_new_node_joins_a_running_job(nodes: Callable[..., Node]) -> None:
    """Ranks save for new nodes only if the run can use them."""
    first = nodes(1, 3)
    assert first.join() == 1
    second, third = nodes(1, 3), nodes(1, 3)
    joining = [second.join_async()]
    time.sleep(3)
    assert not first.watch()
    joining.append(third.join_async())
    wait_until(first.watch, "that more have come", 10)
    assert first.requests == ["training on 1 node", "save"]
    assert first.join() == 3
    assert [future.result(60).world_size for future in joining] == [3, 3]


def test_rendezvous_lost_node_is_detected(nodes: Callable[..., Node]) -> None:
    """A node without heartbeats is lost, as after a power cut, which resets no connection."""
    pair = [nodes(1, 2) for _ in range(2)]
    for future in [node.join_async() for node in pair]:
        assert future.result(60).world_size == 2
    time.sleep(2)
    assert not pair[0].watch()
    pair[1].rendezvous._stop_heartbeats()
    start_time = time.monotonic()
    wait_until(pair[0].watch, "that one is lost", 30)
    assert "kill" in pair[0].requests
    assert time.monotonic() - start_time > 2
    assert pair[0].join() == 1


def test_rendezvous_node_of_another_job_is_refused(nodes: Callable[..., Node]) -> None:
    nodes(1, 2, **{"optim.lr": 1e-3, "train.seed": 0})
    with pytest.raises(InvalidConfig) as caught:
        nodes(1, 2, **{"optim.lr": 2e-3, "train.seed": 0})
    (error,) = caught.value.errors
    assert (error.key, error.value) == ("optim.lr", 2e-3)
    assert "0.001" in error.rule


@pytest.mark.slow
def test_rendezvous_state_of_an_earlier_start_is_ignored(nodes: Callable[..., Node]) -> None:
    """A rendezvous that survives the run does not prevent another start."""
    first = nodes(1, 2, lr=1)
    first.join()
    first.rendezvous.end_run(None)
    assert first.rendezvous.get_failure() is None
    assert nodes(1, 2, lr=2).join() == 1


def test_is_local_endpoint_recognizes_its_addresses() -> None:
    assert is_local_endpoint("localhost:29400")
    assert is_local_endpoint("127.0.0.1")
    assert is_local_endpoint(f"{socket.gethostname()}:1")
    assert not is_local_endpoint("192.0.2.1:29400")  # RFC 5737: reserved for documentation
    assert not is_local_endpoint("nowhere.invalid:29400")


@pytest.mark.slow
def test_rendezvous_alias_of_this_host_hosts_the_store(
    nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch does not recognize the alias of a second network interface."""
    monkeypatch.setattr(c10d_rendezvous_backend, "_matches_machine_hostname", lambda host: False)
    assert nodes(1, 2).join() == 1


def test_rendezvous_each_round_has_a_new_store(nodes: Callable[..., Node]) -> None:
    """The launcher holds the port from the start, so no other process can take it."""
    node, ports = nodes(1, 2), set[int]()
    for _ in range(2):
        store = node.join_async().result(60).bootstrap_store_info
        assert node.rendezvous.use_agent_store
        create_tcp_store(store.master_addr, store.master_port, False).set("key", "value")
        with pytest.raises(OSError, match="in use"):
            socket.create_server((store.master_addr, store.master_port))
        ports.add(store.master_port)
    assert len(ports) == 2


def test_torch_private_rendezvous_api_exists() -> None:
    """torch has the private attributes that `RendezvousHandler` uses."""
    names = DynamicRendezvousHandler.next_rendezvous.__code__.co_names
    assert {"_state_holder", "_op_executor", "_stop_heartbeats", "_get_world"} <= set(names)
    stores = {"_bootstrap_store_info", "_shared_tcp_store_server", "_create_tcp_store_server"}
    assert stores <= set(names)
    waiting = DynamicRendezvousHandler.num_nodes_waiting.__code__.co_names
    assert {"state", "wait_list", "sync"} <= set(waiting)
    assert issubclass(RendezvousHandler, DynamicRendezvousHandler)


def test_node_range_invalid_numbers_are_refused() -> None:
    def plan(nodes: str, *extra: tuple[str, str]) -> Any:
        overrides = [
            ("run.nodes", nodes),
            ("run.nproc_per_node", "2"),
            ("train.global_batch_size", "8"),
            *extra,
        ]
        job, _, errors = read_job("demo", [("run.rendezvous", "here"), *overrides])
        assert not errors
        return resolve_nodes(job, Machine("cpu", devices=2))

    four = plan("1:4")
    assert four.node_counts == (1, 2, 4)
    assert (four.world_size, four.local_world_size) == (8, 2)
    assert "of 3 nodes the run can use only 2, because train.global_batch_size=8 is not div" in str(
        four.warnings
    )
    assert plan("2").node_counts == (2,)
    with pytest.raises(InvalidConfig, match=r"is not divisible by 6"):
        plan("3")
    for wrong in ("4:1", "0", "1:", "many"):
        with pytest.raises(InvalidConfig, match=r"run.nodes=\"?.*neither a number"):
            plan(wrong)
    with pytest.raises(
        InvalidConfig, match=r"run.rendezvous=\"auto\" names no rendezvous endpoint"
    ):
        plan("2", ("run.rendezvous", "auto"))


# --------------------------------------------------------------------------- with ranks

STEPS = 160


class Cluster:
    def __init__(self, arguments: list[str], directory: Path) -> None:
        (directory / "sleepy.py").write_text(SLEEPY)
        self.directory, self.port = directory, free_port()
        self.command = [*arguments, "--run.nproc_per_node", "1", "--optim.name", "sleepy:build"]
        self.command += ["--rendezvous", f"localhost:{self.port}", "--train.steps", str(STEPS)]
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, *extra: str) -> None:
        log = (self.directory / name).open("w")
        self.processes[name] = subprocess.Popen(
            [*self.command, *extra],
            cwd=self.directory,
            env=os.environ | {"PYTHONPATH": f"{self.directory}:{os.environ.get('PYTHONPATH', '')}"},
            stdout=log,
            stderr=log,
            text=True,
        )

    def output(self, name: str) -> str:
        return (self.directory / name).read_text()

    def wait_for_output(self, name: str, text: str, times: int = 1) -> None:
        def condition() -> bool:
            over = self.processes[name].poll() is not None
            enough = self.output(name).count(text) >= times
            assert enough or not over, self.output(name)
            return enough

        wait_until(condition, f"{name}: {text}")

    def wait_until_hosting(self) -> None:
        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("localhost", self.port)) == 0

        wait_until(listens, "the rendezvous")

    def step(self) -> int:
        rows = records(self.directory / "run")
        return int(rows[-1]["step"]) if rows else 0

    def wait_for_step_after(self, step: int) -> None:
        wait_until(lambda: self.step() > step, f"a step after {step}")

    def wait(self, name: str) -> int:
        return self.processes[name].wait(timeout=200)


@pytest.fixture
def cluster(arguments: list[str], tmp_path: Path) -> Iterator[Cluster]:
    running = Cluster(arguments, tmp_path)
    yield running
    for process in running.processes.values():
        process.kill()
        process.wait()


@pytest.mark.slow
def test_train_lost_and_new_nodes_continue_the_run(
    cluster: Cluster, store_path: Path, tmp_path: Path
) -> None:
    cluster.start("a", "--nodes", "1:2")
    cluster.wait_until_hosting()
    cluster.start("b", "--nodes", "1:2")
    cluster.wait_for_output("a", "training on 2 nodes")
    wait_for(tmp_path / "run", 12)
    # A node is lost with all of its processes.
    before = cluster.step()
    single = cluster.output("a").count("training on 1 node")
    cluster.processes["b"].kill()
    start_time = time.monotonic()
    cluster.wait_for_output("a", "training on 1 node", single + 1)
    print(f"lost: noticed and met again after {time.monotonic() - start_time:.1f} s")
    cluster.wait_for_step_after(before + 3)
    print(f"lost: three new steps after {time.monotonic() - start_time:.1f} s")
    # The node returns: no step is lost, because ranks save before the rendezvous.
    start_time = time.monotonic()
    cluster.start("b again", "--nodes", "1:2")
    cluster.wait_for_output("b again", "training on 2 nodes")
    print(f"back: met after {time.monotonic() - start_time:.1f} s, with starting it")
    saved = records(tmp_path / "run")[-1]
    at = cluster.step()
    cluster.wait_for_step_after(at + 3)
    print(f"back: three new steps after {time.monotonic() - start_time:.1f} s")
    # A stop signal makes the node leave; the other node continues.
    cluster.processes["b again"].send_signal(signal.SIGTERM)
    start_time = time.monotonic()
    assert cluster.wait("b again") == REQUEUE
    assert "stopped; run the same command to resume from" in cluster.output("b again")
    at = cluster.step()
    cluster.wait_for_step_after(at + 3)
    print(f"left: three new steps after {time.monotonic() - start_time:.1f} s")
    (tmp_path / "hurry").touch()
    assert cluster.wait("a") == 0, cluster.output("a")
    assert saved in records(tmp_path / "run")  # and is not repeated
    check_against_reference(tmp_path, store_path, STEPS)


@pytest.mark.slow
def test_train_killed_rank_restarts_all_nodes(
    cluster: Cluster, store_path: Path, tmp_path: Path
) -> None:
    fault = '[{kind = "kill", rank = 1, passing = 15}, {kind = "kill", rank = 0, passing = 8}]'
    extra = (
        "--nodes",
        "2",
        "--resilience.faults",
        fault,
        "--resilience.max_restarts_per_hour",
        "4",
    )
    (tmp_path / "hurry").touch()
    cluster.start("a", *extra)
    cluster.wait_until_hosting()
    cluster.start("b", *extra)
    assert (cluster.wait("a"), cluster.wait("b")) == (0, 0), cluster.output("a") + cluster.output(
        "b"
    )
    output = cluster.output("a") + cluster.output("b")
    assert "rank 1 failed: SIGKILL" in output
    assert "rank 0 failed: SIGKILL" in output
    check_against_reference(tmp_path, store_path, STEPS)


@pytest.mark.slow
def test_train_permanent_failure_ends_all_nodes(cluster: Cluster) -> None:
    fault = '[{kind = "kill", rank = 1, passing = 5}]'
    extra = (
        "--nodes",
        "1:2",
        "--resilience.faults",
        fault,
        "--resilience.max_restarts_per_hour",
        "0",
    )
    cluster.start("a", *extra)
    cluster.wait_until_hosting()
    cluster.start("b", *extra)
    assert (cluster.wait("a"), cluster.wait("b")) == (1, 1)
    assert "failed: " in cluster.output("a")
    assert "failed: " in cluster.output("b")


@pytest.mark.slow
def test_train_lost_rendezvous_ends_and_resumes(cluster: Cluster, tmp_path: Path) -> None:
    """The host of the rendezvous dies: the other nodes end and report it."""
    cluster.start("a", "--nodes", "1:2")
    cluster.wait_until_hosting()
    cluster.start("b", "--nodes", "1:2")
    wait_for(tmp_path / "run", 12)
    cluster.processes["a"].kill()
    start_time = time.monotonic()
    assert cluster.wait("b") == REQUEUE
    print(f"ended after {time.monotonic() - start_time:.1f} s")
    output = cluster.output("b")
    assert f"lost the rendezvous endpoint localhost:{cluster.port}" in output
    assert f"run the same command to resume from {tmp_path}/run/checkpoints" in output


@pytest.mark.slow
def test_train_killed_launchers_leave_no_processes(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start("a", "--nodes", "2")
    cluster.wait_until_hosting()
    cluster.start("b", "--nodes", "2")
    wait_for(tmp_path / "run", 3)
    for process in cluster.processes.values():
        process.kill()
        process.wait()
    wait_until(lambda: not processes_in(tmp_path), "that all have ended", 10)


@pytest.mark.slow
def test_train_killed_nodes_start_again_at_the_same_endpoint(
    cluster: Cluster, tmp_path: Path
) -> None:
    """A scheduler kills all tasks of a job step and starts it again at once."""
    for name in ("a", "b"):
        cluster.start(name, "--nodes", "2")
    wait_for(tmp_path / "run", 12)
    for process in cluster.processes.values():
        process.kill()
        process.wait()
    for name in ("c", "d"):
        cluster.start(name, "--nodes", "2")
    cluster.wait_for_output("c", "training on 2 nodes")
    (tmp_path / "hurry").touch()
    assert (cluster.wait("c"), cluster.wait("d")) == (0, 0)
    assert "resuming from" in cluster.output("c")
    assert cluster.output("c").count("training on 2 nodes") == 1


@pytest.mark.slow
def test_train_signal_to_all_nodes_saves_and_ends(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start("a", "--nodes", "1:2")
    cluster.wait_until_hosting()
    cluster.start("b", "--nodes", "1:2")
    wait_for(tmp_path / "run", 12)
    for process in cluster.processes.values():
        process.send_signal(signal.SIGTERM)
    assert (cluster.wait("a"), cluster.wait("b")) == (REQUEUE, REQUEUE)
    # A node that waits for others ends too.
    cluster.start("a", "--nodes", "2")
    cluster.wait_until_hosting()
    time.sleep(3)
    cluster.processes["a"].send_signal(signal.SIGTERM)
    assert cluster.wait("a") == REQUEUE
