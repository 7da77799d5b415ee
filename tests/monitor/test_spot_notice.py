"""Notices of clouds, read from servers that answer as their metadata services."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from weft.monitor import spot_notice
from weft.monitor.spot_notice import (
    AZURE_ASSET_TAG,
    AwsMetadata,
    AzureMetadata,
    GoogleMetadata,
    find_metadata_service,
    watch_spot_notices,
)

INTERRUPTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
TERMINATE = '{"action": "terminate", "time": "2026-11-29T08:22:00Z"}'


class FakeMetadata(ThreadingHTTPServer):
    """A metadata service on loopback.

    Attributes:
        texts: answers by path, which tests change; others give 404.
        headers: header that a request must have, and its value; else the answer is 401.
        requests: methods and paths so far.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.texts: dict[str, str] = {}
        self.header: tuple[str, str] | None = None
        self.requests: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    server: FakeMetadata

    def do_PUT(self) -> None:
        lifetime = self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        known = self.path == "/latest/api/token" and 1 <= int(lifetime) <= 21600
        header = self.server.header
        self.answer(200 if known and header else 403, header[1] if header else "")

    def do_GET(self) -> None:
        header = self.server.header
        if header is not None and self.headers[header[0]] != header[1]:
            self.answer(401, "")
        elif self.path in self.server.texts:
            self.answer(200, self.server.texts[self.path])
        else:
            self.answer(404, "<html>not found</html>")

    def answer(self, status: int, text: str) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[FakeMetadata]:
    with FakeMetadata() as server:
        yield server
        server.shutdown()


def test_aws_notices_need_a_token_and_an_expired_one_is_replaced(server: FakeMetadata) -> None:
    server.header = ("X-aws-ec2-metadata-token", "first")
    service = AwsMetadata(server.url)
    assert service.read_notices() == []
    server.texts = {INTERRUPTION: TERMINATE, REBALANCE: '{"noticeTime": "2026-11-29T08:16:00Z"}'}
    server.header = ("X-aws-ec2-metadata-token", "second")
    with pytest.raises(OSError, match="401"):
        service.read_notices()
    assert service.read_notices() == [
        ("AWS will terminate this spot instance at 2026-11-29T08:22:00Z", "stop"),
        (
            "AWS sees a higher risk that it interrupts this spot instance (2026-11-29T08:16:00Z)",
            "log",
        ),
    ]
    assert server.requests.count("PUT /latest/api/token") == 2


def test_aws_notices_of_an_instance_without_tokens(server: FakeMetadata) -> None:
    server.texts = {INTERRUPTION: TERMINATE}
    ((_, action),) = AwsMetadata(server.url).read_notices()
    assert action == "stop"


@pytest.mark.parametrize(
    ("preempted", "event", "actions"),
    [
        ("FALSE", "NONE", []),
        ("TRUE", "NONE", ["stop"]),
        ("FALSE", "TERMINATE_ON_HOST_MAINTENANCE", ["plan"]),
        ("FALSE", "MIGRATE_ON_HOST_MAINTENANCE", ["log"]),
    ],
)
def test_google_notices(
    server: FakeMetadata, preempted: str, event: str, actions: list[str]
) -> None:
    server.header = ("Metadata-Flavor", "Google")
    path = "/computeMetadata/v1/instance"
    server.texts = {f"{path}/preempted": preempted, f"{path}/maintenance-event": event}
    assert [notice.action for notice in GoogleMetadata(server.url).read_notices()] == actions


def test_azure_notices_are_those_of_this_machine(server: FakeMetadata) -> None:
    events = [
        {"EventType": kind, "Resources": resources, "NotBefore": "Mon, 19 Sep 2026 18:29:47 GMT"}
        for kind, resources in (
            ("Preempt", ["other"]),
            ("Preempt", ["other", "mine"]),
            ("Redeploy", ["mine"]),
            ("Freeze", ["mine"]),
        )
    ]
    server.header = ("Metadata", "true")
    server.texts = {
        "/metadata/instance/compute/name?api-version=2021-02-01&format=text": "mine",
        "/metadata/scheduledevents?api-version=2020-07-01": json.dumps({"Events": events}),
    }
    notices = AzureMetadata(server.url).read_notices()
    assert [notice.action for notice in notices] == ["stop", "plan", "log"]


def test_metadata_service_follows_from_firmware_and_variables(tmp_path: Path) -> None:
    """Without a cloud there is no service, so nothing is sent."""

    def find(vendor: str, **environment: str) -> str:
        (tmp_path / "sys_vendor").write_text(f"{vendor}\n")
        return type(find_metadata_service(environment, tmp_path)).__name__

    assert find_metadata_service({}, tmp_path / "none") is None
    assert find("Dell Inc.") == "NoneType"
    assert find("Amazon EC2") == "AwsMetadata"
    assert find("Amazon EC2", AWS_EC2_METADATA_DISABLED="True") == "NoneType"
    assert find("Dell Inc.", AWS_EC2_METADATA_SERVICE_ENDPOINT="http://a") == "AwsMetadata"
    assert find("Google") == "GoogleMetadata"
    assert find("Dell Inc.", GCE_METADATA_HOST="a:80") == "GoogleMetadata"
    assert find("Microsoft Corporation") == "NoneType"  # any Hyper-V
    (tmp_path / "chassis_asset_tag").write_text(f"{AZURE_ASSET_TAG}\n")
    assert find("Microsoft Corporation") == "AzureMetadata"


class Watched:
    """What a watch reports and requests."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.stops: list[str] = []

    def wait(self, condition: str) -> None:
        deadline = time.monotonic() + 10
        while not getattr(self, condition):
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def watched(server: FakeMetadata, monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
    monkeypatch.setattr(spot_notice, "POLL_SECONDS", 0.02)
    return Watched()


def watch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "weft-notices"]


def test_watch_stops_once_on_a_new_maintenance_and_not_on_an_old_one(
    server: FakeMetadata, watched: Watched
) -> None:
    """Otherwise a run that restarts on the same node would stop again and again."""
    event, preempted = (
        f"/computeMetadata/v1/instance/{name}" for name in ("maintenance-event", "preempted")
    )
    server.texts = {event: "TERMINATE_ON_HOST_MAINTENANCE", preempted: "FALSE"}
    with watch_spot_notices("auto", watched.texts.append, watched.stops.append):
        watched.wait("texts")
        time.sleep(0.1)
        assert watched.stops == []
        assert len(watched.texts) == 1
        server.texts[preempted] = "TRUE"
        watched.wait("stops")
    assert watched.stops == ["Google preempts this virtual machine"]
    assert watched.texts[1:] == ["Google preempts this virtual machine: the run saves and stops"]
    server.texts = {event: "NONE", preempted: "FALSE"}
    before = len(server.requests)
    watched.stops.clear()
    with watch_spot_notices("auto", watched.texts.append, watched.stops.append):
        while len(server.requests) < before + 4:
            time.sleep(0.01)
        server.texts[event] = "TERMINATE_ON_HOST_MAINTENANCE"
        watched.wait("stops")


def test_watch_ends_silently_without_a_service(
    server: FakeMetadata, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.shutdown()
    server.server_close()
    began = time.monotonic()
    with watch_spot_notices("auto", watched.texts.append, watched.stops.append):
        assert time.monotonic() - began < 1
        deadline = time.monotonic() + 20
        while watch_threads():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert watched.texts == watched.stops == []
    with watch_spot_notices("off", watched.texts.append, watched.stops.append):
        assert not watch_threads()


def test_watch_survives_failures_after_an_answer(server: FakeMetadata, watched: Watched) -> None:
    event, preempted = (
        f"/computeMetadata/v1/instance/{name}" for name in ("maintenance-event", "preempted")
    )
    server.texts = {event: "NONE", preempted: "FALSE"}
    with watch_spot_notices("auto", watched.texts.append, watched.stops.append):
        while len(server.requests) < 2:
            time.sleep(0.01)
        server.header = ("Metadata-Flavor", "nobody")  # the service refuses for a while
        before = len(server.requests)
        while len(server.requests) < before + 8:
            time.sleep(0.01)
        server.header, server.texts[preempted] = None, "TRUE"
        watched.wait("stops")
