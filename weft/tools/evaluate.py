"""What a trained model has learned: its loss on text, in any layout, by the code that trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from weft.config.errors import WeftError
from weft.config.schema import Job, replace
from weft.data.dataset import Dataset, Source
from weft.data.loader import Batch, evaluation_batches, samples_of
from weft.data.prepared_cache import Report, counting
from weft.data.token_store import Split, SplitName, Store
from weft.plan.resolve import Plan
from weft.tools.inference_model import CheckpointRef, restore_parts
from weft.train.setup import Rank
from weft.train.step import TrainStep

EVERY = 1 << 40  # sequences
COUNTED = 1 << 24  # tokens that are looked at together


class Loss(NamedTuple):
    """Of one source.  ``tokens`` are those that are predicted, of ``bytes`` of text."""

    name: str
    nats_per_token: float
    tokens: int
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """With the perplexity of a token, and bits per byte, which no tokenizer changes (None where
        the store does not tell its bytes)."""
        nats = self.nats_per_token * self.tokens
        bits = nats / self.bytes / math.log(2) if self.bytes else None
        return {
            "nats_per_token": self.nats_per_token,
            "perplexity": math.exp(self.nats_per_token),
            "bits_per_byte": bits,
            "tokens": self.tokens,
            "bytes": self.bytes,
        }


def losses_on(
    found: CheckpointRef,
    job: Job,
    plan: Plan,
    text: Dataset,
    sequences: int,
    rank: Rank,
    whole: bool,
    report: Report,
) -> list[Loss]:
    """The checkpoint's losses on each source of ``text``; every rank calls it, and gets the same.

    Args:
        sequences: at most that many of each source and split, evenly spread.  With fewer than all
            the loss is an estimate, and bits per byte with it.
        whole: the train split, too: of a text that the model was not trained on.
        report: told how far it is, in sequences.

    Raises:
        WeftError: if it holds preferences, or nothing of which there is a loss.
    """
    parts, mesh, family = restore_parts(found, job, plan, rank)
    # Its sources come one after the other here.
    alone = replace(job, data={"mixture": {}}, train={"objective": "next_token"})
    engine = TrainStep(parts, family, alone, plan, mesh, rank.device)
    splits: list[SplitName] = ["train", "validation"] if whole else ["validation"]
    losses = []
    for source in text.sources:
        nats, tokens, size = 0.0, 0, 0
        kind = source.store.manifest.kind
        if kind == "preferences":  # whose losses are of differences
            raise WeftError(f"{source.name}: holds {kind}, of which there is no loss of all text")
        for split in splits:
            one = Dataset(text.path, (Source(source.name, 1.0, source.store),))
            samples = samples_of(one, split, job.train.seq_len, job.data, job.train.seed)
            batches = evaluation_batches(
                samples, sequences, mesh.dp_rank, plan.dp_size, plan.microbatch
            )
            total = min(sequences, sum(map(len, samples.sources)))
            advance = counting(report, f"evaluating {source.name}, {split}", total)
            mean = engine.evaluate(_telling(batches, plan.dp_size, advance))
            predicted, read = _predicted(source.store, split, job.data.keeps_documents)
            nats, tokens, size = nats + mean * predicted, tokens + predicted, size + read
        if tokens == 0:
            raise WeftError(f"{source.name}: no token of what is held out is learned")
        name = source.name if job.data.mixture else job.data.path
        losses.append(Loss(name, nats / tokens, tokens, size))
    return losses


def _telling(
    batches: Iterator[Batch], ranks: int, advance: Callable[[int], None]
) -> Iterator[Batch]:
    """The batches; when the next one is asked for, one is done, on all ranks alike."""
    for batch in batches:
        yield batch
        advance(ranks * len(batch.tokens_BT))


def _predicted(store: Store, split: SplitName, apart: bool) -> tuple[int, int]:
    """How many tokens of a split are predicted, and of how many bytes; 0: not known."""
    of: Split = getattr(store.manifest, split)
    learned = store.learned(split)
    if learned is None:
        # What follows a document is not predicted from it where documents are kept apart.
        return of.tokens - (of.documents if apart else 1), of.bytes
    count = 0
    for first in range(0, len(learned), COUNTED):
        size = min(COUNTED, len(learned) - first)
        count += int(learned.window(np.array([first]), size).sum())
    return count, 0
