"""LLaMA-Factory: its YAML, and the entries of its ``dataset_info.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.cli.main import main
from weft.config.errors import InvalidConfig
from weft.config.reader import read_job
from weft.conversion.dataset_info import convert_entry
from weft.conversion.recipe_translation import translate_file, write_recipe
from weft.data.chat_rows import RowFormat, parse_line

TURNS = [("user", "what is it?"), ("assistant", "it is what it is")]
HISTORY = [("user", "before?"), ("assistant", "that")]
SHAREGPT = {"conversations": [{"from": "human", "value": "what is it?"}]}
ANSWERS = {
    "chosen": {"from": "gpt", "value": "it is what it is"},
    "rejected": {"from": "gpt", "value": "no"},
}

# An entry as in LLaMA-Factory's data/README.md, a row, and the turns that the row has.
ENTRIES: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "alpaca": (
        {"file_name": "a.json"},
        {"instruction": "what is it?", "input": "", "output": "it is what it is"},
        TURNS,
    ),
    "alpaca columns": (
        {
            "file_name": "a.json",
            "columns": {"prompt": "ask", "response": "reply", "system": "sys", "history": "past"},
        },
        {
            **{"ask": "what is it?", "reply": "it is what it is", "sys": "be brief"},
            "past": [["before?", "that"]],
        },
        [("system", "be brief"), *HISTORY, *TURNS],
    ),
    # As firefly: its prompt is the column that is the query elsewhere.
    "prompt in input": (
        {"file_name": "a.json", "columns": {"prompt": "input", "response": "target"}},
        {"kind": "x", "input": "what is it?", "target": "it is what it is"},
        TURNS,
    ),
    "sharegpt": (
        {"file_name": "a.json", "formatting": "sharegpt"},
        {"conversations": [*SHAREGPT["conversations"], ANSWERS["chosen"]]},
        TURNS,
    ),
    # As mllm_demo, without its images.
    "openai": (
        {
            **{"file_name": "a.json", "formatting": "sharegpt", "columns": {"messages": "dialog"}},
            "tags": {
                **{"role_tag": "who", "content_tag": "says"},
                **{"user_tag": "client", "assistant_tag": "agent", "system_tag": "boss"},
            },
        },
        {
            "dialog": [
                {"who": "boss", "says": "be brief"},
                {"who": "client", "says": "what is it?"},
                {"who": "agent", "says": "it is what it is"},
            ]
        },
        [("system", "be brief"), *TURNS],
    ),
    "ranking": (
        {
            **{"file_name": "a.json", "ranking": True},
            "columns": {"prompt": "q", "chosen": "good", "rejected": "bad"},
        },
        {"q": "what is it?", "good": "it is what it is", "bad": "no"},
        [TURNS, [TURNS[0], ("assistant", "no")]],
    ),
    "kto": (
        {
            **{"file_name": "a.json", "formatting": "sharegpt"},
            "columns": {"messages": "conversations", "kto_tag": "kto_tag"},
        },
        {"conversations": [*SHAREGPT["conversations"], ANSWERS["chosen"]], "kto_tag": True},
        TURNS,
    ),
    "ranking of sharegpt": (
        {
            **{"file_name": "a.json", "formatting": "sharegpt", "ranking": True},
            "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
        },
        SHAREGPT | ANSWERS,
        [TURNS, [TURNS[0], ("assistant", "no")]],
    ),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_entry_of_each_documented_form_reads_its_rows(name: str) -> None:
    entry, row, turns = ENTRIES[name]
    found = convert_entry({name: entry}, name, Path("/data"), "sft")
    assert found.path == "/data/a.json"
    assert found.unsupported == {}
    preferences = found.format == "preferences"
    assert preferences == bool(entry.get("ranking"))
    is_unpaired = found.format == "unpaired"
    assert is_unpaired == (name == "kto")
    form = RowFormat(preferences, found.fields, found.roles, is_unpaired)
    examples = parse_line(json.dumps(row).encode(), form)
    parsed = [[(m["role"], m["content"]) for m in example.messages] for example in examples]
    assert parsed == (turns if preferences else [turns])


def test_entry_with_the_names_of_weft_needs_no_mapping() -> None:
    info = {"a": ENTRIES["alpaca"][0], "b": ENTRIES["sharegpt"][0]}
    for name in info:
        found = convert_entry(info, name, Path("/data"), "sft")
        assert (found.fields, found.roles) == ({}, {})


@pytest.mark.parametrize(
    ("entry", "path", "unsupported"),
    [
        ({"hf_hub_url": "org/name"}, "hf://org/name", ""),
        ({"hf_hub_url": "org/name", "subset": "en", "split": "v1"}, "hf://org/name:en@v1", ""),
        ({"cloud_file_name": "s3://bucket/a.jsonl"}, "s3://bucket/a.jsonl", ""),
        ({"ms_hub_url": "org/name"}, "", "ms_hub_url"),
        ({"file_name": "a.json", "columns": {"images": "images"}}, "/data/a.json", "images"),
        ({"file_name": "a.json", "num_samples": 5}, "/data/a.json", "num_samples"),
    ],
)
def test_entry_names_a_path_or_a_remedy(entry: dict[str, Any], path: str, unsupported: str) -> None:
    found = convert_entry({"x": entry}, "x", Path("/data"), "sft")
    assert found.path == path
    assert len(found.unsupported) == bool(unsupported)
    assert all(unsupported in key for key in found.unsupported)


def test_entry_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="alpaca_en"):
        convert_entry({"alpaca_en": {}}, "alpaca_enn", Path("/data"), "sft")


# --------------------------------------------------------------------------- the YAML

YAML = """
model_name_or_path: MODEL
stage: STAGE
do_train: true
finetuning_type: lora
lora_rank: 4
lora_target: all
dataset: DATASET
dataset_dir: data
template: qwen3
cutoff_len: 384
preprocessing_num_workers: 16
output_dir: OUTPUT
logging_steps: 1
plot_loss: true
overwrite_output_dir: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-3
max_steps: 2
lr_scheduler_type: cosine
bf16: false
report_to: none
"""


def write_yaml(directory: Path, dataset: str, stage: str = "sft", more: str = "") -> Path:
    (directory / "data").mkdir(exist_ok=True)
    info = {name.replace(" ", "_"): entry for name, (entry, _, _) in ENTRIES.items()}
    info["documents"] = {"file_name": "a.json", "columns": {"prompt": "text"}}
    (directory / "data" / "dataset_info.json").write_text(json.dumps(info))
    text = YAML.replace("MODEL", str(directory / "model")).replace("STAGE", stage)
    path = directory / "train.yaml"
    path.write_text(
        text.replace("DATASET", dataset).replace("OUTPUT", str(directory / "run")) + more
    )
    return path


def test_yaml_sets_the_keys_of_its_defaults(tmp_path: Path) -> None:
    recipe = translate_file(write_yaml(tmp_path, "openai")).recipe
    wanted = {
        "data.path": str(tmp_path / "data" / "a.json"),
        "data.format": "chat",
        "data.fields": {"messages": "dialog", "role": "who", "content": "says"},
        "data.roles": {"client": "user", "agent": "assistant", "boss": "system"},
        "data.validation_fraction": 0.0,
        "data.overlong": "truncate",
        "train.seq_len": 384,
        "train.global_batch_size": 2,
        "lora.rank": 4,
        "lora.alpha": 8,
        "lora.dropout": 0.0,
        "lora.targets": [],
        "optim.lr": 1e-3,
        "activation_checkpoint.mode": "full",
    }
    assert {key: recipe.get(key) for key in wanted} == wanted


def test_yaml_of_each_stage_has_its_format(tmp_path: Path) -> None:
    dpo = translate_file(write_yaml(tmp_path, "ranking", "dpo", "pref_beta: 0.2\n"))
    assert dpo.recipe["data.format"] == "preferences"
    assert dpo.recipe["train.objective"] == "dpo"
    assert dpo.recipe["train.preference_beta"] == 0.2
    assert dpo.recipe["data.overlong"] == "skip"
    reward = translate_file(write_yaml(tmp_path, "ranking", "rm")).recipe
    keys = ("data.format", "train.objective", "data.overlong")
    assert [reward[key] for key in keys] == ["preferences", "reward", "skip"]
    text = translate_file(write_yaml(tmp_path, "documents", "pt")).recipe
    assert (text["data.format"], text.get("data.text_field")) == ("text", "text")
    assert text["data.packing"] == "best_fit"
    kto = translate_file(write_yaml(tmp_path, "kto", "kto")).recipe
    keys = ("data.format", "train.objective", "train.preference_beta", "data.overlong")
    assert [kto[key] for key in keys] == ["unpaired", "kto", 0.1, "skip"]
    with pytest.raises(InvalidConfig, match="ppo"):
        translate_file(write_yaml(tmp_path, "alpaca", "ppo"))


def test_yaml_with_new_tokens_grows_the_vocabulary(tmp_path: Path) -> None:
    more = "add_tokens: <a>,<b>\nadd_special_tokens: <|c|>\nresize_vocab: true\n"
    more += "additional_target: embed_tokens,lm_head\n"
    found = translate_file(write_yaml(tmp_path, "openai", more=more))
    assert found.recipe["data.add_tokens"] == ["<a>", "<b>"]
    assert found.recipe["data.add_special_tokens"] == ["<|c|>"]
    assert found.recipe["lora.modules_to_save"] == ["embed_tokens", "lm_head"]
    assert "resize_vocab" in found.ignored
    assert not any("token" in name or "target" in name for name in found.unsupported)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("pref_loss: ipo\npref_ftx: 0.3\n", {"objective": "ipo", "sft_weight": 0.3}),
        ("pref_loss: orpo\npref_beta: 0.2\n", {"objective": "orpo", "preference_beta": 0.2}),
        (
            "pref_loss: simpo\nsimpo_gamma: 0.7\npref_beta: 2.0\n",
            {
                "objective": "simpo",
                "simpo_gamma": 0.7,
                "preference_beta": 2.0,
                "sft_weight": 0.0,
            },
        ),
        ("pref_loss: simpo\npref_ftx: 0.4\n", {"objective": "simpo", "sft_weight": 0.4}),
        (
            "dpo_label_smoothing: 0.1\n",
            {"objective": "dpo", "preference_label_smoothing": 0.1, "preference_beta": 0.1},
        ),
    ],
)
def test_yaml_of_each_loss_of_pairs_has_its_objective(
    tmp_path: Path, more: str, expected: dict[str, Any]
) -> None:
    found = translate_file(write_yaml(tmp_path, "ranking", "dpo", more))
    assert {key: found.recipe.get(f"train.{key}") for key in expected} == expected
    assert found.recipe["data.format"] == "preferences"
    assert found.unsupported == {}


def test_yaml_of_kto_reads_the_tag_of_good_answers(tmp_path: Path) -> None:
    more = "pref_beta: 0.3\nkto_rejected_weight: 0.5\n"
    found = translate_file(write_yaml(tmp_path, "kto", "kto", more))
    keys = ("data.format", "train.objective", "train.preference_beta", "train.undesirable_weight")
    assert [found.recipe[key] for key in keys] == ["unpaired", "kto", 0.3, 0.5]
    entry, row, _ = ENTRIES["kto"]
    fields = found.recipe["data.fields"]
    assert fields["label"] == entry["columns"]["kto_tag"]
    [example] = parse_line(json.dumps(row).encode(), RowFormat(fields=fields, unpaired=True))
    assert example.label is True
    assert found.unsupported == {}


def test_yaml_of_several_data_sets_and_options(tmp_path: Path) -> None:
    more = "val_size: 0.1\nmask_history: true\nenable_thinking: false\nquantization_bit: 4\n"
    more += "max_samples: 10\n"
    found = translate_file(write_yaml(tmp_path, "alpaca", more=more))
    assert found.recipe["data.validation_fraction"] == 0.1
    assert found.recipe["data.train_turns"] == "last"
    assert found.recipe["data.chat_template_args"] == {"enable_thinking": False}
    assert found.recipe["lora.quantize"] == "nf4"
    assert list(found.unsupported) == ["max_samples = 10"]
    two = translate_file(write_yaml(tmp_path, "alpaca", more="eval_dataset: alpaca\n")).recipe
    assert two["data.validation_path"] == two["data.path"]
    assert "data.validation_fraction" not in two
    info = json.loads((tmp_path / "data" / "dataset_info.json").read_text())
    info["more"] = {"file_name": "b.json"}
    path = write_yaml(tmp_path, "alpaca,more", more='interleave_probs: "0.7,0.3"\n')
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    mixture = translate_file(path).recipe["data.mixture"]
    assert mixture == {str(tmp_path / "data" / f"{n}.json"): p for n, p in (("a", 0.7), ("b", 0.3))}


def test_yaml_recipe_says_whose_names_its_keys_come_from(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, "openai")
    text = write_recipe(translate_file(path), path.name)
    assert "seq_len = 384 # cutoff_len" in text
    assert "rank = 4 # lora_rank" in text
    (tmp_path / "mine.toml").write_text(text)
    _, _, errors = read_job(str(tmp_path / "mine.toml"))
    assert errors == []


def test_yaml_without_its_dataset_info_names_the_file(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, "alpaca")
    (tmp_path / "data" / "dataset_info.json").unlink()
    with pytest.raises(InvalidConfig, match=r"dataset_dir=.*dataset_info\.json"):
        translate_file(path)


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["openai", "ranking of sharegpt"])
def test_yaml_and_its_data_train_in_two_commands(name: str, tmp_path: Path) -> None:
    from tests.conversion.test_tuned_chats import write_model

    write_model("qwen3", tmp_path / "model")
    entry, row, _ = ENTRIES[name]
    stage = "dpo" if entry.get("ranking") else "sft"
    path = write_yaml(tmp_path, name.replace(" ", "_"), stage)
    rows = [{**row, "id": number} for number in range(6)]
    (tmp_path / "data" / "a.json").write_text(json.dumps(rows))
    recipe = str(tmp_path / "mine.toml")
    assert main(["recipe", "from", str(path), "--cluster", "1x1xH100", "-o", recipe]) == 0
    assert main(["train", recipe, "--data.cache_dir", str(tmp_path / "cache")]) == 0
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 2
