"""Estimate the memory of fine-tuning published models, and write docs/memory.md.

    python benchmarks/memory_page.py [--again]
    python benchmarks/memory_page.py --write        only write the page from recorded results

Traced pieces (`weft.estimate.pieces`) estimate each model, way of training and number of GPUs.
`TRACED` are also predicted by a full trace, as ``weft plan`` does, which gives the error on the
page.  benchmarks/memory_page.json has the results.  An interrupted run continues from it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.model_pages import PAGES, Model  # noqa: E402
from weft import __version__  # noqa: E402
from weft.config.errors import InvalidConfig  # noqa: E402
from weft.config.files import write_json  # noqa: E402
from weft.estimate.cost import device_spec  # noqa: E402
from weft.estimate.forecast import OUTSIDE_ALLOCATOR, forecast  # noqa: E402
from weft.estimate.pieces import Pieces  # noqa: E402
from weft.planning.devices import GIB, get_device  # noqa: E402
from weft.planning.plan import Machine, Plan  # noqa: E402
from weft.planning.plan_text import plan_recipe  # noqa: E402

RESULTS = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "memory.md"
Json = dict[str, Any]

TITLES = (
    *("Llama 3.2 1B", "Llama 3.2 3B", "Llama 3.1 8B", "Llama 3.3 70B", "Llama 3.1 405B"),
    *("Qwen3 0.6B", "Qwen3 1.7B", "Qwen3 4B", "Qwen3 8B", "Qwen3 14B", "Qwen3 32B"),
    *("Qwen3 30B-A3B", "Qwen3 235B-A22B", "Qwen2.5 7B", "Qwen2.5 72B"),
    *("Gemma 3 1B", "Gemma 3 4B", "Gemma 3 12B", "Gemma 3 27B", "gpt-oss 20B", "gpt-oss 120B"),
    *("OLMo 2 7B", "Mistral 7B", "Phi-4", "Mixtral 8x7B", "DeepSeek-V3"),
)
BY_TITLE = {model.title: model for _, models in PAGES.values() for model in models}
WAYS = {"full": "chat", "LoRA": "lora", "QLoRA": "qlora"}  # recipes
GPUS = (*("RTX 4090", "RTX 5090", "A100 40GB", "L40S", "A100 80GB", "H100", "H200", "B200"),)
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
LARGEST = max(get_device(name).memory_gib for name in GPUS) * GIB
# Bytes of a parameter in weights, gradients and optimizer states: at least.
STATE_BYTES = {"QLoRA": 0.5, "LoRA": 2.0, "full": 12.0}
MARGIN = 1.15  # of an estimate, to count as enough
# Compared with full traces.
TRACED = (
    *(("Llama 3.1 8B", way, 1) for way in ("LoRA", "QLoRA")),
    *(("Qwen3 4B", way, 8) for way in WAYS),
    ("Llama 3.1 8B", "full", 8),
    ("Qwen3 1.7B", "full", 1),
    ("Qwen2.5 7B", "QLoRA", 1),
    ("Gemma 3 4B", "LoRA", 2),
    ("gpt-oss 20B", "LoRA", 1),
    ("Qwen3 30B-A3B", "LoRA", 8),
    ("Llama 3.3 70B", "QLoRA", 8),
)


def overrides(model: Model, ranks: int) -> list[tuple[str, str]]:
    """Return the keys of a plan."""
    keys = {
        "model.kind": model.kind,
        "model.preset": model.preset,
        "train.global_batch_size": str(max(RANKS)),
    }
    if has_experts(model) and ranks >= 8:
        keys["parallel.ep"] = "8"
    return [*keys.items()]


def has_experts(model: Model) -> bool:
    """Return True if a model has experts, which 8 GPUs share."""
    return model.kind in ("qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3")


def plan_of(model: Model, way: str, ranks: int) -> tuple[Plan, Machine]:
    """Return the plan of a model on a number of H100."""
    cluster = f"1x{ranks}xH100" if ranks < 8 else f"{ranks // 8}x8xH100"
    machine = Machine("cpu", devices=1)
    return plan_recipe(WAYS[way], overrides(model, ranks), (), cluster, lambda run: machine)


def estimate(model: Model, way: str) -> Json:
    """Return parameters, and GiB by the number of GPUs; null: far too much."""
    pieces = Pieces(get_device("H100"))
    row: Json = {"gib": {}}
    for ranks in RANKS:
        try:
            plan, _ = plan_of(model, way, ranks)
        except InvalidConfig as error:
            row.setdefault("refused", {})[str(ranks)] = str(error.errors[0])
            continue
        row["params"] = plan.num_params
        if plan.num_params * STATE_BYTES[way] / ranks > LARGEST:
            row["gib"][str(ranks)] = None
            continue
        needed = pieces.estimate(plan).memory_bytes() + OUTSIDE_ALLOCATOR
        row["gib"][str(ranks)] = round(needed / GIB, 2)
    return row


def trace(model: Model, way: str, ranks: int) -> float:
    """Return the GiB of a full trace."""
    plan, machine = plan_of(model, way, ranks)
    return round(forecast(plan, machine, device_spec(plan, machine)).needed_bytes / GIB, 2)


def run(tree: Json) -> None:
    """Compute what is missing, and save after each."""
    for title in TITLES:
        for way in WAYS:
            rows = tree["models"].setdefault(title, {})
            if way not in rows:
                rows[way] = estimate(BY_TITLE[title], way)
                save(tree)
                print(title, way, rows[way]["gib"], flush=True)
    for title, way, ranks in TRACED:
        name = f"{title}, {way}, {ranks}"
        if name not in tree["traced"]:
            tree["traced"][name] = trace(BY_TITLE[title], way, ranks)
            save(tree)
            print(name, tree["traced"][name], flush=True)


def save(tree: Json) -> None:
    """Write the results."""
    tree["date"] = str(datetime.datetime.now(datetime.UTC).date())
    tree["weft"], tree["torch"] = __version__, torch.__version__
    write_json(RESULTS, tree)


# --------------------------------------------------------------------------- page


def errors(tree: Json) -> list[float]:
    """Return the relative errors of estimates against full traces."""
    result = []
    for name, traced in tree["traced"].items():
        title, way, ranks = name.split(", ")
        result.append(tree["models"][title][way]["gib"][ranks] / traced - 1)
    return result


def fewest(row: Json, gpu: str) -> str:
    """Return the fewest GPUs on which a model fits."""
    for ranks, gib in row["gib"].items():
        if gib is not None and MARGIN * gib <= get_device(gpu).memory_gib:
            return f"{int(ranks):,}"
    return "-"


def table(tree: Json, way: str) -> list[str]:
    """Return the table of a way of training."""
    names = [f"{name} ({get_device(name).memory_gib:.0f})" for name in GPUS]
    lines = [
        f"| model | parameters | 1 GPU | 8 GPUs | {' | '.join(names)} |",
        "|---" * (4 + len(GPUS)) + "|",
    ]
    for title in TITLES:
        row = tree["models"][title][way]
        if not row["gib"]:
            continue
        sizes = [_gib(row["gib"].get(ranks)) for ranks in ("1", "8")]
        cells = [
            title,
            f"{tree['models'][title]['full']['params'] / 1e9:.1f} B",
            *sizes,
            *(fewest(row, g) for g in GPUS),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _gib(size: float | None) -> str:
    return "-" if size is None else f"{size:.1f}" if size < 100 else f"{size:.0f}"


def render(tree: Json) -> str:
    """Return the page."""
    wrong = errors(tree)
    size = [abs(error) for error in wrong]
    parts = [
        "# How much memory does X take?",
        _fill(
            f"This page lists the GPU memory that fine-tuning of {len(TITLES)} published models "
            "takes, and the fewest GPUs on which each fits. `python benchmarks/memory_page.py` "
            f"made it on {tree['date']} with weft {tree['weft']} and PyTorch {tree['torch']}. For "
            "another model, length or cluster, ask `weft plan`; [Models on your "
            "GPUs](models/index.md) has commands and speed."
        ),
        _fill(
            "*full* trains all weights with AdamW: weights, gradients and optimizer states in "
            "float32, computation in bfloat16. *LoRA* trains adapters of rank 16 on all matrices "
            "of the blocks, *QLoRA* the same on weights in 4 bits. These are the recipes `chat`, "
            "`lora` and `qlora`: sequences of 2,048 tokens, microbatches of one sequence, "
            "batches of 512, recomputation of all blocks. FSDP shards the weights over all GPUs. "
            "From 8 GPUs on, the experts of a model are split over 8."
        ),
        _fill(
            "All figures are predictions, not measurements: estimates from traced pieces of a "
            f"step, for H100 ([Advice](planner.md#advice)). {len(size)} of them were also "
            "predicted by a trace of the whole step, as `weft plan` does ([below](#errors)). The "
            f"estimates differ by {statistics.median(size):.1%} (median), and lie between "
            f"{min(wrong):+.0%} and {max(wrong):+.0%}. So the fewest GPUs are the smallest of 1, "
            f"2, 4, 8, 16, ... 512 on which the estimate and {MARGIN - 1:.0%} more fit; fewer may "
            "suffice. `-`: more than 512 GPUs; under *1 GPU* and *8 GPUs*: not computed, because "
            "the states of the weights alone exceed every GPU."
        ),
    ]
    for way, recipe in WAYS.items():
        command = f"`weft plan {recipe} --model.path ORG/NAME --cluster 8xH100`"
        text = f"GiB per GPU on 1 and on 8 GPUs, and the fewest GPUs (GiB of each). {command} "
        text += "traces a cell."
        parts += [f"## {way}", _fill(text), "\n".join(table(tree, way))]
    lines = ["| model | training | GPUs | GiB, estimate | GiB, trace |", "|---|---|---|---|---|"]
    for name, traced in tree["traced"].items():
        title, way, ranks = name.split(", ")
        estimated = tree["models"][title][way]["gib"][ranks]
        lines.append(f"| {title} | {way} | {ranks} | {estimated:.1f} | {traced:.1f} |")
    text = "Estimates, and traces of whole steps. The other figures of this page were not traced."
    parts += ["## Errors", text, "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _fill(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", action="store_true", help="forget recorded results")
    parser.add_argument("--write", action="store_true", help="only write the page")
    options = parser.parse_args()
    tree: Json = {"models": {}, "traced": {}}
    if RESULTS.exists() and not options.again:
        tree = json.loads(RESULTS.read_text("utf-8"))
    if not options.write:
        run(tree)
    PAGE.write_text(render(tree), "utf-8")


if __name__ == "__main__":
    main()
