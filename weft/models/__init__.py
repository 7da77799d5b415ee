"""Model families: finding one by name, and a preset with the user's overrides.

A family is one file with a `Family` in it.  weft's own are listed in `FAMILIES`; a recipe
names a user's as ``model.kind = "package.module:attribute"``.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from weft.job import InvalidJob, Problem, Section, check_section, suggest
from weft.models import llama, mistral, moe, qwen3
from weft.models.huggingface import Counterpart

__all__ = ["FAMILIES", "Family", "load_family", "resolve_model"]


@dataclass(frozen=True)
class Family:
    """What weft needs to know of a kind of model.  `weft.models.llama` documents each entry.

    Every function takes the family's own configuration, an instance of ``config``.  Rules
    about several of its fields belong in ``check``, not in validators of ``config``.
    """

    config: type[Section]
    presets: Mapping[str, Section]
    build: Callable[[Any], nn.Module]
    check: Callable[[Any], list[Problem]]
    blocks: Callable[[Any], list[nn.Module]]
    init_of: Callable[[str, Any], llama.Init]
    decays: Callable[[str], bool]
    num_params: Callable[[Any], int]
    flops_per_token: Callable[[Any, int], float]
    # For tensor parallelism; without them a model cannot have it.
    sharding: Mapping[str, llama.Split] = field(default_factory=dict)
    split_sizes: tuple[str, ...] = ()
    # For pipeline parallelism; without them a model cannot have it.
    units: Callable[[Any, int], list[llama.Unit]] | None = None
    keep: Callable[[Any, range], None] | None = None
    # For a loss without whole logits; without it they are whole.
    without_head: Callable[[Any], Callable[[], Tensor]] | None = None
    # Of a mixture of experts: a model's routed layers (`weft.models.moe.MoE`), and of the
    # parameters those that a token has to do with.
    routed: Callable[[nn.Module], list[Any]] | None = None
    num_active_params: Callable[[Any], int] | None = None
    # For `weft export` and `weft import`; without it a model has neither.
    huggingface: Counterpart | None = None


LLAMA = Family(
    config=llama.LlamaConfig,
    presets=llama.PRESETS,
    build=llama.Llama,
    check=llama.check,
    blocks=llama.blocks,
    init_of=llama.init_of,
    decays=llama.decays,
    num_params=llama.num_params,
    flops_per_token=llama.flops_per_token,
    sharding=llama.SHARDING,
    split_sizes=llama.SPLIT_SIZES,
    units=llama.units,
    keep=llama.keep,
    without_head=llama.without_head,
    huggingface=llama.HUGGINGFACE,
)

# The others are Llama but for what they say themselves.
FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": replace(
        LLAMA,
        config=mistral.MistralConfig,
        presets=mistral.PRESETS,
        huggingface=mistral.HUGGINGFACE,
    ),
    "qwen3": replace(
        LLAMA,
        config=qwen3.Qwen3Config,
        presets=qwen3.PRESETS,
        build=qwen3.Qwen3,
        num_params=qwen3.num_params,
        sharding=qwen3.SHARDING,
        units=qwen3.units,
        huggingface=qwen3.HUGGINGFACE,
    ),
    "moe": Family(
        config=moe.MoeConfig,
        presets=moe.PRESETS,
        build=moe.Moe,
        check=moe.check,
        blocks=llama.blocks,
        init_of=moe.init_of,
        decays=llama.decays,
        num_params=moe.num_params,
        flops_per_token=moe.flops_per_token,
        sharding=moe.SHARDING,
        split_sizes=moe.SPLIT_SIZES,
        units=moe.units,
        keep=llama.keep,
        without_head=llama.without_head,
        routed=moe.routed,
        num_active_params=moe.num_active_params,
    ),
}


def load_family(kind: str) -> Family:
    """The family of that name, or the user's own at ``package.module:attribute``.

    Raises:
        InvalidJob: with a problem of ``model.kind`` if there is none.
    """
    if kind in FAMILIES:
        return FAMILIES[kind]
    module_name, colon, attribute = kind.partition(":")
    if not colon:
        remedy = f"{suggest(kind, FAMILIES)} or name your own as package.module:attribute"
        raise _invalid_kind(kind, "no such model family", remedy)
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise _invalid_kind(
            kind, "not a module's name before the colon", "package.module:attribute"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises
        rule = f"cannot be imported: {type(error).__name__}: {error}"
        missing = isinstance(error, ModuleNotFoundError)
        remedy = "its folder must be on PYTHONPATH" if missing else "mend the module"
        raise _invalid_kind(kind, rule, remedy) from error
    family = getattr(module, attribute, None)
    if not isinstance(family, Family):
        found = [name for name, value in vars(module).items() if isinstance(value, Family)]
        missing = attribute not in vars(module)
        rule = f"{module_name} has no {attribute!r}" if missing else "is not a weft.models.Family"
        remedy = suggest(attribute, found) if found else "make one: weft.models.Family(...)"
        raise _invalid_kind(kind, rule, remedy)
    return family


def _invalid_kind(kind: str, rule: str, remedy: str) -> InvalidJob:
    return InvalidJob([Problem("model.kind", kind, rule, remedy)])


def resolve_model(
    kind: str, preset: str, overrides: Mapping[str, Any]
) -> tuple[Section | None, list[Problem]]:
    """A preset of a family with some fields changed.

    Args:
        kind: see `load_family`.
        preset: a name in the family's presets.
        overrides: field name to value, with TOML's types, taken strictly.

    Returns:
        The configuration, or None if there are problems, and every problem found: unknown
        names, wrong types and impossible values together, each keyed ``model.<field>``.
    """
    try:
        family = load_family(kind)
    except InvalidJob as error:
        return None, error.problems
    problems = []
    base = family.presets.get(preset)
    if base is None:
        problems.append(
            Problem("model.preset", preset, "no such preset", suggest(preset, family.presets))
        )
    # A field is checked alone first, so that one bad value does not hide the others.
    fields = base.model_dump() if base else {}
    invalid = [
        problem
        for problem in check_section(family.config, "model", {**fields, **overrides})
        # Without a base, fields that have no default are missing: not the user's mistake.
        if problem.key.removeprefix("model.") in overrides
    ]
    problems += invalid
    if base is None:
        return None, problems
    bad = {problem.key for problem in invalid}
    good = {name: value for name, value in overrides.items() if f"model.{name}" not in bad}
    config = family.config.model_validate_json(json.dumps(fields | good), strict=True)
    found = [problem for problem in family.check(config) if problem.key not in bad]
    bad |= {problem.key for problem in found}
    problems += [problem for problem in found if bad.isdisjoint(problem.depends)]
    return (None if problems else config), problems
