"""The GPU check: its stages, the parser of their results, the page, and real runs.

The run directories in ``recorded_runs`` are of tiny models on two CPU ranks (torch 2.13), cut to
the files that are read; ``planned.json`` is the output of ``weft plan --json`` for the same run.
Results of GPUs are written by hand.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpu_check import (
    GPUCheck,
    judge,
    main,
    parse_plan,
    run_command,
    run_stages,
)
from benchmarks.gpu_check_page import (
    build_document,
    compute_effects,
    format_number,
    format_page,
    format_row,
)
from benchmarks.gpu_check_results import (
    Row,
    StageResult,
    compare_losses,
    device_rows,
    divide,
    read_checkpoints,
    read_hang,
    read_loss,
    read_profile,
    read_resume,
    read_speed,
    read_test_counts,
)
from benchmarks.gpu_check_stages import (
    EFFECTS,
    GPU_CHECK,
    GPU_TESTS,
    SIZES,
    STAGES,
    Program,
    Schedule,
    Stage,
    count_ranks,
    resolve_keys,
)
from benchmarks.h200 import H200, INSTALL, TITAN_PACKAGES, read_torchtitan
from benchmarks.h200 import MACHINE_SECONDS as H200_MACHINE_SECONDS
from benchmarks.node import MACHINE_SECONDS as NODE_MACHINE_SECONDS
from benchmarks.node import NODE, read_splits
from tests.commands import processes_in
from tests.doctor.test_node_checks import STATE
from weft.config.errors import InvalidConfig, WeftError
from weft.config.exit_statuses import FAILED, INTERRUPTED, USAGE_ERROR
from weft.config.files import read_json
from weft.doctor.node_facts import DeviceMeasurements, Directory, Facts, bad, ok
from weft.estimate.cost import device_spec
from weft.estimate.forecast import forecast
from weft.monitor.nvml import GpuState
from weft.planning.plan_text import plan_recipe
from weft.preparation.job_checks import check_data_is_named
from weft.training.machine import detect_machine

pytestmark = pytest.mark.timeout(300, method="signal")

CHECK = [sys.executable, "-m", "benchmarks.gpu_check"]
CLONE = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(CLONE)}
RECORDED = Path(__file__).parent / "recorded_runs"
DISK = Directory("run.dir", "/runs", write=1e8, read=2e8)
TINY = (
    "run.nproc_per_node=1 model.num_layers=2 model.dim=32 model.num_heads=4 model.num_kv_heads=2 "
    "model.ffn_dim=64 train.seq_len=32 train.global_batch_size=2"
)


def values(rows: list[Row]) -> dict[str, tuple[float | None, float | None]]:
    return {row.quantity: (row.measured, row.planned) for row in rows}


def read(name: str, function: Any) -> dict[str, tuple[float | None, float | None]]:
    return values(function(RECORDED / name, read_json(RECORDED / name / "planned.json"), DISK))


# --------------------------------------------------------------------------- stages as data


@pytest.mark.parametrize(
    ("schedule", "cluster"),
    [
        *((GPU_CHECK, name) for name in ("8xH100", "2xH100", "1xH100", "3xA100-80GB", "4xB200")),
        (H200, "1xH200"),
        (NODE, "8xH100"),
        (NODE, "8xB200"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_stages_every_run_has_a_plan_on_gpus(schedule: Schedule, cluster: str) -> None:
    """All keys are valid, only what a device lacks is refused, and no job runs twice."""
    devices = int(cluster[0])
    jobs: list[Any] = []
    for stage in schedule.stages:
        if isinstance(stage, Program) or devices < stage.min_devices:
            continue
        ranks = count_ranks(stage, devices)
        keys = resolve_keys(stage, stage.sizes[0], ranks)
        plan, _ = plan_recipe(
            stage.recipe, [*keys.items()], [], f"1x{ranks}{cluster[1:]}", detect_machine
        )
        assert plan.world_size == ranks
        assert not check_data_is_named(plan), stage.name  # `weft train` checks more than the plan
        assert stage.num_records < plan.num_steps + 1
        assert not any("has no effect" in warning for warning in plan.warnings), stage.name
        assert plan.job not in jobs, stage.name
        jobs.append(plan.job)


@pytest.mark.parametrize("schedule", [H200, NODE], ids=lambda schedule: schedule.name)
def test_stages_of_a_cpu_have_a_plan(schedule: Schedule) -> None:
    for stage in schedule.stages:
        if isinstance(stage, Stage) and not stage.needs_gpu:
            keys = resolve_keys(stage, stage.cpu_sizes[0], count_ranks(stage, 2))
            pairs = [*keys.items(), ("run.device", "cpu")]
            plan, _ = plan_recipe(stage.recipe, pairs, [], "", detect_machine)
            assert plan.device == "cpu", stage.name


@pytest.mark.parametrize(
    ("schedule", "machine"),
    [(H200, H200_MACHINE_SECONDS), (NODE, NODE_MACHINE_SECONDS)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_schedules_budgets_fit_the_time(schedule: Schedule, machine: float) -> None:
    """Every stage has its time, also if each of the earlier ones uses up its own."""
    assert machine + sum(stage.seconds for stage in schedule.stages) <= schedule.seconds


def test_stages_are_compared_with_earlier_ones_of_the_same_ranks_and_sizes() -> None:
    for schedule in (GPU_CHECK, H200, NODE):
        earlier: dict[str, Any] = {}
        for stage in schedule.stages:
            if isinstance(stage, Stage) and stage.reference:
                reference = earlier[stage.reference]
                assert stage.tolerance > 0
                assert reference.sizes == stage.sizes
                assert reference.cpu_sizes == stage.cpu_sizes
                assert "ep=" in stage.keys or count_ranks(reference, 8) == count_ranks(stage, 8)
                assert reference.num_records == (stage.num_records or 20)
            earlier[stage.name] = stage


def test_loss_stages_are_compiled_for_each_recipe_and_experts() -> None:
    losses = [s for s in STAGES if isinstance(s, Stage) and s.name.startswith("loss, ")]
    keys = [resolve_keys(stage, stage.sizes[0], 1) for stage in losses]
    assert all(each["compile.enable"] == "true" for each in keys)
    recipes = [
        (each.get("model.kind", "llama"), each.get("precision.float8", "none")) for each in keys
    ]
    dense = [("llama", name) for name in ("none", "rowwise", "tensorwise", "mxfp8")]
    assert recipes == [*dense, ("moe", "none"), ("moe", "tensorwise")]


@pytest.mark.parametrize(("remaining", "limit"), [(9.0, 2.0), (1.5, 1.5)])
def test_run_stages_kills_after_twice_the_budget_or_at_the_end_of_the_check(
    remaining: float, limit: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.gpu_check.MIN_STAGE_SECONDS", 1.0)
    words = "-c __import__('time').sleep(60)"
    stages = [Program("sleeps", words, lambda output: [], words, seconds=1.0)]
    check = check_in(tmp_path, device="cuda", deadline=time.monotonic() + remaining)
    (result,) = run_stages(check, stages)
    assert result.status == "timed out"
    assert limit <= result.seconds < limit + 5


@pytest.mark.parametrize(
    ("losses", "expected", "window", "difference"),
    [
        ([2.0, 1.0], [2.0, 1.0], 1, 0.0),
        ([2.0, 1.1], [2.0, 1.0], 1, 0.1),
        ([2.0, 0.9], [2.0, 1.0], 1, 0.1),
        ([2.1, 1.9, 1.0, 1.0], [2.0, 2.0, 1.0, 1.0], 2, 0.0),  # the mean is the same
        ([2.0], [2.0, 1.0], 1, None),  # it ended early
        ([2.0, math.nan], [2.0, 1.0], 1, None),
        ([math.inf, 1.0], [2.0, 1.0], 2, None),
        ([2.0, 1.0, 9.0], [2.0, 1.0], 1, 0.0),  # it may have more
        ([], [], 1, None),
    ],
)
def test_compare_losses(
    losses: list[float], expected: list[float], window: int, difference: float | None
) -> None:
    found = compare_losses(losses, expected, window)
    assert found == (None if difference is None else pytest.approx(difference))


def test_read_torchtitan_skips_the_first_steps_and_colors() -> None:
    lines = [
        f"[titan] x - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss:  8.2  "
        f"\x1b[38;2;180;60;0mgrad_norm:  0.7  \x1b[38;2;54;234;195mmemory: {memory}GiB(5.00%)  "
        f"\x1b[34mtps: {tokens:,}  \x1b[36mtflops: 1.00  \x1b[35mmfu: 1.00%\x1b[39m"
        for step, memory, tokens in [(1, 40.0, 9), (2, 41.0, 9), (3, 42.5, 5_000), (4, 42.5, 5_100)]
    ]
    rows = values(read_torchtitan("\n".join(lines)))
    assert rows == {"tokens/s per device": (5_050, None), "memory, GiB": (42.5, None)}
    assert values(read_torchtitan("a crash")) == {"tokens/s per device": (None, None)}
    on_cpu = read_torchtitan("step:  3  loss: 8.2  memory: -0.00GiB(-0.00%)  tps: 700")
    assert values(on_cpu) == {"tokens/s per device": (700, None), "memory, GiB": (None, None)}


def test_wheels_for_gpus_have_all_that_weft_the_tests_and_torchtitan_import() -> None:
    """For a machine without a network; PyTorch is there, and brings jinja2."""
    project = tomllib.loads((CLONE / "pyproject.toml").read_text("utf-8"))["project"]
    words = [*project["dependencies"], *INSTALL.split()[3:], *GPU_TESTS.install.split()[2:]]
    needed = {canonical_name(word) for word in (*words, *TITAN_PACKAGES, "torchao")}
    lines = (CLONE / "benchmarks/gpu-wheels.txt").read_text("utf-8").splitlines()
    assert needed - {canonical_name(line) for line in lines} == {"torch", "jinja2"}
    assert {word for word in INSTALL.split() if "==" in word} <= {*lines}


def canonical_name(requirement: str) -> str:
    """Return the name of a package without its version."""
    return re.split("[<>=]", requirement)[0].replace("_", "-").lower()


def test_read_splits_and_hang(tmp_path: Path) -> None:
    assert read_splits("4 splits, the slowest in 38.1 ms\n") == [Row("slowest split, ms", 38.1)]
    assert read_splits("") == [Row("slowest split, ms", None)]
    text = "rank 1 is missing: it is stopped (SIGSTOP) in step 15, waiting for data; ..."
    (tmp_path / "run.log").write_text(text)
    assert read_hang(tmp_path / "run", {}, DISK) == [Row("rank named as stopped", 1.0)]
    (tmp_path / "run.log").write_text("the run hangs")
    assert read_hang(tmp_path / "run", {}, DISK) == [Row("rank named as stopped", None)]


@pytest.mark.parametrize(
    ("cluster", "size"),
    [
        ("8xH100", SIZES[0]),
        pytest.param("1xH100", SIZES[2], marks=pytest.mark.slow),
        pytest.param("1xRTX-4090", SIZES[5], marks=pytest.mark.slow),
    ],
)
def test_sizes_fit_devices_with_a_margin(cluster: str, size: str) -> None:
    stage = Stage("eager", "parallel.dp_shard={ranks}")
    keys = resolve_keys(stage, size, int(cluster[0]))
    plan, machine = plan_recipe("demo", [*keys.items()], [], cluster, detect_machine)
    prediction = forecast(plan, machine, device_spec(plan, machine))
    assert prediction.capacity_bytes is not None
    assert prediction.needed_bytes < 0.9 * prediction.capacity_bytes


def test_stages_names_differ_and_effects_name_stages() -> None:
    for schedule in (GPU_CHECK, H200, NODE):
        names = [stage.name for stage in schedule.stages]
        assert len(set(names)) == len(names)
        assert {name for pair in schedule.effects for name in pair} <= {*names}
        directories = [re.sub(r"\W+", "-", name) for name in names]
        assert len(set(directories)) == len(names)


def test_count_ranks_of_odd_numbers_of_devices() -> None:
    counts = {
        ranks: [count_ranks(Stage("", "", ranks=ranks), n) for n in range(1, 9)]
        for ranks in ("one", "all", "power")
    }
    assert counts["one"] == [1] * 8
    assert counts["all"] == [*range(1, 9)]
    assert counts["power"] == [1, 2, 2, 4, 4, 4, 4, 8]


# --------------------------------------------------------------------------- recorded results


def test_read_speed_of_a_recorded_run_is_the_median_after_warm_up() -> None:
    rows = read("speed", read_speed)
    records = [
        json.loads(line) for line in (RECORDED / "speed" / "metrics.jsonl").read_text().splitlines()
    ]
    rates = sorted(record["tokens_per_second_per_device"] for record in records[2:])
    assert len(rates) == 10
    measured, planned = rows["tokens/s per device"]
    assert measured == pytest.approx((rates[4] + rates[5]) / 2)
    assert planned is None  # of a CPU
    memory, predicted = rows["memory, GiB"]
    assert memory == records[-1]["memory_peak_gib"]
    assert predicted == pytest.approx(0.44, abs=0.05)


def test_read_profile_of_a_recorded_run_is_the_mean_over_ranks() -> None:
    rows = read("speed", read_speed)
    exposed = rows["exposed communication of dp_shard, ms"]
    assert exposed == (pytest.approx((44.69492578125 + 29.0004482421875) / 2), None)
    assert rows["compute, ms"][0] == pytest.approx(31.42, abs=0.01)


def test_read_speed_of_a_gpu_compares_what_the_allocator_holds(tmp_path: Path) -> None:
    plan = {
        "device": "cuda",
        "peak_memory_gib": 60.0,
        "memory_gib": {"outside": 1.25, "parameters": 5.0},
        "mfu": 0.44,
        "tokens_per_second_per_device": 25_000.0,
        "seconds": {"compute": 0.6, "dp_shard": 0.01},
    }
    records = [
        {
            "step": step,
            "tokens_per_second_per_device": rate,
            "mfu": rate / 60_000,
            "memory_peak_gib": 57.0,
            "time_breakdown": {"restarting": 0.0},
        }
        for step, rate in enumerate([100, 20_000, 24_000, 24_000, 24_000], 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in records))
    shutil.copytree(RECORDED / "speed" / "traces", tmp_path / "traces")
    rows = values(read_speed(tmp_path, plan, DISK))
    assert rows["tokens/s per device"] == (24_000, 25_000)
    assert rows["MFU, %"] == (pytest.approx(40), pytest.approx(44))
    assert rows["memory, GiB"] == (57.0, 58.75)
    assert rows["exposed communication of dp_shard, ms"][1] == pytest.approx(10)


def test_read_checkpoints_compares_a_synchronous_save_with_the_disk(tmp_path: Path) -> None:
    for name, planned in (("saved", 0.03), ("resumed", None)):
        directory = tmp_path / name
        shutil.copytree(RECORDED / name, directory)
        for step, size in ((3, 5), (6, 3_000_000)):
            path = directory / "checkpoints" / f"step-{step:08}"
            path.mkdir(parents=True)
            (path / "shard-00000.safetensors").write_bytes(bytes(size))
        plan = read_json(directory / "planned.json")
        rows = values(read_checkpoints(directory, plan, DISK))
        measured, expected = rows["seconds blocked by a save"]
        assert expected == (None if planned is None else pytest.approx(planned))
        assert measured is not None
        size_gib, planned_gib = rows["checkpoint, GiB"]
        assert size_gib == pytest.approx(3e6 / 2**30)
        assert planned_gib == pytest.approx(12 * plan["num_params"] / 2**30)
    assert measured == 0.0071  # the shortest of 0.0079, 0.01, 0.0071


def test_read_resume_counts_the_last_start_only() -> None:
    (seconds, planned) = read("resumed", read_resume)["seconds to build and load"]
    assert planned is None
    assert seconds is not None
    records = (RECORDED / "resumed" / "metrics.jsonl").read_text().splitlines()
    first, last = (json.loads(records[i])["time_breakdown"]["restoring"] for i in (0, -1))
    assert seconds == pytest.approx(last - first)
    assert 0 < seconds < last


def test_read_resume_of_a_run_that_began_again_has_no_value() -> None:
    assert read("saved", read_resume) == {"seconds to build and load": (None, None)}


def test_read_loss_with_nan_has_no_value(tmp_path: Path) -> None:
    shutil.copytree(RECORDED / "speed", tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    (row,) = read_loss(tmp_path / "run", {}, DISK)
    assert row.measured is not None
    assert 5 < row.measured < 10
    lines = metrics.read_text().splitlines()
    lines[-2] = re.sub(r'"loss": [\d.]+', '"loss": NaN', lines[-2])
    metrics.write_text("\n".join(lines) + "\n")
    (row,) = read_loss(tmp_path / "run", {}, DISK)
    assert row.measured is None


KILLED_TESTS = """\
tests/gpu/test_cuda.py::test_a[0]
[gw0] [  6%] PASSED tests/gpu/test_cuda.py::test_a[0]
[gw12] [ 13%] FAILED tests/gpu/test_cuda.py::test_a[1]
[gw1] [ 33%] PASSED tests/gpu/test_cuda.py::test_b
[gw1] [100%] SKIPPED tests/gpu/test_cuda.py::test_c
tests/gpu/test_cuda.py::test_d"""


@pytest.mark.parametrize(
    ("output", "counts"),
    [
        ("sssssssssssssss   [100%]\n15 skipped in 3.85s\n", {"skipped": 15}),
        (
            "...F\n1 failed, 12 passed, 2 skipped in 31.20s\n",
            {"failed": 1, "passed": 12, "skipped": 2},
        ),
        ("=== 3 passed, 1 error in 125.04s (0:02:05) ===", {"passed": 3, "error": 1}),
        ("2 passed, 2 errors in 9s", {"passed": 2, "error": 2}),
        (KILLED_TESTS, {"passed": 2, "failed": 1, "skipped": 1}),
        (f"{KILLED_TESTS}\n== 1 failed, 3 passed in 9.00s ==", {"failed": 1, "passed": 3}),
        ("5 passed is what I hoped for", {}),
        ("Segmentation fault (core dumped)", {}),
        ("", {}),
    ],
)
def test_read_test_counts(output: str, counts: dict[str, int]) -> None:
    assert read_test_counts(output) == counts


READERS = (read_speed, read_checkpoints, read_resume, read_loss)
GARBAGE: list[Any] = [None, True, -1, 0, 1e308, "x", [], {}, [1, "2"], {"a": None}, float("nan")]


def corrupt(data: bytes, choose: random.Random) -> bytes:
    """Cut a file, replace bytes or a value of JSON, or swap lines."""
    kind = choose.randrange(4)
    if kind == 0:
        return data[: choose.randrange(len(data) + 1)]
    if kind == 1:
        changed = bytearray(data)
        for _ in range(choose.randrange(1, 20)):
            changed[choose.randrange(len(changed))] = choose.randrange(256)
        return bytes(changed)
    text = data.decode()
    if kind == 2:
        numbers = [*re.finditer(r"(?<=: )(-?[\d.]+(e-?\d+)?|null|\{\}|\"[^\"]*\")", text)]
        match = choose.choice(numbers) if numbers else None
        if match is None:
            return b""
        value = json.dumps(choose.choice(GARBAGE))
        return f"{text[: match.start()]}{value}{text[match.end() :]}".encode()
    lines = text.splitlines(keepends=True)
    choose.shuffle(lines)
    return "".join(lines).encode()


@settings(max_examples=100, derandomize=True, database=None, deadline=None)
@given(choose=st.randoms(use_true_random=False))
def test_readers_of_garbage_return_finite_values_or_raise_weft_errors(
    choose: random.Random,
) -> None:
    with TemporaryDirectory() as directory:
        check_readers(choose, Path(directory) / "run")


def check_readers(choose: random.Random, run: Path) -> None:
    """Corrupt files of a recorded run, and read it."""
    shutil.copytree(RECORDED / choose.choice(["speed", "saved", "resumed"]), run)
    (run / "checkpoints" / "step-00000006").mkdir(parents=True)
    files = sorted(path for path in run.rglob("*") if path.is_file())
    for path in choose.sample(files, choose.randrange(1, len(files) + 1)):
        if choose.random() < 0.15:
            path.unlink()
        else:
            path.write_bytes(corrupt(path.read_bytes(), choose))
    try:
        plan = parse_plan((run / "planned.json").read_text("utf-8", "replace"))
    except (OSError, WeftError):
        plan = {
            key: choose.choice(GARBAGE) for key in ("seconds", "memory_gib", "num_params", "mfu")
        }
    for reader in READERS:
        with suppress(WeftError):
            rows = reader(run, plan, DISK)
            numbers = [x for row in rows for x in (row.measured, row.planned)]
            assert all(x is None or math.isfinite(x) for x in numbers)
            assert all(cell for row in rows for cell in format_row(row))


def test_readers_of_a_missing_run_raise_weft_errors(tmp_path: Path) -> None:
    for reader in READERS:
        with pytest.raises(InvalidConfig):
            reader(tmp_path, {}, DISK)
    assert read_profile(tmp_path, {}) == []


@pytest.mark.parametrize(
    "text", ["", "{", "weft: 1 problem", "[1]", "{\n}trailing {", '{\n "a": 1']
)
def test_parse_plan_needs_an_object(text: str) -> None:
    if text.startswith("{\n}"):
        assert parse_plan(f"warning: {{x}}\n{text}") == {}
        return
    with pytest.raises(WeftError, match="printed no plan"):
        parse_plan(text)


# --------------------------------------------------------------------------- page

FACTS = Facts(
    torch="2.13.0",
    cuda="13.0",
    device="cuda",
    gpu_state=STATE,
    cores=224,
    usable=224,
    memory=2 << 40,
    directories=(Directory("run.dir", "/home/me/x", "ext4", write=1e9, read=2e9, free=1 << 40),),
    host="secret-host",
    address="10.0.0.1",
    measured=DeviceMeasurements(
        "cuda", nccl=(2, 27, 3), flops=(7e14, 6e14), bandwidth=(3e12, 3.1e12), busbw=4e11
    ),
)


def sample_results() -> list[StageResult]:
    """Results of a check on GPUs, written by hand."""
    speed = "tokens/s per device"
    return [
        StageResult("machine", "passed", rows=tuple(device_rows(FACTS)), seconds=30),
        StageResult(
            "GPU tests",
            "failed",
            "test_x | with a pipe\nand two lines",
            output="a\nb",
            command="python -m pytest tests/gpu",
        ),
        StageResult(
            "eager",
            "passed",
            rows=(
                Row(speed, 20_000.0, 25_000.0),
                Row("MFU, %", 43.5),
                Row("memory, GiB", 66.0, 60.0),
                Row("compute, ms", 400.0),
            ),
            size="model.dim=8",
            keys="profile.steps=11",
            command="weft train demo --run.dir=x --model.dim=8 --profile.steps=11",
        ),
        StageResult(
            "compile", "passed", rows=(Row(speed, 30_000.0, 30_000.0),), size="model.dim=8"
        ),
        StageResult("float8", "passed", rows=(Row(speed, 9.0, 30_000.0),), size="another"),
        StageResult("FSDP", "timed out", "not done after 180 s: x", rows=(Row(speed, None, 1.0),)),
        StageResult("resume", "skipped", "no time left"),
    ]


def test_page_has_machine_results_effects_and_reasons() -> None:
    findings = [ok("fine"), bad("GPU 3: an error", "replace it")]
    document = build_document(
        "python -m benchmarks.gpu_check", FACTS, findings, sample_results(), 600, EFFECTS
    )
    page = format_page(json.loads(json.dumps(document, allow_nan=False)))
    assert page.startswith("# weft on 8 x NVIDIA H100 80GB HBM3\n")
    assert "10.0 minutes. Stages: 4 passed" in page
    lines = [re.sub(r" +", " ", line) for line in page.splitlines()]
    assert "Stages: 4 passed, 1 failed (GPU tests), 1 timed out (FSDP), 1 skipped." in page
    for line in (
        "| driver | 580.65.06 |",
        "| links between GPUs | NV18 |",
        "| NCCL | 2.27.3 |",
        "| torch | 2.13.0, for CUDA 13.0 |",
        "| machine | matmul, TFLOP/s | 600 | 794 | 0.755 |",
        "| eager | 20,000 | 25,000 | 0.8 | 43.5 | 66 | 60 | 1.1 |",
        "| FSDP | - | 1 | - | - | - | - | - |",
        "| eager | compute, ms | 400 | - | - |",
        "| eager | weft train demo model.dim=8 profile.steps=11 |",
        "| GPU tests | python -m pytest tests/gpu |",
        "| compile / eager: tokens/s per device | 1.5 | 1.2 | 1.25 |",
        "| GPU tests | failed | 0 | test_x \\| with a pipe and two lines |",
        "| resume | skipped | 0 | no time left |",
        "| bad | | GPU 3: an error | replace it |",
    ):
        assert line in lines
    assert "fine" not in page
    assert "secret-host" not in page + json.dumps(document)
    assert "10.0.0.1" not in page + json.dumps(document)
    assert "/home/me" not in page + json.dumps(document)
    assert "    a\n    b" in page


def test_page_every_table_has_equally_many_columns() -> None:
    page = format_page(build_document("weft", FACTS, [], sample_results(), 1.0))
    tables = [block for block in page.split("\n\n") if block.startswith("|")]
    assert len(tables) >= 4
    for table in tables:
        assert len({line.replace("\\|", "").count("|") for line in table.splitlines()}) == 1
        assert len({len(line) for line in table.splitlines()}) == 1  # readable as text


def test_page_without_any_result() -> None:
    facts = replace(FACTS, gpu_state=GpuState(), device="cpu", measured=DeviceMeasurements())
    page = format_page(build_document("weft", facts, [], [], 0.0))
    assert page.startswith("# weft on a CPU\n")


def test_effects_compare_runs_of_the_same_model_only() -> None:
    effects = {effect["quantity"]: effect for effect in compute_effects(sample_results(), EFFECTS)}
    assert [*effects] == ["compile / eager: tokens/s per device"]


def test_divide_and_format_number() -> None:
    assert divide(1.0, 0.0) is None
    assert divide(None, 1.0) is None
    assert divide(1e308, 1e-308) is None
    assert divide(3.0, 2.0) == 1.5
    texts = [format_number(x) for x in (None, 0.0, 0.01234, 12.345, 999.9, 1234.5, -1234.5)]
    assert texts == ["-", "0", "0.0123", "12.3", "1,000", "1,234", "-1,234"]


# --------------------------------------------------------------------------- processes


def check_in(directory: Path, **changes: Any) -> GPUCheck:
    check = GPUCheck(directory, "cpu", 2, DISK, time.monotonic() + 600)
    return replace(check, **changes)


SLEEPERS = (
    "import subprocess, sys, time; "
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    "print('started', flush=True); time.sleep(60)"
)


@pytest.mark.parametrize("ending", ["limit", "done", "interrupt"])
def test_run_command_kills_children_of_children(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "log"

    def has_started() -> bool:
        if "started" not in log.read_text():
            return False
        if ending == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        return ending == "done"

    limit = 1.5 if ending == "limit" else 30.0
    command = [sys.executable, "-c", SLEEPERS]
    if ending == "interrupt":
        # An earlier test in this process may have left the handler of ``weft train``.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                run_command(command, log, limit, has_started)
        finally:
            signal.signal(signal.SIGINT, handler)
    else:
        assert run_command(command, log, limit, has_started) == (0 if ending == "done" else None)
    assert log.read_text() == "started\n"
    assert processes_in(tmp_path).keys() <= {os.getpid()}


def test_run_command_returns_the_exit_status(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('x', file=sys.stderr); sys.exit(7)"]
    assert run_command(command, tmp_path / "log", 30) == 7
    assert (tmp_path / "log").read_text() == "x\n"


@pytest.mark.parametrize(
    ("status", "rows", "output", "outcome", "reason"),
    [
        (0, [Row("x", 1.0)], "", "passed", ""),
        (0, [Row("x", None, 2.0)], "", "failed", "no x was measured"),
        (0, [], "", "failed", "nothing was measured"),
        (None, [Row("x", 1.0)], "a\nb\n", "timed out", "not done after 9 s: b"),
        (None, [], "", "timed out", "not done after 9 s: no output"),
        (
            1,
            [Row("x", 1.0)],
            "x\nweft: rank 1 failed: E: y\n  log: z",
            "failed",
            "rank 1 failed: E: y",
        ),
        (-9, [], "", "failed", "ended with signal SIGKILL"),
        (-6, [], "terminate called\n", "failed", "ended with signal SIGABRT terminate called"),
    ],
)
def test_judge(status: int | None, rows: list[Row], output: str, outcome: str, reason: str) -> None:
    result = judge("stage", status, rows, output, 9)
    assert (result.status, result.reason) == (outcome, reason)
    assert result.rows == tuple(rows)
    assert result.output == ("" if outcome == "passed" else output.strip())


@pytest.mark.system
@pytest.mark.slow
def test_run_stages_on_a_cpu_trains_and_skips(
    tmp_path: Path, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One real run, and stages that need a GPU or more devices."""
    monkeypatch.chdir(tmp_path)
    stages = (
        Program("tests on a GPU", "-m pytest", lambda output: []),
        Stage(
            "tiny",
            f"{TINY} model.vocab_size=512 data.vocab_size=512 data.path={store_path}",
            num_records=3,
        ),
        Stage("on a GPU", "", needs_gpu=True),
        Stage("large", "", ranks="all", min_devices=9),
    )
    tests, tiny, on_gpu, large = run_stages(check_in(tmp_path), stages)
    assert (tests.status, tests.reason) == ("skipped", "needs a GPU")
    assert (tiny.status, tiny.reason) == ("passed", "")
    assert tiny.rows[0].measured is not None
    assert tiny.rows[0].measured > 0
    assert tiny.keys.startswith("run.nproc_per_node=1 model.num_layers=2 ")
    assert tiny.command.startswith("weft train demo --run.dir=$DIRECTORY/tiny --run.device=cpu ")
    assert not (tmp_path / "tiny").exists()
    assert (on_gpu.status, on_gpu.reason) == ("skipped", "needs a GPU")
    assert (large.status, large.reason) == ("skipped", "needs 9 cores; this machine has 2")


@pytest.mark.system
def test_run_stages_interrupted_during_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    results = [*run_stages(check_in(tmp_path), (Stage("", "", needs_gpu=True), *STAGES[1:3]))]
    timer.join()
    assert [result.status for result in results] == ["skipped", "interrupted", "not run"]
    assert processes_in(tmp_path).keys() <= {os.getpid()}


def test_run_stages_without_time_or_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = check_in(tmp_path, deadline=time.monotonic() + 5)
    assert {(r.status, r.reason) for r in run_stages(late, STAGES)} == {("skipped", "no time left")}


@pytest.mark.slow
def test_run_stages_crashed_hanging_and_without_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hang = 'resilience.faults=[{kind="slow",seconds=300,passing=2}]'
    crash = 'resilience.faults=[{kind="raise",passing=3}]'
    stages = (
        Stage("crash", f"{TINY} {crash.replace('{', '{{').replace('}', '}}')}"),
        Stage("hang", f"{TINY} {hang.replace('{', '{{').replace('}', '}}')}", seconds=1.25),
        Stage("saving", TINY, num_records=0),
        Stage("wrong", "train.seq_len=1000000"),
        Stage("after", TINY, num_records=3),
    )
    monkeypatch.setattr("benchmarks.gpu_check.SAVED_BYTES", 1 << 50)
    crashed, hung, saving, wrong, after = run_stages(check_in(tmp_path), stages)
    assert crashed.status == "failed"
    assert "rank 0 failed" in crashed.reason
    assert "rank 0 failed" in crashed.output
    assert str(tmp_path) not in crashed.output + crashed.reason
    assert hung.status == "timed out"
    assert re.match(r"not done after (1\d|2[0-5]) s: ", hung.reason)
    assert saving.status == "skipped"
    assert re.fullmatch(r"needs [\d.]+ GiB of disk; [\d.]+ GiB are free", saving.reason)
    assert wrong.status == "skipped"
    assert "train.seq_len=1000000" in wrong.reason
    assert after.status == "passed"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_gpu_check_interrupted_leaves_a_page_and_no_process(number: int, tmp_path: Path) -> None:
    with subprocess.Popen(
        CHECK, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "running: eager" in line:
                break
        ready = time.monotonic() + 120
        while not any(
            p.stat().st_size for p in tmp_path.glob("weft-gpu-check-*/eager/metrics.jsonl")
        ):
            assert time.monotonic() < ready
            time.sleep(0.1)
        process.send_signal(number)
        output = process.stdout.read()
        assert process.wait(60) == INTERRUPTED
    assert "interrupted" in output
    page, data = pages_in(tmp_path)
    assert "| eager" in page
    statuses = [stage["status"] for stage in data["stages"]]
    assert statuses[:3] == ["passed", "passed", "interrupted"]
    assert {*statuses[3:]} == {"not run"}
    assert not processes_in(tmp_path)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md"]


@pytest.mark.slow
@pytest.mark.timeout(1300, method="signal")
def test_gpu_check_on_a_cpu_runs_every_stage_that_needs_no_gpu(tmp_path: Path) -> None:
    completed = run_check("--run.device", "cpu", "--run.dir", "out", cwd=tmp_path)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert completed.stderr == ""
    page, data = pages_in(tmp_path / "out")
    assert data["command"] == "python -m benchmarks.gpu_check --run.device cpu --run.dir out"
    by_name = {stage["name"]: stage for stage in data["stages"]}
    for stage in STAGES:
        needs_gpu = not stage.cpu_words if isinstance(stage, Program) else stage.needs_gpu
        expected = "skipped" if needs_gpu else "passed"
        assert by_name[stage.name]["status"] == expected, by_name[stage.name]
        assert stage.name in page
    assert {effect["quantity"].partition(":")[0] for effect in data["effects"]} >= {
        "compile / eager",
        "save, asynchronous / save, synchronous",
    }


@pytest.mark.slow
@pytest.mark.timeout(3600, method="signal")
@pytest.mark.parametrize("schedule", [H200, NODE], ids=lambda schedule: schedule.name)
def test_rehearsal_on_a_cpu_runs_to_the_end(schedule: Schedule, tmp_path: Path) -> None:
    """Everything passes that does not need a GPU, or TorchTitan where it is not installed."""
    command = [sys.executable, "-m", f"benchmarks.{schedule.name}", "--run.device", "cpu"]
    completed = subprocess.run(
        command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    _, data = pages_in(tmp_path, schedule.name)
    assert len(data["stages"]) == 1 + len(schedule.stages)
    for stage in data["stages"]:
        reason = stage["reason"]
        skipped = reason == "needs a GPU" or reason.startswith("needs torchtitan")
        assert stage["status"] == ("skipped" if skipped else "passed"), stage


@pytest.mark.slow
@pytest.mark.timeout(1800, method="signal")
@pytest.mark.parametrize("experts", [False, True])
def test_float8_losses_trains_in_a_clean_directory(experts: bool, tmp_path: Path) -> None:
    """The command of docs/results.md, with fewer steps; a second call does not train again."""
    command = [sys.executable, "-P", "-m", "benchmarks.float8_losses", "new/runs", "--steps", "3"]
    command += ["--experts"] * experts
    columns = ["tensorwise"] if experts else ["rowwise", "tensorwise", "mxfp8"]
    for count in (3 + len(columns) + (not experts), 0):
        completed = subprocess.run(
            command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False
        )
        head, _, row, limit = completed.stdout.splitlines()
        assert head == f"| steps | loss, bfloat16 | seeds | not compiled | {' | '.join(columns)} |"
        assert row.startswith("| 1 to 3 | ")
        assert len(re.findall(r"[+-]\d\.\d\d%", row)) == 1 + len(columns)  # none is NaN
        assert limit.startswith("limit ")
        assert completed.stderr.count(" s\n") == count, completed.stderr


def pages_in(directory: Path, name: str = "gpu-check") -> tuple[str, dict[str, Any]]:
    """Return the only page in a directory, and its data."""
    (page,) = directory.glob(f"{name}-*.md")
    (data,) = directory.glob(f"{name}-*.json")
    document = json.loads(data.read_text())
    assert format_page(document) == page.read_text()
    return page.read_text(), document


# --------------------------------------------------------------------------- command line


def run_check(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [*CHECK, *words]
    return subprocess.run(
        command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )


def test_gpu_check_lets_all_processes_find_the_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the benchmark of `weft doctor`, in a clone that is not installed."""
    found: list[str] = []

    def check(*_: object) -> int:
        found.append(os.environ["PYTHONPATH"])
        return 0

    monkeypatch.setattr("benchmarks.gpu_check.run_gpu_check", check)
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers
    for before, after in (("", f"{CLONE}"), (f"/other:{CLONE}", f"{CLONE}:/other")):
        monkeypatch.setenv("PYTHONPATH", before)
        assert main() == 0
        assert found.pop() == after


def test_gpu_check_with_a_wrong_value_or_an_unwritable_directory_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(CLONE))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers
    (tmp_path / "file").write_text("")
    for words, status, text in (
        (["--run.device", "tpu"], USAGE_ERROR, 'run.device="tpu"'),
        (["--run.dir", "file"], FAILED, "cannot be written"),
    ):
        monkeypatch.setattr(sys, "argv", ["gpu_check", *words])
        assert main() == status
        assert text in capsys.readouterr().err
