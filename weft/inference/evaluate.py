"""Evaluate a trained model: loss on datasets, accuracy on multiple-choice tasks.

`evaluate_sources` computes the loss of each source of a dataset, in any layout.

`score_task` scores questions by the likelihood of each choice.  Tasks are files of the Language
Model Evaluation Harness (github.com/EleutherAI/lm-evaluation-harness, docs/task_guide.md).  This
module supports what a local task needs: JSON lines, templates or field names, and two accuracies.
It rejects other keys.  The harness itself can evaluate a checkpoint, too: see
`weft.inference.lm_eval_model`.

Shapes in names: B sequences, T tokens of a sequence, N predicted tokens, V vocabulary.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from tokenizers import Tokenizer
from torch import Tensor

from weft.config.errors import MISSING, ConfigError, ConfigErrors, InvalidConfig, WeftError
from weft.config.files import read_input, read_text
from weft.config.schema import Job, replace
from weft.data.dataset import Dataset, Source, open_dataset
from weft.data.document_tokens import find_affixes
from weft.data.loader import IGNORE_INDEX, Batch, build_mixture, evaluation_batches
from weft.data.prepare import cache_dir, prepare_data, show_progress
from weft.data.prepared_cache import Report, progress_counter
from weft.data.render_limits import RenderLimitError, limit_rendering
from weft.data.token_store import SplitName, Store
from weft.inference.generate import ChatFormat
from weft.inference.inference_model import CheckpointRef, LanguageModel, load_model_parts
from weft.planning.plan import Plan
from weft.training.setup import Rank
from weft.training.step import TrainStep
from weft.training.step_hooks import build_hooks

Json = dict[str, Any]

ALL_SEQUENCES = 1 << 40  # more than any dataset has
COUNT_CHUNK = 1 << 24  # tokens that are counted together

REQUIRED_KEYS = ("task", "doc_to_text", "doc_to_choice", "doc_to_target")
# Supported keys of a task with their allowed values; None: any value, because it changes nothing.
AllowedValues = Mapping[str, tuple[Any, ...] | None]
TASK_KEYS: AllowedValues = {
    **dict.fromkeys(REQUIRED_KEYS),
    "dataset_path": ("json",),
    "dataset_kwargs": None,
    "dataset_name": (None,),
    "output_type": ("multiple_choice",),
    "test_split": None,
    "validation_split": None,
    "training_split": None,
    "target_delimiter": None,
    "metric_list": None,
    "num_fewshot": None,
    "fewshot_split": None,
    "fewshot_delimiter": None,
    "fewshot_config": None,
    "tag": None,
    "metadata": None,
}
DATASET_KEYS: AllowedValues = {"data_files": None}
FEWSHOT_KEYS: AllowedValues = {"sampler": ("default", "first_n"), "split": None}
FEWSHOT_SEED = 1234  # the harness's
METRIC_KEYS: AllowedValues = {
    "metric": ("acc", "acc_norm"),
    "aggregation": ("mean",),
    "higher_is_better": (True,),
}


# --------------------------------------------------------------------------- loss


class SourceLoss(NamedTuple):
    """Loss of one source.

    Attributes:
        name: name of the source, or its path.
        nats_per_token: mean over the splits.
        tokens: number of predicted tokens.
        bytes: number of bytes of their text, estimated if only a part is evaluated; 0: unknown.
    """

    name: str
    nats_per_token: float
    tokens: int
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON record, with perplexity per token and bits per byte.

        Bits per byte do not depend on the tokenizer.  They and the bytes are None if the store does
        not record its bytes, as of conversations.
        """
        nats = self.nats_per_token * self.tokens
        bits = nats / self.bytes / math.log(2) if self.bytes else None
        return {
            "nats_per_token": self.nats_per_token,
            "perplexity": math.exp(self.nats_per_token),
            "bits_per_byte": bits,
            "tokens": self.tokens,
            "bytes": self.bytes or None,
        }


class SourceScores(NamedTuple):
    """Loss and metrics of a reward model on one source, means over its pairs."""

    name: str
    nats_per_pair: float
    pairs: int
    metrics: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON record."""
        return {"nats_per_pair": self.nats_per_pair, "pairs": self.pairs, **self.metrics}


def evaluate_sources(
    checkpoint: CheckpointRef,
    plan: Plan,
    dataset: Dataset,
    sequences: int,
    rank: Rank,
    include_train: bool,
    report: Report,
) -> list[SourceLoss | SourceScores]:
    """Evaluate the checkpoint on each source of a dataset; every rank must call this.

    Args:
        checkpoint: weights to evaluate.
        plan: the plan of the evaluation.
        dataset: its sources are evaluated.
        sequences: maximum per source and split, evenly spaced.  With fewer than all, the loss and
            bits per byte are estimates.
        rank: this process and its device.
        include_train: evaluate the train split, too, of a dataset that the model has not seen.
        report: called with the progress, in sequences.

    Returns:
        The losses, equal on all ranks; of a reward model, those of pairs.

    Raises:
        WeftError: if a source holds preferences (or none, for a reward model), or no token with a
            loss.
    """
    job = plan.job
    model_parts, mesh, family = load_model_parts(checkpoint, plan, rank)
    # Evaluate one source at a time.
    eval_job = replace(job, data={"mixture": {}})
    if not plan.has_score_head:
        eval_job = replace(eval_job, train={"objective": "next_token"})
    eval_plan = dataclasses.replace(plan, job=eval_job)
    hooks = build_hooks(eval_plan, model_parts, mesh, family, rank.device)
    train_step = TrainStep(model_parts, family, eval_plan, mesh, rank.device, hooks)
    splits: list[SplitName] = ["train", "validation"] if include_train else ["validation"]
    if not include_train and not (job.data.has_validation and dataset.has_validation):
        rule = "the run has no validation set (data.validation_fraction=0)"
        raise WeftError(f"{rule}. Name data to evaluate: --data.path FILE_OR_DIRECTORY")
    losses: list[SourceLoss | SourceScores] = []
    parts = [part for split in splits for part in dataset.parts(split)]
    for source in [*dataset.sources, *filter(None, [dataset.validation])]:
        if source not in [each for each, _ in parts]:
            continue
        nats, tokens, size, evaluated = 0.0, 0.0, 0, 0
        kind = source.store.manifest.kind
        name = source.name if job.data.is_mixture else job.data.path
        if source is dataset.validation:
            name = job.data.validation_path
        if plan.has_score_head and kind != "preferences":
            raise WeftError(f"{name}: holds {kind}, but a reward model compares preferences")
        if kind in ("preferences", "unpaired") and not plan.has_score_head:
            noun = "answers with labels" if kind == "unpaired" else kind
            rule = f"{name}: cannot be evaluated, because it holds {noun}, not text"
            remedy = "--data.path FILE --data.format chat (or text)"
            raise WeftError(f"{rule}. Name conversations or text: {remedy}")
        sums = torch.zeros(1 + len(train_step.metric_names), 2, dtype=torch.float64)
        for split in [split for each, split in parts if each is source]:
            if not source.store.split(split).tokens:
                continue
            use = "validation" if source is dataset.validation else split
            single = Dataset(dataset.path, (Source(source.name, 1.0, source.store),))
            scores = plan.has_score_head
            samples = build_mixture(single, split, plan.seq_len, job.data, plan.seed, scores)
            batches = evaluation_batches(
                samples, sequences, mesh.dp_rank, plan.dp_size, plan.microbatch_size
            )
            total = min(sequences, sum(map(len, samples.sources)))
            advance = progress_counter(report, f"evaluating {name}, {use}", total)
            counts = torch.tensor([0, 1])  # targets, ranks
            mean = train_step.evaluate(_with_progress(batches, plan.dp_size, advance, counts))
            if plan.has_score_head:
                sums += _sum_metrics(train_step, mean)
                continue
            num_targets, ranks = mesh.all_reduce_dp_cp(counts.to(rank.device)).tolist()
            evaluated += round(num_targets * plan.dp_size / ranks)
            predicted, read = _count_targets(source.store, split, job.data.keeps_documents)
            nats, tokens, size = nats + mean * predicted, tokens + predicted, size + read
        if plan.has_score_head:
            losses.append(_mean_scores(name, train_step.metric_names, sums))
            continue
        if evaluated == 0:
            raise WeftError(f"{name}: no token of the validation set has a loss")
        size_of_evaluated = round(size * evaluated / tokens)
        losses.append(SourceLoss(name, nats / tokens, evaluated, size_of_evaluated))
    return losses


def _sum_metrics(train_step: TrainStep, mean_loss: float) -> Tensor:
    """Return sums and counts of an evaluation's loss and metrics, (1 + M, 2)."""
    assert train_step.metrics is not None
    sums = train_step.metrics.double()
    if dist.is_initialized():
        dist.all_reduce(sums)
    sums = sums.cpu()
    count = float(sums[0, 1])
    return torch.cat((torch.tensor([[mean_loss * count, count]], dtype=torch.float64), sums))


def _mean_scores(name: str, metric_names: Sequence[str], sums: Tensor) -> SourceScores:
    """Return the means of `_sum_metrics`.

    Raises:
        WeftError: if there are no pairs.
    """
    if not sums[0, 1]:
        raise WeftError(f"{name}: no pair of the validation set fits train.seq_len")
    loss, *means = (sums[:, 0] / sums[:, 1]).tolist()
    metrics = dict(zip(metric_names, means, strict=True))
    return SourceScores(name, loss, round(float(sums[0, 1])), metrics)


def _with_progress(
    batches: Iterator[Batch], ranks: int, advance: Callable[[int], None], counts: Tensor
) -> Iterator[Batch]:
    """Yield the batches; report each one when the next is requested.

    Args:
        batches: this rank's batches.
        ranks: number of data-parallel ranks.
        advance: called with the number of sequences of all ranks.
        counts: its first element gets the number of targets added.
    """
    for batch in batches:
        yield batch
        counts[0] += (batch.targets_BT != IGNORE_INDEX).sum()
        advance(ranks * len(batch.tokens_BT))


def _count_targets(store: Store, split: SplitName, keeps_documents: bool) -> tuple[float, int]:
    """Return the numbers of predicted tokens and of bytes (0: unknown) of a split.

    If tokens have weights, the sum of these in place of the number.
    """
    info = store.split(split)
    loss_mask = store.loss_mask(split)
    if loss_mask is None:
        # With separate documents, the last token of each one predicts nothing.
        return info.tokens - (info.documents if keeps_documents else 1), info.bytes
    weights = store.weights(split)
    if weights is not None:
        return float(np.asarray(weights).sum(dtype=np.float64)), 0
    count = 0
    for start in range(0, len(loss_mask), COUNT_CHUNK):
        size = min(COUNT_CHUNK, len(loss_mask) - start)
        count += int(loss_mask.read_windows(np.array([start]), size).sum())
    return count, 0


# --------------------------------------------------------------------------- tasks


@dataclass(frozen=True)
class Question:
    """A question; each of ``choices`` may continue ``context``."""

    context: str
    choices: tuple[str, ...]
    delimiter: str  # between context and choice
    gold: int  # index of the right choice


@dataclass(frozen=True)
class ChoiceTask:
    """A task: a name and its questions."""

    name: str
    questions: tuple[Question, ...]
    fewshot: int = 0  # examples in the context of each question


@dataclass(frozen=True)
class TaskScore:
    """Accuracies by log-probability, and by that per character (``norm``)."""

    task: str
    questions: int
    fewshot: int
    acc: float
    acc_stderr: float
    acc_norm: float
    acc_norm_stderr: float


# --------------------------------------------------------------------------- task files


def read_task(path: Path, fewshot: int | None = None) -> ChoiceTask:
    """Read a task's YAML file and the JSON lines that it names.

    Args:
        path: the YAML file.
        fewshot: solved examples before each question; None: the task's ``num_fewshot``.

    Raises:
        InvalidConfig: with every reason why the task cannot be scored.
    """
    try:
        import yaml
    except ImportError as error:
        rule, remedy = "needs PyYAML", "run pip install 'weft[eval]'"
        raise InvalidConfig([ConfigError("--task", str(path), rule, remedy)]) from error
    try:
        tree = yaml.safe_load(read_input(path))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        # The tag `!function` names code, which weft never runs: loading fails.
        rule = f"cannot be read: {str(error).splitlines()[0]}"
        raise InvalidConfig([ConfigError("--task", str(path), rule)]) from error
    if not isinstance(tree, dict):
        raise InvalidConfig([ConfigError("--task", str(path), "is not a task: it has no keys")])
    errors = _check(tree)
    splits = tree.get("test_split") or tree.get("validation_split"), _example_split(tree)
    documents = [] if errors else _read_documents(tree, path, splits[0], errors)
    fewshot = (tree.get("num_fewshot") or 0) if fewshot is None else fewshot
    examples = documents if splits[0] == splits[1] else []
    if fewshot and not errors and not examples:
        examples = _read_documents(tree, path, splits[1], errors)
    if fewshot and not errors and len(examples) <= fewshot:
        rule = f"needs {fewshot + 1} documents, for the examples and a question; the split has "
        remedy = f"use at most {max(0, len(examples) - 1)}"
        errors.add("--fewshot", f"{rule}{len(examples)}", remedy, value=fewshot)
        documents = []
    draw = _ExampleSampler(tree, examples, fewshot, is_same=splits[0] == splits[1])
    questions = []
    for number, document in enumerate(documents, 1):
        try:
            question = _make_question(tree, document)
            prefix = "".join(_solve(tree, each) for each in draw(document))
            questions.append(dataclasses.replace(question, context=prefix + question.context))
        except Exception as error:  # templates may raise any error
            rule = f"fails at document {number}: {type(error).__name__}: {error}"
            errors.add("--task", rule, "fix the template or the data", value=str(path))
            break
    if not errors and not questions:
        errors.add("--task", "has no questions", value=str(path))
    errors.raise_any()
    return ChoiceTask(str(tree["task"]), tuple(questions), fewshot)


def _example_split(tree: Json) -> str | None:
    """Return the split of few-shot examples: as the harness chooses it."""
    config = tree.get("fewshot_config") or {}
    names = (tree.get(f"{kind}_split") for kind in ("fewshot", "training", "validation", "test"))
    return next(filter(None, (config.get("split"), *names)), None)


class _ExampleSampler:
    """Draws the few-shot examples of each question, in the order of the questions.

    They are those of the harness with the same ``fewshot_split``.  A question is no example of
    itself.
    """

    def __init__(self, tree: Json, examples: Sequence[Json], count: int, is_same: bool) -> None:
        self._examples, self._count, self._is_same = list(examples), count, is_same
        self._takes_first = (tree.get("fewshot_config") or {}).get("sampler") == "first_n"
        self._random = Random(FEWSHOT_SEED)

    def __call__(self, document: Json) -> list[Json]:
        if not self._count:
            return []
        others = [each for each in self._examples if each != document]
        if self._takes_first:
            return others[: self._count]
        if not self._is_same:
            return self._random.sample(self._examples, self._count)
        drawn = self._random.sample(self._examples, self._count + 1)
        drawn = [each for each in drawn if each != document][: self._count]
        if len(drawn) < self._count:  # of equal documents
            drawn = self._random.sample(others, self._count)
        return drawn


def _solve(tree: Json, document: Json) -> str:
    """Return a document with its answer, and the delimiter of examples."""
    question = _make_question(tree, document)
    answer = question.choices[question.gold]
    end = tree.get("fewshot_delimiter", "\n\n")
    return f"{question.context}{question.delimiter}{answer}{end}"


def _check(tree: Json) -> ConfigErrors:
    errors = ConfigErrors(tree)
    for name in REQUIRED_KEYS:
        if name not in tree:
            errors.add(name, "is missing")
    _check_values(errors, "", tree, TASK_KEYS)
    kwargs, metrics = tree.get("dataset_kwargs") or {}, tree.get("metric_list") or []
    if isinstance(kwargs, dict):
        _check_values(errors, "dataset_kwargs.", kwargs, DATASET_KEYS)
    else:
        errors.add("dataset_kwargs", "must be keys with values")
    fewshot = tree.get("fewshot_config") or {}
    if isinstance(fewshot, dict):
        _check_values(errors, "fewshot_config.", fewshot, FEWSHOT_KEYS)
    else:
        errors.add("fewshot_config", "must be keys with values")
    count = tree.get("num_fewshot") or 0
    if not isinstance(count, int) or count < 0:
        errors.add("num_fewshot", "must be a number of examples", value=count)
    if not isinstance(metrics, list):
        errors.add("metric_list", "must be a list")
        metrics = []
    for metric in metrics:
        values = {"metric": None} | metric if isinstance(metric, dict) else {"metric": metric}
        _check_values(errors, "metric_list.", values, METRIC_KEYS)
    return errors


def _check_values(errors: ConfigErrors, prefix: str, values: Json, allowed: AllowedValues) -> None:
    remedy = "evaluate the checkpoint with the harness: docs/evaluate.md"
    for name, value in values.items():
        choices = allowed.get(name, ())
        if choices is None or value in choices:
            continue
        rule = f"must be {' or '.join(str(x) for x in choices if x is not None) or None}"
        rule = rule if choices else "is not supported"
        errors.add(f"{prefix}{name}", rule, remedy, value=value)


def _read_documents(tree: Json, path: Path, split: str | None, errors: ConfigErrors) -> list[Json]:
    """Read the documents of a split."""
    files = (tree.get("dataset_kwargs") or {}).get("data_files")
    if isinstance(files, dict):
        files = files.get(str(split))
    names = [files] if isinstance(files, str) else files or []
    documents: list[Json] = []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        errors.add("dataset_kwargs.data_files", "must be paths of files", value=names)
        return documents
    for name in names:
        relative = path.parent / name
        try:
            text = read_text(relative if relative.exists() else Path(name))
            # Not splitlines: a JSON string may contain Unicode line separators.
            documents += [json.loads(line) for line in text.split("\n") if line.strip()]
        except (OSError, ValueError, RecursionError) as error:
            errors.add("dataset_kwargs.data_files", f"cannot be read: {error}", value=name)
    if not names:
        rule = f"must name the files of the split {split}"
        if split is None:
            rule = "must name the files of test_split, or of validation_split"
        errors.add("dataset_kwargs.data_files", rule, value=MISSING)
    return documents


def _make_question(tree: Json, document: Json) -> Question:
    choices = tree["doc_to_choice"]
    if isinstance(choices, str):
        choices = _render(choices, document)
        choices = ast.literal_eval(choices) if isinstance(choices, str) else choices
    choices = list(choices.values()) if isinstance(choices, dict) else choices
    if "" in choices:
        raise ValueError("a choice is empty")
    target = tree["doc_to_target"]
    gold = _render(target, document) if isinstance(target, str) else target
    if isinstance(gold, str):
        # As in the harness: digits from a template are an index, those of a field a choice.
        is_index = gold.isdigit() and target not in document
        gold = int(gold) if is_index else choices.index(gold)
    if not 0 <= gold < len(choices):
        raise ValueError(f"the answer is number {gold} of {len(choices)} choices")
    context = _render(tree["doc_to_text"], document)
    return Question(str(context), tuple(choices), tree.get("target_delimiter", " "), gold)


def _render(template: str, document: Json) -> Any:
    """Return the field of that name, or render the template with the fields."""
    from jinja2 import StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment

    if template in document:
        return document[template]
    environment = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    try:
        with limit_rendering():
            return environment.from_string(template).render(**document)
    except RenderLimitError as error:
        raise ValueError(f"a template {error}") from None


# --------------------------------------------------------------------------- scores


def score_task(
    task: ChoiceTask, model: LanguageModel, chat_format: ChatFormat, batch_size: int
) -> TaskScore:
    """Score every question; every rank of the model must call this, and gets the same."""
    pairs = [
        encode_pair(chat_format, question.context, question.delimiter + choice)
        for question in task.questions
        for choice in question.choices
    ]
    log_probs = iter(compute_log_probs(model, pairs, batch_size))
    correct: list[float] = []
    correct_norm: list[float] = []
    for question in task.questions:
        sums = [next(log_probs)[0] for _ in question.choices]
        per_char = [s / len(c) for s, c in zip(sums, question.choices, strict=True)]
        correct.append(float(sums.index(max(sums)) == question.gold))
        correct_norm.append(float(per_char.index(max(per_char)) == question.gold))
    return TaskScore(
        *(task.name, len(correct), task.fewshot),
        *_mean_and_error(correct),
        *_mean_and_error(correct_norm),
    )


def _mean_and_error(values: list[float]) -> tuple[float, float]:
    mean = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return mean, error


def encode_pair(
    chat_format: ChatFormat, context: str, continuation: str
) -> tuple[list[int], list[int]]:
    """Encode both texts together, and split where the tokens of the context alone end.

    Trailing spaces of the context move to the continuation, because most tokenizers put a space
    at the start of a token.
    """
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    tokenizer: Tokenizer = chat_format.tokenizer
    if not stripped:
        ids = tokenizer.encode(continuation, add_special_tokens=False).ids
        return list(find_affixes(tokenizer).start) or [chat_format.start_token], ids
    ids, context_ids = tokenizer.encode(stripped + continuation).ids, tokenizer.encode(stripped).ids
    return context_ids, ids[len(context_ids) :]


def compute_log_probs(
    model: LanguageModel, pairs: Sequence[tuple[list[int], list[int]]], batch_size: int
) -> list[tuple[float, bool]]:
    """Compute log-probabilities of continuations, given (context, continuation).

    Contexts lose their beginning if both are longer than the model's maximum.

    Returns:
        The log-probability in nats, and True if greedy decoding gives the continuation.
    """
    max_len = model.config.max_seq_len
    order = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))
    results: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        sequences = [(pairs[i][0] + pairs[i][1])[-(max_len + 1) :] for i in batch]
        width = max(len(ids) for ids in sequences) - 1
        tokens_BT = torch.tensor([ids[:-1] + [0] * (width + 1 - len(ids)) for ids in sequences])
        counts = [
            min(len(pairs[i][1]), len(ids) - 1) for i, ids in zip(batch, sequences, strict=True)
        ]
        positions = [
            (n, len(ids) - 1 - count + k)
            for n, (ids, count) in enumerate(zip(sequences, counts, strict=True))
            for k in range(count)
        ]
        batch_N, indices_N = torch.tensor(positions, device=model.device).reshape(-1, 2).unbind(1)
        targets_N = torch.tensor(
            [t for ids, n in zip(sequences, counts, strict=True) for t in ids[len(ids) - n :]],
            device=model.device,
        )
        logits_NV = model.logits(tokens_BT.to(model.device), batch_N, indices_N, None)
        log_probs_N = logits_NV.log_softmax(-1).gather(1, targets_N.unsqueeze(1)).squeeze(1).cpu()
        greedy_N = (logits_NV.argmax(-1) == targets_N).cpu()
        log_probs, greedy = log_probs_N.split_with_sizes(counts), greedy_N.split_with_sizes(counts)
        for i, values, is_greedy in zip(batch, log_probs, greedy, strict=True):
            results[i] = float(values.sum()), bool(is_greedy.all())
    return results


# --------------------------------------------------------------------------- the data


def prepare_eval_data(
    checkpoint: CheckpointRef, job: Job, is_run_data: bool, console: Console
) -> Path:
    """Tokenize evaluation data with the run's tokenizer; return its directory.

    If ``is_run_data``, the data and its tokenizer settings are those of the run itself, so the
    settings must still give the run's tokenizer.

    Raises:
        InvalidConfig: if the data cannot be read, or its tokenizer differs from the run's.
    """
    section, tokenizer = job.data, checkpoint.run_dir / "tokenizer.json"
    if not is_run_data:
        section = section.model_copy(update={"tokenizer": str(tokenizer), "validation_path": ""})
    with show_progress(console) as show:
        dataset = prepare_data(section, cache_dir(section), show)
    if (dataset.path / "tokenizer.json").read_bytes() != tokenizer.read_bytes():
        rule = "has changed since the run: its tokenizer differs from the run's"
        remedy = "name the data with --data.path, to use the run's tokenizer"
        raise InvalidConfig([ConfigError("data.path", section.path, rule, remedy)])
    return dataset.path


def load_eval_data(
    checkpoint: CheckpointRef, job: Job, is_run_data: bool, console: Console, rank: Rank
) -> Dataset:
    """Run `prepare_eval_data` on rank 0 and open the dataset on every rank."""
    result: list[Any] = [None]  # the path, or rank 0's configuration errors
    if rank.rank == 0:
        try:
            result = [str(prepare_eval_data(checkpoint, job, is_run_data, console))]
        except InvalidConfig as error:
            result = [error.errors]
    if rank.world_size > 1:
        group = dist.new_group(backend="gloo", timeout=timedelta(days=7))
        dist.broadcast_object_list(result, 0, group=group)
    if isinstance(result[0], list):
        raise InvalidConfig(result[0])
    return open_dataset(result[0])
