"""Log files, error reports and exit of a rank.

This module imports nothing heavy, because ranks use it before any other import.
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
from typing import Any, TextIO

from weft.config.errors import WeftError
from weft.config.escaping import escaping_stream
from weft.config.exit_statuses import FAILED
from weft.config.files import describe_cause, read_json, write_json


class TrainingFailed(WeftError):
    """The training failed; the message has the cause, the log and how to resume.

    Attributes:
        status: the exit status of ``weft train``.
        log: the log of the rank that failed first.
    """

    def __init__(self, message: str, status: int = FAILED, log: Path | None = None) -> None:
        super().__init__(message)
        self.status, self.log = status, log


def log_path(run_dir: Path, rank: int) -> Path:
    """Return the path of a rank's log."""
    return run_dir / "logs" / f"rank-{rank}.log"


def error_path(run_dir: Path, rank: int) -> Path:
    """Return the path of a failed rank's error report (JSON)."""
    return run_dir / "logs" / f"rank-{rank}.error.json"


def redirect_output(run_dir: Path, rank: int) -> TextIO:
    """Redirect stdout and stderr to the rank's log; return the original stdout."""
    path = log_path(run_dir, rank)
    terminal = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace", buffering=1)

    def report(error: OSError) -> None:
        with suppress(OSError):
            cause = describe_cause(error)
            print(f"warning: {path} cannot be written: {cause}. Training continues", file=terminal)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        error_path(run_dir, rank).unlink(missing_ok=True)
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
    """Stream of a rank's log; drops text that it cannot write, and warns once."""

    def __init__(self, number: int, report: Callable[[OSError], None]) -> None:
        super().__init__(number, "w", closefd=False)
        self._report: Callable[[OSError], None] | None = report

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            # A full disk must not end the run.
            if self._report is not None:
                self._report(error)
                self._report = None
            return len(memoryview(data).cast("B"))


def write_error(run_dir: Path, rank: int, error: BaseException, terminal: TextIO) -> None:
    """Write the error report for the launcher, and the traceback to the log."""
    text = "".join(traceback.format_exception(error))
    print(text, file=sys.stderr, flush=True)
    where = ", ".join(getattr(error, "__notes__", []))
    is_expected = isinstance(error, WeftError)
    report = {
        "kind": type(error).__name__,
        "is_expected": is_expected,
        # torch, drivers and disks raise these; any other error is a bug in code, and will recur.
        "transient": getattr(
            error, "transient", isinstance(error, RuntimeError | OSError) and not is_expected
        ),
        "where": where,
        "message": f"{error}" + (f" ({where})" if where else ""),
        "traceback": text,
    }
    try:
        write_error_report(run_dir, rank, report, os.environ.get("TORCHELASTIC_ERROR_FILE"))
    except OSError:  # the launcher cannot read it, so print it here
        print(f"weft: rank {rank} failed: {report['kind']}: {report['message']}", file=terminal)


def write_error_report(
    run_dir: Path, rank: int, report: dict[str, Any], torchrun: str | None
) -> None:
    """Write a rank's error report for the launcher and for torchrun.

    Args:
        run_dir: the report goes to its ``logs/``.
        rank: global rank of this process.
        report: kind, is_expected, message, traceback; see `weft.supervision.launcher.Failure`.
        torchrun: torchrun's error file for this rank, if torchrun started it.
    """
    write_json(error_path(run_dir, rank), {"rank": rank, "time": time.time(), **report})
    write_torchrun_error(torchrun, f"{report['kind']}: {report['message']}", report["traceback"])


def read_error_reports(run_dir: Path, since: float = 0.0) -> list[dict[str, Any]]:
    """Return the error reports of all ranks, earliest first.

    Args:
        run_dir: has the reports below ``logs/``.
        since: seconds since the epoch; older reports belong to an earlier attempt.
    """
    reports = []
    for path in (run_dir / "logs").glob("rank-*.error.json"):
        with suppress(WeftError):  # damaged, or still being written
            reports.append(read_json(path))
    recent = [report for report in reports if _is_error_report(report) and report["time"] >= since]
    return sorted(recent, key=lambda report: float(report["time"]))


def _is_error_report(report: dict[str, Any]) -> bool:
    types = {"rank": int, "time": float, "is_expected": bool, "transient": bool}
    types |= dict.fromkeys(("kind", "message", "traceback", "where"), str)
    return all(type(report.get(name)) is kind for name, kind in types.items())


def write_torchrun_error(path: str | None, message: str, traceback: str) -> None:
    """Write the error file that torchrun reads and prints for a failed rank."""
    if path:
        extra = {"py_callstack": traceback, "timestamp": str(int(time.time()))}
        report = {"message": message, "extraInfo": extra}
        Path(path).write_text(json.dumps({"message": report}), "utf-8")
