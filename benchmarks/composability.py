"""Run every pair of techniques and write the tables of docs/composability.md.

    python benchmarks/composability.py [--minutes M] [--only PATTERN] [--changed]
    python benchmarks/composability.py --write      only write the page from recorded results

A cell is one job with both techniques.  The code of ``weft verify`` trains the job for two steps
on gloo ranks of this machine, and compares it with one process.  A pair *works* if losses, gradient
norms, every gradient and every update agree.  A pair is *refused* if weft refuses the job before
launch; the reason is recorded.  Any other result is a defect.  Two values of one key are not a
pair.

benchmarks/composability.json has one result for each pair.  An interrupted run continues from it,
and tests compare the recorded refusals with the current rules in seconds.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import itertools
import json
import math
import multiprocessing
import platform
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.config.axes import AXES
from weft.config.errors import InvalidConfig, WeftError
from weft.config.files import write_json
from weft.verification.shrink import plan_for_recipe
from weft.verification.verify import read_recipe, verify

RESULTS = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parent.parent / "docs" / "composability.md"
RECIPE = "demo"
RANKS = 16
STEPS = 2
AT_ONCE = 2  # pairs that run at the same time

Overrides = dict[str, str]

# Overrides of every cell, unless a technique has other values.
BASE: Overrides = {
    "run.device": "cpu",
    "model.tied_embeddings": "false",
    # Every degree divides these sizes, so that no pair is refused because of sizes.
    "model.dim": "256",
    "model.num_heads": "8",
    "model.num_kv_heads": "4",
    "model.ffn_dim": "512",
    "model.num_layers": "8",
    "train.global_batch_size": "32",
    "train.microbatch_size": "1",
    "train.seq_len": "256",
}


@dataclass(frozen=True)
class Technique:
    """A technique, with the keys that enable it."""

    name: str
    group: str
    overrides: Overrides


def _axis(name: str, degree: int, **extra: str) -> Overrides:
    return {f"parallel.{name}": str(degree)} | {f"parallel.{key}": extra[key] for key in extra}


EXPERTS: Overrides = {"model.kind": "moe", "model.preset": "toy-moe"}
TECHNIQUES = [
    Technique("HSDP (replicas)", "data", _axis("dp_replicate", 2)),
    Technique("FSDP, ZeRO-3", "data", _axis("dp_shard", 2, reshard_after_forward="always")),
    Technique(
        "FSDP, ZeRO-2",
        "data",
        _axis("dp_shard", 2, reshard_after_forward="never", gradient_sync="microbatch"),
    ),
    Technique("reshard over some ranks", "data", _axis("dp_shard", 4, reshard_after_forward="2")),
    Technique("hierarchical gather", "data", _axis("dp_shard", 4, hierarchical_gather="true")),
    Technique(
        "parameter persistence", "data", _axis("dp_shard", 2, param_persistence_threshold="100")
    ),
    Technique("CPU offload", "data", _axis("dp_shard", 2, cpu_offload="true")),
    Technique("TP, sequence parallel", "model", _axis("tp", 2)),
    Technique("TP, plain", "model", _axis("tp", 2, sequence_parallel="false")),
    Technique("PP GPipe", "model", {"parallel.pp": "2", "pipeline.schedule": "GPipe"}),
    Technique("PP 1F1B", "model", {"parallel.pp": "2", "pipeline.schedule": "1F1B"}),
    Technique(
        "PP Interleaved1F1B", "model", {"parallel.pp": "2", "pipeline.schedule": "Interleaved1F1B"}
    ),
    Technique(
        "PP zero bubble",
        "model",
        {"parallel.pp": "2", "pipeline.schedule": "InterleavedZeroBubble"},
    ),
    Technique("PP ZBV", "model", {"parallel.pp": "2", "pipeline.schedule": "ZBVZeroBubble"}),
    Technique("PP DualPipeV", "model", {"parallel.pp": "2", "pipeline.schedule": "DualPipeV"}),
    Technique("CP ring", "model", _axis("cp", 2, cp_method="ring")),
    Technique("CP all-gather", "model", _axis("cp", 2, cp_method="allgather")),
    Technique("CP Ulysses", "model", _axis("cp", 2, cp_method="ulysses")),
    Technique(
        "CP, balanced documents",
        "model",
        _axis("cp", 2, cp_load_balance="documents") | {"data.packing": "documents"},
    ),
    Technique("EP", "model", EXPERTS | _axis("dp_shard", 2, ep="2")),
    Technique(
        "EP, padded",
        "model",
        EXPERTS | _axis("dp_shard", 2, ep="2", ep_dispatch="padded", ep_capacity_factor="1.25"),
    ),
    Technique("EP, in chunks", "model", EXPERTS | _axis("dp_shard", 2, ep="2", ep_chunks="2")),
    Technique("EP, experts without TP", "model", EXPERTS | _axis("tp", 2, etp="1", ep="2")),
    Technique("AC full", "memory", {"activation_checkpoint.mode": "full"}),
    Technique("AC selective", "memory", {"activation_checkpoint.mode": "selective"}),
    Technique("AC memory budget", "memory", {"activation_checkpoint.mode": "budget"}),
    Technique("activation offload", "memory", {"activation_checkpoint.offload": "true"}),
    Technique("torch.compile", "speed", {"compile.enable": "true"}),
    Technique("bfloat16", "precision", {"precision.compute_dtype": "bfloat16"}),
    Technique(
        "bfloat16 reduction",
        "precision",
        {"precision.compute_dtype": "bfloat16", "precision.reduce_dtype": "bfloat16"},
    ),
    Technique(
        "float8 tensorwise",
        "precision",
        {"precision.float8": "tensorwise", "precision.float8_small": "true"},
    ),
    Technique(
        "float8 rowwise",
        "precision",
        {"precision.float8": "rowwise", "precision.float8_small": "true"},
    ),
    Technique(
        "MXFP8", "precision", {"precision.float8": "mxfp8", "precision.float8_small": "true"}
    ),
    Technique("MoE", "model kind", EXPERTS),
    Technique(
        "router losses",
        "model kind",
        EXPERTS | {"model.router_aux_loss_coef": "0.01", "model.router_z_loss_coef": "0.001"},
    ),
    Technique("multi-token prediction", "model kind", {"model.mtp_layers": "1"}),
    Technique("tied embeddings", "model kind", {"model.tied_embeddings": "true"}),
    Technique("packed documents", "data kind", {"data.packing": "documents"}),
    Technique("chat (SFT)", "data kind", {"data.format": "chat"}),
    Technique("DPO", "data kind", {"data.format": "preferences", "train.objective": "dpo"}),
    Technique("LoRA", "tuning", {"lora.rank": "4"}),
    Technique("QLoRA nf4", "tuning", {"lora.rank": "4", "lora.quantize": "nf4"}),
    Technique("QLoRA int8", "tuning", {"lora.rank": "4", "lora.quantize": "int8"}),
    Technique("DoRA", "tuning", {"lora.rank": "4", "lora.dora": "true"}),
    Technique("LoRA dropout", "tuning", {"lora.rank": "4", "lora.dropout": "0.1"}),
    Technique("Muon", "optimizer", {"optim.name": "muon"}),
    Technique("QK-clip", "optimizer", {"optim.qk_clip_threshold": "0.5", "model.qk_norm": "none"}),
    Technique("bfloat16 states", "optimizer", {"optim.state_dtype": "bfloat16"}),
    Technique("8-bit states", "optimizer", {"optim.state_dtype": "8bit"}),
    Technique(
        "world-size-invariant sums",
        "order",
        {"train.world_size_invariant": "true", "train.microbatch_size": "auto"},
    ),
]


LIGHTHOUSE = {"resilience.lighthouse": "localhost:29510"}
# Combinations that weft refuses although each pair of their techniques works, and combinations with
# keys of no technique of the table.
COMBINATIONS: list[tuple[tuple[str, ...], Overrides]] = [
    (("torch.compile", "AC memory budget"), {"activation_checkpoint.every_n_layers": "2"}),
    (("tied embeddings", "DoRA"), {"lora.targets": "embed_tokens"}),
    (("PP 1F1B", "LoRA"), {"lora.targets": "lm_head"}),
    (("PP 1F1B",), LIGHTHOUSE),
    (("DPO",), LIGHTHOUSE),
    (("world-size-invariant sums",), LIGHTHOUSE),
]


# What other trainers do, by the key that a reason begins with.
ELSEWHERE = {
    "parallel.cp_load_balance": "In DeepSpeed's Ulysses, too, each rank attends to full sequences "
    "with its share of the heads (documentation of transformers).",
    "model.mtp_layers": "NeMo RL trains these layers beside GRPO (NVIDIA-NeMo/RL pull request "
    "2801, June 2026); nothing about DPO was found.",
    "optim.qk_clip_threshold": "Megatron-LM multiplies the projections of queries and keys in "
    "place (`clip_qk` of latent attention was read), without a rule for adapters.",
    "lora.dora": "PEFT 0.21.2 shares the two factors but gives each side its own lengths, of "
    "columns and of rows: after one step the two weights differ (a run showed it).",
    "parallel.pp": "Nothing about such a stage was found in TorchTitan, PEFT or NVIDIA's "
    "libraries.",
    "activation_checkpoint.every_n_layers": "PyTorch has one budget per process "
    "(`torch._functorch.config.activation_memory_budget`).",
    "resilience.lighthouse": "TorchTitan's trainer with TorchFT is an experiment with FSDP (issue "
    "4208 of pytorch/torchtitan, August 2026).",
}


def pairs() -> Iterator[tuple[Technique, Technique]]:
    """Yield every technique with itself and with each that comes later."""
    yield from itertools.combinations_with_replacement(TECHNIQUES, 2)


def pair_key(first: Technique, second: Technique) -> str:
    """Return the name of a pair in the results."""
    return first.name if first is second else f"{first.name} + {second.name}"


def combine(*techniques: Technique, extra: Overrides | None = None) -> Overrides | None:
    """Return the overrides of a job with all techniques, or None if they conflict.

    If several set the same degree, the largest degree is used.  ``extra``: more overrides.
    """
    combined: Overrides = {}
    for name, value in (item for each in techniques for item in each.overrides.items()):
        before = combined.get(name, value)
        if name.removeprefix("parallel.") in AXES:
            value = str(max(int(before), int(value)))
        elif value != before:
            return None
        combined[name] = value
    combined = {**BASE, **combined, **(extra or {})}
    degrees = {axis: int(combined.get(f"parallel.{axis}", "1")) for axis in AXES}
    combined["parallel.dp_shard"] = str(degrees["dp_shard"])
    combined["run.nproc_per_node"] = str(math.prod(degrees.values()))
    return combined


def refusals(overrides: Overrides) -> list[str]:
    """Return why weft refuses a job; empty if it accepts it."""
    try:
        plan_for_recipe(read_recipe(RECIPE, list(overrides.items())))
    except InvalidConfig as invalid:
        return [str(error) for error in invalid.errors]
    return []


def list_combinations() -> dict[str, list[str]]:
    """Return each of `COMBINATIONS`, and why weft refuses it."""
    by_name = {technique.name: technique for technique in TECHNIQUES}
    listed = {}
    for names, extra in COMBINATIONS:
        overrides = combine(*(by_name[name] for name in names), extra=extra)
        assert overrides is not None
        keys = [f"`{key} = {value}`" for key, value in extra.items()]
        listed[" + ".join([*names, *keys])] = refusals(overrides)
    return listed


def run_pair(overrides: Overrides) -> dict[str, Any]:
    """Verify one job; return outcome (works, refused, wrong, failed) and reason."""
    if errors := refusals(overrides):
        return {"outcome": "refused", "reason": " ".join(errors)}
    try:
        job = read_recipe(RECIPE, list(overrides.items()))
        report = verify(job, ranks=RANKS, steps=STEPS, keep=list(overrides))
    except InvalidConfig as error:
        return {"outcome": "refused", "reason": str(error)}
    except WeftError as error:
        return {"outcome": "failed", "reason": str(error)}
    return {
        "outcome": "works" if report.holds else "wrong",
        "reason": "; ".join(report.notes) if report.holds else report.reason,
        "difference": report.reached,
    }


def _run_apart(function: Callable[..., dict[str, Any]], args: Any, pipe: Any) -> None:
    try:
        pipe.send(function(*args))
    except Exception as error:  # of any kind: the result of the cell
        pipe.send({"outcome": "failed", "reason": f"{type(error).__name__}: {error}"[:500]})


def run_in_process(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Run one cell in a forked process, so that no cache or thread remains."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_apart, args=(function, args, theirs))
    process.start()
    theirs.close()
    try:
        outcome: dict[str, Any] = ours.recv()
    except EOFError:
        outcome = {"outcome": "failed", "reason": "the process died"}
    process.join()
    return outcome


def read_results() -> dict[str, dict[str, Any]]:
    """Return the recorded outcome of every pair."""
    if not RESULTS.exists():
        return {}
    text: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text("utf-8"))["pairs"]
    return text


def _save(outcomes: dict[str, dict[str, Any]]) -> None:
    order = [pair_key(*pair) for pair in pairs()]
    record = {
        "command": "python benchmarks/composability.py",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "pairs": {name: outcomes[name] for name in order if name in outcomes},
    }
    write_json(RESULTS, record, indent=1)


def run(only: str, minutes: float, changed: bool) -> None:
    """Run the pairs whose name matches ``only`` and that have no outcome yet.

    Args:
        changed: also repeat defects, and pairs that weft no longer refuses.
    """
    outcomes = read_results()
    end = time.monotonic() + 60 * minutes
    due = []
    for pair in pairs():
        name, overrides = pair_key(*pair), combine(*pair)
        if not fnmatch.fnmatch(name, only) or not _is_due(outcomes.get(name), overrides, changed):
            continue
        if overrides is None:
            outcomes[name] = {"outcome": "exclusive", "reason": "two settings of one key"}
        else:
            due.append((name, overrides))

    def run_until_deadline(overrides: Overrides) -> dict[str, Any] | None:
        return run_in_process(run_pair, overrides) if time.monotonic() < end else None

    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = pool.map(run_until_deadline, [overrides for _, overrides in due])
        for (name, _), result in zip(due, results, strict=True):
            if result is not None:
                outcomes[name] = result
                _save(outcomes)
                print(f"{name:60} {result['outcome']:8} {result['reason'][:150]}", flush=True)
    _save(outcomes)


def _is_due(known: dict[str, Any] | None, overrides: Overrides | None, changed: bool) -> bool:
    if known is None or not changed or overrides is None:
        return known is None
    if known["outcome"] in ("wrong", "failed"):
        return True
    reasons = refusals(overrides)
    if known["outcome"] == "refused":
        return bool(" ".join(reasons) != known["reason"])
    return bool(reasons)


# --------------------------------------------------------------------------- the page

CELLS = {"works": "✓", "refused": "✗", "exclusive": "·", "wrong": "WRONG", "failed": "FAILED"}


def page(outcomes: dict[str, dict[str, Any]]) -> str:
    """Return docs/composability.md."""
    counts = Counter(actual["outcome"] for actual in outcomes.values())
    record = json.loads(RESULTS.read_text("utf-8"))
    lines = [
        "# Which techniques work together",
        "",
        "Every pair of these techniques was trained for two steps on gloo ranks and compared "
        "with one process: losses, gradient norms, every gradient and every update. "
        f"{counts['works']} pairs work, {counts['refused']} are refused before the start, and "
        f"{counts['exclusive']} are two settings of one key, which make no pair. "
        "A refusal is an error message that names the key, the reason and a remedy; nothing is "
        "started.",
        "",
        f"`python benchmarks/composability.py` made this page on {record['date']} with PyTorch "
        f"{record['torch']}, Python {record['python']}, on CPU. It was not run on a GPU.",
        "",
        "- ✓ works: agrees with one process.",
        "- ✗ refused: the reasons follow the table.",
        "- · two settings of one key.",
        "",
    ]
    numbers = {technique.name: n for n, technique in enumerate(TECHNIQUES, 1)}
    lines += ["| | |" + "".join(f" {n} |" for n in numbers.values())]
    lines += ["|---|---|" + "---|" * len(numbers)]
    for row in TECHNIQUES:
        cells = []
        for column in TECHNIQUES:
            ordered = sorted((row, column), key=lambda item: numbers[item.name])
            result = outcomes.get(pair_key(ordered[0], ordered[1]))
            cells.append(CELLS[result["outcome"]] if result else "?")
        lines.append(f"| {numbers[row.name]} | {row.name} | " + " | ".join(cells) + " |")
    refused = {name: r["reason"] for name, r in outcomes.items() if r["outcome"] == "refused"}
    if refused:
        lines += ["", "## Why pairs are refused", ""]
        lines += ["| pairs | reason | elsewhere |", "|---|---|---|"]
        for reason in dict.fromkeys(refused.values()):
            names = "; ".join(name for name, other in refused.items() if other == reason)
            lines.append(f"| {names} | {_escape(reason)} | {_elsewhere(reason)} |")
    lines += ["", "## Refusals that no pair shows", ""]
    lines += [
        "Each pair of these techniques works, or a key of no technique is involved. The rules say:",
        *("", "| combination | reason | elsewhere |", "|---|---|---|"),
    ]
    for name, (reason, *_) in list_combinations().items():
        lines.append(f"| {name} | {_escape(reason)} | {_elsewhere(reason)} |")
    defects = [n for n, actual in outcomes.items() if actual["outcome"] in ("wrong", "failed")]
    if defects:
        lines += ["", "## Defects", "", "| pair | what was seen |", "|---|---|"]
        lines += [f"| {name} | {_escape(outcomes[name]['reason'])} |" for name in defects]
    lines += ["", "## The keys of each technique", "", "| technique | keys |", "|---|---|"]
    for technique in TECHNIQUES:
        keys = " ".join(f"`{name} = {value}`" for name, value in technique.overrides.items())
        lines.append(f"| {technique.name} | {keys} |")
    return "\n".join(lines) + "\n"


def _elsewhere(reason: str) -> str:
    about = "resilience.lighthouse" if "replica groups" in reason else re.split("[ =]", reason)[0]
    return ELSEWHERE.get(about, "not looked up")


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    """Parse the command line and run or write."""
    kind = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("--only", default="*", help="run pairs whose name matches this pattern")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after so many minutes")
    parser.add_argument(
        "--changed", action="store_true", help="run defects, and pairs that rules changed, again"
    )
    parser.add_argument("--write", action="store_true", help="write docs/composability.md and stop")
    options = parser.parse_args()
    if not options.write:
        run(options.only, options.minutes, options.changed)
    outcomes = read_results()
    PAGE.write_text(page(outcomes), "utf-8")
    print(dict(Counter(result["outcome"] for result in outcomes.values())))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
