"""Warn about keys that a job sets and that have no effect in its plan.

Recipes are shared and overridden, so a value without effect is no error.  But a user who sets
``lora.alpha`` without ``lora.rank`` needs a warning.  Each key declares its condition in
`weft.config.schema` or in a model's configuration; `FACTS` has the terms that depend on more than
the value of a key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

from weft.config.errors import capitalize
from weft.config.formatting import format_value
from weft.config.keys import KeyFacts, Section, Term, facts_of, format_scalar, parse_condition
from weft.config.schema import SECTIONS, Job, flatten
from weft.config.storage import is_bucket_url
from weft.models.decoder_config import DecoderConfig
from weft.planning.lora_plan import adapts_blocks, outer_targets, row_tables
from weft.planning.pipeline_schedule import SCHEDULES
from weft.planning.plan import Plan

DEFAULTS = flatten(Job())


class Fact(NamedTuple):
    """A term of a condition that depends on more than the value of a key.

    Attributes:
        holds: returns True if the plan fulfills it.
        reason: why not, for the user.
        settings: a condition on keys that fulfills it, for the remedy and for random jobs.
        has_remedy: False if the settings make another job of it; then only the removal of the key
            helps, as without settings.
    """

    holds: Callable[[Plan], bool]
    reason: str
    settings: str = ""
    has_remedy: bool = True


def _reads_bucket(plan: Plan) -> bool:
    data = plan.job.data
    return any(map(is_bucket_url, (*data.sources, data.validation_path, data.cache_dir)))


def _has_matrices_b(plan: Plan) -> bool:
    """Return True if an adapter has a matrix B; that of the embedding alone has none."""
    outer = outer_targets(plan.model, plan.lora)
    return plan.lora.dora or adapts_blocks(plan) or any(m.name == "lm_head" for m in outer)


def _can_clip_logits(plan: Plan) -> bool:
    """Return True if logits can exceed the threshold of QK-clip."""
    softcap = getattr(plan.model, "attention_softcap", 0)
    return not 0 < softcap <= plan.job.optim.qk_clip_threshold


def _decays_lr(plan: Plan) -> bool:
    return plan.job.optim.schedule != "wsd" or plan.job.optim.decay_fraction > 0


def _balances_tokens(plan: Plan) -> bool:
    """Return True if context-parallel ranks can have unequal attention to compute."""
    parallel = plan.parallel
    by_documents = parallel.cp_load_balance == "documents"
    return parallel.cp_method != "ulysses" and (not by_documents or plan.job.data.keeps_documents)


def _gathers_params(plan: Plan) -> bool:
    if plan.fsdp_size > 1 or plan.etp < plan.tp:  # FSDP shards experts over tp
        return True
    return plan.uses_fsdp and plan.compute_dtype != "float32"


def _reduces_often(plan: Plan) -> bool:
    several = min(plan.num_microbatches, plan.dp_cp_size) > 1
    return several and not plan.world_size_invariant


def _gathers_over_nodes(plan: Plan) -> bool:
    per_node = plan.shard_ranks_per_node
    return per_node is not None and 1 < per_node < plan.fsdp_size


def _allows_stages_per_rank(plan: Plan) -> bool:
    section = plan.job.pipeline
    spec = SCHEDULES.get(section.schedule)
    return spec is None or spec.stages_per_rank in (None, section.stages_per_rank)


def _defers_weight_gradients(plan: Plan) -> bool:
    splits = plan.pipeline is not None and plan.pipeline.splits_backward
    return splits and not plan.world_size_invariant


def _sets_nodes(plan: Plan) -> bool:
    """Return True if ``run.nodes`` allows the number of nodes of the plan."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", plan.job.run.nodes_text)
    return match is None or int(match[1]) <= plan.node_counts[-1] <= int(match[2] or match[1])


FACTS = {
    # The machine.
    "sets_ranks_per_node": Fact(
        lambda plan: plan.job.run.nproc_per_node in ("auto", plan.local_world_size),
        "the launcher or the planned cluster sets the number of ranks per node",
    ),
    "sets_nodes": Fact(
        _sets_nodes, "the launcher or the planned cluster has another number of nodes"
    ),
    "has_several_nodes": Fact(
        lambda plan: plan.node_counts[-1] > 1 or plan.job.run.nodes != "auto",
        "the run has one node",
        "run.nodes>1",
    ),
    "runs_on_gpu": Fact(lambda plan: plan.cuda_graphs, "the device is no GPU (run.device)"),
    "has_replicas": Fact(
        lambda plan: plan.world_size > 1 or plan.job.resilience.has_replica_groups,
        "a run on one rank has no replica to compare",
    ),
    # Data and evaluation.
    "reads_bucket": Fact(
        _reads_bucket,
        "neither the data nor data.cache_dir are in a bucket",
        "data.cache_dir=s3://BUCKET/PATH",
    ),
    "has_validation": Fact(
        lambda plan: plan.job.data.has_validation,
        "there is no validation set, so nothing is evaluated (data.validation_fraction=0)",
        "data.validation_path!=",
    ),
    "decays_lr": Fact(
        _decays_lr,
        "the learning rate does not decay (optim.decay_fraction=0)",
        "optim.decay_fraction>0",
    ),
    # The model.
    "has_experts": Fact(
        lambda plan: plan.family.moe_layers is not None,
        "the model has no experts",
        "model.kind=moe",
        has_remedy=False,
    ),
    "trains_routers": Fact(lambda plan: not plan.lora_rank, "the routers are frozen (lora.rank)"),
    "has_local_layers": Fact(
        lambda plan: "L" in plan.model.layer_pattern,
        "no layer attends locally (model.layer_pattern)",
        "model.layer_pattern=LG",
    ),
    "has_window": Fact(
        lambda plan: bool(plan.model.sliding_window or plan.model.attention_chunk),
        "local layers have no limit",
        "model.sliding_window=5",
    ),
    "scales_by_longrope": Fact(
        lambda plan: plan.model.rope_scaling == "longrope",
        "model.rope_scaling is not longrope",
        "model.rope_scaling=longrope",
        has_remedy=False,  # it needs both lists of factors
    ),
    "has_latent_attention": Fact(
        lambda plan: plan.model.kv_rank > 0,
        "there is no latent attention (model.kv_rank=0)",
        "model.kv_rank>0",
        has_remedy=False,  # other sizes depend on it
    ),
    "has_layers_without_positions": Fact(
        lambda plan: "N" in plan.model.rope_pattern,
        "every layer has rotary positions (model.rope_pattern)",
        "model.rope_pattern=RN",
    ),
    "can_clip_logits": Fact(
        _can_clip_logits,
        "model.attention_softcap limits the logits below the threshold",
    ),
    # Adapters.
    "adapts_blocks": Fact(
        adapts_blocks, "adapters of the embedding and the head have no dropout (lora.targets)"
    ),
    "has_matrices_b": Fact(
        _has_matrices_b, "the adapter of the embedding has one learning rate (lora.targets)"
    ),
    "has_frozen_tables": Fact(
        lambda plan: bool(row_tables(plan.model, plan.lora)),
        "embedding and head have adapters, or are trained in full",
    ),
    # Sharding.
    "shards_params": Fact(
        lambda plan: plan.fsdp_size > 1,
        "no parameters are sharded (parallel.dp_shard x parallel.cp is 1, or "
        "train.world_size_invariant is true)",
        "parallel.dp_shard>1",
    ),
    "gathers_params": Fact(
        _gathers_params, "no parameters are sharded, so none are gathered", "parallel.dp_shard>1"
    ),
    "reshards_params": Fact(
        lambda plan: plan.fsdp_size > 1 and plan.reshard_after_forward is not False,
        "all parameters stay gathered, or none are sharded (parallel.reshard_after_forward)",
        "parallel.dp_shard>1 and parallel.reshard_after_forward=always",
    ),
    "gathers_over_nodes": Fact(
        _gathers_over_nodes,
        "no shard group has several ranks on each of several nodes (parallel.dp_shard)",
        "parallel.dp_shard=4",
        has_remedy=False,
    ),
    "reduces_often": Fact(
        _reduces_often,
        "a step reduces gradients once: it has one microbatch, or one rank to reduce over; or "
        "train.world_size_invariant reduces those of each sequence",
        "parallel.dp_shard>1 and train.microbatch_size=1",
    ),
    "reduces_in_fsdp": Fact(
        lambda plan: plan.uses_fsdp and not plan.world_size_invariant,
        "the run has one rank, or adds gradients in float32 (train.world_size_invariant)",
    ),
    # Other techniques.
    "splits_no_experts": Fact(
        lambda plan: plan.etp < plan.tp, "it equals parallel.tp, or the model has no experts"
    ),
    "balances_tokens": Fact(
        _balances_tokens,
        "the ranks have equal attention to compute (parallel.cp_method=ulysses, or documents "
        "without data.packing=documents)",
        "parallel.cp_method=ring and data.packing=documents",
    ),
    "allows_stages_per_rank": Fact(
        _allows_stages_per_rank,
        "pipeline.schedule has another number of stages per rank",
        "pipeline.schedule=Interleaved1F1B",
    ),
    "defers_weight_gradients": Fact(
        _defers_weight_gradients,
        "no schedule (pipeline.schedule) computes weight gradients later than input gradients, or "
        "train.world_size_invariant does not allow it",
        "parallel.pp>1 and pipeline.schedule=ZBVZeroBubble",
    ),
    "overlaps_dispatch": Fact(
        lambda plan: plan.can_overlap_dispatch,
        "only DualPipeV (pipeline.schedule) pairs passes that could overlap the exchange of "
        "tokens (parallel.ep above 1), by parallel.ep_dispatch=alltoall or padded",
        "pipeline.schedule=DualPipeV and parallel.pp>1 and parallel.ep>1",
    ),
}


@cache
def list_keys() -> dict[str, tuple[type[Section], str]]:
    """Return every ``section.key`` of jobs and of weft's own models, with its section."""
    keys = {f"{name}.{k}": (s, k) for name, s in SECTIONS.items() for k in s.model_fields}
    return keys | {f"model.{name}": (DecoderConfig, name) for name in DecoderConfig.model_fields}


def key_facts(name: str) -> KeyFacts:
    """Return the facts about ``section.key``; of its section for a user's model."""
    if name in list_keys():
        return facts_of(*list_keys()[name])
    return SECTIONS[name.partition(".")[0]].facts


def unmet_terms(condition: str, plan: Plan) -> list[Term]:
    """Return the terms of a condition that a plan does not fulfill.

    If no setting can fulfill the first one, the others do not matter.
    """
    unmet: list[Term] = []
    for term in parse_condition(condition):
        if term.sign:
            holds, has_remedy = term.holds(_read(plan, term.name)), True
        else:
            fact = FACTS[term.name]
            holds, has_remedy = fact.holds(plan), fact.has_remedy and bool(fact.settings)
        if not holds and has_remedy:
            unmet.append(term)
        elif not holds and not unmet:
            return [term]
    return unmet


def _read(plan: Plan, name: str) -> Any:
    section, _, key = name.partition(".")
    if section == "model" and hasattr(plan.model, key):
        return getattr(plan.model, key)
    return getattr(getattr(plan.job, section), key, None)


def describe_unmet(unmet: list[Term], plan: Plan) -> tuple[str, str]:
    """Return why a key has no effect, and the change that gives it one; may be empty.

    The reason follows the words "has no effect": " with parallel.pp=1", ": the run has one node".
    """
    values = [format_scalar(_read(plan, term.name)) for term in unmet if term.sign]
    names = [term.name for term in unmet if term.sign]
    pairs = [f"{k}={v}" if v else f"{k} empty" for k, v in zip(names, values, strict=True)]
    reason = f" with {' and '.join(pairs)}" if pairs else ""
    if facts := [FACTS[term.name].reason for term in unmet if not term.sign]:
        reason += f": {'; '.join(facts)}"
    terms = {each.name: each for term in unmet for each in list_settings(term, plan)}
    remedies = [t.describe() for t in terms.values() if not t.holds(_read(plan, t.name))]
    return reason, f"set {' and '.join(remedies)}" if remedies else ""


def list_settings(term: Term, plan: Plan | None = None) -> list[Term]:
    """Return terms of keys that fulfill a term, with what their values need.

    With a plan, without the facts that it fulfills, or that its job cannot.
    """
    if not term.sign:
        fact = FACTS[term.name]
        if plan is not None and (fact.holds(plan) or not fact.has_remedy):
            return []
        parts = parse_condition(fact.settings)
        return [each for part in parts for each in list_settings(part, plan)]
    settings, tries = [term], key_facts(term.name).tries or {}
    value = term.values[0]
    if term.sign == ">":
        value = next(filter(term.holds, tries), value)
    if term.sign != "!=":
        for part in parse_condition(tries.get(value, "")):
            settings += [part] if part.sign else list_settings(part, plan)
    return settings


def unused_key_warnings(plan: Plan, recipe: Job) -> Iterator[str]:
    """Yield a warning for every key that is not at its default and has no effect.

    Args:
        plan: the plan.
        recipe: the recipe without overrides: a key that it sets cannot be removed on the command
            line.
    """
    values, from_recipe = flatten(plan.job), flatten(recipe)
    own_model = isinstance(plan.model, DecoderConfig) and not plan.job.model.path
    for key, (section, name) in list_keys().items():
        condition = key_facts(key).needs
        if not condition or key not in values or (section is DecoderConfig and not own_model):
            continue
        value = values[key]
        default = DEFAULTS[key] if key in DEFAULTS else section.model_fields[name].default
        if value == default or not (unmet := unmet_terms(condition, plan)):
            continue
        reason, remedy = describe_unmet(unmet, plan)
        removal = "remove the key"
        if from_recipe.get(key, default) != default:
            removal = f"use {key}={format_value(default)}, the default"
        sentence = capitalize(", or ".join(filter(None, [remedy, removal])))
        yield f"{key}={format_value(value)} has no effect{reason}. {sentence}."
