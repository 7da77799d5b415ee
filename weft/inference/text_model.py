"""A trained model that continues texts and answers conversations, in one process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.config.errors import InvalidConfig
from weft.inference.generate import (
    ChatFormat,
    GeneratedSequence,
    Prompt,
    Sampling,
    encode_prompt,
    generate,
    load_chat_format,
    make_sequences,
)
from weft.inference.inference_model import (
    CheckpointRef,
    LanguageModel,
    find_checkpoint,
    load_local_model,
)

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from torch import nn


class TextModel:
    """A model in evaluation mode, with its tokenizer and chat template.

    Args:
        language_model: the model on its device.
        checkpoint: where its weights come from.
        template: path of a chat template, or auto for the run's.
        variables: of the template; None: those of the run.

    Attributes:
        text_format: for prompts that the model continues.
        chat_format: for conversations; None if the run has no chat template.
    """

    def __init__(
        self,
        language_model: LanguageModel,
        checkpoint: CheckpointRef,
        template: str = "auto",
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.language_model, self.checkpoint = language_model, checkpoint
        self.text_format = load_chat_format(checkpoint)
        self._template = template
        self.chat_format: ChatFormat | None = None
        try:
            self.chat_format = load_chat_format(checkpoint, template, variables)
        except InvalidConfig as error:
            if template != "auto":
                raise
            self._no_chat = error

    @property
    def module(self) -> nn.Module:
        """The PyTorch module: ``module(tokens_BT)`` returns hidden states or logits."""
        return self.language_model.module

    @property
    def config(self) -> Any:
        """The model's configuration: ``config.num_layers``, ``config.vocab_size`` ..."""
        return self.language_model.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer, of the library `tokenizers`."""
        return self.text_format.tokenizer

    def select_format(self, is_chat: bool) -> ChatFormat:
        """Return the format of texts or of conversations.

        Raises:
            InvalidConfig: if the run has no chat template.
        """
        if not is_chat:
            return self.text_format
        if self.chat_format is None:
            raise self._no_chat
        return self.chat_format

    def stream(
        self, prompt: Prompt, sampling: Sampling | None = None, is_chat: bool = False
    ) -> Iterator[str]:
        """Yield the continuation of a prompt, as the model generates it.

        Args:
            prompt: a text, or the messages of a conversation.
            sampling: temperature, filters, stop texts and length.
            is_chat: format a text as the message of a user.

        Raises:
            InvalidConfig: if the run has no chat template, or the template rejects the prompt.
        """
        chosen = sampling or Sampling()
        chat_format = self.select_format(is_chat or not isinstance(prompt, str))
        sequences = make_sequences([prompt], chat_format, chosen)
        for _, text in generate(self.language_model, chat_format, sequences, chosen):
            yield text

    def complete(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | None = None,
        is_chat: bool = False,
        batch_size: int = 8,
    ) -> list[GeneratedSequence]:
        """Continue several prompts, ``batch_size`` at a time; see `stream`."""
        chosen, results = sampling or Sampling(), list[GeneratedSequence]()
        chat_format = self.select_format(is_chat)
        for first in range(0, len(prompts), batch_size):
            batch = prompts[first : first + batch_size]
            sequences = make_sequences(batch, chat_format, chosen, first)
            for _ in generate(self.language_model, chat_format, sequences, chosen):
                pass
            results += sequences
        return results


def load_text_model(
    path: Path,
    device: torch.device | None = None,
    template: str = "auto",
    step: int | str | None = None,
) -> TextModel:
    """Load the newest checkpoint of a run, or a given one, in this process.

    Args:
        path: run directory, or directory of a checkpoint.
        device: default: a GPU if there is one.  On a GPU the weights are bfloat16, unless the run
            computes in float32.
        template: see `TextModel`.
        step: of a run directory: see `find_checkpoint`.

    Raises:
        InvalidConfig: if there is no checkpoint, or no such template.
    """
    checkpoint = find_checkpoint(Path(os.path.realpath(path)), step)
    return TextModel(load_local_model(checkpoint, device), checkpoint, template)


class ChatSession:
    """A conversation with a model, or without a chat template a text that both extend.

    Args:
        model: the model.
        sampling: its seed counts up with every answer.

    Attributes:
        messages: the conversation, if the model has a chat template.
        text: the text so far, if it has none.
    """

    def __init__(self, model: TextModel, sampling: Sampling) -> None:
        self._model, self._sampling = model, sampling
        self._num_answers = 0
        self.is_chat = model.chat_format is not None
        self.messages: list[dict[str, str]] = []
        self.text = ""

    def stream_answer(self, text: str) -> Iterator[str]:
        """Yield the answer as the model generates it; closing the iterator stops it.

        If the conversation is longer than the model's context, the model does not see the oldest
        messages, except the system prompt.

        Raises:
            InvalidConfig: if the chat template rejects the conversation, which is then unchanged.
        """
        before = len(self.messages), self.text
        if self.is_chat:
            self.messages.append({"role": "user", "content": text})
        else:
            self.text += "\n" * bool(self.text) + text
        sampling = replace(self._sampling, seed=self._sampling.seed + self._num_answers)
        self._num_answers += 1
        answer = ""
        try:
            prompt = self._recent_messages() if self.is_chat else self.text
            for piece in self._model.stream(prompt, sampling):
                answer += piece
                yield piece
        except InvalidConfig:
            del self.messages[before[0] :]
            self.text = before[1]
            raise
        finally:
            self._record(answer)

    def _record(self, answer: str) -> None:
        """Append an answer, which the user may have stopped."""
        if not self.is_chat:
            self.text += answer
        elif self.messages and self.messages[-1]["role"] == "user":
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()  # templates want an answer to each message

    def _recent_messages(self) -> list[dict[str, str]]:
        """Return the system prompt and the newest messages that fit into the context."""
        chat_format = self._model.select_format(is_chat=True)
        room = chat_format.max_context - min(
            self._sampling.max_tokens, chat_format.max_context // 2
        )
        system = [message for message in self.messages[:1] if message["role"] == "system"]
        recent = self.messages[len(system) :]
        while len(recent) > 1 and len(encode_prompt([*system, *recent], chat_format)) > room:
            recent = recent[2:]  # a question and its answer
        return [*system, *recent]

    def reset(self) -> None:
        """Forget the conversation, except its system prompt."""
        self.messages = [m for m in self.messages[:1] if m["role"] == "system"]
        self.text = ""

    def set_system(self, text: str) -> None:
        """Set the system prompt of the conversation; an empty one removes it."""
        others = [message for message in self.messages if message["role"] != "system"]
        self.messages = [{"role": "system", "content": text}] * bool(text) + others

    def save(self, path: Path) -> None:
        """Write the conversation as a line of JSON, as fine-tuning reads it; or the text.

        Raises:
            OSError: if the file cannot be written.
        """
        line = json.dumps({"messages": self.messages}, ensure_ascii=False)
        path.write_text((line if self.is_chat else self.text) + "\n", "utf-8")
