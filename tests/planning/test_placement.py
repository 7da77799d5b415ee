"""Placement: rank numbering, groups, nodes, and the rank map."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
import time

import numpy as np
import pytest

from weft.config.axes import AXES
from weft.planning import rank_map
from weft.planning.placement import (
    MESH_ORDERS,
    coordinates_to_rank,
    count_ranks,
    crosses_nodes,
    max_nodes_per_group,
    rank_groups,
    rank_to_coordinates,
    ranks_per_node,
)
from weft.planning.plan_warnings import placement_warnings
from weft.planning.rank_map import format_rank_map

REPLICA_OUTER = MESH_ORDERS["replica-outer"]
WORKED = {"pp": 6, "dp_replicate": 4, "tp": 4}  # a replica is three nodes of eight


def layouts() -> list[tuple[dict[str, int], tuple[str, ...]]]:
    """Return axis sizes and mesh orders, some of them unusual."""
    source = random.Random(0)
    created = []
    for _ in range(60):
        sizes = {axis: source.choice((1, 1, 2, 3, 4)) for axis in AXES}
        order = (*source.sample(AXES[:-1], 4), "tp")
        created.append((sizes, source.choice((AXES, REPLICA_OUTER, order))))
    return created


# --------------------------------------------------------------------------- ranks and groups


def test_rank_numbering_equals_a_device_mesh() -> None:
    """``init_device_mesh`` numbers ranks in row-major order: ``arange(world).view(sizes)``."""
    sizes = {"pp": 2, "dp_replicate": 3, "dp_shard": 2, "cp": 2, "tp": 4}
    mesh = np.arange(96).reshape(2, 3, 2, 2, 4)
    for indices in np.ndindex(mesh.shape):
        named = dict(zip(AXES, indices, strict=True))
        assert rank_to_coordinates(int(mesh[indices]), sizes) == named
        assert coordinates_to_rank(named, sizes) == mesh[indices]
    assert rank_groups("pp", sizes) == [tuple(row) for row in mesh.reshape(2, -1).T.tolist()]
    assert rank_groups("tp", sizes) == [tuple(row) for row in mesh.reshape(-1, 4).tolist()]
    # Flattened mesh["dp_shard", "cp"], one row for each index of the other axes.
    flat = mesh.transpose(0, 1, 4, 2, 3).reshape(-1, 4)
    assert rank_groups(("dp_shard", "cp"), sizes) == [tuple(row) for row in flat.tolist()]


def test_mesh_order_equals_a_transposed_device_mesh() -> None:
    sizes = {"pp": 2, "dp_replicate": 3, "dp_shard": 2, "cp": 2, "tp": 4}
    mesh = np.arange(96).reshape(3, 2, 2, 2, 4).transpose(1, 0, 2, 3, 4)
    for indices in np.ndindex(mesh.shape):
        named = dict(zip(AXES, indices, strict=True))
        assert coordinates_to_rank(named, sizes, REPLICA_OUTER) == mesh[indices]
    along_both = mesh.transpose(2, 3, 4, 0, 1).reshape(-1, 6)
    result = rank_groups(("pp", "dp_replicate"), sizes, REPLICA_OUTER)
    assert result == [tuple(row) for row in along_both.tolist()]
    result = rank_groups("tp", sizes, REPLICA_OUTER)
    assert result == [tuple(row) for row in mesh.reshape(-1, 4).tolist()]


def test_coordinates_and_groups_agree_in_every_layout() -> None:
    for sizes, order in layouts():
        world = count_ranks(sizes)
        coordinates = [rank_to_coordinates(rank, sizes, order) for rank in range(world)]
        assert [coordinates_to_rank(indices, sizes, order) for indices in coordinates] == list(
            range(world)
        )
        for axes in ("pp", "cp", ("dp_shard",), ("dp_replicate", "dp_shard"), ("tp", "pp"), AXES):
            chosen = {axes} if isinstance(axes, str) else set(axes)
            result = rank_groups(axes, sizes, order)
            assert sorted(itertools.chain(*result)) == list(range(world))
            for group in result:
                assert len(group) == math.prod(sizes[axis] for axis in chosen)
                for axis in set(AXES) - chosen:
                    assert len({coordinates[rank][axis] for rank in group}) == 1


def test_coordinates_missing_axis_has_one_index() -> None:
    assert rank_to_coordinates(5, {"dp_shard": 8}) == dict.fromkeys(AXES, 0) | {"dp_shard": 5}
    assert coordinates_to_rank({"dp_shard": 5}, {"dp_shard": 8}) == 5
    assert rank_groups("tp", {"dp_shard": 2}) == [(0,), (1,)]
    assert rank_groups("pp", {}) == [(0,)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rank_to_coordinates(8, {"tp": 8}), "rank 8 is out of range: the mesh has 8"),
        (lambda: rank_to_coordinates(-1, {"tp": 8}), "rank -1 is out of range"),
        (
            lambda: coordinates_to_rank({"tp": 8}, {"tp": 8}),
            "tp = 8 is out of range: the axis has size 8",
        ),
        (lambda: coordinates_to_rank({"ep": 0}, {"tp": 8}), "unknown axis: ep"),
        (lambda: rank_groups("ep", {"tp": 8}), "unknown axis: ep"),
        (lambda: rank_groups("tp", {"ep": 8}), "unknown axis: ep"),
        (lambda: rank_groups("tp", {"tp": 0}), "at least 1"),
        (
            lambda: rank_groups("tp", {"tp": 2}, ("tp", "pp", "dp_replicate", "dp_shard", "cp")),
            "end with tp",
        ),
        (lambda: rank_groups("tp", {"tp": 2}, ("pp", "dp_shard", "cp", "tp")), "list each of pp"),
        (lambda: format_rank_map({"pp": 2}, 2, ["one"]), "1 stage names for pp = 2"),
    ],
)
def test_placement_unknown_axis_or_rank_is_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


def test_rank_groups_of_a_large_world_are_fast() -> None:
    sizes = {"pp": 16, "dp_replicate": 2, "dp_shard": 32, "cp": 2, "tp": 8}
    assert count_ranks(sizes) == 16384
    start = time.process_time()
    for axis in AXES:
        assert len(rank_groups(axis, sizes)) == 16384 // sizes[axis]
        crosses_nodes(axis, sizes, 8)
    rank_groups(("dp_shard", "cp"), sizes)
    placement_warnings(sizes, 8)
    format_rank_map(sizes, 8)
    assert time.process_time() - start < 0.7


# --------------------------------------------------------------------------- nodes


def test_max_nodes_per_group_follows_the_mesh_order() -> None:
    def crossing(order: tuple[str, ...]) -> dict[str, int]:
        return {axis: max_nodes_per_group(axis, WORKED, 8, order) for axis in WORKED}

    assert crossing(AXES) == {"pp": 6, "dp_replicate": 2, "tp": 1}
    assert crossing(REPLICA_OUTER) == {"pp": 3, "dp_replicate": 4, "tp": 1}
    assert not crosses_nodes("tp", WORKED, 8)
    assert crosses_nodes("tp", WORKED, 2)
    # One crossing group is enough: 0-2 and 3-5 fit into a node, 6-8 does not.
    assert crosses_nodes("tp", {"tp": 3, "dp_shard": 8}, 8)
    assert max_nodes_per_group("tp", {"tp": 3, "dp_shard": 8}, 8) == 2
    assert not crosses_nodes(("dp_shard", "cp"), {"pp": 4, "dp_shard": 4, "cp": 2}, 8)
    assert crosses_nodes(("dp_shard", "cp"), {"pp": 4, "dp_shard": 4, "cp": 4}, 8)


def test_group_spans_equal_counted_nodes() -> None:
    for sizes, order in layouts():
        for axes, size in itertools.product(
            ("pp", "cp", ("dp_shard", "tp"), ("pp", "dp_replicate")), (1, 3, 4, 8)
        ):
            counted = [len(ranks_per_node(g, size)) for g in rank_groups(axes, sizes, order)]
            assert max_nodes_per_group(axes, sizes, size, order) == max(counted)


def test_placement_worked_example_has_its_groups() -> None:
    """A replica has three nodes, a node has two consecutive stages, tp has half a node."""
    for replica in range(4):
        ranks = [
            coordinates_to_rank(
                {"dp_replicate": replica, "pp": pp, "tp": tp}, WORKED, REPLICA_OUTER
            )
            for pp, tp in itertools.product(range(6), range(4))
        ]
        nodes = {3 * replica: 8, 3 * replica + 1: 8, 3 * replica + 2: 8}
        assert ranks_per_node(ranks, 8) == nodes
        for node in nodes:
            on_node = range(8 * node, 8 * node + 8)
            stages = [rank_to_coordinates(rank, WORKED, REPLICA_OUTER)["pp"] for rank in on_node]
            first = 2 * (node % 3)
            assert stages == [first] * 4 + [first + 1] * 4
    # With pp outermost, a node has one stage of two replicas.
    on_node = [rank_to_coordinates(rank, WORKED) for rank in range(8)]
    assert {indices["pp"] for indices in on_node} == {0}
    assert [indices["dp_replicate"] for indices in on_node] == [0] * 4 + [1] * 4


def test_placement_warnings_are_of_harmful_layouts_only() -> None:
    for order in (AXES, REPLICA_OUTER):
        assert placement_warnings(WORKED, 8, order) == []
        assert placement_warnings({"dp_shard": 64, "cp": 16, "pp": 2, "tp": 8}, 8, order) == []
    assert placement_warnings({"dp_shard": 4}, 8) == []  # less than a node
    assert placement_warnings({}, 1) == []
    [warning] = placement_warnings({"tp": 16, "dp_shard": 2}, 8)
    assert warning == (
        "parallel.tp=16: the group of ranks 0-15 spans 2 nodes of 8 ranks. Tensor parallelism "
        "communicates several times in every layer, with nothing to compute meanwhile. Use a "
        "degree that divides the ranks of a node: 1, 2, 4 or 8."
    )
    [warning] = placement_warnings({"tp": 3, "dp_shard": 8}, 8)
    assert "ranks 6-8 spans 2 nodes" in warning
    # The ranks of a group are neighbors, but groups need not be in the order of their ranks.
    sizes = {"dp_replicate": 2, "pp": 2, "tp": 3}
    [warning, _] = placement_warnings(sizes, 8, REPLICA_OUTER)
    assert "ranks 6-8 spans 2 nodes" in warning
    # The switches of a rack link nodes of 4.
    assert placement_warnings({"tp": 8, "dp_shard": 8}, 4, num_linked=72) == []
    [warning] = placement_warnings({"tp": 16, "dp_shard": 8}, 4, num_linked=72)
    assert "the group of ranks 64-79 spans 2 racks of 72 ranks" in warning
    assert "divides the ranks of a rack: 1, 2, 3, 4, ..., 24, 36 or 72" in warning
    [warning] = placement_warnings({"dp_shard": 12}, 8)
    assert warning == (
        "12 ranks do not fill nodes of 8: the last node has 4, and groups do not align with nodes. "
        "Use a multiple of 8 ranks."
    )


# --------------------------------------------------------------------------- rank map

MAP = """\
96 ranks on 12 nodes of 8
outermost first: dp_replicate 4 x pp 6 x tp 4

node  ranks  dp_replicate  pp  tp groups  units
0     0-3    0             0   [0-3]      unit 0
      4-7    0             1   [4-7]      unit 1
1     8-11   0             2   [8-11]     unit 2
      12-15  0             3   [12-15]    unit 3
2     16-19  0             4   [16-19]    unit 4
      20-23  0             5   [20-23]    unit 5
nodes 3-11 continue the pattern:
  dp_replicate + 1 every 3 nodes

pp  nodes        units
0   0, 3, 6, 9   unit 0
1   0, 3, 6, 9   unit 1
2   1, 4, 7, 10  unit 2
3   1, 4, 7, 10  unit 3
4   2, 5, 8, 11  unit 4
5   2, 5, 8, 11  unit 5

axis          size  groups  span            example ranks
dp_replicate  4     24      across 4 nodes  0, 24, 48, 72
pp            6     16      across 3 nodes  0, 4, 8, ..., 20
tp            4     24      inside a node   0-3"""


def test_rank_map_worked_example_has_the_expected_text() -> None:
    names = [f"unit {i}" for i in range(6)]
    assert format_rank_map(WORKED, 8, names, REPLICA_OUTER) == MAP


def rows(text: str) -> list[list[str]]:
    """Return the node lines of a map as words; the first word is the node, or empty."""
    body = text.split("\n\n")[1].split("\nnodes ")[0]
    return [[""] * line.startswith(" ") + line.split() for line in body.splitlines()[1:]]


def test_rank_map_lines_show_ranks_and_groups() -> None:
    # Shards, and replicas of one rank, share a line; a replica of several ranks has a line.
    assert rows(format_rank_map({"dp_shard": 8}, 8)) == [["0", "0-7", "0-7"]]
    assert rows(format_rank_map({"dp_replicate": 8, "pp": 2}, 8)) == [
        ["0", "0-7", "0", "0-7"],
        ["1", "8-15", "1", "0-7"],
    ]
    assert rows(format_rank_map({"dp_replicate": 2, "dp_shard": 4}, 8)) == [
        ["0", "0-3", "0", "0-3"],
        ["", "4-7", "1", "0-3"],
    ]
    [line] = rows(format_rank_map({"dp_shard": 2, "cp": 2, "tp": 2}, 8))
    assert line == ["0", "0-7", "0-1", "0-1", "[0-1]", "[2-3]", "[4-5]", "[6-7]"]
    assert format_rank_map({}, 1) == "1 rank on 1 node of 1\n\nnode  ranks\n0     0"
    # A group that crosses nodes is marked, and is the example.
    assert format_rank_map({"tp": 3, "dp_shard": 8}, 8).endswith("across 2 nodes  6-8")
    assert rows(format_rank_map({"tp": 3, "dp_shard": 8}, 8))[2:4] == [
        ["", "6-7", "2", "[6-8]", "on", "nodes", "0-1"],
        ["1", "8", "2", "[6-8]", "on", "nodes", "0-1"],
    ]
    assert "[0-1] [2-3] ... [62-63]" in format_rank_map({"tp": 2, "dp_shard": 32}, 64)


def unspan(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def test_rank_map_every_line_has_the_ranks_of_its_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line has exactly the ranks of its node with the indices that the line shows."""
    monkeypatch.setattr(rank_map, "MAX_NODES_SHOWN", 10**6)  # every node is shown
    for sizes, order in layouts():
        for count in (1, 4, 8, 24):
            columns = [axis for axis in order if axis != "tp" and sizes[axis] > 1]
            observed: list[int] = []
            node = ""
            for row in rows(format_rank_map(sizes, count, order=order)):
                node = row.pop(0) or node
                ranks = unspan(row[0])
                assert {rank // count for rank in ranks} == {int(node)}
                observed += ranks
                groups_shown = {
                    axis: unspan(cell)
                    for axis, cell in zip(columns, row[1 : 1 + len(columns)], strict=True)
                }
                for rank in ranks:
                    indices_of_rank = rank_to_coordinates(rank, sizes, order)
                    assert all(
                        indices_of_rank[axis] in indices for axis, indices in groups_shown.items()
                    )
                tp = {rank_to_coordinates(rank, sizes, order)["tp"] for rank in ranks}
                assert len(ranks) == len(tp) * math.prod(
                    len(result) for result in groups_shown.values()
                )
            assert observed == list(range(count_ranks(sizes)))


def test_rank_map_of_many_ranks_shows_a_pattern_and_its_continuation() -> None:
    text = format_rank_map({"pp": 16, "dp_shard": 128, "tp": 8}, 8)
    assert rows(text) == [["0", "0-7", "0", "0", "[0-7]"], ["1", "8-15", "0", "1", "[8-15]"]]
    assert (
        "nodes 2-2047 continue the pattern:\n"
        "  dp_shard + 1 with every node\n  pp + 1 every 128 nodes\n"
    ) in text
    assert "\n5   640-767\n" in text
    assert "\npp        16    1024    across 16 nodes   0, 1024, 2048, ..., 15360\n" in text
    assert "dp_shard + 8 with every node" in format_rank_map({"dp_shard": 128}, 8)
    # Groups of three align with nodes of eight again after three nodes.
    assert "nodes 3-14 continue the pattern:\n  dp_shard + 8 every 3 nodes" in format_rank_map(
        {"tp": 3, "dp_shard": 40}, 8
    )
    # No axis aligns with the nodes, so the pattern counts ranks.
    assert "  pp + 1 every 12 ranks" in format_rank_map({"pp": 11, "tp": 12}, 8)


def test_rank_map_continuation_holds_for_every_node() -> None:
    """The ranks of the nodes that are not shown follow the described pattern."""
    checked = 0
    for sizes, order in layouts():
        for count in (2, 4, 8):
            lines = format_rank_map(sizes, count, order=order).splitlines()
            for line in lines:
                axis, plus, *_ = words = [*line.split(), "", ""][:6]
                if not line.startswith("  ") or plus != "+":
                    continue
                number = 1 if "with" in words else int(words[4].replace(",", ""))
                step = number * (1 if "rank" in line else count)
                # Unless the axis wraps around, no other index changes.
                for rank in range(count_ranks(sizes) - step):
                    before = rank_to_coordinates(rank, sizes, order)
                    after = before | {axis: before[axis] + int(words[2])}
                    if after[axis] < sizes[axis]:
                        assert coordinates_to_rank(after, sizes, order) == rank + step
                        checked += 1
    assert checked > 1000


def test_placement_does_not_import_torch() -> None:
    modules = "weft.planning.degrees, weft.planning.rank_map"
    probe = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
