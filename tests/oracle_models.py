"""Models of transformers with the same shape as a decoder of weft, by hand from their config.json.

The exchange of weights and configurations of weft is not used.  `build_theirs` takes the fields of
config.json from weft's keys, and `theirs_of` finds the tensor of a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def build_theirs(kind: str, config: Any) -> nn.Module:
    """Build transformers' model of the same shape, with unspecified weights."""
    shape: dict[str, Any] = {
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.key_dim,
        "intermediate_size": config.ffn_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "attn_implementation": "eager",
        "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }
    if config.rope_scaling != "none":
        shape["rope_parameters"] |= {
            "rope_type": config.rope_scaling,
            "factor": config.rope_factor,
            "original_max_position_embeddings": config.rope_original_context,
        }
    if config.rope_scaling == "llama3":
        shape["rope_parameters"] |= {
            "low_freq_factor": config.rope_low_freq_factor,
            "high_freq_factor": config.rope_high_freq_factor,
        }
    if config.rope_scaling == "yarn":
        shape["rope_parameters"] |= {
            "beta_fast": config.rope_beta_fast,
            "beta_slow": config.rope_beta_slow,
            "truncate": config.rope_truncate,
        }
    for is_like, known, change in SPECIAL:
        if is_like(config):
            return _build(known, shape | change(config, shape))
    if kind == "moe":
        return _build_moe(config, shape)
    known = {"llama": "Llama", "mistral": "Mistral", "qwen3": "Qwen3"}[kind]
    window = config.sliding_window or None
    extra = {"sliding_window": window} if kind == "mistral" else {}
    return _build(known, shape | extra)


def _build(known: str, fields: dict[str, Any]) -> nn.Module:
    import transformers

    name = {"Gemma3": "Gemma3Text", "Llama4": "Llama4Text"}.get(known, known)
    configured = getattr(transformers, f"{name}Config")(**fields)
    model: nn.Module = getattr(transformers, f"{known}ForCausalLM")(configured)
    return model


def _layer_types(config: Any, local: str) -> list[str]:
    kinds = _each_layer(config.layer_pattern, config)
    return [local if kind == "L" else "full_attention" for kind in kinds]


def _each_layer(pattern: str, config: Any) -> str:
    return (pattern * config.num_layers)[: config.num_layers]


def _gpt_oss(config: Any, shape: dict[str, Any]) -> dict[str, Any]:
    return {
        "intermediate_size": config.expert_dim,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.active_experts,
        "swiglu_limit": config.expert_limit,
        "sliding_window": config.sliding_window,
        "layer_types": _layer_types(config, "sliding_attention"),
        "experts_implementation": "eager",
    }


def _deepseek(config: Any, shape: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_lora_rank": config.kv_rank,
        "q_lora_rank": config.q_rank or None,
        "qk_rope_head_dim": config.rope_head_dim,
        "qk_nope_head_dim": config.key_dim - config.rope_head_dim,
        "v_head_dim": config.value_dim,
        "head_dim": config.rope_head_dim,  # of the rotary tables
        "rope_interleave": config.rope_interleaved,
        "attention_bias": config.qkv_bias,
        # Both factors of yarn's magnitude are equal, so they change only the scores.
        "rope_parameters": shape["rope_parameters"] | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "n_routed_experts": config.num_experts,
        "n_shared_experts": config.shared_experts,
        "num_experts_per_tok": config.active_experts,
        "moe_intermediate_size": config.expert_dim,
        "n_group": config.expert_groups,
        "topk_group": config.active_groups,
        "routed_scaling_factor": config.route_scale,
        "norm_topk_prob": config.renormalize,
        "first_k_dense_replace": config.dense_layers,
        "experts_implementation": "eager",
    }


def _llama4(config: Any, shape: dict[str, Any]) -> dict[str, Any]:
    assert config.shared_experts == (config.num_experts > 0), "transformers has no such model"
    layers = range(config.num_layers) if config.num_experts else range(0)
    return {
        "intermediate_size": config.expert_dim,
        "intermediate_size_mlp": config.ffn_dim,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.active_experts,
        "moe_layers": [i for i in layers if (i + 1) % config.expert_interval == 0],
        "use_qk_norm": config.qk_norm == "unit",
        "no_rope_layers": [int(kind == "R") for kind in _each_layer(config.rope_pattern, config)],
        "layer_types": _layer_types(config, "chunked_attention"),
        "attention_chunk_size": config.attention_chunk,
        "floor_scale": config.temperature_interval,
        "attn_scale": config.temperature_scale,
        "attn_temperature_tuning": True,
    }


def _gemma(config: Any, shape: dict[str, Any]) -> dict[str, Any]:
    assert config.embedding_scale == math.sqrt(config.dim), "transformers has no such model"
    return {
        "query_pre_attn_scalar": round(config.attention_scale**-2),
        "sliding_window": config.sliding_window,
        "layer_types": _layer_types(config, "sliding_attention"),
        "final_logit_softcapping": config.logit_softcap or None,
        "attn_logit_softcapping": config.attention_softcap or None,
    }


def _gemma3(config: Any, shape: dict[str, Any]) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": config.rope_local_theta}
    both = {"full_attention": shape["rope_parameters"], "sliding_attention": local}
    return _gemma(config, shape) | {"rope_parameters": both}


def _granite(config: Any, shape: dict[str, Any]) -> dict[str, Any]:
    return {
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        "attention_multiplier": config.attention_scale,
        "logits_scaling": 1 / config.logit_scale,
    }


def _nemotron(config: Any, shape: dict[str, Any]) -> dict[str, Any]:
    partial = {"partial_rotary_factor": config.rope_fraction}
    return {
        "hidden_act": config.activation,
        "norm_eps": config.norm_eps,
        "rope_parameters": shape["rope_parameters"] | partial,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.ffn_bias,
    }


def _cohere(config: Any, shape: dict[str, Any]) -> dict[str, Any]:
    return {"layer_norm_eps": config.norm_eps, "logit_scale": config.logit_scale}


# The models of transformers with a part that Llama lacks, by a key of weft that only they have:
# the test of the key, the name, and the function that returns more fields of config.json.
SPECIAL: tuple[tuple[Callable[[Any], Any], str, Callable[[Any, Any], dict[str, Any]]], ...] = (
    (lambda config: config.kv_rank, "DeepseekV3", _deepseek),
    (lambda config: config.attention_sinks, "GptOss", _gpt_oss),
    (lambda config: config.attention_chunk, "Llama4", _llama4),
    (lambda config: config.rope_local_theta, "Gemma3", _gemma3),
    (lambda config: config.attention_softcap, "Gemma2", _gemma),
    (lambda config: config.activation == "relu2", "Nemotron", _nemotron),
    (lambda config: config.parallel_block, "Cohere", _cohere),
    (lambda config: config.norm_position == "post", "Olmo2", lambda config, shape: {}),
    (lambda config: config.residual_scale != 1, "Granite", _granite),
)


def _build_moe(config: Any, shape: dict[str, Any]) -> nn.Module:
    """Build a model with attention of Qwen3 or Llama and MoE of Qwen3 or DeepSeek-V3."""
    import transformers
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

    model = _build("Qwen3" if config.qk_norm == "head" else "Llama", shape)
    experts = {
        "num_experts_per_tok": config.active_experts,
        "moe_intermediate_size": config.expert_dim,
        "norm_topk_prob": config.renormalize,
        "hidden_size": config.dim,
    }
    experts["experts_implementation"] = "eager"
    layers: Any = model.get_submodule("model.layers")
    for layer in layers[config.dense_layers :]:
        if config.score == "softmax":
            assert not config.shared_experts, "transformers has no such model"
            layer.mlp = qwen.Qwen3MoeSparseMoeBlock(
                transformers.Qwen3MoeConfig(num_experts=config.num_experts, **experts)
            )
            assert config.route_scale == 1, "transformers has no such model"
        else:
            theirs = transformers.DeepseekV3Config(
                n_routed_experts=config.num_experts,
                n_shared_experts=max(1, config.shared_experts),
                n_group=1,
                topk_group=1,
                routed_scaling_factor=config.route_scale,
                **experts,
            )
            layer.mlp = deepseek.DeepseekV3MoE(theirs)
            if not config.shared_experts:
                layer.mlp.shared_experts = _Zero()
    return model


class _Zero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def module_name(model: nn.Module, name: str) -> str:
    """Return the name in transformers' or PEFT's model of a module or parameter of weft."""
    kind = base_of(model).config.model_type
    full = name if name.startswith("lm_head") else f"model.{name}"
    if kind.startswith("gemma"):
        full = full.replace("post_attention_layernorm", "pre_feedforward_layernorm")
    full = full.replace("attention_output_norm", "post_attention_layernorm")
    full = full.replace("mlp_output_norm", "post_feedforward_layernorm")
    if kind == "llama4_text":
        full = full.replace(".mlp", ".feed_forward").replace("shared_experts", "shared_expert")
    elif kind != "gpt_oss":
        full = full.replace("mlp.router", "mlp.gate")
    return ("base_model.model." if hasattr(model, "peft_config") else "") + full


def base_of(model: Any) -> Any:
    """Return transformers' model, without PEFT's wrapper."""
    return model.base_model.model if hasattr(model, "peft_config") else model


def _locate(model: nn.Module, name: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the tensor with weft's parameter ``name``, and a function that views this part."""
    full = module_name(model, name)
    full = full.replace("lora_A.", "lora_A.default.").replace("lora_B.", "lora_B.default.")
    if ".experts." in full:
        return _locate_experts(model, full)
    owner = full.removesuffix(".weight")
    if full.endswith("expert_bias"):
        stem = full.removesuffix("expert_bias")
        return model.get_buffer(f"{stem}e_score_correction_bias"), lambda value: value
    if full.endswith("sinks.weight"):
        full = owner
    is_wrapped = hasattr(model, "peft_config") and ".lora_" not in full
    if is_wrapped and hasattr(model.get_submodule(owner), "base_layer"):
        full = f"{owner}.base_layer.weight"
    return model.get_parameter(full), lambda value: value


def _locate_experts(model: nn.Module, full: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the tensor of all experts; gate and up are the halves of one, or alternate in it."""
    kind = base_of(model).config.model_type
    stem, which, entry = full.rsplit(".", 2)
    name = "down_proj" if which == "down_proj" else "gate_up_proj"
    is_transposed = entry == "weight" and kind in ("gpt_oss", "llama4_text")

    def view(value: Tensor) -> Tensor:
        number = int(which == "up_proj")
        if which != "down_proj" and kind == "gpt_oss":
            value = value[..., number::2]
        elif which != "down_proj":
            value = value.chunk(2, dim=-1 if is_transposed else 1)[number]
        return value.transpose(1, 2) if is_transposed else value

    return model.get_parameter(f"{stem}.{name}{'_bias' * (entry == 'bias')}"), view


def theirs_of(model: nn.Module, name: str) -> Tensor:
    """Return the tensor of transformers' or PEFT's model for parameter ``name``.

    The tensor is a view: writing into it changes the model.
    """
    tensor, view = _locate(model, name)
    return view(tensor)


def grad_of(model: nn.Module, name: str) -> Tensor:
    """Return the gradient of transformers' or PEFT's model for parameter ``name``."""
    tensor, view = _locate(model, name)
    return view(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)


def masks_of(model: nn.Module, documents: Tensor) -> Any:
    """Return the mask, or those by kind of layer; a token attends to earlier ones of its document.

    In local layers it attends to those of a window, or of its chunk of the row.
    """
    config = base_of(model).config
    indices = torch.arange(documents.shape[1])
    distances = indices[:, None] - indices
    visible = (documents[:, :, None] == documents[:, None, :]) & (distances >= 0)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())

    def to_mask(seen: Tensor) -> Tensor:
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
        return mask[:, None]

    is_near = torch.ones_like(visible)
    if window := getattr(config, "sliding_window", None):
        is_near = distances < window
    elif chunk := getattr(config, "attention_chunk_size", None):
        is_near = indices[:, None] // chunk == indices // chunk
    local = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if not local:
        return to_mask(visible & is_near)
    return {"full_attention": to_mask(visible)} | dict.fromkeys(local, to_mask(visible & is_near))
