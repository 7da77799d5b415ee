"""FlexAttention in a trace: visited blocks against a mask, FLOPs and memory against formulas."""

from __future__ import annotations

import random

import pytest
import torch

from tests.small import small_job
from weft.estimate.trace import RankTrace, trace_ranks
from weft.estimate.trace_memory import peak_live_bytes
from weft.estimate.traced_attention import visited_pairs
from weft.models.attention import MASK_BLOCK, document_starts, first_visible, interval_block_mask
from weft.planning.plan import Machine
from weft.planning.resolve import resolve

TOKENS = 512
H100 = Machine("cuda", devices=8, world_size=1, capability=(9, 0))


def traced(*overrides: tuple[str, str]) -> RankTrace:
    size = [("train.seq_len", str(TOKENS)), ("model.max_seq_len", str(TOKENS))]
    plan = resolve(small_job(*size, ("train.global_batch_size", "1"), *overrides), H100)
    (trace,) = trace_ranks(plan)
    return trace


def attention_flops(trace: RankTrace) -> dict[str, float]:
    flops: dict[str, float] = {}
    for event in trace.op_trace.events:
        if event.call is not None and "attention" in event.call.name:
            flops[event.call.name] = flops.get(event.call.name, 0) + event.call.flops
    return flops


def test_traced_attention_visits_the_blocks_of_the_mask() -> None:
    rng = random.Random(3)
    for _ in range(20):
        num_tokens = rng.randint(1, 12) * MASK_BLOCK
        window, chunk = rng.choice([(0, 0), (rng.randint(1, 900), 0), (0, rng.randint(1, 900))])
        ids_BT = torch.zeros(1, num_tokens, dtype=torch.int64)
        mask = interval_block_mask(first_visible(ids_BT, window, chunk))
        assert mask.full_kv_num_blocks is not None
        blocks = int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())
        assert visited_pairs(num_tokens, window, chunk) == blocks * MASK_BLOCK**2
    assert document_starts(ids_BT).sum() == 0


@pytest.mark.parametrize(
    ("overrides", "window"),
    [
        ((("model.sliding_window", "100"), ("model.layer_pattern", "L")), 100),
        ((("model.attention_sinks", "true"),), 0),
        ((("model.attention_softcap", "30"),), 0),
    ],
)
def test_traced_attention_on_a_gpu_has_the_flops_of_the_mask_and_no_scores(
    overrides: tuple[tuple[str, str], ...], window: int
) -> None:
    plain, masked = traced(), traced(*overrides)
    flops = attention_flops(masked)
    assert set(flops) == {"flex_attention", "flex_attention_backward"}
    causal = sum(attention_flops(plain).values())  # counts all pairs
    expected = causal * visited_pairs(TOKENS, window) / TOKENS**2
    assert sum(flops.values()) == pytest.approx(expected)
    job = masked.op_trace
    largest = max(event.bytes for event in job.events)
    assert largest == max(event.bytes for event in plain.op_trace.events)  # no scores, no mask
    # Log-sum-exps are float32 on a GPU.
    assert peak_live_bytes(masked) <= 1.05 * peak_live_bytes(plain)


def test_traced_attention_with_narrow_values_on_a_gpu_has_no_scores() -> None:
    heads, key, value = 4, 16, 8
    trace = traced(
        ("model.kv_rank", "16"),
        ("model.rope_head_dim", "8"),
        ("model.head_dim", str(key)),
        ("model.value_head_dim", str(value)),
        ("model.num_kv_heads", str(heads)),
    )
    flops = attention_flops(trace)
    assert set(flops) == {"flex_attention", "flex_attention_backward"}
    layers = 2
    pairs = layers * heads * visited_pairs(TOKENS)
    assert flops["flex_attention"] == 2 * pairs * (key + value)
    score_bytes = heads * TOKENS**2 * 2
    events = (event for event in trace.op_trace.events if event.location.is_in_block)
    assert max(event.bytes for event in events) < score_bytes / 2


@pytest.mark.parametrize("window", [0, 100])
def test_trace_counts_the_largest_logits_in_forward_only(window: int) -> None:
    local = (("model.sliding_window", str(window)), ("model.layer_pattern", "L")) if window else ()
    recomputed = ("activation_checkpoint.mode", "full")
    trace = traced(("optim.qk_clip_threshold", "100"), recomputed, *local)
    flops = attention_flops(trace)["max_attention_logits"]
    pairs = 2 * min(TOKENS, 2 * window or TOKENS)  # the cost of a causal operator is half of it
    assert flops == 2 * TOKENS * pairs / 2 * 32 * 2  # a width of 32, two layers
    calls = [
        event.call
        for event in trace.op_trace.events
        if event.call is not None and event.call.name == "max_attention_logits"
    ]
    assert all(call.causal for call in calls)
    assert len(calls) == 2
    plain = traced(recomputed, *local)
    assert "max_attention_logits" not in attention_flops(plain)
    assert peak_live_bytes(trace) <= 1.01 * peak_live_bytes(plain) + 4096
