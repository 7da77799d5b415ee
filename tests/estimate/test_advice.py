"""Each suggested change is possible, and helps as much as predicted."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from weft.config.schema import Job
from weft.estimate.advice import Advice, advise, apply_change, candidate_changes
from weft.estimate.analytic import supports_formulas
from weft.estimate.forecast import Forecast, forecast
from weft.planning.devices import Device, match_device
from weft.planning.plan import Machine, Plan
from weft.planning.plan_text import plan_recipe
from weft.planning.resolve import resolve

slow = pytest.mark.slow


def planned(recipe: str, cluster: str, text: str = "") -> tuple[Job, Plan, Machine, Device]:
    """Plan a job; ``text``: overrides such as ``parallel.tp=2 parallel.pp=2``."""
    overrides = [(name, value) for name, _, value in (o.partition("=") for o in text.split())]
    local_machine = Machine("cpu", devices=2)
    plan, machine = plan_recipe(recipe, overrides, [], cluster, lambda device: local_machine)
    device = match_device(machine.device_name, machine.memory_bytes)
    assert device is not None
    return plan.job, plan, machine, device


def advise_recipe(recipe: str, cluster: str, text: str = "") -> tuple[Forecast, list[Advice], Any]:
    """Return the forecast, its advice, and a function that forecasts a change."""
    job, plan, machine, device = planned(recipe, cluster, text)
    prediction = forecast(plan, machine, device)

    def forecast_after(advice: Advice) -> Forecast:
        changed = apply_change(job, advice.change)
        assert changed is not None
        return forecast(resolve(changed, machine), machine, device)

    return prediction, advise(plan, machine, device, prediction), forecast_after


# --------------------------------------------------------------------------- does not fit

# A plan, and the first suggested change.
REMEDIES = [
    # Microbatches are too large.
    pytest.param(
        "paper/llama3-8b",
        "1x8xH100",
        "train.microbatch_size=8",
        "--train.microbatch_size 1",
        marks=slow,
    ),
    # Replicas are too small: more GPUs have to shard.
    pytest.param(
        "paper/llama3-8b",
        "1x8xH100",
        "parallel.dp_shard=2 parallel.dp_replicate=4",
        "--parallel.dp_replicate 1 --parallel.dp_shard auto",
        marks=slow,
    ),
    # One change is not enough: the remedy is a pair.
    pytest.param(
        "paper/llama3-8b",
        "1x8xA100-40GB",
        "train.seq_len=4096 parallel.dp_shard=1 parallel.dp_replicate=8",
        "--parallel.dp_replicate 1 --parallel.dp_shard auto --activation_checkpoint.mode selective",
        marks=slow,
    ),
    # Only activations can be reduced.
    pytest.param(
        "paper/llama3-70b",
        "32x8xH100",
        "activation_checkpoint.mode=none",
        "--activation_checkpoint.mode full",
        marks=slow,
    ),
    pytest.param(
        "paper/llama3-405b",
        "64x8xH100",
        "activation_checkpoint.mode=none",
        "--activation_checkpoint.mode full",
        marks=slow,
    ),
    # Long sequences.
    pytest.param(
        "paper/llama3-8b",
        "2x8xH100",
        "train.seq_len=32768 model.max_seq_len=32768 train.global_batch_size=64",
        "--parallel.cp 4",
        marks=slow,
    ),
    # Optimizer states are too large, and activations are recomputed already.
    pytest.param(
        "paper/llama3-70b",
        "1x8xH200",
        "parallel.tp=1 parallel.dp_shard=8 train.microbatch_size=1 train.seq_len=2048",
        "--optim.state_dtype bfloat16",
        marks=slow,
    ),
    # Formulas say that selective recomputation is enough; a trace says that it is not.
    pytest.param(
        "paper/llama3-8b",
        "1x8xA100-40GB",
        "train.seq_len=8192 train.global_batch_size=32",
        "--activation_checkpoint.mode full",
        marks=slow,
    ),
    # Adapters and experts, which the analytic estimate does not support.
    pytest.param(
        "llama3-8b-lora",
        "1x1xH100",
        "train.global_batch_size=8 activation_checkpoint.mode=none",
        "--train.microbatch_size 1",
        marks=slow,
    ),
    pytest.param(
        "qwen3-30b-a3b",
        "8x8xH100",
        "train.microbatch_size=4 activation_checkpoint.mode=none",
        "--activation_checkpoint.mode full",
        marks=slow,
    ),
    # No change helps.
    ("paper/llama3-8b", "1x1xH100", "train.seq_len=1024 train.global_batch_size=1", None),
    pytest.param(
        "paper/llama3-70b",
        "1x8xH100",
        "parallel.dp_shard=1 train.microbatch_size=1 train.seq_len=2048",
        None,
        marks=slow,
    ),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("recipe", "cluster", "text", "first"), REMEDIES)
def test_advise_plan_that_does_not_fit_has_the_cheapest_remedy_first(
    recipe: str, cluster: str, text: str, first: str | None
) -> None:
    prediction, result, forecast_after = advise_recipe(recipe, cluster, text)
    assert prediction.fits is False
    if first is None:
        assert result == []
        return
    assert str(result[0]) == first
    for advice in result:
        assert advice.is_traced
        changed = forecast_after(advice)
        assert changed.fits
        assert changed.needed_bytes == advice.memory_bytes
        assert prediction.step_seconds / changed.step_seconds - 1 == pytest.approx(advice.speedup)


# --------------------------------------------------------------------------- compared with traces

FASTER = [
    pytest.param("paper/llama3-8b", "16x8xH100", "train.global_batch_size=128", marks=slow),
    pytest.param("paper/llama3-8b", "16x8xH100", "", marks=slow),
    pytest.param("paper/llama3-8b", "1x8xA100-80GB", "model.num_layers=8", marks=slow),
    pytest.param("paper/llama3-70b", "32x8xH100", "", marks=slow),
    pytest.param("paper/llama3-70b", "32x8xH100", "train.microbatch_size=4", marks=slow),
    pytest.param(
        "paper/llama3-8b",
        "1x2xA100-80GB",
        "parallel.tp=2 parallel.dp_shard=1 train.seq_len=1024 train.global_batch_size=32",
        marks=slow,
    ),
    pytest.param(
        "paper/llama3-8b",
        "1x4xA100-80GB",
        "train.seq_len=2048 train.global_batch_size=32",
        marks=slow,
    ),
    pytest.param(
        "paper/llama3-8b",
        "1x8xA100-40GB",
        "activation_checkpoint.mode=full train.seq_len=4096",
        marks=slow,
    ),
    pytest.param(
        "paper/llama3-8b", "2x8xH200", "parallel.pp=2 train.global_batch_size=64", marks=slow
    ),
    pytest.param("paper/llama3-8b", "1x8xH100", "train.microbatch_size=2", marks=slow),
    pytest.param("paper/llama3-405b", "64x8xH200", "", marks=slow),
    pytest.param("three-servers", "12x8xH200", "", marks=slow),
    # Compiled, in float8.
    pytest.param("llama3-8b-8gpu", "1x8xH100", "model.num_layers=8", marks=slow),
    pytest.param("llama3-1b", "1x8xH100", "", marks=slow),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("recipe", "cluster", "text"), FASTER)
def test_advise_estimates_are_near_those_of_traces(recipe: str, cluster: str, text: str) -> None:
    """Estimates are within 15 % of the traced speed, and within 25 % of the memory."""
    prediction, result, forecast_after = advise_recipe(recipe, cluster, text)
    assert result
    for advice in result:
        changed = forecast_after(advice)
        faster = prediction.step_seconds / changed.step_seconds  # type: ignore[operator]
        assert math.log((1 + advice.speedup) / faster) == pytest.approx(0, abs=0.15), str(advice)
        assert advice.memory_bytes == pytest.approx(changed.needed_bytes, rel=0.25), str(advice)


def test_advise_automatic_workers_keeps_the_number_of_ranks() -> None:
    """Changes do not alter an automatic number of ranks, as on a cluster."""
    text = {"model.num_layers": "2", "train.microbatch_size": "4", "train.global_batch_size": "8"}
    overrides = [
        ("run.nproc_per_node", "auto"),
        *text.items(),
    ]  # two ranks; with microbatches of one sequence it would be eight
    local_machine = Machine("cuda", 8, "NVIDIA H100 80GB HBM3", memory_bytes=80 * 2**30)
    plan, machine = plan_recipe(
        "paper/llama3-8b", overrides, [], "local", lambda device: local_machine
    )
    assert (machine.world_size, plan.world_size) == (None, 2)
    device = match_device(machine.device_name)
    assert device is not None
    prediction = forecast(plan, machine, device)
    result = advise(plan, machine, device, prediction)
    assert result == advise(plan, replace(machine, world_size=2), device, prediction)
    assert result


# --------------------------------------------------------------------------- possible changes


def list_changes(cluster: str, text: str = "") -> list[dict[str, Any]]:
    _job, plan, machine, _ = planned("paper/llama3-8b", cluster, text)
    return list(candidate_changes(plan, machine))


def test_changes_are_only_those_that_the_device_supports() -> None:
    """Float8 needs its hardware; float8 and async TP need compilation."""
    for cluster, float8 in (("1x8xA100-80GB", False), ("1x8xH100", True), ("1x8xB200", True)):
        for compiled in ("true", "false"):
            result = list_changes(
                cluster, f"compile.enable={compiled} parallel.tp=2 parallel.dp_shard=4"
            )
            eights = [change for change in result if "precision.float8" in change]
            case = {"precision.float8": "tensorwise"}
            together = case if compiled == "true" else {"compile.enable": True} | case
            assert eights == ([together] if float8 else [])
            (over,) = [change for change in result if "parallel.async_tp" in change]
            assert over.get("compile.enable", False) == (compiled == "false")
    assert not any("parallel.async_tp" in change for change in list_changes("1x8xH100"))


def test_changes_differ_from_the_job() -> None:
    for text in (
        "",
        "activation_checkpoint.mode=full compile.enable=true precision.float8=rowwise"
        " optim.state_dtype=8bit",
        "activation_checkpoint.mode=selective parallel.pp=2 parallel.dp_shard=4"
        " pipeline.schedule=Interleaved1F1B",
        "parallel.reshard_after_forward=never optim.state_dtype=bfloat16 train.microbatch_size=2",
    ):
        job, plan, machine, _ = planned("paper/llama3-8b", "1x8xH200", text)
        now = job.model_dump()
        for change in candidate_changes(plan, machine):
            changed = apply_change(job, change)
            assert changed is not None
            assert changed.model_dump() != now
            assert "precision.float8" not in change or job.precision.float8 == "none"
            for key, value in change.items():
                section, name = key.split(".")
                assert getattr(getattr(changed, section), name) == value


def test_advice_as_text_is_command_line_overrides() -> None:
    advice = Advice(
        {"compile.enable": True, "parallel.tp": 2, "activation_checkpoint.mode": "full"}, 0.1, 1.0
    )
    assert str(advice) == "--compile.enable true --parallel.tp 2 --activation_checkpoint.mode full"


@pytest.mark.parametrize(
    ("text", "is_supported"),
    [
        ("model.qkv_bias=true", True),
        ("model.layer_pattern=LG model.sliding_window=4096", False),
        ("model.gated=false", False),
        (
            "model.kv_rank=512 model.rope_head_dim=64 model.num_kv_heads=32 model.head_dim=192",
            False,
        ),
    ],
)
def test_formulas_are_not_used_for_models_that_they_do_not_describe(
    text: str, is_supported: bool
) -> None:
    _, plan, _, _ = planned("paper/llama3-8b", "1x8xH200", text)
    assert supports_formulas(plan) == is_supported
