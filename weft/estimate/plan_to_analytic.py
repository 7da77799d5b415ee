"""Convert a plan to the input of `weft.estimate.analytic`.

Arithmetic is thousands of times faster than a trace.  It ranks the candidates of a search and of
advice; weft reports traced numbers.  It supports Llama-like decoders with all parameters trained,
and leaves out Qwen3's norms of queries and keys.
"""

from __future__ import annotations

from typing import Literal

from weft.estimate.decoder import DecoderDims, Layout
from weft.models.llama import DecoderConfig
from weft.models.moe import MoeConfig
from weft.plan.devices import Device
from weft.plan.memory_formula import moment_bytes_per_param
from weft.plan.plan import Plan
from weft.train.loss import chunk_tokens

CheckpointMode = Literal["none", "selective", "block", "full"]


def decoder_dims(plan: Plan) -> DecoderDims | None:
    """Return the model's dimensions; None if it is not Llama-like or partly frozen."""
    config = plan.model
    dense = isinstance(config, DecoderConfig) and not isinstance(config, MoeConfig)
    if not dense or plan.num_trainable_params < plan.num_params:
        return None
    return DecoderDims(
        layers=config.num_layers,
        hidden=config.dim,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        ffn=config.ffn_dim,
        vocab=config.vocab_size,
        tied=config.tied_embeddings,
    )


def analytic_layout(plan: Plan, device: Device) -> Layout | None:
    """Return the plan's layout; None for a pipeline schedule from a file."""
    job = plan.job
    per_rank = 1
    if plan.pipeline is not None:
        if plan.pipeline.has_schedule_file:
            return None
        per_rank = len(plan.pipeline.stages) // plan.pp
    shards = plan.dp_shard * plan.cp
    zero = 0 if shards == 1 else 2 if plan.reshard_after_forward is False else 3
    accumulates_unsharded = (
        plan.gradient_sync == "step" and plan.num_microbatches > 1 and shards > 1
    )
    activation_checkpoint, part = checkpoint_mode(plan)
    tokens = plan.microbatch_size * plan.seq_len // plan.cp
    documents = job.data.keeps_documents
    return Layout(
        seq_len=plan.seq_len,
        microbatch=plan.microbatch_size,
        global_batch=plan.global_batch_size,
        dp_replicate=plan.dp_replicate,
        dp_shard=plan.dp_shard,
        tp=plan.tp,
        cp=plan.cp,
        pp=plan.pp,
        stages_per_rank=per_rank,
        schedule=plan.schedule_name,
        precision="bf16" if plan.float8 == "none" else "float8",
        activation_checkpoint=activation_checkpoint,
        activation_checkpoint_fraction=part,
        fusion="compiled" if plan.is_compiled else "eager",
        kernel="attention" if device.capability >= (9, 0) and not documents else "flash",
        zero=zero,
        sequence_parallel=plan.sequence_parallel,
        tp_overlap="async" if plan.async_tp else "exposed",
        gradient_bytes=4 if plan.reduce_dtype == "float32" else 2,
        state_bytes=8 + moment_bytes_per_param(plan.state_dtype, plan.cost),
        unsharded_bytes=4.0 if accumulates_unsharded and zero == 3 else 0.0,
        chunked_loss=chunk_tokens(tokens, plan.model.vocab_size // plan.tp) < tokens
        and plan.objective == "next_token",
        include_reserved=plan.device == "cuda",
    )


def checkpoint_mode(plan: Plan) -> tuple[CheckpointMode, float]:
    """Return the recompute mode and the fraction of blocks that it applies to."""
    mode, section = plan.activation_checkpoint, plan.job.activation_checkpoint
    if mode == "budget":
        return "block", 1 - section.memory_budget
    if mode == "full" and section.period > 1:
        return "block", 1 / section.period
    return mode, 1.0
