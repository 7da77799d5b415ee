"""The site of docs/: tables of peers' names, generated references, diagrams, llms.txt."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.reporting.test_run_report import Browser, needs_browser
from weft.cli.main import build_parser
from weft.config.peer_names import PROJECTS, load_peer_answers
from weft.config.reader import read_job
from weft.config.schema import SECTIONS, keys
from weft.models.decoder_config import DecoderConfig
from weft.monitor.step_record import StepRecord
from weft.planning.pipeline_schedule import build_schedule

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

import diagrams  # noqa: E402
import llms  # noqa: E402
import reference_pages  # noqa: E402

PEERS = {*PROJECTS, "words"}


def load(name: str) -> dict[str, dict[str, str]]:
    return tomllib.loads((ROOT / "weft" / "config" / name).read_text("utf-8"))


def test_peer_names_are_of_keys_that_exist() -> None:
    table = load("peer_names.toml")
    fields = [f"model.{name}" for name in DecoderConfig.model_fields]
    assert set(table) - {*keys(), *fields} == set()
    assert all(set(names) <= PEERS and all(names.values()) for names in table.values())
    of_keys = [key for key in table if key not in fields]
    assert of_keys == [key for key in keys() if key in table], "not in the order of the schema"


def test_peer_names_stand_for_one_key_each() -> None:
    """Two keys may share a name only if the other project sets both with it."""
    owners: dict[tuple[str, str], list[str]] = {}
    for key, names in load("peer_names.toml").items():
        for peer, name in names.items():
            if peer != "words":
                owners.setdefault((peer, name), []).append(key)
    assert {name: several for name, several in owners.items() if len(several) > 1} == {}


def test_peer_answers_name_only_keys_that_exist() -> None:
    answers = load_peer_answers()
    sections = "|".join(SECTIONS)
    named = {
        name
        for answer in answers.values()
        for name in re.findall(rf"\b((?:{sections})\.[a-z_]+\d?)", answer)
    }
    assert named <= set(keys())
    assert not any(name.startswith("-") for name in answers)
    other = {
        name.lstrip("-") for names in load("peer_names.toml").values() for name in names.values()
    }
    assert other & set(answers) == set()


# --------------------------------------------------------------------------- references


def test_keys_page_every_key_has_type_default_and_description() -> None:
    page = reference_pages.keys_page()
    entries = dict(re.findall(r"^```\{confval\} (\S+)\n(.*?)^```$", page, re.M | re.S))
    assert list(entries) == list(keys())
    for name, entry in entries.items():
        section, _, key = name.partition(".")
        field = SECTIONS[section].model_fields[key]
        assert re.search(r"^:type: \S", entry, re.M), name
        assert re.search(r"^:default: \S", entry, re.M), name
        assert field.description
        assert reference_pages.prose(field.description[1:]) in entry


def test_keys_page_names_of_other_projects_are_in_the_entry() -> None:
    page = reference_pages.keys_page()
    for key, names in load("peer_names.toml").items():
        if f"{{confval}} {key}\n" in page:
            entry = page[page.index(f"{{confval}} {key}\n") :].partition("\n```\n")[0]
        else:  # a field of model families
            (entry,) = re.findall(rf"^\| `{key.removeprefix('model.')}` .*$", page, re.M)
        missing = [name for name in names.values() if name not in entry]
        assert missing == [], key


def test_type_text_shows_choices_and_bounds() -> None:
    values = {
        name: reference_pages.type_text(values)
        for name, values in reference_pages.properties(SECTIONS["data"]).items()
    }
    assert values["format"] == "one of `text`, `chat`, `preferences`, `unpaired`"
    assert values["validation_fraction"] == "number ≥ 0, < 0.5"
    assert values["vocab_size"] == "integer ≥ 257"
    parallel = reference_pages.properties(SECTIONS["parallel"])["dp_shard"]
    assert reference_pages.type_text(parallel) == "integer ≥ 1, or one of `auto`, `fit`"


def test_metrics_page_every_field_of_a_record_is_described() -> None:
    comments = reference_pages.field_comments()
    assert list(comments) == [field.name for field in fields(StepRecord)]
    assert [name for name, (_, text) in comments.items() if not text] == []
    page = reference_pages.metrics_page()
    for key, *_ in reference_pages.metric_entries():
        assert f"{{metric}} {key}\n" in page
    assert "{metric} loss/<source>\n" in page
    assert "perplexity" in page


# --------------------------------------------------------------------------- pages


def pages() -> list[Path]:
    return [*DOCS.glob("*.md"), *DOCS.glob("reference/*.md")]


def test_every_page_is_in_a_group_of_the_start_page() -> None:
    """A page of another directory is in the tree by its own index."""
    listed = {name for _, names in llms.sections() for name in names}
    here = {path.relative_to(DOCS).with_suffix("").as_posix() for path in pages()} - {"index"}
    assert here - listed == set(), "add them to a toctree of docs/index.md"
    assert listed - here == {"decisions/index", "course/index", "cookbook/index", "models/index"}


def test_llms_txt_is_up_to_date() -> None:
    text = (ROOT / "llms.txt").read_text("utf-8")
    assert text == llms.llms_text(), "run python docs/llms.py"
    assert all((ROOT / path).exists() for path in re.findall(r"\]\((.*?)\)", text))


def test_markers_of_pages_have_a_line_for_readers_of_the_file() -> None:
    for path in (ROOT / "docs").rglob("*.md"):
        text = path.read_text()
        for match in re.finditer(r"<!-- (generate|diagram): \w+ -->\n", text):
            rest = text[match.end() :].partition("\n")[0]
            assert re.fullmatch(r"\*[^*\n]*make docs[^*\n]*\*", rest), (path, match[0])


def test_prose_names_in_angle_brackets_are_no_html() -> None:
    assert (
        reference_pages.prose("runs/<recipe>, `model.<field>`")
        == "runs/&lt;recipe>, `model.<field>`"
    )
    page = re.sub(r"`[^`\n]*`", "", reference_pages.keys_page() + reference_pages.peers_page())
    assert not re.search(r"<[a-z]", page)


def test_markers_of_pages_have_a_generator() -> None:
    texts = [path.read_text("utf-8") for path in pages()]
    diagrams_used = {name for text in texts for name in re.findall(r"<!-- diagram: (\w+)", text)}
    assert diagrams_used == set(diagrams.DIAGRAMS)
    generated = {name for text in texts for name in re.findall(r"<!-- generate: (\w+)", text)}
    assert generated == set(reference_pages.PAGES)


WORDS = {
    "laptop.md": ("batch size", "learning rate", "gradient accumulation", "epochs", "warm-up"),
    "gpu-node.md": (
        "batch size",
        "learning rate",
        "gradient accumulation",
        "Mixed precision",
        "activation checkpointing",
        "world size",
    ),
    "layouts.md": ("world size", "batch size", "learning rate", "gradient accumulation"),
    "speed.md": ("Activation checkpointing", "Gradient accumulation", "Mixed precision"),
}


@pytest.mark.parametrize("page", WORDS)
def test_page_has_the_words_that_people_search_for(page: str) -> None:
    text = " ".join((DOCS / page).read_text("utf-8").lower().replace("*", "").split())
    assert [word for word in WORDS[page] if word.lower() not in text] == []


def test_agents_file_commands_parse() -> None:
    text = (ROOT / "AGENTS.md").read_text("utf-8")
    lines = re.findall(r"^\.venv/bin/weft (.*)$", text, re.MULTILINE)
    assert len(lines) > 3
    for line in lines:
        options = build_parser().parse_args(shlex.split(line, comments=True))
        _, _, errors = read_job(options.recipe, options.overrides)
        assert [*getattr(options, "errors", []), *errors] == [], line
    paths = re.findall(r"`((?:weft|tests|docs)/[\w./-]*)`", text)
    assert [p for p in paths if not (ROOT / p).exists()] == ["weft/models/families/NAME.py"]


# --------------------------------------------------------------------------- diagrams


@pytest.mark.parametrize("name", diagrams.DIAGRAMS)
def test_diagram_is_valid_with_a_text_and_colors_of_the_page(name: str) -> None:
    figure = ElementTree.fromstring(diagrams.DIAGRAMS[name]())
    (svg,) = figure.iter("svg")
    title = svg.find("title")
    assert title is not None
    assert title.text
    assert svg.get("aria-labelledby") == title.get("id")
    css = (DOCS / "_static" / "site.css").read_text("utf-8")
    used = {word for node in svg.iter() for word in node.get("class", "").split()}
    styled = set(re.findall(r"\.(d-\w+)", css)) | {"d-text"}
    assert used - styled == set()
    assert not any(node.get(key) for node in svg.iter() for key in ("fill", "stroke"))
    _, _, width, height = map(float, svg.get("viewBox", "").split())
    for node in svg.iter("rect"):
        x, y, w, h = (float(node.get(key, "0")) for key in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width, node.attrib
        assert 0 <= y <= y + h <= height, node.attrib


def test_pipeline_start_times_have_the_known_bubble() -> None:
    """Narayanan et al., arXiv:2104.04473: (p - 1) / (v m + p - 1) of the time, v stages a rank."""
    for name, stages, expected in (("1F1B", 1, 3 / 11), ("Interleaved1F1B", 2, 3 / 19)):
        schedule = build_schedule(name, 4, stages, 8)
        actions, end = diagrams.start_times(schedule)
        busy = sum(diagrams.SLOTS[kind] for _, _, kind, _, _ in actions)
        assert busy == 3 * stages * 8 * 4
        assert 1 - busy / (4 * end) == pytest.approx(expected)


# --------------------------------------------------------------------------- site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("furo", reason="the theme of the site is not installed")
    directory = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going"]
    completed = subprocess.run(
        [*build, str(DOCS), str(directory)], capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr
    return directory


@pytest.mark.slow
def test_site_is_built_without_a_warning(site: Path) -> None:
    """One build, for all properties of the site."""
    html = {
        path.relative_to(site).with_suffix("").as_posix(): path.read_text("utf-8")
        for path in site.rglob("*.html")
    }
    assert "The loop" in html["overview"]
    assert 'id="confval-optim.lr"' in html["reference/keys"]
    assert 'href="reference/keys.html#confval-train.seq_len"' in html["laptop"]
    assert "copybutton" in html["laptop"]
    assert 'id="diagram-mesh"' in html["layouts"]
    assert 'href="#weft.models.family.Init"' in html["reference/extending"]
    assert "<!-- generate" not in html["reference/keys"]
    assert "highlight-console" in html["layouts"]
    assert "highlight-default" not in "".join(html.values())
    assert "](laptop.html)" in (site / "llms.txt").read_text("utf-8")
    index = (site / "searchindex.js").read_text("utf-8")
    for word in ("per_device_train_batch_s", "perplex", "epoch", "warmup"):
        assert word in index, word


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_browser
def test_site_pages_fit_wide_and_narrow_windows(site: Path) -> None:
    browser = Browser()
    results = []
    try:
        for path in sorted(site.rglob("*.html")):
            if path.parent.name in ("decisions", "_modules"):
                continue
            for width in (1280, 400):
                browser.open(path, width)
                page = path.relative_to(site).as_posix()
                if browser.run("return document.documentElement.scrollWidth") > width:
                    results.append(f"{page} scrolls at {width} px")
                wide = "[...document.querySelectorAll('pre')].filter(e => e.scrollWidth > 1 + "
                if width == 1280 and browser.run(f"return {wide}e.clientWidth).length"):
                    results.append(f"{page} has code that scrolls at {width} px")
    finally:
        browser.driver.quit()
    assert results == []
