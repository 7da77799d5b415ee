"""Plan a mixture of experts: rules of ``ep``, active parameters, all-to-all."""

from __future__ import annotations

from typing import Any

import pytest

from weft.config.errors import InvalidConfig
from weft.config.reader import read_job
from weft.config.schema import Job
from weft.estimate.cost import Matmul, device_spec, matmul_seconds
from weft.estimate.forecast import forecast
from weft.estimate.trace_to_cost import _grouped_matmul
from weft.models.decoder_costs import (
    flops_per_token,
    num_active_params,
    num_params,
    unit_costs,
)
from weft.models.families.moe import PRESETS
from weft.planning.degrees import ParallelDims
from weft.planning.devices import get_device
from weft.planning.plan import Machine
from weft.planning.plan_text import describe_plan, plan_recipe
from weft.planning.relayout import nearest_layouts
from weft.planning.resolve import resolve
from weft.planning.sharding import estimate_rank_bytes, expert_split, local_unit_params


def job_of(**changes: Any) -> Job:
    overrides = [("model.kind", "moe"), ("model.preset", "toy-moe")]
    overrides += [(name.replace("__", "."), str(value)) for name, value in changes.items()]
    job, _, errors = read_job("demo", overrides)
    assert not errors
    return job


def rejections(world: int, **changes: Any) -> dict[str, str]:
    with pytest.raises(InvalidConfig) as caught:
        resolve(job_of(**changes), Machine("cpu", devices=2, world_size=world))
    return {error.key: str(error) for error in caught.value.errors}


def test_ep_divides_the_shards_and_the_experts() -> None:
    assert "does not divide the 4 ranks" in rejections(4, parallel__ep=3)["parallel.ep"]
    rule = rejections(16, parallel__ep=16, train__global_batch_size=16)["parallel.ep"]
    assert "does not divide the 8 experts. Use 1, 2, 4 or 8" in rule
    plan = resolve(job_of(parallel__ep=4, parallel__cp=2), Machine("cpu", 2, world_size=8))
    assert (plan.ep, plan.dp_shard, plan.cp) == (4, 4, 2)


def test_ep_incompatible_keys_are_refused() -> None:
    keys = {"parallel__ep": 4, "parallel__reshard_after_forward": 6}
    keys["train__global_batch_size"] = 48
    message = rejections(24, **keys)["parallel.reshard_after_forward"]
    assert "so its ranks split a group of ep. Use 1, 2, 4, 8, 12 or 24, always or never" in message
    keys = {"parallel__pp": 2, "model__tied_embeddings": "false", "train__microbatch_size": 3}
    assert "mixture of experts" in rejections(2, **keys)["train.microbatch_size"]


WHOLE = {"parallel__tp": 2, "parallel__etp": 1}


def test_etp_one_ep_divides_the_shards_times_tp() -> None:
    machine = Machine("cpu", 2, world_size=8)
    plan = resolve(job_of(parallel__ep=8, parallel__cp=2, **WHOLE), machine)
    assert (plan.ep, plan.etp, plan.dp_shard, plan.tp) == (8, 1, 2, 2)
    assert "experts without TP over 8 (ep) x 1" in describe_plan(plan, machine, "demo")
    rule = rejections(8, parallel__ep=3, **WHOLE)["parallel.ep"]
    assert "the 8 ranks of a shard group (dp_shard x cp x tp). Use 1, 2, 4 or 8" in rule
    assert "the 4 ranks" in rejections(8, parallel__ep=8, parallel__tp=2)["parallel.ep"]
    keys = {"parallel__ep": 8, "parallel__reshard_after_forward": 6} | WHOLE
    keys["train__global_batch_size"] = 48
    message = rejections(48, **keys)["parallel.reshard_after_forward"]
    assert "times tp=2 is neither a multiple nor a divisor of ep=8" in message
    assert "Use 1, 2, 4, 8, 12 or 24, always or never" in message
    # Without shared experts no width is split.
    small = {"model__expert_dim": 1, "model__shared_experts": 0}
    resolve(job_of(**small, **WHOLE), machine)
    assert "expert_dim=1" in rejections(8, parallel__tp=2, **small)["parallel.tp"]


def test_etp_that_does_nothing_or_cannot_work_is_refused_or_has_a_warning() -> None:
    machine = Machine("cpu", 2, world_size=2)
    assert "is neither 1 nor tp=2" in rejections(2, **WHOLE | {"parallel__etp": 4})["parallel.etp"]
    assert "is neither 1 nor tp=1" in rejections(2, parallel__etp=2)["parallel.etp"]
    for changes in (
        {"parallel__etp": 1},
        {"parallel__tp": 2, "parallel__etp": 2},
        WHOLE | {"model__kind": "llama", "model__preset": "toy"},
    ):
        plan = resolve(job_of(**changes), machine)
        assert plan.etp == plan.tp
        assert any(text.startswith("parallel.etp=") for text in plan.warnings), changes
    assert not resolve(job_of(**WHOLE), machine).warnings
    odd = WHOLE | {"train__seq_len": 33}
    rule = rejections(2, **odd, parallel__sequence_parallel="false")["train.seq_len"]
    assert "tp=2 ranks of experts without TP. Use 32 or 34, or parallel.etp=tp" in rule
    rule = rejections(2, **odd)["train.seq_len"]
    assert "or parallel.sequence_parallel=false and parallel.etp=tp" in rule


def test_nearest_layouts_keep_experts_whole() -> None:
    """The group of ``ep`` may have the ranks of ``tp``."""
    job = job_of(parallel__ep=8, parallel__dp_shard=2, parallel__tp=4, parallel__etp=1)
    (layout, *_) = nearest_layouts(job, Machine("cpu", 8, world_size=8, local_world_size=8))
    assert (layout.parallel.ep, layout.parallel.tp) == (8, 4)


def test_dp_shard_fit_has_whole_groups_of_experts() -> None:
    """The smallest shard group that fits, of those that ``ep`` divides."""

    def fitted(gib: float, **changes: Any) -> tuple[int, int]:
        job = job_of(
            parallel__dp_shard="fit",
            train__global_batch_size=64,
            train__microbatch_size=1,
            **changes,
        )
        memory = int(gib * 2**30)
        plan = resolve(job, Machine("cuda", 8, "NVIDIA H100", 16, 8, memory_bytes=memory))
        return plan.dp_shard, plan.dp_replicate

    small = {"model__expert_dim": 4096, "model__dim": 2048, "model__num_heads": 16}
    assert fitted(400, **small) == (1, 16)
    assert fitted(400, parallel__ep=4, **small) == (4, 4)
    assert fitted(400, parallel__ep=8, parallel__cp=2, **small) == (4, 2)
    assert fitted(400, parallel__ep=8, parallel__tp=2, parallel__etp=1, **small) == (4, 2)
    # A rank gathers its own experts only, and keeps no others.
    assert fitted(5, **small) == (8, 2)
    assert fitted(3, parallel__ep=4, **small) == (8, 2)
    kept = {"parallel__reshard_after_forward": "never", **small}
    assert fitted(6, **kept) == (8, 2)
    assert fitted(4, parallel__ep=4, **kept) == (4, 4)
    rule = rejections(2, parallel__ep=4, parallel__dp_shard="fit")["parallel.ep"]
    assert "does not divide the 2 ranks" in rule


def test_flops_are_those_of_the_active_experts() -> None:
    """A token costs 6 FLOPs per active weight, and 12 L H K T for attention."""
    shape = PRESETS["qwen3-30b-a3b"]
    looked_up = shape.vocab_size * shape.dim
    norms = 48 * (2 * 2048 + 2 * 128) + 2048
    weights = num_active_params(shape) - looked_up - norms
    attention = 12 * 48 * 32 * 128 * 4096
    assert flops_per_token(shape, 4096) == 6 * weights + attention
    assert flops_per_token(shape, 4096) < 0.2 * 6 * num_params(shape)


def test_matmul_seconds_grouped_matmul_costs_one_kernel() -> None:
    device = get_device("H100")
    one = matmul_seconds(Matmul(65536, 2048, 768), device)
    many = matmul_seconds(Matmul(4096, 2048, 768, groups=16), device)
    difference = matmul_seconds(Matmul(4096, 2048, 768, times=16), device)
    assert one == pytest.approx(many, rel=0.1)
    assert many < difference
    # With few rows per expert, reading the weights takes the time.
    subset = matmul_seconds(Matmul(1, 2048, 768, groups=128), device)
    assert subset > 128 * 2 * 2048 * 768 / device.bandwidth
    # Forward pass and weight gradient of 32 rows in 4 groups.
    assert _grouped_matmul((32, 10), (4, 10, 6), 4, 1, "bf16") == Matmul(8, 10, 6, groups=4)
    assert _grouped_matmul((6, 32), (32, 10), 4, 1, "bf16") == Matmul(6, 8, 10, groups=4)


def test_estimate_rank_bytes_gathers_local_experts_only() -> None:
    of_all = unit_costs(PRESETS["qwen3-30b-a3b"], 4096)
    layer = of_all[1]
    assert layer.expert_params == 128 * 3 * 2048 * 768
    assert local_unit_params(layer, 8) == layer.params - layer.expert_params * 7 / 8
    same = {
        "tp": 1,
        "pp": 1,
        "tokens": 0,
        "in_flight": 1,
        "bytes_per_param": 0.0,
        "compute_bytes": 2,
    }
    full, spread = (estimate_rank_bytes(of_all, **same, ep=ep) for ep in (1, 8))  # type: ignore[arg-type]
    assert spread < full
    # Four ranks of tp: of experts without TP each has four times as many weights, or as many by ep.
    splits = [expert_split(ParallelDims(1, 1, 8, 1, 4, ep, True)) for ep in (1, 4, 8)]
    assert splits == [1 / 4, 1, 2]
    assert expert_split(ParallelDims(1, 1, 8, 1, 4, 8)) == 8
    assert local_unit_params(layer, 1 / 4) == layer.params + 3 * layer.expert_params


@pytest.mark.timeout(300)
def test_forecast_of_experts_has_the_all_to_all_of_tokens() -> None:
    """Each token goes to its eight experts and back, in each layer and pass."""
    recipe, layers = "qwen3-30b-a3b", 3
    plan, machine = plan_recipe(recipe, [], [], None, lambda device: Machine("cpu", 2))
    assert "3,353,032,704 of them active" in describe_plan(plan, machine, recipe)
    subset = [("model.num_layers", str(layers)), ("model.max_seq_len", "4096")]
    subset += [("train.global_batch_size", "256")]  # two microbatches
    plan, machine = plan_recipe(recipe, subset, [], None, lambda device: Machine("cpu", 2))
    prediction = forecast(plan, machine, device_spec(plan, machine))
    shape = plan.model
    rows = plan.microbatch_size * plan.seq_len * shape.active_experts
    # Forward and backward, and selective checkpointing repeats no exchange; each sends the tokens
    # there and back.
    exchanges = plan.num_microbatches * layers * 2 * 2
    expected = exchanges * rows * shape.dim * 2
    assert prediction.communication["ep"].bytes == pytest.approx(expected, rel=1e-3)
    assert prediction.communication["ep"].exposed_seconds > 0
    # Expert weights are float32, and sharded over all ranks.
    experts = sum(unit.expert_params for unit in unit_costs(shape, 1))
    assert prediction.gib_by_category()["parameters"] == pytest.approx(
        4 * num_params(shape) / 64 / 2**30, rel=0.02
    )
    # Each microbatch gathers them twice in bfloat16 over efsdp, and reduces float32 gradients.
    moved = plan.num_microbatches * experts / plan.ep * (2 + 2 + 4)
    assert prediction.communication["efsdp"].bytes == pytest.approx(moved, rel=0.02)
    assert any("perfectly balanced" in doubt for doubt in prediction.caveats)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_forecast_of_experts_without_tp_has_the_tokens_of_one_rank() -> None:
    """A rank sends its own tokens, and only attention exchanges activations over tp."""
    layers = 3
    subset = [("model.num_layers", str(layers)), ("model.max_seq_len", "4096")]
    subset += [("activation_checkpoint.mode", "full")]  # exchanges again in backward
    whole = [("parallel.tp", "4"), ("parallel.dp_shard", "16"), ("parallel.etp", "1")]
    predictions = []
    for keys in (whole[:2], whole):
        args = "qwen3-30b-a3b", [*subset, *keys], [], None, lambda device: Machine("cpu", 2)
        plan, machine = plan_recipe(*args)
        predictions.append(forecast(plan, machine, device_spec(plan, machine)))
        assert predictions[-1].gib_by_category()["parameters"] == pytest.approx(
            4 * num_params(plan.model) / 64 / 2**30, rel=0.02
        )
    split, own = (each.communication for each in predictions)
    rows = plan.microbatch_size * plan.seq_len * plan.model.active_experts // 4
    exchanges = plan.num_microbatches * layers * 3 * 2
    assert own["ep"].bytes == pytest.approx(exchanges * rows * plan.model.dim * 2, rel=1e-3)
    assert split["ep"].bytes == pytest.approx(4 * own["ep"].bytes, rel=1e-3)
    assert own["tp"].bytes < 0.7 * split["tp"].bytes
