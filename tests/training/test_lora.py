"""LoRA runs: imported weights, checkpoints of adapters, export to PEFT and merged weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from tests.harness import RankError, run_ranks
from tests.layouts import parse
from tests.small import (
    Overrides,
    forget_fingerprints,
    losses,
    newest_state,
    read_state,
    small_job,
    train_rank,
)
from weft.checkpoint.manifest import list_checkpoints, read_manifest
from weft.checkpoint.weight_files import write_json
from weft.config.errors import InvalidConfig
from weft.config.writer import to_toml
from weft.conversion.hf_convert import export_checkpoint
from weft.conversion.hf_import import import_model
from weft.data.prepared_cache import Progress
from weft.inference.inference_model import find_checkpoint, load_unsharded
from weft.models import FAMILIES
from weft.models.hf_fields import hf_name
from weft.models.hf_mapping import param_shapes, to_hf_config
from weft.planning.model_config import resolve_model

MODEL: Overrides = [
    ("model.dim", "128"),
    ("model.ffn_dim", "256"),
    ("model.tied_embeddings", "false"),
    ("lora.rank", "4"),
    ("lora.alpha", "8"),
    ("optim.lr", "0.01"),
    ("optim.warmup_steps", "0"),
    ("optim.schedule", "linear"),
    ("monitor.log_interval", "1"),
    ("checkpoint.interval", "2"),
    ("checkpoint.keep_latest", "1"),
]


def ignore_progress(progress: Progress) -> None:
    pass


@pytest.fixture(scope="module")
def source(store_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Hugging Face model directory with random weights."""
    directory = tmp_path_factory.mktemp("source")
    job = small_job(*MODEL)
    config: Any
    config, _ = resolve_model(job.model.kind, job.model.preset, job.model.overrides())
    torch.manual_seed(7)
    weights = {
        hf_name(name): torch.randn(shape) * 0.08 if len(shape) == 2 else torch.ones(shape)
        for name, shape in param_shapes(FAMILIES["llama"], config).items()
    }
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    write_json(directory / "config.json", to_hf_config(FAMILIES["llama"], config, "float32"))
    shutil.copy(store_path / "tokenizer.json", directory)
    return directory


def run(source: Path, directory: Path, store: Path, layout: str, steps: int, *extra: Any) -> Path:
    """Train in ``directory`` up to a step, from imported weights or the last checkpoint."""
    if not directory.exists():
        import_model(source, directory, ignore_progress)
    ranks, overrides = parse(layout)
    all_overrides = [*MODEL, ("run.dir", str(directory)), ("train.steps", "4"), *extra, *overrides]
    if steps < 4:  # stop by a fault: the learning rate is that of the full run
        fault = f'[{{site = "step", kind = "raise", passing = {steps + 1}}}]'
        all_overrides.append(("resilience.faults", fault))
        with pytest.raises(RankError, match="injected"):
            run_ranks(train_rank, ranks, all_overrides, str(store), timeout=120)
    else:
        run_ranks(train_rank, ranks, all_overrides, str(store), timeout=120)
    job = small_job(*all_overrides)
    (directory / "job.toml").write_text(to_toml(job, "demo", job))
    return directory


@pytest.fixture(scope="module")
def trained(source: Path, store_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train four steps on two ranks; tests must not change the run."""
    run_dir = tmp_path_factory.mktemp("run") / "run"
    return run(source, run_dir, store_path, "dp_shard2", 4)


@pytest.fixture(scope="module")
def run_halfway(source: Path, store_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train the same run for two steps; tests copy it."""
    run_dir = tmp_path_factory.mktemp("half") / "run"
    return run(source, run_dir, store_path, "dp_shard2", 2)


def test_lora_checkpoints_hold_adapters_and_the_base_remains(trained: Path, source: Path) -> None:
    base, newest = list_checkpoints(trained / "checkpoints")  # keep_latest is 1: step 2 is deleted
    assert (base.name, newest.name) == ("step-00000000", "step-00000004")
    assert read_manifest(newest)["base"] == base.name
    state = newest_state(trained)
    assert all(".lora_A." in name or ".lora_B." in name for name in state)
    assert len([name for name in state if name.startswith("model.")]) == 2 * 7 * 2
    assert all(state[f"model.layers.1.{m}.lora_B.weight"].any() for m in ("mlp.up_proj",))
    imported = load_file(source / "model.safetensors")
    for name, tensor in read_state(base).items():
        assert tensor.equal(imported[hf_name(name.removeprefix("model."))])


def test_lora_of_a_model_that_fuses_projections_is_exported_merged(
    trained: Path, tmp_path: Path
) -> None:
    run_dir, outs = shutil.copytree(trained, tmp_path / "run"), {}
    forget_fingerprints(run_dir)  # they include the kind of model
    text = (run_dir / "job.toml").read_text()
    for kind in ("llama", "phi3"):
        (run_dir / "job.toml").write_text(text.replace('kind = "llama"', f'kind = "{kind}"'))
        export_checkpoint(run_dir, tmp_path / kind, "float32", "5GB", ignore_progress)
        outs[kind] = load_file(tmp_path / kind / "model.safetensors")
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    fused = outs["phi3"]["model.layers.1.self_attn.qkv_proj.weight"]
    assert fused.equal(torch.cat([outs["llama"][name] for name in names]))


def test_lora_resumed_run_is_equal_bit_for_bit(
    trained: Path, run_halfway: Path, source: Path, store_path: Path, tmp_path: Path
) -> None:
    run_dir = shutil.copytree(run_halfway, tmp_path / "run")
    run(source, run_dir, store_path, "dp_shard2", 4)
    assert losses(run_dir) == losses(trained)
    theirs = newest_state(trained)
    assert all(tensor.equal(theirs[name]) for name, tensor in newest_state(run_dir).items())


@pytest.mark.slow
def test_lora_last_state_saved_elsewhere_resumes_with_its_base(
    trained: Path, run_halfway: Path, source: Path, store_path: Path, tmp_path: Path
) -> None:
    """The base is in the checkpoint directory, which was full at the end."""
    run_dir = shutil.copytree(run_halfway, tmp_path / "run")
    shutil.rmtree(run_dir / "logs")  # the record that the first fault has happened
    fault = '[{site = "checkpoint.written", kind = "error"}]'
    full = [("resilience.faults", fault), ("checkpoint.final_save_timeout", "0")]
    with pytest.raises(RankError, match="Step 4 is saved in"):
        run(source, run_dir, store_path, "dp_shard2", 4, *full)
    (place,) = run_dir.glob("checkpoints-step-00000004-*")
    assert [path.name for path in list_checkpoints(place)] == ["step-00000000", "step-00000004"]
    run(source, run_dir, store_path, "dp_shard2", 4, ("checkpoint.dir", str(place)))
    theirs = newest_state(trained)
    (run_dir / "checkpoints").rename(run_dir / "full")
    place.rename(run_dir / "checkpoints")
    assert losses(run_dir) == losses(trained)
    assert all(tensor.equal(theirs[name]) for name, tensor in newest_state(run_dir).items())


@pytest.mark.parametrize("layout", ["tp2", pytest.param("pp2 dp_shard2", marks=pytest.mark.slow)])
def test_lora_resumed_in_another_layout_has_the_same_losses(
    layout: str, trained: Path, run_halfway: Path, source: Path, store_path: Path, tmp_path: Path
) -> None:
    run_dir = shutil.copytree(run_halfway, tmp_path / "run")
    run(source, run_dir, store_path, layout, 4)
    assert losses(run_dir) == pytest.approx(losses(trained), rel=1e-5)
    theirs = newest_state(trained)
    for name, tensor in newest_state(run_dir).items():
        if name.startswith("model."):
            assert (tensor - theirs[name]).norm() < 1e-2 * theirs[name].norm(), name


def test_trained_tables_begin_as_imported_and_resume_in_another_layout(
    source: Path, store_path: Path, tmp_path: Path
) -> None:
    """The embedding is trained in full; of the head, the rows of two tokens."""
    keys = [("lora.modules_to_save", "embed_tokens"), ("lora.trainable_tokens", "83,221")]
    whole = run(source, tmp_path / "whole", store_path, "dp_shard2", 4, *keys)
    half = run(source, tmp_path / "half", store_path, "dp_shard2", 2, *keys)
    run(source, half, store_path, "tp2", 4, *keys)
    assert losses(half) == pytest.approx(losses(whole), rel=1e-5)
    ours, theirs = newest_state(half), newest_state(whole)
    assert ours.keys() == theirs.keys()
    tables = {name for name in ours if name.startswith("model.") and ".lora_A" not in name}
    tables = {name for name in tables if ".lora_B" not in name}
    assert tables == {"model.embed_tokens.weight", "model.lm_head.lora_rows.weight"}
    imported = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    # Four steps of at most the learning rate.
    moved = (theirs["model.embed_tokens.weight"] - imported).abs().max()
    assert 0 < moved < 0.05
    assert theirs["model.lm_head.lora_rows.weight"].shape == (2, 128)
    assert theirs["model.lm_head.lora_rows.weight"].any()


def test_lora_resume_without_base_is_refused(
    trained: Path, source: Path, store_path: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(trained, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step-00000000")
    with pytest.raises(RankError, match="step-00000000 is missing; restore it"):
        run(source, run_dir, store_path, "", 4)
    for adapter in (False, True):
        with pytest.raises(InvalidConfig, match="step-00000000, which does not exist"):
            export_checkpoint(run_dir, tmp_path / "out", "float32", "5GB", ignore_progress, adapter)
    assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------------- PEFT


def logits_of(model: nn.Module, tokens_BT: torch.Tensor) -> torch.Tensor:
    out = model(tokens_BT)
    return out if isinstance(out, torch.Tensor) else out.logits


def whole_model(directory: Path) -> nn.Module:
    return load_unsharded(find_checkpoint(directory), torch.device("cpu")).eval()


TOKENS_BT = torch.arange(48).view(2, 24) * 7 % 512


@pytest.mark.parametrize(
    "keys",
    [
        (),
        pytest.param(
            (("lora.rank_stabilized", "true"), ("lora.targets", "q_proj,down_proj")),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_lora_exported_adapters_in_peft_compute_the_same(
    keys: tuple[tuple[str, str], ...],
    trained: Path,
    source: Path,
    store_path: Path,
    tmp_path: Path,
) -> None:
    """Compare logits and gradients of the adapters, and logits of the merged model."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    directory = trained
    if keys:
        directory = run(source, tmp_path / "run", store_path, "tp2", 4, *keys)
    export_checkpoint(
        directory, tmp_path / "adapter", "float32", "5GB", ignore_progress, adapter=True
    )
    export_checkpoint(directory, tmp_path / "merged", "float32", "5GB", ignore_progress)
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    untuned = logits_of(plain, TOKENS_BT)
    theirs = PeftModel.from_pretrained(plain, str(tmp_path / "adapter"), is_trainable=True).eval()
    ours = whole_model(directory)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)

    expected = logits_of(theirs, TOKENS_BT)
    size = expected.abs().max()
    assert (expected - untuned).abs().max() > 0.05 * size  # training has changed something
    for model in (ours, merged):
        assert (logits_of(model, TOKENS_BT) - expected).abs().max() < 1e-5 * size

    for model in (ours, theirs):
        logits_BTV = logits_of(model, TOKENS_BT)
        F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), TOKENS_BT[:, 1:].flatten()).backward()
    theirs_by_name = {
        name.removeprefix("base_model.model.model.").replace(".default", ""): param.grad
        for name, param in theirs.named_parameters()
        if param.requires_grad
    }
    grads = {name: p.grad for name, p in ours.named_parameters() if p.requires_grad}
    assert grads.keys() == theirs_by_name.keys()
    for name, grad in grads.items():
        expected = theirs_by_name[name]
        assert grad is not None
        assert expected is not None
        assert expected.abs().max() > 0
        assert (grad - expected).abs().max() < 1e-4 * expected.abs().max(), name


def test_lora_quantized_base_layouts_and_merged_weights_agree(
    source: Path, store_path: Path, tmp_path: Path
) -> None:
    """Two layouts agree; merged and generating models have the trained weights."""
    nf4 = ("lora.quantize", "nf4")
    one = run(source, tmp_path / "one", store_path, "", 4, nf4)
    two = run(source, tmp_path / "two", store_path, "dp_shard2", 4, nf4)
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    export_checkpoint(one, tmp_path / "merged", "float32", "5GB", ignore_progress)
    ours = whole_model(one)
    import_model(tmp_path / "merged", tmp_path / "again", ignore_progress)
    merged = whole_model(tmp_path / "again")
    expected = logits_of(ours, TOKENS_BT)
    difference = (logits_of(merged, TOKENS_BT) - expected).abs().max()
    assert difference < 1e-5 * expected.abs().max()
    packed = {param.dtype for param in ours.parameters()}
    assert packed == {torch.uint8, torch.float32}
