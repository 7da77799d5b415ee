"""How often a run sees each sequence of its text, and a warning when that is too often."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from weft.config.schema import Job
from weft.data.dataset import Dataset
from weft.data.loader import Mixture

# Passes over the same text up to which repeated data are worth nearly as much as new data:
# Muennighoff et al., "Scaling Data-Constrained Language Models", arXiv:2305.16264.
MOST_EPOCHS = 4.0


def epochs_of(job: Job, text: Dataset, samples: Mixture) -> Iterator[tuple[str, int, float]]:
    """Each source's name, its sequences, and how often the whole run sees each of them.

    Args:
        samples: the train samples of ``text``.
    """
    needed = job.train.steps * job.train.global_batch_size
    for source, rows in zip(text.sources, samples.sources, strict=True):
        name = source.name if text.shares else Path(source.store.manifest.source).name
        yield name, len(rows), source.share * needed / max(1, len(rows))


def epoch_warnings(job: Job, text: Dataset, samples: Mixture) -> Iterator[str]:
    """Name every source that a run would see more than `MOST_EPOCHS` times."""
    for name, count, epochs in epochs_of(job, text, samples):
        if epochs > MOST_EPOCHS:
            yield (
                f"the run sees {name} {epochs:,.1f} times (epochs): it has {count:,} sequences of "
                f"{job.train.seq_len:,} tokens, and {epochs * count:,.0f} are trained on. From "
                f"about {MOST_EPOCHS:g} epochs on repeated data teach less and less. Use more "
                "text, a smaller train.steps or train.global_batch_size"
                + (", or a smaller weight in data.mixture." if text.shares else ".")
            )
