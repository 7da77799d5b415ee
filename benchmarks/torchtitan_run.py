"""Run TorchTitan's Llama on random tokens, to compare with weft in the same minutes.

    pip install --no-deps torchtitan==0.2.2 torchdata tyro docstring-parser typeguard
    python benchmarks/torchtitan_run.py --ranks 8 --layers 32 [WORDS ...]

WORDS are options of TorchTitan, such as ``--compile.enable``.  Its trainer, model, parallelism and
log are its own.  Tokens are random, because its package has no data, so that it needs no tokenizer
and no ``datasets``.  Its log has tokens/s per device (tps) and the memory that PyTorch reserves.

TorchTitan needs an accelerator.  With ``--device cpu`` a stand-in has the functions that its
trainer calls, so that its launch can be rehearsed; ``--layers 0`` is its debug model.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.machinery
import importlib.util
import os
import socket
import sys
import tempfile
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.spawn import start_processes

SEED = 0


class RandomTokens:
    """A loader of random tokens with the interface of TorchTitan's."""

    def __init__(self, rank: int, batch: int, length: int, vocab_size: int) -> None:
        self.generator = torch.Generator().manual_seed(SEED + rank)
        self.shape, self.vocab_size = (batch, length + 1), vocab_size

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            tokens_BT = torch.randint(self.vocab_size, self.shape, generator=self.generator)
            yield {"input": tokens_BT[:, :-1].contiguous()}, tokens_BT[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the tokens do not matter."""


def replace_module(name: str, *names: str) -> None:
    """Provide a module whose ``names`` are imported and not used."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    vars(module).update(dict.fromkeys(names, object))
    sys.modules[name] = module


def replace_accelerator() -> None:
    """Make TorchTitan take the CPU for an accelerator; call it before its first import."""
    private: Any = torch._utils
    memory = types.SimpleNamespace(total_memory=1 << 30)
    device_module = types.SimpleNamespace(
        **{name: getattr(torch.cpu, name) for name in ("set_device", "synchronize")},
        current_device=lambda: 0,
        get_device_name=lambda device: "CPU",
        get_device_properties=lambda device: memory,
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        memory_stats=lambda device: {},
    )
    private._get_available_device_type = lambda: "cpu"
    private._get_device_module = lambda device_type: device_module
    # gloo cannot divide in a reduction; here the gradients do not matter.
    fsdp: Any = FSDPModule
    fsdp.set_gradient_divide_factor = lambda module, factor: None
    if importlib.util.find_spec("triton") is None:  # kernels of experts
        replace_module("torchtitan.models.moe.kernels", "generate_permute_indices")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, required=True, help="of Llama 3.1 8B; 0: debug model")
    parser.add_argument("--ranks", type=int, default=1, help="processes, each with a GPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options, words = parser.parse_known_args()
    arguments = (options.ranks, find_free_port(), options.layers, options.device, words)
    start_processes(run_rank, arguments, options.ranks)


def find_free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port: int = listener.getsockname()[1]
        return port


def run_rank(rank: int, ranks: int, port: int, layers: int, device: str, words: list[str]) -> None:
    """Train as one of ``ranks`` processes."""
    replace_module("torch.utils.tensorboard", "SummaryWriter")
    if importlib.util.find_spec("datasets") is None:
        replace_module("datasets", "Dataset", "load_dataset")
        replace_module("datasets.distributed", "split_dataset_by_node")
    if device == "cpu":
        replace_accelerator()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    with tempfile.TemporaryDirectory() as directory:
        common = ["--model.name", "compared", "--model.flavor", "compared"]
        common += ["--job.dump_folder", directory, "--metrics.log_freq", "1"]
        sys.argv = ["torchtitan", *common, *words]  # before the import, which reads it
        run_trainer(layers)


def run_trainer(layers: int) -> None:
    """Train the model that ``sys.argv`` describes, with this number of layers."""
    from torchtitan.models.llama3 import get_train_spec, llama3_args
    from torchtitan.protocols import train_spec
    from torchtitan.train import Trainer, main

    flavor = llama3_args["8B" if layers else "debugmodel"]
    if layers:
        flavor = dataclasses.replace(flavor, n_layers=layers)

    def build_loader(dp_rank: int, job_config: Any, **others: Any) -> RandomTokens:
        section = job_config.training
        return RandomTokens(dp_rank, section.local_batch_size, section.seq_len, flavor.vocab_size)

    spec = dataclasses.replace(
        get_train_spec(),
        model_args={"compared": flavor},
        build_tokenizer_fn=None,
        build_dataloader_fn=build_loader,
    )
    train_spec.register_train_spec("compared", spec)
    main(Trainer)


if __name__ == "__main__":
    main()
