"""Documents from lines and rows: equal in every format, every mistake located."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.config.errors import InvalidConfig
from weft.data import records
from weft.data.fragments import divide_file
from weft.data.records import Document, InvalidRecord, read_documents
from weft.data.source import stat_local_file

pa = pytest.importorskip("pyarrow", reason="pip install 'weft[data]'")
zstandard = pytest.importorskip("zstandard", reason="pip install 'weft[data]'")
import pyarrow.feather  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

TEXTS = ["one", "two\nlines", 'ünï 😀 \\ "quoted"', "", "a" * 5000, *map(str, range(500))]


def lines_of(texts: list[str], field: str = "text") -> bytes:
    # Every second line has escaped characters.
    lines = (json.dumps({"id": n, field: t}, ensure_ascii=n % 2 > 0) for n, t in enumerate(texts))
    return ("\n".join(lines) + "\n").encode()


def write_stream(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, 100)


WRITERS: dict[str, Callable[[Path, list[str]], object]] = {
    "x.jsonl": lambda p, t: p.write_bytes(lines_of(t)),
    "x.json": lambda p, t: p.write_bytes(b"\xef\xbb\xbf" + lines_of(t).replace(b"\n", b"\r\n")),
    "x.jsonl.gz": lambda p, t: p.write_bytes(gzip.compress(lines_of(t))),
    "x.jsonl.zst": lambda p, t: p.write_bytes(zstandard.compress(lines_of(t))),
    "two-frames.jsonl.zst": lambda p, t: p.write_bytes(
        zstandard.compress(lines_of(t)[:100]) + zstandard.compress(lines_of(t)[100:])
    ),
    "x.parquet": lambda p, t: pq.write_table(pa.table({"text": t}), p, row_group_size=70),
    "dictionary.parquet": lambda p, t: pq.write_table(
        pa.table({"n": range(len(t)), "text": pa.array(t).dictionary_encode()}), p
    ),
    "x.arrow": lambda p, t: write_stream(p, pa.table({"text": t})),
    "large.arrow": lambda p, t: write_stream(p, pa.table({"text": pa.array(t, pa.large_string())})),
    "x.feather": lambda p, t: pyarrow.feather.write_feather(
        pa.table({"text": t}), p, chunksize=100
    ),
}


def read(path: Path, size: int = 1 << 30, **options: object) -> list[Document | InvalidRecord]:
    """Read a file in units of ``size`` bytes; document numbers count over the file."""
    file = stat_local_file(path, path.name)
    settings = {"field": "text", "invalid": "error"} | options
    results: list[Document | InvalidRecord] = []
    for unit in divide_file(file, size):
        before = len(results)
        for document in read_documents(unit, **settings):  # type: ignore[arg-type]
            results.append(document._replace(number=before + document.number))
    return results


@pytest.mark.parametrize("name", WRITERS)
def test_documents_of_each_format_are_the_same(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name, TEXTS)
    expected = [Document(n, text.encode()) for n, text in enumerate(TEXTS, 1)]
    assert read(tmp_path / name) == expected
    for size in (1, 100, 1000, 5003, 6000):
        assert read(tmp_path / name, size) == expected, size


def test_units_of_any_size_have_each_line_once(tmp_path: Path) -> None:
    rng = random.Random(0)
    texts = ["x" * rng.choice([0, 1, 5, 300]) for _ in range(60)]
    data = b"\n\n".join(lines_of(texts).splitlines())  # blank lines count, and no final newline
    (tmp_path / "x.jsonl").write_bytes(data)
    expected = list(read(tmp_path / "x.jsonl"))
    assert [d.data for d in expected[::2]] == [t.encode() for t in texts]  # type: ignore[union-attr]
    assert all(d.data == b"" for d in expected[1::2])  # type: ignore[union-attr]
    for size in range(1, 400, 7):
        assert read(tmp_path / "x.jsonl", size) == expected


BAD_LINES = {
    '{"text": "x"': "line 2: is not JSON: Expecting ',' delimiter at character 14",
    "": None,
    "[1]": "line 2: is a list, not an object with a field 'text'",
    '{"txt": "a"}': "line 2: has no field 'text'; did you mean 'txt'?",
    '{"messages": []}': "line 2: has no field 'text'; it has messages: use --data.format chat",
    '{"prompt": "a", "response": "b"}': (
        "line 2: has no field 'text'; it has prompt and response: use --data.format chat"
    ),
    '{"prompt": "a", "chosen": "b", "rejected": "c"}': (
        "line 2: has no field 'text'; it has chosen and rejected: use --data.format preferences"
    ),
    '{"text": 7}': "line 2: the field 'text' is a number, not text",
    '{"text": null}': None,
    '{"text": "\\ud800"}': "line 2: character 0 of the field 'text' is half a character",
    "[" * 100_000: "line 2: is not JSON: ",
}


@pytest.mark.parametrize(("line", "fault"), BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_documents_bad_lines_are_faults(line: str, fault: str | None, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "good"}\n' + line + '\n{"text": "good"}\n')
    first, result, last = read(path)
    assert (first, last) == (Document(1, b"good"), Document(3, b"good"))
    if fault is None:  # an empty document is skipped without an error
        assert result == Document(2, b"")
    else:
        assert isinstance(result, InvalidRecord)
        assert f"line {result.number}: {result.reason}".startswith(fault)


def test_documents_invalid_utf8_is_a_fault_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "a\xffb"}\n{"text": "\\udc00c"}\n{"text": "d"}\n')
    one, two, _ = read(path)
    assert one == InvalidRecord(1, "byte 11: not UTF-8")
    assert isinstance(two, InvalidRecord)
    good = Document(3, b"d")
    assert read(path, invalid="skip") == [Document(1, None), Document(2, None), good]
    replaced = [Document(n, t.encode(), True) for n, t in ((1, "a\ufffdb"), (2, "\ufffdc"))]
    assert read(path, invalid="replace") == [*replaced, good]
    rows = pa.array([b"a\xffb", b"d"]).cast(pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": rows}), tmp_path / "x.parquet")
    one, two = read(tmp_path / "x.parquet")
    assert (one, two) == (InvalidRecord(1, "byte 1: not UTF-8"), Document(2, b"d"))
    assert read(tmp_path / "x.parquet", invalid="replace")[0] == replaced[0]
    (tmp_path / "u.jsonl").write_bytes('{"text": "x"}\n'.encode("utf-16"))
    assert read(tmp_path / "u.jsonl") == [InvalidRecord(1, "the file is UTF-16, not UTF-8", True)]


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst"])
def test_documents_truncated_or_damaged_compression_is_a_fault(name: str, tmp_path: Path) -> None:
    full = lines_of([str(random.Random(n).random()) for n in range(30_000)])
    compress = gzip.compress if name.endswith("gz") else zstandard.compress
    data = compress(full)
    (tmp_path / name).write_bytes(data[: len(data) // 2])
    *good, last = read(tmp_path / name)
    assert isinstance(last, InvalidRecord)
    assert last.is_fatal
    assert "truncated" in last.reason
    assert all(isinstance(item, Document) for item in good[:-1])
    # The error of a truncated file has the number of the incomplete line.
    assert last.number == len(good) + 1
    (tmp_path / name).write_bytes(b"this is no compressed file")
    [fault] = read(tmp_path / name)
    assert "damaged" in fault.reason  # type: ignore[union-attr]


def test_documents_disk_error_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(io.BytesIO):
        def readline(self, size: int | None = -1) -> bytes:
            if self.tell():
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().readline(size)

    (tmp_path / "x.jsonl").write_bytes(lines_of(["a", "b"]))
    monkeypatch.setattr(records, "open_file", lambda file: Failing(Path(file.path).read_bytes()))
    with pytest.raises(InvalidConfig, match=r'data\.path=".*x\.jsonl" cannot be read: Input'):
        read(tmp_path / "x.jsonl")


def test_documents_too_long_line_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 1000)
    (tmp_path / "x.jsonl").write_bytes(lines_of(["a", "b" * 2000, "c"]))
    good, fault = read(tmp_path / "x.jsonl")
    assert good == Document(1, b"a")
    assert isinstance(fault, InvalidRecord)
    assert fault.number == 2
    assert "use one line per document" in fault.reason


def test_documents_many_short_lines_are_read_quickly(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "some words"}\n' * 199_999 + b'{"text": "some words"\n')
    begun = time.process_time()
    *_, last = read(path, 4 << 20)
    assert isinstance(last, InvalidRecord)
    assert last.number == 200_000
    assert time.process_time() - begun < 4  # about 0.5 on a quiet machine
