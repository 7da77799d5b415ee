"""llms.txt: an index of the pages for language models (llmstxt.org).

``python docs/llms.py`` writes it into the root of the repository.  A test compares it with the
pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
TOCTREE = re.compile(r"^```\{toctree\}\n((?::.*\n)*)\n?((?:.*\n)*?)```$", re.MULTILINE)

HEAD = """# weft

> weft trains large language models with PyTorch, on a laptop or a cluster. It predicts memory and
> step time before a run starts, verifies that a parallel layout computes the gradients of one
> process, and resumes after failures with the same command.

Read AGENTS.md before you change the code. `weft train --help` lists every key of the
configuration, `weft schema` prints them as JSON Schema, and `weft/config/peer_names.toml` maps the
names of TorchTitan, Megatron-LM, Hugging Face and axolotl to them. Most commands have `--json` or
`--dry-run`.
"""


def sections() -> Iterator[tuple[str, list[str]]]:
    """Yield the caption and the pages of each group of the start page."""
    for options, names in TOCTREE.findall((DOCS / "index.md").read_text("utf-8")):
        caption = re.search(r"^:caption: (.*)$", options, re.MULTILINE)
        lines = [re.sub(r".*<(.*)>$", r"\1", line) for line in names.split("\n") if line]
        yield (caption[1] if caption else "Pages"), lines


def source(name: str) -> Path:
    """Return the file with the text of a page."""
    path = DOCS / f"{name}.md"
    first = path.read_text("utf-8").partition("\n")[0]
    return ROOT / f"{first.removeprefix('% ')}.md" if first.startswith("% ") else path


def describe(name: str) -> tuple[str, str]:
    """Return the title of a page and the first sentence of its text."""
    text = source(name).read_text("utf-8")
    title = re.search(r"^# (.*)$", text, re.MULTILINE)
    assert title, f"{name} has no title"
    paragraphs = re.split(r"\n\s*\n", text[title.end() :].strip())
    first = next(p for p in paragraphs if re.match(r"[A-Z`a-z*]", p))
    flat = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(first.split()))
    flat = re.sub(r"^This page ", "", flat)
    if not flat.startswith("weft "):
        flat = flat[0].upper() + flat[1:]
    return title[1], re.split(r"(?<=[.:])\s", flat)[0].rstrip(".:")


def llms_text(site: bool = False) -> str:
    """Return the text of llms.txt, with links to files, or to the pages of the site."""
    lines = [HEAD]
    for caption, names in sections():
        lines += [f"## {caption}", ""]
        for name in names:
            title, sentence = describe(name)
            link = f"{name}.html" if site else source(name).relative_to(ROOT).as_posix()
            lines.append(f"- [{title}]({link}): {sentence}")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    (ROOT / "llms.txt").write_text(llms_text(), "utf-8")
