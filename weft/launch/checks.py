"""What is wrong with a node: facts judged, with remedies.

A check is a pure function from `weft.launch.probes.Facts` to findings.  What is *bad* lets a run
fail, hang, be wrong, or be less than half as fast as its hardware: a node with a bad finding does
not train (`weft.launch.doctor.preflight`).  A *warning* may cost speed, or a run some day; a *note*
is worth knowing.  What is not known is not judged.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.launch.probes import (
    TIMED_OUT,
    Facts,
    Folder,
    gpus_in,
    topology_in,
)
from weft.plan.devices import CPU, GIB, Device, device_called, device_named
from weft.train.where import is_loopback

SEVERITIES = ("ok", "note", "warning", "bad")
# Of what the table of devices has: below the first it is worth a word, below the second bad.
SLOW, BROKEN = 0.8, 0.5
BEHIND = 0.9  # of the median of the node's devices: one that all the others will wait for
SKEW = 1.0  # seconds between clocks: heartbeats are missed after six (`weft.launch.nodes`)
CHECKPOINT = 96e9  # bytes of an 8B model with AdamW's moments, to make rates mean something
WAIT = 180.0  # seconds for devices at work, and for other nodes: many on a busy machine


@dataclass(frozen=True)
class Finding:
    """What a check has seen, and what to do about it (nothing, if it is ok)."""

    check: str
    severity: str
    seen: str
    remedy: str = ""


Check = Callable[[Facts], Iterator[Finding]]


def examine(facts: Facts) -> list[Finding]:
    """What all checks find."""
    return [finding for check in CHECKS for finding in check(facts)]


# --------------------------------------------------------------------------- what runs on what

# Least drivers of a CUDA that torch was built for: CUDA's release notes, 'minor version
# compatibility'.
DRIVERS = {11: (450, 80), 12: (525, 60), 13: (580, 0)}
# Releases of NCCL that are known to go wrong, from and to, with whoever says so.
NCCL = (
    (
        (2, 18, 1),
        (2, 18, 1),
        "may corrupt sums where a NIC shares its switch with one GPU",
        "NVIDIA",
    ),
    ((2, 28, 3), (2, 28, 8), "is one that NVIDIA's resiliency extension warns of", "its README"),
)


def numbers(text: str) -> tuple[int, ...]:
    """'535.161.08' -> (535, 161, 8)."""
    return tuple(int(n) for n in re.findall(r"\d+", text)[:3])


def check_versions(facts: Facts) -> Iterator[Finding]:
    gpus = gpus_in(facts.gpus)
    seen = f"torch {facts.torch or 'is missing'}, Python {facts.python}, kernel {facts.kernel}"
    if not facts.torch or (facts.device == "cuda" and gpus and not facts.cuda):
        seen += ", built without CUDA" if facts.torch else ""
        yield Finding("versions", "bad", seen, "install a torch for these devices")
        return
    if not facts.cuda or not gpus:
        yield Finding("versions", "ok", seen)
        return
    driver, known = gpus[0]["driver"], re.search(r"CUDA Version: (\d+\.\d+)", facts.smi)
    seen += f", CUDA {facts.cuda}, driver {driver}"
    least = DRIVERS.get(numbers(facts.cuda)[0], (0, 0))
    if numbers(driver) < least:
        remedy = f"a driver from {least[0]} on, or a torch built for an older CUDA"
        yield Finding("versions", "bad", f"{seen}: the driver is too old for it", remedy)
    elif known and numbers(known[1]) < numbers(facts.cuda):
        remedy = "a newer driver, if a kernel is reported missing"
        yield Finding("versions", "note", f"{seen}, which itself knows CUDA {known[1]}", remedy)
    else:
        yield Finding("versions", "ok", seen)


def check_nccl(facts: Facts) -> Iterator[Finding]:
    here = facts.measured
    if here is None or not here.nccl:
        return
    name = "NCCL " + ".".join(map(str, here.nccl))
    for first, last, why, who in NCCL:
        if first <= here.nccl <= last:
            remedy = "use another release: pip install nvidia-nccl-cu..., or another torch"
            yield Finding("nccl", "warning", f"{name} {why} ({who})", remedy)
            return
    yield Finding("nccl", "ok", name)


# --------------------------------------------------------------------------- devices

# Bits of the reasons for which a GPU's clock is down: NVML's NvmlClocksEventReasons.
REASONS = {
    0x8: ("bad", "hardware slowdown, to half or less", "cooling and power supply of the node"),
    0x40: ("bad", "hardware thermal slowdown", "cooling of the node"),
    0x80: ("bad", "power brake from outside", "power supply of the node"),
    0x20: ("warning", "software thermal slowdown", "cooling of the node"),
    0x4: ("note", "at its power cap", "usual under load; nvidia-smi -q -d POWER shows the cap"),
    0x2: ("note", "at a clock that was set for applications", "nvidia-smi -rac takes it back"),
    0x10: (
        "note",
        "held to the clock of another GPU (sync boost)",
        "nvidia-smi -q shows the group",
    ),
}
# The driver's messages after which a GPU is not to be used: NVIDIA's Xid catalogue.
XIDS = {
    48: "double-bit memory error",
    64: "row remapping failed",
    74: "NVLink error",
    79: "fell off the bus",
    95: "uncontained memory error",
    119: "its system processor does not answer",
}


def known_device(facts: Facts) -> Device | None:
    """What the table of devices has of these."""
    if facts.device == "cpu":
        return device_named(CPU)
    gpus = gpus_in(facts.gpus)
    return device_called(gpus[0]["name"], mib(gpus[0]["memory"]) * 2**20) if gpus else None


def mib(text: str) -> int:
    """A number of nvidia-smi's; 0 where it has none ('[N/A]')."""
    return int(text) if text.isdigit() else 0


def check_devices(facts: Facts) -> Iterator[Finding]:
    gpus, here = gpus_in(facts.gpus), facts.measured
    if TIMED_OUT in (facts.gpus, facts.smi):
        yield Finding("devices", "bad", "nvidia-smi does not answer", "reboot the node")
        return
    works = here is not None and len(here.flops) > 0 and here.device == "cuda"
    if works and not gpus:
        remedy = "in a container let NVIDIA_DRIVER_CAPABILITIES have utility, too"
        seen = (
            f"{len(here.flops) if here else 0} GPUs, and no nvidia-smi: faults and clocks unknown"
        )
        yield Finding("devices", "note", seen, remedy)
        return
    if facts.device_files and not gpus:
        seen = f"{facts.device_files} GPUs have device files, but nvidia-smi shows none"
        yield Finding("devices", "bad", seen, "the driver is not loaded, or of another version")
        return
    if here is not None and here.error:
        what = "the GPUs were not measured" if facts.device == "cuda" else "not measured"
        remedy = "dmesg and nvidia-smi say more; if they are silent, reboot the node"
        yield Finding("devices", "bad", f"{what}: {here.error}", remedy)
    if not gpus:
        severity = "ok" if facts.device == "cpu" else "bad"
        remedy = "" if facts.device == "cpu" else "a container needs --gpus; or use run.device cpu"
        yield Finding("devices", severity, f"no GPU; {facts.usable} cores", remedy)
        return
    kinds = sorted({gpu["name"] for gpu in gpus})
    seen = f"{len(gpus)} x {', '.join(kinds)}, {mib(gpus[0]['memory']) / 1024:.0f} GiB each"
    if len(kinds) > 1:
        yield Finding(
            "devices", "warning", seen, "the fastest wait for the slowest: use equal ones"
        )
    elif facts.device_files > len(gpus):
        seen += f", of {facts.device_files} with device files"
        yield Finding("devices", "note", seen, "the others are another job's, or lost: see dmesg")
    else:
        yield Finding("devices", "ok", seen)
    for gpu in gpus:
        name = f"GPU {gpu['index']}"
        if mib(gpu["used"]) > 0.05 * mib(gpu["memory"]) > 0:
            seen = f"{name}: {mib(gpu['used']):,} MiB are in use already"
            yield Finding("devices", "warning", seen, "nvidia-smi shows by whom; end it")
        if gpu["mig"] == "Enabled":
            remedy = "nvidia-smi -mig 0, if the whole device is meant"
            yield Finding("devices", "note", f"{name} is divided (MIG)", remedy)


def check_health(facts: Facts) -> Iterator[Finding]:
    """What GPUs and their driver have noted of faults."""
    sick = False
    for gpu in gpus_in(facts.gpus):
        if gpu["ecc"].isdigit() and int(gpu["ecc"]):
            seen = f"GPU {gpu['index']}: {gpu['ecc']} uncorrected memory errors since the last boot"
            yield Finding("health", "bad", seen, "reset the GPU; if they come back, replace it")
            sick = True
    for line in facts.remapped.splitlines():
        bus, pending, failed = (cell.strip() for cell in f"{line},,".split(",")[:3])
        if failed not in ("0", "No", "", "[N/A]"):
            yield Finding("health", "bad", f"{bus}: a memory row cannot be remapped", "replace it")
            sick = True
        elif pending not in ("0", "No", "", "[N/A]"):
            seen = f"{bus}: a memory row waits to be remapped"
            yield Finding("health", "warning", seen, "reset the GPU, which does it")
            sick = True
    for where, code in sorted(set(re.findall(r"Xid \(([^)]*)\): (\d+)", facts.kernel_log))):
        why, severity = XIDS.get(int(code), "see NVIDIA's catalogue"), "warning"
        if int(code) in XIDS:
            severity, sick = "bad", True
        remedy = "reset the GPU or reboot the node; if it comes back, replace it"
        yield Finding("health", severity, f"{where}: the driver noted Xid {code}, {why}", remedy)
    if facts.gpus and not sick:
        yield Finding("health", "ok", "no memory errors, no faults noted by the driver")


def check_clocks(facts: Facts) -> Iterator[Finding]:
    """Under load if there was any: an idle GPU's clock is low, and says nothing."""
    gpus = gpus_in((facts.measured.clocks if facts.measured else "") or facts.gpus)
    found: dict[int, list[str]] = {}
    for gpu in gpus:
        if re.fullmatch(r"0x[0-9a-fA-F]+", gpu["reasons"]):
            for bit in REASONS:
                if int(gpu["reasons"], 16) & bit:
                    found.setdefault(bit, []).append(f"{gpu['index']} ({gpu['celsius']} C)")
    for bit, which in found.items():
        severity, what, remedy = REASONS[bit]
        yield Finding("clocks", severity, f"GPU {', '.join(which)}: {what}", remedy)
    for gpu in gpus:
        width, most = gpu["width"], gpu["most_width"]
        if width.isdigit() and most.isdigit() and int(width) < int(most):
            seen = f"GPU {gpu['index']}: {width} of {most} PCIe lanes"
            yield Finding("clocks", "warning", seen, "reseat the GPU or its riser")
    if gpus and not found:
        speeds = [int(gpu["sm"]) for gpu in gpus if gpu["sm"].isdigit()]
        seen = f"{min(speeds)} to {max(speeds)} MHz" if speeds else "not throttled"
        yield Finding("clocks", "ok", f"{seen}, nothing holds them down")


def check_speed(facts: Facts) -> Iterator[Finding]:
    """Products and memory of each device, against its siblings and the table."""
    here, device = facts.measured, known_device(facts)
    if here is None or not here.flops:
        return
    unit = "TFLOP/s" if facts.device == "cuda" else "GFLOP/s of float32"
    scale = 1e12 if facts.device == "cuda" else 1e9
    seen = f"products {span(here.flops, scale)} {unit}, memory {span(here.bandwidth, 1e9)} GB/s"
    for number, same in enumerate(here.same):
        if not same:
            what = f"device {number}: the same product came out differently"
            yield Finding("speed", "bad", what, "it computes wrongly: take it out of service")
    if facts.device == "cpu" or device is None:
        yield Finding("speed", "ok", seen)
        return
    part = min(here.flops) / device.flops("bf16")
    streams = min(here.bandwidth) / device.bandwidth
    seen += f": {part:.0%} and {streams:.0%} of what is known of {device.name}"
    remedy = "see clocks and health; other processes on the device slow it, too"
    yield Finding(
        "speed", graded(min(part, streams)), seen, "" if min(part, streams) >= SLOW else remedy
    )
    for rates, what in ((here.flops, "products"), (here.bandwidth, "memory")):
        for number, rate in enumerate(rates):
            if rate < BEHIND * statistics.median(rates):
                behind = f"{rate / statistics.median(rates):.0%} of the median of this node's"
                seen = f"device {number}: {what} at {behind}: all others wait for it"
                yield Finding("speed", "warning", seen, remedy)


def graded(part: float) -> str:
    """How bad it is to reach that part of what hardware should."""
    return "ok" if part >= SLOW else "warning" if part >= BROKEN else "bad"


def span(values: Sequence[float], unit: float) -> str:
    low, high = min(values) / unit, max(values) / unit
    return f"{low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} to {high:.3g}"


# --------------------------------------------------------------------------- links


def check_topology(facts: Facts) -> Iterator[Finding]:
    joined = topology_in(facts.topology)
    pairs = {pair: how for pair, how in joined.items() if all("GPU" in name for name in pair)}
    ways = sorted(set(pairs.values()) - {"X"})
    device = known_device(facts)
    switched = device is not None and device.link.peer_access
    if not ways:
        return
    seen = f"GPUs joined by {', '.join(ways)}"
    if switched and not all(how.startswith("NV") for how in ways):
        remedy = "start nvidia-fabricmanager; look at nvidia-smi nvlink -s"
        yield Finding("topology", "bad", f"{seen}, though these have NVLink", remedy)
    elif switched and len(ways) > 1:
        remedy = "look at nvidia-smi nvlink -s"
        yield Finding("topology", "warning", f"{seen}: not all alike", remedy)
    else:
        yield Finding("topology", "ok", seen)
    gpu = ""
    for line in facts.nvlinks.splitlines() if switched else ():
        gpu = found[1] if (found := re.match(r"(GPU \d+)", line)) else gpu
        if "inactive" in line.lower():
            seen = f"{gpu}: {line.strip()}"
            yield Finding("topology", "warning", seen, "reset the GPU; if it stays, replace it")
    far = [
        name
        for name in sorted({a for a, _ in joined if a.startswith("GPU")})
        if (nics := [how for (a, b), how in joined.items() if a == name and "GPU" not in b])
        and not {"PIX", "PXB"}.intersection(nics)
    ]
    if far:
        seen = f"{', '.join(far)}: no network adapter on the same PCIe switch"
        remedy = "a virtual machine may hide it: give NCCL the provider's NCCL_TOPO_FILE"
        yield Finding("topology", "note", seen, remedy)


def check_links(facts: Facts) -> Iterator[Finding]:
    """Copies between devices, and sums over all of them, against the link's table."""
    here, device = facts.measured, known_device(facts)
    if here is None or not here.busbw:
        return
    if not here.right:
        remedy = "it corrupts training: try NCCL_P2P_DISABLE=1 to find the link, and another node"
        yield Finding("all-reduce", "bad", "the sum over ranks is wrong", remedy)
    seen = f"{here.busbw / 1e9:.3g} GB/s of each of {len(here.flops)}"
    if device is None:
        yield Finding("all-reduce", "ok", seen)
        return
    part = here.busbw / device.link.bandwidth
    seen += f", {part:.0%} of what the link should give ({device.link.bandwidth / 1e9:.3g})"
    if facts.device == "cpu":
        busy = "usual where others use the cores" if part < BROKEN else ""
        yield Finding("all-reduce", "note" if busy else "ok", seen, busy)
        return
    remedy = "" if part >= SLOW else "see topology; NCCL_DEBUG=INFO shows which way NCCL takes"
    yield Finding("all-reduce", graded(part), seen, remedy)
    if here.pairs:
        a, b, slowest = min(here.pairs, key=lambda pair: pair[2])
        seen = f"slowest from GPU {a} to {b}: {slowest / 1e9:.3g} GB/s"
        # A copy has one neighbour, the collective's figure is of all together: never below it.
        low = slowest < BROKEN * device.link.bandwidth
        remedy = "access control on PCIe (ACS, IOMMU) may be on, or a link is down" * low
        yield Finding("peer copies", "warning" if low else "ok", seen, remedy)


def check_rdma(facts: Facts) -> Iterator[Finding]:
    """Adapters, and how NCCL gets at them."""
    if not facts.adapters:
        if facts.nodes > 1 and facts.device == "cuda":
            remedy = "ask for nodes with InfiniBand or EFA; a container needs /dev/infiniband"
            yield Finding("rdma", "warning", "no adapter: nodes speak TCP", remedy)
        return
    kinds = sorted({one.driver or "?" for one in facts.adapters})
    rates = sorted({one.rate for one in facts.adapters})
    seen = f"{len(facts.adapters)} x {', '.join(kinds)}, {', '.join(rates)}"
    down = [one.name for one in facts.adapters if "ACTIVE" not in one.state]
    if down:
        remedy = "cable, switch port or subnet manager; ibstat shows more"
        yield Finding("rdma", "warning", f"{seen}; not active: {', '.join(down)}", remedy)
    else:
        yield Finding("rdma", "ok", seen)
    if not has_efa(facts):
        if facts.gpus and "nvidia_peermem" not in facts.modules:
            remedy = "modprobe nvidia_peermem, unless the kernel has DMA-BUF (from 5.12 on)"
            seen = "nvidia_peermem is not loaded: GPUs may send through the host's memory"
            yield Finding("rdma", "note", seen, remedy)
        return
    remedy = "install it (efa_installer.sh); in a container pass /dev/infiniband/uverbs*"
    if facts.libfabric and "provider: efa" not in facts.efa_provider:
        yield Finding("efa", "bad", "there are EFA adapters, but libfabric has no efa", remedy)
    elif not facts.libfabric:
        yield Finding("efa", "warning", "EFA adapters, and no fi_info to ask of libfabric", remedy)
    if facts.gpus and not facts.ofi_plugin:  # which may lie where nobody has looked
        remedy = "install aws-ofi-nccl, and have it in LD_LIBRARY_PATH: else NCCL takes TCP"
        yield Finding("efa", "warning", "NCCL's plug-in for EFA was not found", remedy)
    elif facts.gpus:
        fabric = re.search(r"libfabric: (\S+)", facts.libfabric)
        seen = f"aws-ofi-nccl {facts.ofi_plugin}, libfabric {fabric[1] if fabric else '?'}"
        yield Finding("efa", "ok", seen)
    if facts.gpus and not any(one.rdma_read for one in facts.adapters):
        seen = "the adapters have no RDMA read: no GPUDirect RDMA"
        yield Finding("efa", "warning", seen, "use instances that have it (p4d, p5 and later)")


def has_efa(facts: Facts) -> bool:
    return any(one.driver == "efa" for one in facts.adapters)


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
    old = facts.ofi_plugin not in ("", "?") and numbers(facts.ofi_plugin) <= (1, 5, 0)
    places = {"", "efa" if has_efa(facts) else "infiniband" if facts.adapters else ""}
    places |= {"new efa"} if has_efa(facts) and not old else set()
    wrong = list(_check_interfaces(facts))
    for name, value in sorted(facts.variables.items()):
        for row in VARIABLES:
            fits = re.fullmatch(row.name, name) and re.fullmatch(row.values, value)
            if fits and row.on in places:
                seen = f"{name}={value} {row.why}"
                wrong.append(Finding("variables", row.severity, seen, row.remedy))
    there = ", ".join(sorted(facts.variables)) or "none of NCCL, libfabric or gloo"
    yield from wrong or [Finding("variables", "ok", f"{there}: nothing that harms")]


def _check_interfaces(facts: Facts) -> Iterator[Finding]:
    """What has to fit to this node."""
    nccl, gloo, threads = (
        facts.variables.get(name, "")
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")
    )
    if nccl and not interfaces_for(nccl, facts.interfaces):
        there = ", ".join(facts.interfaces)
        seen = f"NCCL_SOCKET_IFNAME={nccl} is none of {there}: NCCL will not start"
        remedy = "unset it, or leave out only what is no network: ^docker,lo,veth"
        yield Finding("variables", "bad", seen, remedy)
    if gloo and not set(gloo.split(",")) <= set(facts.interfaces):
        seen = f"GLOO_SOCKET_IFNAME={gloo} is none of {', '.join(facts.interfaces)}"
        yield Finding("variables", "bad", seen, "name one that is there")
    elif gloo == "lo" and facts.nodes > 1 and not is_loopback(facts.endpoint):
        seen = "GLOO_SOCKET_IFNAME=lo: other nodes are not reached there"
        yield Finding("variables", "bad", seen, "name the interface of the network")
    if threads.isdigit() and int(threads) > facts.usable > 0:
        seen = f"OMP_NUM_THREADS={threads} is more than the {facts.usable} cores of this process"
        yield Finding("variables", "warning", seen, "unset it: weft shares the cores among ranks")


def interfaces_for(value: str, there: Sequence[str]) -> list[str]:
    """Those that NCCL_SOCKET_IFNAME allows: prefixes; with '=' whole names; with '^' the others."""
    names = tuple(value.lstrip("^=").split(","))
    whole = "=" in value[:2]
    matching = [one for one in there if (one in names if whole else one.startswith(names))]
    return [one for one in there if one not in matching] if value[0] == "^" else matching


# --------------------------------------------------------------------------- the host


def gib(size: float) -> str:
    return f"{size / GIB:.3g} GiB"


def check_memory(facts: Facts) -> Iterator[Finding]:
    if not facts.memory:
        return
    seen = f"{gib(facts.memory)}, {gib(facts.available)} available"
    if facts.limit:
        seen += f", of which the control group allows {gib(facts.limit)}"
    gpus = sum(mib(gpu["memory"]) * 2**20 for gpu in gpus_in(facts.gpus))
    room = min(facts.limit or facts.memory, facts.available)
    if room < gpus / 2:
        # A copy of parameters and optimizer state waits there while a checkpoint is written.
        remedy = (
            "ask the scheduler for more memory (Slurm: --mem=0), or checkpoint.background false"
        )
        seen += f"; the GPUs have {gib(gpus)}"
        yield Finding("memory", "warning", seen, remedy)
    elif room < facts.memory / 10:
        yield Finding("memory", "warning", seen, "see who takes it; ask the scheduler for more")
    else:
        yield Finding("memory", "ok", seen)


def check_shm(facts: Facts) -> Iterator[Finding]:
    """Ranks of a node speak through /dev/shm, and so do processes that load data."""
    if not facts.shm:
        return
    seen = f"/dev/shm has {gib(facts.shm)}, {gib(facts.shm_free)} free"
    if facts.shm_free < 2**28:
        remedy = "docker --shm-size or --ipc=host; Kubernetes: an emptyDir of medium Memory there"
        yield Finding("shared memory", "bad", f"{seen}: NCCL and gloo need more", remedy)
    elif facts.shm_free < 4 * GIB and facts.gpus:
        remedy = "8 GiB or more: docker --shm-size, Kubernetes: an emptyDir of medium Memory"
        yield Finding("shared memory", "warning", seen, remedy)
    else:
        yield Finding("shared memory", "ok", seen)


def check_limits(facts: Facts) -> Iterator[Finding]:
    if facts.memlock != -1 and facts.adapters:
        seen = f"memlock is {facts.memlock // 1024:,} KiB: adapters cannot register memory"
        remedy = "ulimit -l unlimited; docker --ulimit memlock=-1; LimitMEMLOCK in slurmd.service"
        yield Finding("limits", "bad", seen, remedy)
    if 0 <= facts.nofile < 4096:
        remedy = "ulimit -n 65536: each rank has sockets to its peers, and files of the data"
        yield Finding("limits", "warning", f"{facts.nofile:,} open files", remedy)
    elif facts.memlock == -1 or not facts.adapters:
        memlock = "any" if facts.memlock == -1 else f"{facts.memlock // 1024:,} KiB of"
        files = "any number of" if facts.nofile == -1 else f"{facts.nofile:,}"
        yield Finding("limits", "ok", f"{files} open files, {memlock} locked memory")


def check_cores(facts: Facts) -> Iterator[Finding]:
    """One that Slurm or a container gives few cores to is the usual cause of a slow GPU."""
    if not facts.usable:
        return
    room = min(facts.usable, facts.quota) if facts.quota else float(facts.usable)
    seen = f"{room:g} of {facts.cores} may be used"
    if facts.quota and facts.quota < facts.usable:
        seen += " (by the control group)"
    gpus = len(gpus_in(facts.gpus))
    if room < 4 * gpus:
        remedy = "ask for more (Slurm: --cpus-per-task or --exclusive); each GPU wants 4 or more"
        severity = "bad" if room < gpus else "warning"
        yield Finding("cores", severity, f"{seen}, for {gpus} GPUs", remedy)
    else:
        yield Finding("cores", "ok", seen)


def check_clock(facts: Facts) -> Iterator[Finding]:
    if facts.clock_in_step:
        yield Finding("time", "ok", "the clock follows another one")
    elif facts.clock_in_step is False:
        remedy = "start chrony or systemd-timesyncd: nodes tell who is gone by their clocks"
        severity = "warning" if facts.nodes > 1 else "note"
        yield Finding("time", severity, "the kernel's clock follows no other one", remedy)


# --------------------------------------------------------------------------- storage

NETWORK = r"nfs4?|lustre|gpfs|beegfs|ceph|cifs|smb3|glusterfs|9p|virtiofs|afs|wekafs|fuse\..*"


def check_folders(facts: Facts) -> Iterator[Finding]:
    for one in facts.folders:
        yield from _check_folder(one, facts.nodes, facts.endpoint)


def _check_folder(one: Folder, nodes: int, endpoint: str) -> Iterator[Finding]:
    name, shared = f"{one.key} ({one.kind})", re.fullmatch(NETWORK, one.kind)
    if one.error:
        remedy = "use another folder, or ask who runs the file system"
        yield Finding(name, "bad", f"{one.path}: {one.error}", remedy)
        return
    rates = f"write {one.write / 1e6:,.0f} MB/s, read {one.read / 1e6:,.0f} MB/s"
    found = []

    def add(severity: str, seen: str, remedy: str) -> None:
        found.append(Finding(name, severity, seen, remedy))

    if one.key == "run.dir" and not one.locks:
        seen = "has no locks: two runs in one folder would spoil each other's work"
        add("bad", seen, "mount it with locks (Lustre: -o flock; NFS: without nolock)")
    elif re.search(r"\b(nolock|local_lock=(all|flock)|localflock)\b", one.options):
        seen = "locks hold on this node only: another node does not see that a run owns its folder"
        add("warning", seen, "mount it without nolock, local_lock and localflock")
    if one.key in ("run.dir", "checkpoint.dir") and not one.links:
        add("bad", "has no hard links, by which checkpoints are claimed", "use another folder")
    if one.free < 10 * GIB or 0 <= one.files < 10_000:
        files = "" if one.files < 0 else f" and {one.files:,} files"
        add("warning", f"room for {gib(one.free)}{files}", "remove something")
    if one.key == "checkpoint.local" and shared:
        add(
            "warning",
            "is on the network, which it is to spare",
            "name memory or a disk of the node",
        )
    elif one.key != "checkpoint.local" and nodes > 1 and not shared and not is_loopback(endpoint):
        remedy = "name a folder that all nodes share"
        add("warning" if one.key == "data.cache" else "bad", "each node has its own", remedy)
    elif one.key != "checkpoint.local" and one.kind == "tmpfs":
        add("note", "is memory: gone when the machine is", "name a folder on a disk")
    if one.write < 100e6:
        minutes = CHECKPOINT / max(one.write, 1) / 60
        seen = f"{rates}: a checkpoint of 8B parameters takes {minutes:,.0f} min"
        add("warning", seen, "checkpoint.local keeps newer state on the node; docs/storage.md")
    yield from found or [Finding(name, "ok", f"{rates}, {gib(one.free)} free")]


def check_stores(facts: Facts) -> Iterator[Finding]:
    for one in facts.stores:
        if one.error:
            remedy = "see AWS_ENDPOINT_URL, AWS_PROFILE, ~/.aws, and what the role may do"
            yield Finding(one.key, "bad", f"{one.url}: {one.error}", remedy)
            continue
        rates = f"write {one.write / 1e6:,.0f} MB/s, read {one.read / 1e6:,.0f} MB/s"
        seen = f"{one.url}: {rates}, a small put {one.seconds * 1000:.0f} ms"
        if not one.once:
            rule = "but it overwrites what is to be put once: two runs could claim one checkpoint"
            yield Finding(one.key, "bad", f"{seen}, {rule}", "use a store with conditional writes")
        else:
            yield Finding(one.key, "ok", seen)


# --------------------------------------------------------------------------- other nodes


def check_meeting(facts: Facts) -> Iterator[Finding]:
    if facts.meeting in ("free", "answers"):
        said = "answers" if facts.meeting == "answers" else "is free here"
        yield Finding("meeting", "ok", f"{facts.endpoint} {said}")
    elif facts.meeting:
        remedy = "the first node must listen there, and a firewall let it through, 29400 by itself"
        yield Finding("meeting", "bad", f"{facts.endpoint}: {facts.meeting}", remedy)
    alone = facts.address.startswith("127.") and "GLOO_SOCKET_IFNAME" not in facts.variables
    if facts.nodes > 1 and not is_loopback(facts.endpoint) and alone:
        seen = f"{facts.host} is {facts.address} to itself: gloo would wait there for others"
        remedy = "set GLOO_SOCKET_IFNAME to the network's interface, or mend /etc/hosts"
        yield Finding("meeting", "bad", seen, remedy)


def check_others(facts: Facts) -> Iterator[Finding]:
    """Clocks and versions of all nodes."""
    if not facts.others:
        return
    hosts = ", ".join(node.host for node in facts.others)
    if len(facts.others) < facts.nodes:
        seen = f"{len(facts.others)} of {facts.nodes} came within {WAIT:.0f} s: {hosts}"
        severity = "bad" if len(facts.others) < facts.least_nodes else "note"
        yield Finding("nodes", severity, seen, "start it on every node at about the same time")
    for what in sorted({name for node in facts.others for name in node.versions}):
        there = {node.versions.get(what, "none") for node in facts.others}
        if len(there) > 1:
            seen = "; ".join(f"{n.host} has {what} {n.versions.get(what)}" for n in facts.others)
            yield Finding("nodes", "bad", seen, "install the same on every node")
    ahead = {node.host: node.ahead for node in facts.others}
    doubt = max(node.doubt for node in facts.others)
    apart = max(ahead.values()) - min(ahead.values())
    seen = f"clocks of {hosts} are {apart * 1000:.1f} ms apart, give or take {doubt * 1000:.1f}"
    if apart - doubt > SKEW:
        yield Finding("nodes", "bad", seen, "start chrony on every node: the living look dead")
    else:
        yield Finding("nodes", "ok", seen)


CHECKS: tuple[Check, ...] = (
    check_versions,
    check_devices,
    check_health,
    check_clocks,
    check_speed,
    check_topology,
    check_links,
    check_nccl,
    check_rdma,
    check_variables,
    check_memory,
    check_shm,
    check_limits,
    check_cores,
    check_clock,
    check_folders,
    check_stores,
    check_meeting,
    check_others,
)
