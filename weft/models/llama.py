"""Llama: configuration, presets, module, and its `Family` tables.

Shapes in names: B batch, T tokens of a sequence, D model width, K head dimension, J = K / 2,
V vocabulary, S maximum sequence length (max_seq_len).

A parameter's Hugging Face name is ``model.`` plus its name here, except for ``lm_head.weight``,
with equal shape and layout.  With tied embeddings there is no ``lm_head.weight`` on either side.

The module is single-device code.  weft applies parallelism from outside; the tables below the
module (`INIT`, `NO_DECAY`, `SHARDING`) hold what that needs to know about the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from weft.config.errors import ConfigErrors
from weft.config.schema import Positive, Section, key
from weft.models.family import Family, HFMapping, Init, TensorParallelSpec, UnitCost
from weft.models.layers import (
    Attention,
    RMSNorm,
    RopeScaling,
    SwiGLU,
    document_mask,
    rope_frequencies,
)

# --------------------------------------------------------------------------- configuration

PositiveFloat = Annotated[float, Field(gt=0)]


class DecoderConfig(Section):
    """Fields of every family that uses this module's blocks."""

    num_layers: Positive = key(32, "transformer blocks")
    dim: Positive = key(4096, "width of the residual stream")
    num_heads: Positive = key(32, "query heads")
    num_kv_heads: Positive = key(8, "key and value heads, each shared by a group of query heads")
    ffn_dim: Positive = key(14336, "inner width of the feed-forward layer")
    vocab_size: Positive = key(128256, "token ids")
    max_seq_len: Positive = key(131072, "maximum sequence length, in tokens")
    rope_theta: PositiveFloat = key(500000.0, "base of the rotary wavelengths")
    norm_eps: PositiveFloat = key(1e-5, "added to the mean square in RMSNorm")
    tied_embeddings: bool = key(False, "share the embedding table with the output projection")

    if TYPE_CHECKING:  # a field in some families, a property in others

        @property
        def head_dim(self) -> int:
            """Width of one head, K."""

    @property
    def scaling(self) -> RopeScaling | None:
        """Return the scaling that `rope_frequencies` takes, or None."""
        return None

    @property
    def has_qk_norm(self) -> bool:
        """Return True if attention normalizes queries and keys (a key of some families)."""
        return getattr(self, "qk_norm", False)


class LlamaConfig(DecoderConfig):
    """Configuration of a Llama; defaults: Llama 3.1 8B (arXiv:2407.21783, table 3)."""

    num_heads: Positive = key(32, "query heads; the head dimension is dim / num_heads")
    rope_scaling: bool = key(True, "scale the rotary frequencies as Llama 3.1 does")
    rope_factor: Annotated[float, Field(ge=1)] = key(8.0, "scaling factor of the context length")
    rope_low_freq_factor: PositiveFloat = key(
        1.0, "rotations per original context below which a frequency is scaled fully"
    )
    rope_high_freq_factor: PositiveFloat = key(
        4.0, "rotations per original context above which a frequency is unchanged"
    )
    rope_original_context: Positive = key(8192, "context length before scaling, in tokens")

    @property
    def head_dim(self) -> int:
        """Size of an attention head, K."""
        return self.dim // self.num_heads

    @property
    def scaling(self) -> RopeScaling | None:
        """Scaling of the rotary frequencies; None if there is none."""
        if not self.rope_scaling:
            return None
        return RopeScaling(
            self.rope_factor,
            self.rope_low_freq_factor,
            self.rope_high_freq_factor,
            self.rope_original_context,
        )


def _small(**sizes: int) -> LlamaConfig:
    """Return a configuration with as many key-value heads as query heads."""
    return LlamaConfig(
        num_kv_heads=sizes["num_heads"],
        max_seq_len=2048,
        rope_theta=10000.0,
        rope_scaling=False,
        tied_embeddings=True,
        **sizes,
    )


# Sizes of the preset "toy" of each family, for two CPU cores.
TOY: dict[str, Any] = {"num_layers": 3, "dim": 192, "num_heads": 6, "num_kv_heads": 2}
TOY |= {"ffn_dim": 512, "vocab_size": 4096, "max_seq_len": 1024}

PRESETS: dict[str, LlamaConfig] = {
    "toy": LlamaConfig(**TOY, rope_theta=10000.0, rope_scaling=False, tied_embeddings=True),
    # For one GPU: two shapes of GPT-2 and GPT-3 (arXiv:2005.14165, table 2.1), with a gated
    # feed-forward of the same size, and a smaller one for stories.
    "30m": _small(num_layers=8, dim=512, num_heads=8, ffn_dim=1408, vocab_size=8192),
    "124m": _small(num_layers=12, dim=768, num_heads=12, ffn_dim=2048, vocab_size=50304),
    "350m": _small(num_layers=24, dim=1024, num_heads=16, ffn_dim=2688, vocab_size=50304),
    # Llama 3.2 (its config.json), and Llama 3.1.
    "1b": LlamaConfig(
        num_layers=16, dim=2048, ffn_dim=8192, rope_factor=32.0, tied_embeddings=True
    ),
    "3b": LlamaConfig(
        num_layers=28,
        dim=3072,
        num_heads=24,
        ffn_dim=8192,
        rope_factor=32.0,
        tied_embeddings=True,
    ),
    "8b": LlamaConfig(),
    "70b": LlamaConfig(num_layers=80, dim=8192, num_heads=64, ffn_dim=28672),
    "405b": LlamaConfig(num_layers=126, dim=16384, num_heads=128, ffn_dim=53248),
}


def check(config: DecoderConfig) -> ConfigErrors:
    """Return every reason why the model cannot be built; keys are ``model.<field>``."""
    errors = ConfigErrors(config, "model")
    dim, num_heads, num_kv_heads = config.dim, config.num_heads, config.num_kv_heads
    # Families without the field derive the head dimension from the number of heads.
    is_derived = "head_dim" not in type(config).model_fields
    if is_derived and (dim % num_heads or config.head_dim % 2):
        rule = (
            f"does not divide model.dim={dim}"
            if dim % num_heads
            else f"makes head_dim={config.head_dim} odd, and rotary positions rotate pairs"
        )
        even = [n for n in _divisors(dim) if dim // n % 2 == 0]
        valid = [n for n in even if n % num_kv_heads == 0] or even
        multiple = f"make model.dim a multiple of {2 * num_heads}"
        remedy = f"use {_format_nearest(valid, num_heads)}, or {multiple}" if valid else multiple
        errors.add("model.num_heads", rule, remedy, ("model.dim",))
    elif config.head_dim % 2:
        rule, remedy = "is odd, and rotary positions rotate pairs", f"use {config.head_dim + 1}"
        errors.add("model.head_dim", rule, remedy)
    if num_heads % num_kv_heads:
        rule = f"does not divide model.num_heads={num_heads}"
        remedy = f"use {_format_nearest(_divisors(num_heads), num_kv_heads)}"
        errors.add("model.num_kv_heads", rule, remedy, ("model.num_heads",))
    if isinstance(config, LlamaConfig):
        _check_rope(errors, config)
    return errors


def _check_rope(errors: ConfigErrors, config: LlamaConfig) -> None:
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    if config.rope_scaling and high <= low:
        rule = f"must be greater than model.rope_low_freq_factor={low:g}"
        remedy = f"use more than {low:g} (Llama 3.1: 4, above a low factor of 1)"
        depends = ("model.rope_low_freq_factor", "model.rope_scaling")
        errors.add("model.rope_high_freq_factor", rule, remedy, depends)


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _format_nearest(valid: list[int], value: int) -> str:
    """Format the up to eight valid values nearest to ``value``, as in '1, 2 or 4'."""
    nearest = sorted(sorted(valid, key=lambda n: abs(math.log(n / value)))[:8])
    *head, last = [str(n) for n in nearest]
    return f"{', '.join(head)} or {last}" if head else last


# --------------------------------------------------------------------------- module


class LlamaBlock(nn.Module):
    """Decoder layer: attention and feed-forward, each with pre-normalization.

    ``mlp`` is the feed-forward layer; by default a `SwiGLU`.
    """

    def __init__(self, config: DecoderConfig, mlp: nn.Module | None = None) -> None:
        super().__init__()
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        qk_norm_eps = config.norm_eps if config.has_qk_norm else None
        self.input_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config.dim, *heads, qk_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = SwiGLU(config.dim, config.ffn_dim) if mlp is None else mlp

    def forward(
        self, x_BTD: Tensor, cos_BTK: Tensor, sin_BTK: Tensor, mask_B1TT: Tensor | BlockMask | None
    ) -> Tensor:
        """Map ``[B, T, D]`` to ``[B, T, D]``; see `Llama.rope` and `document_mask`."""
        h_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos_BTK, sin_BTK, mask_B1TT)
        out_BTD: Tensor = h_BTD + self.mlp(self.post_attention_layernorm(h_BTD))
        return out_BTD


class Llama(nn.Module):
    """Decoder-only transformer as in Llama 2 and 3.

    Source: arXiv:2307.09288, arXiv:2407.21783.  Can be built on any device, including meta.
    Parameters hold PyTorch's default values until `INIT` or a checkpoint fills them.  The rotary
    tables are always valid (see `init_buffers`).

    Raises:
        ValueError: if `check` rejects the configuration.
    """

    # None on a pipeline stage without the first or last unit; see `prune_to_stage`.
    embed_tokens: nn.Embedding | None
    norm: RMSNorm | None
    # Maps `documents_BT` to the mask that the blocks pass to ``attend``.
    mask: Callable[[Tensor], Tensor | BlockMask]
    rope_cos_SJ: Tensor
    rope_sin_SJ: Tensor
    fused_loss = False  # see `enable_fused_loss`
    check = staticmethod(check)
    block: type[LlamaBlock] = LlamaBlock  # class of the layers; other families override it

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        if errors := self.check(config):
            raise ValueError("\n".join(str(error) for error in errors))
        self.config = config
        self.mask = document_mask
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        # A dict, so that layers keep their names on pipeline stages without earlier layers.
        self.layers = nn.ModuleDict({str(i): self.build_block(i) for i in range(config.num_layers)})
        self.norm = RMSNorm(config.dim, config.norm_eps)
        # Tied embeddings have no module and no second name for the shared weight, so sharding
        # and checkpoints need no special case; see `head`.
        if not config.tied_embeddings:
            self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.init_buffers(self.norm.weight.device)

    def build_block(self, index: int) -> nn.Module:
        """Build layer ``index``; families with different kinds of layers override this."""
        return self.block(self.config)

    def init_buffers(self, device: torch.device | str) -> None:
        """Compute the rotary tables on ``device``.

        They are float32 ``[max_seq_len, head_dim / 2]``, not saved, and stay float32 under any
        ``model.to``: beyond a few hundred tokens a bfloat16 angle is wrong by whole radians.
        `_apply` calls this method, so ``to_empty`` after building on meta also fills the tables.
        """
        config = self.config
        frequencies_J = rope_frequencies(config.head_dim, config.rope_theta, config.scaling, device)
        positions_S = torch.arange(config.max_seq_len, dtype=torch.float32, device=device)
        angles_SJ = torch.outer(positions_S, frequencies_J)
        self.register_buffer("rope_cos_SJ", angles_SJ.cos(), persistent=False)
        self.register_buffer("rope_sin_SJ", angles_SJ.sin(), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Llama:
        # Called by to, to_empty, bfloat16, cuda..., which cast floating buffers or leave them
        # uninitialized.  The tables are computed again on the new device.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.init_buffers(self.rope_cos_SJ.device)
        return self

    def rope(
        self, num_tokens: int, positions_BT: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the rotary angles, for every block.

        Args:
            num_tokens: T.
            positions_BT: integers, each token's position in its document; None: 0 to T - 1.
            dtype: dtype of the activations, to which the tables are rounded last, as in
                transformers.

        Returns:
            Two ``[B, T, K]``, or ``[1, T, K]`` without positions.

        Raises:
            ValueError: if the sequence is longer than ``max_seq_len``.
        """
        if num_tokens > self.config.max_seq_len:
            raise ValueError(
                f"sequences have {num_tokens} tokens, which exceeds "
                f"model.max_seq_len={self.config.max_seq_len}"
            )

        def select(table_SJ: Tensor) -> Tensor:
            angles_BTJ = (
                table_SJ[:num_tokens].unsqueeze(0)
                if positions_BT is None
                else table_SJ[positions_BT]
            )
            return torch.cat((angles_BTJ, angles_BTJ), dim=-1).to(dtype)

        return select(self.rope_cos_SJ), select(self.rope_sin_SJ)

    def head(self, x_BTD: Tensor) -> Tensor:
        """Map the last block's output to logits ``[B, T, V]``.

        With ``fused_loss``, return the normalized hidden states ``[B, T, D]`` instead.
        """
        assert self.norm is not None
        normed_BTD: Tensor = self.norm(x_BTD)
        if self.fused_loss:
            return normed_BTD
        if self.config.tied_embeddings:
            assert self.embed_tokens is not None
            # Reads the weight outside its module's forward.  Under fully_shard the embedding must
            # therefore be in the root's group.
            return F.linear(normed_BTD, self.embed_tokens.weight)
        logits_BTV: Tensor = self.lm_head(normed_BTD)
        return logits_BTV

    def forward(
        self,
        tokens_BT: Tensor,
        documents_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
    ) -> Tensor:
        """Compute the logits of the next tokens.

        Args:
            tokens_BT: integer token ids; on a pipeline stage without the embedding, the activations
                ``[B, T, D]`` of the previous stage.
            documents_BT: integers, equal within a document, to which attention is confined.
                None: each sequence is one document, which uses the faster causal kernel.
            positions_BT: integers, each token's position in its document; None: counted from the
                start of the sequence.  Attention depends only on differences, so None is valid for
                packed sequences too, up to rounding.

        Returns:
            ``[B, T, V]`` in the dtype of the weights; without the head, the activations
            ``[B, T, D]`` for the next stage.

        Raises:
            ValueError: if the sequence is longer than ``max_seq_len``.
        """
        x_BTD: Tensor = self.embed_tokens(tokens_BT) if self.embed_tokens else tokens_BT
        cos_BTK, sin_BTK = self.rope(tokens_BT.shape[1], positions_BT, x_BTD.dtype)
        mask_B1TT = None if documents_BT is None else self.mask(documents_BT)
        for block in self.layers.values():
            x_BTD = block(x_BTD, cos_BTK, sin_BTK, mask_B1TT)
        return self.head(x_BTD) if self.norm else x_BTD


# --------------------------------------------------------------------------- tables


# Patterns of parameter names (as in fnmatch); each parameter matches exactly one.
INIT: dict[str, Init] = {
    "*norm.weight": Init("ones"),
    "embed_tokens.weight": Init("truncated_normal", 0.02),
    "layers.*.self_attn.[qkv]_proj.weight": Init("truncated_normal", 0.02),
    "layers.*.self_attn.o_proj.weight": Init("truncated_normal", 0.02, residual=True),
    "layers.*.mlp.gate_proj.weight": Init("truncated_normal", 0.02),
    "layers.*.mlp.up_proj.weight": Init("truncated_normal", 0.02),
    "layers.*.mlp.down_proj.weight": Init("truncated_normal", 0.02, residual=True),
    "lm_head.weight": Init("truncated_normal", 0.02),
}

# Parameters without weight decay: gains and embeddings, including tied embeddings.
NO_DECAY: tuple[str, ...] = ("*norm.weight", "embed_tokens.weight")


def get_init(name: str, config: DecoderConfig) -> Init:
    """Return the entry of `INIT` for a parameter, with the final ``std``.

    Raises:
        KeyError: if no pattern matches ``name``.
    """
    return lookup_init(INIT, name, config.num_layers)


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


def blocks(model: Llama) -> list[nn.Module]:
    """Return the blocks in order: units of sharding, checkpointing and compilation."""
    return list(model.layers.values())


def enable_fused_loss(model: Llama) -> Callable[[], Tensor]:
    """Make a model with a head return the last product's input ``[B, T, D]``.

    Returns:
        A function that returns that product's weight, ``[V, D]``, after a forward pass.
    """
    model.fused_loss = True
    embedding = model.embed_tokens if model.config.tied_embeddings else model.lm_head
    assert embedding is not None
    return lambda: embedding.weight


# Patterns of module names (as in fnmatch).  Every module with a weight matches exactly one.
SHARDING: dict[str, TensorParallelSpec] = {
    "embed_tokens": TensorParallelSpec("vocabulary", output_comm="scatter"),
    "layers.*.input_layernorm": TensorParallelSpec("replicated"),
    "layers.*.self_attn": TensorParallelSpec(input_comm="gather"),
    "layers.*.self_attn.q_proj": TensorParallelSpec("column"),
    "layers.*.self_attn.[kv]_proj": TensorParallelSpec("heads"),
    "layers.*.self_attn.[qk]_norm": TensorParallelSpec("partial_grad"),
    "layers.*.self_attn.o_proj": TensorParallelSpec("row", output_comm="scatter"),
    "layers.*.post_attention_layernorm": TensorParallelSpec("replicated"),
    "layers.*.mlp": TensorParallelSpec(input_comm="gather"),
    "layers.*.mlp.gate_proj": TensorParallelSpec("column"),
    "layers.*.mlp.up_proj": TensorParallelSpec("column"),
    "layers.*.mlp.down_proj": TensorParallelSpec("row", output_comm="scatter"),
    # Gathered here, not before lm_head, which a model with tied embeddings does not have.
    "norm": TensorParallelSpec("replicated", output_comm="gather"),
    "lm_head": TensorParallelSpec("column"),
}

# Configuration fields that the number of tensor-parallel ranks must divide.
TP_DIVIDED_FIELDS = ("num_heads", "ffn_dim", "vocab_size")


def prune_to_stage(model: Llama, units: range) -> None:
    """Delete all modules that a pipeline stage does not hold; names do not change.

    Args:
        model: a full model; changed in place.
        units: consecutive units: the embedding (0), blocks (1 to ``num_layers``), the head with
            its norm (``num_layers + 1``).

    Raises:
        ValueError: if the range separates tied embeddings.
    """
    last = model.config.num_layers + 1
    if model.config.tied_embeddings and (0 in units) != (last in units):
        raise ValueError("tied embeddings need the embedding and the head on one stage")
    if 0 not in units:
        model.embed_tokens = None
    for i in range(model.config.num_layers):
        if i + 1 not in units:
            del model.layers[str(i)]
    if last not in units:
        model.norm = None
        if not model.config.tied_embeddings:
            del model.lm_head


HF_MAPPING = HFMapping("Llama", architecture="LlamaForCausalLM", model_type="llama")


# --------------------------------------------------------------------------- arithmetic


def unit_costs(config: DecoderConfig, seq_len: int) -> list[UnitCost]:
    """Return the costs of the embedding, the blocks, and the head with its norm.

    A tied embedding's parameters count in the embedding, its product in the head.  Activations are
    those that autograd saves in this code.  Norm: its input in float32 and twice the normalized
    value.
    Attention: q, k, v and twice its output; normalized queries and keys as other norms.  SwiGLU:
    four widths.  Head: logits in bfloat16 and
        twice
    in float32.
    """
    dim, heads = config.dim, config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    matrices = _block_matmul_params(config)
    saved_bytes = 16 * dim + 6 * heads + 4 * kv_heads + 8 * config.ffn_dim
    block = UnitCost(
        "layers",
        params=matrices + 2 * dim + 2 * config.head_dim * config.has_qk_norm,
        flops_per_token=6.0 * matrices + 12 * heads * seq_len,
        activation_bytes_per_token=saved_bytes + 8 * (heads + kv_heads) * config.has_qk_norm,
    )
    table = config.vocab_size * dim
    embedding = UnitCost("embed_tokens", table, 0.0, 2 * dim)
    head = UnitCost(
        "head",
        params=dim + (0 if config.tied_embeddings else table),
        flops_per_token=6.0 * table,
        activation_bytes_per_token=8 * dim + 10 * config.vocab_size,
    )
    layers = [block._replace(name=f"layers.{i}") for i in range(config.num_layers)]
    return [embedding, *layers, head]


def num_matmul_params(config: DecoderConfig) -> int:
    """Return the number of weights in matrix products.

    That is all but norms and the embedding.  A tied embedding counts, because it is also the output
    projection.
    """
    return config.num_layers * _block_matmul_params(config) + config.vocab_size * config.dim


def _block_matmul_params(config: DecoderConfig) -> int:
    query_and_out = 2 * config.dim * config.num_heads * config.head_dim
    key_and_value = 2 * config.dim * config.num_kv_heads * config.head_dim
    return query_and_out + key_and_value + 3 * config.dim * config.ffn_dim


def num_params(config: DecoderConfig) -> int:
    """Return the number of parameters, a tied embedding counted once."""
    norms = (2 * config.num_layers + 1) * config.dim
    if config.has_qk_norm:
        norms += 2 * config.num_layers * config.head_dim
    embedding = 0 if config.tied_embeddings else config.vocab_size * config.dim
    return num_matmul_params(config) + norms + embedding


def flops_per_token(config: DecoderConfig, seq_len: int) -> float:
    """Return the training FLOPs of one token, without recomputation.

    The formula is ``6 * num_matmul_params + 12 * num_layers * num_heads * head_dim * seq_len``: a
    multiply and an add per weight, once forward and twice backward, and the same for the two
    products of attention.  This is the convention of PaLM (arXiv:2204.02311, appendix B) and
    TorchTitan, in which MFU is published: attention counts the full square, of which a causal mask
    needs half.
    """
    attention = 12 * config.num_layers * config.num_heads * config.head_dim * seq_len
    return float(6 * num_matmul_params(config) + attention)


FAMILY = Family(
    config=LlamaConfig,
    presets=PRESETS,
    build=Llama,
    check=check,
    blocks=blocks,
    get_init=get_init,
    has_weight_decay=has_weight_decay,
    num_params=num_params,
    flops_per_token=flops_per_token,
    sharding=SHARDING,
    tp_divided_fields=TP_DIVIDED_FIELDS,
    unit_costs=unit_costs,
    prune_to_stage=prune_to_stage,
    enable_fused_loss=enable_fused_loss,
    hf_mapping=HF_MAPPING,
)
