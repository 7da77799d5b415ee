"""The head of a report, its tables, heat maps and keyboard, and how they look."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.reporting.test_run_report import (
    BEGAN,
    Browser,
    browser,
    event,
    make_run,
    needs_browser,
    values,
    write_page,
)
from weft.records.run_reader import RunReader
from weft.reporting.chart_points import NONFINITE, encode_cell, points_per_curve
from weft.reporting.report_charts import build_charts, chart_data
from weft.reporting.report_summary import headline, runs_headline, runs_table, spark_points

__all__ = ["browser"]  # the fixture


def rich_run(directory: Path, count: int = 30, layers: int = 9) -> Path:
    """Make a run with gradient norms by layer, layer statistics and samples of the node."""
    lines = [
        values(step) | {f"grad_norm/layers.{n}": 10.0 ** (n - 4) for n in range(layers)}
        for step in range(1, count + 1)
    ]
    lines[count // 2]["eval_loss"] = 3.0
    lines[-1]["eval_loss"] = 2.5
    make_run(directory, lines, ("optim.lr", "0.5"), events=[event(5, "failure", "rank 1 failed")])
    rows = [
        {"step": step, "kind": kind, "name": f"layers.{n}", "order": n, "count": 4, "mean": 0.0}
        | {"rms": 0.1 * n, "max_abs": 1.0, "nonfinite": int(kind == "gradient" and step == n == 8)}
        for step in (7, 8)
        for kind in ("activation", "gradient", "parameter")
        for n in range(1, 9)
    ]
    text = "".join(json.dumps(row) + "\n" for row in [*rows, {"step": 9, "kind": "other"}])
    (directory / "statistics.jsonl").write_text(text + "damaged\n")
    samples = [
        {"time": BEGAN + second, "cpu_percent": 50.0 + second, "memory_gib": 3.5}
        for second in range(0, count, 2)
    ]
    text = "".join(json.dumps(sample) + "\n" for sample in samples)
    (directory / "system.jsonl").write_text(text + '[1]\n{"time": "x"}\n')
    return directory


def contrast(color: str, other: str) -> float:
    """Return the contrast of two colors ``rgb(r, g, b)`` or ``#rrggbb`` (WCAG 2)."""

    def luminance(text: str) -> float:
        if text.startswith("#"):
            channels = [int(text[n : n + 2], 16) for n in (1, 3, 5)]
        else:
            channels = [int(word) for word in re.findall(r"\d+", text)[:3]]
        shares = [c / 255 for c in channels]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
        return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))

    high, low = sorted((luminance(color), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


# --------------------------------------------------------------------------- in a browser


@needs_browser
def test_report_heat_maps_and_system_charts_are_drawn(browser: Browser, tmp_path: Path) -> None:
    browser.open(write_page([rich_run(tmp_path / "one")]))
    headings = browser.run("return [...document.querySelectorAll('h2')].map(h => h.innerText)")
    assert headings[:5] == ["Training", "Speed", "Memory", "System", "Layers"]
    maps = browser.run("return maps.map(m => [m.id, m.names.length, m.cells[0].length])")
    assert maps == [
        ["map-norms", 9, 30],
        *[[f"map-{kind}", 8, 2] for kind in ("activation", "gradient", "parameter")],
    ]
    for name, *_ in maps:
        assert browser.painted(name) > 1000
    assert "red: NaN or Inf" in browser.text("#chart-map-gradient")
    assert "red" not in browser.text("#chart-map-parameter")
    # Samples are placed by their time: step n was recorded n seconds after the start.
    curve = browser.curves("system_cpu")["Processor"]
    assert curve["x"] == [1.0, *range(2, 30, 2)]
    assert curve["y"] == [50.0 + second for second in range(0, 30, 2)]


@needs_browser
def test_report_charts_have_tables_and_keys(browser: Browser, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser.open(write_page([rich_run(tmp_path / "one")]))
    assert browser.run(
        "return [...document.querySelectorAll('.chart')].every(c =>"
        " c.closest('figure').getAttribute('aria-label')"
        " && c.closest('figure').querySelectorAll('figcaption button').length === 2)"
    )
    button = browser.driver.find_element(By.CSS_SELECTOR, "[aria-label='Table of Loss']")
    assert button.get_attribute("aria-expanded") == "false"
    button.send_keys(Keys.ENTER)
    assert button.get_attribute("aria-expanded") == "true"
    rows = browser.run(
        "return [...document.querySelectorAll('#values-loss tr')]"
        ".map(r => [...r.cells].map(c => c.textContent))"
    )
    assert rows[0] == ["steps", "train", "validation"]
    assert (rows[-1][0], rows[-1][2]) == ("30", "2.5")
    assert rows[1][2] == "\N{EN DASH}"
    chart = browser.driver.find_element(By.ID, "chart-loss")
    chart.send_keys(Keys.ARROW_LEFT)
    assert browser.text("#spoken").startswith("steps 29, train ")
    chart.send_keys(Keys.HOME, "+")
    low, high = browser.layout("loss")["x"]
    assert high - low < 20
    chart.send_keys(Keys.ESCAPE)
    assert browser.layout("loss")["x"][1] == 30
    label = browser.driver.find_element(By.CSS_SELECTOR, "#chart-loss tr:nth-child(2) th")
    label.send_keys(Keys.SPACE)  # hides the curve, which a redraw keeps
    browser.set("log", True)
    assert browser.run("return plots.get('loss').series.map(s => s.show)") == [True, False, True]
    browser.set("log", False)


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_report_colors_have_contrast(browser: Browser, tmp_path: Path, dark: bool) -> None:
    browser.open(write_page([rich_run(tmp_path / "one")]), dark=dark)
    style = (
        "const s = getComputedStyle(document.documentElement);"
        "return Object.fromEntries(arguments[0].map(n => [n, s.getPropertyValue('--' + n).trim()]))"
    )
    curves = [f"c{n}" for n in range(10)]
    texts = ["ink", "faint", "bad", "good"]
    colors = browser.run(style, [*curves, *texts, "paper", "page"])
    for name in texts:
        for ground in ("paper", "page"):
            assert contrast(colors[name], colors[ground]) >= 4.5, (name, ground)
    for name in curves:
        assert contrast(colors[name], colors["paper"]) >= 3, name
    state = browser.run(
        "const s = getComputedStyle(document.querySelector('.state'));"
        "return [s.color, s.backgroundColor]"
    )
    assert contrast(*state) >= 4.5


@needs_browser
def test_report_theme_and_print_override_the_system(browser: Browser, tmp_path: Path) -> None:
    browser.open(write_page([rich_run(tmp_path / "one")]), dark=True)
    paper = "return getComputedStyle(document.body).backgroundColor"
    browser.set("theme", "light")
    assert browser.run(paper) == "rgb(246, 247, 249)"
    browser.set("theme", "")
    assert browser.run(paper) == "rgb(15, 18, 23)"
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.layout("loss")["color"] == "#5a6270"  # dark ink on white paper
    browser.run("dispatchEvent(new Event('afterprint'))")
    assert browser.layout("loss")["color"] == "#a0a8b5"
    pdf = browser.driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]
    assert len(pdf) > 20_000
    assert browser.driver.get_log("browser") == []


@needs_browser
def test_report_runs_are_sorted_and_hidden(browser: Browser, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By

    directories = [
        make_run(tmp_path / f"run-{n}", [values(s, loss=loss + 1 / s) for s in range(1, 9)])
        for n, loss in enumerate((3.0, 1.0, 2.0))
    ]
    browser.open(write_page(directories))
    names = "return [...document.querySelectorAll('.runs .run')].map(r => r.innerText.trim())"
    assert "run-1 has the lowest loss" in browser.text(".lead")
    find = browser.driver.find_element
    find(By.CSS_SELECTOR, "[aria-label='Sort by loss']").click()
    assert browser.run(names) == ["run-1", "run-2", "run-0"]
    find(By.CSS_SELECTOR, "[aria-label='Sort by loss']").click()
    assert browser.run(names) == ["run-0", "run-2", "run-1"]
    find(By.CSS_SELECTOR, "[aria-label='Show run-2 in all charts']").click()
    assert [*browser.curves("loss")] == ["run-0", "run-1"]
    find(By.CSS_SELECTOR, "[aria-label='Show run-2 in all charts']").click()
    assert len(browser.curves("lr")) == 3


@needs_browser
def test_report_stack_is_not_doubled_by_smoothing(browser: Browser, tmp_path: Path) -> None:
    browser.open(write_page([make_run(tmp_path / "one", [values(s) for s in range(1, 41)])]))
    browser.set("smooth", 0.5)
    assert max(browser.curves("step_breakdown")["waiting for data"]["y"]) < 0.7
    browser.set("smooth", 0)


# --------------------------------------------------------------------------- without a browser


def reader(tmp_path: Path, name: str, **columns: list[float | None]) -> RunReader:
    rows: list[dict[str, Any]] = []
    for number in range(len(next(iter(columns.values())))):
        extra = {key: column[number] for key, column in columns.items()}
        rows.append(values(number + 1) | {k: v for k, v in extra.items() if v is not None})
    return RunReader(make_run(tmp_path / name, rows))


def test_headline_has_the_result(tmp_path: Path) -> None:
    run = reader(tmp_path, "a", loss=[8.0, 6.0, 5.0], eval_loss=[None, 6.1, 5.5])
    text = headline(run, "finished", "")
    assert text.startswith("The loss fell from 8.000 to 5.000 in 3 steps (")
    assert text.endswith(" The validation loss is 5.500.")
    worse = reader(tmp_path, "b", loss=[8.0, 6.0, 5.0], eval_loss=[5.5, 6.1, None])
    note = "The validation loss was lowest at step 1 (5.500) and has risen to 6.100."
    assert headline(worse, "finished", "").endswith(note)
    assert headline(worse, "failed", "rank 1 failed").startswith("Failed: rank 1 failed. The loss")
    diverged = reader(tmp_path, "c", loss=[5.0, 9.0], diverged_since=[2, 2])
    text = headline(diverged, "finished", "diverged since step 2")
    assert text.startswith("Diverged since step 2. The loss rose from 5.000 to 9.000")


def test_runs_table_marks_a_single_best_value(tmp_path: Path) -> None:
    runs = [reader(tmp_path, n, loss=[loss]) for n, loss in (("a", 2.0), ("b", 1.0), ("c", 3.0))]
    names = ["a", "b", "c"]
    assert runs_headline(runs, names).startswith("b has the lowest loss, 1.000 (highest: 3.000, c)")
    table = runs_table(runs, names, [("finished", "")] * 3)
    column = table["labels"].index("loss")
    assert [row["cells"][column]["is_best"] for row in table["rows"]] == [False, True, False]
    column = table["labels"].index("peak memory")  # equal
    assert not any(row["cells"][column]["is_best"] for row in table["rows"])


def test_sparks_are_in_their_box() -> None:
    numbers = np.sin(np.arange(1000.0))
    numbers[5] = np.nan
    points = [point.split(",") for point in spark_points(numbers).split()]
    assert len(points) <= 48
    assert all(0 <= float(x) <= 100 and 0 <= float(y) <= 24 for x, y in points)
    assert spark_points(numbers[:2]) == ""


def test_page_size_is_bounded(tmp_path: Path) -> None:
    assert [points_per_curve(n) for n in (0, 10, 30, 10_000)] == [800, 800, 500, 160]
    assert [encode_cell(v) for v in (np.inf, np.nan, 0.0, 0.01)] == [NONFINITE, None, None, -200]
    runs = [RunReader(rich_run(tmp_path / "one", count=1500))]
    data = chart_data(runs, ["one"], build_charts(runs))
    assert len(json.dumps(data)) < 300_000
    assert len(data["runs"][0]["grids"]) == 3  # bins of records, evaluations, bins of samples
