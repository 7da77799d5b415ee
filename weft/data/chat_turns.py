"""Find the assistant's turns in the text of a conversation: what is trained.

*One pass.*  A template may mark the assistant's text with generation blocks.  Most templates have
none.  Then weft renders the conversation up to each turn, with the generation prompt (``before``),
and up to its end (``after``); the difference is the turn.  If all of these are prefixes of the full
text, the conversation is one example, and all its turns are trained in one pass.

*One example per turn.*  Many templates render a turn differently once another one follows: they
drop its reasoning, or end the last one with another token.  Then the model never sees the full text
at inference.  So each trained turn becomes an example: the history as the template renders it
before that turn, then the turn.

*What inference has before an answer* is the generation prompt.  Where the template renders a
finished turn without what its generation prompt opens (DeepSeek-R1 begins every answer with
``<think>``, and drops the reasoning afterwards), the example has the generation prompt, the
reasoning of the row, ``</think>`` and the answer: what the model must generate there.

*End.*  A turn ends with its last special token: the model does not generate what the template
writes after it.  Some templates write nothing after an answer (GLM-4.5: the model stops by
generating the header of the next role).  Then the turn ends with that token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from weft.data.chat_rows import Example, InvalidConversation, Message
from weft.data.chat_template import BEGIN, END, ChatTemplate, strip_marks

# An empty reasoning at the beginning of an answer, of which the generation prompt may have a part.
EMPTY_REASONING = re.compile(r"\s*(<think>)?\s*</think>\s*")
OPEN_REASONING = re.compile(r"<think>\s*\Z")
INLINE_REASONING = re.compile(r"\s*(?:<think>)?(.*?)</think>", re.DOTALL)

INSEPARABLE_TURNS = (
    "the chat template renders this turn otherwise than its generation prompt begins it, so that "
    "the turn cannot be separated"
)
TURNS_REMEDY = (
    "give a data.chat_template with {% generation %} and {% endgeneration %} around the "
    "assistant's text"
)


class Rendered(NamedTuple):
    """Text of an example, and the ranges of its characters that are trained.

    ``weights``: factors of the losses of the ranges; empty: 1.
    """

    text: str
    spans: list[range]
    weights: tuple[float, ...] = ()


class Turn(NamedTuple):
    """Messages of one turn of the assistant: usually one."""

    first: int
    last: int


class TurnFinder:
    """Renders conversations and finds the turns to train on.

    Args:
        template: the chat template.
        special_tokens: the texts of the tokenizer's special tokens.
        end_tokens: the texts of those at which generation stops.
    """

    def __init__(
        self, template: ChatTemplate, special_tokens: Collection[str], end_tokens: Collection[str]
    ) -> None:
        self.template, self.end_tokens = template, frozenset(end_tokens)
        alternatives = "|".join(map(re.escape, sorted(special_tokens, reverse=True))) or "(?!)"
        # A text that ends with a special token (group 1), then blanks.
        self._ending = re.compile(rf"(.*(?:{alternatives}))\s*\Z", re.DOTALL)
        self._special = re.compile(alternatives)
        self._next_tokens: dict[str, str] = {}
        self._closing = re.compile(rf"(?:(?:{alternatives})|\s)+\Z")

    def render(self, example: Example, last_only: bool = False) -> list[Rendered]:
        """Render a conversation; return its examples: one, or one for each trained turn.

        Args:
            example: a conversation; turns from ``loss_start`` on are trained.
            last_only: train only the last of these turns.

        Raises:
            InvalidConversation: the template raises an error, or a turn cannot be separated.
        """
        if any(marker in json.dumps(example, ensure_ascii=False) for marker in (BEGIN, END)):
            raise InvalidConversation(f"has the noncharacter {BEGIN!a} or {END!a}")
        numbers = example.trained_turns[-1:] if last_only else example.trained_turns
        text = self.template.render(example.messages, example.tools, False)
        if self.template.has_generation_blocks(example.tools):
            return [self._read_marks(example, text, numbers)]
        try:
            return self._separate(example, text, [Turn(number, number) for number in numbers])
        except InvalidConversation:
            turns = _join_turns(numbers)
            if len(turns) == len(numbers):
                raise
        return self._separate(example, text, turns)  # the template joins answers in a row

    def _separate(self, example: Example, text: str, turns: list[Turn]) -> list[Rendered]:
        """Return the whole text with the spans of all turns, or an example for each turn."""
        spans = [self._locate_turn(example, turn, text) for turn in turns]
        found = [span for span in spans if span is not None]
        if len(found) == len(turns):
            whole = self._add_end(example, text, found)
            has_ends = all(self._has_end(whole.text, span) for span in whole.spans)
            if has_ends or not self._next_token("user"):
                weights = [_weight_of(example, turn) for turn in turns]
                return [whole._replace(weights=tuple(weights) if example.weights else ())]
        rendered = [self._render_turn(example, turn) for turn in turns]
        examples = [each for each in rendered if each is not None]
        if not examples:
            raise InvalidConversation("has no answer to a user, and the template needs a user turn")
        return examples

    def _read_marks(self, example: Example, text: str, turns: list[int]) -> Rendered:
        """Return the text and the marked spans of the trained turns."""
        text, spans = strip_marks(text)
        every = [i for i, each in enumerate(example.messages) if each["role"] == "assistant"]
        weights = {example.weight_of(turn) for turn in turns}
        if turns == every and len(weights) <= 1:
            return Rendered(text, spans, tuple(weights) * len(spans) if example.weights else ())
        if len(spans) != len(every):
            rule = f"generation blocks in the chat template for {len(every)} assistant turns"
            which = "those to train" if turns != every else "their weights"
            raise InvalidConversation(f"{len(spans)} {rule}: {which} are ambiguous")
        trained = [(n, span) for n, span in zip(every, spans, strict=True) if n in turns]
        of_spans = tuple(example.weight_of(turn) for turn, _ in trained)
        return Rendered(text, [span for _, span in trained], of_spans if example.weights else ())

    def _locate_turn(self, example: Example, turn: Turn, text: str) -> range | None:
        """Return the span of a turn in the text of the whole conversation, if it is there."""
        try:
            after = self.template.render(example.messages[: turn.last + 1], example.tools, False)
            before = self._render_before(example, turn, after)
        except InvalidConversation:
            return None
        end = self._common_end(after, text)
        if end is None or not (text.startswith(before) and after.startswith(before)):
            return None
        return self._trim(text, len(before), end)

    def _common_end(self, after: str, text: str) -> int | None:
        """Return the end in the full text of a turn with which ``after`` ends.

        A template may close a conversation (Phi-3 with ``<|endoftext|>``).  The turn then ends with
        the last special token that both have.
        """
        if text.startswith(after):
            return len(after)
        closing = self._closing.search(after)
        ends = (
            [match.end() for match in self._special.finditer(after, closing.start())]
            if closing
            else []
        )
        return next((end for end in reversed(ends) if text.startswith(after[:end])), None)

    def _render_before(self, example: Example, turn: Turn, after: str) -> str:
        """Return the text that the model sees before it generates a turn.

        Args:
            example: a conversation.
            turn: one of its turns.
            after: the text up to the end of the turn.
        """
        if turn.first:
            return self.template.render(example.messages[: turn.first], example.tools, True)
        with suppress(InvalidConversation):  # the template may read the first message
            before = self.template.render([], example.tools, True)
            if after.startswith(OPEN_REASONING.sub("", before).rstrip()):
                return before
        header = self._find_header(example.tools)
        for part in (header, header.rstrip(), OPEN_REASONING.sub("", header)):
            if part and (begin := after.find(part)) >= 0:
                return after[:begin] + header
        raise InvalidConversation(f"{INSEPARABLE_TURNS} (message 1)")

    def _find_header(self, tools: list[Any] | None, history: Sequence[Message] = ()) -> str:
        """Return the generation prompt alone: the header of an assistant turn."""
        messages = list(history) or [{"role": "user", "content": "x"}]
        with_header, without = (self.template.render(messages, tools, add) for add in (True, False))
        return with_header[len(_common_prefix(with_header, without)) :]

    def _render_turn(self, example: Example, turn: Turn) -> Rendered | None:
        """Render the history of one turn as at inference, then the turn.

        None: no user asks before the turn, and the template cannot render that.
        """
        messages, tools = example.messages, example.tools
        try:
            after = self.template.render(messages[: turn.last + 1], tools, False)
            before = self._render_before(example, turn, after)
        except InvalidConversation:
            if any(message["role"] == "user" for message in messages[: turn.first]):
                raise
            return None
        if not after.startswith(before):
            before, after = self._align(example, turn, before, after)
        part = Example(messages[: turn.last + 1], tools, turn.first)
        rendered = self._add_end(part, after, [self._trim(after, len(before), len(after))])
        return rendered._replace(weights=(_weight_of(example, turn),) if example.weights else ())

    def _align(self, example: Example, turn: Turn, before: str, after: str) -> tuple[str, str]:
        """Return a generation prompt, and the text of a turn that begins with it.

        Args:
            example: a conversation.
            turn: one of its turns.
            before: the text up to the generation prompt of the turn.
            after: the text up to the end of the turn, which does not begin with ``before``.
        """
        common = _common_prefix(before, after)
        opened = before[len(common) :]
        if not opened.strip() or EMPTY_REASONING.fullmatch(opened):
            return common, after  # other blanks, or reasoning where the prompt has none
        reasoning = OPEN_REASONING.search(before)
        if reasoning and after.startswith(before[: reasoning.start()]):
            answer = after[reasoning.start() :]
            return before, before + _close_reasoning(example.messages[turn.first], answer)
        # The template renders an earlier answer in a row otherwise: find the header of this one.
        header = self._find_header(example.tools, example.messages[: turn.first])
        if header and before.count(header) == after.count(header):
            return before, before + after[after.rfind(header) + len(header) :]
        raise InvalidConversation(f"{INSEPARABLE_TURNS} (message {turn.last + 1})")

    def _trim(self, text: str, begin: int, end: int) -> range:
        """Return the span of a turn, up to its last special token."""
        match = self._ending.match(text, begin, end)
        return range(begin, match.end(1) if match else end)

    def _add_end(self, example: Example, text: str, spans: list[range]) -> Rendered:
        """End turns without an end token with the next role's header, if it is one.

        The last turn of the text gets it from the text that the template would write next.
        """
        ended = []
        for span in spans:
            token = self._special.match(text, span.stop)
            if self._has_end(text, span):
                token = None
            elif span.stop == len(text):
                role = "tool" if example.messages[-1].get("tool_calls") else "user"
                text += self._next_token(role)
                token = self._special.match(text, span.stop)
            is_end = token is not None and token[0] in self.end_tokens
            ended.append(range(span.start, token.end()) if token and is_end else span)
        return Rendered(text, ended)

    def _has_end(self, text: str, span: range) -> bool:
        return self._ending.match(text, span.start, span.stop) is not None

    def _next_token(self, role: str) -> str:
        """Return the end token that the template writes before the next message, or ''."""
        if role not in self._next_tokens:
            texts = [{"role": name, "content": "x"} for name in ("user", "assistant", role)]
            token = None
            with suppress(InvalidConversation):
                text = self.template.render(texts[:2], None, False)
                following = self.template.render(texts, None, False)
                if following.startswith(text):
                    token = self._special.match(following, len(text))
            is_end = token is not None and token[0] in self.end_tokens
            self._next_tokens[role] = token[0] if token and is_end else ""
        return self._next_tokens[role]


def _common_prefix(first: str, second: str) -> str:
    """Return the text with which both begin."""
    pairs = zip(first, second, strict=False)
    size = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
    return first[:size]


def _join_turns(numbers: list[int]) -> list[Turn]:
    """Return the turns of messages; those in a row are one."""
    turns: list[Turn] = []
    for number in numbers:
        if turns and turns[-1].last == number - 1:
            turns[-1] = Turn(turns[-1].first, number)
        else:
            turns.append(Turn(number, number))
    return turns


def _weight_of(example: Example, turn: Turn) -> float:
    """Return the weight of a turn.

    Raises:
        InvalidConversation: the template joins messages with different weights.
    """
    [weight, *others] = {example.weight_of(n) for n in range(turn.first, turn.last + 1)}
    if others:
        rule = f"messages {turn.first + 1} to {turn.last + 1} have different weights"
        raise InvalidConversation(f"{rule}, and the chat template makes them one answer")
    return weight


def _close_reasoning(message: Message, answer: str) -> str:
    """Return the answer after an opened ``<think>``: reasoning, ``</think>``, answer."""
    reasoning, content = message.get("reasoning_content"), message.get("content")
    if reasoning is None and isinstance(content, str):
        inline = INLINE_REASONING.match(content)
        reasoning = inline[1] if inline else ""
    text = str(reasoning or "").strip("\n")
    return f"{text}\n</think>\n\n{answer.lstrip(chr(10))}"


def skip_empty_reasoning(rendered: Rendered) -> Rendered:
    """Leave the empty reasoning at the beginning of answers out of the loss."""
    spans = [
        range(match.end() if match else span.start, span.stop)
        for span in rendered.spans
        for match in [EMPTY_REASONING.match(rendered.text, span.start, span.stop)]
    ]
    return rendered._replace(spans=spans)
