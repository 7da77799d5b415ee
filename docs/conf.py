"""The site of these pages: ``make docs`` builds it into build/docs, and fails at every warning.

The pages stay plain Markdown, readable on GitHub.  While Sphinx reads them, `read`

- replaces a page that is only ``% NAME`` in its first line by NAME.md of the directory above;
- replaces ``<!-- generate: NAME -->`` by a reference of `PAGES`, made from weft's own tables, with
  the line in italics below it, which is for readers of the file;
- replaces ``<!-- diagram: NAME -->`` by a drawing of `DIAGRAMS`, made from weft's own plans, with
  the line in italics below it, too;
- replaces ``<!-- automodule: NAME -->`` by the docstrings of a module of weft, if there is one;
- names the language of each code block without one, for its colors.

`link_keys` then links every key of the configuration to its entry in the reference.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util.nodes import make_refnode

DOCS = Path(__file__).parent
ROOT = DOCS.parent
# The pages show the code of this clone; another weft may be installed.
sys.path[:0] = [str(ROOT), str(DOCS)]

from diagrams import DIAGRAMS  # noqa: E402
from llms import llms_text  # noqa: E402
from reference_pages import PAGES  # noqa: E402

from weft import __version__  # noqa: E402

project, author, release = "weft", "the authors of weft", __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["images"]
templates_path: list[str] = []

html_theme = "furo"
html_title = "weft"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "top_of_page_buttons": [],
    "navigation_with_keys": True,
    "light_css_variables": {
        "color-brand-primary": "#0b5cad",
        "color-brand-content": "#0b5cad",
    },
    "dark_css_variables": {
        "color-brand-primary": "#7cb7f5",
        "color-brand-content": "#7cb7f5",
    },
}
smartquotes = False  # text quotes options and TOML
pygments_style, pygments_dark_style = "friendly", "github-dark"

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "fieldlist"]

# Commands are copied without prompt and output.
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
copybutton_line_continuation_character = "\\"

default_role = "py:obj"  # `name` in a docstring
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_rtype = False
napoleon_custom_sections = [
    ("Required entries", "params_style"),
    ("Optional entries", "params_style"),
]
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80

FENCE = re.compile(r"^(```+)([^\n]*)\n(.*?)^\1[ \t]*$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(weft|pip|make|python|torchrun|srun|sbatch|kubectl|sky|aws|git|uv) [\w-]")
Json = dict[str, Any]
KEYS_PAGE = "reference/keys"


def language_of(block: str) -> str:
    """Return the language of a code block: commands with their output, commands, or text."""
    if re.search(r"^\$ ", block, re.MULTILINE):
        return "console"
    return "bash" if COMMAND.match(block.lstrip()) else "text"


def name_language(match: re.Match[str]) -> str:
    fence, info, block = match.groups()
    return f"{fence}{info.strip() or language_of(block)}\n{block}{fence}"


# Where the files of the directory above are among the pages.
PLACES = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "docs/decisions/": "decisions/index.md",
}


def move_link(match: re.Match[str]) -> str:
    """Return a link of the directory above as it is here; code is not among the pages."""
    text, target, anchor = match[1], match[2], match[3] or ""
    if target.startswith("http") or not target:
        return match[0]
    if target in PLACES or target.startswith("docs/"):
        return f"[{text}]({PLACES.get(target, target.removeprefix('docs/'))}{anchor})"
    return text if "`" in text else f"`{text}`"


def page_above(path: Path) -> str:
    """Return a page of the directory above, with links that lead to where things are here."""
    return re.sub(r"\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)", move_link, path.read_text("utf-8"))


def automodule(match: re.Match[str]) -> str:
    """Return the directive for a module's docstrings; nothing if there is no such module."""
    if not (ROOT / "weft" / f"{match[1].replace('.', '/')}.py").exists():
        return ""
    return f"```{{eval-rst}}\n.. automodule:: weft.{match[1]}\n   :members:\n```"


# A marker, and the line in italics below it: what the page shows where it is not built.
MARKER = r"<!-- {}: (\w+) -->(?:\n\*[^*\n]+\*)?"


def read(app: Any, name: str, source: list[str]) -> None:
    """Prepare the Markdown of a page."""
    text = source[0]
    first, _, rest = text.partition("\n")
    if first.startswith("% "):
        path = ROOT / f"{first.removeprefix('% ')}.md"
        app.env.note_dependency(str(path))
        text = page_above(path) + rest
    text = FENCE.sub(name_language, text)
    text = re.sub(MARKER.format("generate"), lambda match: PAGES[match[1]](), text)
    text = re.sub(r"<!-- automodule: ([\w.]+) -->", automodule, text)
    source[0] = re.sub(
        MARKER.format("diagram"),
        lambda match: f"```{{raw}} html\n{DIAGRAMS[match[1]]()}\n```",
        text,
    )


def link_keys(app: Any, doctree: nodes.document, name: str) -> None:
    """Link ``optim.lr`` in text to the entry of the key in the reference."""
    keys = {target for kind, target in app.env.domains["std"].objects if kind == "confval"}
    for node in list(doctree.findall(nodes.literal)):
        key = node.astext().removeprefix("--").partition(" ")[0]
        if key not in keys or isinstance(node.parent, nodes.reference | nodes.term):
            continue
        _, anchor = app.env.domains["std"].objects["confval", key]
        node.replace_self(
            make_refnode(app.builder, name, KEYS_PAGE, anchor, node.deepcopy(), title=key)
        )


def break_code(app: Any, name: str, template: str, context: Json, doctree: Any) -> None:
    """Let inline code break after dots and underscores, so that tables fit narrow pages."""
    body = re.sub(
        r'(?<=<span class="pre">)[^<]*(?=</span></code>)',
        lambda match: re.sub(r"(?<=\w[._])(?=\w)", "<wbr>", match[0]),
        context.get("body", ""),
    )
    context["body"] = body.replace("</strong> -- ", "</strong>: ")  # lists of parameters


def write_llms(app: Any, error: Exception | None) -> None:
    """Write the index for language models, with links to the pages of the site."""
    if error is None and app.builder.name == "html":
        Path(app.outdir, "llms.txt").write_text(llms_text(site=True), "utf-8")


def setup(app: Any) -> None:
    app.connect("source-read", read)
    app.connect("doctree-resolved", link_keys)
    app.connect("html-page-context", break_code)
    app.connect("build-finished", write_llms)
    app.add_object_type("metric", "metric", objname="metric")
