"""Replica groups: one run in several groups, each of which may fail at any step.

Each group is an ordinary ``weft train`` with the whole model, in any inner layout.  Groups find
each other through a *lighthouse*, torchft's small server.  Before every step it returns the
*quorum*: the groups that take part in the step.  The members of a quorum split the global batch,
and rank i of each sums its gradients with rank i of the others.  Only that sum, and counts and
losses, cross groups.

*A lost group.*  A member that dies breaks the sum of the others.  The ranks of a group agree
whether theirs succeeded; if not, nothing is applied, and the step is repeated from the same samples
with the members of the next quorum, which the lighthouse returns once it misses the dead one's
heartbeat.

*A new group.*  A member with fewer steps than another, because it has just started or missed the
end of a step, receives parameters, optimizer state and run state from a member with the most steps,
before the step: tensors as they lie in memory, described by JSON.

*The leader* is the member that has been at the newest step for the longest time.  Only the leader
saves, into the checkpoint directory that all groups share, and acquires its lease when it becomes
the leader.  So all groups have one history, and a group that starts when all others are gone
resumes from it.

Only the lighthouse and its client are torchft's, and for NCCL its process group, which can be
aborted.  Its Manager does much of the above, but serves kill requests and pickles on every
interface (docs/decisions/0018-torchft.md).
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.checkpoint.fingerprint import ReplicaMismatch, local_fingerprint
from weft.checkpoint.safetensors import DTYPES, NAMES
from weft.checkpoint.state_dict import (
    allocate_optimizer_state,
    checkpoint_tensors,
    local_values,
)
from weft.config.accelerators import supports
from weft.config.errors import WeftError
from weft.config.schema import flatten
from weft.data.dataset import Dataset
from weft.monitor.faults import fault_point
from weft.monitor.step_timer import enter_phase
from weft.parallel.private import create_gloo_group, create_tcp_store
from weft.training.setup import Built, Rank
from weft.training.state import TrainState

# Keys that may differ between groups.
GROUP_KEYS = (
    "run.",
    "monitor.",
    "data.path",
    "data.mixture",
    "data.validation_path",
    "data.tokenizer",
    "data.cache_dir",
    "data.node_cache_dir",
    "data.node_cache_gib",
    "resilience.faults",
    "resilience.time_limit",
)
TIMEOUT_SECONDS = 30.0  # default time that a group waits for another inside a step
QUORUM_SECONDS, REQUEST_TIMEOUT = 600.0, timedelta(seconds=60)
HEARTBEAT_SECONDS = 0.5
STOP_CHECK_SECONDS = 1.0  # between checks for a stop while a group waits for others


class ReplicaGroupError(WeftError):
    """This group cannot take part in the run."""


class SingleReplica:
    """A run without replica groups."""

    index, count = 0, 1  # of this group among those of the step, and their number
    became_leader = True  # from this step on this group saves

    @property
    def is_leader(self) -> bool:
        """True if this group saves."""
        return self.index == 0

    def sync(self, state: TrainState, check_stop: Callable[[], None] = lambda: None) -> TrainState:
        """Agree on the groups of the next step and load their newest state; a collective.

        Parameters and optimizer state change if this group was behind.

        Args:
            state: the state of this group.
            check_stop: called while this group waits for others; its exception ends the wait.

        Returns:
            The state of the group with the most steps.

        Raises:
            ReplicaGroupError: if this group cannot take part.
        """
        return state

    def sum(self, tensors: Iterable[Tensor]) -> None:
        """Sum tensors in place over the groups.

        After a failure they are zero, like all later sums of the step.
        """

    def committed(self) -> bool:
        """Return True if all sums of the step succeeded on all ranks; a collective.

        Otherwise the step must be repeated.
        """
        self.became_leader = False
        return True

    def compare(self) -> None:
        """Check that all groups have the same state.

        All groups call this method after the same step.

        Raises:
            ReplicaMismatch: in all groups, on the ranks whose shards differ.
        """

    def close(self) -> None:
        """Leave the other groups."""


class Member(NamedTuple):
    """A group in a quorum."""

    id: str
    step: int  # completed steps; -1: its state is damaged
    since: int  # nanoseconds since the epoch when it got this state
    failures: int  # failed sums so far
    job: str  # hash of everything that must be equal
    store: str  # HOST:PORT where ranks of other groups find it


class Quorum(NamedTuple):
    """The groups of a step."""

    number: int  # changes when the members change
    created: str  # by the lighthouse's clock
    members: list[Member]  # the first is the leader
    position: int  # of this group among them


class ReplicaGroups(SingleReplica):
    """This group among the others; every rank creates one.

    Args:
        built: the model and its optimizer.
        job: hash of everything that must be equal.
        timeout: seconds that a group waits for others inside a step.
        rank: this process.
        log: receives a message when the groups change.
    """

    def __init__(
        self,
        built: Built,
        job: str,
        timeout: float,
        rank: Rank,
        log: Callable[[str], None],
    ) -> None:
        from torchft.coordination import LighthouseClient

        self._built, self._job, self._rank, self._log = built, job, rank.rank, log
        # Of the gradients.
        self._device = torch.device("cpu") if built.plan.cpu_offload else rank.device
        self._timeout = timedelta(seconds=timeout)
        self._since, self._failures = time.time_ns(), 0
        self._is_intact, self._was_leader = True, False
        self._pg: Any = None
        self._pg_members: Any = None  # the members that ``_pg`` connects
        self._error: Exception | None = None  # of this step
        self._closed = threading.Event()
        self._id = f"{socket.gethostname()}-{os.getpid()}-{self._since}"
        lighthouse = built.plan.job.resilience.lighthouse
        host, _, port = lighthouse.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout) as connection:
                self._address = connection.getsockname()[0]  # of the interface to the others
            if self._rank == 0:
                self._client = LighthouseClient(f"http://{lighthouse}", self._timeout)
                self._store = create_tcp_store(self._address, 0, serve=True)
                threading.Thread(target=self._beat, daemon=True).start()
        except (OSError, RuntimeError) as error:
            raise ReplicaGroupError(
                f"resilience.lighthouse={lighthouse} cannot be reached: {error}. Start it with "
                "torchft_lighthouse."
            ) from error

    def _beat(self) -> None:
        """Send heartbeats to the lighthouse until the group is closed."""
        while not self._closed.wait(HEARTBEAT_SECONDS):
            with suppress(OSError, RuntimeError):
                self._client.heartbeat(self._id)

    def close(self) -> None:
        """See `SingleReplica.close`."""
        self._closed.set()
        self._disconnect()

    # ---------------------------------------------------------------- before a step

    def sync(self, state: TrainState, check_stop: Callable[[], None] = lambda: None) -> TrainState:
        """See `SingleReplica.sync`."""
        enter_phase("sync")
        count_before, is_synced, newest = self.count, False, state
        while not is_synced:
            quorum = self._wait_for_quorum(state.step if self._is_intact else -1, check_stop)
            if quorum.members[0].step < 0:
                raise RuntimeError("the replica group that sent its state to this one is gone")
            # The newer group has to leave, however many steps it has completed.
            if min(quorum.members, key=lambda member: member.since).job != self._job:
                raise ReplicaGroupError(
                    "the other replica groups train another job, text or layout: only "
                    f"{', '.join(GROUP_KEYS)} may differ"
                )
            self.index, self.count, self._error = quorum.position, len(quorum.members), None
            try:
                self._connect(quorum)
                newest = self._exchange_state(quorum.members, state)
            except RuntimeError as error:
                self._error = error
            is_synced = self.committed()
        if newest is not state:
            self._is_intact, self._since = True, time.time_ns()
            self._log(f"received the state of step {newest.step} from another replica group")
        if self.count != count_before:
            self._log(f"replica groups from step {newest.step + 1} on: {self.count}")
        self.became_leader = self.is_leader and not self._was_leader
        self._was_leader = self.is_leader
        return newest

    def _wait_for_quorum(self, step: int, check_stop: Callable[[], None]) -> Quorum:
        """Return the next quorum, for a group that has completed ``step``."""
        answers: queue.Queue[Quorum | str] = queue.Queue()
        if self._rank == 0:  # in a thread, because the lighthouse may answer minutes later
            arguments = (step, answers)
            threading.Thread(target=self._request_quorums, args=arguments, daemon=True).start()
        while True:
            enter_phase("sync")
            fault_point("quorum")
            answer: list[Any] = [None]
            if self._rank == 0:
                with suppress(queue.Empty):
                    answer[0] = answers.get(timeout=STOP_CHECK_SECONDS)
            dist.broadcast_object_list(answer, src=0)
            if isinstance(answer[0], str):
                raise ReplicaGroupError(answer[0])
            if answer[0] is not None:
                quorum: Quorum = answer[0]
                return quorum
            check_stop()

    def _request_quorums(self, step: int, answers: queue.Queue[Quorum | str]) -> None:
        """Request a quorum until the lighthouse answers, or for `QUORUM_SECONDS`.

        Args:
            step: completed steps.
            answers: receives the quorum, or the reason why there is none.
        """
        deadline = time.monotonic() + QUORUM_SECONDS
        answer: Quorum | str | None = None
        while answer is None and not self._closed.is_set():
            try:
                answer = self._request_quorum(step, is_last=time.monotonic() > deadline)
            except Exception as error:  # the main thread waits for an answer
                answer = f"no quorum: {type(error).__name__}: {error}"
        if answer is not None:
            answers.put(answer)

    def _request_quorum(self, step: int, is_last: bool) -> Quorum | str | None:
        """Request a quorum from the lighthouse.

        Returns:
            The quorum; without one None, or the reason if ``is_last``.
        """
        data = {"since": self._since, "failures": self._failures, "job": self._job}
        store = f"{self._address}:{self._store.port}"
        try:
            quorum = self._client.quorum(
                self._id, REQUEST_TIMEOUT, store_address=store, step=step, data=data
            )
        except (OSError, RuntimeError) as error:
            time.sleep(HEARTBEAT_SECONDS)
            message = (
                f"no quorum for {QUORUM_SECONDS:.0f} s: the lighthouse is gone, or fewer replica "
                f"groups came than its --min_replicas requires: {error}"
            )
            return message if is_last else None
        members = [
            Member(id=m.replica_id, step=m.step, store=m.store_address, **m.data)
            for m in quorum.participants
        ]
        members.sort(key=lambda member: (-member.step, member.since, member.id))
        position = [member.id for member in members].index(self._id)
        created = f"{quorum.created.seconds}.{quorum.created.nanos}"
        return Quorum(quorum.quorum_id, created, members, position)

    def _connect(self, quorum: Quorum) -> None:
        """Create a process group with this rank's counterparts, unless it exists."""
        members = quorum.number, [(member.id, member.failures) for member in quorum.members]
        if members == self._pg_members:
            return
        self._disconnect()
        if self.count > 1:
            prefix = f"{quorum.members[0].store}/{quorum.created}/{self._rank}"
            if supports(self._device.type, "NCCL"):
                from torchft.process_group import ProcessGroupNCCL

                self._pg = ProcessGroupNCCL(self._timeout)
                self._pg.configure(prefix, self._id, self.index, self.count)
            else:
                self._pg = create_gloo_group(
                    prefix, self.index, self.count, self._address, self._timeout
                )
        self._pg_members = members

    def _disconnect(self) -> None:
        """Drop the process group; sums of the counterparts with this rank fail at once."""
        if self._pg is not None and supports(self._device.type, "NCCL"):
            self._pg.abort()
        self._pg = self._pg_members = None

    def _exchange_state(self, members: list[Member], state: TrainState) -> TrainState:
        """Send the state of the members with the most steps to the others."""
        newest = [i for i, member in enumerate(members) if member.step == members[0].step]
        for number, receiver in enumerate(range(len(newest), len(members))):
            sender = newest[number % len(newest)]
            if self.index == sender:
                self._send(receiver, state)
            elif self.index == receiver:
                self._is_intact = False  # until all ranks have all of it
                state = self._receive(sender, state)
        return state

    def _send(self, receiver: int, state: TrainState) -> None:
        tensors = checkpoint_tensors(self._built.model_parts, self._built.optimizer)
        shapes = {
            name: [list(tensor.shape), NAMES[tensor.dtype]]
            for name, tensor in tensors.items()
            if name.startswith("optim.")
        }
        header = {
            "step": state.step,
            "samples": state.samples,
            "anomaly_state": state.anomaly_state,
            "evaluation": dict(state.evaluation),
            "early_stopping": dict(state.early_stopping),
            "tensors": shapes,
        }
        text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
        sent = [torch.tensor([len(text)]), text, *(tensors[name] for name in sorted(tensors))]
        for tensor in sent:
            local = local_values(tensor).to(self._device).contiguous()
            self._pg.send([local], receiver, 0).wait()

    def _receive(self, sender: int, state: TrainState) -> TrainState:
        def receive_into(tensor: Tensor) -> Tensor:
            buffer = torch.empty_like(
                tensor, device=self._device, memory_format=torch.contiguous_format
            )
            self._pg.recv([buffer], sender, 0).wait()
            return tensor.copy_(buffer)

        length = int(receive_into(torch.zeros(1, dtype=torch.int64)))
        text = receive_into(torch.zeros(length, dtype=torch.uint8))
        header = json.loads(bytes(text.tolist()))
        shapes = {
            name: (torch.Size(shape), DTYPES[dtype])
            for name, (shape, dtype) in header["tensors"].items()
        }
        model_parts, optimizer = self._built.model_parts, self._built.optimizer
        allocate_optimizer_state(model_parts, optimizer, shapes)
        tensors = checkpoint_tensors(model_parts, optimizer)
        for name in sorted(tensors):
            receive_into(local_values(tensors[name]))
        if convert := getattr(optimizer, "convert_loaded_state", None):
            convert()
        return replace(
            state,
            step=header["step"],
            samples=header["samples"],
            anomaly_state=header["anomaly_state"],
            evaluation=header["evaluation"],
            early_stopping=header["early_stopping"],
        )

    # ---------------------------------------------------------------- in a step

    @torch.no_grad()
    def sum(self, tensors: Iterable[Tensor]) -> None:
        """See `SingleReplica.sum`."""
        local_tensors = [local_values(tensor) for tensor in tensors]
        if self.count > 1 and self._error is None:
            works: list[Any] = []
            try:
                for tensor in local_tensors:
                    works.append(self._pg.allreduce([tensor], dist.AllreduceOptions()))
                for work in works:
                    work.wait()
                has_nccl = supports(self._device.type, "NCCL")
                if has_nccl and (lost := self._pg.errored()):  # waits
                    raise lost
            except RuntimeError as error:
                self._error = error
                for work in works:  # they fail, too; afterwards nothing writes into gradients
                    with suppress(RuntimeError):
                        work.wait()
        if self._error is not None:
            for tensor in local_tensors:
                tensor.zero_()

    def committed(self) -> bool:
        """See `SingleReplica.committed`."""
        succeeded = torch.tensor([self._error is None], dtype=torch.int32)
        if dist.get_world_size() > 1:
            dist.all_reduce(succeeded, dist.ReduceOp.MIN)
        if not succeeded:
            self._failures += 1
            self._disconnect()
            if self._error is not None:
                print(f"lost another replica group: {self._error}", flush=True)  # into the log
        return bool(succeeded)

    def compare(self) -> None:
        """See `SingleReplica.compare`."""
        if self.count == 1:
            return
        tensors = checkpoint_tensors(self._built.model_parts, self._built.optimizer)
        marks = [local_fingerprint(each).to(self._device) for each in tensors.values()]
        mark = torch.stack(marks).sum()
        most, options = torch.stack((mark, -mark)), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        with suppress(RuntimeError):  # a group is lost; the next step detects it
            self._pg.allreduce([most], options).wait()
            if most[0] != -most[1]:
                raise ReplicaMismatch(
                    f"rank {self._rank} of one of the {self.count} replica groups differs from its "
                    "counterparts, most likely because hardware computes wrong results silently. "
                    "Nothing of this step was saved; start again from the last checkpoint"
                )


def join_replica_groups(
    built: Built, dataset: Dataset, rank: Rank, log: Callable[[str], None]
) -> SingleReplica:
    """Connect this run to other replica groups, if ``resilience.lighthouse`` is set."""
    plan, section = built.plan, built.plan.job.resilience
    if not section.has_replica_groups:
        return SingleReplica()
    same = {k: v for k, v in flatten(plan.job).items() if not k.startswith(GROUP_KEYS)}
    same |= {"text": dataset.fingerprint, "mesh": plan.axis_sizes}
    mark = hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:16]
    limit = section.step_timeout
    timeout = TIMEOUT_SECONDS if limit == "auto" or limit == 0 else limit / 2
    return ReplicaGroups(built, mark, timeout, rank, log)
