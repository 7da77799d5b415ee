"""Diagrams of the pages, drawn as SVG from weft's own plans, schedules and names.

Each function of `DIAGRAMS` returns one drawing.  Colors are variables of ``_static/site.css``, so
that a drawing follows the page from light to dark.  Texts of a drawing name functions, files and
fault sites; `exists` ends the build if one of them is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from weft.checkpoint.manifest import checkpoint_path
from weft.checkpoint.shard_files import shard_name
from weft.monitor.faults import SITES
from weft.planning.pipeline_schedule import PipelineSchedule, build_schedule, execution_order
from weft.planning.placement import MESH_ORDERS, rank_to_coordinates
from weft.planning.plan import Machine, Plan

Line = str


class Box(NamedTuple):
    """A rectangle of a drawing, in units of the drawing."""

    x: float
    y: float
    width: float
    height: float


def rectangle(box: Box, kind: str, title: str = "", radius: float = 4) -> Line:
    tip = f"<title>{escape(title)}</title>" if title else ""
    x, y, width, height = (f"{value:g}" for value in box)
    return (
        f'<rect class="d-{kind}" x="{x}" y="{y}" width="{width}" height="{height}" '
        f'rx="{radius:g}">{tip}</rect>'
    )


def text(x: float, y: float, content: object, kind: str = "text", anchor: str = "middle") -> Line:
    return (
        f'<text class="d-{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">'
        f"{escape(str(content))}</text>"
    )


def arrow(points: Sequence[tuple[float, float]], kind: str = "arrow") -> Line:
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline class="d-{kind}" points="{path}" marker-end="url(#d-head)"/>'


HEAD = (
    '<defs><marker id="d-head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
    'markerHeight="7" orient="auto"><path class="d-head" d="M0 0L8 4L0 8z"/></marker></defs>'
)


def drawing(name: str, width: float, height: float, lines: list[Line], alt: str, note: str) -> str:
    """Return a figure: the drawing, its text for screen readers, and its caption."""
    body = "".join(lines)
    return (
        f'<figure class="diagram" id="diagram-{name}"><div class="diagram-scroll">'
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-labelledby="{name}-alt" '
        f'style="min-width:{0.8 * width:g}px;max-width:{width:g}px">'
        f'<title id="{name}-alt">{escape(alt)}</title>{HEAD}{body}</svg></div>'
        f"<figcaption>{note}</figcaption></figure>"
    )


def plan_on_cluster(recipe: str, cluster: str, keys: dict[str, str]) -> Plan:
    """Return the plan of a recipe with other keys, as ``weft plan`` makes it."""
    from weft.planning.plan_text import plan_recipe

    def no_machine(section: object) -> Machine:
        raise AssertionError("the cluster replaces this machine")

    plan, _ = plan_recipe(recipe, list(keys.items()), [], cluster, no_machine)
    return plan


# --------------------------------------------------------------------------- mesh


def mesh() -> str:
    """Draw each rank of a mesh: its node, its indices, and the layers of its stage."""
    keys = {
        "parallel.pp": "2",
        "parallel.dp_shard": "4",
        "parallel.tp": "2",
        "train.global_batch_size": "64",
    }
    recipe, cluster = "llama3-8b", "2x8xH100"
    plan = plan_on_cluster(recipe, cluster, keys)
    assert plan.pipeline is not None
    sizes = {"pp": plan.pp, "dp_shard": plan.dp_shard, "tp": plan.tp}
    cell_w, cell_h, gap, left, top = 112, 52, 10, 74, 62
    node_w = plan.dp_shard * (cell_w + gap) + gap
    node_h = plan.tp * (cell_h + gap) + gap + 26
    lines: list[Line] = []
    for column in range(plan.dp_shard):
        center = left + gap + column * (cell_w + gap) + cell_w / 2
        lines.append(text(center, top - 34, f"dp_shard {column}", "axis"))
        first = column * plan.local_batch_size
        last = first + plan.local_batch_size - 1
        lines.append(text(center, top - 18, f"sequences {first}-{last}", "small"))
    for pp in range(plan.pp):
        y0 = top + pp * (node_h + 34)
        lines.append(rectangle(Box(left, y0, node_w, node_h), "node", radius=8))
        stage = plan.pipeline.stages[pp]
        lines.append(
            text(left + gap, y0 + 18, f"node {pp} = stage pp {pp}: {stage.name}", "label", "start")
        )
        for tp in range(plan.tp):
            center = y0 + 26 + gap + tp * (cell_h + gap) + cell_h / 2
            lines.append(text(left - 8, center + 4, f"tp {tp}", "axis", "end"))
        for rank in range(plan.world_size):
            at = rank_to_coordinates(rank, sizes, MESH_ORDERS[plan.mesh_order])
            if at["pp"] != pp:
                continue
            assert rank // plan.local_world_size == pp, "a node of the drawing is one stage"
            x = left + gap + at["dp_shard"] * (cell_w + gap)
            y = y0 + 26 + gap + at["tp"] * (cell_h + gap)
            place = ", ".join(f"{axis} {at[axis]}" for axis in sizes)
            lines.append(rectangle(Box(x, y, cell_w, cell_h), f"hue{pp}", f"rank {rank}: {place}"))
            lines.append(text(x + cell_w / 2, y + 22, f"rank {rank}", "strong"))
            share = f"shard {at['dp_shard'] + 1}/{plan.dp_shard} of tp {at['tp']}"
            lines.append(text(x + cell_w / 2, y + 40, share, "small"))
        if pp + 1 < plan.pp:
            x = left + node_w / 2
            lines.append(arrow([(x - 60, y0 + node_h + 3), (x - 60, y0 + node_h + 31)]))
            lines.append(text(x - 50, y0 + node_h + 22, "activations", "small", "start"))
            lines.append(arrow([(x + 60, y0 + node_h + 31), (x + 60, y0 + node_h + 3)]))
            lines.append(text(x + 70, y0 + node_h + 22, "their gradients", "small", "start"))
    height = top + plan.pp * (node_h + 34) - 20
    command = " ".join(f"--{key} {value}" for key, value in keys.items())
    alt = (
        f"Device mesh of {plan.world_size} ranks on {plan.pp} nodes. Each node is one pipeline "
        f"stage. In a node, {plan.dp_shard} columns are dp_shard and {plan.tp} rows are tp."
    )
    note = (
        f"The mesh of <code>weft plan {recipe} --cluster {cluster} {command} --rank-map</code>. "
        "The ranks of a column share their sequences and split each weight matrix (tp). The ranks "
        "of a row hold different sequences, and one shard each of their part (dp_shard)."
    )
    return drawing("mesh", left + node_w + 6, height, lines, alt, note)


# --------------------------------------------------------------------------- pipeline

# Slots of an action: backward computes two gradients, each about as long as forward.
SLOTS = {"F": 1, "B": 2, "I": 1, "W": 1}
KIND_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward of the input",
    "W": "backward of the weights",
}


def start_times(schedule: PipelineSchedule) -> tuple[list[tuple[int, int, str, int, int]], int]:
    """Return (rank, stage, kind, microbatch, start) of each action, and the end, in slots.

    An action starts when its rank is free and its dependencies are done; sending takes no time.
    """
    free = dict.fromkeys(schedule, 0)
    done: dict[tuple[int, str, int], int] = {}
    results = []
    for rank, (stage, kind, microbatch), dependencies in execution_order(schedule):
        start = max([free[rank], *(done[dependency] for dependency in dependencies)])
        free[rank] = start + SLOTS[kind]
        done[stage, "B" if kind == "I" else kind, microbatch] = free[rank]
        results.append((rank, stage, kind, microbatch, start))
    return results, max(free.values())


def pipeline() -> str:
    """Draw the actions of each rank over time, for three schedules of the same work."""
    pp, num_microbatches = 4, 8
    lines: list[Line] = []
    slot, row, left, y = 0.0, 22, 58, 0.0
    charts = []
    for name, stages_per_rank in (("1F1B", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)):
        schedule = build_schedule(name, pp, stages_per_rank, num_microbatches)
        actions, end = start_times(schedule)
        charts.append((name, stages_per_rank, schedule, actions, end))
    # Half as long, if a rank's layers are in two stages.
    longest = max(end / stages_per_rank for _, stages_per_rank, *_, end in charts)
    slot = 800 / longest
    bubbles = []
    for name, stages_per_rank, schedule, actions, end in charts:
        width = slot / stages_per_rank
        busy = sum(SLOTS[action.kind] for order in schedule.values() for action in order)
        bubble = 1 - busy / (end * pp)
        bubbles.append(f"{name} {bubble:.0%}")
        stages = f"{stages_per_rank} stage{'s' if stages_per_rank > 1 else ''} per rank"
        title = f"{name}, {stages}: {bubble:.0%} of the time is bubble"
        lines.append(text(left, y + 16, title, "label", "start"))
        y += 24
        for rank in range(pp):
            lines.append(text(left - 8, y + rank * row + 15, f"rank {rank}", "axis", "end"))
            lines.append(rectangle(Box(left, y + rank * row, 800, row - 3), "idle", radius=2))
        for rank, stage, kind, microbatch, start in actions:
            box = Box(left + start * width, y + rank * row, SLOTS[kind] * width - 0.8, row - 3)
            tip = f"stage {stage}, {KIND_NAMES[kind]} of microbatch {microbatch}"
            chunk = "" if stage < pp else "2"
            lines.append(rectangle(box, f"{kind}{chunk}", tip, 2))
            lines.append(text(box.x + box.width / 2, box.y + 14, microbatch, "tiny"))
        y += pp * row + 14
    legend = [
        ("F", "forward"),
        ("F2", "of the second stage"),
        ("B", "backward"),
        ("B2", "of the second stage"),
        ("I", "input gradient"),
        ("W", "weight gradient"),
        ("idle", "bubble"),
    ]
    x = float(left)
    for kind, label in legend:
        lines.append(rectangle(Box(x, y + 2, 14, 14), kind, radius=2))
        lines.append(text(x + 19, y + 13, label, "small", "start"))
        x += 32 + 6.3 * len(label)
    alt = (
        f"Timelines of {pp} pipeline ranks with {num_microbatches} microbatches under three "
        f"schedules. Share of idle time: {', '.join(bubbles)}."
    )
    note = (
        "The actions that the engine runs (<code>weft.planning.pipeline_schedule</code>), for "
        f"{pp} ranks and {num_microbatches} microbatches, with time to the right. The number is "
        "the microbatch. A backward is drawn twice as long as a forward, two stages together as "
        "long as one, and sending takes no time."
    )
    return drawing("pipeline", left + 806, y + 24, lines, alt, note)


# --------------------------------------------------------------------------- step


def exists(module: str, name: str) -> str:
    """Return ``module.name`` for a drawing; it must be in weft."""
    value = import_module(f"weft.{module}")
    for part in name.split("."):
        value = getattr(value, part)
    return f"{module.replace('.', '/')}.py: {name}"


def step() -> str:
    """Draw the data of one training step, with the numbers of a plan."""
    plan = plan_on_cluster("llama3-8b", "16x8xH100", {"parallel.tp": "2"})
    batch = f"{plan.microbatch_size} x {plan.seq_len:,} tokens"
    shards = plan.dp_shard * plan.tp
    share = f"1/{shards} of {plan.num_params / 1e9:.2f} billion numbers"
    # (title, code, communication), then the data that the next box gets.
    boxes = [
        (
            "Read",
            exists("data.loader", "Loader.get_microbatches"),
            "none: the samples follow from seed and step",
            f"{plan.local_batch_size} of {plan.global_batch_size} sequences, as "
            f"{plan.num_microbatches} microbatches of {batch}",
        ),
        (
            "Forward",
            exists("training.step", "TrainStep.forward_backward"),
            f"dp_shard {plan.dp_shard}: all-gather each block's weights in {plan.compute_dtype}; "
            f"tp {plan.tp}: exchange activations",
            "logits of some tokens at a time",
        ),
        (
            "Loss",
            exists("training.loss", "cross_entropy"),
            "all ranks: the number of valid tokens",
            "the loss as a sum, divided once by that number",
        ),
        (
            "Backward",
            exists("parallel.data_parallel", "set_gradient_sync"),
            f"dp_shard {plan.dp_shard}: reduce-scatter gradients in {plan.reduce_dtype}",
            f"gradients: {share} on each rank",
        ),
        (
            "Check",
            exists("monitor.anomaly", "AnomalyDetector.check"),
            "all ranks: loss and gradient norm, on the device",
            "the same verdict on every rank",
        ),
        (
            "Update",
            exists("optim.optimizer", "masked_step"),
            "all axes: the squared gradient norm",
            f"weights and moments in float32: {share}, and twice that",
        ),
        (
            "Log and save, where due",
            exists("training.metric_logger", "MetricLogger"),
            "rank 0 gathers times; each rank writes its shards",
            "",
        ),
    ]
    lines: list[Line] = []
    left, width, height, pitch, y = 60, 330, 50, 84, 30
    lines.append(text(left, 16, "code", "axis", "start"))
    lines.append(text(left + width + 34, 16, "communication", "axis", "start"))
    for number, (title, place, communication, result) in enumerate(boxes):
        top = y + number * pitch
        lines.append(rectangle(Box(left, top, width, height), f"hue{number % 2}", radius=6))
        lines.append(text(left + 14, top + 21, f"{number + 1}  {title}", "strong", "start"))
        lines.append(text(left + 14, top + 39, place, "code", "start"))
        notes = communication.split("; ")
        for row, note in enumerate(notes):
            middle = top + 30 + 18 * row - 9 * (len(notes) - 1)
            lines.append(text(left + width + 34, middle, note, "text", "start"))
        lines.append(rectangle(Box(left + width + 14, top + 8, 3, height - 16), "link", radius=1))
        if result:
            x = left + width / 2
            lines.append(arrow([(x, top + height + 2), (x, top + pitch - 3)]))
            lines.append(text(x + 12, top + height + 21, result, "small", "start"))
    first, last = y + pitch + height / 2, y + 5 * pitch + height / 2
    points = [(left - 2, last), (left - 28, last), (left - 28, first), (left - 3, first)]
    lines.append(arrow(points))
    lines.append(
        f'<text class="d-small" transform="translate({left - 36},{(first + last) / 2}) '
        'rotate(-90)" text-anchor="middle">weights of the next step</text>'
    )
    alt = (
        "Data flow of one training step: "
        + "; ".join(f"{title}: {communication}" for title, _, communication, _ in boxes)
        + "."
    )
    note = (
        "One step of <code>weft train llama3-8b --parallel.tp 2</code> on 128 ranks, with the "
        "numbers of its plan."
    )
    return drawing("step", 800, y + len(boxes) * pitch - 26, lines, alt, note)


# --------------------------------------------------------------------------- checkpoint


def checkpoint() -> str:
    """Draw who writes what when a checkpoint is saved, and its fault sites."""
    directory = Path("checkpoints")
    old, new = (checkpoint_path(directory, number).name for number in (100, 200))
    temporary = f".tmp-{new}-..."
    sites = [site for site in SITES if site.startswith("checkpoint")]
    left, width, lane = 128, 850, 30
    # When each fault site is passed, as a share of the time axis.
    times = dict(zip(sites, (0.13, 0.27, 0.46, 0.50, 0.62, 0.70, 0.78, 0.86, 0.94), strict=True))
    lines: list[Line] = []

    def bar(row: int, start: float, end: float, kind: str, label: str) -> None:
        box = Box(left + start * width, 10 + row * lane, (end - start) * width - 2, lane - 8)
        lines.append(rectangle(box, kind, radius=3))
        lines.append(text(box.x + box.width / 2, box.y + 15, label, "bar"))

    names = ["rank 0 trains", "rank 1 trains", "rank 0 writes", "rank 1 writes"]
    for row, name in enumerate(names):
        lines.append(text(left - 10, 26 + row * lane, name, "axis", "end"))
    for row in (0, 1):
        bar(row, 0, 0.13, "F", "step 200")
        bar(row, 0.13, 0.25, "B", "copy to host")
        for number in range(4):
            start = 0.25 + number * 0.1875
            bar(row, start, start + 0.1875, "F", f"step {201 + number}")
    bar(2, 0.27, 0.46, "hue0", shard_name(0))
    bar(3, 0.27, 0.44, "hue0", shard_name(1))
    bar(2, 0.50, 0.62, "hue1", "manifest.json")
    bar(2, 0.62, 0.70, "B", "rename")
    bar(2, 0.78, 0.94, "idle", f"delete {old}")
    axis = 10 + len(names) * lane
    for index, share in enumerate(times.values()):
        x = left + share * width
        lines.append(f'<line class="d-tick" x1="{x:g}" x2="{x:g}" y1="{axis}" y2="{axis + 8}"/>')
        lines.append(text(x, axis + 20, index + 1, "strong"))
    lines.append(text(left - 10, axis + 20, "fault sites", "axis", "end"))
    y = axis + 34
    lines.append(text(left - 10, y + 16, "directory", "axis", "end"))
    states = [
        (0, 0.27, [f"{old}/"]),
        (0.27, 0.70, [f"{old}/", f"{temporary}/"]),
        (0.70, 0.86, [f"{old}/", f"{new}/"]),
        (0.86, 1.0, [f"{new}/"]),
    ]
    for start, end, content in states:
        box = Box(left + start * width, y, (end - start) * width - 2, 44)
        lines.append(rectangle(box, "node", radius=3))
        for row, name in enumerate(content):
            lines.append(text(box.x + 8, y + 17 + 18 * row, name, "code", "start"))
    y += 56
    lines.append(text(left - 10, y + 16, "a crash resumes", "axis", "end"))
    for start, end, kind, label in (
        (0, 0.70, "hue0", f"from {old}"),
        (0.70, 1.0, "hue1", f"from {new}"),
    ):
        box = Box(left + start * width, y, (end - start) * width - 2, 24)
        lines.append(rectangle(box, kind, radius=3))
        lines.append(text(box.x + box.width / 2, y + 16, label, "bar"))
    items = "".join(f"<li><code>{site}</code> {SITES[site]}</li>" for site in sites)
    alt = (
        "Time line of a checkpoint: all ranks copy their state to host memory while training "
        f"waits, then write {shard_name(0)} and {shard_name(1)} in the background into "
        f"{temporary}. Rank 0 adds manifest.json and renames the directory to {new}. A crash "
        f"before the rename resumes from {old}, a crash after it from {new}."
    )
    note = (
        "Saving with <code>checkpoint.async_save</code>. Training waits only for the copy, and one "
        "rename commits. <code>resilience.faults</code> can end a run at each numbered site:"
        f'<ol class="diagram-sites">{items}</ol>'
    )
    return drawing("checkpoint", left + width + 4, y + 30, lines, alt, note)


DIAGRAMS: dict[str, Callable[[], str]] = {
    "mesh": mesh,
    "pipeline": pipeline,
    "step": step,
    "checkpoint": checkpoint,
}
