"""Which nodes train: the launchers of a run meet, and notice who comes and who goes.

The meeting place is torch's c10d rendezvous: a small state in a store at HOST:PORT, in which every
launcher leaves a heartbeat and which it reads once a second.  torch's agent alone would notice a
lost node by its own ranks' broken collectives, which on some networks hang instead; and it would
give ranks 30 s to end when a node joins.  So `RendezvousHandler` watches for itself:

*A node of this round is gone*, or has ended its ranks: ours are killed, for they wait for its.
*A node has come* that can be used: ours get the stop signal, and all the time they need to finish
the step and save.
*The meeting place is gone*: ours get it, too, but are killed after a minute, for its host may have
had ranks that they wait for.

In each case the ranks end, the agent returns, and the one place that decides what is next
(`weft.cluster.launcher.launch`) has all nodes meet again.  A layout or a global batch does not work on
every number of nodes: the largest number that does trains, the other nodes stand by.

What is private in torch (the rendezvous' state and stores, and how to leave it) is used here only.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    C10dRendezvousBackend,
    create_backend,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    _Action,
)

from weft.config.errors import ConfigError, InvalidConfig, WeftError
from weft.parallel.private import create_tcp_store
from weft.train.environment import is_loopback

# A node without a heartbeat for so long is gone; clocks must agree better than that.
HEARTBEAT_SECONDS, MISSED_HEARTBEATS = 1, 6
# How long to wait for more once there are enough (all look once a second), and for enough.
LAST_CALL, JOIN = timedelta(seconds=3), timedelta(minutes=10)
# So long a launcher that has ended the run stays, that all others see it.
LINGER_SECONDS = 3.0
# What ranks have to save once the meeting place is gone.
GRACE_SECONDS = 60.0


class RendezvousHandler(DynamicRendezvousHandler):
    """A launcher among the others.  Made by `open_rendezvous`, which says what the attributes are."""

    counts: Sequence[int] = (1,)
    kill: Callable[[], object]
    save: Callable[[], object]
    say: Callable[[str], object]
    joining = False  # no ranks run, a stop has nothing to wait for
    nodes = 0  # that train in this round
    began = 0.0  # the round, in seconds since the epoch
    _told = False  # the ranks, to save and end
    _lost = 0.0  # since when the meeting place has been gone

    @property
    def several(self) -> bool:
        """Whether the run may have more than one node."""
        return self.counts[-1] > 1

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until this node is one of those that train."""
        self.joining = True
        while True:
            info = self._join()
            self.nodes = self._usable(info.world_size)
            if info.rank < self.nodes:
                break
            self.say(f"standing by: of {info.world_size} nodes {self.nodes} can be used")
            while not (self._gone() or self._come()):
                time.sleep(0.5)
                super().num_nodes_waiting()
        if self.several:
            self.say(f"{self.nodes} node{'s' * (self.nodes > 1)} train")
        self.joining, self.began, self._told = False, time.time(), False
        assert info.bootstrap_store_info is not None
        return RendezvousInfo(info.store, info.rank, self.nodes, info.bootstrap_store_info)

    def _join(self) -> RendezvousInfo:
        while not self._lost:
            # Each round has a new store, or its ranks would find the addresses of dead ones.
            self._bootstrap_store_info = self._shared_tcp_store_server = None
            try:
                return super().next_rendezvous()
            except RendezvousTimeoutError:
                if not self._state_holder.state.complete:
                    raise
                # The others train without us: wait on.
        raise RendezvousConnectionError

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> Any:
        """Serve the store of the ranks in this process, so that nobody else can take its port."""
        return create_tcp_store(master_addr, master_port, True)

    def num_nodes_waiting(self) -> int:
        """Called some times a second while ranks run; what is to be done is done here."""
        if not self.several:
            return 0  # nor does a laptop that sleeps lose its ranks
        if not self._lost:
            try:
                super().num_nodes_waiting()
            except RendezvousConnectionError:
                self._stop_heartbeats()
                self._lost = time.monotonic()
        overdue = self._lost and time.monotonic() > self._lost + GRACE_SECONDS
        if overdue or (self._gone() and not self._lost):
            self.kill()
        elif (self._lost or self._come()) and not self._told:
            self._told = True
            self.save()
        return 0

    def _usable(self, nodes: int) -> int:
        return max(count for count in self.counts if count <= nodes)

    def _gone(self) -> bool:
        """Whether a node of this round has left, or the whole run has ended."""
        state = self._state_holder.state
        there = sum(rank < self.nodes for rank in state.participants.values())
        return state.closed or there < self.nodes

    def _come(self) -> bool:
        """Whether more nodes could train than do."""
        state = self._state_holder.state
        return self._usable(len(state.participants) + len(state.wait_list)) > self.nodes

    def end(self, verdict: Mapping[str, Any] | None) -> None:
        """End the run on all nodes; ``verdict``: why it failed, None if it did not."""
        with suppress(Exception):  # nobody may be left to be told
            self._store.set(f"{self.get_run_id()}/verdict", json.dumps(verdict))
            self.shutdown()
        if self.several:
            time.sleep(LINGER_SECONDS)

    def verdict(self) -> dict[str, Any] | None:
        """What another node gave `end`."""
        found: dict[str, Any] | None = json.loads(self._store.get(f"{self.get_run_id()}/verdict"))
        return found

    def leave(self) -> None:
        """This node goes: the others need not wait until they miss its heartbeat."""

        def step_out(context: Any, deadline: float) -> _Action:
            for group, action in (
                (context.state.participants, _Action.REMOVE_FROM_PARTICIPANTS),
                (context.state.wait_list, _Action.REMOVE_FROM_WAIT_LIST),
                (context.state.redundancy_list, _Action.REMOVE_FROM_REDUNDANCY_LIST),
            ):
                if context.node in group:
                    return action
            return _Action.FINISH

        self._stop_heartbeats()
        if self._lost:
            return
        with suppress(RendezvousError):
            self._op_executor.run(step_out, time.monotonic() + 5)


def open_rendezvous(
    endpoint: str,
    run: str,
    counts: Sequence[int],
    same: Mapping[str, Any],
    *,
    kill: Callable[[], object],
    save: Callable[[], object],
    say: Callable[[str], object],
) -> RendezvousHandler:
    """Find the meeting place of a run, or be it, if ``endpoint`` is a name of this host.

    Args:
        endpoint: HOST or HOST:PORT; port 0 is a free one.
        run: a name that tells runs at the same endpoint apart.
        counts: the numbers of nodes that can train, ascending.
        same: what must be the same on all nodes, as JSON values.
        kill: called when the ranks of this node cannot go on.
        save: called when they should save and end.
        say: told what people may want to know.

    Raises:
        WeftError: if nobody answers.
        InvalidConfig: if the nodes that are there have something else in ``same``.
    """
    local = "localhost" if is_loopback(endpoint) else None
    if counts[-1] == 1:
        store = create_tcp_store("127.0.0.1", 0, True)
    else:
        store = find_store(endpoint, run, counts, JOIN.total_seconds())
    store.set_timeout(timedelta(seconds=60))
    number = 0
    while True:
        name = f"{run}/{number}"
        meeting: RendezvousHandler = RendezvousHandler.from_backend(
            name,
            store,
            C10dRendezvousBackend(store, name),
            counts[0],
            counts[-1],
            local,
            RendezvousTimeout(join=JOIN, last_call=LAST_CALL),
            keep_alive_interval=HEARTBEAT_SECONDS,
            keep_alive_max_attempt=MISSED_HEARTBEATS,
        )
        if not meeting.is_closed():
            break
        number += 1  # an earlier life of this run, at a place that has survived it
    meeting.counts, meeting.kill, meeting.save, meeting.say = counts, kill, save, say
    ours = json.loads(json.dumps(same, default=str))
    theirs = json.loads(store.compare_set(f"{name}/same", "", json.dumps(ours)))
    if ours != theirs:
        remedy = "give the same command on every node, or let this run meet elsewhere"
        raise InvalidConfig(
            ConfigError(key, value, f"on the nodes that are there it is {theirs.get(key)}", remedy)
            for key, value in ours.items()
            if value != theirs.get(key)
        )
    return meeting


def find_store(endpoint: str, run: str, counts: Sequence[int], seconds: float) -> Any:
    """The store of torch's c10d rendezvous at a meeting place, which is made if that is here.

    Args:
        endpoint, run, counts: see `open_rendezvous`.
        seconds: how long to try.

    Raises:
        WeftError: if nobody answers.
    """
    deadline = time.monotonic() + seconds
    serve: bool | None = None  # torch is to find out
    while True:
        parameters = RendezvousParameters(
            "c10d", endpoint, run, counts[0], counts[-1], read_timeout=10, is_host=serve
        )
        try:
            return create_backend(parameters)[1]
        except RendezvousConnectionError as error:
            # torch compares with this host's own name, which says nothing of a second interface.
            serve = True if serve is None and is_here(endpoint) else None
            if time.monotonic() > deadline:
                rule = f"nobody has answered there for {timedelta(seconds=seconds)}"
                raise WeftError(f"run.rendezvous = {endpoint}: {rule}") from error


def is_here(endpoint: str) -> bool:
    """Whether the host of HOST or HOST:PORT is this one: nobody can listen at another's address."""
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
