"""Untrusted files: decompression bombs, and every format with changed bytes."""

from __future__ import annotations

import gzip
import json
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.harness import run_ranks
from weft.config.errors import InvalidConfig
from weft.config.schema import DataSection
from weft.data.chat_template import load_chat_template
from weft.data.dataset import open_dataset
from weft.data.document_tokens import find_separator
from weft.data.mixture import write_dataset
from weft.data.prepare import prepare_store
from weft.data.prepared_cache import Progress, open_verified_store
from weft.data.tokenizer import load_tokenizer
from weft.data.tokenizer_training import train_tokenizer

MUTATIONS = 40  # per file, in the default suite


def ignore_progress(progress: Progress) -> None:
    pass


def write_parquet(file: Path) -> None:
    text = pa.array(["x" * 500_000]).take(pa.array([0] * 600))
    pq.write_table(pa.table({"text": text}), file, compression="zstd")


def write_zst(file: Path) -> None:
    with file.open("wb") as stream:
        compress = zstandard.ZstdCompressor(level=3).compressobj()
        stream.write(compress.compress(b'{"text": "'))
        for _ in range(700):
            stream.write(compress.compress(b"x" * (1 << 20)))
        stream.write(compress.flush())


def write_gz(file: Path) -> None:
    with gzip.open(file, "wb", 9) as stream:
        stream.write(b'{"text": "')
        for _ in range(300):
            stream.write(b"x" * (1 << 20))


BOMBS: dict[str, Callable[[Path], None]] = {
    "a.parquet": write_parquet,
    "a.jsonl.zst": write_zst,
    "a.jsonl.gz": write_gz,
}


def refusal_and_growth(path: str) -> tuple[str, float]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidConfig) as caught:
        prepare_store(DataSection(path=path), Path(path).parent / "cache")
    return str(caught.value), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e6


@pytest.mark.parametrize("name", BOMBS)
def test_prepare_decompression_bomb_is_refused_in_bounded_memory(name: str, tmp_path: Path) -> None:
    BOMBS[name](tmp_path / name)
    assert (tmp_path / name).stat().st_size < 400_000
    [(refusal, gigabytes)] = run_ranks(refusal_and_growth, 1, str(tmp_path / name))
    assert "a decompression bomb" in refusal or "is longer than 256 MiB" in refusal
    assert name in refusal
    assert gigabytes < 0.6


# --------------------------------------------------------------------------- changed bytes


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Change, remove, repeat or truncate some bytes of a file's content."""
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        position = rng.randrange(len(content)) if content else 0
        kind = rng.randrange(5)
        if kind == 0 and content:
            content[position] ^= 1 << rng.randrange(8)
        elif kind == 1 and content:
            content[position] = rng.choice((0, 9, 34, 45, 48, 57, 91, 123, 127, 255))
        elif kind == 2:
            del content[position : position + rng.choice((1, 4, 64))]
        elif kind == 3:
            content[position:position] = content[position : position + rng.choice((1, 8, 200))]
        elif rng.random() < 0.3:
            del content[position:]
        else:
            content[position : position + 1] = rng.choice(
                (b"-1", b"1e999", b"null", b"[[[", b"9" * 40)
            )
    return bytes(content)


ROWS = [{"text": f"text number {n}, of some words\n" * 3} for n in range(40)]


def write_sources(directory: Path) -> dict[str, Path]:
    """Write a small file of each format."""
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    table = pa.Table.from_pylist(ROWS)
    files = {
        n: directory / f"a.{n}" for n in ("jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow")
    }
    files["jsonl"].write_bytes(lines)
    files["jsonl.gz"].write_bytes(gzip.compress(lines, mtime=0))
    files["jsonl.zst"].write_bytes(zstandard.ZstdCompressor().compress(lines))
    pq.write_table(table, files["parquet"])
    feather.write_feather(table, files["arrow"], compression="uncompressed")
    return files


def prepared_or_refused(section: DataSection, cache: Path) -> bool:
    """Return True for a store, False for `InvalidConfig`; no partial store may remain."""
    try:
        store = prepare_store(section, cache)
    except InvalidConfig:
        assert not list(cache.glob("stores/*/*.tmp"))
        return False
    stream = store.tokens("train")
    assert len(stream) == store.manifest.train.tokens
    return True


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow"])
def test_prepare_changed_bytes_are_read_or_refused(kind: str, tmp_path: Path) -> None:
    train_tokenizer([row["text"] for row in ROWS], 280).save(str(tmp_path / "tokenizer.json"))
    source = write_sources(tmp_path)[kind]
    data, rng = source.read_bytes(), random.Random(kind)
    results = []
    for number in range(MUTATIONS):
        directory = tmp_path / str(number)
        directory.mkdir()
        file = directory / source.name
        file.write_bytes(mutated(data, rng))
        section = DataSection(path=str(file), tokenizer=str(tmp_path / "tokenizer.json"))
        results.append(prepared_or_refused(section, directory / "cache"))
        shutil.rmtree(directory)
    assert False in results  # something was refused


@pytest.mark.parametrize("name", ["store.json", "tokenizer.json", "document_tokens.json"])
def test_open_store_changed_bytes_are_read_or_refused(name: str, tmp_path: Path) -> None:
    train_tokenizer([row["text"] for row in ROWS], 280).save(str(tmp_path / "tokenizer.json"))
    section = DataSection(
        path=str(write_sources(tmp_path)["jsonl"]), tokenizer=str(tmp_path / "tokenizer.json")
    )
    store = prepare_store(section, tmp_path / "cache")
    file = store.path / name
    data, rng = file.read_bytes(), random.Random(name)
    for _ in range(MUTATIONS):
        file.write_bytes(mutated(data, rng))
        try:
            opened = open_verified_store(store.path, tmp_path / "cache", ignore_progress)
            tokenizer, _ = load_tokenizer(store.path / "tokenizer.json")
            find_separator(tokenizer, store.path / "tokenizer.json")
        except InvalidConfig:
            continue
        assert len(opened.tokens("train")) == opened.manifest.train.tokens


def test_open_text_changed_mixture_is_read_or_refused(tmp_path: Path) -> None:
    section = DataSection(path=str(write_sources(tmp_path)["jsonl"]), vocab_size=280)
    store = prepare_store(section, tmp_path / "cache")
    mixture = write_dataset({"a": 1.0, "b": 2.0}, [store, store], tmp_path / "m").path
    file, rng = mixture / "mixture.json", random.Random(0)
    data = file.read_bytes()
    for _ in range(MUTATIONS):
        file.write_bytes(mutated(data, rng))
        try:
            open_dataset(mixture)
        except InvalidConfig:
            continue


def test_load_template_changed_bytes_are_read_or_refused(tmp_path: Path) -> None:
    train_tokenizer(["some words"], 280).save(str(tmp_path / "tokenizer.json"))
    config = {
        "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
        "eos_token": "x",
    }
    data, rng = json.dumps(config).encode(), random.Random(0)
    section = DataSection(format="chat", tokenizer=str(tmp_path / "tokenizer.json"))
    for _ in range(MUTATIONS):
        (tmp_path / "tokenizer_config.json").write_bytes(mutated(data, rng))
        try:
            load_chat_template(section)
        except InvalidConfig:
            continue
