"""Vocabulary in which a family describes its counterpart in transformers.

`HFMapping` holds the fields of ``config.json`` and the names of the weights.
`weft.models.hf_mapping` converts configurations with it, `weft.conversion.hf_weights` weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

Json = dict[str, Any]


class Limits(NamedTuple):
    """Valid numbers of a field, both ends included."""

    kind: type
    least: float
    most: float


def _same(value: Any) -> Any:
    return value


class HFField(NamedTuple):
    """Field of ``config.json`` with a counterpart in `weft.models.decoder_config`.

    Attributes:
        keys: weft's keys that have its value.
        read: converts the field's value to that of the keys.
        write: the inverse of ``read``.
        limits: valid numbers; None: those of the first key.
        choices: valid values; None: any that the key accepts.
        optional: True if null is a value, which means 0.
    """

    keys: tuple[str, ...]
    read: Callable[[Any], Any] = _same
    write: Callable[[Any], Any] = _same
    limits: Limits | None = None
    choices: Mapping[Any, Any] | None = None
    optional: bool = False


def same(*keys: str) -> HFField:
    """Return a field whose value is that of ``keys``."""
    return HFField(keys)


def optional(key: str) -> HFField:
    """Return a field in which null means 0."""
    return HFField((key,), write=lambda value: value or None, optional=True)


def choice(key: str, choices: Mapping[Any, Any]) -> HFField:
    """Return a field with a table of its values and the key's."""
    names = {value: name for name, value in choices.items()}
    return HFField((key,), choices.__getitem__, lambda v: names.get(v, v), None, choices)


def inverse_of(key: str) -> HFField:
    """Return a field with the reciprocal of the key's value."""
    return HFField((key,), _reciprocal, _invert(_reciprocal, _reciprocal), Limits(float, 1e-6, 1e6))


def inverse_root_of(key: str) -> HFField:
    """Return an integer field; the key has the reciprocal of its square root."""
    write = _invert(lambda value: value**-0.5, lambda value: value**-2)
    return HFField((key,), lambda value: value**-0.5, write, Limits(int, 1, 1 << 20))


def _reciprocal(value: float) -> float:
    return 1 / value


def _invert(
    read: Callable[[Any], float], guess: Callable[[float], float]
) -> Callable[[float], float]:
    """Return the inverse of ``read``: the roundest number that it converts."""

    def write(value: float) -> float:
        result = guess(value)
        for rounded in (round(result), round(result, 3), round(result, 9)):
            if rounded and read(rounded) == value:
                return rounded
        return result

    return write


ACTIVATIONS = {
    "swish": "silu",
    "silu": "silu",  # the last name of an activation is the one that is written
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}
ACTIVATION = choice("activation", ACTIVATIONS)
ATTENTION_BIAS = same("qkv_bias", "out_bias")

# Experts of DeepSeek-V3, and of families with its router.
DEEPSEEK_EXPERTS: dict[str, HFField] = {
    "moe_intermediate_size": same("expert_dim"),
    "n_routed_experts": same("num_experts"),
    "n_shared_experts": same("shared_experts"),
    "num_experts_per_tok": same("active_experts"),
    "n_group": same("expert_groups"),
    "topk_group": same("active_groups"),
    "first_k_dense_replace": same("dense_layers"),
    "norm_topk_prob": same("renormalize"),
    "routed_scaling_factor": same("route_scale"),
}

# Fields of all families, unless a family maps them otherwise, or to None.
FIELDS: dict[str, HFField] = {
    "hidden_size": same("dim"),
    "num_hidden_layers": same("num_layers"),
    "num_attention_heads": same("num_heads"),
    "num_key_value_heads": same("num_kv_heads"),
    "head_dim": same("head_dim"),
    "intermediate_size": same("ffn_dim"),
    "vocab_size": same("vocab_size"),
    "max_position_embeddings": same("max_seq_len"),
    "rms_norm_eps": same("norm_eps"),
    "tie_word_embeddings": same("tied_embeddings"),
    "hidden_act": ACTIVATION,
}
# Defaults of transformers.  The other fields are required, except for num_key_value_heads and
# head_dim, which follow from others.
DEFAULTS: Json = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


class HFLayers(NamedTuple):
    """Fields that select the attention of each layer.

    Attributes:
        default: pattern of a file without ``layer_types``; max_window_layers: layers from that
            field on are local; rope, no_rope: layers with, or without, rotary positions are.
        window: field with the size of the window, and key of the same meaning.
        default_window: its value in a file without the field; None: no limit.
        local: name of a local layer in ``layer_types``.
        has_types: True if the model reads ``layer_types``.
        switch: True if the window counts only with ``use_sliding_window``.
    """

    default: str
    window: tuple[str, str] = ("sliding_window", "sliding_window")
    default_window: int | None = None
    local: str = "sliding_attention"
    has_types: bool = True
    switch: bool = False


class HFRope(NamedTuple):
    """Fields of the rotary positions.

    Attributes:
        theta: default of ``rope_theta``.
        local_theta: default base in local layers, if these have their own positions.
        local_field: field with that base in files of transformers 4.
        fraction: default of ``partial_rotary_factor``; None: the model has no such field.
        kinds: supported scalings.
        scaling: ``rope_scaling`` of a file without it.
        aliases: other names of scalings.
        scales_attention: True if ``mscale_all_dim`` changes the scale of attention (DeepSeek).
        has_original_field: True if ``original_max_position_embeddings`` is outside of
            ``rope_scaling`` (Phi-3).
    """

    theta: float = 10000.0
    local_theta: float | None = None
    local_field: str = ""
    fraction: float | None = None
    kinds: tuple[str, ...] = ("linear", "dynamic", "llama3", "yarn", "longrope")
    scaling: Json | None = None
    aliases: Mapping[str, str] = {}
    scales_attention: bool = False
    has_original_field: bool = False


class StackedExperts(NamedTuple):
    """Layout of experts that are stored as one tensor per layer.

    Attributes:
        gate_up: name of the gate and up projections, below the layer.
        down: name of the down projection.
        transposed: True if matrices are stored as ``[inputs, outputs]``.
        interleaved: True if gate and up alternate, instead of following each other.
        marked: True if the class in transformers says that it is transposed, which PEFT reads.
        suffixes: ends of the names of a weight and a bias.
    """

    gate_up: str
    down: str
    transposed: bool = False
    interleaved: bool = False
    marked: bool = False
    suffixes: tuple[str, str] = ("", "_bias")


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a parameter that has its name in weft."""
    return name if name.startswith(("lm_head.", "score.")) else f"model.{name}"


@dataclass(frozen=True)
class HFMapping:
    """Counterpart of a family in transformers.

    Attributes:
        name: display name.
        architecture: class of the model in transformers.
        score_class: its class with a score head (``*ForSequenceClassification``); None: that of the
            same name; "": none.
        model_type: its ``model_type``.
        fields: differences from `FIELDS`; None: the model has no such field.
        defaults: differences from `DEFAULTS`.
        constants: weft's keys with the family's only value.
        fixed_fields: fields with the only value that weft supports.
        ignored_fields: fields that do not change what the model computes.
        aliases: other names of fields.
        switches: field -> key that is 0 if the field is false (default: true).
        layers: local layers; None: every layer sees all earlier tokens.
        rope: rotary positions.
        rope_layers: how layers without rotary positions are listed; local: local layers have them;
            hybrid: so do all layers of a model without a window.
        expert_layers: field that lists the layers with experts.
        has_latent_attention: True if ``head_dim`` is the sum of ``qk_nope_head_dim`` and
            ``qk_rope_head_dim``.
        scales_embeddings: True if embeddings are multiplied by the square root of their width.
        names: parts of weft's parameter names -> parts of Hugging Face's.
        fused: Hugging Face's module -> weft's modules whose rows it holds one after another.
        stacked: layout of stacked experts; None: each expert has its own tensors.
        experts: module of the experts in transformers 5, below the layer.
        expert_bias: Hugging Face's name of the load-balance bias, below the layer; "": none.
        expert_bias_rows: number of leading dimensions of size 1 of that bias.
        has_float32_router: True if files of any dtype have routers in float32.
        quantization: supported ``quant_method`` of imported files.
    """

    name: str
    architecture: str
    model_type: str
    fields: Mapping[str, HFField | None] = field(default_factory=dict)
    defaults: Json = field(default_factory=dict)
    constants: Json = field(default_factory=dict)
    fixed_fields: Json = field(default_factory=lambda: {"attention_dropout": 0.0})
    ignored_fields: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    switches: Mapping[str, str] = field(default_factory=dict)
    layers: HFLayers | None = None
    rope: HFRope = field(default_factory=HFRope)
    rope_layers: Literal["all", "no_rope_layers", "local", "hybrid"] = "all"
    expert_layers: Literal["", "mlp_only_layers", "moe_layers", "moe_layer_end_index"] = ""
    has_latent_attention: bool = False
    scales_embeddings: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stacked: StackedExperts | None = None
    experts: str = "mlp.experts"
    expert_bias: str = ""
    expert_bias_rows: int = 0
    has_float32_router: bool = False
    quantization: str = ""
    score_class: str | None = None

    @property
    def score_architecture(self) -> str:
        """Class of the model with a score head in transformers; empty without any."""
        if self.score_class is not None:
            return self.score_class
        return self.architecture.replace("ForCausalLM", "ForSequenceClassification")

    @cached_property
    def all_fields(self) -> dict[str, HFField]:
        """Return every field with a counterpart in weft."""
        merged = {**FIELDS, **self.fields}
        return {name: entry for name, entry in merged.items() if entry is not None}

    @cached_property
    def _renamed(self) -> re.Pattern[str]:
        parts = sorted(map(re.escape, self.names), key=len, reverse=True)
        return re.compile(rf"(?<![^.])({'|'.join(parts) or '(?!)'})(?![^.])")

    def hf_name(self, name: str) -> str:
        """Return the Hugging Face name of a parameter that has its own tensor there."""
        return hf_name(self._renamed.sub(lambda match: self.names[match[0]], name))
