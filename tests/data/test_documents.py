"""Preparation of files with many documents: in parallel, resumed, refused."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.config.errors import InvalidConfig
from weft.config.schema import DataSection
from weft.data import documents as reading
from weft.data import workers
from weft.data.prepare import prepare_data, prepare_store
from weft.data.prepared_cache import Progress
from weft.data.token_shards import CHUNK_BYTES, split_chunks
from weft.data.token_store import Store

ROOT = Path(__file__).parents[2]
SHARD = 6_000


def texts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    words = ["some", "few", "words", "that", "come", "again", "and"]
    return [f"{n}: {' '.join(rng.choices(words, k=rng.randint(1, 60)))}" for n in range(count)]


def write_lines(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def section(path: Path | str, **changes: object) -> DataSection:
    return DataSection.model_validate({"path": str(path), "vocab_size": 300} | changes)


def decoded(store: Store, name: str) -> list[str]:
    stream = store.tokens(name)  # type: ignore[arg-type]
    ids = stream.read_windows(np.array([0]), len(stream))[0]
    ends = np.flatnonzero(ids == store.manifest.separator)
    parts = np.split(ids, ends + 1)[:-1]
    tokenizer = store.tokenizer()  # read once
    return [tokenizer.decode(part[:-1].tolist()) for part in parts]


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.name != "lock"}


@pytest.fixture
def several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MIN_PARALLEL_READ_BYTES", 1)
    monkeypatch.setattr(reading, "MIN_PARALLEL_ENCODE_BYTES", 1)
    monkeypatch.setattr(workers, "num_cores", lambda: 2)


def test_prepare_each_document_is_whole_in_one_split(tmp_path: Path) -> None:
    inputs = texts(800)
    store = prepare_store(section(write_lines(tmp_path / "x.jsonl", inputs)), tmp_path / "c")
    train, held = decoded(store, "train"), decoded(store, "validation")
    assert sorted(train + held) == sorted(inputs)
    assert (store.manifest.train.documents, store.manifest.validation.documents) == (
        len(train),
        len(held),
    )
    assert 0.02 < len(held) / len(inputs) < 0.09
    assert store.manifest.train.bytes == sum(len(text.encode()) for text in train)


@pytest.mark.system
def test_prepare_by_several_processes_equals_one(tmp_path: Path, several_processes: None) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    for n in range(3):
        write_lines(directory / f"{n}.jsonl", texts(120, n))
    (directory / "g.jsonl.gz").write_bytes(gzip.compress((directory / "0.jsonl").read_bytes()))
    (directory / "README.md").write_text("about them")
    store = prepare_store(section(directory), tmp_path / "two", shard_bytes=SHARD)
    assert len(store.manifest.train.shards) > 6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "num_cores", lambda: 1)
        single = prepare_store(section(directory), tmp_path / "one", shard_bytes=SHARD)
    assert contents(store.path) == contents(single.path)
    # Documents do not depend on shard boundaries.
    large = prepare_store(section(directory), tmp_path / "one")
    assert len(large.manifest.train.shards) < len(store.manifest.train.shards)
    for name in ("train", "validation"):
        assert decoded(large, name) == decoded(store, name)


def test_prepare_more_documents_move_none_to_another_split(tmp_path: Path) -> None:
    inputs = texts(400)
    one = prepare_store(section(write_lines(tmp_path / "x.jsonl", inputs)), tmp_path / "c")
    extra = [*texts(60, 1), *inputs, *texts(60, 2), *inputs[:100]]
    two = prepare_store(section(write_lines(tmp_path / "y.jsonl", extra)), tmp_path / "c")
    assert set(decoded(one, "validation")) <= set(decoded(two, "validation"))
    assert set(decoded(one, "train")) <= set(decoded(two, "train"))
    assert not set(decoded(two, "train")) & set(decoded(two, "validation"))  # nor do copies


@pytest.mark.parametrize("count", [2, 5])
def test_prepare_few_documents_leave_one_for_validation(count: int, tmp_path: Path) -> None:
    store = prepare_store(
        section(write_lines(tmp_path / "x.jsonl", texts(count)), validation_fraction=0.001),
        tmp_path / "c",
    )
    assert store.manifest.validation.documents == 1
    assert store.manifest.train.documents == count - 1
    second_run = prepare_store(
        section(tmp_path / "x.jsonl", validation_fraction=0.001), tmp_path / "c"
    )
    assert second_run == store
    write_lines(tmp_path / "x.jsonl", ["alone"])
    with pytest.raises(InvalidConfig, match="has one document, which is the validation set"):
        prepare_store(section(tmp_path / "x.jsonl"), tmp_path / "c")


def test_prepare_unchanged_file_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_lines(tmp_path / "x.jsonl", texts(300))
    store = prepare_store(section(file), tmp_path / "c")
    changed = prepare_store(
        section(file, text_field="text", validation_fraction=0.2), tmp_path / "c"
    )
    assert changed.path != store.path
    with monkeypatch.context() as patch:
        patch.setattr("weft.data.documents.read_documents", None)  # reading would fail
        assert prepare_store(section(file), tmp_path / "c") == store
    write_lines(file, texts(301))
    assert prepare_store(section(file), tmp_path / "c").path != store.path


def test_prepare_mixture_of_formats_shares_a_tokenizer(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "web.jsonl", texts(300))
    (tmp_path / "book.txt").write_text("A book of another kind.\n" * 500)
    mixture = {str(lines): 1.0, str(tmp_path / "book.txt"): 1.0}
    text = prepare_data(section("python-stdlib", mixture=mixture), tmp_path / "c")
    hashes = {source.store.manifest.tokenizer_hash for source in text.sources}
    assert len(hashes) == 1
    learnt = text.sources[0].store.tokenizer().get_vocab()
    assert {"Ġwords", "Ġbook"} <= learnt.keys()  # trained on both sources


KILL = """
import os, signal, sys
from pathlib import Path
from weft.data.prepare import prepare_store
from weft.data import documents, workers
from weft.config.schema import DataSection
documents.MIN_PARALLEL_READ_BYTES = documents.MIN_PARALLEL_ENCODE_BYTES = 1
workers.num_cores = lambda: int(sys.argv[4])
def die(progress):
    made = list(Path(sys.argv[2]).glob("stores/*/*-*.json"))
    if progress.message == "tokenizing" and len(made) > 6:
        os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    prepare_store(DataSection(path=sys.argv[1], vocab_size=300), Path(sys.argv[2]), die,
            shard_bytes=int(sys.argv[3]))
"""


@pytest.mark.parametrize("cores", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_prepare_killed_resumes_with_the_finished_shards(cores: int, tmp_path: Path) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    write_lines(directory / "0.jsonl", texts(400))
    (directory / "1.jsonl.gz").write_bytes(gzip.compress((directory / "0.jsonl").read_bytes()))
    full = prepare_store(section(directory), tmp_path / "one", shard_bytes=SHARD)
    (tmp_path / "kill.py").write_text(KILL)
    arguments = [tmp_path / "kill.py", directory, tmp_path / "two", SHARD, cores]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    killed = subprocess.run([sys.executable, *map(str, arguments)], env=environment, timeout=100)
    assert killed.returncode == -signal.SIGKILL
    time.sleep(1)  # its processes end with it
    half = tmp_path / "two" / "stores" / full.path.name
    before = {file.name: file.stat().st_mtime_ns for file in half.glob("*-*.bin")}
    assert not (half / "store.json").exists()
    assert 3 <= len(before) < len(list(full.path.glob("*-*.bin")))
    resumed = prepare_store(section(directory), tmp_path / "two", shard_bytes=SHARD)
    assert contents(resumed.path) == contents(full.path)
    remaining = [name for name, time in before.items() if (half / name).stat().st_mtime_ns == time]
    assert len(remaining) >= len(before) - 2 * cores  # only shards without an entry are repeated


def test_prepare_missing_shards_are_made_again(tmp_path: Path) -> None:
    """The file is compressed, so it can only be read from its beginning."""
    file = tmp_path / "x.jsonl.gz"
    lines = write_lines(tmp_path / "x", texts(300)).read_bytes()
    file.write_bytes(gzip.compress(lines))
    store = prepare_store(section(file), tmp_path / "c", shard_bytes=SHARD)
    before = contents(store.path)
    assert len(store.manifest.train.shards) > 5
    for number in (0, 2, 3, 5):
        (store.path / f"train-00000-{number:05d}.json").unlink()
    sorted(store.path.glob("validation-*.bin"))[1].unlink()
    (store.path / "store.json").unlink()
    prepare_store(section(file), tmp_path / "c", shard_bytes=SHARD)
    assert contents(store.path) == before


# ------------------------------------------------------------------ bad data


def refused(tmp_path: Path, path: Path | str, **changes: object) -> str:
    with pytest.raises(InvalidConfig) as caught:
        prepare_store(section(path, **changes), tmp_path / "c")
    assert not list((tmp_path / "c").glob("*/*")), "something was left behind"
    return str(caught.value)


def test_prepare_broken_line_behind_many_is_found_quickly(
    tmp_path: Path, several_processes: None
) -> None:
    file = tmp_path / "x.jsonl"
    good = b'{"text": "some words"}\n'
    file.write_bytes(good * 199_999 + b'{"text": "some wo\n' + good)
    start_time = time.monotonic()
    refusal = refused(tmp_path, file)
    assert "x.jsonl, line 200000: is not JSON: Invalid control character" in refusal or (
        "x.jsonl, line 200000: is not JSON: Unterminated string" in refusal
    )
    assert "a line or row that is not a document" in refusal
    assert time.monotonic() - start_time < 12  # some 0.8 on a quiet machine


def test_prepare_each_mistake_is_reported_with_its_location(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    write_lines(directory / "good.jsonl", texts(10))
    (directory / "a.jsonl").write_text('{"text": "x"}\n{"body": "y"}\n')
    (directory / "b.jsonl").write_bytes(b"\n" * 70_000 + b'{"text": "\xff"}\n' * 20)
    full = gzip.compress(b'{"text": "x"}\n' * 1000)
    (directory / "c.jsonl.gz").write_bytes(full[:-8])  # all lines, but no checksum
    refusal = refused(tmp_path, directory)
    assert "has 22 lines or rows that are not documents" in refusal
    assert "a.jsonl, line 2: has no field 'text'; it has body" in refusal
    assert "b.jsonl, line 70001: byte 10: not UTF-8" in refusal
    assert "and 12 more" in refusal
    assert "data.invalid_utf8=skip" in refusal
    for name in ("a", "b"):
        (directory / f"{name}.jsonl").unlink()
    assert "c.jsonl.gz, line 1001: the compressed file is truncated" in refused(tmp_path, directory)


@pytest.mark.parametrize(
    ("row", "remedy"),
    [
        ({"id": 1, "body": "y"}, "Use data.text_field=body, or repair them."),
        ({"doc": {"body": "y", "n": 1}}, "Use data.text_field=doc.body, or repair them."),
        ({"n": 1}, "Set data.text_field to the field with the text, or repair them."),
        ({"messages": []}, "Use data.format=chat, or repair them."),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            "Use data.format=preferences and train.objective=dpo, or repair them.",
        ),
    ],
)
def test_prepare_rows_without_the_field_names_the_key_that_reads_them(
    row: dict[str, Any], remedy: str, tmp_path: Path
) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    (directory / "a.jsonl").write_text((json.dumps(row) + "\n") * 20)
    assert refused(tmp_path, directory).endswith(remedy)


def test_prepare_parquet_without_the_column_is_refused(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="pip install 'weft[data]'")
    import pyarrow as pa

    pq.write_table(pa.table({"content": ["x", "y"], "n": [1, 2]}), tmp_path / "x.parquet")
    refusal = refused(tmp_path, tmp_path / "x.parquet")
    assert "x.parquet" in refusal
    assert "has no column 'text'; it has content, n" in refusal
    assert "data.text_field" in refusal
    assert "has int64 in the column 'n', not text" in refused(
        tmp_path, tmp_path / "x.parquet", text_field="n"
    )
    assert prepare_store(section(tmp_path / "x.parquet", text_field="content"), tmp_path / "d")
    (tmp_path / "bad.parquet").write_bytes(b"no Parquet")
    assert "is not a Parquet file" in refused(tmp_path, tmp_path / "bad.parquet")


def test_prepare_table_without_rows_is_refused(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="pip install 'weft[data]'")
    import pyarrow as pa

    pq.ParquetWriter(tmp_path / "x.parquet", pa.schema([("text", pa.string())])).close()
    assert "holds no documents" in refused(tmp_path, tmp_path / "x.parquet")


def test_prepare_empty_documents_are_counted(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "x.jsonl", [*texts(30), "", " \n", ""])
    messages: list[str] = []
    store = prepare_store(section(file), tmp_path / "c", lambda p: messages.append(p.message))
    assert store.manifest.empty_documents == 3
    positions = "; ".join(f"x.jsonl, line {number}" for number in (31, 32, 33))
    assert f"skipped 3 documents that are empty: {positions}" in messages
    write_lines(file, ["", ""])
    assert "holds no documents except 2 empty ones" in refused(tmp_path / "other", file)


def test_prepare_invalid_utf8_is_skipped_or_replaced(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "x.jsonl", texts(50))
    with file.open("ab") as out:
        out.write(b'{"text": "bad \xff"}\n')
    skipped = prepare_store(section(file, invalid_utf8="skip"), tmp_path / "c")
    assert (skipped.manifest.skipped_files, skipped.manifest.replaced_files) == (1, 0)
    replaced = prepare_store(section(file, invalid_utf8="replace"), tmp_path / "c")
    assert (replaced.manifest.skipped_files, replaced.manifest.replaced_files) == (0, 1)
    assert "bad \ufffd" in decoded(replaced, "train") + decoded(replaced, "validation")


@pytest.mark.slow
def test_prepare_line_of_50_mb_takes_bounded_memory(tmp_path: Path) -> None:
    """Memory has only a few copies of the line; encoding in chunks is fast."""
    text = "".join(f"sentence number {n} of a long book.\n" for n in range(60_000))
    book = text * (50_000_000 // len(text) + 1)
    file = write_lines(tmp_path / "x.jsonl", [book, *texts(5)])
    assert file.stat().st_size > 50_000_000
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from weft.data.prepare import prepare_store\n"
        "from weft.config.schema import DataSection\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "section = DataSection(path=sys.argv[1], vocab_size=300)\n"
        "store = prepare_store(section, Path(sys.argv[2]))\n"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert store.manifest.train.bytes + store.manifest.validation.bytes > 50_000_000\n"
        "print((after - before) // 1024)\n"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code, str(file), str(tmp_path / "c")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert int(completed.stdout) < 10 * 52
    data = book.encode()
    pieces = list(split_chunks(data))
    assert max(end - begin for begin, end in pieces) <= CHUNK_BYTES
    assert b"".join(data[begin:end] for begin, end in pieces) == data


def test_prepare_file_changed_meanwhile_is_refused(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "x.jsonl", texts(50))

    def corrupt_source(progress: Progress) -> None:
        if progress.message == "training the tokenizer":
            write_lines(file, texts(60))

    with pytest.raises(InvalidConfig, match="changed while it was being prepared"):
        prepare_store(section(file), tmp_path / "c", corrupt_source)
    assert not list((tmp_path / "c").glob("stores/*/store.json"))
