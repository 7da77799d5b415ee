"""Variants that are only predicted, and when a predicted difference is claimed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.test_cli import rejected
from weft.cli.main import main
from weft.comparison import planned_comparison as planning
from weft.comparison.planned_comparison import PlannedVariant, make_verdict
from weft.planning.plan import Machine, Plan


def planned(
    label: str, seconds: float, caveats: tuple[str, ...] = (), fits: bool = True
) -> PlannedVariant:
    plan: Any = SimpleNamespace(tokens_per_step=1000, world_size=8)
    prediction: Any = SimpleNamespace(
        plan=plan,
        step_seconds=seconds,
        fits=fits,
        caveats=caveats,
        error=0.5 if caveats else 0.25,
        bottlenecks=["memory: 90.0 GiB of 80.0"],
    )
    return PlannedVariant(label, plan, prediction, "")


def test_verdict_small_predicted_difference_is_undecided() -> None:
    lines = make_verdict(
        [
            planned("A", 1.0),
            planned("B", 0.9),
            planned("C", 0.8),
            planned("D", 1.3),
            planned("E", 0.7, caveats=("cp",)),
            planned("F", 0.5, caveats=("cp",)),
            planned("G", 0.5, fits=False),
        ]
    )
    assert lines[0] == "G does not fit: memory: 90.0 GiB of 80.0"
    assert "B is predicted 11.1 % faster than A, which is inconclusive (31 % of" in lines[1]
    assert lines[2] == (
        "C is predicted 25.0 % faster than A (95 % of such predictions had the right direction; "
        "90 % were within -3 to +61 %)"
    )
    assert lines[3].startswith("D is predicted 23.1 % slower than A (95 % of such")
    assert "which is inconclusive, with low confidence (error 50 %)" in lines[4]
    assert lines[5].endswith("100.0 % faster than A with low confidence (error 50 %)")


@pytest.mark.slow
def test_compare_plan_only_layouts_of_8b_are_ranked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Plans for two servers are made on this machine."""
    command = [
        "compare",
        "paper/llama3-8b",
        "--plan-only",
        "--cluster",
        "2x8xh100",
        "--price",
        "2.5",
    ]
    command += ["--vary", "parallel.tp=1,3,8", "--vary", "activation_checkpoint.mode=none,full"]
    command += ["--train.seq_len", "4096", "--train.global_batch_size", "64", "--json"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    result = json.loads(text)
    assert json.loads((tmp_path / "out/comparison.json").read_text()) == result
    variants = {variant["label"]: variant for variant in result["variants"]}
    assert len(variants) == 6
    for activation_checkpoint in ("none", "full"):
        refused = variants[f"tp=3, activation_checkpoint={activation_checkpoint}"]
        assert refused["forecast"] is None
        assert "does not divide" in refused["reason"]
    one, full = (
        variants[f"tp=1, activation_checkpoint={kind}"]["forecast"] for kind in ("none", "full")
    )
    assert one["fits"] is full["fits"] is True
    assert one["peak_memory_gib"] > 2 * full["peak_memory_gib"]
    wide = variants["tp=8, activation_checkpoint=none"]
    assert wide["forecast"]["step_seconds"] > 1.15 * one["step_seconds"]
    slower = next(
        line for line in result["verdict"] if line.startswith("tp=8, activation_checkpoint=none")
    )
    assert "slower than tp=1, activation_checkpoint=none (95 % of such" in slower
    speed = wide["forecast"]["tokens_per_second_per_device"]
    hours = 1e9 / speed / 3600
    assert wide["device_hours_per_billion_tokens"] == pytest.approx(hours)
    assert wide["cost_per_billion_tokens"] == pytest.approx(2.5 * hours)


PLANNED = ["compare", "demo", "--plan-only", "--vary", "parallel.dp_shard=1,2"]


def test_compare_plan_only_replaces_only_another_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """--plan-only must not overwrite the measurements of a comparison of runs."""
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "comparison.json").write_text('{"compared": [], "ended": [], "looks": []}')
    (line,) = rejected(capsys, *PLANNED, "--out", str(runs))
    assert "holds a comparison of runs, which --plan-only would overwrite" in line
    letters = tmp_path / "letters"
    letters.mkdir()
    (letters / "report.html").write_text("dear")
    lines = rejected(capsys, *PLANNED, "--out", str(letters), "--train.stepz", "3")
    assert "is neither empty nor the directory of a comparison" in lines[0]
    assert lines[1].startswith("train.stepz")
    assert (letters / "report.html").read_text() == "dear"
    (line,) = rejected(capsys, *PLANNED, "--out", str(letters / "report.html"))
    assert "is neither empty nor the directory of a comparison" in line


def test_compare_plans_variants_of_different_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal plans on different machines are different variants."""
    labels = []

    def note(label: str, plan: Plan, machine: Machine) -> PlannedVariant:
        labels.append((label, machine.device_name))
        return PlannedVariant(label, None, None, "not asked")

    monkeypatch.setattr(planning, "_predict", note)
    vary = [("run.cluster", ["1x8xH100", "1x8xH200"])]
    planning.compare_plans(["llama3-8b"], vary, [], [], None, None, None, lambda line: None)
    assert ["H100" in labels[0][1], "H200" in labels[1][1]] == [True, True]


def test_compare_plan_only_unwritable_directory_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(self: Path, *args: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert main([*PLANNED, "--out", str(tmp_path / "out")]) == 1
    assert "out: cannot be written: Permission denied" in capsys.readouterr().err


def test_compare_plan_only_unknown_cluster_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    vary = ["--vary", "activation_checkpoint.mode=none,full"]
    lines = rejected(capsys, "compare", "llama3-8b", *vary, "--plan-only", "--cluster", "2x8xh999")
    assert len(lines) == 1
    assert lines[0].startswith('--cluster="2x8xh999"')
