"""Mixture of experts (MoE): feed-forward layers that route tokens to experts.

Most of a transformer's parameters and work are in its feed-forward layers.  An MoE layer has E
*experts*, of which each token uses A: it keeps the parameters and does A / E of the work (Shazeer
et al., arXiv:1701.06538).  A *router*, one small matrix, scores the experts for each token.  The
outputs of the A best experts are summed with weights from their scores.

*Routing.*  ``score = "softmax"`` is Qwen3's rule (arXiv:2505.09388): probabilities over all
experts; those of the selected experts are normalized to a sum of one if ``renormalize`` is set.
``"sigmoid"`` is DeepSeek-V3's (arXiv:2412.19437): independent scores, multiplied by
``route_scale``.  There, every token also passes through ``shared_experts``, the first
``dense_layers`` have no experts, and a token selects ``active_groups`` groups of experts first,
those with the largest sums of their two best scores.  Routing is always computed in float32, which
keeps layouts as close as possible where two experts score almost equally.

*Load balance.*  An unconstrained router overloads a few experts, and an auxiliary loss disturbs the
gradient.  Instead each expert has a bias that affects selection only, not the weights.  After each
optimizer step, `weft.optim.balance` moves the bias by a fixed ``balance_rate`` against the sign of
the expert's load error over the global batch (Wang et al., arXiv:2408.15664).  The bias is a
buffer: checkpoints contain it, the optimizer does not.

*Losses of the router* do change the gradient, and are off by default.  For the logits l of a
sequence's tokens t, their probabilities p, and the load f_e of expert e over the mean load:

    load balance   sum_e f_e mean_t p_te       DeepSeek-V3, equations 17 to 20
    z              mean_t logsumexp(l_t)^2     ST-MoE (arXiv:2202.08906), equation 5

A loss is the mean over the sequences of the global batch, so that no layout changes it: fractions
of a microbatch, as in Switch Transformer, would depend on its size.  `AddLoss` adds the gradients
in backward.  The loss of the model remains the cross-entropy.

*No token is dropped.*  Tokens are sorted by expert and pass through grouped matrix products of any
group size (`grouped_linear`).

The module is single-device code.  `weft.parallel.expert_parallel` shards experts over ranks; shared
experts then compute while the rows of the others travel.

Shapes in names as in decoder.py, and N tokens of all sequences, E experts, A active experts per
token, R = N * A routed tokens, F expert width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.models.decoder_config import DecoderConfig
from weft.models.layers import (
    ACTIVATIONS,
    FeedForward,
    add_bias,
    grouped_linear,
    run_function,
)

SWISH_SCALE = 1.702  # of the gate in gpt-oss's activation


class RouterStep(NamedTuple):
    """Sums of a router over a training step.

    Attributes:
        loads_E: int64, tokens of each expert.
        sums_M: float32, sums over sequences of the means over their tokens: load-balance loss,
            z-loss, entropy of the probabilities in nats, and fraction of tokens whose experts the
            bias changed.  None: only losses are computed, if there are any.
        loss_scale: float32 scalar, weight of a sequence in the losses of the step.
        add: adds the second tensor to the first, except in a recomputation.
    """

    loads_E: Tensor
    sums_M: Tensor | None
    loss_scale: Tensor
    add: Callable[[Tensor, Tensor], None]


class Router(nn.Module):
    """Selects the experts of each token, and their weights.

    Attributes:
        expert_bias: float32 ``[E]``, added to the scores for selection only.
        excess_load: float32 ``[E]``, load of each expert in the step before, over the mean load,
            minus 1; only for a load-balance loss of the global batch.
        step: None outside of training.
        sequence_shards: ranks that share each sequence.
        sum_over_shards: sums a tensor over them; None: there are no others.
    """

    expert_bias: Tensor
    excess_load: Tensor
    step: RouterStep | None = None
    sequence_shards = 1
    sum_over_shards: Callable[[Tensor], Tensor] | None = None

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.dim))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as nn.Linear does
        self.bias = nn.Parameter(torch.zeros(config.num_experts)) if config.router_bias else None
        self.register_buffer("expert_bias", torch.zeros(config.num_experts))
        if config.router_aux_loss_scope == "global":
            self.register_buffer("excess_load", torch.zeros(config.num_experts))

    @property
    def has_losses(self) -> bool:
        """Return True if the router has a loss."""
        return self.config.router_aux_loss_coef + self.config.router_z_loss_coef > 0

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        # Stay float32 under ``model.to(bfloat16)``: updates are below bfloat16's resolution.
        buffers = dict(self.named_buffers())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in self.named_buffers():
            if buffer.dtype != torch.float32:
                setattr(self, name, buffers[name].to(buffer.device))
        return self

    def forward(self, x_ND: Tensor, num_sequences: int = 1) -> tuple[Tensor, Tensor]:
        """Return the selected experts, int64 ``[N, A]``, and their float32 weights."""
        config = self.config
        bias_E = None if self.bias is None else self.bias.float()
        logits_NE = F.linear(x_ND.float(), self.weight.float(), bias_E)
        scores_NE = logits_NE
        if not config.score_selected:
            scores_NE = self._score(logits_NE)
        chosen_NA = self._choose(scores_NE.detach() + self.expert_bias)
        weights_NA = scores_NE.gather(1, chosen_NA)
        if config.score_selected:
            weights_NA = self._score(weights_NA)
        elif config.renormalize:
            weights_NA = weights_NA / weights_NA.sum(1, keepdim=True)
        weights_NA = weights_NA * config.route_scale
        if self.step is not None and self.step.sums_M is not None and torch.is_grad_enabled():
            loss, sums_M = self._losses(logits_NE, scores_NE, chosen_NA, num_sequences)
            self.step.add(self.step.sums_M, sums_M)
            weights_NA = run_function(AddLoss, weights_NA, loss, self.step.loss_scale)
        return chosen_NA, weights_NA

    def _choose(self, biased_NE: Tensor) -> Tensor:
        if self.config.expert_groups > 1:
            biased_NE = self._exclude_groups(biased_NE)
        return biased_NE.topk(self.config.active_experts, dim=1).indices

    def _losses(
        self, logits_NE: Tensor, scores_NE: Tensor, chosen_NA: Tensor, num_sequences: int
    ) -> tuple[Tensor, Tensor]:
        """Return the sum over sequences of the router's losses, and `RouterStep.sums_M`."""
        config = self.config
        num_tokens = len(logits_NE) // num_sequences * self.sequence_shards
        if config.score_selected:
            scores_NE = self._score(logits_NE)
        probs_NE = scores_NE / scores_NE.sum(1, keepdim=True)
        chosen_NE = torch.zeros_like(scores_NE).scatter(1, chosen_NA, 1.0)
        unbiased_NA = self._choose(scores_NE.detach())
        if config.router_aux_loss_scope == "global":
            loads_BE = 1 + self.excess_load
        else:
            loads_BE = chosen_NE.view(num_sequences, -1, config.num_experts).sum(1)
            if self.sum_over_shards is not None:
                loads_BE = self.sum_over_shards(loads_BE)
            loads_BE = loads_BE * (config.num_experts / config.active_experts / num_tokens)
        probs_BE = probs_NE.view(num_sequences, -1, config.num_experts).sum(1)
        balance, z = (loads_BE * probs_BE).sum(), logits_NE.logsumexp(1).square().sum()
        entropy = torch.special.entr(probs_NE.detach()).sum()
        num_changed = (chosen_NE.gather(1, unbiased_NA) == 0).any(1).sum()
        sums_M = torch.stack((balance.detach(), z.detach(), entropy, num_changed)) / num_tokens
        loss = balance * config.router_aux_loss_coef + z * config.router_z_loss_coef
        return loss / num_tokens, sums_M

    def _score(self, logits: Tensor) -> Tensor:
        return logits.softmax(1) if self.config.score == "softmax" else logits.sigmoid()

    def _exclude_groups(self, biased_NE: Tensor) -> Tensor:
        """Make the experts of all but the best groups impossible to select."""
        groups_NGM = biased_NE.view(len(biased_NE), self.config.expert_groups, -1)
        sums_NG = groups_NGM.topk(min(2, groups_NGM.shape[2]), dim=2).values.sum(2)
        best_NA = sums_NG.topk(self.config.active_groups, dim=1).indices
        excluded_NG = torch.ones_like(sums_NG, dtype=torch.bool).scatter(1, best_NA, value=False)
        return groups_NGM.masked_fill(excluded_NG.unsqueeze(2), float("-inf")).view_as(biased_NE)


class ExpertLinear(nn.Module):
    """One linear layer per expert; ``[E, outputs, inputs]`` and ``[E, outputs]``."""

    def __init__(self, num_experts: int, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.num_experts, self.in_features, self.out_features = num_experts, inputs, outputs
        self.weight = nn.Parameter(torch.empty(num_experts, outputs, inputs))
        bound = 1 / math.sqrt(inputs)  # as nn.Linear does
        nn.init.uniform_(self.weight, -bound, bound)
        self.bias = nn.Parameter(torch.zeros(num_experts, outputs)) if bias else None
        self.product: Callable[[Tensor, Tensor, Tensor], Tensor] = grouped_linear

    def forward(self, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        """See `grouped_linear`."""
        return add_bias(self.product(x_RD, self.weight, counts_E), self.bias, counts_E)


class Experts(nn.Module):
    """One feed-forward layer per expert.

    Attributes:
        exchanges_tokens: they are on several ranks, and ``forward`` is
            `weft.parallel.expert_dispatch.apply_in_chunks`.
    """

    exchanges_tokens = False

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        num_experts, dim, width = config.num_experts, config.dim, config.expert_dim
        self.activation, self.limit = ACTIVATIONS[config.activation], config.expert_limit
        bias = config.expert_biases
        self.gate_proj = ExpertLinear(num_experts, dim, width, bias)
        self.up_proj = ExpertLinear(num_experts, dim, width, bias)
        self.down_proj = ExpertLinear(num_experts, width, dim, bias)

    def forward(self, x_RD: Tensor, *counts: Tensor) -> Tensor:
        """Map ``[R, D]`` to ``[R, D]``.

        ``counts``: int64 ``[E]``, expert e takes the next ``counts[0][e]`` rows; and, for layers
        with dropout, the keys of the rows (`weft.parallel.lora.dropout`).
        """
        gate_RF, up_RF = self.gate_proj(x_RD, *counts), self.up_proj(x_RD, *counts)
        if self.limit:  # gpt-oss
            gate_RF = gate_RF.clamp(max=self.limit)
            up_RF = up_RF.clamp(-self.limit, self.limit)
            hidden_RF = gate_RF * torch.sigmoid(SWISH_SCALE * gate_RF) * (up_RF + 1)
        else:
            hidden_RF = self.activation(gate_RF) * up_RF
        out_RD: Tensor = self.down_proj(hidden_RF, *counts)
        return out_RD


class MoE(nn.Module):
    """Feed-forward layer of experts.

    Attributes:
        overlaps_shared_experts: ``experts`` computes the shared experts while it waits for rows of
            other ranks.
    """

    overlaps_shared_experts = False
    # Returns [B, T] tensors; experts get their values for each row as more arguments.
    token_keys: Callable[[], Sequence[Tensor]] = tuple

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        self.scales_inputs = config.scaled_expert_inputs
        # One wide layer equals several shared experts.
        shared_dim = config.shared_experts * config.expert_dim
        self.shared_experts = FeedForward(config, shared_dim) if shared_dim else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map ``[B, T, D]`` to ``[B, T, D]``."""
        if self.shared_experts is None:
            return self.route(x_BTD)[0]
        if self.overlaps_shared_experts:
            out_BTD, shared_BTD = self.route(x_BTD, (self.shared_experts, x_BTD))
        else:
            (out_BTD,), shared_BTD = self.route(x_BTD), self.shared_experts(x_BTD)
        return out_BTD + shared_BTD

    def route(
        self, x_BTD: Tensor, beside: tuple[nn.Module, Tensor] | None = None
    ) -> tuple[Tensor, ...]:
        """Return the weighted outputs of each token's experts.

        ``beside`` is a module and its input, which `experts` computes beside its exchange of rows;
        its output is the second of the result.
        """
        x_ND = x_BTD.flatten(0, 1)
        chosen_NA, weights_NA = self.router(x_ND, len(x_BTD))
        keys = [each_BT.flatten() for each_BT in self.token_keys()]
        num_active = chosen_NA.shape[1]
        if self.scales_inputs:  # each expert has its own input, a token with one expert
            x_ND = (x_ND.unsqueeze(1) * weights_NA.unsqueeze(2).to(x_ND.dtype)).flatten(0, 1)
            keys = [key_N.repeat_interleave(num_active) for key_N in keys]
            chosen_NA, weights_NA = (
                t.view(-1, 1) for t in (chosen_NA, torch.ones_like(weights_NA))
            )
        routing = sort_by_expert(chosen_NA, weights_NA, self.router.config.num_experts)
        if (step := self.router.step) is not None and torch.is_grad_enabled():
            step.add(step.loads_E, routing.counts_E)
        besides: tuple[Tensor, ...] = ()
        if not self.experts.exchanges_tokens:
            rows_RD, keys = routing.expand(x_ND), [key_N[routing.tokens_R] for key_N in keys]
            out_ND = routing.combine(self.experts(rows_RD, routing.counts_E, *keys))
        elif beside is None:
            out_ND = self.experts(x_ND, routing, *keys)
        else:
            out_ND, *besides = self.experts(x_ND, routing, *keys, beside=beside)
        if self.scales_inputs:
            out_ND = out_ND.view(-1, num_active, out_ND.shape[1]).sum(1)
        return out_ND.view_as(x_BTD), *besides


class Routing(NamedTuple):
    """The experts of N tokens.

    Attributes:
        chosen_NA: int64, different experts of each token.
        weights_NA: float32, of their outputs; needs a gradient.
        counts_E: int64, tokens of each expert.
        order_R: int64, positions in the flattened ``chosen_NA``, by expert.  The tokens of an
            expert keep their order.
        inverse_R: int64, place in ``order_R`` of each position.
    """

    chosen_NA: Tensor
    weights_NA: Tensor
    counts_E: Tensor
    order_R: Tensor
    inverse_R: Tensor

    @property
    def tokens_R(self) -> Tensor:
        """The token of each row."""
        return self.order_R // self.chosen_NA.shape[1]

    def expand(self, x_ND: Tensor) -> Tensor:
        """Return a row for each token and expert, sorted by expert."""
        return run_function(Permute, x_ND, self.order_R, self.inverse_R)

    def combine(self, rows_RD: Tensor) -> Tensor:
        """Return the weighted sum of each token's rows, ``[N, D]``."""
        rows_RD = run_function(Permute, rows_RD, self.inverse_R, self.order_R)
        # bmm accumulates in float32, and does not save A scaled rows per token for backward.
        outputs_NAD = rows_RD.view(*self.chosen_NA.shape, rows_RD.shape[1])
        return torch.bmm(self.weights_NA.to(rows_RD.dtype).unsqueeze(1), outputs_NAD).squeeze(1)


def sort_by_expert(chosen_NA: Tensor, weights_NA: Tensor, num_experts: int) -> Routing:
    """Count the tokens of each expert, and find their order by expert."""
    experts_E = torch.arange(num_experts, device=chosen_NA.device)
    # Stable, so that each expert's tokens keep their order.
    sorted_R, order_R = chosen_NA.flatten().sort(stable=True)
    ends_E = torch.searchsorted(sorted_R, experts_E, right=True)
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    inverse_R = torch.empty_like(order_R).scatter_(
        0, order_R, torch.arange(len(order_R), device=order_R.device)
    )
    return Routing(chosen_NA, weights_NA, counts_E, order_R, inverse_R)


class Permute(torch.autograd.Function):
    """Look up each row A times, with a backward pass that is also a lookup.

    Autograd's own backward would sum rows in nondeterministic order.  This one sums the gradients
    of a row in the order of its copies.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        """Return row ``order_R[r] // A`` for each r; ``inverse_R`` inverts ``order_R``."""
        ctx.save_for_backward(inverse_R)
        ctx.active = len(order_R) // max(1, len(x_ND)) or 1
        return x_ND[order_R if ctx.active == 1 else order_R // ctx.active]

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the input."""
        (inverse_R,) = ctx.saved_tensors
        grad_RD = grad_RD[inverse_R]
        if ctx.active != 1:
            grad_RD = grad_RD.view(-1, ctx.active, grad_RD.shape[1]).sum(1)
        return grad_RD, None, None


class AddLoss(torch.autograd.Function):
    """Return the first input; backward adds ``loss * scale`` to the loss of the step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        """Return ``x``; ``loss`` and ``scale`` are scalars."""
        ctx.save_for_backward(scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradient of ``x``, and that of the loss, its scale."""
        (scale,) = ctx.saved_tensors
        return grad, scale.clone(), None


def moe_layers(model: nn.Module) -> list[MoE]:
    """Return the layers with experts, in order."""
    return [module for module in model.modules() if isinstance(module, MoE)]
