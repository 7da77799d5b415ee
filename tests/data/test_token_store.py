from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from xxhash import xxh3_64_hexdigest

from weft.cli.main import main
from weft.config.errors import InvalidConfig
from weft.config.schema import DataSection
from weft.data import conversations
from weft.data.dataset import dataset_from_store
from weft.data.loader import build_mixture
from weft.data.mixture import write_dataset
from weft.data.prepare import prepare_store
from weft.data.prepared_cache import Progress, lock_prepared, open_verified_store
from weft.data.token_store import (
    SPLITS,
    Store,
    TokenStream,
    hash_blocks,
    hash_tokens,
    open_store,
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    text = tmp_path / "text"
    text.mkdir()
    for index in range(30):
        (text / f"{index}.txt").write_text(f"text number {index}, of some words\n" * 10)
    section = DataSection(path=str(text), vocab_size=300, validation_fraction=0.2)
    return prepare_store(section, tmp_path / "cache", shard_bytes=2000)


def test_windows_cross_shards() -> None:
    rng = np.random.default_rng(0)
    flat = rng.integers(0, 60000, 1000)
    for borders in ([], [500], [1, 2, 3, 300, 300, 999], list(range(0, 1000, 7))):
        stream = TokenStream(np.split(flat.astype(np.uint16), borders))
        assert len(stream) == 1000
        for length in (1, 5, 400, 1000):
            starts = np.unique([0, 1000 - length, *rng.integers(0, 1001 - length, 50)])
            windows = stream.read_windows(starts, length)
            assert windows.dtype == np.int64
            np.testing.assert_array_equal(windows, [flat[s : s + length] for s in starts])
        for start in (-1, 991):
            with pytest.raises(IndexError, match="10 tokens"):
                stream.read_windows(np.array([start]), 10)


def test_manifest_describes_the_files(store: Store) -> None:
    manifest = store.manifest
    assert len(manifest.train.shards) > 2
    assert manifest.dtype == "uint16"
    for part, stream in (
        (manifest.train, store.tokens("train")),
        (manifest.validation, store.tokens("validation")),
    ):
        assert len(stream) == part.tokens == sum(shard.tokens for shard in part.shards)
        ids = stream.read_windows(np.array([0]), len(stream))[0]
        assert (ids == manifest.separator).sum() == part.documents
        assert ids[-1] == manifest.separator
        text = store.tokenizer().decode(ids.tolist(), skip_special_tokens=True)
        assert len(text.encode()) == part.bytes
    assert manifest.train.documents + manifest.validation.documents == 30


def test_unigram_entropy_is_that_of_the_train_tokens(store: Store) -> None:
    stream = store.tokens("train")
    _, counts = np.unique(stream.read_windows(np.array([0]), len(stream)), return_counts=True)
    p = counts / counts.sum()
    assert store.manifest.unigram_entropy_nats == pytest.approx(float(-(p * np.log(p)).sum()))


def test_store_has_a_hash_of_each_block_and_the_ends_of_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(256)) * 40
    hashes = [xxh3_64_hexdigest(data[start : start + 4096]) for start in (0, 4096, 8192)]
    assert hash_blocks(data, 4096) == "".join(hashes)
    assert hash_blocks(b"") == ""
    monkeypatch.setattr(conversations, "BLOCK_BYTES", 1000)
    column = conversations._ColumnFile(tmp_path / "column", "uint16")
    for size in (1, 499, 0, 3000, 7):
        column.append(np.arange(size))
    assert column.finish().block_xxh3 == hash_blocks((tmp_path / "column").read_bytes(), 1000)


def test_document_ends_are_those_of_the_tokens(store: Store) -> None:
    for name in SPLITS:
        split = store.split(name)
        expected = store.tokens(name).find_token(store.manifest.separator) + 1
        assert split.ends is not None
        assert split.ends.tokens == split.documents
        np.testing.assert_array_equal(store.document_ends(name), expected)
    for shard in [file for split in store.splits for file in split.files]:
        assert shard.block_xxh3 == hash_blocks((store.path / shard.file).read_bytes())


def test_store_of_an_earlier_version_has_the_same_fingerprint_and_samples(store: Store) -> None:
    before = build_mixture(
        dataset_from_store(store), "train", 64, DataSection(packing="best_fit"), 0
    )
    fingerprint, file = store.fingerprint, store.path / "store.json"
    manifest = json.loads(file.read_text())
    del manifest["block_bytes"]
    for name in SPLITS:
        (store.path / manifest[name].pop("ends")["file"]).unlink()
        for shard in manifest[name]["shards"]:
            del shard["block_xxh3"]
    file.write_text(json.dumps(manifest))
    old = open_store(store.path)
    assert old.fingerprint == fingerprint
    after = build_mixture(dataset_from_store(old), "train", 64, DataSection(packing="best_fit"), 0)
    indices = np.arange(len(before.sources[0]))
    for ours, theirs in zip(
        before.sources[0].get_batch(indices), after.sources[0].get_batch(indices), strict=True
    ):
        assert ours is theirs is None or torch.equal(ours, theirs)


def flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_open_store_damage_is_named(store: Store) -> None:
    shards = [store.path / shard.file for shard in store.manifest.train.shards]
    shards[0].write_bytes(shards[0].read_bytes()[:-2])
    shards[1].unlink()
    tokenizer = store.path / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    with pytest.raises(InvalidConfig) as caught:
        open_store(store.path)
    rules = [error.rule for error in caught.value.errors]
    assert len(rules) == 3
    for rule, name in zip(
        rules, ("train-00000.bin has", "train-00001.bin is", "tokenizer.json"), strict=True
    ):
        assert name in rule


# --------------------------------------------------------------------------- content


def ignore_progress(progress: Progress) -> None:
    pass


def open_copy(store: Store, cache: Path, force: bool = False) -> Store:
    return open_verified_store(store.path, cache, ignore_progress, force)


def rules(store: Store, cache: Path, force: bool = False) -> list[str]:
    with pytest.raises(InvalidConfig) as caught:
        open_copy(store, cache, force)
    assert all(error.value == str(store.path) for error in caught.value.errors)
    return [str(error) for error in caught.value.errors]


def flip_a_bit(file: Path, path: int) -> None:
    data = bytearray(file.read_bytes())
    data[path // 8] ^= 1 << path % 8
    file.write_bytes(data)


def flip_unseen(file: Path) -> None:
    """Flip a bit but keep the file's times, as a failing disk would."""
    stat = file.stat()
    flip_a_bit(file, 0)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_open_verified_flipped_bit_names_shard_hashes_and_remedy(
    store: Store, tmp_path: Path
) -> None:
    assert open_copy(store, tmp_path / "c") == store
    rng = np.random.default_rng(0)
    files = [file for split in store.splits for file in split.files]
    for number in range(20):
        shard = files[number % len(files)]
        position = int(rng.integers(8 * shard.size_bytes))
        flip_a_bit(store.path / shard.file, position)
        [rule] = rules(store, tmp_path / "c")
        assert f"{shard.file} is damaged: its content hash is " in rule
        assert f"store.json has {shard.xxh3}" in rule
        assert "prepare the data again" in rule
        flip_a_bit(store.path / shard.file, position)
    assert open_copy(store, tmp_path / "c") == store


def test_prepare_damaged_store_in_the_cache_is_refused(tmp_path: Path) -> None:
    """Else a resumed run would train on damaged text."""
    text = tmp_path / "a.txt"
    text.write_text("a text of some words, and more\n" * 50)
    section = DataSection(path=str(text), vocab_size=300)
    flip_a_byte(prepare_store(section, tmp_path / "cache").path / "train-00000.bin")
    with pytest.raises(InvalidConfig, match=r"train-00000\.bin is damaged"):
        prepare_store(section, tmp_path / "cache")


def test_open_verified_second_open_reads_nothing(store: Store, tmp_path: Path) -> None:
    cache = tmp_path / "c"
    open_copy(store, cache)
    flip_unseen(store.path / "train-00001.bin")
    assert open_copy(store, cache) == store  # only the content shows the damage
    assert "train-00001.bin is damaged" in rules(store, cache, force=True)[0]
    assert "train-00001.bin is damaged" in rules(store, cache)[0]  # the earlier result is deleted


@pytest.mark.parametrize("change", ["time", "inode"])
def test_open_verified_another_file_of_the_same_size_is_read(
    change: str, store: Store, tmp_path: Path
) -> None:
    file = store.path / "train-00001.bin"
    stat = file.stat()
    open_copy(store, tmp_path / "c")
    if change == "inode":
        replaced = tmp_path / "other"
        replaced.write_bytes(file.read_bytes())
        flip_a_bit(replaced, 3)
        os.utime(replaced, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        replaced.rename(file)
    else:
        flip_unseen(file)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert "train-00001.bin is damaged" in rules(store, tmp_path / "c")[0]


def test_open_verified_while_another_process_checks_waits_and_reads_nothing(
    store: Store, tmp_path: Path
) -> None:
    cache, messages = tmp_path / "c", []
    open_copy(store, cache)
    [memory] = cache.glob("verified/*/verified.json")
    result = memory.read_bytes()
    memory.unlink()
    stat = (store.path / "train-00001.bin").stat()
    flip_unseen(store.path / "train-00001.bin")
    assert stat.st_mtime_ns == (store.path / "train-00001.bin").stat().st_mtime_ns

    def report(progress: Progress) -> None:
        messages.append(progress.message)

    with ThreadPoolExecutor(1) as pool:
        with lock_prepared(memory.parent, ignore_progress, ""):
            waiting = pool.submit(open_verified_store, store.path, cache, report)
            while not messages:
                time.sleep(0.01)
            memory.write_bytes(result)  # the other process has verified the store
        assert waiting.result() == store
    assert messages == ["waiting for another process that verifies the data"]


def test_open_verified_cache_that_cannot_be_written_checks_every_time(
    store: Store, tmp_path: Path
) -> None:
    (tmp_path / "c").write_text("a file")
    messages: list[str] = []
    for _ in range(2):
        open_verified_store(store.path, tmp_path / "c", lambda p: messages.append(p.message))
    assert len(messages) == 2
    assert "cannot be written" in messages[0]
    flip_unseen(store.path / "train-00001.bin")
    assert "is damaged" in rules(store, tmp_path / "c")[0]


def with_manifest(store: Store, change: Callable[[dict[str, Any]], object]) -> None:
    tree = json.loads((store.path / "store.json").read_text())
    change(tree)
    (store.path / "store.json").write_text(json.dumps(tree))


def test_open_verified_ids_outside_the_vocabulary_names_position_and_size(
    store: Store, tmp_path: Path
) -> None:
    """The store has valid hashes, as one written by another program may have."""
    shard = store.manifest.train.shards[1]
    tokens = np.fromfile(store.path / shard.file, np.uint16)
    tokens[[7, 9]] = 299, 65535
    tokens.tofile(store.path / shard.file)
    digest = hash_tokens(tokens)
    with_manifest(store, lambda tree: tree["train"]["shards"][1].update(xxh3=digest))
    size = store.manifest.vocab_size
    assert size <= 299
    [rule] = rules(store, tmp_path / "c")
    assert "train-00001.bin holds token id 65,535 (the first such id is token 7 of" in rule
    assert f"the vocabulary has {size} entries" in rule


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda t: t.update(separator=t["vocab_size"]), "outside the vocabulary"),
        (lambda t: t.update(separator=-1), "outside the vocabulary"),
        (lambda t: t["train"].update(tokens=7), "not the sum over its shards"),
        (lambda t: t["train"].update(documents=-7), "negative number"),
        (lambda t: t.update(kind="chat"), "files of a store of kind chat"),
        (lambda t: t["train"]["shards"][0].update(tokens=-1), "has -1 entries"),
        (lambda t: t["train"]["shards"][0].update(begin=-2), "from byte -2"),
        (lambda t: t["train"]["shards"][0].update(begin=2), "not the name of a file"),
        (lambda t: t["train"]["shards"][0].update(size_bytes=1 << 70), "entries from byte 0"),
        (lambda t: t["train"]["shards"][0].update(file="../x.bin"), "not the name of a file"),
        (lambda t: t["train"]["shards"][0].update(file="a\0b"), "not the name of a file"),
        (lambda t: t.update(vocab_size="many"), "not written by weft"),
    ],
)
def test_open_store_contradiction_in_the_manifest_is_named(
    change: Callable[[dict[str, Any]], object], rule: str, store: Store
) -> None:
    with_manifest(store, change)
    with pytest.raises(InvalidConfig, match=rule):
        open_store(store.path)


# --------------------------------------------------------------------------- weft data verify


def test_data_verify_good_and_damaged_stores(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(store.path, tmp_path / "copy"))
    cache = ["--data.cache_dir", str(tmp_path / "c")]
    assert main(["data", "verify", str(store.path), str(copy), *cache]) == 0
    good, other = capsys.readouterr().out.splitlines()
    assert good.startswith(f"{store.path}: ")
    assert good.endswith("unchanged since they were prepared")
    assert other.startswith(f"{copy}: ")
    flip_unseen(copy / "train-00000.bin")
    flip_unseen(copy / "validation-00000.bin")
    open_copy(Store(copy, store.manifest), tmp_path / "c")  # uses the cached result
    assert main(["data", "verify", str(copy), str(store.path), *cache]) == 1
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert [line.split(": ")[1].split()[0] for line in lines[:2]] == [
        "train-00000.bin",
        "validation-00000.bin",
    ]
    assert lines[2].endswith("unchanged since they were prepared")
    assert "1 of 2 stores" in captured.err
    with pytest.raises(InvalidConfig):
        open_copy(Store(copy, store.manifest), tmp_path / "c")


def test_data_verify_of_a_mixture_checks_its_stores(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(store.path, tmp_path / "copy"))
    stores = [store, Store(copy, store.manifest)]
    mixture = write_dataset({str(s.path): 1.0 for s in stores}, stores, tmp_path / "m")
    cache = ["--data.cache_dir", str(tmp_path / "c")]
    assert main(["data", "verify", str(mixture.path), *cache]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    flip_unseen(copy / "train-00000.bin")
    assert main(["data", "verify", str(mixture.path), *cache]) == 1


def test_data_verify_bad_input_is_named(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "verify", str(tmp_path / "none"), str(tmp_path)]) == 2
    output = capsys.readouterr().err
    assert output.count("is not a prepared store, because it has no store.json") == 2
    assert (
        main(["data", "verify", str(store.path), "--data.text_field", "x", "--data.cachedir", "y"])
        == 2
    )
    output = capsys.readouterr().err
    assert 'data.text_field="x" has no effect' in output
    assert output.startswith("weft: 2 problems")
    assert "Did you mean 'data.cache_dir'?" in output
    with pytest.raises(SystemExit):
        main(["data", "verify"])
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "mixture.json").write_text("[" * 100_000)
    assert main(["data", "verify", str(tmp_path / "m")]) == 2
    assert "mixture.json was not written by weft" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["missing", "torn", "list", "format", "key"])
def test_read_manifest_foreign_file_is_refused(store: Store, change: str) -> None:
    file = store.path / "store.json"
    tree = json.loads(file.read_text())
    if change == "missing":
        file.unlink()
    elif change == "torn":
        file.write_text(file.read_text()[:100])
    elif change == "list":
        file.write_text("[]")
    elif change == "format":
        file.write_text(json.dumps(tree | {"format": 999}))
    else:
        del tree["separator"]
        file.write_text(json.dumps(tree))
    with pytest.raises(InvalidConfig, match=r"store\.json|format 999"):
        open_store(store.path)


def test_fingerprint_depends_on_the_content_only(store: Store, tmp_path: Path) -> None:
    moved = store.path.rename(tmp_path / "elsewhere")
    assert open_store(moved).fingerprint == store.fingerprint
    tree = json.loads((moved / "store.json").read_text())
    tree["train"]["shards"][0]["xxh3"] = "0" * 32
    (moved / "store.json").write_text(json.dumps(tree))
    assert open_store(moved).fingerprint != store.fingerprint
