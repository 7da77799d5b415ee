from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from weft.data.prepare import prepare
from weft.data.store import Store, TokenStream, open_store
from weft.job import DataSection, InvalidJob


@pytest.fixture
def store(tmp_path: Path) -> Store:
    text = tmp_path / "text"
    text.mkdir()
    for index in range(30):
        (text / f"{index}.txt").write_text(f"text number {index}, of some words\n" * 10)
    section = DataSection(path=str(text), vocab_size=300, holdout=0.2)
    return prepare(section, tmp_path / "cache", shard_bytes=2000)


def test_windows_cross_shards() -> None:
    rng = np.random.default_rng(0)
    flat = rng.integers(0, 60000, 1000)
    for borders in ([], [500], [1, 2, 3, 300, 300, 999], list(range(0, 1000, 7))):
        stream = TokenStream(np.split(flat.astype(np.uint16), borders))
        assert len(stream) == 1000
        for length in (1, 5, 400, 1000):
            starts = np.unique([0, 1000 - length, *rng.integers(0, 1001 - length, 50)])
            windows = stream.window(starts, length)
            assert windows.dtype == np.int64
            np.testing.assert_array_equal(windows, [flat[s : s + length] for s in starts])
        for start in (-1, 991):
            with pytest.raises(IndexError, match="10 tokens"):
                stream.window(np.array([start]), 10)


def test_manifest_describes_the_files(store: Store) -> None:
    manifest = store.manifest
    assert len(manifest.train.shards) > 2
    assert manifest.dtype == "uint16"
    for part, stream in (
        (manifest.train, store.tokens("train")),
        (manifest.validation, store.tokens("validation")),
    ):
        assert len(stream) == part.tokens == sum(shard.tokens for shard in part.shards)
        ids = stream.window(np.array([0]), len(stream))[0]
        assert (ids == manifest.separator).sum() == part.documents
        assert ids[-1] == manifest.separator
        text = store.tokenizer().decode(ids.tolist(), skip_special_tokens=True)
        assert len(text.encode()) == part.bytes
    assert manifest.train.documents + manifest.validation.documents == 30


def test_unigram_entropy_is_that_of_the_train_tokens(store: Store) -> None:
    stream = store.tokens("train")
    _, counts = np.unique(stream.window(np.array([0]), len(stream)), return_counts=True)
    p = counts / counts.sum()
    assert store.manifest.unigram_entropy_nats == pytest.approx(float(-(p * np.log(p)).sum()))


def flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_damage_is_named(store: Store) -> None:
    shards = [store.path / shard.file for shard in store.manifest.train.shards]
    shards[0].write_bytes(shards[0].read_bytes()[:-2])
    shards[1].unlink()
    tokenizer = store.path / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    with pytest.raises(InvalidJob) as caught:
        open_store(store.path)
    rules = [problem.rule for problem in caught.value.problems]
    assert len(rules) == 3
    for rule, name in zip(
        rules, ("train-00000.bin has", "train-00001.bin is", "tokenizer.json"), strict=True
    ):
        assert name in rule


def test_changed_content_is_found_when_asked_for(store: Store) -> None:
    assert open_store(store.path, check_content=True) == store
    flip_a_byte(store.path / "validation-00000.bin")
    open_store(store.path)
    with pytest.raises(InvalidJob, match=r"validation-00000\.bin has other content"):
        open_store(store.path, check_content=True)


@pytest.mark.parametrize("change", ["missing", "torn", "list", "format", "key"])
def test_manifest_that_is_not_ours_is_refused(store: Store, change: str) -> None:
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
    with pytest.raises(InvalidJob, match=r"store\.json|format 999"):
        open_store(store.path)


def test_fingerprint_is_of_the_content(store: Store, tmp_path: Path) -> None:
    moved = store.path.rename(tmp_path / "elsewhere")
    assert open_store(moved).fingerprint == store.fingerprint
    tree = json.loads((moved / "store.json").read_text())
    tree["train"]["shards"][0]["xxh3"] = "0" * 32
    (moved / "store.json").write_text(json.dumps(tree))
    assert open_store(moved).fingerprint != store.fingerprint
