"""Text that evaluations generate: equal to that of `weft generate` on the checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from tests.chat import CHATML, message, write_lines, write_tokenizer
from tests.harness import run_ranks
from tests.layouts import parse
from tests.small import Overrides, plan_here, small_job, this_rank
from weft.config.schema import DataSection, replace
from weft.config.writer import to_toml
from weft.data.dataset import open_dataset
from weft.data.prepare import prepare_data
from weft.inference import eval_text
from weft.inference.eval_text import prompt_generator, share_text_format
from weft.inference.generate import Sampling, generate, load_chat_format, make_sequences
from weft.inference.inference_model import find_checkpoint, load_local_model
from weft.records.run_reader import RunReader
from weft.reporting.run_report import report_page
from weft.training import loss
from weft.training.loop import train

PROMPTS = ["def ", "import os, sys", "x", ""]
SAMPLING = Sampling(max_tokens=12)
KEYS: Overrides = [
    ("model.num_layers", "4"),
    ("model.tied_embeddings", "false"),
    ("train.microbatch_size", "2"),
    ("train.steps", "2"),
    ("optim.warmup_steps", "0"),
    ("monitor.eval_prompts", json.dumps(PROMPTS)),
]


def train_with_text(overrides: Overrides, store: str, chunk_bytes: int = 0) -> None:
    """Train as `weft train` does, with logits in chunks of ``chunk_bytes``, if given."""
    loss.CHUNK_BYTES = chunk_bytes or loss.CHUNK_BYTES
    eval_text.SAMPLING = SAMPLING
    plan = plan_here(small_job(*overrides))
    generate = prompt_generator(plan)
    train(plan, open_dataset(store), this_rank(), Console(quiet=True), generate)


def start_run(run_dir: Path, store: Path, overrides: Overrides) -> Overrides:
    """Write the files of a run that `weft train` writes before it starts the ranks."""
    overrides = [*KEYS, *overrides, ("run.dir", str(run_dir))]
    job = replace(small_job(*overrides), data={"path": str(store)})
    run_dir.mkdir()
    (run_dir / "job.toml").write_text(to_toml(job, "demo", job))
    for file in store.iterdir():
        if "token" in file.name or "template" in file.name:
            shutil.copy(file, run_dir)
    return overrides


def generated_texts(run_dir: Path, template: str | None = None) -> list[str]:
    """Return what `weft generate` gives for the prompts and the newest checkpoint."""
    checkpoint = find_checkpoint(run_dir)
    chat_format = load_chat_format(checkpoint, template)
    sequences = make_sequences(PROMPTS, chat_format, SAMPLING)
    model = load_local_model(checkpoint, torch.device("cpu"))
    for _ in generate(model, chat_format, sequences, SAMPLING):
        pass
    return [f"{s.prompt}{' -> ' if template else ''}{s.text}" for s in sequences]


def recorded_texts(run_dir: Path) -> list[str]:
    events = RunReader(run_dir).read_events()
    return [event.text for event in events if event.kind == "generation"]


@pytest.mark.parametrize(
    ("layout", "chunk_bytes"),
    [
        pytest.param("", 0, marks=pytest.mark.slow),
        pytest.param("dp_shard2 tp2", 0, marks=pytest.mark.slow),
        pytest.param("cp2 pp2", 0, marks=pytest.mark.slow),
        pytest.param("dp_replicate2 cp2 cp_method=ulysses", 0, marks=pytest.mark.slow),
        ("pp2 pipeline.schedule=Interleaved1F1B", 20 * 512 * 4),
        ("tp2 model.vocab_size=515", 0),
        pytest.param("pp2 tp2", 20 * 512 * 4, marks=pytest.mark.slow),
        pytest.param(
            "dp_shard2 train.world_size_invariant=true train.microbatch_size=1",
            20 * 512 * 4,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "dp_shard2 model.kind=moe model.preset=toy-moe ep=2", 0, marks=pytest.mark.slow
        ),
    ],
)
def test_eval_prompts_in_every_layout_give_the_text_of_the_checkpoint(
    layout: str, chunk_bytes: int, store_path: Path, tmp_path: Path
) -> None:
    ranks, overrides = parse(layout)
    overrides = start_run(tmp_path / "run", store_path, overrides)
    run_ranks(train_with_text, ranks, overrides, str(store_path), chunk_bytes)
    texts = recorded_texts(tmp_path / "run")
    assert texts == generated_texts(tmp_path / "run")
    assert all(map(str.startswith, texts, PROMPTS))
    assert len({text[-20:] for text in texts}) == len(PROMPTS)


def test_eval_prompts_at_each_evaluation_are_in_the_report_and_do_not_change_training(
    store_path: Path, tmp_path: Path
) -> None:
    keys = [("train.eval_interval", "2"), ("train.steps", "4")]
    for name, prompts in (("run", PROMPTS), ("without", [])):
        own = [*keys, ("monitor.eval_prompts", json.dumps(prompts))]
        overrides = start_run(tmp_path / name, store_path, own)
        run_ranks(train_with_text, 1, overrides, str(store_path))
    run, without = RunReader(tmp_path / "run"), RunReader(tmp_path / "without")
    for key in ("loss", "grad_norm", "eval_loss"):
        assert run.column(key).tolist() == pytest.approx(without.column(key), nan_ok=True, rel=0)
    texts = recorded_texts(tmp_path / "run")
    assert len(texts) == 2 * len(PROMPTS)
    assert texts[-len(PROMPTS) :] == generated_texts(tmp_path / "run")
    page = report_page([tmp_path / "run"]).decode()
    assert page.index(">Generated text<") < page.index(">Events<")
    assert ">Generated text<" not in report_page([tmp_path / "without"]).decode()


@pytest.mark.slow
def test_eval_prompts_of_a_dpo_run_are_messages(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "model", CHATML)
    pairs = [
        {
            "prompt": [message("user", f"it is {i}")],
            "chosen": [message("assistant", "it is")],
            "rejected": [message("assistant", "was")],
        }
        for i in range(30)
    ]
    write_lines(tmp_path / "pairs.jsonl", pairs)
    values = {"path": str(tmp_path / "pairs.jsonl"), "tokenizer": str(tokenizer)}
    section = DataSection.model_validate(
        values | {"format": "preferences", "validation_fraction": 0.2}
    )
    store = prepare_data(section, tmp_path / "cache").path
    keys = [("data.format", "preferences"), ("train.objective", "dpo"), ("train.seq_len", "128")]
    keys.append(("model.max_seq_len", "128"))
    overrides = start_run(tmp_path / "run", store, keys)
    run_ranks(train_with_text, 2, overrides, str(store))
    texts = recorded_texts(tmp_path / "run")
    assert texts == generated_texts(tmp_path / "run", "auto")
    assert RunReader(tmp_path / "run").last("eval_metrics.reward_margin") is not None


def text_format(base: str) -> dict[str, str]:
    """Return the files that this rank has after the exchange, in its own directory."""
    run_dir = Path(base) / str(dist.get_rank())
    share_text_format(run_dir)
    files = (path for path in run_dir.rglob("*") if path.is_file())
    return {str(path.relative_to(run_dir)): path.read_text() for path in files}


def test_hosts_without_a_shared_directory_get_the_tokenizer(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "huggingface/config.json"):
        path = tmp_path / "0" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    first, second = run_ranks(text_format, 2, str(tmp_path))
    assert first == second == {n: n for n in ("tokenizer.json", "huggingface/config.json")}
