"""Write a comparison's ``report.html``: verdict, intervals, a run per variant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from weft.config.errors import WeftError
from weft.config.files import replace_bytes
from weft.monitor.html import Section, render_table
from weft.tools.comparison_result import ComparisonSummary
from weft.tools.run_report import REPORT_FILE, report_page
from weft.tools.verdict import percents


def write_page(directory: Path, result: ComparisonSummary, log: Callable[[str], object]) -> None:
    """Write ``report.html``: `make_sections`, then the first run of each variant."""
    if not result.runs:
        return
    try:
        page = report_page(result.runs, title=result.title, sections=make_sections(result))
        replace_bytes(directory / REPORT_FILE, page)
    except WeftError as error:  # plotly is not installed
        log(f"{REPORT_FILE} was not written: {error}")


def make_sections(result: ComparisonSummary) -> list[Section]:
    """Return the sections of the report, the verdict first."""
    sections = [("Verdict", "".join(f"<p>{escape(line)}</p>" for line in result.verdict))]
    if plot := plot_intervals(result):
        sections.append(("Intervals", plot))
    if result.rows:
        numbers = [1, *range(3, len(result.head))]
        sections.append(("Variants", render_table(result.head, result.rows, numbers=numbers)))
    if result.failures:
        sections.append(("Not compared", _html_list(result.failures)))
    if result.changes:
        sections.append(("Changes", _html_list(result.changes)))
    if result.notes:
        sections.append(("Method", _html_list(result.notes)))
    return sections


def _html_list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line.strip())}</li>" for line in lines) + "</ul>"


def plot_intervals(result: ComparisonSummary) -> str:
    """Plot intervals against the baseline: speed, and loss with its margin."""
    plots = []
    speeds = [
        (result.labels[comparison.variant], percents(comparison.speed.interval))
        for comparison in result.comparisons
        if comparison.speed.interval is not None
    ]
    if speeds:
        plots.append(_plot("tokens/s against the baseline, %", speeds, None))
    scale = 100 / abs(result.baseline_loss or 1.0)
    margins = [
        comparison.margin_nats
        for comparison in result.comparisons
        if comparison.margin_nats is not None
    ]
    losses = [
        (
            result.labels[comparison.variant],
            [scale * end for end in (interval.low, interval.mean, interval.high)],
        )
        for comparison in result.comparisons
        if comparison.loss is not None and (interval := comparison.loss.interval) is not None
    ]
    if losses:
        title = "loss against the baseline's, % (shaded: margin)"
        plots.append(_plot(title, losses, scale * margins[0]))
    return "".join(plots)


def _plot(title: str, rows: Sequence[tuple[str, list[float]]], margin: float | None) -> str:
    """Plot horizontal intervals over one scale, as SVG in the page's colors."""
    width, line, left, right = 600, 40, 20, 580
    numbers = [
        0.0,
        *(end for _, ends in rows for end in ends),
        *([margin, -margin] if margin else []),
    ]
    low, high = min(numbers), max(numbers)
    pad = (high - low) * 0.08 or 1.0
    low, high = low - pad, high + pad

    def x(value: float) -> float:
        return round(left + (right - left) * (value - low) / (high - low), 1)

    height = 30 + line * len(rows) + 24
    parts = [f'<text x="{left}" y="16">{escape(title)}</text>']
    if margin:
        margin_width = x(margin) - x(-margin)
        parts.append(
            f'<rect x="{x(-margin)}" y="24" width="{margin_width:.1f}" height="{line * len(rows)}" '
            'fill="currentColor" fill-opacity="0.1"/>'
        )
    parts.append(
        f'<line x1="{x(0)}" x2="{x(0)}" y1="24" y2="{24 + line * len(rows)}" '
        'stroke="currentColor" stroke-dasharray="4 3"/>'
    )
    for row, (label, (a, mean, b)) in enumerate(rows):
        y = 24 + line * row
        text = f"{label}: {mean:+.2g} ({a:+.2g} to {b:+.2g})"
        parts.append(f'<text x="{left}" y="{y + 15}">{escape(text)}</text>')
        parts.append(
            f'<line x1="{x(a)}" x2="{x(b)}" y1="{y + 26}" y2="{y + 26}" stroke="currentColor" '
            'stroke-width="2"/>'
        )
        parts.append(f'<circle cx="{x(mean)}" cy="{y + 26}" r="4" fill="currentColor"/>')
    bottom = 24 + line * len(rows) + 18
    ticks = [(low + pad, "start"), (0.0, "middle"), (high - pad, "end")]
    for value, anchor in ticks if low + pad < 0 < high - pad else ticks[::2]:
        parts.append(
            f'<text x="{x(value)}" y="{bottom}" text-anchor="{anchor}">{value:+.3g}</text>'
        )
    return (
        f'<svg viewBox="0 0 {width} {height}" width="100%" style="max-width:{width}px;'
        f'display:block" role="img" aria-label="{escape(title)}" font-size="13" '
        f'fill="currentColor">{"".join(parts)}</svg>'
    )
