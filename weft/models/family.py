"""Protocol between weft and a model family.

A family is one file that ends with a `Family`: a configuration, a constructor, and the functions
and tables that the trainer and the planner read.  `Family` documents every entry;
`weft.models.decoder` is the reference implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from weft.config.errors import ConfigError
from weft.config.keys import Section


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


WeightSharding = Literal[
    "column", "row", "norm_of_heads", "vocabulary", "replicated", "partial_grad"
]


class TensorParallelSpec(NamedTuple):
    """Tensor parallelism of one module, applied by `weft.parallel.tensor_parallel`.

    Attributes:
        weight: how weight and bias are sharded.  column: by outputs; row: by inputs; norm_of_heads:
            partial_grad, or if the norm is over all heads, as they are; vocabulary: by rows of an
            embedding table; replicated: on every rank; partial_grad: replicated, but each rank
            computes a part of the gradient.
        input_comm: gather: all-gather the input's sequence, before a column-sharded product.
        output_comm: gather: all-gather the output's sequence, of whose gradient each rank computes
            a part; gather_values: of whose gradient each rank computes all; scatter:
            reduce-scatter the partial outputs of a row-sharded product over the sequence.
        heads: shard at the boundaries of query heads, or of key/value heads, which ranks may share.

    Between products each rank holds a slice of the sequence (sequence parallelism).
    """

    weight: WeightSharding | None = None
    input_comm: Literal["gather"] | None = None
    output_comm: Literal["gather", "gather_values", "scatter"] | None = None
    heads: Literal["query", "key"] | None = None


class UnitCost(NamedTuple):
    """Cost of one unit: the embedding, a block, or the head with its norm."""

    name: str
    params: int
    flops_per_token: float  # forward and backward, without recomputation
    # Saved for backward, in bfloat16 without recomputation.
    activation_bytes_per_token: float
    expert_params: int = 0  # part of ``params`` that expert parallelism shards


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
        tied_parameter: name of the parameter that the first and the last unit share if the
            configuration has ``tied_embeddings`` or ``mtp_layers``.  ``prune_to_stage`` keeps it
            for both; pipeline parallelism of such models.
        fsdp_units: module -> lists of modules that FSDP gathers together, in the order of their
            use: each block, and others.  The forward of the first of a list begins its use, so no
            other module of the model may read its parameters before.  Without this entry, what is
            outside of blocks is gathered together at the start of the forward pass.
        enable_fused_loss: module -> callable that returns the last product's weight ``[V, D]``.
            The module then returns that product's input ``[B, T, D]``, and the loss never
            builds all logits.
        set_embedding_noise: (module, function of the embeddings ``[B, T, D]``) -> None; the module
            then applies the function to the embeddings of its input in training, but not to those
            of later tokens in multi-token prediction; ``train.neftune_alpha``.
        layer_kind: (config, index of a block) -> key; blocks with equal keys do the same work.
            Without it, all do.
        moe_layers: module -> its `weft.models.moe.MoE` layers; expert parallelism.
        sharding_without_expert_tp: entries before those of ``sharding`` that leave experts whole,
            and shard what else is in a layer with experts; ``parallel.etp=1``.
        num_active_params: config -> parameters that one token uses.
        hf_mapping: `weft.models.hf_fields.HFMapping`; ``weft export`` and ``weft import``.
        choose_entries: config -> entries that replace those above for this configuration.
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
    tied_parameter: str | None = None
    fsdp_units: Callable[[Any], list[list[nn.Module]]] | None = None
    enable_fused_loss: Callable[[Any], Callable[[], Tensor]] | None = None
    set_embedding_noise: Callable[[Any, Callable[[Tensor], Tensor]], None] | None = None
    layer_kind: Callable[[Any, int], object] | None = None
    moe_layers: Callable[[nn.Module], list[Any]] | None = None
    sharding_without_expert_tp: Mapping[str, TensorParallelSpec] = field(default_factory=dict)
    num_active_params: Callable[[Any], int] | None = None
    hf_mapping: Any = None
    choose_entries: Callable[[Any], Mapping[str, Any]] | None = None

    def of(self, config: Any, experts_without_tp: bool = False) -> Family:
        """Return the family with the entries for a configuration."""
        family = replace(self, **self.choose_entries(config)) if self.choose_entries else self
        first = family.sharding_without_expert_tp if experts_without_tp else {}
        return replace(family, sharding={**first, **family.sharding})
