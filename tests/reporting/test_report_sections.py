"""The report shows the prediction next to the measurements of a run."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests import commands
from tests.estimate.test_memory_check import ODD
from tests.reporting.test_forecast_charts import actions, part
from tests.small import SMALL, records
from weft.cli.main import main
from weft.config.reader import read_job
from weft.config.schema import replace
from weft.config.writer import to_toml
from weft.estimate.calibrate import replan_run
from weft.estimate.forecast import forecast
from weft.planning.devices import GIB
from weft.planning.pipeline_schedule import planned_schedule
from weft.planning.plan import Machine, Plan
from weft.planning.resolve import resolve
from weft.records.run_reader import RunReader
from weft.reporting.page import REPORT_FILE
from weft.reporting.report_sections import measured_timeline, prediction_sections
from weft.training.run_dir import write_plan

PIPELINE = [
    ("parallel.pp", "2"),
    ("model.tied_embeddings", "false"),
    ("train.microbatch_size", "4"),
    ("train.steps", "6"),
    ("monitor.log_interval", "1"),
    ("monitor.report", "true"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, store_path: Path) -> tuple[Path, str]:
    """Train a pipeline of two ranks; return the run directory and the output."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    pairs = [*SMALL, *PIPELINE, ("run.dir", str(run_dir)), ("data.path", str(store_path))]
    words = [word for key, value in pairs for word in (f"--{key}", value)]
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    command = [*commands.WEFT, "train", "demo", *words]
    completed = commands.run_weft(command, elsewhere, NO_COLOR="1")
    assert completed.returncode == 0, completed.stderr
    return run_dir, completed.stdout


def test_train_finished_run_leaves_a_report(trained: tuple[Path, str]) -> None:
    directory, output = trained
    assert f"report: {directory / REPORT_FILE}" in output
    page = (directory / REPORT_FILE).read_text()
    assert '<span class="state finished">finished</span>' in page
    assert f'id="fact-loss">{records(directory)[-1]["loss"]:.4f}<' in page
    assert "`weft report` with this run directory" in page  # six steps get no forecast


def test_report_predicted_memory_is_of_the_runs_plan(
    trained: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    directory, _ = trained
    assert main(["report", str(directory)]) == 0
    assert capsys.readouterr().out == f"{directory / REPORT_FILE}\n"
    page = (directory / REPORT_FILE).read_text()
    _job, plan, machine = replan_run(directory, "run")
    assert (plan.pp, plan.world_size) == (2, 2)
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    assert machine.memory_bytes == pytest.approx(pages * page_bytes)
    prediction = forecast(plan, machine, None)
    measured = records(directory)[-1]["memory_peak_gib"]
    predicted = prediction.recorded_bytes / GIB
    row = "".join(
        f'<td class="number">{text}</td>'
        for text in (f"{predicted:.2f}", f"{measured:.2f}", f"{predicted / measured - 1:+.1%}")
    )
    assert f'<th scope="row">memory of the fullest rank, GiB</th>{row}' in page
    assert "step time, s</th>" not in page  # a CPU without calibration
    assert "weft plan --calibrate" in page
    for chart in ("memory", "ranks"):
        assert f'id="{chart}"' in page
    assert 'class="limit measured"' in page


def spans(plan: Plan, steps: list[int], directory: Path, cut: int = 0) -> None:
    """Write spans: action n of rank r begins at 1000 step + 10 n + r milliseconds."""
    (directory / "spans").mkdir(exist_ok=True)
    for rank, order in planned_schedule(plan).items():
        events: list[dict[str, Any]] = []
        for step in steps:
            events.append({"name": "waiting for data", "ph": "X", "ts": 0, "args": {"step": step}})
            for n, (stage, kind, microbatch) in enumerate(order):
                args = {"step": step, "stage": stage, "kind": kind, "microbatch": microbatch}
                ts = 1_700_000_000_000_000 + 1_000_000 * step + 10_000 * n + 1000 * rank
                events.append({"name": "", "ph": "X", "ts": ts, "dur": 5000, "args": args})
        text = "[\n" + ",\n".join(json.dumps(event) for event in events)
        (directory / "spans" / f"rank-{rank}.json").write_text(text[: len(text) - cut * rank])


def sections_of(*directories: Path) -> dict[str, dict[str, Any]]:
    """Return the sections of runs by heading."""
    sections = prediction_sections([RunReader(directory) for directory in directories])
    return {section["heading"]: section for section in sections}


def test_timeline_is_of_the_last_complete_step(trained: tuple[Path, str]) -> None:
    directory, _ = trained
    _, plan, _ = replan_run(directory, "run")
    # The run recorded the actions of each rank in order.
    result = measured_timeline(directory, plan)
    assert result is not None
    assert result[0] == 6
    for rank, order in planned_schedule(plan).items():
        spans_of_rank = sorted(
            (s for s in result[1] if s.rank == rank), key=lambda span: span.start
        )
        assert [span[1:4] for span in spans_of_rank] == [tuple(action) for action in order]
        assert all(a.end <= b.start for a, b in itertools.pairwise(spans_of_rank))
    # Step 3 was repeated after a failure, and rank 1's span file is truncated in step 6.
    spans(plan, [1, 2, 3, 3, 4, 5, 6], directory, cut=200)
    result = measured_timeline(directory, plan)
    assert result is not None
    step, drawn = result
    assert step == 5
    table = planned_schedule(plan)
    expected = {
        (rank, *action): pytest.approx((0.01 * n + 0.001 * rank, 0.01 * n + 0.001 * rank + 0.005))
        for rank, order in table.items()
        for n, action in enumerate(order)
    }
    assert {s[:4]: s[4:] for s in drawn} == expected
    sections = sections_of(directory)
    boxes = actions(part(sections["Pipeline schedule, measured in step 5"]))
    assert len(boxes) == sum(map(len, table.values()))
    (directory / "spans" / "rank-1.json").unlink()
    assert measured_timeline(directory, plan) is None


def test_sections_profile_is_averaged_over_ranks(trained: tuple[Path, str]) -> None:
    directory, _ = trained
    for steps, compute in (("2-3", 0.1), ("12-13", 0.3)):
        rank_traces = [
            {"rank": 0, "steps": 2, "seconds": {"compute": compute, "pp": 0.05}},
            {"rank": 1, "steps": 2, "seconds": {"compute": 0.1, "host": 0.05}},
            {"rank": 2, "error": "no trace"},
        ]
        (directory / "traces" / f"step-{steps}").mkdir(parents=True)
        summary = directory / "traces" / f"step-{steps}" / "summary.json"
        summary.write_text(json.dumps({"ranks": rank_traces, "predicted": None}))
    section = sections_of(directory)["Time breakdown of a step, measured: step-12-13"]
    assert "Of 250 ms, 80.0% is compute" in section["parts"][0]["text"]
    texts = [box["text"] for box in part(section)["boxes"]]
    assert "pp: exposed communication: 25.0 ms, 10.0%" in texts
    assert "host: the device waits for kernel launches: 25.0 ms, 10.0%" in texts


def test_sections_without_a_forecast_give_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_of_mine.py").write_text(ODD)
    monkeypatch.syspath_prepend(tmp_path)
    spans_of_rank = [("model.kind", "odd_of_mine:FAMILY"), ("model.preset", "small")]
    job, base, errors = read_job("demo", [*spans_of_rank, ("train.seq_len", "32")])
    job = replace(job, data={"vocab_size": 512})
    assert not errors
    run_dir = tmp_path / "run"
    write_plan(run_dir, resolve(job, Machine("cpu", devices=1, world_size=1)))
    (run_dir / "job.toml").write_text(to_toml(job, "demo", base))
    ((paragraph,),) = (section["parts"] for section in sections_of(run_dir).values())
    assert paragraph["text"].startswith("This run cannot be predicted: ")
    missing = (run_dir / "job.toml").read_text().replace("odd_of_mine", "gone_by_now")
    (run_dir / "job.toml").write_text(missing)
    ((paragraph,),) = (section["parts"] for section in sections_of(run_dir).values())
    start = 'This run cannot be planned again: model.kind="gone_by_now:FAMILY"'
    assert start in paragraph["text"]


def test_sections_of_several_runs_are_one_table(trained: tuple[Path, str]) -> None:
    directory, _ = trained
    ((heading, section),) = sections_of(directory, directory).items()
    assert heading == "Predicted and measured"
    labels = [row[1] for row in section["parts"][0]["rows"]]
    assert labels.count("memory of the fullest rank, GiB") == 2
