"""Generation: equal with and without cache, independent of the batch and of the layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.random_runs import random_run
from tests.small import this_rank
from weft.cli.main import main
from weft.config.errors import ConfigErrors, InvalidConfig
from weft.inference.generate import (
    ChatFormat,
    GeneratedSequence,
    Sampling,
    generate,
    load_chat_format,
    make_sequences,
    read_prompts,
    sample_token,
)
from weft.inference.inference_model import (
    LanguageModel,
    find_checkpoint,
    load_local_model,
    load_model,
    plan_inference,
)
from weft.models.kv_cache import use_kv_cache

PROMPTS = ["def ", "import os, sys, json\nfor line in sys.stdin:\n    print", "", "x"]
GREEDY = Sampling(max_tokens=24, temperature=0)
KINDS: dict[str, list[tuple[str, str]]] = {
    "llama": [],
    "qwen3": [("model.kind", "qwen3"), ("model.head_dim", "12")],
}


@pytest.fixture(scope="module")
def runs(store_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("runs")
    return {kind: random_run(directory / kind, store_path, *own) for kind, own in KINDS.items()}


def load_run(run: Path) -> tuple[LanguageModel, ChatFormat]:
    checkpoint = find_checkpoint(run)
    return load_local_model(checkpoint, torch.device("cpu")), load_chat_format(checkpoint)


def generate_text(
    model: LanguageModel,
    chat_format: ChatFormat,
    prompts: list[str],
    sampling: Sampling,
    number: int = 0,
    cached: bool = True,
) -> list[GeneratedSequence]:
    rows = make_sequences(prompts, chat_format, sampling, number)
    pieces = [""] * len(rows)
    for row, piece in generate(model, chat_format, rows, sampling, cached):
        pieces[next(i for i, item in enumerate(rows) if item is row)] += piece
    assert pieces == [row.text for row in rows]
    return rows


# --------------------------------------------------------------------------- the cache


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", [64, 20], ids=["within", "beyond what it has seen"])
def test_generate_greedy_with_cache_equals_without(
    kind: str, context: int, runs: dict[str, Path]
) -> None:
    model, chat_format = load_run(runs[kind])
    # Without end tokens all sequences of 2 to 40 tokens get 24 more.
    chat_format = replace(chat_format, max_context=context, end_tokens=frozenset())
    ours = generate_text(model, chat_format, PROMPTS, GREEDY)
    theirs = generate_text(model, chat_format, PROMPTS, GREEDY, cached=False)
    assert [row.ids for row in ours] == [row.ids for row in theirs]
    assert len({tuple(row.ids[-24:]) for row in ours}) == len(PROMPTS)
    assert all(
        row.finish_reason == "length" and len(row.ids) == row.prompt_length + 24 for row in ours
    )


def test_logits_of_each_step_equal_those_of_the_full_sequence(runs: dict[str, Path]) -> None:
    model, _ = load_run(runs["qwen3"])
    tokens = torch.randint(512, (3, 30), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([4, 9, 1])
    rows, everywhere = torch.arange(3), torch.arange(30).expand(3, 30)
    with torch.no_grad():
        hidden = model.module(tokens)
    whole_logits = hidden @ model.module.get_parameter("lm_head.weight").T
    with use_kv_cache(model.family.blocks(model.module), 30) as cache:
        assert cache is not None
        cache.set_positions(
            everywhere[:, :9], reset=True
        )  # shorter sequences are padded with later tokens
        model.logits(tokens[:, :9], rows, lengths - 1, everywhere[:, :9])
        for step in range(12):
            positions = (lengths + step).unsqueeze(1)
            cache.set_positions(positions, reset=False)
            new = tokens.gather(1, positions)
            ours = model.logits(new, rows, torch.zeros(3, dtype=torch.int64), positions)
            expected = whole_logits[rows, lengths + step]
            torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-4)


def test_kv_cache_is_removed_after_generation(runs: dict[str, Path]) -> None:
    model, chat_format = load_run(runs["llama"])
    before = [m.attend for m in model.module.modules() if hasattr(m, "attend")]
    generate_text(model, chat_format, ["x"], GREEDY)
    assert [m.attend for m in model.module.modules() if hasattr(m, "attend")] == before


# --------------------------------------------------------------------------- sampling


def test_generate_text_of_a_prompt_does_not_depend_on_the_batch(runs: dict[str, Path]) -> None:
    model, chat_format = load_run(runs["llama"])
    sampling = Sampling(max_tokens=16, seed=3, top_p=0.9, min_p=0.01)
    together = generate_text(model, chat_format, PROMPTS, sampling)
    single = [generate_text(model, chat_format, [p], sampling, i)[0] for i, p in enumerate(PROMPTS)]
    assert [row.ids for row in together] == [row.ids for row in single]
    other_seed = generate_text(model, chat_format, ["x"], replace(sampling, seed=6))
    assert other_seed[0].ids == together[3].ids  # has the seed of the fourth prompt
    other = generate_text(model, chat_format, PROMPTS, replace(sampling, seed=4))
    assert [row.ids for row in other] != [row.ids for row in together]


def row_of(ids: list[int], seed: int = 0) -> GeneratedSequence:
    return GeneratedSequence("", ids, len(ids), torch.Generator().manual_seed(seed), "")


@pytest.mark.parametrize(
    ("options", "possible"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.45}, {0, 1}),  # 0.4 alone is not enough
        ({"top_p": 0.4}, {0}),
        ({"min_p": 0.5}, {0, 1}),  # keeps 0.3 but not 0.2: the limit is half of 0.4
        ({"temperature": 0}, {0}),
        ({"temperature": 0.01}, {0}),
        ({"repetition_penalty": 100.0, "temperature": 0}, {1}),
    ],
)
def test_sample_token_options_limit_the_tokens(options: dict[str, Any], possible: set[int]) -> None:
    logits = torch.tensor([0.4, 0.3, 0.19, 0.11]).log() + 5
    sampling = Sampling(**{"temperature": 1.0, "top_k": 0, **options})
    ids = [0] if "repetition_penalty" in options else []
    observed = {sample_token(logits, row_of(ids, seed), sampling) for seed in range(200)}
    assert observed == possible


def test_sample_token_frequencies_follow_the_temperature() -> None:
    logits, row = torch.tensor([0.8, 0.2]).log(), row_of([])
    sampling = Sampling(temperature=2.0, top_k=0)
    share = sum(sample_token(logits, row, sampling) for _ in range(3000)) / 3000
    assert share == pytest.approx(1 / 3, abs=0.03)  # sqrt(0.2) / (sqrt(0.8) + sqrt(0.2))


# --------------------------------------------------------------------------- ends


def test_generate_stops_at_stop_texts_and_end_tokens(runs: dict[str, Path]) -> None:
    model, chat_format = load_run(runs["llama"])
    chat_format = replace(chat_format, end_tokens=frozenset())
    (full,) = generate_text(model, chat_format, ["x"], GREEDY)
    stop = full.text[9:12]
    (row,) = generate_text(model, chat_format, ["x"], replace(GREEDY, stop=("no such text", stop)))
    assert row.text == full.text[: full.text.index(stop)]
    assert row.finish_reason == "stop"
    end = full.ids[full.prompt_length + 5]
    (row,) = generate_text(model, replace(chat_format, end_tokens=frozenset({end})), ["x"], GREEDY)
    assert row.ids == full.ids[: full.ids.index(end, full.prompt_length)]
    assert row.finish_reason == "end"


def test_chat_format_of_an_imported_model_has_its_begin_and_end_tokens(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = find_checkpoint(runs["llama"])
    assert load_chat_format(checkpoint).max_context == 32  # the sequence length of training
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "tokenizer.json").write_bytes((runs["llama"] / "tokenizer.json").read_bytes())
    config = {"bos_token_id": 7, "eos_token_id": 8}
    (tmp_path / "huggingface/config.json").write_text(json.dumps(config))
    extra = {"eos_token_id": [8, 9]}
    (tmp_path / "huggingface/generation_config.json").write_text(json.dumps(extra))
    chat_format = load_chat_format(checkpoint._replace(run_dir=tmp_path))
    separator = load_chat_format(checkpoint).start_token  # neither 8 nor 9 is special
    assert (chat_format.start_token, chat_format.end_tokens, chat_format.max_context) == (
        7,
        {separator, 8, 9},
        64,
    )


# --------------------------------------------------------------------------- layouts


def over_ranks(run: str, overrides: list[tuple[str, str]]) -> list[list[int]]:
    checkpoint = find_checkpoint(Path(run))
    _job, plan = plan_inference(checkpoint, overrides, [], ("parallel.",), for_generation=True)
    rank = this_rank()
    assert plan.world_size == rank.world_size
    model = load_model(checkpoint, plan, rank)
    rows = generate_text(
        model, replace(load_chat_format(checkpoint), end_tokens=frozenset()), PROMPTS, GREEDY
    )
    return [row.ids for row in rows]


@pytest.mark.parametrize(
    ("kind", "degrees"),
    [("qwen3", {"tp": "2"}), ("llama", {"dp_shard": "2"}), ("llama", {"tp": "4"})],
)
def test_generate_over_ranks_writes_the_same(
    kind: str, degrees: dict[str, str], runs: dict[str, Path]
) -> None:
    model, chat_format = load_run(runs[kind])
    expected = generate_text(model, replace(chat_format, end_tokens=frozenset()), PROMPTS, GREEDY)
    ranks = 4 if "4" in degrees.values() else 2
    overrides = [(f"parallel.{axis}", size) for axis, size in degrees.items()]
    for ids in run_ranks(over_ranks, ranks, str(runs[kind]), overrides):
        assert ids == [row.ids for row in expected]


def test_plan_inference_ignores_the_device_of_training(runs: dict[str, Path]) -> None:
    checkpoint = find_checkpoint(runs["llama"])
    file = checkpoint.run_dir / "job.toml"
    before = file.read_text()
    try:
        file.write_text(before.replace('device = "auto"', 'device = "cuda"'))
        job, plan = plan_inference(checkpoint, [], [], (), for_generation=True)
        assert (job.run.device, plan.world_size) == ("auto", 1)
    finally:
        file.write_text(before)


@pytest.mark.parametrize("for_generation", [True, False])
def test_plan_inference_ignores_keys_of_training(
    for_generation: bool, store_path: Path, tmp_path: Path
) -> None:
    """Among them keys that name what the base of LoRA or the model without MTP lacks."""
    keys = [
        ("model.mtp_layers", "1"),
        ("optim.groups", '[{params=["layers.2.eh_proj.weight", "*.lora_A*"], lr_mult=0.5}]'),
        ("lora.rank", "4"),
        ("lora.alpha", "8"),
        ("lora.targets", "q_proj"),
        ("lora.quantize", "nf4"),
        ("lora.dropout", "0.1"),
        ("precision.float8", "tensorwise"),
        ("precision.float8_small", "true"),
        ("precision.float8_exclude", "layers.2.*,*.q_proj"),
    ]
    checkpoint = find_checkpoint(random_run(tmp_path / "run", store_path, *keys))
    job, plan = plan_inference(checkpoint, [], [], (), for_generation=for_generation)
    assert (plan.lora_rank, plan.model.mtp_layers, job.optim.groups) == (0, 0, ())
    assert job.precision.float8_exclude == ("*.q_proj",)


def test_plan_inference_of_a_dpo_run_evaluates_text(store_path: Path, tmp_path: Path) -> None:
    keys = [("train.objective", "dpo"), ("data.format", "preferences")]
    checkpoint = find_checkpoint(random_run(tmp_path / "run", store_path, *keys))
    text = [("data.path", str(tmp_path)), ("data.format", "text")]
    job, _ = plan_inference(checkpoint, text, [], ("data.",), for_generation=False)
    assert job.train.objective == "next_token"


def test_plan_inference_impossible_keys_are_reported_at_once(runs: dict[str, Path]) -> None:
    checkpoint = find_checkpoint(runs["llama"])
    overrides = [
        ("parallel.pp", "2"),
        ("parallel.cp", "2"),
        ("model.dim", "64"),
        ("parallel.tpp", "2"),
    ]
    with pytest.raises(InvalidConfig) as caught:
        plan_inference(checkpoint, overrides, [], ("parallel.",), for_generation=True)
    text = str(caught.value)
    for name in ("parallel.pp", "parallel.cp", "model.dim", "parallel.tpp"):
        assert name in text


# --------------------------------------------------------------------------- the command


def test_generate_command_completes_prompts_and_refuses_mistakes(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"def "\n{"prompt": "x", "more": 1}\n')
    words = ["generate", str(runs["llama"]), "--max-tokens", "5", "--temperature", "0"]
    assert main([*words, "--prompt", "import", "--prompts", str(file), "--json"]) == 0
    report = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in report] == ["import", "def ", "x"]
    for line in report:
        assert main([*words, "--prompt", line["prompt"]]) == 0
        assert capsys.readouterr().out == f"{line['prompt']}{line['text']}\n"
        assert line["finish"] in ("end", "length")
    assert main([*words, "--prompts", str(file), "--batch", "1"]) == 0
    both = [f"{line['prompt']}{line['text']}\n---\n" for line in report[1:]]
    assert capsys.readouterr().out == "".join(both)
    assert main([*words, "--top-p", "0", "--prompts", "nowhere.txt", "--train.steps", "3"]) == 2
    output = capsys.readouterr().err
    for name in ("--top-p", "--prompts", "train.steps"):
        assert f"  {name}=" in output


def test_read_prompts_invalid_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"fine"\n{"question": 1}\n')
    errors = ConfigErrors()
    assert read_prompts(file, errors) == ["fine"]
    assert "line 2" in str(errors[0])
    file.write_text('"a\u2028b"\n', "utf-8")  # a line separator in Unicode, but not in JSON Lines
    assert read_prompts(file, errors) == ["a\u2028b"]
    text = tmp_path / "prompts.txt"
    text.write_text("one\u2028two\nthree\r\n\n", "utf-8")
    assert read_prompts(text, errors) == ["one\u2028two", "three", ""]
    messages = [{"role": "user", "content": "why?"}]
    file.write_text(json.dumps({"messages": messages}) + '\n{"messages": [{"role": "user"}]}\n')
    errors.clear()
    assert read_prompts(file, errors, chat=True) == [messages]
    assert "nor one with messages, each with role and content" in str(errors[0])


def test_generate_chat_uses_the_template(
    store_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The template formats the prompt, with special tokens, and defines the answer's end."""
    run = random_run(tmp_path / "run", store_path)
    words = ["generate", str(run), "--chat", "--max-tokens", "3"]
    assert main(words) == 2
    assert (
        "--chat needs a prompt. Add a prompt after the run, or --prompts" in capsys.readouterr().err
    )
    assert main([*words, "--prompt", "x"]) == 2
    assert "finds neither chat_template.jinja nor a template" in capsys.readouterr().err
    template = tmp_path / "mine.jinja"
    template.write_text(
        "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}<|endoftext|>{% endfor %}"
        "{% if add_generation_prompt %}a: {% endif %}"
    )
    words += ["--data.chat_template", str(template)]
    assert main([*words, "--prompt", "x"]) == 0
    assert not capsys.readouterr().out.startswith("x")
    (tmp_path / "asked.jsonl").write_text('{"messages": [{"role": "tool", "content": "x"}]}\n')
    assert main([*words, "--prompts", str(tmp_path / "asked.jsonl")]) == 2
    assert "the chat template rejects it: no tools" in capsys.readouterr().err

    chat_format = load_chat_format(find_checkpoint(run), str(template))
    [row] = make_sequences(["why<|endoftext|>?"], chat_format, GREEDY)
    separator = chat_format.start_token
    assert row.ids.count(separator) == 2  # special tokens in a prompt are parsed, as in training
    decoded = chat_format.tokenizer.decode(row.ids, skip_special_tokens=False)
    assert decoded == "u: why<|endoftext|>?<|endoftext|>a: "
    assert separator in chat_format.end_tokens
    template.write_text(template.read_text().replace("<|endoftext|>", ""))
    assert load_chat_format(find_checkpoint(run), str(template)).end_tokens == {separator}
