"""Conversion from and to config.json: the same model, or every reason for a refusal."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from torch import nn

from weft.models import FAMILIES
from weft.models.decoder import Decoder
from weft.models.decoder_config import DecoderConfig
from weft.models.families.llama import PRESETS
from weft.models.hf_mapping import (
    check_hf_config,
    detect_family,
    from_hf_config,
    get_hf_mapping,
    param_shapes,
    simplify,
    text_config,
    to_hf_config,
)
from weft.models.hf_rope import yarn_magnitude

LLAMA = FAMILIES["llama"]
SMALL = DecoderConfig(
    num_layers=2,
    dim=64,
    num_heads=4,
    num_kv_heads=2,
    ffn_dim=96,
    vocab_size=128,
    max_seq_len=64,
    rope_theta=10000.0,
    rope_scaling="none",
)
TIED = SMALL.model_copy(update={"tied_embeddings": True})
# All three regions of frequencies occur.
SCALED = SMALL.model_copy(update={"rope_scaling": "llama3", "rope_original_context": 32})
ALL = [SMALL, TIED, SCALED, *PRESETS.values()]


@pytest.mark.parametrize("config", ALL)
def test_to_config_and_from_config_are_inverse(config: DecoderConfig) -> None:
    assert from_hf_config(LLAMA, to_hf_config(LLAMA, config, "bfloat16")) == (config, [])


@pytest.mark.parametrize("config", [SMALL, TIED, SCALED])
def test_from_config_written_by_transformers_is_understood(config: DecoderConfig) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    twin: nn.Module = LlamaForCausalLM(LlamaConfig(**to_hf_config(LLAMA, config, "float32")))
    assert from_hf_config(LLAMA, json.loads(twin.config.to_json_string())) == (config, [])  # type: ignore[union-attr,operator]
    hf_name = get_hf_mapping(LLAMA).hf_name
    names = {hf_name(name): shape for name, shape in param_shapes(LLAMA, config).items()}
    assert names == {name: p.shape for name, p in twin.named_parameters()}


def test_shapes_are_those_of_the_model() -> None:
    sparse = {"num_experts": 4, "dense_layers": 1, "expert_interval": 2, "num_layers": 5}
    others = ({"num_layers": 12}, sparse)
    for config in (SMALL, TIED, *(SMALL.model_copy(update=other) for other in others)):
        params = {name: tensor.shape for name, tensor in Decoder(config).state_dict().items()}
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
    assert (config.rope_theta, config.rope_scaling, config.num_kv_heads) == (10000.0, "none", 32)
    for name in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps"):
        del tree[name]
    config, errors = from_hf_config(LLAMA, tree)
    assert errors == []
    assert config is not None
    assert (config.num_kv_heads, config.max_seq_len, config.norm_eps) == (32, 2048, 1e-6)


@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if f.hf_mapping is not None])
def test_from_config_with_every_field_of_its_class_is_understood(name: str) -> None:
    """A program that writes `to_dict` writes also the fields that have their defaults."""
    from transformers import CONFIG_MAPPING

    mapping = get_hf_mapping(FAMILIES[name])
    config: Any = CONFIG_MAPPING[mapping.model_type]()
    tree = json.loads(config.to_json_string(use_diff=False))
    _, errors = from_hf_config(FAMILIES[name], tree | {"architectures": [mapping.architecture]})
    assert [error for error in errors if "not a known field" in error.rule] == []


# The other fields of the base class of transformers 4, with their defaults.
BASE_OF_FOUR = {
    "add_cross_attention": False,
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "cross_attention_hidden_size": None,
    "decoder_start_token_id": None,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "finetuning_task": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "length_penalty": 1.0,
    "max_length": 20,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "output_scores": False,
    "prefix": None,
    "pruned_heads": {},
    "remove_invalid_values": False,
    "repetition_penalty": 1.0,
    "return_dict_in_generate": False,
    "sep_token_id": None,
    "suppress_tokens": None,
    "task_specific_params": None,
    "temperature": 1.0,
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
    "tokenizer_class": None,
    "top_k": 50,
    "top_p": 1.0,
    "torchscript": False,
    "typical_p": 1.0,
    "use_bfloat16": False,
}


def test_from_config_with_the_base_fields_of_transformers_4_is_understood() -> None:
    tree = to_hf_config(LLAMA, SMALL, "float32") | BASE_OF_FOUR | {"is_decoder": True}
    assert from_hf_config(LLAMA, tree) == (SMALL, [])
    for change in ({"is_encoder_decoder": True}, {"pruned_heads": {"0": [1]}}):
        _, errors = from_hf_config(LLAMA, tree | change)
        assert [error.rule for error in errors] == [
            f"must be {json.dumps(BASE_OF_FOUR[name])}" for name in change
        ]


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 32,
}
NONE = object()  # the field is removed


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["MistralForCausalLM"]}, ["architectures=['MistralForCausalLM'] "]),
        ({"architectures": NONE}, ["architectures must be"]),
        ({"model_type": "qwen2"}, ['model_type="qwen2" must be "llama"']),
        ({"hidden_act": "tanh"}, ['hidden_act="tanh" must be "swish" or "silu" or']),
        ({"hidden_act": ["silu"]}, ["hidden_act=['silu'] must be"]),
        ({"attention_bias": 1}, ["attention_bias=1 must be true or false"]),
        ({"attention_dropout": 0.1}, ["attention_dropout=0.1 must be 0.0"]),
        ({"head_dim": 15}, ["head_dim=15 is odd"]),
        ({"auto_map": {"AutoModel": "x.Y"}}, ["never runs remote code"]),
        ({"quantization_config": {"bits": 4}}, ["save dequantized weights"]),
        ({"sliding_window": 4096}, ["sliding_window=4096 is not a known field of Llama"]),
        ({"layer_types": ["full_attention"] * 2, "head_dim": 33}, ["head_dim=33 is odd"]),
        ({"layer_types": ["sliding_attention"]}, ["layer_types"]),
        ({"layer_types": 5}, ["layer_types=5 must be"]),
        ({"layer_types": [{}]}, ["layer_types"]),
        ({"hidden_size": NONE}, ["hidden_size is missing"]),
        ({"hidden_size": "64"}, ['hidden_size="64" must be an integer']),
        ({"hidden_size": -64}, ["hidden_size=-64 must be an integer from 1"]),
        ({"hidden_size": 10**30}, ["must be an integer from 1 to 1,048,576"]),
        ({"hidden_size": True}, ["hidden_size=true must be an integer"]),
        (
            {"num_attention_heads": 7, "head_dim": NONE},
            ["num_attention_heads=7 does not divide hidden_size=64"],
        ),
        ({"num_key_value_heads": 3}, ["num_key_value_heads=3 does not divide"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps=0 must be a number from 1e-12"]),
        ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, ['rope_type="mrope" must be']),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, ["rope_type=['yarn'] must be"]),
        ({"rope_scaling": {"rope_type": "yarn"}}, ["rope_scaling.factor is missing"]),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": "x"}},
            ['rope_scaling.mscale="x" must be a number'],
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": 1}},
            ["rope_scaling.truncate=1 must be true or false"],
        ),
        (
            {"rope_scaling": LONG | {"long_factor": [1.0] * 7}},
            ["rope_scaling.long_factor=[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0] has 7 numbers"],
        ),
        (
            {"rope_scaling": LONG | {"short_factor": [1e9] * 8}},
            ["rope_scaling.short_factor=1000000000.0 must be a number from 0.001"],
        ),
        (
            {"rope_scaling": LONG | {"short_factor": 5}},
            ["rope_scaling.short_factor=5 must be a list of numbers"],
        ),
        ({"rope_scaling": {"rope_type": "llama3"}}, [".factor is missing"] + 3 * ["is missing"]),
        ({"rope_scaling": LLAMA3 | {"beta_fast": 1}}, ["beta_fast=1 is not a field of"]),
        (
            {"rope_scaling": LLAMA3 | {"factor": 0.5}},
            ["rope_scaling.factor=0.5 must be a number from 1"],
        ),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 0.5}}, ["scaling.high_freq_factor=0.5"]),
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
            {"model_type": "qwen2", "hidden_act": "tanh", "vocab_size": 0, "window": 5},
            ["vocab_size=0", "hidden_act", "model_type", "window"],
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
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": NONE}, []),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types"]),
        (
            "qwen3",
            {"layer_types": ["full_attention", "full_attention", "sliding_attention"]},
            ["must be set, because there are local layers"],
        ),
        ("qwen3", {"layer_types": NONE, "max_window_layers": -1}, ["max_window_layers=-1"]),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 0}, ["sliding_window=0 must be"]),
        ("qwen3", {"rope_scaling": LLAMA3}, []),
        ("mistral", {"sliding_window": 4096}, []),
        ("mistral", {"sliding_window": 63}, []),
        ("mistral", {"sliding_window": "64"}, ["sliding_window"]),
        ("mistral", {"sliding_window": 9, "layer_types": ["full_attention"] * 3}, ["layer_types"]),
        ("mistral", {"head_dim": None}, []),
        ("mistral", {"attention_bias": False}, ["attention_bias=false is not a known field"]),
        ("gemma2", {"sliding_window": None}, ["sliding_window must be set"]),
        ("gemma2", {"query_pre_attn_scalar": 0}, ["query_pre_attn_scalar=0 must be an integer"]),
        ("gemma2", {"final_logit_softcapping": -1.0}, ["final_logit_softcapping=-1.0 must be a"]),
        ("gemma2", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            ["sliding_attention.rope_type"],
        ),
        ("smollm3", {"no_rope_layers": [1, 1]}, ["must have 0 or 1 for each of 3 layers"]),
        ("smollm3", {"no_rope_layers": [1, 2, 0]}, ["must have 0 or 1"]),
        ("smollm3", {"no_rope_layers": NONE, "no_rope_layer_interval": 0}, ["from 1"]),
        ("llama4", {"moe_layers": [0, 2]}, ["must have every layer of interleave_moe"]),
        ("llama4", {"attention_chunk_size": None}, ["attention_chunk_size must be set"]),
        ("llama4", {"attn_temperature_tuning": 4}, []),
        ("qwen3_moe", {"mlp_only_layers": [1]}, ["must have the first layers"]),
        ("qwen3_moe", {"num_experts": 10**9}, ["must be an integer from 1 to 65,536"]),
        ("qwen3_moe", {"num_experts_per_tok": 9}, ["num_experts_per_tok=9 exceeds num_experts=8"]),
        ("ernie4_5_moe", {"moe_layer_end_index": 1}, ["must be -1 or 2"]),
        ("ernie4_5_moe", {"use_bias": True}, ["use_bias=true must be false"]),
        ("olmoe", {"clip_qkv": 8.0}, ["clip_qkv=8.0 must be null"]),
        ("deepseek_v3", {"head_dim": 17}, ["head_dim=17 must be 16"]),
        ("deepseek_v3", {"qk_nope_head_dim": "x"}, ["qk_nope_head_dim"]),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, ["rms_norm_eps=1e-05 must be 1e-06"]),
        ("deepseek_v3", {"topk_group": 5}, ["topk_group=5 exceeds n_group=4"]),
        ("deepseek_v3", {"topk_method": "greedy"}, ["topk_method"]),
        ("gpt_oss", {"swiglu_alpha": 1.0}, ["swiglu_alpha=1.0 must be 1.702"]),
        ("phi3", {"partial_rotary_factor": 1.5}, ["partial_rotary_factor=1.5 must be a number"]),
        ("granite", {"logits_scaling": 0}, ["logits_scaling=0 must be a number"]),
        ("granite", {"attention_dropout": 0.1}, []),
        (
            "phi3",
            {"rope_scaling": LLAMA3},
            ["rope_type=\"llama3\" must be 'default' or 'longrope'"],
        ),
        (
            "qwen3",
            {"use_sliding_window": "yes"},
            ['use_sliding_window="yes" must be true or false'],
        ),
        ("cohere2", {"layer_types": NONE, "sliding_window_pattern": "4"}, ["integer from 1"]),
        ("qwen3_moe", {"num_local_experts": 4}, ["num_local_experts=4 contradicts num_experts"]),
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
        assert read.key_dim == config.dim // config.num_heads


def test_kind_of_a_config_is_its_family() -> None:
    for kind, family in FAMILIES.items():
        for preset in family.presets.values() if family.hf_mapping else ():
            tree = to_hf_config(family, preset, "float32")
            assert detect_family(tree, FAMILIES) == (kind, [])
            assert from_hf_config(family, tree) == (preset, [])
    for tree in ({"model_type": "gpt2"}, {}, {"model_type": ["llama"]}):
        kind, (error,) = detect_family(tree, FAMILIES)
        assert kind is None
        assert 'must be "llama" or "' in str(error)
        assert "add-a-family.md" in error.remedy


def test_published_multi_modal_config_has_the_text_model_of_the_preset() -> None:
    """Gemma 3 4B: its text_config names only what differs from the class of transformers."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    published = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": text,
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152},
    }
    tree = text_config(published, FAMILIES)
    assert detect_family(tree, FAMILIES) == ("gemma3", [])
    config, errors = from_hf_config(FAMILIES["gemma3"], tree)
    assert errors == []
    expected = FAMILIES["gemma3"].presets["4b"].model_copy(update={"vocab_size": 262208})
    assert config == expected
    unknown = {"model_type": "new", "text_config": {"model_type": "new_text"}}
    assert text_config(unknown, FAMILIES) is unknown


def test_published_deepseek_config_equals_the_preset() -> None:
    family = FAMILIES["deepseek_v3"]
    tree = to_hf_config(family, family.presets["671b"], "bfloat16")
    expected = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
    expected |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
    written = tree["rope_scaling"] | {"type": "yarn"}
    assert {name: written[name] for name in expected} == expected
    published = tree | {
        "rope_scaling": expected,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
    }
    expected_config = family.presets["671b"].model_copy(update={"mtp_layers": 1})
    assert from_hf_config(family, published) == (expected_config, [])


def test_gpt_oss_without_scaling_has_that_of_the_published_models() -> None:
    family = FAMILIES["gpt_oss"]
    preset: Any = family.presets["20b"]
    tree = to_hf_config(family, preset, "bfloat16")
    assert tree["rope_scaling"]["truncate"] is False
    for value in ({}, {"rope_scaling": None}):
        read = from_hf_config(family, {**tree, "rope_scaling": None} | value)[0]
        assert read == preset
    assert preset.rope_magnitude == yarn_magnitude(32.0)
    toy: Any = family.presets["toy"]
    assert to_hf_config(family, toy, "bfloat16")["rope_scaling"] == {"rope_type": "default"}


@pytest.mark.parametrize("kinds", ["G", "LG", "LLLG" * 3, "LLG" * 4 + "L", "LLLLG", "GLLGL"])
def test_pattern_of_layers_is_the_shortest(kinds: str) -> None:
    changes = {"num_layers": len(kinds), "layer_pattern": kinds, "sliding_window": 8}
    pattern = simplify(SMALL.model_copy(update=changes)).layer_pattern
    repeated = pattern * len(kinds)
    assert repeated[: len(kinds)] == kinds
    shorter = (kinds[:n] * len(kinds) for n in range(1, len(pattern)))
    assert all(other[: len(kinds)] != kinds for other in shorter)


def test_reading_a_hostile_pattern_takes_little_time() -> None:
    family = FAMILIES["gemma2"]
    tree = to_hf_config(family, family.presets["toy"], "float32")
    tree["num_hidden_layers"] = 4096
    tree["layer_types"] = ["sliding_attention"] * 4095 + ["full_attention"]
    start = time.monotonic()
    config, errors = from_hf_config(family, tree)
    assert errors == []
    assert len(config.layer_pattern) == 4096
    assert time.monotonic() - start < 5


def test_simple_configuration_is_the_same_model() -> None:
    changes = {"head_dim": 16, "layer_pattern": "LL", "sliding_window": 8, "rope_factor": 3.0}
    config = simplify(SMALL.model_copy(update={**changes, "kv_rank": 0, "q_rank": 5}))
    assert (config.head_dim, config.layer_pattern, config.sliding_window) == (0, "L", 8)
    assert (config.rope_factor, config.q_rank) == (8.0, 0)
    assert simplify(config) == config


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
    family = FAMILIES["llama"]
    tree = to_hf_config(family, family.presets["toy"], "float32")
    config, errors = from_hf_config(family, tree)
    assert config is not None, errors
    config, errors = from_hf_config(family, tree | {field: value})
    assert config is None
    [error] = [error for error in errors if error.key == f"config.json {field}"]
    assert "must be a" in error.rule
    assert " from " in error.rule


def test_router_loss_of_a_config_is_that_of_transformers() -> None:
    """transformers adds the loss with output_router_logits only; see `weft.models.moe`."""
    family = FAMILIES["mixtral"]
    tree = to_hf_config(family, family.presets["toy"], "float32")
    tree |= {"router_aux_loss_coef": 0.02, "output_router_logits": False}
    config, errors = from_hf_config(family, tree)
    assert not errors
    assert config.router_aux_loss_coef == 0.0
    config, errors = from_hf_config(family, tree | {"output_router_logits": True})
    assert not errors
    scale = config.active_experts / config.num_moe_layers
    assert config.router_aux_loss_coef == pytest.approx(0.02 * scale)
    assert not check_hf_config(family, config)
    for bad in ("much", -0.5, None):
        tree |= {"output_router_logits": True, "router_aux_loss_coef": bad}
        _, errors = from_hf_config(family, tree)
        assert [error.key for error in errors] == ["config.json router_aux_loss_coef"]
