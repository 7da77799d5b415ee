"""Encoding of text into token shards, and the shards that an interrupted run can reuse."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from weft.config.errors import InvalidConfig
from weft.data import token_shards as shards
from weft.data.token_shards import (
    Encoder,
    TextChunk,
    encode_chunks,
    entropy_nats,
    load_encoder,
    load_finished_shard,
    write_shard,
)
from weft.data.tokenizer_training import train_tokenizer


@pytest.fixture
def encoder(tmp_path: Path) -> Encoder:
    train_tokenizer(["some words, and some more words"], 270).save(str(tmp_path / "t.json"))
    return load_encoder(tmp_path / "t.json")


@pytest.mark.parametrize("batch_bytes", [1, 10, 1 << 20])
def test_encode_in_batches_changes_no_token(
    batch_bytes: int, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "BATCH_BYTES", batch_bytes)
    counts: list[int] = []
    texts = [f"{number} some words" for number in range(9)]
    chunks = [
        TextChunk(text, len(text), number % 3 == 2, number % 2) for number, text in enumerate(texts)
    ]
    encoded = list(encode_chunks(chunks, encoder, counts.append))
    assert sum(counts) == sum(map(len, texts))
    for chunk, (shard, tokens) in zip(chunks, encoded, strict=True):
        ids = encoder.tokenizer.encode(chunk.text, add_special_tokens=False).ids
        assert shard == chunk.shard
        assert tokens.tolist() == ids + [encoder.separator] * chunk.ends_document
        assert tokens.dtype == encoder.dtype


def test_encode_text_unknown_to_the_tokenizer_is_a_problem(encoder: Encoder) -> None:
    words = Tokenizer(models.WordLevel({"some": 0}, unk_token="[UNK]"))
    chunks = [TextChunk("other", 5, True)]
    with pytest.raises(InvalidConfig, match=r"data\.tokenizer=.*cannot encode the text"):
        list(encode_chunks(chunks, encoder._replace(tokenizer=words), lambda size: None))


def test_finished_shard_incomplete_or_of_another_tokenizer_is_none(
    encoder: Encoder, tmp_path: Path
) -> None:
    file = tmp_path / "train-00000.bin"
    assert load_finished_shard(file, encoder) is None
    shard = write_shard(file, np.arange(5, dtype=encoder.dtype), encoder)
    assert load_finished_shard(file, encoder) == shard
    assert (shard.tokens, shard.size_bytes) == (5, 10)
    assert load_finished_shard(file, encoder._replace(hash="another")) is None
    file.write_bytes(file.read_bytes()[:-2])
    assert load_finished_shard(file, encoder) is None
    write_shard(file, np.arange(5, dtype=encoder.dtype), encoder)
    entry = file.with_suffix(".json")
    entry.write_text(json.dumps(json.loads(entry.read_text()) | {"tokens": 4}))
    assert load_finished_shard(file, encoder) is None


def test_unigram_entropy_is_right() -> None:
    assert entropy_nats(np.array([3, 0, 3])) == pytest.approx(math.log(2))
    assert entropy_nats(np.array([7])) == 0.0
