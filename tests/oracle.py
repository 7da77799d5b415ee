"""An oracle for one process: transformers, torch.optim and a manual loop.

weft trains some steps of a small job; the oracle computes the same from the documents' tokens
with another model, another loss, other masks and another optimizer. Every number is compared:
data, loss, each gradient, the norm, the clipped update of each parameter, the learning rate and
the evaluation. The oracle takes from weft only the initial weights, and the tokens of each row.

Each comparison begins from equal numbers: after a step the oracle's weights are set to weft's,
and its optimizer gets weft's gradients. So a difference is never the effect of an older one, and
the first one in the order of computing locates the fault (`Departure.module`).

*Limits.* In float32 1e-5 of the largest entry. For bfloat16 and float8 the limit is measured: the
oracle runs in that precision, and weft may differ from the float32 oracle as much as that, times
`SLACK`.

Shapes: B rows of a global batch, T tokens of a row.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracle_models import (
    base_of,
    build_theirs,
    grad_of,
    masks_of,
    module_name,
    theirs_of,
)
from tests.small import SMALL, Overrides
from weft.checkpoint.state_dict import trainable_parameters
from weft.config.reader import read_job
from weft.config.schema import Job
from weft.data.dataset import Dataset, Source
from weft.data.loader import (
    Batch,
    Loader,
    Mixture,
    Pairs,
    build_mixture,
    evaluation_batches,
)
from weft.data.token_store import Manifest, Shard, Split, Store
from weft.optim.optimizer import (
    clip_scale,
    compute_grad_norm,
    learning_rate,
    masked_step,
    set_learning_rate,
)
from weft.planning.plan import Machine, Plan
from weft.planning.resolve import resolve
from weft.training.reference_logprobs import log_probs
from weft.training.setup import Built, Rank, build

LIMIT = 1e-5  # of float32, relative to the largest entry
UPDATE_LIMIT = 2e-4  # relative rounding of a weight is 6e-8, an update is 1e-3 of a weight
SLACK = 3.0  # factor by which the rounding errors of two implementations may differ
SEPARATOR = 0
NONE = -100  # a target without a loss


class Departure(NamedTuple):
    """A number of weft's that differs from the oracle's."""

    where: str  # data, initial, forward, loss, gradients, norm, update, ...
    text: str
    module: str  # the module of weft that most likely has the fault


# --------------------------------------------------------------------------- documents


@dataclass(frozen=True)
class Corpus:
    """Tokenized documents.

    Attributes:
        kind: text, chat or preferences (document 2 i is chosen over 2 i + 1).
        learned: loss mask of each document; None: all tokens are targets.
    """

    kind: str
    documents: list[Any]
    learned: list[Any] | None = None

    def write(self, directory: Path, vocab_size: int, validation: int) -> Store:
        """Write a store whose last ``validation`` documents are the validation split."""
        cut = len(self.documents) - validation
        splits = []
        for name, subset in (("train", slice(0, cut)), ("validation", slice(cut, None))):
            documents = self.documents[subset]
            tokens = np.concatenate(documents).astype(np.uint16)
            learned = index = None
            shards = [_column(directory / f"{name}-00000.bin", tokens)]
            if self.learned is not None:
                marks = np.concatenate(self.learned[subset]).astype(np.uint8)
                learned = _column(directory / f"{name}-00000.learned", marks)
                ends = np.cumsum([len(document) for document in documents])
                rows = np.stack((ends, np.zeros_like(ends), np.arange(len(ends)) + 1), axis=1)
                index = _column(directory / f"{name}-00000.documents", rows.astype(np.int64))
            splits.append(Split(len(documents), 0, len(tokens), shards, learned, index))
        manifest = Manifest(
            format=1,
            key="oracle",
            source="oracle",
            dtype="uint16",
            vocab_size=vocab_size,
            separator=SEPARATOR,
            tokenizer_hash="",
            unigram_entropy_nats=0.0,
            skipped_files=0,
            replaced_files=0,
            train=splits[0],
            validation=splits[1],
            kind=self.kind,  # type: ignore[arg-type]
        )
        return Store(directory, manifest)

    def part(self, validation_set: int, validation: bool) -> Corpus:
        """Return the training or the validation split."""
        cut = len(self.documents) - validation_set
        subset = slice(cut, None) if validation else slice(0, cut)
        return Corpus(self.kind, self.documents[subset], self.learned and self.learned[subset])


def _column(path: Path, values: Any) -> Shard:
    values.tofile(path)
    return Shard(path.name, values.size, values.nbytes, "")


def draw_corpus(kind: str, documents: int, vocab_size: int, longest: int, seed: int) -> Corpus:
    """Draw random documents of varied lengths; conversations have a loss mask."""
    random = np.random.default_rng([seed, 17])
    result, learned = [], []
    for _ in range(documents):
        size = int(random.integers(2, longest + 1))
        tokens = random.integers(1, vocab_size, size)
        if kind == "text":
            tokens[-1] = SEPARATOR
        marks = random.random(size) < random.random()
        marks[-1] = True
        result.append(tokens)
        learned.append(marks)
    return Corpus(kind, result, None if kind == "text" else learned)


class Row(NamedTuple):
    """A sequence as the oracle builds it: int64 ``[T]`` each."""

    tokens: Any
    targets: Any
    documents: Any
    positions: Any
    members: tuple[Any, ...]  # identifies parts of the corpus, to find repeated ones


class Wrong(Exception):
    """weft's data differs from the corpus."""


class Reader:
    """Rebuild the expected row from the tokens of weft's row."""

    def __init__(self, corpus: Corpus, seq_len: int, packing: str) -> None:
        self.corpus, self.seq_len = corpus, seq_len
        self.packed = corpus.kind != "text" or packing == "best_fit"
        self.separate_documents = packing != "windows"
        self.stream = np.concatenate(corpus.documents)
        self.windows: dict[bytes, int] = {}
        self.pieces: dict[bytes, tuple[int, int]] = {}
        if not self.packed:
            for number in range((len(self.stream) - 1) // seq_len):
                local = self.stream[number * seq_len : (number + 1) * seq_len]
                self.windows[local.tobytes()] = number
            return
        for number, document in enumerate(corpus.documents):
            for begin in range(0, len(document) - 1, seq_len):
                end = min(begin + seq_len, len(document) - 1)
                self.pieces[document[begin:end].tobytes()] = (number, begin)

    @property
    def members(self) -> set[Any]:
        """Return the members that every epoch must contain."""
        return set((self.pieces or self.windows).values())

    def row(self, batch: Batch, index: int) -> Row:
        """Return the expected row for one row of weft's batch.

        Raises:
            Wrong: the corpus has no such row.
        """
        tokens = batch.tokens_BT[index].numpy()
        if not self.packed:
            number = self.windows.get(tokens.tobytes())
            if number is None:
                raise Wrong(f"row {index} is no window of the stream")
            return self._window(number)
        assert batch.documents_BT is not None
        return self._packed(tokens, batch.documents_BT[index].numpy(), index)

    def _window(self, number: int) -> Row:
        begin, size = number * self.seq_len, self.seq_len
        tokens, targets = (
            self.stream[begin : begin + size],
            self.stream[begin + 1 : begin + size + 1],
        )
        documents, positions = np.zeros(size, np.int64), np.arange(size)
        targets = targets.copy()
        if self.separate_documents:
            document = position = 0
            for at in range(size):
                documents[at], positions[at] = document, position
                position += 1
                if tokens[at] == SEPARATOR:
                    targets[at] = NONE
                    document, position = document + 1, 0
        return Row(tokens, targets, documents, positions, (number,))

    def _packed(self, tokens: Any, marked: Any, index: int) -> Row:
        size = self.seq_len
        targets = np.full(size, NONE)
        documents, positions = np.zeros(size, np.int64), np.zeros(size, np.int64)
        members, at, number = [], 0, 0
        while at < size:
            # The oracle takes only the end of a document from weft; the corpus must have the piece.
            end = at + int((marked[at:] == marked[at]).cumprod().sum())
            known = self.pieces.get(tokens[at:end].tobytes())
            if known is None:
                if (tokens[at:] != SEPARATOR).any():
                    raise Wrong(f"row {index} has at {at} no document of the corpus")
                end = size
            else:
                document, begin = known
                full = self.corpus.documents[document]
                targets[at:end] = full[begin + 1 : begin + 1 + end - at]
                if self.corpus.learned is not None:
                    marks = self.corpus.learned[document][begin + 1 : begin + 1 + end - at]
                    targets[at:end][~marks] = NONE
                members.append(known)
            documents[at:end], positions[at:end] = number, np.arange(end - at)
            at, number = end, number + 1
        return Row(tokens, targets, documents, positions, tuple(members))


class Rows(NamedTuple):
    """The rows of a global batch, int64 ``[B, T]``."""

    tokens: Tensor
    targets: Tensor
    documents: Tensor
    positions: Tensor


def read_rows(reader: Reader, batches: Sequence[Batch]) -> tuple[Rows, list[Any]]:
    """Return the oracle's rows for weft's batches; skip rows without targets.

    Raises:
        Wrong: a row is not in the corpus, or differs from the expected row.
    """
    rows, members = [], []
    for batch in batches:
        for index in range(len(batch.tokens_BT)):
            result = batch.targets_BT[index].numpy()
            row = reader.row(batch, index)
            if (result == NONE).all() and (row.targets != NONE).any():
                continue
            for name, theirs in (("targets", row.targets), ("documents", row.documents)):
                column = getattr(batch, f"{name}_BT")
                if column is not None and not np.array_equal(column[index].numpy(), theirs):
                    raise Wrong(f"the {name} of a row are wrong")
            if batch.documents_BT is None and row.documents.any():
                raise Wrong("the documents of a row are not told")
            positions = batch.positions_BT
            if positions is not None and not np.array_equal(
                positions[index].numpy(), row.positions
            ):
                raise Wrong("the positions of a row are wrong")
            rows.append(row)
            members += row.members
    columns = (
        torch.from_numpy(np.stack([getattr(row, name) for row in rows]).astype(np.int64))
        for name in Rows._fields
    )
    return Rows(*columns), members


# --------------------------------------------------------------------------- the other model


def logits_of(model: nn.Module, rows: Rows) -> Tensor:
    """Return logits ``[B, T, V]``; a token attends to earlier tokens of its document."""
    out = model(
        input_ids=rows.tokens,
        attention_mask=masks_of(model, rows.documents),
        position_ids=rows.positions,
        use_cache=False,
    )
    result: Tensor = out.logits
    return result


def losses_of(model: nn.Module, rows: Rows) -> Tensor:
    """Return each token's cross-entropy, float32 ``[B, T]``; 0 without a target."""
    log_p = logits_of(model, rows).float().log_softmax(-1)
    mask = rows.targets != NONE
    picked = log_p.gather(2, rows.targets.clamp(min=0)[..., None])[..., 0]
    return torch.where(mask, -picked, torch.zeros(()))


def log_probs_of(losses_BT: Tensor, rows: Rows) -> Tensor:
    """Return log-probabilities of the chosen and rejected answer of every pair: ``[N, 2]``."""
    answers = []
    for losses, targets, documents in zip(losses_BT, rows.targets, rows.documents, strict=True):
        for pair in documents[targets != NONE].div(2, rounding_mode="floor").unique().tolist():
            both = [(losses * (documents == 2 * pair + n)).sum() for n in (0, 1)]
            answers.append(-torch.stack(both))
    return torch.stack(answers)


def loss_of(model: nn.Module, rows: Rows, job: Job, references: Tensor | None) -> Tensor:
    """Return the mean loss of a global batch."""
    losses_BT = losses_of(model, rows)
    if job.train.objective != "dpo":
        return losses_BT.sum() / (rows.targets != NONE).sum()
    assert references is not None
    gain = log_probs_of(losses_BT, rows) - references
    margin = gain[:, 0] - gain[:, 1]
    return torch.log1p(torch.exp(-job.train.beta * margin)).mean()


# --------------------------------------------------------------------------- rounding


# Quantiles of the normal distribution: arXiv:2305.14314, appendix E.
# fmt: off
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)
# fmt: on


def rounded(matrix: Tensor, kind: str) -> Tensor:
    """Quantize and dequantize a matrix as QLoRA does: blocks of 64, scaled by absmax."""
    blocks = matrix.reshape(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    if kind == "int8":
        return ((blocks / largest * 127).round() * largest / 127).view_as(matrix)
    levels = torch.tensor(LEVELS)
    nearest = (blocks[..., None] / largest[..., None] - levels).abs().argmin(-1)
    return (levels[nearest] * largest).view_as(matrix)


class Float8(nn.Linear):
    """A linear layer with float8 operands and one power-of-two scale per tensor."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Float8.apply(x, self.weight)
        return out


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    scale = 2.0 ** math.floor(math.log2(torch.finfo(dtype).max / max(x.abs().max().item(), 1e-12)))
    return (x.float() * scale).to(dtype).float() / scale


class _Float8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        e4m3 = torch.float8_e4m3fn
        return F.linear(_cast(x, e4m3), _cast(weight, e4m3)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        e4m3 = torch.float8_e4m3fn
        low = _cast(grad, torch.float8_e5m2)
        into = (low.flatten(0, -2).T @ _cast(x, e4m3).flatten(0, -2)).to(weight.dtype)
        return (low @ _cast(weight, e4m3)).to(x.dtype), into


def cast_to_low_precision(model: nn.Module, compute: str, float8: str) -> nn.Module:
    """Return a copy of the oracle's model in the precision of the job."""
    low = copy.deepcopy(model)
    if compute == "bfloat16":
        low = low.to(torch.bfloat16)
    if float8 != "none":
        for module in low.modules():
            if type(module) is nn.Linear and module is not getattr(low, "lm_head", None):
                module.__class__ = Float8
    return low


# --------------------------------------------------------------------------- the optimizer


def has_weight_decay(name: str, value: Tensor) -> bool:
    """Return True for matrices of products, without the embedding."""
    is_bias = name.endswith(".bias")  # of experts: a matrix
    return value.dim() > 1 and name != "embed_tokens.weight" and not is_bias


def rate(step: int, job: Job) -> float:
    """Return the learning rate of a step, counted from 1 (weft/optim/optimizer.py)."""
    optim, steps = job.optim, job.train.steps
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    completed = (step - optim.warmup_steps) / (steps - optim.warmup_steps)
    share = {
        "linear": 1 - completed,
        "cosine": (1 + math.cos(math.pi * completed)) / 2,
        "wsd": min(1.0, (1 - completed) / optim.decay_fraction) if optim.decay_fraction else 1.0,
    }[optim.schedule]
    least = optim.lr * optim.min_lr_ratio
    return least + (optim.lr - least) * share


class Updates:
    """The oracle's optimizer with separate parameters: name -> tensor."""

    def __init__(self, params: dict[str, Tensor], job: Job) -> None:
        self.job = job
        self.params = {name: nn.Parameter(p.detach().clone()) for name, p in params.items()}
        optim = job.optim
        self.muon = {
            name
            for name, p in self.params.items()
            if optim.name == "muon" and p.dim() == 2 and name.startswith("layers.")
        }
        self.momentum = {name: torch.zeros_like(self.params[name]) for name in self.muon}
        groups = [
            {
                "params": [
                    p
                    for name, p in self.params.items()
                    if name not in self.muon and has_weight_decay(name, p) is decay
                ],
                "weight_decay": optim.weight_decay * decay,
            }
            for decay in (True, False)
        ]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]] or [torch.zeros(1)],
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            foreach=False,
        )

    @torch.no_grad()
    def step(self, number: int, grads: dict[str, Tensor]) -> float:
        """Clip the gradients and update the parameters; return the norm before clipping."""
        total = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
        limit = self.job.optim.max_grad_norm or math.inf
        factor = min(1.0, limit / (total + 1e-6))
        lr = rate(number, self.job)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        for name, param in self.params.items():
            param.grad = grads[name] * factor
        self.adamw.step()
        for name in self.muon:
            self._muon(name, lr)
        return total

    def _muon(self, name: str, lr: float) -> None:
        """Update one matrix: kellerjordan.github.io/posts/muon, scale of arXiv:2502.16982."""
        param, grad, beta = self.params[name], self.params[name].grad, self.job.optim.momentum
        assert grad is not None
        buffer = self.momentum[name]
        buffer.mul_(beta).add_(grad, alpha=1 - beta)
        x = (1 - beta) * grad + beta * buffer
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        x = x / x.norm().clamp(min=1e-7)  # as torch.optim.Muon
        for _ in range(5):
            square = x @ x.T
            x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
        x = x.T if tall else x
        param.mul_(1 - lr * self.job.optim.weight_decay)
        param.sub_(lr * 0.2 * math.sqrt(max(param.shape)) * x)


# --------------------------------------------------------------------------- jobs


@dataclass(frozen=True)
class Case:
    """A job and its corpus."""

    overrides: Overrides
    corpus: Corpus
    validation: int  # documents
    name: str = field(default="", compare=False)

    @property
    def job(self) -> Job:
        job, _, errors = read_job("demo", SMALL + self.overrides)
        assert not errors, errors
        return job


def make_case(name: str, seed: int, text: str = "text", **keys: object) -> Case:
    """Make a case of the keys ``section__key``; by default 2 steps of 4 rows."""
    chosen: dict[str, object] = {
        "model.num_layers": 2,
        "model.dim": 24,
        "model.num_heads": 4,
        "model.num_kv_heads": 2,
        "model.ffn_dim": 40,
        "model.vocab_size": 288,
        "data.vocab_size": 257,
        "train.seq_len": 20,
        "train.global_batch_size": 4,
        "train.microbatch_size": 2,
        "train.steps": 3,
        "train.seed": seed,
        "train.eval_sequences": 5,
        "optim.lr": 0.01,
        "optim.warmup_steps": 1,
        "run.nproc_per_node": 1,
    }
    chosen |= {key.replace("__", "."): value for key, value in keys.items()}
    if text != "text":
        chosen["data.format"] = text
    seq_len, rows = int(str(chosen["train.seq_len"])), int(str(chosen["train.global_batch_size"]))
    steps, vocab = int(str(chosen["train.steps"])), int(str(chosen["model.vocab_size"]))
    longest = {"text": 2 * seq_len, "chat": seq_len + 1, "preferences": seq_len // 2}[text]
    # The steps need slightly more rows than an epoch has, so the last step begins another epoch.
    expected = max(2, (steps * rows) - 1)
    documents = (
        expected * 2 if text == "preferences" else expected * seq_len * 2 // (longest + 2) + 2
    )
    validation = 8
    documents = documents // 2 * 2
    corpus = draw_corpus(text, documents + validation, vocab, longest, seed)
    while sum(map(len, corpus.documents[:-validation])) <= seq_len:  # a run refuses such data
        documents += 2
        corpus = draw_corpus(text, documents + validation, vocab, longest, seed)
    overrides = [(key, _text(value)) for key, value in chosen.items()]
    return Case(overrides, corpus, validation, name)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"model__kind": "llama"},
    "llama3": {
        "model__kind": "llama",
        "model__rope_scaling": "llama3",
        "model__rope_original_context": 16,
        "model__rope_theta": 500.0,
        "model__rope_factor": 4.0,
    },
    "qwen3": {"model__kind": "qwen3", "model__head_dim": 10},
    "mistral": {"model__kind": "mistral", "model__head_dim": 6},
    "qwen3-moe": {
        "model__kind": "moe",
        "model__preset": "toy-moe",
        "model__head_dim": 8,
        "model__num_experts": 5,
        "model__active_experts": 2,
        "model__expert_dim": 20,
        "model__shared_experts": 0,
        "model__dense_layers": 0,
        "model__balance_rate": 0,
    },
    "deepseek-moe": {
        "model__kind": "moe",
        "model__preset": "toy-moe",
        "model__qk_norm": "none",
        "model__head_dim": 8,
        "model__num_experts": 5,
        "model__active_experts": 2,
        "model__expert_dim": 20,
        "model__shared_experts": 2,
        "model__dense_layers": 1,
        "model__score": "sigmoid",
        "model__route_scale": 2.5,
        "model__balance_rate": 0.05,
    },
}


def draw_case(seed: int) -> Case:
    """Draw a random small job from the seed."""
    random = np.random.default_rng([seed, 3])

    def choose(*values: Any) -> Any:
        return values[int(random.integers(len(values)))]

    family = list(FAMILIES)[seed % len(FAMILIES)]
    keys = dict(FAMILIES[family])
    kv_heads, group = choose(1, 2, 3), choose(1, 2, 3)
    heads, width = kv_heads * group, 2 * int(random.integers(2, 8))
    dense = family in ("llama", "llama3")
    even = family not in ("qwen3", "mistral", "qwen3-moe")  # as transformers requires
    keys |= {
        "model__num_layers": int(random.integers(1, 4)) + ("dense" in family or "deep" in family),
        "model__num_heads": heads,
        "model__num_kv_heads": kv_heads,
        "model__dim": heads * width if even else int(random.integers(11, 50)),
        "model__ffn_dim": int(random.integers(9, 70)),
        "model__vocab_size": int(random.integers(258, 400)),
        "model__tied_embeddings": choose(True, False),
        "model__norm_eps": choose(1e-6, 1e-5, 1e-2),
        "train__seq_len": 2 * int(random.integers(5, 20)),
        "train__global_batch_size": (rows := int(random.integers(1, 8))),
        "train__microbatch_size": int(random.integers(1, 1 + min(rows, 4))),
        "optim__lr": choose(0.01, 0.003),
        "optim__beta1": choose(0.9, 0.8, 0.0),
        "optim__beta2": choose(0.95, 0.99),
        "optim__weight_decay": choose(0.0, 0.1, 1.0),
        "optim__max_grad_norm": choose(0.0, 0.05, 1.0, 100.0),
        "optim__schedule": choose("wsd", "cosine", "linear"),
        "optim__warmup_steps": choose(0, 1, 2),
        "optim__min_lr_ratio": choose(0.0, 0.1),
    }
    if not dense:
        keys["model__head_dim"] = width
    text = choose("text", "text", "text", "chat", "preferences")
    if text == "text":
        keys["data__packing"] = choose("windows", "documents", "best_fit")
    elif text == "preferences":
        keys |= {"train__objective": "dpo", "train__preference_beta": choose(0.1, 0.5)}
    extra = choose("none", "lora", "qlora", "muon", "none")
    if extra == "muon" and "moe" not in family:
        keys["optim__name"] = "muon"
    if extra in ("lora", "qlora") and "moe" not in family:
        keys |= {
            "lora__rank": int(random.integers(1, 5)),
            "lora__alpha": choose(2.0, 8.0),
            "lora__rank_stabilized": choose(True, False),
            "lora__targets": choose("[]", '["q_proj", "down_proj"]'),
        }
        if extra == "qlora":
            keys |= {"lora__quantize": choose("nf4", "int8"), "model__ffn_dim": 128}
            keys |= {"model__dim": 64, "model__num_heads": 4, "model__num_kv_heads": 2}
            keys |= {} if dense else {"model__head_dim": 16}
    return make_case(f"seed {seed}: {family} {text} {extra}", seed, text, **keys)


# --------------------------------------------------------------------------- the comparison


class Weft(NamedTuple):
    """weft's objects for a case, ready to train."""

    job: Job
    plan: Plan
    built: Built
    mixtures: dict[str, Mixture]
    validation: Corpus
    corpus: Corpus


def build_weft(case: Case, directory: Path, rank: Rank | None = None) -> Weft:
    """Build a case in this process, whose process group has one rank."""
    job = case.job
    plan = resolve(job, Machine("cpu", devices=1, world_size=1))
    store = case.corpus.write(directory, plan.model.vocab_size, case.validation)
    text = Dataset(directory, (Source("oracle", 1.0, store),))
    built = build(plan, rank or Rank(0, 0, 1, torch.device("cpu")))
    mixtures = {
        split: build_mixture(text, split, job.train.seq_len, job.data, job.train.seed)  # type: ignore[arg-type]
        for split in ("train", "validation")
    }
    parts = [case.corpus.part(case.validation, held) for held in (False, True)]
    return Weft(job, plan, built, mixtures, parts[1], parts[0])


def oracle_of(weft: Weft) -> nn.Module:
    """Return the oracle's model with weft's initial weights, adapters included."""
    job, config = weft.job, weft.plan.model
    model = build_theirs(job.model.kind, config)
    ours = {name: p for part in weft.built.model_parts for name, p in part.named_parameters()}
    buffers = dict(weft.built.model_parts[0].named_buffers())
    if job.lora.rank:
        from peft import LoraConfig, get_peft_model

        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        section = job.lora
        adapters = LoraConfig(
            r=section.rank,
            lora_alpha=section.alpha,
            use_rslora=section.rank_stabilized,
            target_modules=list(section.targets) or names,
        )
        model = get_peft_model(model, adapters)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, param in ours.items():
            theirs_of(model, name).copy_(whole_of(weft, name, param))
        for name, buffer in buffers.items():
            if name.endswith("expert_bias") and config.balance_rate and config.score != "softmax":
                theirs_of(model, name).copy_(buffer)
    return model.float().train()


def whole_of(weft: Weft, name: str, param: Tensor) -> Tensor:
    """Return a parameter's values; rebuild those of a quantized one from the seed."""
    value = param.full_tensor() if hasattr(param, "full_tensor") else param  # type: ignore[operator]
    if value.dtype != torch.uint8:
        result: Tensor = value.detach().float()
        return result
    from weft.parallel.initialization import init_params

    shape = (value.shape[0], value.shape[1] * 64)
    exact = torch.empty(shape)
    from weft.models import load_family

    family = load_family(weft.job.model.kind)
    init_params([(name, exact)], weft.job.train.seed, lambda n: family.get_init(n, weft.plan.model))
    return rounded(exact, weft.job.lora.quantize)


def departures(case: Case) -> Iterator[Departure]:
    """Yield every number of weft's that differs from the oracle's, in order of computation.

    The process group must have one rank.
    """
    with tempfile.TemporaryDirectory(prefix="weft-oracle-") as directory:
        weft = build_weft(case, Path(directory))
        yield from _Comparison(weft).run()


def check_case(case: Case) -> None:
    """Raise AssertionError with the first departure."""
    result = next(departures(case), None)
    assert result is None, f"{case.name}: {result}"


class _Comparison:
    def __init__(self, weft: Weft) -> None:
        self.weft, self.job, self.plan = weft, weft.job, weft.plan
        self.built = weft.built
        self.params = dict(trainable_parameters(weft.built.model_parts))
        self.theirs = oracle_of(weft)
        self._gates = self._watch_gates()
        job = self.job
        low = (self.plan.compute_dtype, job.precision.float8) != ("float32", "none")
        self.low = low
        self.updates = Updates({name: full_tensor(p) for name, p in self.params.items()}, job)
        packing = "documents" if job.data.keeps_documents else "windows"
        packing = job.data.packing if job.data.packing != "windows" else packing
        self.reader = Reader(weft.corpus, job.train.seq_len, packing)
        self.held = Reader(weft.validation, job.train.seq_len, packing)
        self.packed_module = "data/packing.py" if self.reader.packed else "data/loader.py"

    def run(self) -> Iterator[Departure]:
        yield from self._initial()
        mixture = self.weft.mixtures["train"]
        engine = self.built.train_step
        references: dict[bytes, Tensor] | None = None
        if self.job.train.objective == "dpo":
            result = list(self._references(mixture))
            yield from result[:-1]
            mixture, references = result[-1]  # type: ignore[assignment]
        loader = Loader(
            mixture,
            seed=self.job.train.seed,
            global_batch_size=self.job.train.global_batch_size,
            dp_rank=0,
            dp_size=1,
            microbatch_size=self.plan.microbatch_size,
        )
        consumed_batches: list[Any] = []
        params = list(self.params.values())
        for step in range(1, self.job.train.steps + 1):
            batches = loader.get_microbatches((step - 1) * self.job.train.global_batch_size)
            try:
                rows, members = read_rows(self.reader, batches)
            except Wrong as error:
                yield Departure("data", f"step {step}: {error}", self.packed_module)
                return
            consumed_batches += members
            yield from self._epochs(consumed_batches)
            for param in params:
                param.grad = None
            loss = engine.forward_backward(batches)
            local = {
                name: torch.zeros_like(full_tensor(p))
                if p.grad is None
                else full_tensor(p.grad).clone()
                for name, p in self.params.items()
            }
            known = None if references is None else _known(references, rows)
            yield from self._gradients(step, rows, known, loss.item(), local)
            yield from self._metrics(step, rows, known)
            norm, _ = compute_grad_norm(params)
            lr = learning_rate(step, self.job.train.steps, self.job.optim, self.built.lr_decay)
            if abs(lr - rate(step, self.job)) > 1e-9 * self.job.optim.lr:
                yield Departure(
                    "learning rate",
                    f"step {step}: {lr} is not {rate(step, self.job)}",
                    "optim/optimizer.py",
                )
            set_learning_rate(self.built.optimizer, lr)
            scale = clip_scale(norm, self.job.optim.max_grad_norm)
            masked_step(self.built.optimizer, torch.tensor(False), scale)
            for hook in engine.hooks:
                hook.reduce()
            for hook in engine.hooks:
                hook.update(torch.tensor(False))
            yield from self._update(step, local, norm.item())
            yield from self._balance(step, rows)
        yield from self._evaluation()

    # ---- the comparisons

    def _initial(self) -> Iterator[Departure]:
        """Check the initialization of docs/models.md: normal, truncated at three sigmas."""
        depth = math.sqrt(2 * self.plan.model.num_layers)
        is_offset = getattr(self.plan.model, "norm_offset", False)
        for part in self.built.model_parts:
            for name, param in part.named_parameters():
                value = full_tensor(param).detach()
                if not value.is_floating_point():
                    continue
                value = value.float()
                if value.dim() == 1 or name.endswith(".bias"):
                    is_zero = name.endswith((".bias", "sinks.weight")) or is_offset
                    if (value != 1 - is_zero).any():
                        text = f"{name} is not {1 - is_zero}"
                        yield Departure("initial", text, "parallel/initialization.py")
                    continue
                if ".lora_B" in name:
                    if value.any():
                        yield Departure("initial", f"{name} is not 0", "parallel/lora/adapters.py")
                    continue
                std, edge = 0.02, 3.0
                if "o_proj" in name or "down_proj" in name:
                    std /= depth
                if ".lora_A" in name:
                    edge = math.sqrt(3.0)
                    std = 1 / math.sqrt(value.shape[-1]) / edge
                # Truncation at three sigmas reduces the standard deviation to 0.9866 of its value.
                expected = std * (1.0 if ".lora_A" in name else 0.98658)
                off = abs(float(value.std()) / expected - 1)
                if off > 5 / math.sqrt(2 * value.numel()) or value.abs().max() > edge * std * 1.001:
                    yield Departure(
                        "initial",
                        f"{name}: std {float(value.std()):.4g}, not {expected:.4g}",
                        "parallel/initialization.py",
                    )
                if abs(float(value.mean())) > 5 * std / math.sqrt(value.numel()):
                    yield Departure(
                        "initial", f"{name}: its mean is not 0", "parallel/initialization.py"
                    )
        matrices = [full_tensor(p).flatten()[:8] for p in self.params.values() if p.dim() > 1]
        pairs = ((a, b) for i, a in enumerate(matrices) for b in matrices[:i])
        for a, b in pairs:
            if a.any() and len(a) == len(b) and torch.allclose(a / a[0], b / b[0]):
                yield Departure("initial", "two matrices are alike", "parallel/initialization.py")

    def _epochs(self, consumed_batches: list[Any]) -> Iterator[Departure]:
        """Check that each epoch has every member once, in a shuffled order."""
        members = self.reader.members
        if len(consumed_batches) < 2 or self.reader.packed:
            if len(set(consumed_batches[: len(members)])) < len(consumed_batches[: len(members)]):
                yield Departure("data", "a document comes twice in an epoch", "data/loader.py")
            return
        epochs = [
            consumed_batches[i : i + len(members)]
            for i in range(0, len(consumed_batches), len(members))
        ]
        for epoch in epochs:
            if len(set(epoch)) < len(epoch):
                yield Departure("data", "a sample comes twice in an epoch", "data/loader.py")
        first = epochs[0]
        if len(first) > 6 and first == sorted(first):
            yield Departure("data", "the first epoch is not shuffled", "data/loader.py")

    def _references(self, mixture: Mixture) -> Iterator[Any]:
        """Yield log-probabilities under the initial model; the last is perturbed."""
        [pairs] = mixture.sources
        assert isinstance(pairs, Pairs)
        packed = pairs.packed.packed
        numbers = torch.from_numpy(packed.document_order[::2] // 2)  # pairs, row by row
        known = log_probs(self.built, pairs)[numbers]
        batch = pairs.get_batch(np.arange(len(pairs)))
        rows, _ = read_rows(self.reader, [batch])
        with torch.no_grad():
            expected = log_probs_of(losses_of(self.theirs, rows), rows)
        if not self.low and (known - expected).abs().max() > 1e-4:
            text = f"off by {float((known - expected).abs().max()):.2g} nats"
            yield Departure("references", text, "training/reference_logprobs.py")
        # Perturb the references, as if training had changed the weights.
        random = torch.Generator().manual_seed(1)
        moved = expected + torch.randn(known.shape, generator=random)
        by_row = moved.split((np.diff(packed.offsets) // 2).tolist())
        by_tokens = {
            row.numpy().tobytes(): own for row, own in zip(rows.tokens, by_row, strict=True)
        }
        references = torch.zeros(pairs.num_groups, 2)
        references[numbers] = moved
        yield Mixture([replace(pairs, references=references)]), by_tokens

    def _gradients(
        self,
        step: int,
        rows: Rows,
        references: Tensor | None,
        loss: float,
        grads: dict[str, Tensor],
    ) -> Iterator[Departure]:
        value, exact = self._theirs(self.theirs, rows, references)
        low_value, low = value, exact
        if self.low:
            model = cast_to_low_precision(
                self.theirs, self.plan.compute_dtype, self.job.precision.float8
            )
            low_value, low = self._theirs(model, rows, references)
        limit = LIMIT * abs(value) + SLACK * abs(low_value - value) + self.low * 2e-3 * abs(value)
        loss_off = abs(loss - value) > limit or not math.isfinite(loss)
        wrong = {}
        for name, grad in grads.items():
            off = _distance(grad, exact[name])
            rounding = SLACK * _distance(low[name], exact[name]) if self.low else 0.0
            largest = float((grad - exact[name]).abs().max())
            if self.low:
                bad = not off <= rounding + 1e-3
            else:
                bad = not largest <= LIMIT * max(float(exact[name].abs().max()), 1e-7)
            if bad:
                wrong[name] = off
        if not loss_off and not wrong:
            return
        module, what = self._blame(rows, loss, value, loss_off, wrong, grads, exact)
        worst = ", ".join(f"{n} by {off:.1e}" for n, off in list(wrong.items())[:3])
        text = f"step {step}: loss {loss:.7f}, not {value:.7f}; gradients: {worst or 'agree'}"
        yield Departure(what, text, module)

    def _metrics(self, step: int, rows: Rows, references: Tensor | None) -> Iterator[Departure]:
        """Compare preference metrics, means over pairs: margin, accuracy and rewards."""
        sums = self.built.train_step.metrics
        if sums is None or references is None or self.low:
            return
        with torch.no_grad():
            answers = log_probs_of(losses_of(self.theirs, rows), rows)
        rewards = self.job.train.beta * (answers - references)
        margin = rewards[:, 0] - rewards[:, 1]
        columns = (margin, (margin > 0).float(), rewards[:, 0], rewards[:, 1])
        expected = torch.stack(columns).mean(1)
        off = float((sums[:, 0] / sums[:, 1] - expected).abs().max())
        if off > 1e-4:
            yield Departure("metrics", f"step {step}: off by {off:.1e}", "training/loss.py")

    def _theirs(
        self, model: nn.Module, rows: Rows, references: Tensor | None
    ) -> tuple[float, dict[str, Tensor]]:
        model.zero_grad()
        loss = loss_of(model, rows, self.job, references)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item(), {name: grad_of(model, name).float().clone() for name in self.params}

    def _blame(
        self,
        rows: Rows,
        loss: float,
        expected: float,
        loss_off: bool,
        wrong: dict[str, float],
        grads: dict[str, Tensor],
        exact: dict[str, Tensor],
    ) -> tuple[str, str]:
        """Return the module that most likely has the fault, and the kind of the departure."""
        if name := self._forward(rows):
            return name, "forward"
        factors = [float((grads[n] * exact[n]).sum() / exact[n].square().sum()) for n in grads]
        alike = max(factors) - min(factors) < 1e-3 * abs(max(factors))
        dpo = self.job.train.objective == "dpo"
        if loss_off:
            return ("training/loss.py" if dpo else "training/step.py"), "loss"
        if len(wrong) == len(grads) and alike:
            return "training/step.py", "gradients"
        if len(wrong) == len(grads) or any("lm_head" in name for name in wrong):
            return "training/loss.py", "gradients"
        last = max(wrong, key=list(grads).index)
        # The layer right after a norm determines the norm's gradient.
        last = last.replace("post_attention_layernorm", "mlp")
        return _module_of(last, self.job), "gradients"

    @torch.no_grad()
    def _forward(self, rows: Rows) -> str:
        """Return the first module with a wrong forward pass; empty if there is none."""
        [model] = self.built.model_parts
        outs: dict[str, tuple[str, Tensor]] = {}
        theirs: dict[str, Tensor] = {}
        hooks = []
        rest = dict(self.theirs.named_modules())
        for name, module in model.named_modules():
            full = module_name(self.theirs, name)
            if not name or full not in rest or name.startswith("_"):
                continue
            if name == "embed_tokens" and self.plan.model.embedding_scale != 1:
                continue  # some models scale in the module, others after it

            def ours_hook(m: Any, args: Any, out: Any, name: str = name) -> None:
                out = out[0] if isinstance(out, tuple) else out
                outs[name] = (type(m).__name__, out.detach().float())

            def their_hook(m: Any, args: Any, out: Any, name: str = name) -> None:
                out = out[0] if isinstance(out, tuple) else out
                if isinstance(out, Tensor):
                    theirs[name] = out.detach().float()

            hooks.append(module.register_forward_hook(ours_hook))
            hooks.append(rest[full].register_forward_hook(their_hook))
        difference = self.job.data.keeps_documents
        model.eval()
        was, model.fused_loss = model.fused_loss, False  # type: ignore[assignment]
        ours_logits = model(
            rows.tokens,
            rows.documents if difference else None,
            rows.positions if difference else None,
        )
        model.fused_loss = was  # type: ignore[assignment]
        model.train()
        for unit in model.modules():
            if hasattr(unit, "reshard"):
                unit.reshard()
        expected = logits_of(self.theirs, rows)
        for hook in hooks:
            hook.remove()
        limit = 0.1 if self.low else 1e-4
        for name, (kind, out) in outs.items():
            other = theirs.get(name)
            if other is None or other.numel() != out.numel():
                continue
            other = other.view_as(out)  # some layers of experts return the rows of all sequences
            if _distance(out, other) > limit:
                if kind.endswith(("Attention", "Block")):
                    return self._rope(rows)
                return _module_of(f"{name}.weight", self.job)
        if _distance(ours_logits.float(), expected) > limit:
            return "models/decoder.py"
        return ""

    def _rope(self, rows: Rows) -> str:
        """Return the faulty module: rotary tables or attention."""
        [model] = self.built.model_parts
        rotary = base_of(self.theirs).model.rotary_emb
        for is_local in (False, True)[: 1 + (self.plan.model.rope_local_theta > 0)]:
            kinds = ("sliding_attention" if is_local else "full_attention",)
            kinds = kinds if hasattr(rotary, "layer_types") else ()
            theirs = rotary(torch.zeros(1), rows.positions, *kinds)
            theirs = theirs if isinstance(theirs, tuple) else (theirs.real, theirs.imag)
            ours = model.rope(rows.tokens.shape[1], rows.positions, torch.float32, is_local)
            for local, other in zip(ours, theirs, strict=True):
                # Pairs may be halves or neighbors, and one value per pair or two.
                repeated = other.repeat_interleave(local.shape[-1] // other.shape[-1], dim=-1)
                if not torch.allclose(local.sort().values, repeated.sort().values, atol=1e-5):
                    return "models/rotary.py"
        return "models/attention.py"

    def _update(self, step: int, grads: dict[str, Tensor], norm: float) -> Iterator[Departure]:
        before = {name: p.detach().clone() for name, p in self.updates.params.items()}
        expected = self.updates.step(step, grads)
        if not abs(norm - expected) <= LIMIT * expected:
            text = f"step {step}: {norm:.7g}, not {expected:.7g}"
            yield Departure("norm", text, "optim/optimizer.py")
        optim = self.job.optim
        limit = UPDATE_LIMIT if optim.state_dtype == "float32" else 0.05
        for name, param in self.params.items():
            local, theirs = full_tensor(param).detach(), self.updates.params[name].detach()
            distance = float((theirs - before[name]).abs().max())
            size = 1e-6 * float(theirs.abs().max())
            off = float((local - theirs).abs().max())
            if optim.state_dtype != "float32":
                off = float((local - theirs).norm()) / math.sqrt(local.numel())
            if not off <= limit * distance + size:
                text = f"step {step}: {name} is off by {off / max(distance, 1e-30):.1e} of its way"
                module = "optim/optimizer.py"
                if name in self.updates.muon:
                    module = "optim/muon.py"
                elif optim.state_dtype != "float32":
                    module = "optim/low_precision_adamw.py"
                yield Departure("update", text, module)
        with torch.no_grad():
            for name, param in self.params.items():
                local = full_tensor(param).detach()
                self.updates.params[name].copy_(local)
                theirs_of(self.theirs, name).copy_(local)

    def _balance(self, step: int, rows: Rows) -> Iterator[Departure]:
        """Check that each expert's bias moves against its load in the global batch."""
        config = self.plan.model
        if not getattr(config, "balance_rate", 0.0):
            return
        buffers = {
            name: buffer
            for part in self.built.model_parts
            for name, buffer in part.named_buffers()
            if name.endswith("expert_bias")
        }
        moved = self._biases(rows)
        for name, buffer in buffers.items():
            off = float((buffer - moved[name]).abs().max())
            if off > 1e-6 and not self.low:
                yield Departure(
                    "balance", f"step {step}: {name} is off by {off}", "optim/balance.py"
                )
            theirs_of(self.theirs, name).copy_(buffer)

    def _biases(self, rows: Rows) -> dict[str, Tensor]:
        """Compute the expected biases from the loads of the pass before the update."""
        moved = {}
        for name, chosen in self.chosen.items():
            bias = theirs_of(self.theirs, name)
            loads = torch.bincount(chosen.flatten(), minlength=len(bias)).double()
            moved[name] = (
                bias + self.plan.model.balance_rate * (loads.mean() - loads).sign().float()
            )
        return moved

    @property
    def chosen(self) -> dict[str, Tensor]:
        """Return the expert choices of the oracle's last forward pass."""
        return {
            name.removeprefix("model.").replace("mlp.gate", "mlp.router") + ".expert_bias": found
            for name, found in self._gates.items()
        }

    def _evaluation(self) -> Iterator[Departure]:
        if self.job.train.objective == "dpo":
            return

        def batches() -> Iterator[Batch]:
            return evaluation_batches(
                self.weft.mixtures["validation"],
                self.job.train.eval_sequences,
                0,
                1,
                self.plan.microbatch_size,
            )

        try:
            rows, members = read_rows(self.held, list(batches()))
        except Wrong as error:
            yield Departure("evaluation data", str(error), "data/loader.py")
            return
        samples = len(self.weft.mixtures["validation"].sources[0])
        if len(rows.tokens) != min(self.job.train.eval_sequences, samples):
            yield Departure("evaluation data", f"{len(rows.tokens)} rows", "data/loader.py")
        if len(set(members)) != len(members):
            yield Departure("evaluation data", "a row comes twice", "data/loader.py")
        loss = self.built.train_step.evaluate(batches())
        with torch.no_grad():
            expected = losses_of(self.theirs, rows).sum() / (rows.targets != NONE).sum()
        off = abs(loss - expected.item())
        if not off <= (0.02 if self.low else LIMIT) * abs(expected.item()):
            yield Departure("evaluation", f"{loss}, not {expected.item()}", "training/step.py")

    def _watch_gates(self) -> dict[str, Tensor]:
        results: dict[str, Tensor] = {}
        for name, module in self.theirs.named_modules():
            if name.endswith("mlp.gate"):

                def note(m: Any, args: Any, out: Any, name: str = name) -> None:
                    if torch.is_grad_enabled():
                        results[name] = out[2].detach()

                module.register_forward_hook(note)
        return results


def full_tensor(tensor: Any) -> Tensor:
    """Return the unsharded tensor."""
    result: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return result


def _known(references: dict[bytes, Tensor], rows: Rows) -> Tensor:
    return torch.cat([references[row.numpy().tobytes()] for row in rows.tokens])


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """Return the distance relative to the norm of ``theirs``; infinite if not finite."""
    off = float((ours.double() - theirs.double()).norm())
    size = float(theirs.double().norm())
    return off / size if size and math.isfinite(off) else (0.0 if off == 0 else math.inf)


def _module_of(name: str, job: Job) -> str:
    """Return the module of weft that computes with a parameter."""
    if "lora_" in name or (job.lora.rank and "proj" in name):
        return "parallel/lora/adapters.py"
    if job.precision.float8 != "none" and "proj" in name:
        return "parallel/float8/linear_layers.py"
    if "router" in name or "expert" in name or (job.model.kind == "moe" and ".mlp." in name):
        return "models/moe.py"
    if ("proj" in name and "self_attn" in name) or "sinks" in name:
        return "models/attention.py"
    if name.startswith(("embed", "lm_head")):
        return "models/decoder.py"
    return "models/layers.py"
