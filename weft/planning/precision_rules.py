"""Rules of float8 and LoRA for model and layout; memory of frozen weights."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from weft.config.errors import ConfigErrors, suggest
from weft.config.schema import Job, LoraSection
from weft.models import Family
from weft.models.decoder_config import DecoderConfig
from weft.planning.degrees import ParallelDims
from weft.planning.lora_plan import (
    QUANT_BLOCK_BYTES,
    QUANT_BLOCK_SIZE,
    TrainingCost,
    outer_targets,
    row_tables,
    saved_tables,
)
from weft.planning.matrices import (
    convertible_matrices,
    list_matrices,
    required_multiple,
    select_matrices,
    tensor_parallel_spec,
)
from weft.planning.model_config import shown_name


def check_float8(
    errors: ConfigErrors,
    job: Job,
    model: Any,
    family: Family,
    degrees: ParallelDims,
    compute_dtype: str,
    emulated: bool,
) -> None:
    """Check that the job supports float8 products."""
    section = job.precision
    key, recipe = "precision.float8", section.float8
    if recipe == "none":
        return
    if compute_dtype == "float32" and not emulated:
        rule = f"produces bfloat16, but precision.compute_dtype is {compute_dtype}"
        remedy = "use precision.compute_dtype=bfloat16, or none"
        errors.add(key, rule, remedy, ("precision.compute_dtype",))

    convertible = convertible_matrices(recipe, model, family, degrees.tp)
    unit = required_multiple(recipe)
    for pattern in section.float8_exclude if convertible else ():
        if not any(fnmatchcase(matrix.name, pattern) for matrix in convertible):
            rule = "matches none of the matrices that support float8"
            layers = dict.fromkeys(matrix.name.rpartition(".")[2] for matrix in convertible)
            remedy = f"use one of {', '.join(layers)}, as in {convertible[0].name}"
            errors.add("precision.float8_exclude", rule, remedy, (key,), value=pattern)
    if not convertible:
        rule = f"needs a matrix whose sizes are multiples of {unit}, and the blocks have none"
        rule += f" over tp={degrees.tp} ranks" if degrees.tp > 1 else ""
        errors.add(key, rule, "use none, or another model size", ("parallel.tp",))
    elif not select_matrices(section, convertible):
        rule = (
            f"converts none of {len(convertible)} matrices: each is too small to gain, or in "
            "precision.float8_exclude"
        )
        remedy = "use none, or precision.float8_small=true to convert small matrices too"
        errors.add(key, rule, remedy, ("precision.float8_exclude",))
    tokens = job.train.seq_len // degrees.sequence_shards
    # The product for the gradient of a weight sums over tokens; frozen weights have none.
    sums_tokens = recipe != "rowwise_with_gw_hp" and not (job.lora.rank and recipe != "mxfp8")
    if sums_tokens and tokens % unit:
        rule = f"gives {tokens} tokens per sequence and rank, not a multiple of {unit} (float8)"
        multiple = unit * degrees.sequence_shards
        remedy = f"use a multiple of {multiple}, or precision.float8 rowwise_with_gw_hp"
        errors.add("train.seq_len", rule, remedy, (key, "parallel.cp"))


def check_lora(
    errors: ConfigErrors, job: Job, model: Any, family: Family, degrees: ParallelDims
) -> None:
    """Check that the model and the layout support the adapters."""
    section, key = job.lora, "lora.rank"
    if not section.rank:
        return
    matrices = list_matrices(model, family)
    if not matrices:
        rule = f"needs nn.Linear layers in the blocks, which {job.model.kind} does not have"
        errors.add(key, rule, "use 0")
    outer = [matrix.name for matrix in outer_targets(model, section)]
    is_tied = getattr(model, "tied_embeddings", False)
    for target in section.targets:
        if target == "lm_head" and is_tied:
            rule = "shares the table of the embedding (model.tied_embeddings=true)"
            remedy = "use embed_tokens, whose adapter changes both"
            errors.add("lora.targets", rule, remedy, ("model.tied_embeddings",), value=target)
        elif target not in outer and not any(
            f".{matrix.name}".endswith(f".{target}") for matrix in matrices
        ):
            layers = dict.fromkeys(matrix.name.rpartition(".")[2] for matrix in matrices)
            rule = "is neither a linear layer of the model's blocks nor embed_tokens or lm_head"
            remedy = suggest(target, layers)
            errors.add("lora.targets", rule, remedy, ("model.kind",), value=target)
    _check_tables(errors, job, model)
    if section.dora and is_tied and outer:
        rule = (
            "has magnitudes of columns for the embedding, but of rows for the head that shares it"
        )
        remedy = "use lora.targets without embed_tokens, or lora.dora=false"
        errors.add("lora.dora", rule, remedy, ("lora.targets", "model.tied_embeddings"))
    unequal = {(m.name.rpartition(".")[2], m.in_features): m for m in matrices}
    for (layer, _), matrix in unequal.items() if section.quantize != "none" else ():
        spec = tensor_parallel_spec(matrix.name, family)
        shards = tp = degrees.tp if spec.weight == "row" else 1
        if tp > 1 and spec.heads and model.num_heads % tp:
            shards = model.num_heads  # no block may belong to two heads
        if matrix.in_features % (shards * QUANT_BLOCK_SIZE):
            over = f" over tp={tp} ranks" if tp > 1 else ""
            rule = (
                f"needs blocks of {QUANT_BLOCK_SIZE}, which do not divide the "
                f"{matrix.in_features} inputs of {layer}{over}"
            )
            smaller_tp = ", or a smaller parallel.tp" if tp > 1 else ""
            remedy = "use none, or another model size" + smaller_tp
            errors.add("lora.quantize", rule, remedy, ("parallel.tp",))


def _check_tables(errors: ConfigErrors, job: Job, model: Any) -> None:
    """Check the keys of tables that are trained beside adapters, in full or by rows."""
    section, key = job.lora, "lora.modules_to_save"
    known = [table.name for table in saved_tables(model, section)]
    for name in section.modules_to_save:
        if name in section.targets:
            rule, remedy = "is also in lora.targets", "remove it from one of them"
            errors.add(key, rule, remedy, ("lora.targets",), value=name)
        elif name not in known:
            rule, remedy = "is not a layer of this model", "remove it"
            if getattr(model, "tied_embeddings", False):
                rule = "shares the table of the embedding (model.tied_embeddings=true)"
                remedy = "use embed_tokens, which is the head, too"
            errors.add(key, rule, remedy, ("model.tied_embeddings",), value=name)
    key, ids = "lora.trainable_tokens", section.token_ids
    if ids and not isinstance(model, DecoderConfig):
        rule = f"needs the tables of weft's decoder, which {shown_name(job.model)} lacks"
        errors.add(key, rule, "leave it out", ("model.kind",))
    elif ids and row_tables(model, section) and ids[-1] >= model.vocab_size:
        rule = f"is not below model.vocab_size={model.vocab_size}"
        errors.add(key, rule, "use ids of tokens", ("model.vocab_size",), value=ids[-1])


class FrozenWeights(NamedTuple):
    """The memory of a model with frozen weights and trainable adapters."""

    bytes_per_weight: float  # frozen bytes per weight of the model
    adapter_ratio: float  # trained parameters per weight of the model


def frozen_weights(
    section: LoraSection, cost: TrainingCost, compute_bytes: int
) -> FrozenWeights | None:
    """Return the memory of the frozen weights; None if all weights are trainable.

    Args:
        section: the section ``[lora]``.
        cost: of the model.
        compute_bytes: bytes of a weight that is not quantized.
    """
    if not cost.lora_rank:
        trained = cost.trainable_params / cost.num_params
        # optim.groups freezes weights in float32.
        return None if trained == 1 else FrozenWeights(4 * (1 - trained), trained)
    quantized = cost.quantized_params / cost.num_params
    quantized_bytes = QUANT_BLOCK_BYTES.get(section.quantize, 0) / QUANT_BLOCK_SIZE
    unquantized = 1 - quantized - cost.saved_params / cost.num_params
    bytes_per_weight = quantized * quantized_bytes + unquantized * compute_bytes
    return FrozenWeights(bytes_per_weight, cost.trainable_params / cost.num_params)
