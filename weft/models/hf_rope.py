"""Conversion of rotary positions from and to ``config.json``.

Transformers 5 replaced ``rope_theta`` and ``rope_scaling`` by ``rope_parameters``, which models
with two kinds of positions nest by the type of a layer.  Both forms are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from weft.config.errors import MISSING
from weft.models.decoder_config import DecoderConfig
from weft.models.hf_fields import HFMapping, Json, Limits

# The arguments of a `ConfigError`: field, value, rule, and remedy if there is one.
Problem = tuple[Any, ...]

FACTOR = Limits(float, 1e-3, 1e4)
# Field of ``rope_scaling`` -> weft's key and valid numbers.
ROPE_LIMITS: dict[str, tuple[str, Limits]] = {
    "factor": ("rope_factor", Limits(float, 1.0, 1e4)),
    "low_freq_factor": ("rope_low_freq_factor", FACTOR),
    "high_freq_factor": ("rope_high_freq_factor", FACTOR),
    "beta_fast": ("rope_beta_fast", FACTOR),
    "beta_slow": ("rope_beta_slow", FACTOR),
    "attention_factor": ("rope_magnitude", FACTOR),
    "original_max_position_embeddings": ("rope_original_context", Limits(int, 1, 1 << 30)),
    "short_factor": ("rope_short_factors", FACTOR),
    "long_factor": ("rope_long_factors", FACTOR),
}
THETA = Limits(float, 1.0, 1e12)
MSCALE = Limits(float, 0.0, 1e2)
# Keys that a scaling uses.
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "linear": ("rope_factor",),
    "dynamic": ("rope_factor", "rope_original_context"),
    "llama3": (
        "rope_factor",
        "rope_low_freq_factor",
        "rope_high_freq_factor",
        "rope_original_context",
    ),
    "yarn": (
        *("rope_factor", "rope_beta_fast", "rope_beta_slow", "rope_truncate"),
        *("rope_original_context", "rope_magnitude"),
    ),
    "longrope": (
        *("rope_short_factors", "rope_long_factors"),
        *("rope_original_context", "rope_magnitude"),
    ),
}
REQUIRED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (
        *("factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    ),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
OPTIONAL: dict[str, tuple[str, ...]] = {
    "dynamic": ("original_max_position_embeddings",),
    "yarn": (
        *("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
        "original_max_position_embeddings",
    ),
    "longrope": ("factor", "attention_factor", "original_max_position_embeddings"),
}
ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return the factor of cosines and sines in YaRN (arXiv:2309.00071, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


# --------------------------------------------------------------------------- reading


def read_rope(
    mapping: HFMapping, hf_config: Json, invalid: set[str], fields: Json
) -> Iterator[Problem]:
    """Read the rotary positions.

    Args:
        mapping: of the family.
        hf_config: fields of ``config.json``.
        invalid: fields of ``config.json`` that have invalid numbers.
        fields: receives weft's fields.

    Yields:
        Problems.
    """
    spec = mapping.rope
    given = {name: value for name, value in hf_config.items() if value is not None}
    tree, local, problems = _merge_forms(mapping, given)
    yield from problems
    theta = tree.pop("rope_theta", spec.theta)
    fraction = tree.pop("partial_rotary_factor", given.get("partial_rotary_factor"))
    kind = tree.pop("rope_type", tree.pop("type", "default"))
    kind = spec.aliases.get(kind, kind) if isinstance(kind, str) else kind
    tree.pop("type", None)
    yield from _check_limits("rope_theta", theta, THETA)
    fields["rope_theta"] = theta
    if spec.fraction is None:
        if fraction not in (None, 1.0):
            yield "partial_rotary_factor", fraction, "must be 1.0"
    else:
        fraction = spec.fraction if fraction is None else fraction
        problems = [*_check_limits("partial_rotary_factor", fraction, Limits(float, 1e-3, 1.0))]
        yield from problems
        fields["rope_fraction"] = 1.0 if problems else fraction
    if spec.local_theta is not None:
        yield from _read_local(spec.local_theta, local, fields)
    fields["rope_scaling"] = "none"
    if kind != "default" and (not isinstance(kind, str) or kind not in spec.kinds):
        names = " or ".join(repr(name) for name in ("default", *spec.kinds))
        yield "rope_scaling.rope_type", kind, f"must be {names}"
        return
    if kind != "default":
        fields["rope_scaling"] = kind
        yield from _read_scaling(mapping, kind, tree, given, invalid, fields)
    known = (*REQUIRED.get(kind, ()), *OPTIONAL.get(kind, ()))
    for name, value in tree.items():
        if name not in known:
            yield f"rope_scaling.{name}", value, f"is not a field of rope_type {kind!r}"
    ours = (*ROPE_FIELDS, *mapping.all_fields, spec.local_field)
    for name in given:
        if name.startswith("rope_") and name not in ours:
            yield name, given[name], "is not a known field"


def _merge_forms(mapping: HFMapping, given: Json) -> tuple[Json, Json, list[Problem]]:
    """Return the parameters of global and of local layers, and problems."""
    spec = mapping.rope
    problems: list[Problem] = []
    forms = {name: given[name] for name in ("rope_scaling", "rope_parameters") if given.get(name)}
    for name, value in [*forms.items()]:
        if not isinstance(value, dict):
            problems.append((name, value, "must be an object, or null"))
            del forms[name]
    local: Json = {}
    nested = forms.get("rope_parameters", {})
    parts = [part for part in ("full_attention", "sliding_attention") if part in nested]
    if spec.local_theta is not None and parts:
        full, local = (nested.get(part) or {} for part in ("full_attention", "sliding_attention"))
        if not (isinstance(full, dict) and isinstance(local, dict)) or len(parts) < len(nested):
            problems.append(("rope_parameters", nested, "must have an object per type of layer"))
            full, local = {}, {}
        forms["rope_parameters"] = full
    elif spec.local_theta is not None and spec.local_field in given:
        local = {"rope_theta": given[spec.local_field]}
    cleaned = [
        {name: value for name, value in form.items() if value is not None}
        for form in forms.values()
    ]
    if len(cleaned) == 2:
        first, second = (
            {"rope_type": form.get("type", "default"), **form, "rope_theta": None}
            for form in cleaned
        )
        if first != second:
            rule = "contradicts rope_parameters"
            problems.append(("rope_scaling", given["rope_scaling"], rule, "remove one of them"))
    tree: Json = {}
    if "rope_theta" in given:
        tree["rope_theta"] = given["rope_theta"]
    for form in cleaned:
        tree |= form
    if not forms and spec.scaling:
        tree |= spec.scaling
    return tree, local, problems


def _read_local(default: float, local: Json, fields: Json) -> Iterator[Problem]:
    """Read the positions of local layers, which have no scaling."""
    local = {name: value for name, value in local.items() if value is not None}
    theta = local.pop("rope_theta", default)
    yield from _check_limits("rope_local_base_freq", theta, THETA)
    fields["rope_local_theta"] = theta
    kind = local.pop("rope_type", local.pop("type", "default"))
    if kind != "default":
        yield "rope_parameters.sliding_attention.rope_type", kind, "must be 'default'"
        return
    for name, value in local.items():
        if name != "type":
            yield f"rope_parameters.sliding_attention.{name}", value, "is not a known field"


def _read_scaling(
    mapping: HFMapping, kind: str, tree: Json, given: Json, invalid: set[str], fields: Json
) -> Iterator[Problem]:
    """Read the fields of a scaling."""
    original = "original_max_position_embeddings"
    context = fields.get("max_seq_len")
    if mapping.rope.has_original_field and kind in ("llama3", "yarn", "longrope"):
        tree = {**tree, original: given.get(original, mapping.defaults.get(original))}
    elif kind in ("yarn", "longrope", "dynamic") and original not in tree:
        tree = {**tree, original: context}
    if kind == "dynamic" and tree[original] != context:  # transformers reads the latter
        yield f"rope_scaling.{original}", tree[original], f"must be {context}"
    missing = [name for name in REQUIRED[kind] if name not in tree]
    for name in missing:
        yield f"rope_scaling.{name}", MISSING, "is missing", "add it"
    bad: set[str] = set()
    for name in (*REQUIRED[kind], *OPTIONAL.get(kind, ())):
        if name not in tree or name not in ROPE_LIMITS:
            continue
        key, limits = ROPE_LIMITS[name]
        value = tree[name]
        if name in ("short_factor", "long_factor"):
            if not isinstance(value, list) or len(value) > 1 << 16:
                yield f"rope_scaling.{name}", value, "must be a list of numbers"
                continue
            problems = [p for item in value for p in _check_limits(name, item, limits)][:1]
            value = tuple(value)
        else:
            problems = [*_check_limits(name, value, limits)]
        for _, shown, *rest in problems:
            yield f"rope_scaling.{name}", shown, *rest
        if problems:
            bad.add(name)
        elif key in ROPE_KEYS[kind]:
            fields[key] = value
    if bad or missing or "max_position_embeddings" in invalid:
        return
    if kind == "yarn":
        yield from _read_yarn(mapping, tree, fields)
    if kind == "longrope" and "attention_factor" not in tree and type(context) is int:
        start = tree[original]
        factor = tree.get("factor") or context / start
        ratio = 1 + math.log(factor) / math.log(start) if factor > 1 and start > 1 else 1.0
        fields["rope_magnitude"] = math.sqrt(ratio)


def _read_yarn(mapping: HFMapping, tree: Json, fields: Json) -> Iterator[Problem]:
    """Read the magnitudes of YaRN."""
    truncate = tree.get("truncate", True)
    if type(truncate) is not bool:
        yield "rope_scaling.truncate", truncate, "must be true or false"
        return
    if not truncate and mapping.rope.local_theta is not None:
        remedy = f"remove it: transformers ignores it in a {mapping.name}"
        yield "rope_scaling.truncate", truncate, "must be true", remedy
    fields["rope_truncate"] = truncate
    scales = []
    for name in ("mscale", "mscale_all_dim"):
        scales.append(tree.get(name, 0.0))
        for problem in _check_limits(name, scales[-1], MSCALE):
            yield f"rope_scaling.{name}", *problem[1:]
            return
    mscale, mscale_all = scales
    factor = tree["factor"]
    if "attention_factor" not in tree:
        if mscale and mscale_all:
            magnitude = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all)
        else:
            magnitude = yarn_magnitude(factor)
        fields["rope_magnitude"] = magnitude
    if mapping.rope.scales_attention and mscale_all and type(fields.get("head_dim")) is int:
        fields["attention_scale"] = _scale_attention(fields["head_dim"], factor, mscale_all)


def _scale_attention(key_dim: int, factor: float, mscale: float) -> float:
    """Return the scale of attention with DeepSeek's ``mscale_all_dim``."""
    magnitude = yarn_magnitude(factor, mscale)
    return float(key_dim**-0.5 * magnitude * magnitude)


def _check_limits(name: str, value: object, limits: Limits) -> Iterator[Problem]:
    kinds = (int,) if limits.kind is int else (int, float)
    if type(value) in kinds and limits.least <= value <= limits.most:  # type: ignore[operator]
        return
    noun = "an integer" if limits.kind is int else "a number"
    least, most = (f"{n:,}" if limits.kind is int else f"{n:g}" for n in limits[1:])
    remedy = "download config.json again, or do not use it"
    yield name, value, f"must be {noun} from {least} to {most}", remedy


# --------------------------------------------------------------------------- writing


def write_rope(mapping: HFMapping, config: DecoderConfig) -> Json:
    """Return the fields of the rotary positions."""
    spec = mapping.rope
    scaling = _write_scaling(mapping, config)
    if scaling is None and spec.scaling:
        scaling = {"rope_type": "default"}
    tree: Json = {"rope_theta": config.rope_theta, "rope_scaling": scaling}
    if spec.fraction is not None:
        tree["partial_rotary_factor"] = config.rope_fraction
    if spec.has_original_field:
        has_original = config.rope_scaling in ("llama3", "yarn", "longrope")
        tree["original_max_position_embeddings"] = (
            config.rope_original_context if has_original else config.max_seq_len
        )
    if spec.local_theta is not None:
        local_theta = config.rope_local_theta or config.rope_theta
        if spec.local_field:
            tree[spec.local_field] = local_theta
        tree["rope_parameters"] = {
            "full_attention": {
                **(scaling or {"rope_type": "default"}),
                "rope_theta": config.rope_theta,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        }
    return tree


def _write_scaling(mapping: HFMapping, config: DecoderConfig) -> Json | None:
    kind = config.rope_scaling
    if kind == "none":
        return None
    tree: Json = {"rope_type": kind}
    for name, (key, _) in ROPE_LIMITS.items():
        if key in ROPE_KEYS[kind]:
            value = getattr(config, key)
            tree[name] = list(value) if isinstance(value, tuple) else value
    if kind == "dynamic":
        del tree["original_max_position_embeddings"]
    if kind == "yarn":
        if not config.rope_truncate:
            tree["truncate"] = False
        if config.rope_magnitude == yarn_magnitude(config.rope_factor):
            del tree["attention_factor"]
        if mapping.rope.scales_attention and config.attention_scale:
            tree |= _write_mscale(config)
            if config.rope_magnitude == 1.0:
                tree["mscale"] = tree["mscale_all_dim"]
                tree.pop("attention_factor", None)
            elif "attention_factor" not in tree:
                tree["attention_factor"] = config.rope_magnitude
    return tree


def _write_mscale(config: DecoderConfig) -> Json:
    """Return the ``mscale_all_dim`` that gives the scale of attention."""
    magnitude = math.sqrt(config.attention_scale * config.key_dim**0.5)
    exact = (magnitude - 1) / (0.1 * math.log(config.rope_factor)) if config.rope_factor > 1 else 1
    for digits in (3, 6, 9):
        rounded = round(exact, digits)
        scale = _scale_attention(config.key_dim, config.rope_factor, rounded)
        if scale == config.attention_scale:
            return {"mscale_all_dim": rounded}
    return {"mscale_all_dim": exact}
