"""Run one fake rank of every shipped recipe at full scale, up to 16,384 ranks.

The rank builds its part of the model, shards it and trains one step with the training code.
The tests compare its shards with the shapes in `HELD`, and its collectives with counts that follow
from the layout.  Widths, degrees and world size are those of the recipe.  Layers and microbatches
are few; the slow tests have all layers.
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.fake import counted_step
from tests.harness import run_ranks
from tests.small import plan_here, sized_recipes, small_job, this_rank
from weft.checkpoint.state_dict import trainable_parameters
from weft.config.axes import AXES
from weft.config.reader import RECIPES
from weft.config.schema import Job
from weft.estimate.private_trace import clear_mesh_cache
from weft.estimate.trace import axis_groups, build_fake, fake_world
from weft.models import load_family
from weft.planning.placement import coordinates_to_rank, rank_groups, rank_to_coordinates
from weft.planning.plan import Machine, Plan
from weft.planning.plan_text import plan_recipe
from weft.training.loss import chunk_tokens
from weft.training.setup import build

Overrides = list[tuple[str, str]]

EAGER = [("compile.enable", "false"), ("precision.float8", "none")]
# Few microbatches for every recipe, with all layers.
BRIEF: dict[str, Overrides] = {
    "demo": [("run.nproc_per_node", "4")],
    "paper/llama3-8b": [("train.global_batch_size", "256")],
    "paper/llama3-70b": [("train.global_batch_size", "64"), ("train.microbatch_size", "1")],
    "paper/llama3-405b": [("train.global_batch_size", "32")],
    "paper/llama3-405b-16k": [("train.global_batch_size", "256")],
    "paper/llama3-405b-128k": [("train.global_batch_size", "16")],
    "three-servers": [("train.global_batch_size", "24"), *EAGER],
    "three-servers-small": [("train.global_batch_size", "6")],
}
# The fewest layers that give a block to every rank.
TWO_STAGES = ("pipeline.stages_per_rank", "2")
SHALLOW: dict[str, Overrides] = {
    "demo": [("model.num_layers", "2")],
    "paper/llama3-8b": [("model.num_layers", "2")],
    "paper/llama3-70b": [("model.num_layers", "2")],
    "paper/llama3-405b": [("model.num_layers", "14")],
    "paper/llama3-405b-16k": [("model.num_layers", "30"), TWO_STAGES],
    "paper/llama3-405b-128k": [("model.num_layers", "30"), TWO_STAGES],
    "three-servers": [("model.num_layers", "6")],
    "three-servers-small": [("model.num_layers", "6")],
}

# World size, and local shapes in the order of `WEIGHTS`: rows of a weight sharded by outputs, rows
# and columns of a weight sharded by inputs.
WEIGHTS = ("q_proj", "k_proj", "o_proj", "up_proj", "down_proj", "norm", "embed_tokens", "lm_head")
OF_405B_OVER_16 = [128, 8, (1024, 2048), 416, (1024, 6656), 1024, 1002, 1002]
HELD: dict[str, tuple[int, list[Any]]] = {
    "demo": (4, [48, 16, (48, 192), 128, (48, 512), 48, 1024, 0]),
    "paper/llama3-8b": (128, [32, 8, (32, 4096), 112, (32, 14336), 32, 1002, 1002]),
    "paper/llama3-70b": (256, [32, 4, (256, 1024), 112, (256, 3584), 256, 501, 501]),
    "paper/llama3-405b": (512, [256, 16, (2048, 2048), 832, (2048, 6656), 2048, 2004, 2004]),
    "paper/llama3-405b-16k": (16384, OF_405B_OVER_16),
    "paper/llama3-405b-128k": (16384, OF_405B_OVER_16),
    "three-servers": (96, [2048, 256, (8192, 2048), 7168, (8192, 7168), 8192, 32064, 32064]),
    "three-servers-small": (24, [24, 24, (96, 24), 64, (96, 64), 96, 128, 128]),
}


def planned(recipe: str, overrides: Overrides) -> tuple[Job, Plan]:
    plan, _ = plan_recipe(recipe, overrides, [], None, lambda device: Machine("cpu", devices=4))
    return plan.job, plan


def rank_at(plan: Plan, placement: str) -> int:
    """Return the rank with the first, middle or last index on every axis."""
    share = {"first": 0.0, "middle": 0.5, "last": 0.99999}[placement]
    at = {axis: int(size * share) for axis, size in plan.axis_sizes.items()}
    return coordinates_to_rank(at, plan.axis_sizes, plan.axis_order)


# --------------------------------------------------------------------------- one step


PLACEMENTS = ("first", "middle", "last")
# Without a pipeline one position is enough. The 405B recipes have the same stages, and so have
# three-servers and three-servers-small.
OFTEN = {
    ("demo", "first"),
    ("paper/llama3-70b", "middle"),
    ("paper/llama3-405b", "last"),
    ("paper/llama3-405b-128k", "middle"),
    ("three-servers-small", "last"),
}


@pytest.mark.parametrize(
    ("recipe", "placement"),
    [
        pytest.param(recipe, where, marks=[] if (recipe, where) in OFTEN else [pytest.mark.slow])
        for recipe in HELD
        for where in PLACEMENTS
    ],
)
def test_step_of_a_recipe_has_the_expected_collectives(recipe: str, placement: str) -> None:
    one_step(recipe, placement, BRIEF[recipe] + SHALLOW[recipe])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("recipe", HELD)
def test_step_of_a_recipe_in_full_depth_has_the_expected_collectives(
    recipe: str, placement: str
) -> None:
    one_step(recipe, placement, BRIEF[recipe])


def test_every_recipe_extends_a_tested_one() -> None:
    """Every other recipe extends one of these, or trains by FSDP as `paper/llama3-8b`."""
    assert set(HELD) == set(BRIEF) == set(SHALLOW)
    for recipe in set(sized_recipes()) - set(HELD):
        base = recipe
        while base not in {*HELD, "chat", "llama3-8b"}:
            base = tomllib.loads((RECIPES / f"{base}.toml").read_text())["extends"]


def one_step(recipe: str, placement: str, overrides: Overrides) -> None:
    job, plan = planned(recipe, overrides)
    assert plan.world_size == HELD[recipe][0]
    rank = rank_at(plan, placement)
    at = rank_to_coordinates(rank, plan.axis_sizes, plan.axis_order)
    with fake_world(rank, plan.world_size) as recorder:
        built, on_cpu = build_fake(plan, recorder)
        check_groups(plan, rank, axis_groups(built.mesh))
        params = dict(trainable_parameters(built.model_parts))
        for name, param in params.items():
            check_weight(recipe, plan, name, param)
        blocks = {name.split(".")[1] for name in params if name.startswith("layers.")}
        assert len(blocks) == counts_of_units(plan, at["pp"])["blocks"]
        train, clip, update = counted_step(built, job, on_cpu, recorder)
        regathers = count_regathers(built.train_step.schedule, plan, at["pp"])
        assert train == expected_in_training(
            plan, at["pp"], regathers, job.activation_checkpoint.every_n_layers
        )
        assert clip == expected_in_clipping(plan)
        assert not update


def check_groups(plan: Plan, rank: int, created: dict[str, dist.ProcessGroup]) -> None:
    """Check that the process groups are those of the plan."""
    axes: dict[str, tuple[str, ...]] = {axis: (axis,) for axis in AXES}
    axes["dp_shard"] = ("dp_shard", "cp")
    assert set(created) == {axis for axis in AXES if axis != "cp" or plan.cp > 1}
    for axis, group in created.items():
        (ranks,) = (
            g for g in rank_groups(axes[axis], plan.axis_sizes, plan.axis_order) if rank in g
        )
        assert dist.get_process_group_ranks(group) == sorted(ranks), axis


def check_weight(recipe: str, plan: Plan, name: str, param: torch.Tensor) -> None:
    """Check the local shape, and the placements on dp_replicate, dp_shard and tp."""
    assert isinstance(param, DTensor)
    expected = dict(zip(WEIGHTS, HELD[recipe][1], strict=True))
    alike = {"v_proj": "k_proj", "gate_proj": "up_proj"}
    module = name.split(".")[-2]
    module = "norm" if module.endswith("norm") else alike.get(module, module)
    rows = expected[module]
    local = tuple(param.to_local().shape)
    assert local == (rows if isinstance(rows, tuple) else (rows, *param.shape[1:])), name

    placements = [str(placement) for placement in param.placements]
    if plan.dp_replicate > 1:
        assert placements.pop(0) == "R"
    if plan.tp == 1:
        assert placements == ["S(0)"], name
        return
    by_tp = {"norm": "R", "o_proj": "S(1)", "down_proj": "S(1)"}.get(module, "S(0)")
    assert placements[1] == by_tp, name
    # If both shard one dim, FSDP shards after tp, although its axis comes first.
    assert placements[0].startswith("_S(0, " if by_tp == "S(0)" else "S(0)"), name


def counts_of_units(plan: Plan, pp: int, interval: int = 1) -> Counter[str]:
    """Count the units of a pipeline rank.

    ``again`` counts recomputed blocks: the first of each ``interval`` in a stage.  ``ends`` counts
    what FSDP gathers beside them: embedding and head, or a tied embedding with the norm.
    """
    last = plan.model.num_layers + 1
    if plan.pipeline is None:
        stages = [range(last + 1)]
    else:
        stages = [plan.pipeline.stages[s].units for s in plan.pipeline.stages_on_rank(pp)]
    result: Counter[str] = Counter(stages=len(stages))
    for units in stages:
        ends = (0 in units) + (last in units)
        result.update(blocks=len(units) - ends, embed=0 in units, head=last in units)
        result.update(again=-(-(len(units) - ends) // interval))
        result.update(ends=min(ends, 1) if plan.model.tied_embeddings else ends)
    return result


def count_regathers(schedule: Any, plan: Plan, pp: int) -> int:
    """Count the gathers of stages that the schedule resharded.

    With more than three stages, torch's runtime keeps only the next stages gathered.
    """
    order = getattr(schedule, "pipeline_order_with_comms", {pp: []})[pp]
    kind = [(action.computation_type.name, action.stage_index) for action in order]
    freed = Counter(stage for name, stage in kind if name == "UNSHARD")
    assert all(times == 1 for times in freed.values()) or len(freed) > 3
    stages = plan.pipeline.stages if plan.pipeline else ()
    return sum((times - 1) * len(stages[stage].units) for stage, times in freed.items())


def expected_in_training(plan: Plan, pp: int, regathers: int, interval: int) -> dict[str, int]:
    """Return the collectives of all forward and backward passes.

    ``regathers``: gathers that the schedule adds to those of FSDP.  Recipes with tensor
    parallelism recompute the first of each ``interval`` blocks.
    """
    holds, microbatches = counts_of_units(plan, pp, interval), plan.num_microbatches
    blocks, ends = holds["blocks"], holds["ends"]
    units = blocks + ends
    per_step = microbatches if plan.gradient_sync == "microbatch" else 1
    counts: Counter[str] = Counter()
    # The number of target tokens is summed over all data-parallel ranks.
    counts.update({"all_reduce dp_shard": 1, "all_reduce dp_replicate": 1})
    # FSDP gathers for forward and for backward, unless weights stay gathered, as at both ends.
    # Gradients are reduce-scattered over shards, then all-reduced over replicas.
    gathers = 2 * microbatches if plan.reshard_after_forward else 1
    counts["all_gather dp_shard"] = blocks * gathers + ends + regathers
    counts["reduce_scatter dp_shard"] = units * per_step
    counts["all_reduce dp_replicate"] += units
    # Tensor parallel: before and after attention and feed-forward, after the embedding, before the
    # head; backward has the opposite collectives.  Gradients of norm weights are partial sums.
    exchanges = 4 * blocks + holds["embed"] + holds["head"]
    # A recomputed block gathers twice more and scatters once more: its output is not needed.
    recomputed = holds["again"] * (plan.tp > 1)
    counts["all_gather tp"] = (exchanges + 2 * recomputed) * microbatches
    counts["reduce_scatter tp"] = (exchanges + recomputed) * microbatches
    counts["all_reduce tp"] = (2 * blocks + holds["head"]) * per_step
    # The loss, in chunks of tokens: one reduction of maxima, one of sums and target logits.
    tokens = plan.tokens_per_step // plan.dp_size // microbatches // plan.cp
    vocab_size = plan.model.vocab_size // plan.tp
    chunks = -(-tokens // chunk_tokens(tokens, vocab_size, plan.is_compiled))
    counts["all_reduce tp"] += 2 * holds["head"] * microbatches * chunks
    # Context parallel gathers keys and values in forward, and again in backward.
    counts["all_gather cp"] = (2 * blocks + recomputed) * microbatches
    counts["reduce_scatter cp"] = blocks * microbatches
    # Pipeline: a stage sends activations forward and gradients back; the ends have one neighbor.
    handed = microbatches * (2 * holds["stages"] - holds["embed"] - holds["head"])
    counts["send pp"] = counts["recv pp"] = handed
    return collectives_by_axis(plan, counts)


def expected_in_clipping(plan: Plan) -> dict[str, int]:
    """Return the sums of squares over shards; with tp, norm weights have a separate sum."""
    counts = Counter({"all_reduce dp_shard": 1 + (plan.tp > 1), "all_reduce tp": 1})
    counts["all_reduce pp"] = 1
    return collectives_by_axis(plan, counts)


def collectives_by_axis(plan: Plan, counts: Counter[str]) -> dict[str, int]:
    """Remove collectives over axes of one rank."""
    sizes = plan.axis_sizes | {"dp_shard": plan.dp_shard * plan.cp}
    return {name: n for name, n in counts.items() if n and sizes[name.split()[1]] > 1}


# --------------------------------------------------------------------------- all weights


# Recipes with the same shards as another are left out; each of 16,384 ranks has two stages.
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, marks=[pytest.mark.slow] if recipe == "paper/llama3-405b-16k" else [])
        for recipe in sorted({*HELD} - {"paper/llama3-405b-128k", "three-servers-small"})
    ],
)
def test_every_weight_is_held_once(recipe: str) -> None:
    """One rank per pipeline stage: together they hold each weight once."""
    job, plan = planned(recipe, SHALLOW[recipe])
    family = load_family(job.model.kind)
    with torch.device("meta"):
        full = {name: p.shape for name, p in family.build(plan.model).named_parameters()}
    elements: dict[str, int] = {}
    for pp in range(plan.pp):
        # Other indices on the other axes for each pipeline rank.
        at = {axis: 5 * pp % size for axis, size in plan.axis_sizes.items()} | {"pp": pp}
        rank = coordinates_to_rank(at, plan.axis_sizes, plan.axis_order)
        with fake_world(rank, plan.world_size) as recorder:
            built, _ = build_fake(plan, recorder)
            for name, param in trainable_parameters(built.model_parts):
                assert isinstance(param, DTensor)
                assert name not in elements
                assert param.shape == full[name]
                elements[name] = param.to_local().numel() * shards(param)
    assert elements == {name: math.prod(shape) for name, shape in full.items()}
    assert sum(elements.values()) == plan.num_params


def shards(param: DTensor) -> int:
    """Return the number of ranks that shard a weight."""
    mesh = param.device_mesh
    cut = [axis for axis, p in enumerate(param.placements) if not p.is_replicate()]
    return math.prod(mesh.size(axis) for axis in cut)


def test_ranks_of_a_replica_hold_the_model_once() -> None:
    """All 24 ranks hold the model once; only norm weights are replicated over tp."""
    _job, plan = planned("three-servers-small", SHALLOW["three-servers-small"])
    held = copies = 0
    for rank in range(plan.world_size):
        with fake_world(rank, plan.world_size) as recorder:
            built, _ = build_fake(plan, recorder)
            for name, param in trainable_parameters(built.model_parts):
                assert isinstance(param, DTensor)
                held += param.to_local().numel()
                copies += param.numel() * (
                    name.endswith("norm.weight") and built.mesh.coordinates["tp"] > 0
                )
    assert held - copies == plan.num_params
    assert copies == 3 * 13 * 96  # 13 norm weights, on three more tp ranks


# --------------------------------------------------------------------------- real ranks

LAYOUTS: dict[str, Overrides] = {
    "tp, microbatches": [
        ("parallel.tp", "2"),
        ("train.microbatch_size", "2"),
        ("parallel.gradient_sync", "microbatch"),
    ],
    "pipeline": [
        ("parallel.pp", "2"),
        ("parallel.tp", "2"),
        ("train.microbatch_size", "2"),
        ("pipeline.schedule", "Interleaved1F1B"),
        ("model.num_layers", "4"),
        ("model.tied_embeddings", "false"),
    ],
    "context": [("parallel.cp", "2"), ("parallel.cp_method", "allgather")],
    "two hops in a pipeline": [
        ("parallel.pp", "2"),
        ("parallel.dp_replicate", "2"),
        ("train.microbatch_size", "2"),
        ("parallel.gradient_sync", "microbatch"),
        ("model.tied_embeddings", "false"),
    ],
    "replicas": [("parallel.dp_replicate", "2"), ("parallel.reshard_after_forward", "never")],
}


@pytest.mark.slow
def test_counted_step_fake_ranks_equal_real_ranks() -> None:
    """The second step has equal collectives; the first step also sets up communication."""
    real = run_ranks(real_counts, 4)
    for layout, overrides in LAYOUTS.items():
        job = small_job(*overrides)
        for rank in (0, 3):  # the ends of every axis
            with fake_world(rank, 4) as recorder:
                built, plan = build_fake(plan_here(job), recorder)
                counted_step(built, job, plan, recorder)
                counts = counted_step(built, job, plan, recorder)
                assert counts == real[rank][layout], layout


def real_counts() -> dict[str, list[dict[str, int]]]:
    """Return the collectives of this gloo rank in every layout."""
    results = {}
    for layout, overrides in LAYOUTS.items():
        job = small_job(*overrides)
        plan = plan_here(job)
        built = build(plan, this_rank())
        counted_step(built, job, plan)
        counts = counted_step(built, job, plan)
        results[layout] = counts
        clear_mesh_cache()
    return results
