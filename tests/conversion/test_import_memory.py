"""Imports stream: their memory does not grow with the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.conversion.test_end_tokens import make_tokenizer
from tests.conversion.test_float8_files import BLOCK, FP8

LIMIT_BYTES = 800 << 20  # above the largest file, and above a process that imports nothing
DIM, FFN_DIM, VOCAB_SIZE = 1024, 8192, 32768

# A process of its own, because a peak is of a process.  Not `ru_maxrss`, which a child inherits.
SCRIPT = """
import re, sys
from pathlib import Path
from weft.conversion.hf_import import import_model
import torch, transformers
def peak():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", status)[1]) * 1024
before = peak()
import_model(Path(sys.argv[1]), Path(sys.argv[2]), lambda _: None, force=True)
print(before, peak())
"""


def write_shards(directory: Path, layers: int, kind: str) -> tuple[int, int]:
    """Write a model of random bytes, a file per layer; return all bytes and the largest file's."""
    prefix = "model.language_model." if kind == "wrapper" else "model."
    index: dict[str, str] = {}
    sizes = []

    def save(name: str, tensors: dict[str, Tensor]) -> None:
        save_file(tensors, directory / name, {"format": "pt"})
        sizes.append((directory / name).stat().st_size)
        index.update(dict.fromkeys(tensors, name))

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, dtype=torch.bfloat16) / 32

    def norm(width: int = DIM) -> Tensor:
        return torch.ones(width, dtype=torch.bfloat16)

    save(
        "first.safetensors",
        {f"{prefix}embed_tokens.weight": matrix(VOCAB_SIZE, DIM), f"{prefix}norm.weight": norm()},
    )
    if kind == "wrapper":
        save("vision.safetensors", {"model.vision_tower.patch.weight": matrix(DIM, DIM)})
    for layer in range(layers):
        block = f"{prefix}layers.{layer}."
        shapes = {"mlp.up_proj": (FFN_DIM, DIM), "mlp.gate_proj": (FFN_DIM, DIM)}
        shapes |= {"mlp.down_proj": (DIM, FFN_DIM), "self_attn.o_proj": (DIM, DIM)}
        shapes |= {f"self_attn.{name}_proj": (DIM, DIM) for name in "qkv"}
        tensors = {}
        for name, shape in shapes.items():
            weight = matrix(*shape)
            if kind == "float8":
                scales = torch.full((shape[0] // BLOCK, shape[1] // BLOCK), 1 / 32)
                tensors[f"{block}{name}.weight_scale_inv"] = scales
                weight = weight.to(torch.float8_e4m3fn)
            tensors[f"{block}{name}.weight"] = weight
        names = ["input_layernorm", "post_attention_layernorm"]
        if kind == "wrapper":
            names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
            for name in ("q_norm", "k_norm"):
                tensors[f"{block}self_attn.{name}.weight"] = norm(DIM // 8)
        tensors |= {f"{block}{name}.weight": norm() for name in names}
        save(f"layer-{layer}.safetensors", tensors)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return sum(sizes), max(sizes)


def write_config(directory: Path, layers: int, kind: str) -> None:
    """Write the config of `write_shards`."""
    from transformers import Gemma3Config, LlamaConfig

    sizes: dict[str, Any] = {
        "hidden_size": DIM,
        "intermediate_size": FFN_DIM,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": DIM // 8,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    if kind == "wrapper":
        config = Gemma3Config(text_config=sizes, vision_config={"num_hidden_layers": 1}).to_dict()
        config["architectures"] = ["Gemma3ForConditionalGeneration"]
    else:
        config = LlamaConfig(**sizes).to_dict() | {"quantization_config": FP8}
        config["architectures"] = ["LlamaForCausalLM"]
    (directory / "config.json").write_text(json.dumps(config))
    make_tokenizer().save(str(directory / "tokenizer.json"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "layers"), [("wrapper", 20), ("float8", 40)])
def test_import_of_a_gigabyte_needs_the_memory_of_a_file(
    kind: str, layers: int, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    all_bytes, largest_bytes = write_shards(source, layers, kind)
    assert all_bytes > 1 << 30
    write_config(source, layers, kind)
    command = [sys.executable, "-c", SCRIPT, str(source), str(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert result.returncode == 0, result.stderr
    before, peak = map(int, result.stdout.split()[-2:])
    print(f"{kind}: {all_bytes:,} bytes, largest file {largest_bytes:,}, {peak - before:,} more")
    assert peak - before <= largest_bytes + LIMIT_BYTES
