"""Time of two passes that take turns, as in `weft.parallel.pass_overlap`.

A pass is a list of chunks: a computation, then an exchange of tokens (or none, at the end).  After
a chunk with an exchange the other pass computes.  A pass continues when its exchange has ended.
There is one device to compute and one link for the exchanges of both.  The forward pass begins,
unless it has no exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Chunk(NamedTuple):
    """Seconds of a computation, and of the exchange that follows it."""

    compute: float
    exchange: float


def paired_seconds(forward: Sequence[Chunk], backward: Sequence[Chunk]) -> float:
    """Return the seconds until both passes have ended."""
    passes = forward, backward
    device = link = 0.0  # when each is free
    ready, position = [0.0, 0.0], [0, 0]
    turn = 0 if any(chunk.exchange for chunk in forward) else 1
    for _ in range(len(forward) + len(backward)):
        if position[turn] == len(passes[turn]):
            turn = 1 - turn
        compute, exchange = passes[turn][position[turn]]
        position[turn] += 1
        device = max(device, ready[turn]) + compute
        if exchange:
            link = ready[turn] = max(link, device) + exchange
            turn = 1 - turn
    return max(device, link)
