"""Train a few steps on one rank and measure them for `weft.verification.verify`.

The reference process runs first and saves its tensors in a file.  Every rank of the layout
compares its own unsharded view of each tensor with that file and returns numbers only, so replicas
that have diverged are detected, too.

*Forward* is compared block by block, to locate an error.  A hook sums each channel of a block's
input and output, and its square, over all tokens of the rank.  The sums of all ranks, divided by
their number of tokens, are the means over the global batch for every split: sequences, slices of a
sequence (context and sequence parallel), copies (tensor parallel without sequence parallel), and
microbatches.

*Each step* starts from equal weights and equal gradients: a layout loads the reference gradients
after it has compared its own, and the reference parameters after the update; it keeps its own
optimizer states.  AdamW divides by the root of the second moment, so where that is nearly zero a
rounding error becomes a full step.  Equal inputs allow tight limits for clipping and updates.

*Limits* follow from the difference between the reference and the same process with `Noise`.

*Data* are random tokens from the seed.  Between all and a quarter of a sequence's targets have a
loss, so that a mean of means differs from the mean.

Shapes: B sequences of a microbatch, T tokens of a sequence, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.checkpoint.load import load_checkpoint
from weft.checkpoint.manager import CheckpointManager
from weft.checkpoint.manifest import checkpoint_path
from weft.checkpoint.state_dict import persistent_buffers, trainable_parameters
from weft.data.loader import (
    IGNORE_INDEX,
    Batch,
    LabeledAnswers,
    Loader,
    Mixture,
    PackedDocuments,
    Packing,
    Pairs,
    TokenChunks,
    evaluation_batches,
)
from weft.data.packing import PackedSequences, SwappedAnswers
from weft.data.token_store import TokenStream
from weft.models.moe import ExpertLinear
from weft.monitor.layer_stats import hook_forward
from weft.optim.low_precision_adamw import LowPrecisionAdamW
from weft.optim.optimizer import (
    clip_scale,
    compute_grad_norm,
    learning_rate,
    masked_step,
    set_learning_rate,
)
from weft.parallel.dtensor import is_quantized, shard_offsets, to_local
from weft.parallel.expert_dispatch import Overflow
from weft.parallel.float8 import is_float8_expert
from weft.parallel.mesh import Mesh
from weft.parallel.step_hook import find_hook
from weft.planning.plan import Plan
from weft.records.layer_comparison import finite_or_inf, safe_ratio
from weft.training.loss import answer_lengths
from weft.training.setup import Built, Rank, build

# Breaks the layout on a rank, in tests.
Corruption = Callable[[Built, Plan], None]

NEGLIGIBLE = 1e-6  # of the largest gradient: smaller gradients consist of rounding errors
EPS = torch.finfo(torch.float64).eps
SEPARATOR = 0  # the token that ends a document
MEAN_DOCUMENT_TOKENS = 12


class TensorError(NamedTuple):
    """Error of an unsharded tensor against the reference."""

    max_error: float  # largest error of an entry, relative to the largest reference entry
    scale: float  # least-squares factor from the reference to this tensor
    scatter: float = 0.0  # standard error of ``scale``, from the errors that it leaves


class ActivationSums(NamedTuple):
    """Sums of an activation and of its square over tokens: float64 ``[D]``."""

    tokens: int
    values: Any
    squares: Any


class StepMeasurement(NamedTuple):
    """Measurements of one optimizer step on one rank."""

    loss: float
    grad_norm: float
    forward: dict[str, ActivationSums]  # in the order of the forward pass
    gradients: dict[str, TensorError]  # before clipping, in the order of their definition
    updates: dict[str, float]  # error, relative to the length of the reference update


class RankMeasurement(NamedTuple):
    """Measurements of a training on one rank."""

    initial: dict[str, TensorError]
    steps: list[StepMeasurement]
    eval_loss: float
    max_param_error: float  # largest absolute error of a parameter's entry after a step
    overflows: int  # steps computed again, because rows of experts did not fit


def measure_rank(
    plan: Plan,
    directory: str,
    corrupt: Corruption | None = None,
    *,
    resume_step: int = 0,
    save_step: int = 0,
    noise_seed: int = 0,
    num_terms: int = 1,
) -> RankMeasurement:
    """Train ``job.train.steps`` steps on this rank of the process group.

    Args:
        plan: the plan of the shrunk job.
        directory: for checkpoints and the reference tensors, which the process of world size 1
            writes; it must be called first.
        corrupt: called with the built layout and the plan.
        resume_step: step of the checkpoint to load first; 0: none.
        save_step: step to save a checkpoint after; 0: none.
        noise_seed: seed of `Noise`; 0: no noise.
        num_terms: with noise, microbatches of all ranks whose gradients a layout sums.
    """
    if plan.is_compiled:
        torch._inductor.config.compile_threads = 1  # no pool of processes below a rank
    noise = Noise(plan, noise_seed, num_terms) if noise_seed else None
    training = _Training(plan, Path(directory), resume_step, noise)
    initial = training.compare_initial(corrupt)
    steps = []
    for step in range(resume_step + 1, plan.num_steps + 1):
        steps.append(training.measure_step(step))
        if step == save_step:
            training.save_checkpoint(step)
    eval_loss = training.evaluate()
    training.tensors.save()
    errors, overflows = training.tensors.max_param_error, training.count_overflows()
    return RankMeasurement(initial, steps, eval_loss, errors, overflows)


class _Training:
    """The training of one rank; each step ends with the parameters of the reference."""

    def __init__(self, plan: Plan, directory: Path, resume_step: int, noise: Noise | None) -> None:
        rank = Rank(dist.get_rank(), dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
        self._plan, self._built = plan, build(plan, rank)
        model_parts = self._built.model_parts
        self._params = dict(trainable_parameters(model_parts))
        # Each step changes the biases of experts, too.
        self._state: dict[str, Tensor] = self._params | dict(persistent_buffers(model_parts))
        self.tensors = _ReferenceTensors(directory / "one.pt")
        self._checkpoints = directory / "checkpoints"
        if resume_step:
            path = checkpoint_path(self._checkpoints, resume_step)
            load_checkpoint(path, model_parts, self._built.optimizer)
            self.tensors.previous = f"params {resume_step}"
        self._noise = noise
        self._blocks = {
            name: module
            for part in model_parts
            for name, module in part.named_modules()
            if module in plan.family.blocks(part)
        }
        self._loader = _loader(plan, self._built.mesh)

    def count_overflows(self) -> int:
        """Return how many steps were computed again with exact sizes of exchanges."""
        overflow = find_hook(self._built.train_step.hooks, Overflow)
        return overflow.take_count() if overflow is not None else 0

    def compare_initial(self, corrupt: Corruption | None) -> dict[str, TensorError]:
        """Return the errors of the initial parameters; then corrupt the layout."""
        initial = self.tensors.compare(self.tensors.previous, self._state.items())
        if corrupt is not None:
            corrupt(self._built, self._plan)
        if self._noise is not None:
            self._noise.register_hooks(self._built.model_parts)
        return initial

    def measure_step(self, step: int) -> StepMeasurement:
        """Train one step and compare it with the reference."""
        plan, built, noise, params = self._plan, self._built, self._noise, self._params
        microbatches = self._loader.get_microbatches((step - 1) * plan.global_batch_size)
        batches = [_mask_targets(batch, plan) for batch in microbatches]
        batch_sizes = [len(batch.tokens_BT) for batch in batches]
        with note_errors(f"in step {step}"), record_fingerprints(self._blocks, batch_sizes) as sums:
            loss = built.train_step.forward_backward(batches)
        dist.all_reduce(loss)
        if noise is not None:
            noise.perturb_gradients(params.values(), noise.sum_eps)
        gradients = self.tensors.compare(f"gradients {step}", _named_gradients(params))
        self.tensors.load_gradients(f"gradients {step}", params)
        if noise is not None:  # rounding in the optimizer, which Muon amplifies
            noise.perturb_gradients(params.values(), torch.finfo(torch.float32).eps)
        stages = built.mesh.get_group("pp") if plan.pp > 1 else None
        norm, _ = compute_grad_norm([*params.values()], stages)
        lr = learning_rate(step, plan.num_steps, plan.job.optim, built.lr_decay)
        set_learning_rate(built.optimizer, lr)
        scale = clip_scale(norm, plan.job.optim.max_grad_norm)
        masked_step(built.optimizer, torch.tensor(False), scale)
        if noise is not None:
            noise.perturb_optimizer_states(built.optimizer)
        for hook in built.train_step.hooks:
            hook.reduce()
        for hook in built.train_step.hooks:
            hook.update(torch.tensor(False))
        built.optimizer.zero_grad()
        updates = self.tensors.compare_updates(f"params {step}", self._state)
        return StepMeasurement(loss.item(), norm.item(), sums, gradients, updates)

    def save_checkpoint(self, step: int) -> None:
        """Save a checkpoint after a step."""
        with note_errors("in the checkpoint"):
            manager = CheckpointManager(self._checkpoints, keep_latest=1)
            position = {"step": step, "samples": step * self._plan.global_batch_size}
            manager.save(self._built.model_parts, self._built.optimizer, position)
            manager.wait()

    def evaluate(self) -> float:
        """Return the validation loss."""
        with note_errors("during evaluation"):
            batches = _validation_batches(self._plan, self._built.mesh)
            return self._built.train_step.evaluate(batches)


@contextmanager
def note_errors(location: str) -> Iterator[None]:
    """Add the location to errors in this context."""
    try:
        yield
    except Exception as error:
        error.add_note(location)
        raise


def measure_reference(
    plan: Plan, directory: str, noise_seeds: Iterable[int], num_terms: int
) -> list[RankMeasurement]:
    """Train the reference once for each seed of the noise; 0: without noise."""
    measure = partial(measure_rank, plan, directory, num_terms=num_terms)
    return [measure(noise_seed=seed) for seed in noise_seeds]


# --------------------------------------------------------------------------- noise

# Half of the distance of float8 (e4m3) numbers: between normal numbers, relative to them; between
# the smallest ones, relative to a matrix's largest entry, which is scaled to at least 224.
FLOAT8_EPS, FLOAT8_MIN = 2.0**-4, 2.0**-10 / 224


class Noise:
    """Multiply computed tensors by 1 + u eps, u uniform in [-1, 1].

    The change is about as large as that of another summation order:

    * outputs of modules with weights: eps of the compute dtype;
    * gradients, of weights and activations: eps of the reduce dtype, because a rank rounds the sum
      over its tokens, and such sums may cancel;
    * gradients of weights, if the reduce dtype is bfloat16: sqrt(n) times as much, because a
      layout sums n microbatches in that dtype and rounds every time;
    * optimizer states: eps of their dtype;
    * output gradients of a float8 product: eps of float8, because their scales depend on which
      sequences and tokens are multiplied together;
    * inputs of a float8 product: only numbers far below the largest change, because their scales
      are powers of two.
    """

    def __init__(self, plan: Plan, seed: int, num_terms: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._compute_eps = torch.finfo(getattr(torch, plan.compute_dtype)).eps
        reduce_eps = torch.finfo(getattr(torch, plan.reduce_dtype)).eps
        self._reduce_eps = max(self._compute_eps, reduce_eps)
        # In float32 the floor of the limits includes it.
        scale = math.sqrt(num_terms) if plan.reduce_dtype == "bfloat16" else 1.0
        self.sum_eps = max(self._compute_eps, reduce_eps * scale)
        self._float8 = plan.float8 != "none"
        bf16_eps = torch.finfo(torch.bfloat16).eps
        state_eps = {"float32": 0.0, "bfloat16": bf16_eps, "8bit": FLOAT8_EPS}
        self._state_eps = state_eps[plan.state_dtype]

    def register_hooks(self, model_parts: Iterable[nn.Module]) -> None:
        """Register hooks that perturb the outputs of all modules with weights."""
        for part in model_parts:
            for module in part.modules():
                if next(module.parameters(recurse=False), None) is not None:
                    module.register_forward_hook(self._perturb_output)
                    if self._uses_float8(module):
                        module.register_forward_pre_hook(self._perturb_input)

    def _uses_float8(self, module: nn.Module) -> bool:
        is_linear = isinstance(module, nn.Linear | ExpertLinear)
        is_converted = type(module) not in (nn.Linear, ExpertLinear) or is_float8_expert(module)
        return self._float8 and is_linear and is_converted

    def _perturb_input(self, module: nn.Module, args: Any) -> Any:
        x, *rest = args
        u = torch.rand(x.shape, generator=self._generator) * 2 - 1
        return (x + (u * FLOAT8_MIN * x.detach().abs().amax()).to(x.dtype), *rest)

    def _perturb_output(self, module: nn.Module, args: Any, out: Any) -> Any:
        apply: Any = _Perturb.apply
        grad_eps = FLOAT8_EPS if self._uses_float8(module) else self._reduce_eps
        return apply(out, self, self._compute_eps, grad_eps) if isinstance(out, Tensor) else out

    def perturb(self, x: Tensor, eps: float) -> Tensor:
        """Return ``x`` with noise."""
        u = torch.rand(x.shape, generator=self._generator) * 2 - 1
        return (x.float() * (1 + eps * u)).to(x.dtype)

    @torch.no_grad()
    def perturb_gradients(self, params: Iterable[Tensor], eps: float) -> None:
        """Add noise to the gradients of weights."""
        for grad in (to_local(param.grad) for param in params if param.grad is not None):
            grad.copy_(self.perturb(grad, eps))

    @torch.no_grad()
    def perturb_optimizer_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Add noise to the optimizer's states, if their dtype rounds."""
        has_quantized = False
        for state in optimizer.state.values() if self._state_eps else ():
            for key in [key for key in state if key != "step"]:
                value = to_local(state[key])
                if is_quantized(value):
                    state[key] = self.perturb(value.dequantize(), self._state_eps)
                    has_quantized = True
                else:
                    value.copy_(self.perturb(value, self._state_eps))
        if has_quantized:
            cast(LowPrecisionAdamW, optimizer).convert_loaded_state()  # as if it had been loaded


class _Perturb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Noise, eps: float, grad_eps: float) -> Tensor:
        ctx.noise, ctx.grad_eps = noise, grad_eps
        return noise.perturb(x, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.noise.perturb(grad, ctx.grad_eps), None, None, None


# --------------------------------------------------------------------------- tensors


class _ReferenceTensors:
    """The reference tensors, which one process writes and the ranks of a layout read.

    The process that writes them compares itself with itself.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._is_reference = path, not path.exists()
        self._tensors: dict[str, dict[str, Tensor]] = {} if self._is_reference else torch.load(path)
        self.previous = "initial"  # name of the parameters before the current step
        self.max_param_error = 0.0

    def _gather(
        self, key: str, tensors: Iterable[tuple[str, Tensor]]
    ) -> list[tuple[str, Tensor, Tensor]]:
        """Return the name, unsharded tensor and reference of each tensor (collective)."""
        actual = {name: _full_tensor(tensor) for name, tensor in tensors}
        if self._is_reference:
            self._tensors[key] = actual
        return [(name, tensor, self._tensors[key][name]) for name, tensor in actual.items()]

    def compare(self, key: str, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, TensorError]:
        """Return the error of each unsharded tensor (collective)."""
        gathered = self._gather(key, tensors)
        max_abs = max(float(tensor.abs().max()) for tensor in self._tensors[key].values())
        return {name: tensor_error(actual, full, max_abs) for name, actual, full in gathered}

    def compare_updates(self, key: str, params: dict[str, Tensor]) -> dict[str, float]:
        """Return each parameter's error, relative to the length of its reference update.

        Sets the parameters to the reference afterwards.
        """
        errors = {}
        for name, actual, expected in self._gather(key, params.items()):
            update = expected - self._tensors[self.previous][name]
            # Adding a small update rounds to the last place of the parameter.
            rounding = torch.finfo(expected.dtype).eps * expected.abs()
            error = (actual - expected).abs()
            excess = (error - rounding).clamp(min=0.0)
            errors[name] = safe_ratio(excess.norm().item(), update.norm().item())
            self.max_param_error = max(self.max_param_error, finite_or_inf(error.max().item()))
            _copy_shard(params[name], expected)
        self.previous = key
        return errors

    def load_gradients(self, key: str, params: dict[str, nn.Parameter]) -> None:
        """Replace the gradients by the reference gradients."""
        for name, param in params.items():
            if param.grad is not None:
                _copy_shard(param.grad, self._tensors[key][name])

    def save(self) -> None:
        """Save the tensors of the reference process for the ranks of a layout."""
        if self._is_reference:
            torch.save(self._tensors, self._path)


def tensor_error(actual: Tensor, expected: Tensor, max_abs: float = 0.0) -> TensorError:
    """Compare two unsharded tensors.

    Args:
        actual: tensor of the layout.
        expected: tensor of one process, of the same shape.
        max_abs: largest entry of all tensors of this kind.  A tensor far below it, such as the
            gradient of keys where a query sees one key only, is zero up to rounding: its error is
            relative to ``max_abs``.
    """
    if actual.shape != expected.shape:
        return TensorError(math.inf, math.nan)
    actual, expected = actual.double(), expected.double()
    error = (actual - expected).abs().max().item()
    if expected.abs().max().item() < NEGLIGIBLE * max_abs:
        return TensorError(finite_or_inf(error / max_abs), 1.0)
    relative = safe_ratio(error, expected.abs().max().item())
    if relative == 0:
        return TensorError(0.0, 1.0)  # of zeros, too
    square = expected.square().sum().item()
    scale = safe_ratio((actual * expected).sum().item(), square)
    # Errors may grow with the entries: HC3 of MacKinnon and White, J. Econometrics 29 (1985).
    shares = expected.square() / max(square, EPS)
    rest = expected * (actual - scale * expected) / (1 - shares).clamp(min=EPS)
    scatter = safe_ratio(rest.square().sum().sqrt().item(), square)
    return TensorError(relative, scale, scatter)


def _full_tensor(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    moved: Any = tensor.to(tensor.device_mesh.device_type)  # NCCL does not gather from the CPU
    full: Tensor = moved.full_tensor().to(tensor.device)
    return full.clone()


@torch.no_grad()
def _copy_shard(param: Tensor, full: Tensor) -> None:
    """Copy this rank's shard of an unsharded tensor into a parameter."""
    local = to_local(param)
    offsets = shard_offsets(param)
    index = tuple(slice(o, o + size) for o, size in zip(offsets, local.shape, strict=True))
    local.copy_(full[index])


def _named_gradients(params: dict[str, nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
    for name, param in params.items():
        yield name, torch.zeros_like(param) if param.grad is None else param.grad


# --------------------------------------------------------------------------- forward


@contextmanager
def record_fingerprints(
    blocks: Mapping[str, nn.Module], batch_sizes: Sequence[int]
) -> Iterator[dict[str, ActivationSums]]:
    """Record the sums of each block's input and output in one step.

    ``batch_sizes``: see `hook_forward`.
    """
    recorded: dict[str, ActivationSums] = {}

    @torch.no_grad()
    def add(name: str, batch_size: int, input_: Any, output: Tensor) -> None:
        for key, value in ((f"before {name}", input_), (f"in {name}", output)):
            if isinstance(value, Tensor):
                x_ND = value.detach()[:batch_size].double().flatten(0, -2)
                sums = (len(x_ND), x_ND.sum(0).numpy(), x_ND.square().sum(0).numpy())
                recorded[key] = merge_sums([recorded.get(key, NO_SUMS), ActivationSums(*sums)])

    with hook_forward(blocks, batch_sizes, add):
        yield recorded


NO_SUMS = ActivationSums(0, 0.0, 0.0)


def merge_sums(ranks: Iterable[ActivationSums]) -> ActivationSums:
    """Add up the sums of several ranks or microbatches."""
    tokens, values, squares = zip(*ranks, strict=True)
    return ActivationSums(sum(tokens), sum(values), sum(squares))


def sums_distance(actual: ActivationSums, expected: ActivationSums) -> float:
    """Return the relative distance of two fingerprints."""
    if np.shape(actual.values) != np.shape(expected.values):
        return math.inf
    means = np.abs(actual.values / actual.tokens - expected.values / expected.tokens).max()
    squares = np.abs(actual.squares / actual.tokens - expected.squares / expected.tokens).max()
    largest = (expected.squares / expected.tokens).max()
    return max(
        safe_ratio(float(means), math.sqrt(largest)), safe_ratio(float(squares), float(largest))
    )


# --------------------------------------------------------------------------- data


def _random_samples(plan: Plan, stream_id: int, sequences: int) -> Mixture:
    """Draw ``sequences`` samples from the seed."""
    job = plan.job
    generator = np.random.default_rng([plan.seed, stream_id])
    size = sequences * plan.seq_len + 1
    tokens = generator.integers(1, plan.model.vocab_size, size)
    tokens[generator.random(size) < 1 / MEAN_DOCUMENT_TOKENS] = SEPARATOR
    stream, seq_len = TokenStream([tokens]), plan.seq_len
    if job.data.has_preferences:  # pairs of equal answers that fill a sequence
        width = 2 if seq_len >= 4 else 1
        num_pairs, length = width * sequences, seq_len // (2 * width)
        starts = np.arange(2 * num_pairs) * length
        lengths, offsets = np.full(2 * num_pairs, length), np.arange(sequences + 1) * 2 * width
        pairs = PackedSequences(starts, lengths, np.arange(2 * num_pairs), offsets)
        packed = PackedDocuments(
            stream, None, pairs, seq_len, SEPARATOR, scores=plan.has_score_head
        )
        return Mixture([Pairs(packed, torch.zeros(num_pairs, 2), width)])
    if job.data.format == "unpaired":  # answers of equal length, each after one token of prompt
        width = 2 if seq_len >= 4 else 1
        num_answers, length = width * sequences, seq_len // width
        starts, prompts = np.arange(num_answers) * length, np.ones(num_answers, np.int64)
        lengths, offsets = np.full(num_answers, length), np.arange(sequences + 1) * width
        answers = PackedSequences(starts, lengths, np.arange(num_answers), offsets)
        mask = TokenStream([np.ones(size, np.uint8)])
        packed = PackedDocuments(stream, mask, answers, seq_len, SEPARATOR)
        labels = (np.arange(num_answers) % 3 > 0).astype(np.uint8)
        swapped = SwappedAnswers(np.roll(np.arange(num_answers), 1), prompts)
        references = torch.zeros(num_answers, 2)
        return Mixture([LabeledAnswers(packed, labels, swapped, references, width)])
    packing: Packing = "documents" if job.data.keeps_documents else "windows"
    return Mixture([TokenChunks(stream, seq_len, packing, SEPARATOR)])


def _loader(plan: Plan, mesh: Mesh) -> Loader:
    """Return the training loader over random samples, each of them read once."""
    return Loader(
        _random_samples(plan, 0, plan.num_steps * plan.global_batch_size),
        seed=plan.seed,
        global_batch_size=plan.global_batch_size,
        dp_rank=mesh.dp_rank,
        dp_size=plan.dp_size,
        microbatch_size=plan.microbatch_size,
        is_strided=plan.world_size_invariant,
        numbers_tokens=plan.numbers_tokens,
        measures_documents=plan.job.train.neftune_alpha > 0,
    )


def _validation_batches(plan: Plan, mesh: Mesh) -> Iterator[Batch]:
    job = plan.job
    batches = evaluation_batches(
        _random_samples(plan, 1, job.train.eval_sequences),
        num_sequences=job.train.eval_sequences,
        dp_rank=mesh.dp_rank,
        dp_size=plan.dp_size,
        microbatch_size=plan.microbatch_size,
    )
    yield from (_mask_targets(batch, plan) for batch in batches)


def _mask_targets(batch: Batch, plan: Plan) -> Batch:
    """Mask some targets, by a rule that reads only the tokens of their sequence.

    The references of labeled answers are then those of a uniform distribution, which random weights
    are near.  Far from the model the loss of KTO is flat, and its gradients are zero.
    """
    tokens_BT = batch.tokens_BT
    quarters_B1 = tokens_BT[:, :1] % 4
    dropped_BT = tokens_BT % 4 < quarters_B1
    batch = batch._replace(targets_BT=batch.targets_BT.masked_fill(dropped_BT, IGNORE_INDEX))
    if batch.labels_BP is None:
        return batch
    lengths = [answer_lengths(each)[..., 0] for each in (batch, batch.with_swapped_answers())]
    references_BP2 = -math.log(plan.model.vocab_size) * torch.stack(lengths, dim=2)
    return batch._replace(references_BP2=references_BP2)
