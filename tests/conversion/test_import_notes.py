"""What the config.json of an imported model asks of training, and weft does otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import SeedOssConfig, SeedOssForCausalLM

from weft.conversion.hf_import import UNAPPLIED_FIELDS, _describe_training, import_model
from weft.data.tokenizer_training import train_tokenizer
from weft.models import FAMILIES


def test_import_names_dropout_that_is_not_applied(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["some words, and more of them"] * 3, 290)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
    config = SeedOssConfig(
        **sizes,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=tokenizer.get_vocab_size(),
        attention_dropout=0.1,
        residual_dropout=0.0,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )
    SeedOssForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save(str(tmp_path / "model/tokenizer.json"))
    summary = import_model(tmp_path / "model", tmp_path / "run", lambda _: None)
    assert "attention_dropout=0.1 in config.json is not applied" in summary
    assert "residual_dropout" not in summary


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe", "dots1", "ernie4_5_moe", "llama"])
def test_import_says_that_biases_of_routers_move(kind: str) -> None:
    config = next(iter(FAMILIES[kind].presets.values()))
    text = " ".join(_describe_training({}, config))
    assert ("model.balance_rate=0.001" in text) == (kind != "llama")


def test_every_ignored_field_of_training_is_said() -> None:
    ignored = {
        name
        for family in FAMILIES.values()
        for name in getattr(family.hf_mapping, "ignored_fields", ())
        if "dropout" in name or "aux_loss" in name
    }
    assert ignored == UNAPPLIED_FIELDS.keys()
