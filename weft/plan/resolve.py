"""Plan: everything that follows from a Job on a given machine, by one pure function.

The trainer consumes the Plan, ``--dry-run`` prints it and the tests assert on it;
nobody computes a degree or a batch size a second time.  ``resolve`` asks no device,
starts nothing, and reads nothing but a schedule that is a file, the tables of devices
and a family of the user's: the same arguments give the same Plan, or the same complete
list of reasons why there is none.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from weft.config.errors import ConfigError, InvalidConfig
from weft.config.reader import recipe_names
from weft.config.schema import Job, difference
from weft.models import Family, load_family, resolve_model
from weft.plan.devices import CPU_DEVICE, Device, match_device, get_device, peak_flops
from weft.plan.float8_rules import check_float8, find_float8_matrices, float8_warnings, supports_float8
from weft.plan.layout import DEGREE_KEYS, ParallelDims, check_layout, ranks_per_shard, resolve_degrees
from weft.plan.lora_plan import check_lora, check_lora_stages, training_cost
from weft.plan.memory_formula import check_state_dtype, state_bytes_per_param
from weft.plan.pipeline_plan import (
    PipelinePlan,
    activation_checkpoint_warnings,
    count_microbatches,
    resolve_pipeline,
)
from weft.plan.pipeline_schedule import PipelineSchedule, is_schedule_file, single_stage_schedule, read_schedule_csv, build_schedule
from weft.plan.placement import AXES, MESH_ORDERS, rank_groups, placement_warnings, ranks_per_node
from weft.plan.rules import (
    check_batch,
    check_world_size_invariant,
    check_data,
    check_device,
    check_full_microbatches,
    check_sections,
)
from weft.plan.sharding import resolve_gradient_sync, resolve_reshard, fit_dp_shard, local_trainable_params
from weft.plan.unused_keys import KeyContext, unused_key_warnings, warmup_warnings

DeviceType = Literal["cpu", "cuda"]

# On CPU the ranks of one machine share its cores; more than this many only add traffic.
MAX_AUTO_CPU_RANKS = 4
# More are refused: each takes a quarter of a GiB before it has done anything.
MAX_CPU_RANKS = 64

# Changing one of these does not make another model: the run goes on in the same folder.
SAME_MODEL_KEYS = (
    "run.",
    "parallel.",
    "pipeline.",
    "compile.",
    "checkpoint.",
    "monitor.",
    "profile.",
    "debug.",
    "launch.",
    "train.steps",
    "train.microbatch_size",
    "train.eval",
)


@dataclass(frozen=True)
class Machine:
    """What there is to run on.

    ``devices`` counts this host's GPUs, or its cores on CPU.  The sizes are those of the job and
    of this host's part of it where a launcher has decided them, and None where weft decides.
    ``memory_bytes`` is that of one GPU, or of this host on CPU; None where unknown.
    """

    device: DeviceType
    devices: int
    device_name: str = ""
    world_size: int | None = None
    local_world_size: int | None = None
    memory_bytes: int | None = None
    peer_access: bool = False  # GPUs of a host reach each other's memory
    capability: tuple[int, int] = (0, 0)  # of a GPU, as NVIDIA counts; (0, 0) where unknown

    @property
    def spec(self) -> Device | None:
        """What is known of its devices; of a CPU, even if nothing was measured here."""
        if self.device == "cpu":
            return get_device(CPU_DEVICE)
        return match_device(self.device_name, self.memory_bytes)

    def memory_of_rank(self, local_world: int) -> int | None:
        """Bytes that each of ``local_world`` ranks may have; on CPU they share their host's."""
        if self.memory_bytes is None:
            return None
        return self.memory_bytes // (local_world if self.device == "cpu" else 1)


@dataclass(frozen=True)
class Plan:
    """What a run will do.  Counts of sequences are per optimizer step."""

    run_dir: str
    device: DeviceType
    world_size: int
    local_world_size: int  # ranks of one host
    node_counts: tuple[int, ...]  # numbers of nodes that the run can use; this plan is of the last
    rendezvous: str  # HOST:PORT where several nodes meet
    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int  # of the ranks of dp_shard and cp
    placement: str  # a name of `PLACEMENTS`
    threads: int  # per rank, for CPU operators
    local_batch: int  # sequences of one rank
    microbatch: int  # sequences of one forward pass; the last may have fewer
    canonical: bool  # parameters whole on each rank, one row at a time
    accumulation: int  # forward passes of one rank
    pipeline: PipelinePlan | None  # None where pp is 1
    reshard_after_forward: bool | int  # as FSDP2 takes it
    gradient_sync: Literal["microbatch", "step"]
    tokens_per_step: int
    compute_dtype: Literal["float32", "bfloat16"]
    reduce_dtype: Literal["float32", "bfloat16"]
    model: Any  # the family's frozen configuration
    num_params: int
    num_active_params: int  # that a token has to do with: of a mixture of experts not all
    trained_params: int  # of them and of adapters; frozen ones have neither gradient nor state
    flops_per_token: float  # forward and backward, without recomputation
    causal_flops_per_token: float  # of attention only what a causal mask leaves
    # Of one device, None where unknown; with float8 bfloat16's, too: see `weft.plan.devices`.
    peak_flops: float | None
    peak_dtype: str | None
    float8: str  # what shares a scale, or none
    float8_matrices: int  # of the whole model, that are multiplied so
    float8_gather: bool  # FSDP gathers them in float8
    float8_emulated: bool  # their rounding without their speed
    warnings: tuple[str, ...]

    @property
    def dp_size(self) -> int:
        """Ranks that read different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks along each axis of the mesh; `order` says which is outermost."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def order(self) -> tuple[str, ...]:
        """The axes of the mesh from the one that varies slowest over the ranks."""
        return MESH_ORDERS[self.placement]

    @property
    def pipeline_schedule(self) -> PipelineSchedule:
        """What each rank of the pipeline does, in order; without one all in one stage.

        Raises:
            InvalidConfig: if it comes from a file that is no longer what it was.
        """
        if self.pipeline is None:
            return single_stage_schedule(self.accumulation)
        if is_schedule_file(self.pipeline.schedule):
            table = read_schedule_csv(Path(self.pipeline.schedule), self.pp)
            if isinstance(table, ConfigError):
                raise InvalidConfig([table])
            return table
        per_rank = len(self.pipeline.stages) // self.pp
        return build_schedule(self.pipeline.schedule, self.pp, per_rank, self.accumulation)

    @property
    def shard_ranks_per_node(self) -> int | None:
        """Of each group that shards parameters, the ranks on one host; None if they differ."""
        spread = rank_groups(("dp_shard", "cp"), self.sizes, self.order)[0]
        counts = set(ranks_per_node(spread, self.local_world_size).values())
        return counts.pop() if len(counts) == 1 else None

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"model": self.model.model_dump()}, indent=2)


def resolve(job: Job, machine: Machine, recipe: str = "run", base: Job | None = None) -> Plan:
    """Derive the Plan.

    Args:
        job: what the user chose.
        machine: what there is to run on.
        recipe: the recipe's name, and ``base`` the recipe without overrides: they name the
            run's folder when ``run.dir`` is ``auto``.

    Raises:
        InvalidConfig: with every reason why the job cannot run there.
    """
    problems: list[ConfigError] = []
    train, parallel = job.train, job.parallel
    model, found = resolve_model(job.model.kind, job.model.preset, job.model.overrides())
    problems += found
    if model is not None:
        problems += check_data(job, model)
    compute = job.precision.compute_dtype
    if compute == "auto":
        compute = "bfloat16" if machine.device == "cuda" else "float32"
    compute_bytes = 2 if compute == "bfloat16" else 4

    world = machine.world_size or _resolve_nproc(job, machine, problems)
    local_world = machine.local_world_size or world
    degrees, found = resolve_degrees(parallel, world)
    problems += found
    if model is None:
        # The rest judges by sizes that there are not.
        problems += [] if found else check_batch(job, degrees)
        raise InvalidConfig(problems)
    family = load_family(job.model.kind)
    lora = training_cost(job.lora, model, family, train.seq_len)
    if found:
        # Batch and stages depend on how many ranks are left for them; heads and sequence do not.
        raise InvalidConfig([*problems, *check_layout(job, model, family, degrees)])

    if parallel.dp_shard == "fit" and not problems:
        available = machine.memory_of_rank(local_world)
        degrees, found = fit_dp_shard(job, model, family, degrees, compute_bytes, available)
        problems += found
    problems += check_layout(job, model, family, degrees)
    problems += check_device(job, machine.device, machine.peer_access, degrees, local_world)
    problems += check_world_size_invariant(job, degrees, compute)
    float8 = job.precision.float8
    emulated = float8 != "none" and not supports_float8(float8, machine.capability)
    problems += check_float8(job, model, family, degrees, compute, emulated)
    problems += check_lora(job, model, family, degrees)
    problems += check_state_dtype(job, model, family, degrees)
    problems += check_sections(job, family, degrees)
    way, found = _resolve_batch(job, model, family, degrees, lora.params, compute_bytes)
    problems += found
    if problems:
        raise InvalidConfig(problems)

    peak = peak_flops(machine.device_name) if compute == "bfloat16" else None
    adapters = lora.params if job.lora.rank else 0
    plan = Plan(
        run_dir=_run_dir(job, recipe, base or job),
        device=machine.device,
        world_size=world,
        local_world_size=local_world,
        node_counts=(max(1, world // local_world),),
        rendezvous=job.run.rendezvous,
        pp=degrees.pp,
        dp_replicate=degrees.dp_replicate,
        dp_shard=degrees.dp_shard,
        cp=degrees.cp,
        tp=degrees.tp,
        ep=degrees.ep,
        placement=parallel.mesh_order,
        # How many threads share a matrix product can change its last bit.
        threads=1 if train.world_size_invariant else max(1, machine.devices // local_world),
        local_batch=way.local_batch,
        microbatch=way.microbatch,
        canonical=train.world_size_invariant,
        accumulation=count_microbatches(way.local_batch, way.microbatch),
        pipeline=way.pipeline,
        reshard_after_forward=way.reshard,
        gradient_sync=way.gradient_sync,
        tokens_per_step=train.global_batch_size * train.seq_len,
        compute_dtype=compute,
        reduce_dtype=job.precision.reduce_dtype,
        model=model,
        num_params=family.num_params(model) + adapters,
        num_active_params=(family.num_active_params or family.num_params)(model) + adapters,
        trained_params=lora.params,
        flops_per_token=lora.flops_per_token,
        # On the mean a token sees half of its row.
        causal_flops_per_token=lora.causal_flops_per_token,
        peak_flops=peak,
        peak_dtype=None if peak is None else "bfloat16",
        float8=float8,
        float8_matrices=len(find_float8_matrices(job.precision, model, family, degrees.tp)),
        # A scale for each row or block needs the whole weight; the other two ways of FSDP to keep
        # shards take plain ones.
        float8_gather=float8 == "tensorwise"
        and isinstance(way.reshard, bool)
        and not parallel.cpu_offload,
        float8_emulated=emulated,
        warnings=(
            *placement_warnings(degrees.sizes, local_world, MESH_ORDERS[parallel.mesh_order]),
            *float8_warnings(job, machine.device, degrees.pp, emulated),
            *activation_checkpoint_warnings(job, model, family, way.pipeline),
            *warmup_warnings(job),
        ),
    )
    setting = KeyContext(
        job=job,
        degrees=degrees,
        nodes=max(1, world // local_world),
        local_world=local_world,
        node_shards=plan.shard_ranks_per_node,
        accumulation=plan.accumulation,
        reshard=plan.reshard_after_forward,
        compute=compute,
    )
    return replace(plan, warnings=(*plan.warnings, *unused_key_warnings(setting)))


def resolve_nodes(job: Job, machine: Machine, recipe: str = "run", base: Job | None = None) -> Plan:
    """The Plan on the largest number of nodes of ``run.nodes`` that the job can use.

    Its ``node_counts`` are all that it can use; its warnings tell of the others.

    Raises:
        InvalidConfig: as `resolve`, if the job can use none of them.
    """
    problems: list[ConfigError] = []
    nodes = node_range(job)
    if not nodes:
        rule = "is neither a number of nodes nor MIN:MAX"
        problems.append(ConfigError("run.nodes", job.run.nodes, rule, "use 4, or 1:4"))
        nodes = range(1, 2)
    elif machine.world_size is not None or nodes == range(1, 2):
        return resolve(job, machine, recipe, base)
    elif job.run.rendezvous == "auto":
        rule, remedy = "several nodes must know where to meet", "use the HOST:PORT of one of them"
        problems.append(ConfigError("run.rendezvous", "auto", rule, remedy))
    local = _resolve_nproc(job, machine, problems)
    plans: dict[int, Plan] = {}
    refused: dict[int, InvalidConfig] = {}
    for count in nodes:
        here = replace(machine, world_size=count * local, local_world_size=local)
        try:
            plans[count] = resolve(job, here, recipe, base)
        except InvalidConfig as error:
            refused[count] = error
    if not plans:
        problems += refused[nodes[-1]].problems
    if problems:
        raise InvalidConfig(problems)
    counts = tuple(plans)
    warnings = tuple(
        f"of {count} nodes only {max((n for n in counts if n < count), default=0)} can be used: "
        f"{error.problems[0].key} = {error.problems[0].value}: {error.problems[0].rule}"
        for count, error in refused.items()
    )
    plan = plans[counts[-1]]
    return replace(plan, node_counts=counts, warnings=plan.warnings + warnings)


def node_range(job: Job) -> range:
    """``run.nodes``, from the fewest to the most; empty if it cannot be read."""
    least, colon, most = str(job.run.nodes).replace("auto", "1").partition(":")
    numbers = [
        text for text in (least, most if colon else least) if re.fullmatch("[1-9]\\d{,4}", text)
    ]
    return range(int(numbers[0]), int(numbers[1]) + 1) if len(numbers) == 2 else range(0)


class _BatchPlan(NamedTuple):
    """How a rank goes through its part of a step; see `Plan`."""

    local_batch: int
    microbatch: int
    pipeline: PipelinePlan | None
    reshard: bool | int
    gradient_sync: Literal["microbatch", "step"]


def _resolve_batch(
    job: Job, model: Any, family: Family, degrees: ParallelDims, trained: int, compute_bytes: int
) -> tuple[_BatchPlan, list[ConfigError]]:
    """
    Args:
        trained: parameters that are.
        compute_bytes: of a weight, and of an activation, in forward and backward.
    """
    train, reshard = job.train, resolve_reshard(job, degrees)
    params = local_trainable_params(family, model, degrees, trained)
    gradient_sync = resolve_gradient_sync(job, reshard, params, degrees)
    local = max(1, train.global_batch_size // degrees.dp)
    microbatch = local if train.microbatch_size == "auto" else min(local, train.microbatch_size)
    if train.world_size_invariant:
        microbatch = 1
    pipeline, problems = None, check_batch(job, degrees)
    if degrees.pp > 1 and not problems:
        per_param = state_bytes_per_param(
            job,
            model,
            family,
            degrees.shards,
            kept_gathered=reshard is False,
            kept_gradients=gradient_sync == "step",
            compute_bytes=compute_bytes,
        )
        pipeline, microbatch, problems = resolve_pipeline(
            job, model, family, degrees, local, per_param, compute_bytes
        )
        problems += check_full_microbatches(job, family, local, microbatch)
        problems += check_lora_stages(job, pipeline)
    return _BatchPlan(local, microbatch, pipeline, reshard, gradient_sync), problems


def _resolve_nproc(job: Job, machine: Machine, problems: list[ConfigError]) -> int:
    """How many local processes weft starts."""
    chosen = job.run.nproc_per_node
    workers = _auto_nproc(job, machine) if chosen == "auto" else chosen
    cuda = machine.device == "cuda"
    most = machine.devices if cuda else MAX_CPU_RANKS
    if workers > most:
        rule = f"exceeds the {most} " + ("GPUs of this machine" if cuda else "that a CPU is given")
        on_cpu = "--run.device cpu, or " if cuda else ""
        remedy = f"use at most {most}, or {on_cpu}a launcher such as torchrun on several machines"
        depends = ("run.device", *DEGREE_KEYS)
        problems.append(ConfigError("run.nproc_per_node", workers, rule, remedy, depends))
    return workers


def _auto_nproc(job: Job, machine: Machine) -> int:
    """As many as there are devices for, and as divide the batch."""
    shard, unit = job.parallel.dp_shard, ranks_per_shard(job.parallel)
    if isinstance(shard, int):
        return unit * shard
    limit = machine.devices
    if machine.device == "cpu":
        limit = min(limit, MAX_AUTO_CPU_RANKS)
    rows = 1 if job.train.microbatch_size == "auto" else job.train.microbatch_size
    same_rows = unit // job.parallel.dp_replicate
    fitting = [
        n
        for n in range(unit, limit + 1, unit)
        if job.train.global_batch_size % (n // same_rows * rows) == 0
    ]
    return max(fitting, default=unit)


def _run_dir(job: Job, recipe: str, base: Job) -> str:
    """``run.dir``, or ``runs/<recipe>`` with a hash of the overrides that make another model.

    So the same command goes on with the same run, and another one never lands in it.
    """
    if job.run.dir != "auto":
        return job.run.dir
    # A recipe of the user's may change, or have a namesake: all of it counts, not the overrides.
    whole = difference(job, base) if recipe in recipe_names() else difference(job, Job())
    changes = {name: ours for name, (ours, _) in whole.items() if not name.startswith(SAME_MODEL_KEYS)}
    text = json.dumps(changes, sort_keys=True, default=str)
    suffix = "-" + hashlib.sha256(text.encode()).hexdigest()[:8] if changes else ""
    return str(Path("runs").absolute() / f"{Path(recipe).stem}{suffix}")
