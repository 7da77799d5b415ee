"""The comparison's page in a real browser: verdict first, intervals to scale, text escaped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.test_run_report import Browser, make_run, needs_browser, values
from tests.tools.test_verdict import plan
from weft.config.errors import ConfigError
from weft.config.schema import Job
from weft.tools.comparison_page import write_page
from weft.tools.comparison_result import ComparisonSettings, ComparisonSummary
from weft.tools.run_report import REPORT_FILE
from weft.tools.trials import TrialResult, trial_dir
from weft.tools.variants import Variant

LABELS = ["tp=1", "tp=2, activation_checkpoint=full", "<b>lr</b>=&1", 'path="a b"']


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    started = Browser()
    yield started
    started.driver.quit()


def compare_runs(directory: Path, count: int, repeats: int = 3) -> ComparisonSummary:
    """Compare ``count`` variants, each 10 % slower than the last, and an invalid one."""
    variants = [
        Variant(label, "demo", Job(), plan=object())  # type: ignore[arg-type]
        for label in LABELS[:count]
    ]
    wrong = (ConfigError("parallel.tp", 3, "does not divide <i>heads</i>"),)
    variants.append(Variant("tp=3", "demo", Job(), None, wrong))
    results = []
    for v in range(count):
        for r in range(1, repeats + 1):
            seconds = 1.1**v * (1 + 0.01 * (r * (v + 1) % 3))
            elapsed = {"productive": 9.0, "restarting": 0.0}
            row = {"step_seconds": seconds, "loss": 3 + 0.001 * r * v, "time_breakdown": elapsed}
            lines = [values(step, **row) for step in range(1, 21)]
            run = make_run(trial_dir(directory, v, LABELS[v], r), lines)
            (run / "plan.json").write_text(json.dumps(plan()))
            results.append(TrialResult(v, r, 0, "", 1.0))
    result = ComparisonSummary(directory, variants, results, ComparisonSettings(repeats))
    messages: list[str] = []
    write_page(directory, result, messages.append)
    assert messages == []
    return result


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("count", [2, 4])
def test_page_shows_verdict_and_variants_at_any_width(
    browser: Browser, tmp_path: Path, width: int, count: int
) -> None:
    result = compare_runs(tmp_path, count)
    browser.open(tmp_path / REPORT_FILE, width, 844)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    headings = browser.run("return [...document.querySelectorAll('h2')].map(h => h.innerText)")
    assert headings[:4] == ["Verdict", "Intervals", "Variants", "Not compared"]
    output = browser.run(
        "return [...document.querySelectorAll('#part-0 p')].map(p => p.textContent)"
    )
    assert output == result.verdict
    assert output[0].startswith("tp=2, activation_checkpoint=full is 9.")
    rows = browser.run(
        "return [...document.querySelectorAll('#part-2 tbody tr')]"
        ".map(r => [...r.cells].map(c => c.textContent))"
    )
    assert rows == result.rows
    assert "tp=3: cannot be run: parallel.tp=3 does not divide <i>heads</i>" in browser.text(
        "#part-3"
    )
    assert browser.run("return document.querySelectorAll('b, i').length") == 0
    # Each variant has one curve.
    assert len(browser.traces("loss")) == count


@needs_browser
def test_page_intervals_are_drawn_to_scale(browser: Browser, tmp_path: Path) -> None:
    """The means and the zero line give the scale; the ends of the lines must match it."""
    result = compare_runs(tmp_path, 4)
    browser.open(tmp_path / REPORT_FILE)
    plots = browser.run(
        "return [...document.querySelectorAll('#part-1 svg')].map(s => ["
        "[...s.querySelectorAll('line')].map(l => [+l.getAttribute('x1'), +l.getAttribute('x2')]),"
        "[...s.querySelectorAll('circle')].map(c => +c.getAttribute('cx')),"
        "[...s.querySelectorAll('text')].map(t => t.textContent),"
        "[...s.querySelectorAll('text')].map(t => t.getBoundingClientRect().right),"
        "s.getBoundingClientRect().right])"
    )
    assert len(plots) == 2
    (zero, *lines), means, texts, rights, edge = plots[0]
    percents = [
        json.loads(json.dumps(comparison)) for comparison in result.to_dict()["comparisons"]
    ]
    ends = [percent["speed"]["percent"] for percent in percents]
    scale = (means[1] - means[0]) / (ends[1][1] - ends[0][1])  # pixels of a percent
    for line, mean, (low, middle, high) in zip(lines, means, ends, strict=True):
        assert mean - zero[0] == pytest.approx(scale * middle, abs=0.5)
        assert line == pytest.approx([zero[0] + scale * low, zero[0] + scale * high], abs=0.5)
    assert any(text.startswith("tp=2, activation_checkpoint=full: -9.") for text in texts)
    assert max(rights) <= edge


def test_page_one_run_each_has_no_intervals(tmp_path: Path) -> None:
    result = compare_runs(tmp_path, 2, repeats=1)
    assert result.verdict[0].startswith(
        "one run each: tp=2, activation_checkpoint=full's was 10.0 % slower"
    )
    page = (tmp_path / REPORT_FILE).read_text()
    assert "Intervals<" not in page
    assert "one run each" in page
