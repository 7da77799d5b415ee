"""Docstrings open with a short sentence and name real arguments; every key has help."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from weft.config.schema import SECTIONS

ROOT = Path(__file__).parent.parent
OPENINGS = ("What", "Which", "Who", "Whether", "Where", "How", "Of", "By", "Inside")
PACKAGES = sorted(path.parent.name for path in ROOT.glob("weft/**/__init__.py"))


def python_files(package: str) -> list[Path]:
    return sorted(path for path in ROOT.glob("weft/**/*.py") if path.parent.name == package)


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the docstring of a module, its classes and functions."""
    yield 1, ast.get_docstring(parse(path)) or ""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, ast.get_docstring(node) or ""


def report(result: list[str]) -> str:
    return "\n" + "\n".join(result)


def test_every_key_has_help() -> None:
    missing = [
        f"{name}.{key}"
        for name, section in SECTIONS.items()
        for key, field in section.model_fields.items()
        if not field.description
    ]
    assert missing == []


def documented_arguments(doc: str) -> set[str]:
    """Return the names in the section ``Args`` of a docstring."""
    section = re.search(r"^Args:\n((?:    .*\n|\n)*)", doc + "\n", re.MULTILINE)
    lines = re.findall(
        r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*):", section[1] if section else "", re.MULTILINE
    )
    return {name.lstrip("*") for line in lines for name in line.split(", ")}


@pytest.mark.parametrize("package", PACKAGES)
def test_docstring_documents_only_arguments_that_exist(package: str) -> None:
    results = []
    for path in python_files(package):
        for node in ast.walk(parse(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            arguments = {arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)}
            extra = documented_arguments(ast.get_docstring(node) or "") - arguments
            results += [
                f"{path}:{node.lineno}: {node.name} has no argument {name}" for name in extra
            ]
    assert not results, report(results)


@pytest.mark.parametrize("package", PACKAGES)
def test_docstring_opens_with_a_short_sentence(package: str) -> None:
    """At most 80 characters, and no clause such as "What ..." in place of a verb or noun."""
    results = []
    for path in python_files(package):
        for line, doc in docstrings(path):
            first = doc.partition("\n")[0]
            if len(first) > 80 or first.split(" ")[0] in OPENINGS:
                results.append(f"{path.relative_to(ROOT)}:{line}: {len(first)} characters: {first}")
    assert not results, report(results)
