"""Train tokenizers: byte-level BPE, with the pretokenization of Llama 3."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from weft.data.document_tokens import set_start_tokens
from weft.data.tokenizer import END_OF_TEXT, encode_literally

# Merges do not cross these, as in Llama 3: contractions, words with the space or sign before
# them, numbers of up to three digits, signs, newlines, spaces.
PRETOKENIZE_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer; equal texts give equal JSON, byte for byte.

    Args:
        texts: the training texts; memory holds their word counts.
        vocab_size: entries, including 256 bytes and the separator; fewer if the texts offer no
            more merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_PATTERN), "isolated"),
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
    set_start_tokens(tokenizer, [end])  # every document in training starts with it
    return encode_literally(tokenizer)
