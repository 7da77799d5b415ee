"""Parse cluster names, and read the table of devices."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weft.config.errors import InvalidConfig
from weft.config.reader import read_job
from weft.planning.devices import (
    BUILTIN_CLUSTERS,
    CPU_DEVICE,
    Cluster,
    get_device,
    linked_devices,
    load_clusters,
    match_device,
    parse_cluster,
    peak_flops,
    read_clusters,
)
from weft.planning.plan import Machine
from weft.planning.plan_text import cluster_machine
from weft.planning.resolve import resolve


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
        ("3x8xcpu", Cluster(3, 8, CPU_DEVICE), None),
    ],
)
def test_parse_cluster_valid_text_gives_nodes_devices_and_memory(
    text: str, cluster: Cluster, gib: int | None
) -> None:
    assert parse_cluster(text) == cluster
    assert parse_cluster(str(cluster)) == cluster
    assert cluster.memory_bytes == (None if gib is None else gib * 2**30)


@pytest.mark.parametrize(
    ("text", "rule", "remedy"),
    [
        ("", "is not a cluster of the form NODESxDEVICESxNAME", "such as 64x8xH100"),
        ("64x8", "is not a cluster of the form NODESxDEVICESxNAME", "such as 64x8xH100"),
        ("1x1x4090", "has an unknown device '4090'", "did you mean RTX-4090?"),
        ("-1x8xH100", "is not a cluster of the form NODESxDEVICESxNAME", "such as 64x8xH100"),
        ("0x8xH100", "has 0 devices, outside the supported range", "use 1 to 1,048,576"),
        (
            "200000x8xH100",
            "has 1,600,000 devices, outside the supported range",
            "use 1 to 1,048,576",
        ),
        (
            "9" * 400 + "x8xH100",
            "is not a cluster of the form NODESxDEVICESxNAME",
            "such as 64x8xH100",
        ),
        ("1x8xA30", "has an unknown device 'A30'", "use one of A10G, A100-40GB"),
        ("1x8xMI300", "has an unknown device 'MI300'", "did you mean MI300X?"),
        ("1x8xHB100", "has an unknown device 'HB100'", "H100"),
        ("1x8xabacus", "has an unknown device 'abacus'", "use one of A10G, A100-40GB"),
    ],
)
def test_parse_cluster_invalid_text_is_refused(text: str, rule: str, remedy: str) -> None:
    with pytest.raises(InvalidConfig) as raised:
        parse_cluster(text, "--cluster")
    [error] = raised.value.errors
    assert (error.key, error.value) == ("--cluster", text)
    assert error.rule == rule
    assert remedy in error.remedy


@pytest.mark.parametrize(
    ("text", "cluster", "assumption"),
    [
        ("64x8xh100", Cluster(64, 8, "H100"), ""),
        ("1x8xA100-80GB", Cluster(1, 8, "A100 80GB"), ""),
        ("8xH100", Cluster(1, 8, "H100"), "8xH100 is taken as 1x8xH100"),
        ("rtx4090", Cluster(1, 1, "RTX 4090"), "rtx4090 is taken as 1x1xRTX-4090"),
        ("A100", Cluster(1, 1, "A100 80GB"), "A100 is taken as 1x1xA100-80GB"),
        ("2x8xa100", Cluster(2, 8, "A100 80GB"), "2x8xa100 is taken as 2x8xA100-80GB"),
    ],
)
def test_parse_cluster_short_text_is_completed(
    text: str, cluster: Cluster, assumption: str
) -> None:
    assert parse_cluster(text) == cluster
    assert cluster.describe_assumptions(text) == ([assumption] if assumption else [])


def test_every_cluster_has_a_peak() -> None:
    """`peak_flops` knows every device, so that no run silently lacks an MFU."""
    assert all(peak_flops(name) for name in load_clusters()[0] if name != CPU_DEVICE)
    assert peak_flops("A100 80GB") == 312e12
    assert peak_flops("H100 PCIe") == 756e12
    assert peak_flops(CPU_DEVICE) is None


def test_trainium_is_another_device_type_with_a_quarter_of_a_chip_per_rank() -> None:
    chip, rank = get_device("Trn2"), get_device("Trn2 LNC2")
    assert (chip.type, rank.type, get_device("H100").type) == ("neuron", "neuron", "cuda")
    assert (chip.bf16, chip.memory_gib) == (4 * rank.bf16, 4 * rank.memory_gib)
    (note,) = parse_cluster("4x16xTrn2").describe_assumptions("4x16xTrn2")
    hint = re.search(r"as in (\S+)", note)
    assert hint
    assert parse_cluster(hint[1]).device is rank
    job, _, errors = read_job("demo", [("compile.enable", "true"), ("run.cluster", "8xTrn2")])
    errors.raise_any()
    with pytest.raises(InvalidConfig, match="not supported on the device type neuron"):
        resolve(job, cluster_machine(parse_cluster("8xTrn2")))


def test_trn2u_has_neuronlink_between_four_servers_and_efa_beyond() -> None:
    network = get_device("Trn2U").network
    assert network.busbw(4) == pytest.approx(102.4e9)
    for nodes in (8, 64):
        efa = get_device("Trn2").network.busbw(nodes)
        assert network.busbw(nodes) == pytest.approx(efa, rel=0.1)


def test_switches_of_a_rack_link_its_nodes() -> None:
    for name, num_linked in (("GB200", 72), ("GB300", 72), ("B200", 8), ("B300", 8), ("H100", 8)):
        machine = cluster_machine(parse_cluster(f"16x8x{name}"))
        assert linked_devices(machine, 8) == num_linked
    assert linked_devices(Machine("cuda", 8, "unknown"), 8) == 8


# --------------------------------------------------------------------------- user's clusters.toml


def test_user_file_adds_and_changes_devices(tmp_path: Path) -> None:
    clusters_file = tmp_path / "clusters.toml"
    clusters_file.write_text(
        """
        [devices.H100]
        software = 0.75
        calibrated = "runs/8b"
        [devices."Abacus 9"]
        like = "H100"
        memory_gib = 1
        link = "beads"
        network = "cart"
        [links.beads]
        bandwidth = 7
        latency = 1
        [networks.cart]
        bandwidth = 3
        latency = 2
        achieved = { 2 = 0.9, 16 = 0.5, 128 = 0.1 }
        """
    )
    before, _ = read_clusters(BUILTIN_CLUSTERS)
    devices, networks = read_clusters(BUILTIN_CLUSTERS, clusters_file)
    h100, abacus = devices["H100"], devices["Abacus 9"]
    assert (h100.software, h100.calibrated, h100.bandwidth) == (0.75, "runs/8b", 3350e9)
    # Other devices do not inherit the measurement.
    assert (devices["H200"].software, devices["H200"].calibrated) == (1.0, "")
    assert (abacus.software, abacus.bf16, abacus.link.bandwidth) == (1.0, h100.bf16, 7.0)
    assert networks["cart"].achieved == ((2, 0.9), (16, 0.5), (128, 0.1))
    assert networks["cart"].busbw(16) == pytest.approx(1.5)
    assert devices.keys() - before.keys() == {"Abacus 9"}
    assert {name for name in before if before[name] != devices[name]} == {"H100"}


def test_user_file_mistake_is_reported_once(tmp_path: Path) -> None:
    """Devices that are `like` the wrong one do not repeat the error."""
    clusters_file = tmp_path / "clusters.toml"
    clusters_file.write_text("[devices.H100]\nlike = 'H10'")
    with pytest.raises(InvalidConfig) as caught:
        read_clusters(BUILTIN_CLUSTERS, clusters_file)
    assert len(caught.value.errors) == 1


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[[[", [" cannot be read: "]),
        ("device.X.bf16 = 1", [": device is not a table of entries. Use [devices.NAME]"]),
        ("devices = 3", [": devices is not a table of entries"]),
        ("[devices]\nH100 = 3", [": devices is not a table of entries"]),
        (
            "[devices.H100]\nbandwidht = 3\nmemory_gib = 'much'\nlaunch = 0",
            [
                ".bandwidht=3 is not a known key. Did you mean 'bandwidth'",
                ': devices.H100.memory_gib="much" must be a number',
                ": devices.H100.launch=0 must be greater than 0",
            ],
        ),
        (
            "[devices.X]\nlike = 'H10'\n[devices.Y]\nlike = 'Y'\n[devices.Z]\nlink = ['pcie4']",
            [
                ': devices.X.like="H10" is not another device. Use one of',
                ': devices.Y.like="Y" is not another device',
                ": devices.Z.link=['pcie4'] is not a known link",
            ],
        ),
        ("[devices.X]\nlink = 'pcie4'", [".X.bandwidth is missing", ".X.achieved is missing"]),
        ("[links.pcie4]\nbandwidth = 0", [": links.pcie4.bandwidth=0 "]),
        ("[networks.n]\nbandwidth = 1\nlatency = 1", [": networks.n.achieved is missing"]),
        (
            "[devices.H100]\nachieved = { float8 = 1e15 }\ncores = 0\nflash = [0, 0]\nbf16 = -1",
            [
                ".achieved={'float8': 1000000000000000.0} must have an entry for bf16",
                ": devices.H100.cores=0 must be greater than 0",
                ": devices.H100.flash=[0, 0] must be greater than 0",
                ": devices.H100.bf16=-1 must be at least 0",
            ],
        ),
        ("[links.nvlink4]\ndomain = -1", [": links.nvlink4.domain=-1 "]),
        ("[networks.efa-400]\nachieved = { 0 = 0.9 }", [": networks.efa-400.achieved={'0': "]),
        ("[networks.n]\nachieved.few = 1", [": networks.n.achieved={'few': 1} "]),
    ],
)
def test_user_file_mistakes_are_refused(tmp_path: Path, text: str, parts: list[str]) -> None:
    clusters_file = tmp_path / "clusters.toml"
    clusters_file.write_text(text)
    with pytest.raises(InvalidConfig) as caught:
        read_clusters(BUILTIN_CLUSTERS, clusters_file)
    lines = [str(error) for error in caught.value.errors]
    assert all(line.startswith(str(clusters_file)) for line in lines)
    assert all(any(part in line for line in lines) for part in parts), lines


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H20-3e", "H20"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("NVIDIA RTX A6000", "RTX A6000"),
    ],
)
def test_match_device_other_board_is_another_device(driver: str, name: str | None) -> None:
    result = match_device(driver, 80 << 30)
    assert (result and result.name) == name


def test_read_clusters_empty_link_is_reported(tmp_path: Path) -> None:
    """An empty `link` is an error; an unknown `like` gives one error."""
    file = tmp_path / "clusters.toml"
    file.write_text('[devices.X]\nlike = "H100"\nlink = ""\n[devices.Z]\nlike = "nobody"\n')
    with pytest.raises(InvalidConfig) as caught:
        read_clusters(BUILTIN_CLUSTERS, file)
    output = [str(error).partition("=")[0].partition(": ")[2] for error in caught.value.errors]
    assert output == ["devices.X.link", "devices.Z.like"]
