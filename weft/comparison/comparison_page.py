"""Write the page of a comparison: verdict, intervals, a run per variant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from weft.comparison.comparison_result import ComparisonSummary
from weft.comparison.verdict import percents
from weft.config.errors import WeftError
from weft.config.files import replace_bytes
from weft.reporting.page import REPORT_FILE, Part, Section, render_page, table_part, text_part
from weft.reporting.run_report import report_page


def write_page(directory: Path, result: ComparisonSummary, log: Callable[[str], object]) -> None:
    """Write ``report.html``: `make_sections`, then the first run of each variant."""
    if not result.runs:
        return
    try:
        page = report_page(result.runs, title=result.title, sections=make_sections(result))
        replace_bytes(directory / REPORT_FILE, page)
    except WeftError as error:  # a run was moved or damaged
        log(f"{REPORT_FILE} was not written: {error}")


def planned_page(
    title: str,
    verdict: Sequence[str],
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    reasons: Sequence[str],
) -> bytes:
    """Render the page of a comparison of predictions."""
    table = table_part(head, rows, numbers=range(3, len(head)))
    header = [*map(text_part, verdict), table, *map(text_part, reasons)]
    return render_page({"title": title, "header": header, "sections": []})


def make_sections(result: ComparisonSummary) -> list[Section]:
    """Return the sections of the report, the verdict first."""
    numbers = [1, *range(3, len(result.head))]
    sections: list[tuple[str, list[Part]]] = [
        ("Verdict", [text_part(line) for line in result.verdict]),
        ("Intervals", [*interval_plots(result)]),
        ("Variants", [table_part(result.head, result.rows, numbers=numbers)] * bool(result.rows)),
    ]
    for heading, lines in (
        ("Not compared", result.failures),
        ("Changes", result.changes),
        ("Method", result.notes),
    ):
        bullets: Part = {"kind": "list", "lines": [line.strip() for line in lines]}
        sections.append((heading, [bullets] * bool(lines)))
    return [{"heading": heading, "parts": parts} for heading, parts in sections if parts]


def interval_plots(result: ComparisonSummary) -> Iterator[Part]:
    """Yield plots of intervals against the baseline: speed, and loss with its margin."""
    speeds = [
        (result.labels[comparison.variant], percents(comparison.speed.interval))
        for comparison in result.comparisons
        if comparison.speed.interval is not None
    ]
    if speeds:
        yield interval_plot("tokens/s against the baseline, %", speeds, None)
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
        yield interval_plot(title, losses, scale * margins[0])


def interval_plot(
    title: str, rows: Sequence[tuple[str, Sequence[float]]], margin: float | None
) -> Part:
    """Return intervals (low, mean, high) on one scale; positions are percent."""
    shown = [
        0.0,
        *(value for _, values in rows for value in values),
        *([margin, -margin] if margin else []),
    ]
    low, high = min(shown), max(shown)
    pad = (high - low) * 0.08 or 1.0
    start, width = low - pad, high - low + 2 * pad

    def position(value: float) -> float:
        return round(100 * (value - start) / width, 3)

    ends = [value for value in (low, high) if abs(position(value) - position(0.0)) > 16]
    return {
        "kind": "intervals",
        "title": title,
        "zero": position(0.0),
        "margin": {
            "left": position(-margin),
            "width": round(position(margin) - position(-margin), 3),
        }
        if margin
        else None,
        "rows": [
            {
                "text": "{}: {} ({} to {})".format(label, *map(format_percent, (mean, a, b))),
                "left": position(a),
                "width": round(position(b) - position(a), 3),
                "mean": position(mean),
            }
            for label, (a, mean, b) in rows
        ],
        "ticks": [
            {"at": position(value), "text": format_percent(value)} for value in sorted({0.0, *ends})
        ],
    }


def format_percent(value: float) -> str:
    """Format percent points with a sign, and thousands without an exponent."""
    return f"{value:+,.0f}" if abs(value) >= 100 else f"{value:+.2g}"
