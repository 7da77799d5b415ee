"""What is wrong with a node: facts judged, with remedies; first its environment and its host.

A check is a pure function from `weft.cluster.node_facts.Facts` to findings.  `CHECKS` has all, those of
devices and links (`weft.cluster.device_checks`) among them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from weft.cluster import device_checks
from weft.cluster.finding import Check, Finding, bad, note, ok, warning
from weft.cluster.node_facts import WAIT_SECONDS, Facts, Folder, gpus_in, release, whole
from weft.plan.devices import GIB
from weft.train.environment import is_loopback

SKEW = 1.0  # seconds between clocks: heartbeats are missed after six (`weft.cluster.rendezvous`)
CHECKPOINT = 96e9  # bytes of an 8B model with AdamW's moments, to make rates mean something


def examine(facts: Facts) -> list[Finding]:
    """What all checks find, each finding with the name of its check."""
    return [
        replace(finding, check=finding.check or name)
        for name, check in CHECKS.items()
        for finding in check(facts)
    ]


# --------------------------------------------------------------------------- variables


class Variable(NamedTuple):
    """A variable of the environment: which values are wrong, where, why, and what is better."""

    name: str  # a regular expression, as the values
    values: str
    on: str  # '', or 'efa', 'new efa' (with a plug-in after 1.5.0), 'infiniband'
    severity: str
    why: str
    remedy: str = "unset it"


SET = "(?!0$).+"
# EFA's: AWS's cheat sheet in awsome-distributed-training, February 2026; NCCL's: its user guide.
# fmt: off
VARIABLES = tuple(Variable(*row) for row in (
    ("RDMAV_.*", SET, "", "warning", "can break RDMA"),
    ("NCCL_IB_DISABLE", SET, "infiniband", "bad", "lets NCCL take TCP instead of InfiniBand"),
    ("NCCL_IB_DISABLE", SET, "efa", "warning", "does nothing for EFA, which has a plug-in"),
    ("NCCL_PROTO", "(?i)simple", "new efa", "warning", "was for aws-ofi-nccl up to 1.5.0"),
    ("NCCL_PROTO", "(?!(?i:simple)$).+", "", "warning", "overrules what NCCL chooses"),
    ("FI_PROVIDER", "efa", "new efa", "note", "was for aws-ofi-nccl up to 1.5.0"),
    ("FI_PROVIDER", "(?!efa$).+", "efa", "bad", "is not EFA's"),
    ("FI_EFA_USE_DEVICE_RDMA", "0", "efa", "bad", "keeps GPUDirect RDMA off"),
    ("FI_EFA_USE_DEVICE_RDMA", "1", "efa", "note", "is not needed from libfabric 1.18 on"),
    ("FI_EFA_USE_HUGE_PAGE", "(?!0$).+", "efa", "warning",
     "lets fork fail with 'Cannot allocate memory', in workers that read data", "set it to 0"),
    ("FI_EFA_FORK_SAFE", SET, "efa", "note", "has no effect from kernel 5.15 on"),
    ("NCCL_(BUFFSIZE|MIN_CHANNELS|MAX_CHANNELS|NTHREADS|ALGO)", SET, "", "warning",
     "overrules what NCCL chooses"),
    ("NCCL_P2P_DISABLE", SET, "", "warning", "sends between GPUs through the host's memory"),
    ("NCCL_SHM_DISABLE", SET, "", "warning", "may send between ranks through the network"),
    ("NCCL_NET_GDR_LEVEL", "0|LOC", "", "warning", "keeps GPUDirect RDMA off"),
    ("(TORCH_)?NCCL_ASYNC_ERROR_HANDLING", "0", "", "warning", "lets a broken collective hang"),
    ("(TORCH_)?NCCL_BLOCKING_WAIT", SET, "", "warning", "has the host wait for collectives"),
    ("CUDA_LAUNCH_BLOCKING", SET, "", "warning", "has the host wait for every kernel"),
    ("NCCL_DEBUG", "INFO|TRACE", "", "note", "fills the logs"),
))
# fmt: on


def check_variables(facts: Facts) -> Iterator[Finding]:
    """Variables that harm here, by the table above, and those that name what is not there."""
    old = facts.ofi_plugin not in ("", "?") and release(facts.ofi_plugin) <= (1, 5, 0)
    places = {"", "efa" if facts.has_efa else "infiniband" if facts.adapters else ""}
    places |= {"new efa"} if facts.has_efa and not old else set()
    wrong = list(_check_interfaces(facts))
    for name, value in sorted(facts.variables.items()):
        for row in VARIABLES:
            fits = re.fullmatch(row.name, name) and re.fullmatch(row.values, value)
            if fits and row.on in places:
                wrong.append(Finding(row.severity, f"{name}={value} {row.why}", row.remedy))
    there = ", ".join(sorted(facts.variables)) or "none of NCCL, libfabric or gloo"
    yield from wrong or [ok(f"{there}: nothing that harms")]


def _check_interfaces(facts: Facts) -> Iterator[Finding]:
    """What has to fit to this node."""
    nccl, gloo, threads = (
        facts.variables.get(name, "")
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")
    )
    there = ", ".join(facts.interfaces)
    if nccl and not interfaces_for(nccl, facts.interfaces):
        seen = f"NCCL_SOCKET_IFNAME={nccl} is none of {there}: NCCL will not start"
        yield bad(seen, "unset it, or leave out only what is no network: ^docker,lo,veth")
    if gloo and not set(gloo.split(",")) <= set(facts.interfaces):
        yield bad(f"GLOO_SOCKET_IFNAME={gloo} is none of {there}", "name one that is there")
    elif gloo == "lo" and facts.nodes > 1 and not is_loopback(facts.endpoint):
        seen = "GLOO_SOCKET_IFNAME=lo: other nodes are not reached there"
        yield bad(seen, "name the interface of the network")
    if whole(threads) > facts.usable > 0:
        seen = f"OMP_NUM_THREADS={threads} is more than the {facts.usable} cores of this process"
        yield warning(seen, "unset it: weft shares the cores among ranks")


def interfaces_for(value: str, there: Sequence[str]) -> list[str]:
    """Those that NCCL_SOCKET_IFNAME allows: prefixes; with '=' whole names; with '^' the others."""
    names = tuple(value.lstrip("^=").split(","))
    exact = "=" in value[:2]
    matching = [one for one in there if (one in names if exact else one.startswith(names))]
    return [one for one in there if one not in matching] if value[0] == "^" else matching


# --------------------------------------------------------------------------- the host


def gib(size: float) -> str:
    """'63.5 GiB' of bytes."""
    return f"{size / GIB:.3g} GiB"


def check_memory(facts: Facts) -> Iterator[Finding]:
    """The host's memory, against that of its GPUs."""
    if not facts.memory:
        return
    seen = f"{gib(facts.memory)}, {gib(facts.available)} available"
    if facts.limit:
        seen += f", of which the control group allows {gib(facts.limit)}"
    gpus = sum(whole(gpu["memory"]) * 2**20 for gpu in gpus_in(facts.gpus))
    room = min(facts.limit or facts.memory, facts.available)
    if room < gpus / 2:
        # A copy of parameters and optimizer state waits there while a checkpoint is written.
        remedy = "ask the scheduler for more memory (Slurm: --mem=0)"
        yield warning(
            f"{seen}; the GPUs have {gib(gpus)}", f"{remedy}, or checkpoint.async_save false"
        )
    elif room < facts.memory / 10:
        yield warning(seen, "see who takes it; ask the scheduler for more")
    else:
        yield ok(seen)


def check_shm(facts: Facts) -> Iterator[Finding]:
    """Ranks of a node speak through /dev/shm, and so do processes that load data."""
    if not facts.shm:
        return
    seen = f"/dev/shm has {gib(facts.shm)}, {gib(facts.shm_free)} free"
    if facts.shm_free < 2**28:
        remedy = "docker --shm-size or --ipc=host; Kubernetes: an emptyDir of medium Memory there"
        yield bad(f"{seen}: NCCL and gloo need more", remedy)
    elif facts.shm_free < 4 * GIB and facts.gpus:
        remedy = "8 GiB or more: docker --shm-size, Kubernetes: an emptyDir of medium Memory"
        yield warning(seen, remedy)
    else:
        yield ok(seen)


def check_limits(facts: Facts) -> Iterator[Finding]:
    """How much memory a process may lock, and how many files it may open."""
    locked = f"{facts.memlock // 1024:,} KiB"
    too_little = facts.memlock != -1 and bool(facts.adapters)
    if too_little:
        remedy = "ulimit -l unlimited; docker --ulimit memlock=-1; LimitMEMLOCK in slurmd.service"
        yield bad(f"memlock is {locked}: adapters cannot register memory", remedy)
    if 0 <= facts.nofile < 4096:
        remedy = "ulimit -n 65536: each rank has sockets to its peers, and files of the data"
        yield warning(f"{facts.nofile:,} open files", remedy)
    elif not too_little:
        files = "any number of" if facts.nofile == -1 else f"{facts.nofile:,}"
        memory = "any" if facts.memlock == -1 else f"{locked} of"
        yield ok(f"{files} open files, {memory} locked memory")


def check_cores(facts: Facts) -> Iterator[Finding]:
    """One that Slurm or a container gives few cores to is the usual cause of a slow GPU."""
    if not facts.usable:
        return
    room = min(facts.usable, facts.quota or facts.usable)
    seen = f"{room:g} of {facts.cores} may be used"
    if room < facts.usable:
        seen += " (by the control group)"
    gpus = len(gpus_in(facts.gpus))
    if room < 4 * gpus:
        remedy = "ask for more (Slurm: --cpus-per-task or --exclusive); each GPU wants 4 or more"
        seen += f", for {gpus} GPUs"
        yield bad(seen, remedy) if room < gpus else warning(seen, remedy)
    else:
        yield ok(seen)


def check_clock(facts: Facts) -> Iterator[Finding]:
    """Whether the clock follows another one, as heartbeats between nodes need it."""
    if facts.clock_in_step:
        yield ok("the clock follows another one")
    elif facts.clock_in_step is False:
        seen = "the kernel's clock follows no other one"
        remedy = "start chrony or systemd-timesyncd: nodes tell who is gone by their clocks"
        yield warning(seen, remedy) if facts.nodes > 1 else note(seen, remedy)


# --------------------------------------------------------------------------- storage

NETWORK = r"nfs4?|lustre|gpfs|beegfs|ceph|cifs|smb3|glusterfs|9p|virtiofs|afs|wekafs|fuse\..*"


def check_folders(facts: Facts) -> Iterator[Finding]:
    """Speed, room, locks and links of the job's folders, and who shares them."""
    for one in facts.folders:
        apart = facts.nodes > 1 and not is_loopback(facts.endpoint)
        rates = rates_of(one.write, one.read)
        wrong = list(_check_folder(one, apart, rates))
        for finding in wrong or [ok(f"{rates}, {gib(one.free)} free")]:
            yield replace(finding, check=f"{one.key} ({one.kind})")


def rates_of(write: float, read: float) -> str:
    """Bytes/s as people read them."""
    return f"write {write / 1e6:,.0f} MB/s, read {read / 1e6:,.0f} MB/s"


def _check_folder(one: Folder, apart: bool, rates: str) -> Iterator[Finding]:
    """What is wrong with a folder, if the job's nodes are machines ``apart``."""
    on_network = re.fullmatch(NETWORK, one.kind)
    if one.error:
        remedy = "use another folder, or ask who runs the file system"
        yield bad(f"{one.path}: {one.error}", remedy)
        return
    if one.key == "run.dir" and not one.locks:
        seen = "has no locks: two runs in one folder would spoil each other's work"
        yield bad(seen, "mount it with locks (Lustre: -o flock; NFS: without nolock)")
    elif re.search(r"\b(nolock|local_lock=(all|flock)|localflock)\b", one.options):
        seen = "locks hold on this node only: another node does not see that a run owns its folder"
        yield warning(seen, "mount it without nolock, local_lock and localflock")
    if one.key in ("run.dir", "checkpoint.dir") and not one.links:
        yield bad("has no hard links, by which checkpoints are claimed", "use another folder")
    if one.free < 10 * GIB or 0 <= one.files < 10_000:
        files = "" if one.files < 0 else f" and {one.files:,} files"
        yield warning(f"room for {gib(one.free)}{files}", "remove something")
    if one.key == "checkpoint.local_dir":
        if on_network:
            seen = "is on the network, which it is to spare"
            yield warning(seen, "name memory or a disk of the node")
    elif apart and not on_network:
        seen, remedy = "each node has its own", "name a folder that all nodes share"
        yield warning(seen, remedy) if one.key == "data.cache_dir" else bad(seen, remedy)
    elif one.kind == "tmpfs":
        yield note("is memory: gone when the machine is", "name a folder on a disk")
    if one.write < 100e6:
        minutes = CHECKPOINT / max(one.write, 1) / 60
        seen = f"{rates}: a checkpoint of 8B parameters takes {minutes:,.0f} min"
        yield warning(seen, "checkpoint.local_dir keeps newer state on the node; docs/storage.md")


def check_stores(facts: Facts) -> Iterator[Finding]:
    """Speed of an object store, and whether it lets one writer of several win."""
    for one in facts.stores:
        rates = rates_of(one.write, one.read)
        seen = f"{one.url}: {rates}, a small put {one.seconds * 1000:.0f} ms"
        if one.error:
            remedy = "see AWS_ENDPOINT_URL, AWS_PROFILE, ~/.aws, and what the role may do"
            found = bad(f"{one.url}: {one.error}", remedy)
        elif not one.once:
            rule = "but it overwrites what is to be put once: two runs could claim one checkpoint"
            found = bad(f"{seen}, {rule}", "use a store with conditional writes")
        else:
            found = ok(seen)
        yield replace(found, check=one.key)


# --------------------------------------------------------------------------- other nodes


def check_meeting(facts: Facts) -> Iterator[Finding]:
    """Where nodes are to meet, and what this one's own name leads to."""
    if facts.meeting in ("free", "answers"):
        yield ok(f"{facts.endpoint} {'answers' if facts.meeting == 'answers' else 'is free here'}")
    elif facts.meeting:
        remedy = "the first node must listen there, and a firewall let it through, 29400 by itself"
        yield bad(f"{facts.endpoint}: {facts.meeting}", remedy)
    alone = facts.address.startswith("127.") and "GLOO_SOCKET_IFNAME" not in facts.variables
    if facts.nodes > 1 and not is_loopback(facts.endpoint) and alone:
        seen = f"{facts.host} is {facts.address} to itself: gloo would wait there for others"
        yield bad(seen, "set GLOO_SOCKET_IFNAME to the network's interface, or mend /etc/hosts")


def check_others(facts: Facts) -> Iterator[Finding]:
    """Clocks and versions of all nodes."""
    if not facts.others:
        return
    hosts = ", ".join(node.host for node in facts.others)
    if (came := len(facts.others)) < facts.nodes:
        seen = f"{came} of {facts.nodes} came within {WAIT_SECONDS:.0f} s: {hosts}"
        remedy = "start it on every node at about the same time"
        yield bad(seen, remedy) if came < facts.least_nodes else note(seen, remedy)
    for what in sorted({name for node in facts.others for name in node.versions}):
        if len({node.versions.get(what, "none") for node in facts.others}) > 1:
            seen = "; ".join(f"{n.host} has {what} {n.versions.get(what)}" for n in facts.others)
            yield bad(seen, "install the same on every node")
    ahead = [node.ahead for node in facts.others]
    doubt = max(node.doubt for node in facts.others)
    apart = max(ahead) - min(ahead)
    seen = f"clocks of {hosts} are {apart * 1000:.1f} ms apart, give or take {doubt * 1000:.1f}"
    if apart - doubt > SKEW:
        yield bad(seen, "start chrony on every node: the living look dead")
    else:
        yield ok(seen)


# By the name that is shown, in the order of the screen.
CHECKS: dict[str, Check] = {
    "versions": device_checks.check_versions,
    "devices": device_checks.check_devices,
    "health": device_checks.check_health,
    "clocks": device_checks.check_clocks,
    "speed": device_checks.check_speed,
    "topology": device_checks.check_topology,
    "all-reduce": device_checks.check_all_reduce,
    "peer copies": device_checks.check_copies,
    "nccl": device_checks.check_nccl,
    "rdma": device_checks.check_rdma,
    "efa": device_checks.check_efa,
    "variables": check_variables,
    "memory": check_memory,
    "shared memory": check_shm,
    "limits": check_limits,
    "cores": check_cores,
    "time": check_clock,
    "folders": check_folders,
    "stores": check_stores,
    "meeting": check_meeting,
    "nodes": check_others,
}
