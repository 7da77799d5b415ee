"""Compare how context-parallel ranks share the attention of packed documents.

    python benchmarks/cp_balance.py

The documents are the files of this repository: Python modules and Markdown pages, four bytes a
token, in a random order, packed as `data.packing=documents` packs them.  Per row: the most that a
rank computes over the mean of the ranks, for each `parallel.cp_load_balance`, as the mean over the
sequences and the worst sequence; the same for the time of a ring, in which a rank starts a step
when the previous rank has started its step before; and the kernels of attention of a rank and
layer in a ring, with one for each document and with the kernel for many lengths.  It takes seconds,
on any machine, because it computes no attention.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from statistics import mean

import torch

from weft.models.attention import DEFAULT_OPTIONS
from weft.parallel.block_attention import AttentionBlock, DocumentBlocks, list_blocks
from weft.parallel.token_split import LoadBalance, split_sequences

ROOT = Path(__file__).parent.parent
BALANCES: tuple[LoadBalance, ...] = (False, True, "documents")
BYTES_PER_TOKEN = 4


def document_lengths() -> list[int]:
    """Return the tokens of each document, shuffled."""
    files = sorted(
        path for name in ("weft", "tests", "docs") for path in (ROOT / name).rglob("*.[pm][yd]")
    )
    lengths = [path.stat().st_size // BYTES_PER_TOKEN + 1 for path in files]
    random.Random(0).shuffle(lengths)
    return lengths


def pack(lengths: list[int], seq_len: int) -> Iterator[list[int]]:
    """Yield where each document of a sequence begins, then its end."""
    starts, end = [0], 0
    for length in lengths:
        end += length
        while end >= seq_len:
            yield [*starts, seq_len]
            starts, end = [0], end - seq_len
        if end:
            starts.append(end)


def pairs_of(block: AttentionBlock) -> int:
    """Return the pairs of a query and a key that a block computes."""
    queries: int = block.queries.stop - block.queries.start
    keys: int = block.keys.stop - block.keys.start
    return queries * (queries + 1) // 2 if block.causal else queries * keys


def measure(
    sequences: list[list[int]], size: int, load_balance: LoadBalance
) -> tuple[float, float, float, float, float]:
    """Return the mean and the worst imbalance, the mean imbalance of a ring, and kernels.

    Kernels are those of a rank and layer in a ring: of a kernel for each document, and of the one
    for many lengths.
    """
    imbalances, rings, counts, varlen_counts = [], [], [], []
    for starts in sequences:
        split = split_sequences([starts], size, load_balance)
        blocks = [list_blocks([starts], rank, split, ring=True) for rank in range(size)]
        costs = [
            [sum(map(pairs_of, of_rank[(rank - step) % size])) for step in range(size)]
            for rank, of_rank in enumerate(blocks)
        ]
        average = sum(map(sum, costs)) / size
        imbalances.append(max(map(sum, costs)) / average)
        rings.append(ring_time(costs) / average)
        counts += [sum(map(len, of_rank)) for of_rank in blocks]
        for rank in range(size):
            documents = DocumentBlocks([starts], rank, split, True, torch.device("cpu"))
            varlen_counts.append(sum(map(len, documents.select(DEFAULT_OPTIONS))))
    return mean(imbalances), max(imbalances), mean(rings), mean(counts), mean(varlen_counts)


def ring_time(costs: list[list[int]]) -> int:
    """Return when the last rank ends, if a message takes no time.

    Args:
        costs: time of each step of each rank.
    """
    starts = [0] * len(costs)
    for step in range(len(costs) - 1):
        ends = [start + cost[step] for start, cost in zip(starts, costs, strict=True)]
        # Keys and values leave a rank when it starts to compute with them.
        starts = [max(end, starts[rank - 1]) for rank, end in enumerate(ends)]
    return max(start + cost[-1] for start, cost in zip(starts, costs, strict=True))


def main() -> None:
    """Print the table."""
    lengths = document_lengths()
    print("| tokens | cp | cp_load_balance | largest / mean | worst | ring | kernels | varlen |")
    print("|---|---|---|---|---|---|---|---|")
    for seq_len, size in product((8192, 32768, 131072), (2, 4, 8)):
        sequences = list(pack(lengths, seq_len))
        assert all(b > a for starts in sequences for a, b in pairwise(starts))
        for load_balance in BALANCES:
            average, worst, ring, kernels, varlen = measure(sequences, size, load_balance)
            name = str(load_balance).lower()
            row = f"{seq_len:,} | {size} | {name} | {average:.2f} | {worst:.2f} | {ring:.2f}"
            print(f"| {row} | {kernels:.1f} | {varlen:.1f} |")


if __name__ == "__main__":
    main()
