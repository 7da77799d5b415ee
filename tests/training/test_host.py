"""The host never waits for the device in a step, and the device never waits for data."""

from __future__ import annotations

import ctypes
import resource
import threading
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import RankError, run_ranks
from tests.small import Overrides, before_each_step, losses, small_job, train_rank
from weft.data.dataset import open_dataset
from weft.data.loader import Prefetcher
from weft.planning.plan import Machine
from weft.planning.resolve import resolve
from weft.training import loop, run
from weft.training.setup import Rank, keep_freed_memory

UNLOGGED: Overrides = [
    ("train.steps", "14"),
    ("monitor.log_interval", "10"),
    ("resilience.replica_check", "0"),
]

# ------------------------------------------------------------------ waiting for the device

# Functions that copy a value to the host, and so wait for the device.
WAITS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy")


class Above(TorchFunctionMode):  # type: ignore[no-untyped-call]
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in WAITS and args[0].dtype != torch.int32:  # consensus tensors are in host memory
            SEEN[STEP[0], name] += 1
        return func(*args, **(kwargs or {}))


class Below(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "equal"):
            SEEN[STEP[0], name] += 1
        return func(*args, **(kwargs or {}))


SEEN: Counter[tuple[int, str]] = Counter()
STEP = [0]


def train_and_count(overrides: Overrides, store: str) -> dict[tuple[int, str], int]:
    """Train and count the synchronizing calls of each step, by name."""
    before_each_step(lambda step: STEP.__setitem__(0, step))
    with Above(), Below():
        train_rank(overrides, store)
    return dict(SEEN)


@pytest.mark.parametrize(
    ("ranks", "microbatch"),
    [
        (2, "2"),
        pytest.param(1, "auto", marks=pytest.mark.slow),
        pytest.param(1, "2", marks=pytest.mark.slow),
        pytest.param(2, "auto", marks=pytest.mark.slow),
    ],
)
def test_unlogged_step_does_not_wait_for_the_device(
    ranks: int, microbatch: str, store_path: Path, tmp_path: Path
) -> None:
    overrides = [*UNLOGGED, ("train.microbatch_size", microbatch), ("run.dir", str(tmp_path))]
    for results in run_ranks(train_and_count, ranks, overrides, str(store_path)):
        # Steps 1 and 10 are logged, 14 is the last one; step 1 also creates the optimizer's state.
        assert {step for step, _ in results} >= {1, 10, 14}
        assert {key: n for key, n in results.items() if key[0] in (*range(2, 10), 11, 12, 13)} == {}


def train_on_gpu_without_waiting(overrides: Overrides, store: str) -> None:
    def set_mode(step: int) -> None:
        unlogged = step in (*range(2, 10), 11, 12, 13)
        torch.cuda.set_sync_debug_mode("error" if unlogged else "default")

    before_each_step(set_mode)
    job = small_job(*overrides)
    rank = Rank(0, 0, 1, torch.device("cuda", 0))
    plan = resolve(job, Machine("cuda", devices=1, world_size=1))
    loop.train(plan, open_dataset(Path(store)), rank, Console(quiet=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="asks CUDA whether the host waits")
def test_unlogged_step_on_gpu_has_no_device_sync(store_path: Path, tmp_path: Path) -> None:
    overrides = [*UNLOGGED, ("precision.compute_dtype", "float32"), ("run.dir", str(tmp_path))]
    run_ranks(train_on_gpu_without_waiting, 1, overrides, str(store_path))


# ------------------------------------------------------------------ memory


BLOCK = 6 << 10  # pages of 4 KiB: 24 MiB


def faults(keep: bool) -> int:
    """Count page faults of three rounds of three blocks, after the heap has grown."""
    if keep:
        keep_freed_memory()
    else:
        # glibc's initial threshold, which glibc may raise dynamically.
        ctypes.CDLL(None).mallopt(-3, 128 << 10)
    before = 0
    for time in range(11):
        blocks = [torch.ones(BLOCK * 1024) for _ in range(3)]
        del blocks
        if time == 7:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_keep_freed_memory_freed_memory_is_not_returned() -> None:
    assert run_ranks(faults, 1, True)[0] < 2 * BLOCK
    assert run_ranks(faults, 1, False)[0] >= 9 * BLOCK


# ------------------------------------------------------------------ waiting for data


def train_with_thread(overrides: Overrides, store: str, fail_at: int = 0) -> list[str]:
    """Train with prefetched batches, as on a GPU; return the names of remaining threads."""

    def fail(step: int) -> None:
        if step == fail_at:
            raise RuntimeError(f"planned {[t.name for t in threading.enumerate()]}")

    before_each_step(fail)
    run.Prefetcher = lambda loader, device, use_thread: Prefetcher(loader, device, True)  # type: ignore
    with pytest.raises(RuntimeError, match="weft-data") if fail_at else nullcontext():
        train_rank(overrides, store)
    return [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_prefetched_batches_leave_losses_unchanged(
    ranks: int, store_path: Path, tmp_path: Path
) -> None:
    for name, function in (("plain", train_rank), ("ahead", train_with_thread)):
        overrides = [("run.dir", str(tmp_path / name)), ("data.packing", "documents")]
        overrides.append(("train.steps", "8"))
        remaining = run_ranks(function, ranks, overrides, str(store_path))  # type: ignore[arg-type]
    assert losses(tmp_path / "ahead") == losses(tmp_path / "plain")
    assert all("weft-data" not in names for names in remaining)


def test_prefetcher_of_a_failed_run_leaves_no_thread(store_path: Path, tmp_path: Path) -> None:
    overrides = [("run.dir", str(tmp_path))]
    (remaining,) = run_ranks(train_with_thread, 1, overrides, str(store_path), 5)
    assert "weft-data" not in remaining


def read_fails(overrides: Overrides, store: str) -> None:
    """Train with a loader that fails at the batch of step 4."""
    batch = run.Loader.get_microbatches

    def failing(loader: Any, consumed: int, *groups: int) -> Any:
        if consumed == 3 * loader.global_batch_size:
            raise OSError("no such page")
        return batch(loader, consumed, *groups)

    run.Loader.get_microbatches = failing  # type: ignore[method-assign]
    run.Prefetcher = lambda loader, device, use_thread: Prefetcher(loader, device, True)  # type: ignore
    train_rank(overrides, store)


def test_prefetcher_read_error_names_its_step(store_path: Path, tmp_path: Path) -> None:
    overrides = [("run.dir", str(tmp_path))]
    with pytest.raises(RankError, match=r"(?s)no such page.*in step 4"):
        run_ranks(read_fails, 1, overrides, str(store_path))
