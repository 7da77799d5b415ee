"""Compare the planner's predictions with published measurements.

    python benchmarks/plan_accuracy.py [--json] [FILE]

Every row that the planner can express is predicted; other rows are listed with the reason.  A row
has source, model, devices, layout and measurements: tokens/s, TFLOP/s, MFU or iteration time;
memory, or an out-of-memory failure.  `PublishedRun` adds the properties of other training systems
to the planner's formulas.  `STACKS` has values that a publication does not state: the
properties of the training system, from its code and papers.  None is fitted.

The output has the errors of throughput without calibration, and with one software-efficiency scalar
per source (the `source` column).  The scalar is fitted to the other rows of the source
(leave-one-out); a source with one row uses the scalar of its system's other sources.  The output
also has the errors of memory, and of the prediction whether runs fit.  Among layouts of one model
on one number of devices from one source, it has the rank correlation, and the throughput lost by
the planner's first choice.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from weft.estimate.analytic import RESERVED_RATIO, DecoderFormulas, peak_activations
from weft.estimate.cost import Collective, Hardware, Matmul, Overlap, Precision, Work
from weft.planning.devices import GIB, Device, load_clusters
from weft.planning.pipeline_schedule import Action, stage_indices
from weft.planning.plan import Plan

Row = dict[str, str]

# Sizes of known models: layers, hidden, heads, kv heads, ffn, vocabulary, gated.
MODELS: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "gpt3-5b": (24, 4096, 32, 32, 16384, 51200, False),
    "gpt3-20b": (44, 6144, 48, 48, 24576, 51200, False),
    "gpt3-175b": (96, 12288, 96, 96, 49152, 51200, False),
    "nemotron-8b": (32, 4096, 32, 32, 16384, 256000, False),
    "nemotron-15b": (32, 6144, 48, 8, 24576, 256000, False),
    "nemotron-22b": (40, 6144, 48, 48, 24576, 256000, False),
    "nemotron-340b": (96, 18432, 96, 8, 73728, 256000, False),
    "llama-2-7b": (32, 4096, 32, 32, 11008, 32000, True),
    "llama-2-13b": (40, 5120, 40, 40, 13824, 32000, True),
    "llama-2-70b": (80, 8192, 64, 8, 28672, 32000, True),
    "llama-3-8b": (32, 4096, 32, 8, 14336, 128256, True),
    "llama-3-70b": (80, 8192, 64, 8, 28672, 128256, True),
    "llama-3-405b": (126, 16384, 128, 8, 53248, 128256, True),
}


# --------------------------------------------------------------------------- formulas of a run

# As in `weft.estimate.analytic`, for more kinds of code than eager and compiled.  "fused": fused
# kernels; "norms": fused kernels for norms and rotary embedding, the rest eager.  The latter copies
# QKV to batch-first order, and concatenates keys and values.
CAST_BYTES = {"fused": 4.0, "compiled": 6.0, "norms": 34.0, "eager": 34.0}
# Per element of hidden, of queries and keys, of feed-forward (gated, plain).  A fused RMSNorm moves
# 4 bytes, gate and product 6, GELU 4.
TRAFFIC_BYTES = {
    "eager": (84.0, 20.0, 10.0, 4.0),
    "norms": (20.0, 18.0, 10.0, 4.0),
    "fused": (20.0, 4.0, 6.0, 4.0),
    "compiled": (16.0, 4.0, 6.0, 4.0),
}
KERNELS_PER_LAYER = {"eager": 70, "norms": 55, "fused": 45, "compiled": 25}
# Fused: logits in bfloat16 and float32, gradient in place.
LOGIT_BYTES = {"eager": 12, "norms": 12, "compiled": 12, "fused": 8, "chunked": 4}
# Kernel launches that a device queues before the host blocks.
LAUNCH_QUEUE = 1024


@dataclass(frozen=True)
class DecoderDims:
    """Sizes of a published decoder; ``gated``: three feed-forward matrices, else two."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False
    head_dim: int = 0

    @property
    def q(self) -> int:
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def kv(self) -> int:
        return self.kv_heads * (self.head_dim or self.hidden // self.heads)

    @property
    def layer_params(self) -> int:
        matrices = (3 if self.gated else 2) * self.hidden * self.ffn
        return matrices + 2 * self.hidden * (self.q + self.kv) + 2 * self.hidden

    @property
    def params(self) -> int:
        tables = (1 if self.tied else 2) * self.vocab
        return self.layers * self.layer_params + tables * self.hidden + self.hidden


@dataclass(frozen=True)
class Layout:
    """The layout of a published run: what the formulas read of a Plan, and more options.

    ``zero``: as in `DecoderFormulas`; 1 shards only optimizer states.  ``activation_checkpoint``:
    ``none``; ``selective``: save attention and half of the matmuls; ``block``: recompute
    ``activation_checkpoint_fraction`` of the layers; ``attention``: recompute attention scores;
    ``full``: recompute every layer.
    """

    seq_len: int
    microbatch_size: int
    global_batch_size: int
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    stages_per_rank: int = 1
    schedule_name: str = "1F1B"
    splits_backward: bool = True  # where the schedule does
    device: str = "cuda"
    precision: Precision = "bf16"
    activation_checkpoint: Literal["none", "selective", "block", "attention", "full"] = "none"
    activation_checkpoint_fraction: float = 0.5
    fusion: Literal["eager", "norms", "fused", "compiled"] = "eager"
    kernel: Literal["flash1", "flash", "attention", "unfused"] = "flash"
    zero: int = 3
    sequence_parallel: bool = True
    tp_overlap: Overlap = "exposed"
    dp_overlap: Overlap = "prefetch"
    gradient_bytes: int = 4
    state_bytes: float = 16.0
    unsharded_bytes: float = 0.0
    chunked_loss: bool = False
    include_reserved: bool = True  # count memory that the allocator reserves, not only live bytes
    stage_layers: tuple[int, ...] = ()  # per stage; empty: evenly split
    offload_fraction: float = 0.0  # of the layers whose activations are in host memory
    scatter_p2p: bool = False  # each tensor-parallel rank sends a shard of the hidden states
    recv_buffers: bool = True  # one per microbatch, as torch.distributed.pipelining had
    output_bytes: int = 0  # per logit that the last stage keeps until the end of the step
    # A collective's input is reusable only once the device has reached the collective.
    uses_record_stream: bool = False
    tp_gather_bytes: int = 2
    objective: str = "next_token"

    @property
    def dp_size(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def dp_cp_size(self) -> int:
        return self.dp_size * self.cp

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_len

    @property
    def num_microbatches(self) -> int:
        return max(1, round(self.global_batch_size / (self.dp_size * self.microbatch_size)))


class PublishedRun(DecoderFormulas):
    """The planner's formulas with the properties of another training system."""

    def __init__(self, sizes: DecoderDims, layout: Layout) -> None:
        self.layout, self.plan = layout, cast(Plan, layout)
        for name in (
            *("num_microbatches", "zero", "sequence_parallel", "tp_overlap", "dp_overlap"),
            *("precision", "gradient_bytes", "state_bytes", "unsharded_bytes", "tp_gather_bytes"),
        ):
            setattr(self, name, getattr(layout, name))
        tp, fusion, mode = layout.tp, layout.fusion, layout.activation_checkpoint
        self.layers, self.hidden, self.is_tied = sizes.layers, sizes.hidden, sizes.tied
        self.q, self.kv, self.head_dim = sizes.q / tp, sizes.kv / tp, sizes.q // sizes.heads
        self.heads, self.ffn, self.vocab = sizes.heads / tp, sizes.ffn / tp, sizes.vocab / tp
        self.num_up = 2 if sizes.gated else 1
        self.tokens = layout.microbatch_size * layout.seq_len / layout.cp
        self.shards = layout.dp_shard * layout.cp
        self.tp_gather_overlap = layout.tp_overlap
        self.is_eager, self.cast_bytes = fusion == "eager", CAST_BYTES[fusion]
        *widths, gated, plain = TRAFFIC_BYTES[fusion]
        self.traffic_bytes = (widths[0], widths[1], gated if sizes.gated else plain)
        self.layer_kernels = KERNELS_PER_LAYER[fusion]
        self.kernel = "attention" if layout.kernel == "attention" else "flash"
        self.recomputes, self.is_selective = mode != "none", mode == "selective"
        fractions = {"full": 1.0, "block": layout.activation_checkpoint_fraction}
        self.recomputed_fraction = fractions.get(mode, 0.0)
        self.logit_bytes = LOGIT_BYTES["chunked" if layout.chunked_loss else fusion]
        self.head_traffic_bytes = 4 if layout.chunked_loss else 14
        if layout.stage_layers:
            self.layers_per_stage = layout.stage_layers

    @property
    def optimizer_shards(self) -> int:
        return self.layout.dp_cp_size if self.zero == 1 else super().optimizer_shards

    def cast_traffic(self, matmuls: list[Matmul]) -> tuple[float, float]:
        """Return `DecoderFormulas.cast_traffic`; four bits also take a rotation and a second scale.

        Fused stacks cast a weight once per step, and an input once, in both layouts.
        """
        forward, backward = super().cast_traffic(matmuls)
        if self.layout.fusion == "fused" and self.precision != "bf16":
            forward = self.cast_bytes * sum(op.m * op.k for op in matmuls)
            backward = self.cast_bytes * sum(op.m * op.n for op in matmuls)
        factor = 2 if self.precision == "float4" else 1
        return factor * forward, factor * backward

    def attention_work(self) -> tuple[Work, Work]:
        layout, seq_len = self.layout, self.layout.seq_len
        if layout.kernel == "flash1":
            # "2x faster than FlashAttention": FlashAttention-2's paper.  FlashAttention 1 suits
            # heads of 64, later ones heads of 128.
            factor = 2 * min(1.0, self.head_dim / 128) ** 0.4
            forward, backward = super().attention_work()
            return _slow_attention(forward, factor), _slow_attention(backward, factor)
        if layout.kernel != "unfused":
            return super().attention_work()
        # Scores, softmax and dropout are materialized: heads x S x S of two bytes.
        batched_heads = self.tokens / seq_len * self.heads  # one matmul with as many rows
        scores = batched_heads * seq_len**2
        rows = seq_len * batched_heads
        matmuls = (Matmul(rows, self.head_dim, seq_len), Matmul(rows, seq_len, self.head_dim))
        twice = tuple(op._replace(times=2) for op in matmuls)
        return (
            Work(matmuls, traffic_bytes=11 * scores, kernels=6),
            Work(twice, traffic_bytes=14 * scores, kernels=8),
        )

    def recompute_work(self, forward: Work, selected: Work, attention: Work) -> Work:
        if self.layout.activation_checkpoint == "attention":
            # With a flash kernel nothing is left to compute again.
            return attention if self.layout.kernel == "unfused" else Work()
        return super().recompute_work(forward, selected, attention)

    def layer_passes(self) -> tuple[Work, Work]:
        forward, backward = super().layer_passes()
        if not (fraction := self.layout.offload_fraction):
            return forward, backward
        offloaded = fraction * self.tokens * self.saved_bytes_of_all()
        transfer = Work(collectives=(Collective("send", offloaded, "offload", 2, 1, "prefetch"),))
        return forward + transfer, backward + transfer

    def p2p(self) -> Collective:
        message = super().p2p()
        if self.layout.scatter_p2p and not self.sequence_parallel:
            return message._replace(bytes=message.bytes / self.layout.tp)
        return message

    def score_bytes(self) -> float:
        """Return the bytes of attention scores per token and layer, without a flash kernel."""
        return 5 * self.heads * self.layout.seq_len if self.layout.kernel == "unfused" else 0.0

    def layer_bytes(self) -> float:
        saved, fusion = super().layer_bytes(), self.layout.fusion
        if fusion == "fused":  # inputs of linear layers are saved in low precision
            h = self.hidden / (self.layout.tp if self.sequence_parallel else 1)
            spared = {"bf16": 0.0, "float8": 1.0, "float4": 1.5}[self.precision]
            saved -= spared * (2 * h + self.ffn)
        if fusion == "norms":
            # Rotated in place in the product's output, keys and values beside it.
            saved += 2 * (self.num_up - 1) * self.ffn + 4 * self.kv
        return saved + self.score_bytes()

    def saved_bytes_of_all(self) -> float:
        """Return the bytes that a layer saves per token, offloaded or not."""
        saved = super().saved_bytes()
        if self.recomputes and not self.is_selective:
            saved -= (1 - self.recomputed_fraction) * self.score_bytes()
        return saved

    def saved_bytes(self) -> float:
        return self.saved_bytes_of_all() * (1 - self.layout.offload_fraction)

    def rank_memory(self, order: list[Action]) -> dict[str, float]:
        if not self.layout.include_reserved:
            return self.live_memory(order)
        memory = super().rank_memory(order)
        if "allocator" in memory:  # buffers that stay cause no fragmentation
            memory["allocator"] -= (RESERVED_RATIO - 1) * memory.get("buffers", 0.0)
        return memory

    def live_memory(self, order: list[Action]) -> dict[str, float]:
        memory, layout = super().live_memory(order), self.layout
        local_stages, counts = stage_indices(order), self.layers_per_stage
        if layout.pp > 1 and layout.recv_buffers:
            # For inputs that autograd does not save anyway, and for gradients.  The first stage
            # receives no input, the last no gradient.
            num_stages = len(counts)
            has_input = [float(s > 0) for s in range(num_stages)]
            saved_anyway, _ = peak_activations(order, has_input, [0.0] * num_stages)
            ends = (0 in local_stages) + (num_stages - 1 in local_stages)
            received = self.num_microbatches * (2 * len(local_stages) - ends)
            width = 2 * self.hidden / (layout.tp if self.sequence_parallel else 1)
            memory["buffers"] = (received - saved_anyway) * self.tokens * width
        if layout.uses_record_stream and layout.tp > 1:
            # The host runs ahead by a stage's forward or by the launch queue.  Two unsharded
            # outputs of each layer, inputs of reduce-scatters, stay allocated meanwhile.
            queued_layers = LAUNCH_QUEUE / self.layer_kernels
            pending_layers = min(max(counts[s] for s in local_stages), queued_layers)
            memory["late"] = pending_layers * 2 * 2 * self.tokens * self.hidden
        if layout.pp > 1 and len(counts) - 1 in local_stages and layout.output_bytes:
            outputs = layout.output_bytes * self.num_microbatches * self.tokens * self.vocab
            memory["outputs"] = outputs
            if outputs > memory["activations"] + memory["temporaries"]:  # the peak is joining them
                memory |= {"outputs": 2 * outputs, "activations": 0.0, "temporaries": 0.0}
        return memory


def _slow_attention(work: Work, factor: float) -> Work:
    slow = tuple(op._replace(flops=op.flops * factor) for op in work.attention)
    return replace(work, attention=slow)


# --------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class Stack:
    """A training system, with values that its rows do not state."""

    layout: dict[str, Any]
    seq_len: int = 4096
    vocab: int = 128256
    network: str | None = None
    # Defaults if the row has no value; "auto": as many layers as fit into memory.
    activation_checkpoint: str = "none"
    memory_rank: int | None = None  # pipeline rank of the published memory; None: the fullest


MEGATRON = Stack(
    # bf16 weights, float32 gradients; master weights and moments sharded over data-parallel ranks.
    {
        "zero": 1,
        "fusion": "fused",
        "kernel": "attention",
        "state_bytes": 12,
        "unsharded_bytes": 6,
        "tp_overlap": "async",
        "include_reserved": False,
        "recv_buffers": False,
    },
    seq_len=4096,
    activation_checkpoint="auto",
)
# Keyed by a word of the source; the first match is used.
STACKS: dict[str, Stack] = {
    # FSDP2; SDPA's FlashAttention 2; float32 gradient reduction; weights stay gathered between
    # microbatches of a pipeline; the schedule returns all logits, as it did until October 2025.
    "torchtitan": Stack({"zero": 3, "output_bytes": 2}, seq_len=8192),
    # Llama 2, FSDP1, gradients reduced in bfloat16.
    "fms-fsdp": Stack({"zero": 3, "gradient_bytes": 2}),
    "maximizing": Stack({"zero": 3, "gradient_bytes": 2}),
    # MPT: attn_impl triton, FlashAttention 1; layer norm is one kernel.
    "llm-foundry": Stack(
        {"zero": 3, "fusion": "fused", "kernel": "flash1"}, seq_len=2048, vocab=50368
    ),
    # DeepSpeed's Megatron fork of 2021: no flash attention, no sequence parallelism, unsharded
    # gradients reduced at the end of a step, full recomputation.
    "vtrain": Stack(
        {
            "zero": 0,
            "fusion": "fused",
            "kernel": "unfused",
            "sequence_parallel": False,
            "scatter_p2p": True,
            "dp_overlap": "exposed",
            "unsharded_bytes": 18,
            "state_bytes": 0,
            "gradient_bytes": 2,
            "recv_buffers": False,
        },
        seq_len=2048,
        vocab=51200,
        network="infiniband-200 x4",
        activation_checkpoint="full",
    ),
    "korthikanti": Stack(
        {
            **MEGATRON.layout,
            "kernel": "unfused",
            "zero": 0,
            "dp_overlap": "exposed",
            "tp_overlap": "exposed",
        },
        seq_len=2048,
        vocab=51200,
        activation_checkpoint="attention",
    ),
    # bf16 weights and gradients, and float32 copies, on all ranks; norms and rotary embeddings are
    # FlashAttention's kernels, the rest is eager.  Memory is that of the first rank.
    "nanotron": Stack(
        {
            "zero": 0,
            "fusion": "norms",
            "state_bytes": 12,
            "unsharded_bytes": 8,
            "tp_overlap": "async",
            "recv_buffers": False,
            "include_reserved": False,
            "uses_record_stream": True,
        },
        vocab=131072,
        network="playbook",
        memory_rank=0,
    ),
    "playbook": Stack(
        {"zero": 0, "state_bytes": 12, "unsharded_bytes": 6, "tp_overlap": "async"},
        vocab=131072,
        network="playbook",
    ),
    # Measured without overlap of communication, which SimuMax does not model.
    "simumax": replace(
        MEGATRON,
        layout={**MEGATRON.layout, "tp_overlap": "exposed", "dp_overlap": "exposed"},
        vocab=128256,
    ),
    "megatron": MEGATRON,
    "nemo": MEGATRON,
    "primus": MEGATRON,
    "stas00": Stack({"zero": 3, "fusion": "fused", "kernel": "attention"}),
    "llama 3": MEGATRON,
    "": MEGATRON,
}


class Unexpressed(ValueError):
    """A row cannot be predicted; the message has the reason."""


def stack_of(row: Row) -> tuple[str, Stack]:
    """Return the system that was run, by name; the oldest Megatron by its devices."""
    source = row["source"].lower()
    system, stack = next((k, s) for k, s in STACKS.items() if k in source)
    if system == "torchtitan" and re.search(r"paper t[1-4]\b", source):
        # Before 22 October 2024 the model returned float32 logits.
        return system, replace(stack, layout={**stack.layout, "output_bytes": 4})
    if system == "megatron" and re.match("a100|v100", row["gpu"].lower()):
        return "megatron of 2021", replace(STACKS["vtrain"], network=None)
    return system, stack


def number(text: str) -> float:
    match = re.match(r"\s*~?(\d+\.?\d*|\.\d+)", text.replace(",", ""))
    return float(match[1]) if match else 0.0


def device_of(row: Row) -> Device:
    devices = load_clusters()[0]
    plain = re.sub(r"[^a-z0-9]", "", row["gpu"].lower())
    if "h100" in plain and "gh100" not in plain:
        special = "500w" in plain or "hbm2e" in plain or "95g" in plain or "96g" in plain
        kind = "H100 PCIe" if "pcie" in plain else "H100 NVL" if "nvl" in plain else "H100"
        return devices["H100 500W" if special else kind]
    if "a100" in plain or "a800" in plain:
        base = "A800" if "a800" in plain else "A100"
        if "pcie" in plain and base == "A100":
            return devices["A100 PCIe"]
        return devices[f"{base} 40GB" if "40g" in plain else f"{base} 80GB"]
    result = [n for n in devices if re.sub(r"\W", "", n).lower() in plain]
    if not result:
        raise Unexpressed(f"device {row['gpu']!r} is not known")
    return devices[max(result, key=len)]


def sizes_of(row: Row, stack: Stack) -> DecoderDims:
    name = row["model"].lower()
    if not row["hidden"] or not row["layers"]:
        key = re.sub(r"llama-?(\d)(\.\d)?[-_ ]*", r"llama-\1-", name).replace("_", "-")
        known = next((m for k, m in MODELS.items() if key.startswith(k)), None)
        if known is None:
            raise Unexpressed(f"sizes of {row['model']!r} are not published")
        return DecoderDims(*known)
    layers, hidden = int(number(row["layers"])), int(number(row["hidden"]))
    if min(layers, hidden) < 1:
        raise Unexpressed(f"{row['layers']} layers of width {row['hidden']}")
    heads = int(number(row["heads"])) or hidden // 128
    vocab = int(number(row["vocab"])) or stack.vocab
    ffn = int(number(row["ffn"])) or 4 * hidden
    sizes = DecoderDims(layers, hidden, heads, int(number(row["kv_heads"])) or heads, ffn, vocab)
    if re.search(r"gpt|mpt|nemotron|bloom", name):
        # These models have tied embeddings and learned positions.
        return replace(sizes, gated=False, tied=not re.search("nemotron", name))
    if "qwen3" in name:
        sizes = replace(sizes, head_dim=128)
    params = number(row["params_b"]) * 1e9
    if not params:
        return sizes
    # Infer gated feed-forward and tied embeddings from the number of parameters.
    kinds = [replace(sizes, gated=g, tied=t) for g in (True, False) for t in (False, True)]
    return min(kinds, key=lambda kind: round(abs(kind.params / params - 1), 2))


def by_cost(sizes: DecoderDims, stages: int) -> tuple[int, ...]:
    """Return layers per stage as Nanotron assigns them: by matmuls, logits included.

    A stage ends after the layer that exceeds its share.
    """
    cost = sizes.layer_params - 2 * sizes.hidden
    item = (sizes.layers * cost + sizes.vocab * sizes.hidden) / stages
    counts, stage = [0] * stages, 0
    for layer in range(1, sizes.layers + 1):
        counts[stage] += 1
        if layer * cost > (stage + 1) * item:
            stage = min(stage + 1, stages - 1)
    return tuple(counts)


def layout_of(row: Row, sizes: DecoderDims, stack: Stack) -> Layout:
    def full(key: str, default: int = 1) -> int:
        return int(number(row[key])) or default

    notes, source = row["notes"].lower(), row["source"].lower()
    devices, tp, pp, cp = full("n_gpus", 0), full("tp"), full("pp"), full("cp")
    if not devices:
        raise Unexpressed("number of devices is not published")
    dp = devices // (tp * pp * cp)
    if dp < 1:
        raise Unexpressed(f"tp {tp} x pp {pp} x cp {cp} are more than {devices} devices")
    options = dict(stack.layout)
    shard, copies = full("dp_shard", 0), full("dp_replicate", 0)
    if options["zero"] == 3 or shard > 1:
        shard = shard or (dp // copies if copies else 8 if "hsdp" in notes and dp > 8 else dp)
        shard = min(shard, dp)
        if options["zero"] != 3:  # Megatron-FSDP
            options |= {"zero": 3, "state_bytes": 18, "unsharded_bytes": 0}
        if pp > 1 or "shard_grad_op" in notes or "reshard=never" in source:
            options["zero"] = 2
    elif options["zero"] == 1 or "zero-1" in notes:
        options["zero"], shard = 1, dp
        if "nanotron" in source:  # reduced after the last backward, without DDP
            options["dp_overlap"] = "exposed"
    else:
        shard = dp
        if options["zero"] == 0 and "state_bytes" in options:
            options["unsharded_bytes"] = options.get("unsharded_bytes", 0) + options["state_bytes"]
            options["state_bytes"] = 0
            if "nanotron" in source and dp > 1:
                options["unsharded_bytes"] += 2  # DDP's buckets
    copies = max(1, dp // max(1, shard)) if shard else dp
    batch = full("global_batch", 0)
    micro = full("micro_batch", 0)
    match = re.search(r"microbatches (\d+)|grad-accum (\d+)", notes)
    counted = int(next(x for x in match.groups() if x)) if match else 0
    if not batch and micro:
        batch = micro * dp * (counted or 1)
    batch = batch or dp
    if pp > 1 and source.startswith("torchtitan") and batch // dp > 1:
        # The column is the local batch; the number of microbatches is TorchTitan's default.
        micro = max(1, batch // dp // pp)
    micro = micro or max(1, batch // dp // counted if counted else 1)
    if "nanotron" in source and batch <= micro * dp:
        # bf16 gradients live only in a backward pass; with one microbatch, that is after the peak.
        options["unsharded_bytes"] -= 2
    text = row["precision"].lower()
    precision = "float4" if "fp4" in text else "float8" if re.search("fp8|float8", text) else "bf16"
    if not text and "fp8" in source:
        precision = "float8"
    text = row["ac"].lower()
    activation_checkpoint = stack.activation_checkpoint
    if text:
        words = {"block": "block", "sac": "selective", "op": "selective", "full": "full"}
        activation_checkpoint = next((kind for word, kind in words.items() if word in text), "none")
        if "selective" in text and "op" not in text and "block" not in text:
            activation_checkpoint = "attention" if options.get("kernel") != "flash" else "selective"
    hfu = re.search(r"hfu ([\d.]+)", notes)
    if activation_checkpoint == "block" and hfu and number(row["mfu"]):
        # HFU / MFU is 4/3 if every layer is recomputed.
        options["activation_checkpoint_fraction"] = min(
            1.0, max(0.0, 3 * (float(hfu[1]) / number(row["mfu"]) - 1))
        )
    if row["compile"] in ("0", "1"):
        fused = options.get("fusion") == "fused"
        options["fusion"] = "compiled" if row["compile"] == "1" else "fused" if fused else "eager"
    if row["async_tp"] in ("0", "1") and tp > 1:
        options["tp_overlap"] = "async" if row["async_tp"] == "1" else "exposed"
    if precision == "float4" and options.get("tp_overlap") == "async":
        options["tp_overlap"] = "exposed"  # Megatron-Bridge's recipes turn the overlap off
    if source.startswith("torchtitan") and tp > 1 and "tensorwise" in row["precision"].lower():
        options["tp_gather_bytes"] = 1  # Float8ColwiseParallel and its like cast, then gather
    if "pure mixed" in notes:
        options |= {"gradient_bytes": 2, "state_bytes": 8}
    if re.search("chunked ce", source):
        options["chunked_loss"] = True
    per_rank = full("vpp")
    if "interleaved" in row["schedule"].lower():
        per_rank = max(2, per_rank)
    schedule = "1F1B" if per_rank == 1 else "Interleaved1F1B"
    if "gpipe" in row["schedule"].lower():
        schedule = "GPipe"
    if re.search(r"zero.?bubble|\bzb", row["schedule"].lower()):
        schedule, per_rank = "InterleavedZeroBubble", max(2, per_rank)
    if "nanotron" in source and pp > 1:
        options["stage_layers"] = by_cost(sizes, pp)
    if sizes.layers + 2 < pp * per_rank:
        raise Unexpressed(f"{pp * per_rank} stages of {sizes.layers} layers")
    return Layout(
        seq_len=full("seq_len", stack.seq_len),
        microbatch_size=micro,
        global_batch_size=batch,
        dp_replicate=copies,
        dp_shard=shard,
        tp=tp,
        cp=cp,
        pp=pp,
        stages_per_rank=per_rank,
        schedule_name=schedule,
        precision=cast(Any, precision),
        activation_checkpoint=cast(Any, activation_checkpoint),
        **options,
    )


def hardware_of(row: Row, stack: Stack) -> Hardware:
    device = device_of(row)
    networks = load_clusters()[1]
    network = networks[stack.network] if stack.network else device.network
    description = f"{row['source']} {row['notes']} {row['gpu']}".lower()
    if re.search(r"\befa\b|\bp5e?\b", description) and not stack.network:
        network = networks["efa-3200"]
    node = int(number(row["gpus_per_node"])) or (72 if device.name.startswith("GB") else 8)
    match = re.search(r"(\d{3,4}) ?gbps", description)
    if match:  # devices of a node
        network = replace(network, bandwidth=float(match[1]) * 1e9 / 8 / node)
    return Hardware(replace(device, network=network), node)


def measured(row: Row, sizes: DecoderDims, layout: Layout, device: Device) -> float:
    """Return the published tokens/s per device, or 0."""
    if row["tok_s_per_gpu"]:
        return number(row["tok_s_per_gpu"])
    time = re.search(r"iteration time ([\d.,]+) ?(ms|s)", row["notes"])
    if time:
        seconds = number(time[1]) / (1000 if time[2] == "ms" else 1)
        return layout.tokens_per_step / seconds / number(row["n_gpus"])
    flops = number(row["tflops_per_gpu"]) * 1e12
    flops = flops or number(row["mfu"]) * (0.01 if number(row["mfu"]) > 1.5 else 1) * device.bf16
    if "peak is hfu" in row["notes"].lower():
        flops *= 0.75  # full recomputation
    # The published formula: matmuls with weights and full attention, times three.
    weights = sizes.layers * sizes.layer_params + sizes.vocab * sizes.hidden
    return flops / (6 * weights + 12 * sizes.layers * sizes.q * layout.seq_len)


@dataclass
class Case:
    row: Row
    system: str
    measured: float
    predicted: float = 0.0
    memory: float = 0.0  # predicted memory in GiB
    live: float = 0.0  # GiB that the allocator cannot release
    capacity: float = 0.0
    spent: dict[str, float] | None = None
    calibrated: float = 0.0
    choice: tuple[Any, ...] = ()

    @property
    def source(self) -> str:
        return self.row["source"]

    @property
    def out_of_memory(self) -> bool:
        return bool(re.search(r"out of memory|\boom\b", self.row["notes"].lower()))

    @property
    def measured_memory(self) -> float:
        return number(self.row["mem_gib"])


def live(held: dict[str, float]) -> float:
    """Return the GiB that a run needs at least.

    Before it fails, the allocator releases its reserve, except for a fragmented twentieth.  The
    driver needs 1 GiB.
    """
    return 1.05 * (sum(held.values()) - held.get("allocator", 0.0)) / GIB + 1


def fitted(sizes: DecoderDims, layout: Layout, device: Device) -> Layout:
    """Return the layout with the published recomputation, or the least that fits.

    Recomputation is in tenths of the layers. With a Grace host Megatron's FSDP offloads
    activations instead. A model whose unsharded weights never fit was run with FSDP.
    """
    if cast(str, layout.activation_checkpoint) != "auto":
        return layout
    for part in range(11):
        if layout.zero == 3 and device.name.startswith("G"):
            layout = replace(layout, activation_checkpoint="none", offload_fraction=part / 10)
        else:
            layout = replace(
                layout, activation_checkpoint="block", activation_checkpoint_fraction=part / 10
            )
        if live(PublishedRun(sizes, layout).estimate_memory()) <= device.memory_gib:
            return layout
    if layout.zero == 1 and layout.pp == 1 and layout.dp_size > 1:
        full = replace(
            layout,
            zero=3,
            state_bytes=18,
            unsharded_bytes=0,
            activation_checkpoint=cast(Any, "auto"),
        )
        return fitted(sizes, full, device)
    return layout


def case_of(row: Row) -> Case:
    """Predict a row.

    Raises:
        Unexpressed: the row cannot be predicted.
    """
    row = defaultdict(str, {key: (value or "").strip() for key, value in row.items() if key})
    if "bug" in f"{row['precision']} {row['notes']}".lower():
        raise Unexpressed("measured with a bug that the source then removes")
    if re.search(r"moe|mixtral|deepseek|-a\d+b|grok|dbrx|lora", row["model"].lower()):
        raise Unexpressed("only dense decoders are priced")
    system, stack = stack_of(row)
    sizes = sizes_of(row, stack)
    hardware = hardware_of(row, stack)
    layout = fitted(sizes, layout_of(row, sizes, stack), hardware.device)
    if layout.num_microbatches * layout.pp * layout.stages_per_rank > 1_000_000:
        raise Unexpressed("more than a million actions of a pipeline")
    case = Case(row, system, measured(row, sizes, layout, hardware.device))
    if not (case.measured or case.measured_memory or case.out_of_memory):
        raise Unexpressed("nothing that was measured is published")
    run = PublishedRun(sizes, layout)
    try:
        elapsed = run.step_seconds(hardware)
    except (ValueError, AssertionError) as error:
        raise Unexpressed(f"schedule: {error}") from error
    case.spent = dict(elapsed)
    case.predicted = layout.tokens_per_step / elapsed.total() / number(row["n_gpus"])
    held = published = run.estimate_memory()
    if stack.memory_rank is not None and layout.pp > 1:
        published = run.rank_memory(run.schedule[stack.memory_rank])
    case.memory = sum(published.values()) / GIB
    if not (0 < case.predicted < math.inf and 0 < case.memory < math.inf):
        raise Unexpressed("its numbers give no prediction")
    # Memory with which the run would just fit.
    case.live = live(held)
    case.capacity = hardware.device.memory_gib
    case.choice = (case.source, row["model"], row["n_gpus"], row["gpu"], row["seq_len"])
    return case


def calibrate(cases: Sequence[Case]) -> None:
    """Set `Case.calibrated` with one scalar per source, fitted to its other rows."""
    ratio = {id(c): math.log(c.measured / c.predicted) for c in cases}
    for case in cases:
        rules: list[Callable[[Case], bool]] = [
            lambda c, k=case: c.source == k.source,  # type: ignore[misc]
            lambda c, k=case: c.system == k.system,  # type: ignore[misc]
            lambda c: True,
        ]
        for rule in rules:
            rest = [ratio[id(c)] for c in cases if c is not case and rule(c)]
            if rest:
                case.calibrated = case.predicted * math.exp(statistics.median(rest))
                break


def ranks(values: Iterable[float]) -> list[float]:
    """Return ranks; equal values have their mean rank."""
    subset = list(values)
    return [sum(v < x for v in subset) + (subset.count(x) - 1) / 2 for x in subset]


def choice_sets(cases: Sequence[Case]) -> list[tuple[float, float, str]]:
    """Return rank correlation, loss of the first choice, and name of each choice set."""
    sets: dict[tuple[Any, ...], list[Case]] = defaultdict(list)
    for case in cases:
        sets[case.choice].append(case)
    results = []
    for subset in sets.values():
        if len(subset) < 3 or len({c.measured for c in subset}) < 3:
            continue
        predicted_ranks, measured_ranks = (
            ranks(c.predicted for c in subset),
            ranks(c.measured for c in subset),
        )
        # Equal predictions have no order.
        rho = (
            float(np.corrcoef(predicted_ranks, measured_ranks)[0, 1])
            if len(set(predicted_ranks)) > 1
            else 0.0
        )
        best = max(c.measured for c in subset)
        lost = 1 - max(subset, key=lambda c: c.predicted).measured / best
        row = subset[0].row
        name = f"{subset[0].source[:30]}, {row['model']} on {row['n_gpus']}, {len(subset)} layouts"
        results.append((rho, lost, name))
    return results


def differences(cases: Sequence[Case]) -> str:
    """Return how well the planner orders two layouts; `weft compare` builds on it."""
    sets: dict[tuple[Any, ...], list[Case]] = defaultdict(list)
    for case in cases:
        sets[case.choice].append(case)
    pairs = [
        (a.predicted / b.predicted, a.measured / b.measured)
        for subset in sets.values()
        for a, b in combinations(subset, 2)
    ]
    off = [max(predicted / measured, measured / predicted) - 1 for predicted, measured in pairs]
    text = f"{len(pairs)} pairs: ratios off by {percentile(off, 50):.1%}"
    text += f", p90 {percentile(off, 90):.1%}"
    for name, distant in (("above", True), ("below", False)):
        right = [(t > 1) == (w > 1) for t, w in pairs if (max(t, 1 / t) > 1.15) == distant]
        text += f"; {name} 15 % apart {len(right)}, direction right {statistics.fmean(right):.0%}"
    return text


def percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else math.nan


def summary(cases: Sequence[Case], skipped: int) -> dict[str, float | int]:
    timed = [c for c in cases if c.measured]
    calibrate(timed)
    raw = [abs(c.predicted / c.measured - 1) for c in timed]
    fine = [abs(c.calibrated / c.measured - 1) for c in timed]
    memory = [abs(c.memory / c.measured_memory - 1) for c in cases if c.measured_memory]
    # Leave out rows without published memory or recomputation.
    memory_cases = [c for c in cases if c.measured_memory or c.out_of_memory or c.row["ac"]]
    fits = [(c.live <= c.capacity) != c.out_of_memory for c in memory_cases]
    sets = choice_sets(timed)
    return {
        "throughput_median_error": percentile(raw, 50),
        "throughput_p90_error": percentile(raw, 90),
        "throughput_median_error_calibrated": percentile(fine, 50),
        "throughput_p90_error_calibrated": percentile(fine, 90),
        "memory_median_error": percentile(memory, 50),
        "memory_worst_error": percentile(memory, 100),
        "rank_correlation": statistics.fmean(rho for rho, *_ in sets) if sets else math.nan,
        "top1_regret": statistics.fmean(lost for _, lost, _ in sets) if sets else math.nan,
        "fits_accuracy": sum(fits) / len(fits) if fits else math.nan,
        "rows": len(cases),
        "skipped": skipped,
    }


def describe(case: Case) -> str:
    row = case.row
    total = sum((case.spent or {}).values())
    elapsed = " ".join(
        f"{k} {v / total:.0%}" for k, v in (case.spent or {}).items() if v > 0.01 * total
    )
    layout = "x".join(row[k] or "-" for k in ("n_gpus", "tp", "pp", "cp"))
    cells = [
        f"{case.source[:24]:24} {row['model'][:16]:16} {row['gpu'][:10]:10} {layout:12}",
        f"mb{row['micro_batch'] or '-':3} s{row['seq_len'] or '-':6}",
        f"{row['precision'][:8]:8} {row['ac'][:6]:6}",
    ]
    if case.measured:
        cells.append(
            f"{case.measured:8.0f} {case.predicted:8.0f} {case.predicted / case.measured - 1:+5.0%}"
        )
        cells.append(f"{case.calibrated / case.measured - 1:+5.0%}")
    if case.measured_memory:
        off = case.memory / case.measured_memory - 1
        cells.append(f"{case.measured_memory:6.1f} {case.memory:6.1f} {off:+5.0%}")
    elif case.out_of_memory:
        cells.append(f"   OOM {case.memory:6.1f}")
    return " ".join([*cells, elapsed])


def by_system(cases: Sequence[Case]) -> list[str]:
    lines = []
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        groups[case.system or case.source].append(case)
    for name, subset in groups.items():
        timed = [c for c in subset if c.measured]
        bias = [c.predicted / c.measured - 1 for c in timed]
        raw = [abs(x) for x in bias]
        fine = [abs(c.calibrated / c.measured - 1) for c in timed]
        memory = [abs(c.memory / c.measured_memory - 1) for c in subset if c.measured_memory]
        sets = choice_sets(timed)
        lines.append(
            f"{name[:24]:24} {len(subset):4} rows  bias {percentile(bias, 50):+6.1%}"
            f"  error {percentile(raw, 50):6.1%} p90 {percentile(raw, 90):6.1%}"
            f"  calibrated {percentile(fine, 50):6.1%} p90 {percentile(fine, 90):6.1%}"
            f"  memory {percentile(memory, 50):6.1%} worst {percentile(memory, 100):6.1%}"
            f"  rho {percentile([r for r, *_ in sets], 50):5.2f}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    shipped = Path(__file__).with_name("published_runs.csv")
    parser.add_argument("file", type=Path, nargs="?", default=shipped)
    parser.add_argument("--json", action="store_true", help="only the summary, for machines")
    options = parser.parse_args()
    cases: list[Case] = []
    skipped: list[str] = []
    with options.file.open(newline="") as file:
        for line, row in enumerate(csv.DictReader(file), 2):
            try:
                cases.append(case_of(row))
            except Unexpressed as reason:
                skipped.append(f"line {line}, {row.get('source')}, {row.get('model')}: {reason}")
            except Exception as error:  # one bad row must not end the report
                skipped.append(f"line {line}: cannot be read: {type(error).__name__}: {error}")
    result = summary(cases, len(skipped))
    if options.json:
        print(json.dumps(result))
        return
    print(*(describe(case) for case in cases), sep="\n")
    print(*(f"skipped: {cause}" for cause in skipped), sep="\n")
    for rho, lost, name in sorted(choice_sets([c for c in cases if c.measured])):
        print(f"choice set {name}: rank correlation {rho:.2f}, regret {lost:.1%}")
    print(differences([c for c in cases if c.measured]))
    print(*by_system(cases), sep="\n")
    print(*(f"{key:36} {value:.3f}" for key, value in result.items()), sep="\n")


if __name__ == "__main__":
    main()
