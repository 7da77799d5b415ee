"""Import a model of transformers, fine-tune it and export it, by commands only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import pages
from tests.pages import CAPITALS, HUB_MODELS, build_tokenizer, tiny_model
from tests.small import losses

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"]


def conversation(number: int, country: str) -> list[dict[str, str]]:
    """Return a numbered question and its answer, which depends on the country only."""
    return [
        {"role": "user", "content": f"Question {number}: the capital of {country}?"},
        {"role": "assistant", "content": CAPITALS[country]},
    ]


def questions() -> list[list[dict[str, str]]]:
    return [conversation(n, country) for n in range(12) for country in CAPITALS]


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny Llama of transformers to ``theirs``, and ``chat.jsonl`` to train on."""
    pytest.importorskip("peft", reason="the library of adapters is not installed")
    directory = tmp_path_factory.mktemp("tuning")
    chats = questions()
    lines = [json.dumps({"messages": chat}) for chat in chats]
    (directory / "chat.jsonl").write_text("".join(line + "\n" for line in lines), "utf-8")

    texts = (message["content"] for chat in chats for message in chat)
    tokenizer = build_tokenizer(texts, SPECIAL, "<|end|>", TEMPLATE)
    tokenizer.save_pretrained(directory / "theirs")
    model = tiny_model("Llama", tokenizer, max_position_embeddings=128, initializer_range=0.1)
    with torch.no_grad():  # LoRA does not train the head, whose logits would stay small
        model.lm_head.weight *= 4
    model.save_pretrained(directory / "theirs")
    return directory


def weft(work_dir: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "weft", *arguments]
    completed = subprocess.run(command, cwd=work_dir, capture_output=True, text=True, timeout=300)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_fine_tuning_imported_model_learns_answers(work_dir: Path) -> None:
    """Import, train LoRA on 2 x 2 ranks, export, and generate with transformers and peft."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weft(work_dir, "import", "theirs", "run")
    # fmt: off
    weft(
        work_dir, "train", "run/job.toml", "--data.format", "chat", "--data.path", "chat.jsonl",
        "--data.cache_dir", "cache", "--train.seq_len", "96", "--train.global_batch_size", "8",
        "--train.steps", "120", "--lora.rank", "16", "--lora.alpha", "32", "--optim.lr", "0.01",
        "--optim.warmup_steps", "10", "--optim.weight_decay", "0", "--run.nproc_per_node", "4",
        "--parallel.dp_shard", "2", "--parallel.tp", "2", "--monitor.trackers", "",
        "--monitor.report", "false",
    )
    # fmt: on
    result = losses(work_dir / "run")
    assert result[-1] < 0.05 < 1 < result[0]
    weft(work_dir, "export", "run", "adapter", "--adapter")
    weft(work_dir, "export", "run", "merged")

    tokenizer: Any = AutoTokenizer.from_pretrained(work_dir / "theirs")
    base = AutoModelForCausalLM.from_pretrained(work_dir / "theirs", dtype=torch.float32)
    tuned: Any = PeftModel.from_pretrained(base, str(work_dir / "adapter")).eval()
    merged = AutoModelForCausalLM.from_pretrained(work_dir / "merged", dtype=torch.float32).eval()
    for chat in questions():
        prompt_ids = tokenizer.apply_chat_template(
            chat[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            out = tuned.generate(**prompt_ids, max_new_tokens=12, do_sample=False)
            logits_TV = tuned(out).logits[0]
            assert (merged(out).logits[0] - logits_TV).abs().max() < 1e-4 * logits_TV.abs().max()
        output = tokenizer.decode(
            out[0, prompt_ids["input_ids"].shape[1] :], skip_special_tokens=True
        )
        assert output == chat[1]["content"]
    # weft generates the same answers from the run.
    (work_dir / "asked.jsonl").write_text(
        "".join(json.dumps({"messages": chat[:1]}) + "\n" for chat in questions())
    )
    options = ("--chat", "--temperature", "0", "--max-tokens", "12")
    report = weft(work_dir, "generate", "run", "--prompts", "asked.jsonl", "--json", *options)
    answers = [json.loads(line) for line in report.splitlines()]
    assert [answer["text"] for answer in answers] == [chat[1]["content"] for chat in questions()]
    assert {answer["finish"] for answer in answers} == {"end"}
    question, answer = (message["content"] for message in questions()[0])
    assert weft(work_dir, "generate", "run", "--prompt", question, *options) == f"{answer}\n"


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_page_of_fine_tuning_trains_adapters_beside_frozen_weights(tmp_path: Path) -> None:
    """Every command of docs/fine-tuning.md, with tiny models in place of the Hub's."""
    outputs = pages.check_page(pages.ROOT / "docs" / "fine-tuning.md", tmp_path)
    assert len(outputs) > 12
    for command, output in outputs.items():
        if command.startswith("weft train "):
            assert losses(tmp_path / "runs" / command.rpartition("/")[2].split()[0]), command
            assert " epochs in " in output, command
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    # LoRA trained the model of the Hub: the frozen weights are those of its safetensors.
    (snapshot,) = tmp_path.glob(".hub/models--meta-llama--*/snapshots/*")
    assert snapshot.parts[-3].removeprefix("models--").replace("--", "/") in HUB_MODELS
    theirs = load_file(snapshot / "model.safetensors")
    ours = load_file(tmp_path / "out" / "model.safetensors")
    assert theirs.keys() == ours.keys()
    assert torch.equal(theirs["model.embed_tokens.weight"], ours["model.embed_tokens.weight"])
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(theirs[name], ours[name])
