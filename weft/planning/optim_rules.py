"""Rules of the optimizer and of its parameter groups."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import filter as filter_names
from typing import Any

import torch

from weft.config.errors import ConfigErrors, suggest
from weft.config.schema import Job
from weft.models import Family
from weft.models.decoder_config import DecoderConfig
from weft.planning.lora_plan import is_target, outer_targets, row_tables, saved_tables
from weft.planning.matrices import is_matrix, list_matrices
from weft.planning.model_config import shown_name
from weft.planning.plan import Plan

WEFT_OPTIMIZERS = ("adamw", "muon", "soap")
# The weights that `weft.optim.qk_clip` scales.
QUERY_KEY_WEIGHTS = ("q_proj.weight", "k_proj.weight", "q_b_proj.weight", "kv_b_proj.weight")


def check_optimizer(errors: ConfigErrors, job: Job, model: Any, family: Family) -> None:
    """Check the optimizer's keys, and that each pattern of its groups has an effect."""
    optim, key = job.optim, "optim.groups"
    if optim.state_dtype != "float32" and optim.name not in WEFT_OPTIMIZERS:
        rule = f"is only for {', '.join(WEFT_OPTIMIZERS)}, not {optim.name}"
        errors.add("optim.state_dtype", rule, "use float32", ("optim.name",))
    frozen = find_frozen_params(job, model, family)
    _check_qk_clip(errors, job, model, frozen)
    depends = ("optim.name", "model.kind", "model.num_layers", "lora.rank", "lora.targets")
    names = trainable_names(job, model, family) if optim.groups else {}
    owners = {name: optim.group_of(name) for name in names}
    for index, group in enumerate(optim.groups):
        own = [name for name in names if owners[name] == index]
        for pattern in group.params:
            rule, remedy = "matches only parameters of earlier groups", "move its group up"
            if not filter_names(names, pattern):  # layers differ only in their number
                kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)
                rule, remedy = "matches no trainable parameter", suggest(pattern, kinds)
            if not filter_names(own, pattern):
                errors.add(key, rule, remedy, depends, value=pattern)
    if names and len(frozen) == len(names):
        rule = "freezes every trainable parameter (lr_mult=0)"
        errors.add(key, rule, "leave some out of the frozen groups", depends, value="(given)")


def group_warnings(plan: Plan) -> Iterator[str]:
    """Yield a warning for each option of a group that none of its parameters reads."""
    job, optim = plan.job, plan.job.optim
    names = trainable_names(job, plan.model, plan.family) if optim.groups else {}
    for index, group in enumerate(optim.groups):
        own = [is_matrix for name, is_matrix in names.items() if optim.group_of(name) == index]
        has_matrix = optim.name in ("muon", "soap") and any(own)
        has_muon = optim.name == "muon" and has_matrix and group.optimizer == "auto"
        read = {"weight_decay": True, "momentum": has_muon, "optimizer": has_matrix}
        read |= dict.fromkeys(("beta1", "beta2", "eps"), not has_muon or not all(own))
        for option, is_read in read.items():
            if (value := getattr(group, option)) == "auto":
                continue
            reason = ""
            if group.lr_mult == 0:
                reason = "lr_mult=0 freezes the group"
            elif not is_read and optim.name in WEFT_OPTIMIZERS:
                of_matrices = "SOAP" if optim.name == "soap" else "Muon"
                updates = {"momentum": "Muon", "optimizer": of_matrices}.get(option, "AdamW")
                reason = f"{updates} updates no parameter of {list(group.params)}"
            if reason:
                yield f"{option}={value} of optim.groups has no effect: {reason}. Remove it."


def find_frozen_params(job: Job, model: Any, family: Family) -> tuple[str, ...]:
    """Return the full names of the parameters of groups with ``lr_mult=0``."""
    groups = job.optim.groups
    if all(group.lr_mult for group in groups):
        return ()
    names = trainable_names(job, model, family)
    owners = {name: job.optim.group_of(name) for name in names}
    return tuple(name for name, own in owners.items() if own >= 0 and not groups[own].lr_mult)


def _check_qk_clip(errors: ConfigErrors, job: Job, model: Any, frozen: Sequence[str]) -> None:
    """Check that QK-clip can have an effect, and that attention is weft's."""
    key, threshold = "optim.qk_clip_threshold", job.optim.qk_clip_threshold
    if not isinstance(model, DecoderConfig):
        measures = {key: threshold, "monitor.attention_logits": job.monitor.attention_logits}
        for name, value in measures.items():
            if value:
                rule = f"needs the attention of weft's decoder, which {shown_name(job.model)} lacks"
                errors.add(name, rule, "leave it out", ("model.kind",))
        return
    if not threshold:
        return
    if job.lora.rank:
        rule = "cannot scale the weights of queries and keys, which LoRA freezes"
        errors.add(key, rule, "use 0, or lora.rank=0", ("lora.rank",))
    if model.qk_norm != "none":
        rule = "cannot limit logits: a norm of queries and keys undoes the scale of their weights"
        errors.add(key, rule, "use 0, or model.qk_norm=none", ("model.qk_norm",))
    weights = [name for name in frozen if name.endswith(QUERY_KEY_WEIGHTS)]
    if weights and not job.lora.rank:
        rule = f"cannot scale the weights of queries and keys that lr_mult=0 freezes ({weights[0]})"
        errors.add(key, rule, "use 0, or train these weights", ("optim.groups",))


def export_warnings(plan: Plan) -> Iterator[str]:
    """Yield a warning if the run trains what transformers' model does not have."""
    mapping = plan.family.hf_mapping
    if mapping is not None and plan.has_score_head and not mapping.score_architecture:
        yield (
            f"transformers has no class of {mapping.name} with a score head (model.score_head): "
            "'weft export' will refuse the model. Use another model family."
        )
    if mapping is None or plan.family.moe_layers is None or plan.lora_rank:
        return
    rate = getattr(plan.model, "balance_rate", 0)
    if rate and not mapping.expert_bias:
        yield (
            f"model.balance_rate={rate:g} changes biases that {mapping.name} does not have in "
            "transformers: 'weft export' will refuse the model. Use model.balance_rate=0, and "
            "model.router_aux_loss_coef to balance the experts."
        )


def trainable_names(job: Job, model: Any, family: Family) -> dict[str, bool]:
    """Return the trainable parameters of the full model, and whether each is a matrix."""
    if job.lora.rank:
        inner = [m.name for m in list_matrices(model, family) if is_target(m.name, job.lora)]
        outer = [matrix.name for matrix in outer_targets(model, job.lora)]
        names = {f"{name}.lora_{each}.weight": True for name in inner for each in "AB"}
        for name in outer:
            kind = "embedding_" if name == "embed_tokens" else ""
            names |= {f"{name}.lora_{kind}{each}.weight": False for each in "AB"}
        names |= {f"{table.name}.weight": False for table in saved_tables(model, job.lora)}
        names |= {f"{table.name}.lora_rows.weight": False for table in row_tables(model, job.lora)}
        vectors = [*inner, *outer] if job.lora.dora else []
        return names | {f"{name}.lora_magnitude.weight": False for name in vectors}
    with torch.device("meta"):
        module = family.build(model)
    block_params = {param for block in family.blocks(module) for param in block.parameters()}
    return {name: is_matrix(name, param, block_params) for name, param in module.named_parameters()}
