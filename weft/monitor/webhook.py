"""Post the events of a run to a webhook, such as that of a Slack channel.

A thread of the launcher follows ``events.jsonl``, so that also the death of a rank is posted.
Training and the end of the run never wait for the server, except `CLOSE_SECONDS` at the end.

The URL of a webhook is a secret.  ``monitor.webhook`` therefore names the environment variable that
has it, and no message contains it.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from weft.config.errors import ConfigError, InvalidConfig
from weft.config.files import describe_cause
from weft.monitor.event_log import EventFollower
from weft.monitor.jsonl import last_logged_step
from weft.monitor.log_buffer import LogBuffer

KINDS = {
    *("start", "anomaly", "divergence", "slow rank", "notice", "unhealthy node", "restart"),
    *("hang", "failure", "stop", "end"),
}
POLL_SECONDS = 1.0  # between reads of events.jsonl
TIMEOUT_SECONDS = 4.0  # of a request
CLOSE_SECONDS = 5.0  # for the last events
MAX_WAITING = 100  # events
MAX_TEXT = 2000  # characters of an event
RETRIED = {408, 425, 429, *range(500, 600)}  # HTTP statuses


def read_webhook_url(setting: str, environment: Mapping[str, str]) -> str:
    """Return the URL to which ``monitor.webhook`` refers; empty if it is off.

    Raises:
        InvalidConfig: if the variable is not set, or has no URL; the message does not show it.
    """
    if setting == "off":
        return ""
    name = setting.removeprefix("env:")
    url = environment.get(name, "").strip()
    rule = ""
    if not url:
        rule = "names an environment variable that is not set"
    elif not re.fullmatch(r"https?://[^\s/]+(/[!-~]*)?", url):
        rule = "names an environment variable that has no http or https URL"
    if rule:
        remedy = f"export {name} with the URL of the webhook, or use off"
        raise InvalidConfig([ConfigError("monitor.webhook", setting, rule, remedy)])
    return url


@contextmanager
def post_events(url: str, run_dir: Path, log: Callable[[str], object]) -> Iterator[None]:
    """Post the events that are added to a run while this context is open.

    An exception that ends the context is posted, too, unless it has an event.

    Args:
        url: of the webhook; empty: post nothing.
        run_dir: the run directory.
        log: receives a warning if an event cannot be posted.
    """
    if not url:
        yield
        return
    poster = EventPoster(url, run_dir, log)
    error: BaseException | None = None
    try:
        yield
    except BaseException as caught:
        error = caught
        raise
    finally:
        poster.close(error)


class EventPoster:
    """Thread that posts new events of a run; see `post_events`."""

    def __init__(self, url: str, run_dir: Path, log: Callable[[str], object]) -> None:
        self._url, self._run_dir, self._log = url, run_dir, log
        self._events = EventFollower(run_dir, from_start=False)
        self._buffer = LogBuffer[dict[str, Any]](
            "monitor.webhook", self._post, log, limit=MAX_WAITING
        )
        self._end, self._has_ended, self._is_late = threading.Event(), False, False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="weft-webhook", daemon=True)
        self._thread.start()

    def close(self, error: BaseException | None) -> None:
        """Post the last events, for at most `CLOSE_SECONDS`; ``error``: what ends the run."""
        self._error = error
        self._end.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._is_late = True
            self._buffer.discard(TimeoutError(f"posting takes longer than {CLOSE_SECONDS:g} s"))

    def _run(self) -> None:
        while not self._end.wait(POLL_SECONDS):
            self._read_events()
            self._buffer.flush()
        self._read_events()
        if self._error is not None and not self._has_ended:
            stops = not isinstance(self._error, Exception)  # SystemExit after a signal
            text = "stopped before the first step" if stops else str(self._error)
            step = last_logged_step(self._run_dir)
            self._add({"kind": "stop" if stops else "failure", "step": step, "text": text})
        while not (self._buffer.is_empty or self._is_late):
            self._buffer.flush(now=True)
            time.sleep(0 if self._buffer.is_empty else 0.5)

    def _read_events(self) -> None:
        for event in self._events.read_new():
            if event["kind"] in KINDS:
                self._add(event)

    def _add(self, event: Mapping[str, Any]) -> None:
        kind, step = event["kind"], event.get("step", 0)
        if kind == "start":
            self._has_ended = False
        self._has_ended |= kind in ("failure", "hang", "stop", "end")
        detail = str(event.get("text", ""))[:MAX_TEXT]
        text = f"weft {self._run_dir.name}: {kind} at step {step}: {detail}"
        for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):  # as Slack wants
            text = text.replace(character, entity)
        self._buffer.put(
            {
                "text": text,
                "event": kind,
                "run": self._run_dir.name,
                "run_dir": str(self._run_dir),
                "step": step,
                "time": event.get("time", time.time()),
                "detail": detail,
            }
        )

    def _post(self, message: dict[str, Any]) -> None:
        """Post a message; drop it if the server refuses it.

        Raises:
            ConnectionError: if another attempt may succeed; its text has no URL.
        """
        headers = {"Content-Type": "application/json"}
        request = Request(self._url, json.dumps(message).encode(), headers)
        try:
            with urlopen(request, timeout=TIMEOUT_SECONDS):
                pass
        except HTTPError as error:
            error.close()
            if error.code in RETRIED:
                raise ConnectionError(f"HTTP status {error.code}") from None
            self._log(f"warning: monitor.webhook refuses an event: HTTP status {error.code}")
        except OSError as error:
            reason = getattr(error, "reason", error)  # of a URLError
            cause = describe_cause(reason) if isinstance(reason, OSError) else "no connection"
            raise ConnectionError(cause) from None
        except (ValueError, HTTPException) as error:  # whose text may have the URL
            raise ConnectionError(f"no HTTP answer: {type(error).__name__}") from None
