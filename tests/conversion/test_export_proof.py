"""``weft export --prove``: what it finds, and what it says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conversion.test_peft_export import write_run
from tests.models.family_draws import draw_config
from tests.models.test_families import save_tokenizer, transformers_model
from tests.models.test_score_heads import build_scored
from weft.cli.main import main
from weft.conversion import hf_convert
from weft.conversion.export_proof import PROOF_FILE, ProofFailed, prove_export
from weft.conversion.hf_import import import_model
from weft.inference.inference_model import find_checkpoint

pytestmark = pytest.mark.system


def read_proof(out: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((out / PROOF_FILE).read_text("utf-8"))
    return result


def write_source(kind: str, directory: Path) -> Path:
    """Import a random model of a family; return the run directory."""
    fields = draw_config(kind, 0)
    transformers_model(kind, fields).save_pretrained(directory / "source")
    save_tokenizer(directory / "source")
    import_model(directory / "source", directory / "run", lambda progress: None, force=True)
    return directory / "run"


@pytest.mark.slow
def test_proof_of_an_intact_export_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = write_source("llama", tmp_path), tmp_path / "out"
    assert main(["export", str(run), str(out), "--dtype", "bfloat16", "--prove"]) == 0
    proof = read_proof(out)
    assert proof["passed"]
    assert proof["checks"]["tensors"]["dtypes"] == ["bfloat16"]
    assert proof["checks"]["logits"]["rounding_difference"] > 0
    assert proof["checks"]["logits"]["difference"] <= proof["checks"]["logits"]["bound"]
    assert {"weft", "torch", "transformers"} <= {*proof["versions"]}
    assert "proved with transformers" in capsys.readouterr().out


def change_theta(out: Path) -> None:
    tree = json.loads((out / "config.json").read_text())
    tree.get("rope_parameters", tree)["rope_theta"] = 12345.0
    (out / "config.json").write_text(json.dumps(tree))


def change_weights(out: Path, change: Any) -> None:
    path = out / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def drop_tensor(out: Path) -> None:
    change_weights(out, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


def add_tensor(out: Path) -> None:
    change_weights(out, lambda tensors: tensors.update({"model.extra.weight": torch.ones(2, 2)}))


def change_dtype(out: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()

    change_weights(out, change)


def change_end_tokens(out: Path) -> None:
    path = out / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 7}))


def change_tokenizer(out: Path) -> None:
    tree = json.loads((out / "tokenizer.json").read_text())
    tree["model"]["vocab"] = {"<|endoftext|>": 0, "a": 2, "b": 1}
    (out / "tokenizer.json").write_text(json.dumps(tree))


def damage_config(out: Path) -> None:
    (out / "config.json").write_text("{}")


FAULTS = {
    "logits": change_theta,
    "missing": drop_tensor,
    "unexpected": add_tensor,
    "dtype": change_dtype,
    "end_tokens": change_end_tokens,
    "tokenizer": change_tokenizer,
    "load": damage_config,
}
MESSAGES = {
    "logits": "computes other logits",
    "missing": "missing: model.layers.1.mlp.up_proj.weight",
    "unexpected": "unexpected: model.extra.weight",
    "dtype": "has model.norm.weight in torch.bfloat16, not torch.float32",
    "end_tokens": "stops at the tokens [7]",
    "tokenizer": "has a tokenizer that gives",
    "load": "cannot be loaded",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_proof_of_a_damaged_export_fails_with_the_reason(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = write_source("llama", tmp_path), tmp_path / "out"
    prove = hf_convert.prove_export

    def damage_and_prove(checkpoint: Any, directory: Path, *rest: Any) -> str:
        FAULTS[fault](directory)
        return prove(checkpoint, directory, *rest)

    monkeypatch.setattr(hf_convert, "prove_export", damage_and_prove)
    assert main(["export", str(run), str(out), "--prove"]) == 1
    assert MESSAGES[fault] in capsys.readouterr().err
    assert not read_proof(out)["passed"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind",
    [
        "deepseek_v3",  # multi-token prediction, a bias of the router
        "gpt_oss",  # stacked experts, interleaved
        "mixtral",  # amplifies rounding
        "phi3",  # fused matrices
        "gemma3",  # tied, norms with an offset
        "llama4",
    ],
)
def test_proof_of_every_family_passes(kind: str, tmp_path: Path) -> None:
    run, out = write_source(kind, tmp_path), tmp_path / "out"
    assert main(["export", str(run), str(out), "--prove"]) == 0
    assert read_proof(out)["passed"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.parametrize("adapter", [True, False])
def test_proof_of_adapters_passes(kind: str, adapter: bool, tmp_path: Path) -> None:
    run, out = write_run(kind, tmp_path, {"rank": 3, "alpha": 5.0}).run_dir, tmp_path / "out"
    words = ["export", str(run), str(out), "--prove", *["--adapter"] * adapter]
    assert main(words) == 0
    assert ("peft" in read_proof(out)["versions"]) == adapter


def test_proof_that_this_machine_cannot_make_is_refused_before_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = write_source("llama", tmp_path), tmp_path / "out"
    monkeypatch.setattr("weft.conversion.export_proof.available_bytes", lambda: 1000)
    assert main(["export", str(run), str(out), "--prove"]) == 2
    error = capsys.readouterr().err
    assert "--prove needs 1," in error
    assert "1,000 are free. Prove the export on a larger machine" in error
    assert main(["export", str(run), "s3://bucket/model", "--prove"]) == 2
    assert "--prove reads the exported files from a local directory" in capsys.readouterr().err
    assert not out.exists()


def test_proof_of_an_adapter_without_its_base_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = write_run("llama", tmp_path, {"rank": 3}).run_dir, tmp_path / "out"
    shutil.rmtree(tmp_path / "source")
    assert main(["export", str(run), str(out), "--adapter", "--prove"]) == 2
    assert "needs the base model of the adapter" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.slow
def test_proof_of_a_reward_model_compares_scores(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    build_scored("llama", tmp_path / "source")
    import_model(tmp_path / "source", run, lambda progress: None, force=True)
    assert main(["export", str(run), str(out), "--prove"]) == 0
    checks = read_proof(out)["checks"]
    assert checks["logits"]["positions"] == 4
    assert "greedy" not in checks
    change_weights(out, lambda tensors: tensors["score.weight"].mul_(1.1))
    checkpoint = find_checkpoint(run)
    with pytest.raises(ProofFailed, match="computes other logits"):
        prove_export(checkpoint, out, torch.float32, adapter=False)
