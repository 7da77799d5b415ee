"""Draw random valid jobs for `weft.tools.verify_fuzz`.

A job is a set of overrides of the recipe ``demo``.  The values of a key follow from its type in
`weft.config.schema` or in a family's configuration: the other value of a bool, the other names of
a Literal, some numbers within the bounds.  `VALUES` lists keys whose type is not enough, `SIZES`
keys that must fit each other, and `EXCLUDED` keys that cannot change the computation.  A new key
needs an entry only if its type is not enough.

A *technique* is a key with one of its values, or a number other than the default.  Each job has a
*goal*: two techniques to combine; all indices together cover every pair.  The other keys are drawn
at random.  While the rules reject the job, a key that they name returns to its default, those of
the goal last.  The rejections are recorded: they show which techniques can be combined.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from weft.config.errors import ConfigError, InvalidConfig
from weft.config.schema import PAIR_OBJECTIVES, SECTIONS
from weft.models import FAMILIES
from weft.models.decoder_config import DecoderConfig
from weft.optim.optimizer import OPTIMIZERS
from weft.optim.optimizer import SCHEDULES as RATES
from weft.plan.pipeline_schedule import SCHEDULES
from weft.tools.job_sizes import AXES, OverrideMap, base_model, draw_sizes, parallel_degrees
from weft.tools.shrink import LAYOUT_KEYS, Case, plan_for_recipe, plan_resume_layout, shrink
from weft.tools.verify import format_layout, read_recipe
from weft.train.loss import OBJECTIVES

RECIPE = "demo"

# Prefixes of keys that are not drawn, and why.
EXCLUDED = {
    "run.": "verify sets directory, device and ranks",
    **dict.fromkeys(
        ("model.preset", "model.path", "model.config"), "a model's sizes are drawn one by one"
    ),
    "model.score_head": "train.objective=reward sets it",
    "lora.path": "verify trains random adapters",
    **dict.fromkeys(
        (
            *("data.path", "data.mixture", "data.text_field", "data.tokenizer"),
            *("data.chat_template", "data.validation_path", "data.validation_fraction"),
            *("data.overlong",),
            *("data.chat_template_args", "data.train_turns", "data.train_empty_reasoning"),
            *("data.fields", "data.roles", "data.add_tokens", "data.add_special_tokens"),
            *("data.invalid_utf8", "data.cache_dir"),
            *("data.node_cache_dir", "data.node_cache_gib", "data.shuffle_span_gib"),
        ),
        "verify trains on random tokens",
    ),
    **dict.fromkeys(("train.steps", "train.epochs"), "--steps sets the number of steps"),
    **dict.fromkeys(
        ("train.eval_interval", "train.early_stopping", "train.early_stopping_delta"),
        "verify evaluates once, at the end",
    ),
    "parallel.async_tp": "needs GPUs that reach each other's memory",
    "parallel.symmetric_memory": "needs GPUs that reach each other's memory",
    "precision.float8_small": "follows precision.float8, because all matrices are small here",
    "compile.cache_dir": "a directory",
    "compile.cuda_graphs": "needs a GPU",
    "checkpoint.": "--resume-layout saves and loads a checkpoint",
    "resilience.": "affects failures only",
    **dict.fromkeys(("monitor.", "profile.", "debug."), "affects records only"),
    "launch.": "the run does not read it",
}

# Keys that must fit each other: `_draw_sizes` draws all of them for a layout.
SIZES = (
    *("num_layers", "dim", "num_heads", "num_kv_heads", "head_dim", "ffn_dim", "vocab_size"),
    *("max_seq_len", "num_experts", "active_experts", "expert_dim", "expert_groups"),
    *("active_groups", "q_rank", "rope_head_dim", "value_head_dim"),
    *("rope_short_factors", "rope_long_factors"),
)
BATCH = (
    *("data.vocab_size", "train.seq_len", "train.global_batch_size", "train.microbatch_size"),
    *("train.eval_sequences", "pipeline.layers_per_stage"),
)
FREE_FORM = (
    *("lora.targets", "lora.modules_to_save", "lora.trainable_tokens"),
    *("optim.groups", "pipeline.layers_per_stage"),
)
SIZED_KEYS = {*(f"model.{name}" for name in SIZES), *BATCH}

MUON_GROUPS = '[{params=["*o_proj*"], optimizer="adamw", beta2=0.9}, {params=["*"], momentum=0.8}]'
# Keys whose type does not say which values make sense.
VALUES: dict[str, tuple[str, ...]] = {
    "model.kind": tuple(FAMILIES),
    "model.kv_rank": ("6", "9"),
    "model.layer_pattern": ("L", "LG", "LLG"),
    "model.rope_pattern": ("RN", "RRN"),
    "model.sliding_window": ("1", "3", "9"),
    "model.attention_chunk": ("3", "8"),
    "model.temperature_interval": ("4",),
    "model.attention_scale": ("0.2",),
    "model.attention_softcap": ("2",),
    "model.logit_softcap": ("3",),
    "model.rope_local_theta": ("300",),
    "model.rope_fraction": ("0.5",),
    "model.rope_original_context": ("8",),
    "model.expert_interval": ("1", "2"),
    "model.expert_limit": ("1.5",),
    "model.mtp_layers": ("1", "2"),
    "train.objective": tuple(OBJECTIVES),
    "train.preference_beta": ("0.05", "0.5"),
    "train.preference_label_smoothing": ("0.1", "0.3"),
    "train.sft_weight": ("0.3", "1"),
    "train.reward_center_coef": ("0.1",),
    "lora.rank": ("2", "3"),
    "lora.targets": (
        *("q_proj,v_proj", "o_proj,down_proj", "k_proj", "gate_proj,up_proj"),
        *("experts.up_proj,o_proj", "embed_tokens,q_proj", "lm_head,up_proj"),
    ),
    "lora.modules_to_save": ("embed_tokens", "lm_head", "embed_tokens,lm_head"),
    "lora.trainable_tokens": ("256", "3,17,101,200"),
    "lora.lr_ratio": ("4",),
    "lora.dropout": ("0.2",),
    "optim.name": tuple(OPTIMIZERS),
    "optim.schedule": tuple(RATES),
    "optim.warmup_steps": ("0", "1"),
    "optim.groups": (
        '[{params=["*_proj*"], lr_mult=3, weight_decay=0.3}]',
        '[{params=["layers.0.*"], lr_mult=0.3}, {params=["*"], lr_mult=2, weight_decay=0}]',
        '[{params=["*norm*", "embed*"], lr_mult=0.5, weight_decay=0.5, beta1=0.5, beta2=0.8}]',
        '[{params=["*norm*", "embed*", "*.k_proj*", "layers.0.*up_proj*"], lr_mult=0}]',
        MUON_GROUPS,
    ),
    "optim.max_grad_norm": ("0", "0.5", "1.5"),
    "optim.qk_clip_threshold": ("0.003", "0.02"),  # below the logits of initial weights
    "parallel.dp_replicate": ("2", "3"),
    **{f"parallel.{axis}": ("2", "3", "4") for axis in ("dp_shard", "tp", "pp", "cp")},
    "parallel.ep": ("2", "4"),
    "parallel.ep_dispatch": ("padded",),
    "parallel.ep_capacity_factor": ("1", "1.3", "9"),
    "parallel.ep_chunks": ("2", "3"),
    "parallel.etp": ("1",),
    "pipeline.schedule": tuple(SCHEDULES),
    "parallel.reshard_after_forward": ("always", "never", "2"),
    "parallel.param_persistence_threshold": ("1", "70", "100000"),
    "pipeline.layers_per_stage": ("any",),  # drawn with the sizes
    "precision.float8_exclude": ("*.o_proj", "*.down_proj,*.q_proj"),
}

# Keys that a key (or a key with a value) needs to have an effect.
REQUIREMENTS: dict[str, dict[str, str]] = {
    **{
        f"model.rope_{name}": {"model.rope_scaling": "llama3"}
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_context")
    },
    **{
        f"model.rope_{name}": {"model.rope_scaling": "yarn"}
        for name in ("beta_fast", "beta_slow", "truncate", "magnitude")
    },
    "model.layer_pattern": {"model.sliding_window": "5"},
    "model.sliding_window": {"model.layer_pattern": "LG"},
    "model.attention_chunk": {"model.layer_pattern": "LG"},
    "model.rope_local_theta": {"model.layer_pattern": "LG"},
    "model.temperature_interval": {"model.rope_pattern": "RN"},
    "model.temperature_scale": {"model.temperature_interval": "4"},
    "model.norm_bias": {"model.norm": "layer"},
    **{
        f"model.{name}": {"model.kind": "moe"}
        for name in (
            *("shared_experts", "dense_layers", "expert_interval", "score", "score_selected"),
            *("renormalize", "route_scale", "scaled_expert_inputs", "router_bias"),
            *("expert_biases", "expert_limit", "balance_rate"),
            *("router_aux_loss_coef", "router_z_loss_coef"),
        )
    },
    "model.router_aux_loss_scope": {"model.router_aux_loss_coef": "0.1"},
    "train.mtp_weight": {"model.mtp_layers": "1"},
    **{
        f"train.{name}": {"train.objective": "dpo"}
        for name in ("preference_beta", "preference_label_smoothing", "sft_weight")
    },
    "train.simpo_gamma": {"train.objective": "simpo"},
    "train.desirable_weight": {"train.objective": "kto"},
    "train.undesirable_weight": {"train.objective": "kto"},
    "train.objective=kto": {"data.format": "unpaired"},
    "data.format=unpaired": {"train.objective": "kto"},
    "train.reward_center_coef": {"train.objective": "reward"},
    **{
        f"train.objective={name}": {"data.format": "preferences"}
        for name in (*PAIR_OBJECTIVES, "reward")
    },
    "data.format=preferences": {"train.objective": "dpo"},
    **{
        f"lora.{name}": {"lora.rank": "2"}
        for name in (
            "alpha",
            "rank_stabilized",
            "targets",
            "modules_to_save",
            "trainable_tokens",
            "quantize",
            "dora",
            "lr_ratio",
            "dropout",
        )
    },
    "optim.momentum": {"optim.name": "muon"},
    f"optim.groups={MUON_GROUPS}": {"optim.name": "muon"},
    "pipeline.schedule": {"parallel.pp": "2"},
    "parallel.sequence_parallel": {"parallel.tp": "2"},
    "parallel.cp_method": {"parallel.cp": "2"},
    "parallel.cp_load_balance": {"parallel.cp": "2"},
    "parallel.cp_load_balance=documents": {"parallel.cp": "2", "data.packing": "documents"},
    "parallel.mesh_order": {"parallel.pp": "2", "parallel.dp_replicate": "2"},
    "parallel.ep": {"model.kind": "moe", "parallel.dp_shard": "2"},
    "parallel.ep_dispatch": {"parallel.ep": "2"},
    "parallel.ep_capacity_factor": {"parallel.ep_dispatch": "padded"},
    "parallel.ep_chunks": {"parallel.ep": "2"},
    "parallel.etp": {"model.kind": "moe", "parallel.tp": "2"},
    "parallel.reshard_after_forward": {"parallel.dp_shard": "2"},
    "parallel.reshard_after_forward=2": {"parallel.dp_shard": "4"},
    "parallel.gradient_sync": {"parallel.dp_shard": "2"},
    "parallel.hierarchical_gather": {"parallel.dp_shard": "4"},
    "parallel.fsdp_prefetch": {"parallel.dp_shard": "2"},
    "parallel.param_persistence_threshold": {"parallel.dp_shard": "2"},
    "pipeline.stages_per_rank": {"parallel.pp": "2", "pipeline.schedule": "Interleaved1F1B"},
    "pipeline.balance": {"parallel.pp": "2"},
    "pipeline.layers_per_stage": {"parallel.pp": "2"},
    "pipeline.defer_weight_gradients": {
        "parallel.pp": "2",
        "pipeline.schedule": "ZBVZeroBubble",
    },
    "pipeline.overlap_exchanges": {"pipeline.schedule": "DualPipeV", "parallel.ep": "2"},
    "precision.float8": {"precision.float8_small": "true"},
    "precision.float8_exclude": {"precision.float8": "tensorwise"},
    "activation_checkpoint.every_n_layers": {"activation_checkpoint.mode": "full"},
    "activation_checkpoint.recompute_every_n_matmuls": {"activation_checkpoint.mode": "selective"},
    "activation_checkpoint.memory_budget": {"activation_checkpoint.mode": "budget"},
    "activation_checkpoint.offload_prefetch": {"activation_checkpoint.offload": "true"},
}

# Probability of a key, in thousandths.  Most floats are in no goal, because they interact with
# other keys in one place only.
GOAL_NUMBERS = ("optim.qk_clip_threshold",)
DEFAULT_CHANCE, NUMBER_CHANCE = 120, 60
RARE_KEYS = ("precision.float8", "lora.rank")
CHANCE = {"compile.enable": 4, **dict.fromkeys(RARE_KEYS, 60)}

# --------------------------------------------------------------------------- techniques


def exclusion_reason(key: str) -> str:
    """Return why a key is not drawn; empty if it is."""
    return next((reason for name, reason in EXCLUDED.items() if key.startswith(name)), "")


@cache
def list_keys() -> dict[str, FieldInfo]:
    """Return every ``section.key`` of a job and of weft's own model families."""
    keys = {f"{name}.{key}": f for name, s in SECTIONS.items() for key, f in s.model_fields.items()}
    fields = DecoderConfig.model_fields.items()
    return keys | {f"model.{name}": info for name, info in fields}


@cache
def candidate_values(key: str) -> tuple[str, ...]:
    """Return the values to draw for a key; empty if its type does not say."""
    info = list_keys()[key]
    values = VALUES.get(key) or tuple(
        _format_value(value)
        for value in _guess_values(info.annotation, info.default)
        if _is_valid(info, value)
    )
    # Each preset of a model has its own defaults.
    with_default = key.startswith("model.") and info.annotation is bool
    return tuple(text for text in values if with_default or text != _format_value(info.default))


def _guess_values(annotation: Any, default: Any) -> Iterator[Any]:
    """Yield values of a type, some of which may be out of bounds."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Annotated, Union, UnionType):
        for arg in args:
            yield from _guess_values(arg, default)
    elif origin is Literal:
        yield from args
    elif annotation is bool:
        yield from (True, False)
    elif annotation is int:
        yield from (0, 1, 2, 3)
    elif annotation is float:
        base = default if isinstance(default, float) and default else 1.0
        yield from (base / 2, base * 1.5)


def _is_valid(info: FieldInfo, value: Any) -> bool:
    try:
        TypeAdapter(info.rebuild_annotation()).validate_python(value)
    except ValidationError:
        return False
    return True


def _is_number(key: str) -> bool:
    """Return True if a key is a float that is in no goal."""
    return list_keys()[key].annotation is float and key not in GOAL_NUMBERS


def _format_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def technique_name(key: str, text: str) -> str:
    """Return the technique of a key and value; all numbers of a key are one technique."""
    is_number = key != "parallel.reshard_after_forward" and re.fullmatch(r"[-+.\de]+", text)
    return key if is_number or key in FREE_FORM else f"{key}={text}"


@cache
def list_techniques() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return each technique with its key and values."""
    techniques: dict[str, tuple[str, tuple[str, ...]]] = {}
    others = SIZED_KEYS - {"pipeline.layers_per_stage"} | {"train.seed"}
    for key in list_keys():
        if not exclusion_reason(key) and key not in others:
            for text in candidate_values(key):
                name = technique_name(key, text)
                techniques[name] = (key, (*techniques.get(name, ("", ()))[1], text))
    return techniques


@cache
def list_goals(seed: int) -> list[tuple[str, str]]:
    """Return every pair of techniques of different keys, shuffled by the seed."""
    keys = {name: key for name, (key, _) in list_techniques().items() if not _is_number(key)}
    pairs = [(a, b) for a, b in itertools.combinations(keys, 2) if keys[a] != keys[b]]
    random.Random(f"goals {seed}").shuffle(pairs)
    return pairs


# --------------------------------------------------------------------------- drawing


@dataclass(frozen=True)
class RandomJob:
    """A valid random job, as ``weft verify`` runs it."""

    seed: int
    index: int
    goal: tuple[str, ...]
    overrides: OverrideMap  # of the recipe `RECIPE`
    resume: OverrideMap  # keys of the layout that resumes from a checkpoint; empty: none
    ranks: int  # maximum number
    steps: int
    refusals: list[dict[str, Any]] = field(default_factory=list)  # rejected drafts of it

    @property
    def name(self) -> str:
        """Layout and goal of the job."""
        return f"{format_layout(parallel_degrees(self.overrides, AXES))}; {', '.join(self.goal)}"

    @property
    def command(self) -> str:
        """The command that verifies the job."""
        words = ["weft", "verify", RECIPE]
        if self.steps != 3:
            words += ["--steps", str(self.steps)]
        if self.ranks != 8:
            words += ["--ranks", str(self.ranks)]
        if self.resume:
            layout = ",".join(f"{key}={text}" for key, text in self.resume.items())
            words += ["--resume-layout", layout]
        words += [word for key, text in self.overrides.items() for word in (f"--{key}", text)]
        return shlex.join(words)


def draw_job(
    seed: int, index: int, pinned: Mapping[str, str], ranks: int, steps: int = 2
) -> RandomJob:
    """Draw the job of an index, a pure function of the arguments.

    Args:
        seed: seed of the sequence of jobs.
        index: index of the job in the sequence.
        pinned: overrides that every job has.
        ranks: maximum number of ranks.
        steps: optimizer steps of the job.

    Raises:
        InvalidConfig: if the pinned overrides are invalid.
    """
    rng = random.Random(f"job {seed} {index}")
    pairs = list_goals(seed)
    goal = pairs[index % len(pairs)]
    required: OverrideMap = dict(pinned)
    for key, text in pinned.items():
        _add_override(required, key, text, rng)
    for name in goal:
        key, values = list_techniques()[name]
        _add_override(required, key, rng.choice(values), rng)
    overrides = dict(required)
    _add_layout(overrides, ranks, rng)
    _add_random_keys(overrides, _chance, rng)
    axes = ("dp_shard", "cp", *["tp"] * ("parallel.etp" in overrides))
    shards = math.prod(parallel_degrees(overrides, axes).values())
    if base_model(overrides).num_experts and shards % 2 == 0 and rng.random() < 0.5:
        overrides.setdefault("parallel.ep", "2")
    if "parallel.ep" in overrides and rng.random() < 0.5:  # rows do not fit: the step runs again
        overrides.setdefault("parallel.ep_dispatch", "padded")
        if overrides["parallel.ep_dispatch"] == "padded":
            overrides.setdefault("parallel.ep_capacity_factor", "1")
            if rng.random() < 0.4:  # the budget must hold for other sizes than those it saw
                overrides.setdefault("activation_checkpoint.mode", "budget")
    overrides = FIXED | {"train.seed": str(rng.randrange(4))} | overrides
    refusals: list[dict[str, Any]] = []
    overrides, case = _make_valid(overrides, [pinned, required], ranks, rng, refusals)
    resume = _draw_resume_layout(case, ranks, rng) if rng.random() < 1 / 3 else {}
    return RandomJob(seed, index, goal, overrides, resume, ranks, steps, refusals)


FIXED = {"run.device": "cpu", "train.seed": "1"}  # keys that every job sets
DEGREES = tuple(f"parallel.{axis}" for axis in (*AXES, "ep"))


def _chance(key: str) -> int:
    """Return the probability of a key, in thousandths."""
    default = NUMBER_CHANCE if _is_number(key) else DEFAULT_CHANCE
    return CHANCE.get(key, 0 if key in DEGREES else default)


def _add_random_keys(
    overrides: OverrideMap, chance: Callable[[str], int], rng: random.Random
) -> None:
    """Add random values of random keys."""
    for key in dict.fromkeys(key for key, _ in list_techniques().values()):
        if rng.randrange(1000) < chance(key):
            _add_override(overrides, key, rng.choice(candidate_values(key)), rng, force=False)


def _add_override(
    overrides: OverrideMap, key: str, text: str, rng: random.Random, force: bool = True
) -> None:
    """Add a key and the keys that it needs; present keys stay.

    Without ``force``, add nothing if that would conflict with a present key, and often nothing if
    it would need another key.
    """
    needs = REQUIREMENTS.get(f"{key}={text}", REQUIREMENTS.get(key, {}))
    others = {name: value for name, value in needs.items() if name not in DEGREES}
    lacks = any(int(overrides.get(name, 1)) < int(needs[name]) for name in needs.keys() - others)
    conflicts = any(overrides.get(name, value) != value for name, value in others.items())
    skips = not others.keys() <= overrides.keys() and rng.random() < 0.7
    if not force and (key in overrides or conflicts or lacks or skips):
        return
    overrides.setdefault(key, text)
    for name, value in needs.items():
        if name not in overrides:
            _add_override(overrides, name, value, rng)


def _add_layout(overrides: OverrideMap, ranks: int, rng: random.Random) -> None:
    """Distribute a random number of ranks over the axes that are not set."""
    world_size = rng.choice([n for n in (2, 2, 3, 4, 4, 4, 4, 6, 8, 8) if n <= ranks])
    size = math.prod(parallel_degrees(overrides, AXES).values())
    while size * 2 <= world_size:
        axis = rng.choice([axis for axis in AXES if f"parallel.{axis}" not in overrides] or [""])
        if not axis:
            break
        degree = rng.choice([n for n in (2, 2, 3, 4) if n <= world_size // size])
        _add_override(overrides, f"parallel.{axis}", str(degree), rng)
        size *= degree
    overrides.setdefault("parallel.dp_shard", "1")


def _make_valid(
    overrides: OverrideMap,
    levels: Sequence[Mapping[str, str]],
    ranks: int,
    rng: random.Random,
    refusals: list[dict[str, Any]],
) -> tuple[OverrideMap, Case]:
    """Return keys to their defaults until the rules accept the job.

    Args:
        overrides: keys of the drawn job.
        levels: keys that return last; those of the first level after all others.
        ranks: maximum number of ranks.
        rng: random generator of the job.
        refusals: gets an entry for each rejected job.
    """
    attempts = itertools.count(1)
    while True:
        job = draw_sizes(overrides, random.Random(f"{rng.random()}"))
        try:
            return job, make_case(job, ranks)
        except InvalidConfig as invalid:
            error = invalid.errors[0]
            if next(attempts) % 4 and _named_keys(error, SIZED_KEYS):
                continue  # other sizes may be valid
            named = _named_keys(error, overrides)
            rule = re.sub(r"\d+", "N", error.rule)  # without the numbers of this job
            refused = {key: overrides[key] for key in named}
            refusals.append({"key": error.key, "with": refused, "rule": rule})
            for keys, level in itertools.product((named, list(overrides)), reversed(levels)):
                if removable := [key for key in keys if key not in level and key not in FIXED]:
                    break
            else:
                raise
            del overrides[rng.choice(removable)]


def make_case(overrides: Mapping[str, str], ranks: int, steps: int = 2) -> Case:
    """Make the case that ``weft verify`` would run.

    Raises:
        InvalidConfig: if the job is not valid.
    """
    job = read_recipe(RECIPE, list(overrides.items()))
    plan = plan_for_recipe(job)
    if plan.world_size > ranks:
        degrees = tuple(f"parallel.{axis}" for axis in AXES)
        rule = f"needs more than {ranks} ranks"
        raise InvalidConfig([ConfigError("--ranks", plan.world_size, rule, depends=degrees)])
    return shrink(plan, ranks, steps, list(overrides))


def _draw_resume_layout(case: Case, ranks: int, rng: random.Random) -> OverrideMap:
    """Draw a layout that the job can resume in."""
    overrides = OverrideMap()
    _add_layout(overrides, ranks, rng)
    excluded = (*DEGREES, "compile.enable", "pipeline.layers_per_stage")
    _add_random_keys(
        overrides,
        lambda key: DEFAULT_CHANCE * (key.startswith(LAYOUT_KEYS) and key not in excluded),
        rng,
    )
    overrides = {key: text for key, text in overrides.items() if key.startswith(LAYOUT_KEYS)}
    if case.plan.model.num_experts and rng.random() < 0.5:
        overrides["parallel.ep"] = "2"
    while True:
        try:
            plan_resume_layout(case, list(overrides.items()), ranks)
        except InvalidConfig as error:
            named = _named_keys(error.errors[0], overrides)
            del overrides[rng.choice(named or list(overrides))]
        else:
            return overrides or {"parallel.dp_shard": "1"}


def _named_keys(error: ConfigError, overrides: Iterable[str]) -> list[str]:
    return [key for key in (error.key, *error.depends) if key in overrides]
