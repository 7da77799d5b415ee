"""Every ``weft launch`` in the pages of these clusters does what it can without the cluster."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.harness import ROOT
from weft.cli import main

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("cluster", ["kubernetes", "sagemaker", "skypilot"])
def test_a_page(cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")  # SkyPilot's own check has its test
    blocks = BLOCK.findall((ROOT / "docs" / f"{cluster}.md").read_text("utf-8"))
    (recipe,) = (text for kind, text in blocks if kind == "toml")
    (tmp_path / "mine.toml").write_text(recipe)
    lines = [line for kind, text in blocks if not kind for line in text.splitlines()]
    asked = 0
    for line in lines:
        words = shlex.split(line, comments=True)
        assert words[:2] == ["weft", "launch"]
        if words[2] in ("status", "logs", "stop"):
            assert "# needs " in line
            continue
        assert ("--dry-run" in words) != ("# needs " in line)
        assert main([*words[1:], *["--dry-run"] * ("--dry-run" not in words)]) == 0
        asked += 1
    assert asked >= 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.toml"]
