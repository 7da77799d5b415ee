"""Multi-token prediction: losses of K further layers, for their gradients only.

DeepSeek-V3 (arXiv:2412.19437, section 2.2): layer k predicts the token k positions after the next.
Their targets are K B more sequences of next-token prediction, the only objective that supports
them.  The gradient is that of ``train.mtp_weight`` times the mean over the layers of their mean
losses.  The value is not added: the loss that weft logs is that of the objective.

Shapes: B sequences of a microbatch, T tokens, K layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.data.loader import IGNORE_INDEX, Batch


class MultiTokenPrediction:
    """Targets and losses of the K layers of a model.

    Args:
        num_layers: K.
        weight: ``train.mtp_weight``.
    """

    def __init__(self, num_layers: int, weight: float) -> None:
        self.num_layers, self._weight = num_layers, weight / num_layers
        self.metric_names = tuple(f"mtp_loss/{depth + 1}" for depth in range(num_layers))

    def add_targets(self, batch: Batch, has_loss: bool = True) -> Batch:
        """Return the batch with later tokens, and targets and weights of ((1 + K) B, T).

        Context-parallel ranks share a sequence only afterwards: a later token may be another's.

        Args:
            batch: full sequences.
            has_loss: False: only the B sequences keep their targets.
        """
        result = batch.with_later(self.num_layers)
        if not has_loss:
            result.targets_BT[len(batch.tokens_BT) :] = IGNORE_INDEX
        return result

    def scale(self, divisors: Tensor, num_sequences: int) -> Tensor:
        """Return factors of the losses, ((1 + K) B, 1).

        Their weighted sum is then divided by the first count.

        Args:
            divisors: counts of targets of the global batch, (1 + K,).
            num_sequences: B.
        """
        later = self._weight * divisors[0] / divisors[1:]
        scales = torch.cat((torch.ones_like(later[:1]), later))
        return scales.repeat_interleave(num_sequences).unsqueeze(1)

    def keep_value(self, total: Tensor, loss_B: Tensor, num_sequences: int) -> Tensor:
        """Return the sum of the first B losses, with the gradient of ``total``."""
        main = loss_B[:num_sequences].detach().sum()
        return main + (total - total.detach())

    def sum_by_layer(self, sums_BC2: Tensor) -> Tensor:
        """Return sum and count of each layer's losses, (K, 2)."""
        return sums_BC2.view(1 + self.num_layers, -1, 2).sum(1)[1:]
