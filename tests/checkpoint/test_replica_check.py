"""A rank whose replica differs is reported by name before anything is saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import RankError, run_ranks
from tests.monitor.test_anomaly import faults
from tests.small import Overrides, train_rank
from weft.checkpoint.manifest import list_checkpoints

# Rank 1 scales its gradient by 1.001 in step 3, too little for the detector of anomalies.
WRONG = faults({"kind": "corrupt", "passing": 3, "factor": 1.001})
STEPS: Overrides = [("model.num_layers", "1"), ("train.steps", "6"), ("checkpoint.interval", "2")]
TWO: Overrides = [("parallel.dp_replicate", "2")]


def run(directory: Path, store: Path, ranks: int, *overrides: tuple[str, str]) -> None:
    job = [("run.dir", str(directory)), *STEPS, *overrides]
    run_ranks(train_rank, ranks, job, str(store), timeout=120)


@pytest.mark.parametrize(
    ("ranks", "layout", "message"),
    [
        pytest.param(
            2,
            TWO,
            "one of ranks 0, 1 differs from its replica in model.embed_tokens.weight",
            marks=pytest.mark.slow,
        ),
        (
            3,
            [("parallel.dp_replicate", "3"), ("train.global_batch_size", "6")],
            "rank 1 differs from the other replicas in model.embed_tokens.weight",
        ),
        # Each rank has the unsharded parameters, which are not DTensors.
        pytest.param(
            2,
            [("train.world_size_invariant", "true"), ("train.microbatch_size", "1")],
            "one of ranks 0, 1 differs from its replica in model.embed_tokens.weight",
            marks=pytest.mark.slow,
        ),
        # With tensor parallelism only the norm weights are replicated on every rank.
        (2, [("parallel.tp", "2")], r"one of ranks 0, 1 differs .*\.input_layernorm\.weight"),
        pytest.param(
            4,
            [("parallel.dp_replicate", "2"), ("parallel.dp_shard", "2")],
            "one of ranks 1, 3 differs",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_replica_check_differing_copy_is_named(
    ranks: int, layout: Overrides, message: str, store_path: Path, tmp_path: Path
) -> None:
    with pytest.raises(RankError, match=message) as caught:
        run(tmp_path, store_path, ranks, *layout, *WRONG)
    assert "in step 4" in str(caught.value)
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000002"]


def test_replica_check_runs_at_its_interval(store_path: Path, tmp_path: Path) -> None:
    often = [("checkpoint.interval", "6"), ("resilience.replica_check", "3")]
    message = "one of ranks 0, 1 differs from its replica in model.embed_tokens.weight"
    with pytest.raises(RankError, match=rf"(?s){message}.*in step 3"):
        run(tmp_path, store_path, 2, *TWO, *WRONG, *often)


def test_replica_check_switched_off_reports_nothing(store_path: Path, tmp_path: Path) -> None:
    run(tmp_path, store_path, 2, *TWO, *WRONG, ("resilience.replica_check", "0"))


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, []),  # only step counts are replicated
        pytest.param(4, [*TWO, ("parallel.tp", "2")], marks=pytest.mark.slow),
        pytest.param(4, [*TWO, ("parallel.cp", "2")], marks=pytest.mark.slow),
        pytest.param(
            4,
            [("parallel.tp", "4"), ("parallel.sequence_parallel", "false")],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_replica_check_equal_copies_raise_nothing(
    ranks: int, layout: Overrides, store_path: Path, tmp_path: Path
) -> None:
    run(tmp_path, store_path, ranks, *layout, ("resilience.replica_check", "1"))
