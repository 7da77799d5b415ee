"""Run inference and evaluation commands on all ranks of a layout on this machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console

from weft.config.errors import ConfigError, InvalidConfig
from weft.config.schema import Job
from weft.data.dataset import Dataset, open_dataset
from weft.data.prepare import cache_dir, prepare_data, show_progress
from weft.monitor.process import PYTHON, die_with_parent, single_host_env
from weft.plan.plan import Plan
from weft.tools.inference_model import CheckpointRef
from weft.train.machine import is_launched_rank
from weft.train.setup import Rank, connect


def prepare_eval_data(
    checkpoint: CheckpointRef, job: Job, is_run_data: bool, console: Console
) -> Path:
    """Tokenize evaluation data with the run's tokenizer; return its directory.

    If ``is_run_data``, the data and its tokenizer settings are those of the run itself, so the
    settings must still give the run's tokenizer.

    Raises:
        InvalidConfig: if the data cannot be read, or its tokenizer differs from the run's.
    """
    section, tokenizer = job.data, checkpoint.run_dir / "tokenizer.json"
    if not is_run_data:
        section = section.model_copy(update={"tokenizer": str(tokenizer)})
    with show_progress(console) as show:
        dataset = prepare_data(section, cache_dir(section), show)
    if (dataset.path / "tokenizer.json").read_bytes() != tokenizer.read_bytes():
        rule = "has changed since the run: its tokenizer differs from the run's"
        remedy = "name the data with --data.path, to use the run's tokenizer"
        raise InvalidConfig([ConfigError("data.path", section.path, rule, remedy)])
    return dataset.path


def load_eval_data(
    checkpoint: CheckpointRef, job: Job, is_run_data: bool, console: Console, rank: Rank
) -> Dataset:
    """Run `prepare_eval_data` on rank 0 and open the dataset on every rank."""
    result: list[Any] = [None]  # the path, or rank 0's configuration errors
    if rank.rank == 0:
        try:
            result = [str(prepare_eval_data(checkpoint, job, is_run_data, console))]
        except InvalidConfig as error:
            result = [error.problems]
    if rank.world_size > 1:
        group = dist.new_group(backend="gloo", timeout=timedelta(days=7))
        dist.broadcast_object_list(result, 0, group=group)
    if isinstance(result[0], list):
        raise InvalidConfig(result[0])
    return open_dataset(result[0])


def run_on_all_ranks(plan: Plan, arguments: Sequence[str], run: Callable[[Rank], None]) -> int:
    """Call ``run`` on every rank of the plan; return the exit status.

    This process is a rank if the plan has one rank, or if a launcher started it.  Otherwise
    torchrun starts ``weft ARGUMENTS`` (the current command) once per rank.
    """
    if plan.world_size == 1 or is_launched_rank():
        if is_launched_rank():
            die_with_parent()  # torchrun starts each rank in a new session
        with connect(plan) as rank:
            run(rank)
        return 0
    environment = (
        {"OMP_NUM_THREADS": str(plan.num_threads)} | single_host_env(plan.device) | os.environ
    )
    agent = [*PYTHON, "torch.distributed.run", "--standalone", "--no-python"]
    command = [
        *agent,
        "--nproc-per-node",
        str(plan.world_size),
        *PYTHON,
        "weft.cli",
        *arguments,
    ]
    # If this process is killed, torchrun dies with it, and then its ranks.
    result = subprocess.run(command, env=environment, check=False, preexec_fn=die_with_parent)
    return result.returncode
