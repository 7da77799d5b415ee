"""Which matrices are multiplied in float8, and whether the device can.

One answer for all: the plan counts and refuses by it, and `weft.parallel.float8` converts by it.
Only the blocks' linear layers are candidates.  What is outside of them, the embedding and the
output head, always stays in high precision: an error there goes straight into the loss.  Of the
candidates are left out

* those that a pattern of ``precision.float8_exclude`` names,
* those of which a side, as this tensor-parallel rank has it, is no multiple of 16 (``_scaled_mm``
  takes no other, since tensor cores load 16 bytes at a time) or, with MXFP8, of its block of 32,
* those too small to gain: casting and finding the scales, which are bound by memory, would take
  longer than what the product saves.  The limits are those of torchao's
  ``_auto_filter_for_recipe``, measured on H100 (github.com/pytorch/ao, torchao/float8/README.md).
  It has none for *rowwise_with_gw_hp* and *mxfp8*, which cast by rows and blocks: taken are those
  of *rowwise*.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from weft.config.errors import ConfigError
from weft.config.schema import Job, PrecisionSection
from weft.models import Family
from weft.plan.layout import ParallelDims
from weft.plan.matrices import Matrix, list_matrices
from weft.plan.pipeline_schedule import find_schedule


def required_multiple(recipe: str) -> int:
    """What must divide the sides of a matrix, and the tokens of a product."""
    return 32 if recipe == "mxfp8" else 16


def find_float8_matrices(section: PrecisionSection, model: Any, family: Family, tp: int) -> list[Matrix]:
    """The matrices of the whole model that are multiplied in float8, with the sides that a
    tensor-parallel rank has, in the order of the model.

    Args:
        model: the family's configuration.
    """
    if section.float8 == "none":
        return []
    return _select_matrices(section, _convertible_matrices(section.float8, model, family, tp))


def _convertible_matrices(recipe: str, model: Any, family: Family, tp: int) -> list[Matrix]:
    """Those whose sides allow it."""
    unit = required_multiple(recipe)
    every = list_matrices(model, family, tp)
    return [matrix for matrix in every if matrix.outputs % unit == matrix.inputs % unit == 0]


def _select_matrices(section: PrecisionSection, possible: list[Matrix]) -> list[Matrix]:
    """Of those that are possible the ones that are worth it, and not left out by name."""
    return [
        matrix
        for matrix in possible
        if (section.float8_small or not _is_too_small(section.float8, matrix))
        and not any(fnmatchcase(matrix.name, pattern) for pattern in section.float8_exclude)
    ]


def _is_too_small(recipe: str, matrix: Matrix) -> bool:
    _, outputs, inputs = matrix
    if recipe == "tensorwise":
        return inputs <= 4096 and outputs <= 1024
    return outputs <= 2048 or inputs <= 1024 or (outputs <= 4096 and inputs <= 2048)


# --------------------------------------------------------------------------- rules


def supports_float8(recipe: str, capability: tuple[int, int]) -> bool:
    """Whether a GPU of that compute capability multiplies so; (0, 0) is one that is unknown."""
    return capability[0] == 10 if recipe == "mxfp8" else capability >= (8, 9)


def check_float8(
    job: Job, model: Any, family: Family, degrees: ParallelDims, compute: str, emulated: bool
) -> Iterator[ConfigError]:
    """Why these products cannot be in float8."""
    section = job.precision
    key, recipe = "precision.float8", section.float8
    if recipe == "none":
        return
    if job.train.world_size_invariant:
        rule = "is not possible in canonical order, which is in float32"
        yield ConfigError(
            key,
            recipe,
            rule,
            "use none, or train.world_size_invariant false",
            ("train.world_size_invariant",),
        )
    if compute == "float32" and not emulated:
        rule = f"and {compute} around it are not possible: products in float8 give bfloat16"
        depends = ("precision.compute_dtype",)
        yield ConfigError(
            key, recipe, rule, "use precision.compute_dtype bfloat16, or none", depends
        )

    possible = _convertible_matrices(recipe, model, family, degrees.tp)
    unit = required_multiple(recipe)
    for pattern in section.float8_exclude if possible else ():
        if not any(fnmatchcase(matrix.name, pattern) for matrix in possible):
            rule = "matches none of the matrices that could be in float8"
            kinds = dict.fromkeys(matrix.name.rpartition(".")[2] for matrix in possible)
            remedy = f"there are {', '.join(kinds)}, as in {possible[0].name}"
            yield ConfigError("precision.float8_exclude", pattern, rule, remedy, (key,))
    if not possible:
        rule = f"no matrix of a block has sides that are multiples of {unit}"
        rule += f" over tp = {degrees.tp}" if degrees.tp > 1 else ""
        yield ConfigError(key, recipe, rule, "use none, or other sizes", ("parallel.tp",))
    elif not _select_matrices(section, possible):
        rule = f"none of {len(possible)} matrices is left: too small to gain, or in float8_skip"
        remedy = "use none, or precision.float8_small true to try it all the same"
        yield ConfigError(key, recipe, rule, remedy, ("precision.float8_exclude",))
    tokens = job.train.seq_len // degrees.cp
    if recipe != "rowwise_with_gw_hp" and tokens % unit:
        # Gradients of weights are products over tokens.
        rule = f"{tokens} tokens of a row on a rank are no multiple of {unit}"
        remedy = f"use a multiple of {unit * degrees.cp}, or rowwise_with_gw_hp"
        yield ConfigError("train.seq_len", job.train.seq_len, rule, remedy, (key, "parallel.cp"))


def float8_warnings(job: Job, device: str, pp: int, emulated: bool) -> Iterator[str]:
    """What costs the speed that float8 is for."""
    recipe = job.precision.float8
    if recipe == "none":
        return
    head = f"precision.float8 = {recipe}"
    if device != "cpu" and emulated:
        yield (
            f"{head}: this GPU has no such products; they are emulated, slower than bfloat16, "
            "which shows the effect on the loss and nothing else"
        )
    elif device != "cpu" and not job.compile.enable:
        yield (
            f"{head} without compile.enable: scaling and casting are kernels of their own, which "
            "may cost more than the products gain"
        )
    schedule = find_schedule(job.pipeline.schedule)
    if pp > 1 and not isinstance(schedule, ConfigError) and schedule.splits_backward:
        yield (
            f"{head} with {schedule.name}: a layer computes the gradients of its input and of its "
            "weight at once, so it does both twice where they are asked for apart; another "
            "schedule may be faster"
        )
