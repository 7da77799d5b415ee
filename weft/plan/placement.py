"""Placement: which rank is where in the mesh, and which groups of ranks stay inside a node.

A mesh gives every rank one index on each axis, as the digits of its number: the last axis
varies fastest.  Ranks are numbered node by node, as torchrun and Slurm do, and inside a node
ranks talk to each other up to ten times faster than across.  So the order of the axes decides
whose traffic is fast.

By how much they need it: tensor parallelism communicates several times in every layer with
nothing to compute meanwhile, so its axis is always the last one.  Context parallelism and
sharded data parallelism move a layer's keys and values or its weights, while a layer is being
computed.  Replicas add up gradients once a step.  A pipeline only hands the activations of a
stage's last layer to the next stage.  That leaves one real choice:

* *pipeline-outer* (`AXES`): pp varies slowest.  Its traffic, the lightest, crosses nodes, and
  the ranks of a data-parallel group, which share a stage, are as near as can be.
* *replica-outer*: dp_replicate varies slowest.  A replica, one whole copy of the model, keeps
  nodes to itself, so a lost node costs one replica, and all its traffic but the sum of the
  gradients stays on its nodes.

Example: pipelines of 6 stages, tensor parallel over 4, nodes of 8.  Replica-outer, a replica is
three nodes and each node has two consecutive stages; pipeline-outer, each node has one stage of
two replicas.  A tensor-parallel group is half a node in both.

Any other order that ends with tp is taken too.

Sizes are given as a mapping of axis to size; an axis left out has size 1.  An ``order`` is the
axes from the one that varies slowest to ``tp``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from weft.plan.stages import format_columns

# The axes of a mesh, and their order over the ranks unless another is asked for.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

MESH_ORDERS: dict[str, tuple[str, ...]] = {
    "pipeline-outer": AXES,
    "replica-outer": ("dp_replicate", "pp", "dp_shard", "cp", "tp"),
}

# A map of more nodes than these shows the first ones only.
MAX_NODES_SHOWN = 8

Sizes = Mapping[str, int]
Array = np.ndarray[Any, np.dtype[np.int64]]


# --------------------------------------------------------------------------- ranks and groups


def count_ranks(sizes: Sizes) -> int:
    """The number of ranks."""
    return math.prod(sizes.values())


def rank_to_coordinates(rank: int, sizes: Sizes, order: Sequence[str] = AXES) -> dict[str, int]:
    """The index of ``rank`` on each axis, in the order of `AXES`.

    Raises:
        ValueError: if there is no such rank, or sizes or order are none.
    """
    shape = _shape(sizes, order)
    if not 0 <= rank < math.prod(shape):
        raise ValueError(f"rank {rank} is not one of {math.prod(shape)}")
    found = {}
    for axis, size in zip(reversed(order), reversed(shape), strict=True):
        rank, found[axis] = divmod(rank, size)
    return {axis: found[axis] for axis in AXES}


def coordinates_to_rank(indices: Mapping[str, int], sizes: Sizes, order: Sequence[str] = AXES) -> int:
    """The rank with these indices; an axis left out has index 0.  Inverse of `rank_to_coordinates`.

    Raises:
        ValueError: if an index is outside of its axis, or sizes or order are none.
    """
    rank = 0
    if unknown := set(indices) - set(AXES):
        raise ValueError(f"no such axis: {', '.join(sorted(unknown))}")
    for axis, size in zip(order, _shape(sizes, order), strict=True):
        index = indices.get(axis, 0)
        if not 0 <= index < size:
            raise ValueError(f"{axis} = {index} is not one of {size}")
        rank = rank * size + index
    return rank


def rank_groups(
    axes: str | Sequence[str], sizes: Sizes, order: Sequence[str] = AXES
) -> list[tuple[int, ...]]:
    """The groups of ranks that communicate along an axis, or along several as if they were one.

    Returns:
        ``world / size`` tuples of ``size`` ranks, which differ in ``axes`` only.  Both the
        groups and the ranks in them are in the order of `AXES`, like the rows of a
        ``DeviceMesh`` of these axes and of its flattened slices.

    Raises:
        ValueError: if there is no such axis, or sizes or order are none.
    """
    return [tuple(group) for group in _group_array(axes, sizes, order).tolist()]


def _group_array(axes: str | Sequence[str], sizes: Sizes, order: Sequence[str]) -> Array:
    """`rank_groups` as an array ``[number of groups, size]``."""
    chosen = {axes} if isinstance(axes, str) else set(axes)
    if unknown := chosen - set(AXES):
        raise ValueError(f"no such axis: {', '.join(sorted(unknown))}")
    shape = _shape(sizes, order)
    ranks = np.arange(math.prod(shape)).reshape(shape)
    others_first = [axis for axis in AXES if axis not in chosen]
    others_first += [axis for axis in AXES if axis in chosen]
    size = math.prod(sizes.get(axis, 1) for axis in chosen)
    found: Array = ranks.transpose([order.index(axis) for axis in others_first])
    return found.reshape(-1, size)


def _shape(sizes: Sizes, order: Sequence[str]) -> tuple[int, ...]:
    """The size of each axis of ``order``, with both checked."""
    if sorted(order) != sorted(AXES) or order[-1] != "tp":
        raise ValueError(f"an order names each of {', '.join(AXES)} once and ends with tp")
    if unknown := set(sizes) - set(AXES):
        raise ValueError(f"no such axis: {', '.join(sorted(unknown))}")
    if any(size < 1 for size in sizes.values()):
        raise ValueError(f"sizes must be at least 1: {dict(sizes)}")
    return tuple(sizes.get(axis, 1) for axis in order)


# --------------------------------------------------------------------------- nodes


def ranks_per_node(group: Iterable[int], local_world_size: int) -> dict[int, int]:
    """How many ranks of ``group`` each node has, of nodes with ``local_world_size`` ranks."""
    counts: dict[int, int] = {}
    for rank in group:
        node = rank // local_world_size
        counts[node] = counts.get(node, 0) + 1
    return counts


def max_nodes_per_group(
    axes: str | Sequence[str], sizes: Sizes, local_world_size: int, order: Sequence[str] = AXES
) -> int:
    """The nodes of the group of ``axes`` that has most of them."""
    return int(_nodes_per_group(_group_array(axes, sizes, order), local_world_size).max())


def crosses_nodes(
    axes: str | Sequence[str], sizes: Sizes, local_world_size: int, order: Sequence[str] = AXES
) -> bool:
    """Whether any group of ``axes`` has ranks on several nodes."""
    return max_nodes_per_group(axes, sizes, local_world_size, order) > 1


def _nodes_per_group(group_ranks: Array, local_world_size: int) -> Array:
    """The number of nodes of each group."""
    nodes = np.sort(group_ranks // local_world_size, axis=1)
    changes: Array = np.count_nonzero(np.diff(nodes, axis=1), axis=1)
    return changes + 1


def placement_warnings(
    sizes: Sizes, local_world_size: int, order: Sequence[str] = AXES
) -> list[str]:
    """What will make a run slow for want of a better placement; empty for most.

    Only what surely hurts: every other axis may well cross nodes, and in a large run must.
    """
    warnings = []
    world, tp = count_ranks(sizes), sizes.get("tp", 1)
    if (nodes := max_nodes_per_group("tp", sizes, local_world_size, order)) > 1:
        groups = _group_array("tp", sizes, order)
        one = groups[_nodes_per_group(groups, local_world_size).argmax()]
        *fitting, most = [n for n in range(1, local_world_size + 1) if local_world_size % n == 0]
        fit = f"{', '.join(map(str, fitting))} or {most}" if fitting else str(most)
        warnings.append(
            f"parallel.tp = {tp}: the group of ranks {one.min()}-{one.max()} spans {nodes} nodes "
            f"of {local_world_size}, and tp communicates several times in every layer with "
            f"nothing to compute meanwhile; use a tp that divides the ranks of a node: {fit}"
        )
    if world > local_world_size and (rest := world % local_world_size):
        warnings.append(
            f"{world} ranks do not fill nodes of {local_world_size}: the last has {rest}, and "
            f"groups do not line up with nodes; use a multiple of {local_world_size} ranks"
        )
    return warnings


# --------------------------------------------------------------------------- the map


def format_rank_map(
    sizes: Sizes,
    local_world_size: int,
    stages: Sequence[str] | None = None,
    order: Sequence[str] = AXES,
) -> str:
    """The placement as text: what each node holds, and where the groups of each axis run.

    Of more than `MAX_NODES_SHOWN` nodes only the first are shown, and how the others differ from them.
    A node has one line for each pipeline rank and replica on it: their ranks, their indices on
    every axis, and the tensor-parallel groups in brackets.

    Args:
        sizes: of the axes.
        local_world_size: ranks of a node.
        stages: for each index on pp, what it holds, shown as it is.
        order: of the axes over the ranks.

    Raises:
        ValueError: if ``stages`` does not have one text per index on pp, or sizes or order are
            none.
    """
    if stages and len(stages) != sizes.get("pp", 1):
        raise ValueError(f"{len(stages)} stages for pp = {sizes.get('pp', 1)}")
    world = count_ranks(sizes)
    num_nodes = math.ceil(world / local_world_size)
    axes = [axis for axis in order if sizes.get(axis, 1) > 1]
    shown = num_nodes_shown(sizes, local_world_size, order, num_nodes)

    lines = [f"{_format_count(world, 'rank')} on {_format_count(num_nodes, 'node')} of {local_world_size}"]
    if axes:
        lines.append(f"outermost first: {' x '.join(f'{axis} {sizes[axis]}' for axis in axes)}")
    columns = [axis for axis in axes if axis != "tp"]
    titles = ["node", "ranks", *columns]
    titles += ["tp groups"] if "tp" in axes else []
    titles += ["holds"] if stages else []
    rows = []
    for node in range(shown):
        ranks = range(node * local_world_size, min((node + 1) * local_world_size, world))
        for i, part in enumerate(_split_into_lines(ranks, sizes, order)):
            first, last = (rank_to_coordinates(rank, sizes, order) for rank in (part[0], part[-1]))
            row = ["" if i else str(node), _format_range(part[0], part[-1])]
            row += [_format_range(first[axis], last[axis]) for axis in columns]
            row += [_tp_groups(part, sizes["tp"], local_world_size)] if "tp" in axes else []
            row += [stages[first["pp"]]] if stages else []
            rows.append(row)
    lines += ["", *format_columns(titles, rows, left=range(len(titles)))]
    if shown < num_nodes:
        rest = _format_range(shown, num_nodes - 1)
        lines.append(f"nodes {rest} go on like this:")
        lines += [f"  {text}" for text in describe_repetition(sizes, local_world_size, order, shown)]
        lines += _stage_nodes_table(sizes, local_world_size, stages, order)
    lines += _axes_table(axes, sizes, local_world_size, order)
    return "\n".join(lines)


def _split_into_lines(ranks: range, sizes: Sizes, order: Sequence[str]) -> list[list[int]]:
    """Consecutive ranks of a node, cut into the lines of a map.

    In a line, each axis has a range of indices and all combinations of them are there, so that
    a line can be read by its ranges alone.
    """
    found = [(rank, rank_to_coordinates(rank, sizes, order)) for rank in ranks]
    of_replica = math.prod(sizes.get(axis, 1) for axis in ("dp_shard", "cp", "tp"))
    # Replicas of one rank each, whose ranks can be read off, need no line each.
    split = {"pp"} if of_replica == 1 else {"pp", "dp_replicate"}
    # Where node and mesh do not line up, finer lines are needed; those of tp alone always will do.
    finer = [axis for axis in order if axis not in split and axis != "tp"]
    while True:
        runs = [
            list(run)
            for _, run in itertools.groupby(found, key=lambda item: [item[1][a] for a in split])
        ]
        if not finer or all(
            len(run) == math.prod(run[-1][1][a] - run[0][1][a] + 1 for a in AXES) for run in runs
        ):
            return [[rank for rank, _ in run] for run in runs]
        split.add(finer.pop(0))


def _tp_groups(ranks: Sequence[int], tp: int, local_world_size: int) -> str:
    """The tensor-parallel groups of consecutive ranks, as ``[0-3] [4-7]``."""
    texts = []
    for first in range(ranks[0] // tp * tp, ranks[-1] + 1, tp):
        last = first + tp - 1
        nodes = (first // local_world_size, last // local_world_size)
        where = "" if nodes[0] == nodes[1] else f" on nodes {_format_range(*nodes)}"
        texts.append(f"[{_format_range(first, last)}]{where}")
    return " ".join(texts if len(texts) <= 4 else [*texts[:2], "...", texts[-1]])


def _axis_strides(sizes: Sizes, order: Sequence[str]) -> list[tuple[str, int, int]]:
    """Axes of more than one index, innermost first: axis, ranks per step, ranks of all steps."""
    found, stride = [], 1
    for axis in reversed(order):
        if (size := sizes.get(axis, 1)) > 1:
            found.append((axis, stride, stride * size))
            stride *= size
    return found


def num_nodes_shown(sizes: Sizes, local: int, order: Sequence[str], num_nodes: int) -> int:
    """How many nodes make a pattern that the others repeat: a whole replica, stage or the like."""
    if num_nodes <= MAX_NODES_SHOWN:
        return num_nodes
    aligned = [math.lcm(extent, local) // local for _, _, extent in _axis_strides(sizes, order)]
    return max((n for n in aligned if 1 < n <= MAX_NODES_SHOWN), default=2)


def describe_repetition(sizes: Sizes, local: int, order: Sequence[str], shown: int) -> list[str]:
    """How nodes after the first ``shown`` differ from them, axis by axis."""
    texts = []
    for axis, stride, extent in _axis_strides(sizes, order):
        if extent <= shown * local and (shown * local) % extent == 0:
            continue  # complete in what is shown
        period = math.lcm(stride, local)  # from one step at a node's first rank to the next
        if extent % period:
            every = f"every {_format_count(stride, 'rank')}" if stride > 1 else "with every rank"
            texts.append(f"{axis} + 1 {every}")
        else:
            nodes = period // local
            every = f"every {nodes} nodes" if nodes > 1 else "with every node"
            texts.append(f"{axis} + {period // stride} {every}")
    return texts


def _stage_nodes_table(
    sizes: Sizes, local: int, stages: Sequence[str] | None, order: Sequence[str]
) -> list[str]:
    """The nodes of each pipeline rank, for a map that does not show them all."""
    if (pp := sizes.get("pp", 1)) == 1:
        return []
    others = [axis for axis in AXES if axis != "pp"]
    ranks = _group_array(others, sizes, order)  # one row per pipeline rank
    rows = []
    for index in range(pp):
        nodes = np.unique(ranks[index] // local).tolist()
        rows.append([str(index), format_ranges(nodes), *([stages[index]] if stages else [])])
    titles = ["pp", "on nodes", *(["holds"] if stages else [])]
    return ["", *format_columns(titles, rows, left=range(len(titles)))]


def _axes_table(axes: Sequence[str], sizes: Sizes, local: int, order: Sequence[str]) -> list[str]:
    """One group of each axis, of those on most nodes."""
    rows = []
    for axis in axes:
        ranks = _group_array(axis, sizes, order)
        spans = _nodes_per_group(ranks, local)
        widest = int(spans.argmax())
        nodes = int(spans[widest])
        where = "inside a node" if nodes == 1 else f"across {nodes} nodes"
        row = [axis, str(sizes[axis]), str(len(ranks)), where, format_ranges(ranks[widest].tolist())]
        rows.append(row)
    titles = ["axis", "size", "groups", "each", "for example ranks"]
    return ["", *format_columns(titles, rows, left=range(len(titles)))] if rows else []


def _format_count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _format_range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def format_ranges(numbers: Sequence[int]) -> str:
    """``0, 1, 2, 8, 9`` -> ``0-2, 8-9``; of more than four such ranges the middle is left out."""
    texts = []
    # In a run of consecutive numbers, each differs from its place by the same.
    for _, run in itertools.groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
        members = [number for _, number in run]
        texts.append(_format_range(members[0], members[-1]))
    return ", ".join(texts if len(texts) <= 4 else [*texts[:3], "...", texts[-1]])
