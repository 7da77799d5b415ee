"""Help, recipes, shell completion, and answers to words of other projects."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from weft.cli.completion_command import complete
from weft.cli.help_command import describe_key
from weft.cli.main import build_parser, main
from weft.config.reader import recipe_names
from weft.config.schema import keys
from weft.models.decoder_config import DecoderConfig


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def test_module_weft_is_the_command() -> None:
    command = [sys.executable, "-m", "weft", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("weft ")


def test_help_names_every_command_in_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "help")
    parser = build_parser()
    assert [*chain(*parser.groups.values())] == [*parser.subcommands()]
    assert all(re.search(rf"^  {name} ", text, re.MULTILINE) for name in parser.subcommands())
    assert max(map(len, text.splitlines())) <= 100


def test_help_key_has_values_default_and_names_elsewhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = " ".join(output(capsys, "help", "optim.lr").split())
    assert text.startswith("optim.lr peak learning rate Values: a number, above 0. Default: 0.0003")
    assert "--lr (Megatron-LM), learning_rate (Hugging Face)" in text
    text = " ".join(output(capsys, "help", "model.num_experts", "optim.groups").split())
    assert text.startswith("model.num_experts experts per layer;")
    assert "Values: a list of tables with the fields params, lr_mult," in text
    text = " ".join(output(capsys, "help", "parallel.reshard_after_forward").split())
    assert "Values: " in text
    assert "any value" not in text


def test_describe_key_every_key_has_values() -> None:
    for key in keys():
        assert "any value" not in describe_key(key), key


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["train"], "usage: weft train"),
        (["data", "prepare"], "usage: weft data prepare"),
        (["optim"], "optim.weight_decay"),
        (["keys"], "launch.options"),
    ],
)
def test_help_explains_commands_sections_and_all_keys(
    capsys: pytest.CaptureFixture[str], words: list[str], part: str
) -> None:
    assert part in output(capsys, "help", *words)


@pytest.mark.parametrize(
    ("topic", "remedy"),
    [("optm", "Did you mean 'optim'?"), ("learning_rate", "Use optim.lr."), ("xyz", "'weft help")],
)
def test_help_unknown_topic_has_a_suggestion(
    capsys: pytest.CaptureFixture[str], topic: str, remedy: str
) -> None:
    assert main(["help", topic]) == 2
    assert remedy in capsys.readouterr().err


@pytest.mark.parametrize(
    ("topic", "first"),
    [
        ("--parallel.tp", "parallel.tp\n"),
        ("--parallel.tp=2", "parallel.tp\n"),
        ("--nodes", "run.nodes\n"),
        ("--dry-run", "weft train --dry-run: "),
        ("--samples", "weft data inspect --samples: documents to print"),
        ("--version", "weft --version: "),
    ],
)
def test_help_option_is_answered(
    capsys: pytest.CaptureFixture[str], topic: str, first: str
) -> None:
    assert f"\n{first}" in "\n" + output(capsys, "help", topic)


@pytest.mark.parametrize("topic", ["model", "keys"])
def test_help_lists_the_fields_of_the_model(capsys: pytest.CaptureFixture[str], topic: str) -> None:
    text = output(capsys, "help", topic)
    for name, field in DecoderConfig.model_fields.items():
        assert re.search(
            rf"^  model\.{name} +\S*{re.escape(json.dumps(field.default))[:9]}", text, re.M
        )
    assert "Fields of the model" in text
    assert "weft help model" in output(capsys, "help", "train")


@pytest.mark.parametrize(
    ("topic", "key"),
    [
        ("model.hidden_size", "model.dim"),
        ("--hidden-size", "model.dim"),
        ("--num-layers", "model.num_layers"),
        ("n_layer", "model.num_layers"),
        ("n_head", "model.num_heads"),
        ("n_embd", "model.dim"),
        ("num_hidden_layers", "model.num_layers"),
        ("intermediate_size", "model.ffn_dim"),
        ("max_position_embeddings", "model.max_seq_len"),
        ("num_key_value_heads", "model.num_kv_heads"),
    ],
)
def test_name_of_a_field_elsewhere_is_answered_with_the_field(
    capsys: pytest.CaptureFixture[str], topic: str, key: str
) -> None:
    option = f"--{topic.lstrip('-')}"
    for words in (["help", option[2:]], ["help", option], ["plan", "demo", option, "8"]):
        assert main(words) == 2
        assert f"Use {key}." in capsys.readouterr().err


def test_help_word_lists_the_keys_about_it(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "help", "batch")
    assert "train.global_batch_size" in text
    assert "train.microbatch_size" in text
    assert "optim.lr " not in text
    assert "model.sliding_window" in output(capsys, "help", "window")


def test_weft_without_words_gives_the_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys) == output(capsys, "help")


def test_help_keys_fit_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for width in (60, 100, 160):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = output(capsys, "help", "keys").splitlines()
        assert max(map(len, lines)) <= width
        words = " ".join(lines).split()
        assert set(keys()) <= set(words)


def test_help_is_in_color_on_a_terminal_only() -> None:
    controller, terminal = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "100"}
    with subprocess.Popen(
        [sys.executable, "-m", "weft", "help"], stdout=terminal, env=environment
    ) as process:
        os.close(terminal)
        text = b""
        try:
            while part := os.read(controller, 65536):
                text += part
        except OSError:  # the process has closed the terminal
            pass
    os.close(controller)
    assert process.returncode == 0
    assert b"\x1b[1mTrain:\x1b[0m" in text
    assert b"\x1b[36mplan\x1b[0m" in text


def test_recipes_lists_every_recipe_with_its_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(output(capsys, "recipes", "--json"))
    assert [row["name"] for row in rows] == recipe_names()
    assert all(row["purpose"] and len(row["purpose"]) < 240 for row in rows)
    by_name = {row["name"]: row for row in rows}
    assert by_name["llama3-70b"]["cluster"] == "32x8xH100"
    models = {name: by_name[name]["model"] for name in ("llama3-70b", "lora", "mics-1t")}
    assert models == {"llama3-70b": "llama-70b", "lora": "any", "mics-1t": "llama"}
    text = output(capsys, "recipes")
    assert all(re.search(rf"^{name} ", text, re.MULTILINE) for name in recipe_names())


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("--resume", "--resume is not a known key. Run the same command again."),
        ("--batch-size=8", "batch_size=8 is not a known key. Use train.global_batch_size."),
        ("--output_dir=x", "is not a known key. Use run.dir."),
        ("--warmup-steps=9", "is not a known key. Use optim.warmup_steps."),
        ("--train.learning_rate=9", "is not a known key. Use optim.lr."),
        ("--num-epochs=3", "is not a known key. Use train.epochs."),
        ("--gradient-accumulation-steps=4", "Set train.global_batch_size and"),
    ],
)
def test_train_word_of_another_project_names_the_key(
    capsys: pytest.CaptureFixture[str], flag: str, answer: str
) -> None:
    assert main(["train", "demo", flag, "--dry-run"]) == 2
    assert answer in capsys.readouterr().err


def test_recipe_may_be_a_run_directory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('extends = "demo"\n[train]\nsteps = 7\n')
    data = json.loads(output(capsys, "plan", str(tmp_path), "--json"))
    assert data["num_steps"] == 7


def test_train_dry_run_is_a_page_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "demo", "--dry-run", "--run.nproc_per_node", "2"]
    assert output(capsys, *words).startswith("demo on 2 CPU processes\n  model      llama-toy")
    assert json.loads(output(capsys, *words, "--json"))["dp_shard"] == 2
    assert main(["train", "demo", "--json"]) == 2
    assert "--json=true needs --dry-run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["pl"], {"plan"}),
        (["data", ""], {"prepare", "inspect", "verify"}),
        (["train", "moe"], {"moe-demo"}),
        (
            ["plan", "demo", "--parallel.cp_"],
            {"--parallel.cp_method", "--parallel.cp_load_balance"},
        ),
        (["train", "demo", "--monitor.spans", ""], {"true", "false"}),
        (["train", "demo", "--activation_checkpoint.mode", "s"], {"selective"}),
        (["completion", ""], {"bash", "zsh", "fish"}),
        (["report", ""], set()),
    ],
)
def test_complete_offers_commands_keys_values_and_recipes(
    words: list[str], expected: set[str]
) -> None:
    assert set(complete(build_parser(), words)) == expected


def test_completion_works_in_bash(tmp_path: Path) -> None:
    script = tmp_path / "complete.sh"
    script.write_text(
        f'weft() {{ "{sys.executable}" -m weft "$@"; }}\n'
        'eval "$(weft completion bash)"\n'
        "COMP_WORDS=(weft train moe) COMP_CWORD=2\n_weft\n"
        'echo "${COMPREPLY[@]}"\ncomplete -p weft\n'
    )
    result = subprocess.run(["bash", script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [
        "moe-demo",
        "complete -o bashdefault -o default -F _weft weft",
    ]
