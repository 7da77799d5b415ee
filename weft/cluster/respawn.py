"""A command that asks a model, on as many ranks of this machine as its layout has."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console

from weft.cluster.preparing import cache_folder, showing
from weft.config.errors import ConfigError, InvalidConfig
from weft.config.schema import Job
from weft.data.dataset import Dataset, open_text
from weft.data.prepare import prepare_text
from weft.monitor.process import PYTHON, die_with_parent, on_one_host
from weft.plan.resolve import Plan
from weft.tools.inference_model import CheckpointRef
from weft.train.setup import Rank, connect, joined


def prepare_to_evaluate(found: CheckpointRef, job: Job, own: bool, console: Console) -> Path:
    """The store of a job's text, in the tokens that the model knows, prepared now if need be.

    Args:
        own: whether it is the one that the run names, as the run tokenised it.

    Raises:
        InvalidConfig: if it cannot be read, or is not in the run's tokens any more.
    """
    section, tokenizer = job.data, found.run / "tokenizer.json"
    if not own:
        section = section.model_copy(update={"tokenizer": str(tokenizer)})
    with showing(console) as show:
        text = prepare_text(section, cache_folder(section), show)
    if (text.path / "tokenizer.json").read_bytes() != tokenizer.read_bytes():
        rule, remedy = "is in other tokens than the run's: it has changed", "give it by --data.path"
        raise InvalidConfig([ConfigError("data.path", section.path, rule, remedy)])
    return text.path


def text_to_evaluate(
    found: CheckpointRef, job: Job, own: bool, console: Console, rank: Rank
) -> Dataset:
    """`prepare_to_evaluate` by the first rank, while the others wait, however long it takes."""
    told: list[Any] = [None]
    if rank.rank == 0:
        try:
            told = [str(prepare_to_evaluate(found, job, own, console))]
        except InvalidConfig as error:
            told = [error.problems]
    if rank.world_size > 1:
        patient = dist.new_group(backend="gloo", timeout=timedelta(days=7))
        dist.broadcast_object_list(told, 0, group=patient)
    if isinstance(told[0], list):
        raise InvalidConfig(told[0])
    return open_text(told[0])


def on_every_rank(plan: Plan, arguments: Sequence[str], run: Callable[[Rank], None]) -> int:
    """Call ``run`` as one rank: this process if it is the only one or a launcher has started it.

    Else torchrun starts ``weft ARGUMENTS``, the command that is running, as the plan's ranks.

    Returns:
        The exit status.
    """
    if plan.world_size == 1 or joined():
        if joined():
            die_with_parent()  # ranks that torchrun starts have sessions of their own
        with connect(plan) as rank:
            run(rank)
        return 0
    environment = {"OMP_NUM_THREADS": str(plan.threads)} | on_one_host(plan.device) | os.environ
    agent = [*PYTHON, "torch.distributed.run", "--standalone", "--no-python"]
    command = [
        *agent,
        "--nproc-per-node",
        str(plan.world_size),
        *PYTHON,
        "weft.cli",
        *arguments,
    ]
    # Killed, this process takes torchrun with it, and that its ranks.
    done = subprocess.run(command, env=environment, check=False, preexec_fn=die_with_parent)
    return done.returncode
