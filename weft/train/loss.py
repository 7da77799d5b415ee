"""The loss, as a sum: it is divided once, by the valid tokens of the whole global batch.

A mean of means would weigh a token by the microbatch and rank that it happens to be in,
and would make the loss depend on the layout.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.data.loader import IGNORE


def cross_entropy_sum(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy in nats: a float32 scalar.

    Args:
        logits_BTV: any floating dtype; computed in float32.
        targets_BT: int64; IGNORE where there is no loss.
    """
    return F.cross_entropy(
        logits_BTV.float().flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORE, reduction="sum"
    )


def valid_tokens(targets_BT: torch.Tensor) -> torch.Tensor:
    """Number of targets with a loss: an int64 scalar on their device."""
    return (targets_BT != IGNORE).sum()
