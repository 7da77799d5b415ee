"""Every definition is used, and text names only modules, files and keys that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from weft.config.schema import SECTIONS, keys

ROOT = Path(__file__).parent.parent
# Methods that other packages' base classes call, and names that recipes or commands use.
CALLED_BY_OTHERS = {
    "_create_tcp_store_server",  # torch's DynamicRendezvousHandler
    "do_GET",  # http.server.BaseHTTPRequestHandler
    "log_message",
    "emit",  # logging.Handler
    "extra_repr",  # torch.nn.Module
    "ignore_compile_internals",  # TorchDispatchMode
    "readable",  # io.RawIOBase
    "find_class",  # pickle.Unpickler
    "on_broken_pipe",  # rich.console.Console
    "parse",  # jinja2.ext.Extension
    "setup_context",  # torch.autograd.Function
    "writelines",  # io.TextIOBase
    "eot_token_id",  # lm_eval's TemplateLM, from here on
    "_loglikelihood_tokens",
    "loglikelihood_rolling",
    "generate_until",
    "apply_chat_template",
    "tokenizer_name",
    "_repr_html_",  # IPython
    "exit_reason",  # docs/python.md
}


@cache
def sources() -> dict[Path, ast.Module]:
    """Return the parsed files of the package."""
    return {path: ast.parse(path.read_text("utf-8")) for path in (ROOT / "weft").rglob("*.py")}


def defined(tree: ast.Module) -> set[str]:
    """Return a file's functions, classes and constants; some fields are only written."""
    result = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    for node in tree.body:
        if isinstance(node, ast.Assign):
            result |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            result.add(node.target.id)
    return {name for name in result if not name.startswith("__")}


def named(tree: ast.Module) -> set[str]:
    """Return the names that a file reads, imports, or has as a complete string."""
    results = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            results.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.alias):
            results.add(node.name.rpartition(".")[2])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            results.add(re.split("[.:]", node.value)[-1])
    return results


def test_every_definition_is_used() -> None:
    used = set().union(*map(named, sources().values())) | CALLED_BY_OTHERS
    unused = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, tree in sources().items()
        for name in defined(tree) - used
    }
    assert unused == set()


WORDS = {
    path: path.read_text("utf-8")
    for pattern in ("*.md", "docs/**/*.md", "weft/**/*.py", "weft/**/*.toml", "benchmarks/*.py")
    for path in ROOT.glob(pattern)
}
# Decisions and changes are history: they use the names of their time.
HISTORY = ("docs/decisions/", "CHANGELOG.md")
# Files of other projects.
OTHER_CASES = {
    "docs/task_guide.md",
    "benchmarks/llama3_h100_202412_torchtitan.md",
}


def exists(name: str) -> bool:
    """Return True if a dotted name is a module of weft or a definition in one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:end])
        tree = sources().get(path.with_suffix(".py")) or sources().get(path / "__init__.py")
        if tree is not None:
            return end == len(parts) or parts[end] in defined(tree) | named(tree)
    return ROOT.joinpath(*parts).is_dir()


def test_module_names_in_text_exist() -> None:
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in WORDS.items()
        if not str(path.relative_to(ROOT)).startswith(HISTORY)
        for name in re.findall(r"(?<![\w./])weft(?:\.[A-Za-z]\w*)+", text)
        if not exists(name)
    }
    assert missing == set()


def test_file_names_in_text_exist() -> None:
    directories = "docs|tests|benchmarks|scripts|examples"
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in WORDS.items()
        if not str(path.relative_to(ROOT)).startswith(HISTORY)
        for name in re.findall(rf"(?<![\w/.-])(?:{directories})/[\w./-]*\w", text)
        if name not in OTHER_CASES and not (ROOT / name).exists()
    }
    assert missing == set()


def test_key_names_in_text_exist() -> None:
    sections, known = "|".join(SECTIONS), {*keys(), "train.py"}
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in WORDS.items()
        if path.suffix == ".md" and not str(path.relative_to(ROOT)).startswith(HISTORY)
        for name in re.findall(rf"`(?:--)?((?:{sections})\.[a-z_0-9]+)`", text)
        if name not in known and not name.startswith("model.")
    }
    assert missing == set()
