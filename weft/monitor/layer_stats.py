"""Names, statistics and gradient norms of a model's layers.

A *layer* is a block, or a module with parameters outside the blocks: the embedding, the last norm,
the head.  `LayerGradNorms` computes the gradient norm of each layer.  `LayerStats` computes
statistics of activations, gradients and parameters in chosen steps.

The statistics locate the first NaN, and the first tensor in which two runs differ.  Each output of
the embedding, a block and the last norm, each gradient before clipping and each parameter after the
update has a row: the number of elements, and the mean, RMS and largest absolute value of the finite
ones.  Statistics cover the unsharded tensor, and for activations the global batch: ranks add up
their shards, and count replicated values once.  So runs with different layouts agree to rounding,
and runs with the same layout bit for bit.

Other steps cost nothing: hooks exist only during a chosen step.  At its end each rank sends its
sums to rank 0, which broadcasts the first tensor with a NaN or Inf.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.config.schema import steps_of
from weft.monitor.jsonl import JsonlFile
from weft.parallel.dtensor import is_dtensor, l2_norms, to_local
from weft.parallel.step_hook import StepHook
from weft.parallel.tied_parameters import is_second_copy

# In the order of a step.
KINDS = ("activation", "gradient", "parameter")

# Arguments: name of the module; number of sequences, without those that pad a pipeline's last
# microbatch; input; output.
ForwardObserver = Callable[[str, int, Any, Tensor], None]


@contextmanager
def hook_forward(
    modules: Mapping[str, nn.Module],
    batch_sizes: Sequence[int],
    observe: ForwardObserver,
    calls: Counter[str] | None = None,
) -> Iterator[None]:
    """Call ``observe`` after each module's forward pass, once per microbatch.

    ``batch_sizes`` are the numbers of sequences of the microbatches, in order.  ``calls`` counts
    the passes; whoever clears it starts again.
    """
    calls = Counter() if calls is None else calls

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


def name_layers(part: nn.Module, blocks: Collection[nn.Module]) -> dict[str, nn.Module]:
    """Return the layers of a model part by name, in forward order."""
    inner = {module for block in blocks for module in block.modules()}
    return {
        name: module
        for name, module in part.named_modules()
        if module in blocks
        or (name and module not in inner and any(True for _ in module.parameters(recurse=False)))
    }


def find_layer(name: str, layers: Iterable[str]) -> str:
    """Return the layer of a parameter; the parent module's name if it is in none."""
    return next((each for each in layers if name.startswith(f"{each}.")), name.rpartition(".")[0])


def computation_order(row: Mapping[str, Any]) -> tuple[int, int, str]:
    """Return the key that sorts a step's rows: forward, backward, update."""
    is_gradient = row["kind"] == "gradient"
    return KINDS.index(row["kind"]), -row["order"] if is_gradient else row["order"], row["name"]


# --------------------------------------------------------------------------- gradient norms


class LayerGradNorms:
    """L2 norms of the gradients of each layer of the unsharded model.

    ``names`` lists the layers of all ranks, in the order of the model.  Every rank creates this
    object.
    """

    def __init__(
        self, model_parts: Iterable[nn.Module], blocks: Callable[[Any], list[nn.Module]]
    ) -> None:
        layers: list[str] = []
        self._params: list[nn.Parameter] = []
        for part in model_parts:
            part_layers = name_layers(part, set(blocks(part)))
            for name, param in part.named_parameters():
                layers.append(find_layer(name, part_layers))
                self._params.append(param)
        all_layers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_layers, list(dict.fromkeys(layers)))
        self.names = list(dict.fromkeys(name for names in all_layers for name in names))
        device = self._params[0].device if self._params else torch.device("cpu")
        # Several ranks have the same shard, which one of them counts.
        weights = [float(owns_shard(param)) for param in self._params]
        self._weights = torch.tensor(weights, device=device)
        self._layer = torch.tensor([self.names.index(name) for name in layers], device=device)
        self._zero = torch.zeros(1, device=device)

    @torch.no_grad()
    def compute_norms(self) -> Tensor:
        """Return the norms of the current gradients: float32 (layers,); a collective.

        The tensor is on the device, the same on all ranks; the host does not wait for it.
        """
        grads = [self._zero if param.grad is None else param.grad for param in self._params]
        squares = torch.zeros(len(self.names), device=self._zero.device)
        if grads:
            norms = l2_norms([to_local(grad) for grad in grads])
            squares.index_add_(0, self._layer, norms.square() * self._weights)
        if dist.get_world_size() > 1:
            dist.all_reduce(squares)
        return squares.sqrt()


# --------------------------------------------------------------------------- statistics


TensorSums = tuple[int, Tensor]  # see `compute_sums`


@torch.no_grad()
def compute_sums(tensor: Tensor) -> TensorSums:
    """Return the sums of a local floating-point tensor; the host does not wait.

    Returns:
        The number of elements, and float64 ``[4]`` on the tensor's device: sum, sum of squares and
        largest absolute value of the finite elements, and the number of other elements.
    """
    tensor = tensor.detach()
    nonfinite = (~tensor.isfinite()).sum()
    finite = tensor.nan_to_num(0.0, 0.0, 0.0)
    max_abs = finite.abs().amax() if finite.numel() else finite.sum()
    total = finite.sum(dtype=torch.float64)
    # finite.square() would round to bfloat16 before the sum.
    squares = torch.linalg.vector_norm(finite, dtype=torch.float64).square()
    return tensor.numel(), torch.stack((total, squares, max_abs.double(), nonfinite.double()))


class LayerStats(StepHook):
    """Statistics of the chosen steps on a rank; every rank makes the same calls.

    Args:
        steps: the value of ``debug.layer_stats_steps``.
        path: path of statistics.jsonl, which rank 0 writes.
        layers: for each pipeline stage of this rank, its number and its `name_layers`.
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
        self.layers: dict[str, nn.Module] = {}
        self._positions: dict[str, tuple[int, int]] = {}
        for stage, modules in layers:
            for index, (name, module) in enumerate(modules.items()):
                # The fused loss never has all logits of the head at once.
                if not isinstance(module, nn.Linear):
                    # Of a tied parameter's two modules on a rank, only the first has outputs.
                    self.layers.setdefault(name, module)
                    self._positions.setdefault(name, (stage, index))
        self._params = params
        # For each kind and name: the number of tokens, and sums.
        self._sums: dict[tuple[str, str], list[tuple[int, TensorSums]]] = {}
        self._calls: Counter[str] = Counter()
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
        if not self.is_active(step):
            return nullcontext()
        return hook_forward(self.layers, batch_sizes, self._record_activation, self._calls)

    def begin_passes(self, num_sequences: Tensor) -> None:
        """Forget what was recorded of a step, which is computed again."""
        self._sums.clear()
        self._calls.clear()

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
            if owns_shard(self._params[name]):
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
        layers = {n: i for i, n in enumerate(sorted(positions, key=positions.__getitem__))}

        def forward_order(key: tuple[str, str]) -> tuple[int, int]:
            kind, name = key
            layer = name if kind == "activation" else find_layer(name, layers)
            return KINDS.index(kind), layers.get(layer, len(layers))

        keys = sorted(values, key=forward_order)
        return [
            {"step": step, "kind": kind, "name": name, "order": order}
            | make_row(values[kind, name], self._tokens)
            for kind, group in groupby(keys, key=itemgetter(0))
            for order, (_, name) in enumerate(group)
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
    has_earlier = any(index for index, placement in indices if placement.is_replicate())
    return not (has_earlier or is_second_copy(tensor))


def reduce_sums(entries: Iterable[tuple[int, TensorSums]]) -> list[float]:
    """Return the total tokens, elements, and sums of `compute_sums`; the host waits."""
    tokens, sums = zip(*entries, strict=True)
    counts, columns = zip(*sums, strict=True)
    total, squares, max_abs, bad = torch.stack(columns, dim=1)
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


def find_first_nonfinite(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the first computed tensor with a NaN or Inf; empty if there is none."""
    bad = [row for row in rows if row["nonfinite"]]
    if not bad:
        return ""
    first = min(bad, key=computation_order)
    places = {
        "activation": "output of {name} in forward",
        "gradient": "gradient of {name} in backward",
        "parameter": "parameter {name}",
    }
    size = f"{first['nonfinite']} of {first['count']} elements"
    return f"{places[first['kind']].format(name=first['name'])} ({size})"
