"""Import of models from a real S3 server, and its failures."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import aws, s3
from tests.conversion.test_hf_convert import assert_same_bits, of_model, tiny_dir, tiny_weights
from tests.small import newest_state
from weft.checkpoint.manifest import list_checkpoints

pytest.importorskip("s3fs", reason="pip install 'weft[s3]'")
pytest.importorskip("upath", reason="pip install 'weft[s3]'")
HAS_SERVER = not (s3.missing() and aws.missing())
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_SERVER, reason="no S3 server: install Ceph, or moto and flask-cors"),
    pytest.mark.timeout(300),
]
NAMES = ["model.safetensors", "config.json", "tokenizer.json"]
PUT = """
import sys, s3fs
store = s3fs.S3FileSystem()
store.mkdir("models")
store.put(sys.argv[1] + "/", "models/tiny/", recursive=True)
"""


@pytest.fixture(scope="module")
def gateway() -> Iterator[int]:
    with s3.any_server() as port:
        yield port


@pytest.fixture(scope="module")
def source(gateway: int, store_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory whose files are also in s3://models/tiny."""
    directory = tiny_dir(tmp_path_factory.mktemp("source") / "hf", store_path / "tokenizer.json")
    with pytest.MonkeyPatch.context() as patch:
        set_environment(patch, gateway)
        run_python("-c", PUT, str(directory))
    return directory


@pytest.fixture
def proxy(gateway: int, source: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3.Proxy]:
    proxy = s3.Proxy(gateway)
    set_environment(monkeypatch, proxy.port)
    yield proxy
    proxy.close()


def set_environment(patch: pytest.MonkeyPatch, port: int) -> None:
    patch.setenv("AWS_ACCESS_KEY_ID", s3.KEY)
    patch.setenv("AWS_SECRET_ACCESS_KEY", s3.SECRET)
    patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def run_python(*words: str, code: int = 0) -> str:
    """Run a process, as its client starts threads; return all that it prints, as one line."""
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return " ".join((done.stdout + done.stderr).split())


def run_import(url: str, run: Path, code: int = 0) -> str:
    return run_python("-m", "weft", "import", url, str(run), code=code)


def test_import_streams_every_byte_once(source: Path, proxy: s3.Proxy, tmp_path: Path) -> None:
    run_import("s3://models/tiny", tmp_path / "run")
    assert_same_bits(tiny_weights(), of_model(newest_state(tmp_path / "run")))
    sizes = {name: (source / name).stat().st_size for name in NAMES}
    # Small files are read to be checked, and to be copied.
    assert proxy.all_bytes < 1.1 * sizes.pop("model.safetensors") + 4 * sum(sizes.values())


def test_load_model_reads_a_store(proxy: s3.Proxy) -> None:
    code = "import weft; print(sum(p.numel() for p in weft.load_model({}).parameters()))"
    count = sum(tensor.numel() for tensor in tiny_weights().values())
    assert str(count) in run_python("-c", code.format("'s3://models/tiny'")).split()


def test_killed_import_leaves_nothing_and_can_be_repeated(proxy: s3.Proxy, tmp_path: Path) -> None:
    run, reads = tmp_path / "run", []

    def stop_late(method: str, path: str, number: int) -> None:
        if method == "GET" and "model.safetensors" in path:
            reads.append(number)
            time.sleep(100 if len(reads) > 5 else 0)

    proxy.spoil = stop_late
    command = [sys.executable, "-m", "weft", "import", "s3://models/tiny", str(run)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until = time.monotonic() + 60
        while len(reads) <= 5 and time.monotonic() < until:
            time.sleep(0.05)
        assert [path.name[:4] for path in tmp_path.iterdir()] == [".tmp"]
        process.kill()
    assert not run.exists()
    proxy.spoil = lambda method, path, number: None
    run_import("s3://models/tiny", run)
    assert os.listdir(tmp_path) == ["run"]
    assert len(list_checkpoints(run / "checkpoints")) == 1


def test_failing_store_leaves_nothing(proxy: s3.Proxy, tmp_path: Path) -> None:
    reads = []

    def fail_late(method: str, path: str, number: int) -> int | None:
        reads.extend([number] * (method == "GET" and "model.safetensors" in path))
        return 403 if len(reads) > 5 else None

    proxy.spoil = fail_late
    message = run_python("-m", "weft", "import", "s3://models/tiny", str(tmp_path / "r"), code=1)
    assert "s3://models/tiny: cannot be read: PermissionError" in message
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("url", "removed", "status", "texts"),
    [
        ("s3://models/none", "", None, ["has no files", "credentials, region and endpoint"]),
        ("s3://absent/tiny", "", None, ["bucket absent, which does not exist"]),
        ("s3://models/tiny/config.json", "", None, ["is not a directory"]),
        ("s3://models/tiny", "AWS_ACCESS_KEY_ID", None, ["NoCredentialsError", "~/.aws"]),
        ("s3://models/tiny", "", 403, ["cannot be reached: PermissionError", "~/.aws"]),
        ("s3://key:secret@models/tiny", "", None, ["has credentials in it"]),
    ],
)
def test_wrong_names_and_credentials_are_one_error(
    url: str,
    removed: str,
    status: int | None,
    texts: list[str],
    proxy: s3.Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    if removed:
        monkeypatch.delenv(removed)
    proxy.spoil = lambda method, path, number: status
    message = run_import(url, tmp_path / "run", code=2)
    assert "weft: 1 problem, nothing was started: " in message
    assert [text for text in texts if text not in message] == []
    assert "secret" not in message
    assert not (tmp_path / "run").exists()
