"""What several test modules share: a small prepared store of real text."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.data.prepare import prepare
from weft.job import DataSection

pytest_plugins = ["tests.tiers"]


def make_text(folder: Path) -> Path:
    """Some hundred kilobytes of Python source in 30 files."""
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.glob("email/*.py"))[:20] + sorted(library.glob("json/*.py")):
        shutil.copy(file, folder / f"{file.parent.name}_{file.name}")
    for name in ("argparse", "ast", "bdb", "calendar", "codecs"):
        shutil.copy(library / f"{name}.py", folder)
    return folder


def make_store(text: Path, cache: Path) -> Path:
    """The text tokenised with 512 entries."""
    return prepare(DataSection(path=str(text), vocab_size=512), cache).path


@pytest.fixture(scope="session", autouse=True)
def no_clusters_of_the_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whoever runs the tests may have measured devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def store_path(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(text_folder, tmp_path_factory.mktemp("cache"))
