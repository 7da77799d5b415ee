"""The README is up to date: its commands, code, numbers and links."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests import pages
from weft.cli.main import build_parser, main
from weft.config.reader import read_job, recipe_names

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = pages.BLOCK.findall(README)
MISTAKES = ("train.step",)  # a wrong key, in the README's example of an error
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
WEFT = [sys.executable, "-m", "weft"]


def commands(page: str) -> list[list[str]]:
    """Return every ``weft`` command of a page, without trailing comments."""
    text = re.sub(r"\\\n *", "", (ROOT / page).read_text("utf-8"))
    results = []
    for kind, block in pages.BLOCK.findall(text):
        for line in () if kind else block.splitlines():
            if re.match(r"(\$ )?weft [a-z]", line):
                results.append(shlex.split(line.removeprefix("$ "), comments=True)[1:])
    return results


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_pages_parse(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All options and keys of the commands exist, except in the example of an error."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text('extends = "demo"\n')
    for words in commands(page):
        options, status = argparse.Namespace(), None
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                build_parser().parse_args(words, options)
            except SystemExit as exit_:  # raised by --help
                status = exit_.code
        assert not status, words
        assert getattr(options, "errors", []) == [], words
        recipe = next(
            (word for word in words[1:] if word in (*recipe_names(), "mine.toml")), "demo"
        )
        _, _, errors = read_job(recipe, getattr(options, "overrides", []))
        wrong = [str(error) for error in errors if error.key not in MISTAKES]
        assert wrong == [], words


def test_readme_loop_is_the_code() -> None:
    (quoted,) = (
        text for kind, text in BLOCKS if kind == "python" and "while not is_finished" in text
    )
    source = (ROOT / "weft" / "training" / "loop.py").read_text("utf-8")
    assert textwrap.indent(quoted.strip(), " " * 8) in source


@pytest.mark.parametrize("page", PAGES)
def test_links_of_pages_have_targets(page: str) -> None:
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text("utf-8"), flags=re.M | re.S)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)", text):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.MULTILINE)
            known = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor.removeprefix("#") in known, f"{target}{anchor}"


@pytest.mark.slow
def test_readme_plan_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    (quoted,) = (text for _, text in BLOCKS if text.startswith("$ weft plan llama3-405b"))
    assert main(["plan", "llama3-405b"]) == 0
    output = capsys.readouterr().out.splitlines()
    assert [line for line in quoted.splitlines()[1:] if line != "..." and line not in output] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_readme_user_family_trains_the_same_on_two_ranks(tmp_path: Path) -> None:
    (source,) = (text for kind, text in BLOCKS if kind == "python" and "# mine.py" in text)
    (tmp_path / "mine.py").write_text(source)
    (words,) = (words for words in commands("README.md") if "mine:FAMILY" in words)
    for extra in ([], ["--run.nproc_per_node", "2", "--parallel.tp", "2", "--run.dir", "runs/two"]):
        completed = subprocess.run(
            # A low learning rate, so that rounding does not grow within these steps.
            [*WEFT, *words, "--optim.lr", "3e-4", *extra],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert completed.returncode == 0, completed.stdout + completed.stderr
    one, two = ((tmp_path / "runs" / name / "loud.txt").read_text() for name in ("own", "two"))
    assert len(one.splitlines()) == 20
    assert one == two
