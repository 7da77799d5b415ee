"""One rank with copies of its parameters equals FSDP, bit for bit."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn

from tests.small import plan_here, small_job, this_rank
from weft.data.dataset import open_dataset
from weft.parallel.mixed_precision import ComputeCopies, restore_parameters
from weft.planning.plan import Plan
from weft.training import loop
from weft.training.loop import train

CHOICES = {
    "activation_checkpoint.mode": ("none", "full", "selective"),
    "data.packing": ("windows", "documents"),
    "optim.name": ("adamw", "muon"),
    "train.microbatch_size": ("1", "2"),
    "precision.float8": ("none", "tensorwise", "rowwise"),
    "lora.rank": ("0", "4"),
}


def draw_jobs(count: int) -> list[dict[str, str]]:
    source = random.Random(0)
    jobs = []
    while len(jobs) < count:
        job = {key: source.choice(values) for key, values in CHOICES.items()}
        if job["lora.rank"] != "0" and (job["precision.float8"], job["optim.name"]) != (
            "none",
            "adamw",
        ):
            continue  # refused
        jobs.append(job)
    return jobs


def train_one_rank(
    overrides: dict[str, str],
    run_dir: Path,
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
    fsdp: bool = False,
) -> dict[str, Tensor]:
    """Train, and return the parameters and their last gradients."""
    results: dict[str, Tensor] = {}
    step_of = loop.optimizer_step

    def record(*args: Any, **kwargs: Any) -> Any:
        run = args[0]
        (model,) = run.built.model_parts
        for name, param in model.named_parameters():
            assert param.dtype == torch.float32 or not param.requires_grad
            if param.grad is not None:
                results[f"gradient of {name}"] = to_plain(param.grad).clone()
        result = step_of(*args, **kwargs)
        results.update((n, to_plain(p.detach()).clone()) for n, p in model.named_parameters())
        return result

    monkeypatch.setattr(loop, "optimizer_step", record)
    keys = {
        "run.dir": str(run_dir),
        "run.nproc_per_node": "1",
        "precision.compute_dtype": "bfloat16",
        "precision.float8_small": "true",
        "train.global_batch_size": "4",
        "train.steps": "3",
        "train.eval_interval": "2",
    }
    if overrides["precision.float8"] == "none":
        del keys["precision.float8_small"]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plan = plan_here(small_job(*(keys | overrides).items()))
        if fsdp and plan.float8 == "tensorwise":  # as with several ranks
            plan = replace(plan, float8_all_gather=True)
        train(plan, open_dataset(store), this_rank(), Console(quiet=True))
    finally:
        dist.destroy_process_group()
        monkeypatch.setattr(loop, "optimizer_step", step_of)
    return results


def to_plain(tensor: Any) -> Tensor:
    plain: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return plain


JOBS = draw_jobs(4)


@pytest.mark.parametrize(
    "overrides",
    [
        JOBS[0],
        *(pytest.param(job, marks=pytest.mark.slow) for job in JOBS[1:3]),
        JOBS[3],
    ],
    ids=lambda job: "-".join(job.values()),
)
def test_copies_equal_fsdp_bit_for_bit(
    overrides: dict[str, str], tmp_path: Path, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = train_one_rank(overrides, tmp_path / "copies", store_path, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(Plan, "uses_fsdp", property(lambda plan: True))
        fsdp = train_one_rank(overrides, tmp_path / "fsdp", store_path, monkeypatch, fsdp=True)
    assert copies.keys() == fsdp.keys()
    assert any(name.startswith("gradient of") for name in copies)
    for name, values in copies.items():
        assert torch.equal(values, fsdp[name]), name


class Tied(nn.Module):
    """A model whose matrix is used twice, with a frozen and an integer parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.gain = nn.Parameter(torch.ones(8), requires_grad=False)
        self.codes = nn.Parameter(torch.arange(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).relu()) * self.gain
        return out


def test_gradients_are_sums_in_float32_of_those_of_a_bfloat16_model() -> None:
    torch.manual_seed(0)
    model, other = Tied(), Tied()
    other.load_state_dict(model.state_dict())
    weight, codes = model.first.weight, model.codes
    ComputeCopies(model, torch.bfloat16)
    expected = torch.zeros_like(weight)
    inputs = [torch.randn(4, 8, dtype=torch.bfloat16) for _ in range(3)]
    for x in inputs:
        model(x).float().square().sum().backward()
        assert model.first.weight is model.second.weight
        assert model.first.weight.dtype == torch.bfloat16
        assert model.first.weight.grad is None
        low = other.first.weight.detach().bfloat16().requires_grad_()
        out = nn.functional.linear(nn.functional.linear(x, low).relu(), low)
        expected += torch.autograd.grad(out.float().square().sum(), low)[0]
    restore_parameters(model)
    assert model.first.weight is weight
    assert model.second.weight is weight
    assert model.codes is codes
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected)
    # After an update the copies are new, and a pass without gradients leaves them in use.
    with torch.no_grad():
        weight.mul_(2)
        out = model(inputs[0])
    copy: Tensor = model.first.weight
    assert torch.equal(copy, weight.bfloat16())
    restore_parameters(model)
    assert out.dtype == torch.bfloat16
    assert model.first.weight is weight
