"""Replica groups compute the same as one group, and each of them may die."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from tests.commands import WEFT, processes_in
from tests.harness import run_ranks
from tests.small import (
    SMALL,
    Overrides,
    full_tensor,
    gradients,
    loader_of,
    losses,
    newest_state,
    plan_here,
    records,
    small_job,
    this_rank,
    train_rank,
)
from tests.supervision.test_listening import sockets_of
from tests.supervision.test_signals import workers
from weft.checkpoint.fingerprint import ReplicaMismatch
from weft.checkpoint.manifest import checkpoint_step, list_checkpoints
from weft.checkpoint.state_dict import trainable_parameters
from weft.config.schema import Job
from weft.data.dataset import open_dataset
from weft.monitor.signals import listen
from weft.optim.optimizer import compute_grad_norm
from weft.planning.plan import Machine
from weft.planning.resolve import resolve
from weft.preparation.job_checks import check_names
from weft.records.run_reader import read_event_log
from weft.training.loop import train
from weft.training.replica_groups import ReplicaGroupError, ReplicaGroups, join_replica_groups
from weft.training.setup import build
from weft.training.state import TrainState

INSTALLED = importlib.util.find_spec("torchft") is not None
needs_torchft = pytest.mark.skipif(
    not INSTALLED, reason="torchft is not installed: pip install 'weft[torchft]'"
)
# Record every step, and compare all groups after every step.
WATCHED: Overrides = [
    ("monitor.log_interval", "1"),
    ("resilience.replica_check", "1"),
    ("resilience.step_timeout", "20"),
]
LORA: Overrides = [("lora.rank", "4"), ("lora.alpha", "8")]
EXPERTS: Overrides = [
    ("model.kind", "moe"),
    ("model.preset", "toy-moe"),
    ("model.head_dim", "16"),
    ("model.num_experts", "4"),
    ("model.expert_dim", "24"),
    ("model.balance_rate", "0.01"),
    ("parallel.ep", "2"),
]


def of_one_rank(overrides: Overrides) -> Overrides:
    return [(key, value) for key, value in overrides if not key.startswith("parallel.")]


class Lighthouse:
    """torchft's server on loopback, in this process."""

    def __init__(self, groups: int) -> None:
        from torchft.coordination import LighthouseServer

        self.server = LighthouseServer(
            bind="127.0.0.1:0",
            min_replicas=groups,
            join_timeout_ms=20_000,
            heartbeat_timeout_ms=3000,
        )
        self.endpoint = "127.0.0.1:" + self.server.address().rpartition(":")[2]


@pytest.fixture
def lighthouse(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield HOST:PORT of a lighthouse; the parameter is the smallest quorum."""
    running = Lighthouse(request.param)
    yield running.endpoint
    running.server.shutdown()


def with_groups(*groups: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("lighthouse", groups, indirect=True, ids=str)


def enter_group(size: int, rendezvous: str) -> int:
    """Initialize the default process group of this rank's replica group; return its number."""
    group, rank = divmod(dist.get_rank(), size)
    dist.destroy_process_group()
    store = dist.FileStore(f"{rendezvous}-{group}", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return group


def train_with_handlers(overrides: Overrides, store: str, pid_file: str) -> bool:
    """Train as weft does, and write the process id for the test."""
    listen()
    Path(pid_file).write_text(str(os.getpid()))
    plan = plan_here(small_job(*overrides))
    return train(plan, open_dataset(Path(store)), this_rank(), Console(quiet=True))


@needs_torchft
@pytest.mark.parametrize(
    ("num_groups", "step", "text"),
    [
        (2, 0, "SIGTERM: stopped at step 0 "),
        pytest.param(1, 5, "SIGTERM: saved step ", marks=pytest.mark.slow),
    ],
    ids=["before the first step", "after a step"],
)
def test_replica_groups_stop_while_waiting_for_a_quorum_ends_at_once(
    num_groups: int, step: int, text: str, store_path: Path, tmp_path: Path
) -> None:
    """The lighthouse misses a group, or is gone; without the signal the group waits 10 minutes."""
    lighthouse, pid_file, sent = Lighthouse(num_groups), tmp_path / "pid", list[float]()
    job: Overrides = [
        *WATCHED,
        ("run.dir", str(tmp_path / "run")),
        ("checkpoint.dir", str(tmp_path / "checkpoints")),
        ("train.steps", "100000"),
        ("resilience.lighthouse", lighthouse.endpoint),
    ]

    def stop() -> None:
        while not pid_file.exists() or (step and last_step() < step):
            time.sleep(0.05)
        if step:
            lighthouse.server.shutdown()
        time.sleep(2)
        sent.append(time.time())
        os.kill(int(pid_file.read_text()), signal.SIGTERM)

    def last_step() -> int:
        metrics = tmp_path / "run/metrics.jsonl"
        return int(records(tmp_path / "run")[-1]["step"]) if metrics.exists() else 0

    threading.Thread(target=stop, daemon=True).start()
    call = (job, str(store_path), str(pid_file))
    assert run_ranks(train_with_handlers, 1, *call) == [False]
    assert time.time() - sent[0] < 10
    (event,) = [e for e in read_event_log(tmp_path / "run")[0] if e["kind"] == "stop"]
    assert event["text"].startswith(text)
    steps = [checkpoint_step(path) for path in list_checkpoints(tmp_path / "checkpoints")]
    assert steps == ([last_step()] if step else [])


# ------------------------------------------------------------------ results


def group_gradients(
    size: int, rendezvous: str, lighthouse: str, overrides: Overrides, store: str
) -> dict[str, Any]:
    """Return `tests.small.gradients`, computed by all groups together."""
    enter_group(size, rendezvous)
    shared = ("checkpoint.dir", "unused")
    job = small_job(*overrides, ("resilience.lighthouse", lighthouse), shared)
    plan, rank = plan_here(job), this_rank()
    built = build(plan, rank)
    parts, mesh, train_step = built.model_parts, built.mesh, built.train_step
    groups = join_replica_groups(built, open_dataset(Path(store)), rank, print)
    groups.sync(TrainState(0, 0))
    loader = loader_of(job, plan, store, mesh)
    loss = train_step.forward_backward(
        loader.get_microbatches(0, groups.index, groups.count), groups.sum
    )
    params = dict(trainable_parameters(parts))
    groups.sum([loss, *(param.grad for param in params.values())])
    assert groups.committed()
    dist.all_reduce(loss)
    listens = sockets_of(os.getpid())
    result = {
        "loss": loss.item(),
        "norm": compute_grad_norm(list(params.values()))[0].item(),
        "grads": {name: full_tensor(param.grad).clone() for name, param in params.items()},
        "listens": listens,
    }
    groups.close()
    return result


@needs_torchft
@pytest.mark.parametrize(("size", "extra"), [(1, []), (2, []), (2, LORA), (2, EXPERTS)])
@with_groups(2, 3)
def test_replica_groups_gradients_equal_one_process(
    lighthouse: str,
    size: int,
    extra: Overrides,
    store_path: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Groups may have different numbers of rows and of targets."""
    count = request.node.callspec.params["lighthouse"]
    batch = [("train.global_batch_size", "8"), ("train.microbatch_size", "1")]
    job = [("data.packing", "documents"), *batch, *extra]
    arguments = (size, str(tmp_path / "meet"), lighthouse, job, str(store_path))
    ranks = run_ranks(group_gradients, size * count, *arguments)
    (single,) = run_ranks(gradients, 1, of_one_rank(job), str(store_path))
    for rank in ranks:
        assert rank["loss"] == pytest.approx(single["loss"], rel=1e-5)
        assert rank["norm"] == pytest.approx(single["norm"], rel=1e-4)
        assert rank["grads"].keys() == single["grads"].keys()
        for name, grad in rank["grads"].items():
            torch.testing.assert_close(grad, single["grads"][name], rtol=1e-4, atol=1e-6)
            assert grad.equal(ranks[0]["grads"][name]), name  # the same bits in all groups
        assert rank["listens"] == {"0100007F"}, "listens beyond the loopback interface"


def train_group(
    size: int, rendezvous: str, overrides: Overrides, other: Overrides, store: str
) -> str:
    """Train as group 0, 1, ...; the last group also has the overrides ``other``."""
    last = dist.get_world_size() // size - 1
    group = enter_group(size, rendezvous)
    extra = other if group == last else []
    if extra:
        time.sleep(1.0)  # let another group start first
    job = small_job(*overrides, ("run.dir", f"{rendezvous}/{group}"), *extra)
    try:
        train(plan_here(job), open_dataset(Path(store)), this_rank(), Console(quiet=True))
    except (ReplicaGroupError, ReplicaMismatch) as error:
        return str(error)
    return "trained"


def check_against(single: Path, group: Path, first: int = 1) -> None:
    """Check a group's records from step ``first`` on against an undisturbed run."""
    expected = {record["step"]: record for record in records(single)}
    result = {record["step"]: record for record in records(group)}
    assert [step for step in expected if step >= first] == [s for s in result if s >= first]
    for step, record in result.items():
        for what in ("loss", "grad_norm"):
            assert record[what] == pytest.approx(expected[step][what], rel=2e-3), (step, what)
        assert record["tokens"] == expected[step]["tokens"]


def check_weights(single: Path, shared: Path) -> None:
    ours, theirs = newest_state(shared), newest_state(single)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=2e-4)


@needs_torchft
@pytest.mark.parametrize(
    ("size", "interval", "check", "extra"),
    [
        (1, "10", "1", []),
        (1, "auto", "7", []),
        (2, "10", "1", []),
        (2, "10", "1", LORA),
        (2, "10", "1", EXPERTS),
    ],
)
@with_groups(2)
def test_replica_groups_training_equals_one_group(
    lighthouse: str,
    size: int,
    interval: str,
    check: str,
    extra: Overrides,
    store_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Records and final weights are equal; groups compare weights every ``check`` steps.

    With the interval ``auto`` only the group that saves knows the next save.
    """
    saves = ("checkpoint.interval", interval)
    job = [*WATCHED, saves, ("resilience.replica_check", check), *extra]
    single = tmp_path / "alone"
    run_ranks(train_rank, 1, [*of_one_rank(job), ("run.dir", str(single))], str(store_path))
    shared = ("checkpoint.dir", str(tmp_path / "checkpoints"))
    rendezvous = [("resilience.lighthouse", lighthouse), shared]
    arguments = (size, str(tmp_path / "g"), [*job, *rendezvous], [], str(store_path))
    assert run_ranks(train_group, 2 * size, *arguments) == ["trained"] * 2 * size
    assert "lost another replica group" not in capsys.readouterr().out
    for group in ("g/0", "g/1"):
        check_against(single, tmp_path / group)
        assert losses(tmp_path / group) == losses(tmp_path / "g/0")
    check_weights(single, tmp_path)
    assert len(list((tmp_path / "checkpoints").glob("lease-*"))) == 1, "only one group saves"


def compare_after_a_flip(rendezvous: str, lighthouse: str) -> list[str]:
    """Compare groups before and after one bit of a weight of group 1 flips; return errors."""
    group = enter_group(1, rendezvous)
    job = small_job(("resilience.lighthouse", lighthouse), ("checkpoint.dir", "unused"))
    plan, rank = plan_here(job), this_rank()
    built = build(plan, rank)
    groups = ReplicaGroups(built, "job", 20, rank, print)
    groups.sync(TrainState(0, 0))
    messages = []
    for _ in range(2):
        try:
            groups.compare()
            messages.append("equal")
        except ReplicaMismatch as error:
            messages.append(str(error))
        if group == 1:
            weight = full_tensor(list(trainable_parameters(built.model_parts))[3][1].data)
            weight.view(torch.int32).view(-1)[17] ^= 1
    groups.close()
    return messages


@needs_torchft
@with_groups(2)
def test_replica_groups_different_weights_are_found(lighthouse: str, tmp_path: Path) -> None:
    for before, after in run_ranks(compare_after_a_flip, 2, str(tmp_path / "g"), lighthouse):
        assert before == "equal"
        assert "rank 0 of one of the 2 replica groups differs" in after


def miss_the_end_of_a_step(
    size: int, rendezvous: str, lighthouse: str, state_dtype: str
) -> dict[str, Any]:
    """Group 1 has an error after the reduction, group 0 has none; then both synchronize."""
    group = enter_group(size, rendezvous)
    overrides = [("resilience.lighthouse", lighthouse), ("checkpoint.dir", "unused")]
    job = small_job(*overrides, ("optim.state_dtype", state_dtype))
    plan, rank = plan_here(job), this_rank()
    built = build(plan, rank)
    parts, optimizer = built.model_parts, built.optimizer
    groups = ReplicaGroups(built, "job", 30, rank, print)
    at = groups.sync(TrainState(0, 0))
    led = groups.is_leader
    value = torch.tensor([1.0])
    groups.sum([value])
    if not led:
        groups._error = RuntimeError("as the network may have it")
    if groups.committed():
        for _, param in trainable_parameters(parts):
            param.grad = torch.ones_like(param)
        optimizer.step()
        at = TrainState(1, 8)
    start_time = time.monotonic()
    at = groups.sync(at)
    second_run = torch.tensor([1.0])
    groups.sum([second_run])
    valid = groups.committed()
    groups.compare()
    seconds = time.monotonic() - start_time
    groups.close()
    moved = next(iter(optimizer.state.values()))["exp_avg"]
    return {
        "group": group,
        "kept": led == groups.is_leader,
        "at": (at.step, at.samples),
        "sums": (value.item(), second_run.item(), valid),
        "seconds": seconds,
        "moved": full_tensor(moved).abs().sum().item() > 0,
    }


@needs_torchft
@pytest.mark.parametrize(("size", "state_dtype"), [(1, "float32"), (2, "float32"), (2, "8bit")])
@with_groups(2)
def test_replica_groups_group_that_missed_a_step_catches_up(
    lighthouse: str, size: int, state_dtype: str, tmp_path: Path
) -> None:
    """No group is lost: the same members must form a new quorum."""
    arguments = size, str(tmp_path / "g"), lighthouse, state_dtype
    for rank in run_ranks(miss_the_end_of_a_step, 2 * size, *arguments):
        assert rank["kept"], "who leads has changed"
        assert rank["at"] == (1, 8)
        assert rank["sums"] == (2.0, 2.0, True)
        assert rank["moved"], "no optimizer state has come"
        assert rank["seconds"] < 20, "it was a timeout"


@needs_torchft
@with_groups(1)
def test_replica_groups_another_job_is_refused(
    lighthouse: str, store_path: Path, tmp_path: Path
) -> None:
    """The new group ends with an error; the other group continues."""
    job = [
        ("resilience.lighthouse", lighthouse),
        ("checkpoint.dir", f"{tmp_path}/c"),
        ("resilience.step_timeout", "6"),
        ("resilience.faults", '[{site = "step", kind = "slow", seconds = 0.1, times = 100}]'),
    ]
    arguments = (1, str(tmp_path / "g"), job, [("optim.lr", "0.1")], str(store_path))
    first, second = run_ranks(train_group, 2, *arguments)
    assert first == "trained"
    assert second.startswith("the other replica groups train another job, text or layout")


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("override", "key", "rule"),
    [
        (("resilience.lighthouse", "here"), "resilience.lighthouse", "is not HOST:PORT"),
        (("parallel.pp", "2"), "parallel.pp", "not supported with replica groups"),
        (
            ("train.world_size_invariant", "true"),
            "train.world_size_invariant",
            "not supported with replica groups",
        ),
        (
            ("debug.layer_stats_steps", "1"),
            "debug.layer_stats_steps",
            "not supported with replica groups",
        ),
        (("debug.deterministic", "true"), "debug.deterministic", "needs a fixed number of ranks"),
        (
            ("resilience.on_anomaly", "skip"),
            "resilience.on_anomaly",
            "not supported with replica groups",
        ),
        (("checkpoint.dir", "auto"), "checkpoint.dir", "each replica group its own"),
    ],
)
def test_replica_groups_unsupported_keys_are_refused(
    override: tuple[str, str], key: str, rule: str
) -> None:
    right = [("resilience.lighthouse", "[::1]:29510"), ("checkpoint.dir", "/shared")]

    def errors(job: Job) -> list[str]:
        try:
            resolve(job, Machine("cpu", devices=2, world_size=2))
        except Exception as error:
            return str(error).splitlines()
        return []

    assert errors(small_job(*right)) == []
    lines = errors(small_job(*right, override))
    assert any(line.startswith(f"{key}=") and rule in line for line in lines), lines


@pytest.mark.skipif(INSTALLED, reason="torchft is installed")
def test_replica_groups_without_torchft_names_the_package() -> None:
    (error,) = check_names(small_job(("resilience.lighthouse", "host:29510")))
    expected = (
        "resilience.lighthouse=\"host:29510\" needs torchft. Run pip install 'weft[torchft]'."
    )
    assert str(error) == expected


@needs_torchft
def test_replica_groups_without_lighthouse_are_refused(store_path: Path, tmp_path: Path) -> None:
    job = [("resilience.lighthouse", "127.0.0.1:1"), ("checkpoint.dir", f"{tmp_path}/c")]
    (messages,) = run_ranks(train_group, 1, 1, str(tmp_path / "g"), job, [], str(store_path))
    assert messages.startswith("resilience.lighthouse=127.0.0.1:1 cannot be reached: ")


# ------------------------------------------------------------------ faults

# The learning rate does not depend on the number of steps.  It is so small that rounding stays
# small and the loss of a step depends on its samples.  A group stops only between two comparisons
# of weights.
LONG: Overrides = [
    *WATCHED,
    ("resilience.replica_check", "7"),
    ("resilience.step_timeout", "40"),
    ("optim.lr", "1e-4"),
    ("optim.decay_fraction", "0"),
]


class TwoGroups:
    """Groups a and b, started by `weft train` in one directory."""

    def __init__(self, directory: Path, lighthouse: str, store: Path) -> None:
        self.directory, self.lighthouse, self.store = directory, lighthouse, store
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.recorded: dict[int, list[dict[str, Any]]] = {}  # records of both, by step

    def start(self, group: str) -> None:
        pairs = [
            *SMALL,
            *LONG,
            ("run.dir", group),
            ("run.nproc_per_node", "1"),
            ("data.path", str(self.store)),
            ("checkpoint.dir", "checkpoints"),
            ("train.steps", "1000000"),
            ("resilience.lighthouse", self.lighthouse),
            (
                "resilience.faults",
                '[{site = "step", kind = "slow", seconds = 0.1, times = 1000000}]',
            ),
            ("resilience.max_restarts_per_hour", "0"),
        ]
        command = [*WEFT, "train", "demo", *(word for k, v in pairs for word in (f"--{k}", v))]
        self.collect_records()
        before = self.records(group)
        with (self.directory / f"{group}.said").open("ab") as log:
            self.running[group] = subprocess.Popen(
                command, cwd=self.directory, stdout=log, stderr=log
            )
        # The group starts a new file of records.
        self.wait_until(group, lambda result: result != before and len(result) > 0)

    def records(self, group: str) -> list[dict[str, Any]]:
        directory = self.directory / group
        return records(directory) if (directory / "metrics.jsonl").exists() else []

    def last_step(self, group: str) -> int:
        records = self.records(group)
        return int(records[-1]["step"]) if records else 0

    def wait_until(self, group: str, what: Callable[[list[dict[str, Any]]], bool]) -> None:
        deadline = time.monotonic() + 240
        while not what(self.records(group)):
            assert time.monotonic() < deadline, (self.directory / f"{group}.said").read_text()
            assert self.running[group].poll() is None, (
                self.directory / f"{group}.said"
            ).read_text()
            time.sleep(0.05)

    def wait_for_step(self, group: str, step: int) -> None:
        self.wait_until(group, lambda result: bool(result) and result[-1]["step"] >= step)

    def collect_records(self) -> None:
        """Collect the records of both groups."""
        for group in "ab":
            for record in self.records(group):
                if record not in (known := self.recorded.setdefault(record["step"], [])):
                    known.append(record)

    def lost_seconds(self, group: str, since: float) -> float:
        """Return the longest time between two records."""
        return max(
            b - a for a, b in pairwise(r["time"] for r in self.records(group) if r["time"] > since)
        )

    def finish(self) -> None:
        """Stop both groups and compare their records with an undisturbed run."""
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)
        assert [process.wait(timeout=100) for process in self.running.values()] == [75, 75]
        self.collect_records()
        (newest,) = list_checkpoints(self.directory / "checkpoints")[-1:]
        steps = int(newest.name.removeprefix("step-"))
        assert sorted(self.recorded) == list(range(1, steps + 1))
        single = self.directory / "alone"
        job = [*LONG, ("train.steps", str(steps)), ("run.dir", str(single))]
        run_ranks(train_rank, 1, job, str(self.store), timeout=200)
        for expected in records(single):
            for record in self.recorded[expected["step"]]:
                for what in ("loss", "grad_norm"):
                    assert record[what] == pytest.approx(expected[what], rel=1e-3), record
                assert record["tokens"] == expected["tokens"]
        check_weights(single, self.directory)


@pytest.fixture
def two_groups(lighthouse: str, store_path: Path, tmp_path: Path) -> Iterator[TwoGroups]:
    """Yield two groups; check that no process remains."""
    scene = TwoGroups(tmp_path, lighthouse, store_path)
    try:
        yield scene
    finally:
        for process in scene.running.values():
            process.kill()
            process.wait(timeout=30)
    deadline = time.monotonic() + 10
    while remaining := processes_in(tmp_path):
        assert time.monotonic() < deadline, f"left behind: {remaining}"
        time.sleep(0.1)


@needs_torchft
@pytest.mark.slow
@pytest.mark.timeout(1200)
@with_groups(1)
def test_replica_groups_killed_group_rejoins(two_groups: TwoGroups) -> None:
    """Kill the group that saves, then the other one: no step and no sample is lost."""
    two_groups.start("a")
    two_groups.start("b")
    two_groups.wait_for_step("b", two_groups.last_step("a") + 5)
    for victim, survivor in (("a", "b"), ("b", "a")):
        now, last = time.time(), two_groups.last_step(survivor)
        two_groups.running[victim].kill()
        two_groups.running[victim].wait(timeout=30)
        two_groups.wait_for_step(survivor, last + 10)
        killed = two_groups.lost_seconds(survivor, now - 1)
        now = time.time()
        two_groups.start(victim)
        two_groups.wait_for_step(victim, two_groups.last_step(survivor) + 10)
        joined = two_groups.lost_seconds(survivor, now - 1)
        print(f"{victim} killed: {survivor} stood still {killed:.1f} s; joined: {joined:.1f} s")
        assert "received the state of step" in (two_groups.directory / f"{victim}.said").read_text()
        assert killed < 20
    two_groups.finish()


@needs_torchft
@pytest.mark.slow
@pytest.mark.timeout(1200)
@with_groups(1)
def test_replica_groups_stopped_group_catches_up(two_groups: TwoGroups) -> None:
    """Suspend the group that saves: the other continues and saves, then the first rejoins."""
    two_groups.start("a")
    two_groups.start("b")
    two_groups.wait_for_step("b", two_groups.last_step("a") + 5)
    now, last = time.time(), two_groups.last_step("b")
    (worker,) = workers(two_groups.running["a"])
    os.kill(worker, signal.SIGSTOP)
    try:
        two_groups.wait_for_step("b", last + 10)
    finally:
        os.kill(worker, signal.SIGCONT)
    print(f"a stopped: b stood still {two_groups.lost_seconds('b', now - 1):.1f} s")
    two_groups.wait_for_step("a", two_groups.last_step("b") + 10)
    assert "received the state of step" in (two_groups.directory / "a.said").read_text()
    two_groups.finish()
    assert len(list((two_groups.directory / "checkpoints").glob("lease-*"))) == 2
