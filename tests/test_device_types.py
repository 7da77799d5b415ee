"""One module names a type of accelerator; all others are for any that PyTorch knows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.config.accelerators import GPU, supported_devices, supports

ROOT = Path(__file__).parent.parent / "weft"
NAMES = ROOT / "config" / "accelerators.py"


def device_types(text: str) -> Iterator[str]:
    """Yield where code names a GPU's device type: strings, and functions of PyTorch.

    A string counts if the type is a word of it, as in ``cuda``, ``cuda:0`` or
    ``cpu:gloo,cuda:nccl``.  Messages name the software, CUDA, in capitals.  Docstrings and comments
    do not count.
    """
    tree = ast.parse(text)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in docstrings and GPU in re.split(r"[\s,;:()]+", node.value):
                yield f"{node.lineno}: {node.value!r}"
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            is_torch = node.attr == GPU and (owner.startswith("torch") or id(node) in called)
            if is_torch or node.attr == f"is_{GPU}" or ast.unparse(node).endswith("Activity.CUDA"):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names.append(getattr(node, "module", None) or "")
            if any(GPU in name.split(".") for name in names if "torch" in ast.unparse(node)):
                yield f"{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    "line",
    [
        'device = "cuda"',
        'device = torch.device("cuda:1")',
        'dist.init_process_group("cpu:gloo,cuda:nccl")',
        'text = f"{rank} of cuda devices"',
        "torch.cuda.synchronize()",
        "x.is_cuda",
        "model.cuda()",
        "version = torch.version.cuda",
        "activities = [ProfilerActivity.CUDA]",
        "import torch.cuda.nvtx",
        "from torch import cuda",
        "from torch.cuda import Stream",
    ],
)
def test_device_types_finds_each_way_to_name_one(line: str) -> None:
    assert len(list(device_types(f'"""Docs of cuda."""\n# cuda\n{line}\n'))) == 1


@pytest.mark.parametrize(
    "line",
    [
        'error = f"CUDA {version} needs a newer driver"',
        'path = "/usr/local/cuda*/compat"',
        'package = "cuda-compat"',
        'os.environ["CUDA_VISIBLE_DEVICES"]',
        "facts.cuda",
        "torch.accelerator.synchronize()",
        "def f():\n    'Runs on cuda.'",
    ],
)
def test_device_types_ignores_names_of_software(line: str) -> None:
    assert not list(device_types(line))


def test_one_module_names_a_type_of_accelerator() -> None:
    found = [
        f"{path.relative_to(ROOT.parent)}:{place}"
        for path in sorted(ROOT.rglob("*.py"))
        if path != NAMES
        for place in device_types(path.read_text("utf-8"))
    ]
    assert found == [], (
        "use torch.accelerator, torch.get_device_module or weft.config.accelerators:\n"
        + "\n".join(found)
    )


def test_supports_unknown_device_has_only_generic_techniques() -> None:
    assert supports(GPU, "FlexAttention")
    assert not supports("hostdev", "FlexAttention")
    assert supported_devices("compilation") == ("cpu", GPU)
