"""Sharded pipeline stages compute one process's gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from tests.harness import run_ranks
from tests.parallel.sharded import (
    AXES,
    CONFIG,
    PERSIST,
    ROWS,
    TOKENS,
    Layout,
    assert_equal,
    build,
    build_model,
    data,
    loss_of,
    one_process,
    whole_gradients,
)
from tests.small import loader_of, plan_here, small_job, this_rank
from weft.checkpoint.state_dict import trainable_parameters
from weft.models.decoder import prune_to_stage
from weft.parallel.data_parallel import set_gradient_sync
from weft.training.setup import build as build_job


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Any]:
    return one_process()


# Units: the embedding, three blocks, the head.
TWO_STAGES = [range(0, 2), range(2, 5)]
FOUR_STAGES = [range(0, 1), range(1, 2), range(2, 3), range(3, 5)]


def pipeline(name: str, layout: Layout) -> dict[str, Any]:
    """Run two pipeline stages, with data parallelism over the other ranks."""
    mesh = init_device_mesh("cpu", (2, *layout[:2]), mesh_dim_names=("pp", *AXES))
    kind: Any = get_schedule_class(name)
    ranges = TWO_STAGES if issubclass(kind, PipelineScheduleSingle) else FOUR_STAGES
    local, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    stages = []
    for i in range(local, len(ranges), 2):
        model = build_model()
        prune_to_stage(model, ranges[i])
        build(layout, mesh[AXES], model)
        device = torch.device("cpu")
        stages.append(PipelineStage(model, i, len(ranges), device, group=group))
    schedule = kind(stages if len(stages) > 1 else stages[0], 4, loss_fn=loss_of, scale_grads=False)
    at = mesh[AXES].get_coordinate()
    index, ranks = at[0] * layout.shards + at[1], layout.ranks
    tokens_BT, targets_BT = (x[index::ranks].contiguous() for x in data())
    for _ in range(2):  # state of the first step must not affect the second
        for stage in stages:
            stage.submod.zero_grad()
        schedule.step(*([tokens_BT] if local == 0 else []), target=targets_BT)
    grads = {}
    for stage in stages:
        grads |= whole_gradients(stage.submod)
    return {"grads": grads}


PIPELINES = [
    pytest.param("1F1B", Layout(shards=2, reshard_after_forward=False), marks=pytest.mark.slow),
    pytest.param(
        "1F1B", Layout(shards=2, keys={"fsdp_prefetch": 2, **PERSIST}), marks=pytest.mark.slow
    ),
    pytest.param("1F1B", Layout(shards=4, reshard_after_forward=2), marks=pytest.mark.slow),
    ("Interleaved1F1B", Layout(shards=2, reshard_after_forward=False, keys=PERSIST)),
    pytest.param("Interleaved1F1B", Layout(shards=2, keys=PERSIST), marks=pytest.mark.slow),
    pytest.param(
        "InterleavedZeroBubble",
        Layout(shards=2, reshard_after_forward=False, keys=PERSIST),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "Interleaved1F1B",
        Layout(2, 2, False, keys={"cpu_offload": True, **PERSIST}),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "Interleaved1F1B",
        Layout(1, 4, False, node_size=2, keys={"hierarchical_gather": True}),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("name", "layout"), PIPELINES)
def test_sharded_pipeline_stages_gradients_equal_one_process(
    name: str, layout: Layout, one_rank: dict[str, Any]
) -> None:
    parts = run_ranks(pipeline, 2 * layout.ranks, name, layout)
    for first, last in zip(parts[: layout.ranks], parts[layout.ranks :], strict=True):
        assert_equal({"grads": first["grads"] | last["grads"]}, one_rank)


def middle_stage() -> None:
    """Shard a stage without embedding and head: its root has no parameters."""
    rows_BTD = torch.randn(ROWS, TOKENS, CONFIG.dim, requires_grad=True)
    single = build_model()
    prune_to_stage(single, range(2, 3))
    single(rows_BTD).square().sum().backward()
    for keys in ({}, PERSIST):
        model = build_model()
        prune_to_stage(model, range(2, 3))
        layout = Layout(keys=keys, microbatches=1)
        build(layout, model=model)
        mine_BTD = rows_BTD.detach()[dist.get_rank() :: 2].requires_grad_()
        set_gradient_sync(model, True, "step")
        model(mine_BTD).square().sum().backward()
        assert_equal(
            {"grads": whole_gradients(model)},
            {"grads": {name: param.grad for name, param in single.named_parameters()}},
        )
        torch.testing.assert_close(mine_BTD.grad, rows_BTD.grad[dist.get_rank() :: 2])  # type: ignore[index]


def test_sharded_stage_without_embedding_and_head_equals_one_process() -> None:
    run_ranks(middle_stage, 2)


def grads_after_evaluation(store: str) -> list[str]:
    """Return the parameters that have a gradient after an evaluation."""
    layout = [("parallel.pp", "2"), ("parallel.gradient_sync", "microbatch")]
    job = small_job(*layout)
    plan = plan_here(job)
    built = build_job(plan, this_rank())
    built.train_step.evaluate(loader_of(job, plan, store, built.mesh).get_microbatches(0))
    return [
        name for name, param in trainable_parameters(built.model_parts) if param.grad is not None
    ]


def test_evaluation_of_a_sharded_pipeline_reduces_no_gradients(store_path: Path) -> None:
    assert run_ranks(grads_after_evaluation, 4, str(store_path)) == [[]] * 4
