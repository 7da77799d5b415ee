"""REPORT: one page that tells a run, or several beside each other, and opens without a network.

Curves are drawn by plotly.js, which is written into the page; everything else is plain HTML and
stays readable without scripts.  What comes out of a run's folder is text: it is escaped for HTML,
for JSON in a script element and for plotly, which knows a little HTML of its own.  Behind that
stands the page's own policy: its two scripts run, known by their hashes, and nothing else, and
nothing is fetched.

What the planner expects takes torch and seconds; who has it passes it in as sections.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from weft.job import WeftError
from weft.observe.files import replace_bytes
from weft.observe.history import ROUTINE, Floats, History, Mark, fewer
from weft.observe.ledger import KINDS
from weft.observe.record import StepRecord
from weft.observe.terminal import duration

FILE = "report.html"  # in a run's folder
MOST_POINTS = 2000  # of a curve
MOST_MARKS = 400  # of a run
EVERY = 60.0  # seconds between two pages of a running run, and its reload
STYLE = (resources.files("weft.observe") / "report.css").read_text("utf-8")

Section = tuple[str, str]  # heading as text, content as HTML
# What stands for the planner's sections where they are not made.
LATER: Section = (
    "Predicted and measured",
    "<p><code>weft report</code> with this run's folder adds what the planner says of it.</p>",
)

# What the seconds of a run went into, in the colours of `weft.predict.pictures`.
COLOURS = dict(
    zip(KINDS, ["#7ac27a", "#70a6f0", "#8cd2dc", "#c49ee6", "#eed25c", "#f096be"], strict=True)
)
# Curves that records may have: identifier, heading, unit, and of each its name in the record, its
# label and its style (``exact`` is not smoothed), or the colour of its area.  Of several runs the
# areas are left out.
CHARTS: list[tuple[str, str, str, list[tuple[str, str, str]]]] = [
    ("loss", "Loss", "nats per token", [("loss", "train", ""), ("eval_loss", "held out", "dots")]),
    ("speed", "Speed", "tokens per second", [("tokens_per_second", "", "")]),
    (
        "mfu",
        "Model FLOPs utilisation",
        "%",
        [("mfu", "MFU", ""), ("mfu_causal", "attention counted as causal", "")],
    ),
    ("grad_norm", "Gradient norm", "before clipping", [("grad_norm", "", "")]),
    ("lr", "Learning rate", "", [("lr", "", "exact")]),
    (
        "step_seconds",
        "Seconds of a step",
        "mean since the last record",
        [("step_seconds", "measured", ""), ("expected_step_seconds", "predicted", "dash")],
    ),
    (
        "memory",
        "Memory of the fullest rank",
        "GiB, most so far",
        [("memory_peak_gib", "measured", "exact"), ("expected_memory_gib", "predicted", "dash")],
    ),
    (
        "parts",
        "Parts of a step",
        "seconds, stacked",
        [
            ("rest_seconds", "computing and communication", "#7ac27a"),
            ("data_seconds", "waiting for data", "#f09c58"),
        ],
    ),
    (
        "ledger",
        "What the run's time went into",
        "seconds since it began, stacked",
        [(f"seconds.{kind}", kind, colour) for kind, colour in COLOURS.items()],
    ),
    ("data_seconds", "Waiting for data", "seconds of a step", [("data_seconds", "", "")]),
]
STACKED = {"parts", "ledger"}
# Objects in records, and what a chart of their numbers is called.
GROUPED = {
    "grad_norms": ("Gradient norm by group", "before clipping"),
    "source_losses": ("Loss by source", "nats per token"),
    "source_eval_losses": ("Held-out loss by source", "nats per token"),
    "ranks.memory_peak_gib": ("Memory over the ranks", "GiB, most so far"),
    "ranks.compute_seconds": ("Computing over the ranks", "seconds of a step"),
    "ranks.data_seconds": ("Waiting for data over the ranks", "seconds of a step"),
}


def report_page(
    given: Sequence[Path | History],
    *,
    title: str = "",
    sections: Sequence[Section] = (),
    later: Sequence[Section] = (),
    running: bool | None = None,
) -> bytes:
    """The whole HTML file of one run, or of several beside each other.

    Args:
        given: folders of runs, or what has been read of them.
        title: default: the runs' names.
        sections: (heading, HTML) of the caller's own, which come first, after what is told of each
            run in a line.  The heading is escaped here, the content by the caller.
        later: the same, after the curves.
        running: whether the run is, if that is known.

    Raises:
        InvalidJob: if a folder is not that of a run.
        WeftError: if plotly is not installed, or a run's files cannot be read.
    """
    runs = [run if isinstance(run, History) else History(run) for run in given]
    names = names_of(runs)
    now = time.time()
    states = [run.state(now, running) for run in runs]
    charts = charts_of(runs)
    every = [
        *sections,
        *(curves_section(runs, names, charts) if charts else []),
        *time_section(runs, names),
        *later,
        *events_section(runs, names),
        configuration_section(runs, names),
        *environment_section(runs, names),
    ]
    links = [f'<a href="#part-{n}">{escape(heading)}</a>' for n, (heading, _) in enumerate(every)]
    parts = [
        f'<section id="part-{n}">\n<h2>{escape(heading)}</h2>\n{content}\n</section>'
        for n, (heading, content) in enumerate(every)
    ]
    told = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    alive = any(state == "running" for state, _ in states)
    again = f", and again every {EVERY:.0f} s while this page is open" * alive
    body = "\n".join(
        [
            f"<header>\n<h1>{escape(title or ', '.join(names))}</h1>",
            f'<p class="faint">written {told}{again}</p>',
            headline(runs, names, states),
            *([] if any(map(len, runs)) else ["<p>No step has been recorded yet.</p>"]),
            f'<nav aria-label="Parts of this page">{" ".join(links)}</nav>\n</header>',
            "<main>",
            *parts,
            "</main>",
        ]
    )
    scripts = []
    if charts:
        body += (
            f'\n<script type="application/json" id="data">{data_of(runs, names, charts)}</script>'
        )
        scripts = [plotly(), (resources.files("weft.observe") / "report.js").read_bytes()]
    head = f'<meta http-equiv="refresh" content="{EVERY:.0f}"/>' if alive else ""
    return document(title or ", ".join(names), body, head, scripts)


def document(title: str, body: str, head: str = "", scripts: Sequence[bytes] = ()) -> bytes:
    """An HTML file in weft's style; nothing runs in it but ``scripts``, and nothing is fetched."""
    hashes = [base64.b64encode(hashlib.sha256(script).digest()).decode() for script in scripts]
    sources = " ".join(f"'sha256-{one}'" for one in hashes) or "'none'"
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; "
    top = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}script-src {sources}"/>',
        *([head] if head else []),
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>",
        body,
        *["<script>"] * bool(scripts),
    ]
    # Bytes, since plotly's script takes four times as many as a string.
    return b"".join(
        [
            "\n".join(top).encode(),
            b"</script>\n<script>".join(scripts),
            b"</script>" * bool(scripts),
            b"\n</body>\n</html>\n",
        ]
    )


def plotly() -> bytes:
    """plotly.js, out of the package `plotly`, which is not imported for it.

    Raises:
        WeftError: if it is not installed.
    """
    spec = importlib.util.find_spec("plotly")
    if spec is None or spec.origin is None:
        raise WeftError("a report needs plotly: pip install 'weft[report]'")
    return (Path(spec.origin).parent / "package_data" / "plotly.min.js").read_bytes()


def names_of(runs: Sequence[History]) -> list[str]:
    """Folders' names; with those that they lie in where these are the same."""
    names = [run.name for run in runs]
    return [
        name if names.count(name) == 1 else str(run.folder)
        for name, run in zip(names, runs, strict=True)
    ]


# --------------------------------------------------------------------------- what happened


def facts(run: History, state: str) -> Iterator[tuple[str, str, str]]:
    """The numbers that matter: key, label, text; what is not known is left out."""
    if not len(run):
        return
    step = run.last("step") or 0.0
    yield "step", "step", f"{step:,.0f} of {run.steps:,}"
    for key, label, text in (
        ("loss", "loss", "{:.4f}"),
        ("eval_loss", "held-out loss", "{:.4f}"),
    ):
        if (value := run.last(key)) is not None:
            yield key, label, text.format(value)
    for key, label, text in (
        ("tokens_per_second", "tokens/s", "{:,.0f}"),
        ("mfu", "MFU", "{:.1%}"),
        ("step_seconds", "a step", "{:.3g} s"),
    ):
        if (value := run.steady(key)) is not None:
            yield key, label, text.format(value)
    if (value := run.last("memory_peak_gib")) is not None:
        yield "memory_peak_gib", "memory, fullest rank", f"{value:.2f} GiB"
    if (value := run.goodput()) is not None:
        yield "goodput", "goodput", f"{value:.1%}"
        yield "seconds", "time", duration(sum(run.seconds().values()))
    if state == "running" and (seconds := run.steady("step_seconds")) is not None:
        left = (run.steps - step) * seconds / max(0.05, run.goodput() or 1.0)
        yield "left", "time left, about", duration(left)


def headline(
    runs: Sequence[History], names: Sequence[str], states: Sequence[tuple[str, str]]
) -> str:
    """Of one run its numbers as tiles, of several a row each."""
    lines = [
        f'<p><span class="state {state.split()[0]}">{state}</span> {escape(why)}</p>'
        for state, why in (states if len(runs) == 1 else [])
    ]
    each = [list(facts(run, state)) for run, (state, _) in zip(runs, states, strict=True)]
    if len(runs) == 1:
        tiles = [
            f'<div><dt>{label}</dt><dd id="fact-{key}">{text}</dd></div>'
            for key, label, text in each[0]
        ]
        return "\n".join([*lines, f'<dl class="tiles">{"".join(tiles)}</dl>' * bool(tiles)])
    labels = dict.fromkeys(label for of_run in each for _, label, _ in of_run)
    rows = []
    for name, (state, _), of_run in zip(names, states, each, strict=True):
        by_label = {label: text for _, label, text in of_run}
        rows.append([name, state, *(by_label.get(label, "") for label in labels)])
    return table(["run", "state", *labels], rows, numbers=range(2, 2 + len(labels)))


def time_section(runs: Sequence[History], names: Sequence[str]) -> list[Section]:
    """What the seconds of each run went into, as a bar."""
    parts = []
    for run, name in zip(runs, names, strict=True):
        spent = {kind: seconds for kind, seconds in run.seconds().items() if seconds > 0}
        total = sum(spent.values())
        if not total:
            continue
        told = {kind: f"{seconds / total:.1%} {kind}" for kind, seconds in spent.items()}
        boxes = "".join(
            f'<span title="{told[kind]}" style="flex: {seconds / total:.5f} 0 0; '
            f'background: {COLOURS[kind]}"></span>'
            for kind, seconds in spent.items()
        )
        legend = " &#160; ".join(
            f'<span><span class="key" style="background: {COLOURS[kind]}"></span>{told[kind]} '
            f"({duration(seconds)})</span>"
            for kind, seconds in spent.items()
        )
        whose = f"{escape(name)}: " if len(runs) > 1 else ""
        words = f"<p>{whose}goodput {run.goodput() or 0:.1%} of {duration(total)}</p>"
        bar = f'<div class="bar" role="img" aria-label="{", ".join(told.values())}">{boxes}</div>'
        parts.append(f"{words}\n{bar}\n<p>{legend}</p>")
    text = (
        '<p class="faint">Goodput is the productive share of all seconds since the run began. Lost '
        "are steps that had to be done again; restarting is from the last record of a start to the "
        "next start.</p>"
    )
    return [("Goodput", "\n".join([*parts, text]))] if parts else []


def kept(marks: Sequence[Mark]) -> list[Mark]:
    """As many as a page bears: routine goes first, then what is neither first nor last."""
    marks = list(marks)
    if len(marks) > MOST_MARKS:
        marks = [mark for mark in marks if mark.kind not in ROUTINE] or marks
    if len(marks) > MOST_MARKS:
        marks = marks[: MOST_MARKS // 2] + marks[-MOST_MARKS // 2 :]
    return marks


def events_section(runs: Sequence[History], names: Sequence[str]) -> list[Section]:
    rows, left_out = [], 0
    several = len(runs) > 1
    for run, name in zip(runs, names, strict=True):
        marks = run.marks()
        left_out += len(marks) - len(kept(marks))
        for mark in kept(marks):
            at = time.strftime("%m-%d %H:%M:%S", time.gmtime(mark.time))
            rows.append([*([name] * several), f"{mark.step:,}", at, mark.kind, mark.text])
    if not rows:
        return []
    head = [*(["run"] * several), "step", "UTC", "kind", "what"]
    more = f'<p class="faint">{left_out:,} more are left out, routine first.</p>' * bool(left_out)
    content = table(head, rows, numbers=[int(several)]) + more
    if len(rows) > 12:
        content = f"<details><summary>{len(rows)} events</summary>{content}</details>"
    return [("Events", content)]


# --------------------------------------------------------------------------- the curves


def charts_of(runs: Sequence[History]) -> list[dict[str, Any]]:
    """The charts for which a run has numbers."""
    there = {
        name for run in runs for name, values in run.columns.items() if np.isfinite(values).any()
    }
    if {"step_seconds", "data_seconds"} <= there:
        there.add("rest_seconds")
    charts = [*CHARTS]
    for group, (heading, unit) in GROUPED.items():
        inside = sorted(name for name in there if name.startswith(f"{group}."))
        curves = [(name, name.removeprefix(f"{group}."), "") for name in inside]
        curves = [
            curve for curve in curves if not (group.startswith("ranks.") and curve[1] == "rank")
        ]
        charts.append((group.replace(".", "-"), heading, unit, curves))
    leave_out = STACKED if len(runs) > 1 else {"data_seconds"}
    return [
        {
            "id": name,
            "heading": heading,
            "unit": unit,
            "stack": name in STACKED,
            "format": ".1%" if name == "mfu" else "",
            "curves": [(key, plain(label), style) for key, label, style in found],
        }
        for name, heading, unit, curves in charts
        if name not in leave_out and (found := [curve for curve in curves if curve[0] in there])
    ]


def curves_section(
    runs: Sequence[History], names: Sequence[str], charts: Sequence[Mapping[str, Any]]
) -> list[Section]:
    """Controls, and a place for each chart with what it shows in words."""
    time_unit = time_unit_of(runs)[0]
    figures = []
    for chart in charts:
        described = described_by(runs, names, chart)
        whole = ' class="whole"' * (chart["id"] == "loss")
        unit = f" <span>{escape(chart['unit'])}</span>" * bool(chart["unit"])
        figures.append(
            f'<figure{whole} aria-label="{escape(chart["heading"] + ": " + described)}">'
            f"<figcaption>{escape(chart['heading'])}{unit}</figcaption>"
            f'<div class="chart" id="chart-{chart["id"]}"></div></figure>'
        )
    notes = [
        f"{escape(name)}: of {len(run):,} records a curve has about {MOST_POINTS:,} points, "
        "of every few the least and the most; smoothing goes by their means."
        for name, run in zip(names, runs, strict=True)
        if len(run) > MOST_POINTS
    ]
    notes += [
        f"{escape(name)}: {run.damaged:,} line{'s' * (run.damaged > 1)} of metrics.jsonl "
        f"{'are' if run.damaged > 1 else 'is'} damaged and left out."
        for name, run in zip(names, runs, strict=True)
        if run.damaged
    ]
    if any(run.marks() for run in runs):
        notes.append(
            "Triangles on the axis are events: grey is routine, red is trouble; the pointer tells."
        )
    controls = (
        '<div class="controls">'
        '<label>along <select id="axis"><option value="step">steps</option>'
        '<option value="token">tokens</option>'
        f'<option value="time">{time_unit}</option></select></label>'
        "<label>smoothing "
        '<input id="smooth" type="range" min="0" max="0.99" step="0.01" value="0"/> '
        '<output id="weight" for="smooth">0</output></label>'
        '<label><input id="log" type="checkbox"/> logarithmic</label></div>'
    )
    said = "".join(f'<p class="faint">{note}</p>' for note in notes)
    no_script = "<noscript><p>The curves need JavaScript; the rest does not.</p></noscript>"
    charts_html = f'<div class="charts">{"".join(figures)}</div>'
    return [("Curves", "\n".join([controls, no_script, charts_html, said]))]


def described_by(runs: Sequence[History], names: Sequence[str], chart: Mapping[str, Any]) -> str:
    """The chart's first curve of each run in words, for those who do not see it."""
    told = []
    for run, name in zip(runs, names, strict=True):
        values = run.column(chart["curves"][0][0])
        values = values[np.isfinite(values)]
        if len(values):
            text = f"from {values[0]:.4g} to {values[-1]:.4g}, least {values.min():.4g}, "
            told.append(f"{name * (len(runs) > 1)} {text}most {values.max():.4g}".strip())
    return "; ".join(told)


def time_unit_of(runs: Iterable[History]) -> tuple[str, float]:
    """Its name, and its seconds."""
    longest = max((float(np.ptp(run.column("time"))) for run in runs if len(run)), default=0.0)
    return ("hours", 3600.0) if longest > 7200 else ("minutes", 60.0)


def data_of(
    runs: Sequence[History], names: Sequence[str], charts: Sequence[Mapping[str, Any]]
) -> str:
    """What report.js draws, as JSON that may stand in a script element.

    Of each run: ``x``, of the records that are drawn their places on each axis; ``curves``, of each
    ``y``, the index ``at`` of each of its points among these records (none: all of them), and their
    ``mean`` where a point stands for others; ``marks``.
    """
    unit, seconds = time_unit_of(runs)
    drawn = []
    for run, name in zip(runs, names, strict=True):
        marks, step, at = kept(run.marks()), run.column("step"), run.column("time")
        began = min([*at[:1].tolist(), *(mark.time for mark in marks[:1])], default=0.0)
        picked = {}
        for key in dict.fromkeys(key for chart in charts for key, _, _ in chart["curves"]):
            values = run.column(key)
            indices, mean = fewer(values, MOST_POINTS)
            if len(indices):
                picked[key] = (indices, values[indices], mean)
        every = np.unique(
            np.concatenate([np.zeros(0, np.intp), *(at for at, _, _ in picked.values())])
        )
        x = {"step": step, "token": run.column("tokens"), "time": (at - began) / seconds}
        curves: dict[str, dict[str, Any]] = {}
        for key, (indices, values, mean) in picked.items():
            curves[key] = {"y": values.tolist()}
            if len(indices) < len(every):
                curves[key]["at"] = np.searchsorted(every, indices).tolist()
            if mean is not None:
                curves[key]["mean"] = [float(f"{value:.6g}") for value in mean]
        of_steps = [float(mark.step) for mark in marks]
        tokens = np.interp(of_steps, step, x["token"]).tolist() if len(run) else of_steps
        drawn.append(
            {
                "name": plain(name),
                "x": {axis: finite(values[every]) for axis, values in x.items()},
                "curves": curves,
                "marks": [
                    {
                        "step": mark.step,
                        "token": token,
                        "time": (mark.time - began) / seconds,
                        "kind": mark.kind,
                        "text": plain(f"{mark.kind}: {mark.text}"),
                    }
                    for mark, token in zip(marks, tokens, strict=True)
                ],
            }
        )
    text = json.dumps({"runs": drawn, "charts": charts, "time_unit": unit}, allow_nan=False)
    return text.replace("<", "\\u003c")


def plain(text: str) -> str:
    """Text that plotly shows as it is."""
    return escape(text, quote=False)


def finite(values: Floats) -> list[float | None]:
    return [value if np.isfinite(value) else None for value in values.tolist()]


# --------------------------------------------------------------------------- what it was


def configuration_section(runs: Sequence[History], names: Sequence[str]) -> Section:
    """The keys that differ, between runs or from the recipe, and all of them folded away."""
    jobs = [{f"{s}.{k}": v for s, keys in run.job.items() for k, v in keys.items()} for run in runs]
    every = list(dict.fromkeys(key for job in jobs for key in job))
    shown = [[json.dumps(job[key]) if key in job else "" for job in jobs] for key in every]
    if len(runs) > 1:
        differ = [n for n, values in enumerate(shown) if len(set(values)) > 1]
        head = ["key", *names]
        rows = [[every[n], *shown[n]] for n in differ]
        what = table(head, rows) if rows else "<p>The runs have the same keys.</p>"
    else:
        head = ["key", "value"]
        differ = [n for n, key in enumerate(every) if key in runs[0].changes]
        rows = [[key, change] for key, change in runs[0].changes.items()]
        what = (
            table(["key", "recipe -> run"], rows)
            if rows
            else "<p>Nothing differs from the recipe.</p>"
        )
    whole = table(head, [[key, *values] for key, values in zip(every, shown, strict=True)], differ)
    return "Configuration", f"{what}<details><summary>all keys</summary>{whole}</details>"


def environment_section(runs: Sequence[History], names: Sequence[str]) -> list[Section]:
    """On what the runs ran; differences are marked."""
    every = dict.fromkeys(key for run in runs for key in run.environment)
    rows = []
    for key in every:
        values = [run.environment.get(key, "") for run in runs]
        words = [value if isinstance(value, str) else json.dumps(value) for value in values]
        rows.append([key, *words])
    if not rows:
        return []
    differ = [n for n, (_, *words) in enumerate(rows) if len(set(words)) > 1]
    return [("Environment", table(["", *(names if len(runs) > 1 else ["value"])], rows, differ))]


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    differ: Iterable[int] = (),
    numbers: Iterable[int] = (),
) -> str:
    """An HTML table of text: ``differ`` are rows to mark, ``numbers`` columns of numbers."""
    marked, right = set(differ), set(numbers)

    def cell(tag: str, column: int, text: str, more: str = "") -> str:
        kind = ' class="number"' * (column in right)
        return f"<{tag}{more}{kind}>{escape(text)}</{tag}>"

    lines = ["".join(cell("th", n, text, ' scope="col"') for n, text in enumerate(head))]
    for number, (first, *rest) in enumerate(rows):
        cells = [cell("th", 0, first, ' scope="row"')]
        cells += [cell("td", n, text) for n, text in enumerate(rest, 1)]
        kind = ' class="differs"' * (number in marked)
        lines.append(f"<tr{kind}>{''.join(cells)}</tr>")
    top, body = f"<thead><tr>{lines[0]}</tr></thead>", "\n".join(lines[1:])
    return f'<div class="wide"><table>{top}\n<tbody>\n{body}\n</tbody></table></div>'


# --------------------------------------------------------------------------- while it runs


class Report:
    """A sink that keeps the page of a running run up to date, beside the training.

    A page is written at the first record, then at most once a minute, and at the end.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        self._run: History | None = None
        self._thread = threading.Thread()
        self._next = 0.0

    def write(self, record: StepRecord) -> None:
        if time.monotonic() >= self._next and not self._thread.is_alive():
            self._next = time.monotonic() + EVERY
            self._thread = threading.Thread(target=self._renew, args=(True,), daemon=True)
            self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._thread.join()
        self._renew(running=False)

    def _renew(self, running: bool) -> None:
        try:
            if self._run is None:
                self._run = History(self._folder)
            self._run.read_on()
            page = report_page([self._run], later=[LATER], running=running)
            replace_bytes(self._folder / FILE, page)
        except Exception as error:
            # A full disk, no plotly, whatever it is: no reason to lose a run.  It is told once.
            if self._next < float("inf"):
                kind = "" if isinstance(error, WeftError) else f"{type(error).__name__}: "
                self._say(f"warning: no {FILE}: {kind}{error}")
            self._next = float("inf")
