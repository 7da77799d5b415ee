"""The report's server: loopback only, and a new page only if a file changed."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.reporting.test_run_report import Browser, browser, make_run, needs_browser, values
from weft.cli.main import main
from weft.reporting.page import text_part
from weft.reporting.report_server import HOST, PageCache, make_handler

__all__ = ["browser"]  # the fixture


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, PageCache, int]]:
    """Serve a run with two records; yield its directory, the cache and the port."""
    directory = make_run(tmp_path / "one", [values(1), values(2)])
    cache = PageCache([directory])
    with ThreadingHTTPServer((HOST, 0), make_handler(cache)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield directory, cache, server.server_address[1]
        server.shutdown()


def get(port: int, path: str = "/", **headers: str) -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection(HOST, port, timeout=20)
    connection.request("GET", path, headers={n.replace("_", "-"): v for n, v in headers.items()})
    response = connection.getresponse()
    return response.status, response.headers.get("ETag", ""), response.read()


def test_server_renders_again_only_if_a_file_changed(
    served: tuple[Path, PageCache, int],
) -> None:
    directory, cache, port = served
    status, version, page = get(port)
    assert status == 200
    assert b"2 of 100" in page
    assert b'http-equiv="refresh"' not in page
    assert b"connect-src 'self'" in page
    assert get(port, If_None_Match=version) == (304, version, b"")
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(values(3)) + "\n")
    status, newer, page = get(port, If_None_Match=version)
    assert (status, newer != version) == (200, True)
    assert b"3 of 100" in page
    cache.set_prediction(lambda runs: [{"heading": "Predicted", "parts": [text_part("soon")]}])
    assert b"<h2>Predicted</h2>" in get(port, If_None_Match=newer)[2]


def test_server_refuses_other_hosts_and_paths(served: tuple[Path, PageCache, int]) -> None:
    port = served[2]
    assert get(port, Host="example.com")[0] == 403
    assert get(port, Host=f"example.com:{port}")[0] == 403
    assert get(port, Host=f"localhost:{port}")[0] == 200
    assert get(port, "/metrics.jsonl")[0] == 404
    assert get(port, "/../../etc/passwd")[0] == 404


@needs_browser
def test_served_page_updates_in_place(
    browser: Browser, served: tuple[Path, PageCache, int]
) -> None:
    directory, _, port = served
    browser.driver.get(f"http://localhost:{port}/")
    browser.driver.get_log("browser")
    browser.run("window.mark = 1; setZoom([1, 1.5])")
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(values(3)) + "\n")
    browser.driver.execute_async_script("update().then(arguments[0])")
    assert browser.text("#fact-step") == "3 of 100"
    assert browser.curves("loss")["Loss"]["x"] == [1, 2, 3]
    assert browser.layout("loss")["x"] == [1, 1.5]  # the reader's zoom
    assert browser.run("return window.mark") == 1  # not reloaded
    assert [e for e in browser.driver.get_log("browser") if "favicon" not in e["message"]] == []


def test_serve_command_ends_by_ctrl_c(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "one", [values(1)])
    command = [sys.executable, "-m", "weft", "report", str(directory), "--serve", "--port", "0"]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        assert server.stdout is not None
        address = re.search(r":(\d+)/", server.stdout.readline())
        assert address is not None
        assert get(int(address[1]))[0] == 200
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0
        assert server.stderr is not None
        assert server.stderr.read() == ""
    finally:
        server.kill()
        server.communicate()


def test_serve_mistakes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = str(make_run(tmp_path / "one", [values(1)]))
    assert main(["report", directory, "--serve", "--out", "x.html", "--port", "70000"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("=")[0].split()[0] for line in lines[1:]] == ["--serve", "--port"]
    with ThreadingHTTPServer((HOST, 0), make_handler(PageCache([Path(directory)]))) as server:
        port = str(server.server_address[1])
        assert main(["report", directory, "--serve", "--port", port]) == 2
    assert "cannot be opened" in capsys.readouterr().err
