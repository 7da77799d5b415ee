"""Report page of one or several runs, in one file that needs no network.

plotly.js, which the page contains, draws the curves; everything else is plain HTML and readable
without scripts.  Text from a run directory is escaped for HTML, for JSON in a script element, and
for plotly, which interprets some HTML.  In addition, the page's content security policy allows only
its two scripts, by their hashes, and no requests.

The planner's predictions need torch and seconds, so callers that have them pass them as sections.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Self

from weft.config.errors import WeftError
from weft.config.files import describe_cause, replace_bytes
from weft.monitor.html import Section, read_plotly, render_document, render_table
from weft.monitor.run_reader import RunReader
from weft.monitor.terminal import format_duration
from weft.tools.report_charts import (
    COLORS,
    build_charts,
    curves_section,
    select_events,
    serialize_charts,
)

REPORT_FILE = "report.html"  # in the run directory
UPDATE_SECONDS = 60.0  # between updates, and reloads, of the page of a running run
POLL_SECONDS = 2.0  # between checks for new records
# Replaces the planner's sections in pages without them.
PREDICTION_NOTE: Section = (
    "Predicted and measured",
    "<p><code>weft report</code> with this run directory adds the planner's predictions.</p>",
)


def report_page(
    runs: Sequence[Path | RunReader],
    *,
    title: str = "",
    sections: Sequence[Section] = (),
    appendix: Sequence[Section] = (),
    running: bool | None = None,
) -> bytes:
    """Render the HTML page of one run, or of several for comparison.

    Args:
        runs: run directories, or their readers.
        title: the names of the runs by default.
        sections: (heading, HTML) of the caller, shown first.  The heading is escaped here, the
            content by the caller.
        appendix: sections that follow the curves.
        running: True if the run is still running; None: decide by its records.

    Raises:
        InvalidConfig: if a directory is not a run directory.
        WeftError: if plotly is not installed, or if the files of a run cannot be read.
    """
    readers = [run if isinstance(run, RunReader) else RunReader(run) for run in runs]
    names = unique_names(readers)
    now = time.time()
    states = [run.state(now, running) for run in readers]
    charts = build_charts(readers)
    all_sections = [
        *sections,
        *(curves_section(readers, names, charts) if charts else []),
        *time_section(readers, names),
        *appendix,
        *events_section(readers, names),
        configuration_section(readers, names),
        *environment_section(readers, names),
    ]
    links = [
        f'<a href="#part-{n}">{escape(heading)}</a>' for n, (heading, _) in enumerate(all_sections)
    ]
    parts = [
        f'<section id="part-{n}">\n<h2>{escape(heading)}</h2>\n{content}\n</section>'
        for n, (heading, content) in enumerate(all_sections)
    ]
    written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    is_running = any(state == "running" for state, _ in states)
    reload_note = f"; this page reloads every {UPDATE_SECONDS:.0f} s" * is_running
    body = "\n".join(
        [
            f"<header>\n<h1>{escape(title or ', '.join(names))}</h1>",
            f'<p class="faint">written {written}{reload_note}</p>',
            render_summary(readers, names, states),
            *damage_notes(readers, names),
            *([] if any(map(len, readers)) else ["<p>No step has been recorded yet.</p>"]),
            f'<nav aria-label="Sections of this page">{" ".join(links)}</nav>\n</header>',
            "<main>",
            *parts,
            "</main>",
        ]
    )
    scripts = []
    if charts:
        data = serialize_charts(readers, names, charts)
        body += f'\n<script type="application/json" id="data">{data}</script>'
        scripts = [read_plotly(), (resources.files("weft.tools") / "report.js").read_bytes()]
    head = f'<meta http-equiv="refresh" content="{UPDATE_SECONDS:.0f}"/>' if is_running else ""
    return render_document(title or ", ".join(names), body, head, scripts)


def unique_names(runs: Sequence[RunReader]) -> list[str]:
    """Return the names of run directories; full paths where names are equal."""
    names = [run.name for run in runs]
    return [
        name if names.count(name) == 1 else str(run.run_dir)
        for name, run in zip(names, runs, strict=True)
    ]


# --------------------------------------------------------------------------- progress


def summarize(run: RunReader, state: str) -> Iterator[tuple[str, str, str]]:
    """Yield the most important metrics that the run has: key, label, text."""
    if not len(run):
        return
    step = run.last("step") or 0.0
    yield "step", "step", f"{step:,.0f}" + f" of {run.steps:,}" * bool(run.steps)
    for key, read, label, text in (
        ("loss", run.last, "loss", "{:.4f}"),
        ("eval_loss", run.last, "validation loss", "{:.4f}"),
        ("tokens_per_second", run.steady_median, "tokens/s", "{:,.0f}"),
        ("mfu", run.steady_median, "MFU", "{:.1%}"),
        ("step_seconds", run.steady_median, "step time", "{:.3g} s"),
        ("memory_peak_gib", run.last, "memory of the fullest rank", "{:.2f} GiB"),
    ):
        if (value := read(key)) is not None:
            yield key, label, text.format(value)
    if (value := run.goodput()) is not None:
        yield "goodput", "goodput", f"{value:.1%}"
        yield "seconds", "time", format_duration(sum(run.time_breakdown().values()))
    if (
        state == "running"
        and run.steps
        and (seconds := run.steady_median("step_seconds")) is not None
    ):
        left = (run.steps - step) * seconds / max(0.05, run.goodput() or 1.0)
        yield "left", "estimated time left", format_duration(left)


def render_summary(
    runs: Sequence[RunReader], names: Sequence[str], states: Sequence[tuple[str, str]]
) -> str:
    """Render the state and metrics of one run as tiles, of several as a table."""
    summaries = [list(summarize(run, state)) for run, (state, _) in zip(runs, states, strict=True)]
    if len(runs) == 1:
        ((state, reason),) = states
        line = f'<p><span class="state {state.split()[0]}">{state}</span> {escape(reason)}</p>'
        tiles = [
            f'<div><dt>{label}</dt><dd id="fact-{key}">{text}</dd></div>'
            for key, label, text in summaries[0]
        ]
        return "\n".join([line, f'<dl class="tiles">{"".join(tiles)}</dl>' * bool(tiles)])
    labels = dict.fromkeys(label for summary in summaries for _, label, _ in summary)
    rows = []
    for run, name, (state, _), summary in zip(runs, names, states, summaries, strict=True):
        state += ", diverged" * bool(run.divergence())
        by_label = {label: text for _, label, text in summary}
        rows.append([name, state, *(by_label.get(label, "") for label in labels)])
    return render_table(["run", "state", *labels], rows, numbers=range(2, 2 + len(labels)))


def damage_notes(runs: Sequence[RunReader], names: Sequence[str]) -> Iterator[str]:
    """Yield a paragraph for each file that cannot be read or has damaged lines."""
    for run, name in zip(runs, names, strict=True):
        run.read_events()  # counts damaged events
        prefix = f"{name}: " * (len(runs) > 1)
        for file, reason in run.unreadable.items():
            text = f"{prefix}{file} cannot be read: {reason}. The page omits its content."
            yield f'<p class="damage">{escape(text)}</p>'
        for file, count in (("metrics.jsonl", run.damaged), ("events.jsonl", run.damaged_events)):
            if count:
                lines = "1 line is" if count == 1 else f"{count:,} lines are"
                text = f"{prefix}{file}: {lines} damaged and left out."
                yield f'<p class="damage">{escape(text)}</p>'


def time_section(runs: Sequence[RunReader], names: Sequence[str]) -> list[Section]:
    """Return the section of the time breakdown, a bar for each run."""
    parts = []
    for run, name in zip(runs, names, strict=True):
        breakdown = {kind: value for kind, value in run.time_breakdown().items() if value > 0}
        total = sum(breakdown.values())
        if not total:
            continue
        labels = {kind: f"{seconds / total:.1%} {kind}" for kind, seconds in breakdown.items()}
        boxes = "".join(
            f'<span title="{labels[kind]}" style="flex: {seconds / total:.5f} 0 0; '
            f'background: {COLORS[kind]}"></span>'
            for kind, seconds in breakdown.items()
        )
        legend = " &#160; ".join(
            f'<span><span class="key" style="background: {COLORS[kind]}"></span>{labels[kind]} '
            f"({format_duration(seconds)})</span>"
            for kind, seconds in breakdown.items()
        )
        prefix = f"{escape(name)}: " if len(runs) > 1 else ""
        line = f"<p>{prefix}goodput {run.goodput() or 0:.1%} of {format_duration(total)}</p>"
        bar = f'<div class="bar" role="img" aria-label="{", ".join(labels.values())}">{boxes}</div>'
        parts.append(f"{line}\n{bar}\n<p>{legend}</p>")
    text = (
        '<p class="faint">Goodput is the productive fraction of all seconds since the run began. '
        "Lost seconds are those of repeated steps. Restarting is the time between the last record "
        "of a start and the next start.</p>"
    )
    return [("Goodput", "\n".join([*parts, text]))] if parts else []


def events_section(runs: Sequence[RunReader], names: Sequence[str]) -> list[Section]:
    """Return the section of the events, collapsed if there are many."""
    rows, num_omitted = [], 0
    several = len(runs) > 1
    for run, name in zip(runs, names, strict=True):
        events = run.read_events()
        shown = select_events(events)
        num_omitted += len(events) - len(shown)
        for event in shown:
            date = time.strftime("%m-%d %H:%M:%S", time.gmtime(event.time))
            rows.append([*([name] * several), f"{event.step:,}", date, event.kind, event.text])
    if not rows:
        return []
    head = [*(["run"] * several), "step", "UTC", "kind", "event"]
    note = f'<p class="faint">{num_omitted:,} events are omitted, routine first.</p>'
    content = render_table(head, rows, numbers=[int(several)]) + note * bool(num_omitted)
    if len(rows) > 12:
        content = f"<details><summary>{len(rows)} events</summary>{content}</details>"
    return [("Events", content)]


# --------------------------------------------------------------------------- configuration


def configuration_section(runs: Sequence[RunReader], names: Sequence[str]) -> Section:
    """Return the section of the keys that differ between runs or from the recipe.

    All keys follow, collapsed.
    """
    jobs = [{f"{s}.{k}": v for s, keys in run.job.items() for k, v in keys.items()} for run in runs]
    keys = list(dict.fromkeys(key for job in jobs for key in job))
    table = [
        [key, *(json.dumps(job[key], default=str) if key in job else "" for job in jobs)]
        for key in keys
    ]
    if len(runs) > 1:
        head = ["key", *names]
        differ = [n for n, (_, *values) in enumerate(table) if len(set(values)) > 1]
        rows = [table[n] for n in differ]
        changes = render_table(head, rows) if rows else "<p>The runs have the same values.</p>"
    else:
        head = ["key", "value"]
        differ = [n for n, key in enumerate(keys) if key in runs[0].changes]
        rows = [[key, change] for key, change in runs[0].changes.items()]
        changes = render_table(["key", "recipe -> run"], rows)
        changes = changes if rows else "<p>No key differs from the recipe.</p>"
    all_keys = render_table(head, table, differ)
    return "Configuration", f"{changes}<details><summary>all keys</summary>{all_keys}</details>"


def environment_section(runs: Sequence[RunReader], names: Sequence[str]) -> list[Section]:
    """Return the section of software and hardware; differences are marked."""
    rows = []
    for key in dict.fromkeys(key for run in runs for key in run.environment):
        values = [run.environment.get(key, "") for run in runs]
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        rows.append([key, *texts])
    if not rows:
        return []
    differ = [n for n, (_, *texts) in enumerate(rows) if len(set(texts)) > 1]
    head = ["", *(names if len(runs) > 1 else ["value"])]
    return [("Environment", render_table(head, rows, differ))]


# --------------------------------------------------------------------------- live report


class LiveReport:
    """Thread that updates the page of a running run, outside the training processes.

    The page is written at the first record, and then at most once per `UPDATE_SECONDS`.

    Args:
        run_dir: the run directory.
        log: receives a warning if the page cannot be written, once.
    """

    def __init__(self, run_dir: Path, log: Callable[[str], None]) -> None:
        self._run_dir, self._log = run_dir, log
        self._run: RunReader | None = None
        self._num_records = -1
        self.has_warned = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="weft-report", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            if self.write_if_changed():
                self._stop.wait(UPDATE_SECONDS)

    def write_if_changed(self) -> bool:
        """Write the page if there are new records; return True if it was written."""
        try:
            if self._run is None:
                self._run = RunReader(self._run_dir)
            self._run.read_new_records()
            if len(self._run) in (0, self._num_records):
                return False
            page = report_page([self._run], appendix=[PREDICTION_NOTE], running=True)
            replace_bytes(self._run_dir / REPORT_FILE, page)
        except Exception as error:  # a missing page must not fail the run
            if not self.has_warned:
                self._log(unwritten_message(self._run_dir, error))
            self.has_warned = True
            return False
        self._num_records = len(self._run)
        return True


def unwritten_message(run_dir: Path, error: Exception) -> str:
    """Return the warning that the page of a run cannot be written."""
    cause = str(error) if isinstance(error, WeftError) else describe_cause(error)
    return f"warning: {run_dir / REPORT_FILE} cannot be written: {cause}"
