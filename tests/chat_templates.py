"""Published chat templates and conversations, compared with `transformers` and with TRL.

The package ``trl`` has copies of published templates, and for most a *training template*, which
marks the assistant's text.  ``python -m tests.chat_templates --write`` writes the table of
docs/chat-templates.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

from weft.config.schema import DataSection
from weft.data.chat import ChatEncoder, EncodedConversation, make_chat_encoder
from weft.data.chat_rows import Example, InvalidConversation, Message, RowFormat, parse_line
from weft.data.chat_template import load_chat_template
from weft.data.row_audit import RowAudit
from weft.data.tokenizer_training import train_tokenizer

PAGE = Path(__file__).parents[1] / "docs/chat-templates.md"
TRAINING = "_training"

# Texts that are special tokens in the tokenizers of these models.
SPECIAL = re.compile(
    r"<\|[A-Za-z0-9_/ ]+\|>|<｜[^｜<>]+｜>|\[gMASK\]|<sop>|\[/?INST\]"
    r"|<(?:start|end)_of_(?:turn|utterance|image)>"
    r"|<(?:tool|tool_call|tool_response|channel|turn)\|>"
    r"|<\|(?:tool|tool_call|tool_response|channel|turn|think)>|<image>"
)


class Tokens(NamedTuple):
    """The special tokens of a family, as its files publish them."""

    start: str | None
    end: str
    stops: tuple[str, ...] = ()  # other tokens at which generation stops


IM_END = "<|im_end|>"
TOKENS = {
    "cohere": Tokens("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "deepseek": Tokens("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "diffusion_gemma": Tokens("<bos>", "<eos>", ("<turn|>", "<|tool_response>", "<tool_call|>")),
    "gemma4": Tokens("<bos>", "<eos>", ("<turn|>", "<|tool_response>", "<tool_call|>")),
    "gemma": Tokens("<bos>", "<eos>", ("<end_of_turn>",)),
    "glm4moe": Tokens(None, "<|endoftext|>", ("<|user|>", "<|observation|>")),
    "gptoss": Tokens("<|startoftext|>", "<|return|>", ("<|call|>", "<|endoftext|>")),
    "idefics3": Tokens("<|begin_of_text|>", "<end_of_utterance>"),
    "lfm2": Tokens("<|startoftext|>", IM_END),
    "llama3": Tokens("<|begin_of_text|>", "<|eot_id|>", ("<|end_of_text|>", "<|eom_id|>")),
    "llava_next": Tokens("<s>", "</s>"),
    "muse_glimmer": Tokens("<|begin_of_text|>", "<|eot|>", ("<|eom|>",)),
    "nemotron": Tokens("<s>", IM_END),
    "phi3": Tokens("<s>", "<|endoftext|>", ("<|end|>",)),
    "qwen": Tokens(None, IM_END, ("<|endoftext|>",)),
    "smolvlm": Tokens("<|im_start|>", "<end_of_utterance>"),
}

TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up a person.",
        "parameters": {"type": "object", "properties": {"who": {"type": "string"}}},
    },
}


def message(role: str, content: Any, **fields: Any) -> Message:
    return {"role": role, "content": content, **fields}


def call(arguments: Any) -> Message:
    function = {"name": "lookup", "arguments": arguments}
    calls = [{"id": "call00001", "type": "function", "function": function}]
    return {"role": "assistant", "tool_calls": calls}


ASK, ANSWER = message("user", "What is six times seven?"), message("assistant", "It is 42.")
ASK_MORE, MORE = message("user", "And eight?"), message("assistant", "It is 56.")
FOUND = message("tool", "found it", name="lookup", tool_call_id="call00001")
THOUGHT = ANSWER | {"reasoning_content": "six sevens"}
CONVERSATIONS: dict[str, list[Message]] = {
    "one turn": [ASK, ANSWER],
    "system": [message("system", "Be brief."), ASK, ANSWER],
    "two turns": [ASK, ANSWER, ASK_MORE, MORE],
    "reasoning": [ASK, THOUGHT],
    "reasoning in the text": [
        ASK,
        message("assistant", "<think>\nsix sevens\n</think>\n\nIt is 42."),
    ],
    "reasoning in two turns": [ASK, THOUGHT, ASK_MORE, MORE | {"reasoning_content": "sevens"}],
    "tool call": [ASK, call({"who": "p0"}), FOUND, ANSWER],
    "tool call as JSON text": [ASK, call('{"who": "p0"}'), FOUND, ANSWER],
    "blanks": [message("user", "  hi \n"), message("assistant", "\n  yes \n ")],
    "empty answer": [ASK, message("assistant", "")],
    "two answers in a row": [ASK, ANSWER, MORE],
    "assistant first": [message("assistant", "Hello."), ASK, ANSWER],
    "user last": [ASK, ANSWER, ASK_MORE],
}


@cache
def template_dir() -> Path:
    """Return the directory of TRL's templates; TRL itself is not imported."""
    files = importlib.metadata.files("trl") or []
    return Path(str(next(file for file in files if file.suffix == ".jinja").locate())).parent


def originals() -> list[str]:
    """Return the names of the published templates."""
    names = (path.stem for path in template_dir().glob("*.jinja"))
    return sorted(name for name in names if not name.endswith(TRAINING))


def training() -> list[str]:
    """Return the names of the published templates that have a training template."""
    files = {path.name for path in template_dir().glob("*.jinja")}
    return [name for name in originals() if f"{name}{TRAINING}.jinja" in files]


@cache
def base_tokenizer() -> str:
    return train_tokenizer(["it is what it is, and there it was too " * 20], 340).to_str()


@dataclass(frozen=True)
class Model:
    """The tokenizer files of a model with a published template."""

    name: str
    directory: Path

    @property
    def source(self) -> str:
        return (template_dir() / f"{self.name}.jinja").read_text("utf-8")

    @property
    def training_source(self) -> str | None:
        """The training template, if there is one."""
        file = template_dir() / f"{self.name}{TRAINING}.jinja"
        return file.read_text("utf-8") if file.is_file() else None

    @property
    def tokens(self) -> Tokens:
        return next(each for prefix, each in TOKENS.items() if self.name.startswith(prefix))

    def write(self) -> Path:
        """Write tokenizer, template and generation settings; return the tokenizer's path."""
        start, end, stops = self.tokens
        tokenizer = Tokenizer.from_str(base_tokenizer())
        special = sorted({*SPECIAL.findall(self.source), end, *stops, *filter(None, [start])})
        tokenizer.add_special_tokens(
            [AddedToken(t, special=True, normalized=False) for t in special]
        )
        ids = [tokenizer.token_to_id(token) for token in (end, *stops)]
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": start,
            "eos_token": end,
            "chat_template": self.source,
        }
        files: dict[str, Any] = {
            "tokenizer_config.json": config,
            "generation_config.json": {"eos_token_id": ids},
        }
        self.directory.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(self.directory / "tokenizer.json"))
        for name, tree in files.items():
            (self.directory / name).write_text(json.dumps(tree), "utf-8")
        return self.directory / "tokenizer.json"

    def encoder(self, **keys: Any) -> ChatEncoder:
        """Return weft's encoder."""
        values = {"path": "x", "tokenizer": str(self.write()), "format": "chat"} | keys
        section = DataSection.model_validate(values)
        return make_chat_encoder(section, load_chat_template(section))


def tools_of(name: str) -> list[Any] | None:
    return [TOOL] if name.startswith("tool call") else None


def parse(name: str) -> Example:
    """Return a conversation as weft reads it."""
    row = {"messages": CONVERSATIONS[name], "tools": tools_of(name)}
    [example] = parse_line(json.dumps(row).encode(), RowFormat())
    return example


class Theirs:
    """`transformers` with the same files."""

    def __init__(self, model: Model) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model.directory)

    def render(self, messages: list[Message], tools: Any, **options: Any) -> Any:
        """Return what apply_chat_template returns; None if the template raises an error.

        Templates of models that read images take content as parts only.
        """
        attempts = [messages, [as_parts(each) for each in messages]]
        for attempt in attempts:
            try:
                copied = json.loads(json.dumps(attempt))
                text = self.tokenizer.apply_chat_template(copied, tools=tools, tokenize=False)
            except Exception:  # of any type, from the template
                continue
            shown = [m["content"] for m in messages if isinstance(m.get("content"), str)]
            if all(content.strip()[:20] in text or "</think>" in content for content in shown):
                return self.tokenizer.apply_chat_template(copied, tools=tools, **options)
        return None

    def render_text(self, messages: list[Message], tools: Any, prompt: bool) -> str | None:
        options = {"tokenize": False, "add_generation_prompt": prompt}
        rendered: str | None = self.render(messages, tools, **options)
        return rendered


def as_parts(each: Message) -> Message:
    content = each.get("content")
    is_text = isinstance(content, str)
    return each | {"content": [{"type": "text", "text": content}]} if is_text else each


def trained_texts(encoder: ChatEncoder, encoded: EncodedConversation) -> list[str]:
    """Return the text of each run of trained tokens."""
    runs: list[list[int]] = []
    previous = False
    for token, is_trained in zip(encoded.tokens.tolist(), encoded.loss_mask.tolist(), strict=True):
        if is_trained:
            runs[-1:] = [[*runs[-1], token]] if previous else [*runs[-1:], [token]]
        previous = is_trained
    return [encoder.tokenizer.decode(run, skip_special_tokens=False) for run in runs]


# --------------------------------------------------------------------------- the page

REFUSED, ONE_PASS, BY_TURN, IGNORED = "no", "one pass", "by turn", "ignored"


def judge(encoder: ChatEncoder, theirs: Theirs, name: str) -> tuple[str, str]:
    """Return how weft trains a conversation, and the reason of a refusal."""
    rendered = theirs.render_text(CONVERSATIONS[name], tools_of(name), False)
    example, audit = parse(name), RowAudit(encoder)
    try:
        examples = encoder.render(example)
    except InvalidConversation as error:
        return (REFUSED if rendered is None else "refused"), str(error)
    try:
        audit.check(example, name)
    except InvalidConversation as error:
        return IGNORED, str(error)
    reason = "ignores reasoning" if "reasoning" in name and audit.notes(0) else ""
    return (ONE_PASS if len(examples) == 1 else f"{len(examples)} {BY_TURN}"), reason


def make_page() -> str:
    """Return the page of the published templates."""
    rows, reasons, silent = [], [], set()
    counts = dict.fromkeys((ONE_PASS, BY_TURN, REFUSED, IGNORED, "refused"), 0)
    for name in originals():
        with tempfile.TemporaryDirectory() as directory:
            model = Model(name, Path(directory))
            encoder = model.encoder()
            theirs = Theirs(model)
            cells = []
            for conversation in CONVERSATIONS:
                cell, reason = judge(encoder, theirs, conversation)
                counts[next(kind for kind in counts if cell.endswith(kind))] += 1
                if reason == "ignores reasoning":
                    silent.add(f"`{name}`")
                elif reason:
                    reason = reason.removeprefix("the chat template rejects it: ").split("\n")[0]
                    reasons.append(f"- `{name}`, {conversation}: {reason}")
                cells.append(cell.replace(ONE_PASS, "✓").replace(f" {BY_TURN}", ""))
        rows.append(f"| `{name}` | " + " | ".join(cells) + " |")
    head = "| template | " + " | ".join(CONVERSATIONS) + " |"
    version = importlib.metadata.version("trl")
    text = PAGE.read_text("utf-8")
    intro = text[: text.index("<!-- generated")]
    return "\n".join(
        [
            intro + f"<!-- generated by python -m tests.chat_templates --write, trl {version} -->",
            f"{counts[ONE_PASS]} renderings are trained in one pass, {counts[BY_TURN]} with one "
            f"example per turn. {counts[REFUSED]} are refused by the template itself, and so by "
            f"`transformers`; {counts['refused']} by weft alone. In {counts[IGNORED]} the template "
            "leaves out the answer, a tool call, without an error, and weft refuses the row.",
            "",
            f"Templates that leave out `reasoning_content`, which weft says: "
            f"{', '.join(sorted(silent))}.",
            "",
            head,
            "|---" * (len(CONVERSATIONS) + 1) + "|",
            *rows,
            "",
            "## What the templates refuse",
            "",
            *reasons,
            "",
        ]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/chat-templates.md")
    page = make_page()
    if parser.parse_args().write:
        PAGE.write_text(page, "utf-8")
    else:
        print(page)
