"""Render pages from plain dicts by the templates beside this module.

A page has ``title``, ``header`` (parts), ``sections`` (``heading`` and ``parts``), and optionally
``written`` (when), ``reload_seconds``, ``chart_data`` (see `report_charts.chart_data`) with its
``time_unit``, and the ``version`` of a page that a server updates.  A part is a dict whose ``kind``
is a macro of ``templates/parts.html``.

jinja2 escapes every text, unless it is a `markupsafe.Markup`.  In addition, the page's content
security policy allows only its two scripts, by their hashes, and no requests.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

REPORT_FILE = "report.html"  # in the directory of a run or a comparison
TEMPLATES = Path(__file__).parent / "templates"

# Entries that a page may omit.
OPTIONAL = dict.fromkeys(("chart_data", "reload_seconds", "time_unit", "version", "written"))

Part = dict[str, Any]
Section = dict[str, Any]
Page = dict[str, Any]


def render_page(page: Page) -> bytes:
    """Return an HTML file that fetches nothing."""
    has_charts = bool(page.get("chart_data"))
    scripts = [_read("uplot/uPlot.iife.min.js"), _read("report.js")] if has_charts else []
    style = _read("page.css") + (_read("uplot/uPlot.min.css") if has_charts else "")
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    policy = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    if page.get("version"):
        policy += "; connect-src 'self'"  # for the page that `weft report --serve` updates
    text = _template().render(
        page=OPTIONAL | page,
        scripts=scripts,
        script_policy=Markup(policy),
        style=style,
    )
    return text.encode("utf-8", "replace")  # any text may contain half of a surrogate pair


@cache
def _read(name: str) -> Markup:
    return Markup((TEMPLATES / name).read_text("utf-8"))


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    return environment.get_template("page.html")


def text_part(text: str, style: str = "") -> Part:
    """Return a paragraph; ``style``: ``faint``, ``lead`` or ``damage``."""
    return {"kind": "text", "text": text, "style": style}


def table_part(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    marked: Iterable[int] = (),
    numbers: Iterable[int] = (),
) -> Part:
    """Return a table; ``marked``: rows to highlight, ``numbers``: numeric columns.

    A table with an empty ``head`` has none.
    """
    return {
        "kind": "table",
        "head": head,
        "rows": rows,
        "marked": set(marked),
        "numbers": set(numbers),
    }


def bar_part(name: str, amounts: Mapping[str, float], describe: Callable[[str], str]) -> Part:
    """Return a bar of amounts with their legend.

    Args:
        name: id of the bar in its page.
        amounts: positive numbers; the color of a box is the variable of page.css with its name.
        describe: returns the text of a box.
    """
    total = sum(amounts.values())
    boxes = [
        {"name": key, "width": round(100 * amount / total, 3), "text": describe(key)}
        for key, amount in amounts.items()
    ]
    return {"kind": "bar", "id": name, "boxes": boxes}
