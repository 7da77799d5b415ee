"""From a recipe to the smallest one that is laid out in the same way.

What makes a layout right or wrong is not size.  A slice of a matrix is taken at the same place, a
gradient is summed over the same ranks and a microbatch passes the same stages whether a model has
four hundred billion parameters or forty thousand, on 512 ranks or on 8.  So everything that is
only size shrinks (width, layers, vocabulary, tokens, batch, degrees), and everything that is kind
stays: axes that have more than one rank, tied or separate embeddings, grouped heads and whether
ranks must share one, schedule, several stages a rank, several microbatches with the last one
short, documents, the context method, what is resharded when.

Which sizes go together is known to `weft.plan.resolve` and to the model's family, and nowhere
else: here candidates are proposed, best first, and those judge them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
from weft.plan.devices import parse_cluster
from weft.plan.float8_rules import required_multiple
from weft.plan.layout import ranks_per_shard
from weft.plan.pipeline_schedule import is_schedule_file
from weft.plan.placement import AXES
from weft.plan.plan_text import cluster_machine
from weft.plan.resolve import Machine, Plan, resolve

# Sizes of a configuration that can shrink, where a family has them.
SIZES = ("num_layers", "dim", "num_heads", "num_kv_heads", "ffn_dim", "vocab_size", "max_seq_len")

SEQ_LEN = 32
VOCAB_SIZE = 288  # above 257, the fewest entries of a tokenizer; divisible by many degrees

EXPERTS = 12  # which 2, 3, 4 and 6 ranks can share out

# A job with no more parameters and tokens in a step is at test size, and stays as it is.
TEST_PARAMS = 1_000_000
TEST_TOKENS = 4096

# Which axis is given up first where there are too few ranks for two on each.
GIVEN_UP = ("dp_replicate", "dp_shard", "tp", "cp", "pp")


@dataclass(frozen=True)
class Case:
    """A layout that can be run here, and one process that trains the same model."""

    recipe_sizes: dict[str, int]  # of the mesh's axes in the recipe
    job: Job
    plan: Plan
    one_job: Job
    one_plan: Plan
    shrunk: dict[str, tuple[Any, Any]]  # key: (in the recipe, here)
    notes: tuple[str, ...]  # what of the recipe's layout is not tried here, and why


def plan_of_recipe(job: Job) -> Plan:
    """The plan of a recipe on its own cluster, whatever this machine is.

    Raises:
        InvalidConfig: with every reason why there is none.
    """
    parallel, cluster = job.parallel, job.run.cluster
    if cluster != "local":
        parsed = parse_cluster(cluster)
        if isinstance(parsed, ConfigError):
            raise InvalidConfig([parsed])
        # For the rules only, here and below: what a GPU can do is no mistake.
        return resolve(job, dataclasses.replace(cluster_machine(parsed), peer_access=True))
    unit = ranks_per_shard(parallel)
    world: int | None = None
    if isinstance(job.run.nproc_per_node, int):
        world = job.run.nproc_per_node
    elif isinstance(parallel.dp_shard, int):
        world = unit * parallel.dp_shard
    machine = Machine(
        device="cpu" if job.run.device == "cpu" else "cuda",
        devices=world or 2 * unit,  # "all that remain" is more than one rank somewhere
        world_size=world,
        local_world_size=world,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        peer_access=True,
    )
    return resolve(job, machine)


def shrink(job: Job, plan: Plan, ranks: int, steps: int, keep: Collection[str] = ()) -> Case:
    """The smallest case of a job's layout.

    Args:
        job, plan: of the recipe; see `plan_of_recipe`.
        ranks: at most so many.
        steps: of the training.
        keep: keys that stay as they are, among ``compile.enable`` and those of ``precision``.

    Raises:
        InvalidConfig: if the layout does not go into so few ranks.
    """
    notes: list[str] = []
    sizes = _degrees(job, plan, ranks, notes)
    small = plan.num_params <= TEST_PARAMS and plan.tokens_per_step <= TEST_TOKENS
    whole = small and sizes == plan.sizes
    here = replace(
        job,
        # With a run's own number of ranks and no cluster, which is another's.
        run={"device": "cpu", "nproc_per_node": math.prod(sizes.values()), "cluster": "local"},
        # No tokenizer is made and no text read; the rules want one that fits.
        data={"tokenizer": "train", "vocab_size": 257},
        optim={"warmup_steps": min(job.optim.warmup_steps, 1)},
        parallel={**sizes, **_parallel(job, plan, sizes, whole, notes)},
        pipeline={} if whole else _pipeline(job, plan, sizes, notes),
        precision=PrecisionSection(compute_dtype="float32").model_dump()
        | {name: value for name, value in job.precision if f"precision.{name}" in keep},
        **({} if "compile.enable" in keep else {"compile": {"enable": False}}),
    )
    if job.precision.float8 != here.precision.float8:
        rule = f"off; to verify with it, say --precision.float8 {job.precision.float8}"
        notes.append(f"precision.float8: {rule}")
    if here.precision.float8 != "none":
        here = replace(here, precision={"float8_small": True})  # what is small here is not there
    if job.compile.enable and not here.compile.enable:
        notes.append("compile.enable: off; to compile here, say --compile.enable true")
    machine = _machine(here, sizes, notes)
    problems: list[ConfigError] = []
    candidates = _candidates(job, plan, here, sizes, steps)
    if whole:
        candidates = itertools.chain([({"steps": steps}, {})], candidates)
    for batch, fields in candidates:
        kept_whole = {"persist_below": _persist_below(job, plan, fields)}
        trial = replace(here, train=batch, model=fields, parallel=kept_whole)
        try:
            found = resolve(trial, machine)
        except InvalidConfig as error:
            problems = error.problems  # the last candidate has the model of the recipe
            continue
        if unknown := [name for name in SIZES if name not in type(plan.model).model_fields]:
            notes.append(f"the model has no {', '.join(unknown)} to shrink: other sizes stay")
        elif not fields and not whole:
            notes.append("the model is taken as it is: no smaller one fits its family's rules")
        one = replace(
            trial,
            run={"nproc_per_node": 1},
            parallel=ParallelSection(dp_shard=1).model_dump(),
            pipeline={"layers_per_stage": (), "stages_per_rank": "auto"},
            train={"microbatch_size": "auto", "world_size_invariant": False},
            activation_checkpoint=ActivationCheckpointSection().model_dump(),
            compile={"enable": False},
        )
        one_plan = resolve(one, Machine("cpu", devices=1, world_size=1))
        shrunk = _shrunk(job, plan, trial, found)
        return Case(plan.sizes, trial, found, one, one_plan, shrunk, tuple(notes))
    raise InvalidConfig(problems)


# Keys of how a job is computed, which may change when it resumes.
LAYOUT = (
    "parallel.",
    "pipeline.",
    "activation_checkpoint.",
    "compile.enable",
    "train.microbatch_size",
)


def resume_layout(case: Case, layout: Sequence[tuple[str, str]], ranks: int) -> tuple[Job, Plan]:
    """Find another layout of a case: that of one process with some keys changed.

    Args:
        layout: keys of `LAYOUT` with their values as text.
        ranks: at most so many.

    Raises:
        InvalidConfig: if there is no such layout of this case.
    """
    option = "--resume-layout"
    chosen, _, problems = read_job("demo", layout)
    for name, text in layout:
        if not name.startswith(LAYOUT):
            rule = "changes more than the layout"
            problems.append(ConfigError(option, f"{name}={text}", rule, f"use {', '.join(LAYOUT)}"))
    if problems:
        raise InvalidConfig(problems)
    changes: dict[str, dict[str, Any]] = {}
    for section, key in (name.split(".") for name, _ in layout):
        changes.setdefault(section, {})[key] = getattr(getattr(chosen, section), key)
    job = replace(case.one_job, **changes)
    if job.parallel.dp_shard in ("auto", "fit"):
        job = replace(job, parallel={"dp_shard": 1})
    assert isinstance(job.parallel.dp_shard, int)
    world = ranks_per_shard(job.parallel) * job.parallel.dp_shard
    if world > ranks:
        raise InvalidConfig([ConfigError(option, world, f"takes more than {ranks} ranks")])
    job = replace(job, run={"nproc_per_node": world})
    notes: list[str] = []
    return job, resolve(job, _machine(job, degrees_of(job.parallel), notes))


# --------------------------------------------------------------------------- layout


def degrees_of(parallel: ParallelSection) -> dict[str, int]:
    """Return the ranks along each axis of the mesh, where all are numbers."""
    return {axis: int(getattr(parallel, axis)) for axis in AXES}


def _degrees(job: Job, plan: Plan, ranks: int, notes: list[str]) -> dict[str, int]:
    """The mesh, halved along its longest axis until it has few enough ranks."""
    sizes = dict(plan.sizes)
    # A schedule from a file has a line for each rank of the pipeline.
    pinned = {"pp"} if is_schedule_file(job.pipeline.schedule) else set()
    while (world := math.prod(sizes.values())) > ranks:
        free = [axis for axis in AXES if axis not in pinned]
        longest = max(free, key=lambda axis: sizes[axis])
        if sizes[longest] > 2:
            sizes[longest] = max(2, sizes[longest] // 2)
            continue
        # Context-parallel ranks share parameters as those of dp_shard do, which is missed less.
        order = ["dp_shard", *GIVEN_UP] if sizes["cp"] > 1 else GIVEN_UP
        given_up = next((axis for axis in order if sizes[axis] > 1 and axis in free), None)
        if given_up is None:
            rule = f"is fewer than the {world} of the pipeline, which its schedule's file fixes"
            raise InvalidConfig([ConfigError("--ranks", ranks, rule, f"use {world} or more")])
        sizes[given_up] = 1
        notes.append(f"parallel.{given_up}: not tried; it needs --ranks {world}")
    return sizes


def _parallel(
    job: Job, plan: Plan, sizes: dict[str, int], whole: bool, notes: list[str]
) -> dict[str, Any]:
    """Keys beside the degrees that depend on them (not if they are ``whole``), or on hardware."""
    changes: dict[str, Any] = {}
    if job.parallel.async_tp:
        changes["async_tp"] = False
        notes.append("parallel.async_tp: off; it needs GPUs that reach each other's memory")
    if whole:
        return changes
    to, shards = plan.reshard_after_forward, sizes["dp_shard"] * sizes["cp"]
    if plan.ep > 1:
        changes["ep"] = next(n for n in (2, shards) if shards % n == 0)
        if changes["ep"] == 1:
            notes.append("parallel.ep: not tried; it needs data-parallel ranks")
    if not isinstance(to, bool):
        between = [n for n in range(2, shards) if shards % n == 0]
        wanted = to * shards / (plan.dp_shard * plan.cp)
        nearest = min(between, key=lambda n: abs(n - wanted), default=None)
        changes["reshard_after_forward"] = nearest or "always"
        if nearest is None:
            rule = f"{shards} ranks have no part to reshard over; always instead"
            notes.append(f"parallel.reshard_after_forward = {to}: {rule}")
    return changes


def _pipeline(job: Job, plan: Plan, sizes: dict[str, int], notes: list[str]) -> dict[str, Any]:
    if plan.pipeline is None or sizes["pp"] == 1:
        return {"layers": (), "stages_per_rank": "auto"}
    asked, layers = job.pipeline.stages_per_rank, job.pipeline.layers_per_stage
    changes: dict[str, Any] = {}
    if isinstance(asked, int) and asked > 2:
        changes["stages_per_rank"] = asked = 2
    if layers:
        if _num_stages(plan, sizes) == len(layers):
            least = min((n for n in layers if n), default=0)
            layers = tuple(min(n, 1 + (n > least)) for n in layers)
        else:
            rule = f"for {len(layers)} stages, here are {_num_stages(plan, sizes)}: cut by cost"
            notes.append(f"pipeline.layers_per_stage: {rule}")
            layers = ()
        changes["layers"] = layers
    return changes


def _num_stages(plan: Plan, sizes: dict[str, int]) -> int:
    """Stages here: with two a rank in place of more."""
    if plan.pipeline is None or sizes["pp"] == 1:
        return 1
    stages = len(plan.pipeline.stages)
    if is_schedule_file(plan.pipeline.schedule):
        return stages
    return sizes["pp"] * min(2, stages // plan.pp)


def _machine(job: Job, sizes: dict[str, int], notes: list[str]) -> Machine:
    """This machine, as if its ranks were spread over two nodes where that makes a difference."""
    world = local = math.prod(sizes.values())
    if job.parallel.hierarchical_gather:
        shards = sizes["dp_shard"] * sizes["cp"]
        if shards >= 4 and shards % 2 == 0:
            local = shards // 2 * sizes["tp"]
        else:
            notes.append(f"parallel.hierarchical_gather: not tried; {shards} shards make one node")
    return Machine("cpu", devices=world, world_size=world, local_world_size=local)


# --------------------------------------------------------------------------- sizes


def _candidates(
    job: Job, plan: Plan, here: Job, sizes: dict[str, int], steps: int
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Batches and model sizes, best first; the last model is the recipe's own."""
    parallel = here.parallel
    unit = sizes["cp"] * (2 if sizes["cp"] > 1 and parallel.cp_load_balance else 1)
    unit *= sizes["tp"] if parallel.sequence_parallel else 1
    if here.precision.float8 != "none":
        unit = math.lcm(unit, required_multiple(here.precision.float8) * sizes["cp"])
    seq_len = max(unit, min(SEQ_LEN, job.train.seq_len) // unit * unit)
    models = list(_models(plan, here, sizes, seq_len))
    rows = min(2, plan.microbatch)
    short = plan.local_batch % plan.microbatch > 0
    for count in _microbatches(plan, sizes):
        local = rows * count - short
        batch = {
            "steps": steps,
            "seq_len": seq_len,
            "global_batch_size": local * sizes["dp_replicate"] * sizes["dp_shard"],
            "microbatch_size": rows,
            "eval_sequences": local * sizes["dp_replicate"] * sizes["dp_shard"] + 1,
        }
        for fields in models:
            yield batch, fields


def _microbatches(plan: Plan, sizes: dict[str, int]) -> list[int]:
    """Numbers of microbatches to try: several, if the recipe has several."""
    most = plan.accumulation
    if plan.pipeline is None or sizes["pp"] == 1:
        return [min(most, 3)]  # the first, one in the middle, the last
    if is_schedule_file(plan.pipeline.schedule):
        return [most]
    enough = max(2 * sizes["pp"], _num_stages(plan, sizes))
    return list(dict.fromkeys([min(enough, most), enough, *range(1, 4 * enough)]))


def _models(plan: Plan, here: Job, sizes: dict[str, int], seq_len: int) -> Iterator[dict[str, Any]]:
    """Fields of the model to change, as far as its family has them."""
    config, tp = plan.model, sizes["tp"]
    known = type(config).model_fields

    def size(name: str) -> int:
        return int(getattr(config, name, 0))

    layers = sum(here.pipeline.layers_per_stage)
    if not layers:
        stages = _num_stages(plan, sizes)
        layers = min(size("num_layers"), stages + 1 if stages > 1 else 3)
    for kv_heads, group in _heads(size("num_heads"), size("num_kv_heads"), plan.tp, tp):
        heads = kv_heads * group
        head_dim = 8 if heads >= 4 else 16
        unit = 4  # of the feed-forward width on each rank
        if (float8 := here.precision.float8) != "none":
            head_dim = unit = required_multiple(float8)
        dim = heads * head_dim
        ratio = size("ffn_dim") / max(1, size("dim"))
        fields = {
            "num_layers": layers,
            "dim": dim,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "ffn_dim": max(1, round(ratio * dim / (unit * tp))) * unit * tp,
            "num_experts": EXPERTS,
            "active_experts": min(2, size("active_experts")),
            "expert_dim": 2 * unit * tp,
            "dense_layers": min(1, size("dense_layers")),
            "vocab_size": -(-VOCAB_SIZE // tp) * tp,
            "max_seq_len": seq_len,
        }
        yield {name: value for name, value in fields.items() if name in known}
    yield {}


def _persist_below(job: Job, plan: Plan, fields: dict[str, Any]) -> int:
    """A limit between the gains and the matrices here if the recipe's is, else below both."""
    limit = job.parallel.param_persistence_threshold
    if not limit or "dim" not in fields:
        return limit
    return int(fields["dim"]) + 1 if limit > plan.model.dim else 1


def _heads(num_heads: int, num_kv_heads: int, recipe_tp: int, tp: int) -> Iterator[tuple[int, int]]:
    """Numbers of key/value heads with the query heads that share one, best first."""
    group = num_heads // max(1, num_kv_heads)
    # A group stays a group, of the same number where that is small.
    small = next(n for n in (min(group, 3), 2, 3, 5, group) if n and group % n == 0)
    if recipe_tp > num_kv_heads:  # ranks share a head
        wanted = max(1, tp * num_kv_heads // recipe_tp)
    else:
        wanted = tp * (2 if num_kv_heads >= 2 * recipe_tp else 1)
    kv_heads = dict.fromkeys([wanted, *(n * tp for n in (1, 2, 4, 8)), 1, 2, 4, 8, 16])
    yield from itertools.product(kv_heads, dict.fromkeys([small, 2, 4, 8, 1]))


# --------------------------------------------------------------------------- what was done


def _shrunk(job: Job, plan: Plan, here: Job, plan_here: Plan) -> dict[str, tuple[Any, Any]]:
    """Every key with another value here: of the model those of its whole configuration."""
    changed = {
        f"model.{name}": (value, getattr(plan_here.model, name))
        for name, value in plan.model
        if value != getattr(plan_here.model, name)
    }
    for name, (ours, theirs) in difference(here, job).items():
        section, _, key = name.partition(".")
        if section not in ("run", "data", "model") and key not in AXES:
            changed[name] = (theirs, ours)
    return changed
