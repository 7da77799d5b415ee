"""What one rank does for a verification: train a few steps with the code that trains, and measure.

One process goes first and leaves its tensors in a file; every rank of the layout compares with
them on the spot and returns numbers only.  So replicas that have drifted apart are seen, too:
each rank compares *its* view of a whole gradient.

*Forward* is compared block by block, to tell where it goes wrong.  A hook adds up every channel
of what goes into a block and comes out of it, and the channel's square, over all tokens that the
rank sees; the sums of all ranks, divided by their number of tokens, are the means over the global
batch, whoever saw what: rows, slices of a row (context and sequence parallel), the same tokens on
several ranks (tensor parallel without sequence parallel), one microbatch after the other.

*Steps* are each taken from equal weights and equal gradients: after gradients have been compared, a
layout takes over one process's, and after the update one process's parameters; the optimizer's
states are its own.  AdamW divides by the root of the second moment, and where that is nearly zero
it makes a step of full size of a rounding.  So clipping and updates are compared as sharply as
gradients, whatever dtype those are computed in.

*Limits* follow from one process with noise (`Noise`): how far that departs from the same without.

*Data* is noise made from the seed.  Rows have very different numbers of targets with a loss, from
all to a quarter, so that no mean of means passes for the mean.

Shapes: B rows of a microbatch, T tokens of a row, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.checkpoint.load import load
from weft.checkpoint.manager import CheckpointManager
from weft.checkpoint.manifest import checkpoint_path
from weft.checkpoint.state_dict import named_buffers, named_parameters
from weft.config.schema import Job
from weft.data.loader import (
    IGNORE,
    Batch,
    Loader,
    Mixture,
    Packed,
    Packing,
    Pairs,
    TokenChunks,
    evaluation_batches,
)
from weft.data.packing import Rows
from weft.data.token_store import TokenStream
from weft.models import load_family
from weft.monitor.layer_stats import watching
from weft.optim.lean import LowPrecisionAdamW
from weft.optim.optimizer import clip_grad_norm, set_learning_rate
from weft.optim.schedule import learning_rate
from weft.parallel.dtensor import to_local, shard_offsets
from weft.parallel.mesh import Mesh
from weft.parallel.private import is_quantized
from weft.plan.resolve import Plan
from weft.train.loop import naming
from weft.train.setup import Built, Rank, build

# Breaks something of a rank that has been built, in tests.
Tamper = Callable[[Built, Plan], None]

ZERO = 1e-6  # of the largest gradient: what is smaller is made of roundings
SEPARATOR = 0  # the token that ends a document
DOCUMENT_TOKENS = 12  # in a document, on average


class Difference(NamedTuple):
    """Of a whole tensor from that of one process."""

    largest: float  # of its entries, relative to the largest entry of one process's
    factor: float  # by which one process's must be multiplied to come nearest to it


class Sums(NamedTuple):
    """Of an activation, over some tokens: float64 ``[D]``."""

    tokens: int
    values: Any
    squares: Any


class Step(NamedTuple):
    """What a rank saw of an optimizer step.  Gradients are those before clipping."""

    loss: float
    grad_norm: float
    forward: dict[str, Sums]  # in the order of the forward pass
    gradients: dict[str, Difference]
    updates: dict[str, float]  # of parameters: distance, relative to their way in this step


class Measured(NamedTuple):
    """What a rank saw of the whole training."""

    names: list[str]  # of this rank's parameters, in the order of their definition
    initial: dict[str, Difference]
    steps: list[Step]
    eval_loss: float
    drift: float  # of parameters after a step: the largest difference of an entry


def measure(
    job: Job,
    plan: Plan,
    folder: str,
    tamper: Tamper | None = None,
    *,
    resume: int = 0,
    save: int = 0,
    noise: int = 0,
) -> Measured:
    """Train ``job.train.steps`` steps on this rank of the process group.

    Args:
        folder: where one process, which is world size 1 and called first, leaves its tensors, and
            where checkpoints lie.
        tamper: called with what was built, and the plan.
        resume: a step whose checkpoint is loaded before the next one; 0: none.
        save: a step after which a checkpoint is saved; 0: none.
        noise: the seed of a noise as large as rounding (`Noise`); 0: none.
    """
    if job.compile.enable:
        torch._inductor.config.compile_threads = 1  # no pool of processes below a rank
    rank = Rank(dist.get_rank(), dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    built = build(job, plan, rank)
    params = dict(named_parameters(built.parts))
    # The biases of experts are moved by each step, too.
    state: dict[str, Tensor] = params | dict(named_buffers(built.parts))
    tensors = _Tensors(Path(folder) / "one.pt")
    checkpoints = Path(folder) / "checkpoints"
    if resume:
        load(checkpoint_path(checkpoints, resume), built.parts, built.optimizer)
        tensors.before = f"params {resume}"
    initial = tensors.compare(tensors.before, state.items())
    if tamper is not None:
        tamper(built, plan)
    roundings = Noise(job, plan, noise) if noise else None
    if roundings is not None:
        roundings.add_to(built.parts)
    prints = Fingerprints(built.parts, load_family(job.model.kind).blocks)
    loader = _loader(job, plan, built.mesh)
    stages = built.mesh.group("pp") if plan.pp > 1 else None

    steps = []
    for step in range(resume + 1, job.train.steps + 1):
        samples = (step - 1) * job.train.global_batch_size
        batches = [_with_fewer_targets(batch) for batch in loader.batch(samples)]
        rows = [len(batch.tokens_BT) for batch in batches]
        with naming(f"step {step}"), prints.of(rows) as forward:
            loss = built.engine.forward_backward(batches)
        dist.all_reduce(loss)
        if roundings is not None:
            roundings.round_gradients(params.values(), roundings.reduce_eps)
        gradients = tensors.compare(f"gradients {step}", _gradients(params))
        tensors.take_over(f"gradients {step}", params)
        if roundings is not None:  # those of the optimizer's arithmetic, which Muon's amplifies
            roundings.round_gradients(params.values(), torch.finfo(torch.float32).eps)
        norm = clip_grad_norm(params.values(), job.optim.max_grad_norm, stages)
        lr = learning_rate(step, job.train.steps, job.optim, built.decay)
        set_learning_rate(built.optimizer, lr)
        built.optimizer.step()
        if roundings is not None:
            roundings.round_states(built.optimizer)
        built.engine.balance.total()
        built.engine.balance.step()
        built.optimizer.zero_grad()
        updates = tensors.compare_updates(f"params {step}", state)
        steps.append(Step(loss.item(), norm.item(), forward, gradients, updates))
        if step == save:
            with naming("the checkpoint"):
                saver = CheckpointManager(checkpoints, keep=1)
                consumed = step * job.train.global_batch_size
                saver.save(built.parts, built.optimizer, {"step": step, "samples": consumed})
                saver.wait()
    try:
        eval_loss = built.engine.evaluate(_held_out(job, plan, built.mesh))
    except Exception as error:
        error.add_note("in the evaluation")
        raise
    tensors.save()
    return Measured(list(params), initial, steps, eval_loss, tensors.drift)


def measure_one(job: Job, plan: Plan, folder: str, repetitions: int) -> list[Measured]:
    """Train one process, and again with noise; how far that moves what it compares with itself."""
    return [measure(job, plan, folder, noise=seed) for seed in range(repetitions + 1)]


# --------------------------------------------------------------------------- noise

# Of float8 (e4m3): half of the step between two normal numbers, relative to them; and between the
# smallest numbers, relative to the largest one of a matrix, which a scale brings to 224 at least.
FLOAT8_EPS, FLOAT8_LEAST = 2.0**-4, 2.0**-10 / 224


class Noise:
    """Multiply what is computed by 1 + u eps, u uniform between -1 and 1.

    Outputs of modules with weights have the eps of the dtype that is computed in; gradients that of
    the dtype that they are reduced in, those of activations too, since a rank rounds the sum of its
    tokens, and such sums may cancel; optimizer states that of their dtype.  So one process differs
    from itself about as much as another order of the same sums does.  Gradients that go into a
    product in float8 have its eps: their scales depend on which rows and tokens are multiplied at
    once.  So do those of the inputs, but they are powers of two: only numbers far below the largest
    are rounded to others.
    """

    def __init__(self, job: Job, plan: Plan, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._compute = torch.finfo(getattr(torch, plan.compute_dtype)).eps
        reduced = max(self._compute, torch.finfo(getattr(torch, plan.reduce_dtype)).eps)
        self.reduce_eps, self._float8 = reduced, plan.float8 != "none"
        states = {"float32": 0.0, "bfloat16": torch.finfo(torch.bfloat16).eps, "8bit": FLOAT8_EPS}
        self._states = states[job.optim.state_dtype]

    def add_to(self, parts: Iterable[nn.Module]) -> None:
        """Add noise to the outputs of all modules that have weights."""
        for part in parts:
            for module in part.modules():
                if next(module.parameters(recurse=False), None) is not None:
                    module.register_forward_hook(self._hook)
                    if self._multiplies_in_float8(module):
                        module.register_forward_pre_hook(self._hook_of_input)

    def _multiplies_in_float8(self, module: nn.Module) -> bool:
        return self._float8 and isinstance(module, nn.Linear) and type(module) is not nn.Linear

    def _hook_of_input(self, module: nn.Module, args: Any) -> Any:
        x, *rest = args
        u = torch.rand(x.shape, generator=self._generator) * 2 - 1
        return (x + (u * FLOAT8_LEAST * x.detach().abs().amax()).to(x.dtype), *rest)

    def _hook(self, module: nn.Module, args: Any, out: Any) -> Any:
        rounded: Any = _Rounded.apply
        float8 = self._multiplies_in_float8(module)
        eps = (self._compute, FLOAT8_EPS if float8 else self.reduce_eps)
        return rounded(out, self, *eps) if isinstance(out, Tensor) else out

    def of(self, x: Tensor, eps: float) -> Tensor:
        """Return ``x`` with noise."""
        u = torch.rand(x.shape, generator=self._generator) * 2 - 1
        return (x.float() * (1 + eps * u)).to(x.dtype)

    @torch.no_grad()
    def round_gradients(self, params: Iterable[Tensor], eps: float) -> None:
        """Add noise to the gradients of weights."""
        for grad in (to_local(param.grad) for param in params if param.grad is not None):
            grad.copy_(self.of(grad, eps))

    @torch.no_grad()
    def round_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Add noise to the optimizer's states, where they are rounded."""
        packed = False
        for state in optimizer.state.values() if self._states else ():
            for key in [key for key in state if key != "step"]:
                value = to_local(state[key])
                if is_quantized(value):
                    state[key], packed = self.of(value.dequantize(), self._states), True
                else:
                    value.copy_(self.of(value, self._states))
        if packed:
            cast(LowPrecisionAdamW, optimizer).adopt()  # as if it had been loaded


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Noise, eps: float, eps_of_gradient: float) -> Tensor:
        ctx.noise, ctx.eps = noise, eps_of_gradient
        return noise.of(x, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.noise.of(grad, ctx.eps), None, None, None


# --------------------------------------------------------------------------- tensors


class _Tensors:
    """One process's tensors: written by it, compared with by the ranks of a layout."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.theirs: dict[str, dict[str, Tensor]] | None = None
        if path.exists():
            self.theirs = torch.load(path)
        self.ours: dict[str, dict[str, Tensor]] = {}
        self.before = "initial"
        self.drift = 0.0

    def compare(self, what: str, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Difference]:
        """Each tensor's difference, whole; all ranks that share one call this in step."""
        differences = {}
        theirs = {} if self.theirs is None else self.theirs[what]
        largest = max((float(tensor.abs().max()) for tensor in theirs.values()), default=0.0)
        for name, tensor in tensors:
            ours = _whole(tensor)
            if self.theirs is None:
                self.ours.setdefault(what, {})[name] = ours
                differences[name] = Difference(0.0, 1.0)
            else:
                differences[name] = difference(ours, theirs[name], largest)
        return differences

    def compare_updates(self, what: str, params: dict[str, Tensor]) -> dict[str, float]:
        """How far each parameter is from one process's, relative to its way in this step.

        Afterwards it is one process's.
        """
        distances = {}
        for name, param in params.items():
            ours = _whole(param)
            if self.theirs is None:
                self.ours.setdefault(what, {})[name] = ours
                distances[name] = 0.0
                continue
            theirs = self.theirs[what][name]
            way = theirs - self.theirs[self.before][name]
            # A sum with a small update is rounded to the last place of the parameter.
            rounding = torch.finfo(theirs.dtype).eps * theirs.abs()
            beyond = ((ours - theirs).abs() - rounding).clamp(min=0.0)
            distances[name] = ratio(beyond.norm().item(), way.norm().item())
            self.drift = max(self.drift, finite((ours - theirs).abs().max().item()))
            _copy_shard(param, theirs)
        self.before = what
        return distances

    def take_over(self, what: str, params: dict[str, nn.Parameter]) -> None:
        """Fill the gradients with those of one process."""
        if self.theirs is not None:
            for name, param in params.items():
                if param.grad is not None:
                    _copy_shard(param.grad, self.theirs[what][name])

    def save(self) -> None:
        """Leave one process's tensors for the ranks of a layout."""
        if self.theirs is None:
            torch.save(self.ours, self.path)


def difference(ours: Tensor, theirs: Tensor, largest_of_all: float = 0.0) -> Difference:
    """Compare two whole tensors.

    Args:
        largest_of_all: the largest entry of all tensors of this kind.  A tensor far below it, such
            as the gradient of keys where a query sees one key only, is zero but for roundings: it
            is compared relative to all of them.
    """
    if ours.shape != theirs.shape:
        return Difference(math.inf, math.nan)
    ours, theirs = ours.double(), theirs.double()
    if theirs.abs().max().item() < ZERO * largest_of_all:
        return Difference(finite((ours - theirs).abs().max().item() / largest_of_all), 1.0)
    largest = ratio((ours - theirs).abs().max().item(), theirs.abs().max().item())
    if largest == 0:
        return Difference(0.0, 1.0)  # of zeros, too
    factor = ratio((ours * theirs).sum().item(), theirs.square().sum().item())
    return Difference(largest, factor)


def ratio(a: float, b: float) -> float:
    """``a / b``; 0 of 0 is 0, and what is not a number is infinite."""
    if a == 0 and math.isfinite(b):
        return 0.0
    return finite(a / b) if b else math.inf


def finite(value: float) -> float:
    """The value; infinity for what is not a number."""
    return value if math.isfinite(value) else math.inf


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


@torch.no_grad()
def _copy_shard(param: Tensor, whole: Tensor) -> None:
    """Fill this rank's shard of a parameter."""
    local = to_local(param)
    begins = shard_offsets(param)
    box = tuple(slice(b, b + size) for b, size in zip(begins, local.shape, strict=True))
    local.copy_(whole[box])


def _gradients(params: dict[str, nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
    for name, param in params.items():
        yield name, torch.zeros_like(param) if param.grad is None else param.grad


# --------------------------------------------------------------------------- forward


class Fingerprints:
    """Sums over what goes into each block and comes out of it, inside `of`."""

    def __init__(self, parts: list[nn.Module], blocks: Callable[[Any], list[nn.Module]]) -> None:
        self._blocks: dict[str, nn.Module] = {}
        for part in parts:
            names = {module: name for name, module in part.named_modules()}
            self._blocks |= {names[block]: block for block in blocks(part)}

    @contextmanager
    def of(self, rows: list[int]) -> Iterator[dict[str, Sums]]:
        """Those of a step whose microbatches have so many rows, in order."""
        found: dict[str, Sums] = {}

        @torch.no_grad()
        def add(name: str, rows: int, before: Any, after: Tensor) -> None:
            for key, value in ((f"before {name}", before), (f"in {name}", after)):
                if not isinstance(value, Tensor):
                    continue
                x_ND = value.detach()[:rows].double().flatten(0, -2)
                until = found.get(key, Sums(0, 0.0, 0.0))
                found[key] = Sums(
                    until.tokens + len(x_ND),
                    until.values + x_ND.sum(0).numpy(),
                    until.squares + x_ND.square().sum(0).numpy(),
                )

        with watching(self._blocks, rows, add):
            yield found


def added(ranks: Iterable[Sums]) -> Sums:
    """The sums over the tokens of all ranks."""
    tokens, values, squares = zip(*ranks, strict=True)
    return Sums(sum(tokens), sum(values), sum(squares))


def apart(ours: Sums, theirs: Sums) -> float:
    """How far two fingerprints are from each other: 0 to rounding if the activations are equal."""
    if np.shape(ours.values) != np.shape(theirs.values):
        return math.inf
    means = np.abs(ours.values / ours.tokens - theirs.values / theirs.tokens).max()
    squares = np.abs(ours.squares / ours.tokens - theirs.squares / theirs.tokens).max()
    largest = (theirs.squares / theirs.tokens).max()
    return max(ratio(float(means), math.sqrt(largest)), ratio(float(squares), float(largest)))


# --------------------------------------------------------------------------- data


def _noise(job: Job, plan: Plan, name: int, rows: int) -> Mixture:
    """Samples for so many rows, drawn from the seed."""
    generator = np.random.default_rng([job.train.seed, name])
    size = rows * job.train.seq_len + 1
    tokens = generator.integers(1, plan.model.vocab_size, size)
    tokens[generator.random(size) < 1 / DOCUMENT_TOKENS] = SEPARATOR
    stream, seq_len = TokenStream([tokens]), job.train.seq_len
    if job.data.format == "preferences":  # two answers of half a row each
        begins = np.arange(2 * rows) * (seq_len // 2)
        lengths = np.full(2 * rows, seq_len // 2)
        pairs = Rows(begins, lengths, np.arange(2 * rows), np.arange(0, 2 * rows + 1, 2))
        packed = Packed(stream, None, pairs, seq_len, SEPARATOR)
        return Mixture([Pairs(packed, references=torch.zeros(rows, 2))])
    packing: Packing = "documents" if job.data.keeps_documents else "windows"
    return Mixture([TokenChunks(stream, seq_len, packing, SEPARATOR)])


def _loader(job: Job, plan: Plan, mesh: Mesh) -> Loader:
    """The loader that trains, over noise: each row is seen once."""
    return Loader(
        _noise(job, plan, 0, job.train.steps * job.train.global_batch_size),
        seed=job.train.seed,
        global_batch=job.train.global_batch_size,
        dp_rank=mesh.dp_rank,
        dp_size=plan.dp_size,
        microbatch=plan.microbatch,
    )


def _held_out(job: Job, plan: Plan, mesh: Mesh) -> Iterator[Batch]:
    batches = evaluation_batches(
        _noise(job, plan, 1, job.train.eval_sequences),
        sequences=job.train.eval_sequences,
        dp_rank=mesh.dp_rank,
        dp_size=plan.dp_size,
        microbatch=plan.microbatch,
    )
    yield from map(_with_fewer_targets, batches)


def _with_fewer_targets(batch: Batch) -> Batch:
    """Some targets without a loss, by a rule that looks at the tokens of their row only."""
    tokens_BT = batch.tokens_BT
    quarters_B1 = tokens_BT[:, :1] % 4
    dropped_BT = tokens_BT % 4 < quarters_B1
    return batch._replace(targets_BT=batch.targets_BT.masked_fill(dropped_BT, IGNORE))
