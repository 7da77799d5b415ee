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

The rules of a layout are in `weft.planning.rules`.  The functions accept every order that ends with
tp.

``sizes`` maps axes to sizes; a missing axis has size 1.  ``order`` lists the axes, outermost first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from weft.config.axes import AXES

DEGREE_KEYS = tuple(f"parallel.{name}" for name in AXES)

MESH_ORDERS: dict[str, tuple[str, ...]] = {
    "pipeline-outer": AXES,
    "replica-outer": ("dp_replicate", *(axis for axis in AXES if axis != "dp_replicate")),
}

Sizes = Mapping[str, int]
Array = np.ndarray[Any, np.dtype[np.int64]]


# --------------------------------------------------------------------------- ranks and groups


def count_ranks(sizes: Sizes, axes: Iterable[str] = AXES) -> int:
    """Return the number of ranks along several axes together, by default of the mesh."""
    return math.prod(sizes.get(axis, 1) for axis in axes)


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
    return [tuple(group) for group in group_array(axes, sizes, order).tolist()]


def group_array(axes: str | Sequence[str], sizes: Sizes, order: Sequence[str]) -> Array:
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
    return int(nodes_per_group(group_array(axes, sizes, order), local_world_size).max())


def crosses_nodes(
    axes: str | Sequence[str], sizes: Sizes, local_world_size: int, order: Sequence[str] = AXES
) -> bool:
    """Return True if any group of ``axes`` has ranks on several nodes."""
    return max_nodes_per_group(axes, sizes, local_world_size, order) > 1


def nodes_per_group(group_ranks: Array, local_world_size: int) -> Array:
    """Return the number of nodes of each group."""
    nodes = np.sort(group_ranks // local_world_size, axis=1)
    changes: Array = np.count_nonzero(np.diff(nodes, axis=1), axis=1)
    return changes + 1
