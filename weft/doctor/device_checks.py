"""Checks of drivers, GPUs and their links."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from weft.config.accelerators import GPU
from weft.doctor.node_facts import DeviceMeasurements, Facts, Finding, bad, note, ok, warning
from weft.monitor.nvml import TIMED_OUT, is_driver_too_old, minimum_driver
from weft.monitor.xid_watch import XIDS, describe_xid
from weft.planning.devices import CPU_DEVICE, GIB, Device, get_device, match_device
from weft.version import parse_version, untested_versions

# Fractions of the specified speed below which a device gets a warning, and is bad.
WARNING_FRACTION, BAD_FRACTION = 0.8, 0.5
# Fraction of the usable CPU time below which a CPU benchmark is meaningless.
MIN_CPU_SHARE = 0.8
# Fraction of the median of the node's devices below which a device slows the others down.
STRAGGLER_FRACTION = 0.9


def find_device_spec(facts: Facts) -> Device | None:
    """Return the specification of the node's devices; None: unknown."""
    if facts.device == "cpu":
        return get_device(CPU_DEVICE)
    gpu = next((gpu for gpu in facts.gpus if gpu.memory), None)
    return match_device(gpu.name, gpu.memory) if gpu else None


def grade(fraction: float, observation: str, remedy: str) -> Finding:
    """Return a finding for hardware that reaches ``fraction`` of its specified speed."""
    if fraction >= WARNING_FRACTION:
        return ok(observation)
    return warning(observation, remedy) if fraction >= BAD_FRACTION else bad(observation, remedy)


# --------------------------------------------------------------------------- versions

# Faulty releases of NCCL: first, last, the fault and its source.
FAULTY_NCCL_RELEASES = (
    ((2, 18, 1), (2, 18, 1), "may corrupt sums if a NIC shares its switch with a GPU (NVIDIA)"),
    ((2, 28, 3), (2, 28, 8), "is one that NVIDIA's resiliency extension warns about (its README)"),
)


def check_versions(facts: Facts) -> Iterator[Finding]:
    """Check that torch, its CUDA and the driver are compatible, and versions tested."""
    for observation, remedy in untested_versions(facts.torch, facts.python):
        yield warning(observation, remedy)
    gpus, torch = facts.gpus, facts.torch or "is missing"
    observation = f"torch {torch}, Python {facts.python}, kernel {facts.kernel}"
    if not facts.torch or (facts.device == GPU and gpus and not facts.cuda):
        observation += ", built without CUDA" if facts.torch else ""
        yield bad(observation, "install a torch build for these devices")
        return
    if not facts.cuda or not gpus:
        yield ok(observation)
        return
    driver, supported = facts.gpu_state.driver, facts.gpu_state.cuda
    observation += f", CUDA {facts.cuda}, driver {driver}"
    if is_driver_too_old(driver, facts.cuda):
        oldest = minimum_driver(facts.cuda)[0]
        remedy = f"install driver {oldest} or newer, or a torch for an older CUDA"
        yield bad(f"{observation}: the driver is too old for this CUDA", remedy)
    elif supported and supported < parse_version(facts.cuda):
        remedy = "install a newer driver if CUDA reports a missing kernel"
        newest = ".".join(map(str, supported))
        yield note(f"{observation}, which supports CUDA {newest}", remedy)
    else:
        yield ok(observation)


def check_nccl(facts: Facts) -> Iterator[Finding]:
    """Check that torch's NCCL is not a release that is known to be faulty."""
    release = facts.measured.nccl
    if not release:
        return
    name = "NCCL " + ".".join(map(str, release))
    faults = [fault for first, last, fault in FAULTY_NCCL_RELEASES if first <= release <= last]
    remedy = "use another release: pip install nvidia-nccl-cu..., or another torch"
    yield warning(f"{name} {faults[0]}", remedy) if faults else ok(name)


# --------------------------------------------------------------------------- devices

# Reasons for a reduced GPU clock, as bits of NVML's NvmlClocksEventReasons.
CLOCK_REASONS = {
    0x8: bad("hardware slowdown, to half or less", "check the node's cooling and power supply"),
    0x40: bad("hardware thermal slowdown", "check the node's cooling"),
    0x80: bad("external power brake", "check the node's power supply"),
    0x20: warning("software thermal slowdown", "check the node's cooling"),
    0x4: note("at its power cap", "usual under load; nvidia-smi -q -d POWER shows the cap"),
    0x2: note("at a fixed application clock", "nvidia-smi -rac resets the clock"),
    0x10: note("limited to the clock of another GPU (sync boost)", "nvidia-smi -q shows the group"),
}


def check_devices(facts: Facts) -> Iterator[Finding]:
    """Check that all devices are visible, work, and are free."""
    gpus, results, error = facts.gpus, facts.measured, facts.gpu_state.error
    if error == TIMED_OUT:
        yield bad("the driver does not answer", "reboot the node")
        return
    if results.flops and results.device == GPU and not gpus:
        observation = f"{len(results.flops)} GPUs, but no NVML: faults and clocks are unknown"
        yield note(observation, "in a container, add 'utility' to NVIDIA_DRIVER_CAPABILITIES")
        return
    if facts.device_files and not gpus:
        observation = f"{facts.device_files} GPUs have device files, but the driver shows none"
        remedy = "load the driver, or install a kernel module and libraries of the same version"
        yield bad(observation + f": {error}" * bool(error), remedy)
        return
    if results.error:
        subject = "benchmark of the GPUs" if facts.device == GPU else "benchmark"
        remedy = "see dmesg and nvidia-smi; if they show no error, reboot the node"
        yield bad(f"the {subject} failed: {results.error}", remedy)
    if not gpus:
        observation = f"no GPU; {facts.usable} cores"
        remedy = "start the container with --gpus, or use run.device=cpu"
        yield ok(observation) if facts.device == "cpu" else bad(observation, remedy)
        return
    for gpu in gpus:
        if gpu.error:
            remedy = "reset the GPU or reboot the node; if the error recurs, replace the GPU"
            yield bad(f"GPU {gpu.index}: {gpu.error}", remedy)
    kinds, memory = sorted({gpu.name for gpu in gpus} - {""}), max(gpu.memory for gpu in gpus)
    observation = f"{len(gpus)} x {', '.join(kinds)}, {memory / GIB:.0f} GiB each"
    if len(kinds) > 1:
        yield warning(observation, "use equal GPUs: the fastest wait for the slowest")
    elif facts.device_files > len(gpus):
        observation += f", of {facts.device_files} with device files"
        yield note(observation, "the others belong to another job, or are lost: see dmesg")
    else:
        yield ok(observation)
    for gpu in gpus:
        if gpu.used > 0.05 * gpu.memory > 0:
            observation = f"GPU {gpu.index}: {gpu.used / 2**20:,.0f} MiB are already in use"
            yield warning(observation, "end the processes that nvidia-smi shows")
        if gpu.is_mig:
            observation = f"GPU {gpu.index} is partitioned (MIG)"
            yield note(observation, "nvidia-smi -mig 0, to use the full device")


def check_health(facts: Facts) -> Iterator[Finding]:
    """Check for faults that GPUs and their driver have recorded."""
    findings: list[Finding] = []
    for gpu in facts.gpus:
        if gpu.ecc_errors:
            errors = f"{gpu.ecc_errors} uncorrected memory errors since the last boot"
            remedy = "reset the GPU; if errors recur, replace it"
            findings.append(bad(f"GPU {gpu.index}: {errors}", remedy))
        if gpu.is_remap_failed:
            observation = f"GPU {gpu.index}: remapping a memory row failed"
            findings.append(bad(observation, "replace the GPU"))
        elif gpu.is_remap_pending:
            observation = f"GPU {gpu.index}: a memory row is pending remapping"
            findings.append(warning(observation, "reset the GPU to remap the row"))
    for bus, code in sorted(set(re.findall(r"Xid \(([^)]*)\): (\d+)", facts.kernel_log or ""))):
        observation = f"{bus}: {describe_xid(int(code))}"
        remedy = "reset the GPU or reboot the node; if the error recurs, replace the GPU"
        findings.append((bad if int(code) in XIDS else warning)(observation, remedy))
    yield from findings
    if facts.gpus and not findings:
        unknown = "driver faults unknown (the kernel log is not readable)"
        driver = unknown if facts.kernel_log is None else "no driver faults"
        yield ok(f"no memory errors, {driver}")


# Severities of DCGM's errors (DCGM_ERROR_* of dcgm_errors.h) that do not make a GPU unfit.
DCGM_MONITOR, DCGM_CONFIG = 1, 5


def check_dcgm(facts: Facts) -> Iterator[Finding]:
    """Report the results of DCGM's diagnostic."""
    if facts.dcgm_error:
        remedy = "start DCGM's host engine: systemctl start nvidia-dcgm"
        yield note(f"DCGM's diagnostic did not run: {facts.dcgm_error}", remedy)
    if not facts.dcgm:
        return
    for result in facts.dcgm:
        observation = f"{result.test}, GPU {result.gpus}: {result.message or result.status}"
        remedy = "dcgmi diag -r 3 tests longer; if it fails again, replace the GPU"
        if result.status == "Fail" and result.severity == DCGM_CONFIG:
            yield note(observation, "a setting of the node, which the message names")
        elif result.status == "Fail" and result.severity != DCGM_MONITOR:
            yield bad(observation, remedy)
        elif result.status in ("Fail", "Warn"):
            yield warning(observation, remedy)
    passed = dict.fromkeys(result.test for result in facts.dcgm if result.status == "Pass")
    failed = {result.test for result in facts.dcgm if result.status in ("Fail", "Warn")}
    if names := [name for name in passed if name not in failed]:
        yield ok(f"passed: {', '.join(names)}")


def check_clocks(facts: Facts) -> Iterator[Finding]:
    """Check the clocks, under load if possible: an idle GPU always has a low clock."""
    gpus = facts.measured.loaded or facts.gpus
    throttled: dict[int, list[str]] = {}
    for gpu in gpus:
        for bit in CLOCK_REASONS:
            if (gpu.clock_reasons or 0) & bit:
                throttled.setdefault(bit, []).append(f"{gpu.index} ({gpu.celsius} C)")
    for bit, names in throttled.items():
        reason = CLOCK_REASONS[bit]
        yield replace(reason, observation=f"GPU {', '.join(names)}: {reason.observation}")
    for gpu in gpus:
        if gpu.pcie_width and gpu.pcie_width < (gpu.max_pcie_width or 0):
            observation = f"GPU {gpu.index}: {gpu.pcie_width} of {gpu.max_pcie_width} PCIe lanes"
            yield warning(observation, "reseat the GPU or its riser")
    if gpus and not throttled:
        clocks = [gpu.clock for gpu in gpus if gpu.clock is not None]
        span = f"{min(clocks)} to {max(clocks)} MHz, " if clocks else ""
        yield ok(f"{span}not throttled")


def check_speed(facts: Facts) -> Iterator[Finding]:
    """Compare each device's speed with its siblings and its specification."""
    results, device = facts.measured, find_device_spec(facts)
    if not results.flops:
        return
    for number, same in enumerate(results.same):
        if not same:
            observation = f"device {number}: repeated matmuls give different results"
            yield bad(observation, "take the device out of service: it computes wrong numbers")
    is_cpu = facts.device == "cpu"
    scale, unit = (1e9, "GFLOP/s of float32") if is_cpu else (1e12, "TFLOP/s")
    observation = f"matmul {format_range(results.flops, scale)} {unit}, "
    observation += f"memory {format_range(results.bandwidth, 1e9)} GB/s"
    if contention := describe_cpu_contention(results):
        yield note(f"not checked: {contention}; at best {observation}", RECHECK_REMEDY)
        return
    if is_cpu or device is None:
        yield ok(observation)
        return
    compute = min(results.flops) / device.flops("bf16")
    memory = min(results.bandwidth) / device.bandwidth
    observation += f": {compute:.0%} and {memory:.0%} of the specified speed of {device.name}"
    remedy = "see clocks and health; end other processes on the device"
    yield grade(min(compute, memory), observation, remedy)
    for rates, kind in ((results.flops, "matmul"), (results.bandwidth, "memory")):
        median = statistics.median(rates)
        for number, rate in enumerate(rates):
            if rate < STRAGGLER_FRACTION * median:
                share = f"{kind} at {rate / median:.0%} of this node's median"
                yield warning(f"device {number}: {share}: all other devices wait for it", remedy)


RECHECK_REMEDY = "check again on an idle machine; 'cores' shows the limit of the cgroup"


def describe_cpu_contention(results: DeviceMeasurements) -> str:
    """Return why a CPU benchmark is meaningless; empty if it is not."""
    share = min(results.cpu_share, default=1.0)
    if share >= MIN_CPU_SHARE:
        return ""
    return f"the machine is busy: other processes used {1 - share:.0%} of the CPU time"


def format_range(values: Sequence[float], unit: float) -> str:
    """Format the lowest and the highest value, divided by ``unit``."""
    low, high = (f"{value / unit:.3g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


# --------------------------------------------------------------------------- links


def check_topology(facts: Facts) -> Iterator[Finding]:
    """Check the links between GPUs, and between GPUs and network adapters."""
    device = find_device_spec(facts)
    kinds = sorted({link for gpu in facts.gpus for link in gpu.links} - {"X", ""})
    has_nvlink = device is not None and device.link.peer_access
    if not kinds:
        return
    observation = f"GPUs connected by {', '.join(kinds)}"
    if has_nvlink and not all(link.startswith("NV") for link in kinds):
        remedy = "start nvidia-fabricmanager; inspect nvidia-smi nvlink -s"
        yield bad(f"{observation}, although these GPUs have NVLink", remedy)
    elif has_nvlink and len(kinds) > 1:
        yield warning(f"{observation}: the links differ", "inspect nvidia-smi nvlink -s")
    else:
        yield ok(observation)
    for gpu in facts.gpus if has_nvlink else ():
        for link in gpu.inactive_links:
            remedy = "reset the GPU; if the link stays inactive, replace the GPU"
            yield warning(f"GPU {gpu.index}: NVLink {link} is inactive", remedy)
        for link, count in gpu.link_recoveries:
            observation = f"GPU {gpu.index}: NVLink {link} recovered from errors {count} times"
            yield note(observation, "if the number grows during a run, replace the GPU")
    near = {root_port(adapter.pci_path) for adapter in facts.adapters}
    far = [gpu.index for gpu in facts.gpus if near and root_port(gpu.pci_path) not in near]
    if far:
        names = ", ".join(f"GPU {index}" for index in far)
        observation = f"{names}: no network adapter on the same PCIe switch"
        remedy = "in a virtual machine, which may hide it, set the provider's NCCL_TOPO_FILE"
        yield note(observation, remedy)


def root_port(pci_path: str) -> str:
    """Return the path in /sys of the root port above a device's PCIe switches."""
    return "/".join(pci_path.split("/")[:5])


def check_all_reduce(facts: Facts) -> Iterator[Finding]:
    """Check result and bus bandwidth of an all-reduce."""
    results, device = facts.measured, find_device_spec(facts)
    if not results.busbw:
        return
    if not results.right:
        remedy = "do not train on this node; NCCL_P2P_DISABLE=1 shows if a GPU link is at fault"
        yield bad("the sum over ranks is wrong", remedy)
    observation = f"{results.busbw / 1e9:.3g} GB/s for each of {len(results.flops)} ranks"
    observation += " (nccl-tests)" * results.has_nccl_tests
    if contention := describe_cpu_contention(results):
        yield note(f"not checked: {contention}; {observation}", RECHECK_REMEDY)
        return
    if device is None:
        yield ok(observation)
        return
    fraction = results.busbw / device.link.bandwidth
    observation += f", {fraction:.0%} of the link's specified {device.link.bandwidth / 1e9:.3g}"
    if facts.device == GPU:
        yield grade(fraction, observation, "see topology; NCCL_DEBUG=INFO shows NCCL's transport")
    else:
        remedy = "usual if ranks share few cores"
        yield note(observation, remedy) if fraction < BAD_FRACTION else ok(observation)


def check_copies(facts: Facts) -> Iterator[Finding]:
    """Check the speed of copies between GPUs against the specification of the link."""
    results, device = facts.measured, find_device_spec(facts)
    if device is None or not results.pairs:
        return
    a, b, slowest = min(results.pairs, key=lambda pair: pair[2])
    observation = f"slowest from GPU {a} to {b}: {slowest / 1e9:.3g} GB/s"
    # The specification is that of a collective, and a copy to one neighbor is never slower.
    is_slow = slowest < BAD_FRACTION * device.link.bandwidth
    remedy = "disable PCIe access control (ACS, IOMMU), and look for a failed link"
    yield warning(observation, remedy) if is_slow else ok(observation)
