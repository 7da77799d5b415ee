"""The site of these pages: ``make docs`` builds it into build/docs, and fails at every warning.

A page that is only ``% NAME`` in its first line is NAME.md of the folder above.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from weft import __version__

project, author, release = "weft", "the authors of weft", __version__
extensions = ["myst_parser"]
exclude_patterns = ["images"]
html_theme = "alabaster"
html_theme_options = {"description": "training large language models", "page_width": "75em"}
html_sidebars = {"**": ["about.html", "searchbox.html", "navigation.html"]}
myst_heading_anchors = 4


def read(app: Any, name: str, source: list[str]) -> None:
    """Put the page of the folder above in place, with links that lead to where things are here."""
    first, _, rest = source[0].partition("\n")
    if not first.startswith("% "):
        return
    path = Path(app.srcdir).parent / f"{first.removeprefix('% ')}.md"
    app.env.note_dependency(str(path))
    text = path.read_text("utf-8").replace("](docs/", "](")
    text = re.sub(r"\[([^\]]*)\]\(weft/[^)]*\)", r"`\1`", text)  # code is not among the pages
    text = re.sub(r"\]\((CONTRIBUTING|CHANGELOG)\.md\)", lambda m: f"]({m[1].lower()}.md)", text)
    source[0] = text.replace("](decisions/)", "](decisions/index.md)") + rest


def setup(app: Any) -> None:
    app.connect("source-read", read)
