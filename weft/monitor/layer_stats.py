"""Statistics by name, of chosen steps: where two runs part, and where the first NaN is.

Of each block's output (and the embedding's and the last norm's), each gradient before clipping and
each parameter after the update: the number of elements, and of those that are finite the mean, the
root of the mean square and the largest absolute value.  All are over the whole tensor, of
activations over the global batch, whatever the layout: each rank adds up what it has, and what
several ranks have alike is counted once.  So two runs may be compared that are laid out in
different ways, to rounding; and if they are laid out alike, bit for bit.

A step that is not chosen pays nothing: hooks are there only while a chosen one is computed.  Then
each rank sends its sums to rank 0 at the end of the step; if parameters are not finite then, all
are told the first one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.config.schema import steps_of
from weft.monitor.jsonl import JsonlFile, is_number, read_records
from weft.parallel.dtensor import to_local

# In the order in which a step comes by.
KINDS = ("activation", "gradient", "parameter")

# What is told of a module's forward pass: its name, how many rows are the batch's own (a pipeline
# fills a short microbatch up), what goes in and what comes out.
Told = Callable[[str, int, Any, Tensor], None]


@contextmanager
def watching(modules: Mapping[str, nn.Module], rows: Sequence[int], told: Told) -> Iterator[None]:
    """Inside, ``told`` hears of each module's forward pass, once for each microbatch.

    Args:
        modules: by name.
        rows: of each microbatch, in order.
    """
    calls = dict.fromkeys(modules, 0)

    def after(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        value = output[0] if isinstance(output, tuple) else output
        calls[name] += 1
        if calls[name] <= len(rows) and isinstance(value, Tensor):  # else computed once more
            told(name, rows[calls[name] - 1], args[0] if args else None, value)

    hooks = [m.register_forward_hook(partial(after, name)) for name, m in modules.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def layers_of(part: nn.Module, blocks: Collection[nn.Module]) -> dict[str, nn.Module]:
    """The modules of a part of the model that are watched, by name, in the order of their use.

    The blocks, and what stands beside them, but for a head: whole logits are never there if that
    can be helped.
    """
    inside = {module for block in blocks for module in block.modules()}
    found = {}
    for name, module in part.named_modules():
        beside = module not in inside and any(True for _ in module.parameters(recurse=False))
        if module in blocks or (beside and name and not isinstance(module, nn.Linear)):
            found[name] = module
    return found


class Sums(NamedTuple):
    """Over the elements of a tensor that a rank has: scalars on its device."""

    number: int
    total: Tensor  # float64, as all of them
    squares: Tensor
    most: Tensor
    nonfinite: Tensor


@torch.no_grad()
def sums_of(tensor: Tensor) -> Sums:
    """Of this rank's part of a tensor, of any floating dtype; not waited for."""
    tensor = tensor.detach()
    bad = (~tensor.isfinite()).sum()
    finite = tensor.nan_to_num(0.0, 0.0, 0.0)
    most = finite.abs().amax() if finite.numel() else finite.sum()
    total = finite.sum(dtype=torch.float64)
    # The product's rounding to bfloat16 would be seen in the sum.
    squares = torch.linalg.vector_norm(finite, dtype=torch.float64).square()
    return Sums(tensor.numel(), total, squares, most.double(), bad.double())


class LayerStats:
    """What a rank knows of the chosen steps; every rank has one and calls it alike."""

    def __init__(
        self,
        steps: str,
        path: Path,
        layers: Sequence[tuple[int, Mapping[str, nn.Module]]],
        params: Mapping[str, nn.Parameter],
        tokens: int,
    ) -> None:
        """
        Args:
            steps: the value of debug.layer_stats_steps.
            path: of statistics.jsonl, which rank 0 writes.
            layers: (number of the pipeline's stage, `layers_of` it) of this rank.
            params: by name, of this rank.
            tokens: of the global batch.
        """
        self._steps, self._path, self._tokens = steps_of(steps), path, tokens
        self.layers = {name: module for _, of in layers for name, module in of.items()}
        self._places = {
            name: (stage, place) for stage, of in layers for place, name in enumerate(of)
        }
        self._params = params
        self._seen: dict[tuple[str, str], list[tuple[int, Sums]]] = {}  # tokens, and their sums
        self._file: JsonlFile | None = None  # on rank 0, of chosen steps
        self._nonfinite: dict[int, str] = {}  # in the chosen steps that have any, the first one

    def wants(self, step: int) -> bool:
        """Whether a step is a chosen one."""
        return any(step in steps for steps in self._steps)

    def back_to(self, step: int, warn: Callable[[str], object]) -> None:
        """Begin after ``step``: drop the rows of later steps, which are taken again.

        Args:
            warn: reports that the file cannot be written.
        """
        self.close()
        if dist.get_rank() == 0 and (self._steps or self._path.exists()):
            self._file = JsonlFile(self._path, step, warn)

    def close(self) -> None:
        """Write what waits."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def forward(self, step: int, rows: Sequence[int]) -> AbstractContextManager[None]:
        """What the layers give inside is of this step, if it is a chosen one.

        Args:
            rows: of each microbatch on this rank, in order.
        """
        self._seen.clear()  # there are some if it is computed again
        if not self.wants(step):
            return nullcontext()
        return watching(self.layers, rows, self._add)

    def _add(self, name: str, rows: int, before: Any, after: Tensor) -> None:
        mine = after[:rows]
        tokens = mine.numel() // mine.shape[-1]
        self._seen.setdefault(("activation", name), []).append((tokens, sums_of(mine)))

    def gradients(self, step: int) -> None:
        """Take the gradients as they are now."""
        if self.wants(step):
            grads = ((name, param.grad) for name, param in self._params.items())
            self._take("gradient", ((name, grad) for name, grad in grads if grad is not None))

    def parameters(self, step: int) -> None:
        """Take the parameters as they are now, and write all that is known of the step."""
        if not self.wants(step):
            return
        self._take("parameter", self._params.items())
        rows = self._gather(step)
        first = [first_nonfinite(rows)]
        dist.broadcast_object_list(first, src=0)
        if first[0]:
            self._nonfinite[step] = first[0]
        if self._file is not None:
            self._file.append(rows)

    def _take(self, kind: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if tells(tensor):
                self._seen[kind, name] = [(0, sums_of(to_local(tensor)))]

    def _gather(self, step: int) -> list[dict[str, Any]]:
        """The rows of a step, on rank 0."""
        mine = [
            (kind, name, self._places.get(name), added(pieces))
            for (kind, name), pieces in self._seen.items()
        ]
        self._seen.clear()
        every: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(mine, every if dist.get_rank() == 0 else None, dst=0)
        if dist.get_rank() != 0:
            return []
        whole: dict[tuple[str, str], list[list[float]]] = {}
        places: dict[str, tuple[int, int]] = {}
        for kind, name, place, values in (row for of in every for row in of):
            whole.setdefault((kind, name), []).append(values)
            if kind == "activation":
                places[name] = place
        forward = sorted(places, key=places.__getitem__)
        order = {("activation", name): n for n, name in enumerate(forward)}
        for kind in KINDS[1:]:
            names = [name for of, name in whole if of == kind]
            order |= {(kind, name): n for n, name in enumerate(in_order(names, forward))}
        return [
            {"step": step, "kind": kind, "name": name, "order": order[kind, name]}
            | row_of(whole[kind, name], self._tokens)
            for kind, name in sorted(whole, key=lambda key: (KINDS.index(key[0]), order[key]))
        ]

    def where(self, step: int) -> str:
        """What is to be added to the message that a step has no finite loss or gradient norm."""
        if not self.wants(step):
            how = f"the same command with --debug.layer_stats_steps {step}"
            return f"; {how} says in which layer it begins"
        first = self._nonfinite.get(step)
        return f"; first in the {first}" if first else "; every activation and gradient is finite"


def tells(tensor: Tensor) -> bool:
    """Whether this rank is the one, of those that have the same part of a tensor, to count it."""
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == 0  # whole, and on all alike
    at: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
    return not any(
        place for place, how in zip(at, tensor.placements, strict=True) if how.is_replicate()
    )


def added(pieces: Iterable[tuple[int, Sums]]) -> list[float]:
    """Tokens, count, total, squares, most, nonfinite of all pieces.  Here the host waits."""
    tokens, sums = zip(*pieces, strict=True)
    counts, *columns = zip(*sums, strict=True)
    total, squares, most, bad = (torch.stack(column) for column in columns)
    parts = torch.stack((total.sum(), squares.sum(), most.amax(), bad.sum())).tolist()
    return [sum(tokens), sum(counts), *parts]


def row_of(ranks: Sequence[Sequence[float]], tokens: int) -> dict[str, Any]:
    """A row of the file, of what `added` gave on every rank.

    Args:
        tokens: of the global batch; ranks that have seen more have seen them several times.
    """
    seen, count, total, squares, most, bad = zip(*ranks, strict=True)
    copies = sum(seen) // tokens if sum(seen) and sum(seen) % tokens == 0 else 1
    number, nonfinite = sum(count) // copies, round(sum(bad) / copies)
    finite = max(1, number - nonfinite)
    return {
        "count": number,
        "mean": sum(total) / copies / finite,
        "rms": math.sqrt(sum(squares) / copies / finite),
        "most": max(most),
        "nonfinite": nonfinite,
    }


def in_order(names: Iterable[str], layers: Sequence[str]) -> list[str]:
    """Parameters in the order of the forward pass: those of a layer where it stands."""
    place = {layer: n for n, layer in enumerate(layers)}

    def key(name: str) -> int:
        return next((n for layer, n in place.items() if name.startswith(f"{layer}.")), len(place))

    return sorted(names, key=key)


def first_nonfinite(rows: Sequence[Mapping[str, Any]]) -> str:
    """What becomes no number first: forward, then backward from the last layer, then the update."""
    bad = [row for row in rows if row["nonfinite"]]
    for row in bad:
        if row["kind"] == "activation":
            return f"output of {row['name']} in forward ({_share(row)})"
    for row in reversed(bad):
        if row["kind"] == "gradient":
            return f"gradient of {row['name']} in backward ({_share(row)})"
    return f"parameter {bad[0]['name']} ({_share(bad[0])})" if bad else ""


def _share(row: Mapping[str, Any]) -> str:
    return f"{row['nonfinite']} of {row['count']} elements"


def read_statistics(run: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's statistics.jsonl; none if it has none, without damaged ones."""
    return [row for row in read_records(run / "statistics.jsonl") if _is_row(row)]


def _is_row(row: Mapping[str, Any]) -> bool:
    numbers = ("order", "count", "mean", "rms", "most", "nonfinite")
    return (
        row.get("kind") in KINDS
        and isinstance(row.get("name"), str)
        and all(is_number(row.get(name)) for name in numbers)
    )
