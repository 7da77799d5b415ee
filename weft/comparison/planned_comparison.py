"""Compare variants by prediction, without training (``--plan-only``).

The errors of two predictions are correlated, so a ratio is more accurate than each of them, but not
by much.  The 294 published runs contain 24 sets of layouts of one model on equal numbers of
devices: 357 pairs.  Of the 147 pairs with a predicted difference above 15 %, 95 % had the right
direction, of the others 69 %; 90 % of the predicted ratios were within 29 % of the measured ones
(``python benchmarks/plan_accuracy.py``).  So this module calls a difference below `MIN_DIFFERENCE`
inconclusive, and one with low confidence below its error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.comparison.comparison_page import planned_page
from weft.comparison.experiment import COMPARISON, invalid_out, read_comparison
from weft.comparison.variants import Overrides, read_variants
from weft.comparison.verdict import percent
from weft.config.errors import ConfigError, InvalidConfig
from weft.config.files import replace_bytes, write_json
from weft.config.formatting import format_columns
from weft.config.locks import unwritable_error
from weft.conversion.adapter_path import adopt_paths
from weft.estimate.cost import device_spec
from weft.estimate.forecast import Forecast, forecast
from weft.monitor.step_record import device_hours
from weft.planning.devices import GIB
from weft.planning.plan import Machine, Plan
from weft.planning.plan_text import plan_recipe
from weft.reporting.page import REPORT_FILE
from weft.training.machine import detect_machine
from weft.verification.verify import format_layout

MIN_DIFFERENCE = 0.15  # |ratio - 1| from which a direction is conclusive
DIRECTION_ACCURACY = (0.69, 0.95)  # fraction of right directions below and above MIN_DIFFERENCE
RATIO_ERROR = 0.29  # 90 % of the predicted ratios are within this relative error


@dataclass(frozen=True)
class PlannedVariant:
    """A variant and its forecast."""

    label: str
    plan: Plan | None
    forecast: Forecast | None
    reason: str  # why there is no plan or forecast

    @property
    def speed(self) -> float | None:
        """Tokens/s of all devices, if the job fits in memory."""
        prediction = self.forecast
        if prediction is None or prediction.step_seconds is None or prediction.fits is False:
            return None
        return prediction.plan.tokens_per_step / prediction.step_seconds

    @property
    def device_hours(self) -> float | None:
        """Device-hours per billion tokens."""
        if self.speed is None or self.plan is None:
            return None
        return device_hours(self.plan.world_size, self.speed)


def compare_plans(
    recipes: Sequence[str],
    vary: Sequence[tuple[str, Sequence[str]]],
    overrides: Overrides,
    cli_errors: list[ConfigError],
    cluster: str | None,
    price: float | None,
    out: str | None,
    log: Callable[[str], object],
) -> tuple[dict[str, Any], int]:
    """Predict every variant and compare the predictions.

    Args:
        recipes: see `read_variants`.
        vary: see `read_variants`.
        overrides: see `read_variants`.
        cli_errors: see `read_variants`.
        cluster: see `weft.planning.plan_text.plan_recipe`.
        price: of a device-hour.
        out: directory for the results, if any.
        log: called with lines of progress and the results.

    Returns:
        The JSON record, and the number of variants with a predicted speed.

    Raises:
        InvalidConfig: see `read_variants`; or if ``out`` holds other files.
        WeftError: if ``out`` cannot be written.
    """
    machines: dict[int, Machine] = {}  # by id of the plan: plans for two machines may be equal

    def read(recipe: str, overrides: Overrides) -> Plan:
        plan, machine = plan_recipe(
            recipe, overrides, (), cluster, detect_machine, adopt=adopt_paths, keeps_batch=True
        )
        machines[id(plan)] = machine
        return plan

    directory = Path(out) if out else None
    if directory is not None:
        cli_errors = [*cli_errors, *_check_dir(directory)]
    variants = read_variants(recipes, vary, overrides, cli_errors, read)
    planned = []
    for number, variant in enumerate(variants, 1):
        if variant.plan is None:
            reason = " ".join(variant.errors)
            planned.append(PlannedVariant(variant.label, None, None, reason))
        else:
            log(f"plan {number} of {len(variants)}: {variant.label}")
            planned.append(_predict(variant.label, variant.plan, machines[id(variant.plan)]))
    head, rows = make_table(planned, price)
    verdict = make_verdict(planned)
    reasons = [f"{variant.label}: {variant.reason}" for variant in planned if variant.reason]
    lines = [*verdict, "", *format_columns(head, rows, left={0, 1}), "", *reasons]
    log("\n" + "\n".join(lines).rstrip())
    record = to_dict(planned, price)
    if directory is not None:
        title = f"planned: {'; '.join(variant.label for variant in planned)}"
        page = planned_page(title, verdict, head, rows, reasons)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            write_json(directory / COMPARISON, record, indent=2)
            replace_bytes(directory / REPORT_FILE, page)
        except OSError as error:
            raise unwritable_error(directory, error) from error
    return record, sum(variant.speed is not None for variant in planned)


def _check_dir(directory: Path) -> list[ConfigError]:
    """Return the reasons why results must not be written into a directory."""
    try:
        record = read_comparison(directory)
    except InvalidConfig as error:
        return list(error.errors)
    if record is None or "compared" not in record:
        return []
    rule = "holds a comparison of runs, which --plan-only would overwrite"
    return invalid_out(directory, rule).errors


def _predict(label: str, plan: Plan, machine: Machine) -> PlannedVariant:
    try:
        prediction = forecast(plan, machine, device_spec(plan, machine), cached=True)
    except Exception as error:  # tracing a user's model may fail
        reason = f"cannot be predicted: {type(error).__name__}: {error}"
        return PlannedVariant(label, plan, None, reason)
    return PlannedVariant(label, plan, prediction, "")


def make_verdict(variants: Sequence[PlannedVariant]) -> list[str]:
    """Compare each variant that fits with the first one that does."""
    comparable = [
        (variant, variant.speed, variant.forecast)
        for variant in variants
        if variant.speed is not None and variant.forecast is not None
    ]
    lines = [
        f"{variant.label} does not fit: {variant.forecast.bottlenecks[0]}"
        for variant in variants
        if variant.forecast is not None and variant.forecast.fits is False
    ]
    if len(comparable) < 2:
        return [*lines, "nothing is compared: fewer than two variants fit and have a speed"]
    (base, base_speed, base_forecast), *others = comparable
    for variant, speed, prediction in others:
        ratio = speed / base_speed
        difference = max(ratio, 1 / ratio) - 1
        direction = "faster" if ratio > 1 else "slower"
        text = f"{variant.label} is predicted {percent(ratio - 1)} {direction} than {base.label}"
        error = max(base_forecast.error, prediction.error)
        if base_forecast.caveats or prediction.caveats:
            inconclusive = ", which is inconclusive," * (difference < error)
            text += f"{inconclusive} with low confidence (error {100 * error:.0f} %)"
        elif difference < MIN_DIFFERENCE:
            wrong = f"{100 - 100 * DIRECTION_ACCURACY[0]:.0f} %"
            text += (
                f", which is inconclusive ({wrong} of predicted differences below "
                f"{100 * MIN_DIFFERENCE:.0f} % had the wrong direction)"
            )
        else:
            low, high = 100 * ratio / (1 + RATIO_ERROR) - 100, 100 * ratio * (1 + RATIO_ERROR) - 100
            text += (
                f" ({100 * DIRECTION_ACCURACY[1]:.0f} % of such predictions had the right "
                f"direction; 90 % were within {low:+.0f} to {high:+.0f} %)"
            )
        lines.append(text)
    return lines


def make_table(
    variants: Sequence[PlannedVariant], price: float | None
) -> tuple[list[str], list[list[str]]]:
    """Return a row per variant."""
    head = ["variant", "layout", "fits", "GiB", "s/step", "tokens/s/device", "MFU", "error"]
    head += ["device-h/1e9 tokens", *(["cost/1e9 tokens"] if price is not None else [])]
    rows = []
    for variant in variants:
        prediction, hours = variant.forecast, variant.device_hours
        if prediction is None or variant.plan is None:
            rows.append([variant.label, *["-"] * (len(head) - 1)])
            continue
        speed = prediction.tokens_per_second_per_device
        fits = {True: "yes", False: "no", None: "unknown"}[prediction.fits]
        cells = [variant.label, format_layout(variant.plan.axis_sizes), fits]
        cells += [
            _format(prediction.needed_bytes / GIB, ".1f"),
            _format(prediction.step_seconds, ".3g"),
            _format(speed, ",.0f"),
            _format(prediction.mfu, ".1%"),
            _format(None if speed is None else prediction.error, ".0%"),
            _format(hours, ",.1f"),
        ]
        if price is not None:
            cells.append(_format(None if hours is None else price * hours, ",.2f"))
        rows.append(cells)
    return head, rows


def _format(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def to_dict(variants: Sequence[PlannedVariant], price: float | None) -> dict[str, Any]:
    """Return the JSON record."""
    return {
        "verdict": make_verdict(variants),
        "variants": [
            {
                "label": variant.label,
                "reason": variant.reason,
                "plan": None if variant.plan is None else json.loads(variant.plan.to_json()),
                "forecast": None if variant.forecast is None else variant.forecast.to_dict(),
                "device_hours_per_billion_tokens": variant.device_hours,
                "cost_per_billion_tokens": None
                if price is None or variant.device_hours is None
                else price * variant.device_hours,
            }
            for variant in variants
        ],
        "called_above": MIN_DIFFERENCE,
        "ratio_error": RATIO_ERROR,
    }
