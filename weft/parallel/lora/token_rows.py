"""Trained rows of frozen embedding and head: ``lora.trainable_tokens``.

    table' = table, plus a change at the rows of some tokens        change [N, D]

Only the change is trained and has optimizer state.  It begins as zeros, so its initial value does
not depend on weights that are loaded later, and in bfloat16 small changes of a large row are not
rounded away before they add up.  PEFT's ``trainable_token_indices`` stores the changed rows; the
gradient is the same.

*Head.*  The logits of the N tokens get the product with the change.  So neither a copy of the table
nor a gradient of its size is built.  A tied head uses the change of the embedding, which is one
parameter.

*Tensor parallel.*  Each rank has the whole change, and uses the rows of its ids.  Its gradient is a
partial sum.

Shapes in names: B batch, T tokens, V vocabulary on this rank, D model width, N trained tokens, M
those whose ids are on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from weft.planning.lora_plan import TABLES
from weft.planning.shard_sizes import chunk_range


class TokenRows(nn.Module):
    """Changes of the rows of some tokens: a weight ``[N, D]``.

    Args:
        ids: the tokens, ascending.
        table: the frozen table ``[V, D]``.
    """

    weight: Any
    ids_N: Tensor
    rows_M: Tensor
    columns_M: Tensor

    def __init__(self, ids: Sequence[int], table: Tensor) -> None:
        super().__init__()
        num_rows, width = table.shape
        self.ids, self.vocabulary = tuple(ids), range(num_rows)
        self.weight = nn.Parameter(torch.zeros(len(ids), width, device=table.device))
        self.init_buffers(table.device)

    def init_buffers(self, device: torch.device) -> None:
        """Compute where the tokens are on this rank."""
        first = self.vocabulary.start
        mine = [row for row, token in enumerate(self.ids) if token in self.vocabulary]
        values = {
            "ids_N": self.ids,
            "rows_M": mine,
            "columns_M": [self.ids[row] - first for row in mine],
        }
        for name, value in values.items():
            tensor = torch.tensor(value, dtype=torch.int64, device=device)
            self.register_buffer(name, tensor, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TokenRows:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.init_buffers(self.ids_N.device)  # `to_empty` leaves them without values
        return self

    def look_up(self, tokens_BT: Tensor) -> Tensor:
        """Return the change of the embedding ``[B, T, D]``; zeros for ids of other ranks."""
        rows_BT = torch.searchsorted(self.ids_N, tokens_BT).clamp(max=len(self.ids) - 1)
        is_other_BT = self.ids_N[rows_BT] != tokens_BT
        vocabulary = self.vocabulary
        is_other_BT |= (tokens_BT < vocabulary.start) | (tokens_BT >= vocabulary.stop)
        return F.embedding(rows_BT, self.weight).masked_fill(is_other_BT.unsqueeze(-1), 0)

    def local_rows(self) -> Tensor:
        """Return the changes of this rank's ids, ``[M, D]``."""
        # Without any it is an empty selection, so the gradient is zeros and not None.
        return torch.index_select(self.weight, 0, self.rows_M)

    def add_logits(self, logits_BTV: Tensor, x_BTD: Tensor) -> Tensor:
        """Add the changes of the logits of an input, in place."""
        return logits_BTV.index_add_(-1, self.columns_M, F.linear(x_BTD, self.local_rows()))

    def merge(self, table_VD: Tensor) -> Tensor:
        """Return a copy of this rank's table with the changes."""
        return table_VD.index_add(0, self.columns_M, self.local_rows())


class RowsEmbedding(nn.Embedding):
    """A frozen embedding table with changes of some rows.

    Attributes:
        lookup: maps ids to rows of the table; tensor parallelism replaces it.
    """

    weight: Any

    def __init__(self, embedding: nn.Embedding, ids: Sequence[int]) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = embedding.weight.shape
        self.padding_idx = embedding.padding_idx
        self.weight = embedding.weight
        self.lookup: Callable[[Tensor], Tensor] = partial(_look_up, self)
        self.lora_rows = TokenRows(ids, embedding.weight)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Map ids ``[B, T]`` to ``[B, T, D]``."""
        return self.lookup(tokens_BT) + self.lora_rows.look_up(tokens_BT)

    def merged_weight(self) -> Tensor:
        """Return a copy of the table with the changes, ``[V, D]``."""
        return self.lora_rows.merge(self.weight)


class RowsLinear(nn.Linear):
    """A frozen head with changes of some rows."""

    weight: Any

    def __init__(self, layer: nn.Linear, ids: Sequence[int]) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_rows = TokenRows(ids, layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., D]`` to logits ``[..., V]``."""
        return self.lora_rows.add_logits(F.linear(x, self.weight, self.bias), x)

    def merged_weight(self) -> Tensor:
        """Return a copy of the weight with the changes, ``[V, D]``."""
        return self.lora_rows.merge(self.weight)


def _look_up(module: nn.Embedding, tokens_BT: Tensor) -> Tensor:
    return F.embedding(tokens_BT, module.weight)


def add_token_rows(model: nn.Module, names: Sequence[str], ids: Sequence[int]) -> None:
    """Replace tables of a model, or of a stage that has them, by ones with rows."""
    for name in names:
        table = model._modules.get(name)
        if isinstance(table, nn.Embedding):
            model.set_submodule(name, RowsEmbedding(table, ids))
        elif isinstance(table, nn.Linear):
            model.set_submodule(name, RowsLinear(table, ids))


def shard_token_rows(model: nn.Module, mesh: DeviceMesh, vocab_size: int) -> None:
    """Tell each table which ids this tensor-parallel rank has."""
    for name in TABLES:
        rows = getattr(model._modules.get(name), "lora_rows", None)
        if isinstance(rows, TokenRows):
            rows.vocabulary = chunk_range(vocab_size, mesh.size(), mesh.get_local_rank())
            rows.init_buffers(rows.ids_N.device)


def find_head_with_rows(model: nn.Module) -> RowsEmbedding | RowsLinear | None:
    """Return the head, or the embedding that it shares, if it has changes of rows.

    A product with its ``weight``, and `TokenRows.add_logits`, costs less than its `merged_weight`.
    """
    head = model._modules.get("lm_head") or model._modules.get("embed_tokens")
    return head if isinstance(head, RowsEmbedding | RowsLinear) else None
