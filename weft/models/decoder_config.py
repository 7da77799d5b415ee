"""Configuration of a decoder: the keys of ``[model]`` for every family of weft.

A family (`weft.models.families`) is a set of values for these keys.  The defaults are Llama 3.1 8B
(arXiv:2407.21783, table 3).  `weft.models.decoder_rules` holds the rules about several keys.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from weft.config.keys import KeyFacts, Section, key
from weft.config.schema import NonNegative, Positive

PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
LayerPattern = Annotated[str, Field(pattern=r"^[GL]+$")]
RopePattern = Annotated[str, Field(pattern=r"^[RN]+$")]


# Far above published models, so that a mistyped number is an error and not a plan of hours.
MAX_LAYERS = 4096
MAX_MTP_LAYERS = 32
MAX_VOCAB_SIZE = 1 << 22


class DecoderConfig(Section):
    """Keys of a decoder; defaults: Llama 3.1 8B."""

    facts = KeyFacts(on_resume="weights")

    num_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)] = key(32, "transformer blocks")
    dim: Positive = key(4096, "width of the residual stream")
    num_heads: Positive = key(32, "query heads")
    num_kv_heads: Positive = key(8, "key and value heads, each shared by a group of query heads")
    head_dim: NonNegative = key(0, "width of one head; 0: dim / num_heads")
    ffn_dim: Positive = key(14336, "inner width of the feed-forward layer")
    vocab_size: Annotated[int, Field(ge=1, le=MAX_VOCAB_SIZE)] = key(128256, "token ids")
    max_seq_len: Positive = key(131072, "maximum sequence length, in tokens")
    tied_embeddings: bool = key(False, "share the embedding table with the output projection")
    score_head: bool = key(
        False,
        "one score per token in place of logits, as in a reward model; train.objective=reward sets "
        "it",
        tries=(),
    )
    mtp_layers: Annotated[int, Field(ge=0, le=MAX_MTP_LAYERS)] = key(
        0,
        "layers of multi-token prediction, for training: layer k predicts the token k + 1 ahead",
        tries=("1", "2"),
    )

    # Attention.
    qkv_bias: bool = key(False, "biases of the query, key and value projections")
    out_bias: bool = key(False, "bias of attention's output projection")
    qk_norm: Literal["none", "head", "all_heads", "unit"] = key(
        "none",
        "normalization of queries and keys. head: RMSNorm of each head; all_heads: one RMSNorm of "
        "all heads; unit: of each head, without weight, after the rotation (Llama 4)",
    )
    attention_scale: NonNegativeFloat = key(
        0.0, "factor of the attention scores; 0: 1 / sqrt(width of a head)", tries=("0.2",)
    )
    attention_softcap: NonNegativeFloat = key(
        0.0, "limit c of the scores, as c * tanh(score / c); 0: no limit", tries=("2",)
    )
    attention_sinks: bool = key(
        False, "one learned logit per head in the denominator of the softmax (gpt-oss)"
    )
    layer_pattern: LayerPattern = key(
        "G",
        "attention of each layer, repeated. G: all earlier tokens; L: local ones",
        tries={
            "L": "has_window",
            "LG": "has_window",
            "LLG": "has_window",
        },
    )
    sliding_window: NonNegative = key(
        0,
        "tokens that a query of a local layer sees, itself included; 0: no limit",
        needs="has_local_layers",
        tries=("1", "3", "9"),
    )
    attention_chunk: NonNegative = key(
        0,
        "tokens of the chunks that local layers do not see beyond (Llama 4); 0: no chunks",
        needs="has_local_layers",
        tries=("3", "8"),
    )
    temperature_interval: NonNegative = key(
        0,
        "tokens per step of the query scale of layers without positions (Llama 4); 0: none",
        needs="has_layers_without_positions",
        tries=("4",),
    )
    temperature_scale: NonNegativeFloat = key(
        0.1, "factor of the logarithm in that scale", needs="model.temperature_interval>0"
    )
    # Multi-head latent attention (arXiv:2405.04434, section 2.1).
    kv_rank: NonNegative = key(
        0,
        "width of the latent vector of keys and values; 0: grouped-query attention",
        tries=("6", "9"),
    )
    q_rank: NonNegative = key(
        0, "width of the latent vector of queries; 0: no such vector", needs="has_latent_attention"
    )
    rope_head_dim: NonNegative = key(
        0,
        "part of head_dim with rotary positions, of a key that all heads share",
        needs="has_latent_attention",
    )
    value_head_dim: NonNegative = key(0, "width of a head's value; 0: as the key")

    # Rotary positions.
    rope_theta: PositiveFloat = key(500000.0, "base of the rotary wavelengths", same_speed=True)
    rope_local_theta: NonNegativeFloat = key(
        0.0,
        "base in local layers, without scaling; 0: as in global layers",
        needs="has_local_layers",
        tries=("300",),
    )
    rope_pattern: RopePattern = key(
        "R", "positions of each layer, repeated. R: rotary; N: none", tries=("RN", "RRN")
    )
    rope_fraction: Annotated[float, Field(gt=0, le=1)] = key(
        1.0, "part of a head that is rotated", tries=("0.5",)
    )
    rope_interleaved: bool = key(
        False, "rotate elements 2j and 2j + 1, instead of j and j + half of the width"
    )
    rope_scaling: Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"] = key(
        "llama3", "scaling of the rotary frequencies to a longer context, as in transformers"
    )
    rope_factor: Annotated[float, Field(ge=1)] = key(
        8.0,
        "scaling factor of the context length",
        needs="model.rope_scaling=llama3|linear|dynamic|yarn",
    )
    rope_low_freq_factor: PositiveFloat = key(
        1.0,
        "llama3: rotations per original context below which a frequency is scaled fully",
        needs="model.rope_scaling=llama3",
    )
    rope_high_freq_factor: PositiveFloat = key(
        4.0,
        "llama3: rotations per original context above which a frequency is unchanged",
        needs="model.rope_scaling=llama3",
    )
    rope_original_context: Positive = key(
        8192,
        "context length before scaling, in tokens",
        needs="model.rope_scaling=llama3|dynamic|yarn|longrope",
        tries=("8",),
    )
    rope_beta_fast: PositiveFloat = key(
        32.0,
        "yarn: rotations per original context above which a frequency is unchanged",
        needs="model.rope_scaling=yarn",
    )
    rope_beta_slow: PositiveFloat = key(
        1.0,
        "yarn: rotations per original context below which a frequency is scaled fully",
        needs="model.rope_scaling=yarn",
    )
    rope_truncate: bool = key(
        True, "yarn: round the bounds between these frequencies", needs="model.rope_scaling=yarn"
    )
    rope_magnitude: PositiveFloat = key(
        1.0, "yarn, longrope: factor of cosines and sines", needs="model.rope_scaling=yarn|longrope"
    )
    rope_short_factors: tuple[PositiveFloat, ...] = key(
        (),
        "longrope: divisor of each frequency, in sequences up to the original context",
        needs="scales_by_longrope",
    )
    rope_long_factors: tuple[PositiveFloat, ...] = key(
        (),
        "longrope: divisor of each frequency, in longer sequences",
        needs="scales_by_longrope",
    )

    # Norms and blocks.
    norm: Literal["rms", "layer"] = key("rms", "rms: RMSNorm; layer: LayerNorm")
    norm_offset: bool = key(False, "multiply by 1 + weight, instead of weight")
    norm_bias: bool = key(False, "biases of LayerNorms", needs="model.norm=layer")
    norm_position: Literal["pre", "post", "both"] = key(
        "pre", "norms before attention and feed-forward, after them, or both"
    )
    norm_eps: PositiveFloat = key(
        1e-5, "added to the mean square, or the variance, in norms", same_speed=True
    )
    parallel_block: bool = key(
        False, "attention and feed-forward read one norm, and their outputs are summed"
    )

    # Feed-forward.
    activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] = key(
        "silu", "activation of the feed-forward layer; relu2: the square of ReLU"
    )
    gated: bool = key(True, "multiply the activation by a second projection")
    ffn_bias: bool = key(False, "biases of the feed-forward layer")

    # Experts.
    num_experts: NonNegative = key(0, "experts per layer; 0: no mixture of experts")
    active_experts: Positive = key(
        2, "experts that the router selects per token", needs="has_experts"
    )
    expert_dim: Positive = key(2048, "inner width of an expert", needs="has_experts")
    shared_experts: NonNegative = key(
        0, "experts that every token passes through", needs="has_experts"
    )
    dense_layers: NonNegative = key(
        0, "number of first layers without experts", needs="has_experts"
    )
    expert_interval: Positive = key(
        1,
        "experts are in every n-th layer, the last of each n",
        needs="has_experts",
        tries=("1", "2"),
    )
    score: Literal["softmax", "sigmoid"] = key(
        "softmax", "function from router logits to scores", needs="has_experts"
    )
    score_selected: bool = key(
        False, "compute the scores from the selected experts' logits only", needs="has_experts"
    )
    renormalize: bool = key(
        True, "divide the selected experts' scores by their sum", needs="has_experts"
    )
    route_scale: PositiveFloat = key(
        1.0, "factor of the scores, applied after normalization", needs="has_experts"
    )
    expert_groups: Positive = key(
        1, "groups of experts, some of which are selected first", needs="has_experts"
    )
    active_groups: Positive = key(
        1, "groups that the router selects per token", needs="has_experts"
    )
    scaled_expert_inputs: bool = key(
        False,
        "multiply an expert's input by the score, instead of its output (Llama 4)",
        needs="has_experts",
    )
    router_bias: bool = key(False, "bias of the router", needs="has_experts")
    expert_biases: bool = key(False, "biases of the experts", needs="has_experts")
    expert_limit: NonNegativeFloat = key(
        0.0,
        "limit of an expert's gate and linear part, with gpt-oss's activation; 0: none",
        needs="has_experts",
        tries=("1.5",),
    )
    balance_rate: Annotated[float, Field(ge=0)] = key(
        0.001,
        "update of an expert's load-balance bias per step; 0: no load balancing",
        needs="has_experts and trains_routers",
    )
    router_aux_loss_coef: NonNegativeFloat = key(
        0.0,
        "coefficient of each layer's load-balance loss, which is 1 at equal loads; 0: no loss",
        needs="has_experts",
        same_speed=True,
    )
    router_aux_loss_scope: Literal["sequence", "global"] = key(
        "sequence",
        "tokens whose loads that loss balances. sequence: of each sequence; global: of the global "
        "batch, by the loads of the step before",
        needs="model.router_aux_loss_coef>0",
    )
    router_z_loss_coef: NonNegativeFloat = key(
        0.0, "coefficient of each layer's router z-loss (ST-MoE); 0: no loss", needs="has_experts"
    )

    # Multipliers.
    embedding_scale: PositiveFloat = key(1.0, "factor of the embeddings")
    residual_scale: PositiveFloat = key(1.0, "factor of what a block adds to the residual stream")
    logit_scale: PositiveFloat = key(1.0, "factor of the logits")
    logit_softcap: NonNegativeFloat = key(
        0.0, "limit c of the logits, as c * tanh(logit / c); 0: no limit", tries=("3",)
    )

    @property
    def key_dim(self) -> int:
        """Return the width of a head's query and key, K."""
        return self.head_dim or self.dim // self.num_heads

    @property
    def value_dim(self) -> int:
        """Return the width of a head's value."""
        return self.value_head_dim or self.key_dim

    @property
    def rope_dim(self) -> int:
        """Return the width that rotary positions rotate."""
        if self.kv_rank:
            return self.rope_head_dim
        return int(self.key_dim * self.rope_fraction)

    @property
    def depends_on_length(self) -> bool:
        """Return True if longer sequences have other rotary frequencies."""
        return self.rope_scaling in ("dynamic", "longrope")

    @property
    def has_qk_norm(self) -> bool:
        """Return True if attention normalizes queries and keys with a weight."""
        return self.qk_norm in ("head", "all_heads")

    @property
    def num_moe_layers(self) -> int:
        """Return the number of layers with experts."""
        return sum(self.has_experts(i) for i in range(self.num_layers))

    def has_experts(self, layer: int) -> bool:
        """Return True if the layer with this index has experts."""
        is_last = (layer + 1) % self.expert_interval == 0
        return self.num_experts > 0 and layer >= self.dense_layers and is_last

    def is_local(self, layer: int) -> bool:
        """Return True if the layer sees a window or chunk only."""
        has_limit = bool(self.sliding_window or self.attention_chunk)
        return has_limit and self.layer_pattern[layer % len(self.layer_pattern)] == "L"

    def has_plain_attention(self, seq_len: int) -> bool:
        """Return True if a causal kernel computes the attention of all layers."""
        limit = self.sliding_window or self.attention_chunk
        layers = range(self.num_layers + self.mtp_layers)
        is_local = limit < seq_len and any(map(self.is_local, layers))
        return not (is_local or self.attention_softcap or self.attention_sinks)

    def has_rope(self, layer: int) -> bool:
        """Return True if the layer has rotary positions."""
        return self.rope_pattern[layer % len(self.rope_pattern)] == "R"

    def layer_kind(self, layer: int) -> tuple[bool, bool, bool]:
        """Return a key that is equal for layers that do the same work."""
        return self.has_experts(layer), self.is_local(layer), self.has_rope(layer)
