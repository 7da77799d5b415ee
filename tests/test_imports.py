"""A module imports only from parts of weft that precede its own in the order below."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "weft"

ORDER = (
    "config",
    "models",
    "plan",
    "parallel",
    "data",
    "optim",
    "monitor",
    "checkpoint",
    "train",
    "estimate",
    "tools",
    "cluster",
    "api",
    "cli",
    "__main__",
)
NAME = re.compile(r"weft\.\w+\.[\w.]+:\w+")
LEVEL = {name: level for level, name in enumerate(ORDER)}


# What is found by name although it is in a later part.
LATER_PARTS = {
    # An adapter decides keys of the job, and only the code that imports it can read it.
    ("plan", "weft.tools.adapter_path:adopt_adapter"),
}


def imported(path: Path) -> set[str]:
    """Return the parts of weft that a file imports, also by name."""
    results = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and NAME.fullmatch(str(node.value)):
            is_allowed = (path.relative_to(ROOT).parts[0], node.value) in LATER_PARTS
            names = [] if is_allowed else [str(node.value).partition(":")[0]]
        else:
            continue
        results |= {name.split(".")[1] for name in names if name.startswith("weft.")}
    return results


def wrong_imports() -> list[str]:
    wrong = []
    for path in ROOT.rglob("*.py"):
        part = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if part == "__init__":
            assert imported(path) == set()
            continue
        for other in imported(path) - {part}:
            if LEVEL[other] >= LEVEL[part]:
                wrong.append(f"{path.relative_to(ROOT)} imports weft.{other}")
    return wrong


def test_imports_follow_the_order_of_parts() -> None:
    assert wrong_imports() == []


def modules_of_weft(path: Path, known: set[str]) -> set[str]:
    """Return the modules of weft that a file imports, also in functions and for types."""
    results = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            results |= inner & known or {node.module or ""} & known
        elif isinstance(node, ast.Import):
            results |= {alias.name for alias in node.names} & known
    return results


def modules() -> dict[str, Path]:
    """Return the files of weft by module."""
    return {
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in ROOT.rglob("*.py")
    }


def test_imports_have_no_cycle() -> None:
    """Imports, also those in functions, have no cycle of any length."""
    names = modules()
    remaining = {name: modules_of_weft(path, set(names)) - {name} for name, path in names.items()}
    while free := {name for name, needs in remaining.items() if not needs & set(remaining)}:
        remaining = {name: needs for name, needs in remaining.items() if name not in free}
    assert remaining == {}


@pytest.mark.parametrize("module", ["weft.cluster.start", "weft.train.loop"])
def test_start_imports_neither_compiler_nor_dtensor(module: str) -> None:
    """Their imports would delay every start by a second; layouts that need them import them."""
    heavy = {"torch._dynamo", "torch.distributed.tensor", "sympy"}
    probe = f"import sys, {module}; print({heavy} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert result.stdout.strip() == "set()", result.stderr


def test_data_preparation_does_not_import_torch() -> None:
    """Tokenizing does not need torch, its import time or its memory."""
    probe = "import sys, weft.data.prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
