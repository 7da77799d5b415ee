"""All ranks skip, rewind or repeat a bad step of one rank, and no other step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import RankError, run_ranks
from tests.small import Overrides, losses, newest_state, records, train_rank
from weft.checkpoint.manifest import list_checkpoints, manifest_text, read_manifest
from weft.config.schema import ResilienceSection
from weft.monitor import anomaly
from weft.monitor.anomaly import AnomalyDetector, AnomalyError, StepResult

STEPS: Overrides = [("model.num_layers", "1"), ("train.steps", "12")]
SKIP: Overrides = [
    *STEPS,
    ("resilience.on_anomaly", "skip"),
    ("resilience.spike_window", "8"),
    ("resilience.spike_threshold", "20"),
]
REWIND: Overrides = [
    *SKIP,
    ("resilience.on_anomaly", "rewind"),
    ("checkpoint.interval", "5"),
    ("checkpoint.async_save", "false"),
]
REPLICAS: Overrides = [("parallel.dp_replicate", "2")]
PIPELINE: Overrides = [
    ("parallel.pp", "2"),
    ("model.tied_embeddings", "false"),
    ("model.num_layers", "2"),
]


def faults(*several: dict[str, Any]) -> Overrides:
    """Return overrides for faults, by default of the gradients on rank 1."""
    tables = []
    for item in several:
        fields = {"site": "gradients", "rank": 1} | item
        tables.append(", ".join(f"{k} = {v!r}".replace("'", '"') for k, v in fields.items()))
    return [("resilience.faults", f"[{', '.join(f'{{{table}}}' for table in tables)}]")]


def bad(kind: str, *passings: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"kind": kind, "passing": passing, **fields} for passing in passings]


def run(directory: Path, store: Path, ranks: int, *overrides: tuple[str, str]) -> dict[str, Any]:
    """Train; return every tensor of the last checkpoint."""
    run_ranks(train_rank, ranks, [("run.dir", str(directory)), *overrides], str(store), timeout=120)
    return newest_state(directory)


def train_without_updates(overrides: Overrides, store: str, left_out: list[int]) -> None:
    """Train, but leave out the updates of these steps."""
    calls = 0
    original = torch.optim.AdamW.step

    def step(self: torch.optim.AdamW, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        return None if calls in left_out else original(self, *args)

    torch.optim.AdamW.step = step  # type: ignore[method-assign]  # only in the process of this rank
    train_rank(overrides, store)


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Return True if the states are equal bit for bit."""
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("optim.") for name in ours)
    return all(tensor.equal(theirs[name]) for name, tensor in ours.items())


def anomalies(directory: Path) -> list[dict[str, Any]]:
    return [item for record in records(directory) for item in record.get("anomalies", [])]


# --------------------------------------------------------------------------- skip


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (REPLICAS, "nan"),  # only rank 1 has the NaN, and has to inform rank 0
        (PIPELINE, "corrupt"),
        *(
            pytest.param(layout, kind, marks=pytest.mark.slow)
            for layout, kind in [
                ([], "nan"),
                ([], "corrupt"),
                (REPLICAS, "corrupt"),
                (PIPELINE, "nan"),
                ([("parallel.tp", "2")], "nan"),
                ([("parallel.tp", "2")], "corrupt"),
                ([("parallel.cp", "2")], "nan"),
                ([("parallel.cp", "2")], "corrupt"),
            ]
        ),
    ],
)
def test_skip_bad_gradient_of_one_rank_is_skipped_by_all(
    layout: Overrides, kind: str, store_path: Path, tmp_path: Path
) -> None:
    """The run equals one without that update, and reports the skipped step."""
    second_fault = faults(*bad(kind, 8, 9))  # also when the step is repeated
    skipped = run(tmp_path / "a", store_path, 2, *SKIP, *layout, *second_fault)
    (event,) = anomalies(tmp_path / "a")
    overrides = [("run.dir", str(tmp_path / "b")), *STEPS, *layout]
    run_ranks(train_without_updates, 2, overrides, str(store_path), [8], timeout=120)
    assert same(skipped, newest_state(tmp_path / "b"))
    assert (event["step"], event["first_sample"], event["last_sample"]) == (8, 56, 63)
    assert (event["what"], event["action"]) == ("gradient norm", "skip")
    assert event["cause"] == "persistent"
    before = [record["grad_norm"] for record in records(tmp_path / "a")[:7]]
    assert min(before) <= event["median"] <= max(before)
    if kind == "nan":
        assert event["value"] == event["again"] == "nan"
    else:
        assert event["value"] > event["median"] + 100 * (max(before) - min(before))
    assert [record["step"] for record in records(tmp_path / "a")] == list(range(1, 13))
    assert (records(tmp_path / "a")[7]["grad_norm"] is None) == (kind == "nan")


@pytest.mark.slow
def test_skip_in_the_first_steps_detects_nan(store_path: Path, tmp_path: Path) -> None:
    # During warm-up the first norms do not predict the next, so ignore spikes.
    only_nan = ("resilience.spike_threshold", "1e9")
    change = faults(*bad("nan", 1, 2, 3, 4))
    state = run(tmp_path / "a", store_path, 2, *SKIP, only_nan, *change)
    assert [event["step"] for event in anomalies(tmp_path / "a")] == [1, 2]
    overrides = [("run.dir", str(tmp_path / "b")), *STEPS]
    run_ranks(train_without_updates, 2, overrides, str(store_path), [1, 2])
    assert same(state, newest_state(tmp_path / "b"))


@pytest.mark.slow
def test_skip_more_steps_in_a_row_than_the_limit_stops_the_run(
    store_path: Path, tmp_path: Path
) -> None:
    """Ten steps in a row may be skipped; the eleventh stops the run."""
    ten = faults(*bad("nan", *range(2, 22)))
    run(tmp_path / "a", store_path, 2, *SKIP, *ten)
    assert [event["step"] for event in anomalies(tmp_path / "a")] == list(range(2, 12))
    with pytest.raises(RankError, match="the 9 steps before it were skipped") as caught:
        run(tmp_path / "b", store_path, 2, *SKIP, *ten, ("resilience.max_anomalies", "9"))
    assert "in step 11" in str(caught.value)
    assert not list_checkpoints(tmp_path / "b/checkpoints")


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_skip_in_a_resumed_run_equals_an_uninterrupted_run(
    ranks: int, store_path: Path, tmp_path: Path
) -> None:
    """A run resumed after a skip skips a spike that only the saved window detects."""
    all_overrides = [*SKIP, ("checkpoint.interval", "6"), ("checkpoint.async_save", "false")]
    first = bad("nan", 6, 7, rank=0)
    full = faults(*first, *bad("corrupt", 10, 11, rank=0))
    straight = run(tmp_path / "a", store_path, ranks, *all_overrides, *full)
    assert [event["step"] for event in anomalies(tmp_path / "a")] == [6, 9]
    # Skipped values do not enter the window.
    assert all(event["median"] < 10 for event in anomalies(tmp_path / "a"))

    killed = [*first, {"site": "step", "kind": "kill", "passing": 7, "rank": 0}]
    with pytest.raises(RankError, match="SIGKILL"):
        run(tmp_path / "b", store_path, ranks, *all_overrides, *faults(*killed))
    saved = read_manifest(list_checkpoints(tmp_path / "b/checkpoints")[-1])
    assert (saved["step"], saved["samples"], saved["anomaly_state"]["in_a_row"]) == (6, 48, 1)
    extra = faults(*killed, *bad("corrupt", 3, 4, rank=0))
    resumed = run(tmp_path / "b", store_path, ranks, *all_overrides, *extra)
    assert same(resumed, straight)
    assert anomalies(tmp_path / "b") == anomalies(tmp_path / "a")
    watches = [
        read_manifest(list_checkpoints(tmp_path / name / "checkpoints")[-1])["anomaly_state"]
        for name in "ab"
    ]
    assert watches[0] == watches[1]


@pytest.mark.slow
def test_skip_window_is_restored_in_another_layout(store_path: Path, tmp_path: Path) -> None:
    all_overrides = [*SKIP, ("checkpoint.interval", "6"), ("checkpoint.async_save", "false")]
    killed = {"site": "step", "kind": "kill", "passing": 7, "rank": 0}
    with pytest.raises(RankError, match="SIGKILL"):
        run(tmp_path, store_path, 2, *all_overrides, *faults(killed))
    run(tmp_path, store_path, 1, *all_overrides, *faults(killed, *bad("corrupt", 2, 3, rank=0)))
    assert [event["step"] for event in anomalies(tmp_path)] == [8]


# --------------------------------------------------------------------------- rewind


def test_rewind_equals_a_run_without_the_samples(store_path: Path, tmp_path: Path) -> None:
    state = run(tmp_path / "a", store_path, 2, *REWIND, *faults(*bad("nan", 8, 9)))
    (event,) = anomalies(tmp_path / "a")
    assert (event["step"], event["action"], event["back_to"]) == (8, "rewind", 5)
    assert (event["first_sample"], event["last_sample"]) == (40, 63)
    assert [record["step"] for record in records(tmp_path / "a")] == list(range(1, 13))

    # Another run, cut after step 5, whose checkpoint claims 64 consumed samples.
    cut = faults({"site": "step", "kind": "kill", "passing": 6})
    with pytest.raises(RankError, match="SIGKILL"):
        run(tmp_path / "b", store_path, 2, *REWIND, *cut)
    (saved,) = list_checkpoints(tmp_path / "b/checkpoints")
    manifest = read_manifest(saved)
    assert manifest.pop("hash")
    assert manifest["samples"] == 40
    (saved / "manifest.json").write_text(manifest_text(manifest | {"samples": 64}))
    assert same(state, run(tmp_path / "b", store_path, 2, *REWIND))
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_rewind_to_the_same_checkpoint_is_limited(store_path: Path, tmp_path: Path) -> None:
    # Steps 8, 6 and 6 fail, each twice.
    change = faults(*bad("nan", *range(8, 20)))
    with pytest.raises(RankError, match="rewound 2 times to the same checkpoint"):
        run(tmp_path, store_path, 2, *REWIND, *change, ("resilience.max_anomalies", "2"))
    # The anomaly that ended the run is in the error instead.
    assert [anomaly["step"] for anomaly in anomalies(tmp_path)] == [8, 6]
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000005"]


def test_rewind_twice_to_one_checkpoint_records_both(store_path: Path, tmp_path: Path) -> None:
    # Step 8 fails twice, then step 6 twice.
    run(tmp_path, store_path, 2, *REWIND, *faults(*bad("nan", 8, 9, 10, 11)))
    result = [
        (anomaly["step"], anomaly["back_to"], anomaly["last_sample"])
        for anomaly in anomalies(tmp_path)
    ]
    assert result == [(8, 5, 63), (6, 5, 71)]
    assert [record["step"] for record in records(tmp_path)] == list(range(1, 13))


def test_rewind_without_a_checkpoint_stops_the_run(store_path: Path, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="no checkpoint after step 0 to rewind to yet"):
        run(tmp_path, store_path, 2, *REWIND, *faults(*bad("nan", 3, 4)))


# --------------------------------------------------------------------------- retry


@pytest.mark.parametrize("layout", [[], pytest.param(REPLICAS, marks=pytest.mark.slow)])
def test_transient_fault_is_reported_and_leaves_no_trace(
    layout: Overrides, store_path: Path, tmp_path: Path
) -> None:
    reference_run = run(tmp_path / "a", store_path, 2, *SKIP, *layout)
    state = run(tmp_path / "b", store_path, 2, *SKIP, *layout, *faults(*bad("flip", 8)))
    assert same(state, reference_run)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert not anomalies(tmp_path / "a")
    (event,) = anomalies(tmp_path / "b")
    assert (event["cause"], event["action"], event["ranks"]) == ("transient", "none", [1])
    assert event["step"] == 8


# --------------------------------------------------------------------------- stop


@pytest.mark.parametrize("kind", ["nan", pytest.param("corrupt", marks=pytest.mark.slow)])
def test_stop_bad_step_between_two_records_ends_the_run(
    kind: str, store_path: Path, tmp_path: Path
) -> None:
    """The update is not applied, and no later step is recorded or saved."""
    often = [("monitor.log_interval", "4"), ("checkpoint.interval", "4"), ("train.steps", "12")]
    with pytest.raises(RankError, match=r"the gradient norm is (nan|inf) in step 6"):
        run(tmp_path, store_path, 2, *often, *faults(*bad(kind, 6, factor=1e45)))
    assert [record["step"] for record in records(tmp_path)] == [1, 4]
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000004"]


# --------------------------------------------------------------------------- detector


def watch(**changes: Any) -> AnomalyDetector:
    section = {"on_anomaly": "skip", "spike_window": 16, "spike_threshold": 10.0} | changes
    return AnomalyDetector(ResilienceSection.model_validate(section), {})


def accept(watch: AnomalyDetector, values: list[float]) -> None:
    for value in values:
        assert watch.judge([value, value]) is None
        watch._accept([value, value])


def test_stop_bad_step_without_a_record_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The detector checks after at most MAX_UNCHECKED steps without a record."""
    monkeypatch.setattr(anomaly, "MAX_UNCHECKED", 5)
    stop, fine, bad = watch(on_anomaly="stop"), [1.0, 2.0], [1.0, float("inf")]

    def check(step: int, values: list[float]) -> None:
        reduced = torch.tensor(values, dtype=torch.float64)
        assert stop.check(step, StepResult(reduced, reduced, reduced)) is None

    for step in range(1, 10):
        check(step, bad if step == 8 else fine)
    with pytest.raises(AnomalyError, match="the gradient norm is inf in step 8:"):
        check(10, fine)


def test_detector_few_values_detects_only_nonfinite() -> None:
    young = watch()
    accept(young, [1.0, 1e6, 1.0, 3.0])
    assert young.judge([float("nan"), 1.0]) == (0, None, None)
    assert young.judge([1.0, float("-inf")]) == (1, None, None)


def test_detector_equal_values_do_not_make_spikes() -> None:
    still = watch()
    accept(still, [2.0] * 16)
    assert still.judge([2.05, 1.0]) is None
    assert still.judge([2.2, 2.0]) == (0, 2.0, 2.1)


def test_detector_quarter_of_outliers_does_not_hide_a_spike() -> None:
    values = [2.0 + 0.01 * (i % 5) for i in range(16)]
    wild = watch()
    accept(wild, values[:7])  # the window is too short to detect spikes
    wild._accept([50.0, 50.0])
    wild._accept([50.0, 50.0])
    accept(wild, values[7:14])
    assert wild.judge([3.0, 2.0]) is not None


def test_detector_state_round_trip_is_exact() -> None:
    one = watch()
    accept(one, [1 / 3, 0.1, 2 / 7, 0.2, 0.3, 0.25, 0.15, 1 / 9])
    other = watch()
    other.restore(json.loads(json.dumps(one.state())))
    assert other.state() == one.state()
    assert other._median_and_limit("loss") == one._median_and_limit("loss") != (None, None)


def level_changes() -> tuple[int, str]:
    """Return the number of skipped steps after a lasting change, and the last message."""
    detector = watch(max_anomalies=5)
    accept(detector, [2.0 + 0.01 * (i % 5) for i in range(16)])
    skipped = 0

    reduced = torch.tensor([3.0, 2.0], dtype=torch.float64)
    result = StepResult(reduced, reduced, reduced[1])
    try:
        while skipped < 100:
            suspicion = detector.check(skipped, result)
            assert suspicion is not None
            assert detector.classify(suspicion, result, result).action == "skip"
            skipped += 1
    except AnomalyError as error:
        return skipped, str(error)
    return skipped, ""


def test_detector_lasting_change_of_level_stops_the_run() -> None:
    ((skipped, messages),) = run_ranks(level_changes, 1)
    assert skipped == 5
    assert "the loss is 3, and the 5 steps before it were skipped" in messages
    assert "raise --resilience.spike_threshold" in messages
