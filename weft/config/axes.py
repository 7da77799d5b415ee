"""The mesh axes: one row of facts for each, and the lists that follow from them.

In weft, an axis belongs to a mesh and a dim to a tensor.

The ranks of a run form three meshes.  That of all ranks has the axes `AXES`.  That of weights
(`PARAMETER_AXES`) counts the ranks of ``cp`` in ``dp_shard``, because they hold the same parameters
and different tokens.  That of experts (`EXPERT_AXES`) splits these ranks in ``efsdp`` and ``ep``.
`weft.parallel.mesh` builds them, `weft.planning.placement` has the order of ranks.

CONTRIBUTING.md lists what a new axis needs beside its row; ``tests/test_axes.py`` names the places
that lack it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Axis(NamedTuple):
    """The facts about an axis.

    Attributes:
        name: name of its process groups, in plans and in profiles.
        splits: what its ranks split; each has a part, and the same of all else.  batch: sequences,
            and FSDP's shards; tokens: the tokens of a sequence.
        weights: axis of the mesh of weights that counts its ranks; empty: its ranks are already
            those of other axes.
        in_expert_mesh: it is an axis of the mesh of experts.
        has_key: its degree is ``parallel.NAME``; else the degree follows from others.
    """

    name: str
    splits: Literal["layers", "batch", "tokens", "experts", "matrices"]
    weights: str
    in_expert_mesh: bool
    has_key: bool


# In the order of the meshes, outermost first.  A row states each fact: there are no defaults.
TABLE = (
    Axis("pp", "layers", "pp", in_expert_mesh=True, has_key=True),
    Axis("dp_replicate", "batch", "dp_replicate", in_expert_mesh=True, has_key=True),
    Axis("dp_shard", "batch", "dp_shard", in_expert_mesh=False, has_key=True),
    Axis("cp", "tokens", "dp_shard", in_expert_mesh=False, has_key=True),
    Axis("efsdp", "batch", "", in_expert_mesh=True, has_key=False),
    Axis("ep", "experts", "", in_expert_mesh=True, has_key=True),
    Axis("tp", "matrices", "tp", in_expert_mesh=True, has_key=True),
)

# Axes of all ranks: the product of their degrees is the world size.
AXES = tuple(axis.name for axis in TABLE if axis.weights)
PARAMETER_AXES = tuple(axis.name for axis in TABLE if axis.weights == axis.name)
EXPERT_AXES = tuple(axis.name for axis in TABLE if axis.in_expert_mesh)
# Axes whose degree is a key of the section ``parallel``.
DEGREES = tuple(axis.name for axis in TABLE if axis.has_key)
# Axes whose ranks read different sequences, and those whose ranks share the tokens of a sequence.
BATCH_AXES = tuple(axis.name for axis in TABLE if axis.weights and axis.splits == "batch")
SEQUENCE_AXES = tuple(axis.name for axis in TABLE if axis.splits == "tokens")
# FSDP shards a weight over these axes together.
SHARD_AXES = tuple(axis.name for axis in TABLE if axis.weights == "dp_shard")
# FSDP gathers weights and reduces gradients over these axes, and hides it behind computation.
FSDP_AXES = tuple(axis.name for axis in TABLE if axis.splits == "batch")
# FSDP gathers a weight over all axes but these.
LOCAL_AXES = frozenset(axis.name for axis in TABLE if axis.splits in ("experts", "matrices"))

# Orders other than that of the meshes.
# Messages about the product of degrees list them so; dp_shard takes the remaining ranks.
MESSAGE_ORDER = ("tp", "pp", "cp", "dp_replicate")
# ``weft verify`` removes axes in this order if it has too few ranks for two on each.
REMOVAL_ORDER = ("dp_replicate", "dp_shard", "tp", "cp", "pp")
# Charts show the time of communication so.
CHART_ORDER = ("tp", "cp", "dp_shard", "efsdp", "ep", "dp_replicate", "pp")
