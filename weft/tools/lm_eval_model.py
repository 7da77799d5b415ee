"""The Language Model Evaluation Harness drives a weft checkpoint::

    python -m weft.tools.lm_eval_model run --model weft --model_args path=runs/demo --tasks arc_easy

takes the options of ``lm_eval`` (pip install 'weft[eval]') but for chat templates and an automatic
batch size; from Python, give
``lm_eval.simple_evaluate(model=WeftLM("runs/demo"), tasks=[...])``.  Texts are split into tokens,
and rows into windows, as its own ``hf`` model does it, so a checkpoint and its export score the
same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import model_registry

from weft.tools.generate import Row, Sampling, generate
from weft.tools.generate import speech_of as speech_of_run
from weft.tools.inference_model import find_checkpoint, restore_alone
from weft.tools.multiple_choice import log_probabilities

MOST_TOKENS = 256  # of an answer that does not end, where the task does not say


class WeftLM(TemplateLM):  # type: ignore[misc]
    """A checkpoint in this process.

    Args:
        path: a run's folder, or one of its checkpoints.
        batch_size: rows at a time.
        device: cpu or cuda; None: a GPU if there is one.
    """

    def __init__(
        self, path: str, batch_size: int | str = 8, device: str | None = None, **ignored: Any
    ) -> None:
        super().__init__()
        found = find_checkpoint(Path(path).resolve())
        self.model = restore_alone(found, torch.device(device) if device else None)
        self.speech = speech_of_run(found)
        self.rows = int(batch_size)

    @property
    def eot_token_id(self) -> int:
        """What stands before a text without a context."""
        return self.speech.begin

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **ignored: Any
    ) -> list[int]:
        """Tokens, with those that the tokenizer itself adds unless told otherwise."""
        special = add_special_tokens is not False
        return self.speech.tokenizer.encode(string, add_special_tokens=special).ids

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **ignored: Any
    ) -> list[tuple[float, bool]]:
        return log_probabilities(self.model, [(c, a) for _, c, a in requests], self.rows)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability of each whole text, in windows as long as the model takes."""
        found = []
        for (text,) in (request.args for request in requests):
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.model.config.max_seq_len,
                context_len=1,
            )
            pairs = [utils.make_disjoint_window(window) for window in windows]
            found.append(sum(p for p, _ in log_probabilities(self.model, pairs, self.rows)))
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What continues each context, up to what the task says ends it."""
        found = []
        for context, options in (request.args for request in requests):
            stop = options.get("until", [])
            sampling = Sampling(
                max_tokens=int(options.get("max_gen_toks", MOST_TOKENS)),
                temperature=options.get("temperature", 1.0) if options.get("do_sample") else 0.0,
                top_k=int(options.get("top_k", 0)),
                top_p=float(options.get("top_p", 1.0)),
                stop=tuple(filter(None, [stop] if isinstance(stop, str) else stop)),
            )
            most = self.model.config.max_seq_len
            ids = (self.tok_encode(context) or [self.speech.begin])[-most:]
            prefix = self.speech.tokenizer.decode(ids)
            seen = max(0, len(ids) - self.speech.context)
            row = Row(context, ids, len(ids), torch.Generator().manual_seed(0), prefix, seen)
            for _ in generate(self.model, self.speech, [row], sampling):
                pass
            found.append(row.text)
        return found


def main() -> None:
    """``lm_eval``, which knows ``--model weft``."""
    from lm_eval.__main__ import cli_evaluate

    model_registry.register("weft", target="weft.tools.lm_eval_model:WeftLM")
    cli_evaluate()


if __name__ == "__main__":
    main()
