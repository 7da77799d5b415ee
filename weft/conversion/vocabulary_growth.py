"""Rows and tokens that an import adds to a model.

*Rows.*  transformers' ``resize_token_embeddings`` draws new rows from a normal distribution around
the mean of the old ones, with a billionth of their covariance: a standard deviation of 3e-5 of
theirs.  That is less than the distance of neighboring bfloat16 numbers, and needs a generator.  So
weft takes the mean: the float64 sum of the old rows, divided by their number.  New tokens then have
the mean logit, and the model predicts the old ones almost as before
(https://nlp.stanford.edu/~johnhew/vocab-expansion.html).  The rows of two new tokens part with the
first update, because the tokens stand in different places.

Rows are streamed: the sum is complete when the last old row has been read.

*Tokens.*  ``tokenizer.json`` gets them by `weft.planning.vocabulary`.  The older files beside it
list added tokens once more, for programs that read only these.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from tokenizers import Tokenizer
from torch import Tensor

from weft.checkpoint.weight_files import ROW_CHUNK_ELEMENTS, Weight


def grow_weights(
    weights: Mapping[str, Weight], shapes: Mapping[str, torch.Size]
) -> dict[str, Weight]:
    """Return weights with the rows of ``shapes``; new ones are the mean of the others."""
    return {
        name: Weight(shapes[name], partial(_read_grown, weight, shapes[name][0]), weight.dtype)
        if name in shapes and shapes[name][1:] == weight.shape[1:] and shapes[name] > weight.shape
        else weight
        for name, weight in weights.items()
    }


def _read_grown(weight: Weight, num_rows: int) -> Iterator[Tensor]:
    total_D = torch.zeros(weight.shape[1:], dtype=torch.float64)
    for rows in weight.read():
        total_D += rows.double().sum(0)
        yield rows
    mean_D = (total_D / weight.shape[0]).float()
    step = max(1, ROW_CHUNK_ELEMENTS // mean_D.numel())
    for first in range(weight.shape[0], num_rows, step):
        yield mean_D.repeat(min(step, num_rows - first), 1)


def list_added_tokens(name: str, content: bytes, tokenizer: bytes) -> bytes:
    """Return a companion of a ``tokenizer.json`` that lists all of its added tokens.

    Args:
        name: of the file; only ``tokenizer_config.json`` and ``added_tokens.json`` list tokens.
        content: of the file.
        tokenizer: content of ``tokenizer.json``.
    """
    if name not in ("tokenizer_config.json", "added_tokens.json"):
        return content
    tree = json.loads(content)
    listed = tree.get("added_tokens_decoder") if name == "tokenizer_config.json" else tree
    if not isinstance(listed, dict):
        return content
    added = Tokenizer.from_str(tokenizer.decode("utf-8")).get_added_tokens_decoder()
    for id, token in sorted(added.items()):
        if name == "added_tokens.json":
            listed.setdefault(token.content, id)
        else:
            flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
            listed.setdefault(str(id), {flag: getattr(token, flag) for flag in flags})
    return json.dumps(tree, indent=2, ensure_ascii=False).encode() + b"\n"
