"""What a run minimises, as a function of each token's loss.

Every layout gives the engine the same thing: the cross-entropy of each token of a microbatch, whole
on every rank of a tensor-parallel group, on the ranks that have the last stage.  An objective makes
of them a loss for each row, and says how much each row counts; the engine divides the sum over all
rows of the global batch by the sum of those counts, once.  So an objective knows nothing of ranks,
microbatches and stages, and cannot depend on them, as long as it looks at one row at a time.  What
belongs together is therefore put into one row: see `weft.data.loader.Pairs`.

*DPO* (Rafailov et al., arXiv:2305.18290, equation 7) wants the chosen answer y to gain more
probability against the initial model than the rejected one z does:

    -log sigmoid(beta ((log p(y) - log p0(y)) - (log p(z) - log p0(z))))

log p of an answer is minus the sum of its tokens' losses.  log p0 does not change while training:
`weft.train.reference_logprobs` asks the initial model once, before the first step, and keeps two
numbers for each pair in the run's folder, so that no second model takes memory or time afterwards.

One of your own is a function that ``train.objective = "module:function"`` names: it takes the
section `train` and returns an `Objective`.

Shapes: B rows, T tokens of a row, M metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.config.reader import lookup
from weft.config.schema import TrainSection
from weft.data.loader import IGNORE_INDEX, Batch


class Losses(NamedTuple):
    """Of each row: its loss, summed over what it counts for, (B,); and metrics, summed likewise,
    (B, M), which no gradient goes through."""

    loss_B: Tensor
    metrics_BM: Tensor


class Objective(NamedTuple):
    """An objective.

    Attributes:
        counts: how much each row counts: its targets, or 1 for a pair; (B,), 0 without targets.
        losses: of each token's cross-entropy in nats, float32 (B, T), 0 where there is no target.
        metrics: names of what `Losses.metrics_BM` has; each is told as a mean over the counts.
        sums_tokens: the loss of a row is the sum of its tokens' losses, and nothing else.  Only
            then may logits be computed for some tokens at a time, and rows be cut over ranks.
        references: whether batches need the initial model's log-probabilities.
    """

    counts: Callable[[Batch], Tensor]
    losses: Callable[[Tensor, Batch], Losses]
    metrics: tuple[str, ...] = ()
    sums_tokens: bool = False
    references: bool = False


def next_token(section: TrainSection) -> Objective:
    """The mean cross-entropy of all targets, in nats per token."""

    def losses(losses_BT: Tensor, batch: Batch) -> Losses:
        loss_B = losses_BT.sum(1)
        return Losses(loss_B, loss_B.new_empty(len(loss_B), 0))

    return Objective(targets_of_rows, losses, sums_tokens=True)


def targets_of_rows(batch: Batch) -> Tensor:
    """Targets with a loss: int64 (B,)."""
    return (batch.targets_BT != IGNORE_INDEX).sum(1)


def dpo(section: TrainSection) -> Objective:
    """Direct preference optimisation, in nats per pair."""
    beta = section.dpo_beta

    def losses(losses_BT: Tensor, batch: Batch) -> Losses:
        assert batch.references_B2 is not None
        rewards_B2 = beta * (answers(losses_BT, batch) - batch.references_B2)
        margin_B = rewards_B2[:, 0] - rewards_B2[:, 1]
        count_B = pairs(batch)
        told = (margin_B, (margin_B > 0).float(), rewards_B2[:, 0], rewards_B2[:, 1])
        metrics_BM = torch.stack(told, dim=1).detach() * count_B[:, None]
        return Losses(-F.logsigmoid(margin_B) * count_B, metrics_BM)

    names = ("reward_margin", "reward_accuracy", "reward_chosen", "reward_rejected")
    return Objective(pairs, losses, names, references=True)


def pairs(batch: Batch) -> Tensor:
    """1 for each row that is a pair, 0 for one that only fills a batch: int64 (B,)."""
    return (batch.targets_BT != IGNORE_INDEX).any(1).long()


def answers(losses_BT: Tensor, batch: Batch) -> Tensor:
    """Log-probabilities of the chosen and the rejected answer of each row: (B, 2)."""
    assert batch.documents_BT is not None
    both = [(losses_BT * (batch.documents_BT == document)).sum(1) for document in (0, 1)]
    return -torch.stack(both, dim=1)


OBJECTIVES: dict[str, Callable[[TrainSection], Objective]] = {"next_token": next_token, "dpo": dpo}


def build_objective(section: TrainSection) -> Objective:
    """The objective that ``train.objective`` names."""
    return lookup(section.objective, OBJECTIVES)(section)
