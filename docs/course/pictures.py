"""Pictures of the course, drawn from what the commands of a lesson wrote.

``python docs/course/pictures.py`` runs every lesson and draws its picture anew, as an SVG beside
it.  Colors are in the file, for light and dark pages, so that it is the same on the site and in
other viewers.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent.parent)]

from tests import pages  # noqa: E402
from weft.records.span_reader import read_spans  # noqa: E402

STYLE = """
text{font:13px system-ui,sans-serif;fill:#1b1f24}.soft{fill:#57606a}
.idle{fill:#e7eaee}.forward{fill:#a9cdf0}.backward{fill:#f2bd8c}.optimizer{fill:#b9dcb4}
.other{fill:#c9c3e6}.line-0{stroke:#0b5cad}.line-1{stroke:#c2570c}polyline{fill:none;stroke-width:2}
path{stroke:#8c959f;fill:none}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.soft{fill:#a9b4c0}.idle{fill:#2a3138}
.forward{fill:#28608f}.backward{fill:#8a5726}.optimizer{fill:#35693a}.other{fill:#5a4f8f}
.line-0{stroke:#7cb7f5}.line-1{stroke:#f0a35e}}
"""
WIDTH, LEFT = 860, 130


def svg(height: float, lines: Sequence[str], title: str) -> str:
    """Return a picture; ``title`` is its text for screen readers."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>{''.join(lines)}</svg>\n"
    )


def box(x: float, y: float, width: float, height: float, kind: str, tip: str = "") -> str:
    title = f"<title>{escape(tip)}</title>" if tip else ""
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:g}" width="{max(width, 0.5):.1f}" '
        f'height="{height:g}" rx="2">{title}</rect>'
    )


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:g}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(content)}</text>'


def legend(y: float, kinds: Sequence[tuple[str, str]]) -> Iterator[str]:
    x = float(LEFT)
    for kind, label in kinds:
        yield box(x, y, 14, 14, kind)
        yield text(x + 20, y + 12, label, "soft")
        x += 44 + 6.5 * len(label)


# --------------------------------------------------------------------------- timeline


def kind_of(name: str, args: dict[str, object]) -> str | None:
    """Return the color of a span, or None for one that has others inside."""
    match args.get("kind"):
        case "F":
            return "forward"
        case "B" | "I" | "W":
            return "backward"
    if name in ("gradient norm", "optimizer"):
        return "optimizer"
    return "other" if name == "loss" else None


def timeline(run_dir: Path, num_ranks: int, step: int) -> str:
    """Draw what each rank did in a step: forward, backward and optimizer, over host time."""
    spans = [
        [
            (event["ts"], event["dur"], kind, event["name"])
            for event in read_spans(run_dir, rank)
            if event["args"]["step"] == step and (kind := kind_of(event["name"], event["args"]))
        ]
        for rank in range(num_ranks)
    ]
    assert all(spans), f"a rank of {run_dir} has no spans of step {step}"
    first = min(start for rank in spans for start, *_ in rank)
    end = max(start + duration for rank in spans for start, duration, *_ in rank)
    scale, lines = (WIDTH - LEFT - 10) / (end - first), []
    for rank, events in enumerate(spans):
        y = 8 + rank * 40
        lines += [text(LEFT - 10, y + 21, f"rank {rank}", "soft", "end")]
        lines += [box(LEFT, y, (end - first) * scale, 32, "idle")]
        for start, duration, kind, name in sorted(events):
            tip = f"{name}: {duration / 1000:.1f} ms"
            lines += [box(LEFT + (start - first) * scale, y, duration * scale, 32, kind, tip)]
            if kind in ("forward", "backward") and duration * scale > 22:
                middle = LEFT + (start - first + duration / 2) * scale
                lines += [text(middle, y + 21, name.lstrip("0123456789"), "", "middle")]
    y = 16 + num_ranks * 40
    lines += legend(
        y,
        [
            ("forward", "forward (F), by microbatch"),
            ("backward", "backward (B)"),
            ("optimizer", "gradient norm and optimizer"),
            ("idle", "waiting"),
        ],
    )
    lines += [text(WIDTH - 10, y + 12, f"{(end - first) / 1000:,.0f} ms", "soft", "end")]
    return svg(y + 24, lines, f"Timeline of step {step} on {num_ranks} ranks")


# --------------------------------------------------------------------------- bars


def bars(comparison: Path, title: str) -> str:
    """Draw the predicted memory of each variant of ``weft compare --plan-only``, in parts."""
    variants = json.loads((comparison / "comparison.json").read_text("utf-8"))["variants"]
    forecasts = [(each["label"], each["forecast"]) for each in variants if each["forecast"]]
    assert forecasts
    capacity = forecasts[0][1]["capacity_gib"]
    longest = max(capacity, *(forecast["peak_memory_gib"] for _, forecast in forecasts))
    scale, lines = (WIDTH - LEFT - 180) / longest, []
    kinds = {
        "parameters": "forward",
        "gradients": "backward",
        "optimizer": "optimizer",
        "activations": "other",
    }
    for row, (label, forecast) in enumerate(forecasts):
        y, x = 8 + row * 34, float(LEFT)
        lines += [
            text(LEFT - 10, y + 18, label.replace("activation_checkpoint.", ""), "soft", "end")
        ]
        for name, size in forecast["memory_gib"].items():
            lines += [box(x, y, size * scale, 26, kinds.get(name, "idle"), f"{name}: {size:.1f}")]
            x += size * scale
        seconds = forecast["step_seconds"]
        time = "does not fit" if forecast["fits"] is False else f"{seconds:.3g} s/step"
        peak = forecast["peak_memory_gib"]
        lines += [text(x + 8, y + 18, f"{peak:.1f} GiB, {time}")]
    y = 14 + len(forecasts) * 34
    edge = LEFT + capacity * scale
    lines += [f'<path d="M{edge:.1f} 4V{y - 4}" stroke-dasharray="4 3"/>']
    lines += [text(edge, y + 10, f"{capacity:.0f} GiB", "soft", "middle")]
    lines += legend(y + 18, [*((kind, name) for name, kind in kinds.items()), ("idle", "the rest")])
    return svg(y + 42, lines, title)


# --------------------------------------------------------------------------- curves


def curves(runs: Sequence[tuple[str, Path]], title: str) -> str:
    """Draw the loss of each run over its steps."""
    series = []
    for label, run_dir in runs:
        lines = (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        series.append((label, [(record["step"], record["loss"]) for record in records]))
    points = [point for _, values in series for point in values]
    last = max(step for step, _ in points)
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    height = 200
    body = [f'<path d="M{LEFT} 10V{height + 10}H{WIDTH - 10}"/>']
    for loss in (low, high):
        y = 10 + (high - loss) / (high - low) * height
        body += [text(LEFT - 10, y + 5, f"{loss:.2f}", "soft", "end")]
    body += [text(WIDTH - 10, height + 28, f"step {last}", "soft", "end")]
    for number, (label, values) in enumerate(series):
        path = " ".join(
            f"{LEFT + step / last * (WIDTH - LEFT - 10):.1f},"
            f"{10 + (high - loss) / (high - low) * height:.1f}"
            for step, loss in values
        )
        dashes = ' stroke-dasharray="7 6"' if number else ""
        body += [f'<polyline class="line-{number}" points="{path}"{dashes}/>']
        x = LEFT + 20 + 260 * number
        sample = f"{x},{height + 40} {x + 30},{height + 40}"
        body += [f'<polyline class="line-{number}" points="{sample}"{dashes}/>']
        body += [text(x + 38, height + 45, label, "soft")]
    return svg(height + 56, body, title)


# --------------------------------------------------------------------------- lessons

# What each lesson draws, from the directory in which its commands ran.
PICTURES: dict[str, Callable[[Path], str]] = {
    "one-process": lambda here: timeline(here / "runs/one", 1, step=8),
    "replicas": lambda here: timeline(here / "runs/two", 2, step=8),
    "shards": lambda here: bars(here / "runs/shards", "Memory of a rank by number of shards"),
    "recompute": lambda here: bars(here / "runs/modes", "Memory of a rank by mode"),
    "tensor": lambda here: timeline(here / "runs/tensor", 2, step=8),
    "pipeline": lambda here: timeline(here / "runs/pipeline", 2, step=8),
    "context": lambda here: bars(here / "runs/lengths", "Memory of a rank by parallel.cp"),
    "choose": lambda here: curves(
        [("layout changed twice", here / "runs/moves"), ("one process", here / "runs/stays")],
        "Loss of two runs over their steps",
    ),
}


def main() -> None:
    (HERE / "pictures").mkdir(exist_ok=True)
    for name in sys.argv[1:] or PICTURES:
        with tempfile.TemporaryDirectory() as directory:
            pages.check_page(HERE / f"{name}.md", Path(directory))
            picture = PICTURES[name](Path(directory))
        (HERE / "pictures" / f"{name}.svg").write_text(picture, "utf-8")
        print(name, flush=True)


if __name__ == "__main__":
    main()
