"""What keeps a function from being captured in a CUDA graph and replayed, counted on fake tensors.

`CaptureCounter` stands in for `weft.parallel.cuda_graphs.CudaDevice`.  A capture runs the function,
and so does each replay, because nothing else could run fake tensors.  Obstacles are

- a wait of the host, and a copy between host and device: not allowed, or done once only;
- other operators, shapes or dtypes in a replay than in the capture: Python decided anew;
- a tensor from outside that the capture did not read: the graph would read the old memory.  A
  tensor that another graph makes is no such tensor: a replay makes it in the same memory;
- a wait for an event from before the capture, and work on a stream that nothing waits for: not
  allowed.

Memory that the function allocates is no obstacle: it is in the pool of the graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


@dataclass
class Region:
    """Operators of one run of a function, and the memory from outside that they read."""

    operators: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # of weft, of each operator
    outside: dict[int, str] = field(default_factory=dict)  # line of weft, by storage
    own: set[int] = field(default_factory=set)  # storages that the function allocated
    held: list[Any] = field(default_factory=list)  # so that no storage has the key of another


class CaptureCounter:
    """Counts obstacles to captures.

    Attributes:
        obstacles: by kind and line of weft.
        num_captures, num_replays: of all graphs.
    """

    def __init__(self, line_of_weft: Callable[[], str]) -> None:
        self.obstacles: Counter[str] = Counter()
        self.num_captures = self.num_replays = 0
        self.made: set[int] = set()  # storages that all runs allocated
        self.region: Region | None = None
        self.clock = StreamClock(self._add)
        self._line = line_of_weft

    def _add(self, kind: str, line: str = "") -> None:
        self.obstacles[f"{kind}: {line or self._line()}"] += 1

    def warm_up(self, function: Callable[[], Tensor]) -> Tensor:
        """Run the function."""
        return function()

    def capture(self, function: Callable[[], Tensor]) -> tuple[ReplayedRegion, Tensor]:
        """Run the function, and count its obstacles."""
        self.num_captures += 1
        result, region = self._run(function)
        return ReplayedRegion(self, function, region), result

    def replay(self, function: Callable[[], Tensor], captured: Region) -> None:
        """Run the function again, and count what differs from the capture."""
        self.num_replays += 1
        _, region = self._run(function)
        pairs = zip(captured.operators, region.operators, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is None and len(captured.operators) != len(region.operators):
            first = min(len(captured.operators), len(region.operators)) - 1
        if first is not None:
            change = f"{captured.operators[first]} becomes {region.operators[first]}"
            self._add(f"another operator ({change})", region.lines[first])
        others = region.outside.keys() - captured.outside.keys()
        before = captured.outside.keys() - region.outside.keys()
        from_graphs = len(before & self.made), len(others & self.made)
        if from_graphs[0] != from_graphs[1]:
            self._add(f"{from_graphs[1]} tensors of other graphs, not {from_graphs[0]}")
        for storage in others - self.made:
            self._add("another tensor from outside", region.outside[storage])
        captured.held += region.held

    def _run(self, function: Callable[[], Tensor]) -> tuple[Tensor, Region]:
        self.region = region = Region()
        self.clock.begin()
        try:
            return function(), region
        finally:
            self.made |= region.own
            self.region = None
            self.clock.end()

    def count_operator(self, name: str, args: Any, out: Any, launches: bool) -> None:
        """Count an operator; also outside of captures."""
        if (region := self.region) is None:
            return
        line, inputs = self._line(), cuda_tensors(args)
        results = cuda_tensors(out)
        for tensor in inputs:
            if (storage := storage_of(tensor)) not in region.own:
                region.outside.setdefault(storage, f"{line} ({name})")
        region.own.update({storage_of(t) for t in results} - region.outside.keys())
        region.held += [*inputs, *results]
        if launches:
            shapes = [f"{tuple(t.shape)} {t.dtype}" for t in (*inputs, *results)]
            region.operators.append(f"{name} of {', '.join(shapes)}")
            region.lines.append(line)
            self.clock.launch()

    def count_wait(self) -> None:
        """Count a wait of the host."""
        if self.region is not None:
            self._add("wait of the host")

    def count_copy(self, direction: str) -> None:
        """Count a copy between host and device."""
        if self.region is not None:
            self._add(f"copy from {direction}")


@dataclass
class ReplayedRegion:
    """A captured function; its first replay is the run of the capture."""

    counter: CaptureCounter
    function: Callable[[], Tensor]
    region: Region
    has_run: bool = False

    def replay(self) -> None:
        """Run the function again."""
        if self.has_run:
            self.counter.replay(self.function, self.region)
        self.has_run = True


def cuda_tensors(tree: Any) -> list[Tensor]:
    """Return the plain tensors on the device in a tree."""
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.device.type == "cuda" and has_storage(leaf)]


def has_storage(tensor: Tensor) -> bool:
    """Return False for a tensor that consists of others, such as a DTensor."""
    return not torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor)


def storage_of(tensor: Tensor) -> int:
    """Return a key of the memory of a tensor."""
    key: int = tensor.untyped_storage()._cdata
    return key


class StreamClock:
    """Order of work on streams, in and around captures.

    Each stream has a time for each other: the last work there that it has waited for.  An event
    has the times of its stream.

    Args:
        add: counts an obstacle.
    """

    def __init__(self, add: Callable[[str], None]) -> None:
        self._add = add
        self.current: list[Any] = []  # streams, the innermost last
        self._capture = 0  # number of the running capture; 0: none
        self._num_captures = 0
        self._work: Counter[int] = Counter()  # kernels in this capture, by stream
        self._seen: dict[int, Counter[int]] = {}  # by stream of the capture

    def begin(self) -> None:
        """Begin a capture on the current stream."""
        self._num_captures += 1
        self._capture = self._num_captures
        self._work, self._seen = Counter(), {id(self.current[-1]): Counter()}

    def end(self) -> None:
        """End the capture; count streams with work that its stream has not waited for."""
        stream = id(self.current[-1])
        seen = self._seen[stream]
        if any(work > seen[other] for other, work in self._work.items() if other != stream):
            self._add("work on a stream that nothing waits for")
        self._capture = 0

    def launch(self) -> None:
        """Count a kernel on the current stream."""
        stream = id(self.current[-1])
        if self._capture and stream not in self._seen:
            self._add("work on a stream that is not captured")
        self._work[stream] += 1

    def record(self, stream: Any) -> tuple[int, Counter[int]]:
        """Return what an event of the stream knows: its capture and times."""
        key = id(stream)
        if not self._capture or key not in self._seen:
            return 0, Counter()
        return self._capture, self._seen[key] | Counter({key: self._work[key]})

    def wait(self, stream: Any, known: tuple[int, Counter[int]]) -> None:
        """Let a stream wait for an event."""
        capture, times = known
        key = id(stream)
        if not self._capture:
            return
        if capture == self._capture:
            self._seen[key] = self._seen.get(key, Counter()) | times
        elif key in self._seen:
            self._add("wait for an event from before the capture")
