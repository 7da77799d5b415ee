"""Elastic rendezvous: decide which nodes train, and detect lost and new nodes.

The rendezvous is torch's c10d rendezvous: a small state in a store at HOST:PORT.  Every launcher
writes a heartbeat there and reads the state once a second.  torch's agent alone would detect a lost
node only by broken collectives, which hang on some networks; and it would give the ranks only 30 s
to end when a node joins.  `RendezvousHandler` therefore handles these events:

*A node of this round is lost*, or its ranks ended: kill our ranks, because they wait for its ranks.
*A usable node joined*: send our ranks the stop signal, with unlimited time to finish the step and
save.
*The endpoint is lost*: send the stop signal, and kill our ranks after a minute, because the host of
the endpoint may have had ranks that they wait for.

In each case the ranks end, the agent returns, and `weft.supervision.launcher.launch` starts the
next rendezvous.  A layout or a global batch size does not fit every number of nodes: the largest
number that fits trains, and the other nodes stand by.

Only this module uses private parts of torch's rendezvous (its state, its stores, how to leave it).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    C10dRendezvousBackend,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    _Action,
)

from weft.config.errors import ConfigError, InvalidConfig
from weft.parallel.private import create_tcp_store
from weft.preparation.environment import is_loopback
from weft.preparation.rendezvous_store import connect_store

# A node without a heartbeat for this long is lost; clocks must agree more closely.
HEARTBEAT_SECONDS, MISSED_HEARTBEATS = 1, 6
# Wait for additional nodes once there are enough, and wait for enough nodes.
LAST_CALL_TIMEOUT, JOIN_TIMEOUT = timedelta(seconds=3), timedelta(minutes=10)
# A launcher that ended the run stays this long, so that all other launchers see the end.
LINGER_SECONDS = 3.0
# Time for the ranks to save after the endpoint is lost.
GRACE_SECONDS = 60.0


class RendezvousHandler(DynamicRendezvousHandler):
    """Rendezvous of one launcher with the others; `open_rendezvous` creates it.

    Attributes:
        node_counts, kill_ranks, stop_ranks, log: see `open_rendezvous`.
        is_joining: no ranks are running, so a stop need not wait for them.
        num_nodes: nodes that train in this round.
        start_time: start of the round, in seconds since the epoch.
    """

    node_counts: Sequence[int] = (1,)
    kill_ranks: Callable[[], object]
    stop_ranks: Callable[[], object]
    log: Callable[[str], object]
    is_joining = False
    num_nodes = 0
    start_time = 0.0
    _stop_requested = False
    _lost_since = 0.0  # monotonic time at which the endpoint was lost; 0: it is not

    @property
    def is_multi_node(self) -> bool:
        """True if the run may have more than one node."""
        return self.node_counts[-1] > 1

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until this node is one of those that train."""
        self.is_joining = True
        while True:
            info = self._join()
            self.num_nodes = self._max_usable(info.world_size)
            if info.rank < self.num_nodes:
                break
            self.log(
                f"this node stands by: the run can use {self.num_nodes} of {info.world_size} nodes"
            )
            while not (self._has_lost_node() or self._has_usable_node()):
                time.sleep(0.5)
                super().num_nodes_waiting()
        if self.is_multi_node:
            self.log(f"training on {self.num_nodes} node{'s' * (self.num_nodes > 1)}")
        self.is_joining, self.start_time, self._stop_requested = False, time.time(), False
        assert info.bootstrap_store_info is not None
        return RendezvousInfo(info.store, info.rank, self.num_nodes, info.bootstrap_store_info)

    def _join(self) -> RendezvousInfo:
        while not self._lost_since:
            # Each round has a new store, or its ranks would find the addresses of dead ones.
            self._bootstrap_store_info = self._shared_tcp_store_server = None
            try:
                return super().next_rendezvous()
            except RendezvousTimeoutError:
                if not self._state_holder.state.complete:
                    raise
                # The other nodes train without this one: keep waiting.
        raise RendezvousConnectionError

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> Any:
        """Serve the ranks' store in this process, so that no other process takes its port."""
        return create_tcp_store(master_addr, master_port, True)

    def num_nodes_waiting(self) -> int:
        """Handle lost and new nodes; torch's agent calls this several times a second.

        Returns 0, so that the agent itself does not react.
        """
        if not self.is_multi_node:
            return 0  # so a laptop that sleeps does not lose its ranks
        if not self._lost_since:
            try:
                super().num_nodes_waiting()
            except RendezvousConnectionError:
                self._stop_heartbeats()
                self._lost_since = time.monotonic()
        is_overdue = self._lost_since and time.monotonic() > self._lost_since + GRACE_SECONDS
        if is_overdue or (self._has_lost_node() and not self._lost_since):
            self.kill_ranks()
        elif (self._lost_since or self._has_usable_node()) and not self._stop_requested:
            self._stop_requested = True
            self.stop_ranks()
        return 0

    def _max_usable(self, nodes: int) -> int:
        return max(count for count in self.node_counts if count <= nodes)

    def _has_lost_node(self) -> bool:
        """Return True if a node of this round has left, or the run has ended."""
        state = self._state_holder.state
        present = sum(rank < self.num_nodes for rank in state.participants.values())
        return state.closed or present < self.num_nodes

    def _has_usable_node(self) -> bool:
        """Return True if the run could train on more nodes than it does."""
        state = self._state_holder.state
        return self._max_usable(len(state.participants) + len(state.wait_list)) > self.num_nodes

    def end_run(self, failure: Mapping[str, Any] | None) -> None:
        """End the run on all nodes; ``failure``: why it failed, None if it succeeded."""
        with suppress(Exception):  # the other nodes may have ended already
            self._store.set(f"{self.get_run_id()}/verdict", json.dumps(failure))
            self.shutdown()
        if self.is_multi_node:
            time.sleep(LINGER_SECONDS)

    def get_failure(self) -> dict[str, Any] | None:
        """Return the failure that another node gave to `end_run`."""
        failure: dict[str, Any] | None = json.loads(self._store.get(f"{self.get_run_id()}/verdict"))
        return failure

    def leave(self) -> None:
        """Leave the rendezvous, so that other nodes notice before a missed heartbeat."""

        def remove_node(context: Any, deadline: float) -> _Action:
            for group, action in (
                (context.state.participants, _Action.REMOVE_FROM_PARTICIPANTS),
                (context.state.wait_list, _Action.REMOVE_FROM_WAIT_LIST),
                (context.state.redundancy_list, _Action.REMOVE_FROM_REDUNDANCY_LIST),
            ):
                if context.node in group:
                    return action
            return _Action.FINISH

        self._stop_heartbeats()
        if self._lost_since:
            return
        with suppress(RendezvousError):
            self._op_executor.run(remove_node, time.monotonic() + 5)


def open_rendezvous(
    endpoint: str,
    run_id: str,
    node_counts: Sequence[int],
    shared_config: Mapping[str, Any],
    *,
    kill_ranks: Callable[[], object],
    stop_ranks: Callable[[], object],
    log: Callable[[str], object],
) -> RendezvousHandler:
    """Connect to the rendezvous of a run, or host it if ``endpoint`` names this host.

    Args:
        endpoint: HOST or HOST:PORT; port 0: any free port.
        run_id: distinguishes runs at the same endpoint.
        node_counts: the numbers of nodes that can train, ascending.
        shared_config: JSON values that must be equal on all nodes.
        kill_ranks: called when the ranks of this node cannot continue.
        stop_ranks: called when the ranks should save and end.
        log: receives messages for the user.

    Raises:
        WeftError: if no host answers.
        InvalidConfig: if ``shared_config`` differs from that of the first node.
    """
    local = "localhost" if is_loopback(endpoint) else None
    if node_counts[-1] == 1:
        store = create_tcp_store("127.0.0.1", 0, True)
    else:
        store = connect_store(endpoint, run_id, node_counts, JOIN_TIMEOUT.total_seconds())
    store.set_timeout(timedelta(seconds=60))
    attempt = 0
    while True:
        name = f"{run_id}/{attempt}"
        rendezvous: RendezvousHandler = RendezvousHandler.from_backend(
            name,
            store,
            C10dRendezvousBackend(store, name),
            node_counts[0],
            node_counts[-1],
            local,
            RendezvousTimeout(join=JOIN_TIMEOUT, last_call=LAST_CALL_TIMEOUT),
            keep_alive_interval=HEARTBEAT_SECONDS,
            keep_alive_max_attempt=MISSED_HEARTBEATS,
        )
        if not rendezvous.is_closed():
            break
        attempt += 1  # the store has survived an earlier start of this run
    rendezvous.node_counts, rendezvous.log = node_counts, log
    rendezvous.kill_ranks, rendezvous.stop_ranks = kill_ranks, stop_ranks
    own = json.loads(json.dumps(shared_config, default=str))
    first = json.loads(store.compare_set(f"{name}/same", "", json.dumps(own)))
    if own != first:
        remedy = "run the same command on every node, or use another run.rendezvous for this run"
        raise InvalidConfig(
            ConfigError(key, value, f"differs from the first node's {first.get(key)}", remedy)
            for key, value in own.items()
            if value != first.get(key)
        )
    return rendezvous
