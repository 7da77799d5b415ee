"""Every dispatch of rows to experts computes the gradients of one process, in the right order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tests.harness import run_ranks
from tests.layouts import check_many, group_by_ranks, many_gradients, parse, size
from tests.parallel.test_expert_parallel import MODEL, TOLERANCE, step_results
from tests.small import Overrides, loader_of, plan_here, small_job, this_rank
from weft.config.errors import InvalidConfig
from weft.config.reader import read_job
from weft.config.schema import ParallelSection
from weft.estimate.private_trace import fake_process_group
from weft.models import layers
from weft.models.decoder_config import DecoderConfig
from weft.models.moe import Experts
from weft.parallel import expert_dispatch
from weft.parallel.deepep import DeepEP
from weft.parallel.dispatchers import find_overflow
from weft.parallel.expert_dispatch import (
    AllToAll,
    Overflow,
    PaddedAllToAll,
    apply_in_chunks,
    row_capacity,
)
from weft.plan.pipeline_schedule import SCHEDULES
from weft.plan.plan import Machine, Plan
from weft.plan.resolve import resolve
from weft.train.job_checks import check_names
from weft.train.setup import build, open_layer_stats
from weft.train.step import TrainStep


class OwnAllToAll(AllToAll):
    """A user's dispatcher, by its name."""


OWN = f"{__name__}:OwnAllToAll"
# In float32.  The smallest capacity overflows in every step.
OFTEN = [
    "dp_shard2 ep=2 ep_dispatch=padded ep_capacity_factor=1 ep_chunks=2",
    f"dp_shard2 ep=2 ep_dispatch={OWN} ep_chunks=2 activation_checkpoint.mode=full",
]
EXTRA = [
    "dp_shard2 ep=2 ep_dispatch=padded activation_checkpoint.mode=selective",
    "dp_shard4 ep=4 ep_dispatch=padded ep_capacity_factor=1.2",
    "dp_shard2 tp2 ep=2 ep_dispatch=padded ep_chunks=2",
    "cp2 ep=2 ep_dispatch=padded ep_capacity_factor=1",
    "dp_shard2 cp2 ep=4 ep_dispatch=padded",
    "dp_shard2 pp2 ep=2 ep_dispatch=padded ep_capacity_factor=1 pipeline.schedule=ZBVZeroBubble",
    "dp_shard2 pp2 ep=2 ep_chunks=2 pipeline.schedule=DualPipeV",
    "dp_shard2 dp_replicate2 ep=2 ep_dispatch=padded ep_capacity_factor=1 gradient_sync=step",
    "dp_shard2 ep=2 ep_dispatch=padded ep_capacity_factor=1 cpu_offload=true",
    "dp_shard2 ep=2 ep_chunks=2 activation_checkpoint.mode=budget",
    "dp_shard2 ep=2 ep_chunks=2 ep_dispatch=padded activation_checkpoint.offload=true",
]


@pytest.mark.parametrize("layouts", group_by_ranks(OFTEN))
def test_dispatch_gradients_equal_one_process(layouts: list[str], store_path: Path) -> None:
    check_many(layouts, store_path, lambda layout: MODEL, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("layout", EXTRA)
def test_dispatch_with_other_techniques_gradients_equal_one_process(
    layout: str, store_path: Path
) -> None:
    check_many([layout], store_path, lambda layout: MODEL, TOLERANCE)


# --------------------------------------------------------------------------- overflows

OVERFLOW = "ep=2 ep_dispatch=padded ep_capacity_factor=1"  # overflows in every step
OVERFLOWS = [
    *(
        "pp2 pipeline.schedule=DualPipeV budget",
        "pp2 pipeline.schedule=ZBVZeroBubble budget ep_chunks=2",
    ),
    "pp2 pipeline.schedule=InterleavedZeroBubble budget",
    *("pp2 pipeline.schedule=1F1B selective ep_chunks=2", "budget ep_chunks=2", "full"),
]


def overflow_layout(text: str) -> str:
    words = [
        f"activation_checkpoint.mode={word}" if word in ("budget", "full", "selective") else word
        for word in text.split()
    ]
    return " ".join(("cp2" if "pp2" in words else "dp_shard2 tp2", OVERFLOW, *words))


def gradients_after_overflow(jobs: list[Overrides], store: str) -> list[dict[str, Any]]:
    """Return the results of `many_gradients`; each layout must overflow."""
    found: list[bool] = []
    occurred = Overflow.occurred

    def record(self: Overflow) -> bool:
        found.append(occurred(self))
        return found[-1]

    with patch.object(Overflow, "occurred", record):
        results = many_gradients(jobs, store)
    assert found == [True] * len(jobs) * (dist.get_world_size() > 1)
    return results


def check_overflows(texts: list[str], store: Path) -> None:
    layouts = [overflow_layout(text) for text in texts]
    check_many(
        layouts,
        store,
        lambda layout: [*MODEL, *size(layout)],
        TOLERANCE,
        compute=gradients_after_overflow,
    )


def test_overflow_with_schedules_and_recomputation_gradients_equal_one_process(
    store_path: Path,
) -> None:
    check_overflows(OVERFLOWS, store_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["", "full", "selective", "budget"])
@pytest.mark.parametrize("schedule", ["", *SCHEDULES])
def test_overflow_with_each_schedule_gradients_equal_one_process(
    schedule: str, mode: str, store_path: Path
) -> None:
    start = f"pp2 pipeline.schedule={schedule} {mode}" if schedule else mode
    chunks = ["", "ep_chunks=2", "activation_checkpoint.offload=true"]
    check_overflows([f"{start} {chunk}" for chunk in chunks], store_path)


# --------------------------------------------------------------------------- bits in bfloat16

BFLOAT16 = "precision.compute_dtype=bfloat16 train.global_batch_size=4"
FLOAT8 = f"{BFLOAT16} precision.float8_small=true model.expert_dim=32"
WIDE = "model.dim=64 model.expert_dim=64 model.ffn_dim=64"
PADDED = "ep_dispatch=padded"
DISPATCHES = (PADDED, "ep_chunks=2", f"{PADDED} ep_chunks=2 ep_capacity_factor=1")
BIASES = f"dp_shard2 ep=2 {BFLOAT16} model.expert_biases=true model.expert_limit=1.5"
BITS = {
    f"dp_shard2 ep=2 {FLOAT8} precision.float8=rowwise": DISPATCHES,
    # Tensorwise, all rows of a product share a scale, so chunks change it.
    f"dp_shard2 ep=2 {FLOAT8} precision.float8=tensorwise": (PADDED,),
    f"dp_shard2 ep=2 {FLOAT8} precision.float8=mxfp8": (PADDED,),
    f"dp_shard2 ep=2 {BFLOAT16} lora.rank=8": DISPATCHES,
    f"dp_shard2 ep=2 {BFLOAT16} lora.rank=8 lora.dora=true lora.dropout=0.2": DISPATCHES,
    f"dp_shard2 ep=2 {BFLOAT16} lora.rank=8 lora.quantize=nf4 {WIDE}": (PADDED,),
    f"dp_shard2 ep=2 {BFLOAT16} train.world_size_invariant=true": DISPATCHES,
    f"dp_shard2 tp2 ep=2 {BFLOAT16} activation_checkpoint.mode=full": DISPATCHES,
    f"dp_shard2 pp2 ep=2 {BFLOAT16} pipeline.schedule=ZBVZeroBubble": DISPATCHES,
}


def count_passes(jobs: Sequence[Overrides], store: str) -> list[tuple[dict[str, Tensor], int]]:
    """Return the results of each job's step, and how often the step was computed."""
    results = []
    for job in jobs:
        passes: list[None] = []

        def compute(
            self: TrainStep, *args: Any, real: Any = TrainStep._compute_gradients, p: Any = passes
        ) -> Any:
            p.append(None)
            return real(self, *args)

        with patch.object(TrainStep, "_compute_gradients", compute):
            results.append((step_results(list(job), store), len(passes)))
    return results


def check_bits(layout: str, dispatches: Sequence[str], store: Path) -> None:
    """Compare gradients and loads with those of ``alltoall``, bit for bit."""
    ranks, overrides = parse(layout)
    jobs = [[*MODEL, *overrides, *parse(dispatch)[1]] for dispatch in ("", *dispatches) if dispatch]
    for results in run_ranks(
        count_passes, ranks, [[*MODEL, *overrides], *jobs], str(store), timeout=500
    ):
        (expected, _), *others = results
        for dispatch, (result, passes) in zip(dispatches, others, strict=True):
            assert passes == 1 + ("capacity_factor=1" in dispatch), dispatch
            assert result.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(result[name], value), (layout, dispatch, name)


def test_dispatch_in_bfloat16_has_the_bits_of_alltoall(store_path: Path) -> None:
    check_bits(BIASES, DISPATCHES, store_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", BITS)
def test_dispatch_with_other_techniques_has_the_bits_of_alltoall(
    layout: str, store_path: Path
) -> None:
    check_bits(layout, BITS[layout], store_path)


def records_of_a_step(job: Overrides, store: str) -> tuple[int, Tensor, dict[str, Any]]:
    """Return the overflows of a step, and what is recorded of its forward pass."""
    plan = plan_here(small_job(*job))
    built = build(plan, this_rank())
    batches = loader_of(plan.job, plan, store, built.mesh).get_microbatches(0)
    stats = open_layer_stats(built)
    with stats.record_forward(1, [len(batch.tokens_BT) for batch in batches]):
        built.train_step.forward_backward(batches)
    built.qk_clip.reduce()
    overflow = built.train_step.overflow
    count = overflow.take_count() if overflow is not None else 0
    sums = {f"{kind} {name}": entries for (kind, name), entries in stats._sums.items()}
    return count, built.qk_clip.logits_LH, sums


def records_of_steps(jobs: Sequence[Overrides], store: str) -> list[Any]:
    return [records_of_a_step(job, store) for job in jobs]


def test_records_of_a_step_that_starts_again_are_of_its_last_pass(store_path: Path) -> None:
    ranks, overrides = parse(f"{BIASES} monitor.attention_logits=true debug.layer_stats_steps=1")
    padded = parse("ep_dispatch=padded ep_capacity_factor=1")[1]
    jobs = [[*MODEL, *overrides, *extra] for extra in ([], padded)]
    for expected, found in run_ranks(records_of_steps, ranks, jobs, str(store_path)):
        assert (expected[0], found[0]) == (0, 1)
        assert torch.equal(found[1], expected[1])
        assert found[2].keys() == expected[2].keys() != set()
        for name, entries in expected[2].items():
            for (tokens, (count, sums)), entry in zip(entries, found[2][name], strict=True):
                assert (tokens, count) == (entry[0], entry[1][0])
                assert torch.equal(sums, entry[1][1]), name


# --------------------------------------------------------------------------- order and waits

CONFIG = DecoderConfig(dim=16, num_experts=8, active_experts=2, expert_dim=8)


def random_rows(num_rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    experts = torch.randint(CONFIG.num_experts, (num_rows,), generator=generator)
    counts_E = torch.bincount(experts, minlength=CONFIG.num_experts)
    return torch.randn(num_rows, CONFIG.dim, generator=generator), counts_E


def local_experts(rank: int, size: int) -> Experts:
    """Return the experts of a rank, of weights that all ranks have."""
    torch.manual_seed(0)
    experts = Experts(CONFIG)
    for module in (experts.gate_proj, experts.up_proj, experts.down_proj):
        module.weight.data = module.weight.data.chunk(size)[rank].clone()
    return experts


def apply_experts(
    dispatch: Any,
    num_chunks: int,
    num_rows: int = 12,
    forward: Any = None,
    keys: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Return outputs of this rank's rows, and gradients of rows and weights."""
    rank, size = dist.get_rank(), dist.get_world_size()
    experts = local_experts(rank, size)
    rows_RD, counts_E = random_rows(num_rows, torch.Generator().manual_seed(rank))
    rows_RD.requires_grad_()
    forward = forward or experts.forward
    out_RD = apply_in_chunks(forward, dispatch, num_chunks, rows_RD, counts_E, *keys)
    (out_RD * torch.arange(1, CONFIG.dim + 1)).sum().backward()
    assert rows_RD.grad is not None
    return [
        out_RD.detach(),
        rows_RD.grad,
        *(p.grad for p in experts.parameters() if p.grad is not None),
    ]


def apply_experts_with_keys(dispatch: Any, num_chunks: int) -> list[Tensor]:
    """Return outputs and gradients of rows times their keys, and the expected ones."""
    keys = [torch.randint(-(2**31), 2**31, (12,), dtype=torch.int32) for _ in range(2)]

    def forward(rows_QD: Tensor, counts_L: Tensor, *keys_Q: Tensor) -> Tensor:
        for key_Q in keys_Q:
            rows_QD = rows_QD * (key_Q % 1009).unsqueeze(1)
        return rows_QD

    torch.manual_seed(dist.get_rank())
    out_RD, grad_RD = apply_experts(dispatch, num_chunks, 12, forward, keys)
    factors_R1 = (keys[0] % 1009 * (keys[1] % 1009)).unsqueeze(1)
    rows_RD, _ = random_rows(12, torch.Generator().manual_seed(dist.get_rank()))
    return [out_RD, rows_RD * factors_R1, grad_RD, torch.arange(1, CONFIG.dim + 1) * factors_R1]


def events_of_chunks(num_chunks: int, is_padded: bool) -> list[str]:
    """Return the order of exchanges and products, in forward and backward."""
    events: list[str] = []
    # Of what the exchange moves: rows or results, and in backward their gradients.
    names: dict[int, str] = {}
    section = ParallelSection(ep_chunks=num_chunks, ep_capacity_factor=8)
    dispatch = (PaddedAllToAll if is_padded else AllToAll)(dist.group.WORLD, section)  # type: ignore[arg-type]
    start, wait = expert_dispatch._start, expert_dispatch._wait
    counts = {"start": 0, "product": 0}

    def record_start(rows: Tensor, *args: Any) -> Tensor:
        started = start(rows, *args)
        if rows.is_floating_point():
            names[started.data_ptr()] = str(counts["start"])
            events.append(f"start {counts['start']}")
            counts["start"] += 1
        return started

    def record_wait(started: Tensor) -> Tensor:
        if started.is_floating_point():
            events.append(f"wait {names[started.data_ptr()]}")
        return wait(started)

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: Tensor, number: int) -> Tensor:
            ctx.number = number
            events.append(f"compute {number}")
            return rows * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            events.append(f"compute {ctx.number}")
            return grad * 2, None

    def forward(rows_QD: Tensor, counts_L: Tensor) -> Tensor:
        number = counts["product"]
        counts["product"] += 1
        return layers.run_function(Product, rows_QD, number)

    with (
        patch.object(expert_dispatch, "_start", record_start),
        patch.object(expert_dispatch, "_wait", record_wait),
    ):
        apply_experts(dispatch, num_chunks, forward=forward)
    return events


def close_after_error() -> tuple[int, int]:
    """Return how many exchanges were started and waited for, if the experts raise an error."""
    calls = {"_start": 0, "_wait": 0}

    def counted(name: str, real: Callable[..., Any], *args: Any) -> Any:
        calls[name] += 1
        return real(*args)

    def fail(rows_QD: Tensor, counts_L: Tensor) -> Tensor:
        raise KeyError

    spies = {name: partial(counted, name, getattr(expert_dispatch, name)) for name in calls}
    dispatch = AllToAll(dist.group.WORLD, ParallelSection(ep_chunks=2))  # type: ignore[arg-type]
    with patch.multiple(expert_dispatch, **spies), pytest.raises(KeyError):
        apply_experts(dispatch, 2, forward=fail)
    return calls["_start"], calls["_wait"]


class Buffer:
    """The documented calls of ``deep_ep.Buffer``, on gloo, with rows for one expert each."""

    def __init__(self, group: Any, nvlink_bytes: int, rdma_bytes: int) -> None:
        widths = CONFIG.dim, CONFIG.dim + 8  # with two keys
        assert (nvlink_bytes, rdma_bytes) in [(2 * 4 * width, 3 * 4 * width) for width in widths]
        self.size = dist.get_world_size(group)

    @staticmethod
    def get_dispatch_config(size: int) -> Any:
        return SimpleNamespace(
            get_nvl_buffer_size_hint=lambda row_bytes, size: size * row_bytes,
            get_rdma_buffer_size_hint=lambda row_bytes, size: row_bytes,
        )

    @staticmethod
    def get_combine_config(size: int) -> Any:
        return SimpleNamespace(
            get_nvl_buffer_size_hint=lambda row_bytes, size: row_bytes,
            get_rdma_buffer_size_hint=lambda row_bytes, size: 3 * row_bytes,
        )

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> Any:
        rank_R = topk_idx[:, 0] // (num_experts // self.size)
        per_rank = torch.bincount(rank_R, minlength=self.size)
        per_expert = torch.bincount(topk_idx[:, 0], minlength=num_experts)
        is_in_rank = rank_R.unsqueeze(1) == torch.arange(self.size)
        return per_rank, None, per_expert, is_in_rank, None

    def dispatch(self, x: Tensor, handle: Any = None, **layout: Any) -> Any:
        if handle is None:
            is_in_rank, topk_idx = layout["is_token_in_rank"], layout["topk_idx"]
            assert layout["topk_weights"].shape == topk_idx.shape
            sent = layout["num_tokens_per_rank"].tolist()
            received = torch.empty(self.size, dtype=torch.int64)
            dist.all_to_all_single(received, layout["num_tokens_per_rank"])
            order = torch.cat([is_in_rank[:, rank].nonzero()[:, 0] for rank in range(self.size)])
            handle = order, sent, received.tolist()
            local = topk_idx % (len(layout["num_tokens_per_expert"]) // self.size)
            return self._send(x, handle), self._send(local, handle), None, None, handle, None
        assert not layout
        return self._send(x, handle), None, None, None, None, None

    def _send(self, x: Tensor, handle: Any) -> Tensor:
        order, sent, received = handle
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x[order].contiguous(), received, sent)
        return out

    def combine(self, x: Tensor, handle: Any) -> Any:
        order, sent, received = handle
        back = x.new_empty(sum(sent), x.shape[1])
        dist.all_to_all_single(back, x, sent, received)
        return torch.zeros_like(back).index_add_(0, order, back), None, None


def unit_results() -> dict[str, Any]:
    """Return what the tests below check, from one world."""
    world: Any = dist.group.WORLD
    sys.modules["deep_ep"] = SimpleNamespace(Buffer=Buffer)  # type: ignore[assignment]
    section = ParallelSection(ep_capacity_factor=8)
    in_chunks = ParallelSection(ep_capacity_factor=8, ep_chunks=2)
    return {
        "experts": {
            "alltoall": apply_experts(AllToAll(world, section), 1),
            "padded": apply_experts(PaddedAllToAll(world, section), 1),
            "deepep": apply_experts(DeepEP(world, section), 1),
            "chunks": apply_experts(AllToAll(world, in_chunks), 2),
            "padded chunks": apply_experts(PaddedAllToAll(world, in_chunks), 2),
        },
        "keys": {
            "alltoall": apply_experts_with_keys(AllToAll(world, section), 1),
            "padded chunks": apply_experts_with_keys(PaddedAllToAll(world, in_chunks), 2),
        },
        "events": {
            (chunks, padded): events_of_chunks(chunks, padded)
            for chunks, padded in ((1, False), (2, False), (2, True), (4, False))
        },
        "calls": close_after_error(),
    }


@pytest.fixture(scope="module")
def units() -> list[dict[str, Any]]:
    return run_ranks(unit_results, 2, timeout=300)


def test_dispatch_outputs_and_gradients_equal_one_device(units: list[dict[str, Any]]) -> None:
    experts, rows, grads = local_experts(0, 1), [], []
    for rank, result in enumerate(units):
        rows_RD, counts_E = random_rows(12, torch.Generator().manual_seed(rank))
        rows_RD.requires_grad_()
        out_RD = experts(rows_RD, counts_E)
        (out_RD * torch.arange(1, CONFIG.dim + 1)).sum().backward()
        rows.append([out_RD.detach(), rows_RD.grad])
        grads.append(result["experts"])
    weights = [param.grad for param in experts.parameters()]
    for name in grads[0]:
        for rank, result in enumerate(grads):
            local = [grad.chunk(2)[rank] for grad in weights if grad is not None]
            for value, expected in zip(result[name], [*rows[rank], *local], strict=True):
                torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)


def test_keys_travel_with_their_rows(units: list[dict[str, Any]]) -> None:
    for result in units:
        for out_RD, expected, grad_RD, expected_grad in result["keys"].values():
            torch.testing.assert_close(out_RD, expected)
            torch.testing.assert_close(grad_RD, expected_grad.to(grad_RD.dtype))


# Exchanges are numbered as they start.  In forward, 0 and 1 are the rows of both chunks, and 2 and
# 3 their results; in backward, 4 and 5 are the gradients of the results of chunks 1 and 0, and 6
# and 7 those of their rows.
TWO_CHUNKS = [
    *("start 0", "start 1", "wait 0", "compute 0", "start 2", "wait 1", "compute 1", "start 3"),
    *("wait 2", "wait 3", "start 4", "start 5", "wait 4", "compute 1", "start 6"),
    *("wait 5", "compute 0", "start 7", "wait 6", "wait 7"),
]
ONE_CHUNK = [
    *("start 0", "wait 0", "compute 0", "start 1", "wait 1"),
    *("start 2", "wait 2", "compute 0", "start 3", "wait 3"),
]


def test_chunks_travel_while_others_compute(units: list[dict[str, Any]]) -> None:
    for result in units:
        events = result["events"]
        assert events[1, False] == ONE_CHUNK
        assert events[2, False] == events[2, True] == TWO_CHUNKS
        # While a chunk computes, rows of the next one or results of an earlier one travel.
        order = events[4, False]
        for half in (order[: len(order) // 2], order[len(order) // 2 :]):
            in_flight, at_compute = 0, []
            for event in half:
                in_flight += event.startswith("start") - event.startswith("wait")
                if event.startswith("compute"):
                    at_compute.append(in_flight)
            assert in_flight == 0
            assert min(at_compute) >= 1


def test_chunks_of_a_failed_layer_are_waited_for(units: list[dict[str, Any]]) -> None:
    """As if activation checkpointing ended the recomputation: a lost exchange keeps its memory."""
    for result in units:
        started, waited = result["calls"]
        assert started == waited == 3  # of the counts, and of both chunks


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_padded_dispatch_reads_nothing_on_the_host(
    num_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake tensors have no values, so a read of one is an error."""
    for module in (expert_dispatch, layers):
        monkeypatch.setattr(module, "is_fake", lambda tensor: False)
    section = ParallelSection(ep_chunks=num_chunks)
    experts = local_experts(0, 2).to(torch.bfloat16)
    with fake_process_group(0, 2, True), FakeTensorMode(allow_non_fake_inputs=True):
        rows = torch.randn(16, CONFIG.dim, dtype=torch.bfloat16, requires_grad=True)
        counts_E = torch.full((CONFIG.num_experts,), 2)
        world: Any = dist.group.WORLD
        run = partial(apply_in_chunks, experts.forward)
        run(PaddedAllToAll(world, section), num_chunks, rows, counts_E).sum().backward()
        assert rows.grad is not None
        with pytest.raises(DataDependentOutputException):
            run(AllToAll(world, section), num_chunks, rows, counts_E)


class OwnPaddedAllToAll(PaddedAllToAll):
    """A user's dispatcher that may overflow."""


@pytest.mark.parametrize(
    ("num_ranks", "keys", "expected"),
    [
        (2, {"ep_dispatch": "padded"}, False),  # the default factor, 2: a rank has room for all
        (4, {"ep_dispatch": "padded"}, True),
        (2, {"ep_dispatch": "padded", "ep_chunks": 2}, True),
        (4, {"ep_dispatch": f"{__name__}:OwnPaddedAllToAll"}, True),
        (4, {"ep_dispatch": OWN}, False),
        (1, {"ep_dispatch": "padded", "ep_capacity_factor": 1}, False),
    ],
)
def test_find_overflow_only_if_rows_may_not_fit(
    num_ranks: int, keys: dict[str, Any], expected: bool
) -> None:
    overflow = find_overflow([], num_ranks, ParallelSection(**keys), torch.device("cpu"))
    assert (overflow is not None) == expected


def test_row_capacity_is_at_most_all_rows() -> None:
    assert [row_capacity(100, 8, factor) for factor in (1, 1.5, 2, 8, 20)] == [13, 19, 25, 100, 100]


# --------------------------------------------------------------------------- refusals


def resolve_job(*overrides: tuple[str, str], device: str = "cpu") -> Plan:
    model = [("parallel.dp_shard", "2"), ("parallel.ep", "2")]
    job, _, errors = read_job("demo", [*MODEL, *model, *overrides])
    assert not errors
    return resolve(job, Machine(device, devices=2, world_size=2))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([("parallel.ep_chunks", "3")], "does not divide the 2 experts of a rank"),
        ([("parallel.ep_dispatch", "deepep")], "needs GPUs"),
        (
            [("parallel.ep_dispatch", "padded"), ("debug.autograd_anomaly", "true")],
            "gradients that parallel.ep shards",
        ),
    ],
)
def test_dispatch_invalid_keys_are_refused(overrides: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        resolve_job(*overrides)


def test_deepep_unsupported_keys_are_refused() -> None:
    chunks, name = ("parallel.ep_chunks", "2"), ("parallel.ep_dispatch", "deepep")
    dtype = ("precision.compute_dtype", "float32")
    with pytest.raises(InvalidConfig, match="does not work with parallel"):
        resolve_job(chunks, name, device="cuda")
    with pytest.raises(InvalidConfig, match="exchanges bfloat16"):
        resolve_job(name, dtype, device="cuda")
    lora = ("lora.rank", "2"), ("lora.dropout", "0.1")
    with pytest.raises(InvalidConfig, match="adds columns to the rows"):
        resolve_job(*lora, name, device="cuda")
    odd = ("model.dim", "24"), ("model.num_heads", "3"), ("model.num_kv_heads", "3")
    with pytest.raises(InvalidConfig, match=r"needs a multiple of 16 as model\.dim, which is 24"):
        resolve_job(*odd, name, device="cuda")


def test_dispatch_without_effect_is_a_warning() -> None:
    padded, factor = ("parallel.ep_dispatch", "padded"), ("parallel.ep_capacity_factor", "3.0")
    (warning,) = resolve_job(factor).warnings
    assert warning.startswith("parallel.ep_capacity_factor=3.0 has no effect")
    (warning,) = resolve_job(padded, factor).warnings
    assert "saves no wait of the host" in warning
    assert resolve_job(padded, ("precision.compute_dtype", "bfloat16")).warnings == ()
    one = [padded, factor, ("parallel.ep_chunks", "2"), ("parallel.ep", "1")]
    unused = [text.split("=")[0] for text in resolve_job(*one).warnings]
    assert sorted(unused) == [f"parallel.ep_{n}" for n in ("capacity_factor", "chunks", "dispatch")]


def test_dispatch_unknown_name_is_refused() -> None:
    job, _, _ = read_job("demo", [("parallel.ep_dispatch", "allgather")])
    (error,) = check_names(job)
    assert "is not a known name" in str(error)
