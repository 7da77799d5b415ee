"""Photograph a run's report and pages of the site, with their sizes and load times.

    make docs && make demo
    python benchmarks/screenshots.py [--run runs/demo] [--site build/docs] [--out build/screenshots]

Chromium opens each page without a network, and fails if the page requests anything, leaves a chart
empty, or writes to the console.  The result is a picture of each page and a table: width, size of
the HTML file, size of all files that the page loads, and the time until its load event (the median
of five loads).
"""

from __future__ import annotations

import argparse
import base64
import statistics
from datetime import date
from pathlib import Path
from urllib.parse import unquote, urlparse

from tests.reporting.test_run_report import Browser

# Picture, page, width in pixels, dark.
REPORT = [("report-light", 1280, False), ("report-dark", 1280, True), ("report-400", 400, False)]
SITE = [
    ("start", "index.html"),
    ("cookbook", "cookbook/own-text.html"),
    ("lesson", "course/pipeline.html"),
    ("python", "python.html"),
]
LOADS = 5
LOAD_TIME = "return performance.getEntriesByType('navigation')[0].loadEventEnd"


def photograph(browser: Browser, path: Path, picture: Path, width: int, dark: bool) -> str:
    """Take the picture of a page; return its row of the table."""
    milliseconds, urls = [], set[str]()
    for _ in range(LOADS):
        urls |= browser.open(path, width=width, dark=dark)
        milliseconds.append(browser.run(LOAD_TIME))
    files = {Path(unquote(urlparse(url).path)) for url in urls if url.startswith("file:")}
    size = sum(file.stat().st_size for file in files)
    screen = browser.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
    picture.write_bytes(base64.b64decode(screen["data"]))
    kilobytes = f"{path.stat().st_size / 1e3:7.0f}{size / 1e3:9.0f}"
    return f"{picture.stem:16}{width:6}{kilobytes}{statistics.median(milliseconds):9.0f}"


def main() -> None:
    """Photograph the pages and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/demo"))
    parser.add_argument("--site", type=Path, default=Path("build/docs"))
    parser.add_argument("--out", type=Path, default=Path("build/screenshots"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    browser = Browser()
    version = browser.driver.capabilities["browserVersion"]
    print(f"{date.today()}, Chromium {version}")
    print(f"{'page':16}{'width':>6}{'HTML KB':>9}{'all KB':>7}{'load ms':>9}")
    try:
        for name, width, dark in REPORT:
            path = (options.run / "report.html").resolve()
            print(photograph(browser, path, options.out / f"{name}.png", width, dark), flush=True)
        for name, page in SITE:
            path = (options.site / page).resolve()
            print(photograph(browser, path, options.out / f"{name}.png", 1280, False), flush=True)
    finally:
        browser.driver.quit()


if __name__ == "__main__":
    main()
