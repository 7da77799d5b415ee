"""Parameters, FLOPs and memory of a decoder, from its configuration.

The sizes are those of the module itself, built without memory, so they hold for every combination
of keys.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from weft.models.decoder_config import DecoderConfig
from weft.models.family import UnitCost


class BlockParams(NamedTuple):
    """Numbers of parameters of a block.

    Attributes:
        total: all of them.
        experts: part of the total in experts.
        matmuls: weights in matrix products, of all experts.
    """

    total: int
    experts: int
    matmuls: int


@cache
def block_params(config: DecoderConfig, layer: int) -> BlockParams:
    """Return the numbers of parameters of a layer."""
    from weft.models.decoder import DecoderBlock

    with torch.device("meta"):
        params = dict(DecoderBlock(config, layer).named_parameters())
    return BlockParams(
        total=sum(param.numel() for param in params.values()),
        experts=sum(param.numel() for name, param in params.items() if ".experts." in name),
        matmuls=sum(
            param.numel()
            for name, param in params.items()
            if param.dim() > 1 and name.endswith(".weight")
        ),
    )


def _mtp_blocks(config: DecoderConfig) -> list[BlockParams]:
    """Return the parameters of the layers of multi-token prediction."""
    first = config.num_layers
    return [block_params(config, layer) for layer in range(first, first + config.mtp_layers)]


def _each_block(config: DecoderConfig) -> list[BlockParams]:
    """Return the parameters of every block."""
    first_of_kind: dict[object, int] = {}
    layers = [first_of_kind.setdefault(config.layer_kind(i), i) for i in range(config.num_layers)]
    return [block_params(config, layer) for layer in layers]


def _active_matmuls(config: DecoderConfig, block: BlockParams) -> float:
    """Return the weights in matrix products that one token uses."""
    if not block.experts:
        return block.matmuls
    width = config.expert_dim * config.dim * 3
    return block.matmuls - (config.num_experts - config.active_experts) * width


def attention_flops(config: DecoderConfig, layer: int, seq_len: int) -> float:
    """Return the training FLOPs per token of a layer's two products of attention.

    The full square of ``seq_len`` counts, of which a causal mask needs half.  Of a local layer, the
    window or chunk counts.
    """
    limit = config.sliding_window or config.attention_chunk
    keys = min(seq_len, limit) if config.is_local(layer) else seq_len
    return 6.0 * config.num_heads * (config.key_dim + config.value_dim) * keys


def unit_costs(config: DecoderConfig, seq_len: int) -> list[UnitCost]:
    """Return the costs of the embedding, the blocks, and the head with its norm.

    A tied embedding's parameters count in the embedding, its product in the head.  Activations are
    those that autograd saves in this code.  Norm: its input in float32 and twice the normalized
    value.  Attention: q, k, v and twice its output; normalized queries and keys as other norms.
    Feed-forward: four widths.  Experts: per token and active expert input and output rows, four
    widths, indices and weights; and per token twice the row and the scores.  Head: logits, or one
    score, in bfloat16 and twice in float32.  Each layer of multi-token prediction belongs to the
    head; it is a block with two more norms and a product of twice the width, followed by a head.
    """
    dim = config.dim
    units = []
    for layer, block in enumerate(_each_block(config)):
        units.append(
            UnitCost(
                f"layers.{layer}",
                params=block.total,
                flops_per_token=6.0 * _active_matmuls(config, block)
                + attention_flops(config, layer, seq_len),
                activation_bytes_per_token=_saved_bytes(config, layer),
                expert_params=block.experts,
            )
        )
    table, outputs = config.vocab_size * dim, _num_outputs(config)
    embedding = UnitCost("embed_tokens", table, 0.0, 2 * dim)
    norm = dim * (1 + (config.norm == "layer" and config.norm_bias))
    mtp = _mtp_blocks(config)
    layers = range(config.num_layers, config.num_layers + len(mtp))
    head = UnitCost(
        "head",
        params=norm + (0 if config.tied_embeddings else outputs * dim) + sum(b.total for b in mtp),
        flops_per_token=6.0 * outputs * dim * (1 + len(mtp))
        + sum(6.0 * _active_matmuls(config, block) for block in mtp)
        + sum(attention_flops(config, layer, seq_len) for layer in layers),
        activation_bytes_per_token=(8 * dim + 10 * outputs) * (1 + len(mtp))
        + sum(_saved_bytes(config, layer) + 24 * dim for layer in layers),
        expert_params=sum(block.experts for block in mtp),
    )
    return [embedding, *units, head]


def _num_outputs(config: DecoderConfig) -> int:
    """Return the outputs of the head per token: logits, or one score."""
    return 1 if config.score_head else config.vocab_size


def _saved_bytes(config: DecoderConfig, layer: int) -> float:
    """Return the bytes per token that a layer saves for backward, in bfloat16."""
    dim, heads = config.dim, config.num_heads * config.key_dim
    kv_heads = config.num_kv_heads * config.key_dim
    num_norms = 4 if config.norm_position == "both" else 2
    saved = 8.0 * num_norms * dim + 6 * heads + 4 * kv_heads
    saved += 8 * (heads + kv_heads) * config.has_qk_norm
    saved += 8 * (config.kv_rank + config.q_rank)
    if not config.has_experts(layer):
        return saved + (8 if config.gated else 4) * config.ffn_dim
    active = config.active_experts
    saved += active * (4 * dim + 8 * config.expert_dim + 32) + 4 * dim + 12 * config.num_experts
    return saved + 8 * config.shared_experts * config.expert_dim


def num_matmul_params(config: DecoderConfig) -> float:
    """Return the number of weights in matrix products that one token uses.

    That is all but norms, biases, the embedding and idle experts.  A tied embedding counts, because
    it is also the output projection.  The output projection counts once per predicted token.
    """
    blocks = _each_block(config) + _mtp_blocks(config)
    active = sum(_active_matmuls(config, block) for block in blocks)
    return active + _num_outputs(config) * config.dim * (1 + config.mtp_layers)


def num_params(config: DecoderConfig) -> int:
    """Return the number of parameters, a tied embedding counted once."""
    return sum(unit.params for unit in unit_costs(config, 1))


def num_active_params(config: DecoderConfig) -> int:
    """Return the number of parameters that one token uses: all but its idle experts."""
    width = 3 * config.dim * config.expert_dim
    if config.expert_biases:
        width += 2 * config.expert_dim + config.dim
    mtp = sum(block.experts > 0 for block in _mtp_blocks(config))
    idle = (config.num_moe_layers + mtp) * max(0, config.num_experts - config.active_experts)
    return num_params(config) - idle * width


def flops_per_token(config: DecoderConfig, seq_len: int) -> float:
    """Return the training FLOPs of one token, without recomputation.

    The formula is ``6 * num_matmul_params`` plus `attention_flops`: a multiply and an add per
    weight, once forward and twice backward, and the same for the two products of attention.  This
    is the convention of PaLM (arXiv:2204.02311, appendix B) and TorchTitan, in which MFU is
    published.  Only the active experts' weights count, as in DeepSeek-V3 (arXiv:2412.19437,
    section 2) and TorchTitan.
    """
    layers = range(config.num_layers + config.mtp_layers)
    attention = sum(attention_flops(config, layer, seq_len) for layer in layers)
    return 6.0 * num_matmul_params(config) + attention
