"""What a path names, and files in object stores: the same documents as from a disk."""

from __future__ import annotations

import http.server
import threading
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests import s3
from tests.data.test_documents import contents, decoded, section, texts, write_lines
from tests.data.test_records import TEXTS, WRITERS
from weft.data.files import _filesystem, format_of, local_file, open_file, remote_files
from weft.data.prepare import prepare
from weft.data.source import check_path, look
from weft.job import InvalidJob

fsspec = pytest.importorskip("fsspec", reason="pip install 'weft[s3]'")


@pytest.mark.parametrize(
    ("names", "kind", "read"),
    [
        (["a.txt", "b.md"], "text", None),
        (["a.txt", "b.jsonl"], "text", None),
        (["package.json", "other.json"], "text", None),
        (["a.jsonl", "README.md", "dataset_infos.json", "LICENSE"], "records", ["a.jsonl"]),
        (["a.jsonl.zst", "b.parquet", "c/d.arrow"], "records",
         ["a.jsonl.zst", "b.parquet", "c/d.arrow"]),
        (["a.bin", "a.idx", "b.bin"], "tokens", ["a.bin", "b.bin"]),
        (["train.bin", "val.bin", "meta.pkl"], "tokens", ["train.bin", "val.bin"]),
        (["a.bin", "a.jsonl"], "text", None),
        (["README.md", "notes.md"], "text", None),
    ],
)  # fmt: skip
def test_what_a_folder_holds(
    names: list[str], kind: str, read: list[str] | None, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"xx")
    found = look(str(tmp_path))
    assert found.kind == kind
    if read is not None:
        assert [file.name for file in found.files] == read


def test_globs_name_what_they_match(tmp_path: Path) -> None:
    for name in ("a/1.jsonl", "a/2.jsonl", "b/1.jsonl", "b/x.txt", "b/y.json", "b/.hidden.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"xx\n")
    found = {
        pattern: [file.name for file in look(str(tmp_path / pattern)).files]
        for pattern in ("*/*.jsonl", "a/*", "**/1.jsonl", "b/*.json")
    }
    assert found == {
        "*/*.jsonl": ["a/1.jsonl", "a/2.jsonl", "b/1.jsonl"],
        "a/*": ["1.jsonl", "2.jsonl"],
        "**/1.jsonl": ["a/1.jsonl", "b/1.jsonl"],
        "b/*.json": ["y.json"],
    }
    assert check_path(str(tmp_path / "b/*.txt")) == []
    [problem] = check_path(str(tmp_path / "*.parquet"))
    assert problem.rule == "matches no file"
    [problem] = check_path("hf://")
    assert "is no data set's name" in problem.rule


def test_endings() -> None:
    for name in ("x.jsonl", "X.JSONL.GZ", "c4-train.00000-of-01024.json.gz", "x.ndjson.zst"):
        assert format_of(name) == "jsonl"
    assert format_of("x.json") is None
    assert format_of("x.json", alone=True) == "jsonl"
    assert format_of("x.txt.gz") is None


def test_a_file_that_was_replaced_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("before")
    file = local_file(tmp_path / "x", "x")
    (tmp_path / "x").write_text("after!")
    with pytest.raises(InvalidJob, match="changed while"), open_file(file):
        pass


# ------------------------------------------------------------------ elsewhere


def put(folder: str, files: dict[str, bytes]) -> str:
    fs = fsspec.filesystem(folder.partition("://")[0])
    for name, data in files.items():
        fs.pipe_file(f"{folder}/{name}", data)
    return folder


@pytest.fixture
def every_format(tmp_path: Path) -> dict[str, bytes]:
    files = {}
    for name, write in WRITERS.items():
        if name != "x.json":  # in a folder it would describe the others
            write(tmp_path / name, TEXTS)
            files[name] = (tmp_path / name).read_bytes()
    return files


def check_remote(url: str, files: dict[str, bytes], tmp_path: Path) -> None:
    """All of a folder far away gives what it does on the disk."""
    here = tmp_path / "here"
    here.mkdir()
    for name, data in files.items():
        (here / name).write_bytes(data)
    near = prepare(section(here), tmp_path / "near", shard_bytes=4000)
    far = prepare(section(url), tmp_path / "far", shard_bytes=4000)
    assert far.fingerprint == near.fingerprint
    assert decoded(far, "train") == decoded(near, "train")
    said: list[str] = []
    assert prepare(section(url), tmp_path / "far", lambda p: said.append(p.message)) is not None
    globbed = prepare(section(f"{url}/*.jsonl.gz"), tmp_path / "far")
    total = globbed.manifest.train.documents + globbed.manifest.validation.documents
    assert total == sum(1 for text in TEXTS if text)


def test_in_an_object_store(every_format: dict[str, bytes], tmp_path: Path) -> None:
    url = put(f"memory://{uuid.uuid4().hex}/data", every_format)
    check_remote(url, every_format, tmp_path)
    file = next(file for file in remote_files(url) if file.name == "x.jsonl")
    put(url, {"x.jsonl": every_format["x.jsonl"] + b"\n"})
    with pytest.raises(InvalidJob, match="changed while"), open_file(file):
        pass


def test_mistakes_of_places(tmp_path: Path) -> None:
    url = put(f"memory://{uuid.uuid4().hex}", {"a.txt": b"x", "b.txt": b"x"})
    for place, rule in (
        (url, "holds other files than documents: a.txt, b.txt"),
        (f"{url}/*.parquet", "holds no files"),
        ("nothing://x", "Protocol not known"),
        (put(f"memory://{uuid.uuid4().hex}", {"a.bin": b"xx"}), "mapped into memory"),
    ):
        [problem] = check_path(place)
        assert problem.key == "data.path"
        assert rule in problem.rule


def test_over_http(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="pip install aiohttp")
    folder = tmp_path / "web"
    folder.mkdir()
    write_lines(folder / "x.jsonl", texts(300))
    Handler = type(
        "Handler", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None}
    )
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/x.jsonl"
        far = prepare(section(url), tmp_path / "far")
        assert far.fingerprint == prepare(section(folder), tmp_path / "near").fingerprint
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("s3fs", reason="pip install 'weft[s3]'")
    with s3.server() as port:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.SECRET)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        fsspec.filesystem("s3").mkdir("data")
        yield "s3://data/prefix"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(s3.missing()), reason=f"no S3 server: {s3.missing()} not installed")
def test_in_s3(bucket: str, every_format: dict[str, bytes], tmp_path: Path) -> None:
    check_remote(put(bucket, every_format), every_format, tmp_path)
    assert contents(tmp_path)  # nothing but the caches was made here


def test_without_what_reads_it_it_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    _filesystem.cache_clear()
    from fsspec.registry import known_implementations

    known = {"class": "nothing_of_this_name.X", "err": "install it"}
    monkeypatch.setitem(known_implementations, "other", known)
    [problem] = check_path("other://bucket/x")
    assert "without another package: install it" in problem.rule
    assert "weft[s3]" in problem.remedy
