"""Shrink a recipe to the smallest job with the same kind of layout.

The correctness of a layout does not depend on size.  The slices of a matrix, the ranks that sum a
gradient and the stages of a microbatch are the same for 400 billion parameters on 512 ranks and
for 40 thousand on 8.  So sizes shrink (width, layers, vocabulary, tokens, batch, degrees).  The
kind of everything stays: axes with more than one rank, tied or separate embeddings, grouped heads
and whether ranks share one, the schedule, several stages per rank, several microbatches with a
short last one, packed documents, the context-parallel method, resharding.

Only `weft.planning.resolve` and the model's family know which sizes are compatible.  This module
proposes candidates, best first, and takes the first one that they accept.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.config.accelerators import GPU
from weft.config.axes import AXES, BATCH_AXES, REMOVAL_ORDER, SHARD_AXES
from weft.config.errors import ConfigError, InvalidConfig
from weft.config.reader import read_job
from weft.config.schema import (
    ActivationCheckpointSection,
    Job,
    ParallelSection,
    PrecisionSection,
    difference,
    replace,
)
from weft.conversion.adapter_path import adopt_paths
from weft.models.decoder_config import DecoderConfig
from weft.planning.devices import parse_cluster
from weft.planning.matrices import find_float8_matrices, required_multiple
from weft.planning.needs import key_facts
from weft.planning.placement import count_ranks
from weft.planning.plan import Machine, Plan
from weft.planning.plan_text import cluster_machine
from weft.planning.resolve import resolve

# Fields of a model's configuration that can shrink, where a family has them.
SIZES = ("num_layers", "dim", "num_heads", "num_kv_heads", "ffn_dim", "vocab_size", "max_seq_len")

SEQ_LEN = 32
VOCAB_SIZE = 288  # at least 257, the minimum of a tokenizer; divisible by many degrees

NUM_EXPERTS = 12  # divisible by 2, 3, 4 and 6 ranks

# A job with at most so many parameters and tokens per step is not shrunk.
TEST_PARAMS = 1_000_000
TEST_TOKENS = 4096


@dataclass(frozen=True)
class Case:
    """A small layout, and one process that trains the same model."""

    recipe_sizes: dict[str, int]  # of the recipe's mesh axes
    plan: Plan
    reference_plan: Plan
    shrunk: dict[str, tuple[Any, Any]]  # key: (value in the recipe, value in ``plan.job``)
    notes: tuple[str, ...]  # features of the recipe's layout that ``plan`` lacks, and why


def plan_for_recipe(job: Job) -> Plan:
    """Resolve the plan of a recipe for its own cluster, not for this machine.

    Raises:
        InvalidConfig: with every reason why there is no plan.
    """
    parallel, cluster = job.parallel, job.run.cluster
    if cluster != "local":
        machine = cluster_machine(parse_cluster(cluster))
        # `peer_access` satisfies the rules here and below: a GPU feature is not an error.
        machine = dataclasses.replace(machine, peer_access=True)
        return resolve(job, machine, adopt=adopt_paths)
    nproc = job.run.nproc_per_node
    world = parallel.num_ranks if nproc == "auto" else nproc
    machine = Machine(
        device=GPU if job.run.device == "auto" else job.run.device,
        devices=world or 2 * parallel.ranks_per_shard,  # an "auto" axis has two ranks
        world_size=world,
        local_world_size=world,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        peer_access=True,
    )
    return resolve(job, machine, adopt=adopt_paths)


def shrink(plan: Plan, ranks: int, steps: int, keep: Collection[str] = ()) -> Case:
    """Return the smallest case of a job's layout.

    Args:
        plan: the plan of the recipe; see `plan_for_recipe`.
        ranks: maximum number of ranks.
        steps: training steps.
        keep: keys that are not changed, among ``compile.enable`` and those of ``precision``.

    Raises:
        InvalidConfig: if the layout does not fit in ``ranks``.
    """
    notes: list[str] = []
    sizes = _shrink_degrees(plan, ranks, notes)
    is_small = plan.num_params <= TEST_PARAMS and plan.tokens_per_step <= TEST_TOKENS
    unchanged = is_small and sizes == plan.axis_sizes
    float8 = plan.float8 if "precision.float8" in keep else "none"
    small_job = _shrink_keys(plan, sizes, unchanged, keep, notes)
    machine = _make_machine(small_job, sizes, notes)
    candidates = _candidates(plan, small_job, float8, sizes, steps)
    if unchanged:
        candidates = itertools.chain([({"steps": steps, "epochs": 0.0}, {})], candidates)
    errors: list[ConfigError] = []
    for batch, fields in candidates:
        threshold = {"param_persistence_threshold": _param_persistence_threshold(plan, fields)}
        rows = _shrink_token_ids(plan.job, fields)
        candidate = replace(small_job, train=batch, model=fields, parallel=threshold, lora=rows)
        try:
            small_plan = resolve(candidate, machine)
        except InvalidConfig as error:
            errors = error.errors  # the last candidate has the model of the recipe
            if {each.key for each in errors} != {"optim.groups"}:
                continue
            candidate = replace(candidate, optim={"groups": ()})
            small_plan = resolve(candidate, machine)
            notes.append("optim.groups: not verified; the smaller model lacks parameters of theirs")
        if unknown := [name for name in SIZES if name not in type(plan.model).model_fields]:
            notes.append(f"the model has no {', '.join(unknown)} to shrink; other sizes stay")
        elif not fields and not unchanged:
            notes.append("the model is not shrunk: no smaller one satisfies its family's rules")
        return Case(
            recipe_sizes=plan.axis_sizes,
            plan=small_plan,
            reference_plan=_plan_reference(candidate),
            shrunk=_list_changes(plan, small_plan),
            notes=tuple(notes),
        )
    raise InvalidConfig(errors)


def _shrink_keys(
    plan: Plan, sizes: dict[str, int], unchanged: bool, keep: Collection[str], notes: list[str]
) -> Job:
    """Return the job with all keys but the sizes of model and batch."""
    job = plan.job
    parallel = {**sizes, **_shrink_parallel(plan, sizes, unchanged, notes)}
    pipeline = {} if unchanged else _shrink_pipeline(plan, sizes, notes)
    kept = {name: value for name, value in job.precision if f"precision.{name}" in keep}
    if plan.float8 != "none":
        if "float8" in kept:
            kept["float8_small"] = True  # the matrices are small only because the job is
        else:
            rule = f"off; to verify it, add --precision.float8 {plan.float8}"
            notes.append(f"precision.float8: {rule}")
    warmup_steps = job.optim.num_warmup_steps(plan.num_steps or 1000)
    compiles = "compile.enable" in keep
    if plan.is_compiled and not compiles:
        notes.append("compile.enable: off; to compile, add --compile.enable true")
    if plan.cuda_graphs:
        notes.append("compile.cuda_graphs: off; it needs a GPU")
    return replace(
        job,
        run={"device": "cpu", "nproc_per_node": math.prod(sizes.values()), "cluster": "local"},
        # Verification reads no text, but the rules require a tokenizer that fits.
        data={"tokenizer": "train", "vocab_size": 257},
        optim={"warmup_steps": min(warmup_steps, 1)},
        parallel=parallel,
        pipeline=pipeline,
        precision=PrecisionSection(compute_dtype="float32").model_dump() | kept,
        compile={"cuda_graphs": False} | ({} if compiles else {"enable": False}),
    )


def _plan_reference(job: Job) -> Plan:
    """Plan one process that trains the same model."""
    reference_job = replace(
        job,
        run={"nproc_per_node": 1},
        parallel=ParallelSection(dp_shard=1).model_dump(),
        pipeline={"layers_per_stage": (), "stages_per_rank": "auto"},
        train={"microbatch_size": "auto", "world_size_invariant": False},
        activation_checkpoint=ActivationCheckpointSection().model_dump(),
        compile={"enable": False},
    )
    return resolve(reference_job, Machine("cpu", devices=1, world_size=1))


def plan_resume_layout(case: Case, layout: Sequence[tuple[str, str]], ranks: int) -> Plan:
    """Plan another layout of a case, from one process with some keys changed.

    Args:
        case: the case that saves the checkpoint.
        layout: keys of the layout (`KeyFacts.on_resume`) with their values as text.
        ranks: maximum number of ranks.

    Raises:
        InvalidConfig: if the case cannot have this layout.
    """
    option = "--resume-layout"
    chosen, _, errors = read_job("demo", layout)
    for name, text in layout:
        if key_facts(name).on_resume != "layout":
            rule = "changes more than the layout"
            remedy = "use keys such as parallel.tp, pipeline.schedule or train.microbatch_size"
            errors.add(option, rule, remedy, value=f"{name}={text}")
    errors.raise_any()
    changes: dict[str, dict[str, Any]] = {}
    for section, key in (name.split(".") for name, _ in layout):
        changes.setdefault(section, {})[key] = getattr(getattr(chosen, section), key)
    job = replace(case.reference_plan.job, **changes)
    world = job.parallel.num_ranks
    if world is None:
        job, world = replace(job, parallel={"dp_shard": 1}), job.parallel.ranks_per_shard
    if world > ranks:
        raise InvalidConfig([ConfigError(option, world, f"needs more than {ranks} ranks")])
    job = replace(job, run={"nproc_per_node": world})
    sizes = {axis: int(getattr(job.parallel, axis)) for axis in AXES}
    return resolve(job, _make_machine(job, sizes, []))


def match_float8(case: Case, resume_plan: Plan) -> tuple[Case, Plan]:
    """Exclude the matrices that not all of the compared runs multiply in float8.

    Tensor parallelism may leave a shard whose size float8 does not allow.  Such a matrix stays in
    high precision in that layout only, which is a choice of precision and no error of the layout.

    Args:
        case: the case and its reference.
        resume_plan: plan of the layout that resumes the case.

    Raises:
        InvalidConfig: if no matrix remains.
    """
    plans = [case.reference_plan, case.plan, resume_plan]
    names = [
        {matrix.name for matrix in find_float8_matrices(p.job.precision, p.model, p.family, p.tp)}
        for p in plans
    ]
    common = set.intersection(*names)
    if all(found == common for found in names):
        return case, resume_plan
    if not common:
        rule = "multiplies no matrix that all of the compared layouts multiply in float8"
        raise InvalidConfig([ConfigError("precision.float8", case.plan.float8, rule)])
    for i, plan in enumerate(plans):
        if extra := sorted(names[i] - common):
            exclude = (*plan.precision.float8_exclude, *extra)
            job = replace(plan.job, precision={"float8_exclude": exclude})
            plans[i] = resolve(job, _make_machine(job, plan.axis_sizes, []))
    excluded = sorted(set.union(*names) - common)
    note = f"not in float8, because a shard has a size that float8 does not allow: {excluded}"
    case = dataclasses.replace(
        case, reference_plan=plans[0], plan=plans[1], notes=(*case.notes, note)
    )
    return case, plans[2]


# --------------------------------------------------------------------------- layout


def _shrink_degrees(plan: Plan, ranks: int, notes: list[str]) -> dict[str, int]:
    """Halve the mesh along its longest axis until it fits in ``ranks``."""
    sizes = dict(plan.axis_sizes)
    # A schedule file has a line for each rank of the pipeline.
    pinned = {"pp"} if plan.pipeline and plan.pipeline.has_schedule_file else set()
    while (world := math.prod(sizes.values())) > ranks:
        free = [axis for axis in AXES if axis not in pinned]
        longest = max(free, key=lambda axis: sizes[axis])
        if sizes[longest] > 2:
            sizes[longest] = max(2, sizes[longest] // 2)
            continue
        # If ranks of another axis shard parameters, too, dp_shard is the axis to remove.
        has_other_shards = count_ranks(sizes, SHARD_AXES) > sizes["dp_shard"]
        order = ["dp_shard", *REMOVAL_ORDER] if has_other_shards else REMOVAL_ORDER
        removed = next((axis for axis in order if sizes[axis] > 1 and axis in free), None)
        if removed is None:
            rule = f"is fewer than the {world} pipeline ranks of the schedule file"
            raise InvalidConfig([ConfigError("--ranks", ranks, rule, f"use {world} or more")])
        sizes[removed] = 1
        notes.append(f"parallel.{removed}: not verified; it needs --ranks {world}")
    return sizes


def _shrink_parallel(
    plan: Plan, sizes: dict[str, int], unchanged: bool, notes: list[str]
) -> dict[str, Any]:
    """Return other keys that depend on degrees (unless ``unchanged``) or hardware."""
    changes: dict[str, Any] = {}
    if plan.async_tp:
        changes["async_tp"] = False
        notes.append("parallel.async_tp: off; it needs GPUs that reach each other's memory")
    if unchanged:
        return changes
    group_size, shards = plan.parallel.reshard_after_forward, count_ranks(sizes, SHARD_AXES)
    ep, per_shard = plan.ep, sizes["tp"] if plan.etp < plan.tp else 1
    if plan.etp < plan.tp and sizes["tp"] == 1:
        changes["etp"] = "tp"
        notes.append("parallel.etp: not verified; it needs tensor-parallel ranks")
    if ep > 1:
        ranks = shards * per_shard
        ep = changes["ep"] = next(n for n in (2, ranks) if ranks % n == 0)
        if changes["ep"] == 1:
            notes.append("parallel.ep: not verified; it needs data-parallel ranks")
        if plan.parallel.ep_chunks > 1:
            changes["ep_chunks"] = 2
    recipe_shards = count_ranks(plan.axis_sizes, SHARD_AXES)
    if isinstance(group_size, int) and 1 < group_size < recipe_shards:
        divisors = [
            n
            for n in range(2, shards)
            if shards % n == 0 and 0 in (n * per_shard % ep, ep % (n * per_shard))
        ]
        wanted = group_size * shards / recipe_shards
        nearest = min(divisors, key=lambda n: abs(n - wanted), default=None)
        changes["reshard_after_forward"] = nearest or "always"
        if nearest is None:
            rule = f"{shards} ranks have no subgroup to reshard over; using always"
            notes.append(f"parallel.reshard_after_forward={group_size}: {rule}")
    return changes


def _shrink_pipeline(plan: Plan, sizes: dict[str, int], notes: list[str]) -> dict[str, Any]:
    job = plan.job
    if plan.pipeline is None or sizes["pp"] == 1:
        return {"layers_per_stage": (), "stages_per_rank": "auto"}
    stages_per_rank, layers = job.pipeline.stages_per_rank, job.pipeline.layers_per_stage
    changes: dict[str, Any] = {}
    if isinstance(stages_per_rank, int) and stages_per_rank > 2:
        changes["stages_per_rank"] = 2
    if layers:
        if _num_stages(plan, sizes) == len(layers):
            least = min((n for n in layers if n), default=0)
            layers = tuple(min(n, 1 + (n > least)) for n in layers)
        else:
            rule = f"given for {len(layers)} stages, but verified with {_num_stages(plan, sizes)}"
            notes.append(f"pipeline.layers_per_stage: {rule}")
            layers = ()
        changes["layers_per_stage"] = layers
    return changes


def _num_stages(plan: Plan, sizes: dict[str, int]) -> int:
    """Return the number of stages of the small job, at most two per rank."""
    if plan.pipeline is None or sizes["pp"] == 1:
        return 1
    stages = len(plan.pipeline.stages)
    if plan.pipeline.has_schedule_file:
        return stages
    return sizes["pp"] * min(2, stages // plan.pp)


def _make_machine(job: Job, sizes: dict[str, int], notes: list[str]) -> Machine:
    """Describe this machine, as two nodes if ``hierarchical_gather`` needs them."""
    world = local = math.prod(sizes.values())
    if job.parallel.hierarchical_gather:
        shards = count_ranks(sizes, SHARD_AXES)
        if shards >= 4 and shards % 2 == 0:
            local = shards // 2 * sizes["tp"]
        else:
            notes.append(
                f"parallel.hierarchical_gather: not verified; {shards} shards fit on one node"
            )
    return Machine("cpu", devices=world, world_size=world, local_world_size=local)


# --------------------------------------------------------------------------- sizes


def _candidates(
    plan: Plan, small_job: Job, float8: str, sizes: dict[str, int], steps: int
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield batches and model sizes, best first; the last model is the recipe's own."""
    parallel = small_job.parallel
    unit = sizes["cp"]
    unit *= sizes["tp"] if parallel.sequence_parallel or parallel.has_experts_without_tp else 1
    if float8 != "none":
        unit = math.lcm(unit, required_multiple(float8) * sizes["cp"])
    seq_len = max(unit, min(SEQ_LEN, plan.seq_len) // unit * unit)
    models = list(_model_sizes(plan, small_job, float8, sizes, seq_len))
    batch_size = min(2, plan.microbatch_size)
    short = plan.local_batch_size % plan.microbatch_size > 0
    for count in _microbatch_counts(plan, sizes):
        local = batch_size * count - short
        batch = {
            "steps": steps,
            "epochs": 0.0,
            "seq_len": seq_len,
            "global_batch_size": local * count_ranks(sizes, BATCH_AXES),
            "microbatch_size": batch_size,
            "eval_sequences": local * count_ranks(sizes, BATCH_AXES) + 1,
        }
        for fields in models:
            yield batch, fields


def _microbatch_counts(plan: Plan, sizes: dict[str, int]) -> list[int]:
    """Return the numbers of microbatches to try: several, if the recipe has several."""
    count = plan.num_microbatches
    if plan.pipeline is None or sizes["pp"] == 1:
        return [min(count, 3)]  # a first, a middle and a last one
    if plan.pipeline.has_schedule_file:
        return [count]
    enough = max(2 * sizes["pp"], _num_stages(plan, sizes))
    return list(dict.fromkeys([min(enough, count), enough, *range(1, 4 * enough)]))


def _model_sizes(
    plan: Plan, small_job: Job, float8: str, sizes: dict[str, int], seq_len: int
) -> Iterator[dict[str, Any]]:
    """Yield sizes of the model, best first, of the fields that its family has."""
    config, tp = plan.model, sizes["tp"]
    known = type(config).model_fields

    def size(name: str) -> int:
        return int(getattr(config, name, 0))

    def remainder(name: str) -> int:
        """Return 1 if the ranks do not divide a size; they will not divide the small one."""
        return int(size(name) % plan.tp > 0 and tp > 1)

    layers = sum(small_job.pipeline.layers_per_stage)
    if not layers:
        stages = _num_stages(plan, sizes)
        layers = min(size("num_layers"), stages + 1 if stages > 1 else 3)
    for kv_heads, group in _head_counts(size("num_heads"), size("num_kv_heads"), plan.tp, tp):
        heads = kv_heads * group
        head_dim = 8 if heads >= 4 else 16
        unit = 4  # of the feed-forward width on each rank
        if float8 != "none":
            head_dim = unit = required_multiple(float8)
        dim = heads * head_dim
        ratio = size("ffn_dim") / max(1, size("dim"))
        fields = {
            "num_layers": layers,
            "dim": dim,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "ffn_dim": max(1, round(ratio * dim / (unit * tp))) * unit * tp + remainder("ffn_dim"),
            "num_experts": NUM_EXPERTS if size("num_experts") else 0,
            "active_experts": min(2, size("active_experts")),
            "expert_dim": 2 * unit * tp + remainder("expert_dim"),
            "dense_layers": min(1, size("dense_layers")),
            "expert_interval": min(2, size("expert_interval")),
            "vocab_size": -(-VOCAB_SIZE // tp) * tp + remainder("vocab_size"),
            "max_seq_len": seq_len,
        }
        if isinstance(config, DecoderConfig):
            fields |= _decoder_sizes(config, fields, unit)
        yield {name: value for name, value in fields.items() if name in known}
    yield {}


def _decoder_sizes(config: DecoderConfig, fields: Mapping[str, Any], unit: int) -> dict[str, Any]:
    """Return sizes that must fit those of ``fields``, of the parts that the model has."""
    sizes: dict[str, Any] = {}
    seq_len = fields["max_seq_len"]
    for name in ("sliding_window", "attention_chunk", "temperature_interval"):
        if value := getattr(config, name):
            sizes[name] = min(value, max(1, seq_len // 3))
    for name in ("layer_pattern", "rope_pattern"):  # each kind of layer occurs
        sizes[name] = "".join(dict.fromkeys(getattr(config, name)))
    if config.rope_scaling != "none":  # so that it has an effect
        sizes["rope_original_context"] = max(1, seq_len // 2)
    if config.expert_groups > 1:
        sizes |= {"expert_groups": 2, "active_groups": min(2, config.active_groups)}
    head_dim = fields["head_dim"]
    rope_dim = int(head_dim * config.rope_fraction)
    if config.kv_rank:
        rope_dim = max(2, head_dim // 4 * 2)
        sizes |= {"num_kv_heads": fields["num_heads"], "rope_head_dim": rope_dim}
        sizes |= {"value_head_dim": head_dim, "head_dim": head_dim + rope_dim}
        if unit > 4:  # float8
            sizes |= {"head_dim": 2 * head_dim, "rope_head_dim": head_dim}
        sizes |= {"kv_rank": 2 * unit, "q_rank": 3 * unit if config.q_rank else 0}
    if config.rope_scaling == "longrope":
        for name in ("rope_short_factors", "rope_long_factors"):
            sizes[name] = getattr(config, name)[: rope_dim // 2]
    return sizes


def _shrink_token_ids(job: Job, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return as many tokens with trained rows as the smaller vocabulary has."""
    ids, size = job.lora.token_ids, fields.get("vocab_size")
    return {"trainable_tokens": sorted({id % size for id in ids})} if ids and size else {}


def _param_persistence_threshold(plan: Plan, fields: dict[str, Any]) -> int:
    """Return a threshold between norm weights and matrices if the recipe's is, else 1."""
    job = plan.job
    limit = job.parallel.param_persistence_threshold
    if not limit or "dim" not in fields:
        return limit
    return int(fields["dim"]) + 1 if limit > plan.model.dim else 1


def _head_counts(
    num_heads: int, num_kv_heads: int, recipe_tp: int, tp: int
) -> Iterator[tuple[int, int]]:
    """Yield numbers of key/value heads and of query heads that share one, best first."""
    group = num_heads // max(1, num_kv_heads)
    # Grouped heads stay grouped, with the same group size if that is small.
    small = next(n for n in (min(group, 3), 2, 3, 5, group) if n and group % n == 0)
    if recipe_tp > num_kv_heads:  # ranks share a head
        wanted = max(1, tp * num_kv_heads // recipe_tp)
    else:
        wanted = tp * (2 if num_kv_heads >= 2 * recipe_tp else 1)
    is_uneven = num_heads % recipe_tp > 0 and tp > 1
    more = [tp + 1] * is_uneven
    kv_heads = dict.fromkeys([wanted, *more, *(n * tp for n in (1, 2, 4, 8)), 1, 2, 4, 8, 16])
    counts = itertools.product(kv_heads, dict.fromkeys([small, 2, 4, 8, 1]))
    yield from sorted(counts, key=lambda count: (math.prod(count) % tp > 0) != is_uneven)


# --------------------------------------------------------------------------- changes


def _list_changes(plan: Plan, small_plan: Plan) -> dict[str, tuple[Any, Any]]:
    """Return every key that changed; for the model, every field of its configuration."""
    changed = {
        f"model.{name}": (value, getattr(small_plan.model, name))
        for name, value in plan.model
        if value != getattr(small_plan.model, name)
    }
    for name, (after, before) in difference(small_plan.job, plan.job).items():
        section, _, key = name.partition(".")
        if section not in ("run", "data", "model") and key not in AXES:
            changed[name] = (before, after)
    return changed
