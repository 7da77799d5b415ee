"""Replacements that a trace makes in the code that trains, and their reasons.

    in training                  in a trace                   because
    Backend.create_group         a group for each axis        a collective shows its axis, also if
                                                              all ranks take part
    Backend.allocate             under the fake mode          FSDP needs the mesh's real tensor
                                                              before and after
    Backend.init_params          nothing                      values are left out
    Backend.empty_on_host        registers the memory         all fake tensors are on the CPU
    Backend.attention            `traced_attention`           kernels of GPUs reject CPU tensors
    Backend.run_compiled         `record_function`            a compiled function is one kernel
    `HOST_READS`                 balance, long documents      fake tensors have no values
    torchao's casts to MXFP8     `traced_float8`              kernels of GPUs reject CPU tensors

The rest of the code that trains runs unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from weft.estimate.op_recorder import OpRecorder
from weft.estimate.traced_attention import GPU_KERNELS
from weft.models.attention import DEVICE_KERNELS
from weft.models.host_reads import document_starts, read_counts
from weft.optim.low_precision_adamw import UPDATE
from weft.optim.soap import is_basis_due
from weft.parallel.backend import DEVICE_BACKEND, Backend
from weft.parallel.block_attention import BLOCK
from weft.parallel.expert_dispatch import is_positive_on_any_rank
from weft.training.loss import LOSS


def trace_backend(recorder: OpRecorder, device: str, compiled: bool) -> Backend:
    """Return the backend of a rank with fake tensors.

    Args:
        recorder: records the step, with fake tensors.
        device: device of the run.
        compiled: torch.compile is enabled in the run.
    """

    def allocate(*args: Any) -> None:
        assert recorder.mode is not None
        with recorder.mode:
            DEVICE_BACKEND.allocate(*args)

    def empty_on_host(tensor: Tensor, pin: bool) -> Tensor:
        copy = DEVICE_BACKEND.empty_on_host(tensor, pin)
        recorder.host_storages.add(recorder.register(copy))
        return copy

    return Backend(
        create_group=_create_group,
        allocate=allocate,
        init_params=lambda *args: None,
        empty_on_host=empty_on_host,
        attention=DEVICE_KERNELS if device == "cpu" else GPU_KERNELS,
        run_compiled=partial(record_function, recorder, device, compiled),
    )


def _create_group(device: str, rows: Tensor, name: str) -> Any:
    if rows.shape[1] == dist.get_world_size():
        return dist.new_group(rows[0].tolist(), use_local_synchronization=True, group_desc=name)
    return DEVICE_BACKEND.create_group(device, rows, name)


def record_function(
    recorder: OpRecorder,
    device: str,
    compiled: bool,
    label: str,
    enable: bool,
    function: Callable[..., Any],
    *args: Any,
    dynamic: bool = False,
) -> Any:
    """Call and record a function: see `weft.parallel.compile.run_compiled`.

    Args:
        recorder: records it.
        device: device of the run.
        compiled: torch.compile is enabled in the run.
        label: of the function.
        enable: False in a trace.
        function: of tensors and constants.
        *args: its arguments.
        dynamic: no effect.
    """
    if label == UPDATE:
        return recorder.record_updates(device, function, *args)
    if label == BLOCK:
        return recorder.record_repeated(function, *args)
    if label == LOSS and compiled:
        return recorder.record_kernel(function, *args)
    return function(*args)


# --------------------------------------------------------------------------- reads of the host


def balanced_counts(counts: Sequence[Tensor], total: int) -> list[int]:
    """Return equal shares of ``total`` for each tensor: a plan has balanced experts."""
    sizes: list[int] = []
    for each in counts:
        share, remainder = divmod(total, each.numel())
        sizes += [share + (i < remainder) for i in range(each.numel())]
    return sizes


def one_document(documents_BT: Tensor) -> list[int]:
    """Return the starts of sequences: one document each, which is most work."""
    num_sequences, num_tokens = documents_BT.shape
    return [num_tokens * sequence for sequence in range(num_sequences)]


HOST_READS: dict[Any, Callable[..., Any]] = {
    read_counts: balanced_counts,
    is_positive_on_any_rank: lambda count: False,  # the buffers of balanced experts suffice
    document_starts: one_document,
    is_basis_due: lambda step, interval: False,  # a typical step; its memory is the same
}
