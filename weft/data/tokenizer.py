"""Load tokenizers.

weft trains byte-level BPE tokenizers (`weft.data.tokenizer_training`), or loads a
``tokenizer.json``.  The smallest tokens of a trained tokenizer are bytes, so it encodes and
restores every text exactly.  `weft.data.document_tokens` has the tokens that begin and end
documents.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from xxhash import xxh3_128_hexdigest

from weft.config.errors import ConfigError, InvalidConfig
from weft.config.files import describe_cause, expand_path, open_regular
from weft.planning.vocabulary import NO_TOKENS, NewTokens, add_tokens

END_OF_TEXT = "<|endoftext|>"  # the separator of documents


def load_tokenizer(path: str | Path, new_tokens: NewTokens = NO_TOKENS) -> tuple[Tokenizer, str]:
    """Load a ``tokenizer.json``; return the tokenizer and the xxh3_128 of the file.

    Args:
        path: the file.
        new_tokens: tokens to add; the hash is that of the file that `read_tokenizer` returns.

    Raises:
        InvalidConfig: the file is missing, or is not a tokenizer.
    """
    content = read_tokenizer(path, new_tokens)
    try:
        return encode_literally(Tokenizer.from_str(content.decode("utf-8"))), xxh3_128_hexdigest(
            content
        )
    except Exception as error:  # tokenizers raises bare Exceptions
        raise _not_loaded(path, f"is not a tokenizer.json: {error}") from error


def read_tokenizer(path: str | Path, new_tokens: NewTokens) -> bytes:
    """Return a ``tokenizer.json`` with more tokens.

    Raises:
        InvalidConfig: as `load_tokenizer`.
    """
    file = expand_path(path) if isinstance(path, str) else path
    try:
        with open_regular(file) as stream:
            data = stream.read()
        return add_tokens(data, new_tokens)
    except FileNotFoundError:
        rule = "does not exist"
    except OSError as error:
        rule = f"cannot be read: {describe_cause(error)}"
    except Exception as error:  # tokenizers raises bare Exceptions
        rule = f"is not a tokenizer.json: {error}"
    raise _not_loaded(path, rule)


def _not_loaded(path: str | Path, rule: str) -> InvalidConfig:
    remedy = "give the path of a tokenizer.json, or use train"
    if (file := Path(path) / "tokenizer.json").is_file():
        remedy = f"use {file}"
    return InvalidConfig([ConfigError("data.tokenizer", str(path), rule, remedy)])


def encode_literally(tokenizer: Tokenizer) -> Tokenizer:
    """Encode special tokens in text as text; the JSON may say otherwise."""
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def has_excess_padding(entries: int, vocab_size: int) -> bool:
    """Return True if a model's vocabulary is padded beyond what is usual.

    The largest known padding is 0.2 percent for Qwen3 and 1.8 percent for Phi-2.
    """
    return entries < 0.9 * vocab_size


def required_vocab_size(tokenizer: Tokenizer) -> int:
    """Return the rows that an embedding needs: the largest id plus one."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
