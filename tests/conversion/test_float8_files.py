"""Files in float8 with scales: DeepSeek's and Qwen's blocks, and those of compressed-tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conversion.test_end_tokens import make_tokenizer
from tests.small import newest_state
from weft.config.errors import InvalidConfig
from weft.conversion.hf_convert import export_checkpoint
from weft.conversion.hf_import import import_model

BLOCK = 128
FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"}
COMPRESSED: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "float-quantized"}


def write_model(directory: Path, kind: str) -> Path:
    """Write a random model whose sizes are no multiples of a block."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedModel,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    sizes: dict[str, Any] = {
        "hidden_size": 160,
        "intermediate_size": 200,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 40,
        "vocab_size": 300,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**sizes))
    if kind == "moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 144}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
    model.save_pretrained(directory)
    make_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def quantize(weight: Tensor, form: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return a matrix in float8, its scales, and the values, block by block."""
    rows, columns = weight.shape
    height, width = {"block": (BLOCK, BLOCK), "row": (1, columns), "one": (rows, columns)}[form]
    scales = torch.zeros(-(-rows // height), -(-columns // width))
    values, packed = torch.zeros_like(weight), torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            scales[i, j] = weight[block].abs().max() / 448
            packed[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
            values[block] = packed[block].float() * scales[i, j]
    return packed, scales, values


def rewrite(directory: Path, quantized: Path, plain: Path, form: str, config: Any) -> None:
    """Write a model in float8, and one with the same values in float32."""
    suffix = "_scale_inv" if config is FP8 else "_scale"
    float8, floats = {}, {}
    for name, weight in load_file(directory / "model.safetensors").items():
        floats[name] = float8[name] = weight
        if name.endswith("_proj.weight"):
            float8[name], scales, floats[name] = quantize(weight, form)
            float8[name + suffix] = scales.reshape(()) if form == "one" else scales
    for target, tensors in ((quantized, float8), (plain, floats)):
        target.mkdir()
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
        tree = json.loads((directory / "config.json").read_text())
        tree |= {"quantization_config": config} if target is quantized else {}
        (target / "config.json").write_text(json.dumps(tree))
        (target / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())


@pytest.mark.parametrize(
    ("kind", "form", "config"),
    [
        ("dense", "block", FP8),
        ("moe", "block", FP8),
        ("dense", "row", COMPRESSED),
        ("dense", "one", COMPRESSED),
    ],
)
def test_import_of_float8_equals_that_of_its_values(
    kind: str, form: str, config: Any, tmp_path: Path
) -> None:
    source = write_model(tmp_path / "source", kind)
    rewrite(source, tmp_path / "float8", tmp_path / "plain", form, config)
    states = []
    for name in ("float8", "plain"):
        import_model(tmp_path / name, tmp_path / f"run-{name}", lambda _: None, force=True)
        states.append(newest_state(tmp_path / f"run-{name}"))
    assert states[0].keys() == states[1].keys()
    assert all(tensor.equal(states[1][name]) for name, tensor in states[0].items())
    # The export has no float8, and says so.
    export_checkpoint(tmp_path / "run-float8", tmp_path / "out", "", "5GB", lambda _: None)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    dtypes = {t.dtype for t in load_file(tmp_path / "out/model.safetensors").values()}
    assert dtypes <= {torch.bfloat16, torch.float32}


def test_float8_with_scales_of_another_shape_is_refused(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", "dense")
    rewrite(source, tmp_path / "float8", tmp_path / "plain", "block", FP8)
    tensors = load_file(tmp_path / "float8/model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    tensors[name] = torch.ones(3, 5)
    save_file(tensors, tmp_path / "float8/model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidConfig, match=r"up_proj\.weight_scale_inv has shape \[3, 5\]"):
        import_model(tmp_path / "float8", tmp_path / "run", lambda _: None, force=True)
    del tensors[name]
    save_file(tensors, tmp_path / "float8/model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidConfig, match=r"up_proj\.weight is F8_E4M3, which is quantized"):
        import_model(tmp_path / "float8", tmp_path / "run", lambda _: None, force=True)
