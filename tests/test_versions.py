"""The versions of PyTorch and Python that weft says it is tested with."""

from __future__ import annotations

import importlib.util
import io
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.doctor.image_checks import Image, check_image
from weft.doctor.node_checks import CHECKS
from weft.doctor.node_facts import Facts
from weft.monitor.terminal import quiet_console
from weft.version import TESTED_PYTHON, TESTED_TORCH, TORCH_REQUIREMENT, untested_versions

CLONE = Path(__file__).parent.parent
PROJECT = tomllib.loads((CLONE / "pyproject.toml").read_text("utf-8"))["project"]
TORCH_RELEASES = [f"2.{minor}" for minor in range(TESTED_TORCH[0][1], TESTED_TORCH[1][1] + 1)]
PYTHONS = [f"3.{minor}" for minor in range(TESTED_PYTHON[0][1], TESTED_PYTHON[1][1] + 1)]
FIRST, LAST = TORCH_RELEASES[0], TORCH_RELEASES[-1]
NEXT = f"2.{TESTED_TORCH[1][1] + 1}.0"


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("script", CLONE / "scripts/test_versions.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_package_asks_for_the_tested_versions() -> None:
    assert TORCH_REQUIREMENT in PROJECT["dependencies"]
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    prefix = "Programming Language :: Python :: "
    classifiers = [text.removeprefix(prefix) for text in PROJECT["classifiers"] if prefix in text]
    assert classifiers == PYTHONS
    makefile = (CLONE / "Makefile").read_text("utf-8")
    first, last = TESTED_PYTHON
    assert f"not {first} <= sys.version_info[:2] <= {last}" in makefile
    for text in (makefile, (CLONE / "README.md").read_text("utf-8")):
        assert f"{', '.join(PYTHONS[:-1])} or {PYTHONS[-1]}" in text


def test_matrix_has_the_first_and_last_tested_versions_and_is_in_the_docs() -> None:
    matrix = load_script().MATRIX
    releases = [torch.rpartition(".")[0] for torch, _ in matrix]
    assert {FIRST, LAST} <= {*releases} <= {*TORCH_RELEASES}
    assert {python for _, python in matrix} == {*PYTHONS}
    page = (CLONE / "docs/supported-versions.md").read_text("utf-8")
    for torch_version, python in matrix:
        assert re.search(rf"torch {torch_version}\S*, Python {python}\.", page)


@pytest.mark.parametrize(
    ("torch_version", "python", "expected"),
    [
        (f"{FIRST}.0", f"{PYTHONS[0]}.0", []),
        (f"{LAST}.3+cu132", f"{PYTHONS[-1]}.9", []),
        (f"{LAST}.0a0+git1234", PYTHONS[0], []),
        ("", PYTHONS[0], []),  # doctor has its own finding
        ("2.10.1", PYTHONS[0], ["torch 2.10.1 is older than weft is tested with"]),
        (f"{NEXT}.dev20261120+cpu", PYTHONS[0], [f"torch {NEXT}.dev20261120+cpu is newer"]),
        ("3.0.0", "3.99.0", ["torch 3.0.0 is newer", "Python 3.99.0 is newer"]),
    ],
)
def test_untested_versions_names_each_version_outside_of_the_range(
    torch_version: str, python: str, expected: list[str]
) -> None:
    found = list(untested_versions(torch_version, python))
    assert len(found) == len(expected)
    for (fact, remedy), text in zip(found, expected, strict=True):
        assert text in fact
        assert f"({FIRST} to {LAST})" in fact or f"({PYTHONS[0]} to {PYTHONS[-1]})" in fact
        assert TORCH_REQUIREMENT in remedy or "use such a Python" in remedy


def test_doctor_untested_torch_is_a_warning() -> None:
    facts = Facts(torch=NEXT, python=f"{PYTHONS[0]}.0", device="cpu", cuda="13.2")
    image = check_image(facts, Image())
    for findings in (
        list(CHECKS["versions"](facts)),
        [finding for finding in image if finding.check == "torch"],
    ):
        first, second = findings
        assert first.severity == "warning"
        assert f"torch {NEXT} is newer" in first.observation
        assert TORCH_REQUIREMENT in first.remedy
        assert second.severity == "ok"


def test_start_of_a_run_warns_about_an_untested_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.planning.plan import Machine
    from weft.planning.plan_text import plan_recipe
    from weft.reporting.run_summary import print_plan

    plan = plan_recipe("demo", [], [], "1x2xCPU", Machine)[0]
    for version, expected in ((f"{LAST}.0", False), (NEXT, True)):
        monkeypatch.setattr(torch, "__version__", version)
        console = quiet_console(io.StringIO())
        print_plan(plan, "demo", console, None, "")
        assert isinstance(console.file, io.StringIO)
        assert (f"warning: torch {version} is newer" in console.file.getvalue()) == expected


def test_make_keeps_the_torch_of_the_environment(tmp_path: Path) -> None:
    """A user installs the torch for the driver first; the pinned one must not replace it."""
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    target = environment / "constraints.txt"
    pins = (CLONE / "constraints.txt").read_text("utf-8")
    pinned = re.search(r"^torch==(.*)$", pins, re.MULTILINE)
    assert pinned is not None

    def make() -> str:
        target.unlink(missing_ok=True)
        command = ["make", f"VENV={environment}", f"PYTHON={sys.executable}", str(target)]
        return subprocess.run(command, cwd=CLONE, capture_output=True, text=True, check=True).stdout

    make()
    assert target.read_text("utf-8") == pins
    (packages,) = environment.glob("lib/python*/site-packages")
    metadata = packages / "torch-2.14.1+cu126.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.14.1+cu126\n", "utf-8")
    assert "Keeping torch 2.14.1+cu126" in make()
    assert target.read_text("utf-8") == pins.replace(pinned[0], "torch==2.14.1+cu126")
