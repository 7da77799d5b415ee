"""Output of `weft data inspect` and `prepare` for data with known numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.small import small_job
from weft.cli.main import main
from weft.config.schema import DataSection
from weft.config.writer import to_toml
from weft.data.inspect import inspect_dataset, summarize_dataset
from weft.data.prepare import prepare_data
from weft.data.tokenizer_training import train_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Write a tokenizer with one token per byte."""
    train_tokenizer([], 257).save(str(tmp_path / "bytes.json"))
    return tmp_path / "bytes.json"


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    file = tmp_path / "letters.jsonl"
    texts = ["a" * (n % 50 + 1) for n in range(1, 400)] + ["the longest " * 100, ""]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


@pytest.mark.parametrize("samples", [0, 2])
def test_inspect_numbers_are_those_of_the_text(
    samples: int, lines: Path, tokenizer: Path, tmp_path: Path
) -> None:
    text = prepare_data(DataSection(path=str(lines), tokenizer=str(tokenizer)), tmp_path / "c")
    store = text.sources[0].store
    stream = store.tokens("train")
    ids = stream.read_windows(np.array([0]), len(stream))[0]
    ends = np.flatnonzero(ids == store.manifest.separator)
    sizes = np.diff(ends, prepend=-1) - 1
    output = "\n".join(inspect_dataset(text, samples))
    split = store.manifest.train
    row = next(line for line in output.splitlines() if line.startswith("train")).split()
    expected = [f"{len(sizes):,}", f"{len(ids):,}", "100.0%", f"{split.bytes:,}"]
    assert row[1:5] == expected
    assert split.bytes == sizes.sum()
    assert f"min {sizes.min()}  " in output
    assert f"median {int(np.sort(sizes)[int(np.ceil(len(sizes) / 2)) - 1])}  " in output
    assert "max 1,200" in output
    assert "1,200 tokens: the longest the longest" in output
    within = int(((sizes >= 16) & (sizes < 32)).sum())
    assert any(line.split()[:4] == ["16", "-", "31", str(within)] for line in output.splitlines())
    assert "1 empty documents were skipped" in output
    assert output.count("-- from token") == samples


def test_inspect_of_a_run_directory_shows_the_data_of_the_run(
    lines: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    paths = ("data.path", str(lines)), ("data.tokenizer", str(tokenizer))
    (run / "job.toml").write_text(to_toml(small_job(*paths), "demo", small_job()))
    (run / "metrics.jsonl").touch()
    cache = ["--data.cache_dir", str(tmp_path / "cache"), "--samples", "0"]
    assert main(["train", "demo", "--data.path", str(run), "--run.dir", str(tmp_path / "b")]) == 2
    command = re.search("'weft (data inspect .*?)'", capsys.readouterr().err)
    assert command
    assert main([*command[1].split(), *cache]) == 0
    shown = capsys.readouterr().out
    assert main(["data", "inspect", str(lines), *cache, "--data.tokenizer", str(tokenizer)]) == 0
    assert shown == capsys.readouterr().out


def test_inspect_mixture_shows_shares(lines: Path, tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("line\n" * 2000)
    mixture = {str(lines): 3.0, str(tmp_path / "book.txt"): 1.0}
    text = prepare_data(DataSection(mixture=mixture, tokenizer=str(tokenizer)), tmp_path / "c")
    output = "\n".join(summarize_dataset(text))
    assert "training mixture: letters 75.0%, book 25.0%" in output
    tokens = [source.store.manifest.train.tokens for source in text.sources]
    for name, count in zip(("letters", "book"), tokens, strict=True):
        row = next(line for line in output.splitlines() if line.startswith(name)).split()
        assert f"{count / sum(tokens):.1%}" in row


def test_data_commands_print_what_was_prepared(
    lines: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["--data.tokenizer", str(tokenizer), "--data.cache_dir", str(tmp_path / "c")]
    assert main(["data", "prepare", str(lines), *keys]) == 0
    first = capsys.readouterr()
    assert "tokenizing" in first.err
    assert "tokenizer: 257 entries; prepared in" in first.out
    recipe = tmp_path / "mine.toml"
    recipe.write_text(f'extends = "demo"\n[data]\npath = "{lines}"\n')
    assert main(["data", "inspect", str(recipe), "--samples", "1", *keys]) == 0
    second = capsys.readouterr()
    assert "tokenizing" not in second.err  # the store exists
    assert second.out.count("-- from token") == 1
    store = first.out.split("prepared in ")[1].strip()
    assert main(["data", "inspect", store]) == 0
    np.arange(1, 200, dtype="<u2").tofile(tmp_path / "raw.bin")
    assert main(["data", "inspect", str(tmp_path / "raw.bin"), *keys]) == 0
    assert "the train text has no separator" in capsys.readouterr().out
    wrong = ["data", "prepare", "demo", "--data.path", "/nowhere", "--data.text_feld", "x"]
    assert main(wrong) == 2
    assert "Did you mean 'data.text_field'" in capsys.readouterr().err
    assert main(["data", "prepare", str(tmp_path / "nothing.jsonl"), *keys]) == 2
    assert "does not exist" in capsys.readouterr().err
