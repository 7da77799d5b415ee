"""Plan: everything that follows from a Job on a given machine, by one pure function.

The trainer consumes the Plan, ``--dry-run`` prints it and the tests assert on it;
nobody computes a degree or a batch size a second time.  ``resolve`` reads no file,
asks no device and starts nothing: the same arguments give the same Plan, or the
same complete list of reasons why there is none.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from weft.job import InvalidJob, Job, Problem, difference, recipe_names, steps_of
from weft.models import Family, load_family, resolve_model
from weft.plan.devices import peak_flops
from weft.plan.float8 import check_float8, float8_matrices, float8_warnings, has_float8
from weft.plan.layout import (
    DEGREE_KEYS,
    Degrees,
    check_layout,
    divisors,
    either,
    find_degrees,
    fixed,
)
from weft.plan.lora import check_lora, check_stages, frozen_of, trained
from weft.plan.memory import (
    USABLE,
    of_one_rank,
    rank_bytes,
    recomputed,
    smallest_shard,
    state_bytes_per_param,
)
from weft.plan.pipeline import (
    PipelinePlan,
    num_microbatches,
    remat_warnings,
    resolve_pipeline,
)
from weft.plan.placement import (
    AXES,
    PLACEMENTS,
    crosses_nodes,
    groups,
    placement_warnings,
    ranks_per_node,
)

Device = Literal["cpu", "cuda"]

# On CPU the ranks of one machine share its cores; more than this many only add traffic.
MAX_AUTO_CPU_WORKERS = 4
# Float32 gradients that a rank keeps whole over a step, to reduce them once, without being asked.
WHOLE_GRADIENT_BYTES = 2 * 2**30
MOST_PROFILED = 20  # steps
# More are refused: each takes a quarter of a GiB before it has done anything.
MAX_CPU_WORKERS = 64

# Changing one of these does not make another model: the run goes on in the same folder.
SAME_RUN = (
    "run.",
    "parallel.",
    "pipeline.",
    "compile.",
    "checkpoint.",
    "observe.",
    "profile.",
    "debug.",
    "launch.",
    "train.steps",
    "train.microbatch",
    "train.eval",
)


@dataclass(frozen=True)
class Machine:
    """What there is to run on.

    ``devices`` counts this host's GPUs, or its cores on CPU.  The sizes are those of the job and
    of this host's part of it where a launcher has decided them, and None where weft decides.
    ``memory_bytes`` is that of one GPU, or of this host on CPU; None where unknown.
    """

    device: Device
    devices: int
    device_name: str = ""
    world_size: int | None = None
    local_world_size: int | None = None
    memory_bytes: int | None = None
    peer_access: bool = False  # GPUs of a host reach each other's memory
    capability: tuple[int, int] = (0, 0)  # of a GPU, as NVIDIA counts; (0, 0) where unknown


@dataclass(frozen=True)
class Plan:
    """What a run will do.  Counts of sequences are per optimizer step."""

    run_dir: str
    device: Device
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
        """Ranks along each axis of the mesh, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def order(self) -> tuple[str, ...]:
        """The axes of the mesh from the one that varies slowest over the ranks."""
        return PLACEMENTS[self.placement]

    @property
    def shard_ranks_per_node(self) -> int | None:
        """Of each group that shards parameters, the ranks on one host; None if they differ."""
        spread = groups(("dp_shard", "cp"), self.sizes, self.order)[0]
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
        InvalidJob: with every reason why the job cannot run there.
    """
    problems: list[Problem] = []
    train, parallel = job.train, job.parallel
    model, found = resolve_model(job.model.kind, job.model.preset, job.model.overrides())
    problems += found
    if model is not None:
        problems += _check_model_against_data(job, model)
    compute = job.precision.compute
    if compute == "auto":
        compute = "bfloat16" if machine.device == "cuda" else "float32"
    compute_bytes = 2 if compute == "bfloat16" else 4

    world = machine.world_size or _workers(job, machine, problems)
    local_world = machine.local_world_size or world
    degrees, found = find_degrees(parallel, world)
    problems += found
    if model is None:
        # The rest judges by sizes that there are not.
        problems += [] if found else _check_batch(job, degrees)
        raise InvalidJob(problems)
    family = load_family(job.model.kind)
    lora = trained(job.lora, model, family, train.seq_len)
    if found:
        # Batch and stages depend on how many ranks are left for them; heads and sequence do not.
        raise InvalidJob([*problems, *check_layout(job, model, family, degrees)])

    if parallel.dp_shard == "fit" and not problems:
        degrees, found = _fit(job, model, family, machine, degrees, compute_bytes, local_world)
        problems += found
    problems += check_layout(job, model, family, degrees)
    problems += _check_device(job, machine, degrees, local_world)
    problems += _check_canonical(job, degrees, compute)
    float8 = job.precision.float8
    emulated = float8 != "none" and not has_float8(float8, machine.capability)
    problems += check_float8(job, model, family, degrees, compute, emulated)
    problems += check_lora(job, model, family, degrees)
    problems += _check_groups(job, degrees)
    problems += _check_optimizer(job)
    problems += _check_experts(job, family)
    problems += _check_objective(job, degrees)
    problems += _check_profile(job)
    problems += _check_debug(job)
    batch_problems = _check_batch(job, degrees)
    problems += batch_problems
    local = max(1, train.global_batch // degrees.dp)
    reshard = _reshard(job, degrees)
    pipeline = None
    microbatch = local if train.microbatch == "auto" else min(local, train.microbatch)
    if train.canonical:
        microbatch = 1
    if degrees.pp > 1 and not batch_problems:
        per_param = state_bytes_per_param(
            degrees.shards,
            kept_gathered=reshard is False,
            kept_gradients=_gradient_sync(
                job, reshard, _own_params(family, model, degrees, lora.params), degrees
            )
            == "step",
            compute_bytes=compute_bytes,
            states=job.optim.states,
            frozen=frozen_of(job, model, family, lora, compute_bytes),
        )
        pipeline, microbatch, found = resolve_pipeline(
            job, model, family, degrees, local, per_param, compute_bytes
        )
        problems += found
        problems += _check_filled(job, family, local, microbatch)
        problems += check_stages(job, pipeline)
    if problems:
        raise InvalidJob(problems)

    peak = peak_flops(machine.device_name) if compute == "bfloat16" else None
    return Plan(
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
        placement=parallel.placement,
        # How many threads share a matrix product can change its last bit.
        threads=1 if train.canonical else max(1, machine.devices // local_world),
        local_batch=local,
        microbatch=microbatch,
        canonical=train.canonical,
        accumulation=num_microbatches(local, microbatch),
        pipeline=pipeline,
        reshard_after_forward=reshard,
        gradient_sync=_gradient_sync(
            job, reshard, _own_params(family, model, degrees, lora.params), degrees
        ),
        tokens_per_step=train.global_batch * train.seq_len,
        compute_dtype=compute,
        reduce_dtype=job.precision.reduce,
        model=model,
        num_params=family.num_params(model) + lora.params * bool(job.lora.rank),
        num_active_params=(family.num_active_params or family.num_params)(model)
        + lora.params * bool(job.lora.rank),
        trained_params=lora.params,
        flops_per_token=lora.flops_per_token,
        # On the mean a token sees half of its row.
        causal_flops_per_token=lora.causal_flops_per_token,
        peak_flops=peak,
        peak_dtype=None if peak is None else "bfloat16",
        float8=float8,
        float8_matrices=len(float8_matrices(job.precision, model, family, degrees.tp)),
        # A scale for each row or block needs the whole weight; the other two ways of FSDP to keep
        # shards take plain ones.
        float8_gather=float8 == "tensorwise"
        and isinstance(reshard, bool)
        and not parallel.cpu_offload,
        float8_emulated=emulated,
        warnings=(
            *placement_warnings(degrees.sizes, local_world, PLACEMENTS[parallel.placement]),
            *float8_warnings(job, machine.device, degrees.pp, emulated),
            *remat_warnings(job, degrees.pp),
        ),
    )


def resolve_nodes(job: Job, machine: Machine, recipe: str = "run", base: Job | None = None) -> Plan:
    """The Plan on the largest number of nodes of ``run.nodes`` that the job can use.

    Its ``node_counts`` are all that it can use; its warnings tell of the others.

    Raises:
        InvalidJob: as `resolve`, if the job can use none of them.
    """
    problems: list[Problem] = []
    nodes = node_range(job)
    if not nodes:
        rule = "is neither a number of nodes nor MIN:MAX"
        problems.append(Problem("run.nodes", job.run.nodes, rule, "use 4, or 1:4"))
        nodes = range(1, 2)
    elif machine.world_size is not None or nodes == range(1, 2):
        return resolve(job, machine, recipe, base)
    elif job.run.rendezvous == "auto":
        rule, remedy = "several nodes must know where to meet", "use the HOST:PORT of one of them"
        problems.append(Problem("run.rendezvous", "auto", rule, remedy))
    local = _workers(job, machine, problems)
    plans: dict[int, Plan] = {}
    refused: dict[int, InvalidJob] = {}
    for count in nodes:
        here = replace(machine, world_size=count * local, local_world_size=local)
        try:
            plans[count] = resolve(job, here, recipe, base)
        except InvalidJob as error:
            refused[count] = error
    if not plans:
        problems += refused[nodes[-1]].problems
    if problems:
        raise InvalidJob(problems)
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


def _reshard(job: Job, degrees: Degrees) -> bool | int:
    """``parallel.reshard_after_forward`` as FSDP2 takes it."""
    asked = job.parallel.reshard_after_forward
    if asked == "auto":
        # A pipeline runs forward many times before it runs backward: gathering anew each time
        # costs more than it saves.
        return degrees.pp == 1 and degrees.shards > 1
    if isinstance(asked, int):
        # Over one rank is to keep them, over all is to free them.
        return {1: False, degrees.shards: degrees.shards > 1}.get(asked, asked)
    return asked == "always"


def _gradient_sync(
    job: Job, reshard: bool | int, params: float, degrees: Degrees
) -> Literal["microbatch", "step"]:
    """``parallel.gradient_sync``: by itself, one reduction unless whole gradients are large."""
    asked = job.parallel.gradient_sync
    if asked != "auto":
        return asked
    small = 4 * params / (degrees.tp * degrees.pp) <= WHOLE_GRADIENT_BYTES
    return "step" if reshard is False or small else "microbatch"


def _own_params(family: Family, model: Any, degrees: Degrees, trained: int) -> float:
    """Trained parameters without those of experts that are on other ranks."""
    if degrees.ep == 1 or family.units is None:
        return trained
    return sum(of_one_rank(unit, degrees.ep) for unit in family.units(model, 1))


def _fit(
    job: Job,
    model: Any,
    family: Family,
    machine: Machine,
    degrees: Degrees,
    compute_bytes: int,
    local_world: int,
) -> tuple[Degrees, list[Problem]]:
    """The fewest ranks to a shard group whose memory suffices; the other ranks are replicas."""
    key = "parallel.dp_shard"
    if family.units is None or machine.memory_bytes is None:
        rule = "cannot be told: the " + (
            "device's memory is unknown" if family.units else "family has no units"
        )
        return degrees, [Problem(key, "fit", rule, "use a number, or auto")]
    on_host = local_world if machine.device == "cpu" else 1
    available = machine.memory_bytes / on_host
    choices = divisors(degrees.dp)
    reshard = _reshard(job, degrees)
    rows = job.train.microbatch
    local = max(1, job.train.global_batch // degrees.dp)
    tokens = (local if rows == "auto" else rows) * job.train.seq_len / degrees.cp
    units = family.units(model, job.train.seq_len)
    lora = trained(job.lora, model, family, job.train.seq_len)
    if job.remat.kind == "full" and job.remat.every == 1:
        units = recomputed(units)
    needed = [
        rank_bytes(
            units,
            tp=degrees.tp,
            pp=degrees.pp,
            tokens=int(tokens),
            in_flight=degrees.pp,
            per_param=state_bytes_per_param(
                shard * degrees.cp,
                kept_gathered=reshard is False,
                kept_gradients=_gradient_sync(job, reshard, lora.params, degrees) == "step",
                compute_bytes=compute_bytes,
                states=job.optim.states,
                frozen=frozen_of(job, model, family, lora, compute_bytes),
            ),
            compute_bytes=compute_bytes,
        )
        for shard in choices
    ]
    shard = smallest_shard(choices, needed, available)
    if shard is None:
        rule = f"needs about {needed[-1] / 2**30:.1f} GiB a rank even over {choices[-1]} ranks, "
        rule += f"and {USABLE:.0%} of a rank's memory is {USABLE * available / 2**30:.1f}"
        remedy = "use more ranks, parallel.tp or parallel.pp, or a smaller train.microbatch"
        return degrees, [Problem(key, "fit", rule, remedy, DEGREE_KEYS)]
    replicas = degrees.dp // shard
    return replace(degrees, dp_shard=shard, dp_replicate=replicas), []


def _check_batch(job: Job, degrees: Degrees) -> list[Problem]:
    """The global batch over the ranks, and the microbatch within a rank."""
    train, dp = job.train, degrees.dp
    depends = ("run.workers", *DEGREE_KEYS)
    local, rest = divmod(train.global_batch, dp)
    if rest or not local:
        near = [n for n in (local * dp, (local + 1) * dp) if n]
        unit = dp if isinstance(job.parallel.dp_shard, int) else job.parallel.dp_replicate
        others = degrees.world // dp
        worlds = [n * others for n in divisors(train.global_batch, dp) if n % unit == 0]
        rule = f"does not divide over the {dp} data-parallel ranks"
        remedy = f"use {either(near)}" + (f", or run.workers = {either(worlds)}" if worlds else "")
        return [Problem("train.global_batch", train.global_batch, rule, remedy, depends)]
    if train.microbatch != "auto" and train.microbatch > local:
        rule = f"exceeds the {local} sequence{'s' * (local > 1)} of each rank"
        remedy = f"use at most {local}, or auto"
        depends = ("train.global_batch", *depends)
        return [Problem("train.microbatch", train.microbatch, rule, remedy, depends)]
    return []


def _check_device(
    job: Job, machine: Machine, degrees: Degrees, local_world: int
) -> Iterator[Problem]:
    """What only some hardware can do."""
    key, order = "parallel.async_tp", PLACEMENTS[job.parallel.placement]
    kind, keeps = job.remat.kind, job.data.keeps_documents
    chooses = kind in ("selective", "budget") and not job.compile.enable
    if machine.device == "cuda" and keeps and chooses:
        # FlexAttention is not compiled where operators are chosen one by one.
        rule = "would compute all scores of attention within documents (data.packing)"
        remedy = "use compile.enable true, or remat.kind full"
        yield Problem(
            "remat.kind", kind, rule, remedy, ("data.packing", "data.format", "compile.enable")
        )
    if job.parallel.symmetric_memory:
        name, other = "parallel.symmetric_memory", "parallel.hierarchical_gather"
        if not machine.peer_access:
            rule, remedy = "needs GPUs that reach each other's memory", "use false here"
            yield Problem(name, True, rule, remedy, ("run.device",))
        elif job.parallel.hierarchical_gather:
            yield Problem(name, True, f"has no part in {other}", "use one of them", (other,))
    if not job.parallel.async_tp:
        return
    if not machine.peer_access:
        rule = "needs GPUs that reach each other's memory (SymmetricMemory over NVLink)"
        yield Problem(key, True, rule, "use parallel.async_tp false here", ("run.device",))
    elif crosses_nodes("tp", degrees.sizes, local_world, order):
        rule = f"works inside a node, and tp = {degrees.tp} crosses nodes of {local_world} ranks"
        yield Problem(key, True, rule, f"use parallel.tp {local_world} or less", DEGREE_KEYS)


def _check_canonical(job: Job, degrees: Degrees, compute: str) -> Iterator[Problem]:
    """What has no order of the global batch that every number of ranks shares."""
    if not job.train.canonical:
        return
    rule, key = "has only data-parallel ranks, in float32", "train.canonical"
    for axis in ("tp", "pp", "cp"):
        if getattr(degrees, axis) > 1:
            yield Problem(key, True, rule, f"use parallel.{axis} 1, or train.canonical false")
    if compute != "float32":
        yield Problem(key, True, rule, "use precision.compute float32, or train.canonical false")
    if job.parallel.cpu_offload:
        yield Problem(key, True, rule, "use parallel.cpu_offload false")
    if job.train.microbatch not in ("auto", 1):
        yield Problem("train.microbatch", job.train.microbatch, "is 1 in canonical order", "use 1")


def _check_groups(job: Job, degrees: Degrees) -> Iterator[Problem]:
    """What a replica group cannot do."""
    key, value = "resilience.lighthouse", job.resilience.lighthouse
    if value == "none":
        return
    if not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:/\[\]\s]+):\d{1,5}", value):
        yield Problem(key, value, "is no HOST:PORT", "use that of torchft_lighthouse, or none")
    rule = "is not possible in a replica group (resilience.lighthouse)"
    if degrees.pp > 1:  # its schedule has a fixed number of microbatches
        yield Problem("parallel.pp", degrees.pp, rule, "use parallel.pp 1", (key,))
    if job.train.canonical:
        yield Problem("train.canonical", True, rule, "use train.canonical false", (key,))
    if job.resilience.anomaly != "stop":
        yield Problem("resilience.anomaly", job.resilience.anomaly, rule, "use stop", (key,))
    if job.checkpoint.dir == "auto":
        remedy = "use a folder that all groups share"
        yield Problem("checkpoint.dir", "auto", "is each replica group's own", remedy, (key,))


def _check_optimizer(job: Job) -> Iterator[Problem]:
    key, value = "optim.states", job.optim.states
    if value == "float32":
        return
    if job.optim.kind != "adamw":
        rule = f"is for adamw, not {job.optim.kind}"
        yield Problem(key, value, rule, "use float32", ("optim.kind",))
    if value == "8bit" and job.resilience.lighthouse != "none":
        rule = "is not possible in a replica group (resilience.lighthouse)"
        yield Problem(key, value, rule, "use bfloat16", ("resilience.lighthouse",))


def _check_experts(job: Job, family: Family) -> Iterator[Problem]:
    """What experts cannot have."""
    if family.routed is None:
        return
    if job.optim.kind == "muon":
        rule = "is for matrices, and experts are stacks of them"
        yield Problem("optim.kind", "muon", rule, "use adamw", ("model.kind",))
    if job.lora.rank:
        rule = "is not for a mixture of experts: adapters are for plain linear layers"
        yield Problem("lora.rank", job.lora.rank, rule, "use 0", ("model.kind",))
    if (recipe := job.precision.float8) != "none":
        rule = "is not for a mixture of experts: grouped products, most of its work, would stay"
        rule += " in bfloat16"
        yield Problem("precision.float8", recipe, rule, "use none", ("model.kind",))


def _check_filled(job: Job, family: Family, local: int, microbatch: int) -> Iterator[Problem]:
    """A pipeline's microbatches all have as many rows: the last is filled up with copies, which
    would count in the experts' loads."""
    if family.routed is not None and local % microbatch:
        rule = f"does not divide the {local} sequences of each rank of a pipeline with experts"
        remedy = f"use {either(divisors(local))}"
        depends = ("train.global_batch", *DEGREE_KEYS)
        yield Problem("train.microbatch", microbatch, rule, remedy, depends)


def _check_objective(job: Job, degrees: Degrees) -> Iterator[Problem]:
    """What an objective needs of data and layout."""
    key, objective = "train.objective", job.train.objective
    preferences = job.data.format == "preferences"
    if objective == "dpo" and not preferences:
        rule, remedy = "learns from preferences", "use data.format preferences"
        yield Problem(key, objective, rule, remedy, ("data.format",))
    if objective == "next_token" and preferences:
        rule = "would learn rejected answers, too"
        yield Problem(key, objective, rule, "use dpo, or data.format chat", ("data.format",))
    if objective != "next_token" and degrees.cp > 1:
        rule = "looks at whole rows, which parallel.cp cuts over ranks"
        yield Problem(key, objective, rule, "use parallel.cp 1", ("parallel.cp",))


def _check_profile(job: Job) -> Iterator[Problem]:
    key, value, last = "profile.steps", job.profile.steps, job.train.steps
    chosen = steps_of(value)
    steps = chosen[0] if chosen else range(0)
    if len(chosen) > 1:
        yield Problem(key, value, "is more than one range of steps", "use 10, or 10-12")
    elif steps and steps[-1] > last:
        rule = f"ends after the run, which has train.steps = {last}"
        yield Problem(key, value, rule, f"use {last} or less", ("train.steps",))
    elif len(steps) > MOST_PROFILED:
        rule = f"has {len(steps)} steps: traces of more than {MOST_PROFILED} are too large to read"
        yield Problem(key, value, rule, f"use {steps[0]}-{steps[0] + 2}")


def _check_debug(job: Job) -> Iterator[Problem]:
    """What would not hold, or tell nothing."""
    key, group = "debug.statistics", "resilience.lighthouse"
    rule = "is not possible in a replica group (resilience.lighthouse)"
    chosen = steps_of(job.debug.statistics)
    if chosen and job.resilience.lighthouse != "none":
        yield Problem(key, job.debug.statistics, rule, "use one group", (group,))
    if chosen and min(steps[0] for steps in chosen) > job.train.steps:
        rule = f"begins after the last step, train.steps = {job.train.steps}"
        yield Problem(key, job.debug.statistics, rule, "choose an earlier one", ("train.steps",))
    if job.debug.deterministic:
        key, remedy = "debug.deterministic", "use false, or a run that stays as it is"
        rule = "does not hold where ranks come and go"
        for other, value in ((group, job.resilience.lighthouse), ("run.nodes", job.run.nodes)):
            if value != "none" and (other == group or ":" in str(value)):
                yield Problem(key, True, f"{rule}: {other} = {value}", remedy, (other,))
    if job.debug.autograd_anomaly and job.compile.enable:
        key, rule = "debug.autograd_anomaly", "cannot look into a compiled backward pass"
        yield Problem(key, True, rule, "use compile.enable false", ("compile.enable",))
    if job.debug.autograd_anomaly and job.parallel.tp > 1:
        # Its look at a DTensor, which gradients of weights are there, is not implemented.
        key, rule = "debug.autograd_anomaly", "cannot look at gradients that are cut by parallel.tp"
        remedy = "use parallel.tp 1, or --debug.statistics"
        yield Problem(key, True, rule, remedy, ("parallel.tp",))


def _check_model_against_data(job: Job, model: Any) -> Iterable[Problem]:
    if job.train.seq_len > model.max_seq_len:
        yield Problem(
            "train.seq_len",
            job.train.seq_len,
            f"exceeds max_seq_len = {model.max_seq_len} of {job.model.kind}-{job.model.preset}",
            f"use at most {model.max_seq_len}, or --model.max_seq_len {job.train.seq_len}",
            ("model.preset", "model.max_seq_len"),
        )
    if job.data.tokenizer == "train" and job.data.vocab_size > model.vocab_size:
        yield Problem(
            "data.vocab_size",
            job.data.vocab_size,
            f"exceeds vocab_size = {model.vocab_size} of {job.model.kind}-{job.model.preset}",
            f"use at most {model.vocab_size}, or --model.vocab_size {job.data.vocab_size}",
            ("model.preset", "model.vocab_size"),
        )


def _workers(job: Job, machine: Machine, problems: list[Problem]) -> int:
    """How many local processes weft starts."""
    chosen = job.run.workers
    workers = _fitting_workers(job, machine) if chosen == "auto" else chosen
    cuda = machine.device == "cuda"
    most = machine.devices if cuda else MAX_CPU_WORKERS
    if workers > most:
        rule = f"exceeds the {most} " + ("GPUs of this machine" if cuda else "that a CPU is given")
        on_cpu = "--run.device cpu, or " if cuda else ""
        remedy = f"use at most {most}, or {on_cpu}a launcher such as torchrun on several machines"
        depends = ("run.device", *DEGREE_KEYS)
        problems.append(Problem("run.workers", workers, rule, remedy, depends))
    return workers


def _fitting_workers(job: Job, machine: Machine) -> int:
    """As many as there are devices for, and as divide the batch."""
    shard, unit = job.parallel.dp_shard, fixed(job.parallel)
    if isinstance(shard, int):
        return unit * shard
    limit = machine.devices
    if machine.device == "cpu":
        limit = min(limit, MAX_AUTO_CPU_WORKERS)
    rows = 1 if job.train.microbatch == "auto" else job.train.microbatch
    same_rows = unit // job.parallel.dp_replicate
    fitting = [
        n
        for n in range(unit, limit + 1, unit)
        if job.train.global_batch % (n // same_rows * rows) == 0
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
    changes = {name: ours for name, (ours, _) in whole.items() if not name.startswith(SAME_RUN)}
    text = json.dumps(changes, sort_keys=True, default=str)
    suffix = "-" + hashlib.sha256(text.encode()).hexdigest()[:8] if changes else ""
    return str(Path("runs").absolute() / f"{Path(recipe).stem}{suffix}")
