"""What weft needs to know of a kind of model, and the rows of the tables that tell it.

A model is one file, which ends with its `Family`; `weft.models.llama` is the one to read.
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
    """How a parameter starts: all ones, all zeros, normal with ``std``, cut at three ``std``; or
    (*fan_in*) uniform between plus and minus one over the root of its inputs, as `nn.Linear` does.

    ``residual``: it writes into the residual stream, twice per layer, so its standard
    deviation is divided by ``sqrt(2 * num_layers)`` to keep the sum's variance flat (GPT-2).
    """

    kind: Literal["ones", "zeros", "truncated_normal", "fan_in"]
    std: float = 0.0
    residual: bool = False


class TensorParallelSpec(NamedTuple):
    """What tensor parallelism makes of a module; `weft.parallel.tensor_parallel` carries it out.

    ``weight``: how the module's weight is cut over the ranks.  *column*: by outputs, *row*: by
    inputs, *heads*: by outputs, but never through a head, so that ranks share one where there
    are more ranks than heads; *vocabulary*: by rows of a table that is looked up in; *whole*:
    every rank has it; *summed*: it has, and computes a part of its gradient.

    ``before``, ``after``: what happens to the module's input or output.  Outside of the matrix
    products each rank holds a slice of the sequence.  *gather* makes it whole, for products whose
    weights are cut by column.  *scatter* adds up the ranks' parts, as products with weights cut
    by row leave them, and slices the sum.
    """

    weight: Literal["column", "row", "heads", "vocabulary", "whole", "summed"] | None = None
    before: Literal["gather"] | None = None
    after: Literal["gather", "scatter"] | None = None


class Unit(NamedTuple):
    """What one of a model's consecutive units costs; see `keep`."""

    name: str
    params: int
    flops_per_token: float  # forward and backward, without recomputation
    # Kept for backward, in bfloat16 without recomputation.
    activation_bytes_per_token: float
    expert_params: int = 0  # of ``params``, those that expert parallelism spreads


# Fields with the only value that weft's models can represent.
ONLY: Json = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
}


def hf_name(name: str) -> str:
    """The name in a Hugging Face checkpoint of a parameter of `weft.models.llama.Llama`."""
    return name if name == "lm_head.weight" else f"model.{name}"


@dataclass(frozen=True)
class HFMapping:
    """What Hugging Face has for a family.

    ``defaults``: what transformers takes where a field is missing, beside `DEFAULTS`.  ``window``:
    the sliding window of a file that does not mention one; None: the family has none.
    """

    name: str  # for people
    architecture: str
    model_type: str
    hf_name: Callable[[str], str] = hf_name
    defaults: Json = field(default_factory=dict)
    only: Json = field(default_factory=lambda: ONLY)
    ignored: frozenset[str] = frozenset()
    window: int | None = None


@dataclass(frozen=True)
class Family:
    """What weft needs to know of a kind of model.  `weft.models.llama` documents each entry.

    ``check``, ``build`` and what counts take the family's own configuration, an instance of
    ``config``; ``blocks``, ``keep`` and the like take the model that was built.  Rules
    about several of its fields belong in ``check``, not in validators of ``config``.
    """

    config: type[Section]
    presets: Mapping[str, Section]
    build: Callable[[Any], nn.Module]
    check: Callable[[Any], list[ConfigError]]
    blocks: Callable[[Any], list[nn.Module]]
    init_of: Callable[[str, Any], Init]
    decays: Callable[[str], bool]
    num_params: Callable[[Any], int]
    flops_per_token: Callable[[Any, int], float]
    # For tensor parallelism; without sharding a model cannot have it.
    sharding: Mapping[str, TensorParallelSpec] = field(default_factory=dict)
    split_sizes: tuple[str, ...] = ()
    # For pipeline parallelism; without them a model cannot have it.
    units: Callable[[Any, int], list[Unit]] | None = None
    keep: Callable[[Any, range], None] | None = None
    # For a loss without whole logits; without it they are whole.
    without_head: Callable[[Any], Callable[[], Tensor]] | None = None
    # Of a mixture of experts: a model's routed layers (`weft.models.moe.MoE`), and of the
    # parameters those that a token has to do with.
    routed: Callable[[nn.Module], list[Any]] | None = None
    num_active_params: Callable[[Any], int] | None = None
    # For `weft export` and `weft import`; without it a model has neither.
    huggingface: HFMapping | None = None
