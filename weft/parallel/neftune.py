"""NEFTune: noise of the embeddings in training (Jain et al., arXiv:2310.05914).

The embedding of a token gets uniform noise in [-1, 1] times alpha / sqrt(L D), where L is the
number of tokens of its sequence and D the model width.  transformers takes the padded length of a
batch as L, and with packing that of the packed sequence, so that the noise of a conversation
depends on what it is batched with.  weft takes the length of the token's own document, which is
that of the paper with one conversation per sequence and no padding.

The noise follows from the random bits of `weft.parallel.token_keys`: it is the same in all
layouts, and in a resumed run.  Evaluation and generation have none.  Layers of multi-token
prediction read the embeddings of later tokens without noise.

Shapes in names: B sequences, T tokens of a sequence on this rank, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.parallel.compile import run_compiled
from weft.parallel.token_keys import (
    TokenKeys,
    column_keys,
    element_bits,
    layer_stream,
    rows_at_once,
    slice_tokens,
)
from weft.planning.plan import Plan


class EmbeddingNoise:
    """Adds noise to embeddings; see `weft.models.family.Family.set_embedding_noise`.

    Args:
        token_keys: of the pass that is running.
        plan: alpha, the seed, and the length of sequences that are one document.
        tp_rank: index of this rank's slice of the sequence, in sequence parallelism.
    """

    def __init__(self, token_keys: TokenKeys, plan: Plan, tp_rank: int) -> None:
        self.token_keys, self.tp_rank = token_keys, tp_rank
        self.alpha, self.seq_len = plan.neftune_alpha, plan.seq_len
        self.stream, self.is_compiled = layer_stream("neftune", plan.seed), plan.is_compiled

    def __call__(self, x_BTD: Tensor) -> Tensor:
        """Return embeddings ``[B, T, D]`` with noise; in evaluation, as they are."""
        tokens_BT, lengths_BT = self.token_keys.value, self.token_keys.lengths
        if tokens_BT is None:
            return x_BTD
        if lengths_BT is None:
            lengths_BT = torch.full_like(tokens_BT, self.seq_len)
        magnitude_BT = self.alpha * (lengths_BT.float() * x_BTD.shape[-1]).rsqrt()
        tokens_BT, magnitude_BT = (
            slice_tokens(each, x_BTD.shape[1], self.tp_rank) for each in (tokens_BT, magnitude_BT)
        )
        columns_D = column_keys([range(x_BTD.shape[-1])], self.stream, x_BTD.device)
        function, label = add_noise, "the noise of the embeddings"
        noisy_BTD: Tensor = run_compiled(
            label, self.is_compiled, function, x_BTD, tokens_BT, magnitude_BT, columns_D
        )
        return noisy_BTD


def add_noise(x_BTD: Tensor, tokens_BT: Tensor, magnitude_BT: Tensor, columns_D: Tensor) -> Tensor:
    """Return ``x`` plus uniform noise, in the dtype of ``x``.

    Args:
        x_BTD: embeddings.
        tokens_BT: int32, mixed numbers of the tokens.
        magnitude_BT: float32, limits of the noise.
        columns_D: int32, mixed numbers of the elements.
    """
    size = rows_at_once(tokens_BT.numel(), len(columns_D))
    chunks = zip(
        *(torch.split(each.flatten(), size) for each in (tokens_BT, magnitude_BT)), strict=True
    )
    noise = [
        (element_bits(tokens_N, columns_D) * (magnitude_N * 2**-31)[:, None]).to(x_BTD.dtype)
        for tokens_N, magnitude_N in chunks
    ]
    return x_BTD + (noise[0] if len(noise) == 1 else torch.cat(noise)).view_as(x_BTD)
