"""Reduce a plan to a step that is cheap to record.

The reduced plan has few blocks per stage, few microbatches and few kinds of stages.
`weft.estimate.trace` records it, and `weft.estimate.extrapolate` builds the full step from it.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

from weft.config.axes import SHARD_AXES
from weft.config.schema import replace as replace_sections
from weft.planning.placement import count_ranks
from weft.planning.plan import Plan, Stage


def make_traceable(plan: Plan, device: str) -> Plan:
    """Return a plan that fake tensors can trace, with equivalent work on ``device``.

    A compiled block does the work of an eager one.  On GPUs the attention kernel separates
    documents without additional memory.
    """
    job = plan.job
    changes: dict[str, dict[str, object]] = {
        "compile": {"enable": False},
        "parallel": {"symmetric_memory": False},
    }
    if job.parallel.ep_padding == 1:  # all others exchange as many tokens
        changes["parallel"]["ep_dispatch"] = "alltoall"
    if device != "cpu":
        changes["data"] = {"packing": "windows"}
        if job.data.format == "chat":
            changes["data"]["format"] = "text"
    if plan.cp > 1 and job.parallel.cp_method != "ulysses":  # the blocks of one document
        plan = replace(plan, varlen_documents=False)
    return replace(plan, job=replace_sections(job, **changes))


def find_layer_pattern(plan: Plan) -> tuple[int, int]:
    """Return the number of irregular first blocks, and the period of the others."""
    kind = plan.family.layer_kind
    if kind is None and not plan.frozen_params:
        return 0, 1
    layers = range(plan.model.num_layers)
    kinds = tuple(kind(plan.model, layer) if kind else None for layer in layers)
    return _find_pattern(kinds, plan.frozen_params)


@cache  # a search asks for the pattern of its model thousands of times
def _find_pattern(
    layer_kinds: tuple[object, ...], frozen_params: tuple[str, ...]
) -> tuple[int, int]:
    # A block is of another kind if other parameters of it are frozen.
    frozen: list[set[str]] = [set() for _ in layer_kinds]
    for name in frozen_params:
        if match := re.match(r"layers\.(\d+)\.", name):
            frozen[int(match[1])].add(name[match.end() :])
    kinds = list(zip(layer_kinds, frozen, strict=True))
    patterns = [
        (first, period)
        for first in range(len(kinds))
        for period in range(1, len(kinds) - first + 1)
        if kinds[first : len(kinds) - period] == kinds[first + period :]
    ]
    return min(patterns, key=lambda pattern: pattern[0] + 2 * pattern[1])


def shrink_plan(plan: Plan, max_groups: int | None, group_size: int, max_microbatches: int) -> Plan:
    """Return a plan with few block groups per stage and few microbatches.

    The last group takes the remaining blocks.  The first block of each stage keeps its place in a
    group, and so its place in a pattern of blocks.

    Args:
        plan: the full plan.
        max_groups: the most groups per stage; None: all.
        group_size: number of blocks in a group.
        max_microbatches: the most microbatches.
    """
    if not hasattr(plan.model, "num_layers"):
        return plan  # a user's family may count its blocks differently

    def recorded_blocks(blocks: int) -> int:
        if max_groups is None:
            return blocks
        return min(blocks, max_groups * group_size + blocks % group_size)

    microbatches = min(plan.num_microbatches, max_microbatches)
    num_sequences = (
        plan.local_batch_size - (plan.num_microbatches - microbatches) * plan.microbatch_size
    )
    plan = replace(plan, num_microbatches=microbatches, local_batch_size=num_sequences)
    if plan.pipeline is None:
        layers = recorded_blocks(plan.model.num_layers)
    else:
        stages, first, last = [], 0, plan.model.num_layers + 1
        for stage in plan.pipeline.stages:
            blocks = recorded_blocks(stage.num_blocks)
            end = first + blocks + (0 in stage.units) + (last in stage.units)
            stages.append(replace(stage, first_unit=first, end_unit=end, num_blocks=blocks))
            first = end
        layers = first - 2
        plan = replace(plan, pipeline=replace(plan.pipeline, stages=tuple(stages)))
    return replace(plan, model=plan.model.model_copy(update={"num_layers": layers}))


def reshards_stages(plan: Plan) -> bool:
    """Return True if PyTorch's pipeline runtime reshards whole stages.

    The order of actions then decides when it gathers them.
    """
    if plan.pipeline is None or plan.reshard_after_forward is False:
        return False
    shards = count_ranks(plan.axis_sizes, SHARD_AXES)
    return max(Counter(plan.pipeline.stage_ranks).values()) > 3 and shards > 1


def fold_stages(plan: Plan) -> tuple[Plan, list[int]] | None:
    """Return a plan whose first rank has one stage of each kind, and a kind per stage.

    The kinds are the first stage, the last one, and middle ones by number of blocks.  Other ranks
    hold the stages between them.  Return None if each rank has one stage, if neighboring stages
    share a rank, if a stage's work depends on the other stages, if blocks differ, or with tied
    embeddings, whose two copies cost less on one rank.
    """
    pipeline = plan.pipeline
    if pipeline is None or len(pipeline.stages) == plan.pp or plan.optimizer != "adamw":
        return None
    if any(a == b for a, b in itertools.pairwise(pipeline.stage_ranks)) or reshards_stages(plan):
        return None
    if plan.tied_ranks is not None or find_layer_pattern(plan) != (0, 1):
        return None
    kinds: dict[object, int] = {}
    stages: list[Stage] = []
    source_stages, first, last = [], 0, plan.model.num_layers + 1
    for stage in pipeline.stages:
        ends = (0 in stage.units) + (last in stage.units)
        kind = stage.num_blocks, 0 in stage.units, last in stage.units
        source_stages.append(kinds.setdefault(kind, len(kinds)))
        if source_stages[-1] * plan.pp < len(stages):
            continue  # this kind is recorded
        while len(stages) % plan.pp:
            stages.append(replace(stage, first_unit=first, end_unit=first + 1, num_blocks=1))
            first += 1
        stages.append(replace(stage, first_unit=first, end_unit=first + stage.num_blocks + ends))
        first = stages[-1].end_unit
    ranks = tuple(index % plan.pp for index in range(len(stages)))
    in_flight = (plan.num_microbatches,) * len(stages)
    pipeline = replace(pipeline, stages=tuple(stages), stage_ranks=ranks, in_flight=in_flight)
    model = plan.model.model_copy(update={"num_layers": first - 2})
    folded = replace(plan, pipeline=pipeline, model=model)
    return None if reshards_stages(folded) else (folded, source_stages)


def use_sequential_schedule(plan: Plan, split_backward: bool, directory: Path) -> Plan:
    """Return a plan that runs one microbatch after the other.

    Such a schedule allows any number of microbatches.

    Args:
        plan: has a pipeline.
        split_backward: split backward passes into halves.
        directory: for the schedule's file.
    """
    pipeline = plan.pipeline
    assert pipeline is not None
    if len(set(pipeline.stage_ranks)) == len(pipeline.stages) and not pipeline.has_schedule_file:
        return replace(plan, pipeline=replace(pipeline, schedule="GPipe"))
    lines = []
    for rank in range(plan.pp):
        stages = pipeline.stages_on_rank(rank)
        cells = []
        for microbatch in range(plan.num_microbatches):
            cells += [f"{stage}F{microbatch}" for stage in stages]
            for stage in reversed(stages):
                kinds = "IW" if split_backward else "B"
                cells += [f"{stage}{kind}{microbatch}" for kind in kinds]
        lines.append(",".join(cells))
    path = directory / "order.csv"
    path.write_text("\n".join(lines) + "\n")
    return replace(plan, pipeline=replace(pipeline, schedule=str(path)))
