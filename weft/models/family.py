"""Protocol between weft and a model family.

A family is one file that ends with a `Family`: a configuration, a constructor, and the functions
and tables that the trainer and the planner read.  `Family` documents every entry;
`weft.models.llama` is the reference implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from weft.config.errors import ConfigError
from weft.config.schema import Section

Json = dict[str, Any]


class Init(NamedTuple):
    """Initial distribution of a parameter.

    Attributes:
        kind: ones; zeros; truncated_normal: normal with ``std``, cut at three ``std``;
            fan_in: uniform within ``1 / sqrt(inputs)``, as in `nn.Linear`.
        std: standard deviation of truncated_normal.
        residual: True if the parameter writes into the residual stream, twice per layer.  Its
            ``std`` is divided by ``sqrt(2 * num_layers)`` to keep the variance flat (GPT-2).
    """

    kind: Literal["ones", "zeros", "truncated_normal", "fan_in"]
    std: float = 0.0
    residual: bool = False


WeightSharding = Literal["column", "row", "heads", "vocabulary", "replicated", "partial_grad"]


class TensorParallelSpec(NamedTuple):
    """Tensor parallelism of one module, applied by `weft.parallel.tensor_parallel`.

    Attributes:
        weight: how the weight is sharded.  column: by outputs; row: by inputs; heads: by outputs at
            head boundaries, so that ranks share a head if there are more ranks than heads;
            vocabulary: by rows of an embedding table; replicated: on every rank; partial_grad:
            replicated, but each rank computes a part of the gradient.
        input_comm: gather: all-gather the input's sequence, before a column-sharded product.
        output_comm: gather: all-gather the output's sequence; scatter: reduce-scatter the partial
            outputs of a row-sharded product over the sequence.

    Between products each rank holds a slice of the sequence (sequence parallelism).
    """

    weight: WeightSharding | None = None
    input_comm: Literal["gather"] | None = None
    output_comm: Literal["gather", "scatter"] | None = None


class UnitCost(NamedTuple):
    """Cost of one unit: the embedding, a block, or the head with its norm."""

    name: str
    params: int
    flops_per_token: float  # forward and backward, without recomputation
    # Saved for backward, in bfloat16 without recomputation.
    activation_bytes_per_token: float
    expert_params: int = 0  # part of ``params`` that expert parallelism shards


# Fields of config.json with the only value that weft's models support.
FIXED_FIELDS: Json = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
}


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a parameter of `weft.models.llama.Llama`."""
    return name if name == "lm_head.weight" else f"model.{name}"


@dataclass(frozen=True)
class HFMapping:
    """Differences between a family and its Hugging Face model.

    Attributes:
        name: display name.
        hf_name: maps weft's parameter name to Hugging Face's.
        defaults: values that transformers uses for missing fields, in addition to `DEFAULTS`.
        fixed_fields: fields with the only value that weft supports.
        ignored_fields: fields that do not change what the model computes.
        default_sliding_window: window of a file without the field; None: the family has none.
    """

    name: str
    architecture: str
    model_type: str
    hf_name: Callable[[str], str] = hf_name
    defaults: Json = field(default_factory=dict)
    fixed_fields: Json = field(default_factory=lambda: FIXED_FIELDS)
    ignored_fields: frozenset[str] = frozenset()
    default_sliding_window: int | None = None


@dataclass(frozen=True)
class Family:
    """Everything that weft knows about a model family.

    Each of the optional entries enables a feature.

    Required entries:
        config: pydantic section with the model's fields.
        presets: named configurations.
        build: config -> module; must work on the meta device.
        check: config -> configuration errors.  Rules about several fields belong here, not in
            validators of ``config``.
        blocks: module -> repeated blocks in order: the units of FSDP, activation checkpointing and
            compilation.
        get_init: (parameter name, config) -> `Init`.
        has_weight_decay: parameter name -> True if weight decay applies.
        num_params: config -> number of parameters, a tied embedding counted once.
        flops_per_token: (config, sequence length) -> training FLOPs per token.

    Optional entries:
        sharding: module name patterns -> `TensorParallelSpec`; tensor parallelism.
        tp_divided_fields: config fields that the number of tensor-parallel ranks must divide.
        unit_costs: (config, sequence length) -> cost of every pipeline unit; pipeline parallelism
            and memory prediction.
        prune_to_stage: (module, range of units) -> None; deletes what another stage holds.
        enable_fused_loss: module -> callable that returns the last product's weight ``[V, D]``.
            The module then returns that product's input ``[B, T, D]``, and the loss never
            builds all logits.
        moe_layers: module -> its `weft.models.moe.MoE` layers; expert parallelism.
        num_active_params: config -> parameters that one token uses.
        hf_mapping: ``weft export`` and ``weft import``.
    """

    config: type[Section]
    presets: Mapping[str, Section]
    build: Callable[[Any], nn.Module]
    check: Callable[[Any], list[ConfigError]]
    blocks: Callable[[Any], list[nn.Module]]
    get_init: Callable[[str, Any], Init]
    has_weight_decay: Callable[[str], bool]
    num_params: Callable[[Any], int]
    flops_per_token: Callable[[Any, int], float]
    sharding: Mapping[str, TensorParallelSpec] = field(default_factory=dict)
    tp_divided_fields: tuple[str, ...] = ()
    unit_costs: Callable[[Any, int], list[UnitCost]] | None = None
    prune_to_stage: Callable[[Any, range], None] | None = None
    enable_fused_loss: Callable[[Any], Callable[[], Tensor]] | None = None
    moe_layers: Callable[[nn.Module], list[Any]] | None = None
    num_active_params: Callable[[Any], int] | None = None
    hf_mapping: HFMapping | None = None
