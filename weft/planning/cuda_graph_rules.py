"""Rules for CUDA graphs: see `weft.parallel.cuda_graphs`."""

from __future__ import annotations

from collections.abc import Iterator

from weft.config.accelerators import supports
from weft.config.errors import ConfigErrors
from weft.config.schema import Job
from weft.models import Family
from weft.planning.degrees import ParallelDims

KEY = "compile.cuda_graphs"


def uses_cuda_graphs(job: Job, device: str) -> bool:
    """Return True if microbatches are replayed from CUDA graphs."""
    return job.compile.cuda_graphs and supports(device, "CUDA graphs")


def check_cuda_graphs(
    errors: ConfigErrors,
    job: Job,
    family: Family,
    device: str,
    degrees: ParallelDims,
    compute_dtype: str,
) -> None:
    """Check that forward and backward of a microbatch can be captured and replayed."""
    if not uses_cuda_graphs(job, device):
        return
    for key, value, rule, remedy in _obstacles(job, family, degrees, compute_dtype):
        remedy = f"use {remedy}, or {KEY}=false"
        errors.add(KEY, f"does not support {key}={value}: {rule}", remedy, (key,))


def _obstacles(
    job: Job, family: Family, degrees: ParallelDims, compute_dtype: str
) -> Iterator[tuple[str, object, str, str]]:
    """Yield a key, its value, why a graph cannot have it, and what to use."""
    parallel, has_experts = job.parallel, family.moe_layers is not None
    if degrees.pp > 1:
        rule = "the host runs the schedule of a pipeline"
        yield "parallel.pp", degrees.pp, rule, "parallel.pp=1"
    if has_experts and degrees.ep > 1 and parallel.ep_dispatch == "alltoall":
        rule = "the host reads the number of rows for each rank"
        yield "parallel.ep_dispatch", "alltoall", rule, "parallel.ep_dispatch=padded"
    if has_experts and compute_dtype != "bfloat16":
        rule = "grouped GEMMs in other dtypes read the numbers of tokens on the host"
        value = job.precision.compute_dtype
        yield "precision.compute_dtype", value, rule, "precision.compute_dtype=bfloat16"
    is_blockwise = degrees.cp > 1 and parallel.cp_method != "ulysses"
    if is_blockwise and job.data.keeps_documents:
        rule = "blocks of packed documents depend on their boundaries, which the host reads"
        yield "parallel.cp_method", parallel.cp_method, rule, "parallel.cp_method=ulysses"
    for name in ("async_tp", "symmetric_memory", "cpu_offload"):
        if getattr(parallel, name):
            rule = "the host takes part in its copies"
            if name != "cpu_offload":
                rule = "buffers of symmetric memory were not tried in graphs"
            yield f"parallel.{name}", "true", rule, f"parallel.{name}=false"
    if job.activation_checkpoint.offload:
        rule = "the host takes part in its copies"
        key = "activation_checkpoint.offload"
        yield key, "true", rule, f"{key}=false"
    if steps := job.debug.layer_stats_steps:
        rule = "a replay runs no hooks of layers"
        yield "debug.layer_stats_steps", steps, rule, 'debug.layer_stats_steps=""'
    if job.debug.autograd_anomaly:
        rule = "a replay runs no Python of the backward pass"
        yield "debug.autograd_anomaly", "true", rule, "debug.autograd_anomaly=false"
