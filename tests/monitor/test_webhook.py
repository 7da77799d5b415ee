"""Events of runs, posted to servers on loopback."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from weft.config.errors import InvalidConfig
from weft.config.reader import read_job
from weft.monitor import webhook
from weft.monitor.event_log import EventLog
from weft.monitor.webhook import post_events, read_webhook_url
from weft.planning.plan import Machine
from weft.planning.resolve import resolve

SECRET = "T0/B1/s3cr3t-Key"


class Receiver(ThreadingHTTPServer):
    """A server of webhooks.

    Attributes:
        statuses: of the next answers; then 200.
        delay: seconds before each answer.
        messages: what it has accepted.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.statuses: list[int] = []
        self.delay = 0.0
        self.messages: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/services/{SECRET}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def events(self) -> list[tuple[str, int]]:
        return [(message["event"], message["step"]) for message in self.messages]


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(self.server.delay)
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        if status == 200 and self.path.endswith(SECRET):
            assert self.headers["Content-Type"] == "application/json"
            self.server.messages.append(json.loads(body))
        self.send_response(status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver
        receiver.shutdown()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "POLL_SECONDS", 0.02)


def test_new_events_are_posted_as_a_slack_webhook_accepts_them(
    receiver: Receiver, tmp_path: Path
) -> None:
    events = EventLog(tmp_path, print)
    events.add("start", 0, "started on 2 ranks")  # by an earlier start
    with post_events(receiver.url, tmp_path, print):
        events.add("start", 3, "resumed from step 3 on 2 ranks")
        events.add("checkpoint", 4, "routine")
        events.add("anomaly", 4, "step 5: the loss <nan> & more")
        events.add("failure", 5, "rank 1 failed: ValueError: planted")
    assert receiver.events() == [("start", 3), ("anomaly", 4), ("failure", 5)]
    message = receiver.messages[1]
    text = f"weft {tmp_path.name}: anomaly at step 4: step 5: the loss &lt;nan&gt; &amp; more"
    assert message["text"] == text
    assert message["detail"] == "step 5: the loss <nan> & more"
    assert abs(message["time"] - time.time()) < 60


def test_exception_without_an_event_is_posted_and_one_with_an_event_once(
    receiver: Receiver, tmp_path: Path
) -> None:
    for error, kind in ((ValueError("no such data"), "failure"), (SystemExit(75), "stop")):
        with pytest.raises(type(error)), post_events(receiver.url, tmp_path, print):
            raise error
        assert receiver.messages.pop()["event"] == kind

    def fail() -> None:
        with post_events(receiver.url, tmp_path, print):
            EventLog(tmp_path, print).add("failure", 5, "rank 1 failed")
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    assert receiver.events() == [("failure", 5)]


def test_busy_server_gets_every_event_and_a_refusal_is_dropped(
    receiver: Receiver, tmp_path: Path
) -> None:
    """No message has the URL."""
    lines: list[str] = []
    receiver.statuses = [503, 429, 200, 404, 200]
    events = EventLog(tmp_path, print)
    with post_events(receiver.url, tmp_path, lines.append):
        events.add("anomaly", 1, "a")
        events.add("anomaly", 2, "refused")
        events.add("anomaly", 3, "b")
    assert receiver.events() == [("anomaly", 1), ("anomaly", 3)]
    assert any("ConnectionError: HTTP status 503" in line for line in lines)
    assert "warning: monitor.webhook refuses an event: HTTP status 404" in lines
    assert "s3cr3t" not in "".join(lines)


def test_dead_or_slow_server_delays_the_end_by_seconds_only(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "CLOSE_SECONDS", 0.5)
    lines: list[str] = []
    events = EventLog(tmp_path, print)
    receiver.delay = 2.0
    for url in (receiver.url, "http://127.0.0.1:9/s3cr3t", "http://localhost:x/s3cr3t"):
        began = time.monotonic()
        with post_events(url, tmp_path, lines.append):
            events.add("stop", 1, "a")
        assert time.monotonic() - began < 1.5
    text = "\n".join(lines)
    assert text.count("1 record is lost") == 3
    assert "connection refused" in text
    assert "s3cr3t" not in text


def test_webhook_url_is_read_from_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_webhook_url("off", {}) == ""
    url = f"https://hooks.slack.com/services/{SECRET}"
    assert read_webhook_url("env:HOOK", {"HOOK": f"{url}\n"}) == url
    for value in ("", f"ftp://a/{SECRET}", SECRET, f"https://a b/{SECRET}"):
        with pytest.raises(InvalidConfig) as caught:
            read_webhook_url("env:HOOK", {"HOOK": value})
        assert "Export HOOK with the URL of the webhook" in str(caught.value)
        assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize("value", [f"https://hooks.slack.com/{SECRET}", SECRET, f"env:{SECRET}"])
def test_webhook_url_in_a_job_is_refused_without_showing_it(value: str) -> None:
    job, _, errors = read_job("demo", [("monitor.webhook", value)])
    assert not errors
    with pytest.raises(InvalidConfig) as caught:
        resolve(job, Machine("cpu", 1))
    assert "s3cr3t" not in str(caught.value)
    assert "use env:WEFT_WEBHOOK, or off" in str(caught.value)
