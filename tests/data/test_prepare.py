from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from weft.config.errors import InvalidConfig
from weft.config.schema import DataSection
from weft.data.prepare import cache_dir, prepare_store
from weft.data.prepared_cache import Progress
from weft.data.token_shards import CHUNK_BYTES
from weft.data.token_store import Store
from weft.data.tokenizer_training import train_tokenizer

ROOT = Path(__file__).parents[2]
SHARD = 3000  # bytes of text: many shards


@pytest.fixture
def text(tmp_path: Path) -> Path:
    directory = tmp_path / "text"
    directory.mkdir()
    for index in range(40):
        lines = [f"file {index}, line {line}: some words here\n" for line in range(25)]
        (directory / f"{index:02d}.txt").write_text("".join(lines))
    return directory


def section(path: Path, **changes: object) -> DataSection:
    return DataSection.model_validate({"path": str(path), "vocab_size": 300} | changes)


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.name != "lock"}


def ids(store: Store, name: str) -> list[int]:
    stream = store.tokens(name)  # type: ignore[arg-type]
    return [int(i) for i in stream.read_windows(np.array([0]), len(stream))[0]]


def in_subprocess(code: str, *arguments: str | Path) -> subprocess.Popen[str]:
    head = (
        "import os, sys, signal, resource, time\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from pathlib import Path\n"
        "from weft.data.prepare import prepare_store\n"
        "from weft.config.errors import InvalidConfig\n"
        "from weft.config.schema import DataSection\n"
        "section = DataSection(path=sys.argv[1], vocab_size=300)\n"
        "cache = Path(sys.argv[2])\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", head + code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_prepare_tokens_decode_to_the_text(text: Path, tmp_path: Path) -> None:
    store = prepare_store(section(text), tmp_path / "cache", shard_bytes=SHARD)
    tokenizer = store.tokenizer()
    separator = store.manifest.separator
    documents: list[str] = []
    for name in ("train", "validation"):
        row = ids(store, name)
        while row:
            end = row.index(separator)
            documents.append(tokenizer.decode(row[:end]))
            row = row[end + 1 :]
    assert sorted(documents) == sorted(file.read_text() for file in text.iterdir())


def test_prepare_long_document_is_cut_into_pieces(tmp_path: Path) -> None:
    file = tmp_path / "long.txt"
    file.write_text("".join(f"line {line} <|endoftext|>\n" for line in range(20000)))
    assert file.stat().st_size > 3 * CHUNK_BYTES
    stores = [
        prepare_store(section(file, validation_fraction=0.2), tmp_path / "cache", shard_bytes=size)
        for size in (CHUNK_BYTES, 1 << 30)
    ]
    assert len(stores[0].manifest.train.shards) > len(stores[1].manifest.train.shards) == 1
    for name in ("train", "validation"):
        row = ids(stores[0], name)
        assert row == ids(stores[1], name)
        assert row.count(stores[0].manifest.separator) == 1
    decoded = [stores[0].tokenizer().decode(ids(stores[0], n)) for n in ("train", "validation")]
    assert "".join(decoded) == file.read_text()


def test_prepare_second_time_tokenizes_nothing(text: Path, tmp_path: Path) -> None:
    store = prepare_store(section(text), tmp_path / "cache")
    messages: list[str] = []
    second_run = prepare_store(
        section(text), tmp_path / "cache", lambda p: messages.append(p.message)
    )
    assert second_run == store
    assert messages == []  # files are not read, because none has changed
    for file in text.iterdir():
        os.utime(file)
    assert (
        prepare_store(section(text), tmp_path / "cache", lambda p: messages.append(p.message))
        == store
    )
    assert set(messages) == {"reading the text"}


def test_prepare_each_deciding_key_makes_another_store(text: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    paths = {prepare_store(section(text), cache).path}
    for changes in ({"vocab_size": 301}, {"validation_fraction": 0.1}, {"invalid_utf8": "skip"}):
        paths.add(prepare_store(section(text, **changes), cache).path)
    (text / "00.txt").rename(text / "renamed.txt")
    paths.add(prepare_store(section(text), cache).path)
    (text / "renamed.txt").write_text("other text\n")
    paths.add(prepare_store(section(text), cache).path)
    assert len(paths) == 6


@pytest.mark.parametrize("shards_before_death", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_prepare_killed_keeps_complete_shards(
    text: Path, tmp_path: Path, shards_before_death: int
) -> None:
    reference_run = prepare_store(section(text), tmp_path / "one", shard_bytes=SHARD)
    kill = (
        "def die(progress):\n"
        "    [folder] = (cache / 'stores').glob('*') if (cache / 'stores').exists() else [cache]\n"
        f"    if len(list(folder.glob('train-*.json'))) == {shards_before_death}:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        f"prepare_store(section, cache, die, shard_bytes={SHARD})\n"
    )
    assert in_subprocess(kill, text, tmp_path / "two").wait() == -signal.SIGKILL
    directory = tmp_path / "two" / "stores" / reference_run.path.name
    assert not (directory / "store.json").exists()
    complete = sorted(directory.glob("train-*.bin"))
    assert len(complete) == shards_before_death
    before = [file.stat() for file in [*complete, directory / "tokenizer.json"]]
    # A power cut may leave a torn shard without an entry, a false entry, or a temporary file.
    torn = directory / f"train-{shards_before_death:05d}.bin"
    torn.write_bytes(b"torn")
    false = directory / f"train-{shards_before_death + 1:05d}.bin"
    false.write_bytes(complete[0].read_bytes()[:-2])
    false.with_suffix(".json").write_bytes(complete[0].with_suffix(".json").read_bytes())
    (directory / "train-99999.bin.tmp").write_bytes(b"half")

    resumed = prepare_store(section(text), tmp_path / "two", shard_bytes=SHARD)
    after = [file.stat() for file in [*complete, directory / "tokenizer.json"]]
    same = [
        (a.st_ino, a.st_mtime_ns) == (b.st_ino, b.st_mtime_ns)
        for a, b in zip(before, after, strict=True)
    ]
    assert all(same)
    assert contents(resumed.path) == contents(reference_run.path)
    assert resumed.fingerprint == reference_run.fingerprint


def test_prepare_by_processes_at_once_agrees(text: Path, tmp_path: Path) -> None:
    code = f"print(prepare_store(section, cache, shard_bytes={SHARD}).fingerprint)\n"
    processes = [in_subprocess(code, text, tmp_path / "cache") for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert len(set(outputs)) == 1
    single = prepare_store(section(text), tmp_path / "alone", shard_bytes=SHARD)
    assert outputs[0].strip() == single.fingerprint
    assert contents(tmp_path / "cache" / "stores" / single.path.name) == contents(single.path)


def test_prepare_beside_a_process_that_verifies_loses_no_file(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second process opens the store at the moment when the first one marks it verified."""
    cache = tmp_path / "cache"
    threads: list[threading.Thread] = []
    opened: list[Path] = []
    rename = os.replace

    def open_too() -> None:
        opened.append(prepare_store(section(text), cache).path)

    def rename_late(source: Path, target: Path) -> None:
        if Path(target).name == "verified.json" and not threads:
            threads.append(threading.Thread(target=open_too, daemon=True))
            threads[0].start()
            threads[0].join(timeout=1)  # the thread waits for the lock
        rename(source, target)

    monkeypatch.setattr(os, "replace", rename_late)
    path = prepare_store(section(text), cache).path
    threads[0].join(timeout=30)
    assert opened == [path]


def test_prepare_waiting_for_another_process_is_reported(text: Path, tmp_path: Path) -> None:
    # The store's name is known from another cache, and its lock is held here.
    name = prepare_store(section(text), tmp_path / "one").path.name
    directory = tmp_path / "two" / "stores" / name
    directory.mkdir(parents=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waits = threading.Event()

        def progress(p: Progress) -> None:
            if "waiting" in p.message:
                waits.set()

        thread = threading.Thread(
            target=prepare_store, args=(section(text), tmp_path / "two", progress), daemon=True
        )
        thread.start()
        assert waits.wait(30)
        assert not (directory / "train-00000.bin").exists()
        fcntl.flock(lock, fcntl.LOCK_UN)
        thread.join(30)
    assert (directory / "store.json").exists()


def test_prepare_unwritable_cache_is_a_problem(text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidConfig) as caught:
        prepare_store(section(text), tmp_path / "file")
    [error] = caught.value.errors
    assert (error.key, error.value) == ("data.cache_dir", str(tmp_path / "file"))
    assert os.strerror(20) in error.rule  # ENOTDIR


def test_prepare_full_disk_is_a_problem_and_leaves_no_half_file(tmp_path: Path) -> None:
    # A limit on file sizes stands for a disk with room for the tokenizer but not for a shard.
    file = tmp_path / "text"
    file.write_text("".join(chr(33 + i * i % 90) for i in range(100_000)))
    code = (
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))\n"
        "try: prepare_store(section, cache)\n"
        "except InvalidConfig as invalid: print(invalid)\n"
    )
    output, _ = in_subprocess(code, file, tmp_path / "cache").communicate(timeout=60)
    assert output.startswith("data.cache_dir=")
    assert "File too large" in output
    [directory] = (tmp_path / "cache" / "stores").iterdir()
    assert {f.name for f in directory.iterdir()} == {
        *("lock", "tokenizer.json", "document_tokens.json")
    }


def test_prepare_too_little_text_is_a_problem_of_the_path(tmp_path: Path) -> None:
    for data, invalid in ((b"short", "error"), (b"\xff\0 binary" * 100, "skip")):
        (tmp_path / "x").write_bytes(data)
        with pytest.raises(InvalidConfig) as caught:
            prepare_store(section(tmp_path / "x", invalid_utf8=invalid), tmp_path / "cache")
        [error] = caught.value.errors
        assert error.key == "data.path"
        assert "too little text" in error.rule


def test_prepare_binary_file_is_refused_skipped_or_replaced(text: Path, tmp_path: Path) -> None:
    (text / "bad.bin").write_bytes(b"\xff" * 900)
    with pytest.raises(InvalidConfig, match=r"bad\.bin: byte 0, line 1"):
        prepare_store(section(text), tmp_path / "cache")
    messages: list[str] = []
    skipped = prepare_store(
        section(text, invalid_utf8="skip"),
        tmp_path / "cache",
        lambda p: messages.append(p.message),
    )
    assert (skipped.manifest.skipped_files, skipped.manifest.replaced_files) == (1, 0)
    assert any("skipped 1 files" in m and "bad.bin" in m for m in messages)
    replaced = prepare_store(section(text, invalid_utf8="replace"), tmp_path / "cache")
    assert (replaced.manifest.skipped_files, replaced.manifest.replaced_files) == (0, 1)
    parts = [
        m.train.documents + m.validation.documents for m in (skipped.manifest, replaced.manifest)
    ]
    assert parts == [40, 41]


def test_prepare_several_problems_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig) as caught:
        prepare_store(section(tmp_path / "no", tokenizer=str(tmp_path / "no.json")), tmp_path)
    assert [p.key for p in caught.value.errors] == ["data.path", "data.tokenizer"]


def test_prepare_tokenizer_that_is_a_directory_names_its_file(text: Path, tmp_path: Path) -> None:
    train_tokenizer(["my own words, some of them here"], 280).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InvalidConfig) as caught:
        prepare_store(section(text, tokenizer=str(tmp_path)), tmp_path / "cache")
    [error] = caught.value.errors
    assert error.remedy == f"use {tmp_path / 'tokenizer.json'}"


def test_prepare_given_tokenizer_or_store_is_used(text: Path, tmp_path: Path) -> None:
    local, other = tmp_path / "mine.json", tmp_path / "other.json"
    train_tokenizer(["my own words, some of them here"], 280).save(str(local))
    train_tokenizer(["other"], 270).save(str(other))
    store = prepare_store(section(text, tokenizer=str(local)), tmp_path / "cache")
    assert (store.path / "tokenizer.json").read_bytes() == local.read_bytes()

    before = contents(store.path)
    for tokenizer in ("train", str(local)):
        assert prepare_store(section(store.path, tokenizer=tokenizer), tmp_path / "unused") == store
    assert [file.name for file in (tmp_path / "unused").iterdir()] == ["verified"]
    assert contents(store.path) == before
    with pytest.raises(InvalidConfig, match="does not match the store") as caught:
        prepare_store(section(store.path, tokenizer=str(other)), tmp_path / "unused")
    assert caught.value.errors[0].key == "data.tokenizer"


def test_prepare_large_vocabulary_takes_four_bytes(text: Path, tmp_path: Path) -> None:
    tokenizer = json.loads(train_tokenizer(["words"], 280).to_str())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": 70000, "content": "<x>"})
    tokenizer["model"]["vocab"]["<x>"] = 70000
    (tmp_path / "t.json").write_text(json.dumps(tokenizer))
    store = prepare_store(section(text, tokenizer=str(tmp_path / "t.json")), tmp_path / "cache")
    assert (store.manifest.dtype, store.manifest.vocab_size) == ("uint32", 70001)
    assert store.manifest.train.shards[0].size_bytes == 4 * store.manifest.train.shards[0].tokens
    row = ids(store, "validation")
    assert store.tokenizer().decode(row[: row.index(store.manifest.separator)]).startswith("file ")


def test_prepare_does_not_import_torch() -> None:
    code = "print('torch' in sys.modules)"
    assert in_subprocess(code, "x", "y").communicate(timeout=60)[0].strip() == "False"


def test_cache_dir_follows_the_key_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir(DataSection()) == tmp_path / ".cache" / "weft"
    assert cache_dir(DataSection(cache_dir="~/texts")) == tmp_path / "texts"
    monkeypatch.setenv("XDG_CACHE_HOME", "/fast")
    assert cache_dir(DataSection()) == Path("/fast/weft")
