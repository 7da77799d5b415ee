"""Clusters by name, and what is known of their devices."""

from __future__ import annotations

import pytest

from weft.job import Problem
from weft.plan.devices import CPU, Cluster, known_clusters, parse_cluster, peak_flops


@pytest.mark.parametrize(
    ("text", "cluster", "gib"),
    [
        ("64x8xH100", Cluster(64, 8, "H100"), 80),
        ("1x8xh200", Cluster(1, 8, "H200"), 141),
        (" 2X4XA100-80GB ", Cluster(2, 4, "A100 80GB"), 80),
        ("2x4xa100_40gb", Cluster(2, 4, "A100 40GB"), 40),
        ("3x8xmi300x", Cluster(3, 8, "MI300X"), 192),
        ("1x2xrtx4090", Cluster(1, 2, "RTX 4090"), 24),
        ("1x8xH100-PCIe", Cluster(1, 8, "H100 PCIe"), 80),
        ("2048x8xB200", Cluster(2048, 8, "B200"), 180),
        ("3x8xcpu", Cluster(3, 8, CPU), None),
    ],
)
def test_clusters(text: str, cluster: Cluster, gib: int | None) -> None:
    assert parse_cluster(text) == cluster
    assert parse_cluster(str(cluster)) == cluster
    assert cluster.memory_bytes == (None if gib is None else gib * 2**30)


@pytest.mark.parametrize(
    ("text", "rule", "remedy"),
    [
        ("", "is not a cluster", "such as 64x8xH100"),
        ("H100", "is not a cluster", "such as 64x8xH100"),
        ("8xH100", "is not a cluster", "such as 64x8xH100"),
        ("-1x8xH100", "is not a cluster", "such as 64x8xH100"),
        ("0x8xH100", "has 0 devices", "use 1 to 1,048,576"),
        ("200000x8xH100", "has 1,600,000 devices", "use 1 to 1,048,576"),
        ("9" * 400 + "x8xH100", "is not a cluster", "such as 64x8xH100"),
        # Two devices of one name are told apart, not guessed.
        ("1x8xA100", "'A100' is not a known device", "A100-40GB or A100-80GB or A100-PCIe?"),
        ("1x8xH20", "'H20' is not a known device", "did you mean H200?"),
        ("1x8xMI300", "'MI300' is not a known device", "did you mean MI300X?"),
        ("1x8xHB100", "'HB100' is not a known device", "H100"),
        ("1x8xabacus", "'abacus' is not a known device", "known: A10G, A100-40GB"),
    ],
)
def test_what_is_no_cluster(text: str, rule: str, remedy: str) -> None:
    problem = parse_cluster(text, "--cluster")
    assert isinstance(problem, Problem)
    assert (problem.key, problem.value) == ("--cluster", text)
    assert problem.rule == rule
    assert remedy in problem.remedy


def test_every_cluster_has_a_peak() -> None:
    """A name of a cluster that `peak_flops` did not know would lose the MFU without a word."""
    assert all(peak_flops(name) for name in known_clusters()[0] if name != CPU)
    assert peak_flops("A100 80GB") == 312e12
    assert peak_flops("H100 PCIe") == 756e12
    assert peak_flops(CPU) is None
