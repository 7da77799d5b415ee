"""Configuration errors: all reported at once, without a traceback, with exit status 2."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from weft.cli.main import build_parser, main
from weft.config.reader import RECIPES_OF_METHODS, read_job
from weft.planning.plan import Machine


def rejected(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Run a command that must fail; return its problems, one per line."""
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return [line.strip() for line in captured.err.splitlines()[1:]]


def test_train_unknown_key_has_a_suggestion(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (line,) = rejected(capsys, "train", "demo", "--train.step", "5")
    assert line == "train.step=5 is not a known key. Did you mean 'train.steps'?"


def test_train_flag_of_another_tool_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = rejected(capsys, "train", "demo", "--learning-rate", "5", "--dry-run")
    assert line.startswith("learning_rate=5 is not a known key")


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("train.steps", "many", "must be a whole number"),
        ("train.steps", "2.5", "must be a whole number"),
        ("train.steps", "0", "must be at least 1"),
        ("optim.lr", "fast", "must be a number"),
        ("optim.lr", "nan", "must be a finite number"),
        ("optim.beta1", "1", "must be less than 1"),
        ("monitor.layer_grad_norms", "perhaps", "must be true or false"),
        ("monitor.trackers", "wandbb", "Did you mean 'wandb'?"),
        ("data.packing", "boxes", "must be 'windows', 'documents' or 'best_fit'"),
        ("run.nproc_per_node", "-1", "must be at least 1"),
        ("model.num_layers", "two", "must be a whole number"),
        ("model.preset", "9b", "is not a known preset"),
        ("model.kind", "lama", "Did you mean 'llama'?"),
        ("optim.name", "adm", "Use one of adamw, muon"),
        ("optim.schedule", "nowhere:decay", "No module named 'nowhere'"),
        ("data.path", "/no/such/file", "does not exist"),
        ("data.tokenizer", "/no/tokenizer.json", "does not exist"),
    ],
)
def test_train_bad_value_is_refused(
    capsys: pytest.CaptureFixture[str], key: str, value: str, rule: str
) -> None:
    (line,) = rejected(capsys, "train", "demo", f"--{key}", value)
    assert line.startswith(f"{key}=")
    assert rule in line


def test_types_in_toml_are_strict(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('extends = "demo"\n[train]\nsteps = "100"\n[run]\nnproc_per_node = 2.5\n')
    first, second = rejected(capsys, "train", str(recipe))
    assert first.startswith('train.steps="100" must be a whole number')
    assert second.startswith("run.nproc_per_node=2.5 must be a whole number or must be 'auto'")


def test_train_all_mistakes_are_reported_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Mistakes are in recipe, command line, plan and files; consequences are not reported."""
    recipe = tmp_path / "mine.toml"
    recipe.write_text('extends = "demo"\nstray = 1\n[trian]\nsteps = 1\n[optim]\nlr = "x"\n')
    lines = rejected(
        capsys,
        "train",
        str(recipe),
        "--train.seq_len=long",
        "--model.num_heads=7",
        "--run.nproc_per_node=3",
        "--data.path=/no/such/file",
        "--optim.name=adm",
    )
    keys = [line.split("=")[0].split()[0] for line in lines]
    assert keys == [
        "stray",
        "[trian]",
        "optim.lr",
        "train.seq_len",
        "model.num_heads",
        "train.global_batch_size",
        "data.path",
        "optim.name",
    ]
    assert all(re.search(r"\. [A-Z].*[.?]$", line) for line in lines)  # each with a remedy


@pytest.mark.parametrize(
    ("overrides", "key", "remedy"),
    [
        (
            ["--run.nproc_per_node", "3"],
            "train.global_batch_size=16",
            "Use 15 or 18, or run.nproc_per_node=1 or 2",
        ),
        (
            ["--run.nproc_per_node", "32"],
            "train.global_batch_size=16",
            "Use 32, or run.nproc_per_node",
        ),
        (
            ["--run.nproc_per_node", "4", "--parallel.dp_shard", "3"],
            "parallel.dp_shard=3",
            "Use 4, or",
        ),
        (
            ["--run.nproc_per_node", "4", "--parallel.dp_replicate", "3"],
            "parallel.dp_replicate",
            "1, 2 or 4",
        ),
        (["--train.seq_len", "4096"], "train.seq_len=4096", "--model.max_seq_len 4096"),
        (["--data.vocab_size", "9999"], "data.vocab_size=9999", "--model.vocab_size 9999"),
        (["--model.num_kv_heads", "4"], "model.num_kv_heads=4", "1, 2, 3 or 6"),
        (["--run.device", "cuda"], "run.device", "Use cpu, or auto"),
    ],
)
def test_train_impossible_plan_has_a_remedy(
    capsys: pytest.CaptureFixture[str], overrides: list[str], key: str, remedy: str
) -> None:
    common = ["--run.device", "cpu", "--train.global_batch_size", "16"]
    (line,) = rejected(capsys, "train", "demo", *common, *overrides)
    assert line.startswith(key)
    assert remedy in line


def test_train_unreadable_recipe_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (line,) = rejected(capsys, "train", "dmeo")
    assert "Did you mean 'demo'?" in line
    broken = tmp_path / "broken.toml"
    broken.write_text("[train\n")
    (line,) = rejected(capsys, "train", str(broken))
    assert "cannot be read as TOML" in line
    assert "line 1" in line
    a, b = tmp_path / "a.toml", tmp_path / "b.toml"
    a.write_text('extends = "b.toml"\n')
    b.write_text('extends = "a.toml"\n')
    (line,) = rejected(capsys, "train", str(a))
    assert "a.toml -> b.toml -> a.toml" in line
    a.write_text('extends = "c.toml"\n')
    (line,) = rejected(capsys, "train", str(a))
    assert line.startswith('extends="c.toml" is not a known recipe')


@pytest.mark.parametrize("method", RECIPES_OF_METHODS)
def test_train_method_in_place_of_a_recipe_names_the_recipe(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = rejected(capsys, "train", method)
    words = line.rpartition("Use ")[2].rstrip(".").partition(",")[0].split()
    options = dict(zip(words[1::2], words[2::2], strict=True))
    recipe = words[0]
    overrides = [(key.removeprefix("--"), text) for key, text in options.items()]
    job, _, errors = read_job(recipe, overrides)
    assert errors == []
    assert method in ("sft", "rm") or job.train.objective == method


def test_train_missing_values_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = rejected(capsys, "train", "demo", "--train.steps", "--optim.lr")
    assert first.startswith("--train.steps needs a value")
    assert second.startswith("--optim.lr needs a value")


def test_train_missing_values_and_other_mistakes_are_reported_together(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = rejected(capsys, "train", "demo", "--train.stepz", "5", "--train.lr")
    assert first.startswith("--train.lr is not a known key. Use optim.lr.")
    assert second.startswith("train.stepz=5 is not a known key")


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("data.path", "", "must not be empty"),
        ("run.dir", "", "must not be empty"),
        ("run.dir", "a\0b", "must not contain control characters"),
        ("run.dir", "a\nb", "must not contain control characters"),
        ("data.mixture", "a\x1bb=1", "must not contain control characters"),
        ("data.path", "x" * 300, "cannot be read: File name too long"),
        ("run.dir", "/tmp/" + "x" * 300, "cannot be written: File name too long"),
        ("data.path", "~nosuchuser/x", "does not exist"),
        ("model.dim", "9" * 50, "at most"),
        ("model.dim", "9" * 5000, "whole number"),
        ("train.steps", "9" * 5000, "whole number"),
        ("train.steps", "[" * 2000, "whole number"),
        ("train.global_batch_size", "1000000000000", "at most 2147483647"),
        ("parallel.dp_replicate", "100000000000", "at most 2147483647"),
        ("train.seed", "18446744073709551616", "at most"),
        ("model.dim", "\udcff", "is not UTF-8 text"),
        ("optim.name", ":foo", "cannot be imported"),
        ("optim.schedule", "..x:y", "cannot be imported"),
        ("modle.dim", "5", "Did you mean 'model.dim'?"),
    ],
)
def test_train_odd_value_is_refused(
    capsys: pytest.CaptureFixture[str], key: str, value: str, rule: str
) -> None:
    (line,) = rejected(capsys, "train", "demo", f"--{key}", value)
    assert line.startswith(f"{key}=")
    assert rule in line


def test_train_odd_recipe_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_bytes(b'\xef\xbb\xbfextends = "demo"\r\n[run]\r\ndir = 2024-01-01\r\n')
    (line,) = rejected(capsys, "train", str(recipe))
    assert line.startswith("run.dir=2024-01-01 must be a string")
    for text in ("[train]\nsteps = " + "9" * 5000, "x = " + "[" * 5000, "\0"):
        recipe.write_text(text)
        (line,) = rejected(capsys, "train", str(recipe))
        assert "cannot be read as TOML" in line
    (line,) = rejected(capsys, "train", "x" * 300)
    assert "is not a known recipe" in line


def test_train_remedies_can_be_followed(capsys: pytest.CaptureFixture[str]) -> None:
    """No number of ranks is suggested that the rest of the job rules out."""
    common = ["--run.device", "cpu", "--train.global_batch_size", "8"]
    (line,) = rejected(capsys, "train", "demo", *common, "--parallel.dp_replicate", "3")
    assert line.endswith("Use 6 or 9.")
    extra = ["--parallel.dp_replicate", "2", "--run.nproc_per_node", "6"]
    (line,) = rejected(capsys, "train", "demo", *common, *extra)
    assert line.endswith("Use 6 or 12, or run.nproc_per_node=2 or 4.")


def test_train_user_directory_with_a_store_json_is_text(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "store.json").write_text("{}")
    arguments = ["--data.path", str(tmp_path), "--data.cache_dir", str(tmp_path / "cache")]
    (line,) = rejected(capsys, "train", "demo", *arguments)
    assert "too little text" in line  # read as text; no store is deleted


def test_train_unwritable_directories_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The paths cannot be written by root either: one is below a file, one is in /proc."""
    file = tmp_path / "file"
    file.write_text("")
    for directory in (str(file / "run"), "/proc/weft/run"):
        (line,) = rejected(capsys, "train", "demo", "--run.dir", directory)
        assert line.startswith(f'run.dir="{directory}" cannot be written')
    for directory in (str(file / "cache"), "/proc/weft"):
        (line,) = rejected(
            capsys,
            "train",
            "demo",
            "--run.dir",
            str(tmp_path / "run"),
            "--data.cache_dir",
            directory,
        )
        assert line.startswith("data.cache_dir")
    assert not (tmp_path / "run").exists()


def test_train_bad_text_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    empty, latin, short = tmp_path / "empty.txt", tmp_path / "latin.txt", tmp_path / "short.txt"
    empty.write_bytes(b"")
    latin.write_bytes("ab\ncdé\n".encode("latin-1") * 999)
    short.write_text("too little\n")
    common = ["--run.dir", str(tmp_path / "run"), "--data.cache_dir", str(tmp_path / "cache")]
    subset = tmp_path / "few.txt"
    subset.write_text("a few lines\n" * 30)
    for file, key, rule in (
        (empty, "data.path", "empty"),
        (latin, "data.path", "line 2"),
        (short, "data.path", "too little text"),
        (subset, "train.seq_len", "at least 257 tokens"),
    ):
        lines = rejected(capsys, "train", "demo", "--data.path", str(file), *common)
        assert lines[0].startswith(f"{key}=")
        assert rule in "\n".join(lines)
    assert not (tmp_path / "run").exists()


def test_train_tokenizer_of_another_store_is_refused(
    capsys: pytest.CaptureFixture[str], store_path: Path, text_dir: Path, tmp_path: Path
) -> None:
    from weft.data.tokenizer_training import train_tokenizer

    other = tmp_path / "tokenizer.json"
    train_tokenizer([(text_dir / "ast.py").read_text()], 300).save(str(other))
    arguments = ["--data.path", str(store_path), "--run.dir", str(tmp_path / "run")]
    (line,) = rejected(capsys, "train", "demo", *arguments, "--data.tokenizer", str(other))
    assert line.startswith(f'data.tokenizer="{other}" does not match the store')


def test_train_tokenizer_larger_than_the_model_is_refused(
    capsys: pytest.CaptureFixture[str], store_path: Path, tmp_path: Path
) -> None:
    arguments = ["--data.path", str(store_path), "--run.dir", str(tmp_path / "run")]
    arguments += ["--model.vocab_size", "400", "--data.vocab_size", "300"]
    (line,) = rejected(capsys, "train", "demo", *arguments)
    assert "has 512 entries, but model.vocab_size is 400" in line
    assert not (tmp_path / "run").exists()


def test_train_another_job_in_a_run_dir_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from weft.config.reader import read_job
    from weft.config.writer import to_toml

    job, base, _ = read_job("demo", [("train.seed", "7")])
    (tmp_path / "job.toml").write_text(to_toml(job, "demo", base))
    checkpoint = tmp_path / "checkpoints/step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    lines = rejected(capsys, "train", "demo", "--run.dir", str(tmp_path), "--model.num_layers", "4")
    assert [line.split("=")[0] for line in lines] == ["model.num_layers", "train.seed"]
    assert "was started with 7" in lines[1]
    (tmp_path / "job.toml").unlink()
    (line,) = rejected(capsys, "train", "demo", "--run.dir", str(tmp_path))
    assert "has checkpoints but no job.toml" in line


def test_train_dry_run_prints_the_plan_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    assert (
        main(
            [
                *["train", "demo", "--dry-run", "--json"],
                *["--run.dir", str(run_dir), "--run.nproc_per_node", "2"],
            ]
        )
        == 0
    )
    plan = json.loads(capsys.readouterr().out)
    assert (plan["world_size"], plan["dp_shard"], plan["local_batch_size"]) == (2, 2, 4)
    assert not run_dir.exists()


def test_plan_of_a_remote_cluster_starts_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text, rank map and JSON need no process, no file and no network access."""
    monkeypatch.chdir(tmp_path)
    missing = ["--data.path", "/no/such/file"]
    assert main(["plan", "paper/llama3-405b", *missing, "--rank-map"]) == 0
    assert "512 ranks on 64 nodes of 8\n" in capsys.readouterr().out
    common = ["plan", "paper/llama3-8b", *missing, "--model.num_layers=4"]
    assert main([*common, "--train.global_batch_size=128"]) == 0
    assert "paper/llama3-8b on 16 nodes of 8 H100\n" in capsys.readouterr().out
    common += ["--parallel.pp=2", "--train.global_batch_size=1024"]
    extra = ["--cluster", "128x8xH200", "--parallel.dp_replicate=2", "--json"]
    assert main([*common, *extra]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert (tree["world_size"], tree["dp_replicate"], tree["pp"]) == (1024, 2, 2)
    assert main([*common, "--cluster=32x8xH200", "--parallel.dp_shard=128", "--rank-map"]) == 0
    assert "256 ranks on 32 nodes of 8\n" in capsys.readouterr().out
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("300K", 300_000), ("1.5e6", 1_500_000), ("0.5m", 500_000), ("2048", 2048), ("1", 1)],
)
def test_plan_tokens_decide_the_steps(
    capsys: pytest.CaptureFixture[str], text: str, tokens: int
) -> None:
    words = ["--tokens", text, "--mtbf", "30m", "--json"]
    assert main(["plan", "demo", "--cluster", "2xH100", *words]) == 0
    plan = json.loads(capsys.readouterr().out)
    steps = -(-tokens // plan["tokens_per_step"])
    assert plan["num_steps"] == plan["whole_run"]["steps"] == steps
    assert plan["run_seconds"] == pytest.approx(steps * plan["step_seconds"])
    assert plan["whole_run"]["mtbf_seconds"] == 1800


TINY_QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("MODEL", "chat --model.path MODEL"),
        ("MODEL --lora 4", "lora --model.path MODEL --lora.rank 4"),
        ("demo --lora 4", "demo --lora.rank 4"),
    ],
)
def test_plan_short_forms_are_the_recipes_that_they_stand_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, short: str, long: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_QWEN3))
    outputs = []
    for text in (short, long):
        words = text.replace("MODEL", str(tmp_path)).split()
        assert main(["plan", *words, "--cluster", "2xA100", "--json"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    words = [word.replace("MODEL", str(tmp_path)) for word in short.split()]
    assert main(["plan", *words, "--cluster", "2xA100", "--rank-map"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == f"weft plan {long}".replace("MODEL", str(tmp_path))


def test_plan_short_forms_mistakes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = rejected(capsys, "plan", "Qwen/Qwen3-8B", "--cluster", "2xA100")
    assert line.endswith("Check the path; a model of the Hub is hf://Qwen/Qwen3-8B.")
    (line,) = rejected(capsys, "plan", "paper/llama3-8", "--cluster", "2xA100")
    assert "paper/llama3-8b, " in line
    (line,) = rejected(capsys, "plan", "demo", "--lora", "4", "--lora.rank", "4")
    assert line == '--lora="4" is short for --lora.rank. Use one of the two.'
    (line,) = rejected(capsys, "plan", "demo", "--lora", "x")
    assert line.startswith('lora.rank="x" must be a whole number')
    (line,) = rejected(capsys, "plan", "demo", "--gpus", "2xA100")
    assert "Use --cluster of weft plan, such as 2xA100" in line


def test_plan_of_this_machine_has_its_processes(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["--run.device", "cpu", "--run.nproc_per_node", "2"]
    assert main(["plan", "demo", *overrides]) == 0
    assert "demo on 2 CPU processes\n" in capsys.readouterr().out


def test_plan_mistakes_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (line,) = rejected(capsys, "plan", "paper/llama3-8b", "--cluster", "1x8xA10")
    assert line.startswith("--cluster=\"1x8xA10\" has an unknown device 'A10'. Did you mean")
    lines = rejected(
        capsys, "plan", "paper/llama3-8b", "--cluster", "x", "--optim.lr", "--rnak-map"
    )
    assert [line.split()[0] for line in lines] == [
        "--optim.lr",
        "--rnak-map",
        '--cluster="x"',
    ]
    (line,) = rejected(capsys, "plan", "llama3-8", "--json")
    assert "llama3-8b-lora, " in line
    (line,) = rejected(capsys, "train", "demo", "--cluster", "1x8xH100")
    assert line.startswith("cluster=\"1x8xH100\" is not a known key. Did you mean 'run.cluster'?")
    (line,) = rejected(capsys, "plan", "demo", "--json", "--rank-map")
    assert line.startswith("--rank-map")
    (line,) = rejected(capsys, "plan", "demo", "--write", "x.toml")
    assert line.startswith("--write")
    for option in ("--search", "--rank-map"):
        (line,) = rejected(capsys, "plan", "demo", option, "--report", "x.html")
        assert line.startswith("--report")
    words = ["--tokens", "15Q", "--mtbf", "3", "--price", "-1", "--train.steps", "3"]
    lines = rejected(capsys, "plan", "demo", *words)
    assert lines == [
        '--price="-1" is not a number above 0. Write the price of a device-hour, such as 2.5.',
        '--tokens="15Q" gives another length than --train.steps. Use one of the two.',
        '--tokens="15Q" is not a number of tokens. Write it as 15T, 300B or 1.5e12.',
        '--mtbf="3" is not a time with its unit. Write it as 30m, 3h or 2d.',
    ]
    lines = rejected(capsys, "plan", "demo", "--search", "--tokens", "1B", "--mtbf", "3h")
    assert [line.partition("=")[0] for line in lines] == ["--tokens", "--mtbf"]
    files = ["--report", "/no/such/x.html", "--write", str(tmp_path)]
    lines = rejected(capsys, "plan", "demo", "--optim.lr", "x", "--search", *files)
    assert [line.partition("=")[0] for line in lines] == [
        *("--report", "--report", "--write", "optim.lr")
    ]
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "demo", "--search", "--rank-map"])
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "demo", "--cluster"])


def test_train_prints_stages_and_warnings() -> None:
    """The plan is printed before any process starts."""
    from rich.console import Console

    from weft.monitor.terminal import quiet_console
    from weft.planning.plan_text import plan_recipe
    from weft.reporting.run_summary import print_plan

    overrides = [("parallel.tp", "8"), ("parallel.pp", "2")]
    overrides += [("model.num_kv_heads", "8"), ("model.num_heads", "8")]
    overrides += [("model.tied_embeddings", "false")]
    plan = plan_recipe("demo", overrides, [], "4x4xCPU", Machine)[0]
    console: Console = quiet_console(io.StringIO())
    print_plan(plan, "demo", console, None, "")
    assert isinstance(console.file, io.StringIO)
    first, head, *stages, _, warning = console.file.getvalue().splitlines()
    assert "16 CPU ranks (pp 2, tp 8)" in first
    assert head.split()[:3] == ["stage", "rank", "units"]
    assert [line.split()[0] for line in stages] == ["0", "1"]
    assert warning.startswith("warning: parallel.tp=8: the group of ranks 0-7 spans 2 nodes")


def test_help_is_complete_and_light(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The help of a command names all keys, and needs no import that takes long."""
    from weft.config.schema import keys

    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    text = capsys.readouterr().out
    assert all(key in text for key in keys())
    heavy = "torch", "numpy", "rich", "fsspec", "tokenizers", "yaml"
    probe = f"""
import sys
from weft.cli.main import main
try:
    main(["train", "--help"])
except SystemExit:
    sys.exit(sorted(set({heavy}) & set(sys.modules)) or 0)
"""
    command = [sys.executable, "-c", probe]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stdout, completed.stderr) == (0, text, "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "'trian' is not a command: did you mean 'train'?; see 'weft --help'"),
        (["job"], "the following arguments are required: COMMAND; see 'weft job --help'"),
        (["train"], "the following arguments are required: RECIPE; see 'weft train --help'"),
        (
            ["hang", "run", "--train.steps", "5"],
            "--train.steps is not an option: this command takes no keys",
        ),
        (["train", "demo", "demo"], "unrecognized arguments: demo; see 'weft train --help'"),
        (["--verison"], "--verison is not an option: did you mean '--version'?"),
        (["version"], "'version' is not a command: did you mean '--version'?"),
        (["rollback", "run", "--step", "5"], "--step is not an option; see 'weft rollback --help'"),
        (["hang", "run", "--jsno"], "--jsno is not an option: did you mean '--json'?"),
        (["generate", "run", "--batch", "0"], "argument --batch: 0 is not an integer of at least"),
    ],
)
def test_usage_error_is_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"weft: {message}")


def test_command_missing_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr()
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert shown == capsys.readouterr()
    assert "Train a model" in shown.out


def test_option_value_is_not_read_as_a_key() -> None:
    words = ["generate", "run", "--prompt", "--a sentence", "--parallel.tp=2", "--seed=1"]
    result = build_parser().parse_args(words)
    assert (result.prompt, result.seed) == (["--a sentence"], 1)
    assert result.overrides == [("parallel.tp", "2")]


def test_option_of_another_command_is_reported_as_a_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Commands of one group have separate options."""
    lines = rejected(capsys, "data", "prepare", "--samples", "3", "text", "--data.packing", "x")
    assert [line.partition("=")[0] for line in lines] == ["samples", "data.packing"]


def test_command_in_a_removed_directory_is_refused(tmp_path: Path) -> None:
    missing = tmp_path / "gone"
    missing.mkdir()
    command = f"cd {missing} && rmdir {missing} && exec {sys.executable} -m weft schema"
    root = str(Path(__file__).parent.parent)
    completed = subprocess.run(
        ["sh", "-c", command],
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (completed.returncode, completed.stdout) == (2, "")
    assert completed.stderr == "weft: the working directory has been removed\n"


def test_generate_without_a_checkpoint_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for options in ([], ["--step", "best"]):
        (line,) = rejected(capsys, "generate", str(tmp_path), *options)
        assert "is neither a run directory" in line
    assert os.listdir(tmp_path) == []
