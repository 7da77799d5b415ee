"""A validation set of its own (``data.validation_path``), or none (``validation_fraction=0``)."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chat import CHATML
from tests.chat import write_tokenizer as write_chat_tokenizer
from weft.cli.main import main
from weft.config.errors import InvalidConfig
from weft.config.reader import read_job
from weft.config.schema import DataSection
from weft.data.dataset import Dataset
from weft.data.loader import build_mixture, evaluation_batches
from weft.data.prepare import prepare_data
from weft.data.token_store import Store
from weft.data.tokenizer_training import train_tokenizer
from weft.records.run_reader import RunReader

WORDS = ["fox", "key", "river", "stone", "moon", "cloud", "tree", "bread", "house", "night"]


def write_rows(path: Path, seed: int, count: int, chat: bool = False) -> list[str]:
    """Write documents or conversations of random words; return their texts."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=30)) + f" {seed}-{n}." for n in range(count)]
    rows: list[dict[str, Any]] = [
        {"prompt": text[:20], "response": text[20:]} if chat else {"text": text} for text in texts
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return texts


def section(tmp_path: Path, path: str, **changes: Any) -> DataSection:
    keys = {"path": str(tmp_path / path), "vocab_size": 300, **changes}
    if keys.get("validation_path"):
        keys["validation_path"] = str(tmp_path / str(keys["validation_path"]))
    return DataSection(**keys)


def write_tokenizer(directory: Path) -> Path:
    train_tokenizer([" ".join(WORDS)] * 3, 300).save(str(directory / "tokenizer.json"))
    return directory / "tokenizer.json"


def prepare(tmp_path: Path, path: str, **changes: Any) -> Dataset:
    return prepare_data(section(tmp_path, path, **changes), tmp_path / "cache")


def texts_of(store: Store, split: Any = "train") -> list[str]:
    stream = store.tokens(split)
    [tokens] = stream.read_windows(np.array([0]), len(stream))
    text = store.tokenizer().decode(tokens.tolist(), skip_special_tokens=False)
    return text.split(store.tokenizer().id_to_token(store.manifest.separator))[:-1]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    write_rows(tmp_path / "train.jsonl", 1, 50)
    write_rows(tmp_path / "val.jsonl", 2, 7)
    return tmp_path


def test_validation_path_of_rows_is_the_validation_set_and_all_else_is_trained(rows: Path) -> None:
    dataset = prepare(rows, "train.jsonl", validation_path="val.jsonl")
    [source] = dataset.sources
    assert source.store.manifest.train.documents == 50
    assert source.store.manifest.validation.documents == 0
    assert dataset.validation is not None
    assert dataset.has_validation
    wanted = [json.loads(line)["text"] for line in (rows / "val.jsonl").open()]
    assert texts_of(dataset.validation.store) == wanted
    assert dataset.notes == ()
    # The tokenizer is trained on the training data alone.
    alone = prepare(rows, "train.jsonl", validation_fraction=0.0)
    assert alone.fingerprint == dataset.fingerprint
    assert not alone.has_validation
    other = prepare(rows, "train.jsonl", validation_path="train.jsonl")
    assert other.fingerprint == dataset.fingerprint  # a resumed run may have another one


def test_validation_path_with_rows_of_the_training_data_counts_them(rows: Path) -> None:
    lines = (rows / "train.jsonl").read_text().splitlines()
    (rows / "val.jsonl").write_text("\n".join([*lines[:3], '{"text": "new"}']) + "\n")
    [note] = prepare(rows, "train.jsonl", validation_path="val.jsonl").notes
    assert note.startswith("3 of 4 documents of data.validation_path are also training data")
    [again] = prepare(rows, "train.jsonl", validation_path="val.jsonl").notes
    assert again == note


@pytest.mark.parametrize("form", ["text", "parquet", "arrow", "tokens", "store", "directory"])
def test_validation_path_of_each_form_has_all_of_its_documents(rows: Path, form: str) -> None:
    texts = write_rows(rows / "val.jsonl", 3, 4)
    tokenizer = write_tokenizer(rows)
    changes: dict[str, Any] = {"tokenizer": str(tokenizer)}
    name = f"val.{form}"
    if form == "text":
        (rows / name).write_text(texts[0])
        texts = texts[:1]
    elif form in ("parquet", "arrow"):
        pa = pytest.importorskip("pyarrow")
        table = pa.table({"text": texts})
        if form == "parquet":
            pytest.importorskip("pyarrow.parquet").write_table(table, rows / name)
        else:
            pytest.importorskip("pyarrow.feather").write_feather(table, str(rows / name))
    elif form == "directory":
        (rows / name).mkdir()
        (rows / "val.jsonl").rename(rows / name / "a.jsonl")
    else:
        store = prepare(rows, "val.jsonl", validation_fraction=0.0, **changes).sources[0].store
        if form == "store":
            name = str(store.path)
        else:
            name = "val.bin"
            stream = store.tokens("train")
            stream.read_windows(np.array([0]), len(stream))[0].astype("<u2").tofile(rows / name)
    dataset = prepare(rows, "train.jsonl", validation_path=name, **changes)
    assert dataset.validation is not None
    assert [text.strip() for text in texts_of(dataset.validation.store)] == texts


def test_validation_path_of_a_mixture_is_one_set(rows: Path) -> None:
    write_rows(rows / "more.jsonl", 4, 40)
    mixture = {str(rows / "train.jsonl"): 3.0, str(rows / "more.jsonl"): 1.0}
    dataset = prepare(rows, "train.jsonl", mixture=mixture, validation_path="val.jsonl")
    assert [s.store.manifest.validation.documents for s in dataset.sources] == [0, 0]
    assert dataset.shares == {"train": 0.75, "more": 0.25}
    validation = build_mixture(dataset, "validation", 16, DataSection(), seed=0)
    assert len(validation.sources) == 1
    batches = list(evaluation_batches(validation, 64, 0, 1, 8))
    assert sum(int((b.targets_BT >= 0).sum()) for b in batches) >= 7 * 20
    assert all(b.sources_B is None for b in batches)


def test_validation_path_smaller_than_a_batch_is_padded(rows: Path) -> None:
    (rows / "tiny.txt").write_text("a fox")
    dataset = prepare(rows, "train.jsonl", validation_path="tiny.txt")
    validation = build_mixture(dataset, "validation", 64, DataSection(), seed=0)
    targets = [
        [int((b.targets_BT >= 0).sum()) for b in evaluation_batches(validation, 64, rank, 4, 8)]
        for rank in range(4)
    ]
    assert len({len(each) for each in targets}) == 1
    assert sum(map(sum, targets)) > 0


@pytest.mark.parametrize("chat", [False, True])
def test_validation_fraction_of_zero_trains_all(rows: Path, chat: bool) -> None:
    write_rows(rows / "train.jsonl", 1, 1 if chat else 3, chat)
    changes: dict[str, Any] = {}
    if chat:
        changes = {"format": "chat", "tokenizer": str(write_chat_tokenizer(rows, CHATML))}
    dataset = prepare(rows, "train.jsonl", validation_fraction=0.0, **changes)
    assert dataset.sources[0].store.manifest.train.documents == (1 if chat else 3)
    assert not dataset.has_validation


def test_validation_path_that_is_a_split_store_is_refused(rows: Path) -> None:
    changes = {"tokenizer": str(write_tokenizer(rows))}
    store = prepare(rows, "train.jsonl", **changes).sources[0].store
    with pytest.raises(InvalidConfig) as refusal:
        prepare(rows, "val.jsonl", validation_path=str(store.path), **changes)
    [error] = [e for e in refusal.value.errors if e.key == "data.validation_path"]
    assert "data.validation_fraction=0" in error.remedy


def test_data_path_that_is_a_split_store_leaves_its_validation_set_out(rows: Path) -> None:
    store = prepare(rows, "train.jsonl").sources[0].store
    said: list[str] = []
    keys = section(rows, str(store.path), validation_path="val.jsonl")
    dataset = prepare_data(keys, rows / "cache", lambda progress: said.append(progress.message))
    assert dataset.sources[0].store.fingerprint == store.fingerprint
    assert dataset.validation is not None
    assert dataset.validation.store.manifest.train.documents == 7
    assert any("is not used: neither trained nor evaluated" in message for message in said)


def test_token_files_of_validation_are_not_trained_by_a_fraction_of_zero(rows: Path) -> None:
    (rows / "tokens").mkdir()
    for name in ("train.bin", "val.bin"):
        np.arange(1, 60, dtype="<u2").tofile(rows / "tokens" / name)
    with pytest.raises(InvalidConfig, match=r"val\.bin"):
        prepare(rows, "tokens", validation_fraction=0.0, tokenizer=str(write_tokenizer(rows)))


def test_errors_of_validation_path_name_it(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*more: str) -> str:
        words = ["train", "demo", "--run.dir", str(rows / "run"), "--run.device", "cpu", *more]
        assert main(words) == 2
        return capsys.readouterr().err

    path = str(rows / "train.jsonl")
    output = refuse("--data.path", path, "--data.validation_path", str(rows / "missing"))
    assert "data.validation_path" in output
    assert "does not exist" in output
    output = refuse("--data.path", path, "--data.validation_path", path)
    assert "is also training data" in output
    (rows / "bad.jsonl").write_text('{"title": "no text"}\n')
    output = refuse("--data.path", path, "--data.validation_path", str(rows / "bad.jsonl"))
    assert "data.validation_path" in output
    assert "bad.jsonl, line 1" in output


def test_validation_path_in_a_moved_run_is_relative(tmp_path: Path) -> None:
    from weft.config.run_paths import portable
    from weft.config.schema import replace

    job, _, _ = read_job("demo")
    job = replace(job, data={"validation_path": str(tmp_path / "val.jsonl")})
    assert portable(job, tmp_path).data.validation_path == "./val.jsonl"


@pytest.mark.slow
@pytest.mark.system
def test_run_evaluates_on_validation_path_and_resumes_with_another(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(rows / "other.jsonl", 5, 9)

    def train(steps: int, *more: str) -> str:
        words = ["train", "demo", "--run.dir", str(rows / "run"), "--run.device", "cpu"]
        words += ["--data.path", str(rows / "train.jsonl"), "--data.vocab_size", "300"]
        words += [
            "--train.seq_len",
            "16",
            "--train.global_batch_size",
            "2",
            "--model.num_layers",
            "1",
        ]
        words += ["--run.nproc_per_node", "1", "--data.cache_dir", str(rows / "cache")]
        words += ["--train.eval_interval", "1", "--monitor.report", "false"]
        assert main([*words, "--train.steps", str(steps), *more]) == 0
        return capsys.readouterr().out

    output = train(1, "--data.validation_path", str(rows / "val.jsonl"))
    assert "validation set val.jsonl: " in output
    assert main(["evaluate", str(rows / "run"), "--json"]) == 0
    [loss] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert loss["name"] == str(rows / "val.jsonl")
    run = RunReader(rows / "run")
    assert loss["nats_per_token"] == pytest.approx(run.last("eval_loss"), abs=2e-4)

    output = train(2, "--data.validation_path", str(rows / "other.jsonl"))
    assert "validation set other.jsonl: " in output
    assert np.isfinite(RunReader(rows / "run").column("eval_loss")).sum() == 2

    output = train(3, "--data.validation_path", "", "--data.validation_fraction", "0")
    assert "no validation set (data.validation_fraction=0): nothing is evaluated" in output
    assert np.isfinite(RunReader(rows / "run").column("eval_loss")).sum() == 2
    assert main(["evaluate", str(rows / "run")]) == 1
    assert "Name data to evaluate: --data.path" in capsys.readouterr().err
    assert main(["evaluate", str(rows / "run"), "--data.path", str(rows / "val.jsonl")]) == 0
