"""A training state loads bit-exactly from any layout into any other.

Each layout makes a real step, saves, and records its state in memory: every unsharded tensor of
model and optimizer, and loss and gradients of the next step. A layout that loads the checkpoint
must have the same bits, and the same loss and gradients up to rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.test_manager import save
from tests.harness import run_ranks
from tests.layouts import parse
from tests.parallel.test_layouts import TOLERANCE
from tests.small import (
    Overrides,
    full_tensor,
    loader_of,
    plan_here,
    read_state,
    small_job,
    this_rank,
)
from weft.checkpoint.manifest import list_checkpoints
from weft.checkpoint.state_dict import model_state, optimizer_state, trainable_parameters
from weft.config.schema import Job
from weft.data.dataset import open_dataset
from weft.optim.optimizer import set_learning_rate
from weft.training.setup import Built, build
from weft.training.state import TrainState, resume

# Twelve sequences divide over 1 to 4 ranks.  Three ranks shard 32 rows of a weight unevenly.
BATCH = 12
JOB: Overrides = [
    ("run.dir", "/nonexistent"),
    ("model.num_layers", "4"),
    ("model.tied_embeddings", "false"),
    ("data.packing", "documents"),
    ("train.global_batch_size", str(BATCH)),
    ("train.microbatch_size", "2"),
]

Tensors = dict[str, torch.Tensor]


def save_and_resume(
    overrides: Overrides, store: str, sources: list[str], target: str, first: int = 0
) -> list[set[str]]:
    """Load each source into a new model and check it; make a step, and save.

    Args:
        sources: directories of other layouts; the step begins from the last one, else from
            initial weights.
        target: directory of this layout; if empty, no step is made.
        first: first sample of a step from the initial weights.

    Returns:
        The names of the tensors of each source that this rank holds.
    """
    job = small_job(*overrides)
    result, at = [], TrainState(0, first)
    built = build(plan_here(job), this_rank())
    for number, source in enumerate(sources):
        if number:
            built = build(plan_here(job), this_rank())
        at = resume(Path(source) / "checkpoints", "off", built.model_parts, built.optimizer, never)
        result.append(check(job, built, at, store, Path(source)))
    if not target:
        return result
    if not sources:
        backward(job, built, at, store)
    set_learning_rate(built.optimizer, job.optim.lr)
    built.optimizer.step()
    built.optimizer.zero_grad()
    at = TrainState(at.step + 1, at.samples + BATCH)
    manifest = at.manifest(plan_here(job), open_dataset(Path(store)))
    save(Path(target) / "checkpoints", built.model_parts, built.optimizer, manifest, keep=1)
    state = in_memory(built)
    record = {"at": at, "state": state, "loss": backward(job, built, at, store)}
    torch.save(record | {"grads": gradients(built)}, f"{target}/rank-{dist.get_rank()}.pt")
    return result


def check(job: Job, built: Built, at: TrainState, store: str, source: Path) -> set[str]:
    """Compare the loaded state with the record of the saving layout."""
    record = merge_records(source)
    assert at == record["at"]
    state = in_memory(built)
    for name, tensor in state.items():
        theirs = record["state"][name]
        assert (tensor.shape, tensor.dtype) == (theirs.shape, theirs.dtype), name
        assert tensor.numpy().tobytes() == theirs.numpy().tobytes(), f"{name} of {source.name}"
    loss = backward(job, built, at, store)
    assert loss == pytest.approx(record["loss"], rel=TOLERANCE)
    for name, grad in gradients(built).items():
        theirs = record["grads"][name]
        scale = theirs.abs().max()
        torch.testing.assert_close(
            grad / scale, theirs / scale, rtol=0, atol=TOLERANCE, msg=f"{name} of {source.name}"
        )
    return set(state)


def merge_records(source: Path) -> dict[str, Any]:
    """Merge the records of all ranks that saved."""
    merged: dict[str, Any] = {"state": {}, "grads": {}}
    for path in source.glob("rank-*.pt"):
        record = torch.load(path, weights_only=False)
        merged = record | {kind: merged[kind] | record[kind] for kind in ("state", "grads")}
    return merged


def in_memory(built: Built) -> Tensors:
    state = model_state(built.model_parts) | optimizer_state(built.model_parts, built.optimizer)
    return {name: full_tensor(tensor).clone() for name, tensor in state.items()}


def backward(job: Job, built: Built, at: TrainState, store: str) -> float:
    """Run forward and backward of the next step; return the loss."""
    built.optimizer.zero_grad()
    loader = loader_of(job, plan_here(job), store, built.mesh)
    loss = built.train_step.forward_backward(loader.get_microbatches(at.samples))
    dist.all_reduce(loss)
    return loss.item()


def gradients(built: Built) -> Tensors:
    return {
        name: full_tensor(p.grad).clone() for name, p in trainable_parameters(built.model_parts)
    }


def never(text: str) -> None:
    raise AssertionError(text)


def start(
    layout: str,
    job: Overrides,
    store: Path,
    sources: list[Path],
    target: Path | None,
    first: int = 0,
) -> None:
    """Run `save_and_resume` on the ranks of a layout."""
    ranks, overrides = parse(layout)
    if target is not None:
        target.mkdir()
    names = [str(source) for source in sources]
    call = (job + overrides, str(store), names, str(target or ""), first)
    results = run_ranks(save_and_resume, ranks, *call, timeout=300)
    for source, parts in zip(sources, zip(*results, strict=True), strict=True):
        assert set().union(*parts) == set(
            merge_records(source)["state"]
        )  # each tensor is on some rank
    if target is not None:
        check_saved(target)


def check_saved(target: Path) -> None:
    """Check that the files contain the state in memory, and that it is not trivial."""
    state = merge_records(target)["state"]
    (path,) = list_checkpoints(target / "checkpoints")
    on_disk = read_state(path)
    assert on_disk.keys() == state.keys()
    assert all(on_disk[name].equal(tensor) for name, tensor in state.items())
    assert all(state[name].any() for name in state if name.endswith((".exp_avg", ".exp_avg_sq")))
    assert sum(name.endswith(".exp_avg") for name in state) == len(merge_records(target)["grads"])


# --------------------------------------------------------------------------- chains of layouts

RING = [
    "",
    "pp2",
    "dp_shard3",
    "tp2",
    "dp_replicate2 dp_shard2",
    "pp2 pipeline.schedule=Interleaved1F1B",
    "cp2",
    "dp_shard2 tp2",
    "pp4",
    "dp_shard2 pp2",
    "",
]


# Uneven shards, shards of two dims, and ranks with stages that are not consecutive.
SHORT_RING = ["dp_shard3", "dp_shard2 tp2", "pp2 pipeline.schedule=Interleaved1F1B"]


@pytest.mark.slow  # test_run_resumed_through_many_layouts_equals_one_process trains, too
@pytest.mark.parametrize("ring", [SHORT_RING, RING])
def test_resume_through_a_chain_of_layouts_is_exact(
    ring: list[str], store_path: Path, tmp_path: Path
) -> None:
    """The state passes from layout to layout, with a step in each of them."""
    before: list[Path] = []
    for turn, layout in enumerate(ring):
        target = tmp_path / f"{turn} {layout}"
        start(layout, JOB, store_path, before, target)
        before = [target]
    at = merge_records(before[0])["at"]
    assert (at.step, at.samples) == (len(ring), BATCH * len(ring))


# --------------------------------------------------------------------------- pairs of layouts

ALL = [
    *RING[:-1],
    "dp_shard2",
    "dp_shard4",
    "tp4",
    "pp2 tp2",
    "pp2 pipeline.schedule=DualPipeV",
    "dp_shard3 param_persistence_threshold=100",
    "dp_shard2 train.world_size_invariant=true train.microbatch_size=1",
]
SOME = ["", "dp_shard3", "tp2", "dp_replicate2 dp_shard2", "cp2", "dp_shard2 tp2"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("job", "layouts"),
    [(JOB, ALL), ([*JOB, ("model.tied_embeddings", "true")], SOME)],
    ids=["untied", "tied"],
)
def test_resume_from_each_layout_in_every_other_is_exact(
    job: Overrides, layouts: list[str], store_path: Path, tmp_path: Path
) -> None:
    directories = [tmp_path / f"{number} {layout}" for number, layout in enumerate(layouts)]
    for number, layout in enumerate(layouts):
        # Each layout begins at other samples, so no two of them save the same state.
        start(layout, job, store_path, [], directories[number], first=BATCH * number)
    for layout in layouts:
        start(layout, job, store_path, directories, None)
