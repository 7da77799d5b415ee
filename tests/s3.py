"""A real S3 server for tests: Ceph's RADOS Gateway with one disk, on loopback, in some 20 seconds.

Every daemon is a child of the test process that dies with it, and all their files are in one
temporary directory.  A proxy in front of the gateway counts requests and bytes, and injects errors.

On Debian: apt install radosgw ceph-mon ceph-osd ceph-mgr ceph-common
"""

from __future__ import annotations

import http.client
import http.server
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.harness import ctypes

PROGRAMS = ("radosgw", "radosgw-admin", "ceph", "ceph-mon", "ceph-osd", "ceph-mgr", "monmaptool")
KEY, SECRET = "weft-test-key", "weft-test-secret-7c1f"

SETTINGS = """\
[global]
fsid = {fsid}
mon initial members = a
mon host = [v2:127.0.0.1:{mon2},v1:127.0.0.1:{mon1}]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd crush chooseleaf type = 0
mon allow pool size one = true
mon warn on pool no redundancy = false
bluestore block size = 4294967296
osd memory target = 939524096
run dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
mon data = {folder}/mon
mgr data = {folder}/mgr
osd data = {folder}/osd
rgw data = {folder}/rgw
keyring = {folder}/keyring
[client.rgw.r]
rgw frontends = beast endpoint=127.0.0.1:{http}
"""

MAY = {
    "mon.": ["mon", "allow *"],
    "client.admin": ["mon", "allow *", "osd", "allow *", "mgr", "allow *"],
    "mgr.x": ["mon", "allow profile mgr", "osd", "allow *"],
    "osd.0": ["mon", "allow profile osd", "osd", "allow *", "mgr", "allow profile osd"],
    "client.rgw.r": ["mon", "allow rwx", "osd", "allow rwx", "mgr", "allow rw"],
}


def missing() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name) is None]


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for item in sockets:
        item.bind(("127.0.0.1", 0))
    ports = [socket.getsockname()[1] for socket in sockets]
    for item in sockets:
        item.close()
    return ports


def variables(port: int) -> dict[str, str]:
    """Return the environment of S3 clients for a gateway, or a proxy, on this port."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@contextmanager
def server() -> Iterator[int]:
    """Yield the port of a running gateway whose user has the keys above."""
    directory = Path(tempfile.mkdtemp(prefix="weft-s3-", dir="/tmp"))  # short: sockets lie in it
    mon1, mon2, port = free_ports(3)
    settings = directory / "ceph.conf"
    settings.write_text(
        SETTINGS.format(fsid=uuid.uuid4(), folder=directory, mon1=mon1, mon2=mon2, http=port)
    )
    environment = os.environ | {"CEPH_CONF": str(settings), "CEPH_ARGS": f"-c {settings}"}
    daemons: list[subprocess.Popen[bytes]] = []

    def run(*command: str) -> None:
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)

    def start_daemon(*command: str) -> None:
        with (directory / f"{command[0]}.out").open("wb") as out:
            daemons.append(
                subprocess.Popen(
                    [*command, "-f"],
                    env=environment,
                    stdout=out,
                    stderr=out,
                    preexec_fn=die_with_parent,
                )
            )

    try:
        for name in ("mon", "mgr", "osd", "rgw"):
            (directory / name).mkdir()
        keyring = str(directory / "keyring")
        run("ceph-authtool", "--create-keyring", keyring)
        for name, caps in MAY.items():
            pairs = [
                word for k, v in zip(caps[::2], caps[1::2], strict=True) for word in ("--cap", k, v)
            ]
            run("ceph-authtool", keyring, "--gen-key", "-n", name, *pairs)
        address = f"[v2:127.0.0.1:{mon2},v1:127.0.0.1:{mon1}]"
        fsid = settings.read_text().split("fsid = ")[1].split()[0]
        run("monmaptool", "--create", "--addv", "a", address, "--fsid", fsid, f"{directory}/map")
        run("ceph-mon", "-i", "a", "--mkfs", "--monmap", f"{directory}/map", "--keyring", keyring)
        start_daemon("ceph-mon", "-i", "a")
        start_daemon("ceph-mgr", "-i", "x")
        disk = str(uuid.uuid4())
        run("ceph", "osd", "new", disk)
        run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
        start_daemon("ceph-osd", "-i", "0")
        start_daemon("radosgw", "-n", "client.rgw.r")
        until = time.monotonic() + 90
        while not answers(port):
            assert time.monotonic() < until, "the gateway does not start"
            time.sleep(0.3)
        keys = ("--access-key", KEY, "--secret-key", SECRET)
        run("radosgw-admin", "user", "create", "--uid=t", "--display-name=t", *keys)
        yield port
    finally:
        for daemon in reversed(daemons):
            daemon.kill()
            daemon.wait()
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def any_server() -> Iterator[int]:
    """Yield the port of a gateway, or of moto's server where Ceph is not installed."""
    if not missing():
        with server() as port:
            yield port
        return
    from tests.aws import moto_server  # which imports this module

    with moto_server() as port:
        yield port


def answers(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
        connection.request("GET", "/")
        return connection.getresponse().status == 200
    except OSError:
        return False


class RandomFaults:
    """Answer about a share of the requests with 503, and cut the connection of others.

    It is a ``spoil`` of `Proxy`.

    Attributes:
        refused, cut: the numbers of requests so far.
    """

    def __init__(self, share_refused: float, share_cut: float = 0.0, seed: int = 0) -> None:
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._shares = share_refused, share_cut
        self.refused = self.cut = 0

    def __call__(self, method: str, path: str, number: int) -> int | None:
        with self._lock:
            draw = self._random.random()
            if draw < self._shares[0]:
                self.refused += 1
                return 503
            if draw < sum(self._shares):
                self.cut += 1
                return 0
        return None


class Proxy:
    """Count the traffic between client and server, and let ``spoil`` inject errors.

    ``spoil(method, path, number)`` returns a status to answer with, 0 to cut the connection, or
    None to pass the request on.
    """

    def __init__(self, port: int, latency_seconds: float = 0.0) -> None:
        self.latency_seconds = latency_seconds  # of each request
        self.dropped_headers: set[str] = set()  # names in lower case, of requests
        self.bytes_by_path: Counter[str] = Counter()  # of answers to GET, without the query
        # Bytes of shards, bytes of everything, and the number of requests.
        self.fetched_bytes = self.all_bytes = self.requests = 0
        self.spoil: Callable[[str, str, int], int | None] = lambda method, path, number: None
        lock = threading.Lock()
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                with lock:
                    proxy.requests += 1
                    number = proxy.requests
                time.sleep(proxy.latency_seconds)
                answer = proxy.spoil(self.command, self.path, number)
                if answer == 0:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                if answer is not None:
                    self.send_response(answer)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                server = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                headers = {
                    name: value
                    for name, value in self.headers.items()
                    if name.lower() not in proxy.dropped_headers
                }
                server.request(self.command, self.path, body, headers)
                reply = server.getresponse()
                content = reply.read()
                with lock:
                    if self.command == "GET":
                        proxy.all_bytes += len(content)
                        proxy.bytes_by_path[self.path.partition("?")[0]] += len(content)
                        proxy.fetched_bytes += len(content) * ("shard-" in self.path)
                self.send_response(reply.status)
                for name, value in reply.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                length = reply.getheader("Content-Length") if self.command == "HEAD" else None
                self.send_header("Content-Length", length or str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)
                server.close()

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Quiet(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128  # with 5, some of many connections wait a second for a repeat

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # the client has disconnected

        self.server = Quiet(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
