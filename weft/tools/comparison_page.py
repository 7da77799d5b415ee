"""A comparison's ``report.html``: verdict, intervals, then one run of each variant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from weft.config.errors import WeftError
from weft.config.files import replace_bytes
from weft.monitor.html import Section, table
from weft.monitor.run_report import FILE, report_page
from weft.tools.comparison_result import Result
from weft.tools.verdict import percents


def write_page(folder: Path, result: Result, say: Callable[[str], object]) -> None:
    """``report.html``: `sections`, then the first run of each variant beside each other."""
    if not result.runs:
        return
    try:
        page = report_page(result.runs, title=result.title, sections=sections(result))
        replace_bytes(folder / FILE, page)
    except WeftError as error:  # plotly is not there: the rest of it is
        say(f"no {FILE}: {error}")


def sections(result: Result) -> list[Section]:
    """For the report, the verdict first."""
    found = [("Verdict", "".join(f"<p>{escape(line)}</p>" for line in result.verdict))]
    if plot := forest(result):
        found.append(("Intervals", plot))
    if result.rows:
        numbers = [1, *range(3, len(result.head))]
        found.append(("Variants", table(result.head, result.rows, numbers=numbers)))
    if result.failures:
        found.append(("Not compared", _list(result.failures)))
    if result.changes:
        found.append(("What changed", _list(result.changes)))
    if result.notes:
        found.append(("How it was measured", _list(result.notes)))
    return found


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line.strip())}</li>" for line in lines) + "</ul>"


def forest(result: Result) -> str:
    """Intervals of every variant against the baseline: speed, and loss with its margin."""
    plots = []
    speeds = [
        (result.labels[each.variant], percents(each.speed.interval))
        for each in result.judged
        if each.speed.interval is not None
    ]
    if speeds:
        plots.append(_plot("tokens/s against the baseline, %", speeds, None))
    part = 100 / abs(result.usual_loss or 1.0)
    margins = [each.margin_nats for each in result.judged if each.margin_nats is not None]
    losses = [
        (result.labels[each.variant], [part * end for end in (found.low, found.mean, found.high)])
        for each in result.judged
        if each.loss is not None and (found := each.loss.interval) is not None
    ]
    if losses:
        title = "loss against the baseline's, % (shaded: margin)"
        plots.append(_plot(title, losses, part * margins[0]))
    return "".join(plots)


def _plot(title: str, rows: Sequence[tuple[str, list[float]]], margin: float | None) -> str:
    """Horizontal intervals over one scale, as SVG in the page's own colours."""
    width, line, left, right = 600, 40, 20, 580
    numbers = [
        0.0,
        *(end for _, ends in rows for end in ends),
        *([margin, -margin] if margin else []),
    ]
    low, high = min(numbers), max(numbers)
    room = (high - low) * 0.08 or 1.0
    low, high = low - room, high + room

    def x(value: float) -> float:
        return round(left + (right - left) * (value - low) / (high - low), 1)

    height = 30 + line * len(rows) + 24
    parts = [f'<text x="{left}" y="16">{escape(title)}</text>']
    if margin:
        wide = x(margin) - x(-margin)
        parts.append(
            f'<rect x="{x(-margin)}" y="24" width="{wide:.1f}" height="{line * len(rows)}" '
            'fill="currentColor" fill-opacity="0.1"/>'
        )
    parts.append(
        f'<line x1="{x(0)}" x2="{x(0)}" y1="24" y2="{24 + line * len(rows)}" '
        'stroke="currentColor" stroke-dasharray="4 3"/>'
    )
    for place, (label, (a, mean, b)) in enumerate(rows):
        y = 24 + line * place
        told = f"{label}: {mean:+.2g} ({a:+.2g} to {b:+.2g})"
        parts.append(f'<text x="{left}" y="{y + 15}">{escape(told)}</text>')
        parts.append(
            f'<line x1="{x(a)}" x2="{x(b)}" y1="{y + 26}" y2="{y + 26}" stroke="currentColor" '
            'stroke-width="2"/>'
        )
        parts.append(f'<circle cx="{x(mean)}" cy="{y + 26}" r="4" fill="currentColor"/>')
    bottom = 24 + line * len(rows) + 18
    ends = [(low + room, "start"), (0.0, "middle"), (high - room, "end")]
    for value, anchor in ends if low + room < 0 < high - room else ends[::2]:
        parts.append(
            f'<text x="{x(value)}" y="{bottom}" text-anchor="{anchor}">{value:+.3g}</text>'
        )
    return (
        f'<svg viewBox="0 0 {width} {height}" width="100%" style="max-width:{width}px;'
        f'display:block" role="img" aria-label="{escape(title)}" font-size="13" '
        f'fill="currentColor">{"".join(parts)}</svg>'
    )
