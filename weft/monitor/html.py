"""HTML pages in weft's style, tables, and plotly's script."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from weft.config.errors import WeftError

STYLE = (resources.files("weft.monitor") / "report.css").read_text("utf-8")

Section = tuple[str, str]  # heading as text, content as HTML


def render_document(title: str, body: str, head: str = "", scripts: Sequence[bytes] = ()) -> bytes:
    """Return an HTML file that runs only ``scripts`` and fetches nothing."""
    hashes = [base64.b64encode(hashlib.sha256(script).digest()).decode() for script in scripts]
    sources = " ".join(f"'sha256-{digest}'" for digest in hashes) or "'none'"
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; "
    top = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}script-src {sources}"/>',
        *([head] if head else []),
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>",
        body,
    ]
    # Bytes, because plotly's script takes four times as many as a string.
    # Any text may contain half of a surrogate pair.
    chunks = ["\n".join(top).encode("utf-8", "replace")]
    for script in scripts:
        chunks += [b"\n<script>", script, b"</script>"]
    return b"".join([*chunks, b"\n</body>\n</html>\n"])


def read_plotly() -> bytes:
    """Return plotly.js from the package `plotly`, without importing the package.

    Raises:
        WeftError: if the package is not installed.
    """
    spec = importlib.util.find_spec("plotly")
    if spec is None or spec.origin is None:
        raise WeftError("a report needs plotly: pip install 'weft[report]'")
    return (Path(spec.origin).parent / "package_data" / "plotly.min.js").read_bytes()


def render_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    differ: Iterable[int] = (),
    numbers: Iterable[int] = (),
) -> str:
    """Return an HTML table; ``differ``: rows to mark, ``numbers``: numeric columns."""
    marked, right = set(differ), set(numbers)

    def cell(tag: str, column: int, text: str, attributes: str = "") -> str:
        kind = ' class="number"' * (column in right)
        return f"<{tag}{attributes}{kind}>{escape(text)}</{tag}>"

    lines = ["".join(cell("th", n, text, ' scope="col"') for n, text in enumerate(head))]
    for number, (first, *rest) in enumerate(rows):
        cells = [cell("th", 0, first, ' scope="row"')]
        cells += [cell("td", n, text) for n, text in enumerate(rest, 1)]
        kind = ' class="differs"' * (number in marked)
        lines.append(f"<tr{kind}>{''.join(cells)}</tr>")
    top, body = f"<thead><tr>{lines[0]}</tr></thead>", "\n".join(lines[1:])
    return f'<div class="wide"><table>{top}\n<tbody>\n{body}\n</tbody></table></div>'
