"""Compare weft's LoRA with transformers' Trainer and peft, interleaved.

    python benchmarks/tuning.py [--rounds 30] [--burst 3]

Both fine-tune the same small Llama with random weights on the same conversations: questions about
Python's standard library, answered by its docstrings.  Both have equal rows in equal order
(conversations packed by best fit, with attention inside a conversation only), equal initial
adapters, float32, fused AdamW, clipping at 1.0, a constant learning rate, and one thread.  Each has
a separate process.  In every round, each runs a burst of steps while the other waits, so that a
drift of the machine's speed affects both.  The results are median and quartiles of the ratios of
times in a round, and the differences of the losses of equal steps, which are due to rounding only.
"""

from __future__ import annotations

import argparse
import ast
import json
import logging
import multiprocessing
import os
import platform
import random
import socket
import statistics
import sys
import sysconfig
import tempfile
import time
from datetime import date
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

SEQ_LEN, ROWS = 256, 4
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>")


def write_conversations(path: Path) -> None:
    """Write conversations about functions of the standard library."""
    lines = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and 20 < len(ast.get_docstring(node) or "") < 300:
                question = f"What does {node.name} of {file.stem} do?"
                answer = ast.get_docstring(node)
                lines.append(json.dumps({"prompt": question, "response": answer}))
    path.write_text("\n".join(lines) + "\n", "utf-8")


def write_model(directory: Path, chat: Path) -> None:
    """Write a Llama with random weights, tokenizer and chat template."""
    from tokenizers import AddedToken
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from weft.data.tokenizer_training import train_tokenizer

    tokenizer = train_tokenizer(chat.read_text("utf-8").splitlines(), 2000)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=TEMPLATE
    )
    wrapped.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(wrapped),
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=SEQ_LEN,
        initializer_range=0.05,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


class Turn:
    """Called before every step; blocks until it is this process's turn."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.remaining, self.start = pipe, 0, (0.0, 0.0)

    def __call__(self) -> None:
        if self.remaining:
            self.remaining -= 1
            return
        results = time.perf_counter(), time.process_time()
        self.pipe.send([b - a for a, b in zip(self.start, results, strict=True)])
        burst = self.pipe.recv()
        if not burst:
            self.pipe.send(None)
            os._exit(0)
        self.remaining = burst - 1
        self.start = time.perf_counter(), time.process_time()


def job_of(directory: Path, steps: int) -> Any:
    from weft.preparation.job_checks import prepare_job

    overrides = {
        "data.format": "chat",
        "data.path": directory / "chat.jsonl",
        "data.cache_dir": directory / "cache",
        "train.seq_len": SEQ_LEN,
        "train.global_batch_size": ROWS,
        "train.steps": steps,
        "lora.rank": 16,
        "lora.alpha": 32,
        "optim.lr": 1e-3,
        "optim.warmup_steps": 0,
        "optim.decay_fraction": 0,
        "optim.weight_decay": 0,
        "run.nproc_per_node": 1,
        "monitor.log_interval": 1,
        "monitor.trackers": "",
        "monitor.report": "false",
        "checkpoint.interval": 0,
    }
    all_overrides = [(key, str(value)) for key, value in overrides.items()]
    return prepare_job(str(directory / "run" / "job.toml"), all_overrides)


def weft(directory: Path, steps: int, turn: Turn) -> None:
    from weft.config.writer import to_toml
    from weft.data.prepare import prepare_data
    from weft.monitor import heartbeat
    from weft.monitor.terminal import quiet_console
    from weft.training import loop
    from weft.training import run as weft_run
    from weft.training.setup import connect

    base, plan = job_of(directory, steps)
    job = plan.job
    (directory / "run" / "job.toml").write_text(to_toml(job, "tuning", base), "utf-8")
    text = prepare_data(job.data, directory / "cache")
    in_run: Any = weft_run  # names in this module are replaced
    in_loop: Any = loop
    build, enter_phase = in_run.build, in_loop.enter_phase

    def build_and_report(*args: Any) -> Any:
        torch.set_num_threads(1)  # one thread for both; weft would use all cores
        built = build(*args)
        named = built.model_parts[0].named_parameters()
        torch.save({n: p.detach().clone() for n, p in named if "lora_" in n}, directory / "new")
        os.replace(directory / "new", directory / "initial.pt")
        return built

    def enter_and_wait(name: str, step: int | None = None) -> None:
        if step is not None:
            turn()
        enter_phase(name, step)

    in_run.build, in_loop.enter_phase = build_and_report, enter_and_wait
    heartbeat.start_heartbeat(0, None, 10)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with connect(plan) as rank, (directory / "terminal.txt").open("w") as terminal:
        loop.train(plan, text, rank, quiet_console(terminal))


class Rows(torch.utils.data.Dataset):
    """weft's rows as a torch Dataset, in the order of their use."""

    def __init__(self, directory: Path, steps: int) -> None:
        from weft.data.loader import Loader, build_mixture
        from weft.data.prepare import prepare_data

        job = job_of(directory, steps)[1].job
        text = prepare_data(job.data, directory / "cache")
        samples = build_mixture(text, "train", SEQ_LEN, job.data, job.train.seed)
        self._loader = Loader(samples, job.train.seed, 1, 0, 1, 1)
        self._size = steps * ROWS

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, position: int) -> Any:
        return self._loader.get_microbatches(position)[0]


def trainer(directory: Path, steps: int, turn: Turn) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    while not (directory / "initial.pt").exists():
        time.sleep(0.1)
    base = AutoModelForCausalLM.from_pretrained(directory / "theirs", dtype=torch.float32)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM")
    model: Any = get_peft_model(base, adapters)
    initial = torch.load(directory / "initial.pt", weights_only=True)
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, param in params.items():
            ours = name.removeprefix("base_model.model.model.").replace(".default", "")
            param.copy_(initial.pop(ours))
    assert not initial

    class LogRecorder(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            turn()

        def on_log(self, arguments: Any, state: Any, *args: Any, **kwargs: Any) -> None:
            (directory / "trainer.json").write_text(json.dumps(state.log_history))

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        tokens_BT, targets_BT, documents_BT, positions_BT = (
            torch.cat([row[column] for row in rows]) for column in range(4)
        )
        same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
        seen_B1TT = (same_BTT & torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool).tril())[:, None]
        mask_B1TT = torch.zeros(seen_B1TT.shape).masked_fill(~seen_B1TT, -torch.inf)
        return {
            "input_ids": tokens_BT,
            "position_ids": positions_BT,
            "attention_mask": mask_B1TT,
            "labels": targets_BT,
            "shift_labels": targets_BT,
        }

    optimizer = torch.optim.AdamW(
        params.values(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True
    )
    arguments = TrainingArguments(
        output_dir=str(directory / "trainer"),
        use_cpu=True,
        max_steps=steps,
        per_device_train_batch_size=ROWS,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        train_sampling_strategy="sequential",
    )
    Trainer(
        model,
        arguments,
        train_dataset=Rows(directory, steps),
        data_collator=collate,
        optimizers=(optimizer, None),
        callbacks=[LogRecorder()],
    ).train()


def worker(name: str, directory: Path, steps: int, pipe: Connection) -> None:
    log = os.open(directory / f"{name}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        torch.set_num_threads(1)
        {"weft": weft, "trainer": trainer}[name](directory, steps, Turn(pipe))
        raise RuntimeError("ended before it was asked to")
    except BaseException:
        logging.exception("worker failed")
        os._exit(1)


def quartiles(values: list[float]) -> str:
    low, middle, high = np.percentile(values, [25, 50, 75])
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--burst", type=int, default=3, help="steps at a time")
    options = parser.parse_args()
    steps = options.burst * (options.rounds + 3)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_conversations(directory / "chat.jsonl")
        write_model(directory / "theirs", directory / "chat.jsonl")
        from weft.conversion.hf_import import import_model

        import_model(directory / "theirs", directory / "run", lambda progress: None)
        context = multiprocessing.get_context("spawn")
        pipes: dict[str, Connection] = {}
        for owner in ("weft", "trainer"):
            pipes[owner], theirs = context.Pipe()
            context.Process(
                target=worker, args=(owner, directory, steps, theirs), daemon=True
            ).start()
            theirs.close()

        def answer(name: str) -> Any:
            try:
                return pipes[name].recv()
            except EOFError:
                print((directory / f"{name}.log").read_text()[-4000:], file=sys.stderr)
                sys.exit(f"{name}: a process ended")

        for owner in pipes:
            answer(owner)
        ratios = []
        for number in range(options.rounds + 2):
            times = {}
            for owner in random.sample(sorted(pipes), 2):
                pipes[owner].send(options.burst)
                times[owner] = answer(owner)
            if number >= 2:  # the first bursts allocate memory
                ratios.append([a / b for a, b in zip(times["weft"], times["trainer"], strict=True)])
        for owner in pipes:
            pipes[owner].send(0)
            answer(owner)
        lines = (directory / "run" / "metrics.jsonl").read_text().splitlines()
        ours = {r["step"]: r["loss"] for r in map(json.loads, lines)}
        history = json.loads((directory / "trainer.json").read_text())
        trainers = {r["step"]: r["loss"] for r in history if "loss" in r}
    both = sorted(ours.keys() & trainers.keys())
    difference = [abs(ours[step] - trainers[step]) for step in both]
    known = {name: version(name) for name in ("torch", "transformers", "peft")}
    known["Python"] = platform.python_version()
    print(date.today(), *(f"{name} {number}" for name, number in known.items()), sep=", ")
    print(f"losses of {len(both)} steps, {ours[both[0]]:.4f} to {ours[both[-1]]:.4f}: apart by")
    print(f"  {statistics.mean(difference):.1e} in the mean, {max(difference):.1e} at most")
    print(f"weft's time over the Trainer's:      {quartiles([time for time, _ in ratios])}")
    print(f"weft's processor time over its:      {quartiles([cpu for _, cpu in ratios])}")


if __name__ == "__main__":
    main()
