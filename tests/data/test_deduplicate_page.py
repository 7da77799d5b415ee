"""The page about duplicates: its pipeline runs in datatrove's environment, then weft prepares."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import pages
from weft.config.schema import DataSection
from weft.data.prepare import prepare_store

PAGE = pages.ROOT / "docs" / "cookbook" / "deduplicate.md"
# datatrove cannot share weft's environment: name the Python of its own.
PYTHON = os.environ.get("DATATROVE_PYTHON", sys.executable)


def has_datatrove() -> bool:
    command = [PYTHON, "-c", "import datatrove.pipeline.dedup, orjson, xxhash; xxhash.xxh64('a')"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(600)
def test_page_removes_copies_and_the_test_set(tmp_path: Path) -> None:
    if not has_datatrove():
        pytest.skip("needs datatrove[io,processing] in the environment of DATATROVE_PYTHON")
    pages.write_files(PAGE.read_text("utf-8"), tmp_path)
    environment = os.environ | {"PYTHONPATH": str(pages.ROOT)}
    subprocess.run([sys.executable, "example.py"], cwd=tmp_path, env=environment, check=True)
    completed = subprocess.run(
        [PYTHON, "clean.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    output = completed.stdout + completed.stderr
    assert completed.returncode == 0, output
    command = next(c for c in pages.commands_of(PAGE.read_text("utf-8")) if c.needs == "datatrove")
    assert pages.find_missing(command, output) is None
    lines = [gzip.decompress(file.read_bytes()) for file in (tmp_path / "clean").iterdir()]
    texts = [json.loads(line)["text"] for line in b"".join(lines).splitlines()]
    assert len(set(texts)) == len(texts) > 100
    held_out = {json.loads(line)["text"] for line in (tmp_path / "test.jsonl").open()}
    assert held_out.isdisjoint(texts)
    section = DataSection(path=str(tmp_path / "clean"), vocab_size=400)
    store = prepare_store(section, tmp_path / "cache")
    assert sum(split.documents for split in store.splits) == len(texts)
