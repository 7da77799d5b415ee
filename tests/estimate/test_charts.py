"""The charts show the whole prediction, each part once and at the right scale."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ET
from collections import defaultdict
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import pytest

from tests.small import Overrides, small_job
from weft.config.errors import ConfigError
from weft.config.schema import Job
from weft.estimate.charts import format_number, pipeline_chart, rank_chart, render_page, round_ticks
from weft.estimate.cost import Span, simulate_pipeline
from weft.estimate.forecast import GIB, Forecast, forecast
from weft.plan.devices import parse_cluster
from weft.plan.pipeline_schedule import build_schedule
from weft.plan.placement import rank_to_coordinates
from weft.plan.plan import Plan
from weft.plan.plan_text import cluster_machine
from weft.plan.resolve import resolve

SVG = "{http://www.w3.org/2000/svg}"
BASE: Overrides = [("model.num_layers", "8"), ("model.tied_embeddings", "false")]
PP4: Overrides = [
    ("parallel.pp", "4"),
    ("parallel.dp_shard", "4"),
    ("train.global_batch_size", "32"),
]
LAYOUTS: dict[str, Overrides] = {
    "Interleaved1F1B": [
        *(("parallel.pp", "4"), ("parallel.tp", "2"), ("parallel.dp_shard", "2")),
        ("train.global_batch_size", "16"),
    ],
    "DualPipeV": PP4,  # full and split backward passes
    "ZBVZeroBubble": PP4,  # all backward passes are split
    "none": [
        *(
            ("parallel.dp_shard", "16"),
            ("train.global_batch_size", "128"),
            ("train.microbatch_size", "1"),
        ),
        ("model.num_layers", "2"),
    ],
}
ALL = [
    pytest.param(name, marks=[pytest.mark.slow] if name == "ZBVZeroBubble" else [])
    for name in LAYOUTS
]
PIPELINES = ALL[:-1]


@lru_cache
def predicted(layout: str) -> tuple[Job, Plan, Forecast]:
    cluster = parse_cluster("2x8xH100")
    assert not isinstance(cluster, ConfigError)
    schedule = [] if layout == "none" else [("pipeline.schedule", layout)]
    job = small_job(*BASE, *LAYOUTS[layout], *schedule, ("run.device", "cuda"))
    plan = resolve(job, cluster_machine(cluster))
    return job, plan, forecast(plan, cluster_machine(cluster), cluster.device)


@lru_cache
def draw_layout(layout: str) -> ET.Element:
    return parsed(render_page(*predicted(layout)[1:], layout, "2 nodes of 8 H100"))


def parsed(html: str) -> ET.Element:
    """Parse the page as XML, which is stricter than HTML."""
    doctype, rest = html.split("\n", 1)
    assert doctype == "<!DOCTYPE html>"
    return ET.fromstring(rest)


def picture(root: ET.Element, name: str) -> ET.Element:
    return next(svg for svg in root.iter(f"{SVG}svg") if svg.get("id") == name)


def part(root: ET.Element, name: str) -> list[ET.Element]:
    """Return the boxes of a group."""
    group = next(group for group in root.iter(f"{SVG}g") if group.get("id") == name)
    return [box for box in group.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]


def title(box: ET.Element) -> str:
    return box.findtext(f"{SVG}title") or ""


class Drawn(NamedTuple):
    """An action as drawn, in pixels."""

    rank: int
    start: float
    end: float


def actions(svg: ET.Element) -> dict[tuple[int, str, int], list[Drawn]]:
    """Return boxes by stage, kind and microbatch."""
    results = defaultdict(list)
    for group in svg.iter(f"{SVG}g"):
        rank = int((group.get("id") or "").removeprefix("pipeline-"))
        for box in group.iter(f"{SVG}rect"):
            name = re.fullmatch(r"(\d+)([FBIW])(\d+) .* ms to .* ms", title(box))
            assert name
            x = float(box.get("x", ""))
            placed = Drawn(rank, x, x + float(box.get("width", "")))
            results[int(name[1]), name[2], int(name[3])].append(placed)
    return results


def scale_of(svg: ET.Element) -> tuple[float, float]:
    """Return the origin of the time axis, and its pixels per second."""
    marks = [
        (float(text.get("x", "")), float((text.text or "").removesuffix(" ms").replace(",", "")))
        for text in svg.iter(f"{SVG}text")
        if (text.text or "").endswith(" ms")
    ]
    (first, zero), (last, number) = marks[0], marks[-1]
    assert zero == 0
    return first, (last - first) / number * 1000


# --------------------------------------------------------------------------- the pipeline


@pytest.mark.parametrize("layout", PIPELINES)
def test_pipeline_chart_has_every_action_once_on_its_rank(layout: str) -> None:
    _, plan, _ = predicted(layout)
    boxes = actions(picture(draw_layout(layout), "pipeline"))
    table = plan.pipeline_schedule
    assert all(len(positions) == 1 for positions in boxes.values())
    assert {key: positions[0].rank for key, positions in boxes.items()} == {
        tuple(action): rank for rank, order in table.items() for action in order
    }


@pytest.mark.parametrize("layout", PIPELINES)
def test_pipeline_chart_boxes_follow_their_inputs(layout: str) -> None:
    boxes = {key: at[0] for key, at in actions(picture(draw_layout(layout), "pipeline")).items()}
    rank_traces = defaultdict(list)
    for box in boxes.values():
        rank_traces[box.rank].append(box)
    slack = 0.03  # for rounding
    for traces in rank_traces.values():
        for before, after in itertools.pairwise(sorted(traces, key=lambda box: box.start)):
            assert before.end <= after.start + slack
    last = max(stage for stage, _, _ in boxes)
    checked = 0
    for (stage, kind, m), box in boxes.items():
        back = "I" if (last, "I", m) in boxes else "B"
        needs = {"F": [(stage - 1, "F", m)], "W": [(stage, "I", m)]}
        for need in needs.get(kind, [(stage, "F", m), (stage + 1, back, m), (stage + 1, "B", m)]):
            if need in boxes:
                checked += 1
                assert boxes[need].end <= box.start + slack
    assert checked >= len(boxes) - len({m for _, _, m in boxes})


@pytest.mark.parametrize("layout", PIPELINES)
def test_pipeline_chart_last_box_ends_with_the_pipeline(layout: str) -> None:
    """The pipeline takes the step less its end, and is idle for the bubble."""
    _, _, prediction = predicted(layout)
    assert prediction.timeline is not None
    assert prediction.time_breakdown is not None
    svg = picture(draw_layout(layout), "pipeline")
    zero, per_second = scale_of(svg)
    boxes = actions(svg)
    for span in prediction.timeline:
        box = boxes[span.stage, span.kind, span.microbatch][0]
        assert box.start == pytest.approx(zero + per_second * span.start, abs=0.2)
        assert box.end == pytest.approx(zero + per_second * span.end, abs=0.2)
    end = max(span.end for span in prediction.timeline)
    last = max(box.end for positions in boxes.values() for box in positions)
    assert last == pytest.approx(zero + per_second * end, abs=0.2)
    busy: dict[int, float] = defaultdict(float)
    for span in prediction.timeline:
        busy[span.rank] += span.end - span.start
    assert end - max(busy.values()) == pytest.approx(prediction.time_breakdown["bubble"])
    assert end < prediction.time_breakdown.total()


def test_page_of_many_actions_is_small() -> None:
    _job, plan, prediction = predicted("Interleaved1F1B")
    table = build_schedule("1F1B", 32, 1, 256)
    item = {(s, kind): {"F": 0.1, "B": 0.234567}[kind] for s in range(32) for kind in "FB"}
    many = simulate_pipeline(table, item, 0.001)
    assert len(many) == 32 * 512
    html = render_page(plan, replace(prediction, timeline=many), "many", "actions")
    assert len(html.encode()) < 2e6
    assert len(actions(picture(parsed(html), "pipeline"))) == len(many)


def test_pipeline_chart_box_has_its_number_only_where_it_fits() -> None:
    timeline = [Span(0, 0, "F", 7, 0.0, 1.0), Span(0, 0, "B", 8, 1.0, 1.001)]
    svg = picture(parsed(f"<!DOCTYPE html>\n<p>{pipeline_chart(timeline, 2.0)[1]}</p>"), "pipeline")
    numbers = [text.text for text in svg.iter(f"{SVG}text") if text.get("class") == "on"]
    assert numbers == ["7"]


# --------------------------------------------------------------------------- memory and time


@pytest.mark.parametrize("layout", ALL)
def test_memory_chart_bars_are_the_predicted_memory(layout: str) -> None:
    _, plan, prediction = predicted(layout)
    svg = picture(draw_layout(layout), "memory")
    memory = prediction.memory
    bars = part(svg, "live")
    heights = [float(bar.get("height", "")) for bar in bars]
    highest = max(heights)
    lives = [live for _, live in memory.timeline]
    assert len(bars) == len(lives)
    for height, live in zip(heights, lives, strict=True):
        assert height / highest == pytest.approx(live / max(lives), rel=2e-3)
    assert max(lives) == sum(memory.live_bytes.values())
    stack = part(svg, "stack")
    sizes = {title(box).split(":")[0]: float(box.get("height", "")) for box in stack}
    assert sizes.keys() == prediction.gib_by_category().keys()
    full = sum(sizes.values())
    for name, size in prediction.gib_by_category().items():
        assert sizes[name] / full == pytest.approx(size * GIB / prediction.needed_bytes, rel=2e-3)
    peak = next(text.text for text in svg.iter(f"{SVG}text") if text.get("id") == "peak") or ""
    name, _ = title(bars[lives.index(max(lives))]).rsplit(": ", 1)
    assert peak.endswith(f"GiB: {name}")
    assert f"Live memory peaks in {name};" in (svg.findtext(f"{SVG}desc") or "")
    if plan.pipeline is not None and memory.peak_location.kind in "FBIW":
        # The stage in the name is on the rank, and the layer is in the stage.
        stage, layer = map(int, re.search(r"stage (\d+), layer (\d+)", name).groups())  # type: ignore[union-attr]
        pp = rank_to_coordinates(prediction.rank, plan.axis_sizes, plan.axis_order)["pp"]
        assert stage in plan.pipeline.stages_on_rank(pp)
        assert layer + 1 in plan.pipeline.stages[stage].units


def test_memory_chart_names_its_microbatches() -> None:
    _, plan, _ = predicted("none")
    assert plan.num_microbatches == 8
    svg = picture(draw_layout("none"), "memory")
    assert "5 of 8 microbatches: the first and last ones" in (svg.findtext(f"{SVG}desc") or "")


@pytest.mark.parametrize("layout", ALL)
def test_time_bar_parts_are_those_of_the_step(layout: str) -> None:
    _, _, prediction = predicted(layout)
    assert prediction.time_breakdown is not None
    boxes = part(picture(draw_layout(layout), "time"), "time-step")
    widths = {title(box).split(":")[0]: float(box.get("width", "")) for box in boxes}
    elapsed = {name: seconds for name, seconds in prediction.time_breakdown.items() if seconds > 0}
    assert widths.keys() == elapsed.keys()
    total = prediction.time_breakdown.total()
    assert sum(widths.values()) == pytest.approx(1200, abs=0.1)
    for name, seconds in elapsed.items():
        assert widths[name] / 1200 == pytest.approx(seconds / total, abs=1e-4)
    milliseconds = 0.0
    for box in boxes:
        match = re.search(r": ([\d,.]+) ms, ", title(box))
        assert match
        milliseconds += float(match[1].replace(",", ""))
    assert milliseconds == pytest.approx(1000 * total, rel=0.01)


# --------------------------------------------------------------------------- ranks, page


@pytest.mark.parametrize("layout", ALL)
def test_rank_chart_ranks_are_in_their_nodes(layout: str) -> None:
    _, plan, _ = predicted(layout)
    svg = picture(draw_layout(layout), "ranks")
    for node in range(2):
        boxes = part(svg, f"node-{node}")
        assert [title(box).split(",")[0] for box in boxes] == [
            f"rank {rank}" for rank in range(8 * node, 8 * node + 8)
        ]
        for rank, box in enumerate(boxes, 8 * node):
            positions = rank_to_coordinates(rank, plan.axis_sizes, plan.axis_order)
            labels = dict(text.split() for text in title(box).split(", ")[1:])
            assert labels == {a: str(i) for a, i in positions.items() if plan.axis_sizes[a] > 1}
    fills = {
        box.get("fill"): title(box).partition("pp ")[2].split(",")[0]
        for node in range(2)
        for box in part(svg, f"node-{node}")
    }
    assert len(fills) == len(set(fills.values())) == plan.pp


def test_rank_chart_of_many_nodes_shows_the_first() -> None:
    _, plan, _ = predicted("Interleaved1F1B")
    many = replace(plan, world_size=1024, dp_replicate=64)
    _, text = rank_chart(many)
    assert text.count('<g id="node-') == 2
    assert "126 more nodes continue the pattern" in text


@pytest.mark.parametrize("layout", ALL)
def test_page_is_self_contained_and_readable(layout: str) -> None:
    html = render_page(*predicted(layout)[1:], "<recipe> & more", "a cluster")
    root = parsed(html)
    assert root.findtext("body/h1") == "<recipe> & more on a cluster"
    for outside in ("<script", "href=", "src=", "@import", "url("):
        assert outside not in html
    style = root.findtext("head/style") or ""
    sizes = [int(a or b) for a, b in re.findall(r"font: (\d+)px|font-size: (\d+)px", style)]
    assert min(sizes) >= 11
    assert "prefers-color-scheme: dark" in style
    names = [svg.get("id") for svg in root.iter(f"{SVG}svg")]
    assert names == ["time", *(["pipeline"] if layout != "none" else []), "memory", "ranks"]
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    for svg in root.iter(f"{SVG}svg"):
        labels = (svg.get("aria-labelledby") or "").split()
        assert [svg[0].get("id"), svg[1].get("id")] == labels
        assert svg[0].text
        assert svg[1].text
        everything_fits(svg)


def everything_fits(svg: ET.Element) -> None:
    """Boxes and texts are inside the picture, and texts do not overlap."""
    wide, high = float(svg.get("width", "")), float(svg.get("height", ""))
    taken: list[tuple[float, float, float]] = []
    offsets = {
        child: float((group.get("transform") or "(0 0)").split()[1].rstrip(")"))
        for group in svg.iter(f"{SVG}g")
        for child in group
    }
    for element in svg.iter():
        y = float(element.get("y", "0")) + offsets.get(element, 0.0)
        x = float(element.get("x", "0"))
        if element.tag == f"{SVG}rect":
            assert x >= -0.01
            assert y >= -0.01
            assert x + float(element.get("width", "")) <= wide + 0.1
            assert y + float(element.get("height", "")) <= high + 0.1
        if element.tag == f"{SVG}text":
            length = 6.0 * len(element.text or "")
            style = (element.get("class") or "").split()
            x -= length if "end" in style else length / 2 if {"on", "middle"} & {*style} else 0
            assert -2 <= x <= x + length <= wide, element.text
            assert 9 <= y <= high, element.text
            for other_x, other_end, other_y in taken:
                difference = (
                    abs(y - other_y) >= 11 or x >= other_end - 1 or x + length <= other_x + 1
                )
                assert difference, element.text
            taken.append((x, x + length, y))


def test_page_of_a_plan_without_times_has_memory_and_ranks() -> None:
    _job, plan, prediction = predicted("Interleaved1F1B")
    plain = replace(prediction, time_breakdown=None, timeline=None, capacity_bytes=None)
    root = parsed(render_page(plan, plain, "recipe", "machine"))
    assert [svg.get("id") for svg in root.iter(f"{SVG}svg")] == ["memory", "ranks"]


@pytest.mark.parametrize("most", [3e-6, 0.07, 1.0, 19.9, 80.0, 32190.0])
def test_ticks_are_round(most: float) -> None:
    result = round_ticks(most, 10)
    assert 4 <= len(result) <= 11
    assert result[0] == 0
    assert result[-1] <= most * (1 + 1e-9)
    digits = result[1] / 10 ** math.floor(math.log10(result[1]) + 1e-9)
    assert round(digits, 6) in (1, 2, 5)


def test_numbers_have_three_digits() -> None:
    values = (0.0, 4e-9, 0.000927, 0.5, 9.876, 80.0, 32190.95)
    assert [*map(format_number, values)] == [
        "0",
        "0",
        "0.000927",
        "0.500",
        "9.88",
        "80.0",
        "32,191",
    ]
