"""Report page of one or several runs, in one file that needs no network.

uPlot draws the curves; everything else is plain HTML and readable without scripts.

The planner's predictions need torch and seconds, so callers that have them pass them as sections.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

from weft.config.errors import WeftError
from weft.config.files import describe_cause, replace_bytes
from weft.config.formatting import display_path
from weft.monitor.system_sampler import SystemSampler
from weft.monitor.terminal import format_duration
from weft.records.run_reader import TEXT_KIND, RunReader
from weft.reporting.page import (
    REPORT_FILE,
    Page,
    Part,
    Section,
    bar_part,
    render_page,
    table_part,
    text_part,
)
from weft.reporting.report_charts import (
    build_charts,
    chart_data,
    chart_sections,
    choose_time_unit,
    select_events,
)
from weft.reporting.report_summary import summary_parts

if TYPE_CHECKING:
    from rich.console import Console

    from weft.planning.plan import Plan

UPDATE_SECONDS = 60  # between updates, and reloads, of the page of a running run
MAX_TEXTS = 100  # generated texts of a run
POLL_SECONDS = 2.0  # between checks for new records
# The final report traces the pipeline stages, about one second each.  It does so only after runs of
# at least this many seconds, with at most this many stages.
MIN_FORECAST_SECONDS, MAX_TRACED_STAGES = 60.0, 4
# Replaces the planner's sections in pages without them.
PREDICTION_NOTE: Section = {
    "heading": "Predicted and measured",
    "parts": [text_part("`weft report` with this run directory adds the planner's predictions.")],
}


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
        sections: sections of the caller, shown first: see `weft.reporting.page`.
        appendix: sections that follow the curves.
        running: True if the run is still running; None: decide by its records.

    Raises:
        InvalidConfig: if a directory is not a run directory.
        WeftError: if the files of a run cannot be read.
    """
    readers = [run if isinstance(run, RunReader) else RunReader(run) for run in runs]
    return render_page(run_page(readers, title, sections, appendix, running))


def run_page(
    runs: Sequence[RunReader],
    title: str,
    sections: Sequence[Section],
    appendix: Sequence[Section],
    running: bool | None,
) -> Page:
    """Return the page of runs: see `report_page`."""
    names = unique_names(runs)
    now = time.time()
    states = [run.state(now, running) for run in runs]
    is_running = any(state == "running" for state, _ in states)
    written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    charts = build_charts(runs)
    data = chart_data(runs, names, charts) if charts else None
    return {
        "title": title or (", ".join(names) if len(runs) <= 3 else f"{len(runs)} runs"),
        "written": written,
        "reload_seconds": UPDATE_SECONDS if is_running else None,
        "time_unit": choose_time_unit(runs)[0] if charts else None,
        "header": [
            *summary_parts(runs, names, states),
            *damage_notes(runs, names),
            *([] if any(map(len, runs)) else [text_part("No step has been recorded yet.")]),
        ],
        "sections": [
            *sections,
            *(chart_sections(runs, names, charts, data["maps"]) if data else []),
            *time_section(runs, names),
            *appendix,
            *text_section(runs, names),
            *events_section(runs, names),
            configuration_section(runs, names),
            *environment_section(runs, names),
        ],
        "chart_data": data,
    }


def unique_names(runs: Sequence[RunReader]) -> list[str]:
    """Return the names of run directories; full paths where names are equal."""
    names = [run.name for run in runs]
    return [
        name if names.count(name) == 1 else str(run.run_dir)
        for name, run in zip(names, runs, strict=True)
    ]


def damage_notes(runs: Sequence[RunReader], names: Sequence[str]) -> Iterator[Part]:
    """Yield a paragraph for each file that cannot be read or has damaged lines."""
    for run, name in zip(runs, names, strict=True):
        run.read_events()  # counts damaged events
        prefix = f"{name}: " * (len(runs) > 1)
        for file, reason in run.unreadable.items():
            text = f"{prefix}{file} cannot be read: {reason}. The page omits its content."
            yield text_part(text, "damage")
        for file, count in (("metrics.jsonl", run.damaged), ("events.jsonl", run.damaged_events)):
            if count:
                lines = "1 line is" if count == 1 else f"{count:,} lines are"
                yield text_part(f"{prefix}{file}: {lines} damaged and left out.", "damage")


def time_section(runs: Sequence[RunReader], names: Sequence[str]) -> list[Section]:
    """Return the section of the time breakdown, a bar for each run."""
    parts: list[Part] = []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        breakdown = {kind: value for kind, value in run.time_breakdown().items() if value > 0}
        total = sum(breakdown.values())
        if not total:
            continue
        prefix = f"{name}: " * (len(runs) > 1)
        goodput = f"goodput {run.goodput() or 0:.1%} of {format_duration(total)}"
        texts = {
            kind: f"{seconds / total:.1%} {kind} ({format_duration(seconds)})"
            for kind, seconds in breakdown.items()
        }
        parts.append(text_part(f"{prefix}{goodput}"))
        parts.append(bar_part(f"goodput-{number}", breakdown, texts.__getitem__))
    text = (
        "Goodput is the productive fraction of all seconds since the run began. Lost seconds are "
        "those of repeated steps. Restarting is the time between the last record of a start and "
        "the next start."
    )
    return [{"heading": "Goodput", "parts": [*parts, text_part(text, "faint")]}] if parts else []


def text_section(runs: Sequence[RunReader], names: Sequence[str]) -> list[Section]:
    """Return the section of the text that each evaluation generated, newest first."""
    rows, several = [], len(runs) > 1
    for run, name in zip(runs, names, strict=True):
        events = [event for event in reversed(run.read_events()) if event.kind == TEXT_KIND]
        for event in events[:MAX_TEXTS]:
            rows.append([*([name] * several), f"{event.step:,}", event.text])
    if not rows:
        return []
    table = table_part([*(["run"] * several), "step", "text"], rows, numbers=[int(several)])
    note = "Prompts of monitor.eval_prompts with their continuations, newest first."
    return [{"heading": "Generated text", "parts": [text_part(note, "faint"), table]}]


def events_section(runs: Sequence[RunReader], names: Sequence[str]) -> list[Section]:
    """Return the section of the events, collapsed if there are many."""
    rows, num_omitted = [], 0
    several = len(runs) > 1
    for run, name in zip(runs, names, strict=True):
        events = [event for event in run.read_events() if event.kind != TEXT_KIND]
        shown = select_events(events)
        num_omitted += len(events) - len(shown)
        for event in shown:
            date = time.strftime("%m-%d %H:%M:%S", time.gmtime(event.time))
            rows.append([*([name] * several), f"{event.step:,}", date, event.kind, event.text])
    if not rows:
        return []
    head = [*(["run"] * several), "step", "UTC", "kind", "event"]
    parts = [table_part(head, rows, numbers=[int(several)])]
    if num_omitted:
        parts.append(text_part(f"{num_omitted:,} events are omitted, routine first.", "faint"))
    if len(rows) > 12:
        parts = [{"kind": "details", "summary": f"{len(rows)} events", "parts": parts}]
    return [{"heading": "Events", "parts": parts}]


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
        head, changes_head = ["key", *names], ["key", *names]
        differ = [n for n, (_, *values) in enumerate(table) if len(set(values)) > 1]
        rows = [table[n] for n in differ]
        no_changes = "The runs have the same values."
    else:
        head, changes_head = ["key", "value"], ["key", "recipe -> run"]
        differ = [n for n, key in enumerate(keys) if key in runs[0].changes]
        rows = [[key, change] for key, change in runs[0].changes.items()]
        no_changes = "No key differs from the recipe."
    changes = table_part(changes_head, rows) if rows else text_part(no_changes)
    all_keys = table_part(head, table, marked=differ)
    details: Part = {"kind": "details", "summary": "all keys", "parts": [all_keys]}
    return {"heading": "Configuration", "parts": [changes, details]}


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
    return [{"heading": "Environment", "parts": [table_part(head, rows, marked=differ)]}]


# --------------------------------------------------------------------------- live report


class LiveReport:
    """Thread that samples the node and updates the page of a running run.

    It runs in the launcher, so training never waits for it.

    The page is written at the first record, and then at most once per `UPDATE_SECONDS`.

    Args:
        run_dir: the run directory.
        log: receives a warning if the page cannot be written, once.
    """

    def __init__(self, run_dir: Path, log: Callable[[str], None]) -> None:
        self._run_dir, self._log = run_dir, log
        self._run: RunReader | None = None
        self._sampler = SystemSampler(run_dir)
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
        due = 0.0
        while not self._stop.wait(POLL_SECONDS):
            self._sampler.sample_if_due()
            if time.monotonic() >= due and self.write_if_changed():
                due = time.monotonic() + UPDATE_SECONDS

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


@contextmanager
def report_pages(plan: Plan, console: Console) -> Iterator[None]:
    """Keep the report page up to date while ranks train, and write the final one."""
    if not plan.job.monitor.report or console.quiet:  # only the node that logs writes it
        yield
        return
    with LiveReport(plan.run_path, console.print) as live:
        yield
    write_final_report(plan, console, has_warned=live.has_warned)


def write_final_report(plan: Plan, console: Console, has_warned: bool = False) -> None:
    """Write the report page after the ranks have ended, however they ended.

    The page includes the planner's predictions if they are cheap compared with the run.

    Args:
        plan: the plan of the run.
        console: receives the path of the page, or a warning.
        has_warned: True if a warning that the page cannot be written has been printed.
    """
    run_dir = plan.run_path
    if not (run_dir / "metrics.jsonl").exists():
        return
    try:
        run = RunReader(run_dir)
        short = sum(run.time_breakdown().values()) < MIN_FORECAST_SECONDS
        appendix = [PREDICTION_NOTE]
        if not short and plan.pp <= MAX_TRACED_STAGES:
            from weft.reporting.report_sections import prediction_sections

            appendix = prediction_sections([run])
        replace_bytes(run_dir / REPORT_FILE, report_page([run], appendix=appendix, running=False))
    except Exception as error:  # a missing page must not fail the run
        if not has_warned:
            console.print(unwritten_message(run_dir, error))
    else:
        console.print(f"report: {display_path(run_dir / REPORT_FILE)}")


def unwritten_message(run_dir: Path, error: Exception) -> str:
    """Return the warning that the page of a run cannot be written."""
    cause = str(error) if isinstance(error, WeftError) else describe_cause(error)
    return f"warning: {run_dir / REPORT_FILE} cannot be written: {cause}"
