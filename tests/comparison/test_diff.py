"""`weft diff` names the first difference of two runs: step, layer and distance."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.commands import no_processes_left, small_command  # noqa: F401 - a fixture
from tests.harness import run_ranks
from tests.small import Overrides, small_job, train_rank
from tests.supervision.test_launcher import run
from weft.cli.main import main
from weft.comparison.diff import compare_runs
from weft.config.errors import InvalidConfig
from weft.config.writer import to_toml
from weft.monitor.event_log import note_event
from weft.training.setup import enable_determinism

# A model whose second block returns an output 1 % too large in one step.
LOCAL = """
from dataclasses import replace
import torch, torch.distributed as dist
from weft.models import FAMILIES

def family(step):
    def build(config):
        model, calls = FAMILIES["llama"].build(config), []
        def more(block, args, x):
            # Not where the planner runs it under a fake group.
            assert torch.are_deterministic_algorithms_enabled() or dist.get_backend() == "fake"
            if block.training:
                calls.append(None)
            return x * 1.01 if block.training and len(calls) == step else x
        model.layers["1"].register_forward_hook(more)
        return model
    return replace(FAMILIES["llama"], build=build)

PLAIN, PERTURBED = family(0), family(7)
"""
CHANGED: Overrides = [
    ("train.steps", "9"),
    ("debug.layer_stats_steps", "6-8"),
    ("debug.deterministic", "true"),
]


def train_deterministic(overrides: Overrides, store: str) -> None:
    enable_determinism()
    train_rank(overrides, store)


def train_in_ranks(overrides: Overrides, store: Path, directory: Path) -> None:
    run_ranks(train_deterministic, 2, overrides, str(store))
    job = small_job(*overrides)
    (directory / dict(overrides)["run.dir"] / "job.toml").write_text(to_toml(job, "demo", job))


def train_by_command(overrides: Overrides, store: Path, directory: Path) -> None:
    words = [word for key, value in overrides for word in (f"--{key}", value)]
    completed = run([*small_command(store), *words], directory)
    assert completed.returncode == 0, completed.stderr


@pytest.mark.timeout(300, method="signal")
@pytest.mark.parametrize(
    "train",
    [
        pytest.param(train_in_ranks, marks=pytest.mark.ranks),
        pytest.param(train_by_command, marks=[pytest.mark.system, pytest.mark.slow]),
    ],
)
def test_diff_perturbed_layer_is_named(
    train: Callable[[Overrides, Path, Path], None],
    store_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two deterministic runs on two ranks are bitwise equal until the perturbed step."""
    (tmp_path / "mine.py").write_text(LOCAL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for kind in ("PLAIN", "PERTURBED"):
        job = [*CHANGED, ("model.kind", f"mine:{kind}"), ("run.dir", kind)]
        train(job, store_path, tmp_path)
    a, b = tmp_path / "PLAIN", tmp_path / "PERTURBED"
    assert main(["diff", str(a), str(b)]) == 1
    output = capsys.readouterr().out
    assert output.startswith(
        "the runs first differ at step 7: the output of layers.1 in the forward pass (difference"
    )
    assert "bitwise equal until step 6\n" in output
    assert '  model.kind: "mine:PLAIN" / "mine:PERTURBED"\n' in output
    assert "--debug.layer_stats_steps" not in output  # the statistics exist
    assert main(["diff", str(a), str(b), "--tolerance", "10", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["part"] is None
    assert report["rounding"]["step"] == 7
    assert report["equal_until"] == 6
    assert main(["diff", str(a), str(a)]) == 0
    assert capsys.readouterr().out.startswith("bitwise equal: loss and gradient norm of 9")


# --------------------------------------------------------------------------- units


def make_run(
    directory: Path, losses: Mapping[int, float | None], rows: Sequence[Any] = (), job: str = ""
) -> Path:
    directory.mkdir()
    (directory / "job.toml").write_text(job)
    records = [{"step": step, "loss": loss, "grad_norm": 1.0} for step, loss in losses.items()]
    (directory / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(record)}\n" for record in records)
    )
    if rows:
        (directory / "statistics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return directory


def row(step: int, kind: str, name: str, order: int, **changes: float) -> dict[str, Any]:
    values = {"count": 4, "mean": 0.5, "rms": 1.0, "max_abs": 2.0, "nonfinite": 0}
    return {"step": step, "kind": kind, "name": name, "order": order} | values | changes


def test_diff_without_statistics_prints_the_command_that_records_them(tmp_path: Path) -> None:
    before = {10: 5.0, 20: 4.0}
    a = make_run(tmp_path / "a", before | {30: 3.0})
    b = make_run(tmp_path / "b b", before | {30: 3.1}, job="[optim]\nlr = 0.1\n")
    (a / "checkpoints" / "step-00000010").mkdir(parents=True)
    (a / "checkpoints" / "step-00000010" / "manifest.json").write_text("{}")
    result = compare_runs(a, b, 1e-4)
    assert result.part is not None
    assert result.part.step == 30
    output = str(result)
    assert output.startswith("the runs first differ at step 30: the loss (difference 3.23%)\n")
    assert "bitwise equal until step 20" in output
    assert f"weft train {a}/job.toml --run.dir {a}-again --debug.layer_stats_steps 21-30" in output
    assert f"or, in place: weft rollback {a} 10, then the command above" in output
    assert (
        f"weft train '{b}/job.toml' --run.dir '{b}-again' --debug.layer_stats_steps 21-30" in output
    )
    assert "  optim.lr: 0.0003 / 0.1" in output


def test_diff_keys_that_changed_on_resume_are_named(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", {1: 5.0, 2: 4.0, 3: 3.0}, job="[optim]\nlr = 0.1\n")
    b = make_run(tmp_path / "b", {1: 5.0, 2: 4.0, 3: 3.1}, job="[optim]\nlr = 0.2\n")
    note_event(b, "change", 2, "optim.lr 0.1 -> 0.2")
    output = str(compare_runs(a, b, 1e-4))
    assert "  B changed after step 2: optim.lr 0.1 -> 0.2\n" in output
    assert "with the values before" not in output
    note_event(b, "change", 3, "optim.lr 0.2 -> 0.2")
    output = str(compare_runs(a, b, 1e-4))
    command = f"  weft train {b}/job.toml"
    assert f"  with the values before the change after step 3:\n{command}" in output


def test_diff_rounding_is_distinguished_from_a_difference(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", {1: 5.0, 2: 4.0, 3: 3.0})
    b = make_run(tmp_path / "b", {1: 5.0, 2: 4.000004, 3: 3.0003})
    result = compare_runs(a, b, 1e-4)
    assert result.part is None
    assert str(result).startswith(
        "no difference above the tolerance of 0.0001: the largest is 1.0e-04; loss and"
    )
    assert "bitwise equal until step 1; first rounding: the loss" in str(result)
    assert "configurations and environments are equal" in str(result)
    part = compare_runs(a, b, 1e-5).part
    assert part is not None
    assert part.step == 3


def test_diff_step_without_a_loss_is_not_comparable(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", {1: 5.0, 2: None})
    assert compare_runs(a, a, 1e-4).part is None
    result = compare_runs(a, make_run(tmp_path / "b", {1: 5.0, 2: 4.0}), 1e-4)
    assert "the runs first differ at step 2: the loss (not comparable)" in str(result)
    assert '"distance": "inf"' in result.to_json()


ROWS = [
    row(5, "activation", "layers.0", 1),
    row(5, "activation", "norm", 2),
    row(5, "gradient", "layers.0.w", 1),
    row(5, "gradient", "lm_head.w", 2),
    row(5, "parameter", "layers.0.w", 1),
    row(5, "parameter", "lm_head.w", 2),
]


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        (
            {"layers.0": "activation", "norm": "activation"},
            "the output of layers.0 in the forward pass",
        ),
        # The backward pass reaches the head first.
        (
            {"layers.0.w": "gradient", "lm_head.w": "gradient"},
            "the gradient of lm_head.w; the forward",
        ),
        ({"layers.0.w": "gradient"}, "the gradient of layers.0.w; the forward pass matches"),
        (
            {"lm_head.w": "parameter"},
            "the update of lm_head.w; the forward pass and gradients match",
        ),
    ],
)
def test_diff_first_departure_is_in_order_of_computation(
    changed: dict[str, str], first: str, tmp_path: Path
) -> None:
    rest = [row | ({"rms": 1.1} if changed.get(row["name"]) == row["kind"] else {}) for row in ROWS]
    a, b = make_run(tmp_path / "a", {5: 1.0}, ROWS), make_run(tmp_path / "b", {5: 1.0}, rest)
    assert f"the runs first differ at step 5: {first}" in str(compare_runs(a, b, 1e-4))


@pytest.mark.parametrize(
    "change", [{"mean": 0.6}, {"max_abs": 2.1}, {"nonfinite": 1}, {"count": 5}]
)
def test_diff_any_statistic_that_differs_is_found(change: dict[str, float], tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", {}, [row(5, "activation", "layers.0", 1)])
    b = make_run(tmp_path / "b", {}, [row(5, "activation", "layers.0", 1, **change)])
    assert compare_runs(a, b, 1e-4).part is not None


def test_diff_earlier_departure_in_records_precedes_statistics(tmp_path: Path) -> None:
    rest = [row | {"rms": 1.1} for row in ROWS]
    a, b = make_run(tmp_path / "a", {3: 1.0}, ROWS), make_run(tmp_path / "b", {3: 1.1}, rest)
    output = str(compare_runs(a, b, 1e-4))
    assert output.startswith("the runs first differ at step 3: the loss")
    assert "--debug.layer_stats_steps 1-3" in output


def test_diff_runs_without_common_steps_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = make_run(tmp_path / "a", {1: 5.0}), make_run(tmp_path / "b", {2: 5.0})
    with pytest.raises(InvalidConfig, match="has no step in common with"):
        compare_runs(a, b, 1e-4)
    assert main(["diff", str(a), str(tmp_path)]) == 2
    assert "run_b" in capsys.readouterr().err
    (a / "environment.json").write_text("{")
    assert main(["diff", str(a), str(a)]) == 1
    assert "environment.json: cannot be read" in capsys.readouterr().err
