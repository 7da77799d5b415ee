"""Conversion from and to config.json: the same model, or every reason for a refusal."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch import nn

from tests.models.test_llama import SCALED, SMALL, TIED
from weft.models import FAMILIES
from weft.models.family import hf_name
from weft.models.hf_mapping import detect_family, from_hf_config, param_shapes, to_hf_config
from weft.models.llama import PRESETS, Llama, LlamaConfig

LLAMA = FAMILIES["llama"]
ALL = [SMALL, TIED, SCALED, *PRESETS.values()]


@pytest.mark.parametrize("config", ALL)
def test_to_config_and_from_config_are_inverse(config: LlamaConfig) -> None:
    assert from_hf_config(LLAMA, to_hf_config(LLAMA, config, "bfloat16")) == (config, [])


@pytest.mark.parametrize("config", [SMALL, TIED, SCALED])
def test_from_config_written_by_transformers_is_understood(config: LlamaConfig) -> None:
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM

    twin: nn.Module = LlamaForCausalLM(TheirConfig(**to_hf_config(LLAMA, config, "float32")))
    assert from_hf_config(LLAMA, json.loads(twin.config.to_json_string())) == (config, [])
    names = {hf_name(name): shape for name, shape in param_shapes(LLAMA, config).items()}
    assert names == {name: p.shape for name, p in twin.named_parameters()}


def test_shapes_are_those_of_the_model() -> None:
    for config in (SMALL, TIED, SMALL.model_copy(update={"num_layers": 12})):
        params = {name: p.shape for name, p in Llama(config).named_parameters()}
        assert list(param_shapes(LLAMA, config)) == list(params)
        assert param_shapes(LLAMA, config) == params


def test_from_config_of_an_older_transformers_is_understood() -> None:
    """The config of Llama 2 7B on the hub omits fields that have defaults."""
    tree = {
        "_name_or_path": "meta-llama/Llama-2-7b-hf",
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.31.0.dev0",
        "use_cache": True,
        "vocab_size": 32000,
    }
    config, errors = from_hf_config(LLAMA, tree)
    assert errors == []
    assert config is not None
    assert (config.rope_theta, config.rope_scaling, config.num_kv_heads) == (10000.0, False, 32)
    for name in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps"):
        del tree[name]
    config, errors = from_hf_config(LLAMA, tree)
    assert errors == []
    assert config is not None
    assert (config.num_kv_heads, config.max_seq_len, config.norm_eps) == (32, 2048, 1e-6)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
NONE = object()  # the field is removed


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["MistralForCausalLM"]}, ["architectures=['MistralForCausalLM'] "]),
        ({"architectures": NONE}, ["architectures must be"]),
        ({"model_type": "qwen2"}, ['model_type="qwen2" must be "llama"']),
        ({"hidden_act": "gelu"}, ['hidden_act="gelu" must be "silu"']),
        ({"attention_bias": True}, ["attention_bias=true must be false"]),
        ({"mlp_bias": True}, ["mlp_bias=true"]),
        ({"attention_dropout": 0.1}, ["attention_dropout=0.1 must be 0.0"]),
        ({"head_dim": 128}, ["head_dim=128 must be hidden_size / num_attention_heads = 16"]),
        ({"auto_map": {"AutoModel": "x.Y"}}, ["never runs remote code"]),
        ({"quantization_config": {"bits": 4}}, ["dequantized weights first"]),
        ({"sliding_window": 4096}, ["sliding_window=4096 is not a known field of Llama"]),
        ({"layer_types": ["full_attention"] * 2, "head_dim": 32}, ["head_dim=32 must be"]),
        ({"layer_types": ["sliding_attention"]}, ["layer_types"]),
        ({"layer_types": 5}, ["layer_types=5 must be"]),
        ({"layer_types": [{}]}, ["layer_types"]),
        ({"hidden_size": NONE}, ["hidden_size is missing"]),
        ({"hidden_size": "64"}, ['hidden_size="64" must be an integer']),
        ({"hidden_size": -64}, ["hidden_size=-64 must be an integer from 1"]),
        ({"hidden_size": 10**30}, ["must be an integer from 1 to 1,048,576"]),
        ({"hidden_size": True}, ["hidden_size=true must be an integer"]),
        ({"num_attention_heads": 7}, ["num_attention_heads=7 does not divide hidden_size=64"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads=3 does not divide"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps=0 must be a number from 1e-12"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ['rope_type="linear"']),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, ['rope_type="yarn"']),
        ({"rope_scaling": {"rope_type": "llama3"}}, [".factor is missing"] + 3 * ["is missing"]),
        ({"rope_scaling": LLAMA3 | {"beta_fast": 1}}, ["beta_fast=1 is not a field of"]),
        (
            {"rope_scaling": LLAMA3 | {"factor": 0.5}},
            ["rope_scaling.factor=0.5 must be a number from 1"],
        ),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, ["scaling.high_freq_factor=1.0"]),
        ({"rope_scaling": {"factor": 2.0}}, ["rope_scaling.factor=2.0 is not a field"]),
        ({"rope_scaling": "llama3"}, ["must be an object"]),
        (
            {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3 | {"factor": 2.0}},
            ["contradicts rope_parameters"],
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"rope_interleaved": True}, ["rope_interleaved=true is not a known field"]),
        ({"\x1b[2Jx": 1}, ["config.json \\u001b[2Jx=1"]),
        (
            {"model_type": "qwen2", "hidden_act": "gelu", "vocab_size": 0, "window": 5},
            ["vocab_size=0", "model_type", "hidden_act", "window"],
        ),
    ],
)
def test_from_config_of_another_model_is_refused(
    changes: dict[str, Any], expected: list[str]
) -> None:
    tree = to_hf_config(LLAMA, SMALL, "float32") | changes
    config, errors = from_hf_config(LLAMA, {k: v for k, v in tree.items() if v is not NONE})
    assert config is None
    assert len(errors) == len(expected), [str(error) for error in errors]
    for error, text in zip(errors, expected, strict=True):
        assert str(error).startswith("config.json ")
        assert text in str(error)
        assert error.remedy


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("qwen3", {"head_dim": 20}, []),
        ("qwen3", {"head_dim": 21}, ["head_dim=21 is odd"]),
        ("qwen3", {"head_dim": NONE, "use_sliding_window": NONE}, []),
        ("qwen3", {"sliding_window": 4096, "max_window_layers": 28}, []),  # not used
        ("qwen3", {"use_sliding_window": True}, ["use_sliding_window=true must be false"]),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types"]),
        ("qwen3", {"attention_bias": True}, ["attention_bias"]),
        ("qwen3", {"rope_scaling": LLAMA3}, ["rope_type=\"llama3\" must be 'default'"]),
        ("mistral", {"sliding_window": 4096}, []),  # no sequence is longer
        ("mistral", {"sliding_window": 63}, ["less than max_position_embeddings=64"]),
        ("mistral", {"sliding_window": "64"}, ["sliding_window"]),
        (
            "mistral",
            {"sliding_window": NONE, "max_position_embeddings": 32768},
            ["sliding_window=4096"],
        ),
        ("mistral", {"head_dim": None}, []),
        ("mistral", {"attention_bias": False}, ["attention_bias=false is not a known field"]),
    ],
)
def test_from_config_of_other_families_is_read_or_refused(
    kind: str, changes: dict[str, Any], expected: list[str]
) -> None:
    family = FAMILIES[kind]
    config = family.presets["toy"].model_copy(update={"max_seq_len": 64})
    tree = to_hf_config(family, config, "float32") | changes
    tree = {name: value for name, value in tree.items() if value is not NONE}
    read, errors = from_hf_config(family, tree)
    assert len(errors) == len(expected), [str(error) for error in errors]
    assert (read is None) == bool(expected)
    for error, text in zip(errors, expected, strict=True):
        assert text in str(error)
    if read and kind == "qwen3":
        assert read.head_dim == changes.get("head_dim", 48) or changes["head_dim"] is NONE
    if read and changes.get("head_dim", 0) is None:
        assert read.head_dim == config.dim // config.num_heads


def test_kind_of_a_config_is_its_family() -> None:
    for kind, family in FAMILIES.items():
        for preset in family.presets.values() if family.hf_mapping else ():
            tree = to_hf_config(family, preset, "float32")
            assert detect_family(tree, FAMILIES) == (kind, [])
            assert from_hf_config(family, tree) == (preset, [])
    for tree in ({"model_type": "gpt2"}, {}, {"model_type": ["llama"]}):
        kind, (error,) = detect_family(tree, FAMILIES)
        assert kind is None
        assert 'must be "llama" or "mistral" or "qwen3"' in str(error)


def test_published_llama_config_equals_the_preset() -> None:
    """The config.json on the hub matches, so the 8B recipes can continue from its weights."""
    tree = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    }
    assert detect_family(tree, FAMILIES) == ("llama", [])
    assert from_hf_config(FAMILIES["llama"], tree) == (PRESETS["8b"], [])


@pytest.mark.parametrize(("kind", "heads"), [("mistral", 8), ("qwen3", 32), ("llama", 6)])
def test_from_config_without_key_heads_has_transformers_default(kind: str, heads: int) -> None:
    tree = to_hf_config(FAMILIES[kind], FAMILIES[kind].presets["toy"], "float32")
    tree["num_attention_heads"] = 6
    del tree["num_key_value_heads"]
    config = from_hf_config(FAMILIES[kind], tree)[0]
    assert config is None or config.num_kv_heads == heads
    tree["num_key_value_heads"] = None
    assert from_hf_config(FAMILIES[kind], tree)[0].num_kv_heads == 6


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rms_norm_eps", -1e-5),
        ("rms_norm_eps", 0.5),
        ("rms_norm_eps", 1e30),
        ("rms_norm_eps", 1e-30),
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", 0),
        ("rope_theta", 1e300),
        ("hidden_size", 10**9),
        ("hidden_size", 64.0),
        ("num_hidden_layers", 10**30),
        ("num_hidden_layers", 1e30),
        ("num_hidden_layers", 0),
        ("num_attention_heads", 0),
        ("num_key_value_heads", -2),
        ("intermediate_size", 1 << 40),
        ("vocab_size", True),
        ("max_position_embeddings", 1 << 60),
    ],
)
def test_from_config_number_that_no_model_has_is_refused(field: str, value: object) -> None:
    from weft.models import FAMILIES
    from weft.models.hf_mapping import from_hf_config, to_hf_config

    family = FAMILIES["llama"]
    tree = to_hf_config(family, family.presets["toy"], "float32")
    config, errors = from_hf_config(family, tree)
    assert config is not None, errors
    config, errors = from_hf_config(family, tree | {field: value})
    assert config is None
    [error] = [error for error in errors if error.key == f"config.json {field}"]
    assert "must be a" in error.rule
    assert " from " in error.rule
