"""The charts show the whole prediction, each part once and at the right scale."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.reporting.test_run_report import Browser, needs_browser
from tests.small import Overrides, small_job
from weft.config.schema import Job
from weft.estimate.cost import Span, simulate_pipeline
from weft.estimate.forecast import GIB, Forecast, forecast
from weft.planning.devices import parse_cluster
from weft.planning.pipeline_schedule import build_schedule, planned_schedule
from weft.planning.placement import rank_to_coordinates
from weft.planning.plan import Plan
from weft.planning.plan_text import cluster_machine
from weft.planning.resolve import resolve
from weft.reporting import forecast_charts
from weft.reporting.forecast_charts import (
    forecast_page,
    format_number,
    memory_chart,
    pipeline_chart,
    rank_chart,
    round_ticks,
    time_bar,
)

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
    schedule = [] if layout == "none" else [("pipeline.schedule", layout)]
    job = small_job(*BASE, *LAYOUTS[layout], *schedule, ("run.device", "cuda"))
    plan = resolve(job, cluster_machine(cluster))
    return job, plan, forecast(plan, cluster_machine(cluster), cluster.device)


def part(section: dict[str, Any]) -> dict[str, Any]:
    """Return the chart of a section, which follows its sentence."""
    text, chart = section["parts"]
    assert text["kind"] == "text"
    return dict(chart)


def draw_pipeline(layout: str) -> dict[str, Any]:
    _, _, prediction = predicted(layout)
    assert prediction.timeline is not None
    return part(pipeline_chart(prediction.timeline, 1.0))


class Drawn(NamedTuple):
    """An action as drawn, in percent of the width."""

    rank: int
    start: float
    end: float


def actions(chart: dict[str, Any]) -> dict[tuple[int, str, int], list[Drawn]]:
    """Return boxes by stage, kind and microbatch."""
    results = defaultdict(list)
    for row in chart["rows"]:
        rank = int(row["name"].removeprefix("rank "))
        for box in row["boxes"]:
            name = re.fullmatch(r"(\d+)([FBIW])(\d+) .* ms to .* ms", box["title"])
            assert name
            placed = Drawn(rank, box["left"], box["left"] + box["width"])
            results[int(name[1]), name[2], int(name[3])].append(placed)
    return results


def scale_of(chart: dict[str, Any]) -> float:
    """Return the percent of the width per second, from the time axis."""
    first, *_, last = chart["ticks"]
    assert (first["at"], first["text"]) == (0, "0 ms")
    return float(1000 * last["at"] / float(last["text"].removesuffix(" ms").replace(",", "")))


# --------------------------------------------------------------------------- the pipeline


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=pytest.mark.slow) if name == "DualPipeV" else name
        for name in PIPELINES
    ],
)
def test_pipeline_chart_has_every_action_once_on_its_rank(layout: str) -> None:
    _, plan, _ = predicted(layout)
    boxes = actions(draw_pipeline(layout))
    table = planned_schedule(plan)
    assert all(len(positions) == 1 for positions in boxes.values())
    assert {key: positions[0].rank for key, positions in boxes.items()} == {
        tuple(action): rank for rank, order in table.items() for action in order
    }


@pytest.mark.parametrize("layout", PIPELINES)
def test_pipeline_chart_boxes_follow_their_inputs(layout: str) -> None:
    boxes = {key: at[0] for key, at in actions(draw_pipeline(layout)).items()}
    rank_traces = defaultdict(list)
    for box in boxes.values():
        rank_traces[box.rank].append(box)
    slack = 0.003  # for rounding
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
    chart = draw_pipeline(layout)
    per_second = scale_of(chart)
    boxes = actions(chart)
    for span in prediction.timeline:
        box = boxes[span.stage, span.kind, span.microbatch][0]
        assert box.start == pytest.approx(per_second * span.start, abs=0.02)
        assert box.end == pytest.approx(per_second * span.end, abs=0.02)
    end = max(span.end for span in prediction.timeline)
    last = max(box.end for positions in boxes.values() for box in positions)
    assert last == pytest.approx(100, abs=0.01)
    busy: dict[int, float] = defaultdict(float)
    for span in prediction.timeline:
        busy[span.rank] += span.end - span.start
    assert end - max(busy.values()) == pytest.approx(prediction.time_breakdown["bubble"])
    assert end < prediction.time_breakdown.total()


def test_page_of_many_actions_is_small() -> None:
    _, _, prediction = predicted("Interleaved1F1B")
    table = build_schedule("1F1B", 32, 1, 256)
    item = {(s, kind): {"F": 0.1, "B": 0.234567}[kind] for s in range(32) for kind in "FB"}
    many = simulate_pipeline(table, item, 0.001)
    assert len(many) == 32 * 512
    html = forecast_page(replace(prediction, timeline=many), "many", "actions")
    assert len(html) < 2e6
    assert html.count(b"<i style=") > len(many)


def test_pipeline_chart_box_has_its_number_only_where_it_fits() -> None:
    timeline = [Span(0, 0, "F", 7, 0.0, 1.0), Span(0, 0, "B", 8, 1.0, 1.001)]
    (row,) = part(pipeline_chart(timeline, 2.0))["rows"]
    assert [box["text"] for box in row["boxes"]] == ["7", ""]


# --------------------------------------------------------------------------- memory and time


@pytest.mark.parametrize("layout", ALL)
def test_memory_chart_bars_are_the_predicted_memory(layout: str) -> None:
    _, plan, prediction = predicted(layout)
    section = memory_chart(prediction)
    chart, sentence = part(section), section["parts"][0]["text"]
    memory = prediction.memory
    lives = [live for _, live in memory.timeline]
    per_byte = 100 / max(prediction.needed_bytes, prediction.capacity_bytes or 0)
    if prediction.capacity_bytes > 3 * prediction.needed_bytes:  # type: ignore[operator]
        per_byte = 100 / prediction.needed_bytes
    heights = [bar["height"] for bar in chart["passes"]]
    assert heights == pytest.approx([live * per_byte for live in lives], abs=1e-3)
    assert max(lives) == sum(memory.live_bytes.values())
    labels = {"allocator": "reserved by the allocator", "outside": "outside the allocator"}
    sizes = {box["text"].split(": ")[1]: box["height"] for box in chart["stack"]}
    assert sizes == {
        labels.get(name, name): pytest.approx(size * GIB * per_byte, rel=2e-3, abs=1e-3)
        for name, size in prediction.gib_by_category().items()
    }
    assert sum(sizes.values()) == pytest.approx(prediction.needed_bytes * per_byte, abs=0.01)
    name, _ = chart["passes"][lives.index(max(lives))]["title"].rsplit(": ", 1)
    assert chart["peak"]["text"].endswith(f"GiB: {name}")
    assert f"Live memory peaks in {name};" in sentence
    if plan.pipeline is not None and memory.peak_location.kind in "FBIW":
        # The stage in the name is on the rank, and the layer is in the stage.
        stage, layer = map(int, re.search(r"stage (\d+), layer (\d+)", name).groups())  # type: ignore[union-attr]
        pp = rank_to_coordinates(prediction.rank, plan.axis_sizes, plan.axis_order)["pp"]
        assert stage in plan.pipeline.stages_on_rank(pp)
        assert layer + 1 in plan.pipeline.stages[stage].units


def test_memory_chart_limits_are_lines_unless_far_above() -> None:
    _, _, prediction = predicted("none")
    needed = prediction.needed_bytes
    near = replace(prediction, capacity_bytes=2 * needed)
    device, measured = part(memory_chart(near, 0.5 * needed / GIB))["limits"]
    assert (device["at"], device["style"]) == (100, "capacity")
    assert (measured["at"], measured["style"]) == (pytest.approx(25), "measured")
    far = part(memory_chart(replace(prediction, capacity_bytes=30 * needed)))
    assert far["limits"][0]["at"] is None
    assert far["limits"][0]["text"].endswith(" GiB: the device (above the chart)")
    assert sum(box["height"] for box in far["stack"]) == pytest.approx(100, abs=0.01)


def test_memory_chart_names_its_microbatches() -> None:
    _, plan, prediction = predicted("none")
    assert plan.num_microbatches == 8
    sentence = memory_chart(prediction)["parts"][0]["text"]
    assert "5 of 8 microbatches: the first and last ones" in sentence


@pytest.mark.parametrize("layout", ALL)
def test_time_bar_parts_are_those_of_the_step(layout: str) -> None:
    _, _, prediction = predicted(layout)
    assert prediction.time_breakdown is not None
    boxes = part(time_bar(prediction.time_breakdown, prediction.error_range))["boxes"]
    elapsed = {name: seconds for name, seconds in prediction.time_breakdown.items() if seconds > 0}
    total = prediction.time_breakdown.total()
    assert {box["name"]: box["width"] for box in boxes} == {
        name: pytest.approx(100 * seconds / total, abs=1e-3) for name, seconds in elapsed.items()
    }
    milliseconds = 0.0
    for box in boxes:
        match = re.search(r": ([\d,.]+) ms, ", box["text"])
        assert match
        milliseconds += float(match[1].replace(",", ""))
    assert milliseconds == pytest.approx(1000 * total, rel=0.01)


# --------------------------------------------------------------------------- ranks, page


@pytest.mark.parametrize("layout", ALL)
def test_rank_chart_ranks_are_in_their_nodes(layout: str) -> None:
    _, plan, _ = predicted(layout)
    nodes = part(rank_chart(plan))["nodes"]
    for node in range(2):
        assert [box["rank"] for box in nodes[node]["ranks"]] == [*range(8 * node, 8 * node + 8)]
        for box in nodes[node]["ranks"]:
            positions = rank_to_coordinates(box["rank"], plan.axis_sizes, plan.axis_order)
            title, *labels = box["title"].split(", ")
            assert title == f"rank {box['rank']}"
            assert dict(text.split() for text in labels) == {
                axis: str(i) for axis, i in positions.items() if plan.axis_sizes[axis] > 1
            }
            assert box["index"] == "·".join(text.split()[1] for text in labels)
    fills = {
        box["color"]: box["title"].partition("pp ")[2].split(",")[0]
        for node in nodes
        for box in node["ranks"]
    }
    assert len(fills) == len(set(fills.values())) == plan.pp


def test_rank_chart_of_many_nodes_shows_the_first() -> None:
    _, plan, _ = predicted("Interleaved1F1B")
    chart = part(rank_chart(replace(plan, world_size=1024, dp_replicate=64)))
    assert len(chart["nodes"]) == 2
    assert "126 more nodes continue the pattern" in chart["note"]


def test_page_is_self_contained_and_escaped() -> None:
    html = forecast_page(predicted("DualPipeV")[2], "<recipe> & more", "a cluster").decode()
    doctype, rest = html.split("\n", 1)
    assert doctype == "<!DOCTYPE html>"
    root = ET.fromstring(rest)  # stricter than HTML
    assert root.findtext("body/header/h1") == "<recipe> & more on a cluster"
    for outside in ("<script", "src=", "@import", "url(", 'href="http'):
        assert outside not in html
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    started = Browser()
    yield started
    started.driver.quit()


# Texts of the page with their places; those of boxes too small for a text are empty.
TEXTS = """
return [...document.querySelectorAll('main .axis span, main b, main li, main .peak, main .under,'
  + ' main .row i, main .bar span, main .node span, main .nodes + p')].filter(e => e.innerText)
  .map(e => { const range = document.createRange(); range.selectNodeContents(e);
    const t = range.getBoundingClientRect(), b = e.getBoundingClientRect();
    return {text: e.innerText, left: t.left, right: t.right, top: t.top, bottom: t.bottom,
      isCut: e.matches('i, .bar span, .node span')
        && (t.left < b.left - 1 || t.right > b.right + 1),
      size: parseFloat(getComputedStyle(e).fontSize)} })
"""


@needs_browser
@pytest.mark.parametrize("layout", ALL)
def test_page_texts_are_readable(browser: Browser, tmp_path: Path, layout: str) -> None:
    """Texts are large enough, inside the page and their boxes, and do not overlap."""
    path = tmp_path / "plan.html"
    path.write_bytes(forecast_page(predicted(layout)[2], "recipe", "a cluster"))
    browser.open(path)
    headings = browser.run("return [...document.querySelectorAll('h2')].map(h => h.innerText)")
    assert headings == [
        "Time breakdown of a step",
        *(["Pipeline schedule of a step"] if layout != "none" else []),
        "Memory of the fullest rank",
        "Placement of ranks",
    ]
    texts = browser.run(TEXTS)
    assert len(texts) > 30
    for n, text in enumerate(texts):
        assert text["size"] >= 11, text
        assert 0 <= text["left"] <= text["right"] <= 1280, text
        assert not text["isCut"], text
        for other in texts[:n]:
            assert (
                text["left"] >= other["right"] - 1
                or text["right"] <= other["left"] + 1
                or text["top"] >= other["bottom"] - 4
                or text["bottom"] <= other["top"] + 4
            ), (text, other)


def test_page_of_a_plan_without_times_has_memory_and_ranks() -> None:
    _, _, prediction = predicted("Interleaved1F1B")
    plain = replace(prediction, time_breakdown=None, timeline=None, capacity_bytes=None)
    html = forecast_page(plain, "recipe", "machine").decode()
    assert re.findall("<h2>(.*)</h2>", html) == ["Memory of the fullest rank", "Placement of ranks"]


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


def test_every_cause_of_time_has_a_color() -> None:
    css = (Path(forecast_charts.__file__).parent / "templates" / "page.css").read_text()
    assert [cause for cause in forecast_charts.CAUSES if f"--{cause}:" not in css] == []
