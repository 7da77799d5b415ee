"""Loss of a microbatch: cross-entropy of each token, and objectives.

*Cross-entropy* is a sum over tokens.  The caller divides the sum once, by the target tokens of the
global batch.  A mean of means would weigh a token by its microbatch and rank, so the loss would
depend on the layout.  Logits are the largest tensor of a step: for 8,192 tokens and Llama 3.1's
vocabulary they need 4 GiB in float32, and their gradient needs as much.  `linear_cross_entropy`
computes logits, loss and gradients for some tokens at a time, so that not all logits exist at once,
and computes none twice.

*Objectives*: what a run minimizes, as a function of each token's loss.  In every layout `TrainStep`
computes the cross-entropy of each token of a microbatch, on the ranks that have the last stage and
the same on all ranks of a tensor-parallel group.  An objective turns it into a loss per sequence,
and returns how much each sequence counts.  `TrainStep` divides the sum over the global batch by the
sum of these counts, once.  An objective therefore knows no ranks, microbatches or stages, as long
as it computes each sequence alone; what belongs together is in one sequence: see
`weft.data.loader.Pairs`.

*Preferences.*  The log-probability of an answer is minus the sum of its tokens' losses.  y is the
chosen answer, z the rejected one, |y| its number of trained tokens, and

    r(y) = log p(y) - log p0(y)         against the initial model p0
    m(y) = log p(y) / |y|               the mean over its tokens

- *DPO* (arXiv:2305.18290, equation 7): -log sigmoid(beta (r(y) - r(z)));
- *IPO* (arXiv:2310.12036, equation 17): (r(y) / |y| - r(z) / |z| - 1 / (2 beta))^2;
- *SimPO* (arXiv:2405.14734, equation 6): -log sigmoid(beta (m(y) - m(z)) - gamma);
- *ORPO* (arXiv:2403.07691, equation 6): -beta log sigmoid(o(y) - o(z)), with the log odds
  o(y) = m(y) - log(1 - exp m(y)), plus the mean loss of a token of the chosen answers.

*KTO* (arXiv:2402.01306, equation 8) has answers with a label instead of pairs.  The loss of a good
one is 1 - sigmoid(beta (r(y) - z)), that of a bad one 1 - sigmoid(beta (z - r(y))).  z estimates
the divergence from the initial model: the mean of r over the global batch, with each prompt's
answer replaced by an answer to another prompt, and at least 0.  So `TrainStep` first computes these
sequences, forward only.

With label smoothing e, a share e of the pairs counts as labeled the wrong way round (conservative
DPO): -(1 - e) log sigmoid(x) - e log sigmoid(-x).  ``train.sft_weight`` adds the mean loss of a
token of the chosen answers.  Such a mean has its own count, so a loss has several terms.

log p0 does not change during training: `weft.training.reference_logprobs` computes it once, before
the first step, and saves two numbers per pair in the run directory, so no second model needs memory
or time.

*Rewards* (Bradley-Terry: Ouyang et al., arXiv:2203.02155, equation 1).  A model with a score head
learns that the score of the chosen answer is above that of the rejected one:

    -log sigmoid(s(y) - s(z)) + coef (s(y) + s(z))^2

The score of an answer is the output of the head at its last token, as in transformers and TRL.

A user's objective is a function that takes the section `train` and returns an `Objective`;
``train.objective = "module:function"`` names it.

Shapes in names: B sequences, T tokens of a sequence, N = B T, D model width, V vocabulary (or this
rank's part of it), M metrics, K terms, P pairs or labeled answers of a
sequence, A answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from weft.config.errors import lookup
from weft.config.schema import TrainSection
from weft.data.loader import IGNORE_INDEX, Batch
from weft.models.layers import run_function
from weft.parallel.compile import RunCompiled, run_compiled

LOSS = "the loss"  # label of `run_compiled`


def cross_entropy(
    logits_BTV: Tensor,
    targets_BT: Tensor,
    group: dist.ProcessGroup | None = None,
    compiled: bool = False,
    first: int = 0,
    label_smoothing: float = 0.0,
    vocab_size: int | None = None,
    run_compiled: RunCompiled = run_compiled,
    z_loss_coef: float = 0.0,
) -> Tensor:
    """Compute the cross-entropy of each token in nats, in float32.

    With ``label_smoothing`` e it is that of the target with probability 1 - e and of the mean over
    the vocabulary with e, as in torch's ``cross_entropy``: (1 - e) (-log p(target)) - e mean log p.

    Forward saves the logits and three numbers per token.  The ranks of ``group`` exchange these
    numbers (maximum, sum of exponentials, logit of the target) instead of logits.  Label smoothing
    adds the sum of the logits to the logit of the target.

    ``z_loss_coef`` c adds the gradient of c (log Z)^2 to that of each token, Z the sum of
    exponentials of its logits (PaLM, arXiv:2204.02311, section 5).  Its value is not added.  The
    gradient of log Z is the softmax, which backward computes anyway.

    Args:
        logits_BTV: any floating dtype; with ``group``, this rank's entries of the vocabulary.
        targets_BT: int64 ids of the full vocabulary; `IGNORE_INDEX`: no target.
        group: the tensor-parallel ranks; None: logits are not sharded.
        compiled: let torch.compile fuse operators, so that no float32 tensor has the size of the
            logits; otherwise there is one at a time.
        first: id of this rank's first entry.
        label_smoothing: from 0 to 1.
        vocab_size: entries of the full vocabulary; None: those of the logits.
        run_compiled: runs the operators that are fused.
        z_loss_coef: c.

    Returns:
        float32 (B, T), equal on all ranks of ``group``; 0 without a target.
    """
    uniform = label_smoothing / (vocab_size or logits_BTV.shape[-1])
    smoothing = (label_smoothing, uniform)
    run = partial(run_compiled, LOSS, compiled)
    arguments = group, compiled, run, first, smoothing, z_loss_coef
    return run_function(_CrossEntropy, logits_BTV, targets_BT, *arguments)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_BTV: Tensor,
        targets_BT: Tensor,
        group: dist.ProcessGroup | None,
        compiled: bool,
        run: Callable[..., Any],
        first: int,
        smoothing: tuple[float, float],
        z_loss_coef: float,
    ) -> Tensor:
        logits_NV, columns_N = logits_BTV.flatten(0, 1), targets_BT.flatten()
        is_ignored_N = is_elsewhere_N = columns_N == IGNORE_INDEX
        if group is not None:
            columns_N = columns_N - first
            is_elsewhere_N = (columns_N < 0) | (columns_N >= logits_NV.shape[1])
        columns_N = columns_N.masked_fill(is_elsewhere_N, 0)
        ctx.run = run
        # Kept for backward where they need no more memory than the logits.
        keeps_exponentials = group is None and logits_NV.dtype == torch.float32 and not compiled
        max_N, sum_N, target_N, *exponentials = ctx.run(
            _sum_exponentials, logits_NV, columns_N, keeps_exponentials
        )
        (ctx.label_smoothing, ctx.uniform), ctx.z_loss_coef = smoothing, z_loss_coef
        if group is not None:
            target_N = target_N.masked_fill(is_elsewhere_N, 0.0)
        if ctx.label_smoothing:  # the mean logit under the smoothed target
            mean_N = ctx.run(_sum_logits, logits_NV) * ctx.uniform
            target_N = (1 - ctx.label_smoothing) * target_N + mean_N
        if group is not None:
            local_max_N, max_N = max_N, max_N.clone()
            dist.all_reduce(max_N, dist.ReduceOp.MAX, group)
            sums_2N = torch.stack((sum_N * (local_max_N - max_N).exp(), target_N))
            dist.all_reduce(sums_2N, group=group)
            sum_N, target_N = sums_2N
        ctx.keeps_exponentials = keeps_exponentials
        values_NV = exponentials[0] if keeps_exponentials else logits_NV
        ctx.save_for_backward(values_NV, columns_N, max_N, sum_N, is_elsewhere_N, is_ignored_N)
        losses_N: Tensor = sum_N.log() - (target_N - max_N)
        return losses_N.masked_fill(is_ignored_N, 0.0).view_as(targets_BT)

    @staticmethod
    def backward(ctx: Any, grad_BT: Tensor) -> tuple[Tensor | None, ...]:
        values_NV, columns_N, max_N, sum_N, is_elsewhere_N, is_ignored_N = ctx.saved_tensors
        grad_N = grad_BT.flatten().masked_fill(is_ignored_N, 0.0)
        at_target_N = grad_N.masked_fill(is_elsewhere_N, 0.0)
        uniform_N: list[Tensor] = []
        if ctx.label_smoothing:
            at_target_N = (1 - ctx.label_smoothing) * at_target_N
            uniform_N.append(ctx.uniform * grad_N)
        softmax_N = grad_N
        if ctx.z_loss_coef:
            softmax_N = grad_N * (1 + 2 * ctx.z_loss_coef * (max_N + sum_N.log()))
        scales = softmax_N / sum_N, at_target_N, *uniform_N
        if ctx.keeps_exponentials:
            grad_NV = _scale_exponentials(values_NV, columns_N, *scales)
        else:
            grad_NV = ctx.run(_logits_gradient, values_NV, columns_N, max_N, *scales)
        return grad_NV.view(*grad_BT.shape, -1), *[None] * 7


def _sum_exponentials(
    logits_NV: Tensor, columns_N: Tensor, keep: bool = False
) -> tuple[Tensor, ...]:
    """Return each row's maximum, sum of exp(logit - maximum), and logit at a column.

    With ``keep`` also the exponentials.
    """
    max_N = logits_NV.amax(1).float()
    exp_NV = (logits_NV - max_N[:, None]).exp_()  # a difference of both dtypes is float32
    sums = max_N, exp_NV.sum(1), logits_NV.gather(1, columns_N[:, None])[:, 0].float()
    return (*sums, exp_NV) if keep else sums


def _sum_logits(logits_NV: Tensor) -> Tensor:
    return logits_NV.sum(1, dtype=torch.float32)


def _logits_gradient(
    logits_NV: Tensor,
    columns_N: Tensor,
    max_N: Tensor,
    scale_N: Tensor,
    at_target_N: Tensor,
    uniform_N: Tensor | None = None,
) -> Tensor:
    """Return exp(logit - maximum) * scale, minus ``at_target_N`` at a column.

    ``uniform_N`` is subtracted from all columns.
    """
    grad_NV = (logits_NV - max_N[:, None]).exp_().mul_(scale_N[:, None])
    if uniform_N is not None:
        grad_NV.sub_(uniform_N[:, None])
        at_target_N = at_target_N + uniform_N
    grad_NV = grad_NV.to(logits_NV.dtype)
    rows_N = torch.arange(len(columns_N), device=columns_N.device)
    exp_N = (logits_NV[rows_N, columns_N] - max_N).exp()
    # Replaced, not added: the difference is rounded once, and needs no float32 (N, V).
    grad_NV[rows_N, columns_N] = (exp_N * scale_N - at_target_N).to(grad_NV.dtype)
    return grad_NV


def _scale_exponentials(
    exp_NV: Tensor,
    columns_N: Tensor,
    scale_N: Tensor,
    at_target_N: Tensor,
    uniform_N: Tensor | None = None,
) -> Tensor:
    """Return what `_logits_gradient` does, in place of exp(logit - maximum)."""
    columns_N1 = columns_N[:, None]
    exp_N = exp_NV.gather(1, columns_N1)[:, 0]
    grad_NV = exp_NV.mul_(scale_N[:, None])
    if uniform_N is not None:
        grad_NV.sub_(uniform_N[:, None])
        at_target_N = at_target_N + uniform_N
    return grad_NV.scatter_(1, columns_N1, (exp_N * scale_N - at_target_N)[:, None])


CHUNK_BYTES = 512 << 20  # maximum size of logits that exist at once


def chunk_tokens(tokens: int, vocab_size: int, compiled: bool) -> int:
    """Return the number of tokens whose logits fit into `CHUNK_BYTES`.

    The eager loss copies logits to float32.  The compiled one does not, and its logits are taken to
    be bfloat16; float32 logits then need twice `CHUNK_BYTES`.  A chunk adds its gradient of the
    weight to a float32 sum, so larger chunks are faster.

    Returns:
        ``tokens`` if all fit; else the largest power of two.
    """
    limit = max(1, CHUNK_BYTES // ((2 if compiled else 4) * vocab_size))
    return tokens if tokens <= limit else 1 << (limit.bit_length() - 1)


class AddedRows(NamedTuple):
    """Changes of rows of the output weight, ``[M, D]``, and their indices, (M,)."""

    values_MD: Tensor
    columns_M: Tensor


def linear_cross_entropy(
    x_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    chunk_size: int,
    scales_BT: Tensor | None = None,
    rows: AddedRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the loss of ``x @ weight.T``, with the logits of a chunk at a time.

    Args:
        x_BTD: input of the output layer.
        weight_VD: weight of the output layer, any floating dtype.
        targets_BT: int64.
        loss_fn: returns the loss of each token, (1, n), of logits (1, n, V) and targets (1, n).
        chunk_size: number of tokens of a chunk.
        scales_BT: factors of the tokens' losses in the sum, also (B, 1); None: 1.
        rows: added to some rows of the weight; None: nothing.

    Returns:
        The sum of the losses, a float32 scalar; and the loss of each token, float32 (B, T), without
        gradient and factor.
    """
    x_ND, targets_N = x_BTD.flatten(0, 1), targets_BT.flatten()
    scales_N = None if scales_BT is None else scales_BT.expand_as(targets_BT).flatten()
    weights = [weight_VD] if rows is None else [weight_VD, rows.values_MD]
    trained = [weight for weight in weights if weight.requires_grad]
    needs_grad = torch.is_grad_enabled() and (x_ND.requires_grad or bool(trained))
    losses_N = torch.empty(len(targets_N), device=x_ND.device)
    gradients = _compute_chunks(
        x_ND, weights, targets_N, loss_fn, chunk_size, needs_grad, losses_N, scales_N, rows
    )
    total = losses_N.sum() if scales_N is None else losses_N @ scales_N
    losses_BT = losses_N.view_as(targets_BT)
    if not needs_grad:
        return total, losses_BT
    return run_function(_KnownGradients, total, x_ND, *trained, *gradients), losses_BT


@torch.no_grad()
def _compute_chunks(
    x_ND: Tensor,
    weights: Sequence[Tensor],
    targets_N: Tensor,
    loss_fn: Any,
    chunk_size: int,
    needs_grad: bool,
    losses_N: Tensor,
    scales_N: Tensor | None,
    rows: AddedRows | None,
) -> list[Tensor]:
    """Write ``losses_N``, and compute the gradients of their sum chunk by chunk.

    Returns:
        The gradient of ``x_ND``, and of each trained weight, in float32.  An empty list without
        ``needs_grad``.
    """

    def compute_logits(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        logits = F.linear(x, weights[0])
        if rows is not None:
            logits = logits.index_add(-1, rows.columns_M, F.linear(x, weights[1]))
        return logits[None]

    columns = (x_ND, targets_N, losses_N, *(() if scales_N is None else (scales_N,)))
    chunks = zip(*(torch.split(column, chunk_size) for column in columns), strict=True)
    if not needs_grad:
        for x, targets, losses, *_ in chunks:
            losses.copy_(loss_fn(compute_logits(x, weights), targets[None])[0])
        return []
    grad_x_ND = torch.empty_like(x_ND)
    # In float32, because it is a sum over many chunks.
    leaves = [weight.detach().requires_grad_(weight.requires_grad) for weight in weights]
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    sums = [torch.zeros_like(leaf, dtype=torch.float32) for leaf in trained]
    for (x, targets, losses, *scales), grad_x in zip(
        chunks, torch.split(grad_x_ND, chunk_size), strict=True
    ):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            chunk_losses = loss_fn(compute_logits(x, leaves), targets[None])[0]
            loss = chunk_losses @ scales[0] if scales else chunk_losses.sum()
        chunk_grad_x, *grad_weights = torch.autograd.grad(loss, (x, *trained))
        grad_x.copy_(chunk_grad_x)
        for total, gradient in zip(sums, grad_weights, strict=True):
            total += gradient
        losses.copy_(chunk_losses.detach())
    return [grad_x_ND, *sums]


class _KnownGradients(torch.autograd.Function):
    """Scalar with given gradients with respect to as many tensors."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *tensors_and_gradients: Tensor) -> Tensor:
        ctx.count = len(tensors_and_gradients) // 2
        ctx.dtypes = [tensor.dtype for tensor in tensors_and_gradients[: ctx.count]]
        ctx.save_for_backward(*tensors_and_gradients[ctx.count :])
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grads = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        # In place: a second float32 (V, D) tensor would set the step's peak memory.
        return None, *[known.mul_(grad).to(dtype) for known, dtype in grads], *[None] * ctx.count


class SequenceLosses(NamedTuple):
    """Loss and metrics of each sequence, as sums over what the sequence counts for.

    Attributes:
        loss_B: (B,), or (B, K) of several terms.
        metrics_BM: without gradient.
        metric_counts_BM: how much each sequence counts in each metric; None: as in the first term.
    """

    loss_B: Tensor
    metrics_BM: Tensor
    metric_counts_BM: Tensor | None = None


class Objective(NamedTuple):
    """An objective.

    Attributes:
        counts: returns how much each sequence counts, (B,), integers or floats: its targets (the
            sum of their weights), or its pairs; 0 without targets.  With several terms (B, K).
        losses: takes each token's cross-entropy in nats, float32 (B, T), 0 without a target, times
            the token's weight (`Batch.weights_BT`).
        metrics: names of the metrics; weft logs each as a mean over the counts.
        is_token_sum: True if a sequence's loss is the sum of its tokens' losses.  Only then can
            logits be computed for some tokens at a time.  Otherwise context-parallel ranks gather
            the losses of full sequences.
        needs_references: True if batches need log-probabilities of the initial model, which only
            preference data have.
        terms: K; the loss is the sum of the terms, each a mean over its own counts.
        takes_scores: True if ``losses`` takes the outputs of a score head in place of the
            cross-entropies (``model.score_head``).  A conversation has one target, at its last
            token, where its score is.
        baseline: takes the tokens' losses of the batch with swapped answers, and returns a sum and
            its count for each sequence, (B, 2).  The losses find their mean over the global batch
            in ``baseline_B``.  Only unpaired answers can be swapped.
    """

    counts: Callable[[Batch], Tensor]
    losses: Callable[[Tensor, Batch], SequenceLosses]
    metrics: tuple[str, ...] = ()
    is_token_sum: bool = False
    needs_references: bool = False
    terms: int = 1
    takes_scores: bool = False
    baseline: Callable[[Tensor, Batch], Tensor] | None = None


def next_token(section: TrainSection) -> Objective:
    """Return the (weighted) mean cross-entropy of all targets, in nats per token."""

    def losses(losses_BT: Tensor, batch: Batch) -> SequenceLosses:
        loss_B = losses_BT.sum(1)
        return SequenceLosses(loss_B, loss_B.new_empty(len(loss_B), 0))

    return Objective(count_targets, losses, is_token_sum=True)


def count_targets(batch: Batch) -> Tensor:
    """Return the number of targets of each sequence, or the sum of their weights.

    Returns:
        (B,), int64; with weights float64, in which the sum of millions of float32 numbers is exact,
        and so does not depend on the layout.
    """
    has_target_BT = batch.targets_BT != IGNORE_INDEX
    if batch.weights_BT is None:
        return has_target_BT.sum(1)
    return (has_target_BT * batch.weights_BT.double()).sum(1)


REWARDS = ("reward_margin", "reward_accuracy", "reward_chosen", "reward_rejected")
# Loss of each pair, (B, P), by the scores of its two answers, (B, P, 2), and the same per token.
PairLosses = Callable[[Tensor, Tensor], Tensor]


def dpo(section: TrainSection) -> Objective:
    """Return direct preference optimization, in nats per pair."""
    beta, smoothing = section.beta, section.preference_label_smoothing

    def pair_losses(scores_BP2: Tensor, means_BP2: Tensor) -> Tensor:
        return smoothed_logistic_loss(beta * _margin(scores_BP2), smoothing)

    return compare_pairs(section, pair_losses, needs_references=True)


def ipo(section: TrainSection) -> Objective:
    """Return identity preference optimization, a squared error per pair."""
    beta = section.beta

    def pair_losses(scores_BP2: Tensor, means_BP2: Tensor) -> Tensor:
        return (_margin(means_BP2) - 1 / (2 * beta)) ** 2

    return compare_pairs(section, pair_losses, needs_references=True)


def simpo(section: TrainSection) -> Objective:
    """Return simple preference optimization, in nats per pair; it has no reference."""
    beta, smoothing = section.beta, section.preference_label_smoothing

    def pair_losses(scores_BP2: Tensor, means_BP2: Tensor) -> Tensor:
        margin_BP = beta * _margin(means_BP2) - section.simpo_gamma
        return smoothed_logistic_loss(margin_BP, smoothing)

    return compare_pairs(section, pair_losses, has_mean_rewards=True)


def orpo(section: TrainSection) -> Objective:
    """Return odds ratio preference optimization; it has no reference.

    The unit is nats per token of the chosen answers, plus nats per pair.
    """
    beta = section.beta

    def pair_losses(scores_BP2: Tensor, means_BP2: Tensor) -> Tensor:
        # A probability that rounds to 1 has no odds.
        means_BP2 = means_BP2.clamp(max=-torch.finfo(torch.float32).eps)
        log_odds_BP2 = means_BP2 - torch.log(-torch.expm1(means_BP2))
        return -beta * F.logsigmoid(_margin(log_odds_BP2))

    section = section.model_copy(update={"sft_weight": 1.0})
    return compare_pairs(section, pair_losses, has_mean_rewards=True)


def compare_pairs(
    section: TrainSection,
    pair_losses: PairLosses,
    *,
    needs_references: bool = False,
    has_mean_rewards: bool = False,
) -> Objective:
    """Return an objective of pairs; the loss of chosen answers may be a second term.

    Args:
        section: its ``sft_weight`` is the weight of the second term; 0: there is none.
        pair_losses: the first term.  A score is a log-probability.
        needs_references: a score is the difference of the log-probability to the initial model's.
        has_mean_rewards: rewards, which are only logged, are beta times the score per token.
    """
    beta, sft_weight = section.beta, section.sft_weight

    def counts(batch: Batch) -> Tensor:
        pairs_B = count_groups(batch)
        if not sft_weight:
            return pairs_B
        return torch.stack((pairs_B, answer_lengths(batch)[..., 0].sum(1)), dim=1)

    def losses(losses_BT: Tensor, batch: Batch) -> SequenceLosses:
        logprobs_BP2 = scores_BP2 = answer_logprobs(losses_BT, batch)
        if needs_references:
            assert batch.references_BP2 is not None
            scores_BP2 = logprobs_BP2 - batch.references_BP2
        lengths_BP2 = answer_lengths(batch)
        is_pair_BP = (lengths_BP2 > 0).any(2)
        means_BP2 = scores_BP2 / lengths_BP2.clamp(min=1)
        loss_B = (pair_losses(scores_BP2, means_BP2) * is_pair_BP).sum(1)
        rewards_BP2 = beta * (means_BP2 if has_mean_rewards else scores_BP2)
        metrics_BM = _reward_metrics(rewards_BP2, is_pair_BP)
        if not sft_weight:
            return SequenceLosses(loss_B, metrics_BM)
        nll_B, counts_BK = -logprobs_BP2[..., 0].sum(1), counts(batch)
        return SequenceLosses(
            torch.stack((loss_B, sft_weight * nll_B), dim=1),
            torch.cat((metrics_BM, nll_B.detach()[:, None]), dim=1),
            torch.cat((counts_BK[:, :1].expand_as(metrics_BM), counts_BK[:, 1:]), dim=1),
        )

    names = (*REWARDS, "chosen_nll") if sft_weight else REWARDS
    terms = 2 if sft_weight else 1
    return Objective(counts, losses, names, needs_references=needs_references, terms=terms)


def kto(section: TrainSection) -> Objective:
    """Return Kahneman-Tversky optimization of answers with labels, a loss per answer."""
    beta = section.beta

    def ratios(losses_BT: Tensor, batch: Batch, column: int) -> Tensor:
        assert batch.references_BP2 is not None
        logprobs_BP = answer_logprobs(losses_BT, batch)[..., 0]
        return (logprobs_BP - batch.references_BP2[..., column]) * find_groups(batch)

    def baseline(losses_BT: Tensor, batch: Batch) -> Tensor:
        return torch.stack((ratios(losses_BT, batch, 1).sum(1), count_groups(batch)), dim=1)

    def losses(losses_BT: Tensor, batch: Batch) -> SequenceLosses:
        assert batch.labels_BP is not None
        assert batch.baseline_B is not None
        ratios_BP, is_answer_BP = ratios(losses_BT, batch, 0), find_groups(batch)
        is_good_BP, is_bad_BP = batch.labels_BP * is_answer_BP, (1 - batch.labels_BP) * is_answer_BP
        weights_BP = section.desirable_weight * is_good_BP + section.undesirable_weight * is_bad_BP
        kl_B = batch.baseline_B.clamp(min=0)
        gains_BP = (is_good_BP - is_bad_BP) * (ratios_BP - kl_B[:, None])
        loss_B = (weights_BP * torch.sigmoid(-beta * gains_BP)).sum(1)
        count_B = count_groups(batch)
        rewards_BP = beta * ratios_BP.detach()
        sums = ((rewards_BP * is_good_BP).sum(1), (rewards_BP * is_bad_BP).sum(1), kl_B * count_B)
        counts = (is_good_BP.sum(1), is_bad_BP.sum(1), count_B)
        return SequenceLosses(loss_B, torch.stack(sums, dim=1), torch.stack(counts, dim=1))

    names = ("reward_chosen", "reward_rejected", "kl")
    return Objective(count_groups, losses, names, needs_references=True, baseline=baseline)


def smoothed_logistic_loss(margin: Tensor, smoothing: float) -> Tensor:
    """Return -log sigmoid(margin), with a share ``smoothing`` of the pairs swapped."""
    loss = -F.logsigmoid(margin)
    return (1 - smoothing) * loss - smoothing * F.logsigmoid(-margin) if smoothing else loss


def _margin(values_BP2: Tensor) -> Tensor:
    return values_BP2[..., 0] - values_BP2[..., 1]


def reward(section: TrainSection) -> Objective:
    """Return the loss of a reward model, in nats per pair."""
    coef = section.reward_center_coef

    def losses(scores_BT: Tensor, batch: Batch) -> SequenceLosses:
        scores_BP2 = _sum_by_answer(scores_BT * (batch.targets_BT != IGNORE_INDEX), batch)
        is_pair_BP = find_groups(batch)
        loss_BP = -F.logsigmoid(_margin(scores_BP2))
        if coef:
            loss_BP = loss_BP + coef * scores_BP2.sum(2) ** 2
        metrics_BM = _reward_metrics(scores_BP2, is_pair_BP)
        return SequenceLosses((loss_BP * is_pair_BP).sum(1), metrics_BM)

    return Objective(count_groups, losses, REWARDS, takes_scores=True)


def _reward_metrics(rewards_BP2: Tensor, is_pair_BP: Tensor) -> Tensor:
    """Return the sums of `REWARDS` over the pairs of each sequence, (B, M)."""
    margin_BP = _margin(rewards_BP2)
    metrics = (margin_BP, (margin_BP > 0).float(), rewards_BP2[..., 0], rewards_BP2[..., 1])
    return (torch.stack(metrics, dim=2).detach() * is_pair_BP[..., None]).sum(1)


def count_groups(batch: Batch) -> Tensor:
    """Return the number of pairs or labeled answers of each sequence, int64 (B,)."""
    return find_groups(batch).sum(1)


def find_groups(batch: Batch) -> Tensor:
    """Return True where a sequence has a pair or answer with targets, bool (B, P)."""
    return (answer_lengths(batch) > 0).any(2)


def answer_lengths(batch: Batch) -> Tensor:
    """Return the number of targets of each answer, int64: see `answer_logprobs`."""
    return _sum_by_answer((batch.targets_BT != IGNORE_INDEX).long(), batch)


def answer_logprobs(losses_BT: Tensor, batch: Batch) -> Tensor:
    """Return the log-probabilities of answers.

    Returns:
        (B, P, 2), the chosen and the rejected answer of each pair; of labeled answers (B, P, 1).
    """
    return -_sum_by_answer(losses_BT, batch)


def _sum_by_answer(values_BT: Tensor, batch: Batch) -> Tensor:
    """Return the sum over each answer: see `answer_logprobs`."""
    assert batch.documents_BT is not None
    assert batch.references_BP2 is not None
    group_size = 2 if batch.labels_BP is None else 1
    shape = (*batch.references_BP2.shape[:2], group_size)
    answers_A1 = torch.arange(shape[1] * group_size, device=values_BT.device)[:, None]
    is_answer_BAT = batch.documents_BT[:, None] == answers_A1
    return (values_BT[:, None] * is_answer_BAT).sum(2).view(shape)


OBJECTIVES: dict[str, Callable[[TrainSection], Objective]] = {
    "next_token": next_token,
    "dpo": dpo,
    "ipo": ipo,
    "orpo": orpo,
    "simpo": simpo,
    "reward": reward,
    "kto": kto,
}


def build_objective(name: str, section: TrainSection) -> Objective:
    """Return the objective of that name, an entry of `OBJECTIVES` or module:function."""
    return lookup(name, OBJECTIVES)(section)
