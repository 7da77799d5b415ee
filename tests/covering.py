"""Covering arrays: few combinations that contain every pair of values.

Most faults depend on the value of one key or of two keys together. A covering array has
every possible pair in at least one case, so dozens of cases replace thousands.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

Case = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]


def cover_pairs(
    axes: Mapping[str, Sequence[str]], is_valid: Callable[[Case], bool] = lambda case: True
) -> list[Case]:
    """Return cases that together hold each pair of values that any valid case holds.

    The order is deterministic.  The search is greedy: each case begins with a missing pair.  For
    each other axis the case takes the first value that completes the most missing pairs.

    Args:
        axes: values by name of the axis; the first value is the default.
        is_valid: whether a case, which may lack axes, can be completed with their defaults.
    """
    names = list(axes)
    values = [(name, value) for name in names for value in axes[name]]
    missing: dict[Pair, None] = {
        (a, b): None for a, b in itertools.combinations(values, 2) if a[0] != b[0]
    }
    cases = []
    while missing:
        seed = next(iter(missing))
        del missing[seed]  # also if no valid case has it
        case = dict(seed)
        if not is_valid(case):
            continue
        for name in names:
            if name in case:
                continue
            choices = [value for value in axes[name] if is_valid({**case, name: value})]
            gains = {
                value: sum(_pair(names, (name, value), old) in missing for old in case.items())
                for value in choices
            }
            case[name] = max(choices, key=lambda value: gains[value])
        for pair in itertools.combinations(
            sorted(case.items(), key=lambda p: names.index(p[0])), 2
        ):
            missing.pop(pair, None)
        cases.append({name: case[name] for name in names})
    return cases


def _pair(names: list[str], a: tuple[str, str], b: tuple[str, str]) -> Pair:
    return (a, b) if names.index(a[0]) < names.index(b[0]) else (b, a)
