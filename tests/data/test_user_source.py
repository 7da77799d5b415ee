"""Documents from a user's function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.test_documents import decoded, section
from weft.cli.main import main
from weft.config.errors import InvalidConfig
from weft.data.prepare import prepare_store
from weft.data.source import check_path, detect_source

TEXTS = [f"document {number} of many, with some more words in it" for number in range(200)]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Write the user's ``mine.py`` into the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(body: str) -> None:
        (tmp_path / "mine.py").write_text(body)
        monkeypatch.delitem(sys.modules, "mine", raising=False)

    return write


ROWS = f"def rows():\n    yield from {TEXTS!r}\n"


def test_own_function_texts_and_mappings_are_prepared(
    module: Callable[[str], None], tmp_path: Path
) -> None:
    module(ROWS)
    assert detect_source("mine:rows").kind == "own"
    store = prepare_store(section("mine:rows"), tmp_path / "c", shard_bytes=2000)
    assert len(store.manifest.train.shards) > 1
    assert sorted(decoded(store, "train") + decoded(store, "validation")) == sorted(TEXTS)
    assert prepare_store(section("mine:rows"), tmp_path / "c", shard_bytes=2000).path == store.path
    module(f"def rows():\n    return [{{'body': text, 'n': 1}} for text in {TEXTS!r}]\n")
    other = prepare_store(section("mine:rows", text_field="body"), tmp_path / "c", shard_bytes=2000)
    assert other.path != store.path  # its file has changed
    assert decoded(other, "train") == decoded(store, "train")


def test_own_callable_object_is_prepared(module: Callable[[str], None], tmp_path: Path) -> None:
    module(f"from functools import partial\nrows = partial(iter, {TEXTS!r})\n")
    store = prepare_store(section("mine:rows"), tmp_path / "c")
    assert sorted(decoded(store, "train") + decoded(store, "validation")) == sorted(TEXTS)
    module(f"from functools import partial\nrows = partial(iter, {TEXTS[:99]!r})\n")
    assert prepare_store(section("mine:rows"), tmp_path / "c").path != store.path
    with pytest.raises(InvalidConfig, match="neither text nor a mapping"):
        prepare_store(section("itertools:count"), tmp_path / "c")


def test_own_function_named_like_a_file_is_the_file(
    module: Callable[[str], None], tmp_path: Path
) -> None:
    module(ROWS)
    (tmp_path / "mine:rows").write_text("text")
    assert detect_source("mine:rows").kind == "text"


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ("", "cannot be imported: AttributeError"),
        ("import nowhere_at_all", "cannot be imported: ModuleNotFoundError"),
        ("rows = 3", "is not a function"),
    ],
)
def test_own_function_that_cannot_be_called_is_refused(
    body: str, rule: str, module: Callable[[str], None]
) -> None:
    module(body)
    (error,) = check_path("mine:rows")
    assert rule in str(error)


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ("def rows():\n    yield 'a'\n    raise KeyError('x')", "after row 1: KeyError: 'x'"),
        (
            "def rows():\n    yield 'a'\n    yield 3",
            "yields a int as row 2, neither text nor a mapping",
        ),
        (
            "def rows():\n    yield {'tekst': 'a'}",
            "yields row 1 without a field 'text'. Use one of tekst",
        ),
        ("def rows():\n    yield {'text': 3}", "has no text in the column 'text' of row 1"),
    ],
)
def test_own_function_mistakes_are_reported(
    body: str, rule: str, module: Callable[[str], None], tmp_path: Path
) -> None:
    module(body)
    with pytest.raises(InvalidConfig) as caught:
        prepare_store(section("mine:rows"), tmp_path / "c")
    assert rule in str(caught.value)
    assert not list((tmp_path / "c").glob("stores/*/store.json"))


def test_own_function_by_the_command_line_is_prepared(
    module: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module(ROWS)
    words = ["--data.vocab_size", "300", "--data.cache_dir", str(tmp_path / "c")]
    assert main(["data", "inspect", "mine:rows", *words]) == 0
    assert "documents" in capsys.readouterr().out
    assert main(["data", "prepare", "mine:rwos", *words]) == 2
    assert "mine:rwos" in capsys.readouterr().err
