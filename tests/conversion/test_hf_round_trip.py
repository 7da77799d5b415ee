"""A model survives import, training and export: weights, configuration and tokenizer files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.chat import CHATML
from tests.commands import train_in_one_rank
from tests.small import newest_state
from weft.cli.main import main

VOCABULARY = 288  # rows of the embedding table: more than the tokenizer has tokens
MESSAGES = [{"role": "user", "content": "What is 3?"}, {"role": "assistant", "content": "Three."}]
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": [2, 0],
    "pad_token_id": 3,
    "initializer_range": 0.1,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FIELDS = {"llama": {}, "qwen3_moe": EXPERTS | {"router_aux_loss_coef": 0.02}}


def save_model(kind: str, directory: Path) -> None:
    """Write a model in bfloat16 as transformers does, with a tokenizer of several files."""
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        GenerationConfig,
        PreTrainedTokenizerFast,
    )

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([message["content"] for message in MESSAGES] * 20, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
        model_max_length=77,
    )
    assert len(fast) < VOCABULARY
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SHAPE, **FIELDS[kind])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tokens = {name: SHAPE[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.6, top_k=20, **tokens)
    model.save_pretrained(directory)
    fast.save_pretrained(directory)
    tokenizer.model.save(str(directory))  # vocab.json and merges.txt
    (directory / "tokenizer.model").write_bytes(b"\x0a\x00\xff")
    (directory / "added_tokens.json").write_text(json.dumps({"<|im_start|>": 1}))
    (directory / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<|pad|>"}))


TRAIN = {
    "adapters": ["lora", "--model.path", "source", "--data.path", "chat.jsonl"],
    "text": ["runs/imported/job.toml", "--data.path", "text.txt", "--data.text_field", "text"],
}
SHORT = ["--train.steps", "2", "--train.seq_len", "64", "--train.global_batch_size", "2"]
SHORT += ["--train.eval_interval", "0", "--run.device", "cpu"]


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("llama", "adapters"),
        pytest.param("qwen3_moe", "text", marks=pytest.mark.slow),
        pytest.param("llama", "text", marks=pytest.mark.slow),
    ],
)
def test_import_train_and_export_lose_nothing(
    kind: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    monkeypatch.chdir(tmp_path)
    source, out = tmp_path / "source", tmp_path / "out"
    save_model(kind, source)
    talks = [[{"role": "user", "content": f"What is {i}?"}, MESSAGES[1]] for i in range(40)]
    lines = [json.dumps({"messages": talk}) for talk in talks]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    (tmp_path / "text.txt").write_text("What is 3? Three. " * 400)
    run = "runs/imported"
    if how == "text":
        assert main(["import", "source", run]) == 0
    train_in_one_rank([*TRAIN[how], *SHORT, "--run.dir", run], tmp_path)
    assert main(["export", run, "out"]) == 0

    # Every file but config.json and the weights is the same, and none is missing.
    changed = {"config.json", "model.safetensors"}
    assert {path.name for path in out.iterdir()} == {path.name for path in source.iterdir()}
    for path in source.iterdir():
        assert path.name in changed or (out / path.name).read_bytes() == path.read_bytes(), path

    before, after = (load_file(path / "model.safetensors") for path in (source, out))
    assert {n: (t.shape, t.dtype) for n, t in after.items()} == {
        n: (t.shape, torch.bfloat16) for n, t in before.items()
    }
    assert after["model.embed_tokens.weight"].shape[0] == VOCABULARY
    different = {name for name in before if not torch.equal(before[name], after[name])}
    assert different
    if how == "adapters":  # only what they adapt has changed
        assert all("_proj" in name for name in different)

    # transformers reads the same configuration, generation and tokenizer.
    for loader in (AutoConfig, GenerationConfig):
        theirs, ours = (loader.from_pretrained(path).to_dict() for path in (source, out))
        for tree in (theirs, ours):
            tree.pop("_name_or_path", None)
        assert ours == theirs
    known, ours = (AutoTokenizer.from_pretrained(path) for path in (source, out))
    assert len(ours) == len(known)
    assert ours.all_special_tokens == known.all_special_tokens
    assert ours.model_max_length == 77
    prompt = known.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True) == prompt
    assert ours(prompt).input_ids == known(prompt).input_ids
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16


@pytest.mark.slow
def test_loads_of_a_global_router_loss_are_saved_and_not_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_model("qwen3_moe", tmp_path / "source")
    (tmp_path / "text.txt").write_text("What is 3? Three. " * 400)
    loss = ["--model.router_aux_loss_coef", "1", "--model.router_aux_loss_scope", "global"]
    text = ["--model.path", "source", "--data.path", "text.txt", "--data.text_field", "text"]
    assert main(["train", "demo", *text, *SHORT, *loss, "--run.dir", "run"]) == 0
    assert main(["export", "run", "out"]) == 0
    before, after = (
        load_file(path / "model.safetensors") for path in (Path("source"), Path("out"))
    )
    assert before.keys() == after.keys()
    loads = [tensor for name, tensor in newest_state(Path("run")).items() if "excess_load" in name]
    assert loads
    assert all(excess_E.any() for excess_E in loads)


def test_export_dtype_is_that_of_the_import_unless_given(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "source")
    run = str(tmp_path / "run")
    assert main(["import", str(tmp_path / "source"), run]) == 0
    for dtype in ("float16", "float32"):
        assert main(["export", run, str(tmp_path / dtype), "--dtype", dtype]) == 0
        tensors = load_file(tmp_path / dtype / "model.safetensors")
        assert {str(tensor.dtype) for tensor in tensors.values()} == {f"torch.{dtype}"}
        assert json.loads((tmp_path / dtype / "config.json").read_text())["torch_dtype"] == dtype
