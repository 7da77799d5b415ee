"""Draw random valid jobs for `tests.fuzz`.

A job is a set of overrides of the recipe ``demo``.  The values of a key follow from its type in
`weft.config.schema` or in a family's configuration: the other value of a bool, the other names of
a Literal, some numbers within the bounds.  A key whose type is not enough, or that cannot change
the computation, declares its values (``tries``).  `SIZES` are keys that must fit each other.

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

from tests.job_sizes import AXES, OverrideMap, base_model, draw_sizes, parallel_degrees
from weft.config.errors import ConfigError, InvalidConfig
from weft.config.keys import Term, parse_condition
from weft.models import FAMILIES
from weft.planning.needs import key_facts, list_keys, list_settings
from weft.verification.shrink import Case, plan_for_recipe, plan_resume_layout, shrink
from weft.verification.verify import format_layout, read_recipe

RECIPE = "demo"

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

# Probability of a key, in thousandths.  Most floats are in no goal, because they interact with
# other keys in one place only.
GOAL_NUMBERS = ("optim.qk_clip_threshold",)
DEFAULT_CHANCE, NUMBER_CHANCE = 120, 60
RARE_KEYS = ("precision.float8", "lora.rank")
CHANCE = {"compile.enable": 4, **dict.fromkeys(RARE_KEYS, 60)}

# --------------------------------------------------------------------------- techniques


def candidate_values(key: str) -> tuple[str, ...]:
    """Return values of a key: those that it declares, or some of its type."""
    section, name = list_keys()[key]
    info = section.model_fields[name]
    if key == "model.kind":
        return tuple(FAMILIES)
    if tries := key_facts(key).tries:
        return tuple(tries)
    values = (v for v in _guess_values(info.annotation, info.default) if _is_valid(info, v))
    # Each preset of a model has its own defaults.
    with_default = key.startswith("model.") and info.annotation is bool
    default = _format_value(info.default)
    return tuple(text for text in map(_format_value, values) if with_default or text != default)


def is_drawn(key: str) -> bool:
    """Return True if random jobs may set the key: it changes the computation."""
    return key_facts(key).tries != {}


@cache
def needed_settings(key: str, text: str) -> dict[str, str]:
    """Return what a key with a value needs to be valid and to have an effect."""
    facts = key_facts(key)
    conditions = (facts.needs, (facts.tries or {}).get(text, ""))
    terms = [
        t for each in conditions for part in parse_condition(each) for t in list_settings(part)
    ]
    chosen = {term.name: _choose_value(term) for term in reversed(terms)}
    return {name: value for name, value in chosen.items() if value}


def _choose_value(term: Term) -> str:
    """Return a value of a key that fulfills a term; empty: none is known."""
    if term.sign == "=":
        return term.values[0]
    numbers = [str(int(float(term.values[0])) + 1)] if term.sign == ">" else []
    return next((v for v in (*candidate_values(term.name), *numbers) if term.holds(v)), "")


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
    section, name = list_keys()[key]
    return section.model_fields[name].annotation is float and key not in GOAL_NUMBERS


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
        if is_drawn(key) and key not in others:
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
    needs = needed_settings(key, text)
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


def is_layout(key: str) -> bool:
    """Return True if a run that resumes may change the key, as a part of its layout."""
    return key_facts(key).on_resume == "layout"


def _draw_resume_layout(case: Case, ranks: int, rng: random.Random) -> OverrideMap:
    """Draw a layout that the job can resume in."""
    overrides = OverrideMap()
    _add_layout(overrides, ranks, rng)
    excluded = (*DEGREES, "compile.enable", "pipeline.layers_per_stage")
    _add_random_keys(
        overrides,
        lambda key: DEFAULT_CHANCE * (is_layout(key) and key not in excluded),
        rng,
    )
    overrides = {key: text for key, text in overrides.items() if is_layout(key)}
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
