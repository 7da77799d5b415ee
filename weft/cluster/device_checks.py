"""Checks of what computes and what joins it: drivers, GPUs, their links, network adapters."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from weft.cluster.finding import Finding, bad, note, ok, warning
from weft.cluster.node_facts import TIMED_OUT, Facts, Measured, gpus_in, release, topology_in, whole
from weft.plan.devices import CPU_DEVICE, Device, match_device, get_device

# Of what the table of devices has: below the first it is worth a word, below the second bad.
SLOW, BROKEN = 0.8, 0.5
# Of the processor time that a CPU's processes could use: with less their speed says nothing.
IDLE = 0.8
BEHIND = 0.9  # of the median of the node's devices: one that all the others will wait for


def known_device(facts: Facts) -> Device | None:
    """What the table of devices has of these."""
    if facts.device == "cpu":
        return get_device(CPU_DEVICE)
    gpus = gpus_in(facts.gpus)
    return match_device(gpus[0]["name"], whole(gpus[0]["memory"]) * 2**20) if gpus else None


def graded(part: float, seen: str, remedy: str) -> Finding:
    """How bad it is to reach that part of what hardware should."""
    if part >= SLOW:
        return ok(seen)
    return warning(seen, remedy) if part >= BROKEN else bad(seen, remedy)


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


def check_versions(facts: Facts) -> Iterator[Finding]:
    """torch, its CUDA and the driver, against each other."""
    gpus = gpus_in(facts.gpus)
    seen = f"torch {facts.torch or 'is missing'}, Python {facts.python}, kernel {facts.kernel}"
    if not facts.torch or (facts.device == "cuda" and gpus and not facts.cuda):
        seen += ", built without CUDA" if facts.torch else ""
        yield bad(seen, "install a torch for these devices")
        return
    if not facts.cuda or not gpus:
        yield ok(seen)
        return
    driver, known = gpus[0]["driver"], re.search(r"CUDA Version: (\d+\.\d+)", facts.smi)
    seen += f", CUDA {facts.cuda}, driver {driver}"
    least = DRIVERS.get(release(facts.cuda)[0], (0, 0))
    if release(driver) < least:
        remedy = f"a driver from {least[0]} on, or a torch built for an older CUDA"
        yield bad(f"{seen}: the driver is too old for it", remedy)
    elif known and release(known[1]) < release(facts.cuda):
        remedy = "a newer driver, if a kernel is reported missing"
        yield note(f"{seen}, which itself knows CUDA {known[1]}", remedy)
    else:
        yield ok(seen)


def check_nccl(facts: Facts) -> Iterator[Finding]:
    """Whether torch brought a release of NCCL that is known to go wrong."""
    here = facts.measured
    if here is None or not here.nccl:
        return
    name = "NCCL " + ".".join(map(str, here.nccl))
    for first, last, why, who in NCCL:
        if first <= here.nccl <= last:
            remedy = "use another release: pip install nvidia-nccl-cu..., or another torch"
            yield warning(f"{name} {why} ({who})", remedy)
            return
    yield ok(name)


# --------------------------------------------------------------------------- devices

# Bits of the reasons for which a GPU's clock is down: NVML's NvmlClocksEventReasons.
REASONS = {
    0x8: bad("hardware slowdown, to half or less", "cooling and power supply of the node"),
    0x40: bad("hardware thermal slowdown", "cooling of the node"),
    0x80: bad("power brake from outside", "power supply of the node"),
    0x20: warning("software thermal slowdown", "cooling of the node"),
    0x4: note("at its power cap", "usual under load; nvidia-smi -q -d POWER shows the cap"),
    0x2: note("at a clock that was set for applications", "nvidia-smi -rac takes it back"),
    0x10: note(
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


def check_devices(facts: Facts) -> Iterator[Finding]:
    """How many there are, whether all work, and whether they are free."""
    gpus, here = gpus_in(facts.gpus), facts.measured
    if TIMED_OUT in (facts.gpus, facts.smi):
        yield bad("nvidia-smi does not answer", "reboot the node")
        return
    if here and here.flops and here.device == "cuda" and not gpus:
        remedy = "in a container let NVIDIA_DRIVER_CAPABILITIES have utility, too"
        yield note(f"{len(here.flops)} GPUs, and no nvidia-smi: faults and clocks unknown", remedy)
        return
    if facts.device_files and not gpus:
        seen = f"{facts.device_files} GPUs have device files, but nvidia-smi shows none"
        yield bad(seen, "the driver is not loaded, or of another version")
        return
    if here and here.error:
        what = "the GPUs were not measured" if facts.device == "cuda" else "not measured"
        remedy = "dmesg and nvidia-smi say more; if they are silent, reboot the node"
        yield bad(f"{what}: {here.error}", remedy)
    if not gpus:
        seen = f"no GPU; {facts.usable} cores"
        on_cpu = facts.device == "cpu"
        yield ok(seen) if on_cpu else bad(seen, "a container needs --gpus; or use run.device cpu")
        return
    kinds = sorted({gpu["name"] for gpu in gpus})
    seen = f"{len(gpus)} x {', '.join(kinds)}, {whole(gpus[0]['memory']) / 1024:.0f} GiB each"
    if len(kinds) > 1:
        yield warning(seen, "the fastest wait for the slowest: use equal ones")
    elif facts.device_files > len(gpus):
        seen += f", of {facts.device_files} with device files"
        yield note(seen, "the others are another job's, or lost: see dmesg")
    else:
        yield ok(seen)
    for gpu in gpus:
        name = f"GPU {gpu['index']}"
        if whole(gpu["used"]) > 0.05 * whole(gpu["memory"]) > 0:
            seen = f"{name}: {whole(gpu['used']):,} MiB are in use already"
            yield warning(seen, "nvidia-smi shows by whom; end it")
        if gpu["mig"] == "Enabled":
            yield note(
                f"{name} is divided (MIG)", "nvidia-smi -mig 0, if the whole device is meant"
            )


def check_health(facts: Facts) -> Iterator[Finding]:
    """What GPUs and their driver have noted of faults."""
    none = ("0", "No", "", "[N/A]")
    wrong: list[Finding] = []
    for gpu in gpus_in(facts.gpus):
        if whole(gpu["ecc"]):
            seen = f"GPU {gpu['index']}: {gpu['ecc']} uncorrected memory errors since the last boot"
            wrong.append(bad(seen, "reset the GPU; if they come back, replace it"))
    for line in facts.remapped.splitlines():
        bus, pending, failed = (cell.strip() for cell in f"{line},,".split(",")[:3])
        if failed not in none:
            wrong.append(bad(f"{bus}: a memory row cannot be remapped", "replace it"))
        elif pending not in none:
            seen = f"{bus}: a memory row waits to be remapped"
            wrong.append(warning(seen, "reset the GPU, which does it"))
    for where, code in sorted(set(re.findall(r"Xid \(([^)]*)\): (\d+)", facts.kernel_log or ""))):
        why = XIDS.get(int(code))
        seen = f"{where}: the driver noted Xid {code}, " + (why or "see NVIDIA's catalogue")
        remedy = "reset the GPU or reboot the node; if it comes back, replace it"
        wrong.append(bad(seen, remedy) if why else warning(seen, remedy))
    yield from wrong
    if facts.gpus and not wrong:
        drivers = "what the driver noted is not known (the kernel's log cannot be read)"
        noted = drivers if facts.kernel_log is None else "no faults noted by the driver"
        yield ok(f"no memory errors, {noted}")


def check_clocks(facts: Facts) -> Iterator[Finding]:
    """Under load if there was any: an idle GPU's clock is low, and says nothing."""
    gpus = gpus_in((facts.measured.clocks if facts.measured else "") or facts.gpus)
    held: dict[int, list[str]] = {}
    for gpu in gpus:
        if re.fullmatch(r"0x[0-9a-fA-F]+", gpu["reasons"]):
            for bit in REASONS:
                if int(gpu["reasons"], 16) & bit:
                    held.setdefault(bit, []).append(f"{gpu['index']} ({gpu['celsius']} C)")
    for bit, which in held.items():
        yield replace(REASONS[bit], seen=f"GPU {', '.join(which)}: {REASONS[bit].seen}")
    for gpu in gpus:
        if 0 < whole(gpu["width"]) < whole(gpu["most_width"]):
            seen = f"GPU {gpu['index']}: {gpu['width']} of {gpu['most_width']} PCIe lanes"
            yield warning(seen, "reseat the GPU or its riser")
    if gpus and not held:
        speeds = [int(gpu["sm"]) for gpu in gpus if gpu["sm"].isdigit()]
        seen = f"{min(speeds)} to {max(speeds)} MHz" if speeds else "not throttled"
        yield ok(f"{seen}, nothing holds them down")


def check_speed(facts: Facts) -> Iterator[Finding]:
    """Products and memory of each device, against its siblings and the table."""
    here, device = facts.measured, known_device(facts)
    if here is None or not here.flops:
        return
    for number, same in enumerate(here.same):
        if not same:
            what = f"device {number}: the same product came out differently"
            yield bad(what, "it computes wrongly: take it out of service")
    on_cpu = facts.device == "cpu"
    scale, unit = (1e9, "GFLOP/s of float32") if on_cpu else (1e12, "TFLOP/s")
    seen = f"products {span(here.flops, scale)} {unit}, memory {span(here.bandwidth, 1e9)} GB/s"
    if busy := busy_with(here):
        yield note(f"not judged: {busy}; at best {seen}", REPEAT)
        return
    if on_cpu or device is None:
        yield ok(seen)
        return
    part = min(here.flops) / device.flops("bf16")
    streams = min(here.bandwidth) / device.bandwidth
    seen += f": {part:.0%} and {streams:.0%} of what is known of {device.name}"
    remedy = "see clocks and health; other processes on the device slow it, too"
    yield graded(min(part, streams), seen, remedy)
    for rates, what in ((here.flops, "products"), (here.bandwidth, "memory")):
        usual = statistics.median(rates)
        for number, rate in enumerate(rates):
            if rate < BEHIND * usual:
                behind = f"{rate / usual:.0%} of the median of this node's"
                yield warning(
                    f"device {number}: {what} at {behind}: all others wait for it", remedy
                )


REPEAT = "check again when nothing else runs there; see cores for a control group's limit"


def busy_with(here: Measured) -> str:
    """Why speeds of a CPU cannot be judged; empty if they can."""
    share = min(here.cpu_share, default=1.0)
    if share >= IDLE:
        return ""
    return f"the machine is busy: others had {1 - share:.0%} of the processor time meanwhile"


def span(values: Sequence[float], unit: float) -> str:
    """The lowest and the highest of some values, or their one value, in a unit."""
    low, high = (f"{value / unit:.3g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


# --------------------------------------------------------------------------- links


def check_topology(facts: Facts) -> Iterator[Finding]:
    """How GPUs are joined to each other and to network adapters."""
    joined, device = topology_in(facts.topology), known_device(facts)
    gpus = sorted({name for pair in joined for name in pair if name.startswith("GPU")})
    ways = sorted({how for pair, how in joined.items() if set(pair) <= set(gpus)} - {"X"})
    switched = device is not None and device.link.peer_access
    if not ways:
        return
    seen = f"GPUs joined by {', '.join(ways)}"
    if switched and not all(how.startswith("NV") for how in ways):
        remedy = "start nvidia-fabricmanager; look at nvidia-smi nvlink -s"
        yield bad(f"{seen}, though these have NVLink", remedy)
    elif switched and len(ways) > 1:
        yield warning(f"{seen}: not all alike", "look at nvidia-smi nvlink -s")
    else:
        yield ok(seen)
    gpu = ""
    for line in facts.nvlinks.splitlines() if switched else ():
        gpu = found[1] if (found := re.match(r"(GPU \d+)", line)) else gpu
        if "inactive" in line.lower():
            yield warning(f"{gpu}: {line.strip()}", "reset the GPU; if it stays, replace it")
    to_adapters = {
        gpu: {how for (a, b), how in joined.items() if a == gpu and b not in gpus} for gpu in gpus
    }
    far = [gpu for gpu, ways in to_adapters.items() if ways and not ways & {"PIX", "PXB"}]
    if far:
        seen = f"{', '.join(far)}: no network adapter on the same PCIe switch"
        yield note(seen, "a virtual machine may hide it: give NCCL the provider's NCCL_TOPO_FILE")


def check_all_reduce(facts: Facts) -> Iterator[Finding]:
    """Sums over all devices, against the link's table."""
    here, device = facts.measured, known_device(facts)
    if here is None or not here.busbw:
        return
    if not here.right:
        remedy = "it corrupts training: try NCCL_P2P_DISABLE=1 to find the link, and another node"
        yield bad("the sum over ranks is wrong", remedy)
    seen = f"{here.busbw / 1e9:.3g} GB/s of each of {len(here.flops)}"
    if busy := busy_with(here):
        yield note(f"not judged: {busy}; {seen}", REPEAT)
        return
    if device is None:
        yield ok(seen)
        return
    part = here.busbw / device.link.bandwidth
    seen += f", {part:.0%} of what the link should give ({device.link.bandwidth / 1e9:.3g})"
    if facts.device == "cuda":
        yield graded(part, seen, "see topology; NCCL_DEBUG=INFO shows which way NCCL takes")
    else:
        yield note(seen, "usual where ranks share few cores") if part < BROKEN else ok(seen)


def check_copies(facts: Facts) -> Iterator[Finding]:
    """Copies between GPUs, against the link's table."""
    here, device = facts.measured, known_device(facts)
    if here is None or device is None or not here.pairs:
        return
    a, b, slowest = min(here.pairs, key=lambda pair: pair[2])
    seen = f"slowest from GPU {a} to {b}: {slowest / 1e9:.3g} GB/s"
    # A copy has one neighbour, the collective's figure is of all together: never below it.
    if slowest < BROKEN * device.link.bandwidth:
        yield warning(seen, "access control on PCIe (ACS, IOMMU) may be on, or a link is down")
    else:
        yield ok(seen)


# --------------------------------------------------------------------------- network adapters


def check_rdma(facts: Facts) -> Iterator[Finding]:
    """Adapters, and how NCCL gets at them."""
    if not facts.adapters:
        if facts.nodes > 1 and facts.device == "cuda":
            remedy = "ask for nodes with InfiniBand or EFA; a container needs /dev/infiniband"
            yield warning("no adapter: nodes speak TCP", remedy)
        return
    kinds = sorted({one.driver or "?" for one in facts.adapters})
    rates = sorted({one.rate for one in facts.adapters})
    seen = f"{len(facts.adapters)} x {', '.join(kinds)}, {', '.join(rates)}"
    down = [one.name for one in facts.adapters if "ACTIVE" not in one.state]
    if down:
        remedy = "cable, switch port or subnet manager; ibstat shows more"
        yield warning(f"{seen}; not active: {', '.join(down)}", remedy)
    else:
        yield ok(seen)
    if facts.gpus and not facts.has_efa and "nvidia_peermem" not in facts.modules:
        remedy = "modprobe nvidia_peermem, unless the kernel has DMA-BUF (from 5.12 on)"
        yield note("nvidia_peermem is not loaded: GPUs may send through the host's memory", remedy)


def check_efa(facts: Facts) -> Iterator[Finding]:
    """AWS's adapters: libfabric, its provider, and NCCL's plug-in for it."""
    if not facts.has_efa:
        return
    remedy = "install it (efa_installer.sh); in a container pass /dev/infiniband/uverbs*"
    if not facts.libfabric:
        yield warning("EFA adapters, and no fi_info to ask of libfabric", remedy)
    elif "provider: efa" not in facts.efa_provider:
        yield bad("there are EFA adapters, but libfabric has no efa", remedy)
    if facts.gpus and not facts.ofi_plugin:  # which may lie where nobody has looked
        remedy = "install aws-ofi-nccl, and have it in LD_LIBRARY_PATH: else NCCL takes TCP"
        yield warning("NCCL's plug-in for EFA was not found", remedy)
    elif facts.gpus:
        fabric = re.search(r"libfabric: (\S+)", facts.libfabric)
        yield ok(f"aws-ofi-nccl {facts.ofi_plugin}, libfabric {fabric[1] if fabric else '?'}")
    if facts.gpus and not any(one.rdma_read for one in facts.adapters):
        seen = "the adapters have no RDMA read: no GPUDirect RDMA"
        yield warning(seen, "use instances that have it (p4d, p5 and later)")
