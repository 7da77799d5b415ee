"""The installed wheel trains the demo from any directory, without the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import weft

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_wheel_installed_elsewhere_trains_the_demo(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)], check=True
    )
    (wheel,) = tmp_path.glob("weft-*.whl")
    assert wheel.name == f"weft-{weft.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
    remote = {
        str(path.relative_to(ROOT)) for path in (ROOT / "weft").rglob("*.*") if path.is_file()
    }
    assert {name for name in remote if "__pycache__" not in name} <= names
    assert "weft/py.typed" in names
    assert not any(name.startswith("tests") for name in names)

    location, directory = tmp_path / "site", tmp_path / "elsewhere"
    directory.mkdir()
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(location), str(wheel)], check=True
    )

    def run(*words: str) -> str:
        completed = subprocess.run(
            [str(location / "bin" / "weft"), *words],
            cwd=directory,
            env=os.environ | {"PYTHONPATH": str(location)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert completed.returncode == 0, completed.stdout + completed.stderr
        return completed.stdout

    assert run("--version") == f"weft {weft.__version__}\n"
    site = subprocess.run(
        [sys.executable, "-c", "import weft; print(weft.__file__)"],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(location)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(site.stdout.strip()).is_relative_to(location)
    assert "trained 3 steps" in run(
        "train", "demo", "--train.steps", "3", "--run.nproc_per_node", "2"
    )
    assert (directory / "runs").is_dir()
    assert len(run("generate", *map(str, (directory / "runs").iterdir()), "--max-tokens", "5")) > 1
