"""Complete runs in each kind of layout, and runs that change layouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import RankError, run_ranks
from tests.layouts import parse
from tests.monitor.test_chaos import read_notes, train_until_killed
from tests.small import Overrides, newest_state, records, train_rank
from weft.checkpoint.manifest import checkpoint_step, list_checkpoints, read_manifest

MODEL: Overrides = [
    ("model.num_layers", "4"),
    ("model.tied_embeddings", "false"),
    ("data.packing", "documents"),
    ("train.microbatch_size", "2"),
    ("train.eval_interval", "2"),
    ("train.steps", "4"),
    ("checkpoint.interval", "2"),
    ("monitor.log_interval", "1"),
]


def run(layout: str, directory: Path, store: Path, steps: int = 4) -> list[tuple[float, ...]]:
    """Train in a layout; return loss, gradient norm and validation loss of each step."""
    ranks, overrides = parse(layout)
    steps_too = [("run.dir", str(directory)), ("train.steps", str(steps))]
    run_ranks(train_rank, ranks, MODEL + overrides + steps_too, str(store), timeout=180)
    return [(r["loss"], r["grad_norm"], r.get("eval_loss", 0.0)) for r in records(directory)]


@pytest.fixture(scope="module")
def one_process(store_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("one")
    run("", directory, store_path)
    return directory


def expect(result: list[tuple[float, ...]], directory: Path) -> None:
    """Check that the records of four steps equal those of one process."""
    expected = [(r["loss"], r["grad_norm"], r.get("eval_loss", 0.0)) for r in records(directory)]
    assert len(result) == len(expected) == 4
    for ours, theirs in zip(result, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5)
    assert [step for step, item in enumerate(result, 1) if item[2]] == [2, 4]


# The last stage is on the last rank, or on rank 0 with a V schedule.  6 evaluation rows do not
# fill the microbatches; 8 rows in microbatches of 3 leave a last one of 2.
LAYOUTS = [
    "pp2 pipeline.schedule=DualPipeV",
    "pp2 train.microbatch_size=3",
    *(
        pytest.param(layout, marks=pytest.mark.slow)  # the resumed run below has their axes
        for layout in ("tp2", "pp2", "cp2 cp_method=allgather", "dp_shard2 tp2")
    ),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_run_records_equal_one_process(
    layout: str, one_process: Path, store_path: Path, tmp_path: Path
) -> None:
    """Rank 0 records loss, norm and validation loss, also if another rank has the last stage."""
    expect(run(layout, tmp_path, store_path), one_process)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "pp2 pipeline.schedule=Interleaved1F1B",
        "pp2 pipeline.schedule=LoopedBFS",
        "pp2 pipeline.schedule=InterleavedZeroBubble",
        "dp_shard2 tp2 pp2 pipeline.schedule=ZBVZeroBubble",
        "tp2 pp2 cp2",
        "dp_replicate2 dp_shard2 tp2 gradient_sync=microbatch",
        "dp_shard2 pp2 cpu_offload=true",
    ],
)
def test_run_of_more_ranks_records_equal_one_process(
    layout: str, one_process: Path, store_path: Path, tmp_path: Path
) -> None:
    expect(run(layout, tmp_path, store_path), one_process)


# --------------------------------------------------------------------------- changing layouts

CHAIN = [
    "dp_shard3",
    "",
    "tp2 pp2 pipeline.schedule=Interleaved1F1B",
    "dp_replicate2 cp2",
]
LONGER_CHAIN = ["dp_shard3", "pp2", "", "dp_shard2 tp2", *CHAIN[2:]]


def train_noting(layout: str, directory: Path, store: Path, *extra: tuple[str, str]) -> None:
    """Train and record the rows that are trained on."""
    ranks, overrides = parse(layout)
    job = [*MODEL, ("train.global_batch_size", "12"), *overrides, *extra]
    job += [("run.dir", str(directory / "run"))]
    call = (job, str(store), [], 0.0, str(directory / "seen"))
    run_ranks(train_until_killed, ranks, *call, timeout=180)


@pytest.mark.parametrize(
    "chain",
    [
        pytest.param(CHAIN, id="chain"),
        pytest.param(LONGER_CHAIN, id="longer", marks=pytest.mark.slow),
    ],
)
def test_run_resumed_through_many_layouts_equals_one_process(
    chain: list[str], store_path: Path, tmp_path: Path
) -> None:
    """Each layout trains two steps and fails in the next; the result equals one process."""
    single, changing = tmp_path / "alone", tmp_path / "changing"
    single.mkdir()
    changing.mkdir()
    steps = ("train.steps", str(2 * len(chain)))
    train_noting("", single, store_path, steps)
    for turn, layout in enumerate(chain[:-1], 1):
        fault = ", ".join(['{site = "step", passing = 3, kind = "raise"}'] * turn)
        with pytest.raises(RankError, match="injected fault at step"):
            train_noting(layout, changing, store_path, steps, ("resilience.faults", f"[{fault}]"))
        newest = list_checkpoints(changing / "run/checkpoints")[-1]
        assert checkpoint_step(newest) == 2 * turn
        assert read_manifest(newest)["samples"] == 12 * 2 * turn
    faults = [("resilience.faults", f"[{fault}]")]  # all faults have fired
    train_noting(chain[-1], changing, store_path, steps, *faults)

    assert read_notes(changing / "seen") == read_notes(single / "seen")
    assert set(read_notes(single / "seen")) == set(range(12 * 2 * len(chain)))
    ours, theirs = records(changing / "run"), records(single / "run")
    assert [r["step"] for r in ours] == list(range(1, 2 * len(chain) + 1))
    for a, b in zip(ours, theirs, strict=True):
        assert (a["tokens"], a["lr"]) == (b["tokens"], b["lr"])
        for kind in ("loss", "grad_norm", "eval_loss"):
            assert a.get(kind, 0) == pytest.approx(b.get(kind, 0), rel=2e-4), a["step"]
    final, expected = newest_state(changing / "run"), newest_state(single / "run")
    assert final.keys() == expected.keys()
    for name in (name for name in expected if name.startswith("model.")):
        # If the second moment is near zero, rounding decides the direction of the step.
        assert (final[name] - expected[name]).abs().max() < 5e-3, name
