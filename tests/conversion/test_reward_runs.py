"""Reward models by commands: train, resume, evaluate, export, and train the export further."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pages import build_tokenizer, tiny_model
from tests.small import records

# The answer's last token is the end token.
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"]
ROWS = [
    {
        "prompt": [{"role": "user", "content": f"number {i}"}],
        "chosen": [{"role": "assistant", "content": "it is " * (i % 2 + 1)}],
        "rejected": [{"role": "assistant", "content": "was " * (i % 3 + 1)}],
    }
    for i in range(40)
]
KEYS = (
    *("--data.path", "pairs.jsonl", "--data.cache_dir", "cache", "--train.seq_len", "128"),
    *("--train.global_batch_size", "4", "--optim.lr", "0.003", "--train.epochs", "0"),
    *("--monitor.report", "false", "--monitor.trackers", ""),
)


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny tied Llama of transformers to ``theirs``, and pairs."""
    directory = tmp_path_factory.mktemp("rewards")
    lines = [json.dumps(row) for row in ROWS]
    (directory / "pairs.jsonl").write_text("".join(line + "\n" for line in lines), "utf-8")
    tokenizer = build_tokenizer(lines, SPECIAL, "<|end|>", TEMPLATE)
    tokenizer.save_pretrained(directory / "theirs")
    sizes = {"max_position_embeddings": 128, "initializer_range": 0.1, "tie_word_embeddings": True}
    tiny_model("Llama", tokenizer, **sizes).save_pretrained(directory / "theirs")
    return directory


def weft(work_dir: Path, *arguments: str, status: int = 0) -> str:
    command = [sys.executable, "-m", "weft", *arguments]
    completed = subprocess.run(command, cwd=work_dir, capture_output=True, text=True, timeout=300)
    assert completed.returncode == status, completed.stdout + completed.stderr
    return completed.stdout + completed.stderr


def evaluate(work_dir: Path, *layout: str) -> dict[str, Any]:
    options = ("--data.path", "pairs.jsonl", "--json", *layout)
    lines = weft(work_dir, "evaluate", "run", *options).splitlines()
    [report] = [json.loads(line) for line in lines if line.startswith("{")]
    return dict(report)


def score_pairs(directory: Path) -> dict[str, float]:
    """Return the metrics of all pairs, computed with the files of an export only."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model: Any = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)

    def score(answer: str) -> torch.Tensor:
        conversations = [[*row["prompt"], *row[answer]] for row in ROWS]
        batch = tokenizer.apply_chat_template(
            conversations, return_tensors="pt", return_dict=True, padding=True
        )
        with torch.no_grad():
            return model(**batch).logits[:, 0].double()

    chosen, rejected = score("chosen"), score("rejected")
    margin = chosen - rejected
    return {
        "nats_per_pair": float(-torch.nn.functional.logsigmoid(margin).mean()),
        "reward_margin": float(margin.mean()),
        "reward_accuracy": float((margin > 0).double().mean()),
        "reward_chosen": float(chosen.mean()),
        "reward_rejected": float(rejected.mean()),
    }


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(600)
def test_reward_run_is_trained_evaluated_exported_and_trained_further(work_dir: Path) -> None:
    start = ("train", "reward", "--model.path", "theirs", *KEYS, "--run.dir", "run")
    out = weft(work_dir, *start, "--train.steps", "8", "--run.nproc_per_node", "1")
    assert "the score head is new, with random weights" in out
    assert "weft evaluate run" in out
    resumed = ("--train.steps", "16", "--run.nproc_per_node", "2", "--parallel.tp", "2")
    weft(work_dir, *start, *resumed)
    rows = records(work_dir / "run")
    assert [row["step"] for row in rows] == [*range(1, 17)]
    assert rows[-1]["loss"] < 0.2 < rows[0]["loss"]
    assert rows[-1]["metrics"]["reward_accuracy"] == 1

    found, other = (evaluate(work_dir, *layout) for layout in ((), ("--parallel.tp", "2")))
    assert found["pairs"] == len(ROWS)
    assert "is a reward model" in weft(work_dir, "chat", "run", status=2)

    weft(work_dir, "export", "run", "out", "--prove")
    scores = score_pairs(work_dir / "out")
    for numbers in (found, other):
        assert {key: numbers[key] for key in scores} == pytest.approx(scores, rel=1e-4, abs=1e-5)

    adapted = ("train", "reward", "--model.path", "theirs", *KEYS, "--run.dir", "adapted")
    weft(work_dir, *adapted, "--train.steps", "2", "--lora.rank", "4", "--run.nproc_per_node", "1")
    weft(work_dir, "export", "adapted", "adapter", "--adapter", "--prove")
    weft(work_dir, "export", "adapted", "merged", "--prove")

    further = ("train", "reward", "--model.path", "out", *KEYS, "--run.dir", "further")
    weft(work_dir, *further, "--train.steps", "1", "--run.nproc_per_node", "1")
    [first] = records(work_dir / "further")
    assert first["metrics"]["reward_margin"] == pytest.approx(scores["reward_margin"], rel=0.1)
    refused = ("train", "chat", "--model.path", "out", *KEYS, "--run.dir", "refused")
    assert "has a score head" in weft(work_dir, *refused, status=2)
