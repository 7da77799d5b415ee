"""An AWS on loopback for tests: moto's server, which keeps the objects of many services in memory.

moto checks fewer rules than AWS, and its training jobs are complete at once.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.s3 import answers, die_with_parent, free_ports

MODULES = ("moto", "flask", "flask_cors")
REGION = "us-east-1"
START = "import sys; from moto.server import main; main(sys.argv[1:])"


def missing() -> list[str]:
    return [name for name in MODULES if importlib.util.find_spec(name) is None]


def variables(port: int) -> Mapping[str, str]:
    """Return the environment of AWS's clients for a server on this port."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": REGION,
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_MAX_ATTEMPTS": "1",
    }


@contextmanager
def moto_server() -> Iterator[int]:
    """Yield the port of a running server."""
    (port,) = free_ports(1)
    process = subprocess.Popen(
        [sys.executable, "-c", START, "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with_parent,
    )
    try:
        until = time.monotonic() + 120
        while not answers(port):
            assert process.poll() is None, "moto's server has ended"
            assert time.monotonic() < until, "moto's server does not start"
            time.sleep(0.2)
        yield port
    finally:
        process.kill()
        process.wait()
