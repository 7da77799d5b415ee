"""Requests to clusters for tests, and fake tools that record their calls."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from weft.config.errors import ConfigError
from weft.config.reader import read_job
from weft.submission.job_request import JobRequest
from weft.submission.submit import node_overrides


def request(
    *overrides: tuple[str, str],
    launch: Mapping[str, str] | None = None,
    recipe: str = "demo",
    nodes: tuple[int, int] = (1, 1),
    devices: int = 0,
) -> JobRequest:
    """Build a request from command-line words, and from keys of the section ``launch``."""
    all_overrides = [*overrides, *((f"launch.{name}", v) for name, v in (launch or {}).items())]
    if devices and not any(key == "run.cluster" for key, _ in overrides):
        all_overrides.append(("run.cluster", f"{nodes[1]}x{devices}xH100"))
    job, _, errors = read_job(recipe, all_overrides)
    assert not errors
    directory = Path("/fsx/small-run")
    requested = str(nodes[1]) if nodes[0] == nodes[1] else f"{nodes[0]}:{nodes[1]}"
    pairs = node_overrides(all_overrides, directory, requested, "auto")
    return JobRequest("small-run", recipe, pairs, job, nodes, devices, directory)


def format_errors(errors: list[ConfigError]) -> str:
    return "\n".join(str(error) for error in errors)


def own_recipe(directory: Path) -> str:
    """Write a user recipe that extends another recipe, so that copying one file is not enough."""
    path = directory / "mine.toml"
    path.write_text(
        'extends = "demo"\n[train]\nsteps = 7\n[run]\ndir = "here"\n[launch]\nimage = "i"\n'
    )
    return str(path)


def fake_tool(directory: Path, monkeypatch: pytest.MonkeyPatch, name: str, body: str) -> Path:
    """Put a script into $PATH that records its arguments and runs ``body``."""
    calls = directory / "calls"
    (directory / "bin").mkdir(exist_ok=True)
    script = directory / "bin" / name
    script.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{body}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}/bin:/usr/bin:/bin")
    return calls
