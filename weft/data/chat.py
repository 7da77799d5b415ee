"""Conversations as tokens with a loss mask.

A row (`weft.data.chat_rows`) is rendered by a chat template (`weft.data.chat_template`), and the
assistant's turns are found in the text (`weft.data.chat_turns`).  `ChatEncoder` turns the text into
tokens, and the ranges of characters into a loss mask.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import processors

from weft.config.schema import DataSection
from weft.data.chat_rows import Example, InvalidConversation, Message
from weft.data.chat_template import ChatTemplate, strip_marks
from weft.data.chat_turns import Rendered, TurnFinder, skip_empty_reasoning
from weft.data.document_tokens import load_document_tokens
from weft.data.tokenizer import load_tokenizer
from weft.planning.vocabulary import NO_TOKENS, NewTokens, new_tokens


class EncodedConversation(NamedTuple):
    """Conversation as token ids, loss mask and weights: int64, bool, float32 (n,).

    A weight is the factor of a token's loss, 0 outside of the mask.
    """

    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    weights: NDArray[np.float32]


class ChatEncoder:
    """Encoder of conversations.

    Args:
        tokenizer: path of a ``tokenizer.json``.
        template: the chat template.
        last_only: train only the last turn of each conversation.
        trains_empty_reasoning: train the empty ``<think></think>`` of answers without reasoning.
        new_tokens: tokens to add to the tokenizer.

    Attributes:
        end_tokens: tokens at which generation of an answer stops: those that the files beside the
            tokenizer name, and the one with which the template ends an answer.  Training,
            generation and the exported model all use this rule.
    """

    def __init__(
        self,
        tokenizer: str,
        template: ChatTemplate,
        last_only: bool = False,
        trains_empty_reasoning: bool = True,
        new_tokens: NewTokens = NO_TOKENS,
    ) -> None:
        self.template, self.last_only = template, last_only
        self.trains_empty_reasoning = trains_empty_reasoning
        self.tokenizer, self.hash = load_tokenizer(tokenizer, new_tokens)
        # Unlike in text, special tokens in a conversation are special: the template writes them.
        self.tokenizer.encode_special_tokens = False
        # Adds nothing; the byte-level post-processor would trim blanks from the offsets.
        self.tokenizer.post_processor = processors.TemplateProcessing("$A", "$A $B", [])
        added = self.tokenizer.get_added_tokens_decoder()
        self._special = {id: token.content for id, token in added.items() if token.special}
        self._file_ends = load_document_tokens(self.tokenizer, tokenizer).end_tokens
        ends = [self._special[token] for token in self._file_ends if token in self._special]
        self._turns = TurnFinder(template, self._special.values(), ends)
        self.end_tokens = self._file_ends | self._find_end_tokens()

    def render(self, example: Example) -> list[Rendered]:
        """Render a conversation: see `TurnFinder.render`.

        Raises:
            InvalidConversation: the template raises an error, or a turn cannot be separated.
        """
        rendered = self._turns.render(example, self.last_only)
        if self.trains_empty_reasoning:
            return rendered
        return [skip_empty_reasoning(each) for each in rendered]

    def encode_prompt(self, messages: list[Message]) -> list[int]:
        """Return the token ids of a conversation, up to the generation prompt.

        Raises:
            InvalidConversation: the template raises an error.
        """
        text, _ = strip_marks(self.template.render(messages, None, True))
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def _find_end_tokens(self) -> set[int]:
        """Return the special token that ends an answer in the template, if any."""
        messages = [{"role": role, "content": "x"} for role in ("user", "assistant")]
        try:
            [encoded] = self.encode(self._turns.render(Example(messages, None, 0)))
        except InvalidConversation:  # it requires other messages
            return set()
        last_token = encoded.tokens[encoded.loss_mask][-1:].tolist()
        return {token for token in last_token if token in self._special}

    def encode(self, rendered: Sequence[Rendered]) -> list[EncodedConversation]:
        """Encode rendered conversations, on all cores."""
        texts = [each.text for each in rendered]
        encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        encoded = []
        for encoding, each in zip(encodings, rendered, strict=True):
            offsets_N2 = np.array(encoding.offsets)
            mask = compute_loss_mask(offsets_N2, each.spans)
            weights = mask.astype(np.float32)
            for span, weight in zip(each.spans, each.weights, strict=False):
                weights[compute_loss_mask(offsets_N2, [span])] = weight
            encoded.append(EncodedConversation(np.array(encoding.ids, np.int64), mask, weights))
        return encoded


def compute_loss_mask(offsets_N2: NDArray[np.int64], spans: Sequence[range]) -> NDArray[np.bool_]:
    """Return which tokens contain a character of one of the ``spans``: bool (n,).

    Args:
        offsets_N2: first character of each token, and the one after its last.
        spans: ranges of characters with a loss.
    """
    mask = np.zeros(len(offsets_N2), bool)
    if not len(offsets_N2):
        return mask
    begins_N, ends_N = offsets_N2.T
    for span in filter(len, spans):
        [inside] = np.nonzero((begins_N < span.stop) & (ends_N > span.start))
        if len(inside):
            mask[inside[0] : inside[-1] + 1] = True
    return mask


def make_chat_encoder(section: DataSection, template: ChatTemplate) -> ChatEncoder:
    """Make the encoder that ``section`` describes.

    Raises:
        InvalidConfig: errors of ``data.tokenizer``.
    """
    last_only = section.train_turns == "last"
    return ChatEncoder(
        section.tokenizer,
        template,
        last_only,
        section.train_empty_reasoning,
        new_tokens(section),
    )
