"""Functions of the device and the process groups, by which a rank is built.

`weft.training.setup.build` gets it as one value.  Training uses `DEVICE_BACKEND`.  The planner
builds the same model with tensors that have no memory, for a world that does not exist
(`weft.estimate.stand_ins`).  So it replaces what is here, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weft.models.attention import DEVICE_KERNELS, AttentionKernels
from weft.parallel.compile import RunCompiled, run_compiled
from weft.parallel.initialization import allocate, empty_on_host, init_params
from weft.parallel.private import create_group


@dataclass(frozen=True)
class Backend:
    """Functions of the device and the process groups.

    Attributes:
        create_group: see `weft.parallel.private.create_group`.
        allocate: see `weft.parallel.initialization.allocate`.
        init_params: see `weft.parallel.initialization.init_params`.
        empty_on_host: see `weft.parallel.initialization.empty_on_host`.
        attention: kernels of attention.
        run_compiled: runs what is not part of a block: the loss, the optimizer's update and blocks
            of attention.  See `weft.parallel.compile.run_compiled`.
    """

    create_group: Callable[[str, Tensor, str], Any] = create_group
    allocate: Callable[..., None] = allocate
    init_params: Callable[..., None] = init_params
    empty_on_host: Callable[[Tensor, bool], Tensor] = empty_on_host
    attention: AttentionKernels = DEVICE_KERNELS
    run_compiled: RunCompiled = run_compiled


DEVICE_BACKEND = Backend()
