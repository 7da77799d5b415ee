"""Keep recordings of steps and forecasts on disk, so that a second plan is fast.

Both depend on the plan, on weft and on torch; a forecast also on the machine and the device.  The
name of a file is a hash of all that.  A job that names code or a schedule file of the user's is
never cached: that code, and what it imports, may change.  Tests and library calls do not use the
cache unless they ask for it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pickle
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from weft.config.files import replace_bytes, user_cache_dir
from weft.config.schema import flatten
from weft.planning.plan import Plan
from weft.version import PACKAGE_DIR

T = TypeVar("T")

# Files that are kept; a recording has one to three megabytes, a forecast some 50 kilobytes.
MAX_FILES = 64
# Keys that do not change what a rank computes in a step.
UNRELATED = ("run.", "checkpoint.", "monitor.", "resilience.", "launch.", "profile.")
RELATED = ("monitor.attention_logits",)  # the exceptions


def cache_dir() -> Path:
    """Return the directory of the recordings."""
    return user_cache_dir() / "traces"


def load_or_compute(compute: Callable[[], T], plans: tuple[Plan, ...], *others: object) -> T:
    """Return the result of ``compute``, which depends on arguments and code only.

    A damaged file counts as missing.  If the directory cannot be written, nothing is cached.
    """
    if any(_has_files_of_user(plan) for plan in plans):
        return compute()
    name = _hash(plans, others)
    path = cache_dir() / f"{name}.pickle"
    try:
        if path.stat().st_uid == os.getuid():  # a pickle is code: only one's own is read
            known: tuple[str, T] = pickle.loads(path.read_bytes())
            if known[0] == name:
                os.utime(path)
                return known[1]
    except Exception:  # a damaged pickle raises almost any exception
        pass
    result = compute()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_bytes(path, pickle.dumps((name, result)))
        for old in sorted(path.parent.glob("*.pickle"), key=os.path.getmtime)[:-MAX_FILES]:
            old.unlink(missing_ok=True)
    except OSError:
        pass
    return result


def _has_files_of_user(plan: Plan) -> bool:
    """Return True if a key names an attribute of a module, or a schedule file."""
    has_file = plan.pipeline is not None and plan.pipeline.has_schedule_file
    return has_file or any(
        isinstance(value, str) and ":" in value
        for key, value in flatten(plan.job).items()
        if not key.startswith((*UNRELATED, "data.", "model.path", "lora.path"))
    )


def _hash(plans: tuple[Plan, ...], others: tuple[object, ...]) -> str:
    """Return a hash of all that a result depends on."""
    content: list[Any] = [
        repr(others),
        torch.__version__,
        platform.python_version(),
        _hash_of_weft(),
    ]
    for plan in plans:
        values = json.loads(plan.to_json())
        for name in ("run_dir", "warnings", "num_steps"):
            values.pop(name)
        keys = flatten(plan.job).items()
        job = {k: v for k, v in keys if k in RELATED or not k.startswith(UNRELATED)}
        content += [values, job]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@functools.cache
def _hash_of_weft() -> str:
    """Return a hash of weft's source code."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE_DIR.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
