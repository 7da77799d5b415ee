"""Charts of a forecast as plain dicts, for ``weft plan --report`` and run reports.

Positions and sizes are percent of the chart; the templates draw boxes as HTML, without a script.
Boxes have light colors under dark text in both color schemes.  Text without room is only in the
box's title, which browsers show as a tooltip.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.config.axes import AXES, CHART_ORDER
from weft.estimate.cost import Span
from weft.estimate.forecast import Forecast
from weft.estimate.forecast_text import verdict
from weft.estimate.op_recorder import OpLocation
from weft.estimate.trace import rank_actions
from weft.planning.devices import GIB
from weft.planning.placement import rank_groups, rank_to_coordinates
from weft.planning.plan import Plan
from weft.planning.rank_map import describe_repetition, format_ranges, num_nodes_shown
from weft.reporting.page import Part, Section, bar_part, render_page, table_part, text_part

PIPELINE_WIDTH = 1100  # pixels of a row of the pipeline chart
DIGIT_WIDTH = 6.6  # pixels of a digit in a box of the pipeline chart

KIND_LABELS = {
    "F": "forward",
    "B": "backward",
    "I": "backward for inputs",
    "W": "backward for weights",
}
# Labels of names that do not explain themselves.
LABELS = {
    "start": "start of the step",
    "clip": "gradient clipping",
    "end": "end of the step",
    "allocator": "reserved by the allocator",
    "outside": "outside the allocator",
    "bubble": "bubble: waiting for other pipeline ranks",
    "host": "host: the device waits for kernel launches",
    "data": "data: waiting for the data loader",
    "offload": "offload: copies to and from host memory",
}
# Causes of time in the order of the bar.
CAUSES = ("compute", *CHART_ORDER, "bubble", "host", "world", "offload", "data")
NO_COMMUNICATION = ("compute", "bubble", "host", "offload", "data")


def forecast_page(prediction: Forecast, recipe: str, machine_text: str) -> bytes:
    """Render the HTML page of a forecast.

    The pipeline chart needs a pipeline, and time charts need a known device.
    """
    sections = []
    if prediction.time_breakdown is not None:
        sections.append(time_bar(prediction.time_breakdown, prediction.error_range))
        if prediction.timeline is not None:
            total = prediction.time_breakdown.total()
            sections.append(pipeline_chart(prediction.timeline, total))
    sections += [memory_chart(prediction), rank_chart(prediction.plan)]
    return render_page(
        {
            "title": f"{recipe} on {machine_text}",
            "header": verdict_parts(prediction),
            "sections": sections,
        }
    )


def verdict_parts(prediction: Forecast) -> list[Part]:
    """Return the forecast in words."""
    caveats = [text_part(f"warning: {caveat}") for caveat in prediction.caveats]
    return [table_part([], verdict(prediction)), *caveats]


# --------------------------------------------------------------------------- pipeline


def pipeline_chart(
    timeline: Sequence[Span],
    step_seconds: float | None,
    name: str = "pipeline",
    heading: str = "Pipeline schedule of a step",
) -> Section:
    """Return a chart with a row per pipeline rank and a box per action.

    Args:
        timeline: of all ranks.
        step_seconds: of the full step, which continues after the pipeline; None: omit.
        name: id of the chart in its page.
        heading: heading of the section.
    """
    end = max(span.end for span in timeline)
    spans_by_rank: dict[int, list[Span]] = defaultdict(list)
    for span in timeline:
        spans_by_rank[span.rank].append(span)
    busy = max(sum(span.end - span.start for span in spans) for spans in spans_by_rank.values())
    used = [kind for kind in KIND_LABELS if any(span.kind == kind for span in timeline)]
    chart: Part = {
        "kind": "pipeline",
        "id": name,
        "ticks": [
            {"at": round(100 * tick / end, 2), "text": format_ms(tick)}
            for tick in round_ticks(end, 10)
        ],
        "rows": [
            {"name": f"rank {rank}", "boxes": pipeline_boxes(spans, end)}
            for rank, spans in sorted(spans_by_rank.items())
        ],
        "legend": [{"name": kind, "text": KIND_LABELS[kind]} for kind in used],
    }
    has_shades = any(len({span.stage for span in spans}) > 1 for spans in spans_by_rank.values())
    shade_note = " (lighter: a later stage of the same rank)" * has_shades
    remainder = ""
    if step_seconds is not None:
        remainder = f" {format_ms(step_seconds - end)} of gradient clipping, optimizer and exposed "
        remainder += "communication follow."
    sentence = (
        f"Gaps are the pipeline bubble: of {format_ms(end)}, the busiest rank waits "
        f"{format_ms(end - busy)} ({1 - busy / end:.1%}) for the first microbatches and the last "
        f"gradients.{remainder} A box is a microbatch (its number) in a stage{shade_note}; its "
        "tooltip shows stage, kind, microbatch and time."
    )
    return {"heading": heading, "parts": [text_part(sentence), chart]}


def pipeline_boxes(spans: Sequence[Span], end: float) -> list[dict[str, Any]]:
    """Return the boxes of a rank's actions in a pipeline of ``end`` seconds."""
    stages = sorted({span.stage for span in spans})
    boxes = []
    for span in spans:
        width, number = (span.end - span.start) / end, str(span.microbatch)
        times = f"{format_ms(span.start)} to {format_ms(span.end)}"
        boxes.append(
            {
                "left": round(100 * span.start / end, 3),
                "width": round(100 * width, 3),
                "name": span.kind,
                "shade": round(60 * stages.index(span.stage) / len(stages)),
                "title": f"{span.stage}{span.kind}{span.microbatch} {times}",
                "text": number if PIPELINE_WIDTH * width > DIGIT_WIDTH * len(number) + 2 else "",
            }
        )
    return boxes


# --------------------------------------------------------------------------- memory


def memory_chart(prediction: Forecast, measured: float | None = None) -> Section:
    """Return a chart of the fullest rank: peak per action, categories at the peak.

    ``measured`` is the peak GiB of a run; see `Forecast.recorded_bytes`.
    """
    memory = prediction.memory
    limits = {"the device": (prediction.capacity_bytes or 0) / GIB, "measured": measured or 0.0}
    needed = prediction.needed_bytes / GIB
    # GiB at the top of the chart; a limit far above it is only in the legend.
    top = max(needed, *(limit for limit in limits.values() if limit <= 3 * needed))
    plan, names = prediction.plan, label_passes(prediction)
    chart: Part = {
        "kind": "memory",
        "ticks": [
            {"at": round(100 * tick / top, 3), "text": f"{tick:g} GiB"}
            for tick in round_ticks(top, 6)
        ],
        **memory_passes(prediction, names, top),
        "stack": [
            {
                "height": round(100 * size / top, 3),
                "name": name,
                "text": f"{format_gib(size)}: {LABELS.get(name, name)}",
            }
            for name, size in prediction.gib_by_category().items()
        ],
        "limits": [
            {
                "at": round(100 * limit / top, 3) if limit <= top else None,
                "style": "measured" if name == "measured" else "capacity",
                "text": f"{format_gib(limit)}: {name}" + " (above the chart)" * (limit > top),
            }
            for name, limit in limits.items()
            if limit
        ],
        "total": f"{format_gib(needed)}: needed",
    }
    num_drawn = sum(location[:2] == (0, "F") for location, _ in memory.timeline)
    sample_note = (
        f" ({num_drawn} of {plan.num_microbatches} microbatches: the first and last ones)"
        * (plan.pipeline is None and num_drawn < plan.num_microbatches)
    )
    largest = max(memory.live_bytes, key=memory.live_bytes.__getitem__)
    sentence = (
        f"Rank {prediction.rank} needs the most memory. Live memory peaks in "
        f"{names[memory.peak_location]}; the largest part is {largest}. A bar is the peak of a "
        f"pass, colored as in the pipeline chart{sample_note}. The stack adds memory that the "
        "allocator reserves beyond live memory, and memory outside the allocator."
    )
    return {"heading": "Memory of the fullest rank", "parts": [text_part(sentence), chart]}


def memory_passes(
    prediction: Forecast, names: Mapping[OpLocation, str], top: float
) -> dict[str, Any]:
    """Return a bar for the peak memory of each pass, and the label of the highest bar.

    Args:
        prediction: of the fullest rank.
        names: labels of the passes.
        top: GiB at the top of the chart.
    """
    timeline = prediction.memory.timeline
    width = 100 / len(timeline)
    passes = [
        {
            "left": round(width * index, 3),
            "width": round(width, 3),
            "height": round(100 * live / GIB / top, 3),
            "name": location.kind if location.kind in KIND_LABELS else "other",
            "title": f"{names[location]}: {format_gib(live / GIB)}",
        }
        for index, (location, live) in enumerate(timeline)
    ]
    index, (location, live) = max(enumerate(timeline), key=lambda each: each[1][1])
    peak = {
        "side": "left" if 2 * index < len(timeline) else "right",
        "at": round(width * (index + 0.5), 3),
        "height": passes[index]["height"],
        "text": f"peak {format_gib(live / GIB)}: {names[location]}",
    }
    return {"passes": passes, "peak": peak}


def label_passes(prediction: Forecast) -> dict[OpLocation, str]:
    """Return a label for each location in the fullest rank's timeline."""
    plan = prediction.plan
    pp = rank_to_coordinates(prediction.rank, plan.axis_sizes, plan.axis_order)["pp"]
    actions = rank_actions(plan, pp)
    first_units = (
        [stage.first_unit for stage in plan.pipeline.stages_by_rank[pp]] if plan.pipeline else [0]
    )
    is_grouped = plan.activation_checkpoint.period > 1
    labels = {}
    for location, _ in prediction.memory.timeline:
        text = LABELS.get(location.kind, location.kind)
        if location.kind in KIND_LABELS:
            stage, _, microbatch = actions[location[:3]]
            text = f"{KIND_LABELS[location.kind]} of microbatch {microbatch}"
            text += f", stage {stage}" if plan.pipeline else ""
        if location.block is not None:
            stage_index, group = location.block
            if is_grouped:
                text += f", group {group} of its blocks"
            else:
                text += f", layer {group + max(0, first_units[stage_index] - 1)}"
        labels[location] = text
    return labels


# --------------------------------------------------------------------------- time


def time_bar(
    seconds: Mapping[str, float],
    error_range: tuple[float, float] | None,
    name: str = "time",
    heading: str = "Time breakdown of a step",
) -> Section:
    """Return a chart of a step's time by cause.

    Args:
        seconds: seconds of a step by cause.
        error_range: factors of a predicted time, between which it lies; None: measured.
        name: id of the chart in its page.
        heading: heading of the section.
    """
    total = sum(seconds.values())
    amounts = {cause: seconds[cause] for cause in CAUSES if seconds.get(cause, 0.0) > 0}

    def describe(cause: str) -> str:
        is_exposed = cause in CAUSES and cause not in NO_COMMUNICATION
        text = LABELS.get(cause, cause) + ": exposed communication" * is_exposed
        return f"{text}: {format_ms(amounts[cause])}, {amounts[cause] / total:.1%}"

    largest = max(
        (cause for cause in amounts if cause != "compute"), key=seconds.__getitem__, default=""
    )
    largest_note = f"; most of it is {largest} ({seconds[largest] / total:.1%})" * bool(largest)
    bounds = [format_ms(total * factor) for factor in error_range or ()]
    tolerance = f" ({' to '.join(bounds)})" if bounds else ""
    sentence = (
        f"Of {format_ms(total)}{tolerance}, {seconds.get('compute', 0.0) / total:.1%} is compute. "
        f"Another layout may reduce the rest{largest_note}."
    )
    return {
        "heading": heading,
        "parts": [text_part(sentence), bar_part(name, amounts, describe)],
    }


# --------------------------------------------------------------------------- ranks


def rank_chart(plan: Plan) -> Section:
    """Return a chart of the first nodes with their ranks, colored by pipeline rank."""
    local, world = plan.local_world_size, plan.world_size
    nodes = math.ceil(world / local)
    num_shown = num_nodes_shown(plan.axis_sizes, local, plan.axis_order, nodes)
    axes = [axis for axis in plan.axis_order if plan.axis_sizes[axis] > 1]
    node_models = []
    for node in range(num_shown):
        ranks = []
        for rank in range(node * local, min((node + 1) * local, world)):
            indices = rank_to_coordinates(rank, plan.axis_sizes, plan.axis_order)
            ranks.append(
                {
                    "rank": rank,
                    "index": "·".join(str(indices[axis]) for axis in axes),
                    "color": rank_color(indices["pp"], plan.pp),
                    "title": ", ".join(
                        [f"rank {rank}", *(f"{axis} {indices[axis]}" for axis in axes)]
                    ),
                }
            )
        node_models.append({"name": f"node {node}", "ranks": ranks})
    note = ""
    if num_shown < nodes:
        description = ", ".join(
            describe_repetition(plan.axis_sizes, local, plan.axis_order, num_shown)
        )
        hidden = nodes - num_shown
        note = f"{hidden:,} more node{'s' * (hidden > 1)} continue the pattern: {description}"
    chart: Part = {
        "kind": "ranks",
        "columns": min(local, 8),
        "nodes": node_models,
        "note": note,
        "legend": [
            {"color": rank_color(pp, plan.pp), "text": text}
            for pp, text in enumerate(describe_pipeline_ranks(plan))
        ],
    }
    label = f"its number and its index along {' · '.join(axes)}" if axes else "its number"
    sentence = (
        "Communication inside a node is fast. An axis whose index changes only inside a node never "
        f"leaves it. A box is a rank, with {label}."
    )
    return {"heading": "Placement of ranks", "parts": [text_part(sentence), chart]}


def describe_pipeline_ranks(plan: Plan) -> Iterator[str]:
    """Yield the nodes and modules of each pipeline rank."""
    if plan.pipeline is None:
        return
    others = [axis for axis in AXES if axis != "pp"]
    ranks_by_stage = rank_groups(others, plan.axis_sizes, plan.axis_order)
    for pp, (name, ranks) in enumerate(zip(plan.pipeline.stage_names, ranks_by_stage, strict=True)):
        nodes = sorted({rank // plan.local_world_size for rank in ranks})
        yield f"pp {pp} on node{'s' * (len(nodes) > 1)} {format_ranges(nodes)}: {name}"


# --------------------------------------------------------------------------- colors and numbers


def rank_color(index: int, count: int) -> str:
    """Return one of ``count`` colors, light enough for dark text."""
    return f"hsl({360 * index // max(1, count) + 210},60%,78%)"


def round_ticks(maximum: float, count: int) -> list[float]:
    """Return about ``count`` round numbers from 0 to ``maximum``."""
    rough = maximum / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= rough)
    return [step * n for n in range(math.floor(maximum / step + 1e-9) + 1)]


def format_ms(seconds: float) -> str:
    """Format seconds as milliseconds."""
    return f"{format_number(1000 * seconds)} ms"


def format_gib(size: float) -> str:
    """Format a number of GiB."""
    return f"{format_number(size)} GiB"


def format_number(value: float) -> str:
    """Format a number with three or more digits."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:,.{digits if 0 < digits <= 6 else 0}f}"
