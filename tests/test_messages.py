"""Every text that weft can print, in one file, so that a change can be reviewed at once.

``tests/golden/messages.txt`` has a line for each text of three words or more in the code of weft
(messages, errors, remedies, help), with ``{}`` for each value.  The lines are sorted and name no
file, so that moving code changes nothing.  After a change of a text: ``make messages``, then read
the difference.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden" / "messages.txt"
WORD = re.compile(r"(?<![\w.{<])[A-Za-z][a-z]+(?![\w(=/])")


def test_messages_every_text_is_in_the_golden_file() -> None:
    expected = GOLDEN.read_text("utf-8").splitlines()
    difference = list(difflib.unified_diff(expected, find_messages(), lineterm="", n=0))
    assert not difference, "\n".join(["run 'make messages' and read:", *difference[:40]])


def test_find_messages_skips_docstrings_and_marks_values() -> None:
    code = (
        'def f(n):\n    "A docstring of some words."\n'
        '    raise ValueError(f"there are {n:,} ranks " f"of {f(1)!r} nodes")\n'
    )
    assert list(_texts(ast.parse(code))) == ["there are {} ranks of {} nodes"]


def find_messages() -> list[str]:
    """Return all texts of weft's code, sorted."""
    paths = sorted((ROOT / "weft").rglob("*.py"))
    return sorted({text for path in paths for text in _texts(ast.parse(path.read_text("utf-8")))})


def _texts(tree: ast.Module) -> Iterator[str]:
    parts = {id(p) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for p in n.values}
    parts |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        if id(node) in parts:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(
                str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values
            )
        else:
            continue
        if len(WORD.findall(text)) >= 3:
            yield text.replace("\n", "\\n")


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text("\n".join(find_messages()) + "\n", "utf-8")
