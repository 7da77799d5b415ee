"""What blocks keep for their backward pass waits in the host's memory instead of the device's.

A block's activations are idle from the end of its forward pass until its backward pass, the longer
the earlier the block.  So they are copied to pinned host memory while the next blocks run, and
back before they are needed: when the backward pass reaches a block, the copies of the ``ahead``
blocks before it begin.  The last ``ahead`` blocks, whose turn comes at once, stay, and only call
for those before them.  With recomputation what is moved is less: each block's input.

Both ways go over a stream of their own, and computing waits for a copy only if that is not done.
On a CPU there is nowhere to move to: it is done all the same, as a copy, so that it can be tested.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from weft.parallel.activation_checkpoint import frozen_param_storages, is_parameter

MIN_OFFLOAD_BYTES = 1 << 20  # bytes; what is smaller is not worth a copy


def apply_activation_offload(blocks: Sequence[nn.Module], ahead: int) -> None:
    """Make blocks move what they keep, in place; after they are compiled, before sharding.

    Args:
        blocks: in the order of their use; all but the last ``ahead`` move.
    """
    moving = len(blocks) - ahead
    if moving <= 0:
        return
    mover = _Offloader(ahead, moving)
    for place, block in enumerate(blocks):
        block.forward = MethodType(partial(_forward_with_offload, mover, block.forward, place), block)


def _forward_with_offload(
    mover: _Offloader, forward: Any, place: int, block: nn.Module, x: Tensor, *shared: Any
) -> Any:
    """A block's forward pass, of which all that autograd keeps is moved if the block is to move."""
    if not torch.is_grad_enabled():
        return forward(x, *shared)
    call = mover.begin(place, [t for t in shared if isinstance(t, Tensor)])
    call.shared |= frozen_param_storages(block)
    with torch.autograd.graph.saved_tensors_hooks(call.pack, call.unpack):
        return forward(x, *shared)


class _Offloader:
    """The copies of all blocks, of which the first ``moving`` move."""

    def __init__(self, ahead: int, moving: int) -> None:
        self.ahead, self.moving = ahead, moving
        self.last: _BlockForward | None = None
        self.stream: Any = torch.cuda.Stream() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]

    def begin(self, place: int, shared: list[Tensor]) -> _BlockForward:
        """The block at ``place`` begins its forward pass, with what all blocks are given."""
        # Of the block before, in the same pass.
        before = self.last if place and self.last and self.last.place == place - 1 else None
        self.last = _BlockForward(self, place, before, {t.untyped_storage()._cdata for t in shared})
        return self.last


class _BlockForward:
    """One forward pass of a block."""

    def __init__(self, mover: _Offloader, place: int, before: _BlockForward | None, shared: set[int]) -> None:
        self.mover, self.place, self.shared = mover, place, shared
        self.before = None if before is None else weakref.ref(before)
        self.moved: dict[tuple[Any, ...], weakref.ref[OffloadedTensor]] = {}
        self.reached = False

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps in place of a tensor."""
        if (
            self.place >= self.mover.moving
            or is_parameter(tensor)
            or tensor.untyped_storage()._cdata in self.shared  # by all blocks, or frozen
            or tensor.nbytes < MIN_OFFLOAD_BYTES
            or torch.empty_like(tensor, device="meta").stride() != tensor.stride()  # with gaps
        ):
            return tensor
        # Not the address: tensors in a trace have none.
        place = (tensor.untyped_storage()._cdata, tensor.storage_offset())
        key = (*place, tensor.dtype, tensor.shape, tensor.stride(), tensor._version)
        if (known := self.moved.get(key)) and (moved := known()) and not moved.source.expired():
            return moved  # autograd keeps some twice
        moved = OffloadedTensor(self.mover, tensor)
        self.moved[key] = weakref.ref(moved)
        return moved

    def unpack(self, packed: Tensor | OffloadedTensor) -> Tensor:
        """The tensor again; the first one of a block calls for those of the blocks before."""
        if not self.reached:
            self.reached = True
            call: _BlockForward | None = self
            for _ in range(self.mover.ahead):
                call = call.before() if call is not None and call.before else None
                if call is not None:
                    call.fetch()
        return packed if isinstance(packed, Tensor) else packed.get()

    def fetch(self) -> None:
        """Begin to copy back all that is still wanted."""
        for moved in self.moved.values():
            if (one := moved()) is not None:
                one.fetch()


class OffloadedTensor:
    """A tensor in the host's memory, and soon back."""

    def __init__(self, mover: _Offloader, tensor: Tensor) -> None:
        self.stream = mover.stream if tensor.device.type == "cuda" else None
        self.device = tensor.device
        self.source: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self.back: Tensor | None = None
        self.ready: Any = None
        self.host = self.empty_on_host(tensor, pin=self.stream is not None)
        with self._on_copy_stream():
            self.host.copy_(tensor, non_blocking=True)
        if self.stream is not None:
            tensor.record_stream(self.stream)

    def fetch(self) -> None:
        """Begin to copy it back."""
        if self.back is None:
            with self._on_copy_stream():
                shape, stride = self.host.shape, self.host.stride()
                kind = self.host.dtype
                self.back = torch.empty_strided(shape, stride, dtype=kind, device=self.device)
                self.back.copy_(self.host, non_blocking=True)
                if self.stream is not None:
                    self.ready = self.stream.record_event()

    def get(self) -> Tensor:
        """It on its device; the current stream waits until it is there."""
        self.fetch()
        assert self.back is not None
        if self.ready is not None:
            now = torch.cuda.current_stream(self.device)
            now.wait_event(self.ready)
            self.back.record_stream(now)
        return self.back

    @contextmanager
    def _on_copy_stream(self) -> Iterator[None]:
        """On the stream of copies, after what has been begun so far."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield

    @staticmethod
    def empty_on_host(tensor: Tensor, pin: bool) -> Tensor:
        """Memory for it on the CPU, uninitialised, with the same strides."""
        shape, stride = tensor.shape, tensor.stride()
        return torch.empty_strided(shape, stride, dtype=tensor.dtype, device="cpu", pin_memory=pin)
