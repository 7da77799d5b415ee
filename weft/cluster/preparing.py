"""Cache directory and progress display of data preparation; does not import torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from weft.config.escaping import escape_controls
from weft.config.schema import DataSection
from weft.data.prepared_cache import Progress as Preparation

LOG_SECONDS = 30.0  # between lines of one stage, if the output is not a terminal


def cache_dir(section: DataSection) -> Path:
    """Return the directory that ``data.cache_dir`` names."""
    if section.cache_dir != "auto":
        return Path(section.cache_dir).expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "weft"


@contextmanager
def show_progress(console: Console) -> Iterator[Callable[[Preparation], None]]:
    """Yield a callback that shows progress: a transient bar on a terminal, else lines.

    Without a terminal it prints one line per stage, and the time left every `LOG_SECONDS`.
    """
    if not console.is_terminal:
        stage, stage_start, last_log = "", 0.0, 0.0

        def log(progress: Preparation) -> None:
            nonlocal stage, stage_start, last_log
            now = time.monotonic()
            if progress.message != stage:
                stage, stage_start, last_log = progress.message, now, now
                console.print(stage, soft_wrap=True)
            elif progress.total and progress.done and now - last_log > LOG_SECONDS:
                last_log = now
                fraction = progress.done / progress.total
                left = (now - stage_start) * (1 - fraction) / fraction
                console.print(f"{stage}: {fraction:.0%}, {left / 60:.1f} min left", soft_wrap=True)

        yield log
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.percentage:3.0f}%"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        stage = ""

        def show(progress: Preparation) -> None:
            nonlocal stage
            if stage != progress.message:
                stage = progress.message
                bar.reset(task)  # the time left is that of this stage
            total = progress.total or None
            text = escape_controls(progress.message)
            bar.update(task, description=text, completed=progress.done, total=total)

        yield show
