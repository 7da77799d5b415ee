"""Objectives: what a run minimizes, as a function of each token's loss.

In every layout `TrainStep` computes the cross-entropy of each token of a microbatch, on the ranks
that have the last stage and the same on all ranks of a tensor-parallel group.  An objective turns
it into a loss per sequence, and returns how much each sequence counts.  `TrainStep` divides the sum
over the global batch by the sum of these counts, once.  An objective therefore knows no ranks,
microbatches or stages, as long as it computes each sequence alone; what belongs together is in one
sequence: see `weft.data.loader.Pairs`.

*DPO* (Rafailov et al., arXiv:2305.18290, equation 7) raises the probability of the chosen answer y
against the initial model more than that of the rejected answer z:

    -log sigmoid(beta ((log p(y) - log p0(y)) - (log p(z) - log p0(z))))

The log-probability of an answer is minus the sum of its tokens' losses.  log p0 does not change
during training: `weft.train.reference_logprobs` computes it once, before the first step, and saves
two numbers per pair in the run directory, so no second model needs memory or time.

A user's objective is a function that takes the section `train` and returns an `Objective`;
``train.objective = "module:function"`` names it.

Shapes: B sequences, T tokens of a sequence, M metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.config.errors import lookup
from weft.config.schema import TrainSection
from weft.data.loader import IGNORE_INDEX, Batch


class SequenceLosses(NamedTuple):
    """Loss and metrics of each sequence, as sums over what the sequence counts for."""

    loss_B: Tensor
    metrics_BM: Tensor  # without gradient


class Objective(NamedTuple):
    """An objective.

    Attributes:
        counts: returns how much each sequence counts, (B,): its targets, or 1 for a pair; 0
            without targets.
        losses: takes each token's cross-entropy in nats, float32 (B, T), 0 without a target.
        metrics: names of the metrics; weft logs each as a mean over the counts.
        is_token_sum: True if a sequence's loss is the sum of its tokens' losses.  Only then can
            logits be computed for some tokens at a time, and sequences be split over ranks.
        needs_references: True if batches need log-probabilities of the initial model.
    """

    counts: Callable[[Batch], Tensor]
    losses: Callable[[Tensor, Batch], SequenceLosses]
    metrics: tuple[str, ...] = ()
    is_token_sum: bool = False
    needs_references: bool = False


def next_token(section: TrainSection) -> Objective:
    """Return the mean cross-entropy of all targets, in nats per token."""

    def losses(losses_BT: Tensor, batch: Batch) -> SequenceLosses:
        loss_B = losses_BT.sum(1)
        return SequenceLosses(loss_B, loss_B.new_empty(len(loss_B), 0))

    return Objective(count_targets, losses, is_token_sum=True)


def count_targets(batch: Batch) -> Tensor:
    """Return the number of targets of each sequence, int64 (B,)."""
    return (batch.targets_BT != IGNORE_INDEX).sum(1)


def dpo(section: TrainSection) -> Objective:
    """Return direct preference optimization, in nats per pair."""
    beta = section.dpo_beta

    def losses(losses_BT: Tensor, batch: Batch) -> SequenceLosses:
        assert batch.references_B2 is not None
        rewards_B2 = beta * (answer_logprobs(losses_BT, batch) - batch.references_B2)
        margin_B = rewards_B2[:, 0] - rewards_B2[:, 1]
        count_B = count_pairs(batch)
        metrics = (margin_B, (margin_B > 0).float(), rewards_B2[:, 0], rewards_B2[:, 1])
        metrics_BM = torch.stack(metrics, dim=1).detach() * count_B[:, None]
        return SequenceLosses(-F.logsigmoid(margin_B) * count_B, metrics_BM)

    names = ("reward_margin", "reward_accuracy", "reward_chosen", "reward_rejected")
    return Objective(count_pairs, losses, names, needs_references=True)


def count_pairs(batch: Batch) -> Tensor:
    """Return 1 for each sequence that is a pair, 0 for padding, int64 (B,)."""
    return (batch.targets_BT != IGNORE_INDEX).any(1).long()


def answer_logprobs(losses_BT: Tensor, batch: Batch) -> Tensor:
    """Return the log-probabilities of the chosen and the rejected answer, (B, 2)."""
    assert batch.documents_BT is not None
    both = [(losses_BT * (batch.documents_BT == document)).sum(1) for document in (0, 1)]
    return -torch.stack(both, dim=1)


OBJECTIVES: dict[str, Callable[[TrainSection], Objective]] = {"next_token": next_token, "dpo": dpo}


def build_objective(name: str, section: TrainSection) -> Objective:
    """Return the objective of that name, an entry of `OBJECTIVES` or module:function."""
    return lookup(name, OBJECTIVES)(section)
