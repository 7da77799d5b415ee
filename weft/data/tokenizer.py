"""Text to token ids: byte-level BPE, trained here or loaded from a ``tokenizer.json``.

Bytes are the smallest tokens of those trained here, so every text can be encoded and comes back
unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from xxhash import xxh3_128_hexdigest

from weft.config.errors import ConfigError, InvalidConfig
from weft.data.document_tokens import END_OF_TEXT, add_start, tokens_beside

# How merges are kept from crossing words, as in Llama 3: contractions, words with the space or
# sign before them, numbers of up to three digits, signs, newlines, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer; the same texts give the same JSON, byte for byte.

    Args:
        texts: what to learn merges from, all of which is held as word counts.
        vocab_size: entries, of which 257 are the bytes and the separator; fewer come out where
            the texts offer no more merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    [end] = tokenizer.get_added_tokens_decoder()
    add_start(tokenizer, end)  # as every document begins in training
    return _plain(tokenizer)


def load_tokenizer(path: str | Path) -> tuple[Tokenizer, str]:
    """The tokenizer of a ``tokenizer.json``, and the xxh3_128 of that file in hexadecimal.

    Raises:
        InvalidConfig: the file is missing or is not a tokenizer.
    """
    file = Path(path).expanduser() if isinstance(path, str) else path
    remedy = "give the path of a tokenizer.json, or train to make one from the text"
    try:
        data = file.read_bytes()
        return _plain(Tokenizer.from_str(data.decode("utf-8"))), xxh3_128_hexdigest(data)
    except FileNotFoundError:
        rule = "does not exist"
    except OSError as error:
        rule = f"cannot be read: {error.strerror}"
    except Exception as error:  # tokenizers raises bare Exceptions for what it cannot parse
        rule = f"is not a tokenizer.json: {error}"
    raise InvalidConfig([ConfigError("data.tokenizer", str(path), rule, remedy)])


def _plain(tokenizer: Tokenizer) -> Tokenizer:
    """Encode text as what it is.  None of these settings can be relied on to be in the JSON."""
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a text is text, not the token
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def separator_id(tokenizer: Tokenizer, path: str | Path) -> int:
    """Return the id of the token that ends a document, by the files beside a ``tokenizer.json``.

    Text that looks like a special token is not encoded to it, unless the model's own vocabulary has
    that text, too (as Unigram's may; byte-level BPE's does not).  See
    `weft.data.document_tokens`.

    Raises:
        InvalidConfig: nothing names one, or one that does not exist; ``path`` is in the message.
    """
    return tokens_beside(tokenizer, path).separator


def padded_beyond(entries: int, vocab_size: int) -> bool:
    """Whether a model has more rows for tokens than a tokenizer's and what is usual for padding:
    Qwen3's 0.2 percent and Phi-2's 1.8 are the most that is known."""
    return entries < 0.9 * vocab_size


def vocab_entries(tokenizer: Tokenizer) -> int:
    """Rows that an embedding needs: the largest id plus one (ids may have gaps)."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
