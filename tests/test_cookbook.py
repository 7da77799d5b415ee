"""The pages of PAGES, such as the cookbook and the course, run and print what they quote."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests import pages

DOCS = pages.ROOT / "docs"
sys.path.append(str(DOCS / "course"))

from pictures import PICTURES  # noqa: E402

COOKBOOK = sorted(path.stem for path in (DOCS / "cookbook").glob("*.md") if path.stem != "index")
LESSONS = re.findall(r"\]\(([\w-]+)\.md\)", (DOCS / "course" / "index.md").read_text("utf-8"))
PAGES = [*(f"cookbook/{name}" for name in COOKBOOK), *(f"course/{name}" for name in LESSONS)]
PAGES += ["laptop"]


def test_cookbook_has_twenty_pages_and_the_course_eight_lessons() -> None:
    index = (DOCS / "cookbook" / "index.md").read_text("utf-8")
    assert sorted(re.findall(r"\]\(([\w-]+)\.md\)", index)) == COOKBOOK
    assert len(COOKBOOK) == 20
    assert len(LESSONS) == 8
    assert set(PICTURES) == set(LESSONS)


@pytest.mark.parametrize("path", PAGES)
def test_page_commands_have_known_words(path: str) -> None:
    for command in pages.commands_of((DOCS / f"{path}.md").read_text("utf-8")):
        if command.status != 2:
            pages.check_parses(command.line)


@pytest.mark.parametrize("name", LESSONS)
def test_lesson_has_a_picture_and_a_question(name: str) -> None:
    text = (DOCS / "course" / f"{name}.md").read_text("utf-8")
    assert f"](pictures/{name}.svg)" in text
    assert "\n## Question\n" in text
    assert "\n**Answer.** " in text
    ElementTree.parse(DOCS / "course" / "pictures" / f"{name}.svg")


def test_find_missing_compares_numbers_only_where_they_are_the_same_everywhere() -> None:
    trained = pages.Command("weft train demo", ["loss 8.3", "...", "in 1.5 s, ... 2 ranks"], "", 0)
    assert pages.find_missing(trained, "loss 7.9\nx\nin 20 s, on 3 ranks\n") is None
    assert pages.find_missing(trained, "in 20 s, on 3 ranks\nloss 7.9\n") is not None
    planned = pages.Command("weft plan demo", ["needs 8.3 GiB"], "", 0)
    assert pages.find_missing(planned, "needs  8.3 GiB") is None
    assert pages.find_missing(planned, "needs 8.4 GiB") == "needs 8.3 GiB"


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", PAGES)
def test_page_runs_and_draws_its_picture(path: str, tmp_path: Path) -> None:
    pages.check_page(DOCS / f"{path}.md", tmp_path)
    directory, _, name = path.partition("/")
    if directory == "course":
        ElementTree.fromstring(PICTURES[name](tmp_path))
    if path == "laptop":
        assert (tmp_path / "runs" / "mine" / "report.html").is_file()
