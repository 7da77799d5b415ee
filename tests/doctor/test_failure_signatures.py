"""Recognize known failures by their symptoms, and none in healthy logs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.test_nccl_log import P4, P5, read_log
from tests.doctor.test_node_checks import AWS, HEALTHY, MEASURED
from weft.doctor import failure_signatures
from weft.doctor.failure_signatures import (
    FACTS,
    explain_failure_logs,
    find_signatures,
    load_signatures,
    match_version,
)
from weft.doctor.network_checks import check_efa_versions, check_logs
from weft.doctor.node_facts import Facts

NEW = read_log("efa-gpudirect-new")
SOCKET = read_log("tcp-fallback")
P5EN = replace(P5, instance_type="ml.p5en.48xlarge", is_sagemaker_toolkit=True)
INFO = "ip-10-0-0-1:7:9 [0] NCCL INFO "
WARN = "\n[2026-11-27 10:00:00] ip-10-0-0-1:7:9 [0] "
VERSIONS = INFO + "NCCL version {}+cuda12.8\n" + INFO + "NET/OFI Initializing aws-ofi-nccl {}\n"

# The twenty failures in the order of docs/efa.md's sources: symptom, machine, name.  The texts are
# those of the reports, shortened.
ACCIDENTS: tuple[tuple[str, Facts, str], ...] = (
    (SOCKET, P5, "no-efa-device"),
    (read_log("few-devices"), P5, "few-efa-devices"),
    ("E1127 device-plugin: No valid EFA devices found\n", Facts(), "device-plugin"),
    ("fi_getinfo: -61 (No data available)\n", Facts(), "fi-info-61"),
    (INFO + "NET/OFI Selected Provider is tcp (found 1 nics)\n", P5, "provider-not-efa"),
    (
        WARN + "f:1 NCCL WARN NET/OFI Disabling shared memory failed: Protocol not available\n",
        P5,
        "provider-not-efa",
    ),
    (
        "NCCL: async error detected (err=3), task <_Task id=1 timeout_ms=600000> failed\n",
        replace(P5, cuda_compat=("/usr/local/cuda/compat/libcuda.so.1",)),
        "cuda-compat",
    ),
    (
        INFO + "NET/Plugin : dlerror=/opt/amazon/efa/lib/libfabric.so.1: version `FABRIC_1.7' not "
        "found (required by /env/lib/libnccl-net.so) No plugin found (libnccl-net.so)\n",
        P5,
        "conda-plugin",
    ),
    (
        WARN + "nccl_net_ofi_cuda_init:39 NCCL WARN NET/OFI Failed to find CUDA Runtime library: "
        "libcudart.so: cannot open shared object file: No such file or directory\n",
        P5,
        "cuda-runtime",
    ),
    (
        "libfabric:7:1::core:core:cuda_hmem_dl_init():471<info> Failed to dlopen libcudart.so\n",
        P5,
        "cuda-runtime",
    ),
    (
        INFO + "NET/Plugin: Could not find: /lib/libefa.so.1: version `EFA_1.4' not found "
        "(required by /opt/amazon/efa/lib/libfabric.so.1) libnccl-net.so\n",
        P5,
        "rdma-core",
    ),
    (
        WARN + "register_mr_buffers:544 NCCL WARN NET/OFI Unable to register memory (type = 2) for "
        "device 0. RC: -22, Error: Invalid argument\n",
        P4,
        "cuda-sync-memops",
    ),
    (
        WARN + "f:1 NCCL WARN NET/OFI Unable to insert remote address into address vector for "
        "device 0. RC: -22\n",
        P5,
        "security-group",
    ),
    (
        WARN + "f:1 NCCL WARN NET/OFI Request 0x1 (send) completed with error: err: 113\n\n* This "
        "error indicates that the security group on either this instance or the peer instance\n",
        P5,
        "security-group",
    ),
    (
        '  File "popen_fork.py", line 66, in _launch\n    self.pid = os.fork()\nOSError: [Errno '
        "12] Cannot allocate memory\n",
        P5,
        "fork",
    ),
    (
        "Libfabric error: (-12) Cannot allocate memory\nEFA internal error: (4112) Failure to post "
        "internal receive buffers\n",
        P5,
        "memlock",
    ),
    (
        "libfabric:1:2::efa:mr:efa_mr_reg_impl():850<warn> Unable to register MR: Cannot allocate "
        "memory\n",
        P5,
        "host-pages",
    ),
    (
        "libfabric:8:1::core:core:fi_getinfo_():1392<warn> fi_getinfo: provider efa output empty "
        "list\n" + SOCKET,
        P4,
        "gpudirect-refused",
    ),
    (
        WARN + "f:1 NCCL WARN NET/OFI GDR disabled on GDR-supported instance type p4d.24xlarge\n",
        P4,
        "gpudirect-refused",
    ),
    (SOCKET, P5EN, "sagemaker-instance-list"),
    (
        WARN + "graph/xml.h:101 NCCL WARN Attribute arch of node cpu not found\n",
        P5,
        "static-topology",
    ),
    (
        WARN + "bootstrap.cc:126 NCCL WARN Bootstrap : no socket interface found\n",
        P5,
        "no-socket-interface",
    ),
    (
        WARN
        + "accept:4909 NCCL WARN NET/OFI Unexpected number of remote rails for dev 3. Expected "
        "4 but got 2\n",
        P5,
        "nccl-2.28-rails",
    ),
    (VERSIONS.format("2.28.9", "1.17.1"), P5, "nccl-2.28-deadlock"),
    (
        WARN + "f:651 NCCL WARN NET/OFI EFA provider requires at least libfabric version 1.22.0.\n",
        P5,
        "old-libfabric",
    ),
    (VERSIONS.format("2.18.3", "1.9.2"), P5, "nvls-before-2.18.5"),
    (
        WARN + "f:7218 NCCL WARN NET/OFI Unexpected topo group size of 16 (minimum 1, maximum 8)\n",
        P5,
        "topology-group",
    ),
)


@pytest.mark.parametrize(("text", "facts", "name"), ACCIDENTS)
def test_known_failures_is_named_by_its_symptom(text: str, facts: Facts, name: str) -> None:
    padded = f"step 4, loss 2.1\n{text}step 5, loss 2.0\n"
    (signature,) = find_signatures(padded, facts)
    assert signature.name == name
    lines = explain_failure_logs([padded, padded], facts)
    assert lines[0] == f"known failure ({name}): {signature.cause}"
    assert len(lines) == 2


def test_known_failures_all_have_a_case_and_a_source() -> None:
    assert {name for *_, name in ACCIDENTS} == {s.name for s in load_signatures()}
    used = {name for s in load_signatures() for name in s.facts}
    assert used == set(FACTS)
    for signature in load_signatures():
        assert re.search(r"#\d+|\.cpp|\.cc", signature.source), signature
        assert signature.pattern or signature.network or signature.facts or signature.nccl


@pytest.mark.parametrize(
    ("name", "facts"),
    [("efa-gpudirect-new", P5), ("efa-gpudirect-old", P4), ("infiniband-gpudirect", HEALTHY)],
)
def test_healthy_log_has_no_failure(name: str, facts: Facts) -> None:
    assert find_signatures(read_log(name), facts) == {}
    assert explain_failure_logs([read_log(name)], facts) == []


def test_missing_plugin_is_the_toolkits_fault_only_under_the_toolkit() -> None:
    log = read_log("missing-plugin")
    assert [s.name for s in find_signatures(log, P5EN)] == ["sagemaker-instance-list"]
    alone = replace(P5EN, is_sagemaker_toolkit=False)
    assert [s.name for s in find_signatures(log, alone)] == ["no-efa-device"]


def test_versions_of_sagemakers_instance_types() -> None:
    text, facts = VERSIONS.format("2.18.3", "1.9.2"), replace(P5, instance_type="ml.p5.48xlarge")
    assert [s.name for s in find_signatures(text, facts)] == ["nvls-before-2.18.5"]


def test_tcp_on_a_machine_without_efa_is_no_failure() -> None:
    assert find_signatures(read_log("missing-plugin"), Facts(device="cuda")) == {}


@pytest.mark.parametrize(
    ("version", "limits", "expected"),
    [
        ("2.28.9", ">=2.28.9, <2.28.10", True),
        ("2.29.2", ">=2.28.9, <2.28.10", False),
        ("1.17.1-aws", "<1.18", True),
        ("1.18.0", "<1.18", False),
        ("libfabric: 1.22.0amzn1.0", ">=1.22", True),
        ("", "<9", False),
        ("?", "<9", False),
    ],
)
def test_version_limits(version: str, limits: str, expected: bool) -> None:
    assert match_version(version, limits) == expected


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"ofi_plugin": "1.17.1", "measured": replace(MEASURED, nccl=(2, 28, 9))}, "2.28-deadlock"),
        ({"efa_installer": "1.28.0"}, "cuda-sync-memops"),
        (
            {"instance_type": "p5.48xlarge", "measured": replace(MEASURED, nccl=(2, 18, 3))},
            "nvls-before",
        ),
    ],
)
def test_versions_that_fail_together_are_bad_before_a_run(
    changes: dict[str, Any], name: str
) -> None:
    (finding,) = check_efa_versions(replace(AWS, **changes))
    assert (finding.severity, name in finding.observation) == ("bad", True)


def test_logs_of_a_run_are_searched_and_each_failure_is_named_once(tmp_path: Path) -> None:
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    for rank in range(3):
        (logs / f"nccl-node-{rank}.log").write_text(SOCKET)
    memlock = next(text for text, _, name in ACCIDENTS if name == "memlock")
    (logs / "rank-0.log").write_text(f"step 1\n{memlock}")
    (logs / "rank-1.log").write_bytes(b"\xff\xfe not text")
    findings = {f.check: f for f in check_logs([tmp_path / "run"], P5)}
    assert set(findings) == {"no-efa-device", "memlock", "transport"}
    assert "nccl-node-0.log and 2 more" in findings["no-efa-device"].observation
    assert "(4112) Failure to post" in findings["memlock"].observation
    assert "ulimit -l unlimited" in findings["memlock"].remedy


def test_healthy_logs_are_ok_and_name_the_network(tmp_path: Path) -> None:
    (tmp_path / "nccl-a-1.log").write_text(NEW)
    transport, logs = check_logs([tmp_path], P5)
    assert (transport.severity, logs.severity) == ("ok", "ok")
    assert "EFA with GPUDirect RDMA (32 devices" in transport.observation
    assert "no known failure in 1 logs" in logs.observation


def test_logs_of_slurm_are_searched_and_no_logs_are_not_ok(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (finding,) = check_logs([tmp_path], P5)
    assert (finding.severity, finding.observation) == ("warning", "no logs found")
    (tmp_path / "slurm-17.out").write_text(SOCKET)
    assert {f.check for f in check_logs([tmp_path], P5)} == {"no-efa-device", "transport"}


def test_log_starts_with_the_newest_process(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    header = "--- 2026-11-27 10:00:0{} rank 0 on node, process 7\n"
    path.write_text(header.format(1) + "fi_getinfo: -61\n" + header.format(2) + "step 1\n")
    assert failure_signatures.read_log(path) == header.format(2) + "step 1\n"
    assert failure_signatures.read_log(tmp_path / "missing.log") == ""


def test_log_that_is_too_long_loses_its_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_signatures, "MAX_BYTES", 20)
    path = tmp_path / "nccl-a-1.log"
    path.write_text("0123456789" + "x" * 50 + "abcdefghij")
    assert failure_signatures.read_log(path) == "0123456789abcdefghij"
    path.write_text("0123456789abc")
    assert failure_signatures.read_log(path) == "0123456789abc"
