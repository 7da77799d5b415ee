"""Charts of a forecast as HTML without network or script, and for run reports.

Charts are inline SVG in the displayed size, so that text stays readable; a narrow window scrolls.
Boxes have light colors under dark text in both color schemes.  Text without room goes into the
box's title, which browsers show as a tooltip.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from weft.estimate.cost import Span
from weft.estimate.forecast import Forecast
from weft.estimate.op_recorder import OpLocation
from weft.estimate.trace import rank_actions
from weft.monitor.html import Section, render_document
from weft.plan.devices import GIB
from weft.plan.placement import (
    AXES,
    describe_repetition,
    format_ranges,
    num_nodes_shown,
    rank_groups,
    rank_to_coordinates,
)
from weft.plan.plan import Plan

WIDTH = 1200  # pixels
CHARACTER_WIDTH = 6.6  # of the smallest text, which has 11 pixels
DIGIT_WIDTH = 6.2
LINE_HEIGHT = 20

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
Color = tuple[int, int, int]
BLUE, ORANGE, GREEN, YELLOW = (112, 166, 240), (240, 156, 88), (122, 194, 122), (238, 210, 92)
VIOLET, PINK, TEAL, SAND = (196, 158, 230), (240, 150, 190), (140, 210, 220), (205, 190, 165)
GRAY = (178, 178, 178)
ACTION_COLORS: dict[str, Color] = {"F": BLUE, "B": ORANGE, "I": ORANGE, "W": GREEN}
MEMORY_COLORS: dict[str, Color] = {
    "parameters": BLUE,
    "gradients": ORANGE,
    "optimizer": GREEN,
    "activations": YELLOW,
    "communication": VIOLET,
    "temporaries": PINK,
    "allocator": GRAY,
    "outside": SAND,
}
TIME_COLORS: dict[str, Color] = {
    "compute": GREEN,
    "tp": ORANGE,
    "cp": PINK,
    "dp_shard": BLUE,
    "edp": BLUE,
    "ep": PINK,
    "dp_replicate": TEAL,
    "pp": VIOLET,
    "bubble": GRAY,
    "host": YELLOW,
    "world": SAND,
    "offload": SAND,
    "data": GRAY,
}


def render_page(plan: Plan, prediction: Forecast, recipe: str, machine_text: str) -> str:
    """Render the HTML page of a forecast.

    The pipeline chart needs a pipeline, and time charts need a known device.
    """
    charts = []
    if prediction.time_breakdown is not None:
        charts.append(time_bar(prediction.time_breakdown, prediction.error))
        if prediction.timeline is not None:
            total = prediction.time_breakdown.total()
            charts.append(pipeline_chart(prediction.timeline, total))
    charts += [memory_chart(plan, prediction), rank_chart(plan)]
    title = f"{recipe} on {machine_text}"
    lines = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in summarize(prediction)),
    ]
    lines += [f"<h2>{escape(heading)}</h2>\n{svg}" for heading, svg in charts]
    return render_document(title, "\n".join(lines)).decode()


def summarize(prediction: Forecast) -> Iterator[str]:
    """Yield the forecast in sentences."""
    needed = f"The fullest rank needs {format_gib(prediction.needed_bytes / GIB)}"
    if prediction.capacity_bytes is None:
        yield f"{needed}; the memory of its device is unknown."
    else:
        verdict = "it fits" if prediction.fits else "it does not fit"
        yield f"{needed} of {format_gib(prediction.capacity_bytes / GIB)}: {verdict}."
    if prediction.time_breakdown is None:
        yield "The speed of this device is unknown, so no step time is predicted."
    else:
        speed = prediction.tokens_per_second_per_device or 0.0
        text = f"A step takes {format_ms(prediction.time_breakdown.total())}"
        text += f" (within {prediction.error:.0%}): {speed:,.0f} tokens/s per device"
        yield text + (f", MFU {prediction.mfu:.1%}." if prediction.mfu else ".")
    yield from (f"{caveat[:1].upper()}{caveat[1:]}." for caveat in prediction.caveats)


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
    busy = max(
        sum(span.end - span.start for span in rank_spans) for rank_spans in spans_by_rank.values()
    )
    left, top, row_height, box_height = 54, 34, 24, 20
    scale = (WIDTH - left - 36) / end  # the last mark of the axis has room
    bottom = top + row_height * len(spans_by_rank)
    shapes = list(draw_time_axis(end, left, scale, top - 4, bottom))
    for row, (rank, rank_spans) in enumerate(sorted(spans_by_rank.items())):
        y = top + row_height * row
        stages = sorted({span.stage for span in rank_spans})
        shapes.append(f'<text x="{left - 8}" y="{y + 15}" class="end">rank {rank}</text>')
        shapes.append(f'<g id="{name}-{rank}" transform="translate(0 {y})">')
        for span in rank_spans:
            x, width = left + scale * span.start, scale * (span.end - span.start)
            fill = lighten(ACTION_COLORS[span.kind], stages.index(span.stage) / len(stages))
            title = f"{span.stage}{span.kind}{span.microbatch} "
            title += f"{format_ms(span.start)} to {format_ms(span.end)}"
            shapes.append(draw_box(x, 0, width, box_height, fill, title))
            if width > DIGIT_WIDTH * len(number := str(span.microbatch)):
                shapes.append(f'<text x="{x + width / 2:.1f}" y="14" class="on">{number}</text>')
        shapes.append("</g>")
    used = [kind for kind in KIND_LABELS if any(span.kind == kind for span in timeline)]
    shapes += draw_legend(
        [(KIND_LABELS[kind], ACTION_COLORS[kind]) for kind in used], left, bottom + 14
    )
    shade_note = " (lighter: a later stage of the same rank)" * (
        any(len({span.stage for span in rank_spans}) > 1 for rank_spans in spans_by_rank.values())
    )
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
    return build_figure(name, heading, sentence, bottom + 36, shapes)


def draw_time_axis(end: float, left: float, scale: float, y: float, bottom: float) -> Iterator[str]:
    """Yield grid lines at round times, with labels."""
    for tick in round_ticks(end, 10):
        x = left + scale * tick
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{bottom}" class="grid"/>'
        yield f'<text x="{x:.1f}" y="{y - 6}" class="small middle">{format_ms(tick)}</text>'


# --------------------------------------------------------------------------- memory


def memory_chart(plan: Plan, prediction: Forecast, measured: float | None = None) -> Section:
    """Return a chart of the fullest rank: peak per action, categories at the peak.

    ``measured`` is the peak GiB of a run; see `Forecast.recorded_bytes`.
    """
    memory = prediction.memory
    left, right, top, bottom = 54, 800, 26, 306
    limits = {"the device": (prediction.capacity_bytes or 0) / GIB, "measured": measured or 0.0}
    scale_max = max(*limits.values(), prediction.needed_bytes / GIB)
    scale = (bottom - top) / scale_max
    shapes = []
    for tick in round_ticks(scale_max, 6):
        y = bottom - scale * tick
        ends = f'x1="{left}" x2="{right + 100}" y1="{y:.1f}" y2="{y:.1f}"'
        shapes.append(f'<line {ends} class="grid"/>')
        shapes.append(f'<text x="{left - 6}" y="{y + 4:.1f}" class="small end">{tick:g} GiB</text>')
    names = label_passes(plan, prediction)
    width = (right - left) / len(memory.timeline)
    shapes.append('<g id="live">')
    for index, (location, live) in enumerate(memory.timeline):
        height = scale * live / GIB
        fill = lighten(ACTION_COLORS.get(location.kind, GRAY))
        title = f"{names[location]}: {format_gib(live / GIB)}"
        shapes.append(draw_box(left + width * index, bottom - height, width, height, fill, title))
    shapes.append("</g>")
    index, (location, live) = max(enumerate(memory.timeline), key=lambda each: each[1][1])
    text = f"peak {format_gib(live / GIB)}: {names[location]}"
    x, y = left + width * (index + 0.5), bottom - scale * live / GIB
    start = max(left, min(x + 6, right - CHARACTER_WIDTH * len(text)))
    shapes.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 6:.1f}" y2="{y:.1f}"/>')
    shapes.append(f'<text id="peak" x="{start:.1f}" y="{y - 8:.1f}">{escape(text)}</text>')
    shapes.append(f'<text x="{left}" y="{bottom + 18}">passes in order</text>')
    shapes += draw_memory_stack(prediction, limits, left, right + 40, top, bottom, scale)
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
    return build_figure("memory", "Memory of the fullest rank", sentence, bottom + 30, shapes)


def draw_memory_stack(
    prediction: Forecast,
    limits: Mapping[str, float],
    left: float,
    x: float,
    top: float,
    bottom: float,
    scale: float,
) -> Iterator[str]:
    """Yield the stacked categories at the peak, their legend, and limits as lines."""
    entries = list(prediction.gib_by_category().items())
    y = bottom
    yield '<g id="stack">'
    for name, size in entries:
        y -= scale * size
        yield draw_box(
            x, y, 56, scale * size, lighten(MEMORY_COLORS[name]), f"{name}: {format_gib(size)}"
        )
    yield "</g>"
    yield f'<text x="{x:.0f}" y="{bottom + 18:.0f}">at the peak</text>'
    legend, y = x + 86, top + 12
    for name, limit in limits.items():
        if not limit:
            continue
        limit_y = bottom - scale * limit
        for start, end, line_y in ((left, x + 60, limit_y), (legend - 2, legend + 14, y - 4)):
            ends = f'x1="{start:.1f}" x2="{end:.1f}" y1="{line_y:.1f}" y2="{line_y:.1f}"'
            yield f'<line {ends} class="limit {name}"/>'
        yield f'<text x="{legend + 20:.0f}" y="{y:.0f}">{format_gib(limit)}: {name}</text>'
        y += LINE_HEIGHT
    needed = f"{format_gib(prediction.needed_bytes / GIB)}: needed"
    yield f'<text x="{legend + 20:.0f}" y="{y:.0f}">{needed}</text>'
    for name, size in reversed(entries):
        y += LINE_HEIGHT
        label = LABELS.get(name, name)
        yield from draw_swatch(
            legend, y, lighten(MEMORY_COLORS[name]), f"{format_gib(size)}: {label}"
        )


def label_passes(plan: Plan, prediction: Forecast) -> dict[OpLocation, str]:
    """Return a label for each location in the fullest rank's timeline."""
    pp = rank_to_coordinates(prediction.rank, plan.axis_sizes, plan.axis_order)["pp"]
    actions = rank_actions(plan, pp)
    first_units = (
        [stage.first_unit for stage in plan.pipeline.stages_by_rank[pp]] if plan.pipeline else [0]
    )
    is_grouped = plan.job.activation_checkpoint.period > 1
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
    error: float | None,
    name: str = "time",
    heading: str = "Time breakdown of a step",
) -> Section:
    """Return a chart of a step's time by cause.

    Args:
        seconds: seconds of a step by cause.
        error: relative error of a prediction; None: measured.
        name: id of the chart in its page.
        heading: heading of the section.
    """
    total = sum(seconds.values())
    order = [cause for cause in TIME_COLORS if seconds.get(cause, 0.0) > 0]
    shapes, x, y = [f'<g id="{name}-step">'], 0.0, 60
    for cause in order:
        width = WIDTH * seconds[cause] / total
        note = ": exposed communication" * (cause in (*AXES, "world"))
        text = f"{LABELS.get(cause, cause)}{note}: {format_ms(seconds[cause])}, "
        text += f"{seconds[cause] / total:.1%}"
        shapes.append(draw_box(x, 4, width, 40, lighten(TIME_COLORS[cause]), text))
        if width > CHARACTER_WIDTH * len(cause) + 6:
            shapes.append(f'<text x="{x + width / 2:.1f}" y="28" class="on">{cause}</text>')
        x += width
        y += LINE_HEIGHT
        shapes += draw_swatch(0, y - 10, lighten(TIME_COLORS[cause]), text)
    shapes.append("</g>")
    largest = max(
        (cause for cause in order if cause != "compute"), key=seconds.__getitem__, default=""
    )
    largest_note = f"; most of it is {largest} ({seconds[largest] / total:.1%})" * bool(largest)
    tolerance = "" if error is None else f" (within {error:.0%})"
    sentence = (
        f"Of {format_ms(total)}{tolerance}, {seconds.get('compute', 0.0) / total:.1%} is compute. "
        f"Another layout may reduce the rest{largest_note}."
    )
    return build_figure(name, heading, sentence, y, shapes)


# --------------------------------------------------------------------------- ranks


def rank_chart(plan: Plan) -> Section:
    """Return a chart of the first nodes with their ranks, colored by pipeline rank."""
    local, world = plan.local_world_size, plan.world_size
    nodes = math.ceil(world / local)
    num_shown = num_nodes_shown(plan.axis_sizes, local, plan.axis_order, nodes)
    axes = [axis for axis in plan.axis_order if plan.axis_sizes[axis] > 1]
    rank_coordinates = {
        rank: rank_to_coordinates(rank, plan.axis_sizes, plan.axis_order)
        for rank in range(min(world, num_shown * local))
    }
    labels = {
        r: "·".join(str(coords[axis]) for axis in axes) for r, coords in rank_coordinates.items()
    }
    width = max(46.0, *(CHARACTER_WIDTH * max(len(t), len(str(r))) + 8 for r, t in labels.items()))
    columns = min(local, 8, int((WIDTH - 14) / width))
    nodes_per_row = max(1, min(num_shown, int(WIDTH / (columns * width + 20))))
    rank_height = 38
    node_height = 26 + rank_height * math.ceil(local / columns)
    shapes = []
    for node in range(num_shown):
        x, y = (
            node % nodes_per_row * (columns * width + 20) + 1,
            node // nodes_per_row * (node_height + 10) + 1,
        )
        shapes.append(f'<g id="node-{node}">')
        outline = f'width="{columns * width + 10:.1f}" height="{node_height}" class="node"/>'
        shapes.append(f'<rect x="{x:.1f}" y="{y}" {outline}')
        shapes.append(f'<text x="{x + 6:.1f}" y="{y + 15}">node {node}</text>')
        for rank in range(node * local, min((node + 1) * local, world)):
            row, column = divmod(rank - node * local, columns)
            rank_x, rank_y = x + 5 + column * width, y + 21 + row * rank_height
            pp = rank_coordinates[rank]["pp"]
            title = ", ".join(
                [f"rank {rank}", *(f"{axis} {rank_coordinates[rank][axis]}" for axis in axes)]
            )
            shapes.append(
                draw_box(rank_x, rank_y, width - 2, rank_height - 2, rank_color(pp, plan.pp), title)
            )
            for dy, text in ((15, str(rank)), (29, labels[rank])):
                middle = rank_x + width / 2 - 1
                shapes.append(f'<text x="{middle:.1f}" y="{rank_y + dy}" class="on">{text}</text>')
        shapes.append("</g>")
    y = math.ceil(num_shown / nodes_per_row) * (node_height + 10) + 16
    if num_shown < nodes:
        description = ", ".join(
            describe_repetition(plan.axis_sizes, local, plan.axis_order, num_shown)
        )
        hidden = nodes - num_shown
        text = f"{hidden:,} more node{'s' * (hidden > 1)} continue the pattern: {description}"
        shapes.append(f'<text x="0" y="{y}">{text}</text>')
        y += LINE_HEIGHT + 4
    for pp, text in enumerate(describe_pipeline_ranks(plan)):
        shapes += draw_swatch(0, y, rank_color(pp, plan.pp), text)
        y += LINE_HEIGHT
    label = f"its number and its index along {' · '.join(axes)}" if axes else "its number"
    sentence = (
        "Communication inside a node is fast. An axis whose index changes only inside a node never "
        f"leaves it. A box is a rank, with {label}."
    )
    return build_figure("ranks", "Placement of ranks", sentence, y, shapes)


def describe_pipeline_ranks(plan: Plan) -> Iterator[str]:
    """Yield the nodes and modules of each pipeline rank."""
    if plan.pipeline is None:
        return
    others = [axis for axis in AXES if axis != "pp"]
    ranks_by_stage = rank_groups(others, plan.axis_sizes, plan.axis_order)
    for pp, (name, ranks) in enumerate(zip(plan.pipeline.stage_names, ranks_by_stage, strict=True)):
        nodes = sorted({rank // plan.local_world_size for rank in ranks})
        yield f"pp {pp} on node{'s' * (len(nodes) > 1)} {format_ranges(nodes)}: {name}"


# --------------------------------------------------------------------------- shapes


def build_figure(
    name: str, heading: str, sentence: str, height: float, shapes: Iterable[str]
) -> Section:
    """Return a heading, and a chart under a sentence that explains it."""
    title, sentence = escape(heading), escape(sentence)
    size = f'width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}"'
    parts = [
        f"<p>{sentence}</p>",
        f'<div class="wide"><svg xmlns="http://www.w3.org/2000/svg" id="{name}" role="img" '
        f'aria-labelledby="{name}-title {name}-desc" {size}>',
        f'<title id="{name}-title">{title}</title><desc id="{name}-desc">{sentence}</desc>',
        *shapes,
        "</svg></div>",
    ]
    return heading, "\n".join(parts)


def draw_box(x: float, y: float, width: float, height: float, fill: str, title: str) -> str:
    """Return a rectangle with a tooltip; sizes in pixels."""
    geometry = f'x="{x:.2f}" y="{y:.4g}" width="{width:.2f}" height="{height:.4g}"'
    return f'<rect {geometry} fill="{fill}"><title>{escape(title)}</title></rect>'


def draw_swatch(x: float, y: float, fill: str, text: str) -> Iterator[str]:
    """Yield a legend entry."""
    yield f'<rect x="{x:.0f}" y="{y - 10:.0f}" width="12" height="12" fill="{fill}"/>'
    yield f'<text x="{x + 20:.0f}" y="{y:.0f}">{escape(text)}</text>'


def draw_legend(entries: Iterable[tuple[str, Color]], x: float, y: float) -> Iterator[str]:
    """Yield a legend in one line."""
    for text, color in entries:
        yield from draw_swatch(x, y, lighten(color), text)
        x += 20 + 7.5 * len(text) + 20


def lighten(color: Color, fraction: float = 0.0) -> str:
    """Return a hex color, lightened by ``fraction`` but never white."""
    red, green, blue = (round(c + (255 - c) * fraction * 0.6) for c in color)
    return f"#{red:02x}{green:02x}{blue:02x}"


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
