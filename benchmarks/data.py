"""Measure preparing and reading data, compared with Hugging Face's `datasets`.

    .venv/bin/python benchmarks/data.py [--megabytes 16] [--rounds 3] [--seq-len 2048]

*Tokenizing*: both process the same JSON lines with the same tokenizer, in turns.  The text is the
standard library's source, in documents of some kilobytes.  weft runs
`weft.data.prepare.prepare_store` with an empty cache: it reads, checks, hashes, splits, tokenizes
and writes.  `datasets` runs `load_dataset("json").map(batched=True, num_proc=cores)` with an empty
cache, which writes input_ids to Arrow files.  Both start new processes.  The benchmark measures
wall-clock time, and reports the median of the ratios of all rounds.

*Reading*: sequences of a warm store in the loader's random order, in one process with one thread,
compared with `dataset.with_format("numpy")`: the same sequences, lengths and order.  The benchmark
measures processor time, which other processes affect less than wall-clock time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sysconfig
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import median

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import datasets
import numpy as np
import tokenizers

from weft.config.schema import DataSection
from weft.data.dataset import Dataset, Source
from weft.data.loader import Loader, build_mixture
from weft.data.prepare import prepare_store
from weft.data.tokenizer_training import train_tokenizer

CORES = len(os.sched_getaffinity(0))
DOCUMENT_BYTES = 4000
BATCH_ROWS = 16


def write_lines(file: Path, size: int) -> None:
    """Write the library's sources as documents, repeated up to the requested size."""
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    written = 0
    with file.open("w") as out:
        while written < size:
            for source in library:
                text = f"# {written}\n{source.read_text(errors='replace')}"
                for first in range(0, len(text), DOCUMENT_BYTES):
                    part = text[first : first + DOCUMENT_BYTES]
                    written += out.write(json.dumps({"text": part}) + "\n")
                if written >= size:
                    break


def by_weft(file: Path, tokenizer: Path, directory: Path) -> int:
    section = DataSection(path=str(file), tokenizer=str(tokenizer))
    manifest = prepare_store(section, directory).manifest
    return manifest.train.tokens + manifest.validation.tokens


def by_datasets(file: Path, tokenizer: Path, directory: Path) -> int:
    dataset = datasets.load_dataset("json", data_files=str(file), cache_dir=str(directory))["train"]
    encode = tokenizers.Tokenizer.from_file(str(tokenizer))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process
    tokenized = dataset.map(
        lambda rows: {"input_ids": [e.ids for e in encode.encode_batch_fast(rows["text"])]},
        batched=True,
        num_proc=CORES,
        remove_columns=dataset.column_names,
    )
    del os.environ["TOKENIZERS_PARALLELISM"]
    return int(sum(map(len, tokenized.with_format("arrow")[:]["input_ids"].to_pylist())))


def tokenizing(file: Path, tokenizer: Path, directory: Path, rounds: int) -> None:
    tokenizers = {"weft": by_weft, "datasets": by_datasets}
    seconds: dict[str, list[float]] = {name: [] for name in tokenizers}
    tokens = {}
    for number in range(rounds):
        for name, tokenize in list(tokenizers.items())[:: 1 if number % 2 else -1]:
            path = directory / f"{name}-{number}"
            start_time = time.perf_counter()
            tokens[name] = tokenize(file, tokenizer, path)
            seconds[name].append(time.perf_counter() - start_time)
            shutil.rmtree(path)
    size = file.stat().st_size
    print(f"tokenizing {size / 1e6:.0f} MB of lines, {CORES} cores, {rounds} rounds")
    for name, times in seconds.items():
        timings = " ".join(f"{t:.1f}" for t in times)
        speed = size / median(times) / 1e6
        print(f"  {name:<10} {speed:6.2f} MB/s  {tokens[name]:,} tokens  seconds: {timings}")
    ratios = sorted(b / a for a, b in zip(seconds["weft"], seconds["datasets"], strict=True))
    print(f"  weft / datasets: {median(ratios):.2f}x ({ratios[0]:.2f}-{ratios[-1]:.2f})")


def reading(file: Path, tokenizer: Path, directory: Path, seq_len: int, rounds: int) -> None:
    section = DataSection(path=str(file), tokenizer=str(tokenizer))
    store = prepare_store(section, directory / "warm")
    text = Dataset(store.path, (Source("x", 1.0, store),))
    stream = store.tokens("train")
    rows = stream.read_windows(np.arange((len(stream) - 1) // seq_len) * seq_len, seq_len + 1)
    arrow = datasets.Dataset.from_dict({"ids": rows.astype(np.int32)}).with_format("numpy")
    count = 200
    speeds: dict[str, list[float]] = {"windows": [], "documents": [], "datasets": []}
    for _ in range(rounds):
        for packing in ("windows", "documents"):
            packed = section.model_copy(update={"packing": packing})
            samples = build_mixture(text, "train", seq_len, packed, seed=0)
            loader = Loader(samples, 0, BATCH_ROWS, 0, 1, BATCH_ROWS)
            start_time = time.process_time()
            for step in range(count):
                loader.get_microbatches(step * BATCH_ROWS)
            taken = time.process_time() - start_time
            speeds[packing].append(count * BATCH_ROWS * seq_len / taken / 1e6)
        order = np.random.default_rng(0).integers(0, len(arrow), (count, BATCH_ROWS))
        start_time = time.process_time()
        for row in order:
            result = arrow[row]["ids"].astype(np.int64)
            result[:, :-1].copy(), result[:, 1:].copy()
        taken = time.process_time() - start_time
        speeds["datasets"].append(count * BATCH_ROWS * seq_len / taken / 1e6)
    print(
        f"reading batches of {BATCH_ROWS} x {seq_len} tokens, million tokens per second of one core"
    )
    for name, result in speeds.items():
        print(f"  {name:<10} {median(result):7.1f}  ({min(result):.1f}-{max(result):.1f})")
    print(f"  windows / datasets: {median(speeds['windows']) / median(speeds['datasets']):.1f}x")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seq-len", type=int, default=2048)
    options = parser.parse_args()
    datasets.disable_progress_bars()
    print(
        f"{date.today()}  Python {platform.python_version()}  datasets {datasets.__version__}  "
        f"tokenizers {tokenizers.__version__}  load {os.getloadavg()[0]:.1f}"
    )
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        file, tokenizer = directory / "lines.jsonl", directory / "tokenizer.json"
        write_lines(file, options.megabytes << 20)
        with file.open() as lines:
            texts = (json.loads(line)["text"] for line in lines)
            subset = [text for _, text in zip(range(500), texts, strict=False)]
        train_tokenizer(subset, 16_000).save(str(tokenizer))
        reading(file, tokenizer, directory, options.seq_len, max(5, options.rounds))
        tokenizing(file, tokenizer, directory, options.rounds)


if __name__ == "__main__":
    main()
