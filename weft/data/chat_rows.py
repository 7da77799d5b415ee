"""Rows of conversations, in the forms that people have, as messages.

A row is a JSON object of a line, or a row of a table.  It is one example, in one of these forms:

- ``messages``: turns with ``role`` and ``content``, as in OpenAI and Hugging Face data, or with
  ``from`` and ``value`` as in ShareGPT (``conversations``);
- ``prompt`` with ``response`` or ``completion``: texts, or lists of messages;
- ``instruction`` with ``output`` (and ``input``, ``history``), as in Alpaca data;
- ``question`` with ``answer``;
- a preference: ``prompt``, ``chosen`` and ``rejected``, or only two conversations with a common
  beginning;
- a labeled answer: ``prompt``, ``completion`` and ``label``, true for a good one.  A conversation
  with a label is one, too; its answer is the last turn.  A preference is two of them.

``data.fields`` maps these names to those of other rows, and ``data.roles`` maps roles.

A message or a row may have a ``weight`` from 0 to 1: the factor of the losses of its tokens.
Weights of both are multiplied.  ``weight = 0`` or ``train = false`` says not to train it.

This module does not import torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from weft.data.fragments import find_field

ROLES = ("system", "developer", "user", "assistant", "tool")
# Roles of other programs: ShareGPT, LLaMA-Factory, Llama 3, Gemma.
ROLE_NAMES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
FUNCTION_CALL = "function_call"  # LLaMA-Factory: an assistant's turn whose text is a call as JSON

# The names of a field, in the order in which weft looks for them.  The first is the name of
# data.fields.
FIELDS: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "conversation"),
    "tools": ("tools",),
    "system": ("system",),
    "prompt": ("prompt",),
    "response": ("response", "completion"),
    "instruction": ("instruction",),
    "input": ("input",),
    "output": ("output",),
    "history": ("history",),
    "question": ("question",),
    "answer": ("answer",),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
    "label": ("label",),
    "weight": ("weight",),
    "train": ("train",),
}
# Fields of a message.
MESSAGE_FIELDS = {"role": ("role", "from"), "content": ("content", "value", "text")}
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# Question and answer: the pairs of fields that make a conversation.
PAIRS = (
    ("prompt", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
)
FORMS = "messages, and neither prompt and response nor instruction and output"
NUMBER = re.compile(r"\d+(\.\d*)?|\.\d+")
SURROGATE = re.compile("[\ud800-\udfff]")

Message = dict[str, Any]


class InvalidConversation(Exception):
    """Reason why a line is not a conversation; the caller adds its position."""


class Example(NamedTuple):
    """Conversation; the loss covers assistant turns from message ``loss_start`` on.

    ``weights``: factors of the losses of the messages; those with 0 are only read.  Empty: 1.
    ``label``: True or False for a labeled answer.
    """

    messages: list[Message]
    tools: list[Any] | None
    loss_start: int
    weights: tuple[float, ...] = ()
    label: bool | None = None

    def weight_of(self, number: int) -> float:
        """Return the weight of a message."""
        return self.weights[number] if self.weights else 1.0

    @property
    def has_fractions(self) -> bool:
        """Return True if a trained turn has a weight other than 1."""
        return any(self.weight_of(number) != 1 for number in self.trained_turns)

    @property
    def trained_turns(self) -> list[int]:
        """The numbers of the messages to train on."""
        return [
            number
            for number, message in enumerate(self.messages)
            if message["role"] == "assistant"
            and number >= self.loss_start
            and self.weight_of(number)
        ]


@dataclass(frozen=True)
class RowFormat:
    """Names of fields and roles in the rows of a source.

    Args:
        preferences: rows are pairs of a chosen and a rejected answer.
        fields: ``data.fields``: names of a row by the names of `FIELDS` and `MESSAGE_FIELDS`.
        roles: ``data.roles``: roles of weft by those of the rows.
        unpaired: rows are answers with a label, or preferences, which are two of them.
    """

    preferences: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    unpaired: bool = False

    @property
    def columns(self) -> list[str]:
        """The fields and columns that rows may have."""
        return [name for each in FIELDS for name in self.names(each)]

    def names(self, name: str) -> tuple[str, ...]:
        """Return the names under which rows have a field."""
        if name in self.fields:
            return (self.fields[name],)
        return (FIELDS | MESSAGE_FIELDS)[name]


class Row:
    """A row, which records the fields that were read."""

    def __init__(self, record: Mapping[str, Any], form: RowFormat) -> None:
        self.record, self.form = record, form
        self.read: set[str] = set()
        self.has_encoded_arguments = False  # of tool calls: JSON text

    def find(self, name: str) -> str | None:
        """Return the name under which the row has a field that is not null."""
        for each in self.form.names(name):
            try:
                if find_field(self.record, each) is not None:
                    self.read.add(each.partition(".")[0] if each not in self.record else each)
                    return each
            except KeyError:
                continue
        return None

    def get(self, name: str) -> Any:
        """Return a field; None if there is none."""
        found = self.find(name)
        return None if found is None else find_field(self.record, found)

    def get_text(self, name: str) -> str:
        """Return a field that is text.

        Raises:
            InvalidConversation: it is not.
        """
        found = self.find(name)
        text = None if found is None else find_field(self.record, found)
        if not isinstance(text, str):
            raise InvalidConversation(f"{found or name} is not a string")
        return text


# --------------------------------------------------------------------------- rows


def parse_line(line: bytes, form: RowFormat) -> list[Example]:
    """Parse the conversation of a line, or the two of a preference (chosen first).

    A row that says not to train any of it gives no examples.

    Raises:
        InvalidConversation: the line is malformed.
    """
    return parse_row(read_row(line, form))


def read_row(line: bytes, form: RowFormat) -> Row:
    """Read the row of a line.

    Raises:
        InvalidConversation: the line is not a JSON object.
    """
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidConversation(f"is not UTF-8 (byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        raise InvalidConversation(f"is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise InvalidConversation("is not a JSON object")
    if b"\\ud" in line.lower() and SURROGATE.search(json.dumps(record, ensure_ascii=False)):
        raise InvalidConversation("has a lone surrogate (\\ud800 to \\udfff)")
    return Row(record, form)


def parse_row(row: Row) -> list[Example]:
    """Return the examples of a row; see `parse_line`."""
    if not (row.form.preferences or row.form.unpaired):
        if row.find("chosen") is not None and row.find("messages") is None:
            raise InvalidConversation("is a preference; use data.format=preferences")
        if row.get("label") is False:
            rule = "has label false: its answer is a bad one, and would be trained as a good one"
            remedy = "Remove such rows, or use data.format=unpaired and train.objective=kto"
            raise InvalidConversation(f"{rule}. {remedy}")
    elif row.form.preferences and row.find("chosen") is None and row.get("label") is not None:
        rule = "is an answer with a label (KTO)"
        remedy = "use data.format=unpaired and train.objective=kto"
        raise InvalidConversation(f"{rule}; {remedy}")
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = _decode_json(tools, list)
    if tools is not None and not isinstance(tools, list):
        raise InvalidConversation("tools is not a list")
    row_weight = _get_weight(row.get("weight"), row.get("train"), "the row")
    parsed: list[tuple[list[Any], int, bool | None]]
    if row.form.unpaired:
        parsed = _parse_unpaired(row)
    elif row.form.preferences:
        parsed = [(*each, None) for each in _parse_preference(row)]
    else:
        parsed = [(*_parse_conversation(row), None)]
    examples = []
    for messages, loss_start, label in parsed:
        validated, weights = _validate_messages(messages, row)
        products = tuple(row_weight * weight for weight in weights)
        is_weighted = any(weight != 1 for weight in products)
        example = Example(validated, tools, loss_start, products if is_weighted else (), label)
        if not any(message["role"] == "assistant" for message in validated[loss_start:]):
            raise InvalidConversation("has no assistant turn to train on")
        examples.append(example)
    if not all(example.trained_turns for example in examples):
        return []
    is_compared = row.form.preferences or row.form.unpaired
    if is_compared and any(example.has_fractions for example in examples):
        rule = "has a weight between 0 and 1; a preference compares answers as a whole"
        raise InvalidConversation(f"{rule}, so its weights are 0 or 1")
    return examples


def _get_weight(weight: Any, train: Any, owner: str) -> float:
    """Return the weight of a row or message; 0 if ``train`` is false."""
    if isinstance(weight, str):  # of CSV
        weight = float(weight) if NUMBER.fullmatch(weight) else weight or 1
    weight = 1 if weight is None else weight
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 1:
        raise InvalidConversation(f"{owner} has the weight {weight!r}, which is not from 0 to 1")
    if train is not None and not isinstance(train, bool):
        raise InvalidConversation(f"{owner} has train={train!r}, which is neither true nor false")
    return 0.0 if train is False else float(weight)


def _parse_conversation(row: Row) -> tuple[list[Any], int]:
    """Return the messages of a conversation, and where its trained part begins."""
    if row.find("messages") is not None:
        return _with_system(row, _as_messages(row, "messages")), 0
    for question, answer in PAIRS:
        if row.find(question) is None or row.find(answer) is None:
            continue
        prompt, response = row.get(question), row.get(answer)
        history = _parse_history(row.get("history")) if question == "instruction" else []
        if isinstance(prompt, list):
            messages = [*prompt, *_as_answer(row, answer)]
            return _with_system(row, messages), len(messages) - len(_as_answer(row, answer))
        user = {"role": "user", "content": _get_prompt(row, question)}
        if isinstance(response, list):
            return _with_system(row, [*history, user, *_as_answer(row, answer)]), 0
        assistant = {"role": "assistant", "content": row.get_text(answer)}
        return _with_system(row, [*history, user, assistant]), 0
    raise InvalidConversation(f"has no {FORMS}{_describe_keys(row.record)}")


def _with_system(row: Row, messages: list[Any]) -> list[Any]:
    """Return the messages with the system text of the row, unless they begin with one."""
    if not row.get("system") or _roles(messages[:1], row.form) == ["system"]:
        return messages
    return [{"role": "system", "content": row.get_text("system")}, *messages]


def _as_messages(row: Row, name: str) -> list[Any]:
    """Return a field that is a list of messages, or its JSON."""
    value = row.get(name)
    if isinstance(value, str):
        value = _decode_json(value, list)
    if not isinstance(value, list):
        raise InvalidConversation(f"{row.find(name)} is not a list")
    return value


def _as_answer(row: Row, name: str) -> list[Any]:
    """Return an answer, a text or messages, as messages."""
    value = row.get(name)
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, list):
        raise InvalidConversation(f"{name} is neither a string nor a list of messages")
    return value


def _parse_history(history: Any) -> list[Any]:
    """Return earlier turns, which are pairs of a question and an answer."""
    messages: list[Any] = []
    for pair in history or []:
        if not (
            isinstance(pair, list) and len(pair) == 2 and all(isinstance(t, str) for t in pair)
        ):
            raise InvalidConversation("history is not a list of pairs of texts")
        messages.append({"role": "user", "content": pair[0]})
        messages.append({"role": "assistant", "content": pair[1]})
    return messages


def _parse_preference(row: Row) -> list[tuple[list[Any], int]]:
    for name in ("chosen", "rejected"):
        if row.find(name) is None:
            raise InvalidConversation(f"has no {name}{_describe_keys(row.record)}")
    try:
        chosen, rejected = (_as_answer(row, name) for name in ("chosen", "rejected"))
    except InvalidConversation:
        rule = "chosen or rejected is neither a string nor a list of messages"
        raise InvalidConversation(rule) from None
    if chosen == rejected:
        raise InvalidConversation("chosen and rejected are equal")
    questions = ("prompt", "instruction", "question")
    question = next((each for each in questions if row.find(each) is not None), None)
    prompt = None if question is None else row.get(question)
    if question is not None and isinstance(prompt, str):
        _check_repeated(prompt, row)
        prompt = [{"role": "user", "content": _get_prompt(row, question)}]
    if prompt is None and row.find("messages") is not None:  # ShareGPT
        prompt = _as_messages(row, "messages")
    if not isinstance(prompt, list | None):
        raise InvalidConversation("prompt is neither a string nor a list of messages")
    is_whole = prompt is None or all(
        _begins_with_user(answer, row.form) for answer in (chosen, rejected)
    )
    if prompt is None or is_whole:  # the answers contain the prompt
        loss_start = next(
            (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b),
            min(len(chosen), len(rejected)),
        )
        if "user" not in _roles(chosen[:loss_start], row.form):
            raise InvalidConversation("has neither a prompt nor answers with equal user turns")
        given = row.get("prompt")
        if isinstance(given, list) and chosen[: len(given)] != given:
            raise InvalidConversation("chosen begins with a user turn, but not with prompt")
    else:
        chosen, rejected, loss_start = prompt + chosen, prompt + rejected, len(prompt)
    if row.get("system") and "system" not in _roles(chosen[:1], row.form):
        system = [{"role": "system", "content": row.get_text("system")}]
        chosen, rejected, loss_start = system + chosen, system + rejected, loss_start + 1
    return [(chosen, loss_start), (rejected, loss_start)]


def _parse_unpaired(row: Row) -> list[tuple[list[Any], int, bool | None]]:
    """Return messages, first message of the answer, and label of each answer."""
    if row.find("chosen") is not None and row.find("rejected") is not None:
        chosen, rejected = _parse_preference(row)
        return [(*chosen, True), (*rejected, False)]
    label = row.get("label")
    if isinstance(label, str):  # of CSV
        label = {"true": True, "1": True, "false": False, "0": False}.get(label.lower(), label)
    if label is None:
        rule = "has neither a label (true or false) nor chosen and rejected"
        raise InvalidConversation(rule + _describe_keys(row.record, "label"))
    if label not in (0, 1):
        raise InvalidConversation(f"has the label {label!r}, which is neither true nor false")
    messages, loss_start = _parse_conversation(row)
    if not loss_start:  # the answer is the last turn
        roles = _roles(messages, row.form)
        loss_start = max((i for i, role in enumerate(roles) if role == "assistant"), default=0)
    return [(messages, loss_start, bool(label))]


def _check_repeated(prompt: str, row: Row) -> None:
    """Refuse answers that begin with the prompt, which would be in the text twice."""
    answers = row.get("chosen"), row.get("rejected")
    if prompt and all(isinstance(text, str) and text.startswith(prompt) for text in answers):
        rule = "chosen and rejected repeat the prompt, which would be in the text twice"
        raise InvalidConversation(f"{rule}. Remove it from them, or leave out prompt")


def _roles(messages: list[Any], form: RowFormat) -> list[Any]:
    return [_get_role(turn, form) if isinstance(turn, dict) else None for turn in messages]


def _get_role(message: Mapping[str, Any], form: RowFormat) -> Any:
    name = next((each for each in form.names("role") if each in message), "role")
    role = message.get(name)
    if not isinstance(role, str):
        return role
    return form.roles.get(role) or ROLE_NAMES.get(role, role)


def _begins_with_user(messages: list[Any], form: RowFormat) -> bool:
    return [role for role in _roles(messages, form) if role != "system"][:1] == ["user"]


def _get_prompt(row: Row, name: str) -> str:
    # The field input may be the question itself, by data.fields.
    has_input = row.get("input") and row.find("input") != row.find(name)
    return row.get_text(name) + (f"\n\n{row.get_text('input')}" if has_input else "")


def _decode_json(text: str, kind: type) -> Any:
    """Return the value of JSON text, if it has this type; else the text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, kind) else text


# --------------------------------------------------------------------------- messages


def _validate_messages(messages: list[Any], row: Row) -> tuple[list[Message], list[float]]:
    """Return valid messages, and their weights.

    Fields of null are left out, as in transformers.
    """
    if not messages:
        raise InvalidConversation("is an empty conversation")
    form, validated, weights = row.form, list[Message](), list[float]()
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise InvalidConversation(f"message {number} is not a JSON object")
        message = {key: value for key, value in message.items() if value is not None}
        role_name, content_name = (
            next((each for each in form.names(name) if each in message), name)
            for name in ("role", "content")
        )
        role, content = _get_role(message, form), message.pop(content_name, None)
        message.pop(role_name, None)
        if role is None:
            rule = f"message {number} has no role"
            raise InvalidConversation(rule + _describe_keys(message, "role"))
        if role == FUNCTION_CALL and role not in form.roles:
            role, content, message["tool_calls"] = "assistant", None, _parse_call(content, number)
        if role not in ROLES:
            rule = f"message {number} has the role {role!r}, which is not one of {ROLES}"
            raise InvalidConversation(f"{rule}; map it with data.roles, such as {role}=user")
        if content is None and not message.get("tool_calls"):
            rule = f"message {number} has no content"
            raise InvalidConversation(rule + _describe_keys(message, "content"))
        is_parts = isinstance(content, list) and all(map(_is_text, content))
        if not (is_parts or isinstance(content, str | None)):
            rule = f"the content of message {number} is not text"
            if isinstance(content, list):
                kinds = {str(p.get("type")) for p in content if isinstance(p, dict)} - {"text"}
                rule += f", but has {', '.join(sorted(kinds))}: weft trains text" if kinds else ""
            raise InvalidConversation(rule)
        weight, train = message.pop("weight", None), message.pop("train", None)
        weights.append(_get_weight(weight, train, f"message {number}"))
        has_content = {} if content is None else {"content": content}
        message = {"role": role, **has_content, **message}
        validated.append(_decode_arguments(_normalize_reasoning(message), row))
    return validated, weights


def _parse_call(content: Any, number: int) -> list[Any]:
    """Return the tool calls that the text of a message is, as JSON."""
    calls = _decode_json(content, object) if isinstance(content, str) else content
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        rule = f"message {number} has the role {FUNCTION_CALL}, but its text is not a call as JSON"
        raise InvalidConversation(f"{rule} with name and arguments")
    return [{"type": "function", "function": call} for call in calls]


def _is_text(part: Any) -> bool:
    """Return True for a part of a content that is text, not an image."""
    is_part = isinstance(part, dict) and part.get("type") == "text"
    return is_part and isinstance(part.get("text"), str)


def _normalize_reasoning(message: Message) -> Message:
    """Return a message with its reasoning under both names that templates read."""
    for name in REASONING_FIELDS:
        if name in message:
            reasoning = message[name]
            return {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _decode_arguments(message: Message, row: Row) -> Message:
    """Return a message whose tool calls have objects, not JSON text, as arguments.

    Servers decode the text, too, so that the model reads the same in training and in use.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    decoded = []
    for call in calls:
        if isinstance(call, dict):
            function = call.get("function")
            inner: dict[str, Any] = function if isinstance(function, dict) else call
            if isinstance(text := inner.get("arguments"), str):
                arguments = _decode_json(text, dict)
                row.has_encoded_arguments |= arguments is not text
                inner = inner | {"arguments": arguments}
            call = call | {"function": inner} if inner is not call and function else inner
        decoded.append(call)
    return message | {"tool_calls": decoded}


def _describe_keys(record: Mapping[str, Any], missing: str = "") -> str:
    """Return the keys of a row, and the mapping that would read a missing field."""
    lists = [
        name
        for name, value in record.items()
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value)
    ]
    texts = [name for name, value in record.items() if isinstance(value, str) and value]
    keys = ", ".join(list(record)[:8]) or "no fields"
    mapping = ""
    if missing:
        mapping = f"{missing}={texts[0]}" if texts else mapping
    elif lists:
        mapping = f"messages={lists[0]}"
    elif len(texts) > 1:
        mapping = f"prompt={texts[0]},response={texts[1]}"
    example = f"; data.fields names them, such as --data.fields {mapping}" if mapping else ""
    return f"; it has {keys}{example}"
