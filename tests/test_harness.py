"""The harness: results, the errors of failing worlds, and cleanup."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import harness
from tests.harness import ROOT, RankError, run_ranks

# --------------------------------------------------------------------------- rank functions


def total(start: int, *, factor: int = 1) -> tuple[int, int, torch.Tensor]:
    x = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), x * factor


def seeds_and_threads() -> tuple[float, int]:
    return torch.rand(()).item(), torch.get_num_threads()


def surroundings() -> tuple[str, str | None]:
    return os.getcwd(), os.environ.get("HARNESS_TEST")


def broken_arithmetic() -> None:
    raise ValueError("seven is not eight")


def fail_on_one() -> None:
    print(f"hello from {dist.get_rank()}")
    if dist.get_rank() == 1:
        broken_arithmetic()
    dist.all_reduce(torch.zeros(1))  # peers wait here


def wait_forever_on_one() -> None:
    if dist.get_rank() == 1:
        while True:
            time.sleep(0.01)
    dist.all_reduce(torch.zeros(1))


def die_on_two(mode: str) -> None:
    if dist.get_rank() == 2:
        print("last words")
        if mode == "exit":
            os._exit(7)
        os.kill(os.getpid(), getattr(signal, mode))
    for _ in range(1000):
        dist.all_reduce(torch.zeros(1))


def complain_of_a_dying_peer() -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        raise RuntimeError("connection reset by peer")
    time.sleep(0.03)
    os._exit(7)


def first_outlives_its_function() -> bool:
    pid = torch.tensor([os.getpid()])
    dist.broadcast(pid, src=0)
    if dist.get_rank() == 1:
        time.sleep(0.3)
    return is_running(int(pid))


def leave_processes_behind(directory: str) -> None:
    # One process stays in the rank's session, the other starts a new session.
    for new_session in (False, True):
        child = subprocess.Popen(["sleep", "600"], start_new_session=new_session)
        Path(directory, f"{os.getpid()}-{new_session}").write_text(str(child.pid))
    if dist.get_rank() == 0:
        raise RuntimeError("and then this")
    time.sleep(600)


def return_unpicklable() -> object:
    return lambda: None


def return_large() -> bytes:
    return bytes(5_000_000)


def leave_with_sys_exit() -> None:
    sys.exit("enough")


# --------------------------------------------------------------------------- results


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_run_ranks_all_reduce_adds_over_all_ranks(world_size: int) -> None:
    results = run_ranks(total, world_size, 10, factor=2)
    expected = 2 * sum(10 + rank for rank in range(world_size))
    assert [(rank, size, x.item()) for rank, size, x in results] == [
        (rank, world_size, expected) for rank in range(world_size)
    ]


def test_ranks_have_equal_seeds_and_one_thread() -> None:
    first, second = run_ranks(seeds_and_threads, 2)
    assert first == second
    assert first[1] == 1


def test_run_ranks_has_the_directory_and_environment_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HARNESS_TEST", "here")
    assert run_ranks(surroundings, 1) == [(str(tmp_path), "here")]


def test_run_ranks_large_result_comes_back() -> None:
    assert [len(result) for result in run_ranks(return_large, 2)] == [5_000_000] * 2


def test_worlds_start_quickly() -> None:
    run_ranks(total, 2, 0)  # starts the server if it is not running
    start = time.monotonic()
    for _ in range(10):
        run_ranks(total, 2, 0)
    assert (time.monotonic() - start) / 10 < 0.3 * 3  # three times, for a busy machine


# --------------------------------------------------------------------------- failures


def test_run_ranks_failing_rank_shows_its_error_and_output() -> None:
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(fail_on_one, 3)
    text = str(caught.value)
    assert caught.value.rank == 1
    assert text.startswith("rank 1 of 3 failed: ValueError: seven is not eight")
    assert "in broken_arithmetic" in text  # the rank's own traceback
    assert "hello from 1" in text
    assert "hello from 0" not in text
    assert "peer" not in text  # errors of other ranks are consequences
    assert time.monotonic() - start < 20  # the peers were not waited for


def test_run_ranks_timeout_shows_the_stack_of_every_rank() -> None:
    run_ranks(total, 1, 0)  # the server's start does not count for the timeout
    start = time.monotonic()
    with pytest.raises(RankError, match="the 2 ranks did not end within 1 s") as caught:
        run_ranks(wait_forever_on_one, 2, timeout=1)
    assert time.monotonic() - start < 10
    assert caught.value.rank is None
    first, second = str(caught.value).split("rank 1, innermost")
    assert "all_reduce" in first
    assert "wait_forever_on_one" in first
    assert "all_reduce" not in second
    assert "wait_forever_on_one" in second


def abort_in_thread() -> None:
    def abort_like_gloo() -> None:
        sys.stderr.write("terminate called\n  what():  the sizes differ\n")
        sys.stderr.flush()
        os.abort()

    threading.Thread(target=abort_like_gloo).start()
    time.sleep(60)


def test_run_ranks_crash_of_a_thread_shows_its_message_and_stack() -> None:
    with pytest.raises(RankError, match="was killed by SIGABRT") as caught:
        run_ranks(abort_in_thread, 1)
    text = str(caught.value)
    assert "what():  the sizes differ" in text
    assert "in abort_like_gloo" in text.partition("Fatal Python error")[2]


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("exit", "ended with 7"),
        ("SIGKILL", "was killed by SIGKILL"),
        ("SIGSEGV", "was killed by SIGSEGV"),
    ],
)
def test_run_ranks_dead_rank_is_named(mode: str, message: str) -> None:
    with pytest.raises(RankError, match=f"rank 2 of 4 {message}") as caught:
        run_ranks(die_on_two, 4, mode)
    assert caught.value.rank == 2
    # After SIGSEGV, the stack that faulthandler printed.
    assert ("in die_on_two" if mode == "SIGSEGV" else "last words") in str(caught.value)


def test_run_ranks_silent_death_precedes_the_error_of_a_peer() -> None:
    with pytest.raises(RankError, match="rank 1 of 2 ended with 7"):
        run_ranks(complain_of_a_dying_peer, 2)


def test_run_ranks_no_rank_exits_before_all_have_finished() -> None:
    assert run_ranks(first_outlives_its_function, 2) == [True, True]


@pytest.mark.parametrize(
    ("function", "message"),
    [(return_unpicklable, "pickle"), (leave_with_sys_exit, "SystemExit: enough")],
)
def test_run_ranks_unpicklable_result_or_exit_is_an_error(function: object, message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(function, 2)  # type: ignore[arg-type]


def test_run_ranks_local_function_is_refused() -> None:
    with pytest.raises(ValueError, match="top level"):
        run_ranks(lambda: None, 1)


def test_server_after_a_failure_runs_another_world() -> None:
    with pytest.raises(RankError):
        run_ranks(fail_on_one, 2)
    server = harness._current
    assert [rank for rank, _, _ in run_ranks(total, 2, 0)] == [0, 1]
    assert harness._current is server


@pytest.mark.slow
def test_server_outlives_the_thread_that_started_it() -> None:
    servers: list[harness._Server] = []

    def start() -> None:
        servers.append(harness._Server())
        assert "results" in servers[0].ask(harness.make_request(total, 1, 60, (0,), {}), 60)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    time.sleep(1.5)  # longer than the server takes to check its parent
    assert servers[0].process.poll() is None
    servers[0].close()


# --------------------------------------------------------------------------- cleanup


def wait_until_gone(pids: list[int], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while any(is_running(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(is_running(pid) for pid in pids)


def is_running(pid: int) -> bool:
    try:
        # The state follows the command's name in parentheses; a zombie counts as dead.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for_children(pid: int, number: int) -> list[int]:
    end = time.monotonic() + 60
    while len(children(pid)) != number and time.monotonic() < end:
        time.sleep(0.01)
    return children(pid)


def test_run_ranks_failed_world_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="and then this"):
        run_ranks(leave_processes_behind, 1, str(tmp_path))
    pids = [int(file.read_text()) for file in tmp_path.iterdir()]
    assert len(pids) == 2
    assert wait_until_gone(pids, seconds=0)
    assert harness._current is not None
    assert children(harness._current.process.pid) == []


@pytest.mark.slow  # tests/verification/test_verify.py has the same for the ranks of `weft verify`
def test_ranks_of_a_killed_parent_die(tmp_path: Path) -> None:
    program = "import time; from tests.harness import run_ranks; run_ranks(time.sleep, 2, 600)"
    above = [  # both at once: each starts its own server
        subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(tmp_path)},
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    servers = [wait_for_children(process.pid, 1)[0] for process in above]
    ranks = [wait_for_children(server, 2) for server in servers]
    assert [len(pids) for pids in ranks] == [2, 2]
    assert len(list(tmp_path.glob("weft-ranks-*"))) == 2

    above[0].kill()
    os.kill(servers[1], signal.SIGKILL)
    stderr = [process.communicate(timeout=30)[1] for process in above]
    assert wait_until_gone([*servers, *ranks[0], *ranks[1]])
    assert list(tmp_path.glob("weft-ranks-*")) == []  # no file remains
    assert b"the rank server died (exit status -9)" in stderr[1]
