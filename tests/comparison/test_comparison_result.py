"""The comparison's page in a real browser: verdict first, intervals to scale, text escaped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.comparison.test_verdict import plan
from tests.reporting.test_run_report import Browser, make_run, needs_browser, values
from weft.comparison.comparison_page import write_page
from weft.comparison.comparison_result import ComparisonSettings, ComparisonSummary
from weft.comparison.trials import TrialResult, trial_dir
from weft.comparison.variants import Variant
from weft.config.errors import ConfigError
from weft.config.schema import Job, replace
from weft.reporting.page import REPORT_FILE

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
    wrong = (str(ConfigError("parallel.tp", 3, "does not divide <i>heads</i>")),)
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


@pytest.mark.parametrize(
    ("key", "values_of_key", "names_speed"),
    [("lr", (1e-3, 3e-3, 1e-2), False), ("state_dtype", ("float32", "bfloat16", "8bit"), True)],
)
def test_verdict_of_a_sweep_ranks_losses_and_names_speed_only_where_it_can_differ(
    tmp_path: Path, key: str, values_of_key: tuple[object, ...], names_speed: bool
) -> None:
    losses, variants, results = (3.2, 2.9, 3.0), [], []
    for v, value in enumerate(values_of_key):
        job = replace(Job(), optim={key: value})
        variants.append(Variant(f"{key}={value}", "demo", job, plan=object()))  # type: ignore[arg-type]
        for r in (1, 2, 3):
            elapsed = {"productive": 9.0, "restarting": 0.0}
            row = {"step_seconds": 1 + 0.1 * v + 0.01 * r, "time_breakdown": elapsed}
            row["loss"] = losses[v] + 0.001 * r * (v + 1)
            run = make_run(
                trial_dir(tmp_path, v, variants[v].label, r),
                [values(step, **row) for step in range(1, 21)],
            )
            (run / "plan.json").write_text(json.dumps(plan()))
            results.append(TrialResult(v, r, 0, "", 1.0))
    verdict = ComparisonSummary(tmp_path, variants, results, ComparisonSettings(3)).verdict
    text = "\n".join(verdict)
    assert (" slower than " in text) == names_speed
    if not names_speed:
        assert verdict[0].startswith("lowest train loss first: lr=0.003 (2.90")
        order = [verdict[0].index(f"lr={value} ") for value in (0.003, 0.01, 0.001)]
        assert order == sorted(order)
        assert verdict[1].startswith("the best two, lr=0.003 and lr=0.01: lr=0.01's train loss")
        assert "is higher" in verdict[1]


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
    assert browser.run("return document.querySelectorAll('b, i:not(.key)').length") == 0
    # Each variant has one curve.
    assert len(browser.curves("loss")) == count


@needs_browser
def test_page_intervals_are_drawn_to_scale(browser: Browser, tmp_path: Path) -> None:
    """The means and the zero line give the scale; the ends of the lines must match it."""
    result = compare_runs(tmp_path, 4)
    browser.open(tmp_path / REPORT_FILE)
    plots = browser.run(
        "const middle = r => (r.left + r.right) / 2;"
        "return [...document.querySelectorAll('.intervals')].map(plot => {"
        " const all = name => [...plot.querySelectorAll(name)];"
        " const boxes = name => all(name).map(e => e.getBoundingClientRect());"
        " return {zero: middle(boxes('.zero')[0]), means: boxes('.mean').map(middle),"
        "  ends: boxes('.ends').map(r => [r.left, r.right]),"
        "  margin: boxes('.margin').map(r => [r.left, r.right]),"
        "  texts: all('.row').map(r => r.innerText.trim()),"
        "  inside: boxes('span').every(r => r.left >= 0 && r.right <= innerWidth)}})"
    )
    speed, loss = plots
    ends = [comparison["speed"]["percent"] for comparison in result.to_dict()["comparisons"]]
    means = speed["means"]
    scale = (means[1] - means[0]) / (ends[1][1] - ends[0][1])  # pixels of a percent
    for line, mean, (low, middle, high) in zip(speed["ends"], means, ends, strict=True):
        assert mean - speed["zero"] == pytest.approx(scale * middle, abs=1)
        expected = [speed["zero"] + scale * low, speed["zero"] + scale * high]
        assert line == pytest.approx(expected, abs=1)
    assert speed["texts"][0].startswith("tp=2, activation_checkpoint=full: -9.")
    assert speed["inside"]
    assert loss["inside"]
    assert speed["margin"] == []
    ((left, right),) = loss["margin"]
    assert (left + right) / 2 == pytest.approx(loss["zero"], abs=1)


def test_page_one_run_each_has_no_intervals(tmp_path: Path) -> None:
    result = compare_runs(tmp_path, 2, repeats=1)
    assert result.verdict[0].startswith(
        "one run each: tp=2, activation_checkpoint=full's was 10.0 % slower"
    )
    page = (tmp_path / REPORT_FILE).read_text()
    assert "Intervals<" not in page
    assert "one run each" in page
