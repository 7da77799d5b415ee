"""Containers on a real Slurm of two virtual nodes, with stand-ins for Pyxis and Apptainer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import slurm
from tests.commands import check_against_reference
from tests.slurm import Slurm, wait_until
from tests.submission import auto_resume, containers
from tests.submission.slurm_jobs import Launcher

MISSING = slurm.missing() or auto_resume.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=MISSING or "-"),
    pytest.mark.timeout(1200, method="signal"),  # so that fixtures tidy up
]
SETUP = "echo setup: $GREETING $PLACE $SECRET $(ls -d /opt/*)"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    plugin = containers.build_plugin(tmp_path_factory.mktemp("plugin"))
    with slurm.cluster(plugin=plugin) as created:
        yield created


@pytest.fixture
def launcher(cluster: Slurm, tmp_path: Path, store_path: Path) -> Iterator[Launcher]:
    created = Launcher(cluster, tmp_path, Path("/data") / store_path.name)
    containers.write_image(tmp_path / "weft.sqsh")
    containers.write_apptainer(tmp_path / "bin")
    # The weft of the host must not start in the container.
    (tmp_path / "bin" / "weft").write_text("#!/bin/sh\necho weft of the host\nexit 9\n")
    yield created
    cluster.run("scancel", "--user=root")
    wait_until(cluster.free, "that the nodes are free")


def container(launcher: Launcher, store: Path, runtime: str) -> list[str]:
    """Return options that start the image; the data are at /data there."""
    (launcher.directory / "mine.toml").write_text('extends = "demo"\n')
    mounts = f"/data=host:{store.parent},/opt/weft=image"
    words = ["--launch.image", str(launcher.directory / "weft.sqsh"), "--launch.mounts", mounts]
    return [*words, "--launch.container", runtime]


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
@pytest.mark.parametrize("setup", ["", SETUP], ids=["plain", "setup"])
def test_slurm_container_trains(
    runtime: str, setup: str, launcher: Launcher, tmp_path: Path, store_path: Path
) -> None:
    """The run directory is mounted, the recipe is there, and setup runs in the container."""
    launcher.environment |= {"HOST_SECRET": "value"}
    words = container(launcher, store_path, runtime)
    words += ["--launch.env", "GREETING=job", "--launch.secrets", "SECRET=env:HOST_SECRET"]
    words += ["--launch.setup", f'["{setup}"]'] if setup else []
    launcher.weft("launch", "mine.toml", "--on", "slurm", *launcher.words, "--nodes", "2", *words)
    assert "ended: completed" in launcher.wait_for_status("ended"), launcher.out()
    assert "training on 2 nodes" in launcher.out()
    assert ("setup: job image value /opt/weft\n" in launcher.out()) == bool(setup)
    check_against_reference(tmp_path, store_path, 20)


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
def test_slurm_container_without_its_data_fails(
    runtime: str, launcher: Launcher, store_path: Path
) -> None:
    """The stand-ins give a container nothing that is not mounted."""
    words = container(launcher, store_path, runtime)
    words[3] = words[3].replace(f"host:{store_path.parent}", "image")
    launcher.launch("--nodes", "1", *words)
    assert "ended: failed" in launcher.wait_for_status("ended")
    assert "data.path" in launcher.out()


def test_slurm_without_pyxis_is_refused(tmp_path: Path, store_path: Path) -> None:
    with slurm.cluster() as plain:
        launcher = Launcher(plain, tmp_path, Path("/data") / store_path.name)
        out = launcher.launch("--nodes", "1", *container(launcher, store_path, "pyxis"), status=2)
    assert "srun has no option --container-image, so Pyxis is not installed" in out
    assert "does not exist on this host, so every node must have the file" in out
    assert os.listdir(tmp_path).count("run") == 0
