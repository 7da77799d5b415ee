"""Recomputation and offload change saved memory, and give bitwise equal gradients."""

from __future__ import annotations

import weakref
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.harness import run_ranks
from tests.layouts import parse, size
from tests.parallel.test_layouts import MODEL
from tests.small import Overrides, gradients, loader_of, plan_here, small_job, this_rank
from weft.config.schema import ActivationCheckpointSection
from weft.models.decoder import Decoder
from weft.models.families.llama import PRESETS
from weft.parallel import activation_offload as offload
from weft.parallel.activation_checkpoint import MemoryBudget, apply_activation_checkpoint
from weft.parallel.activation_offload import apply_activation_offload
from weft.training.setup import build

MODES: dict[str, Overrides] = {
    "full": [("activation_checkpoint.mode", "full")],
    "every second block": [
        ("activation_checkpoint.mode", "full"),
        ("activation_checkpoint.every_n_layers", "2"),
    ],
    "selective": [("activation_checkpoint.mode", "selective")],
    "all matmuls": [
        ("activation_checkpoint.mode", "selective"),
        ("activation_checkpoint.recompute_every_n_matmuls", "0"),
    ],
    "budget": [
        ("activation_checkpoint.mode", "budget"),
        ("activation_checkpoint.memory_budget", "0.4"),
    ],
    "offload": [("activation_checkpoint.offload", "true")],
    "offload prefetch 2": [
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


def find_differing(
    job: Overrides, store: str, modes: tuple[str, ...] = tuple(MODES)
) -> dict[str, list[str]]:
    """Return, per mode, the gradients that differ from those without checkpointing."""
    offload.MIN_OFFLOAD_BYTES = 0
    plain = gradients(job, store)
    differing = {}
    for name in modes:
        ours = gradients([*job, *MODES[name]], store)
        assert ours["loss"] == plain["loss"], name
        differing[name] = [
            n for n, grad in plain["grads"].items() if not grad.equal(ours["grads"][n])
        ]
    return differing


# The most different modes, for layouts with much communication.
REPRESENTATIVE_MODES = ("full", "selective", "budget", "selective, offload")


@pytest.mark.parametrize("layout", ["dp_shard2", "tp2", "pp2"])
def test_activation_checkpoint_representative_modes_are_equal_bit_for_bit(
    layout: str, store_path: Path
) -> None:
    check_bits(layout, REPRESENTATIVE_MODES, store_path)


@pytest.mark.parametrize(
    "layout",
    [
        "",
        pytest.param("dp_shard2", marks=pytest.mark.slow),
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
def test_activation_checkpoint_gradients_are_equal_bit_for_bit(
    layout: str, store_path: Path
) -> None:
    check_bits(layout, tuple(MODES), store_path)


def check_bits(layout: str, modes: tuple[str, ...], store: Path) -> None:
    ranks, overrides = parse(layout)
    job = [*MODEL, *size(layout), *overrides]
    for result in run_ranks(find_differing, ranks, job, str(store), modes, timeout=300):
        assert result == {name: [] for name in modes}


EXPERTS: Overrides = [
    *(("model.kind", "moe"), ("model.preset", "toy-moe"), ("model.num_layers", "3")),
    *(("model.dense_layers", "1"), ("parallel.tp", "2"), ("parallel.etp", "1")),
    *(("parallel.ep", "2"), ("model.num_experts", "6"), ("model.active_experts", "3")),
    *(("model.expert_dim", "3"), ("train.seq_len", "8")),
]
UNEVEN_COLUMNS: Overrides = [("parallel.tp", "2"), ("model.ffn_dim", "3"), ("train.seq_len", "8")]


def budget_choices(
    overrides: Overrides, shares: list[str], store: str
) -> list[tuple[int, list[str], Any]]:
    """Return the choices for each budget.

    They are the number of kinds of blocks, the operators whose results the last call saves, and
    what was chosen for its kind of block.
    """
    results = []
    mode = ("activation_checkpoint.mode", "budget")
    calls: list[list[str]] = []
    select = MemoryBudget.select

    def record(self: MemoryBudget) -> Any:
        should_save, names = select(self), list[str]()
        calls.append(names)

        def decide(name: str, *tensors: Any) -> bool:
            saves = should_save(name, *tensors)
            names.extend([name] * saves)
            return saves

        return decide

    for share in shares:
        job = small_job(*overrides, mode, ("activation_checkpoint.memory_budget", share))
        plan = plan_here(job)
        built = build(plan, this_rank())
        loader = loader_of(job, plan, store, built.mesh)
        with patch.object(MemoryBudget, "select", record):
            built.train_step.forward_backward(loader.get_microbatches(0))
        blocks = plan.family.blocks(built.model_parts[0])
        budgets = [vars(block)["memory_budget"] for block in blocks]
        results.append((len({id(budget) for budget in budgets}), calls[-1], budgets[-1].saved))
    return results


@pytest.mark.parametrize(
    ("overrides", "kinds", "collective", "saved_calls"),
    [
        (EXPERTS, 2, "all_to_all_single", [0, 3, 3]),  # counts, rows and results
        (UNEVEN_COLUMNS, 1, "reduce_scatter_tensor", [0, 2, 2]),
    ],
    ids=["numbers of rows", "numbers of columns"],
)
def test_budget_saves_the_same_collectives_on_all_ranks(
    overrides: Overrides, kinds: int, collective: str, saved_calls: list[int], store_path: Path
) -> None:
    """Else a rank waits for one that the others do not repeat: the tensors have other sizes."""
    shares = ["0", "0.05", "0.5"]
    ours, theirs = run_ranks(budget_choices, 2, overrides, shares, str(store_path))
    assert ours != theirs
    for (count, names, _), (_, others, _) in zip(ours, theirs, strict=True):
        both = [[name for name in saved if "c10d" in name] for saved in (names, others)]
        assert both[0] == both[1]
        assert count == kinds
    calls = [sum(name.endswith(collective) for name in names) for _, names, _ in ours]
    assert calls == saved_calls


class Branches(torch.nn.Module):
    """A block whose operators depend on its values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        hidden_BF = self.first(x_BD)
        if x_BD.sum() > 0:
            hidden_BF = hidden_BF + torch.zeros_like(hidden_BF)
            return self.second(hidden_BF.sigmoid()).add_(x_BD)
        hidden_BF.mul_(3)  # of a result that the other branch saves
        extra_BF = x_BD.new_empty(len(x_BD), 32).copy_(hidden_BF)
        for _ in range(2):
            extra_BF = extra_BF @ self.second.weight.t() @ self.first.weight.t()
        return self.second((hidden_BF + extra_BF.tanh_()).sigmoid())


@pytest.mark.parametrize("signs", [(1, -1, 1), (-1, 1, -1, -1)])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_budget_of_calls_with_other_operators_changes_no_bit(
    signs: tuple[int, ...], share: float
) -> None:
    torch.manual_seed(0)
    block = Branches()
    inputs = [torch.rand(5, 16) * sign for sign in signs]

    def compute() -> list[torch.Tensor]:
        copies = [x.clone().requires_grad_() for x in inputs]
        loss = torch.stack([block(x.clone()).square().sum() for x in copies]).sum()
        return list(torch.autograd.grad(loss, [*copies, *block.parameters()]))

    plain = compute()
    section = ActivationCheckpointSection(mode="budget", memory_budget=share)
    apply_activation_checkpoint([block], section, compiled=False)
    assert all(map(torch.equal, compute(), plain))
    assert all(map(torch.equal, compute(), plain))
    saved = {kind[0] for kind, number in vars(block)["memory_budget"].saved.items() if number}
    assert saved
    assert not any("new_" in name or "zeros" in name or "copy_" in name for name in saved)


class Rows(torch.nn.Module):
    """A block that multiplies as many more matrices as its input says."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)

    def forward(self, x_BD: torch.Tensor, repeats: int) -> torch.Tensor:
        for _ in range(repeats):
            x_BD = x_BD + self.small(x_BD).sum()
        return self.large(x_BD).sin().sin()


class CountMatmuls(TorchDispatchMode):
    """Counts the linear layers that run, by the width of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.name() == "aten::addmm":
            self.widths[out.shape[1]] += 1
        return out


def test_budget_of_a_call_with_more_operators_saves_the_same_products() -> None:
    """The first call is without gradients, as in an evaluation of the start or KTO's estimate."""
    block = Rows()
    section = ActivationCheckpointSection(mode="budget", memory_budget=0.6)
    x_BD = torch.rand(32, 64)
    expected = block(x_BD, 3)
    apply_activation_checkpoint([block], section, compiled=False)
    with torch.no_grad():
        assert block(x_BD, 3).equal(expected)
    for repeats, rows in [(0, 32), (3, 32), (3, 48), (0, 5)]:
        x_BD = torch.rand(rows, 64, requires_grad=True)
        out = block(x_BD, repeats)
        with CountMatmuls() as recomputed:
            out.sum().backward()
        assert recomputed.widths == Counter({8: repeats} if repeats else {}), (repeats, rows)


# --------------------------------------------------------------------------- memory


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors that operators created."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._seen: Any = weakref.WeakValueDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {x.untyped_storage()._cdata for x in tree_leaves(args) if torch.is_tensor(x)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in inputs and storage._cdata not in self._seen:
                    self._seen[storage._cdata] = storage
                    self.bytes += storage.nbytes()
                    weakref.finalize(storage, self._free, storage.nbytes())
        return out

    def _free(self, size: int) -> None:
        self.bytes -= size


def saved_megabytes(**section: Any) -> float:
    """Return the MB that six blocks save for backward."""
    torch.manual_seed(0)
    model = Decoder(PRESETS["toy"].model_copy(update={"num_layers": 6, "vocab_size": 256}))
    blocks = list(model.layers.values())
    apply_activation_checkpoint(blocks, ActivationCheckpointSection(**section), compiled=False)
    tokens_BT = torch.randint(0, 256, (2, 128))
    if section["mode"] == "budget":  # it chooses in the first pass
        model(tokens_BT)
    with LiveBytes() as live:
        out = model(tokens_BT)
        result = live.bytes
        del out
    return result / 1e6


def test_activation_checkpoint_saves_less_memory() -> None:
    none, full = saved_megabytes(mode="none"), saved_megabytes(mode="full")
    selective = saved_megabytes(mode="selective")
    matmuls = saved_megabytes(mode="selective", recompute_every_n_matmuls=0)
    half = saved_megabytes(mode="full", every_n_layers=2)
    assert full < 0.1 * none
    assert full < selective < matmuls < none
    assert full < half < none
    shares = (0.0, 0.3, 0.6, 1.0)
    budgets = [saved_megabytes(mode="budget", memory_budget=share) for share in shares]
    assert budgets == sorted(budgets)
    assert budgets[0] == full
    assert budgets[-1] == none
    for share, saved in zip(shares[1:-1], budgets[1:-1], strict=True):
        assert share * none - 2 <= saved <= share * none + full


def test_offload_saved_tensors_are_copied_and_prefetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks but the last offload each saved tensor once.

    Parameters and shared arguments are not offloaded.  The copy back of a tensor has started
    before backward waits for the tensor.
    """
    monkeypatch.setattr(offload, "MIN_OFFLOAD_BYTES", 0)
    offloaded: list[tuple[int, ...]] = []
    prefetched: list[bool] = []
    init, wait = offload.OffloadedTensor.__init__, offload.OffloadedTensor.wait

    def record_init(self: Any, offloader: Any, tensor: torch.Tensor) -> None:
        offloaded.append((tensor.data_ptr(), tensor.nbytes))
        init(self, offloader, tensor)

    def record_wait(self: Any) -> torch.Tensor:
        prefetched.append(self.on_device is not None)
        return wait(self)

    monkeypatch.setattr(offload.OffloadedTensor, "__init__", record_init)
    monkeypatch.setattr(offload.OffloadedTensor, "wait", record_wait)
    model = Decoder(PRESETS["toy"])
    apply_activation_checkpoint(
        list(model.layers.values()), ActivationCheckpointSection(mode="full"), compiled=False
    )
    apply_activation_offload(list(model.layers.values()), 1)
    tokens_BT = torch.randint(0, 256, (2, 64))
    model(tokens_BT).sum().backward()
    assert len(offloaded) == len(model.layers) - 1
    assert {size for _, size in offloaded} == {2 * 64 * 192 * 4}
    assert prefetched == [True] * len(offloaded)
    with torch.no_grad():
        model(tokens_BT)
    assert len(offloaded) == len(model.layers) - 1
