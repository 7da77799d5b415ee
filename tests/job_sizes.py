"""Draw small, odd sizes of model and batch for `tests.job_space`."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Mapping
from typing import Any

from weft.models import FAMILIES
from weft.planning.lora_plan import QUANT_BLOCK_SIZE
from weft.planning.matrices import MOMENT_BLOCK_SIZE, required_multiple

OverrideMap = dict[str, str]  # key -> text, as on the command line
AXES = ("dp_shard", "tp", "pp", "cp", "dp_replicate")


def parallel_degrees(overrides: Mapping[str, str], axes: Iterable[str]) -> dict[str, int]:
    """Return the degree of each axis; 1 if it is not set."""
    return {axis: int(overrides.get(f"parallel.{axis}", 1)) for axis in axes}


def base_model(overrides: Mapping[str, str]) -> Any:
    """Return the configuration that a job's model fields change."""
    family = FAMILIES[overrides.get("model.kind", "llama")]
    return next(iter(family.presets.values()))


def draw_sizes(overrides: OverrideMap, rng: random.Random) -> OverrideMap:
    """Add small, odd sizes of model and batch that fit the layout."""
    kind = overrides.get("model.kind", "llama")
    family, base = FAMILIES[kind], base_model(overrides)
    degrees = parallel_degrees(overrides, (*AXES, "ep"))
    tp, pp, cp, ep = (degrees[name] for name in ("tp", "pp", "cp", "ep"))
    width, unit, ffn_unit = _draw_width(overrides, degrees, rng)
    several = overrides.get("pipeline.schedule", "1F1B") not in ("GPipe", "1F1B")
    per_rank = int(overrides.get("pipeline.stages_per_rank", 2 if several else 1))
    stages = pp * per_rank if pp > 1 else 1
    layers = rng.choice([max(1, stages - 1), stages, stages + 1]) if pp > 1 else rng.randint(1, 4)
    if base.num_experts:
        dense = int(overrides.get("model.dense_layers", base.dense_layers))
        interval = int(overrides.get("model.expert_interval", base.expert_interval))
        layers = max(layers, dense + interval)
    seq_unit = math.lcm(tp * cp, unit * cp)
    seq_len = seq_unit * rng.choice([n for n in range(1, 25) if seq_unit * n >= 8][:4])
    sequences = rng.choice((1, 2, 3, 5))
    if pp > 1:
        sequences = rng.choice((stages, stages + 1, 2 * stages, 2 * pp))
    fields: dict[str, Any] = {
        "num_layers": layers,
        **width,
        # Mostly not divisible by tp.
        "ffn_dim": tp * ffn_unit * 3 if ffn_unit > 1 else rng.choice((16, 21, 36)),
        "vocab_size": rng.choice((257, 261, 288)),
        "max_seq_len": seq_len,
    }
    if base.num_experts:
        chunks = int(overrides.get("parallel.ep_chunks", 1))
        fields |= _draw_experts(base, ep * chunks, tp, ffn_unit, rng)
        if overrides.get("lora.dora") == "true":  # divides by magnitudes, which must not be 0
            fields["expert_dim"] = max(fields["expert_dim"], 8)
    job = {"model.kind": kind, "model.preset": next(iter(family.presets))}
    job |= {f"model.{n}": str(x) for n, x in fields.items()}
    batch = sequences * degrees["dp_shard"] * degrees["dp_replicate"]
    job |= {
        "parallel.dp_shard": "1",
        "data.vocab_size": "257",
        "train.seq_len": str(seq_len),
        "train.global_batch_size": str(batch),
    }
    if rng.random() < 0.5 and "train.microbatch_size" not in overrides:
        job["train.microbatch_size"] = str(rng.randint(1, min(sequences, 3)))
    job["train.eval_sequences"] = str(rng.randint(1, batch + 2))
    job = overrides | {key: text for key, text in job.items() if key not in overrides}
    if overrides.get("pipeline.layers_per_stage") == "any":
        cuts = sorted(rng.randint(0, layers) for _ in range(stages - 1))
        counts = [end - begin for begin, end in itertools.pairwise([0, *cuts, layers])]
        job["pipeline.layers_per_stage"] = f"[{', '.join(map(str, counts))}]"
    return job


def _draw_experts(
    base: Any, unit: int, tp: int, ffn_unit: int, rng: random.Random
) -> dict[str, int]:
    """Draw the sizes of the experts; a family with groups keeps groups.

    ``unit`` divides the number of experts.
    """
    groups = rng.choice((2, 3)) if base.expert_groups > 1 else 1
    experts = math.lcm(unit, groups) * rng.choice((2, 3)) if groups > 1 else 0
    experts = experts or unit * rng.choice([n for n in (1, 2, 3, 5) if n * unit > 1])
    active_groups = rng.randint(1, groups)
    return {
        "num_experts": experts,
        "expert_groups": groups,
        "active_groups": active_groups,
        "active_experts": rng.randint(1, min(3, experts // groups * active_groups)),
        "expert_dim": tp * ffn_unit if ffn_unit > 1 else rng.choice((3, 8, 12)),
    }


def _draw_width(
    overrides: OverrideMap, degrees: Mapping[str, int], rng: random.Random
) -> tuple[dict[str, Any], int, int]:
    """Draw heads and width.

    Returns:
        The fields, the unit of all sizes of matrices, and the unit of the feed-forward width.
    """
    base, tp = base_model(overrides), degrees["tp"]
    float8 = overrides.get("precision.float8", "none")
    unit = 1 if float8 == "none" else required_multiple(float8)
    quantized = overrides.get("lora.quantize", "none") != "none"
    head_ranks = degrees["cp"] if overrides.get("parallel.cp_method") == "ulysses" else 1
    if unit > 1:
        head_ranks *= tp
    kv_heads = rng.choice((1, 2, 3, 4))
    kv_heads = kv_heads if unit == 1 else tp * rng.choice((1, 2))
    heads = kv_heads * rng.choice(
        [n for n in range(1, 17) if kv_heads * n % head_ranks == 0 and kv_heads * n >= tp][:3]
    )
    fraction = float(overrides.get("model.rope_fraction", base.rope_fraction))
    widths = [n for n in (2, 4, 6, 8, 10, 16) if int(n * fraction) in range(2, 17, 2)]
    head_dim = unit if unit > 1 else rng.choice(widths)
    dim = unit * rng.choice((2, 3) if unit > 1 else (14, 24, 33))
    ffn_unit = unit
    if quantized:  # complete blocks on each rank
        kv_heads, heads, head_dim = tp, 2 * tp, QUANT_BLOCK_SIZE // 2
        dim, ffn_unit = QUANT_BLOCK_SIZE * tp, QUANT_BLOCK_SIZE
    if overrides.get("optim.state_dtype") == "8bit" and not quantized and rng.random() < 0.7:
        # Rows of complete blocks on each rank, which every layout rounds alike.
        head_dim = ffn_unit = MOMENT_BLOCK_SIZE
        dim = MOMENT_BLOCK_SIZE * rng.choice((1, 3))
    fields: dict[str, Any] = {"dim": dim, "num_heads": heads, "num_kv_heads": kv_heads}
    fields["head_dim"] = head_dim
    if base.kv_rank or "model.kv_rank" in overrides:
        rope_dim = max(2, head_dim // 4 * 2)
        fields |= {"num_kv_heads": heads, "head_dim": rope_dim + unit * rng.choice((2, 3))}
        fields |= {"head_dim": fields["head_dim"] // 2 * 2, "rope_head_dim": rope_dim}
        fields |= {"value_head_dim": unit * 2, "q_rank": unit * rng.choice((0, 5))}
        if quantized:
            fields |= {"value_head_dim": QUANT_BLOCK_SIZE // 2}
            fields["q_rank"] = QUANT_BLOCK_SIZE * rng.choice((0, 1))
    rope_dim = fields.get("rope_head_dim", int(head_dim * fraction))
    if overrides.get("model.rope_scaling", base.rope_scaling) == "longrope":
        for name in ("rope_short_factors", "rope_long_factors"):
            fields[name] = [round(rng.uniform(1, 4), 2) for _ in range(rope_dim // 2)]
    return fields, unit, ffn_unit
