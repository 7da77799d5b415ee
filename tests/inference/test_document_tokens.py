"""Tokens that begin and end documents: prompts and end of generation, as in transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, processors

from tests.random_runs import random_run
from weft.config.errors import InvalidConfig
from weft.config.schema import DataSection
from weft.conversion.hf_convert import export_checkpoint
from weft.conversion.hf_import import import_model
from weft.data.document_tokens import (
    RECORD_FILE,
    find_document_tokens,
    format_record,
    load_document_tokens,
)
from weft.data.prepare import prepare_store
from weft.data.prepared_cache import Progress
from weft.data.tokenizer import load_tokenizer, required_vocab_size
from weft.data.tokenizer_training import train_tokenizer
from weft.inference.evaluate import encode_pair
from weft.inference.generate import Sampling, generate, load_chat_format, make_sequences
from weft.inference.inference_model import find_checkpoint, load_local_model

PROMPTS = ["def parse", "x = 1", "some words, and more"]


def ignore_progress(progress: Progress) -> None:
    pass


def make_tokenizer(*special: str) -> Tokenizer:
    """Return a byte-level BPE tokenizer with only these special tokens, ids from 0 on."""
    tokenizer = train_tokenizer(["some words to learn from, and more of them"] * 3, 290)
    tree = json.loads(tokenizer.to_str())
    tree["post_processor"] = None
    first = special[0]
    tree["added_tokens"][0]["content"] = first
    vocab = tree["model"]["vocab"]
    vocab[first] = vocab.pop("<|endoftext|>")
    tokenizer = Tokenizer.from_str(json.dumps(tree))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special[1:]])
    return tokenizer


def template(tokenizer: Tokenizer, single: str) -> Tokenizer:
    names = [piece for piece in single.split() if piece != "$A"]
    pairs = [(name, tokenizer.token_to_id(name)) for name in names]
    parts = [processors.TemplateProcessing(single, special_tokens=pairs)]
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=True), *parts]
    )
    return tokenizer


def write_model_dir(directory: Path, weights: Path, tokenizer: Tokenizer, **files: Any) -> Path:
    """Write a model's directory; ``files``: its JSON files, by name without suffix."""
    directory.mkdir()
    shutil.copy(weights / "model.safetensors", directory)
    tree = json.loads((weights / "config.json").read_text())
    tree = {n: v for n, v in tree.items() if n not in ("eos_token_id", "bos_token_id")}
    tree |= files.pop("config", {})
    (directory / "config.json").write_text(json.dumps(tree))
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny Llama with large random weights, as transformers does."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=required_vocab_size(make_tokenizer("<|stop|>", "<s>")),
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    for name, param in model.named_parameters():
        torch.nn.init.normal_(param, float("norm" in name), 0.3)
    directory = tmp_path_factory.mktemp("weights")
    model.save_pretrained(directory)
    return directory


def generate_tokens(run: Path, prompts: list[str], tokens: int = 12) -> list[list[int]]:
    """Return token ids of prompts and their greedy continuations by weft."""
    checkpoint = find_checkpoint(run)
    model, chat_format = (
        load_local_model(checkpoint, torch.device("cpu")),
        load_chat_format(checkpoint),
    )
    rows = make_sequences(prompts, chat_format, Sampling(max_tokens=tokens, temperature=0))
    for _ in generate(model, chat_format, rows, Sampling(max_tokens=tokens, temperature=0)):
        pass
    return [row.ids for row in rows]


def written_by_theirs(directory: Path, prompts: list[str], tokens: int = 12) -> list[list[int]]:
    """Return the same by transformers, without the end token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    ends = model.generation_config.eos_token_id
    result = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        options = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        generated = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0].tolist()
        results = generated[-1] in (ends if isinstance(ends, list) else [ends])
        result.append(generated[:-1] if results and len(generated) > ids.shape[1] else generated)
    return result


EOS = {"tokenizer_config": {"eos_token": "<|stop|>", "bos_token": "<s>"}}
# The tokens that a tokenizer adds, and files that must not cause additional tokens.
ADDS: dict[str, tuple[str, dict[str, Any]]] = {
    "nothing": ("", EOS),
    "nothing, with a bos in its config": ("", EOS | {"config": {"bos_token_id": 1}}),
    "the beginning": ("<s> $A", EOS),
    "both": ("<s> $A <|stop|>", EOS),
    "nothing, though its class would": (
        "",
        {"tokenizer_config": EOS["tokenizer_config"] | {"add_bos_token": True}},
    ),
    "the beginning, though its class would not": (
        "<s> $A",
        {"tokenizer_config": EOS["tokenizer_config"] | {"add_bos_token": False}},
    ),
}


@pytest.mark.parametrize("kind", ADDS)
def test_generate_imported_model_equals_transformers(
    kind: str, weights: Path, tmp_path: Path
) -> None:
    single, files = ADDS[kind]
    tokenizer = make_tokenizer("<|stop|>", "<s>")
    if single:
        template(tokenizer, single)
    directory = write_model_dir(tmp_path / "hf", weights, tokenizer, **files)
    import_model(directory, tmp_path / "run", ignore_progress)
    theirs = written_by_theirs(directory, PROMPTS)
    assert generate_tokens(tmp_path / "run", PROMPTS) == theirs
    # The exported model gives the same.
    export_checkpoint(tmp_path / "run", tmp_path / "out", "float32", "5GB", ignore_progress)
    assert written_by_theirs(tmp_path / "out", PROMPTS) == theirs
    # Requests of multiple choice begin with the same tokens.
    chat_format = load_chat_format(find_checkpoint(tmp_path / "run"))
    context, answer = encode_pair(chat_format, "x = 1", " and")
    assert context == tokenizer.encode("x = 1").ids
    assert context + answer == tokenizer.encode("x = 1 and").ids or single.endswith("<|stop|>")


def test_generate_ends_at_any_of_the_end_tokens(weights: Path, tmp_path: Path) -> None:
    tokenizer = make_tokenizer("<|stop|>", "<s>")
    plain = write_model_dir(tmp_path / "plain", weights, tokenizer, **EOS)
    import_model(plain, tmp_path / "first", ignore_progress)
    free = generate_tokens(tmp_path / "first", ["x = 1"])[0]
    begun = len(tokenizer.encode("x = 1").ids)
    chosen = [free[begun + 7], free[begun + 4]]
    for position, ends in enumerate(([0, *chosen], chosen[0])):
        files = {"generation_config": {"eos_token_id": ends}, "config": {"eos_token_id": 0}}
        directory = write_model_dir(tmp_path / f"hf{position}", weights, tokenizer, **EOS, **files)
        run, out = tmp_path / f"run{position}", tmp_path / f"out{position}"
        import_model(directory, run, ignore_progress)
        [ids] = generate_tokens(run, ["x = 1"])
        assert begun < len(ids) < len(free)
        assert [ids] == written_by_theirs(directory, ["x = 1"])
        export_checkpoint(run, out, "float32", "5GB", ignore_progress)
        text = json.loads((out / "generation_config.json").read_text())
        assert text["eos_token_id"] == ends
        assert json.loads((out / "config.json").read_text())["eos_token_id"] == 0


def test_generate_run_of_text_starts_documents_as_in_training(
    store_path: Path, tmp_path: Path
) -> None:
    """This also holds if the tokenizer adds other tokens, and for the exported model."""
    run = random_run(tmp_path / "run", store_path)
    tokenizer, _ = load_tokenizer(run / "tokenizer.json")
    other = template(
        Tokenizer.from_str(tokenizer.to_str()), "<|endoftext|> <|endoftext|> $A <|endoftext|>"
    )
    for name, changed in (("own", tokenizer), ("other", other)):
        changed.save(str(run / "tokenizer.json"))
        (run / RECORD_FILE).write_text(format_record(0, [0]))
        ids = generate_tokens(run, PROMPTS)
        plain = [tokenizer.encode(p, add_special_tokens=False).ids for p in PROMPTS]
        assert [row[: len(p) + 1] for row, p in zip(ids, plain, strict=True)] == [
            [0, *p] for p in plain
        ]
        export_checkpoint(run, tmp_path / name, "float32", "5GB", ignore_progress)
        assert written_by_theirs(tmp_path / name, PROMPTS) == ids
    same = (tmp_path / "own" / "tokenizer.json").read_bytes()
    assert same == (store_path / "tokenizer.json").read_bytes() or b'"start"' in same
    # A run whose documents began with no token.
    (run / RECORD_FILE).write_text(format_record(0, []))
    tree = json.loads(tokenizer.to_str()) | {"post_processor": None}
    (run / "tokenizer.json").write_text(json.dumps(tree))
    assert generate_tokens(run, ["x"])[0][0] != 0


# --------------------------------------------------------------------------- end tokens

SPECIAL = ("<|stop|>", "<|end|>", "</s>")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer(*SPECIAL)


def write_beside(tokenizer: Tokenizer, directory: Path, files: dict[str, Any]) -> Path:
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / f"{name}.json").write_text(text)
    return directory / "tokenizer.json"


@pytest.mark.parametrize(
    ("files", "separator", "ends"),
    [
        ({}, 2, {2}),  # the only well-known name
        ({"generation_config": {"eos_token_id": 0}}, 0, {0}),
        ({"config": {"eos_token_id": [1, 0]}}, 1, {0, 1}),
        ({"config": {"eos_token_id": [1, 2]}}, 2, {1, 2}),  # the well-known token is the separator
        ({"tokenizer_config": {"eos_token": "<|stop|>"}}, 0, {0}),
        ({"tokenizer_config": {"eos_token": {"content": "<|end|>"}}}, 1, {1}),
        ({"special_tokens_map": {"eos_token": "<|stop|>"}}, 0, {0}),
        (
            {"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": 1}},
            1,
            {1},
        ),
        (
            {"tokenizer_config": {"eos_token": None}, "special_tokens_map": {"eos_token": "</s>"}},
            2,
            {2},
        ),
    ],
)
def test_find_document_tokens_first_file_decides(
    files: dict[str, Any],
    separator: int,
    ends: set[int],
    tokenizer: Tokenizer,
    tmp_path: Path,
) -> None:
    names = [tokenizer.token_to_id(name) for name in SPECIAL]
    numbered = json.loads(json.dumps(files))
    for content in numbered.values():
        value = content.get("eos_token_id")
        if value is not None:
            many = [names[n] for n in value] if isinstance(value, list) else names[value]
            content["eos_token_id"] = many
    result = load_document_tokens(tokenizer, write_beside(tokenizer, tmp_path, numbered))
    assert result.separator == names[separator]
    assert result.end_tokens == {names[n] for n in ends}
    assert result.note == ""


def test_find_document_tokens_contradiction_is_in_the_note(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    files = {
        "generation_config": {"eos_token_id": 5},  # an ordinary token is not a separator
        "tokenizer_config": {"eos_token": "<|stop|>"},
    }
    result = load_document_tokens(tokenizer, write_beside(tokenizer, tmp_path, files))
    stop = tokenizer.token_to_id("<|stop|>")
    assert (result.separator, result.end_tokens) == (stop, {5, stop})
    assert 'tokenizer_config.json names "<|stop|>"' in result.note


@pytest.mark.parametrize(
    ("files", "rule"),
    [
        ({"config": {"eos_token_id": 5000}}, 'config.json eos_token_id="5000" is not a token'),
        ({"config": {"eos_token_id": -1}}, "is not a token of the tokenizer.json"),
        ({"config": {"eos_token_id": 1 << 70}}, "is not a token of the tokenizer.json"),
        ({"config": {"eos_token_id": True}}, "is not a token of the tokenizer.json"),
        ({"config": {"eos_token_id": "<|stop|>"}}, "is not a token of the tokenizer.json"),
        ({"config": {"eos_token_id": [0, None]}}, "is not a token of the tokenizer.json"),
        ({"generation_config": {"eos_token_id": 2.0}}, "generation_config.json eos_token_id"),
        ({"tokenizer_config": {"eos_token": "<|none|>"}}, "tokenizer_config.json eos_token"),
        ({"tokenizer_config": {"eos_token": {"text": 1}}}, "is not a token of the tokenizer.json"),
        ({"special_tokens_map": "[]"}, "special_tokens_map.json"),
        ({"config": "{"}, "config.json"),
        ({"config": "[" * 100_000}, "config.json"),
        ({"document_tokens": {"separator": 9999, "starts_documents": True}}, "not written by weft"),
        ({"document_tokens": {"separator": 1}}, "not written by weft"),
    ],
)
def test_find_document_tokens_bad_value_is_named(
    files: dict[str, Any], rule: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = write_beside(tokenizer, tmp_path, files)
    with pytest.raises(InvalidConfig) as caught:
        load_document_tokens(tokenizer, path)
    assert rule in str(caught.value)


def test_find_document_tokens_absence_is_named(tmp_path: Path) -> None:
    nameless = make_tokenizer("<|stop|>")
    with pytest.raises(
        InvalidConfig, match=r'Set "eos_token": "\.\.\." in a tokenizer_config.json'
    ):
        find_document_tokens(nameless, [], "t.json")
    path = write_beside(nameless, tmp_path, {"config": {"eos_token_id": 5}})
    with pytest.raises(InvalidConfig, match=r"config\.json names .*, which is not special"):
        load_document_tokens(nameless, path)


def test_prepare_given_tokenizer_separates_by_the_files_beside_it(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for index in range(30):
        (text / f"{index}.txt").write_text(f"text number {index}, of some words\n" * 10)
    tokenizer = make_tokenizer("<|stop|>", "</s>")
    (tmp_path / "model").mkdir()
    path = write_beside(
        tokenizer, tmp_path / "model", {"tokenizer_config": {"eos_token": "<|stop|>"}}
    )
    section = DataSection(path=str(text), tokenizer=str(path))
    store = prepare_store(section, tmp_path / "cache")
    assert store.manifest.separator == tokenizer.token_to_id("<|stop|>")
    # The store records the separator beside its tokenizer.
    assert load_document_tokens(tokenizer, store.path / "tokenizer.json").separator == (
        store.manifest.separator
    )
    # Another end token gives another store.
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    other = prepare_store(section, tmp_path / "cache")
    assert other.manifest.separator == tokenizer.token_to_id("</s>")
    assert other.path != store.path
