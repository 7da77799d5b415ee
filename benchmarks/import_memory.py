"""Measure the peak memory of an import, and of ranks that start from it.

    python benchmarks/import_memory.py [--layers 14] [--ranks 2]

A random Llama in bfloat16, 2 GB by default, is written as transformers does, a layer at a time, and
then:

- ``weft import`` and ``weft.load_model`` read it;
- ``weft train`` starts ranks from the import, and from random weights, up to the first step.  A
  fault kills the ranks there, so that gradients and the optimizer's state do not count.

Peaks are resident memory (VmHWM).  They are also shown beyond those of the same command with a
model of 1 MB, which are those of Python and torch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

LOAD = "import sys, weft; weft.load_model(sys.argv[1], dtype=sys.argv[2], device='cpu')"
VOCABULARY = 32000
LARGE = {"dim": 2048, "ffn_dim": 8192, "num_heads": 32, "num_kv_heads": 8}
SMALL = {"dim": 8, "ffn_dim": 16, "num_heads": 2, "num_kv_heads": 1, "num_layers": 1}


def write_model(directory: Path, shape: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Write a model; return its configuration and the number of its parameters."""
    import torch
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    from weft.checkpoint.weight_files import Weight, write_weight_files
    from weft.conversion.hf_weights import list_hf_tensors
    from weft.models import FAMILIES
    from weft.models.decoder_config import DecoderConfig
    from weft.models.hf_mapping import to_hf_config

    fields: dict[str, Any] = {"vocab_size": VOCABULARY, "max_seq_len": 1024}
    fields |= {"rope_scaling": "none"} | shape
    config, family = DecoderConfig(**fields), FAMILIES["llama"]
    directory.mkdir()
    weights = {
        name: Weight(t.shape, lambda shape=t.shape: iter([0.02 * torch.randn(shape)]))
        for name, t in list_hf_tensors(family, config).items()
    }
    write_weight_files(directory, weights, torch.bfloat16, 10**9, lambda written: None)
    (directory / "config.json").write_text(json.dumps(to_hf_config(family, config, "bfloat16")))
    words = {"<|endoftext|>": 0} | {f"t{i}": i for i in range(1, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, "t1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return config.model_dump(), family.num_params(config)


def run_watched(*command: str) -> tuple[list[float], int, str]:
    """Run a command; return peaks in GB of it and its children, its status and its output.

    A peak of 20 ms before a process ends is missed.
    """
    peaks: dict[int, float] = {}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([sys.executable, *command], stdout=log, stderr=log)
        while process.poll() is None:
            for pid in (process.pid, *descendants(process.pid)):
                peaks[pid] = max(peaks.get(pid, 0.0), high_water_mark(pid))
            time.sleep(0.02)
        log.seek(0)
        return [*peaks.values()], process.returncode, log.read()


def peak_of(*command: str) -> float:
    """Run a command; return its peak memory in GB."""
    peaks, status, text = run_watched(*command)
    assert status == 0, text
    return peaks[0]


def peaks_of_ranks(ranks: int, *words: str) -> list[float]:
    """Start ranks up to their first step; return their peaks in GB."""
    faults = [f'{{site = "step", kind = "kill", rank = {rank}}}' for rank in range(ranks)]
    keys = {
        "run.nproc_per_node": str(ranks),
        "run.device": "cpu",
        "parallel.dp_shard": str(ranks),
        "train.global_batch_size": str(ranks),
        "train.microbatch_size": "1",
        "train.seq_len": "16",
        "train.steps": "1",
        "train.eval_interval": "0",
        "resilience.max_restarts_per_hour": "0",
        "resilience.faults": f"[{', '.join(faults)}]",
    }
    options = [text for name, value in keys.items() for text in (f"--{name}", value)]
    peaks, _, text = run_watched("-m", "weft", "train", *words, *options)
    assert "SIGKILL" in text, text
    return sorted(peaks[1:])[-ranks:]


def descendants(pid: int) -> list[int]:
    """Return the processes below a process."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [found for child in map(int, children) for found in (child, *descendants(child))]


def high_water_mark(pid: int) -> float:
    """Return the peak resident memory of a process in GB; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return max((int(x.split()[1]) * 1024 / 1e9 for x in lines if x.startswith("VmHWM")), default=0)


def measure(directory: Path, shape: dict[str, Any], ranks: int) -> dict[str, float]:
    """Return the peaks of each command in GB."""
    source, run = directory / "source", directory / "run"
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        config, params = pool.apply(write_model, (source, shape))
    text = directory / "text.txt"
    text.write_text(" ".join(f"t{i % VOCABULARY}" for i in range(20000)))
    result = {"parameters": float(params)}
    begin = time.monotonic()
    result["weft import"] = peak_of("-m", "weft", "import", str(source), str(run), "--force")
    result["seconds of import"] = time.monotonic() - begin
    for dtype in ("bfloat16", "float32"):
        result[f"load_model {dtype}"] = peak_of("-c", LOAD, str(source), dtype)
    data = ["--data.path", str(text)]
    imported = peaks_of_ranks(ranks, str(run / "job.toml"), *data)
    fields = {n: v for n, v in config.items() if n in {*LARGE, *SMALL, "vocab_size"}}
    keys = [
        word for name, value in fields.items() for word in (f"--model.{name}", json.dumps(value))
    ]
    job = ["demo", "--run.dir", str(directory / "random"), *data, *keys]
    job += ["--data.tokenizer", str(source / "tokenizer.json"), "--model.tied_embeddings", "false"]
    for rank, (peak, other) in enumerate(zip(imported, peaks_of_ranks(ranks, *job), strict=True)):
        result[f"rank {rank} of the import"], result[f"rank {rank}, random"] = peak, other
    shutil.rmtree(run)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    results = []
    for shape in (SMALL, LARGE | {"num_layers": options.layers}):
        with tempfile.TemporaryDirectory() as name:
            results.append(measure(Path(name), shape, options.ranks))
    small, large = results
    params = large.pop("parameters")
    print(f"{date.today()}  torch {version('torch')}, Python {platform.python_version()}")
    print(f"{params:,.0f} parameters: {2 * params / 1e9:.2f} GB in bfloat16")
    print(f"shard of a rank in float32: {4 * params / options.ranks / 1e9:.2f} GB")
    print(f"import: {large.pop('seconds of import'):.0f} s")
    print(f"{'peak, GB':<24} {'all':>6} {'beyond Python and torch':>24}")
    for name, peak in large.items():
        print(f"{name:<24} {peak:6.2f} {peak - small[name]:24.2f}")


if __name__ == "__main__":
    main()
