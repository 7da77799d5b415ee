"""The report in a real browser: correct numbers, working controls, no network access."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.monitor.test_step_record import record
from tests.small import small_job
from weft.cli.main import main
from weft.config.errors import InvalidConfig
from weft.config.writer import to_toml
from weft.monitor.step_timer import StepTimes
from weft.records import run_reader as history
from weft.records.run_reader import RunReader, to_columns
from weft.reporting import run_report
from weft.reporting.chart_points import MAX_POINTS, bin_means, bin_starts, select_extremes
from weft.reporting.page import REPORT_FILE, table_part, text_part
from weft.reporting.report_charts import build_charts, chart_data
from weft.reporting.run_report import LiveReport, report_page, run_page

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver: apt install chromium-driver"
)
BEGAN = 1.7e9


def values(step: int, **extra: Any) -> dict[str, Any]:
    """Return a record as JSON values; every number differs from step to step."""
    noise = math.sin(step * 12.9898)
    seconds = {"productive": 0.9 * step, "saving": 0.05 * step, "lost": 0.0}
    changed = record(
        step,
        loss=8.0 / step**0.2 + 0.3 * noise,
        grad_norm=1.0 + abs(noise) / 3,
        lr=1e-3 / step,
        times=StepTimes(0.5 + 0.1 * noise, 0.01 + 0.001 * noise, 0.0, 0.0),
        memory_peak_gib=1.0 + step / 1000,
        time_breakdown=seconds,
    ).to_dict()
    return changed | {"time": BEGAN + step} | extra


def make_run(
    directory: Path,
    lines: list[dict[str, Any]],
    *overrides: tuple[str, str],
    events: list[dict[str, Any]] | None = None,
) -> Path:
    """Make a run directory with these records, of a job of 100 steps."""
    directory.mkdir(parents=True)
    base = small_job(("train.steps", "100"))
    job = small_job(("train.steps", "100"), *overrides)
    (directory / "job.toml").write_text(to_toml(job, "demo", base))
    (directory / "environment.json").write_text(json.dumps({"torch": "2.13.0", "devices": []}))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if events is not None:
        (directory / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    return directory


def event(step: int, kind: str, text: str = "something") -> dict[str, Any]:
    return {"time": BEGAN + step, "step": step, "kind": kind, "text": text}


class Browser:
    """Headless Chromium."""

    def __init__(self) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for word in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
            options.add_argument(f"--{word}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        self.driver.set_page_load_timeout(60)

    def open(
        self, path: Path, width: int = 1280, height: int = 900, dark: bool = False
    ) -> set[str]:
        """Open a page and check: all charts drawn, empty console, no network requests.

        Returns:
            The addresses that the page loaded.
        """
        self.run("if (location.protocol === 'file:') sessionStorage.clear()")
        self.driver.get("about:blank")
        for log in ("browser", "performance"):
            self.driver.get_log(log)
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.set_dark(dark)
        self.driver.get(path.as_uri())
        charts = self.run("return document.querySelectorAll('.chart').length")
        assert self.run("return document.querySelectorAll('.chart canvas').length") == charts
        assert self.driver.get_log("browser") == []
        messages = [
            json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")
        ]
        urls = {
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        }
        assert {url.partition(":")[0] for url in urls} <= {"file", "data", "about"}
        return urls

    def set_dark(self, dark: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        # The page redraws its charts in the next frame.
        frames = "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))"
        self.driver.execute_async_script(frames)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)  # type: ignore[no-untyped-call]

    def set(self, control: str, value: Any) -> None:
        name = "checked" if isinstance(value, bool) else "value"
        self.run(
            f"const c = document.getElementById(arguments[0]); c.{name} = arguments[1];"
            "c.dispatchEvent(new Event('input'))",
            control,
            value,
        )

    def curves(self, chart: str) -> dict[str, dict[str, Any]]:
        """Return the drawn curves by name, without the faint unsmoothed ones: points and look."""
        drawn = self.run(
            "const plot = plots.get(arguments[0]);"
            "return plot.series.slice(1).map((s, i) => ({name: s.label, raw: s.class === 'raw',"
            " y: plot.data[i + 1], x: plot.data[0], color: s.stroke(), dash: s.dash.length}))",
            chart,
        )
        for curve in drawn:
            known = [n for n, y in enumerate(curve["y"]) if y is not None]
            curve |= {axis: [curve[axis][n] for n in known] for axis in "xy"}
        return {curve["name"]: curve for curve in drawn if not curve["raw"]}

    def legend(self, chart: str) -> list[str]:
        """Return what the reader sees beside the curves' colors."""
        rows = self.run(
            "return [...document.querySelectorAll(`#chart-${arguments[0]} .u-series`)]"
            ".filter(r => r.offsetParent)"
            ".map(r => ['th', 'td'].map(tag => r.querySelector(tag).innerText).join(': '))",
            chart,
        )
        return [str(row) for row in rows]

    def layout(self, chart: str) -> Any:
        return self.run(
            "const plot = plots.get(arguments[0]);"
            "return {x: [plot.scales.x.min, plot.scales.x.max], title: plot.axes[0].label,"
            " isLog: plot.scales.y.distr === 3, color: plot.axes[0].stroke()}",
            chart,
        )

    def painted(self, chart: str) -> int:
        """Count the pixels of a chart's canvas with a saturated color: those of curves."""
        return int(
            self.run(
                "const c = document.querySelector(`#chart-${arguments[0]} canvas`);"
                "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
                "let n = 0; for (let i = 0; i < d.length; i += 4)"
                " if (d[i + 3] > 128 && Math.max(d[i], d[i + 1], d[i + 2]) -"
                " Math.min(d[i], d[i + 1], d[i + 2]) > 60) n++; return n",
                chart,
            )
        )

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    started = Browser()
    yield started
    started.driver.quit()


def write_page(directories: list[Path], **options: Any) -> Path:
    path = directories[0] / REPORT_FILE
    path.write_bytes(report_page(directories, **options))
    return path


@needs_browser
def test_report_page_numbers_are_those_of_the_run(browser: Browser, tmp_path: Path) -> None:
    lines = [values(step) for step in range(1, 61)]
    for line in lines[19::20]:
        line["eval_loss"] = line["loss"] - 0.25
    lines[30] |= {"loss": None, "grad_norm": None}
    browser.open(write_page([make_run(tmp_path / "one", lines)]))

    def drawn_points(key: str) -> tuple[list[int], list[float]]:
        result = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        return [step for step, _ in result], [value for _, value in result]

    for chart, name, key in (
        ("loss", "train", "loss"),
        ("loss", "validation", "eval_loss"),
        ("speed", "Throughput", "tokens_per_second"),
        ("mfu", "MFU", "mfu"),
        ("mfu", "attention counted as causal", "mfu_causal"),
        ("grad_norm", "Gradient norm", "grad_norm"),
        ("lr", "Learning rate", "lr"),
        ("step_seconds", "Step time", "step_seconds"),
        ("memory", "Memory of the fullest rank", "memory_peak_gib"),
    ):
        curve = browser.curves(chart)[name]
        steps, numbers = drawn_points(key)
        assert (curve["x"], curve["y"]) == (steps, pytest.approx(numbers, 1e-5)), key
        assert browser.painted(chart) > 100, chart
    # Areas are drawn as sums, from the bottom: productive, saving, ..., lost.
    areas = browser.curves("time_breakdown")
    assert [*areas] == ["lost", "saving", "productive"]
    productive = [line["time_breakdown"]["productive"] for line in lines]
    assert areas["productive"]["y"] == pytest.approx(productive)
    total = [sum(line["time_breakdown"].values()) for line in lines]
    assert areas["lost"]["y"] == pytest.approx(total, 1e-5)
    areas = browser.curves("step_breakdown")
    rest = [line["step_seconds"] - line["data_seconds"] for line in lines]
    assert areas["computing and communication"]["y"] == pytest.approx(rest, 1e-5)
    step_seconds = [line["step_seconds"] for line in lines]
    assert areas["waiting for data"]["y"] == pytest.approx(step_seconds, 1e-5)
    assert browser.layout("step_breakdown")["x"] == [1, 60]
    last_parts = lines[-1]["data_seconds"], rest[-1]
    assert browser.legend("step_breakdown") == [
        "steps: 60",
        f"waiting for data: {last_parts[0]:.4g}",
        f"computing and communication: {last_parts[1]:.4g}",
    ]

    last = lines[-1]
    steady = np.median([line["tokens_per_second"] for line in lines[2:]])
    facts = {
        "step": "60 of 100",
        "loss": f"{last['loss']:.4f}",
        "eval_loss": f"{last['eval_loss']:.4f}",
        "tokens_per_second": f"{steady:,.0f}",
        "memory_peak_gib": f"{last['memory_peak_gib']:.2f} GiB",
        "goodput": f"{0.9 / 0.95:.1%}",
    }
    assert {key: browser.text(f"#fact-{key}") for key in facts} == facts
    assert browser.text(".state") == "stopped"


@needs_browser
def test_report_page_controls_change_the_charts(browser: Browser, tmp_path: Path) -> None:
    lines = [values(step) for step in range(1, 41)]
    browser.open(write_page([make_run(tmp_path / "one", lines)]))
    losses = [line["loss"] for line in lines]

    browser.set("axis", "token")
    assert browser.curves("loss")["Loss"]["x"] == [line["tokens"] for line in lines]
    assert browser.layout("loss")["title"] == "tokens"
    browser.set("axis", "time")
    minutes = [(line["time"] - lines[0]["time"]) / 60 for line in lines]
    assert browser.curves("loss")["Loss"]["x"] == pytest.approx(minutes, 1e-5)
    assert browser.layout("loss")["title"] == "minutes"
    browser.set("axis", "step")

    # The mean has weights 0.9^age, normalized also for the first points.
    browser.set("smooth", 0.9)
    expected = [
        sum(0.9 ** (n - i) * losses[i] for i in range(n + 1)) / sum(0.9**i for i in range(n + 1))
        for n in range(len(losses))
    ]
    assert browser.curves("loss")["Loss"]["y"] == pytest.approx(expected, 1e-4)
    assert browser.text("#weight") == "0.9"
    browser.set("smooth", 0)
    assert browser.curves("loss")["Loss"]["y"] == pytest.approx(losses, 1e-5)

    assert not browser.layout("lr")["isLog"]
    browser.set("log", True)
    assert [browser.layout(chart)["isLog"] for chart in ("lr", "step_breakdown")] == [True, False]
    # The page keeps its settings when it reloads, as the page of a running job does.
    browser.driver.refresh()
    assert browser.layout("lr")["isLog"]


@needs_browser
def test_report_page_zoom_is_shared_and_can_be_reset(browser: Browser, tmp_path: Path) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    browser.open(write_page([make_run(tmp_path / "one", [values(step) for step in range(1, 41)])]))
    assert browser.layout("loss")["x"] == pytest.approx([1, 40], abs=3)
    plot = browser.driver.find_element(By.CSS_SELECTOR, "#chart-loss .u-over")
    wide = plot.size["width"]
    mouse = ActionChains(browser.driver)
    mouse.move_to_element_with_offset(plot, -wide // 4, 0).click_and_hold()
    mouse.move_by_offset(wide // 4, 0).move_by_offset(wide // 4, 0).release().perform()
    zoomed = browser.layout("loss")["x"]
    assert zoomed == pytest.approx([10.75, 30.25], abs=1.5)
    assert browser.layout("lr")["x"] == pytest.approx(zoomed, abs=0.5)
    browser.set("smooth", 0.5)
    assert browser.layout("loss")["x"] == zoomed
    mouse.double_click(browser.driver.find_element(By.CSS_SELECTOR, "#chart-lr .u-over")).perform()
    for chart in ("loss", "lr"):
        assert browser.layout(chart)["x"] == [1, 40]
    browser.set("axis", "token")  # another axis, another range
    assert browser.layout("loss")["x"][1] > 1000


@needs_browser
def test_report_page_legend_shows_values_and_hides_curves(browser: Browser, tmp_path: Path) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    lines = [values(step) for step in range(1, 42)]
    browser.open(write_page([make_run(tmp_path / "one", lines)]))
    plot = browser.driver.find_element(By.CSS_SELECTOR, "#chart-step_breakdown .u-over")
    browser.run("arguments[0].scrollIntoView({block: 'center'})", plot)
    ActionChains(browser.driver).move_to_element(plot).perform()
    middle = lines[20]
    assert browser.legend("step_breakdown")[:2] == [
        "steps: 21",
        f"waiting for data: {middle['data_seconds']:.4g}",
    ]
    assert browser.legend("lr") == ["steps: 21", f"Learning rate: {middle['lr'] * 1e5:.3g}e-5"]
    # Without the lower area, the upper one is drawn from zero.
    labels = browser.driver.find_elements(By.CSS_SELECTOR, "#chart-step_breakdown .u-label")
    labels[-1].click()
    areas = browser.curves("step_breakdown")
    data_seconds = [line["data_seconds"] for line in lines]
    assert areas["waiting for data"]["y"] == pytest.approx(data_seconds, 1e-5)
    # A smoothed curve and its faint one are hidden together.
    browser.set("smooth", 0.9)
    assert browser.painted("lr") > 100
    labels = browser.driver.find_elements(By.CSS_SELECTOR, "#chart-lr .u-label")
    browser.run("arguments[0].click()", labels[-1])
    assert browser.painted("lr") == 0


@needs_browser
@pytest.mark.parametrize("count", [2, 4])
def test_report_page_of_several_runs_compares_them(
    browser: Browser, tmp_path: Path, count: int
) -> None:
    directories = []
    for number in range(count):
        lines = [values(step, loss=number + 1 / step) for step in range(1, 21 + number)]
        rate = ("optim.lr", str(1e-3 * (number + 1)))
        directories.append(make_run(tmp_path / f"run-{number}", lines, rate))
    mine = text_part("the first is <better>")
    sections = [{"heading": "Verdict & more", "parts": [mine, table_part(["a"], [["1 < 2"]])]}]
    browser.open(write_page(directories, title="Rates", sections=sections))
    curves = browser.curves("loss")
    assert {*curves} == {f"run-{number}" for number in range(count)}
    for number in range(count):
        steps = range(1, 21 + number)
        losses = [number + 1 / step for step in steps]
        assert curves[f"run-{number}"]["y"] == pytest.approx(losses, 1e-5)
    headings = browser.run("return [...document.querySelectorAll('h2')].map(h => h.innerText)")
    assert headings[:2] == ["Verdict & more", "Training"]
    assert browser.text("#part-0 p") == "the first is <better>"
    assert browser.text("#part-0 td, #part-0 tbody th") == "1 < 2"
    assert browser.text("h1") == browser.driver.title == "Rates"
    rows = browser.run("return [...document.querySelectorAll('tr')].map(r => r.innerText)")
    assert "\t".join(["optim.lr", *(f"{1e-3 * (n + 1)}" for n in range(count))]) in rows
    # Equal keys are only in the collapsed list of all keys.
    assert browser.run("return document.body.textContent").count("train.steps") == 1


@needs_browser
@pytest.mark.parametrize("width", [1280, 390, 360])
@pytest.mark.parametrize("runs", [1, 3])
def test_report_page_fits_the_window(
    browser: Browser, tmp_path: Path, width: int, runs: int
) -> None:
    events = [event(5, "anomaly", "a long text " * 30), event(9, "failure", "x" * 300)]
    directories = [
        make_run(tmp_path / f"run-{n}", [values(step) for step in range(1, 9)], events=events)
        for n in range(runs)
    ]
    wide = table_part(["a " * 9] * 30, [["long"] * 30])
    browser.open(
        write_page(directories, appendix=[{"heading": "Wide", "parts": [wide]}]), width, 844
    )
    assert browser.run("return document.documentElement.scrollWidth") <= width
    inside = browser.run(
        "return [...document.querySelectorAll('.chart, canvas')]"
        ".map(c => c.getBoundingClientRect().right)"
    )
    assert max(inside) <= width


@needs_browser
def test_report_page_follows_dark_and_light(browser: Browser, tmp_path: Path) -> None:
    path = write_page([make_run(tmp_path / "one", [values(step) for step in range(1, 9)])])
    paper = "return getComputedStyle(document.body).backgroundColor"
    colors = []
    browser.open(path, dark=True)
    for dark in (True, False, True):  # also when the setting changes while the page is open
        browser.set_dark(dark)
        colors.append((browser.run(paper), browser.layout("loss")["color"]))
    assert colors == [
        ("rgb(15, 18, 23)", "#a0a8b5"),
        ("rgb(246, 247, 249)", "#5a6270"),
        ("rgb(15, 18, 23)", "#a0a8b5"),
    ]


@needs_browser
def test_report_page_events_are_on_the_axis(browser: Browser, tmp_path: Path) -> None:
    lines = [values(step) for step in range(1, 31)]
    lines[6] |= {"loss": None, "grad_norm": None}
    lines[19] |= {"eval_loss": 4.5}
    events = [
        event(0, "start"),
        event(7, "anomaly", "the loss was nan"),
        event(12, "slow rank", "rank 3 is slow"),
        event(25, "failure", "rank 1 failed"),
        event(20, "restart"),
    ]
    browser.open(write_page([make_run(tmp_path / "one", lines, events=events)]))
    marks = browser.run(
        "const plot = plots.get('loss');"
        "return [...document.querySelectorAll('#chart-loss .event')].map(m => ({text: m.title,"
        " x: plot.posToVal(parseFloat(m.style.left), 'x'), right: m.getBoundingClientRect().right,"
        " isRoutine: m.classList.contains('routine')}))"
    )
    marks.sort(key=lambda mark: mark["x"])
    assert [mark["x"] for mark in marks] == pytest.approx([0, 7, 12, 20, 25], abs=0.01)
    assert marks[1]["text"] == "anomaly: the loss was nan"
    assert [(mark["text"].partition(":")[0], mark["isRoutine"]) for mark in marks] == [
        ("start", True),
        ("anomaly", False),
        ("slow rank", False),
        ("restart", False),
        ("failure", False),
    ]
    table = browser.text(".wide table")
    assert "rank 1 failed" in table
    assert len(browser.curves("loss")["train"]["y"]) == 29


@needs_browser
def test_report_page_without_records_has_a_note(browser: Browser, tmp_path: Path) -> None:
    browser.open(write_page([make_run(tmp_path / "empty", [])]))
    assert "No step has been recorded yet." in browser.text("header")
    assert browser.text(".state") == "not started"
    headings = browser.run("return [...document.querySelectorAll('h2')].map(h => h.innerText)")
    assert headings == ["Configuration", "Environment"]


@needs_browser
def test_report_page_hostile_text_is_not_executed(browser: Browser, tmp_path: Path) -> None:
    evil = '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">'
    lines = [
        values(n) | {f"loss/{evil}": 1.0, "loss/b": 2.0, "loss/c": 3.0, f"grad_norm/{evil}": 1.0}
        for n in range(1, 9)
    ]
    name = "<script>hacked=1<b>&amp;"
    directory = make_run(
        tmp_path / name, lines, ("data.path", evil), events=[event(3, "failure", evil)]
    )
    (directory / "environment.json").write_text(json.dumps({"torch": evil, evil: evil}))
    other = make_run(tmp_path / "other", lines)
    sections = [{"heading": evil, "parts": [text_part(evil)]}]
    for directories in ([directory], [directory, other]):
        browser.open(write_page(directories, sections=sections))
        assert browser.run("return window.hacked") is None
        assert browser.run("return document.images.length") == 0
        assert name in browser.text("h1")
        assert evil in browser.text("main")
    assert f"{name}, {evil}: 1" in browser.legend("loss-")
    titles = browser.run("return [...document.querySelectorAll('.event')].map(m => m.title)")
    assert f"{name}: failure: {evil}" in titles
    # The page's policy would also block a script that got in.
    browser.run(
        "const s = document.createElement('script'); s.text = 'window.hacked = 1';"
        "document.body.append(s)"
    )
    assert browser.run("return window.hacked") is None


@needs_browser
@pytest.mark.parametrize("sources", [2, 3])
def test_report_page_sources_have_different_lines(
    browser: Browser, tmp_path: Path, sources: int
) -> None:
    losses = {f"source {n}": float(n) for n in range(sources)}
    lines = [
        values(step) | {f"loss/{name}": loss for name, loss in losses.items()}
        for step in range(1, 9)
    ]
    browser.open(write_page([make_run(tmp_path / name, lines) for name in ("one", "other")]))
    curves = browser.curves("loss-").values()
    assert len({(curve["color"], curve["dash"]) for curve in curves}) == len(curves) == 2 * sources


@needs_browser
def test_report_page_of_a_long_run_is_small_and_quick(browser: Browser, tmp_path: Path) -> None:
    count = 100_000
    lines = [values(step) for step in range(1, 1001)]
    directory = make_run(tmp_path / "long", [])
    with (directory / "metrics.jsonl").open("w") as file:
        for start in range(0, count, 1000):
            for line in lines:
                line |= {"step": line["step"] % 1000 + start or 1000}
            if start == 57_000:
                lines[345]["loss"], lines[346]["loss"] = 99.0, -99.0
            file.writelines(json.dumps(line) + "\n" for line in lines)
            lines[345]["loss"] = lines[346]["loss"] = 5.0
    start_time = time.monotonic()
    page = report_page([directory]).decode()
    seconds = time.monotonic() - start_time
    print(f"{count:,} records: {seconds:.2f} s, {len(page) / 2**20:.1f} MiB")
    assert seconds < 20  # 1.3 on a free core
    (directory / REPORT_FILE).write_text(page)
    browser.open(directory / REPORT_FILE)
    assert len(page) < 400_000
    browser.set("smooth", 0)
    curve = browser.curves("loss")["Loss"]
    assert MAX_POINTS / 2 < len(curve["y"]) <= MAX_POINTS
    assert {99.0, -99.0} <= {*curve["y"]}
    assert len(browser.curves("step_breakdown")["waiting for data"]["y"]) <= MAX_POINTS
    assert "a curve has at most 800 points for 100,000 records" in browser.text("main")
    browser.set("smooth", 0.5)  # smooths the means, not the extremes
    assert max(browser.curves("loss")["Loss"]["y"]) < 20


# --------------------------------------------------------------------------- without a browser


def test_run_page_sections_are_plain_data(tmp_path: Path) -> None:
    """A page of a run is data that can be asserted on before a template shows it."""
    events = [event(2, "failure", "<b>rank 1</b> failed")]
    directory = make_run(
        tmp_path / "one", [values(1), values(2)], ("optim.lr", "0.5"), events=events
    )
    page = run_page([RunReader(directory)], "", [], [], running=False)
    sections = {section["heading"]: section["parts"] for section in page["sections"]}
    assert [*sections][2:] == ["Memory", "Goodput", "Events", "Configuration", "Environment"]
    assert sections["Events"][0]["rows"][0][2:] == ["failure", "<b>rank 1</b> failed"]
    assert sections["Configuration"][0]["rows"] == [["optim.lr", "0.002 -> 0.5"]]
    boxes = sections["Goodput"][1]["boxes"]
    assert [box["name"] for box in boxes] == ["productive", "saving"]
    assert [box["width"] for box in boxes] == pytest.approx(
        [100 * 0.9 / 0.95, 100 * 0.05 / 0.95], 1e-4
    )
    (tiles,) = (part["tiles"] for part in page["header"] if part["kind"] == "tiles")
    assert ("step", "2 of 100") in [(tile["key"], tile["text"]) for tile in tiles]
    assert page["reload_seconds"] is None


def test_history_damaged_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "one", [values(1), values(2), values(3)])
    text = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    text[1] = text[1][:40] + "\n"
    (directory / "metrics.jsonl").write_text("".join([*text, "[1]\n", "\n", '{"step": 4, "lo']))
    run = RunReader(directory)
    assert run.columns["step"].tolist() == [1, 3]
    assert run.damaged == 3  # the last line is incomplete, not damaged
    assert "metrics.jsonl: 3 lines are damaged and left out" in report_page([directory]).decode()
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(f'ss": 7.0}}\n{json.dumps(values(5, new=1.5))}\n')
    run.read_new_records()
    assert run.columns["step"].tolist() == [1, 3, 4, 5]
    assert run.columns["loss"].tolist()[2] == 7.0
    assert np.isnan(run.columns["new"][:3]).all()
    assert run.columns["new"][3] == 1.5


def test_history_records_without_time_and_tokens_are_drawn_by_step(tmp_path: Path) -> None:
    """Events without time and tokens are drawn by their step."""
    lines = [{"step": step, "loss": 5.0 - step} for step in (1, 2)]
    directory = make_run(tmp_path / "one", [*lines, values(3)], events=[event(1, "anomaly")])
    runs = [RunReader(directory)]
    drawn_points = chart_data(runs, ["one"], build_charts(runs))["runs"][0]
    grid = drawn_points["grids"][drawn_points["curves"]["loss"]["grid"]]
    assert grid["step"] == [1, 2, 3]
    assert grid["time"][:2] == grid["token"][:2] == [None, None]
    (mark,) = drawn_points["events"]
    assert (mark["step"], mark["token"], mark["time"]) == (1, None, 0.0)


def test_charts_of_objectives_and_experts_exist(tmp_path: Path) -> None:
    markers = {"moe_max_load": 1.5, "metrics": {"margin": 0.25}, "eval_metrics": {"margin": 0.5}}
    runs = [RunReader(make_run(tmp_path / "one", [values(1, **markers)]))]
    assert next(chart["unit"] for chart in build_charts(runs)) == "nats per token"
    dpo = make_run(tmp_path / "dpo", [values(1)], ("train.objective", "dpo"))
    assert next(chart["unit"] for chart in build_charts([RunReader(dpo)])) == "nats per pair"
    keys = {key for chart in build_charts(runs) for key, _, _ in chart["curves"]}
    assert {"moe_max_load", "metrics.margin", "eval_metrics.margin"} <= keys


def test_history_line_that_grows_while_it_is_read_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the line is appended to it, and later lines are read correctly."""
    directory = make_run(tmp_path / "one", [values(1)])
    first, second = (json.dumps(values(step)) + "\n" for step in (2, 3))
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(first[:50])
    parse = history.parse_records

    def append_lines(lines: Sequence[bytes]) -> list[dict[str, Any]]:
        monkeypatch.setattr(history, "parse_records", parse)
        with (directory / "metrics.jsonl").open("a") as file:
            file.write(first[50:])
        return parse(lines)

    monkeypatch.setattr(history, "parse_records", append_lines)
    run = RunReader(directory)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(second)
    run.read_new_records()
    assert run.columns["step"].tolist() == [1, 2, 3]
    assert run.damaged == 0


@pytest.mark.parametrize("count", [799, 1000, 4321, 100_003])
def test_bins_keep_every_extreme_and_have_means(count: int) -> None:
    numbers = np.sin(np.arange(count) * 12.9898)
    numbers[count // 3], numbers[count // 2] = 50.0, -50.0
    numbers[7] = np.nan
    starts = bin_starts(count, 400)
    assert len(starts) <= 400
    selected = select_extremes(numbers, starts)
    assert {count // 3, count // 2} <= {*selected.tolist()}
    assert 7 not in selected
    assert (np.diff(selected) >= 0).all()
    means = bin_means(numbers, starts)
    finite = numbers[: starts[1]][np.isfinite(numbers[: starts[1]])]
    assert means[0] == pytest.approx(finite.mean())
    assert means[-1] == pytest.approx(numbers[starts[-1] :].mean())
    numbers[: starts[1]] = np.nan
    assert select_extremes(numbers, starts)[:2].tolist() == [-1, -1]
    assert np.isnan(bin_means(numbers, starts)[0])


def test_columns_of_values_that_are_not_numbers_are_nan() -> None:
    records = [{"a": 1.5, "b": {"c": 2}}, {"a": [1], "b": 7}, {"b": {"c": None, "d": 10**400}}]
    result = to_columns(records)
    assert result.keys() == {"a", "b.c", "b.d"}
    assert [str(value) for value in result["a"]] == ["1.5", "nan", "nan"]
    assert [str(value) for value in result["b.c"]] == ["2.0", "nan", "nan"]
    assert np.isnan(result["b.d"]).all()
    (tokens,) = to_columns([{"tokens": 5}, {"tokens": 6}, {"tokens": "x"}]).values()
    assert [str(value) for value in tokens] == ["5.0", "6.0", "nan"]


def test_steady_records_are_those_of_the_last_start_without_warm_up(tmp_path: Path) -> None:
    lines = [values(step) for step in range(1, 11)]
    for line in lines[4:]:
        line["time_breakdown"]["restarting"] = 3.0
    for line in lines[:4]:
        line["time_breakdown"]["restarting"] = 0.0
    run = RunReader(make_run(tmp_path / "one", lines))
    expected = np.median([line["step_seconds"] for line in lines[6:]])
    assert run.steady_median("step_seconds") == expected


def test_history_state_follows_records_and_events(tmp_path: Path) -> None:
    def state(name: str, last: int, after: float, *kinds: str, running: bool | None = None) -> str:
        events = [event(last, kind) | {"time": BEGAN + last + n} for n, kind in enumerate(kinds)]
        directory = make_run(
            tmp_path / name, [values(n) for n in range(1, last + 1)], events=events
        )
        result, reason = RunReader(directory).state(BEGAN + last + after, running)
        assert (reason == "something") == (result == "failed" or kinds[-1:] == ("stop",))
        return result

    assert state("a", 100, 1.0) == "finished"
    assert state("b", 50, 1.0) == "running"
    assert state("c", 50, 1000.0) == "stopped"
    assert state("d", 50, 3.0, "start", "failure") == "failed"
    assert state("e", 50, 4.0, "start", "failure", "start") == "running"
    assert state("f", 50, 1000.0, "start", "failure", "start") == "stopped"
    assert state("g", 50, 3.0, "start", "stop") == "stopped"
    assert state("h", 0, 1.0) == "not started"
    assert state("i", 50, 1000.0, "start", running=True) == "running"
    assert state("j", 50, 1.0, running=False) == "stopped"


def test_report_page_of_a_running_job_reloads(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "one", [values(step) for step in range(1, 9)])
    assert 'http-equiv="refresh"' in report_page([directory], running=True).decode()
    assert 'id="fact-left"' in report_page([directory], running=True).decode()
    assert 'http-equiv="refresh"' not in report_page([directory], running=False).decode()


def test_live_report_is_renewed_if_there_are_new_records(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "one", [])
    messages: list[str] = []
    live = LiveReport(directory, messages.append)
    page = directory / REPORT_FILE
    assert not live.write_if_changed()
    assert not page.exists()
    for number in (1, 2):
        with (directory / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(values(number)) + "\n")
        assert live.write_if_changed()
        assert f"{number} of 100" in page.read_text()
        assert 'http-equiv="refresh"' in page.read_text()
    assert not live.write_if_changed()
    assert messages == []


def test_live_report_thread_writes_the_first_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_report, "POLL_SECONDS", 0.05)
    directory = make_run(tmp_path / "one", [values(1)])
    with LiveReport(directory, print):
        deadline = time.monotonic() + 30
        while not (directory / REPORT_FILE).exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    assert "1 of 100" in (directory / REPORT_FILE).read_text()
    assert not [thread for thread in threading.enumerate() if thread.name == "weft-report"]


def test_live_report_that_cannot_be_written_warns_and_leaves_no_file(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "one", [values(1)])
    (directory / REPORT_FILE).mkdir()  # no file can replace it
    messages: list[str] = []
    assert not LiveReport(directory, messages.append).write_if_changed()
    assert messages == [f"warning: {directory / REPORT_FILE} cannot be written: is a directory"]
    assert not list(directory.glob(".*.tmp"))


def test_report_command_mistakes_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make_run(tmp_path / "one", [values(1)])
    missing = tmp_path / "nowhere"
    assert main(["report", str(missing), str(tmp_path), "--out", "/no/such/page.html"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("=")[0].strip() for line in lines[1:]] == ["run", "run", "--out"]
    with pytest.raises(InvalidConfig, match="is not a run directory"):
        report_page([missing])
    assert main(["report", str(directory), "--out", str(tmp_path)]) == 2
    (directory / "job.toml").write_text("[train\n")
    assert main(["report", str(directory)]) == 0
    assert "job.toml cannot be read: Expected" in (directory / REPORT_FILE).read_text()


def test_report_page_does_not_import_torch() -> None:
    probe = "import sys, weft.reporting.run_report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
    assert not hasattr(run_report, "torch")
