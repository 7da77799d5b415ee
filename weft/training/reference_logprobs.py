"""Log-probabilities of preferences under the initial model.

They are computed once and saved in the run directory: two numbers per pair or labeled answer, in a
file whose name has the hash of the data.  A resumed run reads the file, because its model is no
longer the initial one.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from weft.checkpoint.manifest import CheckpointError, run_on_rank_0
from weft.checkpoint.run_fingerprints import hash_content
from weft.config.files import write_durably
from weft.data.dataset import Dataset
from weft.data.loader import AnswerGroups, Batch, LabeledAnswers, Mixture
from weft.data.token_store import SplitName
from weft.training.loss import SequenceLosses, answer_logprobs, count_groups, find_groups
from weft.training.setup import Built
from weft.training.step import validation_batches

REMEDY = "Restore the file, or start again with another --run.dir."


def with_references(
    built: Built,
    dataset: Dataset,
    mixtures: dict[SplitName, Mixture],
    step: int,
    recorded: Mapping[str, str],
    until_stop: Callable[[Iterable[Batch]], Iterable[Batch]],
    log: Callable[[str], None],
) -> dict[SplitName, Mixture]:
    """Add log-probabilities of the initial model to mixtures of answers.

    Every rank calls this function.

    Args:
        built: the model.
        dataset: the dataset of the mixtures.
        mixtures: mixtures by split.
        step: completed steps: the file is written at step 0, where keys may change the model, and
            read later.
        recorded: fingerprints of the run's files in the newest checkpoint.
        until_stop: yields batches until all ranks stop, then raises an exception.
        log: receives a message before the computation.

    Raises:
        CheckpointError: if the file is missing or damaged after step 0.
    """
    stores = [store.fingerprint for store in dataset.stores]
    content_key = repr([stores, built.plan.seq_len, built.plan.job.data.overlong])
    file = built.plan.run_path / f"references-{xxh3_64_hexdigest(content_key.encode())}.npy"
    sources = [cast(AnswerGroups, s) for mixture in mixtures.values() for s in mixture.sources]
    lengths = [samples.num_groups for samples in sources]

    # Rank 0 decides, because other ranks may not see the directory.
    def read() -> Tensor | None:
        if not step or not file.exists():
            return None
        content = file.read_bytes()
        if recorded.get(file.name, hash_content(content)) != hash_content(content):
            raise CheckpointError(f"{file}: the content has changed since it was written. {REMEDY}")
        return torch.from_numpy(np.load(io.BytesIO(content)))

    references = run_on_rank_0(read, f"{file}: could not be read")
    if references is None and step:
        raise CheckpointError(
            f"{file}: the log-probabilities of the initial model are missing. With this objective, "
            f"data.validation_path must stay as it was. {REMEDY}"
        )
    if references is None:
        noun = "answers" if isinstance(sources[0], LabeledAnswers) else "pairs"
        log(f"computing the initial model's log-probabilities of {sum(lengths):,} {noun}")
        references = torch.cat([log_probs(built, samples, until_stop) for samples in sources]).cpu()
        if dist.get_rank() == 0:
            content = io.BytesIO()
            np.save(content, references.numpy())
            file.parent.mkdir(parents=True, exist_ok=True)
            write_durably(file, content.getbuffer())
    chunks = iter(torch.split(references, lengths))
    return {
        split: Mixture(
            [replace(cast(Any, groups), references=next(chunks)) for groups in mixture.sources],
            mixture.shares,
        )
        for split, mixture in mixtures.items()
    }


def log_probs(
    built: Built,
    samples: AnswerGroups,
    until_stop: Callable[[Iterable[Batch]], Iterable[Batch]] = iter,
) -> Tensor:
    """Compute the log-probabilities of the answers of all groups.

    Every rank calls this function and gets all groups.  In this evaluation each group has its
    index in place of references.  Labeled answers take two evaluations: of themselves, and of the
    answers to other prompts.

    Returns:
        float32 (groups of the store, 2), in nats; 0 for groups that are in no sequence.
    """
    train_step = built.train_step
    result = torch.zeros(samples.num_groups, 2, device=train_step.device)
    indices_N2 = torch.arange(samples.num_groups, dtype=torch.float64)[:, None].expand(-1, 2)

    def record_answers(columns: slice, losses_BT: Tensor, batch: Batch) -> SequenceLosses:
        if train_step.owns_loss:
            is_group_BP = find_groups(batch)  # the others pad a sequence or the batch
            indices_N = cast(Tensor, batch.references_BP2)[is_group_BP][:, 0].long()
            result[indices_N, columns] = answer_logprobs(losses_BT, batch)[is_group_BP]
        loss_B = losses_BT.sum(1)
        return SequenceLosses(loss_B, loss_B.new_zeros(len(loss_B), len(objective.metrics)))

    def evaluate(columns: slice, batches: Iterable[Batch]) -> None:
        losses = partial(record_answers, columns)
        train_step.objective = objective._replace(
            counts=count_groups, losses=losses, terms=1, baseline=None
        )
        train_step.evaluate(until_stop(batches))

    objective, by_source = train_step.objective, train_step.loss_by_source
    train_step.loss_by_source = None
    try:
        mixture = Mixture([replace(samples, references=indices_N2)])
        batches = partial(validation_batches, built.plan, mixture, built.mesh, len(samples))
        if isinstance(samples, LabeledAnswers):
            evaluate(slice(0, 1), (batch._replace(swapped_B4T=None) for batch in batches()))
            evaluate(slice(1, 2), (batch.with_swapped_answers() for batch in batches()))
        else:
            evaluate(slice(0, 2), batches())
    finally:
        train_step.objective, train_step.loss_by_source = objective, by_source
    if dist.get_world_size() > 1:
        dist.all_reduce(result)
    return result
