"""The family of all decoders: tables and functions of `weft.models.decoder`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.models import decoder
from weft.models import decoder_costs as costs
from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_rules import check
from weft.models.family import Family
from weft.models.hf_fields import HFMapping
from weft.models.moe import moe_layers

# Entries of the family for configurations with experts.
EXPERT_ENTRIES: dict[str, Any] = {
    "sharding": decoder.EXPERT_SHARDING,
    "sharding_without_expert_tp": decoder.SHARDING_WITHOUT_EXPERT_TP,
    "moe_layers": moe_layers,
    "num_active_params": costs.num_active_params,
}


def build(config: DecoderConfig) -> decoder.Decoder:
    """Build a decoder.

    Raises:
        ValueError: with every reason why the model cannot be built.
    """
    if errors := check(config):
        raise ValueError("\n".join(str(error) for error in errors))
    return decoder.Decoder(config)


def choose_entries(config: DecoderConfig) -> dict[str, Any]:
    """Return the entries that replace those of `FAMILY` for a configuration."""
    entries = dict(EXPERT_ENTRIES) if config.num_experts else {}
    if config.logit_softcap or config.score_head:  # the loss is not one of plain logits
        entries["enable_fused_loss"] = None
    return entries


FAMILY = Family(
    config=DecoderConfig,
    presets={},
    build=build,
    check=check,
    blocks=decoder.blocks,
    fsdp_units=decoder.fsdp_units,
    get_init=decoder.get_init,
    has_weight_decay=decoder.has_weight_decay,
    num_params=costs.num_params,
    flops_per_token=costs.flops_per_token,
    sharding=decoder.SHARDING,
    unit_costs=costs.unit_costs,
    prune_to_stage=decoder.prune_to_stage,
    tied_parameter="embed_tokens.weight",
    enable_fused_loss=decoder.enable_fused_loss,
    set_embedding_noise=decoder.set_embedding_noise,
    layer_kind=DecoderConfig.layer_kind,
    choose_entries=choose_entries,
)


def decoder_family(
    presets: Mapping[str, DecoderConfig], hf_mapping: HFMapping | None = None
) -> Family:
    """Return the family of decoders with these presets."""
    return replace(FAMILY, presets=presets, hf_mapping=hf_mapping)
