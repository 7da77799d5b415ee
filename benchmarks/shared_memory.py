"""Compare gloo's all-reduce with a reduction through shared memory, on this machine's CPU.

    OMP_NUM_THREADS=1 python benchmarks/shared_memory.py [--ranks 2] [--rounds 30]

Each rank copies its vector to shared memory, adds its part of all vectors, and copies the sum back;
a barrier on shared counters separates the three.  That is the least that such a reduction can do.
Both kinds alternate in one run.  The ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from datetime import date

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

SIZES = (250_000, 2_000_000, 30_000_000)  # float32 elements
PORT = "29617"


def main() -> None:
    """Run all sizes and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    print(f"{date.today()}, torch {torch.__version__}, Python {platform.python_version()}")
    for size in SIZES:
        vectors = torch.empty(options.ranks + 1, size).share_memory_()  # the last one is the sum
        turns = torch.zeros(options.ranks, dtype=torch.int64).share_memory_()
        spawn(measure, (options.ranks, vectors, turns, options.rounds), nprocs=options.ranks)


def measure(rank: int, ranks: int, vectors: torch.Tensor, turns: torch.Tensor, rounds: int) -> None:
    """Time both reductions on one rank; rank 0 prints."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    size = vectors.shape[1]
    part = slice(rank * size // ranks, (rank + 1) * size // ranks)
    vector, turn = torch.randn(size), 0
    seconds: dict[str, list[float]] = {"gloo": [], "shared memory": []}

    def wait() -> None:
        nonlocal turn
        turn += 1
        turns[rank] = turn
        while int(turns.min()) < turn:
            time.sleep(0)

    for number in range(rounds):
        for kind in list(seconds)[:: 1 if number % 2 else -1]:
            dist.barrier()
            begin = time.perf_counter()
            if kind == "gloo":
                dist.all_reduce(vector)
            else:
                vectors[rank].copy_(vector)
                wait()
                torch.sum(vectors[:ranks, part], 0, out=vectors[ranks][part])
                wait()
                vector.copy_(vectors[ranks])
            seconds[kind].append(time.perf_counter() - begin)
            vector.mul_(1 / ranks)
    if rank == 0:
        gloo, shared = (statistics.median(values) * 1000 for values in seconds.values())
        pairs = zip(seconds["shared memory"], seconds["gloo"], strict=True)
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        megabytes = 4 * size / 1e6
        print(
            f"{megabytes:4.0f} MB  gloo {gloo:6.2f} ms  shared {shared:6.2f} ms  ratio {ratio:.2f}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
