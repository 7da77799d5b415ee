"""Multiple choice: which of several continuations a model finds likeliest.

Tasks are files of the Language Model Evaluation Harness (github.com/EleutherAI/
lm-evaluation-harness, docs/task_guide.md), of which what a local question needs is understood:
JSON lines, templates or names of fields, and the two accuracies.  What else a file says is refused,
not overlooked; the harness itself can drive a checkpoint, too: see `weft.tools.lm_eval_model`.

Shapes in names: B rows, T tokens of a row, N predicted tokens, V vocabulary.
"""

from __future__ import annotations

import ast
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from weft.config.errors import MISSING, ConfigError, InvalidConfig
from weft.tools.generate import ChatFormat
from weft.tools.inference_model import LanguageModel

Json = dict[str, Any]

NEEDED = ("task", "doc_to_text", "doc_to_choice", "doc_to_target")
# Keys with the only value that means what is done here; None: any, for it changes nothing.
KNOWN: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(NEEDED),
    "dataset_path": ("json",),
    "dataset_kwargs": None,
    "dataset_name": (None,),
    "output_type": ("multiple_choice",),
    "test_split": None,
    "validation_split": None,
    "training_split": None,
    "target_delimiter": None,
    "metric_list": None,
    "num_fewshot": (0, None),
    "tag": None,
    "metadata": None,
}
METRICS = ("acc", "acc_norm")
USUAL = {"aggregation": "mean", "higher_is_better": True}  # of these


@dataclass(frozen=True)
class Question:
    """``choices`` continue ``context``, which they are joined to as they are."""

    context: str
    choices: tuple[str, ...]
    joint: str  # between them
    gold: int


@dataclass(frozen=True)
class Task:
    """Questions under a name."""

    name: str
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Score:
    """Shares of right answers, by log-probability and by that for each character, and the standard
    errors of these means."""

    task: str
    questions: int
    acc: float
    acc_stderr: float
    acc_norm: float
    acc_norm_stderr: float


# --------------------------------------------------------------------------- files


def read_task(path: Path) -> Task:
    """A task's YAML file, and the JSON lines that it names, relative to it or to here.

    Raises:
        InvalidConfig: with every reason why it cannot be scored here.
    """
    try:
        import yaml
    except ImportError as error:
        rule, remedy = "needs PyYAML", "pip install 'weft[eval]'"
        raise InvalidConfig([ConfigError("--task", str(path), rule, remedy)]) from error
    try:
        tree = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        # Whatever `!function` names is code, which is never run: it fails here.
        rule = f"cannot be read: {str(error).splitlines()[0]}"
        raise InvalidConfig([ConfigError("--task", str(path), rule)]) from error
    if not isinstance(tree, dict):
        raise InvalidConfig([ConfigError("--task", str(path), "is no task: it has no keys")])
    problems = list(_check(tree))
    documents = [] if problems else _documents(tree, path, problems)
    questions = []
    for number, document in enumerate(documents, 1):
        try:
            questions.append(_question(tree, document))
        except Exception as error:  # whatever the templates of the file raise
            told = f"document {number}: {type(error).__name__}: {error}"
            problems.append(ConfigError("--task", str(path), told, "mend the template or the data"))
            break
    if not problems and not questions:
        problems.append(ConfigError("--task", str(path), "has no questions"))
    if problems:
        raise InvalidConfig(problems)
    return Task(str(tree["task"]), tuple(questions))


def _check(tree: Json) -> list[ConfigError]:
    found = [ConfigError(name, MISSING, "is missing") for name in NEEDED if name not in tree]
    elsewhere = "let the harness drive the checkpoint: docs/evaluate.md"
    for name, value in tree.items():
        if name not in KNOWN:
            found.append(ConfigError(str(name), value, "is not understood", elsewhere))
        elif (only := KNOWN[name]) is not None and value not in only:
            found.append(ConfigError(name, value, f"must be {only[0]}", elsewhere))
    for name in tree.get("dataset_kwargs") or {}:
        if name != "data_files":
            found.append(
                ConfigError(f"dataset_kwargs.{name}", MISSING, "is not understood", elsewhere)
            )
    for metric in tree.get("metric_list") or []:
        measure = metric.get("metric") if isinstance(metric, dict) else metric
        for name, value in metric.items() if isinstance(metric, dict) else ():
            if name != "metric" and USUAL.get(name) != value:
                rule = f"must be {USUAL[name]}" if name in USUAL else "is not understood"
                found.append(ConfigError(f"metric_list.{name}", value, rule, elsewhere))
        if measure not in METRICS:
            found.append(
                ConfigError("metric_list", measure, f"has only {' and '.join(METRICS)}", elsewhere)
            )
    return found


def _documents(tree: Json, path: Path, problems: list[ConfigError]) -> list[Json]:
    """Of the test split, or else the validation split."""
    files = (tree.get("dataset_kwargs") or {}).get("data_files")
    if isinstance(files, dict):
        split = tree.get("test_split") or tree.get("validation_split")
        files = files.get(split)
    documents: list[Json] = []
    for name in [files] if isinstance(files, str) else files or []:
        beside = path.parent / name
        try:
            text = (beside if beside.exists() else Path(name)).read_text("utf-8")
            # Not splitlines: a string of JSON may have what Unicode calls the end of a line.
            documents += [json.loads(line) for line in text.split("\n") if line.strip()]
        except (OSError, ValueError, RecursionError) as error:
            problems.append(
                ConfigError("dataset_kwargs.data_files", name, f"cannot be read: {error}")
            )
    if not files:
        rule = "must name the files of test_split, or of validation_split"
        problems.append(ConfigError("dataset_kwargs.data_files", MISSING, rule))
    return documents


def _question(tree: Json, document: Json) -> Question:
    choices = tree["doc_to_choice"]
    if isinstance(choices, str):
        choices = _filled(choices, document)
        choices = ast.literal_eval(choices) if isinstance(choices, str) else choices
    choices = list(choices.values()) if isinstance(choices, dict) else choices
    if "" in choices:
        raise ValueError("a choice is empty")
    target = tree["doc_to_target"]
    gold = _filled(target, document) if isinstance(target, str) else target
    if isinstance(gold, str):
        # As the harness has it: digits of a template are a number, those of a field a choice.
        number = gold.isdigit() and target not in document
        gold = int(gold) if number else choices.index(gold)
    if not 0 <= gold < len(choices):
        raise ValueError(f"the answer is number {gold} of {len(choices)} choices")
    context = _filled(tree["doc_to_text"], document)
    return Question(str(context), tuple(choices), tree.get("target_delimiter", " "), gold)


def _filled(template: str, document: Json) -> Any:
    """A field of that name, or the template with the document's fields."""
    from jinja2 import StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment

    if template in document:
        return document[template]
    environment = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(template).render(**document)


# --------------------------------------------------------------------------- scores


def score(task: Task, model: LanguageModel, speech: ChatFormat, batch: int) -> Score:
    """Ask every question; every rank of the model calls it, and gets the same."""
    pairs = [
        encoded(speech, question.context, question.joint + choice)
        for question in task.questions
        for choice in question.choices
    ]
    told = iter(log_probabilities(model, pairs, batch))
    right: list[float] = []
    right_by_length: list[float] = []
    for question in task.questions:
        sums = [next(told)[0] for _ in question.choices]
        for answers, values in (
            (right, sums),
            (right_by_length, [s / len(c) for s, c in zip(sums, question.choices, strict=True)]),
        ):
            answers.append(float(values.index(max(values)) == question.gold))
    return Score(task.name, len(right), *_mean_and_error(right), *_mean_and_error(right_by_length))


def _mean_and_error(values: list[float]) -> tuple[float, float]:
    mean = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return mean, error


def encoded(speech: ChatFormat, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Tokens of both, split where those of the context alone end.

    Spaces that end the context go to the continuation, whose first token most tokenizers would
    begin with them.
    """
    kept = context.rstrip()
    continuation = context[len(kept) :] + continuation
    if not kept:
        return [speech.begin], speech.tokenizer.encode(continuation, add_special_tokens=False).ids
    tokenizer: Tokenizer = speech.tokenizer
    whole, first = tokenizer.encode(kept + continuation).ids, tokenizer.encode(kept).ids
    return first, whole[len(first) :]


def log_probabilities(
    model: LanguageModel, pairs: Sequence[tuple[list[int], list[int]]], batch: int
) -> list[tuple[float, bool]]:
    """For each (context, continuation) in tokens: the log-probability of the continuation in nats,
    and whether it is the likeliest token by token.

    Contexts lose their beginnings where both together are longer than the model takes.
    """
    most = model.config.max_seq_len
    order = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))
    found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
    for first in range(0, len(order), batch):
        some = order[first : first + batch]
        wholes = [(pairs[i][0] + pairs[i][1])[-(most + 1) :] for i in some]
        width = max(len(whole) for whole in wholes) - 1
        tokens_BT = torch.tensor([w[:-1] + [0] * (width + 1 - len(w)) for w in wholes])
        counts = [min(len(pairs[i][1]), len(w) - 1) for i, w in zip(some, wholes, strict=True)]
        places = [
            (row, len(whole) - 1 - count + k)
            for row, (whole, count) in enumerate(zip(wholes, counts, strict=True))
            for k in range(count)
        ]
        rows_N, places_N = torch.tensor(places, device=model.device).reshape(-1, 2).unbind(1)
        targets_N = torch.tensor(
            [t for w, n in zip(wholes, counts, strict=True) for t in w[len(w) - n :]],
            device=model.device,
        )
        logits_NV = model.logits(tokens_BT.to(model.device), rows_N, places_N, None)
        own_N = logits_NV.log_softmax(-1).gather(1, targets_N.unsqueeze(1)).squeeze(1).cpu()
        greedy_N = (logits_NV.argmax(-1) == targets_N).cpu()
        own, greedy = own_N.split_with_sizes(counts), greedy_N.split_with_sizes(counts)
        for i, logs, likeliest in zip(some, own, greedy, strict=True):
            found[i] = float(logs.sum()), bool(likeliest.all())
    return found
