"""apply: turn a single-device model into this rank's part of it, in THE order.

The model knows nothing of ranks.  Everything that a layout does to it happens here,
in place, one line per technique, and the order of the lines is part of the design.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from weft.config.schema import Job
from weft.models import Family
from weft.parallel.activation_checkpoint import apply_activation_checkpoint
from weft.parallel.activation_offload import apply_activation_offload
from weft.parallel.compile import apply_compile
from weft.parallel.context_parallel import apply_context_parallel
from weft.parallel.data_parallel import apply_fsdp
from weft.parallel.expert_parallel import apply_expert_parallel
from weft.parallel.float8 import apply_float8
from weft.parallel.lora import apply_lora, add_adapter_sharding
from weft.parallel.mesh import Mesh
from weft.parallel.private import enable_async_tp
from weft.parallel.tensor_parallel import apply_tensor_parallel, materialize_local_weights
from weft.plan.float8_rules import find_float8_matrices
from weft.plan.resolve import Plan


def build_model_parts(job: Job, plan: Plan, mesh: Mesh, family: Family) -> list[nn.Module]:
    """This rank's parts of the model on the meta device, laid out: one, or one for each of its
    pipeline stages.  Parameter names are those of the whole model.

    Gradients are *summed* over the ranks that see different tokens, not averaged: the loss is
    already divided by the number of valid tokens of the whole step.
    """
    parts = []
    for units in _unit_ranges(plan, mesh):
        with torch.device("meta"):
            model = family.build(plan.model)
        if units is not None:
            assert family.keep is not None
            family.keep(model, units)
        parallelize_model(model, job, plan, mesh, family)
        parts.append(model)
    return parts


def _unit_ranges(plan: Plan, mesh: Mesh) -> list[range | None]:
    """The units of each of this rank's parts; None: all of them."""
    if plan.pipeline is None:
        return [None]
    mine = plan.pipeline.stages_of(mesh.at["pp"])
    stages = [plan.pipeline.stages[i] for i in mine]
    return [range(stage.first, stage.end) for stage in stages]


def parallelize_model(model: nn.Module, job: Job, plan: Plan, mesh: Mesh, family: Family) -> None:
    """Lay out ``model`` (on the meta device) in place."""
    parallel, activation_checkpoint, compile = job.parallel, job.activation_checkpoint, job.compile
    blocks = family.blocks(model)
    # First what exchanges modules, which what comes after would be lost with.
    if plan.float8 != "none":
        matrices = find_float8_matrices(job.precision, plan.model, family, plan.tp)
        names = [matrix.name for matrix in matrices]
        apply_float8(model, plan.float8, names, plan.float8_emulated)
    sharding = family.sharding
    if job.lora.rank:
        apply_lora(model, blocks, job.lora, getattr(torch, plan.compute_dtype))
        sharding = add_adapter_sharding(sharding)
    # Then what cuts single operators: the rest wraps around whatever they are then.
    if plan.tp > 1:
        config: Any = plan.model
        apply_tensor_parallel(
            model,
            mesh.params["tp"],
            sharding,
            config.num_kv_heads,
            parallel.sequence_parallel,
        )
    routed = family.routed(model) if family.routed is not None else []
    if mesh.experts is not None:
        apply_expert_parallel([layer.experts for layer in routed], mesh.experts)
    if mesh.context is not None:
        apply_context_parallel(
            model,
            mesh.context,
            parallel.cp_method,
            parallel.cp_load_balance,
            compiled=compile.enable,
        )
    # What is recomputed is compiled with the rest, and FSDP gathers the parameters for it.
    apply_activation_checkpoint(blocks, activation_checkpoint, compile.enable)
    # The compiler must see those exchanges to overlap them, and must not see FSDP's hooks, which
    # sit outside of the compiled forward.
    if parallel.async_tp:
        enable_async_tp(mesh.group("tp"))
    if compile.enable:
        if plan.tp > 1:
            for block in blocks:
                materialize_local_weights(block)
        # Dynamo cannot follow the exchanges of a context, nor groups of a size that tokens decide;
        # what is around them is compiled.
        for layer in routed:
            layer.forward = torch.compiler.disable(layer.forward)  # type: ignore[no-untyped-call]
        apply_compile(blocks, compile.cache_dir, whole=mesh.context is None and not routed)
    if activation_checkpoint.offload:
        apply_activation_offload(blocks, activation_checkpoint.offload_prefetch)
    # Last, since it decides when parameters exist at all.  One rank in float32 is the plain
    # model: nothing to gather, nothing to cast.
    wrapped = plan.world_size > 1 or plan.compute_dtype != "float32" or parallel.cpu_offload
    if wrapped and not plan.canonical:
        apply_fsdp(
            model,
            blocks,
            mesh.params["dp_replicate", "dp_shard"],
            parallel,
            compute_dtype=getattr(torch, plan.compute_dtype),
            reduce_dtype=getattr(torch, plan.reduce_dtype),
            reshard_after_forward=plan.reshard_after_forward,
            node_size=plan.shard_ranks_per_node,
            experts=[layer.experts for layer in routed],
            expert_mesh=None if mesh.experts is None else mesh.experts["dp_replicate", "edp"],
        )
