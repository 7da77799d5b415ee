"""Read the notices by which a cloud announces that it takes a node away.

A cloud announces the end of a spot node in the node's metadata service: AWS two minutes ahead,
Google and Azure 30 seconds.  One process of each node asks every `POLL_SECONDS`, in a thread, and
the run then stops as after SIGTERM.

The firmware of the node says which cloud it is, so weft sends nothing on other machines.  The
variables AWS_EC2_METADATA_DISABLED, AWS_EC2_METADATA_SERVICE_ENDPOINT and GCE_METADATA_HOST have
their usual effect.  Nothing here delays a start, and no failure of the service ends a run.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Literal, NamedTuple, Protocol
from urllib.parse import urlsplit

POLL_SECONDS = 5.0
TIMEOUT_SECONDS = 2.0  # of a request; the service is on the same host
MAX_ATTEMPTS = 3  # without any answer; then weft takes it that there is no service
MAX_BYTES = 1 << 20
FIRMWARE = Path("/sys/class/dmi/id")
LINK_LOCAL = "http://169.254.169.254"
AZURE_ASSET_TAG = "7783-7084-3265-9085-8269-3286-77"  # of each virtual machine of Azure


Action = Literal["stop", "plan", "log"]
# By the type of an event of Azure.  Freeze, a pause of seconds, is logged.
AZURE_ACTIONS: dict[object, Action] = {
    "Preempt": "stop",
    "Terminate": "stop",
    "Reboot": "plan",
    "Redeploy": "plan",
}


class Notice(NamedTuple):
    """A notice about this node.

    ``action``: stop: the node ends within minutes; plan: the node ends later, so a run that starts
    on it uses it until then; log: the node may stay.
    """

    text: str
    action: Action


class MetadataService(Protocol):
    """The metadata service of a cloud."""

    def read_notices(self) -> list[Notice]:
        """Return the present notices.

        Raises:
            OSError: if the service does not answer, or refuses.
            HTTPException: if the answer is not HTTP.
            ValueError: if the answer is not what the cloud documents.
        """


def send_request(
    endpoint: str, method: str, path: str, headers: Mapping[str, str]
) -> tuple[int, str]:
    """Send a request without a proxy; return the status and the text of the response."""
    parts = urlsplit(endpoint)
    connection = HTTPConnection(parts.hostname or "", parts.port or 80, timeout=TIMEOUT_SECONDS)
    try:
        connection.request(method, parts.path.rstrip("/") + path, headers=dict(headers))
        response = connection.getresponse()
        return response.status, response.read(MAX_BYTES).decode("utf-8")
    finally:
        connection.close()


def get_text(endpoint: str, path: str, headers: Mapping[str, str]) -> str | None:
    """Return the text at a path; None if there is none (status 404)."""
    status, text = send_request(endpoint, "GET", path, headers)
    if status == 404:
        return None
    if status != 200:
        raise OSError(f"GET {path}: HTTP status {status}")
    return text


def read_object(text: str) -> dict[str, object]:
    """Return the JSON object in a text."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object: {text[:100]}")
    return value


class AwsMetadata:
    """Instance metadata of EC2.

    It needs a token (IMDSv2).  The answer with the token does not reach a container if the hop
    limit of the instance is 1; then an instance that allows IMDSv1 answers without a token.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._token = ""

    def read_notices(self) -> list[Notice]:
        """Return the interruption of a spot instance, and a recommendation to leave it."""
        notices = []
        if text := self._get("/latest/meta-data/spot/instance-action"):
            event = read_object(text)
            text = f"AWS will {event.get('action')} this spot instance at {event.get('time')}"
            notices.append(Notice(text, "stop"))
        if text := self._get("/latest/meta-data/events/recommendations/rebalance"):
            time = read_object(text).get("noticeTime")
            text = f"AWS sees a higher risk that it interrupts this spot instance ({time})"
            notices.append(Notice(text, "log"))
        return notices

    def _get(self, path: str) -> str | None:
        if not self._token:
            self._token = self._fetch_token()
        headers = {"X-aws-ec2-metadata-token": self._token} if self._token else {}
        try:
            return get_text(self._endpoint, path, headers)
        except OSError:
            self._token = ""  # it may have expired
            raise

    def _fetch_token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
        try:
            status, token = send_request(self._endpoint, "PUT", "/latest/api/token", headers)
        except TimeoutError:
            return ""
        return token if status == 200 else ""


class GoogleMetadata:
    """Metadata of a virtual machine of Google Compute Engine."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def read_notices(self) -> list[Notice]:
        """Return the preemption of the machine, and a maintenance that ends it."""
        notices = []
        if self._get("preempted") == "TRUE":
            notices.append(Notice("Google preempts this virtual machine", "stop"))
        event = self._get("maintenance-event")
        if event not in (None, "NONE"):
            text = f"Google announces maintenance of this virtual machine: {event}"
            ends = event == "TERMINATE_ON_HOST_MAINTENANCE"  # an hour ahead with GPUs
            notices.append(Notice(text, "plan" if ends else "log"))
        return notices

    def _get(self, name: str) -> str | None:
        path = f"/computeMetadata/v1/instance/{name}"
        text = get_text(self._endpoint, path, {"Metadata-Flavor": "Google"})
        return None if text is None else text.strip()


class AzureMetadata:
    """Scheduled events of a virtual machine of Azure.

    The events are those of all machines of a scale set.
    """

    def __init__(self, endpoint: str = LINK_LOCAL) -> None:
        self._endpoint = endpoint
        self._name = ""

    def read_notices(self) -> list[Notice]:
        """Return the events that end or pause this machine."""
        self._name = self._name or self._get(
            "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        )
        text = self._get("/metadata/scheduledevents?api-version=2020-07-01")
        events = read_object(text).get("Events")
        if not isinstance(events, list):
            raise ValueError(f"no list of events: {text[:100]}")
        notices = []
        for event in events:
            kind, when = event.get("EventType"), event.get("NotBefore") or "once"
            if self._name in event.get("Resources", ()):
                text = f"Azure schedules {kind} of this virtual machine, not before {when}"
                notices.append(Notice(text, AZURE_ACTIONS.get(kind, "log")))
        return notices

    def _get(self, path: str) -> str:
        return get_text(self._endpoint, path, {"Metadata": "true"}) or ""


def find_metadata_service(
    environment: Mapping[str, str], firmware: Path = FIRMWARE
) -> MetadataService | None:
    """Return the metadata service of this node's cloud; None elsewhere.

    It sends nothing.

    Args:
        environment: environment variables.
        firmware: directory in which Linux shows the vendor of the machine.
    """

    def read(name: str) -> str:
        try:
            return (firmware / name).read_text("utf-8", errors="replace").strip()
        except OSError:
            return ""

    vendor = read("sys_vendor")
    aws = environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "")
    google = environment.get("GCE_METADATA_HOST", "")
    if aws or vendor == "Amazon EC2":
        if environment.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
            return None
        mode = environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE", "").lower()
        return AwsMetadata(aws or ("http://[fd00:ec2::254]" if mode == "ipv6" else LINK_LOCAL))
    if google or vendor == "Google":
        return GoogleMetadata(f"http://{google}" if google else LINK_LOCAL)
    if vendor == "Microsoft Corporation" and read("chassis_asset_tag") == AZURE_ASSET_TAG:
        return AzureMetadata()
    return None


@contextmanager
def watch_spot_notices(
    setting: Literal["auto", "off"],
    report: Callable[[str], object],
    request_stop: Callable[[str], object],
) -> Iterator[None]:
    """Ask for notices in a thread, while this context is open.

    Args:
        setting: ``resilience.spot_notice``.
        report: receives each new notice, in words.
        request_stop: receives the notice that stops the run; called at most once.
    """
    service = find_metadata_service(os.environ) if setting == "auto" else None
    if service is None:
        yield
        return
    is_over, lock = threading.Event(), threading.Lock()

    def stop(text: str) -> None:
        with lock:  # not after the end of the context
            if not is_over.is_set():
                request_stop(text)

    arguments = (service, is_over, report, stop)
    threading.Thread(target=poll, args=arguments, name="weft-notices", daemon=True).start()
    try:
        yield
    finally:
        with lock:
            is_over.set()


def poll(
    service: MetadataService,
    is_over: threading.Event,
    report: Callable[[str], object],
    request_stop: Callable[[str], object],
) -> None:
    """Ask for notices until one stops the run, or there is no service."""
    seen: set[Notice] = set()
    has_answered, failures = False, 0
    while True:
        try:
            notices = service.read_notices()
        except (OSError, HTTPException, ValueError):
            failures += 1
            if failures == MAX_ATTEMPTS and not has_answered:
                return
        else:
            for notice in notices:
                if notice in seen:
                    continue
                seen.add(notice)
                stops = notice.action == "stop" or (notice.action == "plan" and has_answered)
                if stops:
                    request_stop(notice.text)
                report(notice.text + (": the run saves and stops" if stops else ""))
                if stops:
                    return
            has_answered = True
        if is_over.wait(POLL_SECONDS):
            return
