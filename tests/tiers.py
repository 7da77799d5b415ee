"""Tier and processor time of every test: a plugin that tests/conftest.py loads.

A test belongs to the first of these tiers that fits what it starts:

    unit    no process other than pytest's
    ranks   worlds of forked ranks (`tests/harness.py`, and those of ``weft verify``)
    system  any other process: weft's own command, torchrun, Slurm, a server, a browser

The tier is derived from the code that a test and its fixtures reach in ``tests/``.  Code of weft
is not analyzed, so a test that starts a process there is marked, ``@pytest.mark.system``.
A marked test, and each test that ``-m unit`` selects, fails at the line that starts more than its
tier allows.  In other runs a test counts for the tier of what it has started.

Processor time is that of the test's process, of its finished child processes, and of its worlds.
Unlike wall time, processor time hardly depends on the load of the machine.
"""

from __future__ import annotations

import json
import multiprocessing.util
import os
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import harness

TIERS = ("unit", "ranks", "system")
# The tier that each audit event of the interpreter or of this module needs.
EVENTS = {
    "tests.world": "ranks",
    "os.exec": "system",
    "os.fork": "ranks",  # as `weft verify` makes its ranks
    "os.forkpty": "system",
    "os.posix_spawn": "system",
    "os.system": "system",
    "subprocess.Popen": "system",
}
# A test whose code uses one of these names starts a process.
STARTERS = {"Popen", "fork", "posix_spawn", "subprocess"}
WEFT_STARTERS = {
    ("weft.comparison.experiment", "compare"): "system",
    ("tests.fuzz", "fuzz"): "ranks",
    ("weft.supervision.local_ranks", "run_ranks"): "ranks",
    ("weft.verification.verify", "verify"): "ranks",
    ("weft.estimate.search", "search"): "system",
}
FACTS = ("git", "uname")  # commands that take milliseconds and do not count for the tier
SHOWN = 15  # slowest tests in the summary


DERIVED = pytest.StashKey[bool]()


# --------------------------------------------------------------------------- derived tier


def derive_tier(functions: Iterable[Callable[..., Any]]) -> str:
    """Return the tier of the code that test functions reach."""
    visited: set[object] = set()
    result = "unit"
    stack: list[Any] = list(functions)
    while stack:
        function = stack.pop()
        function = getattr(function, "__wrapped__", function)
        if not isinstance(function, types.FunctionType) or function in visited:
            continue
        visited.add(function)
        for name, value in _reached(function):
            if name in STARTERS or (
                isinstance(value, types.ModuleType) and (value.__name__ in STARTERS)
            ):
                return "system"
            module = str(getattr(value, "__module__", ""))
            if value is harness.run_ranks:
                result = "ranks"
            elif (module, name) in WEFT_STARTERS:
                result = max(result, WEFT_STARTERS[module, name], key=TIERS.index)
            elif module.startswith("tests."):
                members = vars(value).values() if isinstance(value, type) else [value]
                stack += (getattr(member, "__func__", member) for member in members)
    return result


def _reached(function: types.FunctionType) -> Iterable[tuple[str, Any]]:
    """Return every name that a function uses, with its value in the module."""
    names: set[str] = set()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        names |= set(code.co_names)
        codes += (const for const in code.co_consts if isinstance(const, types.CodeType))
    for name in names:
        value = function.__globals__.get(name)
        yield name, value
        if isinstance(value, types.ModuleType) and value.__name__.startswith("tests."):
            yield from ((name, vars(value).get(name)) for name in names)


def _fixtures(item: pytest.Function) -> list[Callable[..., Any]]:
    """Return the functions of a test's fixtures, except autouse fixtures."""
    info = item._fixtureinfo
    automatic = set(item.session._fixturemanager._getautousenames(item))
    return [
        definition.func
        for name, definitions in info.name2fixturedefs.items()
        if name not in automatic
        for definition in definitions
    ]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test with its tier, and begin with the widest tier.

    Tests of processes wait most, and other tests fill that time.  No long test remains for the end.
    """
    derived: dict[Any, str] = {}
    for item in items:
        assert isinstance(item, pytest.Function)
        if any(item.get_closest_marker(tier) for tier in TIERS):
            continue
        # Copies of a parametrized test share their functions.
        functions = (item.function, *_fixtures(item))
        if functions not in derived:
            derived[functions] = derive_tier(functions)
        item.add_marker(derived[functions])
        item.stash[DERIVED] = True
    items.sort(key=lambda item: TIERS.index(tier_of(item)), reverse=True)


def tier_of(item: pytest.Item) -> str:
    """Return the widest tier that a test is marked with."""
    return next(tier for tier in reversed(TIERS) if item.get_closest_marker(tier))


# --------------------------------------------------------------------------- started processes

_allowed = "system"  # while no test runs
_started = "unit"  # widest tier that the running test has used so far
_process = os.getpid()


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    needed = EVENTS.get(event)
    if needed is None or os.getpid() != _process:
        return
    if event == "subprocess.Popen" and arguments[0] in FACTS:
        return
    if event == "subprocess.Popen" and "tests.harness" in arguments[1]:
        needed = "ranks"  # the server of worlds
    global _started
    _started = max(_started, needed, key=TIERS.index)
    if TIERS.index(needed) > TIERS.index(_allowed):
        raise RuntimeError(
            f"a test of the tier {_allowed} starts a process ({event} {arguments[:2]}): "
            f"mark it with pytest.mark.{needed}"
        )


def _spawn(path: str, arguments: list[str], descriptors: list[int]) -> int:
    """Start a process of multiprocessing, whose call raises no audit event."""
    sys.audit("subprocess.Popen", path, arguments, None, None)
    return _spawnv_passfds(path, arguments, descriptors)


_spawnv_passfds = multiprocessing.util.spawnv_passfds


def pytest_configure(config: pytest.Config) -> None:
    multiprocessing.util.spawnv_passfds = _spawn
    sys.addaudithook(_audit)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Record(config))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    global _allowed, _started
    _started = "unit"
    derived = item.stash.get(DERIVED, False)
    if not derived or "unit" in item.config.getoption("markexpr"):
        _allowed = tier_of(item)
    try:
        return (yield)
    finally:
        _allowed = "system"


# --------------------------------------------------------------------------- cost

_start = 0.0


def _seconds() -> float:
    return harness.processor_seconds() + harness.world_seconds


def pytest_runtest_logstart() -> None:
    global _start
    _start = _seconds()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.when == "teardown":  # the last report sends the tier to the process that prints
        tier = max(tier_of(item), _started, key=TIERS.index)
        item.user_properties.append(("tier", tier))
        item.user_properties.append(("seconds", round(_seconds() - _start, 3)))


class Cost(NamedTuple):
    """Tier and processor seconds of a test."""

    tier: str
    seconds: float


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("processor_budget", "processor seconds of the default suite", default="0")
    parser.addoption("--record-durations", metavar="FILE", help="write every test's cost there")


class _Record:
    """Collect the costs of all tests, print a summary and write the requested file."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.costs: dict[str, Cost] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        result = dict(report.user_properties)
        if report.when == "teardown" and "seconds" in result:
            self.costs[report.nodeid] = Cost(str(result["tier"]), float(str(result["seconds"])))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        path = self.config.getoption("record_durations")
        if not path:
            return
        total = sum(cost.seconds for cost in self.costs.values())
        tiers: dict[str, list[float]] = {tier: [] for tier in TIERS}
        directories: dict[str, float] = defaultdict(float)
        for name, cost in self.costs.items():
            tiers[cost.tier].append(cost.seconds)
            directories["/".join(name.split("::")[0].split("/")[:2])] += cost.seconds
        slowest = sorted(self.costs.items(), key=lambda pair: -pair[1].seconds)
        write = terminalreporter.write_line
        terminalreporter.section("processor time")
        for tier, seconds in tiers.items():
            write(f"{tier:8}{len(seconds):6} tests {sum(seconds):8.1f} s")
        write(f"{'all':8}{len(self.costs):6} tests {total:8.1f} s; the slowest:")
        for name, cost in slowest[:SHOWN]:
            write(f"{cost.seconds:8.1f} s  {cost.tier:6}  {name}")
        budget = float(self.config.getini("processor_budget"))
        default_suite = self.config.getoption("markexpr") == "not slow"
        if default_suite and total > budget:
            write(
                f"OVER BUDGET: the default suite took {total:.0f} s of processor time; "
                f"processor_budget in pyproject.toml is {budget:.0f} s. Make tests cheaper, "
                "mark what is long as slow, or say in the commit why the budget grows.",
                red=True,
                bold=True,
            )
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "seconds": round(total, 1),
            "tiers": {tier: round(sum(seconds), 1) for tier, seconds in tiers.items()},
            "directories": {
                name: round(directory, 1) for name, directory in sorted(directories.items())
            },
            "tests": {name: cost._asdict() for name, cost in slowest},
        }
        file.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
