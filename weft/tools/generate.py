"""Text from a trained model: several prompts at once, each new token at the price of one.

What a prompt becomes does not depend on what else is in the batch: every row has its own source of
random numbers, which begins at the seed plus the prompt's number, and its own place in the cache.
(Sums of a batch may be rounded in another order than those of one row, so two tokens of equal
probability to the last bit may change places.)

When a row is as long as what the model was trained on, its older half is forgotten and the rest is
read again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor

from weft.config.errors import ConfigError, InvalidConfig
from weft.data.chat import Malformed, Writer, load_template
from weft.data.document_tokens import IMPORTED, add_start, first_token, tokens_beside
from weft.data.tokenizer import load_tokenizer, vocab_entries
from weft.models.kv_cache import KeyValueCache, caching
from weft.tools.inference_model import CheckpointRef, LanguageModel


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, in this order, and when it is enough."""

    max_tokens: int = 200
    repetition_penalty: float = 1.0  # CTRL's (arXiv:1909.05858): logits of what is there already
    temperature: float = 0.8  # 0: the likeliest token each time
    top_k: int = 50  # among so many likeliest; 0: among all
    top_p: float = 1.0  # among the fewest likeliest that have this much together
    min_p: float = 0.0  # among those at least that likely, relative to the likeliest
    stop: tuple[str, ...] = ()  # ends before any of these
    seed: int = 0

    def problems(self) -> list[ConfigError]:
        """What is wrong with it, by the options of the command line."""
        found = []
        if not 0 < self.top_p <= 1:
            found.append(
                ConfigError("--top-p", self.top_p, "is no share", "use more than 0, up to 1")
            )
        if self.min_p > 1:
            found.append(ConfigError("--min-p", self.min_p, "is no share", "use 0 to 1"))
        if self.repetition_penalty == 0:
            rule = "divides, and nothing is divided by 0"
            found.append(
                ConfigError("--repetition-penalty", 0, rule, "use 1 for none, 1.1 for some")
            )
        return found


@dataclass(frozen=True)
class ChatFormat:
    """How a run's texts are written."""

    tokenizer: Tokenizer  # its encode() adds what stands before a text
    begin: int  # the token of an empty text, where the tokenizer adds none
    ends: frozenset[int]  # tokens after which there is nothing more
    context: int  # the longest row that the model was trained on, in tokens
    chat: Writer | None = None  # prompts are what a user says, written by the chat template


def speech_of(found: CheckpointRef, template: str | None = None) -> ChatFormat:
    """Return how a run's texts are written: see `weft.data.document_tokens`.

    Args:
        template: for conversations: a chat template's file, or auto for the run's own.

    Raises:
        InvalidConfig: there is no tokenizer, no end token, or no such template.
    """
    path, source = found.run / "tokenizer.json", found.run / IMPORTED
    tokenizer, _ = load_tokenizer(path)
    tokens = tokens_beside(tokenizer, path)
    begin, context = tokens.separator, found.job.train.seq_len
    starts = tokens.starts_documents
    if (source / "config.json").is_file():
        first = first_token(tokenizer, source)
        begin = begin if first is None else first
        context = found.config.max_seq_len  # what it was trained on is not known better
    elif starts is None:  # a run from before that was recorded
        starts = found.job.data.format == "text"
    if starts:
        add_start(tokenizer, tokens.separator)
    if template is None:
        return ChatFormat(tokenizer, begin, tokens.ends, context)
    told = {"tokenizer": str(path), "chat_template": template, "format": "chat"}
    writer = Writer(str(path), load_template(found.job.data.model_copy(update=told)))
    return ChatFormat(tokenizer, begin, tokens.ends | writer.ends(), context, writer)


Prompt = str | list[dict[str, Any]]  # a text, or the messages of a conversation


@dataclass
class Row:
    """A prompt and what has become of it."""

    prompt: Prompt
    ids: list[int]
    begun: int  # how many of them are the prompt's
    random: torch.Generator
    prefix: str  # the prompt as its tokens say it
    first: int = 0  # of the ids that the model still sees
    text: str = ""  # what continues the prompt
    told: int = 0  # characters of it
    finish: str = ""  # why it ended: end, stop or length

    def to_dict(self) -> dict[str, Any]:
        """For one line of JSON; ``tokens``: how many were made."""
        made = len(self.ids) - self.begun
        return {"prompt": self.prompt, "text": self.text, "tokens": made, "finish": self.finish}

    @property
    def length(self) -> int:
        """Tokens that the model sees."""
        return len(self.ids) - self.first


def read_prompts(path: Path, problems: list[ConfigError], chat: bool = False) -> Sequence[Prompt]:
    """A prompt a line; of a .jsonl file a JSON string, or an object that has a ``prompt``, or in a
    ``chat`` ``messages``."""
    try:
        # Not splitlines: a string of JSON may have what Unicode calls the end of a line.
        lines = path.read_text("utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        problems.append(ConfigError("--prompts", str(path), f"cannot be read: {error}"))
        return []
    if path.suffix != ".jsonl":
        return lines
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        name = "messages" if chat and isinstance(value, dict) and "messages" in value else "prompt"
        prompt = value.get(name) if isinstance(value, dict) else value
        if isinstance(prompt, str) or (name == "messages" and _is_conversation(prompt)):
            prompts.append(cast(Prompt, prompt))
        else:
            rule = f"line {number} is neither a JSON string nor an object with a prompt"
            rule += ", nor one with messages, each with role and content" if chat else ""
            problems.append(ConfigError("--prompts", str(path), rule, 'as {"prompt": "Once"}'))
            break
    return prompts


def _is_conversation(messages: object) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in messages
        )
    )


def rows_of(
    prompts: Sequence[Prompt], speech: ChatFormat, sampling: Sampling, number: int = 0
) -> list[Row]:
    """The prompts ready to be continued; ``number``: of the first one.

    Raises:
        InvalidConfig: the chat template refuses a prompt.
    """
    rows = []
    for index, prompt in enumerate(prompts):
        ids = _ids_of(prompt, speech)
        random = torch.Generator().manual_seed(sampling.seed + number + index)
        prefix = speech.tokenizer.decode(ids)
        rows.append(Row(prompt, ids, len(ids), random, prefix, max(0, len(ids) - speech.context)))
    return rows


def _ids_of(prompt: Prompt, speech: ChatFormat) -> list[int]:
    if speech.chat is None:
        assert isinstance(prompt, str)
        return list(speech.tokenizer.encode(prompt).ids) or [speech.begin]
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        return speech.chat.ask(asked)
    except Malformed as error:
        place = speech.chat.template.place
        raise InvalidConfig([ConfigError("--chat", place, str(error), "ask otherwise")]) from None


def generate(
    model: LanguageModel,
    speech: ChatFormat,
    rows: list[Row],
    sampling: Sampling,
    cached: bool = True,
) -> Iterator[tuple[Row, str]]:
    """Pieces of text that continue the rows, as they come; ends when all rows have ended.

    Every rank of the model calls it, with the same rows, and gets the same.

    Args:
        cached: False computes everything again for each token, to prove the other by.
    """
    longest = max(row.length for row in rows) + sampling.max_tokens
    entries = min(model.config.vocab_size, vocab_entries(speech.tokenizer))
    blocks = model.family.blocks(model.module) if cached else []
    with caching(blocks, min(longest, speech.context)) as cache:
        whole = True  # what the cache holds is to be computed anew
        for number in range(sampling.max_tokens):
            logits_BV = _next_logits(model, rows, cache, whole)
            pairs = zip(logits_BV, rows, strict=True)
            chosen = [choose(logits_V[:entries], row, sampling) for logits_V, row in pairs]
            whole = cache is None
            for row, token in zip(rows, _agreed(chosen), strict=True):
                if row.finish:
                    continue
                if token in speech.ends:
                    row.finish = "end"
                    if sampling.stop and row.told < len(row.text):
                        yield row, _tell(row, len(row.text))
                    continue
                row.ids.append(token)
                if row.length > speech.context:
                    row.first = len(row.ids) - max(1, speech.context // 2)
                    whole = True
                if piece := _grown(row, speech, sampling, last=number + 1 == sampling.max_tokens):
                    yield row, piece
            if all(row.finish for row in rows):
                return


def _next_logits(
    model: LanguageModel, rows: list[Row], cache: KeyValueCache | None, whole: bool
) -> Tensor:
    """Of the token after each row's last, on the CPU; unless ``whole`` only that last is new."""
    device = model.device
    if whole:
        seen = [row.ids[row.first :] for row in rows]
        width = max(len(ids) for ids in seen)
        tokens_BT = torch.tensor([ids + [0] * (width - len(ids)) for ids in seen], device=device)
        positions_BT = torch.arange(width, device=device).expand_as(tokens_BT)
        places_B = torch.tensor([len(ids) - 1 for ids in seen], device=device)
    else:
        tokens_BT = torch.tensor([row.ids[-1:] for row in rows], device=device)
        positions_BT = torch.tensor([[row.length - 1] for row in rows], device=device)
        places_B = torch.zeros(len(rows), dtype=torch.int64, device=device)
    if cache is not None:
        cache.place(positions_BT, anew=whole)
    rows_B = torch.arange(len(rows), device=device)
    return model.logits(tokens_BT, rows_B, places_B, positions_BT).cpu()


def choose(logits_V: Tensor, row: Row, sampling: Sampling) -> int:
    """The next token of a row."""
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(row.ids)))
        old, by = logits_V[seen], sampling.repetition_penalty
        logits_V = logits_V.index_put((seen,), torch.where(old > 0, old / by, old * by))
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    values, indices = logits_V.topk(min(sampling.top_k or len(logits_V), len(logits_V)))
    shares = torch.softmax((values - values[0]) / sampling.temperature, dim=-1)
    if sampling.top_p < 1:
        shares = shares.masked_fill(shares.cumsum(0) - shares >= sampling.top_p, 0)
    if sampling.min_p > 0:
        shares = shares.masked_fill(shares < sampling.min_p * shares[0], 0)
    return int(indices[torch.multinomial(shares, 1, generator=row.random)])


def _agreed(chosen: list[int]) -> list[int]:
    """What the first rank has chosen: others may have rounded otherwise."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return chosen
    told = torch.tensor(chosen)
    dist.broadcast(told, 0)
    return told.tolist()


def _grown(row: Row, speech: ChatFormat, sampling: Sampling, last: bool) -> str:
    """The text that a new token makes certain; sets why the row ended, if it did."""
    text = speech.tokenizer.decode(row.ids)[len(row.prefix) :]
    if last:
        row.finish = "length"
    # A character may span tokens: text counts once it is whole.
    if text.endswith("\ufffd"):
        return _tell(row, len(row.text)) if last else ""
    row.text = text
    found = [at for at in (text.find(stop) for stop in sampling.stop) if at >= 0]
    if found:
        row.finish, row.text = "stop", text[: min(found)]
    # What may be the beginning of a stop waits.
    held = 0 if row.finish else max((len(stop) - 1 for stop in sampling.stop), default=0)
    return _tell(row, len(row.text) - held)


def _tell(row: Row, end: int) -> str:
    piece = row.text[row.told : max(row.told, end)]
    row.told += len(piece)
    return piece
