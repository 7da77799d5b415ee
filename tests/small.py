"""A model that trains in milliseconds, and functions that run it inside a rank."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.tensor import DTensor

from weft.checkpoint.manifest import list_checkpoints, manifest_text, read_manifest
from weft.checkpoint.shard_files import find_overlaps, parse_contents, read_shards
from weft.checkpoint.state_dict import trainable_parameters
from weft.config.reader import read_job, recipe_names
from weft.config.schema import Job
from weft.data.dataset import open_dataset
from weft.data.loader import Loader, build_mixture
from weft.optim.optimizer import compute_grad_norm
from weft.parallel.mesh import Mesh
from weft.planning.model_config import REQUIRED
from weft.planning.plan import Machine, Plan
from weft.planning.resolve import resolve
from weft.training import loop
from weft.training.loop import train
from weft.training.setup import Rank, build

Overrides = list[tuple[str, str]]


SMALL: Overrides = [
    ("model.num_layers", "2"),
    ("model.dim", "32"),
    ("model.num_heads", "4"),
    ("model.num_kv_heads", "2"),
    ("model.ffn_dim", "64"),
    ("model.vocab_size", "512"),
    ("model.max_seq_len", "64"),
    ("data.vocab_size", "512"),
    ("train.seq_len", "32"),
    ("train.global_batch_size", "8"),
    ("train.steps", "20"),
    ("train.eval_interval", "0"),
    ("train.eval_sequences", "6"),
    ("optim.warmup_steps", "5"),
    ("checkpoint.interval", "0"),
    ("monitor.trackers", ""),
    ("monitor.eval_prompts", ""),
    ("monitor.report", "false"),
]


def sized_recipes() -> list[str]:
    """Return the recipes with a model, without those that train any model."""
    return [name for name in recipe_names() if read_job(name)[0].model.path != REQUIRED]


def small_job(*overrides: tuple[str, str]) -> Job:
    job, _, errors = read_job("demo", SMALL + list(overrides))
    assert not errors, errors
    return job


def plan_here(job: Job) -> Plan:
    """Plan a job for the ranks of the current process group."""
    return resolve(job, Machine("cpu", devices=2, world_size=dist.get_world_size()))


def this_rank() -> Rank:
    return Rank(dist.get_rank(), dist.get_rank(), dist.get_world_size(), torch.device("cpu"))


def train_rank(overrides: Overrides, store: str) -> None:
    """Train as a rank of weft does, in a process group that is already initialized."""
    job = small_job(*overrides)
    train(plan_here(job), open_dataset(store), this_rank(), Console(quiet=True))


def before_each_step(call: Callable[[int], None]) -> None:
    """Call a function with the number of each step of this process, before the step."""
    enter_phase = loop.enter_phase

    def set_phase(name: str, step: int | None = None) -> None:
        enter_phase(name, step)
        if step is not None:
            call(step)

    loop.enter_phase = set_phase


# This logger warns when FSDP and tensor parallelism shard one dim: gathering takes two steps.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(overrides: Overrides, store: str, step: int = 0) -> dict[str, Any]:
    """Return loss, norm and unsharded gradients of one global batch, initial weights.

    Under pipeline parallelism a rank has only the gradients of its stages: see `merged`.
    """
    job = small_job(*overrides)
    plan = plan_here(job)
    built = build(plan, this_rank())
    loader = loader_of(job, plan, store, built.mesh)
    loss = built.train_step.forward_backward(
        loader.get_microbatches(step * job.train.global_batch_size)
    )
    dist.all_reduce(loss)
    params = dict(trainable_parameters(built.model_parts))
    stages = built.mesh.get_group("pp") if plan.pp > 1 else None
    norm, _ = compute_grad_norm([*params.values()], stages)
    grads = {name: full_tensor(param.grad).clone() for name, param in params.items()}
    return {"loss": loss.item(), "norm": norm.item(), "grads": grads}


def expect_same(result: dict[str, Any], expected: dict[str, Any], rel: float = 2e-5) -> None:
    """Compare the loss and each gradient, relative to its largest entry, which is not 0."""
    assert result["loss"] == pytest.approx(expected["loss"], rel=rel)
    assert result["grads"].keys() == expected["grads"].keys()
    for name, grad in expected["grads"].items():
        largest = float(grad.abs().max())
        assert largest > 0, name
        assert float((result["grads"][name] - grad).abs().max()) < rel * largest, name


def merged(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the gradients of other ranks' pipeline stages to each rank's `gradients`."""
    return [
        rank | {"grads": {n: grad for each in [*ranks, rank] for n, grad in each["grads"].items()}}
        for rank in ranks
    ]


def loader_of(job: Job, plan: Plan, store: str, mesh: Mesh) -> Loader:
    return Loader(
        build_mixture(open_dataset(store), "train", job.train.seq_len, job.data, job.train.seed),
        seed=job.train.seed,
        global_batch_size=job.train.global_batch_size,
        dp_rank=mesh.dp_rank,
        dp_size=plan.dp_size,
        microbatch_size=plan.microbatch_size,
        is_strided=plan.world_size_invariant,
        numbers_tokens=plan.numbers_tokens,
        measures_documents=job.train.neftune_alpha > 0,
    )


def values_under(record: dict[str, Any], prefix: str) -> dict[str, float]:
    """Return the values of a record whose keys are ``prefix/name``, by name."""
    head = f"{prefix}/"
    return {k.removeprefix(head): v for k, v in record.items() if k.startswith(head)}


def records(directory: Path) -> list[dict[str, Any]]:
    """Return a run's records, without an incomplete last line; raise on a damaged line."""
    lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


# Keys of records that differ between two runs of the same job.
TIMINGS = {"time", "time_breakdown", "goodput", "memory_peak_gib", "ranks", "mfu", "mfu_causal"}
TIMINGS |= {"step_seconds", "data_seconds", "tokens_per_second", "tokens_per_second_per_device"}
TIMINGS |= {"tflops_per_device", "straggler_rank", "straggler_slowdown"}


def untimed_records(directory: Path) -> list[dict[str, Any]]:
    """Return a run's records without `TIMINGS`."""
    return [
        {key: value for key, value in record.items() if key not in TIMINGS}
        for record in records(directory)
    ]


def losses(directory: Path) -> list[float]:
    return [record["loss"] for record in records(directory)]


def newest_state(directory: Path) -> dict[str, torch.Tensor]:
    """Return every unsharded tensor of a run's newest checkpoint."""
    return read_state(list_checkpoints(directory / "checkpoints")[-1])


def forget_fingerprints(run: Path) -> None:
    """Make a run's checkpoints as those of a version without fingerprints of its files."""
    for path in list_checkpoints(run / "checkpoints"):
        manifest = read_manifest(path)
        assert manifest.pop("run_files")
        del manifest["hash"]
        (path / "manifest.json").write_text(manifest_text(manifest))


def read_state(path: Path) -> dict[str, torch.Tensor]:
    """Return every unsharded tensor of a checkpoint."""
    contents = parse_contents(read_manifest(path), path)
    state = {name: torch.empty(e.shape, dtype=e.dtype) for name, e in contents.tensors.items()}
    expected = {
        name: list(find_overlaps(contents.tensors[name], [0] * tensor.dim(), tensor))
        for name, tensor in state.items()
    }
    read_shards(contents, expected)
    return state
