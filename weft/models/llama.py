"""Llama: configuration, presets, module, and the tables that others read about it.

Shapes in names: B batch, T tokens of a row, D model width, K width of one head, J = K / 2,
V vocabulary, S longest row (max_seq_len).

Parameter names are Hugging Face's: put ``model.`` before every name except
``lm_head.weight`` and it is the name in a Hugging Face checkpoint, with equal shape and
layout.  With tied embeddings there is no ``lm_head.weight`` on either side.

The module is single-device code.  Parallelism is applied from outside; what that needs to
know of the model is in the tables below it (`INIT`, `NO_DECAY`, `blocks`), beside the
weights that they talk about.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from weft.config.errors import ConfigError
from weft.config.schema import Positive, Section, key
from weft.models.family import Family, HFMapping, Init, TensorParallelSpec, Unit
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
    """What every family of this module's blocks is told, whatever the width of a head."""

    num_layers: Positive = key(32, "transformer blocks")
    dim: Positive = key(4096, "width of the residual stream")
    num_heads: Positive = key(32, "query heads")
    num_kv_heads: Positive = key(8, "key and value heads, each shared by a group of query heads")
    ffn_dim: Positive = key(14336, "inner width of the feed-forward layer")
    vocab_size: Positive = key(128256, "token ids")
    max_seq_len: Positive = key(131072, "longest row, in tokens")
    rope_theta: PositiveFloat = key(500000.0, "base of the rotary wavelengths")
    norm_eps: PositiveFloat = key(1e-5, "added to the mean square in RMSNorm")
    tied_embeddings: bool = key(False, "the output projection is the embedding table")

    if TYPE_CHECKING:  # a field, or a property

        @property
        def head_dim(self) -> int:
            """Width of one head, K."""

    @property
    def scaling(self) -> RopeScaling | None:
        """The stretching that `rope_frequencies` takes."""
        return None


class LlamaConfig(DecoderConfig):
    """Shape of a Llama; the defaults are those of Llama 3.1 8B (arXiv:2407.21783, table 3)."""

    num_heads: Positive = key(32, "query heads; dim / num_heads is the width of one")
    rope_scaling: bool = key(True, "stretch the rotary frequencies as Llama 3.1 does")
    rope_factor: Annotated[float, Field(ge=1)] = key(8.0, "how far they are stretched")
    rope_low_freq_factor: PositiveFloat = key(
        1.0, "turns within the original context below which a frequency is stretched fully"
    )
    rope_high_freq_factor: PositiveFloat = key(
        4.0, "turns within the original context above which it is left alone"
    )
    rope_original_context: Positive = key(8192, "context before stretching, in tokens")

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def scaling(self) -> RopeScaling | None:
        if not self.rope_scaling:
            return None
        return RopeScaling(
            self.rope_factor,
            self.rope_low_freq_factor,
            self.rope_high_freq_factor,
            self.rope_original_context,
        )


PRESETS: dict[str, LlamaConfig] = {
    # For two CPU cores.
    "toy": LlamaConfig(
        num_layers=3,
        dim=192,
        num_heads=6,
        num_kv_heads=2,
        ffn_dim=512,
        vocab_size=4096,
        max_seq_len=1024,
        rope_theta=10000.0,
        rope_scaling=False,
        tied_embeddings=True,
    ),
    # Llama 3.1.
    "8b": LlamaConfig(),
    "70b": LlamaConfig(num_layers=80, dim=8192, num_heads=64, ffn_dim=28672),
    "405b": LlamaConfig(num_layers=126, dim=16384, num_heads=128, ffn_dim=53248),
}


def check(config: DecoderConfig) -> list[ConfigError]:
    """Every reason why a model of this shape cannot be built; keys are ``model.<field>``."""
    problems = []
    dim, num_heads, num_kv_heads = config.dim, config.num_heads, config.num_kv_heads
    # A width that is not chosen by itself follows from the number of heads.
    derived = "head_dim" not in type(config).model_fields
    if derived and (dim % num_heads or config.head_dim % 2):
        rule = (
            f"does not divide model.dim = {dim}"
            if dim % num_heads
            else f"makes heads of odd width {config.head_dim}, and rotary positions rotate pairs"
        )
        even = [n for n in _divisors(dim) if dim // n % 2 == 0]
        valid = [n for n in even if n % num_kv_heads == 0] or even
        multiple = f"make model.dim a multiple of {2 * num_heads}"
        remedy = f"use {_some_of(valid, num_heads)}, or {multiple}" if valid else multiple
        problems.append(ConfigError("model.num_heads", num_heads, rule, remedy, ("model.dim",)))
    elif config.head_dim % 2:
        rule, remedy = "is odd, and rotary positions rotate pairs", f"use {config.head_dim + 1}"
        problems.append(ConfigError("model.head_dim", config.head_dim, rule, remedy))
    if num_heads % num_kv_heads:
        rule = f"does not divide model.num_heads = {num_heads}"
        remedy = f"use {_some_of(_divisors(num_heads), num_kv_heads)}"
        problems.append(
            ConfigError("model.num_kv_heads", num_kv_heads, rule, remedy, ("model.num_heads",))
        )
    return problems + (_check_rope(config) if isinstance(config, LlamaConfig) else [])


def _check_rope(config: LlamaConfig) -> list[ConfigError]:
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    if not config.rope_scaling or high > low:
        return []
    rule = f"must be greater than model.rope_low_freq_factor = {low:g}"
    remedy = f"use more than {low:g} (Llama 3.1: 4, above a low factor of 1)"
    depends = ("model.rope_low_freq_factor", "model.rope_scaling")
    return [ConfigError("model.rope_high_freq_factor", high, rule, remedy, depends)]


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _some_of(valid: list[int], value: int) -> str:
    """'1, 2 or 4': the valid values, only the eight nearest to ``value`` if there are more."""
    nearest = sorted(sorted(valid, key=lambda n: abs(math.log(n / value)))[:8])
    *rest, last = [str(n) for n in nearest]
    return f"{', '.join(rest)} or {last}" if rest else last


# --------------------------------------------------------------------------- module


class Block(nn.Module):
    """One decoder layer: attention and feed-forward, each behind a norm."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(
            config.dim, config.num_heads, config.num_kv_heads, config.head_dim
        )
        self.post_attention_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = SwiGLU(config.dim, config.ffn_dim)

    def forward(
        self, x_BTD: Tensor, cos_BTK: Tensor, sin_BTK: Tensor, mask_B1TT: Tensor | BlockMask | None
    ) -> Tensor:
        """``[B, T, D]`` to ``[B, T, D]``; the others come from `Llama.rope` and the mask."""
        h_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos_BTK, sin_BTK, mask_B1TT)
        out_BTD: Tensor = h_BTD + self.mlp(self.post_attention_layernorm(h_BTD))
        return out_BTD


class Llama(nn.Module):
    """A decoder-only transformer as in Llama 2 and 3 (arXiv:2307.09288, arXiv:2407.21783).

    Built anywhere, the meta device included.  Parameters hold PyTorch's default values until
    someone fills them by `INIT` or from a checkpoint; the rotary tables are always right
    (see `init_buffers`).

    Raises:
        ValueError: if `check` finds the configuration impossible.
    """

    # A pipeline stage without the first or last unit has None there; see `keep`.
    embed_tokens: nn.Embedding | None
    norm: RMSNorm | None
    # From `documents_BT` to what the blocks hand to their ``attend``.
    mask: Callable[[Tensor], Tensor | BlockMask]
    rope_cos_SJ: Tensor
    rope_sin_SJ: Tensor
    headless = False  # see `without_head`
    check = staticmethod(check)
    block: type[Block] = Block  # what the layers are, in families that differ in it

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        if problems := self.check(config):
            raise ValueError("\n".join(str(problem) for problem in problems))
        self.config = config
        self.mask = document_mask
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        # A dict, so that a layer keeps its name where a pipeline stage drops those before it.
        self.layers = nn.ModuleDict({str(i): self.new_block(i) for i in range(config.num_layers)})
        self.norm = RMSNorm(config.dim, config.norm_eps)
        # Tied: no module and no second name for the shared weight, which sharding and
        # checkpoints would have to keep apart from a parameter of its own; see `head`.
        if not config.tied_embeddings:
            self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.init_buffers(self.norm.weight.device)

    def new_block(self, index: int) -> nn.Module:
        """Layer number ``index``, for families whose layers are not all alike."""
        return self.block(self.config)

    def init_buffers(self, device: torch.device | str) -> None:
        """Compute the rotary tables, float32 ``[max_seq_len, head_dim / 2]``, on ``device``.

        They are not saved, and stay float32 under any ``model.to``: from a position of a few
        hundred on, a bfloat16 angle would be wrong by whole radians.  `_apply` calls this, so
        ``to_empty`` after building on meta leaves nothing to do.
        """
        config = self.config
        frequencies_J = rope_frequencies(config.head_dim, config.rope_theta, config.scaling, device)
        positions_S = torch.arange(config.max_seq_len, dtype=torch.float32, device=device)
        angles_SJ = torch.outer(positions_S, frequencies_J)
        self.register_buffer("rope_cos_SJ", angles_SJ.cos(), persistent=False)
        self.register_buffer("rope_sin_SJ", angles_SJ.sin(), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Llama:
        # Behind to, to_empty, bfloat16, cuda...: these cast floating buffers, or leave them
        # uninitialised.  The tables follow to the device and are computed anew.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.init_buffers(self.rope_cos_SJ.device)
        return self

    def rope(
        self, num_tokens: int, positions_BT: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary angles of a row, for every block.

        Args:
            num_tokens: T.
            positions_BT: integers, each token's place in its document; None: 0 to T - 1.
            dtype: of the activations; the tables are rounded to it last, like transformers'.

        Returns:
            Two ``[B, T, K]``, or ``[1, T, K]`` without positions.

        Raises:
            ValueError: if the row is longer than ``max_seq_len``.
        """
        if num_tokens > self.config.max_seq_len:
            raise ValueError(
                f"rows of {num_tokens} tokens, but model.max_seq_len = {self.config.max_seq_len}"
            )

        def pick(table_SJ: Tensor) -> Tensor:
            rows_BTJ = (
                table_SJ[:num_tokens].unsqueeze(0)
                if positions_BT is None
                else table_SJ[positions_BT]
            )
            return torch.cat((rows_BTJ, rows_BTJ), dim=-1).to(dtype)

        return pick(self.rope_cos_SJ), pick(self.rope_sin_SJ)

    def head(self, x_BTD: Tensor) -> Tensor:
        """Logits ``[B, T, V]`` of the last block's output."""
        assert self.norm is not None
        normed_BTD: Tensor = self.norm(x_BTD)
        if self.headless:
            return normed_BTD
        if self.config.tied_embeddings:
            assert self.embed_tokens is not None
            # Reads the weight outside its module's forward, which under fully_shard needs the
            # embedding in the root's group, not in one of its own.
            return F.linear(normed_BTD, self.embed_tokens.weight)
        logits_BTV: Tensor = self.lm_head(normed_BTD)
        return logits_BTV

    def forward(
        self,
        tokens_BT: Tensor,
        documents_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
    ) -> Tensor:
        """Logits of the next token.

        Args:
            tokens_BT: integer token ids; without an embedding, the activations ``[B, T, D]`` of
                the unit before.
            documents_BT: integers, equal within a document: attention stays inside it.
                None: each row is one document, which takes the faster causal kernel.
            positions_BT: integers, each token's place in its document; None: counted from the
                row's start.  Attention depends on differences only, so that is right for
                packed rows too; restarting at each document gives its rounding as well.

        Returns:
            ``[B, T, V]`` in the dtype of the weights; without a head, the activations
            ``[B, T, D]`` for the unit after.

        Raises:
            ValueError: if the row is longer than ``max_seq_len``.
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

# Parameters that the optimizer must not decay: gains and embeddings.  A tied embedding counts
# as an embedding.
NO_DECAY: tuple[str, ...] = ("*norm.weight", "embed_tokens.weight")


def init_of(name: str, config: DecoderConfig) -> Init:
    """The entry of `INIT` for a parameter, with the final ``std``.

    Raises:
        KeyError: if no pattern matches ``name``.
    """
    return init_from(INIT, name, config.num_layers)


def init_from(table: Mapping[str, Init], name: str, num_layers: int) -> Init:
    """The entry of a table as `INIT` for a parameter, with the final ``std``."""
    for pattern, init in table.items():
        if fnmatchcase(name, pattern):
            depth = math.sqrt(2 * num_layers) if init.residual else 1.0
            return init._replace(std=init.std / depth)
    raise KeyError(f"no pattern of INIT matches the parameter {name!r}")


def decays(name: str) -> bool:
    """Whether weight decay applies to a parameter; see `NO_DECAY`."""
    return not any(fnmatchcase(name, pattern) for pattern in NO_DECAY)


def blocks(model: Llama) -> list[nn.Module]:
    """The repeated blocks in order: units of sharding, checkpointing and compilation."""
    return list(model.layers.values())


def without_head(model: Llama) -> Callable[[], Tensor]:
    """Make a model with a head return what its last product takes, ``[B, T, D]``, not logits.

    Returns:
        What gives that product's weight, ``[V, D]``, after a forward pass.
    """
    model.headless = True
    embedding = model.embed_tokens if model.config.tied_embeddings else model.lm_head
    assert embedding is not None
    return lambda: embedding.weight


# Patterns of module names (as in fnmatch).  Every module with a weight matches exactly one.
SHARDING: dict[str, TensorParallelSpec] = {
    "embed_tokens": TensorParallelSpec("vocabulary", after="scatter"),
    "layers.*.input_layernorm": TensorParallelSpec("whole"),
    "layers.*.self_attn": TensorParallelSpec(before="gather"),
    "layers.*.self_attn.q_proj": TensorParallelSpec("column"),
    "layers.*.self_attn.[kv]_proj": TensorParallelSpec("heads"),
    "layers.*.self_attn.o_proj": TensorParallelSpec("row", after="scatter"),
    "layers.*.post_attention_layernorm": TensorParallelSpec("whole"),
    "layers.*.mlp": TensorParallelSpec(before="gather"),
    "layers.*.mlp.gate_proj": TensorParallelSpec("column"),
    "layers.*.mlp.up_proj": TensorParallelSpec("column"),
    "layers.*.mlp.down_proj": TensorParallelSpec("row", after="scatter"),
    # Gathered here, not before lm_head, which a model with tied embeddings does not have.
    "norm": TensorParallelSpec("whole", after="gather"),
    "lm_head": TensorParallelSpec("column"),
}

# Fields of the configuration that the number of tensor-parallel ranks must divide.
SPLIT_SIZES = ("num_heads", "ffn_dim", "vocab_size")


def keep(model: Llama, units: range) -> None:
    """Leave in place only what a pipeline stage holds; names stay as they are.

    Args:
        units: consecutive ones of the embedding (0), the blocks (1 to ``num_layers``) and the
            head with its norm (``num_layers + 1``).

    Raises:
        ValueError: if tied embeddings would be torn apart.
    """
    last = model.config.num_layers + 1
    if model.config.tied_embeddings and (0 in units) != (last in units):
        raise ValueError("tied embeddings: embedding and head belong to one stage")
    if 0 not in units:
        model.embed_tokens = None
    for i in range(model.config.num_layers):
        if i + 1 not in units:
            del model.layers[str(i)]
    if last not in units:
        model.norm = None
        if not model.config.tied_embeddings:
            del model.lm_head


HUGGINGFACE = HFMapping("Llama", architecture="LlamaForCausalLM", model_type="llama")


# --------------------------------------------------------------------------- arithmetic


def units(config: DecoderConfig, seq_len: int) -> list[Unit]:
    """Every unit in order: the embedding, the blocks, the head with its norm.

    A tied embedding is counted where it is looked up; its product belongs to the head.
    Activations are those that autograd saves in this very code: of a norm its input in float32
    and twice the normalised value, of attention q, k, v and twice its output, of SwiGLU four
    widths; of the head the logits in bfloat16 and twice in float32.
    """
    dim, heads = config.dim, config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    matrices = _block_matmul_params(config)
    block = Unit(
        "layers",
        params=matrices + 2 * dim,
        flops_per_token=6.0 * matrices + 12 * heads * seq_len,
        activation_bytes_per_token=16 * dim + 6 * heads + 4 * kv_heads + 8 * config.ffn_dim,
    )
    table = config.vocab_size * dim
    embedding = Unit("embed_tokens", table, 0.0, 2 * dim)
    head = Unit(
        "head",
        params=dim + (0 if config.tied_embeddings else table),
        flops_per_token=6.0 * table,
        activation_bytes_per_token=8 * dim + 10 * config.vocab_size,
    )
    layers = [block._replace(name=f"layers.{i}") for i in range(config.num_layers)]
    return [embedding, *layers, head]


def num_matmul_params(config: DecoderConfig) -> int:
    """Weights that a token is multiplied by: all but the norms and the embedding look-up.

    A tied embedding counts, as the output projection that it also is.
    """
    return config.num_layers * _block_matmul_params(config) + config.vocab_size * config.dim


def _block_matmul_params(config: DecoderConfig) -> int:
    query_and_out = 2 * config.dim * config.num_heads * config.head_dim
    key_and_value = 2 * config.dim * config.num_kv_heads * config.head_dim
    return query_and_out + key_and_value + 3 * config.dim * config.ffn_dim


def num_params(config: DecoderConfig) -> int:
    """Parameters of the model, a tied embedding counted once."""
    norms = (2 * config.num_layers + 1) * config.dim
    embedding = 0 if config.tied_embeddings else config.vocab_size * config.dim
    return num_matmul_params(config) + norms + embedding


def flops_per_token(config: DecoderConfig, seq_len: int) -> float:
    """FLOPs of training on one token, forward and backward, without recomputation.

    ``6 * num_matmul_params + 12 * num_layers * num_heads * head_dim * seq_len``: a multiply and
    an add for each weight, once forward and twice backward, and the same for the two products of
    attention.
    This is the convention of PaLM (arXiv:2204.02311, appendix B) and TorchTitan, in which
    MFUs are published: attention is counted over the whole square, of which a causal mask
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
    init_of=init_of,
    decays=decays,
    num_params=num_params,
    flops_per_token=flops_per_token,
    sharding=SHARDING,
    split_sizes=SPLIT_SIZES,
    units=units,
    keep=keep,
    without_head=without_head,
    huggingface=HUGGINGFACE,
)
