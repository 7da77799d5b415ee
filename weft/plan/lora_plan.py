"""LoRA (arXiv:2106.09685): adapted matrices, trainable parameters and FLOPs.

The plan counts and validates with this module; `weft.parallel.lora` builds the adapters with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from weft.config.errors import ConfigError, suggest
from weft.config.schema import Job, LoraSection
from weft.models import Family
from weft.plan.layout import ParallelDims
from weft.plan.matrices import list_matrices, weight_split
from weft.plan.pipeline_plan import PipelinePlan

QUANT_BLOCK_SIZE = 64  # neighbors in a row of a quantized matrix that share a scale
# Bytes of a block and its scale: see `weft.parallel.quantize`.
QUANT_BLOCK_BYTES = {"nf4": 32 + 4, "int8": 64 + 4}


def is_target(name: str, section: LoraSection) -> bool:
    """Return True if the linear layer of that name gets an adapter."""
    return not section.targets or name.rpartition(".")[2] in section.targets


def lora_scaling(section: LoraSection) -> float:
    """Return the factor of the adapters' output (rsLoRA: arXiv:2312.03732)."""
    rank = section.rank
    return section.alpha / (math.sqrt(rank) if section.rank_stabilized else rank)


class TrainingCost(NamedTuple):
    """Trainable parameters and FLOPs per token, forward and backward."""

    trainable_params: int
    quantized_params: int
    flops_per_token: float
    causal_flops_per_token: float  # counts only the attention scores below the causal mask


def training_cost(section: LoraSection, model: Any, family: Family, seq_len: int) -> TrainingCost:
    """Count the trainable parameters of a model and the FLOPs per token.

    A trainable weight costs 6 FLOPs per token: forward, gradient of the input, gradient of the
    weight.  A frozen weight costs 4.  Attention scores have no weights and cost the same.  The
    count ignores that the input of the first block needs no gradient.

    ``model`` is the family's configuration.  A LoRA rank of 0 means that all weights are trained.
    """
    # A token attends to half of its sequence on average.
    full, causal = (
        family.flops_per_token(model, tokens) for tokens in (seq_len, (seq_len + 1) // 2)
    )
    if not section.rank:
        return TrainingCost(family.num_params(model), 0, full, causal)
    matrices = list_matrices(model, family)
    params = sum(
        section.rank * (m.out_features + m.in_features)
        for m in matrices
        if is_target(m.name, section)
    )
    quantized = sum(m.out_features * m.in_features for m in matrices) * (section.quantize != "none")
    # At sequence length 0 the model's FLOPs are 6 per weight, without attention.
    change = 6.0 * params - family.flops_per_token(model, 0) / 3
    return TrainingCost(params, quantized, full + change, causal + change)


class FrozenWeights(NamedTuple):
    """The memory of a model with frozen weights and trainable adapters."""

    bytes_per_weight: float  # mean over the frozen weights
    adapter_ratio: float  # adapter parameters per frozen weight


def frozen_weights(
    job: Job, model: Any, family: Family, compute_bytes: int
) -> FrozenWeights | None:
    """Return the memory of the frozen weights; None if all weights are trainable.

    Args:
        job: keys of the run.
        model: the family's configuration.
        family: the model family.
        compute_bytes: bytes of a weight that is not quantized.
    """
    if not job.lora.rank:
        return None
    cost = training_cost(job.lora, model, family, job.train.seq_len)
    params = family.num_params(model)
    quantized = cost.quantized_params / params
    quantized_bytes = QUANT_BLOCK_BYTES.get(job.lora.quantize, 0) / QUANT_BLOCK_SIZE
    bytes_per_weight = quantized * quantized_bytes + (1 - quantized) * compute_bytes
    return FrozenWeights(bytes_per_weight, cost.trainable_params / params)


def check_lora(
    job: Job, model: Any, family: Family, degrees: ParallelDims
) -> Iterator[ConfigError]:
    """Yield errors if the model or the layout does not support the adapters."""
    section = job.lora
    if not section.rank:
        for key, value in (("targets", section.targets), ("quantize", section.quantize)):
            if value not in ((), "none"):
                rule = "has no effect without adapters (lora.rank=0)"
                yield ConfigError(f"lora.{key}", value, rule, "use lora.rank=16", ("lora.rank",))
        return
    matrices = list_matrices(model, family)
    layers = dict.fromkeys(matrix.name.rpartition(".")[2] for matrix in matrices)
    if not matrices:
        rule = f"needs nn.Linear layers in the blocks, which {job.model.kind} does not have"
        yield ConfigError("lora.rank", section.rank, rule, "use 0")
    for target in section.targets:
        if target not in layers:
            rule = "is not a linear layer of the model's blocks"
            remedy = suggest(target, layers)
            yield ConfigError("lora.targets", target, rule, remedy, ("model.kind",))
    if job.precision.float8 != "none":
        rule = "does not support float8, because frozen matrices keep their dtype in every product"
        remedy = "use precision.float8=none; lora.quantize saves more memory"
        yield ConfigError("lora.rank", section.rank, rule, remedy, ("precision.float8",))
    if section.quantize != "none":
        for layer in layers:
            matrix = next(m for m in matrices if m.name.rpartition(".")[2] == layer)
            tp = degrees.tp if weight_split(matrix.name, family) == "row" else 1
            if matrix.in_features % (tp * QUANT_BLOCK_SIZE):
                over = f" over tp={tp} ranks" if tp > 1 else ""
                rule = (
                    f"needs blocks of {QUANT_BLOCK_SIZE}, which do not divide the "
                    f"{matrix.in_features} inputs of {layer}{over}"
                )
                remedy = "use none, or another model size" + (
                    ", or a smaller parallel.tp" if tp > 1 else ""
                )
                yield ConfigError("lora.quantize", section.quantize, rule, remedy, ("parallel.tp",))


def check_lora_stages(job: Job, pipeline: PipelinePlan | None) -> Iterator[ConfigError]:
    """Yield errors if a pipeline has a rank without a trainable adapter.

    torch computes gradients of the first stage's output, so that stage needs a trainable
    parameter.  Every rank has an optimizer, which needs a parameter.
    """
    if not job.lora.rank or pipeline is None:
        return
    key, remedy = "pipeline.layers_per_stage", "give it at least one block"
    value: object = list(job.pipeline.layers_per_stage)
    if not value:
        key, remedy = "parallel.pp", "use fewer pipeline ranks, or more layers"
        value = len(pipeline.stages_by_rank)
    if not pipeline.stages[0].num_blocks:
        rule = "leaves the first stage without blocks, and so without an adapter to train"
        yield ConfigError(key, value, rule, remedy)
    for rank, stages in enumerate(pipeline.stages_by_rank):
        if pipeline.stages[0] not in stages and not any(stage.num_blocks for stage in stages):
            rule = f"leaves pipeline rank {rank} without blocks, and so without an adapter to train"
            yield ConfigError(key, value, rule, remedy)
