"""Break a step down from synthetic traces, a CPU trace, and a trace in GPU format."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from weft.monitor import spans
from weft.monitor.profiler import (
    COLLECTIVE_PREFIX,
    compute_breakdown,
    merge_intervals,
    split_intervals,
)
from weft.monitor.spans import SpanWriter
from weft.monitor.step_timer import PHASES, StepTimer, enter_phase


def test_breakdown_instants_are_claimed_once() -> None:
    """Compare with counting instants one by one."""
    chance = random.Random(0)

    def subset() -> list[tuple[float, float]]:
        starts = [chance.randrange(60) for _ in range(chance.randrange(8))]
        return [(start, start + chance.randrange(1, 12)) for start in starts]

    def instants(intervals: list[tuple[float, float]]) -> set[int]:
        return {moment for start, end in intervals for moment in range(int(start), int(end))}

    for _ in range(500):
        remaining, expected = subset(), subset()
        taken, rest = split_intervals(merge_intervals(remaining), merge_intervals(expected))
        assert taken == len(instants(remaining) & instants(expected))
        assert instants(rest) == instants(remaining) - instants(expected)
        assert rest == sorted(rest)


def traced(path: Path) -> dict[str, Any]:
    """Return a torch.profiler trace of two steps on the CPU."""
    timer = StepTimer(None, SpanWriter(None, 0))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        spans.set_ranges(True)
        for step in (1, 2):
            enter_phase("data", step=step)
            time.sleep(0.02)
            enter_phase("forward_backward")
            for _ in range(20):
                torch.ones(200, 200) @ torch.ones(200, 200)
            time.sleep(0.04)
            with record_function(COLLECTIVE_PREFIX + "pp"):
                torch.ones(3).sum()
                time.sleep(0.06)
            enter_phase("log")
            time.sleep(0.08)  # not part of a step
        timer.close()
    profiler.export_chrome_trace(str(path))
    text: dict[str, Any] = json.loads(path.read_text())
    return text


def test_breakdown_of_a_cpu_trace_attributes_every_second(tmp_path: Path) -> None:
    trace = traced(tmp_path / "trace.json")
    steps, seconds = compute_breakdown(trace, lambda ranks: "world")
    assert steps == 2
    assert seconds["data"] >= 0.04
    assert seconds["host"] >= 0.08
    assert seconds["pp"] >= 0.12
    assert seconds["compute"] > 0
    assert seconds.keys() == {"data", "host", "pp", "compute"}
    phases = (PHASES["data"].activity, PHASES["forward_backward"].activity)
    full = sum(e["dur"] for e in trace["traceEvents"] if e["name"] in phases)
    assert sum(seconds.values()) == pytest.approx(full / 1e6, abs=1e-6)


def event(kind: str, name: str, start: float, end: float, tid: int = 7, **args: Any) -> Any:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": end - start} | {
        "pid": 1,
        "tid": tid,
        "args": args,
    }


def test_breakdown_of_a_gpu_trace_attributes_exposed_communication() -> None:
    """Read a handwritten trace in Kineto's format for NCCL kernels."""
    send = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    gather = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    trace = {
        "distributedInfo": {
            "backend": "nccl",
            "pg_config": [{"pg_name": "3", "pg_desc": "mesh_dp_shard", "ranks": [0, 2]}],
        },
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
            event("user_annotation", PHASES["data"].activity, 0, 100),
            event("user_annotation", PHASES["forward_backward"].activity, 100, 300),
            event("user_annotation", PHASES["device"].activity, 300, 1000),
            event("user_annotation", PHASES["log"].activity, 1000, 1500),
            event("gpu_user_annotation", PHASES["forward_backward"].activity, 150, 900, tid=20),
            event("cpu_op", "aten::mm", 110, 250),
            event("kernel", "sm90_xmma_gemm_bf16", 150, 350, tid=20),
            # A matmul hides the collective until 350; from then on it is exposed.
            event("kernel", gather, 300, 450, tid=24, **{"Process Group Name": "3"}),
            event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 450, 500, tid=20),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 480, 530, tid=28),
            event("kernel", send, 600, 700, tid=32, **{"Process Group Ranks": "[0, 1]"}),
            event("kernel", "sm90_xmma_gemm_bf16", 690, 900, tid=20),
            event("kernel", gather, 1100, 1200, tid=24, **{"Process Group Name": "3"}),
        ],
    }
    axes = {(0, 2): "dp_shard", (0, 1): "pp"}
    steps, seconds = compute_breakdown(trace, lambda ranks: axes[tuple(ranks)])
    assert steps == 1
    expected = {
        "compute": 200 + 50 + 210,
        "dp_shard": 100,
        "pp": 90,
        "offload": 30,
        "data": 100,
        "host": 50 + 70 + 100,  # before the first kernel, before the P2P transfer, and at the end
    }
    assert {name: round(value * 1e6) for name, value in seconds.items()} == expected
    assert sum(expected.values()) == 1000
