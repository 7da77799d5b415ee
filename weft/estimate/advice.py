"""Suggest changes of a recipe that make it fit or make it faster.

Traced blocks (`weft.estimate.pieces`) estimate the relative effect of a change, of one key or of
several that belong together, and the traced numbers are scaled by it.  The error is usually below
5 %.  That is too much for a plan that does not fit: every suggestion is then traced, and those that
do not fit are dropped.  A recording of blocks takes half a second, so a change of a plan that fits
is not estimated if the floor of its time (`Pieces.floor_seconds`) is no speedup.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from weft.config.errors import InvalidConfig
from weft.config.schema import Job
from weft.config.schema import replace as replace_sections
from weft.estimate.cost import build_hardware
from weft.estimate.forecast import Forecast, forecast
from weft.estimate.pieces import Pieces, supports_pieces
from weft.planning.devices import Device, linked_devices
from weft.planning.matrices import supports_float8
from weft.planning.optim_rules import WEFT_OPTIMIZERS
from weft.planning.plan import Machine, Plan
from weft.planning.resolve import resolve

# A change with a smaller speedup is not listed.
MIN_SPEEDUP = 0.02
MAX_ADVICE = 3

# Keys with their values, in display order.
Change = dict[str, Any]


@dataclass(frozen=True)
class Advice:
    """A change of a recipe, and its effect.

    ``speedup``: relative, 0.2 is 20 % faster.  ``memory_bytes``: needed per device.  ``is_traced``:
    the numbers come from a trace of the step, not from those of blocks.
    """

    change: Change
    speedup: float
    memory_bytes: float
    is_traced: bool = False

    def __str__(self) -> str:
        return " ".join(
            f"--{key} {str(value).lower() if isinstance(value, bool) else value}"
            for key, value in self.change.items()
        )


def advise(
    plan: Plan, machine: Machine, device: Device, prediction: Forecast, cached: bool = False
) -> list[Advice]:
    """Return the best changes: the fastest that fit, or the cheapest that make it fit.

    The changes for a plan that does not fit were traced, and fit.  The list is empty if nothing
    helps, and for models that are not decoders of weft's.  ``cached``: keep traces on disk.
    """
    if not supports_pieces(plan):
        return []
    job = plan.job
    # Keep the number of ranks, so that a change is not credited with additional ranks.
    local = plan.local_world_size
    machine = replace(machine, world_size=plan.world_size, local_world_size=local)
    pieces, hardware = Pieces(device, cached), build_hardware(plan, device)

    def estimate(plan: Plan) -> tuple[float, float]:
        result = pieces.estimate(plan)
        return result.step_seconds(hardware).total(), result.memory_bytes()

    baseline = estimate(plan)
    partners: list[Change] = []  # that do not fit alone, and were not estimated
    fits = prediction.fits is not False

    def evaluate(changes: Iterator[Change]) -> list[Advice]:
        results = []
        for change in changes:
            try:
                changed = resolve(apply_change(job, change), machine)
                if not supports_pieces(changed):
                    continue
                states = pieces.state_bytes(changed)
                if states > (prediction.capacity_bytes or math.inf):  # whatever its blocks need
                    if states <= pieces.state_bytes(plan):
                        partners.append(change)
                    continue
                limit = (1 + MIN_SPEEDUP) * pieces.floor_seconds(changed, hardware)
                if fits and limit > baseline[0]:
                    continue
                seconds, size = estimate(changed)
            except (InvalidConfig, ValueError):
                continue
            needed = (prediction.needed_bytes - prediction.outside_bytes) * size / baseline[1]
            needed += prediction.outside_bytes
            results.append(Advice(change, baseline[0] / seconds - 1, needed))
        # Among equally fast changes, fewer keys come first, then the earlier candidate.
        return sorted(results, key=lambda a: (-round(a.speedup, 3), len(a.change)))

    single_changes = evaluate(candidate_changes(plan, machine))
    if fits:
        capacity = prediction.capacity_bytes or math.inf
        fitting = [a for a in single_changes if a.memory_bytes <= capacity]
        return _drop_supersets([a for a in fitting if a.speedup >= MIN_SPEEDUP])[:MAX_ADVICE]
    saving = [a.change for a in single_changes if a.memory_bytes < prediction.needed_bytes]
    saving += partners
    pairs = (a | b for a, b in itertools.combinations(saving, 2) if not a.keys() & b.keys())
    select = partial(_select_fitting, job, machine, device, prediction, cached)
    return select(single_changes) or select(evaluate(pairs))


def candidate_changes(plan: Plan, machine: Machine) -> Iterator[Change]:
    """Yield single changes to evaluate."""
    job = plan.job
    for kind in ("none", "selective", "full"):
        change = checkpoint_change(job, kind)
        if kind != plan.activation_checkpoint.mode or len(change) > 1:
            yield change
    microbatch_size = plan.microbatch_size
    for size in sorted(
        {4 * microbatch_size, 2 * microbatch_size, microbatch_size // 2, microbatch_size // 4, 1}
        - {0, microbatch_size}
    ):
        if plan.local_batch_size % size == 0:
            yield {"train.microbatch_size": size}
    # Float8 is fast only if the compiler fuses casts; async TP needs the compiler.
    compiled: Change = {} if plan.is_compiled else {"compile.enable": True}
    if compiled:
        yield compiled
    if plan.float8 == "none" and can_use_float8(plan, machine):
        yield compiled | {"precision.float8": "tensorwise"}
    if plan.tp > 1 and not plan.async_tp:
        yield compiled | {"parallel.async_tp": True}
    if plan.pipeline is not None:
        for schedule in ("Interleaved1F1B", "1F1B"):
            if schedule != plan.schedule_name:
                stages_per_rank = job.pipeline.stages_per_rank
                stages = {} if stages_per_rank == "auto" else {"pipeline.stages_per_rank": "auto"}
                yield {"pipeline.schedule": schedule} | stages
    elif plan.dp_shard > 1 and job.parallel.cp == 1:
        keeps_unsharded = plan.reshard_after_forward is False
        yield {"parallel.reshard_after_forward": "always" if keeps_unsharded else "never"}
    if plan.lora_rank and plan.lora.quantize == "none":
        yield {"lora.quantize": "nf4"}
    if plan.optimizer in WEFT_OPTIMIZERS and not plan.lora_rank:
        smaller_dtypes = {"float32": ("bfloat16", "8bit"), "bfloat16": ("8bit",)}
        for dtype in smaller_dtypes.get(plan.state_dtype, ()):
            yield {"optim.state_dtype": dtype}
    yield from mesh_changes(plan, linked_devices(machine, plan.local_world_size))
    if plan.model.num_experts:
        yield from expert_changes(plan, linked_devices(machine, plan.local_world_size))


def checkpoint_change(job: Job, mode: str) -> Change:
    """Return the change to a mode of activation checkpointing for every block."""
    change: Change = {"activation_checkpoint.mode": mode}
    if job.activation_checkpoint.every_n_layers > 1:
        change["activation_checkpoint.every_n_layers"] = 1
    return change


def mesh_changes(plan: Plan, max_tp: int) -> Iterator[Change]:
    """Yield other degrees of one axis; the remaining ranks shard the parameters."""
    job = plan.job
    auto_shard: Change = {} if job.parallel.dp_shard == "auto" else {"parallel.dp_shard": "auto"}
    if plan.dp_replicate > 1:
        yield {"parallel.dp_replicate": 1} | auto_shard
    limits = {"tp": max_tp, "pp": 64, "cp": plan.seq_len // 8192}
    for axis, limit in limits.items():
        degree = plan.axis_sizes[axis]
        for other in sorted({1, degree // 2, 2 * degree, 4 * degree} - {0, degree}):
            if other <= max(1, limit):
                auto_reshard = {"parallel.reshard_after_forward": "auto"} if axis == "pp" else {}
                yield (
                    {f"parallel.{axis}": other}
                    | auto_shard
                    | (auto_reshard if job.parallel.reshard_after_forward != "auto" else {})
                )


def expert_changes(plan: Plan, linked: int) -> Iterator[Change]:
    """Yield other degrees of expert parallelism, and exchanges in chunks."""
    for degree in sorted({1, plan.ep // 2, 2 * plan.ep, linked} - {0, plan.ep}):
        yield {"parallel.ep": degree}
    if plan.ep > 1:
        for chunks in {1, 2} - {plan.parallel.ep_chunks}:
            yield {"parallel.ep_chunks": chunks}


def can_use_float8(plan: Plan, machine: Machine) -> bool:
    """Return True if a plan in bfloat16 could also multiply in float8 on its devices."""
    is_bfloat16 = plan.compute_dtype == "bfloat16"
    return is_bfloat16 and supports_float8("tensorwise", machine.capability)


def apply_change(job: Job, change: Change) -> Job:
    """Return the job with a change.

    Raises:
        ValueError: if a value is out of bounds.
    """
    sections: dict[str, dict[str, Any]] = {}
    for key, value in change.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return replace_sections(job, **sections)


def _with_trace(advice: Advice, prediction: Forecast, new_prediction: Forecast) -> Advice:
    updated = replace(advice, memory_bytes=new_prediction.needed_bytes, is_traced=True)
    if prediction.step_seconds is None or new_prediction.step_seconds is None:
        return updated
    return replace(updated, speedup=prediction.step_seconds / new_prediction.step_seconds - 1)


def _select_fitting(
    job: Job,
    machine: Machine,
    device: Device,
    prediction: Forecast,
    cached: bool,
    advice_list: list[Advice],
) -> list[Advice]:
    """Return the changes that fit according to a trace of each, the fastest first."""
    assert prediction.capacity_bytes is not None
    fitting = _drop_supersets(
        [advice for advice in advice_list if advice.memory_bytes <= prediction.capacity_bytes]
    )
    traced: list[Advice] = []
    for advice in fitting[: 2 * MAX_ADVICE]:
        new_job = apply_change(job, advice.change)
        new_prediction = forecast(resolve(new_job, machine), machine, device, cached)
        if new_prediction.fits:
            traced.append(_with_trace(advice, prediction, new_prediction))
            if len(traced) == MAX_ADVICE:
                break
    # Equally fast as far as the text shows: the gentler candidate, which formulas rank first.
    return sorted(traced, key=lambda advice: -round(advice.speedup, 2))


def _drop_supersets(advice_list: list[Advice]) -> list[Advice]:
    """Drop changes that contain an earlier change."""
    distinct: list[Advice] = []
    for advice in advice_list:
        if not any(better.change.items() <= advice.change.items() for better in distinct):
            distinct.append(advice)
    return distinct
