"""Microbatches that are replayed from graphs equal those of ordinary steps, bit for bit.

A CPU has graphs of operators (`tests.recorded_graphs`), which like CUDA graphs run no Python.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness import run_ranks
from tests.recorded_graphs import RecordedGraph, RecordingDevice, record_graphs
from tests.small import Overrides, newest_state, train_rank
from weft.parallel import cuda_graphs
from weft.parallel.cuda_graphs import WARMUP_STEPS, MicrobatchGraphs
from weft.parallel.dtensor import to_local
from weft.parallel.expert_dispatch import Overflow
from weft.parallel.step_hook import find_hook
from weft.training import loop

GRAPHS = ("compile.cuda_graphs", "true")
# The last microbatch of a step is smaller.  An evaluation runs between replays.
STEPS = {
    "train.global_batch_size": "5",
    "train.microbatch_size": "2",
    "train.steps": "5",
    "train.eval_interval": "4",
}
TWO_RANKS = {"train.global_batch_size": "10"}
FOUR_RANKS = {"train.global_batch_size": "20"}
BFLOAT16 = {"precision.compute_dtype": "bfloat16"}
FLOAT8 = BFLOAT16 | {"precision.float8_small": "true"}
EXPERTS = BFLOAT16 | {
    "model.num_experts": "4",
    "model.active_experts": "2",
    "model.expert_dim": "32",
}
PADDED = EXPERTS | TWO_RANKS | {"parallel.ep": "2", "parallel.ep_dispatch": "padded"}


def train_steps(
    overrides: dict[str, str], run_dir: str, store: str, has_graphs: bool
) -> tuple[int, dict[str, Tensor]]:
    """Train; return the number of replays, and each step's loss, gradients and parameters."""
    results: dict[str, Tensor] = {}
    update = loop.optimizer_step

    def record(run: Any, step: int, result: Any, *args: Any) -> None:
        (model,) = run.built.model_parts
        results[f"loss of step {step}"] = result.loss_and_norm.clone()
        for name, param in model.named_parameters():
            if param.grad is not None:
                results[f"gradient of {name} in step {step}"] = to_local(param.grad).clone()
        update(run, step, result, *args)
        for name, param in model.named_parameters():
            results[f"{name} after step {step}"] = to_local(param.detach()).clone()
        if (overflow := find_hook(run.built.train_step.hooks, Overflow)) is not None:
            results["overflows"] = torch.tensor(overflow._num_steps)

    loop.optimizer_step = record
    if has_graphs:
        record_graphs()
    keys = STEPS | overrides | {"run.dir": run_dir}
    train_rank([*keys.items(), *([GRAPHS] if has_graphs else [])], store)
    # The parameters of one rank are copied once in a step, outside of the graphs.
    assert dist.get_world_size() > 1 or "_foreach_copy_" not in RecordedGraph.names
    return RecordedGraph.num_replays, results


def nan_in_step_4(times: int) -> dict[str, str]:
    """Return the override that makes gradients NaN, so that the step is computed again."""
    fault = f'{{site="gradients", kind="nan", passing=4, times={times}}}'
    return {"resilience.faults": f"[{fault}]"}


CASES: dict[str, tuple[int, dict[str, str]]] = {
    "one rank": (1, BFLOAT16),
    "experts, overflow": (2, PADDED | {"parallel.ep_capacity_factor": "1"}),
}
SLOW_CASES: dict[str, tuple[int, dict[str, str]]] = {
    "fsdp": (2, BFLOAT16 | TWO_RANKS),
    "float32": (1, {}),
    "full recomputation": (1, BFLOAT16 | {"activation_checkpoint.mode": "full"}),
    "selective recomputation": (1, BFLOAT16 | {"activation_checkpoint.mode": "selective"}),
    "documents": (1, BFLOAT16 | {"data.packing": "documents"}),
    "float8": (1, FLOAT8 | {"precision.float8": "rowwise"}),
    "float8 gather": (2, FLOAT8 | TWO_RANKS | {"precision.float8": "tensorwise"}),
    "random bits": (
        1,
        BFLOAT16 | {"lora.rank": "4", "lora.dropout": "0.1", "train.neftune_alpha": "5"},
    ),
    "later tokens": (1, {"model.mtp_layers": "1"}),
    "attention logits": (
        1,
        BFLOAT16 | {"optim.qk_clip_threshold": "1.0", "monitor.attention_logits": "true"},
    ),
    "muon": (2, TWO_RANKS | {"optim.name": "muon"}),
    "tensor parallel": (2, {"parallel.tp": "2"}),
    "ring": (2, {"parallel.cp": "2"}),
    "all-gather": (2, {"parallel.cp": "2", "parallel.cp_method": "allgather"}),
    "ulysses": (2, {"parallel.cp": "2", "parallel.cp_method": "ulysses"}),
    "replicas": (4, FOUR_RANKS | {"parallel.dp_replicate": "2", "parallel.dp_shard": "2"}),
    "reshard, sync": (
        4,
        BFLOAT16
        | FOUR_RANKS
        | {
            "parallel.dp_replicate": "2",
            "parallel.dp_shard": "2",
            "parallel.gradient_sync": "microbatch",
            "parallel.reshard_after_forward": "always",
        },
    ),
    "sums in order": (
        2,
        {
            "train.world_size_invariant": "true",
            "train.microbatch_size": "1",
            "train.global_batch_size": "6",
        },
    ),
    "experts": (1, EXPERTS | {"model.router_aux_loss_coef": "0.1"}),
    "experts in chunks": (2, PADDED | {"parallel.ep_chunks": "2"}),
    "float32, step 4 twice": (1, {"resilience.on_anomaly": "skip"} | nan_in_step_4(1)),
    "fsdp, back to step 3": (
        2,
        TWO_RANKS
        | {"resilience.on_anomaly": "rewind", "checkpoint.interval": "1"}
        | nan_in_step_4(2),
    ),
}


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES)]
)
def test_replayed_microbatches_equal_ordinary_ones(
    case: str, tmp_path: Path, store_path: Path
) -> None:
    ranks, overrides = (CASES | SLOW_CASES)[case]
    store = str(store_path)
    ordinary = run_ranks(train_steps, ranks, overrides, str(tmp_path / "a"), store, False)
    replayed = run_ranks(train_steps, ranks, overrides, str(tmp_path / "b"), store, True)
    for (count, expected), (num_replays, found) in zip(ordinary, replayed, strict=True):
        assert (count, num_replays) == (0, num_replays_of(ranks, overrides))
        assert found.keys() == expected.keys()
        assert not [name for name in expected if not torch.equal(found[name], expected[name])]
        if "parallel.ep_capacity_factor" in overrides:
            assert found["overflows"] > 0


def num_replays_of(ranks: int, overrides: dict[str, str]) -> int:
    """Return the replays of steps 3 to 5, of three microbatches, without those of captures."""
    # With FSDP the first, the last and the others differ; else a smaller one does.
    has_sizes = overrides.get("train.microbatch_size") != "1"
    num_steps = {"skip": 4, "rewind": 5}.get(overrides.get("resilience.on_anomaly", ""), 3)
    return 3 * num_steps - (3 if ranks > 1 else 1 + has_sizes)


@pytest.mark.slow
def test_resumed_run_with_graphs_equals_an_uninterrupted_one(
    tmp_path: Path, store_path: Path
) -> None:
    keys = [*(STEPS | BFLOAT16).items(), ("checkpoint.interval", "2")]

    def state(name: str, *attempts: Overrides) -> dict[str, Tensor]:
        for overrides in attempts:
            directory = ("run.dir", str(tmp_path / name))
            run_ranks(train_with_graphs, 1, [*keys, directory, *overrides], str(store_path))
        return newest_state(tmp_path / name)

    expected = state("ordinary", [])
    stop = ("resilience.faults", '[{site="step", kind="raise", passing=5}]')
    with pytest.raises(Exception, match="injected fault"):
        state("resumed", [GRAPHS, stop])
    found = state("resumed", [GRAPHS, stop])
    assert found.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


def train_with_graphs(overrides: Overrides, store: str) -> None:
    """Train on a CPU that captures graphs, if the job has them."""
    record_graphs()
    train_rank(overrides, store)


# --------------------------------------------------------------------------- the class


class Sums:
    """A parameter, and a function that adds to its gradient."""

    def __init__(self) -> None:
        self.param = nn.Parameter(torch.ones(3))
        self.unused = nn.Parameter(torch.ones(1))
        self.num_calls = 0
        self.graphs = MicrobatchGraphs(self.run, [self.param, self.unused], RecordingDevice())

    def run(self, inputs: tuple[Tensor, Tensor, int]) -> Tensor:
        self.num_calls += 1
        loss = (self.param * inputs[0]).sum() * inputs[2] + inputs[1].sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step(self, *scales: float, size: int = 3) -> list[float]:
        """Return the losses of microbatches, whose two inputs are one tensor."""
        self.param.grad = None
        inputs = [torch.full((size,), float(scale)) for scale in scales]
        self.graphs.begin_passes([(x[-3:], x, 2) for x in inputs], [()] * len(inputs))
        return [self.graphs(index).item() for index in range(len(inputs))]


def test_graphs_replay_with_new_inputs_and_add_to_one_gradient() -> None:
    sums = Sums()
    sums.graphs.log = (messages := list[str]()).append
    for step in range(1, WARMUP_STEPS + 3):
        assert sums.step(step, 10) == [9 * step, 90]
        assert sums.param.grad is not None
        assert sums.param.grad.tolist() == [2 * step + 20] * 3
    assert sums.num_calls == 2 * WARMUP_STEPS + 1
    assert sums.unused.grad is None  # so the optimizer leaves it alone
    assert [text.partition(" in ")[0] for text in messages] == ["captured CUDA graph 1"]


def test_graphs_add_to_a_gradient_that_is_there() -> None:
    sums = Sums()
    for _ in range(WARMUP_STEPS + 1):
        sums.step(1)
    static = sums.param.grad
    assert static is not None
    for grad, expected in ((static, 4.0), (torch.full((3,), 7.0), 9.0)):
        sums.param.grad = grad
        inputs = torch.ones(3)
        sums.graphs.begin_passes([(inputs[-3:], inputs, 2)], [()])
        sums.graphs(0)
        assert sums.param.grad is static
        assert static.tolist() == [expected] * 3


def test_step_of_another_shape_runs_without_graphs() -> None:
    sums = Sums()
    for _ in range(WARMUP_STEPS + 1):
        sums.step(1, 2)
    calls = sums.num_calls
    sums.graphs.log = (messages := list[str]()).append
    assert sums.step(1, size=4) == [10]
    assert sums.step(1) == [9]  # one microbatch, not two
    assert messages == [f"warning: {cuda_graphs.OTHER_SHAPES}"]
    assert sums.num_calls == calls + 2
    assert sums.step(1, 2) == [9, 18]
    assert sums.num_calls == calls + 2


def test_fault_input_that_is_not_copied_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "list_tensors", lambda tree: [])
    sums = Sums()
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *args: None)
    losses = [sums.step(step) for step in range(1, WARMUP_STEPS + 3)]
    assert losses[-1] == losses[-2]


def test_fault_value_that_the_host_reads_is_found() -> None:
    sums = Sums()
    run = sums.graphs._run
    sums.graphs._run = lambda inputs: run(inputs) * inputs[1][0].item()
    for _ in range(WARMUP_STEPS):
        sums.step(1)
    with pytest.raises(RuntimeError, match="reads a value on the host"):
        sums.step(1)
