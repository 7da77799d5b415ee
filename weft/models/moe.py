"""Mixture of experts (MoE): feed-forward layers that route tokens to experts.

Most of a transformer's parameters and work are in its feed-forward layers.  An MoE layer has E
*experts*, of which each token uses A: it keeps the parameters and does A / E of the work (Shazeer
et al., arXiv:1701.06538).  A *router*, one small matrix, scores the experts for each token.  The
outputs of the A best experts are summed with weights from their scores.

*Routing.*  ``score = "softmax"`` is Qwen3's rule (arXiv:2505.09388): probabilities over all
experts; those of the selected experts are normalized to a sum of one if ``renormalize`` is set.
``"sigmoid"`` is DeepSeek-V3's (arXiv:2412.19437): independent scores, multiplied by
``route_scale``.  There, every token also passes through ``shared_experts``, and the first
``dense_layers`` have no experts.  Routing is always computed in float32, which keeps layouts as
close as possible where two experts score almost equally.

*Load balance.*  An unconstrained router overloads a few experts, and an auxiliary loss disturbs the
gradient.  Instead each expert has a bias that affects selection only, not the weights.  After each
optimizer step, `weft.optim.balance` moves the bias by a fixed ``balance_rate`` against the sign of
the expert's load error over the global batch (Wang et al., arXiv:2408.15664).  The bias is a
buffer: checkpoints contain it, the optimizer does not.

*No token is dropped.*  Tokens are sorted by expert and pass through grouped matrix products of any
group size (`grouped_linear`).

Not implemented: DeepSeek's group-limited routing and its sequence-wise auxiliary loss.

The module is single-device code and reuses attention, norms, rotary tables and head of
`weft.models.llama`.  `weft.parallel.expert_parallel` shards experts over ranks.

Shapes in names as in llama.py, and N tokens of all sequences, E experts, A active experts per
token, R = N * A routed tokens, F expert width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from weft.config.errors import ConfigErrors
from weft.config.schema import NonNegative, Positive, key
from weft.models import llama
from weft.models.family import Init, TensorParallelSpec, UnitCost
from weft.models.layers import SwiGLU, grouped_linear, run_function
from weft.models.llama import DecoderConfig, Llama, LlamaBlock, PositiveFloat

# --------------------------------------------------------------------------- configuration


class MoeConfig(DecoderConfig):
    """Configuration of a mixture of experts; defaults: Qwen3-30B-A3B.

    Source: arXiv:2505.09388, table 2, and the checkpoint's ``config.json``.
    """

    num_layers: Positive = key(48, "transformer blocks")
    dim: Positive = key(2048, "width of the residual stream")
    num_kv_heads: Positive = key(4, "key and value heads, each shared by a group of query heads")
    head_dim: Positive = key(128, "width of one head")
    qk_norm: bool = key(True, "normalize each head's queries and keys, as Qwen3 does")
    num_experts: Positive = key(128, "experts per layer")
    active_experts: Positive = key(8, "experts that the router selects per token")
    expert_dim: Positive = key(768, "inner width of an expert")
    shared_experts: NonNegative = key(0, "experts that every token passes through")
    dense_layers: NonNegative = key(0, "number of first layers without experts")
    ffn_dim: Positive = key(6144, "inner width of the feed-forward layer of dense layers")
    score: Literal["softmax", "sigmoid"] = key("softmax", "function from router logits to scores")
    renormalize: bool = key(True, "divide the selected experts' scores by their sum")
    route_scale: PositiveFloat = key(1.0, "factor of the scores, applied after normalization")
    balance_rate: Annotated[float, Field(ge=0)] = key(
        0.001, "update of an expert's load-balance bias per step; 0: no load balancing"
    )
    vocab_size: Positive = key(151936, "token ids")
    max_seq_len: Positive = key(40960, "maximum sequence length, in tokens")
    rope_theta: PositiveFloat = key(1e6, "base of the rotary wavelengths")
    norm_eps: PositiveFloat = key(1e-6, "added to the mean square in RMSNorm")

    @property
    def num_moe_layers(self) -> int:
        """Return the number of layers with experts."""
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
    # The sizes of DeepSeek-V3 (arXiv:2412.19437, section 4.2), but with grouped-query attention,
    # because weft has no multi-head latent attention.  The model therefore has 675 billion
    # parameters, not 671, 41 of them active, not 37, and a larger KV cache.
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


def check(config: MoeConfig) -> ConfigErrors:
    """Return every reason why the model cannot be built; keys are ``model.<field>``."""
    errors = llama.check(config)
    if config.active_experts > config.num_experts:
        rule = f"exceeds model.num_experts={config.num_experts}"
        remedy = f"use at most {config.num_experts}"
        errors.add("model.active_experts", rule, remedy, ("model.num_experts",))
    if config.dense_layers >= config.num_layers:
        rule = f"leaves no layer with experts: model.num_layers={config.num_layers}"
        remedy = "use fewer, or another model.kind"
        errors.add("model.dense_layers", rule, remedy, ("model.num_layers",))
    return errors


# --------------------------------------------------------------------------- module


class Router(nn.Module):
    """Selects the experts of each token, and their weights.

    ``expert_bias``: float32 ``[E]``, added to the scores for selection only.
    """

    expert_bias: Tensor

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.dim))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as nn.Linear does
        self.register_buffer("expert_bias", torch.zeros(config.num_experts))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        # Stays float32 under ``model.to(bfloat16)``: its updates are below bfloat16's resolution.
        fp32_bias = self.expert_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.expert_bias.dtype != torch.float32:
            self.expert_bias = fp32_bias.to(self.expert_bias.device)
        return self

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return the selected experts, int64 ``[N, A]``, and their float32 weights."""
        config = self.config
        logits_NE = F.linear(x_ND.float(), self.weight.float())
        scores_NE = logits_NE.softmax(1) if config.score == "softmax" else logits_NE.sigmoid()
        biased_NE = scores_NE.detach() + self.expert_bias
        chosen_NA = biased_NE.topk(config.active_experts, dim=1).indices
        weights_NA = scores_NE.gather(1, chosen_NA)
        if config.renormalize:
            weights_NA = weights_NA / weights_NA.sum(1, keepdim=True)
        return chosen_NA, weights_NA * config.route_scale


class ExpertLinear(nn.Module):
    """One linear layer without bias per expert; weight ``[E, outputs, inputs]``."""

    def __init__(self, num_experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, outputs, inputs))
        bound = 1 / math.sqrt(inputs)  # as nn.Linear does
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        """See `grouped_linear`."""
        return grouped_linear(x_RD, self.weight, counts_E)


class Experts(nn.Module):
    """One SwiGLU per expert."""

    def __init__(self, num_experts: int, dim: int, expert_dim: int) -> None:
        super().__init__()
        self.gate_proj = ExpertLinear(num_experts, dim, expert_dim)
        self.up_proj = ExpertLinear(num_experts, dim, expert_dim)
        self.down_proj = ExpertLinear(num_experts, expert_dim, dim)

    def forward(self, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Map ``[R, D]`` to ``[R, D]``; expert e takes the next ``counts_E[e]`` rows."""
        hidden_RF = F.silu(self.gate_proj(x_RD, counts_E)) * self.up_proj(x_RD, counts_E)
        out_RD: Tensor = self.down_proj(hidden_RF, counts_E)
        return out_RD


class MoE(nn.Module):
    """Feed-forward layer of experts."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config.num_experts, config.dim, config.expert_dim)
        if config.shared_experts:
            # One wide SwiGLU equals several shared experts.
            shared_dim = config.shared_experts * config.expert_dim
            self.shared_experts: SwiGLU | None = SwiGLU(config.dim, shared_dim)
        else:
            self.shared_experts = None

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map ``[B, T, D]`` to ``[B, T, D]``."""
        x_ND = x_BTD.flatten(0, 1)
        chosen_NA, weights_NA = self.router(x_ND)
        experts_E = torch.arange(self.router.config.num_experts, device=x_ND.device)
        # Stable, so that each expert's tokens keep their order.
        sorted_R, order_R = chosen_NA.flatten().sort(stable=True)
        ends_E = torch.searchsorted(sorted_R, experts_E, right=True)
        counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        inverse_R = torch.empty_like(order_R).scatter_(
            0, order_R, torch.arange(len(order_R), device=order_R.device)
        )
        tokens_RD = run_function(Unpermute, x_ND, order_R, inverse_R)
        tokens_RD = self.experts(tokens_RD, counts_E)
        tokens_RD = run_function(Permute, tokens_RD, inverse_R, order_R)
        # bmm accumulates in float32, and does not save A scaled rows per token for backward.
        outputs_NAD = tokens_RD.view(*chosen_NA.shape, x_ND.shape[1])
        out_ND = torch.bmm(weights_NA.to(x_ND.dtype).unsqueeze(1), outputs_NAD).squeeze(1)
        out_BTD = out_ND.view_as(x_BTD)
        return out_BTD if self.shared_experts is None else out_BTD + self.shared_experts(x_BTD)


class Permute(torch.autograd.Function):
    """``x[order]`` with a backward pass that is also a lookup.

    Autograd's own backward would sum rows in nondeterministic order.
    """

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        """Return ``x_RD[order_R]``; ``inverse_R`` is the inverse permutation."""
        ctx.save_for_backward(inverse_R)
        return x_RD[order_R]

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient in the order of the input."""
        (inverse_R,) = ctx.saved_tensors
        return grad_RD[inverse_R], None, None


class Unpermute(torch.autograd.Function):
    """Copy each token's row to its experts, sorted by expert.

    The backward pass sums gradients in the order of a token's selections.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        """Copy token ``order_R[r] // A`` to row r; ``inverse_R`` inverts ``order_R``."""
        ctx.save_for_backward(inverse_R)
        ctx.active = len(order_R) // max(1, len(x_ND))
        return x_ND[order_R // ctx.active]

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of each token, summed over its experts."""
        (inverse_R,) = ctx.saved_tensors
        grad_RD = grad_RD[inverse_R]
        return grad_RD.view(-1, ctx.active, grad_RD.shape[1]).sum(1), None, None


class Moe(Llama):
    """`Llama` with experts in its layers, after the first ``dense_layers``.

    Raises:
        ValueError: if `check` rejects the configuration.
    """

    config: MoeConfig
    check = staticmethod(check)  # type: ignore[assignment]

    def build_block(self, index: int) -> nn.Module:
        """Build layer ``index``."""
        is_dense = index < self.config.dense_layers
        return LlamaBlock(self.config, None if is_dense else MoE(self.config))


def moe_layers(model: nn.Module) -> list[MoE]:
    """Return the layers with experts, in order."""
    return [module for module in model.modules() if isinstance(module, MoE)]


# --------------------------------------------------------------------------- tables

# As `weft.models.llama.INIT`; expert_bias is a buffer.
INIT: dict[str, Init] = {
    **llama.INIT,
    "layers.*.mlp.router.weight": Init("truncated_normal", 0.02),
    "layers.*.mlp.*experts.gate_proj.weight": Init("truncated_normal", 0.02),
    "layers.*.mlp.*experts.up_proj.weight": Init("truncated_normal", 0.02),
    "layers.*.mlp.*experts.down_proj.weight": Init("truncated_normal", 0.02, residual=True),
    "layers.*.mlp.router.expert_bias": Init("zeros"),
}


def get_init(name: str, config: MoeConfig) -> Init:
    """Return the entry of `INIT` for a parameter or buffer, with the final ``std``."""
    return llama.lookup_init(INIT, name, config.num_layers)


# As `weft.models.llama.SHARDING`.  A feed-forward layer lies between one gather and one scatter:
# each rank routes all tokens identically, and holds a slice of each expert's width.
SHARDING: dict[str, TensorParallelSpec] = {
    **llama.SHARDING,
    "layers.*.mlp": TensorParallelSpec(input_comm="gather", output_comm="scatter"),
    "layers.*.mlp.router": TensorParallelSpec("partial_grad"),
    "layers.*.mlp.down_proj": TensorParallelSpec("row"),
    "layers.*.mlp.*experts.gate_proj": TensorParallelSpec("column"),
    "layers.*.mlp.*experts.up_proj": TensorParallelSpec("column"),
    "layers.*.mlp.*experts.down_proj": TensorParallelSpec("row"),
}

TP_DIVIDED_FIELDS = ("num_heads", "ffn_dim", "expert_dim", "vocab_size")


# --------------------------------------------------------------------------- arithmetic


class FfnParams(NamedTuple):
    """Numbers of matrix weights in a layer's feed-forward part."""

    dense: int  # a layer without experts
    router: int
    expert: int
    shared: int
    active: int  # weights of an MoE layer that one token uses


def count_ffn_params(config: MoeConfig) -> FfnParams:
    """Return the feed-forward weights of this configuration."""
    router = config.num_experts * config.dim
    expert = 3 * config.dim * config.expert_dim
    shared = config.shared_experts * expert
    active = router + config.active_experts * expert + shared
    return FfnParams(3 * config.dim * config.ffn_dim, router, expert, shared, active)


def unit_costs(config: MoeConfig, seq_len: int) -> list[UnitCost]:
    """Return the costs as `weft.models.llama.unit_costs` does.

    An MoE layer saves per token and active expert its input and output rows, four widths, indices
    and weights; and per token twice the row, the scores, and four widths of the shared experts.
    """
    ffn, active = count_ffn_params(config), config.active_experts
    experts = config.num_experts * ffn.expert
    saved_bytes = (
        active * (4 * config.dim + 8 * config.expert_dim + 32)
        + 4 * config.dim
        + 12 * config.num_experts
        + 8 * config.shared_experts * config.expert_dim
    )
    embedding, *layers, head = llama.unit_costs(config, seq_len)
    moe = [
        unit._replace(
            params=unit.params - ffn.dense + ffn.router + experts + ffn.shared,
            flops_per_token=unit.flops_per_token + 6.0 * (ffn.active - ffn.dense),
            activation_bytes_per_token=unit.activation_bytes_per_token
            - 8 * config.ffn_dim
            + saved_bytes,
            expert_params=experts,
        )
        for unit in layers[config.dense_layers :]
    ]
    return [embedding, *layers[: config.dense_layers], *moe, head]


def num_params(config: MoeConfig) -> int:
    """Return the number of parameters, a tied embedding counted once."""
    idle = config.num_experts - config.active_experts
    return (
        num_active_params(config) + config.num_moe_layers * idle * count_ffn_params(config).expert
    )


def num_active_params(config: MoeConfig) -> int:
    """Return the number of parameters that one token uses: all but its idle experts."""
    return llama.num_params(config) + _extra_active_params(config)


def _extra_active_params(config: MoeConfig) -> int:
    """Return the weights that a token uses, in excess of a model without experts."""
    ffn = count_ffn_params(config)
    return config.num_moe_layers * (ffn.active - ffn.dense)


def flops_per_token(config: MoeConfig, seq_len: int) -> float:
    """Return the training FLOPs of one token, with the active experts' weights only.

    The formula is otherwise `weft.models.llama.flops_per_token`.  DeepSeek-V3 (arXiv:2412.19437,
    section 2) and TorchTitan count a mixture of experts in this way.
    """
    return llama.flops_per_token(config, seq_len) + 6.0 * _extra_active_params(config)


FAMILY = replace(
    llama.FAMILY,
    config=MoeConfig,
    presets=PRESETS,
    build=Moe,
    check=check,
    get_init=get_init,
    num_params=num_params,
    flops_per_token=flops_per_token,
    sharding=SHARDING,
    tp_divided_fields=TP_DIVIDED_FIELDS,
    unit_costs=unit_costs,
    moe_layers=moe_layers,
    num_active_params=num_active_params,
    hf_mapping=None,
)
