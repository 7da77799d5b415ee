"""Mixture of experts: a decoder whose feed-forward layers choose, for each token, among many.

The problem.  A feed-forward layer is most of a transformer's parameters and most of its work.  Cut
into E *experts* of which a token takes A, it keeps the parameters and does A / E of the work
(Shazeer et al., arXiv:1701.06538).  A *router*, one small matrix, scores the experts for a token;
the best A are added up with weights made from their scores.

*Which rules.*  ``score = "softmax"`` is Qwen3's (arXiv:2505.09388): probabilities over all experts,
of the chosen ones brought to a sum of one (``renormalise``) or not.  ``"sigmoid"`` is DeepSeek-V3's
(arXiv:2412.19437): each score by itself, with ``route_scale``; beside the chosen experts every
token goes through ``shared_experts``, and the first ``dense_layers`` have no experts.  Routing is
computed in float32 whatever the weights are, so that layouts differ by as little as they can where
two experts are almost equally good.

*Balance.*  Left alone, a router comes to love a few experts.  A loss that punishes that disturbs
the gradient.  Instead each expert has a bias that counts for choosing only, not for the weights,
and that is moved by a fixed ``balance_rate`` against the sign of the error of its load, after each
optimizer step, by the loads of the whole global batch (Wang et al., arXiv:2408.15664).  The bias is
a buffer: no optimizer sees it, and a checkpoint has it.  `weft.optim.balance` moves it.

*No token is dropped.*  Tokens are brought into the order of their experts and go through grouped
matrix products, `grouped_linear`, whose groups are as large as they are.

Left out: DeepSeek's choice of groups of experts before experts, and its auxiliary loss within a
sequence.

The module is single-device code, as `weft.models.llama`, whose attention, norms, rotary tables and
head these are; spreading experts over ranks is done from outside (`weft.parallel.expert_parallel`).

Shapes in names as in llama.py, and N tokens of all rows, E experts, A active ones of a token, R = N
A rows that go through experts, F width of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from weft.config.errors import ConfigError
from weft.config.schema import NonNegative, Positive, key
from weft.models import llama, qwen3
from weft.models.family import Family, Init, TensorParallelSpec, Unit
from weft.models.layers import Attention, RMSNorm, SwiGLU, grouped_linear
from weft.models.llama import DecoderConfig, Llama, PositiveFloat
from weft.models.qwen3 import NormedAttention

# --------------------------------------------------------------------------- configuration


class MoeConfig(DecoderConfig):
    """Shape of a mixture of experts; the defaults are Qwen3-30B-A3B's (arXiv:2505.09388, table 2,
    and the config.json of its checkpoint)."""

    num_layers: Positive = key(48, "transformer blocks")
    dim: Positive = key(2048, "width of the residual stream")
    num_kv_heads: Positive = key(4, "key and value heads, each shared by a group of query heads")
    head_dim: Positive = key(128, "width of one head")
    qk_norm: bool = key(True, "normalise each head's queries and keys, as Qwen3 does")
    num_experts: Positive = key(128, "experts of a layer, of which the router chooses")
    active_experts: Positive = key(8, "experts that it chooses for a token")
    expert_dim: Positive = key(768, "inner width of an expert")
    shared_experts: NonNegative = key(0, "experts that every token goes through")
    dense_layers: NonNegative = key(0, "first layers, which have one feed-forward layer instead")
    ffn_dim: Positive = key(6144, "inner width of that feed-forward layer")
    score: Literal["softmax", "sigmoid"] = key("softmax", "how the router's outputs become scores")
    renormalise: bool = key(True, "scores of the chosen experts are divided by their sum")
    route_scale: PositiveFloat = key(1.0, "what scores are multiplied by after that")
    balance_rate: Annotated[float, Field(ge=0)] = key(
        0.001, "by how much an expert's bias moves after a step; 0: experts are not balanced"
    )
    vocab_size: Positive = key(151936, "token ids")
    max_seq_len: Positive = key(40960, "longest row, in tokens")
    rope_theta: PositiveFloat = key(1e6, "base of the rotary wavelengths")
    norm_eps: PositiveFloat = key(1e-6, "added to the mean square in RMSNorm")

    @property
    def routed_layers(self) -> int:
        """Layers with experts."""
        return max(0, self.num_layers - self.dense_layers)


PRESETS: dict[str, MoeConfig] = {
    # For two CPU cores.
    "toy-moe": MoeConfig(
        num_layers=3,
        dim=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        num_experts=8,
        active_experts=2,
        expert_dim=128,
        shared_experts=1,
        dense_layers=1,
        ffn_dim=384,
        vocab_size=4096,
        max_seq_len=1024,
        rope_theta=10000.0,
        tied_embeddings=True,
    ),
    "qwen3-30b-a3b": MoeConfig(),
    # The sizes of DeepSeek-V3 (arXiv:2412.19437, section 4.2) but for attention: weft has no
    # multi-head latent attention, and this is ordinary attention with as many heads in groups.  So
    # it has 675 billion parameters and not 671, 41 of them active and not 37, and larger caches.
    "v3-like": MoeConfig(
        num_layers=61,
        dim=7168,
        num_heads=128,
        num_kv_heads=8,
        head_dim=128,
        qk_norm=False,
        num_experts=256,
        active_experts=8,
        expert_dim=2048,
        shared_experts=1,
        dense_layers=3,
        ffn_dim=18432,
        score="sigmoid",
        route_scale=2.5,
        vocab_size=129280,
        max_seq_len=4096,
        rope_theta=10000.0,
    ),
}


def check(config: MoeConfig) -> list[ConfigError]:
    """Every reason why a model of this shape cannot be built; keys are ``model.<field>``."""
    problems = llama.check(config)
    if config.active_experts > config.num_experts:
        rule = f"exceeds model.num_experts = {config.num_experts}"
        remedy, depends = f"use at most {config.num_experts}", ("model.num_experts",)
        problems.append(
            ConfigError("model.active_experts", config.active_experts, rule, remedy, depends)
        )
    if config.dense_layers >= config.num_layers:
        rule = f"leaves none of model.num_layers = {config.num_layers} layers with experts"
        remedy, depends = "use fewer, or another model.kind", ("model.num_layers",)
        problems.append(
            ConfigError("model.dense_layers", config.dense_layers, rule, remedy, depends)
        )
    return problems


# --------------------------------------------------------------------------- module


class Router(nn.Module):
    """Which experts a token goes through, and with which weights.

    ``expert_bias``: float32 ``[E]``, added to the scores for choosing only.
    """

    expert_bias: Tensor

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.dim))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as nn.Linear does
        self.register_buffer("expert_bias", torch.zeros(config.num_experts))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        # Stays float32 under ``model.to(bfloat16)``: its steps are smaller than bfloat16's.
        before = self.expert_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.expert_bias.dtype != torch.float32:
            self.expert_bias = before.to(self.expert_bias.device)
        return self

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen experts, int64 ``[N, A]``, and their weights, float32 ``[N, A]``."""
        config = self.config
        logits_NE = F.linear(x_ND.float(), self.weight.float())
        scores_NE = logits_NE.softmax(1) if config.score == "softmax" else logits_NE.sigmoid()
        biased_NE = scores_NE.detach() + self.expert_bias
        chosen_NA = biased_NE.topk(config.active_experts, dim=1).indices
        weights_NA = scores_NE.gather(1, chosen_NA)
        if config.renormalise:
            weights_NA = weights_NA / weights_NA.sum(1, keepdim=True)
        return chosen_NA, weights_NA * config.route_scale


class ExpertLinear(nn.Module):
    """A linear layer without bias for each expert: ``weight`` is ``[E, outputs, inputs]``."""

    def __init__(self, num_experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, outputs, inputs))
        bound = 1 / math.sqrt(inputs)  # as nn.Linear does
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        """See `grouped_linear`."""
        return grouped_linear(x_RD, self.weight, counts_E)


class Experts(nn.Module):
    """SwiGLU for each expert."""

    def __init__(self, num_experts: int, dim: int, expert_dim: int) -> None:
        super().__init__()
        self.gate_proj = ExpertLinear(num_experts, dim, expert_dim)
        self.up_proj = ExpertLinear(num_experts, dim, expert_dim)
        self.down_proj = ExpertLinear(num_experts, expert_dim, dim)

    def forward(self, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        """``[R, D]`` to ``[R, D]``: the first ``counts_E[0]`` rows by the first expert, ..."""
        hidden_RF = F.silu(self.gate_proj(x_RD, counts_E)) * self.up_proj(x_RD, counts_E)
        out_RD: Tensor = self.down_proj(hidden_RF, counts_E)
        return out_RD


class MoE(nn.Module):
    """A feed-forward layer of experts."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config.num_experts, config.dim, config.expert_dim)
        if config.shared_experts:
            # As wide as all of them: several are the same as one.
            shared_dim = config.shared_experts * config.expert_dim
            self.shared_experts: SwiGLU | None = SwiGLU(config.dim, shared_dim)
        else:
            self.shared_experts = None

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``[B, T, D]`` to ``[B, T, D]``."""
        x_ND = x_BTD.flatten(0, 1)
        chosen_NA, weights_NA = self.router(x_ND)
        numbers_E = torch.arange(self.router.config.num_experts, device=x_ND.device)
        # Stable, so that each expert has its tokens in their order.
        sorted_R, order_R = chosen_NA.flatten().sort(stable=True)
        ends_E = torch.searchsorted(sorted_R, numbers_E, right=True)
        counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        place_R = torch.empty_like(order_R).scatter_(
            0, order_R, torch.arange(len(order_R), device=order_R.device)
        )
        rows_RD = Unpermute.apply(x_ND, order_R, place_R)  # type: ignore[no-untyped-call]
        rows_RD = self.experts(rows_RD, counts_E)
        rows_RD = Permute.apply(rows_RD, place_R, order_R)  # type: ignore[no-untyped-call]
        # A product, which adds up in float32, and does not keep A scaled rows of each token.
        rows_NAD = rows_RD.unflatten(0, (-1, chosen_NA.shape[1]))
        out_ND = torch.bmm(weights_NA.to(x_ND.dtype).unsqueeze(1), rows_NAD).squeeze(1)
        out_BTD = out_ND.view_as(x_BTD)
        return out_BTD if self.shared_experts is None else out_BTD + self.shared_experts(x_BTD)


class Permute(torch.autograd.Function):
    """``x[order]`` with a backward pass that is a look-up, too: by itself it would add up rows in
    no certain order."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, order_R: Tensor, place_R: Tensor) -> Tensor:
        """``place_R``: the inverse of ``order_R``."""
        ctx.save_for_backward(place_R)
        return x_RD[order_R]

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        (place_R,) = ctx.saved_tensors
        return grad_RD[place_R], None, None


class Unpermute(torch.autograd.Function):
    """A row for each of a token's experts, in the order of the experts; gradients added up in the
    order of a token's choices."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_R: Tensor, place_R: Tensor) -> Tensor:
        """Row r is of token ``order_R[r] // A``; ``place_R``: the inverse of ``order_R``."""
        ctx.save_for_backward(place_R)
        ctx.active = len(order_R) // max(1, len(x_ND))
        return x_ND[order_R // ctx.active]

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        (place_R,) = ctx.saved_tensors
        grad_RD = grad_RD[place_R]
        return grad_RD.view(-1, ctx.active, grad_RD.shape[1]).sum(1), None, None


class Block(nn.Module):
    """One decoder layer: attention and feed-forward, each behind a norm."""

    def __init__(self, config: MoeConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.dim, config.norm_eps)
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        self.self_attn = (
            NormedAttention(config) if config.qk_norm else Attention(config.dim, *heads)
        )
        self.post_attention_layernorm = RMSNorm(config.dim, config.norm_eps)
        dense = index < config.dense_layers
        self.mlp = SwiGLU(config.dim, config.ffn_dim) if dense else MoE(config)

    forward = llama.Block.forward


class Moe(Llama):
    """`Llama` with other blocks: see the top of this file.

    Raises:
        ValueError: if `check` finds the configuration impossible.
    """

    config: MoeConfig
    check = staticmethod(check)  # type: ignore[assignment]

    def new_block(self, index: int) -> nn.Module:
        return Block(self.config, index)


def routed(model: nn.Module) -> list[MoE]:
    """The layers with experts, in order."""
    return [module for module in model.modules() if isinstance(module, MoE)]


# --------------------------------------------------------------------------- tables

# As `weft.models.llama.INIT`; the last is the balance's bias, a buffer.
INIT: dict[str, Init] = {
    **llama.INIT,
    "layers.*.mlp.router.weight": Init("truncated_normal", 0.02),
    "layers.*.mlp.*experts.gate_proj.weight": Init("truncated_normal", 0.02),
    "layers.*.mlp.*experts.up_proj.weight": Init("truncated_normal", 0.02),
    "layers.*.mlp.*experts.down_proj.weight": Init("truncated_normal", 0.02, residual=True),
    "layers.*.mlp.router.expert_bias": Init("zeros"),
}


def init_of(name: str, config: MoeConfig) -> Init:
    """The entry of `INIT` for a parameter or buffer, with the final ``std``."""
    return llama.init_from(INIT, name, config.num_layers)


# As `weft.models.llama.SHARDING`.  All of a feed-forward layer lies between one gather and one
# scatter: each rank routes all tokens, alike, and has a slice of each expert's width.
SHARDING: dict[str, TensorParallelSpec] = {
    **llama.SHARDING,
    "layers.*.self_attn.[qk]_norm": TensorParallelSpec("summed"),
    "layers.*.mlp": TensorParallelSpec(before="gather", after="scatter"),
    "layers.*.mlp.router": TensorParallelSpec("summed"),
    "layers.*.mlp.down_proj": TensorParallelSpec("row"),
    "layers.*.mlp.*experts.gate_proj": TensorParallelSpec("column"),
    "layers.*.mlp.*experts.up_proj": TensorParallelSpec("column"),
    "layers.*.mlp.*experts.down_proj": TensorParallelSpec("row"),
}

SPLIT_SIZES = ("num_heads", "ffn_dim", "expert_dim", "vocab_size")


# --------------------------------------------------------------------------- arithmetic


def _dense(config: MoeConfig) -> Family:
    """The family that this one would be if no layer had experts."""
    return qwen3.FAMILY if config.qk_norm else llama.FAMILY


class Counts(NamedTuple):
    """Weights of a layer's feed-forward part, as matrices."""

    dense: int  # of a layer without experts
    router: int
    expert: int
    shared: int
    active: int  # of a routed layer, those that a token is multiplied by


def counts(config: MoeConfig) -> Counts:
    """Those of this shape."""
    router = config.num_experts * config.dim
    expert = 3 * config.dim * config.expert_dim
    shared = config.shared_experts * expert
    active = router + config.active_experts * expert + shared
    return Counts(3 * config.dim * config.ffn_dim, router, expert, shared, active)


def units(config: MoeConfig, seq_len: int) -> list[Unit]:
    """As `weft.models.llama.units`.  A routed layer keeps of a token, for each active expert, the
    row that goes in and the one that comes out, four widths, and indices and weights; and besides
    twice the row, the scores, and four widths of the shared experts."""
    dense_units = _dense(config).units
    assert dense_units is not None
    each, active = counts(config), config.active_experts
    experts = config.num_experts * each.expert
    kept_bytes = (
        active * (4 * config.dim + 8 * config.expert_dim + 32)
        + 4 * config.dim
        + 12 * config.num_experts
        + 8 * config.shared_experts * config.expert_dim
    )
    first, *layers, last = dense_units(config, seq_len)
    routed = [
        unit._replace(
            params=unit.params - each.dense + each.router + experts + each.shared,
            flops_per_token=unit.flops_per_token + 6.0 * (each.active - each.dense),
            activation_bytes_per_token=unit.activation_bytes_per_token
            - 8 * config.ffn_dim
            + kept_bytes,
            expert_params=experts,
        )
        for unit in layers[config.dense_layers :]
    ]
    return [first, *layers[: config.dense_layers], *routed, last]


def num_params(config: MoeConfig) -> int:
    """Parameters of the model, a tied embedding counted once."""
    idle = config.num_experts - config.active_experts
    return num_active_params(config) + config.routed_layers * idle * counts(config).expert


def num_active_params(config: MoeConfig) -> int:
    """Parameters that a token has to do with: all but the experts that it does not go through."""
    return _dense(config).num_params(config) + _active_over_dense(config)


def _active_over_dense(config: MoeConfig) -> int:
    """Weights that a token is multiplied by, more than if no layer had experts."""
    each = counts(config)
    return config.routed_layers * (each.active - each.dense)


def flops_per_token(config: MoeConfig, seq_len: int) -> float:
    """As `weft.models.llama.flops_per_token`, with the weights of the active experts only: how
    DeepSeek-V3 (arXiv:2412.19437, section 2) and TorchTitan count a mixture of experts."""
    return llama.flops_per_token(config, seq_len) + 6.0 * _active_over_dense(config)


FAMILY = Family(
    config=MoeConfig,
    presets=PRESETS,
    build=Moe,
    check=check,
    blocks=llama.blocks,
    init_of=init_of,
    decays=llama.decays,
    num_params=num_params,
    flops_per_token=flops_per_token,
    sharding=SHARDING,
    split_sizes=SPLIT_SIZES,
    units=units,
    keep=llama.keep,
    without_head=llama.without_head,
    routed=routed,
    num_active_params=num_active_params,
)
