"""What the planner says of a run, beside what it measured, for the run's report.

A run is planned again on the machine that it says it ran on, and traced; that takes seconds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import mode
from typing import Any

from weft.config.errors import WeftError
from weft.config.files import read_json, reading
from weft.config.schema import Job
from weft.estimate.calibrate import planned_again
from weft.estimate.charts import memory_chart, pipeline_chart, rank_chart, summary, time_bar
from weft.estimate.cost import Span
from weft.estimate.forecast import Forecast, device_of, forecast
from weft.monitor.html import Section, table
from weft.monitor.run_reader import RunReader
from weft.monitor.spans import read_spans
from weft.plan.devices import GIB
from weft.plan.placement import rank_to_coordinates
from weft.plan.resolve import Plan

HEADING = "Predicted and measured"


@dataclass(frozen=True)
class Predicted:
    """What is predicted of a run; ``why`` there is no plan or forecast, if there is none."""

    run: RunReader
    job: Job | None = None
    plan: Plan | None = None
    seen: Forecast | None = None
    why: str = ""


def sections(runs: Sequence[RunReader]) -> list[Section]:
    """Of one run a table and every picture; of several the table only."""
    every = [predict(run) for run in runs]
    several = len(every) > 1
    rows = [
        [*([one.run.name] * several), *row] for one in every if one.seen for row in compared(one)
    ]
    told = [f"<p>{escape(why)}</p>" for one in every for why in notes(one, several)]
    head = [*(["run"] * several), "", "predicted", "measured", "error"]
    numbers = range(1 + several, 4 + several)
    content = "\n".join([*([table(head, rows, numbers=numbers)] if rows else []), *told])
    found = [(HEADING, content)]
    if not several:
        found += pictures(every[0])
    return found


def predict(run: RunReader) -> Predicted:
    """Plan a run again and trace it."""
    try:
        job, plan, machine = planned_again(run.folder, "run")
    except WeftError as error:
        return Predicted(run, why=f"It cannot be planned again: {error}")
    try:
        seen = forecast(job, plan, machine, device_of(plan, machine))
    except Exception as error:
        # A model of the user's trains, though nothing may be able to trace it.
        why = f"There is no forecast: {type(error).__name__}: {error}"
        return Predicted(run, job, plan, why=why)
    return Predicted(run, job, plan, seen)


def notes(one: Predicted, several: bool) -> Iterator[str]:
    """What is to be said of a prediction, or why there is none."""
    whose = f"{one.run.name}: " * several
    if one.why:
        yield whose + one.why
    elif one.seen is not None:
        if not several:
            yield from summary(one.seen)
        if not several and one.seen.seconds is None and one.seen.plan.device == "cpu":
            learn = f"weft plan --calibrate {one.run.folder}"
            yield f"How fast this machine is can be learnt from a run: {learn}"


def compared(one: Predicted) -> Iterator[list[str]]:
    """Rows of the table."""
    run, seen = one.run, one.seen
    assert seen is not None
    # A prediction is of the steady state, in which the data is there.
    measured_memory = run.last("memory_peak_gib")
    for what, predicted, measured, text in (
        ("seconds of a step", seen.step_seconds, run.steady("rest_seconds"), "{:.4g}"),
        (
            "tokens/s and device",
            seen.tokens_per_second_per_device,
            run.steady("tokens_per_second_per_device"),
            "{:,.0f}",
        ),
        ("MFU", seen.mfu, run.steady("mfu"), "{:.1%}"),
        ("memory of the fullest rank, GiB", seen.measured / GIB, measured_memory, "{:.2f}"),
    ):
        if predicted is not None and measured is not None:
            error = f"{predicted / measured - 1:+.1%}" if measured else ""
            yield [what, text.format(predicted), text.format(measured), error]


def pictures(one: Predicted) -> Iterator[Section]:
    """The sections of a run's report: predicted ones beside those that were measured."""
    run, job, plan, seen = one.run, one.job, one.plan, one.seen
    measured = profiled(run.folder)
    if measured is not None:
        name, parts = measured
        yield time_bar(parts, None, "profiled", f"Where a step's time went, measured: {name}")
    if seen is not None and seen.seconds is not None:
        yield time_bar(seen.seconds, seen.error, heading="Where a step's time goes, predicted")
    if plan is not None and plan.pipeline is not None:
        step = timeline(run.folder, plan)
        if step is not None:
            heading = f"The pipeline, measured in step {step[0]:,}"
            yield pipeline_chart(step[1], None, "pipeline-measured", heading)
        if seen is not None and seen.timeline is not None and seen.seconds is not None:
            heading = "The pipeline over a step, predicted"
            yield pipeline_chart(seen.timeline, seen.seconds.total(), heading=heading)
    if seen is not None and job is not None and plan is not None:
        yield memory_chart(job, plan, seen, run.last("memory_peak_gib"))
    if plan is not None and plan.world_size > 1:
        yield rank_chart(plan)


def profiled(folder: Path) -> tuple[str, dict[str, float]] | None:
    """Of the last profile its folder's name, and of each cause its seconds of a step, the mean of
    the ranks."""
    found = [
        (int(match[1]), path)
        for path in folder.glob("traces/*/summary.json")
        if (match := re.match(r"steps?-(\d+)", path.parent.name))
    ]
    if not found:
        return None
    path = max(found)[1]
    try:
        with reading(path):
            ranks = [rank["seconds"] for rank in read_json(path)["ranks"] if "seconds" in rank]
            names = dict.fromkeys(name for seconds in ranks for name in seconds)
            means = {n: sum(seconds.get(n, 0.0) for seconds in ranks) / len(ranks) for n in names}
            bool(sum(means.values()))
    except WeftError:
        return None  # a damaged profile is left out
    return (path.parent.name, means) if sum(means.values()) else None


def _is_action(args: dict[str, Any]) -> bool:
    types = {"stage": int, "microbatch": int, "kind": str}
    return all(type(args.get(name)) is kind for name, kind in types.items())


def timeline(folder: Path, plan: Plan) -> tuple[int, list[Span]] | None:
    """The last step of which every rank of the first pipeline has noted all actions: its number,
    and the actions, in seconds from the beginning of the first."""
    places = {rank: rank_to_coordinates(rank, plan.sizes, plan.order) for rank in range(plan.world_size)}
    pipeline = [
        rank
        for rank, at in places.items()
        if all(index == 0 for axis, index in at.items() if axis != "pp")
    ]
    actions = {
        rank: [event for event in read_spans(folder, rank) if _is_action(event["args"])]
        for rank in pipeline
    }
    counts = {
        rank: Counter(each["args"]["step"] for each in mine) for rank, mine in actions.items()
    }
    if not all(counts.values()):
        return None
    # What most steps have: of the newest one not all may be written, one done again is there twice.
    whole = {rank: mode(of_steps.values()) for rank, of_steps in counts.items()}
    complete = [
        step
        for step in counts[pipeline[0]]
        if all(counts[rank][step] == whole[rank] for rank in pipeline)
    ]
    if not complete:
        return None
    step = max(complete)
    mine = [
        (rank, each) for rank in pipeline for each in actions[rank] if each["args"]["step"] == step
    ]
    began = min(each["ts"] for _, each in mine)
    return step, [
        Span(
            places[rank]["pp"],
            each["args"]["stage"],
            each["args"]["kind"],
            each["args"]["microbatch"],
            (each["ts"] - began) / 1e6,
            (each["ts"] + each["dur"] - began) / 1e6,
        )
        for rank, each in mine
    ]
