"""Format the ranks of each node of a mesh, and the nodes of each group."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from weft.config.axes import AXES
from weft.config.formatting import format_columns
from weft.planning.placement import (
    Sizes,
    count_ranks,
    group_array,
    nodes_per_group,
    rank_to_coordinates,
)

# A map of more nodes shows only the first ones.
MAX_NODES_SHOWN = 8


def format_rank_map(
    sizes: Sizes,
    local_world_size: int,
    stage_names: Sequence[str] | None = None,
    order: Sequence[str] = AXES,
) -> str:
    """Format the ranks of each node, and the nodes of each axis's groups.

    Of more than `MAX_NODES_SHOWN` nodes, the map shows only the first, and how the others differ.
    A node has one line per pipeline rank and replica, with ranks, indices on every axis, and the
    tensor-parallel groups in brackets.

    Args:
        sizes: size of each axis.
        local_world_size: ranks per node.
        stage_names: text for each pipeline rank.
        order: axes, outermost first.

    Raises:
        ValueError: if the number of ``stage_names``, the sizes or the order are invalid.
    """
    if stage_names and len(stage_names) != sizes.get("pp", 1):
        raise ValueError(f"{len(stage_names)} stage names for pp = {sizes.get('pp', 1)}")
    world_size = count_ranks(sizes)
    num_nodes = math.ceil(world_size / local_world_size)
    axes = [axis for axis in order if sizes.get(axis, 1) > 1]
    num_shown = num_nodes_shown(sizes, local_world_size, order, num_nodes)

    counts = f"{_format_count(world_size, 'rank')} on {_format_count(num_nodes, 'node')}"
    lines = [f"{counts} of {local_world_size}"]
    if axes:
        lines.append(f"outermost first: {' x '.join(f'{axis} {sizes[axis]}' for axis in axes)}")
    columns = [axis for axis in axes if axis != "tp"]
    titles = ["node", "ranks", *columns]
    titles += ["tp groups"] if "tp" in axes else []
    titles += ["units"] if stage_names else []
    rows = []
    for node in range(num_shown):
        ranks = range(node * local_world_size, min((node + 1) * local_world_size, world_size))
        for i, line in enumerate(_split_into_lines(ranks, sizes, order)):
            first, last = (rank_to_coordinates(rank, sizes, order) for rank in (line[0], line[-1]))
            row = ["" if i else str(node), _format_range(line[0], line[-1])]
            row += [_format_range(first[axis], last[axis]) for axis in columns]
            row += [_tp_groups(line, sizes["tp"], local_world_size)] if "tp" in axes else []
            row += [stage_names[first["pp"]]] if stage_names else []
            rows.append(row)
    lines += ["", *format_columns(titles, rows, left=range(len(titles)))]
    if num_shown < num_nodes:
        lines.append(f"nodes {_format_range(num_shown, num_nodes - 1)} continue the pattern:")
        texts = describe_repetition(sizes, local_world_size, order, num_shown)
        lines += [f"  {text}" for text in texts]
        lines += _stage_nodes_table(sizes, local_world_size, stage_names, order)
    lines += _axes_table(axes, sizes, local_world_size, order)
    return "\n".join(lines)


def _split_into_lines(ranks: range, sizes: Sizes, order: Sequence[str]) -> list[list[int]]:
    """Split the consecutive ranks of a node into the lines of a map.

    On a line, each axis has a range of indices, and the ranks are all combinations of them, so
    that the ranges alone describe the line.
    """
    coordinates = [(rank, rank_to_coordinates(rank, sizes, order)) for rank in ranks]
    split_axes = {"pp", "dp_replicate"}
    if count_ranks(sizes, (axis for axis in AXES if axis not in split_axes)) == 1:
        # Replicas of one rank share a line, because their indices follow from their ranks.
        split_axes = {"pp"}
    # If nodes and mesh do not align, lines must be finer; lines of one tp group always suffice.
    finer_axes = [axis for axis in order if axis not in split_axes and axis != "tp"]
    while True:
        lines = [
            list(line)
            for _, line in itertools.groupby(
                coordinates, lambda item: [item[1][a] for a in split_axes]
            )
        ]
        if not finer_axes or all(
            len(line) == math.prod(line[-1][1][a] - line[0][1][a] + 1 for a in AXES)
            for line in lines
        ):
            return [[rank for rank, _ in line] for line in lines]
        split_axes.add(finer_axes.pop(0))


def _tp_groups(ranks: Sequence[int], tp: int, local_world_size: int) -> str:
    """Format the tensor-parallel groups of consecutive ranks, such as ``[0-3] [4-7]``."""
    texts = []
    for first in range(ranks[0] // tp * tp, ranks[-1] + 1, tp):
        last = first + tp - 1
        nodes = (first // local_world_size, last // local_world_size)
        suffix = "" if nodes[0] == nodes[1] else f" on nodes {_format_range(*nodes)}"
        texts.append(f"[{_format_range(first, last)}]{suffix}")
    return " ".join(texts if len(texts) <= 4 else [*texts[:2], "...", texts[-1]])


def _axis_strides(sizes: Sizes, order: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return (axis, stride, extent in ranks) of axes larger than 1, innermost first."""
    strides, stride = [], 1
    for axis in reversed(order):
        if (size := sizes.get(axis, 1)) > 1:
            strides.append((axis, stride, stride * size))
            stride *= size
    return strides


def num_nodes_shown(
    sizes: Sizes, local_world_size: int, order: Sequence[str], num_nodes: int
) -> int:
    """Return the number of nodes in the pattern that the other nodes repeat."""
    if num_nodes <= MAX_NODES_SHOWN:
        return num_nodes
    periods = [
        math.lcm(extent, local_world_size) // local_world_size
        for _, _, extent in _axis_strides(sizes, order)
    ]
    return max((n for n in periods if 1 < n <= MAX_NODES_SHOWN), default=2)


def describe_repetition(
    sizes: Sizes, local_world_size: int, order: Sequence[str], num_shown: int
) -> list[str]:
    """Describe by axis how the other nodes differ from the first ``num_shown``."""
    texts = []
    ranks_shown = num_shown * local_world_size
    for axis, stride, extent in _axis_strides(sizes, order):
        if extent <= ranks_shown and ranks_shown % extent == 0:
            continue  # the shown nodes have the complete axis
        period = math.lcm(stride, local_world_size)  # ranks between steps at a node's first rank
        if extent % period:
            every = f"every {_format_count(stride, 'rank')}" if stride > 1 else "with every rank"
            texts.append(f"{axis} + 1 {every}")
        else:
            nodes = period // local_world_size
            every = f"every {nodes} nodes" if nodes > 1 else "with every node"
            texts.append(f"{axis} + {period // stride} {every}")
    return texts


def _stage_nodes_table(
    sizes: Sizes, local_world_size: int, stage_names: Sequence[str] | None, order: Sequence[str]
) -> list[str]:
    """Format the nodes of each pipeline rank, for a map that does not show all nodes."""
    if (pp := sizes.get("pp", 1)) == 1:
        return []
    other_axes = [axis for axis in AXES if axis != "pp"]
    ranks = group_array(other_axes, sizes, order)  # one row per pipeline rank
    rows = []
    for index in range(pp):
        nodes = np.unique(ranks[index] // local_world_size).tolist()
        units = [stage_names[index]] if stage_names else []
        rows.append([str(index), format_ranges(nodes), *units])
    titles = ["pp", "nodes", *(["units"] if stage_names else [])]
    return ["", *format_columns(titles, rows, left=range(len(titles)))]


def _axes_table(
    axes: Sequence[str], sizes: Sizes, local_world_size: int, order: Sequence[str]
) -> list[str]:
    """Format the groups of each axis, with a group that spans the most nodes."""
    rows = []
    for axis in axes:
        groups = group_array(axis, sizes, order)
        node_counts = nodes_per_group(groups, local_world_size)
        widest = int(node_counts.argmax())
        nodes = int(node_counts[widest])
        span = "inside a node" if nodes == 1 else f"across {nodes} nodes"
        example = format_ranges(groups[widest].tolist())
        rows.append([axis, str(sizes[axis]), str(len(groups)), span, example])
    titles = ["axis", "size", "groups", "span", "example ranks"]
    return ["", *format_columns(titles, rows, left=range(len(titles)))] if rows else []


def _format_count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _format_range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def format_ranges(numbers: Sequence[int]) -> str:
    """Format sorted numbers, such as ``0-2, 8-9``; abbreviate more than four ranges."""
    texts = []
    # Consecutive numbers differ from their positions by a constant.
    for _, group in itertools.groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
        members = [number for _, number in group]
        texts.append(_format_range(members[0], members[-1]))
    return ", ".join(texts if len(texts) <= 4 else [*texts[:3], "...", texts[-1]])
