"""The run that owns a directory of checkpoints outside its run directory.

A copy of a run directory names the same ``checkpoint.dir`` as its original.  Two runs in one
directory would delete each other's checkpoints, so the directory has a file that names its run.
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

from weft.checkpoint.storage import is_remote, open_directory
from weft.config.errors import ConfigError
from weft.config.files import replace_text
from weft.config.reader import read_job
from weft.config.run_paths import JOB_FILE

OWNER_FILE = "run.json"  # {"run_dir": PATH}


def is_inside(home: Path, run_dir: Path) -> bool:
    """Return True if a directory of checkpoints is really in the run directory."""
    if is_remote(home):
        return False
    return Path(os.path.realpath(home)).is_relative_to(os.path.realpath(run_dir))


def write_owner(home: Path, run_dir: Path) -> None:
    """Record the run that owns a directory of checkpoints outside its run directory."""
    if is_inside(home, run_dir) or _read_owner(home) == run_dir.absolute():
        return
    content = json.dumps({"run_dir": str(run_dir.absolute())}) + "\n"
    if is_remote(home):
        (home / OWNER_FILE).write_text(content)
    else:
        home.mkdir(parents=True, exist_ok=True)
        replace_text(home / OWNER_FILE, content)


def owner_errors(home: Path, run_dir: Path) -> list[ConfigError]:
    """Return an error if another run directory has its checkpoints in ``home``.

    A run that was moved has no other directory, so it keeps its checkpoints.
    """
    if is_inside(home, run_dir):
        return []
    owner = _read_owner(home)
    try:
        if owner is None or not (owner / JOB_FILE).is_file() or _is_same(owner, run_dir):
            return []
    except OSError:  # of another host, or not readable
        return []
    job, _, errors = read_job(str(owner / JOB_FILE))
    section = job.checkpoint
    theirs = owner / "checkpoints" if section.is_in_run_dir else open_directory(section.dir)
    if errors or is_remote(theirs) != is_remote(home) or not _is_same(theirs, home):
        return []
    rule = f"has the checkpoints of the run in {owner}, which this run would delete"
    copy = "copy the objects" if is_remote(home) else f"{shlex.join(['cp', '-r', str(home)])} NEW"
    remedy = (
        f"name another directory; to continue from these checkpoints, first {copy}. The key is "
    )
    remedy += f"--checkpoint.dir NEW, or dir in [checkpoint] of {run_dir / JOB_FILE}"
    return [ConfigError("checkpoint.dir", str(home), rule, remedy)]


def _is_same(first: Path, second: Path) -> bool:
    """Return True if two paths are one directory."""
    if is_remote(first) or not (first.exists() and second.exists()):
        return str(first) == str(second)
    return first.samefile(second)


def _read_owner(home: Path) -> Path | None:
    try:
        return Path(json.loads((home / OWNER_FILE).read_text("utf-8"))["run_dir"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
