"""The tier of a test is derived from the processes it starts, and it cannot start more."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.small import gradients
from tests.tiers import derive_tier


def start_world() -> None:
    run_ranks(gradients, 2)


def start_world_at_second_hand() -> None:
    def inner() -> None:
        start_world()

    inner()


class Starts:
    def run(self) -> None:
        subprocess.run(["true"])


@pytest.mark.parametrize(
    ("function", "tier"),
    [
        (gradients, "unit"),
        (start_world, "ranks"),
        (start_world_at_second_hand, "ranks"),
        (lambda: start_world(), "ranks"),
        (lambda: Starts().run(), "system"),
        (lambda: [os.fork(), start_world()], "system"),
    ],
)
def test_derive_tier_of_a_function_follows_what_it_calls(
    function: Callable[[], object], tier: str
) -> None:
    assert derive_tier([function]) == tier


STARTERS: dict[str, Callable[[], Any]] = {
    "a command": lambda: subprocess.run(["true"]),
    "a shell": lambda: os.system("true"),
    "a fork": lambda: os.fork() or os._exit(0),
    "a pool": lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
    "a world": start_world,
}


@pytest.mark.unit
@pytest.mark.parametrize("name", STARTERS)
def test_unit_test_that_starts_a_process_fails(name: str) -> None:
    with pytest.raises(RuntimeError, match="a test of the tier unit starts a process"):
        STARTERS[name]()


@pytest.mark.slow
def test_costs_of_tests_are_written_by_tier(tmp_path: Path) -> None:
    """The file is the same in one process and with several xdist workers."""
    directory = Path(__file__).parent
    file = tmp_path / "costs.json"
    subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("--numprocesses", "1", "--record-durations", str(file)),
            str(directory / "test_covering.py"),
        ],
        cwd=directory.parent,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    text = json.loads(file.read_text())
    assert text["tiers"]["unit"] == text["seconds"]
    assert {cost["tier"] for cost in text["tests"].values()} == {"unit"}
    assert len(text["tests"]) == 3
