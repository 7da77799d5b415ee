"""Exported adapters of every family: PEFT loads them, and computes what weft computes."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.harness import run_ranks
from tests.models.family_draws import draw_config
from tests.models.test_families import EAGER, KINDS, save_tokenizer, transformers_model
from tests.small import small_job, train_rank
from weft.checkpoint.load import load_frozen_params
from weft.checkpoint.manifest import read_manifest
from weft.checkpoint.state_dict import persistent_buffers
from weft.checkpoint.weight_files import Weight, open_weights, write_weights_checkpoint
from weft.config.errors import InvalidConfig
from weft.config.schema import LoraSection, replace
from weft.config.writer import to_toml
from weft.conversion.hf_convert import export_checkpoint
from weft.conversion.hf_import import import_model
from weft.inference.inference_model import (
    CheckpointRef,
    find_base_checkpoint,
    find_checkpoint,
    load_unsharded,
)
from weft.models import FAMILIES
from weft.parallel.lora import apply_lora

EXPERT_KINDS = [kind for kind in KINDS if next(iter(FAMILIES[kind].presets.values())).num_experts]
TABLES = ("embed_tokens.weight", "lm_head.weight")
FUSED_KINDS = ["phi3", "glm4"]


def ignore(progress: Any) -> None:
    pass


def write_run(kind: str, directory: Path, lora: dict[str, Any], **fields: Any) -> CheckpointRef:
    """Import a random model, and write a checkpoint with random adapters beside it."""
    source, run = directory / "source", directory / "run"
    transformers_model(kind, draw_config(kind, 0) | fields).save_pretrained(source)
    save_tokenizer(source)
    import_model(source, run, ignore, force=True)
    base = find_checkpoint(run)
    job = replace(base.job, lora=lora)
    (run / "job.toml").write_text(to_toml(job, "demo", job))
    with torch.device("meta"):
        module = base.family.build(base.config)
        apply_lora(module, base.family.blocks(module), LoraSection(**lora), torch.float32)
    torch.manual_seed(1)
    state = {
        name: torch.randn(param.shape) / math.sqrt(param.shape[-1])
        for name, param in module.named_parameters()
        if param.requires_grad
    }
    buffers = {n: w for n, w in open_weights(base.path).items() if n.endswith("expert_bias")}
    weights = {n: Weight(t.shape, lambda t=t: iter([t])) for n, t in state.items()} | buffers
    kept = ("mesh", "weft", "torch")
    manifest = {k: v for k, v in read_manifest(base.path).items() if k in kept}
    manifest |= {"step": 1, "samples": 4, "base": base.path.name}
    path = base.path.with_name("step-00000001")
    path.mkdir()
    write_weights_checkpoint(path, weights, manifest, lambda size: None)
    return find_checkpoint(run)


def export(checkpoint: CheckpointRef, out: Path, adapter: bool) -> Path:
    export_checkpoint(checkpoint.run_dir, out, "float32", "5GB", ignore, adapter)
    return out


def load_in_peft(source: Path, adapter: Path) -> nn.Module:
    """Load an adapter; every tensor of the file must have a place, and every place a tensor."""
    from peft import PeftConfig, get_peft_model
    from peft.utils import load_peft_weights, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **EAGER)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # such as of targets that do not exist
        # PEFT 0.21 looks for patterns in modules only, but applies them to parameters too.
        warnings.filterwarnings("ignore", r".*pattern keys did not match any targeted module")
        model = get_peft_model(plain, PeftConfig.from_pretrained(str(adapter)))
    result = set_peft_model_state_dict(model, load_peft_weights(str(adapter), device="cpu"))
    assert result.unexpected_keys == []
    assert [name for name in result.missing_keys if "lora_" in name] == []
    return model.eval()


@torch.no_grad()
def logits(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    out = model(tokens_BT)
    return out if isinstance(out, Tensor) else out.logits


def check(checkpoint: CheckpointRef, directory: Path) -> dict[str, Any]:
    """Compare weft's model with PEFT's and the merged one; return the adapter's configuration."""
    from transformers import AutoModelForCausalLM

    adapter = export(checkpoint, directory / "adapter", True)
    merged = export(checkpoint, directory / "merged", False)
    tokens_BT = torch.arange(40).view(2, 20) * 7 % checkpoint.config.vocab_size
    ours = load_unsharded(checkpoint, torch.device("cpu")).eval()
    expected = logits(ours, tokens_BT)
    # Large random adapters amplify rounding, most where two attention scores are nearly equal.  So
    # the bound is a few times the error of float32 in this model.
    rounding = (logits(ours.double(), tokens_BT) - expected).abs().max().item()
    bound = 4 * rounding + 1e-5 * expected.abs().max().item()
    plain = AutoModelForCausalLM.from_pretrained(directory / "source", dtype=torch.float32, **EAGER)
    assert (logits(plain, tokens_BT) - expected).abs().max() > 0.1 * expected.abs().max()
    for model in (
        load_in_peft(directory / "source", adapter),
        AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32, **EAGER),
    ):
        torch.testing.assert_close(logits(model, tokens_BT), expected, atol=bound, rtol=0)
    # No adapter is dropped: the file has each of their numbers once, and otherwise zeros.
    # Lengths of rows (DoRA) are not zero where a fused module has no adapter.
    ours = [
        w.shape.numel()
        for n, w in open_weights(checkpoint.path).items()
        if (".lora_" in n and "magnitude" not in n) or n in TABLES
    ]
    theirs = load_file(adapter / "adapter_model.safetensors").items()
    config: dict[str, Any] = json.loads((adapter / "adapter_config.json").read_text())
    repeated = ("magnitude", *(["lm_head"] if config["ensure_weight_tying"] else []))
    counts = [int(t.count_nonzero()) for n, t in theirs if not any(word in n for word in repeated)]
    assert sum(counts) == sum(ours)
    return config


@pytest.mark.parametrize(
    "kind",
    [
        "glm4_moe",  # dense layers, shared experts, experts
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in sorted({*KINDS} - {"glm4_moe"})),
    ],
)
def test_exported_adapter_in_peft_computes_the_same(kind: str, tmp_path: Path) -> None:
    checkpoint = write_run(kind, tmp_path, {"rank": 3, "alpha": 5.0})
    config = check(checkpoint, tmp_path)
    stacked = {"gpt_oss", "llama4", "granitemoe"}  # PEFT converts the experts of the others
    assert bool(config["rank_pattern"]) == (kind in {*stacked, *FUSED_KINDS})
    assert any(".experts." in n for n in config["target_parameters"] or []) == (kind in stacked)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*EXPERT_KINDS, *FUSED_KINDS])
@pytest.mark.parametrize("targets", [["up_proj", "q_proj"], ["experts.down_proj", "k_proj"]])
def test_exported_adapter_of_some_layers_computes_the_same(
    kind: str, targets: list[str], tmp_path: Path
) -> None:
    """A fused module has parts without adapters, and scales of rsLoRA."""
    if kind in FUSED_KINDS:
        targets = [target.removeprefix("experts.") for target in targets]
    lora = {"rank": 2, "alpha": 3.0, "rank_stabilized": True, "targets": targets}
    check(write_run(kind, tmp_path, lora), tmp_path)


def test_exported_adapter_has_the_rank_of_each_layers_parts(tmp_path: Path) -> None:
    """One layer adapts a part of a fused module, another adapts two."""
    names = ("layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj", "layers.1.self_attn.v_proj")
    lora = {"rank": 2, "alpha": 3.0, "targets": list(names)}
    config = check(write_run("phi3", tmp_path, lora), tmp_path)
    assert config["rank_pattern"] == {"model.layers.1.self_attn.qkv_proj": 4}


def test_base_of_adapters_has_the_load_balance_bias(tmp_path: Path) -> None:
    """The bias is a buffer, and not a frozen parameter."""
    checkpoint = write_run("glm4_moe", tmp_path, {"rank": 1})
    base = find_base_checkpoint(checkpoint)
    assert base is not None
    model = checkpoint.family.build(checkpoint.config)
    apply_lora(model, checkpoint.family.blocks(model), checkpoint.job.lora, torch.float32)
    load_frozen_params(base, [model])
    biases = dict(persistent_buffers([model]))
    assert biases
    for name, bias in biases.items():
        assert bias.any()
        assert bias.equal(torch.cat([*open_weights(base)[name].read()]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt_oss"])
def test_trained_adapter_of_an_imported_model_computes_the_same(
    kind: str, store_path: Path, tmp_path: Path
) -> None:
    """Train on two ranks from an imported model, whose load-balance bias remains."""
    source, run = tmp_path / "source", tmp_path / "run"
    fields = draw_config(kind, 0) | {"vocab_size": 512}
    transformers_model(kind, fields).save_pretrained(source)
    shutil.copy(store_path / "tokenizer.json", source)
    import_model(source, run, ignore)
    base = find_checkpoint(run)
    model = {f"model.{name}": json.dumps(x) for name, x in base.config.model_dump().items()}
    keys = {"model.kind": kind} | {name: text.strip('"') for name, text in model.items()}
    keys |= {"run.dir": str(run), "lora.rank": "3", "train.steps": "3", "optim.lr": "0.01"}
    keys |= {"parallel.dp_shard": "2", "parallel.ep": "2", "optim.warmup_steps": "0"}
    run_ranks(train_rank, 2, list(keys.items()), str(store_path), timeout=120)
    job = small_job(*keys.items())
    (run / "job.toml").write_text(to_toml(job, "demo", job))
    checkpoint = find_checkpoint(run)
    assert checkpoint.path.name == "step-00000003"
    check(checkpoint, tmp_path)
    before, after = (open_weights(path) for path in (base.path, checkpoint.path))
    biases = [name for name in after if name.endswith("expert_bias")]
    assert len(biases) == base.config.num_moe_layers
    for name in biases:
        bias, expected = (torch.cat([*weights[name].read()]) for weights in (after, before))
        assert bias.equal(expected)
        assert bias.any() == (kind == "deepseek_v3")


@pytest.mark.slow
def test_adapter_that_peft_cannot_express_is_refused(tmp_path: Path) -> None:
    fields = {"num_local_experts": 1, "num_experts_per_tok": 1}
    checkpoint = write_run("gpt_oss", tmp_path, {"rank": 2}, **fields)
    with pytest.raises(InvalidConfig, match="a single expert, whose transposed matrix in gpt-oss"):
        export(checkpoint, tmp_path / "adapter", True)
