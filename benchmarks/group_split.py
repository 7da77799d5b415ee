"""Split the communicator of all ranks, as a run does for each axis of its mesh.

    python benchmarks/group_split.py --ranks 8 [--device cpu]

weft creates all groups of an axis at once: NCCL splits the world's communicator with a color for
each group (`weft.parallel.private.create_group`).  This program does that for groups of each size
that divides the number of ranks, of neighbors and of strided ranks, checks an all-reduce in each
group, and prints the number of splits and the milliseconds of the slowest one.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from weft.parallel.private import create_group

TIMEOUT = timedelta(seconds=60)


def run_rank(rank: int, ranks: int, device_type: str, store: str) -> None:
    """Create the groups of one rank, and check their sums."""
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    backend, bound = "gloo", None
    if device_type == "cuda":
        torch.cuda.set_device(device)
        backend, bound = "cpu:gloo,cuda:nccl", device  # as `weft.training.setup.connect`
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=TIMEOUT,
        device_id=bound,
    )
    slowest, splits = 0.0, 0
    for size in (size for size in range(1, ranks + 1) if ranks % size == 0):
        for rows in (
            torch.arange(ranks).reshape(-1, size),
            torch.arange(ranks).reshape(size, -1).T,
        ):
            start = time.perf_counter()
            group = create_group(device.type, rows, f"groups of {size}")
            total = torch.tensor([float(rank)], device=device)
            dist.all_reduce(total, group=group)
            expected = rows[(rows == rank).any(1)][0].sum().item()
            if total.item() != expected:
                raise RuntimeError(f"rank {rank}: the sum of {rows.tolist()} is {total.item()}")
            slowest, splits = max(slowest, time.perf_counter() - start), splits + 1
    times = torch.tensor([slowest], device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    if rank == 0:
        print(f"{splits} splits, the slowest in {1e3 * times.item():.1f} ms", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        arguments = (options.ranks, options.device, str(Path(directory) / "store"))
        start_processes(run_rank, arguments, options.ranks)


if __name__ == "__main__":
    main()
