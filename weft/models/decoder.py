"""Decoder: the module of every model family of weft, and its tables.

`weft.models.decoder_config.DecoderConfig` holds the choices.  A family is a set of values for them
(`weft.models.families`).

Shapes in names: B batch, T tokens of a sequence, D model width, R rotated part of a head, J = R / 2
pairs, V vocabulary, S maximum sequence length (max_seq_len).

The module is single-device code.  weft applies parallelism from outside; the tables below the
module (`INIT`, `NO_DECAY`, `SHARDING`) hold what that needs to know about the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.models.attention import (
    DEVICE_KERNELS,
    Attention,
    AttentionKernels,
    LatentAttention,
    Mask,
    attend,
    causal_mask,
    document_mask,
)
from weft.models.decoder_config import DecoderConfig
from weft.models.family import Init, TensorParallelSpec
from weft.models.layers import FeedForward, LayerNorm, RMSNorm, build_norm
from weft.models.moe import MoE
from weft.models.rotary import rope_tables
from weft.models.varlen_attention import PackedDocuments


class DecoderBlock(nn.Module):
    """Decoder layer: attention and feed-forward, with norms around them.

    Args:
        config: of the model.
        layer: index of the layer; those from ``num_layers`` on are layers of multi-token
            prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2).
        mlp: the feed-forward layer; None: a `FeedForward` or `MoE`.
    """

    def __init__(self, config: DecoderConfig, layer: int = 0, mlp: nn.Module | None = None) -> None:
        super().__init__()
        has_norm_before, has_norm_after = (
            config.norm_position in (position, "both") for position in ("pre", "post")
        )
        self.residual_scale, self.is_parallel = config.residual_scale, config.parallel_block
        self.kind, self.is_mtp = config.layer_kind(layer), layer >= config.num_layers
        if self.is_mtp:  # with the names of published files
            self.enorm, self.hnorm = (build_norm(config, config.dim) for _ in range(2))
            self.eh_proj = nn.Linear(2 * config.dim, config.dim, bias=False)
            self.shared_head = nn.ModuleDict({"norm": build_norm(config, config.dim)})
        if has_norm_before:
            self.input_layernorm = build_norm(config, config.dim)
        attention = LatentAttention if config.kv_rank else Attention
        self.self_attn: nn.Module = attention(config, layer)
        if has_norm_after:
            self.attention_output_norm = build_norm(config, config.dim)
        if has_norm_before and not self.is_parallel:
            self.post_attention_layernorm = build_norm(config, config.dim)
        if mlp is None:
            mlp = MoE(config) if config.has_experts(layer) else FeedForward(config)
        self.mlp = mlp
        if has_norm_after:
            self.mlp_output_norm = build_norm(config, config.dim)

    def forward(
        self,
        x_BTD: Tensor,
        cos_BTR: Tensor | None,
        sin_BTR: Tensor | None,
        mask_B1TT: Mask,
        query_scale_BT1: Tensor | None = None,
    ) -> Tensor:
        """Map ``[B, T, D]`` to ``[B, T, D]``; see `Attention.forward`.

        A layer of multi-token prediction takes embeddings of later tokens beside the normalized
        output of the layer before, ``[B, T, 2 D]``, and normalizes its output.
        """
        if self.is_mtp:
            embedded_BTD, before_BTD = x_BTD.chunk(2, dim=-1)
            x_BTD = self.eh_proj(torch.cat((self.enorm(embedded_BTD), self.hnorm(before_BTD)), -1))
        normed_BTD = self._apply_norm("input_layernorm", x_BTD)
        attended_BTD = self.self_attn(normed_BTD, cos_BTR, sin_BTR, mask_B1TT, query_scale_BT1)
        attended_BTD = self._apply_norm("attention_output_norm", attended_BTD)
        h_BTD = self._add(x_BTD, attended_BTD)
        if not self.is_parallel:
            normed_BTD = self._apply_norm("post_attention_layernorm", h_BTD)
        out_BTD = self._add(h_BTD, self._apply_norm("mlp_output_norm", self.mlp(normed_BTD)))
        return self.shared_head["norm"](out_BTD) if self.is_mtp else out_BTD

    def _apply_norm(self, name: str, x_BTD: Tensor) -> Tensor:
        """Apply a norm that the block may lack."""
        norm = self._modules.get(name)
        return x_BTD if norm is None else norm(x_BTD)

    def _add(self, x_BTD: Tensor, update_BTD: Tensor) -> Tensor:
        scale = self.residual_scale
        return x_BTD + (update_BTD if scale == 1 else update_BTD * scale)


class Decoder(nn.Module):
    """Decoder-only transformer.

    Can be built on any device, including meta.  Parameters hold PyTorch's default values until
    `INIT` or a checkpoint fills them.  The rotary tables are always valid (see `init_buffers`).
    The configuration must pass `weft.models.decoder_rules.check`.
    """

    # None on a pipeline stage that does not need them; see `prune_to_stage`.
    embed_tokens: nn.Embedding | None
    norm: RMSNorm | LayerNorm | None
    # See `build_mask`; context parallelism replaces it.
    mask: Callable[[Any, Tensor, int, int], Any]
    block: type[DecoderBlock] = DecoderBlock  # class of the layers; a user's model may override it
    fused_loss = False  # see `enable_fused_loss`
    add_noise: Callable[[Tensor], Tensor] | None = None  # see `set_embedding_noise`
    sequence_shards = 1  # context parallelism: ranks that share each sequence
    rope_cos_SJ: Tensor
    rope_sin_SJ: Tensor
    rope_local_cos_SJ: Tensor
    rope_local_sin_SJ: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.mask = build_mask
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        # A dict, so that layers keep their names on pipeline stages without earlier layers.
        self.layers = nn.ModuleDict(
            {str(i): self.block(config, i) for i in range(config.num_layers + config.mtp_layers)}
        )
        self.norm = build_norm(config, config.dim)
        self.head_input = nn.Identity()  # where tensor parallelism gathers the sequence
        # Tied embeddings have no module and no second name for the shared weight, so sharding
        # and checkpoints need no special case; see `head`.
        if config.score_head:
            self.score = nn.Linear(config.dim, 1, bias=False)
        elif not config.tied_embeddings:
            self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.init_buffers(self.embed_tokens.weight.device)

    def init_buffers(self, device: torch.device | str) -> None:
        """Compute the rotary tables on ``device``; local layers may have their own.

        They are float32 ``[max_seq_len, J]``, not saved, and stay float32 under any ``model.to``:
        beyond a few hundred tokens a bfloat16 angle is wrong by whole radians.
        `_apply` calls this method, so ``to_empty`` after building on meta also fills the tables.
        """
        for is_local in (False, True)[: 1 + (self.config.rope_local_theta > 0)]:
            prefix = "rope_local" if is_local else "rope"
            tables = rope_tables(self.config, is_local, device=device)
            for name, table_SJ in zip(("cos", "sin"), tables, strict=True):
                self.register_buffer(f"{prefix}_{name}_SJ", table_SJ, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        # Called by to, to_empty, bfloat16, cuda..., which cast floating buffers or leave them
        # uninitialized.  The tables are computed again on the new device.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.init_buffers(self.rope_cos_SJ.device)
        return self

    def rope(
        self,
        num_tokens: int,
        positions_BT: Tensor | None,
        dtype: torch.dtype,
        is_local: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the rotary angles, for the blocks.

        Args:
            num_tokens: T.
            positions_BT: integers, each token's position in its document; None: 0 to T - 1.
            dtype: dtype of the activations, to which the tables are rounded last, as in
                transformers.
            is_local: for the layers with a window or chunk.

        Returns:
            Two ``[B, T, R]``, or ``[1, T, R]`` without positions.

        Raises:
            ValueError: if the sequence is longer than ``max_seq_len``.
        """
        config, seq_len = self.config, num_tokens * self.sequence_shards
        if num_tokens > config.max_seq_len:
            raise ValueError(
                f"sequences have {num_tokens} tokens, which exceeds "
                f"model.max_seq_len={config.max_seq_len}"
            )
        if config.depends_on_length and seq_len > config.rope_original_context:
            tables = rope_tables(config, is_local, seq_len, self.rope_cos_SJ.device)
        elif is_local and config.rope_local_theta:
            tables = self.rope_local_cos_SJ, self.rope_local_sin_SJ
        else:
            tables = self.rope_cos_SJ, self.rope_sin_SJ

        def select(table_SJ: Tensor) -> Tensor:
            angles_BTJ = (
                table_SJ[:num_tokens].unsqueeze(0)
                if positions_BT is None
                else table_SJ[positions_BT]
            )
            if config.rope_interleaved:
                return angles_BTJ.repeat_interleave(2, dim=-1).to(dtype)
            return torch.cat((angles_BTJ, angles_BTJ), dim=-1).to(dtype)

        return select(tables[0]), select(tables[1])

    def query_scale(self, num_tokens: int, positions_BT: Tensor | None, device: Any) -> Tensor:
        """Return the factor of queries without positions, float32 ``[B or 1, T, 1]``."""
        config = self.config
        if positions_BT is None:
            positions_BT = torch.arange(num_tokens, device=device).unsqueeze(0)
        steps_BT = torch.floor((positions_BT.float() + 1) / config.temperature_interval)
        return (1 + config.temperature_scale * torch.log1p(steps_BT)).unsqueeze(-1)

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Map token ids to scaled embeddings ``[B, T, D]``."""
        assert self.embed_tokens is not None
        x_BTD: Tensor = self.embed_tokens(tokens_BT)
        scale = self.config.embedding_scale  # rounded to the dtype, as in transformers
        return x_BTD if scale == 1 else x_BTD * x_BTD.new_full((), scale)

    def head(self, normed_BTD: Tensor) -> Tensor:
        """Map normalized hidden states to logits ``[B, T, V]``.

        With ``score_head``, map to scores ``[B, T, 1]``; with ``fused_loss``, return the
        normalized hidden states ``[B, T, D]``.
        """
        config = self.config
        if config.score_head:  # which no factor of the logits changes, as in transformers
            scores_BT1: Tensor = self.score(normed_BTD)
            return scores_BT1
        normed_BTD = self.head_input(normed_BTD)
        # Of the input, so that a fused loss needs no other factor.
        normed_BTD = normed_BTD if config.logit_scale == 1 else normed_BTD * config.logit_scale
        if self.fused_loss:
            return normed_BTD
        if config.tied_embeddings:
            assert self.embed_tokens is not None
            # Reads the weight outside its module's forward: see `fsdp_units`.
            if (rows := getattr(self.embed_tokens, "lora_rows", None)) is None:
                logits_BTV = F.linear(normed_BTD, output_weight(self.embed_tokens))
            else:  # without a copy of the table
                logits_BTV = F.linear(normed_BTD, self.embed_tokens.weight)
                logits_BTV = rows.add_logits(logits_BTV, normed_BTD)
        else:
            logits_BTV = self.lm_head(normed_BTD)
        if config.logit_softcap:
            logits_BTV = config.logit_softcap * torch.tanh(logits_BTV / config.logit_softcap)
        return logits_BTV

    def forward(
        self,
        tokens_BT: Tensor,
        documents_BT: Tensor | PackedDocuments | None = None,
        positions_BT: Tensor | None = None,
        later_BTK: Tensor | None = None,
    ) -> Tensor:
        """Compute the logits of the next tokens.

        Args:
            tokens_BT: integer token ids; on a pipeline stage after the first, the activations
                ``[B, T, D]`` of the previous stage.
            documents_BT: integers, equal within a document, to which attention is confined, or
                `PackedDocuments`.  None: each sequence is one document, which uses the faster
                causal kernel.
            positions_BT: integers, each token's position in its document; None: counted from the
                start of the sequence.  Attention depends only on differences, so None is valid for
                packed sequences too, up to rounding.
            later_BTK: integer token ids 1 to K positions later; None: no multi-token prediction.

        Returns:
            ``[B, T, V]`` in the dtype of the weights, with ``later_BTK`` followed by the logits of
            the K layers of multi-token prediction: ``[(1 + K) B, T, V]``; with ``score_head``
            scores ``[B, T, 1]``; without the head, the activations ``[B, T, D]`` for the next
            stage.

        Raises:
            ValueError: if the sequence is longer than ``max_seq_len``.
        """
        config, norm = self.config, cast(Any, self.norm)
        # The activations of a pipeline stage may be a slice of the sequence.
        ids_BT = tokens_BT if positions_BT is None else positions_BT
        num_tokens = ids_BT.shape[1]
        x_BTD: Tensor = tokens_BT
        if self.embed_tokens is not None and not tokens_BT.is_floating_point():
            x_BTD = self.embed(tokens_BT)
            if self.training and self.add_noise is not None:
                x_BTD = self.add_noise(x_BTD)
        ropes: dict[bool, Any] = {}
        masks: dict[bool, Any] = {}
        outputs: list[Tensor] = []
        for name, block in self.layers.items():
            layer = int(name)
            if (depth := layer - config.num_layers) >= 0:
                if later_BTK is None:
                    break
                outputs.append(x_BTD if depth else norm(x_BTD))
                x_BTD = torch.cat((self.embed(later_BTK[..., depth]), outputs[-1]), dim=-1)
            is_local, has_rope = config.is_local(layer), config.has_rope(layer)
            if is_local not in masks:
                limits = (config.sliding_window, config.attention_chunk) if is_local else (0, 0)
                masks[is_local] = self.mask(documents_BT, ids_BT, *limits)
                ropes[is_local] = self.rope(num_tokens, positions_BT, x_BTD.dtype, is_local)
            rope = ropes[is_local] if has_rope else (None, None)
            if config.temperature_interval and not has_rope:
                scale_BT1 = self.query_scale(num_tokens, positions_BT, x_BTD.device)
                x_BTD = block(x_BTD, *rope, masks[is_local], scale_BT1)
            else:
                x_BTD = block(x_BTD, *rope, masks[is_local])
        if norm is None:
            return x_BTD
        return self.head(torch.cat((*outputs, x_BTD)) if outputs else norm(x_BTD))


def build_mask(
    documents_BT: Tensor | PackedDocuments | None,
    ids_BT: Tensor,
    window: int,
    chunk: int,
    kernels: AttentionKernels = DEVICE_KERNELS,
) -> Mask:
    """Return the mask of layers with a window or chunk; None: plain causal attention.

    ``ids_BT`` has the length of the sequence.
    """
    if isinstance(documents_BT, PackedDocuments):
        return documents_BT.select(chunk)
    if documents_BT is not None:
        return document_mask(documents_BT, window, chunk, kernels)
    if 0 < (window or chunk) < ids_BT.shape[1]:
        row_BT = ids_BT if ids_BT.dim() == 2 else ids_BT[:, :, 0]
        return causal_mask(row_BT, window, chunk, kernels)
    return None


def use_attention_kernels(model: nn.Module, kernels: AttentionKernels) -> None:
    """Let a model compute attention by other kernels, in place."""
    modules: list[Any] = list(model.modules())
    for module in modules:
        if getattr(module, "attend", None) is attend:
            module.attend = partial(attend, kernels=kernels)
        if getattr(module, "mask", None) is build_mask:
            module.mask = partial(build_mask, kernels=kernels)


# --------------------------------------------------------------------------- tables


# Patterns of parameter names (as in fnmatch); each parameter matches exactly one.
INIT: dict[str, Init] = {
    "*norm.weight": Init("ones"),
    "*.bias": Init("zeros"),
    "embed_tokens.weight": Init("truncated_normal", 0.02),
    "layers.*.self_attn.[qkv]*_proj*.weight": Init("truncated_normal", 0.02),
    "layers.*.eh_proj.weight": Init("truncated_normal", 0.02),
    "layers.*.self_attn.o_proj.weight": Init("truncated_normal", 0.02, residual=True),
    "layers.*.self_attn.sinks.weight": Init("zeros"),
    "layers.*.mlp.*gate_proj.weight": Init("truncated_normal", 0.02),
    "layers.*.mlp.*up_proj.weight": Init("truncated_normal", 0.02),
    "layers.*.mlp.*down_proj.weight": Init("truncated_normal", 0.02, residual=True),
    "layers.*.mlp.router.weight": Init("truncated_normal", 0.02),
    "layers.*.mlp.router.ex*": Init("zeros"),  # buffers
    "lm_head.weight": Init("truncated_normal", 0.02),
    "score.weight": Init("truncated_normal", 0.02),
}

# Parameters without weight decay: norm weights, biases, sinks, and embeddings, including tied ones.
NO_DECAY: tuple[str, ...] = ("*norm.weight", "*.bias", "*.sinks.weight", "embed_tokens.weight")


def get_init(name: str, config: DecoderConfig) -> Init:
    """Return the entry of `INIT` for a parameter or buffer, with the final ``std``.

    Raises:
        KeyError: if no pattern matches ``name``.
    """
    init = lookup_init(INIT, name, config.num_layers)
    # A gain is 1 plus its weight.
    return Init("zeros") if init.kind == "ones" and config.norm_offset else init


def lookup_init(table: Mapping[str, Init], name: str, num_layers: int) -> Init:
    """Return the entry of a table like `INIT` for a parameter, with the final ``std``."""
    for pattern, init in table.items():
        if fnmatchcase(name, pattern):
            depth = math.sqrt(2 * num_layers) if init.residual else 1.0
            return init._replace(std=init.std / depth)
    raise KeyError(f"no pattern of INIT matches the parameter {name!r}")


def has_weight_decay(name: str) -> bool:
    """Return True if weight decay applies to a parameter; see `NO_DECAY`."""
    return not any(fnmatchcase(name, pattern) for pattern in NO_DECAY)


def blocks(model: Decoder) -> list[nn.Module]:
    """Return the blocks in order: units of sharding, checkpointing and compilation."""
    return list(model.layers.values())


def fsdp_units(model: Decoder) -> list[list[nn.Module]]:
    """Return the modules that FSDP gathers together, in the order of their use.

    The norm begins the head, and `enable_fused_loss` reads the output weight after it.  A tied
    embedding is in no unit, because both ends of the forward pass read it.
    """
    units: list[list[nn.Module]] = [[block] for block in model.layers.values()]
    if model.config.tied_embeddings:
        return units
    if model.norm is not None:  # before the layers of multi-token prediction, which read its output
        index = sum(not block.is_mtp for (block,) in cast(Any, units))
        head = model.score if model.config.score_head else model.lm_head
        units.insert(index, [model.norm, head])
    if model.embed_tokens is not None:
        units.insert(0, [model.embed_tokens])
    return units


def enable_fused_loss(model: Decoder) -> Callable[[], Tensor]:
    """Make a model with a head return the last product's input ``[B, T, D]``.

    Returns:
        A function that returns that product's weight, ``[V, D]``, after a forward pass.
    """
    model.fused_loss = True
    embedding = model.embed_tokens if model.config.tied_embeddings else model.lm_head
    assert embedding is not None
    return lambda: output_weight(embedding)


def set_embedding_noise(model: Decoder, add_noise: Callable[[Tensor], Tensor]) -> None:
    """Let a model apply a function to the embeddings of its input, in training."""
    model.add_noise = add_noise


def output_weight(layer: nn.Module) -> Tensor:
    """Return the weight of the last product, with its adapter (`weft.parallel.lora`)."""
    merge: Callable[[], Tensor] | None = getattr(layer, "merged_weight", None)
    weight: Any = layer.weight if merge is None else merge()
    return cast(Tensor, weight)


# Patterns of module names (as in fnmatch).  Every module with a weight matches exactly one.
SHARDING: dict[str, TensorParallelSpec] = {
    "embed_tokens": TensorParallelSpec("vocabulary", output_comm="scatter"),
    "layers.*.self_attn": TensorParallelSpec(input_comm="gather"),
    "layers.*.self_attn.q_proj": TensorParallelSpec("column", heads="query"),
    "layers.*.self_attn.[kv]_proj": TensorParallelSpec("column", heads="key"),
    "layers.*.self_attn.q_norm": TensorParallelSpec("norm_of_heads", heads="query"),
    "layers.*.self_attn.k_norm": TensorParallelSpec("norm_of_heads", heads="key"),
    "layers.*.self_attn.sinks": TensorParallelSpec("column", heads="query"),
    "layers.*.self_attn.q_a_*": TensorParallelSpec("partial_grad"),
    "layers.*.self_attn.kv_a_*": TensorParallelSpec("partial_grad"),
    "layers.*.self_attn.*_b_proj": TensorParallelSpec("column", heads="query"),
    "layers.*.self_attn.o_proj": TensorParallelSpec("row", output_comm="scatter", heads="query"),
    "layers.*.mlp": TensorParallelSpec(input_comm="gather"),
    "layers.*.mlp.gate_proj": TensorParallelSpec("column"),
    "layers.*.mlp.up_proj": TensorParallelSpec("column"),
    "layers.*.mlp.down_proj": TensorParallelSpec("row", output_comm="scatter"),
    # Norms of the residual stream.
    "layers.*.input_layernorm": TensorParallelSpec("replicated"),
    "layers.*.post_attention_layernorm": TensorParallelSpec("replicated"),
    "layers.*_output_norm": TensorParallelSpec("replicated"),
    # Of multi-token prediction: enorm, hnorm, shared_head.norm, eh_proj.
    "layers.*[eh.]norm": TensorParallelSpec("replicated"),
    "layers.*.eh_proj": TensorParallelSpec("replicated"),
    "norm": TensorParallelSpec("replicated"),
    # Not lm_head, which a model with tied embeddings does not have.
    "head_input": TensorParallelSpec(output_comm="gather"),
    "lm_head": TensorParallelSpec("column"),
    # One output cannot be split: each rank computes the scores of its slice of the sequence.
    "score": TensorParallelSpec("replicated", output_comm="gather_values"),
}

# With experts, a feed-forward layer lies between one gather and one scatter: each rank routes all
# tokens identically, and holds a slice of each expert's width.
EXPERT_SHARDING: dict[str, TensorParallelSpec] = {
    **SHARDING,
    "layers.*.mlp": TensorParallelSpec(input_comm="gather", output_comm="scatter"),
    "layers.*.mlp.router": TensorParallelSpec("partial_grad"),
    "layers.*.mlp.down_proj": TensorParallelSpec("row"),
    "layers.*.mlp.*experts.gate_proj": TensorParallelSpec("column"),
    "layers.*.mlp.*experts.up_proj": TensorParallelSpec("column"),
    "layers.*.mlp.*experts.down_proj": TensorParallelSpec("row"),
}
# If experts are whole, each rank routes its own tokens: see `weft.parallel.experts_without_tp`.
SHARDING_WITHOUT_EXPERT_TP: dict[str, TensorParallelSpec] = {
    "layers.*.mlp.experts.*": TensorParallelSpec(),
    "layers.*.mlp.shared_experts": TensorParallelSpec(input_comm="gather", output_comm="scatter"),
}


def prune_to_stage(model: Decoder, units: range) -> None:
    """Delete all modules that a pipeline stage does not hold; names do not change.

    Args:
        model: a full model; changed in place.
        units: consecutive units: the embedding (0), blocks (1 to ``num_layers``), the head with
            its norm, the layers of multi-token prediction and an embedding that they or the head
            use (``num_layers + 1``).
    """
    config, last = model.config, model.config.num_layers + 1
    if 0 not in units and not (last in units and (config.tied_embeddings or config.mtp_layers)):
        model.embed_tokens = None
    for i in range(config.num_layers + config.mtp_layers):
        if min(i + 1, last) not in units:
            del model.layers[str(i)]
    if last not in units:
        model.norm = None
        if config.score_head:
            del model.score
        elif not config.tied_embeddings:
            del model.lm_head
