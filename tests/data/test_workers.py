"""Worker processes: reports, errors and deaths."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from weft.config.errors import ConfigError, InvalidConfig, WeftError
from weft.data.workers import Advance, parallel_map


def double(number: int, advance: Advance) -> tuple[int, int]:
    advance(number)
    return 2 * number, os.getpid()


def fail_at_3(number: int, advance: Advance) -> int:
    if number == 3:
        raise InvalidConfig(
            [ConfigError("data.path", "x", "is the third"), ConfigError("a", 1, "and more")]
        )
    for _ in range(600):
        time.sleep(0.1)  # until the worker is stopped
        advance(1)
    return number


def kill_worker(number: int, advance: Advance) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_workers_process_each_item_once_and_report_it() -> None:
    for processes in (1, 2):
        counts: list[int] = []
        actual = parallel_map(double, range(20), counts.append, processes)
        assert [result for result, _ in actual] == [2 * n for n in range(20)]
        assert sum(counts) == sum(range(20))
        assert {pid == os.getpid() for _, pid in actual} == {processes == 1}


def test_workers_refusal_stops_the_others_and_keeps_its_problems() -> None:
    start_time = time.monotonic()
    with pytest.raises(InvalidConfig) as caught:
        parallel_map(fail_at_3, [1, 3], lambda size: None, 2)
    assert [error.rule for error in caught.value.errors] == ["is the third", "and more"]
    assert time.monotonic() - start_time < 50


def test_workers_killed_process_is_reported() -> None:
    with pytest.raises(WeftError, match="was killed, possibly out of memory"):
        parallel_map(kill_worker, [1, 2], lambda size: None, 2)


class Slow(list[int]):
    """A list that iterates so slowly that a worker is dead before the last item."""

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            yield number
            time.sleep(1)


def test_workers_process_killed_during_submission_is_reported() -> None:
    with pytest.raises(WeftError, match="was killed, possibly out of memory"):
        parallel_map(kill_worker, Slow(range(30)), lambda size: None, 2)
