"""QK-clip: scale weights of queries and keys if attention logits are too large.

Attention logits can grow without a limit, with Muon above all, until the softmax is one-hot and the
loss diverges.  QK-clip (Kimi K2, arXiv:2507.20534, algorithm 1) limits them without changing the
model: after an optimizer step in which the largest logit ``S`` of a head exceeded the threshold
``tau``, the head's projections are scaled so that its logit would have been ``tau``.  With
``gamma = min(1, tau / S)``:

    queries and keys of a head              weight and bias times ``sqrt(gamma)``
    multi-head latent attention             the parts without positions times ``sqrt(gamma)``, the
                                            rotated queries times ``gamma``; all heads share the
                                            rotated key, which stays
    grouped queries                         all heads of a group use the ``gamma`` of the group's
                                            largest logit, as in Megatron-LM: they share a key, and
                                            no logit of the group stays above ``tau``

``S`` is the maximum over the global batch of the step: all microbatches, ranks, replica groups and
pairs of query and key that attention sees, after the scale.  A softcap ``c`` is not linear, so
``S`` is the logit before it, and the limit is ``c atanh(tau / c)``; logged are logits after it.
Sinks are no logits of tokens.  Heads below the threshold keep their bits.  Gradients and moments
are not scaled.

*Measuring.*  No kernel of attention returns the maximum together with its output on every device.
A pass without gradient computes the products again, in forward only: never when activations are
computed again, and never in an evaluation.  Its FLOPs are half of attention's in forward, a seventh
of those in forward and backward.  They do not count in the MFU.  On CUDA, FlexAttention returns the
largest score of each query and never has the scores in memory; the values that it also needs are
16 elements wide.  On a CPU, and for the blocks of *ring* and *allgather*
(`weft.parallel.block_attention`), at most `MAX_SCORES` are in memory.  Scale and softcap are
monotonic, so they are applied to the maximum.

*Reducing.*  Each rank has a table of all layers and heads, -inf where it computes none.  One
all-reduce per step takes the maximum over all ranks: then all of them scale their shards by the
same factors, wherever FSDP cuts a head.  Replica groups can only sum, so each writes into its own
slot, and then takes the maximum.

Shapes in names: B sequences, T tokens, Q queries, S keys, H query heads, G key heads, K head
dimension, L layers with attention of the full model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils.flop_counter import register_flop_formula

from weft.config.accelerators import supports
from weft.models import attention
from weft.models.attention import Attention, AttentionOptions, LatentAttention, Mask, causal_mask
from weft.parallel.block_attention import AttentionBlock
from weft.parallel.dtensor import shard_bounds, to_local
from weft.parallel.mesh import Mesh
from weft.parallel.private import is_in_backward
from weft.parallel.step_hook import StepHook
from weft.planning.plan import Plan
from weft.planning.shard_sizes import query_heads

# Scores in memory at once, in float32.
MAX_SCORES, MAX_CPU_SCORES = 1 << 25, 1 << 22
VALUE_DIM = 16  # of the values that FlexAttention averages in vain; the fewest of a GPU's matmul

# --------------------------------------------------------------------------- the largest products


def largest_products(
    q_BHQK: Tensor, k_BGSK: Tensor, mask_B1QS: Tensor | None, is_causal: bool, first: int | None
) -> Tensor:
    """Return the largest product of each query head with visible keys: ``[H]``.

    Args:
        q_BHQK: queries.
        k_BGSK: keys; query head h reads key head ``h // (H / G)``.
        mask_B1QS: bool, true where the query sees the key; None: no such limit.
        is_causal: query i sees the keys 0 to i only.
        first: query i does not see the keys before key ``i + first``; None: no such limit.
    """
    (num_heads, num_queries), (groups, num_keys) = q_BHQK.shape[1:3], k_BGSK.shape[1:3]
    dtype = torch.promote_types(q_BHQK.dtype, torch.float32)
    max_H = q_BHQK.new_full((num_heads,), -torch.inf, dtype=dtype)
    q_BGRQK, k_NSK = torch.unflatten(q_BHQK, 1, (groups, -1)), k_BGSK.flatten(0, 1)
    limit = MAX_CPU_SCORES if q_BHQK.device.type == "cpu" else MAX_SCORES
    rows = max(1, limit // (q_BHQK.shape[0] * num_heads * num_keys))
    for start in range(0, num_queries, rows):
        stop = min(start + rows, num_queries)
        begin = 0 if first is None else max(0, start + first)
        end = min(stop, num_keys) if is_causal else num_keys
        if begin >= end:
            continue
        q_NPK = q_BGRQK[:, :, :, start:stop].flatten(2, 3).flatten(0, 1)
        scores = multiply_exactly(q_NPK, k_NSK[:, begin:end])
        scores_BGRQS = scores.view(*q_BGRQK.shape[:3], stop - start, end - begin)
        if mask_B1QS is not None:
            hidden_B11QS = ~mask_B1QS[:, :, None, start:stop, begin:end]
            scores_BGRQS = scores_BGRQS.masked_fill(hidden_B11QS, -torch.inf)
        queries_Q1 = torch.arange(start, stop, device=scores.device).unsqueeze(1)
        keys_S = torch.arange(begin, end, device=scores.device)
        if is_causal:
            scores_BGRQS = scores_BGRQS.masked_fill(keys_S > queries_Q1, -torch.inf)
        if first is not None:
            scores_BGRQS = scores_BGRQS.masked_fill(keys_S < queries_Q1 + first, -torch.inf)
        max_H = max_H.maximum(scores_BGRQS.amax((0, 3, 4)).flatten())
    return max_H


def multiply_exactly(q_NPK: Tensor, k_NSK: Tensor) -> Tensor:
    """Return the products ``[N, P, S]`` in float32 or wider, as in attention."""
    is_short = q_NPK.dtype in (torch.float16, torch.bfloat16)
    if is_short and supports(q_NPK.device.type, "products in float32"):
        products: Tensor = torch.bmm(q_NPK, k_NSK.mT, out_dtype=torch.float32)
        return products
    dtype = torch.promote_types(q_NPK.dtype, torch.float32)
    return q_NPK.to(dtype) @ k_NSK.to(dtype).mT


@torch.library.custom_op("weft::max_attention_logits", mutates_args=("max_H",))
def max_attention_logits(
    q_BHQK: Tensor,
    k_BGSK: Tensor,
    max_H: Tensor,
    mask_B1QS: Tensor | None,
    is_causal: bool,
    first: int | None,
) -> None:
    """Raise ``max_H`` to `largest_products`, but not in a recomputation.

    An operator, because torch.compile traces a call of it without its condition and its loop.
    """
    if not is_in_backward():
        max_H.copy_(max_H.maximum(largest_products(q_BHQK, k_BGSK, mask_B1QS, is_causal, first)))


@max_attention_logits.register_fake
def _(*args: Any) -> None:
    """Return nothing: the operator writes into its argument."""


@register_flop_formula(torch.ops.weft.max_attention_logits)
def _(
    q_BHQK: Sequence[int],
    k_BGSK: Sequence[int],
    max_H: Sequence[int],
    mask_B1QS: Sequence[int] | None,
    is_causal: bool,
    first: int | None,
    **_: Any,
) -> int:
    """Return the FLOPs of the products; the planner halves those of a causal mask."""
    num_keys = k_BGSK[2]
    if is_causal and first is not None:
        num_keys = min(num_keys, 2 * (1 - first))
    return 2 * math.prod(q_BHQK) * num_keys


@torch.library.custom_op("weft::raise_in_forward", mutates_args=("max_H",))
def raise_in_forward(max_H: Tensor, value_H: Tensor) -> None:
    """Raise ``max_H`` to a value, but not when activations are computed again."""
    if not is_in_backward():
        max_H.copy_(max_H.maximum(value_H))


@raise_in_forward.register_fake
def _(*args: Any) -> None:
    """Return nothing: the operator writes into its argument."""


class LogitRecorder:
    """Record the largest product of each query head of a layer on this rank.

    Args:
        max_H: receives the maximum; float32 on the device.
    """

    def __init__(self, max_H: Tensor) -> None:
        self.max_H = max_H

    def __call__(
        self, q_BTHK: Tensor, k_BTGK: Tensor, mask: Mask, options: AttentionOptions
    ) -> None:
        """Record attention of all queries to all keys: `weft.models.attention.attend`."""
        if not torch.is_grad_enabled():  # an evaluation
            return
        if not torch.compiler.is_compiling() and is_in_backward():
            return
        q_BHTK, k_BGTK = (x.detach().transpose(1, 2) for x in (q_BTHK, k_BTGK))
        if supports(q_BTHK.device.type, "FlexAttention"):
            raise_in_forward(self.max_H, flex_products(q_BHTK, k_BGTK, mask))
        elif isinstance(mask, Tensor):
            max_attention_logits(q_BHTK, k_BGTK, self.max_H, mask, False, None)
        else:  # a BlockMask of a trace has no values
            limit = options.window or options.chunk
            first = 1 - limit if limit and mask is not None else None
            max_attention_logits(q_BHTK, k_BGTK, self.max_H, None, True, first)

    def record_block(self, q_BLHK: Tensor, kv_ESGK: Tensor, block: AttentionBlock) -> None:
        """Record a block, as `weft.parallel.block_attention` computes it."""
        if not is_in_backward():
            k_BSGK = kv_ESGK.chunk(2)[0][block.sequence, block.keys]
            q_BHQK = q_BLHK[block.sequence, block.queries].transpose(1, 2)
            k_BGSK = k_BSGK.transpose(1, 2)
            max_attention_logits(q_BHQK, k_BGSK, self.max_H, None, block.causal, block.first)


def flex_products(q_BHTK: Tensor, k_BGTK: Tensor, mask: Mask) -> Tensor:
    """Return `largest_products` by FlexAttention, float32 ``[H]``."""
    if mask is None:
        mask = causal_mask(q_BHTK[:, 0, :, 0])
    assert isinstance(mask, BlockMask)
    is_compiling = torch.compiler.is_compiling()
    flex: Any = flex_attention if is_compiling else attention._compiled_flex_attention()
    with torch.no_grad():
        _, aux = flex(
            q_BHTK,
            k_BGTK,
            k_BGTK[..., :VALUE_DIM],
            block_mask=mask,
            scale=1.0,
            enable_gqa=True,
            return_aux=AuxRequest(max_scores=True),
        )
    return aux.max_scores.amax((0, 2))  # type: ignore[no-any-return]


# --------------------------------------------------------------------------- the weights


class ScaledRows(NamedTuple):
    """This rank's rows of a weight or bias, and the factor of each.

    Attributes:
        local: the shard; changed in place.
        gammas: position of each row's gamma in the flat table of layers and key heads.
        exponent: power of that gamma.
    """

    local: Tensor
    gammas: Tensor
    exponent: Tensor


def scaled_params(
    module: Attention | LatentAttention, group: int
) -> list[tuple[Tensor, list[float], int]]:
    """Return the parameters of queries and keys.

    Args:
        module: attention of a layer.
        group: query heads per key head.

    Returns:
        For each of them the exponents of gamma for the rows of one head, and the heads per group.
    """
    if isinstance(module, LatentAttention):
        rope_dim, nope_dim = module.rope_dim, module.head_dim - module.rope_dim
        queries = module.q_b_proj if module.has_q_rank else module.q_proj
        keys_and_values = [0.5] * nope_dim + [0.0] * module.value_dim
        return [
            (queries.weight, [0.5] * nope_dim + [1.0] * rope_dim, group),
            (module.kv_b_proj.weight, keys_and_values, group),
        ]
    exponents = [0.5] * module.head_dim
    return [
        (param, exponents, heads)
        for linear, heads in ((module.q_proj, group), (module.k_proj, 1))
        for param in (linear.weight, linear.bias)
        if param is not None
    ]


def find_rows(
    param: Tensor, exponents: Sequence[float], heads: int, layer: int, num_groups: int
) -> ScaledRows:
    """Return this rank's rows of a parameter of `scaled_params`."""
    local = to_local(param).detach()
    (start, *_), (size, *_) = shard_bounds(param)
    rows = torch.arange(start, start + size)
    index = layer * num_groups + rows // (len(exponents) * heads)
    exponent = torch.tensor(exponents)[rows % len(exponents)]
    return ScaledRows(local, index.to(local.device), exponent.to(local.device))


class QKClip(StepHook):
    """The largest attention logits of a step, and the weights that they scale.

    Attributes:
        layers: names of all layers with attention, also on other pipeline stages.

    Args:
        threshold: of the logits; 0: no weights are scaled.
        by_layer: report the largest logit of each layer.
        plan: decides layout and model.
        model_parts: this rank's parts of the model, with allocated parameters.
        mesh: coordinates of this rank.
        device: device of the logits.
    """

    def __init__(
        self,
        threshold: float,
        by_layer: bool,
        plan: Plan,
        model_parts: Sequence[nn.Module],
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        config, kinds = plan.model, (Attention, LatentAttention)
        self._threshold, self._by_layer = threshold, by_layer
        self._num_groups = config.num_kv_heads
        self._group = config.num_heads // config.num_kv_heads
        self._scale = config.attention_scale or config.key_dim**-0.5
        self._softcap = config.attention_softcap
        self._limit = self._threshold  # before the softcap, which is above the threshold
        if self._softcap and self._threshold:
            share = self._threshold / self._softcap
            self._limit = self._softcap * math.atanh(share) if share < 1 else math.inf
        with torch.device("meta"):
            modules = plan.family.build(config).named_modules()
        self.layers = [name for name, module in modules if isinstance(module, kinds)]
        local: list[Any] = [
            (self.layers.index(name), module)
            for part in model_parts
            for name, module in part.named_modules()
            if isinstance(module, kinds)
        ]
        heads = query_heads(config.num_heads, plan.tp, mesh.coordinates["tp"])
        if plan.parallel.cp_method == "ulysses" and plan.cp > 1:
            share = len(heads) // plan.cp
            first = heads.start + share * mesh.coordinates["cp"]
            heads = range(first, first + share)
        self._heads = slice(heads.start, heads.stop)
        self._layers = [layer for layer, _ in local]
        self._local = torch.full((len(local), len(heads)), -torch.inf, device=device)
        for max_H, (_, module) in zip(self._local, local, strict=True):
            module.options = module.options._replace(record_logits=LogitRecorder(max_H))
        # The products of the last step: of this replica group in its slot R, else 0.
        shape = 1, len(self.layers), config.num_heads
        self._max_RLH = torch.full(shape, -torch.inf, device=device)
        self._rows: list[ScaledRows] = []
        if self._threshold:
            self._rows = [
                find_rows(param, exponents, group, layer, self._num_groups)
                for layer, module in local
                for param, exponents, group in scaled_params(module, self._group)
            ]

    @property
    def logits_LH(self) -> Tensor:
        """The largest logit of each head in the last step, before the softcap; float32.

        It is equal on all ranks.
        """
        logits_LH: Tensor = self._max_RLH.amax(0) * self._scale
        return logits_LH

    def begin_passes(self, num_sequences: Tensor) -> None:
        """Forget what was recorded of a step, which is computed again."""
        self._local.fill_(-torch.inf)

    @torch.no_grad()
    def reduce(self, replica: int = 0, num_replicas: int = 1) -> list[Tensor]:
        """Take the maxima of the step over all ranks."""
        max_LH = torch.full_like(self._max_RLH[0], -torch.inf)
        if self._layers:
            max_LH[self._layers, self._heads] = self._local
        if dist.get_world_size() > 1:
            dist.all_reduce(max_LH, dist.ReduceOp.MAX)
        self._max_RLH = max_LH.new_zeros(num_replicas, *max_LH.shape)
        self._max_RLH[replica] = max_LH
        return [self._max_RLH]

    @torch.no_grad()
    def update(self, skip: Tensor) -> None:
        """Scale the weights."""
        if not self._rows:
            return
        max_LG = torch.unflatten(self.logits_LH, 1, (-1, self._group)).amax(2)
        gamma_LG = torch.where(max_LG > self._limit, self._limit / max_LG, 1.0)
        gamma_LG = gamma_LG.masked_fill(skip, 1.0)
        for local, index, exponent in self._rows:
            factor = gamma_LG.flatten().to(local.device)[index] ** exponent
            local.mul_(factor.view(-1, *(1,) * (local.dim() - 1)))

    def measure(self) -> Tensor:
        """Return each layer's largest logit, after the softcap: float32 ``[L]``."""
        max_L = self.logits_LH.amax(1)
        return self._softcap * torch.tanh(max_L / self._softcap) if self._softcap else max_L

    def fields(self, values: Sequence[float]) -> dict[str, Any]:
        """Return the largest logit, and if asked for, that of each layer."""
        if not values:
            return {}
        name = "max_attention_logit"
        layers = {f"{name}/{layer}": x for layer, x in zip(self.layers, values, strict=True)}
        logits = {name: max(values)} | (layers if self._by_layer else {})
        return {"attention_logits": logits}
