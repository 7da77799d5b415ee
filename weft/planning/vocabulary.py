"""Tokens that a run adds to a tokenizer, and the rows that its model then needs.

A model that is imported may get more rows in its embedding and head than its files have: for the
tokens of ``data.add_tokens`` and ``data.add_special_tokens``, or for a tokenizer that already has
more entries than the model.  The number of rows is rounded up to a multiple of `ROW_MULTIPLE`, as
kernels of matrix products like it, unless ``model.vocab_size`` sets it.  A model whose table has
padding needs no more rows, as long as the padding suffices.

Ids are those that transformers gives: from the largest id on.  `weft.conversion.vocabulary_growth`
has the initial values of the new rows.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from weft.config.errors import ConfigErrors
from weft.config.files import open_regular
from weft.config.schema import DataSection

ROW_MULTIPLE = 64
MAX_GROWTH = 2  # factor of the rows above which the tokenizer seems to be another model's


class NewTokens(NamedTuple):
    """Tokens to add to a tokenizer, unless it has them.

    Attributes:
        ordinary: found in any text.
        special: found only where a chat template writes text; decoders may leave them out.
    """

    ordinary: tuple[str, ...] = ()
    special: tuple[str, ...] = ()


NO_TOKENS = NewTokens()


def new_tokens(section: DataSection) -> NewTokens:
    """Return the tokens that the keys of a job add."""
    return NewTokens(section.add_tokens, section.add_special_tokens)


def add_tokens(content: bytes, tokens: NewTokens) -> bytes:
    """Return a ``tokenizer.json`` with more tokens.

    It is returned as it is if it has them already.

    Raises:
        Exception: ``content`` is not a tokenizer (`tokenizers` raises bare Exceptions).
    """
    if not any(tokens):
        return content
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_str(content.decode("utf-8"))
    before = json.loads(tokenizer.to_str())["added_tokens"]
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in tokens.ordinary])
    special = [AddedToken(each, normalized=False, special=True) for each in tokens.special]
    tokenizer.add_special_tokens(special)
    after = json.loads(tokenizer.to_str())["added_tokens"]
    if after == before:
        return content
    tree = json.loads(content) | {"added_tokens": after}
    return json.dumps(tree, indent=2, ensure_ascii=False).encode()


class Growth(NamedTuple):
    """Rows of a model's embedding and head, and what is new in them.

    Attributes:
        rows: number of rows.
        new_ids: ids of tokens that the run adds, or that the model had no rows for.
    """

    rows: int
    new_ids: tuple[int, ...]


def count_entries(content: bytes, tokens: NewTokens = NO_TOKENS) -> tuple[int, tuple[int, ...]]:
    """Return the rows that a ``tokenizer.json`` needs, and the ids of new tokens.

    Raises:
        Exception: ``content`` is not a tokenizer.
    """
    before = after = _vocabulary(content)
    if any(tokens):
        after = _vocabulary(add_tokens(content, tokens))
    return max(after.values()) + 1, tuple(sorted(after[t] for t in after.keys() - before.keys()))


@lru_cache(maxsize=8)  # a plan is made for several layouts
def _count_file(
    file: Path, modified: int, size: int, tokens: NewTokens
) -> tuple[int, tuple[int, ...]]:
    with open_regular(file) as stream:
        return count_entries(stream.read(), tokens)


def _vocabulary(content: bytes) -> dict[str, int]:
    """Return the ids of all tokens of a ``tokenizer.json``."""
    from tokenizers import Tokenizer

    ids: dict[str, int] = Tokenizer.from_str(content.decode("utf-8")).get_vocab()
    return ids


def round_rows(entries: int, rows: int) -> int:
    """Return the rows of a model for so many entries: its own, if they suffice."""
    return rows if entries <= rows else -(-entries // ROW_MULTIPLE) * ROW_MULTIPLE


def find_growth(
    data: DataSection, rows: int, chosen: object, directory: Path, errors: ConfigErrors
) -> Growth:
    """Return the rows that a run's model needs.

    Args:
        data: the keys of the tokenizer.
        rows: rows of the model in ``directory``.
        chosen: the user's ``model.vocab_size``; None: not set.
        directory: has the model's ``tokenizer.json``.
        errors: receives every reason why the model cannot have these rows.
    """
    own = directory / "tokenizer.json"
    file = own if data.trains_tokenizer else data.tokenizer_path
    count, added = 0, tuple[int, ...]()
    with suppress(Exception):  # `weft.data.tokenizer.load_tokenizer` reports it
        stat = file.stat()
        count, added = _count_file(file, stat.st_mtime_ns, stat.st_size, new_tokens(data))
    new_ids = tuple(sorted({*added, *range(rows, count)}))
    if isinstance(chosen, int):
        if chosen < rows:
            rule = f"is less than the {rows} rows of the model, and weft removes none"
            errors.add("model.vocab_size", rule, f"use at least {rows}, or remove it", value=chosen)
        return Growth(chosen, new_ids)
    needed = round_rows(count, rows)
    rule = f"has {count} entries, but model.vocab_size is {rows}"
    if needed > MAX_GROWTH * rows:
        rule += ": this may be the tokenizer of another model"
        remedy = f"use its own tokenizer, or --model.vocab_size {needed} to grow the model"
        if data.trains_tokenizer:
            errors.add("model.path", f"has a tokenizer that {rule}", remedy, value=str(directory))
        else:
            errors.add("data.tokenizer", rule, remedy, value=data.tokenizer)
    elif needed > rows and not data.trains_tokenizer and (moved := _moved_entries(own, file)):
        remedy = "add tokens to the model's own tokenizer (data.add_tokens), or use "
        remedy += f"--model.vocab_size {needed} to grow the model all the same"
        errors.add("data.tokenizer", f"{rule}, and it {moved}", remedy, value=data.tokenizer)
    return Growth(needed, new_ids)


def _moved_entries(own: Path, given: Path) -> str:
    """Return a rule if a tokenizer has other ids for the tokens of the model's own."""
    contents = []
    for file in (own, given):
        try:
            with open_regular(file) as stream:
                contents.append(_vocabulary(stream.read()))
        except Exception:  # the model has no tokenizer, or another check reports it
            return ""
    ours, theirs = contents
    names: dict[int, str] = {id: token for token, id in theirs.items()}
    moved = sum(names.get(id) != token for token, id in ours.items())
    return f"gives {moved} of the {len(ours)} tokens of {own} another id" if moved else ""
