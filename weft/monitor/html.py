"""Files in weft's style, and what stands in them: tables, and plotly's script."""

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


def document(title: str, body: str, head: str = "", scripts: Sequence[bytes] = ()) -> bytes:
    """An HTML file in weft's style; nothing runs in it but ``scripts``, and nothing is fetched."""
    hashes = [base64.b64encode(hashlib.sha256(script).digest()).decode() for script in scripts]
    sources = " ".join(f"'sha256-{one}'" for one in hashes) or "'none'"
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; "
    top = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}script-src {sources}"/>',
        *([head] if head else []),
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>",
        body,
    ]
    # Bytes, since plotly's script takes four times as many as a string.
    # Half of a surrogate pair may stand in any text.
    parts = ["\n".join(top).encode("utf-8", "replace")]
    for script in scripts:
        parts += [b"\n<script>", script, b"</script>"]
    return b"".join([*parts, b"\n</body>\n</html>\n"])


def plotly() -> bytes:
    """plotly.js, out of the package `plotly`, which is not imported for it.

    Raises:
        WeftError: if it is not installed.
    """
    spec = importlib.util.find_spec("plotly")
    if spec is None or spec.origin is None:
        raise WeftError("a report needs plotly: pip install 'weft[report]'")
    return (Path(spec.origin).parent / "package_data" / "plotly.min.js").read_bytes()


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    differ: Iterable[int] = (),
    numbers: Iterable[int] = (),
) -> str:
    """An HTML table of text: ``differ`` are rows to mark, ``numbers`` columns of numbers."""
    marked, right = set(differ), set(numbers)

    def cell(tag: str, column: int, text: str, more: str = "") -> str:
        kind = ' class="number"' * (column in right)
        return f"<{tag}{more}{kind}>{escape(text)}</{tag}>"

    lines = ["".join(cell("th", n, text, ' scope="col"') for n, text in enumerate(head))]
    for number, (first, *rest) in enumerate(rows):
        cells = [cell("th", 0, first, ' scope="row"')]
        cells += [cell("td", n, text) for n, text in enumerate(rest, 1)]
        kind = ' class="differs"' * (number in marked)
        lines.append(f"<tr{kind}>{''.join(cells)}</tr>")
    top, body = f"<thead><tr>{lines[0]}</tr></thead>", "\n".join(lines[1:])
    return f'<div class="wide"><table>{top}\n<tbody>\n{body}\n</tbody></table></div>'
