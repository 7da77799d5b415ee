"""LoRA (arXiv:2106.09685): which matrices get adapters, what is trained, and what a token costs.

One answer for all: the plan counts and refuses by it, and `weft.parallel.lora` builds by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from weft.config.errors import ConfigError, suggest
from weft.config.schema import Job, LoraSection
from weft.models import Family
from weft.plan.layout import ParallelDims
from weft.plan.matrices import weight_split, list_matrices
from weft.plan.pipeline_plan import PipelinePlan

QUANT_BLOCK_SIZE = 64  # numbers of a row that share a scale where a matrix is quantised
QUANT_BLOCK_BYTES = {"nf4": 32 + 4, "int8": 64 + 4}  # of a block and its scale: see weft.parallel.quantize


def is_target(name: str, section: LoraSection) -> bool:
    """Whether the linear layer of that name gets an adapter."""
    return not section.targets or name.rpartition(".")[2] in section.targets


def lora_scaling(section: LoraSection) -> float:
    """What the adapters' output is multiplied by; with the root: rsLoRA, arXiv:2312.03732."""
    rank = section.rank
    return section.alpha / (math.sqrt(rank) if section.rank_stabilized else rank)


class TrainingCost(NamedTuple):
    """What LoRA makes of a model."""

    params: int  # that are trained
    quantized: int  # weights that are kept in fewer bits
    flops_per_token: float
    causal_flops_per_token: float


def training_cost(section: LoraSection, model: Any, family: Family, seq_len: int) -> TrainingCost:
    """What is trained of a model, and the FLOPs of a token: forward and backward.

    A frozen weight is multiplied by twice, forward and for the gradient of its input, and not a
    third time for its own: 4 FLOPs a weight where training has 6.  An adapter's have all 6.
    Attention has no weights and stays what it is.  That the first block's input needs no gradient
    is left out.

    Args:
        model: the family's configuration.
    """
    whole, half = (
        family.flops_per_token(model, tokens) for tokens in (seq_len, (seq_len + 1) // 2)
    )
    if not section.rank:
        return TrainingCost(family.num_params(model), 0, whole, half)
    matrices = list_matrices(model, family)
    params = sum(
        section.rank * (m.outputs + m.inputs) for m in matrices if is_target(m.name, section)
    )
    quantized = sum(m.outputs * m.inputs for m in matrices) * (section.quantize != "none")
    # Without attention: 6 for each weight that a token is multiplied by.
    change = 6.0 * params - family.flops_per_token(model, 0) / 3
    return TrainingCost(params, quantized, whole + change, half + change)


class FrozenWeights(NamedTuple):
    """What memory needs to know of a model whose own weights are not trained, but adapters are."""

    weight_bytes: float  # of a weight, on the mean
    trained: float  # parameters of adapters for each weight


def frozen_weights(job: Job, model: Any, family: Family, compute_bytes: int) -> FrozenWeights | None:
    """None if all weights are trained.

    Args:
        model: the family's configuration.
        compute_bytes: of a weight that is not quantised.
    """
    if not job.lora.rank:
        return None
    lora, params = training_cost(job.lora, model, family, job.train.seq_len), family.num_params(model)
    small = lora.quantized / params
    packed = QUANT_BLOCK_BYTES.get(job.lora.quantize, 0) / QUANT_BLOCK_SIZE
    return FrozenWeights(small * packed + (1 - small) * compute_bytes, lora.params / params)


def check_lora(
    job: Job, model: Any, family: Family, degrees: ParallelDims
) -> Iterator[ConfigError]:
    """Why there cannot be such adapters."""
    section = job.lora
    if not section.rank:
        for key, value in (("targets", section.targets), ("quantize", section.quantize)):
            if value not in ((), "none"):
                rule = "says nothing while all weights are trained"
                yield ConfigError(f"lora.{key}", value, rule, "use lora.rank 16", ("lora.rank",))
        return
    matrices = list_matrices(model, family)
    kinds = dict.fromkeys(matrix.name.rpartition(".")[2] for matrix in matrices)
    if not matrices:
        rule = f"the blocks of {job.model.kind} have no linear layer of torch.nn"
        yield ConfigError("lora.rank", section.rank, rule, "use 0")
    for target in section.targets:
        if target not in kinds:
            rule = "is no linear layer of the model's blocks"
            yield ConfigError("lora.targets", target, rule, suggest(target, kinds), ("model.kind",))
    if job.precision.float8 != "none":
        rule = "is not possible beside float8: a frozen matrix is kept, and multiplied by, as it is"
        remedy = "use precision.float8 none; lora.quantize takes less memory"
        yield ConfigError("lora.rank", section.rank, rule, remedy, ("precision.float8",))
    if section.quantize != "none":
        for kind in kinds:
            matrix = next(m for m in matrices if m.name.rpartition(".")[2] == kind)
            cut = degrees.tp if weight_split(matrix.name, family) == "row" else 1
            if matrix.inputs % (cut * QUANT_BLOCK_SIZE):
                over = f" over tp = {cut} ranks" if cut > 1 else ""
                rule = f"{kind} has {matrix.inputs} inputs{over}: no whole blocks of {QUANT_BLOCK_SIZE}"
                remedy = "use none, or other sizes"
                yield ConfigError("lora.quantize", section.quantize, rule, remedy, ("parallel.tp",))


def check_lora_stages(job: Job, pipeline: PipelinePlan | None) -> Iterator[ConfigError]:
    """Yield what a pipeline of adapters lacks.

    torch computes gradients of the first stage's output, which must have something to train, and
    every rank has an optimizer, which must have a parameter.
    """
    if not job.lora.rank or pipeline is None:
        return
    key, remedy = "pipeline.layers_per_stage", "give it a block"
    value: object = list(job.pipeline.layers_per_stage)
    if not value:
        key, remedy = "parallel.pp", "use fewer ranks, or more layers"
        value = len(pipeline.held)
    if not pipeline.stages[0].blocks:
        yield ConfigError(
            key, value, "the first stage, without blocks, has no adapter to train", remedy
        )
    for rank, stages in enumerate(pipeline.held):
        if pipeline.stages[0] not in stages and not any(stage.blocks for stage in stages):
            rule = f"rank {rank} of the pipeline, without blocks, has no adapter to train"
            yield ConfigError(key, value, rule, remedy)
