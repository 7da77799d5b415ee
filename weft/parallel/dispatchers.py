"""Dispatchers of experts by the name in ``parallel.ep_dispatch``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft.config.errors import lookup
from weft.config.schema import ParallelSection
from weft.parallel.expert_dispatch import (
    AllToAll,
    DispatcherFactory,
    Overflow,
    PaddedAllToAll,
    apply_in_chunks,
)

DISPATCHERS: Mapping[str, DispatcherFactory] = {
    "alltoall": AllToAll,
    "padded": PaddedAllToAll,
}


def enable_dispatch(
    layers: Iterable[nn.Module], group: dist.ProcessGroup, section: ParallelSection
) -> None:
    """Let experts exchange tokens with the ranks of ``group``, in place."""
    factory: DispatcherFactory = lookup(section.ep_dispatch, DISPATCHERS)
    dispatcher = factory(group, section)
    for experts in layers:
        vars(experts).update(dispatcher=dispatcher, exchanges_tokens=True)
        experts.forward = partial(apply_in_chunks, experts.forward, dispatcher, section.ep_chunks)


def find_overflow(
    model_parts: Iterable[nn.Module], num_ranks: int, section: ParallelSection, device: torch.device
) -> Overflow | None:
    """Return the `Overflow` of this rank's dispatchers; None if all rows fit.

    All ranks agree, also those whose part of the model has no experts.

    Args:
        model_parts: this rank's parts of the model.
        num_ranks: expert-parallel degree.
        section: the section ``[parallel]``.
        device: of the model.
    """
    factory: Any = lookup(section.ep_dispatch, DISPATCHERS) if num_ranks > 1 else None
    is_padded = isinstance(factory, type) and issubclass(factory, PaddedAllToAll)
    if not is_padded or section.ep_capacity_factor >= num_ranks * section.ep_chunks:
        return None
    overflow = Overflow(device)
    for part in model_parts:
        for module in part.modules():
            if isinstance(dispatcher := vars(module).get("dispatcher"), PaddedAllToAll):
                dispatcher.overflow = overflow
    return overflow
