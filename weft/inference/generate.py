"""Generate text for several prompts at once, with a key-value cache.

The text of a prompt does not depend on the rest of the batch: every sequence has its own random
generator, seeded with the seed plus the prompt's number, and its own slots in the cache.  (Rounding
depends on the batch, so two tokens of equal probability may change places.)

A sequence that reaches the context length of training drops its older half and recomputes the
cache of the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor

from weft.config.errors import ConfigError, ConfigErrors, InvalidConfig
from weft.config.files import describe_cause, read_input
from weft.data.chat import ChatEncoder
from weft.data.chat_rows import InvalidConversation
from weft.data.chat_template import load_chat_template
from weft.data.document_tokens import (
    IMPORTED_DIR,
    Affixes,
    DocumentTokens,
    find_affixes,
    find_start_token,
    load_document_tokens,
    set_start_tokens,
)
from weft.data.tokenizer import load_tokenizer, required_vocab_size
from weft.inference.inference_model import CheckpointRef, LanguageModel
from weft.models.kv_cache import KeyValueCache, use_kv_cache


@dataclass(frozen=True)
class Sampling:
    """Sampling options, in the order in which they apply, and the end of a sequence."""

    max_tokens: int = 200
    repetition_penalty: float = 1.0  # of tokens in the sequence (CTRL, arXiv:1909.05858); 1: off
    temperature: float = 0.8  # 0: greedy
    top_k: int = 50  # sample among the k likeliest tokens; 0: among all
    top_p: float = 1.0  # sample among the fewest likeliest tokens with this total probability
    min_p: float = 0.0  # minimum probability, relative to the likeliest token
    stop: tuple[str, ...] = ()  # texts that end a sequence and are not part of it
    seed: int = 0

    def errors(self) -> ConfigErrors:
        """Return the errors, by command-line option."""
        errors = ConfigErrors()
        if not 0 < self.top_p <= 1:
            rule, remedy = "is not a probability", "use more than 0, up to 1"
            errors.add("--top-p", rule, remedy, value=self.top_p)
        if self.min_p > 1:
            rule, remedy = "is not a probability", "use 0 to 1"
            errors.add("--min-p", rule, remedy, value=self.min_p)
        if self.repetition_penalty == 0:
            rule, remedy = "must not be 0: logits are divided by it", "use 1 for no penalty, or 1.1"
            errors.add("--repetition-penalty", rule, remedy, value=0)
        return errors


@dataclass(frozen=True)
class ChatFormat:
    """The text format of a run: its tokenizer, special tokens and chat template."""

    tokenizer: Tokenizer  # its encode() adds the tokens that start a text
    start_token: int  # of an empty text, if the tokenizer adds none
    end_tokens: frozenset[int]  # tokens that end a text
    max_context: int  # longest sequence of training, in tokens
    encoder: ChatEncoder | None = None  # the chat template, if prompts are messages of a user


def load_chat_format(
    checkpoint: CheckpointRef,
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> ChatFormat:
    """Load the text format of a run; see `weft.data.tokenizer`.

    Args:
        checkpoint: a checkpoint of the run.
        template: for conversations: path of a chat template, or auto for the run's own.
        variables: of the template; None: those of the run, ``data.chat_template_args``.

    Raises:
        InvalidConfig: if there is no tokenizer, no end token, or no such template.
    """
    path, source = checkpoint.run_dir / "tokenizer.json", checkpoint.run_dir / IMPORTED_DIR
    tokenizer, _ = load_tokenizer(path)
    tokens = load_document_tokens(tokenizer, path)
    start_token, max_context = tokens.separator, checkpoint.job.train.seq_len
    if (source / "config.json").is_file():
        token = find_start_token(tokenizer, source)
        start_token = start_token if token is None else token
        max_context = checkpoint.config.max_seq_len  # the length of its training is unknown
    if (start := find_changed_start(checkpoint, tokenizer, tokens)) is not None:
        set_start_tokens(tokenizer, start)
    if template is None:
        return ChatFormat(tokenizer, start_token, tokens.end_tokens, max_context)
    changes: dict[str, Any] = {"tokenizer": str(path), "chat_template": template, "format": "chat"}
    if variables is not None:
        changes["chat_template_args"] = dict(variables)
    encoder = ChatEncoder(
        str(path), load_chat_template(checkpoint.job.data.model_copy(update=changes))
    )
    return ChatFormat(tokenizer, start_token, encoder.end_tokens, max_context, encoder)


def find_changed_start(
    checkpoint: CheckpointRef, tokenizer: Tokenizer, tokens: DocumentTokens
) -> tuple[int, ...] | None:
    """Return the start tokens of a run's training if its tokenizer adds others."""
    start, own = tokens.start_tokens, find_affixes(tokenizer)
    if (checkpoint.run_dir / IMPORTED_DIR / "config.json").is_file():
        return None if start == own.start else start
    if start is None and checkpoint.job.data.is_text:  # not recorded
        start = (tokens.separator,)
    return None if start is None or own == Affixes(start) else start


Prompt = str | list[dict[str, Any]]  # a text, or the messages of a conversation


@dataclass
class GeneratedSequence:
    """A prompt and its continuation."""

    prompt: Prompt
    ids: list[int]
    prompt_length: int  # number of the prompt's ids
    generator: torch.Generator
    prefix: str  # the prompt, decoded from its ids
    context_start: int = 0  # index of the first id that the model sees
    text: str = ""  # the continuation
    num_emitted: int = 0  # characters of it that were returned
    finish_reason: str = ""  # end, stop or length

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON record; ``tokens`` is the number of generated tokens."""
        return {
            "prompt": self.prompt,
            "text": self.text,
            "tokens": len(self.ids) - self.prompt_length,
            "finish": self.finish_reason,
        }

    @property
    def length(self) -> int:
        """Number of tokens that the model sees."""
        return len(self.ids) - self.context_start


def read_prompts(path: Path, errors: ConfigErrors, chat: bool = False) -> Sequence[Prompt]:
    """Read one prompt per line; append errors to ``errors``.

    A line of a .jsonl file is a JSON string or an object with a ``prompt``; with ``chat`` also an
    object with ``messages``.
    """
    try:
        # Not splitlines: a JSON string may contain Unicode line separators.
        lines = read_input(path).removesuffix("\n").split("\n")
    except (OSError, ValueError) as error:
        reason = describe_cause(error) if isinstance(error, OSError) else error
        errors.add("--prompts", f"cannot be read: {reason}", value=str(path))
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
        if isinstance(prompt, str) or (name == "messages" and is_conversation(prompt)):
            prompts.append(cast(Prompt, prompt))
        else:
            rule = f"line {number} is neither a JSON string nor an object with a prompt"
            rule += ", nor one with messages, each with role and content" if chat else ""
            errors.add("--prompts", rule, 'write {"prompt": "Once"}', value=str(path))
            break
    return prompts


def is_conversation(messages: object) -> bool:
    """Return True for a list of messages, each with role and content."""
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


def make_sequences(
    prompts: Sequence[Prompt], chat_format: ChatFormat, sampling: Sampling, first_index: int = 0
) -> list[GeneratedSequence]:
    """Encode the prompts; ``first_index`` is the number of the first one.

    Raises:
        InvalidConfig: if the chat template rejects a prompt.
    """
    return [
        make_sequence(prompt, encode_prompt(prompt, chat_format), chat_format, sampling.seed + i)
        for i, prompt in enumerate(prompts, first_index)
    ]


def make_sequence(
    prompt: Prompt, ids: list[int], chat_format: ChatFormat, seed: int
) -> GeneratedSequence:
    """Make the sequence of an encoded prompt."""
    return GeneratedSequence(
        prompt=prompt,
        ids=ids,
        prompt_length=len(ids),
        generator=torch.Generator().manual_seed(seed),
        prefix=chat_format.tokenizer.decode(ids),
        context_start=max(0, len(ids) - chat_format.max_context),
    )


def encode_prompt(prompt: Prompt, chat_format: ChatFormat) -> list[int]:
    """Return the token ids of a text, or of a conversation up to the next answer.

    Raises:
        InvalidConfig: if the chat template rejects the conversation.
    """
    if chat_format.encoder is None:
        assert isinstance(prompt, str)
        return list(chat_format.tokenizer.encode(prompt).ids) or [chat_format.start_token]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        return chat_format.encoder.encode_prompt(messages)
    except InvalidConversation as error:
        path, rule = chat_format.encoder.template.path, f"cannot format the prompt: {error}"
        config_error = ConfigError("--chat", path, rule, "change the prompt")
        raise InvalidConfig([config_error]) from None


def generate(
    model: LanguageModel,
    chat_format: ChatFormat,
    sequences: list[GeneratedSequence],
    sampling: Sampling,
    cached: bool = True,
) -> Iterator[tuple[GeneratedSequence, str]]:
    """Continue the sequences; yield each new text as it is generated.

    Every rank of the model must call this with the same sequences, and gets the same texts.

    Args:
        model: model on this rank.
        chat_format: tokenizer, end tokens and context length.
        sequences: sequences to extend; changed in place.
        sampling: temperature, filters, stop texts and maximum number of tokens.
        cached: False recomputes all tokens in every step; tests compare both.
    """
    longest = max(sequence.length for sequence in sequences) + sampling.max_tokens
    vocab_size = min(model.config.vocab_size, required_vocab_size(chat_format.tokenizer))
    # Keys that were rotated for a shorter sequence are wrong in a longer one, and in its batch.
    is_alone = getattr(model.config, "depends_on_length", False)
    blocks = model.family.blocks(model.module) if cached and not is_alone else []
    with use_kv_cache(blocks, min(longest, chat_format.max_context)) as cache:
        recompute = True
        for number in range(sampling.max_tokens):
            groups = [[sequence] for sequence in sequences] if is_alone else [sequences]
            logits_BV = torch.cat([_next_logits(model, g, cache, recompute) for g in groups])
            sampled = [
                sample_token(logits_V[:vocab_size], sequence, sampling)
                for logits_V, sequence in zip(logits_BV, sequences, strict=True)
            ]
            recompute = cache is None
            for sequence, token in zip(sequences, _broadcast_tokens(sampled), strict=True):
                if sequence.finish_reason:
                    continue
                if token in chat_format.end_tokens:
                    sequence.finish_reason = "end"
                    if sampling.stop and sequence.num_emitted < len(sequence.text):
                        yield sequence, _emit_text(sequence, len(sequence.text))
                    continue
                sequence.ids.append(token)
                if sequence.length > chat_format.max_context:
                    kept = max(1, chat_format.max_context // 2)
                    sequence.context_start = len(sequence.ids) - kept
                    recompute = True
                is_last = number + 1 == sampling.max_tokens
                if new_text := _update_text(sequence, chat_format, sampling, is_last):
                    yield sequence, new_text
            if all(sequence.finish_reason for sequence in sequences):
                return


def _next_logits(
    model: LanguageModel,
    sequences: list[GeneratedSequence],
    cache: KeyValueCache | None,
    recompute: bool,
) -> Tensor:
    """Return the logits of each sequence's next token, on the CPU.

    With ``recompute`` the model reads all tokens of the context, else only the last one.
    """
    device = model.device
    if recompute:
        contexts = [sequence.ids[sequence.context_start :] for sequence in sequences]
        width = max(len(ids) for ids in contexts)
        padded = [ids + [0] * (width - len(ids)) for ids in contexts]
        tokens_BT = torch.tensor(padded, device=device)
        positions_BT = torch.arange(width, device=device).expand_as(tokens_BT)
        last_B = torch.tensor([len(ids) - 1 for ids in contexts], device=device)
    else:
        tokens_BT = torch.tensor([sequence.ids[-1:] for sequence in sequences], device=device)
        positions = [[sequence.length - 1] for sequence in sequences]
        positions_BT = torch.tensor(positions, device=device)
        last_B = torch.zeros(len(sequences), dtype=torch.int64, device=device)
    if cache is not None:
        cache.set_positions(positions_BT, reset=recompute)
    indices_B = torch.arange(len(sequences), device=device)
    return model.logits(tokens_BT, indices_B, last_B, positions_BT).cpu()


def sample_token(logits_V: Tensor, sequence: GeneratedSequence, sampling: Sampling) -> int:
    """Sample the next token of a sequence."""
    if sampling.repetition_penalty != 1.0:
        used = torch.tensor(sorted(set(sequence.ids)))
        logits, penalty = logits_V[used], sampling.repetition_penalty
        penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits_V = logits_V.index_put((used,), penalized)
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    values, indices = logits_V.topk(min(sampling.top_k or len(logits_V), len(logits_V)))
    probs = torch.softmax((values - values[0]) / sampling.temperature, dim=-1)
    if sampling.top_p < 1:
        probs = probs.masked_fill(probs.cumsum(0) - probs >= sampling.top_p, 0)
    if sampling.min_p > 0:
        probs = probs.masked_fill(probs < sampling.min_p * probs[0], 0)
    return int(indices[torch.multinomial(probs, 1, generator=sequence.generator)])


def _broadcast_tokens(sampled: list[int]) -> list[int]:
    """Broadcast the tokens of rank 0, because rounding may differ (collective)."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return sampled
    tokens = torch.tensor(sampled)
    dist.broadcast(tokens, 0)
    return tokens.tolist()


def _update_text(
    sequence: GeneratedSequence, chat_format: ChatFormat, sampling: Sampling, is_last: bool
) -> str:
    """Decode the sequence, set its finish reason, and return the text that is final."""
    text = chat_format.tokenizer.decode(sequence.ids)[len(sequence.prefix) :]
    if is_last:
        sequence.finish_reason = "length"
    # A character may span tokens; text counts once the character is complete.
    if text.endswith("\ufffd"):
        return _emit_text(sequence, len(sequence.text)) if is_last else ""
    sequence.text = text
    matches = [index for index in (text.find(stop) for stop in sampling.stop) if index >= 0]
    if matches:
        sequence.finish_reason, sequence.text = "stop", text[: min(matches)]
    # Hold back what may be the start of a stop text.
    held = max((len(stop) - 1 for stop in sampling.stop), default=0)
    held = 0 if sequence.finish_reason else held
    return _emit_text(sequence, len(sequence.text) - held)


def _emit_text(sequence: GeneratedSequence, end: int) -> str:
    new_text = sequence.text[sequence.num_emitted : max(sequence.num_emitted, end)]
    sequence.num_emitted += len(new_text)
    return new_text
