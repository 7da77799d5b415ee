"""CUDA graphs: forward and backward of a microbatch, captured once and replayed.

A GPU waits for the host while a step has many small kernels: each must be launched from Python.  A
CUDA graph launches all kernels of a microbatch at once.  It repeats them on the same memory, with
the same shapes, and runs no Python.  So what a microbatch reads and writes must stay in place:

    inputs       copied into static tensors before each replay
    gradients    added to the same tensors in every step, which are zeroed at its start
    loss         copied out after each replay, because the next one overwrites it
    parameters   updated in place by the optimizer, as without graphs
    the rest     in the pool of the graphs, which nothing else uses

A step begins with the copies of the parameters (`weft.parallel.mixed_precision`), outside of the
graphs.  With FSDP microbatches differ: the first gathers parameters, the last frees them.  So each
position in the step has its graph, and one step captures all of them: FSDP's state on the host is
the same before and after it, and does not change in a replay.

The first `WARMUP_STEPS` steps run the same region without a graph, on the stream of the captures:
torch.compile compiles, and libraries allocate their workspaces.  Steps of other shapes, and
evaluations, run without graphs.  `weft.planning.cuda_graph_rules` refuses what waits for the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from weft.config.accelerators import GPU
from weft.parallel.dtensor import to_local

WARMUP_STEPS = 2
Function = Callable[[], Tensor]


class Graph(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Run the captured kernels again."""


class GraphDevice(Protocol):
    """Captures graphs."""

    def warm_up(self, function: Function) -> Tensor:
        """Run a function as a capture would, without a graph."""

    def capture(self, function: Function) -> tuple[Graph, Tensor]:
        """Capture a function without running it; return the graph and its static result."""


class CudaDevice:
    """Captures CUDA graphs on a stream and in a memory pool of their own."""

    def __init__(self) -> None:
        self.module: Any = torch.get_device_module(GPU)
        self.stream: Any = self.module.Stream()
        self.pool = self.module.graph_pool_handle()

    def warm_up(self, function: Function) -> Tensor:
        """See `GraphDevice`."""
        current = self.module.current_stream()
        self.stream.wait_stream(current)
        with self.module.stream(self.stream):
            result = function()
        current.wait_stream(self.stream)
        return result

    def capture(self, function: Function) -> tuple[Graph, Tensor]:
        """See `GraphDevice`.

        Raises:
            RuntimeError: if an operator cannot be captured.
        """
        graph: Graph = self.module.CUDAGraph()
        try:
            # Other threads may allocate pinned memory, or query events of saves.
            with self.module.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                result = function()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # the end of the capture fails, too
            message = f"{CAPTURE_FAILED}: {error.__context__ or error}"
            raise RuntimeError(message) from error
        return graph, result


CAPTURE_FAILED = (
    "compile.cuda_graphs=true: forward and backward of a microbatch could not be captured. Set "
    "compile.cuda_graphs=false"
)
OTHER_SHAPES = (
    "compile.cuda_graphs=true has no effect in this step and others like it: its microbatches have "
    "other shapes than those of the first step. Set compile.cuda_graphs=false"
)


class _Captured(NamedTuple):
    """The graph of a microbatch.

    Attributes:
        graph: reads ``inputs``, adds to the gradients, and writes ``loss``.
        inputs: static tensors, each once.
        loss: static.
    """

    graph: Graph
    inputs: list[Tensor]
    loss: Tensor


class MicrobatchGraphs:
    """Forward and backward of a step's microbatches, replayed from graphs.

    Args:
        run: computes the loss of a microbatch, a tree of tensors and constants, and adds its
            gradients to ``params``.
        params: the trained parameters.
        device: captures the graphs.

    Attributes:
        log: receives messages about captures.
    """

    def __init__(
        self, run: Callable[[Any], Tensor], params: Iterable[nn.Parameter], device: GraphDevice
    ) -> None:
        self.log: Callable[[str], None] = lambda text: None
        self._has_warned = False
        self._run, self._params, self._device = run, list(params), device
        self._step_key: Hashable = None  # of the steps that have graphs
        self._num_steps = 0  # with this key
        self._graphs: dict[Hashable, _Captured] = {}
        self._trained: set[nn.Parameter] = set()  # that have had a gradient
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._microbatches: Sequence[Any] = ()
        self._keys: list[Hashable] = []
        self._uses_graphs = False

    def begin_passes(
        self, microbatches: Sequence[Any], positions: Sequence[Hashable], can_replay: bool = True
    ) -> None:
        """Begin the passes of a step.

        Args:
            microbatches: inputs of the function.
            positions: microbatches of equal positions and shapes share a graph.
            can_replay: False: run this step without graphs.
        """
        keys: list[Hashable] = [
            (position, *describe_inputs(each))
            for position, each in zip(positions, microbatches, strict=True)
        ]
        if self._step_key is None:
            self._step_key = tuple(keys)
        has_key = can_replay and self._step_key == tuple(keys)
        self._num_steps += has_key
        if can_replay and not has_key and not self._has_warned:
            self._has_warned = True
            self.log(f"warning: {OTHER_SHAPES}")
        self._microbatches, self._keys = microbatches, keys
        self._uses_graphs = has_key and self._num_steps > WARMUP_STEPS
        if self._uses_graphs:
            self._place_gradients()

    def __call__(self, index: int) -> Tensor:
        """Run a microbatch of the step, in their order; return its loss."""
        inputs, key = self._microbatches[index], self._keys[index]
        if not self._uses_graphs:
            loss = self._device.warm_up(lambda: self._run(inputs))
            self._trained.update(param for param in self._params if param.grad is not None)
            return loss
        if key in self._graphs:
            captured = self._graphs[key]
            torch._foreach_copy_(captured.inputs, list_tensors(inputs))
        else:
            captured = self._graphs[key] = self._capture(inputs)
        captured.graph.replay()
        return captured.loss.clone()

    def _place_gradients(self) -> None:
        """Let the parameters' gradients be those that the graphs add to."""
        if not self._gradients:
            trained = [param for param in self._params if param in self._trained]
            self._gradients = {param: torch.zeros_like(param.detach()) for param in trained}
        empty = []
        for param, gradient in self._gradients.items():
            if param.grad is None:
                empty.append(to_local(gradient))
            elif param.grad is not gradient:
                to_local(gradient).copy_(to_local(param.grad))
            param.grad = gradient
        if empty:
            torch._foreach_zero_(empty)

    def _capture(self, inputs: Any) -> _Captured:
        began = time.monotonic()
        leaves, structure = tree_flatten(inputs)
        static = {id(leaf): leaf.clone() for leaf in leaves if isinstance(leaf, Tensor)}
        static_inputs = tree_unflatten([static.get(id(leaf), leaf) for leaf in leaves], structure)
        graph, loss = self._device.capture(lambda: self._run(static_inputs))
        seconds = time.monotonic() - began
        self.log(f"captured CUDA graph {len(self._graphs) + 1} in {seconds:.1f} s")
        return _Captured(graph, list_tensors(static_inputs), loss)


def list_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree, each once, in the order of their first place."""
    tensors = {id(leaf): leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}
    return list(tensors.values())


def describe_inputs(tree: Any) -> tuple[Hashable, ...]:
    """Return a key of a tree.

    It has the constants, and of each tensor shape, dtype, device, and the first place where it is.
    """
    places: dict[int, int] = {}
    described: list[Hashable] = []
    for place, leaf in enumerate(tree_leaves(tree)):
        if isinstance(leaf, Tensor):
            first = places.setdefault(id(leaf), place)
            described.append((first, tuple(leaf.shape), leaf.dtype, leaf.device))
        else:
            described.append(leaf)
    return tuple(described)
