"""Report sections that compare a run with its prediction.

A run is planned again for the machine that it ran on, and traced, which takes seconds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mode
from typing import Any

from weft.config.errors import WeftError
from weft.config.files import read_json, reading
from weft.estimate.calibrate import replan_run
from weft.estimate.cost import Span, device_spec
from weft.estimate.forecast import Forecast, forecast
from weft.planning.devices import GIB
from weft.planning.placement import rank_to_coordinates
from weft.planning.plan import Plan
from weft.records.run_reader import RunReader
from weft.records.span_reader import read_spans
from weft.reporting.forecast_charts import (
    memory_chart,
    pipeline_chart,
    rank_chart,
    time_bar,
    verdict_parts,
)
from weft.reporting.page import Part, Section, table_part, text_part

HEADING = "Predicted and measured"


@dataclass(frozen=True)
class RunForecast:
    """The prediction of a run; ``error`` if it failed."""

    run: RunReader
    plan: Plan | None = None
    prediction: Forecast | None = None
    error: str = ""


def prediction_sections(
    runs: Sequence[RunReader], forecasts: Sequence[RunForecast] = ()
) -> list[Section]:
    """Return a table, and for a single run all charts.

    Args:
        runs: the runs.
        forecasts: of these runs, if they are known (`forecast_run`).
    """
    run_forecasts = [*forecasts] or [forecast_run(run) for run in runs]
    has_several = len(run_forecasts) > 1
    rows = [
        [*([run_forecast.run.name] * has_several), *row]
        for run_forecast in run_forecasts
        if run_forecast.prediction
        for row in comparison_rows(run_forecast)
    ]
    head = [*(["run"] * has_several), "", "predicted", "measured", "error"]
    numbers = range(1 + has_several, 4 + has_several)
    parts: list[Part] = [table_part(head, rows, numbers=numbers)] if rows else []
    for run_forecast in run_forecasts:
        parts += notes(run_forecast, has_several)
    sections: list[Section] = [{"heading": HEADING, "parts": parts}]
    if not has_several:
        sections += chart_sections(run_forecasts[0])
    return sections


def forecast_run(run: RunReader) -> RunForecast:
    """Plan a run again and trace it."""
    try:
        _, plan, machine = replan_run(run.run_dir, "run")
    except WeftError as error:
        return RunForecast(run, error=f"This run cannot be planned again: {error}")
    try:
        prediction = forecast(plan, machine, device_spec(plan, machine))
    except Exception as error:
        # A user's model may train although it cannot be traced.
        reason = f"This run cannot be predicted: {type(error).__name__}: {error}"
        return RunForecast(run, plan, error=reason)
    return RunForecast(run, plan, prediction)


def notes(run_forecast: RunForecast, has_several: bool) -> Iterator[Part]:
    """Yield remarks on a prediction, or its error."""
    run, prediction = run_forecast.run, run_forecast.prediction
    if run_forecast.error:
        yield text_part(f"{run.name}: " * has_several + run_forecast.error)
    elif prediction is not None and not has_several:
        yield from verdict_parts(prediction)
        if prediction.time_breakdown is None and prediction.plan.device == "cpu":
            command = f"weft plan --calibrate {run.run_dir}"
            yield text_part(f"Calibrate the speed of this machine from a run: {command}")


def comparison_rows(run_forecast: RunForecast) -> Iterator[list[str]]:
    """Yield table rows: quantity, predicted, measured, error."""
    run, prediction = run_forecast.run, run_forecast.prediction
    assert prediction is not None
    measured_memory = run.last("memory_peak_gib")
    # A prediction is for the steady state, without waiting for data.
    for label, predicted, measured, text in (
        ("step time, s", prediction.step_seconds, run.steady_median("rest_seconds"), "{:.4g}"),
        (
            "tokens/s per device",
            prediction.tokens_per_second_per_device,
            run.steady_median("tokens_per_second_per_device"),
            "{:,.0f}",
        ),
        ("MFU", prediction.mfu, run.steady_median("mfu"), "{:.1%}"),
        (
            "memory of the fullest rank, GiB",
            prediction.recorded_bytes / GIB,
            measured_memory,
            "{:.2f}",
        ),
    ):
        if predicted is not None and measured is not None:
            error = f"{predicted / measured - 1:+.1%}" if measured else ""
            yield [label, text.format(predicted), text.format(measured), error]


def chart_sections(run_forecast: RunForecast) -> Iterator[Section]:
    """Yield the charts of a run, predicted next to measured."""
    run, plan, prediction = run_forecast.run, run_forecast.plan, run_forecast.prediction
    measured = read_profile(run.run_dir)
    if measured is not None:
        name, parts = measured
        yield time_bar(parts, None, "profiled", f"Time breakdown of a step, measured: {name}")
    if prediction is not None and prediction.time_breakdown is not None:
        yield time_bar(
            prediction.time_breakdown,
            prediction.error_range,
            heading="Time breakdown of a step, predicted",
        )
    if plan is not None and plan.pipeline is not None:
        step = measured_timeline(run.run_dir, plan)
        if step is not None:
            heading = f"Pipeline schedule, measured in step {step[0]:,}"
            yield pipeline_chart(step[1], None, "pipeline-measured", heading)
        if (
            prediction is not None
            and prediction.timeline is not None
            and prediction.time_breakdown is not None
        ):
            heading = "Pipeline schedule of a step, predicted"
            yield pipeline_chart(
                prediction.timeline, prediction.time_breakdown.total(), heading=heading
            )
    if prediction is not None:
        yield memory_chart(prediction, run.last("memory_peak_gib"))
    if plan is not None and plan.world_size > 1:
        yield rank_chart(plan)


def read_profile(run_dir: Path) -> tuple[str, dict[str, float]] | None:
    """Return the name of the last profile, and seconds by cause, averaged over ranks."""
    profiles = [
        (int(match[1]), path)
        for path in run_dir.glob("traces/*/summary.json")
        if (match := re.match(r"steps?-(\d+)", path.parent.name))
    ]
    if not profiles:
        return None
    path = max(profiles)[1]
    try:
        with reading(path):
            ranks = [rank["seconds"] for rank in read_json(path)["ranks"] if "seconds" in rank]
            names = dict.fromkeys(name for seconds in ranks for name in seconds)
            means = {n: sum(seconds.get(n, 0.0) for seconds in ranks) / len(ranks) for n in names}
            bool(sum(means.values()))
    except WeftError:
        return None  # skip a damaged profile
    return (path.parent.name, means) if sum(means.values()) else None


def _is_action(args: dict[str, Any]) -> bool:
    types = {"stage": int, "microbatch": int, "kind": str}
    return all(type(args.get(name)) is kind for name, kind in types.items())


def measured_timeline(run_dir: Path, plan: Plan) -> tuple[int, list[Span]] | None:
    """Return the last complete step of the first pipeline, and its actions.

    A step is complete if every rank recorded all actions.  Times are in seconds from the start of
    the first action.
    """
    pp_by_rank = {}
    for rank in range(plan.world_size):
        indices = rank_to_coordinates(rank, plan.axis_sizes, plan.axis_order)
        if not any(index for axis, index in indices.items() if axis != "pp"):
            pp_by_rank[rank] = indices["pp"]
    actions = {
        rank: [event for event in read_spans(run_dir, rank) if _is_action(event["args"])]
        for rank in pp_by_rank
    }
    counts = {
        rank: Counter(action["args"]["step"] for action in events)
        for rank, events in actions.items()
    }
    if not all(counts.values()):
        return None
    # The most frequent count: the last step may be incomplete, a repeated step is recorded twice.
    usual_counts = {rank: mode(step_counts.values()) for rank, step_counts in counts.items()}
    complete = [
        step
        for step in counts[min(counts)]
        if all(counts[rank][step] == usual_counts[rank] for rank in counts)
    ]
    if not complete:
        return None
    step = max(complete)
    step_events = [
        (pp, action["args"], action["ts"], action["dur"])
        for rank, pp in pp_by_rank.items()
        for action in actions[rank]
        if action["args"]["step"] == step
    ]
    # Subtract microseconds since the epoch before they become seconds, which round them.
    first = min(begin for _, _, begin, _ in step_events)
    return step, [
        Span(
            pp,
            args["stage"],
            args["kind"],
            args["microbatch"],
            (begin - first) / 1e6,
            (begin - first + duration) / 1e6,
        )
        for pp, args, begin, duration in step_events
    ]
