"""A plan on one page that needs no network and no script; and parts of a run's report.

Pictures are inline SVG, drawn at the size in which they are shown, so that text stays readable; a
narrow window scrolls.  Boxes have the same light colours under dark text on dark and on light
pages.  What has no room as text is the box's title, which browsers show under the pointer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from weft.config.schema import Job
from weft.estimate.cost import Span
from weft.estimate.forecast import Forecast
from weft.estimate.op_recorder import Where
from weft.estimate.trace import actions_of
from weft.monitor.html import Section, document
from weft.plan.devices import GIB
from weft.plan.placement import (
    AXES,
    describe_repetition,
    rank_to_coordinates,
    rank_groups,
    num_nodes_shown,
    format_ranges,
)
from weft.plan.resolve import Plan

WIDTH = 1200  # pixels
CHARACTER = 6.6  # of the smallest text, which has 11 pixels
DIGIT = 6.2
LINE = 20

KINDS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
# What is not told well by its own name.
MEANINGS = {
    "start": "start of the step",
    "clip": "gradient clipping",
    "end": "end of the step",
    "allocator": "more in the allocator",
    "outside": "outside of the allocator",
    "bubble": "bubble: waiting for other ranks of the pipeline",
    "host": "host: kernels start later than they could",
    "data": "data: waiting for it",
    "offload": "offload: copies from and to the host",
}
Colour = tuple[int, int, int]
BLUE, ORANGE, GREEN, YELLOW = (112, 166, 240), (240, 156, 88), (122, 194, 122), (238, 210, 92)
VIOLET, PINK, TEAL, SAND = (196, 158, 230), (240, 150, 190), (140, 210, 220), (205, 190, 165)
GREY = (178, 178, 178)
ACTIONS: dict[str, Colour] = {"F": BLUE, "B": ORANGE, "I": ORANGE, "W": GREEN}
MEMORY: dict[str, Colour] = {
    "parameters": BLUE,
    "gradients": ORANGE,
    "optimizer": GREEN,
    "activations": YELLOW,
    "communication": VIOLET,
    "temporaries": PINK,
    "allocator": GREY,
    "outside": SAND,
}
TIMES: dict[str, Colour] = {
    "compute": GREEN,
    "tp": ORANGE,
    "cp": PINK,
    "dp_shard": BLUE,
    "edp": BLUE,
    "ep": PINK,
    "dp_replicate": TEAL,
    "pp": VIOLET,
    "bubble": GREY,
    "host": YELLOW,
    "world": SAND,
    "offload": SAND,
    "data": GREY,
}


def page(job: Job, plan: Plan, prediction: Forecast, recipe: str, machine_text: str) -> str:
    """The whole HTML file: what is predicted in words, and a picture of each part of it.

    Without a pipeline it has no chart of one, and without a known device no times.
    """
    pictures = []
    if prediction.seconds is not None:
        pictures.append(time_bar(prediction.seconds, prediction.error))
        if prediction.timeline is not None:
            total = prediction.seconds.total()
            pictures.append(pipeline_chart(prediction.timeline, total))
    pictures += [memory_chart(job, plan, prediction), rank_chart(plan)]
    title = f"{recipe} on {machine_text}"
    lines = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in summary(prediction)),
    ]
    lines += [f"<h2>{escape(heading)}</h2>\n{drawn}" for heading, drawn in pictures]
    return document(title, "\n".join(lines)).decode()


def summary(prediction: Forecast) -> Iterator[str]:
    """What is predicted, in sentences."""
    needed = f"The fullest rank needs {gib(prediction.needed / GIB)}"
    if prediction.capacity is None:
        yield f"{needed}; how much its device has is not known."
    else:
        verdict = "it fits" if prediction.fits else "it does not fit"
        yield f"{needed} of {gib(prediction.capacity / GIB)}: {verdict}."
    if prediction.seconds is None:
        yield "Of this device no times are known."
    else:
        speed = prediction.tokens_per_second_per_device or 0.0
        text = f"A step takes {ms(prediction.seconds.total())}, {prediction.error:.0%} more or less"
        text += f": {speed:,.0f} tokens per second and device"
        yield text + (f", MFU {prediction.mfu:.1%}." if prediction.mfu else ".")
    yield from (f"{doubt[:1].upper()}{doubt[1:]}." for doubt in prediction.doubts)


# --------------------------------------------------------------------------- the pipeline


def pipeline_chart(
    timeline: Sequence[Span],
    step_seconds: float | None,
    name: str = "pipeline",
    heading: str = "The pipeline over a step",
) -> Section:
    """A row for each rank of the pipeline, and a box for each of its actions.

    Args:
        timeline: of all ranks.
        step_seconds: of the whole step, which goes on after the pipeline; None: not told.
        name: of the picture in its page.
    """
    end = max(span.end for span in timeline)
    of_ranks: dict[int, list[Span]] = defaultdict(list)
    for span in timeline:
        of_ranks[span.rank].append(span)
    busy = max(sum(span.end - span.start for span in mine) for mine in of_ranks.values())
    left, top, row, high = 54, 34, 24, 20
    scale = (WIDTH - left - 36) / end  # the last mark of the axis has room
    bottom = top + row * len(of_ranks)
    shapes = list(time_axis(end, left, scale, top - 4, bottom))
    for place, (rank, mine) in enumerate(sorted(of_ranks.items())):
        y = top + row * place
        stages = sorted({span.stage for span in mine})
        shapes.append(f'<text x="{left - 8}" y="{y + 15}" class="end">rank {rank}</text>')
        shapes.append(f'<g id="{name}-{rank}" transform="translate(0 {y})">')
        for span in mine:
            x, width = left + scale * span.start, scale * (span.end - span.start)
            fill = shade(ACTIONS[span.kind], stages.index(span.stage) / len(stages))
            title = f"{span.stage}{span.kind}{span.microbatch} {ms(span.start)} to {ms(span.end)}"
            shapes.append(box(x, 0, width, high, fill, title))
            if width > DIGIT * len(number := str(span.microbatch)):
                shapes.append(f'<text x="{x + width / 2:.1f}" y="14" class="on">{number}</text>')
        shapes.append("</g>")
    used = [kind for kind in KINDS if any(span.kind == kind for span in timeline)]
    shapes += legend_row([(KINDS[kind], ACTIONS[kind]) for kind in used], left, bottom + 14)
    lighter = "; the lighter, the later a stage among those of its rank" * (
        any(len({span.stage for span in mine}) > 1 for mine in of_ranks.values())
    )
    after = ""
    if step_seconds is not None:
        after = f" After it come {ms(step_seconds - end)} of clipping, optimizer and what "
        after += "communication is left."
    sentence = (
        f"Empty is waiting: of {ms(end)}, the busiest rank waits {ms(end - busy)} "
        f"({1 - busy / end:.1%}), while the first microbatches arrive and the last gradients "
        f"return.{after} A box is a microbatch (its number) in a stage{lighter}; its "
        "title tells stage, kind, microbatch and time."
    )
    return figure(name, heading, sentence, bottom + 36, shapes)


def time_axis(end: float, left: float, scale: float, y: float, bottom: float) -> Iterator[str]:
    """Lines across the chart at round times from 0 to ``end`` seconds, with their labels."""
    for tick in ticks(end, 10):
        x = left + scale * tick
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{bottom}" class="grid"/>'
        yield f'<text x="{x:.1f}" y="{y - 6}" class="small middle">{ms(tick)}</text>'


# --------------------------------------------------------------------------- memory


def memory_chart(
    job: Job, plan: Plan, prediction: Forecast, measured: float | None = None
) -> Section:
    """A bar for each pass of the fullest rank, and what its memory is for when most is live.

    Args:
        measured: GiB that a run had at most; see `Forecast.measured` for what it counts.
    """
    memory = prediction.memory
    left, right, top, bottom = 54, 800, 26, 306
    limits = {"the device": (prediction.capacity or 0) / GIB, "measured": measured or 0.0}
    most = max(*limits.values(), prediction.needed / GIB)
    scale = (bottom - top) / most
    shapes = []
    for tick in ticks(most, 6):
        y = bottom - scale * tick
        ends = f'x1="{left}" x2="{right + 100}" y1="{y:.1f}" y2="{y:.1f}"'
        shapes.append(f'<line {ends} class="grid"/>')
        shapes.append(f'<text x="{left - 6}" y="{y + 4:.1f}" class="small end">{tick:g} GiB</text>')
    names = names_of_passes(job, plan, prediction)
    width = (right - left) / len(memory.timeline)
    shapes.append('<g id="live">')
    for place, (where, live) in enumerate(memory.timeline):
        high = scale * live / GIB
        fill = shade(ACTIONS.get(where.kind, GREY))
        title = f"{names[where]}: {gib(live / GIB)}"
        shapes.append(box(left + width * place, bottom - high, width, high, fill, title))
    shapes.append("</g>")
    place, (where, live) = max(enumerate(memory.timeline), key=lambda each: each[1][1])
    text = f"peak {gib(live / GIB)}: {names[where]}"
    x, y = left + width * (place + 0.5), bottom - scale * live / GIB
    start = max(left, min(x + 6, right - CHARACTER * len(text)))
    shapes.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 6:.1f}" y2="{y:.1f}"/>')
    shapes.append(f'<text id="peak" x="{start:.1f}" y="{y - 8:.1f}">{escape(text)}</text>')
    shapes.append(f'<text x="{left}" y="{bottom + 18}">passes, one after the other</text>')
    shapes += memory_stack(prediction, limits, left, right + 40, top, bottom, scale)
    drawn = sum(where[:2] == (0, "F") for where, _ in memory.timeline)
    part = f"; of {plan.accumulation} microbatches {drawn} are drawn, the first and the last" * (
        plan.pipeline is None and drawn < plan.accumulation
    )
    largest = max(memory.live, key=memory.live.__getitem__)
    sentence = (
        f"Rank {prediction.rank} needs most, and most is live in {names[memory.at]}: above all "
        f"{largest}. A bar is the most that is live in a pass, coloured as in the pipeline{part}. "
        "The stack adds what the allocator holds beyond that, and what lies outside of it."
    )
    return figure("memory", "Memory of the fullest rank", sentence, bottom + 30, shapes)


def memory_stack(
    prediction: Forecast,
    limits: Mapping[str, float],
    left: float,
    x: float,
    top: float,
    bottom: float,
    scale: float,
) -> Iterator[str]:
    """The categories at the peak on top of each other, their legend, and ``limits`` as lines."""
    entries = list(prediction.by_category().items())
    y = bottom
    yield '<g id="stack">'
    for name, size in entries:
        y -= scale * size
        yield box(x, y, 56, scale * size, shade(MEMORY[name]), f"{name}: {gib(size)}")
    yield "</g>"
    yield f'<text x="{x:.0f}" y="{bottom + 18:.0f}">at the peak</text>'
    legend, y = x + 86, top + 12
    for name, limit in limits.items():
        if not limit:
            continue
        high = bottom - scale * limit
        for start, end, at in ((left, x + 60, high), (legend - 2, legend + 14, y - 4)):
            ends = f'x1="{start:.1f}" x2="{end:.1f}" y1="{at:.1f}" y2="{at:.1f}"'
            yield f'<line {ends} class="limit {name}"/>'
        yield f'<text x="{legend + 20:.0f}" y="{y:.0f}">{gib(limit)}: {name}</text>'
        y += LINE
    needed = f"{gib(prediction.needed / GIB)}: needed"
    yield f'<text x="{legend + 20:.0f}" y="{y:.0f}">{needed}</text>'
    for name, size in reversed(entries):
        y += LINE
        what = MEANINGS.get(name, name)
        yield from swatch(legend, y, shade(MEMORY[name]), f"{gib(size)}: {what}")


def names_of_passes(job: Job, plan: Plan, prediction: Forecast) -> dict[Where, str]:
    """Of each place in the fullest rank's timeline: pass, stage, block."""
    pp = rank_to_coordinates(prediction.rank, plan.sizes, plan.order)["pp"]
    actions = actions_of(plan, pp)
    first_units = [stage.first for stage in plan.pipeline.held[pp]] if plan.pipeline else [0]
    grouped = (
        job.activation_checkpoint.mode != "none" and job.activation_checkpoint.every_n_layers > 1
    )
    found = {}
    for where, _ in prediction.memory.timeline:
        text = MEANINGS.get(where.kind, where.kind)
        if where.kind in KINDS:
            stage, _, microbatch = actions[where[:3]]
            text = f"{KINDS[where.kind]} of microbatch {microbatch}"
            text += f", stage {stage}" if plan.pipeline else ""
        if where.block is not None:
            of_stage, place = where.block
            if grouped:
                text += f", group {place} of its blocks"
            else:
                text += f", layer {place + max(0, first_units[of_stage] - 1)}"
        found[where] = text
    return found


# --------------------------------------------------------------------------- time


def time_bar(
    seconds: Mapping[str, float],
    error: float | None,
    name: str = "time",
    heading: str = "Where a step's time goes",
) -> Section:
    """A step by what its time is spent on.

    Args:
        error: of a prediction, as a fraction; None: it was measured.
        name: of the picture in its page.
    """
    total = sum(seconds.values())
    order = [part for part in TIMES if seconds.get(part, 0.0) > 0]
    shapes, x, y = [f'<g id="{name}-step">'], 0.0, 60
    for part in order:
        width = WIDTH * seconds[part] / total
        along = ": communication that nothing hides" * (part in (*AXES, "world"))
        text = f"{MEANINGS.get(part, part)}{along}: {ms(seconds[part])}, "
        text += f"{seconds[part] / total:.1%}"
        shapes.append(box(x, 4, width, 40, shade(TIMES[part]), text))
        if width > CHARACTER * len(part) + 6:
            shapes.append(f'<text x="{x + width / 2:.1f}" y="28" class="on">{part}</text>')
        x += width
        y += LINE
        shapes += swatch(0, y - 10, shade(TIMES[part]), text)
    shapes.append("</g>")
    rest = max((part for part in order if part != "compute"), key=seconds.__getitem__, default="")
    most = f", most of it {rest} ({seconds[rest] / total:.1%})" * bool(rest)
    about = "" if error is None else f", {error:.0%} more or less"
    sentence = (
        f"Of {ms(total)}{about}, {seconds.get('compute', 0.0) / total:.1%} is compute. "
        f"The rest is what another layout may win back{most}."
    )
    return figure(name, heading, sentence, y, shapes)


# --------------------------------------------------------------------------- the ranks


def rank_chart(plan: Plan) -> Section:
    """The first nodes with their ranks, coloured by their rank of the pipeline."""
    local, world = plan.local_world_size, plan.world_size
    nodes = math.ceil(world / local)
    shown = num_nodes_shown(plan.sizes, local, plan.order, nodes)
    axes = [axis for axis in plan.order if plan.sizes[axis] > 1]
    places = {
        rank: rank_to_coordinates(rank, plan.sizes, plan.order) for rank in range(min(world, shown * local))
    }
    labels = {r: "·".join(str(at[axis]) for axis in axes) for r, at in places.items()}
    width = max(46.0, *(CHARACTER * max(len(t), len(str(r))) + 8 for r, t in labels.items()))
    columns = min(local, 8, int((WIDTH - 14) / width))
    across = max(1, min(shown, int(WIDTH / (columns * width + 20))))
    high = 38
    tall = 26 + high * math.ceil(local / columns)
    shapes = []
    for node in range(shown):
        x, y = node % across * (columns * width + 20) + 1, node // across * (tall + 10) + 1
        shapes.append(f'<g id="node-{node}">')
        outline = f'width="{columns * width + 10:.1f}" height="{tall}" class="node"/>'
        shapes.append(f'<rect x="{x:.1f}" y="{y}" {outline}')
        shapes.append(f'<text x="{x + 6:.1f}" y="{y + 15}">node {node}</text>')
        for rank in range(node * local, min((node + 1) * local, world)):
            down, along = divmod(rank - node * local, columns)
            at_x, at_y = x + 5 + along * width, y + 21 + down * high
            pp = places[rank]["pp"]
            title = ", ".join([f"rank {rank}", *(f"{axis} {places[rank][axis]}" for axis in axes)])
            shapes.append(box(at_x, at_y, width - 2, high - 2, hue(pp, plan.pp), title))
            for dy, text in ((15, str(rank)), (29, labels[rank])):
                middle = at_x + width / 2 - 1
                shapes.append(f'<text x="{middle:.1f}" y="{at_y + dy}" class="on">{text}</text>')
        shapes.append("</g>")
    y = math.ceil(shown / across) * (tall + 10) + 16
    if shown < nodes:
        more = ", ".join(describe_repetition(plan.sizes, local, plan.order, shown))
        text = f"{nodes - shown:,} more node{'s' * (nodes - shown > 1)} go on like this: {more}"
        shapes.append(f'<text x="0" y="{y}">{text}</text>')
        y += LINE + 4
    for pp, text in enumerate(pipeline_ranks(plan)):
        shapes += swatch(0, y, hue(pp, plan.pp), text)
        y += LINE
    what = f"its place along {' · '.join(axes)}" if axes else "nothing else, for it is alone"
    sentence = (
        "Ranks in one node talk fast: an axis whose index changes only inside a node never leaves "
        f"it. A box is a rank: its number, and {what}."
    )
    return figure("ranks", "Which rank is where", sentence, y, shapes)


def pipeline_ranks(plan: Plan) -> Iterator[str]:
    """Of each rank of the pipeline, its nodes and what it holds."""
    if plan.pipeline is None:
        return
    others = [axis for axis in AXES if axis != "pp"]
    of_ranks = rank_groups(others, plan.sizes, plan.order)
    for pp, (name, ranks) in enumerate(zip(plan.pipeline.names, of_ranks, strict=True)):
        nodes = sorted({rank // plan.local_world_size for rank in ranks})
        yield f"pp {pp} on node{'s' * (len(nodes) > 1)} {format_ranges(nodes)}: {name}"


# --------------------------------------------------------------------------- shapes


def figure(name: str, heading: str, sentence: str, height: float, shapes: Iterable[str]) -> Section:
    """A picture's heading; and the picture under a sentence that says what to look for."""
    title, sentence = escape(heading), escape(sentence)
    size = f'width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}"'
    drawn = [
        f"<p>{sentence}</p>",
        f'<div class="wide"><svg xmlns="http://www.w3.org/2000/svg" id="{name}" role="img" '
        f'aria-labelledby="{name}-title {name}-desc" {size}>',
        f'<title id="{name}-title">{title}</title><desc id="{name}-desc">{sentence}</desc>',
        *shapes,
        "</svg></div>",
    ]
    return heading, "\n".join(drawn)


def box(x: float, y: float, width: float, height: float, fill: str, title: str) -> str:
    """A rectangle that tells ``title`` when pointed at; sizes in pixels."""
    at = f'x="{x:.2f}" y="{y:.4g}" width="{width:.2f}" height="{height:.4g}"'
    return f'<rect {at} fill="{fill}"><title>{escape(title)}</title></rect>'


def swatch(x: float, y: float, fill: str, text: str) -> Iterator[str]:
    """A line of a legend."""
    yield f'<rect x="{x:.0f}" y="{y - 10:.0f}" width="12" height="12" fill="{fill}"/>'
    yield f'<text x="{x + 20:.0f}" y="{y:.0f}">{escape(text)}</text>'


def legend_row(entries: Iterable[tuple[str, Colour]], x: float, y: float) -> Iterator[str]:
    """A legend in one line."""
    for text, colour in entries:
        yield from swatch(x, y, shade(colour), text)
        x += 20 + 7.5 * len(text) + 20


def shade(colour: Colour, part: float = 0.0) -> str:
    """Lighter by ``part``; never so light that it looks empty."""
    red, green, blue = (round(c + (255 - c) * part * 0.6) for c in colour)
    return f"#{red:02x}{green:02x}{blue:02x}"


def hue(place: int, of: int) -> str:
    """One of several colours, all light enough for dark text."""
    return f"hsl({360 * place // max(1, of) + 210},60%,78%)"


def ticks(most: float, count: int) -> list[float]:
    """At most about ``count`` round numbers from 0 on."""
    rough = most / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= rough)
    return [step * n for n in range(math.floor(most / step + 1e-9) + 1)]


def ms(seconds: float) -> str:
    """Seconds, told in milliseconds."""
    return f"{number(1000 * seconds)} ms"


def gib(count: float) -> str:
    """``count``: of GiB."""
    return f"{number(count)} GiB"


def number(value: float) -> str:
    """With three digits or more; what is too small for six of them after the point is 0."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:,.{digits if 0 < digits <= 6 else 0}f}"
