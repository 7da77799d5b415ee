"""Points of the curves and heat maps of a report: few, but with every extreme.

All curves with the same records share their positions on the x axes, a *grid*.  A curve with more
records than points is divided into bins of consecutive records, the same for all curves of a run.
Each bin has two points, its minimum and maximum in their order, at the bin's first and last record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.records.run_reader import Floats

MAX_POINTS = 800  # points of a curve
MIN_POINTS = 160
PAGE_POINTS = 15_000  # points of all curves of a run; about 15 bytes each
MAX_CELLS = 12_000  # cells of a heat map
MAX_COLUMNS = 160  # columns of a heat map

Indices = NDArray[np.intp]


def points_per_curve(num_curves: int) -> int:
    """Return how many points a curve has if its run has ``num_curves``."""
    return min(MAX_POINTS, max(MIN_POINTS, PAGE_POINTS // max(1, num_curves)))


class CurvePoints:
    """The drawn points of a run's curves, as JSON values.

    Args:
        max_points: points of a curve, at most.

    Attributes:
        grids: positions on each axis, by the name of the axis.
        curves: for each key ``grid``, ``y``, and if it has bins also their ``means``.
    """

    def __init__(self, max_points: int) -> None:
        self.grids: list[dict[str, list[float | None]]] = []
        self.curves: dict[str, dict[str, Any]] = {}
        self._max_points = max_points
        self._numbers: dict[tuple[int, bytes], int] = {}

    def add(self, axes: Mapping[str, Floats], columns: Mapping[str, Floats]) -> None:
        """Add one curve, or those of a stack, which are drawn at the same records.

        Args:
            axes: positions of all records.
            columns: values of all records; NaN where a record has none.
        """
        values = np.stack([*columns.values()])
        is_finite = np.isfinite(values)
        indices = np.flatnonzero(is_finite.any(0))
        if not len(indices):
            return
        means: list[list[float | None]] | None = None
        if len(indices) <= self._max_points:
            points, grid = values[:, indices], self._add_grid(axes, indices)
        else:
            total = np.where(is_finite.any(0), np.where(is_finite, values, 0.0).sum(0), np.nan)
            starts = bin_starts(values.shape[1], self._max_points // 2)
            selected = select_extremes(total, starts)
            points = values[:, selected]
            points[:, selected < 0] = np.nan
            ends = np.append(starts[1:], values.shape[1]) - 1
            grid = self._add_grid(axes, np.stack([starts, ends], 1).ravel())
            if len(columns) == 1:
                means = [to_json(bin_means(values[0], starts), 5)]
        for number, (key, row) in enumerate(zip(columns, points, strict=True)):
            self.curves[key] = {"grid": grid, "y": to_json(row)}
            if means:
                self.curves[key]["means"] = means[number]

    def _add_grid(self, axes: Mapping[str, Floats], indices: Indices) -> int:
        identity = (id(axes), indices.tobytes())
        if identity not in self._numbers:
            self._numbers[identity] = len(self.grids)
            self.grids.append({name: exact_json(axis[indices]) for name, axis in axes.items()})
        return self._numbers[identity]


def bin_starts(num_records: int, max_bins: int) -> Indices:
    """Return the first record of each bin; all bins but the last have the same size."""
    return np.arange(0, num_records, -(-num_records // max_bins))


def select_extremes(values: Floats, starts: Indices) -> Indices:
    """Return each bin's records of minimum and maximum, in order.

    They are -1 if the bin has no finite value.
    """
    size = int(starts[1]) if len(starts) > 1 else len(values)
    table = np.full((len(starts), size), np.nan)
    table.ravel()[: len(values)] = values
    is_finite = np.isfinite(table)
    low = np.where(is_finite, table, np.inf).argmin(1) + starts
    high = np.where(is_finite, table, -np.inf).argmax(1) + starts
    selected = np.sort(np.stack([low, high], 1), 1)
    selected[~is_finite.any(1)] = -1
    return selected.ravel()


def bin_means(values: Floats, starts: Indices) -> Floats:
    """Return the mean of the finite values of each bin; NaN if it has none."""
    is_finite = np.isfinite(values)
    counts = np.add.reduceat(is_finite.astype(np.float64), starts)
    sums = np.add.reduceat(np.where(is_finite, values, 0.0), starts)
    means: Floats = np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0)
    return means


def heat_map(
    name: str, heading: str, unit: str, axes: Mapping[str, Floats], rows: Mapping[str, Floats]
) -> dict[str, Any]:
    """Return a map of positive values: a row for each name, a column for some records.

    A cell has 100 times the decimal logarithm of the largest value of its records, as an integer;
    None without a value, and `NONFINITE` for Inf.
    """
    num_records = len(next(iter(rows.values())))
    starts = bin_starts(num_records, max(8, min(MAX_COLUMNS, MAX_CELLS // len(rows))))
    cells = []
    for values in rows.values():
        largest = np.fmax.reduceat(values, starts)
        cells.append([encode_cell(value) for value in largest.tolist()])
    return {
        "id": name,
        "heading": heading,
        "unit": unit,
        "names": [*rows],
        "columns": {axis: exact_json(values[starts]) for axis, values in axes.items()},
        "cells": cells,
    }


NONFINITE = 99_999  # of a cell with Inf


def encode_cell(value: float) -> int | None:
    """Return a value of `heat_map` as an integer."""
    if np.isinf(value):
        return NONFINITE
    return None if np.isnan(value) or value <= 0 else round(100 * float(np.log10(value)))


def to_json(values: Floats, digits: int = 6) -> list[float | None]:
    """Return rounded values as JSON values; NaN and Inf become None."""
    form = f"{{:.{digits}g}}".format
    return [_shorten(form(v)) if np.isfinite(v) else None for v in values.tolist()]


def exact_json(values: Floats) -> list[float | None]:
    """Return positions on an axis as JSON values: integers exactly, others rounded."""
    return to_json(values, 16 if (np.round(values) == values).all() else 7)


def _shorten(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def interpolate_axes(
    axes: Mapping[str, Floats], times: Floats, seconds: Floats
) -> dict[str, Floats]:
    """Return the positions of other moments on the x axes of a run's records.

    Args:
        axes: positions of the records.
        times: seconds of the records since the epoch; NaN if unknown.
        seconds: the moments, in seconds since the epoch.
    """
    known = np.isfinite(times)
    if not known.any():
        return {name: np.full(len(seconds), np.nan) for name in axes}
    return {name: np.interp(seconds, times[known], axis[known]) for name, axis in axes.items()}
