"""Evaluate a checkpoint with the Language Model Evaluation Harness.

The command is::

    python -m weft.inference.lm_eval_model run --model weft --model_args path=RUN --tasks arc_easy

It takes the options of ``lm_eval`` (pip install 'weft[eval]') except automatic batch sizes, also
``--apply_chat_template`` and ``--fewshot_as_multiturn``.  From Python, call
``lm_eval.simple_evaluate(model=WeftLM("runs/demo"), tasks=[...])``.  Texts are rendered, tokenized
and split into windows as by the harness's ``hf`` model, so a checkpoint and its export have the
same scores.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import model_registry

from weft.config.accelerators import GPU
from weft.data.chat import ChatEncoder
from weft.data.chat_rows import InvalidConversation
from weft.data.chat_template import strip_marks
from weft.inference.evaluate import compute_log_probs
from weft.inference.generate import Sampling, generate, load_chat_format, make_sequence
from weft.inference.inference_model import find_checkpoint, load_local_model

HARNESS_DEFAULT_DEVICE = f"{GPU}:0"
MAX_NEW_TOKENS = 256  # default limit of a generated answer
ANSWER_END = "<weft: end of the answer so far>"  # in a rendered conversation that is continued


class WeftLM(TemplateLM):  # type: ignore[misc]
    """A checkpoint as a model of the harness, in this process.

    Args:
        path: a run directory, or one of its checkpoints.
        batch_size: number of sequences.
        device: cpu, or an accelerator; None: one if there is one.  ``cuda:0``, which the harness
            passes if the user names no device, means the same on a machine without a GPU.
        chat_template_args: variables of the chat template; None: ``data.chat_template_args``.
        enable_thinking: one of these variables.
        step: of a run directory: step of the checkpoint, or best; None: the newest one.
    """

    def __init__(
        self,
        path: str,
        batch_size: int | str = 8,
        device: str | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        enable_thinking: bool | None = None,
        step: int | str | None = None,
        **ignored: Any,
    ) -> None:
        super().__init__()
        checkpoint = find_checkpoint(Path(os.path.realpath(path)), step)
        if device == HARNESS_DEFAULT_DEVICE and not torch.accelerator.is_available():
            device = None
        self.model = load_local_model(checkpoint, torch.device(device) if device else None)
        self.chat_format = load_chat_format(checkpoint)
        # As in transformers, the text of a special token is that token.
        self.chat_format.tokenizer.encode_special_tokens = False
        self.batch_size = int(batch_size)
        self._checkpoint, self._variables = checkpoint, chat_template_args
        if enable_thinking is not None:
            own = checkpoint.job.data.chat_template_args
            base = own if chat_template_args is None else chat_template_args
            self._variables = {**base, "enable_thinking": enable_thinking}

    @property
    def eot_token_id(self) -> int:
        """Token that precedes a text without a context."""
        return self.chat_format.start_token

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **ignored: Any
    ) -> list[int]:
        """Tokenize, with special tokens unless ``add_special_tokens`` is False.

        By default a text that begins with the start token, as of a chat template, gets none.
        """
        special = add_special_tokens is not False
        if add_special_tokens is None:
            start = self.chat_format.tokenizer.decode(
                [self.prefix_token_id], skip_special_tokens=False
            )
            special = not string.startswith(start)
        return self.chat_format.tokenizer.encode(string, add_special_tokens=special).ids

    @cached_property
    def _encoder(self) -> ChatEncoder:
        """The chat template of the run.

        Raises:
            InvalidConfig: the run has none.
        """
        chat_format = load_chat_format(self._checkpoint, "auto", self._variables)
        assert chat_format.encoder is not None
        self.chat_format = replace(self.chat_format, end_tokens=chat_format.end_tokens)
        return chat_format.encoder

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation, up to the answer to generate.

        Without a generation prompt, the last message is continued.  A template that rejects a
        system message gets the conversation without it.
        """
        try:
            return self._render(chat_history, add_generation_prompt)
        except InvalidConversation:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            return self._render(others, add_generation_prompt)

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        if add_generation_prompt:
            return strip_marks(self._encoder.template.render(list(messages), None, True))[0]
        *before, last = messages
        marked = {**last, "content": last["content"] + ANSWER_END + " "}
        rendered = self._encoder.template.render([*before, marked], None, False)
        text, found, rest = strip_marks(rendered)[0].rpartition(ANSWER_END)
        if not found:
            raise InvalidConversation("the chat template leaves out the answer to continue")
        # A template that trims contents trims this one, too.
        return text if rest.startswith(" ") else text.rstrip()

    @property
    def tokenizer_name(self) -> str:
        """Identify the tokenizer, for the harness's cache of requests."""
        return f"{str(self._checkpoint.run_dir).replace('/', '__')}-{self._encoder.hash}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the run's template, or of a named one; None if it is off."""
        if chat_template is False or chat_template is None:
            return None
        sources = self._encoder.template.sources
        name = chat_template if isinstance(chat_template, str) else "default"
        if name not in sources:
            raise ValueError(f"there is no chat template {name!r}, only {sorted(sources)}")
        return sources[name]

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **ignored: Any
    ) -> list[tuple[float, bool]]:
        return compute_log_probs(self.model, [(c, a) for _, c, a in requests], self.batch_size)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each text, in windows of maximum length."""
        results = []
        for (text,) in (request.args for request in requests):
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.model.config.max_seq_len,
                context_len=1,
            )
            pairs = [utils.make_disjoint_window(window) for window in windows]
            results.append(sum(p for p, _ in compute_log_probs(self.model, pairs, self.batch_size)))
        return results

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate a continuation of each context, up to the stop texts of the task."""
        results = []
        for context, options in (request.args for request in requests):
            stop = options.get("until", [])
            sampling = Sampling(
                max_tokens=int(options.get("max_gen_toks", MAX_NEW_TOKENS)),
                temperature=options.get("temperature", 1.0) if options.get("do_sample") else 0.0,
                top_k=int(options.get("top_k", 0)),
                top_p=float(options.get("top_p", 1.0)),
                stop=tuple(filter(None, [stop] if isinstance(stop, str) else stop)),
            )
            max_len = self.model.config.max_seq_len
            ids = (self.tok_encode(context) or [self.chat_format.start_token])[-max_len:]
            sequence = make_sequence(context, ids, self.chat_format, seed=0)
            for _ in generate(self.model, self.chat_format, [sequence], sampling):
                pass
            results.append(sequence.text)
        return results


def main() -> None:
    """Run ``lm_eval`` with ``--model weft`` registered."""
    from lm_eval.__main__ import cli_evaluate

    model_registry.register("weft", target="weft.inference.lm_eval_model:WeftLM")
    cli_evaluate()


if __name__ == "__main__":
    main()
