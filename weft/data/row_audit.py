"""Report the fields and keys of rows that training does not use.

A template prints some fields of a message and ignores others, silently: tools, the role
``developer``, reasoning.  weft finds out which: it puts a word of its own into each field of the
first row of each shape, renders it, and looks for the words.  A row whose answer would be left out
is refused; for the rest there is one note per kind, with the first line and a count.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weft.data.chat import ChatEncoder, EncodedConversation
from weft.data.chat_rows import Example, InvalidConversation, Message, Row
from weft.data.chat_turns import EMPTY_REASONING, Rendered

MAX_SHAPES = 1000  # of which a row is rendered once more
NUM_SHOWN = 4  # tokens of an ending, or names of fields
# Fields that name a call or its result, which most templates do not print.
IDENTIFIERS = {"tool_call_id", "id", "name"}


@dataclass
class Finding:
    """A kind of finding: its rows, and the first of them."""

    first: str
    count: int = 0


@dataclass
class Findings:
    """Findings in the rows of a part of a source."""

    by_kind: dict[str, Finding] = field(default_factory=dict)
    unread: dict[str, int] = field(default_factory=dict)  # rows with a key that is not read
    num_answers: int = 0
    ending: list[int] = field(default_factory=list)  # tokens of the first answer without an end
    empty_reasoning: str = ""

    def extend(self, later: Findings) -> None:
        """Add the findings in later rows."""
        for kind, found in later.by_kind.items():
            self.by_kind.setdefault(kind, Finding(found.first)).count += found.count
        for name, count in later.unread.items():
            self.unread[name] = self.unread.get(name, 0) + count
        self.num_answers += later.num_answers
        self.ending = self.ending or later.ending
        self.empty_reasoning = self.empty_reasoning or later.empty_reasoning


@dataclass
class RowAudit:
    """Findings in the rows of a source.

    Args:
        chat: the encoder of the rows.
        found: the findings so far.
    """

    chat: ChatEncoder
    found: Findings = field(default_factory=Findings)
    _unread_columns: dict[str, None] = field(default_factory=dict)
    _ignored_by_shape: dict[str, frozenset[str]] = field(default_factory=dict)

    def check(self, example: Example, where: str) -> None:
        """Count the fields of an example that the template ignores.

        Raises:
            InvalidConversation: the template leaves out the answer.
        """
        ignored = self._find_ignored(example)
        answer = [name for name in ("content", "tool_calls") if f"assistant {name}" in ignored]
        if answer:
            rule = f"the chat template ignores {' and '.join(answer)} of assistant messages"
            raise InvalidConversation(f"{rule}, so that the answer would not be trained")
        for name in sorted(ignored):
            self._count(f"ignored {name}", where)

    def add_columns(self, unread: list[str], file: str) -> None:
        """Count the columns of a table that are not read, so that no row has them."""
        if unread:
            self._unread_columns.update(dict.fromkeys(unread))
            self._count("columns", file)

    def add_row(self, row: Row, examples: list[Example], where: str) -> None:
        """Count the keys of a row without an effect, and what it says not to train."""
        unread = [name for name in row.record if name not in row.read]
        if unread:
            for name in unread:
                self.found.unread[name] = self.found.unread.get(name, 0) + 1
            self._count("unread", where)
        if not examples:
            self._count("untrained", where)
        if row.has_encoded_arguments:
            self._count("arguments", where)
        for example in examples:
            turns = (example.messages[turn] for turn in example.trained_turns)
            if any(not turn.get("content") and not turn.get("tool_calls") for turn in turns):
                self._count("empty", where)

    def add(self, rendered: Rendered, encoded: EncodedConversation, where: str) -> None:
        """Count the answers that begin with empty reasoning, or end in no end token."""
        for span in rendered.spans:
            match = EMPTY_REASONING.match(rendered.text, span.start, span.stop)
            if match:
                self.found.empty_reasoning = self.found.empty_reasoning or match[0].strip()
                self._count("empty reasoning", where)
        self._add_endings(encoded, where)

    def _add_endings(self, encoded: EncodedConversation, where: str) -> None:
        """Count trained answers without an end token: their model does not stop.

        A template may write a newline after the end token, and mark it as trained.
        """
        tokens, loss_mask, _ = encoded
        [lasts] = np.nonzero(loss_mask & ~np.append(loss_mask[1:], False))
        is_end = np.isin(tokens, sorted(self.chat.end_tokens)) & loss_mask
        has_end = is_end[lasts]
        for back in (1, 2):
            earlier = np.maximum(lasts - back, 0)
            has_end |= is_end[earlier] & loss_mask[np.minimum(earlier + 1, lasts)]
        self.found.num_answers += len(lasts)
        for last in lasts[~has_end].tolist():
            self._count("endless", where)
            if not self.found.ending:
                begin = max(0, last + 1 - NUM_SHOWN)
                self.found.ending = tokens[begin : last + 1][loss_mask[begin : last + 1]].tolist()

    def _count(self, kind: str, where: str) -> None:
        self.found.by_kind.setdefault(kind, Finding(where)).count += 1

    # ---------------------------------------------------------------------- the template

    def _find_ignored(self, example: Example) -> frozenset[str]:
        """Return the fields of the example's shape that the template does not print."""
        shape = json.dumps(
            [
                [[message["role"], sorted(message)] for message in example.messages],
                example.trained_turns,
                bool(example.tools),
            ]
        )
        if shape not in self._ignored_by_shape:
            if len(self._ignored_by_shape) >= MAX_SHAPES:
                return frozenset()
            self._ignored_by_shape[shape] = self._probe(example)
        return self._ignored_by_shape[shape]

    def _probe(self, example: Example) -> frozenset[str]:
        """Return the fields whose words are not in the rendered text."""
        words: dict[str, list[str]] = {}
        count = 0

        def word(name: str) -> str:
            nonlocal count
            count += 1
            text = f"weft{count:05}"
            words.setdefault(name, []).append(text)
            return text

        trained = set(example.trained_turns)
        messages = [
            _replace_texts(message, word, number in trained)
            for number, message in enumerate(example.messages)
        ]
        tools = example.tools and [_replace_tool(tool, word) for tool in example.tools]
        try:
            rendered = self.chat.render(example._replace(messages=messages, tools=tools))
        except InvalidConversation:  # it wants certain values
            return frozenset()
        text = "\n".join(each.text for each in rendered).lower()
        return frozenset(
            name for name, each in words.items() if not any(word in text for word in each)
        )

    # ---------------------------------------------------------------------- notes

    def notes(self, num_repeated: int) -> list[str]:
        """Return a sentence for each kind of finding.

        Args:
            num_repeated: rows that are equal to an earlier one.
        """
        notes = [self._describe(kind, found) for kind, found in self.found.by_kind.items()]
        if num_repeated:
            notes.append(
                f"{num_repeated:,} rows are equal to an earlier row, and are trained again"
            )
        return notes

    def _describe(self, kind: str, found: Finding) -> str:
        count, first = f"{found.count:,}", f"the first is {found.first}"
        if kind == "unread":
            verb = "has" if len(self.found.unread) == 1 else "have"
            return f"{_list_names(self.found.unread)} of {count} rows {verb} no effect; {first}"
        if kind == "columns":
            names = f"the columns {_list_names(self._unread_columns)} have no effect"
            return f"{names}; the first file with such a column is {found.first}"
        if kind == "untrained":
            return f"{count} rows say not to train them (weight=0 or train=false); {first}"
        if kind == "arguments":
            return (
                f"the tool calls of {count} rows have their arguments as JSON text, which is "
                f"decoded, as servers do; {first}"
            )
        if kind == "empty":
            return f"{count} rows have an empty answer: the model learns to say nothing; {first}"
        if kind == "empty reasoning":
            shown = json.dumps(self.found.empty_reasoning)
            return (
                f"{count} answers have no reasoning, and the template writes an empty one "
                f"({shown}), which is trained: the model learns not to reason. "
                f"data.train_empty_reasoning=false leaves it out of the loss; {first}"
            )
        if kind == "endless":
            return self._describe_endings(found)
        name = kind.removeprefix("ignored ")
        note = f"the chat template ignores {name} of {count} rows; {first}"
        if name == "developer content":
            note += "; data.roles developer=system renders it as the system message"
        return note

    def _describe_endings(self, found: Finding) -> str:
        def decode(tokens: list[int]) -> str:
            text = self.chat.tokenizer.decode(tokens, skip_special_tokens=False)
            return json.dumps(text, ensure_ascii=False)

        stops = " or ".join(decode([token]) for token in sorted(self.chat.end_tokens)[:4])
        return (
            f"{found.count:,} of {self.found.num_answers:,} trained answers do not end in a token "
            f"at which generation stops ({stops}), but in {decode(self.found.ending)}; so the "
            "model does not learn to stop. Use a template that ends answers with such a token "
            "inside {% generation %} ... {% endgeneration %} (data.chat_template, now "
            f"{self.chat.template.path}), or name the special token that ends them as "
            f"eos_token_id in generation_config.json beside the tokenizer; the first is "
            f"{found.first}"
        )


def _list_names(names: Collection[str]) -> str:
    """Return the first names, and the number of the others."""
    more = len(names) - NUM_SHOWN
    return ", ".join(list(names)[:NUM_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _replace_texts(message: Message, word: Any, is_trained: bool) -> Message:
    """Return a message with a word of weft in each field that is text.

    Reasoning counts only where it is trained: templates drop that of earlier turns.
    """
    role, replaced = message["role"], dict(message)
    for name, value in message.items():
        kind = f"{role} {name}"
        if name in ("role", "thinking", *IDENTIFIERS):
            continue
        if name == "reasoning_content":
            if is_trained and value:
                replaced[name] = word("reasoning")
                replaced |= {n: replaced[name] for n in ("thinking", "reasoning") if n in message}
        elif name == "tool_calls":
            replaced[name] = [_replace_call(call, word) for call in value]
        elif isinstance(value, str) and value.strip() and name != "reasoning":
            replaced[name] = word(kind)
        elif name == "content" and isinstance(value, list):
            replaced[name] = [{**part, "text": word(kind)} for part in value]
    return replaced


def _replace_call(call: Any, word: Any) -> Any:
    """Return a tool call with words of weft as its name and arguments."""
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, dict):
        return call
    changed = inner | {"name": word("assistant tool_calls")}
    arguments = inner.get("arguments")
    if isinstance(arguments, dict):
        changed["arguments"] = {
            key: word("assistant tool_calls") if isinstance(value, str) else value
            for key, value in arguments.items()
        }
    return call | {"function": changed} if "function" in call else changed


def _replace_tool(tool: Any, word: Any) -> Any:
    """Return a tool with a word of weft as its name."""
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(inner, dict) or "name" not in inner:
        return tool
    changed = inner | {"name": word("tools")}
    return tool | {"function": changed} if "function" in tool else changed
