"""Shared fixtures: a small prepared store of real text."""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import signal
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests import aws, fake_nvml
from weft.config.schema import DataSection
from weft.data.prepare import prepare_store
from weft.monitor.signals import STOP_SIGNALS

pytest_plugins = ["tests.tiers"]


def make_text(directory: Path) -> Path:
    """Copy about 30 files of Python source, a few hundred kilobytes, into a directory."""
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.glob("email/*.py"))[:20] + sorted(library.glob("json/*.py")):
        shutil.copy(file, directory / f"{file.parent.name}_{file.name}")
    for name in ("argparse", "ast", "bdb", "calendar", "codecs"):
        shutil.copy(library / f"{name}.py", directory)
    return directory


def make_store(text: Path, cache: Path) -> Path:
    """Tokenize the text with a vocabulary of 512 entries."""
    return prepare_store(DataSection(path=str(text), vocab_size=512), cache).path


# The background job of a shell ignores Ctrl-C, and so would the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Use one thread: with tiny tensors a second thread would spin and wait."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_collect() -> Iterator[None]:
    """Exclude imported modules from garbage collection, which is slow otherwise.

    Planning runs a collection before it records a step.
    """
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def stop_signals_are_restored() -> Iterator[None]:
    """Restore the handlers that ``weft train`` installs in its process."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def no_clusters_of_the_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide cluster files that the user of this machine has measured, and kept forecasts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(scope="session")
def shared_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one directory for all xdist workers of a run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def make_once(directory: Path, make: Callable[[Path], object]) -> Path:
    """Create a directory with ``make`` once; other workers wait for the first."""
    with open(f"{directory}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            part = directory.with_name(f"{directory.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            make(part)
            part.rename(directory)
    return directory


@pytest.fixture
def nvml_dir(tmp_path: Path, shared_dir: Path) -> Path:
    """Return a directory with a fake NVML, see tests/fake_nvml.py."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    library = make_once(shared_dir / "nvml", fake_nvml.build_library)
    return Path(shutil.copytree(library, tmp_path / "nvml"))


@pytest.fixture(scope="session")
def moto_port() -> Iterator[int]:
    """Start an AWS on loopback once; tests use buckets of their own in it."""
    with aws.moto_server() as port:
        yield port


@pytest.fixture(scope="session")
def text_dir(shared_dir: Path) -> Path:
    return make_once(shared_dir / "text", lambda directory: make_text(directory))


@pytest.fixture(scope="session")
def store_path(text_dir: Path, shared_dir: Path) -> Path:
    cache = make_once(shared_dir / "cache", lambda directory: make_store(text_dir, directory))
    (store,) = (cache / "stores").iterdir()
    return store


@pytest.fixture(autouse=True)
def forget_object_stores() -> Iterator[None]:
    """Drop the clients of S3 after each test: they keep the endpoint of the first one."""
    yield
    if s3fs := sys.modules.get("s3fs"):
        s3fs.S3FileSystem.clear_instance_cache()
    if remote_tokens := sys.modules.get("weft.data.remote_tokens"):
        remote_tokens._file_system.cache_clear()
