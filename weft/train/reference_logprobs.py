"""What the initial model thinks of each pair of answers, asked once and kept.

Two numbers for each pair lie in the run's folder, in a file that is named after the pairs: a run
that goes on reads them, as its model is not the initial one any more.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from weft.checkpoint.manifest import CheckpointError
from weft.config.files import write_durably
from weft.config.schema import Job
from weft.data.dataset import Dataset
from weft.data.loader import Batch, Mixture, Pairs, evaluation_batches
from weft.data.token_store import SplitName
from weft.parallel.mesh import Mesh
from weft.plan.resolve import Plan
from weft.train.objectives import Losses, answers, pairs
from weft.train.step import TrainStep


def with_references(
    job: Job,
    plan: Plan,
    text: Dataset,
    mixtures: dict[SplitName, Mixture],
    engine: TrainStep,
    mesh: Mesh,
    step: int,
    say: Callable[[str], None],
) -> dict[SplitName, Mixture]:
    """The mixtures, whose samples are `Pairs`, with the initial model's log-probabilities.

    Every rank calls it.

    Args:
        mixtures: by split.
        step: that the engine's model is at; they are computed at 0, and read later.

    Raises:
        CheckpointError: they are gone.
    """
    made_of = [text.fingerprint, job.train.seq_len, job.data.overlong]
    name = f"references-{xxh3_64_hexdigest(repr(made_of).encode())}.npy"
    file = Path(plan.run_dir) / name
    lengths = [len(of) for mixture in mixtures.values() for of in mixture.sources]
    # One decision for all ranks, of which others may not see the folder.
    kept: list[Tensor | None] = [None]
    if dist.get_rank() == 0 and file.exists():
        kept[0] = torch.from_numpy(np.load(file))
    dist.broadcast_object_list(kept, src=0)
    found = kept[0]
    if found is None and step:
        rule = "is gone, which has the initial model's log-probabilities"
        raise CheckpointError(f"{file}: {rule}; put it back, or start again in another --run.dir")
    if found is None:
        say(f"asking the initial model for the log-probabilities of {sum(lengths):,} pairs")
        each = [
            log_probs(engine, cast(Pairs, of), plan, mesh)
            for mixture in mixtures.values()
            for of in mixture.sources
        ]
        found = torch.cat(each).cpu()
        if dist.get_rank() == 0:
            content = io.BytesIO()
            np.save(content, found.numpy())
            file.parent.mkdir(parents=True, exist_ok=True)
            write_durably(file, content.getbuffer())
    parts = iter(torch.split(found, lengths))
    return {
        split: Mixture(
            [replace(cast(Pairs, of), references=next(parts)) for of in mixture.sources],
            mixture.shares,
        )
        for split, mixture in mixtures.items()
    }


def log_probs(engine: TrainStep, samples: Pairs, plan: Plan, mesh: Mesh) -> Tensor:
    """Log-probabilities of both answers of all pairs, in nats: float32 (pairs, 2), on all ranks.

    An evaluation like any other, in which each row carries its number.
    """
    found = torch.zeros(len(samples), 2, device=engine.device)
    numbers_N2 = torch.arange(len(samples), dtype=torch.float64)[:, None].expand(-1, 2)

    def keep(losses_BT: Tensor, batch: Batch) -> Losses:
        if engine.tells:
            whole_B = pairs(batch).bool()  # others only fill the batch
            numbers_B2 = cast(Tensor, batch.references_B2)
            found[numbers_B2[whole_B, 0].long()] = answers(losses_BT, batch)[whole_B]
        loss_B = losses_BT.sum(1)
        return Losses(loss_B, loss_B.new_zeros(len(loss_B), len(objective.metrics)))

    objective, by_source = engine.objective, engine.loss_by_source
    engine.objective = objective._replace(losses=keep)
    engine.loss_by_source = None  # of one source, which is not told which it is
    try:
        engine.evaluate(
            evaluation_batches(
                Mixture([replace(samples, references=numbers_N2)]),
                num_sequences=len(samples),
                dp_rank=mesh.dp_rank,
                dp_size=plan.dp_size,
                microbatch_size=plan.microbatch_size,
            )
        )
    finally:
        engine.objective, engine.loss_by_source = objective, by_source
    if dist.get_world_size() > 1:
        dist.all_reduce(found)
    return found
