"""Activation offload: saved tensors of blocks wait in host memory.

A block's activations are idle between its forward and its backward pass, the longer the earlier the
block.  So they are copied to pinned host memory while the next blocks run.  When backward reaches a
block, it starts to prefetch the activations of the blocks before it.  The last ``prefetch`` blocks,
whose backward is next, are not offloaded; they only prefetch for others.  With activation
checkpointing only each block's input is copied.

Copies run on their own stream, and computation waits for a copy only if the copy is late.  On
a CPU the copies stay on the CPU, for tests.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from weft.parallel.activation_checkpoint import param_storages
from weft.parallel.dtensor import is_wrapper
from weft.parallel.initialization import empty_on_host

MIN_OFFLOAD_BYTES = 1 << 20  # smaller tensors are not worth a copy


def apply_activation_offload(
    blocks: Sequence[nn.Module],
    prefetch: int,
    empty_on_host: Callable[[Tensor, bool], Tensor] = empty_on_host,
) -> None:
    """Offload saved tensors of all blocks but the last ``prefetch``.

    Call it after the blocks are compiled, and before they are sharded.

    ``blocks`` are in the order of their use.  Backward fetches ``prefetch`` blocks ahead.
    ``empty_on_host`` allocates host memory.
    """
    num_offloaded = len(blocks) - prefetch
    if num_offloaded <= 0:
        return
    offloader = _Offloader(prefetch, num_offloaded, empty_on_host)
    for index, block in enumerate(blocks):
        forward = partial(_forward_with_offload, offloader, block.forward, index)
        block.forward = MethodType(forward, block)


def _forward_with_offload(
    offloader: _Offloader, forward: Any, index: int, block: nn.Module, x: Tensor, *shared: Any
) -> Any:
    """Run a block's forward with hooks; ``shared`` arguments are not offloaded."""
    if not torch.is_grad_enabled():
        return forward(x, *shared)
    storages = {t.untyped_storage()._cdata for t in shared if isinstance(t, Tensor)}
    call = offloader.begin(index, storages | param_storages(block))
    with torch.autograd.graph.saved_tensors_hooks(call.pack, call.unpack):
        return forward(x, *shared)


class _Offloader:
    """The state that all blocks share."""

    def __init__(
        self,
        prefetch: int,
        num_offloaded: int,
        empty_on_host: Callable[[Tensor, bool], Tensor],
    ) -> None:
        self.prefetch, self.num_offloaded = prefetch, num_offloaded
        self.empty_on_host = empty_on_host
        self.last: _BlockForward | None = None
        self.stream = torch.Stream() if torch.accelerator.is_available() else None

    def begin(self, index: int, excluded: set[int]) -> _BlockForward:
        """Begin a forward pass of a block; ``excluded`` storages are not offloaded."""
        # The call of the previous block, if it is of the same forward pass of the model.
        previous = self.last if index and self.last and self.last.index == index - 1 else None
        self.last = _BlockForward(self, index, previous, excluded)
        return self.last


class _BlockForward:
    """One forward pass of a block, with its saved tensors."""

    def __init__(
        self,
        offloader: _Offloader,
        index: int,
        previous: _BlockForward | None,
        excluded: set[int],
    ) -> None:
        self.offloader, self.index, self.excluded = offloader, index, excluded
        self.previous = None if previous is None else weakref.ref(previous)
        self.offloaded: dict[tuple[Any, ...], weakref.ref[OffloadedTensor]] = {}
        self.backward_started = False

    def pack(self, tensor: Tensor) -> Any:
        """Return the tensor, or the offloaded tensor that autograd saves instead."""
        if (
            self.index >= self.offloader.num_offloaded
            or is_wrapper(tensor)
            or tensor.untyped_storage()._cdata in self.excluded
            or tensor.nbytes < MIN_OFFLOAD_BYTES
            or torch.empty_like(tensor, device="meta").stride() != tensor.stride()  # has gaps
        ):
            return tensor
        # Not the address: traced tensors have none.
        view = (tensor.untyped_storage()._cdata, tensor.storage_offset())
        key = (*view, tensor.dtype, tensor.shape, tensor.stride(), tensor._version)
        ref = self.offloaded.get(key)  # autograd saves some tensors twice
        if ref and (offloaded := ref()) and not offloaded.source.expired():
            return offloaded
        offloaded = OffloadedTensor(self.offloader, tensor)
        self.offloaded[key] = weakref.ref(offloaded)
        return offloaded

    def unpack(self, packed: Tensor | OffloadedTensor) -> Tensor:
        """Return the tensor; the block's first call prefetches for earlier blocks."""
        if not self.backward_started:
            self.backward_started = True
            call: _BlockForward | None = self
            for _ in range(self.offloader.prefetch):
                call = call.previous() if call is not None and call.previous else None
                if call is not None:
                    call.fetch()
        return packed if isinstance(packed, Tensor) else packed.wait()

    def fetch(self) -> None:
        """Start to copy back all tensors that autograd still holds."""
        for ref in self.offloaded.values():
            if (offloaded := ref()) is not None:
                offloaded.fetch()


class OffloadedTensor:
    """A tensor in host memory, which can be copied back."""

    def __init__(self, offloader: _Offloader, tensor: Tensor) -> None:
        self.stream = None if tensor.device.type == "cpu" else offloader.stream
        self.device = tensor.device
        self.source: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self.on_device: Tensor | None = None
        self.ready: Any = None
        self.host = offloader.empty_on_host(tensor, self.stream is not None)
        with self._on_copy_stream():
            self.host.copy_(tensor, non_blocking=True)
        if self.stream is not None:
            tensor.record_stream(self.stream)

    def fetch(self) -> None:
        """Start to copy the tensor back to its device."""
        if self.on_device is None:
            with self._on_copy_stream():
                shape, stride, dtype = self.host.shape, self.host.stride(), self.host.dtype
                self.on_device = torch.empty_strided(shape, stride, dtype=dtype, device=self.device)
                self.on_device.copy_(self.host, non_blocking=True)
                if self.stream is not None:
                    self.ready = self.stream.record_event()

    def wait(self) -> Tensor:
        """Return the tensor on its device; the current stream waits for the copy."""
        self.fetch()
        assert self.on_device is not None
        if self.ready is not None:
            current = torch.accelerator.current_stream(self.device)
            current.wait_event(self.ready)
            self.on_device.record_stream(current)
        return self.on_device

    @contextmanager
    def _on_copy_stream(self) -> Iterator[None]:
        """Use the copy stream, after all work that is queued on the current stream."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self.stream:
            yield
