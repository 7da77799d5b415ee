"""Parse NCCL's logs, and judge the network that they show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.test_node_checks import AWS, EFA, HEALTHY
from weft.doctor.nccl_log import NcclLog, describe_network, merge_logs, parse_nccl_log
from weft.doctor.network_checks import judge_network
from weft.doctor.node_facts import Facts

LOGS = Path(__file__).parent / "nccl_logs"
P5 = replace(AWS, instance_type="p5.48xlarge")
P4 = replace(AWS, instance_type="p4d.24xlarge", adapters=EFA[:4])
ETHERNET = Facts(device="cuda")
G5 = replace(ETHERNET, instance_type="g5.12xlarge")  # EFA is optional there


def read_log(name: str) -> str:
    return (LOGS / f"{name}.log").read_text("utf-8")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        (
            "efa-gpudirect-new",
            {
                "nccl": "2.29.7",
                "plugin": "1.19.0",
                "libfabric": "2.5",
                "provider": "efa",
                "fabric": "efa-direct",
                "protocol": "RDMA",
                "network": "Libfabric",
                "nics": 32,
                "gpudirect_channels": 8,
            },
        ),
        (
            "efa-gpudirect-old",
            {
                "nccl": "2.21.5",
                "plugin": "1.11.0",
                "libfabric": "1.22",
                "provider": "efa",
                "protocol": "SENDRECV",
                "network": "AWS Libfabric",
                "nics": 4,
                "gpudirect_channels": 8,
            },
        ),
        (
            "efa-without-gpudirect",
            {
                "nccl": "2.27.7",
                "plugin": "1.16.2",
                "libfabric": "2.1",
                "provider": "efa",
                "protocol": "RDMA",
                "network": "Libfabric",
                "nics": 32,
                "host_channels": 8,
            },
        ),
        (
            "tcp-fallback",
            {
                "nccl": "2.29.7",
                "plugin": "1.19.0",
                "libfabric": "2.5",
                "protocol": "RDMA",
                "network": "Socket",
                "host_channels": 4,
            },
        ),
        (
            "missing-plugin",
            {
                "nccl": "2.27.7",
                "network": "Socket",
                "plugin_error": "Could not find: libnccl-net.so.",
                "host_channels": 4,
            },
        ),
        (
            "infiniband-gpudirect",
            {
                "nccl": "2.27.7",
                "network": "IB",
                "plugin_error": "Could not find: libnccl-net.so.",
                "nics": 8,
                "gpudirect_channels": 8,
            },
        ),
    ],
)
def test_log_of_each_network_is_parsed(name: str, fields: dict[str, Any]) -> None:
    assert parse_nccl_log(read_log(name)) == NcclLog(**fields)


@pytest.mark.parametrize(
    ("name", "facts", "severity", "words"),
    [
        ("efa-gpudirect-new", P5, "ok", "EFA with GPUDirect RDMA (32 devices, aws-ofi-nccl 1.19.0"),
        ("efa-gpudirect-old", P4, "ok", "EFA with GPUDirect RDMA (4 devices"),
        ("infiniband-gpudirect", HEALTHY, "ok", "InfiniBand with GPUDirect RDMA (8 devices"),
        ("efa-without-gpudirect", P5, "warning", "EFA without GPUDirect RDMA (32 devices"),
        ("few-devices", P5, "bad", "(1 device, aws-ofi-nccl 1.19.0"),
        ("few-devices", P5, "bad", "fewer than the 32 EFA devices"),
        ("efa-gpudirect-old", replace(P5, adapters=EFA[:6], instance_type=""), "warning", "the 6"),
        ("tcp-fallback", P5, "bad", "TCP sockets (NCCL 2.29.7), although the node has EFA"),
        ("tcp-fallback", ETHERNET, "bad", "although the plug-in for EFA is loaded"),
        ("missing-plugin", P5, "bad", "Could not find: libnccl-net.so."),
        ("missing-plugin", HEALTHY, "bad", "although the node has InfiniBand"),
        ("missing-plugin", ETHERNET, "note", "TCP sockets"),
        ("missing-plugin", G5, "warning", "although g5.12xlarge supports EFA"),
        ("missing-plugin", replace(G5, instance_type="ml.p5.48xlarge"), "bad", "although p5.48xl"),
        (
            "efa-without-gpudirect",
            replace(AWS, instance_type="g6e.48xlarge", adapters=EFA[:4]),
            "ok",
            "without GPUDirect",
        ),
    ],
)
def test_network_in_use_is_judged_by_the_machine(
    name: str, facts: Facts, severity: str, words: str
) -> None:
    finding = judge_network(parse_nccl_log(read_log(name)), facts)
    assert (finding.severity, words in finding.observation) == (severity, True), finding
    assert bool(finding.remedy) == (severity != "ok")


def test_text_without_nccl_gives_unknown_network() -> None:
    assert parse_nccl_log("loss 2.0\nstep 7\n") == NcclLog()
    assert judge_network(NcclLog(), P5).severity == "note"


def test_old_name_of_the_internal_network_is_known() -> None:
    text = "host:1:2 [0] NCCL INFO Using internal Network Socket\n"
    assert parse_nccl_log(text).network == "Socket"


def test_node_uses_sockets_if_one_of_its_ranks_does() -> None:
    logs = [parse_nccl_log(read_log(name)) for name in ("efa-gpudirect-new", "tcp-fallback")]
    for order in (logs, logs[::-1]):
        merged = merge_logs(order)
        assert (merged.network, merged.nics, merged.provider) == ("Socket", 32, "efa")
        assert judge_network(merged, P5).severity == "bad"


def test_last_communicator_names_the_network() -> None:
    lines = [f"host:1:2 [0] NCCL INFO Using network {n}\n" for n in ("Libfabric", "Socket")]
    assert parse_nccl_log("".join(lines)).network == "Socket"
    assert parse_nccl_log("".join(lines[::-1])).network == "Libfabric"


def test_devices_of_a_node_are_the_fewest_of_its_ranks() -> None:
    many, few = (parse_nccl_log(read_log(n)) for n in ("efa-gpudirect-new", "few-devices"))
    assert many.nics == 32
    assert [merge_logs(order).nics for order in ([many, few], [few, many])] == [1, 1]


def test_node_has_gpudirect_only_if_all_connections_do() -> None:
    logs = [parse_nccl_log(read_log(n)) for n in ("efa-gpudirect-new", "efa-without-gpudirect")]
    assert "GPUDirect RDMA in 8 of 16 connections" in describe_network(merge_logs(logs))
    assert judge_network(merge_logs(logs), P5).severity == "warning"
