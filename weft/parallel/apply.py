"""Turn a single-device model into this rank's shard of it.

Models in `weft.models` have no process group and no parallel branch.  `parallelize_model` applies
every technique to them from outside, in place.  Each technique is a file or directory here, and the
comment at each step says why the step has this position.  `weft.training.setup` calls
`build_model_parts`, then allocates and initializes the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.models import Family
from weft.models.decoder import use_attention_kernels
from weft.models.family import TensorParallelSpec
from weft.parallel.activation_checkpoint import (
    apply_activation_checkpoint,
    selective_compile_options,
)
from weft.parallel.backend import DEVICE_BACKEND, Backend
from weft.parallel.compile import CompileOptions, apply_compile
from weft.parallel.context_parallel import apply_context_parallel
from weft.parallel.data_parallel import apply_fsdp
from weft.parallel.float8 import apply_float8, prepare_compiler
from weft.parallel.mesh import Mesh
from weft.parallel.mixed_precision import ComputeCopies
from weft.parallel.private import enable_async_tp
from weft.parallel.weight_gradients import add_inputs_to_compiled_block, defer_weight_gradients
from weft.planning.matrices import find_float8_matrices
from weft.planning.plan import Plan


def build_model_parts(
    plan: Plan, mesh: Mesh, family: Family, backend: Backend = DEVICE_BACKEND
) -> list[nn.Module]:
    """Build this rank's parallelized model parts on the meta device.

    Gradients are *summed* over the ranks that see different tokens, not averaged: the loss is
    already divided by the number of valid tokens of the step.

    Returns:
        One part per pipeline stage of this rank, or the one model if there is no pipeline.
        Parameters keep their names in the full model.
    """
    model_parts = []
    for units in _unit_ranges(plan, mesh):
        with torch.device("meta"):
            model = family.build(plan.model)
        if units is not None:
            assert family.prune_to_stage is not None
            family.prune_to_stage(model, units)
        if backend.attention is not DEVICE_BACKEND.attention:
            use_attention_kernels(model, backend.attention)
        parallelize_model(model, plan, mesh, family, backend)
        model_parts.append(model)
    return model_parts


def _unit_ranges(plan: Plan, mesh: Mesh) -> list[range | None]:
    """Return the units of each of this rank's stages; None stands for all units."""
    if plan.pipeline is None:
        return [None]
    stage_ids = plan.pipeline.stages_on_rank(mesh.coordinates["pp"])
    stages = [plan.pipeline.stages[i] for i in stage_ids]
    return [range(stage.first_unit, stage.end_unit) for stage in stages]


def parallelize_model(
    model: nn.Module, plan: Plan, mesh: Mesh, family: Family, backend: Backend = DEVICE_BACKEND
) -> None:
    """Apply the plan's techniques to ``model`` (on the meta device), in place.

    The order matters: each step wraps or changes the result of the steps before it.

    Techniques on DTensor are imported where they apply: its import takes half as long as torch's.
    """
    blocks = family.blocks(model)
    moe_layers = family.moe_layers(model) if family.moe_layers is not None else []

    # Float8 replaces linear modules.  It is first, because the new modules would lack the hooks,
    # classes and sharded weights that later steps add.
    float8_names: list[str] = []
    if plan.float8 != "none":
        matrices = find_float8_matrices(plan.precision, plan.model, family, plan.tp)
        float8_names = [matrix.name for matrix in matrices]
        if plan.is_compiled:
            prepare_compiler(plan.float8)
        if not plan.lora_rank:
            apply_float8(model, plan.float8, float8_names, plan.float8_emulated)

    # LoRA adds modules, which tensor parallelism and FSDP then shard like all others.
    sharding = _add_adapters(model, blocks, plan, float8_names, family.sharding)
    if plan.frozen_params:
        for name, param in model.named_parameters():
            param.requires_grad_(param.requires_grad and name not in set(plan.frozen_params))

    # Tensor, expert and context parallelism change single operators: their weights and their
    # collectives.  All later steps wrap whole blocks, and must wrap the changed operators.
    if plan.tp > 1:
        _shard_tensors(model, plan, mesh, sharding, moe_layers)
    has_parts = plan.is_compiled and plan.has_graph_breaks
    options = selective_compile_options(blocks, plan.activation_checkpoint) if has_parts else {}
    # After tensor parallelism, because it adds a placement on ep to the weight's placement on tp.
    if mesh.expert_mesh is not None and plan.ep > 1:
        _shard_experts([layer.experts for layer in moe_layers], plan, mesh.expert_mesh, options)
        # Experts run in their exchange.  If that is not compiled, shared experts stay outside of it
        # with the compiled block.
        for layer in moe_layers:
            layer.overlaps_shared_experts = plan.compiles_experts or not plan.is_compiled
    # After tensor parallelism, because the mask depends on the inputs that a rank has.
    if plan.numbers_tokens:
        _add_random_bits(model, blocks, plan, mesh, family)
    if mesh.cp_group is not None:
        apply_context_parallel(
            model,
            mesh.cp_group,
            plan.parallel.cp_method,
            plan.parallel.cp_split,
            compiled=plan.is_compiled,
            run_compiled=backend.run_compiled,
        )
    # After context parallelism, because both split the sequences that a router sees.
    _split_tokens_of_experts(moe_layers, plan, mesh)

    # After all that replaces linear layers.  Before the rest, which wraps their forward.
    if plan.splits_backward:
        defer_weight_gradients(model)

    # Before activation checkpointing, because dynamo skips a checkpointed function whose graph
    # breaks.  So the recomputation repeats the compiled code of a block.
    if has_parts:
        _compile_parts(blocks, moe_layers, plan, options)

    # Before FSDP, which then gathers the parameters for the recomputation.
    if not options:
        apply_activation_checkpoint(blocks, plan.activation_checkpoint, plan.is_compiled)

    # After tensor parallelism, because the compiler must see its collectives to overlap them with
    # matmuls.  After activation checkpointing, which then is part of the graph.  Before FSDP,
    # because FSDP's hooks must stay outside of the compiled forward.
    if plan.async_tp and plan.is_compiled:  # a traced step is not compiled
        enable_async_tp(mesh.get_group("tp"))
    if plan.is_compiled and not has_parts:
        _compile_blocks(blocks, plan)

    # After torch.compile, because offloading hooks the tensors that the compiled forward saves.
    if plan.activation_checkpoint.offload:
        from weft.parallel.activation_offload import apply_activation_offload

        apply_activation_offload(
            blocks, plan.activation_checkpoint.offload_prefetch, backend.empty_on_host
        )

    # FSDP is last: it replaces the parameters by shards and decides when they are gathered.
    if plan.uses_fsdp:
        expert_mesh = mesh.expert_mesh
        apply_fsdp(
            model,
            blocks,
            mesh.param_mesh["dp_replicate", "dp_shard"],
            plan.parallel,
            sums_in_order=plan.world_size_invariant,
            compute_dtype=getattr(torch, plan.compute_dtype),
            reduce_dtype=getattr(torch, plan.reduce_dtype),
            reshard_after_forward=plan.reshard_after_forward,
            node_size=plan.shard_ranks_per_node,
            experts=[layer.experts for layer in moe_layers],
            expert_mesh=None if expert_mesh is None else expert_mesh["dp_replicate", "efsdp"],
            units=None if family.fsdp_units is None else family.fsdp_units(model),
        )
    elif plan.compute_dtype != "float32":
        # As in FSDP's gathers, one scale per tensor applies to weights in float32.
        is_tensorwise = plan.float8 == "tensorwise" and not plan.lora_rank
        excluded = float8_names if is_tensorwise else []
        ComputeCopies(model, getattr(torch, plan.compute_dtype), excluded)


def _add_adapters(
    model: nn.Module, blocks: list[nn.Module], plan: Plan, float8_names: list[str], sharding: Any
) -> Any:
    """Apply LoRA, if there are adapters; return the extended table ``sharding``."""
    if not plan.lora_rank:
        return sharding
    from weft.parallel.lora import add_adapters

    return add_adapters(model, blocks, plan, float8_names, sharding)


def _add_random_bits(
    model: nn.Module, blocks: list[nn.Module], plan: Plan, mesh: Mesh, family: Family
) -> None:
    """Apply dropout of adapters and noise of embeddings."""
    from weft.parallel.token_keys import read_token_keys

    token_keys, tp_rank = read_token_keys(model, plan.seed), mesh.coordinates["tp"]
    if plan.lora_rank and (probability := plan.lora.dropout):
        from weft.parallel.lora import add_lora_dropout

        add_lora_dropout(model, blocks, probability, plan, tp_rank, token_keys)
    if plan.neftune_alpha:
        from weft.parallel.neftune import EmbeddingNoise

        assert family.set_embedding_noise is not None
        family.set_embedding_noise(model, EmbeddingNoise(token_keys, plan, tp_rank))


def _shard_tensors(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    sharding: Mapping[str, TensorParallelSpec],
    moe_layers: list[Any],
) -> None:
    from weft.parallel.tensor_parallel import apply_tensor_parallel

    if plan.etp < plan.tp:  # layers with experts do not gather the sequence
        names = (name for name, module in model.named_modules() if module in moe_layers)
        sharding = dict.fromkeys(names, TensorParallelSpec()) | dict(sharding)
    apply_tensor_parallel(
        model,
        mesh.param_mesh["tp"],
        sharding,
        plan.model,
        plan.sequence_parallel,
        gathers_float8=plan.float8 == "tensorwise",
        # One product costs a copy of the weights.  It pays if async TP then overlaps more.
        joint_products=plan.async_tp and not plan.splits_backward,
    )
    if plan.lora_rank and plan.lora.token_ids:
        from weft.parallel.lora import shard_token_rows

        shard_token_rows(model, mesh.param_mesh["tp"], plan.model.vocab_size)


def _split_tokens_of_experts(moe_layers: list[Any], plan: Plan, mesh: Mesh) -> None:
    if plan.etp < plan.tp:
        from weft.parallel.experts_without_tp import split_tokens

        split_tokens(moe_layers, mesh.get_group("tp"), plan.sequence_parallel)


def _shard_experts(
    experts: list[Any], plan: Plan, mesh: DeviceMesh, options: CompileOptions
) -> None:
    from weft.parallel.expert_parallel import apply_expert_parallel

    if plan.compiles_experts:  # for any number of rows
        cache_dir = plan.compile.cache_dir
        apply_compile(experts, cache_dir, fullgraph=False, dynamic=True, options=options)
    apply_expert_parallel(experts, mesh, plan.parallel)


def _compile_parts(
    blocks: Sequence[nn.Module], moe_layers: list[Any], plan: Plan, options: CompileOptions
) -> None:
    """Compile the parts of blocks whose graph breaks."""
    disable: Any = torch.compiler.disable
    experts = [layer.experts for layer in moe_layers]
    shared = [layer.shared_experts for layer in moe_layers if layer.overlaps_shared_experts]
    cache_dir = plan.compile.cache_dir
    apply_compile([layer for layer in shared if layer is not None], cache_dir, options=options)
    for module in experts if plan.ep > 1 or not plan.compiles_experts else ():
        module.forward = disable(module.forward)
        if module in options and not plan.compiles_experts:  # the compiler cannot select for them
            apply_activation_checkpoint([module], plan.activation_checkpoint, compiled=False)
            module.forward = disable(module.forward)
    _compile_blocks(blocks, plan, options, () if plan.compiles_experts else experts)


def _compile_blocks(
    blocks: Sequence[nn.Module],
    plan: Plan,
    options: CompileOptions | None = None,
    experts: Sequence[nn.Module] = (),
) -> None:
    """Compile the blocks, except ``experts``."""
    cache_dir, fullgraph = plan.compile.cache_dir, not plan.has_graph_breaks
    apply_compile(blocks, cache_dir, fullgraph=fullgraph, options=options)
    for block in blocks:
        add_inputs_to_compiled_block(block)
    if plan.tp > 1 or plan.ep > 1:
        from weft.parallel.tensor_parallel import materialize_local_weights

        for block in blocks:
            materialize_local_weights(block, experts)
