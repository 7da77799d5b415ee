"""Number of epochs of each data source, and a warning about too many."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from weft.data.dataset import Dataset
from weft.data.loader import Mixture
from weft.plan.plan import Plan

# Up to this number of epochs, repeated data are worth nearly as much as new data: Muennighoff et
# al., "Scaling Data-Constrained Language Models", arXiv:2305.16264.
MAX_EPOCHS = 4.0


def count_epochs(
    plan: Plan, dataset: Dataset, mixture: Mixture
) -> Iterator[tuple[str, int, float]]:
    """Yield each source's name, number of sequences, and epochs in the whole run.

    Args:
        plan: the plan of the run.
        dataset: its dataset.
        mixture: the training sequences of the dataset.
    """
    num_needed = plan.num_steps * plan.global_batch_size
    for source, sequences in zip(dataset.sources, mixture.sources, strict=True):
        name = source.name if dataset.shares else Path(source.store.manifest.source).name
        yield name, len(sequences), source.share * num_needed / max(1, len(sequences))


def epoch_warnings(plan: Plan, dataset: Dataset, mixture: Mixture) -> Iterator[str]:
    """Yield a warning for every source with more than `MAX_EPOCHS` epochs."""
    for name, count, epochs in count_epochs(plan, dataset, mixture):
        if epochs > MAX_EPOCHS:
            yield (
                f"the run sees {name} {epochs:,.1f} times (epochs): it has {count:,} sequences of "
                f"{plan.seq_len:,} tokens, and {epochs * count:,.0f} are trained on. From "
                f"about {MAX_EPOCHS:g} epochs on repeated data teach less and less. Use more "
                "text, a smaller train.steps or train.global_batch_size"
                + (", or a smaller weight in data.mixture." if dataset.shares else ".")
            )
