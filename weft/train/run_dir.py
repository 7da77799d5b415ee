"""The folder of a run: who owns it, and what is written there about where it runs."""

from __future__ import annotations

import fcntl
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import weft
from weft.config.errors import ConfigError, InvalidConfig, WeftError
from weft.config.files import replace_text, write_json
from weft.plan.devices import GIB
from weft.plan.resolve import Plan
from weft.train.setup import detect_machine


@contextmanager
def owning(folder: Path, taken: ConfigError, shared: bool = False) -> Iterator[None]:
    """Hold a folder's lock: two processes that write into it would undo each other's work.

    The kernel frees it when the process ends, however that happens.

    Args:
        taken: what to say if another process holds it.
        shared: with others that hold it shared.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a+")
    except OSError as error:
        raise unwritable(folder, error) from error
    with file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InvalidConfig([taken]) from error
        yield


def unwritable(folder: Path, error: OSError) -> WeftError:
    """What to say of a folder that turned out not to take what was written."""
    return WeftError(f"{error.filename or folder}: cannot be written: {error.strerror}")


def write_plan(folder: Path, plan: Plan) -> None:
    """``plan.json`` and ``environment.json``: what was derived, and what it ran on."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / "plan.json", plan.to_json() + "\n")
    environment: dict[str, Any] = {
        "weft": weft.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "memory_gib": _memory_gib(plan.device),
        "command": sys.argv,
        "git": _git_commit(),
    }
    write_json(folder / "environment.json", environment, indent=2)


def _memory_gib(device: str) -> float | None:
    """Of one GPU, or of the host; None if there is no GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        return None
    return (detect_machine(device).memory_bytes or 0) / GIB


def _git_commit() -> str | None:
    """The commit of weft's own checkout ('-dirty' with changes), None where it is installed or
    there is no git."""
    folder = Path(weft.__file__).parent.parent
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None
