"""Every kind of hang is reported within its limit plus 2 s, and no process remains."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.commands import WEFT, run_weft
from tests.harness import run_ranks
from tests.small import losses
from tests.supervision.test_launcher import TORCHRUN, run, start_and_wait, wait_for
from tests.supervision.test_signals import workers
from weft.cli.main import main
from weft.config.exit_statuses import FAILED, HUNG, REQUEUE
from weft.monitor.heartbeat import Contact, beat, record_step_seconds, start_heartbeat, step_limit
from weft.parallel.expert_dispatch import during_exchange
from weft.parallel.pass_overlap import run_in_turns
from weft.supervision.watchdog import (
    OpenCollective,
    RankProbe,
    RankState,
    collect_evidence,
    diagnose_hang,
    parse_main_stack,
)

pytestmark = pytest.mark.timeout(400, method="signal")  # so that fixtures tidy up

LIMIT = 3.0
LONG = ["--train.steps", "100000", "--checkpoint.interval", "5"]
WATCHED = [
    *LONG,
    "--resilience.max_restarts_per_hour",
    "0",
    "--resilience.step_timeout",
    str(LIMIT),
]
WAITS = r"the other waits in \w+ no\. \d+ of dp_shard \(ranks 0, 1\)"
IN_FAULT = r"at weft/monitor/faults\.py:\d+ in _fire"


def faults(**fields: object) -> list[str]:
    pairs = ", ".join(f"{name} = {json.dumps(value)}" for name, value in fields.items())
    return ["--resilience.faults", f"[{{{pairs}}}]"]


def check_sentence(pattern: str, tmp_path: Path, stderr: str, since: float) -> None:
    """Check that the log and the terminal report the hang in time."""
    assert re.search(f"weft: the run hangs: {pattern}", stderr), stderr
    assert "run the same command to resume from" in stderr
    logs = tmp_path / "run" / "logs"
    reports = [json.loads((logs / f"rank-{rank}.error.json").read_text()) for rank in (0, 1)]
    assert LIMIT < min(report["time"] for report in reports) - since < LIMIT + 2
    log = re.search(r"log: (\S*rank-\d\.log)", stderr)
    assert log is not None
    assert re.search(f"watchdog: {pattern}", Path(log[1]).read_text())
    host = socket.gethostname()
    names = {path.name for path in logs.iterdir()} - {"fault-0.happened"}
    assert names == {"launcher.log", f"ranks-{host}.json", f"hang-{host}.json"} | {
        f"rank-{n}.{x}" for n in (0, 1) for x in ("log", "error.json")
    }


@pytest.mark.system
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (
            {"site": "step", "kind": "stop", "rank": 1},
            rf"rank 1 is missing: it is stopped \(SIGSTOP\) in step 18, waiting for data; {WAITS}",
        ),
        pytest.param(
            {"site": "step", "kind": "lock", "rank": 1, "seconds": 1000},
            "rank 1 is missing: it does not answer: a thread holds the interpreter lock, "
            f"{IN_FAULT}, in step 18, waiting for data; {WAITS}",
            marks=pytest.mark.slow,
        ),
        pytest.param(  # a data loader that hangs
            {"site": "step", "kind": "slow", "rank": 1, "seconds": 1000},
            f"rank 1 is missing: it is in no collective, {IN_FAULT}, in step 18, "
            f"waiting for data; {WAITS}",
            marks=pytest.mark.slow,
        ),
        pytest.param(  # while both ranks save in the background
            {"site": "checkpoint.shards", "kind": "stop", "rank": 1},
            rf"rank 1 is missing: it is stopped \(SIGSTOP\) in step \d+, [a-z ]+; {WAITS}",
            marks=pytest.mark.slow,
        ),
        pytest.param(  # the parent of the watchdog
            {"site": "gradients", "kind": "stop", "rank": 0},
            rf"rank 0 is missing: it is stopped \(SIGSTOP\) in step 18, updating the parameters; "
            f"{WAITS}",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["stopped", "interpreter lock", "loader", "saving", "first rank"],
)
def test_watchdog_missing_rank_is_named_and_the_run_ends(
    fault: dict[str, object],
    sentence: str,
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    completed = run_weft([*arguments, *WATCHED, *faults(**fault, passing=18)], tmp_path)
    assert completed.returncode == HUNG, completed.stderr
    check_sentence(
        sentence,
        tmp_path,
        completed.stderr,
        (tmp_path / "run/logs/fault-0.happened").stat().st_mtime,
    )
    assert f"log: {tmp_path}/run/logs/rank-{fault['rank']}.log" in completed.stderr
    # After the run, `weft hang` reads the evidence of the watchdog.
    capsys.readouterr()
    assert main(["hang", str(tmp_path / "run")]) == 0
    output = capsys.readouterr().out
    assert re.match(sentence, output), output
    assert (
        f"by the watchdog of {socket.gethostname()}: 2 of 2 ranks; the watchdog ended the run"
        in output
    )
    assert main(["hang", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["missing"] == [fault["rank"]]


MISMATCH = """
import time
import torch, torch.distributed as dist
from weft.optim.optimizer import OPTIMIZERS

def build(groups, section):
    optimizer, steps = OPTIMIZERS["adamw"](groups, section), []
    def before(*arguments):
        steps.append(None)
        if len(steps) == 30 and dist.get_rank() == 1:
            print("now", time.time(), flush=True)
            dist.broadcast(torch.zeros(3), 0)
    optimizer.register_step_pre_hook(before)
    return optimizer
"""


@pytest.mark.slow
def test_watchdog_mismatched_collectives_are_named(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MISMATCH)
    completed = run([*arguments, *WATCHED, "--optim.name", "mine:build"], tmp_path)
    assert completed.returncode == HUNG, completed.stderr
    log = (tmp_path / "run/logs/rank-1.log").read_text()
    since = re.search(r"now (\S+)", log)
    assert since is not None
    one = r"rank 0 waits in \w+ no\. \d+ of dp_shard \(ranks 0, 1\) \(step \d+, [a-z ]+\)"
    other = r"rank 1 waits in broadcast no\. \d+ of dp_shard \(ranks 0, 1\) \(step 30, updating"
    check_sentence(
        f"the ranks call different collectives: {one}, {other}",
        tmp_path,
        completed.stderr,
        float(since[1]),
    )


@pytest.mark.slow
def test_watchdog_in_a_pipeline_names_the_stopped_rank(
    arguments: list[str], tmp_path: Path
) -> None:
    """gloo does not record send and recv; stacks show which rank waits there."""
    fault = faults(site="step", kind="stop", rank=0, passing=30)
    pipeline = ["--parallel.pp", "2", "--model.tied_embeddings", "false"]
    command = [*arguments, *WATCHED, *fault, *pipeline]
    completed = run(command, tmp_path)
    assert completed.returncode == HUNG, completed.stderr
    assert "rank 0 is missing: it is stopped (SIGSTOP) in step 30" in completed.stderr
    assert "rank 1 is missing" not in completed.stderr
    # The fault happens once; the same command resumes.
    completed = run([*command, "--train.steps", "40"], tmp_path)
    assert completed.returncode == 0, completed.stderr


@pytest.mark.slow
def test_watchdog_inside_torchrun_ends_the_run(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun shows the sentence, and its status is 1."""
    command = [*TORCHRUN, "-m", "weft", *arguments[len(WEFT) :], *WATCHED]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    process = start_and_wait(command, tmp_path, 30)
    os.kill(workers(process)[1], signal.SIGSTOP)
    assert process.wait(timeout=30 + LIMIT) == FAILED
    text = (tmp_path / "run/logs/rank-1.log").read_text()
    assert "watchdog: rank 1 is missing: it is stopped (SIGSTOP) in step" in text


@pytest.mark.slow
def test_watchdog_suspended_and_continued_ranks_are_not_late(
    arguments: list[str], tmp_path: Path
) -> None:
    """A batch system suspends all ranks and the watchdog, one after another."""
    process = start_and_wait([*arguments, *WATCHED], tmp_path, 30)
    ranks = workers(process)
    (watchdog,) = workers_of(ranks[0])
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(0.4)  # the watchdog sees that the ranks are stopped
    os.kill(watchdog, signal.SIGSTOP)
    time.sleep(2 * LIMIT)
    os.kill(watchdog, signal.SIGCONT)
    time.sleep(0.4)
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    wait_for(tmp_path / "run", len(losses(tmp_path / "run")) + 20)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == REQUEUE


def workers_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# --------------------------------------------------------------------------- parts


def rank_state(rank: int, **changes: object) -> RankState:
    """Return the state of a rank that waits in all_reduce no. 42."""
    values = {
        "step": 7,
        "phase": "forward_backward",
        "seconds": 5.0,
        "state": "S (sleeping)",
        "channel": "futex_wait",
        "calls": [OpenCollective("all ranks", 42, "all_reduce", [[8]])],
        "stack": ['File "/site/torch/distributed/distributed_c10d.py", line 3 in all_reduce'],
    }
    return RankState(rank, **(values | changes))  # type: ignore[arg-type]


HERE = ['File "/home/me/mine/loader.py", line 12 in __next__']
VERDICTS = [
    (
        [rank_state(0), rank_state(1, state="T (stopped)", calls=None, stack=[]), rank_state(2)],
        [1],
        "rank 1 is missing: it is stopped (SIGSTOP) in step 7, forward and backward; "
        "the others wait in all_reduce no. 42 of all ranks",
    ),
    (
        [rank_state(0), rank_state(1, state="R (running)", calls=None, cpu_share=0.04)],
        [1],
        "rank 1 is missing: it does not answer: it is runnable, but with 4% of a CPU: the machine "
        "is overloaded, at torch/distributed/distributed_c10d.py:3 in all_reduce, in step 7, "
        "forward and backward; the other waits in all_reduce no. 42 of all ranks",
    ),
    (
        [rank_state(0), rank_state(1, state="R (running)", calls=None, cpu_share=0.97, stack=[])],
        [1],
        "rank 1 is missing: it does not answer: a thread holds the interpreter lock in step 7, "
        "forward and backward; the other waits in all_reduce no. 42 of all ranks",
    ),
    (
        [rank_state(0), rank_state(1, state="", calls=None, stack=[])],
        [1],
        "rank 1 is missing: it has ended, in step 7, forward and backward; "
        "the other waits in all_reduce no. 42 of all ranks",
    ),
    (
        [rank_state(0, state="D (disk sleep)", channel="nfs_wait", phase="checkpoint", stack=[])],
        [0],
        "rank 0 is missing: it waits in the kernel for a disk or device (nfs_wait) in step 7, "
        "saving a checkpoint",
    ),
    (
        [rank_state(0, calls=[], stack=HERE, phase="data"), rank_state(1)],
        [0],
        "rank 0 is missing: it is in no collective, at me/mine/loader.py:12 in __next__, "
        "in step 7, waiting for data; the other waits in all_reduce no. 42 of all ranks",
    ),
    (
        [
            rank_state(0),
            rank_state(1),
            rank_state(2, calls=[OpenCollective("all ranks", 42, "broadcast", [[8]])]),
        ],
        [2],
        "the ranks call different collectives: "
        "rank 0 waits in all_reduce no. 42 of all ranks (step 7, forward and backward), "
        "rank 1 waits in all_reduce no. 42 of all ranks (step 7, forward and backward), "
        "rank 2 waits in broadcast no. 42 of all ranks (step 7, forward and backward)",
    ),
]


@pytest.mark.parametrize(("ranks", "missing", "sentence"), VERDICTS)
def test_verdict_names_the_missing_ranks(
    ranks: list[RankState], missing: list[int], sentence: str
) -> None:
    assert diagnose_hang(ranks, len(ranks)) == (missing, sentence)


def test_verdict_missing_rank_on_another_host_is_not_named() -> None:
    """A host whose ranks all wait names no missing rank, even without a recorded call."""
    waits = rank_state(1, calls=[])
    missing, sentence = diagnose_hang([rank_state(0), waits], 4)
    assert missing == []
    assert "every rank of this host waits" in sentence
    assert "the missing rank is on another host" in sentence
    assert "no rank is missing" in diagnose_hang([rank_state(0), waits], 2)[1]


def test_step_limit_depends_on_the_measured_step() -> None:
    assert step_limit(5.0, 100.0, 10) == 5.0
    assert step_limit(None, 0.1, 10) == 60.0
    # On a GPU the host may normally wait for ten steps at once.
    assert step_limit(None, 30.0, 10) == 600.0


def read_heartbeats() -> list[tuple[int, float, str]]:
    """Return the heartbeats that other processes read after some calls of `beat`."""
    contact = start_heartbeat(0, 5.0, 10)
    received = []

    def read_heartbeat() -> None:
        line = Path(f"/proc/self/fd/{contact.heartbeat}").read_text().split()
        assert 0 <= time.monotonic() - float(line[0]) < 60
        received.append((int(line[1]), float(line[2]), line[3]))

    read_heartbeat()
    beat("data", 7)
    read_heartbeat()
    record_step_seconds(0.1)
    beat("forward_backward")
    read_heartbeat()
    beat("checkpoint")
    read_heartbeat()
    beat("data", 8)
    read_heartbeat()
    return received


def test_beat_writes_step_limit_and_phase() -> None:
    (received,) = run_ranks(read_heartbeats, 1)
    assert received == [
        (0, 600.0, "start"),
        (7, 600.0, "data"),  # the first step may compile
        (7, 5.0, "forward_backward"),
        (7, 600.0, "checkpoint"),
        (8, 5.0, "data"),
    ]


def record_watched_steps() -> list[bool]:
    contact = start_heartbeat(0, 5.0, 10)
    record_step_seconds(0.1)
    probe = RankProbe(Contact(*contact))
    late = []
    for seconds in (0.0, 0.2, 4.9, 0.2):
        beat("data", 1) if not late else None
        late.append(probe.is_late(seconds))
    beat("data", 2)
    late.append(probe.is_late(100.0))  # a new line is never late
    return late


def test_watched_only_observed_time_counts() -> None:
    assert run_ranks(record_watched_steps, 1) == [[False, False, True, True, False]]


# Each holds the interpreter lock: one sleeps, the other computes.
LOCKED = {
    "sleeps": "ctypes.PyDLL(None).sleep(100); time.sleep(100)",  # a signal ends the first
    "computes": "re.match('(a|a)*b', 'a' * 60)",
}
LOCKING_RANK = """
import ctypes, json, os, re, sys, time
from weft.monitor.heartbeat import start_heartbeat
contact = start_heartbeat(0, 5.0, 10)
if sys.argv[2:]:
    os.sched_setaffinity(0, {int(sys.argv[2])})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
print(json.dumps(contact), flush=True)
exec(sys.argv[1])
"""
BUSY = """
import os, sys
parent = os.getppid()
os.sched_setaffinity(0, {int(sys.argv[1])})
while os.getppid() == parent:
    pass
"""


@pytest.mark.system
@pytest.mark.parametrize(
    ("lock", "is_starved", "expected"),
    [
        ("sleeps", False, "a thread holds the interpreter lock"),
        ("computes", True, "% of a CPU: the machine is overloaded"),
    ],
)
def test_rank_that_starves_is_not_said_to_hold_the_interpreter_lock(
    lock: str, is_starved: bool, expected: str
) -> None:
    """Linux runs a thread of the class IDLE only when the CPU has nothing else."""
    cpu = min(os.sched_getaffinity(0))
    words = [LOCKING_RANK, LOCKED[lock], *([str(cpu)] if is_starved else [])]
    rank = subprocess.Popen([sys.executable, "-c", *words], stdout=subprocess.PIPE)
    other = subprocess.Popen([sys.executable, "-c", BUSY if is_starved else "", str(cpu)])
    try:
        assert rank.stdout is not None
        probe = RankProbe(Contact(*json.loads(rank.stdout.readline())))
        probe.read_heartbeat()
        time.sleep(1.0)  # until both programs compute
        (state,) = collect_evidence([probe])
        missing, sentence = diagnose_hang([state], 1)
    finally:
        for process in (rank, other):
            process.kill()
            process.communicate()
    assert (missing, state.calls) == ([0], None)
    assert expected in sentence, state


def test_main_stack_is_read_from_faulthandler_output() -> None:
    text = (
        'Thread 0x01 (most recent call first):\n  File "other.py", line 1 in f\n\n'
        'Current thread 0x02 (most recent call first):\n  File "a b.py", line 3 in g\n'
        '  File "x.py", line 4 in <module>\n'
    )
    assert parse_main_stack(text) == [
        'File "a b.py", line 3 in g',
        'File "x.py", line 4 in <module>',
    ]


def test_stack_of_paired_passes_is_that_of_the_pass_that_has_the_turn(tmp_path: Path) -> None:
    stacks: list[str] = []

    def dump() -> None:
        with open(tmp_path / "stacks", "w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks.append(file.read())

    def exchange_and_dump() -> None:
        for hand_over in during_exchange:
            hand_over()
        dump()

    def backward() -> None:
        main_thread = threading.main_thread().ident or 0
        while sys._current_frames()[main_thread].f_code.co_name != "hand_over":
            time.sleep(0.01)
        dump()

    run_in_turns(exchange_and_dump, backward)
    waits, computes = map(parse_main_stack, stacks)
    assert waits[0].endswith("in dump")
    assert waits[1].endswith("in backward")
    assert [frame.rpartition(" in ")[2] for frame in computes[:2]] == ["dump", "exchange_and_dump"]
