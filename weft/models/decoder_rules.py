"""Rules about the keys of a decoder: every reason why a model cannot be built."""

from __future__ import annotations

import math

from weft.config.errors import ConfigErrors
from weft.models.decoder_config import DecoderConfig


def check(config: DecoderConfig) -> ConfigErrors:
    """Return every reason why the model cannot be built; keys are ``model.<field>``."""
    errors = ConfigErrors(config, "model")
    dim, num_heads, num_kv_heads = config.dim, config.num_heads, config.num_kv_heads
    if not config.head_dim and (dim % num_heads or dim // num_heads % 2):
        rule = (
            f"does not divide model.dim={dim}"
            if dim % num_heads
            else f"makes head_dim={dim // num_heads} odd, and rotary positions rotate pairs"
        )
        even = [n for n in _divisors(dim) if dim // n % 2 == 0]
        valid = [n for n in even if n % num_kv_heads == 0] or even
        multiple = f"make model.dim a multiple of {2 * num_heads}, or set model.head_dim"
        remedy = f"use {_format_nearest(valid, num_heads)}, or {multiple}" if valid else multiple
        errors.add("model.num_heads", rule, remedy, ("model.dim",))
    elif config.key_dim % 2:
        rule, remedy = "is odd, and rotary positions rotate pairs", f"use {config.key_dim + 1}"
        errors.add("model.head_dim", rule, remedy)
    elif not config.kv_rank and (config.rope_dim % 2 or config.rope_dim < 2):
        rule = f"rotates {config.rope_dim} of {config.key_dim} elements, not an even number"
        errors.add("model.rope_fraction", rule, "use 1 or 0.5", ("model.head_dim", "model.kv_rank"))
    if num_heads % num_kv_heads:
        rule = f"does not divide model.num_heads={num_heads}"
        remedy = f"use {_format_nearest(_divisors(num_heads), num_kv_heads)}"
        errors.add("model.num_kv_heads", rule, remedy, ("model.num_heads",))
    _check_rope(errors, config)
    _check_attention(errors, config)
    if config.num_experts:
        _check_experts(errors, config)
    return errors


def _check_rope(errors: ConfigErrors, config: DecoderConfig) -> None:
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    if config.rope_scaling == "llama3" and high < low:
        rule = f"is less than model.rope_low_freq_factor={low:g}"
        remedy = f"use {low:g} or more (Llama 3.1: 4, with a low factor of 1)"
        depends = ("model.rope_low_freq_factor", "model.rope_scaling")
        errors.add("model.rope_high_freq_factor", rule, remedy, depends)
    if config.rope_scaling == "longrope":
        for name in ("rope_short_factors", "rope_long_factors"):
            count = len(getattr(config, name))
            if count != config.rope_dim // 2:
                rule = f"has {count} numbers, but {config.rope_dim // 2} frequencies"
                errors.add(f"model.{name}", rule, "give one number per frequency")


def _check_attention(errors: ConfigErrors, config: DecoderConfig) -> None:
    if "L" in config.layer_pattern and not (config.sliding_window or config.attention_chunk):
        remedy = "set model.sliding_window, or use the pattern G"
        errors.add("model.layer_pattern", "has local layers without a window", remedy)
    if config.sliding_window and config.attention_chunk:
        remedy = "set one of them to 0"
        errors.add("model.attention_chunk", "cannot be set with model.sliding_window", remedy)
    if config.kv_rank:
        if not 0 < config.rope_head_dim < config.key_dim:
            rule = f"must be between 0 and head_dim={config.key_dim} with model.kv_rank"
            errors.add("model.rope_head_dim", rule, f"use {max(2, config.key_dim // 4 * 2)}")
        elif config.rope_head_dim % 2:
            rule = "is odd, and rotary positions rotate pairs"
            errors.add("model.rope_head_dim", rule, f"use {config.rope_head_dim + 1}")
        if config.num_kv_heads != config.num_heads:
            rule = "must equal model.num_heads with model.kv_rank, which has no groups of heads"
            errors.add("model.num_kv_heads", rule, f"use {config.num_heads}")
        if "N" in config.rope_pattern:
            rule = "cannot have layers without positions with model.kv_rank"
            errors.add("model.rope_pattern", rule, "use R", ("model.kv_rank",))
        if config.qk_norm != "none":
            rule = "cannot be used with model.kv_rank, whose latent vectors are normalized"
            errors.add("model.qk_norm", rule, "use none")
        if config.attention_sinks:
            errors.add("model.attention_sinks", "cannot be used with model.kv_rank", "use false")
    elif config.value_dim != config.key_dim:
        rule = "must be 0 without model.kv_rank: values are as wide as keys"
        errors.add("model.value_head_dim", rule, "use 0")


def _check_experts(errors: ConfigErrors, config: DecoderConfig) -> None:
    experts, groups = config.num_experts, config.expert_groups
    if config.active_experts > experts:
        rule = f"exceeds model.num_experts={experts}"
        remedy = f"use at most {experts}"
        errors.add("model.active_experts", rule, remedy, ("model.num_experts",))
    if config.num_moe_layers == 0:
        rule = f"leaves no layer with experts: model.num_layers={config.num_layers}"
        depends = ("model.num_layers", "model.expert_interval")
        last = config.num_layers // config.expert_interval * config.expert_interval
        remedy = f"use at most {last - 1}"
        if not last:
            remedy = f"use model.expert_interval={config.num_layers} and model.dense_layers=0"
        errors.add("model.dense_layers", rule, remedy, depends)
    if experts % groups:
        rule = f"does not divide model.num_experts={experts}"
        errors.add(
            "model.expert_groups", rule, f"use {_format_nearest(_divisors(experts), groups)}"
        )
    elif config.active_groups > groups:
        errors.add("model.active_groups", f"exceeds model.expert_groups={groups}", f"use {groups}")
    elif config.active_groups * (experts // groups) < config.active_experts:
        rule = f"has fewer experts than model.active_experts={config.active_experts}"
        errors.add("model.active_groups", rule, "use more", ("model.active_experts",))
    if config.score_selected and config.expert_groups > 1:
        rule = "cannot be used with model.expert_groups, which need the scores of all experts"
        errors.add("model.score_selected", rule, "use false")


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _format_nearest(valid: list[int], value: int) -> str:
    """Format the up to eight valid values nearest to ``value``, as in '1, 2 or 4'."""
    nearest = sorted(sorted(valid, key=lambda n: abs(math.log(n / value)))[:8])
    *head, last = [str(n) for n in nearest]
    return f"{', '.join(head)} or {last}" if head else last
