"""Random bits of tokens, the same in all layouts.

A random generator per rank would draw other numbers in another layout, after a resume, or when a
block is recomputed.  So, as for initial weights (`weft.parallel.initialization`), no generator is
used.  The bits of element d of a token's vector are a pure function of (seed, name of the layer,
number of the token in the run, d).  The loader numbers the tokens in the order of the data
(`weft.data.loader.Loader`), so every step, also of a later epoch, has other bits, and a repeated
step has the same.

*Hash.*  SplitMix64 mixes the number of the token, and d, to 32 bits each.  A hash of 32 bits mixes
the xor of the two.  On a GPU the compiler fuses all of it into one kernel; without
`compile.enable` it is several.

*Numbers of the tokens.*  The model takes them as an argument, ``token_ids_BT``.  Without them, as
in evaluation, nothing is random.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.parallel.initialization import GOLDEN, mix_bits, mix_int

# Of lowbias32 (C. Wellons, "Prospecting for hash functions", 2018), as signed 32-bit integers.
_MULTIPLY_1 = 0x7FEB352D
_MULTIPLY_2 = -0x7B935975  # 0x846CA68B
# Elements at a time: limits temporaries to a few tens of MiB.
CHUNK_ELEMENTS = 1 << 22


class TokenKeys:
    """The mixed numbers of the tokens of the pass that is running: int32 ``[B, T]``.

    Attributes:
        value: None: nothing is random.
        lengths: number of tokens of each token's document, int64 ``[B, T]``; None: not known.
    """

    value: Tensor | None = None
    lengths: Tensor | None = None

    def for_experts(self) -> list[Tensor]:
        """Return the numbers of the tokens, if there are any: `MoE.token_keys`."""
        return [] if self.value is None else [self.value]


def read_token_keys(model: nn.Module, seed: int) -> TokenKeys:
    """Let a model take ``token_ids_BT`` and ``lengths_BT``; return where they are.

    Args:
        model: the full model or a pipeline stage.
        seed: the run's seed.
    """
    token_keys = TokenKeys()

    def read_ids(module: nn.Module, args: Any, kwargs: Any) -> Any:
        ids = kwargs.pop("token_ids_BT", None)
        token_keys.value = None if ids is None else mix_bits(ids * GOLDEN + seed).to(torch.int32)
        token_keys.lengths = kwargs.pop("lengths_BT", None)
        return args, kwargs

    model.register_forward_pre_hook(read_ids, with_kwargs=True)
    return token_keys


def layer_stream(name: str, seed: int) -> int:
    """Return a number that makes the bits of a layer differ from those of others."""
    return mix_int((seed << 32) ^ zlib.crc32(name.encode()) ^ 1)


def column_keys(columns: Sequence[range], stream: int, device: torch.device) -> Tensor:
    """Return the mixed numbers of elements of a vector, int32 ``[D]``.

    Args:
        columns: numbers of the elements in the full model.
        stream: see `layer_stream`.
        device: of the result.
    """
    parts = [torch.arange(part.start, part.stop, device=device) for part in columns]
    return mix_bits(torch.cat(parts) * GOLDEN + stream).to(torch.int32)


def slice_tokens(values_BT: Tensor, num_tokens: int, tp_rank: int) -> Tensor:
    """Return the values of the tokens that a rank has in sequence parallelism."""
    if values_BT.shape[1] == num_tokens:
        return values_BT
    start = tp_rank * num_tokens
    return values_BT[:, start : start + num_tokens].contiguous()


def element_bits(tokens_N: Tensor, columns_D: Tensor) -> Tensor:
    """Return 32 random bits per element, int32 ``[N, D]``.

    Args:
        tokens_N: int32, mixed.
        columns_D: int32, mixed.
    """
    bits_ND = tokens_N.unsqueeze(1) ^ columns_D
    bits_ND = (bits_ND ^ ((bits_ND >> 16) & 0xFFFF)) * _MULTIPLY_1
    bits_ND = (bits_ND ^ ((bits_ND >> 15) & 0x1FFFF)) * _MULTIPLY_2
    return bits_ND


def rows_at_once(num_rows: int, num_columns: int) -> int:
    """Return the number of rows to compute at a time; the compiler needs no limit."""
    if torch.compiler.is_compiling():
        return max(1, num_rows)
    return max(1, min(num_rows, CHUNK_ELEMENTS // num_columns))
