"""Replica groups: one run in several process groups, each of which may die in any step.

Each group is an ordinary ``weft train`` of its own, in any inner layout, with the whole model.
They meet in every step through a *lighthouse*, torchft's small server, which says who takes part:
the *quorum*.  Its members cut the global batch among them, and rank i of each adds up its gradients
with rank i of the others.  That sum, and the counts and losses, are all that crosses.

*Lost.*  A member that dies breaks the sum for the others.  Ranks of a group agree whether theirs
came through; if not, nothing is applied, and the step is done again from the same samples with the
members of the next quorum, which the lighthouse gives when the dead one's heartbeat is missed.

*Found.*  Who has done fewer steps than another member, since it has just been started or has missed
the end of a step, gets parameters, optimizer state and position from one that has done the most,
before the step: tensors as they lie in memory, described by JSON.

*Leading* is the member that has been at the newest step for the longest time.  It alone saves, into
the checkpoints' folder that all share and that it takes when it begins to lead; so they have one
history, and a group that starts when all others are gone goes on from there.

Of torchft only the lighthouse and its client are used, and for NCCL its process group, which can be
aborted.  Its Manager would do much of this, but serves kill requests and pickles on every interface
(docs/decisions/0018-torchft.md).
"""

from __future__ import annotations

import hashlib
import json
import os
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
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.checkpoint.replica_check import ReplicaMismatch
from weft.checkpoint.shard_files import DTYPES
from weft.checkpoint.state_dict import (
    allocate_optimizer_state,
    local_fingerprint,
    local_values,
    model_state,
    optimizer_state,
)
from weft.config.errors import WeftError
from weft.config.schema import Job, flatten
from weft.data.dataset import Dataset
from weft.monitor.faults import fault_point as reach
from weft.parallel.private import create_gloo_group, create_tcp_store
from weft.plan.resolve import Plan
from weft.train.setup import Rank
from weft.train.state import TrainState

# What may differ between groups.
OWN = (
    "run.",
    "monitor.",
    "data.path",
    "data.mixture",
    "data.tokenizer",
    "data.cache_dir",
    "resilience.faults",
    "resilience.time_limit",
)
TIMEOUT = 30.0  # seconds that a group waits for another inside a step, if the job does not say
PATIENCE, ATTEMPT = 600.0, timedelta(seconds=60)  # for a quorum, and for an answer
HEARTBEAT = 0.5  # seconds between two


class GroupsError(WeftError):
    """This group cannot take part."""


class SingleReplica:
    """The only group, for runs without a lighthouse."""

    place, count = 0, 1  # of this group among those that take part in the step, and their number
    takes_over = True  # from now on this group saves

    @property
    def leads(self) -> bool:
        """Whether it is for this group to save."""
        return self.place == 0

    def meet(self, at: TrainState, parts: list[nn.Module], optimizer: Optimizer) -> TrainState:
        """Before a step: find out who takes part in it, and be where they are.

        Every rank calls it.  Parameters and optimizer state change if this group was behind.

        Returns:
            ``at``, or where the others are.

        Raises:
            GroupsError: if this group cannot take part.
        """
        return at

    def sum(self, tensors: Iterable[Tensor]) -> None:
        """Add up in place over the groups; zeros if that fails, and in the rest of the step."""

    def committed(self) -> bool:
        """Whether every sum of the step has come through, on all ranks; else it must be redone."""
        self.takes_over = False
        return True

    def compare(self, parts: list[nn.Module], optimizer: Optimizer) -> None:
        """Do all groups that take part hold the same?  All call it, after the same step.

        Raises:
            ReplicasDiffer: in all groups, on the ranks whose parts differ.
        """

    def close(self) -> None:
        """Take part no more."""


class Member(NamedTuple):
    """A group in a quorum."""

    id: str
    step: int  # that it has done; -1: its state is damaged
    since: int  # nanoseconds since the epoch
    failures: int  # sums that have failed
    job: str  # a hash of all that must be equal
    store: str  # where ranks of other groups find it


class Quorum(NamedTuple):
    """Who takes part in a step."""

    number: int  # the same as long as members are
    made: str  # when, by the lighthouse's clock
    members: list[Member]  # the first of which leads
    place: int  # of this group among them


class ReplicaGroups(SingleReplica):
    """This group among the others."""

    def __init__(
        self,
        lighthouse: str,
        job: str,
        timeout: float,
        rank: Rank,
        device: torch.device,
        say: Callable[[str], None],
    ) -> None:
        """Every rank makes one.

        Args:
            lighthouse: HOST:PORT.
            job: a hash of what must be equal.
            timeout: seconds that others are waited for inside a step.
            device: where gradients lie.
            say: told who takes part.
        """
        from torchft.coordination import LighthouseClient

        self._job, self._rank, self._device, self._say = job, rank.rank, device, say
        self._timeout = timedelta(seconds=timeout)
        self._since, self._failures, self._sound, self._led = time.time_ns(), 0, True, False
        self._pg: Any = None
        self._met: Any = None  # what ``_pg`` was made for
        self._error: Exception | None = None  # of this step
        self._over = threading.Event()
        self._id = f"{socket.gethostname()}-{os.getpid()}-{self._since}"
        host, _, port = lighthouse.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout) as connection:
                self._address = connection.getsockname()[0]  # of the interface to the others
            if self._rank == 0:
                self._client = LighthouseClient(f"http://{lighthouse}", self._timeout)
                self._store = create_tcp_store(self._address, 0, serve=True)
                threading.Thread(target=self._beat, daemon=True).start()
        except (OSError, RuntimeError) as error:
            rule = f"resilience.lighthouse = {lighthouse}: cannot be reached: {error}"
            raise GroupsError(f"{rule}; start it with torchft_lighthouse") from error

    def _beat(self) -> None:
        """Tell the lighthouse that this group lives, while it does."""
        while not self._over.wait(HEARTBEAT):
            with suppress(OSError, RuntimeError):
                self._client.heartbeat(self._id)

    def close(self) -> None:
        self._over.set()
        self._drop()

    # ---------------------------------------------------------------- before a step

    def meet(self, at: TrainState, parts: list[nn.Module], optimizer: Optimizer) -> TrainState:
        before, agreed, found = self.count, False, at
        while not agreed:
            quorum = self._quorum(at.step if self._sound else -1)
            if quorum.members[0].step < 0:
                raise RuntimeError("the replica group that fed this one is gone")
            # Who is new has to go, however many steps it has done.
            if min(quorum.members, key=lambda member: member.since).job != self._job:
                rule = "the replica groups there train another job, text or layout"
                raise GroupsError(f"{rule}: only {', '.join(OWN)} may differ")
            self.place, self.count, self._error = quorum.place, len(quorum.members), None
            try:
                self._connect(quorum)
                found = self._even_out(quorum.members, at, parts, optimizer)
            except RuntimeError as error:
                self._error = error
            agreed = self.committed()
        if found is not at:
            self._sound, self._since = True, time.time_ns()
            self._say(f"took the state of step {found.step} from another replica group")
        if self.count != before:
            self._say(f"replica groups from step {found.step + 1} on: {self.count}")
        self.takes_over, self._led = self.leads and not self._led, self.leads
        return found

    def _quorum(self, step: int) -> Quorum:
        """The next one, for a group that has done ``step``."""
        deadline = time.monotonic() + PATIENCE
        while True:
            reach("quorum")
            answer: list[Any] = [None]
            if self._rank == 0:
                answer[0] = self._ask(step, last=time.monotonic() > deadline)
            dist.broadcast_object_list(answer, src=0)
            if isinstance(answer[0], str):
                raise GroupsError(answer[0])
            if answer[0] is not None:
                quorum: Quorum = answer[0]
                return quorum

    def _ask(self, step: int, last: bool) -> Quorum | str | None:
        """The lighthouse's answer; None if there is none, or why there is none at ``last``."""
        about = {"since": self._since, "failures": self._failures, "job": self._job}
        store = f"{self._address}:{self._store.port}"
        try:
            quorum = self._client.quorum(
                self._id, ATTEMPT, store_address=store, step=step, data=about
            )
        except (OSError, RuntimeError) as error:
            time.sleep(HEARTBEAT)
            rule = (
                f"no quorum for {PATIENCE:.0f} s: the lighthouse is gone, or fewer replica groups"
            )
            return f"{rule} came than its --min_replicas says: {error}" if last else None
        members = [
            Member(id=m.replica_id, step=m.step, store=m.store_address, **m.data)
            for m in quorum.participants
        ]
        members.sort(key=lambda member: (-member.step, member.since, member.id))
        place = [member.id for member in members].index(self._id)
        made = f"{quorum.created.seconds}.{quorum.created.nanos}"
        return Quorum(quorum.quorum_id, made, members, place)

    def _connect(self, quorum: Quorum) -> None:
        """A process group with this rank's counterparts, unless it is there already."""
        wanted = quorum.number, [(member.id, member.failures) for member in quorum.members]
        if wanted == self._met:
            return
        self._drop()
        if self.count > 1:
            place = f"{quorum.members[0].store}/{quorum.made}/{self._rank}"
            if self._device.type == "cuda":
                from torchft.process_group import ProcessGroupNCCL

                self._pg = ProcessGroupNCCL(self._timeout)
                self._pg.configure(place, self._id, self.place, self.count)
            else:
                self._pg = create_gloo_group(
                    place, self.place, self.count, self._address, self._timeout
                )
        self._met = wanted

    def _drop(self) -> None:
        """Let go of the others, whose sums with this one end at once."""
        if self._pg is not None and self._device.type == "cuda":
            self._pg.abort()
        self._pg = self._met = None

    def _even_out(
        self, members: list[Member], at: TrainState, parts: list[nn.Module], optimizer: Optimizer
    ) -> TrainState:
        """Those who have done most give their state to those who are behind."""
        newest = [i for i, member in enumerate(members) if member.step == members[0].step]
        for number, behind in enumerate(range(len(newest), len(members))):
            source = newest[number % len(newest)]
            if self.place == source:
                self._give(behind, at, parts, optimizer)
            elif self.place == behind:
                self._sound = False  # until all of it is there, on all ranks
                at = self._receive(source, at, parts, optimizer)
        return at

    def _give(
        self, other: int, at: TrainState, parts: list[nn.Module], optimizer: Optimizer
    ) -> None:
        moments = optimizer_state(parts, optimizer)
        shapes = {
            name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
            for name, tensor in moments.items()
        }
        about = {"step": at.step, "samples": at.samples, "watch": at.watch, "tensors": shapes}
        text = torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)
        state = model_state(parts) | moments
        for tensor in [torch.tensor([len(text)]), text, *(state[name] for name in sorted(state))]:
            self._pg.send([local_values(tensor).to(self._device).contiguous()], other, 0).wait()

    def _receive(
        self, other: int, at: TrainState, parts: list[nn.Module], optimizer: Optimizer
    ) -> TrainState:
        def fill(tensor: Tensor) -> Tensor:
            buffer = torch.empty_like(
                tensor, device=self._device, memory_format=torch.contiguous_format
            )
            self._pg.recv([buffer], other, 0).wait()
            return tensor.copy_(buffer)

        length = int(fill(torch.zeros(1, dtype=torch.int64)))
        text = fill(torch.zeros(length, dtype=torch.uint8))
        about = json.loads(bytes(text.tolist()))
        shapes = {
            name: (torch.Size(shape), DTYPES[dtype])
            for name, (shape, dtype) in about["tensors"].items()
        }
        allocate_optimizer_state(parts, optimizer, shapes)
        state = model_state(parts) | optimizer_state(parts, optimizer)
        for name in sorted(state):
            fill(local_values(state[name]))
        return replace(at, step=about["step"], samples=about["samples"], watch=about["watch"])

    # ---------------------------------------------------------------- in a step

    @torch.no_grad()
    def sum(self, tensors: Iterable[Tensor]) -> None:
        here = [local_values(tensor) for tensor in tensors]
        if self.count > 1 and self._error is None:
            works: list[Any] = []
            try:
                for tensor in here:
                    works.append(self._pg.allreduce([tensor], dist.AllreduceOptions()))
                for work in works:
                    work.wait()
                if self._device.type == "cuda" and (lost := self._pg.errored()):  # waits for it
                    raise lost
            except RuntimeError as error:
                self._error = error
                for work in works:  # which fail, too; nothing may write into gradients any more
                    with suppress(RuntimeError):
                        work.wait()
        if self._error is not None:
            for tensor in here:
                tensor.zero_()

    def committed(self) -> bool:
        whole = torch.tensor([self._error is None], dtype=torch.int32)
        if dist.get_world_size() > 1:
            dist.all_reduce(whole, dist.ReduceOp.MIN)
        if not whole:
            self._failures += 1
            self._drop()
            if self._error is not None:
                print(f"lost another replica group: {self._error}", flush=True)  # into the log
        return bool(whole)

    def compare(self, parts: list[nn.Module], optimizer: Optimizer) -> None:
        if self.count == 1:
            return
        state = (model_state(parts) | optimizer_state(parts, optimizer)).values()
        mark = torch.stack([local_fingerprint(tensor).to(self._device) for tensor in state]).sum()
        most, options = torch.stack((mark, -mark)), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        with suppress(RuntimeError):  # one is lost, as the next step will find
            self._pg.allreduce([most], options).wait()
            if most[0] != -most[1]:
                rule = f"rank {self._rank} of one of the {self.count} replica groups differs from"
                raise ReplicaMismatch(
                    f"{rule} its counterparts: most likely its hardware errs without telling; "
                    "nothing of this step was saved: start again from the last checkpoint"
                )


def join(
    job: Job, plan: Plan, text: Dataset, rank: Rank, say: Callable[[str], None]
) -> SingleReplica:
    """This run's place among the replica groups, if it is one."""
    section = job.resilience
    if section.lighthouse == "none":
        return SingleReplica()
    same = {key: value for key, value in flatten(job).items() if not key.startswith(OWN)}
    same |= {"text": text.fingerprint, "mesh": plan.axis_sizes}
    mark = hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:16]
    device = torch.device("cpu") if job.parallel.cpu_offload else rank.device
    limit = section.step_timeout
    timeout = TIMEOUT if limit == "auto" or limit == 0 else limit / 2
    return ReplicaGroups(section.lighthouse, mark, timeout, rank, device, say)
