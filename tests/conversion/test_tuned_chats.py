"""Chats of two turns, tuned with published templates and exported, stop in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.chat import message, write_lines
from tests.chat_templates import Model, template_dir
from tests.commands import train_in_one_rank
from weft.cli.main import main
from weft.data.chat_template import GENERATION

ASK, ANSWER = message("user", "what is it?"), message("assistant", "it is what it is")
ASK_MORE, MORE = message("user", "and there?"), message("assistant", "there it was too")
STEPS = 40


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks use one thread: more would wait for each other on a busy machine."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def write_model(name: str, directory: Path) -> Model:
    """Write a random model of two layers with the tokenizer files of a published one."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    model = Model(name, directory)
    model.write()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    settings = (directory / "generation_config.json").read_bytes()
    LlamaForCausalLM(config).save_pretrained(directory)
    (directory / "generation_config.json").write_bytes(settings)
    return model


def tune(directory: Path, run: Path, data: Path, *keys: str) -> None:
    words = ["lora", "--model.path", str(directory), "--data.path", str(data)]
    words += ["--lora.rank", "0", "--train.seq_len", "384", "--train.steps", str(STEPS)]
    words += ["--train.global_batch_size", "2", "--optim.lr", "1e-2", "--run.dir", str(run)]
    words += ["--run.nproc_per_node", "1", "--precision.compute_dtype", "float32"]
    words += ["--data.cache_dir", str(run.parent / "cache")]
    train_in_one_rank([*words, *keys], run.parent)


def answers(directory: Path, histories: list[list[dict[str, str]]]) -> list[str]:
    """Return the greedy answers of transformers, with their end tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    texts = []
    for history in histories:
        prompt = tokenizer.apply_chat_template(
            history, add_generation_prompt=True, return_tensors="pt"
        )
        ids = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0]
        texts.append(tokenizer.decode(ids[prompt["input_ids"].shape[1] :].tolist()))
    return texts


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "reasoning", "end"),
    [
        ("qwen3", "<think>\n\n</think>\n\n", "<|im_end|>"),
        ("gptoss", "<|channel|>final<|message|>", "<|return|>"),
        ("phi3_5", "", "<|end|>"),
        ("deepseek_r1_distill", "\n</think>\n\n", "<｜end▁of▁sentence｜>"),  # noqa: RUF001
        ("glm4moe", "\n<think></think>\n", "<|user|>"),
    ],
)
def test_tuned_chat_of_two_turns_stops_in_transformers(
    name: str, reasoning: str, end: str, tmp_path: Path
) -> None:
    model = write_model(name, tmp_path / "model")
    # Equal rows would be in one split.
    rows = [{"messages": [ASK, ANSWER, ASK_MORE, MORE], "id": i} for i in range(4)]
    data = write_lines(tmp_path / "chats.jsonl", rows)
    steps = 2 * STEPS if name == "gptoss" else STEPS
    tune(model.directory, tmp_path / "run", data, "--train.steps", str(steps))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--prove"]) == 0
    first, second = answers(tmp_path / "out", [[ASK], [ASK, ANSWER, ASK_MORE]])
    assert first == f"{reasoning}it is what it is{end}"
    assert second == f"{reasoning}there it was too{end}"


@pytest.mark.system
@pytest.mark.timeout(300)
def test_training_template_is_not_exported(tmp_path: Path) -> None:
    """The model's own template is, whatever template the training took."""
    model = write_model("qwen3", tmp_path / "model")
    data = write_lines(
        tmp_path / "chats.jsonl", [{"messages": [ASK, ANSWER], "id": i} for i in range(4)]
    )
    training = template_dir() / "qwen3_training.jinja"
    tune(
        model.directory,
        tmp_path / "run",
        data,
        "--data.chat_template",
        str(training),
        "--train.steps",
        "1",
        "--data.validation_fraction",
        "0.3",
    )
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert GENERATION.search(training.read_text("utf-8"))
    assert (tmp_path / "out/chat_template.jinja").read_text("utf-8") == model.source


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(300)
def test_exported_adapter_has_tokenizer_template_and_end_tokens(tmp_path: Path) -> None:
    """The adapter's directory alone renders a conversation, and stops as the run does."""
    from transformers import AutoTokenizer, GenerationConfig

    model = write_model("qwen3", tmp_path / "model")
    rows = [{"messages": [ASK, ANSWER], "id": i} for i in range(4)]
    data = write_lines(tmp_path / "chats.jsonl", rows)
    run, out = tmp_path / "run", tmp_path / "out"
    tune(model.directory, run, data, "--lora.rank", "4", "--train.steps", "2")
    assert main(["export", str(run), str(out), "--adapter", "--prove"]) == 0
    ours, source = (AutoTokenizer.from_pretrained(each) for each in (out, model.directory))
    assert ours.get_chat_template() == source.get_chat_template()
    for text in ("it is what it is", "<|im_start|>user"):
        assert ours(text)["input_ids"] == source(text)["input_ids"]
    ends = GenerationConfig.from_pretrained(out).eos_token_id
    assert source.convert_tokens_to_ids("<|im_end|>") in ([ends] if isinstance(ends, int) else ends)
