"""End tokens, templates and configurations of models, from their import to their export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from tests.chat import CHATML, LLAMA, MARKED, MISTRAL, TURNS, write_lines
from tests.chat import make_tokenizer as make_chat_tokenizer
from weft.config.schema import DataSection
from weft.conversion.hf_convert import export_checkpoint
from weft.conversion.hf_import import import_model
from weft.data.inspect import summarize_dataset
from weft.data.prepare import prepare_data
from weft.data.token_store import TEMPLATE_FILE
from weft.data.tokenizer_training import train_tokenizer
from weft.inference.generate import Sampling, generate, load_chat_format, make_sequences
from weft.inference.inference_model import find_checkpoint, load_local_model

# As GLM-4.5: nothing follows an answer; the model is to emit the next role.
ENDLESS = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}
{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""


def make_tokenizer() -> Tokenizer:
    """Return a tokenizer like Qwen's, which adds nothing to a text."""
    tree = json.loads(train_tokenizer(["some words, and more of them"] * 3, 290).to_str())
    tokenizer = Tokenizer.from_str(json.dumps(tree | {"post_processor": None}))
    names = ("<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    return tokenizer


def write_base(directory: Path, template: str = CHATML) -> Path:
    """Write a base model like Qwen's, whose files name only the end of a text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    end = tokenizer.token_to_id("<|endoftext|>")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
    )
    model = LlamaForCausalLM(config)
    for name, param in model.named_parameters():
        torch.nn.init.normal_(param, float("norm" in name), 0.3)
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "chat_template": template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    generation = {"eos_token_id": end, "max_new_tokens": 2048}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def answer(run: Path) -> tuple[list[int], list[int], str]:
    """Return a prompt, a greedy answer by weft, and how it ended."""
    checkpoint = find_checkpoint(run)
    chat_format = load_chat_format(checkpoint, "auto")
    sampling = Sampling(max_tokens=30, temperature=0)
    model = load_local_model(checkpoint, torch.device("cpu"))
    [sequence] = make_sequences(["words"], chat_format, sampling)
    for _ in generate(model, chat_format, [sequence], sampling):
        pass
    begin = sequence.prompt_length
    return sequence.ids[:begin], sequence.ids[begin:], sequence.finish_reason


def swap_rows(directory: Path, first: int, second: int) -> None:
    """Make a model emit one token for another."""
    weights = load_file(directory / "model.safetensors")
    head = weights["lm_head.weight"]
    head[[first, second]] = head[[second, first]]
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def answer_by_theirs(directory: Path) -> list[int]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "words"}], add_generation_prompt=True, return_tensors="pt"
    )
    ids: list[int] = model.generate(**prompt, max_new_tokens=30, do_sample=False)[0].tolist()
    return ids


def test_export_tuned_base_stops_where_chat_does(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    import_model(base, tmp_path / "free", lambda _: None)
    (tmp_path / "free" / TEMPLATE_FILE).write_text(CHATML)
    _, free, _ = answer(tmp_path / "free")
    end = make_tokenizer().token_to_id("<|im_end|>")
    fifth = next(t for n, t in enumerate(free) if n >= 4 and t not in free[:n])
    swap_rows(base, fifth, end)
    run = tmp_path / "run"
    import_model(base, run, lambda _: None)
    (run / TEMPLATE_FILE).write_text(CHATML)  # as training writes it
    prompt, ours, finish = answer(run)
    assert finish == "end"
    assert ours == free[: free.index(fifth)]
    export_checkpoint(run, tmp_path / "out", "float32", "5GB", lambda _: None)
    assert answer_by_theirs(tmp_path / "out") == [*prompt, *ours, end]
    trees = {
        name: json.loads((tmp_path / "out" / f"{name}.json").read_text())
        for name in ("config", "generation_config", "tokenizer_config")
    }
    old = make_tokenizer().token_to_id("<|endoftext|>")
    assert trees["config"]["eos_token_id"] == trees["generation_config"]["eos_token_id"]
    assert trees["config"]["eos_token_id"] == [old, end]
    assert trees["generation_config"]["max_new_tokens"] == 2048
    assert trees["tokenizer_config"]["eos_token"] == "<|im_end|>"
    # The export is read again with the same tokens.
    import_model(tmp_path / "out", tmp_path / "again", lambda _: None)
    ends = load_chat_format(find_checkpoint(tmp_path / "again")).end_tokens
    assert ends == {old, end}
    # An import that was not trained is exported as it was.
    shutil.rmtree(tmp_path / "out")
    (run / TEMPLATE_FILE).unlink()
    export_checkpoint(run, tmp_path / "out", "float32", "5GB", lambda _: None)
    for name in ("generation_config.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()


def test_named_template_is_imported_used_and_exported(tmp_path: Path) -> None:
    """As current transformers saves templates by name."""
    base = write_base(tmp_path / "base")
    name = "additional_chat_templates/tool_use.jinja"
    (base / name).parent.mkdir()
    (base / name).write_text("tools " + CHATML)
    import_model(base, tmp_path / "run", lambda _: None)
    chat_format = load_chat_format(find_checkpoint(tmp_path / "run"), "auto")
    assert chat_format.encoder is not None
    assert chat_format.encoder.template.sources.keys() == {"default", "tool_use"}
    export_checkpoint(tmp_path / "run", tmp_path / "out", "float32", "5GB", lambda _: None)
    assert (tmp_path / "out" / name).read_text() == "tools " + CHATML


@pytest.mark.parametrize(
    ("template", "config", "endless"),
    [
        *((template, {}, 0) for template in (LLAMA, CHATML, MARKED, MISTRAL)),
        (ENDLESS, {}, 4),
        # Plain text for this tokenizer.
        (CHATML.replace("<|im_end|>", "<|end|>"), {}, 4),
    ],
)
def test_prepare_answers_without_an_end_token_are_noted(
    template: str, config: dict[str, Any], endless: int, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    make_chat_tokenizer().save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | config))
    lines = [{"messages": TURNS}, {"messages": TURNS[:2]}, {"messages": TURNS[2:]}]
    data = write_lines(tmp_path / "chat.jsonl", lines)
    section = DataSection(
        path=str(data), tokenizer=str(directory / "tokenizer.json"), format="chat"
    )
    dataset = prepare_data(section, tmp_path / "cache")
    notes = dataset.sources[0].store.manifest.notes
    assert len(notes) == bool(endless)
    if endless:
        assert f"{endless} of 4 trained answers do not end in a token" in notes[0]
        assert 'stops ("</s>")' in notes[0]
        assert notes[0] in "\n".join(summarize_dataset(dataset))


@pytest.mark.parametrize("value", ["Infinity", "-Infinity", "NaN"])
def test_config_with_a_constant_of_python_is_imported(value: str, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    config = json.loads((base / "config.json").read_text()) | {"initializer_range": float(value)}
    (base / "config.json").write_text(json.dumps(config))
    assert value in (base / "config.json").read_text()
    import_model(base, tmp_path / "run", lambda _: None)
    export_checkpoint(tmp_path / "run", tmp_path / "out", "float32", "5GB", lambda _: None)
    assert (tmp_path / "out/config.json").is_file()
