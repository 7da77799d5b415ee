"""Published rows as jobs of weft, other programs' properties on traced work, and the errors."""

from __future__ import annotations

import csv
import json
import math
import tomllib
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.plan_accuracy import Unexpressed, number
from benchmarks.plan_trace import (
    COVERAGE,
    RANGES,
    SHIPPED,
    SQUAD_TOKENS,
    Adapter,
    Foreign,
    Scored,
    calibrate,
    find_range,
    foreign_memory,
    foreign_of,
    format_ranges,
    job_of,
    machine_of,
    main,
    plan_of,
    predict,
    recompute_keys,
    report,
    saved_bytes,
    set_error_ranges,
)
from weft.estimate.cost import Attention, Collective, Hardware, Matmul, StageWork, Work
from weft.estimate.error_ranges import load_error_ranges
from weft.estimate.op_locations import OpLocation
from weft.estimate.trace_memory import RankMemory
from weft.planning.devices import get_device
from weft.planning.plan import Plan

Row = dict[str, str]


def rows() -> list[tuple[str, Row]]:
    result = []
    for path in SHIPPED:
        with path.open(newline="") as file:
            for line, row in enumerate(csv.DictReader(file), 2):
                clean = defaultdict(str, {k: (v or "").strip() for k, v in row.items() if k})
                result.append((f"{path.name}:{line}", clean))
    return result


ROWS = rows()


def plan_of_row(row: Row) -> Plan:
    keys, hardware, *_ = job_of(row)
    return plan_of(keys, machine_of(hardware, int(number(row["n_gpus"]))))


def test_every_row_is_a_job_or_has_a_reason() -> None:
    reasons: Counter[str] = Counter()
    num_jobs = 0
    for line, row in ROWS:
        try:
            keys, *_ = job_of(row)
        except Unexpressed as reason:
            reasons[str(reason)] += 1
            continue
        num_jobs += 1
        assert len(dict(keys)) == len(keys), line
    assert num_jobs > 400, reasons
    assert reasons["layers that weft does not have (a hybrid)"] > 30
    assert reasons["measured with a regression that its release notes name"] == 1
    assert reasons["not tuned: an early step of an optimization"] == 10


@pytest.mark.parametrize(
    "line",
    [
        "published_runs.csv:2",  # TorchTitan, 8B, FSDP2
        "published_runs.csv:14",  # TorchTitan, 405B, interleaved pipeline
        "published_runs.csv:100",
        "published_runs_moe.csv:3",  # gpt-oss in MXFP8
        "published_runs_moe.csv:146",  # DeepSeek-V2 truncated, expert parallelism
        "published_runs_moe.csv:147",
    ],
)
def test_plan_has_the_columns_of_its_row(line: str) -> None:
    row = dict(ROWS)[line]
    plan = plan_of_row(row)
    assert plan.world_size == number(row["n_gpus"])
    for column in ("tp", "pp", "cp", "ep"):
        if row[column]:
            assert getattr(plan, column) == number(row[column]), column
    columns = {"seq_len": plan.seq_len, "layers": plan.model.num_layers}
    columns |= {"hidden": plan.model.dim, "heads": plan.model.num_heads}
    columns |= {"micro_batch": plan.microbatch_size, "vocab": plan.model.vocab_size}
    for column, value in columns.items():
        if row[column] and not (column == "micro_batch" and plan.pp > 1):
            assert value == number(row[column]), column
    if number(row["params_b"]):
        assert plan.num_params == pytest.approx(number(row["params_b"]) * 1e9, rel=0.03)


def adapter(foreign: Foreign, **plan: Any) -> Adapter:
    fields = {"ep": 64, "model": None} | plan
    stand_in: Any = type("Plan", (), fields)
    return Adapter(foreign, stand_in, Hardware(get_device("H100"), 8))


def test_deduplicating_dispatcher_sends_a_token_once_to_each_node() -> None:
    """Eight balanced choices fall on 5.25 of 8 nodes, or with groups on 3.6 of 4."""
    model = type("Model", (), {"active_experts": 8, "expert_groups": 1, "active_groups": 1})
    apart = adapter(Foreign(deduplicates=True), model=model)
    expected = 8 * (1 - (7 / 8) ** 8) / 8
    assert apart.fraction_sent() == pytest.approx(expected)
    op = Collective("all_to_all", 1e9, "ep", 64)
    (sent,) = apart.work(Work(collectives=(op,))).collectives
    assert sent.bytes == pytest.approx(1e9 * expected)
    (whole,) = adapter(Foreign(), model=model).work(Work(collectives=(op,))).collectives
    assert whole.bytes == 1e9
    groups = type("Model", (), {"active_experts": 8, "expert_groups": 8, "active_groups": 4})
    grouped = adapter(Foreign(deduplicates=True), model=groups)
    assert grouped.fraction_sent() == pytest.approx(4 * (1 - (3 / 4) ** 8) / 8)
    assert adapter(Foreign(deduplicates=True), model=model, ep=8).fraction_sent() == 1


def test_other_attention_kernels_do_the_same_products() -> None:
    # Causal: half of the scores; unfused kernels compute all of them.
    causal = Attention(4 * 1024 * 1024 * 128 / 2, 1024, 128)
    work = Work(attention=(causal, replace_backward(causal)))
    unfused = adapter(Foreign(kernel="unfused")).work(work)
    assert not unfused.attention
    assert unfused.traffic_bytes == (11 + 14) * 1024 * 1024
    assert unfused.flops == pytest.approx((4 + 8) * 1024 * 1024 * 128)
    first = adapter(Foreign(kernel="flash1")).work(work).attention
    assert [op.flops for op in first] == [2 * op.flops for op in work.attention]
    assert {op.kernel for op in first} == {"flash"}
    assert {op.kernel for op in adapter(Foreign(kernel="attention")).work(work).attention} == {
        "attention"
    }


def replace_backward(op: Attention) -> Attention:
    return op._replace(flops=op.flops * 2.5, backward=True)


def test_overlaps_are_those_of_the_other_program() -> None:
    ops = tuple(Collective("all_gather", 1e6, axis, 8) for axis in ("dp_shard", "tp", "ep"))
    foreign = Foreign(overlaps={"dp_shard": "exposed", "tp": "async"})
    changed = adapter(foreign).work(Work(collectives=ops)).collectives
    assert [op.overlap for op in changed] == ["exposed", "async", "exposed"]
    norm = Collective("all_reduce", 4, "tp", 8)  # nothing hides a scalar
    (kept,) = adapter(foreign).work(Work(collectives=(norm,))).collectives
    assert kept.overlap == "exposed"


def test_transformer_engine_casts_inputs_and_gradients_once() -> None:
    model = type("Model", (), {"vocab_size": 1000, "num_experts": 16})
    foreign = Foreign(precision="float8", cast_bytes=4.0)
    engine = adapter(foreign, model=model, tp=1, lora_rank=0)
    # Tokens 64, 32 to 48 features; and a router and an output head, which it does not convert.
    kept = (Matmul(64, 32, 16), Matmul(64, 32, 1000))
    forward = Work((Matmul(64, 32, 48), *kept))
    backward = Work((Matmul(64, 48, 32), Matmul(48, 64, 32)))
    stage = StageWork(((forward, 1),), ((backward, 1),))
    assert engine.fraction_cast(stage) == 0.5
    assert engine.works(stage.forward, 1.0)[0][0].traffic_bytes == 4 * 64 * 32
    ((changed, _),) = engine.works(stage.backward, engine.fraction_cast(stage))
    assert changed.traffic_bytes == 4 * 64 * 48  # the gradient, for both products
    assert {op.precision for op in changed.matmuls} == {"float8"}
    products = engine.work(forward).matmuls
    assert [op.precision for op in products] == ["float8", "bf16", "bf16"]
    # A block that is computed again casts its input again.
    backward = Work((Matmul(64, 32, 48), Matmul(64, 48, 32), Matmul(48, 64, 32)))
    forward = Work((Matmul(64, 32, 48),))
    ((changed, _),) = engine.works(
        ((backward, 1),), engine.fraction_cast(StageWork(((forward, 1),), ((backward, 1),)))
    )
    assert changed.traffic_bytes == pytest.approx(4 * 64 * (32 + 48))


def test_attention_of_packed_documents_does_not_cross_them() -> None:
    op = Attention(1e12, 4096, 128)
    (packed,) = (
        adapter(Foreign(kernel="attention", document_tokens=256))
        .work(Work(attention=(op,)))
        .attention
    )
    assert (packed.flops, packed.keys) == (1e12 / 16, 256)
    (whole,) = (
        adapter(Foreign(kernel="attention", document_tokens=8192))
        .work(Work(attention=(op,)))
        .attention
    )
    assert (whole.flops, whole.keys) == (1e12, 4096)


def test_adapters_of_nemo_are_those_of_its_configuration() -> None:
    row = dict(ROWS)["published_runs_moe.csv:247"]
    keys, _, layout, stack, _ = job_of(row)
    assert dict(keys)["lora.targets"] == "q_proj,k_proj,v_proj"
    foreign = foreign_of(row, layout, stack)
    assert (foreign.precision, foreign.cast_bytes) == ("float8", 3.0)
    assert foreign.document_tokens == SQUAD_TOKENS
    # Frozen weights take two bytes, here of seven billion on each of two tensor-parallel ranks.
    plan = plan_of_row(row)
    live = dict.fromkeys(("parameters", "activations", "temporaries"), 0)
    memory = RankMemory(live, OpLocation(0, "start", 0), 0)
    held = foreign_memory(replace(foreign, logit_bytes=0.0), plan, memory, [0])
    assert held == pytest.approx(2 * plan.num_params, rel=1e-6)


def test_saved_activations_are_those_of_fused_layers() -> None:
    row = dict(ROWS)["published_runs.csv:65"]  # Llama 3 8B
    _, _, layout, stack, _ = job_of(row)
    plan, foreign = plan_of_row(row), foreign_of(row, layout, stack)
    hidden, query, pair, inner = 4096, 4096, 2 * 1024, 14336
    # Bytes of norms' inputs and outputs, queries, keys and values, attention, gate and product.
    norms, attention = 2 * 2 * hidden, 2 * query + 2 * pair + 2 * query
    in_bfloat16 = norms + 2 * 2 * hidden + attention + (4 + 2) * inner
    assert saved_bytes(replace(foreign, precision="bf16"), plan) == in_bfloat16
    # Float8 inputs of linear layers; attention also keeps its output in bfloat16.
    in_float8 = norms + 2 * hidden + attention + query + (4 + 1) * inner
    assert saved_bytes(replace(foreign, precision="float8"), plan) == in_float8


def test_notes_say_what_a_program_overlaps_and_captures() -> None:
    row = dict(ROWS)["published_runs_moe.csv:11"]
    *_, layout, stack, _ = job_of(row)
    foreign = foreign_of(row, layout, stack)
    assert foreign.overlaps["ep"] == "prefetch"  # "EP a2a overlap 1F1B on"
    assert (foreign.launches, foreign.precision) == (0.0, "float8")
    row = row | {"notes": "no EP overlap; CUDA graphs off", "precision": "NVFP4"}
    foreign = foreign_of(defaultdict(str, row), layout, stack)
    assert (foreign.launches, foreign.precision) == (1.0, "float4")
    assert "ep" not in foreign.overlaps
    launched = adapter(replace(foreign, launches=0.0)).work(Work(kernels=10))
    assert launched.kernels == 0


def test_unpublished_recomputation_is_the_least_that_fits() -> None:
    row = dict(ROWS)["published_runs.csv:2"]
    layout = replace(job_of(row)[2], activation_checkpoint="auto")
    dense = defaultdict(str)
    assert recompute_keys(dense, layout) == {"mode": "none"}
    assert recompute_keys(dense, layout, "full") == {"mode": "full"}
    experts = defaultdict(str, num_experts="8")
    assert recompute_keys(experts, layout, "full") == {"mode": "none"}


def scored(measured: float, predicted: float, source: str = "a") -> Scored:
    fields = ("line", "a", "system", "group", "device", "choice")
    row = Scored(*fields, measured, predicted, 0.0, 0.0, 1.0, {})
    return replace(row, source=source)


def test_calibration_leaves_the_row_out() -> None:
    group = [scored(100, 110), scored(200, 220), scored(50, 100)]
    calibrate(group)
    assert group[0].calibrated == pytest.approx(110 * math.sqrt(0.5 * 10 / 11), rel=1e-6)
    assert group[2].calibrated == pytest.approx(100 * 10 / 11)
    result = report([*group, scored(100, 50, "b")], {"x:1": "no time", "x:2": "no time"})
    assert (result["rows"], result["skipped"], result["reasons"]) == (4, 2, {"no time": 2})
    assert result["sources"]["a"]["median"] == pytest.approx(0.1)
    assert result["sources"]["a"]["bias"] == pytest.approx(0.1)
    # The other source took twice the predicted time; this one took half, or a little more.
    assert result["sources"]["a"]["covered"] == 0
    assert result["sources"]["b"]["covered"] == 0
    # Ranks 1.5, 3, 0, 1.5 of measured speeds, and 2, 3, 1, 0 of predicted ones.
    assert result["rank_correlation"]["sets"] == 1
    assert result["rank_correlation"]["mean"] == pytest.approx(3 / math.sqrt(4.5 * 5))


def test_range_has_nine_of_ten_further_rows_and_is_not_symmetric() -> None:
    ratios = [1 + 0.01 * i for i in range(-5, 34)]  # 39: two of 40 are outside on each side
    low, high = find_range(ratios)
    assert (low, high) == pytest.approx((1 + 0.01 * -4, 1 + 0.01 * 32))
    assert find_range(ratios[:5]) == (min(ratios[:5]), max(ratios[:5]))
    random = np.random.default_rng(0)
    inside = [
        low <= further <= high
        for *known, further in random.lognormal(0.1, 0.3, (4000, 40))
        for low, high in [find_range(known)]
    ]
    assert np.mean(inside) == pytest.approx(COVERAGE, abs=0.015)


def test_ranges_of_the_product_are_those_of_other_sources(tmp_path: Path) -> None:
    group = [
        replace(scored(100, 100 + i, source), group="experts") for i, source in enumerate("abc")
    ]
    set_error_ranges(group)
    assert group[0].error_range == (1.01, 1.02)
    assert group[2].error_range == (1.0, 1.01)
    every = [replace(row, group=name) for row in group for name in RANGES.values()]
    data = tomllib.loads(format_ranges(every))
    assert data["experts"] == {"rows": 3, "sources": 3, "low": 1.0, "high": 1.02}
    assert data.keys() == load_error_ranges().keys()


def test_torchtitan_run_is_predicted_by_the_trace() -> None:
    row = dict(ROWS)["published_runs.csv:2"]
    result = predict(row, "line")
    assert result.group == "dense, FSDP2"
    assert result.predicted == pytest.approx(result.measured, rel=0.1)
    assert result.memory == pytest.approx(result.measured_memory, rel=0.1)


def test_command_keeps_rows_and_prints_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table, kept = tmp_path / "runs.csv", tmp_path / "rows.jsonl"
    table.write_text("source,model,n_gpus\nsomebody,Nemotron-H HYBRID,8\nsomebody,unheard of,8\n")
    for _ in range(2):
        command = ["plan_trace.py", "--json", "--rows", str(kept), str(table)]
        monkeypatch.setattr("sys.argv", command)
        main()
        result = json.loads(capsys.readouterr().out)
        assert (result["rows"], result["skipped"]) == (0, 2)
        assert len(kept.read_text().splitlines()) == 2
