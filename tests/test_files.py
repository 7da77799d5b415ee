"""Atomic writes: a file has its old or its new content, never a part."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import ROOT
from weft.config.errors import WeftError
from weft.config.files import (
    check_url,
    expand_path,
    read_input,
    read_json,
    replace_bytes,
    sync_directory,
    write_durably,
)

WRITERS = [replace_bytes, write_durably]
Writer = Callable[[Path, bytes], None]

# Repeatedly writes a file of 1 MiB of one byte: first a, then b, then a again.
KEEPS_WRITING = """
import sys
from pathlib import Path
from weft.config.files import replace_bytes, write_durably
path, writer = Path(sys.argv[1]), globals()[sys.argv[2]]
while True:
    for byte in (b"a", b"b"):
        writer(path, byte * (1 << 20))
"""


@pytest.mark.parametrize("write", WRITERS)
def test_write_killed_writer_leaves_whole_files(write: Writer, tmp_path: Path) -> None:
    """The file is complete at any time; a killed writer leaves only temporary files."""
    path = tmp_path / "file"
    writer = subprocess.Popen([sys.executable, "-c", KEEPS_WRITING, str(path), write.__name__])
    try:
        until = time.monotonic() + 60
        visited = set[bytes]()
        while len(visited) < 2:
            assert time.monotonic() < until
            assert writer.poll() is None
            if path.exists():
                content = path.read_bytes()
                assert len(content) == 1 << 20
                assert content == content[:1] * len(content)
                visited.add(content[:1])
    finally:
        writer.kill()
        writer.wait()
    assert path.read_bytes() in (b"a" * (1 << 20), b"b" * (1 << 20))
    assert all(
        remaining.name.endswith(".tmp") for remaining in tmp_path.iterdir() if remaining != path
    )


@pytest.mark.parametrize("write", WRITERS)
def test_write_that_fails_leaves_the_old_file(write: Writer, tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write(path, b"new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_sync_directory_without_fsync_is_no_error() -> None:
    """The file system /proc has no fsync."""
    sync_directory(Path("/proc"))


def test_read_json_invalid_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    assert read_json(path) == {}
    path.write_text("{")
    with pytest.raises(WeftError, match=r"file.json: cannot be read"):
        read_json(path)


@pytest.mark.parametrize(
    ("url", "secret"),
    [
        ("s3://key:abc@bucket/x", True),
        ("s3://key:abc/def@bucket/x", True),  # a secret of AWS may contain a slash
        ("https://token@host/x", True),
        ("s3://bucket/a@b", False),
        ("hf://org/name:config@split", False),
        ("/home/me@here", False),
    ],
)
def test_check_url_with_credentials_is_refused(url: str, secret: bool) -> None:
    result = check_url("data.path", url)
    assert bool(result) == secret
    assert "abc" not in str(result)


@pytest.mark.parametrize("write", WRITERS)
def test_write_to_a_pipe_is_an_error_and_leaves_it(write: Writer, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        write(path, b"text")
    assert path.is_fifo()
    assert [*tmp_path.iterdir()] == [path]


def test_expand_path_of_an_unknown_user_is_the_path_itself() -> None:
    assert expand_path("~no-such-user/x") == Path("~no-such-user/x")
    assert expand_path("~/x") == Path.home() / "x"


def test_paths_of_users_are_expanded_without_an_exception() -> None:
    """``Path.expanduser`` raises RuntimeError for a user that does not exist."""
    files = (ROOT / "weft").rglob("*.py")
    assert [str(file) for file in files if ").expanduser()" in file.read_text("utf-8")] == []


def test_input_of_a_shell_command_is_read(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"one\ntwo\n")
    os.close(writer)
    assert read_input(Path(f"/dev/fd/{reader}")) == "one\ntwo\n"
    os.close(reader)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="nothing is written"):
        read_input(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        read_input(Path("/dev/zero"))
