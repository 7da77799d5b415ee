"""The text models of multi-modal files: imported, computed and exported as transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conversion.test_end_tokens import make_tokenizer
from weft.conversion.hf_convert import export_checkpoint
from weft.conversion.hf_import import import_model
from weft.inference.inference_model import find_checkpoint, load_unsharded

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}


def make_model(kind: str) -> Any:
    """Return a tiny random multi-modal model of transformers."""
    from transformers import (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Mistral3Config,
        Mistral3ForConditionalGeneration,
    )

    torch.manual_seed(0)
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    if kind == "gemma3":
        text = SIZES | {"sliding_window": 8, "query_pre_attn_scalar": 16}
        config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1)
        return Gemma3ForConditionalGeneration(config)
    mistral = Mistral3Config(
        text_config=SIZES | {"model_type": "mistral", "sliding_window": None},
        vision_config=vision | {"model_type": "pixtral", "head_dim": 16},
    )
    return Mistral3ForConditionalGeneration(mistral)


def old_names(directory: Path) -> None:
    """Give the tensors the names of files that were published before transformers 4.52."""
    file = directory / "model.safetensors"
    renamed = {}
    for name, tensor in load_file(file).items():
        if name.startswith("model.language_model."):
            name = f"language_model.model.{name.removeprefix('model.language_model.')}"
        elif name == "lm_head.weight":
            name = "language_model.lm_head.weight"
        else:
            name = name.removeprefix("model.")
        renamed[name] = tensor
    save_file(renamed, file, {"format": "pt"})


@pytest.mark.parametrize("is_old", [False, True], ids=["new names", "old names"])
@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
def test_text_model_computes_and_exports_as_transformers(
    kind: str, is_old: bool, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    twin = make_model(kind).eval()
    source = tmp_path / "source"
    twin.save_pretrained(source)
    make_tokenizer().save(str(source / "tokenizer.json"))
    if is_old:
        old_names(source)
    import_model(source, tmp_path / "run", lambda _: None, force=True)
    tokens = torch.arange(24).unsqueeze(0)
    with torch.no_grad():
        expected = twin(input_ids=tokens).logits
        model = load_unsharded(find_checkpoint(tmp_path / "run"), torch.device("cpu"))
        logits = model(tokens)
    atol = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(logits, expected, atol=atol, rtol=1e-5)

    export_checkpoint(tmp_path / "run", tmp_path / "out", "float32", "5GB", lambda _: None)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["model_type"] == {"gemma3": "gemma3_text", "mistral3": "mistral"}[kind]
    assert not {"text_config", "vision_config"} & config.keys()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(exported(tokens).logits, expected, atol=atol, rtol=1e-5)
