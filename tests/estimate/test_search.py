"""The search finds the layout that tracing all layouts would find, and reasons for the rest."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.cli.main import main
from weft.config.errors import InvalidConfig
from weft.config.reader import read_job
from weft.config.schema import Job, flatten
from weft.estimate import search as searching
from weft.estimate.cost import build_hardware
from weft.estimate.forecast import OUTSIDE_ALLOCATOR, forecast
from weft.estimate.forecast_text import render_search
from weft.estimate.pieces import Pieces, has_chunks
from weft.estimate.search import (
    MAX_TRACED,
    TRACED_OWN,
    Candidate,
    Estimator,
    Frontier,
    SearchResult,
    TracedCandidate,
    describe_layout,
    enumerate_candidates,
    precisions,
    render_recipe,
    schedule_conflict,
    search,
    trace_candidate,
)
from weft.planning.devices import find_device
from weft.planning.plan import Machine, Plan
from weft.planning.plan_text import plan_recipe
from weft.planning.resolve import resolve

Overrides = list[tuple[str, str]]
pytestmark = pytest.mark.timeout(400)  # some seconds each, on a machine that does nothing else

# A Llama of 0.2 billion parameters with long sequences: on two to four devices, activations take
# most of the memory, and layouts differ in them.
SMALL: Overrides = [
    ("model.num_layers", "4"),
    ("model.dim", "1024"),
    ("model.num_heads", "8"),
    ("model.num_kv_heads", "4"),
    ("model.ffn_dim", "4096"),
    ("model.vocab_size", "32768"),
    ("model.max_seq_len", "8192"),
    ("model.tied_embeddings", "false"),
    ("train.seq_len", "4096"),
    ("train.global_batch_size", "8"),
    ("train.eval_interval", "0"),
]


def planned(cluster: str, *overrides: tuple[str, str]) -> tuple[Job, Plan, Machine]:
    local_machine = Machine("cpu", devices=2)
    plan, machine = plan_recipe(
        "demo", [*SMALL, *overrides], [], cluster, lambda device: local_machine
    )
    return plan.job, plan, machine


def all_candidates(job: Job, plan: Plan, machine: Machine) -> list[Candidate]:
    return list(enumerate_candidates(plan, machine))


def with_memory(machine: Machine, gib: float) -> Machine:
    return replace(machine, memory_bytes=OUTSIDE_ALLOCATOR + int(gib * 2**30))


def check_sums(
    result: SearchResult, plan: Plan, machine: Machine, fixed: Collection[str] = ()
) -> None:
    """Check that every candidate is ranked or rejected once, with a reason."""
    reported = [
        *(item.candidate for item in result.best),
        *(item.candidate for item in result.rejected),
    ]
    assert result.num_considered == len(reported)
    assert Counter(map(key_of, reported)) == Counter(
        map(key_of, enumerate_candidates(plan, machine, fixed))
    )
    assert all(item.detail for item in result.rejected)


def key_of(candidate: Candidate) -> str:
    return json.dumps(candidate.changes, sort_keys=True)


# --------------------------------------------------------------------------- one search


FEW = 3  # fitting layouts to trace
FIXED = ("train.microbatch_size",)  # fewer recordings


@pytest.fixture(scope="module")
def tight() -> tuple[Job, Plan, Machine, SearchResult, list[str]]:
    """Search on two H100 with little memory, tracing few layouts in this process.

    `test_plan_search_winner_has_its_forecast_when_planned_again` traces in child processes.
    """
    keys = ("train.global_batch_size", "4"), ("train.microbatch_size", "1")
    job, plan, machine = planned("1x2xH100", *keys)
    machine = with_memory(machine, 4.7)
    messages: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: 1)
        patch.setattr(searching, "TRACED_OWN", FEW)
        patch.setattr(searching, "TRACED_OTHER", 1)
        patch.setattr(searching, "MAX_TRACED", 2 * FEW)
        return job, plan, machine, search(plan, machine, messages.append, FIXED), messages


Tight = tuple[Job, Plan, Machine, SearchResult, list[str]]


def test_search_every_layout_is_ranked_or_has_a_reason(tight: Tight) -> None:
    _, plan, machine, result, messages = tight
    check_sums(result, plan, machine, FIXED)
    assert messages[0].endswith("layouts; estimating the best of them")
    assert any(text.startswith(f"0 of {FEW} found; tracing") for text in messages)


def test_search_best_layouts_fit_and_are_sorted_by_speed(tight: Tight) -> None:
    result, machine = tight[3], tight[2]
    seconds = [item.prediction.step_seconds for item in result.best]
    assert seconds == sorted(seconds)  # type: ignore[type-var]
    assert machine.memory_bytes is not None
    assert all(item.prediction.fits for item in result.best)
    assert all(item.prediction.needed_bytes <= machine.memory_bytes for item in result.best)
    reasons = {item.reason for item in result.rejected}
    assert {"rule", "slower"} <= reasons <= {"memory", "rule", "slower"}


def test_search_winner_has_the_recipes_precision(tight: Tight) -> None:
    """Float8 layouts are ranked if they are faster, but the winner is not float8."""
    result = tight[3]
    precisions = {c.changes["precision"]["float8"] for c in all_candidates(*tight[:3])}
    assert precisions == {"none", "tensorwise"}
    assert result.winner is not None
    assert result.winner.candidate.plan.job.precision.float8 == "none"
    own = [item for item in result.best if item.candidate.precision == "none"]
    assert own[0] is result.winner
    assert 0 < len(own) <= FEW


def test_search_screen_has_every_ranked_layout_and_counts_the_others(tight: Tight) -> None:
    result = tight[3]
    lines = render_search(result).splitlines()
    assert (
        lines[0]
        == f"{result.num_considered:,} layouts considered, the best {len(result.best)} traced"
    )
    ranked = lines[3 : 3 + len(result.best)]
    assert result.winner is not None
    assert [line.split()[0].endswith("*") for line in ranked] == [
        entry is result.winner for entry in result.best
    ]
    for line, item in zip(ranked, result.best, strict=True):
        assert line.endswith(describe_layout(item.candidate.plan))
    counts = [line.split()[0] for line in lines[lines.index("", 2) + 1 :]]
    assert sum(int(count.replace(",", "")) for count in counts) == len(result.rejected)


def test_search_winner_is_written_as_a_recipe_with_the_same_forecast(
    tight: Tight, tmp_path: Path
) -> None:
    """The forecast of the winner is that of a trace of the written recipe."""
    job, _, machine, result, _ = tight
    path = tmp_path / "best.toml"
    path.write_text(render_recipe(result, job, "demo", "1x2xH100"), "utf-8")
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert head[1] == "# weft plan demo --cluster 1x2xH100 --search"
    assert "GiB on the fullest rank" in head[2]
    reread, _, errors = read_job(str(path))
    assert not errors
    assert result.winner is not None
    expected = flatten(result.winner.candidate.plan.job) | {"run.cluster": "1x2xH100"}
    assert flatten(reread) == expected
    prediction = forecast(resolve(reread, machine), machine, find_device(machine))
    assert (prediction.step_seconds, prediction.needed_bytes) == (
        result.winner.prediction.step_seconds,
        result.winner.prediction.needed_bytes,
    )


@pytest.mark.slow
def test_search_without_enough_memory_traces_the_smallest_and_has_no_winner(tight: Tight) -> None:
    """If no estimate fits, the smallest candidate is traced."""
    plan, machine = tight[1:3]
    machine = with_memory(machine, 1.0)
    result = search(plan, machine)
    check_sums(result, plan, machine)
    assert result.best == ()
    assert result.winner is None
    sure = [item for item in result.rejected if item.detail.endswith(", as traced")]
    assert {item.candidate.precision for item in sure} == {"none", "tensorwise"}
    assert "no layout fits" in render_search(result)


# --------------------------------------------------------------------------- candidates


def test_trace_best_traces_few_and_prunes_their_neighbors(tight: Tight) -> None:
    """A trace that needs more than estimated prunes similar candidates."""
    machine, prediction = tight[2], tight[3].best[0].prediction
    subset = [c for c in all_candidates(*tight[:3]) if c.precision == "none"]
    subset = [c for c in subset if not schedule_conflict(c.plan)]
    tried: list[int] = []

    def trace(tasks: Any) -> Any:
        tried.append(len(tasks))
        return [TracedCandidate(c, replace(prediction, capacity_bytes=2**29)) for c, _ in tasks]

    class Low:  # by these estimates all candidates fit, but none does
        def floor(self, plan: Plan) -> float:
            return 0.0

        def state_bytes(self, plan: Plan) -> float:
            return 2.0**20

        def estimate(self, candidate: Candidate) -> Candidate:
            return replace(candidate, seconds=1.0, memory_bytes=2.0**28.9)

    room = 2.0**29
    frontier = Frontier(subset, Low(), room)  # type: ignore[arg-type]
    best, rejected = searching.trace_best(
        with_memory(machine, 0.5), frontier, room, 2, trace, lambda text: None
    )
    assert best == []
    assert sum(tried) <= MAX_TRACED // 3
    assert len(rejected) == len(subset)
    details = [item.detail for item in rejected]
    assert any(detail.endswith("estimated from traced neighbors") for detail in details)
    assert {item.reason for item in rejected} <= {"memory", "untried"}


@pytest.mark.parametrize(
    ("cluster", "own", "expected"),
    [
        ("1x2xH100", "none", ["none", "tensorwise"]),
        ("1x2xH100", "rowwise", ["rowwise", "none"]),
        ("1x2xB200", "none", ["none", "tensorwise"]),
        ("1x2xA100-80GB", "none", ["none"]),
        ("1x2xMI300X", "none", ["none"]),
    ],
)
def test_precisions_follow_the_device(cluster: str, own: str, expected: list[str]) -> None:
    _job, plan, machine = planned(
        cluster, ("precision.float8", own), ("precision.float8_small", "true")
    )
    if cluster == "1x2xMI300X":
        expected = precisions(plan, machine)  # float8 support depends on the device table
        assert expected[0] == "none"
    assert precisions(plan, machine) == expected


def test_candidates_drop_keys_that_fit_the_recipes_layout_only() -> None:
    """Other layouts drop keys that are valid only for the recipe's layout."""
    job, plan, machine = planned(
        "1x4xH100",
        ("parallel.tp", "2"),
        ("parallel.async_tp", "true"),
        ("compile.enable", "true"),
    )
    subset = all_candidates(job, plan, machine)
    assert {c.plan.tp for c in subset} == {1, 2, 4}
    for candidate in subset:
        assert candidate.changes["parallel"]["async_tp"] == (candidate.plan.tp > 1)
    job, plan, machine = planned(
        "1x4xH100", ("parallel.pp", "2"), ("pipeline.layers_per_stage", "[2, 2]")
    )
    assert all(
        c.changes["pipeline"]["layers_per_stage"] == () for c in all_candidates(job, plan, machine)
    )


def test_candidate_chunks_its_loss_by_its_own_logits() -> None:
    """A small microbatch under tensor parallelism needs no chunks, even if the recipe does."""
    _job, plan, machine = planned("1x4xH100", ("train.microbatch_size", "2"))
    chunked = {}
    for candidate in enumerate_candidates(plan, machine):
        key = candidate.plan.tp, candidate.plan.microbatch_size
        chunked[key] = has_chunks(candidate.plan, candidate.plan.microbatch_size)
    assert chunked[1, 4]
    assert not chunked[4, 1]


def test_impossible_split_backward_excludes_remat_and_float8() -> None:
    job, plan, machine = planned("1x4xH100")
    kinds = {
        (c.plan.job.activation_checkpoint.mode, c.precision, bool(schedule_conflict(c.plan)))
        for c in all_candidates(job, plan, machine)
        if c.plan.schedule_name == "ZBVZeroBubble"
    }
    assert ("none", "none", False) in kinds
    assert all(
        lost
        for activation_checkpoint, precision, lost in kinds
        if (activation_checkpoint, precision) != ("none", "none")
    )


def test_candidates_have_the_keys_that_the_user_fixed() -> None:
    _job, plan, machine = planned(
        "1x4xH100", ("train.microbatch_size", "2"), ("activation_checkpoint.mode", "full")
    )
    fixed = {"train.microbatch_size", "activation_checkpoint.mode", "train.global_batch_size"}
    kept = list(enumerate_candidates(plan, machine, fixed))
    assert len({c.plan.tp for c in kept}) > 1
    assert {c.plan.microbatch_size for c in kept} == {2}
    assert {c.plan.activation_checkpoint.mode for c in kept} == {"full"}
    assert len(kept) < len(list(enumerate_candidates(plan, machine)))


def test_candidates_of_experts_split_them_over_the_ranks_of_a_node() -> None:
    small = [("model.num_layers", "4"), ("train.global_batch_size", "16")]
    plan, machine = plan_recipe("qwen3-30b-a3b", small, [], "2x8xH100", lambda _: Machine("cpu", 2))
    candidates = list(enumerate_candidates(plan, machine))
    assert {c.plan.ep for c in candidates} == {1, 2, 4, 8}
    assert all(c.changes["parallel"]["ep"] == c.plan.ep for c in candidates)
    for candidate in candidates[:: len(candidates) // 12]:
        resolved = resolve(candidate.plan.job, machine)
        assert resolved.ep == candidate.plan.ep
        assert resolved.gradient_sync == candidate.plan.gradient_sync


@pytest.mark.slow
def test_frontier_returns_the_fastest_first_and_estimates_few() -> None:
    """The order is that of estimating all candidates; those of hopeless meshes are not."""
    _job, plan, machine = planned("1x4xH100")
    device = find_device(machine)
    assert device is not None
    estimator = Estimator(Pieces(device), build_hardware(plan, device))
    candidates = [c for c in enumerate_candidates(plan, machine) if c.precision == plan.float8]
    available = 6.0 * 2**30
    every = [estimator.estimate(c) for c in candidates if not schedule_conflict(c.plan)]
    fitting = [c for c in every if isinstance(c, Candidate) and c.memory_bytes < available]
    fastest = sorted(fitting, key=lambda c: c.seconds)
    asked: list[Candidate] = []

    class Counting(Estimator):
        def estimate(self, candidate: Candidate) -> Any:
            asked.append(candidate)
            return super().estimate(candidate)

    counting = Counting(estimator.pieces, estimator.hardware)
    frontier = Frontier(candidates, counting, available)
    found = frontier.pop()
    while found is not None and found.memory_bytes >= available:  # within the margin
        found = frontier.pop()
    assert found is not None
    assert found.seconds == pytest.approx(fastest[0].seconds, rel=0.02)
    assert len(asked) < len(every) / 2


def test_candidates_on_several_axes_are_unique() -> None:
    for cluster in ("1x8xH100", "2x4xA100-80GB"):
        keys = [key_of(c) for c in all_candidates(*planned(cluster))]
        assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("cluster", "overrides", "key", "rule"),
    [
        ("1x2xCPU", [], "--search", "is a device of unknown speed"),
        (
            "1x2xH100",
            [("parallel.pp", "2"), ("pipeline.schedule", "{folder}/order.csv")],
            "pipeline.schedule",
            "is a file",
        ),
    ],
)
def test_search_unknown_device_or_schedule_file_is_refused(
    cluster: str, overrides: Overrides, key: str, rule: str, tmp_path: Path
) -> None:
    rows = [",".join(f"{rank}{kind}{m}" for m in range(4) for kind in "FB") for rank in range(2)]
    (tmp_path / "order.csv").write_text("\n".join(rows) + "\n")
    subset = [(name, value.format(folder=tmp_path)) for name, value in overrides]
    batch = [("train.microbatch_size", "2")] if subset else []
    with pytest.raises(InvalidConfig) as caught:
        search(*planned(cluster, *subset, *batch)[1:])
    (error,) = caught.value.errors
    assert error.key == key
    assert rule in error.rule


# --------------------------------------------------------------------------- compared with traces


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("cluster", "gib"), [("1x2xH100", 4.7), ("1x4xA100-80GB", 3.5)])
def test_search_winner_is_as_fast_as_that_of_tracing_all(cluster: str, gib: float) -> None:
    """Trace every possible layout: the winner is the fastest or as good as it.

    At most 10 % of the layouts rejected for memory would fit.
    """
    job, plan, machine = planned(cluster, ("train.global_batch_size", "8"))
    machine = with_memory(machine, gib)
    result = search(plan, machine)
    check_sums(result, plan, machine)
    assert result.winner is not None
    seconds, fitting = [], {}
    for candidate in all_candidates(job, plan, machine):
        if candidate.precision == "none" and not schedule_conflict(candidate.plan):
            outcome = trace_candidate((candidate, machine))
            if isinstance(outcome, TracedCandidate):
                fitting[key_of(candidate)] = bool(outcome.prediction.fits)
                if outcome.prediction.fits:
                    seconds.append(outcome.prediction.step_seconds)
    assert seconds
    assert result.winner.prediction.step_seconds == pytest.approx(min(seconds), rel=0.05)  # type: ignore[type-var]
    wrong = [
        item
        for item in result.rejected
        if item.reason == "memory" and fitting.get(key_of(item.candidate))
    ]
    assert len(wrong) <= 0.1 * len(fitting), [
        describe_layout(item.candidate.plan) for item in wrong
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_search_of_512_gpus_winner_has_its_forecast_when_planned_again(tmp_path: Path) -> None:
    """The best of 3,000 layouts of 405B has the same forecast in a new plan."""
    local_machine = Machine("cpu", devices=2)
    plan, machine = plan_recipe(
        "paper/llama3-405b", [], [], "64x8xH100", lambda device: local_machine
    )
    result = search(plan, machine)
    assert result.num_considered > 2000
    assert result.winner is not None
    assert len(result.best) >= TRACED_OWN
    path = tmp_path / "best.toml"
    path.write_text(render_recipe(result, plan.job, "paper/llama3-405b", "64x8xH100"), "utf-8")
    reread = plan_recipe(str(path), [], [], None, lambda device: local_machine)
    prediction = forecast(*reread, find_device(reread[1]))
    assert prediction.step_seconds == result.winner.prediction.step_seconds
    assert prediction.needed_bytes == result.winner.prediction.needed_bytes


# --------------------------------------------------------------------------- the command


@pytest.mark.system
@pytest.mark.parametrize("cores", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_plan_search_winner_has_its_forecast_when_planned_again(
    cores: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Search, write the winner, and plan the written recipe; two cores trace in two processes."""
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    best, page = tmp_path / "best.toml", tmp_path / "page.html"
    small = [*SMALL, ("train.global_batch_size", "1"), ("model.num_layers", "2")]
    keys = [text for name, value in small for text in (f"--{name}", value)]
    options = ["--cluster", "1x1xA100-80GB", "--search", "--json", "--write", str(best)]
    assert main(["plan", "demo", *keys, *options]) == 0
    result = json.loads(capsys.readouterr().out)
    (winner,) = (item for item in result["best"] if item["winner"])
    assert winner is not None
    assert all(item["why"] and item["detail"] for item in result["lost"])
    options = ["--json", "--report", str(page)]
    assert main(["plan", str(best), *options]) == 0
    prediction = json.loads(capsys.readouterr().out)
    for key in ("fits", "peak_memory_gib", "memory_gib", "step_seconds", "mfu", "communication"):
        assert prediction[key] == winner[key]
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cluster", "64x8", "--search"], '--cluster="64x8" is not a cluster'),
        (["--cluster", "1x8xH999", "--search"], "has an unknown device"),
        (["--write", "x.toml"], "is for --search. Add --search"),
        (["--cluster", "1x3xH100", "--search"], "train.global_batch_size=8"),
        (["--search", "--rank-map"], "not allowed with"),
        (
            ["--cluster", "1x2xH100", "--search", "--parallel.tp", "4"],
            "tp=4 is in no layout",
        ),
        (
            ["--cluster", "1x2xH100", "--search", "--activation_checkpoint.every_n_layers", "2"],
            "tries no layout with --activation_checkpoint.every_n_layers",
        ),
    ],
)
def test_plan_search_wrong_options_are_refused(
    options: list[str], message: str, capsys: Any
) -> None:
    keys = [text for name, value in SMALL for text in (f"--{name}", value)]
    try:
        status = main(["plan", "demo", *keys, *options])
    except SystemExit as stop:
        status = int(stop.code or 0)
    assert status == 2
    assert message in capsys.readouterr().err
