"""One page that tells a run, or several beside each other, and opens without a network.

Curves are drawn by plotly.js, which is written into the page; everything else is plain HTML and
stays readable without scripts.  What comes out of a run's folder is text: it is escaped for HTML,
for JSON in a script element and for plotly, which knows a little HTML of its own.  Behind that
stands the page's own policy: its two scripts run, known by their hashes, and nothing else, and
nothing is fetched.

What the planner expects takes torch and seconds; who has it passes it in as sections.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from weft.config.errors import WeftError
from weft.config.files import describe_cause, replace_bytes
from weft.monitor.html import Section, document, plotly, table
from weft.monitor.report_charts import COLOURS, charts_of, curves_section, data_of, kept
from weft.monitor.run_reader import RunReader
from weft.monitor.step_record import StepRecord
from weft.monitor.terminal import duration

FILE = "report.html"  # in a run's folder
RENEW_SECONDS = 60.0  # between two pages of a running run, and before its reload
# What stands for the planner's sections where they are not made.
LATER: Section = (
    "Predicted and measured",
    "<p><code>weft report</code> with this run's folder adds what the planner says of it.</p>",
)


def report_page(
    given: Sequence[Path | RunReader],
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
        InvalidConfig: if a folder is not that of a run.
        WeftError: if plotly is not installed, or a run's files cannot be read.
    """
    runs = [run if isinstance(run, RunReader) else RunReader(run) for run in given]
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
    again = f", and again every {RENEW_SECONDS:.0f} s while this page is open" * alive
    body = "\n".join(
        [
            f"<header>\n<h1>{escape(title or ', '.join(names))}</h1>",
            f'<p class="faint">written {told}{again}</p>',
            headline(runs, names, states),
            *damage(runs, names),
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
        scripts = [plotly(), (resources.files("weft.monitor") / "report.js").read_bytes()]
    head = f'<meta http-equiv="refresh" content="{RENEW_SECONDS:.0f}"/>' if alive else ""
    return document(title or ", ".join(names), body, head, scripts)


def names_of(runs: Sequence[RunReader]) -> list[str]:
    """Folders' names; with those that they lie in where these are the same."""
    names = [run.name for run in runs]
    return [
        name if names.count(name) == 1 else str(run.folder)
        for name, run in zip(names, runs, strict=True)
    ]


# --------------------------------------------------------------------------- what happened


def facts(run: RunReader, state: str) -> Iterator[tuple[str, str, str]]:
    """The numbers that matter: key, label, text; what is not known is left out."""
    if not len(run):
        return
    step = run.last("step") or 0.0
    yield "step", "step", f"{step:,.0f}" + f" of {run.steps:,}" * bool(run.steps)
    for key, read, label, text in (
        ("loss", run.last, "loss", "{:.4f}"),
        ("eval_loss", run.last, "validation loss", "{:.4f}"),
        ("tokens_per_second", run.steady, "tokens/s", "{:,.0f}"),
        ("mfu", run.steady, "MFU", "{:.1%}"),
        ("step_seconds", run.steady, "a step", "{:.3g} s"),
        ("memory_peak_gib", run.last, "memory, fullest rank", "{:.2f} GiB"),
    ):
        if (value := read(key)) is not None:
            yield key, label, text.format(value)
    if (value := run.goodput()) is not None:
        yield "goodput", "goodput", f"{value:.1%}"
        yield "seconds", "time", duration(sum(run.seconds().values()))
    if state == "running" and run.steps and (seconds := run.steady("step_seconds")) is not None:
        left = (run.steps - step) * seconds / max(0.05, run.goodput() or 1.0)
        yield "left", "time left, about", duration(left)


def headline(
    runs: Sequence[RunReader], names: Sequence[str], states: Sequence[tuple[str, str]]
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
    states = [
        (f"{state}, diverged" * bool(run.divergence()) or state, why)
        for run, (state, why) in zip(runs, states, strict=True)
    ]
    for name, (state, _), of_run in zip(names, states, each, strict=True):
        by_label = {label: text for _, label, text in of_run}
        rows.append([name, state, *(by_label.get(label, "") for label in labels)])
    return table(["run", "state", *labels], rows, numbers=range(2, 2 + len(labels)))


def damage(runs: Sequence[RunReader], names: Sequence[str]) -> Iterator[str]:
    """Say which files of the runs cannot be read, and why."""
    for run, name in zip(runs, names, strict=True):
        run.marks()  # reads the events
        whose = f"{name}: " * (len(runs) > 1)
        for file, why in run.unreadable.items():
            text = f"{whose}{file} cannot be read: {why}. What it says is left out."
            yield f'<p class="damage">{escape(text)}</p>'
        for file, count in (("metrics.jsonl", run.damaged), ("events.jsonl", run.damaged_events)):
            if count:
                lines = "1 line is" if count == 1 else f"{count:,} lines are"
                text = f"{whose}{file}: {lines} damaged and left out."
                yield f'<p class="damage">{escape(text)}</p>'


def time_section(runs: Sequence[RunReader], names: Sequence[str]) -> list[Section]:
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


def events_section(runs: Sequence[RunReader], names: Sequence[str]) -> list[Section]:
    """What happened, folded away where it is much."""
    rows, left_out = [], 0
    several = len(runs) > 1
    for run, name in zip(runs, names, strict=True):
        marks = run.marks()
        shown = kept(marks)
        left_out += len(marks) - len(shown)
        for mark in shown:
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


# --------------------------------------------------------------------------- what it was


def configuration_section(runs: Sequence[RunReader], names: Sequence[str]) -> Section:
    """The keys that differ, between runs or from the recipe, and all of them folded away."""
    jobs = [{f"{s}.{k}": v for s, keys in run.job.items() for k, v in keys.items()} for run in runs]
    every = list(dict.fromkeys(key for job in jobs for key in job))
    shown = [
        [json.dumps(job[key], default=str) if key in job else "" for job in jobs] for key in every
    ]
    if len(runs) > 1:
        differ = [n for n, values in enumerate(shown) if len(set(values)) > 1]
        head = ["key", *names]
        rows = [[every[n], *shown[n]] for n in differ]
        what = table(head, rows) if rows else "<p>The runs have the same keys.</p>"
    else:
        head = ["key", "value"]
        differ = [n for n, key in enumerate(every) if key in runs[0].changes]
        rows = [[key, change] for key, change in runs[0].changes.items()]
        what = table(["key", "recipe -> run"], rows)
        what = what if rows else "<p>Nothing differs from the recipe.</p>"
    whole = table(head, [[key, *values] for key, values in zip(every, shown, strict=True)], differ)
    return "Configuration", f"{what}<details><summary>all keys</summary>{whole}</details>"


def environment_section(runs: Sequence[RunReader], names: Sequence[str]) -> list[Section]:
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


# --------------------------------------------------------------------------- while it runs


class Report:
    """A sink that keeps the page of a running run up to date, beside the training.

    A page is written at the first record, then at most once a minute, and at the end.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        self._run: RunReader | None = None
        self._thread = threading.Thread()
        self._next = 0.0
        self._reported = False

    def write(self, record: StepRecord) -> None:
        if time.monotonic() >= self._next and not self._thread.is_alive():
            self._next = time.monotonic() + RENEW_SECONDS
            self._thread = threading.Thread(target=self._renew, args=(True,), daemon=True)
            self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._thread.join()
        self._renew(running=False)

    def _renew(self, running: bool) -> None:
        try:
            if self._run is None:
                self._run = RunReader(self._folder)
            self._run.read_on()
            page = report_page([self._run], later=[LATER], running=running)
            replace_bytes(self._folder / FILE, page)
        except Exception as error:
            # A full disk, no plotly, anything: no reason to lose a run.  It is reported once, and
            # the next page is tried all the same.
            if not self._reported:
                cause = str(error) if isinstance(error, WeftError) else describe_cause(error)
                path = self._folder / FILE
                self._say(f"warning: {path} cannot be written: {cause}. Training continues")
            self._reported = True
