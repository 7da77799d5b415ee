"""Passes of two microbatches that take turns: gradients, the order of work, and failures."""

from __future__ import annotations

import _thread
import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import run_ranks
from tests.layouts import check_many, parse, size
from tests.parallel.test_expert_parallel import MODEL, TOLERANCE
from tests.small import Overrides, gradients, records, train_rank
from weft.models.moe import Experts
from weft.parallel import private_schedules
from weft.parallel.expert_dispatch import during_exchange
from weft.parallel.pass_overlap import run_in_turns
from weft.parallel.private import num_captured_graphs
from weft.records.span_reader import read_spans

LAYOUT = "dp_shard2 pp2 ep=2 pipeline.schedule=DualPipeV"
OFF = ("pipeline.overlap_dispatch", "false")


def job_of(layout: str, *extra: tuple[str, str]) -> Overrides:
    return [*MODEL, *size(layout), *parse(layout)[1], *extra]


# --------------------------------------------------------------------------- turns


def exchange() -> None:
    """Do what an exchange does between its start and its wait."""
    for call in during_exchange:
        call()


def talk(log: list[str], name: str, words: int, error_at: int = -1) -> None:
    """Log some words, with an exchange after each; maybe fail."""
    for index in range(words):
        log.append(f"{name}{index}")
        if index == error_at:
            raise ValueError(name)
        exchange()
    log.append(f"{name}.")


def no_thread_is_left() -> bool:
    names = [thread.name for thread in threading.enumerate()]
    return "backward" not in names and not during_exchange


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((2, 2), "F0 B0 F1 B1 F. B."),
        ((3, 1), "F0 B0 F1 B. F2 F."),  # the backward pass ends first
        ((1, 3), "F0 B0 F. B1 B2 B."),
        ((0, 2), "F. B0 B1 B."),
        ((2, 0), "F0 B. F1 F."),
    ],
)
def test_passes_switch_at_each_exchange_until_one_ends(
    words: tuple[int, int], expected: str
) -> None:
    log: list[str] = []
    run_in_turns(partial(talk, log, "F", words[0]), partial(talk, log, "B", words[1]))
    assert " ".join(log) == expected
    assert no_thread_is_left()


@pytest.mark.parametrize(
    ("errors", "raised", "expected"),
    [
        ((1, -1), "F", "F0 B0 F1"),  # the backward pass waits, and ends there
        ((-1, 1), "B", "F0 B0 F1 B1"),
        ((0, 0), "F", "F0"),
        ((-1, 3), "B", "F0 B0 F1 B1 F2 B2 F. B3"),  # the forward pass has ended
    ],
)
def test_error_of_a_pass_ends_the_other_and_is_raised(
    errors: tuple[int, int], raised: str, expected: str
) -> None:
    log: list[str] = []
    with pytest.raises(ValueError, match=raised):
        run_in_turns(partial(talk, log, "F", 3, errors[0]), partial(talk, log, "B", 4, errors[1]))
    assert " ".join(log) == expected
    assert no_thread_is_left()


def test_interrupt_of_the_waiting_main_thread_ends_both_passes() -> None:
    log: list[str] = []
    interrupted = threading.Event()

    def other() -> None:
        _thread.interrupt_main()
        interrupted.wait(timeout=20)  # the main thread has recorded the error
        talk(log, "B", 3)

    def main() -> None:
        try:
            talk(log, "F", 3)
        finally:
            interrupted.set()

    with pytest.raises(KeyboardInterrupt):
        run_in_turns(main, other)
    assert log in (["F0"], ["F0", "B0"])
    assert no_thread_is_left()


class Exchange(torch.autograd.Function):
    """The identity, with an exchange in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        exchange()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        exchange()
        return grad.clone()


def test_error_of_the_forward_pass_ends_a_backward_pass_inside_autograd() -> None:
    x = torch.ones(2, requires_grad=True)
    y: torch.Tensor = Exchange.apply(Exchange.apply(x))  # type: ignore[no-untyped-call]
    log: list[str] = []
    with pytest.raises(ValueError, match="F"):
        run_in_turns(partial(talk, log, "F", 3, 1), lambda: y.sum().backward())
    assert x.grad is None
    assert no_thread_is_left()
    # Autograd works as before.
    (x * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2]


# --------------------------------------------------------------------------- gradients


def gradients_both_ways(jobs: list[Overrides], store: str) -> None:
    """Compare gradients with and without overlap, bit by bit."""
    for job in jobs:
        one, two = gradients(job, store), gradients([*job, OFF], store)
        assert (one["loss"], one["norm"]) == (two["loss"], two["norm"]), job
        assert one["grads"].keys() == two["grads"].keys()
        for name, grad in one["grads"].items():
            assert torch.equal(grad, two["grads"][name]), (job, name)


# --------------------------------------------------------------------------- order


class Event(NamedTuple):
    """An operator that a pass of the pair ``pair`` called."""

    pair: int
    name: str  # F or B
    op: str
    is_rows: bool  # of floating point


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators of one thread."""

    def __init__(self, events: list[Event], pair: int, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events, self.pair, self.name = events, pair, name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rows = isinstance(args[0], torch.Tensor) and args[0].is_floating_point() if args else False
        self.events.append(Event(self.pair, self.name, func.overloadpacket.__name__, rows))
        return func(*args, **(kwargs or {}))


def record_pairs(job: Overrides, store: str) -> tuple[dict[str, Any], list[Event]]:
    """Return `gradients`, and the operators of the pairs of a step, in order."""
    events: list[Event] = []
    pairs = 0

    def run(main: Callable[[], None], other: Callable[[], None]) -> None:
        nonlocal pairs

        def recorded(name: str, function: Callable[[], None], pair: int = pairs) -> None:
            with Recorder(events, pair, name):
                function()

        run_in_turns(partial(recorded, "F", main), partial(recorded, "B", other))
        pairs += 1

    with patch.object(private_schedules, "run_in_turns", run):
        return gradients(job, store), events


def count_hidden(events: list[Event]) -> tuple[int, int]:
    """Return how many exchanges of rows another pass hides, and how many there are.

    Raises:
        AssertionError: a pass starts an exchange before it waits for the one before.
    """
    hidden = total = 0
    for index, event in enumerate(events):
        if event.op != "all_to_all_single" or not event.is_rows:
            continue
        later = events[index + 1 :]
        ends = ("wait_tensor", "all_to_all_single")
        wait = next(i for i, e in enumerate(later) if e[:2] == event[:2] and e.op in ends)
        assert later[wait].op == "wait_tensor"
        # The same pass may compute shared experts.
        others = [e for e in later[:wait] if e[:2] != event[:2]]
        assert all(e.pair == event.pair for e in others)
        total += 1
        hidden += any("mm" in e.op for e in others)
        # Without a partner only after the partner has ended.
        assert others or not any(e.pair == event.pair and e.name != event.name for e in later)
    return hidden, total


def check_order(job: Overrides, store: str) -> list[Event]:
    results, events = record_pairs(job, store)
    without, no_events = record_pairs([*job, OFF], store)
    assert not no_events
    for name, grad in results["grads"].items():
        assert torch.equal(grad, without["grads"][name]), name
    return events


def test_exchanges_are_under_way_while_the_other_pass_computes(store_path: Path) -> None:
    """All ranks start exchanges in the same order, and gradients do not change by a bit."""
    job = job_of(LAYOUT, ("model.dense_layers", "0"))
    ranks = run_ranks(check_order, 4, job, str(store_path), timeout=300)
    for events in ranks:
        hidden, total = count_hidden(events)
        assert total == 3 * 4  # of three pairs: there and back, in both passes of one layer
        assert hidden == total
    exchanges = [[e for e in events if e.op == "all_to_all_single"] for events in ranks]
    assert exchanges[0] == exchanges[1]
    assert exchanges[2] == exchanges[3]


@pytest.mark.slow
def test_pass_without_experts_hides_one_exchange_of_its_partner(store_path: Path) -> None:
    ranks = run_ranks(check_order, 4, job_of(LAYOUT), str(store_path), timeout=300)
    for events in ranks[:2]:  # whose first stage is a dense layer
        hidden, total = count_hidden(events)
        assert total == 3 * 2
        assert hidden == 3


# --------------------------------------------------------------------------- other techniques

LAYOUTS = [
    f"{LAYOUT} activation_checkpoint.mode=full",
    f"{LAYOUT} activation_checkpoint.mode=selective",
    f"{LAYOUT} activation_checkpoint.mode=budget activation_checkpoint.offload=true",
    f"{LAYOUT} reshard_after_forward=always gradient_sync=microbatch",
    f"{LAYOUT} model.shared_experts=1 model.mtp_layers=1",
    f"{LAYOUT} precision.compute_dtype=bfloat16 cpu_offload=true",
    f"{LAYOUT} pipeline.layers_per_stage=[2,1,1,0]",
    f"{LAYOUT} lora.rank=2",
    "cp2 pp2 ep=2 pipeline.schedule=DualPipeV",
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_overlap_beside_other_techniques_changes_no_bit(layout: str, store_path: Path) -> None:
    run_ranks(gradients_both_ways, 4, [job_of(layout)], str(store_path), timeout=300)


def draw_layouts(seed: int, degrees: list[str]) -> list[str]:
    rng = random.Random(seed)
    axes = [
        degrees,
        ["", "activation_checkpoint.mode=full", "activation_checkpoint.mode=selective"],
        ["", "reshard_after_forward=always", "reshard_after_forward=never"],
        ["", "gradient_sync=step", "gradient_sync=microbatch"],
        ["", "activation_checkpoint.offload=true", "cpu_offload=true"],
        ["", "pipeline.layers_per_stage=[1,1,1,1]", "pipeline.layers_per_stage=[0,2,2,0]"],
        ["model.dense_layers=0", "model.dense_layers=1"],
        ["model.shared_experts=0", "model.shared_experts=1"],
    ]
    start = "pp2 ep=2 pipeline.schedule=DualPipeV"
    return [" ".join([start, *filter(None, map(rng.choice, axes))]) for _ in range(6)]


def model_of(layout: str) -> Overrides:
    words = [word.split("=") for word in layout.split() if word.startswith("model.")]
    return [*MODEL, *size(layout), *((name, value) for name, value in words)]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("degrees", [["dp_shard2", "cp2"], ["dp_shard2 tp2", "dp_shard4"]])
def test_random_layouts_gradients_equal_one_process(degrees: list[str], store_path: Path) -> None:
    check_many(draw_layouts(0, degrees), store_path, model_of, TOLERANCE)


def compiled_both_ways(jobs: list[Overrides], store: str) -> int:
    """Compare compiled steps with and without overlap; return the number of graphs.

    The graphs run operator by operator, because only their borders matter here.
    """
    compile_: Any = torch.compile
    torch.compile = partial(compile_, backend="aot_eager_decomp_partition")  # type: ignore[assignment]
    gradients_both_ways(jobs, store)
    return num_captured_graphs()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["none", "full"])
def test_overlap_of_compiled_blocks_changes_no_bit(
    mode: str, store_path: Path, tmp_path: Path
) -> None:
    keys = [("compile.enable", "true"), ("compile.cache_dir", str(tmp_path))]
    job = job_of(LAYOUT, *keys, ("activation_checkpoint.mode", mode))
    assert all(run_ranks(compiled_both_ways, 4, [job], str(store_path), timeout=500))


# --------------------------------------------------------------------------- failures


def fail_in_pass(in_main_thread: bool, job: Overrides, store: str) -> None:
    """Fail in the experts of a paired pass, on all ranks."""
    forward = Experts.forward

    def fail(self: Any, *args: Any) -> Any:
        is_main = threading.current_thread() is threading.main_thread()
        if during_exchange and is_main == in_main_thread:
            raise ValueError("planted")
        return forward(self, *args)

    with patch.object(Experts, "forward", fail), pytest.raises(ValueError, match="planted"):
        gradients(job, store)
    assert no_thread_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("in_main_thread", [True, False])
def test_error_of_a_paired_pass_is_that_of_the_step(in_main_thread: bool, store_path: Path) -> None:
    # A recomputation runs the experts in the thread of the backward pass.
    job = job_of(LAYOUT, ("activation_checkpoint.mode", "full"), ("model.dense_layers", "0"))
    run_ranks(fail_in_pass, 4, in_main_thread, job, str(store_path), timeout=300)


# --------------------------------------------------------------------------- training


@pytest.mark.slow
def test_training_with_overlap_evaluates_and_records_the_spans_of_both_passes(
    store_path: Path, tmp_path: Path
) -> None:
    keys = [("run.dir", str(tmp_path)), ("train.steps", "2"), ("train.eval_interval", "1")]
    run_ranks(train_rank, 4, job_of(LAYOUT, *keys), str(store_path), timeout=300)
    assert all(record["eval_loss"] > 0 for record in records(tmp_path) if "eval_loss" in record)
    events = [event for event in read_spans(tmp_path, 3) if "kind" in event["args"]]
    tracks = {kind: {e["tid"] for e in events if e["args"]["kind"] == kind} for kind in "FBIW"}
    assert tracks["F"] == {0}
    assert tracks["B"] == {0, 1}  # in a pair, and alone
    assert tracks["I"] == tracks["W"] == {0}
    # On its own track, a backward pass begins before the forward pass of its pair ends.
    forwards, backwards = ([e for e in events if e["args"]["kind"] == k] for k in "FB")
    for event in (event for event in backwards if event["tid"] == 1):
        assert any(f["ts"] < event["ts"] < f["ts"] + f["dur"] for f in forwards)
