"""Text files: detection of binary files, splitting, and the validation set."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from weft.config.errors import InvalidConfig
from weft.config.schema import DataSection
from weft.data import text_files as textfiles
from weft.data.source import File, detect_source, stat_local_file
from weft.data.text_files import (
    DocumentPart,
    TextScan,
    read_chunk,
    read_text_corpus,
    scan_file,
    select_text,
    split_documents,
)
from weft.data.token_shards import CHUNK_BYTES


def scan_all(path: Path, validation_fraction: float = 0.1) -> list[TextScan]:
    return [scan(document, validation_fraction) for document in detect_source(str(path)).files]


def scan(file: File, validation_fraction: float) -> TextScan:
    return scan_file(file, validation_fraction, lambda size: None)


def text_of(parts: list[DocumentPart]) -> str:
    return "".join(read_chunk(part.scan, *chunk) for part in parts for chunk in part.chunks())


def write_documents(directory: Path, count: int, lines: int = 20) -> None:
    for index in range(count):
        text = "".join(f"document {index} line {line}\n" for line in range(lines))
        (directory / f"{index:03d}.txt").write_text(text)


# ------------------------------------------------------------------ scanning


@pytest.mark.parametrize("newlines", [True, False])
def test_chunks_join_to_the_text_and_never_cut_a_character(tmp_path: Path, newlines: bool) -> None:
    rng = random.Random(0)
    alphabet = "a é€😀" + ("\n" if newlines else "")
    text = "".join(rng.choices(alphabet, k=CHUNK_BYTES * 3 // 2))
    (tmp_path / "x").write_bytes(text.encode())
    [result] = scan_all(tmp_path)
    assert result.error is None
    train, validation = split_documents([result], 0.1)
    assert text_of(train) + text_of(validation) == text
    chunks = list(DocumentPart(result, 0, result.cuts[-1]).chunks())
    assert len(chunks) > 2
    assert all(end - begin <= CHUNK_BYTES for begin, end in chunks)
    if newlines:
        assert all(read_chunk(result, *chunk).endswith("\n") for chunk in chunks[:-1])


def test_text_keeps_windows_newlines_and_drops_the_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    [result] = scan_all(tmp_path)
    assert read_chunk(result, result.cuts[0], result.cuts[-1]) == "one\r\ntwo\r\n"
    assert result.text_bytes == 10


@pytest.mark.parametrize(
    ("data", "offset", "line"),
    [
        (b"good\nbad \xff here\n", 9, 2),
        (b"ends inside a character \xe2\x82", 24, 1),
        (b"a\n\nb\0\xff", 4, 3),
        (b"\xff\0", 0, 1),
        (b"\n" * (textfiles.BLOCK_BYTES - 1) + b"\xf0" + b"a", textfiles.BLOCK_BYTES - 1, 1 << 20),
        (b"a" * (textfiles.BLOCK_BYTES - 1) + b"\n\n\xc3\xa9\xed\xa0\x80", (1 << 20) + 3, 3),
    ],
)
def test_first_bad_byte_is_located(tmp_path: Path, data: bytes, offset: int, line: int) -> None:
    (tmp_path / "x").write_bytes(data)
    [result] = scan_all(tmp_path)
    assert result.error is not None
    assert (result.error.offset, result.error.line) == (offset, line)


def test_character_across_a_block_boundary_is_valid(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"a" * (textfiles.BLOCK_BYTES - 2) + "😀é".encode())
    [result] = scan_all(tmp_path)
    assert result.error is None


def test_error_lists_every_bad_file_once(tmp_path: Path) -> None:
    write_documents(tmp_path, 3)
    for index in range(14):
        (tmp_path / f"bad{index:02d}").write_bytes(b"one\n\xff")
    with pytest.raises(InvalidConfig) as caught:
        select_text(scan_all(tmp_path), "error", str(tmp_path))
    message = str(caught.value)
    assert len(caught.value.errors) == 1
    assert "14 files" in message
    assert "bad00: byte 4, line 2" in message
    assert "bad09" in message
    assert "bad10" not in message
    assert "and 4 more" in message
    assert "data.invalid_utf8=replace" in message
    assert "data.invalid_utf8=skip" in message


def test_invalid_utf8_is_replaced_or_skipped(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"a\xffb\0c")
    (tmp_path / "empty").touch()
    (tmp_path / "good").write_bytes(b"good")
    scans = scan_all(tmp_path)
    assert [s.file.name for s in select_text(scans, "skip", "")] == ["good"]
    replaced = select_text(scans, "replace", "")
    assert [s.file.name for s in replaced] == ["bad", "good"]
    assert read_chunk(replaced[0], 0, 5) == "a\ufffdb\ufffdc"


def test_file_that_changes_after_its_scan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("before\n")
    [result] = scan_all(tmp_path)
    (tmp_path / "x").write_text("after, and longer\n")
    with pytest.raises(InvalidConfig, match="changed while"):
        read_chunk(result, 0, 5)


def test_file_that_vanishes_before_its_scan_is_refused(tmp_path: Path) -> None:
    write_documents(tmp_path, 3)
    files = detect_source(str(tmp_path)).files
    (tmp_path / "001.txt").unlink()
    with pytest.raises(InvalidConfig, match=r'001\.txt" cannot be read: No such file'):
        read_text_corpus(DataSection(), files, tmp_path / "cache", 1000, lambda progress: None)


# ------------------------------------------------------------------ validation set


def ranges(parts: list[DocumentPart]) -> dict[str, tuple[int, int]]:
    return {part.scan.file.name: (part.begin, part.end) for part in parts}


def test_split_documents_assigns_complete_documents_by_name(tmp_path: Path) -> None:
    write_documents(tmp_path, 100)
    scans = scan_all(tmp_path)
    train, validation = split_documents(scans, 0.1)
    assert not ranges(train).keys() & ranges(validation).keys()
    assert len(train) + len(validation) == 100
    held = sum(p.end - p.begin for p in validation) / sum(s.text_bytes for s in scans)
    assert 0.08 < held < 0.13
    backwards = split_documents(scans[::-1], 0.1)
    assert ranges(backwards[1]) == ranges(validation)
    # A hash selects the documents, and one more document hardly changes the selection.
    assert sorted(ranges(validation)) != [f"{i:03d}.txt" for i in range(len(validation))]
    (tmp_path / "new.txt").write_text("new\n" * 100)
    larger = ranges(split_documents(scan_all(tmp_path), 0.1)[1]).keys()
    assert len(larger ^ ranges(validation).keys()) <= 3


def test_split_documents_assigns_copies_to_one_split(tmp_path: Path) -> None:
    write_documents(tmp_path, 40)
    for index in range(40):
        (tmp_path / f"copy{index}").write_bytes((tmp_path / f"{index:03d}.txt").read_bytes())
    train, validation = split_documents(scan_all(tmp_path), 0.2)
    assert validation
    sides = [{part.scan.content_hash for part in side} for side in (train, validation)]
    assert not sides[0] & sides[1]


def test_split_documents_of_few_files_cuts_their_tails_at_a_line(tmp_path: Path) -> None:
    write_documents(tmp_path, 5, lines=200)
    scans = scan_all(tmp_path)
    train, validation = split_documents(scans, 0.1)
    assert len(train) == len(validation) == 5
    for item, scanned in zip(range(5), scans, strict=True):
        assert train[item].end == validation[item].begin
        held = (validation[item].end - validation[item].begin) / scanned.text_bytes
        assert 0.09 < held < 0.2
        assert text_of([train[item]]).endswith("\n")
    assert not set(text_of(train).splitlines()) & set(text_of(validation).splitlines())


def test_split_documents_does_not_use_a_huge_document_for_validation(tmp_path: Path) -> None:
    write_documents(tmp_path, 30)
    (tmp_path / "huge").write_text("long line of text\n" * 5000)
    train, validation = split_documents(scan_all(tmp_path), 0.05)
    assert "huge" in ranges(train)
    held = sum(p.end - p.begin for p in validation)
    assert 0.02 < held / (held + sum(p.end - p.begin for p in train)) < 0.1


@pytest.mark.parametrize("text", ["😀" * 50, "a", "", "é" * 7, "\n" * 100, "x" * 99 + "😀"])
@pytest.mark.parametrize("validation_fraction", [0.01, 0.05, 0.49])
def test_split_documents_of_tiny_files_cuts_no_character(
    tmp_path: Path, text: str, validation_fraction: float
) -> None:
    (tmp_path / "x").write_text(text)
    train, validation = split_documents(
        [scan(stat_local_file(tmp_path / "x", "x"), validation_fraction)], validation_fraction
    )
    assert text_of(train) + text_of(validation) == text
