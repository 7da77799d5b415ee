"""Files by which a run and its batch script decide whether the job is requeued.

The batch script of a Slurm job (``templates/slurm.sh.j2``) creates the directory `REQUEUE_DIR` in
the run directory before it starts weft.  weft writes two files there, and the script reads them
after weft has ended, in any way:

``step``           the step of the checkpoint from which the run has started last
``final-failure``  why a restart would fail again; absent if a restart may succeed

The script counts the starts in a row from the same step, so that a job that makes no progress ends.
Both functions do nothing without the directory, and never fail a run.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from weft.config.files import replace_text

REQUEUE_DIR, STEP_FILE, FINAL_FAILURE_FILE = "requeue", "step", "final-failure"


def record_start(run_dir: Path, step: int) -> None:
    """Record the step of the committed checkpoint from which a run starts."""
    _write(run_dir, STEP_FILE, str(step))
    with suppress(OSError):
        (run_dir / REQUEUE_DIR / FINAL_FAILURE_FILE).unlink(missing_ok=True)


def record_final_failure(run_dir: Path, message: str) -> None:
    """Record that a run has failed, and would fail again."""
    _write(run_dir, FINAL_FAILURE_FILE, message)


def _write(run_dir: Path, name: str, text: str) -> None:
    directory = run_dir / REQUEUE_DIR
    if directory.is_dir():
        with suppress(OSError):
            replace_text(directory / name, f"{text}\n")
