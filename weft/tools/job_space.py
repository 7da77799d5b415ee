"""The space of random jobs: which keys are drawn, and how a legal job is made of them.

A job is a set of overrides of the recipe ``demo``.  What a key may be follows from its type in
`weft.config.schema` or in a family's configuration: the other value of a bool, the other names of a Literal,
some numbers inside of the bounds.  `VALUES` is for keys whose type says nothing, `SIZES` for those
that have to fit each other, `EXCLUDED` for those that cannot change what is computed.  A new key
of a type that says enough therefore joins without a word here.

A *technique* is a key with one of its values, or a number that is not the default.  Each job has a
*goal*, two techniques that it is to combine; over the indices every pair comes round.  The rest is
chance.  Most of what chance makes is not legal: as long as the rules refuse it, a key that the
rules name goes back to its default, those of the goal last.  Each refusal is kept, since all of
them together are a table of what can be combined.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from weft.config.errors import ConfigError, InvalidConfig
from weft.config.schema import SECTIONS
from weft.models import FAMILIES
from weft.optim.optimizer import OPTIMIZERS
from weft.optim.schedule import SCHEDULES as RATES
from weft.plan.float8_rules import required_multiple
from weft.plan.lora_plan import QUANT_BLOCK_SIZE
from weft.plan.memory_formula import MOMENT_BLOCK_SIZE
from weft.plan.pipeline_schedule import SCHEDULES
from weft.tools.shrink import LAYOUT, Case, plan_of_recipe, resume_layout, shrink
from weft.tools.verify import read_recipe
from weft.train.objectives import OBJECTIVES

RECIPE = "demo"
Draw = dict[str, str]  # key -> text, as on the command line

# Keys, or the beginnings of keys, that are not drawn, and why.
EXCLUDED = {
    "run.": "where a run lies and what it runs on, which verify decides",
    "model.preset": "the sizes of a model are drawn one by one",
    "data.path": "verify trains on noise",
    "data.mixture": "verify trains on noise",
    "data.text_field": "verify trains on noise",
    "data.tokenizer": "verify trains on noise",
    "data.chat_template": "verify trains on noise",
    "data.validation_fraction": "verify trains on noise",
    "data.overlong": "verify trains on noise",
    "data.invalid_utf8": "verify trains on noise",
    "data.cache_dir": "a folder",
    "train.steps": "--steps says it",
    "train.eval_interval": "verify evaluates once, at the end",
    "parallel.async_tp": "needs GPUs that reach each other's memory",
    "parallel.symmetric_memory": "needs GPUs that reach each other's memory",
    "precision.float8_small": "goes with precision.float8, whose products are all small here",
    "compile.cache_dir": "a folder",
    "checkpoint.": "when and where a state is saved; --resume-layout saves and loads one",
    "resilience.": "what happens when something goes wrong",
    "monitor.": "what is recorded",
    "profile.": "what is recorded",
    "debug.": "what is recorded; verify's own measure finds what is wrong",
    "launch.": "a run itself reads none of it",
}

# Keys that have to fit each other: `_sizes` draws all of them, for the layout that was drawn.
SIZES = (
    *("num_layers", "dim", "num_heads", "num_kv_heads", "head_dim", "ffn_dim", "vocab_size"),
    *("max_seq_len", "num_experts", "active_experts", "expert_dim"),
)
BATCH = (
    *("data.vocab_size", "train.seq_len", "train.global_batch_size", "train.microbatch_size"),
    *("train.eval_sequences", "pipeline.layers_per_stage"),
)

# Keys whose type does not say which values make sense.
VALUES: dict[str, tuple[str, ...]] = {
    "model.kind": tuple(FAMILIES),
    "train.objective": tuple(OBJECTIVES),
    "lora.rank": ("2", "3"),
    "lora.targets": ("q_proj,v_proj", "o_proj,down_proj", "k_proj", "gate_proj,up_proj"),
    "optim.name": tuple(OPTIMIZERS),
    "optim.schedule": tuple(RATES),
    "optim.warmup_steps": ("0", "1"),
    "parallel.dp_replicate": ("2", "3"),
    "parallel.dp_shard": ("2", "3", "4"),
    "parallel.tp": ("2", "3", "4"),
    "parallel.pp": ("2", "3", "4"),
    "parallel.cp": ("2", "3", "4"),
    "parallel.ep": ("2", "4"),
    "pipeline.schedule": tuple(SCHEDULES),
    "parallel.reshard_after_forward": ("always", "never", "2"),
    "parallel.param_persistence_threshold": ("1", "70", "100000"),
    "pipeline.layers_per_stage": ("any",),  # drawn with the sizes
    "precision.float8_exclude": ("*.o_proj", "*.down_proj,*.q_proj"),
}

# What has no effect without something else, which is drawn with it.
NEEDS: dict[str, dict[str, str]] = {
    "model.rope_scaling": {"model.kind": "llama"},
    "model.rope_factor": {"model.rope_scaling": "true"},
    "model.rope_low_freq_factor": {"model.rope_scaling": "true"},
    "model.rope_high_freq_factor": {"model.rope_scaling": "true"},
    "model.rope_original_context": {"model.rope_scaling": "true"},
    "train.dpo_beta": {"train.objective": "dpo"},
    "train.objective=dpo": {"data.format": "preferences"},
    "data.format=preferences": {"train.objective": "dpo"},
    "lora.alpha": {"lora.rank": "2"},
    "lora.rank_stabilized": {"lora.rank": "2"},
    "lora.targets": {"lora.rank": "2"},
    "lora.quantize": {"lora.rank": "2"},
    "optim.momentum": {"optim.name": "muon"},
    "parallel.pp": {"model.tied_embeddings": "false"},
    "pipeline.schedule": {"parallel.pp": "2"},
    "parallel.sequence_parallel": {"parallel.tp": "2"},
    "parallel.cp_method": {"parallel.cp": "2"},
    "parallel.cp_load_balance": {"parallel.cp": "2"},
    "parallel.mesh_order": {"parallel.pp": "2", "parallel.dp_replicate": "2"},
    "parallel.ep": {"model.kind": "moe", "parallel.dp_shard": "2"},
    "parallel.reshard_after_forward": {"parallel.dp_shard": "2"},
    "parallel.reshard_after_forward=2": {"parallel.dp_shard": "4"},
    "parallel.gradient_sync": {"parallel.dp_shard": "2"},
    "parallel.hierarchical_gather": {"parallel.dp_shard": "4"},
    "parallel.fsdp_prefetch": {"parallel.dp_shard": "2"},
    "parallel.param_persistence_threshold": {"parallel.dp_shard": "2"},
    "pipeline.stages_per_rank": {"parallel.pp": "2", "pipeline.schedule": "Interleaved1F1B"},
    "pipeline.balance": {"parallel.pp": "2"},
    "pipeline.layers_per_stage": {"parallel.pp": "2"},
    "precision.float8": {"precision.float8_small": "true"},
    "precision.float8_exclude": {"precision.float8": "tensorwise"},
    "activation_checkpoint.every_n_layers": {"activation_checkpoint.mode": "full"},
    "activation_checkpoint.recompute_every_n_matmuls": {"activation_checkpoint.mode": "selective"},
    "activation_checkpoint.memory_budget": {"activation_checkpoint.mode": "budget"},
    "activation_checkpoint.offload_prefetch": {"activation_checkpoint.offload": "true"},
}

# Drawn by chance in so many of a thousand jobs.  Numbers that are not counts are in no goal, as
# they meet the other keys in one place only.
USUALLY, NUMBERS = 120, 60
CHANCE = {
    "compile.enable": 4,
    "precision.float8": 60,
    "lora.rank": 60,
    "train.world_size_invariant": 60,
}

AXES = ("dp_shard", "tp", "pp", "cp", "dp_replicate")


# --------------------------------------------------------------------------- techniques


def excluded(key: str) -> str:
    """Return why a key is not drawn; empty if it is."""
    return next((why for name, why in EXCLUDED.items() if key.startswith(name)), "")


@cache
def keys() -> dict[str, FieldInfo]:
    """Return every ``section.key`` of a job, with the fields of weft's own families."""
    found = {
        f"{name}.{key}": f for name, s in SECTIONS.items() for key, f in s.model_fields.items()
    }
    for family in FAMILIES.values():
        for name, info in family.config.model_fields.items():
            found.setdefault(f"model.{name}", info)
    return found


def families_of(key: str) -> list[str]:
    """Return the families that have a field ``model.<name>``; all of other keys."""
    section, _, name = key.partition(".")
    if section != "model" or name in SECTIONS["model"].model_fields:
        return list(FAMILIES)
    return [kind for kind, family in FAMILIES.items() if name in family.config.model_fields]


@cache
def candidates(key: str) -> tuple[str, ...]:
    """Return the values of a key that are tried instead of its default; none: it is not known."""
    info = keys()[key]
    found = VALUES.get(key) or tuple(_options(info.annotation, info.metadata, info.default))
    # Of a model's field each preset has its own default.
    both = key.startswith("model.") and info.annotation is bool
    return tuple(text for text in found if both or text != _text(info.default))


def _options(annotation: Any, rules: Sequence[Any], default: Any) -> Iterator[str]:
    """The values that follow from a type."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [rule for arg in args[1:] for rule in getattr(arg, "metadata", [arg])]
        yield from _options(args[0], [*rules, *inner], default)
    elif origin in (Union, UnionType):
        for arg in args:
            yield from _options(arg, rules, default)
    elif origin is Literal:
        yield from map(_text, args)
    elif annotation is bool:
        yield from ("true", "false")
    elif annotation is int:
        yield from (_text(n) for n in (0, 1, 2, 3) if _allowed(n, rules))
    elif annotation is float:
        about = default if isinstance(default, float) and default else 1.0
        yield from (_text(x) for x in (about / 2, about * 1.5) if _allowed(x, rules))


def _is_number(key: str) -> bool:
    """Return True if a key is a float."""
    return keys()[key].annotation is float


def _allowed(number: float, rules: Sequence[Any]) -> bool:
    bounds = {"ge": number.__ge__, "gt": number.__gt__, "le": number.__le__, "lt": number.__lt__}
    return all(
        holds(type(number)(getattr(rule, name)))
        for rule in rules
        for name, holds in bounds.items()
        if getattr(rule, name, None) is not None
    )


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def technique(key: str, text: str) -> str:
    """Return what a key and its value count as: a number is one technique, whichever it is."""
    number = key != "parallel.reshard_after_forward" and re.fullmatch(r"[-+.\de]+", text)
    return (
        key if number or key in ("lora.targets", "pipeline.layers_per_stage") else f"{key}={text}"
    )


@cache
def techniques() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return each technique with its key, and the values that make it."""
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    sizes = {f"model.{name}" for name in SIZES} | {*BATCH, "train.seed"} - {
        "pipeline.layers_per_stage"
    }
    for key in keys():
        if not excluded(key) and key not in sizes:
            for text in candidates(key):
                name = technique(key, text)
                found[name] = (key, (*found.get(name, ("", ()))[1], text))
    return found


@cache
def goals(seed: int) -> list[tuple[str, str]]:
    """Return every pair of techniques of different keys, in an order of the seed."""
    kinds = [name for name, (key, _) in techniques().items() if not _is_number(key)]
    pairs = [
        pair
        for pair in itertools.combinations(kinds, 2)
        if techniques()[pair[0]][0] != techniques()[pair[1]][0]
    ]
    random.Random(f"goals {seed}").shuffle(pairs)
    return pairs


# --------------------------------------------------------------------------- drawing


@dataclass
class Drawn:
    """A legal job."""

    overrides: Draw
    resume: Draw  # of the layout that resumes from a checkpoint; empty: none does
    goal: tuple[str, str]
    refusals: list[dict[str, Any]] = field(default_factory=list)  # met on the way


def draw_job(seed: int, index: int, pinned: Mapping[str, str], ranks: int) -> Drawn:
    """Draw the job of an index; it depends on the arguments only.

    Args:
        pinned: overrides that every job has.
        ranks: at most so many.

    Raises:
        InvalidConfig: if what is pinned is not possible.
    """
    rng = random.Random(f"job {seed} {index}")
    pairs = goals(seed)
    goal = pairs[index % len(pairs)]
    wanted: Draw = dict(pinned)
    for key, text in pinned.items():
        _include(wanted, key, text, rng)
    for name in goal:
        key, values = techniques()[name]
        _include(wanted, key, rng.choice(values), rng)
    overrides = dict(wanted)
    _include_layout(overrides, ranks, rng)
    for key in dict.fromkeys(key for key, _ in techniques().values()):
        usually = 0 if key in DEGREES else NUMBERS if _is_number(key) else USUALLY
        if rng.randrange(1000) < CHANCE.get(key, usually):
            _include(overrides, key, rng.choice(candidates(key)), rng, force=False)
    shards = math.prod(int(overrides.get(f"parallel.{axis}", 1)) for axis in ("dp_shard", "cp"))
    if overrides.get("model.kind") == "moe" and shards % 2 == 0 and rng.random() < 0.5:
        overrides.setdefault("parallel.ep", "2")
    overrides = ALWAYS | {"train.seed": str(rng.randrange(4))} | overrides
    drawn = Drawn({}, {}, goal)
    drawn.overrides, case = _settle(overrides, [pinned, dict(wanted)], ranks, rng, drawn.refusals)
    if rng.random() < 1 / 3:
        drawn.resume = _draw_resume(case, ranks, rng)
    return drawn


ALWAYS = {"run.device": "cpu", "train.seed": "1"}  # every job has them, or other values
DEGREES = tuple(f"parallel.{axis}" for axis in (*AXES, "ep"))


def _include(draw: Draw, key: str, text: str, rng: random.Random, force: bool = True) -> None:
    """Add a key with what it needs.  What is there stays, and without ``force`` so does all that
    would have to change."""
    needs = NEEDS.get(f"{key}={text}", NEEDS.get(key, {}))
    kinds = families_of(key)
    known = draw.get("model.kind", "llama")
    degrees = {name: int(value) for name, value in needs.items() if name in DEGREES}
    lacks = any(int(draw.get(name, 1)) < value for name, value in degrees.items())
    clash = any(draw.get(name, v) != v for name, v in needs.items() if name not in degrees)
    more = any(name not in draw for name in needs if name not in degrees) and rng.random() < 0.7
    if not force and (key in draw or clash or lacks or more or known not in kinds):
        return
    draw.setdefault(key, text)
    if "model.kind" not in draw and known not in kinds:
        draw["model.kind"] = rng.choice(kinds)
    for name, value in needs.items():
        if name not in draw:
            _include(draw, name, value, rng)


def _include_layout(draw: Draw, ranks: int, rng: random.Random) -> None:
    """Spread some number of ranks over the axes, beside those that are there."""
    world = rng.choice([n for n in (2, 2, 3, 4, 4, 4, 4, 6, 8, 8) if n <= ranks])
    there = math.prod(int(draw.get(f"parallel.{axis}", 1)) for axis in AXES)
    while there * 2 <= world:
        axis = rng.choice([axis for axis in AXES if f"parallel.{axis}" not in draw] or [""])
        if not axis:
            break
        most = world // there
        degree = rng.choice([n for n in (2, 2, 3, 4) if n <= most])
        _include(draw, f"parallel.{axis}", str(degree), rng)
        there *= degree
    draw.setdefault("parallel.dp_shard", "1")


def _settle(
    draw: Draw,
    levels: Sequence[Mapping[str, str]],
    ranks: int,
    rng: random.Random,
    refusals: list[dict[str, Any]],
) -> tuple[Draw, Case]:
    """Put keys back to their defaults until the rules accept the job.

    Args:
        levels: keys that are put back last, and later than those.
    """
    attempt = 0
    while True:
        job = _with_sizes(draw, random.Random(f"{rng.random()}"))
        try:
            return job, case_of(job, ranks)
        except InvalidConfig as error:
            problem = error.problems[0]
            attempt += 1
            named = [key for key in (problem.key, *problem.depends) if key in draw]
            sized = {f"model.{name}" for name in SIZES} | set(BATCH)
            if attempt % 4 and sized.intersection((problem.key, *problem.depends)):
                continue  # other sizes may do
            refusals.append(_refusal(problem, draw, named))
            for among, level in itertools.product((named, list(draw)), reversed(levels)):
                if free := [key for key in among if key not in level and key not in ALWAYS]:
                    break
            else:
                raise
            del draw[rng.choice(free)]


def _refusal(problem: ConfigError, draw: Draw, named: Sequence[str]) -> dict[str, Any]:
    """What a rule said of which keys; numbers in it are of this job only."""
    rule = re.sub(r"\d+", "N", problem.rule)
    return {"key": problem.key, "with": {key: draw[key] for key in named}, "rule": rule}


def case_of(overrides: Mapping[str, str], ranks: int, steps: int = 2) -> Case:
    """Make the case that ``weft verify`` would run.

    Raises:
        InvalidConfig: if the job is not legal.
    """
    job = read_recipe(RECIPE, list(overrides.items()))
    plan = plan_of_recipe(job)
    if plan.world_size > ranks:
        degrees = tuple(f"parallel.{axis}" for axis in AXES)
        rule = f"takes more than {ranks} ranks"
        raise InvalidConfig([ConfigError("--ranks", plan.world_size, rule, depends=degrees)])
    return shrink(job, plan, ranks, steps, list(overrides))


def _draw_resume(case: Case, ranks: int, rng: random.Random) -> Draw:
    """Draw a legal layout that the job can resume in."""
    model, draw = case.job.model, Draw()
    _include_layout(draw, ranks, rng)
    never = (*DEGREES, "compile.enable", "pipeline.layers_per_stage")
    for key in dict.fromkeys(key for key, _ in techniques().values()):
        usually = USUALLY if key.startswith(LAYOUT) and key not in never else 0
        if rng.randrange(1000) < usually:
            _include(draw, key, rng.choice(candidates(key)), rng, force=False)
    draw = {key: text for key, text in draw.items() if key.startswith(LAYOUT)}
    if model.kind == "moe" and rng.random() < 0.5:
        draw["parallel.ep"] = "2"
    while True:
        try:
            resume_layout(case, list(draw.items()), ranks)
        except InvalidConfig as error:
            problem = error.problems[0]
            named = [key for key in (problem.key, *problem.depends) if key in draw]
            del draw[rng.choice(named or list(draw))]
        else:
            return draw or {"parallel.dp_shard": "1"}


# --------------------------------------------------------------------------- sizes


def _with_sizes(draw: Draw, rng: random.Random) -> Draw:
    """The job with odd, small sizes that fit its layout."""
    kind = draw.get("model.kind", "llama")
    family = FAMILIES[kind]
    tp, pp, cp, shard, replicate, ep = (
        int(draw.get(f"parallel.{axis}", 1))
        for axis in ("tp", "pp", "cp", "dp_shard", "dp_replicate", "ep")
    )
    float8, unit = draw.get("precision.float8", "none"), 1
    if float8 != "none":
        unit = required_multiple(float8)
    quantized = draw.get("lora.quantize", "none") != "none"
    kv_heads = rng.choice([n for n in (1, 2, 3, 4) if n % tp == 0 or tp % n == 0])
    over = tp * (cp if draw.get("parallel.cp_method") == "ulysses" else 1)
    heads = kv_heads * rng.choice([n for n in range(1, 17) if kv_heads * n % over == 0][:3])
    head_dim = unit if unit > 1 else rng.choice((2, 4, 6, 8, 10, 16))
    dim = (
        heads * head_dim
        if kind == "llama"
        else unit * rng.choice((2, 3) if unit > 1 else (14, 24, 33))
    )
    ffn_unit = unit
    if quantized:  # whole blocks on each rank
        kv_heads, heads, head_dim, dim, ffn_unit = tp, 2 * tp, QUANT_BLOCK_SIZE // 2, QUANT_BLOCK_SIZE * tp, QUANT_BLOCK_SIZE
    if draw.get("optim.state_dtype") == "8bit" and not quantized and rng.random() < 0.7:
        # Rows of whole blocks, on each rank; others keep float32 moments.
        head_dim = ffn_unit = MOMENT_BLOCK_SIZE
        dim = heads * head_dim if kind == "llama" else MOMENT_BLOCK_SIZE * rng.choice((1, 3))
    several = draw.get("pipeline.schedule", "1F1B") not in ("GPipe", "1F1B")
    per_rank = int(draw.get("pipeline.stages_per_rank", 2 if several else 1))
    stages = pp * per_rank if pp > 1 else 1
    layers = rng.choice([max(1, stages - 1), stages, stages + 1]) if pp > 1 else rng.randint(1, 4)
    if kind == "moe":
        layers = max(layers, 1 + int(draw.get("model.dense_layers", "0")))
    seq_unit = math.lcm(tp, 2 * cp, unit * cp)
    seq_len = seq_unit * rng.choice([n for n in range(1, 25) if seq_unit * n >= 8][:4])
    rows = rng.choice((1, 2, 3, 5))
    if pp > 1:
        rows = rng.choice((stages, stages + 1, 2 * stages, 2 * pp))
    experts = ep * rng.choice([n for n in (1, 2, 3, 5) if n * ep > 1])
    sizes: dict[str, Any] = {
        "num_layers": layers,
        "dim": dim,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn_dim": tp * (ffn_unit * rng.choice((1, 3) if ffn_unit > 1 else (5, 9, 16))),
        "vocab_size": -(-rng.choice((257, 261, 288)) // tp) * tp,
        "max_seq_len": seq_len,
        "num_experts": experts,
        "active_experts": rng.randint(1, min(3, experts)),
        "expert_dim": tp * (ffn_unit if ffn_unit == MOMENT_BLOCK_SIZE else rng.choice((3, 8, 12))),
    }
    job = dict(draw)
    job.setdefault("model.kind", kind)
    job.setdefault("model.preset", next(iter(family.presets)))
    for name, size in sizes.items():
        if name in family.config.model_fields:
            job.setdefault(f"model.{name}", str(size))
    batch = rows * shard * replicate
    job.setdefault("parallel.dp_shard", "1")
    job.setdefault("data.vocab_size", "257")
    job.setdefault("train.seq_len", str(seq_len))
    job.setdefault("train.global_batch_size", str(batch))
    if rng.random() < 0.5 and "train.microbatch_size" not in job:
        job["train.microbatch_size"] = str(rng.randint(1, min(rows, 3)))
    job.setdefault("train.eval_sequences", str(rng.randint(1, batch + 2)))
    if draw.get("pipeline.layers_per_stage") == "any":
        cuts = sorted(rng.randint(0, layers) for _ in range(stages - 1))
        counts = [end - begin for begin, end in itertools.pairwise([0, *cuts, layers])]
        job["pipeline.layers_per_stage"] = f"[{', '.join(map(str, counts))}]"
    return job
