"""The run that owns a directory of checkpoints outside its run directory.

A copy of a run directory names the same ``checkpoint.dir`` as its original.  Two runs in one
directory would delete each other's checkpoints, so the directory has a file that names its run.

Each node of a run may have a run directory of its own, and all save in one ``checkpoint.dir``.  The
first of them owns it.  A run directory that owns one has a file with a random id, so that a copy
differs from the directory of another node.
"""

from __future__ import annotations

import json
import os
import shlex
import uuid
from contextlib import suppress
from pathlib import Path

from weft.config.errors import ConfigError
from weft.config.files import replace_text
from weft.config.reader import read_job
from weft.config.run_paths import JOB_FILE
from weft.config.storage import is_remote, open_directory

OWNER_FILE = "run.json"  # {"run_dir": PATH, "id": ID}
ID_FILE = ".run-id"  # in the run directory


def is_inside(home: Path, run_dir: Path) -> bool:
    """Return True if a directory of checkpoints is really in the run directory."""
    if is_remote(home):
        return False
    return Path(os.path.realpath(home)).is_relative_to(os.path.realpath(run_dir))


def write_owner(home: Path, run_dir: Path, has_nodes: bool = False) -> None:
    """Record the run that owns a directory of checkpoints outside its run directory.

    ``has_nodes``: the run has several nodes, whose run directories may differ.
    """
    if is_inside(home, run_dir):
        return
    owner, _ = _read_owner(home)
    if owner == run_dir.absolute() or (has_nodes and owner is not None and _is_run(owner)):
        return
    if not (run_id := _read_id(run_dir)):
        run_id = uuid.uuid4().hex
        run_dir.mkdir(parents=True, exist_ok=True)
        replace_text(run_dir / ID_FILE, run_id)
    content = json.dumps({"run_dir": str(run_dir.absolute()), "id": run_id}) + "\n"
    if is_remote(home):
        (home / OWNER_FILE).write_text(content)
    else:
        home.mkdir(parents=True, exist_ok=True)
        replace_text(home / OWNER_FILE, content)


def owner_errors(home: Path, run_dir: Path, has_nodes: bool = False) -> list[ConfigError]:
    """Return an error if another run directory has its checkpoints in ``home``.

    A run that was moved has no other directory, so it keeps its checkpoints.  ``has_nodes``: see
    `write_owner`.
    """
    if is_inside(home, run_dir):
        return []
    owner, run_id = _read_owner(home)
    if owner is None or not _is_run(owner) or _is_same(owner, run_dir):
        return []
    if has_nodes and _read_id(run_dir) != run_id:
        return []  # the directory of another node
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
    with suppress(OSError):  # of another host, or not readable
        if not is_remote(first) and first.exists() and second.exists():
            return first.samefile(second)
    return str(first) == str(second)


def _is_run(path: Path) -> bool:
    try:
        return (path / JOB_FILE).is_file()
    except OSError:  # of another host, or not readable
        return False


def _read_owner(home: Path) -> tuple[Path | None, str]:
    """Return the run directory that owns ``home``, and its id."""
    try:
        owner = json.loads((home / OWNER_FILE).read_text("utf-8"))
        return Path(owner["run_dir"]), str(owner["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, ""


def _read_id(run_dir: Path) -> str:
    try:
        return (run_dir / ID_FILE).read_text("utf-8")
    except (OSError, ValueError):
        return ""
