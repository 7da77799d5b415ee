"""Token stores of Megatron-LM, llm.c and nanoGPT, byte for byte."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from weft.config.errors import InvalidConfig
from weft.config.schema import DataSection
from weft.data.document_tokens import find_separator
from weft.data.loader import IGNORE_INDEX, build_mixture
from weft.data.prepare import prepare_data, prepare_store
from weft.data.prepared_cache import Progress, open_verified_store
from weft.data.token_store import Store, open_store
from weft.data.tokenizer_training import train_tokenizer

CODES = {"uint8": 1, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    train_tokenizer(["some words to learn from, and some more words"] * 3, 290).save(str(path))
    return path


def separator(tokenizer: Path) -> int:
    from weft.data.tokenizer import load_tokenizer

    return find_separator(load_tokenizer(tokenizer)[0], "")


def documents(count: int, end: int | None, top: int = 280) -> list[list[int]]:
    rng = np.random.default_rng(0)
    result = [rng.integers(1, top, rng.integers(1, 40)).tolist() for _ in range(count)]
    return [item + ([] if end is None else [end]) for item in result]


def write_megatron(
    path: Path, inputs: list[list[int]], dtype: str, sentences: int = 1, shuffled: bool = False
) -> None:
    """Write tokens as Megatron-LM's IndexedDatasetBuilder; ``sentences``: per document."""
    sequences = [p.tolist() for d in inputs for p in np.array_split(np.array(d), sentences)]
    order = list(range(len(sequences)))
    if shuffled:
        order = order[::-1]
    positions, data = {}, b""
    for n in order:
        positions[n] = len(data)
        data += np.array(sequences[n], dtype).tobytes()
    path.with_suffix(".bin").write_bytes(data)
    sizes = np.array([len(s) for s in sequences], "<i4")
    pointers = np.array([positions[n] for n in range(len(sequences))], "<i8")
    firsts = np.arange(0, len(sequences) + 1, sentences, dtype="<i8")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(sizes), len(firsts))
    index = head + sizes.tobytes() + pointers.tobytes() + firsts.tobytes()
    path.with_suffix(".idx").write_bytes(index)


def ignore_progress(progress: Progress) -> None:
    pass


def open_it(path: Path | str, tokenizer: Path, tmp_path: Path, **extra: object) -> Store:
    inputs = {"path": str(path), "tokenizer": str(tokenizer)} | extra
    return prepare_store(DataSection.model_validate(inputs), tmp_path / "c")


def ids(store: Store) -> list[int]:
    """Return the ids of both splits, in the order of the files."""
    streams = [store.tokens("train"), store.tokens("validation")]
    return [i for s in streams for i in s.read_windows(np.array([0]), len(s))[0].tolist()]


def flat(inputs: list[list[int]]) -> list[int]:
    return [i for item in inputs for i in item]


@pytest.mark.parametrize("sentences", [1, 3])
@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_prepare_megatron_tokens_are_used_in_place(
    dtype: str, sentences: int, tokenizer: Path, tmp_path: Path
) -> None:
    inputs = documents(300, separator(tokenizer))
    write_megatron(tmp_path / "m_document", inputs, dtype, sentences)
    for name in ("m_document", "m_document.bin"):
        store = open_it(tmp_path / name, tokenizer, tmp_path)
        assert ids(store) == flat(inputs)
        assert not list(store.path.glob("*.bin"))  # nothing was copied
    manifest = store.manifest
    assert manifest.train.documents + manifest.validation.documents == 300
    assert 0.04 < manifest.validation.tokens / len(flat(inputs)) < 0.06
    assert ids(store)[manifest.train.tokens - 1] == manifest.separator  # cut between documents
    assert open_verified_store(store.path, tmp_path / "c", ignore_progress) == store
    # A copy of the tokens in another directory would have the same content.
    with (tmp_path / "m_document.bin").open("r+b") as file:
        file.write(b"\1")
    with pytest.raises(
        InvalidConfig, match=r"m_document\.bin is damaged.* Restore .*m_document\.bin"
    ):
        open_verified_store(store.path, tmp_path / "c", ignore_progress)
    (tmp_path / "m_document.bin").write_bytes(b"short")
    with pytest.raises(InvalidConfig, match="has 5 bytes"):
        open_store(store.path)


@pytest.mark.parametrize(
    ("dtype", "sentences", "shuffled", "end"),
    [
        ("uint16", 1, False, False),
        ("uint16", 2, False, False),
        ("int64", 1, False, True),
        ("uint16", 2, True, True),
        ("int32", 3, True, False),
        ("uint8", 1, False, False),
    ],
)
def test_prepare_megatron_tokens_are_copied(
    dtype: str,
    sentences: int,
    shuffled: bool,
    end: bool,
    tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weft.data.foreign_tokens.CHUNK_TOKENS", 77)
    last = separator(tokenizer)
    inputs = documents(100, last if end else None, 200)
    write_megatron(tmp_path / "m", inputs, dtype, sentences, shuffled)
    store = open_it(tmp_path / "m.bin", tokenizer, tmp_path)
    assert ids(store) == flat([item if end else [*item, last] for item in inputs])
    assert list(store.path.glob("train-*.bin"))
    assert store.manifest.train.documents + store.manifest.validation.documents == 100
    assert open_it(tmp_path / "m.bin", tokenizer, tmp_path) == store


def write_llm_c(path: Path, tokens: list[int], magic: int = 20240520) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = magic, 1, len(tokens)
    dtype = {20240520: "<u2", 20240801: "<u4"}[magic]
    path.write_bytes(header.tobytes() + np.array(tokens, dtype).tobytes())


@pytest.mark.parametrize("magic", [20240520, 20240801])
def test_prepare_llm_c_tokens_are_read(magic: int, tokenizer: Path, tmp_path: Path) -> None:
    end = separator(tokenizer)
    inputs = flat(
        [[end, *document] for document in documents(200, None)]
    )  # llm.c writes the separator first
    directory = tmp_path / "fineweb"
    directory.mkdir()
    write_llm_c(directory / "x_train_000001.bin", inputs[:2000], magic)
    write_llm_c(directory / "x_train_000002.bin", inputs[2000:], magic)
    write_llm_c(directory / "x_val_000000.bin", inputs[:500], magic)
    store = open_it(directory, tokenizer, tmp_path)
    assert ids(store) == inputs + inputs[:500]
    assert store.manifest.validation.tokens == 500
    store = open_it(directory / "x_train_000001.bin", tokenizer, tmp_path)
    assert ids(store) == inputs[:2000]
    assert 0 < store.manifest.validation.tokens < 250
    globbed = open_it(directory / "*train*.bin", tokenizer, tmp_path)
    assert globbed.manifest.train.tokens + globbed.manifest.validation.tokens == len(inputs)


def test_best_fit_includes_tokens_after_the_last_separator(tokenizer: Path, tmp_path: Path) -> None:
    end = separator(tokenizer)
    inputs = [[end, *document] for document in documents(50, None)]
    for name, part in (("train", inputs), ("val", [[5, 6, 7, 8]])):  # no separator
        write_llm_c(tmp_path / f"{name}.bin", flat(part))
    chosen = {"path": str(tmp_path / "*.bin"), "tokenizer": str(tokenizer), "packing": "best_fit"}
    section = DataSection.model_validate(chosen)
    text = prepare_data(section, tmp_path / "c")
    for split, all_tokens in (("train", flat(inputs)), ("validation", [5, 6, 7, 8])):
        [samples] = build_mixture(text, split, 64, section, 0).sources  # type: ignore[arg-type]
        targets = samples.get_batch(np.arange(len(samples))).targets_BT
        # Every token except the first is a target once: the separator starts a document.
        assert sorted(targets[targets != IGNORE_INDEX].tolist()) == sorted(all_tokens[1:])


def test_prepare_too_few_tokens_are_refused(tokenizer: Path, tmp_path: Path) -> None:
    np.array([1, 2, 3, 4, separator(tokenizer)], "<u2").tofile(tmp_path / "x.bin")
    with pytest.raises(
        InvalidConfig, match=r"too few tokens \(5\): none is left for the validation set"
    ):
        open_it(tmp_path / "x.bin", tokenizer, tmp_path)


def test_loader_nanogpt_tokens_are_read(tokenizer: Path, tmp_path: Path) -> None:
    """The loader reads these tokens like any store, also in a mixture."""
    inputs = flat(documents(200, separator(tokenizer)))
    directory = tmp_path / "shakespeare"
    directory.mkdir()
    for name, part in (("train", inputs), ("val", inputs[:300])):
        np.array(part, "<u2").tofile(directory / f"{name}.bin")
    (directory / "meta.pkl").write_bytes(b"is not read")
    (tmp_path / "words.txt").write_text("some words\n" * 900)
    section = DataSection(
        mixture={str(directory): 1.0, str(tmp_path / "words.txt"): 1.0}, tokenizer=str(tokenizer)
    )
    text = prepare_data(section, tmp_path / "c")
    mixture = build_mixture(text, "train", 16, section, 0)
    rows = mixture.sources[0].get_batch(np.arange(4)).tokens_BT
    assert rows.flatten().tolist() == inputs[:64]
    assert text.sources[0].store.manifest.validation.tokens == 300


def test_prepare_tokens_without_a_tokenizer_are_refused(tokenizer: Path, tmp_path: Path) -> None:
    np.array([1, 2, 289, 300, 5], "<u2").tofile(tmp_path / "x.bin")
    with pytest.raises(InvalidConfig) as caught:
        prepare_store(DataSection(path=str(tmp_path / "x.bin")), tmp_path / "c")
    assert "data.tokenizer" in str(caught.value)
    assert "already holds tokens" in str(caught.value)
    with pytest.raises(InvalidConfig) as caught:
        open_it(tmp_path / "x.bin", tokenizer, tmp_path)
    assert "data.tokenizer" in str(caught.value)
    assert "token 2 of x.bin is 289" in str(caught.value)
    assert not list((tmp_path / "c").glob("stores/*/store.json"))


def test_prepare_malformed_token_files_are_refused(tokenizer: Path, tmp_path: Path) -> None:
    def report(name: str) -> str:
        with pytest.raises(InvalidConfig) as caught:
            open_it(tmp_path / name, tokenizer, tmp_path)
        return str(caught.value)

    (tmp_path / "odd.bin").write_bytes(b"odd")
    assert "an odd number of bytes" in report("odd.bin")
    write_llm_c(tmp_path / "cut.bin", [1, 2, 3, 4])
    (tmp_path / "cut.bin").write_bytes((tmp_path / "cut.bin").read_bytes()[:-2])
    assert "lacks 2 bytes for the 4 tokens" in report("cut.bin")
    write_megatron(tmp_path / "m", documents(10, None), "uint16")
    index = (tmp_path / "m.idx").read_bytes()
    for change, rule in (
        (index[:50], "is truncated"),
        (b"x" + index[1:], "not an index of Megatron-LM"),
        (index[:9] + struct.pack("<Q", 2) + index[17:], "has version 2, not 1"),
        (index[:17] + b"\x07" + index[18:], "unsupported token type 7 (float32)"),
    ):
        (tmp_path / "m.idx").write_bytes(change)
        assert rule in report("m.bin")
    (tmp_path / "m.idx").write_bytes(index)
    (tmp_path / "m.bin").write_bytes((tmp_path / "m.bin").read_bytes()[:-2])
    assert "refers to byte" in report("m.bin")
