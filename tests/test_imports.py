"""A module imports only from parts of weft that precede its own in the order below."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent / "weft"

ORDER = (
    "version",
    "config",
    "models",
    "planning",
    "parallel",
    "data",
    "monitor",
    "records",
    "optim",
    "checkpoint",
    "training",
    "estimate",
    "preparation",
    "inference",
    "conversion",
    "reporting",
    "doctor",
    "supervision",
    "verification",
    "comparison",
    "submission",
    "api",
    "cli",
    "__main__",
)
LEVEL = {name: level for level, name in enumerate(ORDER)}
FOR_EXTRAS = {
    "weft.parallel.float8.experts",
    "weft.parallel.float8.sequence_gather",
    "weft.inference.lm_eval_model",
}
# Techniques that are a directory.
DOORS = ("weft.parallel.float8", "weft.parallel.lora")
NAME = re.compile(r"(weft(?:\.\w+)+)(?::\w+)?")


def modules() -> dict[str, Path]:
    """Return the files of weft by module."""
    return {
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in ROOT.rglob("*.py")
    }


def commands() -> set[str]:
    """Return the modules that run as a process; naming one is not an import."""
    names = modules()
    return {
        name
        for name, path in names.items()
        if 'if __name__ == "__main__"' in path.read_text() or f"{name}.__main__" in names
    }


KNOWN, COMMANDS = frozenset(modules()), frozenset(commands())


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@cache
def modules_of_weft(path: Path) -> set[str]:
    """Return the modules of weft that a file imports, also in functions, for types, and by name.

    ``weft`` itself is the Python interface: it imports `weft.api` when one of its names is used.
    """
    results = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            results |= inner & KNOWN or {node.module or ""} & KNOWN
        elif isinstance(node, ast.Import):
            results |= {alias.name for alias in node.names} & KNOWN
        elif isinstance(node, ast.Constant) and (match := NAME.fullmatch(str(node.value))):
            is_process = ":" not in match[0] and match[1] in COMMANDS
            results |= set() if is_process else {match[1]} & KNOWN
    return results


def wrong_imports() -> list[str]:
    wrong = []
    for path in ROOT.rglob("*.py"):
        part = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for module in modules_of_weft(path):
            other = module.partition(".")[2].partition(".")[0]
            if part != "__init__" and other not in ("", part) and LEVEL[other] >= LEVEL[part]:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    return wrong


def test_imports_follow_the_order_of_parts() -> None:
    assert wrong_imports() == []


def test_imports_have_no_cycle() -> None:
    """Imports, also those in functions and by name, have no cycle of any length."""
    remaining = {
        name: modules_of_weft(path) - {name} for name, path in modules().items() if name != "weft"
    }
    while free := {name for name, needs in remaining.items() if not needs & set(remaining)}:
        remaining = {name: needs for name, needs in remaining.items() if name not in free}
    assert remaining == {}


def test_code_outside_of_a_technique_imports_only_its_door() -> None:
    """The ``__init__`` of such a directory exports what others use; the files in it are its own."""
    wrong = [
        f"{module} imports {name}"
        for module, path in modules().items()
        for door in DOORS
        if not f"{module}.".startswith(f"{door}.")
        for name in modules_of_weft(path)
        if name.startswith(f"{door}.")
    ]
    assert wrong == []


def test_modules_import_only_the_dependencies_of_the_plain_installation() -> None:
    """``pip install weft`` brings no extra: its packages are imported inside functions.

    Modules that are for an extra may import it.  Other modules import these inside functions.
    """
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text("utf-8"))["project"]
    names = (re.split(r"[^\w-]", text)[0] for text in project["dependencies"])
    known = {name.replace("-", "_") for name in names} | sys.stdlib_module_names
    # Modules of jinja2, pydantic and nvidia-ml-py.
    known |= {"weft", "markupsafe", "pydantic_core", "pynvml"}
    wrong = []
    for module, path in modules().items():
        for node in parse(path).body:
            found: list[str] = []
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                found = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in found:
                if name in FOR_EXTRAS and module not in FOR_EXTRAS:
                    wrong.append(f"{module} imports {name}, which is for an extra")
                elif name.partition(".")[0] not in known and module not in FOR_EXTRAS:
                    wrong.append(f"{module} imports {name}")
    assert wrong == []


def test_start_imports_neither_compiler_nor_dtensor() -> None:
    """Their imports would delay every start by a second; layouts that need them import them."""
    heavy = {"torch._dynamo", "torch.distributed.tensor", "sympy"}
    probe = "import sys\n"
    for module in ("weft.supervision.start", "weft.training.loop"):
        probe += f"import {module}\nprint('{module}', {heavy} & sys.modules.keys())\n"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert result.stdout == "weft.supervision.start set()\nweft.training.loop set()\n", result


def test_data_preparation_does_not_import_torch() -> None:
    """Tokenizing does not need torch, its import time or its memory."""
    probe = "import sys, weft.data.prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
