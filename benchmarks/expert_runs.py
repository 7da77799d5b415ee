"""Train mixtures of experts in many layouts, beside a plain loop around transformers.

    python benchmarks/expert_runs.py [--models mixtral qwen3_moe deepseek_v3] [--steps 50]

Each model is a small one with random weights, which transformers saves as a Hugging Face
directory.  The plain loop is the shortest that a user would write: transformers' model,
`torch.optim.AdamW`, clipping at 1.0.  It reads the same sequences in the same order, in float32.
For DeepSeek-V3 it also moves the biases of the routers, as the model's paper does.  weft trains the
same directory by `weft train pretrain --model.path DIRECTORY`, once per layout, each in its own
processes.  The result is the largest difference of the losses of equal steps, per layout.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

LIMIT = 1e-5  # of a difference of losses
SEQ_LEN, SEQUENCES, VOCABULARY = 64, 8, 512
SEED = 0
RATE = 1e-3  # learning rate, constant
BALANCE_RATE = 0.001  # of DeepSeek-V3's routers: weft's default, and the paper's

BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQ_LEN,
    "initializer_range": 0.05,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": BASE
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 96}
    | {"router_aux_loss_coef": 0.0, "sliding_window": None},
    "qwen3_moe": BASE
    | EXPERTS
    | {"num_experts": 8, "head_dim": 24, "norm_topk_prob": True, "intermediate_size": 96}
    | {"router_aux_loss_coef": 0.0},
    "deepseek_v3": BASE
    | EXPERTS
    | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 1}
    | {"first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "num_key_value_heads": 4}
    | {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
    | {"v_head_dim": 16, "intermediate_size": 96},
}

# Keys of section parallel, unless a section is named.
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "dp_shard 2, ep 2": {"dp_shard": 2, "ep": 2},
    "dp_shard 4, ep 2": {"dp_shard": 4, "ep": 2},
    "dp_replicate 2, dp_shard 2, ep 2": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    "dp_shard 4, ep 4, ZeRO-2": {"dp_shard": 4, "ep": 4, "reshard_after_forward": "never"},
    "tp 2": {"tp": 2},
    "dp_shard 2, tp 2, ep 2": {"dp_shard": 2, "tp": 2, "ep": 2},
    "cp 2 (ring), ep 2": {"cp": 2, "cp_method": "ring", "ep": 2},
    "cp 2 (Ulysses), tp 2": {"cp": 2, "cp_method": "ulysses", "tp": 2},
    "pp 2 (1F1B), dp_shard 2, ep 2": {"pp": 2, "dp_shard": 2, "ep": 2, "pipeline.schedule": "1F1B"},
    "pp 2 (zero bubble)": {"pp": 2, "pipeline.schedule": "ZBVZeroBubble"},
    "dp_shard 2, ep 2, full recomputation": {
        **{"dp_shard": 2, "ep": 2},
        "activation_checkpoint.mode": "full",
    },
}


# --------------------------------------------------------------------------- inputs


def write_text(directory: Path) -> None:
    """Write a part of Python's standard library as text files."""
    directory.mkdir()
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-c]*.py")):
        (directory / f"{file.stem}.txt").write_bytes(file.read_bytes())


def write_model(kind: str, text: Path, directory: Path) -> Any:
    """Save a model with random weights and a tokenizer; return the model."""
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from weft.data.tokenizer_training import train_tokenizer

    lines = [line for file in sorted(text.iterdir()) for line in file.read_text().splitlines()]
    tokenizer = train_tokenizer(lines, VOCABULARY)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **MODELS[kind])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    return model


# --------------------------------------------------------------------------- weft


def common_keys(steps: int, directory: Path) -> dict[str, Any]:
    return {
        "model.path": directory / "model",
        "data.path": directory / "text",
        "data.cache_dir": directory / "cache",
        "data.packing": "windows",
        "train.seq_len": SEQ_LEN,
        "train.global_batch_size": SEQUENCES,
        "train.microbatch_size": 2,
        "train.steps": steps,
        "train.seed": SEED,
        "train.epochs": 0,
        "optim.lr": RATE,
        "optim.warmup_steps": 0,
        "optim.schedule": "wsd",
        "optim.decay_fraction": 0,
        "optim.weight_decay": 0,
        "optim.beta2": 0.95,
        "activation_checkpoint.mode": "none",
        "precision.compute_dtype": "float32",
        "monitor.log_interval": 1,
        "monitor.trackers": "",
        "monitor.report": "false",
        "checkpoint.interval": 0,
    }


def run_weft(keys: dict[str, Any], directory: Path) -> list[float]:
    """Train in one layout; return the loss of every step."""
    from weft.config.axes import AXES
    from weft.records.jsonl_reader import read_records

    degrees = {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1} | keys
    full = {key if "." in key else f"parallel.{key}": value for key, value in degrees.items()}
    ranks = np.prod([degrees[axis] for axis in AXES])
    full |= {"run.nproc_per_node": int(ranks), "run.dir": directory}
    overrides = [word for key, value in full.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "weft", "train", "pretrain", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return [float(record["loss"]) for record in read_records(directory / "metrics.jsonl")]


# --------------------------------------------------------------------------- transformers


def read_batches(steps: int, cache: Path) -> Any:
    """Return int64 ``[steps, sequences, SEQ_LEN + 1]`` of the store that weft's runs read."""
    from weft.data.loader import sample_index
    from weft.data.token_store import open_store

    (found,) = cache.rglob("store.json")
    store = open_store(found.parent)
    (shard,) = store.manifest.train.shards
    tokens = np.memmap(store.path / shard.file, store.manifest.dtype, "r")
    positions = np.arange(steps * SEQUENCES, dtype=np.int64)
    starts = sample_index(positions, (len(tokens) - 1) // SEQ_LEN, SEED) * SEQ_LEN
    rows = np.stack([tokens[start : start + SEQ_LEN + 1] for start in starts]).astype(np.int64)
    return torch.from_numpy(rows).view(-1, SEQUENCES, SEQ_LEN + 1)


def run_loop(model: Any, batches: Any) -> list[float]:
    """Train the model; return the loss of every step."""
    routers = [m for m in model.modules() if hasattr(m, "e_score_correction_bias")]
    chosen: dict[Any, Any] = {}
    for router in routers:
        router.register_forward_hook(lambda module, _, out: chosen.update({module: out[2]}))
    optimizer = torch.optim.AdamW(
        model.parameters(), RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0
    )
    losses = []
    for batch in batches:
        logits = model(batch[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for router in routers:  # arXiv:2408.15664, algorithm 1
            load = torch.bincount(chosen[router].flatten(), minlength=router.num_experts).double()
            router.e_score_correction_bias += BALANCE_RATE * (load.mean() - load).sign().float()
        losses.append(loss.item())
    return losses


# --------------------------------------------------------------------------- results


def measure(kinds: list[str], layouts: list[str], steps: int) -> dict[str, dict[str, float]]:
    """Return the largest difference of losses, by layout and model."""
    table: dict[str, dict[str, float]] = {name: {} for name in layouts}
    for kind in kinds:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            write_text(directory / "text")
            model = write_model(kind, directory / "text", directory / "model")
            keys = common_keys(steps, directory)
            runs = [
                run_weft(keys | LAYOUTS[layout], directory / f"run-{number}")
                for number, layout in enumerate(layouts)
            ]
            expected = run_loop(model, read_batches(steps, directory / "cache"))
            print(f"{kind}: loss {expected[0]:.4f} to {expected[-1]:.4f}", flush=True)
            for layout, losses in zip(layouts, runs, strict=True):
                errors = [abs(a - b) for a, b in zip(losses, expected, strict=True)]
                table[layout][kind] = max(errors)
                print(f"  {layout}: {max(errors):.1e}", flush=True)
    return table


def to_markdown(table: dict[str, dict[str, float]], kinds: list[str]) -> str:
    head = f"| layout | {' | '.join(kinds)} |\n|---|{'---|' * len(kinds)}\n"
    rows = [
        f"| {layout} | {' | '.join(f'{row[kind]:.1e}' for kind in kinds)} |"
        for layout, row in table.items()
    ]
    return head + "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    table = measure(arguments.models, arguments.layouts, arguments.steps)
    if arguments.json:
        print(json.dumps(table))
        return
    names = ("torch", "transformers")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    print(f"\n{date.today()}, {versions}, Python {platform.python_version()}\n")
    print(to_markdown(table, arguments.models))
    worst = max(error for row in table.values() for error in row.values())
    if worst > LIMIT:
        raise SystemExit(f"a loss differs by {worst:.1e}, more than {LIMIT:.0e}")


if __name__ == "__main__":
    main()
