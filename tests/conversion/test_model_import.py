"""``model.path``: the weights of another model are imported once, by the run that trains it."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.small import read_state, small_job
from weft.cli.main import main
from weft.config.errors import InvalidConfig
from weft.config.files import write_json
from weft.config.reader import read_job
from weft.conversion import hf_import
from weft.conversion.model_import import import_source, open_source
from weft.models import FAMILIES
from weft.models.hf_mapping import get_hf_mapping, param_shapes, to_hf_config
from weft.monitor.terminal import quiet_console
from weft.planning.model_config import HUB_NAME, locate_model, model_name, resolve_section
from weft.preparation.job_checks import prepare_job

CONSOLE = quiet_console(io.StringIO())


def weights(run: Path) -> dict[str, torch.Tensor]:
    state = read_state(run / "checkpoints" / "step-00000000")
    return {name.removeprefix("model."): value for name, value in state.items()}


@pytest.fixture
def source(store_path: Path, tmp_path: Path) -> Path:
    """Write a Hugging Face directory of random bfloat16 weights."""
    directory, family = tmp_path / "Tiny", FAMILIES["llama"]
    directory.mkdir()
    config, _ = resolve_section(small_job(("model.tied_embeddings", "false")).model)
    hf_name = get_hf_mapping(family).hf_name
    torch.manual_seed(7)
    tensors = {
        hf_name(name): torch.randn(shape, dtype=torch.bfloat16)
        for name, shape in param_shapes(family, config).items()
    }
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    write_json(directory / "config.json", to_hf_config(family, config, "bfloat16"))
    shutil.copy(store_path / "tokenizer.json", directory)
    return directory


def prepare(tmp_path: Path, source: Path | str, *more: tuple[str, str]) -> Any:
    overrides = [
        ("model.path", str(source)),
        ("data.path", str(tmp_path / "text.txt")),
        ("run.dir", str(tmp_path / "run")),
        ("run.nproc_per_node", "1"),
        *more,
    ]
    (tmp_path / "text.txt").write_text("one two three. " * 2000)
    return prepare_job("pretrain", overrides)


def test_import_gives_the_weights_of_the_source_and_is_made_once(
    source: Path, tmp_path: Path
) -> None:
    base, plan = prepare(tmp_path, source)
    assert plan.job.data.tokenizer == str(source / "tokenizer.json")
    opened = open_source(plan)
    assert opened is not None
    plan = import_source(plan, opened, CONSOLE)
    run = tmp_path / "run"
    theirs = load_file(source / "model.safetensors")
    hf_name = get_hf_mapping(FAMILIES["llama"]).hf_name
    ours = weights(run)
    assert {hf_name(name) for name in ours} == set(theirs)
    assert all(torch.equal(ours[name], theirs[hf_name(name)].float()) for name in ours)
    assert (run / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert plan.job.data.tokenizer == str(run / "tokenizer.json")
    assert (run / "huggingface" / "config.json").is_file()

    shutil.rmtree(source)  # not needed any more, also if its name looks like one on the Hub
    for path in (source, os.path.relpath(source)):
        _, again = prepare(tmp_path, path)
        assert (again.job, open_source(again)) == (plan.job, None)
    # Without model.path, the recipe's model yields to that of the run.
    overrides = [("run.dir", str(run)), ("run.nproc_per_node", "2"), ("data.format", "text")]
    _, adopted = prepare_job("llama3-8b-lora", [*overrides, ("data.path", str(tmp_path))])
    assert adopted.model == plan.model
    assert (adopted.job.model, adopted.lora_rank) == (plan.job.model, 16)
    with pytest.raises(InvalidConfig) as caught:
        prepare(tmp_path, tmp_path / "other")
    assert [error.key for error in caught.value.errors] == ["model.path"]
    assert base.train.epochs == 1.0


def test_interrupted_import_is_repeated(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, plan = prepare(tmp_path, source)

    def fail(path: Path, weights: Any, *args: Any) -> None:
        path.mkdir(exist_ok=True)
        (path / "shard-00000.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hf_import, "write_weights_checkpoint", fail)
        with pytest.raises(KeyboardInterrupt):
            import_source(plan, open_source(plan), CONSOLE)
    assert not list((tmp_path / "run").glob("checkpoints/*"))
    _, again = prepare(tmp_path, source)
    assert again.job.data.tokenizer == str(tmp_path / "run" / "tokenizer.json")
    import_source(again, open_source(again), CONSOLE)
    assert weights(tmp_path / "run")


def test_import_of_a_weft_run_has_its_newest_weights(source: Path, tmp_path: Path) -> None:
    _, plan = prepare(tmp_path, source)
    import_source(plan, open_source(plan), CONSOLE)
    _, second = prepare(tmp_path, tmp_path / "run", ("run.dir", str(tmp_path / "second")))
    assert second.model == plan.model
    assert second.job.model.path == str(tmp_path / "run")
    import_source(second, open_source(second), CONSOLE)
    ours, theirs = (weights(tmp_path / name) for name in ("second", "run"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_import_refuses_what_is_wrong_before_it_writes(source: Path, tmp_path: Path) -> None:
    _, plan = prepare(tmp_path, source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 5e-4}))
    with pytest.raises(InvalidConfig, match="its configuration has changed"):
        open_source(plan)
    (source / "model.safetensors").unlink()
    with pytest.raises(InvalidConfig, match="does not exist, nor does its index"):
        open_source(plan)
    assert not (tmp_path / "run").exists()


def test_import_tokenizer_far_smaller_than_the_vocabulary_needs_force(
    source: Path, tmp_path: Path
) -> None:
    config = json.loads((source / "config.json").read_text())
    large = json.dumps(config | {"vocab_size": 8 * config["vocab_size"]})
    (source / "config.json").write_text(large)
    _, plan = prepare(tmp_path, source)
    with pytest.raises(InvalidConfig, match="more than padding explains") as caught:
        open_source(plan)
    assert "--force" in str(caught.value)
    with pytest.raises(InvalidConfig) as caught:
        open_source(plan, force=True)
    assert "more than padding explains" not in str(caught.value)  # only the shapes are wrong now


def test_job_toml_of_an_imported_run_imports_into_another_directory(
    source: Path, tmp_path: Path
) -> None:
    _, plan = prepare(tmp_path, source)
    import_source(plan, open_source(plan), CONSOLE)
    recipe, other = str(tmp_path / "run" / "job.toml"), str(tmp_path / "other")
    _, again = prepare_job(recipe, [("run.dir", other)])
    assert again.model == plan.model
    assert open_source(again) is not None
    assert read_job(recipe)[0].model == plan.job.model


def test_import_names_positions_that_differ_from_the_model(source: Path, tmp_path: Path) -> None:
    _, plan = prepare(tmp_path, source)
    config = json.loads((source / "config.json").read_text())
    assert config["rope_theta"] == 10_000
    write_json(source / "config.json", {**config, "rope_theta": 5e5})  # after the plan
    opened = open_source(plan)
    assert opened is not None
    assert opened.note == "model.rope_theta is 10000.0 in this run and 500000.0 in the model"
    _, plan = prepare(tmp_path, source)
    opened = open_source(plan)
    assert opened is not None
    assert opened.note == ""


@pytest.mark.parametrize("name", ["org/none-such", "hf://org/none-such"])
def test_hub_name_that_cannot_be_downloaded_names_the_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InvalidConfig) as caught:
        locate_model(name)
    (error,) = caught.value.errors
    assert (error.key, error.value) == ("model.path", name)
    assert error.rule.startswith("is no directory, and cannot be downloaded from the Hub: ")
    assert "hf download org/none-such --local-dir DIRECTORY" in error.remedy
    assert main(["plan", "lora", "--model.path", name]) == 2


def test_hub_name_is_found_in_the_cache(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    repo, commit = tmp_path / "hub" / "models--org--Tiny-1B", "0" * 40
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    shutil.copytree(source, repo / "snapshots" / commit)
    assert locate_model("org/Tiny-1B", with_weights=True) == repo / "snapshots" / commit
    _, plan = prepare(tmp_path, "org/Tiny-1B")
    assert plan.job.model.path == "org/Tiny-1B"
    assert open_source(plan) is not None
    assert main(["import", "hf://org/Tiny-1B", str(tmp_path / "imported")]) == 0
    assert (tmp_path / "imported" / "job.toml").is_file()
    assert main(["import", "org/Absent", str(tmp_path / "absent")]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert 'MODEL="org/Absent" is no directory, and cannot be downloaded from the Hub' in message
    assert not (tmp_path / "absent").exists()
    # A download of which only the configuration is there.
    (repo / "snapshots" / commit / "model.safetensors").unlink()
    assert locate_model("org/Tiny-1B") == repo / "snapshots" / commit
    with pytest.raises(InvalidConfig, match="cannot be downloaded"):
        locate_model("org/Tiny-1B", with_weights=True)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("", ""),
        ("required", ""),
        ("meta-llama/Llama-3.2-1B", "Llama-3.2-1B"),
        ("/models/mine/", "mine"),
        ("/cache/models--Qwen--Qwen3-0.6B/snapshots/0123", "Qwen3-0.6B"),
    ],
)
def test_model_name_is_short(path: str, name: str) -> None:
    assert model_name(path) == name


def test_hub_names_have_two_parts() -> None:
    names = ["org/name", "hf://org/name", "name", "a/b/c", "/org/name", "org/na me", "../name/x"]
    assert [bool(HUB_NAME.fullmatch(name)) for name in names] == [True, True] + [False] * 5
