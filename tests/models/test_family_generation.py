"""Greedy generation with weft's key/value cache equals transformers' for every family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.models.family_draws import draw_config
from tests.models.test_families import KINDS, transformers_model
from weft.conversion.hf_import import import_model
from weft.inference.generate import GeneratedSequence, Sampling, generate, load_chat_format
from weft.inference.inference_model import find_checkpoint, load_local_model

OFTEN = ("gpt_oss", "deepseek_v3", "llama4")  # windows and sinks, latent vectors, chunks
MAX_TOKENS = 20


def save_tokenizer(directory: Path, size: int) -> None:
    """Write a tokenizer with a token for every id: weft generates no others."""
    tokenizer = Tokenizer(
        WordLevel({"<|endoftext|>": 0} | {f"t{i}": i for i in range(1, size)}, "t1")
    )
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(directory / "tokenizer.json"))


def weft_tokens(run: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Continue prompts with the most probable tokens; return prompts and continuations."""
    checkpoint = find_checkpoint(run)
    model = load_local_model(checkpoint, torch.device("cpu"))
    chat_format = replace(load_chat_format(checkpoint), end_tokens=frozenset())
    rows = [
        GeneratedSequence("", list(ids), len(ids), torch.Generator().manual_seed(0), "")
        for ids in prompts
    ]
    for _ in generate(model, chat_format, rows, Sampling(temperature=0.0, max_tokens=max_tokens)):
        pass
    return [row.ids for row in rows]


def run_generation(kind: str, tmp_path: Path) -> None:
    """Continue three prompts of different lengths beyond every window of the drawn model."""
    source, run = tmp_path / "source", tmp_path / "run"
    twin = transformers_model(kind, draw_config(kind, 0))
    twin.generation_config.eos_token_id = None
    twin.save_pretrained(source)
    save_tokenizer(source, twin.config.vocab_size)
    import_model(source, run, lambda progress: None, force=True)
    config: Any = find_checkpoint(run).config
    generator = torch.Generator().manual_seed(1)
    lengths = (1, 5, 11)
    prompts = [
        torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in lengths
    ]
    for row, ids in zip(weft_tokens(run, prompts, MAX_TOKENS), prompts, strict=True):
        expected = twin.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            pad_token_id=0,
            # transformers keeps keys that were rotated for shorter sequences.
            use_cache=not config.depends_on_length,
        )
        assert row == expected[0].tolist(), kind


@pytest.mark.parametrize(
    "kind",
    [kind if kind in OFTEN else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)
def test_greedy_generation_equals_transformers(kind: str, tmp_path: Path) -> None:
    run_generation(kind, tmp_path)
