"""Graphs of operators on a CPU, which repeat kernels on the same memory as CUDA graphs do.

A capture runs the function once and records each operator with its tensors.  A replay runs the
operators again, without any Python of the function: a view is still the same view, an operator in
place writes into the same tensor, and the result of any other is copied into the tensor that the
capture returned.  So a replay is wrong, as on a GPU, if the function reads a tensor that another
step replaces, or needs its Python: a value on the host, or a branch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.config import accelerators
from weft.parallel.collectives import c10d_functional
from weft.parallel.dtensor import to_local
from weft.training import step

READS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select")
EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class RecordedGraph(TorchDispatchMode):
    """The operators of a function; active while the function runs.

    Attributes:
        num_replays: of all graphs.
        names: of the operators of all graphs.
    """

    num_replays = 0
    names: ClassVar[set[str]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.reduced: set[int] = set()  # storages of results of gloo's reduce-scatters
        self.has_run = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in READS:
            raise RuntimeError(f"{name} reads a value on the host")
        out = func(*args, **(kwargs or {}))
        if name == "_reduce_scatter_base_":
            self.reduced.add(storage_of(args[0]))
        # gloo waits, and copies its sum from memory of its own; a replay waits, too.
        is_wait = name == "copy_" and storage_of(args[0]) in self.reduced
        if name not in EMPTY and func.namespace not in ("prim", "profiler") and not is_wait:
            self.calls.append((func, args, kwargs or {}, out))
            self.names.add(name)
        return out

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operators again; but not at once after the capture, which has run them."""
        if self.has_run:
            RecordedGraph.num_replays += 1
            started: list[Any] = []  # a rank may send and receive at once
            for call in self.calls:
                if call[0].namespace != "c10d":
                    wait_for(started)
                run_again(*call, started)
            wait_for(started)
        self.has_run = True


def wait_for(started: list[Any]) -> None:
    """Wait for collectives."""
    while started:
        dist.Work.unbox(started.pop(0)).wait()  # type: ignore[attr-defined]


def run_again(func: Any, args: Any, kwargs: Any, out: Any, started: list[Any]) -> None:
    """Run an operator again, with the same tensors as arguments and results.

    ``started`` receives what has to be waited for.
    """
    name = func.overloadpacket.__name__
    if func.is_view or name == "wait_tensor":
        return
    new = func(*args, **kwargs)
    for before, after in zip(tree_leaves(out), tree_leaves(new), strict=True):
        if isinstance(after, torch.ScriptObject):
            started.append(after)
        if not isinstance(after, Tensor) or func._schema.is_mutable:
            continue
        if func.namespace == "_c10d_functional":
            after = c10d_functional.wait_tensor(after)
        if storage_of(before) != storage_of(after):
            before.copy_(after)


def storage_of(tensor: Tensor) -> int:
    """Return a key of the memory of a tensor."""
    key: int = to_local(tensor).untyped_storage()._cdata
    return key


class RecordingDevice:
    """Stands in for `weft.parallel.cuda_graphs.CudaDevice`."""

    def warm_up(self, function: Callable[[], Tensor]) -> Tensor:
        """Run the function."""
        return function()

    def capture(self, function: Callable[[], Tensor]) -> tuple[RecordedGraph, Tensor]:
        """Run the function, and record it."""
        graph = RecordedGraph()
        with graph:
            result = function()
        return graph, result


def record_graphs() -> None:
    """Let a CPU capture graphs, in this process."""
    accelerators._DEVICES["CUDA graphs"] = ("cpu", accelerators.GPU)
    step.CudaDevice = RecordingDevice  # type: ignore[misc]
    # A graph owns its memory: what FSDP frees in a capture is there in a replay.
    _fsdp_param.free_storage = lambda tensor: None
