"""Serve the metrics of a run to Prometheus, in its text format 0.0.4.

The launcher of each node serves the node's metrics; that of the node that logs also serves the last
record of the run and counts its events, so that they can be read while ranks restart.  All are read
when Prometheus asks, and nothing is kept but the position in ``events.jsonl``.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import AF_INET, AF_INET6

from weft.config.files import describe_cause, parse_address
from weft.monitor.event_log import EventFollower
from weft.monitor.exported_metrics import Metric, export_record, export_sample
from weft.monitor.jsonl import read_tail
from weft.monitor.system_sampler import SystemSampler
from weft.version import __version__

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsPage:
    """The metrics of this node, and of the run.

    Args:
        run_dir: the run directory.
        has_run: True on the node that logs; other nodes serve their own metrics only.
    """

    def __init__(self, run_dir: Path, has_run: bool) -> None:
        self._run_dir, self._has_run = run_dir, has_run
        self._sampler = SystemSampler(run_dir)
        self._events, self._counts = EventFollower(run_dir, from_start=True), Counter[str]()
        self._lock = threading.Lock()

    def render(self) -> bytes:
        """Return the page."""
        with self._lock:
            return format_metrics(self._collect(), self._run_dir.name).encode()

    def _collect(self) -> Iterator[Metric]:
        yield Metric("weft_info", "Version of weft.", "1", [({"version": __version__}, 1.0)])
        if self._has_run:
            yield from export_record(read_tail(self._run_dir / "metrics.jsonl").last or {})
            self._counts.update(event["kind"] for event in self._events.read_new())
            counts = [({"kind": kind}, float(count)) for kind, count in self._counts.items()]
            yield Metric("weft_events_total", "Events of the run.", "1", counts, is_counter=True)
        yield from export_sample(self._sampler.sample())


def format_metrics(metrics: Iterable[Metric], run: str) -> str:
    """Return metrics in the text format; each point also has the label ``run``."""
    lines = []
    for metric in metrics:
        if not metric.points:
            continue
        lines.append(f"# HELP {metric.name} {_escape(metric.help)}")
        lines.append(f"# TYPE {metric.name} {'counter' if metric.is_counter else 'gauge'}")
        for labels, value in metric.points:
            pairs = [
                f'{name}="{_escape(text, quotes=True)}"'
                for name, text in ({"run": run} | dict(labels)).items()
            ]
            lines.append(f"{metric.name}{{{','.join(pairs)}}} {value!r}")
    return "".join(f"{line}\n" for line in lines)


def _escape(text: str, quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def make_handler(page: MetricsPage) -> type[BaseHTTPRequestHandler]:
    """Return the handler of requests for a page."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            text = page.render()
            with suppress(ConnectionError):  # the client has gone
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    return Handler


@contextmanager
def serve_metrics(
    address: str, run_dir: Path, has_run: bool, log: Callable[[str], object]
) -> Iterator[None]:
    """Serve metrics in a thread, while this context is open.

    Args:
        address: ``monitor.prometheus``.
        run_dir: the run directory.
        has_run: see `MetricsPage`.
        log: receives the URL, or a warning that nothing can be served.
    """
    parsed = parse_address(address)
    if parsed is None:
        yield
        return
    family = AF_INET6 if ":" in parsed[0] else AF_INET
    server_type = type("Server", (ThreadingHTTPServer,), {"address_family": family})
    try:
        server = server_type(parsed, make_handler(MetricsPage(run_dir, has_run)))
    except OSError as error:
        cause = describe_cause(error)
        log(f"warning: monitor.prometheus={address}: {cause}. Training continues without it")
        yield
        return
    host = parsed[0] if family == AF_INET else f"[{parsed[0]}]"
    log(f"metrics for Prometheus: http://{host}:{server.server_port}/metrics")
    with server:
        thread = threading.Thread(target=server.serve_forever, name="weft-prometheus", daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
