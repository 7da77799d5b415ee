"""Models get rows for tokens that a run adds, or that their tokenizer already has."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.chat import message, write_lines
from tests.commands import train_in_one_rank
from tests.pages import SPECIAL, TEMPLATE, build_tokenizer, chats, tiny_model
from tests.small import newest_state, read_state
from weft.cli.main import main
from weft.config.errors import InvalidConfig
from weft.config.reader import read_job
from weft.conversion.hf_convert import export_checkpoint
from weft.conversion.hf_import import import_model
from weft.conversion.model_import import import_source, open_source
from weft.monitor.terminal import quiet_console
from weft.planning.vocabulary import NewTokens, add_tokens, count_entries
from weft.preparation.job_checks import prepare_job

CONSOLE = quiet_console(io.StringIO())
NEW = ("<|tool|>", "<|end_tool|>")
LISTED = ",".join(NEW)


def ignore(progress: Any) -> None:
    pass


@pytest.fixture(params=["tied", "untied"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Write a tiny Llama of transformers whose tokenizer has as many entries as it has rows."""
    return write_model(tmp_path, request.param == "tied")


def write_model(directory: Path, is_tied: bool = False, more_rows: int = 0) -> Path:
    texts = (each["content"] for chat in chats()[:16] for each in chat)
    tokenizer = build_tokenizer(texts, SPECIAL, "<|im_end|>", TEMPLATE)
    tokenizer.save_pretrained(directory / "Tiny")
    sizes = {"max_position_embeddings": 128, "tie_word_embeddings": is_tied}
    model = tiny_model("Llama", tokenizer, initializer_range=0.1, **sizes)
    if more_rows:
        model.resize_token_embeddings(len(tokenizer) + more_rows)
    model.save_pretrained(directory / "Tiny")
    return directory / "Tiny"


def prepare(directory: Path, source: Path, *more: tuple[str, str]) -> Any:
    (directory / "text.txt").write_text("one two three. " * 2000)
    overrides = [
        ("model.path", str(source)),
        ("data.path", str(directory / "text.txt")),
        ("run.dir", str(directory / "run")),
        ("run.nproc_per_node", "1"),
        *more,
    ]
    return prepare_job("pretrain", overrides)[1]


def rows_of(source: Path) -> int:
    return int(json.loads((source / "config.json").read_text())["vocab_size"])


def error_of(directory: Path, source: Path, *more: tuple[str, str]) -> Any:
    with pytest.raises(InvalidConfig) as caught:
        prepare(directory, source, *more)
    [error] = caught.value.errors
    return error


def size_of(error: Any) -> tuple[str, str]:
    """Return the size that a remedy names."""
    found = re.search(r"--model.vocab_size (\d+)", error.remedy)
    assert found is not None, error.remedy
    return "model.vocab_size", found[1]


# --------------------------------------------------------------------------- tokenizers


def test_added_tokens_have_the_ids_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = write_model(tmp_path)
    content = (source / "tokenizer.json").read_bytes()
    grown = add_tokens(content, NewTokens(("tool", "<|im_end|>"), NEW))
    theirs = AutoTokenizer.from_pretrained(source)
    theirs.add_tokens(["tool", "<|im_end|>"])
    theirs.add_special_tokens({"additional_special_tokens": list(NEW)})
    ours = Tokenizer.from_str(grown.decode())
    assert ours.get_vocab() == theirs.get_vocab()
    assert [ours.get_added_tokens_decoder()[ours.token_to_id(t)].special for t in NEW] == [True] * 2
    assert not ours.get_added_tokens_decoder()[ours.token_to_id("tool")].special
    assert add_tokens(grown, NewTokens(("tool",), NEW)) == grown  # the same bytes
    assert count_entries(content, NewTokens((), NEW))[1] == (len(theirs) - 3, len(theirs) - 2)


def test_plan_has_the_rows_that_the_tokens_need(tmp_path: Path) -> None:
    source = write_model(tmp_path)
    rows = rows_of(source)
    assert prepare(tmp_path, source).model.vocab_size == rows
    for added, expected in ((2, -(-rows // 64) * 64), (64, -(-(rows + 64) // 64) * 64)):
        names = ",".join(f"<|{i}|>" for i in range(added))
        for key in ("data.add_tokens", "data.add_special_tokens"):
            assert prepare(tmp_path, source, (key, names)).model.vocab_size == expected
    exact = ("model.vocab_size", str(rows + 2))
    assert (
        prepare(tmp_path, source, ("data.add_tokens", LISTED), exact).model.vocab_size == rows + 2
    )


def test_padding_of_the_model_needs_no_more_rows(tmp_path: Path) -> None:
    source = write_model(tmp_path, more_rows=5)
    plan = prepare(tmp_path, source, ("data.add_tokens", LISTED))
    assert plan.model.vocab_size == rows_of(source)


def test_too_few_rows_and_tokenizers_of_other_models_are_refused(tmp_path: Path) -> None:
    source = write_model(tmp_path)
    rows = rows_of(source)
    error = error_of(tmp_path, source, ("model.vocab_size", str(rows - 1)))
    assert (error.key, error.rule) == (
        "model.vocab_size",
        f"is less than the {rows} rows of the model, and weft removes none",
    )
    few = ("model.vocab_size", str(rows + 1)), ("data.add_tokens", LISTED)
    error = error_of(tmp_path, source, *few)
    assert error.rule == f"has {rows + 2} entries, but model.vocab_size is {rows + 1}"
    assert prepare(tmp_path, source, size_of(error), few[1])

    own = json.loads((source / "tokenizer.json").read_text())
    other = tmp_path / "other" / "tokenizer.json"
    other.parent.mkdir()
    vocab = {"": 0, **own["model"]["vocab"]}
    shifted = {token: i for i, token in enumerate(vocab)}
    added = [each | {"id": each["id"] + 1} for each in own["added_tokens"]]
    tree = own | {"added_tokens": added, "model": own["model"] | {"vocab": shifted}}
    other.write_text(json.dumps(tree))
    error = error_of(tmp_path, source, ("data.tokenizer", str(other)))
    assert error.key == "data.tokenizer"
    assert (
        f"gives {rows} of the {rows} tokens of {source / 'tokenizer.json'} another id" in error.rule
    )
    assert prepare(tmp_path, source, ("data.tokenizer", str(other)), size_of(error))

    many = [("data.add_tokens", ",".join(f"<|{i}|>" for i in range(rows + 1)))]
    error = error_of(tmp_path, source, *many)
    assert "this may be the tokenizer of another model" in error.rule
    assert prepare(tmp_path, source, *many, size_of(error))


# --------------------------------------------------------------------------- rows


def test_new_rows_are_those_of_transformers(source: Path, tmp_path: Path) -> None:
    """transformers adds noise of 3e-5 of the rows' standard deviation; weft takes the mean."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens({"additional_special_tokens": list(NEW)})
    theirs = AutoModelForCausalLM.from_pretrained(source)
    theirs.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64)

    plan = prepare(tmp_path, source, ("data.add_special_tokens", LISTED))
    opened = open_source(plan)
    assert opened is not None
    assert f"rows become {plan.model.vocab_size}; the new ones are the mean" in opened.note
    plan = import_source(plan, opened, CONSOLE)
    state = read_state(tmp_path / "run" / "checkpoints" / "step-00000000")
    rows = rows_of(source)
    for name in ("embed_tokens", *["lm_head"] * (not plan.model.tied_embeddings)):
        table = state[f"model.{name}.weight"]
        assert torch.equal(
            table[rows:], table[:rows].double().mean(0).float().expand_as(table[rows:])
        )
        module = theirs.lm_head if name == "lm_head" else theirs.model.embed_tokens
        torch.testing.assert_close(table, module.weight, atol=3e-5, rtol=0)

    export_checkpoint(tmp_path / "run", tmp_path / "out", "", "5GB", ignore)
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again.get_vocab() == tokenizer.get_vocab()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == len(table)
    listed = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    if "added_tokens_decoder" in listed:
        assert listed["added_tokens_decoder"][str(rows)]["content"] == NEW[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([again.encode(f"Question 1:{NEW[0]}Paris{NEW[1]}")])
    assert len(ids[0]) == len(tokenizer.encode(f"Question 1:{NEW[0]}Paris{NEW[1]}"))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, theirs(ids).logits, atol=5e-3, rtol=0)


def test_import_of_a_tokenizer_with_more_entries_grows_the_model(tmp_path: Path) -> None:
    """As ``tokenizer.add_tokens`` and ``save_pretrained`` leave a directory."""
    source = write_model(tmp_path)
    rows = rows_of(source)
    content = (source / "tokenizer.json").read_bytes()
    (source / "tokenizer.json").write_bytes(add_tokens(content, NewTokens((), NEW)))
    grown = -(-(rows + 2) // 64) * 64
    assert f"{rows} rows become {grown};" in import_model(source, tmp_path / "imported", ignore)
    keys = [("run.dir", str(tmp_path / "imported")), ("data.path", str(chat_file(tmp_path)))]
    adapted = prepare_job("lora", [*keys, ("run.nproc_per_node", "1")])[1]
    assert adapted.job.lora.token_ids == (rows, rows + 1)
    plan = prepare(tmp_path, source)
    assert plan.model.vocab_size == grown
    assert plan.job.lora.trainable_tokens == "auto"
    import_source(plan, open_source(plan), CONSOLE)
    states = [
        read_state(tmp_path / name / "checkpoints" / "step-00000000")
        for name in ("run", "imported")
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def chat_file(directory: Path) -> Path:
    """Write conversations whose answers have the new tokens."""
    rows = [
        {"messages": [message("user", f"call {i}"), message("assistant", f"{NEW[0]}x{NEW[1]}")]}
        for i in range(8)
    ]
    return write_lines(directory / "chats.jsonl", rows)


def training(directory: Path, recipe: str, *more: str) -> list[str]:
    words = [recipe, "--model.path", str(directory / "Tiny"), "--train.epochs", "0"]
    words += ["--data.path", str(directory / "chats.jsonl"), "--train.global_batch_size", "2"]
    words += ["--data.add_special_tokens", LISTED, "--run.dir", str(directory / "run")]
    words += ["--train.seq_len", "64", "--optim.lr", "1e-2", "--monitor.report", "false"]
    words += ["--data.cache_dir", str(directory / "cache")]
    return [*words, *more]


def train(directory: Path, recipe: str, *more: str) -> int:
    return main(["train", *training(directory, recipe, *more)])


def answer_of(model: Any, tokenizer: Any) -> str:
    prompt = tokenizer.apply_chat_template(
        [message("user", "call 3")], add_generation_prompt=True, return_tensors="pt"
    )
    ids = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0]
    return str(tokenizer.decode(ids[prompt["input_ids"].shape[1] :].tolist()))


ANSWER = f"{NEW[0]}x{NEW[1]}<|im_end|>"
ONE = ("--run.nproc_per_node", "1")


@pytest.mark.system
@pytest.mark.timeout(300)
def test_run_with_new_tokens_trains_resumes_and_exports(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, run = write_model(tmp_path), tmp_path / "run"
    chat_file(tmp_path)
    first = training(tmp_path, "chat", *ONE, "--train.steps", "2")
    assert "the new ones are the mean" in train_in_one_rank(first, tmp_path)
    shutil.rmtree(source)  # the run has all of it
    assert train(tmp_path, "chat", *ONE, "--train.steps", "30") == 0
    assert "resuming" in capfd.readouterr().out
    assert main(["generate", str(run), "--chat", "--prompt", "call 3", "--max-tokens", "8"]) == 0
    assert main(["evaluate", str(run)]) == 0
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    capfd.readouterr()
    more = f"{LISTED},<|more|>"
    assert train(tmp_path, "chat", *ONE, "--data.add_special_tokens", more) == 2
    assert "data.add_special_tokens=" in capfd.readouterr().err
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert answer_of(model, tokenizer) == ANSWER


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(300)
def test_lora_trains_the_rows_of_new_tokens_by_default(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A frozen row of a new token could not be told from that of another."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, rows = tmp_path / "run", rows_of(source)
    chat_file(tmp_path)
    keys = ("--optim.lr", "3e-2", "--precision.compute_dtype", "float32")
    assert train(tmp_path, "lora", *ONE, *keys, "--train.steps", "3") == 0
    # Another layout; the tokens and their rows are those of the run.
    layout = ("--run.nproc_per_node", "2", "--parallel.tp", "2")
    assert train(tmp_path, "lora", *layout, *keys, "--train.steps", "60") == 0
    job, _, _ = read_job(str(run / "job.toml"))
    assert job.lora.token_ids == (rows, rows + 1)
    state = newest_state(run)
    tables = {name for name in state if name.endswith("lora_rows.weight")}
    is_tied = json.loads((source / "config.json").read_text())["tie_word_embeddings"]
    head = [] if is_tied else ["lm_head"]
    names = {f"{table}.lora_rows.weight" for table in ("embed_tokens", *head)}
    assert (
        tables
        == {f"model.{name}" for name in names}
        | {f"optim.{name}.{key}" for name in names for key in ("exp_avg", "exp_avg_sq", "step")}
        & tables
    )
    assert all(state[f"model.{name}"].shape == (2, 64) for name in names)
    assert all(state[f"model.{name}"].any() for name in names)

    assert main(["export", str(run), str(tmp_path / "merged"), "--prove"]) == 0
    assert main(["export", str(run), str(tmp_path / "adapter"), "--adapter", "--prove"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert answer_of(merged, tokenizer) == ANSWER
    # The adapter has the tokenizer, to which PEFT resizes the base model.
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter").get_vocab() == tokenizer.get_vocab()
    adapted = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    assert answer_of(adapted, tokenizer) == ANSWER
    ids = torch.tensor([tokenizer.encode(f"call 3{NEW[0]}x{NEW[1]}")])
    with torch.no_grad():
        ours, theirs = merged(ids).logits, adapted(ids).logits
    known = theirs.shape[-1]  # without the padding of weft's table
    torch.testing.assert_close(ours[..., :known], theirs, atol=1e-3, rtol=1e-3)
