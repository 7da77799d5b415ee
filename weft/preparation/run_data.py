"""Prepare the data of a run, on the processes that launch it or on its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from rich.console import Console

from weft.checkpoint.lustre import Log, hydrate_ahead, hydrate_when_reading
from weft.checkpoint.manifest import list_checkpoints
from weft.config.errors import InvalidConfig
from weft.data.dataset import Dataset, open_dataset
from weft.data.prepare import cache_dir, prepare_data, show_progress
from weft.planning.plan import Plan
from weft.preparation.job_checks import check_text
from weft.training.state import checkpoint_dir

if TYPE_CHECKING:
    from weft.training.setup import Rank


def load_dataset_on_host(
    plan: Plan, console: Console, rank: Rank, group: dist.ProcessGroup
) -> Dataset:
    """Prepare the dataset on one rank of each host, and open it on every rank."""
    path, errors = "", []
    if rank.local_rank == 0:
        try:
            path = str(load_dataset(plan, console).path)
        except InvalidConfig as invalid:
            errors = invalid.errors
    results: list[Any] = [None] * rank.world_size
    dist.all_gather_object(results, (path, errors), group=group)
    errors = [error for _, errors in results for error in errors]
    if errors:
        raise InvalidConfig({str(error): error for error in errors}.values())
    # A launcher numbers the ranks of one host consecutively.
    return open_dataset(Path(results[rank.rank - rank.local_rank][0]))


def load_dataset(plan: Plan, console: Console) -> Dataset:
    """Return the tokenized dataset of the job; prepare it if it is not in the cache."""
    data = plan.job.data
    with show_progress(console) as show:
        report = hydrate_when_reading(data, show, console.print)
        dataset = prepare_data(data, cache_dir(data), report)
    check_text(plan, dataset)
    if not console.quiet:
        hydrate_tokens(dataset, console.print)
    return dataset


def hydrate_start(plan: Plan, console: Console) -> None:
    """Hydrate what a run loads first: a checkpoint, or the model that it imports."""
    if console.quiet:  # once per job, by the node that logs
        return
    newest = list_checkpoints(checkpoint_dir(plan.job.checkpoint, plan.run_path))[-1:]
    locations = map(str, newest) if newest else (plan.job.model.path, plan.lora.path)
    hydrate_ahead(filter(None, locations), console.print)


def hydrate_tokens(dataset: Dataset, log: Log) -> None:
    """Hydrate the files that training maps into memory, without waiting."""
    files = [
        str(store.path / shard.file)
        for store in dataset.stores
        if not store.url
        for split in store.splits
        for shard in split.files
    ]
    hydrate_ahead(dict.fromkeys(files), log)
