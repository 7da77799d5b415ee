"""Store at the rendezvous endpoint of a run, which its nodes share."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

from weft.config.errors import ConfigError, InvalidConfig


def connect_store(endpoint: str, run_id: str, node_counts: Sequence[int], seconds: float) -> Any:
    """Return the store of the rendezvous; create it if the endpoint is on this host.

    The arguments are those of `open_rendezvous`; ``seconds``: how long to try.

    Raises:
        WeftError: if no host answers.
    """
    deadline = time.monotonic() + seconds
    is_host: bool | None = None  # torch decides
    while True:
        parameters = RendezvousParameters(
            "c10d",
            endpoint,
            run_id,
            node_counts[0],
            node_counts[-1],
            read_timeout=10,
            is_host=is_host,
        )
        try:
            return create_backend(parameters)[1]
        except RendezvousConnectionError as error:
            # torch only compares host names, and so misses a second network interface.
            is_host = True if is_host is None and is_local_endpoint(endpoint) else None
            if time.monotonic() > deadline:
                rule = f"has not answered for {timedelta(seconds=seconds)}"
                remedy = "start the first node, and open its port in the firewall"
                raise InvalidConfig(
                    [ConfigError("run.rendezvous", endpoint, rule, remedy)]
                ) from error


def is_local_endpoint(endpoint: str) -> bool:
    """Return True if this host can bind to HOST of HOST or HOST:PORT."""
    host, colon, port = endpoint.rpartition(":")
    name = host if colon and port.isdecimal() else endpoint
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            name, 0, type=socket.SOCK_STREAM
        ):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
    return False
