"""Placement: degrees of the mesh, coordinates of each rank, nodes of each group.

A mesh gives every rank one index on each axis, like the digits of a number: the last axis varies
fastest.  torchrun and Slurm number ranks node by node, and a link inside a node is up to ten times
faster than the network.  So the order of the axes decides which traffic is fast.

Tensor parallelism communicates several times in every layer, with nothing to compute meanwhile, so
its axis is always the last one.  Context parallelism and sharded data parallelism move keys and
values or weights of a layer during its computation.  Replicas reduce gradients once per step.  A
pipeline only sends the activations between stages.  That leaves one choice:

* *pipeline-outer* (`AXES`): pp varies slowest.  Its traffic, the lightest, crosses nodes, and the
  ranks of a data-parallel group, which share a stage, are as near as possible.
* *replica-outer*: dp_replicate varies slowest.  A replica, one copy of the model, does not share
  nodes, so a lost node costs one replica, and only the reduction of gradients leaves its nodes.

Example: pipelines of 6 stages, tensor parallelism over 4 ranks, nodes of 8.  Replica-outer, a
replica is three nodes, and each node has two consecutive stages; pipeline-outer, each node has one
stage of two replicas.  A tensor-parallel group is half a node in both.

The rules of a layout are in `weft.plan.rules`.  The functions accept every order that ends with tp.

``sizes`` maps axes to sizes; a missing axis has size 1.  ``order`` lists the axes, outermost first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.config.errors import ConfigErrors
from weft.config.escaping import format_columns
from weft.config.schema import ParallelSection

# The axes of a mesh, in their default order.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DEGREE_KEYS = tuple(f"parallel.{name}" for name in AXES)

MESH_ORDERS: dict[str, tuple[str, ...]] = {
    "pipeline-outer": AXES,
    "replica-outer": ("dp_replicate", "pp", "dp_shard", "cp", "tp"),
}

# A map of more nodes shows only the first ones.
MAX_NODES_SHOWN = 8

Sizes = Mapping[str, int]
Array = np.ndarray[Any, np.dtype[np.int64]]


# --------------------------------------------------------------------------- degrees


@dataclass(frozen=True)
class ParallelDims:
    """Ranks along each axis of the mesh."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int = 1  # splits the dp_shard x cp ranks

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Ranks along each axis of the mesh."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks, which read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp_size(self) -> int:
        """Ranks that FSDP shards a parameter over: dp_shard x cp."""
        return self.dp_shard * self.cp

    @property
    def world_size(self) -> int:
        """Ranks of the mesh."""
        return self.dp_size * self.pp * self.cp * self.tp


def resolve_degrees(
    errors: ConfigErrors, parallel: ParallelSection, world_size: int
) -> ParallelDims:
    """Return the degrees; ``dp_shard = "fit"`` takes all remaining ranks.

    If there are errors, the degrees are the nearest that other rules can check.
    """
    depends = ("run.nproc_per_node", *DEGREE_KEYS)
    unit = parallel.ranks_per_shard
    is_automatic = isinstance(parallel.dp_shard, str)
    dp_shard = (
        max(1, world_size // unit) if isinstance(parallel.dp_shard, str) else parallel.dp_shard
    )
    degrees = {name: getattr(parallel, name) for name in ("tp", "pp", "cp", "dp_replicate")}
    above_one = {name: degree for name, degree in degrees.items() if degree > 1}
    if is_automatic and world_size % unit:
        name = next(iter(above_one))
        others = " and ".join(f"{other}={n}" for other, n in list(above_one.items())[1:])
        times = f"times {others} ({unit} in all) " if others else ""
        valid = format_choices(divisors(world_size)) if not others else ""
        ranks = f"run.nproc_per_node={unit}" + (f" or a multiple of {unit}" if unit > 1 else "")
        remedy = f"use {valid}, or {ranks}" if valid else f"use {ranks}"
        rule = f"{times}does not divide the {world_size} ranks"
        errors.add(f"parallel.{name}", rule, remedy, depends)
    elif not is_automatic and unit * dp_shard != world_size:
        valid = f"use {world_size // unit}, or auto" if world_size % unit == 0 else "use auto"
        others = ", ".join(f"{other}={n}" for other, n in above_one.items())
        rule = f"times {others} " * bool(others) + f"is not equal to the {world_size} ranks"
        remedy = f"{valid}, or run.nproc_per_node={unit * dp_shard}"
        errors.add("parallel.dp_shard", rule, remedy, depends)
    return ParallelDims(
        parallel.pp, parallel.dp_replicate, dp_shard, parallel.cp, parallel.tp, parallel.ep
    )


def divisors(n: int, at_most: int | None = None) -> list[int]:
    """Return the divisors of ``n`` in ascending order, up to ``at_most``."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    all_divisors = sorted({*small, *(n // d for d in small)})
    return [d for d in all_divisors if d <= (at_most or n)]


def nearest_divisors(n: int, unit: int) -> list[int]:
    """Return the nonzero multiples of ``unit`` nearest to ``n``, one on each side."""
    below = n // unit * unit
    return [m for m in (below, below + unit) if m]


def format_choices(values: list[int]) -> str:
    """Format ``[1, 2, 4]`` as ``1, 2 or 4``; abbreviate a long list in the middle."""
    words = [str(value) for value in values]
    if len(words) > 8:
        words = [*words[:4], "...", *words[-3:]]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


# --------------------------------------------------------------------------- ranks and groups


def count_ranks(sizes: Sizes) -> int:
    """Return the number of ranks."""
    return math.prod(sizes.values())


def rank_to_coordinates(rank: int, sizes: Sizes, order: Sequence[str] = AXES) -> dict[str, int]:
    """Return the index of ``rank`` on each axis, in the order of `AXES`.

    Raises:
        ValueError: if the rank, the sizes or the order are invalid.
    """
    shape = _shape(sizes, order)
    if not 0 <= rank < math.prod(shape):
        raise ValueError(f"rank {rank} is out of range: the mesh has {math.prod(shape)} ranks")
    indices = {}
    for axis, size in zip(reversed(order), reversed(shape), strict=True):
        rank, indices[axis] = divmod(rank, size)
    return {axis: indices[axis] for axis in AXES}


def coordinates_to_rank(
    indices: Mapping[str, int], sizes: Sizes, order: Sequence[str] = AXES
) -> int:
    """Return the rank at these indices, the inverse of `rank_to_coordinates`.

    A missing axis has index 0.

    Raises:
        ValueError: if an index, the sizes or the order are invalid.
    """
    rank = 0
    if unknown := set(indices) - set(AXES):
        raise ValueError(f"unknown axis: {', '.join(sorted(unknown))}")
    for axis, size in zip(order, _shape(sizes, order), strict=True):
        index = indices.get(axis, 0)
        if not 0 <= index < size:
            raise ValueError(f"{axis} = {index} is out of range: the axis has size {size}")
        rank = rank * size + index
    return rank


def rank_groups(
    axes: str | Sequence[str], sizes: Sizes, order: Sequence[str] = AXES
) -> list[tuple[int, ...]]:
    """Return the groups of ranks along an axis, or along several flattened axes.

    Returns:
        ``world_size / size`` tuples of ``size`` ranks, which differ only in ``axes``.  The groups
        and the ranks in them are in the order of `AXES`, like the rows of a ``DeviceMesh`` of
        these axes.

    Raises:
        ValueError: if an axis, the sizes or the order are invalid.
    """
    return [tuple(group) for group in _group_array(axes, sizes, order).tolist()]


def _group_array(axes: str | Sequence[str], sizes: Sizes, order: Sequence[str]) -> Array:
    """Return `rank_groups` as an array ``[number of groups, size]``."""
    group_axes = {axes} if isinstance(axes, str) else set(axes)
    if unknown := group_axes - set(AXES):
        raise ValueError(f"unknown axis: {', '.join(sorted(unknown))}")
    shape = _shape(sizes, order)
    ranks = np.arange(math.prod(shape)).reshape(shape)
    output_axes = [axis for axis in AXES if axis not in group_axes]
    output_axes += [axis for axis in AXES if axis in group_axes]
    size = math.prod(sizes.get(axis, 1) for axis in group_axes)
    groups: Array = ranks.transpose([order.index(axis) for axis in output_axes])
    return groups.reshape(-1, size)


def _shape(sizes: Sizes, order: Sequence[str]) -> tuple[int, ...]:
    """Validate sizes and order; return the size of each axis of ``order``."""
    if sorted(order) != sorted(AXES) or order[-1] != "tp":
        raise ValueError(f"order must list each of {', '.join(AXES)} once and end with tp: {order}")
    if unknown := set(sizes) - set(AXES):
        raise ValueError(f"unknown axis: {', '.join(sorted(unknown))}")
    if any(size < 1 for size in sizes.values()):
        raise ValueError(f"sizes must be at least 1: {dict(sizes)}")
    return tuple(sizes.get(axis, 1) for axis in order)


# --------------------------------------------------------------------------- nodes


def ranks_per_node(group: Iterable[int], local_world_size: int) -> dict[int, int]:
    """Count the ranks of ``group`` on each of its nodes."""
    counts: dict[int, int] = {}
    for rank in group:
        node = rank // local_world_size
        counts[node] = counts.get(node, 0) + 1
    return counts


def max_nodes_per_group(
    axes: str | Sequence[str], sizes: Sizes, local_world_size: int, order: Sequence[str] = AXES
) -> int:
    """Return the largest number of nodes of any group of ``axes``."""
    return int(_nodes_per_group(_group_array(axes, sizes, order), local_world_size).max())


def crosses_nodes(
    axes: str | Sequence[str], sizes: Sizes, local_world_size: int, order: Sequence[str] = AXES
) -> bool:
    """Return True if any group of ``axes`` has ranks on several nodes."""
    return max_nodes_per_group(axes, sizes, local_world_size, order) > 1


def _nodes_per_group(group_ranks: Array, local_world_size: int) -> Array:
    """Return the number of nodes of each group."""
    nodes = np.sort(group_ranks // local_world_size, axis=1)
    changes: Array = np.count_nonzero(np.diff(nodes, axis=1), axis=1)
    return changes + 1


def placement_warnings(
    sizes: Sizes, local_world_size: int, order: Sequence[str] = AXES
) -> list[str]:
    """Return warnings about a placement that is certain to be slow.

    Every axis except tp may cross nodes, and in a large run must.
    """
    warnings = []
    world_size, tp = count_ranks(sizes), sizes.get("tp", 1)
    if (num_nodes := max_nodes_per_group("tp", sizes, local_world_size, order)) > 1:
        groups = _group_array("tp", sizes, order)
        group = groups[_nodes_per_group(groups, local_world_size).argmax()]
        warnings.append(
            f"parallel.tp={tp}: the group of ranks {group.min()}-{group.max()} spans {num_nodes} "
            f"nodes of {local_world_size} ranks. Tensor parallelism communicates several times in "
            "every layer, with nothing to compute meanwhile. Use a degree that divides the ranks "
            f"of a node: {format_choices(divisors(local_world_size))}."
        )
    if world_size > local_world_size and (remainder := world_size % local_world_size):
        warnings.append(
            f"{world_size} ranks do not fill nodes of {local_world_size}: the last node has "
            f"{remainder}, and groups do not align with nodes. Use a multiple of "
            f"{local_world_size} ranks."
        )
    return warnings


# --------------------------------------------------------------------------- rank map


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
    replica_size = math.prod(sizes.get(axis, 1) for axis in ("dp_shard", "cp", "tp"))
    # Replicas of one rank share a line, because their indices follow from their ranks.
    split_axes = {"pp"} if replica_size == 1 else {"pp", "dp_replicate"}
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
    ranks = _group_array(other_axes, sizes, order)  # one row per pipeline rank
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
        groups = _group_array(axis, sizes, order)
        nodes_per_group = _nodes_per_group(groups, local_world_size)
        widest = int(nodes_per_group.argmax())
        nodes = int(nodes_per_group[widest])
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
