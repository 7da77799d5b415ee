"""Preparation by several workers in an object store: claims, heartbeats, errors, equal bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest

from tests import aws
from tests.data.test_foreign_tokens import documents, write_megatron
from tests.pages import SPECIAL, TEMPLATE, build_tokenizer
from tests.s3 import Proxy
from weft.config.errors import ConfigError, InvalidConfig
from weft.config.schema import DataSection
from weft.config.storage import open_directory, put_if_absent
from weft.data import conversations, shared_preparation
from weft.data.dataset import dataset_from_store
from weft.data.inspect import summarize_dataset
from weft.data.prepare import prepare_store
from weft.data.shared_preparation import SharedWork, make_together, map_units
from weft.data.stories import stories
from weft.data.token_store import SPLITS
from weft.data.tokenizer_training import train_tokenizer
from weft.data.workers import Advance, ignore_progress

pytestmark = pytest.mark.skipif(bool(aws.missing()), reason=f"needs {', '.join(aws.missing())}")
COUNT = 12  # units; the server lists few objects fast
# Each beat and poll is a request, for which the server computes longer than a worker.
FAST = {"BEAT_SECONDS": 0.4, "EXPIRY_SECONDS": 4.0, "POLL_SECONDS": 0.2}


@pytest.fixture
def cache(moto_port: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A prefix of a bucket, and short times."""
    for name, value in aws.variables(moto_port).items():
        monkeypatch.setenv(name, value)
    for name, seconds in FAST.items():
        monkeypatch.setattr(shared_preparation, name, seconds)
    monkeypatch.setattr(shared_preparation, "UNIT_BYTES", 1)
    bucket = f"tokens-{abs(hash(request.node.name)) % 10**9}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    return open_directory(f"s3://{bucket}/cache")


def start_workers(count: int, work: Callable[[], Any]) -> list[Any]:
    """Return what ``work`` returns or raises in each of several threads."""
    results: list[Any] = [None] * count

    def run(index: int) -> None:
        try:
            results[index] = work()
        except (InvalidConfig, shared_preparation.Completed) as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def square_all(cache: Path, square: Callable[[int, Advance], int], count: int = COUNT) -> list[int]:
    shared = SharedWork(cache / "preparing" / "work", cache / "final")
    items = list(range(count))
    return map_units(shared, "squares", square, items, [1] * count, int, ignore_progress, 1)


def test_units_are_each_done_by_one_worker_and_all_get_the_results(cache: Path) -> None:
    calls: Counter[int] = Counter()
    workers = set()

    def square(number: int, advance: Advance) -> int:
        calls[number] += 1
        workers.add(threading.get_ident())
        time.sleep(0.01)
        return number * number

    results = start_workers(3, lambda: square_all(cache, square))
    assert results == [[n * n for n in range(COUNT)]] * 3
    assert calls == Counter(range(COUNT))
    assert len(workers) == 3


def test_units_of_several_small_items_are_done_together(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_preparation, "UNIT_BYTES", 10)
    seen = []

    def triple(number: int, advance: Advance) -> int:
        return 3 * number

    shared = SharedWork(cache / "preparing" / "work", cache / "final")
    sizes = [4, 4, 4, 25, 0, 3, 3]
    results = map_units(shared, "t", triple, range(7), sizes, int, seen.append, 1)
    assert results == [0, 3, 6, 9, 12, 15, 18]
    names = {path.name for path in shared.directory.joinpath("t").iterdir()}
    assert names == {f"{kind}-00000{n}" for kind in ("result",) for n in range(5)} | {
        f"claim-00000{n}-000" for n in range(5)
    }


WORKER = """\
import sys, time
from weft.config.storage import open_directory
from weft.data import shared_preparation
from weft.data.workers import ignore_progress
for pair in sys.argv[3:]:
    name, seconds = pair.split("=")
    setattr(shared_preparation, name, float(seconds))
shared_preparation.UNIT_BYTES = 1
def square(number, advance):
    print(number, flush=True)
    time.sleep(600)
cache = open_directory(sys.argv[1])
shared = shared_preparation.SharedWork(cache / "preparing" / "work", cache / "final")
count = int(sys.argv[2])
shared_preparation.map_units(
    shared, "squares", square, list(range(count)), [1] * count, int, ignore_progress, 1
)
"""


def test_units_of_workers_that_ended_are_done_by_another(cache: Path) -> None:
    command = [
        sys.executable,
        "-c",
        WORKER,
        str(cache),
        str(COUNT),
        *(f"{k}={v}" for k, v in FAST.items()),
    ]
    signals = (signal.SIGKILL, signal.SIGINT, signal.SIGSTOP)
    workers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in signals
    ]
    try:
        lost = {int(worker.stdout.readline()) for worker in workers if worker.stdout}
        assert len(lost) == 3
        calls: Counter[int] = Counter()

        def square(number: int, advance: Advance) -> int:
            calls[number] += 1
            return number * number

        def send() -> None:
            time.sleep(1.5 * FAST["EXPIRY_SECONDS"])  # workers that live keep their units
            end = time.monotonic() + 60
            while calls.total() < COUNT - 3 and time.monotonic() < end:
                time.sleep(0.1)
            kept.append(lost.isdisjoint(calls) and calls.total() == COUNT - 3)
            for worker, number in zip(workers, signals, strict=True):
                os.kill(worker.pid, number)

        kept: list[bool] = []
        thread = threading.Thread(target=send)
        thread.start()
        results = square_all(cache, square)
        thread.join()
        assert kept == [True]
        assert results == [n * n for n in range(COUNT)]
        assert calls == Counter(range(COUNT))
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def test_error_of_a_worker_ends_all_with_the_same_message(cache: Path) -> None:
    error = ConfigError("data.path", "x.jsonl", "cannot be read: permission denied", "repair it")
    barrier = threading.Barrier(3, timeout=30)

    def fail(number: int, advance: Advance) -> int:
        if number < 3:
            barrier.wait()  # all workers run
            raise InvalidConfig([error])
        return number

    results = start_workers(3, lambda: square_all(cache, fail))
    assert [str(each) for each in results] == [str(InvalidConfig([error]))] * 3
    # The next attempt does not read the old error.
    assert square_all(cache, lambda number, advance: number) == list(range(COUNT))


def test_work_that_another_has_completed_ends(cache: Path) -> None:
    def complete(number: int, advance: Advance) -> int:
        put_if_absent(cache / "final", b"done")
        work = cache / "preparing" / "work"
        work.fs.rm(work.path, recursive=True)  # type: ignore[attr-defined]
        return number

    [result] = start_workers(1, lambda: square_all(cache, complete))
    assert isinstance(result, shared_preparation.Completed)
    [result] = start_workers(1, lambda: square_all(cache, complete))  # at the start
    assert isinstance(result, shared_preparation.Completed)


def test_work_that_another_completes_ends_workers_whose_heartbeat_goes_on(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for a result of the other, which was removed before it was listed."""
    monkeypatch.setattr(shared_preparation, "BEAT_SECONDS", 100.0)
    work, final = cache / "preparing" / "work", cache / "final"
    with ExitStack() as stack:
        workers = [
            stack.enter_context(shared_preparation._Units(work / "squares", final, 2))
            for _ in range(2)
        ]
        units = [worker.claim() for worker in workers]
        assert sorted(map(str, units)) == ["0", "1"]
        for worker in workers:
            time.sleep(FAST["POLL_SECONDS"])
            assert worker.refresh() == set()
            assert worker.claim() is None  # the other one lives
        for worker, unit in zip(workers, units, strict=True):
            worker.publish(int(str(unit)), b"[]")
        put_if_absent(final, b"done")  # by a third worker, which has listed the results
        work.fs.rm(work.path, recursive=True)  # type: ignore[attr-defined]
        for worker in workers:
            worker._beat()
        time.sleep(FAST["POLL_SECONDS"])
        for worker in workers:
            with pytest.raises(shared_preparation.Completed):
                worker.refresh()


def test_work_that_is_complete_at_the_start_leaves_no_heartbeat(cache: Path) -> None:
    put_if_absent(cache / "final", b"done")
    work = cache / "preparing" / "work"
    with pytest.raises(shared_preparation.Completed):
        square_all(cache, lambda number, advance: number)
    time.sleep(3 * FAST["BEAT_SECONDS"])
    assert not (work / "squares").exists()


def make(cache: Path, name: str = "work", source: str = "web") -> list[str]:
    messages: list[str] = []

    def combine(shared: SharedWork) -> bytes:
        work = ("unit", lambda item, advance: item, [7], [1], int, ignore_progress, 1)
        return str(map_units(shared, *work)).encode()

    final = cache / f"final-{name}"
    make_together(cache, name, final, source, lambda p: messages.append(p.message), combine)
    assert final.read_bytes() == b"[7]"
    return messages


def test_work_of_other_versions_is_refused_and_of_other_settings_reported(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make(cache) == []
    assert not (cache / "preparing" / "work").exists()
    put_if_absent(
        cache / "preparing" / "other" / "job",
        b'{"source": "web", "versions": {"weft": "0.0.7", "tokenizers": "9"}}',
    )
    [message] = make(cache, "second")
    assert "have other settings, tokenizers or files, and share no work" in message
    assert make(cache, "third", source="books") == []
    with pytest.raises(InvalidConfig) as caught:
        make(cache, "other")
    assert "weft 0.0.7 and tokenizers 9; this one has weft" in str(caught.value)
    assert f"delete {cache}/preparing/other if none runs" in str(caught.value)


def test_store_that_ignores_conditional_puts_is_refused(
    moto_port: int, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = Proxy(moto_port)
    proxy.dropped_headers = {"if-none-match"}
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    type(cache.fs).clear_instance_cache()  # type: ignore[attr-defined]
    try:
        with pytest.raises(InvalidConfig) as caught:
            make(open_directory(str(cache)))
    finally:
        proxy.close()
        type(cache.fs).clear_instance_cache()  # type: ignore[attr-defined]
    assert "ignores conditional puts (If-None-Match)" in str(caught.value)
    assert "Use a store with conditional puts, such as Amazon S3" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "credentials"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "127.0.0.1:9"),
    ],
)
def test_store_without_credentials_or_endpoint_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str | None], reason: str
) -> None:
    for name, value in changes.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr("weft.config.files.MAX_ATTEMPTS", 1)
    type(cache.fs).clear_instance_cache()  # type: ignore[attr-defined]
    with pytest.raises(InvalidConfig) as caught:
        make(open_directory(str(cache)))
    type(cache.fs).clear_instance_cache()  # type: ignore[attr-defined]
    assert str(caught.value).startswith(f'data.cache_dir="{cache}" cannot be used: ')
    assert reason in str(caught.value)
    assert "Check the name of the bucket, the credentials and the endpoint" in str(caught.value)


# --------------------------------------------------------------------------- stores


def start_prepare(source: Path, cache: Path, home: Path, *options: str) -> subprocess.Popen[str]:
    """Start ``weft data prepare`` as on a machine that shares no directory with others."""
    command = [sys.executable, "-m", "weft", "data", "prepare", str(source)]
    keys = ["--data.cache_dir", str(cache), "--data.vocab_size", "600", *options]
    return subprocess.Popen(
        [*command, *keys],
        env=os.environ | {"HOME": str(home), "XDG_CACHE_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def files_of(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.name != "lock"}


def write_stories(directory: Path, suffix: str) -> Path:
    directory.mkdir()
    for number, story in zip(range(40), stories(), strict=False):
        line = json.dumps({"text": story}) if suffix == "jsonl" else story
        (directory / f"{number:02}.{suffix}").write_text(line + "\n")
    return directory


@pytest.mark.slow
@pytest.mark.system
def test_prepare_by_two_hosts_gives_the_bytes_of_one(cache: Path, tmp_path: Path) -> None:
    source = write_stories(tmp_path / "source", "jsonl")
    hosts = [start_prepare(source, cache, tmp_path / f"host{n}") for n in range(2)]
    outputs = [host.communicate(timeout=100)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], outputs
    section = DataSection(path=str(source), vocab_size=600)
    expected = prepare_store(section, tmp_path / "cache").path
    assert files_of(cache / "stores" / expected.name) == files_of(expected)
    assert not (cache / "preparing").exists()


def test_text_and_its_tokenizer_by_three_workers_give_the_bytes_of_one(
    cache: Path, tmp_path: Path
) -> None:
    source = write_stories(tmp_path / "source", "txt")
    section = DataSection(path=str(source), vocab_size=600, node_cache_dir=str(tmp_path / "node"))
    expected = prepare_store(section, tmp_path / "cache", shard_bytes=2000).path
    stores = start_workers(3, lambda: prepare_store(section, cache, shard_bytes=2000))
    assert [str(getattr(s, "url", s)) for s in stores] == [
        str(cache / "stores" / expected.name)
    ] * 3
    assert files_of(cache / "stores" / expected.name) == files_of(expected)
    assert len([*expected.glob("train-*.bin")]) > 3


def write_chats(file: Path, kind: str, count: int) -> None:
    """Write rows of all lengths, blank lines, and rows that give notes."""
    lines = []
    for number in range(count):
        user = {"role": "user", "content": "? " * (1 + number % 7)}
        good, bad = ({"role": "assistant", "content": text * (1 + number % 5)} for text in "!?")
        row: dict[str, Any] = {"messages": [user, good], "id": number}
        if kind == "preferences":
            row = {"prompt": [user], "chosen": [good], "rejected": [bad]}
        elif kind == "unpaired":
            row = {"prompt": [user], "completion": [good], "label": number % 3 == 0}
        elif number % 4 == 3:
            row["messages"] = [user, good | {"weight": 0.5}]
        lines.append(json.dumps(row) + "\n" + "\n" * (number % 9 == 8))
    file.write_text("".join(lines))


@pytest.fixture
def chat_section(tmp_path: Path, request: pytest.FixtureRequest) -> DataSection:
    kind = getattr(request, "param", "chat")
    (tmp_path / "chats").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        write_chats(tmp_path / "chats" / name, kind, 30)
    tokenizer = build_tokenizer(["? ! user assistant"], SPECIAL, "<|im_end|>", TEMPLATE)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return DataSection(
        path=str(tmp_path / "chats"),
        format=kind,
        tokenizer=str(tmp_path / "tokenizer" / "tokenizer.json"),
        node_cache_dir=str(tmp_path / "node"),
    )


@pytest.mark.parametrize(
    "chat_section",
    ["chat", pytest.param("preferences", marks=pytest.mark.slow), "unpaired"],
    indirect=True,
)
def test_conversations_by_three_workers_give_the_bytes_of_one(
    chat_section: DataSection, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = prepare_store(chat_section, tmp_path / "whole")
    monkeypatch.setattr(conversations, "FRAGMENT_BYTES", 1500)
    encode, encoded, threads = conversations.ConversationCorpus._encode, Counter[Any](), set()

    def count(self: Any, lines: Any, *args: Any) -> Any:
        encoded[lines.fragment.file.name, lines.num_before] += 1
        threads.add(threading.get_ident())
        time.sleep(0.02)
        return encode(self, lines, *args)

    monkeypatch.setattr(conversations.ConversationCorpus, "_encode", count)
    stores = start_workers(3, lambda: prepare_store(chat_section, cache))
    url = cache / "stores" / expected.path.name
    assert [str(getattr(store, "url", store)) for store in stores] == [str(url)] * 3
    assert files_of(url) == files_of(expected.path)
    assert len(encoded) >= 4  # fragments of both files
    assert set(encoded.values()) == {1}
    assert len(threads) > 1
    assert not (cache / "preparing").exists()
    parts = prepare_store(chat_section, tmp_path / "parts")
    assert files_of(parts.path) == files_of(expected.path)


@pytest.mark.parametrize(
    ("row", "rule"),
    [("{}", "has no field"), (json.dumps({"messages": [{"role": "user", "content": "?"}]}), "")],
)
def test_invalid_conversation_is_named_by_its_line_in_the_file(
    chat_section: DataSection,
    row: str,
    rule: str,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "chats" / "b.jsonl"
    lines = file.read_text().splitlines()
    for number in (20, 30):
        lines[number] = row
    file.write_text("\n".join(lines) + "\n")
    errors = []
    for size in (1 << 30, 1500):
        monkeypatch.setattr(conversations, "FRAGMENT_BYTES", size)
        with pytest.raises(InvalidConfig) as caught:
            prepare_store(chat_section, tmp_path / "cache")
        errors.append(str(caught.value))
    errors += map(str, start_workers(2, lambda: prepare_store(chat_section, cache)))
    assert "b.jsonl:21: " in errors[0]
    assert "(1 more such line" in errors[0]
    assert errors == [errors[0]] * 4


@pytest.mark.parametrize("end", [None, 0], ids=["megatron", "nanogpt"])
def test_tokens_of_other_software_are_copied_into_the_bucket(
    end: int | None, cache: Path, tmp_path: Path
) -> None:
    train_tokenizer(["a b c"], 300).save(str(tmp_path / "tokenizer.json"))
    texts, source = documents(100, end, top=250), tmp_path / "train.bin"
    if end is None:  # without separators, which weft adds
        write_megatron(source, texts, "uint16")
    else:
        np.array([token for text in texts for token in text], np.uint16).tofile(source)
    section = DataSection(
        path=str(source),
        tokenizer=str(tmp_path / "tokenizer.json"),
        node_cache_dir=str(tmp_path / "node"),
    )
    local = prepare_store(section, tmp_path / "cache")
    expected = [np.concatenate(local.tokens(name)._shards) for name in SPLITS]
    stores = start_workers(2, lambda: prepare_store(section, cache))
    [url] = {str(getattr(store, "url", store)) for store in stores}
    for file in tmp_path.glob("train.*"):
        file.unlink()  # other machines lack them
    given = prepare_store(section.model_copy(update={"path": url}), tmp_path / "cache")
    assert summarize_dataset(dataset_from_store(given))[-1].endswith(f"prepared in {url}")
    assert given.manifest.train.ends is not None
    assert given.manifest.unigram_entropy_nats == pytest.approx(local.manifest.unigram_entropy_nats)
    for name, tokens in zip(SPLITS, expected, strict=True):
        files = [cache / "stores" / given.manifest.key / s.file for s in given.split(name).shards]
        content = b"".join(file.read_bytes() for file in files)
        np.testing.assert_array_equal(np.frombuffer(content, np.uint16), tokens)
