"""Benchmark of the network between nodes: every pair, and a ring of all ranks.

`measure_network` runs on every node at the same time.  nccl-tests measures several nodes only under
MPI, and hangs if a node does.  So each measurement has its own processes, one per device, which
end with it.

The pairs are measured in rounds, as in a tournament: in each round every node has another partner,
so N nodes need N - 1 rounds (N if N is odd).  All ranks of a node send to and receive from those of
its partner.  The last round measures all nodes.  After each round the nodes exchange its results in
a store; a node that has none after some time is left out from then on, and the report names it.
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
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import combinations
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from weft.config.accelerators import GPU
from weft.doctor.node_facts import NetworkMeasurements
from weft.monitor.process import die_with_parent, single_host_env
from weft.preparation.environment import is_loopback

START_SECONDS = 120.0  # for all nodes to come
MEASURE_SECONDS = 30.0  # for one pair or ring; then it hangs
LATE_SECONDS = 15.0  # for the results of a node after this time; then it is lost
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


def exchange(
    store: Any, name: str, node: int, own: Any, nodes: Collection[int], seconds: float
) -> dict[int, Any]:
    """Give ``own`` to the other nodes; return the values that ``nodes`` gave in time."""
    store.set(f"{name}/{node}", json.dumps(own))
    deadline, missing = time.monotonic() + seconds, {*nodes}
    while missing and time.monotonic() < deadline:
        missing -= {other for other in missing if store.check([f"{name}/{other}"])}
        time.sleep(0.05)
    return {n: json.loads(store.get(f"{name}/{n}")) for n in nodes if n not in missing}


# --------------------------------------------------------------------------- one rank


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

    from weft.preparation.rendezvous_store import connect_store

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
        store = connect_store(endpoint, RUN_ID, (1, size), MEASURE_SECONDS)
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
    """Return bytes/s: of a pair of nodes with ``ranks`` each, or (None) of all ranks.

    The rate of a pair is that of each direction, the rate of all ranks their bus bandwidth.
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

    def swap() -> None:
        send = dist.P2POp(dist.isend, out, partner)
        receive = dist.P2POp(dist.irecv, into, partner)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    return ranks * MESSAGE_BYTES[device.type] / _seconds_per_call(swap, device)


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
    node, present = shared.add("nodes", 1) - 1, [*range(nodes)]
    own_host = [socket.gethostname(), ranks]
    answers = exchange(shared, "host", node, own_host, present, START_SECONDS)
    hosts = [host for host, _ in answers.values()]
    unequal = [f"{host} has {count}" for host, count in answers.values() if count != ranks]
    error = ""
    if len(hosts) < nodes:
        error = f"only {len(hosts)} of {nodes} nodes came to the benchmark: {', '.join(hosts)}"
    elif unequal:
        error = f"the nodes have different numbers of devices: {', '.join(unequal)}"
    if error:
        return NetworkMeasurements(tuple(hosts), ranks, errors=(error,))
    # Nodes with the same host name, as in containers, need distinct names.
    hosts = [f"{h} (node {n})" if hosts.count(h) > 1 else h for n, h in enumerate(hosts)]
    results: list[dict[str, Result]] = [{} for _ in hosts]
    usable = {*present}
    rounds = [*pair_rounds(nodes), [tuple(range(nodes))]]
    with tempfile.TemporaryDirectory(prefix="weft-doctor-") as directory:
        variables = NCCL_VARIABLES | {"NCCL_DEBUG_FILE": f"{directory}/nccl-%p"}
        os.environ |= variables | (single_host_env(device) if is_loopback(endpoint) else {})
        for number, groups in enumerate(rounds):
            members = next((group for group in groups if node in group), ())
            name = RING if groups is rounds[-1] else "-".join(map(str, members))
            own: Result = {}
            if members and usable.issuperset(members):
                own = measure_group(endpoint, name, node, members, ranks, device)
            seconds = MEASURE_SECONDS + LATE_SECONDS
            answers = exchange(shared, str(number), node, [name, own], present, seconds)
            present = [*answers]
            for other, (group, result) in answers.items():
                results[other][group] = result
            usable &= {n for n, (_, result) in answers.items() if "broken" not in result}
        with suppress(RuntimeError):  # the host of the store should end last
            exchange(shared, "done", node, None, present, LATE_SECONDS)
        logs = tuple(read_network_lines(path) for path in Path(directory).glob("nccl-*"))
    return summarize(hosts, ranks, results, logs)


def measure_group(
    endpoint: str, name: str, node: int, nodes: Sequence[int], ranks: int, device: str
) -> Result:
    """Measure a pair of nodes, or all nodes, with forked processes of this node.

    A collective that hangs can only be ended with its process.  A fork takes hundredths of a second
    and does not import torch again; it is safe because this process never uses a GPU.

    Returns:
        ``rate``: the slowest rank's, in bytes/s.  Or why there is none: ``error``; or ``broken``,
        an error of this node with each other node.
    """
    context, pipes, processes = multiprocessing.get_context("fork"), [], []
    first, size = list(nodes).index(node) * ranks, len(nodes) * ranks
    deadline = time.monotonic() + MEASURE_SECONDS
    try:
        for local_rank in range(ranks):
            receiver, sender = context.Pipe(duplex=False)
            place = (name, size, first + local_rank, local_rank, device)
            process = context.Process(target=measure_rank, args=(sender, endpoint, *place))
            with warnings.catch_warnings():  # Python 3.12 warns of the threads of the store
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        results = [_receive(pipe, deadline) for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join(1)  # a driver may block it forever
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


def read_network_lines(path: Path) -> str:
    """Return the lines of NCCL's log that are about the network."""
    lines = path.read_text("utf-8", "replace").splitlines()
    return "\n".join(line for line in lines if re.search("NET/|Using network|NCCL version", line))


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
        results: of each node, by name of the group; a lost node has none of the ring.
        logs: of NCCL, from the ranks of this node.
    """
    pairs: list[tuple[str, str, float]] = []
    failures: dict[tuple[int, int], str] = {}
    for a, b in combinations(range(len(hosts)), 2):
        both = [results[node].get(f"{a}-{b}", {}) for node in (a, b)]
        if all("rate" in result for result in both):
            pairs.append((hosts[a], hosts[b], min(result["rate"] for result in both)))
        else:
            failures[a, b] = _find_error(both)
    broken = {
        n: r["broken"] for n, own in enumerate(results) for r in own.values() if "broken" in r
    }
    lost = {n for n, own in enumerate(results) if RING not in own}
    counts = Counter(node for pair in failures for node in pair)
    known = {*broken, *lost}
    isolated = {n for n, c in counts.items() if len(hosts) > 2 and c == len(hosts) - 1} - known
    known |= isolated
    errors = [f"node {hosts[n]} cannot be measured: {text}" for n, text in broken.items()]
    errors += [f"node {hosts[n]} stopped answering during the measurement" for n in sorted(lost)]
    errors += [f"node {hosts[n]} has no connection to any other node" for n in sorted(isolated)]
    errors += [
        f"no connection between {hosts[a]} and {hosts[b]}: {reason}"
        for (a, b), reason in failures.items()
        if not {a, b} & known
    ]
    ring = [own.get(RING, {}) for own in results]
    has_ring = all("rate" in result for result in ring)
    if not has_ring and not errors:
        errors.append(
            f"all pairs work, but an all-reduce over all nodes fails: {_find_error(ring)}"
        )
    return NetworkMeasurements(
        nodes=tuple(hosts),
        ranks_per_node=ranks,
        pairs=tuple(pairs),
        busbw=min(result["rate"] for result in ring) if has_ring else 0.0,
        errors=tuple(errors),
        nccl_logs=tuple(logs),
    )


def _find_error(results: Sequence[Result]) -> str:
    return next((result["error"] for result in results if "error" in result), "no answer")
