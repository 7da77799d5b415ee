"""LoRA (arXiv:2106.09685): trained adapters of frozen, maybe quantized matrices.

    out = x W^T + alpha / rank * (x A^T) B^T        A [rank, inputs], B [outputs, rank]

Only A and B are trained.  As in PEFT, A starts uniform (Kaiming) and B with zeros, so the model
starts unchanged.  All other weights are frozen in the compute dtype, because no optimizer
accumulates small updates in them.  Those of the blocks may be quantized.  Embedding and head may be
trained in full (``lora.modules_to_save``), or some of their rows (``lora.trainable_tokens``).

*Files.*  Read `adapters` first: it freezes a model and replaces its layers.

    adapters        changes a model: what is frozen, what gets an adapter, how adapters are sharded
    adapted_layers  a linear layer, or those of experts, with A and B
    dora            the same with a trained magnitude of each row (``lora.dora``)
    embedding       the embedding table with A and B
    token_rows      embedding and head with some trained rows (``lora.trainable_tokens``)
    dropout         dropout of the adapters' inputs (``lora.dropout``)

The parameters and FLOPs of adapters are counted in `weft.planning.lora_plan`, their learning rates
too.  Quantized matrices are in `weft.parallel.quantized`, products of frozen matrices in float8 in
`weft.parallel.float8`.

Code outside of this directory imports only the names below.
"""

from weft.parallel.lora.adapters import adapter_init, add_adapters, apply_lora
from weft.parallel.lora.dora import row_squares
from weft.parallel.lora.dropout import add_lora_dropout
from weft.parallel.lora.token_rows import TokenRows, find_head_with_rows, shard_token_rows

__all__ = [
    "TokenRows",
    "adapter_init",
    "add_adapters",
    "add_lora_dropout",
    "apply_lora",
    "find_head_with_rows",
    "row_squares",
    "shard_token_rows",
]
