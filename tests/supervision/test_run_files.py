"""A checkpoint is used only with the files of its run that it was saved with."""

from __future__ import annotations

import io
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.chat import LLAMA, make_tokenizer, message, write_lines, write_tokenizer
from tests.commands import ONE_RANK, WEFT, run_weft, train_in_one_rank
from tests.small import forget_fingerprints, small_job
from weft.checkpoint.manifest import list_checkpoints, read_manifest
from weft.cli.main import main
from weft.config.files import write_json
from weft.models import FAMILIES
from weft.models.hf_mapping import get_hf_mapping, param_shapes, to_hf_config
from weft.planning.model_config import resolve_section
from weft.preparation.job_checks import prepare_job

pytestmark = pytest.mark.timeout(400, method="signal")  # so that fixtures tidy up

FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "document_tokens.json",
    "huggingface/config.json",
    "huggingface/generation_config.json",
    "huggingface/tokenizer_config.json",
]
REFERENCES = "references-*.npy"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that trained an imported model on pairs of answers, in `run` beside the `model`."""
    home = tmp_path_factory.mktemp("tuned")
    model, family = home / "model", FAMILIES["llama"]
    write_tokenizer(model, LLAMA)
    vocab_size = ("model.vocab_size", str(make_tokenizer().get_vocab_size()))
    config, _ = resolve_section(small_job(vocab_size).model)
    names = get_hf_mapping(family)
    shapes = param_shapes(family, config).items()
    tensors = {names.hf_name(name): 0.1 * torch.randn(shape) for name, shape in shapes}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    write_json(model / "config.json", to_hf_config(family, config, "float32"))
    write_json(model / "generation_config.json", {"eos_token_id": 2})
    rows = [
        {
            "prompt": [message("user", f"is it {number}")],
            "chosen": [message("assistant", "it is")],
            "rejected": [message("assistant", "it was not")],
        }
        for number in range(24)
    ]
    write_lines(home / "pairs.jsonl", rows)
    words = ["dpo", *ONE_RANK, "--model.path", "model", "--data.path", "pairs.jsonl"]
    words += ["--run.dir", "run", "--data.cache_dir", "cache", "--train.seq_len", "64"]
    words += [
        "--train.global_batch_size",
        "4",
        "--train.steps",
        "2",
        "--checkpoint.interval",
        "1",
        "--checkpoint.keep_latest",
        "9",
    ]
    train_in_one_rank(words, home)
    return home


@pytest.fixture
def run(tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, in the working directory."""
    shutil.copytree(tuned, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def alter_byte(path: Path, seed: int) -> None:
    """Change one byte to another letter, so that a JSON file may stay valid."""
    content, choice = bytearray(path.read_bytes()), random.Random(seed)
    letters = [i for i, byte in enumerate(content) if chr(byte).isalnum()]
    place = choice.choice(letters)
    content[place] = choice.choice([c for c in b"abcdefgh01234567" if c != content[place]])
    path.write_bytes(content)


COMMANDS: dict[str, list[str]] = {
    "generate": ["generate", "run", "--prompt", "it", "--max-tokens", "1"],
    "chat": ["chat", "run"],
    "evaluate": ["evaluate", "run", "--data.cache_dir", "cache"],
    "export": ["export", "run", "out"],
    "export of a checkpoint": ["export", "run/checkpoints/step-00000001", "out"],
    "train": ["train", "run", "--train.steps", "3"],
    "data inspect": ["data", "inspect", "run/job.toml"],
    "train from it": [
        *("train", "dpo", "--model.path", "run", "--data.path", "pairs.jsonl"),
        *("--train.seq_len", "64", "--run.dir", "second", "--run.nproc_per_node", "1"),
    ],
}


@pytest.mark.system
@pytest.mark.parametrize("command", COMMANDS)
def test_command_refuses_an_altered_file_beside_the_weights(
    run: Path, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    for seed, name in enumerate([*FILES, *random.Random(0).choices(FILES, k=7)]):
        original = (run / name).read_bytes()
        alter_byte(run / name, seed)
        assert main(COMMANDS[command]) == 2, (name, seed)
        error = capsys.readouterr().err
        assert re.search(rf"checkpoint=.*step-0000000\d\" was saved with another .*/{name}", error)
        assert not Path("out").exists()
        assert not Path("second").exists()
        (run / name).write_bytes(original)
    assert len(list_checkpoints(run / "checkpoints")) == 3


def test_altered_keys_of_the_model_are_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (run / "job.toml").read_text()
    altered = text.replace("rope_theta = 10000.0", "rope_theta = 10001.0")
    assert altered != text
    (run / "job.toml").write_text(altered)
    for command in ("export", "train"):
        assert main(COMMANDS[command]) == 2
        assert "was saved with other keys in [model] of" in capsys.readouterr().err


@pytest.mark.system
def test_remedy_of_an_altered_file_works(
    run: Path, tuned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alter_byte(run / "tokenizer.json", 3)
    (run / "huggingface/generation_config.json").unlink()
    (run / "document_tokens.json").write_bytes(b"{}")
    assert main(COMMANDS["export"]) == 2
    error = capsys.readouterr().err
    for name in ("tokenizer.json", "huggingface/generation_config.json"):
        source = tuned / "model" / Path(name).name
        assert f"Copy it from its source: cp {source} {run / name}." in error
        shutil.copy(source, run / name)
    command = f"delete it, and weft train {run} writes it from the data again"
    assert command in error
    (run / "document_tokens.json").unlink()
    done = run_weft([*WEFT, "train", "run"], run.parent)
    assert "is complete at step 2" in done.stdout, done.stderr
    assert main(COMMANDS["export"]) == 0


@pytest.mark.slow
def test_train_refuses_altered_references(run: Path) -> None:
    (file,) = run.glob(REFERENCES)
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    done = run_weft([*WEFT, "train", "run", "--train.steps", "3"], run.parent)
    assert done.returncode != 0
    assert f"{file}: the content has changed since it was written" in done.stderr
    assert main(["generate", "run", "--prompt", "it", "--max-tokens", "1"]) == 0


def test_checkpoint_of_an_earlier_version_has_no_fingerprints(run: Path) -> None:
    forget_fingerprints(run)
    (run / "document_tokens.json").unlink()
    prepare_job("run", [("train.steps", "3")])


def test_fingerprints_are_of_all_files_beside_the_weights(run: Path) -> None:
    recorded = read_manifest(list_checkpoints(run / "checkpoints")[-1])["run_files"]
    (references,) = run.glob(REFERENCES)
    sections = {"job.toml [model]", "job.toml [lora]"}
    assert {*FILES, references.name, *sections} == {*recorded}
    first = read_manifest(list_checkpoints(run / "checkpoints")[0])["run_files"]
    imported = {name for name in FILES if name.startswith("huggingface/")}
    assert {*first} == {"tokenizer.json", "job.toml [model]", *imported}
    assert all(recorded[name] == first[name] for name in first)
