"""Numbers that the host reads from tensors, as operators.

A program without values, such as a traced step, cannot read them.  So each read is an operator,
which a dispatch mode may answer: see `weft.estimate.stand_ins`.  Code that trains asks no tensor
if it has values.

Shapes in names: B sequences, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def define_host_read(schema: str, function: Callable[..., Any]) -> Any:
    """Return the operator ``weft::{schema}``, which runs ``function`` on all devices."""
    name = f"weft::{schema.partition('(')[0]}"
    torch.library.define(name, schema[schema.index("(") :])
    torch.library.impl(name, "CompositeExplicitAutograd")(function)
    return getattr(torch.ops.weft, name.removeprefix("weft::")).default


def _read_counts(counts: Sequence[Tensor], total: int) -> list[int]:
    values = counts[0] if len(counts) == 1 else torch.stack(list(counts))
    numbers: list[int] = values.flatten().tolist()
    return numbers


def _document_starts(documents_BT: Tensor) -> list[int]:
    starts: list[int] = []
    for sequence, ids in enumerate(documents_BT.numpy()):
        first = sequence * len(ids)
        starts += [first, *(np.flatnonzero(ids[1:] != ids[:-1]) + 1 + first).tolist()]
    return starts


# Return the values of tensors of one shape, which are numbers of rows; one wait for all.
# ``total``: the sum of each tensor, if its rows are spread evenly.
read_counts = define_host_read("read_counts(Tensor[] counts, int total) -> SymInt[]", _read_counts)
# Return where documents begin in ``documents_BT.flatten()``; a document is a run of equal ids of a
# sequence.  The tensor is on the host.
document_starts = define_host_read(
    "document_starts(Tensor documents_BT) -> int[]", _document_starts
)


@torch.library.register_fake("weft::read_counts")  # type: ignore[untyped-decorator]
def _(counts: Sequence[Tensor], total: int) -> list[Any]:
    # For compilers: they must not take the numbers for constants.
    context = torch.library.get_ctx()
    return [context.new_dynamic_size() for each in counts for _ in range(each.numel())]
