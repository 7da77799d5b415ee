"""Adapters of the embedding table, which a tied head shares.

    table + alpha / rank * A B^T        table [V, D], A [V, rank], B [D, rank]

A and B are `lora_embedding_A` (transposed) and `lora_embedding_B` of PEFT.  A starts as zeros, so
the model starts unchanged.  B is random: with standard deviation 1 as in PEFT, or if the head is
tied, as A of the head's adapter.

*Tied.*  One adapter changes the table for both uses, as with PEFT's ``ensure_weight_tying``: B^T is
A of the head, and A is B of the head.  So the merged model is tied, too.

*Tensor parallel.*  A is sharded by ids like the table, and a lookup of either gives zeros for other
ranks' ids.  So the output is a partial sum, as without an adapter, and so is the gradient of B.

*DoRA* trains the length of each of the D columns, as in PEFT, over all ids.  A tied head would need
magnitudes of rows, so it is refused.

Shapes in names: V vocabulary on this rank, D model width, B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from weft.config.schema import LoraSection
from weft.parallel.lora.dora import Magnitude, magnitude_scale
from weft.planning.lora_plan import lora_scaling


class LoraEmbedding(nn.Embedding):
    """A frozen embedding table with an adapter.

    Attributes:
        lookup: maps ids to rows of the table; tensor parallelism replaces it.
        input_group: ranks that share the table; None: this rank has all of it.

    Args:
        embedding: this module takes its table.
        section: the section ``[lora]``.
    """

    weight: Any
    input_group: dist.ProcessGroup | None = None

    def __init__(self, embedding: nn.Embedding, section: LoraSection) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = embedding.weight.shape
        self.padding_idx = embedding.padding_idx
        self.weight = embedding.weight
        self.lookup: Callable[[Tensor], Tensor] = partial(_look_up, self)
        with embedding.weight.device:
            self.lora_embedding_A = nn.Embedding(self.num_embeddings, section.rank)
            self.lora_embedding_B = nn.Linear(section.rank, self.embedding_dim, bias=False)
            self.lora_magnitude = Magnitude(self.embedding_dim) if section.dora else None
        self.scaling = lora_scaling(section)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Map ids ``[B, T]`` to ``[B, T, D]``."""
        update_BTD = self.lora_embedding_B(self.lora_embedding_A(tokens_BT) * self.scaling)
        out_BTD: Tensor = self.lookup(tokens_BT) + update_BTD
        if self.lora_magnitude is None:
            return out_BTD
        a_VR, b_DR = self.lora_embedding_A.weight, self.lora_embedding_B.weight
        scale_D = magnitude_scale(
            (self.weight.t(), a_VR.t(), b_DR),
            self.scaling,
            self.lora_magnitude.weight,
            self.input_group,
        )
        return (out_BTD * scale_D).to(out_BTD.dtype)

    def merged_weight(self) -> Tensor:
        """Return the table ``[V, D]`` with the adapter, for a tied head."""
        a_VR, b_DR = self.lora_embedding_A.weight, self.lora_embedding_B.weight
        table_VD: Tensor = self.weight + self.scaling * a_VR @ b_DR.t()
        return table_VD


def _look_up(module: nn.Embedding, tokens_BT: Tensor) -> Tensor:
    return F.embedding(tokens_BT, module.weight)
