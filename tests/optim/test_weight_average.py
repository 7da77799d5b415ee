"""The average of the weights: its formula, checkpoints of other layouts, inference, memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.harness import run_ranks
from tests.small import Overrides, read_state, small_job, train_rank
from weft.checkpoint.load import load_checkpoint
from weft.checkpoint.manifest import checkpoint_path
from weft.checkpoint.weight_files import open_weights
from weft.optim.weight_average import AVERAGE, WeightAverage
from weft.planning.lora_plan import training_cost
from weft.planning.plan import Machine
from weft.planning.resolve import resolve
from weft.planning.sharding import moment_bytes_per_param

DECAY = 0.75
LAYOUTS: list[tuple[int, Overrides]] = [
    (1, []),
    (2, [("parallel.dp_shard", "2"), ("optim.state_dtype", "8bit"), ("optim.name", "muon")]),
    (2, [("parallel.tp", "2"), ("optim.state_dtype", "bfloat16")]),
]


def tensors_of(run_dir: Path, step: int) -> dict[str, Tensor]:
    return read_state(checkpoint_path(run_dir / "checkpoints", step))


def averages(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix("optim.").removesuffix(f".{AVERAGE}"): value
        for name, value in tensors.items()
        if name.endswith(f".{AVERAGE}")
    }


def weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix("model."): value
        for name, value in tensors.items()
        if name.startswith("model.")
    }


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(*each, marks=[pytest.mark.slow] if ("optim.name", "muon") in each[1] else [])
        for each in LAYOUTS
    ],
)
def test_average_follows_the_saved_weights(
    ranks: int, layout: Overrides, store_path: Path, tmp_path: Path
) -> None:
    """Also through a resume in one process, and in what inference and export read."""
    job = [("run.dir", str(tmp_path)), ("optim.ema_decay", str(DECAY)), ("optim.lr", "0.01")]
    job += [("checkpoint.interval", "1"), ("checkpoint.keep_latest", "9")]
    job += [(key, value) for key, value in layout if not key.startswith("parallel.")]
    parallel = [pair for pair in layout if pair[0].startswith("parallel.")]
    run_ranks(train_rank, ranks, [*job, *parallel, ("train.steps", "3")], str(store_path))
    run_ranks(train_rank, 1, [*job, ("train.steps", "5")], str(store_path))
    expected = weights(tensors_of(tmp_path, 1))
    for step in range(2, 6):
        for name, weight in weights(tensors_of(tmp_path, step)).items():
            expected[name] = DECAY * expected[name] + (1 - DECAY) * weight
    saved = tensors_of(tmp_path, 5)
    actual = averages(saved)
    assert actual.keys() == expected.keys() == weights(saved).keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-6, atol=1e-7)
        assert not torch.equal(actual[name], weights(saved)[name])
    path = checkpoint_path(tmp_path / "checkpoints", 5)
    plan, exported = resolve(small_job(), Machine("cpu", 1, world_size=1)), open_weights(path)
    module = plan.family.build(plan.model)
    load_checkpoint(path, [module], optimizer=None)
    for name, param in module.named_parameters():
        assert torch.equal(param, actual[name])
        assert torch.equal(torch.cat(list(exported[name].read())).view(param.shape), param)


def test_average_of_a_skipped_step_is_unchanged() -> None:
    param = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    idle = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([param, idle], lr=0.1, fused=True)
    average = WeightAverage(optimizer, 0.5)
    for skip in (False, False, True, False):
        param.grad = torch.ones(2)
        if not skip:
            optimizer.step()
        before = optimizer.state[param].get(AVERAGE, param.detach()).clone()
        average.update(torch.tensor(skip))
        change = 0.0 if skip else 0.5
        wanted = before.lerp(param.detach(), change)
        torch.testing.assert_close(optimizer.state[param][AVERAGE], wanted)
    assert not optimizer.state[idle]  # AdamW has not begun with it


def test_average_of_an_optimizer_without_state() -> None:
    param = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.SGD([param], lr=0.5)
    average = WeightAverage(optimizer, 0.5)
    expected = None
    for _ in range(3):
        param.grad = torch.ones(2)
        optimizer.step()
        average.update(torch.tensor(False))
        weight = param.detach().clone()
        expected = weight if expected is None else expected.lerp(weight, 0.5)
    assert expected is not None
    torch.testing.assert_close(optimizer.state[param][AVERAGE], expected)


def test_plan_has_the_memory_of_the_average() -> None:
    jobs = [small_job(("optim.ema_decay", value)) for value in ("0", "0.9")]
    plan = resolve(jobs[0], Machine("cpu", 1, world_size=1))
    cost = training_cost(plan.job.lora, plan.model, plan.family, plan.seq_len)
    without, with_average = (moment_bytes_per_param(job.optim, cost) for job in jobs)
    assert with_average == pytest.approx(without + 4)
