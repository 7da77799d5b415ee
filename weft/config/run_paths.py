"""Paths in the ``job.toml`` of a run, which may be copied or moved.

The directory that has the file is the run directory, whatever its name.  So ``run.dir`` in the file
is ``auto``, and a path in the run directory is stored relative to it: ``./tokenizer.json``.  All
other paths are absolute.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.config.schema import Job, replace

JOB_FILE = "job.toml"

# Keys whose values are paths, or names that do not begin with './'.
PATH_KEYS = {
    "model": ("path",),
    "lora": ("path",),
    "data": ("path", "mixture", "validation_path", "tokenizer", "chat_template", "cache_dir"),
    "pipeline": ("schedule",),
    "compile": ("cache_dir",),
    "checkpoint": ("dir", "local_dir"),
}
# A run directory has one of these, and its job.toml, if a user removed sections from that file.
RUN_FILES = ("metrics.jsonl", "checkpoints")


def find_paths(job: Job) -> Iterator[tuple[str, str]]:
    """Yield key and value of each path in a job that is not a URL."""
    defaults = Job()
    for section, names in PATH_KEYS.items():
        for name in names:
            value = getattr(getattr(job, section), name)
            if value == getattr(getattr(defaults, section), name):
                continue  # a word, such as auto
            for path in value if isinstance(value, Mapping) else (value,):
                if path and "://" not in path:
                    yield f"{section}.{name}", path


def absolute_dir(path: Path) -> Path:
    """Return an absolute path, as the user spelled it if it has no '..'."""
    return Path(os.path.realpath(path)) if ".." in path.parts else path.absolute()


def run_directory(path: Path) -> Path:
    """Return the run directory that a user named: the directory, or its job.toml."""
    return path.parent if path.name == JOB_FILE and path.is_file() else path


def is_run_file(path: Path, tree: Mapping[str, Any], sections: frozenset[str]) -> bool:
    """Return True if a file is the ``job.toml`` of a run, not a recipe of that name.

    Args:
        path: the file.
        tree: its content.
        sections: names of all sections; a run writes all of them.
    """
    if path.name != JOB_FILE or "extends" in tree:
        return False
    return sections <= {*tree} or any((path.parent / name).exists() for name in RUN_FILES)


def resolve_run_paths(tree: dict[str, dict[str, Any]], run_dir: Path) -> None:
    """Make the paths of a run's ``job.toml`` absolute, in place."""

    def resolve(value: Any) -> Any:
        is_inside = isinstance(value, str) and value.startswith("./")
        return os.path.normpath(run_dir / value) if is_inside else value

    for name, keys in PATH_KEYS.items():
        section = tree.get(name)
        if not isinstance(section, dict):
            continue
        section |= {key: _map_paths(section[key], resolve) for key in keys if key in section}


def portable(job: Job, run_dir: Path) -> Job:
    """Return a job as the ``job.toml`` of a run directory stores it."""
    real = os.path.realpath(run_dir)

    def shorten(value: Any) -> Any:
        if not isinstance(value, str) or not os.path.isabs(value):
            return value
        for path, above in ((value, run_dir.absolute()), (os.path.realpath(value), real)):
            if Path(path).is_relative_to(above):
                return f"./{Path(path).relative_to(above)}"
        return value

    changes: dict[str, dict[str, Any]] = {"run": {"dir": "auto"}}
    for name, keys in PATH_KEYS.items():
        section = getattr(job, name)
        changes[name] = {key: _map_paths(getattr(section, key), shorten) for key in keys}
    return replace(job, **changes)


def _map_paths(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to a path, or to the paths that are the keys of a table."""
    if isinstance(value, Mapping):
        return {function(path): weight for path, weight in value.items()}
    return function(value)
