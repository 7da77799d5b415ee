"""The memory check before a run, and the message when memory runs out anyway."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.harness import RankError, run_ranks
from tests.small import Overrides, records, train_rank
from tests.test_extending import LOCAL
from weft.cli.main import main
from weft.config.errors import InvalidConfig
from weft.config.reader import read_job
from weft.config.schema import Job
from weft.config.schema import replace as replace_sections
from weft.estimate.memory_check import predict_run
from weft.monitor.device_memory import OTHERS, PREDICTION, memory_remedies, storage_gib
from weft.planning.devices import parse_cluster
from weft.planning.plan import Machine, Plan
from weft.planning.plan_text import cluster_machine
from weft.planning.resolve import resolve

SHORT = [("train.seq_len", "2048"), ("model.num_layers", "2")]


def planned(recipe: str, cluster: str, *overrides: tuple[str, str]) -> tuple[Job, Plan, Machine]:
    job, _, errors = read_job(recipe, list(overrides))
    assert not errors
    machine = cluster_machine(parse_cluster(cluster))
    return job, resolve(job, machine), machine


def refused(job: Job, plan: Plan, machine: Machine) -> str:
    with pytest.raises(InvalidConfig) as caught:
        predict_run(plan, machine, force=False)
    (error,) = caught.value.errors
    return str(error)


def test_predict_run_far_from_full_uses_arithmetic() -> None:
    _job, plan, machine = planned(
        "paper/llama3-8b", "1x8xH200", *SHORT, ("train.global_batch_size", "8")
    )
    expected, warning = predict_run(plan, machine, force=False)
    assert expected is not None
    assert warning == ""
    assert expected.by == "arithmetic"
    assert 0 < expected.memory_gib < 0.5 * 141
    assert expected.step_seconds is not None
    assert expected.step_seconds > 0
    assert expected.seconds is not None
    assert expected.step_seconds == pytest.approx(sum(expected.seconds.values()))
    assert expected.seconds["compute"] > 0.5 * expected.step_seconds
    assert expected.memory_gib == pytest.approx(sum(expected.categories_gib.values()))


@pytest.mark.slow
def test_predict_run_nearly_full_is_traced_and_too_large_is_refused() -> None:
    """With the suggested remedy, the run is accepted."""
    rows = [("train.global_batch_size", "1536"), ("train.microbatch_size", "48")]
    job, plan, machine = planned("paper/llama3-8b", "1x8xH100", *SHORT, *rows)
    expected, _ = predict_run(plan, machine, force=False)
    assert expected is not None
    assert expected.by == "a trace"
    rows[1] = ("train.microbatch_size", "96")
    job, plan, machine = planned("paper/llama3-8b", "1x8xH100", *SHORT, *rows)
    output = refused(job, plan, machine)
    assert output.startswith("memory does not fit: rank 0 needs ")
    assert "for activations" in output or "for temporaries" in output or "for allocator" in output
    key, value = output.split("Use --")[1].split(" (")[0].split()
    changed = planned("paper/llama3-8b", "1x8xH100", *SHORT, *rows, (key, value))
    predict_run(*changed[1:], force=False)
    forced, warning = predict_run(plan, machine, force=True)
    assert forced is not None
    assert "may run out of memory" in warning


def test_predict_run_remedy_is_for_the_ranks_of_the_run() -> None:
    """The remedy is for the ranks that weft will start."""
    rows = [("train.global_batch_size", "64"), ("train.microbatch_size", "32")]
    job, _, errors = read_job("demo", [*rows, ("run.nproc_per_node", "2")])
    assert not errors
    machine = Machine("cpu", devices=8, memory_bytes=2 * 2**30)
    plan = resolve(job, machine)
    assert plan.world_size == 2
    output = refused(job, plan, machine)
    key, value = output.split("Use --")[1].split(" (")[0].split()
    job = read_job("demo", [*rows, ("run.nproc_per_node", "2"), (key, value)])[0]
    expected, _ = predict_run(resolve(job, machine), machine, force=False)
    assert expected is not None
    assert expected.memory_gib < 1


def test_predict_run_without_a_remedy_names_none() -> None:
    job, plan, machine = planned(
        "paper/llama3-8b", "1x8xH100", *SHORT, ("train.global_batch_size", "8")
    )
    small = replace(machine, memory_bytes=2**30)
    assert refused(job, plan, small).endswith(". Use --force to start anyway.")


@pytest.mark.slow
def test_predict_run_range_of_nodes_must_fit_on_the_fewest() -> None:
    overrides = [("optim.state_dtype", "float32"), ("train.global_batch_size", "64")]
    job, plan, machine = planned(
        "paper/llama3-8b", "4x8xH100", *overrides, ("train.seq_len", "512")
    )
    less = replace(machine, memory_bytes=18 * 2**30)
    predict_run(plan, less, force=False)
    assert "rank 0 needs" in refused(job, replace(plan, node_counts=(1, 2, 4)), less)


# A fake tensor has no value, so the trace fails.
FORWARD = "        return self.out"
ODD = LOCAL.replace(FORWARD, "        assert tokens_BT.sum().item() >= 0\n" + FORWARD)


def test_predict_run_untraceable_model_is_allowed_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_model.py").write_text(ODD)
    monkeypatch.syspath_prepend(tmp_path)
    model_overrides = [("model.kind", "odd_model:FAMILY"), ("model.preset", "small")]
    model_overrides += [("data.vocab_size", "512"), ("train.seq_len", "32")]
    job, _, errors = read_job("demo", model_overrides)
    assert not errors
    machine = Machine("cpu", devices=1, world_size=1, memory_bytes=2**34)
    expected, warning = predict_run(resolve(job, machine), machine, force=False)
    assert expected is None
    assert warning.startswith("cannot predict the memory of this run: ")


# --------------------------------------------------------------------------- command


@pytest.mark.timeout(300)
def test_train_plan_that_cannot_fit_is_refused(
    tmp_path: Path,
    store_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A refused run creates no files."""
    wide = ["--model.dim", "8192", "--model.ffn_dim", "28672", "--model.num_layers", "48"]
    wide += ["--model.num_heads", "64", "--model.num_kv_heads", "8"]
    positions = ["--run.dir", "run", "--data.cache_dir", "cache", "--data.path", str(store_path)]
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            ["train", "demo", *positions, *wide, "--run.device", "cpu", "--run.nproc_per_node", "2"]
        )
        == 2
    )
    output = capsys.readouterr().err
    assert "1 problem, nothing was started:\n  memory does not fit: rank " in output
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------- in the run


def train_with_little_memory(overrides: Overrides, store: str, extra: int) -> None:
    """Train with ``extra`` more bytes of address space than now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmSize"):
            limit = int(line.split()[1]) * 1024 + extra
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    train_rank(overrides, store)


@pytest.mark.parametrize(
    ("extra", "keys", "report"),
    [
        (
            200 * 2**20,
            [("train.microbatch_size", "512"), ("train.global_batch_size", "512")],
            [
                "in step 1",
                f"less memory for {OTHERS}: --train.microbatch_size 256 or "
                "--activation_checkpoint.mode full",
            ],
        ),
        (
            2**28,
            [("model.dim", "2048"), ("model.ffn_dim", "16384")],
            ["building the model", "less memory for parameters: "],
        ),
    ],
)
def test_out_of_memory_is_explained(
    tmp_path: Path, store_path: Path, extra: int, keys: Overrides, report: list[str]
) -> None:
    (tmp_path / PREDICTION).write_text('{"memory_gib": 1.25}')
    job: Overrides = [("run.dir", str(tmp_path)), *keys]
    with pytest.raises(RankError) as caught:
        run_ranks(train_with_little_memory, 1, job, str(store_path), extra, timeout=120)
    message = str(caught.value)
    assert "OutOfMemory: out of memory: the peak of this rank is " in message
    assert "the plan predicts 1.25 GiB" in message
    for part in report:
        assert part in message


def test_records_of_a_run_have_the_predicted_memory(tmp_path: Path, store_path: Path) -> None:
    (tmp_path / PREDICTION).write_text(json.dumps({"memory_gib": 1.25, "step_seconds": None}))
    job: Overrides = [("run.dir", str(tmp_path)), ("train.steps", "2")]
    run_ranks(train_rank, 2, job, str(store_path))
    for record in records(tmp_path):
        assert record["predicted_memory_gib"] == 1.25
        assert "predicted_step_seconds" not in record


def test_gib_shared_storage_is_counted_once() -> None:
    full = torch.zeros(2**18)
    assert storage_gib([full, full[:100], full.view(2, -1)], torch.device("cpu")) == 2**20 / 2**30


def test_memory_remedies_are_possible_changes_only() -> None:
    _job, plan, _ = planned("paper/llama3-8b", "1x8xH100", ("train.microbatch_size", "1"), *SHORT)
    assert not any("microbatch" in knob for knob in memory_remedies(OTHERS, plan))
    assert "--optim.state_dtype 8bit" in memory_remedies("optimizer", plan)
    plan = replace(plan, job=replace_sections(plan.job, optim={"state_dtype": "8bit"}))
    assert "--optim.state_dtype 8bit" not in memory_remedies("optimizer", plan)
