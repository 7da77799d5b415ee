"""Variants that are only predicted, for any cluster, on any machine.

Two predictions err alike, so their difference errs less than each of them, but not by much: among
294 published runs there are 24 sets of layouts of one model on as many devices, 357 pairs.  Of
the 148 that the planner takes to be more than 15 % apart, 94 % are apart in that direction; of the
others 68 %.  Nine of ten predicted ratios are within 29 % of the measured one.  (``python
benchmarks/plan_accuracy.py`` prints it.)  So a difference below `CALLED` is not called, and with a
prediction of low confidence none below its error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from weft.config.errors import ConfigError, InvalidConfig
from weft.config.files import replace_bytes, write_json
from weft.config.schema import Job
from weft.estimate.forecast import Forecast, device_of, forecast
from weft.monitor.html import document as document_of
from weft.monitor.html import table as html_table
from weft.monitor.run_report import FILE
from weft.monitor.step_record import device_hours
from weft.plan.devices import GIB
from weft.plan.plan_text import plan_recipe
from weft.plan.resolve import Machine, Plan
from weft.plan.stages import format_columns
from weft.tools.comparison_dir import COMPARISON, not_ours, read_comparison
from weft.tools.variants import Overrides, read_variants
from weft.tools.verdict import percent
from weft.tools.verify import layout
from weft.train.run_dir import unwritable
from weft.train.setup import detect_machine

CALLED = 0.15  # predicted ratio less one, above which its direction is told
RIGHT = (0.68, 0.94)  # share of directions that were right, below and above that
RATIO_ERROR = 0.29  # of a predicted ratio, which nine of ten stay within


@dataclass(frozen=True)
class Planned:
    """A variant and what is predicted of it."""

    label: str
    plan: Plan | None
    seen: Forecast | None
    reason: str  # why there is none

    @property
    def speed(self) -> float | None:
        """Tokens/s of the whole job, if it fits."""
        seen = self.seen
        if seen is None or seen.step_seconds is None or seen.fits is False:
            return None
        return seen.plan.tokens_per_step / seen.step_seconds

    @property
    def device_hours(self) -> float | None:
        """Of a billion tokens."""
        if self.speed is None or self.plan is None:
            return None
        return device_hours(self.plan.world_size, self.speed)


def compare_plans(
    recipes: Sequence[str],
    vary: Sequence[tuple[str, Sequence[str]]],
    overrides: Overrides,
    problems: list[ConfigError],
    cluster: str | None,
    price: float | None,
    out: str | None,
    say: Callable[[str], object],
) -> tuple[dict[str, Any], int]:
    """Predict every variant; an error of one is its own.

    Args:
        recipes, vary, overrides, problems: see `read_variants`.
        cluster: see `weft.plan.plan_text.plan_recipe`.
        price: of a device's hour.
        out: a folder to write into, if any.
        say: told what is going on, and the outcome, in lines.

    Returns:
        Everything, for machines; and how many could be compared.

    Raises:
        InvalidConfig: see `read_variants`; or if ``out`` holds anything but another such outcome.
        WeftError: if it cannot be written.
    """
    machines: list[tuple[Plan, Machine]] = []  # plans for two machines may be equal

    def read(recipe: str, overrides: Overrides) -> tuple[Job, Plan]:
        job, plan, machine = plan_recipe(recipe, overrides, (), cluster, detect_machine)
        machines.append((plan, machine))
        return job, plan

    folder = Path(out) if out else None
    if folder is not None:
        problems = [*problems, *_problems_of(folder)]
    variants = read_variants(recipes, vary, overrides, problems, read)
    planned = []
    for number, variant in enumerate(variants, 1):
        if variant.plan is None:
            why = "; ".join(str(problem) for problem in variant.problems)
            planned.append(Planned(variant.label, None, None, why))
            continue
        say(f"plan {number} of {len(variants)}: {variant.label}")
        machine = next(machine for plan, machine in machines if plan is variant.plan)
        planned.append(_predicted(variant.label, variant.job, variant.plan, machine))
    head, rows = table(planned, price)
    told = verdict(planned)
    reasons = [f"{each.label}: {each.reason}" for each in planned if each.reason]
    lines = [*told, "", *format_columns(head, rows, left={0, 1}), "", *reasons]
    say("\n" + "\n".join(lines).rstrip())
    found = document(planned, price)
    if folder is not None:
        title = f"planned: {'; '.join(each.label for each in planned)}"
        body = [f"<h1>{escape(title)}</h1>", *_paragraphs(told)]
        body += [html_table(head, rows, numbers=range(3, len(head))), *_paragraphs(reasons)]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / COMPARISON, found, indent=2)
            replace_bytes(folder / FILE, document_of(title, "\n".join(body)))
        except OSError as error:
            raise unwritable(folder, error) from error
    return found, sum(each.speed is not None for each in planned)


def _problems_of(folder: Path) -> list[ConfigError]:
    """Why the outcome should not be written into a folder."""
    try:
        found = read_comparison(folder)
    except InvalidConfig as error:
        return list(error.problems)
    if found is None or "compared" not in found:
        return []
    return not_ours(folder, "holds a comparison of runs, which this one would replace").problems


def _paragraphs(lines: Sequence[str]) -> list[str]:
    return [f"<p>{escape(line)}</p>" for line in lines]


def _predicted(label: str, job: Job, plan: Plan, machine: Machine) -> Planned:
    try:
        return Planned(label, plan, forecast(job, plan, machine, device_of(plan, machine)), "")
    except Exception as error:
        # A model of the user's may be one that cannot be traced; the others can be.
        return Planned(label, plan, None, f"cannot be predicted: {type(error).__name__}: {error}")


def verdict(planned: Sequence[Planned]) -> list[str]:
    """Each variant that fits against the first that does."""
    able = [
        (each, each.speed, each.seen)
        for each in planned
        if each.speed is not None and each.seen is not None
    ]
    lines = []
    for each in planned:
        if each.seen is not None and each.seen.fits is False:
            lines.append(f"{each.label} does not fit: {each.seen.limits[0]}")
    if len(able) < 2:
        return [*lines, "fewer than two variants fit and have a predicted speed: none is compared"]
    (base, speed, first), *others = able
    for each, other, seen in others:
        ratio = other / speed
        far = max(ratio, 1 / ratio) - 1
        way = "faster" if ratio > 1 else "slower"
        told = f"{each.label} is predicted to be {percent(ratio - 1)} {way} than {base.label}"
        error = max(first.error, seen.error)
        if first.doubts or seen.doubts:
            little = ": too little to tell" * (far < error)
            told += f"{little}, with low confidence (within {100 * error:.0f} %)"
        elif far < CALLED:
            wrong = f"{100 - 100 * RIGHT[0]:.0f} %"
            told += f": too little to tell (below {100 * CALLED:.0f} %, {wrong} went the other way)"
        else:
            low, high = 100 * ratio / (1 + RATIO_ERROR) - 100, 100 * ratio * (1 + RATIO_ERROR) - 100
            told += (
                f" (of such predictions {100 * RIGHT[1]:.0f} % had the direction right, and nine "
            )
            told += f"of ten were within {low:+.0f} to {high:+.0f} %)"
        lines.append(told)
    return lines


def table(planned: Sequence[Planned], price: float | None) -> tuple[list[str], list[list[str]]]:
    """A line for each variant."""
    head = ["variant", "layout", "fits", "GiB", "s/step", "tokens/s/device", "MFU", "within"]
    head += ["device-h/1e9 tokens", *(["cost/1e9 tokens"] if price is not None else [])]
    rows = []
    for each in planned:
        seen, hours = each.seen, each.device_hours
        if seen is None or each.plan is None:
            rows.append([each.label, *["-"] * (len(head) - 1)])
            continue
        fits = {True: "yes", False: "no", None: "unknown"}[seen.fits]
        rows.append(
            [
                each.label,
                layout(each.plan.sizes),
                fits,
                f"{seen.needed / GIB:.1f}",
                *_cells(seen),
                "-" if hours is None else f"{hours:,.1f}",
                *([] if price is None else ["-" if hours is None else f"{price * hours:,.2f}"]),
            ]
        )
    return head, rows


def _cells(seen: Forecast) -> list[str]:
    speed = seen.tokens_per_second_per_device
    if seen.step_seconds is None or speed is None:
        return ["-"] * 4
    mfu = "-" if seen.mfu is None else f"{seen.mfu:.1%}"
    return [f"{seen.step_seconds:.3g}", f"{speed:,.0f}", mfu, f"{seen.error:.0%}"]


def document(planned: Sequence[Planned], price: float | None) -> dict[str, Any]:
    """For machines."""
    return {
        "verdict": verdict(planned),
        "variants": [
            {
                "label": each.label,
                "reason": each.reason,
                "plan": None if each.plan is None else json.loads(each.plan.to_json()),
                "forecast": None if each.seen is None else each.seen.to_dict(),
                "device_hours_per_billion_tokens": each.device_hours,
                "cost_per_billion_tokens": None
                if price is None or each.device_hours is None
                else price * each.device_hours,
            }
            for each in planned
        ],
        "called_above": CALLED,
        "ratio_error": RATIO_ERROR,
    }
