"""Measure compile, float8 and activation checkpointing of Llama 3.1 8B on one GPU.

    python benchmarks/gpu.py [--wheels DIRECTORY] [--minutes 8] [--out gpu.json]

Each case starts ``weft train`` like a user, in separate processes, and ends the run once enough
steps are recorded.  A step has four sequences of 8,192 tokens, with float32 AdamW.  The model is
Llama 3.1 8B with as many layers as fit without recomputation; the output has their number.  If all
32 layers fit with 8-bit moments, that is an additional case.  The last cases compare the losses of
float8 and bfloat16 over 300 steps of a small model on real text.  If transformers is installed,
they also train the same model in Hugging Face's code with a plain PyTorch loop.

Requires torch 2.11 or newer with CUDA, and weft's source.  Missing packages are installed from a
directory of wheels, without a network; ``make wheels`` fills it on a machine with a network.

Cases run in order of importance; the output names those for which no time is left.  ``--tiny`` runs
the same cases with a model of a few thousand parameters on any machine, as a test of the benchmark.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("pydantic", "rich", "tokenizers", "xxhash", "tomli_w", "torchao")
SKIP, MEASURED = 3, 6  # numbers of steps; the first steps compile and warm up

EAGER = {"compile.enable": "false"}
COMPILE = {"compile.enable": "true"}
TENSORWISE = COMPILE | {"precision.float8": "tensorwise"}
ROWWISE = COMPILE | {"precision.float8": "rowwise"}
FULL, SELECTIVE = (
    {"activation_checkpoint.mode": "full"},
    {"activation_checkpoint.mode": "selective"},
)

# In order of importance.
SPEED: dict[str, dict[str, str]] = {
    "eager bf16": EAGER,
    "compile": COMPILE,
    "compile + float8 tensorwise": TENSORWISE,
    "compile + float8 rowwise": ROWWISE,
    "compile, selective": COMPILE | SELECTIVE,
    "compile + float8 tensorwise, selective": TENSORWISE | SELECTIVE,
    "eager bf16, full": EAGER | FULL,
    "compile + float8 tensorwise, full": TENSORWISE | FULL,
    "compile + float8 rowwise, selective": ROWWISE | SELECTIVE,
    "eager bf16, selective": EAGER | SELECTIVE,
}
WHOLE = "8B whole, 8-bit moments, compile + float8 tensorwise, full"
PEER = "Hugging Face's Llama, bf16 autocast, loop of plain PyTorch"
LOSSES: dict[str, dict[str, str]] = {
    "bf16": {},
    "float8 tensorwise": {"precision.float8": "tensorwise"},
    "float8 rowwise": {"precision.float8": "rowwise"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="One GPU: compile, float8, recomputation.")
    parser.add_argument("--wheels", type=Path, help="folder of wheels for what is missing")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--out", type=Path, help="write everything as JSON, too")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on anything")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(WORKERS[options.worker](options.tiny)), flush=True)
        return
    ends = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as directory:
        install_wheels(options.wheels, Path(directory))
        info = run_worker("probe", options.tiny, 120)
        info |= {"command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d")}
        print(
            f"{info['device']}, torch {info['torch']}, torchao {info['torchao']}; ",
            end="",
        )
        print(f"{info['layers']} of the 32 layers of Llama 3.1 8B", flush=True)
        results = run_all(options.tiny, info, Path(directory), ends)
    table(info, results)
    if options.out:
        options.out.write_text(json.dumps({"about": info, "results": results}, indent=2) + "\n")


def install_wheels(wheels: Path | None, directory: Path) -> None:
    """Install missing packages for this benchmark only."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(directory / "packages")])
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not missing:
        return
    if wheels is None:
        sys.exit(f"not installed: {', '.join(missing)}; give their wheels with --wheels FOLDER")
    # Never install torch: the installed one supports the GPU.
    result = [str(path) for path in wheels.glob("*.whl") if not path.name.startswith("torch-")]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*command, "--target", str(directory / "packages"), *result], check=True)


def run_worker(worker: str, tiny: bool, timeout: float) -> dict[str, Any]:
    """Run a worker in a separate process and return its output."""
    command = [sys.executable, __file__, "--worker", worker, *(["--tiny"] if tiny else [])]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    if completed.returncode:
        return {"error": last_error(completed.stderr)}
    result: dict[str, Any] = json.loads(completed.stdout.strip().splitlines()[-1])
    return result


def last_error(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["ended without a word"])[-1].strip()[:300]


def run_all(
    tiny: bool, info: dict[str, Any], directory: Path, ends: float
) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    cases: list[tuple[str, Any]] = []

    def speed(name: str, overrides: dict[str, str]) -> None:
        cases.append(
            (name, lambda timeout: train(name, overrides, SKIP + MEASURED, directory, timeout))
        )

    def losses(name: str, overrides: dict[str, str]) -> None:
        steps = 10 if tiny else 300
        cases.append(
            (f"losses: {name}", lambda timeout: train(name, overrides, steps, directory, timeout))
        )

    shape = shape_of(tiny, info["layers"])
    methods = list(SPEED.items())
    for name, variant in methods[:4]:
        speed(name, shape | variant)
    cases.append((PEER, lambda timeout: run_worker("peer", tiny, timeout)))
    for name, variant in LOSSES.items():
        losses(name, small(tiny) | variant)
    if info["whole"]:
        speed(WHOLE, shape_of(tiny, 32) | TENSORWISE | FULL | {"optim.state_dtype": "8bit"})
    for name, variant in methods[4:]:
        speed(name, shape | variant)

    longest = 0.0
    for name, run in cases:
        start_time = time.monotonic()
        remaining = ends - start_time
        if remaining < max(20.0, 0.7 * longest):
            results[name] = {"error": "no time left"}
            continue
        try:
            results[name] = run(remaining)
        except subprocess.TimeoutExpired:
            results[name] = {"error": "ran out of time"}
        longest = max(longest, time.monotonic() - start_time)
        results[name]["seconds"] = round(time.monotonic() - start_time, 1)
        print(f"  {name}: {results[name]}", flush=True)
    return results


def shape_of(tiny: bool, layers: int) -> dict[str, str]:
    if tiny:
        return small(tiny) | {"train.global_batch_size": "4", "train.microbatch_size": "1"}
    return {
        "model.preset": "8b",
        "model.num_layers": str(layers),
        "train.seq_len": "8192",
        "train.global_batch_size": "4",
        "train.microbatch_size": "1",
    }


def small(tiny: bool) -> dict[str, str]:
    """Return a model whose loss decreases in 300 steps."""
    if tiny:
        heads = {"model.num_heads": "4", "model.num_kv_heads": "2", "model.num_layers": "1"}
        heads["precision.float8_small"] = "true"
        return heads | {"model.dim": "64", "model.ffn_dim": "128", "train.seq_len": "64"}
    return {
        "precision.float8_small": "true",
        "model.num_layers": "8",
        "model.dim": "1024",
        "model.num_heads": "16",
        "model.num_kv_heads": "4",
        "model.ffn_dim": "3584",
        "train.seq_len": "1024",
        "train.global_batch_size": "16",
        "optim.lr": "6e-4",
    }


def train(
    name: str, overrides: dict[str, str], steps: int, directory: Path, timeout: float
) -> dict[str, Any]:
    """Run ``weft train`` without checkpoints until ``steps`` are recorded."""
    run = directory / "".join(letter if letter.isalnum() else "-" for letter in name)
    everything = {
        "run.dir": str(run),
        "run.nproc_per_node": "1",
        "train.steps": "300" if steps >= 300 else "10000",
        "data.cache_dir": str(directory / "cache"),
        "compile.cache_dir": str(directory / "compiled"),
        "checkpoint.interval": "0",
        "monitor.log_interval": "1",
        "monitor.trackers": "",
        "train.eval_sequences": "1",
        **overrides,
    }
    command = [sys.executable, "-m", "weft", "train", "demo"]
    for key, value in everything.items():
        command += [f"--{key}", value]
    with (directory / "log").open("wb") as log:
        started = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=directory, start_new_session=True
        )
    records: list[dict[str, Any]] = []
    try:
        ends = time.monotonic() + timeout
        while len(records) < steps and started.poll() is None:
            if time.monotonic() > ends:
                raise subprocess.TimeoutExpired(command, timeout)
            time.sleep(0.2)
            records = read(run / "metrics.jsonl")
    finally:
        with suppress(ProcessLookupError):  # its ranks are in the same process group
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()
        time.sleep(2)  # wait until the driver has released the memory
    if len(records) < steps:
        return {"error": last_error((directory / "log").read_text("utf-8", "replace"))}
    rows = records[SKIP:steps]
    middle = {
        key: statistics.median(row[key] for row in rows)
        for key in ("tokens_per_second", "mfu", "step_seconds")
        if rows[0][key] is not None
    }
    losses = [row["loss"] for row in records[:steps]]
    last = statistics.fmean(losses[-max(1, steps // 6) :])
    return middle | {"memory_peak_gib": rows[-1]["memory_peak_gib"], "loss": last}


def read(path: Path) -> list[dict[str, Any]]:
    """Read complete records only, because the run is still writing."""
    text = path.read_text("utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def table(info: dict[str, Any], results: dict[str, dict[str, Any]]) -> None:
    print(f"\n{info['date']}, {info['device']}, torch {info['torch']}: `{info['command']}`\n")
    print("| | tokens/s | over eager | MFU | peak GiB |\n|---|---|---|---|---|")
    base = results.get("eager bf16", {}).get("tokens_per_second")
    for name in (*SPEED, WHOLE, PEER):
        row = results.get(name, {"error": "not run"})
        if "error" in row:
            print(f"| {name} | {row['error']} | | | |")
            continue
        ratio = f"{row['tokens_per_second'] / base:.2f}" if base and name != WHOLE else ""
        share = f"{row['mfu']:.1%}" if row.get("mfu") else ""
        peak = f"{row['memory_peak_gib']:.1f}"
        print(f"| {name} | {row['tokens_per_second']:,.0f} | {ratio} | {share} | {peak} |")
    print("\nMFU is of the bfloat16 peak, with float8, too.")
    print("\n| losses after 300 steps | mean of the last 50 |\n|---|---|")
    for name in LOSSES:
        row = results.get(f"losses: {name}", {"error": "not run"})
        print(f"| {name} | {row.get('error') or format(row['loss'], '.4f')} |")


# --------------------------------------------------------------------------- workers


def probe(tiny: bool) -> dict[str, Any]:
    """Return device, versions, and the number of layers that fit."""
    from dataclasses import replace
    from importlib.metadata import version

    import torch

    from weft.config.reader import read_job
    from weft.config.schema import RunSection
    from weft.plan.plan_text import estimate_memory_bytes
    from weft.plan.resolve import resolve
    from weft.plan.sharding import USABLE_MEMORY
    from weft.train.machine import detect_machine

    if not (tiny or torch.cuda.is_available()):
        sys.exit("Error: no CUDA device is visible; --tiny runs on anything")
    machine = replace(detect_machine(RunSection()), world_size=1, local_world_size=1)

    def needs(layers: int, **extra: str) -> float:
        pairs = shape_of(False, layers) | {key.replace("__", "."): v for key, v in extra.items()}
        pairs |= {"precision.compute_dtype": "bfloat16", "run.dir": "/nonexistent"}
        job, _, errors = read_job("demo", list(pairs.items()))
        assert not errors, errors
        return estimate_memory_bytes(resolve(job, machine)) or 0.0

    room = USABLE_MEMORY * (machine.memory_bytes or 0)
    fitting = [layers for layers in range(1, 33) if needs(layers) <= room]
    # The estimate has no recomputation, with which a layer saves only the input of its block.
    states = (
        needs(32, optim__state_dtype="8bit", train__seq_len="128")
        + 32 * 8192 * 4096 * 2
        + 8 * 2**30
    )
    return {
        "device": torch.cuda.get_device_name(0) if machine.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "torchao": version("torchao"),
        "python": sys.version.split()[0],
        "layers": max(fitting, default=1),
        "whole": not tiny and states <= room,
    }


def peer(tiny: bool) -> dict[str, Any]:
    """Measure Hugging Face's Llama of the same shape: autocast, fused AdamW, clipping."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from weft.models import load_family
    from weft.plan.devices import peak_flops
    from weft.plan.model_config import resolve_model

    layers = 1 if tiny else probe(tiny)["layers"]
    shape = shape_of(tiny, layers)
    fields = {
        key.removeprefix("model."): int(value)
        for key, value in shape.items()
        if key.startswith("model.") and value.isdigit()
    }
    model_config, errors = resolve_model("llama", shape.get("model.preset", "toy"), fields)
    assert model_config is not None, errors
    ours: Any = model_config
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    with device:
        config = LlamaConfig(
            hidden_size=ours.dim,
            num_hidden_layers=ours.num_layers,
            num_attention_heads=ours.num_heads,
            num_key_value_heads=ours.num_kv_heads,
            intermediate_size=ours.ffn_dim,
            vocab_size=ours.vocab_size,
            max_position_embeddings=ours.max_seq_len,
            tie_word_embeddings=ours.tied_embeddings,
            attn_implementation="sdpa",
            use_cache=False,
        )
        model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rows, tokens = int(shape["train.global_batch_size"]), int(shape["train.seq_len"])
    steps = []
    for _ in range(2 + MEASURED):
        batch = torch.randint(0, ours.vocab_size, (rows, tokens), device=device)
        if device.type == "cuda":
            torch.cuda.synchronize()
        start_time = time.perf_counter()
        for row in batch.split(1):
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(input_ids=row, labels=row).loss / rows
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        steps.append(time.perf_counter() - start_time)
    seconds = statistics.median(steps[2:])
    rate = rows * tokens / seconds
    flops = rate * load_family("llama").flops_per_token(model_config, tokens)
    on_gpu = device.type == "cuda"
    peak = peak_flops(torch.cuda.get_device_name(0)) if on_gpu else None
    return {
        "tokens_per_second": rate,
        "mfu": flops / peak if peak else None,
        "step_seconds": seconds,
        "memory_peak_gib": torch.cuda.max_memory_reserved() / 2**30 if on_gpu else 0.0,
    }


WORKERS = {"probe": probe, "peer": peer}

if __name__ == "__main__":
    main()
