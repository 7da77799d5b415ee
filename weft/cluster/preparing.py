"""Where prepared text is kept, and how preparation is shown.  Without torch: it starts quickly."""

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

LINE_SECONDS = 30.0  # between lines of a stage that goes on, where there is no terminal


def cache_folder(section: DataSection) -> Path:
    """The folder of ``data.cache_dir``."""
    if section.cache_dir != "auto":
        return Path(section.cache_dir).expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "weft"


@contextmanager
def showing(console: Console) -> Iterator[Callable[[Preparation], None]]:
    """How preparation goes: a bar that vanishes on a terminal, elsewhere a line for each stage,
    and one every half a minute with the time left."""
    if not console.is_terminal:
        said, begun, last = "", 0.0, 0.0

        def say(progress: Preparation) -> None:
            nonlocal said, begun, last
            now = time.monotonic()
            if progress.message != said:
                said, begun, last = progress.message, now, now
                console.print(said, soft_wrap=True)
            elif progress.total and progress.done and now - last > LINE_SECONDS:
                last = now
                share = progress.done / progress.total
                left = (now - begun) * (1 - share) / share
                console.print(f"{said}: {share:.0%}, {left / 60:.1f} min left", soft_wrap=True)

        yield say
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.percentage:3.0f}%"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        said = ""

        def show(progress: Preparation) -> None:
            nonlocal said
            if said != progress.message:
                said = progress.message
                bar.reset(task)  # the time left is of this stage
            total = progress.total or None
            text = escape_controls(progress.message)
            bar.update(task, description=text, completed=progress.done, total=total)

        yield show
