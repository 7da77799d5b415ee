from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from xxhash import xxh3_128_hexdigest

from weft.config.errors import InvalidConfig
from weft.data.document_tokens import find_separator
from weft.data.tokenizer import END_OF_TEXT, load_tokenizer, required_vocab_size
from weft.data.tokenizer_training import train_tokenizer

TEXTS = [Path(__file__).read_text(), "Ein Satz, und noch einer. " * 50, "日本語のテキスト " * 20]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 512)


def random_texts() -> list[str]:
    rng = random.Random(0)
    points = [*range(0xD800), *range(0xE000, 0x110000)]
    texts = ["".join(map(chr, rng.choices(points, k=80))) for _ in range(50)]
    texts += ["".join(rng.choices(" \t\r\n\u00a0a1'é_😀", k=60)) for _ in range(200)]
    return [*texts, "", " ", "\r\n\r\n", "don't  stop\n\n  it's 12345", "\0", "\ufeffx"]


def test_tokenizer_round_trip_is_exact(tokenizer: Tokenizer) -> None:
    for text in random_texts():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_train_tokenizer_same_text_gives_the_same_json(tokenizer: Tokenizer) -> None:
    # Use another process, because each process has its own hash seed.
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tests.data.test_tokenizer import TEXTS\n"
        "from weft.data.tokenizer_training import train_tokenizer\n"
        "sys.stdout.buffer.write(train_tokenizer(TEXTS, 512).to_str().encode())\n"
    )
    root = str(Path(__file__).parents[2])
    second_run = subprocess.run([sys.executable, "-c", code, root], capture_output=True, check=True)
    assert second_run.stdout == tokenizer.to_str().encode()
    assert train_tokenizer(TEXTS, 400).to_str() != tokenizer.to_str()


def test_literal_special_token_is_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = f"before {END_OF_TEXT} after{END_OF_TEXT}"
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded, _ = load_tokenizer(tmp_path / "tokenizer.json")
    for item in (tokenizer, loaded):
        separator = find_separator(item, "")
        assert separator == item.token_to_id(END_OF_TEXT)
        ids = item.encode_batch_fast([text], add_special_tokens=False)[0].ids
        assert separator not in ids
        assert item.decode(ids) == text


def test_train_tokenizer_has_the_requested_vocabulary(tokenizer: Tokenizer) -> None:
    assert required_vocab_size(tokenizer) == 512
    assert required_vocab_size(train_tokenizer(["ab"], 512)) == 258


def test_load_tokenizer_returns_the_hash_and_drops_truncation(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    file = tmp_path / "tokenizer.json"
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.enable_truncation(4)
    copy.enable_padding(length=8)
    copy.save(str(file))
    loaded, digest = load_tokenizer(file)
    assert digest == xxh3_128_hexdigest(file.read_bytes())
    assert loaded.encode(TEXTS[1]).ids == tokenizer.encode(TEXTS[1]).ids


@pytest.mark.parametrize("data", [None, b"", b"{}", b"not json", b"\xff\xfe"])
def test_load_broken_tokenizer_is_a_problem(tmp_path: Path, data: bytes | None) -> None:
    file = tmp_path / "tokenizer.json"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(InvalidConfig) as caught:
        load_tokenizer(file)
    [error] = caught.value.errors
    assert (error.key, error.value) == ("data.tokenizer", str(file))
    assert ("does not exist" in error.rule) == (data is None)


def test_separator_must_be_a_special_token() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "<unk>": 2}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens(["<eos>"])  # an added token that text can contain
    with pytest.raises(InvalidConfig, match="no special token") as caught:
        find_separator(tokenizer, "mine.json")
    assert caught.value.errors[0].value == "mine.json"
    tokenizer.add_special_tokens(["<pad>", "[EOS]", "<|end_of_text|>"])
    assert find_separator(tokenizer, "") == tokenizer.token_to_id("<|end_of_text|>")
