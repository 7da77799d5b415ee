"""Derive the Plan of a Job on a given machine, or every reason why there is none.

`resolve` is pure: it queries no device and starts no process.  It reads only a schedule's CSV file,
the device tables, a user's model family, and the configuration of ``model.path``.  Equal arguments
give an equal Plan, or the same complete list of configuration errors.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from weft.config.accelerators import unit_of
from weft.config.axes import MESSAGE_ORDER
from weft.config.errors import ConfigErrors, InvalidConfig
from weft.config.reader import recipe_names, recipe_slug
from weft.config.schema import Job, ParallelSection, difference
from weft.models import Family, load_family
from weft.planning.cuda_graph_rules import check_cuda_graphs, uses_cuda_graphs
from weft.planning.degrees import ParallelDims, divisors, resolve_degrees
from weft.planning.devices import linked_devices, peak_flops
from weft.planning.dispatch_rules import check_dispatch, dispatch_warnings
from weft.planning.lora_plan import TrainingCost, training_cost
from weft.planning.matrices import find_float8_matrices, supports_float8
from weft.planning.model_config import Adopt, adopt_model, is_complete, model_name, resolve_section
from weft.planning.needs import key_facts, unused_key_warnings
from weft.planning.optim_rules import (
    check_optimizer,
    export_warnings,
    find_frozen_params,
    group_warnings,
)
from weft.planning.pipeline_plan import check_trained_stages, count_microbatches, resolve_pipeline
from weft.planning.placement import DEGREE_KEYS
from weft.planning.plan import Machine, PipelinePlan, Plan
from weft.planning.plan_warnings import (
    activation_checkpoint_warnings,
    component_warnings,
    float8_warnings,
    microbatch_warnings,
    pipeline_warnings,
    placement_warnings,
    warmup_warnings,
)
from weft.planning.precision_rules import check_float8, check_lora
from weft.planning.rules import (
    check_addresses,
    check_batch,
    check_data,
    check_device,
    check_full_microbatches,
    check_layout,
    check_sections,
    check_world_size_invariant,
    uses_flex_attention,
    uses_varlen,
)
from weft.planning.sharding import (
    expert_split,
    fit_dp_shard,
    fsdp_size,
    resolve_gradient_sync,
    resolve_reshard,
    state_bytes_per_param,
)

# The CPU ranks of one machine share its cores; more ranks only add traffic.
MAX_AUTO_CPU_RANKS = 4
# Each process takes a quarter of a GiB before it trains.
MAX_CPU_RANKS = 64
# ``run.nodes`` without a cluster.
ONE_NODE = range(1, 2)
MAX_NODES = 99_999


def resolve(
    job: Job,
    machine: Machine,
    recipe: str = "run",
    base: Job | None = None,
    adopt: Adopt = adopt_model,
) -> Plan:
    """Derive the Plan.

    Args:
        job: the user's choices.
        machine: the hardware that the run uses.
        recipe: name of the recipe, which names the run directory if ``run.dir`` is ``auto``.
        base: the recipe without overrides; the run directory's name has a hash of the difference.
        adopt: reads ``model.path`` and ``lora.path``.  The default reads no adapter; commands pass
            `weft.conversion.adapter_path.adopt_paths`.  The job of a Plan has been read.

    Raises:
        InvalidConfig: with every reason why the job cannot run on this machine.
    """
    recipe_job = base or job
    run_dir = _run_dir(job, recipe, recipe_job)
    if job.lora.path and adopt is adopt_model and not is_complete(job.model):
        raise ValueError("lora.path has not been read: pass adopt_paths")
    job, path_errors = adopt(job, recipe_job, Path(run_dir))
    job = _fit_seq_len(job, recipe_job)
    errors = ConfigErrors(job)
    errors += path_errors
    train, parallel = job.train, job.parallel
    model, new_errors = (None, []) if path_errors else resolve_section(job.model)
    errors += new_errors
    if model is not None:
        check_data(errors, job, model)
    compute_dtype = job.precision.compute_dtype
    if compute_dtype == "auto":
        compute_dtype = "float32" if machine.device == "cpu" else "bfloat16"
    compute_bytes = 2 if compute_dtype == "bfloat16" else 4

    world_size = machine.world_size or _resolve_nproc(errors, job, machine)
    local_world_size = machine.local_world_size or world_size
    num_nodes = max(1, world_size // local_world_size)
    num_errors = len(errors)
    limit = MAX_CPU_RANKS if machine.device == "cpu" else machine.devices
    max_ranks = limit if num_nodes == 1 else limit * MAX_NODES  # there may be more nodes
    degrees = resolve_degrees(errors, parallel, world_size, num_nodes, max_ranks)
    is_launched = machine.world_size is not None and job.run.nodes == "auto"
    fixed_ranks = world_size if is_launched or job.run.nproc_per_node != "auto" else None
    has_degrees = len(errors) == num_errors
    if model is None:
        # The other rules need the sizes of the model.
        if has_degrees:
            check_batch(errors, job, degrees, num_nodes)
        raise InvalidConfig(errors)
    family = load_family(job.model.kind).of(model, degrees.experts_without_tp)
    frozen_params = find_frozen_params(job, model, family)
    cost = training_cost(job.lora, model, family, train.seq_len, frozen_params)
    if not has_degrees:
        # Batch and stages depend on the data-parallel degree; heads and sequence length do not.
        check_layout(errors, job, model, family, degrees, fixed_ranks)
        raise InvalidConfig(errors)

    is_free = _is_layout_free(job, machine)
    if (is_free or parallel.dp_shard == "fit") and not errors:
        available = machine.memory_per_rank(local_world_size)
        # A layout that nobody asked for is no error: all ranks shard.
        fit_errors = ConfigErrors(job) if is_free else errors
        degrees = fit_dp_shard(fit_errors, job, cost, degrees, compute_bytes, available)
    check_layout(errors, job, model, family, degrees, fixed_ranks)
    hardware = machine.device, machine.peer_access
    # The kernel for documents of any length takes their number and the longest from the host.
    varlen_documents = not uses_cuda_graphs(job, machine.device) and uses_varlen(
        job, model, compute_dtype, machine.capability
    )
    uses_flex = uses_flex_attention(job, model, degrees.cp, varlen_documents)
    check_device(errors, job, *hardware, degrees, local_world_size, uses_flex)
    check_dispatch(errors, job, model, family, degrees)
    check_cuda_graphs(errors, job, family, machine.device, degrees, compute_dtype)
    check_world_size_invariant(errors, job)
    check_addresses(errors, job)
    float8 = job.precision.float8
    emulated = float8 != "none" and not supports_float8(float8, machine.capability)
    check_float8(errors, job, model, family, degrees, compute_dtype, emulated)
    check_lora(errors, job, model, family, degrees)
    check_optimizer(errors, job, model, family)
    check_sections(errors, job, model, degrees)
    batch = _resolve_batch(
        errors, job, model, family, cost, degrees, compute_bytes, num_nodes, fixed_ranks
    )
    errors.raise_any()

    float8_matrices = find_float8_matrices(job.precision, model, family, degrees.tp)
    peak = peak_flops(machine.device_name) if compute_dtype == "bfloat16" else None
    cores_per_rank = max(1, machine.devices // local_world_size)
    plan = Plan(
        job=job,
        seq_len=train.seq_len,
        num_steps=train.known_steps,
        global_batch_size=train.global_batch_size,
        run_dir=run_dir,
        device=machine.device,
        world_size=world_size,
        local_world_size=local_world_size,
        node_counts=(num_nodes,),
        rendezvous=job.run.rendezvous,
        **degrees.axis_sizes,
        ep=degrees.ep,
        mesh_order=parallel.mesh_order,
        # The number of threads of a matrix product can change its last bit.
        num_threads=1 if train.world_size_invariant else machine.num_threads or cores_per_rank,
        local_batch_size=batch.local_batch_size,
        microbatch_size=batch.microbatch_size,
        world_size_invariant=train.world_size_invariant,
        num_microbatches=count_microbatches(batch.local_batch_size, batch.microbatch_size),
        pipeline=batch.pipeline,
        reshard_after_forward=batch.reshard_after_forward,
        gradient_sync=batch.gradient_sync,
        tokens_per_step=train.global_batch_size * train.seq_len,
        compute_dtype=compute_dtype,
        reduce_dtype="float32" if train.world_size_invariant else job.precision.reduce_dtype,
        model=model,
        num_params=cost.num_params
        + (cost.trainable_params - cost.saved_params if cost.lora_rank else 0),
        num_active_params=cost.active_params,
        num_trainable_params=cost.trainable_params,
        frozen_params=frozen_params,
        flops_per_token=cost.flops_per_token,
        causal_flops_per_token=cost.causal_flops_per_token,
        peak_flops=peak,
        peak_dtype=None if peak is None else "bfloat16",
        float8=float8,
        num_float8_matrices=len(float8_matrices),
        num_float8_stacks=sum(matrix.experts > 0 for matrix in float8_matrices),
        # Rowwise and blockwise scales need the unsharded weight.  FSDP's partial resharding and
        # CPU offload take only plain shards.
        float8_all_gather=float8 == "tensorwise"
        and world_size > 1
        and isinstance(batch.reshard_after_forward, bool)
        and not parallel.cpu_offload
        and not (job.lora.rank and job.lora.dora),  # it needs the norms of the weights as they are
        float8_emulated=emulated,
        varlen_documents=varlen_documents,
        warnings=(),
    )
    warnings = (
        *placement_warnings(
            plan.axis_sizes,
            local_world_size,
            plan.axis_order,
            linked_devices(machine, local_world_size),
        ),
        *float8_warnings(plan),
        *pipeline_warnings(plan),
        *activation_checkpoint_warnings(plan),
        *dispatch_warnings(plan),
        *export_warnings(plan),
        *group_warnings(plan),
        *microbatch_warnings(plan),
        *warmup_warnings(plan),
        *component_warnings(plan),
        *unused_key_warnings(plan, base or Job()),
    )
    return replace(plan, warnings=warnings)


def resolve_nodes(
    job: Job,
    machine: Machine,
    recipe: str = "run",
    base: Job | None = None,
    adopt: Adopt = adopt_model,
) -> Plan:
    """Return the Plan on the largest node count of ``run.nodes`` that the job can use.

    Its ``node_counts`` lists every node count that the job can use; its warnings name the others.

    Raises:
        InvalidConfig: as `resolve`, if the job can use none of them.
    """
    errors = ConfigErrors(job)
    nodes = node_range(job)
    if not nodes:
        rule = f"is neither a number of nodes nor MIN:MAX (at most {MAX_NODES:,} nodes)"
        errors.add("run.nodes", rule, "use 4, or 1:4")
        nodes = ONE_NODE
    elif machine.world_size is not None or nodes == ONE_NODE:
        return resolve(job, machine, recipe, base, adopt)
    elif job.run.rendezvous == "auto":
        rule = "names no rendezvous endpoint, which a run on several nodes needs"
        errors.add("run.rendezvous", rule, "use HOST:PORT of one of the nodes")
    num_errors = len(errors)
    local_world_size = _resolve_nproc(errors, job, machine, nodes)
    if len(errors) > num_errors:  # the other rules check the layout as if one node had its ranks
        nodes = ONE_NODE
    plans: dict[int, Plan] = {}
    rejections: dict[int, InvalidConfig] = {}
    for count in nodes:
        world_size = count * local_world_size
        cluster = replace(machine, world_size=world_size, local_world_size=local_world_size)
        try:
            plans[count] = resolve(job, cluster, recipe, base, adopt)
        except InvalidConfig as error:
            rejections[count] = error
    if not plans:
        errors += rejections[nodes[-1]].errors
    errors.raise_any()
    counts = tuple(plans)
    warnings = tuple(
        f"run.nodes={job.run.nodes}: of {count} nodes the run can use only "
        f"{max((n for n in counts if n < count), default=0)}, because "
        f"{error.errors[0].key}={error.errors[0].value} {error.errors[0].rule}"
        for count, error in rejections.items()
    )
    plan = plans[counts[-1]]
    return replace(plan, node_counts=counts, warnings=plan.warnings + warnings)


def node_range(job: Job) -> range:
    """Return ``run.nodes`` as a range of node counts; empty if the value is invalid."""
    minimum, colon, maximum = job.run.nodes_text.replace("auto", "1").partition(":")
    texts = (minimum, maximum if colon else minimum)
    is_valid = all(re.fullmatch("[1-9][0-9]{,8}", text) for text in texts)
    if not is_valid or int(texts[1]) > MAX_NODES:
        return range(0)
    return range(int(texts[0]), int(texts[1]) + 1)


def _fit_seq_len(job: Job, recipe: Job) -> Job:
    """Shorten the recipe's sequences to the longest of the model of ``model.path``."""
    limit = job.model.overrides().get("max_seq_len", job.train.seq_len)
    if not job.model.path or job.train.seq_len != recipe.train.seq_len:
        return job
    train = job.train.model_copy(update={"seq_len": min(limit, job.train.seq_len)})
    return job.model_copy(update={"train": train})


class _BatchPlan(NamedTuple):
    """A rank's share of the batch; the fields are those of `Plan`."""

    local_batch_size: int
    microbatch_size: int
    pipeline: PipelinePlan | None
    reshard_after_forward: bool | int
    gradient_sync: Literal["microbatch", "step"]


def _resolve_batch(
    errors: ConfigErrors,
    job: Job,
    model: Any,
    family: Family,
    cost: TrainingCost,
    degrees: ParallelDims,
    compute_bytes: int,
    num_nodes: int,
    fixed_ranks: int | None,
) -> _BatchPlan:
    """Resolve microbatches, pipeline and gradient synchronization.

    Args:
        errors: receives the errors.
        job: keys of the run.
        model: the family's configuration.
        family: the model family.
        cost: of the model.
        degrees: degrees of all axes.
        compute_bytes: bytes of a weight, and of an activation, in forward and backward.
        num_nodes: for remedies.
        fixed_ranks: ranks of the run, if they do not follow from the degrees; for remedies.
    """
    train, reshard = job.train, resolve_reshard(job, degrees)
    gradient_sync = resolve_gradient_sync(job, reshard, cost, degrees)
    local_batch_size = max(1, train.global_batch_size // degrees.dp_size)
    size = local_batch_size if train.microbatch_size == "auto" else train.microbatch_size
    microbatch_size = 1 if train.world_size_invariant else min(local_batch_size, size)
    pipeline = None
    if check_batch(errors, job, degrees, num_nodes) and degrees.pp > 1:
        bytes_per_param = state_bytes_per_param(
            job,
            cost,
            fsdp_size(job, degrees),
            has_unsharded_params=reshard is False,
            has_unsharded_gradients=gradient_sync == "step",
            compute_bytes=compute_bytes,
            ep=expert_split(degrees),
        )
        pipeline, microbatch_size = resolve_pipeline(
            errors,
            job,
            model,
            family,
            cost,
            degrees,
            local_batch_size,
            bytes_per_param,
            compute_bytes,
            fixed_ranks,
        )
        check_full_microbatches(errors, family, local_batch_size, microbatch_size)
        if pipeline is not None and (cost.lora_rank or cost.trainable_params < cost.num_params):
            check_trained_stages(errors, job, pipeline, model, family)
    return _BatchPlan(local_batch_size, microbatch_size, pipeline, reshard, gradient_sync)


def _resolve_nproc(
    errors: ConfigErrors, job: Job, machine: Machine, nodes: range = ONE_NODE
) -> int:
    """Return the processes per node; record an error if the layout does not fit.

    After an error of the layout, all of its ranks count as those of one node, so that the other
    rules can check it.
    """
    nproc, is_cpu = job.run.nproc_per_node, machine.device == "cpu"
    limit = MAX_CPU_RANKS if is_cpu else machine.devices
    if nproc == "auto":
        if found := _auto_nproc(job, machine, nodes, limit):
            return found
        device = "processes" if is_cpu else f"{unit_of(machine.device)}s"
        return _check_nodes(errors, job, nodes[-1], limit, device)
    if nproc > limit:
        rule = f"exceeds the {limit} " + (
            "processes per CPU" if is_cpu else f"{unit_of(machine.device)}s of this machine"
        )
        on_cpu = "" if is_cpu else "--run.device cpu, or "
        remedy = f"use at most {limit}, or {on_cpu}several machines (run.nodes)"
        errors.add("run.nproc_per_node", rule, remedy, ("run.device", *DEGREE_KEYS))
    return nproc


def _check_nodes(errors: ConfigErrors, job: Job, num_nodes: int, limit: int, device: str) -> int:
    """Record that the ranks of a layout do not fit on the nodes; return their number."""
    parallel, unit = job.parallel, job.parallel.ranks_per_shard
    degrees = {name: getattr(parallel, name) for name in MESSAGE_ORDER}
    sizes = {name: degree for name, degree in degrees.items() if degree > 1}
    key = next(iter(sizes), "dp_shard") if parallel.num_ranks is None else "dp_shard"
    others = " and ".join(f"{name}={size}" for name, size in sizes.items() if name != key)
    num_ranks = parallel.num_ranks or unit
    rule = f"times {others} " * bool(others) + f"needs {num_ranks} ranks, but "
    on_nodes = f"{num_nodes} node{'s' * (num_nodes > 1)} with "
    most, rest = num_nodes * limit, num_ranks % num_nodes
    is_idle = num_ranks < most and not rest
    if num_ranks > most:
        rule += f"{on_nodes}at most {limit} {device} can have only {most}"
    elif is_idle:
        rule += f"{on_nodes}{limit} {device} have {most}"
    else:
        rule += f"{num_nodes} nodes cannot have equal shares of them"
    remedies = ["auto"] * (parallel.num_ranks is not None and most % unit == 0)
    needed = next(n for n in divisors(num_ranks) if num_ranks // n <= limit)
    if needed <= MAX_NODES:
        remedies.append(f"run.nodes={needed}")
    if is_idle:
        remedies.append(f"run.nproc_per_node={num_ranks // num_nodes}")
    remedy = ", or ".join(remedies or ["smaller degrees"])
    errors.add(f"parallel.{key}", rule, f"use {remedy}", ("run.nodes", *DEGREE_KEYS))
    return num_ranks


def _is_layout_free(job: Job, machine: Machine) -> bool:
    """Return True on CPU if all keys of the layout have their defaults.

    weft then replicates a model that fits into memory: the ranks of a CPU share its cores, and
    replicas exchange only gradients (benchmarks/local_layouts.py).
    """
    is_default = job.run.nproc_per_node == "auto" and job.parallel == ParallelSection()
    return is_default and machine.device == "cpu"


def _auto_nproc(job: Job, machine: Machine, nodes: range, limit: int) -> int:
    """Return the most processes per node that devices and batch allow.

    A layout with all degrees has that many ranks on all nodes together.

    Args:
        job: keys of the run.
        machine: the hardware of a node.
        nodes: the numbers of nodes of ``run.nodes``; one of them must fit.
        limit: of the processes on a node.

    Returns:
        Processes per node; 0 if the layout does not fit.
    """
    parallel, unit = job.parallel, job.parallel.ranks_per_shard
    if parallel.num_ranks is not None:
        for count in reversed(nodes):
            nproc, rest = divmod(parallel.num_ranks, count)
            # Several nodes with idle GPUs are a mistake.
            fewest = limit if machine.device != "cpu" and count > 1 else 1
            if not rest and fewest <= nproc <= limit:
                return nproc
        return 0
    num_devices = machine.devices
    if machine.device == "cpu":
        num_devices = min(num_devices, MAX_AUTO_CPU_RANKS)
    microbatch_size = 1 if job.train.microbatch_size == "auto" else job.train.microbatch_size
    ranks_per_batch = unit // parallel.dp_replicate  # ranks that read the same sequences

    def is_valid(world_size: int) -> bool:
        sequences = world_size // ranks_per_batch * microbatch_size
        return world_size % unit == 0 and job.train.global_batch_size % sequences == 0

    valid = [n for n in range(1, num_devices + 1) if any(is_valid(n * count) for count in nodes)]
    fewest = min(unit // math.gcd(unit, count) for count in nodes)
    return max(valid, default=fewest if fewest <= limit else 0)


def _run_dir(job: Job, recipe: str, base: Job) -> str:
    """Return ``run.dir``, or ``runs/<recipe>`` with a hash of the model's overrides.

    So the same command resumes the same run, and a different model gets its own directory.
    """
    if job.run.dir != "auto":
        return job.run.dir
    # A user's recipe may change, or share its name with another: hash all of its keys.
    keys = difference(job, base) if recipe in recipe_names() else difference(job, Job())
    model = model_name(job.model.path)
    changes = {
        key: value
        for key, (value, _) in keys.items()
        if key_facts(key).on_resume not in ("free", "layout")
        and not (model and key.startswith("model."))
    }
    text = json.dumps(changes, sort_keys=True, default=str)
    suffix = "-" + hashlib.sha256(text.encode()).hexdigest()[:8] if changes else ""
    name = f"{f'{model}-' * bool(model)}{recipe_slug(recipe)}{suffix}"
    return str(Path("runs").absolute() / name)
