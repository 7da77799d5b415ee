"""Every dispatch of rows to experts computes the gradients of one process, in the right order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from tests.harness import run_ranks
from tests.layouts import check_many, group_by_ranks, many_gradients, parse, size
from tests.parallel.once_per_rank import OncePerRank
from tests.parallel.test_expert_parallel import MODEL, TOLERANCE, step_results
from tests.small import Overrides, loader_of, plan_here, small_job, this_rank
from weft.config.errors import InvalidConfig
from weft.config.reader import read_job
from weft.config.schema import ParallelSection
from weft.estimate.private_trace import fake_process_group
from weft.models import layers
from weft.models.decoder_config import DecoderConfig
from weft.models.moe import Experts, Routing, sort_by_expert
from weft.optim.qk_clip import QKClip
from weft.parallel import expert_dispatch
from weft.parallel.dispatchers import find_overflow
from weft.parallel.expert_dispatch import (
    AllToAll,
    Overflow,
    PaddedAllToAll,
    apply_in_chunks,
    row_capacity,
)
from weft.parallel.step_hook import find_hook
from weft.planning.pipeline_schedule import SCHEDULES
from weft.planning.plan import Machine, Plan
from weft.planning.resolve import resolve
from weft.preparation.job_checks import check_names
from weft.training.setup import build, open_layer_stats
from weft.training.step import TrainStep


class OwnAllToAll(AllToAll):
    """A user's dispatcher, by its name."""


OWN = f"{__name__}:OwnAllToAll"
ONCE = "tests.parallel.once_per_rank:OncePerRank"
# In float32.  The smallest capacity overflows in every step.
OFTEN = [
    "dp_shard2 ep=2 ep_dispatch=padded ep_capacity_factor=1 ep_chunks=2",
    f"dp_shard2 ep=2 ep_dispatch={OWN} ep_chunks=2 activation_checkpoint.mode=full",
    f"dp_shard2 ep=2 ep_dispatch={ONCE}",
]
EXTRA = [
    f"dp_shard4 ep=4 ep_dispatch={ONCE} activation_checkpoint.mode=full",
    f"dp_shard2 pp2 ep=2 ep_dispatch={ONCE} pipeline.schedule=DualPipeV",
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


def test_dispatch_of_scaled_inputs_gradients_equal_one_process(store_path: Path) -> None:
    """A token has another input for each of its experts."""
    layouts = ["dp_shard2 ep=2", f"dp_shard2 ep=2 ep_dispatch={ONCE}"]
    model = [*MODEL, ("model.scaled_expert_inputs", "true")]
    check_many(layouts, store_path, lambda layout: model, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("layout", EXTRA)
def test_dispatch_with_other_techniques_gradients_equal_one_process(
    layout: str, store_path: Path
) -> None:
    check_many([layout], store_path, lambda layout: MODEL, TOLERANCE)


# --------------------------------------------------------------------------- overflows

OVERFLOW = "ep=2 ep_dispatch=padded ep_capacity_factor=1"  # overflows in every step
# Paired passes, halves of a backward pass, and no pipeline; each way to recompute.
OVERFLOWS = [
    "pp2 pipeline.schedule=DualPipeV budget",
    "pp2 pipeline.schedule=ZBVZeroBubble selective ep_chunks=2",
    "full",
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
    end_passes = Overflow.end_passes

    def record(self: Overflow) -> bool:
        found.append(end_passes(self))
        return found[-1]

    with patch.object(Overflow, "end_passes", record):
        results = many_gradients(jobs, store)
    # Each step is computed twice: the second time with exact sizes.
    assert found == [True, False] * len(jobs) * (dist.get_world_size() > 1)
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


@pytest.mark.parametrize(
    "texts", [OVERFLOWS[:1], pytest.param(OVERFLOWS[1:], marks=pytest.mark.slow)]
)
def test_overflow_with_schedules_and_recomputation_gradients_equal_one_process(
    texts: list[str], store_path: Path
) -> None:
    check_overflows(texts, store_path)


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
            self: TrainStep,
            *args: Any,
            real: Any = TrainStep._compute_gradients,
            p: Any = passes,
            **named: Any,
        ) -> Any:
            p.append(None)
            return real(self, *args, **named)

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
    check_bits(BIASES, DISPATCHES[1:], store_path)


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
    hooks = built.train_step.hooks
    for hook in hooks:
        hook.reduce()
    overflow, clip = find_hook(hooks, Overflow), find_hook(hooks, QKClip)
    assert clip is not None
    count = overflow.take_count() if overflow is not None else 0
    sums = {f"{kind} {name}": entries for (kind, name), entries in stats._sums.items()}
    return count, clip.logits_LH, sums


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
NUM_TOKENS = 12


def random_tokens(rank: int) -> tuple[Tensor, Routing]:
    """Return tokens and their experts; tokens and weights require gradients."""
    generator = torch.Generator().manual_seed(rank)
    x_ND = torch.randn(NUM_TOKENS, CONFIG.dim, generator=generator).requires_grad_()
    scores_NE = torch.rand(NUM_TOKENS, CONFIG.num_experts, generator=generator)
    best = scores_NE.topk(CONFIG.active_experts)
    routing = sort_by_expert(best.indices, best.values.requires_grad_(), CONFIG.num_experts)
    return x_ND, routing


def local_experts(rank: int, size: int) -> Experts:
    """Return the experts of a rank, of weights that all ranks have."""
    torch.manual_seed(0)
    experts = Experts(CONFIG)
    for module in (experts.gate_proj, experts.up_proj, experts.down_proj):
        module.weight.data = module.weight.data.chunk(size)[rank].clone()
    return experts


def apply_experts(
    dispatch: Any, num_chunks: int, forward: Any = None, keys: Sequence[Tensor] = ()
) -> list[Tensor]:
    """Return outputs of this rank's tokens, and gradients of tokens and weights."""
    rank, size = dist.get_rank(), dist.get_world_size()
    experts = local_experts(rank, size)
    x_ND, routing = random_tokens(rank)
    forward = forward or experts.forward
    out_ND = apply_in_chunks(forward, dispatch, num_chunks, x_ND, routing, *keys)
    (out_ND * torch.arange(1, CONFIG.dim + 1)).sum().backward()
    leaves = (x_ND, routing.weights_NA, *experts.parameters())
    return [out_ND.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def apply_experts_with_keys(dispatch: Any, num_chunks: int) -> list[Tensor]:
    """Return outputs and gradients of tokens times their keys, and the expected ones."""
    torch.manual_seed(dist.get_rank())
    keys = [torch.randint(-(2**31), 2**31, (NUM_TOKENS,), dtype=torch.int32) for _ in range(2)]

    def forward(rows_QD: Tensor, counts_L: Tensor, *keys_Q: Tensor) -> Tensor:
        for key_Q in keys_Q:
            rows_QD = rows_QD * (key_Q % 1009).unsqueeze(1)
        return rows_QD

    out_ND, grad_ND, _ = apply_experts(dispatch, num_chunks, forward, keys)
    x_ND, routing = random_tokens(dist.get_rank())
    factors_N1 = (keys[0] % 1009 * (keys[1] % 1009)).unsqueeze(1)
    factors_N1 = (factors_N1 * routing.weights_NA.sum(1, keepdim=True)).detach()
    expected_grad = torch.arange(1, CONFIG.dim + 1) * factors_N1
    return [out_ND, x_ND.detach() * factors_N1, grad_ND, expected_grad]


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
        apply_experts(dispatch, num_chunks, forward)
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
        apply_experts(dispatch, 2, fail)
    return calls["_start"], calls["_wait"]


def unit_results() -> dict[str, Any]:
    """Return what the tests below check, from one world."""
    world: Any = dist.group.WORLD
    once = OncePerRank(world, ParallelSection())
    section = ParallelSection(ep_capacity_factor=8)
    in_chunks = ParallelSection(ep_capacity_factor=8, ep_chunks=2)
    return {
        "experts": {
            "alltoall": apply_experts(AllToAll(world, section), 1),
            "padded": apply_experts(PaddedAllToAll(world, section), 1),
            "once per rank": apply_experts(once, 1),
            "chunks": apply_experts(AllToAll(world, in_chunks), 2),
            "padded chunks": apply_experts(PaddedAllToAll(world, in_chunks), 2),
        },
        "keys": {
            "alltoall": apply_experts_with_keys(AllToAll(world, section), 1),
            "padded chunks": apply_experts_with_keys(PaddedAllToAll(world, in_chunks), 2),
            "once per rank": apply_experts_with_keys(OncePerRank(world, section), 1),
        },
        "num_sent": once.num_sent,
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
    experts, tokens, grads = local_experts(0, 1), [], []
    for rank, result in enumerate(units):
        x_ND, routing = random_tokens(rank)
        out_ND = routing.combine(experts(routing.expand(x_ND), routing.counts_E))
        (out_ND * torch.arange(1, CONFIG.dim + 1)).sum().backward()
        tokens.append([out_ND.detach(), x_ND.grad, routing.weights_NA.grad])
        grads.append(result["experts"])
    weights = [param.grad for param in experts.parameters()]
    for name in grads[0]:
        for rank, result in enumerate(grads):
            local = [grad.chunk(2)[rank] for grad in weights if grad is not None]
            for value, expected in zip(result[name], [*tokens[rank], *local], strict=True):
                torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)


def test_dispatcher_of_tokens_sends_each_once_to_a_rank(units: list[dict[str, Any]]) -> None:
    """And not once for each of its experts."""
    for rank, result in enumerate(units):
        ranks_NA = random_tokens(rank)[1].chosen_NA // (CONFIG.num_experts // 2)
        expected = sum(len(set(ranks)) for ranks in ranks_NA.tolist())
        assert result["num_sent"] == expected < ranks_NA.numel()


def test_keys_travel_with_their_tokens(units: list[dict[str, Any]]) -> None:
    for result in units:
        for out_ND, expected, grad_ND, expected_grad in result["keys"].values():
            torch.testing.assert_close(out_ND, expected)
            torch.testing.assert_close(grad_ND, expected_grad.to(grad_ND.dtype))


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
    num_chunks: int,
) -> None:
    """Fake tensors have no values, so a read of one is an error."""
    section = ParallelSection(ep_chunks=num_chunks)
    experts = local_experts(0, 2).to(torch.bfloat16)
    with fake_process_group(0, 2, True), FakeTensorMode(allow_non_fake_inputs=True):
        x_ND = torch.randn(8, CONFIG.dim, dtype=torch.bfloat16, requires_grad=True)
        weights_NA = torch.ones(8, 2, requires_grad=True)
        chosen_NA = torch.zeros(8, 2, dtype=torch.int64)
        routing = sort_by_expert(chosen_NA, weights_NA, CONFIG.num_experts)
        world: Any = dist.group.WORLD
        run = partial(apply_in_chunks, experts.forward)
        run(PaddedAllToAll(world, section), num_chunks, x_ND, routing).sum().backward()
        assert x_ND.grad is not None
        assert weights_NA.grad is not None
        with pytest.raises(DynamicOutputShapeException):
            run(AllToAll(world, section), num_chunks, x_ND, routing)


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
        (
            [("parallel.ep_dispatch", "padded"), ("debug.autograd_anomaly", "true")],
            "gradients that parallel.ep shards",
        ),
    ],
)
def test_dispatch_invalid_keys_are_refused(overrides: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        resolve_job(*overrides)


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
