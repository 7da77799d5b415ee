"""Statistics of activations, gradients and parameters in chosen steps.

They locate the first NaN, and the first tensor in which two runs differ.  Each output of the
embedding, a block and the last norm, each gradient before clipping and each parameter after the
update has a row: the number of elements, and the mean, RMS and largest absolute value of the finite
ones.  Statistics cover the unsharded tensor, and for activations the global batch: ranks add up
their shards, and count replicated values once.  So runs with different layouts agree to rounding,
and runs with the same layout bit for bit.

Other steps cost nothing: hooks exist only during a chosen step.  At its end each rank sends its
sums to rank 0, which broadcasts the first tensor with a NaN or Inf.
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

from weft.config.schema import steps_of
from weft.monitor.jsonl import JsonlFile, is_number, read_records
from weft.parallel.dtensor import is_dtensor, to_local

# In the order of a step.
KINDS = ("activation", "gradient", "parameter")

# Arguments: name of the module; number of sequences, without those that pad a pipeline's last
# microbatch; input; output.
ForwardObserver = Callable[[str, int, Any, Tensor], None]


@contextmanager
def hook_forward(
    modules: Mapping[str, nn.Module], batch_sizes: Sequence[int], observe: ForwardObserver
) -> Iterator[None]:
    """Call ``observe`` after each module's forward pass, once per microbatch.

    ``batch_sizes`` are the numbers of sequences of the microbatches, in order.
    """
    calls = dict.fromkeys(modules, 0)

    def hook(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        value = output[0] if isinstance(output, tuple) else output
        calls[name] += 1
        if calls[name] <= len(batch_sizes) and isinstance(value, Tensor):  # not a recomputation
            observe(name, batch_sizes[calls[name] - 1], args[0] if args else None, value)

    hooks = [m.register_forward_hook(partial(hook, name)) for name, m in modules.items()]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def select_layers(part: nn.Module, blocks: Collection[nn.Module]) -> dict[str, nn.Module]:
    """Return the modules of a model part that have statistics, in forward order.

    These are the blocks and the modules outside them, without the head, because the fused loss
    never has all logits at once.
    """
    inner = {module for block in blocks for module in block.modules()}
    layers = {}
    for name, module in part.named_modules():
        is_outside = module not in inner and any(True for _ in module.parameters(recurse=False))
        if module in blocks or (is_outside and name and not isinstance(module, nn.Linear)):
            layers[name] = module
    return layers


class TensorSums(NamedTuple):
    """Sums over the local elements of a tensor; float64 scalars on its device."""

    num_elements: int  # all elements
    total: Tensor  # of finite elements, like the next two
    squares: Tensor
    max_abs: Tensor
    nonfinite: Tensor  # number of other elements


@torch.no_grad()
def compute_sums(tensor: Tensor) -> TensorSums:
    """Return the sums of a local floating-point tensor; the host does not wait."""
    tensor = tensor.detach()
    nonfinite = (~tensor.isfinite()).sum()
    finite = tensor.nan_to_num(0.0, 0.0, 0.0)
    max_abs = finite.abs().amax() if finite.numel() else finite.sum()
    total = finite.sum(dtype=torch.float64)
    # finite.square() would round to bfloat16 before the sum.
    squares = torch.linalg.vector_norm(finite, dtype=torch.float64).square()
    return TensorSums(tensor.numel(), total, squares, max_abs.double(), nonfinite.double())


class LayerStats:
    """Statistics of the chosen steps on a rank; every rank makes the same calls.

    Args:
        steps: the value of ``debug.layer_stats_steps``.
        path: path of statistics.jsonl, which rank 0 writes.
        layers: for each pipeline stage of this rank, its number and its `select_layers`.
        params: this rank's parameters, by name.
        tokens: number of tokens of the global batch.
    """

    def __init__(
        self,
        steps: str,
        path: Path,
        layers: Sequence[tuple[int, Mapping[str, nn.Module]]],
        params: Mapping[str, nn.Parameter],
        tokens: int,
    ) -> None:
        self._steps, self._path, self._tokens = steps_of(steps), path, tokens
        self.layers = {name: m for _, modules in layers for name, m in modules.items()}
        self._positions = {
            name: (stage, index) for stage, modules in layers for index, name in enumerate(modules)
        }
        self._params = params
        # For each kind and name: the number of tokens, and sums.
        self._sums: dict[tuple[str, str], list[tuple[int, TensorSums]]] = {}
        self._file: JsonlFile | None = None  # on rank 0
        self._first_nonfinite: dict[int, str] = {}  # by chosen step

    def is_active(self, step: int) -> bool:
        """Return True if a step is a chosen one."""
        return any(step in steps for steps in self._steps)

    def open(self, step: int, warn: Callable[[str], object]) -> None:
        """Continue the file after ``step``; drop rows of later steps, which run again.

        ``warn`` reports that the file cannot be written.
        """
        self.close()
        if dist.get_rank() == 0 and (self._steps or self._path.exists()):
            self._file = JsonlFile(self._path, step, warn)

    def close(self) -> None:
        """Write waiting rows."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def record_forward(self, step: int, batch_sizes: Sequence[int]) -> AbstractContextManager[None]:
        """Return a context that records the layers' outputs in a chosen step.

        ``batch_sizes``: see `hook_forward`.
        """
        self._sums.clear()  # not empty if the step is computed again
        if not self.is_active(step):
            return nullcontext()
        return hook_forward(self.layers, batch_sizes, self._record_activation)

    def _record_activation(self, name: str, batch_size: int, input_: Any, output: Tensor) -> None:
        value = output[:batch_size]
        tokens = value.numel() // value.shape[-1]
        self._sums.setdefault(("activation", name), []).append((tokens, compute_sums(value)))

    def record_gradients(self, step: int) -> None:
        """Record the current gradients."""
        if self.is_active(step):
            grads = ((name, param.grad) for name, param in self._params.items())
            self._record("gradient", ((name, grad) for name, grad in grads if grad is not None))

    def record_parameters(self, step: int) -> None:
        """Record the current parameters, and write the rows of the step."""
        if not self.is_active(step):
            return
        self._record("parameter", self._params.items())
        rows = self._gather_rows(step)
        first = [find_first_nonfinite(rows)]
        dist.broadcast_object_list(first, src=0)
        if first[0]:
            self._first_nonfinite[step] = first[0]
        if self._file is not None:
            self._file.append(rows)

    def _record(self, kind: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if owns_shard(tensor):
                self._sums[kind, name] = [(0, compute_sums(to_local(tensor)))]

    def _gather_rows(self, step: int) -> list[dict[str, Any]]:
        """Return the rows of a step, on rank 0."""
        local = [
            (kind, name, self._positions.get(name), reduce_sums(sums))
            for (kind, name), sums in self._sums.items()
        ]
        self._sums.clear()
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(local, ranks if dist.get_rank() == 0 else None, dst=0)
        if dist.get_rank() != 0:
            return []
        values: dict[tuple[str, str], list[list[float]]] = {}
        positions: dict[str, tuple[int, int]] = {}
        for kind, name, position, sums in (entry for rank in ranks for entry in rank):
            values.setdefault((kind, name), []).append(sums)
            if kind == "activation":
                positions[name] = position
        layers = sorted(positions, key=positions.__getitem__)
        order = {("activation", name): n for n, name in enumerate(layers)}
        for kind in KINDS[1:]:
            names = [name for other, name in values if other == kind]
            order |= {(kind, name): n for n, name in enumerate(sort_parameters(names, layers))}
        return [
            {"step": step, "kind": kind, "name": name, "order": order[kind, name]}
            | make_row(values[kind, name], self._tokens)
            for kind, name in sorted(values, key=lambda key: (KINDS.index(key[0]), order[key]))
        ]

    def locate_nonfinite(self, step: int) -> str:
        """Return the end of a message about a NaN or Inf: the tensor, or a remedy."""
        if not self.is_active(step):
            return f"; to find the layer, run again with --debug.layer_stats_steps {step}"
        first = self._first_nonfinite.get(step)
        return f"; first in the {first}" if first else "; every activation and gradient is finite"


def owns_shard(tensor: Tensor) -> bool:
    """Return True if this rank counts its shard; ranks with the same shard do not."""
    if not is_dtensor(tensor):
        return dist.get_rank() == 0  # replicated on all ranks
    coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
    indices = zip(coordinate, tensor.placements, strict=True)
    return not any(index for index, placement in indices if placement.is_replicate())


def reduce_sums(entries: Iterable[tuple[int, TensorSums]]) -> list[float]:
    """Return the total tokens and fields of `TensorSums`; the host waits."""
    tokens, sums = zip(*entries, strict=True)
    counts, *columns = zip(*sums, strict=True)
    total, squares, max_abs, bad = (torch.stack(column) for column in columns)
    scalars = torch.stack((total.sum(), squares.sum(), max_abs.amax(), bad.sum())).tolist()
    return [sum(tokens), sum(counts), *scalars]


def make_row(ranks: Sequence[Sequence[float]], tokens: int) -> dict[str, Any]:
    """Return the statistics of a tensor.

    Args:
        ranks: `reduce_sums` of every rank.
        tokens: number of tokens of the global batch; if the ranks have a multiple of it, several
            ranks have the same activations.
    """
    all_tokens, counts, total, squares, max_abs, bad = zip(*ranks, strict=True)
    num_tokens = sum(all_tokens)
    copies = num_tokens // tokens if num_tokens and num_tokens % tokens == 0 else 1
    count, nonfinite = sum(counts) // copies, round(sum(bad) / copies)
    finite = max(1, count - nonfinite)
    return {
        "count": count,
        "mean": sum(total) / copies / finite,
        "rms": math.sqrt(sum(squares) / copies / finite),
        "max_abs": max(max_abs),
        "nonfinite": nonfinite,
    }


def sort_parameters(names: Iterable[str], layers: Sequence[str]) -> list[str]:
    """Return names of parameters in the order of their layers, others last."""
    order = {layer: n for n, layer in enumerate(layers)}

    def key(name: str) -> int:
        return next((n for layer, n in order.items() if name.startswith(f"{layer}.")), len(order))

    return sorted(names, key=key)


def find_first_nonfinite(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the first computed tensor with a NaN or Inf; empty if there is none."""
    bad = [row for row in rows if row["nonfinite"]]
    for row in bad:
        if row["kind"] == "activation":
            return f"output of {row['name']} in forward ({_format_share(row)})"
    for row in reversed(bad):
        if row["kind"] == "gradient":
            return f"gradient of {row['name']} in backward ({_format_share(row)})"
    return f"parameter {bad[0]['name']} ({_format_share(bad[0])})" if bad else ""


def _format_share(row: Mapping[str, Any]) -> str:
    return f"{row['nonfinite']} of {row['count']} elements"


def read_statistics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the intact rows of a run's statistics.jsonl; none without the file."""
    return [row for row in read_records(run_dir / "statistics.jsonl") if _is_row(row)]


def _is_row(row: Mapping[str, Any]) -> bool:
    numbers = ("order", "count", "mean", "rms", "max_abs", "nonfinite")
    return (
        row.get("kind") in KINDS
        and isinstance(row.get("name"), str)
        and all(is_number(row.get(name)) for name in numbers)
    )
