"""Serve the report of runs on the loopback interface, with live updates.

The page asks every few seconds for a newer version; the server renders again only if a file of a
run changed.  The planner's predictions take seconds, so a thread adds them when they are ready.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from weft.config.errors import ConfigError, InvalidConfig, WeftError
from weft.records.run_reader import RunReader
from weft.reporting.page import Section, render_page
from weft.reporting.run_report import PREDICTION_NOTE, run_page

HOST = "127.0.0.1"
FILES = ("metrics.jsonl", "events.jsonl", "system.jsonl", "statistics.jsonl", "job.toml")
LOOPBACK_NAMES = {"127.0.0.1", "localhost", "[::1]"}

Predict = Callable[[Sequence[RunReader]], list[Section]]


class PageCache:
    """The newest page of runs, which is rendered if their files changed.

    Args:
        run_dirs: run directories.
    """

    def __init__(self, run_dirs: Sequence[Path]) -> None:
        self._runs = [RunReader(run_dir) for run_dir in run_dirs]
        self._lock = threading.Lock()
        self._predict: Predict | None = None
        self._version, self._page = "", b""

    def set_prediction(self, predict: Predict) -> None:
        """Add sections with predictions to the later pages."""
        self._predict = predict

    def read(self, known: str = "") -> tuple[str, bytes]:
        """Return the newest version and its page; no page if ``known`` is it.

        Raises:
            WeftError: if the files of a run cannot be read.
        """
        with self._lock:
            version = self._find_version()
            if version != self._version:
                for run in self._runs:
                    run.read_new_records()
                sections = self._predict(self._runs) if self._predict else [PREDICTION_NOTE]
                page = run_page(self._runs, "", [], sections, None)
                self._page, self._version = render_page(page | {"version": version}), version
            return self._version, b"" if known == self._version else self._page

    def _find_version(self) -> str:
        """Return what changes with the files and the state of the runs."""
        marks: list[object] = [self._predict is not None]
        for run in self._runs:
            marks.append(run.state(time.time()))  # silence changes it, too
            for name in FILES:
                path = run.run_dir / name
                if path.exists():
                    status = path.stat()
                    marks += [status.st_size, status.st_mtime_ns]
        return f"{hash(tuple(marks)) & (1 << 63) - 1:x}"


def make_handler(cache: PageCache) -> type[BaseHTTPRequestHandler]:
    """Return the handler of requests for the page of a cache."""

    class Handler(BaseHTTPRequestHandler):
        """GET / with ``If-None-Match``: the page, or 304 if it is the newest."""

        def do_GET(self) -> None:  # http.server's name
            # Another site's name for this address must not read the report.
            if re.sub(r":\d+$", "", self.headers.get("Host", "")) not in LOOPBACK_NAMES:
                self.send_error(HTTPStatus.FORBIDDEN, "open the page as localhost")
            elif self.path != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
            else:
                self._send_page()

        def _send_page(self) -> None:
            try:
                version, page = cache.read(self.headers.get("If-None-Match", ""))
            except WeftError as error:  # a run was moved or damaged
                self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, explain=str(error))
                return
            self.send_response(HTTPStatus.OK if page else HTTPStatus.NOT_MODIFIED)
            self.send_header("ETag", version)
            self.send_header("Cache-Control", "no-store")
            if page:
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            with suppress(ConnectionError):  # the reader closed the page
                self.wfile.write(page)

        def log_message(self, *words: object) -> None:
            """Print nothing for a request."""

    return Handler


def serve(run_dirs: Sequence[Path], port: int, log: Callable[[str], object]) -> None:
    """Serve the report until Ctrl-C.

    Args:
        run_dirs: run directories.
        port: of the loopback interface; 0: any free one.
        log: receives the address of the page.

    Raises:
        InvalidConfig: if the port is in use.
    """
    cache = PageCache(run_dirs)
    try:
        server = ThreadingHTTPServer((HOST, port), make_handler(cache))
    except OSError as error:
        rule = f"cannot be opened: {(error.strerror or 'unknown error').lower()}"
        raise InvalidConfig(
            [ConfigError("--port", port, rule, "use another port, or 0")]
        ) from error
    with server:
        log(f"http://localhost:{server.server_address[1]}/  (Ctrl-C ends it)")
        threading.Thread(target=add_prediction, args=(cache, run_dirs), daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def add_prediction(cache: PageCache, run_dirs: Sequence[Path]) -> None:
    """Predict runs once, and add the predictions to their page."""
    from weft.reporting.report_sections import forecast_run, prediction_sections

    forecasts = [forecast_run(RunReader(run_dir)) for run_dir in run_dirs]

    def predict(runs: Sequence[RunReader]) -> list[Section]:
        fresh = [replace(old, run=run) for run, old in zip(runs, forecasts, strict=True)]
        return prediction_sections(runs, fresh)

    cache.set_prediction(predict)
