"""The tokens of each sequence that a context-parallel rank holds.

A causal query attends to all tokens of its document before it.  With contiguous slices the last
rank has nearly twice the average work, and all others wait.

*Documents* (``load_balance="documents"``): all ranks have equally many tokens of a sequence, and
equal attention to compute, for any documents.  The cost of a token is the number of keys that it
sees, summed over the layers.  Join the ends of the sequence to a circle.  One of its arcs of T / C
tokens has the mean cost of all arcs, to the cost of a token, because moving an arc by one token
changes its cost by no more.  A rank takes this arc, and the others split the circle without it.
The ranks have two ranges of tokens on average.  Every rank knows the documents of the sequences,
and computes the same split.

*Head and tail* (``load_balance`` true), as in Llama 3, is the split of one document: rank r has the
chunks r and 2 C - 1 - r of 2 C, one early and one late.  Striped attention (arXiv:2311.09431)
balances too, by assigning tokens round-robin.  But attention between contiguous ranges of two ranks
is either full or empty, and needs no mask.

Shapes in names as in `weft.parallel.context_parallel`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise, product
from operator import itemgetter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from weft.models.attention import layer_options
from weft.models.decoder_config import DecoderConfig

LoadBalance = bool | Literal["documents"]
TokenRanges = list[tuple[int, int]]  # begin and end of ranges of positions, in order
Split = list[list[TokenRanges]]  # by sequence, or one for all sequences; then by rank
LayerLimits = tuple[tuple[int, int, int], ...]  # window, chunk (0: none) and number of layers
ANY: LayerLimits = ((0, 0, 1),)


def split_sequences(
    boundaries: list[list[int]], size: int, load_balance: LoadBalance, limits: LayerLimits = ANY
) -> Split:
    """Return the tokens of each rank.

    Args:
        boundaries: where each document of each sequence begins, then T.
        size: number of ranks, C.
        load_balance: see the module docstring.
        limits: of the model's layers.

    Raises:
        ValueError: if C does not divide T.
    """
    num_tokens = boundaries[0][-1]
    if num_tokens % size:
        raise ValueError(f"{size} context-parallel ranks do not divide {num_tokens} tokens")
    if not load_balance:
        return [[[ends] for ends in pairwise(range(0, num_tokens + 1, num_tokens // size))]]
    if load_balance is True:
        boundaries, limits = [[0, num_tokens]], ANY
    return [split_documents(tuple(starts), size, tuple(limits)) for starts in boundaries]


@lru_cache(maxsize=256)
def split_documents(starts: tuple[int, ...], size: int, limits: LayerLimits) -> list[TokenRanges]:
    """Return each rank's tokens of a sequence, with equal cost of attention."""
    costs_T, num_local = token_costs(starts, limits), starts[-1] // size
    circle, ranks = np.arange(starts[-1]), []
    for num_ranks in range(size, 1, -1):
        costs = costs_T[circle]
        sums = np.cumsum(np.concatenate(([0], costs, costs[: num_local - 1])))
        arcs = sums[num_local:] - sums[:-num_local]  # of each first token
        first = np.abs(arcs * num_ranks - costs.sum()).argmin()
        arc = (first + np.arange(num_local)) % len(circle)
        ranks.append(np.sort(circle[arc]))
        circle = np.delete(circle, arc)
    # The first arcs of one document are in its middle: they are those of the last ranks.
    parts = (np.split(t, np.flatnonzero(np.diff(t) != 1) + 1) for t in (circle, *reversed(ranks)))
    return [[(int(part[0]), int(part[-1]) + 1) for part in each] for each in parts]


def layer_limits(model: Any) -> LayerLimits:
    """Return the limits of a model's layers; a user's model has one kind of layer."""
    if not isinstance(model, DecoderConfig):
        return ANY
    options = (layer_options(model, layer) for layer in range(model.num_layers))
    counts = Counter((each.window, each.chunk) for each in options)
    return tuple((*limits, num_layers) for limits, num_layers in counts.items())


def token_costs(starts: Sequence[int], limits: LayerLimits) -> Any:
    """Return how many keys each token sees in all layers, int64 ``[T]``."""
    end = starts[-1]
    places_T = np.arange(end) - np.repeat(starts[:-1], np.diff(starts))
    return sum(
        num_layers * np.minimum(places_T % (chunk or end) + 1, window or end)
        for window, chunk, num_layers in limits
    )


# --------------------------------------------------------------------------- tensors


def shard_sequence(x_BT: Tensor, split: Split) -> Tensor:
    """Return the tokens of each rank: ``[B, T, ...]`` to ``[C, B, L, ...]``.

    Args:
        x_BT: tokens, targets, positions or activations.  Their sequences are those of the split,
            once or several times.
        split: tokens of each rank.
    """
    by_rank = _list_pieces(split, len(x_BT))
    x_N = _reorder(x_BT.flatten(0, 1), sorted(by_rank, key=_position), by_rank)
    return torch.unflatten(x_N, 0, (len(split[0]), len(x_BT), -1))


def unshard_sequence(x_CBL: Tensor, split: Split) -> Tensor:
    """Undo `shard_sequence`: tokens of all ranks to ``[B, T, ...]``."""
    by_rank = _list_pieces(split, x_CBL.shape[1])
    x_N = _reorder(x_CBL.flatten(0, 2), by_rank, sorted(by_rank, key=_position))
    return torch.unflatten(x_N, 0, (x_CBL.shape[1], -1))


Piece = tuple[int, int, int, int]
_position = itemgetter(slice(1, None))


def _list_pieces(split: Split, num_sequences: int) -> list[Piece]:
    """Return all ranges of tokens, in order: rank, sequence, begin and end."""
    pairs = product(range(len(split[0])), range(num_sequences))
    return [(c, i, *ends) for c, i in pairs for ends in split[i % len(split)][c]]


def _reorder(x_N: Tensor, pieces: list[Piece], target: list[Piece]) -> Tensor:
    """Return the pieces of ``x_N`` in another order."""
    tensors = torch.split(x_N, [end - start for *_, start, end in pieces])
    by_piece = dict(zip(pieces, tensors, strict=True))
    return torch.cat([by_piece[piece] for piece in target])
