"""Checks of a node's host, storage and peers.

A check is a pure function from `weft.doctor.node_facts.Facts` to findings.  `CHECKS` lists all
checks, including those of devices (`weft.doctor.device_checks`), of the network
(`weft.doctor.network_checks`) and of environment variables (`weft.doctor.variable_checks`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from weft.checkpoint.lustre import describe_layout, has_one_stripe
from weft.doctor import device_checks, network_checks
from weft.doctor.node_facts import (
    WAIT_SECONDS,
    Check,
    Directory,
    Facts,
    Finding,
    bad,
    note,
    ok,
    warning,
)
from weft.doctor.variable_checks import check_variables
from weft.planning.devices import GIB
from weft.preparation.environment import is_loopback

# Seconds; the rendezvous gives a node up after six (`weft.supervision.rendezvous`).
MAX_CLOCK_SKEW = 1.0
CHECKPOINT_BYTES = 96e9  # an 8B model with AdamW's moments, as an example


def run_checks(facts: Facts) -> list[Finding]:
    """Run all checks; return their findings, each with the name of its check."""
    return [
        replace(finding, check=finding.check or name)
        for name, check in CHECKS.items()
        for finding in check(facts)
    ]


# --------------------------------------------------------------------------- the host


def format_gib(size: float) -> str:
    """Format bytes: '63.5 GiB'."""
    return f"{size / GIB:.3g} GiB"


def check_memory(facts: Facts) -> Iterator[Finding]:
    """Compare the host's memory with that of its GPUs."""
    if not facts.memory:
        return
    observation = f"{format_gib(facts.memory)}, {format_gib(facts.available)} available"
    if facts.limit:
        observation += f", limited to {format_gib(facts.limit)} by the cgroup"
    gpus = sum(gpu.memory for gpu in facts.gpus)
    room = min(facts.limit or facts.memory, facts.available)
    if room < gpus / 2:
        # An asynchronous checkpoint holds a copy of parameters and optimizer state there.
        remedy = "request more memory (Slurm: --mem=0), or set checkpoint.async_save=false"
        yield warning(f"{observation}; the GPUs have {format_gib(gpus)}", remedy)
    elif room < facts.memory / 10:
        yield warning(observation, "end the processes that use it, or request more memory")
    else:
        yield ok(observation)


def check_shm(facts: Facts) -> Iterator[Finding]:
    """Check the size of /dev/shm, which the ranks of a node and data workers use."""
    if not facts.shm:
        return
    observation = f"/dev/shm has {format_gib(facts.shm)}, {format_gib(facts.shm_free)} free"
    if facts.shm_free < 2**28:
        remedy = "docker --shm-size or --ipc=host; Kubernetes: an emptyDir of medium Memory there"
        yield bad(f"{observation}: NCCL and gloo need more", remedy)
    elif facts.shm_free < 4 * GIB and facts.gpus:
        remedy = "8 GiB or more: docker --shm-size, Kubernetes: an emptyDir of medium Memory"
        yield warning(observation, remedy)
    else:
        yield ok(observation)


def check_limits(facts: Facts) -> Iterator[Finding]:
    """Check the limits of locked memory and of open files."""
    locked = f"{facts.memlock // 1024:,} KiB"
    is_memlock_low = facts.memlock != -1 and bool(facts.adapters)
    if is_memlock_low:
        remedy = "ulimit -l unlimited; docker --ulimit memlock=-1; LimitMEMLOCK in slurmd.service"
        yield bad(f"memlock is {locked}: adapters cannot register memory", remedy)
    if 0 <= facts.nofile < 4096:
        remedy = "ulimit -n $(ulimit -Hn); docker --ulimit nofile=65536; LimitNOFILE in "
        remedy += "slurmd.service: each rank opens sockets to its peers, and data files"
        yield warning(f"at most {facts.nofile:,} open files", remedy)
    elif not is_memlock_low:
        files = "unlimited" if facts.nofile == -1 else f"at most {facts.nofile:,}"
        memory = "unlimited" if facts.memlock == -1 else f"at most {locked} of"
        yield ok(f"{files} open files, {memory} locked memory")


def check_cores(facts: Facts) -> Iterator[Finding]:
    """Check the number of usable cores: too few are the usual cause of a slow GPU."""
    if not facts.usable:
        return
    room = min(facts.usable, facts.quota or facts.usable)
    observation = f"{room:g} of {facts.cores} usable"
    if room < facts.usable:
        observation += " (limited by the cgroup)"
    gpus = len(facts.gpus)
    if room < 4 * gpus:
        remedy = "request at least 4 cores per GPU (Slurm: --cpus-per-task or --exclusive)"
        observation += f", for {gpus} GPUs"
        yield bad(observation, remedy) if room < gpus else warning(observation, remedy)
    else:
        yield ok(observation)


def check_clock(facts: Facts) -> Iterator[Finding]:
    """Check that the clock is synchronized, as the heartbeats between nodes require."""
    if facts.is_clock_synchronized:
        yield ok("the clock is synchronized")
    elif facts.is_clock_synchronized is False:
        observation = "the kernel's clock is not synchronized"
        remedy = "start chrony or systemd-timesyncd: nodes detect lost nodes by their clocks"
        yield warning(observation, remedy) if facts.nodes > 1 else note(observation, remedy)


# --------------------------------------------------------------------------- storage

SLOW_RENAMES = 10.0  # files created and renamed per second; a disk reaches thousands
NETWORK_FILE_SYSTEMS = (
    r"nfs4?|lustre|gpfs|beegfs|ceph|cifs|smb3|glusterfs|9p|virtiofs|afs|wekafs|fuse\..*"
)


def check_directories(facts: Facts) -> Iterator[Finding]:
    """Check speed, space, locks, links, stripes and sharing of the directories."""
    if facts.released[0]:
        observation = "{:,} of {:,} files have their contents only in S3".format(*facts.released)
        remedy = "weft requests them when it prepares the data; docs/fsx.md"
        yield note(observation, remedy, check="data.path (lustre)")
    for directory in facts.directories:
        is_distributed = facts.nodes > 1 and not is_loopback(facts.endpoint)
        rates = format_rates(directory.write, directory.read)
        findings = list(_check_directory(directory, is_distributed, rates))
        layout = f", {describe_layout(directory.layout)}" if directory.layout else ""
        for finding in findings or [ok(f"{rates}, {format_gib(directory.free)} free{layout}")]:
            yield replace(finding, check=f"{directory.key} ({directory.kind})")


def format_rates(write: float, read: float) -> str:
    """Format two rates in bytes/s."""
    return f"write {write / 1e6:,.0f} MB/s, read {read / 1e6:,.0f} MB/s"


def _check_directory(d: Directory, is_distributed: bool, rates: str) -> Iterator[Finding]:
    """Check one directory; ``is_distributed``: the job's nodes are different machines."""
    is_network = re.fullmatch(NETWORK_FILE_SYSTEMS, d.kind)
    if d.error:
        remedy = "use another directory, or ask the administrator of the file system"
        yield bad(f"{d.path}: {d.error}", remedy)
        return
    if d.key == "run.dir" and not d.locks:
        observation = "no file locks: two runs in one directory would overwrite each other's files"
        yield bad(observation, "mount it with locks (Lustre: -o flock; NFS: without nolock)")
    elif re.search(r"\b(nolock|local_lock=(all|flock)|localflock)\b", d.options):
        observation = (
            "locks work on this node only: another node may start a run in the same directory"
        )
        yield warning(observation, "mount it without nolock, local_lock and localflock")
    if d.key in ("run.dir", "checkpoint.dir") and not d.links:
        yield bad("no hard links, which checkpoints require", "use another directory")
    if d.free < 10 * GIB or 0 <= d.files < 10_000:
        files = "" if d.files < 0 else f" and {d.files:,} inodes"
        yield warning(f"only {format_gib(d.free)}{files} free", "delete files")
    if d.key == "checkpoint.local_dir":
        if is_network:
            observation = "is a network file system, so local checkpoints save no network traffic"
            yield warning(observation, "use memory or a disk of the node")
    elif is_distributed and not is_network:
        grade = warning if d.key == "data.cache_dir" else bad
        yield grade("each node has its own directory", "use a directory that all nodes share")
    elif d.kind == "tmpfs":
        yield note("is in memory: a reboot deletes it", "use a directory on a disk")
    if d.write < 100e6:
        minutes = CHECKPOINT_BYTES / max(d.write, 1) / 60
        observation = f"{rates}: a checkpoint of 8B parameters takes {minutes:,.0f} min"
        remedy = "checkpoint.local_dir keeps newer state on the node; docs/storage.md"
        yield warning(observation, remedy)
    if d.key in ("run.dir", "checkpoint.dir") and has_one_stripe(d.layout):
        observation = "one stripe: each file is on one storage target, which limits its speed"
        remedy = "let weft create checkpoint.dir, or use lfs setstripe on it before; docs/fsx.md"
        yield note(observation, remedy)
    if 0 < d.renames < SLOW_RENAMES:
        observation = f"{d.renames:.0f} files created and renamed per second, which is slow"
        yield warning(observation, "provision more metadata IOPS (FSx), or use another directory")


def check_stores(facts: Facts) -> Iterator[Finding]:
    """Check the speed of an object store, and that it refuses to overwrite an object."""
    for store in facts.stores:
        rates = format_rates(store.write, store.read)
        observation = f"{store.url}: {rates}, {store.seconds * 1000:.0f} ms per small put"
        if store.error:
            remedy = "check AWS_ENDPOINT_URL, AWS_PROFILE, ~/.aws, and the permissions of the role"
            finding = bad(f"{store.url}: {store.error}", remedy)
        elif not store.once:
            rule = "but it ignores conditional writes: two runs could claim one checkpoint"
            finding = bad(f"{observation}, {rule}", "use a store with conditional writes")
        else:
            finding = ok(observation)
        yield replace(finding, check=store.key)


# --------------------------------------------------------------------------- other nodes


def check_rendezvous(facts: Facts) -> Iterator[Finding]:
    """Check the rendezvous endpoint, and the address of this host's own name."""
    if facts.rendezvous_status == "answers":
        yield ok(f"{facts.endpoint} answers")
    elif facts.rendezvous_status == "free":
        yield ok(f"{facts.endpoint} is free here")
    elif facts.rendezvous_status:
        remedy = "let the first node listen there (default port 29400), and open the firewall"
        yield bad(f"{facts.endpoint}: {facts.rendezvous_status}", remedy)
    is_local = facts.address.startswith("127.") and "GLOO_SOCKET_IFNAME" not in facts.variables
    if facts.nodes > 1 and not is_loopback(facts.endpoint) and is_local:
        address = f"{facts.address}, where other nodes cannot reach gloo"
        remedy = "set GLOO_SOCKET_IFNAME to the network's interface, or fix /etc/hosts"
        yield bad(f"{facts.host} resolves to {address}", remedy)


def check_nodes(facts: Facts) -> Iterator[Finding]:
    """Check that all nodes joined, with equal versions and synchronized clocks."""
    if not facts.joined_nodes:
        return
    hosts = ", ".join(node.host for node in facts.joined_nodes)
    if (joined := len(facts.joined_nodes)) < facts.nodes:
        observation = f"{joined} of {facts.nodes} joined within {WAIT_SECONDS:.0f} s: {hosts}"
        remedy = "start weft doctor on every node at about the same time"
        yield bad(observation, remedy) if joined < facts.min_nodes else note(observation, remedy)
    for package in sorted({name for node in facts.joined_nodes for name in node.versions}):
        versions = [node.versions.get(package) for node in facts.joined_nodes]
        if len(set(versions)) > 1:
            pairs = zip(facts.joined_nodes, versions, strict=True)
            texts = (f"{node.host} has {package} {version}" for node, version in pairs)
            yield bad("; ".join(texts), "install the same version on every node")
    offsets = [node.clock_offset for node in facts.joined_nodes]
    uncertainty = max(node.clock_uncertainty for node in facts.joined_nodes)
    skew = max(offsets) - min(offsets)
    error = f"(uncertainty {uncertainty * 1000:.1f} ms)"
    observation = f"clocks of {hosts} differ by {skew * 1000:.1f} ms {error}"
    is_skewed = skew - uncertainty > MAX_CLOCK_SKEW
    remedy = "start chrony on every node: live nodes look lost"
    yield bad(observation, remedy) if is_skewed else ok(observation)


# By displayed name, in the order of the report.
CHECKS: dict[str, Check] = {
    "versions": device_checks.check_versions,
    "devices": device_checks.check_devices,
    "health": device_checks.check_health,
    "DCGM": device_checks.check_dcgm,
    "clocks": device_checks.check_clocks,
    "speed": device_checks.check_speed,
    "topology": device_checks.check_topology,
    "all-reduce": device_checks.check_all_reduce,
    "peer copies": device_checks.check_copies,
    "nccl": device_checks.check_nccl,
    "rdma": network_checks.check_rdma,
    "efa": network_checks.check_efa,
    "versions of EFA": network_checks.check_efa_versions,
    "variables": check_variables,
    "memory": check_memory,
    "shared memory": check_shm,
    "limits": check_limits,
    "cores": check_cores,
    "time": check_clock,
    "directories": check_directories,
    "stores": check_stores,
    "rendezvous": check_rendezvous,
    "nodes": check_nodes,
    "transport": network_checks.check_transport,
    "network": network_checks.check_network,
}
