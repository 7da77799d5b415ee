"""Count lines of code: not blank and no comment, with docstrings and without.

``python -m tests.lines`` prints them by package; the README has the sums.
"""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent / "weft"
NOTHING = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@functools.cache
def _read(path: Path) -> tuple[str, frozenset[int]]:
    """Return a file's text and the numbers of its lines that hold code or docstrings."""
    source = path.read_text("utf-8")
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOTHING:
            lines.update(range(token.start[0], token.end[0] + 1))
    return source, frozenset(lines)


def lines_of_code(path: Path, docstrings: bool = False) -> int:
    source, lines = _read(path)
    if docstrings:
        written = source.splitlines()
        return sum(1 for number in lines if written[number - 1].strip())
    return len(lines - _docstring_lines(ast.parse(source)))


def lines_of_functions(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the name of each function of a file and its lines of code without docstrings."""
    source, lines = _read(path)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            own = lines & set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            yield node.name, len(own - _docstring_lines(node))


def _docstring_lines(tree: ast.AST) -> set[int]:
    """Return the numbers of the lines of all docstrings."""
    result: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if ast.get_docstring(node, clean=False) is not None and first is not None:
                result |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return result


def lines_of_packages(docstrings: bool = False) -> Counter[str]:
    result: Counter[str] = Counter()
    for path in ROOT.rglob("*.py"):
        result[path.relative_to(ROOT).parts[0].removesuffix(".py")] += lines_of_code(
            path, docstrings
        )
    return result


def core_modules() -> dict[str, Path]:
    """Return the modules that the loop imports, directly or not, also in functions, by name.

    The decoder counts too, although it is imported by the name of its family.
    """
    known = {
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in ROOT.rglob("*.py")
    }
    core: dict[str, Path] = {}
    remaining = ["weft.train.loop", "weft.models.decoder"]
    while remaining:
        name = remaining.pop()
        if name in core or name not in known or name == "weft":
            continue
        core[name] = known[name]
        for node in ast.walk(ast.parse(known[name].read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                remaining += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return core


if __name__ == "__main__":
    packages, documented = lines_of_packages(), lines_of_packages(docstrings=True)
    for name, count in packages.most_common():
        print(f"{count:7,} {name}, {documented[name]:,} with docstrings")
    print(f"{packages.total():7,} together, {documented.total():,} with docstrings")
    core = core_modules().values()
    code, full = sum(map(lines_of_code, core)), sum(lines_of_code(p, docstrings=True) for p in core)
    print(f"{code:7,} of them imported by train/loop.py, {full:,} with docstrings")
