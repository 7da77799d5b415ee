"""Multi-token prediction in files: names, round trips, and transformers' own layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.models.test_families import (
    EAGER,
    draw_files,
    gradient_files,
    import_errors,
    load_tensors,
    rewrite,
    save_tokenizer,
    to_weft,
)
from tests.small import small_job
from weft.checkpoint.weight_files import Weight, open_weights
from weft.config.schema import Job, ModelSection, replace
from weft.conversion.hf_convert import export_checkpoint
from weft.conversion.hf_import import ModelSource, import_model, write_imported
from weft.conversion.hf_weights import list_hf_tensors
from weft.inference.inference_model import find_checkpoint, load_unsharded
from weft.models import FAMILIES
from weft.models.decoder_costs import flops_per_token, num_active_params, num_params, unit_costs
from weft.models.hf_mapping import from_hf_config, param_shapes, to_hf_config
from weft.planning.model_config import adopt_model, model_section


def draw_mtp_files(
    kind: str, tmp_path: Path, layers: int = 1, with_copies: bool = True
) -> tuple[Path, Any, dict[str, Tensor]]:
    """Return files as published, transformers' model, and the tensors of the MTP layers."""
    source, twin = draw_files(
        kind, tmp_path, tie_word_embeddings=False, num_hidden_layers=3, first_k_dense_replace=1
    )
    generator, extra, dim = torch.Generator().manual_seed(1), {}, twin.config.hidden_size
    main = load_tensors(source)
    for i in range(layers):
        head = f"model.layers.{3 + i}."
        for name, tensor in main.items():
            if name.startswith("model.layers.2."):
                noise = torch.randn(tensor.shape, generator=generator) * 0.2
                is_norm = name.endswith("norm.weight")
                extra[head + name.removeprefix("model.layers.2.")] = noise + is_norm
        for name in ("enorm", "hnorm", "shared_head.norm"):
            extra[f"{head}{name}.weight"] = 1 + torch.randn(dim, generator=generator) * 0.2
        extra[f"{head}eh_proj.weight"] = torch.randn(dim, 2 * dim, generator=generator) * 0.2
        if with_copies:
            extra[f"{head}embed_tokens.weight"] = main["model.embed_tokens.weight"].clone()
            extra[f"{head}shared_head.head.weight"] = main["lm_head.weight"].clone()
    rewrite(source, dict(extra), num_nextn_predict_layers=layers)
    return source, twin, extra


def run_import(source: Path, run: Path, **options: Any) -> str:
    return import_model(source, run, lambda progress: None, force=True, **options)


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("glm4_moe", 2),
        pytest.param("glm4_moe", 1, marks=pytest.mark.slow),
        ("deepseek_v3", 1),
        pytest.param("deepseek_v3", 2, marks=pytest.mark.slow),
    ],
)
def test_published_layers_survive_import_and_export(kind: str, layers: int, tmp_path: Path) -> None:
    source, _, extra = draw_mtp_files(kind, tmp_path, layers)
    message = run_import(source, tmp_path / "run")
    assert f"model.mtp_layers={layers}) are imported" in message
    export_checkpoint(tmp_path / "run", tmp_path / "out", "", "9KB", lambda progress: None)
    before, after = load_tensors(source), load_tensors(tmp_path / "out")
    assert extra.keys() <= before.keys() == after.keys()
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name]), name
    tree = json.loads((tmp_path / "out" / "config.json").read_text())
    assert tree["num_nextn_predict_layers"] == layers
    # Again from the export, which is what was imported.
    run_import(tmp_path / "out", tmp_path / "again")
    assert find_checkpoint(tmp_path / "again").config == find_checkpoint(tmp_path / "run").config


def test_names_are_those_that_vllm_reads() -> None:
    """Those of its deepseek_mtp.py, below the layers after the model's own."""
    family = FAMILIES["deepseek_v3"]
    config = family.presets["671b"].model_copy(update={"mtp_layers": 1, "num_experts": 8})
    config = config.model_copy(update={"expert_groups": 4})
    names = {n for n in list_hf_tensors(family, config) if n.startswith("model.layers.61.")}
    own = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")
    assert {f"model.layers.61.{name}.weight" for name in own} <= names
    assert "model.layers.61.mlp.gate.e_score_correction_bias" in names
    assert "model.layers.61.self_attn.kv_a_proj_with_mqa.weight" in names
    assert "model.layers.61.mlp.experts.7.down_proj.weight" in names
    assert not any("model.layers.62." in name for name in list_hf_tensors(family, config))


def test_files_without_the_layers_are_imported_without_them(tmp_path: Path) -> None:
    """Transformers keeps num_nextn_predict_layers in the files that it saves, without layers."""
    source, _ = draw_files("glm4_moe", tmp_path)
    assert json.loads((source / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert "multi-token" not in run_import(source, tmp_path / "run")
    assert find_checkpoint(tmp_path / "run").config.mtp_layers == 0
    section = adopt_path(source)
    assert section.overrides()["mtp_layers"] == 0


def adopt_path(source: Path, **fields: Any) -> ModelSection:
    """Return the model of a job with ``model.path``."""
    recipe = small_job()
    model = ModelSection.model_validate({"path": str(source), **fields})
    job = recipe.model_copy(update={"model": model})
    adopted, errors = adopt_model(job, recipe, source.parent / "no-run")
    assert not errors, [str(error) for error in errors]
    return adopted.model


def test_layers_can_be_left_out(tmp_path: Path) -> None:
    source, _, extra = draw_mtp_files("deepseek_v3", tmp_path)
    assert adopt_path(source).overrides()["mtp_layers"] == 1
    assert adopt_path(source, mtp_layers=0).overrides()["mtp_layers"] == 0
    recipe = small_job()
    model = ModelSection.model_validate({"path": str(source), "mtp_layers": 2})
    _, errors = adopt_model(recipe.model_copy(update={"model": model}), recipe, tmp_path / "none")
    assert "use 0 to leave out" in str(errors[0]).lower()

    message = run_import(source, tmp_path / "run", with_mtp=False)
    assert "are not imported" in message
    checkpoint = find_checkpoint(tmp_path / "run")
    assert checkpoint.config.mtp_layers == 0
    assert not any(name.startswith("layers.3.") for name in open_weights(checkpoint.path))
    export_checkpoint(tmp_path / "run", tmp_path / "out", "", "5GB", lambda progress: None)
    assert load_tensors(tmp_path / "out").keys() == load_tensors(source).keys() - extra.keys()
    tree = json.loads((tmp_path / "out" / "config.json").read_text())
    assert tree["num_nextn_predict_layers"] == 0


def test_shared_weights_must_be_equal_and_may_be_missing(tmp_path: Path) -> None:
    source, _, _ = draw_mtp_files("glm4_moe", tmp_path, with_copies=False)
    run_import(source, tmp_path / "run")
    assert find_checkpoint(tmp_path / "run").config.mtp_layers == 1
    name = "model.layers.3.shared_head.head.weight"
    other = load_tensors(source)["lm_head.weight"].clone()
    other[-1, -1] += 1
    rewrite(source, {name: other})
    (error,) = import_errors(source, tmp_path / "again")
    assert f"{name} differs from lm_head.weight" in error
    rewrite(source, {name: None, "model.layers.3.eh_proj.weight": None})
    (error,) = import_errors(source, tmp_path / "again")
    assert "model.layers.3.eh_proj.weight is in none of the files" in error


def test_export_of_another_family_leaves_the_layers_out(tmp_path: Path) -> None:
    family, run = FAMILIES["llama"], tmp_path / "run"
    config = family.presets["toy"].model_copy(update={"mtp_layers": 1, "vocab_size": 67})
    tensors = {name: torch.randn(shape) for name, shape in param_shapes(family, config).items()}
    weights = {n: Weight(t.shape, lambda t=t: iter([t])) for n, t in tensors.items()}
    section = model_section("llama", config, "")
    save_tokenizer(tmp_path)
    files = {"tokenizer.json": tmp_path / "tokenizer.json"}
    source = ModelSource("test", section, weights, 4, ["F32"], files, "")
    data = {"tokenizer": str(run / "tokenizer.json")}
    job = replace(Job(), run={"dir": str(run)}, model=section.model_dump(), data=data)
    run.mkdir()
    write_imported(run, run / "checkpoints", source, job, lambda progress: None)
    message = export_checkpoint(run, tmp_path / "out", "", "5GB", lambda progress: None)
    assert message.endswith("without its layers of multi-token prediction (model.mtp_layers=1)")
    after = load_tensors(tmp_path / "out")
    assert len(after) == len(param_shapes(family, config.model_copy(update={"mtp_layers": 0})))
    assert torch.equal(after["model.norm.weight"], tensors["norm.weight"])


@pytest.mark.parametrize("kind", ["glm4_moe", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_layers_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Logits and gradients of transformers' MtpModel, which drafts tokens with these layers."""
    from transformers.modeling_layers import MtpModel

    source, twin, _ = draw_mtp_files(kind, tmp_path, layers=2)
    twin = type(twin).from_pretrained(source, **EAGER, dtype=torch.float32)
    twin._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[34]\."]  # it lists 61, 46 and 92
    theirs = MtpModel.from_pretrained(twin).eval()
    run_import(source, tmp_path / "run")
    checkpoint = find_checkpoint(tmp_path / "run")
    with torch.device("meta"):
        model = checkpoint.family.build(checkpoint.config)
    model.to_empty(device="cpu")
    weights = open_weights(checkpoint.path)
    model.load_state_dict({n: torch.cat([*w.read()]) for n, w in weights.items()})

    # For inference the layers are left out.
    unsharded = load_unsharded(checkpoint, torch.device("cpu"))
    assert list(unsharded.get_submodule("layers")._modules) == ["0", "1", "2"]
    vocab_size, length = checkpoint.config.vocab_size, 12
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(vocab_size, (1, length + 3), generator=generator)
    later = torch.stack([tokens[:, 1 + k : 1 + k + length] for k in range(2)], dim=-1)
    ours = model(tokens[:, :length], None, None, later).unflatten(0, (3, 1))

    hidden = twin(tokens[:, :length], output_hidden_states=True).hidden_states[-1]
    logits = [twin.lm_head(hidden)]
    for k in range(2):
        hidden = theirs.forward_layer(
            k, hidden, torch.arange(length)[None], None, input_ids=later[..., k]
        )
        logits.append(twin.lm_head(hidden))
    expected = torch.stack(logits)
    assert torch.equal(unsharded(tokens[:, :length]), ours[0])
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    for outputs in (ours, expected):
        loss = sum(
            F.cross_entropy(outputs[k, 0], tokens[0, 1 + k : 1 + k + length]) for k in range(3)
        )
        loss.backward()  # type: ignore[union-attr]
    grads = to_weft(
        kind,
        checkpoint.config.model_copy(update={"mtp_layers": 0}),
        gradient_files(twin, tmp_path / "grads"),
        tmp_path / "weft",
    )
    params = dict(model.named_parameters())
    for name, grad in grads.items():
        if name in params and (scale := float(grad.abs().max())) > 1e-6:
            error = float((params[name].grad - grad).abs().max()) / scale
            assert error <= 1e-4, (name, error)
    for k, layer in enumerate(theirs.layers):
        for name in ("enorm", "hnorm", "eh_proj", "post_norm"):
            grad = getattr(layer, name).weight.grad
            ours_name = f"layers.{3 + k}.{name.replace('post_norm', 'shared_head.norm')}.weight"
            error = float((params[ours_name].grad - grad).abs().max() / grad.abs().max())
            assert error <= 1e-4, (ours_name, error)


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_costs_are_those_of_the_module(kind: str) -> None:
    family = FAMILIES[kind]
    update = {"mtp_layers": 2, "num_layers": 3, "vocab_size": 64, "tied_embeddings": False}
    config: Any = next(iter(family.presets.values())).model_copy(update=update)
    with torch.device("meta"):
        model = family.build(config)
        tokens = torch.zeros(1, 32, dtype=torch.int64)
        later = torch.zeros(1, 32, 2, dtype=torch.int64)
    total = sum(param.numel() for param in model.parameters())
    assert num_params(config) == total
    idle = sum(
        param.numel() * (config.num_experts - config.active_experts) // config.num_experts
        for name, param in model.named_parameters()
        if ".experts." in name
    )
    assert num_active_params(config) == total - idle
    units = unit_costs(config, 32)
    assert sum(unit.flops_per_token for unit in units) == pytest.approx(flops_per_token(config, 32))
    if kind != "llama":
        return  # experts' products depend on values
    with FlopCounterMode(display=False) as counter:
        model(tokens, None, None, later)
    assert 3 * counter.get_total_flops() == pytest.approx(32 * flops_per_token(config, 32))


def test_preset_is_the_published_model_without_its_layer() -> None:
    family = FAMILIES["deepseek_v3"]
    tree = to_hf_config(family, family.presets["671b"], "bfloat16")
    assert tree["num_nextn_predict_layers"] == 0
    config, errors = from_hf_config(family, tree | {"num_nextn_predict_layers": 1})
    assert not errors
    assert config == family.presets["671b"].model_copy(update={"mtp_layers": 1})
    # The model's README counts 11.5 billion parameters of the layer's own, and its projection.
    extra = family.num_params(config) - family.num_params(family.presets["671b"])
    assert round((extra - 2 * 7168**2) / 1e9, 1) == 11.5
