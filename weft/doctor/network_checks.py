"""Checks of network adapters, of EFA's software, and of NCCL's network."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from weft.config.accelerators import GPU
from weft.config.formatting import display_path
from weft.doctor.failure_signatures import (
    Signature,
    expected_devices,
    find_logs,
    find_signatures,
    read_log,
)
from weft.doctor.nccl_log import NcclLog, describe_network, merge_logs, parse_nccl_log
from weft.doctor.node_facts import Facts, Finding, NetworkMeasurements, bad, note, ok, warning
from weft.planning.instance_types import InstanceType, find_instance_type

# Fractions of the speed of the other nodes below which a link gets a warning, and is bad.
WARNING_FRACTION, BAD_FRACTION = 0.8, 0.5
# Fractions of the network bandwidth of the instance type.  A benchmark of seconds does not reach
# it, so only a large difference counts.
SPEC_WARNING_FRACTION, SPEC_BAD_FRACTION = 0.4, 0.1


def check_rdma(facts: Facts) -> Iterator[Finding]:
    """Check the RDMA adapters, and NCCL's access to them."""
    if not facts.adapters:
        if facts.nodes > 1 and facts.device == GPU:
            remedy = "request nodes with InfiniBand or EFA; a container needs /dev/infiniband"
            yield warning("no RDMA adapter: nodes communicate over TCP", remedy)
        return
    kinds = sorted({adapter.driver or "?" for adapter in facts.adapters})
    rates = sorted({adapter.rate for adapter in facts.adapters})
    observation = f"{len(facts.adapters)} x {', '.join(kinds)}, {', '.join(rates)}"
    down = [adapter.name for adapter in facts.adapters if "ACTIVE" not in adapter.state]
    remedy = "check cable, switch port and subnet manager; ibstat shows details"
    not_active = f"{observation}; not active: {', '.join(down)}"
    yield warning(not_active, remedy) if down else ok(observation)
    if facts.gpus and not facts.has_efa and "nvidia_peermem" not in facts.modules:
        remedy = "modprobe nvidia_peermem, unless the kernel has DMA-BUF (since 5.12)"
        yield note("nvidia_peermem is not loaded: GPUs may send through host memory", remedy)


# --------------------------------------------------------------------------- EFA


def check_efa(facts: Facts) -> Iterator[Finding]:
    """Check EFA adapters, their libfabric provider, and NCCL's plug-in."""
    instance = find_instance_type(facts.instance_type)
    if instance and facts.gpus and facts.nodes > 1:
        yield from _check_device_count(facts, instance)
    if not facts.has_efa:
        return
    remedy = "install it (efa_installer.sh); in a container pass /dev/infiniband/uverbs*"
    if not facts.libfabric:
        yield warning("EFA adapters, but no fi_info to query libfabric", remedy)
    elif "provider: efa" not in facts.efa_provider:
        yield bad("EFA adapters, but libfabric has no efa provider", remedy)
    if facts.gpus and not facts.ofi_plugin:  # a warning, as it may be in an unusual directory
        remedy = "install aws-ofi-nccl, and add it to LD_LIBRARY_PATH; otherwise NCCL uses TCP"
        yield warning("NCCL's plug-in for EFA was not found", remedy)
    elif facts.gpus:
        fabric = re.search(r"libfabric: (\S+)", facts.libfabric)
        yield ok(f"aws-ofi-nccl {facts.ofi_plugin}, libfabric {fabric[1] if fabric else '?'}")
    if facts.gpus:
        yield from _check_gpudirect(facts)
    yield from check_copies(facts)
    yield from _check_huge_pages(facts)


def _check_device_count(facts: Facts, instance: InstanceType) -> Iterator[Finding]:
    count = sum(adapter.driver == "efa" for adapter in facts.adapters)
    observation = f"{count} of the {instance.efa} EFA devices of {facts.instance_type}"
    remedy = "attach an EFA interface to each network card; pod: request vpc.amazonaws.com/efa: "
    remedy += f"{instance.efa}; docker: --device for each /dev/infiniband/uverbs*"
    if count == 0:
        yield bad(f"none of the {instance.efa} EFA devices of {facts.instance_type}", remedy)
    elif count < instance.efa:
        yield warning(observation, remedy)
    if 0 <= facts.uverbs < count:
        observation = f"{facts.uverbs} device files /dev/infiniband/uverbs* for {count} EFA devices"
        yield (bad if facts.uverbs == 0 else warning)(observation, remedy)


def _check_gpudirect(facts: Facts) -> Iterator[Finding]:
    efa = [adapter for adapter in facts.adapters if adapter.driver == "efa"]
    if not any(adapter.rdma_read for adapter in efa):
        observation = "the adapters lack RDMA read, so there is no GPUDirect RDMA"
        yield warning(observation, "use instances that support it (p4d, p5 and later)")
    elif any(adapter.p2p == "" for adapter in efa):
        observation = "EFA's driver has no provider of GPU memory (device/p2p is empty)"
        remedy = "load NVIDIA's driver before EFA's, or use DMA-BUF (NVIDIA's open kernel modules)"
        yield note(observation, remedy)


def check_copies(facts: Facts) -> Iterator[Finding]:
    """Check for software that is there twice, and for cuda-compat."""
    if facts.cuda and len(facts.ofi_plugin_paths) > 1:
        observation = f"several plug-ins of NCCL: {', '.join(facts.ofi_plugin_paths)}"
        remedy = "remove all but one (conda: conda remove aws-ofi-nccl); the first is used"
        yield warning(observation, remedy)
    if len(facts.libfabric_paths) > 1:
        observation = f"several copies of libfabric: {', '.join(facts.libfabric_paths)}"
        yield warning(observation, "keep only that of the EFA installer, below /opt/amazon/efa")
    if facts.cuda and facts.cuda_compat:
        observation = f"cuda-compat is in the image: {', '.join(facts.cuda_compat)}"
        remedy = "remove the package cuda-compat-*, with which NCCL over EFA was seen to hang"
        yield warning(observation, remedy)


def _check_huge_pages(facts: Facts) -> Iterator[Finding]:
    """Check the huge pages of the node, from which libfabric takes its buffers."""
    huge = facts.variables.get("FI_EFA_USE_HUGE_PAGE", "")
    if facts.huge_pages == 0 and huge != "0":
        observation = "no huge pages: libfabric's EFA provider uses small ones"
        remedy = "pod: request hugepages-2Mi: 5120Mi; host: sysctl vm.nr_hugepages=5128"
        yield note(observation, remedy)
    elif facts.huge_pages > 0 and facts.huge_pages_free == 0 and huge != "0":
        observation = f"all {facts.huge_pages:,} huge pages are in use: forks of ranks may fail"
        yield note(observation, "set FI_EFA_USE_HUGE_PAGE=0, or raise vm.nr_hugepages")


def check_efa_versions(facts: Facts) -> Iterator[Finding]:
    """Check for versions of NCCL, aws-ofi-nccl and libfabric that fail together."""
    if facts.has_efa and facts.gpus:
        found = [s for s in find_signatures("", facts) if not s.needs_log]
        for signature in found:
            yield bad(f"{signature.name}: {signature.cause}", signature.remedy)
        if not found:
            yield ok("no pair of versions that is known to fail")


# --------------------------------------------------------------------------- logs


def check_logs(paths: Iterable[Path], facts: Facts) -> Iterator[Finding]:
    """Check logs for known failures; each is one finding, with its first log.

    Args:
        paths: logs and run directories.
        facts: the machine that wrote the logs, as far as it is known.
    """
    found: dict[str, tuple[Signature, str, list[Path]]] = {}
    networks: list[NcclLog] = []
    logs = [*find_logs(paths)]
    for path in logs:
        text = read_log(path)
        log = parse_nccl_log(text)
        networks += [log] if log.network else []
        for signature, line in find_signatures(text, facts, log).items():
            if signature.needs_log or log.nccl:
                found.setdefault(signature.name, (signature, line, []))[2].append(path)
    for name, (signature, line, where) in found.items():
        text = display_path(where[0])
        text += f" and {len(where) - 1} more" if len(where) > 1 else ""
        text += f", '{line}'" if line else ""
        yield bad(f"{text}: {signature.cause}", signature.remedy, check=name)
    if networks:
        yield replace(judge_network(merge_logs(networks), facts), check="transport")
    if not logs:
        yield warning("no logs found", "give a run directory, or log files", check="logs")
    elif not found:
        yield ok(f"no known failure in {len(logs)} logs", check="logs")


# --------------------------------------------------------------------------- the network in use


def check_transport(facts: Facts) -> Iterator[Finding]:
    """Check the network that NCCL really used, by its log."""
    if logs := facts.network.nccl_logs:
        yield judge_network(merge_logs(map(parse_nccl_log, logs)), facts)


def judge_network(log: NcclLog, facts: Facts) -> Finding:
    """Return a finding about the network that NCCL uses.

    Args:
        log: what NCCL logged on this node.
        facts: adapters and instance type of this node; a node with adapters should use them.
    """
    observation = f"NCCL uses {describe_network(log)}"
    instance, count = find_instance_type(facts.instance_type), expected_devices(facts)
    remedy = "see the failures in docs/efa.md; weft doctor shows what is missing"
    if not log.network:
        return note("NCCL's log does not name its network", "set NCCL_DEBUG=INFO")
    if log.network == "Socket":
        if not (facts.adapters or instance or log.plugin):
            return note(observation, "usual without RDMA adapters, and this machine has none")
        severity, better = bad, "the plug-in for EFA is loaded"
        if facts.adapters:
            better = f"the node has {'EFA' if facts.has_efa else 'InfiniBand'}"
        elif instance and not log.plugin:
            severity = bad if instance.gpudirect else warning
            better = f"{facts.instance_type.removeprefix('ml.')} supports EFA"
        reason = f": {log.plugin_error}" if log.plugin_error else ""
        return severity(f"{observation}, although {better}{reason}", remedy)
    if log.uses_plugin and log.provider not in ("", "efa"):
        return bad(f"{observation}, which is not EFA", remedy)
    if log.provider == "efa" and 0 < log.nics < count:
        remedy = f"give the container all {count} EFA devices"
        severity = bad if log.nics < count / 2 else warning
        return severity(f"{observation}: fewer than the {count} EFA devices of the node", remedy)
    if log.host_channels and (not log.uses_plugin or not instance or instance.gpudirect):
        remedy = "check /sys/class/infiniband/*/device/p2p, nvidia_peermem and DMA-BUF"
        remedy += "; FI_EFA_USE_DEVICE_RDMA=0 and NCCL_NET_GDR_LEVEL disable it"
        return warning(f"{observation}: data passes through host memory", remedy)
    return ok(observation)


def check_network(facts: Facts) -> Iterator[Finding]:
    """Check the bandwidth between nodes against each other and the instance type."""
    network = facts.network
    for error in network.errors:
        remedy = "check that node and its links: firewall, security group, cable, its log"
        yield bad(error, remedy)
    if not network.pairs:
        return
    rates = [rate for *_, rate in network.pairs]
    text = f"{_format_rate(min(rates))} to {_format_rate(max(rates))}"
    observation = f"{len(rates)} pairs of {len(network.nodes)} nodes: {text} in each direction"
    if len(rates) == 1:
        observation = f"{network.pairs[0][0]} and {network.pairs[0][1]}: {text.split(' to ')[0]}"
    if network.busbw:
        ranks = len(network.nodes) * network.ranks_per_node
        observation += f"; all-reduce over {ranks} ranks: {_format_rate(network.busbw)} each"
    slow = list(_find_slow_links(network))
    instance = find_instance_type(facts.instance_type) if facts.device == GPU else None
    if instance:
        fraction = max(rates) / instance.bandwidth
        observation += f"; {fraction:.0%} of the {_format_rate(instance.bandwidth)} of "
        observation += facts.instance_type
        remedy = "see transport: the network that NCCL uses; docs/efa.md"
        if fraction < SPEC_WARNING_FRACTION:
            yield (bad if fraction < SPEC_BAD_FRACTION else warning)(observation, remedy)
            observation = ""
    if observation:
        yield ok(observation)
    yield from slow


def _find_slow_links(network: NetworkMeasurements) -> Iterator[Finding]:
    """Yield a finding for each slow node, and for each slow pair of other nodes.

    The reference is the median of the best rate of each node: a slow node makes all its pairs slow,
    which among few nodes are most of the pairs.
    """
    best: dict[str, float] = {}
    for a, b, rate in network.pairs:
        best |= {node: max(rate, best.get(node, 0.0)) for node in (a, b)}
    reference = sorted(best.values())[len(best) // 2]
    remedy = "exclude it, and check its adapters, cable and switch port: all others wait for it"
    slow_nodes = {node for node, rate in best.items() if rate < WARNING_FRACTION * reference}
    for node in sorted(slow_nodes):
        share = best[node] / reference
        observation = f"node {node} is slow: at most {_format_rate(best[node])} to any other, "
        observation += f"{share:.0%} of the usual {_format_rate(reference)}"
        yield (bad if share < BAD_FRACTION else warning)(observation, remedy)
    for a, b, rate in network.pairs:
        share = rate / reference
        if share < WARNING_FRACTION and not {a, b} & slow_nodes:
            observation = f"{a} and {b}: {_format_rate(rate)}, {share:.0%} of the usual rate"
            remedy = "check the path between them: switch, placement group, other traffic"
            yield (bad if share < BAD_FRACTION else warning)(observation, remedy)


def _format_rate(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"
