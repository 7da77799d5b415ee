from __future__ import annotations

from pathlib import Path

import pytest

from weft.cluster.preparing import cache_dir
from weft.config.schema import DataSection


def test_cache_dir_follows_the_key_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir(DataSection()) == tmp_path / ".cache" / "weft"
    assert cache_dir(DataSection(cache_dir="~/texts")) == tmp_path / "texts"
    monkeypatch.setenv("XDG_CACHE_HOME", "/fast")
    assert cache_dir(DataSection()) == Path("/fast/weft")
