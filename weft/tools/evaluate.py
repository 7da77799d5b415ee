"""Evaluate a trained model's loss on datasets, in any layout."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from weft.config.errors import WeftError
from weft.config.schema import replace
from weft.data.dataset import Dataset, Source
from weft.data.loader import Batch, build_mixture, evaluation_batches
from weft.data.prepared_cache import Report, progress_counter
from weft.data.token_store import Split, SplitName, Store
from weft.plan.plan import Plan
from weft.tools.inference_model import CheckpointRef, load_model_parts
from weft.train.setup import Rank
from weft.train.step import TrainStep

ALL_SEQUENCES = 1 << 40  # more than any dataset has
COUNT_CHUNK = 1 << 24  # tokens that are counted together


class SourceLoss(NamedTuple):
    """Loss of one source: ``tokens`` predicted tokens from ``bytes`` of text."""

    name: str
    nats_per_token: float
    tokens: int
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON record, with perplexity per token and bits per byte.

        Bits per byte do not depend on the tokenizer; None if the store does not record its bytes.
        """
        nats = self.nats_per_token * self.tokens
        bits = nats / self.bytes / math.log(2) if self.bytes else None
        return {
            "nats_per_token": self.nats_per_token,
            "perplexity": math.exp(self.nats_per_token),
            "bits_per_byte": bits,
            "tokens": self.tokens,
            "bytes": self.bytes,
        }


def evaluate_sources(
    checkpoint: CheckpointRef,
    plan: Plan,
    dataset: Dataset,
    sequences: int,
    rank: Rank,
    include_train: bool,
    report: Report,
) -> list[SourceLoss]:
    """Evaluate the checkpoint on each source of a dataset; every rank must call this.

    Args:
        checkpoint: weights to evaluate.
        plan: the plan of the evaluation.
        dataset: its sources are evaluated.
        sequences: maximum per source and split, evenly spaced.  With fewer than all, the loss and
            bits per byte are estimates.
        rank: this process and its device.
        include_train: evaluate the train split, too, of a dataset that the model has not seen.
        report: called with the progress, in sequences.

    Returns:
        The losses, equal on all ranks.

    Raises:
        WeftError: if a source holds preferences, or no token with a loss.
    """
    job = plan.job
    model_parts, mesh, family = load_model_parts(checkpoint, plan, rank)
    # Evaluate one source at a time.
    eval_job = replace(job, data={"mixture": {}}, train={"objective": "next_token"})
    eval_plan = dataclasses.replace(plan, job=eval_job)
    train_step = TrainStep(model_parts, family, eval_plan, mesh, rank.device)
    splits: list[SplitName] = ["train", "validation"] if include_train else ["validation"]
    losses = []
    for source in dataset.sources:
        nats, tokens, size = 0.0, 0, 0
        kind = source.store.manifest.kind
        if kind == "preferences":
            raise WeftError(
                f"{source.name}: cannot be evaluated, because it holds {kind}, not text"
            )
        for split in splits:
            single = Dataset(dataset.path, (Source(source.name, 1.0, source.store),))
            samples = build_mixture(single, split, plan.seq_len, job.data, plan.seed)
            batches = evaluation_batches(
                samples, sequences, mesh.dp_rank, plan.dp_size, plan.microbatch_size
            )
            total = min(sequences, sum(map(len, samples.sources)))
            advance = progress_counter(report, f"evaluating {source.name}, {split}", total)
            mean = train_step.evaluate(_with_progress(batches, plan.dp_size, advance))
            predicted, read = _count_targets(source.store, split, job.data.keeps_documents)
            nats, tokens, size = nats + mean * predicted, tokens + predicted, size + read
        if tokens == 0:
            raise WeftError(f"{source.name}: no token of the validation set has a loss")
        name = source.name if job.data.is_mixture else job.data.path
        losses.append(SourceLoss(name, nats / tokens, tokens, size))
    return losses


def _with_progress(
    batches: Iterator[Batch], ranks: int, advance: Callable[[int], None]
) -> Iterator[Batch]:
    """Yield the batches; report each one when the next is requested."""
    for batch in batches:
        yield batch
        advance(ranks * len(batch.tokens_BT))


def _count_targets(store: Store, split: SplitName, keeps_documents: bool) -> tuple[int, int]:
    """Return the numbers of predicted tokens and of bytes (0: unknown) of a split."""
    info: Split = getattr(store.manifest, split)
    loss_mask = store.loss_mask(split)
    if loss_mask is None:
        # With separate documents, the last token of each one predicts nothing.
        return info.tokens - (info.documents if keeps_documents else 1), info.bytes
    count = 0
    for start in range(0, len(loss_mask), COUNT_CHUNK):
        size = min(COUNT_CHUNK, len(loss_mask) - start)
        count += int(loss_mask.read_windows(np.array([start]), size).sum())
    return count, 0
