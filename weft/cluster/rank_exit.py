"""What a rank leaves for its launcher, and how it ends.

Nothing heavy is imported: ranks do this before anything else.
"""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

from weft.config.errors import WeftError
from weft.config.escaping import escaping_stream
from weft.config.files import describe_cause, read_json, write_json


def log_path(folder: Path, rank: int) -> Path:
    """Where rank ``rank`` of the run in ``folder`` writes what it prints."""
    return folder / "logs" / f"rank-{rank}.log"


def error_path(folder: Path, rank: int) -> Path:
    """Where a rank that fails says why, as JSON."""
    return folder / "logs" / f"rank-{rank}.error.json"


def redirect(folder: Path, rank: int) -> TextIO:
    """Send file descriptors 1 and 2 to the rank's log; the old stdout, to show progress on."""
    path = log_path(folder, rank)
    terminal = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace", buffering=1)

    def report(error: OSError) -> None:
        with suppress(OSError):
            cause = describe_cause(error)
            print(f"warning: {path} cannot be written: {cause}. Training continues", file=terminal)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        error_path(folder, rank).unlink(missing_ok=True)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        report(error)
        log = os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout, sys.stderr = (
        escaping_stream(
            io.TextIOWrapper(
                io.BufferedWriter(_RankLog(number, report)),
                "utf-8",
                "backslashreplace",
                line_buffering=True,
            )
        )
        for number in (1, 2)
    )
    now, host = time.strftime("%Y-%m-%d %H:%M:%S"), socket.gethostname()
    print(f"--- {now} rank {rank} on {host}, process {os.getpid()}", flush=True)
    return escaping_stream(terminal)


class _RankLog(io.FileIO):
    """A descriptor of a rank's log: text that it cannot take is lost, and reported once."""

    def __init__(self, number: int, report: Callable[[OSError], None]) -> None:
        super().__init__(number, "w", closefd=False)
        self._report: Callable[[OSError], None] | None = report

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            # A full disk is no reason to lose a run.
            if self._report is not None:
                self._report(error)
                self._report = None
            return len(memoryview(data).cast("B"))


def write_error(folder: Path, rank: int, error: BaseException, terminal: TextIO) -> None:
    """Leave the error for the launcher, and its traceback in the log."""
    text = "".join(traceback.format_exception(error))
    print(text, file=sys.stderr, flush=True)
    where = ", ".join(getattr(error, "__notes__", []))
    foreseen = isinstance(error, WeftError)
    report = {
        "kind": type(error).__name__,
        "foreseen": foreseen,
        # What torch, drivers and disks raise; anything else is a mistake in code, and will recur.
        "transient": getattr(
            error, "transient", isinstance(error, RuntimeError | OSError) and not foreseen
        ),
        "where": where,
        "message": f"{error}" + (f" ({where})" if where else ""),
        "traceback": text,
    }
    try:
        write_report(folder, rank, report, os.environ.get("TORCHELASTIC_ERROR_FILE"))
    except OSError:  # the launcher cannot know it then, but the user can
        print(f"weft: rank {rank} failed: {report['kind']}: {report['message']}", file=terminal)


def write_report(folder: Path, rank: int, report: dict[str, Any], torchrun: str | None) -> None:
    """Leave a rank's error where the launcher looks, and torchrun, if that is ``torchrun``'s file.

    Args:
        report: kind, foreseen, message, traceback; see `weft.cluster.launcher.Failure`.
    """
    write_json(error_path(folder, rank), {"rank": rank, "time": time.time(), **report})
    tell_torchrun(torchrun, f"{report['kind']}: {report['message']}", report["traceback"])


def read_reports(folder: Path, since: float = 0.0) -> list[dict[str, Any]]:
    """What the ranks of a run have left of their errors, the earliest first.

    Args:
        since: seconds since the epoch; reports from before are of an earlier attempt.
    """
    found = []
    for path in (folder / "logs").glob("rank-*.error.json"):
        with suppress(WeftError):  # it is damaged, or being written
            found.append(read_json(path))
    later = [report for report in found if _is_report(report) and report["time"] >= since]
    return sorted(later, key=lambda report: float(report["time"]))


def _is_report(report: dict[str, Any]) -> bool:
    types = {"rank": int, "time": float, "foreseen": bool, "transient": bool}
    types |= dict.fromkeys(("kind", "message", "traceback", "where"), str)
    return all(type(report.get(name)) is kind for name, kind in types.items())


def tell_torchrun(path: str | None, why: str, traceback: str) -> None:
    """Why a rank ends, as torchrun shows it of its own accord, in the form that it reads."""
    if path:
        extra = {"py_callstack": traceback, "timestamp": str(int(time.time()))}
        message = {"message": why, "extraInfo": extra}
        Path(path).write_text(json.dumps({"message": message}), "utf-8")


def leave(status: int) -> NoReturn:
    """End the process at once.

    An orderly exit after a failure would wait for peers that wait for this rank; after a success
    it tears down the threads of gloo, which now and then aborts the process (seen in torch 2.11).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def status(process: int) -> dict[str, str]:
    """Linux's ``/proc/ID/status``; empty if the process has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text("utf-8", "replace").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, value in (line.split(":", 1) for line in lines)}
