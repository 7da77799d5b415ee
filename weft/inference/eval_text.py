"""Continue ``monitor.eval_prompts`` with the model in training, in any layout.

`weft.inference.generate` samples the tokens.  Their logits come from `TrainStep.evaluate` on
batches of the prompts, so this works with pipeline, context and tensor parallelism, float8 and
compiled blocks.  Each token costs a forward pass over sequences of ``train.seq_len``: there is no
key-value cache.

Shapes in names: B sequences, T tokens of a sequence, N sequences that are continued, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from weft.checkpoint.manifest import run_on_rank_0
from weft.config.files import replace_bytes
from weft.data.document_tokens import IMPORTED_DIR, RECORD_FILE
from weft.data.loader import IGNORE_INDEX, Batch
from weft.data.token_store import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE
from weft.inference.generate import Sampling, generate, load_chat_format, make_sequences
from weft.inference.inference_model import CheckpointRef, LanguageModel
from weft.monitor.heartbeat import beat
from weft.planning.plan import Plan
from weft.training.loss import build_objective
from weft.training.run import Generate
from weft.training.step import TrainStep

SAMPLING = Sampling(max_tokens=64)


def prompt_generator(plan: Plan) -> Generate | None:
    """Return a function that continues the prompts of a run; None without prompts.

    Every rank of the run calls both functions, and gets the same texts: prompt and continuation.
    ``check_stop`` is called before each token, and may raise.

    Raises:
        InvalidConfig: if the run directory has no tokenizer, or its chat template rejects a prompt.
    """
    prompts, data = plan.job.monitor.eval_prompts, plan.job.data
    if not prompts:
        return None
    share_text_format(plan.run_path)
    run = CheckpointRef(plan.run_path, plan.run_path, plan.job, plan.model)
    chat_format = load_chat_format(run, None if data.is_text else data.chat_template)
    # An imported model may have longer sequences than its training here.
    max_context = min(chat_format.max_context, plan.seq_len)
    chat_format = replace(chat_format, max_context=max_context)
    make_sequences(prompts, chat_format, SAMPLING)  # finds errors before the first step

    def continue_prompts(train_step: TrainStep, check_stop: Callable[[], None]) -> list[str]:
        model = TrainingModel(train_step, check_stop)
        sequences = make_sequences(prompts, chat_format, SAMPLING)
        for _ in generate(model, chat_format, sequences, SAMPLING, cached=False):
            pass
        separator = "" if data.is_text else " -> "
        return [f"{sequence.prompt}{separator}{sequence.text}" for sequence in sequences]

    return continue_prompts


def share_text_format(run_dir: Path) -> None:
    """Copy the tokenizer's files to hosts without rank 0's run directory."""

    def read() -> dict[str, bytes]:
        names = ("tokenizer.json", RECORD_FILE, TEMPLATE_FILE, TOKENIZER_CONFIG_FILE)
        paths = [*(run_dir / name for name in names), *(run_dir / IMPORTED_DIR).glob("*")]
        return {str(p.relative_to(run_dir)): p.read_bytes() for p in paths if p.is_file()}

    files = run_on_rank_0(read, f"{run_dir}: the tokenizer could not be read")
    for name, content in files.items():
        path = run_dir / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_bytes(path, content)


class TrainingModel(LanguageModel):
    """The model in training as a `LanguageModel`."""

    def __init__(self, train_step: TrainStep, check_stop: Callable[[], None]) -> None:
        # Not that of the base class, which would change the modules.
        self.train_step, self._check_stop = train_step, check_stop
        self.family, self.config = train_step.plan.family, train_step.plan.model
        self.device = train_step.device

    @torch.no_grad()
    def logits(
        self, tokens_BT: Tensor, batch_N: Tensor, indices_N: Tensor, positions_BT: Tensor | None
    ) -> Tensor:
        """Return float32 logits [N, V] after (batch_N, indices_N); a collective."""
        beat("evaluate")
        self._check_stop()
        step, plan, num_sequences = self.train_step, self.train_step.plan, len(tokens_BT)
        batch_size = min(plan.microbatch_size, num_sequences)
        # Batches are on the host until a step reads them.
        tokens_BT, batch_N, indices_N = tokens_BT.cpu(), batch_N.cpu(), indices_N.cpu()
        num_rows = -(-num_sequences // batch_size) * batch_size
        rows_BT = tokens_BT.new_zeros(num_rows, plan.seq_len)
        rows_BT[:num_sequences, : tokens_BT.shape[1]] = tokens_BT
        # A target says which logits belong to which sequence.
        targets_BT = torch.full_like(rows_BT, IGNORE_INDEX)
        targets_BT[batch_N, indices_N] = torch.arange(len(batch_N))
        columns = (torch.split(column, batch_size) for column in (rows_BT, targets_BT))
        batches = [Batch(rows, targets, None, None) for rows, targets in zip(*columns, strict=True)]
        with record_logits(step) as recorded:
            step.evaluate(batches)
        logits_NV = torch.zeros(len(batch_N), plan.model.vocab_size, device=self.device)
        # All data-parallel ranks have the same prompts; of the others, each has its own logits.
        if step.mesh.dp_rank == 0:
            for targets, shard in recorded:
                logits_NV[targets, step.vocab_range.start : step.vocab_range.stop] = shard.float()
        if dist.get_world_size() > 1:
            dist.all_reduce(logits_NV)
        return logits_NV


@contextmanager
def record_logits(step: TrainStep) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Record the logits of all targets of next-token prediction in this context."""
    saved = step.objective, step.loss_by_source, step.metrics
    step.objective = build_objective("next_token", step.plan.job.train)
    step.loss_by_source = step.metrics = None
    step.logits_at_targets = recorded = list[tuple[Tensor, Tensor]]()
    try:
        yield recorded
    finally:
        step.logits_at_targets = None
        step.objective, step.loss_by_source, step.metrics = saved
