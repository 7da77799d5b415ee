"""Compare weft with other trainers on one small Llama, in one interleaved run.

    python3.11 -m venv build/peers && build/peers/bin/pip install --no-deps \\
        -r benchmarks/peers-requirements.txt -e .
    build/peers/bin/python benchmarks/peers.py [--model micro] [--ranks 2] [--rounds 20]

Each trainer has separate processes.  In every round, in random order, each trainer runs a burst of
steps while all others wait; so a drift of the machine's speed affects all alike.  The results are
ratios to the bare loop of the same round: median and quartiles, of wall-clock time and of processor
time (user and system, all threads).  The bare loop runs twice; the ratios of the second one show
the noise of the machine.

All trainers do the same work: data, order, batch, float32, the fused AdamW in two groups, clipping
at 1.0, and a constant learning rate.  Each records a loss every tenth step, to TensorBoard if the
trainer supports it.  After every burst each trainer computes the loss of a fixed batch and the norm
of its parameters, outside the measured time.  Both must agree (`LOSS`, `NORM`) with the bare loop.

torch's `clip_grad_norm_` sums squares in float32; on a CPU the norm of 11 M gradients is up to
4e-4 too small (torch 2.13).  weft's norm is exact to 1e-6, so the divisors differ, and a step
with a norm of a thousand multiplies that difference.  weft is therefore compared with a bare loop
that clips by a norm in float64; its time is not measured.

    bare loop         the least code, around weft's model
    weft              `weft.training.loop.train`, as in `weft train`, with three sinks
    Accelerate        the bare loop with prepare, backward and clip_grad_norm_, around weft's model
    Fabric            the same with Lightning's Fabric, around weft's model
    Lightning         its Trainer around weft's model; without progress bar, summary, checkpoints
    HF Trainer        transformers' Trainer around its LlamaForCausalLM; without progress bar
    LitGPT            its pretraining loop (`litgpt.pretrain.fit`) and model, not compiled
    bare loop, ...    the bare loop around the other two models: the effect of the model

With ``--ranks 2`` it compares weft with FSDP2, a bare loop with `fully_shard`, and DeepSpeed's ZeRO
1 to 3.  DeepSpeed compiles a C++ operator at its first run on a CPU, for a minute.  The bare loop
has weft's defaults: a unit per block, resharded after forward, and what is outside of blocks stays
gathered, in one unit where weft has units of embedding and head; float32; the next block is
prefetched.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import logging
import math
import multiprocessing
import os
import platform
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from weft.config.reader import read_job
from weft.config.schema import Job
from weft.data.dataset import open_dataset
from weft.data.loader import sample_index
from weft.data.prepare import prepare_store
from weft.data.token_store import open_store
from weft.models import load_family
from weft.parallel.initialization import init_params
from weft.planning.plan import Machine, Plan
from weft.planning.resolve import resolve

# Allowed difference of the losses of a fixed batch, and relative difference of the norms of all
# parameters. Both differ by rounding, which grows with training: after too many steps it cannot be
# distinguished from different work.
LOSS, NORM, COMPARED = 1e-3, 1e-5, 60
LOG = 10  # steps between records

MODELS: dict[str, dict[str, object]] = {
    "small": {  # 11.0 M parameters
        "model.num_layers": 6,
        "model.dim": 384,
        "model.num_heads": 6,
        "model.num_kv_heads": 2,
        "model.ffn_dim": 1024,
        "train.seq_len": 256,
        "train.global_batch_size": 2,
    },
    "micro": {  # 0.3 M parameters
        "model.num_layers": 4,
        "model.dim": 64,
        "model.num_heads": 4,
        "model.num_kv_heads": 2,
        "model.ffn_dim": 192,
        "model.vocab_size": 2048,
        "data.vocab_size": 2048,
        "train.seq_len": 64,
        "train.global_batch_size": 2,
    },
}
BURST = {"small": 3, "micro": 20}  # steps
TARGETS = {"small": ("time", 1.02), "micro": ("processor time", 1.10)}


# --------------------------------------------------------------------------- the work


@dataclass(frozen=True)
class Work:
    """The work that all trainers do."""

    job: Job
    plan: Plan
    directory: Path  # output directory of this trainer
    rank: int
    turn: Turn

    def order(self) -> np.ndarray:
        """Return the offsets of this rank's rows in the tokens, in the order of their use."""
        job, ranks = self.job, self.plan.world_size
        windows = (len(self.tokens()) - 1) // job.train.seq_len
        positions = np.arange(job.train.known_steps * job.train.global_batch_size, dtype=np.int64)
        local = positions.reshape(job.train.known_steps, ranks, -1)[:, self.rank].ravel()
        return sample_index(local, windows, job.train.seed) * job.train.seq_len

    def tokens(self) -> np.ndarray:
        store = open_store(Path(self.directory.parent / "store").resolve())
        (shard,) = store.manifest.train.shards
        return np.asarray(np.memmap(store.path / shard.file, store.manifest.dtype, "r"))

    @property
    def rows(self) -> int:
        """Return the rows of a rank's batch."""
        return self.job.train.global_batch_size // self.plan.world_size

    def fixed(self) -> torch.Tensor:
        """Return the rows of the fixed batch."""
        return torch.stack([Rows(self)[i] for i in range(self.rows)])

    def model(self) -> nn.Module:
        """Return weft's model with its initial weights."""
        family, config = load_family("llama"), self.plan.model
        model = family.build(config)
        seed = self.job.train.seed
        init_params(model.named_parameters(), seed, lambda name: family.get_init(name, config))
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer; embeddings and norms have no weight decay, under any name."""
        section = self.job.optim
        tables = ("embed_tokens.weight", "lm_head.weight")  # tied weights
        named = list(model.named_parameters())
        small = [p for name, p in named if p.dim() == 1 or name.endswith(tables)]
        ids = set(map(id, small))
        groups = [
            {"params": [p for p in model.parameters() if id(p) not in ids], "weight_decay": 0.1},
            {"params": small, "weight_decay": 0.0},
        ]
        betas = section.beta1, section.beta2
        return torch.optim.AdamW(groups, lr=section.lr, betas=betas, eps=section.eps, fused=True)


class Rows(torch.utils.data.Dataset):
    """The rows as a torch Dataset: T + 1 int64 tokens each."""

    def __init__(self, work: Work) -> None:
        self.tokens, self.starts = work.tokens(), work.order().tolist()
        self.length = work.job.train.seq_len + 1

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> torch.Tensor:
        start = self.starts[index]
        return torch.from_numpy(self.tokens[start : start + self.length].astype(np.int64))


class Turn:
    """Called before every step; blocks until it is this process's turn."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.remaining, self.start = pipe, 0, (0.0, 0.0)
        self.check: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)

    def watch(
        self,
        model: nn.Module,
        logits: Callable[[torch.Tensor], Any],
        work: Work,
        local: Callable[[Any], torch.Tensor] = lambda p: (
            p.to_local() if isinstance(p, DTensor) else p
        ),
    ) -> None:
        """Set the model whose weights and outputs are compared; ``local``: this rank's part."""
        rows = work.fixed()

        @torch.no_grad()
        def check() -> tuple[float, float]:
            out = logits(rows[:, :-1])
            loss = F.cross_entropy(out.flatten(0, 1).float(), rows[:, 1:].flatten())
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # else the next step would start with gathered old weights
            parts = map(local, model.parameters())
            return loss.item(), sum(part.double().square().sum().item() for part in parts)

        self.check = check

    def __call__(self) -> None:
        if self.remaining:
            self.remaining -= 1
            return
        results = time.perf_counter(), time.process_time()
        seconds, cpu = (b - a for a, b in zip(self.start, results, strict=True))
        peak = next(s for s in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in s)
        self.pipe.send((seconds, cpu, *self.check(), int(peak.split()[1]) / 1024))
        burst = self.pipe.recv()
        if not burst:
            os._exit(0)
        self.remaining = burst - 1
        self.start = time.perf_counter(), time.process_time()


# --------------------------------------------------------------------------- the trainers


Clip = Callable[[list[nn.Parameter], float], Any]


def clip_exactly(params: list[nn.Parameter], max_norm: float) -> None:
    """Clip gradients as `clip_grad_norm_` does, by a norm in float64."""
    grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in params]
    square = torch.stack([grad.double().square().sum() for grad in grads if grad is not None]).sum()
    if dist.is_initialized():
        dist.all_reduce(square)
    scale = (max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0).float()
    for grad in grads:
        if grad is not None:
            grad.mul_(scale)


def bare_loop(
    work: Work,
    model: nn.Module | None = None,
    forward: Callable[..., Any] | None = None,
    clip: Clip = nn.utils.clip_grad_norm_,
) -> None:
    model = model or work.model()
    forward = forward or model
    optimizer = work.optimizer(model)
    params = list(model.parameters())
    tokens, starts = work.tokens(), work.order()
    T, B = work.job.train.seq_len, work.rows
    work.turn.watch(model, forward, work)
    with (work.directory / "losses.txt").open("w") as log:
        for step in range(1, work.job.train.known_steps + 1):
            work.turn()
            batch = starts[(step - 1) * B : step * B].tolist()
            rows = np.stack([tokens[start : start + T + 1] for start in batch]).astype(np.int64)
            inputs, targets = torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:])
            logits = forward(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            clip(params, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % LOG == 0:
                loss = loss.detach()
                if work.plan.world_size > 1:
                    dist.all_reduce(loss, dist.ReduceOp.AVG)
                print(step, loss.item(), file=log, flush=True)


def exact_loop(work: Work) -> None:
    bare_loop(work, clip=clip_exactly)


def exact_fsdp(work: Work) -> None:
    bare_fsdp(work, clip_exactly)


def connect(work: Work) -> None:
    rendezvous, ranks = f"file://{work.directory}/meeting", work.plan.world_size
    dist.init_process_group("gloo", init_method=rendezvous, rank=work.rank, world_size=ranks)


def bare_fsdp(work: Work, clip: Clip = nn.utils.clip_grad_norm_) -> None:
    connect(work)
    model = work.model()
    blocks: list[Any] = list(cast(Any, model.layers).values())
    for block in blocks:
        fully_shard(block)
    fully_shard(model, reshard_after_forward=False)
    for unit, after in zip([model, *blocks], [*blocks, None], strict=True):
        unit.set_modules_to_forward_prefetch([after] if after else [])
    for unit, before in zip(blocks, [None, *blocks], strict=False):
        unit.set_modules_to_backward_prefetch([before] if before else [])
    bare_loop(work, model, clip=clip)


def deepspeed(work: Work, stage: int) -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(work.rank)}
    os.environ |= {"RANK": str(work.rank), "WORLD_SIZE": str(work.plan.world_size)}
    connect(work)
    zero: Any = importlib.import_module("deepspeed")
    model = work.model()
    config = {
        "train_micro_batch_size_per_gpu": work.rows,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # the fused AdamW of the others
        "steps_per_print": 10**9,
    }
    engine, *_ = zero.initialize(model=model, optimizer=work.optimizer(model), config=config)

    def local(param: Any) -> torch.Tensor:
        part: torch.Tensor = param.flatten()[work.rank :: work.plan.world_size]
        return param.ds_tensor if stage == 3 else part

    tokens, starts = work.tokens(), work.order()
    T, B = work.job.train.seq_len, work.rows
    work.turn.watch(model, engine, work, local)
    with (work.directory / "losses.txt").open("w") as log:
        for step in range(1, work.job.train.known_steps + 1):
            work.turn()
            batch = starts[(step - 1) * B : step * B].tolist()
            rows = np.stack([tokens[start : start + T + 1] for start in batch]).astype(np.int64)
            logits = engine(torch.from_numpy(rows[:, :-1]))
            targets = torch.from_numpy(rows[:, 1:])
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            engine.backward(loss)
            engine.step()
            if step % LOG == 0:
                loss = loss.detach()
                dist.all_reduce(loss, dist.ReduceOp.AVG)
                print(step, loss.item(), file=log, flush=True)


def weft(work: Work) -> None:
    from weft.monitor import heartbeat
    from weft.monitor.terminal import quiet_console
    from weft.training import loop
    from weft.training import run as weft_run
    from weft.training.setup import Built
    from weft.training.setup import connect as connect_ranks

    in_run: Any = weft_run  # names in this module are replaced
    in_loop: Any = loop
    build, enter_phase = in_run.build, in_loop.enter_phase

    def build_and_watch(*args: Any) -> Built:
        built: Built = build(*args)
        (model,) = built.model_parts
        work.turn.watch(model, model, work)
        return built

    def enter_and_wait(name: str, step: int | None = None) -> None:
        if step is not None:
            work.turn()
        enter_phase(name, step)

    in_run.build, in_loop.enter_phase = build_and_watch, enter_and_wait
    heartbeat.start_heartbeat(work.rank, None, LOG)
    text = open_dataset((work.directory.parent / "store").resolve())
    os.environ |= {"RANK": str(work.rank), "WORLD_SIZE": str(work.plan.world_size)}
    with connect_ranks(work.plan) as rank, (work.directory / "terminal.txt").open("w") as terminal:
        loop.train(work.plan, text, rank, quiet_console(terminal))


def accelerate(work: Work) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = work.model()
    work.turn.watch(model, model, work)
    loader = DataLoader(Rows(work), work.rows)
    model, optimizer, loader = accelerator.prepare(model, work.optimizer(model), loader)
    with (work.directory / "losses.txt").open("w") as log:
        for step, rows in enumerate(loader, 1):
            work.turn()
            logits = model(rows[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % LOG == 0:
                print(step, loss.item(), file=log, flush=True)


def fabric(work: Work) -> None:
    from lightning import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    inner = work.model()
    work.turn.watch(inner, inner, work)
    model, optimizer = fabric.setup(inner, work.optimizer(inner))
    loader = fabric.setup_dataloaders(DataLoader(Rows(work), work.rows))
    with (work.directory / "losses.txt").open("w") as log:
        for step, rows in enumerate(loader, 1):
            work.turn()
            logits = model(rows[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % LOG == 0:
                print(step, loss.item(), file=log, flush=True)


def lightning(work: Work) -> None:
    import lightning as L
    from lightning.pytorch.loggers import TensorBoardLogger

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.model()

        def training_step(self, rows: torch.Tensor, index: int) -> torch.Tensor:
            logits = self.model(rows[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return work.optimizer(self.model)

    class Wait(L.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            work.turn()

    module = Module()
    work.turn.watch(module.model, module.model, work)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=work.job.train.known_steps,
        gradient_clip_val=1.0,
        log_every_n_steps=LOG,
        logger=TensorBoardLogger(work.directory),
        callbacks=[Wait()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(Rows(work), work.rows))


def hf_model(work: Work) -> Any:
    """Return transformers' Llama with weft's initial weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config: Any = work.plan.model
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_seq_len,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=True,
            use_cache=False,
        )
    )
    state = {f"model.{name}": tensor for name, tensor in work.model().state_dict().items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model


def bare_hf(work: Work) -> None:
    model = hf_model(work)
    bare_loop(work, model, lambda tokens: model(input_ids=tokens).logits)


def hf_trainer(work: Work) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Wait(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            work.turn()

    def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        batch = torch.stack(rows)
        # With shift_labels, the loss uses the labels unshifted and computes no unused position.
        targets = batch[:, 1:]
        return {
            "input_ids": batch[:, :-1],
            "labels": targets,
            "shift_labels": targets.contiguous(),
        }

    model = hf_model(work)
    work.turn.watch(model, lambda tokens: model(input_ids=tokens).logits, work)
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(work.directory)
    arguments = TrainingArguments(
        output_dir=str(work.directory),
        use_cpu=True,
        max_steps=work.job.train.known_steps,
        per_device_train_batch_size=work.rows,
        learning_rate=work.job.optim.lr,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=LOG,
        report_to=["tensorboard"],
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        train_sampling_strategy="sequential",
    )
    Trainer(
        model,
        arguments,
        train_dataset=Rows(work),
        data_collator=collate,
        optimizers=(work.optimizer(model), None),
        callbacks=[Wait()],
    ).train()


def litgpt_model(work: Work) -> Any:
    """Return LitGPT's GPT with weft's initial weights."""
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama

    config: Any = work.plan.model
    model = GPT(
        Config(
            name="llama",
            block_size=work.job.train.seq_len,
            vocab_size=config.vocab_size,
            padded_vocab_size=config.vocab_size,
            n_layer=config.num_layers,
            n_embd=config.dim,
            n_head=config.num_heads,
            n_query_groups=config.num_kv_heads,
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            norm_eps=config.norm_eps,
            mlp_class_name="LLaMAMLP",
            intermediate_size=config.ffn_dim,
            rope_base=int(config.rope_theta),
        )
    )
    theirs: dict[str, torch.Tensor] = {}
    ours = {f"model.{name}": tensor for name, tensor in work.model().state_dict().items()}
    copy_weights_hf_llama(model.config, {}, theirs, ours)
    model.load_state_dict(theirs)
    model.transformer.wte.weight = model.lm_head.weight
    return model


def bare_litgpt(work: Work) -> None:
    bare_loop(work, litgpt_model(work))


def litgpt(work: Work) -> None:
    import lightning as L
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.pretrain import fit
    from litgpt.utils import choose_logger

    rows = Rows(work)

    class Waiting(DataLoader):
        def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
            for batch in super().__iter__():
                work.turn()
                yield batch

    logger = choose_logger("tensorboard", work.directory, name="pretrain", log_interval=LOG)
    fabric = L.Fabric(accelerator="cpu", devices=1, precision="32-true", loggers=[logger])
    inner = litgpt_model(work)
    work.turn.watch(inner, inner, work)
    model = fabric.setup(inner)
    optimizer = fabric.setup_optimizers(work.optimizer(inner))
    loaders = fabric.setup_dataloaders(
        Waiting(rows, work.rows), DataLoader(torch.utils.data.Subset(rows, range(2)), work.rows)
    )
    T, lr = work.job.train.seq_len, work.job.optim.lr
    fit(
        fabric=fabric,
        devices=1,
        state={"model": model, "optimizer": optimizer, "iter_num": 0, "step_count": 0},
        train_dataloader=loaders[0],
        val_dataloader=loaders[1],
        out_dir=work.directory,
        tokenizer_dir=None,
        train=TrainArgs(
            save_interval=None,
            log_interval=LOG,
            global_batch_size=work.rows,
            micro_batch_size=work.rows,
            lr_warmup_steps=0,
            max_tokens=work.job.train.known_steps * work.rows * T,
            max_norm=1.0,
            min_lr=lr,
        ),
        eval=EvalArgs(interval=10**9, final_validation=False),
    )


# The trainer whose loss and norm another must have; the bare loop for those that are not here.
EXACT = "bare loop, exact norm"
STAGES = {f"DeepSpeed, ZeRO {stage}": stage for stage in (1, 2, 3)}
REFERENCES = dict.fromkeys(("weft", *STAGES), EXACT)

# Row of the table: the function, and the package that it requires.
Trainer_ = tuple[Callable[[Work], None], str]
ONE_RANK: dict[str, Trainer_] = {
    "bare loop": (bare_loop, ""),
    "bare loop, again": (bare_loop, ""),
    EXACT: (exact_loop, ""),
    "weft": (weft, ""),
    "Accelerate": (accelerate, "accelerate"),
    "Fabric": (fabric, "lightning"),
    "Lightning": (lightning, "lightning"),
    "LitGPT": (litgpt, "litgpt"),
    "HF Trainer": (hf_trainer, "transformers"),
    "bare loop, LitGPT's model": (bare_litgpt, "litgpt"),
    "bare loop, HF's model": (bare_hf, "transformers"),
}
MORE_RANKS: dict[str, Trainer_] = {
    "bare loop": (bare_fsdp, ""),
    "bare loop, again": (bare_fsdp, ""),
    EXACT: (exact_fsdp, ""),
    "weft": (weft, ""),
    **{name: (partial(deepspeed, stage=stage), "deepspeed") for name, stage in STAGES.items()},
}


# --------------------------------------------------------------------------- processes


def jobs(options: argparse.Namespace, directory: Path) -> tuple[Job, Plan]:
    burst = options.burst or BURST[options.model]
    overrides: dict[str, object] = {
        "train.steps": burst * (options.rounds + 2),
        "run.dir": directory,
        "optim.lr": 3e-4,
        "optim.warmup_steps": 0,
        "optim.decay_fraction": 0,
        "checkpoint.interval": 0,
        "train.eval_interval": 0,  # no other trainer evaluates
        "monitor.log_interval": LOG,
        **MODELS[options.model],
    }
    overrides["train.global_batch_size"] = 2 * options.ranks
    job, _, errors = read_job("demo", [(key, str(value)) for key, value in overrides.items()])
    assert not errors, errors
    devices = options.threads * options.ranks
    return job, resolve(job, Machine("cpu", devices=devices, world_size=options.ranks))


def worker(name: str, rank: int, pipe: Connection, options: argparse.Namespace, tmp: Path) -> None:
    directory = tmp / name
    directory.mkdir(exist_ok=True)
    log = os.open(directory / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        logging.disable(logging.INFO)
        job, plan = jobs(options, directory)
        torch.set_num_threads(options.threads)
        function, _ = (MORE_RANKS if options.ranks > 1 else ONE_RANK)[name]
        function(Work(job, plan, directory, rank, Turn(pipe)))
        raise RuntimeError("ended before it was asked to")
    except BaseException:
        logging.exception("worker failed")
        os._exit(1)


Timing = tuple[float, float, float, float, float]  # seconds, cpu, loss, squares, peak


class Trainer:
    """The processes of one row of the table."""

    def __init__(self, name: str, options: argparse.Namespace, tmp: Path) -> None:
        self.name, self.tmp = name, tmp
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(options.ranks):
            ours, theirs = context.Pipe()
            args = (name, rank, theirs, options, tmp)
            process = context.Process(target=worker, args=args, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def wait(self) -> Timing:
        """Return the time of the slowest rank, processor time, loss, norm and peak memory."""
        try:
            seconds, cpu, loss, squares, peak = zip(*(p.recv() for p in self.pipes), strict=True)
        except EOFError:
            for path in sorted((self.tmp / self.name).glob("rank-*.log")):
                print(path.read_text()[-4000:], file=sys.stderr)
            sys.exit(f"{self.name}: a process ended")
        return max(seconds), sum(cpu), statistics.mean(loss), math.sqrt(sum(squares)), max(peak)

    def start_burst(self, steps: int) -> None:
        for pipe in self.pipes:
            pipe.send(steps)


def reference(name: str, results: dict[str, Timing]) -> Timing:
    """Return the result that a trainer must have."""
    return results[REFERENCES.get(name, "bare loop")]


def other_work(results: dict[str, Timing]) -> list[str]:
    """Return the trainers whose loss or norm differs from their reference."""
    wrong = []
    for name, ours in results.items():
        theirs = reference(name, results)
        close = abs(ours[2] - theirs[2]) < LOSS and abs(ours[3] / theirs[3] - 1) < NORM
        if name != EXACT and not close:
            wrong.append(
                f"{name} does not do the same work as the bare loop: a loss of {ours[2]:.6f}, not "
                f"{theirs[2]:.6f}; parameters of norm {ours[3]:.6f}, not {theirs[3]:.6f}"
            )
    return wrong


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return low, median, high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--burst", type=int, help="steps of a trainer in a round")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--only", nargs="*", help="these trainers, and the bare loop")
    options = parser.parse_args()
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": str(options.threads)}
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with socket.create_server(("127.0.0.1", 0)) as free:  # port of the rendezvous of weft's ranks
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    os.environ |= {"PYTHONWARNINGS": "ignore"}  # hide warnings of leaked semaphores
    burst = options.burst or BURST[options.model]
    table = MORE_RANKS if options.ranks > 1 else ONE_RANK
    names = []
    for name, (_, package) in table.items():
        always = ("bare loop", EXACT)
        if options.only and name not in options.only and name not in always:
            continue
        if package and not importlib.util.find_spec(package):
            print(f"{name}: {package} is not installed")
            continue
        names.append(name)

    with tempfile.TemporaryDirectory() as tmp_name:
        tmp = Path(tmp_name)
        job, plan = jobs(options, tmp)
        (tmp / "store").symlink_to(prepare_store(job.data, tmp / "cache").path)
        trainers = {name: Trainer(name, options, tmp) for name in names}
        rounds: list[dict[str, Timing]] = []
        begin = {name: trainer.wait() for name, trainer in trainers.items()}
        wrong = other_work(begin)
        gc.disable()
        for number in range(options.rounds + 1):  # the first round warms up
            results: dict[str, Timing] = {}
            for name in random.sample(names, len(names)):
                trainers[name].start_burst(burst)
                results[name] = trainers[name].wait()
            if number * burst < COMPARED:
                wrong += other_work(results)
            if number:
                rounds.append(results)
        for trainer in trainers.values():
            trainer.start_burst(0)
        for trainer in trainers.values():
            for process in trainer.processes:
                process.join()

    packages = ["torch", "transformers", "accelerate", "lightning", "litgpt", "deepspeed"]
    versions = [f"{p} {version(p)}" for p in packages if importlib.util.find_spec(p)]
    print(f"{date.today()}  {', '.join(versions)}, Python {platform.python_version()}")
    print(
        f"{plan.num_params / 1e6:.1f} M parameters, {options.ranks} rank(s) of {options.threads} "
        f"thread(s), {plan.tokens_per_step} tokens a step, {options.rounds} rounds of {burst} "
        f"steps; load {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores"
    )
    losses = [result["bare loop"][2] for result in rounds]
    print(f"loss of a fixed batch: {begin['bare loop'][2]:.3f} to {losses[-1]:.3f}")
    print(
        f"{'':<26}{'ms a step':>10}  {'of the bare loop':<22}{'processor time of it':<22}"
        f"{'peak MiB':>9}{'loss apart':>12}"
    )
    for name in [name for name in names if name != EXACT]:
        milliseconds = statistics.median(result[name][0] for result in rounds) / burst * 1e3
        ratios = [
            quartiles([result[name][i] / result["bare loop"][i] for result in rounds])
            for i in (0, 1)
        ]
        formatted = [f"{median:.3f} ({low:.3f}-{high:.3f})" for low, median, high in ratios]
        difference = max(abs(result[name][2] - reference(name, result)[2]) for result in rounds)
        peak = max(result[name][4] for result in rounds)
        print(
            f"{name:<26}{milliseconds:>10.2f}  {formatted[0]:<22}{formatted[1]:<22}{peak:>9.0f}"
            f"{difference:>12.1e}"
        )
    what, limit = TARGETS[options.model] if options.ranks == 1 else ("time", 1.02)
    position = 0 if what == "time" else 1
    ratio = statistics.median(t["weft"][position] / t["bare loop"][position] for t in rounds)
    verdict = "met" if ratio <= limit else "missed"
    print(f"weft's {what} over the bare loop's: {ratio:.3f}; at most {limit} wanted: {verdict}")
    if wrong:
        sys.exit(wrong[0])


if __name__ == "__main__":
    main()
