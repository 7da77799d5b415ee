"""Conversations: lines of JSON, rendered by a chat template, with a loss mask.

*Lines.*  A line is one example.  Supported are ``messages`` (as in OpenAI and Hugging Face data),
``prompt`` with ``response`` or ``completion``, and ``instruction`` with ``output`` (and ``input``).
A preference has ``prompt``, ``chosen`` and ``rejected``, or only two conversations with a common
beginning.

*Template.*  The chat template is a Jinja program from ``chat_template.jinja`` or
``tokenizer_config.json``.  It may come from an untrusted model, so it runs in Jinja's sandbox.  It
gets the same variables as in `transformers`, so text and token ids are the same.

*Loss mask.*  The model trains on the assistant's turns.  A template may mark them with ``{%
generation %}`` ... ``{% endgeneration %}``; these blocks render their text between two markers,
which are then removed.  Most templates have no such blocks.  Then the conversation is also rendered
up to each assistant turn (with the generation prompt) and up to its end; the difference is the
turn.  Both renderings must be prefixes of the full text.  Otherwise a later message changes an
earlier one (some templates drop the reasoning of earlier turns), and a guess would train on the
wrong tokens.  A turn found in this way ends with its last special token: the model does not
generate what the template writes after it.

This module does not import torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, processors

from weft.config.errors import ConfigError, InvalidConfig
from weft.config.files import expand_path
from weft.config.schema import DataSection
from weft.data.document_tokens import load_document_tokens
from weft.data.render_limits import RenderLimitError, limit_rendering
from weft.data.token_store import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE
from weft.data.tokenizer import load_tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
# Markers of generation blocks: noncharacters of Unicode, which no text contains.
BEGIN, END = "\ufdd0", "\ufdd1"
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
SURROGATE = re.compile("[\ud800-\udfff]")

# Fields of a line or columns of a row.
COLUMNS = (
    *("messages", "tools", "prompt", "response", "completion", "instruction", "input", "output"),
    *("system", "chosen", "rejected"),
)

Message = dict[str, Any]


class InvalidConversation(Exception):
    """Reason why a line is not a conversation; the caller adds its position."""


class Example(NamedTuple):
    """Conversation; the loss covers assistant turns from message ``loss_start`` on."""

    messages: list[Message]
    tools: list[Any] | None
    loss_start: int


# --------------------------------------------------------------------------- lines


def parse_line(line: bytes, preferences: bool) -> list[Example]:
    """Parse the conversation of a line, or the two of a preference (chosen first).

    Raises:
        InvalidConversation: the line is malformed.
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
    if not preferences and "chosen" in record and "messages" not in record:
        raise InvalidConversation("is a preference; use data.format=preferences")
    tools = record.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise InvalidConversation("tools is not a list")
    examples = _parse_preference(record) if preferences else [(_parse_messages(record), 0)]
    return [
        Example(_validate_messages(messages, loss_start), tools, loss_start)
        for messages, loss_start in examples
    ]


def _parse_messages(record: dict[str, Any]) -> Any:
    if "messages" in record:
        return record["messages"]
    for question, answer_names in (
        ("prompt", ("response", "completion")),
        ("instruction", ("output",)),
    ):
        answer = next((name for name in answer_names if name in record), None)
        if question in record and answer is not None:
            user = {"role": "user", "content": _get_prompt(record, question)}
            messages = [user, {"role": "assistant", "content": _get_text(record, answer)}]
            if record.get("system"):
                messages.insert(0, {"role": "system", "content": _get_text(record, "system")})
            return messages
    raise InvalidConversation(
        "has no messages, and neither prompt and response nor instruction and output"
    )


def _parse_preference(record: dict[str, Any]) -> list[tuple[Any, int]]:
    for name in ("chosen", "rejected"):
        if name not in record:
            raise InvalidConversation(f"has no {name}")
    answers = [
        [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        for answer in (record["chosen"], record["rejected"])
    ]
    if not all(isinstance(answer, list) for answer in answers):
        raise InvalidConversation("chosen or rejected is neither a string nor a list of messages")
    chosen, rejected = answers
    if chosen == rejected:
        raise InvalidConversation("chosen and rejected are equal")
    prompt = record.get("prompt")
    if (prompt is None and "instruction" in record) or isinstance(prompt, str):
        text = _get_prompt(record, "instruction" if prompt is None else "prompt")
        prompt = [{"role": "user", "content": text}]
    if not isinstance(prompt, list | None):
        raise InvalidConversation("prompt is neither a string nor a list of messages")
    if prompt is None or all(map(_begins_with_user, answers)):  # the answers contain the prompt
        loss_start = next(
            (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b),
            min(len(chosen), len(rejected)),
        )
        if "user" not in _roles(chosen[:loss_start]):
            raise InvalidConversation("has neither a prompt nor answers with equal user turns")
        given = record.get("prompt")
        if isinstance(given, list) and chosen[: len(given)] != given:
            raise InvalidConversation("chosen begins with a user turn, but not with prompt")
    else:
        chosen, rejected, loss_start = prompt + chosen, prompt + rejected, len(prompt)
    if record.get("system") and "system" not in _roles(chosen[:1]):
        system = [{"role": "system", "content": _get_text(record, "system")}]
        chosen, rejected, loss_start = system + chosen, system + rejected, loss_start + 1
    return [(chosen, loss_start), (rejected, loss_start)]


def _roles(messages: list[Any]) -> list[Any]:
    return [turn.get("role") if isinstance(turn, dict) else None for turn in messages]


def _begins_with_user(messages: list[Any]) -> bool:
    return [role for role in _roles(messages) if role != "system"][:1] == ["user"]


def _get_prompt(record: dict[str, Any], name: str) -> str:
    context = f"\n\n{_get_text(record, 'input')}" if record.get("input") else ""
    return _get_text(record, name) + context


def _get_text(record: dict[str, Any], name: str) -> str:
    if not isinstance(record[name], str):
        raise InvalidConversation(f"{name} is not a string")
    return str(record[name])


def _validate_messages(messages: Any, loss_start: int) -> list[Message]:
    """Return valid messages without null fields, as in transformers."""
    if not isinstance(messages, list):
        raise InvalidConversation("messages is not a list")
    if not messages:
        raise InvalidConversation("is an empty conversation")
    validated = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise InvalidConversation(f"message {number} is not a JSON object")
        message = {key: value for key, value in message.items() if value is not None}
        role, content = message.get("role"), message.get("content")
        if role is None:
            raise InvalidConversation(f"message {number} has no role")
        if role not in ROLES:
            raise InvalidConversation(
                f"message {number} has the role {role!r}, which is not one of {ROLES}"
            )
        if content is None and not message.get("tool_calls"):
            raise InvalidConversation(f"message {number} has no content")
        is_parts = isinstance(content, list) and all(map(_is_text, content))
        if not (is_parts or isinstance(content, str | None)):
            raise InvalidConversation(f"the content of message {number} is not text")
        validated.append(_normalize_reasoning(message))
    if not any(message["role"] == "assistant" for message in validated[loss_start:]):
        raise InvalidConversation("has no assistant turn to train on")
    return validated


def _is_text(part: Any) -> bool:
    """Return True for a part of a content that is text, not an image."""
    is_part = isinstance(part, dict) and part.get("type") == "text"
    return is_part and isinstance(part.get("text"), str)


def _join_parts(message: Message) -> Message:
    """Return a message with one text for parts, as vLLM joins them."""
    if not isinstance(message.get("content"), list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in message["content"])}


def _normalize_reasoning(message: Message) -> Message:
    """Return a message with its reasoning under both names that templates read."""
    for name in ("reasoning_content", "thinking", "reasoning"):
        if name in message:
            reasoning = message[name]
            return {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


# --------------------------------------------------------------------------- template


@dataclass(frozen=True)
class ChatTemplate:
    """Chat template.

    Args:
        sources: template text by name: ``default``, and optionally ``tool_use``.
        special_tokens: bos_token, eos_token and so on.
        path: origin, for messages.
    """

    sources: Mapping[str, str]
    special_tokens: Mapping[str, str]
    path: str
    _compiled: dict[str, Any] = field(default_factory=dict, init=False, compare=False)
    _reads_parts: dict[str, bool] = field(default_factory=dict, init=False, compare=False)

    def __post_init__(self) -> None:
        self._compiled.update(
            {name: _compile_template(text) for name, text in self.sources.items()}
        )
        self._reads_parts.update({name: self._try_parts(name) for name in self.sources})

    def _try_parts(self, name: str) -> bool:
        """Return True if a template prints the texts of parts, not a Python list."""
        content = [{"type": "text", "text": "weft"}]
        messages = [{"role": role, "content": content} for role in ("user", "assistant")]
        try:
            text = self._render(name, messages=messages, tools=None, add_generation_prompt=False)
        except InvalidConfig:
            raise
        except Exception:  # any type, of the template
            return False
        return "weft" in text and "'weft'" not in text and '"weft"' not in text

    def render(self, example: Example, num_messages: int, add_generation_prompt: bool) -> str:
        """Render the first messages, with markers around generation blocks.

        Args:
            example: a conversation, with the tools that its template may show.
            num_messages: number of messages to render.
            add_generation_prompt: append the header of an assistant turn.

        Raises:
            InvalidConversation: the template raises an error.
            InvalidConfig: the template needs too much time or memory.
        """
        name, messages = self._template_name(example), example.messages[:num_messages]
        if not self._reads_parts[name]:
            messages = [_join_parts(message) for message in messages]
        try:
            return self._render(
                name,
                messages=messages,
                tools=example.tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except InvalidConfig:
            raise
        except Exception as error:  # any type, of the template
            raise InvalidConversation(f"the chat template rejects it: {error}") from None

    def _render(self, name: str, **variables: Any) -> str:
        try:
            with limit_rendering():
                text: str = self._compiled[name].render(**variables, **self.special_tokens)
                return text
        except RenderLimitError as error:  # the next conversation would take as long
            rule, remedy = f"{error} for one conversation", "give another template"
            raise InvalidConfig(
                [ConfigError("data.chat_template", self.path, rule, remedy)]
            ) from None

    def render_with_spans(
        self, example: Example, ending: re.Pattern[str]
    ) -> tuple[str, list[range]]:
        """Render a conversation; return the text and the character ranges to train on.

        Args:
            example: a conversation; turns from ``loss_start`` on are trained.
            ending: matches text up to a final special token, and blanks after it.

        Raises:
            InvalidConversation: the template raises an error, or turns cannot be separated.
        """
        if any(marker in json.dumps(example, ensure_ascii=False) for marker in (BEGIN, END)):
            raise InvalidConversation(f"has the noncharacter {BEGIN!a} or {END!a}")
        turns = [i for i, message in enumerate(example.messages) if message["role"] == "assistant"]
        trained_turns = [turn for turn in turns if turn >= example.loss_start]
        text = self.render(example, len(example.messages), add_generation_prompt=False)
        if GENERATION.search(self.sources[self._template_name(example)]):
            text, spans = strip_marks(text)
            if example.loss_start and len(spans) != len(turns):
                rule = f"generation blocks in the chat template for {len(turns)} assistant turns"
                raise InvalidConversation(f"{len(spans)} {rule}: those of the answer are ambiguous")
            return text, spans[len(turns) - len(trained_turns) :] if example.loss_start else spans
        spans = []
        for turn in trained_turns:
            begin, end = self._locate_turn(example, turn, text)
            if match := ending.match(text, begin, end):
                end = match.end(1)
            spans.append(range(begin, end))
        return text, spans

    def _locate_turn(self, example: Example, turn: int, text: str) -> tuple[int, int]:
        """Return begin and end of a turn in the text."""
        try:
            prefix = self.render(example, turn, add_generation_prompt=True)
            prefix_and_turn = self.render(example, turn + 1, add_generation_prompt=False)
        except InvalidConversation as error:
            raise InvalidConversation(
                f"{INSEPARABLE_TURNS} ({error}, up to message {turn + 1})"
            ) from None
        if not (text.startswith(prefix_and_turn) and prefix_and_turn.startswith(prefix)):
            raise InvalidConversation(f"{INSEPARABLE_TURNS} (message {turn + 1})")
        return len(prefix), len(prefix_and_turn)

    def _template_name(self, example: Example) -> str:
        return "tool_use" if example.tools is not None and "tool_use" in self.sources else "default"


INSEPARABLE_TURNS = (
    "the chat template has no generation blocks, and renders the beginning of this conversation "
    "differently from the full one, so that turns cannot be separated"
)
TURNS_REMEDY = (
    "give a data.chat_template with {% generation %} and {% endgeneration %} around the "
    "assistant's text, or truncate such conversations after their first answer"
)


def strip_marks(text: str) -> tuple[str, list[range]]:
    """Return text without markers, and the ranges between them (the outermost)."""
    stripped: list[str] = []
    spans: list[range] = []
    length = depth = begin = 0
    for part in re.split(f"([{BEGIN}{END}])", text):
        if part == BEGIN:
            begin = begin if depth else length
            depth += 1
        elif part == END:
            depth -= 1
            if not depth:
                spans.append(range(begin, length))
        else:
            stripped.append(part)
            length += len(part)
    return "".join(stripped), spans


def _compile_template(source: str) -> Any:
    """Compile a template in the sandbox, with the features that Hugging Face provides.

    Raises:
        jinja2.TemplateError: the template is malformed.
    """
    import jinja2.ext
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return f"{BEGIN}{caller()}{END}"

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, **options
        )  # Jinja's filter escapes for HTML

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    with limit_rendering():
        return environment.from_string(source)


def load_chat_template(section: DataSection) -> ChatTemplate:
    """Load the template at ``data.chat_template``, or the one of the tokenizer.

    auto: weft searches the directory of ``tokenizer.json``, and the directory ``huggingface`` in
    it, where an imported run stores its template.

    Raises:
        InvalidConfig: the template is missing or malformed.
    """
    import jinja2

    directory = section.tokenizer_path.parent
    directories = [directory, directory / "huggingface"]
    template_file = expand_path(section.chat_template)
    key, value = "data.chat_template", section.chat_template
    try:
        config = next(
            filter(None, (_read_json(parent / TOKENIZER_CONFIG_FILE) for parent in directories)), {}
        )
        special = _special_tokens(config, directories)
        files = (
            [template_file]
            if value != "auto"
            else [parent / TEMPLATE_FILE for parent in directories]
        )
        file = next((file for file in files if file.is_file()), None)
        if file is not None:
            return ChatTemplate({"default": file.read_text("utf-8")}, special, str(file))
        if value != "auto":
            raise InvalidConfig(
                [ConfigError(key, value, "does not exist", "give the file of a template")]
            )
        template = config.get("chat_template")
        if isinstance(template, list):  # named templates
            template = {item["name"]: item["template"] for item in template}
        sources = (
            ({"default": template} if isinstance(template, str) else template) if template else {}
        )
        if "default" not in sources:
            rule = f"finds neither chat_template.jinja nor a template in {directory}"
            remedy = "set data.chat_template to a file, or give the tokenizer of a chat model"
            raise InvalidConfig([ConfigError(key, value, rule, remedy)])
        return ChatTemplate(sources, special, str(directory / TOKENIZER_CONFIG_FILE))
    except jinja2.TemplateError as error:
        rule = f"is not a chat template: line {getattr(error, 'lineno', '?')}: {error}"
    except (RecursionError, SyntaxError) as error:  # of Python, to which Jinja compiles it
        rule = f"is not a chat template: it is nested too deeply ({type(error).__name__})"
    except RenderLimitError as error:
        rule = f"is not a chat template: compiling it {error}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = f"cannot be read: {type(error).__name__}: {error}"
    raise InvalidConfig([ConfigError(key, value, rule, "give a file that transformers can read")])


def _read_json(file: Path) -> dict[str, Any]:
    tree = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    if not isinstance(tree, dict):
        raise ValueError(f"{file} is not a JSON object")
    return tree


NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def _special_tokens(config: dict[str, Any], directories: Sequence[Path]) -> dict[str, str]:
    """Return ``bos_token`` and so on, some of which older models store elsewhere."""
    token_map = next(
        filter(
            None, (_read_json(directory / "special_tokens_map.json") for directory in directories)
        ),
        {},
    )
    tokens = {}
    for name in (f"{kind}_token" for kind in NAMED_TOKENS):
        token = config.get(name) or token_map.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            tokens[name] = token
    return tokens


# --------------------------------------------------------------------------- tokens


class EncodedConversation(NamedTuple):
    """Token ids and loss mask of a conversation: int64 and bool (n,)."""

    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]


class ChatEncoder:
    """Encoder of conversations.

    Args:
        tokenizer: path of a ``tokenizer.json``.
    """

    def __init__(self, tokenizer: str, template: ChatTemplate) -> None:
        self.template = template
        self.tokenizer, self.hash = load_tokenizer(tokenizer)
        # Unlike in text, special tokens in a conversation are special: the template writes them.
        self.tokenizer.encode_special_tokens = False
        # Adds nothing; the byte-level post-processor would trim blanks from the offsets.
        self.tokenizer.post_processor = processors.TemplateProcessing("$A", "$A $B", [])
        self._ending = compile_ending_pattern(self.tokenizer)

    def render_with_spans(self, example: Example) -> tuple[str, list[range]]:
        """Render a conversation: see `ChatTemplate.render_with_spans`."""
        return self.template.render_with_spans(example, self._ending)

    def encode_prompt(self, messages: list[Message]) -> list[int]:
        """Return the token ids of a conversation, up to the generation prompt.

        Raises:
            InvalidConversation: the template raises an error.
        """
        text, _ = strip_marks(self.template.render(Example(messages, None, 0), len(messages), True))
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def find_end_tokens(self) -> set[int]:
        """Return the special token that ends an answer in the template, if any."""
        messages = [{"role": role, "content": "x"} for role in ("user", "assistant")]
        try:
            [encoded] = self.encode([self.render_with_spans(Example(messages, None, 0))])
        except InvalidConversation:  # it requires other messages
            return set()
        added = self.tokenizer.get_added_tokens_decoder()
        last_token = encoded.tokens[encoded.loss_mask][-1:].tolist()
        return {token for token in last_token if token in added and added[token].special}

    def find_stop_tokens(self, path: str) -> frozenset[int]:
        """Return the tokens at which generation of an answer stops.

        They are those that the files beside the tokenizer at ``path`` name, and the one of the
        template.  Training, generation and the exported model all use this rule.
        """
        files = load_document_tokens(self.tokenizer, path).end_tokens
        return files | self.find_end_tokens()

    def encode(self, rendered: Sequence[tuple[str, list[range]]]) -> list[EncodedConversation]:
        """Encode rendered conversations, on all cores."""
        texts = [text for text, _ in rendered]
        encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return [
            EncodedConversation(
                np.array(encoding.ids, np.int64),
                compute_loss_mask(np.array(encoding.offsets), spans),
            )
            for encoding, (_, spans) in zip(encodings, rendered, strict=True)
        ]


def compile_ending_pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Return a pattern for text that ends with a special token, then blanks.

    Group 1 ends with the token.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    special = [re.escape(token.content) for token in added if token.special] or ["(?!)"]
    return re.compile(rf"(.*(?:{'|'.join(special)}))\s*\Z", re.DOTALL)


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
