"""Data paths; files in object stores give the same documents as local files."""

from __future__ import annotations

import hashlib
import http.server
import re
import threading
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests import s3
from tests.data.test_documents import decoded, section, texts, write_lines
from tests.data.test_records import TEXTS, WRITERS
from weft.config.errors import InvalidConfig
from weft.data.prepare import prepare_store
from weft.data.source import (
    _filesystem,
    check_path,
    detect_format,
    detect_source,
    list_remote_files,
    open_file,
    stat_local_file,
)

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
def test_detect_source_kind_of_a_directory_follows_its_files(
    names: list[str], kind: str, read: list[str] | None, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"xx")
    source = detect_source(str(tmp_path))
    assert source.kind == kind
    if read is not None:
        assert [file.name for file in source.files] == read


def test_detect_source_glob_lists_its_matches(tmp_path: Path) -> None:
    for name in ("a/1.jsonl", "a/2.jsonl", "b/1.jsonl", "b/x.txt", "b/y.json", "b/.hidden.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"xx\n")
    result = {
        pattern: [file.name for file in detect_source(str(tmp_path / pattern)).files]
        for pattern in ("*/*.jsonl", "a/*", "**/1.jsonl", "b/*.json")
    }
    assert result == {
        "*/*.jsonl": ["a/1.jsonl", "a/2.jsonl", "b/1.jsonl"],
        "a/*": ["1.jsonl", "2.jsonl"],
        "**/1.jsonl": ["a/1.jsonl", "b/1.jsonl"],
        "b/*.json": ["y.json"],
    }
    assert check_path(str(tmp_path / "b/*.txt")) == []
    [error] = check_path(str(tmp_path / "*.parquet"))
    assert error.rule == "matches no file"
    [error] = check_path("hf://")
    assert "is not the name of a dataset" in error.rule


def test_format_of_known_endings_is_jsonl() -> None:
    for name in ("x.jsonl", "X.JSONL.GZ", "c4-train.00000-of-01024.json.gz", "x.ndjson.zst"):
        assert detect_format(name) == "jsonl"
    assert detect_format("x.json") is None
    assert detect_format("x.json", explicit=True) == "jsonl"
    assert detect_format("x.txt.gz") is None


def test_open_file_replaced_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("before")
    file = stat_local_file(tmp_path / "x", "x")
    (tmp_path / "x").write_text("after!")
    with pytest.raises(InvalidConfig, match="changed while"), open_file(file):
        pass


# ------------------------------------------------------------------ remote files


def put(directory: str, files: dict[str, bytes]) -> str:
    fs = fsspec.filesystem(directory.partition("://")[0])
    for name, data in files.items():
        fs.pipe_file(f"{directory}/{name}", data)
    return directory


@pytest.fixture
def every_format(tmp_path: Path) -> dict[str, bytes]:
    files = {}
    for name, write in WRITERS.items():
        if name != "x.json":  # in a directory a JSON file describes other files
            write(tmp_path / name, TEXTS)
            files[name] = (tmp_path / name).read_bytes()
    return files


def check_remote(url: str, files: dict[str, bytes], tmp_path: Path) -> None:
    """Check that a remote directory gives the same documents as a local one."""
    directory = tmp_path / "here"
    directory.mkdir()
    for name, data in files.items():
        (directory / name).write_bytes(data)
    near = prepare_store(section(directory), tmp_path / "near", shard_bytes=4000)
    distant = prepare_store(section(url), tmp_path / "far", shard_bytes=4000)
    assert distant.fingerprint == near.fingerprint
    assert decoded(distant, "train") == decoded(near, "train")
    messages: list[str] = []
    assert (
        prepare_store(section(url), tmp_path / "far", lambda p: messages.append(p.message))
        is not None
    )
    globbed = prepare_store(section(f"{url}/*.jsonl.gz"), tmp_path / "far")
    total = globbed.manifest.train.documents + globbed.manifest.validation.documents
    assert total == sum(1 for text in TEXTS if text)


def test_prepare_from_memory_store_equals_local_files(
    every_format: dict[str, bytes], tmp_path: Path
) -> None:
    url = put(f"memory://{uuid.uuid4().hex}/data", every_format)
    check_remote(url, every_format, tmp_path)
    file = next(file for file in list_remote_files(url) if file.name == "x.jsonl")
    put(url, {"x.jsonl": every_format["x.jsonl"] + b"\n"})
    with pytest.raises(InvalidConfig, match="changed while"), open_file(file):
        pass


def test_check_path_each_mistake_of_a_url_is_reported(tmp_path: Path) -> None:
    url = put(f"memory://{uuid.uuid4().hex}", {"a.txt": b"x", "b.txt": b"x"})
    for position, rule in (
        (url, "holds files of other formats: a.txt, b.txt"),
        (f"{url}/*.parquet", "holds no files"),
        ("nothing://x", "Protocol not known"),
        (put(f"memory://{uuid.uuid4().hex}", {"a.bin": b"xx"}), "which weft reads from a disk"),
    ):
        [error] = check_path(position)
        assert error.key == "data.path"
        assert rule in error.rule


def test_prepare_over_http_equals_local_files(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="pip install aiohttp")
    directory = tmp_path / "web"
    directory.mkdir()
    write_lines(directory / "x.jsonl", texts(300))
    Handler = type(
        "Handler", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None}
    )
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Handler, directory=directory)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/x.jsonl"
        distant = prepare_store(section(url), tmp_path / "far")
        assert (
            distant.fingerprint == prepare_store(section(directory), tmp_path / "near").fingerprint
        )
    finally:
        server.shutdown()
        server.server_close()


class ReadOnlyS3(http.server.BaseHTTPRequestHandler):
    """A server with the S3 requests of a reader: list, head, range; it accepts any key."""

    objects: ClassVar[dict[str, bytes]] = {}
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        requested = parse_qs(url.query)
        name = unquote(url.path).removeprefix("/data").removeprefix("/")
        if "list-type" in requested:
            self.answer(200, self.listed(requested).encode())
        elif name not in self.objects:
            self.answer(404, b"")
        else:
            data = self.objects[name]
            etag = {"ETag": f'"{hashlib.md5(data).hexdigest()}"'}
            if match := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                first, last = int(match[1]), min(int(match[2]), len(data) - 1)
                etag["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
                self.answer(206, data[first : last + 1], etag)
            else:
                self.answer(200, data, etag)

    do_HEAD = do_GET

    def listed(self, requested: dict[str, list[str]]) -> str:
        prefix, delimiter = (requested.get(key, [""])[0] for key in ("prefix", "delimiter"))
        keys, directories = [], set()
        for name in sorted(self.objects):
            if name.startswith(prefix):
                inside, cut, _ = name.removeprefix(prefix).partition(delimiter or "\n")
                if cut:
                    directories.add(prefix + inside + cut)
                else:
                    keys.append(name)
        contents = "".join(
            f"<Contents><Key>{key}</Key><Size>{len(self.objects[key])}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f'<ETag>"{hashlib.md5(self.objects[key]).hexdigest()}"</ETag></Contents>'
            for key in keys
        )
        common = "".join(
            f"<CommonPrefixes><Prefix>{directory}</Prefix></CommonPrefixes>"
            for directory in directories
        )
        return (
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>data</Name><IsTruncated>false</IsTruncated><KeyCount>{len(keys)}</KeyCount>"
            f"{contents}{common}</ListBucketResult>"
        )

    def answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        times = {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        for key, value in (times | (headers or {}) | {"Content-Length": str(len(data))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def s3_at(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    _filesystem.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()  # else clients of another test are reused
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


def test_prepare_from_own_s3_server_equals_local_files(
    every_format: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("s3fs", reason="pip install 'weft[s3]'")
    ReadOnlyS3.objects = {f"prefix/{name}": data for name, data in every_format.items()}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ReadOnlyS3)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    s3_at(server.server_address[1], monkeypatch)
    try:
        check_remote("s3://data/prefix", every_format, tmp_path)
        [error] = check_path("s3://data/nothing")
        assert "holds no files" in error.rule or "cannot be listed" in error.rule
    finally:
        _filesystem.cache_clear()
        server.shutdown()
        server.server_close()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("s3fs", reason="pip install 'weft[s3]'")
    with s3.server() as port:
        s3_at(port, monkeypatch)
        _filesystem("s3").mkdir("data")
        yield "s3://data/prefix"
        _filesystem.cache_clear()


def put_in_s3(url: str, files: dict[str, bytes]) -> str:
    for name, data in files.items():
        _filesystem("s3").pipe_file(f"{url}/{name}", data)
    return url


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(s3.missing()), reason=f"no S3 server: {s3.missing()} not installed")
def test_prepare_from_s3_equals_local_files(
    bucket: str, every_format: dict[str, bytes], tmp_path: Path
) -> None:
    check_remote(put_in_s3(bucket, every_format), every_format, tmp_path)


def test_check_path_missing_package_names_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _filesystem.cache_clear()
    from fsspec.registry import known_implementations

    known = {"class": "nothing_of_this_name.X", "err": "install it"}
    monkeypatch.setitem(known_implementations, "other", known)
    [error] = check_path("other://bucket/x")
    assert "without another package: install it" in error.rule
    assert "weft[s3]" in error.remedy
