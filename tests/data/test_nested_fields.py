"""Text in a field of an object or struct, links to files, and epochs in whole steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.config.errors import InvalidConfig
from weft.config.schema import DataSection
from weft.data.fragments import find_field
from weft.data.prepare import prepare_store
from weft.data.prepared_cache import Progress

ROWS: list[dict[str, Any]] = [
    {"id": n, "doc": {"text": f"text number {n} " * 9, "meta": {"body": f"body {n} " * 9}}}
    for n in range(30)
]
ROWS.append({"id": 30, "doc": None})


def write_rows(directory: Path, form: str) -> Path:
    path = directory / f"data.{form}"
    if form == "jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)))
        return path
    pa = pytest.importorskip("pyarrow")
    table = pa.Table.from_pylist(ROWS)
    if form == "parquet":
        import pyarrow.parquet as pq

        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    return path


def prepare(path: Path, field: str, cache: Path, messages: list[str] | None = None) -> Any:
    section = DataSection(path=str(path), text_field=field, vocab_size=300)

    def report(progress: Progress) -> None:
        if messages is not None:
            messages.append(progress.message)

    return prepare_store(section, cache, report).manifest


@pytest.mark.parametrize("form", ["jsonl", "parquet", "arrow"])
@pytest.mark.parametrize("field", ["doc.text", "doc.meta.body"])
def test_prepare_field_of_a_struct_is_read(form: str, field: str, tmp_path: Path) -> None:
    manifest = prepare(write_rows(tmp_path, form), field, tmp_path / "cache")
    size = sum(len(find_field(row, field) or "") for row in ROWS)
    assert manifest.train.documents + manifest.validation.documents == 30
    assert manifest.train.bytes + manifest.validation.bytes == size
    assert manifest.empty_documents == 1  # of a null struct


@pytest.mark.parametrize("form", ["jsonl", "parquet", "arrow"])
@pytest.mark.parametrize("field", ["doc.none", "doc.text.more", "none.text"])
def test_prepare_field_that_does_not_exist_is_refused(
    form: str, field: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig, match="has no"):
        prepare(write_rows(tmp_path, form), field, tmp_path / "cache")


def test_prepare_struct_is_refused_with_one_of_its_fields(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"doc\.(text|meta) is a field of it"):
        prepare(write_rows(tmp_path, "parquet"), "doc", tmp_path / "cache")


def test_find_field_exact_name_comes_first() -> None:
    assert find_field({"a.b": 1, "a": {"b": 2}}, "a.b") == 1
    assert find_field({"a": {"b": 2}}, "a.b") == 2
    assert find_field({"a": None}, "a.b") is None


@pytest.mark.parametrize("path", ["", "*.jsonl"])
def test_prepare_links_to_a_file_are_read_once(path: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    write_rows(data, "jsonl")
    (data / "again.jsonl").symlink_to(data / "data.jsonl")
    (data / "hard.jsonl").hardlink_to(data / "data.jsonl")
    messages: list[str] = []
    manifest = prepare(data / path, "doc.text", tmp_path / "cache", messages)
    assert manifest.train.documents + manifest.validation.documents == 30
    assert any("read once" in text and "again.jsonl" in text for text in messages)
