"""Random jobs: the draws, the report of a failure, and the agreement of correct jobs."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.fuzz import (
    FuzzResult,
    FuzzSettings,
    Outcome,
    failure_kind,
    fuzz,
    main,
    read_log,
    shrink_failure,
    summarize,
    verify_job,
)
from tests.job_space import (
    BATCH,
    SIZES,
    RandomJob,
    candidate_values,
    draw_job,
    is_drawn,
    list_goals,
    list_techniques,
    make_case,
    needed_settings,
    technique_name,
)
from tests.verification.test_verify import (
    AGREES,
    break_a_gradient_on_rank_1,
    living_processes,
    overrides,
)
from weft.checkpoint.load import load_checkpoint
from weft.cli.main import main as weft
from weft.cli.verify_command import parse_layout
from weft.config.axes import AXES
from weft.config.errors import InvalidConfig
from weft.config.schema import flatten
from weft.planning.needs import list_keys
from weft.planning.plan import Plan
from weft.training.setup import Built
from weft.verification import verify as verify_module
from weft.verification import verify_measure as measure
from weft.verification.verify import VerifyReport, read_recipe, verify

# --------------------------------------------------------------------------- the space


def test_space_every_key_is_drawn_or_declares_that_it_is_not() -> None:
    for key in list_keys():
        is_sized = key in BATCH or key.removeprefix("model.") in SIZES
        has_values = bool(candidate_values(key)) or not is_drawn(key)
        assert is_sized or has_values, f"{key}: its type says nothing; declare the values to try"


def test_space_sets_what_a_key_needs() -> None:
    assert needed_settings("lora.alpha", "8") == {"lora.rank": "2"}
    assert needed_settings("train.simpo_gamma", "1") == {
        "train.objective": "simpo",
        "data.format": "preferences",
    }
    assert needed_settings("parallel.cp_load_balance", "documents") == {
        "parallel.cp": "2",
        "parallel.cp_method": "ring",
        "data.packing": "documents",
    }
    assert needed_settings("pipeline.overlap_dispatch", "false") == {
        "pipeline.schedule": "DualPipeV",
        "parallel.pp": "2",
        "model.kind": "moe",
        "parallel.ep": "2",
        "parallel.dp_shard": "2",
    }
    assert needed_settings("optim.lr", "1") == {}
    for key in filter(is_drawn, list_keys()):
        for text in candidate_values(key):
            assert needed_settings(key, text).keys() <= list_keys().keys()


def test_candidates_follow_from_the_type() -> None:
    assert candidate_values("parallel.cp_method") == ("allgather", "ulysses")
    assert candidate_values("parallel.sequence_parallel") == ("false",)
    assert candidate_values("parallel.gradient_sync") == ("microbatch", "step")
    assert candidate_values("optim.beta1") == ("0.45",)  # 1.35 is out of bounds
    assert candidate_values("model.tied_embeddings") == ("true", "false")  # presets differ


def test_draw_depends_on_seed_and_index_only() -> None:
    first, second_run, other = (draw_job(seed, 5, {}, 8) for seed in (3, 3, 4))
    assert first == second_run
    assert first.overrides != other.overrides


def test_draw_covers_techniques_and_layouts() -> None:
    """Draws cover every axis of the mesh and most goals, with at most 8 ranks."""
    jobs = [draw_job(1, index, {}, 8) for index in range(30)]
    remaining, pairs = 0, set()
    for job in jobs:
        names = {technique_name(key, text) for key, text in job.overrides.items()} & set(
            list_techniques()
        )
        remaining += set(job.goal) <= names
        pairs |= set(itertools.combinations(sorted(names), 2))
    assert remaining > 20
    assert len(pairs) > 250
    plans = [make_case(job.overrides, 8).plan for job in jobs]
    for axis in AXES:
        assert sum(plan.axis_sizes[axis] > 1 for plan in plans) > 1, axis
    assert all(1 <= plan.world_size <= 8 for plan in plans)
    assert sum(plan.world_size > 2 for plan in plans) > 10
    assert {plan.model.num_experts > 0 for plan in plans} == {False, True}
    assert 4 < sum(bool(job.resume) for job in jobs) < 18
    assert len(list_goals(1)) > 2000


def test_case_of_a_drawn_job_is_not_shrunk() -> None:
    """The run and the printed command have the drawn values."""
    for index in range(5):
        job = draw_job(2, index, {}, 4)
        local = flatten(make_case(job.overrides, 4).plan.job)
        read = flatten(read_recipe("demo", list(job.overrides.items())))
        for key in job.overrides:
            if key not in ("data.vocab_size", "optim.warmup_steps"):
                assert local[key] == read[key], key


# --------------------------------------------------------------------------- jobs


def break_tensor_parallel(built: Built, plan: Plan) -> None:
    if plan.tp > 1:
        break_a_gradient_on_rank_1(built, plan)


def fail_in_a_pipeline(built: Built, plan: Plan) -> None:
    if plan.pp > 1 and dist.get_rank() == 1:
        raise ValueError("this rank cannot")


def test_fuzz_fault_is_shrunk_to_a_command_that_reproduces_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--run.device cpu --parallel.tp 2 --parallel.dp_shard 1 --optim.beta1 0.45"
    job = RandomJob(0, 0, (), dict(overrides(words.split())), {}, ranks=2, steps=2)
    failure = Outcome("failed", "step 2: gradients first differ in layers.0 (0.5)")
    verified: list[RandomJob] = []

    def fail_with_tensor_parallel(job: RandomJob, corrupt: Any) -> Outcome:
        verified.append(job)
        has_failed = job.overrides.get("parallel.tp") == "2"
        reason = "step 1: gradients first differ in layers.1 (0.6)" if has_failed else ""
        return Outcome("failed" if has_failed else "agreed", reason)

    with monkeypatch.context() as patch:
        patch.setattr("tests.fuzz.verify_job", fail_with_tensor_parallel)
        result = shrink_failure(job, failure, break_tensor_parallel)
    assert result.status == "failed"
    assert result.reason.startswith("step 1: ")
    assert result.runs == len(verified) < 10
    command = shlex.split(result.command)
    assert command[:3] == ["weft", "verify", "demo"]
    assert command[command.index("--parallel.tp") + 1] == "2"
    assert command[command.index("--steps") + 1] == "1"
    assert "--optim.beta1" not in command

    reports: list[VerifyReport] = []

    def break_it(*args: Any, **kwargs: Any) -> VerifyReport:
        reports.append(verify(*args, **kwargs, corrupt=break_tensor_parallel))
        return reports[0]

    monkeypatch.setattr(verify_module, "verify", break_it)
    assert weft(command[1:]) == 1
    assert "FAILED: step 1" in capsys.readouterr().out
    reason = reports[0].reason
    assert reason.startswith(f"{AGREES}gradients first differ in layers.1.mlp.up")
    assert failure_kind(Outcome("failed", reason)) == failure_kind(failure)


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_fuzz_resumes_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has finished jobs, which do not run again; a crash has its command."""
    monkeypatch.setattr("tests.fuzz.SHRINK_RUNS", 2)
    pinned = {
        **{"parallel.pp": "2", "model.kind": "llama", "model.tied_embeddings": "false"},
        "compile.enable": "false",
    }
    settings = FuzzSettings(seed=13, ranks=2, steps=2, pinned=pinned, corrupt=fail_in_a_pipeline)
    log, messages = tmp_path / "log.jsonl", list[str]()
    first = fuzz(1, settings, log, log=messages.append)
    assert (first["crashed"], first["agreed"], first["missing"]) == (1, 0, 0)
    assert first["failures"][0]["command"].startswith("weft verify demo --steps 1 --ranks 2 ")
    assert "this rank cannot" in first["failures"][0]["reason"]
    with log.open("a") as file:
        file.write('{"seed": 13, "ind')  # as a killed process leaves it
    before = log.read_text()
    second_run = fuzz(1, settings, log)
    assert log.read_text() == before
    assert second_run["failures"] == first["failures"]
    assert len(read_log(log, settings)) == 1
    assert read_log(log, FuzzSettings(seed=7)) == []
    assert read_log(log, FuzzSettings(seed=13, ranks=2, steps=1)) == []  # draws other jobs


@pytest.mark.slow  # 24 draws
def test_random_jobs_often_have_experts_without_room() -> None:
    """Steps of such jobs are computed again."""
    pinned = {"model.kind": "moe", "parallel.ep": "2", "parallel.dp_shard": "2"}
    jobs = [draw_job(1, index, pinned, 4) for index in range(24)]
    small = [job for job in jobs if job.overrides.get("parallel.ep_capacity_factor") == "1"]
    assert len(small) > 8
    modes = [job.overrides.get("activation_checkpoint.mode") for job in small]
    assert modes.count("budget") > 2


@pytest.mark.ranks
def test_fuzz_records_steps_that_overflow() -> None:
    layout = "--parallel.dp_shard 2 --parallel.ep 2 --parallel.ep_dispatch padded --model.kind moe"
    sizes = "--model.preset toy-moe --parallel.ep_capacity_factor 1 --train.seq_len 8"
    job = RandomJob(0, 0, (), dict(overrides(f"{layout} {sizes}".split())), {}, ranks=2, steps=1)
    outcome = verify_job(job, None)
    assert (outcome.status, outcome.overflows) == ("agreed", 1)
    summary = summarize(1, [FuzzResult(job, outcome)])
    assert summary["overflowed"] == 1


@pytest.mark.slow
def test_fuzz_stops_at_ctrl_c_and_leaves_no_process(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    mark = f"weft-{time.time_ns()}"
    command = [sys.executable, "-m", "tests.fuzz", "50", "--ranks", "2"]
    command += ["--log", str(log), "--json"]
    process = subprocess.Popen(
        command, env=os.environ | {"MARK": mark}, stdout=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 100
    while not (log.exists() and log.read_text()) and time.monotonic() < end:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == 130
    result = json.loads(out)
    assert result["interrupted"]
    assert 0 < result["jobs"] - result["missing"] < 50
    assert living_processes(mark) == []


INTERRUPTED_FORK = """
import os, signal, threading, time
from pathlib import Path
from tests.fuzz import FuzzSettings, fuzz

signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()  # may receive the signal, too

def interrupt():
    if "sent" not in os.environ:
        os.environ["sent"] = "yes"
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)

os.register_at_fork(after_in_parent=interrupt)
print(fuzz(3, FuzzSettings(seed=1, ranks=2), Path("log.jsonl"))["interrupted"])
"""


@pytest.mark.slow
def test_fuzz_ctrl_c_during_a_fork_is_not_lost(tmp_path: Path) -> None:
    completed = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_FORK],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert completed.stdout == "True\n", completed.stderr


def test_fuzz_all_mistakes_are_reported_at_once() -> None:
    words = ["0", "--seed", "x", "--minutes", "0", "--steps", "0"]
    with pytest.raises(InvalidConfig) as caught:
        main(words)
    assert [error.key for error in caught.value.errors] == ["--seed", "--steps", "N", "--minutes"]
    with pytest.raises(InvalidConfig, match="needs more than 8 ranks"):
        main(["3", "--parallel.dp_shard", "9"])


# --------------------------------------------------------------------------- resuming

LAYOUT = ["--parallel.tp", "2", "--parallel.dp_shard", "1"]


def test_parse_layout_splits_at_keys_of_any_section() -> None:
    """A comma inside brackets belongs to the value."""
    pairs = [("activation_checkpoint.mode", "full"), ("pipeline.layers_per_stage", "[1,3]")]
    text = ",".join(f"{key}={value}" for key, value in [*pairs, ("parallel.dp_shard", "2")])
    assert parse_layout(text, []) == [*pairs, ("parallel.dp_shard", "2")]


@pytest.mark.ranks
@pytest.mark.slow  # some of the random jobs also resume
def test_resume_layout_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--steps",
        "2",
        "--resume-layout",
        "parallel.dp_shard=2,activation_checkpoint.mode=full",
    ]
    assert weft(["verify", "demo", *LAYOUT, *words]) == 0
    assert "resumed from a checkpoint as dp_shard 2: " in capsys.readouterr().out


@pytest.mark.ranks
def test_resume_layout_lost_optimizer_states_are_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def save_without_step(path: Path, parts: Any, optimizer: Any) -> Any:
        return load_checkpoint(path, parts, None)

    monkeypatch.setattr(
        measure, "load_checkpoint", save_without_step
    )  # before the ranks are forked
    words = ["--steps", "2", "--resume-layout", "parallel.dp_shard=2"]
    assert weft(["verify", "demo", *LAYOUT, *words]) == 1
    expected = (
        "resumed from a checkpoint as dp_shard 2: step 2: gradients match; optimizer updates "
    )
    assert f"FAILED: {expected}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["--resume-layout", "parallel.tp"], "is not KEY=VALUE"),
        (["--resume-layout", "optim.lr=1"], "changes more than the layout"),
        (["--resume-layout", "parallel.tpp=2"], "is not a known key"),
        (["--resume-layout", "parallel.tp=16"], "needs more than 8 ranks"),
        (["--resume-layout", "parallel.tp=2", "--steps", "1"], "leaves no step"),
    ],
)
def test_resume_layout_mistake_is_refused(
    words: list[str], messages: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert weft(["verify", "demo", *LAYOUT, *words]) == 2
    assert messages in capsys.readouterr().err


# --------------------------------------------------------------------------- many jobs


def check_all(count: int, seed: int, log: Path, ranks: int) -> None:
    result = fuzz(count, FuzzSettings(seed=seed, ranks=ranks), log, log=print)
    assert result["failures"] == []
    assert result["agreed"] == count


@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_two_random_jobs_agree(tmp_path: Path) -> None:
    check_all(2, 21, tmp_path / "log.jsonl", ranks=3)  # four ranks take 1.6 times as long


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_jobs_of_a_fresh_seed_agree(tmp_path: Path) -> None:
    seed = time.time_ns() % 10**9
    print(f"seed {seed}")
    check_all(200, seed, tmp_path / "log.jsonl", ranks=8)
