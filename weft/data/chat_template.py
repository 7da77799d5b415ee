"""Chat templates render a conversation as the text that a model reads.

A chat template is a Jinja program from ``chat_template.jinja``, ``additional_chat_templates/`` or
``tokenizer_config.json``.  It may come from an untrusted model, so it runs in Jinja's sandbox, with
limits of time and memory (`weft.data.render_limits`).  It gets the same variables as in
`transformers`, so text and token ids are the same.  ``data.chat_template_args`` adds variables.

Templates differ in what they accept, which weft tries:

- *Content in parts.*  If it prints a list of parts as Python prints it, weft joins their texts.  If
  it prints only parts, as templates of some models that read images do, weft makes a text a part.
- *Arguments of tool calls.*  Most templates take an object; those of DeepSeek take its JSON text.
- *No content.*  A message with tool calls may have none: some templates want null, or no text.

A template may mark the assistant's text with ``{% generation %}`` ... ``{% endgeneration %}``.
These blocks render their text between two markers, which `strip_marks` removes.

This module does not import torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from weft.config.errors import ConfigError, InvalidConfig
from weft.config.files import expand_path
from weft.config.schema import DataSection
from weft.data.chat_rows import InvalidConversation, Message
from weft.data.render_limits import RenderLimitError, limit_rendering
from weft.data.token_store import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE

# Markers of generation blocks: noncharacters of Unicode, which no text contains.
BEGIN, END = "\ufdd0", "\ufdd1"
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
NAMED_TEMPLATES_DIR = "additional_chat_templates"


@dataclass(frozen=True)
class ChatTemplate:
    """Chat template.

    Args:
        sources: template text by name: ``default``, and optionally ``tool_use``.
        special_tokens: bos_token, eos_token and so on.
        path: origin, for messages.
        variables: other variables of the template: ``data.chat_template_args``.
    """

    sources: Mapping[str, str]
    special_tokens: Mapping[str, str]
    path: str
    variables: Mapping[str, Any] = field(default_factory=dict)
    _compiled: dict[str, Any] = field(default_factory=dict, init=False, compare=False)
    _reads_parts: dict[str, bool] = field(default_factory=dict, init=False, compare=False)
    _reads_text: dict[str, bool] = field(default_factory=dict, init=False, compare=False)
    _reads_objects: dict[str, bool] = field(default_factory=dict, init=False, compare=False)

    def __post_init__(self) -> None:
        for name, text in self.sources.items():
            self._compiled[name] = _compile_template(text)
            parts = self._try_content(name, [{"type": "text", "text": "weft"}])
            self._reads_parts[name] = parts
            self._reads_text[name] = not parts or self._try_content(name, "weft")
            self._reads_objects[name] = self._try_arguments(name)

    def _try_content(self, name: str, content: object) -> bool:
        """Return True if a template prints the text of a content, not a Python list."""
        messages = [{"role": role, "content": content} for role in ("user", "assistant")]
        text = self._try(name, messages)
        return "weft" in text and "'weft'" not in text and '"weft"' not in text

    def _try_arguments(self, name: str) -> bool:
        """Return False if a template takes the arguments of a tool call only as JSON text."""

        def shows_call(arguments: object) -> bool:
            function = {"name": "weft", "arguments": arguments}
            calls = [{"id": "weft00000", "type": "function", "function": function}]
            messages: list[Message] = [
                {"role": "user", "content": "x"},
                {"role": "assistant", "tool_calls": calls},
            ]
            return any("weft" in self._try(name, each) for each in _content_variants(messages))

        return shows_call({"a": "b"}) or not shows_call('{"a": "b"}')

    def _try(self, name: str, messages: list[Message]) -> str:
        """Return the rendered messages; no text if the template raises an error."""
        try:
            return self._render(name, messages=messages, tools=None, add_generation_prompt=False)
        except InvalidConfig:
            raise
        except Exception:  # of any type, from the template
            return ""

    def render(
        self, messages: list[Message], tools: list[Any] | None, add_generation_prompt: bool
    ) -> str:
        """Render messages, with markers around generation blocks.

        Args:
            messages: the beginning of a conversation, or all of it.
            tools: the tools that the template may show.
            add_generation_prompt: append the header of an assistant turn.

        Raises:
            InvalidConversation: the template raises an error.
            InvalidConfig: the template needs too much time or memory.
        """
        name = self._name(tools)
        if not self._reads_parts[name]:
            messages = [_join_parts(message) for message in messages]
        if not self._reads_text[name]:
            messages = [_split_content(message) for message in messages]
        if not self._reads_objects[name]:
            messages = [_encode_arguments(message) for message in messages]
        reason: Exception | None = None
        for variant in _content_variants(messages):
            try:
                return self._render(
                    name,
                    messages=variant,
                    tools=tools,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                )
            except InvalidConfig:
                raise
            except Exception as error:  # of any type, from the template
                reason = reason or error
        raise InvalidConversation(f"the chat template rejects it: {reason}") from None

    def _render(self, name: str, **variables: Any) -> str:
        try:
            with limit_rendering():
                names = {**self.special_tokens, **self.variables, **variables}
                text: str = self._compiled[name].render(**names)
                return text
        except RenderLimitError as error:  # the next conversation would take as long
            rule, remedy = f"{error} for one conversation", "give another template"
            raise InvalidConfig(
                [ConfigError("data.chat_template", self.path, rule, remedy)]
            ) from None

    def has_generation_blocks(self, tools: list[Any] | None) -> bool:
        """Return True if the template of a conversation marks the assistant's text."""
        return GENERATION.search(self.sources[self._name(tools)]) is not None

    def _name(self, tools: list[Any] | None) -> str:
        return "tool_use" if tools is not None and "tool_use" in self.sources else "default"


def _join_parts(message: Message) -> Message:
    """Return a message with one text for parts, as vLLM joins them."""
    if not isinstance(message.get("content"), list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in message["content"])}


def _split_content(message: Message) -> Message:
    """Return a message whose text is a part, for templates that read only parts."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _encode_arguments(message: Message) -> Message:
    """Return a message whose tool calls have their arguments as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = [json.loads(json.dumps(call)) for call in message["tool_calls"]]
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {**message, "tool_calls": calls}


def _content_variants(messages: list[Message]) -> Iterator[list[Message]]:
    """Yield the messages without, with null and with an empty content of tool calls."""
    yield messages
    if any("content" not in message for message in messages):
        for content in (None, ""):
            yield [{"content": content} | message for message in messages]


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


def remove_marks(source: str) -> str:
    """Return a template without generation blocks, which renders the same text.

    A condition that is always true trims the blanks around it as the block does.
    """
    source = re.sub(r"\{%([-+]?)\s*generation\s*([-+]?)%\}", r"{%\1 if true \2%}", source)
    return re.sub(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}", r"{%\1 endif \2%}", source)


def find_own_template(directory: Path) -> str | None:
    """Return the chat template of a model's files, unless it has generation blocks."""
    file = directory / TEMPLATE_FILE
    template = file.read_text("utf-8") if file.is_file() else None
    template = template or _read_json(directory / TOKENIZER_CONFIG_FILE).get("chat_template")
    if isinstance(template, list):
        template = {item["name"]: item["template"] for item in template}.get("default")
    return template if isinstance(template, str) and not GENERATION.search(template) else None


@lru_cache(maxsize=32)  # compiling a template of a large model takes 60 ms
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
    it, where an imported run stores its template.  Templates of ``additional_chat_templates/``
    come with ``chat_template.jinja``; one named ``tool_use`` renders conversations with tools.

    Raises:
        InvalidConfig: the template is missing or malformed.
    """
    import jinja2

    directory = section.tokenizer_path.parent
    directories = [directory, directory / "huggingface"]
    template_file = expand_path(section.chat_template)
    key, value = "data.chat_template", section.chat_template
    variables = section.chat_template_args
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
            sources = {"default": file.read_text("utf-8")}
            if value == "auto":
                sources |= _named_templates(directories)
            return ChatTemplate(sources, special, str(file), variables)
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
        sources = sources | _named_templates(directories)
        if "default" not in sources:
            rule = f"finds neither chat_template.jinja nor a template in {directory}"
            remedy = "set data.chat_template to a file, or give the tokenizer of a chat model"
            raise InvalidConfig([ConfigError(key, value, rule, remedy)])
        path = str(directory / TOKENIZER_CONFIG_FILE)
        return ChatTemplate(sources, special, path, variables)
    except jinja2.TemplateError as error:
        rule = f"is not a chat template: line {getattr(error, 'lineno', '?')}: {error}"
    except (RecursionError, SyntaxError) as error:  # of Python, to which Jinja compiles it
        rule = f"is not a chat template: it is nested too deeply ({type(error).__name__})"
    except RenderLimitError as error:
        rule = f"is not a chat template: compiling it {error}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = f"cannot be read: {type(error).__name__}: {error}"
    raise InvalidConfig([ConfigError(key, value, rule, "give a file that transformers can read")])


def _named_templates(directories: Sequence[Path]) -> dict[str, str]:
    """Return the templates of the first directory ``additional_chat_templates``."""
    found = (sorted((each / NAMED_TEMPLATES_DIR).glob("*.jinja")) for each in directories)
    return {file.stem: file.read_text("utf-8") for file in next(filter(None, found), [])}


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
