"""`weft train` resumes one run with a different layout each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.layouts import parse
from tests.small import records
from tests.supervision.test_launcher import run

CHAIN = ["dp_shard3", "pp2", "", "dp_shard2 tp2"]


@pytest.mark.slow
@pytest.mark.timeout(900, method="signal")
def test_train_one_layout_after_another_resumes(arguments: list[str], tmp_path: Path) -> None:
    extra = [
        "--train.global_batch_size",
        "12",
        "--train.microbatch_size",
        "2",
        "--data.packing",
        "documents",
    ]
    extra += ["--model.tied_embeddings", "false", "--optim.decay_fraction", "0"]

    def train(layout: str, steps: int, *rest: str) -> str:
        ranks, overrides = parse(layout)
        words = [word for name, value in overrides for word in (f"--{name}", value)]
        words += ["--run.nproc_per_node", str(ranks), "--train.steps", str(steps), *rest]
        completed = run([*arguments, *extra, *words], tmp_path)
        assert completed.returncode == 0, completed.stderr
        return completed.stdout

    for turn, layout in enumerate(CHAIN):
        output = train(layout, 3 * turn + 3)
        assert ("resuming from" in output) == (turn > 0)
    train("", 3 * len(CHAIN), "--run.dir", "alone")
    ours, theirs = records(tmp_path / "run"), records(tmp_path / "alone")
    assert [r["step"] for r in ours] == list(range(1, 3 * len(CHAIN) + 1))
    for a, b in zip(ours, theirs, strict=True):
        assert (a["tokens"], a["lr"]) == (b["tokens"], b["lr"])
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-4), a["step"]
