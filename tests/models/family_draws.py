"""Random small configurations of transformers, one function per family."""

from __future__ import annotations

import random
from typing import Any

Json = dict[str, Any]

MAX_LEN = 48
SWITCH = (False, True)


class Draw:
    """Sizes of a model that differ from draw to draw."""

    def __init__(self, kind: str, seed: int) -> None:
        self.random = random.Random(f"{kind} {seed}")
        pick = self.random.choice
        self.kv_heads = pick((1, 2, 3))
        self.heads = self.kv_heads * pick((1, 2, 3))
        self.width = pick((6, 8, 10))  # of a head
        self.layers = pick((2, 3, 4, 5))
        self.window = pick((3, 5, 9))

    def pick(self, *values: Any) -> Any:
        return self.random.choice(values)

    def base(self, has_head_dim: bool = False, **changes: Any) -> Json:
        """Return the fields that most models have."""
        tree: Json = {
            "hidden_size": self.heads * self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.pick(19, 26, 33),
            "vocab_size": self.pick(61, 67),
            "max_position_embeddings": MAX_LEN,
            "tie_word_embeddings": self.pick(*SWITCH),
            "rms_norm_eps": self.pick(1e-5, 1e-6),
            "bos_token_id": None,
            "eos_token_id": 0,
            "pad_token_id": None,
        }
        if has_head_dim:
            tree["head_dim"] = self.pick(6, 10, 12)
        return tree | changes

    def rope(self, theta: float = 10000.0, width: int = 0) -> Json:
        """Return the fields of rotary positions of a random kind."""
        kind = self.pick("default", "linear", "dynamic", "llama3", "yarn", "longrope")
        tree: Json = {"rope_type": kind, "rope_theta": theta}
        if kind != "default":
            tree["factor"] = self.pick(2.0, 4.0)
        if kind in ("llama3", "yarn", "longrope"):
            tree["original_max_position_embeddings"] = self.pick(8, 12)
        if kind == "llama3":
            tree |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0 if self.layers > 2 else 1.0}
        if kind == "yarn":
            tree |= self.pick({}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"attention_factor": 1.3})
            tree |= self.pick({}, {"truncate": False}, {"mscale": 0.7, "mscale_all_dim": 1.2})
        if kind == "longrope":
            count = (width or self.width) // 2
            for name in ("short_factor", "long_factor"):
                tree[name] = [round(self.random.uniform(1, 3), 2) for _ in range(count)]
        return {"rope_parameters": tree}

    def types(self, local: str = "sliding_attention") -> list[str]:
        """Return a random list of kinds of layers, mostly with a local one."""
        kinds = [self.pick(local, "full_attention") for _ in range(self.layers)]
        kinds[self.random.randrange(self.layers)] = self.pick(local, local, "full_attention")
        return kinds

    def experts(self, **names: str) -> Json:
        """Return number, width and active number of experts under the names of a family."""
        values = {"count": self.pick(4, 6), "active": self.pick(1, 2, 3), "width": self.pick(7, 12)}
        return {names[name]: value for name, value in values.items() if name in names}


def llama(d: Draw) -> Json:
    tree = d.base(attention_bias=d.pick(*SWITCH), mlp_bias=d.pick(*SWITCH))
    width = d.pick(d.width, 12)
    act = d.pick("silu", "gelu")
    return tree | {"head_dim": width, "hidden_act": act} | d.rope(width=width)


def arcee(d: Draw) -> Json:
    width = d.pick(d.width, 12)
    tree = d.base(head_dim=width, attention_bias=d.pick(*SWITCH), mlp_bias=d.pick(*SWITCH))
    return tree | {"hidden_act": d.pick("relu2", "silu")} | d.rope(width=width)


def dots1(d: Draw) -> Json:
    tree = d.base(
        head_dim=d.width,
        attention_bias=d.pick(*SWITCH),
        n_routed_experts=6,
        n_shared_experts=d.pick(1, 2),
        first_k_dense_replace=d.pick(0, 1),
        norm_topk_prob=d.pick(*SWITCH),
        routed_scaling_factor=d.pick(1.0, 2.5),
        sliding_window=d.pick(None, d.window),
        **d.pick({}, {"max_window_layers": 1}),
        **d.pick({"n_group": 1, "topk_group": 1}, {"n_group": 3, "topk_group": 2}),
    )
    names = d.experts(active="num_experts_per_tok", width="moe_intermediate_size")
    return tree | names | d.rope()


def starcoder2(d: Draw) -> Json:
    tree = d.base(
        use_bias=d.pick(*SWITCH),
        norm_epsilon=d.pick(1e-5, 1e-6),
        sliding_window=d.pick(None, d.window),
        hidden_act=d.pick("gelu_pytorch_tanh", "relu2"),
    )
    del tree["rms_norm_eps"]
    return tree | d.rope()


def exaone4(d: Draw) -> Json:
    tree = d.base(head_dim=d.width) | d.rope(1e6)
    if d.pick(*SWITCH):
        return tree | {"sliding_window": None, "layer_types": ["full_attention"] * d.layers}
    types = d.pick(d.types(), ["full_attention"] * d.layers)
    pattern = {"sliding_window_pattern": d.pick(4, "LLLG")}
    return tree | pattern | {"sliding_window": d.window, "layer_types": types}


def llama4(d: Draw) -> Json:
    step = d.pick(1, 2)
    names = d.experts(count="num_local_experts", active="num_experts_per_tok")
    no_rope = d.pick(None, [d.pick(0, 1) for _ in range(d.layers)])
    tree = d.base(
        attention_bias=d.pick(*SWITCH),
        head_dim=d.width,
        intermediate_size_mlp=29,
        interleave_moe_layer_step=step,
        use_qk_norm=d.pick(*SWITCH),
        attn_temperature_tuning=d.pick(*SWITCH),
        floor_scale=d.pick(4, 7),
        attn_scale=0.2,
        attention_chunk_size=d.window,
        no_rope_layer_interval=d.pick(2, 4),
    )
    if no_rope and any(no_rope):
        tree["no_rope_layers"] = no_rope
    return tree | names | d.rope(500000.0)


def qwen2(d: Draw) -> Json:
    tree = d.base() | d.rope()
    if d.pick(*SWITCH):
        tree |= {"use_sliding_window": True, "sliding_window": d.window, "max_window_layers": 1}
    return tree


def qwen3(d: Draw) -> Json:
    width = d.pick(6, 12)
    tree = d.base(head_dim=width, attention_bias=d.pick(*SWITCH)) | d.rope(1e6, width)
    if d.pick(*SWITCH):
        tree |= {"use_sliding_window": True, "sliding_window": d.window, "layer_types": d.types()}
    return tree


def qwen3_moe(d: Draw) -> Json:
    tree = d.base(
        head_dim=d.width,
        attention_bias=d.pick(*SWITCH),
        norm_topk_prob=d.pick(*SWITCH),
        decoder_sparse_step=d.pick(1, 2),
        mlp_only_layers=d.pick([], [0]),
    )
    if d.pick(*SWITCH):
        tree |= {"use_sliding_window": True, "sliding_window": d.window}
    tree |= d.experts(
        count="num_experts", active="num_experts_per_tok", width="moe_intermediate_size"
    )
    return tree | d.rope()


def mistral(d: Draw) -> Json:
    width = d.pick(6, 12)
    window = d.pick(None, d.window)
    return d.base(head_dim=width, sliding_window=window) | d.rope(width=width)


def mixtral(d: Draw) -> Json:
    tree = d.base(sliding_window=d.pick(None, d.window))
    tree |= d.experts(count="num_local_experts", active="num_experts_per_tok")
    # Transformers needs head_dim for its scalings.
    return tree | d.pick({"head_dim": None}, {"head_dim": d.width} | d.rope(1e6))


def olmo2(d: Draw) -> Json:
    return d.base(attention_bias=d.pick(*SWITCH)) | d.rope()


def olmo3(d: Draw) -> Json:
    tree = d.base(attention_bias=d.pick(*SWITCH), sliding_window=d.window, layer_types=d.types())
    full = d.rope(d.pick(500000.0, 1000.0))["rope_parameters"]
    full.pop("truncate", None)
    local = {"rope_type": "default", "rope_theta": d.pick(500000.0, 2000.0)}
    return tree | {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


def olmoe(d: Draw) -> Json:
    tree = d.base(attention_bias=d.pick(*SWITCH), norm_topk_prob=d.pick(*SWITCH))
    return tree | d.experts(count="num_experts", active="num_experts_per_tok") | d.rope()


def _gemma(d: Draw) -> Json:
    return d.base(
        head_dim=d.pick(6, 12),
        attention_bias=d.pick(*SWITCH),
        query_pre_attn_scalar=d.pick(5, 8, 16),
        final_logit_softcapping=d.pick(None, 4.0),
        sliding_window=d.window,
        layer_types=d.types(),
        hidden_activation=d.pick("gelu_pytorch_tanh", "gelu"),
    )


def gemma2(d: Draw) -> Json:
    tree = _gemma(d)
    return tree | {"attn_logit_softcapping": d.pick(None, 3.0)} | d.rope(width=tree["head_dim"])


def gemma3(d: Draw) -> Json:
    tree = _gemma(d)
    full = d.rope(1e6, tree["head_dim"])["rope_parameters"]
    full.pop("truncate", None)
    local = {"rope_type": "default", "rope_theta": d.pick(10000.0, 500.0)}
    return tree | {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


def gpt_oss(d: Draw) -> Json:
    width = d.pick(6, 12)
    tree = d.base(
        head_dim=width,
        attention_bias=d.pick(*SWITCH),
        sliding_window=d.window,
        layer_types=d.types(),
        swiglu_limit=d.pick(7.0, 0.5),
    )
    names = d.experts(count="num_local_experts", active="num_experts_per_tok")
    return tree | names | d.pick({}, d.rope(150000.0, width))


def deepseek_v3(d: Draw) -> Json:
    rope = d.pick(4, 6)
    tree = d.base(
        num_key_value_heads=d.heads,
        attention_bias=d.pick(*SWITCH),
        rms_norm_eps=1e-6,
        q_lora_rank=d.pick(None, 11),
        kv_lora_rank=d.pick(9, 14),
        qk_nope_head_dim=d.pick(6, 10),
        qk_rope_head_dim=rope,
        v_head_dim=d.pick(5, 8),
        n_routed_experts=6,
        n_shared_experts=d.pick(1, 2),
        first_k_dense_replace=d.pick(0, 1),
        norm_topk_prob=d.pick(*SWITCH),
        routed_scaling_factor=d.pick(1.0, 2.5),
        rope_interleave=d.pick(*SWITCH),
        **d.pick({"n_group": 1, "topk_group": 1}, {"n_group": 3, "topk_group": 2}),
    )
    return (
        tree
        | d.experts(active="num_experts_per_tok", width="moe_intermediate_size")
        | d.pick(d.rope(width=rope), _deepseek_rope(d))
    )


def _deepseek_rope(d: Draw) -> Json:
    tree = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32}
    tree |= {"beta_slow": 1, "original_max_position_embeddings": 8}
    return {"rope_parameters": tree | {"mscale": d.pick(1.0, 0.7), "mscale_all_dim": 1.0}}


def glm4(d: Draw) -> Json:
    width = d.pick(8, 12)
    rope = d.rope(width=width // 2)
    rope["rope_parameters"]["partial_rotary_factor"] = 0.5
    return d.base(head_dim=width, attention_bias=d.pick(*SWITCH)) | rope


def glm4_moe(d: Draw) -> Json:
    width = d.pick(8, 12)
    rope = d.rope(width=width // 2)
    rope["rope_parameters"]["partial_rotary_factor"] = 0.5
    tree = d.base(
        head_dim=width,
        attention_bias=d.pick(*SWITCH),
        use_qk_norm=d.pick(*SWITCH),
        n_routed_experts=6,
        n_shared_experts=1,
        first_k_dense_replace=d.pick(0, 1),
        norm_topk_prob=d.pick(*SWITCH),
        routed_scaling_factor=d.pick(1.0, 2.5),
        **d.pick({"n_group": 1, "topk_group": 1}, {"n_group": 3, "topk_group": 2}),
    )
    return tree | d.experts(active="num_experts_per_tok", width="moe_intermediate_size") | rope


def phi3(d: Draw) -> Json:
    tree = d.base(sliding_window=d.pick(None, d.window))
    original = d.pick(8, 64)  # shorter and longer than the sequence
    tree["original_max_position_embeddings"] = original
    width, fraction = d.pick((d.width, 1.0), (8, 0.5))
    tree["hidden_size"] = d.heads * width
    rope: Json = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": fraction}
    if d.pick(*SWITCH):
        rope["rope_type"] = "longrope"
        for name in ("short_factor", "long_factor"):
            count = int(width * fraction) // 2
            rope[name] = [round(d.random.uniform(1, 3), 2) for _ in range(count)]
    return tree | {"rope_parameters": rope}


def _granite(d: Draw) -> Json:
    return d.base(
        attention_bias=d.pick(*SWITCH),
        embedding_multiplier=d.pick(1.0, 12),
        residual_multiplier=d.pick(1.0, 0.22),
        attention_multiplier=d.pick(0.3, 0.05),
        logits_scaling=d.pick(1.0, 13.0, 8),
    )


def granite(d: Draw) -> Json:
    return _granite(d) | {"mlp_bias": d.pick(*SWITCH)} | d.rope()


def granitemoe(d: Draw) -> Json:
    names = d.experts(count="num_local_experts", active="num_experts_per_tok")
    return _granite(d) | names | d.rope()


def smollm3(d: Draw) -> Json:
    tree = d.base(attention_bias=d.pick(*SWITCH), mlp_bias=d.pick(*SWITCH)) | d.rope(2e6)
    tree["no_rope_layer_interval"] = d.pick(2, 3)
    if d.pick(*SWITCH):
        tree |= {"use_sliding_window": True, "sliding_window": d.window}
    return tree


def cohere2(d: Draw) -> Json:
    tree = d.base(
        attention_bias=d.pick(*SWITCH),
        layer_norm_eps=d.pick(1e-5, 1e-6),
        logit_scale=d.pick(0.25, 0.0625),
        sliding_window=d.window,
        layer_types=d.types(),
    )
    del tree["rms_norm_eps"]
    return tree | d.rope()


def nemotron(d: Draw) -> Json:
    width = d.pick(8, 12)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    tree = d.base(
        head_dim=width,
        attention_bias=d.pick(*SWITCH),
        mlp_bias=d.pick(*SWITCH),
        norm_eps=1e-5,
        hidden_act=d.pick("relu2", "gelu"),
        rope_parameters=rope,
    )
    del tree["rms_norm_eps"]
    return tree


def ernie4_5(d: Draw) -> Json:
    width = d.pick(6, 12)
    return d.base(head_dim=width, use_bias=d.pick(*SWITCH)) | d.rope(500000.0, width)


def ernie4_5_moe(d: Draw) -> Json:
    tree = d.base(
        moe_num_shared_experts=d.pick(0, 1, 2),
        moe_layer_start_index=d.pick(0, 1),
        moe_layer_interval=d.pick(1, 2),
    )
    names = {"count": "moe_num_experts", "active": "moe_k", "width": "moe_intermediate_size"}
    return tree | d.experts(**names) | d.rope(500000.0)


def seed_oss(d: Draw) -> Json:
    width = d.pick(6, 12)
    biases = ("attention_bias", "attention_out_bias", "mlp_bias")
    switches = {name: d.pick(*SWITCH) for name in biases}
    return d.base(head_dim=width, **switches) | d.rope(width=width)


DRAWS = {
    name: value
    for name, value in globals().items()
    if callable(value) and getattr(value, "__module__", "") == __name__ and name.islower()
    if not name.startswith("_")
}


def draw_config(kind: str, seed: int) -> Json:
    """Return the fields of a random configuration of a family."""
    tree: Json = DRAWS[kind](Draw(kind, seed))
    return tree
