"""Recomputation and offload change what is kept, and not a bit of the gradients."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.harness import run_ranks
from tests.layouts import parse, size
from tests.parallel.test_layouts import MODEL
from tests.small import Overrides, gradients
from weft.config.schema import ActivationCheckpointSection
from weft.models.llama import PRESETS, Llama
from weft.parallel import activation_offload as offload
from weft.parallel.activation_checkpoint import apply_activation_checkpoint
from weft.parallel.activation_offload import apply_activation_offload

WAYS: dict[str, Overrides] = {
    "full": [("activation_checkpoint.mode", "full")],
    "every second": [
        ("activation_checkpoint.mode", "full"),
        ("activation_checkpoint.every_n_layers", "2"),
    ],
    "selective": [("activation_checkpoint.mode", "selective")],
    "all products": [
        ("activation_checkpoint.mode", "selective"),
        ("activation_checkpoint.recompute_every_n_matmuls", "0"),
    ],
    "budget": [
        ("activation_checkpoint.mode", "budget"),
        ("activation_checkpoint.memory_budget", "0.4"),
    ],
    "offload": [("activation_checkpoint.offload", "true")],
    "offload far ahead": [
        ("activation_checkpoint.offload", "true"),
        ("activation_checkpoint.offload_prefetch", "2"),
    ],
    "full, offload": [
        ("activation_checkpoint.mode", "full"),
        ("activation_checkpoint.offload", "true"),
    ],
    "selective, offload": [
        ("activation_checkpoint.mode", "selective"),
        ("activation_checkpoint.offload", "true"),
    ],
}


def differing(
    job: Overrides, store: str, ways: tuple[str, ...] = tuple(WAYS)
) -> dict[str, list[str]]:
    """Of each way, the gradients that are not, to the bit, those without any."""
    offload.MIN_OFFLOAD_BYTES = 0
    plain = gradients(job, store)
    found = {}
    for name in ways:
        ours = gradients([*job, *WAYS[name]], store)
        assert ours["loss"] == plain["loss"], name
        found[name] = [n for n, grad in plain["grads"].items() if not grad.equal(ours["grads"][n])]
    return found


# What differs most, for layouts whose ranks exchange much.
SOME = ("full", "selective", "budget", "selective, offload")


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_remat_some_ways_gradients_are_equal_bit_for_bit(layout: str, store_path: Path) -> None:
    check_bits(layout, SOME, store_path)


@pytest.mark.parametrize(
    "layout",
    [
        "",
        "dp_shard2",
        pytest.param("tp2", marks=pytest.mark.slow),
        pytest.param("pp2", marks=pytest.mark.slow),
        pytest.param("cp2", marks=pytest.mark.slow),
        pytest.param("precision.compute_dtype=bfloat16", marks=pytest.mark.slow),
        pytest.param("dp_shard2 tp2", marks=pytest.mark.slow),
        pytest.param("pp2 pipeline.schedule=Interleaved1F1B dp_shard2", marks=pytest.mark.slow),
        pytest.param("cp2 cp_method=allgather", marks=pytest.mark.slow),
        pytest.param("cp2 cp_method=ulysses", marks=pytest.mark.slow),
        pytest.param("dp_shard2 cpu_offload=true", marks=pytest.mark.slow),
    ],
)
def test_remat_gradients_are_equal_bit_for_bit(layout: str, store_path: Path) -> None:
    check_bits(layout, tuple(WAYS), store_path)


def check_bits(layout: str, ways: tuple[str, ...], store: Path) -> None:
    ranks, overrides = parse(layout)
    job = [*MODEL, *size(layout), *overrides]
    for found in run_ranks(differing, ranks, job, str(store), ways, timeout=300):
        assert found == {name: [] for name in ways}


# --------------------------------------------------------------------------- memory


class Live(TorchDispatchMode):
    """Bytes of all that operators have made and that still lives."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._seen: Any = weakref.WeakValueDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves(args) if torch.is_tensor(x)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._seen:
                    self._seen[storage._cdata] = storage
                    self.bytes += storage.nbytes()
                    weakref.finalize(storage, self._free, storage.nbytes())
        return out

    def _free(self, size: int) -> None:
        self.bytes -= size


def kept(**activation_checkpoint: Any) -> float:
    """What eight blocks keep between forward and backward, in MB."""
    torch.manual_seed(0)
    model = Llama(PRESETS["toy"].model_copy(update={"num_layers": 8, "vocab_size": 256}))
    blocks = list(model.layers.values())
    apply_activation_checkpoint(
        blocks, ActivationCheckpointSection(**activation_checkpoint), compiled=False
    )
    tokens_BT = torch.randint(0, 256, (2, 128))
    for _ in range(2):  # the first one chooses what a budget pays for
        with Live() as live:
            out = model(tokens_BT)
            found = live.bytes
            out.sum().backward()
            del out
    return found / 1e6


def test_remat_keeps_less_memory() -> None:
    none, full = kept(mode="none"), kept(mode="full")
    some, products = kept(mode="selective"), kept(mode="selective", recompute_every_n_matmuls=0)
    half = kept(mode="full", every=2)
    assert full < 0.1 * none
    assert full < some < products < none
    assert full < half < none
    budgets = [kept(mode="budget", memory_budget=share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert budgets == sorted(budgets)
    assert budgets[0] == full
    assert budgets[-1] == none
    for share, found in zip((0.25, 0.5, 0.75), budgets[1:-1], strict=True):
        assert share * none - 2 <= found <= share * none + full


def test_offload_kept_tensors_move_and_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the last block's, each once; parameters and what blocks share stay.  The copy of each
    has begun before it is asked for."""
    monkeypatch.setattr(offload, "SMALLEST", 0)
    moved: list[tuple[int, ...]] = []
    under_way: list[bool] = []
    begin, get = offload.OffloadedTensor.__init__, offload.OffloadedTensor.get

    def note(self: Any, mover: Any, tensor: torch.Tensor) -> None:
        moved.append((tensor.data_ptr(), tensor.nbytes))
        begin(self, mover, tensor)

    def ask(self: Any) -> torch.Tensor:
        under_way.append(self.back is not None)
        return get(self)

    monkeypatch.setattr(offload.OffloadedTensor, "__init__", note)
    monkeypatch.setattr(offload.OffloadedTensor, "get", ask)
    model = Llama(PRESETS["toy"])
    apply_activation_checkpoint(
        list(model.layers.values()), ActivationCheckpointSection(mode="full"), compiled=False
    )
    apply_activation_offload(list(model.layers.values()), 1)
    tokens_BT = torch.randint(0, 256, (2, 64))
    model(tokens_BT).sum().backward()
    assert len(moved) == len(model.layers) - 1
    assert {size for _, size in moved} == {2 * 64 * 192 * 4}
    assert under_way == [True] * len(moved)
    with torch.no_grad():
        model(tokens_BT)
    assert len(moved) == len(model.layers) - 1
