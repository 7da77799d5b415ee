"""Private PyTorch for the order of pipeline schedules."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def load_order_class(name: str) -> Any:
    """Return torch's class of a schedule, whose objects have only `pipeline_order`.

    Its constructor also adds collectives to all actions of a rank, in quadratic time: minutes for
    15,360 microbatches.  `weft.planning` and `weft.estimate` do not read them.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class

    def skip(*_: object, **__: object) -> None:
        pass

    return type(name, (get_schedule_class(name),), {"_prepare_schedule_with_comms": skip})
