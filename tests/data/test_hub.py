"""Datasets of Hugging Face's `datasets`, with a local directory as the hub.

`datasets` streams the directory like a hub; names and commits of the hub are not tested.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.test_documents import decoded, section, texts
from weft.config.errors import InvalidConfig
from weft.data.prepare import prepare_store
from weft.data.source import detect_source, parse_hub_url

datasets = pytest.importorskip("datasets", reason="pip install 'weft[data]'")
datasets.disable_progress_bars()


def test_prepare_dataset_saved_to_disk_has_each_document(tmp_path: Path) -> None:
    inputs = texts(500)
    created = datasets.Dataset.from_dict({"n": range(500), "text": inputs}).shuffle(seed=0)
    created.save_to_disk(tmp_path / "saved", num_shards=3)
    assert detect_source(str(tmp_path / "saved")).kind == "saved"
    store = prepare_store(section(tmp_path / "saved"), tmp_path / "c", shard_bytes=5000)
    assert len(store.manifest.train.shards) > 3
    assert sorted(decoded(store, "train") + decoded(store, "validation")) == sorted(inputs)
    both = datasets.DatasetDict({"train": created, "test": created})
    both.save_to_disk(tmp_path / "both")
    with pytest.raises(InvalidConfig, match="has several splits: test, train") as refused:
        prepare_store(section(tmp_path / "both"), tmp_path / "c")
    [error] = refused.value.errors
    assert error.remedy.endswith(f"data.validation_path, such as {tmp_path / 'both' / 'test'}")
    split = prepare_store(section(tmp_path / "both" / "train"), tmp_path / "c")
    assert sorted(decoded(split, "train")) == sorted(decoded(store, "train"))
    with pytest.raises(InvalidConfig, match=r"has no column 'txt'; did you mean 'text'"):
        prepare_store(section(tmp_path / "saved", text_field="txt"), tmp_path / "c")


@pytest.mark.system
@pytest.mark.parametrize("cores", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_prepare_streamed_dataset_has_each_document(
    cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.data.workers.num_cores", lambda: cores)
    inputs = texts(400)
    directory = tmp_path / "set"
    directory.mkdir()
    for part in range(4):
        rows = {"text": inputs[part::4], "n": list(range(100))}
        datasets.Dataset.from_dict(rows).to_parquet(
            directory / f"train-{part:05d}-of-00004.parquet"
        )
    datasets.Dataset.from_dict({"text": ["x", None, "y"]}).to_parquet(directory / "test.parquet")
    store = prepare_store(section(f"hf://{directory}"), tmp_path / "c", shard_bytes=3000)
    assert sorted(decoded(store, "train") + decoded(store, "validation")) == sorted(inputs)
    files = {shard.file.split("-")[1] for shard in store.manifest.train.shards}
    assert len(files) == 4  # each part separately
    monkeypatch.setattr("weft.data.workers.num_cores", lambda: 1)  # one process is faster here
    test = prepare_store(section(f"hf://{directory}@test"), tmp_path / "c")
    assert test.manifest.empty_documents == 1
    for url, rule in (
        (f"hf://{directory}@nosplit", "cannot be opened: ValueError: Bad split: nosplit"),
        (f"hf://{tmp_path}/nowhere", "cannot be opened"),
    ):
        with pytest.raises(InvalidConfig) as caught:
            prepare_store(section(url), tmp_path / "c")
        assert rule in str(caught.value)
    with pytest.raises(InvalidConfig, match=r"has int64 in the column 'n', not text"):
        prepare_store(section(f"hf://{directory}", text_field="n"), tmp_path / "c")


def test_parse_url_hub_names_are_read_or_refused() -> None:
    for url, parts in (
        ("hf://org/name", ("org/name", None, "train")),
        ("hf://org/name:en", ("org/name", "en", "train")),
        ("hf://org/name:en@test", ("org/name", "en", "test")),
        ("hf://name@test", ("name", None, "test")),
    ):
        assert parse_hub_url(url) == parts
    for url in ("hf://", "hf://:en", "hf://@train", "hf://org/name:", "hf://org/name@"):
        with pytest.raises(InvalidConfig, match="Write it as hf://org/name"):
            parse_hub_url(url)
