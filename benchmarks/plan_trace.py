"""Score `weft plan` itself on published measurements.

    python -m benchmarks.plan_trace [--json] [--rows FILE] [--traces DIRECTORY] [--ranges FILE]
        [--match TEXT] [--limit N] [FILE ...]

Each row of the CSV files becomes keys of a weft job and a cluster (`job_of`).  `weft plan`'s trace
of that job is priced for that cluster.  Where the row was measured in another program, that
program's properties (`Foreign`) are applied to the traced operators: its attention kernel, how its
communication overlaps, and the bytes of its optimizer states and logits.  Each is from the
program's code or papers, and none is fitted.

The output has errors by group (dense models in FSDP2 programs, other dense ones, context
parallelism, experts, adapters), by source and by device: raw, and with one scalar per source that
is fitted to the other rows of the source.  ``covered`` is the fraction of rows in the range that
the group's rows of other sources give (`find_range`).  Rows that are not predicted are listed with
the reason.

A trace takes some seconds of processor time.  ``--rows`` keeps predictions, and a second run makes
only those that are missing.  ``--traces`` keeps traces, which a change of a price leaves valid;
delete the directory if what is traced has changed.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import json
import math
import pickle
import re
import signal
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.plan_accuracy import (
    LOGIT_BYTES,
    Layout,
    Stack,
    Unexpressed,
    hardware_of,
    layout_of,
    number,
    percentile,
    ranks,
    sizes_of,
    stack_of,
)
from weft.config.errors import InvalidConfig
from weft.config.reader import read_job
from weft.estimate.cost import (
    Attention,
    Collective,
    Hardware,
    Matmul,
    Overlap,
    Precision,
    Seconds,
    StageWork,
    Step,
    Work,
    WorkList,
    step_seconds,
)
from weft.estimate.error_ranges import ErrorRange
from weft.estimate.forecast import price_traces
from weft.estimate.trace import RankTrace, trace_ranks
from weft.estimate.trace_memory import RankMemory, peak_live_bytes
from weft.estimate.trace_to_cost import build_step
from weft.models.decoder_costs import unit_costs
from weft.planning.devices import GIB, Device
from weft.planning.plan import Machine, Plan
from weft.planning.resolve import resolve

Row = dict[str, str]
SHIPPED = [
    Path(__file__).with_name(name) for name in ("published_runs.csv", "published_runs_moe.csv")
]
# Seconds of wall time after which a row is given up.
MAX_SECONDS = 300
# Fraction of measured times in a range.
COVERAGE = 0.9
UNBOUNDED = ErrorRange(0.0, math.inf)
# Groups of weft's plans, with the rows that resemble them: weft is an FSDP2 program.
RANGES = {
    "dense": "dense, FSDP2",
    "context parallel": "context parallel",
    "experts": "experts",
    "adapters": "adapters",
}


# --------------------------------------------------------------------------- other programs


@dataclass(frozen=True)
class Foreign:
    """What another program does with the operators that weft traces.

    Attributes:
        kernel: attention kernel: "flash1", "flash" (2), "attention" (made for the device), or
            "unfused", which materializes the scores; empty: as weft.
        overlaps: how its collectives overlap, by axis of the mesh.
        state_bytes: bytes per parameter that are sharded like optimizer states; weft has 16.
        unsharded_bytes: bytes per parameter on every data-parallel rank.
        logit_bytes: bytes per logit of a microbatch in its loss; weft's has chunks.
        output_bytes: bytes per logit that the last stage keeps of each microbatch.
        deduplicates: its dispatcher sends a token once to each node.
        reports_reserved: its memory is what the allocator reserves, not what is live.
        precision: of the products in the blocks, if other than that of the trace.
        cast_bytes: bytes that a cast of an input or a gradient moves per element; it casts weights
            once per step.
        launches: fraction of the launches that the host makes; CUDA graphs replay the others.
        fuses: it has Transformer Engine's layers, which save less.
        document_tokens: mean tokens of packed documents, which attention does not cross; 0: as long
            as the sequence.
    """

    kernel: str = ""
    overlaps: Mapping[str, Overlap] = field(default_factory=dict)
    state_bytes: float = 16.0
    unsharded_bytes: float = 0.0
    logit_bytes: float = 0.0
    output_bytes: float = 0.0
    deduplicates: bool = False
    reports_reserved: bool = False
    precision: Precision = "bf16"
    cast_bytes: float = 0.0
    launches: float = 1.0
    fuses: bool = False
    document_tokens: float = 0.0


# Programs that share a stack's layout, but whose float8 is torchao's, as weft's is.
OWN_KERNELS = re.compile(r"torchtitan|\btrl\b|automodel|pith")
DATA_AXES = ("dp_replicate", "dp_shard", "efsdp")


# Transformer Engine reads two bytes per element and writes one for each of two layouts.  Current
# scaling reads them once more, for the largest one; four bits take a rotation and a second scale.
TE_CAST_BYTES: dict[Precision, float] = {"float8": 4.0, "float4": 8.0}
CURRENT_SCALING_BYTES = 6.0
# Only the gradient of a weight reads the second layout of an input.
FROZEN_CAST_BYTES = 3.0
# A context of SQuAD has 120 words, a question 11 (Rajpurkar et al., 2016), at 1.4 tokens per word.
SQUAD_TOKENS = 180.0


def te_precision(row: Row, stack: Stack) -> Precision:
    """Return the precision of Transformer Engine's products; it converts experts, too."""
    text = f"{row['precision']} {row['source'] if not row['precision'] else ''}".lower()
    if stack.layout.get("fusion") != "fused" or OWN_KERNELS.search(row["source"].lower()):
        return "bf16"
    return "float4" if "fp4" in text else "float8" if re.search(r"fp8|float8", text) else "bf16"


def te_cast_bytes(row: Row, precision: Precision) -> float:
    """Return the bytes per element of Transformer Engine's casts."""
    if precision == "float8" and row["method"].startswith("lora"):
        return FROZEN_CAST_BYTES
    if precision == "float8" and re.search(r"fp8.cs", f"{row['precision']} {row['notes']}".lower()):
        return CURRENT_SCALING_BYTES
    return TE_CAST_BYTES.get(precision, 0.0)


def foreign_of(row: Row, layout: Layout, stack: Stack) -> Foreign:
    """Return the properties of the program that a row was measured in."""
    overlaps: dict[str, Overlap] = {}
    if layout.dp_overlap != "prefetch":
        overlaps |= dict.fromkeys(DATA_AXES, layout.dp_overlap)
    if layout.tp > 1:
        overlaps["tp"] = layout.tp_overlap
    notes = row["notes"].lower()
    if re.search(r"\bep (a2a )?overlap\b(?! off)|ep 1f1b a2a overlap", notes) and (
        "no ep overlap" not in notes
    ):
        overlaps["ep"] = "prefetch"  # behind the other pass of a pair of microbatches
    precision = te_precision(row, stack)
    is_own = re.search(r"torchtitan|\btrl\b", f"{row['source']} {notes}".lower())
    is_fsdp = layout.zero == 3
    return Foreign(
        layout.kernel,
        overlaps,
        16.0 if is_fsdp else layout.state_bytes,
        0.0 if is_fsdp else layout.unsharded_bytes,
        0.0
        if layout.chunked_loss or re.search(r"chunked (nll|ce)|loss chunks", notes)
        else LOGIT_BYTES[layout.fusion],
        float(layout.output_bytes) if layout.pp > 1 else 0.0,
        row["dispatch"] in ("hybridep", "deepep"),
        layout.include_reserved,
        precision,
        te_cast_bytes(row, precision),
        0.0 if re.search(r"cuda graphs:? full.iteration", notes) else 1.0,
        layout.fusion == "fused" and layout.kernel == "attention" and not is_own,
        SQUAD_TOKENS if "packed" in notes and "squad" in notes else 0.0,
    )


class Adapter:
    """Applies the properties of another program to traced work."""

    def __init__(self, foreign: Foreign, plan: Plan, hardware: Hardware) -> None:
        self.foreign, self.plan, self.hardware = foreign, plan, hardware

    def step(self, step: Step) -> Step:
        """Return a step as the other program runs it."""
        stages = tuple(
            replace(
                stage,
                forward=self.works(stage.forward, 1.0),
                backward=self.works(stage.backward, self.fraction_cast(stage)),
                param_gather=self.works(stage.param_gather),
                grad_reduce=self.works(stage.grad_reduce),
            )
            for stage in step.stages
        )
        return replace(step, stages=stages, optimizer_work=self.work(step.optimizer_work))

    def works(self, works: WorkList, fraction_cast: float = 0.0) -> WorkList:
        return tuple((self.work(work, fraction_cast), times) for work, times in works)

    def fraction_cast(self, stage: StageWork) -> float:
        """Return the fraction of the factors of a backward pass that are cast there.

        Forward casts its input.  Backward casts the gradient for two products, or for one if the
        weight is frozen, and recomputed inputs.
        """
        if not self.foreign.cast_bytes or self.plan.lora_rank:
            return 1.0
        sizes = [
            sum(
                times * op.m * op.k * op.times * op.groups
                for work, times in works
                for op in work.matmuls
                if self.converts(op)
            )
            for works in (stage.forward, stage.backward)
        ]
        if not sizes[1]:
            return 1.0
        flops = [
            sum(times * work.flops for work, times in works)
            for works in (stage.forward, stage.backward)
        ]
        recomputed = min(1.0, max(0.0, flops[1] / flops[0] - 2)) * sizes[0]
        return min(1.0, (recomputed + (sizes[1] - recomputed) / 2) / sizes[1])

    def converts(self, op: Matmul) -> bool:
        """Return True for products in the blocks, except routers and adapters."""
        model, plan = self.plan.model, self.plan
        vocab = -(-model.vocab_size // plan.tp)
        kept = {vocab, model.vocab_size, plan.lora_rank or -1}
        if op.groups == 1:
            kept.add(getattr(model, "num_experts", -1) or -1)
        return op.precision == "bf16" and kept.isdisjoint((op.m, op.k, op.n))

    def work(self, work: Work, fraction_cast: float = 0.0) -> Work:
        """Return a work with the program's kernels and overlaps."""
        foreign = self.foreign
        if foreign.precision != "bf16":
            work = self._lower_precision(work, fraction_cast)
        work = replace(work, kernels=work.kernels * foreign.launches)
        collectives = []
        for op in work.collectives:
            overlap = foreign.overlaps.get(op.axis, op.overlap)
            if overlap == "async" and op.kind not in ("all_gather", "reduce_scatter"):
                overlap = op.overlap
            if op.kind == "all_to_all" and foreign.deduplicates:
                op = op._replace(bytes=op.bytes * self.fraction_sent())
            collectives.append(op._replace(overlap=overlap))
        work = replace(work, collectives=tuple(collectives), chunks=())
        if foreign.kernel == "unfused":
            return self._unfused(work)
        kernel = "attention" if foreign.kernel == "attention" else "flash"
        slower = 2.0 if foreign.kernel == "flash1" else 1.0  # FlashAttention-2's paper
        attention = tuple(self._attention(op, kernel, slower) for op in work.attention)
        return replace(work, attention=attention)

    def _lower_precision(self, work: Work, fraction_cast: float) -> Work:
        """Return a work with products in float8 or four bits, and the casts of their factors."""
        matmuls, traffic = [], work.traffic_bytes
        for op in work.matmuls:
            if self.converts(op):
                size = op.m * op.k * op.times * op.groups
                traffic += fraction_cast * self.foreign.cast_bytes * size
                op = op._replace(precision=self.foreign.precision)
            matmuls.append(op)
        return replace(work, matmuls=tuple(matmuls), traffic_bytes=traffic)

    def _attention(self, op: Attention, kernel: Any, slower: float) -> Attention:
        if slower > 1:  # FlashAttention 1 suits heads of 64, later ones heads of 128
            slower *= min(1.0, op.head_dim / 128) ** 0.4
        if tokens := self.foreign.document_tokens:
            slower *= min(1.0, tokens / op.keys)
            op = op._replace(keys=min(op.keys, tokens))
        return op._replace(kernel=kernel, flops=op.flops * slower)

    def _unfused(self, work: Work) -> Work:
        """Return a work whose attention scores are in memory, 2 bytes each."""
        matmuls, traffic, kernels = list(work.matmuls), work.traffic_bytes, work.kernels
        for op in work.attention:
            # Forward computes 4 FLOPs per score and element of a head, without a causal mask.
            per_score = (10 if op.backward else 4) * op.head_dim
            scores = 2 * op.flops / per_score
            rows = scores / op.keys
            products = (
                Matmul(rows, op.head_dim, op.keys, 2 if op.backward else 1),
                Matmul(rows, op.keys, op.head_dim, 2 if op.backward else 1),
            )
            matmuls += products
            traffic += (14 if op.backward else 11) * scores
            kernels += 8 if op.backward else 6
        return replace(
            work,
            matmuls=tuple(matmuls),
            attention=(),
            traffic_bytes=traffic,
            kernels=kernels,
        )

    def fraction_sent(self) -> float:
        """Return the fraction of its rows that a rank sends if a node gets a token once.

        The expected number of different nodes of ``k`` balanced experts, over ``k``.
        """
        model, plan = self.plan.model, self.plan
        nodes = max(1, plan.ep // self.hardware.linked_devices)
        chosen = model.active_experts
        if nodes == 1:
            return 1.0
        if model.expert_groups > 1:  # the router selects groups, which are on few nodes
            nodes = min(nodes, model.active_groups)
        return float(nodes * (1 - (1 - 1 / nodes) ** chosen) / chosen)


# --------------------------------------------------------------------------- rows to jobs


# A word of the published name, and weft's family with its preset; the first match is used.
EXPERT_MODELS: tuple[tuple[str, str, str], ...] = (
    (r"gpt-oss-20b", "gpt_oss", "20b"),
    (r"gpt-oss", "gpt_oss", "120b"),
    (r"qwen3-30b", "qwen3_moe", "30b-a3b"),
    (r"qwen3-235b", "qwen3_moe", "235b-a22b"),
    (r"deepseek-v3(?!-16b)|deepseek-v2|moonlight|kimi|deepseek", "deepseek_v3", "671b"),
    (r"mixtral-8x7b", "mixtral", "8x7b"),
    (r"mixtral", "mixtral", "8x22b"),
    (r"scout", "llama4", "scout"),
    (r"maverick", "llama4", "maverick"),
    (r"", "mixtral", "8x7b"),  # softmax routers without other features, such as Grok-1
)
REFUSED: tuple[tuple[str, str], ...] = (
    (r"\bhybrid\b|gated delta|mamba", "layers that weft does not have (a hybrid)"),
    (r"dubious", "marked as dubious"),
    (r"compressed sparse|deepseek-v4|glm-5", "sparse attention, which weft does not have"),
    (r"out of memory|\boom\b", "out of memory: no time"),
    (r"not performance-tuned|support-verification|functional", "not tuned: a functional check"),
    (r"tp/pp/ep/gbs not stated", "its layout is not published"),
    (r"directional only", "not tuned: its source calls it directional only"),
    (r"optimisation history step \d\b", "not tuned: an early step of an optimization"),
    # github.com/NVIDIA-NeMo/Megatron-Bridge/releases/tag/v0.5.1, known issues.
    (r"26\.06\.01.*gpt-oss.*mxfp8", "measured with a regression that its release notes name"),
)


def model_keys(row: Row, stack: Stack) -> dict[str, Any]:
    """Return the keys of ``[model]``."""
    if row["num_experts"]:
        return expert_keys(row)
    sizes = sizes_of(row, stack)
    keys = {
        "kind": "llama",
        "preset": "8b",
        "num_layers": sizes.layers,
        "dim": sizes.hidden,
        "num_heads": sizes.heads,
        "num_kv_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim or sizes.hidden // sizes.heads,
        "ffn_dim": sizes.ffn,
        "vocab_size": sizes.vocab,
        "tied_embeddings": sizes.tied,
    }
    if not sizes.gated:
        keys |= {"gated": False, "activation": "gelu_tanh"}
    return keys


def expert_keys(row: Row) -> dict[str, Any]:
    """Return the keys of ``[model]`` of a row with experts."""
    name = row["model"].lower()
    kind, preset = next(known[1:] for known in EXPERT_MODELS if re.search(known[0], name))
    columns = {
        "num_layers": "layers",
        "dim": "hidden",
        "num_heads": "heads",
        "num_kv_heads": "kv_heads",
        "vocab_size": "vocab",
        "num_experts": "num_experts",
        "active_experts": "top_k",
        "expert_dim": "expert_ffn",
        "shared_experts": "shared_experts",
        "dense_layers": "dense_layers",
        "ffn_dim": "ffn",
    }
    keys: dict[str, Any] = {"kind": kind, "preset": preset}
    keys |= {key: int(number(row[column])) for key, column in columns.items() if row[column]}
    if not row["hidden"]:
        raise Unexpressed(f"sizes of {row['model']!r} are not published")
    if "with mtp" in row["notes"].lower():
        keys["mtp_layers"] = 1
    if row["mla"]:
        q_rank, _, kv_rank = row["mla"].partition("/")
        keys |= {"q_rank": int(number(q_rank)), "kv_rank": int(number(kv_rank))}
        if "deepseek-v3" not in name or "16b" in name:
            keys |= {"expert_groups": 1, "active_groups": 1}
    elif row["head_dim"]:
        keys["head_dim"] = int(number(row["head_dim"]))
    return keys


def float8_of(row: Row, stack: Stack) -> str:
    """Return ``precision.float8`` of a row; that of Transformer Engine is applied to the trace."""
    if te_precision(row, stack) != "bf16":
        return "none"
    text = f"{row['precision']} {row['source'] if not row['precision'] else ''}".lower()
    if "fp4" in text:
        raise Unexpressed("products in four bits, which weft does not have")
    if "mx" in text:
        return "mxfp8"
    if "block" in text:
        raise Unexpressed("float8 with scales of blocks, which weft does not have on this device")
    if "rowwise" in text:
        return "rowwise"
    return "tensorwise" if re.search(r"fp8|float8", text) else "none"


def recompute_keys(row: Row, layout: Layout, unpublished: str = "none") -> dict[str, Any]:
    """Return the keys of ``[activation_checkpoint]``; ``unpublished``: mode if no row says it."""
    text = row["ac"].lower()
    if is_unpublished(layout, row):
        return {"mode": unpublished}
    if "full" in text and "offload" in text:
        return {"mode": "full", "offload": True}
    mode = str(layout.activation_checkpoint)
    if text.startswith("selective:"):
        # Megatron's modules; weft recomputes operators.  Attention alone: nothing with a flash
        # kernel.
        modules = set(text.removeprefix("selective:").split("+"))
        heavy = modules & {"mlp", "moe", "core_attn"}
        return {"mode": "selective" if heavy - {"core_attn"} else "none"}
    if mode == "block":
        fraction = layout.activation_checkpoint_fraction
        every = round(1 / fraction) if fraction else 0
        return {"mode": "full", "every_n_layers": every} if every else {"mode": "none"}
    return {"mode": {"attention": "none", "auto": "none"}.get(mode, mode)}


def is_unpublished(layout: Layout, row: Row) -> bool:
    """Return True if a dense run recomputes what is necessary, and the row does not say what.

    The memory of experts is not known well enough for this rule: see docs/planner.md.
    """
    is_default = str(layout.activation_checkpoint) in ("auto", "none")
    return is_default and not row["ac"] and not row["num_experts"]


def job_of(
    row: Row, unpublished: str = "none"
) -> tuple[list[tuple[str, str]], Hardware, Layout, Stack, str]:
    """Return a row as keys of a job, with its hardware, layout, program and the program's name.

    Args:
        row: the row.
        unpublished: see `recompute_keys`.

    Raises:
        Unexpressed: the row has no equal in weft.
    """
    description = f"{row['source']} {row['model']} {row['notes']} {row['precision']}".lower()
    for pattern, reason in REFUSED:
        if re.search(pattern, description):
            raise Unexpressed(reason)
    if "bug" in f"{row['notes']} {row['precision']}".lower():
        raise Unexpressed("measured with a bug that the source then removes")
    system, stack = stack_of(row)
    hardware = hardware_of(row, stack)
    if "A100-PCIe chart" in row["source"]:
        # SimuMax's configs/system/a100_pcie.json: all-gather 0.450 and reduce-scatter 0.369 of
        # 30e9, measured over eight devices; with four 0.69.
        link = replace(hardware.device.link, bandwidth=12.3e9)
        hardware = replace(hardware, device=replace(hardware.device, link=link))
    layout = published_layout(row, stack)
    sections: dict[str, dict[str, Any]] = {
        "model": model_keys(row, stack) | {"max_seq_len": max(layout.seq_len, 4096)},
        "train": {
            "seq_len": layout.seq_len,
            "microbatch_size": layout.microbatch_size,
            "global_batch_size": layout.global_batch_size,
            "steps": 100,
        },
        "parallel": {
            "dp_replicate": layout.dp_replicate,
            "dp_shard": layout.dp_shard,
            "tp": layout.tp,
            "cp": layout.cp,
            "pp": layout.pp,
            # ZeRO-1 and DDP keep the weights whole on every rank.
            "reshard_after_forward": "always" if layout.zero == 3 else "never",
            "async_tp": layout.tp > 1 and layout.tp_overlap == "async",
        },
        "precision": {"float8": float8_of(row, stack)},
        "activation_checkpoint": recompute_keys(row, layout, unpublished),
        "compile": {"enable": layout.fusion != "eager"},
    }
    if layout.pp > 1:
        sections["pipeline"] = {"schedule": layout.schedule_name}
        if layout.stages_per_rank > 1:
            sections["pipeline"]["stages_per_rank"] = layout.stages_per_rank
    if ep := int(number(row["ep"])):
        sections["parallel"] |= {"ep": ep, "etp": 1 if row["etp"] in ("", "1") else "auto"}
        if layout.tp == 1:
            del sections["parallel"]["etp"]
    if row["method"].startswith("lora"):
        rank = re.search(r"r(\d+)", row["method"])
        sections["lora"] = {"rank": int(rank[1]) if rank else 16}
        if row["source"].startswith("NeMo docs"):
            # NeMo 1's megatron_gpt_finetuning_config.yaml: attention_qkv, adapter_dim 32.
            sections["lora"] = {"rank": 32, "targets": "q_proj,k_proj,v_proj"}
    keys = [
        (f"{name}.{key}", str(value).lower() if isinstance(value, bool) else str(value))
        for name, values in sections.items()
        for key, value in values.items()
    ]
    return keys, hardware, layout, stack, system


def published_layout(row: Row, stack: Stack) -> Layout:
    """Return the layout of a row; its data-parallel ranks shard states as its program does."""
    name = re.search(
        r"fsdp2|automodel|torchtitan|\btrl\b|pith", f"{row['source']} {row['notes']}".lower()
    )
    known = dict(row)
    if name or row["num_experts"]:
        known["dp_shard"], known["dp_replicate"] = "", ""
    sizes = sizes_of(defaultdict(str, known | {"ffn": row["ffn"] or row["expert_ffn"]}), stack)
    layout = layout_of(defaultdict(str, known), sizes, stack)
    if name and layout.zero != 3:
        layout = replace(layout, zero=3, dp_shard=layout.dp_size, dp_replicate=1)
    return layout


# --------------------------------------------------------------------------- prediction


@dataclass
class Scored:
    """A predicted row; memory in GiB, 0 if it was not measured.

    ``calibrated``: see `calibrate`; ``error_range``: see `set_error_ranges`.
    """

    line: str
    source: str
    system: str
    group: str
    device: str
    choice: str
    measured: float
    predicted: float
    measured_memory: float
    memory: float
    seconds: float
    breakdown: dict[str, float]
    calibrated: float = 0.0
    error_range: ErrorRange = UNBOUNDED

    @property
    def ratio(self) -> float:
        """Measured time, over the predicted one."""
        return self.predicted / self.measured


def group_of(row: Row, layout: Layout, system: str) -> str:
    """Return the kind of a row, of which errors are reported."""
    if row["method"].startswith("lora"):
        return "adapters"
    if layout.cp > 1:
        return "context parallel"
    if row["num_experts"]:
        return "experts"
    fsdp2 = ("torchtitan", "fms-fsdp", "maximizing", "stas00")
    return "dense, FSDP2" if system in fsdp2 else "dense, others"


def machine_of(hardware: Hardware, ranks: int) -> Machine:
    """Return the machine of a row's cluster."""
    device, local = hardware.device, min(hardware.devices, ranks)
    return Machine(
        device=device.type,
        devices=local,
        device_name=device.name,
        world_size=ranks,
        local_world_size=local,
        memory_bytes=int(device.memory_gib * GIB),
        capability=device.capability,
        peer_access=device.link.peer_access,
    )


def trace_plan(
    plan: Plan, machine: Machine, device: Device, name: str, directory: Path | None
) -> tuple[list[RankTrace], RankMemory]:
    """Return the traces of a plan and its memory, from ``directory`` if it has them."""
    path = directory / f"{name}.pickle.gz" if directory else None
    if path and path.exists():
        known: tuple[list[RankTrace], RankMemory] = pickle.loads(gzip.decompress(path.read_bytes()))
        return known
    traces = trace_ranks(plan)
    result = traces, price_traces(plan, machine, device, traces).memory
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(pickle.dumps(result), 3))
    return result


@dataclass(frozen=True)
class TracedRow:
    """The plan of a row, as another program runs it.

    ``held``: bytes of the fullest rank, ``activations`` of them saved for the backward pass.
    """

    plan: Plan
    hardware: Hardware
    layout: Layout
    system: str
    foreign: Foreign
    traces: list[RankTrace]
    activations: float
    held: float

    def seconds(self, offloaded: float = 0.0) -> Seconds:
        """Return the time of a step; ``offloaded``: bytes of each block's activations."""
        step = build_step(self.plan, self.traces, self.hardware.device)
        step = Adapter(self.foreign, self.plan, self.hardware).step(step)
        return step_seconds(offload(step, offloaded) if offloaded else step, self.hardware)


def offload(step: Step, size: float) -> Step:
    """Return a step whose blocks copy activations to host memory and back, behind their work."""
    copy = Work(collectives=(Collective("send", size, "offload", 2, 1, "prefetch"),))

    def add(works: WorkList) -> WorkList:
        return tuple((work + copy if work.attention else work, times) for work, times in works)

    stages = (
        replace(stage, forward=add(stage.forward), backward=add(stage.backward))
        for stage in step.stages
    )
    return replace(step, stages=tuple(stages))


def trace_row(row: Row, directory: Path | None, unpublished: str = "none") -> TracedRow:
    """Plan and trace a row; for ``directory`` see `predict`, for the rest `recompute_keys`."""
    keys, hardware, layout, stack, system = job_of(row, unpublished)
    machine, device = machine_of(hardware, int(number(row["n_gpus"]))), hardware.device
    plan = plan_of(keys, machine)
    if not measured_speed(row, plan, hardware):
        raise Unexpressed("no time was published")
    key = hashlib.sha256(repr((keys, machine)).encode()).hexdigest()[:24]
    traces, memory = trace_plan(plan, machine, device, key, directory)
    foreign = foreign_of(row, layout, stack)
    saved = saved_fraction(foreign, plan, traces[min(1, len(traces) - 1)])
    peaks = [peak_live_bytes(trace) for trace in traces]
    held = foreign_memory(foreign, plan, memory, peaks, saved)
    activations = saved * memory.live_bytes["activations"]
    return TracedRow(plan, hardware, layout, system, foreign, traces, activations, held)


def predict(row: Row, line: str, directory: Path | None = None) -> Scored:
    """Plan a row, and compare the plan with what was measured.

    Args:
        row: the row, with empty strings for unknown columns.
        line: its place.
        directory: where traces are kept; None: not at all.

    Raises:
        Unexpressed: the row cannot be planned, or has no measured time.
    """
    start = time.process_time()
    traced = trace_row(row, directory)
    plan, device, layout = traced.plan, traced.hardware.device, traced.layout
    spent, held = traced.seconds(), traced.held
    # Before it fails, the allocator releases its reserve, except for a fragmented twentieth; the
    # driver needs 1 GiB.
    room = (device.memory_gib - 1) * GIB / 1.05
    if is_unpublished(layout, row) and held > room:
        full = trace_row(row, directory, "full")
        part = min(1.0, (held - room) / max(1.0, held - full.held))
        if traced.foreign.fuses and layout.zero == 3 and device.name.startswith("G"):
            # `cpu_offloading` in Megatron-Bridge's recipes for Grace hosts.
            spent = traced.seconds(part * traced.activations / plan.model.num_layers * plan.pp)
        else:
            spent = blend(spent, full.seconds(), part)
        held += part * (full.held - held)
    predicted = plan.tokens_per_step / spent.total() / plan.world_size
    return Scored(
        line,
        row["source"],
        traced.system,
        group_of(row, layout, traced.system),
        device.name,
        "|".join((row["source"], row["model"], row["n_gpus"], row["gpu"], row["seq_len"])),
        measured_speed(row, plan, traced.hardware),
        predicted,
        number(row["mem_gib"]),
        held / GIB,
        time.process_time() - start,
        {name: round(seconds, 4) for name, seconds in spent.items()},
    )


def blend(first: Seconds, second: Seconds, part: float) -> Seconds:
    """Return the time of a step of which ``part`` of the layers are as in the second one."""
    return Seconds().add(first, 1 - part).add(second, part)


def saved_fraction(foreign: Foreign, plan: Plan, trace: RankTrace) -> float:
    """Return the bytes of activations that another program saves, relative to those traced.

    Transformer Engine saves the inputs of linear layers, of norms and of fused activations, each
    once, and inputs of linear layers in the precision of their products.  PyTorch's operators also
    save the parts of an activation and of a rotation.
    """
    if not foreign.fuses or plan.activation_checkpoint.mode == "full":
        return 1.0
    ordinal = min(1, plan.num_microbatches - 1)
    blocks: dict[object, int] = defaultdict(int)
    for event in trace.extrapolation.segment_events((0, "F", ordinal)):
        if event.location.is_in_block:
            blocks[event.location.block] += event.bytes
    if not ordinal or not blocks:  # the first microbatch also keeps weights
        return 1.0
    tokens = plan.microbatch_size * plan.seq_len / plan.cp
    traced = statistics.median(blocks.values()) * plan.tp / tokens
    return min(1.0, saved_bytes(foreign, plan) / traced)


def saved_bytes(foreign: Foreign, plan: Plan) -> float:
    """Return the bytes that Transformer Engine saves for a token of a typical block."""
    model = plan.model
    inputs = {"float8": 1.0, "float4": 0.5}.get(foreign.precision, 2.0)  # of linear layers
    query, value = model.num_heads * model.key_dim, model.num_heads * model.value_dim
    # Attention keeps its output, in bfloat16, which the next layer then has as its input.
    outputs = 2 + (inputs if inputs < 2 else 0)
    size = 4 * model.dim + inputs * model.dim + 2 * query + outputs * value
    if model.kv_rank:  # latent vectors, before and after their norms
        size += 2 * (query + value) + (2 + inputs) * (model.q_rank + model.kv_rank)
    else:
        size += 2 * model.num_kv_heads * (model.key_dim + model.value_dim)
    factors = 4 if model.gated else 2  # outputs of the first layer

    def network(width: int) -> float:
        return (factors + inputs) * width

    if plan.num_active_params < plan.num_params:
        chosen = model.active_experts * (inputs * model.dim + network(model.expert_dim))
        shared = model.shared_experts * network(model.expert_dim) + inputs * model.dim
        return float(size + chosen + shared)
    return float(size + inputs * model.dim + network(model.ffn_dim))


def plan_of(keys: list[tuple[str, str]], machine: Machine) -> Plan:
    """Return the plan of a job's keys.

    Raises:
        Unexpressed: weft refuses the job.
    """
    try:
        job, _, errors = read_job(
            "llama3-8b", [*keys, ("run.cluster", "local"), ("optim.name", "adamw")]
        )
        errors.raise_any()
        return resolve(job, machine)
    except InvalidConfig as error:
        raise Unexpressed(f"refused: {error.errors[0]}") from error


def foreign_memory(
    foreign: Foreign, plan: Plan, memory: RankMemory, live_peaks: Sequence[int], saved: float = 1.0
) -> float:
    """Return the bytes of the fullest rank with another program's states and logits.

    Args:
        foreign: the program.
        plan: the plan.
        memory: of the fullest rank.
        live_peaks: peak of live bytes of each pipeline rank.
        saved: see `saved_fraction`.
    """
    spared = (1 - saved) * memory.live_bytes["activations"]
    live = memory.live_bytes | {"activations": memory.live_bytes["activations"] - int(spared)}
    held = sum(live.values())
    if foreign.unsharded_bytes:  # its weights and gradients are whole
        experts = sum(unit.expert_params for unit in unit_costs(plan.model, 1)) / plan.pp
        others = plan.num_params / plan.pp - experts
        split = plan.ep * plan.etp  # ranks with different parts of a layer's experts
        shards = max(1, plan.dp_cp_size * plan.tp // split)
        held = live["activations"] + live["temporaries"]
        for size, ranks in ((others / plan.tp, plan.dp_cp_size), (experts / split, shards)):
            # Frozen weights have two bytes; adapters are too small to count.
            trained = foreign.unsharded_bytes + foreign.state_bytes / ranks
            held += int(size * (2 if plan.lora_rank else trained))
    # The last stage also has logits.
    last = 0
    if plan.pipeline is not None:
        stages = [plan.pipeline.stages_on_rank(rank) for rank in range(plan.pp)]
        last = max(range(plan.pp), key=lambda rank: max(stages[rank]))
    num_logits = plan.microbatch_size * plan.seq_len / plan.cp * plan.model.vocab_size / plan.tp
    outputs = foreign.output_bytes * plan.num_microbatches * num_logits
    held_last = held - (max(live_peaks) - live_peaks[last])
    loss = held_last + outputs + foreign.logit_bytes * num_logits
    # After the last backward pass, the outputs of all microbatches are joined.
    joined = held_last - live["activations"] - live["temporaries"] + 2 * outputs
    size = max(held, loss, joined)
    if foreign.reports_reserved:
        size += memory.reserved - sum(memory.live_bytes.values())
    return float(size)


def measured_speed(row: Row, plan: Plan, hardware: Hardware) -> float:
    """Return the published tokens/s per device; 0 if neither time nor FLOP/s were published."""
    if row["tok_s_per_gpu"]:
        return number(row["tok_s_per_gpu"])
    elapsed = re.search(r"iteration time ([\d.,]+) ?(ms|s)", row["notes"])
    if elapsed:
        seconds = number(elapsed[1]) / (1000 if elapsed[2] == "ms" else 1)
        return plan.tokens_per_step / seconds / number(row["n_gpus"])
    flops = number(row["tflops_per_gpu"]) * 1e12
    if not flops:
        mfu = number(row["mfu"])
        flops = mfu * (0.01 if mfu > 1.5 else 1) * hardware.device.bf16
    if "peak is hfu" in row["notes"].lower():
        flops *= 0.75  # full recomputation
    # Megatron's formula of experts halves attention, others do not.
    is_causal = bool(row["num_experts"]) and "titan" not in row["source"].lower()
    per_token = plan.causal_flops_per_token if is_causal else plan.flops_per_token
    return float(flops / per_token)


# --------------------------------------------------------------------------- summary


def calibrate(rows: Sequence[Scored]) -> None:
    """Set `Scored.calibrated` with one scalar per source, fitted to its other rows."""
    rules: list[Callable[[Scored, Scored], bool]] = [
        lambda a, b: a.source == b.source and a.group == b.group,
        lambda a, b: a.system == b.system and a.group == b.group,
        lambda a, b: a.group == b.group,
        lambda a, b: True,
    ]
    for row in rows:
        for rule in rules:
            rest = [
                math.log(other.measured / other.predicted)
                for other in rows
                if other is not row and rule(row, other)
            ]
            if rest:
                row.calibrated = row.predicted * math.exp(statistics.median(rest))
                break


def find_range(ratios: Sequence[float]) -> ErrorRange:
    """Return the range that has nine of ten further ratios: those of each side are equally rare.

    Of n ratios and a further one, each is equally likely to be among the k smallest of the n + 1
    (conformal prediction).  With fewer than 19 ratios it is the range of all.
    """
    known = sorted(ratios)
    outside = max(1, math.floor((1 - COVERAGE) / 2 * (len(known) + 1) + 1e-9))
    return ErrorRange(known[outside - 1], known[-outside])


def set_error_ranges(rows: Sequence[Scored]) -> None:
    """Set `Scored.error_range` from the rows of the group that are from other sources."""
    for row in rows:
        others = [r.ratio for r in rows if r.group == row.group and r.source != row.source]
        row.error_range = find_range(others) if others else UNBOUNDED


def format_ranges(rows: Sequence[Scored]) -> str:
    """Return ``weft/estimate/error_ranges.toml``."""
    lines = [
        "# Factors of a predicted time, between which nine of ten measured times of published runs",
        "# lie: see `weft.estimate.error_ranges`.  Written by:",
        "# python -m benchmarks.plan_trace --ranges weft/estimate/error_ranges.toml",
    ]
    for name, group in RANGES.items():
        ratios = [row.ratio for row in rows if row.group == group]
        low, high = find_range(ratios)
        sources = len({row.source for row in rows if row.group == group})
        lines += ["", f'["{name}"]', f"rows = {len(ratios)}", f"sources = {sources}"]
        lines += [f"low = {low:.3f}", f"high = {high:.3f}"]
    return "\n".join(lines) + "\n"


def summarize(rows: Sequence[Scored]) -> dict[str, float | int]:
    """Return the errors of a group."""
    raw = [abs(row.predicted / row.measured - 1) for row in rows]
    fine = [abs(row.calibrated / row.measured - 1) for row in rows]
    memory = [abs(r.memory / r.measured_memory - 1) for r in rows if r.measured_memory]
    covered = [row.error_range.low <= row.ratio <= row.error_range.high for row in rows]
    return {
        "rows": len(rows),
        "median": percentile(raw, 50),
        "p90": percentile(raw, 90),
        "bias": percentile([row.predicted / row.measured - 1 for row in rows], 50),
        "calibrated_median": percentile(fine, 50),
        "calibrated_p90": percentile(fine, 90),
        "memory_median": percentile(memory, 50),
        "memory_worst": percentile(memory, 100),
        "memory_rows": len(memory),
        "covered": sum(covered) / len(covered) if covered else math.nan,
    }


def by(rows: Sequence[Scored], name: str) -> dict[str, dict[str, float | int]]:
    """Return the errors by the values of a field, the largest group first."""
    groups: dict[str, list[Scored]] = defaultdict(list)
    for row in rows:
        groups[getattr(row, name)].append(row)
    return {key: summarize(groups[key]) for key in sorted(groups, key=lambda k: -len(groups[k]))}


def rank_correlation(rows: Sequence[Scored]) -> dict[str, float | int]:
    """Return how well predictions order the layouts of one model on one number of devices.

    Spearman's coefficient, its mean over sets of three or more layouts from one source; and the
    mean throughput that the fastest predicted layout loses.
    """
    sets: dict[str, list[Scored]] = defaultdict(list)
    for row in rows:
        sets[row.choice].append(row)
    correlations, lost = [], []
    for layouts in sets.values():
        measured, predicted = ([getattr(r, n) for r in layouts] for n in ("measured", "predicted"))
        if len(layouts) < 3 or min(len(set(measured)), len(set(predicted))) < 2:
            continue
        correlations.append(float(np.corrcoef(ranks(measured), ranks(predicted))[0, 1]))
        lost.append(1 - max(layouts, key=lambda row: row.predicted).measured / max(measured))
    return {
        "sets": len(correlations),
        "mean": statistics.fmean(correlations) if correlations else math.nan,
        "lost": statistics.fmean(lost) if lost else math.nan,
    }


def report(rows: Sequence[Scored], skipped: Mapping[str, str]) -> dict[str, Any]:
    """Return all errors, as ``--json`` prints them."""
    calibrate(rows)
    set_error_ranges(rows)
    return {
        "rows": len(rows),
        "skipped": len(skipped),
        "all": summarize(rows),
        "groups": by(rows, "group"),
        "systems": by(rows, "system"),
        "devices": by(rows, "device"),
        "sources": by(rows, "source"),
        "rank_correlation": rank_correlation(rows),
        "reasons": dict(Counter(re.sub(r"\d[\d,.]*", "N", why)[:80] for why in skipped.values())),
    }


def format_line(name: str, values: Mapping[str, float | int]) -> str:
    """Format the errors of a group as a line of a table."""
    memory = ""
    if values["memory_rows"]:
        memory = f"{values['memory_median']:.1%} worst {values['memory_worst']:.1%}"
        memory += f" of {values['memory_rows']}"
    return (
        f"{name[:52]:52} {values['rows']:4}  {values['median']:6.1%}  p90 {values['p90']:6.1%}  "
        f"bias {values['bias']:+6.1%}  calibrated {values['calibrated_median']:6.1%}  "
        f"p90 {values['calibrated_p90']:6.1%}  covered {values['covered']:4.0%}  memory {memory}"
    )


# --------------------------------------------------------------------------- command


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise Unexpressed after some seconds of wall time."""

    def stop(*_: object) -> None:
        raise Unexpressed(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def score(row: Row, line: str, directory: Path | None = None) -> Scored | str:
    """Return the prediction of a row, or why there is none."""
    clean = defaultdict(str, {key: (value or "").strip() for key, value in row.items() if key})
    try:
        with time_limit(MAX_SECONDS):
            return predict(clean, line, directory)
    except Unexpressed as reason:
        return str(reason)
    except Exception as error:  # one row must not end the report
        return f"failed: {type(error).__name__}: {str(error)[:150]}"


def row_key(row: Row) -> str:
    """Return the key of a row among kept predictions."""
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", type=Path, nargs="*", default=SHIPPED)
    parser.add_argument("--json", action="store_true", help="only the summary, for machines")
    parser.add_argument("--rows", type=Path, help="JSONL file that keeps predictions")
    parser.add_argument("--traces", type=Path, help="directory that keeps traces")
    parser.add_argument("--ranges", type=Path, help="write error_ranges.toml here")
    parser.add_argument("--match", default="", help="only rows whose text contains this")
    parser.add_argument("--limit", type=int, default=10**9, help="the most rows to predict")
    options = parser.parse_args()
    known: dict[str, Any] = {}
    if options.rows and options.rows.exists():
        for text in options.rows.read_text().splitlines():
            known |= json.loads(text)
    scored: list[Scored] = []
    skipped: dict[str, str] = {}
    num_new = 0
    for path in options.files:
        with path.open(newline="") as file:
            for number_, row in enumerate(csv.DictReader(file), 2):
                if options.match.lower() not in " ".join(map(str, row.values())).lower():
                    continue
                line, key = f"{path.name}:{number_}", row_key(row)
                if key not in known:
                    if num_new == options.limit:
                        continue
                    num_new += 1
                    outcome = score(row, line, options.traces)
                    known[key] = outcome if isinstance(outcome, str) else asdict(outcome)
                    if options.rows:
                        with options.rows.open("a") as kept:
                            kept.write(json.dumps({key: known[key]}) + "\n")
                    if not options.json:
                        print(f"{line} {row['model'][:24]}: {describe(known[key])}", flush=True)
                if isinstance(known[key], str):
                    skipped[line] = known[key]
                else:
                    scored.append(Scored(**known[key] | {"line": line}))
    result = report(scored, skipped)
    if options.ranges:
        options.ranges.write_text(format_ranges(scored))
    if options.json:
        print(json.dumps(result))
        return
    for title in ("groups", "systems", "devices", "sources"):
        print(f"\n{title}")
        for name, values in result[title].items():
            print(format_line(name, values))
    print(f"\n{format_line('all', result['all'])}")
    order = result["rank_correlation"]
    print(
        f"rank correlation {order['mean']:.2f} in {order['sets']} sets of layouts; "
        f"the fastest predicted one loses {order['lost']:.1%}"
    )
    for reason, count in Counter(result["reasons"]).most_common():
        print(f"skipped {count:4}: {reason}")


def describe(result: str | dict[str, Any]) -> str:
    """Return a prediction in one line."""
    if isinstance(result, str):
        return f"skipped: {result}"
    text = f"{result['measured']:.0f} measured, {result['predicted']:.0f} predicted"
    text += f" ({result['predicted'] / result['measured'] - 1:+.0%})"
    if result["measured_memory"]:
        text += f"; {result['measured_memory']:.0f} GiB, {result['memory']:.0f} predicted"
    total = sum(result["breakdown"].values())
    parts = [f"{k} {v / total:.0%}" for k, v in result["breakdown"].items() if v > 0.02 * total]
    return f"{text}; {' '.join(parts)}; {result['seconds']:.1f} s"


if __name__ == "__main__":
    main()
