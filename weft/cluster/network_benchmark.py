"""Benchmark of the network between nodes: every pair, and a ring of all ranks.

`measure_network` runs on every node at the same time.  nccl-tests measures several nodes only under
MPI, and hangs if a node does.  So each measurement has its own processes, one per device, which
end with it, and nobody waits without a limit.

The pairs are measured in rounds, as in a tournament: in each round every node has another partner,
so N nodes need N - 1 rounds (N if N is odd).  All ranks of a node send to and receive from those of
its partner.  The nodes meet in a store; each one shows there every second that it is alive.  Nobody
waits for a node that stopped to do so, and the report names it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import statistics
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from weft.cluster.node_facts import NetworkMeasurements
from weft.config.accelerators import GPU
from weft.monitor.process import die_with_parent, single_host_env
from weft.train.environment import is_loopback

# A node that has not shown that it is alive for this long is lost.
ALIVE_SECONDS, LOST_SECONDS = 1.0, 15.0
START_SECONDS = 120.0  # for the processes of all nodes to start
MEASURE_SECONDS = 30.0  # for one pair or ring; then it hangs
BURST_SECONDS = 0.5  # of messages, per pair
MESSAGE_BYTES = {GPU: 1 << 26, "cpu": 1 << 20}
RING_BYTES = {GPU: 1 << 28, "cpu": 1 << 20}
RUN_ID, RING = "network", "ring"  # the prefix of keys in the store; the name of the last group
Result: TypeAlias = dict[str, Any]  # rate in bytes/s, or why there is none: see `measure_group`
NCCL_VARIABLES = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV"}


def pair_rounds(nodes: int) -> Iterator[Sequence[tuple[int, int]]]:
    """Yield rounds of pairs: every pair of nodes once, and no node twice in a round."""
    seats: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        seats.insert(1, seats.pop())


def prefix_store(prefix: str, store: Any) -> Any:
    """Return a store whose keys have a prefix in ``store``."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore(prefix, store)


class NodeGroup:
    """The nodes of a benchmark, in the store in which they meet.

    Args:
        store: the store, with a prefix for this benchmark.
        node: number of this node.
        hosts: names of all nodes by number.
    """

    def __init__(self, store: Any, node: int, hosts: Sequence[str]) -> None:
        self.store, self.node, self.hosts = store, node, hosts
        self._seen: dict[int, tuple[int, float]] = {}  # count of a node, and the time of the newest

    @contextmanager
    def show_alive(self) -> Iterator[None]:
        """Count once a second that this node is alive."""
        is_over = threading.Event()

        def count() -> None:
            with suppress(Exception):  # the store is lost: the others notice too
                while not is_over.wait(ALIVE_SECONDS):
                    self.store.add(f"alive/{self.node}", 1)

        self.store.add(f"alive/{self.node}", 1)
        thread = threading.Thread(target=count, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(2 * ALIVE_SECONDS)

    def is_lost(self, node: int) -> bool:
        """Return True if a node has not shown for some seconds that it is alive."""
        if self.store.check([f"lost/{node}"]):
            return True
        count, now = self.store.add(f"alive/{node}", 0), time.monotonic()
        last_count, since = self._seen.get(node, (-1, now))
        if count != last_count:
            self._seen[node] = (count, now)
        elif now - since > LOST_SECONDS:
            self.store.set(f"lost/{node}", "")
            return True
        return False

    def wait(self, keys: Mapping[int, str], seconds: float) -> int | None:
        """Wait for a key of each node; return the number of a lost or slow node.

        Args:
            keys: the keys by the number of the node that sets them.
            seconds: how long to wait.
        """
        deadline, next_look = time.monotonic() + seconds, 0.0
        while not self.store.check([*keys.values()]):
            if time.monotonic() > next_look:
                next_look = time.monotonic() + ALIVE_SECONDS
                missing = [node for node, key in keys.items() if not self.store.check([key])]
                late = [n for n in missing if self.is_lost(n) or time.monotonic() > deadline]
                if late:
                    return late[0]
            time.sleep(0.05)
        return None


# --------------------------------------------------------------------------- one rank


def benchmark_groups(nodes: int) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield name and nodes of each group to measure: all pairs, then the ring."""
    for pairs in pair_rounds(nodes):
        for a, b in pairs:
            yield f"{a}-{b}", (a, b)
    yield RING, range(nodes)


def measure_rank(
    pipe: Connection, endpoint: str, name: str, size: int, rank: int, local_rank: int, kind: str
) -> None:
    """Measure a group as one of its ranks, in a forked process; send the result.

    Args:
        pipe: for the `Result`; ``broken`` means that this process cannot use its device.
        endpoint: of the store in which the ranks meet.
        name: name of the group.
        size: number of ranks of the group.
        rank: rank of this process in the group.
        local_rank: its rank in its node, and its device.
        kind: cpu, or the type of GPUs.
    """
    import torch

    from weft.cluster.rendezvous import connect_store

    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    kind_of_failure = "broken"
    try:
        device = torch.device(kind, local_rank) if kind == GPU else torch.device(kind)
        if kind == GPU:
            torch.accelerator.set_device_index(device)
            torch.zeros(1, device=device)
        kind_of_failure = "error"
        store = connect_store(endpoint, RUN_ID, (1, size), START_SECONDS)
        store.set_timeout(timedelta(seconds=MEASURE_SECONDS))
        ranks = size // 2 if name != RING else None
        group = prefix_store(f"{RUN_ID}/{name}/group", store)
        result: Result = {"rate": measure_rate(group, rank, size, ranks, device)}
    except Exception as error:  # of any backend
        text = str(error).partition("\n")[0]
        result = {kind_of_failure: f"{type(error).__name__}: {text}"}
    pipe.send(result)
    os._exit(0)  # without the destructors of objects that the parent still has


def measure_rate(store: Any, rank: int, size: int, ranks: int | None, device: Any) -> float:
    """Return bytes/s: of a pair per direction, or the bus bandwidth of all ranks.

    Args:
        store: of the group.
        rank: of this process.
        size: number of ranks.
        ranks: ranks per node of a pair; None: all nodes.
        device: of this rank.
    """
    import torch
    import torch.distributed as dist

    is_gpu = device.type == GPU
    dist.init_process_group(
        f"cpu:gloo,{GPU}:nccl" if is_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=MEASURE_SECONDS - 5),
        device_id=device if is_gpu else None,
    )
    if ranks is None:
        data = torch.zeros(RING_BYTES[device.type] // 4, device=device)
        seconds = _seconds_per_call(lambda: dist.all_reduce(data), device)
        return 2 * (size - 1) / size * RING_BYTES[device.type] / seconds
    partner = (rank + ranks) % size
    out = torch.zeros(MESSAGE_BYTES[device.type], dtype=torch.uint8, device=device)
    into = torch.empty_like(out)

    def exchange() -> None:
        send = dist.P2POp(dist.isend, out, partner)
        receive = dist.P2POp(dist.irecv, into, partner)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    return ranks * MESSAGE_BYTES[device.type] / _seconds_per_call(exchange, device)


def _seconds_per_call(run: Callable[[], object], device: Any) -> float:
    """Return the median seconds of a collective, called equally often by all."""
    import torch
    import torch.distributed as dist

    def timed() -> float:
        start = time.perf_counter()
        run()
        if device.type == GPU:
            torch.accelerator.synchronize(device)
        return time.perf_counter() - start

    timed()  # connects
    count = torch.tensor([BURST_SECONDS / timed()])
    dist.all_reduce(count, dist.ReduceOp.MIN)  # with gloo
    return statistics.median(timed() for _ in range(max(2, min(50, int(count)))))


# --------------------------------------------------------------------------- one node


def measure_network(
    store: Any, endpoint: str, nodes: int, device: str, ranks: int
) -> NetworkMeasurements:
    """Measure the network together with the other nodes of a job.

    Args:
        store: the store at the endpoint.
        endpoint: HOST:PORT of the rendezvous.
        nodes: number of nodes, which call this function at about the same time.
        device: cpu, or the type of GPUs.
        ranks: processes to start on this node.
    """
    shared = prefix_store(RUN_ID, store)
    node = shared.add("nodes", 1) - 1
    shared.set(f"host/{node}", json.dumps([socket.gethostname(), ranks]))
    hosts, errors = _wait_for_nodes(shared, nodes, ranks)
    if errors:
        return NetworkMeasurements(tuple(hosts), ranks, errors=tuple(errors))
    group = NodeGroup(shared, node, hosts)
    with group.show_alive(), tempfile.TemporaryDirectory(prefix="weft-doctor-") as directory:
        variables = NCCL_VARIABLES | {"NCCL_DEBUG_FILE": f"{directory}/nccl-%p"}
        os.environ |= variables | (single_host_env(device) if is_loopback(endpoint) else {})
        own: dict[str, Result] = {}
        for name, members in benchmark_groups(nodes):
            if node in members:
                own[name] = measure_group(group, endpoint, name, members, ranks, device)
            if "broken" in own.get(name, {}):
                own = {RING: own[name]}
                shared.set(f"lost/{node}", "")  # so that nobody waits for it
                break
        logs = tuple(read_network_lines(path) for path in Path(directory).glob("nccl-*"))
        shared.set(f"results/{node}", json.dumps(own))
        results = _collect(group)
        with suppress(RuntimeError):  # the host of the store should end last
            shared.set(f"done/{node}", "")
            _wait_each(group, "done", LOST_SECONDS)
    return summarize(hosts, ranks, results, logs)


def measure_group(
    group: NodeGroup, endpoint: str, name: str, nodes: Sequence[int], ranks: int, device: str
) -> Result:
    """Measure a pair of nodes, or all nodes, with forked processes of this node.

    A collective that hangs can only be ended with its process.  A fork takes hundredths of a second
    and does not import torch again; it is safe because this process never uses a GPU.

    Returns:
        ``rate``: the slowest rank's, in bytes/s.  Or why there is none: ``lost``, a node that does
        not answer; ``error``; or ``broken``, an error of this node with each other node.
    """
    group.store.set(f"{name}/ready/{group.node}", "")
    late = group.wait({node: f"{name}/ready/{node}" for node in nodes}, START_SECONDS)
    if late is not None:
        return {"lost": late}
    context, pipes, processes = multiprocessing.get_context("fork"), [], []
    first, size = list(nodes).index(group.node) * ranks, len(nodes) * ranks
    deadline = time.monotonic() + MEASURE_SECONDS
    try:
        for local_rank in range(ranks):
            receiver, sender = context.Pipe(duplex=False)
            place = (name, size, first + local_rank, local_rank, device)
            process = context.Process(target=measure_rank, args=(sender, endpoint, *place))
            with warnings.catch_warnings():  # Python 3.12 warns of the thread of `show_alive`
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        results = [_receive(pipe, deadline) for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join(5)  # a driver may block it forever
    failed = [result for result in results if "rate" not in result]
    return failed[0] if failed else min(results, key=lambda result: result["rate"])


def _receive(pipe: Connection, deadline: float) -> Result:
    """Return the result of a process, or why there is none."""
    try:
        if pipe.poll(max(0.0, deadline - time.monotonic())):
            result: Result = pipe.recv()
            return result
    except EOFError:
        return {"error": "a process was killed"}
    return {"error": f"no end within {MEASURE_SECONDS:.0f} s"}


def _wait_for_nodes(store: Any, nodes: int, ranks: int) -> tuple[list[str], list[str]]:
    """Wait for all nodes; return their names, and why the benchmark cannot start."""
    deadline = time.monotonic() + START_SECONDS
    keys = [f"host/{node}" for node in range(nodes)]
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(0.1)
    present = [json.loads(store.get(key)) for key in keys if store.check([key])]
    hosts = [host for host, _ in present]
    if len(present) < nodes:
        names = ", ".join(hosts)
        return hosts, [f"only {len(present)} of {nodes} nodes came to the benchmark: {names}"]
    unequal = [f"{host} has {count}" for host, count in present if count != ranks]
    if unequal:
        return hosts, [f"the nodes have different numbers of devices: {', '.join(unequal)}"]
    # Nodes with the same host name, as in containers, need distinct names.
    return [f"{h} (node {n})" if hosts.count(h) > 1 else h for n, h in enumerate(hosts)], []


def read_network_lines(path: Path) -> str:
    """Return the lines of NCCL's log that are about the network."""
    lines = path.read_text("utf-8", "replace").splitlines()
    return "\n".join(line for line in lines if re.search("NET/|Using network|NCCL version", line))


def _wait_each(group: NodeGroup, name: str, seconds: float) -> Iterator[int]:
    """Wait for NAME/NODE of every node; return the nodes that have set it."""
    pending = {node: f"{name}/{node}" for node in range(len(group.hosts))}
    while (late := group.wait(pending, seconds) if pending else None) is not None:
        del pending[late]
    return iter(pending)


def _collect(group: NodeGroup) -> list[dict[str, Result]]:
    """Return the results of every node; empty for a node that is lost."""
    seconds = START_SECONDS + 2 * MEASURE_SECONDS
    present = set(_wait_each(group, "results", seconds))
    return [
        json.loads(group.store.get(f"results/{node}")) if node in present else {}
        for node in range(len(group.hosts))
    ]


def summarize(
    hosts: Sequence[str],
    ranks: int,
    results: Sequence[Mapping[str, Result]],
    logs: Sequence[str] = (),
) -> NetworkMeasurements:
    """Combine the results of all nodes, and name the nodes and pairs without a result.

    Args:
        hosts: names of all nodes by number.
        ranks: ranks per node.
        results: of each node, by name of the group.
        logs: of NCCL, from the ranks of this node.
    """
    pairs: list[tuple[str, str, float]] = []
    failures: list[tuple[tuple[int, int], str]] = []
    broken = {n: result[RING]["broken"] for n, result in enumerate(results) if _is_broken(result)}
    lost = {node for node, result in enumerate(results) if not result}
    for name, nodes in benchmark_groups(len(hosts)):
        own = [results[node].get(name, {"error": "no answer"}) for node in nodes]
        lost |= {result["lost"] for result in own if "lost" in result}
        if name == RING:
            ring = own
        elif all("rate" in result for result in own):
            rate = min(result["rate"] for result in own)
            pairs.append((hosts[nodes[0]], hosts[nodes[1]], rate))
        else:
            reasons = [result["error"] for result in own if "error" in result]
            failures.append(((nodes[0], nodes[1]), reasons[0] if reasons else "no answer"))
    errors = [f"node {hosts[node]} cannot be measured: {text}" for node, text in broken.items()]
    errors += _name_failures(hosts, failures, lost - {*broken}, {*broken})
    has_ring = all("rate" in result for result in ring)
    if not has_ring and not errors:
        reason = next((result["error"] for result in ring if "error" in result), "no answer")
        errors.append(f"all pairs work, but an all-reduce over all nodes fails: {reason}")
    return NetworkMeasurements(
        nodes=tuple(hosts),
        ranks_per_node=ranks,
        pairs=tuple(pairs),
        busbw=min(result["rate"] for result in ring) if has_ring else 0.0,
        errors=tuple(errors),
        nccl_logs=tuple(logs),
    )


def _is_broken(result: Mapping[str, Result]) -> bool:
    return "broken" in result.get(RING, {})


def _name_failures(
    hosts: Sequence[str],
    failures: Sequence[tuple[tuple[int, int], str]],
    lost: Collection[int],
    broken: Collection[int],
) -> Iterator[str]:
    """Yield why pairs have no result: one line for a node all of whose pairs failed.

    Args:
        hosts: names of all nodes by number.
        failures: pairs of nodes, and why they have no result.
        lost: nodes that stopped answering.
        broken: nodes that are reported already.
    """
    counts = Counter(node for pair, _ in failures for node in pair)
    isolated = {n for n in range(len(hosts)) if len(hosts) > 2 and counts[n] == len(hosts) - 1}
    for node in sorted(lost):
        yield f"node {hosts[node]} stopped answering during the measurement"
    for node in sorted(isolated - {*lost} - {*broken}):
        yield f"node {hosts[node]} has no connection to any other node"
    for pair, reason in failures:
        if not {*pair} & (isolated | {*lost} | {*broken}):
            yield f"no connection between {hosts[pair[0]]} and {hosts[pair[1]]}: {reason}"
