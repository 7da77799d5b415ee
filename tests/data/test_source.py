from __future__ import annotations

import os
from pathlib import Path

import pytest

from weft.config.errors import InvalidConfig
from weft.data.source import File, check_path, detect_source


def find_documents(path: str) -> tuple[File, ...]:
    source = detect_source(path)
    assert source.kind == "text"
    return source.files


def test_source_directory_of_records_with_other_files_is_refused(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"part{number}.jsonl").write_text('{"text": "one line of many"}\n' * 20)
    assert detect_source(str(tmp_path)).kind == "records"
    (tmp_path / "MD5SUMS").write_text("0123  part0.jsonl\n")
    with pytest.raises(InvalidConfig, match=r"has 3 files of records beside other files.*MD5SUMS"):
        detect_source(str(tmp_path))
    assert len(detect_source(f"{tmp_path}/**/*.jsonl").files) == 3
    (tmp_path / "book.txt").write_text("text\n" * 1000)  # then it is a directory of text
    assert detect_source(str(tmp_path)).kind == "text"


def test_find_documents_walks_names_in_order_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b/z.txt", "b.txt", "a/c/d.txt", ".hidden", ".git/x", "B.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    os.mkfifo(tmp_path / "pipe")
    result = find_documents(str(tmp_path))
    assert [d.name for d in result] == ["B.txt", "a/c/d.txt", "b.txt", "b/z.txt"]
    assert [d.size_bytes for d in result] == [len(d.name) for d in result]


def test_links_are_followed_once_and_loops_end(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "x.txt").write_text("x")
    root = tmp_path / "root"
    (root / "inner").mkdir(parents=True)
    (root / "inner" / "loop").symlink_to(root)
    (root / "far").symlink_to(elsewhere)
    (root / "again").symlink_to(elsewhere)
    (root / "broken").symlink_to(tmp_path / "nowhere")
    assert [d.name for d in find_documents(str(root))] == ["again/x.txt"]


def test_standard_library_is_text_without_tests() -> None:
    documents = find_documents("python-stdlib")
    names = {d.name for d in documents}
    assert {"json/decoder.py", "os.py"} <= names
    assert all(name.endswith(".py") for name in names)
    assert not any(part in {"test", "site-packages"} for n in names for part in n.split("/"))
    assert sum(d.size_bytes for d in documents) > 5e6


def test_single_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("abc")
    assert [(d.name, d.size_bytes) for d in find_documents(str(tmp_path / "one.txt"))] == [
        ("one.txt", 3)
    ]


def test_bad_paths_are_problems_of_data_path(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".hidden").write_text("x")
    (tmp_path / "zeros").mkdir()
    (tmp_path / "zeros" / "a").touch()
    (tmp_path / "zeros" / "b").touch()
    os.mkfifo(tmp_path / "pipe")
    expected = {
        "nothing": "does not exist",
        "folder": "directory without files",
        "zeros": "only empty files",
        "zeros/a": "is empty",
        "zeros/a/b": "cannot be read",
        "pipe": "neither a file nor a directory",
    }
    for name, rule in expected.items():
        [error] = check_path(str(tmp_path / name))
        assert error.key == "data.path"
        assert rule in error.rule, name
        assert error.remedy
    (tmp_path / "folder" / "a.txt").write_text("x")
    assert check_path(str(tmp_path / "folder")) == []
    assert check_path("python-stdlib") == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_find_documents_unreadable_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.txt").chmod(0)
    [error] = check_path(str(tmp_path))
    assert "a.txt" in error.rule


def test_runs_and_stores_below_the_text_are_not_text(tmp_path: Path) -> None:
    """Else a run in the current directory would train on its logs."""
    (tmp_path / "mine.txt").write_text("text\n")
    for directory, marks in (("runs/demo", ["job.toml"]), ("cache/stores/ab", ["store.json"])):
        directory_path = tmp_path / directory
        (directory_path / "logs").mkdir(parents=True)
        for name in [*marks, "tokenizer.json", "logs/rank-0.log"]:
            (directory_path / name).write_text("x\n")
    assert [document.name for document in find_documents(str(tmp_path))] == ["mine.txt"]
