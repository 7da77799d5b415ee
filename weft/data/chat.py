"""Conversations: lines of JSON, written as text by a chat template, with what is learned marked.

*One line, one example.*  Known are ``messages`` (the shape of OpenAI and Hugging Face), ``prompt``
with ``response`` or ``completion``, and ``instruction`` with ``output`` (and ``input``).  A
preference has ``prompt``, ``chosen`` and ``rejected``; or, without ``prompt``, two conversations
that begin alike.

*The template* is the model's own program in Jinja, from ``chat_template.jinja`` or
``tokenizer_config.json``.  It comes with a model from elsewhere, so it runs in Jinja's sandbox, and
it sees what `transformers` would show it: the same text comes out, and so the same token ids.

*What is learned* are the assistant's turns.  Which characters those are, a template may say itself
with ``{% generation %}`` ... ``{% endgeneration %}``.  Each such block returns its text between two
marks, which are taken out again.  Most templates have no such blocks.  Then the conversation is
written several times, up to each assistant's turn (with the header that asks for an answer) and up
to its end.  What the second has more than the first is the turn; both must be exact beginnings of
the whole, for otherwise a later message changes how an earlier one is written (some templates drop
the reasoning of earlier turns), and a guess would train on the wrong tokens.  So cut, a turn ends
with the last special token in it: what a template writes after that nobody has to generate.

Nothing here imports torch.
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
from weft.config.schema import DataSection
from weft.data.token_store import TEMPLATE_FILE, TOKENS_FILE
from weft.data.tokenizer import load_tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
# Noncharacters of Unicode, which are in no text: where a generation block begins and ends.
BEGIN, END = "\ufdd0", "\ufdd1"
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
HALF = re.compile("[\ud800-\udfff]")  # of a character beyond U+FFFF, as UTF-16 writes it

# What a line, or a row of a table, may have.
COLUMNS = (
    *("messages", "tools", "prompt", "response", "completion", "instruction", "input", "output"),
    *("system", "chosen", "rejected"),
)

Message = dict[str, Any]


class Malformed(Exception):
    """What is wrong with a line; its place is added by who knows it."""


class Example(NamedTuple):
    """A conversation of which the assistant's turns from message ``first`` on are learned."""

    messages: list[Message]
    tools: list[Any] | None
    first: int


# --------------------------------------------------------------------------- lines


def parse(line: bytes, preferences: bool) -> list[Example]:
    """The conversation of a line, or the two of a preference: chosen, then rejected.

    Raises:
        Malformed: saying what is wrong with it.
    """
    try:
        found = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Malformed(f"is not UTF-8 (byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        raise Malformed(f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Malformed("is no JSON object")
    if b"\\ud" in line.lower() and HALF.search(json.dumps(found, ensure_ascii=False)):
        raise Malformed("has half of a character (a lone surrogate, \\ud800 to \\udfff)")
    if not preferences and "chosen" in found and "messages" not in found:
        raise Malformed("is a preference; use data.format preferences")
    tools = found.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise Malformed("tools is no list")
    examples = _preference(found) if preferences else [(_messages(found), 0)]
    return [Example(_checked(messages, first), tools, first) for messages, first in examples]


def _messages(found: dict[str, Any]) -> Any:
    if "messages" in found:
        return found["messages"]
    for asked, answers in (("prompt", ("response", "completion")), ("instruction", ("output",))):
        answer = next((name for name in answers if name in found), None)
        if asked in found and answer is not None:
            more = f"\n\n{_text(found, 'input')}" if found.get("input") else ""
            user = {"role": "user", "content": _text(found, asked) + more}
            messages = [user, {"role": "assistant", "content": _text(found, answer)}]
            if found.get("system"):
                messages.insert(0, {"role": "system", "content": _text(found, "system")})
            return messages
    raise Malformed("has no messages, and neither prompt and response nor instruction and output")


def _preference(found: dict[str, Any]) -> list[tuple[Any, int]]:
    for name in ("chosen", "rejected"):
        if name not in found:
            raise Malformed(f"has no {name}")
    answers = [
        [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        for answer in (found["chosen"], found["rejected"])
    ]
    if not all(isinstance(answer, list) for answer in answers):
        raise Malformed("chosen or rejected is neither a text nor a list of messages")
    chosen, rejected = answers
    if chosen == rejected:
        raise Malformed("chosen and rejected are the same")
    prompt = found.get("prompt")
    if isinstance(prompt, str) and all(_asks(found[name]) for name in ("chosen", "rejected")):
        prompt = None  # it stands in both conversations, too
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if prompt is None:  # it is what both begin with
        first = next(
            (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b),
            min(len(chosen), len(rejected)),
        )
        return [(chosen, first), (rejected, first)]
    if not isinstance(prompt, list):
        raise Malformed("prompt is neither a text nor a list of messages")
    return [(prompt + answer, len(prompt)) for answer in answers]


def _asks(answer: Any) -> bool:
    """Whether an answer is a whole conversation, with the user's question."""
    if not isinstance(answer, list):
        return False
    return any(isinstance(turn, dict) and turn.get("role") == "user" for turn in answer[:2])


def _text(found: dict[str, Any], name: str) -> str:
    if not isinstance(found[name], str):
        raise Malformed(f"{name} is no text")
    return str(found[name])


def _checked(messages: Any, first: int) -> list[Message]:
    """Messages without their nulls, as transformers hands them on."""
    if not isinstance(messages, list):
        raise Malformed("messages is no list")
    if not messages:
        raise Malformed("is an empty conversation")
    checked = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise Malformed(f"message {number} is no JSON object")
        message = {key: value for key, value in message.items() if value is not None}
        role, content = message.get("role"), message.get("content")
        if role is None:
            raise Malformed(f"message {number} has no role")
        if role not in ROLES:
            raise Malformed(f"message {number} has the role {role!r}, which is none of {ROLES}")
        if content is None and not message.get("tool_calls"):
            raise Malformed(f"message {number} has no content")
        if not isinstance(content, str | list | None):
            raise Malformed(f"the content of message {number} is no text")
        checked.append(_with_reasoning(message))
    if not any(message["role"] == "assistant" for message in checked[first:]):
        raise Malformed("has no assistant's turn, so there is nothing to learn")
    return checked


def _with_reasoning(message: Message) -> Message:
    """A message's reasoning under the names that templates read, as transformers gives it."""
    for name in ("reasoning_content", "thinking", "reasoning"):
        if name in message:
            found = message[name]
            return {"thinking": found, **message, "reasoning_content": found}
    return message


# --------------------------------------------------------------------------- template


@dataclass(frozen=True)
class Template:
    """A chat template.

    Args:
        sources: text of the template, under ``default``; there may be another, ``tool_use``.
        special: what templates call bos_token, eos_token and so on.
        place: where it came from, for messages.
    """

    sources: Mapping[str, str]
    special: Mapping[str, str]
    place: str
    _compiled: dict[str, Any] = field(default_factory=dict, init=False, compare=False)

    def __post_init__(self) -> None:
        self._compiled.update({name: _compile(text) for name, text in self.sources.items()})

    def render(self, example: Example, messages: int, ask: bool) -> str:
        """The first ``messages`` of a conversation as text, with marks around what is generated.

        Args:
            ask: add the header that asks for an answer (``add_generation_prompt``).

        Raises:
            Malformed: the template refuses it, with its own message.
        """
        try:
            text: str = self._compiled[self._name(example)].render(
                messages=example.messages[:messages],
                tools=example.tools,
                documents=None,
                add_generation_prompt=ask,
                **self.special,
            )
        except Exception as error:  # whatever a program from elsewhere raises
            raise Malformed(f"the chat template refuses it: {error}") from None
        return text

    def write(self, example: Example, special: re.Pattern[str]) -> tuple[str, list[range]]:
        """The conversation as text, and its characters that are learned.

        Args:
            special: matches text that ends with a special token, and blanks behind it.

        Raises:
            Malformed: the template refuses it, or its turns cannot be told apart.
        """
        if any(mark in json.dumps(example, ensure_ascii=False) for mark in (BEGIN, END)):
            raise Malformed(f"has the noncharacter {BEGIN!a} or {END!a}")
        turns = [i for i, each in enumerate(example.messages) if each["role"] == "assistant"]
        learned = [turn for turn in turns if turn >= example.first]
        text = self.render(example, len(example.messages), ask=False)
        if GENERATION.search(self.sources[self._name(example)]):
            text, spans = without_marks(text)
            if example.first and len(spans) != len(turns):
                rule = f"generation blocks of the chat template, for {len(turns)} turns"
                raise Malformed(f"{len(spans)} {rule}: which are the answer's cannot be told")
            return text, spans[len(turns) - len(learned) :] if example.first else spans
        spans = []
        for turn in learned:
            before, until = self._cut(example, turn, text)
            if ending := special.match(text, before, until):
                until = ending.end(1)
            spans.append(range(before, until))
        return text, spans

    def _cut(self, example: Example, turn: int, text: str) -> tuple[int, int]:
        """Where a turn begins and ends."""
        try:
            before = self.render(example, turn, ask=True)
            until = self.render(example, turn + 1, ask=False)
        except Malformed as error:
            raise Malformed(f"{CANNOT_BE_CUT} ({error}, up to message {turn + 1})") from None
        if not (text.startswith(until) and until.startswith(before)):
            raise Malformed(f"{CANNOT_BE_CUT} (message {turn + 1})")
        return len(before), len(until)

    def _name(self, example: Example) -> str:
        return "tool_use" if example.tools is not None and "tool_use" in self.sources else "default"


CANNOT_BE_CUT = (
    "the chat template has no generation blocks, and writes the beginning of this conversation "
    "otherwise than the whole, so that turns cannot be told apart"
)
CUT_REMEDY = (
    "give a data.chat_template with {% generation %} and {% endgeneration %} around what the "
    "assistant says, or cut such conversations at their first answer"
)


def without_marks(text: str) -> tuple[str, list[range]]:
    """Text without its marks, and what was between them; marks inside of marks count for one."""
    plain: list[str] = []
    spans: list[range] = []
    size = depth = begin = 0
    for piece in re.split(f"([{BEGIN}{END}])", text):
        if piece == BEGIN:
            begin = begin if depth else size
            depth += 1
        elif piece == END:
            depth -= 1
            if not depth:
                spans.append(range(begin, size))
        else:
            plain.append(piece)
            size += len(piece)
    return "".join(plain), spans


def _compile(source: str) -> Any:
    """In the sandbox, and with what templates of Hugging Face may rely on.

    Raises:
        jinja2.TemplateError: it is no template.
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
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # Jinja's own is for HTML

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment.from_string(source)


def load_template(section: DataSection) -> Template:
    """The template of the tokenizer at ``data.tokenizer``, or the one at ``data.chat_template``.

    Looked for beside ``tokenizer.json``, and in the folder ``huggingface`` there, where a run that
    was imported keeps it.

    Raises:
        InvalidConfig: there is none, or it is no template.
    """
    try:
        import jinja2
    except ModuleNotFoundError:
        rule, remedy = "needs jinja2", "pip install 'weft[chat]'"
        raise InvalidConfig([ConfigError("data.format", section.format, rule, remedy)]) from None

    beside = Path(section.tokenizer).expanduser().parent
    folders = [beside, beside / "huggingface"]
    given = Path(section.chat_template).expanduser()
    key, shown = "data.chat_template", section.chat_template
    try:
        config = next(filter(None, (_json(f / TOKENS_FILE) for f in folders)), {})
        special = _special_tokens(config, folders)
        files = [given] if shown != "auto" else [f / TEMPLATE_FILE for f in folders]
        file = next((file for file in files if file.is_file()), None)
        if file is not None:
            return Template({"default": file.read_text("utf-8")}, special, str(file))
        if shown != "auto":
            raise InvalidConfig(
                [ConfigError(key, shown, "does not exist", "give a template's file")]
            )
        found = config.get("chat_template")
        if isinstance(found, list):  # several, by name
            found = {each["name"]: each["template"] for each in found}
        sources = ({"default": found} if isinstance(found, str) else found) if found else {}
        if "default" not in sources:
            rule = f"there is neither chat_template.jinja nor a template in {beside}"
            remedy = "give --data.chat_template FILE, or the tokenizer of a model for conversations"
            raise InvalidConfig([ConfigError(key, shown, rule, remedy)])
        return Template(sources, special, str(beside / TOKENS_FILE))
    except jinja2.TemplateError as error:
        rule = f"is no chat template: line {getattr(error, 'lineno', '?')}: {error}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = f"cannot be read: {type(error).__name__}: {error}"
    raise InvalidConfig([ConfigError(key, shown, rule, "give a file that transformers would read")])


def _json(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no JSON object")
    return found


NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def _special_tokens(config: dict[str, Any], folders: Sequence[Path]) -> dict[str, str]:
    """``bos_token`` and its like, of which older files have some elsewhere."""
    older = next(filter(None, (_json(f / "special_tokens_map.json") for f in folders)), {})
    found = {}
    for name in (f"{each}_token" for each in NAMED_TOKENS):
        token = config.get(name) or older.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


# --------------------------------------------------------------------------- tokens


class Encoded(NamedTuple):
    """Token ids of a conversation, and for each whether it is learned: int64 and bool (n,)."""

    tokens: NDArray[np.int64]
    learned: NDArray[np.bool_]


class Writer:
    """From conversations to tokens.

    Args:
        tokenizer: path of its ``tokenizer.json``.
    """

    def __init__(self, tokenizer: str, template: Template) -> None:
        self.template = template
        self.tokenizer, self.hash = load_tokenizer(tokenizer)
        # Unlike in texts, what looks like a special token in a conversation is one: it is the
        # template that writes them.
        self.tokenizer.encode_special_tokens = False
        # One that adds nothing: the byte-level one would take blanks out of the tokens' places.
        self.tokenizer.post_processor = processors.TemplateProcessing("$A", "$A $B", [])
        self._ending = endings(self.tokenizer)

    def write(self, example: Example) -> tuple[str, list[range]]:
        """See `Template.write`."""
        return self.template.write(example, self._ending)

    def ask(self, messages: list[Message]) -> list[int]:
        """Token ids of a conversation, up to where the assistant is to answer.

        Raises:
            Malformed: the template refuses it.
        """
        text, _ = without_marks(
            self.template.render(Example(messages, None, 0), len(messages), True)
        )
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def ends(self) -> set[int]:
        """The special token with which the template ends an answer, if it is known to."""
        turns = [{"role": role, "content": "x"} for role in ("user", "assistant")]
        try:
            [found] = self.encode([self.write(Example(turns, None, 0))])
        except Malformed:  # it wants more than that
            return set()
        added = self.tokenizer.get_added_tokens_decoder()
        last = found.tokens[found.learned][-1:].tolist()
        return {token for token in last if token in added and added[token].special}

    def encode(self, written: Sequence[tuple[str, list[range]]]) -> list[Encoded]:
        """Tokens of several written conversations, on all cores."""
        texts = [text for text, _ in written]
        encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return [
            Encoded(np.array(each.ids, np.int64), learned(np.array(each.offsets), spans))
            for each, (_, spans) in zip(encodings, written, strict=True)
        ]


def endings(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Matches text of which a special token is the last but blanks; group 1 ends with the token."""
    added = tokenizer.get_added_tokens_decoder().values()
    special = [re.escape(token.content) for token in added if token.special] or ["(?!)"]
    return re.compile(rf"(.*(?:{'|'.join(special)}))\s*\Z", re.DOTALL)


def learned(offsets_N2: NDArray[np.int64], spans: Sequence[range]) -> NDArray[np.bool_]:
    """Which tokens have a character of one of the ``spans``: bool (n,).

    Args:
        offsets_N2: first character of each token, and the one after its last.
    """
    found = np.zeros(len(offsets_N2), bool)
    if not len(offsets_N2):
        return found
    begins_N, ends_N = offsets_N2.T
    for span in filter(len, spans):
        [inside] = np.nonzero((begins_N < span.stop) & (ends_N > span.start))
        if len(inside):
            found[inside[0] : inside[-1] + 1] = True
    return found
